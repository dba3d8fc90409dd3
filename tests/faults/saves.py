"""A save is all or nothing: ranks killed at random moments of many saves, a disk that fills up, and
every file operation failing in turn. The next start always goes on from the newest save that was
complete, bit for bit; a failed save costs itself and nothing else."""

import json
import os
import random
import re
import shutil
import subprocess
import time

import ballast_test
import common

REFERENCE_STEPS = 400
CONSTANT_RATE = {"scheduler": None}


def trace(lines):
    return {line["step"]: (ballast_test.bits(line["loss"]), ballast_test.bits(line["grad_norm"]))
            for line in lines}


def number(name):
    return int(name[5:])


class Kills(common.Case):
    """kill -9 of a random rank, or of the whole job, at random moments of repeated saves."""

    RANKS = 2

    def saving_job(self, **settings):
        return self.job(self.RANKS, changes=CONSTANT_RATE, eval_data=None, eval=None, **settings)

    def right_numbers(self):
        if not hasattr(Kills, "undisturbed"):
            job = self.saving_job(steps=REFERENCE_STEPS, save={"every": 0})
            Kills.undisturbed = trace(job.run().steps())
        return Kills.undisturbed

    def kill_one(self, job, draw):
        """At a random moment after at least one save of this launch."""
        at = len(job.events("save")) if os.path.exists(job.path("events.jsonl")) else 0
        ballast_test.wait_until(
            lambda: os.path.exists(job.path("events.jsonl"))
            and common.read(job.path("events.jsonl")).count('"type":"save"') > at,
            60, "a save")
        ranks = job.wait_for_ranks()
        time.sleep(draw.uniform(0, 0.08))
        if draw.randrange(4) == 0:
            for pid in job.pids():
                ballast_test.kill(pid)
        else:
            ballast_test.kill(ranks[draw.randrange(self.RANKS)])
        try:
            code = job.process.wait(common.END_S)
        except subprocess.TimeoutExpired:
            self.fail("mpirun does not end")
        self.assertNotEqual(code, 0)
        self.assert_gone(job)

    def test_random_moments(self):
        draw = random.Random(23)
        times, a_run = (200, 8) if ballast_test.FULL else (10, 5)
        right, job, promised = self.right_numbers(), None, 0
        for count in range(times):
            with self.subTest(kill=count):
                if count % a_run == 0:
                    if job is not None:
                        self.finish(job, right)
                    job, promised = self.saving_job(steps=100000, save={"every": 1, "keep": 2}), 0
                else:
                    job = self.work.again(job, environment=common.QUICK)
                job.start()
                self.kill_one(job, draw)
                self.assert_saves_whole(job)
                names = common.saves(job)
                newest = number(names[-1])
                # A save that was told is there, or its successor.
                told = max(event["step"] for event in job.events("save"))
                self.assertGreaterEqual(newest, max(told, promised))
                promised = newest
                starts = [event["step"] for event in job.events("start")]
                if count % a_run:
                    self.assertEqual(starts[-1], before, "the newest complete save")
                before = newest
        self.finish(job, right)

    def finish(self, job, right):
        newest = number(common.saves(job)[-1])
        again = self.work.again(job, ["--resume", "latest", "--steps", str(newest + 2)],
                                environment=common.QUICK)
        again.start()
        again.wait()
        self.assertEqual(again.events("start")[-1]["step"], newest)
        lines = again.steps()
        ballast_test.check_steps(lines)
        self.assertEqual(len(lines), newest + 2)
        got = trace(lines)
        for step in sorted(set(got) & set(right)):
            self.assertEqual(got[step], right[step], "step %d" % step)
        # Nothing half-done is left beside the saves.
        self.assertEqual([name for name in os.listdir(job.path("save"))
                          if not re.fullmatch(r"step-\d+", name)], [])


