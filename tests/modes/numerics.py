"""What may change numbers changes them as little as the numerics contract (design, section 7)
allows: loss_tile, micro-batch, accumulation and the number of ranks agree to 1e-5 relative from
equal weights; the rest not at all."""

import itertools

import ballast_test
from ballast_test import FULL

CLOSE = 1e-5


class Numerics(ballast_test.Case):
    def assert_close(self, job, reference, what):
        """Loss and norm of every step of short runs, in which weights have hardly moved apart."""
        lines, expected = job.steps(), reference.steps()
        self.assertEqual(len(lines), len(expected))
        for line, other in zip(lines, expected):
            for key in ("loss", "grad_norm"):
                self.assertLess(abs(line[key] / other[key] - 1), CLOSE,
                                "%s: %s of step %d: %r, reference %r"
                                % (what, key, line["step"], line[key], other[key]))

    def test_loss_tile(self):
        """Tiles of the head and the loss, of sizes that divide and that do not."""
        for family in ("gpt2", "llama"):
            # So many words that the logits are what is largest.
            keys = {"model": self.work.model(family, vocab=2048), "steps": 3}
            whole = self.work.job(2, **keys).run()
            for tile in (1, 7, 16, 63) if FULL else (7, 16):
                with self.subTest(family=family, tile=tile):
                    tiled = self.work.job(2, strategy={"loss_tile": tile}, **keys).run()
                    self.assert_close(tiled, whole, "loss_tile=%d" % tile)
                    # It is there for memory, which it must save.
                    self.assertLess(tiled.steps()[0]["peak_bytes"]["forward"],
                                    whole.steps()[0]["peak_bytes"]["forward"])
                    # Under tiles as without, checkpointing changes nothing at all.
                    both = self.work.job(2, strategy={"loss_tile": tile, "checkpointing": "block:1",
                                                      "checkpointing.layers": 2}, **keys).run()
                    self.assertEqual(both.numbers(), tiled.numbers())

    def test_loss_tile_switched(self):
        """Set on a running job, and taken back: from then on it is the run that never did."""
        keys = {"steps": 4, "pause_at": 1}
        job = self.work.job(2, **keys).start()
        job.drive({1: ["loss_tile=16"], 2: ["loss_tile=0"]})
        job.wait()
        job.check()
        plain = self.work.job(2, steps=4).run()
        self.assert_close(job, plain, "loss_tile for one step")
        self.assertEqual(job.steps()[0]["loss"], plain.steps()[0]["loss"])

    def test_layers(self):
        """checkpointing.layers is memory only: bit for bit, and each layer saves some."""
        keys = {"model": self.work.model("llama", layers=4), "steps": 4}
        for mode in ("selective", "split", "block:1", "block:3") if FULL else ("split", "block:1"):
            jobs = [self.work.job(2, strategy={"checkpointing": mode, "checkpointing.layers": n},
                                  **keys).run() for n in range(5)]
            for job in jobs[1:]:
                self.assertEqual(job.numbers(), jobs[0].numbers())
            peaks = [max(job.steps()[0]["peak_bytes"].values()) for job in jobs]
            if mode != "block:3":
                # The last one saves nothing: one block's activations are needed for its backward.
                self.assertEqual(peaks, sorted(peaks, reverse=True), mode)
                self.assertEqual(len(set(peaks[:4])), 4, (mode, peaks))

    def test_batch_layout(self):
        """The same eight rows over ranks, micro-batches and accumulation: loss, gradient norm and
        so the clip factor are the same to 1e-5, with dropout, which follows the row."""
        for family in ("gpt2", "llama"):
            reference = None
            layouts = [(ranks, micro_batch)
                       for ranks, micro_batch in itertools.product((1, 2, 4), (1, 2, 4, 8))
                       if ranks * micro_batch <= 8]
            if not FULL:
                layouts = [(1, 8), (1, 2), (2, 4), (2, 1), (4, 2)]
            for ranks, micro_batch in layouts:
                with self.subTest(family=family, ranks=ranks, micro_batch=micro_batch):
                    changes = {"train_batch_size": 8, "gradient_clipping": 0.5,
                               "train_micro_batch_size_per_gpu": micro_batch}
                    job = self.work.job(ranks, changes, steps=5, dropout=0.1,
                                        model=self.work.model(family)).run()
                    reference = reference or job
                    self.assert_close(job, reference, "%d ranks of %d" % (ranks, micro_batch))
            # The clip is on: norms are above it.
            self.assertGreater(min(line["grad_norm"] for line in reference.steps()), 0.5)

    def test_micro_batch_while_running(self):
        """Switched live with the global batch held: each step agrees with the one it replaces."""
        steps = 6
        changes = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}
        plain = self.work.job(2, changes, steps=steps).run()
        walked = self.work.job(2, changes, steps=steps, pause_at=1).start()
        walked.drive({1: ["micro_batch=4"], 2: ["micro_batch=8", "zero.stage=2"],
                      4: ["micro_batch=1", "checkpointing=block:1"]})
        walked.wait()
        walked.check()
        self.assertEqual([line["strategy"]["micro_batch"] for line in walked.steps()],
                         [2, 4, 8, 8, 1, 1])
        self.assert_close(walked, plain, "micro-batches 2, 4, 8, 1")


if __name__ == "__main__":
    ballast_test.main()
