# SPDX-License-Identifier: Apache-2.0
"""Events: points in a stream's work that other work can wait for."""

from typing import Any, Callable, Optional, Tuple

import torch

from .._checks import refused, wrong
from .._eager import eager, eager_class


@eager_class
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
    """An optional event, and tensors that live as long as it. As a context manager, it waits at the end.

    `hook_after_wait` is called once, after the first wait, which returns its result.
    """

    def __init__(self, event: Optional[EventHandle] = None, extra_tensors: Optional[Tuple[Any, ...]] = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self.hook_after_wait: Optional[Callable[[], Any]] = None
        self._release = False

    def register_hook_after_wait(self, fn: Callable[[], Any]) -> None:
        """Sets the hook. There is at most one."""
        if self.hook_after_wait is not None:
            raise refused("register_hook_after_wait: expected an event without a hook, got one that has a hook")
        self.hook_after_wait = fn

    @eager
    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """Makes later work of the current stream wait for the event. `release_handle`: drops it afterwards. Returns
        what the hook returns, or None."""
        if self.event is None:
            raise wrong("EventOverlap.event", "an event", "None (was async_finish given?)")
        self.event.current_stream_wait()
        result = None
        if self.hook_after_wait is not None:
            result = self.hook_after_wait()
            self.hook_after_wait = None  # behind it: a hook that fails may be tried again
        if release_handle:
            self.event = self.extra_tensors = None
        return result

    def wait(self) -> Any:
        """As current_stream_wait(), by DeepEP's later name."""
        return self.current_stream_wait()

    def __call__(self, release_handle: bool = False) -> "EventOverlap":
        """Sets `release_handle` for the next `with`."""
        self._release = release_handle
        return self

    def __enter__(self) -> "EventOverlap":
        return self

    def __exit__(self, *_: Any) -> None:
        release, self._release = self._release, False
        if self.event is not None:
            self.current_stream_wait(release)
