#!/usr/bin/env python3
"""Train the same GPT-2 with PyTorch: from the weights of a Ballast save, on the same tokens in the
same order, with the same optimizer; print losses and times as one JSON object.

    torch_step.py --shape SHAPE.json --tokens FILE --seq-len T --micro-batch B --accumulation A
                  --steps N [--save RUN/save/step-0] [--lr F] [--clip F] [--weight-decay F]
                  [--mode eager|compile] [--device cuda|cpu]
    torch_step.py --check ...      only read the save and the tokens; needs no PyTorch

Weights stay fp32 and products run in bf16 (torch.autocast), attention is PyTorch's flash kernel,
the update its fused AdamW: what a PyTorch user would write. Without --save the weights are
PyTorch's own, for timing alone. Needs the standard library and torch; fetches nothing.

Exit codes: 0 done, 1 wrong input, 4 PyTorch (or a GPU for it) is not there."""

import argparse
import array
import json
import os
import sys
import time

LLMC_HEADER_BYTES = 1024
LLMC_WIDTH = {20240520: ("H", 2), 20240801: ("I", 4)}  # by magic


def read_tokens(path):
    """The ids of an llm.c token file."""
    with open(path, "rb") as file:
        header = array.array("i", file.read(LLMC_HEADER_BYTES))
        if len(header) != LLMC_HEADER_BYTES // 4 or header[0] not in LLMC_WIDTH:
            sys.exit("%s: not a token file of llm.c" % path)
        code, width = LLMC_WIDTH[header[0]]
        ids = array.array(code, file.read(header[2] * width))
    if len(ids) != header[2]:
        sys.exit("%s: %d tokens, its header says %d" % (path, len(ids), header[2]))
    return ids


def read_save(folder):
    """{tensor: (shard's path, [(first, n, offset), ...], elements)} of the parameters of a save."""
    with open(os.path.join(folder, "manifest.json"), encoding="utf-8") as file:
        manifest = json.load(file)
    tensors = {}
    for shard in manifest["shards"]:
        path = os.path.join(folder, shard["file"])
        for piece in shard["pieces"]:
            if piece["state"] != "param":
                continue
            entry = tensors.setdefault(piece["tensor"], (path, [], piece["tensor_n"]))
            if entry[0] != path:
                sys.exit("%s: %s is spread over shards: save on one rank"
                         % (folder, piece["tensor"]))
            entry[1].append((piece["first"], piece["n"], piece["offset"]))
    for name, (_, pieces, n_elements) in tensors.items():
        at = 0
        for first, n, _ in sorted(pieces):
            if first != at:
                sys.exit("%s: %s lacks elements from %d on" % (folder, name, at))
            at += n
        if at != n_elements:
            sys.exit("%s: %s has %d of %d elements" % (folder, name, at, n_elements))
    return tensors


def read_tensor(entry):
    """The fp32 elements of one tensor."""
    path, pieces, _ = entry
    values = array.array("f")
    with open(path, "rb") as file:
        for _, n, offset in sorted(pieces):
            file.seek(offset)
            values.frombytes(file.read(4 * n))
    return values


def expected_shapes(shape):
    """{tensor: shape} of this GPT-2, matrices as (out, in)."""
    width, inner = shape["n_embd"], shape.get("n_inner") or 4 * shape["n_embd"]
    shapes = {"transformer.wte.weight": (shape["vocab_size"], width),
              "transformer.wpe.weight": (shape["n_positions"], width),
              "transformer.ln_f.weight": (width,), "transformer.ln_f.bias": (width,)}
    for layer in range(shape["n_layer"]):
        block = "transformer.h.%d." % layer
        for norm in ("ln_1", "ln_2"):
            shapes[block + norm + ".weight"] = shapes[block + norm + ".bias"] = (width,)
        for name, rows, columns in (
                ("attn.c_attn", 3 * width, width), ("attn.c_proj", width, width),
                ("mlp.c_fc", inner, width), ("mlp.c_proj", width, inner)):
            shapes[block + name + ".weight"] = (rows, columns)
            shapes[block + name + ".bias"] = (rows,)
    return shapes


def check_save(tensors, shape):
    """The save has exactly this model's tensors, in full."""
    expected = expected_shapes(shape)
    if set(expected) != set(tensors):
        sys.exit("the save and the shape have different tensors: %s"
                 % sorted(set(expected) ^ set(tensors))[:6])
    for name, dims in expected.items():
        n = 1
        for dim in dims:
            n *= dim
        if tensors[name][2] != n:
            sys.exit("%s: %d elements in the save, %d in the shape" % (name, tensors[name][2], n))


def rows_of_step(n_tokens, seq_len, global_batch, step):
    """Where the rows of a step begin: samples in file order, again from the start at the end."""
    n_samples = (n_tokens - 1) // seq_len
    return [(step * global_batch + row) % n_samples * seq_len for row in range(global_batch)]


