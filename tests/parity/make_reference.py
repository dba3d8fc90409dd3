#!/usr/bin/env python3
"""Write gpt2.ref and llama.ref: what an independent implementation computes for two tiny models.

Both model families are written out here in plain PyTorch, in float64, from the definitions that
Hugging Face's `config.json` keys stand for, and share nothing with Ballast's own code. PyTorch's
automatic differentiation supplies the gradients. The same code in float32 tells how far a
correct fp32 program may be from these values; finite differences in float64 check the gradients.

Needs PyTorch (Debian: `apt-get install --no-install-recommends python3-torch`), run as

    /usr/bin/python3 tests/parity/make_reference.py            # writes the .ref files beside itself
    /usr/bin/python3 tests/parity/make_reference.py --check    # compares with the files there

With `--transformers` it is also compared with that library's models, where it is installed.
README.md describes the file's form and the choices made here.
"""
import argparse
import math
import os
import sys

import numpy
import torch

V, T, B, L, H, N_HEADS = 61, 12, 3, 2, 32, 4
GPT2 = dict(vocab_size=V, n_positions=16, n_embd=H, n_layer=L, n_head=N_HEADS, n_inner=96,
            layer_norm_epsilon=1e-5)
LLAMA = dict(vocab_size=V, max_position_embeddings=16, hidden_size=H, num_hidden_layers=L,
             num_attention_heads=N_HEADS, num_key_value_heads=2, head_dim=8, intermediate_size=48,
             rms_norm_eps=1e-5, rope_theta=10000.0)
ADAMW = dict(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, clip=3.5)
N_STEPS = 10
IGNORED = -1


# --- the models: dictionaries of named tensors and one function each ----------------------------

def gpt2_shapes():
    """Names are Hugging Face's; every matrix is (out, in), for GPT-2 transposed against HF's files."""
    inner = GPT2["n_inner"]
    shapes = {"transformer.wte.weight": (V, H),
              "transformer.wpe.weight": (GPT2["n_positions"], H)}
    for layer in range(L):
        at = f"transformer.h.{layer}."
        shapes.update({at + "ln_1.weight": (H,), at + "ln_1.bias": (H,),
                       at + "attn.c_attn.weight": (3 * H, H), at + "attn.c_attn.bias": (3 * H,),
                       at + "attn.c_proj.weight": (H, H), at + "attn.c_proj.bias": (H,),
                       at + "ln_2.weight": (H,), at + "ln_2.bias": (H,),
                       at + "mlp.c_fc.weight": (inner, H), at + "mlp.c_fc.bias": (inner,),
                       at + "mlp.c_proj.weight": (H, inner), at + "mlp.c_proj.bias": (H,)})
    shapes.update({"transformer.ln_f.weight": (H,), "transformer.ln_f.bias": (H,)})
    return shapes


def llama_shapes():
    head, inner = LLAMA["head_dim"], LLAMA["intermediate_size"]
    kv = LLAMA["num_key_value_heads"] * head
    shapes = {"model.embed_tokens.weight": (V, H)}
    for layer in range(L):
        at = f"model.layers.{layer}."
        shapes.update({at + "input_layernorm.weight": (H,),
                       at + "self_attn.q_proj.weight": (N_HEADS * head, H),
                       at + "self_attn.k_proj.weight": (kv, H),
                       at + "self_attn.v_proj.weight": (kv, H),
                       at + "self_attn.o_proj.weight": (H, N_HEADS * head),
                       at + "post_attention_layernorm.weight": (H,),
                       at + "mlp.gate_proj.weight": (inner, H),
                       at + "mlp.up_proj.weight": (inner, H),
                       at + "mlp.down_proj.weight": (H, inner)})
    shapes.update({"model.norm.weight": (H,), "lm_head.weight": (V, H)})
    return shapes


def layer_norm(x, weight, bias, eps):
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + eps) * weight + bias


def rms_norm(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))


def silu(x):
    return x / (1 + torch.exp(-x))


def heads_first(x, n_heads):
    """(B, T, n_heads * hd) -> (B, n_heads, T, hd)"""
    return x.reshape(x.shape[0], x.shape[1], n_heads, -1).transpose(1, 2)


def causal_attention(q, k, v):
    """(B, heads, T, hd) each -> (B, T, heads * hd)"""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(later, -math.inf)
    scores = torch.exp(scores - scores.max(-1, keepdim=True).values)
    out = scores / scores.sum(-1, keepdim=True) @ v
    return out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1)


