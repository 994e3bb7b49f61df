# SPDX-License-Identifier: Apache-2.0
"""What testing.bench_kineto() measures for the kernels that DeepEP's tests name: EPX's operations on the CPU, and its
own kernels on a GPU."""

import collections
import functools
import time
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

from .event import EventOverlap


class Operation(NamedTuple):
    """The methods of buffers that run it, and a regular expression of its kernels on a GPU."""

    methods: Tuple[str, ...]
    kernels: str


_SENT, _RETURNED, _COUNTED = r"\bepx_(ht|ll)\w*::dispatch\b", r"\bepx_(ht|ll)\w*::combine", r"\bepx_ht::notify\b"
_DISPATCH = Operation(("dispatch", "dispatch_with_permute", "low_latency_dispatch"), _SENT)
_COMBINE = Operation(("combine", "combine_with_unpermute", "low_latency_combine"), _RETURNED)
_FETCH = Operation(("engram_fetch", "fetch"), _SENT)

# EPX writes rows where they belong, and sums them where they are read: there is no kernel for the epilogue alone.
OPERATIONS = {
    "dispatch_impl": _DISPATCH, "dispatch_copy_epilogue_impl": _DISPATCH,
    "combine_impl": _COMBINE, "combine_reduce_epilogue_impl": _COMBINE,
    "barrier": Operation(("barrier", "_barrier"), _COUNTED),
    "engram_fetch_impl": _FETCH, "engram_fetch_wait_impl": _FETCH,
    "send_impl": Operation(("send", "pp_send"), _SENT), "recv_impl": Operation(("recv", "pp_recv"), _SENT),
}
# V1's: on a GPU kernels of EPX have these names.
V1_OPERATIONS = {"dispatch": _DISPATCH, "combine": _COMBINE, "notify": Operation(("dispatch",), _COUNTED)}


class Calls:
    """The seconds of the calls of operations while it is entered, each with those of its hook. `complete`: until the
    operation is complete. What a call does by another one is part of it."""

    def __init__(self, complete: bool) -> None:
        self._complete, self._inside = complete, False
        self._calls: Dict[str, List[List[float]]] = collections.defaultdict(list)  # by the names of methods
        self._replaced: List[Tuple[type, str, Any]] = []

    def __enter__(self) -> "Calls":
        import deep_ep

        names = {name for operation in OPERATIONS.values() for name in operation.methods}
        for buffer in [value for value in vars(deep_ep).values() if isinstance(value, type)]:
            for name in names & vars(buffer).keys():
                self._replaced.append((buffer, name, vars(buffer)[name]))
                setattr(buffer, name, self._timed(vars(buffer)[name], name))
        return self

    def __exit__(self, *_: Any) -> None:
        while self._replaced:
            setattr(*self._replaced.pop())

    def of(self, *operations: Operation) -> List[List[float]]:
        """The calls of these operations, in their order."""
        return [call for name in sorted({name for one in operations for name in one.methods})
                for call in self._calls.get(name, [])]

    def _timed(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return method(*args, **kwargs)
            seconds: List[float] = []
            self._calls[name].append(seconds)
            result = self._run(seconds, method, *args, **kwargs)
            if isinstance(result, tuple) and _is_hook(result[-1]):
                return (*result[:-1], functools.partial(self._run, seconds, result[-1]))
            return functools.partial(self._run, seconds, result) if _is_hook(result) else result
        return call

    def _run(self, seconds: List[float], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begin, self._inside = time.perf_counter(), True
        try:
            result = function(*args, **kwargs)
            for event in result if isinstance(result, tuple) else (result,):
                if self._complete and isinstance(event, EventOverlap) and event.event is not None:
                    event.event.current_stream_wait()
        finally:
            self._inside = False
        seconds.append(time.perf_counter() - begin)
        return result


def _is_hook(value: Any) -> bool:
    return callable(value) and not isinstance(value, EventOverlap)
