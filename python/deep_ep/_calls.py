# SPDX-License-Identifier: Apache-2.0
"""The calls in C (python/calls), and what they ask of Python: what is rare, and errors in words."""

from typing import Any, Optional, Tuple

import epx
import torch
from epx.errors import make_error
from torch.utils.dlpack import from_dlpack

from . import _checks as checks
from . import _high_throughput as high
from ._layout import dispatch_layout
from ._memory import calls
from ._routing import HighThroughputRouting, find
from ._streams import current_address, keep, overlap_of, settle
from .utils import EventHandle, EventOverlap


def _launcher(buffer: Any, device: torch.device, *events: Any) -> Any:
    return buffer._launcher(device, *events)


def _cpu_place() -> Any:
    return calls.Place(torch.device("cpu"), -1, None, 0, 0, 0, 0, 0, 0, 0)


def _host_wait(previous_event: Any) -> None:
    before = overlap_of("previous_event", previous_event)
    if before is not None and before.event is not None:
        before.event.current_stream_wait()


def _host_event(async_finish: Any) -> EventOverlap:
    return EventOverlap(EventHandle()) if async_finish else EventOverlap()


def _layout_pool(engine: Any, topk_idx: torch.Tensor, experts: int) -> Optional[Any]:
    """The pool whose kernel counts, if there is one for such indices."""
    fits = 1 <= topk_idx.shape[1] <= checks.MAX_TOPK and topk_idx.shape[0]
    return engine.high_throughput_pool(topk_idx.device, experts) if fits else None


def _layout_by_torch(buffer: Any, topk_idx: torch.Tensor, experts: int, *events: Any) -> Tuple[Any, ...]:
    launch = buffer._launcher(topk_idx.device, *events)(None)
    with launch.context():
        layout = dispatch_layout(topk_idx, experts, buffer.group_size, buffer._engine.node_of)
    return (*layout, launch.finish([topk_idx], layout))


calls.prepare(torch, {
    "EventOverlap": EventOverlap,
    "OverflowingError": epx.OverflowingError,
    "Routing": HighThroughputRouting,
    "aligned": high.aligned,
    "cpu_place": _cpu_place,
    "current_stream": lambda index: current_address(torch.device("cuda", index)),
    "describe": checks.describe,
    "dtype_name": lambda tensor: str(tensor.dtype).replace("torch.", ""),
    "empty": torch.empty,
    "find": lambda handle: find(HighThroughputRouting, handle),
    "from_dlpack": from_dlpack,
    "high_pool": high.high_pool,
    "host_event": _host_event,
    "host_wait": _host_wait,
    "keep": keep,
    "larger_pool": high.larger_pool,
    "launcher": _launcher,
    "layout_by_torch": _layout_by_torch,
    "layout_pool": _layout_pool,
    "make_error": make_error,
    "make_handle": high.make_handle,
    "refused": checks.refused,
    "routing_indices": high.routing_indices,
    "settle": settle,
    "strides_of": lambda tensor: "strides %s" % (tensor.stride(),),
    "sum_counts": high.sum_counts,
    "within_reach": high.within_reach,
    "wrong": checks.wrong,
})
