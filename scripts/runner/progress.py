# SPDX-License-Identifier: Apache-2.0
"""Progress of a run: stage, percent, time left.

On a terminal it is one line that is rewritten; elsewhere a line when a step begins, and one every 20 seconds.
"""
import shutil
import sys
import threading
import time

EVERY_S = 20.0  # between two lines where there is no terminal


def duration(seconds):
    """"40 s" or "12 min"."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


class Step:
    """What a lane does now."""

    def __init__(self, label, expected_s):
        self.label, self.expected = label, expected_s
        self.fraction, self.detail = 0.0, ""

    def text(self):
        return self.label + (f": {self.detail}" if self.detail else "")


class Progress:
    """Steps have expected seconds (on 2 idle cores); what is left is scaled by how this machine has done so far.

    Lanes run side by side, each with one step at a time; the line names the steps of all. Threads may call this.
    """

    def __init__(self, expected_s, out=sys.stdout, clock=time.monotonic):
        self.out, self.clock = out, clock
        self.total = max(expected_s, 1.0)
        self.done = 0.0  # expected seconds of the steps that have ended
        self.begin = clock()
        self.steps = {}  # lane -> Step
        self.last_line = 0.0
        self.terminal = out.isatty()
        self.shown = False  # a line of ours is on the terminal
        self.lock = threading.RLock()

    def step(self, label, expected_s, lane=0):
        """A step begins; the one before in this lane has ended."""
        with self.lock:
            self.end_step(lane)
            self.steps[lane] = Step(label, expected_s)
            self._show(force=True)

    def end_step(self, lane=0):
        with self.lock:
            ended = self.steps.pop(lane, None)
            self.done += ended.expected if ended else 0.0

    def update(self, fraction, detail, lane=0):
        """How much of the step is done (0 to 1), and what runs now."""
        with self.lock:
            step = self.steps[lane]
            step.fraction, step.detail = min(max(fraction, step.fraction), 1.0), detail
            self._show()

    def tick(self):
        """Called often: shows the line again when it is time."""
        with self.lock:
            self._show()

    def message(self, text):
        """A line that stays."""
        with self.lock:
            self._clear()
            print(text, file=self.out, flush=True)

    def finish(self):
        with self.lock:
            self._clear()

    def percent(self):
        return min(99, int(100 * self._reached() / self.total))

    def left_s(self):
        """Expected seconds left, times the slowness so far. At the very beginning little is known: not below 1, not
        above 8."""
        reached = self._reached()
        elapsed = self.clock() - self.begin
        pace = 1.0 if reached < 5 else min(max(elapsed / reached, 0.2), 8.0)
        return max(0.0, self.total - reached) * pace

    def line(self):
        text = " | ".join(self.steps[lane].text() for lane in sorted(self.steps))
        return f"[{self.percent():2d} %, about {duration(self.left_s())} left] {text}"

    def _reached(self):
        return self.done + sum(step.fraction * step.expected for step in self.steps.values())

    def _show(self, force=False):
        if not self.steps:
            return
        now = self.clock()
        if self.terminal:
            if force or now - self.last_line >= 0.2:
                columns = shutil.get_terminal_size().columns
                self.out.write("\r\x1b[K" + self.line()[: columns - 1])
                self.out.flush()
                self.shown, self.last_line = True, now
        elif force or now - self.last_line >= EVERY_S:
            print(self.line(), file=self.out, flush=True)
            self.last_line = now

    def _clear(self):
        if self.shown:
            self.out.write("\r\x1b[K")
            self.shown = False
