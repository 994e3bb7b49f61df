# SPDX-License-Identifier: Apache-2.0
"""Bad input: the exception names the argument, what was expected and what was given; the buffer works on."""

from typing import Any, Callable, List, Tuple

import deep_ep
import epx
import numpy
import torch
import torch.distributed as dist
from ranks_high_throughput import exchange, layout
from ranks_low_latency import check_one
from reference import Work
from suite import World, as_in_a_capture, environment, refused_in_a_capture

_Case = Tuple[Callable[[], Any], str]


def refused(cases: List[_Case]) -> None:
    """Each call must raise ArgumentError (or UsageError) with the words given."""
    for number, (call, words) in enumerate(cases):
        try:
            call()
        except (epx.ArgumentError, epx.UsageError) as error:
            # DeepEP asserts in Python and raises RuntimeError in C++; what the C library finds is the latter alone.
            assert isinstance(error, RuntimeError)
            assert isinstance(error, AssertionError) or "topk_idx[" in str(error)
            text = str(error)
            assert all(word in text for word in words.split("|")), "case %d: %r not in %r" % (number, words, text)
            assert "expected" in text or "destroyed" in text, text
        else:
            raise AssertionError("case %d (%s) was accepted" % (number, words))


def test_high_throughput(world: World) -> None:
    buffer = world.buffer()
    work = Work(world.nranks, 12, 128, 2 * world.nranks, 2, seed=1, uneven=False)
    me, n = world.rank, 12
    x, idx, weights = world.to(work.x[me]), world.to(work.idx[me]), world.to(work.weights[me])
    parts = layout(buffer, idx, work.experts)
    recv, *_rest, handle, _event = buffer.dispatch(x, **parts, topk_idx=idx, topk_weights=weights)

    def dispatch(x: Any = x, **changes: Any) -> Any:
        return buffer.dispatch(x, **{**parts, "topk_idx": idx, "topk_weights": weights, **changes})

    fp8 = torch.zeros(n, 128, dtype=torch.float8_e4m3fn, device=world.device)
    refused([
        (lambda: dispatch("tokens"), "x|tensor|str"),
        (lambda: dispatch(x.double()), "x|dtype bfloat16|float64"),
        (lambda: dispatch(x[0]), "x|shape [*, *]|[128]"),
        (lambda: dispatch(x.t()), "x|contiguous"),
        (lambda: dispatch(x[:, :4].contiguous()), "x|16 bytes|8 bytes"),
        (lambda: dispatch((fp8,)), "x|pair|1 items"),
        (lambda: dispatch((fp8, weights.double())), "x[1]|float32 or int32|float64"),
        (lambda: dispatch((x, weights)), "x[0]|float8_e4m3fn|bfloat16"),
        (lambda: dispatch(num_tokens_per_rank=None), "num_tokens_per_rank|tensor|NoneType"),
        (lambda: dispatch(is_token_in_rank=parts["is_token_in_rank"][:, :1]), "is_token_in_rank|shape"),
        (lambda: dispatch(is_token_in_rank=None), "is_token_in_rank|NoneType"),
        (lambda: dispatch(num_tokens_per_expert=parts["num_tokens_per_expert"].float()), "num_tokens_per_expert|int32"),
        (lambda: dispatch(topk_idx=idx[:3]), "topk_idx|shape [12, *]"),
        (lambda: dispatch(topk_idx=idx.float()), "topk_idx|int64"),
        (lambda: dispatch(topk_weights=weights.double()), "topk_weights|float32|float64"),
        (lambda: dispatch(topk_weights=None), "topk_weights|both or neither"),
        (lambda: dispatch(topk_idx=None, topk_weights=None, num_worst_tokens=99), "topk_idx|num_worst_tokens|None"),
        (lambda: dispatch(expert_alignment=0), "expert_alignment|at least 1|0"),
        (lambda: dispatch(num_worst_tokens=-1), "num_worst_tokens|at least 0|-1"),
        (lambda: dispatch(previous_event=1), "previous_event|EventOverlap|int"),
        (lambda: dispatch(config=20), "config|Config|int"),
        (lambda: buffer.combine(recv, handle, config=20), "config|Config|int"),
        (lambda: dispatch(allocate_on_comm_stream=True), "allocate_on_comm_stream|previous_event"),
        (lambda: dispatch(handle=handle), "topk_idx, topk_weights|None|tensor"),
        (lambda: buffer.dispatch(x[:5], handle=handle), "x|12 tokens|5"),
        (lambda: buffer.dispatch(x, handle=(1, 2)), "handle|high-throughput|2 fields"),
        (lambda: buffer.combine(3, handle), "x|tensor|int"),
        (lambda: buffer.combine(recv, None), "handle|NoneType"),
        (lambda: buffer.combine(recv.float().double(), handle), "x|dtype|float64"),
        (lambda: buffer.combine(recv[:-1], handle) if recv.shape[0] else buffer.combine(None, handle), "x"),
        (lambda: buffer.combine(torch.cat([recv, x[:1]]), handle), "x|the %d rows" % recv.shape[0]),
        (lambda: buffer.combine(recv, handle, topk_weights=weights.new_zeros(recv.shape[0], 7)), "topk_weights|shape"),
        (lambda: buffer.combine(recv, handle, bias=(x, x, x)), "bias|pair|3"),
        (lambda: buffer.combine(recv, handle, bias=x[:2]), "bias|shape"),
        (lambda: buffer.get_dispatch_layout(idx.float(), 8), "topk_idx|int64"),
        (lambda: buffer.get_dispatch_layout(idx, 0), "num_experts|at least 1|0"),
    ])
    refused_in_a_capture(dispatch, "num_worst_tokens")
    with as_in_a_capture():
        dispatch(num_worst_tokens=world.nranks * n)
        buffer.dispatch(x, handle=handle)
    exchange(world, buffer, work)


