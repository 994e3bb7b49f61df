# SPDX-License-Identifier: Apache-2.0
"""Who keeps what alive: results after their buffer, inputs of queued work, handles, forked processes, Ctrl-C."""

import contextlib
import copy
import gc
import os
import pickle
import signal
import threading
import time
import weakref
from typing import Any, Callable, ContextManager, Iterator, List
from unittest import mock

import deep_ep
import epx
import slow
import torch
import torch.distributed as dist
from deep_ep._plans import CombinePlan
from ranks_high_throughput import exchange, layout
from ranks_low_latency import check_one, check_received, dispatch as dispatch_low
from reference import Work
from suite import World, environment


def new_buffer() -> deep_ep.Buffer:
    """A buffer of its own."""
    return deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True)


def small_heap(nbytes: int) -> ContextManager[None]:
    """For buffers whose tensors have that much room, on either device."""
    return environment(EPX_ALLOC_BYTES=str(nbytes), EPX_DEEP_EP_GPU_BYTES=str(nbytes))


def dispatch(world: World, buffer: deep_ep.Buffer, work: Work, **options: Any) -> Any:
    """A fresh high-throughput dispatch."""
    idx = world.to(work.idx[buffer.rank])
    return buffer.dispatch(world.to(work.x[buffer.rank]), **layout(buffer, idx, work.experts), topk_idx=idx,
                           topk_weights=world.to(work.weights[buffer.rank]), **options)


def test_a_handle_that_nobody_reads_keeps_no_rows(world: World) -> None:
    buffer = new_buffer()
    work = Work(world.nranks, 20, 256, 2 * world.nranks, 3, seed=11)
    recv, recv_idx, recv_weights, _counts, handle, _event = dispatch(world, buffer, work)
    kept = [weakref.ref(tensor) for tensor in (recv, recv_idx, recv_weights)]
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    del recv, recv_idx, recv_weights
    gc.collect()
    assert not any(ref() is not None for ref in kept)
    buffer.destroy()
    assert len(handle) == 6 and len(tuple(handle)) == 6  # computed after the buffer is gone


def test_a_handle_is_a_tuple(world: World) -> None:
    buffer = new_buffer()
    work = Work(world.nranks, 8, 256, 2 * world.nranks, 2, seed=12)
    handle = dispatch(world, buffer, work)[4]
    fields = tuple(handle)
    assert isinstance(handle, tuple) and len(handle) == len(fields) == 6
    marker = object()
    assert len((marker,) + handle) == 7 and len(handle + (marker,)) == 7 and len(handle * 2) == 12
    assert type(handle)(iter(fields)) == fields and [id(f) for f in handle] == [id(f) for f in fields]
    assert handle[3] is fields[3] and handle[-1] is fields[-1] and handle[1:3] == fields[1:3]
    buffer.destroy()


