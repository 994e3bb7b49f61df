# SPDX-License-Identifier: Apache-2.0
"""deep_ep's rules for CUDA streams and memory, with streams that only write down what is asked of them."""

import contextlib
import os
import random
import sys
import unittest
from typing import Any, Callable, Dict, Iterator, List, Tuple
from unittest import mock

import deep_ep
import epx
import torch
from deep_ep import _elastic_sizes, _elastic_streams, _high_throughput, _memory, _results
from deep_ep._elastic_engine import ElasticSettings
from deep_ep._elastic_pipeline import Sizes
from deep_ep._elastic_plan import DispatchPlan, Kind, Result
from deep_ep._engine import Pool
from deep_ep._fresh import _SPARE, RowGuess
from deep_ep._memory import CudaHeap, Form
from deep_ep._results import Results
from deep_ep._streams import CudaLaunch
from deep_ep.utils import EventHandle

story: List[str] = []
NONE = len(_SPARE)  # of a guess: no rows to spare


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

    def __init__(self, name: str) -> None:
        self.name = name

    def record_stream(self, stream: Stream) -> None:
        story.append("%s is used on %s" % (self.name, stream.name))


default = Stream("current", 0)
now = [default]
comm, side = Stream("comm", 77), Stream("side", 5)
by_number = {stream.cuda_stream: stream for stream in (comm, side)}
capturing, passed = [False], [True]


@contextlib.contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    now.insert(0, stream)
    yield
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


