"""The whole CUDA worker on the stand-in for the runtime: no GPU, everything else real.

Runs are drawn by seed: family, ranks, accumulation, checkpointing, tiles, ZeRO stage, offload,
precision, dropout, and the seed of the interleaving in which the streams' work is executed. Each is compared with the CPU
device (within a tolerance), with itself while it walks through other strategies (bit for bit), and
with its plan (to the byte: ballast_test checks every step of every run).

BALLAST_FULL=1 draws 200 instead of 20."""

import itertools
import os
import random
import subprocess
import unittest

import ballast_test
from ballast_test import BIN, FULL

STANDIN = os.path.join(BIN, "libballast-cuda-standin.so")
STEPS = 4
N_LAYERS = 3
PLACES = ("none", "none", "cpu")
MODES = ("none", "selective", "split", "block:1", "block:2", "block:3")

# Launches run the CPU device's operations, but for the sums of the norm and the products, which have
# another order. bf16 rounds what comes out of each product to 8 bits; four steps of training let
# single roundings that fall the other way spread.
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}


def relative(a, b):
    return abs(a - b) / max(abs(a), abs(b), 1e-30)


class Drawn:
    """One configuration, a function of its seed."""

    def __init__(self, seed):
        draw = random.Random(seed)
        self.seed = seed
        self.family = draw.choice(("gpt2", "llama"))
        self.ranks = draw.choice((1, 2, 2, 4))
        self.accumulation = draw.choice((1, 2, 3))
        self.micro = draw.choice((1, 2))
        self.mode = draw.choice(MODES)
        self.tile = draw.choice((0, 5, 16))
        self.precision = draw.choice(("fp32", "bf16"))
        self.dropout = draw.choice((0.0, 0.1))
        self.stage = draw.randrange(4)
        self.grad_sync = draw.choice(("last", "each"))
        self.optimizer = draw.choice(PLACES)
        # Few runs put the kernels themselves, thread by thread, in the place of the operations.
        self.kernels = "fibres" if draw.random() < (0.1 if FULL else 0.15) else "cpu"
        self.walk = {step: self.change(draw) for step in range(STEPS) if draw.random() < 0.7}
        self.walk.setdefault(0, self.change(draw))

    def change(self, draw):
        """Whatever may change without changing a bit."""
        change = ["checkpointing=" + draw.choice(MODES), "zero.stage=%d" % draw.randrange(4),
                  "offload.optimizer=" + draw.choice(PLACES), "offload.params=" + draw.choice(PLACES),
                  "offload.optimizer.fraction=" + draw.choice(("0.3", "0.7", "1"))]
        change.append("offload.activations=" + ("none" if change[0].endswith("=none")
                                                else draw.choice(PLACES)))
        if self.accumulation == 1:
            change.append("grad_sync=" + draw.choice(("last", "each")))
        return change

    def __str__(self):
        return " ".join("%s=%s" % item for item in sorted(vars(self).items()))

    def changes(self):
        batch = self.micro * self.accumulation * self.ranks
        return {"train_batch_size": batch, "train_micro_batch_size_per_gpu": self.micro,
                "gradient_accumulation_steps": self.accumulation,
                "bf16": {"enabled": self.precision == "bf16"}}

    def settings(self):
        small = self.kernels == "fibres"  # a thread is a fibre there, and slow
        return {"steps": 2 if small else STEPS, "seq_len": 16 if small else 32,
                "dropout": self.dropout, "device_memory": "64MiB",
                "strategy": {"checkpointing": self.mode, "loss_tile": self.tile,
                             "zero.stage": self.stage, "grad_sync": self.grad_sync,
                             "offload.optimizer": self.optimizer}}

    def standin(self, **more):
        return dict({"BALLAST_CUDA_LIBRARY": STANDIN, "BALLAST_STANDIN_SEED": str(self.seed),
                     "BALLAST_STANDIN_KERNELS": self.kernels}, **more)


class Cuda(ballast_test.Case):
    def job(self, drawn, device, environment=None, **more):
        settings = dict(drawn.settings(), device=device, **more)
        return self.work.job(drawn.ranks, drawn.changes(), environment=environment or {},
                             model=self.work.model(drawn.family, N_LAYERS), **settings)

    def close_to(self, cuda, cpu, tolerance):
        for ours, theirs in zip(cuda.steps(), cpu.steps()):
            for what in ("loss", "grad_norm"):
                self.assertLess(relative(ours[what], theirs[what]), tolerance,
                                "%s of step %d: %r, on the CPU %r"
                                % (what, ours["step"], ours[what], theirs[what]))


