"""Out of memory is an event: a commit that fails on one rank ends the run on all, within ten
seconds, with the same true story on every route and a saved state to go on from."""

import os
import random
import re
import signal
import time

import ballast_test
import common

STEP = 3
PHASES = ("forward", "backward", "step", "eval", "save")
TRIES = 4


def fault(rank, phase, step=STEP):
    return "commit:rank=%d,step=%d,phase=%s" % (rank, step, phase)


def told_on_stderr(job):
    """The reports in the log, as dicts."""
    pattern = (r"out of memory: (?P<phase>\w+) phase, step (?P<step>\d+), "
               r"micro-step (?P<micro>\d+), rank (?P<rank>\d+) \((?P<cause>[^)]*)\)\n +"
               r"(?P<tensor>[\w/.]+) \((?P<category>\w+)")
    return [match.groupdict() for match in re.finditer(pattern, job.output())]


def cells():
    """(ranks, short rank, phase, policy): all of them, or a seeded part that has every phase, every
    rank of four, and both policies."""
    every = [(ranks, rank, phase, policy)
             for ranks in (1, 2, 4) for rank in range(ranks) for phase in PHASES
             for policy in ("report", "abort")]
    if ballast_test.FULL:
        return every
    draw = random.Random(28)
    some = [(4, index % 4, phase, "report") for index, phase in enumerate(PHASES)]
    some += [(2, draw.randrange(2), phase, "report") for phase in draw.sample(PHASES, 2)]
    some += [(1, 0, draw.choice(PHASES), "report"), (2, 1, draw.choice(PHASES), "abort")]
    return some


class OutOfMemory(common.Case):
    def break_at(self, ranks, rank, phase, policy, environment=None):
        """One run with one short rank, and everything that must be true of its end."""
        job = self.faulty(fault(rank, phase), ranks, oom={"policy": policy},
                          environment=environment)
        began = time.monotonic()
        job.start()
        job.wait(timeout_s=60, code=ballast_test.OUT_OF_MEMORY)
        seconds = time.monotonic() - began
        self.assert_gone(job, 3)
        self.assertLess(seconds, END_LIMIT_S, "from start to end")
        self.assert_no_crash(job)
        self.check_story(job, rank, phase)
        self.assertEqual(len(job.steps()), STEP)
        ballast_test.check_steps(job.steps())
        return job

    def check_story(self, job, rank, phase):
        events = job.events("oom")
        self.assertEqual(len(events), 1, events)
        event = events[0]
        self.assertEqual((event["rank"], event["step"], event["phase"]), (rank, STEP, phase))
        self.assertEqual(event["cause"], "fault on purpose")
        reports = told_on_stderr(job)
        self.assertEqual(len(reports), 1, "the short rank alone prints the report")
        report = reports[0]
        self.assertEqual((int(report["rank"]), int(report["step"]), report["phase"]),
                         (rank, STEP, phase))
        self.assertEqual((report["tensor"], report["category"]),
                         (event["tensor"], event["category"]))
        self.assertGreater(event["held_bytes"], 0)
        self.assertGreater(event["limit_bytes"], event["held_bytes"])
        end = job.end()
        self.assertEqual((end["exit_code"], end["step"]), (ballast_test.OUT_OF_MEMORY, STEP))

    def test_every_phase_and_rank(self):
        for ranks, rank, phase, policy in cells():
            with self.subTest(ranks=ranks, rank=rank, phase=phase, policy=policy):
                job = self.break_at(ranks, rank, phase, policy)
                if policy == "report":
                    # Saved where it stood, also when the save itself was short the first time.
                    self.assertEqual(common.saves(job), ["step-3"])
                    self.check_resumed(job, ranks)
                else:
                    # Step 3's own save comes after the evaluation and before the forward.
                    before = [] if phase in ("eval", "save") else ["step-3"]
                    self.assertEqual(common.saves(job), before)

    def check_resumed(self, job, ranks):
        again = self.resume(job)
        self.assertEqual(again.numbers(), self.reference(ranks), "as if nothing had happened")
        ballast_test.check_steps(again.steps())

    def test_with_the_patience_of_our_scripts(self):
        # As deploy/ launches: mpirun waits for its own grace, and that too is within the limit.
        began = time.monotonic()
        job = self.faulty(fault(1, "backward"), 2, environment={}).start()
        job.wait(timeout_s=60, code=ballast_test.OUT_OF_MEMORY)
        seconds = time.monotonic() - began
        self.assert_gone(job, 3)
        self.assertLess(seconds, common.END_S + 3)

    def test_a_later_micro_step(self):
        # The second forward of step 3: the phase is entered again and the report says which.
        job = self.faulty("commit:rank=1,step=3,phase=forward,nth=2", 2).start()
        job.wait(timeout_s=60, code=ballast_test.OUT_OF_MEMORY)
        report = told_on_stderr(job)[0]
        self.assertEqual((report["phase"], report["micro"], report["rank"]), ("forward", "1", "1"))
        self.assertEqual(self.resume(job).numbers(), self.reference(2))

    def test_at_start(self):
        # Before there is a workspace to admit with: the state's own memory.
        for rank in (0, 1):
            job = self.faulty("commit:rank=%d,step=0,phase=setup" % rank, 2).start()
            job.wait(timeout_s=60, code=ballast_test.OUT_OF_MEMORY)
            self.assert_gone(job, 3)
            self.assertIn("fault on purpose", job.output())
            self.assertIn("region params", job.output())
            self.assertEqual(job.end()["exit_code"], ballast_test.OUT_OF_MEMORY)
            self.assertFalse(os.path.exists(job.path("steps.jsonl")))

    def test_every_rank_at_once(self):
        job = self.faulty("commit:step=3,phase=backward", 2).start()
        job.wait(timeout_s=60, code=ballast_test.OUT_OF_MEMORY)
        self.assertEqual([event["rank"] for event in job.events("oom")], [0], "the lowest speaks")
        self.assertEqual(self.resume(job).numbers(), self.reference(2))

    def test_for_ever(self):
        # The save after the shortage is short as well: said, no hang, the former save stays.
        job = self.faulty("commit:rank=0,repeat=0,step=5", 2, save={"every": 2}).start()
        job.wait(timeout_s=60, code=ballast_test.OUT_OF_MEMORY)
        self.assert_gone(job, 3)
        self.assert_no_crash(job)
        self.assertIn("the state could not be saved", job.output())
        self.assertEqual(common.saves(job), ["step-2", "step-4"])
        self.resume(job)


