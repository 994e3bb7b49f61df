# SPDX-License-Identifier: Apache-2.0
"""epx itself: layouts that deep_ep does not use, NumPy and DLPack, streams, events, bootstraps."""

import ctypes
import gc
import os
import queue
import socket
import threading
from typing import Any, List

import epx
import numpy
import torch
import torch.distributed as dist
from reference import Work, calc_diff, combine_weighted, expert_result
from suite import World, environment


def make_group(world: World, **config: Any) -> epx.Group:
    """A group of all ranks on the device under test."""
    kind = epx.Device.CPU if world.device.type == "cpu" else epx.Device.CUDA
    values = dict(num_experts=2 * world.nranks, max_tokens_per_rank=16, max_hidden_bytes=512, max_topk=4,
                  alloc_bytes=64 << 20, layouts=1 << epx.Layout.EXPERT_MAJOR)
    return epx.Group(epx.bootstrap.from_torch(), device=kind, device_index=world.device.index or 0,
                     **{**values, **config})


def stream_of(world: World) -> Any:
    """What torch's own work is ordered by."""
    return None if world.device.type == "cpu" else torch.cuda.current_stream()


def test_info_and_memory(world: World) -> None:
    with make_group(world) as group:
        info = group.info
        assert (info.rank, info.nranks, info.nnodes) == (world.rank, world.nranks, 1)
        assert info.local_experts == 2 and info.device_name and group.error() is None
        need = epx.memory(world.nranks, num_experts=2 * world.nranks, max_tokens_per_rank=16, max_hidden_bytes=512)
        assert need["heap_bytes"] == sum(need[name] for name in (
            "control_bytes", "low_latency_bytes", "high_throughput_bytes", "alloc_bytes"))
        assert not group.handle(epx.Mode.LOW_LATENCY, epx.Layout.RANK_MAJOR, 2).destroy()


