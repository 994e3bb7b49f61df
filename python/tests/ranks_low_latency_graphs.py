# SPDX-License-Identifier: Apache-2.0
"""deep_ep's low latency in graphs, and with masked ranks."""

import contextlib
import os
import time
from typing import Any, Callable, Iterator, List, Tuple

import deep_ep
import epx
import numpy
import torch
import torch.distributed as dist
from deep_ep._low_latency import LowLatencyRouting
from deep_ep._routing import find
from ranks_low_latency import check_one, dispatch, whole_heap
from reference import Work, calc_diff, same_bits
from suite import World, environment, refused


def weighted(work: Work, rank: int) -> torch.Tensor:
    """The sums of a rank whose experts have returned its rows as they came."""
    total = torch.zeros(work.x[rank].shape)
    for k in range(work.topk):
        weight = torch.where(work.idx[rank][:, k:k + 1] >= 0, work.weights[rank][:, k:k + 1], 0.0)
        total += weight * work.x[rank].float()
    return total.bfloat16()


def captured(world: World, calls: Callable[[], Any]) -> Tuple[Any, Any]:
    """A graph of these calls, and what they return. Ranks that share a GPU: nobody waits for another one while that
    instantiates a graph."""
    torch.cuda.synchronize()
    world.meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = calls()
    world.meet()
    return graph, result


def test_graph(world: World) -> None:
    """A captured dispatch and combine, replayed with other tokens and other routing in the same tensors, also after a
    larger group has replaced that of the graph."""
    world.only("cuda")
    buffer, me, most = world.buffer(), world.rank, 13  # of no other test: so the group is the graph's
    works = [Work(world.nranks, 12, 256, 2 * world.nranks, 3, seed=80 + i, uneven=False) for i in range(4)]
    x, idx, weights = (world.to(t[me].clone()) for t in (works[0].x, works[0].idx, works[0].weights))

    def both() -> torch.Tensor:
        recv, _counts, handle, _event, hook = buffer.low_latency_dispatch(
            x, idx, most, works[0].experts, use_fp8=False, return_recv_hook=True)
        hook()
        combined, _event, hook = buffer.low_latency_combine(recv, idx, weights, handle, return_recv_hook=True)
        hook()
        return combined

    both()
    graph, combined = captured(world, both)
    for work in works[1:]:
        x.copy_(work.x[me])
        idx.copy_(work.idx[me])
        weights.copy_(work.weights[me])
        graph.replay()
        assert calc_diff(combined.cpu(), weighted(work, me)) < 1e-5
        check_one(world, buffer, work, most)  # between replays, with handles of its own
        check_one(world, buffer, Work(world.nranks, 12, 1024, work.experts, 3, seed=84), most)


def test_graph_with_two_streams(world: World) -> None:
    """Two batches in one graph, one of them on the communication stream. The branches of a graph run side by side; the
    operations of a group begin in the same order on all ranks nevertheless."""
    world.only("cuda")
    buffer, me = world.buffer(), world.rank
    works = [Work(world.nranks, 12, hidden, 2 * world.nranks, 3, seed=hidden, uneven=False) for hidden in (256, 128)]
    x, idx, weights = ([world.to(t[me]) for t in of] for of in zip(*((w.x, w.idx, w.weights) for w in works)))

    def both() -> List[torch.Tensor]:
        first, second = (buffer.low_latency_dispatch(
            x[i], idx[i], 16, works[i].experts, use_fp8=False, async_finish=i == 0, return_recv_hook=i == 1)
            for i in range(2))
        second[4]()
        first[3].current_stream_wait()
        back = [buffer.low_latency_combine(sent[0], idx[i], weights[i], sent[2], async_finish=i == 0,
                                           return_recv_hook=i == 1) for i, sent in enumerate((first, second))]
        back[1][2]()
        back[0][1].current_stream_wait()
        return [combined for combined, _event, _hook in back]

    both()
    graph, sums = captured(world, both)
    for _ in range(20):
        for combined in sums:
            combined.zero_()
        graph.replay()
        for combined, work in zip(sums, works):
            assert calc_diff(combined.cpu(), weighted(work, me)) < 1e-5


