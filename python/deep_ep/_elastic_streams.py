# SPDX-License-Identifier: Apache-2.0
"""The streams of ElasticBuffer: see _streams.py. All buffers of a process share one communication stream per GPU."""

import os
from typing import Any, Dict, Iterable, List, Optional, Union

import epx
import torch

from ._checks import wrong
from ._streams import CudaLaunch, HostLaunch, StreamEvent, overlap_of
from .utils import EventHandle, EventOverlap

Launch = Union[HostLaunch, CudaLaunch]
_comm_streams: Dict[int, "torch.cuda.Stream"] = {}


def comm_stream(device: Optional[torch.device] = None) -> "torch.cuda.Stream":
    """The communication stream of a GPU, of high priority. Raises RuntimeError without a GPU."""
    if not torch.cuda.is_available():
        raise RuntimeError("get_comm_stream: expected a CUDA device; CPU tensors have no streams")
    index = torch.cuda.current_device() if device is None or device.index is None else device.index
    if index not in _comm_streams:
        _comm_streams[index] = torch.cuda.Stream(device=index, priority=-1)
    return _comm_streams[index]


def event_of(name: str, event: Any) -> Optional[EventOverlap]:
    """As overlap_of(). An EventOverlap without an event is none."""
    overlap = overlap_of(name, event)
    return overlap if overlap is not None and overlap.event is not None else None


class ElasticCudaLaunch(CudaLaunch):
    """One operation on CUDA tensors. With EP_AVOID_RECORD_STREAM=1, the event of an asynchronous operation keeps its
    tensors alive instead of record_stream()."""

    def finish(self, inputs: Iterable[Any], outputs: Iterable[Any]) -> EventOverlap:
        """Called when all work is queued."""
        if not self._async or os.environ.get("EP_AVOID_RECORD_STREAM", "0") in ("", "0"):
            return super().finish(inputs, outputs)
        kept: List[Any] = [tensor for tensor in (*inputs, *outputs) if tensor is not None]
        return EventOverlap(StreamEvent(self._stream), tuple(kept))

    def wait(self, event: EventHandle) -> None:
        """Makes the work that is queued next wait for an event."""
        event.wait_on(self._stream)


def launcher(device: torch.device, previous_event: Any, before_epilogue: Any, asynchronous: bool,
             allocate_on_comm_stream: bool) -> Any:
    """A function of a group that begins an operation."""
    first, second = event_of("previous_event", previous_event), event_of(
        "previous_event_before_epilogue", before_epilogue)
    if first is not None and not allocate_on_comm_stream:
        raise wrong("allocate_on_comm_stream", "True with a previous_event", repr(allocate_on_comm_stream))

    def begin(group: epx.Group) -> Launch:
        if device.type == "cpu":
            launch: Launch = HostLaunch(group, first, asynchronous)
            if second is not None and second.event is not None:
                second.event.current_stream_wait()
            return launch
        launch = ElasticCudaLaunch(comm_stream(device), first, asynchronous)
        if second is not None and second.event is not None:
            launch.wait(second.event)
        return launch
    return begin
