# SPDX-License-Identifier: Apache-2.0
"""deep_ep's rules for the streams of its calls."""

import copy
import itertools
import os
import pickle
import types
import unittest
from typing import Any, Callable, List
from unittest import mock

import deep_ep
import epx
import torch
from deep_ep import (_elastic_dispatch, _elastic_engram, _elastic_move, _elastic_pipeline, _elastic_streams,
                     _high_throughput, _hybrid_handle)
from deep_ep._elastic_engine import ElasticRouting
from deep_ep._elastic_gather import Gathers, _Place
from deep_ep._elastic_move import Barriers, Mover
from deep_ep._elastic_pipeline import Sizes, _Channel
from deep_ep._low_latency import LowLatencyRouting
from deep_ep._streams import CudaLaunch, Origin
from deep_ep.buffers import engram
from deep_ep.utils import EventHandle
from played_cuda import (Event, Played, Stream, Tensor, capturing, comm, default, now, on_stream, passed, side,
                         story)


class Streams(Played):
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

    def test_fields_of_a_handle_are_read_on_another_stream(self) -> None:
        """What they are computed from may be torch's memory, which is let go with the handle."""
        for launch in (CudaLaunch(comm, None, True), None):  # type: ignore[arg-type]
            self.read_fields(launch)

    def read_fields(self, launch: Any) -> None:
        """Of a handle whose dispatch ran on the stream `comm`."""
        names = ("in_rank", "counts", "sources")
        used: Any = {name: Tensor(name) for name in names}
        pool = mock.Mock(capturing=lambda: capturing[0], device=torch.device("cuda", 0), on_cpu=False,
                         stream=lambda: now[0].cuda_stream)
        handle = _high_throughput.make_handle(
            mock.Mock(nnodes=1), mock.Mock(in_graph=False, pool=pool), launch, used["in_rank"], used["counts"],
            used["sources"], False, 1, comm.cuda_stream)
        self.addCleanup(capturing.__setitem__, 0, False)
        story.clear()
        fields = (Tensor("field"),) * 6
        with mock.patch.object(_high_throughput, "_handle_fields", return_value=fields) as made:
            capturing[0] = True  # it has waited for all, and fields that it makes are complete in its replays alone
            self.assertEqual((tuple(handle), story), (fields, []))
            capturing[0] = False
            with on_stream(side):
                self.assertEqual((tuple(handle), handle[2]), (fields, fields[2]))
            self.assertEqual(story, ["side waits for comm"] + ["%s is used on side" % name for name in names])
            story.clear()
            self.assertEqual(handle[3], fields[3])  # they are made on the stream that reads one first
            self.assertEqual(story, ["current waits for event of side"] + ["field is used on current"] * 6)
            self.assertEqual(made.call_count, 2)

    def test_handles_of_hybrid_on_another_stream(self) -> None:
        """Their fields are computed where they are read, and combine looks at the routing."""
        names = ("topk_idx", "recv_topk_idx", "recv_src_metadata", "psum_num_recv_tokens_per_scaleup_rank",
                 "psum_num_recv_tokens_per_expert", "num_unaligned_recv_tokens_per_expert")
        used: Any = {name: Tensor(name) for name in names}
        elastic: Any = types.SimpleNamespace(**used)
        counts: Any = Tensor("tokens_per_expert")
        for captured, permuted in itertools.product((False, True), repeat=2):
            capturing[0] = captured
            with on_stream(comm):
                routing = _hybrid_handle.Routing(
                    elastic, used["topk_idx"], 4, 9, Origin(torch.device("cuda", 0)), counts if permuted else None,
                    used["recv_topk_idx"])
            capturing[0] = False
            handle = _hybrid_handle.make_handle(routing)
            waits = [] if captured else ["side waits for event of comm"]  # an event of a capture is none outside of it
            for call in (lambda: handle[3], lambda: _hybrid_handle.routing_of(handle, permuted)):
                with mock.patch.object(_hybrid_handle, "_fields", return_value=(None,) * 8):
                    story.clear()
                    with on_stream(comm):
                        call()
                    self.assertEqual(story, [])
                    with on_stream(side):
                        call()
                joined = ["tokens_per_expert", *names] if permuted else names
                self.assertEqual(story, waits + ["%s is used on side" % name for name in joined])
        plain = pickle.loads(pickle.dumps(Origin(torch.device("cuda", 0))))  # with tensors that have no stream
        story.clear()
        plain.join([used["topk_idx"]])
        self.assertEqual((story, copy.deepcopy(routing.origin)), ([], routing.origin))

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

    def test_barriers_of_both_buffers(self) -> None:
        """ElasticBuffer's is on the communication stream, unless told otherwise; EPBuffer's on the current one."""
        update = mock.Mock(side_effect=lambda _nothing, stream: story.append("barrier on %s" % stream.name))
        barriers = Barriers.__new__(Barriers)
        captured: List[Any] = []  # streams of a capture
        mover = mock.Mock(capturing=lambda: now[0] in captured)
        barriers._mover = lambda device: (mover, mock.Mock(update=update), None)  # type: ignore[assignment]
        elastic, ep = (kind.__new__(kind) for kind in (deep_ep.ElasticBuffer, deep_ep.EPBuffer))
        for buffer in (elastic, ep):
            buffer._engine, buffer._barriers = mock.Mock(closed=False), barriers
            buffer.rank_idx, buffer.runtime = 1, None
        forked, alone = ["comm waits for current", "barrier on comm", "current waits for comm"], ["barrier on current"]
        for call, streams, expected in (
                (lambda: elastic.barrier(), [], forked), (lambda: elastic.barrier(), [default], forked),
                (lambda: elastic.barrier(use_comm_stream=False), [], alone),
                (lambda: ep.barrier(), [], ["current waits for comm", *alone, "comm waits for current"]),
                (lambda: ep.barrier(), [default], alone),
                (lambda: ep.barrier(), [default, comm], ["current waits for comm", *alone]),
                (lambda: ep.barrier(wait_comm_stream=False), [], alone)):
            story.clear()
            captured[:] = streams
            with mock.patch.object(_elastic_move, "comm_stream", lambda device=None: comm), \
                    mock.patch.object(_elastic_move, "default_device", lambda: torch.device("cuda", 0)):
                call()
            self.assertEqual(story, expected)

    def test_receives_of_the_ring_on_two_streams(self) -> None:
        """All of them pass through the same rows, which EPX writes and torch copies."""
        channel = _Channel.__new__(_Channel)
        channel._device = torch.device("cpu")
        channel._recv_rows, channel._idx, channel._whole = torch.zeros(2, 2, 1024), torch.zeros(2, 1), torch.ones(2, 1)
        channel.mover = mock.Mock(capturing=lambda: capturing[0])
        handle = mock.Mock(dispatch=lambda *_, stream, **__: story.append("%s receives" % stream.name))
        channel._handles, channel.sizes, channel._info, channel._copied = [handle], mock.Mock(), mock.Mock(), Event()
        self.addCleanup(capturing.__setitem__, 0, False)
        with mock.patch.object(_elastic_pipeline, "current_stream", lambda device: now[0]):
            with on_stream(comm):
                channel.recv(torch.empty(8))
            with on_stream(side):
                channel.recv(torch.empty(8))
                self.assertEqual(story[-3:], ["comm receives", "side waits for event of comm", "side receives"])
                capturing[0] = True  # an event of a capture is none outside of it
                channel.recv(torch.empty(8))
                capturing[0] = False
            self.assertEqual(story[-1], "side receives")
            channel.recv(torch.empty(8))
        self.assertEqual(story[-3:], ["side receives", "current waits for event of side", "current receives"])

    def test_fetched_rows_on_another_stream(self) -> None:
        """The function that engram_fetch() returns completes them for the stream where it is called."""
        rows, scales = mock.Mock(), mock.Mock()
        rows.record_stream, scales.record_stream = Tensor("rows").record_stream, Tensor("scales").record_stream
        rows.data_ptr.return_value = scales.data_ptr.return_value = 0
        for second in (scales, None):
            story.clear()
            with on_stream(comm):
                result = _elastic_engram.on_any_stream(rows, second)
                self.assertEqual((result(), story), ((rows, second), []))
            with on_stream(side):
                self.assertEqual(result(), (rows, second))
                capturing[0] = True
                result()
                capturing[0] = False
            self.assertEqual(story, ["side waits for event of comm", "rows is used on side"] + (
                ["scales is used on side"] if second else []))
        result = _elastic_engram.on_any_stream(torch.ones(2), None)
        self.assertEqual(result()[0].tolist(), [1, 1])

    def test_scales_of_engram_buffers_are_complete(self) -> None:
        """A fetch on another stream than write() reads them: the table and they are complete behind write()."""
        buffer = deep_ep.EngramBuffer.__new__(deep_ep.EngramBuffer)
        buffer._engine, buffer.num_ranks, buffer.runtime = mock.Mock(closed=False), 1, None
        buffer._layers = engram._Layers([2], 32, 1, 1, torch.float8_e4m3fn, 1)
        rows, scales = torch.zeros(2, 32, dtype=torch.uint8).view(torch.float8_e4m3fn), torch.ones(2, 1)
        with mock.patch.object(torch.Tensor, "clone", lambda one: story.append("copied") or one), \
                mock.patch.object(buffer, "_set_part", lambda name, make: story.append("the host waits")):
            buffer.write([rows], [scales])
        self.assertEqual((story, buffer._scales), (["copied", "the host waits"], [scales]))

    def test_slots_of_a_handle_are_made_where_they_are_read(self) -> None:
        """Kept, they would not be complete for another stream, and those of a capture are in its graph's memory."""
        idx, other = torch.zeros(3, 2, dtype=torch.int64), torch.ones(1)
        handle = deep_ep.EPHandle(False, 1, 1, 1, 0, idx, 0, 0, [], other, other, other, other)
        made = torch.full_like
        with mock.patch.object(torch, "full_like", lambda *args, **options: (
                story.append("made on " + now[0].name), made(*args, **options))[1]):
            for stream in (side, comm):
                with on_stream(stream):
                    self.assertEqual(handle.dst_buffer_slot_idx.tolist(), [[-1, -1]] * 3)
        self.assertEqual(story, ["made on side", "made on comm"])
        handle.dst_buffer_slot_idx = given = torch.ones(3, 2)
        self.assertIs(handle.dst_buffer_slot_idx, given)

    def test_the_flat_routing_of_an_expanded_handle_in_a_capture(self) -> None:
        """Its update runs in replays alone: a handle from before the capture has another one outside of it."""
        self.addCleanup(capturing.__setitem__, 0, False)
        pool = mock.Mock(routings=0, captured=False, capturing=lambda: capturing[0])
        pool.take_handle = lambda *_: mock.Mock(update=lambda idx, stream: story.append(
            "captured" if capturing[0] else "queued"))

        def use(routing: ElasticRouting) -> ElasticRouting:
            handle: Any = mock.Mock(topk_idx=torch.zeros(2, 1, dtype=torch.int64), expert_alignment=1)
            return _elastic_dispatch._flat_routing(pool, handle, routing, mock.Mock(), _elastic_dispatch.Domains(1, 1))
        eager = ElasticRouting(pool, mock.Mock(), 2)
        capturing[0] = True
        captured, first = ElasticRouting(pool, mock.Mock(), 2), use(eager)
        self.assertTrue(first.in_graph)
        self.assertIs(use(captured), use(captured))
        capturing[0] = False
        second = use(eager)
        self.assertIsNot(first, second)
        self.assertFalse(second.in_graph)
        self.assertIs(use(eager), second)
        capturing[0] = True
        self.assertIs(use(eager), second)
        self.assertTrue(second.in_graph)
        self.assertEqual(story, ["captured", "captured", "queued"])

    def test_the_flat_routing_of_an_expanded_handle_on_another_stream(self) -> None:
        """It reads indices that the handle's dispatch has copied, and that go with the handle."""
        copied: Any = mock.Mock(is_cuda=True, dtype=torch.int64, record_stream=Tensor("topk_idx").record_stream)
        copied.data_ptr.return_value = 0
        handle: Any = mock.Mock(topk_idx=copied, expert_alignment=1)
        pool = mock.Mock(routings=0, captured=False, capturing=lambda: False)
        with on_stream(side):
            _elastic_dispatch._flat_routing(pool, handle, ElasticRouting(pool, mock.Mock(), 2), mock.Mock(),
                                            _elastic_dispatch.Domains(1, 1))
        self.assertEqual(story, ["topk_idx is used on side"])

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

    def test_a_hook_on_another_stream_than_its_call(self) -> None:
        """Torch has to know: nobody else refers to the tensors of the call while the hook's work uses them."""
        for in_finalizer in (False, True):
            for stream, used in ((comm, []), (side, ["x", "rows", "scales"])):
                routing = LowLatencyRouting.__new__(LowLatencyRouting)
                routing.pool = mock.Mock(on_cpu=False, closed=False, **{"lib.epx_complete.return_value": 0})
                routing.pool.stream = lambda: now[0].cuda_stream
                routing.address, routing.handle, routing.in_graph = 1, mock.Mock(), False
                routing.staged, routing.staged_on = (Tensor("x"), None, [Tensor("rows"), Tensor("scales")]), 77
                story.clear()
                with on_stream(stream):
                    if in_finalizer:
                        del routing
                    else:
                        routing.receive()
                        routing.receive()
                self.assertEqual(story, ["%s is used on side" % name for name in used])

    def test_the_routing_of_all_gathers_is_made_on_their_stream(self) -> None:
        """Nobody keeps its indices: what another stream had allocated would be given out again before it is read."""
        made: List[torch.Tensor] = []

        def update(idx: torch.Tensor, stream: Stream) -> None:
            made.append(idx)
            story.append("on %s, for %s" % (now[0].name, stream.name))
        handle = mock.Mock(update=update)
        gathers = Gathers.__new__(Gathers)
        gathers._device, gathers._engine = torch.device("cpu"), mock.Mock(nranks=35, rank=33)
        gathers._mover = Mover(mock.Mock(**{"handle.return_value": handle}), gathers._device)
        gathers._mover.capturing = lambda: capturing[0]
        place = _Place(gathers._device, 35, (3, 8192), torch.uint8)
        place.flat = place.form.ordinary(gathers._device)[0]
        capturing[0] = True
        with self.assertRaisesRegex(epx.UsageError, "once before it"):  # a graph that never runs would have it
            gathers._send(place.mine(33), place, comm)
        capturing[0] = False
        self.assertEqual((now[0].name, story), ("current", []))
        for _ in range(2):
            gathers._send(place.mine(33), place, comm)
        self.assertEqual((now[0].name, story), ("current", ["on comm, for comm"] * 2))
        self.assertEqual([idx.tolist() for idx in made], [[list(range(32))], [[32, 33, 34]]])
        self.assertEqual(handle.dispatch.call_count, 4)

    def test_a_session_ends_behind_its_all_gathers(self) -> None:
        """Then the heap has their memory again. A caller need not have waited for them. In a capture nobody can: the
        next session does, when it begins, or when it ends."""
        gathers = Gathers.__new__(Gathers)
        gathers._device = types.SimpleNamespace(type="cuda", index=0)  # type: ignore[assignment]
        gathers._mover = types.SimpleNamespace(capturing=lambda: capturing[0])  # type: ignore[assignment]
        gathers._session, gathers._pending, gathers._made, gathers._given = None, [], [], []
        gathers._captured, gathers._ended = [], []

        def used() -> None:
            gathers.begin()
            place = types.SimpleNamespace(memory=None, flat=Tensor("place"))
            gathers._made, gathers._given = [place], [Tensor("t")]  # type: ignore[list-item]

        def left() -> int:
            return len(gathers._made) + len(gathers._given)
        self.addCleanup(capturing.__setitem__, 0, False)
        behind = ["current waits for comm", "place is used on current", "t is used on current"]
        with mock.patch.dict(_elastic_streams._comm_streams, {0: comm}):  # type: ignore[dict-item]
            used()
            gathers.end()
            self.assertEqual((story, left()), (behind, 0))
            used()
            for begins_in_capture in (False, True):
                capturing[0] = True
                gathers.end()
                self.assertEqual((len(story), left()), (3, 2))
                capturing[0] = begins_in_capture
                story.clear()
                gathers.begin()
                capturing[0] = False
                if begins_in_capture:
                    self.assertEqual((story, left()), ([], 2))
                    gathers.end()
                self.assertEqual((story, left()), (behind, 0))
                place = types.SimpleNamespace(memory=None, flat=Tensor("place"))
                gathers._made, gathers._given = [place], [Tensor("t")]  # type: ignore[list-item]


