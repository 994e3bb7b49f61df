# SPDX-License-Identifier: Apache-2.0
"""ElasticBuffer as strangers use it: arguments by position, other groups, odd sizes, calls in the wrong order."""

import contextlib
import copy
import inspect
import io
import time
from typing import Any, Callable, Iterator, List
from unittest import mock

import deep_ep
import epx
import torch
import torch.distributed as dist
from deep_ep import _memory
from deep_ep._elastic_plan import DispatchPlan
from deep_ep._fresh import RowGuess
from elastic_reference import Expanded, combined, flat_results
from ranks_elastic import (HIDDEN, MAX, at_home, check_counts, check_expanded, check_flat, crowded, elastic, make_work,
                           nowhere, send)
from ranks_growth import dispatch as dispatch_v1
from reference import Work, same_bits
from suite import World, as_on_a_gpu, environment

BIG = 64 << 20


@contextlib.contextmanager
def refused(what: str) -> Iterator[None]:
    """What is done here is refused before anything is sent, with a text that has `what`."""
    try:
        yield
    except (deep_ep.ArgumentError, deep_ep.UsageError) as error:
        assert what in str(error), error
    else:
        raise AssertionError("expected an error about " + what)


def check_signature(function: Callable[..., Any], expected: str) -> None:
    """Names in their order, each with its default if it has one; self is left out."""
    made = [name if value.default is value.empty else "%s=%s" % (name, value.default)
            for name, value in inspect.signature(function).parameters.items() if name != "self"]
    assert " ".join(made) == expected, (function, made)


def test_signatures(world: World) -> None:
    """[E] 2, 3, 4, 5, [R] 6: the constructor, dispatch, combine and what is beside them: order and defaults."""
    buffer = deep_ep.ElasticBuffer
    check_signature(
        buffer.__init__,
        "group num_bytes=None num_cpu_bytes=0 num_max_tokens_per_rank=0 hidden=0 num_topk=0 use_fp8_dispatch=False "
        "deterministic=False allow_hybrid_mode=True allow_multiple_reduction=True prefer_overlap_with_compute=True "
        "sl_idx=3 num_allocated_qps=0 num_cpu_timeout_secs=300 num_gpu_timeout_secs=100 explicitly_destroy=False")
    check_signature(
        buffer.dispatch,
        "x topk_idx=None topk_weights=None cumulative_local_expert_recv_stats=None num_experts=None "
        "num_max_tokens_per_rank=None expert_alignment=None num_sms=0 num_qps=0 previous_event=None "
        "previous_event_before_epilogue=None async_with_compute_stream=False allocate_on_comm_stream=False "
        "handle=None do_handle_copy=True do_cpu_sync=None do_expand=False do_zero_padding=False "
        "use_tma_aligned_col_major_sf=False")
    check_signature(
        buffer.combine,
        "x handle topk_weights=None bias=None num_sms=0 num_qps=0 previous_event=None "
        "previous_event_before_epilogue=None async_with_compute_stream=False allocate_on_comm_stream=False")
    check_signature(buffer.get_buffer_size_hint,
                    "group num_max_tokens_per_rank hidden num_topk=0 use_fp8_dispatch=False allow_hybrid_mode=True "
                    "allow_multiple_reduction=True")
    check_signature(buffer.get_theoretical_num_sms,
                    "num_experts num_topk num_scaleout_topk=0 rdma_gbs=0 nvlink_gbs=0 sm_read_gbs=200 sm_write_gbs=50")
    check_signature(deep_ep.EPBuffer.get_theoretical_num_sms,
                    "num_experts num_topk num_scaleout_topk=0 rdma_gbs=0 nvlink_gbs=0 sm_read_gbs=0 sm_write_gbs=0")
    check_signature(buffer.barrier, "use_comm_stream=True with_cpu_sync=False sequential=True")
    check_signature(deep_ep.EPBuffer.barrier,
                    "buffer wait_comm_stream=True with_cpu_sync=False sequential=True context_idx=None")
    check_signature(buffer.engram_write, "storage sf=None")
    check_signature(buffer.engram_fetch, "indices num_qps=0 use_tma_aligned_col_major_sf=False")
    check_signature(buffer.pp_send, "t dst_rank_idx num_sms=0")
    check_signature(buffer.pp_recv, "t src_rank_idx num_sms=0")
    check_signature(buffer.agrs_new_session, "enabled=True")
    check_signature(buffer.agrs_get_inplace_tensor, "shapes dtype")
    check_signature(deep_ep.get_logical_domain_size, "group allow_hybrid_mode=True")
    check_signature(deep_ep.EventOverlap.__init__, "event=None extra_tensors=None")
    check_signature(deep_ep.EventOverlap.current_stream_wait, "release_handle=False")


