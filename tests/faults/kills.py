"""One dies, all end, nothing is left: mpirun, a rank or the daemon is killed in each phase, gently
and not. Within ten seconds no process of the job lives, the exit code is kept, the journal names
who was lost where, and the next start goes on from the newest save bit for bit. A daemon that dies
alone costs training nothing."""

import collections
import itertools
import random
import signal
import time

import ballast_test
import common

PHASES = ("forward", "backward", "step", "eval", "save")
VICTIMS = ("mpirun", 0, 1, "daemon")
WAYS = {"kill": [signal.SIGKILL], "term": [signal.SIGTERM], "ctrl-c": [signal.SIGINT] * 3}
CRASH = {"segv": [signal.SIGSEGV], "abrt": [signal.SIGABRT]}
RANKS = 2
FOR_EVER = 100000
REFERENCE_STEPS = 600

# A step of several micro-steps and every phase in it; the rate does not know the number of steps,
# so a run can be ended anywhere and compared.
LONG = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "scheduler": None}

Held = collections.namedtuple("Held", "rank phase step")


def trace(lines):
    return {line["step"]: (ballast_test.bits(line["loss"]), ballast_test.bits(line["grad_norm"]))
            for line in lines}


class Killed(common.Case):
    def long_job(self, environment=None, **settings):
        """A run that would go on for ever, in which every phase comes by every few milliseconds."""
        settings = dict({"steps": FOR_EVER, "eval": {"every": 1, "micro_batch": 4, "batches": 4},
                         "eval_data": self.work.text(8000, seed=2),
                         "save": {"every": 2, "keep": 3}}, **settings)
        return self.job(RANKS, changes=LONG, environment=environment or common.DEFAULT, **settings)

    def right_numbers(self):
        """{step: numbers} of a run that nobody disturbs; made once."""
        if not hasattr(Killed, "undisturbed"):
            job = self.job(RANKS, changes=LONG, steps=REFERENCE_STEPS, eval_data=None, eval=None,
                           save={"every": 0})
            Killed.undisturbed = trace(job.run().steps())
        return Killed.undisturbed

    def assert_right(self, lines):
        """Every step once, in order, with the numbers of the undisturbed run."""
        ballast_test.check_steps(lines)
        right, got = self.right_numbers(), trace(lines)
        for step in sorted(set(right) & set(got)):
            self.assertEqual(got[step], right[step], "step %d" % step)

    # -- standing still in a phase --

    def look(self, job, rank):
        state = job.ctl("ranks").json["ranks"][rank]
        return Held(rank, state["phase"], state.get("step", 0))

    def hold(self, job, rank, phase, draw):
        """Stop `rank` (SIGSTOP) in `phase`; where the daemon believes it to be."""
        pids = job.wait_for_ranks()
        other = next(pid for number, pid in pids.items() if number != rank)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            time.sleep(draw.uniform(0, 0.02))
            if phase == "step":
                # Short but for the wait for the others' gradients: hold those back for a moment.
                ballast_test.kill(other, signal.SIGSTOP)
                time.sleep(0.03)
            ballast_test.kill(pids[rank], signal.SIGSTOP)
            if phase == "step":
                ballast_test.kill(other, signal.SIGCONT)
            time.sleep(0.03)
            held = self.look(job, rank)
            # Its last words may still be on their way to the daemon: looked at twice.
            time.sleep(0.07)
            if held.phase == phase and held == self.look(job, rank):
                return held
            ballast_test.kill(pids[rank], signal.SIGCONT)
        self.fail("rank %d was never met in %s" % (rank, phase))

    def started(self, environment=None):
        job = self.long_job(environment).start()
        job.ctl("wait", "--for", "step=4")  # there is a save by now
        return job

    # -- killing --

    def pid_of(self, job, victim):
        if victim == "mpirun":
            return job.mpirun_pid()
        return job.daemon_pid() if victim == "daemon" else job.rank_pids()[victim]

    def break_in(self, job, victim, signals, phase, draw):
        """Kill the victim while a rank stands in the phase; where that rank was."""
        rank = victim if isinstance(victim, int) else draw.randrange(RANKS)
        pid = self.pid_of(job, victim)
        self.assertIsNotNone(pid)
        held = self.hold(job, rank, phase, draw)
        held_pid = job.rank_pids()[rank]
        for number, sig in enumerate(signals):
            if number:
                time.sleep(0.05)
            ballast_test.kill(pid, sig)
        ballast_test.kill(held_pid, signal.SIGCONT)
        return held

    def check_ended(self, job, began):
        left = max(0.1, common.END_S - (time.monotonic() - began))
        try:
            code = job.process.wait(left)
        except Exception:
            self.fail("mpirun still runs after %g s: %r\n%s"
                      % (common.END_S, job.pids(), job.output()[-2000:]))
        self.assert_gone(job, max(0.1, common.END_S - (time.monotonic() - began)))
        self.assertNotEqual(code, 0, "the exit code was lost")
        self.assert_saves_whole(job)
        return code

    def check_journal(self, job, victim, way, held):
        """What the daemon, which outlives them all, has to tell."""
        events = job.events()
        self.assertEqual(events[-1]["type"], "end", events[-3:])
        lost = [event for event in events if event["type"] == "rank_lost"]
        if isinstance(victim, int) and way not in ("term", "ctrl-c"):
            self.assertEqual(len(lost), 1, lost)
            self.assertEqual(lost[0]["rank"], held.rank)
            if way == "kill":
                self.assertEqual((lost[0]["phase"], lost[0]["step"]), (held.phase, held.step))
            else:  # it could still take a few steps while the signal was on its way
                self.assertIn(lost[0]["step"] - held.step, (0, 1, 2))
            self.assertIn("rank %d" % victim, lost[0]["text"])
        elif isinstance(victim, int):
            self.assertEqual(lost, [])
            self.assertEqual(events[-1]["exit_code"], ballast_test.SAVED_ON_SIGNAL)

    def check_next_start(self, job):
        before = job.steps()
        newest = common.saves(job)[-1]
        target = max(len(before), int(newest[5:])) + 3
        again = self.resume_to(job, target)
        lines = again.steps()
        self.assertEqual(len(lines), target)
        self.assert_right(lines)
        # What was done again came out as it was the first time.
        old, new = trace(before), trace(lines)
        self.assertEqual({step: new[step] for step in old}, old)
        start = again.events("start")[-1]
        self.assertEqual(start["step"], int(newest[5:]), "the newest save")

    def resume_to(self, job, steps):
        again = self.work.again(job, ["--resume", "latest", "--steps", str(steps)],
                                environment=common.QUICK)
        again.start()
        again.wait()
        self.assert_gone(again, 3)
        return again

    def killed(self, victim, way, signals, phase, draw):
        # Once with our scripts' patience, which is mpirun's to keep: also within the limit.
        patient = (victim, way) == (1, "kill")
        job = self.started({"OMPI_MCA_odls_base_sigkill_timeout": "3"} if patient else None)
        held = self.break_in(job, victim, signals, phase, draw)
        began = time.monotonic()
        code = self.check_ended(job, began)
        if isinstance(victim, int):
            wanted = ballast_test.SAVED_ON_SIGNAL if way in ("term", "ctrl-c") \
                else 128 + signals[0]
            self.assertEqual(code, wanted)
        self.check_journal(job, victim, way, held)
        self.check_next_start(job)

    def daemon_killed(self, signals, phase, draw):
        job = self.started()
        former = job.daemon_pid()
        n_before = len(job.events())
        self.break_in(job, "daemon", signals, phase, draw)
        ballast_test.wait_until(lambda: job.daemon_pid() not in (None, former), 5, "a new daemon")
        # The ranks link again, and the new one knows where the run is.
        ballast_test.wait_until(
            lambda: all(state.get("linked") for state in job.ctl("ranks").json["ranks"]), 5,
            "the links")
        step = job.ctl("status").json["step"]
        job.ctl("wait", "--for", "step=%d" % (step + 2))
        job.ctl("stop")
        job.wait()
        self.assert_gone(job, 5)
        events = job.events()
        kinds = [event["type"] for event in events]
        self.assertEqual(kinds.count("start"), 1)
        self.assertEqual(kinds.count("daemon_lost"), 1, kinds)
        self.assertGreaterEqual(kinds.index("daemon_lost"), n_before, "the journal goes on")
        self.assertNotIn("rank_lost", kinds)
        self.assertEqual(events[-1]["type"], "end")
        self.assert_right(job.steps())

    def cells(self):
        every = list(itertools.product(VICTIMS, WAYS, PHASES))
        draw = random.Random(37)
        if ballast_test.FULL:
            return every + [(rank, way, phase) for rank in range(RANKS) for way in CRASH
                            for phase in PHASES], draw
        # Each victim in each way, the phases in turn; a rank's sudden death in each phase.
        some = [(victim, way, PHASES[index % len(PHASES)])
                for index, (victim, way) in enumerate(itertools.product(VICTIMS, WAYS))]
        some += [(draw.randrange(RANKS), "kill", phase) for phase in ("backward", "step", "save")]
        return some, draw

    def test_each_victim(self):
        cells, draw = self.cells()
        for victim, way, phase in cells:
            with self.subTest(victim=victim, way=way, phase=phase):
                signals = WAYS.get(way) or CRASH[way]
                try:
                    if victim == "daemon":
                        self.daemon_killed(signals, phase, draw)
                    else:
                        self.killed(victim, way, signals, phase, draw)
                finally:
                    self.work.close()
                    self.setUp()

    def test_the_daemon_again_and_again(self):
        # Training does not notice: no step is lost, and the daemon is back each time.
        job = self.long_job(eval_data=None, eval=None, save={"every": 0}, steps=REFERENCE_STEPS)
        job.start()
        job.ctl("wait", "--for", "step=1")
        # Rank 0 starts five a minute at most, lest a daemon that cannot live be started for ever.
        kills = 0
        for _ in range(5 if ballast_test.FULL else 3):
            former = ballast_test.wait_until(
                lambda: job.daemon_pid() or job.process.poll() is not None, 10, "a daemon")
            if job.process.poll() is not None:
                break
            ballast_test.kill(former)
            kills += 1
            ballast_test.wait_until(lambda: job.daemon_pid() not in (None, former)
                                    or job.process.poll() is not None, 5, "a new daemon")
            time.sleep(0.3)
        self.assertGreaterEqual(kills, 2)
        job.wait()
        self.assert_gone(job, 3)
        self.assertEqual(len(job.steps()), REFERENCE_STEPS)
        self.assert_right(job.steps())

    def test_save_on_request(self):
        # SIGUSR1 saves and ends, wherever it arrives.
        for rank in range(RANKS) if ballast_test.FULL else (1,):
            job = self.long_job(save={"every": 0}).start()
            job.ctl("wait", "--for", "step=3")
            ballast_test.kill(job.rank_pids()[rank], signal.SIGUSR1)
            job.wait(code=ballast_test.SAVED_ON_SIGNAL)
            self.assert_gone(job, 3)
            self.assertEqual(common.saves(job), ["step-%d" % len(job.steps())])
            self.check_next_start(job)


