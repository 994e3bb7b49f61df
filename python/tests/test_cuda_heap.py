# SPDX-License-Identifier: Apache-2.0
"""deep_ep's rules for memory of a GPU's heap."""

import itertools
import os
import sys
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
from deep_ep._memory import CudaHeap, Form
from deep_ep._streams import CudaLaunch
from played_cuda import PlayedHeap, Stream, by_number, capturing, comm, interrupt, now, on_stream, side, story


class Heap(PlayedHeap):
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

    def test_a_piece_that_is_dropped_on_a_stream_that_never_used_it(self) -> None:
        """As by the garbage collector. Work of the stream that did may not have run."""
        for later, waits in ((comm, ["comm waits for side"]), (side, ["side waits for comm"])):
            heap = CudaHeap(self.group, torch.device("cpu"))
            with on_stream(side):
                piece = heap.empty((100,), torch.float32)
            place = piece.data_ptr()
            with on_stream(comm):
                del piece
            story.clear()
            with on_stream(later):
                self.assertEqual(heap.empty((100,), torch.float32).data_ptr(), place)
                self.assertEqual(heap.empty((100,), torch.float32).data_ptr(), place)
            self.assertEqual(story, waits)

    def test_pieces_that_calls_of_another_buffer_use(self) -> None:
        """Asynchronous ones, on a communication stream that nobody has waited for when their tensor is dropped. torch
        does not know of that memory, and the operations of two buffers are in no order."""
        form = Form(((100,), torch.float32, None), ((700,), torch.uint8, None))
        use: List[Callable[[torch.Tensor], Any]] = [
            lambda x: CudaLaunch(comm, None, True).finish([None, x], []),
            lambda x: (now.insert(0, comm), CudaLaunch(side, None, False).join([x]), now.pop(0)),
        ]
        with mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None):
            for which, user in itertools.product((0, 1), use):
                heap = CudaHeap(self.group, torch.device("cpu"))
                with on_stream(side):
                    first, kept, other = heap.try_make(form), heap.try_make(form), CudaHeap(self.group, heap._device)
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
                    self.assertEqual(story, [])
                    other.close()

    def test_results_that_a_third_stream_drops(self) -> None:
        """As the garbage collector does, while the stream of the call still reads them."""
        with on_stream(side):
            launch = CudaLaunch(comm, None, True)
            with launch.context():
                result = self.heap.empty((100,), torch.float32)
            place = result.data_ptr()
            with mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None):
                launch.finish([], [result])
        del result
        story.clear()
        with on_stream(comm):
            self.assertEqual(self.heap.empty((100,), torch.float32).data_ptr(), place)
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

    def test_full_heap(self) -> None:
        first = self.heap.empty((40000,), torch.uint8)
        self.first = first.data_ptr()
        plain = self.heap.empty((40000,), torch.uint8)
        self.assertFalse(self.inside(plain))
        del first
        larger = self.heap.empty((50000,), torch.uint8)  # another size: what is free is given back first
        self.assertTrue(self.inside(larger))
        self.assertEqual(story, ["the host waits for current"])

    def test_tables_leave_room_for_results_of_any_size(self) -> None:
        """Handles keep tables of results that are gone, which were of another size."""
        tables: List[torch.Tensor] = []
        for i in range(8):
            rows, table = self.heap.empty((20000 + 100 * i,), torch.uint8), self.heap.empty((500,), torch.uint8)
            self.assertTrue(self.heap.holds(rows) and self.heap.holds(table))
            tables.append(table)
            del rows
        self.assertTrue(self.heap.holds(self.heap.empty((60000,), torch.uint8)))

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
        self.assertEqual(sorted(line for line in story if "host" in line), [
            "the host waits for %s" % name for name in ("comm", "current", "side")])

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

    def test_the_whole_heap_with_small_holes_is_exported(self) -> None:
        """Nothing else is made there meanwhile."""
        first = self.heap.empty((2048,), torch.uint8)
        self.heap.prepare_graphs(Form(((4096,), torch.uint8, None)))
        second = self.heap.empty((30000,), torch.uint8)
        del first, second
        large, other = self.heap.empty((50000,), torch.uint8), self.heap.empty((1536,), torch.uint8)
        self.first = other.data_ptr()  # where the first one was: a hole of 512 bytes is left of it
        del large, other
        whole = self.heap.export(self.group.alloc_bytes)
        assert whole is not None
        self.assertEqual(whole.data_ptr(), self.first)
        for nbytes in (8, 500, 2000, 5000):
            self.assertFalse(self.inside(self.heap.empty((nbytes,), torch.uint8)))
        del whole
        self.assertTrue(self.inside(self.heap.empty((50000,), torch.uint8)))

    def test_the_whole_heap_that_calls_use(self) -> None:
        """On a communication stream, which nobody waits for. It begins with memory of graphs, which has no stream."""
        self.heap.prepare_graphs(Form(((3000,), torch.uint8, None)))
        whole = self.heap.export(self.group.alloc_bytes)
        assert whole is not None
        self.first = whole.data_ptr()
        self.heap.use_on(comm.cuda_stream, [self.first])
        del whole
        self.assertTrue(self.inside(self.heap.empty((9000,), torch.uint8)))
        self.assertEqual(story, ["current waits for comm"])

    def test_memory_behind_scratch(self) -> None:
        """Captures find room there, whether the scratch was a part of the heap or all of it, and whether a free piece
        was there before. Other calls wait for the stream on which it was released."""
        whole = self.group.alloc_bytes
        for nbytes, free, of_graphs in ((whole, 0, True), (whole, 0, False), (40000, 0, False), (whole, 40000, True)):
            heap, form = CudaHeap(self.group, torch.device("cpu")), Form(((30000,), torch.uint8, None))
            heap.empty((free,), torch.uint8)
            if of_graphs:
                heap.prepare_graphs(Form(((3000,), torch.uint8, None)))
            scratch = heap.export(nbytes)
            assert scratch is not None
            self.assertIsNone(heap.export(300))  # one at a time
            with on_stream(side):
                del scratch
            capturing[0] = True
            with on_stream(comm):
                captured = heap.try_capture(form)
            capturing[0] = False
            self.assertTrue(captured)
            self.assertEqual(story, [])
            self.assertTrue(heap.holds(heap.empty((20000,), torch.uint8)))
            self.assertEqual(story, ["current waits for side"])
            self.assertTrue(heap.holds(heap.empty((20000,), torch.uint8)))
            self.assertEqual(len(story), 1)
            story.clear()
            del captured

    def test_memory_behind_scratch_of_two_streams(self) -> None:
        """What is left of the first waits for the stream of the first, too."""
        first = self.heap.export(20000)
        kept = self.heap.empty((2000,), torch.uint8)
        with on_stream(side):
            place = first.data_ptr() if first is not None else 0
            del first
        second = self.heap.export(30000)
        self.assertTrue(second is not None and second.data_ptr() > kept.data_ptr() > place)
        with on_stream(comm):
            del second
        story.clear()
        with on_stream(comm):
            self.assertEqual(self.heap.empty((20000,), torch.uint8).data_ptr(), place)
        self.assertIn("comm waits for side", story)
        self.assertEqual(self.heap.empty((20000,), torch.uint8).data_ptr(), place)
        self.assertEqual(story[-1], "current waits for comm")

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
            heap, held, order = CudaHeap(group, cpu), [], list(sizes)
            for _ in range(5):
                made = [_Place(cpu, ranks, (size,), torch.uint8) for size in order]
                self.assertTrue(all(place.take(heap) for place in made))
                held, order = made, order[1:] + order[:1]
                del made
            self.assertTrue(all(heap.holds(place.flat) for place in held))
            del held[:]
            group.destroy()

    def test_memory_that_is_taken_from_its_tensors(self) -> None:
        """It is given out again behind the work of the streams that used it; the tensors stay as long as somebody
        refers to them, and return nothing when they go."""
        form = Form(((40000,), torch.uint8, None))
        with on_stream(side):
            (old,), memory = self.heap.make_revocable(form)
        self.assertEqual(memory.address, old.data_ptr())
        self.assertGreaterEqual(memory.nbytes, 40000)
        self.assertIsNone(self.heap.make_revocable(form))
        memory.revoke()
        memory.revoke()
        (new,), other = self.heap.make_revocable(form)
        self.assertEqual((new.data_ptr(), story), (old.data_ptr(), ["current waits for side"]))
        del old, memory
        self.assertIsNone(self.heap.make_revocable(form))
        other.revoke()
        larger = self.heap.empty((60000,), torch.uint8)  # needs the memory of the piece, which is freed for it
        self.assertEqual(larger.data_ptr(), new.data_ptr())
        self.heap.close()
        self.group.destroy()
        del larger
        new.fill_(3)
        self.assertTrue(self.group.alive)
        del new, other
        self.assertFalse(self.group.alive)

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