def test_results_outlive_the_buffer(world: World) -> None:
    buffer = new_buffer()
    work = Work(world.nranks, 20, 256, 2 * world.nranks, 3, seed=1)
    recv, recv_idx, recv_weights, _counts, handle, _event = dispatch(world, buffer, work)
    low, counts, low_handle = dispatch_low(world, buffer, work, 32, use_fp8=False)
    view = recv[recv.shape[0] // 2:]
    buffer.destroy()
    del buffer
    gc.collect()
    world.meet()
    expected = work.flat(world.rank)
    assert torch.equal(recv.cpu(), expected[2]) and torch.equal(recv_idx.cpu(), expected[3])
    assert torch.equal(recv_weights.cpu(), expected[4]) and torch.equal(handle[3].cpu(), expected[1].int())
    rows = view.clone()
    del recv, recv_idx, recv_weights
    gc.collect()
    assert torch.equal(view, rows)
    assert torch.equal(low[0, :int(counts[0])].cpu(), torch.cat([work.x[s][t:t + 1] for s, t in work.by_expert(
        world.rank)[0]] or [torch.empty(0, 256, dtype=torch.bfloat16)]))
    assert low_handle[2] == 32


def test_destroyed_buffer_says_so(world: World) -> None:
    buffer = new_buffer()
    work = Work(world.nranks, 8, 128, 2 * world.nranks, 2, seed=2)
    recv, *_rest, handle, _event = dispatch(world, buffer, work)
    low, _counts, low_handle = dispatch_low(world, buffer, work, 8, use_fp8=False)
    x, idx, weights = (world.to(part[world.rank]) for part in (work.x, work.idx, work.weights))
    buffer.destroy()
    buffer.destroy()
    assert buffer.runtime is None
    other = world.buffer()  # results of the destroyed buffer are still there, and its handles are refused all the same
    for call in (lambda: dispatch(world, buffer, work), lambda: buffer.combine(recv, handle),
                 lambda: dispatch_low(world, buffer, work, 8), lambda: other.combine(recv, handle),
                 lambda: other.dispatch(x, handle=handle),
                 lambda: other.low_latency_combine(low, idx, weights, low_handle),
                 lambda: other.get_next_low_latency_combine_buffer(low_handle)):
        try:
            call()
            raise AssertionError("a destroyed buffer was used")
        except epx.UsageError as error:
            assert "destroyed" in str(error)
    with_default = deep_ep.Buffer(dist.group.WORLD)
    try:
        with_default.destroy()
        raise AssertionError("destroy() without explicitly_destroy")
    except epx.UsageError as error:
        assert "explicitly_destroy" in str(error)


def test_inputs_may_go_after_an_asynchronous_call(world: World) -> None:
    buffer = world.buffer()
    work = Work(world.nranks, 200, 1024, 2 * world.nranks, 3, seed=4)
    for _ in range(5):
        x = world.to(work.x[world.rank].clone())
        idx = world.to(work.idx[world.rank].clone())
        arguments = layout(buffer, idx, work.experts)
        recv, _i, _w, _c, handle, event = buffer.dispatch(
            x, **arguments, topk_idx=idx, topk_weights=world.to(work.weights[world.rank].clone()), async_finish=True)
        again = buffer.dispatch(x, handle=handle, async_finish=True)
        out, _weights, combined = buffer.combine(recv.clone(), handle, async_finish=True)
        del x, idx, arguments
        garbage = [torch.full((256, 1024), 7.0, dtype=torch.bfloat16, device=world.device) for _ in range(8)]
        event.current_stream_wait()
        again[5].current_stream_wait()
        assert torch.equal(recv.cpu(), work.flat(world.rank)[2]) and torch.equal(again[0].cpu(), recv.cpu())
        del out, garbage
        combined.current_stream_wait()


def test_results_may_go_before_the_event(world: World) -> None:
    buffer = world.buffer()
    work = Work(world.nranks, 100, 512, 2 * world.nranks, 3, seed=6)
    for _ in range(10):
        dispatch(world, buffer, work, async_finish=True)
    exchange(world, buffer, work)


def test_event_as_context(world: World) -> None:
    buffer = world.buffer()
    work = Work(world.nranks, 20, 128, 2 * world.nranks, 3, seed=7)
    recv, *_rest, event = dispatch(world, buffer, work, async_finish=True)
    with event:
        pass
    assert torch.equal(recv.cpu(), work.flat(world.rank)[2])
    with deep_ep.EventOverlap():
        pass
    captured = deep_ep.Buffer.capture()
    assert captured.event is not None
    captured.current_stream_wait()
    try:
        deep_ep.EventOverlap().current_stream_wait()
        raise AssertionError("waited for no event")
    except ValueError as error:
        assert "async_finish" in str(error)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All that a storage has; NaNs would not be equal."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def resize(tensors: Any) -> None:
    """Frees each tensor as Megatron-LM does, while the others keep their values, and takes memory back."""
    for which, tensor in enumerate(tensors):
        others = [(other, _bytes(other).clone()) for i, other in enumerate(tensors) if i != which]
        storage, nbytes = tensor.untyped_storage(), tensor.untyped_storage().nbytes()
        storage.resize_(0)
        assert storage.nbytes() == 0 and storage.data_ptr() == 0
        assert all(torch.equal(_bytes(other), kept) for other, kept in others)
        storage.resize_(nbytes)
        tensor.zero_()
        assert not tensor.float().any() and storage.nbytes() == nbytes


def test_results_resize(world: World) -> None:
    """Storages of results can be resized, as those of torch, and each tensor has one of its own. (Megatron-LM's
    --overlap-moe-expert-parallel-comm does this.)"""
    buffer = world.buffer()
    work = Work(world.nranks, 20, 256, 2 * world.nranks, 3, seed=17)
    elastic = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=32, hidden=256, num_topk=3,
                                    explicitly_destroy=True)
    hybrid = deep_ep.HybridEPBuffer(dist.group.WORLD, 256, 32, 2)
    for _ in range(6):  # more often than memory is kept for
        recv, idx, weights, _counts, handle, _event = dispatch(world, buffer, work)
        again = buffer.dispatch(world.to(work.x[world.rank]), handle=handle)[0]
        assert torch.equal(recv, again)
        resize([recv, idx, weights])
        resize([again])
        for staged in (False, True):
            (rows, scales), counts, low, _event, hook = buffer.low_latency_dispatch(
                world.to(work.x[world.rank]), world.to(work.idx[world.rank]), 32, work.experts, return_recv_hook=staged)
            if hook is not None:
                hook()
            resize([rows, scales, counts, low[0], low[1]])
        for expand in (False, True):
            rows, idx, weights, handle, _event = elastic.dispatch(
                world.to(work.x[world.rank]), world.to(work.idx[world.rank]), world.to(work.weights[world.rank]),
                num_experts=work.experts, do_expand=expand, do_cpu_sync=True)
            sums, back, _event = elastic.combine(rows, handle, weights)
            resize([sums, back, rows, weights] + ([] if expand else [idx]) + [
                handle.topk_idx, handle.recv_src_metadata, handle.psum_num_recv_tokens_per_scaleup_rank,
                handle.psum_num_recv_tokens_per_expert, handle.num_unaligned_recv_tokens_per_expert])
        routed = torch.zeros(len(work.x[world.rank]), work.experts + 1)
        routed.scatter_(1, work.idx[world.rank] % (work.experts + 1), 1.0)  # -1 is the last column
        probs = world.to(routed[:, :-1].contiguous())
        rows, weights, _none, _counts, handle = hybrid.dispatch_with_permute(
            hidden=world.to(work.x[world.rank]), routing_map=probs > 0, probs=probs)
        resize([*hybrid.combine_with_unpermute(hidden=rows, probs=weights, handle=handle), rows, weights])
    exchange(world, buffer, work)
    check_one(world, buffer, work, 32)
    elastic.destroy()


