# SPDX-License-Identifier: Apache-2.0
"""Runs commands of a stage, follows their output for the progress line, and counts what came of them."""
import os
import re
import shutil
import subprocess
import threading
import time

import results

LOGS = "build-logs"
POLL_S = 0.1
TAIL = 60  # lines shown of what failed


def tail(text, lines=TAIL):
    return "\n".join(text.rstrip().splitlines()[-lines:])


def generator(folder):
    """CMake's options that choose what compiles a new folder: Ninja, where it is, takes less time for itself."""
    known = os.path.exists(os.path.join(folder, "CMakeCache.txt"))
    return ["-G", "Ninja"] if shutil.which("ninja") and not known else []


class MakeParser:
    """"[ 42%] Building ..." """

    def __call__(self, line):
        match = re.match(r"\[ *(\d+)%\]", line)
        return (int(match.group(1)) / 100, "") if match else None


class CtestParser:
    """"Start 3: name" and " 7/61 Test #3: name ... Passed  1.20 sec"."""

    def __init__(self):
        self.running, self.times = {}, []
        self.ended, self.all = 0, 0

    def __call__(self, line):
        start = re.match(r" +Start +(\d+): (\S+)", line)
        end = re.match(r" *(\d+)/(\d+) Test +#(\d+): (\S+) .*?([\d.]+) sec", line)
        if start:
            self.running[start.group(1)] = start.group(2)
        elif end:
            self.ended, self.all = int(end.group(1)), int(end.group(2))
            self.running.pop(end.group(3), None)
            self.times.append((float(end.group(5)), end.group(4)))
        if not self.all:
            return None
        names = " ".join(sorted(self.running.values()))
        return self.ended / self.all, f"{self.ended} of {self.all} tests" + (f"; running: {names}" if names else "")

    def slowest(self):
        return ", ".join(f"{name} {seconds:.1f} s" for seconds, name in sorted(self.times, reverse=True)[:3])


class SuiteParser:
    """"ok NAME (1.23 s)" of python/tests/suite.py; how many there will be is not known."""

    def __init__(self):
        self.count = 0

    def __call__(self, line):
        match = re.match(r"ok (\S+)", line)
        if not match:
            return None
        self.count += 1
        return 0.0, f"{self.count} tests"


class Stopped(Exception):
    """Another lane was interrupted."""


class Outcome(threading.Event):
    """Set when a stage has ended for which stages of other lanes wait."""

    passed = False