def test_shapes_of_scales(world: World) -> None:
    """Groups of 128 channels, or of another power of two; four to an int32."""
    buffer, hybrid = world.buffer(), deep_ep.HybridEPBuffer(dist.group.WORLD, 256, 12, 2)
    work = Work(world.nranks, 12, 256, 2 * world.nranks, 2, seed=1, uneven=False)
    me, marks = world.rank, torch.zeros(12, work.experts, dtype=torch.bool)
    idx, weights = world.to(work.idx[me]), world.to(work.weights[me])
    for line, experts in zip(marks, work.idx[me].tolist()):
        line[[e for e in experts if e >= 0]] = True
    given = dict(layout(buffer, idx, work.experts), topk_idx=idx, topk_weights=weights)
    for hidden, taken, not_taken in ((256, (1, 2, 4, 8), (0, 3, 5, 257)), (384, (1, 2, 3, 6, 12), (0, 4, 5, 7)),
                                     (2176, (5, 17, 34, 68), (0, 4, 6, 16, 18))):
        rows = world.to(torch.zeros(12, hidden, dtype=torch.float8_e4m3fn))
        for columns in taken:
            scales = torch.rand(12, columns, device=world.device)
            recv, *_others, handle, _event = buffer.dispatch((rows, scales), **given)
            assert recv[1].shape == (recv[0].shape[0], columns)
        for columns in not_taken:
            scales = torch.zeros(12, columns, device=world.device)
            refused([(lambda: buffer.dispatch((rows, scales), **given), "x[1]|group of channels"),
                     (lambda: buffer.dispatch((rows, scales), handle=handle), "x[1]|group of channels"),
                     (lambda: hybrid.dispatch(rows, scales, routing_map=world.to(marks)),
                      "scaling_factor|group of channels")])


def test_counts_of_nodes(world: World) -> None:
    buffer, work = world.node_buffer(), Work(world.nranks, 4, 128, world.nranks, 1, seed=2, uneven=False)
    idx, weights = world.to(work.idx[world.rank]), world.to(work.weights[world.rank])
    parts = dict(layout(buffer, idx, work.experts), topk_idx=idx, topk_weights=weights)
    refused([(lambda: buffer.dispatch(world.to(work.x[world.rank]), **{
        **parts, "num_tokens_per_rdma_rank": torch.zeros(3, dtype=torch.int32, device=world.device)}),
        "num_tokens_per_rdma_rank|shape [2]|[3]")])
    exchange(world, buffer, work)


