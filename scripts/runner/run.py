# SPDX-License-Identifier: Apache-2.0
"""Runs commands of a stage, follows their output for the progress line, and counts what came of them."""
import json
import os
import re
import signal
import subprocess
import time

import results

LOGS = "build-logs"
POLL_S = 0.1
TAIL = 60  # lines shown of what failed


def tail(text, lines=TAIL):
    return "\n".join(text.rstrip().splitlines()[-lines:])


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


def configuring(folder, options):
    """The command that configures a folder with -Werror."""
    return ["bash", "scripts/configure.sh", folder, "-DEPX_WERROR=ON", *options]


def building(folder, jobs):
    return ["cmake", "--build", folder, "-j" + jobs]


class Ahead:
    """Compiles what later stages need, one folder after the other, in time that the tests leave idle.

    It decides nothing: the stage configures and compiles its folder itself, and finds most of it done. What it prints
    is thrown away, because the stage says it again.
    """

    def __init__(self, jobs):
        self.jobs, self.queue, self.process, self.folder = jobs, [], None, None

    def start(self, builds):
        """builds: (folder, options) in the order in which they are needed."""
        self.queue = list(builds)
        self._next()

    def poll(self):
        """Goes on to the next folder where one is done."""
        if self.process and self.process.poll() is not None:
            self._next()

    def release(self, folder):
        """The caller compiles this folder now: whatever is under way stops."""
        self.queue = [build for build in self.queue if build[0] != folder]
        if self.process and self.folder != folder:
            self.queue.insert(0, self.current)
        self.stop()

    def stop(self):
        if self.process:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait()
        self.process = self.folder = None

    def resume(self):
        if not self.process:
            self._next()

    def _next(self):
        self.process = self.folder = None
        if self.queue:
            self.current = self.queue.pop(0)
            self.folder = self.current[0]
            words = ['"$@" && exec nice -n 19 ' + " ".join(building(self.folder, self.jobs))]
            quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            # A process group and not a session: the kernel may give every session the same share.
            self.process = subprocess.Popen(["bash", "-c", *words, "bash", *configuring(*self.current)],
                                            preexec_fn=os.setpgrp, **quiet)


class Run:
    """One run of some stages."""

    def __init__(self, progress, times, later=()):
        """later: folders that stages behind the first tests will compile (stages.ahead)."""
        self.progress, self.times, self.later = progress, times, later
        self.stages = []
        self.taken = {}  # step -> seconds, for the next run's estimate
        self.jobs = os.environ.get("JOBS") or str(len(os.sched_getaffinity(0)))
        self.ahead = Ahead(self.jobs)
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
        self.progress.step(step, self.expected(step))
        with open(path, "w") as log:
            process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})})
        try:
            self._follow(process, path, step, parser)
        except BaseException:
            process.terminate()
            process.wait()
            raise
        self.progress.end_step()
        self.taken[step] = time.monotonic() - begin
        return process.returncode, open(path, errors="replace").read()

    def _follow(self, process, path, step, parser):
        begin, rest = time.monotonic(), ""
        with open(path, errors="replace") as log:
            while True:
                ended = process.poll() is not None
                rest = self._parse(rest + log.read(), parser)
                elapsed = time.monotonic() - begin
                if ended:
                    return
                self.ahead.poll()
                if parser is None:
                    self.progress.update(min(elapsed / self.expected(step), 0.95), "")
                self.progress.tick()
                time.sleep(POLL_S)

    def _parse(self, text, parser):
        """Gives whole lines to the parser; returns what is left."""
        *lines, rest = text.split("\n")
        for line in lines:
            found = parser(line) if parser else None
            if found:
                self.progress.update(*found)
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
        """Configures with -Werror and compiles; returns whether it succeeded."""
        self.ahead.release(folder)
        rc, output = self.command(step + "-configure", configuring(folder, options))
        if rc:
            self.fail(step + "-build", "CMake failed", output)
            return False
        done = self.check(step + "-build", building(folder, self.jobs), parser=MakeParser())
        self.ahead.resume()
        return done

    def build_ahead(self):
        """From now on, what later stages need is compiled in idle time."""
        self.ahead.start(self.later)

    def ctest(self, step, folder, scale, options, env=None, prefix=(), crowd=2):
        """Runs tests and counts their cases. A test takes two places (one, if it sleeps) of crowd * cores + 1."""
        report, parser = os.path.abspath(os.path.join(LOGS, step + ".xml")), CtestParser()
        if os.path.exists(report):
            os.remove(report)
        argv = [*prefix, "ctest", "--test-dir", folder, "-j" + str(crowd * int(self.jobs) + 1), "--no-tests=error",
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

    def save_times(self):
        with open(os.path.join(LOGS, "times.json"), "w") as file:
            json.dump({**self.times, **self.taken}, file, indent=1, sort_keys=True)
