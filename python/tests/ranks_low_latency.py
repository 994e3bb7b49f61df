# SPDX-License-Identifier: Apache-2.0
"""deep_ep's low latency against the reference."""

import contextlib
import gc
import itertools
import os
import threading
import time
from typing import Any, Callable, List, Optional, Tuple
from unittest import mock

import deep_ep
import epx
import torch
import torch.distributed as dist
from deep_ep._low_latency import LowLatencyRouting
from deep_ep._routing import find
from ranks_high_throughput import exchange as exchange_high
from reference import (Work, calc_diff, cast_fp8, cast_nvfp4, combine_weighted, expert_result, same_bits, uncast_fp8,
                       uncast_nvfp4, unpack_ue8m0)
from suite import World, environment, reads, refused


def wait_for(event: deep_ep.EventOverlap, hook: Optional[Callable[[], None]], asynchronous: bool, hooked: bool) -> None:
    """Waits in the way that was asked for."""
    assert (hook is not None) == hooked and (event.event is not None) == asynchronous
    if hooked:
        hook()
    if asynchronous:
        event.current_stream_wait()


def dispatch(world: World, buffer: deep_ep.Buffer, work: Work, most: int, **options: Any) -> Tuple[Any, Any, Any]:
    """(received, counts, handle) of one dispatch, complete."""
    me = buffer.rank
    recv, counts, handle, event, hook = buffer.low_latency_dispatch(
        world.to(work.x[me]), world.to(work.idx[me]), most, work.experts, **options)
    wait_for(event, hook, options.get("async_finish", False), options.get("return_recv_hook", False))
    return recv, counts, handle


def check_received(buffer: deep_ep.Buffer, work: Work, most: int, recv: Any, counts: torch.Tensor, handle: Any,
                   round_scale: bool = False) -> torch.Tensor:
    """Checks rows, scales, counts and handle; returns the rows in bf16, zero where nothing was received."""
    me, ranks, local = buffer.rank, buffer.group_size, work.local
    lists = work.by_expert(me)
    src_info, layout_range, given_most, hidden, experts = handle
    assert (given_most, hidden, experts) == (most, work.hidden, work.experts)
    assert counts.tolist() == [len(rows) for rows in lists] and counts.dtype == torch.int32
    assert src_info.shape == (local, ranks * most) and src_info.dtype == torch.int32
    assert layout_range.shape == (local, ranks) and layout_range.dtype == torch.int64
    rows = recv[0] if isinstance(recv, tuple) else recv
    assert rows.shape == (local, ranks * most, work.hidden) and rows.is_contiguous()
    full = torch.zeros(rows.shape, dtype=torch.bfloat16)
    for expert, places in enumerate(lists):
        n = len(places)
        assert src_info[expert, :n].tolist() == [t for _s, t in places]
        for s in range(ranks):
            begin = sum(1 for source, _t in places if source < s)
            count = sum(1 for source, _t in places if source == s)
            assert int(layout_range[expert, s]) == begin << 32 | count
        if not n:
            continue
        expected = torch.stack([work.x[s][t] for s, t in places])
        if isinstance(recv, tuple):
            expected = check_cast(recv, expert, n, expected, round_scale)
        else:
            assert same_bits(recv[expert, :n], expected)
        full[expert, :n] = expected
    return full


def check_cast(recv: Tuple[torch.Tensor, torch.Tensor], expert: int, n: int, rows: torch.Tensor,
               round_scale: bool) -> torch.Tensor:
    """FP8 rows and scales of one expert; returns the rows that they stand for."""
    values, scales = recv
    want_values, want_scales = cast_fp8(rows, round_scale)
    groups = want_scales.shape[1]
    got = scales[expert, :n].cpu()
    if scales.dtype == torch.int32:
        got = unpack_ue8m0(got, groups)
    assert same_bits(got, want_scales), (got, want_scales)
    assert same_bits(values[expert, :n], want_values)
    rows_out = uncast_fp8(want_values, want_scales)
    assert calc_diff(rows_out, rows) < 9e-4
    return rows_out


def results(work: Work, me: int, rows: torch.Tensor) -> torch.Tensor:
    """What the local experts make of received rows."""
    return torch.stack([expert_result(rows[l], me * work.local + l) for l in range(work.local)])


