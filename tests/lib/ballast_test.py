"""Real runs for the end-to-end tests: a temporary folder, mpirun in it, ballastctl beside it.

    class Test(ballast_test.Case):
        def test_it(self):
            job = self.work.job(ranks=2, steps=4)
            job.run()                               # start, exit code 0, check its files
            self.assertEqual(len(job.steps()), 4)

Every wait is bounded, and whatever a test started is gone when it ends. What must hold in every
run is checked here, for every run: each step once and in order, and peak_bytes equal to
planned_bytes in every phase of every step (`check_steps`).

Environment: BALLAST_BIN is the folder with the programs; BALLAST_FULL=1 asks for full sweeps.
Standard library only."""

import faulthandler
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

BIN = os.path.abspath(os.environ.get("BALLAST_BIN", ""))  # jobs run in folders of their own
FULL = os.environ.get("BALLAST_FULL", "") not in ("", "0")

# A step of the tiny models takes milliseconds; these are for a host that is busy with others.
RUN_S = 120
ANSWER_S = 30

# Exit codes of ballast-worker and of ballastctl.
DONE, FAILED, CONFIG, DOES_NOT_FIT, OUT_OF_MEMORY, RANK_LOST, SAVED_ON_SIGNAL, NO_SAVE = range(8)
CTL_OK, CTL_REFUSED, CTL_USAGE, CTL_CONNECT, CTL_TIMEOUT, CTL_PERMISSION = range(6)

_WORDS = (
    "the of and to in that he shall unto for his a they be is him not them it with all thou "
    "thy was which my me said but ye their have will thee from as are when this out were upon "
    "man you by Israel up there hath then people came had house into on her come one before "
    "your also day land men god went even his water light earth seed year fire stone"
).split()


def text_of(n_bytes, seed=1):
    """So many bytes of words, the same for the same seed; no two stretches of it are equal."""
    draw = random.Random(seed)
    parts, length = [], 0
    while length < n_bytes:
        # Frequent words are frequent, so that there is something to learn.
        word = _WORDS[min(int(draw.expovariate(0.07)), len(_WORDS) - 1)]
        parts.append(word)
        length += len(word) + 1
    return " ".join(parts).encode()[:n_bytes].ljust(n_bytes, b".")


def merged(base, changes):
    """`changes` over `base`, section by section; None removes a key."""
    result = dict(base)
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result


def bits(number):
    """A float as its 64 bits, so that equal means the same and not nearly the same."""
    if number is None:
        return None  # not finite
    return struct.pack("<d", number).hex()


