"""What the fault scripts share: the small run that they break, and what must hold however it ends.

Not a test. tests/lib/ballast_test.py does the launching."""

import os
import re
import subprocess
import time

import ballast_test

# From the moment something breaks until nothing of the job is left.
END_S = 10
# A launch that takes longer hangs: a start-up on a busy host, and then ten seconds.
HANG_S = END_S + 10

# mpirun returns at once. Where the launcher's own patience is not what is tested.
QUICK = {"OMPI_MCA_odls_base_sigkill_timeout": "0"}
# Open MPI's own default: a rank has a second for its last words.
DEFAULT = {"OMPI_MCA_odls_base_sigkill_timeout": "1"}

TINY = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1, "steps_per_print": 1}


class Case(ballast_test.Case):
    """A test of runs that end badly, of a model that takes milliseconds a step."""

    def job(self, ranks=2, arguments=(), environment=None, changes=None, **ballast):
        """t0 for six steps on four rows a step; it evaluates and saves after three and six."""
        settings = {
            "steps": 6, "threads": 1, "eval_data": self.work.text(4000, seed=2),
            "eval": {"every": 3, "micro_batch": 1, "batches": 1}, "save": {"every": 3},
        }
        settings.update(ballast)
        return self.work.job(ranks, dict(TINY, **(changes or {})), arguments,
                             environment=QUICK if environment is None else environment, **settings)

    def faulty(self, fault, ranks=2, arguments=(), **settings):
        """The same with a fault on purpose, a text or a list of them."""
        faults = [fault] if isinstance(fault, str) else fault
        words = [word for spec in faults for word in ("--fault", spec)]
        return self.job(ranks, ["--allow-faults"] + words + list(arguments), **settings)

    def reference(self, ranks=2, **settings):
        """`numbers()` of the run that nothing happens to; run once for each kind."""
        key = (ranks, repr(sorted(settings.items())))
        known = self.__class__.__dict__.get("known_numbers")
        if known is None:
            known = self.__class__.known_numbers = {}
        if key not in known:
            known[key] = self.job(ranks, **settings).run().numbers()
        return known[key]

    def resume(self, job, ranks=None, code=ballast_test.DONE):
        """The next start of a broken run: without its faults, from the newest save."""
        again = self.work.again(job, ranks=ranks, environment=QUICK)
        again.start()
        again.wait(code=code)
        return again

    def assert_gone(self, job, timeout_s=END_S):
        """Nothing of the job lives after `timeout_s`; the seconds that it took."""
        began = time.monotonic()
        try:
            ballast_test.wait_until(lambda: not job.pids(), timeout_s, "the end")
        except AssertionError:
            self.fail("still alive after %g s: %r\n%s"
                      % (timeout_s, job.pids(), job.output()[-3000:]))
        return time.monotonic() - began

    def assert_no_crash(self, job, where=""):
        """No signal, no failed assertion, no sanitizer's report."""
        text = job.output() + read(job.path("daemon.log"))
        for mark in ("Signal:", "Assertion", "assertion failed", "AddressSanitizer",
                     "runtime error:", "exited on signal", "Aborted", "the plan is not exact"):
            if mark in text:
                self.fail("%s: %r in the output:\n%s" % (where, mark, text[-4000:]))

    def assert_saves_whole(self, job):
        """Whatever there is under save/ with a save's name has a manifest."""
        for name in saves(job):
            self.assertTrue(os.path.exists(job.path("save", name, "manifest.json")), name)


def read(path):
    """A file as text, "" if there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def saves(job):
    """The names of complete saves, oldest first."""
    try:
        names = os.listdir(job.path("save"))
    except OSError:
        return []
    found = [name for name in names if re.fullmatch(r"step-\d+", name)]
    return sorted(found, key=lambda name: int(name[5:]))


# ---- launches without a Job, for sweeps ----


class Outcome:
    """How a launch ended."""

    def __init__(self, code, output, run_dir, hung):
        self.code, self.output, self.run_dir, self.hung = code, output, run_dir, hung

    @property
    def injected(self):
        """Was there anything to fail?"""
        return "never fired" not in self.output


def launch(config, run_dir, environment, ranks=1, arguments=()):
    """Run to the end, within HANG_S. One rank runs without mpirun, which only takes time."""
    command = [os.path.join(ballast_test.BIN, "ballast-worker"), "--config", config,
               "--run-dir", run_dir] + list(arguments)
    if ranks > 1:
        command = ["mpirun", "--bind-to", "none", "-n", str(ranks)] + command
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, env=environment,
                               cwd=os.path.dirname(config), start_new_session=True)
    hung = False
    try:
        output, _ = process.communicate(timeout=HANG_S)
    except subprocess.TimeoutExpired:
        hung = True
        for pid in ballast_test.processes_of(run_dir):
            ballast_test.kill(pid)
        process.kill()
        output, _ = process.communicate()
    return Outcome(process.returncode, output.decode(errors="replace"), run_dir, hung)
