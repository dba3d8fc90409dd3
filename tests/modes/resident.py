"""What a switch says it releases is what the system sees come back.

Resident memory of the worker processes, read from outside (/proc/PID/smaps_rollup), falls at a
switch to block:1 by what its event says it gives back, within 5 %, and comes back with the way
back. The run stands still at a step boundary for each reading, so that nothing else moves."""

import statistics

import ballast_test
from ballast_test import FULL

TOLERANCE = 0.05
MIB = 1 << 20


def resident_bytes(pid):
    with open("/proc/%d/smaps_rollup" % pid, encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file.read().splitlines()[1:])
    return int(fields["Rss"].split()[0]) * 1024


class Resident(ballast_test.Case):
    def resident(self, job):
        """Median of a few readings of every rank: {rank: bytes}."""
        pids = job.wait_for_ranks()
        return {rank: statistics.median(resident_bytes(pid) for _ in range(5))
                for rank, pid in pids.items()}

    def switch(self, job, mode, step):
        """Set it at `step`, then run a step with it; the event."""
        job.ctl("set", "checkpointing=" + mode, "--wait")
        event = job.events("switch")[-1]
        self.assertEqual((event["step"], event["after"]), (step, "checkpointing=" + mode))
        return event

    def check_release(self, ranks, family, seq_len, micro_batch):
        changes = {"train_batch_size": ranks * micro_batch,
                   "train_micro_batch_size_per_gpu": micro_batch}
        job = self.work.job(ranks, changes, model=self.work.model(family, layers=8),
                            seq_len=seq_len, steps=7, pause_at=2, device_memory="1GiB").start()
        job.wait_paused(2)
        step = 2
        for turn in range(2):
            before = self.resident(job)
            down = self.switch(job, "block:1", step)
            released = down["committed_before"] - down["committed_after"]
            self.assertGreater(released, 24 * MIB, "too little to be measured")
            at_once = self.resident(job)
            job.ctl("resume", "--for", 1)
            step += 1
            job.wait_paused(step)
            low = self.resident(job)
            up = self.switch(job, "none", step)
            self.assertEqual(up["committed_after"] - up["committed_before"], released)
            job.ctl("resume", "--for", 1)
            step += 1
            job.wait_paused(step)
            high = self.resident(job)
            for rank in before:
                with self.subTest(turn=turn, rank=rank, released=released):
                    # At the switch itself, not some time after it.
                    for fell in (before[rank] - at_once[rank], before[rank] - low[rank],
                                 high[rank] - low[rank]):
                        self.assertAlmostEqual(fell / released, 1.0, delta=TOLERANCE)
            # What the ranks say of themselves is what the system says.
            for rank in job.ctl("ranks").json["ranks"]:
                self.assertAlmostEqual(rank["resident_bytes"] / high[rank["rank"]], 1.0,
                                       delta=TOLERANCE)
        job.ctl("resume")
        job.wait()
        job.check()

    def test_release(self):
        shapes = [(2, "llama", 128, 8), (1, "gpt2", 128, 16)]
        if FULL:
            shapes += [(4, "gpt2", 128, 8), (1, "llama", 64, 32), (2, "gpt2", 128, 24)]
        for ranks, family, seq_len, micro_batch in shapes:
            with self.subTest(ranks=ranks, family=family):
                self.check_release(ranks, family, seq_len, micro_batch)


if __name__ == "__main__":
    ballast_test.main()