def check_one(world: World, buffer: deep_ep.Buffer, work: Work, most: int, cast: str = "bf16", logfmt: bool = False,
              zero_copy: bool = False, asynchronous: bool = False, hooked: bool = False) -> torch.Tensor:
    """One dispatch and one combine, checked; returns the combined rows."""
    me = buffer.rank
    how = dict(async_finish=asynchronous, return_recv_hook=hooked)
    options = {"bf16": dict(use_fp8=False, use_ue8m0=asynchronous), "fp8": {},  # no scales: use_ue8m0 says nothing
               "round": dict(round_scale=True),
               "ue8m0": dict(round_scale=True, use_ue8m0=True)}[cast]
    recv, counts, handle = dispatch(world, buffer, work, most, **options, **how)
    if isinstance(recv, tuple):
        groups = -(-work.hidden // (512 if cast == "ue8m0" else 128))
        rows = buffer.group_size * most
        assert recv[1].shape == (work.local, rows, groups) and recv[1].stride() == (rows * groups, 1, rows)
        assert recv[1].dtype == (torch.int32 if cast == "ue8m0" else torch.float32)
    rows = check_received(buffer, work, most, recv, counts, handle, cast in ("round", "ue8m0"))
    y = world.to(results(work, me, rows))
    if zero_copy:
        given = buffer.get_next_low_latency_combine_buffer(handle)
        assert given.shape == y.shape and given.dtype == torch.bfloat16
        given.copy_(y)
    out = torch.empty_like(world.to(work.x[me])) if hooked else None
    combined, event, hook = buffer.low_latency_combine(
        y, world.to(work.idx[me]), world.to(work.weights[me]), handle, use_logfmt=logfmt, zero_copy=zero_copy, out=out,
        **how)
    wait_for(event, hook, asynchronous, hooked)
    assert out is None or combined is out
    limit = 1e-5 if cast == "bf16" and not logfmt else 9e-4
    assert calc_diff(combined.cpu(), combine_weighted(work, me)) < limit
    return combined


def check_all(world: World, buffer: deep_ep.Buffer) -> None:
    """All casts with all ways to wait, zero copy, LogFMT."""
    ranks = buffer.group_size
    ways = ((False, False), (True, False), (False, True))
    for seed, (cast, (asynchronous, hooked)) in enumerate(itertools.product(("bf16", "fp8", "round", "ue8m0"), ways)):
        work = Work(ranks, 12, 640 if seed % 2 else 256, 2 * ranks, 3, seed=seed + 1)
        check_one(world, buffer, work, 16, cast, asynchronous=asynchronous, hooked=hooked,
                  zero_copy=seed % 2 == 1, logfmt=cast == "fp8" and seed % 2 == 0)


def test_all_in_a_node(world: World) -> None:
    check_all(world, world.buffer())


def test_all_between_nodes(world: World) -> None:
    check_all(world, world.node_buffer())


def test_logfmt_travels(world: World) -> None:
    """LogFMT is lossy: results differ from bf16's in bits, and little."""
    buffer = world.buffer()
    work = Work(buffer.group_size, 12, 512, 2 * buffer.group_size, 4, seed=3)
    for rank in range(work.nranks):
        work.x[rank] = (work.x[rank].float() * 0.05).bfloat16()  # it encodes values below 1
    plain = check_one(world, buffer, work, 16, logfmt=False)
    coded = check_one(world, buffer, work, 16, logfmt=True)
    if plain.numel():
        assert not torch.equal(plain, coded) and calc_diff(plain.cpu(), coded.cpu()) < 9e-4


def combined_bytes(world: World, buffer: deep_ep.Buffer, work: Work, name: str, **options: Any) -> int:
    """What one combine adds to a counter of the library."""
    recv, _counts, handle = dispatch(world, buffer, work, 16, use_fp8=False)
    group = find(LowLatencyRouting, handle).pool.group
    if world.device.type == "cuda":
        torch.cuda.synchronize()  # what the dispatch sends is not the combine's
    world.meet()
    before = group.stats()[name]
    buffer.low_latency_combine(recv.clone(), world.to(work.idx[buffer.rank]),
                               world.to(work.weights[buffer.rank]), handle,
                               **options)
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    world.meet()
    return group.stats()[name] - before


def test_logfmt_saves_bytes_between_nodes(world: World) -> None:
    """10 bits and a little in place of 16."""
    buffer = world.node_buffer()
    work = Work(buffer.group_size, 12, 1024, 2 * buffer.group_size, 4, seed=3, uneven=False)
    for rank in range(work.nranks):
        work.x[rank] = (work.x[rank].float() * 0.05).bfloat16()
    plain = combined_bytes(world, buffer, work, "net_bytes")
    coded = combined_bytes(world, buffer, work, "net_bytes", use_logfmt=True)
    assert 0.5 * plain < coded < 0.75 * plain, (plain, coded)


def test_zero_copy_reads_the_buffer(world: World) -> None:
    """What is combined is the buffer's content, whatever x holds."""
    buffer = world.buffer()
    work = Work(buffer.group_size, 8, 128, 2 * buffer.group_size, 2, seed=4)
    recv, counts, handle = dispatch(world, buffer, work, 8, use_fp8=False)
    rows = check_received(buffer, work, 8, recv, counts, handle)
    y = world.to(results(work, buffer.rank, rows))
    buffer.get_next_low_latency_combine_buffer(handle).copy_(y)
    combined, _event, _hook = buffer.low_latency_combine(
        torch.zeros_like(y), world.to(work.idx[buffer.rank]), world.to(work.weights[buffer.rank]), handle,
        zero_copy=True)
    assert calc_diff(combined.cpu(), combine_weighted(work, buffer.rank)) < 1e-5


def test_entries_taken_out_before_combine(world: World) -> None:
    """combine skips what its own topk_idx does not name, also if that is the dispatch's tensor, changed meanwhile, and
    in inference_mode(), where torch does not count writes. Rows of such entries are not read."""
    work = Work(world.nranks, 6, 128, 2 * world.nranks, 2, seed=72, uneven=False)
    for buffer in world.buffers():
        for in_place in (False, True):
            for inference, dtype, logfmt in ((False, torch.int64, True), (True, torch.int32, False)):
                with torch.inference_mode(inference):
                    check_taken_out(world, buffer, work, in_place, dtype, logfmt)


def check_taken_out(world: World, buffer: deep_ep.Buffer, work: Work, in_place: bool, dtype: torch.dtype,
                    logfmt: bool) -> None:
    """Experts that were taken out return NaN: first those of every first entry and of the first token, then all."""
    me = world.rank
    x, idx, weights = (world.to(part[me]).clone() for part in (work.x, work.idx, work.weights))
    idx = idx.to(dtype)
    recv, _counts, handle, _event, _hook = buffer.low_latency_dispatch(x, idx, 8, work.experts, use_fp8=False)
    kept = [part.clone() for part in work.idx]
    for part in kept:
        part[:, 0] = -1
        part[0] = -1
    spoilt = torch.full(recv.shape, float("nan"), dtype=recv.dtype)
    for local, places in enumerate(work.by_expert(me)):
        for row, (s, t) in enumerate(places):
            if me * work.local + local in kept[s][t].tolist():
                spoilt[local, row] = work.x[s][t]
    rest = idx if in_place else idx.clone()
    for rows, every in ((spoilt, False), (torch.full_like(spoilt, float("nan")), True)):
        rest[:] = -1
        if not every:
            rest.copy_(kept[me])
        for hooked in (False, True):
            combined, _event, hook = buffer.low_latency_combine(
                world.to(rows), rest, weights, handle, use_logfmt=logfmt, return_recv_hook=hooked)
            if hooked:
                hook()
            expected = x.float() * torch.where(rest < 0, 0.0, weights).sum(1, keepdim=True)
            assert not combined.isnan().any() and not combined[0].any()
            assert calc_diff(combined.cpu(), expected.bfloat16().cpu()) < (1e-3 if logfmt else 1e-5), (logfmt, every)


def test_expert_named_twice(world: World) -> None:
    """Entries of a token that name the same expert share a row there, and each adds it with its own weight."""
    for buffer in world.buffers():
        work = Work(world.nranks, 9, 256, max(6, 2 * world.nranks), 6, seed=73, uneven=False)
        for idx in work.idx:
            idx[::2, 3] = idx[::2, 0]
            idx[::3, 5] = idx[::3, 1]
            idx[4] = idx[4, 2]
        x, idx, weights = (world.to(part[world.rank]) for part in (work.x, work.idx, work.weights))
        expected = x.float() * torch.where(idx < 0, 0.0, weights).sum(1, keepdim=True)
        for hooked, fp8, logfmt in ((False, False, False), (True, False, False),
                                   (False, True, False), (False, False, True)):
            recv, counts, handle, _event, hook = buffer.low_latency_dispatch(
                x, idx, 16, work.experts, use_fp8=fp8, return_recv_hook=hooked)
            if hooked:
                hook()
            for expert in range(work.local):
                mine = world.rank * work.local + expert
                assert counts[expert] == sum(int((i == mine).any(1).sum()) for i in work.idx)
            rows = uncast_fp8(*recv) if fp8 else recv
            combined, _event, hook = buffer.low_latency_combine(
                rows, idx, weights, handle, use_logfmt=logfmt, return_recv_hook=hooked)
            if hooked:
                hook()
            assert calc_diff(combined.cpu(), expected.bfloat16().cpu()) < (9e-4 if fp8 else 1e-5)


def test_repeats_bit_for_bit(world: World) -> None:
    for buffer in world.buffers():
        work = Work(buffer.group_size, 14, 256, 2 * buffer.group_size, 4, seed=6)
        for cast in ("bf16", "fp8"):
            first = check_one(world, buffer, work, 16, cast)
            for hooked in (False, True, False):
                assert torch.equal(first, check_one(world, buffer, work, 16, cast, hooked=hooked))


def test_any_size(world: World) -> None:
    """Hidden sizes, top-k and numbers of experts that DeepEP refuses; several M on one buffer."""
    buffer = world.buffer()
    ranks = buffer.group_size
    for hidden, experts, topk, most in ((8, ranks + 1, 1, 3), (7168, ranks, 2, 4), (136, 3 * ranks, 13, 7)):
        work = Work(ranks, most, hidden, experts, min(topk, experts), seed=hidden)
        check_one(world, buffer, work, most)
        if hidden % 16 == 0:
            check_one(world, buffer, work, most, "fp8")


def test_statistics(world: World) -> None:
    buffer = world.buffer()
    work = Work(buffer.group_size, 10, 128, 2 * buffer.group_size, 2, seed=7)
    stats = torch.arange(work.local, dtype=torch.int32, device=world.device)
    waited = torch.zeros(buffer.group_size, dtype=torch.int64, device=world.device)
    for _ in range(2):
        recv, counts, handle = dispatch(world, buffer, work, 16, use_fp8=False,
                                        cumulative_local_expert_recv_stats=stats,
                                        dispatch_wait_recv_cost_stats=waited)
    expected = [l + 2 * n for l, n in enumerate(work.expert_counts(buffer.rank))]
    assert stats.tolist() == expected
    assert bool((waited >= 0).all())
    before = waited.clone()
    buffer.low_latency_combine(recv, world.to(work.idx[buffer.rank]), world.to(work.weights[buffer.rank]), handle,
                               combine_wait_recv_cost_stats=waited)
    assert bool((waited >= before).all())


def staged(world: World, buffer: deep_ep.Buffer, work: Work, most: int = 16) -> Any:
    """A dispatch whose hook was not called yet."""
    return buffer.low_latency_dispatch(world.to(work.x[buffer.rank]), world.to(work.idx[buffer.rank]), most,
                                       work.experts, use_fp8=False, return_recv_hook=True)


def test_several_hooks_outstanding(world: World) -> None:
    """Two sends may be ahead of their receives, in any order. One whose last but one is outstanding is refused, also if
    that is the only one, and changes nothing."""
    buffer = world.buffer()
    works = [Work(buffer.group_size, 9, 128, 2 * buffer.group_size, 3, seed=20 + i) for i in range(3)]
    for order in ((1, 0), (0, 1)):
        pending = [staged(world, buffer, work) for work in works[:2]]
        try:
            staged(world, buffer, works[2])
            raise AssertionError("a third staged dispatch was accepted")
        except epx.BusyError as error:
            assert "max_inflight" in str(error)
        for i in order:
            recv, counts, handle, _event, hook = pending[i]
            hook()
            check_received(buffer, works[i], 16, recv, counts, handle)
    pending = [staged(world, buffer, work) for work in works[:2]]
    pending[1][4]()
    try:
        staged(world, buffer, works[2])
        raise AssertionError("a staged dispatch into the slot of one that is outstanding was accepted")
    except epx.BusyError as error:
        assert "1 staged" in str(error)
    pending[0][4]()
    for work, (recv, counts, handle, _event, _hook) in zip(works, pending):
        check_received(buffer, work, 16, recv, counts, handle)
    check_one(world, buffer, works[2], 16)


def in_heap(world: World, buffer: deep_ep.Buffer, tensor: torch.Tensor) -> bool:
    """Is the tensor in the low-latency heap?"""
    groups = [pool.group for pool in buffer._engine.pools(True) if pool.device == world.device]
    return any(0 <= tensor.data_ptr() - group.alloc_address < group.alloc_bytes for group in groups)


def whole_heap(world: World, buffer: deep_ep.Buffer, work: Work, most: int) -> torch.Tensor:
    """get_local_buffer_tensor(), which is all that the heap has for tensors and takes nothing of torch's."""
    allocated = torch.cuda.memory_allocated() if world.device.type == "cuda" else 0
    whole = buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True)
    if world.device.type == "cuda":
        assert torch.cuda.memory_allocated() == allocated
    assert whole.shape == (buffer.num_rdma_bytes,) and whole.device == world.device
    pool = buffer._engine.low_latency(world.device, most, work.experts, 2 * work.hidden, work.topk)
    try:
        pool.group.alloc(8192)
        raise AssertionError("there is room beside it")
    except epx.OutOfMemoryError:
        pass
    return whole