def test_freed_results_leave_the_heap(world: World) -> None:
    """resize_(0) gives the memory of a result back to the heap while the tensor lives."""
    work = Work(world.nranks, 64, 512, 2 * world.nranks, 2, seed=18)
    with small_heap(1 << 20):
        buffer = new_buffer()
        kept, addresses = [], []
        for _ in range(40):
            kept.append(dispatch(world, buffer, work)[0])
            addresses.append(kept[-1].data_ptr())
            kept[-1].untyped_storage().resize_(0)
        assert max(addresses) - min(addresses) < 1 << 20  # all in the heap, which has room for a few of them
        buffer.destroy()


def test_memory_is_used_again(world: World) -> None:
    """Hundreds of results that are let go fit a heap that holds a few."""
    with small_heap(2 << 20):
        buffer = new_buffer()
        work = Work(world.nranks, 64, 256, 2 * world.nranks, 3, seed=8)
        for _ in range(60):
            recv, *_rest, handle, _event = dispatch(world, buffer, work)
            buffer.combine(recv, handle)
        assert torch.equal(recv.cpu(), work.flat(world.rank)[2])
        buffer.destroy()


def test_full_heap(world: World) -> None:
    """Results that are kept outgrow the heap: the next ones lie in ordinary memory."""
    with small_heap(1 << 20):
        buffer = new_buffer()
        work = Work(world.nranks, 64, 512, 2 * world.nranks, 3, seed=10)
        kept = [dispatch(world, buffer, work) for _ in range(12)]
        for recv, _idx, _weights, _counts, handle, _event in kept:
            assert torch.equal(recv.cpu(), work.flat(world.rank)[2])
            buffer.combine(recv, handle)
        buffer.destroy()


