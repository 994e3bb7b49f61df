# SPDX-License-Identifier: Apache-2.0
"""ElasticBuffer (V2) against Buffer (V1) in the same run, and expansion against the same bytes unexpanded.

    torchrun --nproc-per-node 8 tools/python/elastic_bench.py [--device cuda] [--tokens 4096] ...

Each line is the median over iterations of the slowest rank. The kinds of call take turns, so that all of them see the
same machine. Whole calls count, from the caller's arguments to results that the current stream may use; on the CPU, to
the end of the work. An iteration is a series of calls: ranks leave the barrier before it hundreds of microseconds after
each other, which is in the time of each series once. Each call of a series has another routing; those without CPU sync
do not wait for each other, and show what the GPU can do. The last lines hold results, as training does until its
backward pass: each call releases the oldest of --held results first. They are compared with the same call without that,
too.
"""

import argparse
import collections
import os
import statistics
import time
from typing import Any, Callable, Deque, Dict, List

import torch
import torch.distributed as dist

import deep_ep

_ROUTINGS = 4


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--series", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--held", type=int, default=6)
    return parser.parse_args()


class Bench:
    """The inputs of this rank, and the calls to be measured."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.rank, self.ranks = args, dist.get_rank(), dist.get_world_size()
        self.device = torch.device(args.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.rank % torch.cuda.device_count())
            self.device = torch.device("cuda", torch.cuda.current_device())
        rng = torch.Generator().manual_seed(self.rank)
        self.x = torch.randn(args.tokens, args.hidden, generator=rng).bfloat16().to(self.device)
        scales = torch.rand(args.tokens, -(-args.hidden // 128), generator=rng).to(self.device)
        self.x_fp8 = (self.x.to(torch.float8_e4m3fn), scales)
        self.routings = [torch.rand(args.tokens, args.experts, generator=rng).topk(args.topk).indices.to(self.device)
                         for _ in range(_ROUTINGS)]
        self.calls = 0
        self.weights = torch.rand(args.tokens, args.topk, generator=rng).to(self.device)
        # One expert on each of as many ranks: as many rows with expansion as without.
        spread = min(args.topk, self.ranks)
        ranks = torch.rand(args.tokens, self.ranks, generator=rng).topk(spread).indices
        local = args.experts // self.ranks
        self.spread = (ranks * local + torch.randint(0, local, ranks.shape, generator=rng)).to(self.device)
        self.spread_weights = self.weights[:, :spread].contiguous()
        group = dist.group.WORLD
        self.old = deep_ep.Buffer(group, 1 << 30, 0, explicitly_destroy=True)
        self.new = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=args.tokens, hidden=args.hidden,
                                         num_topk=args.topk, explicitly_destroy=True)
        self.aligned = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=args.tokens, hidden=args.hidden,
                                             num_topk=args.topk, explicitly_destroy=True)
        # As large as V2's, for results that are held: a larger one has room for more of them.
        self.old_small = deep_ep.Buffer(group, self.new.num_bytes, 0, explicitly_destroy=True)

    @property
    def held_name(self) -> str:
        """The end of the names of calls whose results are held."""
        return ", %d results held" % self.args.held

    @property
    def idx(self) -> torch.Tensor:
        """The routing of the next call."""
        self.calls += 1
        return self.routings[self.calls % _ROUTINGS]

    def old_dispatch(self, idx: torch.Tensor, worst: int = 0, fp8: bool = False, held: bool = False) -> Any:
        """V1: layout and dispatch."""
        buffer = self.old_small if held else self.old
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, self.args.experts)
        return buffer.dispatch(
            self.x_fp8 if fp8 else self.x, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=idx, topk_weights=self.weights,
            num_worst_tokens=worst)

    def new_dispatch(self, idx: torch.Tensor, weights: torch.Tensor, fp8: bool = False, **options: Any) -> Any:
        """V2."""
        return self.new.dispatch(self.x_fp8 if fp8 else self.x, idx, weights, num_experts=self.args.experts, **options)

    def aligned_dispatch(self, fp8: bool = False) -> Any:
        """V2 as for grouped products of matrices: zones of whole blocks, scales column by column. This buffer has no
        other calls."""
        return self.aligned.dispatch(
            self.x_fp8 if fp8 else self.x, self.idx, self.weights, num_experts=self.args.experts, do_expand=True,
            expert_alignment=128, use_tma_aligned_col_major_sf=fp8)

    def phases(self) -> List[Callable[[], Dict[str, Callable[[], Any]]]]:
        """What is measured. Results that a phase keeps are released before the next: heaps are of limited size."""
        return [self._dispatches, self._fp8, self._expanded, self._combines, self._same_dispatches, self._same_cached,
                self._same_combines, self._held, self._held_fp8, self._held_expanded]

    def _dispatches(self) -> Dict[str, Callable[[], Any]]:
        worst = self.ranks * self.args.tokens
        return {
            "V1 layout + dispatch": lambda: self.old_dispatch(self.idx),
            "V2 dispatch": lambda: self.new_dispatch(self.idx, self.weights),
            "V1 layout + dispatch, num_worst_tokens": lambda: self.old_dispatch(self.idx, worst),
            "V2 dispatch, no CPU sync": lambda: self.new_dispatch(self.idx, self.weights, do_cpu_sync=False),
        }

    def _fp8(self) -> Dict[str, Callable[[], Any]]:
        return {
            "V1 layout + dispatch, FP8": lambda: self.old_dispatch(self.idx, fp8=True),
            "V2 dispatch, FP8": lambda: self.new_dispatch(self.idx, self.weights, fp8=True),
            "V2 dispatch, FP8, expanded": lambda: self.new_dispatch(self.idx, self.weights, fp8=True, do_expand=True),
            "V2 dispatch, FP8, expanded, aligned": lambda: self.aligned_dispatch(fp8=True),
        }

    def _expanded(self) -> Dict[str, Callable[[], Any]]:
        return {
            "V2 dispatch, expanded": lambda: self.new_dispatch(self.idx, self.weights, do_expand=True),
            "V2 dispatch, expanded, aligned": self.aligned_dispatch,
        }

    def _combines(self) -> Dict[str, Callable[[], Any]]:
        idx = self.idx
        old, new = self.old_dispatch(idx), self.new_dispatch(idx, self.weights)
        wide = self.new_dispatch(idx, self.weights, do_expand=True)
        return {
            "V1 combine": lambda: self.old.combine(old[0], old[4], topk_weights=old[2]),
            "V2 combine": lambda: self.new.combine(new[0], new[3], topk_weights=new[2]),
            "V2 combine, expanded": lambda: self.new.combine(wide[0], wide[3], topk_weights=wide[2]),
        }

    def _same_dispatches(self) -> Dict[str, Callable[[], Any]]:
        spread = (self.spread, self.spread_weights)
        return {
            "same bytes: dispatch": lambda: self.new_dispatch(*spread),
            "same bytes: dispatch, expanded": lambda: self.new_dispatch(*spread, do_expand=True),
        }

    def _same_handles(self) -> List[Any]:
        spread = (self.spread, self.spread_weights)
        return [self.new_dispatch(*spread), self.new_dispatch(*spread, do_expand=True)]

    def _same_cached(self) -> Dict[str, Callable[[], Any]]:
        flat, zones = (result[3] for result in self._same_handles())
        return {
            "same bytes: cached": lambda: self.new.dispatch(self.x, handle=flat),
            "same bytes: cached, expanded": lambda: self.new.dispatch(self.x, handle=zones, do_expand=True),
        }

    def _same_combines(self) -> Dict[str, Callable[[], Any]]:
        flat, zones = self._same_handles()
        return {
            "same bytes: combine": lambda: self.new.combine(flat[0], flat[3]),
            "same bytes: combine, expanded": lambda: self.new.combine(zones[0], zones[3]),
        }

    def _holding(self, call: Callable[[], Any]) -> Callable[[], None]:
        """The call, with its last results held."""
        held: Deque[Any] = collections.deque()

        def hold() -> None:
            if len(held) == self.args.held:
                held.popleft()
            held.append(call())
        return hold

    def _held(self) -> Dict[str, Callable[[], Any]]:
        return {
            "V1 layout + dispatch" + self.held_name: self._holding(
                lambda: self.old_dispatch(self.idx, held=True)),
            "V2 dispatch" + self.held_name: self._holding(lambda: self.new_dispatch(self.idx, self.weights)),
        }

    def _held_fp8(self) -> Dict[str, Callable[[], Any]]:
        return {
            "V1 layout + dispatch, FP8" + self.held_name: self._holding(
                lambda: self.old_dispatch(self.idx, fp8=True, held=True)),
            "V2 dispatch, FP8" + self.held_name: self._holding(
                lambda: self.new_dispatch(self.idx, self.weights, fp8=True)),
        }

    def _held_expanded(self) -> Dict[str, Callable[[], Any]]:
        return {"V2 dispatch, expanded" + self.held_name: self._holding(
            lambda: self.new_dispatch(self.idx, self.weights, do_expand=True))}

    def _once(self, call: Callable[[], Any]) -> float:
        dist.barrier()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(self.args.series):
            call()  # what it returns is released before the next: heaps are of limited size
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / self.args.series

    def run(self) -> Dict[str, float]:
        """Microseconds of each call."""
        times: Dict[str, List[float]] = {}
        for phase in self.phases():
            calls = phase()
            for i in range(self.args.warmup + self.args.iterations):
                for name, call in calls.items():
                    taken = self._once(call)
                    if i >= self.args.warmup:
                        times.setdefault(name, []).append(taken)
            del calls, call
        result = {}
        for name, mine in times.items():
            slowest = torch.tensor(mine, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            result[name] = statistics.median(slowest.tolist()) * 1e6
        return result


def main() -> None:
    """Measures and prints."""
    args = _parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    bench = Bench(args)
    times = bench.run()
    if bench.rank == 0:
        print("deep_ep V1 and V2: %d ranks on %s, %d tokens, hidden %d, top-%d of %d; us, median of %d x %d, slowest "
              "rank" % (bench.ranks, args.device, args.tokens, args.hidden, args.topk, args.experts, args.iterations,
                        args.series))
        print("| call | us | of the call before it |\n|---|---|---|")
        before, held_before = 0.0, False
        for name, taken in times.items():
            held = name.endswith(bench.held_name)
            ratios = ["%.3f" % (taken / before)] if before and held == held_before else []
            if held:
                ratios.append("%.3f of none held" % (taken / times[name[:-len(bench.held_name)]]))
            print("| %s | %.0f | %s |" % (name, taken, "; ".join(ratios)))
            before, held_before = taken, held
    bench.old.destroy()
    bench.old_small.destroy()
    bench.new.destroy()
    bench.aligned.destroy()
    dist.barrier()
    os._exit(0)  # as in python/tests/suite.py


if __name__ == "__main__":
    main()