def test_graph_with_many_handles(world: World) -> None:
    """A capture that needs more handles than the buffer has spare ones allocates them."""
    world.only("cuda")
    buffer, me, count = world.buffer(), world.rank, 7
    work = Work(world.nranks, 12, 256, 2 * world.nranks, 5, seed=97, uneven=False)  # a top-k of no other test
    x, idx, weights = (world.to(t[me]) for t in (work.x, work.idx, work.weights))

    def pairs() -> List[torch.Tensor]:
        sent = [buffer.low_latency_dispatch(x, idx, 16, work.experts, use_fp8=False) for _ in range(count)]
        return [buffer.low_latency_combine(recv.clone(), idx, weights, handle)[0]
                for recv, _counts, handle, _event, _hook in sent]

    check_one(world, buffer, work, 16)
    graph, sums = captured(world, pairs)
    graph.replay()
    for combined in sums:
        assert calc_diff(combined.cpu(), weighted(work, me)) < 1e-5


def test_the_local_buffer_beside_graphs(world: World) -> None:
    """get_local_buffer_tensor() needs no second memory where graphs have results in the heap."""
    world.only("cuda")
    most, work = 8, Work(world.nranks, 6, 128, 2 * world.nranks, 2, seed=98, uneven=False)
    x, idx, weights = (world.to(t[world.rank]) for t in (work.x, work.idx, work.weights))
    nbytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(most, work.hidden, world.nranks, work.experts)
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, nbytes, low_latency_mode=True, explicitly_destroy=True)

    def pair() -> torch.Tensor:
        recv, _counts, handle, _event, _hook = buffer.low_latency_dispatch(x, idx, most, work.experts, use_fp8=False)
        return buffer.low_latency_combine(recv, idx, weights, handle)[0]

    check_one(world, buffer, work, most)
    graph, combined = captured(world, pair)
    for _ in range(2):
        whole_heap(world, buffer, work, most).zero_()
        torch.cuda.synchronize()
        world.meet()
        graph.replay()
        assert calc_diff(combined.cpu(), weighted(work, world.rank)) < 1e-5
        check_one(world, buffer, work, most)
    del graph
    buffer.destroy()


def test_a_graph_keeps_its_group(world: World) -> None:
    """A group that was captured into a graph and then replaced lives as long as the buffer, and a handle that a graph
    uses is no eager call's. recover() frees it only if the graphs are released."""
    groups: List[epx.Group] = []
    kept: List[int] = []
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, 1 << 20, low_latency_mode=True, explicitly_destroy=True)
    for hidden, captured in ((128, "dispatch"), (256, "combine"), (384, ""), (512, "")):
        work = Work(world.nranks, 6, hidden, 2 * world.nranks, 2, seed=86)
        pool = buffer._engine.low_latency(world.device, 8, work.experts, 2 * hidden, work.topk)
        captures, pool.capturing = pool.capturing, lambda: captured == "dispatch"  # as in a capture
        recv, _counts, handle = dispatch(world, buffer, work, 8, use_fp8=False)
        pool.capturing = lambda: captured == "combine"
        buffer.low_latency_combine(recv, world.to(work.idx[world.rank]), world.to(work.weights[world.rank]), handle)
        pool.capturing = captures
        groups.append(pool.group)
        del recv, handle
        kept.append(len(pool.free_handles(work.topk, True)))
    assert [group.alive for group in groups] == [True, True, False, True] and kept == [1, 1, 0, 0], (groups, kept)
    try:
        buffer.recover()
        raise AssertionError("recover() frees what graphs use")
    except epx.UsageError as error:
        assert "graphs_released=True" in str(error) and groups[0].alive, error
    world.meet()
    buffer.recover(graphs_released=True)
    assert not any(group.alive for group in groups)
    buffer.destroy()