# ---- PyTorch -------------------------------------------------------------------------------


def build_model(torch, shape):
    """GPT-2 as its paper has it, with Hugging Face's names; the head is the embedding's table."""
    nn, functional = torch.nn, torch.nn.functional
    width, inner = shape["n_embd"], shape.get("n_inner") or 4 * shape["n_embd"]
    n_heads, epsilon = shape["n_head"], shape.get("layer_norm_epsilon", 1e-5)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

        def forward(self, x):
            batch, tokens, _ = x.shape
            q, k, v = (part.view(batch, tokens, n_heads, width // n_heads).transpose(1, 2)
                       for part in self.c_attn(x).split(width, dim=2))
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.c_proj(y.transpose(1, 2).reshape(batch, tokens, width))

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.c_fc, self.c_proj = nn.Linear(width, inner), nn.Linear(inner, width)

        def forward(self, x):
            return self.c_proj(functional.gelu(self.c_fc(x), approximate="tanh"))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(width, epsilon), nn.LayerNorm(width, epsilon)
            self.attn, self.mlp = Attention(), Mlp()

        def forward(self, x):
            x = x + self.attn(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))

    class Gpt2(nn.Module):
        def __init__(self):
            super().__init__()
            self.transformer = nn.ModuleDict({
                "wte": nn.Embedding(shape["vocab_size"], width),
                "wpe": nn.Embedding(shape["n_positions"], width),
                "h": nn.ModuleList(Block() for _ in range(shape["n_layer"])),
                "ln_f": nn.LayerNorm(width, epsilon)})

        def forward(self, tokens, labels):
            parts = self.transformer
            x = parts["wte"](tokens) + parts["wpe"].weight[:tokens.shape[1]]
            for block in parts["h"]:
                x = block(x)
            logits = functional.linear(parts["ln_f"](x), parts["wte"].weight)
            return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    return Gpt2()


def load(torch, model, tensors):
    state = {}
    for name, dims in ((name, parameter.shape) for name, parameter in model.named_parameters()):
        state[name] = torch.frombuffer(read_tensor(tensors[name]), dtype=torch.float32).view(dims)
    model.load_state_dict(state, strict=True)


def small_start(torch, model):
    """Weights of GPT-2's size, so that a timing run without a save computes with usual numbers."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.02)


def train(torch, options, shape):
    device = torch.device(options.device)
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")  # for the little that autocast leaves in fp32
    with device:
        model = build_model(torch, shape)
    if options.save:
        load(torch, model, read_save(options.save))
    else:
        small_start(torch, model)
    groups = [{"params": [p for p in model.parameters() if p.dim() >= 2],
               "weight_decay": options.weight_decay},
              {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    fused = {"fused": True} if device.type == "cuda" else {}
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), eps=1e-8, **fused)
    forward = torch.compile(model) if options.mode == "compile" else model
    ids = read_tokens(options.tokens)
    stream = torch.tensor(list(ids), dtype=torch.int64, device=device)
    along = torch.arange(options.seq_len, device=device)
    global_batch = options.micro_batch * options.accumulation
    losses, step_ms, began = [], [], time.monotonic()
    for step in range(options.steps):
        started = time.monotonic()
        rows = rows_of_step(len(ids), options.seq_len, global_batch, step)
        total = torch.zeros((), device=device)
        for first in range(0, global_batch, options.micro_batch):
            picked = torch.tensor(rows[first:first + options.micro_batch], device=device)
            places = picked[:, None] + along
            inputs, labels = stream[places], stream[places + 1]
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = forward(inputs, labels) / options.accumulation
            loss.backward()
            total += loss.detach()
        if options.clip > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total.item())  # waits for the step
        step_ms.append((time.monotonic() - started) * 1e3)
        if time.monotonic() - began > options.limit:
            break  # what there is has to do
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {"losses": losses, "step_ms": step_ms, "peak_bytes": peak,
            "torch": torch.__version__, "mode": options.mode}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--shape", required=True)
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--save")
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--mode", choices=("eager", "compile"), default="eager")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which to stop")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    with open(options.shape, encoding="utf-8") as file:
        shape = json.load(file)
    if options.check:
        ids = read_tokens(options.tokens)
        tensors = read_save(options.save)
        check_save(tensors, shape)
        first = read_tensor(tensors["transformer.wte.weight"])
        mean_square = sum(value * value for value in first[:100000]) / min(len(first), 100000)
        rows = rows_of_step(len(ids), options.seq_len,
                            options.micro_batch * options.accumulation, options.steps)
        print(json.dumps({"tensors": len(tensors), "tokens": len(ids), "rows": len(rows),
                          "embedding_std": mean_square ** 0.5}))
        return 0
    try:
        import torch
    except ImportError:
        print("torch is not importable", file=sys.stderr)
        return 4
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch %s is there, but sees no GPU" % torch.__version__, file=sys.stderr)
        return 4
    print(json.dumps(train(torch, options, shape)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