class Broken(common.Case):
    """What ties the processes together fails, and the processes live."""

    def test_a_collective(self):
        for ranks, rank, phase in ((2, 1, "step"), (4, 0, "eval"), (4, 3, "save")):
            with self.subTest(ranks=ranks, rank=rank, phase=phase):
                job = self.faulty("collective:rank=%d,step=3,phase=%s" % (rank, phase), ranks)
                job.start()
                job.wait_for_ranks()
                began = time.monotonic()
                job.wait(timeout_s=common.HANG_S, code=ballast_test.RANK_LOST)
                self.assert_gone(job, 3)
                self.assertLess(time.monotonic() - began, common.END_S)
                self.assert_no_crash(job)
                self.assertRegex(job.output(), r"rank=%d text=.*collective '.*' number \d+" % rank)
                self.assertEqual(job.events()[-1]["type"], "end")
                if common.saves(job):
                    self.assertEqual(self.resume(job).numbers(), self.reference(ranks))

    def test_a_link(self):
        # Lost at its nth send, also for a while: linked again, and training has noticed nothing.
        numbers = range(1, 40) if ballast_test.FULL else (1, 2, 7)
        faults = ["link:rank=%d,nth=%d" % (rank, n) for rank in (0, 1) for n in numbers]
        for fault in faults + ["link:rank=0,for=0.3", "link:for=0.5"]:
            with self.subTest(fault=fault):
                job = self.faulty(fault, 2, steps=60, eval={"every": 0}, save={"every": 0}).start()
                job.wait(timeout_s=60)
                self.assert_gone(job, 3)
                kinds = [event["type"] for event in job.events()]
                self.assertEqual((kinds[0], kinds[-1]), ("start", "end"))
                self.assertNotIn("rank_lost", kinds)
                self.assertEqual(job.numbers(), self.reference(
                    2, steps=60, eval={"every": 0}, save={"every": 0}))


if __name__ == "__main__":
    ballast_test.main(limit_s=500, full_limit_s=3000)
