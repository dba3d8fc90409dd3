"""A run that is killed and resumed is the run that was never touched, bit for bit.

Losses, gradient norms and final weights of the joined steps.jsonl, each step once; after a
switch, over epoch edges with shuffled data, from a chosen save; also after `ballastctl stop` and
after SIGUSR1. What cannot be resumed is refused with its reason and exit code."""

import os
import random
import shutil
import signal
import time

import ballast_test
from ballast_test import CONFIG, FULL, NO_SAVE, SAVED_ON_SIGNAL, bits

SAVE_3 = {"every": 3}
# mpirun need not sleep before it hands on a code other than 0: the ranks have ended by then.
QUICK = {"OMPI_MCA_odls_base_sigkill_timeout": "0"}


def contents(path):
    with open(path, "rb") as file:
        return file.read()


class Resume(ballast_test.Case):
    maxDiff = 4000

    def setUp(self):
        super().setUp()
        self.work.environment.update(QUICK)

    def killed_at(self, step, then=(), **keys):
        """A run killed whole while it stands after `step` steps, `then` having been set."""
        job = self.work.job(arguments=["--set", "pause_at=%d" % step], **keys).start()
        job.wait_paused(step)
        if then:
            job.ctl("set", *then, "--wait")
        job.kill_all()
        return job

    def resumed(self, job, *arguments, resume="latest", code=0):
        return self.work.again(job, ["--resume", resume] + list(arguments)).run(code=code)

    def test_kill_and_resume(self):
        for model, ranks in (("t0", 2), ("gpt2-tiny", 4), ("t0", 1)):
            with self.subTest(model=model, ranks=ranks):
                keys = {"ranks": ranks, "model": model, "steps": 8, "save": SAVE_3}
                plain = self.work.job(**keys).run()
                job = self.killed_at(5, **keys)
                self.assertEqual([line["step"] for line in job.steps()], [0, 1, 2, 3, 4])
                self.resumed(job)
                self.assertEqual(plain.numbers(), job.numbers())
                self.assertEqual([event["step"] for event in job.events("start")], [0, 3])

    def test_kill_after_a_switch(self):
        keys = {"steps": 10, "save": SAVE_3}
        plain = self.work.job(**keys).run()
        job = self.work.job(arguments=["--set", "pause_at=1"], **keys).start()
        job.wait_paused(1)
        job.ctl("set", "checkpointing=block:1", "--wait")
        job.ctl("resume", "--for", 3)
        job.wait_paused(4)
        job.kill_all()
        second = self.work.again(job, ["--resume", "latest", "--set", "pause_at=5"]).start()
        second.wait_paused(5)
        second.ctl("set", "checkpointing=split", "--wait")
        second.ctl("resume", "--for", 2)
        second.wait_paused(7)
        second.kill_all()
        self.resumed(job, "--set", "checkpointing=block:2")
        self.assertEqual(plain.numbers(), job.numbers())
        modes = [line["strategy"]["checkpointing"] for line in job.steps()]
        # The strategy in force at the save goes on; a changed configuration wins over it.
        self.assertEqual(modes[0:5], ["none"] + ["block:1"] * 4)
        self.assertEqual(modes[5:], ["split"] + ["block:2"] * 4)

    def test_kill_at_any_moment(self):
        """Not while it waits: in the middle of steps and of saves."""
        draw = random.Random(5)
        keys = {"ranks": 2, "steps": 40, "save": {"every": 2, "keep": 2}}
        plain = self.work.job(**keys).run()
        for round_number in range(12 if FULL else 2):
            with self.subTest(round=round_number):
                job = self.work.job(**keys).start()
                job.ctl("wait", "--for", "step=3")  # the first save is whole
                for longest_s in (0.15, 0.8, 0.8):
                    # The moment is what varies, from its launch on; nothing is waited for here.
                    time.sleep(draw.uniform(0.0, longest_s))
                    job.kill_all()
                    job = self.work.again(job).start()
                job.wait()
                job.check()
                self.assertEqual(plain.numbers(), job.numbers())
                kept = sorted(os.listdir(job.path("save")))
                self.assertEqual(kept, ["step-38", "step-40"])

    def test_shuffled_epochs(self):
        """2.5 epochs of 20 steps; killed at step 7, at the epoch's edge, and at step 33."""
        batch, seq_len, epoch = 8, 16, 20
        keys = {"ranks": 2, "seq_len": seq_len, "steps": epoch * 5 // 2, "save": {"every": 5},
                "data": self.work.text(batch * epoch * seq_len + 1), "shuffle": True}
        plain = self.work.job(**keys).run()
        job = self.killed_at(7, **keys)
        for step in (20, 33):
            again = self.work.again(job, ["--resume", "latest", "--set", "pause_at=%d" % step])
            again.start().wait_paused(step)
            again.kill_all()
        self.resumed(job)
        self.assertEqual(plain.numbers(), job.numbers())
        self.assertEqual([event["step"] for event in job.events("start")], [0, 5, 20, 30])

    def test_each_sample_once_an_epoch(self):
        """Weights that never move make a sample's loss its name: with one sample a step, the
        losses of every epoch are the same set in another order."""
        n, seq_len = 30, 16
        still = {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1,
                 "optimizer": {"params": {"lr": 0}}, "scheduler": None}
        keys = {"ranks": 1, "changes": still, "dropout": 0, "seq_len": seq_len, "steps": n * 5 // 2,
                "data": self.work.text(n * seq_len + 1), "save": {"every": 5}}
        job = self.killed_at(37, **keys)
        self.resumed(job)
        losses = [bits(line["loss"]) for line in job.steps()]
        epochs = [losses[:n], losses[n:2 * n], losses[2 * n:]]
        self.assertEqual(len(set(epochs[0])), n, "two samples have one loss")
        self.assertEqual(sorted(epochs[0]), sorted(epochs[1]))
        self.assertNotEqual(epochs[0], epochs[1])
        self.assertEqual(len(set(epochs[2])), n // 2)
        self.assertLess(set(epochs[2]), set(epochs[0]))
        in_order = self.work.job(shuffle=False, **keys).run()
        losses = [bits(line["loss"]) for line in in_order.steps()]
        self.assertEqual(losses[:n], losses[n:2 * n])
        self.assertEqual(sorted(losses[:n]), sorted(epochs[0]))

    def test_chosen_save(self):
        plain = self.work.job(steps=8, save={"every": 2}).run()
        weights = plain.numbers()
        again = self.resumed(plain, resume="4")
        self.assertEqual(again.numbers(), weights)
        self.assertEqual(again.events("start")[-1]["step"], 4)
        # Step 5 was never saved.
        missing = self.work.again(plain, ["--resume", "5"]).run(code=NO_SAVE)
        self.assertIn("5", missing.output())
        self.assertEqual(len(plain.steps()), 8)

    def test_finished_run(self):
        job = self.work.job(steps=4, save={"every": 2}).run()
        numbers = job.numbers()
        before = contents(job.path("steps.jsonl"))
        self.resumed(job)
        self.assertEqual(job.numbers(), numbers)
        self.assertEqual(contents(job.path("steps.jsonl")), before)
        # More steps than before: it goes on.
        more = self.resumed(job, "--steps", "7")
        self.assertEqual([line["step"] for line in more.steps()], list(range(7)))
        self.assertEqual(contents(job.path("steps.jsonl"))[:len(before)], before)

    def test_finished_without_a_save(self):
        job = self.work.job(steps=2).run()
        again = self.resumed(job)
        self.assertIn("nothing left to do", again.output())
        self.assertEqual(len(job.steps()), 2)

    def test_used_directory(self):
        job = self.work.job(steps=2).run()
        files = {name: contents(job.path(name)) for name in ("steps.jsonl", "events.jsonl")}
        again = self.work.again(job, []).run(code=CONFIG)
        self.assertIn("--resume latest", again.output())
        for name, content in files.items():
            self.assertEqual(contents(job.path(name)), content, name)

    def test_other_configuration(self):
        job = self.work.job(steps=4, save={"every": 2}).run()
        for change, word in (("seed=8", "seed"), ("seq_len=16", "seq_len"),
                             ("train_batch_size=4", "global_batch")):
            with self.subTest(change):
                again = self.work.again(job, ["--resume", "latest", "--set", change])
                again.run(code=CONFIG)
                self.assertIn(word, again.output())
        self.assertEqual(len(job.steps()), 4)

    def test_other_number_of_ranks(self):
        """Saves are keyed by tensor, not by rank: the same rows in the same order, to 1e-5."""
        plain = self.work.job(2, steps=8).run()
        for ranks in (1, 4):
            with self.subTest(ranks=ranks):
                job = self.killed_at(5, ranks=2, steps=8, save=SAVE_3)
                self.work.again(job, ranks=ranks).run()
                for line, other in zip(job.steps(), plain.steps()):
                    for key in ("loss", "grad_norm"):
                        self.assertLess(abs(line[key] / other[key] - 1), 1e-5)
                    if line["step"] < 3:
                        self.assertEqual(bits(line["loss"]), bits(other["loss"]))
                self.assertEqual(len(job.steps()), 8)

    def test_without_any_save(self):
        job = self.killed_at(2, steps=4)
        self.resumed(job, code=NO_SAVE)
        # Nor in a directory that never saw a run.
        empty = self.work.job(steps=2, arguments=["--resume", "latest"]).run(code=NO_SAVE)
        self.assertIn("save", empty.output())

    def test_damaged_save(self):
        """The newest whole one is taken."""
        plain = self.work.job(steps=8, save={"every": 2}).run()
        job = self.killed_at(7, steps=8, save={"every": 2})
        newest = job.path("save", "step-6")
        shards = sorted(name for name in os.listdir(newest) if "manifest" not in name)
        with open(os.path.join(newest, shards[-1]), "r+b") as file:
            file.seek(-5, os.SEEK_END)
            byte = file.read(1)
            file.seek(-5, os.SEEK_END)
            file.write(bytes([byte[0] ^ 1]))
        self.resumed(job)
        self.assertEqual(job.events("start")[-1]["step"], 4)
        self.assertEqual(plain.numbers(), job.numbers())
        shutil.rmtree(job.path("save"))

    def test_signal_saves_and_ends(self):
        plain = self.work.job(steps=9).run()
        for pause in (True, False):
            with self.subTest(paused=pause):
                arguments = ["--set", "pause_at=3"] if pause else []
                job = self.work.job(steps=9 if pause else 3000, arguments=arguments).start()
                if pause:
                    job.wait_paused(3)
                else:
                    job.ctl("wait", "--for", "step=3")
                os.kill(job.mpirun_pid(), signal.SIGUSR1)
                job.wait(code=SAVED_ON_SIGNAL)
                job.check()
                job.wait_gone()
                saved = job.events("save")[-1]["step"]
                self.assertEqual(job.end()["exit_code"], SAVED_ON_SIGNAL)
                self.assertEqual(saved, len(job.steps()))
                if pause:
                    self.assertEqual(saved, 3)
                    self.resumed(job)
                    self.assertEqual(plain.numbers(), job.numbers())

    def test_stop(self):
        plain = self.work.job(steps=9).run()
        for pause in (True, False):
            with self.subTest(paused=pause):
                arguments = ["--set", "pause_at=4"] if pause else []
                job = self.work.job(steps=9 if pause else 3000, arguments=arguments).start()
                if pause:
                    job.wait_paused(4)
                else:
                    job.ctl("wait", "--for", "step=4")
                job.ctl("stop")
                job.wait()
                job.check()
                self.assertEqual(job.end()["steps"], len(job.steps()))
                # "save and end": it can go on from where it stood.
                self.assertEqual(job.events("save")[-1]["step"], len(job.steps()))
                if pause:
                    self.resumed(job)
                    self.assertEqual(plain.numbers(), job.numbers())


if __name__ == "__main__":
    ballast_test.main()
