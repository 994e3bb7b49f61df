#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times the exchange of transformers' expert parallelism over EPX beside its own implementations over torch's back end.

    torchrun --nproc-per-node 4 tools/python/transformers_bench.py

Experts only multiply rows by their weights, so that what is timed is the exchange. Rows are bfloat16. Each
implementation is called in turns; a time is the median over calls of the slowest rank's, in milliseconds. Results of
all implementations are compared. It needs transformers 5.23, torch 2.8 and accelerate, or newer ones.
"""

import argparse
import os
import sys
import time
from typing import Any, Dict, List

import epx.transformers
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed.expert_parallel import EPImplementationInterface


class Experts(torch.nn.Module):
    """What an implementation asks of the experts of a rank."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def forward(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return rows * weights.masked_fill(ids >= self.num_experts, 0.0).sum(1, keepdim=True).to(rows.dtype)


def step(implementation: Any, batch: Dict[str, torch.Tensor], backward: bool) -> torch.Tensor:
    if not backward:
        with torch.no_grad():
            return implementation(batch["rows"], batch["idx"], batch["weights"])
    rows = batch["rows"].detach().requires_grad_(True)
    out = implementation(rows, batch["idx"], batch["weights"].detach().requires_grad_(True))
    out.backward(out.detach())
    return out.detach()


def measure(implementations: Dict[str, Any], batch: Dict[str, torch.Tensor], backward: bool, calls: int) -> List[float]:
    """Milliseconds of each implementation."""
    times: Dict[str, List[float]] = {name: [] for name in implementations}
    results = {name: step(one, batch, backward) for name, one in implementations.items()}  # and warms up
    want = next(iter(results.values())).float()
    for name, result in results.items():
        if (result.float() - want).abs().max() > 0.02 * want.abs().max():
            raise SystemExit("transformers_bench: %s computes something else" % name)
    for _ in range(calls):
        for name, one in implementations.items():
            dist.barrier()
            begin = time.perf_counter()
            step(one, batch, backward)
            times[name].append(time.perf_counter() - begin)
    slowest = torch.tensor([times[name] for name in implementations], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return (slowest.median(1).values * 1e3).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 128, 1024], help="of a batch")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--most-parts", type=int, default=epx.transformers.MOST_PARTS,
                        help="epx.transformers.MOST_PARTS, default %(default)s")
    args = parser.parse_args()
    epx.transformers.MOST_PARTS = args.most_parts
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("one", "all"))
    experts = Experts(args.experts // ranks)
    registry = EPImplementationInterface()
    shared = {name: registry[name](experts, mesh["all"], mesh["all"]) for name in ("epx", "all_to_all", "all_reduce")}
    each = {name: registry[name](experts, mesh["all"], mesh["one"]) for name in ("epx", "all_to_all")}
    if rank == 0:
        print("%d ranks, hidden %d, top-%d of %d experts, bfloat16, milliseconds"
              % (ranks, args.hidden, args.topk, args.experts))
        print("%-24s%8s%10s%12s%12s" % ("batch", "tokens", "epx", "all_to_all", "all_reduce"), flush=True)
    for title, implementations, seed, backward in (
            ("one for all ranks", shared, 0, False), ("one for all, trained", shared, 0, True),
            ("one each", each, rank, False), ("one each, trained", each, rank, True)):
        for tokens in args.tokens:
            generator = torch.Generator().manual_seed(seed)
            scores = torch.rand(tokens, args.experts, generator=generator)
            weights, idx = scores.softmax(1).topk(args.topk)
            batch = dict(rows=torch.randn(tokens, args.hidden, generator=generator).bfloat16(), idx=idx,
                         weights=weights.bfloat16())
            values = measure(implementations, batch, backward, args.calls)
            if rank == 0:
                print("%-24s%8d%10.2f" % (title, tokens, values[0])
                      + "".join("%12.2f" % value for value in values[1:]), flush=True)


if __name__ == "__main__":
    main()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # without a wait for gloo's threads
