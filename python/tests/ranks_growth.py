# SPDX-License-Identifier: Apache-2.0
"""Buffers that grow with the tokens of a call, and the memory that they take."""

import gc
import os
import re
import time
from typing import Any, Iterator, Set

import deep_ep
import epx
import torch
import torch.distributed as dist
from ranks_high_throughput import exchange, layout
from reference import Work
from suite import World, environment

_SPARE = 64 << 20  # what a buffer may take besides the bytes that it is given and the tensors that it returns


def places(world: World) -> Iterator[Any]:
    """The environments of one node and, where there is libfabric, of two."""
    yield environment()
    if world.nodes:
        yield environment(EPX_RANKS_PER_NODE=str(world.nranks // 2), EPX_NET="ofi:tcp")


def dispatch(world: World, buffer: deep_ep.Buffer, work: Work) -> Any:
    """A fresh dispatch."""
    idx = world.to(work.idx[buffer.rank])
    return buffer.dispatch(world.to(work.x[buffer.rank]), **layout(buffer, idx, work.experts), topk_idx=idx,
                           topk_weights=world.to(work.weights[buffer.rank]))


def test_one_rank_has_more_tokens(world: World) -> None:
    """The others learn it, all create a larger group, and the next calls need no other."""
    for place in places(world):
        with place, environment(EPX_DEEP_EP_MAX_TOKENS="32"):
            buffer = deep_ep.Buffer(dist.group.WORLD, explicitly_destroy=True)
            ranks = world.nranks
            small = Work(ranks, 40, 128, 2 * ranks, 2, seed=5)
            large = Work(ranks, 66, 128, 2 * ranks, 2, seed=6)  # 66 tokens of rank 0, fewer of all others
            exchange(world, buffer, small)
            first = buffer._engine.high_throughput_pool(world.device, 2 * ranks)
            assert first.max_tokens == 64
            assert large.x[0].shape[0] > 64 >= large.x[ranks // 2].shape[0]
            parts = dispatch(world, buffer, small)
            for _ in range(2):
                exchange(world, buffer, large)
            second = buffer._engine.high_throughput_pool(world.device, 2 * ranks)
            assert second is not first and second.max_tokens == 128
            # A handle of before works, and what it needs is there as long as the handle.
            again = buffer.dispatch(world.to(small.x[world.rank]), handle=parts[4])[0]
            assert torch.equal(again, parts[0]) and first.group.alive
            buffer.combine(again, parts[4])
            world.meet()
            del parts, again
            gc.collect()
            assert not first.group.alive and second.group.alive
            exchange(world, buffer, small)
            assert buffer._engine.high_throughput_pool(world.device, 2 * ranks) is second
            buffer.destroy()


def test_events_outlive_their_group(world: World) -> None:
    """An event whose group a larger one has replaced, or that was destroyed with its buffer: the end of the group has
    waited for the operation. It raises the error of one that has failed."""
    world.only("cpu")
    ranks, me = world.nranks, world.rank
    small, large = (Work(ranks, tokens, 128, 2 * ranks, 2, seed=5, uneven=False) for tokens in (8, 66))
    with environment(EPX_DEEP_EP_MAX_TOKENS="8", EPX_TIMEOUT_MS=world.deadline(3000)):
        buffer = deep_ep.Buffer(dist.group.WORLD, explicitly_destroy=True)

        def begin(**options: Any) -> deep_ep.EventOverlap:
            return buffer.dispatch(small.x[me], **layout(buffer, small.idx[me], 2 * ranks), topk_idx=small.idx[me],
                                   topk_weights=small.weights[me], async_finish=True, **options)[5]
        event = begin()
        pool = buffer._engine.high_throughput_pool(world.device, 2 * ranks)
        exchange(world, buffer, large)
        gc.collect()
        assert not pool.group.alive
        event.current_stream_wait()
        begin(previous_event=event, allocate_on_comm_stream=True).current_stream_wait()
        try:
            event = begin(num_worst_tokens=1)  # a late rank hears of the failure here
            buffer.destroy()
            gc.collect()
            event.current_stream_wait()
            raise AssertionError("an operation that has failed was reported as complete")
        except epx.EpxError as error:
            assert "recover()" in str(error), error
        buffer.destroy()
    world.meet()


def test_many_tokens(world: World) -> None:
    """More tokens than any limit that EPX has by itself."""
    world.only("cpu")
    buffer = deep_ep.Buffer(dist.group.WORLD, explicitly_destroy=True)
    ranks = world.nranks
    for tokens in (16, 17000):
        work = Work(ranks, tokens, 8, ranks, 1, seed=9)
        idx = work.idx[world.rank]
        recv, _idx, weights, _counts, handle, _event = dispatch(world, buffer, work)
        assert recv.shape[0] == sum(int((work.idx[r] == world.rank).sum()) for r in range(ranks))
        out, _out_weights, _event = buffer.combine(recv, handle, topk_weights=weights)
        assert torch.equal(out, work.x[world.rank] * (idx >= 0))
    buffer.destroy()


def memory() -> int:
    """Bytes that this process has in memory of its own or shares, without files."""
    anonymous = re.search(r"^RssAnon:\s+(\d+) kB", open("/proc/self/status").read(), re.M)
    assert anonymous is not None
    return (int(anonymous.group(1)) << 10) + heaps()


def heaps() -> int:
    """Bytes of the heaps that this process has created: pages that somebody has touched."""
    nbytes = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if "epx-heap" in os.readlink("/proc/self/fd/" + name):
                nbytes += os.stat("/proc/self/fd/" + name).st_blocks * 512
        except OSError:
            pass
    return nbytes


def heap_files() -> Set[int]:
    """The heaps that this process has created and not freed."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if "epx-heap" in os.readlink("/proc/self/fd/" + name):
                status = os.stat("/proc/self/fd/" + name)
                found |= {status.st_ino} if status.st_size > 1 << 20 else set()
        except OSError:
            pass
    return found


def gpu_memory(world: World) -> int:
    """Bytes of the GPU that all ranks have together, without what torch has reserved for its own tensors."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    world.meet()
    free, total = torch.cuda.mem_get_info()
    reserved = [0] * world.nranks
    dist.all_gather_object(reserved, torch.cuda.memory_reserved())
    return total - free - sum(reserved)


def on_the_gpu(world: World) -> None:
    """All ranks share the GPU: what a buffer takes is what the GPU has less of, divided by them. What it had before it
    grew is given back, and all of it with its end, while another buffer lives on."""
    for given in (8 << 20, 256 << 20):
        with environment(EPX_DEEP_EP_GPU_BYTES="1M", EPX_DEEP_EP_MAX_TOKENS="64"):
            warm = deep_ep.Buffer(dist.group.WORLD, 1 << 20, 0, explicitly_destroy=True)
            work = Work(world.nranks, 256, 2048, 2 * world.nranks, 4, seed=3)
            exchange(world, warm, work)  # modules are loaded
            before = gpu_memory(world)
            buffer = deep_ep.Buffer(dist.group.WORLD, given, 0, explicitly_destroy=True)
            exchange(world, buffer, Work(world.nranks, 64, 2048, 2 * world.nranks, 4, seed=4))
            for _ in range(3):
                exchange(world, buffer, work)
            parts = dispatch(world, buffer, work)
            buffer.combine(parts[0], parts[4], topk_weights=parts[2])
            taken = (gpu_memory(world) - before) // world.nranks
            del parts
            world.meet()
            buffer.destroy()
            left = (gpu_memory(world) - before) // world.nranks
            warm.destroy()
        assert taken <= given + _SPARE, "%.1f MB of %.1f" % (taken / 1e6, given / 1e6)
        assert left <= 8 << 20, "%.1f MB of %.1f are not given back" % (left / 1e6, taken / 1e6)


def test_a_buffer_takes_what_it_is_given(world: World) -> None:
    """num_nvl_bytes + num_rdma_bytes + 64 MiB, and the tensors that it returns; after growth too."""
    if world.device.type == "cuda":
        on_the_gpu(world)
        return
    given = 4 << 20
    for place in places(world):
        with place:
            world.meet()
            before, others = memory(), heaps()  # of buffers that other tests share
            buffer = deep_ep.Buffer(dist.group.WORLD, given, given, explicitly_destroy=True)
            most = 0
            for tokens in (64, 256, 4200):
                work = Work(world.nranks, tokens, 512 if tokens < 4000 else 32, 2 * world.nranks, 4, seed=3)
                kept = [dispatch(world, buffer, work) for _ in range(2)]
                for parts in kept:
                    buffer.combine(parts[0], parts[4], topk_weights=parts[2])
                returned = sum(t.numel() * t.element_size() for parts in kept for t in parts[:3])
                world.meet()
                most = max(most, memory() - before - returned)
                del kept, parts
                gc.collect()
            assert most <= 2 * given + _SPARE, "%.1f MB beside what was returned" % (most / 1e6)
            held = heaps() - others
            buffer.destroy()
            del buffer
            gc.collect()
            world.meet()
            deadline = time.monotonic() + 10
            while heaps() > others + held // 8 and time.monotonic() < deadline:
                time.sleep(0.05)
            assert heaps() <= others + held // 8, (heaps(), others, held)


def test_memory_stays_until_all_ranks_have_unmapped_it(world: World) -> None:
    """Where ranks tell each other, as on a GPU. A rank that ends a buffer alone does not wait for the others."""
    world.only("cpu")
    work = Work(world.nranks, 16, 64, 2 * world.nranks, 2, seed=7)
    with environment(EPX_GIVEBACK="1", EPX_DEEP_EP_MAX_TOKENS="16"):
        stays, goes = (deep_ep.Buffer(dist.group.WORLD, explicitly_destroy=True) for _ in range(2))
        exchange(world, stays, work)
        before = heap_files()
        exchange(world, goes, work)
        own = heap_files() - before
        assert len(own) == 1
        world.meet()
        late = world.rank == world.nranks - 1
        if not late:
            start = time.monotonic()
            goes.destroy()
            assert own <= heap_files() and time.monotonic() - start < 5
        world.meet()
        if late:
            goes.destroy()
            assert not own & heap_files()  # all others have unmapped it
        first = heap_files() - own
        exchange(world, stays, Work(world.nranks, 40, 64, 2 * world.nranks, 2, seed=8))
        assert not own & heap_files() and len(heap_files()) == len(first)
        stays.destroy()
        assert not (heap_files() - before)
