# SPDX-License-Identifier: Apache-2.0
"""deep_ep's rules for memory of a GPU's heap."""

import itertools
import os
import threading
import types
import unittest
from typing import Any, Callable, List
from unittest import mock

import epx
import torch
from deep_ep import _elastic_streams
from deep_ep._elastic_gather import Gathers, _Place, heap_bytes
from deep_ep._elastic_sizes import up
from deep_ep._engine import Pool
from deep_ep._memory import Form, Heap
from deep_ep._streams import CudaLaunch
from played_cuda import PlayedHeap, Stream, by_number, capturing, comm, now, on_stream, side, story


class Memory(PlayedHeap):
    def test_pieces_are_given_out_again_after_what_was_queued(self) -> None:
        kept = self.heap.empty((10000,), torch.float32)
        self.first = kept.data_ptr()
        view = kept[50:]
        del kept
        other = self.heap.empty((1000,), torch.float32)
        self.assertNotEqual(other.data_ptr(), self.first)  # the view still lives
        self.assertEqual(story, [])
        with on_stream(side):
            del view
        self.assertFalse(self.heap.holds(torch.empty(4)))
        again = self.heap.empty((2400, 4), torch.float32)
        self.assertEqual((again.data_ptr(), again.shape), (self.first, (2400, 4)))
        self.assertTrue(self.heap.holds(again[3:]))
        self.assertEqual(story, ["current waits for side"])

    def test_one_stream_waits_for_nothing(self) -> None:
        form = Form(((4, 8), torch.float8_e4m3fn, None), ((4,), torch.float32, None))
        rows, scales = self.heap.try_make(form)
        self.assertEqual([(t.shape, t.dtype) for t in (rows, scales)],
                         [((4, 8), torch.float8_e4m3fn), ((4,), torch.float32)])
        first, second = rows.data_ptr(), scales.data_ptr()
        for _ in range(3):
            del rows
            self.assertEqual(self.heap.empty((4, 8), torch.uint8).data_ptr(), first)  # the scales still live
            del scales
            rows, scales = self.heap.try_make(form)
            self.assertEqual((rows.data_ptr(), scales.data_ptr()), (first, second))
        self.assertEqual(story, [])

    def test_holes_become_one(self) -> None:
        """In whatever order tensors go, all of the memory is there again, behind the work of all of their streams."""
        for order in itertools.permutations(range(4)):
            made: List[Any] = []
            for stream in (now[0], side, comm, now[0]):
                with on_stream(stream):
                    made.append(self.heap.empty((15000,), torch.uint8))
            with on_stream(side):
                for which in order:
                    made[which] = None
            story.clear()
            self.assertTrue(self.heap.holds(self.heap.empty((65000,), torch.uint8)))
            self.assertEqual(sorted(story), ["current waits for comm", "current waits for side"])

    def test_small_tensors_leave_room_for_large_ones(self) -> None:
        """Handles keep tables of results that are gone, which were of another size."""
        tables: List[torch.Tensor] = []
        for i in range(8):
            rows, table = self.heap.empty((20000 + 100 * i,), torch.uint8), self.heap.empty((500,), torch.uint8)
            self.assertTrue(self.heap.holds(rows) and self.heap.holds(table))
            tables.append(table)
            del rows
        self.assertTrue(self.heap.holds(self.heap.empty((60000,), torch.uint8)))

    def test_a_full_heap(self) -> None:
        """No call waits for room; what has none is counted."""
        first = self.heap.empty((40000,), torch.uint8)
        plain = self.heap.empty((40000,), torch.uint8)
        self.assertEqual([self.heap.holds(one) for one in (first, plain)], [True, False])
        self.assertEqual(self.heap.native.counts(), (1, 1, 40192))
        del first
        self.assertTrue(self.heap.holds(self.heap.empty((50000,), torch.uint8)))
        self.assertEqual(story, [])

    def test_many_streams(self) -> None:
        """Of more than 63 the heap keeps no record: the host waits for the last of them."""
        many = [Stream("number %d" % i, 1000 + i) for i in range(70)]
        with mock.patch.dict(by_number, {stream.cuda_stream: stream for stream in many}):
            kept = []
            for stream in many:
                with on_stream(stream):
                    kept.append(self.heap.empty((100,), torch.uint8))
            for stream, _tensor in zip(many, list(kept)):
                with on_stream(stream):
                    kept.pop(0)
            del _tensor
            story.clear()
            self.assertTrue(self.heap.holds(self.heap.empty((65000,), torch.uint8)))
        self.assertEqual(len([line for line in story if line.startswith("current waits for number")]), 63)
        self.assertEqual(story.count("the host waits"), 1)

    def test_memory_of_graphs(self) -> None:
        """Captures of a stream share it; no other call has it; what they take anew was never used."""
        form = Form(((3000,), torch.uint8, None))
        self.heap.prepare_graphs(form)
        used = self.heap.empty((9000,), torch.uint8)
        del used

        def captured(stream: Stream) -> Any:
            capturing[0] = True
            try:
                with on_stream(stream):
                    made = self.heap.try_capture(form)
            finally:
                capturing[0] = False
            return made[0] if made else None
        first = captured(comm)
        second = captured(comm)
        places = {first.data_ptr(), second.data_ptr()}
        self.assertEqual(len(places), 2)
        del first, second
        eager = [self.heap.empty((3000,), torch.uint8) for _ in range(30)]
        self.assertFalse(places & {one.data_ptr() for one in eager})
        self.assertIn(captured(comm).data_ptr(), places)
        self.assertIsNone(captured(side))  # all the rest has been used
        self.assertEqual(story, [])

    def test_memory_that_is_taken_from_its_tensor(self) -> None:
        """It is given out again behind the work of the streams that used it; the tensor returns nothing when it
        goes."""
        with on_stream(side):
            old = self.heap.empty((40000,), torch.uint8)
        self.assertIsNone(self.heap.export(40000))
        self.heap.revoke(old.data_ptr())
        self.heap.revoke(old.data_ptr())
        new = self.heap.export(40000)
        assert new is not None
        self.assertEqual((new.data_ptr(), story), (old.data_ptr(), ["current waits for side"]))
        del old
        self.assertIsNone(self.heap.export(40000))
        self.heap.close()
        self.group.destroy()
        new.fill_(3)
        self.assertTrue(self.group.alive)
        del new
        self.assertFalse(self.group.alive)

    def test_tensors_that_other_threads_drop(self) -> None:
        """At the same time, with calls that make others."""
        def work(stream: Stream) -> None:
            for i in range(2000):
                kept = [self.heap.empty((100 + i % 900,), torch.uint8) for _ in range(3)]
                kept.pop(i % 3)
                del kept
        threads = [threading.Thread(target=work, args=(stream,)) for stream in (comm, side, comm)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(self.heap.native.counts()[2], 0)
        self.assertTrue(self.heap.holds(self.heap.empty((65000,), torch.uint8)))

    def test_what_is_no_part(self) -> None:
        """Wrong arguments are exceptions."""
        part = (torch.uint8, (4,), None)
        for parts in (None, 5, [part], (part,) * 9, (None,), ((torch.uint8,),), ((torch.complex64, (4,), None),),
                      ((torch.uint8, [4], None),), ((torch.uint8, (-4,), None),), ((torch.uint8, (1,) * 5, None),),
                      ((torch.uint8, (4,), (1.5,)),)):
            with self.assertRaises((TypeError, ValueError, OverflowError), msg=repr(parts)):
                self.heap.native.tensors(0, False, parts)
        for shape in ((0,), (1 << 62, 1 << 62), ((1 << 63) - 1,)):
            self.assertEqual(self.heap.native.tensors(0, False, ((torch.uint8, shape, None),)), [None])
        for address in (0, 1, (1 << 64) - 1):
            self.heap.revoke(address)
            self.assertFalse(self.heap.native.holds(address))

    def test_a_stream_waits_for_the_one_that_had_the_piece(self) -> None:
        with on_stream(side):
            self.first = self.heap.empty((15000,), torch.float32).data_ptr()
        with on_stream(comm):
            self.assertEqual(self.heap.empty((15000,), torch.float32).data_ptr(), self.first)
        self.assertEqual(self.heap.empty((15000,), torch.float32).data_ptr(), self.first)
        with on_stream(side):
            self.assertEqual(self.heap.empty((15000,), torch.float32).data_ptr(), self.first)
        for line in ("comm waits for side", "current waits for comm", "side waits for current"):
            self.assertIn(line, story)

    def test_a_piece_that_is_dropped_on_a_stream_that_never_used_it(self) -> None:
        """As by the garbage collector. Work of the stream that did may not have run."""
        for later, waits in ((comm, ["comm waits for side"]), (side, ["side waits for comm"])):
            heap = self.another()
            with on_stream(side):
                piece = heap.empty((15000,), torch.float32)
            place = piece.data_ptr()
            with on_stream(comm):
                del piece
            story.clear()
            with on_stream(later):
                self.assertEqual(heap.empty((15000,), torch.float32).data_ptr(), place)
                self.assertEqual(heap.empty((15000,), torch.float32).data_ptr(), place)
            self.assertEqual(story, waits)

    def test_pieces_that_calls_of_another_buffer_use(self) -> None:
        """Asynchronous ones, on a communication stream that nobody has waited for when their tensor is dropped. torch
        does not know of that memory, and the operations of two buffers are in no order."""
        form = Form(((5000,), torch.float32, None), ((7000,), torch.uint8, None))
        use: List[Callable[[torch.Tensor], Any]] = [
            lambda x: CudaLaunch(comm, None, True).finish([None, x], []),
            lambda x: (now.insert(0, comm), CudaLaunch(side, None, False).join([x]), now.pop(0)),
        ]
        with mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None):
            for which, user in itertools.product((0, 1), use):
                heap = self.another()
                with on_stream(side):
                    first, kept, other = heap.try_make(form), heap.try_make(form), self.another()
                    assert first is not None and kept is not None
                    place = first[0].data_ptr()
                    self.assertNotEqual(kept[0].data_ptr(), place)
                    user(first[which][20:])
                    user(torch.ones(3))  # of torch's
                    del first
                    story.clear()
                    again = heap.try_make(form)
                    assert again is not None
                    self.assertEqual((again[0].data_ptr(), story), (place, ["side waits for comm"]))
                    story.clear()
                    del again, kept
                    self.assertEqual(len([heap.try_make(form) for _ in range(2)]), 2)
                    self.assertEqual(len([heap.try_make(form) for _ in range(2)]), 2)
                    self.assertLessEqual(len(story), 1)  # of a hole that has grown
                    other.close()

    def test_results_that_a_third_stream_drops(self) -> None:
        """As the garbage collector does, while the stream of the call still reads them."""
        with on_stream(side):
            launch = CudaLaunch(comm, None, True)
            with launch.context():
                result = self.heap.empty((15000,), torch.float32)
            place = result.data_ptr()
            with mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None):
                launch.finish([], [result])
        del result
        story.clear()
        with on_stream(comm):
            self.assertEqual(self.heap.empty((15000,), torch.float32).data_ptr(), place)
        self.assertEqual(sorted(story), ["comm waits for current", "comm waits for side"])

    def test_calls_that_are_captured_use_no_piece_now(self) -> None:
        """Nobody could wait for a stream that is captured."""
        piece = self.heap.empty((100,), torch.float32)
        self.addCleanup(capturing.__setitem__, 0, False)
        with mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None):
            capturing[0] = True
            CudaLaunch(comm, None, True).finish([piece], [])
            capturing[0] = False
        del piece
        story.clear()
        self.heap.empty((100,), torch.float32)
        self.assertEqual(story, [])

    def test_interrupted_while_a_piece_is_taken(self) -> None:
        """The stream that was to wait for its work did not: the next one does."""
        with on_stream(side):
            self.first = self.heap.empty((40000,), torch.uint8).data_ptr()
        with mock.patch.object(Stream, "wait_stream", side_effect=KeyboardInterrupt):
            with self.assertRaises(KeyboardInterrupt):
                self.heap.empty((40000,), torch.uint8)
        again = self.heap.empty((40000,), torch.uint8)
        self.assertEqual((again.data_ptr(), story), (self.first, ["current waits for side"]))

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
            piece = self.heap.empty((60000,), torch.uint8)
        self.first = piece.data_ptr()
        capturing[0] = True
        try:
            with on_stream(comm):
                del piece
        finally:
            capturing[0] = False
        self.assertEqual(self.heap.empty((60000,), torch.uint8).data_ptr(), self.first)
        self.assertEqual(story, ["current waits for side"])

    def test_two_sessions_of_all_gathers_have_room(self) -> None:
        """Full ones of the same sizes, one of them held while the next one runs."""
        cpu, mib = torch.device("cpu"), 1 << 20
        odd = (33 * mib + 5, 1000003, 7)
        for ranks, sizes in ((4, [75 * mib]), (1, [256 * mib + 16]), (8, [odd[i % 3] for i in range(9)]),
                             (3, [40001] * 900 + [3] * 900), (72, [5 * mib + 1, 1, 70000])):
            session = sum(up(ranks * size) for size in sizes)
            with mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="1"):
                group = epx.Group(num_experts=1, max_tokens_per_rank=1, max_hidden_bytes=16, modes=epx.Mode.LOW_LATENCY,
                                  alloc_bytes=heap_bytes(session))
            heap, held, order = Heap(group, cpu), [], list(sizes)
            for _ in range(5):
                made = [_Place(cpu, ranks, (size,), torch.uint8) for size in order]
                self.assertTrue(all(place.take(heap) for place in made))
                held, order = made, order[1:] + order[:1]
                del made
            self.assertTrue(all(heap.holds(place.flat) for place in held))
            del held[:]
            group.destroy()

    def test_a_session_that_another_stream_ends(self) -> None:
        """What it gathered is used again behind its all-gathers, which the stream that ends it waits for: on a third
        stream, too, whether its tensors are dropped there or lose their memory."""
        cpu, third = torch.device("cpu"), Stream("third", 9)
        gathers = Gathers.__new__(Gathers)
        gathers._heap, gathers._device = self.heap, types.SimpleNamespace(type="cuda", index=0)  # type: ignore
        gathers._mover = mock.Mock(capturing=lambda: False)
        gathers._session, gathers._pending, gathers._captured = None, [], []
        with mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None), \
                mock.patch.dict(by_number, {9: third}), \
                mock.patch.dict(_elastic_streams._comm_streams, {0: comm}):  # type: ignore[dict-item]
            for revoked in (False, True):
                place, gathers._ended = _Place(cpu, 1, (40000,), torch.uint8), []
                with on_stream(side):
                    self.assertTrue(place.take(self.heap))
                kept = [place.flat]
                gathers._made, gathers._given = [place], []
                gathers._session = object()
                gathers.end()
                del place
                story.clear()
                with on_stream(third):
                    if revoked:
                        self.assertTrue(gathers._revoke([]))
                    else:
                        kept.clear()
                    self.assertTrue(self.heap.holds(self.heap.empty((40000,), torch.uint8)))
                self.assertEqual(sorted(story), ["third waits for current", "third waits for side"])

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

    def test_handles_of_graphs_stay_apart(self) -> None:
        pool = Pool(self.another_group(), torch.device("cpu"), 1, 1, 16)
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
