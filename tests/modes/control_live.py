"""Every verb of ballastctl on a real run of two ranks: what it answers is so, what it is asked
happens on all ranks, and what it must not do changes nothing."""

import base64
import json
import os
import subprocess

import ballast_test
from ballast_test import (BIN, CTL_CONNECT, CTL_OK, CTL_REFUSED, CTL_TIMEOUT, CTL_USAGE, DONE,
                          bits)

STEPS = 12


def total(entries, tier="device"):
    return sum(entry["bytes"] for entry in entries if entry["tier"] == tier)


def phases_of(plan):
    return {phase["phase"]: phase for phase in plan["phases"]}


class Control(ballast_test.Case):
    def start(self, pause_at=3, **keys):
        job = self.work.job(2, steps=STEPS, pause_at=pause_at, model=self.work.model("llama"),
                            eval_data=self.work.text(3000, seed=2), **keys).start()
        job.wait_paused(pause_at)
        return job

    def finish(self, job):
        job.ctl("resume")
        job.wait()
        job.check()

    # -- questions --

    def test_status(self):
        job = self.start()
        status = job.ctl("status").json
        line = job.steps()[-1]
        self.assertEqual(status["run_dir"], os.path.realpath(job.run_dir))
        self.assertEqual((status["world_size"], status["linked_ranks"]), (2, 2))
        self.assertEqual((status["step"], status["n_steps"]), (3, STEPS))
        self.assertEqual((status["doing"], status["paused"]), ("paused", True))
        self.assertEqual((status["health"], status["generation"]), ("OK", 0))
        self.assertEqual(status["strategy"], line["strategy"])
        self.assertEqual(status["last_step"], line)
        self.assertFalse(status["has_save"])
        self.assertEqual(status["plan"]["limit_bytes"], 64 << 20)
        for phase, planned in line["planned_bytes"].items():
            self.assertEqual(phases_of(status["plan"])[phase]["peak_bytes"], planned, phase)
        # For people: no JSON, the same facts.
        text = job.ctl("status", json_output=False).out
        for word in ("paused", "OK", "3 of %d steps" % STEPS, "backward", "64.0 MiB"):
            self.assertIn(word, text)
        job.ctl("set", "checkpointing=block:1", "--wait")
        after = job.ctl("status").json
        self.assertEqual((after["doing"], after["paused"], after["generation"]),
                         ("paused", True, 1))
        self.assertEqual(after["strategy"]["checkpointing"], "block:1")
        self.finish(job)

    def test_memory_and_ranks(self):
        job = self.start()
        line = job.steps()[-1]
        pids = job.rank_pids()
        memory = job.ctl("memory").json
        self.assertEqual([rank["rank"] for rank in memory["ranks"]], [0, 1])
        for rank in memory["ranks"]:
            self.assertTrue(rank["linked"])
            self.assertEqual(rank["pid"], pids[rank["rank"]])
            self.assertEqual(rank["limit_bytes"], 64 << 20)
            self.assertLessEqual(total(rank["memory"]), rank["committed_bytes"])
            self.assertLessEqual(rank["committed_bytes"], rank["limit_bytes"])
        self.assertEqual(memory["peak_bytes"], line["peak_bytes"])
        for phase, planned in line["planned_bytes"].items():
            at_peak = job.ctl("memory", "--at-peak", phase).json["at_peak"]
            self.assertEqual(at_peak["phase"], phase)
            self.assertEqual(at_peak["peak_bytes"], planned)
            # The categories are the peak, not a part of it, and so is what is alive.
            self.assertEqual(total(at_peak["at_peak"]), planned, phase)
            self.assertLessEqual(planned, at_peak["committed_bytes"])
        forward = job.ctl("memory", "--at-peak", "forward").json["at_peak"]
        self.assertIn("activations", [entry["category"] for entry in forward["at_peak"]])
        self.assertTrue(forward["live"])
        job.ctl("memory", "--at-peak", "sideways", code=CTL_USAGE)
        ranks = job.ctl("ranks").json["ranks"]
        self.assertEqual({rank["rank"]: rank["pid"] for rank in ranks}, pids)
        self.assertEqual({rank["linked"] for rank in ranks}, {True})
        self.finish(job)

    def test_steps_events_and_schema(self):
        job = self.start(pause_at=8)
        lines = job.steps()
        self.assertEqual(job.ctl("steps").json["steps"], lines)
        self.assertEqual(job.ctl("steps", "--count", 2).json["steps"], lines[-2:])
        self.assertEqual(job.ctl("steps", "--from", 3, "--count", 2).json["steps"], lines[3:5])
        job.ctl("set", "checkpointing=split", "--wait")
        events = job.ctl("events").json["events"]
        self.assertEqual([event["type"] for event in events], ["start", "pause", "switch"])
        self.assertEqual([event["sequence"] for event in events], [1, 2, 3])
        # The answer is the journal, line by line (which leaves out what is absent).
        for event, line in zip(events, job.events()):
            self.assertEqual({key: event[key] for key in line}, line)
        self.assertEqual(job.ctl("events", "--after", 2).json["events"], events[2:])
        schema = base64.b64decode(job.ctl("schema").json["file_descriptor_set"])
        for name in (b"ballast.control.v1", b"SetRequest", b"StepRecord"):
            self.assertIn(name, schema)
        path = self.work.fresh("schema")
        job.ctl("schema", "--output", path, json_output=False)
        with open(path, "rb") as file:
            self.assertEqual(file.read(), schema)
        oom = job.ctl("oom", code=CTL_REFUSED)
        self.assertEqual(oom.json["error"]["status"], "NOT_FOUND")
        self.finish(job)

    def test_watch_and_follow(self):
        job = self.start()
        samples = job.ctl("watch", "--count", 3, "--interval", 100).all_json
        self.assertEqual([sample["status"]["step"] for sample in samples], [3, 3, 3])
        self.assertEqual([len(sample["ranks"]) for sample in samples], [2, 2, 2])
        # Those that follow end with the run, having seen it to its end.
        followers = [subprocess.Popen(
            [os.path.join(BIN, "ballastctl"), *words, "--json", "--run-dir", job.run_dir],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
                     for words in (["events", "--follow"], ["watch", "--interval", "50"])]
        for follower in followers:
            self.addCleanup(follower.stdout.close)
            self.addCleanup(follower.wait)
            self.addCleanup(follower.kill)
            first = follower.stdout.readline()
            self.assertTrue(first.startswith(b"{"), first)
        self.finish(job)
        outputs = [follower.communicate(timeout=20)[0] for follower in followers]
        self.assertEqual([follower.returncode for follower in followers], [CTL_OK, CTL_OK])
        last = json.loads(outputs[0].splitlines()[-1])
        self.assertEqual((last.get("type"), last.get("steps")), ("end", STEPS), last)

    # -- what-if --

    def test_plan_and_dry_run(self):
        job = self.start()
        plan = job.ctl("plan").json
        before = phases_of(plan["before"])
        self.assertEqual(before["backward"]["peak_bytes"],
                         job.steps()[-1]["planned_bytes"]["backward"])
        for words in (["plan", "checkpointing=block:1"],
                      ["set", "checkpointing=block:1", "--dry-run"]):
            answer = job.ctl(*words).json
            self.assertEqual(phases_of(answer["before"]), before)
            after = phases_of(answer["after"])
            self.assertEqual(answer["after"]["strategy"]["checkpointing"], "block:1")
            self.assertLess(after["forward"]["peak_bytes"], before["forward"]["peak_bytes"])
            self.assertGreater(answer["after"]["flops_per_step"],
                               answer["before"]["flops_per_step"])
            self.assertTrue(answer["after"]["fits"])
        status = job.ctl("status").json
        self.assertEqual((status["generation"], status["strategy"]["checkpointing"]), (0, "none"))
        # What was promised is what happens, byte for byte.
        job.ctl("set", "checkpointing=block:1", "--wait")
        job.ctl("resume", "--for", 1)
        job.wait_paused(4)
        line = job.steps()[-1]
        for phase in ("forward", "backward", "step"):
            self.assertEqual(line["peak_bytes"][phase], after[phase]["peak_bytes"])
        # The global batch is held: a smaller micro-batch comes more often.
        smaller = job.ctl("plan", "micro_batch=1").json["after"]
        self.assertEqual(smaller["accumulation"], 4)
        refused = job.ctl("set", "micro_batch=3", "--wait", code=CTL_REFUSED)
        self.assertIn("3", refused.json["error"]["text"])
        self.finish(job)

    # -- changes --

    def test_set_and_undo(self):
        job = self.start()
        self.assertEqual(job.ctl("undo", "--wait", code=CTL_REFUSED).json["error"]["status"],
                         "REFUSED")
        answer = job.ctl("set", "checkpointing=block:2", "checkpointing.layers=2", "--wait").json
        self.assertEqual((answer["step"], answer["generation"]), (3, 1))
        self.assertEqual(answer["before"]["strategy"]["checkpointing"], "none")
        self.assertEqual(answer["after"]["strategy"]["checkpointing"], "block:2")
        # Setting what is there is no change.
        same = job.ctl("set", "checkpointing=block:2", "--wait").json
        self.assertEqual(same["generation"], 1)
        conflict = job.ctl("set", "checkpointing=split", "--if-generation", 0, "--wait",
                           code=CTL_REFUSED)
        self.assertEqual(conflict.json["error"]["status"], "CONFLICT")
        conflict = job.ctl("undo", "--if-generation", 0, "--wait", code=CTL_REFUSED)
        self.assertEqual(conflict.json["error"]["status"], "CONFLICT")
        job.ctl("set", "checkpointing=split", "--if-generation", 1, "--wait")
        undone = job.ctl("undo", "--if-generation", 2, "--wait").json
        self.assertEqual(undone["generation"], 3)
        strategy = job.ctl("status").json["strategy"]
        self.assertEqual((strategy["checkpointing"], strategy["checkpointing.layers"]),
                         ("block:2", 2))
        # Without --wait the acceptance is the answer, and the change comes all the same.
        job.ctl("set", "checkpointing=selective")
        job.ctl("wait", "--for", "generation=4")
        for event in job.events("switch"):
            self.assertTrue(event["who"].startswith("uid %d" % os.getuid()), event)
        self.assertEqual([event["generation"] for event in job.events("switch")], [1, 2, 3, 4])
        self.finish(job)
        self.assertEqual([line["generation"] for line in job.steps()],
                         [0] * 3 + [4] * (STEPS - 3))

    def test_wrong_values_change_nothing(self):
        job = self.start()
        before = job.ctl("status").json
        for change, status, word in (
                ("checkpointing=bogus", "INVALID", "none|selective|split|block:K"),
                ("checkpointing=block:0", None, "block:"),
                ("checkpointing=block:4", "OUT_OF_RANGE", "3"),
                ("checkpointing=block:-1", None, "block:"),
                ("checkpointing=block:99999999999999999999", None, "block:"),
                ("checkpointing.layers=4", "OUT_OF_RANGE", "3"),
                ("checkpointing.layers=-1", None, "checkpointing.layers"),
                ("checkpointing.layers=1.5", None, "checkpointing.layers"),
                ("micro_batch=0", None, "micro_batch"),
                ("micro_batch=3", "CONFLICT", "8"),
                ("loss_tile=many", None, "loss_tile"),
                ("zero.stage=4", None, "zero.stage"),
                ("offload.optimizer=nvme", "UNSUPPORTED", "offload.optimizer"),
                ("sequence_parallel=2", "UNSUPPORTED", "sequence_parallel"),
                ("bogus=1", "UNKNOWN_KEY", "checkpointing"),
                ("Checkpointing=none", "UNKNOWN_KEY", "checkpointing"),
                ("checkpointing=b\u00f6gus\u202e", "INVALID", "\u202e")):
            for more in ([], ["--wait"], ["--dry-run"]):
                with self.subTest(change=change, more=more):
                    answer = job.ctl("set", change, *more, code=CTL_REFUSED)
                    error = answer.json["error"]
                    if status:
                        self.assertEqual(error["status"], status)
                    self.assertIn(word, error["text"])
                    # The same for people, with nothing that would upset a terminal.
                    self.assertIn(error["text"].replace("\u202e", "\\u202e"), answer.err)
        # One wrong key among good ones: none is taken.
        job.ctl("set", "checkpointing=split", "checkpointing.layers=9", "--wait", code=CTL_REFUSED)
        for words in (["set"], ["set", "checkpointing"], ["set", "=1"], ["frobnicate"],
                      ["resume", "--for", "0"], ["resume", "--for", "x"], ["wait"],
                      ["wait", "--for", "step=-1"], ["wait", "--for", "moon"],
                      ["status", "--at-peak", "forward"], ["steps", "--count", "x"],
                      ["watch", "--interval", "1"], ["set", "checkpointing=none", "--bogus"]):
            with self.subTest(words=words):
                job.ctl(*words, code=CTL_USAGE)
        after = job.ctl("status").json
        for key in ("strategy", "generation", "step", "paused", "plan", "doing"):
            self.assertEqual(after[key], before[key], key)
        self.assertEqual(job.events("switch"), [])
        self.finish(job)
        plain = self.work.job(2, steps=STEPS, model=self.work.model("llama")).run()
        self.assertEqual(plain.numbers(), job.numbers())

    def test_change_that_does_not_fit(self):
        """Over device_memory: refused with the numbers, and training goes on as it was."""
        big = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 16}
        keys = {"model": self.work.model("llama"), "seq_len": 128, "steps": 4}
        roomy = self.work.job(2, big, device_memory="1GiB", strategy={"checkpointing": "block:1"},
                              pause_at=2, **keys).start()
        roomy.wait_paused(2)
        plan = roomy.ctl("plan", "checkpointing=none").json
        committed = max(phase["committed_bytes"] for phase in plan["after"]["phases"])
        kept = max(phase["committed_bytes"] for phase in plan["before"]["phases"])
        self.assertGreater(committed, kept + (8 << 20))
        roomy.ctl("resume")
        roomy.wait()
        limit = committed - 1
        tight = self.work.job(2, big, device_memory=limit, strategy={"checkpointing": "block:1"},
                              pause_at=2, **keys).start()
        tight.wait_paused(2)
        dry = tight.ctl("set", "checkpointing=none", "--dry-run").json
        self.assertFalse(dry["after"]["fits"])
        self.assertTrue(dry["before"]["fits"])
        refused = tight.ctl("set", "checkpointing=none", "--wait", code=CTL_REFUSED)
        self.assertEqual(refused.json["error"]["status"], "DOES_NOT_FIT")
        for number in (committed, limit):
            self.assertIn(str(number), refused.json["error"]["text"])
        self.assertIn(str(limit), tight.events("refused")[0]["text"])
        status = tight.ctl("status").json
        self.assertEqual((status["generation"], status["strategy"]["checkpointing"]),
                         (0, "block:1"))
        tight.ctl("resume")
        tight.wait()
        tight.check()
        self.assertEqual(tight.numbers(), roomy.numbers())
        # One byte more: what is said to fit does.
        exact = self.work.job(2, big, device_memory=committed,
                              strategy={"checkpointing": "block:1"}, pause_at=2, **keys).start()
        exact.wait_paused(2)
        exact.ctl("set", "checkpointing=none", "--wait")
        exact.ctl("resume")
        exact.wait()
        exact.check()
        self.assertEqual(exact.numbers(), roomy.numbers())

    # -- the run's course --

    def test_save_eval_pause_resume_stop(self):
        job = self.start()
        saved = job.ctl("save").json
        self.assertEqual(saved["step"], 3)
        self.assertEqual(saved["path"], os.path.realpath(job.path("save", "step-3")))
        self.assertTrue(os.path.isdir(saved["path"]))
        status = job.ctl("status").json
        self.assertEqual((status["has_save"], status["last_save_step"]), (True, 3))
        first = job.ctl("eval").json
        self.assertEqual(first["step"], 3)
        self.assertGreater(first["tokens"], 2000)
        again = job.ctl("eval").json
        self.assertEqual(bits(first["loss"]), bits(again["loss"]))
        for event in job.events("eval"):
            self.assertEqual(event["peak_bytes"],
                             phases_of(status["plan"])["eval"]["peak_bytes"])
        job.ctl("resume", "--for", 2)
        job.wait_paused(5)
        # Asked for while paused; a pause of a paused run is no error.
        self.assertEqual(job.ctl("pause").json["step"], 5)
        job.ctl("wait", "--for", "step=%d" % STEPS, code=CTL_TIMEOUT, timeout_s=1)
        never = job.ctl("wait", "--for", "step=%d" % (STEPS + 1), code=CTL_REFUSED)
        self.assertIn(str(STEPS), never.json["error"]["text"])
        self.assertEqual(job.ctl("wait", "--for", "step=5").json["step"], 5)
        stopped = job.ctl("stop")
        self.assertEqual(stopped.code, CTL_OK)
        job.wait(code=DONE)
        job.check()
        self.assertEqual(job.end()["steps"], 5)
        # The run is over: who waits for its end has it, and nobody answers questions any more.
        job.wait_gone()
        job.ctl("wait", "--for", "end")
        job.ctl("status", code=CTL_CONNECT)

    def test_pause_while_running(self):
        big = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}
        job = self.work.job(2, big, seq_len=64, steps=2000).start()
        job.ctl("wait", "--for", "step=2")
        paused = job.ctl("pause").json["step"]
        status = job.ctl("status").json
        self.assertEqual((status["step"], status["paused"], status["doing"]),
                         (paused, True, "paused"))
        self.assertEqual(len(job.steps()), paused)
        job.ctl("save")
        self.assertEqual(job.events("save")[-1]["step"], paused)
        job.ctl("resume")
        job.ctl("wait", "--for", "step=%d" % (paused + 3))
        # The same verbs while it trains.
        self.assertGreaterEqual(job.ctl("save").json["step"], paused + 3)
        self.assertIn("block:1", str(job.ctl("plan", "checkpointing=block:1").json["after"]))
        self.assertFalse(job.ctl("status").json["paused"])
        no_data = job.ctl("eval", code=CTL_REFUSED)
        self.assertIn("eval_data", no_data.json["error"]["text"])
        job.ctl("stop")
        job.wait()
        job.check()


if __name__ == "__main__":
    ballast_test.main()