def test_the_local_buffer_is_that_of_the_results(world: World) -> None:
    """With hinted bytes get_local_buffer_tensor() needs no second memory. What is written there reaches no result."""
    most, work = 8, Work(world.nranks, 6, 256, 2 * world.nranks, 2, seed=35)
    nbytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(most, work.hidden, world.nranks, work.experts)
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, nbytes, low_latency_mode=True, explicitly_destroy=True)
    for cast in ("bf16", "fp8", "bf16"):
        check_one(world, buffer, work, most, cast)
        whole = whole_heap(world, buffer, work, most)
        again = buffer.get_local_buffer_tensor(torch.bfloat16, torch.Size((4, 2)), 16, use_rdma_buffer=True)
        assert again.data_ptr() == whole.data_ptr() + 16
        whole.fill_(0x55)
        del again
        check_one(world, buffer, work, most, cast)  # its results are torch's
        assert whole.eq(0x55).all()
        del whole
    held = dispatch(world, buffer, work, most, use_fp8=False)
    beside = buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True).fill_(0x55)
    assert not in_heap(world, buffer, beside)
    check_received(buffer, work, most, *held)
    del beside, held
    sent = staged(world, buffer, work, most)  # its results are torch's
    whole_heap(world, buffer, work, most).fill_(0x55)
    sent[4]()
    check_received(buffer, work, most, *sent[:3])
    buffer.destroy()