def test_many_handles(world: World) -> None:
    """Handles of many layers, used in reverse, as a backward pass does; put together again from their fields."""
    buffer = world.buffer()
    works = [Work(world.nranks, 10, 128, 2 * world.nranks, 2, seed=100 + i) for i in range(8)]
    kept = [dispatch(world, buffer, work) for work in works]
    for work, (recv, *_rest, handle, _event) in reversed(list(zip(works, kept))):
        again = buffer.dispatch(world.to(work.x[world.rank]), handle=tuple(list(handle)))
        assert torch.equal(again[0], recv)


def test_handles_in_cycles(world: World) -> None:
    """The garbage collector finalizes a routing and what only it refers to in any order. Its handle serves the next
    routing, and ended when a later call created another one: "not a living handle"."""
    buffer, elastic = new_buffer(), deep_ep.ElasticBuffer(
        dist.group.WORLD, num_max_tokens_per_rank=8, hidden=128, num_topk=2, explicitly_destroy=True)
    work = Work(world.nranks, 8, 128, 2 * world.nranks, 2, seed=16, uneven=False)
    x, idx, weights = (world.to(t[world.rank]) for t in (work.x, work.idx, work.weights))

    def v1() -> Any:
        recv, _idx, _weights, _counts, handle, _event = dispatch(world, buffer, work)
        return handle, lambda: buffer.combine(recv, handle)[0]

    def low() -> Any:
        recv, _counts, handle, _event, hook = buffer.low_latency_dispatch(x, idx, 8, work.experts, use_fp8=False)
        return handle, lambda: buffer.low_latency_combine(recv, idx, weights, handle)[0]

    def v2() -> Any:
        recv, _idx, _weights, handle, _event = elastic.dispatch(x, idx, weights, num_experts=work.experts)
        return handle, lambda: elastic.combine(recv, handle)[0]

    for begin in (v1, low, v2):
        cycle: List[Any] = list(begin())
        cycle.append(cycle)
        del cycle
        gc.collect()
        sums = [combine() for _handle, combine in [begin() for _ in range(6)]]
        assert all(torch.equal(total, sums[0]) for total in sums[1:])
    buffer.destroy()
    elastic.destroy()


def test_copied_handles(world: World) -> None:
    """A copy of a handle serves as the handle does; one that was pickled has its fields, but no routing."""
    buffer = world.buffer()
    work = Work(world.nranks, 10, 128, 2 * world.nranks, 2, seed=110)
    recv, *_rest, handle, _event = dispatch(world, buffer, work)
    low, _counts, low_handle = dispatch_low(world, buffer, work, 16, use_fp8=False)
    idx, weights = world.to(work.idx[world.rank]), world.to(work.weights[world.rank])
    sums, low_sums = buffer.combine(recv, handle)[0], buffer.low_latency_combine(low, idx, weights, low_handle)[0]
    copies = copy.deepcopy((handle, low_handle))
    saved = pickle.loads(pickle.dumps(handle))
    assert all(torch.equal(a, b) for a, b in zip(saved, handle))
    del handle, low_handle
    assert torch.equal(buffer.combine(recv, copies[0])[0], sums)
    assert torch.equal(buffer.low_latency_combine(low, idx, weights, copies[1])[0], low_sums)
    try:
        buffer.combine(recv, saved)
        raise AssertionError("expected an ArgumentError")
    except epx.ArgumentError as error:
        assert "handle" in str(error)


