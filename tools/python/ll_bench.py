# SPDX-License-Identifier: Apache-2.0
"""Low-latency dispatch and combine through deep_ep: the low-latency table of docs/performance.md.

    torchrun --nproc-per-node 8 tools/python/ll_bench.py --device cuda
    torchrun --nproc-per-node 4 tools/python/ll_bench.py --tokens 16 --hidden 512 --experts 16     (CPU tensors)

A pair is an FP8 dispatch and a combine. The cases differ in where the rows of the experts are:

    buffer    in the tensor of get_next_low_latency_combine_buffer
    torch     in a tensor of torch's that exists before the graph
    graph     in a tensor that torch allocates while the graph is captured (a graph only): the second graph of its
              memory pool, as frameworks capture one graph per batch size; the first is "first graph". In a third, the
              "written graph", a kernel of torch's writes into that tensor
    LogFMT    as "torch", sent as LogFMT

"graph" is one pair of a captured graph of 20, "eager" one of 20 pairs that are queued without a stop; "host" is the
time that the host takes to queue such a pair. The second table has the halves of calls with hooks beside whole calls:
CUDA events around each, behind a sleep of the GPU that lets the host run ahead. Each figure is the median over the
ranks, in microseconds, with the slowest rank behind it. Every case is checked before it is timed, and every graph
after it.
"""

import argparse
import os
import sys
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

import deep_ep
import torch
import torch.distributed as dist
from deep_ep_bench import gathered

PAIRS = 20
CASES = ("buffer", "torch", "first graph", "graph", "written graph", "LogFMT")