class Reached(common.Case):
    """`ballastctl oom` tells the same as the journal while the run still stands."""

    def ask(self, phase):
        """(report, event) of a run held right after its shortage; None when it was too quick."""
        job = self.faulty(fault(1, phase), 2, pause_at=STEP - 1).start()
        job.wait_paused(STEP - 1)
        rank_0 = job.wait_for_ranks()[0]
        job.ctl("resume", "--no-wait")
        journal = job.path("events.jsonl")
        deadline = time.monotonic() + 60
        while '"type":"oom"' not in common.read(journal):
            if time.monotonic() > deadline or job.process.poll() is not None:
                break
            time.sleep(0.0005)
        # Held, not slowed: rank 0 keeps its link, and so the daemon stays.
        ballast_test.kill(rank_0, signal.SIGSTOP)
        try:
            answer = job.ctl("oom", code=None, timeout_s=5)
        finally:
            ballast_test.kill(rank_0, signal.SIGCONT)
        job.wait(code=ballast_test.OUT_OF_MEMORY)
        self.assert_gone(job, 5)
        report = answer.json.get("report") if answer.code == ballast_test.CTL_OK else None
        return (report, job.events("oom")[0], told_on_stderr(job)[0]) if report else None

    def test_by_ballastctl(self):
        for phase in PHASES if ballast_test.FULL else ("backward", "eval"):
            with self.subTest(phase=phase):
                found = next((got for got in (self.ask(phase) for _ in range(TRIES)) if got), None)
                self.assertIsNotNone(found, "the report was never reached")
                report, event, printed = found
                for key in ("rank", "step", "phase", "tensor", "category", "asked_bytes",
                            "held_bytes", "limit_bytes", "cause"):
                    if key == "tensor":
                        self.assertEqual(report[key].partition(",")[0], event[key])
                        continue
                    # What is 0 may be left out of either.
                    self.assertEqual(report.get(key, 0), event.get(key, 0), key)
                self.assertEqual(report["tensor"].partition(",")[0], printed["tensor"])
                self.assertEqual(int(printed["micro"]), report.get("micro_step", 0))
                planned = {entry["phase"]: entry["bytes"] for entry in report["planned_bytes"]} \
                    if isinstance(report["planned_bytes"], list) else report["planned_bytes"]
                self.assertGreater(planned[phase], 0)
                self.assertTrue(report["remedies"])
                for remedy in report["remedies"]:
                    self.assertTrue(remedy["text"])
                if phase != "save":  # saving keeps nothing on the device
                    self.assertTrue(report["live"])
                self.assertIn("oom.policy=report", report["outcome"])