def gpt2_logits(w, inputs):
    eps = GPT2["layer_norm_epsilon"]
    x = w["transformer.wte.weight"][inputs] + w["transformer.wpe.weight"][:inputs.shape[1]]
    for layer in range(L):
        def p(name):
            return w[f"transformer.h.{layer}.{name}"]
        y = layer_norm(x, p("ln_1.weight"), p("ln_1.bias"), eps)
        qkv = y @ p("attn.c_attn.weight").T + p("attn.c_attn.bias")
        q, k, v = (heads_first(part, N_HEADS) for part in qkv.split(H, dim=-1))
        x = x + causal_attention(q, k, v) @ p("attn.c_proj.weight").T + p("attn.c_proj.bias")
        y = layer_norm(x, p("ln_2.weight"), p("ln_2.bias"), eps)
        y = gelu_tanh(y @ p("mlp.c_fc.weight").T + p("mlp.c_fc.bias"))
        x = x + y @ p("mlp.c_proj.weight").T + p("mlp.c_proj.bias")
    x = layer_norm(x, w["transformer.ln_f.weight"], w["transformer.ln_f.bias"], eps)
    return x @ w["transformer.wte.weight"].T


def rotate(x):
    """Rotary positions on (B, heads, T, hd): component i turns with component i + hd/2."""
    half = x.shape[-1] // 2
    frequency = LLAMA["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * frequency
    cos, sin = torch.cos(angle).to(x.dtype), torch.sin(angle).to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def llama_logits(w, inputs):
    eps, kv_heads = LLAMA["rms_norm_eps"], LLAMA["num_key_value_heads"]
    x = w["model.embed_tokens.weight"][inputs]
    for layer in range(L):
        def p(name):
            return w[f"model.layers.{layer}.{name}.weight"]
        y = rms_norm(x, p("input_layernorm"), eps)
        q = rotate(heads_first(y @ p("self_attn.q_proj").T, N_HEADS))
        k = rotate(heads_first(y @ p("self_attn.k_proj").T, kv_heads))
        v = heads_first(y @ p("self_attn.v_proj").T, kv_heads)
        # Query head h reads key/value head h // (heads / kv_heads).
        k, v = (part.repeat_interleave(N_HEADS // kv_heads, dim=1) for part in (k, v))
        x = x + causal_attention(q, k, v) @ p("self_attn.o_proj").T
        y = rms_norm(x, p("post_attention_layernorm"), eps)
        y = silu(y @ p("mlp.gate_proj").T) * (y @ p("mlp.up_proj").T)
        x = x + y @ p("mlp.down_proj").T
    return rms_norm(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].T


def mean_loss(logits, labels):
    """The sum over valid labels divided by their number, over the whole batch."""
    valid = labels != IGNORED
    highest = logits.max(-1, keepdim=True).values
    log_sum = highest.squeeze(-1) + torch.log(torch.exp(logits - highest).sum(-1))
    chosen = logits.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return ((log_sum - chosen) * valid).sum() / valid.sum()


# --- values --------------------------------------------------------------------------------------

def initial_weights(shapes, seed):
    """Large enough that every part of the model matters; exact in float32. The seeds are chosen
    so that no gradient element is so near zero that AdamW makes rounding errors visible."""
    random = numpy.random.RandomState(seed)
    weights = {}
    for name, shape in shapes.items():
        value = random.standard_normal(shape)
        if len(shape) == 2:
            value *= 0.2
        elif name.endswith("bias"):
            value *= 0.1
        else:
            value = 1 + 0.1 * value
        weights[name] = torch.from_numpy(value.astype(numpy.float32))
    return weights


def batch():
    """Rows with 12, 5 and 2 valid labels, so that a mean of means is wrong."""
    random = numpy.random.RandomState(5)
    stream = random.randint(0, V, size=(B, T + 1))
    inputs, labels = stream[:, :-1].copy(), stream[:, 1:].copy()
    labels[1, :4] = IGNORED
    labels[1, 7] = labels[1, 9:11] = IGNORED
    labels[2, 1:8] = labels[2, 9:] = IGNORED
    return torch.from_numpy(inputs), torch.from_numpy(labels)


def loss_and_gradients(logits_of, weights, inputs, labels):
    for value in weights.values():
        value.requires_grad_(True)
        value.grad = None
    loss = mean_loss(logits_of(weights, inputs), labels)
    loss.backward()
    gradients = {name: value.grad.detach().clone() for name, value in weights.items()}
    for value in weights.values():
        value.requires_grad_(False)
    return loss.item(), gradients


def global_norm(gradients):
    return math.sqrt(sum((g.double() ** 2).sum().item() for g in gradients.values()))


def train(logits_of, weights, inputs, labels):
    """Ten AdamW steps on one batch: decoupled decay on matrices only, one global norm."""
    w = {name: value.clone() for name, value in weights.items()}
    m = {name: torch.zeros_like(value) for name, value in w.items()}
    v = {name: torch.zeros_like(value) for name, value in w.items()}
    a, losses, norms = ADAMW, [], []
    for step in range(1, N_STEPS + 1):
        loss, gradients = loss_and_gradients(logits_of, w, inputs, labels)
        norm = global_norm(gradients)
        losses.append(loss)
        norms.append(norm)
        scale = min(1.0, a["clip"] / norm)
        for name, g in gradients.items():
            g = g * scale
            m[name] = a["beta1"] * m[name] + (1 - a["beta1"]) * g
            v[name] = a["beta2"] * v[name] + (1 - a["beta2"]) * g * g
            m_hat = m[name] / (1 - a["beta1"] ** step)
            v_hat = v[name] / (1 - a["beta2"] ** step)
            decay = a["weight_decay"] if w[name].dim() == 2 else 0.0
            w[name] = w[name] - a["lr"] * (m_hat / (torch.sqrt(v_hat) + a["eps"]) + decay * w[name])
    return losses, norms, w


# --- checks --------------------------------------------------------------------------------------

def relative(a, b):
    a, b = a.double(), b.double()
    size = b.norm().item()
    return (a - b).norm().item() / size if size > 0 else (a - b).norm().item()


def key_bias_aside(name, value):
    """A bias common to all keys cannot change a softmax: its true gradient is zero."""
    if not name.endswith("c_attn.bias"):
        return value
    return torch.cat([value[:H], value[2 * H:]])


def check_finite_differences(logits_of, weights, gradients, inputs, labels):
    """Slope along random directions, one tensor at a time, central differences."""
    torch.manual_seed(1)
    worst = 0.0
    for name, value in weights.items():
        for _ in range(3):
            direction = torch.randn_like(value)
            direction /= direction.norm()
            at = {}
            for sign in (-2, -1, 1, 2):
                moved = dict(weights)
                moved[name] = value + sign * 1e-3 * direction
                at[sign] = mean_loss(logits_of(moved, inputs), labels).item()
            slope = (8 * (at[1] - at[-1]) - (at[2] - at[-2])) / (12 * 1e-3)
            wanted = (gradients[name] * direction).sum().item()
            worst = max(worst, abs(slope - wanted) / max(gradients[name].norm().item(), 1e-6))
    return worst


def check_torch_optimizer(logits_of, weights, inputs, labels, finals):
    """The ten steps again with PyTorch's own AdamW and clipping."""
    w = {name: value.clone().requires_grad_(True) for name, value in weights.items()}
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in w.values() if p.dim() == 2], "weight_decay": ADAMW["weight_decay"]},
         {"params": [p for p in w.values() if p.dim() != 2], "weight_decay": 0.0}],
        lr=ADAMW["lr"], betas=(ADAMW["beta1"], ADAMW["beta2"]), eps=ADAMW["eps"])
    for _ in range(N_STEPS):
        optimizer.zero_grad()
        mean_loss(logits_of(w, inputs), labels).backward()
        torch.nn.utils.clip_grad_norm_(w.values(), ADAMW["clip"])
        optimizer.step()
    return max(relative(key_bias_aside(n, w[n].detach()), key_bias_aside(n, finals[n])) for n in w)