class Rules(unittest.TestCase):
    def setUp(self) -> None:
        story.clear()
        fakes = dict(current_stream=lambda device=None: now[0], Event=Event, stream=on_stream,
                     is_current_stream_capturing=lambda: capturing[0], is_available=lambda: True,
                     default_stream=lambda device=None: default,
                     ExternalStream=lambda number, device=None: by_number[number])
        patches = [mock.patch.object(torch.cuda, name, fake) for name, fake in fakes.items()]
        patches.append(mock.patch.object(
            torch._C, "_cuda_getCurrentRawStream", lambda index: now[0].cuda_stream, create=True))
        for patch in patches:
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

    def test_copies_into_the_heap_follow_asynchronous_calls(self) -> None:
        """Results that were released with nobody waiting for their event may still be written."""
        group = mock.Mock(**{"info.max_recv_tokens": 1, "register.return_value": False})
        heap = mock.Mock(**{"holds.return_value": False})
        heap.empty = lambda shape, dtype: mock.Mock(copy_=lambda x: story.append("%s copies" % now[0].name))
        for asynchronous, expected in ((False, ["current waits for comm", "current copies"]),
                                       (True, ["comm waits for current", "comm copies"])):
            story.clear()
            launch = CudaLaunch(comm, None, asynchronous)
            with launch.context():
                _high_throughput.within_reach(mock.Mock(group=group, heap=heap), torch.zeros(2, 2), launch)
            self.assertEqual(story, expected)
        story.clear()
        launch = CudaLaunch(comm, None, False)
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
            launch.follow()  # a wait for a stream that is not captured would end the capture
        self.assertEqual(story, [])

    def test_sizes_of_the_pipeline_are_checked_later(self) -> None:
        """What was received last is overwritten before the host looks at it."""
        sizes = Sizes(torch.device("cpu"), 3, 4, lambda: capturing[0])
        sizes._device, sizes._host = torch.device("cuda", 0), torch.zeros(256, 5)
        for rows, last, wanted in ((1, 64, 64), (4, 2048, 8192), (2, 32, 2048), (1, 32, 32)):
            sizes.counts[0], sizes.weights[0] = rows, last
            sizes.check(wanted)
        capturing[0] = True
        sizes.check(7)
        sizes.check_earlier()
        capturing[0] = passed[0] = False
        sizes.check_earlier()
        passed[0] = True
        with self.assertRaisesRegex(epx.MismatchError, "the 2080 bytes that rank 3 sent, got one of 2048 bytes"):
            sizes.check_earlier()
        sizes.check_earlier()
        for _ in range(1000):  # more than are kept: nobody waits for them
            sizes.check(32)
        sizes.check_earlier()

    def test_elastic_waits_for_both_events(self) -> None:
        with mock.patch.object(_elastic_streams, "comm_stream", lambda device=None: comm):
            begin = _elastic_streams.launcher(torch.device("cuda", 0), EventHandle(), deep_ep.EventOverlap(
                EventHandle()), True, True)
            launch = begin(None)
        self.assertEqual(launch.address, 77)
        self.assertEqual(story, ["comm waits for event of current"] * 2)
        with self.assertRaises(AssertionError):
            _elastic_streams.launcher(torch.device("cuda", 0), EventHandle(), None, True, False)

    def test_elastic_event_keeps_tensors_instead_of_record_stream(self) -> None:
        for value, recorded in (("0", 2), ("1", 0)):
            story.clear()
            with mock.patch.dict(os.environ, {"EP_AVOID_RECORD_STREAM": value}):
                event = self.finish(_elastic_streams.ElasticCudaLaunch(comm, None, True))
            self.assertEqual(len(story), 1 + recorded)
            self.assertEqual([tensor.name for tensor in event.extra_tensors or ()], [] if recorded else ["in", "out"])
            event.current_stream_wait(release_handle=True)
            self.assertIsNone(event.extra_tensors)


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
        with on_stream(side):
            del view
        self.assertFalse(self.heap.holds(torch.empty(4)))
        again = self.heap.empty((24, 4), torch.float32)  # somewhat smaller: the same piece will do
        self.assertEqual((again.data_ptr(), again.shape), (self.first, (24, 4)))
        self.assertTrue(self.heap.holds(again[3:]))
        self.assertEqual(story, ["current waits for side"])

    def test_one_stream_waits_for_nothing(self) -> None:
        form = Form(((4, 8), torch.float8_e4m3fn, None), ((4,), torch.float32, None))
        rows, scales = self.heap.try_make(form)
        self.assertEqual([(t.shape, t.dtype) for t in (rows, scales)],
                         [((4, 8), torch.float8_e4m3fn), ((4,), torch.float32)])
        first = rows.data_ptr()
        for _ in range(3):
            del rows
            other, _scales = self.heap.try_make(form)
            self.assertNotEqual(other.data_ptr(), first)  # the scales still live
            del scales
            rows, scales = self.heap.try_make(form)
            self.assertEqual(rows.data_ptr(), first)
        self.assertEqual(story, [])

    def test_a_stream_waits_for_the_one_that_had_the_piece(self) -> None:
        with on_stream(side):
            self.first = self.heap.empty((100,), torch.float32).data_ptr()
        with on_stream(comm):
            self.assertEqual(self.heap.empty((100,), torch.float32).data_ptr(), self.first)
        self.assertEqual(self.heap.empty((100,), torch.float32).data_ptr(), self.first)
        with on_stream(side):
            self.assertEqual(self.heap.empty((100,), torch.float32).data_ptr(), self.first)
        self.assertEqual(story, ["comm waits for side", "current waits for comm", "side waits for current"])

    def test_full_heap(self) -> None:
        first = self.heap.empty((40000,), torch.uint8)
        self.first = first.data_ptr()
        plain = self.heap.empty((40000,), torch.uint8)
        self.assertFalse(self.inside(plain))
        del first
        larger = self.heap.empty((50000,), torch.uint8)  # another size: what is free is given back first
        self.assertTrue(self.inside(larger))
        self.assertEqual(story, ["the host waits for current"])

    def test_interrupted_while_room_is_made(self) -> None:
        """Nothing is freed that work may still use."""
        with on_stream(side):
            self.first = self.heap.empty((40000,), torch.uint8).data_ptr()
        with mock.patch.object(Stream, "synchronize", side_effect=KeyboardInterrupt):
            with self.assertRaises(KeyboardInterrupt):
                self.heap.empty((50000,), torch.uint8)
        again = self.heap.empty((40000,), torch.uint8)
        self.assertEqual((again.data_ptr(), story), (self.first, ["current waits for side"]))

    def test_interrupted_while_a_piece_is_taken(self) -> None:
        """The stream that was to wait for its work did not: the next one does."""
        with on_stream(side):
            self.first = self.heap.empty((40000,), torch.uint8).data_ptr()
        with mock.patch.object(Stream, "wait_stream", side_effect=KeyboardInterrupt):
            with self.assertRaises(KeyboardInterrupt):
                self.heap.empty((40000,), torch.uint8)
        again = self.heap.empty((40000,), torch.uint8)
        self.assertEqual((again.data_ptr(), story), (self.first, ["current waits for side"]))

    def test_interrupted_at_any_line(self) -> None:
        """Memory that work on another stream uses is given to nobody without a wait for that stream."""
        forms = [[Form(((size,), torch.uint8, None)) for size in sizes] for sizes in ((30000, 2000), (60000, 2000))]
        with mock.patch.object(sys, "unraisablehook", lambda _: None):  # in a finalizer
            for wanted in forms:
                lines, interrupted = 0, True
                while interrupted:
                    heap = CudaHeap(self.group, torch.device("cpu"))
                    with on_stream(side):
                        at = [(one.address, one.form.nbytes) for one in heap.reserve_all(forms[0])]
                    story.clear()
                    lines += 1
                    interrupted = interrupt(lines, lambda: heap.reserve_all(wanted))
                    given = [heap.reserve(Form(((size,), torch.uint8, None))) for size in (60000, 30000, 2000, 512)]
                    used = any(one is not None and one.address < address + nbytes
                               and address < one.address + one.form.nbytes for one in given for address, nbytes in at)
                    self.assertTrue(not used or any(line.endswith(" for side") for line in story), (lines, story))
                    del given
                self.assertGreater(lines, 20)

    def test_a_larger_piece_is_used_again(self) -> None:
        large, small = self.heap.empty((16000,), torch.uint8), self.heap.empty((15000,), torch.uint8)
        places = large.data_ptr(), small.data_ptr()
        del large, small
        kept = self.heap.empty((14500,), torch.uint8)  # the smallest that is large enough
        self.assertEqual(kept.data_ptr(), places[1])
        more = self.heap.empty((14500,), torch.uint8)
        self.assertEqual(more.data_ptr(), places[0])
        del more
        half = self.heap.empty((8000,), torch.uint8)  # 16000 bytes would be a waste while there is other memory
        self.assertNotIn(half.data_ptr(), places)
        rest = self.heap.empty((20000,), torch.uint8)
        self.first = kept.data_ptr()
        self.assertTrue(self.inside(rest))
        other = self.heap.empty((8500,), torch.uint8)
        self.assertEqual((other.data_ptr(), story), (places[0], []))
        self.assertFalse(self.inside(self.heap.empty((8500,), torch.uint8)))
        self.assertEqual(story, [])

    def test_pieces_are_rounded_up(self) -> None:
        for nbytes, tight in ((1, 8), (5000, 8), (40000, 8), (5 << 20, 32), (449 << 20, 32), ((903 << 20) + 1, 32)):
            form = Form(((nbytes,), torch.uint8, None))
            for made, most in ((form.piece_bytes, 8), (form.tight_bytes, tight)):
                self.assertTrue(nbytes <= made <= max(nbytes + nbytes // most + 1, 512))
                self.assertFalse(made % 256)

    def test_a_heap_without_room_for_a_rounded_piece_has_a_tight_one(self) -> None:
        form = Form(((449 << 20,), torch.uint8, None))
        self.assertEqual((form.piece_bytes >> 20, form.tight_bytes >> 20), (480, 456))
        for room, expected in ((480, form.piece_bytes), (479, form.tight_bytes), (455, 0)):
            heap = CudaHeap(self.group, torch.device("cpu"))
            with mock.patch.object(heap, "_try_alloc", lambda nbytes, room=room: mock.Mock(
                    nbytes=nbytes, address=4096) if nbytes <= room << 20 else None):
                leases = heap._take([form], 0)
                self.assertEqual(leases[0].piece.nbytes if leases else 0, expected)

    def test_nobody_waits_for_room_that_there_is_not(self) -> None:
        """Results are held, and the heap is full: the small pieces of the oldest one, which are free, do not help."""
        held: List[Any] = []
        for i in range(40):
            del held[:-5]
            with on_stream((side, comm)[i % 2]):
                held.append([self.heap.empty((rows + i % 7,), torch.uint8) for rows in (300, 1200, 20000)])
        self.first = min(tensor.data_ptr() for one in held for tensor in one if self.heap.holds(tensor))
        self.assertEqual(sum(self.heap.holds(one[2]) for one in held), 2)
        self.assertTrue(all(self.heap.holds(one[0]) for one in held))
        self.assertFalse([line for line in story if "host" in line])
        held.clear()
        self.assertTrue(self.heap.holds(self.heap.empty((40000,), torch.uint8)))  # there is room now
        self.assertEqual(sorted(line for line in story if "host" in line), ["the host waits for current"])

    def test_several_pieces_make_room_together(self) -> None:
        """Whatever there was before, where all of the heap is free: a small piece in the middle, which is used again,
        would leave no room for a large one, and a large one that has nearly all of the heap none for a small one."""
        forms = [Form(((size,), torch.uint8, None)) for size in (60000, 2000)]
        for before in ((30000, 2000), (65000,), (2000, 30000, 2000, 20000), (300,) * 9):
            kept: Any = [self.heap.empty((size,), torch.uint8) for size in before]
            self.assertTrue(all(map(self.heap.holds, kept)))
            kept.clear()
            self.assertEqual(len(self.heap.reserve_all(forms, evict=False)), 0)
            for _ in range(2):
                kept = self.heap.reserve_all(forms)
                self.assertEqual([one.form for one in kept], forms)
                kept = None
            self.assertEqual(story, ["the host waits for current"])
            story.clear()
            kept = self.heap.reserve_all(forms)
            self.assertEqual(self.heap.reserve_all(forms), [])
            kept = None
            self.heap = CudaHeap(self.group, torch.device("cpu"))

    def test_a_piece_that_fits_only_without_rounding(self) -> None:
        first = self.heap.empty((2000,), torch.uint8)
        rest = self.heap.empty((63000,), torch.uint8)
        self.assertTrue(self.heap.holds(first) and self.heap.holds(rest))
        self.assertFalse(self.heap.holds(self.heap.empty((1000,), torch.uint8)))
        self.assertEqual(story, [])

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
        self.assertEqual(story, [])

    def test_pieces_let_go_while_another_stream_is_captured(self) -> None:
        with on_stream(side):
            piece = self.heap.empty((1000,), torch.uint8)
        self.first = piece.data_ptr()
        capturing[0] = True
        try:
            with on_stream(comm):
                del piece
        finally:
            capturing[0] = False
        self.assertEqual(self.heap.empty((1000,), torch.uint8).data_ptr(), self.first)
        self.assertEqual(story, ["current waits for side"])

    def test_the_whole_heap_is_exported(self) -> None:
        """Beside memory of graphs, but not beside a tensor. All of it is there again afterwards."""
        nbytes, form = self.group.alloc_bytes, Form(((3000,), torch.uint8, None))
        with on_stream(side):
            free = self.heap.empty((9000,), torch.uint8)
            self.first = free.data_ptr()
            del free
        self.heap.prepare_graphs(form)  # one that no graph has taken yet
        capturing[0] = True
        with on_stream(comm):
            captured = self.heap.try_capture(form)
            more = self.heap.try_capture(form)
        capturing[0] = False
        assert captured is not None and more is not None
        place = captured[0].data_ptr()
        del more
        self.assertIsNone(self.heap.export(nbytes))  # what the graph returns lives
        del captured
        story.clear()
        whole = self.heap.export(nbytes)
        assert whole is not None
        self.assertEqual((whole.data_ptr(), whole.shape), (self.first, (nbytes,)))
        self.assertEqual(story, ["current waits for side"])
        self.assertFalse(self.inside(self.heap.empty((8,), torch.uint8)))
        self.assertIsNone(self.heap.export(nbytes))
        capturing[0] = True
        with on_stream(comm):
            self.assertIsNone(self.heap.try_capture(form))
        capturing[0] = False
        del whole
        story.clear()
        self.assertTrue(self.inside(self.heap.empty((9000,), torch.uint8)))
        capturing[0] = True
        with on_stream(comm):
            found = [self.heap.try_capture(form) for _ in range(2)]  # those of that stream, as before
        capturing[0] = False
        self.assertIn(place, [made[0].data_ptr() for made in found if made])
        self.assertEqual(story, [])
        self.assertIsNone(self.heap.export(nbytes + 1))

    def test_an_exception_passes(self) -> None:
        with self.assertRaises(ZeroDivisionError):
            print(self.heap.empty((100,), torch.uint8), 1 // 0)
        self.assertEqual(story, [])

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
        self.assertIsNone(values._base)
        scales = self.heap.empty((2, 8, 3), torch.float32, (24, 1, 8))
        self.assertEqual((scales.stride(), scales.shape), ((24, 1, 8), (2, 8, 3)))
        self.assertEqual(self.heap.empty((0, 7), torch.bfloat16).shape, (0, 7))

    def test_results_are_no_views(self) -> None:
        """Of any dtype, in the heap and not, also for fewer rows than there was memory for: nothing has a base, and
        storages give all of their memory back."""
        pool = mock.Mock(device=torch.device("cpu"), heap=self.heap)
        pool.group.info = mock.Mock(local_experts=2, max_recv_tokens=12)
        for dtype, scales in ((torch.bfloat16, None), (torch.float8_e4m3fn, (4, torch.float32, False)),
                              (torch.float8_e5m2, (4, torch.int32, True)), (torch.int32, None), (torch.int8, None),
                              (torch.uint8, (1, getattr(torch, "uint32", torch.int32), True))):
            kind = Kind(False, 32, dtype, 4, torch.int64, scales, True, True)
            plan = DispatchPlan(pool, kind, 8)
            for inside in (True, False):
                memories = plan._try_reserve(12, 12, True) if inside else plan._ordinary(12)
                by_column = scales is not None and scales[2]  # not queued early
                rows = 12 if by_column else 7
                with torch.inference_mode(dtype is torch.int8):
                    result = Result(kind, rows, memories) if by_column else plan.result(rows, rows, memories)
                made = [one for one in (result.x, result.scales, result.idx, result.weights, result.source_map)
                        if one is not None]
                self.assertEqual((result.x.shape, result.x.dtype, len(made)), ((rows, 32), dtype, 5 if scales else 4))
                if scales:
                    self.assertEqual((result.scales.dtype, result.scales.shape), (scales[1], (rows, scales[0])))
                self.assertTrue(all(one.is_contiguous() for one in made if one is not result.scales or not by_column))
                self.assertEqual([one._base for one in made], [None] * len(made))
                memories = result = None
                if not getattr(made[0].untyped_storage(), "resizable", bool)():
                    continue  # a torch whose storages deep_ep does not know
                taken = len(self.heap._pieces) - len(self.heap._free)
                for one in made:
                    one.untyped_storage().resize_(0)
                self.heap._collect()
                self.assertEqual((taken, len(self.heap._pieces) - len(self.heap._free)), (3 if inside else 0, 0))

    def test_results_use_memory_again(self) -> None:
        form = Form(((4, 8), torch.float8_e4m3fn, None), ((4, 2), torch.float32, (1, 4)))
        results = Results(lambda: form.ordinary(torch.device("cpu")), lambda: form.ordinary(torch.device("cpu")),
                          torch.device("cpu"))
        (rows, scales), first = results.take(0, False)
        self.assertEqual([(t.shape, t.dtype, t.stride()) for t in (rows, scales)],
                         [((4, 8), torch.float8_e4m3fn, (8, 1)), ((4, 2), torch.float32, (1, 4))])
        address = rows.data_ptr()
        for user in (lambda: scales[:, 1:], lambda: rows.view(torch.uint8),
                     lambda: rows.untyped_storage(), lambda: rows):
            kept = user()
            del rows, scales
            (other, _), second = results.take(0, False)
            self.assertNotEqual(other.data_ptr(), address)  # in use
            del kept
            del other, _
            (rows, scales), _set = results.take(0, False)
            while rows.data_ptr() != address:  # they take turns
                (rows, scales), _set = results.take(0, False)
            self.assertIs(_set, first)
        self.assertEqual(rows.is_leaf and not rows.requires_grad and rows._base is None, True)
        self.assertEqual(story, [])

    def test_results_on_two_streams(self) -> None:
        used: List[str] = []
        form = Form(((4, 8), torch.float32, None))

        def make() -> List[torch.Tensor]:
            return form.ordinary(torch.device("cpu"))

        results = Results(make, make, torch.device("cpu"))
        with mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: used.append(stream.name)):
            with on_stream(side):
                first = results.take(5, False)[0][0].data_ptr()
                self.assertEqual(results.take(5, False)[0][0].data_ptr(), first)
                kept = results.take(5, False)
            fresh = results.take(1, False)[0][0]
            self.assertNotEqual(fresh.data_ptr(), first)  # in use
            self.assertEqual((story, used), ([], []))
            del kept
            again = results.take(1, False)[0][0]
            self.assertEqual(again.data_ptr(), first)
            self.assertEqual((story, used), (["current waits for side"], ["current"]))
            with on_stream(side):
                self.assertNotIn(results.take(5, True)[0][0].data_ptr(), (first, fresh.data_ptr()))  # a graph's own
            del again, fresh
            with on_stream(comm):
                results.shed()
            self.assertEqual((story[1:], used[1:]), (["comm waits for current"] * 2, ["comm"] * 2))
            results.take(1, False)
            self.assertEqual(len(story), 3)

    def test_results_that_are_changed(self) -> None:
        """What is done to a result is not seen in the next one."""
        form = Form(((4, 8), torch.int32, None), ((6,), torch.int64, None))
        results = Results(lambda: form.ordinary(torch.device("cpu")), lambda: form.ordinary(torch.device("cpu")),
                          torch.device("cpu"))
        (rows, other), first = results.take(None, False)
        address = rows.data_ptr()
        rows.resize_(2, 2)
        rows.note = "mine"
        other.t_()
        del rows, other
        (rows, other), again = results.take(None, False)
        self.assertIs(again, first)
        self.assertEqual((rows.shape, rows.data_ptr(), hasattr(rows, "note")), ((4, 8), address, False))
        rows.resize_(100000)  # other memory
        moved = rows.data_ptr()
        del rows, other, again
        for _ in range(3):
            (rows, other), again = results.take(None, False)
            self.assertIsNot(again, first)
            self.assertNotEqual(rows.data_ptr(), moved)

    def test_results_make_room_in_a_full_heap(self) -> None:
        form = Form(((30000,), torch.uint8, None))
        results = Results(lambda: self.heap.try_make(form), lambda: form.ordinary(torch.device("cpu")),
                          torch.device("cpu"))
        self.heap.keepers.add(results)
        with on_stream(side):
            first, second = results.take(5, False), results.take(5, False)
        self.first = first[0][0].data_ptr()
        self.assertIsNone(results.take(1, False)[1])  # full, and all of it in use
        del first
        with mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None):
            other = self.heap.empty((28000,), torch.uint8)  # somewhat smaller: in its place
            self.assertEqual((other.data_ptr(), story), (self.first, ["current waits for side"]))
            del other
            other = self.heap.empty((34000,), torch.uint8)  # there is no room, and nobody waits for it
            self.assertFalse(self.inside(other))
            del second
            other = self.heap.empty((34000,), torch.uint8)
        self.assertTrue(self.inside(other))
        self.assertEqual(story, ["current waits for side"] * 2 + ["the host waits for current"])
        del results

    def test_results_that_are_shed_are_free(self) -> None:
        """Also where somebody compares their set with that of the next call."""
        form = Form(((1 << 16,), torch.uint8, None))
        results = Results(lambda: self.heap.try_make(form), lambda: form.ordinary(torch.device("cpu")),
                          torch.device("cpu"))
        tensors, pointed = results.take(1, False)
        assert pointed is not None
        results.shed()
        self.assertIsNone(self.heap.try_make(form))  # it is in use
        del tensors
        results.shed()
        self.assertIsNotNone(self.heap.try_make(form))
        again, found = results.take(1, False)
        self.assertTrue(again and found is not pointed)

    def test_results_that_are_dropped_wait(self) -> None:
        """Memory of kept results that another stream used last is given to nobody without a wait for that stream:
        neither where a result was resized, nor behind Ctrl-C at any line."""
        form = Form(((30000,), torch.uint8, None))

        def left_on_side() -> Tuple[CudaHeap, Results, int]:
            heap = CudaHeap(self.group, torch.device("cpu"))
            results = Results(lambda: heap.try_make(form), lambda: form.ordinary(torch.device("cpu")),
                              torch.device("cpu"))
            with on_stream(side):
                address = results.take(5, False)[0][0].data_ptr()
            story.clear()
            return heap, results, address

        with mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None):
            lines, interrupted = 0, True
            while interrupted:
                lines += 1
                heap, results, address = left_on_side()
                interrupted = interrupt(lines, lambda: results.take(1, False), _results)
                given = heap.reserve(form)
                self.assertTrue(given is None or given.address != address or "current waits for side" in story, lines)
                del given, results, heap
            self.assertGreater(lines, 15)
            two = Form(((30000,), torch.uint8, None)), Form(((4000,), torch.uint8, None))
            heap = CudaHeap(self.group, torch.device("cpu"))
            results = Results(lambda: [heap.empty(*one.parts[0]) for one in two], lambda: [], torch.device("cpu"))
            with on_stream(side):
                rows, other = results.take(5, False)[0]
                rows.untyped_storage().resize_(0)
                del rows, other
            story.clear()
            results.take(1, False)  # drops the set, and gets the memory of `rows`, which has a stream of its own
            self.assertEqual(story, ["current waits for side"] * 2)

    def test_results_beyond_what_is_kept(self) -> None:
        results = Results(lambda: [torch.empty(8)], lambda: [torch.zeros(1)], torch.device("cpu"))
        taken = [results.take(None, False) for _ in range(6)]
        self.assertEqual([one is None for _tensors, one in taken], [False] * 4 + [True] * 2)
        self.assertEqual(len({tensors[0].data_ptr() for tensors, _one in taken}), 6)
        none = Results(lambda: None, lambda: [torch.zeros(1)], torch.device("cpu"))
        self.assertEqual(none.take(None, False)[0][0].shape, (1,))

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