def test_mask_query_beside_a_graph(world: World) -> None:
    """The mask is asked for on one stream while a graph is replayed on another: neither disturbs the other."""
    world.only("cuda")
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, 1 << 20, low_latency_mode=True, enable_shrink=True,
                            explicitly_destroy=True)
    work = Work(world.nranks, 12, 256, 2 * world.nranks, 3, seed=90, uneven=False)
    x, idx, weights = (world.to(t[world.rank]) for t in (work.x, work.idx, work.weights))

    def both() -> torch.Tensor:
        recv, _counts, handle, _event, _hook = buffer.low_latency_dispatch(x, idx, 16, work.experts, use_fp8=False)
        return buffer.low_latency_combine(recv, idx, weights, handle)[0]

    expected = both().clone()
    aside = torch.cuda.Stream()
    graph, combined = captured(world, both)
    statuses = [torch.full((world.nranks,), 9, dtype=torch.int32, device=world.device) for _ in range(20)]
    torch.cuda.synchronize()
    for status in statuses:
        graph.replay()
        with torch.cuda.stream(aside):
            buffer.low_latency_query_mask_buffer(status)
    torch.cuda.synchronize()
    assert same_bits(combined, expected.cpu())
    assert all(status.tolist() == [0] * world.nranks for status in statuses)
    world.meet()
    buffer.destroy()


def go_on_without(world: World, buffer: deep_ep.Buffer, work: Work, missing: int) -> None:
    """Both operations without one rank, which is masked afterwards."""
    status = torch.full((world.nranks,), 9, dtype=torch.int32, device=world.device)
    recv, _counts, handle = dispatch(world, buffer, work, 8, use_fp8=False)
    buffer.low_latency_query_mask_buffer(status)
    assert status.nonzero().flatten().tolist() == [missing]
    combined, _event, _hook = buffer.low_latency_combine(
        recv, world.to(work.idx[world.rank]), world.to(work.weights[world.rank]), handle)
    check_without(work, world.rank, missing, combined.cpu())


def test_masks(world: World) -> None:
    """A rank that does not come is masked after the timeout, the others go on, and it comes back by a clean. So does
    one that was masked by hand."""
    if world.nranks < 3:
        return
    with environment(EPX_TIMEOUT_MS=world.deadline(1500)):
        buffer = deep_ep.Buffer(dist.group.WORLD, 0, 1 << 20, low_latency_mode=True, enable_shrink=True,
                                explicitly_destroy=True)
        late = world.nranks - 1
        work = Work(world.nranks, 6, 128, 2 * world.nranks, 2, seed=70)
        status = torch.full((world.nranks,), 9, dtype=torch.int32, device=world.device)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [0] * world.nranks
        buffer.low_latency_clean_mask_buffer()
        check_one(world, buffer, work, 8)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [0] * world.nranks
        world.meet()
        if world.rank != late:
            go_on_without(world, buffer, work, late)
        world.meet()
        buffer.low_latency_query_mask_buffer(status)  # also on the rank that was left out
        assert world.rank == late or status.tolist() == [0] * late + [1]
        buffer.low_latency_clean_mask_buffer()
        check_one(world, buffer, work, 8)
        for mask in (True, False, True):  # until an operation it can be taken back
            buffer.low_latency_update_mask_buffer(late, mask)
            buffer.low_latency_query_mask_buffer(status)
            assert status.tolist() == [0] * late + [int(mask)]
        if world.rank != late:
            go_on_without(world, buffer, work, late)
            with refused_use("low_latency_clean_mask_buffer"):
                buffer.low_latency_update_mask_buffer(late, False)
            larger_than_the_group(world, buffer, late)
            go_on_without(world, buffer, work, late)
        world.meet()
        buffer.low_latency_clean_mask_buffer()
        check_one(world, buffer, work, 8)
        check_one(world, buffer, Work(world.nranks, 6, 128, 2 * world.nranks, min(12, 2 * world.nranks), seed=71), 8)
        world.meet()
        if world.rank == 0:
            clean_alone(buffer)
        world.meet()
        buffer.low_latency_clean_mask_buffer()
        check_one(world, buffer, work, 8)
        buffer.destroy()


