"""What watching costs: steps of one run with a client subscribed at 10 Hz and without, in turns.

    BALLAST_BIN=build/release/bin python3 tests/bench/watch_cost.py [blocks]

The run is paused between blocks of steps; in every second block `ballastctl watch` is subscribed.
Block times are compared in pairs (A B, B A, ...), so that a busy machine disturbs both alike.
Prints one line, and the same as JSON."""

import json
import os
import statistics
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import ballast_test  # noqa: E402

STEPS_A_BLOCK = 20


def watch(job):
    return subprocess.Popen(
        [os.path.join(ballast_test.BIN, "ballastctl"), "watch", "--interval", "100",
         "--run-dir", job.run_dir], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=dict(os.environ, **job.work.environment))


def block(job, first, watched):
    """Median step time of the next block."""
    client = watch(job) if watched else None
    job.ctl("resume", "--for", STEPS_A_BLOCK)
    job.wait_paused(first + STEPS_A_BLOCK)
    if client is not None:
        client.terminate()
        client.wait(10)
    lines = job.steps()[first:first + STEPS_A_BLOCK]
    # The first step after a pause wakes threads and caches.
    return statistics.median(line["step_ms"] for line in lines[1:])


def main():
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    work = ballast_test.Work()
    try:
        job = work.job(ranks=2, steps=2 * pairs * STEPS_A_BLOCK + 1, model="llama-tiny-bytes",
                       seq_len=128, pause_at=[0], device_memory="1GiB").start()
        job.wait_paused(0)
        ratios, first = [], 0
        for pair in range(pairs):
            times = {}
            for watched in ((True, False) if pair % 2 else (False, True)):
                times[watched] = block(job, first, watched)
                first += STEPS_A_BLOCK
            ratios.append(times[True] / times[False])
        job.ctl("resume")
        job.wait()
    finally:
        work.close()
    ratio = statistics.median(ratios)
    print("watched at 10 Hz / not watched: %.4f (median of %d pairs, %.4f to %.4f)"
          % (ratio, pairs, min(ratios), max(ratios)))
    print(json.dumps({"bench": "watch_cost", "ratio": ratio, "pairs": pairs}))


if __name__ == "__main__":
    main()