class Interrupted(unittest.TestCase):
    """A call that ends while its work is queued."""

    def test_a_dispatch_of_v1_keeps_what_its_work_uses(self) -> None:
        launch, request, engine = mock.MagicMock(), mock.MagicMock(worst=0, scales=None), mock.MagicMock(nranks=2)
        request.device = torch.device("cpu")
        with mock.patch.object(_high_throughput, "_received", side_effect=KeyboardInterrupt), \
                mock.patch.object(_high_throughput, "HighThroughputRouting") as routing, \
                mock.patch.object(_high_throughput, "fresh_plan", return_value=None), \
                self.assertRaises(KeyboardInterrupt):
            _high_throughput._dispatch(engine, mock.MagicMock(), lambda _group: launch, request, 1, 1, False)
        self.assertTrue(routing.return_value.handle.update.called)
        (used,), _options = launch.keep.call_args
        self.assertIn(request, used)
        self.assertIn(request.routing_indices.return_value, used)
        self.assertFalse(launch.finish.called)


class Guesses(unittest.TestCase):
    """Rows that dispatches are queued for before their number is known."""

    def test_a_guess_comes_down_to_the_last_row(self) -> None:
        guess = RowGuess()
        self.assertEqual(guess.rows(9999), 0)
        for high, low in ((1015, 1000), (40000, 1000), (1001, 1000)):
            guess.learn(high)
            for _ in range(150):
                guess.learn(low)
            self.assertEqual(guess.rows(9999, NONE), low)
        guess.learn(40000)
        guess.learn(1000)
        self.assertGreater(guess.rows(99999, NONE), 37000)

    def test_fewer_rows_to_spare_where_memory_is_missing(self) -> None:
        """And ordinary memory where there is none in the heap. Room is made there before, if that helps."""
        guess, asked = RowGuess(), []

        def try_reserve(rows: int, evict: bool) -> Any:
            asked.append((rows, evict))
            return "memory" if rows <= room else "made" if evict and rows <= evicted else None

        def reserve(limit: int) -> Any:
            return guess.reserve(limit, try_reserve, lambda rows: "ordinary")

        evicted = 0
        self.assertIsNone(reserve(99999))
        guess.learn(32000)
        levels = [guess.rows(99999, level) for level in range(NONE + 1)]
        self.assertTrue(33000 <= levels[0] < 33200 and 32250 <= levels[2] < 32400 and levels[NONE] == 32000)
        room = 32400
        self.assertEqual(reserve(99999), (levels[2], "memory"))
        self.assertEqual(asked, [(rows, False) for rows in levels[:3]])
        last = levels[NONE]
        for room, expected in ((32400, [levels[2]]), (32000, [levels[2], last]), (32000, [levels[3], last]),
                               (32000, [last])):
            asked.clear()
            reserve(99999)
            self.assertEqual(asked, [(rows, False) for rows in expected])
        for room, evicted, expected in ((31000, 0, (levels[0], "ordinary")), (31000, 32000, (last, "made"))):
            asked.clear()
            self.assertEqual(reserve(99999), expected)
            self.assertEqual(asked, [(last, False), (last, True)])
        room = 99999
        given = [reserve(99999) for _ in range(64)]
        self.assertEqual([one[0] for one in given if one], [last] * 1 + [levels[0]] * 63)
        asked.clear()
        self.assertEqual(reserve(32000), (32000, "memory"))
        room, evicted = 31000, 0
        for _ in range(8):  # the same number is tried once
            asked.clear()
            self.assertEqual(reserve(32000), (32000, "ordinary"))
            self.assertEqual(len(asked), 2)


    def test_torchs_memory_only_for_rows_that_are_much_alike(self) -> None:
        """Who holds a result keeps all of its memory: no more than about a quarter of that is for nothing."""
        def ordinary(rows: int) -> Any:
            if rows > room:
                raise torch.cuda.OutOfMemoryError
            return None if rows > 90000 else "ordinary"

        guess, room = RowGuess(), 99999
        reserve = lambda: guess.reserve(99999, lambda rows, evict: None, ordinary)  # noqa: E731
        rng = random.Random(1)
        for rows in [rng.randint(9000, 11000) for _ in range(64)]:
            guess.learn(rows)
            self.assertIsNotNone(reserve())
        for rows in [rng.choice((40000, 10000)) for _ in range(64)]:
            guess.learn(rows)
            given = reserve()
            self.assertIsNone(given and given[0] > 13000 and given)
        for _ in range(150):
            guess.learn(10000)
        self.assertEqual(reserve(), (10432, "ordinary"))
        room = 10200  # of torch: not for rows to spare
        self.assertIsNone(reserve())
        room = 99999
        for _ in range(64):
            guess.learn(89000)
        self.assertIsNone(reserve())  # more than the receive buffer holds


