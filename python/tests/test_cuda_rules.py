# SPDX-License-Identifier: Apache-2.0
"""deep_ep's rules for CUDA streams and memory, with streams that only write down what is asked of them."""

import contextlib
import os
import unittest
from typing import Any, Iterator, List
from unittest import mock

import deep_ep
import epx
import torch
from deep_ep._engine import Pool
from deep_ep._memory import CudaHeap
from deep_ep._streams import CudaLaunch
from deep_ep.utils import EventHandle

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


class Event:
    """An event that remembers its stream."""

    def __init__(self) -> None:
        self.of = "nobody"

    def record(self, stream: Any = None) -> None:
        self.of = (stream or now[0]).name

    def synchronize(self) -> None:
        story.append("the host waits for event of %s" % self.of)


class Tensor:
    """Something that work on a stream uses."""

    def __init__(self, name: str) -> None:
        self.name = name

    def record_stream(self, stream: Stream) -> None:
        story.append("%s is used on %s" % (self.name, stream.name))


now = [Stream("current", 0)]
comm = Stream("comm", 77)
capturing = [False]


@contextlib.contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    now.insert(0, stream)
    yield
    now.pop(0)


class Rules(unittest.TestCase):
    def setUp(self) -> None:
        story.clear()
        fakes = dict(current_stream=lambda device=None: now[0], Event=Event, stream=on_stream,
                     is_current_stream_capturing=lambda: capturing[0], is_available=lambda: True)
        for name, fake in fakes.items():
            patch = mock.patch.object(torch.cuda, name, fake)
            patch.start()
            self.addCleanup(patch.stop)

    def finish(self, launch: CudaLaunch) -> deep_ep.EventOverlap:
        return launch.finish([Tensor("in"), None], [Tensor("out"), None])

    def test_plain_call_runs_on_the_current_stream(self) -> None:
        launch = CudaLaunch(comm, None, False)
        self.assertEqual(launch.address, 1)  # the default stream has a name of its own: 0 is the group's
        with launch.context():
            self.assertEqual(now[0].name, "current")
        self.assertIsNone(self.finish(launch).event)
        self.assertEqual(story, [])

    def test_asynchronous_call(self) -> None:
        launch = CudaLaunch(comm, None, True)
        self.assertEqual(launch.address, 77)
        with launch.context():
            self.assertEqual(now[0].name, "comm")
        event = self.finish(launch)
        self.assertEqual(story, ["comm waits for current", "in is used on comm", "out is used on current"])
        event.current_stream_wait()
        self.assertEqual(story[-1], "current waits for event of comm")

    def test_previous_event(self) -> None:
        previous = deep_ep.EventOverlap(EventHandle())
        launch = CudaLaunch(comm, previous, False)
        self.assertIsNone(self.finish(launch).event)
        self.assertEqual(story, ["comm waits for event of current", "in is used on comm", "out is used on current",
                                 "current waits for comm"])

    def test_previous_event_that_is_empty(self) -> None:
        CudaLaunch(comm, deep_ep.EventOverlap(), True)
        self.assertEqual(story, ["comm waits for current"])


class Memory(Rules):
    def setUp(self) -> None:
        super().setUp()
        with mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="1"):
            self.group = epx.Group(num_experts=1, max_tokens_per_rank=1, max_hidden_bytes=16, alloc_bytes=1 << 16,
                                   modes=epx.Mode.LOW_LATENCY)
        self.addCleanup(self.group.destroy)
        self.heap = CudaHeap(self.group, torch.device("cpu"))

    def inside(self, tensor: torch.Tensor) -> bool:
        """Is it a piece of the heap? Those are given out from the same place again."""
        return tensor.data_ptr() % 256 == 0 and abs(tensor.data_ptr() - self.first) < 1 << 16

    def test_pieces_are_given_out_again_after_what_was_queued(self) -> None:
        kept = self.heap.empty((100,), torch.float32)
        self.first = kept.data_ptr()
        view = kept[50:]
        del kept
        other = self.heap.empty((100,), torch.float32)
        self.assertNotEqual(other.data_ptr(), self.first)  # the view still lives
        self.assertEqual(story, [])
        with on_stream(Stream("side", 5)):
            del view
        self.assertFalse(self.heap.holds(torch.empty(4)))
        again = self.heap.empty((24, 4), torch.float32)  # somewhat smaller: the same piece will do
        self.assertEqual((again.data_ptr(), again.shape), (self.first, (24, 4)))
        self.assertTrue(self.heap.holds(again[3:]))
        self.assertEqual(story, ["current waits for event of side"])

    def test_full_heap(self) -> None:
        first = self.heap.empty((40000,), torch.uint8)
        self.first = first.data_ptr()
        plain = self.heap.empty((40000,), torch.uint8)
        self.assertFalse(self.inside(plain))
        del first
        larger = self.heap.empty((50000,), torch.uint8)  # another size: what is free is given back first
        self.assertTrue(self.inside(larger))
        self.assertEqual(story, ["the host waits for event of current"])

    def test_graphs_have_memory_of_their_own(self) -> None:
        piece = self.heap.empty((1000,), torch.uint8)
        self.first = piece.data_ptr()
        capturing[0] = True
        try:
            captured = self.heap.empty((1000,), torch.uint8)
            del piece  # no event can be recorded now
        finally:
            capturing[0] = False
        self.assertFalse(self.inside(captured))
        again = self.heap.empty((1000,), torch.uint8)
        self.assertEqual(again.data_ptr(), self.first)
        self.assertEqual(story, ["current waits for event of current"])

    def test_a_closed_heap_goes_with_its_last_tensor(self) -> None:
        kept, free = self.heap.empty((100,), torch.uint8), self.heap.empty((1000,), torch.uint8)
        del free
        self.heap.close()
        self.group.destroy()
        self.assertTrue(self.group.alive)
        kept.fill_(3)
        del kept
        self.assertFalse(self.group.alive)

    def test_fp8_and_strides(self) -> None:
        values = self.heap.empty((3, 16), torch.float8_e4m3fn)
        self.assertEqual((values.dtype, values.shape), (torch.float8_e4m3fn, (3, 16)))
        scales = self.heap.empty((2, 8, 3), torch.float32, (24, 1, 8))
        self.assertEqual((scales.stride(), scales.shape), ((24, 1, 8), (2, 8, 3)))
        self.assertEqual(self.heap.empty((0, 7), torch.bfloat16).shape, (0, 7))

    def test_handles_of_graphs_stay_apart(self) -> None:
        pool = Pool(self.group, torch.device("cpu"), 1, 1, 16)
        with mock.patch.object(pool, "capturing", lambda: capturing[0]):
            take = lambda: pool.take(epx.Mode.LOW_LATENCY, epx.Layout.EXPERT_MAJOR, 1)  # noqa: E731
            eager = take()
            pool.give(eager, False)
            capturing[0] = True
            captured = take()
            self.assertIs(captured, eager)  # while capturing there is no memory for a new one
            pool.give(captured, True)
            capturing[0] = False
            self.assertIsNot(take(), captured)
            capturing[0] = True
            self.assertIs(take(), captured)
            capturing[0] = False


if __name__ == "__main__":
    unittest.main()
