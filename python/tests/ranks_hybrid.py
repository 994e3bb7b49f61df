# SPDX-License-Identifier: Apache-2.0
"""HybridEPBuffer against the reference: rows grouped by expert, padded, with probs; sums and gradients of probs."""

import contextlib
from typing import Any, Iterator, List, Optional

import deep_ep
import epx
import torch
import torch.distributed as dist
from deep_ep.hybrid_ep_buffer import indices_to_map
from reference import Work, same_bits
from suite import World, as_in_a_capture, environment, refused, refused_in_a_capture


def routing_map(work: Work, rank: int) -> torch.Tensor:
    """bool [T, E]."""
    idx = work.idx[rank]
    spread = torch.zeros(idx.shape[0], work.experts + 1, dtype=torch.bool)
    return spread.scatter_(1, torch.where(idx < 0, work.experts, idx), True)[:, :work.experts].contiguous()


def probs_of(work: Work, rank: int) -> torch.Tensor:
    """f32 [T, E]; 0 where a token does not go."""
    rng = torch.Generator().manual_seed(77 + rank)
    return torch.rand(work.idx[rank].shape[0], work.experts, generator=rng) * routing_map(work, rank)


def expected(work: Work, me: int, pad: int) -> Any:
    """(rows, probs, padded counts, (source, token, expert) of each row or None for padding)."""
    rows: List[torch.Tensor] = []
    probs: List[float] = []
    counts: List[int] = []
    places: List[Optional[Any]] = []
    every = [probs_of(work, s) for s in range(len(work.x))]
    for local, sources in enumerate(work.by_expert(me)):
        for s, t in sources:
            rows.append(work.x[s][t])
            probs.append(float(every[s][t, me * work.local + local]))
            places.append((s, t, me * work.local + local))
        missing = -len(sources) % pad
        rows += [torch.zeros(work.hidden, dtype=torch.bfloat16)] * missing
        probs += [0.0] * missing
        places += [None] * missing
        counts.append(len(sources) + missing)
    data = torch.stack(rows) if rows else torch.zeros(0, work.hidden, dtype=torch.bfloat16)
    return data, torch.tensor(probs), counts, places


@contextlib.contextmanager
def no_sync(world: World) -> Iterator[None]:
    """Calls of torch that wait for the GPU on the host raise an error."""
    if world.device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if world.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def check_fields(world: World, work: Work, handle: Any, length: int, places: Optional[List[Any]] = None) -> None:
    """What DeepEP's own tests read of a handle."""
    me, local = world.rank, work.local
    sources, tokens = work.flat(me)[:2]
    lines = [(s, t) for s, t in zip(sources.tolist(), tokens.tolist())]
    assert len(handle) == length and isinstance(handle, tuple) and int(handle[3]) == len(lines)
    want = torch.stack([routing_map(work, s)[t, me * local:(me + 1) * local] for s, t in lines] or [
        torch.zeros(local, dtype=torch.bool)])[:len(lines)]
    assert torch.equal(handle[4][:len(lines)].cpu(), want), (handle[4], want)
    if places is not None:
        assert handle[7].tolist() == want.sum(0).tolist() and not handle[-1].item()


