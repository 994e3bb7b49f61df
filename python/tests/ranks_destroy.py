# SPDX-License-Identifier: Apache-2.0
"""The end of groups: destroy() and finalizers, while work is under way, and what work holds until then."""

import contextlib
import gc
import sys
import time
import weakref
from typing import Any, Callable, Iterator, List
from unittest import mock

import deep_ep
import epx
import slow
import torch
import torch.distributed as dist
from ranks_lifetime import dispatch, new_buffer
from ranks_low_latency import check_one, dispatch as dispatch_low
from reference import Work
from suite import World, environment


def test_destroy_after_an_interrupt(world: World) -> None:
    """Ctrl-C ends the wait of destroy(), and not the group: the next call goes on."""
    group = epx.Group(epx.bootstrap.from_torch(), num_experts=world.nranks, max_tokens_per_rank=4, max_hidden_bytes=64)
    wait = group._wait

    def interrupted(_stream: Any) -> None:
        raise KeyboardInterrupt
    group._wait = interrupted  # type: ignore[method-assign]
    try:
        group.destroy()
    except KeyboardInterrupt:
        pass
    assert group.alive
    group._wait = wait  # type: ignore[method-assign]
    group.destroy()
    assert not group.alive


def asynchronous_calls(world: World, work: Work) -> Iterator[Callable[[Any], Any]]:
    """One call of each kind, on CPU tensors still under way when it returns: each gives (event, group)."""
    x, idx, weights = (world.to(part[world.rank]) for part in (work.x, work.idx, work.weights))

    def high(buffer: deep_ep.Buffer) -> Any:
        *_results, handle, event = dispatch(world, buffer, work, async_finish=True)
        return event, handle.routing.pool.group

    def low(buffer: deep_ep.Buffer) -> Any:
        _recv, _counts, handle, event, _hook = buffer.low_latency_dispatch(x, idx, 8, work.experts, async_finish=True)
        return event, handle[0]._epx_routing.pool.group

    def elastic(buffer: deep_ep.ElasticBuffer) -> Any:
        *_results, handle, event = buffer.dispatch(x, idx, weights, num_experts=work.experts,
                                                   async_with_compute_stream=True)
        return event, buffer._engine._high[(world.device, work.experts)].group
    yield from (high, low, elastic)


def test_asynchronous_calls_end_with_the_buffer(world: World) -> None:
    """destroy() waits for them and frees the group. The tensors that they held kept it, and its heap."""
    work = Work(world.nranks, 8, 128, 2 * world.nranks, 2, seed=300)
    for call in asynchronous_calls(world, work):
        buffer = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=8, hidden=128, num_topk=2,
                                       explicitly_destroy=True) if call.__name__ == "elastic" else new_buffer()
        call(buffer)[0].current_stream_wait()
        event, group = call(buffer)  # for which nobody has waited
        buffer.destroy()
        assert not group.alive, call.__name__
        event.current_stream_wait()
        world.meet()


def test_destroy_waits_for_no_rank_for_ever(world: World) -> None:
    """destroy() on one rank, whose last operation no other rank joins: it ends with the operation's deadline."""
    world.only("cpu")  # on a GPU nothing is held, and the heap ends with all ranks
    deadline = world.deadline(1500)
    with environment(EPX_TIMEOUT_MS=deadline):
        buffer = new_buffer()
        work = Work(world.nranks, 8, 128, 2 * world.nranks, 2, seed=301)
        check_one(world, buffer, work, 8)
        world.meet()
        begin = time.monotonic()
        if world.rank == 0:
            _event, group = list(asynchronous_calls(world, work))[1](buffer)
            buffer.destroy()
            assert not group.alive
        else:
            buffer.destroy()
            assert not slow.late(time.monotonic() - begin, 0.75, int(deadline) / 1500)  # nobody else waits
        world.meet()


@contextlib.contextmanager
def no_noise() -> Iterator[None]:
    """No finalizer raises an error, of which Python would print a warning."""
    said: List[str] = []
    hook, sys.unraisablehook = sys.unraisablehook, lambda what: said.append(repr(what.exc_value))
    try:
        yield
    finally:
        sys.unraisablehook = hook
    assert not said, said


