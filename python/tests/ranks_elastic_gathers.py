# SPDX-License-Identifier: Apache-2.0
"""ElasticBuffer's all-gather sessions, and captures of what is beside dispatch and combine."""

import contextlib
import copy
import ctypes
import functools
import random
from typing import Any, Callable, Iterator, List
from unittest import mock

import deep_ep
import torch
import torch.distributed as dist
from deep_ep import elastic as elastic_module
from deep_ep._elastic_gather import Gathers, heap_bytes
from deep_ep._elastic_move import default_device
from deep_ep import _memory
from ranks_elastic import elastic
from ranks_elastic_parts import BIG, is_refused
from suite import World


def test_sizes_of_all_gathers(world: World) -> None:
    """[R] 3: bytes of a session, each tensor rounded up to 32; of a buffer, to 2 MiB; [R] 1: the formula of _C."""
    group, ranks = dist.group.WORLD, world.nranks
    one = deep_ep.ElasticBuffer.get_agrs_num_max_session_bytes(group, (3, 5), torch.bfloat16)
    assert one == -(-ranks * 30 // 32) * 32
    assert deep_ep.ElasticBuffer.get_agrs_num_max_session_bytes(group, [(3, 5), (3, 5)], torch.bfloat16) == 2 * one
    assert deep_ep.ElasticBuffer.get_agrs_buffer_size_hint(group, one) == 2 << 20
    assert deep_ep._C.calculate_elastic_buffer_size(1, 8, True, 4096, 7168, 8) == 473956352


def check_all_gather(world: World) -> None:
    """Sessions of gathers, all of them queued before the first is waited for."""
    dtype, ranks = torch.bfloat16, world.nranks
    with elastic(world, num_bytes=BIG) as buffer:
        buffer.agrs_set_config(16 << 20, 16)
        rng = random.Random(1)
        for session in range(3):
            with buffer.agrs_new_session():
                waits: List[Any] = []
                for i in range(6):
                    shapes = [(rng.choice((1, 3, 64)), rng.choice((8, 100, 2048))) for _ in range(rng.choice((1, 2)))]

                    def value(r: int, j: int) -> torch.Tensor:
                        seed = ((session * 8 + i) * 4 + j) * 64 + r
                        return torch.randn(shapes[j], generator=torch.Generator().manual_seed(seed)).bfloat16()
                    mine = [world.to(value(world.rank, j)) for j in range(len(shapes))]
                    if rng.random() < 0.5:
                        places = buffer.agrs_get_inplace_tensor(shapes, dtype)
                        for place, t in zip(places, mine):
                            place.copy_(t)
                        mine = list(places)
                    want = [torch.stack([value(r, j) for r in range(ranks)]) for j in range(len(shapes))]
                    if rng.random() < 0.5:  # all at once
                        *got, done = buffer.all_gather(mine if len(mine) > 1 or rng.random() < 0.5 else mine[0])
                        waits.append((done, got, want))
                        continue
                    for t, one in zip(mine, want):
                        result, done = buffer.all_gather(t)
                        waits.append((done, [result], [one]))
                if not session:
                    place = buffer.agrs_get_inplace_tensor((2, 8), dtype)
                    assert place.shape == (2, 8) and place.dtype is dtype and place.device == world.device
                    try:
                        buffer.all_gather(torch.zeros(2, 8, dtype=dtype, device=world.device))
                    except AssertionError as failure:
                        assert "agrs_get_inplace_tensor" in str(failure)
                    else:
                        raise AssertionError("not refused: another tensor than that of agrs_get_inplace_tensor")
                rng.shuffle(waits)
                for done, got, want in waits:
                    done()
                    for g, w in zip(got, want):
                        assert g.shape == w.shape and torch.equal(g.cpu(), w)
        with buffer.agrs_new_session(enabled=False):
            buffer.create_agrs_session()
        all_ranks, done = buffer.all_gather(torch.full((2, 8), world.rank, dtype=dtype, device=world.device))
        done()
        assert torch.equal(all_ranks.cpu()[:, 0, 0].float(), torch.arange(ranks).float())
        buffer.destroy_agrs_session()


def test_all_gather(world: World) -> None:
    """[R] 6: one and several tensors, in place or not, waited for in any order, session after session."""
    check_all_gather(world)


class LateGathers(Gathers):
    """On the CPU, with memory as on a GPU, and a communication stream that runs when somebody waits for it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._late: List[Callable[[], None]] = []

    def _flush(self) -> None:
        while self._late:
            self._late.pop(0)()
        self._mover.settle()

    def end(self) -> None:
        self._flush()  # test_cuda_streams.test_a_session_ends_behind_its_all_gathers
        super().end()

    @staticmethod
    def _bare(tensor: torch.Tensor) -> torch.Tensor:
        """A tensor as queued work has it, which keeps no memory."""
        if not tensor.nbytes:
            return tensor
        memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
        return torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)

    def _queued(self, place: Any) -> Any:
        queued = copy.copy(place)
        queued.flat = self._bare(place.flat)
        return queued

    def _send(self, t: torch.Tensor, place: Any, stream: Any) -> None:
        queued = self._queued(place)
        # Torch's memory is what record_stream() keeps.
        self._late.append(functools.partial(
            super()._send, self._bare(t) if self._heap.holds(t) else t, queued, stream))

    def _results(self, places: Any, stream: Any) -> List[torch.Tensor]:
        results = []
        for place in places:
            result = place.gathered()
            if place.part != place.nbytes:  # a copy, which is queued too
                self._late.append(functools.partial(self._copy, result, self._queued(place).flat[:, :place.nbytes]))
            results.append(result)
        return results

    def _copy(self, result: torch.Tensor, rows: torch.Tensor) -> None:
        self._mover.settle()
        result.view(self._engine.nranks, -1).view(torch.uint8).copy_(rows)

    def _handle(self, stream: Any) -> Callable[[], None]:
        return self._flush


@contextlib.contextmanager
def late_stream() -> Iterator[None]:
    """All-gathers are LateGathers."""
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False), \
            mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, create=True), \
            mock.patch.object(torch.cuda, "default_stream", mock.Mock()), \
            mock.patch.object(_memory, "streams_of", _memory.Streams), \
            mock.patch.object(elastic_module, "Gathers", LateGathers):
        yield


def test_all_gather_behind_a_late_stream(world: World) -> None:
    """[R] 6: memory of a gather that is under way is given to nobody."""
    world.only("cpu")
    with late_stream():
        check_all_gather(world)


def test_gathered_tensors_are_gathered(world: World) -> None:
    """[R] 6: a tensor of an earlier session, which is dropped while the gather is under way."""
    world.only("cpu")
    with late_stream(), elastic(world, num_bytes=BIG) as buffer:
        buffer.agrs_set_config(16 << 20, 4)
        mine = torch.arange(4096) + world.rank
        with buffer.agrs_new_session():
            gathered, wait = buffer.all_gather(mine)
            wait()
        want = torch.stack([gathered.clone()] * world.nranks)
        with buffer.agrs_new_session():
            again, wait = buffer.all_gather(gathered)
            del gathered
            buffer.agrs_get_inplace_tensor(mine.shape, mine.dtype).fill_(-1)
            wait()
            assert torch.equal(again, want)


def check_kept(world: World) -> None:
    """Sessions of which each fills more than a third of the memory. The caller drops nothing."""
    count = 1 << 16
    with elastic(world, num_bytes=BIG) as buffer:
        sizes = [(count,), (count // 2,), (count // 2,)]
        buffer.agrs_set_config(buffer.get_agrs_num_max_session_bytes(dist.group.WORLD, sizes, torch.int64), 4)
        rooms = heap_bytes(2 * count * 8 * world.nranks) // (2 * count * 8 * world.nranks) + 4
        first, kept = torch.arange(count, device=world.device) + world.rank, []
        for session in range(rooms):
            with buffer.agrs_new_session():
                wanted = []
                for i in range(2):  # of other sizes than in the session before
                    for size in ([count] if (session + i) % 2 else [count // 2] * 2):
                        t = first[:size] + 1000 * (4 * session + len(wanted))
                        if i:
                            place = buffer.agrs_get_inplace_tensor(t.shape, t.dtype)
                            t = place.copy_(t)
                        gathered, wait = buffer.all_gather(t)
                        kept.append(gathered)
                        wanted.append((gathered, 1000 * (4 * session + len(wanted)), size))
                        wait()
                for gathered, base, size in wanted:
                    want = torch.arange(size) + torch.arange(world.nranks)[:, None] + base
                    assert torch.equal(gathered.cpu(), want)
        addresses = [one.data_ptr() for one in kept]
        assert len(set(addresses)) < len(addresses)  # of those of the first sessions


def test_gathered_tensors_that_are_kept(world: World) -> None:
    """[R] 6: a caller who drops no tensor of earlier sessions, as DeepEP's own test: they lose their memory."""
    check_kept(world)


def test_gathered_tensors_that_are_kept_behind_a_late_stream(world: World) -> None:
    """[R] 6: likewise, where the all-gathers run when somebody waits for them."""
    world.only("cpu")
    with late_stream():
        check_kept(world)


def test_gathered_tensors_that_are_used(world: World) -> None:
    """[R] 6: what a session gathers is not taken from it, though it is of an earlier one; nor what was captured."""
    count = 1 << 18
    with elastic(world, num_bytes=BIG) as buffer:
        session_bytes = buffer.get_agrs_num_max_session_bytes(dist.group.WORLD, (count,), torch.int64)
        buffer.agrs_set_config(session_bytes, 4)
        gathers, kept = buffer._parts["gathers"], []
        rooms = heap_bytes(session_bytes) // session_bytes
        t = torch.arange(count, device=world.device) + world.rank
        for session in range(rooms + 2):
            with buffer.agrs_new_session():
                given = kept[0][world.rank] if kept else t
                gathered, wait = buffer.all_gather(given)
                wait()
                kept.append(gathered)
                assert torch.equal(gathered[-1], t - world.rank + world.nranks - 1)
        assert kept[0].data_ptr() not in [one.data_ptr() for one in kept[1:]]
        del kept[1:], gathered, wait, given
        captures = gathers._mover.capturing

        def gather(captured: bool) -> None:
            with buffer.agrs_new_session():
                place = buffer.agrs_get_inplace_tensor((count,), torch.int64)
                gathers._mover.capturing = lambda: captured
                kept.append(buffer.all_gather(place)[0])
                gathers._mover.capturing = captures
        for session in range(rooms + 2):
            gather(captured=not session)
        first, captured, *later = [one.data_ptr() for one in kept]
        assert captured not in later and first in later
        while not is_refused(lambda: gather(captured=True), "were captured"):
            assert len({one.data_ptr() for one in kept}) <= rooms
        world.meet()
        buffer.recover(graphs_released=True)


def refuses_recovery(buffer: deep_ep.ElasticBuffer) -> bool:
    """Does recover() ask for the graphs to be released?"""
    return is_refused(buffer.recover, "graphs_released=True")


def test_graph_of_parts(world: World) -> None:
    """Barriers of both buffers and an all-gather in place, whose session ends in the capture, replayed."""
    world.only("cuda")
    with elastic(world, num_bytes=BIG) as buffer:
        other = deep_ep.EPBuffer(dist.group.WORLD, num_bytes=BIG, explicitly_destroy=True)
        buffer.agrs_set_config(1 << 20, 8)
        given = torch.zeros(16, dtype=torch.int64, device=world.device)
        with buffer.agrs_new_session():  # for the routing
            buffer.all_gather(given)[1]()
        buffer.create_agrs_session()
        place = buffer.agrs_get_inplace_tensor((16,), torch.int64)
        buffer.barrier()
        other.barrier()
        torch.cuda.synchronize()
        world.meet()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            buffer.barrier()
            other.barrier()
            place.copy_(given)
            gathered, wait = buffer.all_gather(place)
            wait()
            other.barrier()  # the communication stream is in the capture now
            result = gathered.clone()
            buffer.destroy_agrs_session()
        world.meet()
        for number in (5, 7):
            given.fill_(number + world.rank)
            graph.replay()
            torch.cuda.synchronize()
            assert result[:, 0].tolist() == [number + rank for rank in range(world.nranks)]
            with buffer.agrs_new_session():  # between replays
                eager, wait = buffer.all_gather(given + 1)
                wait()
                assert eager[:, 15].tolist() == [number + 1 + rank for rank in range(world.nranks)]
        del graph
        other.destroy()


def test_captured_parts(world: World) -> None:
    """A barrier and an all-gather that were captured into a graph: their groups live until the caller says that the
    graphs are released, also where the all-gather is configured again."""
    with elastic(world, num_bytes=BIG) as buffer:
        buffer.barrier()
        mover, _handle, _nothing = buffer._barriers._mover(default_device())
        captures, mover.capturing = mover.capturing, lambda: True  # as in a capture
        buffer.barrier()
        mover.capturing = captures
        assert refuses_recovery(buffer) and mover.group.alive
        world.meet()
        buffer.recover(graphs_released=True)
        assert not mover.group.alive

        buffer.agrs_set_config(1 << 20, 4)
        old = buffer._parts["gathers"]
        captures = old._mover.capturing
        with buffer.agrs_new_session():  # one that is refused in a capture leaves nothing behind
            place = buffer.agrs_get_inplace_tensor((16,), torch.int64)
            place.fill_(world.rank)
            old._mover.capturing = lambda: True
            assert is_refused(lambda: buffer.all_gather(place), "once before it")
            old._mover.capturing = captures
            assert not old._mover.captured and not old._captured and not old._count
            gathered, wait = buffer.all_gather(place)
            wait()
            assert gathered[:, 0].tolist() == list(range(world.nranks)) and gathered.data_ptr() == place.data_ptr() - (
                world.rank * place.nbytes)
        for captured in (False, True):
            with buffer.agrs_new_session():
                place = buffer.agrs_get_inplace_tensor((16,), torch.int64)
                place.fill_(world.rank)
                old._mover.capturing = lambda captured=captured: captured
                gathered, wait = buffer.all_gather(place)
                wait()
                assert captured == is_refused(lambda: buffer.all_gather(place.clone()), "a capture takes")
                old._mover.capturing = captures
            assert gathered[:, 0].tolist() == list(range(world.nranks))
        at = gathered.data_ptr()
        del gathered, wait, place  # in the heap, where a replay writes
        one = torch.zeros(16, dtype=torch.int64, device=world.device)
        with buffer.agrs_new_session():
            later = [buffer.all_gather(one) for _ in range(4)]
            assert at not in [gathered.data_ptr() for gathered, _wait in later]
        del later
        buffer.agrs_set_config(1 << 20, 4)
        assert old._mover.group.alive and refuses_recovery(buffer)
        world.meet()
        buffer.recover(graphs_released=True)
        assert not old._mover.group.alive and not refuses_recovery(buffer)