def check(world: World, buffer: deep_ep.HybridEPBuffer, work: Work, pad: int, by_index: bool, more: int) -> None:
    """Dispatch, dispatch by handle, combine with and without probs."""
    me = world.rank
    rows, probs, counts, places = expected(work, me, pad)
    total = len(places) + more
    given: Any = dict(routing_map=world.to(routing_map(work, me)), probs=world.to(probs_of(work, me)))
    if by_index:
        idx = world.to(work.idx[me])
        weights = world.to(torch.where(work.idx[me] < 0, 0.0, probs_of(work, me).gather(1, work.idx[me].clamp(min=0))))
        for made, asked in zip(indices_to_map(idx, weights, len(idx), work.experts), given.values()):
            assert torch.equal(made, asked)
        given = dict(topk_idx=idx, num_of_experts=work.experts, topk_weights=weights)
    if more:
        given.update(num_permuted_tokens=total, non_blocking=True)
    x = world.to(work.x[me])
    with no_sync(world) if more else contextlib.nullcontext():
        got, got_probs, scales, per_expert, handle = buffer.dispatch_with_permute(
            hidden=x, pad_multiple=pad if pad > 1 else None, num_of_experts_per_rank=work.local, **given)
    assert scales is None and per_expert.tolist() == counts and got.shape[0] == got_probs.shape[0] == total
    assert same_bits(got[:len(places)], rows) and not got[len(places):].any()
    assert torch.equal(got_probs[:len(places)].cpu(), probs) and not got_probs[len(places):].any()
    check_fields(world, work, handle, 12, places)
    given = {key: value for key, value in given.items() if key in ("probs", "topk_idx", "topk_weights")}
    again = buffer.dispatch_with_permute(hidden=world.to(work.x[me]), handle=handle, num_permuted_tokens=total,
                                         fuse_permute_dispatch=True, **given)
    assert same_bits(again[0], got) and again[4] is handle and torch.equal(again[1], got_probs)
    again = buffer.dispatch_with_permute(hidden=world.to(work.x[me]), handle=tuple(handle))
    assert same_bits(again[0], got) and again[1] is None
    combined, none = buffer.combine_with_unpermute(hidden=got, handle=handle, pad_multiple=pad)
    assert none is None
    # Every row returns as it was: a token times the number of its experts; and each prob to its place.
    times = routing_map(work, me).sum(1, keepdim=True)
    assert torch.allclose(combined.cpu().float(), work.x[me].float() * times, rtol=0.02, atol=0.02)
    combined, back = buffer.combine_with_unpermute(hidden=got, probs=got_probs * 2, handle=handle)
    assert back is not None and torch.equal(back.cpu(), probs_of(work, me) * 2)


def check_flat(world: World, buffer: deep_ep.HybridEPBuffer, work: Work, waits: bool) -> None:
    """Without permutation: one row per (token, rank), probs of the experts of the node."""
    me, per_node = world.rank, world.nranks // buffer.num_of_nodes
    sources, tokens, rows = work.flat(me)[:3]
    first = me % per_node * work.local
    given: Any = dict(routing_map=world.to(routing_map(work, me)), probs=world.to(probs_of(work, me)))
    if not waits:
        given["num_dispatched_tokens"] = rows.shape[0]
    got, got_probs, scales, handle = buffer.dispatch(world.to(work.x[me]), **given)
    assert scales is None and same_bits(got, rows) and got_probs.shape == (rows.shape[0], per_node * work.local)
    want = torch.zeros(got_probs.shape)
    for i, (s, t) in enumerate(zip(sources.tolist(), tokens.tolist())):
        want[i, first:first + work.local] = probs_of(work, s)[t, me * work.local:(me + 1) * work.local]
    assert torch.equal(got_probs.cpu(), want)
    check_fields(world, work, handle, 8)
    again = buffer.dispatch(world.to(work.x[me]), probs=given["probs"], handle=handle)
    assert same_bits(again[0], rows) and torch.equal(again[1].cpu(), want) and again[3] is handle
    combined, back = buffer.combine(got, got_probs * 2, handle)
    times = work.ranks_of(me).sum(1, keepdim=True)
    assert torch.allclose(combined.cpu().float(), work.x[me].float() * times, rtol=0.02, atol=0.02)
    assert torch.equal(back.cpu(), probs_of(work, me) * 2)


