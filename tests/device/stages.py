"""The checks of tests/device/run.sh, one function each, and the table at the end.

Run by run.sh, which has built the programs; see README.md. Each stage has a limit of its own and
the whole has a budget; what does not fit is a row that says so. With --dry models and numbers of
steps are tiny, speed is not judged, and the plug-in is the stand-in.

Standard library only."""

import argparse
import array
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "lib"))
import ballast_test  # noqa: E402

# Dense bf16 FLOP/s by the makers' data sheets, for MFU; the sparse figures are twice these.
PEAKS = ((r"H100 PCIe", 756e12), (r"H[12]00|GH200", 989e12), (r"A100", 312e12),
         (r"B200|GB200", 2250e12), (r"L40S", 362e12), (r"RTX 4090", 165e12))

# llm.c on an H100, tokens per second and GPU, as published, and the rate of bf16 products on an
# H100 that they are scaled by: figure * (rate of this run / H100_PRODUCTS) is what it would reach
# here.
LLMC = {"gpt2-124m": 468e3, "gpt2-1558m": 46.8e3}
H100_PRODUCTS = 794.5e12
LLMC_FACTOR = {"gpt2-124m": 1.4, "gpt2-1558m": 1.3}  # how much faster Ballast means to be
TORCH_FACTOR = {"gpt2-124m": 1.35, "gpt2-1558m": 1.35}
PRODUCTS_SHARE = 0.82  # of the products' rate, for a 3B shape
MFU_3B = 0.66

MODELS = {  # config.json of what is trained
    "gpt2-124m": {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 768,
                  "n_layer": 12, "n_head": 12},
    "gpt2-tiny": {"model_type": "gpt2", "vocab_size": 256, "n_positions": 128, "n_embd": 64,
                  "n_layer": 2, "n_head": 4},
    "llama-tiny": {"model_type": "llama", "vocab_size": 256, "max_position_embeddings": 64,
                   "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2,
                   "num_attention_heads": 4, "num_key_value_heads": 2},
}

# What training is timed with: micro-batch, accumulation, tokens of a sequence, steps.
SIZES = {"gpt2-124m": (32, 2, 1024, 30), "gpt2-1558m": (16, 4, 1024, 10),
         "llama-3b": (2, 4, 4096, 8)}
DRY_SIZES = {"gpt2-124m": (2, 2, 32, 2), "gpt2-1558m": (2, 1, 32, 2), "llama-3b": (1, 2, 32, 2)}
DRY_MODELS = {"gpt2-124m": "gpt2-tiny", "gpt2-1558m": "gpt2-tiny", "llama-3b": "llama-tiny"}
LOSS_DISTANCE = 2e-2  # of PyTorch's loss, step by step: bf16 on both sides, rounded elsewhere

# Every strategy with something to switch to, one after the other. `exact`: the losses keep their
# bits.
SWITCHES = tuple((text.split(), exact) for text, exact in (
    ("checkpointing=selective", True),
    ("checkpointing=split", True),
    ("checkpointing=block:1", True),
    ("checkpointing=block:2", True),
    ("checkpointing=block:1 checkpointing.layers=1", True),
    ("checkpointing=block:1 checkpointing.layers=2 offload.activations=cpu", True),
    ("offload.activations.layers=1", True),
    ("checkpointing=none offload.activations=none", True),
    ("offload.optimizer=cpu", True),
    ("offload.optimizer.fraction=0.5", True),
    ("offload.optimizer=none", True),
    ("offload.params=cpu", True),
    ("offload.params=none", True),
    ("offload.grads=cpu", True),
    ("offload.grads=none", True),
    ("zero.stage=1", True),
    ("zero.stage=2", True),
    ("zero.stage=3", True),
    ("zero.stage=0", True),
    ("loss_tile=32", False),
    ("micro_batch=1", False),
    ("loss_tile=0", False),
    ("mlp_tile=32", False),
    ("mlp_tile=0", False),
    ("grad_sync=each", False),
    ("grad_sync=last", False),
    ("micro_batch=2", False),
))
NOT_TRIED = {"sequence_parallel": "wants more ranks", "sequence_parallel.kind": "wants more ranks",
             "optimizer.state": "changes the result on purpose"}