def wait_until(condition, timeout_s, what):
    """Ask until `condition()` is true; its value. An error that names `what` after the limit."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError("%s: not within %g s" % (what, timeout_s))
        time.sleep(0.02)


# ---- processes -----------------------------------------------------------------------------


def _read(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""  # it has just ended


def _is_alive(pid):
    """Neither gone nor a zombie."""
    stat = _read("/proc/%d/stat" % pid)
    return bool(stat) and stat.rpartition(b") ")[2][:1] not in (b"Z", b"X")


def processes_of(folder):
    """{pid: program} of the living processes that name `folder`, or a path in it, on their command
    line."""
    found = {}
    mark = re.compile(re.escape(os.fsencode(folder)) + rb"[/\0]")
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        command = _read("/proc/%s/cmdline" % name)
        if mark.search(command) and _is_alive(int(name)):
            found[int(name)] = os.path.basename(command.split(b"\0")[0]).decode(errors="replace")
    return found


def rank_of(pid):
    """The rank that a worker process is, or None."""
    for variable in _read("/proc/%d/environ" % pid).split(b"\0"):
        if variable.startswith(b"OMPI_COMM_WORLD_RANK="):
            return int(variable.partition(b"=")[2])
    return None


def kill(pid, sig=signal.SIGKILL):
    try:
        os.kill(pid, sig)
    except ProcessLookupError:
        pass


# ---- files ---------------------------------------------------------------------------------


def read_lines(path):
    """The JSON objects of a .jsonl file; every line must be whole."""
    lines = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                raise AssertionError("%s:%d: a torn line: %r" % (path, number, line[-80:]))
            lines.append(json.loads(line))
    return lines


def check_steps(lines, first=0):
    """What must hold in the step lines of any run."""
    for index, line in enumerate(lines):
        where = "line %d of steps.jsonl (step %s)" % (index + 1, line.get("step"))
        if line["step"] != first + index:
            raise AssertionError("%s: step %d was to come" % (where, first + index))
        peaks, planned = line["peak_bytes"], line["planned_bytes"]
        for phase in ("forward", "backward", "step"):
            if not peaks.get(phase):
                raise AssertionError("%s: no peak of %s: %r" % (where, phase, peaks))
        if peaks != planned:
            raise AssertionError("%s: peaks %r, planned %r" % (where, peaks, planned))


class Answer:
    """What a ballastctl call came to."""

    def __init__(self, arguments, code, out, err):
        self.arguments, self.code, self.out, self.err = arguments, code, out, err

    @property
    def json(self):
        """The object that --json printed (the first one of a verb that follows)."""
        return self.all_json[0]

    @property
    def all_json(self):
        return [json.loads(line) for line in self.out.splitlines()]

    def __repr__(self):
        return "ballastctl %s -> code %d\n%s%s" % (
            " ".join(self.arguments), self.code, self.out, self.err)


# ---- one launch ----------------------------------------------------------------------------


class Job:
    """One launch of mpirun. Several may share a run directory, one after the other."""

    def __init__(self, work, ranks, config, run_dir, arguments, environment, mpi_arguments):
        self.work, self.ranks, self.config, self.run_dir = work, ranks, config, run_dir
        self.log = work.fresh("log")
        self.arguments, self.environment = list(arguments), dict(environment)
        self.mpi_arguments = list(mpi_arguments)
        self.process = None

    # -- life --

    def start(self):
        command = ["mpirun", "--bind-to", "none", "-n", str(self.ranks)] + self.mpi_arguments
        command += [os.path.join(BIN, "ballast-worker"), "--config", self.config]
        command += ["--run-dir", self.run_dir] + self.arguments
        environment = dict(os.environ, **self.work.environment)
        environment.update(self.environment)
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                cwd=self.work.folder, start_new_session=True)
        self.work.jobs.append(self)
        return self

    def wait(self, timeout_s=RUN_S, code=DONE):
        """Until mpirun has ended; its exit code, which must be `code` (None: any)."""
        try:
            got = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                "the job did not end within %g s; its last words:\n%s"
                % (timeout_s, self.output()[-3000:])) from None
        if code is not None and got != code:
            raise AssertionError(
                "exit code %d, not %d; its last words:\n%s" % (got, code, self.output()[-3000:]))
        return got

    def run(self, timeout_s=RUN_S, code=DONE):
        """Start, wait, and check what the files of every run must show."""
        self.start()
        self.wait(timeout_s, code)
        self.check()
        return self

    def check(self):
        if os.path.exists(os.path.join(self.run_dir, "steps.jsonl")):
            check_steps(self.steps())

    def output(self):
        """Everything that mpirun, the workers and the daemon printed."""
        return _read(self.log).decode(errors="replace")

    # -- processes --

    def pids(self):
        """{pid: program}: mpirun, workers and daemon that are alive."""
        return processes_of(self.run_dir)

    def rank_pids(self):
        """{rank: pid} of the living workers."""
        workers = [pid for pid, name in self.pids().items() if name == "ballast-worker"]
        return {rank_of(pid): pid for pid in workers if rank_of(pid) is not None}

    def wait_for_ranks(self, timeout_s=ANSWER_S):
        """{rank: pid} as soon as all of them are there."""
        return wait_until(
            lambda: len(self.rank_pids()) == self.ranks and self.rank_pids(), timeout_s,
            "%d workers" % self.ranks)

    def daemon_pid(self):
        """The living daemon's, or None."""
        daemons = [pid for pid, name in self.pids().items() if name == "ballastd"]
        return daemons[0] if daemons else None

    def mpirun_pid(self):
        return self.process.pid

    def wait_gone(self, timeout_s=10):
        """Until nothing of the run lives; the seconds that took."""
        began = time.monotonic()
        self.wait(timeout_s, code=None)
        wait_until(lambda: not self.pids(), timeout_s, "the end of %r" % self.pids())
        return time.monotonic() - began

    def kill_all(self):
        """kill -9 of everything at once, the launcher and the daemon too."""
        for pid in self.pids():
            kill(pid)
        self.wait_gone()

    # -- files --

    def path(self, *names):
        return os.path.join(self.run_dir, *names)

    def steps(self):
        return read_lines(self.path("steps.jsonl"))

    def events(self, kind=None):
        events = read_lines(self.path("events.jsonl"))
        return [event for event in events if kind in (None, event["type"])]

    def end(self):
        """The last `end` event."""
        ends = self.events("end")
        if not ends:
            raise AssertionError("no end event; last words:\n%s" % self.output()[-3000:])
        return ends[-1]

    def numbers(self):
        """What must be the same bit for bit: losses, gradient norms, rates, final weights."""
        trace = [(line["step"], bits(line["loss"]), bits(line["grad_norm"]), bits(line["lr"]))
                 for line in self.steps()]
        return trace, self.end()["weights_xxh3"]

    # -- ballastctl --

    def ctl(self, *arguments, code=CTL_OK, timeout_s=ANSWER_S, json_output=True):
        """One ballastctl call, its exit code checked (None: any)."""
        arguments = [str(argument) for argument in arguments]
        command = [os.path.join(BIN, "ballastctl")] + arguments
        command += ["--run-dir", self.run_dir, "--timeout", str(timeout_s)]
        if json_output:
            command.append("--json")
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=dict(os.environ, **self.work.environment), timeout=timeout_s + 15, check=False)
        answer = Answer(arguments, done.returncode, done.stdout.decode(errors="replace"),
                        done.stderr.decode(errors="replace"))
        if code is not None and answer.code != code:
            raise AssertionError("exit code %d was expected: %r\nthe job's last words:\n%s"
                                 % (code, answer, self.output()[-2000:]))
        return answer

    def wait_paused(self, step=None):
        """Until the run stands at a boundary, after `step` steps."""
        answer = self.ctl("wait", "--for", "paused")
        if step is not None and answer.json["step"] != step:
            raise AssertionError("paused after step %d, not %d" % (answer.json["step"], step))

    def drive(self, changes):
        """Walk a run that pauses at the smallest step of {step: ["key=value", ...]} through all of
        them, each set while it is paused; then let it go."""
        order = sorted(changes)
        for index, step in enumerate(order):
            self.wait_paused(step)
            if changes[step]:
                answer = self.ctl("set", *changes[step], "--wait")
                if answer.json["step"] != step:
                    raise AssertionError("took effect at another step: %r" % answer)
            if index + 1 < len(order):
                self.ctl("resume", "--for", order[index + 1] - step)
            else:
                self.ctl("resume")