def test_expert_major_high_throughput(world: World) -> None:
    """Zones per expert, padded; forward and backward."""
    work = Work(world.nranks, 12, 128, 2 * world.nranks, 3, seed=1)
    me, stream = world.rank, stream_of(world)
    with make_group(world) as group:
        handle = group.handle(epx.Mode.HIGH_THROUGHPUT, epx.Layout.EXPERT_MAJOR, 3, expert_alignment=4)
        offsets = torch.zeros(2, dtype=torch.int64, device=world.device)
        total = torch.zeros(1, dtype=torch.int32, device=world.device)
        handle.update(world.to(work.idx[me]), epx.LayoutInfo(expert_offsets=offsets, total=total), stream=stream)
        rows, counts = handle.recv_count()
        assert counts == work.expert_counts(me) and rows == sum(-(-n // 4) * 4 for n in counts)
        out = torch.full((rows, 128), 9.0, dtype=torch.bfloat16, device=world.device)
        weights = torch.empty(rows, device=world.device)
        handle.dispatch(world.to(work.x[me]), out, topk_weights=world.to(work.weights[me]), out_topk_weights=weights,
                        stream=stream)
        back = torch.empty_like(world.to(work.x[me]))
        back_weights = torch.empty_like(world.to(work.weights[me]))
        handle.combine(out, back, topk_weights=weights, out_topk_weights=back_weights,
                       direction=epx.Direction.BACKWARD, stream=stream)
        group.sync(stream)
        for expert, places in enumerate(work.by_expert(me)):
            start = int(offsets[expert])
            expected = [work.x[s][t] for s, t in places]
            if expected:
                assert torch.equal(out[start:start + len(places)].cpu(), torch.stack(expected))
            assert not out[start + len(places):start + -(-len(places) // 4) * 4].any()
        assert int(total) == rows
        sent = work.weights[me].masked_fill(work.idx[me] < 0, 0)
        assert torch.equal(back_weights.cpu(), sent)
        assert calc_diff(back.cpu(), work.x[me].float() * (work.idx[me] >= 0).sum(1, keepdim=True)) < 1e-5


def test_rank_major_low_latency(world: World) -> None:
    work = Work(world.nranks, 10, 128, 2 * world.nranks, 3, seed=2)
    me, stream = world.rank, stream_of(world)
    with make_group(world, modes=epx.Mode.LOW_LATENCY) as group:
        handle = group.handle(epx.Mode.LOW_LATENCY, epx.Layout.RANK_MAJOR, 3, compact=True)
        counts = torch.zeros(world.nranks, dtype=torch.int32, device=world.device)
        out = torch.zeros(world.nranks, 16, 128, dtype=torch.bfloat16, device=world.device)
        idx = torch.zeros(world.nranks, 16, 3, dtype=torch.int32, device=world.device)
        topk_idx = world.to(work.idx[me])
        handle.update(topk_idx)
        handle.dispatch(world.to(work.x[me]), out, out_topk_idx=idx, info=epx.LayoutInfo(rank_counts=counts),
                        send_only=True, stream=stream)
        handle.complete(stream)
        back = torch.empty_like(world.to(work.x[me]))
        handle.combine(out, back, stream=stream)
        group.sync(stream)
        ranks, _tokens, rows, ref_idx, _weights = work.flat(me)
        for s in range(world.nranks):
            n = int((ranks == s).sum())
            assert int(counts[s]) == n and torch.equal(out[s, :n].cpu(), rows[ranks == s])
            sorted_idx = [sorted(e for e in row if e >= 0) for row in ref_idx[ranks == s].tolist()]
            assert idx[s, :n].tolist() == [row + [-1] * (3 - len(row)) for row in sorted_idx]
        assert calc_diff(back.cpu(), work.x[me].float() * work.ranks_of(me).sum(1, keepdim=True)) < 1e-5


class Dlpack:
    """A tensor that speaks DLPack and nothing else."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_options: Any) -> Any:
        return self._tensor.__dlpack__()


def low_latency(group: epx.Group, work: Work, me: int, tensors: List[Any], read: Any,
                stream: Any = None) -> torch.Tensor:
    """Dispatch, experts, combine with tensors of any kind: (x, idx, weights, rows, out); `read` makes rows torch's."""
    handle = group.handle(epx.Mode.LOW_LATENCY, epx.Layout.EXPERT_MAJOR, work.topk)
    x, idx, weights, rows, out = tensors
    handle.update(idx)
    handle.dispatch(x, rows, stream=stream)
    group.sync(stream)
    view = read(rows)
    for l in range(work.local):
        view[l] = expert_result(view[l], me * work.local + l)
    handle.combine(rows, out, topk_weights=weights, stream=stream)
    group.sync(stream)
    return read(out)


def test_kinds_of_tensors(world: World) -> None:
    """torch, DLPack, NumPy (fp32), and memory of the group's heap give the same."""
    work = Work(world.nranks, 10, 128, 2 * world.nranks, 3, seed=3)
    me = world.rank
    with make_group(world) as group:
        shape = (work.local, world.nranks * 16, 128)
        torch_tensors = [world.to(t) for t in (work.x[me], work.idx[me], work.weights[me])]
        torch_tensors += [torch.zeros(shape, dtype=torch.bfloat16, device=world.device),
                          torch.empty_like(world.to(work.x[me]))]
        expected = combine_weighted(work, me)
        got = low_latency(group, work, me, torch_tensors, lambda t: t, stream_of(world))
        assert calc_diff(got.cpu(), expected) < 1e-5
        block = group.alloc(2 * work.local * world.nranks * 16 * 128)
        heap = torch.from_dlpack(block).view(torch.bfloat16).view(shape)
        heap.zero_()
        group.stats_reset()
        again = low_latency(group, work, me, torch_tensors[:3] + [heap, torch_tensors[4].clone()], lambda t: t,
                            stream_of(world))
        assert torch.equal(got, again) and group.stats()["bytes_local"] == 0
        if world.device.type != "cpu":
            return
        wrapped = [Dlpack(t) for t in torch_tensors]
        torch_tensors[4].zero_()
        again = low_latency(group, work, me, wrapped, lambda t: t._tensor)
        assert torch.equal(got, again)
        assert numpy.asarray(block).ctypes.data == block.address and len(block) == block.nbytes
        arrays = [work.x[me].float().numpy(), work.idx[me].numpy(), work.weights[me].numpy(),
                  numpy.zeros(shape, numpy.float32), numpy.empty((work.x[me].shape[0], 128), numpy.float32)]
        again = low_latency(group, work, me, arrays, torch.from_numpy)
        assert calc_diff(again, expected) < 1e-5


def test_streams_and_events(world: World) -> None:
    with make_group(world) as group:
        stream, event = group.stream(), group.event()
        assert event.query() and stream.query()
        event.record(stream)
        event.sync()
        stream.wait_event(event)
        stream.sync()
        if world.device.type == "cpu":
            try:
                group.sync(7)
                raise AssertionError("a number was taken for a stream of the CPU")
            except epx.ArgumentError as error:
                assert "stream" in str(error) and "7" in str(error)
    try:
        group.sync()
        raise AssertionError("a destroyed group was used")
    except epx.UsageError as error:
        assert "destroyed" in str(error)


def test_ranks_disagree(world: World) -> None:
    try:
        make_group(world, max_topk=2 + (world.rank == 1))
        raise AssertionError("a difference went unnoticed")
    except epx.MismatchError as error:
        assert "max_topk" in error.message and "rank 1" in error.message and error.status == epx.Status.MISMATCH
    with environment(EPX_GPU_HEAP="host" if world.rank == 1 else "device"):
        try:
            make_group(world)
            raise AssertionError("a difference of places went unnoticed")
        except epx.MismatchError as error:
            assert "rank 1 has EPX_GPU_HEAP=host where rank 0 has device" in error.message, error.message


def test_environment_bootstrap(world: World) -> None:
    """Without a bootstrap: RANK, WORLD_SIZE, MASTER_ADDR, as torchrun sets them."""
    port: List[Any] = [None]
    if world.rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = [probe.getsockname()[1]]
    dist.broadcast_object_list(port, 0)
    with environment(EPX_MASTER_PORT=str(port[0])):
        with epx.Group(num_experts=world.nranks, max_tokens_per_rank=4, max_hidden_bytes=64,
                       device=epx.Device.CPU) as group:
            assert (group.info.rank, group.info.nranks) == (int(os.environ["RANK"]), world.nranks)
            world.meet()


class FakeComm:
    """What is used of an mpi4py communicator."""

    def Get_rank(self) -> int:
        return dist.get_rank()

    def Get_size(self) -> int:
        return dist.get_world_size()

    def allgather(self, value: Any) -> List[Any]:
        parts: List[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, value)
        return parts


def test_mpi_bootstrap(world: World) -> None:
    import deep_ep
    from ranks_high_throughput import exchange

    buffer = deep_ep.Buffer(None, comm=FakeComm(), explicitly_destroy=True)
    assert isinstance(buffer.group, FakeComm) and buffer.group_size == world.nranks
    exchange(world, buffer, Work(world.nranks, 6, 64, world.nranks, 1, seed=5))
    buffer.destroy()


def test_bootstrap_that_fails(world: World) -> None:
    """The exception of an all-gather is the one that comes out."""
    calls: List[int] = []

    def gather(data: bytes) -> List[bytes]:
        calls.append(len(data))
        raise LookupError("no such friend")

    try:
        epx.Group(epx.Bootstrap(world.rank, world.nranks, gather), num_experts=1, max_tokens_per_rank=1,
                  max_hidden_bytes=16)
        raise AssertionError("created without its ranks")
    except LookupError as error:
        assert "no such friend" in str(error) and calls
    if world.nranks > 1:
        try:
            epx.Group(epx.Bootstrap(world.rank, world.nranks, lambda data: [data]), num_experts=1,
                      max_tokens_per_rank=1, max_hidden_bytes=16)
            raise AssertionError("created with one part")
        except ValueError as error:
            assert "expected %d parts" % world.nranks in str(error)


def test_masks(world: World) -> None:
    with make_group(world, modes=epx.Mode.LOW_LATENCY, enable_mask=1) as group:
        out = torch.zeros(world.nranks, dtype=torch.int32, device=world.device)
        other = (world.rank + 1) % world.nranks
        mask = [int(r != other) for r in range(world.nranks)]
        if world.nranks > 1:
            group.mask_update(mask, stream_of(world))
            group.mask_query(out, stream_of(world))
            group.sync(stream_of(world))
            assert out.tolist() == mask
        try:
            group.mask_update([1])
            raise AssertionError("a mask of the wrong length")
        except epx.ArgumentError as error:
            assert "mask" in str(error)
        world.meet()
        group.mask_clean()


def test_abort(world: World) -> None:
    """A rank that cannot go on, after Ctrl-C say, ends the operations of the others; then all start over."""
    world.only("cpu")
    idx, last = torch.zeros(4, 2, dtype=torch.int64), world.nranks - 1
    with make_group(world) as group:
        handle = group.handle(epx.Mode.HIGH_THROUGHPUT, epx.Layout.FLAT, 2)
        try:
            if world.rank == last:
                group.abort()
            handle.update(idx)
            handle.recv_count()
            raise AssertionError("an operation without rank %d is good" % last)
        except epx.PeerError as error:
            assert "rank %d" % last in error.message, error.message
        group.error_clear()
        handle.update(idx)
        assert handle.recv_count()[0] == (4 * world.nranks if world.rank == 0 else 0)


def test_lost_handles(world: World) -> None:
    """Handles that nobody destroyed, one of them with a send whose receive half was never asked for."""
    work = Work(world.nranks, 6, 128, 2 * world.nranks, 2, seed=6, uneven=False)
    with make_group(world) as group:
        for staged in (True, False, True):
            handle = group.handle(epx.Mode.LOW_LATENCY, epx.Layout.EXPERT_MAJOR, 2)
            handle.update(world.to(work.idx[world.rank]))
            rows = torch.empty(2, world.nranks * 16, 128, dtype=torch.bfloat16, device=world.device)
            handle.dispatch(world.to(work.x[world.rank]), rows, send_only=staged, stream=stream_of(world))
            del handle, rows
        group.handle(epx.Mode.LOW_LATENCY, epx.Layout.EXPERT_MAJOR, 2)
        group.sync(stream_of(world))


def test_tensors_end_in_other_threads(world: World) -> None:
    """Memory of the heap is taken here and let go elsewhere, at the same time."""
    with make_group(world) as group:
        pieces: "queue.Queue[Any]" = queue.Queue(maxsize=64)

        def let_go() -> None:
            while pieces.get() is not None:
                pass

        threads = [threading.Thread(target=let_go) for _ in range(3)]
        for thread in threads:
            thread.start()
        for i in range(3000):
            pieces.put(torch.from_dlpack(group.alloc(64 + i % 1000)))
        for _ in threads:
            pieces.put(None)
        for thread in threads:
            thread.join()
        gc.collect()
        group.alloc(63 << 20)  # all of it is there again


def test_recv_tensor(world: World) -> None:
    """A descriptor inside EPX's own receive buffer."""
    with make_group(world) as group:
        handle = group.handle(epx.Mode.HIGH_THROUGHPUT, epx.Layout.FLAT, 2)
        struct = handle.recv_tensor(epx.RecvPart.TOKENS, epx.DType.BF16, 4, 64)
        assert list(struct.shape)[:2] == [4, 64] and struct.data and ctypes.sizeof(struct) == struct.size