TILED_LOSS_DISTANCE = 2e-3  # products of other shapes, in bf16


class NotRun(Exception):
    """A stage that cannot be run here, with the reason."""


class OutOfTime(Exception):
    """A stage reached its limit."""


class Context:
    """What the stages share: options, the work folder, the table's rows, what one found."""

    def __init__(self, options):
        self.options = options
        self.dry = options.dry
        self.began = time.monotonic()
        self.work = ballast_test.Work()
        self.rows = []
        self.gpu = {}
        self.products = None   # FLOP/s of bf16 products in this run
        self.trained = {}      # by model: what train_model() returned
        self.stage = ""

    def row(self, what, value, goal="", ok=None):
        """One line of the table; ok None: nothing to judge."""
        self.rows.append((self.stage, what, value, goal, ok))
        print("    %s: %s%s%s" % (
            what, value, "  (goal: %s)" % goal if goal else "",
            "" if ok is None else "  ok" if ok else "  NOT REACHED"), flush=True)

    def speed_row(self, what, value, goal, text, reached=None):
        """A figure of speed, which a stand-in's run does not judge."""
        reached = value >= goal if reached is None else reached
        self.row(what, text % value, (text % goal) + (" (dry: not judged)" if self.dry else ""),
                 None if self.dry else reached)

    def seconds_left(self):
        return self.options.budget - self.options.used - (time.monotonic() - self.began)

    def seconds(self, at_most):
        """Time that a step of a stage may take, at most what is left of the budget."""
        return max(5.0, min(at_most, self.seconds_left()))

    def program(self, name):
        return os.path.join(ballast_test.BIN, name)