class Runs(Cuda):
    def compare(self, drawn):
        cpu = self.job(drawn, "cpu").run()
        cuda = self.job(drawn, "cuda", drawn.standin()).run()
        self.assertEqual(len(cuda.steps()), len(cpu.steps()))
        self.close_to(cuda, cpu, TOLERANCE[drawn.precision])
        # Another interleaving, and other strategies on the way: not one bit.
        walk = {step: changes for step, changes in drawn.walk.items()
                if step < drawn.settings()["steps"]}
        other = self.job(drawn, "cuda", drawn.standin(BALLAST_STANDIN_SEED=str(drawn.seed + 1000)),
                         pause_at=min(walk))
        other.start()
        other.drive(walk)
        other.wait()
        other.check()
        self.assertEqual(other.numbers(), cuda.numbers())

    def test_drawn(self):
        for seed in range(200 if FULL else 20):
            drawn = Drawn(seed)
            with self.subTest(drawn=str(drawn)):
                try:
                    self.compare(drawn)
                finally:
                    self.work.close()
                    self.setUp()


class Reductions(Cuda):
    def numbers(self, stage, environment=None, device="cuda", **more):
        drawn = Drawn(7)
        drawn.ranks, drawn.precision, drawn.kernels = 2, "fp32", "cpu"
        settings = dict(drawn.settings(), device=device, steps=20 if FULL else 6, **more)
        settings["strategy"] = {"zero.stage": stage}
        job = self.work.job(2, {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2},
                            environment=dict(drawn.standin(), **(environment or {})),
                            model=self.work.model("gpt2", N_LAYERS), **settings)
        return job.run()

    def test_buffers_are_not_reused_too_early(self):
        """Released memory is poisoned, streams run in any order their events allow: whatever the
        bucket, whatever the stage, the same numbers."""
        right = self.numbers(0, device="cpu")
        first = None
        buckets = ("1KiB", "64KiB", "64MiB")
        cells = [(stage, bucket) for stage in (1, 2, 3) for bucket in buckets] if FULL else \
            list(zip((1, 2, 3), buckets))
        for stage, bucket in cells:
            with self.subTest(stage=stage, bucket=bucket):
                seed = str(100 * stage + len(bucket))
                job = self.numbers(stage, {"BALLAST_STANDIN_SEED": seed}, reduce_bucket=bucket)
                first = first or job.numbers()
                self.assertEqual(job.numbers(), first)
                self.close_to(job, right, TOLERANCE["fp32"])

    def test_by_the_library(self):
        for stage in (0, 2):
            job = self.numbers(stage, reductions="library")
            self.close_to(job, self.numbers(0, device="cpu"), TOLERANCE["fp32"])

    def test_the_cpu_device_has_no_library_for_it(self):
        job = self.work.job(2, device="cpu", reductions="library")
        job.start()
        job.wait(code=ballast_test.CONFIG)
        self.assertIn("reductions=ordered", job.output())


class Memory(Cuda):
    def test_too_little_is_told(self):
        # The same report as on the CPU device, and nothing was tried.
        drawn = Drawn(1)
        job = self.job(drawn, "cuda", drawn.standin(), device_memory="1MiB")
        job.start()
        job.wait(code=ballast_test.DOES_NOT_FIT)

    def test_a_commit_that_fails_ends_in_a_save(self):
        drawn = Drawn(3)
        job = self.work.job(2, drawn.changes() | {"train_batch_size": 2 * drawn.micro *
                                                  drawn.accumulation},
                            arguments=["--allow-faults", "--fault",
                                       "commit:rank=1,step=2,phase=backward"],
                            environment=drawn.standin(),
                            model=self.work.model(drawn.family, N_LAYERS),
                            **dict(drawn.settings(), device="cuda"))
        job.start()
        job.wait(code=ballast_test.OUT_OF_MEMORY)
        event = job.events("oom")[0]
        self.assertEqual((event["rank"], event["step"], event["phase"]), (1, 2, "backward"))

    def test_the_ledger_and_the_driver_agree(self):
        drawn = Drawn(2)
        job = self.job(drawn, "cuda", drawn.standin(), pause_at=[2], steps=3).start()
        job.wait_paused(2)
        memory = job.ctl("memory").json
        job.ctl("resume")
        job.wait()
        job.check()
        self.assertEqual(len(memory["ranks"]), drawn.ranks)
        for rank in memory["ranks"]:
            external = sum(entry["bytes"] for entry in rank["memory"]
                           if (entry["tier"], entry["category"]) == ("device", "external"))
            self.assertGreater(external, 0)
            ours = rank["committed_bytes"] + external
            self.assertLess(relative(ours, rank["driver_bytes"]), 0.02, rank)


