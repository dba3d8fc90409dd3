"""What is wrong with the input is said before anything is taken: exit code 2, the field, the value
and the limit in words, and no run directory that would have to be cleaned up. End to end, a few of
each kind; unit tests walk the tables."""

import json
import os
import struct

import ballast_test
import common


class BadInput(common.Case):
    def setUp(self):
        super().setUp()
        self.environment = dict(os.environ, **self.work.environment)
        self.environment.update(common.DEFAULT)

    def refused(self, config, *words, ranks=1, arguments=(), code=ballast_test.CONFIG):
        """A launch that must end at once with `code` and these words; its output."""
        run_dir = self.work.fresh("run")
        outcome = common.launch(config, run_dir, self.environment, ranks, arguments)
        self.assertFalse(outcome.hung, outcome.output)
        self.assertEqual(outcome.code, code, outcome.output)
        for word in words:
            self.assertIn(word, outcome.output)
        self.assertNotIn("start:", outcome.output)
        self.assertFalse(os.path.exists(os.path.join(run_dir, "steps.jsonl")))
        self.assertEqual(ballast_test.processes_of(run_dir), {})
        return outcome.output

    def raw(self, text):
        path = self.work.fresh("raw") + ".json"
        with open(path, "wb") as file:
            file.write(text)
        return path

    def with_settings(self, changes=None, **ballast):
        return self.job(1, changes=changes, **ballast).config

    def test_no_such_file(self):
        missing = os.path.join(self.work.folder, "missing.json")
        self.refused(missing, missing, "No such file")

    def test_not_json(self):
        self.refused(self.raw(b'{"ballast": {"model": "t0",,}}'), ":1")
        self.refused(self.raw(b""), "raw")
        self.refused(self.raw(b"\x00\xff\xfe"), "raw")
        self.refused(self.raw(b"[1, 2]"), "raw")
        self.refused(self.raw(b"[" * 100000), "raw")
        self.refused(self.raw(b'{"ballast": {"steps": 1, "steps": 2}}'), "steps")

    def test_not_a_file(self):
        self.refused(self.work.folder, self.work.folder)

    def test_mistyped_keys_and_values(self):
        cases = [
            ({}, {"setps": 3}, ("setps", "steps")),
            ({"train_batchsize": 8}, {}, ("train_batchsize", "train_batch_size")),
            ({}, {"steps": "many"}, ("steps", "many")),
            ({}, {"steps": 0}, ("steps", "0")),
            ({}, {"steps": -1}, ("steps", "-1")),
            ({}, {"steps": 1.5}, ("steps", "1.5")),
            ({}, {"seq_len": 65}, ("seq_len", "65", "64")),
            ({}, {"dropout": 1.0}, ("dropout", "1")),
            ({}, {"device_memory": "12 parsecs"}, ("device_memory", "12 parsecs")),
            ({}, {"model": "t1"}, ("t1", "t0")),
            ({}, {"device": "tpu"}, ("tpu", "cuda")),
            ({}, {"oom": {"policy": "adopt"}}, ("adopt", "report")),
            ({"train_batch_size": 7}, {"seq_len": 8}, ("7",)),
            ({"zero_optimization": {"stage": 4}}, {}, ("stage", "4")),
            ({"train_micro_batch_size_per_gpu": 1},
             {"strategy": {"micro_batch": 2}}, ("micro_batch", "1", "2")),
            ({}, {"strategy": {"checkpointing": "block:0"}}, ("block:0",)),
            ({"optimizer": {"type": "AdamW", "params": {"lr": "fast"}}}, {}, ("lr", "fast")),
        ]
        for changes, ballast, words in cases:
            with self.subTest(changes=changes, ballast=ballast):
                ranks = 2 if changes.get("train_batch_size") == 7 else 1
                self.refused(self.with_settings(changes, **ballast), *words, ranks=ranks)

    def test_command_line(self):
        config = self.with_settings()
        for arguments, words in [
                (["--set", "stesp=3"], ("stesp",)),
                (["--set", "checkpointing=blocks:1"], ("blocks:1",)),
                (["--set", "steps"], ("steps",)),
                (["--steps", "0"], ("--steps", "0")),
                (["--no-such-flag"], ("--no-such-flag",)),
                (["--resume", "newest"], ("newest", "latest")),
                (["--allow-faults", "--fault", "commit:phase=backwards"], ("backwards", "forward")),
                (["--allow-faults", "--fault", "comit:step=1"], ("comit", "commit")),
        ]:
            with self.subTest(arguments=arguments):
                self.refused(config, *words, arguments=arguments)

    def tokens(self, ids):
        path = self.work.fresh("tokens") + ".bin"
        with open(path, "wb") as file:
            file.write(struct.pack("<%dH" % len(ids), *ids))
        return path

    def test_data(self):
        missing = os.path.join(self.work.folder, "missing.txt")
        self.refused(self.with_settings(data=missing), missing)
        self.refused(self.with_settings(data=self.work.folder), self.work.folder)
        self.refused(self.with_settings(data=self.work.text(20)), "20", "32")
        # A token that the model has no row for: the file, the place and the token are named.
        bad = self.tokens([7 * i % 256 for i in range(1000)] + [256] + [1] * 1000)
        self.refused(self.with_settings(data=bad, data_format="nanogpt"), bad, "256", "1000")

    def test_on_every_rank_alike(self):
        # mpirun returns the code of whichever rank it sees first: all have the same.
        self.refused(self.with_settings(setps=3), "setps", ranks=2)
        missing = os.path.join(self.work.folder, "missing.txt")
        self.refused(self.with_settings(data=missing), missing, ranks=2)
        self.refused(self.with_settings(), "--expect-ranks", "3", ranks=2,
                     arguments=["--expect-ranks", "3"])

    def test_run_directory(self):
        job = self.job(1, steps=2, eval_data=None, eval=None, save={"every": 0})
        job.run()
        lines, events = common.read(job.path("steps.jsonl")), common.read(job.path("events.jsonl"))
        again = common.launch(job.config, job.run_dir, self.environment)
        self.assertEqual(again.code, ballast_test.CONFIG)
        self.assertIn("--resume latest", again.output)
        # It wants more steps than it has and there is nothing to go on from: a code of its own.
        again = common.launch(job.config, job.run_dir, self.environment, 1,
                              ["--resume", "latest", "--steps", "3"])
        self.assertEqual(again.code, ballast_test.NO_SAVE, again.output)
        self.assertIn("no save", again.output)
        self.assertEqual(common.read(job.path("steps.jsonl")), lines, "left alone")
        self.assertTrue(common.read(job.path("events.jsonl")).startswith(events))

    def test_run_directory_that_cannot_be(self):
        file = self.work.text(100)
        outcome = common.launch(self.with_settings(), os.path.join(file, "run"), self.environment)
        self.assertNotEqual(outcome.code, 0)
        self.assertLess(outcome.code, 8)
        self.assertIn(file, outcome.output)
        self.assertIn("Not a directory", outcome.output)

    def test_a_save_of_another_run(self):
        job = self.job(1, steps=2, eval_data=None, eval=None, save={"every": 2})
        job.run()
        for change, word in (("seed=8", "seed"), ("seq_len=16", "seq_len"),
                             ("model=gpt2-tiny", "tensor")):
            with self.subTest(change=change):
                outcome = common.launch(job.config, job.run_dir, self.environment, 1,
                                        ["--resume", "latest", "--steps", "4", "--set", change])
                self.assertNotEqual(outcome.code, 0)
                self.assertLess(outcome.code, 8)
                self.assertIn(word, outcome.output)
                self.assertNotIn("resumed at", outcome.output)
        # The save itself is none the worse.
        again = common.launch(job.config, job.run_dir, self.environment, 1,
                              ["--resume", "latest", "--steps", "4"])
        self.assertEqual(again.code, 0, again.output)

    def test_check_config_says_it_too(self):
        config = self.with_settings(setps=3)
        self.refused(config, "setps", arguments=["--check-config"])
        whole = common.launch(self.with_settings(), self.work.fresh("run"), self.environment, 1,
                              ["--check-config", "--json"])
        self.assertEqual(whole.code, 0, whole.output)
        self.assertTrue(json.loads(whole.output))


if __name__ == "__main__":
    ballast_test.main(limit_s=180)