def check_transformers(family, weights, inputs, labels, loss, gradients):
    """Loss and gradients of the transformers library's own model with these weights."""
    import transformers
    # That library computes RMSNorm and Llama's softmax in float32 whatever the model's type is; for
    # a close comparison the name stands for float64 meanwhile. Its rotary angles stay float32.
    single = torch.float32
    torch.set_default_dtype(torch.float64)
    torch.float32 = torch.float64
    if family == "gpt2":
        config = transformers.GPT2Config(**GPT2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        model = transformers.GPT2LMHeadModel(config)
    else:
        keys = {k: v for k, v in LLAMA.items() if k != "head_dim"}
        config = transformers.LlamaConfig(**keys, tie_word_embeddings=False)
        model = transformers.LlamaForCausalLM(config)
    model = model.double()

    def turned(name, value):
        conv1d = family == "gpt2" and value.dim() == 2 and ".h." in name
        return value.T if conv1d else value
    state = {name: turned(name, value) for name, value in weights.items()}
    missing = model.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys, missing
    logits = model(inputs).logits
    theirs = torch.nn.functional.cross_entropy(logits.reshape(-1, V), labels.reshape(-1),
                                               ignore_index=IGNORED)
    theirs.backward()
    named = dict(model.named_parameters())
    worst = abs(theirs.item() - loss) / loss
    for name, gradient in gradients.items():
        worst = max(worst, relative(turned(name, named[name].grad), gradient))
    torch.float32 = single
    torch.set_default_dtype(single)
    return transformers.__version__, worst


# --- the file ------------------------------------------------------------------------------------

class ReferenceFile:
    def __init__(self):
        self.lines, self.data = ["ballast-reference 1"], b""

    def scalar(self, name, value):
        self.lines.append("scalar %s %.17g" % (name, value))

    def _add(self, kind, name, array):
        shape = " ".join(str(n) for n in array.shape)
        self.lines.append(f"{kind} {name} {array.ndim} {shape} {len(self.data)}")
        self.data += array.tobytes()

    def tensor(self, name, value):
        self._add("tensor", name, value.detach().numpy().astype("<f4"))

    def ints(self, name, value):
        self._add("ints", name, value.numpy().astype("<i4"))

    def content(self):
        return ("\n".join(self.lines + ["end"]) + "\n").encode() + self.data


def make(family, with_transformers):
    settings, shapes, logits_of, seed = {
        "gpt2": (GPT2, gpt2_shapes(), gpt2_logits, 21),
        "llama": (LLAMA, llama_shapes(), llama_logits, 12)}[family]
    inputs, labels = batch()
    single = initial_weights(shapes, seed)
    double = {name: value.double() for name, value in single.items()}
    loss, gradients = loss_and_gradients(logits_of, double, inputs, labels)
    losses, norms, finals = train(logits_of, double, inputs, labels)

    loss32, gradients32 = loss_and_gradients(logits_of, single, inputs, labels)
    losses32, norms32, finals32 = train(logits_of, single, inputs, labels)
    print(f"{family}: loss {loss:.6f}, gradient norm {global_norm(gradients):.6f}, "
          f"after {N_STEPS} steps {losses[-1]:.6f}")
    print("  clipped steps: %d of %d" % (sum(n > ADAMW["clip"] for n in norms), N_STEPS))
    off = check_finite_differences(logits_of, double, gradients, inputs, labels)
    print(f"  gradients against finite differences: {off:.1e}")
    print("  ten steps against torch.optim.AdamW: %.1e"
          % check_torch_optimizer(logits_of, double, inputs, labels, finals))
    if with_transformers:
        version, worst = check_transformers(family, double, inputs, labels, loss, gradients)
        print(f"  loss and gradients against transformers {version}: {worst:.1e}")
        assert worst < (1e-12 if family == "gpt2" else 1e-6)
    assert off < 1e-8, "the gradients are not the slopes of the loss"
    print("  the same in float32, relative: loss %.1e, gradients %.1e, ten losses %.1e, ten norms "
          "%.1e, final weights %.1e" % (
              abs(loss32 - loss) / loss,
              max(relative(key_bias_aside(n, gradients32[n]), key_bias_aside(n, g))
                  for n, g in gradients.items()),
              max(abs(a - b) / b for a, b in zip(losses32, losses)),
              max(abs(a - b) / b for a, b in zip(norms32, norms)),
              max(relative(key_bias_aside(n, finals32[n]), key_bias_aside(n, w))
                  for n, w in finals.items())))

    out = ReferenceFile()
    for name, value in {**settings, **ADAMW, "batch": B, "seq_len": T, "steps": N_STEPS}.items():
        out.scalar("config." + name, value)
    out.scalar("n_valid", int((labels != IGNORED).sum()))
    out.scalar("loss", loss)
    out.scalar("grad_norm", global_norm(gradients))
    for step in range(N_STEPS):
        out.scalar(f"loss.{step}", losses[step])
        out.scalar(f"grad_norm.{step}", norms[step])
    out.ints("inputs", inputs)
    out.ints("labels", labels)
    for prefix, values in (("weight", double), ("grad", gradients), ("final", finals)):
        for name, value in values.items():
            out.tensor(f"{prefix}/{name}", value)
    return out.content()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the files, write nothing")
    parser.add_argument("--transformers", action="store_true", help="also compare with that library")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = os.path.dirname(os.path.abspath(__file__))
    differs = False
    for family in ("gpt2", "llama"):
        content = make(family, options.transformers)
        path = os.path.join(folder, family + ".ref")
        if options.check:
            with open(path, "rb") as file:
                same = file.read() == content
            print(f"  {family}.ref: {'the same bytes' if same else 'DIFFERS'}")
            differs |= not same
        else:
            with open(path, "wb") as file:
                file.write(content)
            print(f"  wrote {family}.ref, {len(content)} bytes")
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
