# SPDX-License-Identifier: Apache-2.0
"""A whole high-throughput layer through deep_ep, and its calls: the table of docs/performance.md.

    torchrun --nproc-per-node 8 tools/python/layer_bench.py --device cuda
    torchrun --nproc-per-node 8 tools/python/layer_bench.py --device cuda --num-sms 16 8 4
    torchrun --nproc-per-node 4 tools/python/layer_bench.py --tokens 64 --hidden 512 --experts 16     (CPU tensors)

A layer is get_dispatch_layout, a dispatch with a new routing, indices and weights, and combine with weights of rows in
torch's own memory. Each layer has another routing than the one before. "wall" is the clock over many calls that are
queued without a stop, with the host's part beside it; "events" are CUDA events around each call. The table has the
median over the ranks and the slowest rank, in microseconds. Results are checked before anything is timed.
EPX_NUM_AGENTS sets the SMs, 16 agents each; --num-sms measures Buffer.set_num_sms() with each number, in one run.
"""

import argparse
import os
import sys
import time
from typing import Any, Callable, List, Tuple

import deep_ep
import torch
import torch.distributed as dist
from deep_ep_bench import cast_fp8, gathered

ROUTINGS = 4


class Layer:
    """The inputs of a layer, and its calls. `i` chooses the routing."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        rng = torch.Generator().manual_seed(dist.get_rank())
        self.buffer = deep_ep.Buffer(dist.group.WORLD, int(2e9), 0, explicitly_destroy=True)
        self.experts = args.experts
        self.x = torch.randn(args.tokens, args.hidden, generator=rng).bfloat16().to(device)
        self.fp8 = cast_fp8(self.x)
        scores = [torch.rand(args.tokens, args.experts, generator=rng) for _ in range(ROUTINGS)]
        self.idx = [score.argsort(1)[:, :args.topk].contiguous().to(device) for score in scores]
        self.weights = [torch.rand(args.tokens, args.topk, generator=rng).to(device) for _ in range(ROUTINGS)]
        self.layouts = [self.layout(i) for i in range(ROUTINGS)]
        self.rows = torch.zeros(self.most_rows(), args.hidden, dtype=torch.bfloat16, device=device)

    def layout(self, i: int) -> Any:
        """get_dispatch_layout()."""
        return self.buffer.get_dispatch_layout(self.idx[i % ROUTINGS], self.experts)

    def dispatch(self, i: int, x: Any, layout: Any = None, **options: Any) -> Any:
        """A dispatch with a new routing."""
        per_rank, per_node, per_expert, in_rank, _event = layout or self.layouts[i % ROUTINGS]
        return self.buffer.dispatch(
            x, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert, topk_idx=self.idx[i % ROUTINGS], topk_weights=self.weights[i % ROUTINGS],
            **options)

    def most_rows(self) -> int:
        """Checks every routing; the most rows that one of them brings here."""
        most = 0
        for i in range(ROUTINGS):
            recv, _idx, recv_weights, _counts, handle, _event = self.dispatch(i, self.x)
            out, out_weights, _event = self.buffer.combine(recv.clone(), handle, topk_weights=recv_weights)
            expected = self.x.float() * self.layouts[i][3].sum(1, keepdim=True)
            assert (out.float() - expected).abs().max() <= 0.05 * expected.abs().max()
            assert torch.equal(out_weights, self.weights[i])
            most = max(most, recv.shape[0])
        return most

    def whole(self, x: Any) -> Callable[[int], None]:
        """A layer whose experts have written their rows into torch's own memory."""
        def call(i: int) -> None:
            recv, _idx, recv_weights, _counts, handle, _event = self.dispatch(i, x, self.layout(i))
            count = (recv[0] if isinstance(recv, tuple) else recv).shape[0]
            self.buffer.combine(self.rows[:count], handle, topk_weights=recv_weights)
        return call


def synchronize(device: torch.device) -> None:
    """Waits for the device, then for the other ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def wall(call: Callable[[int], Any], device: torch.device, count: int) -> Tuple[float, float]:
    """(clock, host) of a call, in microseconds: the median of three series."""
    for i in range(ROUTINGS):
        call(i)
    series = []
    for _ in range(3):
        synchronize(device)
        begin = time.perf_counter()
        for i in range(count):
            call(i)
        queued = time.perf_counter()
        if device.type == "cuda":
            torch.cuda.synchronize()
        series.append(((time.perf_counter() - begin) / count * 1e6, (queued - begin) / count * 1e6))
    return sorted(series)[1]


def events(call: Callable[[int], Any], count: int = 20) -> float:
    """Microseconds of a call on a GPU, the median. The first calls export memory to the other ranks."""
    for i in range(10):
        call(i)
    synchronize(torch.device("cuda"))
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for i, (begin, end) in enumerate(pairs):
        begin.record()
        call(i)
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) * 1e3 for begin, end in pairs)[count // 2]


def cached(layer: Layer) -> List[Tuple[str, Callable[[int], Any]]]:
    """Calls along a routing that is known."""
    recv, _idx, weights, _counts, handle, _event = layer.dispatch(0, layer.x)
    rows = layer.rows[:recv.shape[0]]
    buffer = layer.buffer
    return [("cached dispatch, FP8", lambda i: buffer.dispatch(layer.fp8, handle=handle)),
            ("cached dispatch, BF16", lambda i: buffer.dispatch(layer.x, handle=handle)),
            ("combine", lambda i: buffer.combine(rows, handle)),
            ("combine with weights", lambda i: buffer.combine(rows, handle, topk_weights=weights))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--layers", type=int, default=12, help="calls in a series")
    parser.add_argument("--num-sms", type=int, nargs="+", default=[0], help="for Buffer.set_num_sms(); 0: EPX's own")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
        device = torch.device("cuda", torch.cuda.current_device())
    layer = Layer(args, device)
    for number in args.num_sms:
        if number:
            deep_ep.Buffer.set_num_sms(number)
        measure(layer, args, device, "%d SMs at most" % number if number else "")
    layer.buffer.destroy()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # as in python/tests/suite.py


def measure(layer: Layer, args: argparse.Namespace, device: torch.device, title: str) -> None:
    """Prints a table."""
    lines = []
    for name, call in (("layer, FP8", layer.whole(layer.fp8)), ("layer, BF16", layer.whole(layer.x)),
                       ("fresh dispatch, FP8", lambda i: layer.dispatch(i, layer.fp8)),
                       ("fresh dispatch, BF16", lambda i: layer.dispatch(i, layer.x)), ("layout", layer.layout)):
        clock, host = wall(call, device, args.layers)
        lines.append((name + ", wall", gathered(clock), gathered(host)))
    for name, call in cached(layer) if device.type == "cuda" else []:
        lines.append((name + ", events", gathered(events(call)), []))
    if dist.get_rank() == 0:
        if title:
            print("\n%s\n" % title)
        print("| call | median rank, us | slowest rank, us | host, us |\n|---|---|---|---|")
        for name, times, host_times in lines:
            middle = len(times) // 2
            print("| %s | %.0f | %.0f | %s |" % (
                name, times[middle], times[-1], "%.0f" % host_times[middle] if host_times else ""), flush=True)


if __name__ == "__main__":
    main()
