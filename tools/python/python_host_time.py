# SPDX-License-Identifier: Apache-2.0
"""How long Python keeps the caller: host time of a low-latency dispatch and combine through deep_ep, and where it goes.

    torchrun --nproc-per-node 8 tools/python/python_host_time.py --device cuda
    python tools/python/python_host_time.py [--tokens 128] [--profile]

Four numbers for each kind of call, in microseconds for a pair of one dispatch and one combine, with the hooks if there
are any:

    all         what the caller feels
    Python      the same calls, with operations of the C library that do nothing
    C           the calls of the C library alone, with the arguments that they had in such a pair
    launch      for scale: as many of torch's smallest operations as the pair has kernels

On a GPU nothing is waited for, and the time of the calls is the host's. A round is short and begins with an idle GPU: a
GPU that falls behind would otherwise fill the queue of its launches, and the host wait for it. On the CPU "the current
stream waits" means that the call does: the time of those waits is measured and taken away.
"""

import argparse
import ctypes
import os
import statistics
import sys
import time
from typing import Any, Callable, Dict, List, Tuple

import deep_ep
import epx
import torch
import torch.distributed as dist
from deep_ep import _low_latency, _streams
from epx import _abi
from epx._library import load

KINDS = ("all", "Python", "C", "launch")
OPERATIONS = ("epx_handle_update", "epx_dispatch", "epx_combine", "epx_complete")


class WaitClock:
    """Adds up what epx.Group waits for CPU streams."""

    def __init__(self) -> None:
        self.seconds = 0.0
        wait = epx.Group._wait

        def timed(group: epx.Group, stream: Any) -> None:
            begin = time.perf_counter()
            wait(group, stream)
            self.seconds += time.perf_counter() - begin

        setattr(epx.Group, "_wait", timed)


class Library:
    """The operations of the C library: as they are, recorded, or left out."""

    def __init__(self) -> None:
        self._library = load()
        self._real = {name: getattr(self._library, name) for name in OPERATIONS}

    def record(self, run: Callable[[], Any]) -> List[Tuple[Any, Tuple[Any, ...]]]:
        """Runs something: (function, arguments) of each operation in it. What the arguments point to must be kept
        alive."""
        calls: List[Tuple[Any, Tuple[Any, ...]]] = []

        def recorder(function: Any) -> Callable[..., int]:
            def call(*arguments: Any) -> int:
                calls.append((function, arguments))
                return function(*arguments)
            return call

        for name, function in self._real.items():
            setattr(self._library, name, recorder(function))
        run()
        for name, function in self._real.items():
            setattr(self._library, name, function)
        return calls

    def leave_out(self) -> None:
        """From now on: operations are calls of a C function that finds nothing to do, and nothing is waited for."""
        nothing = ctypes.cast(self._library.epx_dtype_size, ctypes.c_void_p).value  # 0 for what is no dtype
        for name in OPERATIONS:
            kinds = [_abi._KINDS[kind] for kind in _abi.FUNCTIONS[name]]
            setattr(self._library, name, ctypes.PYFUNCTYPE(ctypes.c_int, *kinds)(nothing or 0))
        _low_latency.settle = _streams.settle = lambda group, event=None: None
        setattr(epx.Group, "hold", lambda group, objects, stream=None: None)