class Interrupted(unittest.TestCase):
    """A call that ends while its work is queued."""

    def kept(self, call: Callable[[Any, torch.Tensor], Any], module: Any, method: str) -> None:
        """A call with a handle, which is interrupted behind that method of EPX's handle, keeps its rows."""
        launch, rows = mock.MagicMock(), torch.zeros(2, 16, dtype=torch.bfloat16)
        routing = mock.MagicMock(tokens=2, rows=2, **{"handle.topk": 1, "handle.%s.side_effect" % method:
                                                      KeyboardInterrupt})
        pool = routing.pool = mock.MagicMock(**{"group.info.max_recv_tokens": 9})
        pool.heap.empty = lambda shape, dtype: torch.empty(shape, dtype=dtype)
        with mock.patch.object(module, "find", lambda *_: routing, create=True), \
                mock.patch.object(module, "routing_of", lambda _: routing, create=True), \
                mock.patch.object(module, "usable", lambda *_: pool), self.assertRaises(KeyboardInterrupt):
            call(lambda _group: launch, rows)
        (used,), _options = launch.keep.call_args
        self.assertTrue(any(one is rows for one in used))
        self.assertFalse(launch.finish.called)

    def test_calls_with_a_handle_keep_what_their_work_uses(self) -> None:
        handle = mock.MagicMock(do_expand=False)
        handle.recv_src_metadata.shape = (2, 3)
        self.kept(lambda begin, x: _elastic_dispatch.combine(begin, x, handle, None, None, True, mock.Mock(), 0),
                  _elastic_dispatch, "combine")


if __name__ == "__main__":
    unittest.main()