def test_handles_outlive_the_buffer(world: World) -> None:
    """Megatron-LM makes a larger buffer when it needs one, forgets the old one, and combines along its handles."""
    work = Work(world.nranks, 10, 128, 2 * world.nranks, 2, seed=111)
    x, idx, weights = (world.to(part[world.rank]) for part in (work.x, work.idx, work.weights))
    old = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True)
    recv, *_rest, handle, _event = dispatch(world, old, work)
    low, _counts, low_handle = dispatch_low(world, old, work, 16, use_fp8=False)
    sums, low_sums = old.combine(recv, handle)[0], old.low_latency_combine(low, idx, weights, low_handle)[0]
    pool = handle[3]._epx_routing.pool
    del old
    gc.collect()
    new = deep_ep.Buffer(dist.group.WORLD)
    exchange(world, new, work)
    assert torch.equal(new.dispatch(x, handle=handle)[0], recv) and torch.equal(new.combine(recv, handle)[0], sums)
    assert torch.equal(new.low_latency_combine(low, idx, weights, low_handle)[0], low_sums)
    assert pool.group.alive
    del handle, low_handle, recv, low, _rest
    gc.collect()
    assert not pool.group.alive
    world.meet()


def test_several_buffers(world: World) -> None:
    buffers = [new_buffer() for _ in range(3)]
    for seed, buffer in enumerate(buffers):
        exchange(world, buffer, Work(world.nranks, 12, 128, 2 * world.nranks, 2, seed=200 + seed))
        check_one(world, buffer, Work(world.nranks, 6, 128, 2 * world.nranks, 2, seed=200 + seed), 8)
    recv, *_rest, handle, _event = dispatch(
        world, buffers[0], Work(world.nranks, 12, 128, 2 * world.nranks, 2, seed=210))
    for buffer in buffers[1:]:
        buffer.destroy()
    buffers[0].combine(recv, handle)
    buffers[0].destroy()


def test_fork(world: World) -> None:
    """A child of fork gets an error that says so, and harms nobody."""
    buffer = world.buffer()
    work = Work(world.nranks, 8, 128, 2 * world.nranks, 2, seed=12)
    exchange(world, buffer, work)
    if world.device.type == "cpu" and world.rank == 0:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                dispatch(world, buffer, work)
            except epx.UsageError as error:
                code = 0 if "fork" in str(error) else 2
            del buffer
            gc.collect()
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
    world.meet()
    exchange(world, buffer, work)


@contextlib.contextmanager
def interrupted(second: float) -> Iterator[None]:
    """Ctrl-C comes after 0.3 seconds, and ends what is done within one. They are longer on a busy machine."""
    came: List[float] = []

    def interrupt() -> None:
        came.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)
    timer = threading.Timer(0.3 * second, interrupt)
    timer.start()
    try:
        yield
        raise AssertionError("the wait was not interrupted")
    except KeyboardInterrupt:
        took = time.monotonic() - came[0]
        assert not slow.late(took, 1, second), took
    timer.join()


def test_interrupt(world: World) -> None:
    """Ctrl-C ends the wait for a rank that is late, within a second; the work itself goes on, and so does the
    buffer."""
    world.only("cpu")
    buffer = world.buffer()
    work = Work(world.nranks, 8, 128, 2 * world.nranks, 2, seed=13)
    exchange(world, buffer, work)
    dispatch_low(world, buffer, work, 8, use_fp8=False)
    second = int(world.deadline(1000)) / 1000
    world.meet()
    late = world.nranks - 1
    if world.rank == 0 != late:
        try:
            with interrupted(second):
                dispatch_low(world, buffer, work, 8, use_fp8=False)
        finally:
            dist.send(torch.zeros(1), late)
    else:
        if world.rank == late != 0:
            dist.recv(torch.zeros(1), 0)  # rank 0 has not waited for this one
        got = dispatch_low(world, buffer, work, 8, use_fp8=False)
        check_received(buffer, work, 8, *got)
    world.meet()
    check_one(world, buffer, work, 8)
    exchange(world, buffer, work)