class Full(common.Case):
    """The disk fills up: the former save stays, the error says so, training goes on."""

    def mount(self, path, size):
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=%s" % size, "tmpfs", path],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        if done.returncode != 0:
            self.skipTest("no tmpfs can be mounted here: %s" % done.stdout.decode().strip())
        self.work.closers.append(lambda: subprocess.run(["umount", "-l", path], check=False))

    def test_no_space(self):
        for ranks in (1, 2):
            with self.subTest(ranks=ranks):
                # The state of t0 is 1.5 MB: one save fits, a second beside it does not.
                job = self.job(ranks, steps=6, save={"every": 2})
                os.makedirs(job.path("save"))
                self.mount(job.path("save"), "2m")
                job.start()
                job.wait(code=ballast_test.NO_SAVE)  # the last one could not be made either
                self.assert_gone(job, 3)
                self.assert_no_crash(job)
                self.assertEqual(len(job.steps()), 6, "training went on")
                self.assertEqual(common.saves(job), ["step-2"])
                self.assertEqual(os.listdir(job.path("save")), ["step-2"], "nothing half-done")
                refused = [event["text"] for event in job.events("refused")]
                self.assertEqual(len(refused), 3)  # after 4, after 6, and at the end
                for text in refused:
                    self.assertIn("ENOSPC", text)
                    self.assertRegex(text, r"\d+ bytes are free there")
                self.assertEqual([event["step"] for event in job.events("save")], [2])
                self.assertEqual(job.end()["exit_code"], ballast_test.NO_SAVE)
                # With room again the run goes on from the save that was kept.
                again = self.work.again(job, ["--resume", "latest", "--set", "save.keep=1",
                                              "--set", "save.every=0"], environment=common.QUICK)
                again.start()
                again.wait()
                self.assertEqual(again.events("start")[-1]["step"], 2)
                self.assertEqual(again.numbers(), self.reference(ranks))

    def test_no_permission_to_make_the_folder(self):
        job = self.job(2, steps=4, save={"every": 2})
        os.makedirs(job.path())
        with open(job.path("save"), "w", encoding="utf-8") as file:
            file.write("not a folder\n")
        job.start()
        job.wait(code=ballast_test.NO_SAVE)
        self.assertEqual(len(job.steps()), 4)
        self.assertIn("ENOTDIR", job.events("refused")[0]["text"])
        self.assertEqual(common.read(job.path("save")), "not a folder\n", "left alone")


