"""Every allocation of a rank may fail: number 1, 2, 3, ..., once and for ever, until a run has none
left to fail. Whatever comes of it is a success or an error in words with a known exit code; never a
signal, a hang, a process left behind or a save that does not load.

One rank runs without mpirun, which would only be in the way. The daemon's own allocations are swept
by tests/control, in its own process."""

import concurrent.futures
import itertools
import os
import random
import re
import shutil
import threading
import time

import ballast_test
import common

KNOWN_CODES = set(range(8))
AT_ONCE = 2
SLICE = 8        # seeded numbers besides the geometric ones

SMALL = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "scheduler": None}
SETTINGS = {"seq_len": 16, "steps": 1, "dropout": 0, "eval": {"every": 1, "batches": 1},
            "save": {"every": 1, "keep": 2}}


class Heap(common.Case):
    def setUp(self):
        super().setUp()
        self.lock = threading.Lock()
        self.config = self.job(1, changes=SMALL, **SETTINGS).config
        self.environment = dict(os.environ, **self.work.environment)
        self.environment.update(common.QUICK)

    def fresh(self, stem="run"):
        with self.lock:
            return self.work.fresh(stem)

    def start(self, fault, ranks=1, run_dir=None, arguments=()):
        faults = ["--allow-faults", "--fault", fault] if fault else []
        return common.launch(self.config, run_dir or self.fresh(), self.environment, ranks,
                             faults + list(arguments))

    def check(self, outcome, ranks, whole):
        """What must be true of any end. None, or what is wrong."""
        if outcome.hung:
            return "no end within %g s" % common.HANG_S
        if outcome.code not in KNOWN_CODES:
            return "exit code %d" % outcome.code
        for mark in ("Signal:", "Assertion", "Segmentation", "AddressSanitizer", "runtime error:",
                     "corrupted", "free():", "the plan is not exact"):
            if mark in outcome.output:
                return "%r in the output" % mark
        if outcome.code != 0 and not re.search(r"level=error .*text=\"[^\"]{10,}", outcome.output):
            return "exit code %d without an error in words" % outcome.code
        if outcome.injected and outcome.code == ballast_test.CONFIG:
            return "a shortage was taken for a mistake in the configuration"
        deadline = time.monotonic() + 5
        while ballast_test.processes_of(outcome.run_dir):
            if time.monotonic() > deadline:
                return "left behind: %r" % ballast_test.processes_of(outcome.run_dir)
            time.sleep(0.02)
        return self.check_saves(outcome, ranks) if whole or outcome.code != 0 else None

    def check_saves(self, outcome, ranks):
        """The newest save loads and the run goes on from it."""
        folder = os.path.join(outcome.run_dir, "save")
        names = os.listdir(folder) if os.path.isdir(folder) else []
        if not any(re.fullmatch(r"step-\d+", name) for name in names):
            return None
        again = self.start(None, ranks, outcome.run_dir, ["--resume", "latest", "--steps", "2"])
        if again.code != 0:
            return "the next start: exit code %d\n%s" % (again.code, again.output[-2000:])
        return None

    def one(self, number, for_ever, ranks=1, rank=0, prepare=None, arguments=()):
        """One run with one failing allocation: (was there one to fail?, what is wrong)."""
        fault = "alloc:rank=%d,nth=%d%s" % (rank, number, ",repeat=0" if for_ever else "")
        run_dir = prepare() if prepare else None
        outcome = self.start(fault, ranks, run_dir, arguments)
        # The next start is the dear half; after a good end it is tried now and then.
        wrong = self.check(outcome, ranks, number % 3 == 0)
        if wrong:
            wrong = "%s on %d: %s\n%s" % (fault, ranks, wrong, outcome.output[-3000:])
        shutil.rmtree(outcome.run_dir, ignore_errors=True)
        return outcome.injected, wrong

    def sweep(self, numbers, for_ever, at_once=AT_ONCE, **how):
        """All of the numbers, in order, until one has nothing to fail; how many did."""
        injected, wrong, done = 0, [], False
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            waiting = []
            for number in numbers:
                waiting.append(pool.submit(self.one, number, for_ever, **how))
                if len(waiting) > 2 * at_once:
                    was, what = waiting.pop(0).result()
                    injected += was
                    wrong += [what] if what else []
                    done = done or not was
                if done or len(wrong) > 5:
                    break
            for future in waiting:
                was, what = future.result()
                injected += was
                wrong += [what] if what else []
        self.assertFalse(wrong, "%d of them:\n%s" % (len(wrong), "\n".join(wrong)))
        return injected

    def numbers(self, most, draw, count=SLICE):
        """1, 2, 3, ..., thinned out where they are the entries of a manifest, one like the other;
        or the first ones, geometric ones and seeded ones up to about `most`."""
        if ballast_test.FULL:
            return itertools.chain(range(1, 400), range(400, 1000000, 7))
        some = set(range(1, 9)) | {int(8 * 1.8 ** power) for power in range(1, 12)}
        some |= {draw.randrange(9, most) for _ in range(count)}
        return sorted(number for number in some if number < most)

    def test_a_whole_run_once(self):
        draw = random.Random(1)
        self.assertGreater(self.sweep(self.numbers(3000, draw), False), 15)

    def test_a_whole_run_for_ever(self):
        # From some allocation on nothing is to be had: the end comes soon, so early ones count.
        draw = random.Random(2)
        numbers = self.numbers(300, draw, 4)
        if ballast_test.FULL:
            numbers = itertools.chain(range(1, 200), range(200, 4000, 61))
        self.assertGreater(self.sweep(numbers, True), 10)

    def prepared(self):
        """A copy of a run that ended well after one step."""
        with self.lock:
            if not hasattr(self, "ended"):
                outcome = self.start(None, run_dir=self.work.fresh("ended"))
                self.assertEqual(outcome.code, 0, outcome.output)
                self.ended = outcome.run_dir
        copy = self.fresh()
        shutil.copytree(self.ended, copy)
        return copy

    def test_a_resumed_run(self):
        draw = random.Random(3)
        how = {"prepare": self.prepared, "arguments": ["--resume", "latest", "--steps", "2"]}
        for for_ever in (False, True):
            if ballast_test.FULL:
                numbers = itertools.chain(range(1, 200), range(200, 100000, 29))
            else:
                numbers = self.numbers(1000, draw, 4)
            self.assertGreater(self.sweep(numbers, for_ever, **how), 10)

    def test_two_ranks(self):
        # What one rank lacks all must learn, or the others wait for ever.
        draw = random.Random(4)
        for rank in (0, 1):
            for for_ever in (False, True):
                if ballast_test.FULL:
                    numbers = list(range(1, 60, 2)) + list(range(60, 4000, 231))
                else:
                    numbers = sorted(draw.sample(range(1, 40), 3) + draw.sample(range(40, 800), 1))
                self.assertGreater(
                    self.sweep(numbers, for_ever, at_once=1, ranks=2, rank=rank), 2)

    def test_two_ranks_resumed(self):
        draw = random.Random(5)
        how = {"prepare": self.prepared, "arguments": ["--resume", "latest", "--steps", "2"],
               "ranks": 2}
        for rank in (0, 1):
            numbers = range(1, 2000, 61) if ballast_test.FULL \
                else sorted(draw.sample(range(10, 400), 3))
            self.assertGreater(self.sweep(numbers, False, at_once=1, rank=rank, **how), 2)

    def resumed(self, job):
        answer = job.ctl("resume", code=None, timeout_s=common.END_S)
        self.assertNotEqual(answer.code, ballast_test.CTL_TIMEOUT, answer)
        return answer.code == 0 or job.process.poll() is not None

    def test_a_switch(self):
        # Refused on all ranks or made on all, and training goes on with the same numbers.
        settings = {"steps": 2, "eval": {"every": 0}, "save": {"every": 0}, "pause_at": 1}
        right = self.job(2, **dict(settings, pause_at=None)).run().numbers()
        for rank in (0, 1):
            for number in range(1, 1000) if ballast_test.FULL else (1, 2, 3, 5, 8, 13, 21):
                fault = "alloc:rank=%d,phase=switch,nth=%d" % (rank, number)
                with self.subTest(fault=fault):
                    job = self.faulty(fault, 2, **settings).start()
                    job.wait_paused(1)
                    answer = job.ctl("set", "checkpointing=block:1", "--wait", code=None,
                                     timeout_s=common.END_S)
                    self.assertNotEqual(answer.code, ballast_test.CTL_TIMEOUT, answer)
                    if answer.code != 0:
                        # Where its answer was what failed, the link broke to say so.
                        self.assertRegex(answer.out + answer.err,
                                         "memory|closed before it answered")
                    # The allocation that failed may have been this command's, or the link's.
                    ballast_test.wait_until(lambda: self.resumed(job), common.END_S, "resume")
                    code = job.wait(timeout_s=common.HANG_S, code=None)
                    self.assert_gone(job, 3)
                    self.assert_no_crash(job)
                    if code == ballast_test.FAILED and "never fired" in job.output():
                        break
                    self.assertEqual(code, 0, job.output()[-2000:])
                    if len(job.steps()) == 2:  # a line may be what there was no memory for
                        self.assertEqual(job.numbers(), right)


if __name__ == "__main__":
    ballast_test.main(limit_s=400, full_limit_s=3400)