def run_program(context, command, limit_s, codes=(0,)):
    """A program's output; an error unless its exit code is one of `codes`."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, timeout=context.seconds(limit_s), check=False)
    errors = done.stderr.decode(errors="replace")
    print("    $ %s -> %d" % (" ".join(command), done.returncode))
    if errors.strip():
        print("      " + errors.strip().replace("\n", "\n      ")[-3000:], flush=True)
    if done.returncode not in codes:
        raise AssertionError("exit code %d of %s: %s" % (
            done.returncode, " ".join(command[:2]), (errors.strip().splitlines() or [""])[-1]))
    return done.stdout.decode(errors="replace"), errors, done.returncode


# ---- models, data, runs --------------------------------------------------------------------


def shape_of(context, name):
    if context.dry:
        name = DRY_MODELS.get(name, name)
    if name in MODELS:
        return MODELS[name]
    with open(os.path.join(HERE, "models", name, "config.json"), encoding="utf-8") as file:
        return json.load(file)


def model_folder(context, name):
    path = os.path.join(context.work.folder, "model-" + name)
    if not os.path.isdir(path):
        os.mkdir(path)
        with open(os.path.join(path, "config.json"), "w", encoding="utf-8") as file:
            json.dump(shape_of(context, name), file)
    return path


def token_file(context, name):
    """Random tokens, frequent ones frequent, so that there is something to learn."""
    vocab = shape_of(context, name)["vocab_size"]
    path = os.path.join(context.work.folder, "tokens-%d.bin" % vocab)
    if not os.path.exists(path):
        n = 20000 if context.dry else 1000000
        code, magic, version = ("H", 20240520, 1) if vocab <= 65536 else ("I", 20240801, 7)
        total, sums = 0.0, []
        for index in range(vocab):
            total += 1.0 / (index + 10)
            sums.append(total)
        ids = random.Random(3).choices(range(vocab), cum_weights=sums, k=n)
        header = array.array("i", [magic, version, n] + [0] * 253)
        with open(path, "wb") as file:
            header.tofile(file)
            array.array(code, ids).tofile(file)
    return path


def flops_per_token(shape, seq_len):
    """6 N_matmul + 6 L (heads * head_dim) T: no embedding look-up, no recomputation."""
    if shape["model_type"] == "gpt2":
        width, layers = shape["n_embd"], shape["n_layer"]
        block = 4 * width * width + 2 * width * (shape.get("n_inner") or 4 * width)
        attention = width
    else:
        width, layers = shape["hidden_size"], shape["num_hidden_layers"]
        head = width // shape["num_attention_heads"]
        attention = shape["num_attention_heads"] * head
        block = width * (2 * attention + 2 * shape["num_key_value_heads"] * head +
                         3 * shape["intermediate_size"])
    n_matmul = layers * block + shape["vocab_size"] * width
    return 6.0 * n_matmul + 6.0 * layers * attention * seq_len


def make_job(context, name, sizes, **ballast):
    """A run of a model on the GPU, in bf16, on one rank."""
    micro_batch, accumulation, seq_len, steps = sizes
    changes = {
        "train_batch_size": micro_batch * accumulation,
        "train_micro_batch_size_per_gpu": micro_batch,
        "steps_per_print": 1,
        "scheduler": None,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95],
                                                  "weight_decay": 0.1}},
    }
    settings = {"model": model_folder(context, name), "data": token_file(context, name),
                "dropout": 0.0, "seq_len": seq_len, "steps": steps, "shuffle": False, "seed": 7,
                "device": "cuda", "device_memory": "256MiB" if context.dry else None}
    settings.update(ballast)
    return context.work.job(ranks=1, changes=changes, **settings)


def median_step_ms(lines):
    """Without what warms up: the first fifth, at least three steps where there are that many."""
    skip = min(max(3, len(lines) // 5), len(lines) - 1)
    return statistics.median(line["step_ms"] for line in lines[skip:])


def train_model(context, name, with_save):
    """Train, check every step's peaks, and tell the speed; the save of step 0 if asked for."""
    micro_batch, accumulation, seq_len, _ = sizes = (
        DRY_SIZES if context.dry else SIZES)[name]
    job = make_job(context, name, sizes, **({"pause_at": [0]} if with_save else {}))
    job.start()
    save = None
    if with_save:
        job.wait_paused(0)
        save = job.ctl("save", timeout_s=60).json
        job.ctl("resume")
    job.wait(context.seconds(240))
    job.check()
    lines = job.steps()
    ms = median_step_ms(lines)
    tokens = micro_batch * accumulation * seq_len
    rate = tokens / ms * 1e3
    result = {"job": job, "save": save, "lines": lines, "tokens_per_second": rate, "ms": ms,
              "first_ms": lines[0]["step_ms"], "sizes": sizes,
              "flops": rate * flops_per_token(shape_of(context, name), seq_len)}
    context.trained[name] = result
    losses = [line["loss"] for line in lines]
    context.row("peaks equal the plan", "%d steps" % len(lines), "every step", True)
    falls = all(map(math.isfinite, losses)) and (len(losses) < 5 or losses[-1] < losses[0])
    context.row("loss", "%.4f to %.4f" % (losses[0], losses[-1]),
                "falls" if len(losses) >= 5 else "finite", falls)
    context.row("step", "%.2f ms, %.0f tokens/s; the first %.0f ms" % (
        ms, rate, result["first_ms"]))
    tell_speed(context, name, result)
    return result


def peak_flops(context):
    for pattern, flops in PEAKS:
        if re.search(pattern, context.gpu.get("name", "")):
            return flops
    return None