def test_indices_out_of_range(world: World) -> None:
    """On the CPU they are seen before anything is sent."""
    world.only("cpu")
    buffer = world.buffer()
    work = Work(world.nranks, 6, 128, 2 * world.nranks, 2, seed=2, uneven=False)
    x, idx, weights = work.x[world.rank], work.idx[world.rank], work.weights[world.rank]
    parts = layout(buffer, idx, work.experts)
    exchange(world, buffer, work)
    bad = idx.clone()
    bad[3, 1] = work.experts
    refused([
        (lambda: buffer.dispatch(x, **parts, topk_idx=bad, topk_weights=weights), "topk_idx[3][1]|%d" % work.experts),
        (lambda: buffer.low_latency_dispatch(x, bad, 8, work.experts), "topk_idx[3][1]|%d" % work.experts),
    ])
    exchange(world, buffer, work)
    check_one(world, buffer, work, 8)


def test_recovery(world: World) -> None:
    """Too few num_worst_tokens fail the operation on all ranks; after recover() on all of them the buffer works.

    A rank that finds out before it has sent anything leaves the others to their deadline: a short one here."""
    world.only("cpu")
    work = Work(world.nranks, 12, 128, 2 * world.nranks, 2, seed=4, uneven=False)
    with environment(EPX_TIMEOUT_MS=world.deadline(3000)):
        buffer = deep_ep.Buffer(dist.group.WORLD, 1 << 26, 0, explicitly_destroy=True)
        fail_and_recover(world, buffer, work)
    exchange(world, buffer, work)
    buffer.destroy()


def fail_and_recover(world: World, buffer: deep_ep.Buffer, work: Work) -> None:
    me = world.rank
    idx = world.to(work.idx[me])
    parts = layout(buffer, idx, work.experts)
    try:
        buffer.dispatch(world.to(work.x[me]), **parts, topk_idx=idx, topk_weights=world.to(work.weights[me]),
                        num_worst_tokens=1)
    except epx.EpxError as error:
        assert "recover() on all ranks" in str(error) and "epx_group_error_clear" not in str(error), error
    else:
        raise AssertionError("too few num_worst_tokens were accepted")
    dist.barrier()
    buffer.recover()


def test_layout_of_experts_that_do_not_exist(world: World) -> None:
    """The first id past the last expert was once counted for nobody, in silence. On a GPU, dispatch reports it."""
    world.only("cpu")
    buffer = world.buffer()
    idx = torch.tensor([[0, 7], [-1, 3]])
    for given in (8, 9, -2):
        bad = idx.clone()
        bad[1, 0] = given
        refused([(lambda bad=bad: buffer.get_dispatch_layout(bad, 8), "topk_idx[1][0]|-1 (none) to 7|%d" % given)])
    per_expert = buffer.get_dispatch_layout(idx, 8)[2]
    assert per_expert.tolist() == [1, 0, 0, 1, 0, 0, 0, 1]