def dequantized(recv: Tuple[torch.Tensor, torch.Tensor], hidden: int) -> torch.Tensor:
    """The rows of an FP8 dispatch as bf16."""
    rows, scales = recv
    shape = rows.shape
    blocks = rows.float().view(shape[0], shape[1], hidden // 128, 128)
    return (blocks * scales.unsqueeze(3)).view(shape).bfloat16()


class Pairs:
    """The inputs of a pair, and its calls."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device, ranks = args, device, dist.get_world_size()
        rng = torch.Generator().manual_seed(dist.get_rank())
        hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(args.tokens, args.hidden, ranks, args.experts)
        self.buffer = deep_ep.Buffer(dist.group.WORLD, 0, hint, low_latency_mode=True,
                                     num_qps_per_rank=args.experts // ranks, explicitly_destroy=True)
        self.x = (torch.randn(args.tokens, args.hidden, generator=rng) / 16).bfloat16().to(device)
        scores = torch.rand(args.tokens, args.experts, generator=rng)
        self.idx = scores.argsort(1)[:, :args.topk].contiguous().to(device)
        self.weights = torch.rand(args.tokens, args.topk, generator=rng).to(device)
        self.pool: Any = None  # of the graphs, once there is one
        self.first: Any = None
        self.expected = self.x.float() * self.weights.sum(1, keepdim=True)
        # The rows that the experts give back: what they got, so that a sum can be checked.
        recv, _counts, handle, _event, _hook = self.dispatch()
        self.rows = dequantized(recv, args.hidden)
        for _ in range(2):
            self.buffer.get_next_low_latency_combine_buffer(handle).copy_(self.rows)
        # Ranks that share a GPU and wait for each other on all of its SMs would keep a slower one from these kernels.
        synchronize(device)

    def dispatch(self, hooks: bool = False) -> Any:
        """An FP8 dispatch."""
        return self.buffer.low_latency_dispatch(self.x, self.idx, self.args.tokens, self.args.experts,
                                                return_recv_hook=hooks)

    def combine(self, case: str, handle: Any, hooks: bool = False) -> Any:
        """A combine of the rows where the case has them."""
        rows = self.rows
        if case == "buffer":
            rows = self.buffer.get_next_low_latency_combine_buffer(handle)
        elif case.endswith("graph"):
            rows = torch.empty_like(self.rows)
            if case == "written graph":
                rows[:, :1].copy_(self.rows[:, :1])
        return self.buffer.low_latency_combine(rows, self.idx, self.weights, handle, zero_copy=case == "buffer",
                                               use_logfmt=case == "LogFMT", return_recv_hook=hooks)

    def pair(self, case: str) -> torch.Tensor:
        """A whole pair; the sums."""
        _recv, _counts, handle, _event, _hook = self.dispatch()
        return self.combine(case, handle)[0]

    def check(self, name: str, out: torch.Tensor) -> None:
        """FP8 and LogFMT round by some percent."""
        error = (out.float() - self.expected).abs().max() / self.expected.abs().max()
        assert error < 0.1, "%s: wrong by %.3f of the largest sum" % (name, error)


def synchronize(device: torch.device) -> None:
    """Waits for the device, then for the other ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def spread(value: float) -> str:
    """Median rank and slowest rank."""
    times = gathered(value)
    return "%.0f (%.0f)" % (times[len(times) // 2], times[-1])


def eager(pairs: Pairs, case: str) -> Tuple[float, float]:
    """(clock, host) of a pair, in microseconds: the median of five series."""
    pairs.check(case, pairs.pair(case))
    series = []
    for _ in range(7):
        synchronize(pairs.device)
        begin = time.perf_counter()
        for _ in range(PAIRS):
            pairs.pair(case)
        queued = time.perf_counter()
        if pairs.device.type == "cuda":
            torch.cuda.synchronize()
        series.append(((time.perf_counter() - begin) / PAIRS * 1e6, (queued - begin) / PAIRS * 1e6))
    return sorted(series[2:])[2]


def graph(pairs: Pairs, case: str, replays: int = 10) -> float:
    """Microseconds of a pair of a captured graph."""
    captured = torch.cuda.CUDAGraph()
    synchronize(pairs.device)
    with torch.cuda.graph(captured, pool=pairs.pool):
        for _ in range(PAIRS):
            out = pairs.pair(case)
    synchronize(pairs.device)
    for _ in range(3):
        captured.replay()
    synchronize(pairs.device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(replays):
        captured.replay()
    end.record()
    synchronize(pairs.device)
    if not case.endswith("graph"):  # there most rows are not filled
        pairs.check(case + " in a graph", out)
    elif case == "first graph":
        pairs.pool, pairs.first = captured.pool(), captured
    return begin.elapsed_time(end) * 1e3 / replays / PAIRS


class Marks:
    """CUDA events between calls."""

    def __init__(self) -> None:
        self._events: Dict[str, List[Tuple[torch.cuda.Event, torch.cuda.Event]]] = {}

    def around(self, name: str, call: Callable[[], Any]) -> Any:
        """Calls it between two events."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = call()
        end.record()
        self._events.setdefault(name, []).append((begin, end))
        return result

    def median(self, name: str) -> float:
        """Microseconds."""
        times = sorted(begin.elapsed_time(end) * 1e3 for begin, end in self._events[name][2:])
        return times[len(times) // 2]


def halves(pairs: Pairs, case: str) -> List[str]:
    """Times of the whole calls and of their halves, by events."""
    names = ("dispatch", "dispatch send", "dispatch receive", "combine", "combine send", "combine receive")
    marks = Marks()
    for hooks in (False, True):
        synchronize(pairs.device)
        torch.cuda._sleep(20_000_000)  # some 10 ms: the host queues everything behind it
        for _ in range(12):
            half = " send" if hooks else ""
            _recv, _counts, handle, _event, hook = marks.around("dispatch" + half, lambda: pairs.dispatch(hooks))
            if hooks:
                marks.around("dispatch receive", hook)
            _out, _event, hook = marks.around("combine" + half, lambda: pairs.combine(case, handle, hooks))
            if hooks:
                marks.around("combine receive", hook)
    torch.cuda.synchronize()
    return [spread(marks.median(name)) for name in names]


def table(rows: List[List[str]]) -> None:
    """Prints rows of a Markdown table on rank 0; the first one is its head."""
    if dist.get_rank() == 0:
        rows.insert(1, ["---"] * len(rows[0]))
        print("\n".join("| " + " | ".join(row) + " |" for row in rows), flush=True)


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=288)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--cases", default=",".join(CASES), help="of: %(default)s")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
        device = torch.device("cuda", torch.cuda.current_device())
    pairs = Pairs(args, device)
    cases = args.cases.split(",")
    rows = [["rows of the experts", "graph, us per pair", "eager, us", "host, us"]]
    for case in cases:
        clock: Optional[Tuple[float, float]] = eager(pairs, case) if not case.endswith("graph") else None
        captured = spread(graph(pairs, case)) if device.type == "cuda" else ""
        rows.append([case, captured] + ([spread(time) for time in clock] if clock else ["", ""]))
    table(rows)
    if device.type == "cuda":
        rows = [["rows of the experts", "dispatch", "send", "receive", "combine", "send", "receive"]]
        table(rows + [[case] + halves(pairs, case) for case in cases if not case.endswith("graph")])
    pairs.buffer.destroy()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # as in python/tests/suite.py


if __name__ == "__main__":
    main()
