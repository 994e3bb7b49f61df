# SPDX-License-Identifier: Apache-2.0
"""One rank of a program for EPX's nccl.ep with torch: a communicator of a process group, tensors of torch, a custom
allocator. Started by torchrun (scripts/check_nccl_python.sh)."""

import ctypes
import faulthandler
import os
import sys

import torch
import torch.distributed as dist

import nccl.ep as ep
from nccl.ep.interop.torch import get_nccl_comm_from_group

TOKENS, HIDDEN, TOPK, LOCAL = 8, 512, 2, 2
kept = {}


@ep.AllocFn
def take(out, size, _context):
    memory = ctypes.create_string_buffer(size + 256)
    address = (ctypes.addressof(memory) + 255) // 256 * 256
    kept[address] = memory
    out[0] = address
    return 0


@ep.FreeFn
def give_back(address, _context):
    del kept[address]
    return 0


def layer(comm) -> None:
    rank, nranks = comm.rank, comm.nranks
    config = ep.GroupConfig(
        algorithm=ep.Algorithm.LOW_LATENCY, num_experts=nranks * LOCAL, max_dispatch_tokens_per_rank=TOKENS,
        max_token_bytes=HIDDEN * 2,
        alloc=ep.AllocConfig(alloc_fn=ctypes.cast(take, ctypes.c_void_p).value,
                             free_fn=ctypes.cast(give_back, ctypes.c_void_p).value))
    group = ep.Group.create(comm, config)
    assert kept, "the allocator was not called"
    tokens = (torch.arange(TOKENS * HIDDEN) % 97 + rank).to(torch.bfloat16).view(TOKENS, HIDDEN)
    idx = (torch.arange(TOKENS * TOPK).view(TOKENS, TOPK) + rank) % (nranks * LOCAL)
    weights = torch.full((TOKENS, TOPK), 0.5)
    received = torch.zeros(LOCAL, nranks * TOKENS, HIDDEN, dtype=torch.bfloat16)
    counters, out = torch.zeros(LOCAL, dtype=torch.int32), torch.full_like(tokens, -1)
    handle = group.create_handle(ep.Layout.EXPERT_MAJOR, ep.Tensor(idx), stream=0)
    handle.dispatch(ep.DispatchInputs(tokens=ep.Tensor(tokens)), ep.DispatchOutputs(tokens=ep.Tensor(received)),
                    layout_info=ep.LayoutInfo(expert_counters=ep.Tensor(counters)), stream=0)
    ep.synchronize()
    total = torch.tensor([int(counters.sum())])
    dist.all_reduce(total)
    assert int(total) == nranks * TOKENS * TOPK, total
    handle.combine(ep.CombineInputs(tokens=ep.Tensor(received)),
                   ep.CombineOutputs(tokens=ep.Tensor(out), topk_weights=ep.Tensor(weights)), stream=0)
    ep.synchronize()
    assert torch.equal(out, tokens)  # two halves of what was sent
    handle.destroy()
    group.destroy()
    assert not kept, "the allocator did not get all of it back"


def main() -> None:
    faulthandler.dump_traceback_later(70)  # check_nccl_python.sh ends it after 100 s
    dist.init_process_group("gloo")
    comm = get_nccl_comm_from_group()
    assert (comm.rank, comm.nranks) == (dist.get_rank(), dist.get_world_size())
    layer(comm)
    if comm.rank == 0:
        print("nccl.ep with torch %s, %d ranks: ok" % (torch.__version__, comm.nranks))
    comm.destroy()
    dist.barrier()
    sys.stdout.flush()
    # Without destroy_process_group(): torch 2.6 joins gloo's thread there with Python's lock held, and that thread may
    # wait for the lock to free a tensor of an exchange. Two ranks without EPX, an all-reduce of a tensor that is let
    # go, then the call: 2 of 300 runs on a busy machine did not end, with these two stacks.
    os._exit(0)


main()
