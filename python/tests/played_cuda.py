# SPDX-License-Identifier: Apache-2.0
"""CUDA as a story: streams that only write down what is asked of them, for tests of deep_ep's rules without a GPU."""

import contextlib
import os
import sys
import unittest
from typing import Any, Callable, Iterator, List
from unittest import mock

import epx
import torch
from deep_ep import _memory
from deep_ep._memory import Heap

story: List[str] = []


class Stream:
    """A stream that writes down what it is told."""

    device = torch.device("cpu")

    def __init__(self, name: str, number: int) -> None:
        self.name, self.cuda_stream = name, number

    def wait_stream(self, other: "Stream") -> None:
        story.append("%s waits for %s" % (self.name, other.name))

    def wait_event(self, event: "Event") -> None:
        story.append("%s waits for event of %s" % (self.name, event.of))

    def synchronize(self) -> None:
        story.append("the host waits for %s" % self.name)


class Event:
    """An event that remembers its stream."""

    def __init__(self) -> None:
        self.of = "nobody"

    def record(self, stream: Any = None) -> None:
        self.of = (stream or now[0]).name

    def query(self) -> bool:
        return passed[0]


class Tensor:
    """Something that work on a stream uses."""

    is_cuda = True

    def __init__(self, name: str) -> None:
        self.name = name

    def record_stream(self, stream: Stream) -> None:
        story.append("%s is used on %s" % (self.name, stream.name))

    def untyped_storage(self) -> "Tensor":
        return self

    def data_ptr(self) -> int:
        return 0  # in no heap


default = Stream("current", 0)
now = [default]
comm, side = Stream("comm", 77), Stream("side", 5)
by_number = {stream.cuda_stream: stream for stream in (comm, side)}
capturing, passed = [False], [True]


@contextlib.contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    now.insert(0, stream)
    try:
        yield
    finally:
        now.pop(0)


def interrupt(lines: int, call: Callable[[], Any], module: Any = _memory) -> bool:
    """Ctrl-C at such a line of a module, one of those that a call runs. False if it runs no so many."""
    left = [lines]

    def trace(frame: Any, event: str, _argument: Any) -> Any:
        if frame.f_code.co_filename != module.__file__:
            return None
        left[0] -= event == "line"
        if event == "line" and not left[0]:
            raise KeyboardInterrupt
        return trace
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return left[0] <= 0


class Played(unittest.TestCase):
    """A test on these streams."""

    def setUp(self) -> None:
        story.clear()
        fakes = dict(current_stream=lambda device=None: now[0], Event=Event, stream=on_stream,
                     is_current_stream_capturing=lambda: capturing[0], is_available=lambda: True,
                     default_stream=lambda device=None: default,
                     synchronize=lambda device=None: story.append("the host waits"),
                     ExternalStream=lambda number, device=None: by_number[number])
        patches = [mock.patch.object(torch.cuda, name, fake) for name, fake in fakes.items()]
        patches.append(mock.patch.object(
            torch._C, "_cuda_getCurrentRawStream", lambda index: now[0].cuda_stream, create=True))
        patches.append(mock.patch.object(_memory, "streams_of", _memory.Streams))
        for patch in patches:
            patch.start()
            self.addCleanup(patch.stop)


class PlayedHeap(Played):
    """A test with a heap of 64 KiB."""

    def setUp(self) -> None:
        super().setUp()
        self.group = self.another_group()
        self.heap = Heap(self.group, torch.device("cpu"))

    def another_group(self) -> epx.Group:
        """With a heap of its own."""
        with mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="1"):
            group = epx.Group(num_experts=1, max_tokens_per_rank=1, max_hidden_bytes=16, alloc_bytes=1 << 16,
                              modes=epx.Mode.LOW_LATENCY)
        self.addCleanup(group.destroy)
        return group

    def another(self) -> Heap:
        """A heap of another group."""
        return Heap(self.another_group(), torch.device("cpu"))

    def inside(self, tensor: torch.Tensor) -> bool:
        """Is it a piece of the heap? Those are given out from the same place again."""
        return tensor.data_ptr() % 256 == 0 and abs(tensor.data_ptr() - self.first) < 1 << 16