def test_a_mask_that_cannot_be_taken_back(world: World) -> None:
    """Two groups, one of which has gone on without a rank: the mask of neither changes. recover() forgets masks."""
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, 1 << 20, low_latency_mode=True, enable_shrink=True,
                            explicitly_destroy=True)
    work, late = Work(world.nranks, 6, 128, 2 * world.nranks, 2, seed=71), world.nranks - 1
    for most in (8, 16):
        check_one(world, buffer, work, most)
    world.meet()
    pools = buffer._engine.low_latency_pools()
    if world.rank != late:
        pools[1].group.mask_update([int(r != late) for r in range(world.nranks)])
        dispatch(world, buffer, work, 16)
        try:
            buffer.low_latency_update_mask_buffer(late, False)
        except RuntimeError:
            pass
        else:
            raise AssertionError("a rank that has missed operations came back")
        assert [int(pool.active()[late]) for pool in pools] == [1, 0]
    world.meet()
    buffer.low_latency_update_mask_buffer(world.rank, True)
    buffer.recover()
    status = torch.full((world.nranks,), 9, dtype=torch.int32, device=world.device)
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0] * world.nranks
    world.meet()
    buffer.destroy()


def test_masks_reach_graphs(world: World) -> None:
    """A mask is there for the next replay of a graph, which no call of the buffer precedes: at once, and in a group
    that a larger one has replaced too. So is its end."""
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, 1 << 20, low_latency_mode=True, enable_shrink=True,
                            explicitly_destroy=True)
    last = world.nranks - 1
    works = [Work(world.nranks, 6, hidden, 2 * world.nranks, 2, seed=73) for hidden in (128, 256)]
    pools = []
    for work in works:
        pools.append(buffer._engine.low_latency(world.device, 8, work.experts, 2 * work.hidden, work.topk))
        pools[-1].captured = True
        check_one(world, buffer, work, 8)
    assert pools[0] is not pools[1]
    status = torch.zeros(world.nranks, dtype=torch.int32, device=world.device)
    for mask in (True, False, True):
        buffer.low_latency_update_mask_buffer(last, mask)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [0] * last + [int(mask)]
        for pool in pools if world.rank != last else ():
            assert pool.active().tolist() == [1] * last + [int(not mask)]
    world.meet()
    if world.rank != last:
        go_on_without(world, buffer, works[1], last)
        with refused_use("low_latency_clean_mask_buffer"):
            buffer.low_latency_update_mask_buffer(last, False)
        assert [pool.active()[last].item() for pool in pools] == [0, 0]
    world.meet()
    buffer.low_latency_clean_mask_buffer()
    assert all(pool.active().tolist() == [1] * world.nranks for pool in pools)
    check_one(world, buffer, works[1], 8)
    buffer.destroy()


def combine_as_received(world: World, buffer: deep_ep.Buffer, work: Work, recv: torch.Tensor, handle: Any) -> Any:
    """A combine of what was received."""
    return buffer.low_latency_combine(
        recv, world.to(work.idx[world.rank]), world.to(work.weights[world.rank]), handle)[0]


def test_graphs_of_some_ranks(world: World) -> None:
    """One rank captures, the others do not: cleaning masks, which is collective, needs the same groups on all ranks. A
    group that was captured before a larger one replaced it stays on all of them; one that was captured later does not
    count."""
    with environment(EPX_TIMEOUT_MS=world.deadline(3000)):
        buffer = deep_ep.Buffer(dist.group.WORLD, 0, 1 << 20, low_latency_mode=True, enable_shrink=True,
                                explicitly_destroy=True)
        pools, kept = [], []
        for hidden, later in ((128, False), (256, True), (384, True)):
            work = Work(world.nranks, 6, hidden, 2 * world.nranks, 2, seed=74)
            recv, _counts, handle = dispatch(world, buffer, work, 8, use_fp8=False)
            pools.append(find(LowLatencyRouting, handle).pool)
            if later:
                larger = Work(world.nranks, 6, hidden + 64, 2 * world.nranks, 2, seed=75)
                check_one(world, buffer, larger, 8)
            captures, pools[-1].capturing = pools[-1].capturing, lambda: world.rank == 0  # as in a capture
            combine_as_received(world, buffer, work, recv, handle)
            pools[-1].capturing = captures
            kept.append(handle)
        world.meet()
        buffer.low_latency_clean_mask_buffer()
        check_one(world, buffer, larger, 8)
        world.meet()
        del handle, recv
        kept.clear()
        assert [pool.closed for pool in pools] == [False] + [world.rank > 0] * 2
        buffer.destroy()