def tell_speed(context, name, result):
    peak = peak_flops(context)
    goal_3b = name == "llama-3b"
    if peak is None:
        context.row("MFU", "not known: %s is not in the list of peaks" % (
            context.gpu.get("name") or "this GPU"))
    elif goal_3b:
        context.speed_row("MFU", result["flops"] / peak * 100, MFU_3B * 100, "%.1f %%")
    else:
        context.row("MFU", "%.1f %%" % (result["flops"] / peak * 100))
    if context.products is None:
        context.row("against the rate of products", "not run: no rate was measured")
        return
    share = result["flops"] / context.products * 100
    if goal_3b:
        context.speed_row("of the rate of products", share, PRODUCTS_SHARE * 100, "%.1f %%")
    else:
        context.row("of the rate of products", "%.1f %%" % share)
    if name in LLMC:
        scaled = LLMC[name] * context.products / H100_PRODUCTS
        context.speed_row("over llm.c's published rate, scaled (%.0f tokens/s)" % scaled,
                          result["tokens_per_second"] / scaled, LLMC_FACTOR[name], "%.2f x")


# ---- stages --------------------------------------------------------------------------------


def stage_rate(context):
    """The rate of plain bf16 products in this run, which speeds are compared with."""
    out, _, _ = run_program(context, [context.program("device_ops"), "--bench", "--only", "matmul",
                                      "--json", "--size", "small" if context.dry else "full"], 60)
    answer = json.loads(out)
    context.gpu.setdefault("name", answer["gpu"])
    rates = [rate for rate in answer["rates"] if rate["dtype"] == "bf16"]
    if not context.dry:
        rates = [rate for rate in rates
                 if re.match(r"m (4096|8192) n (4096|8192) k (4096|8192)$", rate["shape"])]
    for rate in rates[:2]:
        context.row("bf16 product " + rate["shape"], "%.1f TFLOP/s" % rate["rate"])
    context.products = max(rate["rate"] for rate in rates) * 1e12


def stage_operations(context):
    """Every operation against the CPU device."""
    out, errors, code = run_program(
        context, [context.program("device_ops"), "--json",
                  "--size", "small" if context.dry else "full"], 150, codes=(0, 1))
    answer = json.loads(out)
    bad = [case for case in answer["cases"] if not case["ok"]]
    for case in bad[:10]:
        context.row("%(operation)s %(dtype)s %(shape)s" % case, case["text"], "", False)
    context.row("operations equal the CPU's", "%d of %d cases" % (
        answer["n"] - len(bad), answer["n"]), "all", code == 0 and not bad)
    worst = {}
    for case in answer["cases"]:
        if case["tolerance"] > 0:
            key = case["operation"], case["dtype"]
            worst[key] = max(worst.get(key, 0), case["worst"] / case["tolerance"])
    if worst:
        key = max(worst, key=worst.get)
        context.row("closest to its tolerance", "%s %s, %.0f %% of it" % (
            key[0], key[1], worst[key] * 100))
    print("      " + errors.strip().splitlines()[0] if errors.strip() else "")


def stage_bench(context):
    """Rates of all operations at GPT-2 124M's shapes."""
    out, _, _ = run_program(context, [context.program("device_ops"), "--bench", "--json",
                                      "--size", "small" if context.dry else "full"], 120)
    rates = json.loads(out)["rates"]
    bad = [rate for rate in rates if not rate["ok"]]
    context.row("calls timed", "%d of %d" % (len(rates) - len(bad), len(rates)), "all", not bad)
    for rate in [] if context.dry else rates:  # a stand-in's mean nothing
        if rate["dtype"] == "bf16" or rate["operation"] in ("sum_squares", "adamw"):
            context.row("%(operation)s %(dtype)s %(shape)s" % rate,
                        "%(ms).4f ms, %(rate).1f %(unit)s" % rate)


def stage_train_124m(context):
    train_model(context, "gpt2-124m", with_save=True)


def stage_train_1558m(context):
    train_model(context, "gpt2-1558m", with_save=False)