def test_the_local_buffer_with_more_experts_per_token(world: World) -> None:
    """A larger top-k than DeepEP's largest makes a new group, whose heap has the bytes of the hint too."""
    most, work = 8, Work(world.nranks, 6, 256, 12 * world.nranks, 12, seed=37)
    nbytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(most, work.hidden, world.nranks, work.experts)
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, nbytes, low_latency_mode=True, explicitly_destroy=True)
    for _ in range(2):
        check_one(world, buffer, work, most)
        whole_heap(world, buffer, work, most).fill_(0x55)
    buffer.destroy()


def test_a_result_that_the_caller_gives(world: World) -> None:
    """The work of an asynchronous combine uses it, whether the caller still has it or not."""
    buffer, me = world.buffer(), world.rank
    work = Work(buffer.group_size, 9, 128, 2 * buffer.group_size, 3, seed=36)
    recv, _counts, handle = dispatch(world, buffer, work, 16, use_fp8=False)
    rows, out = torch.zeros_like(recv), torch.ones_like(world.to(work.x[me]))
    with reads(rows, out):
        combined, event, _hook = buffer.low_latency_combine(
            rows, world.to(work.idx[me]), world.to(work.weights[me]), handle, async_finish=True, out=out)
    event.current_stream_wait()
    assert combined is out and not out.count_nonzero()


