# SPDX-License-Identifier: Apache-2.0
"""What an operation that waits for a late rank costs computation beside it: the table of docs/performance.md.

    torchrun --nproc-per-node 8 tools/python/late_bench.py --device cuda
    torchrun --nproc-per-node 4 tools/python/late_bench.py --tokens 64 --hidden 512 --experts 16     (CPU tensors)

Rank 0 queues its part of a layer --late milliseconds after the others. They have queued theirs on one stream and
multiply matrices on another meanwhile: all of them, or with --computing N ranks 1 to N only. Both streams begin behind
a sleep of the GPU, in which the host queues everything: it takes longer to queue a product than the GPU to compute it.
One rank for a whole GPU is two ranks, of which the late one has nothing there. The table has the time of a product
alone, and beside such a wait, per operation that waits: the median over the ranks and the slowest rank, in
microseconds, and their ratio. With hooks, low latency has sent before the products and receives behind them. The last
line has what is left of a pair when the late rank comes. On CPU tensors a call returns when its operation is done, so
that nothing runs beside it: there the program shows only that it works.
"""

import argparse
import os
import sys
import time
from typing import Any, Callable, Dict, List

import deep_ep
import torch
import torch.distributed as dist
from deep_ep_bench import gathered


class Products:
    """Matrix products on a stream of their own; times of the last series."""

    def __init__(self, size: int, count: int, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.left = torch.randn(size, size, device=device).bfloat16()
        self.out = torch.empty_like(self.left)
        self.stream = torch.cuda.Stream() if self.cuda else None
        self.count = count
        self.events: List[Any] = []

    def hold(self) -> None:
        """What is queued next, on the current stream and on this one, begins at the same time, some 2 ms later."""
        if not self.cuda:
            return
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(4_000_000)
            begin = torch.cuda.Event()
            begin.record()
        torch.cuda.current_stream().wait_event(begin)

    def queue(self) -> None:
        """Queues the series; CPU tensors are multiplied here and now."""
        if not self.cuda:
            self.events = [time.perf_counter()]
            for _ in range(self.count):
                torch.mm(self.left, self.left, out=self.out)
                self.events.append(time.perf_counter())
            return
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(self.count + 1)]
        with torch.cuda.stream(self.stream):
            self.events[0].record()
            for event in self.events[1:]:
                torch.mm(self.left, self.left, out=self.out)
                event.record()

    def median_us(self) -> float:
        """The median product of the series; waits for it."""
        if self.cuda:
            self.stream.synchronize()
            times = [a.elapsed_time(b) * 1e3 for a, b in zip(self.events, self.events[1:])]
        else:
            times = [(b - a) * 1e6 for a, b in zip(self.events, self.events[1:])]
        return sorted(times)[len(times) // 2]


class Layer:
    """Operations of both modes, each complete with what comes before it."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        rng = torch.Generator().manual_seed(dist.get_rank())
        ranks, few = dist.get_world_size(), min(args.tokens, 128)
        hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(few, args.hidden, ranks, args.experts)
        self.buffer = deep_ep.Buffer(dist.group.WORLD, int(1e9), hint, low_latency_mode=True, explicitly_destroy=True)
        self.experts, self.few = args.experts, few
        self.x = torch.randn(args.tokens, args.hidden, generator=rng).bfloat16().to(device)
        scores = torch.rand(args.tokens, args.experts, generator=rng)
        self.idx = scores.argsort(1)[:, :args.topk].contiguous().to(device)
        self.weights = torch.rand(args.tokens, args.topk, generator=rng).to(device)
        layout = self.buffer.get_dispatch_layout(self.idx, args.experts)
        self.recv, _i, _w, _c, self.handle, _e = self.buffer.dispatch(
            self.x, num_tokens_per_rank=layout[0], num_tokens_per_rdma_rank=layout[1], is_token_in_rank=layout[3],
            num_tokens_per_expert=layout[2], topk_idx=self.idx, topk_weights=self.weights)

    def dispatch(self) -> None:
        """High throughput, cached: the host waits for nothing."""
        self.buffer.dispatch(self.x, handle=self.handle)

    def combine(self) -> None:
        """High throughput."""
        self.buffer.combine(self.recv, self.handle)

    def halves(self) -> Callable[[], None]:
        """Low latency with hooks: sends, and returns what receives."""
        _recv, _counts, _handle, _event, hook = self.buffer.low_latency_dispatch(
            self.x[:self.few], self.idx[:self.few], self.few, self.experts, use_fp8=False, return_recv_hook=True)
        return hook

    def pair(self) -> None:
        """Low latency: dispatch and combine."""
        recv, _counts, handle, _event, _hook = self.buffer.low_latency_dispatch(
            self.x[:self.few], self.idx[:self.few], self.few, self.experts, use_fp8=False)
        self.buffer.low_latency_combine(recv, self.idx[:self.few], self.weights[:self.few], handle)


def beside(operation: Callable[[], Any], products: Products, late_ms: float, device: torch.device,
           computing: bool) -> float:
    """The median product of this rank, if it computes, while rank 0 comes late to the operation."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(late_ms * 1e-3)
    elif computing:
        products.hold()
    rest = operation()
    if computing:
        products.queue()
    median = products.median_us() if computing else 0.0
    if rest is not None:
        rest()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return median


def behind(operation: Callable[[], Any], late_ms: float, device: torch.device, rounds: int) -> float:
    """Microseconds from when rank 0 comes to the end of the operation on this rank, the median."""
    times = []
    for _ in range(rounds):
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        while dist.get_rank() == 0 and time.perf_counter() - begin < late_ms * 1e-3:
            pass
        operation()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin - late_ms * 1e-3) * 1e6)
    return sorted(times)[rounds // 2]


def measure(layer: Layer, products: Products, args: argparse.Namespace, device: torch.device) -> Dict[str, List[float]]:
    """Case -> the median of each rank that computes and is not late."""
    computing = dist.get_rank() <= args.computing
    cases: Dict[str, Callable[[], Any]] = {
        "alone": lambda: None, "dispatch": layer.dispatch, "combine": layer.combine, "low latency": layer.pair,
        "low latency, hooks": layer.halves}
    rows = {}
    for name, operation in cases.items():
        rest = operation()
        if rest is not None:
            rest()
        times = sorted(beside(operation, products, args.late, device, computing) for _ in range(args.rounds))
        every: List[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, times[len(times) // 2])
        rows[name] = every[1:args.computing + 1]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    for name, value in (("tokens", 4096), ("hidden", 7168), ("experts", 256), ("topk", 8), ("size", 2048),
                        ("products", 8), ("rounds", 7)):
        parser.add_argument("--" + name, type=int, default=value)
    parser.add_argument("--late", type=float, default=7.0, help="milliseconds, of which the GPU sleeps for 2")
    parser.add_argument("--computing", type=int, help="ranks that multiply; default: all")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    args.computing = min(args.computing or dist.get_world_size(), dist.get_world_size() - 1)
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        args.size = min(args.size, 128)
    layer, products = Layer(args, device), Products(args.size, args.products, device)
    rows = measure(layer, products, args, device)
    rest = gathered(behind(layer.pair, args.late, device, args.rounds))
    layer.buffer.destroy()
    if dist.get_rank() == 0:
        print("deep_ep, %d ranks on %s, rank 0 comes %g ms late; products of %d x %d of %d ranks beside it" % (
            dist.get_world_size(), device.type, args.late, args.size, args.size, args.computing))
        print("| waits | median | slowest | of alone |\n|---|---|---|---|")
        alone = sorted(rows["alone"])[len(rows["alone"]) // 2]
        for name, times in rows.items():
            median = sorted(times)[len(times) // 2]
            print("| %s | %.1f | %.1f | %.2f |" % (name, median, max(times), median / alone))
        print("low latency: a pair ends %.0f us after the late rank has come" % rest[len(rest) // 2])
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # as in python/tests/suite.py


if __name__ == "__main__":
    main()
