# SPDX-License-Identifier: Apache-2.0
"""deep_ep's rules for results whose memory is used again."""

import unittest
from typing import List, Tuple
from unittest import mock

import torch
from deep_ep import _results
from deep_ep._elastic_plan import DispatchPlan, Kind, Result
from deep_ep._memory import Form, Heap, kept_sets
from deep_ep._results import Results
from deep_ep._streams import CudaLaunch
from played_cuda import PlayedHeap, capturing, comm, interrupt, on_stream, side, story


class KeptResults(PlayedHeap):
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
                memories = plan._try_reserve(12, 12) if inside else plan._ordinary(12)
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
                taken = self.heap.native.counts()[2]
                for one in made:
                    one.untyped_storage().resize_(0)
                self.assertEqual((taken > 0, self.heap.native.counts()[2]), (inside, 0))

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

    def test_results_that_asynchronous_calls_use(self) -> None:
        """Those of another buffer say, which torch is told of. But torch has that memory no more than the caller has:
        the next call waits for them."""
        form = Form(((4, 8), torch.float32, None), ((6,), torch.int32, None))
        results = Results(lambda: form.ordinary(torch.device("cpu")), lambda: form.ordinary(torch.device("cpu")),
                          torch.device("cpu"))
        self.addCleanup(capturing.__setitem__, 0, False)
        with mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None), on_stream(side):
            for which in (0, 1):
                made, kept = results.take(5, False)
                place = made[0].data_ptr()
                CudaLaunch(comm, None, True).finish([made[which][2:]], [])
                CudaLaunch(side, None, True).finish([made[0]], [])
                del made
                story.clear()
                made, again = results.take(5, False)
                self.assertEqual((made[0].data_ptr(), again, story), (place, kept, ["side waits for comm"]))
                CudaLaunch(comm, None, True).finish([], [made[0]])  # its own: the next call waits for its caller
                capturing[0] = True
                CudaLaunch(comm, None, True).finish([made[0]], [])
                capturing[0] = False
                del made
                story.clear()
                self.assertEqual((results.take(5, False)[1], story), (kept, []))
            made, kept = results.take(5, False)
            CudaLaunch(comm, None, True).finish(made, [])
            del made
            story.clear()
            count = len(kept_sets)
            results.shed()
            self.assertEqual((story, count - len(kept_sets)), (["side waits for comm"], 2))

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
            self.assertEqual((other.data_ptr(), set(story)), (self.first, {"current waits for side"}))
            del other
            story.clear()
            other = self.heap.empty((34000,), torch.uint8)  # there is no room, and nobody waits for it
            self.assertFalse(self.inside(other))
            del second
            other = self.heap.empty((34000,), torch.uint8)
        self.assertTrue(self.inside(other))
        self.assertEqual(set(story), {"current waits for side"})
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

        def left_on_side() -> Tuple[Heap, Results, int]:
            heap = self.another()
            results = Results(lambda: heap.try_make(form), lambda: form.ordinary(torch.device("cpu")),
                              torch.device("cpu"))
            with on_stream(side):
                address = results.take(5, False)[0][0].data_ptr()
            story.clear()
            return heap, results, address

        with mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None):
            for call in (lambda: results.take(1, False), lambda: results.shed()):
                lines, interrupted = 0, True
                while interrupted:
                    lines += 1
                    heap, results, address = left_on_side()
                    interrupted = interrupt(lines, call, _results)
                    given = heap.try_make(form)
                    self.assertTrue(
                        given is None or given[0].data_ptr() != address or "current waits for side" in story, lines)
                    del given, results, heap
                self.assertGreater(lines, 15)
            two = Form(((30000,), torch.uint8, None)), Form(((4000,), torch.uint8, None))
            heap = self.another()
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


if __name__ == "__main__":
    unittest.main()