def test_hook_that_is_never_called(world: World) -> None:
    """Nor when the garbage collector has to find it, as behind an exception, or has just found it."""
    buffer = world.buffer()
    work = Work(buffer.group_size, 9, 128, 2 * buffer.group_size, 3, seed=30)
    for _ in range(6):
        pending = staged(world, buffer, work)
        del pending
    check_one(world, buffer, work, 16)
    check_hooks_in_cycles(world, buffer, work)
    collect = gc.collect
    with mock.patch.object(gc, "collect", lambda: collect() and 0):
        check_hooks_in_cycles(world, buffer, work)


def check_hooks_in_cycles(world: World, buffer: deep_ep.Buffer, work: Work) -> None:
    me, collects = buffer.rank, gc.isenabled()
    gc.disable()
    try:
        for _ in range(5):
            cycle: List[Any] = [staged(world, buffer, work)]
            cycle.append(cycle)
        del cycle
        for _ in range(5):
            recv, _counts, handle = dispatch(world, buffer, work, 16, use_fp8=False)
            cycle = [handle, buffer.low_latency_combine(
                recv, world.to(work.idx[me]), world.to(work.weights[me]), handle, return_recv_hook=True)]
            cycle.append(cycle)
        del cycle, recv, handle
        check_one(world, buffer, work, 16)
    finally:
        if collects:
            gc.enable()