class Devices(Cuda):
    """Which GPU a rank takes, and that it touches no other."""

    def gpus(self, visible, ranks=2, **more):
        environment = {"BALLAST_CUDA_LIBRARY": STANDIN, **more}
        if visible is not None:
            environment["CUDA_VISIBLE_DEVICES"] = visible
        job = self.work.job(ranks, environment=environment, device="cuda", steps=2).run()
        return [line for line in job.output().splitlines() if "GPU" in line], job

    def test_by_order_by_number_and_by_uuid(self):
        # A context on a second GPU ends the stand-in, so a run that is done touched one a rank.
        plain = self.gpus(None)[1].numbers()
        uuid = "GPU-ba11a570-0000-4000-8000-%012d"
        for visible in ("1,0", "2,3", uuid % 3 + "," + uuid % 1):
            with self.subTest(visible=visible):
                self.assertEqual(self.gpus(visible)[1].numbers(), plain)

    def test_ranks_that_share_one(self):
        lines, job = self.gpus("0")
        self.assertTrue(any("share a GPU" in line for line in lines), job.output())
        self.assertEqual(job.numbers(), self.gpus(None)[1].numbers())

    def refused(self, environment, *words):
        job = self.work.job(1, environment=environment, device="cuda", steps=2)
        job.start()
        job.wait(code=ballast_test.CONFIG)
        for word in words:
            self.assertIn(word, job.output())
        self.assertFalse(os.path.exists(job.path("steps.jsonl")))

    def test_without_a_driver(self):
        self.refused({"BALLAST_CUDA_LIBRARY": STANDIN, "BALLAST_STANDIN_GPUS": "0"},
                     "driver", "--device cpu")

    def test_without_the_library(self):
        self.refused({"BALLAST_CUDA_LIBRARY": os.path.join(self.work.folder, "none.so")},
                     "none.so", "--device cpu")

    def test_the_library_itself_without_a_driver(self):
        library = os.path.join(BIN, "libballast-cuda.so")
        found = subprocess.run(["sh", "-c", "ls /dev/nvidia0"], stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL, check=False)
        if not os.path.exists(library) or found.returncode == 0:
            self.skipTest("needs the plug-in for GPUs and a machine without one")
        self.refused({"BALLAST_CUDA_LIBRARY": library}, "driver", "--device cpu")

    def test_auto_takes_what_there_is(self):
        for gpus, device in (("0", "cpu"), ("2", "GPU")):
            with self.subTest(gpus=gpus):
                job = self.work.job(
                    1, environment={"BALLAST_CUDA_LIBRARY": STANDIN, "BALLAST_STANDIN_GPUS": gpus},
                    device="auto", steps=3, pause_at=[1]).start()
                job.wait_paused(1)
                self.assertIn(device, job.ctl("status").json["device"])
                job.ctl("resume")
                job.wait()


class TestOfTheTest(Cuda):
    """Were an event forgotten, would anybody see it?"""

    def test_a_dropped_wait_is_seen(self):
        drawn = Drawn(5)
        drawn.ranks, drawn.kernels = 2, "cpu"
        right = self.job(drawn, "cuda", drawn.standin()).run().numbers()
        # Most single waits are redundant, and a race need not be lost: one after the other, under
        # other interleavings, until two were missed.
        seen = tried = 0
        for seed, number in itertools.product(range(4), range(1, 13)):
            job = self.job(drawn, "cuda", drawn.standin(BALLAST_STANDIN_DROP_WAIT=str(number),
                                                        BALLAST_STANDIN_SEED=str(seed)))
            job.start()
            code = job.wait(code=None)
            seen += code != ballast_test.DONE or job.numbers() != right
            tried += 1
            if seen == 2:
                break
        self.assertGreaterEqual(seen, 2, "of %d waits left out nobody would miss more" % tried)


if __name__ == "__main__":
    unittest.TestLoader.sortTestMethodsUsing = None
    ballast_test.main(limit_s=540, full_limit_s=3500)