def test_low_latency(world: World) -> None:
    buffer = world.buffer()
    work = Work(world.nranks, 6, 128, 2 * world.nranks, 2, seed=3, uneven=False)
    me = world.rank
    x, idx, weights = world.to(work.x[me]), world.to(work.idx[me]), world.to(work.weights[me])
    recv, _counts, handle, _event, _hook = buffer.low_latency_dispatch(x, idx, 8, work.experts, use_fp8=False)
    dispatch, combine = buffer.low_latency_dispatch, buffer.low_latency_combine
    fifteen = torch.zeros(world.nranks + 1, dtype=torch.int64, device=world.device)
    refused([
        (lambda: dispatch(None, idx, 8, work.experts), "x|tensor|NoneType"),
        (lambda: dispatch(x.float(), idx, 8, work.experts), "x|bfloat16|float32"),
        (lambda: dispatch(x, idx, 4, work.experts), "x|num_max_dispatch_tokens_per_rank = 4|6"),
        (lambda: dispatch(x, idx[:2], 8, work.experts), "topk_idx|shape [6, *]"),
        (lambda: dispatch(x, idx, 8, -1), "num_experts|at least 1|-1"),
        (lambda: dispatch(x, idx, 0, work.experts), "num_max_dispatch_tokens_per_rank|0"),
        (lambda: dispatch(x, idx, 8, work.experts, use_ue8m0=True), "use_ue8m0|round_scale"),
        (lambda: dispatch(x, idx, 8, work.experts, async_finish=True, return_recv_hook=True), "at most one|both"),
        (lambda: dispatch(x, idx, 8, work.experts, cumulative_local_expert_recv_stats=fifteen),
         "cumulative_local_expert_recv_stats|int32|int64"),
        (lambda: dispatch(x, idx, 8, work.experts, dispatch_wait_recv_cost_stats=fifteen),
         "dispatch_wait_recv_cost_stats|shape"),
        (lambda: combine(recv, idx, weights, (1,)), "handle|low-latency|1 fields"),
        (lambda: dispatch(x, idx, [], work.experts), "num_max_dispatch_tokens_per_rank|at least 1"),
        (lambda: dispatch(x, idx, 8, work.experts << 32), "num_experts|at most 1048576"),
        (lambda: combine(recv[:1, :3], idx, weights, handle), "x|shape"),
        (lambda: combine(recv.float(), idx, weights, handle), "x|bfloat16"),
        (lambda: combine(recv, idx, weights.double(), handle), "topk_weights|float32"),
        (lambda: combine(recv, idx[:1], weights, handle), "topk_idx|shape"),
        (lambda: combine(recv, idx, weights, handle, out=x[:1]), "out|shape"),
        (lambda: combine(recv, idx, weights, handle, zero_copy=True), "get_next_low_latency_combine_buffer"),
        (lambda: buffer.low_latency_query_mask_buffer(fifteen), "enable_shrink"),
        (lambda: buffer.low_latency_clean_mask_buffer(), "enable_shrink"),
        (lambda: buffer.low_latency_update_mask_buffer(0, True), "enable_shrink"),
        (lambda: buffer.clean_low_latency_buffer(0, 1, 1), "num_max_dispatch_tokens_per_rank"),
        (lambda: deep_ep.Buffer.set_num_sms(3), "new_num_sms|even|3"),
        (lambda: deep_ep.Config(num_max_nvl_chunked_send_tokens=0), "num_max_nvl_chunked_send_tokens|at least 1|0"),
        (lambda: deep_ep.EventOverlap().current_stream_wait(), "event|None"),
        (lambda: buffer.get_local_buffer_tensor(torch.int8, torch.Size([1 << 30])), "size|at most"),
        (lambda: deep_ep.Buffer(None), "group, comm|neither"),
    ])
    buffer.get_next_low_latency_combine_buffer(handle)
    refused([(lambda: combine(recv, idx, weights, handle, zero_copy=True, use_logfmt=True), "zero_copy|use_logfmt")])
    check_one(world, buffer, work, 8)


def test_too_many_tokens(world: World) -> None:
    """num_worst_tokens, where no rank waits for counts, and more tokens than the ranks have agreed on: all ranks say
    so."""
    world.only("cpu")
    with environment(EPX_DEEP_EP_MAX_TOKENS="32"):
        buffer = deep_ep.Buffer(dist.group.WORLD, explicitly_destroy=True)
        small = Work(world.nranks, 40, 128, 2 * world.nranks, 2, seed=5, uneven=False)
        large = Work(world.nranks, 65, 128, 2 * world.nranks, 2, seed=5, uneven=False)
        exchange(world, buffer, small)  # 64: the first call decides where it needs more
        work = large if world.rank == 1 else small
        idx = work.idx[world.rank]
        try:
            buffer.dispatch(work.x[world.rank], **layout(buffer, idx, work.experts), topk_idx=idx,
                            topk_weights=work.weights[world.rank], num_worst_tokens=65 * world.nranks)
            raise AssertionError("a dispatch of 65 tokens succeeded where 64 were agreed on")
        except epx.OverflowingError as error:
            assert "65" in error.message and "64" in error.message, error
        world.meet()
        buffer.destroy()