# ---- one temporary folder ------------------------------------------------------------------

BASE_CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 1000,
    "optimizer": {"type": "AdamW",
                  "params": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 1}},
    "ballast": {"model": "t0", "dropout": 0.1, "seq_len": 32, "steps": 4, "seed": 7,
                "device_memory": "64MiB"},
}


class Work:
    """A temporary folder, the runs in it, and the certainty that both go away."""

    open_ones = []  # for an end that unittest does not clean up after

    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="ballast-test-")
        Work.open_ones.append(self)
        self.jobs = []
        self.closers = []  # called by close() before the folder goes
        self.counts = {}
        sockets = os.path.join(self.folder, "s")
        os.mkdir(sockets, 0o700)
        self.environment = {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            # As in deploy/common.sh. mpirun sleeps twice this long before it returns a code but 0.
            "OMPI_MCA_odls_base_sigkill_timeout": "3",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
            "XDG_RUNTIME_DIR": sockets,
        }

    def fresh(self, stem):
        """A path that was not given out before."""
        self.counts[stem] = self.counts.get(stem, 0) + 1
        return os.path.join(self.folder, "%s%d" % (stem, self.counts[stem]))

    def text(self, n_bytes, seed=1):
        """The path of a text file of so many bytes."""
        path = os.path.join(self.folder, "text-%d-%d" % (n_bytes, seed))
        if not os.path.exists(path):
            with open(path, "wb") as file:
                file.write(text_of(n_bytes, seed))
        return path

    def model(self, family, layers=3, width=64, vocab=256):
        """A model folder with no weights: `gpt2` or `llama`, with grouped-query attention there."""
        path = os.path.join(self.folder, "%s-%d-%d-%d" % (family, layers, width, vocab))
        if not os.path.isdir(path):
            shape = {
                "gpt2": {"model_type": "gpt2", "vocab_size": vocab, "n_embd": width,
                         "n_layer": layers, "n_head": 4, "n_positions": 128},
                "llama": {"model_type": "llama", "vocab_size": vocab, "hidden_size": width,
                          "intermediate_size": 172 * width // 64, "num_hidden_layers": layers,
                          "num_attention_heads": 4, "num_key_value_heads": 2,
                          "max_position_embeddings": 128},
            }[family]
            os.mkdir(path)
            with open(os.path.join(path, "config.json"), "w", encoding="utf-8") as file:
                json.dump(shape, file)
        return path

    def config(self, changes=None, **ballast):
        """The path of a configuration: BASE_CONFIG, `changes` over it, then keys of "ballast"."""
        whole = merged(BASE_CONFIG, {"ballast": {"data": self.text(40000)}})
        whole = merged(merged(whole, changes or {}), {"ballast": ballast})
        path = self.fresh("config") + ".json"
        with open(path, "w", encoding="utf-8") as file:
            json.dump(whole, file, indent=1)
        return path

    def job(self, ranks=2, changes=None, arguments=(), run_dir=None, environment=None,
            mpi_arguments=(), **ballast):
        """A launch that is not started yet."""
        return Job(self, ranks, self.config(changes, **ballast), run_dir or self.fresh("run"),
                   arguments, environment or {}, mpi_arguments)

    def again(self, job, arguments=("--resume", "latest"), ranks=None, environment=None):
        """Another launch of the same configuration in the same run directory."""
        return Job(self, ranks or job.ranks, job.config, job.run_dir, arguments,
                   job.environment if environment is None else environment, job.mpi_arguments)

    def close(self):
        if self not in Work.open_ones:
            return
        Work.open_ones.remove(self)
        # By id, and only what carries this folder's unique name.
        for _ in range(3):
            left = processes_of(self.folder)
            for pid in left:
                kill(pid)
            if not left:
                break
            time.sleep(0.1)
        for job in self.jobs:
            job.process.wait(ANSWER_S)
        for closer in self.closers:
            closer()
        shutil.rmtree(self.folder, ignore_errors=True)


class Case(unittest.TestCase):
    """A test with a folder of its own in `self.work`."""

    def setUp(self):
        self.work = Work()
        self.addCleanup(self.work.close)
        self.began = time.monotonic()
        self.addCleanup(lambda: print("(%.1f s) " % (time.monotonic() - self.began), end="",
                                      file=sys.stderr))


# ---- running a file of tests ---------------------------------------------------------------


def _out_of_time(signal_number, frame):
    faulthandler.dump_traceback()
    for work in list(Work.open_ones):
        work.close()
    # What unittest does not take for one test's failure: the rest is left out, and its cleanups.
    raise KeyboardInterrupt("out of time" if signal_number == signal.SIGALRM else "told to end")


def main(limit_s=180, full_limit_s=3000):
    """Run the calling file's tests within a limit, cleaning up even then."""
    if not os.access(os.path.join(BIN, "ballast-worker"), os.X_OK):
        sys.exit("BALLAST_BIN has to be the folder with ballast-worker, ballastd and ballastctl")
    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, _out_of_time)
    signal.alarm(full_limit_s if FULL else limit_s)
    unittest.main(verbosity=2)