def stage_train_3b(context):
    train_model(context, "llama-3b", with_save=False)


def stage_memory(context):
    """The ledger against what the driver says this process holds."""
    sizes = (2, 1, 32, 3) if context.dry else (8, 1, 1024, 4)
    job = make_job(context, "gpt2-124m", sizes, pause_at=[2])
    job.start()
    job.wait_paused(2)
    ranks = job.ctl("memory").json["ranks"]
    pid = next(iter(job.wait_for_ranks().values()))
    held, source = driver_bytes(pid, ranks[0])
    job.ctl("resume")
    job.wait(context.seconds(60))
    job.check()
    committed = int(ranks[0]["committed_bytes"])
    external = sum(int(entry["bytes"]) for entry in ranks[0]["memory"]
                   if entry["tier"] == "device" and entry["category"] == "external")
    context.row("ledger: committed + external", "%.1f + %.1f MiB" % (
        committed / 2**20, external / 2**20))
    if held is None:
        raise NotRun(source)
    distance = abs(committed + external - held) / held * 100
    context.row("ledger against the driver (%s)" % source, "%.2f %% of %.1f MiB" % (
        distance, held / 2**20), "within 2 %", distance <= 2.0)


def driver_bytes(pid, rank):
    """(bytes of the process on its GPU, who says so), (None, why not)."""
    if shutil.which("nvidia-smi"):
        done = subprocess.run(
            ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20,
            check=False)
        rows = [line.split(",") for line in done.stdout.decode().splitlines() if "," in line]
        usable = [(int(row[0]), int(row[1])) for row in rows if row[1].strip().isdigit()]
        # In a container the pids may be those of the host; alone on the GPU it is still ours.
        mine = [mib for other, mib in usable if other == pid] or [
            mib for _, mib in usable if len(usable) == 1]
        if mine:
            return mine[0] * 2**20, "nvidia-smi"
    own = int(rank.get("driver_bytes", 0))
    if own:
        return own, "NVML through ballastctl"
    return None, "neither nvidia-smi nor NVML tells what the process holds"


def stage_switch(context):
    """Every strategy that this version has, switched while running."""
    sizes = (2, 2, 32, len(SWITCHES) + 3) if context.dry else (2, 2, 256, len(SWITCHES) + 3)
    plain = make_job(context, "gpt2-124m", sizes, dropout=0.1)
    plain.run(context.seconds(90))
    for exact in (True, False):
        job = make_job(context, "gpt2-124m", sizes, dropout=0.1, pause_at=[1])
        done, absent = switch_through(job, [item for item, kind in SWITCHES if kind == exact])
        if exact:
            tell_not_tried(context, job)
        job.ctl("resume")
        job.wait(context.seconds(90))
        job.check()
        context.row("switched while running, peaks as planned", "; ".join(done) or "nothing", "",
                    bool(done))
        if absent:
            context.row("not switched in this version", ", ".join(absent))
        compare_with_plain(context, plain, job, exact)


def switch_through(job, steps):
    """Set one after the other, a step between; (what took effect, keys that are refused)."""
    done, absent = [], []
    job.start()
    job.wait_paused(1)
    for settings in steps:
        settings = [setting for setting in settings if setting.split("=")[0] not in absent]
        answer = job.ctl("set", *settings, "--wait", code=None) if settings else None
        refused = answer and re.search(
            r"([a-z_.]+)(=\S+ is not in this version| \S+ -> \S+: this version sets)",
            answer.err + answer.out)
        if refused:
            absent.append(refused.group(1))
            settings = [setting for setting in settings if setting.split("=")[0] not in absent]
            answer = job.ctl("set", *settings, "--wait", code=None) if settings else None
        if answer is None:
            continue
        if answer.code != ballast_test.CTL_OK:
            raise AssertionError("%r" % answer)
        done.append(" ".join(settings))
        job.ctl("resume", "--for", 1)
        job.wait_paused(1 + len(done))
    return done, absent