def test_masks_reach_handles_of_replaced_groups(world: World) -> None:
    """A combine whose group a larger one has replaced does not wait for a rank that was masked since."""
    with environment(EPX_TIMEOUT_MS=world.deadline(20000)):
        buffer = deep_ep.Buffer(dist.group.WORLD, 0, 1 << 20, low_latency_mode=True, enable_shrink=True,
                                explicitly_destroy=True)
        last = world.nranks - 1
        works = [Work(world.nranks, 6, hidden, 2 * world.nranks, 2, seed=76) for hidden in (128, 256)]
        sent = [dispatch(world, buffer, work, 8, use_fp8=False) for work in works]
        world.meet()
        if world.rank != last:
            for mask in (True, False, True):
                buffer.low_latency_update_mask_buffer(last, mask)
            begin = time.monotonic()
            for work, (recv, _counts, handle) in zip(works, sent):
                out = combine_as_received(world, buffer, work, recv, handle)
                check_without(work, world.rank, last, out.cpu())
            assert time.monotonic() - begin < 10
        world.meet()
        buffer.destroy()


def test_masks_in_a_capture(world: World) -> None:
    """A capture takes the query, and keeps the group. What waits on the host is refused."""
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, 1 << 20, low_latency_mode=True, enable_shrink=True,
                            explicitly_destroy=True)
    work = Work(world.nranks, 6, 128, 2 * world.nranks, 2, seed=77)
    check_one(world, buffer, work, 8)
    pool = buffer._engine.low_latency_pools()[0]
    captures, pool.capturing = pool.capturing, lambda: True  # as in a capture
    for call in (lambda: buffer.low_latency_update_mask_buffer(world.nranks - 1, True),
                 buffer.low_latency_clean_mask_buffer):
        with refused_use("captured into a graph"):
            call()
    assert not pool.captured
    status = torch.full((world.nranks,), 9, dtype=torch.int32, device=world.device)
    buffer.low_latency_query_mask_buffer(status)
    assert pool.captured and status.tolist() == [0] * world.nranks
    pool.capturing = captures
    world.meet()
    buffer.destroy()


def test_graph_with_a_mask_query(world: World) -> None:
    """A replay reads the mask as it is then."""
    world.only("cuda")
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, 1 << 20, low_latency_mode=True, enable_shrink=True,
                            explicitly_destroy=True)
    last = world.nranks - 1
    check_one(world, buffer, Work(world.nranks, 6, 128, 2 * world.nranks, 2, seed=78), 8)
    status = torch.full((world.nranks,), 9, dtype=torch.int32, device=world.device)
    buffer.low_latency_query_mask_buffer(status)
    graph, _none = captured(world, lambda: buffer.low_latency_query_mask_buffer(status))
    for mask in (False, True, False):
        if world.rank != last:
            buffer.low_latency_update_mask_buffer(last, mask)
            status.fill_(9)
            graph.replay()
            assert status.tolist() == [0] * last + [int(mask)]
    world.meet()
    buffer.destroy()


