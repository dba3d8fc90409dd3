"""Too little memory is told before the first step, with numbers and with a way out that works."""

import json
import os
import re
import subprocess

import ballast_test
import common

MIB = 1024 * 1024

# Wide enough that activations bind: a lower plan is possible and costs recomputation.
SHAPE = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 8}
SETTINGS = {"seq_len": 64, "steps": 2, "eval": {"every": 0}, "save": {"every": 0}}


class Capacity(common.Case):
    def capacity_job(self, ranks, device_memory, arguments=(), strategy=None):
        settings = dict(SETTINGS, device_memory=device_memory)
        if strategy:
            settings["strategy"] = strategy
        return self.job(ranks, arguments, environment=common.DEFAULT, changes=SHAPE,
                        model=self.work.model("llama", layers=4), **settings)

    def plan(self, strategy=None, ranks=2):
        """What --plan --json answers, on this machine or any: (committed bytes, whole answer)."""
        config = self.capacity_job(ranks, "1GiB", strategy=strategy).config
        done = subprocess.run(
            [os.path.join(ballast_test.BIN, "ballast-worker"), "--config", config, "--plan",
             "--json", "--world", str(ranks)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60,
            check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        answer = json.loads(done.stdout)
        return max(phase["committed_bytes"] for phase in answer["phases"].values()), answer

    def refused(self, job):
        """A start that must not come to a step; its log."""
        job.start()
        job.wait(timeout_s=60, code=ballast_test.DOES_NOT_FIT)
        self.assert_gone(job, 3)
        self.assert_no_crash(job)
        self.assertFalse(os.path.exists(job.path("steps.jsonl")), "refused before the first step")
        self.assertFalse(os.path.exists(job.path("save")))
        return job.output()

    def check_report(self, text):
        """The same report as for a shortage on the way: who, what, how much of what, what to do."""
        head = re.search(r"out of memory: (\w+) phase, step 0, micro-step 0, rank 0 "
                         r"\(planned, before the first step\)\n +([\w, ]+?) \((\w+)", text)
        self.assertTrue(head, text)
        phase, tensor, category = head.groups()
        self.assertIn(phase, ("setup", "forward", "backward", "step", "eval"))
        self.assertIn(category, ("params", "grads", "optimizer", "activations", "temp", "comm"))
        self.assertRegex(text, r"[\d.]+ [KMG]iB asked")
        self.assertRegex(text, r"limit [\d.]+ [KMG]iB")
        self.assertRegex(text, r"held:.*params [\d.]+ [KMG]iB.*optimizer [\d.]+ [KMG]iB")
        self.assertIn("live at the planned peak of", text)
        self.assertRegex(
            text, r"the plan needs .* \(\d+ bytes\) in \w+, the limit is .* \(\d+ bytes\)")
        remedies = re.findall(r"^  \d+\. (\S+=\S+(?:[, ]+\S+=\S+)*): needs (.*)$", text, re.M)
        self.assertTrue(remedies, text)
        return phase, remedies

    def test_the_first_remedy_that_fits_does_fit(self):
        for ranks in (1, 2) if ballast_test.FULL else (2,):
            tried = 0
            needs, _ = self.plan(ranks=ranks)
            # From just below the plan downwards, granule by granule.
            for limit in range(needs - 2 * MIB, needs // 2, -2 * MIB if ballast_test.FULL
                               else -6 * MIB):
                with self.subTest(ranks=ranks, limit=limit):
                    text = self.refused(self.capacity_job(ranks, str(limit)))
                    _, remedies = self.check_report(text)
                    fitting = [words for words, rest in remedies if "does not fit" not in rest]
                    if not fitting:
                        continue
                    tried += 1
                    arguments = []
                    for setting in re.findall(r"[\w.]+=[\w:.]+", fitting[0]):
                        arguments += ["--set", setting]
                    job = self.capacity_job(ranks, str(limit), arguments)
                    job.run(timeout_s=60)
                    self.assertEqual(len(job.steps()), 2)
                    for line in job.steps():
                        self.assertLessEqual(max(line["peak_bytes"].values()), limit)
                    self.check_numbers(job, self.roomy(ranks), fitting[0])
            self.assertGreater(tried, 0, "no remedy that fits was ever offered")

    def roomy(self, ranks):
        """The run of the plan that needs more."""
        if not hasattr(self, "known"):
            self.known = {}
        if ranks not in self.known:
            self.known[ranks] = self.capacity_job(ranks, "1GiB").run()
        return self.known[ranks]

    def check_numbers(self, job, roomy, remedy):
        """The same numbers: to the bit, or to rounding where sums are made of other parts."""
        if "micro_batch" not in remedy and "tile" not in remedy:
            self.assertEqual(job.numbers(), roomy.numbers(), remedy)
            return
        for line, other in zip(job.steps(), roomy.steps()):
            for key in ("loss", "grad_norm"):
                self.assertLessEqual(abs(line[key] - other[key]), 1e-5 * other[key], remedy)

    def test_a_byte_more_or_less(self):
        needs, _ = self.plan()
        job = self.capacity_job(2, str(needs))
        job.run(timeout_s=60)
        self.refused(self.capacity_job(2, str(needs - 1)))

    def test_not_even_the_state(self):
        text = self.refused(self.capacity_job(2, "1MiB"))
        self.assertIn("out of memory: setup phase", text)
        self.assertIn("parameters, gradients and optimizer states", text)
        self.assertIn("limit 1.00 MiB", text)

    def test_plan_says_the_same_without_ranks(self):
        needs, _ = self.plan()
        config = self.capacity_job(2, str(needs - 1)).config
        done = subprocess.run(
            [os.path.join(ballast_test.BIN, "ballast-worker"), "--config", config, "--plan",
             "--world", "2"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60,
            check=False)
        self.assertEqual(done.returncode, ballast_test.DOES_NOT_FIT)
        self.assertIn(str(needs), done.stderr.decode())

    def test_a_switch_that_does_not_fit(self):
        # Started within its means; more is refused with the numbers, and nothing changes.
        low, _ = self.plan({"checkpointing": "block:1"})
        high, _ = self.plan()
        self.assertLess(low, high)
        limit = high - 2 * MIB
        job = self.capacity_job(2, str(limit), strategy={"checkpointing": "block:1"},
                                arguments=["--set", "pause_at=1"]).start()
        job.wait_paused(1)
        answer = job.ctl("set", "checkpointing=none", "--wait", code=ballast_test.CTL_REFUSED)
        said = answer.out + answer.err
        self.assertIn("does not fit", said)
        self.assertIn(str(high), said)
        self.assertIn(str(limit), said)
        status = job.ctl("status").json
        self.assertEqual(status["strategy"]["checkpointing"], "block:1")
        # What it would be is still told, and said not to fit.
        dry = job.ctl("set", "checkpointing=none", "--dry-run", code=None)
        self.assertIn("fit", dry.out + dry.err)
        job.ctl("resume")
        job.wait()
        self.assert_gone(job, 3)
        refused = job.events("refused")
        self.assertEqual(len(refused), 1)
        self.assertIn(str(high), refused[0]["text"])
        self.assertEqual(refused[0]["step"], 1)
        self.assertEqual(job.events("switch"), [])
        self.assertEqual(job.numbers(), self.roomy(2).numbers())


if __name__ == "__main__":
    ballast_test.main(limit_s=180, full_limit_s=1200)