class Switch(common.Case):
    """A switch that is short is refused; training goes on as if nobody had asked."""

    def test_refused_on_all(self):
        ranks_of = (1, 2, 4) if ballast_test.FULL else (2,)
        for ranks, rank in [(n, r) for n in ranks_of for r in range(n)]:
            with self.subTest(ranks=ranks, rank=rank):
                job = self.faulty(fault(rank, "switch"), ranks, pause_at=STEP).start()
                job.wait_paused(STEP)
                before = job.ctl("status").json
                answer = job.ctl("set", "checkpointing=block:1", "--wait",
                                 code=ballast_test.CTL_REFUSED)
                self.assertIn("rank %d" % rank, answer.out + answer.err)
                self.assertIn("switch", answer.out + answer.err)
                after = job.ctl("status").json
                self.assertEqual(after.get("generation", 0), before.get("generation", 0))
                self.assertEqual(after["strategy"], before["strategy"])
                # It was short once; the same switch now goes through and back.
                job.ctl("set", "checkpointing=block:1", "--wait")
                job.ctl("undo", "--wait")
                job.ctl("resume")
                job.wait()
                self.assert_gone(job, 3)
                refused = job.events("refused")
                self.assertEqual(len(refused), 1, refused)
                self.assertEqual((refused[0]["step"], refused[0]["phase"]), (STEP, "switch"))
                self.assertIn("rank %d" % rank, refused[0]["text"])
                self.assertEqual(len(job.events("switch")), 2)
                self.assertEqual(job.numbers(), self.reference(ranks))
                ballast_test.check_steps(job.steps())


class Armed(common.Case):
    """A fault that was asked for and did not come fails the run: it did not test what it should."""

    def test_never_reached(self):
        for spec in ("commit:rank=1,step=100,phase=backward", "commit:rank=0,phase=switch",
                     "link:rank=0,step=99", "io:rank=1,nth=100000"):
            with self.subTest(spec=spec):
                job = self.faulty(spec, 2).start()
                job.wait(timeout_s=60, code=ballast_test.FAILED)
                self.assertIn("'%s' never fired" % spec, job.output())
                self.assertEqual(job.end()["exit_code"], ballast_test.FAILED)
                self.assertEqual(len(job.steps()), 6)
                self.assert_gone(job, 3)

    def test_of_a_rank_that_is_not_there(self):
        job = self.faulty("commit:rank=2,step=1,phase=forward", 2,
                          environment=common.DEFAULT).start()
        job.wait(timeout_s=60, code=ballast_test.CONFIG)
        self.assertIn("rank=2 is not one of this run's 2", job.output())
        self.assertFalse(os.path.exists(job.path("steps.jsonl")))

    def test_not_without_leave(self):
        job = self.job(2, ["--fault", "commit:step=1"], environment=common.DEFAULT).start()
        job.wait(timeout_s=60, code=ballast_test.CONFIG)
        self.assertIn("--allow-faults", job.output())
        self.assertFalse(os.path.exists(job.path("steps.jsonl")))


# A start-up, three steps, a save and the end; what is left of ten seconds is for a busy host.
END_LIMIT_S = common.END_S + 5

if __name__ == "__main__":
    ballast_test.main(limit_s=240, full_limit_s=1800)
