# SPDX-License-Identifier: Apache-2.0
"""How long Python keeps the caller: host time of a low-latency dispatch and combine through deep_ep.

    python bench/python_host_time.py [--device cuda] [--tokens 128] [--profile]
    torchrun --nproc-per-node 8 bench/python_host_time.py --device cuda

On a GPU nothing is waited for, and the time of the calls is the host's. On the CPU "the current stream waits" means that the
call does: the time of those waits is measured and taken away. --python-alone leaves out the C library's part.
"""

import argparse
import ctypes
import os
import time
from typing import Any, Callable, List

import deep_ep
import epx
import torch
import torch.distributed as dist
from deep_ep import _low_latency, _streams
from epx._library import load


class WaitClock:
    """Adds up what epx.Group waits for CPU streams."""

    def __init__(self) -> None:
        self.seconds = 0.0
        wait = epx.Group._wait

        def timed(group: epx.Group, stream: Any) -> None:
            begin = time.perf_counter()
            wait(group, stream)
            self.seconds += time.perf_counter() - begin

        epx.Group._wait = timed  # type: ignore[method-assign]


def leave_out_the_library() -> None:
    """Operations become calls of a C function that finds nothing to do, and nothing is waited for: a GPU's calls."""
    library = load()
    nothing = ctypes.cast(library.epx_dtype_size, ctypes.c_void_p).value  # 0 for what is no dtype
    for name in ("epx_handle_update", "epx_dispatch", "epx_combine", "epx_complete"):
        setattr(library, name, ctypes.CFUNCTYPE(ctypes.c_int, *getattr(library, name).argtypes)(nothing))
    _low_latency.settle = _streams.settle = lambda group, event=None: None
    epx.Group.hold = lambda group, objects, stream=None: None  # type: ignore[method-assign]


def pair(buffer: deep_ep.Buffer, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, experts: int, hooked: bool,
         use_fp8: bool, y: torch.Tensor, out: torch.Tensor) -> None:
    """One dispatch and one combine."""
    _recv, _count, handle, _event, hook = buffer.low_latency_dispatch(
        x, idx, x.shape[0], experts, use_fp8=use_fp8, return_recv_hook=hooked)
    if hook is not None:
        hook()
    _out, _event, hook = buffer.low_latency_combine(y, idx, weights, handle, return_recv_hook=hooked, out=out)
    if hook is not None:
        hook()


def measure(run: Callable[[], None], clock: WaitClock, device: str, iterations: int,
            now: Callable[[], float]) -> List[float]:
    """Host microseconds of each of several rounds, without waits."""
    rounds = []
    for _ in range(7):
        if device == "cuda":
            torch.cuda.synchronize()
        clock.seconds = 0.0
        begin = now()
        for _ in range(iterations):
            run()
        rounds.append((now() - begin - clock.seconds) / iterations * 1e6)
    if device == "cuda":
        torch.cuda.synchronize()
    return sorted(rounds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--python-alone", action="store_true", help="the C library's operations do nothing")
    args = parser.parse_args()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29411")):
        os.environ.setdefault(name, value)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if args.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True)
    rng = torch.Generator().manual_seed(rank)
    x = torch.randn(args.tokens, args.hidden, generator=rng).bfloat16().to(args.device)
    idx = torch.rand(args.tokens, args.experts, generator=rng).argsort(1)[:, :args.topk].contiguous().to(args.device)
    weights = torch.rand(args.tokens, args.topk, generator=rng).to(args.device)
    y = torch.zeros(-(-args.experts // ranks), ranks * args.tokens, args.hidden, dtype=torch.bfloat16, device=args.device)
    out = torch.empty_like(x)
    clock = WaitClock()
    pair(buffer, x, idx, weights, args.experts, False, False, y, out)  # makes the group
    if args.python_alone:
        leave_out_the_library()
    for name, hooked, use_fp8 in (("hooks, FP8", True, True), ("hooks, BF16", True, False), ("no hooks, FP8", False, True)):

        def run() -> None:
            pair(buffer, x, idx, weights, args.experts, hooked, use_fp8, y, out)

        for _ in range(20):
            run()
        times = measure(run, clock, args.device, args.iterations,
                        time.thread_time if args.python_alone else time.perf_counter)
        if rank == 0:
            print("%-14s host time per dispatch + combine: %.1f us (best %.1f, worst %.1f of %d rounds)" % (
                name, times[len(times) // 2], times[0], times[-1], len(times)), flush=True)
    if args.profile and rank == 0 and ranks == 1:
        import cProfile
        import pstats

        profile = cProfile.Profile()
        profile.runcall(lambda: [run() for _ in range(args.iterations)])
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    buffer.destroy()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