@contextlib.contextmanager
def gc_frozen() -> Iterator[None]:
    """What is older is not looked at by gc.collect(), which would take long."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def test_staged_calls_in_cycles(world: World) -> None:
    """Garbage with a buffer, a call whose hook was never called, and all that they refer to, finalized in any order:
    events of the group before the call, which needs one."""
    work = Work(world.nranks, 8, 128, 2 * world.nranks, 2, seed=302)
    gc.freeze()  # what is older is not looked at, which would take long
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True)
    for _ in range(2):
        dispatch_low(world, buffer, work, 8, return_recv_hook=True)
    staged = buffer.low_latency_dispatch(world.to(work.x[world.rank]), world.to(work.idx[world.rank]), 8, work.experts,
                                         return_recv_hook=True)
    group = staged[2][0]._epx_routing.pool.group
    cycle: List[Any] = [buffer, staged]
    cycle.append(cycle)
    world.meet()
    for event in [one for one in gc.get_objects() if type(one) is epx.Event and one._group is group]:
        event.__del__()
    with no_noise():
        del buffer, staged, cycle
        gc.collect()
    gc.unfreeze()
    assert not group.alive
    world.meet()


def test_a_staged_call_after_destroy(world: World) -> None:
    """A call whose hook was never called, let go after its buffer, waits for nobody and keeps nothing."""
    buffer = new_buffer()
    work = Work(world.nranks, 8, 128, 2 * world.nranks, 2, seed=303)
    _recv, _counts, handle = dispatch_low(world, buffer, work, 8, use_fp8=False)
    rows = buffer.get_next_low_latency_combine_buffer(handle)  # in the heap
    rows.zero_()
    group = handle[0]._epx_routing.pool.group
    world.meet()
    staged = None
    if world.rank != world.nranks - 1:  # so the receive half would wait
        staged = buffer.low_latency_combine(rows, world.to(work.idx[world.rank]), world.to(work.weights[world.rank]),
                                            handle, zero_copy=True, return_recv_hook=True)
    buffer.destroy()
    assert group.alive
    with no_noise():
        del staged, handle, rows, _recv, _counts
    assert not group.alive
    world.meet()


def test_pruning_by_two_threads(world: World) -> None:
    """Neither lets go of what the work of the other still uses."""
    group = epx.Group(epx.bootstrap.from_torch(), num_experts=world.nranks, max_tokens_per_rank=4, max_hidden_bytes=64)
    said = {1: epx.Status.OK, 2: epx.Status.NOT_READY}

    class Library:
        """While one thread asks about an event, the other one prunes."""

        nested = False

        def epx_event_query(self, event: int) -> int:
            if not self.nested:
                self.nested = True
                group.prune()
            return said[event]
    group._held.extend([(1, "complete"), (2, "in use")])
    lib, group._lib = group._lib, Library()  # type: ignore[assignment]
    group.prune()
    assert [objects for _event, objects in group._held] == ["in use"]
    group._lib = lib
    group._held.clear()
    group._events.clear()
    group.destroy()


def ends(group: "weakref.ref[epx.Group]") -> bool:
    """Is it destroyed soon after its work has ended?"""
    limit = time.monotonic() + 20
    while group() is not None and group().alive and time.monotonic() < limit:  # type: ignore[union-attr]
        time.sleep(0.02)
        gc.collect()
    return group() is None or not group().alive  # type: ignore[union-attr]


def test_a_group_that_holds_its_own_memory(world: World) -> None:
    """Nobody destroys it: it ends all the same when its work has. Tensors of its heap are held for the work, and keep
    the group, where Python's collector does not see it."""
    world.only("cpu")
    group = epx.Group(epx.bootstrap.from_torch(), num_experts=world.nranks, max_tokens_per_rank=4, max_hidden_bytes=64,
                      max_topk=1, modes=epx.Mode.LOW_LATENCY, alloc_bytes=1 << 20)
    handle = group.handle(epx.Mode.LOW_LATENCY, epx.Layout.RANK_MAJOR, 1)
    rows = torch.from_dlpack(group.alloc(256)).view(torch.bfloat16).view(4, 32)
    out = torch.empty(world.nranks, 4, 32, dtype=torch.bfloat16)
    handle.update(torch.full((4, 1), (world.rank + 1) % world.nranks))
    if world.rank:
        world.meet()  # the work of rank 0 is under way when it lets go
    handle.dispatch(rows, out)
    dropped = weakref.ref(group)
    with gc_frozen(), no_noise():
        del group, handle, rows
        if world.rank == 0:
            gc.collect()
            assert dropped() is not None
            world.meet()
        assert ends(dropped)
    world.meet()


def test_finalizers_wait_for_no_rank(world: World) -> None:
    """A buffer is collected whose last operation not all ranks join: its group ends later, with the operation. Rank 0
    has never called the hook, rank 1 has not waited."""
    world.only("cpu")
    deadline = world.deadline(1000)
    work = Work(world.nranks, 8, 128, 2 * world.nranks, 2, seed=304)
    with environment(EPX_TIMEOUT_MS=deadline), mock.patch.object(epx.group, "_MOMENT_S", 0.05), gc_frozen():
        buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True)
        check_one(world, buffer, work, 8)
        world.meet()
        group = weakref.ref(buffer._engine.low_latency_pools()[0].group)
        begin = time.monotonic()
        if world.rank < 2:
            buffer.low_latency_dispatch(
                world.to(work.x[world.rank]), world.to(work.idx[world.rank]), 8, work.experts,
                async_finish=world.rank == 1, return_recv_hook=world.rank == 0)
        with no_noise():
            del buffer
            took = time.monotonic() - begin
            assert not slow.late(took, 0.5, int(deadline) / 1000), took
            assert ends(group)
        world.meet()