def test_two_batches_overlap(world: World) -> None:
    """Dispatch A, dispatch B, combine A, combine B, with hooks."""
    buffer = world.buffer()
    works = [Work(buffer.group_size, 9, 128, 2 * buffer.group_size, 3, seed=40 + i) for i in range(2)]
    sent = [staged(world, buffer, work) for work in works]
    back: List[Any] = []
    for work, (recv, counts, handle, _event, hook) in zip(works, sent):
        hook()
        y = world.to(results(work, buffer.rank, check_received(buffer, work, 16, recv, counts, handle)))
        back.append(buffer.low_latency_combine(y, world.to(work.idx[buffer.rank]), world.to(work.weights[buffer.rank]),
                                               handle, return_recv_hook=True))
    for work, (combined, _event, hook) in zip(works, back):
        hook()
        assert calc_diff(combined.cpu(), combine_weighted(work, buffer.rank)) < 1e-5


def test_input_may_change_after_send(world: World) -> None:
    """With a hook the send half has read x, in the order of the current stream, when the call returns."""
    buffer = world.buffer()
    work = Work(buffer.group_size, 16, 256, 2 * buffer.group_size, 3, seed=50)
    x = world.to(work.x[buffer.rank].clone())
    recv, counts, handle, _event, hook = buffer.low_latency_dispatch(
        x, world.to(work.idx[buffer.rank]), 16, work.experts, use_fp8=False, return_recv_hook=True)
    x.fill_(7)
    hook()
    check_received(buffer, work, 16, recv, counts, handle)


def test_both_modes_on_one_buffer(world: World) -> None:
    buffer = world.buffer()
    for seed in range(2):
        exchange_high(world, buffer, Work(buffer.group_size, 20, 256, 2 * buffer.group_size, 3, seed=60 + seed))
        buffer.clean_low_latency_buffer(16, 256, 2 * buffer.group_size)
        check_one(world, buffer, Work(buffer.group_size, 12, 256, 2 * buffer.group_size, 3, seed=60 + seed), 16, "fp8")