def test_ranks_to_mask(world: World) -> None:
    """Integers of any kind; True is none."""
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, 1 << 20, low_latency_mode=True, enable_shrink=True,
                            explicitly_destroy=True)
    check_one(world, buffer, Work(world.nranks, 6, 128, 2 * world.nranks, 2, seed=79), 8)
    status = torch.zeros(world.nranks, dtype=torch.int32, device=world.device)
    for rank in (numpy.int64(1), numpy.uint8(1), 1, torch.tensor(1)):
        for mask in (True, False):
            buffer.low_latency_update_mask_buffer(rank, mask)
            buffer.low_latency_query_mask_buffer(status)
            assert status.tolist() == [0, int(mask)] + [0] * (world.nranks - 2)
    for wrong in (True, False, numpy.bool_(True), 1.0, "1", None, -1, world.nranks):
        with refused("rank_to_mask"):
            buffer.low_latency_update_mask_buffer(wrong, True)
    buffer.low_latency_query_mask_buffer(status)
    assert not status.any()
    world.meet()
    buffer.destroy()


@contextlib.contextmanager
def refused_use(what: str) -> Iterator[None]:
    """What is done here is refused with a sentence that has `what`."""
    try:
        yield
    except epx.UsageError as error:
        assert what in str(error), error
    else:
        raise AssertionError("expected an error about " + what)


def larger_than_the_group(world: World, buffer: deep_ep.Buffer, masked: int) -> None:
    """What would need a new group, for which a masked rank would be needed, is refused at once."""
    begin, experts = time.monotonic(), 2 * world.nranks
    for tokens, hidden, topk in ((8, 128, 12), (8, 256, 2), (9, 128, 2))[experts < 12:]:
        try:
            dispatch(world, buffer, Work(world.nranks, 6, hidden, experts, topk, seed=72), tokens)
            raise AssertionError("a group was created without a masked rank")
        except epx.UsageError as error:
            assert "rank %d is masked" % masked in str(error) and "top-k %d" % topk in str(error), error
    assert time.monotonic() - begin < 5


def clean_alone(buffer: deep_ep.Buffer) -> None:
    """A clean that the other ranks do not call ends after at most twice the deadline, names one of them, and can be
    repeated."""
    begin, deadline_s = time.monotonic(), int(os.environ["EPX_TIMEOUT_MS"]) / 1000
    try:
        buffer.low_latency_clean_mask_buffer()
        raise AssertionError("a clean by one rank alone came back")
    except epx.TimeoutExpired as error:
        assert "rank" in str(error), error
    took_s = time.monotonic() - begin
    assert took_s < 2 * deadline_s + 3, (took_s, deadline_s)


def check_missing_from_the_start(world: World) -> None:
    """With hinted bytes the ranks meet when a buffer is made: one of them may leave before the first operation, and
    another one may not come to clean the buffer."""
    gone, late, most, experts = world.nranks - 1, world.nranks - 2, 8, 2 * world.nranks
    work = Work(world.nranks, 6, 128, experts, 2, seed=71)
    nbytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(most, 128, world.nranks, experts)
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, nbytes, low_latency_mode=True, enable_shrink=True,
                            explicitly_destroy=True)
    status = torch.full((world.nranks,), 9, dtype=torch.int32, device=world.device)
    if world.rank != gone:
        go_on_without(world, buffer, work, gone)
        if world.rank != late:
            buffer.clean_low_latency_buffer(most, 128, experts)
            buffer.low_latency_query_mask_buffer(status)
            assert status.nonzero().flatten().tolist() == [late, gone]
    buffer.destroy()
    world.meet()


def test_missing_from_the_start(world: World) -> None:
    with environment(EPX_TIMEOUT_MS=world.deadline(1500)):
        check_missing_from_the_start(world)


def test_missing_from_the_start_between_nodes(world: World) -> None:
    world.node_buffer()  # sets the environment
    with environment(EPX_TIMEOUT_MS=world.deadline(1500)):
        check_missing_from_the_start(world)


def check_without(work: Work, me: int, missing: int, combined: torch.Tensor) -> None:
    """The combined rows where experts of a missing rank add nothing."""
    out = torch.zeros(work.x[me].shape)
    for t, row in enumerate(work.idx[me].tolist()):
        for k, e in enumerate(row):
            if e >= 0 and e // work.local != missing:
                out[t] += work.weights[me][t, k] * work.x[me][t].float()
    assert calc_diff(combined, out.bfloat16()) < 1e-5
