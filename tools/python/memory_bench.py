# SPDX-License-Identifier: Apache-2.0
"""The memory that a deep_ep.Buffer takes on a GPU, and what is left of it: the table of docs/performance.md.

    torchrun --nproc-per-node 8 tools/python/memory_bench.py
    EPX_RANKS_PER_NODE=8 EPX_NET=ofi:tcp torchrun --nproc-per-node 16 tools/python/memory_bench.py

All ranks share the machine's GPU. After a dispatch and combine of 64, 512 and 4096 tokens: megabytes per rank of the
GPU, without what torch has reserved, and of the host, as the machine has less available; and both after destroy(). The
time of the calls is beside them: the first ones create the group.
Twice, so that one can see whether they grow. --masks gives the buffer enable_shrink and a low-latency pair as well,
with num_rdma_bytes of its hint.
"""

import argparse
import gc
import os
import re
import sys
import time
from typing import List, Tuple

import deep_ep
import torch
import torch.distributed as dist

HIDDEN, EXPERTS, TOPK, FEW = 7168, 256, 8, 128


def memory() -> Tuple[float, float]:
    """Bytes of the GPU and of the host that are in use, by all processes."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    dist.barrier()
    free, total = torch.cuda.mem_get_info()
    reserved: List[int] = [0] * dist.get_world_size()
    dist.all_gather_object(reserved, torch.cuda.memory_reserved())
    with open("/proc/meminfo", encoding="ascii") as lines:
        available = re.search(r"^MemAvailable:\s+(\d+) kB", lines.read(), re.M)
    assert available is not None
    dist.barrier()
    return total - free - sum(reserved), -1024.0 * int(available.group(1))


def exchange(buffer: deep_ep.Buffer, tokens: int) -> int:
    """Two dispatches and combines; the bytes that a dispatch returned."""
    rng = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(tokens, HIDDEN, generator=rng).bfloat16().cuda()
    idx = torch.rand(tokens, EXPERTS, generator=rng).argsort(1)[:, :TOPK].contiguous().cuda()
    weights = torch.rand(tokens, TOPK, generator=rng).cuda()
    per_rank, per_node, per_expert, in_rank, _event = buffer.get_dispatch_layout(idx, EXPERTS)
    for _ in range(2):
        recv, recv_idx, recv_weights, _counts, handle, _event = buffer.dispatch(
            x, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert, topk_idx=idx, topk_weights=weights)
        out = buffer.combine(recv, handle, topk_weights=recv_weights)[0]
    expected = x.float() * in_rank.sum(1, keepdim=True)
    assert (out.float() - expected).abs().max() <= 0.05 * expected.abs().max()
    return sum(t.numel() * t.element_size() for t in (recv, recv_idx, recv_weights))


def pair(buffer: deep_ep.Buffer) -> None:
    """A low-latency dispatch and combine."""
    x = torch.randn(FEW, HIDDEN).bfloat16().cuda()
    idx = torch.rand(FEW, EXPERTS).argsort(1)[:, :TOPK].contiguous().cuda()
    recv, _counts, handle, _event, _hook = buffer.low_latency_dispatch(x, idx, FEW, EXPERTS, use_fp8=False)
    buffer.low_latency_combine(recv, idx, torch.ones(FEW, TOPK).cuda(), handle)
    torch.cuda.synchronize()


def print_memory(name: str, before: Tuple[float, float], more: str) -> None:
    """A line of the table, on rank 0."""
    now, ranks = memory(), dist.get_world_size()
    if dist.get_rank() == 0:
        print("| %s | %.0f | %.0f | %s |" % (
            name, (now[0] - before[0]) / ranks / 1e6, (now[1] - before[1]) / ranks / 1e6, more), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--nvl-bytes", type=float, default=2e9)
    parser.add_argument("--rdma-bytes", type=float, default=1e9)
    parser.add_argument("--masks", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    if args.masks:
        args.rdma_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(FEW, HIDDEN, dist.get_world_size(), EXPERTS)
    warm = deep_ep.Buffer(dist.group.WORLD, 1 << 20, 0, explicitly_destroy=True)
    exchange(warm, 64)  # modules are loaded
    if dist.get_rank() == 0:
        print("the bar is %.0f MB and what is returned\n| after | GPU, MB | host, MB | |\n|---|---|---|---|" % (
            (args.nvl_bytes + args.rdma_bytes + (64 << 20)) / 1e6))
    for _ in range(2):
        before = memory()
        buffer = deep_ep.Buffer(dist.group.WORLD, int(args.nvl_bytes), int(args.rdma_bytes), explicitly_destroy=True,
                                low_latency_mode=args.masks, enable_shrink=args.masks)
        for tokens in (64, 512, 4096):
            start = time.perf_counter()
            returned = exchange(buffer, tokens)
            if args.masks:
                pair(buffer)
            torch.cuda.synchronize()
            taken = time.perf_counter() - start
            print_memory("%d tokens" % tokens, before, "%.0f MB returned, %.2f s" % (returned / 1e6, taken))
        dist.barrier()
        start = time.perf_counter()
        buffer.destroy()
        print_memory("destroy", before, "%.2f s" % (time.perf_counter() - start))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # as in python/tests/suite.py


if __name__ == "__main__":
    main()
