# SPDX-License-Identifier: Apache-2.0
"""ElasticBuffer against a plain reference: dispatch with and without expansion, handles, combine's order."""

import contextlib
import pickle
from typing import Any, Dict, Iterator, Tuple

import deep_ep
import epx
import torch
import torch.distributed as dist
from elastic_reference import Expanded, combined, flat_results, parts, rough, up
from reference import Work, cast_fp8, same_bits
from suite import Skipped, World, as_in_a_capture, environment, reads, refused_in_a_capture

MAX = 24  # num_max_tokens_per_rank
HIDDEN = 128
BYTES = 4 << 20


@contextlib.contextmanager
def elastic(world: World, nodes: int = 1, kind: Any = deep_ep.ElasticBuffer, **options: Any) -> Iterator[Any]:
    """A buffer of all ranks, on one node or on nodes cut out of this machine."""
    cut = {} if nodes == 1 else {"EPX_RANKS_PER_NODE": str(world.nranks // nodes), "EPX_NET": "ofi:tcp"}
    if nodes > 1 and not world._nodes:
        raise Skipped("EPX_TEST_NODES=0")
    given: Dict[str, Any] = dict(num_max_tokens_per_rank=MAX, hidden=HIDDEN, num_topk=4, explicitly_destroy=True)
    with environment(**cut):
        buffer = kind(dist.group.WORLD, **{**given, **options})
        yield buffer
        buffer.destroy()


def make_work(world: World, seed: int = 1, topk: int = 4, hidden: int = HIDDEN, local: int = 3, **options: Any) -> Work:
    """Inputs of all ranks; the last rank has no tokens where the seed is odd."""
    return Work(world.nranks, MAX, hidden, local * world.nranks, topk, seed, **options)


def send(world: World, buffer: deep_ep.ElasticBuffer, work: Work, x: Any = None, **options: Any) -> Tuple[Any, ...]:
    """A dispatch of this rank's inputs."""
    me = world.rank
    rows = tuple(map(world.to, x)) if isinstance(x, tuple) else world.to(work.x[me] if x is None else x)
    return buffer.dispatch(rows, **{**dict(topk_idx=world.to(work.idx[me]), topk_weights=world.to(work.weights[me]),
                                           num_experts=work.experts), **options})


def crowded(work: Work) -> Work:
    """All tokens go to the experts of rank 1: the others receive nothing."""
    for idx in work.idx:
        idx[:, 0] = torch.where(idx[:, 0] < 0, -1, idx[:, 0] % work.local + work.local)
        idx[:, 1:] = -1
    return work


def at_home(work: Work) -> Work:
    """Tokens stay with their rank, the first entry of each without an expert."""
    for rank, idx in enumerate(work.idx):
        idx[:] = rank * work.local + torch.arange(work.topk)
        idx[:, 0] = -1
    return work


def nowhere(work: Work) -> Work:
    """No token has an expert."""
    for idx in work.idx:
        idx.fill_(-1)
    return work


def check_counts(work: Work, me: int, handle: deep_ep.EPHandle, alignment: int, scaleup: int, sync: bool) -> None:
    """The counts of a handle, the same in both layouts but for the ends of experts."""
    ranks = work.flat(me)[0]
    zones = Expanded(work, me, alignment)
    padded = [up(n, alignment) for n in zones.counts]
    sources = torch.bincount(ranks % scaleup, minlength=scaleup).cumsum(0)
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == sources.tolist()
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == zones.counts
    ends = zones.ends if handle.do_expand else torch.tensor(padded).cumsum(0).tolist()
    assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
    for name in ("psum_num_recv_tokens_per_scaleup_rank", "psum_num_recv_tokens_per_expert",
                 "num_unaligned_recv_tokens_per_expert", "recv_src_metadata"):
        assert getattr(handle, name).dtype is torch.int32
    if sync:
        assert handle.num_recv_tokens == len(ranks) and handle.num_expanded_tokens == sum(padded)
        assert handle.num_recv_tokens_per_expert_list == padded
    else:
        tokens = work.nranks * MAX
        assert handle.num_recv_tokens == tokens and handle.num_recv_tokens_per_expert_list == []
        assert handle.num_expanded_tokens == up(
            tokens * min(work.topk, work.local) + (alignment - 1) * work.local, alignment)


def check_flat(world: World, work: Work, result: Tuple[Any, ...], sent: Any, sync: bool, with_weights: bool = True,
               metadata: bool = True) -> None:
    """Rows, indices, weights and sources of a dispatch without expansion."""
    me = world.rank
    recv, recv_idx, recv_weights, handle, _event = result
    ranks, tokens, rows, idx, weights = work.flat(me)
    n, all_rows = len(ranks), len(ranks) if sync else work.nranks * MAX
    for got, want in zip(parts(recv), parts(sent(rows))):
        assert got.shape == (all_rows, *want.shape[1:]) and got.dtype == want.dtype, (got.shape, want.shape)
        assert same_bits(got[:n], want)
    assert recv_idx.shape == (all_rows, work.topk) and torch.equal(recv_idx[:n].cpu(), idx)
    assert (recv_idx[n:] == -1).all()
    if with_weights:
        local = idx >= 0
        assert torch.equal(recv_weights[:n].cpu()[local], weights[local])
    else:
        assert recv_weights is None
    assert handle.recv_src_metadata.shape == (all_rows, work.topk + 2) or not metadata
    assert torch.equal(handle.recv_src_metadata[:n, 0].cpu().long(), ranks * MAX + tokens)


def check_expanded(world: World, work: Work, result: Tuple[Any, ...], sent: Any, alignment: int, sync: bool) -> None:
    """Zones, padding, weights and sources of a dispatch with expansion."""
    me, zones = world.rank, Expanded(work, world.rank, alignment)
    recv, recv_idx, recv_weights, handle, _event = result
    assert recv_idx is None and recv_weights.dim() == 1
    x = len(zones.source)
    all_rows = x if sync else handle.num_expanded_tokens
    for i, got in enumerate(parts(recv)):
        want = zones.rows([parts(sent(rows))[i] for rows in work.x])
        assert got.shape == (all_rows, *want.shape[1:]) and got.dtype == want.dtype
        assert same_bits(got[:x], want)
    assert recv_weights.shape == (all_rows,) and torch.equal(recv_weights[:x].cpu(), zones.weights(work))
    ranks, tokens, *_ = work.flat(me)
    meta = handle.recv_src_metadata.cpu()
    assert meta.shape == (len(ranks) if sync else work.nranks * MAX, work.topk + 2)
    assert torch.equal(meta[:len(ranks), 0].long(), ranks * MAX + tokens)
    place = {at: i for i, at in enumerate(zones.source)}
    for line, s, t in zip(meta.tolist(), ranks.tolist(), tokens.tolist()):
        assert line[2:] == [place.get((s, t, k), -1) for k in range(work.topk)], (line, s, t)


def test_dispatch_without_expansion(world: World) -> None:
    """[E] 4: one row per (token, rank), sorted; LOCAL expert ids or -1; counts, psums, sources; zero tokens on a rank;
    without CPU sync R*M rows of which the rest has -1."""
    for nodes in (1, 2):
        with elastic(world, nodes) as buffer:
            for seed, sync, alignment in ((1, True, 1), (2, True, 5), (3, False, 128)):
                work = make_work(world, seed)
                result = send(world, buffer, work, do_cpu_sync=sync, expert_alignment=alignment)
                check_flat(world, work, result, lambda x: x, sync)
                check_counts(work, world.rank, result[3], alignment, buffer.num_scaleup_ranks, sync)


def test_dispatch_with_expansion(world: World) -> None:
    """[E] 4: a zone per expert at multiples of any alignment, zero padding, 1-D weights, K+2 columns of sources; exact
    with CPU sync, the worst case without; also where one rank receives everything."""
    for nodes in (1, 2):
        with elastic(world, nodes) as buffer:
            for seed, sync, alignment in ((1, True, 16), (2, True, 3), (3, False, 128), (4, True, 1), (5, True, 3)):
                work = make_work(world, seed) if seed < 5 else crowded(make_work(world, seed))
                result = send(world, buffer, work, do_cpu_sync=sync, expert_alignment=alignment, do_expand=True,
                              do_zero_padding=True)
                check_expanded(world, work, result, lambda x: x, alignment, sync)
                check_counts(work, world.rank, result[3], alignment, buffer.num_scaleup_ranks, sync)


def _fp8(work: Work, column_major: bool) -> Any:
    def sent(x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        values, scales = cast_fp8(x)
        return values, scales.t().contiguous().t() if column_major else scales
    return sent


def test_scales(world: World) -> None:
    """[E] 4: (e4m3, scales) of any strides, opaque packs of 4 bytes, up to one per 32 channels; results row-major or
    column-major with rows rounded up to 4."""
    with elastic(world) as buffer:
        work = make_work(world, 2, hidden=256)
        for expand in (False, True):
            for tma in (False, True):
                sent = _fp8(work, tma)
                result = send(world, buffer, work, sent(work.x[world.rank]), do_expand=expand,
                              use_tma_aligned_col_major_sf=tma, expert_alignment=4, do_zero_padding=expand)
                if expand:
                    check_expanded(world, work, result, sent, 4, True)
                else:
                    check_flat(world, work, result, sent, True)
                scales = result[0][1]
                rows = scales.shape[0]
                if tma or (scales.shape[1] > 1 and rows > 1):
                    assert scales.stride() == ((1, up(rows, 4)) if tma else (scales.shape[1], 1)), scales.stride()
        work.idx[world.rank].fill_(-1)
        nothing = send(world, buffer, work, _fp8(work, True)(work.x[world.rank]), use_tma_aligned_col_major_sf=True)
        assert nothing[0][1].stride() == (1, 0)  # no rank sends a row
        work = make_work(world, 2, hidden=256)
        packs = [torch.arange(len(x) * 256 // 32, dtype=torch.int32).view(len(x), 256 // 32) for x in work.x]
        rows_of = [x.view(torch.uint8)[:, :256].contiguous() for x in work.x]
        recv, *_ = send(world, buffer, work, (rows_of[world.rank], packs[world.rank]))
        ranks, tokens, *_ = work.flat(world.rank)
        for i, (s, t) in enumerate(zip(ranks.tolist(), tokens.tolist())):
            assert torch.equal(recv[0][i].cpu(), rows_of[s][t]) and torch.equal(recv[1][i].cpu(), packs[s][t])
        for one in (torch.tensor([[1.5, 2.5]]), torch.tensor([[1.5]])):  # whose strides are 0
            scales = world.to(one + world.rank).expand(len(work.x[world.rank]), 2)
            rows = world.to(rows_of[world.rank])
            with reads(scales):
                recv, _idx, _weights, handle, _event = send(world, buffer, work, (rows, scales))
            assert torch.equal(recv[1].cpu(), one.expand(1, 2) + ranks[:, None])
            with reads(scales):
                again, *_ = buffer.dispatch((rows, scales), handle=handle)
            assert same_bits(again[1], recv[1])


def test_rows_of_any_dtype(world: World) -> None:
    """[E] 4: the dtype is not checked: rows are moved as bytes, and recv_x has x's dtype."""
    with elastic(world) as buffer:
        work = make_work(world, 2)
        for dtype in (torch.uint8, torch.int32, torch.float32, torch.float16, torch.int8, torch.float8_e5m2):
            recv, *_ = send(world, buffer, work, work.x[world.rank].view(dtype))
            assert recv.dtype is dtype and same_bits(recv.view(torch.bfloat16), work.flat(world.rank)[2])
        odd = world.to(torch.cat([torch.zeros(1, dtype=torch.uint8), work.x[world.rank].view(torch.uint8).view(-1)]))
        rows = odd[1:].view(len(work.x[world.rank]), -1)  # whose address is odd
        with reads(rows):
            recv, *_ = buffer.dispatch(rows, world.to(work.idx[world.rank]), num_experts=work.experts)
        assert same_bits(recv.view(torch.bfloat16), work.flat(world.rank)[2])
    with elastic(world, num_bytes=64 << 20, num_max_tokens_per_rank=24, hidden=0) as buffer:
        packed = work.x[world.rank].view(torch.uint8)[:, :HIDDEN // 2].contiguous()  # two values of FP4 in a byte
        recv, _idx, _weights, handle, _event = send(world, buffer, work, packed)
        rows = torch.ones(len(recv), HIDDEN, dtype=torch.bfloat16, device=world.device)
        combined, *_ = buffer.combine(rows, handle)
        assert combined.cpu().float()[:, -1].tolist() == work.ranks_of(world.rank).sum(1).tolist()


def test_indices_of_any_width(world: World) -> None:
    """[E] 1: topk_idx of 8 to 64 bits; recv_topk_idx has its dtype."""
    assert deep_ep.topk_idx_t is torch.int64
    with elastic(world) as buffer:
        work = make_work(world, 2)
        for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
            result = send(world, buffer, work, topk_idx=world.to(work.idx[world.rank].to(dtype)))
            assert result[1].dtype is dtype
            assert torch.equal(result[1].cpu().long(), work.flat(world.rank)[3])
            again = buffer.dispatch(world.to(work.x[world.rank]), handle=result[3])
            assert again[1].dtype is dtype and torch.equal(again[1], result[1])
        few = torch.full((1, world.nranks + 2), -1)  # more entries than experts
        few[0, -1], few[0, 1] = world.rank, (world.rank + 1) % world.nranks
        recv, idx, *_ = buffer.dispatch(world.to(work.x[0][:1]), world.to(few), num_experts=world.nranks)
        assert idx.tolist().count([-1] * (world.nranks + 1) + [0]) == 1 and recv.shape[0] == min(2, world.nranks)


def test_without_weights(world: World) -> None:
    """[E] 4: topk_weights are optional in both layouts."""
    with elastic(world) as buffer:
        work = make_work(world, 1)
        check_flat(world, work, send(world, buffer, work, topk_weights=None), lambda x: x, True, False)
        assert send(world, buffer, work, topk_weights=None, do_expand=True)[2] is None


def test_stats(world: World) -> None:
    """[E] 4: UNPADDED rows per local expert are added to cumulative_local_expert_recv_stats."""
    with elastic(world) as buffer:
        work = make_work(world, 2)
        stats = world.to(torch.full((work.local,), 5, dtype=torch.int32))
        counts = torch.tensor(work.expert_counts(world.rank))
        for n, expand in ((1, False), (2, True)):
            send(world, buffer, work, cumulative_local_expert_recv_stats=stats, expert_alignment=64, do_expand=expand)
            assert torch.equal(stats.cpu().long(), 5 + n * counts)


def test_cached(world: World) -> None:
    """[E] 4: with a handle: the same object returns, rows land where they landed, recv_topk_idx is filled again, new
    weights may be given; an expanded handle also serves dispatches without expansion."""
    for nodes in (1, 2):
        with elastic(world, nodes) as buffer:
            work = make_work(world, 1 + nodes)
            other = make_work(world, 1 + nodes)
            for w in other.weights:
                w.mul_(2.0)
            x, weights = world.to(work.x[world.rank]), world.to(other.weights[world.rank])
            flat = send(world, buffer, work, expert_alignment=8)
            zones = send(world, buffer, work, expert_alignment=8, do_expand=True)
            again = buffer.dispatch(x, handle=flat[3])
            assert again[3] is flat[3] and again[2] is None
            check_flat(world, work, again, lambda x: x, True, False, False)
            again = buffer.dispatch(x, handle=zones[3], topk_weights=weights, do_expand=True, do_zero_padding=True,
                                    num_experts=work.experts, expert_alignment=8, num_max_tokens_per_rank=MAX)
            assert again[3] is zones[3]
            check_expanded(world, other, again, lambda x: x, 8, True)
            for _ in range(2):
                with reads(zones[3].topk_idx):  # the routing without expansion is made of them
                    again = buffer.dispatch(x, handle=zones[3], topk_weights=weights)
                check_flat(world, other, again, lambda x: x, True, True, False)


def check_combine(world: World, buffer: deep_ep.ElasticBuffer, work: Work, expand: bool, sync: bool, biases: int,
                  **options: Any) -> None:
    """A dispatch and a combine whose sum is compared bit by bit."""
    me, hybrid = world.rank, buffer.num_scaleout_ranks > 1
    recv, _idx, weights, handle, _event = send(world, buffer, work, do_expand=expand, do_cpu_sync=sync,
                                               expert_alignment=4)
    rows = recv.shape[0]
    results = Expanded(work, me, 4).results(work, rows) if expand else flat_results(work, me, rows)
    bias = [torch.stack([rough(HIDDEN, torch.bfloat16, -1 - (me * 4096 + t) * 2 - i) for t in range(len(work.x[me]))])
            if len(work.x[me]) else work.x[me] for i in range(biases)]
    given = None if not bias else world.to(bias[0]) if len(bias) == 1 else tuple(map(world.to, bias))
    back = None if expand and not buffer.allow_multiple_reduction else weights
    if back is not None and not expand:  # those of other ranks' entries must not count
        back = torch.where(_idx >= 0, back, torch.full_like(back, 9.0))
    out, out_weights, event = buffer.combine(world.to(results), handle, topk_weights=back, bias=given, **options)
    if options.get("async_with_compute_stream"):
        event.current_stream_wait()
    else:
        assert event.event is None
    want = combined(work, me, buffer.num_nvlink_ranks, expand, buffer.allow_multiple_reduction, hybrid, bias)
    assert same_bits(out, want), "expand %s: %d of %d values differ" % (
        expand, int((out.cpu() != want).sum()), want.numel())
    if back is None:
        assert out_weights is None
    else:
        assert torch.equal(out_weights.cpu(), torch.where(work.idx[me] >= 0, work.weights[me], 0.0))


def test_combine_order_one_level(world: World) -> None:
    """[E] 5: bit-exact sums: bias first, then ranks by their highest k; expanded, per rank first (multiple reductions)
    or all rows in k-order (one); weights from the owner of each entry alone, 0 for -1."""
    for multiple in (True, False):
        with elastic(world, allow_multiple_reduction=multiple, num_topk=8) as buffer:
            for seed, expand in ((1, False), (2, False), (3, True), (4, True)):
                work = make_work(world, seed, topk=6, local=4)
                check_combine(world, buffer, work, expand, seed != 4, seed % 3)


def test_rows_that_are_used(world: World) -> None:
    """[E] 5: an expanded combine takes the rows up to the last that carries a token, also where no rank waited for
    their number. Fewer are refused, and nothing is read behind them."""
    with elastic(world) as buffer:
        work = make_work(world, 2)
        zones = Expanded(work, world.rank, 16)
        used = max((i + 1 for i, at in enumerate(zones.source) if at is not None), default=0)
        want = combined(work, world.rank, world.nranks, True, True, False, [])
        for sync in (False, True):
            recv, _idx, weights, handle, _event = send(world, buffer, work, do_expand=True, do_cpu_sync=sync,
                                                       expert_alignment=16)
            rows = world.to(zones.results(work, recv.shape[0]))
            for x, back in ((rows[:used].clone(), weights), (rows[:used].clone(), weights[:used]), (rows, None)):
                out, out_weights, _event = buffer.combine(x, handle, topk_weights=back)
                assert same_bits(out, want)
                assert back is None or torch.equal(out_weights.cpu(), torch.where(
                    work.idx[world.rank] >= 0, work.weights[world.rank], 0.0))
            if world.device.type == "cuda":
                torch.cuda.synchronize()  # the counts have arrived
            try:
                buffer.combine(rows[:used - 1].clone(), handle)
            except (epx.ArgumentError, epx.OverflowingError) as error:
                assert str(used) in str(error) and str(used - 1) in str(error), error
            else:
                raise AssertionError("expected an error about %d rows" % used)
            _refused(lambda: buffer.combine(rows, handle, topk_weights=weights[:used - 1]), "topk_weights")
        check_combine(world, buffer, work, True, False, 1)


def test_rows_that_the_kernel_misses(world: World) -> None:
    """[E] 5: too few rows of a rank that cannot know it yet: the operation fails there, and all ranks recover."""
    with elastic(world) as buffer:
        work = make_work(world, 2)
        used = max(i + 1 for i, at in enumerate(Expanded(work, world.rank, 1).source) if at is not None)
        rows = world.to(torch.zeros(used - (world.rank == 0), HIDDEN).bfloat16())
        send(world, buffer, work)
        failed = ""
        if world.rank != 0:  # the others dispatch when rank 0 has called both
            world.meet()
        handle = send(world, buffer, work, do_expand=True, do_cpu_sync=False, async_with_compute_stream=True)[3]
        try:  # a rank that is late is told by the call
            _out, _none, done = buffer.combine(rows, handle, async_with_compute_stream=True)
            if world.rank == 0:
                world.meet()
            done.current_stream_wait()
            if world.device.type == "cuda":
                torch.cuda.synchronize()
                send(world, buffer, work)
        except epx.EpxError as error:
            failed = str(error)
        assert world.rank != 0 or ("OVERFLOW" in failed and str(used) in failed), failed
        world.meet()
        buffer.recover()
        check_combine(world, buffer, work, True, False, 1)


def test_unusual_routings(world: World) -> None:
    """[E] 4, 5: all tokens to one rank, to their own, or nowhere; top-k of 1 and 16: both layouts, and sums."""
    with elastic(world, num_topk=16) as buffer:
        for seed, (change, topk) in enumerate((
                (crowded, 4), (at_home, 3), (nowhere, 2), (lambda work: work, 1),
                (lambda work: work, min(16, 4 * world.nranks))), 20):
            work = change(make_work(world, seed, topk=topk, local=4))
            for expand in (False, True):
                result = send(world, buffer, work, expert_alignment=4, do_expand=expand, do_zero_padding=expand)
                if expand:
                    check_expanded(world, work, result, lambda x: x, 4, True)
                else:
                    check_flat(world, work, result, lambda x: x, True)
                check_counts(work, world.rank, result[3], 4, buffer.num_scaleup_ranks, True)
                check_combine(world, buffer, work, expand, True, seed % 3)


def test_combine_order_two_levels(world: World) -> None:
    """[E] 5: per domain, the own one too, by highest k, rounded; then bias and domains by highest k. One reduction, or
    one level over all nodes: every rank's row counts by itself, and one rounding."""
    for multiple, hybrid in ((True, True), (False, True), (True, False), (False, False)):
        with elastic(world, 2, num_topk=8, allow_multiple_reduction=multiple, allow_hybrid_mode=hybrid) as buffer:
            per = world.nranks // 2
            assert buffer.get_logical_domain_size() == ((2, per) if hybrid else (1, world.nranks))
            assert buffer.get_physical_domain_size() == (2, per)
            assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == (
                divmod(world.rank, per) if hybrid else (0, world.rank))
            handle = send(world, buffer, make_work(world, 2))[3]
            assert (handle.token_metadata_at_forward is None, handle.channel_linked_list is None) == (not hybrid,) * 2
            for seed, expand in ((1, False), (2, False), (3, True), (4, True)):
                check_combine(world, buffer, make_work(world, seed, topk=6, local=4), expand, True, seed % 3)


def test_previous_event_and_async(world: World) -> None:
    """[E] 4: previous_event (EventHandle or EventOverlap) needs allocate_on_comm_stream; async gives an event, which
    `with` waits for; without it event.event is None; previous_event_before_epilogue."""
    with elastic(world) as buffer:
        work = make_work(world, 2)
        for asynchronous in (False, True):
            for previous in (None, buffer.capture(), deep_ep.EventOverlap(buffer.capture())):
                result = send(world, buffer, work, async_with_compute_stream=asynchronous, previous_event=previous,
                              allocate_on_comm_stream=previous is not None,
                              previous_event_before_epilogue=buffer.capture())
                assert isinstance(result[4], deep_ep.EventOverlap) and (result[4].event is not None) == asynchronous
                if asynchronous:
                    with result[4](release_handle=True):
                        pass
                    assert result[4].event is None
                check_flat(world, work, result, lambda x: x, True)
                check_combine(world, buffer, work, False, True, 2, async_with_compute_stream=asynchronous,
                              previous_event=previous, allocate_on_comm_stream=previous is not None)


def test_calls_of_other_sizes(world: World) -> None:
    """[E] 2, 4: M belongs to the call (vLLM: another in every step); sizes of the buffer are no limits. A group that
    was replaced by a larger one ends with its last handle."""
    with elastic(world) as buffer:
        groups, handle = [], None
        for tokens in (MAX, 4 * MAX, 2, MAX):
            work = Work(world.nranks, min(tokens, MAX), HIDDEN, 2 * world.nranks, 3, 2)
            for t in range(world.nranks):
                work.x[t], work.idx[t], work.weights[t] = (
                    part[:tokens] for part in (work.x[t], work.idx[t], work.weights[t]))
            recv, _idx, _weights, handle, _event = send(world, buffer, work, num_max_tokens_per_rank=tokens,
                                                        do_cpu_sync=False)
            ranks, sources, rows, *_ = work.flat(world.rank)
            assert recv.shape[0] == world.nranks * tokens and handle.num_max_tokens_per_rank == tokens
            assert same_bits(recv[:len(rows)], rows)
            assert torch.equal(handle.recv_src_metadata[:len(rows), 0].cpu().long(), ranks * tokens + sources)
            groups.append(buffer._engine.high_throughput_pool(world.device, work.experts).group)
            del recv, _idx, _weights
        assert groups[0] is not groups[1] and groups[1] is groups[3] and groups[3].alive and not groups[0].alive


def test_a_graph_keeps_its_group(world: World) -> None:
    """A group that was captured into a graph and then replaced lives as long as the buffer, also if the graph has an
    operation with an older handle alone."""
    with elastic(world) as buffer:
        work, groups = make_work(world, 2), []
        for turn, captured in enumerate(("dispatch", "combine", "", "")):
            tokens = MAX << turn
            pool = buffer._engine.elastic_pool(world.device, work.experts, tokens, 2 * HIDDEN, work.topk)
            captures, pool.capturing = pool.capturing, lambda: captured == "dispatch"  # as in a capture
            sent = send(world, buffer, work, num_max_tokens_per_rank=tokens, do_cpu_sync=False)
            pool.capturing = lambda: captured == "combine"
            buffer.combine(sent[0], sent[3])
            pool.capturing = captures
            groups.append(pool.group)
            del sent
        assert [group.alive for group in groups] == [True, True, False, True]
        _refused(buffer.recover, "graphs_released=True")
        assert groups[0].alive
    assert not any(group.alive for group in groups)


def test_two_handles_live(world: World) -> None:
    """[E] 9: two handles live with micro-batches; a handle serves any number of combines and dispatches."""
    with elastic(world) as buffer:
        works = [make_work(world, seed) for seed in (2, 4)]
        results = [send(world, buffer, work) for work in works]
        for _ in range(2):
            for work, result in zip(works, results):
                rows = flat_results(work, world.rank, result[0].shape[0])
                out, *_ = buffer.combine(world.to(rows), result[3])
                assert same_bits(out, combined(work, world.rank, world.nranks, False, True, False, []))


def test_handle_fields(world: World) -> None:
    """[E] 4: EPHandle: fields as used by the call, do_handle_copy by address, a handle made of another's fields."""
    with elastic(world) as buffer:
        work = make_work(world, 2)
        idx = world.to(work.idx[world.rank])
        for copy in (True, False):
            handle = send(world, buffer, work, topk_idx=idx, do_handle_copy=copy, num_sms=6)[3]
            assert torch.equal(handle.topk_idx, idx) and (handle.topk_idx.data_ptr() == idx.data_ptr()) is not copy
            assert handle.num_sms == 6 and handle.num_experts == work.experts and handle.expert_alignment == 1
            assert handle.num_max_tokens_per_rank == MAX and handle.do_expand is False
            assert handle.dst_buffer_slot_idx.shape == idx.shape and handle.dst_buffer_slot_idx.dtype is torch.int32
            assert handle.token_metadata_at_forward is None and handle.channel_linked_list is None
        assert send(world, buffer, work)[3].num_sms == buffer.get_theoretical_num_sms(work.experts, work.topk)
        names = ["do_expand", "num_experts", "expert_alignment", "num_max_tokens_per_rank", "num_sms", "topk_idx",
                 "num_recv_tokens", "num_expanded_tokens", "num_recv_tokens_per_expert_list",
                 "psum_num_recv_tokens_per_scaleup_rank", "psum_num_recv_tokens_per_expert",
                 "num_unaligned_recv_tokens_per_expert", "recv_src_metadata", "dst_buffer_slot_idx",
                 "token_metadata_at_forward", "channel_linked_list"]
        twin = deep_ep.EPHandle(*[getattr(handle, name) for name in names])
        again = buffer.dispatch(world.to(work.x[world.rank]), handle=twin)
        assert again[3] is twin
        check_flat(world, work, again, lambda x: x, True, False)


def _refused(call: Any, *words: str) -> None:
    try:
        call()
    except AssertionError as error:
        assert all(word in str(error) for word in words), error
        return
    raise AssertionError("expected an error with %s" % (words,))


def refuse_arguments_of_the_constructor(group: Any) -> None:
    """Wrong types and numbers, in the constructor and in the functions that give its sizes."""
    make, hint = deep_ep.ElasticBuffer, deep_ep.ElasticBuffer.get_buffer_size_hint
    for other in ("x", 1.5, [0, 1], object()):
        for call in (lambda: make(other, BYTES), lambda: deep_ep.Buffer(other), lambda: hint(other, MAX, HIDDEN),
                     lambda: deep_ep.get_physical_domain_size(other), lambda: deep_ep.get_logical_domain_size(other),
                     lambda: make.get_agrs_num_max_session_bytes(other, (1,), torch.int8)):
            _refused(call, "group", "process group of torch.distributed", type(other).__name__)
    _refused(lambda: make(dist.GroupMember.NON_GROUP_MEMBER, BYTES), "group", "that this rank is in")
    for name in ("num_max_tokens_per_rank", "hidden", "num_topk", "num_allocated_qps", "sl_idx",
                 "num_cpu_timeout_secs"):
        for value in (-1, "8", None, True, 2.0):
            _refused(lambda: make(group, BYTES, **{name: value}), name, repr(value))
    for call in (lambda: make(group, BYTES, num_topk=33), lambda: make(group, None, 0, MAX, HIDDEN, 33),
                 lambda: hint(group, MAX, HIDDEN, 33)):
        _refused(call, "num_topk", "at most 32", "33")
    for value in (0, -1, "8", None):
        _refused(lambda: hint(group, value, HIDDEN), "num_max_tokens_per_rank", repr(value))
        _refused(lambda: hint(group, MAX, value), "hidden", repr(value))
    # Parts that are not used may be added up.
    assert make.get_pp_buffer_size_hint(0, 0) == make.get_agrs_buffer_size_hint(group, 0) == 0
    assert make.get_engram_storage_size_hint(0, 0, 0) == (0, 0)
    for value in (-1, "8", None):
        _refused(lambda: make.get_pp_buffer_size_hint(value, 1), "num_max_tensor_bytes")
        _refused(lambda: make.get_pp_buffer_size_hint(1, value), "num_max_inflight_tensors")
        _refused(lambda: make.get_engram_storage_size_hint(value, 1, 1), "num_entries")
        _refused(lambda: make.get_agrs_buffer_size_hint(group, value), "num_max_session_bytes")
    _refused(lambda: hint(group, MAX, HIDDEN, -1), "num_topk", "-1")
    _refused(lambda: make.get_engram_storage_size_hint(1, 1, 1, "bf16"), "dtype", "bf16")
    for shapes in ((1, -2), ((1,), "x"), 7, (1.5,)):
        _refused(lambda: make.get_agrs_num_max_session_bytes(group, shapes, torch.int8), "shapes")


def test_refusals(world: World) -> None:
    """[E] 2, 4, 5: wrong arguments raise before anything is sent, and the buffer still works."""
    group = dist.group.WORLD
    _refused(lambda: deep_ep.ElasticBuffer(group), "num_bytes")
    _refused(lambda: deep_ep.ElasticBuffer(group, num_bytes=1000), "num_bytes", "2097152")
    _refused(lambda: deep_ep.ElasticBuffer(group, num_bytes=0), "num_bytes")
    for nbytes, cpu_bytes in ((4 << 20, 6 << 20), (4 << 20, 1 << 20), (None, 2 << 20)):
        _refused(lambda: deep_ep.ElasticBuffer(group, nbytes, cpu_bytes, MAX, HIDDEN), "num_cpu_bytes")
    refuse_arguments_of_the_constructor(group)
    with elastic(world, allow_multiple_reduction=False) as buffer:
        work = make_work(world, 2)
        handle = send(world, buffer, work)[3]
        zones = send(world, buffer, work, do_expand=True)
        x, idx = world.to(work.x[world.rank]), world.to(work.idx[world.rank])
        _refused(lambda: send(world, buffer, work, previous_event=buffer.capture()), "allocate_on_comm_stream")
        _refused(lambda: send(world, buffer, work, do_zero_padding=True), "do_zero_padding")
        _refused(lambda: send(world, buffer, work, num_experts=work.experts + 1), "num_experts")
        _refused(lambda: send(world, buffer, work, num_experts=None), "num_experts")
        _refused(lambda: send(world, buffer, work, topk_idx=None), "topk_idx")
        for name in ("expert_alignment", "num_max_tokens_per_rank"):
            _refused(lambda: send(world, buffer, work, **{name: 0}), name)
            _refused(lambda: send(world, buffer, work, **{name: (1 << 32) + 64}), name, "at most 1048576")
        _refused(lambda: send(world, buffer, work, num_experts=world.nranks << 32), "num_experts", "at most 1048576")
        send(world, buffer, work, num_sms=1 << 40)  # more than there are
        for name in ("sm_read_gbs", "sm_write_gbs", "nvlink_gbs"):
            for value in ("x", -1, float("nan"), torch.zeros(2)) + ((0,) if name != "nvlink_gbs" else ()):
                _refused(lambda: buffer.get_theoretical_num_sms(8, 2, **{name: value}), name, "a number above 0")
        _refused(lambda: send(world, buffer, work, num_qps=buffer.num_allocated_qps + 1), "num_qps")
        _refused(lambda: buffer.dispatch(x, topk_idx=idx, handle=handle), "topk_idx")
        _refused(lambda: buffer.combine(x, pickle.loads(pickle.dumps(handle))), "handle", "pickled")
        _refused(lambda: buffer.dispatch(x, handle=handle, do_cpu_sync=True), "do_cpu_sync")
        _refused(lambda: buffer.dispatch(x, handle=handle, do_expand=True), "do_expand")
        for other in (dict(expert_alignment=2), dict(num_experts=2 * work.experts),
                      dict(num_max_tokens_per_rank=MAX + 1), dict(cumulative_local_expert_recv_stats=world.to(
                          torch.zeros(work.local, dtype=torch.int32)))):
            _refused(lambda: buffer.dispatch(x, handle=handle, **other), *other)
        _refused(lambda: buffer.combine(zones[0], zones[3], topk_weights=zones[2]), "allow_multiple_reduction")
        for rows in (handle.num_recv_tokens - 1, handle.num_recv_tokens + 1):
            _refused(lambda: buffer.combine(world.to(torch.zeros(rows, HIDDEN).bfloat16()), handle), "x")
        _refused(lambda: buffer.get_theoretical_num_sms(8, 2, num_scaleout_topk=1), "num_scaleout_topk")
        refused_in_a_capture(lambda: send(world, buffer, work), "do_cpu_sync=False")
        with as_in_a_capture():
            buffer.dispatch(x, handle=send(world, buffer, work, do_cpu_sync=False)[3])
        if world.rank == 0:
            _refused(lambda: buffer.dispatch(world.to(torch.zeros(MAX + 1, HIDDEN).bfloat16()),
                                             topk_idx=world.to(torch.zeros(MAX + 1, 4, dtype=torch.int64)),
                                             num_experts=work.experts), "num_max_tokens_per_rank")
        check_flat(world, work, send(world, buffer, work), lambda x: x, True)