class ElasticMemory(Rules):
    """The heap of an ElasticBuffer on one node of GPUs."""

    def memory(self, ranks: int, tokens: int, hidden: int, topk: int, fp8: bool) -> Tuple[int, Dict[str, int]]:
        """(num_bytes by the hint, what the group is given)."""
        os.environ.pop("EPX_DEEP_EP_GPU_BYTES", None)
        given = _elastic_sizes.buffer_bytes((1, ranks), True, tokens, hidden, topk, fp8, True)
        return given, ElasticSettings(given, tokens, hidden, topk, 100, False).high_throughput_memory(
            torch.device("cuda", 0), given, ranks, 1,
            dict(max_hidden_bytes=2 * hidden, max_topk=topk, max_tokens_per_rank=tokens))

    @mock.patch.dict(os.environ)
    def test_the_largest_result_fits(self) -> None:
        for ranks, tokens, fp8 in ((8, 4096, False), (8, 4096, True), (64, 4096, True), (8, 128, False)):
            given, memory = self.memory(ranks, tokens, 7168, 8, fp8)
            row = 7168 + 4 * 56 if fp8 else 2 * 7168
            self.assertGreaterEqual(memory["alloc_bytes"], ranks * tokens * (row + 8 * 12) + (1 << 20))
            self.assertLess(sum(memory.values()), given + (56 << 20))

    @mock.patch.dict(os.environ)
    def test_all_of_a_group_fits(self) -> None:
        """num_bytes + 64 MiB: the whole heap, and eight handles, as after dispatches with expansion and without."""
        for ranks, tokens, hidden, topk, fp8 in (
                (8, 4096, 7168, 8, False), (8, 4096, 7168, 8, True), (1, 4096, 7168, 8, False),
                (2, 4096, 7168, 8, False), (4, 4096, 7168, 8, False), (16, 4096, 7168, 8, False),
                (16, 4096, 7168, 8, True), (64, 4096, 7168, 8, False), (72, 4096, 7168, 8, False),
                (8, 4096, 1024, 8, False), (8, 128, 7168, 8, False), (8, 128, 256, 4, False), (2, 64, 256, 8, False),
                (8, 8192, 7168, 8, False), (8, 4096, 7168, 2, False)):
            given, memory = self.memory(ranks, tokens, hidden, topk, fp8)
            whole = epx.memory(
                ranks, device=epx.Device.CPU, ranks_per_node=ranks, modes=epx.Mode.HIGH_THROUGHPUT,
                num_experts=4 * ranks, max_tokens_per_rank=tokens, max_hidden_bytes=2 * hidden, max_topk=topk,
                layouts=(1 << epx.Layout.FLAT) | (1 << epx.Layout.EXPERT_MAJOR), **memory)["heap_bytes"]
            handles = 8 * 7 * 4 * tokens * topk
            self.assertLess(whole + handles, given + (60 << 20))  # and what CUDA rounds up

    @mock.patch.dict(os.environ)
    def test_expanded_rows_of_random_routings_fit(self) -> None:
        """As many as there are tokens, and a few more or fewer: nearly all dispatches are queued early, all results
        are in the heap, and the host hardly ever waits for the GPU."""
        memory = self.memory(8, 4096, 7168, 8, False)[1]
        with mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="1"):
            group = epx.Group(num_experts=1, max_tokens_per_rank=1, max_hidden_bytes=16, modes=epx.Mode.LOW_LATENCY,
                              alloc_bytes=memory["alloc_bytes"])
        self.addCleanup(group.destroy)
        pool = mock.Mock(group=group, device=torch.device("cpu"), heap=CudaHeap(group, torch.device("cpu")))
        self.addCleanup(pool.heap.close)
        plan = DispatchPlan(pool, Kind(True, 7168, torch.bfloat16, 8, torch.int64, None, True, True), 8)
        rng, early, inside = random.Random(1), 0, 0
        for spread in (300, 0):
            for _ in range(400):
                rows = round(rng.gauss(32768, spread))
                guess = plan.guess(1 << 20)
                plan._guess.learn(rows)
                if guess is not None and guess[0] >= rows:
                    early += 1
                    result = plan.result(rows, rows, guess[1])
                else:
                    del guess
                    result = Result(plan._kind, rows, plan._reserve(rows, rows))
                inside += pool.heap.holds(result.x) and pool.heap.holds(result.source_map)
                guess = result = None
        self.assertEqual(inside, 800)
        self.assertGreater(early, 790)
        self.assertLess(len(story), 8, story)


if __name__ == "__main__":
    unittest.main()
