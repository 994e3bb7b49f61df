# SPDX-License-Identifier: Apache-2.0
"""deep_ep's high throughput against the reference."""

import contextlib
import ctypes
import itertools
import os
import tempfile
from typing import Any, Dict, Iterator, List, Optional, Tuple

import deep_ep
import torch
import torch.distributed as dist
from epx import _abi
from epx._extension import calls
from epx._library import load
from reference import Work, calc_diff, cast_fp8, combine_flat, expert_result, same_bits, uncast_fp8
from suite import World, as_on_a_gpu, environment, reads


def layout(buffer: deep_ep.Buffer, idx: torch.Tensor, experts: int, **options: Any) -> Dict[str, Any]:
    """The arguments of dispatch that get_dispatch_layout() makes."""
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(idx, experts, **options)
    if options.get("async_finish"):
        event.current_stream_wait()
    return dict(num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, num_tokens_per_expert=per_expert,
                is_token_in_rank=in_rank)


def node_of(buffer: deep_ep.Buffer) -> List[int]:
    """The node of each rank."""
    nodes = buffer.runtime.get_num_rdma_ranks()
    return [r * nodes // buffer.group_size for r in range(buffer.group_size)]


def exchange(world: World, buffer: deep_ep.Buffer, work: Work, kind: str = "bf16", with_topk: bool = True,
             asynchronous: bool = False, previous: bool = False, bias: int = 0) -> Tuple[torch.Tensor, ...]:
    """One dispatch, one cached dispatch and one combine, all checked; returns results for bit comparison."""
    me = buffer.rank
    idx, weights = world.to(work.idx[me]), world.to(work.weights[me])
    sent = {"bf16": lambda x: x, "fp8": cast_fp8, "fp8t": cast_fp8}[kind]
    _rank, _token, rows, ref_idx, ref_weights = work.flat(me)
    options: Dict[str, Any] = {"async_finish": asynchronous}
    before: List[Any] = [deep_ep.Buffer.capture, deep_ep.utils.EventHandle]

    def event() -> Dict[str, Any]:
        """Alternately an EventOverlap and an EventHandle."""
        before.reverse()
        return dict(options, previous_event=before[0]()) if previous else options

    x = sent(work.x[me])
    x = tuple(map(world.to, x)) if isinstance(x, tuple) else world.to(x)
    if kind == "fp8t":
        x = (x[0], x[1].t().contiguous().t())
    parts = dict(topk_idx=idx, topk_weights=weights) if with_topk else {}
    recv, recv_idx, recv_weights, counts, handle, done = buffer.dispatch(
        x, **layout(buffer, idx, work.experts, **event()), **parts, **event())
    assert (done.event is not None) == asynchronous
    if asynchronous:
        done.current_stream_wait()
    expected = sent(rows)
    for got, want in zip(_parts(recv), _parts(expected)):
        assert got.is_contiguous() and got.dtype == want.dtype and got.shape == want.shape, (got.shape, want.shape)
        assert same_bits(got, want)
    assert counts == work.expert_counts(me), (counts, work.expert_counts(me))
    if with_topk:
        assert torch.equal(recv_idx.cpu(), ref_idx) and torch.equal(recv_weights.cpu(), ref_weights)
    else:
        assert recv_idx is None and recv_weights is None
    again = buffer.dispatch(x, handle=handle, **event())
    assert again[1:5] == (None, None, None, None)
    if asynchronous:
        again[5].current_stream_wait()
    for got, want in zip(_parts(again[0]), _parts(recv)):
        assert same_bits(got, want)
    out = check_combine(world, buffer, work, handle, recv, recv_weights, with_topk, event, bias)
    return (_parts(recv)[0], *out)


def _parts(x: Any) -> Tuple[torch.Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def check_combine(world: World, buffer: deep_ep.Buffer, work: Work, handle: Any, recv: Any,
                  recv_weights: Optional[torch.Tensor], with_topk: bool, event: Any, bias: int) -> Tuple[Any, Any]:
    """Every rank scales its rows in its own way, so that sums tell ranks apart."""
    me = buffer.rank
    rows = uncast_fp8(recv[0].cpu(), recv[1].cpu()) if isinstance(recv, tuple) else recv.cpu()
    y = world.to(expert_result(rows, me))
    rng = torch.Generator().manual_seed(me)
    biases = [torch.randn(work.x[me].shape, generator=rng).bfloat16() for _ in range(bias)]
    given = [world.to(b) for b in biases]
    out, out_weights, done = buffer.combine(
        y, handle, topk_weights=recv_weights if with_topk else None,
        bias={0: None, 1: given[0] if given else None, 2: tuple(given)}[bias], **event())
    if done.event is not None:
        done.current_stream_wait()
    results = []
    for r in range(work.nranks):
        source = work.flat(r)[2]
        if isinstance(recv, tuple):
            source = uncast_fp8(*cast_fp8(source))
        results.append(expert_result(source, r))
    expected = combine_flat(work, me, results, biases, node_of(buffer))
    assert out.dtype == torch.bfloat16 and calc_diff(out.cpu(), expected) < 5e-6
    if buffer.runtime.get_num_rdma_ranks() == 1:
        assert torch.equal(out.cpu(), expected)
    if with_topk:
        sent = work.weights[me].masked_fill(work.idx[me] < 0, 0)
        assert calc_diff(out_weights.cpu(), sent) < 1e-9
    else:
        assert out_weights is None
    return out, out_weights


def check_all(world: World, buffer: deep_ep.Buffer, hidden: int = 256) -> None:
    """All kinds of tokens with and without top-k, streams and events, bias."""
    ranks = buffer.group_size
    for seed, (kind, with_topk) in enumerate(itertools.product(("bf16", "fp8", "fp8t"), (True, False))):
        work = Work(ranks, 24, hidden, 4 * ranks, 4, seed=seed + 1)
        exchange(world, buffer, work, kind, with_topk, bias=seed % 3)
    for asynchronous, previous in itertools.product((False, True), repeat=2):
        exchange(world, buffer, Work(ranks, 24, hidden, 4 * ranks, 4, seed=9), "bf16", True, asynchronous, previous)


def test_all_in_a_node(world: World) -> None:
    check_all(world, world.buffer())


def test_all_between_nodes(world: World) -> None:
    check_all(world, world.node_buffer())


def test_rows_that_vary(world: World) -> None:
    """Each dispatch with many more or fewer rows than the ones before it, also in a heap that holds few of them."""
    for heap in ("", "40K"):
        with environment(**({"EPX_ALLOC_BYTES": heap} if heap else {})), as_on_a_gpu(world):
            buffer = deep_ep.Buffer(dist.group.WORLD, 8 << 20, 0, explicitly_destroy=True)
            for i, tokens in enumerate((3, 24, 24, 2, 20, 24, 1, 24)):
                exchange(world, buffer, Work(world.nranks, tokens, 256, 4 * world.nranks, 4, seed=30 + i),
                         "fp8" if i % 2 else "bf16")
            buffer.destroy()


def test_layout_counts(world: World) -> None:
    for buffer in world.buffers():
        work = Work(buffer.group_size, 30, 64, 4 * buffer.group_size, 4, seed=3)
        me, nodes = buffer.rank, torch.tensor(node_of(buffer))
        per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
            world.to(work.idx[me]), work.experts)
        goes = work.ranks_of(me)
        assert event.event is None and torch.equal(in_rank.cpu(), goes) and in_rank.dtype == torch.bool
        assert torch.equal(per_rank.cpu(), goes.sum(0).int())
        flat = work.idx[me][work.idx[me] >= 0]
        assert torch.equal(per_expert.cpu(), torch.bincount(flat, minlength=work.experts).int())
        if int(nodes.max()) == 0:
            assert per_node is None
        else:
            expected = [int(goes[:, nodes == n].any(1).sum()) for n in range(int(nodes.max()) + 1)]
            assert per_node.tolist() == expected and per_node.dtype == torch.int32


def test_repeats_bit_for_bit(world: World) -> None:
    for buffer in world.buffers():
        work = Work(buffer.group_size, 40, 128, 4 * buffer.group_size, 6, seed=5)
        first = exchange(world, buffer, work, bias=2)
        for _ in range(3):
            again = exchange(world, buffer, work, bias=2)
            assert all(torch.equal(a, b) for a, b in zip(first, again))


def test_handle_fields_in_a_node(world: World) -> None:
    buffer = world.buffer()
    ranks, me = buffer.group_size, buffer.rank
    work = Work(ranks, 50, 64, 4 * ranks, 4, seed=2)
    idx = world.to(work.idx[me])
    config = deep_ep.Config(num_sms=8)
    recv, *_rest, handle, _event = buffer.dispatch(
        world.to(work.x[me]), **layout(buffer, idx, work.experts), topk_idx=idx,
        topk_weights=world.to(work.weights[me]), config=config)
    rank_prefix, prefix, recv_prefix, src_idx, in_rank, head = (field.cpu() for field in handle)
    goes = [work.ranks_of(s) for s in range(ranks)]
    matrix = torch.stack([g.sum(0) for g in goes]).cumsum(0).int()
    assert torch.equal(rank_prefix, matrix) and rank_prefix.dtype == torch.int32
    assert int(rank_prefix[-1, me]) == recv.shape[0]
    source_rank, source_token, *_ = work.flat(me)
    assert torch.equal(src_idx, source_token.int()) and torch.equal(in_rank, goes[me])
    tokens = work.x[me].shape[0]
    assert prefix.shape == recv_prefix.shape == (ranks, 4) and head.shape == (tokens, ranks)
    check_channels(goes[me], prefix, head, 4)
    for s in range(ranks):
        per = max(-(-work.x[s].shape[0] // 4), 1)
        before = [int(goes[s][:c * per, me].sum()) for c in range(4)]
        assert recv_prefix[s].tolist() == before


def check_channels(goes: torch.Tensor, prefix: torch.Tensor, head: torch.Tensor, channels: int) -> None:
    """prefix [X, C] and head [T, X] of bool [T, X]."""
    tokens = goes.shape[0]
    per = max(-(-tokens // channels), 1)
    for c in range(channels):
        assert torch.equal(prefix[:, c], goes[:(c + 1) * per].sum(0).int())
    for t in range(tokens):
        start = t // per * per
        for r in range(goes.shape[1]):
            assert int(head[t, r]) == (int(goes[start:t, r].sum()) if goes[t, r] else -1)


def test_handle_fields_between_nodes(world: World) -> None:
    buffer = world.node_buffer()
    ranks, me, nodes = buffer.group_size, buffer.rank, node_of(buffer)
    work = Work(ranks, 30, 64, 4 * ranks, 4, seed=4)
    idx = world.to(work.idx[me])
    recv, *_rest, handle, _event = buffer.dispatch(
        world.to(work.x[me]), **layout(buffer, idx, work.experts), topk_idx=idx,
        topk_weights=world.to(work.weights[me]), config=deep_ep.Config(num_sms=6))
    assert len(handle) == 10
    (in_rank, node_prefix, prefix, recv_node_prefix, recv_node_sum, recv_prefix, recv_sum, meta, node_head,
     nvl_head) = (field.cpu() for field in handle)
    goes = [work.ranks_of(s) for s in range(ranks)]
    at = torch.tensor(nodes)
    by_node = [torch.stack([g[:, at == n].any(1) for n in range(2)], 1) for g in goes]
    assert torch.equal(in_rank, goes[me])
    check_channels(by_node[me], node_prefix, node_head, 3)
    assert prefix.shape == recv_prefix.shape == (ranks, 3) and recv_node_prefix.shape == (2, 3)
    # Through this rank come the tokens of the rank with its index in each node.
    half = ranks // 2
    through = [int(by_node[n * half + me % half][:, nodes[me]].sum()) for n in range(2)]
    assert recv_node_sum.tolist() == [through[0], sum(through)] and nvl_head.shape == (sum(through), 8)
    source_rank, _token, *_ = work.flat(me)
    assert recv_sum.tolist() == [int((source_rank <= s).sum()) for s in range(ranks)]
    assert meta.dtype == torch.uint8 and meta.shape == (recv.shape[0], 8)
    assert torch.equal(meta.view(torch.int32)[:, 0], at[source_rank].int())


def test_alignment_rounds_counts_only(world: World) -> None:
    buffer = world.buffer()
    work = Work(buffer.group_size, 20, 64, 2 * buffer.group_size, 2, seed=6)
    idx = world.to(work.idx[buffer.rank])
    recv, _idx, _weights, counts, _handle, _event = buffer.dispatch(
        world.to(work.x[buffer.rank]), **layout(buffer, idx, work.experts), topk_idx=idx,
        topk_weights=world.to(work.weights[buffer.rank]), expert_alignment=16)
    assert counts == [-(-n // 16) * 16 for n in work.expert_counts(buffer.rank)]
    assert recv.shape[0] == work.flat(buffer.rank)[2].shape[0]


def test_worst_case_size(world: World) -> None:
    for buffer in world.buffers():
        work = Work(buffer.group_size, 20, 64, 2 * buffer.group_size, 3, seed=8)
        me = buffer.rank
        idx, worst = world.to(work.idx[me]), buffer.group_size * 20
        recv, recv_idx, recv_weights, counts, handle, _event = buffer.dispatch(
            world.to(work.x[me]), **layout(buffer, idx, work.experts), topk_idx=idx,
            topk_weights=world.to(work.weights[me]), num_worst_tokens=worst)
        _rank, _token, rows, ref_idx, ref_weights = work.flat(me)
        n = rows.shape[0]
        assert counts == [] and recv.shape[0] == recv_idx.shape[0] == worst
        assert torch.equal(recv[:n].cpu(), rows) and torch.equal(recv_idx[:n].cpu(), ref_idx)
        assert torch.equal(recv_weights[:n].cpu(), ref_weights)
        assert bool((recv_idx[n:] == -1).all()) and bool((recv_weights[n:] == 0).all())
        out, _weights, _event = buffer.combine(recv, handle)
        expected = combine_flat(work, me, [work.flat(r)[2] for r in range(work.nranks)], [], node_of(buffer))
        assert calc_diff(out.cpu(), expected) < 5e-6


def test_any_size(world: World) -> None:
    """Hidden sizes, top-k, experts and tokens that DeepEP refuses."""
    buffer = world.buffer()
    ranks = buffer.group_size
    for hidden, experts, topk, tokens in ((8, 3 * ranks, 1, 5), (7168, 2 * ranks, 2, 6), (136, ranks + 3, 3, 512),
                                          (512, 4 * ranks, min(17, 4 * ranks), 9), (64, 2 * ranks, 2, 0)):
        exchange(world, buffer, Work(ranks, tokens, hidden, experts, topk, seed=hidden))


def test_weights_sum_over_ranks(world: World) -> None:
    """Combined weights are sums over all ranks a token went to, of whatever the caller gives."""
    buffer = world.buffer()
    work = Work(buffer.group_size, 16, 64, 2 * buffer.group_size, 3, seed=11)
    me = buffer.rank
    idx = world.to(work.idx[me])
    recv, *_rest, handle, _event = buffer.dispatch(
        world.to(work.x[me]), **layout(buffer, idx, work.experts), topk_idx=idx,
        topk_weights=world.to(work.weights[me]))
    _out, weights, _event = buffer.combine(
        recv, handle, topk_weights=torch.ones(recv.shape[0], 3, device=world.device))
    expected = work.ranks_of(me).sum(1, keepdim=True).float().expand(-1, 3)
    assert torch.equal(weights.cpu(), expected)


@contextlib.contextmanager
def limits() -> Iterator[List[int]]:
    """The most SMs of each dispatch and combine that reaches the C library."""
    library, seen, kept = load(), [], []

    def note(name: str, kind: Any, at: int) -> None:
        call = getattr(library, name)

        def noted(*arguments: Any) -> int:
            seen.append(kind.from_address(arguments[at]).max_sms)
            return call(*arguments)
        setattr(library, name, noted)
        native = ctypes.PYFUNCTYPE(ctypes.c_int, *call.argtypes)(noted)
        kept.append((native, call, name, calls().replace(name, ctypes.cast(native, ctypes.c_void_p).value)))
    note("epx_dispatch", _abi.DispatchConfigStruct, 4)
    note("epx_combine", _abi.CombineConfigStruct, 3)
    try:
        yield seen
    finally:
        for _native, call, name, before in kept:
            setattr(library, name, call)
            calls().replace(name, before)


def test_num_sms_is_a_limit(world: World) -> None:
    """A number that the program has set, also that of DeepEP's class, which alone is none."""
    me, work = world.rank, Work(world.nranks, 9, 128, 2 * world.nranks, 2, seed=91, uneven=False)
    x, idx, weights = (world.to(part[me]) for part in (work.x, work.idx, work.weights))

    def layer(buffer: deep_ep.Buffer, config: Any, **more: Any) -> List[int]:
        given = layout(buffer, idx, work.experts)
        with limits() as seen:
            recv, *_others, handle, _event = buffer.dispatch(x, **given, topk_idx=idx, topk_weights=weights,
                                                             config=config, **more)
            recv = buffer.dispatch(x, handle=handle, config=config)[0]
            buffer.combine(recv, handle, config=config)
        assert len(handle) == 6 and handle[1].shape[1] == max((config or deep_ep.Buffer).num_sms // 2, 1)
        return seen

    old = deep_ep.Buffer.num_sms
    with as_on_a_gpu(world):
        buffer = deep_ep.Buffer(dist.group.WORLD, 1 << 26, 0, explicitly_destroy=True)
        for more in (dict(), dict(), dict(num_worst_tokens=9 * world.nranks)):
            assert set(layer(buffer, None, **more)) == {0}
            assert set(layer(buffer, deep_ep.Config(12), **more)) == {12}
            assert set(layer(buffer, buffer.get_dispatch_config(world.nranks), **more)) == {0}
            for number in (8, 20, 0):
                deep_ep.Buffer.set_num_sms(number)
                assert set(layer(buffer, None, **more)) == {number}
                assert set(layer(buffer, buffer.get_combine_config(world.nranks), **more)) == {number}
                assert set(layer(buffer, deep_ep.Config(), **more)) == {0}
                deep_ep.Buffer.set_num_sms(old)
        buffer.destroy()


def test_num_sms_of_the_other_buffers(world: World) -> None:
    world.only("cpu")  # on a GPU a dispatch may be repeated
    me, work = world.rank, Work(world.nranks, 9, 128, 2 * world.nranks, 2, seed=92, uneven=False)
    x, idx = world.to(work.x[me]), world.to(work.idx[me])
    buffer = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=9, hidden=128, explicitly_destroy=True)
    for given, own, expected in ((0, 0, [0, 0, 0]), (6, 0, [6, 2, 6]), (6, 4, [6, 2, 4])):
        with limits() as seen:
            handle = buffer.dispatch(x, idx, num_experts=work.experts, num_sms=given)[3]
            recv = buffer.dispatch(x, handle=handle, num_sms=2 if given else 0)[0]
            buffer.combine(recv, handle, num_sms=own)
        assert seen == expected, seen
    buffer.destroy()
    for numbers, expected in (((None, None), None), ((6, None), None), ((None, 4), 4), ((6, 4), 4)):
        hybrid = deep_ep.HybridEPBuffer(dist.group.WORLD, 128, 9, 2, num_sms_dispatch_api=numbers[0],
                                        num_sms_combine_api=numbers[1])
        with limits() as seen:
            recv, _probs, _scales, handle = hybrid.dispatch(x, topk_idx=idx, num_of_experts=work.experts)
            hybrid.combine(hybrid.dispatch(x, handle=handle)[0], handle=handle)
            rows, *_others, handle = hybrid.dispatch_with_permute(hidden=x, topk_idx=idx, num_of_experts=work.experts)
            hybrid.combine_with_unpermute(hidden=rows, handle=handle)
        sent, back = seen[:2] + seen[3:4], seen[2::2]
        assert set(sent) == {numbers[0] or 0}, seen
        assert all(most == expected if expected else most > 1024 for most in back), seen


def test_one_dimensional_scales(world: World) -> None:
    buffer = world.buffer()
    work = Work(buffer.group_size, 12, 128, 2 * buffer.group_size, 2, seed=12)
    me = buffer.rank
    values, scales = cast_fp8(work.x[me])
    idx = world.to(work.idx[me])
    recv, *_ = buffer.dispatch((world.to(values), world.to(scales[:, 0].contiguous())),
                               **layout(buffer, idx, work.experts), topk_idx=idx,
                               topk_weights=world.to(work.weights[me]))
    assert recv[1].shape == (recv[0].shape[0],)
    rows = work.flat(me)[2]
    assert torch.equal(recv[1].cpu(), cast_fp8(rows)[1][:, 0])


def test_scales_of_expand(world: World) -> None:
    """Scales that Tensor.expand() made, whose strides are 0: one row for all tokens, or one scale for all."""
    buffer, me = world.buffer(), world.rank
    work = Work(world.nranks, 9, 256, 2 * world.nranks, 3, seed=42)
    ranks, _tokens, rows, *_ = work.flat(me)
    row = torch.tensor([[1.5, 2.5]])
    for one in (row, row[:, :1]):
        values, scales = world.to(cast_fp8(work.x[me])[0]), world.to(one + me).expand(len(work.x[me]), 2)
        with reads(scales):
            recv, *_others, handle, event = buffer.dispatch(
                (values, scales), **layout(buffer, world.to(work.idx[me]), work.experts), async_finish=True,
                topk_idx=world.to(work.idx[me]), topk_weights=world.to(work.weights[me]))
        event.current_stream_wait()
        assert same_bits(recv[0], cast_fp8(rows)[0]) and torch.equal(recv[1].cpu(), one.expand(1, 2) + ranks[:, None])
        with reads(scales):
            again, *_others, event = buffer.dispatch((values, scales), handle=handle, async_finish=True)
        event.current_stream_wait()
        assert same_bits(again[0], recv[0]) and same_bits(again[1], recv[1])


def test_aligned_counts_as_a_tensor(world: World) -> None:
    """An addition of Primus-Turbo."""
    buffer, me = world.buffer(), world.rank
    work = Work(world.nranks, 9, 256, 2 * world.nranks, 3, seed=43)
    idx = world.to(work.idx[me])
    with reads() as returned:
        _recv, _idx, _weights, counts, _handle, event = buffer.dispatch(
            world.to(work.x[me]), **layout(buffer, idx, work.experts), topk_idx=idx, expert_alignment=4,
            topk_weights=world.to(work.weights[me]), num_recv_tokens_per_expert_as_cuda=True, async_finish=True)
    event.current_stream_wait()
    assert counts.tolist() == [-(-count // 4) * 4 for count in work.expert_counts(me)]
    assert counts.is_cuda or any(one is counts for one in returned)


def test_smaller_groups(world: World) -> None:
    """Groups of some of the ranks: 2, 4, and 3."""
    for size in (2, 3, 4):
        if size > world.nranks:
            continue
        group = dist.new_group(list(range(size)))
        if world.rank < size:
            buffer = deep_ep.Buffer(group, 1 << 26, 0, explicitly_destroy=True)
            assert buffer.group_size == size
            exchange(world, buffer, Work(size, 24, 128, 2 * size + 1, 3, seed=size))
            exchange(world, buffer, Work(size, 24, 128, 2 * size + 1, 3, seed=size), "fp8")
            buffer.destroy()
        world.meet()


def test_calls_for_between_nodes(world: World) -> None:
    """internode_dispatch() and internode_combine() take what dispatch() and combine() take, by place too, on any
    buffer."""
    for buffer in world.buffers():
        work = Work(world.nranks, 14, 128, 2 * world.nranks, 3, seed=31)
        x, idx, weights = (world.to(part[buffer.rank]) for part in (work.x, work.idx, work.weights))
        given = list(buffer.get_dispatch_layout(idx, work.experts)[:4])
        in_order = [given[0], given[1], given[3], given[2], idx, weights, 1, 0, deep_ep.Config(), None, False, False]
        recv, recv_idx, _weights, _counts, handle, event = buffer.internode_dispatch(x, None, *in_order)
        _rank, _token, rows, ref_idx, _ref_weights = work.flat(buffer.rank)
        assert torch.equal(recv.cpu(), rows) and torch.equal(recv_idx.cpu(), ref_idx) and event.event is None
        sums = buffer.internode_combine(recv, handle, None, (x, x), deep_ep.Config(), None, False, False)[0]
        assert torch.equal(sums, buffer.combine(recv, handle, bias=(x, x))[0])


def test_fabric_handles_where_there_are_none(world: World) -> None:
    """Where ranks are on several hosts and a driver offers no fabric handles, the log of rank 0 says so once, and
    results are right."""
    if not world.nodes:
        return
    with tempfile.TemporaryFile() as log:
        kept = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            with environment(EPX_RANKS_PER_HOST=str(world.nranks // 2), EPX_LOG="warn"):
                buffer = deep_ep.Buffer(dist.group.WORLD, allow_mnnvl=True, use_fabric=True, explicitly_destroy=True)
                exchange(world, buffer, Work(world.nranks, 9, 128, 2 * world.nranks, 2, seed=32))
                nodes = buffer.runtime.get_num_rdma_ranks()
                buffer.destroy()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        log.seek(0)
        said = log.read().decode().count("use_fabric: no effect, hosts are reached by the network")
    assert (nodes, said) == (2, int(world.rank == 0)), (nodes, said)


def test_what_a_buffer_tells(world: World) -> None:
    """Its memory, as tensors; its nodes; its stream."""
    group = dist.group.WORLD
    buffer = deep_ep.Buffer(group, 1000, 600, comm=object())  # a group comes before an mpi4py communicator
    assert (buffer.rank, buffer.group_size, buffer.group) == (world.rank, world.nranks, group)
    assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes, buffer.low_latency_mode, buffer.enable_shrink) == (
        1000, 600, False, False)
    assert buffer.runtime is not None and buffer.runtime.is_available() and buffer.runtime.get_rdma_rank() == 0
    whole = buffer.get_local_buffer_tensor(torch.uint8)
    assert whole.shape == (1000,) and buffer.get_local_buffer_tensor(torch.int64, use_rdma_buffer=True).shape == (75,)
    part = buffer.get_local_buffer_tensor(torch.int32, torch.Size((3, 5)), 16)
    part.fill_(-1)
    assert part.shape == (3, 5) and whole[16:76].eq(255).all() and part.data_ptr() == whole.data_ptr() + 16
    del whole
    assert buffer.get_local_buffer_tensor(torch.uint8)[16:76].eq(255).all()  # a view keeps the memory
    if torch.cuda.is_available():
        assert isinstance(buffer.get_comm_stream(), torch.cuda.Stream)
        return
    try:
        buffer.get_comm_stream()
        raise AssertionError("a stream without a GPU")
    except RuntimeError as error:
        assert "CUDA" in str(error)