def tell_not_tried(context, job):
    """The keys that the program knows and this list does not switch."""
    answer = job.ctl("set", "no.such.key=1", "--wait", code=None)
    listed = re.search(r"must be one of:? ?([a-z_. ,]+)", answer.err + answer.out)
    keys = set(re.findall(r"[a-z_.]+[a-z]", listed.group(1))) if listed else set()
    tried = {setting.split("=")[0] for settings, _ in SWITCHES for setting in settings}
    missing = keys - tried - set(NOT_TRIED)
    context.row("strategy keys", "%d, of them not tried: %s" % (
        len(keys), ", ".join("%s (%s)" % item for item in sorted(NOT_TRIED.items()))),
        "none unknown to this list", bool(keys) and not missing)
    if missing:
        context.row("keys that this list lacks", ", ".join(sorted(missing)), "", False)


def compare_with_plain(context, plain, job, exact):
    if exact:
        same = job.numbers() == plain.numbers()
        context.row("losses, norms, final weights", "the same bits" if same else "DIFFERENT",
                    "as without switching", same)
        return
    worst = max(abs(a["loss"] - b["loss"]) / abs(b["loss"])
                for a, b in zip(job.steps(), plain.steps()))
    context.row("losses", "%.1e relative" % worst, "within %.0e" % TILED_LOSS_DISTANCE,
                worst <= TILED_LOSS_DISTANCE)


def torch_command(context, name, trained, mode, steps, *more):
    micro_batch, accumulation, seq_len, _ = trained["sizes"]
    return [sys.executable, os.path.join(HERE, "torch_step.py"),
            "--shape", os.path.join(model_folder(context, name), "config.json"),
            "--tokens", token_file(context, name), "--seq-len", str(seq_len),
            "--micro-batch", str(micro_batch), "--accumulation", str(accumulation),
            "--steps", str(steps), "--mode", mode] + list(more)


def run_torch(context, name, trained, mode, steps, limit_s, *more):
    device = ["--device", "cpu"] if context.dry else []
    out, errors, code = run_program(
        context, torch_command(context, name, trained, mode, steps, "--limit", str(limit_s * 0.6),
                               *device, *more), limit_s, codes=(0, 4))
    if code == 4:
        raise NotRun(errors.strip().splitlines()[-1])
    return json.loads(out)


def torch_rate(context, name, trained, answer, goal):
    micro_batch, accumulation, seq_len, _ = trained["sizes"]
    skip = min(3, len(answer["step_ms"]) - 1)
    ms = statistics.median(answer["step_ms"][skip:])
    rate = micro_batch * accumulation * seq_len / ms * 1e3
    what = "over PyTorch %s, %s (%.0f tokens/s)" % (answer["torch"], answer["mode"], rate)
    context.speed_row(what, trained["tokens_per_second"] / rate, goal, "%.2f x")
    if answer["mode"] == "compile":
        context.speed_row("first step sooner than torch.compile's (%.0f ms)" % answer["step_ms"][0],
                          answer["step_ms"][0] / trained["first_ms"], 20.0, "%.1f x")


def of(context, name):
    if name not in context.trained:
        raise NotRun("the stage that trains it did not finish")
    return context.trained[name]


def stage_torch_124m(context):
    """PyTorch from the same weights on the same tokens: losses, then speed."""
    trained = of(context, "gpt2-124m")
    save = os.path.join(trained["job"].run_dir, "save", "step-0")
    out, _, _ = run_program(context, torch_command(
        context, "gpt2-124m", trained, "eager", 1, "--check", "--save", save), 60)
    context.row("initial weights exported", "%(tensors)d tensors, embedding's standard deviation "
                "%(embedding_std).4f" % json.loads(out))
    steps = len(trained["lines"])
    answer = run_torch(context, "gpt2-124m", trained, "eager", steps, 90, "--save", save)
    pairs = list(zip(answer["losses"], (line["loss"] for line in trained["lines"])))
    worst = max(abs(a - b) for a, b in pairs)
    context.row("loss against PyTorch's, %d steps" % len(pairs), "%.4f at most" % worst,
                "within %g" % LOSS_DISTANCE, math.isfinite(worst) and worst <= LOSS_DISTANCE)
    torch_rate(context, "gpt2-124m", trained, answer, TORCH_FACTOR["gpt2-124m"])


