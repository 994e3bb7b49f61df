# SPDX-License-Identifier: Apache-2.0
"""Events: points in a stream's work that other work can wait for."""

from typing import Any, Optional, Tuple

import torch

from ._checks import wrong


class EventHandle:
    """An event recorded on the current stream at creation. Without a GPU it is complete at once, because work is
    complete when a call returns. The events that operations return are complete when the operation is complete."""

    def __init__(self) -> None:
        self._event: Any = None
        if torch.cuda.is_available():
            self._event = torch.cuda.Event()
            self._event.record()

    def current_stream_wait(self) -> None:
        """Makes later work of the current stream wait for this event. On the CPU, the caller waits."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def wait_on(self, stream: "torch.cuda.Stream") -> None:
        """Makes later work of `stream` wait for this event."""
        if self._event is not None:
            stream.wait_event(self._event)


class EventOverlap:
    """An optional event, and tensors that live as long as it. As a context manager, it waits at the end."""

    def __init__(self, event: Optional[EventHandle] = None, extra_tensors: Optional[Tuple[Any, ...]] = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Makes later work of the current stream wait for the event."""
        if self.event is None:
            raise wrong("EventOverlap.event", "an event", "None (was async_finish given?)")
        self.event.current_stream_wait()

    def __enter__(self) -> "EventOverlap":
        return self

    def __exit__(self, *_: Any) -> None:
        if self.event is not None:
            self.event.current_stream_wait()
