"""Planned bytes are measured bytes, to the byte, in every phase of every step.

`Job.check` asserts that in every run of every script; here are runs of many kinds, with the
painted and red-zoned workspace, and the check that such a comparison is not one of a number with
itself: the plan that `ballast-worker --plan` prints for ranks that do not exist is the same."""

import json
import os
import random
import subprocess

import ballast_test
from ballast_test import BIN, FULL

MODES = ["none", "selective", "split", "block:1", "block:2", "block:3"]
LAYERS = 3


def draw_shape(draw):
    """A run of some kind that fits two cores: ranks and configuration."""
    ranks = draw.choice((1, 1, 2, 2, 4))
    micro_batch = draw.choice((1, 2, 3, 4))
    accumulation = draw.choice((1, 1, 2, 3))
    seq_len = draw.choice((1, 7, 16, 33, 64))
    return ranks, {
        "changes": {
            "train_batch_size": ranks * micro_batch * accumulation,
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": accumulation,
        },
        "dropout": draw.choice((0, 0.1)),
        "seq_len": seq_len,
        "eval": {"every": 2, "micro_batch": draw.choice((1, 2, 5)), "batches": 1},
        "strategy": {
            "checkpointing": draw.choice(MODES),
            "checkpointing.layers": draw.randint(0, LAYERS),
            "loss_tile": draw.choice((0, 1, 8, 24)),
        },
    }


class Peaks(ballast_test.Case):
    def planned(self, job):
        """{phase: bytes} that --plan says, without MPI."""
        done = subprocess.run(
            [os.path.join(BIN, "ballast-worker"), "--config", job.config, "--plan", "--world",
             str(job.ranks), "--json"] + job.arguments, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, timeout=60, check=True)
        plan = json.loads(done.stdout)
        return {name: phase["peak_bytes"] for name, phase in plan["phases"].items()}

    def check_job(self, job):
        planned = self.planned(job)
        for line in job.steps():
            for phase, measured in line["peak_bytes"].items():
                self.assertEqual(measured, planned[phase], (phase, line["step"]))
        for event in job.events("eval"):
            self.assertEqual(event["peak_bytes"], planned["eval"])

    def test_random_runs(self):
        draw = random.Random(11)
        for index in range(200 if FULL else 10):
            ranks, keys = draw_shape(draw)
            family = draw.choice(("gpt2", "llama"))
            keys["debug"] = {"paint": bool(index % 2)}
            with self.subTest(index=index, ranks=ranks, family=family, keys=keys):
                job = self.work.job(ranks, model=self.work.model(family, LAYERS), steps=2,
                                    save={"every": 2}, eval_data=self.work.text(2000, seed=2),
                                    **keys).run()
                self.assertEqual(len(job.steps()), 2)
                self.assertEqual(len(job.events("eval")), 1)
                self.check_job(job)

    def test_every_mode_painted(self):
        """Switching through all modes of one painted run; paint changes no number."""
        numbers = []
        for paint in (False, True):
            job = self.work.job(2, model=self.work.model("gpt2", LAYERS), steps=len(MODES) + 1,
                                pause_at=0, debug={"paint": paint},
                                strategy={"loss_tile": 24}).start()
            job.drive({step: ["checkpointing=" + mode] for step, mode in enumerate(MODES)})
            job.wait()
            job.check()
            numbers.append(job.numbers())
            peaks = [line["peak_bytes"]["backward"] for line in job.steps()]
            self.assertGreater(len(set(peaks)), 2, peaks)
        self.assertEqual(numbers[0], numbers[1])


if __name__ == "__main__":
    ballast_test.main()