def test_absent_rank(world: World) -> None:
    """A rank that does not come: a timeout that names it."""
    world.only("cpu")
    with environment(EPX_TIMEOUT_MS=world.deadline(1000)):
        buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True)
        work = Work(world.nranks, 6, 128, 2 * world.nranks, 2, seed=6)
        check_one(world, buffer, work, 8)
        late = world.nranks - 1
        world.meet()
        if world.rank != late:
            try:
                buffer.low_latency_dispatch(work.x[world.rank], work.idx[world.rank], 8, work.experts)
                raise AssertionError("a dispatch without rank %d succeeded" % late)
            except epx.EpxError as error:
                assert error.status in (epx.Status.TIMEOUT, epx.Status.PEER), error
                assert error.status != epx.Status.TIMEOUT or "rank %d" % late in error.message, error
        world.meet()
        buffer.destroy()


def test_what_was_taken_for_a_tensor(world: World) -> None:
    """What is no tensor, in the place of one that was checked in an earlier call with the same plan."""
    buffer = world.buffer()
    work = Work(world.nranks, 6, 128, 2 * world.nranks, 2, seed=3, uneven=False)
    x, idx, weights = (world.to(part[world.rank]) for part in (work.x, work.idx, work.weights))
    recv, _counts, handle, _event, _hook = buffer.low_latency_dispatch(x, idx, 8, work.experts, use_fp8=False)
    expected = buffer.low_latency_combine(recv, idx, weights, handle)[0].clone()
    refused([
        (lambda: buffer.low_latency_combine(recv, idx, weights, handle, out="x"), "out|tensor|str"),
        (lambda: buffer.low_latency_combine(recv, "x", weights, handle), "topk_idx|tensor|str"),
        (lambda: buffer.low_latency_combine(recv, None, weights, handle), "topk_idx|tensor|NoneType")])
    assert torch.equal(buffer.low_latency_combine(recv, idx, weights, handle)[0], expected)


def test_hints(world: World) -> None:
    hint, config = deep_ep.Buffer.get_low_latency_rdma_size_hint, deep_ep.Config()
    good = (8, 128, 4, 16)
    assert hint(*good) > 0
    for i, name in enumerate(("num_max_dispatch_tokens_per_rank", "hidden", "num_ranks", "num_experts")):
        refused([(lambda: hint(*good[:i], bad, *good[i + 1:]), name) for bad in (0, -1, "8", None, 2.0, 1 << 40)])
    for call in (config.get_nvl_buffer_size_hint, config.get_rdma_buffer_size_hint):
        refused([(lambda: call("x", 8), "hidden_bytes|'x'"), (lambda: call(64, 0), "num_ranks|0")])


def test_integers_of_numpy(world: World) -> None:
    """Numbers may be integers of any kind, as for DeepEP's compiled functions; floats and bools are refused."""
    whole, experts = numpy.int64, 2 * world.nranks
    x = world.to(torch.ones(3, 128, dtype=torch.bfloat16))
    idx, weights = world.to(torch.full((3, 1), (world.rank + 1) % experts)), world.to(torch.ones(3, 1))
    buffer = deep_ep.ElasticBuffer(dist.group.WORLD, whole(2 << 20), num_topk=whole(1), num_cpu_timeout_secs=whole(60))
    recv, _idx, _weights, handle, _event = buffer.dispatch(
        x, idx, num_experts=whole(experts), num_max_tokens_per_rank=whole(3), expert_alignment=numpy.int32(4),
        num_sms=whole(4), do_expand=True)
    assert torch.equal(buffer.combine(recv, handle, num_sms=whole(4))[0], x)
    assert {type(number) for number in (handle.num_experts, handle.num_max_tokens_per_rank, handle.num_sms,
                                        handle.expert_alignment, buffer.num_bytes)} == {int}
    old = world.buffer()
    assert old.get_dispatch_layout(idx, whole(experts))[0].sum() == 3
    for _ in range(2):
        recv, _counts, low, _event, _hook = old.low_latency_dispatch(x, idx, whole(3), whole(experts), use_fp8=False)
        assert torch.equal(old.low_latency_combine(recv, idx, weights, low)[0], x)
    for bad in (2.0, True, "2"):
        try:
            buffer.dispatch(x, idx, num_experts=experts, num_max_tokens_per_rank=3, expert_alignment=bad)
            raise AssertionError("expert_alignment %r was taken" % (bad,))
        except epx.ArgumentError as error:
            assert "expert_alignment" in str(error), error
