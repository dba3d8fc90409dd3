"""Changing activation checkpointing between steps changes nothing but memory.

Losses, gradient norms and the final weights of a run that walks through all modes are those of a
run that never switches, bit for bit: both families, 1, 2 and 4 ranks, accumulation 1 and 2,
dropout 0.1. So are those of a plain repeat, and of runs with evaluations in between."""

import itertools

import ballast_test
from ballast_test import FULL

# Of a model with three blocks; block:2 leaves a remainder. Each is set before the step it stands
# at, the first before any step.
WALK = {
    0: ["checkpointing=selective"],
    1: ["checkpointing=split"],
    2: ["checkpointing=block:1"],
    3: ["checkpointing=block:2"],
    4: ["checkpointing.layers=1"],
    5: ["checkpointing=none", "checkpointing.layers=3"],
    6: ["checkpointing=block:3"],
    7: ["checkpointing=selective", "checkpointing.layers=2"],
    8: ["checkpointing=split", "checkpointing.layers=0"],
    9: ["checkpointing=none", "checkpointing.layers=3"],
}
STEPS = 11
N_LAYERS = 3


def expected_strategies(walk, steps):
    """(checkpointing, checkpointing.layers) of every step."""
    now = {"checkpointing": "none", "checkpointing.layers": str(N_LAYERS)}
    result = []
    for step in range(steps):
        for change in walk.get(step, []):
            key, _, value = change.partition("=")
            now[key] = value
        result.append((now["checkpointing"], now["checkpointing.layers"]))
    return result


def strategies(job):
    return [(line["strategy"]["checkpointing"], str(line["strategy"]["checkpointing.layers"]))
            for line in job.steps()]


class Switching(ballast_test.Case):
    maxDiff = 4000

    def job_of(self, family, ranks, accumulation, **more):
        changes = {
            "train_batch_size": ranks * 2 * accumulation,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": accumulation,
        }
        more.setdefault("steps", STEPS)
        return self.work.job(ranks, changes, model=self.work.model(family, N_LAYERS), **more)

    def walk(self, job, walk):
        job.start()
        job.drive(walk)
        job.wait()
        job.check()

    def compare(self, family, ranks, accumulation):
        plain = self.job_of(family, ranks, accumulation).run()
        walked = self.job_of(family, ranks, accumulation, pause_at=0)
        self.walk(walked, WALK)
        self.assertEqual(plain.numbers(), walked.numbers())
        # The walk did take place, with the memory that it is for.
        self.assertEqual(strategies(walked), expected_strategies(WALK, STEPS))
        self.assertEqual(len(walked.events("switch")), len(WALK))
        self.assertEqual([line["generation"] for line in walked.steps()],
                         list(range(1, len(WALK) + 1)) + [len(WALK)])
        peaks = [max(line["peak_bytes"].values()) for line in walked.steps()]
        kept_all = max(plain.steps()[0]["peak_bytes"].values())
        for step in (0, 1, 2, 3, 4):
            self.assertLess(peaks[step], kept_all, WALK[step])
        # No layer is checkpointed there.
        self.assertEqual([peaks[step] for step in (5, 8, 9)], [kept_all] * 3)
        # Gradients are not zero and training goes on: the comparison compares something.
        self.assertLess(plain.steps()[-1]["loss"], plain.steps()[0]["loss"])
        return plain

    def test_walk_through_all_modes(self):
        for family, ranks, accumulation in itertools.product(
                ("gpt2", "llama"), (1, 2, 4), (1, 2)):
            with self.subTest(family=family, ranks=ranks, accumulation=accumulation):
                self.compare(family, ranks, accumulation)

    def test_every_mode_from_the_start(self):
        """Started in a mode, not switched to it."""
        modes = ["none", "selective", "split", "block:1", "block:2"]
        families = ("gpt2", "llama") if FULL else ("llama",)
        for family in families:
            first = None
            for mode, layers in itertools.product(modes, (1, N_LAYERS) if FULL else (N_LAYERS,)):
                with self.subTest(family=family, mode=mode, layers=layers):
                    job = self.job_of(family, 2, 2, steps=5, strategy={
                        "checkpointing": mode, "checkpointing.layers": layers}).run()
                    first = first or job.numbers()
                    self.assertEqual(job.numbers(), first)

    def test_plain_repeat(self):
        for preset, ranks in (("t0", 2), ("gpt2-tiny", 4)):
            with self.subTest(preset=preset):
                runs = [self.work.job(ranks, model=preset, steps=6).run() for _ in range(2)]
                self.assertEqual(runs[0].numbers(), runs[1].numbers())
                other = self.work.job(ranks, model=preset, steps=6, seed=8).run()
                self.assertNotEqual(runs[0].numbers(), other.numbers())

    def test_switch_while_running(self):
        """Not paused: the change comes in at whichever boundary is next, on all ranks."""
        steps, guard = 84, 80
        # Steps of some 20 ms: many pass between two changes, and few while one is asked for.
        big = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}
        plain = self.work.job(2, big, seq_len=64, steps=steps).run()
        live = self.work.job(2, big, seq_len=64, steps=steps, pause_at=[5, guard]).start()
        live.wait_paused(5)
        live.ctl("resume")
        at = []
        for change in ("checkpointing=block:1", "checkpointing=selective", "checkpointing=none"):
            answer = live.ctl("set", change, "--wait")
            at.append(answer.json["step"])
            self.assertLess(at[-1] + 2, guard, "the run was too fast for this test")
            live.ctl("wait", "--for", "step=%d" % (at[-1] + 2))
        live.wait_paused(guard)
        live.ctl("resume")
        live.wait()
        live.check()
        self.assertEqual(at, sorted(set(at)))
        self.assertEqual(plain.numbers(), live.numbers())
        # The answer named the very step from which on it is in force.
        modes = [line["strategy"]["checkpointing"] for line in live.steps()]
        expected = (["none"] * at[0] + ["block:1"] * (at[1] - at[0]) +
                    ["selective"] * (at[2] - at[1]) + ["none"] * (steps - at[2]))
        self.assertEqual(modes, expected)
        self.assertEqual([event["step"] for event in live.events("switch")], at)

    def test_evaluation_changes_nothing(self):
        """Scheduled, on demand, and both between switches."""
        text = self.work.text(5000, seed=2)
        plain = self.work.job(2, steps=8).run()
        with self.subTest("scheduled"):
            scheduled = self.work.job(2, steps=8, eval_data=text, eval={"every": 2}).run()
            self.assertEqual(plain.numbers(), scheduled.numbers())
            self.assertEqual([event["step"] for event in scheduled.events("eval")], [2, 4, 6, 8])
        with self.subTest("on demand"):
            asked = self.work.job(2, steps=8, eval_data=text, pause_at=3,
                                  eval={"micro_batch": 1}).start()
            asked.wait_paused(3)
            losses = []
            for mode in ("none", "block:1", "selective"):
                asked.ctl("set", "checkpointing=" + mode, "--wait")
                losses.append(asked.ctl("eval").json["loss"])
            asked.ctl("resume")
            asked.wait()
            asked.check()
            self.assertEqual(plain.numbers(), asked.numbers())
            # Evaluation is without dropout and without checkpoints: the same loss each time.
            self.assertEqual(len(set(losses)), 1, losses)


if __name__ == "__main__":
    ballast_test.main()