def check_nvfp4(world: World, buffer: deep_ep.Buffer, work: Work, most: int, global_scale: Optional[float],
                usual: bool = True, **how: bool) -> None:
    """A dispatch of NVFP4 rows, bit by bit, and the combine that follows (of zeros, if the values are not usual)."""
    me, rows = buffer.rank, buffer.group_size * most
    given = {} if global_scale is None else dict(x_global_scale=world.to(torch.tensor(global_scale)))
    (codes, scales), counts, handle = dispatch(world, buffer, work, most, use_nvfp4=True, **given, **how)
    tiles = -(-rows // 128)
    assert codes.shape == (rows, work.hidden // 2, work.local) and codes.dtype == torch.uint8
    assert scales.shape == (32, 4, tiles, 4, work.hidden // 64, work.local) and scales.dtype == torch.float8_e4m3fn
    # What matrix kernels get is the memory in its own order.
    assert codes.permute(2, 0, 1).is_contiguous() and scales.permute(5, 2, 4, 0, 1, 3).is_contiguous()
    flat = scales.cpu().view(torch.uint8).permute(5, 2, 1, 0, 4, 3).reshape(work.local, tiles * 128, work.hidden // 16)
    full = torch.zeros(work.local, rows, work.hidden, dtype=torch.bfloat16)
    for expert, places in enumerate(work.by_expert(me)):
        n = len(places)
        assert int(counts[expert]) == n
        if n:
            sent = torch.stack([work.x[s][t] for s, t in places])
            want_codes, want_scales = cast_nvfp4(sent, global_scale or 1.0)
            assert same_bits(codes[:n, :, expert].cpu(), want_codes)
            assert same_bits(flat[expert, :n], want_scales.view(torch.uint8))
            if usual:
                again = uncast_nvfp4(want_codes, want_scales, global_scale or 1.0)
                assert calc_diff(again, sent) < 0.02
                full[expert, :n] = sent
    out, event, hook = buffer.low_latency_combine(
        world.to(results(work, me, full)), world.to(work.idx[me]), world.to(work.weights[me]), handle, **how)
    wait_for(event, hook, how.get("async_finish", False), how.get("return_recv_hook", False))
    if usual:
        assert calc_diff(out.cpu(), combine_weighted(work, me)) < 1e-5
    else:
        assert not out.any()


def unusual(work: Work) -> Work:
    """Rows of zeros, of values at the ends of the range, of infinities, of NaN, of ties between codes."""
    ties = torch.tensor([6, .25, .75, 1.25, 1.75, 2.5, 3.5, 5, 0, -.25, -5, -2.5, -.75, -3.5, 4, -6])
    ends = torch.tensor([3.3e38, -3.3e38, 1e-38, 1e-40, -9e-41, 0, 1, -1])
    for x in work.x:
        for t in range(len(x)):
            x[t] *= (1, 0, -0.0, 2.0 ** 100, 2.0 ** -100, 1, 1, 1)[t % 8]
            if t % 8 == 0:
                x[t] = ties.repeat(len(x[t]) // 16)
            elif t % 8 == 5:
                x[t] = ends.repeat(len(x[t]) // 8)
            elif t % 8 > 5:
                x[t, ::37] = float("nan") if t % 8 == 6 else float("-inf")
    return work


def test_nvfp4(world: World) -> None:
    for buffer in world.buffers():
        for tokens, hidden, most, scale in ((9, 64, 16, None), (20, 256, 33, 12.5), (3, 448, 8, 0.4)):
            work = Work(world.nranks, tokens, hidden, 2 * world.nranks, 3, seed=200 + most)
            check_nvfp4(world, buffer, work, most, scale)
            check_nvfp4(world, buffer, work, most, scale, return_recv_hook=True)
            check_nvfp4(world, buffer, work, most, scale, async_finish=True)
        strange = unusual(Work(world.nranks, 20, 192, 2 * world.nranks, 3, seed=212))
        for scale in (None, 1e-39, 1e-20, 3e38, 448 * 6 / 5.0):
            check_nvfp4(world, buffer, strange, 33, scale, False)
        work = Work(world.nranks, 8, 7168, world.nranks, 2, seed=210)
        check_nvfp4(world, buffer, work, 8, 448 * 6 / 4.5)
    narrow = Work(world.nranks, 8, 96, world.nranks, 2, seed=211)
    for what, given, options in (
            ("x_global_scale", work, dict(x_global_scale=world.to(torch.tensor(1.0)))),
            ("multiple of 64", narrow, dict(use_nvfp4=True)),
            ("x_global_scale", work, dict(use_nvfp4=True, x_global_scale=world.to(torch.ones(2))))):
        with refused(what):
            dispatch(world, world.buffer(), given, 8, **options)


def write_rows(world: World, x: torch.Tensor, rows: torch.Tensor, signals: torch.Tensor, per_expert: int,
               threshold: int) -> None:
    """What the down projection does: writes the rows of one expert after the other, block by block, and adds to the
    signal of a block as often as `threshold` says."""
    side = torch.cuda.Stream() if x.is_cuda else None
    with torch.cuda.stream(side) if side else contextlib.nullcontext():
        for expert in range(x.shape[0]):
            block = -(-x.shape[1] // per_expert)
            for i in range(per_expert):
                x[expert, i * block:(i + 1) * block] = rows[expert, i * block:(i + 1) * block]
                for _ in range(threshold):
                    signals.view(-1)[expert * per_expert + i] += 1
            time.sleep(0.002)
    if side:
        torch.cuda.current_stream().wait_stream(side)


def check_overlap(world: World, buffer: deep_ep.Buffer, work: Work, most: int, block: int, how: str) -> None:
    """A combine that is issued before its rows are written; rows that it reads too early are NaN."""
    me, rows = buffer.rank, buffer.group_size * most
    _recv, counts, handle = dispatch(world, buffer, work, most, use_fp8=False)
    full = torch.zeros(work.local, rows, work.hidden, dtype=torch.bfloat16)
    for expert, places in enumerate(work.by_expert(me)):
        for n, (s, t) in enumerate(places):
            full[expert, n] = work.x[s][t]
    x, done = torch.full_like(world.to(full), float("nan")), world.to(results(work, me, full))
    per_expert = -(-rows // block) if block else 1
    signals = world.to(torch.zeros(work.local * per_expert, dtype=torch.int32))
    given = dict(comp_signal=signals, block_m=block, threshold=3, packed_recv_count=counts) if block else \
        dict(src_signals=signals, src_signal_expect_value=1)
    if world.device.type == "cuda":
        # CUDA loads code at its first use, and waits for running kernels then, the combine among them.
        write_rows(world, x.clone(), done, signals.clone(), per_expert, 1)
        torch.cuda.synchronize()

    def combine(**more: Any) -> Any:
        return buffer.low_latency_combine(x, world.to(work.idx[me]), world.to(work.weights[me]), handle, overlap=True,
                                          num_sms=2, **given, **more)
    write = lambda: write_rows(world, x, done, signals, per_expert, 3 if block else 1)  # noqa: E731
    if how == "thread":
        writer = threading.Thread(target=write)
        writer.start()
        out, event, hook = combine()
        writer.join()
    else:
        out, event, hook = combine(**{how: True})
        write()
    wait_for(event, hook, how == "async_finish", how == "return_recv_hook")
    assert calc_diff(out.cpu(), combine_weighted(work, me)) < 1e-5


def test_overlap(world: World) -> None:
    """SGLang's single-batch overlap: rows are sent as the signals of the kernel that computes them arrive."""
    for buffer in world.buffers():
        for block in (0, 4, 64):
            work = Work(world.nranks, 9, 256, 3 * world.nranks, 3, seed=220 + block)
            for how in ("return_recv_hook", "async_finish", "thread"):
                if how != "thread" or world.device.type == "cpu":
                    check_overlap(world, buffer, work, 16, block, how)
        check_one(world, buffer, work, 16)
    for what, options in (("comp_signal", dict()), ("block_m", dict(comp_signal=torch.zeros(1), block_m=0)),
                          ("src_signal_expect_value", dict(src_signals=torch.zeros(1))),
                          ("src_signals", dict(src_signals=torch.zeros(1), src_signal_expect_value=1))):
        _recv, _counts, handle = dispatch(world, world.buffer(), work, 16)
        with refused(what):
            world.buffer().low_latency_combine(
                world.to(torch.zeros(3, 16 * world.nranks, 256, dtype=torch.bfloat16)), world.to(work.idx[world.rank]),
                world.to(work.weights[world.rank]), handle, overlap=True, **options)  # type: ignore[arg-type]


def test_overlap_has_a_deadline(world: World) -> None:
    """A signal that never comes ends the combine on all ranks."""
    # It is the deadline of the creation of the group, too, which takes longer on a GPU that ranks share.
    with environment(EPX_TIMEOUT_MS=world.deadline(700 if world.device.type == "cpu" else 3000)):
        buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True)
        work = Work(world.nranks, 8, 128, world.nranks, 2, seed=230)
        _recv, _counts, handle = dispatch(world, buffer, work, 8, use_fp8=False)
        x = world.to(torch.zeros(1, 8 * world.nranks, 128, dtype=torch.bfloat16))
        signals = world.to(torch.zeros(1, dtype=torch.int32) + (world.rank > 0))
        try:
            buffer.low_latency_combine(x, world.to(work.idx[world.rank]), world.to(work.weights[world.rank]), handle,
                                       overlap=True, src_signals=signals, src_signal_expect_value=1)
            if world.device.type == "cuda":
                torch.cuda.synchronize()
                dispatch(world, buffer, work, 8)
        except epx.EpxError as error:
            assert isinstance(error, epx.TimeoutExpired) or world.rank, error
        else:
            raise AssertionError("expected the deadline to expire")
        world.meet()
        buffer.destroy()


def test_size_hint_is_enough(world: World) -> None:
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(16, 256, world.nranks, 2 * world.nranks)
    assert 0 < hint < 1 << 32
    larger = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=32, hidden=256, num_ranks=world.nranks, num_experts=2 * world.nranks)
    assert larger > hint
    assert os.environ.get("EPX_RANKS_PER_NODE") is None