def test_interrupt_while_counts_are_exchanged(world: World) -> None:
    """The same where a high-throughput dispatch waits for the counts of a rank that is late."""
    world.only("cpu")
    deadline = world.deadline(1500)
    with environment(EPX_TIMEOUT_MS=deadline):
        buffer = new_buffer()
        work = Work(world.nranks, 8, 128, 2 * world.nranks, 2, seed=14)
        exchange(world, buffer, work)
    world.meet()
    if world.rank == 0:
        with interrupted(int(deadline) / 1500):
            dispatch(world, buffer, work)
    world.meet()
    # Rank 0 has told its counts and gave up on the rows: so does everybody. All of them recover.
    buffer.recover()
    exchange(world, buffer, work)
    buffer.destroy()


@contextlib.contextmanager
def interrupted_behind(owner: Any, name: str) -> Iterator[None]:
    """Ctrl-C comes when that function has done its work."""
    function = getattr(owner, name)

    def called(*arguments: Any) -> Any:
        function(*arguments)
        raise KeyboardInterrupt
    with mock.patch.object(owner, name, called), contextlib.suppress(KeyboardInterrupt):
        yield
        raise AssertionError("not interrupted")


def test_interrupt_behind_a_call(world: World) -> None:
    """Ctrl-C when an operation is queued and its tensors are not kept yet. The operation runs when the others come, and
    writes into no memory that somebody else has by then."""
    world.only("cpu")  # torch's memory on a GPU is freed in stream order
    buffer, work = new_buffer(), Work(world.nranks, 20, 256, 2 * world.nranks, 3, seed=5)
    idx, weights = work.idx[world.rank], work.weights[world.rank]
    recv, _idx, _weights, _counts, handle, _event = dispatch(world, buffer, work)
    low, _counts, low_handle = dispatch_low(world, buffer, work, 32, use_fp8=False)
    nbytes = 2 * 256 * len(work.x[0])  # of the result that rank 0 lets go of
    second = int(world.deadline(1000)) / 1000
    for interrupt, call in (
            (lambda: interrupted(second), lambda: buffer.combine(recv, handle)),
            (lambda: interrupted_behind(CombinePlan, "run"),
             lambda: buffer.low_latency_combine(low, idx, weights, low_handle))):
        taken: List[torch.Tensor] = []
        if not world.rank:
            with interrupt():
                call()
            taken = [torch.full((nbytes,), 77, dtype=torch.uint8) for _ in range(64)]
        world.meet()
        if world.rank:
            call()
        world.meet()
        assert torch.equal(dispatch(world, buffer, work)[0], recv)
        assert all(bool((t == 77).all()) for t in taken), call
    buffer.destroy()


def fails(call: Callable[[], Any]) -> bool:
    """Does it raise an error of EPX?"""
    try:
        call()
    except RuntimeError:
        return True
    return False


def grown(world: World, buffer: deep_ep.Buffer) -> List[Any]:
    """Two dispatches; the second one needs a larger group."""
    works = [Work(world.nranks, 4, hidden, 4 * world.nranks, 2, seed=5) for hidden in (64, 128)]
    return [dispatch(world, buffer, work) for work in works]


def test_handles_of_replaced_groups(world: World) -> None:
    """They end with the buffer, or with its recovery."""
    for end in (deep_ep.Buffer.destroy, deep_ep.Buffer.recover):
        buffer, other = (deep_ep.Buffer(dist.group.WORLD, 1 << 24, 0, explicitly_destroy=True) for _ in range(2))
        results = grown(world, buffer)
        buffer.combine(results[0][0], results[0][4])
        world.meet()
        end(buffer)
        for rows, *_rest, handle, _event in results:
            assert fails(lambda rows=rows, handle=handle: other.combine(rows, handle))
        for one in (buffer, other) if end is deep_ep.Buffer.recover else (other,):
            one.destroy()


def test_a_replaced_group_that_was_captured(world: World) -> None:
    """A capture with a handle of a replaced group keeps that group as long as the buffer."""
    buffer = deep_ep.Buffer(dist.group.WORLD, 1 << 24, 0, explicitly_destroy=True)
    results = grown(world, buffer)
    pool = results[0][4].routing.pool
    pool.captured = True  # as by a capture of its combine
    results.clear()
    gc.collect()
    assert not pool.closed
    assert fails(buffer.recover)
    buffer.destroy()
    assert pool.closed