class Run:
    """A lane: stages that run one after the other. Several lanes may run side by side, each in its thread."""

    def __init__(self, progress, times, lane=0, stopping=None, gcc_built=None, venv=None, nice=False):
        """stopping: an event that ends the commands of all lanes. gcc_built: one that says that a stage of another lane
        may use gcc's build. venv: the outcome of the stage venv. nice: commands have a low priority."""
        self.progress, self.times, self.lane = progress, times, lane
        self.stopping, self.gcc_built, self.venv = stopping or threading.Event(), gcc_built, venv
        self.prefix = ["nice", "-n", "10"] if nice else []
        self.stages = []
        self.taken = {}  # step -> seconds, for the next run's estimate
        self.jobs = os.environ.get("JOBS") or str(len(os.sched_getaffinity(0)))
        os.makedirs(LOGS, exist_ok=True)

    @property
    def stage(self):
        return self.stages[-1]

    def expected(self, step):
        return self.times.get(step, 3.0)

    def note(self, text):
        self.progress.message(text)

    # ---- Commands

    def command(self, step, argv, env=None, parser=None):
        """Runs argv with its output in build-logs/STEP.log; returns (exit status, output)."""
        path = os.path.join(LOGS, step + ".log")
        begin = time.monotonic()
        self.progress.step(step, self.expected(step), self.lane)
        with open(path, "w") as log:
            process = subprocess.Popen([*self.prefix, *argv], stdout=log, stderr=subprocess.STDOUT,
                                       env={**os.environ, **(env or {})})
        try:
            self._follow(process, path, step, parser)
        except BaseException:
            process.terminate()
            process.wait()
            raise
        self.progress.end_step(self.lane)
        self.taken[step] = time.monotonic() - begin
        with open(path, errors="replace") as log:
            return process.returncode, log.read()

    def await_event(self, event):
        """Waits for what a stage of another lane makes."""
        while not event.wait(POLL_S):
            if self.stopping.is_set():
                raise Stopped

    def _ended(self, process):
        """Whether it has ended. Adds its CPU time, and that of the processes it has waited for, to the stage."""
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if not pid:
            return False
        process.returncode = os.waitstatus_to_exitcode(status)
        self.stage.cpu_seconds += usage.ru_utime + usage.ru_stime
        return True

    def _follow(self, process, path, step, parser):
        begin, rest = time.monotonic(), ""
        with open(path, errors="replace") as log:
            while True:
                ended = self._ended(process)
                rest = self._parse(rest + log.read(), parser)
                elapsed = time.monotonic() - begin
                if ended:
                    return
                if parser is None:
                    self.progress.update(min(elapsed / self.expected(step), 0.95), "", self.lane)
                self.progress.tick()
                if self.stopping.wait(POLL_S):
                    raise Stopped

    def _parse(self, text, parser):
        """Gives whole lines to the parser; returns what is left."""
        *lines, rest = text.split("\n")
        for line in lines:
            found = parser(line) if parser else None
            if found:
                self.progress.update(*found, self.lane)
        return rest

    # ---- Checks

    def check(self, step, argv, **kw):
        """One check that is a command: exit 0 passed, 77 skipped, anything else failed. Returns whether it passed."""
        rc, output = self.command(step, argv, **kw)
        lines = output.strip().splitlines()
        if rc == 0:
            self.stage.add(1, [], [])
            self.note(f"{step}: {lines[-1] if lines else 'ok'}")
        elif rc == 77:
            self.skip(step, results.reason_of(lines))
        else:
            self.fail(step, f"exit {rc}", output)
        return rc == 0

    def skip(self, name, reason):
        self.stage.add(0, [], [results.Item(name, reason)])

    def fail(self, name, text, output=""):
        self.stage.add(0, [results.Item(name, text)], [])
        if output:
            self.note(tail(output))
        self.note(f"FAILED: {name}: {text}")

    def build(self, step, folder, options):
        """Configures and compiles; returns whether it succeeded."""
        rc, output = self.command(step + "-configure", ["bash", "scripts/configure.sh", folder, *generator(folder),
                                                        *options])
        if rc:
            self.fail(step + "-build", "CMake failed", output)
            return False
        return self.check(step + "-build", ["cmake", "--build", folder, "-j" + self.jobs], parser=MakeParser(),
                          env={"NINJA_STATUS": "[%p] "})

    def ctest(self, step, folder, scale, options, env=None, prefix=()):
        """Runs tests and counts their cases. A test takes two places (one, if it sleeps) of 2 * cores + 1."""
        report, parser = os.path.abspath(os.path.join(LOGS, step + ".xml")), CtestParser()
        if os.path.exists(report):
            os.remove(report)
        argv = [*prefix, "ctest", "--test-dir", folder, "-j" + str(2 * int(self.jobs) + 1), "--no-tests=error",
                "--output-on-failure", "--test-output-size-passed", "1000000", "--test-output-size-failed", "1000000",
                "--output-junit", report, *options]
        rc, output = self.command(step, argv, env={"EPX_TEST_SCALE": str(scale), **(env or {})}, parser=parser)
        if not os.path.exists(report):
            self.fail(step, f"ctest ended with {rc} and no report", output)
            return
        passed, failed, skipped = results.count_ctest(report)
        if rc and not failed:
            failed = [results.Item(step, f"ctest ended with {rc}")]
        for item in failed:
            self.note(f"---- {item.name}\n{tail(item.text)}")
        self.stage.add(passed, [results.Item(f.name, "see above") for f in failed], skipped)
        self.note(f"{step}: {passed} passed, {len(failed)} failed, {len(skipped)} skipped; slowest: {parser.slowest()}")
