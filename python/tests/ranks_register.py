# SPDX-License-Identifier: Apache-2.0
"""Combine of rows in memory that is not EPX's: between GPU processes it is registered and read in place, else
copied."""

import gc
from typing import Any, Callable, List, Tuple

import deep_ep
import epx
import torch
import torch.distributed as dist
from ranks_high_throughput import layout
from reference import Work, same_bits
from suite import World, environment

SEGMENT = 32 << 20  # torch gives so much an allocation of its own


def rows_of(world: World, like: torch.Tensor) -> torch.Tensor:
    """Memory for rows, in an allocation that holds nothing else."""
    least = SEGMENT if world.device.type == "cuda" else 0
    flat = torch.empty(max(least, like.nbytes), dtype=torch.uint8, device=world.device)
    return flat.view(like.dtype)[:like.numel()].view(like.shape)


def let_go(world: World) -> None:
    """What is not referred to is given back to the system, on a GPU with cudaFree."""
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()


def dispatched(world: World, buffer: deep_ep.Buffer, work: Work) -> Tuple[torch.Tensor, torch.Tensor, Any, epx.Group]:
    """(rows in the heap, their weights, handle, the group that did it)."""
    me = buffer.rank
    idx = world.to(work.idx[me])
    recv, _idx, weights, _counts, handle, _event = buffer.dispatch(
        world.to(work.x[me]), **layout(buffer, idx, work.experts), topk_idx=idx,
        topk_weights=world.to(work.weights[me]))
    pools = buffer._engine._high
    return recv, weights, handle, pools[(recv.device, work.experts)].group


def combined(world: World, group: epx.Group,
             call: Callable[[], Tuple[Any, ...]]) -> Tuple[torch.Tensor, torch.Tensor, int]:
    """Rows, weights, and how many bytes were copied on the way. All ranks have finished afterwards."""
    before = group.stats()["bytes_local"]
    out, weights, _event = call()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    world.meet()
    return out, weights, group.stats()["bytes_local"] - before


def check_rounds(world: World, buffer: deep_ep.Buffer) -> None:
    work = Work(buffer.group_size, 64, 2048, 4 * buffer.group_size, 4, seed=21)
    recv, weights, handle, group = dispatched(world, buffer, work)
    original = recv.clone()
    in_place, fresh = world.device.type == "cuda", 0
    let_go(world)
    for life in range(4 if in_place else 2):  # of the allocation; its successor may lie at the same address
        y = rows_of(world, recv)
        w = rows_of(world, weights)
        copied: List[int] = []
        for turn in range(4):
            recv.copy_(original * (1 + life + 2 * turn))
            y.copy_(recv)
            w.copy_(weights)
            want, want_weights, from_heap = combined(
                world, group, lambda: buffer.combine(recv, handle, topk_weights=weights))
            out, out_weights, nbytes = combined(world, group, lambda: buffer.combine(y, handle, topk_weights=w))
            assert from_heap == 0 and same_bits(out, want) and same_bits(out_weights, want_weights)
            copied.append(nbytes)
        fresh += copied[0] > 0  # nothing is read in place before the others have imported it
        if recv.shape[0] > 0:
            assert (copied[2] == copied[3] == 0) == in_place, copied
        del y, w
        let_go(world)
    if buffer.runtime.get_num_rdma_ranks() == 1:  # between nodes a GPU sends rows from where they are
        assert fresh > 1 or recv.shape[0] == 0, "torch has kept the memory: nothing was registered anew"


def test_rows_of_other_memory(world: World) -> None:
    for buffer in world.buffers():
        check_rounds(world, buffer)


def test_processes_copy_where_memory_cannot_be_mapped(world: World) -> None:
    """Asked for, ordinary CPU memory is still nothing that another process can read."""
    world.only("cpu")
    with environment(EPX_REGISTER="1"):
        buffer = deep_ep.Buffer(dist.group.WORLD, 1 << 26, explicitly_destroy=True)
        check_rounds(world, buffer)
        buffer.destroy()


def test_not_registered_when_disabled(world: World) -> None:
    with environment(EPX_REGISTER="0"):
        buffer = deep_ep.Buffer(dist.group.WORLD, 1 << 26, explicitly_destroy=True)
        work = Work(buffer.group_size, 64, 2048, 4 * buffer.group_size, 4, seed=22)
        recv, _weights, handle, group = dispatched(world, buffer, work)
        y = rows_of(world, recv).copy_(recv)
        for _ in range(4):
            _out, _none, copied = combined(world, group, lambda: buffer.combine(y, handle))
            assert copied == recv.nbytes and not group.register(y)
        assert group.register(recv)
        buffer.destroy()
