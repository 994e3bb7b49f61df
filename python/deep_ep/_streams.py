# SPDX-License-Identifier: Apache-2.0
"""On which stream an operation runs, what it waits for, and who waits for it.

DeepEP's rule: work runs on a communication stream that first waits for `previous_event`, or else for the current stream.
Without `async_finish` the current stream then waits; with it the caller gets an event. Where the current stream would wait
on both sides anyway, the work is put on the current stream itself: the order is the same, and two events are saved.

CPU tensors have no streams: "the current stream waits" means that the call returns when the work is done.
"""

import contextlib
from typing import Any, ContextManager, Iterable, Optional

import epx
import torch

from .utils import EventOverlap, HostEvent, StreamEvent


class HostLaunch:
    """One operation on CPU tensors."""

    address: Optional[int] = None  # the group's own stream

    def __init__(self, group: epx.Group, previous_event: Optional[EventOverlap], async_finish: bool) -> None:
        self._group = group
        self._async = async_finish
        if previous_event is not None and previous_event.event is not None:
            previous_event.event.current_stream_wait()

    def context(self) -> ContextManager[Any]:
        """Where torch's own operations belong."""
        return contextlib.nullcontext()

    def finish(self, inputs: Iterable[Any], outputs: Iterable[Any]) -> EventOverlap:
        """All is queued: waits for it, or returns the event to wait for."""
        if not self._async:
            self._group.sync()
            return EventOverlap()
        event = self._group.event()
        event.record()
        self._group.hold((list(inputs), list(outputs)))
        return EventOverlap(HostEvent(event))


class CudaLaunch:
    """One operation on CUDA tensors."""

    def __init__(self, comm_stream: "torch.cuda.Stream", previous_event: Optional[EventOverlap],
                 async_finish: bool) -> None:
        self._current = torch.cuda.current_stream(comm_stream.device)
        self._async = async_finish
        self._stream = self._current
        given = previous_event.event if previous_event is not None else None
        if async_finish or given is not None:
            self._stream = comm_stream
            if given is not None:
                given.wait_on(comm_stream)
            else:
                comm_stream.wait_stream(self._current)
        self.address = self._stream.cuda_stream or 1  # 0 is torch's default stream, and EPX's word for its own

    def context(self) -> ContextManager[Any]:
        """Where torch's own operations belong, allocations included."""
        return contextlib.nullcontext() if self._stream is self._current else torch.cuda.stream(self._stream)

    def finish(self, inputs: Iterable[Any], outputs: Iterable[Any]) -> EventOverlap:
        """All is queued: the current stream waits for it, or gets an event to wait for."""
        if self._stream is self._current:
            return EventOverlap()
        for tensor in inputs:
            if tensor is not None:
                tensor.record_stream(self._stream)
        for tensor in outputs:
            if tensor is not None:
                tensor.record_stream(self._current)
        if self._async:
            return EventOverlap(StreamEvent(self._stream))
        self._current.wait_stream(self._stream)
        return EventOverlap()
