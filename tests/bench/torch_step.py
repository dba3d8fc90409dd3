#!/usr/bin/env python3
"""The step that bench_step measures, in PyTorch: GPT-2 124M in fp32 on the CPU, for comparison where
torch is installed.

    torch_step.py [--batch 4] [--seq-len 256] [--threads 2] [--steps 4]

Prints tokens per second and the median step. Tuned as far as its settings go: the threads given, and
where it multiplies through OpenBLAS (Debian's does) that library's kernels for AVX-512, which it
does not choose by itself on every processor. Exit code 4: no torch."""

import argparse
import math
import os
import statistics
import sys
import time

SHAPE = {"n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}


def attention(q, k, v, is_causal):
    """For versions before 2.0."""
    import torch

    assert is_causal
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -math.inf).softmax(-1) @ v


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    os.environ["OPENBLAS_CORETYPE"] = "SkylakeX"  # both before the library is loaded
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    try:
        import torch
    except ImportError:
        print("torch is not installed", file=sys.stderr)
        return 4
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "device"))
    import torch_step as device_step  # the model; this file's own name is __main__

    torch.set_num_threads(options.threads)
    if not hasattr(torch.nn.functional, "scaled_dot_product_attention"):
        torch.nn.functional.scaled_dot_product_attention = attention
    torch.manual_seed(1)
    square = torch.randn(1024, 1024)
    started = time.monotonic()
    square @ square
    rate = 2 * 1024 ** 3 / (time.monotonic() - started) / 1e9
    if rate < 20:
        print("PyTorch %s multiplies at %.1f GFLOP/s here: install libopenblas0-openmp for a "
              "comparison" % (torch.__version__, rate))
        return 0
    model = device_step.build_model(torch, SHAPE)
    device_step.small_start(torch, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    times = []
    for _ in range(options.steps + 1):
        rows = torch.randint(SHAPE["vocab_size"], (options.batch, options.seq_len + 1))
        started = time.monotonic()
        model(rows[:, :-1], rows[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(time.monotonic() - started)
    step = statistics.median(times[1:])  # the first warms up
    print("PyTorch %s, fp32, %d threads: GPT-2 124M, B %d, T %d: %.0f tok/s, step %.0f ms"
          % (torch.__version__, options.threads, options.batch, options.seq_len,
             options.batch * options.seq_len / step, step * 1e3))
    return 0


if __name__ == "__main__":
    sys.exit(main())