class Work:
    """The tensors of a pair, as a caller has them."""

    def __init__(self, args: argparse.Namespace) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        rng = torch.Generator().manual_seed(rank)
        self.tokens, self.experts = args.tokens, args.experts
        self.x = torch.randn(args.tokens, args.hidden, generator=rng).bfloat16().to(args.device)
        chosen = torch.rand(args.tokens, args.experts, generator=rng).argsort(1)[:, :args.topk]
        self.idx = chosen.contiguous().to(args.device)
        self.weights = torch.rand(args.tokens, args.topk, generator=rng).to(args.device)
        self.y = torch.zeros(-(-args.experts // ranks), ranks * args.tokens, args.hidden, dtype=torch.bfloat16,
                             device=args.device)


class Case:
    """One kind of call."""

    def __init__(self, buffer: deep_ep.Buffer, work: Work, hooked: bool, use_fp8: bool) -> None:
        self.name = "%s, %s" % ("hooks" if hooked else "no hooks", "FP8" if use_fp8 else "BF16")
        self.launches = 4 if hooked else 2
        self._buffer, self._work, self._hooked, self._use_fp8 = buffer, work, hooked, use_fp8

    def pair(self) -> Tuple[Any, ...]:
        """One dispatch and one combine; returns what they gave."""
        work, hooked = self._work, self._hooked
        recv, count, handle, _event, hook = self._buffer.low_latency_dispatch(
            work.x, work.idx, work.tokens, work.experts, use_fp8=self._use_fp8, return_recv_hook=hooked)
        if hook is not None:
            hook()
        out, _event, hook = self._buffer.low_latency_combine(work.y, work.idx, work.weights, handle,
                                                               return_recv_hook=hooked)
        if hook is not None:
            hook()
        return recv, count, handle, out


class Meter:
    """Measures host time in short rounds, all ranks at the same time."""

    def __init__(self, device: str, iterations: int, rounds: int) -> None:
        self._device, self._iterations, self._rounds = device, iterations, rounds
        self._waits = WaitClock()

    def measure(self, run: Callable[[], Any], now: Callable[[], float] = time.perf_counter) -> float:
        """Microseconds of run(), without waits: the median of the rounds."""
        times = []
        for number in range(self._rounds + 2):
            self._settle()
            self._waits.seconds = 0.0
            begin = now()
            for _ in range(self._iterations):
                run()
            if number >= 2:
                times.append((now() - begin - self._waits.seconds) / self._iterations * 1e6)
        self._settle()
        return statistics.median(times)

    def _settle(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()


def replay(calls: List[Tuple[Any, Tuple[Any, ...]]], group: epx.Group, on_cpu: bool) -> None:
    """Calls the C library again."""
    for function, arguments in calls:
        if function(*arguments):
            raise epx.EpxError(epx.Status.INTERNAL, load().epx_last_error().decode())
    if on_cpu:
        group.sync()


def smallest(tensor: torch.Tensor, count: int) -> None:
    """Launches."""
    for _ in range(count):
        tensor.add_(0)


def report(name: str, times: Dict[str, float]) -> None:
    """One line: of each number that of the median rank, and that of the slowest."""
    gathered: List[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, times)
    if dist.get_rank() == 0:
        columns = ("%6.1f (%6.1f)" % (statistics.median(t[kind] for t in gathered), max(t[kind] for t in gathered))
                   if kind in times else "" for kind in KINDS)
        print("%-16s" % name + " ".join("%18s" % column for column in columns), flush=True)


def show_profile(run: Callable[[], Any]) -> None:
    """Where Python's part goes."""
    import cProfile
    import pstats

    profile = cProfile.Profile()
    for _ in range(500):
        profile.runcall(run)
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, help="128; 16 on the CPU")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, help="256; 32 on the CPU")
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=20, help="of a round")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--profile", action="store_true", help="of Python's part")
    parser.add_argument("--python-alone", action="store_true", help="nothing else")
    args = parser.parse_args()
    on_cpu = args.device == "cpu"
    args.tokens = args.tokens or (16 if on_cpu else 128)
    args.experts = args.experts or (32 if on_cpu else 256)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29411")):
        os.environ.setdefault(name, value)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if not on_cpu:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    if dist.get_rank() == 0:
        print("us of host time per low-latency dispatch + combine: %d ranks,"
              " %d tokens, hidden %d, top-%d of %d experts, %s; "
              "%d rounds of %d pairs; median rank (slowest rank)" % (
                  dist.get_world_size(), args.tokens, args.hidden, args.topk, args.experts, args.device, args.rounds,
                  args.iterations))
        print("%-16s" % "" + " ".join("%18s" % kind for kind in KINDS), flush=True)
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True)
    meter, library = Meter(args.device, args.iterations, args.rounds), Library()
    work = Work(args)
    cases = [Case(buffer, work, *kind) for kind in ((True, True), (True, False), (False, True), (False, False))]
    times: List[Dict[str, float]] = [{} for _ in cases]
    tiny = torch.zeros(1, device=args.device)
    for case, found in zip(cases, times):
        case.pair()  # makes the group and what is prepared
        if not args.python_alone:
            found["all"] = meter.measure(case.pair)
            kept: List[Any] = []
            calls = library.record(lambda: kept.append(case.pair()))
            group = buffer._engine.low_latency_pools()[0].group
            found["C"] = meter.measure(lambda: replay(calls, group, on_cpu))
            found["launch"] = meter.measure(lambda: smallest(tiny, case.launches))
    library.leave_out()
    for case, found in zip(cases, times):
        found["Python"] = meter.measure(case.pair, time.thread_time if on_cpu else time.perf_counter)
        report(case.name, found)
    if args.profile and dist.get_rank() == 0:
        for case in cases[::2]:
            show_profile(case.pair)
    buffer.destroy()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # as in python/tests/suite.py


if __name__ == "__main__":
    main()