class FileOperations(common.Case):
    """`--fault io:nth=N`, N = 1, 2, 3, ..., once and for ever."""

    def setUp(self):
        super().setUp()
        self.environment = dict(os.environ, **self.work.environment)
        self.environment.update(common.QUICK)
        self.config = self.job(1, changes=CONSTANT_RATE, steps=4, eval_data=None, eval=None,
                               save={"every": 2, "keep": 1}).config

    def launch(self, run_dir, ranks, arguments):
        outcome = common.launch(self.config, run_dir, self.environment, ranks, arguments)
        self.assertFalse(outcome.hung, outcome.output[-2000:])
        for mark in ("Signal:", "Assertion", "AddressSanitizer", "the plan is not exact"):
            self.assertNotIn(mark, outcome.output)
        ballast_test.wait_until(lambda: not ballast_test.processes_of(run_dir), 5, "the end")
        return outcome

    def names(self, run_dir):
        folder = os.path.join(run_dir, "save")
        found = os.listdir(folder) if os.path.isdir(folder) else []
        return sorted(name for name in found if re.fullmatch(r"step-\d+", name))

    def end_of(self, run_dir):
        with open(os.path.join(run_dir, "events.jsonl"), encoding="utf-8") as file:
            ends = [json.loads(line) for line in file if '"type":"end"' in line]
        return ends[-1]

    def right_end(self, ranks):
        key = "right_%d" % ranks
        if not hasattr(self, key):
            run_dir = self.work.fresh("right")
            self.assertEqual(self.launch(run_dir, ranks, []).code, 0)
            setattr(self, key, self.end_of(run_dir)["weights_xxh3"])
        return getattr(self, key)

    def write_once(self, ranks, rank, nth, for_ever):
        """One run whose nth file operation fails; was there one?"""
        fault = "io:rank=%d,nth=%d%s" % (rank, nth, ",repeat=0" if for_ever else "")
        run_dir = self.work.fresh("run")
        outcome = self.launch(run_dir, ranks, ["--allow-faults", "--fault", fault])
        if not outcome.injected:
            return False
        with open(os.path.join(run_dir, "steps.jsonl"), encoding="utf-8") as file:
            self.assertEqual(len(file.readlines()), 4, "training goes on")
        self.assertIn(outcome.code, (0, ballast_test.NO_SAVE), outcome.output[-2000:])
        names = self.names(run_dir)
        if outcome.code == 0:
            self.assertIn("step-4", names)
        if for_ever and nth == 1:
            self.assertEqual((outcome.code, names), (ballast_test.NO_SAVE, []))
        if outcome.code != 0:
            self.assertIn("EIO", outcome.output)
        if names:
            # Whatever is there loads, and leads to the same end.
            again = self.launch(run_dir, ranks, ["--resume", "latest"])
            self.assertEqual(again.code, 0, again.output[-2000:])
            self.assertEqual(self.end_of(run_dir)["weights_xxh3"], self.right_end(ranks))
        shutil.rmtree(run_dir)
        return True

    def read_once(self, ranks, rank, nth, for_ever, ended):
        """One resume whose nth file operation fails; was there one?"""
        fault = "io:rank=%d,nth=%d%s" % (rank, nth, ",repeat=0" if for_ever else "")
        run_dir = self.work.fresh("run")
        shutil.copytree(ended, run_dir)
        outcome = self.launch(run_dir, ranks, ["--resume", "latest", "--set", "save.every=0",
                                               "--allow-faults", "--fault", fault])
        injected = outcome.injected
        if injected:
            self.assertIn("EIO", outcome.output)
            self.assertIn(outcome.code, (0, ballast_test.FAILED, ballast_test.NO_SAVE),
                          outcome.output[-2000:])
            # Bytes that could not be read are not taken for others.
            if outcome.code == 0:
                self.assertEqual(self.end_of(run_dir)["weights_xxh3"], self.right_end(ranks))
            again = self.launch(run_dir, ranks, ["--resume", "latest"])
            self.assertEqual(again.code, 0, again.output[-2000:])
            self.assertEqual(self.end_of(run_dir)["weights_xxh3"], self.right_end(ranks))
        shutil.rmtree(run_dir)
        return injected

    def sweep(self, one, numbers):
        """Numbers in order until there is nothing to fail; how many there were."""
        n = 0
        for nth in numbers:
            if not one(nth):
                break
            n += 1
        return n

    def test_every_write(self):
        cells = [(1, 0), (2, 0), (2, 1)]
        for ranks, rank in cells:
            for for_ever in (False, True):
                with self.subTest(ranks=ranks, rank=rank, for_ever=for_ever):
                    numbers = (1, 5) if rank or ranks == 1 else (4, 13)
                    n = self.sweep(lambda nth: self.write_once(ranks, rank, nth, for_ever),
                                   range(1, 100000) if ballast_test.FULL else numbers)
                    self.assertGreaterEqual(n, 1)

    def test_every_read(self):
        for ranks, rank in ((1, 0), (2, 1)):
            ended = self.work.fresh("ended")
            with self.subTest(ranks=ranks, rank=rank):
                # Two saves, the newest in the middle of the run.
                outcome = self.launch(ended, ranks, ["--steps", "3", "--set", "save.keep=2"])
                self.assertEqual(outcome.code, 0)
                self.assertEqual(self.names(ended), ["step-2", "step-3"])
                # Most reads are of one tensor after the other.
                numbers = (1, 2, 60) if ranks == 1 else (2,)
                if ballast_test.FULL:
                    numbers = list(range(1, 30)) + list(range(30, 100000, 19))
                for for_ever in (False, True):
                    n = self.sweep(
                        lambda nth: self.read_once(ranks, rank, nth, for_ever, ended), numbers)
                    self.assertGreaterEqual(n, 1)


if __name__ == "__main__":
    ballast_test.main(limit_s=400, full_limit_s=3400)
