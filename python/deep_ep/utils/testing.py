# SPDX-License-Identifier: Apache-2.0
"""Timing for tests and benchmarks, on a GPU and on the CPU."""

import contextlib
import os
import re
import sys
import time
from typing import Any, Callable, Iterator, List, Optional, Tuple, Union

import torch
import torch.distributed as dist

from deep_ep._checks import wrong  # by its whole name: DeepEP's tests load this file by its path
from deep_ep.utils._operations import OPERATIONS, V1_OPERATIONS, Calls

_L2_BYTES = 256 << 20  # more than any cache


def _variable(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


def flush_l2_cache(enabled: bool = True) -> None:
    """Overwrites the GPU's cache."""
    if enabled and torch.cuda.is_available():
        torch.empty(_L2_BYTES, dtype=torch.uint8, device="cuda").zero_()


class _Clock:
    """Times of calls, in seconds: by events on a GPU."""

    def __init__(self) -> None:
        self._gpu = torch.cuda.is_available()
        self._marks: List[Tuple[Any, Any]] = []

    def _mark(self) -> Any:
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def measure(self, fn: Callable[[], Any]) -> None:
        """Calls the function."""
        begin = self._mark()
        fn()
        self._marks.append((begin, self._mark()))

    def times(self) -> List[float]:
        """Of all calls, after waiting for them."""
        if not self._gpu:
            return [end - begin for begin, end in self._marks]
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in self._marks]


def bench(fn: Callable[[], Any], num_warmups: int = 30, num_tests: int = 30,
          post_fn: Optional[Callable[[], Any]] = None, flush_l2: bool = True) -> Tuple[float, float, float]:
    """(average, least, most) seconds of a call, the first measured one left out."""
    for _ in range(num_warmups):
        fn()
    clock = _Clock()
    for _ in range(num_tests):
        flush_l2_cache(flush_l2)
        clock.measure(fn)
        if post_fn is not None:
            post_fn()
    times = clock.times()
    times = times[1:] or times
    return sum(times) / len(times), min(times), max(times)


@contextlib.contextmanager
def suppress_stdout_stderr() -> Iterator[None]:
    """Nothing is printed, by this process's libraries either."""
    kept = [os.dup(1), os.dup(2)]
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        for fd, stream in ((1, sys.stdout), (2, sys.stderr)):
            stream.flush()
            os.dup2(null, fd)
        with open(os.devnull, "w", encoding="utf-8") as nothing, contextlib.redirect_stdout(nothing), \
                contextlib.redirect_stderr(nothing):
            yield
    finally:
        for fd, old in zip((1, 2), kept):
            os.dup2(old, fd)
            os.close(old)
        os.close(null)


@contextlib.contextmanager
def empty_suppress() -> Iterator[None]:
    """Suppresses nothing."""
    yield


def parse_num_bytes(text: str) -> int:
    """Bytes, as in "64M", "1.5 GiB" or "1048576": a positive number, and K, M, G or T of 1024."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([KMGT]?)(?:I?B)?\s*", text, re.IGNORECASE)
    number = int(float(match.group(1)) * 1024 ** " KMGT".index(match.group(2).upper() or " ")) if match else 0
    if number < 1:
        raise wrong("text", "a positive number of bytes, as 1G, 64M, 512K or 1048576", repr(text))
    return number


def _before_each(flush_l2: bool, together: bool, barrier: Optional[Callable[[], Any]]) -> None:
    flush_l2_cache(flush_l2)
    if not together:
        return
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda._sleep(20000000)  # about 10 ms: all ranks have launched by then
    if barrier is not None:
        barrier()
    else:
        dist.all_reduce(torch.ones(1, dtype=torch.float32, device="cuda" if gpu else "cpu"))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _kernels(profiler: Any, name: str) -> List[float]:
    """Seconds of the kernels for one of DeepEP's names, or of the one kernel whose name contains `name`; by their
    begin."""
    operation = OPERATIONS.get(name)
    events = sorted((event for event in profiler.events()
                     if event.device_type == torch.autograd.DeviceType.CUDA
                     and (re.search(operation.kernels, event.name) if operation else name in event.name)),
                    key=lambda event: event.time_range.start)
    if not operation and len({event.name for event in events}) > 1:
        raise AssertionError("kernel name %r: expected one kernel, got %s" % (
            name, sorted({event.name for event in events})))
    return [event.time_range.elapsed_us() / 1e6 for event in events]


def _durations(profiler: Any, calls: Calls, name: str, per_period: int) -> Any:
    """Average seconds of one of DeepEP's operations, or of a kernel; of each of several per period, a list."""
    times, operation = _kernels(profiler, name), OPERATIONS.get(name)
    count = len(times)
    if times and operation:  # an operation is one launch or several
        count = len(calls.of(*(one for one in OPERATIONS.values() if one.kernels == operation.kernels))) or count
    elif not times and (operation or name in V1_OPERATIONS):  # CPU tensors
        made = calls.of(operation or V1_OPERATIONS[name])
        times, count = [seconds for call in made for seconds in call], len(made)
    if per_period == 1:
        return sum(times) / count if times else 0
    return [sum(part) / len(part) if part else 0 for part in (times[i::per_period] for i in range(per_period))]


def _as_methods(barrier: Optional[Callable[[], Any]]) -> Optional[Callable[[], Any]]:
    """A buffer's barrier is looked up again in each call: see Calls."""
    owner, name = getattr(barrier, "__self__", None), getattr(barrier, "__name__", "")
    return (lambda: getattr(owner, name)()) if owner is not None and hasattr(owner, name) else barrier


def bench_kineto(fn: Callable[[], Any], kernel_names: Union[str, Tuple[str, ...]], num_tests: int = 30,
                 suppress_kineto_output: bool = False, trace_path: Optional[str] = None, flush_l2: bool = True,
                 barrier_comm_profiling: bool = False, num_kernels_per_period: int = 1,
                 barrier: Optional[Callable[[], Any]] = None) -> Any:
    """Average seconds of kernels by torch's profiler: one number per name, 0 for a name that is not found. With the
    names of DeepEP's tests (dispatch_impl, combine_impl and so on) those of EPX's kernels per operation; with CPU
    tensors, of the calls until they are complete. What DeepEP does in an epilogue has the time of the whole operation.

    EP_USE_NVIDIA_TOOLS=1 returns 1 at once; EP_DISABLE_BARRIER_PROFILING=1 leaves the barriers out.
    """
    names = (kernel_names,) if isinstance(kernel_names, str) else tuple(kernel_names)
    if _variable("EP_USE_NVIDIA_TOOLS"):
        return 1 if isinstance(kernel_names, str) else (1,) * len(names)
    together = barrier_comm_profiling and not _variable("EP_DISABLE_BARRIER_PROFILING")
    fn()
    _synchronize()
    calls, barrier = Calls(complete=not torch.cuda.is_available()), _as_methods(barrier)
    with suppress_stdout_stderr() if suppress_kineto_output else empty_suppress():
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
        activity = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[activity.CUDA if torch.cuda.is_available() else activity.CPU],
                                    schedule=schedule, acc_events=True) as profiler:
            for step in (contextlib.nullcontext(), calls):  # the first warms up
                with step:
                    for _ in range(num_tests):
                        _before_each(flush_l2, together, barrier)
                        fn()
                    _synchronize()
                profiler.step()
    if trace_path is not None:
        profiler.export_chrome_trace(trace_path)
    found = [_durations(profiler, calls, name, num_kernels_per_period) for name in names]
    return found[0] if isinstance(kernel_names, str) else found