def test_hybrid(world: World) -> None:
    for nodes in ("0", str(world.nranks // 2)):
        with environment(**({} if nodes == "0" else {"EPX_RANKS_PER_NODE": nodes, "EPX_NET": "ofi:tcp"})):
            if nodes != "0" and not world._nodes:
                continue
            work = Work(world.nranks, 20, 128, 3 * world.nranks, 4, seed=31)
            local = 2 if nodes == "0" else 3  # a hint for memory: a routing may have more experts, or fewer
            buffer = deep_ep.HybridEPBuffer(dist.group.WORLD, 128, 4, local)
            sizes = buffer.configurer.buffer_config  # torchtitan reads them before each step
            assert sizes.hidden_dim == 128 and sizes.num_of_experts_per_rank == local
            assert sizes.max_num_of_tokens_per_rank >= 4 and sizes.num_of_nodes == (1 if nodes == "0" else 2)
            for pad, by_index, more in ((1, False, 0), (8, True, 0), (1, False, 7)):
                check(world, buffer, work, pad, by_index, more)
            for waits in (True, False):
                check_flat(world, buffer, work, waits)
            world.meet()
            del buffer


def test_hybrid_weights_by_index(world: World) -> None:
    """Indices of any type for 128 experts, and a handle used again with its weights in another order, as DeepEP's own
    tests of ranks with different numbers of tokens do it: for handles of indices and of maps."""
    gen = torch.Generator().manual_seed(91 + world.rank)
    experts = 128
    idx = torch.rand(8 + world.rank, experts, generator=gen).topk(4, 1).indices
    idx[0, 1], idx[1] = -1, -1
    weights, x = torch.rand(idx.shape, generator=gen), torch.randn(idx.shape[0], 128, generator=gen).bfloat16()
    marks, want = indices_to_map(idx, weights, idx.shape[0], experts)
    order = torch.tensor([2, 0, 3, 1])
    buffer = deep_ep.HybridEPBuffer(dist.group.WORLD, 128, 32, experts // world.nranks)
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, None):
        given: Any = dict(routing_map=world.to(marks), probs=world.to(want)) if dtype is None else dict(
            topk_idx=world.to(idx.to(dtype)), topk_weights=world.to(weights), num_of_experts=experts)
        other: Any = dict(topk_idx=world.to(idx.to(dtype or torch.int64)[:, order]),
                          topk_weights=world.to(weights[:, order]), num_of_experts=experts)
        rows, probs, _scales, _counts, handle = buffer.dispatch_with_permute(hidden=world.to(x), **given)
        assert torch.equal(buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=handle)[1].cpu(), want)
        again = buffer.dispatch_with_permute(hidden=world.to(x), handle=handle, **other)
        assert same_bits(again[0], rows) and torch.equal(again[1], probs)
        rows, probs, _scales, handle = buffer.dispatch(world.to(x), **given)
        assert torch.equal(buffer.combine(rows, probs, handle)[1].cpu(), want)
        assert torch.equal(buffer.dispatch(world.to(x), handle=handle, **other)[1], probs)
    for what, wrong in (("topk_idx", dict(other, topk_idx=other["topk_idx"][1:])),
                        ("topk_weights", dict(other, topk_weights=other["topk_weights"][:, 1:]))):
        with refused(what):
            buffer.dispatch(world.to(x), handle=handle, **wrong)
    idx[2, 0], idx[3, 1] = experts, experts + 7  # no expert has these
    marks, probs = indices_to_map(idx, weights, idx.shape[0], experts)
    assert marks.sum() == probs.count_nonzero() == ((idx >= 0) & (idx < experts)).sum()


def test_hybrid_ep_cpp(world: World) -> None:
    """What programs ask of DeepEP's compiled module: ranks per node, on one node and on two, as the buffer has them."""
    import hybrid_ep_cpp

    allocator = hybrid_ep_cpp.ExtendedMemoryAllocator()
    for per in (world.nranks, world.nranks // 2):
        with environment(EPX_RANKS_PER_NODE=str(per)):
            assert allocator.detect_accessible_ranks(dist.group.WORLD) == per
            assert allocator.detect_accessible_ranks(process_group=dist.group.WORLD) == per
    buffer = deep_ep.HybridEPBuffer(dist.group.WORLD, 128, 64, 1)
    assert buffer.num_of_hybrid_ep_ranks_per_nvlink_domain == world.nranks


def test_hybrid_errors(world: World) -> None:
    buffer = deep_ep.HybridEPBuffer(dist.group.WORLD, 128, 64, 8 * 40 // world.nranks)
    x = world.to(torch.zeros(2, 128, dtype=torch.bfloat16))
    for what, call in (
            ("routing_map", lambda: buffer.dispatch_with_permute(hidden=x)),
            ("num_of_experts", lambda: buffer.dispatch_with_permute(
                hidden=x, topk_idx=world.to(torch.zeros(2, 1, dtype=torch.int64)))),
            ("at most 32 experts", lambda: buffer.dispatch_with_permute(
                hidden=x, routing_map=world.to(torch.ones(2, 8 * 40, dtype=torch.bool)))),
            ("num_permuted_tokens", lambda: buffer.dispatch_with_permute(
                hidden=x, routing_map=world.to(torch.ones(2, 8, dtype=torch.bool)), non_blocking=True)),
            ("probs: expected a tensor [2, %d]" % world.nranks, lambda: buffer.dispatch(
                x, routing_map=world.to(torch.ones(2, world.nranks, dtype=torch.bool)), probs=x.float())),
            ("probs: expected a tensor [2, %d]" % world.nranks, lambda: buffer.dispatch_with_permute(
                hidden=x, routing_map=world.to(torch.ones(2, world.nranks, dtype=torch.bool)),
                probs=world.to(torch.ones(3, world.nranks)))),
            ("topk_idx", lambda: buffer.dispatch(x, topk_idx=world.to(torch.zeros(1, 1).long()), num_of_experts=8,
                                                 probs=world.to(torch.ones(2, 8)))),
            ("hidden: expected a tensor", lambda: buffer.dispatch_with_permute(hidden=None)),
            ("hidden: expected a tensor", lambda: buffer.dispatch(x[0])),
            ("hidden: expected a tensor of 2 dimensions, got torch.bfloat16 [2, 128] with layout torch.sparse_coo",
             lambda: buffer.dispatch(x.to_sparse())),
            ("topk_weights", lambda: buffer.dispatch(x, topk_idx=world.to(torch.zeros(2, 1).long()), num_of_experts=8,
                                                     topk_weights=[1, 1])),
            ("pad_multiple", lambda: buffer.dispatch_with_permute(
                hidden=x, topk_idx=world.to(torch.zeros(2, 1).long()), num_of_experts=8, pad_multiple="x")),
            ("num_of_tokens_per_rank: expected at most 1048576", lambda: buffer.dispatch_with_permute(
                hidden=x, topk_idx=world.to(torch.zeros(2, 1).long()), num_of_experts=8,
                num_of_tokens_per_rank=1 << 40)),
            ("group", lambda: deep_ep.HybridEPBuffer("x", 128, 64, 8)),
            ("max_num_of_tokens_per_rank", lambda: deep_ep.HybridEPBuffer(dist.group.WORLD, 128, 1 << 40, 8)),
            ("num_sms_dispatch_api", lambda: deep_ep.HybridEPBuffer(dist.group.WORLD, 128, 64, 8,
                                                                    num_sms_dispatch_api="x")),
            ("handle", lambda: buffer.combine(x)),
            ("handle", lambda: buffer.combine_with_unpermute(hidden=x))):
        with refused(what):
            call()
    assert buffer.max_num_of_tokens_per_rank >= 64 and buffer.max_num_of_tokens_per_rank < 1 << 20
    out = buffer.dispatch_with_permute(hidden=x, topk_idx=world.to(torch.zeros(2, 1).long()),
                                       num_of_experts=world.nranks)
    with refused("hidden"):
        buffer.combine_with_unpermute(hidden="x", handle=out[-1])
    with refused("probs"):
        buffer.combine_with_unpermute(hidden=out[0], probs="x", handle=out[-1])
    assert torch.equal(buffer.combine_with_unpermute(hidden=out[0], handle=out[-1])[0], x)


def test_hybrid_in_a_capture(world: World) -> None:
    """A call that would wait on the host for rows is refused at once, with the argument that makes it not wait."""
    buffer = deep_ep.HybridEPBuffer(dist.group.WORLD, 128, 64, 1)
    x, route = world.to(torch.ones(2, 128).bfloat16()), dict(
        topk_idx=world.to(torch.full((2, 1), world.rank)), num_of_experts=world.nranks)
    for capture in (contextlib.nullcontext, as_in_a_capture):
        refused_in_a_capture(lambda: buffer.dispatch(x, **route), "num_dispatched_tokens")
        refused_in_a_capture(lambda: buffer.dispatch_with_permute(hidden=x, **route), "num_permuted_tokens")
        with capture():
            rows, _probs, _scales, handle = buffer.dispatch(x, num_dispatched_tokens=2, **route)
            assert torch.equal(rows, x)
            assert torch.equal(buffer.dispatch(x, handle=handle)[0], x)
            out = buffer.dispatch_with_permute(hidden=x, num_permuted_tokens=2, non_blocking=True, **route)
            assert torch.equal(out[0], x)
            assert torch.equal(buffer.dispatch_with_permute(hidden=x, handle=out[-1])[0], x)


def test_a_refused_call_raises_no_limit(world: World) -> None:
    """A call that one rank is refused leaves its num_of_tokens_per_rank as it was: else that rank alone would make a
    larger group in its next call."""
    with environment(EPX_DEEP_EP_MAX_TOKENS="1"):
        buffer = deep_ep.HybridEPBuffer(dist.group.WORLD, 128, 64, 1)
        x, idx = world.to(torch.ones(2, 128).bfloat16()), world.to(torch.zeros(2, 1).long())
        limit = buffer.max_num_of_tokens_per_rank
        if not world.rank:
            for call, wrong in ((buffer.dispatch_with_permute, {"num_of_experts": None}),
                                (buffer.dispatch_with_permute, {"num_of_experts": 8, "pad_multiple": -1}),
                                (buffer.dispatch, {"num_of_experts": None})):
                with refused("pad_multiple" if "pad_multiple" in wrong else "num_of_experts"):
                    call(hidden=x, topk_idx=idx, num_of_tokens_per_rank=9000, **wrong)
            assert buffer.max_num_of_tokens_per_rank == limit
        out = buffer.dispatch_with_permute(hidden=x, topk_idx=idx, num_of_experts=world.nranks)
        assert torch.equal(buffer.combine_with_unpermute(hidden=out[0], handle=out[-1])[0], x)
        out = buffer.dispatch_with_permute(hidden=x, topk_idx=idx, num_of_experts=world.nranks,
                                           num_of_tokens_per_rank=9000)
        assert buffer.max_num_of_tokens_per_rank == 9000


def test_hybrid_of_different_ranks(world: World) -> None:
    """Ranks that give different max_num_of_tokens_per_rank: the largest counts."""
    with environment(EPX_DEEP_EP_MAX_TOKENS="1"):
        buffer = deep_ep.HybridEPBuffer(dist.group.WORLD, 128, 5 + 3 * world.rank, 1)
        assert buffer.max_num_of_tokens_per_rank == 5 + 3 * (world.nranks - 1)
        x = world.to(torch.full((5 + 3 * world.rank, 128), float(world.rank)).bfloat16())
        idx = world.to(torch.full((x.shape[0], 1), (world.rank + 1) % world.nranks))
        out = buffer.dispatch_with_permute(hidden=x, topk_idx=idx, num_of_experts=world.nranks)
        assert out[0].unique().tolist() == [float((world.rank - 1) % world.nranks)]
        assert torch.equal(buffer.combine_with_unpermute(hidden=out[0], handle=out[-1])[0], x)


def test_hybrid_grows(world: World) -> None:
    """A rank with more tokens than the buffer was made for, known to others or not."""
    with environment(EPX_DEEP_EP_MAX_TOKENS="8"):
        work = Work(world.nranks, 20, 128, 3 * world.nranks, 4, seed=34)
        buffer = deep_ep.HybridEPBuffer(dist.group.WORLD, 128, 4, 3)
        assert buffer.max_num_of_tokens_per_rank == 8
        small = Work(world.nranks, 4, 128, 3 * world.nranks, 4, seed=35)
        x = world.to(small.x[world.rank])
        old = buffer.dispatch_with_permute(hidden=x, routing_map=world.to(routing_map(small, world.rank)))
        check(world, buffer, work, 1, False, 0)
        assert buffer.max_num_of_tokens_per_rank == 32 and buffer.configurer.buffer_config[1] == 32
        assert same_bits(buffer.dispatch_with_permute(hidden=x, handle=old[4])[0], old[0])
        check(world, buffer, work, 1, False, 7)
        world.meet()


def check_dropped(world: World, buffer: deep_ep.HybridEPBuffer, work: Work, pad: int, limits: List[int]) -> None:
    """Rank r has room for limits[r] rows. What is beyond is dropped there, and the others' sums go on without it."""
    me, limit = world.rank, limits[world.rank]
    rows, probs, counts, places = expected(work, me, pad)
    kept = min(limit, len(places))
    given: Any = dict(routing_map=world.to(routing_map(work, me)), probs=world.to(probs_of(work, me)))
    x = world.to(work.x[me])
    with no_sync(world):
        got, got_probs, _scales, per_expert, handle = buffer.dispatch_with_permute(
            hidden=x, pad_multiple=pad, num_permuted_tokens=limit, non_blocking=True, **given)
        flag = handle[-1]
    ends = torch.tensor([0, *counts]).cumsum(0).clamp(max=limit)
    assert per_expert.device == got.device and per_expert.tolist() == ends.diff().tolist(), (per_expert, counts, limit)
    assert got.shape[0] == got_probs.shape[0] == limit
    assert same_bits(got[:kept], rows[:kept]) and not got[kept:].any()
    assert torch.equal(got_probs[:kept].cpu(), probs[:kept]) and not got_probs[kept:].any()
    lost = [place for place in places[kept:] if place is not None]
    assert flag.dtype is torch.int32 and flag.tolist() == [int(bool(lost))], (flag, lost)
    assert int(handle[7].sum()) == sum(place is not None for place in places[:kept])
    assert int(handle[4].sum()) == int(handle[7].sum())
    again = buffer.dispatch_with_permute(hidden=world.to(work.x[me]), handle=handle, num_permuted_tokens=limit,
                                         probs=given["probs"], non_blocking=True)
    assert same_bits(again[0], got) and torch.equal(again[1], got_probs) and again[3].tolist() == per_expert.tolist()
    with no_sync(world):
        combined, back = buffer.combine_with_unpermute(hidden=got, probs=got_probs, handle=handle, pad_multiple=pad,
                                                       non_blocking=True)
    stays = torch.zeros(work.idx[me].shape[0], work.experts)
    for rank in range(world.nranks):
        for place in expected(work, rank, pad)[3][:limits[rank]]:
            if place is not None and place[0] == me:
                stays[place[1], place[2]] = 1
    assert torch.equal(back.cpu(), probs_of(work, me) * stays), "probs of dropped rows are 0, the others are unchanged"
    want = work.x[me].float() * stays.sum(1, keepdim=True)
    assert torch.allclose(combined.cpu().float(), want, rtol=0.02, atol=0.02)
    one = stays.sum(1) <= 1  # these are not rounded
    assert torch.equal(combined.cpu()[one], want[one].bfloat16())


def test_hybrid_drops(world: World) -> None:
    """num_permuted_tokens with non_blocking: fewer than are received, on all ranks or on some, even none."""
    for nodes in ("0", str(world.nranks // 2)):
        with environment(**({} if nodes == "0" else {"EPX_RANKS_PER_NODE": nodes, "EPX_NET": "ofi:tcp"})):
            if nodes != "0" and not world._nodes:
                continue
            work = Work(world.nranks, 20, 128, 3 * world.nranks, 4, seed=36)
            buffer = deep_ep.HybridEPBuffer(dist.group.WORLD, 128, 20, 3)
            every = list(range(world.nranks))
            for pad, limits in ((1, [7] * world.nranks), (8, [16 + 8 * (r % 3) for r in every]),
                                (8, [600 - r for r in every]), (4, [10] * world.nranks),
                                (1, [0 if r == 1 else 5 + r for r in every]), (1, [0] * world.nranks)):
                check_dropped(world, buffer, work, pad, limits)
            check(world, buffer, work, 1, False, 7)
            world.meet()
            del buffer


def test_hybrid_recovers(world: World) -> None:
    """More rows than num_dispatched_tokens end the operation on all ranks; after recover() the buffer works."""
    world.only("cpu")
    with environment(EPX_TIMEOUT_MS=world.deadline(3000)):
        work = Work(world.nranks, 20, 128, 3 * world.nranks, 4, seed=32, uneven=False)
        buffer = deep_ep.HybridEPBuffer(dist.group.WORLD, 128, 20, 3)
        try:
            buffer.dispatch(work.x[world.rank], routing_map=routing_map(work, world.rank), num_dispatched_tokens=2)
            raise AssertionError("too few num_dispatched_tokens were accepted")
        except epx.OverflowingError as error:  # the counts of the update were there before the call
            assert "rows are needed" in str(error) or "recover()" in str(error), error
        except epx.EpxError as error:  # a kernel of this rank, or of another, found out
            assert "recover()" in str(error), error
    world.meet()
    buffer.recover()
    check(world, buffer, work, 1, False, 7)
    world.meet()