def stage_compile_124m(context):
    trained = of(context, "gpt2-124m")
    answer = run_torch(context, "gpt2-124m", trained, "compile", 10, 120)
    torch_rate(context, "gpt2-124m", trained, answer, TORCH_FACTOR["gpt2-124m"])


def stage_compile_1558m(context):
    trained = of(context, "gpt2-1558m")
    answer = run_torch(context, "gpt2-1558m", trained, "compile", 6, 150)
    torch_rate(context, "gpt2-1558m", trained, answer, TORCH_FACTOR["gpt2-1558m"])


def stage_sanitizer(context):
    """compute-sanitizer over the small cases."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.access(tool, os.X_OK):
        raise NotRun("there is no compute-sanitizer")
    if context.dry:
        raise NotRun("a stand-in has no device code to look at")
    out, errors, code = run_program(
        context, [tool, "--tool", "memcheck", "--error-exitcode", "9",
                  context.program("device_ops"), "--size", "small"], 100, codes=range(256))
    found = re.findall(r"ERROR SUMMARY: (\d+)", out + errors)
    context.row("compute-sanitizer memcheck", "%s errors, exit code %d" % (
        found[-1] if found else "?", code), "0", code == 0 and found[-1:] == ["0"])


# In order of what matters most: name, function, seconds it must have left to begin, its limit.
STAGES = (
    ("rate", stage_rate, 20, 60),
    ("operations", stage_operations, 30, 150),
    ("train 124M", stage_train_124m, 30, 90),
    ("memory", stage_memory, 15, 60),
    ("switch", stage_switch, 40, 120),
    ("torch 124M", stage_torch_124m, 30, 100),
    ("train 1558M", stage_train_1558m, 30, 90),
    ("train 3B", stage_train_3b, 30, 90),
    ("compile 124M", stage_compile_124m, 45, 120),
    ("sanitizer", stage_sanitizer, 30, 110),
    ("compile 1558M", stage_compile_1558m, 60, 150),
    ("bench", stage_bench, 20, 120),
)


# ---- running them --------------------------------------------------------------------------


def ring(_signal, _frame):
    raise OutOfTime()


def told_to_end(_signal, _frame):
    raise KeyboardInterrupt()


def end_jobs(work):
    """A stage that broke off leaves its run behind; end it before the next one wants the GPU."""
    for pid in ballast_test.processes_of(work.folder):
        ballast_test.kill(pid)
    for job in work.jobs:
        if job.process is not None:
            job.process.wait(ballast_test.ANSWER_S)


def run_stage(context, name, function, least_s, limit_s):
    context.stage = name
    left = context.seconds_left()
    print("==> %s" % name, flush=True)
    if left < least_s:
        context.row("NOT RUN", "%.0f s of the budget are left, it wants %d" % (max(0, left), least_s), "",
                    False)
        return
    began = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, min(limit_s, left))
    try:
        function(context)
    except NotRun as reason:
        context.row("not run", str(reason))
    except (OutOfTime, subprocess.TimeoutExpired):
        context.row("NOT FINISHED", "not within %.0f s" % (time.monotonic() - began), "", False)
    except Exception as error:  # whatever it is, the other stages have their turn
        traceback.print_exc(file=sys.stdout)
        context.row("FAILED", " ".join(str(error).split()), "", False)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        end_jobs(context.work)
    print("    (%.1f s)" % (time.monotonic() - began), flush=True)


def toolkit_versions():
    """{what: version} of GPU, driver and toolkit, as far as they can be asked."""
    versions = {}
    if shutil.which("nvidia-smi"):
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap,memory.total",
             "--format=csv,noheader"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, timeout=20, check=False)
        fields = [field.strip() for field in done.stdout.decode().split("\n")[0].split(",")]
        versions.update(zip(("GPU", "driver", "compute capability", "memory"), fields))
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if os.access(nvcc, os.X_OK):
        done = subprocess.run([nvcc, "--version"], stdout=subprocess.PIPE, check=False, timeout=20)
        found = re.search(r"release ([\d.]+)", done.stdout.decode())
        versions["CUDA toolkit"] = found.group(1) if found else "?"
    return versions


def shortened(text):
    """What a cell has room for; the log has all of it."""
    text = " ".join(text.split()).replace("|", "/")
    return text if len(text) <= 90 else text[:87] + "..."


def table(context):
    """The table as Markdown, aligned so that it also reads as text."""
    words = {True: "yes", False: "NO", None: "-"}
    rows = [("stage", "what", "value", "goal", "ok")]
    rows += [(stage, shortened(what), shortened(value), goal or "-", words[ok])
             for stage, what, value, goal, ok in context.rows]
    width = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["| " + " | ".join(cell.ljust(width[i]) for i, cell in enumerate(row)) + " |"
             for row in rows]
    lines.insert(1, "|" + "|".join("-" * (size + 2) for size in width) + "|")
    return "\n".join(lines)


def write_results(context, versions):
    options = context.options
    lines = ["# Device run of %s" % time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), ""]
    if context.dry:
        lines += ["On the stand-in, with tiny models: this shows that the script works, nothing "
                  "about a GPU.", ""]
    lines += ["- %s: %s" % item for item in versions.items()]
    lines += ["- command: `tests/device/run.sh %s`" % options.command,
              "- time: %.0f s" % (options.used + time.monotonic() - context.began), "",
              table(context), ""]
    os.makedirs(os.path.dirname(options.results) or ".", exist_ok=True)
    with open(options.results, "w", encoding="utf-8") as file:
        file.write("\n".join(lines))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--budget", type=float, default=480, help="seconds for everything")
    parser.add_argument("--used", type=float, default=0, help="seconds that building took of them")
    parser.add_argument("--build", default="", help="what is to be said of the build; !: it failed")
    parser.add_argument("--stages", default="", help="only these, separated by commas")
    parser.add_argument("--results", required=True, help="the file for the table")
    parser.add_argument("--command", default="")
    options = parser.parse_args()
    signal.signal(signal.SIGALRM, ring)
    signal.signal(signal.SIGTERM, told_to_end)
    context = Context(options)
    versions = {}
    try:
        versions = toolkit_versions()
        if versions.get("GPU") and not options.dry:
            context.gpu["name"] = versions["GPU"]
        context.stage = "build"
        failed = options.build.startswith("!")
        context.row("build", options.build.lstrip("!"), "", not failed)
        wanted = [name.strip() for name in options.stages.split(",") if name.strip()]
        unknown = set(wanted) - {stage[0] for stage in STAGES}
        if unknown:
            sys.exit("unknown stages: %s; there are: %s" % (
                ", ".join(sorted(unknown)), ", ".join(stage[0] for stage in STAGES)))
        for stage in STAGES:
            context.stage = stage[0]
            if wanted and stage[0] not in wanted:
                context.row("not run", "not asked for")
            elif failed:
                context.row("NOT RUN", "there is no build", "", False)
            else:
                run_stage(context, *stage)
    except KeyboardInterrupt:
        context.row("INTERRUPTED", "the rest was not run", "", False)
    finally:
        context.work.close()
    write_results(context, versions)
    print("\n%s\n\nwritten to %s" % (table(context), options.results))
    return 1 if any(row[4] is False for row in context.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