def test_ranks_that_differ(world: World) -> None:
    """[E] 2: arguments that are the same on all ranks, and are not: all ranks say which, and go on."""
    odd = world.rank == world.nranks - 1
    for name, most, last in (("num_max_tokens_per_rank", 16, 8), ("hidden", HIDDEN, 32), ("num_topk", 4, 3),
                             ("allow_hybrid_mode", True, False), ("allow_multiple_reduction", True, False)):
        try:
            given = dict(num_max_tokens_per_rank=16, hidden=HIDDEN, num_topk=4)
            deep_ep.ElasticBuffer(dist.group.WORLD, **{**given, name: last if odd else most})
        except epx.MismatchError as error:
            assert "%s: expected the same on all ranks, got %d on rank 0 and %d on rank %d" % (
                name, most, last, world.nranks - 1) in str(error), error
        else:
            raise AssertionError("expected an error about " + name)
    # With num_bytes they are defaults of calls, if at all.
    buffer = deep_ep.ElasticBuffer(dist.group.WORLD, BIG, hidden=32 if odd else HIDDEN, explicitly_destroy=True)
    buffer.barrier()
    buffer.destroy()
    work = make_work(world, 2)
    seconds = max(int(world.deadline(1000)) // 1000, 1)
    with elastic(world, num_cpu_timeout_secs=seconds, num_gpu_timeout_secs=2 * seconds) as buffer:
        expected = send(world, buffer, work)[0].clone()
        try:  # all need a larger group, of different sizes
            send(world, buffer, work, num_max_tokens_per_rank=100 + odd)
            raise AssertionError("expected an error about max_tokens_per_rank")
        except epx.MismatchError as error:
            assert "max_tokens_per_rank = 101" in str(error) and "100" in str(error), error
        assert same_bits(send(world, buffer, work)[0], expected)
        world.meet()
        try:  # one of them needs a larger group
            send(world, buffer, work, num_max_tokens_per_rank=100 if odd else None)
            raise AssertionError("expected an error about time")
        except epx.TimeoutExpired as error:
            assert "Dispatch CPU wait" in str(error), error
            assert not odd or "num_max_tokens_per_rank = 100" in str(error) and "pass the same" in str(error), error
        world.meet()
        buffer.recover()
        world.meet()
        assert same_bits(send(world, buffer, work)[0], expected)
    with elastic(world, num_bytes=BIG, num_cpu_bytes=2 << 20) as buffer:
        for name, entries, hidden in (("entries", 4 + odd, 16), ("hidden", 4, 16 + 16 * odd)):
            try:
                buffer.engram_write(world.to(torch.zeros(entries, hidden).bfloat16()))
                raise AssertionError("expected an error about " + name)
            except epx.MismatchError as error:
                assert "storage: %s: expected the same on all ranks" % name in str(error), error
        buffer.engram_write(world.to(torch.zeros(4, 16).bfloat16()))
        world.meet()
    with elastic(world, num_bytes=BIG) as buffer:  # the pairs of a ring are not all beside the rank that differs
        for name, config in (("num_max_tensor_bytes", (2048 + 2048 * odd, 2)),
                             ("num_max_inflight_tensors", (64, 2 + odd))):
            try:
                buffer.pp_set_config(*config)
                raise AssertionError("expected an error about " + name)
            except epx.MismatchError as error:
                assert name + ": expected the same on all ranks" in str(error), error
        buffer.pp_set_config(64, 2)
        world.meet()


def test_by_position(world: World) -> None:
    """[E] 2: all arguments of the constructor by position; [R] 8: EP_BUFFER_DEBUG."""
    with environment(EP_BUFFER_DEBUG="1"), contextlib.redirect_stdout(io.StringIO()) as printed:
        buffer = deep_ep.ElasticBuffer(dist.group.WORLD, BIG, 2 << 20, 96, 256, 4, True, True, False, False, False, 3,
                                       9, 30, 20, True)
    assert "%d bytes" % BIG in printed.getvalue()
    assert (buffer.num_bytes, buffer.num_cpu_bytes, buffer.num_max_tokens_per_rank) == (BIG, 2 << 20, 96)
    assert buffer.deterministic and not buffer.allow_hybrid_mode and not buffer.allow_multiple_reduction
    assert not buffer.prefer_overlap_with_compute and buffer.sl_idx == 3 and buffer.num_allocated_qps == 9
    assert (buffer.num_cpu_timeout_secs, buffer.num_gpu_timeout_secs) == (30, 20) and buffer.explicitly_destroy
    work = make_work(world, 2)
    me = world.rank
    rows, _idx, _weights, handle, _event = buffer.dispatch(
        world.to(work.x[me]), world.to(work.idx[me]), world.to(work.weights[me]), None, work.experts, 48, 4, 6, 3, None,
        None, False, False, None, False, True, True, True, False)
    zones = Expanded(work, me, 4)
    assert same_bits(rows, zones.rows(work.x)) and handle.num_max_tokens_per_rank == 48 and handle.num_sms == 6
    bias = torch.ones(work.x[me].shape).bfloat16()
    out, none, _event = buffer.combine(world.to(zones.results(work, rows.shape[0])), handle, None, world.to(bias), 6, 3,
                                       None, None, False, False)
    assert none is None and same_bits(out, combined(work, me, world.nranks, True, False, False, [bias]))
    buffer.destroy()


def test_domains_of_two_nodes(world: World) -> None:
    """[E] 1: (RDMA ranks, NVLink ranks) of a group on two nodes; flat without hybrid mode."""
    per, group = world.nranks // 2, dist.new_group(list(range(world.nranks)))
    with environment(EPX_RANKS_PER_NODE=str(per)):
        assert deep_ep.get_physical_domain_size(group) == deep_ep.utils.envs.get_physical_domain_size(group) == (2, per)
        assert deep_ep.get_logical_domain_size(group) == deep_ep.utils.envs.get_logical_domain_size(group) == (2, per)
        assert deep_ep.get_logical_domain_size(group, False) == (1, world.nranks)


def test_groups_of_some_ranks(world: World) -> None:
    """[E] 2: half of the ranks have a buffer of their own; ranks are those of the group."""
    half = world.nranks // 2
    groups = [dist.new_group(list(range(first, first + half))) for first in (0, half)]
    group = groups[world.rank // half]
    me, work = world.rank % half, Work(half, MAX, HIDDEN, 2 * half, 2, 40 + world.rank // half)
    buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=MAX, hidden=HIDDEN, explicitly_destroy=True)
    assert (buffer.rank_idx, buffer.num_ranks, buffer.num_nvlink_ranks) == (me, half, half)
    rows, _idx, _weights, handle, _event = buffer.dispatch(
        world.to(work.x[me]), world.to(work.idx[me]), num_experts=work.experts)
    assert same_bits(rows, work.flat(me)[2])
    out, *_ = buffer.combine(world.to(flat_results(work, me, rows.shape[0])), handle)
    assert same_bits(out, combined(work, me, half, False, True, False, []))
    buffer.destroy()


def test_deterministic(world: World) -> None:
    """[E] 2, 4: two dispatches give the same rows in the same order, asynchronous ones after the wait."""
    with elastic(world, deterministic=True) as buffer:
        assert buffer.deterministic
        work = make_work(world, 3)
        for expand in (False, True):
            first = send(world, buffer, work, do_expand=expand, do_zero_padding=expand)
            again = send(world, buffer, work, do_expand=expand, do_zero_padding=expand, async_with_compute_stream=True)
            again[4].current_stream_wait()
            for result in (first, again):
                if expand:
                    check_expanded(world, work, result, lambda x: x, 1, True)
                else:
                    check_flat(world, work, result, lambda x: x, True)
                result[3].deterministic_sort()
            assert torch.equal(first[3].recv_src_metadata, again[3].recv_src_metadata)


def test_gpu_timeout(world: World) -> None:
    """[E] 2: without CPU sync, the wait for a rank that does not come is bounded by num_gpu_timeout_secs."""
    work = make_work(world, 2)
    with elastic(world, num_gpu_timeout_secs=1) as buffer:
        send(world, buffer, work)
        world.meet()
        begin = time.perf_counter()
        if world.rank != 1:
            try:
                send(world, buffer, work, do_cpu_sync=False)
                if world.device.type == "cuda":  # the next call says it
                    torch.cuda.synchronize()
                    send(world, buffer, work, do_cpu_sync=False)
                raise AssertionError("a dispatch without rank 1 succeeded")
            except epx.EpxError as error:
                assert "rank 1" in str(error), error
        assert time.perf_counter() - begin < 15  # EPX_TIMEOUT_MS is 30 s here
        world.meet()


def test_comm_stream(world: World) -> None:
    """[R] 3: one stream of high priority for all buffers; without a GPU an error."""
    with elastic(world) as one, elastic(world) as other:
        if world.device.type == "cuda":
            assert one.get_comm_stream() is other.get_comm_stream() and one.get_comm_stream().priority < 0
        elif not torch.cuda.is_available():
            for buffer in (one, other):
                try:
                    buffer.get_comm_stream()
                    raise AssertionError("a stream without a GPU")
                except RuntimeError as error:
                    assert "CUDA" in str(error)


def test_after_destroy(world: World) -> None:
    """[E] 3: every call says that the buffer was destroyed; what needs no ranks still answers; results stay."""
    work = make_work(world, 2)
    with elastic(world, num_bytes=BIG) as buffer:
        rows, _idx, _weights, handle, _event = send(world, buffer, work)
    x = world.to(work.x[world.rank])
    one = world.to(torch.zeros(1, 1, dtype=torch.int32))
    for call in (lambda: send(world, buffer, work), lambda: buffer.dispatch(x, handle=handle),
                 lambda: buffer.combine(rows, handle), buffer.barrier, buffer.recover,
                 lambda: buffer.pp_set_config(1024, 2), lambda: buffer.pp_send(x, 0),
                 lambda: buffer.agrs_set_config(1024, 2), lambda: buffer.all_gather(x), lambda: buffer.engram_write(x),
                 lambda: buffer.engram_fetch(one)):
        with refused("destroyed"):
            call()
    assert buffer.get_theoretical_num_sms(16, 4) >= 4 and buffer.get_logical_domain_size() == (1, world.nranks)
    assert same_bits(rows, work.flat(world.rank)[2])
    with elastic(world) as other, refused("destroyed"):
        other.combine(rows, handle)


def test_unusual_arguments(world: World) -> None:
    """[E] 4, 5: any num_sms; zero tokens everywhere; allocate_on_comm_stream alone; an event without an event; forms of
    bias; more rows than are used."""
    me = world.rank
    with elastic(world) as buffer:
        work = make_work(world, 2)
        for options in (dict(num_sms=1), dict(num_sms=7), dict(num_sms=1001), dict(allocate_on_comm_stream=True),
                        dict(previous_event=deep_ep.EventOverlap()), dict(num_qps=1), dict(expert_alignment=1000)):
            result = send(world, buffer, work, **options)
            check_flat(world, work, result, lambda x: x, True)
            check_counts(work, me, result[3], options.get("expert_alignment", 1), world.nranks, True)
        rows, handle = world.to(flat_results(work, me, result[0].shape[0])), result[3]
        bias = world.to(torch.randn(work.x[me].shape).bfloat16())
        want = combined(work, me, world.nranks, False, True, False, [bias.cpu()])
        for form in (bias, (bias,), [bias], (bias, None), (None, bias)):
            assert same_bits(buffer.combine(rows, handle, bias=form, num_sms=3)[0], want)
        wide = send(world, buffer, work, do_expand=True)
        more = world.to(Expanded(work, me, 1).results(work, wide[0].shape[0] + 9))
        for weights in (None, wide[2], torch.cat([wide[2], wide[2].new_zeros(9)])):
            out, back, _event = buffer.combine(more, wide[3], topk_weights=weights)
            assert same_bits(out, combined(work, me, world.nranks, True, True, False, []))
            assert weights is None or torch.equal(back.cpu(), torch.where(work.idx[me] < 0, 0.0, work.weights[me]))
        work = make_work(world, 2)
        for part in (work.x, work.idx, work.weights):
            part[:] = [tensor[:0] for tensor in part]
        for sync, expand in ((True, False), (True, True), (False, False), (False, True)):
            recv, _idx, weights, handle, _event = send(world, buffer, work, do_cpu_sync=sync, do_expand=expand)
            check_counts(work, me, handle, 1, world.nranks, sync)
            assert buffer.combine(recv, handle, topk_weights=weights)[0].shape == (0, HIDDEN)


def test_handles_of_other_rows(world: World) -> None:
    """[E] 4: by handle: rows of another width and dtype; handles that were copied, whose indices the caller has
    overwritten, or whose buffer is gone; with another buffer."""
    me, work = world.rank, make_work(world, 2)
    idx, rows = world.to(work.idx[me]).clone(), work.flat(me)[2]
    with elastic(world) as first, elastic(world) as second:
        handle = send(world, first, work, topk_idx=idx, do_handle_copy=False)[3]
        idx.zero_()
        for columns, dtype in ((HIDDEN, torch.bfloat16), (HIDDEN // 4, torch.bfloat16), (HIDDEN // 2, torch.float32)):
            values = [x[:, :columns].to(dtype).contiguous() for x in work.x]
            want = torch.stack([values[s][t] for s, t in zip(*(part.tolist() for part in work.flat(me)[:2]))]) \
                if len(rows) else values[0][:0]
            for buffer, used in ((first, handle), (second, copy.copy(handle)), (first, copy.deepcopy(handle))):
                got, recv_idx, *_ = buffer.dispatch(world.to(values[me]), handle=used)
                assert same_bits(got, want) and torch.equal(recv_idx.cpu(), work.flat(me)[3])
        with refused("at most"):
            first.dispatch(world.to(torch.zeros(len(idx), 64 * HIDDEN).bfloat16()), handle=handle)
        with refused("tokens"):
            first.dispatch(world.to(torch.zeros(len(idx) + 1, HIDDEN).bfloat16()), handle=handle)
    gone = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=MAX, hidden=HIDDEN)
    handle = send(world, gone, work)[3]
    del gone
    with elastic(world) as other:
        assert same_bits(other.dispatch(world.to(work.x[me]), handle=handle)[0], rows)


def test_handles_that_are_changed(world: World) -> None:
    """[E] 4: recv_src_metadata is cut to the lines that count, and combine takes as many rows; fields are assigned;
    some ranks use a copy that was made before the first use without expansion."""
    work, me = make_work(world, 6), world.rank
    x, idx = world.to(work.x[me]), world.to(work.idx[me])
    with elastic(world) as buffer:
        rows, _idx, _weights, handle, _event = buffer.dispatch(x, idx, num_experts=work.experts, do_cpu_sync=False)
        sums = buffer.combine(rows, handle)[0]
        count = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        assert 0 < count < rows.shape[0]
        handle.recv_src_metadata = handle.recv_src_metadata[:count]
        handle.dst_buffer_slot_idx = handle.dst_buffer_slot_idx
        assert same_bits(buffer.combine(rows[:count], handle)[0], sums)
        wide = buffer.dispatch(x, idx, num_experts=work.experts, do_expand=True)[3]
        early = copy.copy(wide)
        flat = buffer.dispatch(x, handle=wide)[0]
        assert same_bits(buffer.dispatch(x, handle=wide if me else early)[0], flat)


def test_rows_that_nobody_expected(world: World) -> None:
    """[E] 4: with CPU sync, each dispatch with many more or fewer rows than the ones before it: it is queued before the
    rows are known, in small heaps into torch's memory, and again where they do not fit. Results are exact, and earlier
    ones stay."""
    kinds = (at_home, crowded, lambda work: work, nowhere, crowded, lambda work: work, lambda work: work)
    queued = mock.Mock(side_effect=DispatchPlan.queue, autospec=True)
    for heap, spare in (("", True), ("40K", True), ("40K", False)):
        with environment(**({"EPX_ALLOC_BYTES": heap} if heap else {})), as_on_a_gpu(world), elastic(world) as buffer, \
                contextlib.ExitStack() as patches:
            patches.enter_context(mock.patch.object(DispatchPlan, "queue", lambda *given: queued(*given)))
            if not spare:  # a few rows more do not fit
                patches.enter_context(mock.patch.object(RowGuess, "rows", lambda self, limit, level=0: self._most))
            for expand in (False, True):
                check_kept(world, buffer, [kind(make_work(world, 20 + i, local=4)) for i, kind in enumerate(kinds)],
                           expand)
    early = sum(bool(call.args[7]) for call in queued.call_args_list)
    late, calls = len(queued.call_args_list) - early, 3 * 2 * 2 * len(kinds)
    # The first of each kind has no guess, and those into torch's memory have none where rows are too different.
    assert calls // 2 < early <= calls - 6 and 6 + 4 <= late < calls // 2, (early, late)


def test_padding_that_fills_the_receive_buffer(world: World) -> None:
    """[E] 4: a dispatch into torch's memory is not queued early for more rows than the receive buffer holds."""
    alignment = world.nranks * MAX + 127
    idx = world.to(torch.arange(4).expand(MAX, 4).contiguous())  # of all ranks: all rows go to rank 0
    x = world.to(torch.randn(MAX, HIDDEN, generator=torch.Generator().manual_seed(world.rank)).bfloat16())
    with environment(EPX_ALLOC_BYTES="4K"), as_on_a_gpu(world), elastic(world) as buffer:
        for _ in range(3):
            result = buffer.dispatch(x, idx, num_experts=4 * world.nranks, do_expand=True, expert_alignment=alignment)
            assert result[0].shape[0] == (0 if world.rank else 4 * alignment)
            assert same_bits(buffer.combine(result[0], result[3])[0], x * 4)


def check_held(world: World, dispatch: Callable[[Work], Any], check: Callable[[Work, Any], None]) -> None:
    """As in training: each dispatch follows the release of the oldest of six results. The host waits for the GPU in
    none of them."""
    with mock.patch.object(torch.cuda, "synchronize", side_effect=AssertionError("the host waited")):
        held: List[Any] = []
        for i in range(24):
            del held[:-5]
            work = make_work(world, 60 + i, local=4)
            held.append((work, dispatch(work)))
            for one in held if i % 12 == 11 else ():
                check(*one)
        del held, one


def test_results_that_are_held(world: World) -> None:
    """V1 and V2, in heaps with room for one of the results, and for some."""
    world.only("cpu")
    me = world.rank
    for heap in ("24K", "100K"):
        with environment(EPX_ALLOC_BYTES=heap), as_on_a_gpu(world), elastic(world) as buffer:
            for expand in (False, True):
                check_held(world, lambda work: send(world, buffer, work, do_expand=expand, expert_alignment=3),
                           lambda work, result: check_result(world, buffer, work, result, expand))
        with environment(EPX_ALLOC_BYTES=heap), as_on_a_gpu(world):
            old = deep_ep.Buffer(dist.group.WORLD, 8 << 20, 0, explicitly_destroy=True)

            def check(work: Work, result: Any) -> None:
                assert same_bits(result[0], work.flat(me)[2]) and torch.equal(result[1], work.flat(me)[3])
                old.combine(result[0], result[4])
            check_held(world, lambda work: dispatch_v1(world, old, work), check)
            old.destroy()


def check_kept(world: World, buffer: deep_ep.ElasticBuffer, works: List[Work], expand: bool) -> None:
    """Dispatches one after the other; all results, and what combine makes of them."""
    for keep in (True, False):
        kept = []
        for work in works:
            result = send(world, buffer, work, do_expand=expand, expert_alignment=3)
            kept.append((work, result))
            for work, result in [] if keep else kept:
                check_result(world, buffer, work, result, expand)
            if not keep:
                kept.clear()
                del result
        for work, result in kept:
            check_result(world, buffer, work, result, expand)


def check_result(world: World, buffer: deep_ep.ElasticBuffer, work: Work, result: Any, expand: bool) -> None:
    """One of them."""
    if expand:
        check_expanded(world, work, result, lambda x: x, 3, True)
    else:
        check_flat(world, work, result, lambda x: x, True)
    check_counts(work, world.rank, result[3], 3, buffer.num_scaleup_ranks, True)
    assert buffer.combine(result[0], result[3])[0].shape == work.x[world.rank].shape


def test_a_failed_dispatch_keeps_what_it_has_queued(world: World) -> None:
    """A dispatch that fails behind its exchange of counts, without memory say: the counts that come later do not go
    into memory that others have by then. The buffer stays usable."""
    work = make_work(world, 2)

    def fail(*_arguments: Any) -> Any:
        raise MemoryError

    def failing(buffer: deep_ep.ElasticBuffer) -> None:
        with mock.patch.object(DispatchPlan, "run", fail), contextlib.suppress(MemoryError):
            send(world, buffer, work, do_cpu_sync=False)
            raise AssertionError("did not fail")
    with elastic(world) as buffer:
        counts = world.nranks + 2 * work.local  # int32
        expected = send(world, buffer, work)[0]
        taken = []
        if not world.rank:
            failing(buffer)
            taken = [torch.full((counts,), -7, dtype=torch.int32) for _ in range(64)]
        world.meet()  # the others' counts come now
        if world.rank:
            failing(buffer)
        world.meet()
        assert same_bits(send(world, buffer, work)[0], expected)
        assert all(torch.equal(t, torch.full_like(t, -7)) for t in taken)


def test_limits_of_other_parts(world: World) -> None:
    """[R] 6: Engram, pipeline and all-gather say what was wrong, and work after that."""
    me, ranks, device = world.rank, world.nranks, world.device
    after, before = (me + 1) % ranks, (me - 1) % ranks
    one = torch.full((64,), float(me), device=device)
    with elastic(world, num_bytes=BIG, num_cpu_bytes=2 << 20) as buffer:
        table = torch.full((4, 7), float(me), device=device).bfloat16()  # rows of 14 bytes
        index = torch.tensor([[4 * after, 4 * me + 3]], dtype=torch.int32, device=device)
        for what, call in (
                ("engram_write", lambda: buffer.engram_fetch(index)),
                ("num_cpu_bytes", lambda: buffer.engram_write(table.new_zeros(1 << 20, 8))),
                ("storage", lambda: buffer.engram_write(table.float())),
                ("sf", lambda: buffer.engram_write(table, one[:, None])),
                ("pp_set_config", lambda: buffer.pp_send(one, after)),
                ("num_bytes", lambda: buffer.pp_set_config(BIG, 4)),
                ("agrs_set_config", lambda: buffer.all_gather(one)),
                ("num_bytes", lambda: buffer.agrs_set_config(2 * BIG, 3)),
                ("32", lambda: buffer.agrs_set_config(1 << 20, 33))):
            with refused(what):
                call()
        buffer.engram_write(table)
        data, none = buffer.engram_fetch(index)()
        assert none is None and data.tolist() == [[float(after)] * 7 + [float(me)] * 7]
        for what, bad, qps in (("num_allocated_qps", index, 1000), ("int64 [1, 2]", index.long(), 0),
                               ("0 to %d" % (4 * ranks - 1), index + 4 * ranks, 0), ("got -1", index * 0 - 1, 0)):
            if device.type == "cpu" or bad is index or bad.dtype is torch.int64:  # on a GPU nobody reads the indices
                with refused(what):
                    buffer.engram_fetch(bad, num_qps=qps)
        buffer.pp_set_config(4096, 2)
        for t, peer in ((one, me), (one, (me + 2) % ranks), (one[:1], after), (one.repeat(64), after)):
            if ranks > 3 or peer != (me + 2) % ranks:
                with refused("expected"):
                    buffer.pp_send(t, peer)
        for turn in (1, 2):  # another configuration begins anew
            buffer.pp_send(one, after)
            got = torch.empty_like(one)
            buffer.pp_recv(got, before)
            assert got.unique().tolist() == [float(before)]
            buffer.pp_set_config(8192, 3)
        check_gathers(world, buffer)


def check_gathers(world: World, buffer: deep_ep.ElasticBuffer) -> None:
    """All-gathers of odd sizes, outside of sessions, too many, too large."""
    ranks, device = world.nranks, world.device
    buffer.agrs_set_config(1 << 20, 3)
    with refused("create_agrs_session"):
        buffer.all_gather(torch.zeros(4, device=device))
    with buffer.agrs_new_session():
        with refused("create_agrs_session"):
            buffer.create_agrs_session()
        for mine in (torch.zeros(0, 3, device=device), torch.tensor(float(world.rank), device=device),
                     torch.full((3,), world.rank, dtype=torch.int8, device=device)):
            gathered, done = buffer.all_gather(mine)
            done()
            assert gathered.shape == (ranks, *mine.shape) and gathered.dtype is mine.dtype
            assert gathered.reshape(ranks, -1)[:, :1].flatten().tolist() == (
                list(range(ranks)) if mine.numel() else [])
        with refused("num_max_all_gathers_per_session = 3"):
            buffer.all_gather(mine)
    with refused("same session"):
        done()
    for _ in range(2):  # an exception ends the session
        with refused("num_max_session_bytes"), buffer.agrs_new_session():
            buffer.all_gather(torch.zeros(1 << 20, device=device))
    check_session_limits(world, buffer)


def check_session_limits(world: World, buffer: deep_ep.ElasticBuffer) -> None:
    """A refused all-gather leaves the session as it was. Many small tensors take what the formula says. Tensors of
    earlier sessions that are kept lose their memory."""
    part = torch.full(((1 << 20) // world.nranks // 4096 * 4096,), world.rank, dtype=torch.uint8, device=world.device)
    with buffer.agrs_new_session():
        for _ in range(4):
            with refused("num_max_session_bytes"):
                buffer.all_gather((part, part))
        *gathered, done = buffer.all_gather([part[i:i + 3].clone() for i in range(2800 // world.nranks)])
        done()
        assert all(one[:, 1].tolist() == list(range(world.nranks)) for one in gathered)
    kept: List[Any] = [gathered]

    for _ in range(20):
        with buffer.agrs_new_session():
            *one, done = buffer.all_gather(part)
            done()
            kept.append(one)
            assert one[0][:, 0].tolist() == list(range(world.nranks))
    del kept[:], gathered
    with buffer.agrs_new_session():
        gathered, done = buffer.all_gather(part)
        done()
        assert gathered[:, 0].tolist() == list(range(world.nranks))


def check_exact_gate(ranks: int, local: int, topk: int, ratio: float) -> None:
    """Rank 0 gets `ratio` times what the least of the others gets, and these the same, where top-k can do it."""
    from deep_ep.utils.gate import get_unbalanced_scores, rank_load

    experts, tokens = ranks * local, 1024
    load = torch.zeros(ranks)
    for _ in range(2):
        scores = get_unbalanced_scores(tokens, experts, ranks, topk, ratio, True)
        assert scores.shape == (tokens, experts) and scores.dtype is torch.float32
        load += rank_load(torch.topk(scores, topk).indices, experts, ranks)
    least, most, hot = float(load[1:].min()), float(load[1:].max()), float(load[0])
    allowed = max(1.02, 1 + 2 / least)
    assert most / least <= allowed, (ranks, local, topk, ratio, least, most)
    if max(1, -(-topk // local)) <= (ratio + ranks - 1) / ratio:
        assert abs(hot / least / ratio - 1) < max(0.1, 2 / least), (ranks, local, topk, ratio, hot, least)
    else:
        assert hot == 2 * tokens  # all that there are


def test_gate(world: World) -> None:
    """[E] 1, 7: the load of the hot rank is the ratio of the others', and theirs is the same; 2 to 72 ranks. Exactly,
    or by chance."""
    from deep_ep.utils.gate import get_unbalanced_scores, rank_load

    if world.rank:
        return
    state = torch.get_rng_state()
    torch.manual_seed(1)
    for ranks in (2, 8, 72):
        for ratio in (1.0, 2.0, 4.0):
            for local, topk in ((1, 1), (1, 2), (4, 4), (4, 8), (16, 1), (16, 9)):
                check_exact_gate(ranks, local, topk, ratio)
            chance = torch.topk(get_unbalanced_scores(8192, 4 * ranks, ranks, 1, ratio), 1).indices
            load = rank_load(chance, 4 * ranks, ranks).float()
            assert abs(float(load[0] / load[1:].mean()) / ratio - 1) < 0.15, (ranks, ratio, load)
    torch.set_rng_state(state)
