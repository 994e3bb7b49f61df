# SPDX-License-Identifier: Apache-2.0
"""The stream on which an operation runs, and the waits before and after it.

DeepEP's rule: an operation runs on a communication stream. That stream first waits for `previous_event`, or without it
for the current stream. Without `async_finish`, the current stream then waits for the operation; with `async_finish`,
the caller gets an event. If both waits involve the current stream, the operation runs on the current stream itself: the
order is the same, and two events are saved.

CPU tensors have no streams: "the current stream waits" means that the call returns when the work is complete.
"""

import contextlib
from typing import Any, Callable, ContextManager, Iterable, Iterator, List, Optional

import epx
import torch
from epx.errors import make_error

from ._checks import refused, wrong
from ._eager import eager
from ._memory import use_on, wait_for
from .utils import EventHandle, EventOverlap


DEFAULT_STREAM = 1  # 0 is torch's default stream, but NULL is the group's own in EPX
_HINT = "; recover() on all ranks makes the buffer usable again"


def hinted(failure: epx.EpxError) -> epx.EpxError:
    """The same failure, which says how the buffer can be used again."""
    return failure if _HINT in failure.message else type(failure)(failure.status, failure.message + _HINT)


def settle(group: epx.Group, event: Optional[epx.Event] = None) -> None:
    """Waits for the work on CPU tensors, all of it or up to an event.

    A rank that was masked because it timed out is not an error: the masks report it. If ranks may be masked, a rank
    that the network has lost is not an error either, because it will be masked.
    """
    try:
        event.sync() if event is not None else group.sync()
    except epx.EpxError as failure:
        error = group.error()
        if error is None or not _is_masked(group, error):
            raise hinted(failure) from None
        group.error_clear()


def _is_masked(group: epx.Group, error: Any) -> bool:
    """Is the error that of a rank which is masked now?"""
    lost = group.masks and (error.status, error.phase) == (epx.Status.PEER, "network")
    return bool(lost) or error.message.endswith("it is masked now")


def capture_of(device: torch.device) -> Callable[[], bool]:
    """A function that returns True while the current stream of the device is captured into a graph."""
    return (lambda: False) if device.type == "cpu" else torch._C._cuda_isCurrentStreamCapturing


def refuse_capture(device: torch.device, call: str, instead: str) -> None:
    """For a call that waits on the host for what only a replay would send, before anything is queued."""
    if capture_of(device)():
        raise refused("%s: expected no capture, for the host waits for what other ranks send, got a current stream "
                      "that is captured into a graph: %s" % (call, instead))


def current_address(device: torch.device) -> int:
    """The current CUDA stream of a device, for the C library. An object of torch's for it would take 5 us."""
    return torch._C._cuda_getCurrentRawStream(device.index) or DEFAULT_STREAM


def overlap_of(name: str, event: Any) -> Optional[EventOverlap]:
    """An argument for an event, which callers give as an EventOverlap or as the EventHandle in it."""
    if event is None or isinstance(event, EventOverlap):
        return event
    if not isinstance(event, EventHandle):
        raise wrong(name, "an EventOverlap, an EventHandle or None", type(event).__name__)
    return EventOverlap(event)


class HostEvent(EventHandle):
    """The end of an operation on CPU tensors."""

    def __init__(self, group: epx.Group) -> None:
        self._group = group
        self._event = group.event()
        self._event.record()

    def current_stream_wait(self) -> None:
        """Waits until the operation is complete. Raises its error, if there is one."""
        if not self._group.was_destroyed:
            settle(self._group, self._event)
            return
        error = self._group.last_error  # its end has waited for the operation
        if error is not None and not _is_masked(self._group, error):
            raise hinted(make_error(error.status, error.message))

    def wait_on(self, stream: Any) -> None:
        """Like current_stream_wait(), because a CUDA stream cannot wait for the CPU."""
        self.current_stream_wait()


class StreamEvent(EventHandle):
    """A point in the work of a given CUDA stream."""

    def __init__(self, stream: "torch.cuda.Stream") -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)


class Origin:
    """What has been queued so far on the stream that is current now, for tensors that it makes: they may be read on
    another stream later."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = None
        self._event: Optional[EventHandle] = None
        if device.type != "cpu":
            self._stream = torch.cuda.current_stream(device)
            if not torch.cuda.is_current_stream_capturing():  # an event of a capture is none outside of it
                self._event = StreamEvent(self._stream)

    @eager
    def join(self, tensors: Iterable[Optional[torch.Tensor]]) -> None:
        """The stream that is current now may use the tensors: it waits for their work, and their memory is not given
        out again before. A capture has waited for that before it began."""
        if self._stream is None or torch.cuda.is_current_stream_capturing():
            return
        current = torch.cuda.current_stream(self._stream.device)
        if current != self._stream:
            if self._event is not None:
                self._event.wait_on(current)
            use_on(current, tensors, given=True)

    def __deepcopy__(self, _memo: Any) -> "Origin":
        return self

    def __reduce__(self) -> Any:
        return Origin, (torch.device("cpu"),)


class HostLaunch:
    """One operation on CPU tensors."""

    address: Optional[int] = None  # the group's own stream
    aside = False  # True: runs on another stream than the caller's current one

    def __init__(self, group: epx.Group, previous_event: Optional[EventOverlap], async_finish: bool) -> None:
        self._group = group
        self._async = async_finish
        if previous_event is not None and previous_event.event is not None:
            previous_event.event.current_stream_wait()

    def context(self) -> ContextManager[Any]:
        """The context for torch's own operations."""
        return contextlib.nullcontext()

    def join(self, _tensors: Iterable[Any]) -> None:
        """Later work of the calling thread comes after the operation."""
        if self._group.alive:  # else its end has waited
            settle(self._group)

    def keep(self, tensors: Any) -> None:
        """Keeps tensors until the work now queued has run. Called where the call fails: it is queued all the same."""
        if self._group.alive:
            self._group.hold(tensors)

    def finish(self, inputs: Iterable[Any], outputs: Iterable[Any]) -> EventOverlap:
        """Called when all work is queued. Waits for it, or returns an event."""
        tensors = (list(inputs), list(outputs))
        if self._async:
            self._group.hold(tensors)
            return EventOverlap(HostEvent(self._group))
        try:
            settle(self._group)
        except BaseException:  # Ctrl-C interrupts the wait, not the work
            self.keep(tensors)
            raise
        return EventOverlap()


def join(pool: Any, launch: Any, stream: int, tensors: Iterable[Any]) -> None:
    """Later work of the current stream comes after a call, which had this launch, or none and this stream."""
    if launch is not None:
        launch.join(tensors)
    elif pool.on_cpu:
        if pool.group.alive:  # else its end has waited
            settle(pool.group)
    elif not pool.capturing() and stream != pool.stream():
        wait_for(stream, pool.device)
        use_on(torch.cuda.current_stream(pool.device), tensors, given=True)


def keep(group: epx.Group, launch: Any, tensors: Any) -> None:
    """Keeps the tensors of a call that has failed until the work now queued has run."""
    if launch is not None:
        launch.keep(tensors)
    elif group.alive:
        group.hold(tensors)


@contextlib.contextmanager
def queueing(launch: Any) -> Iterator[List[Any]]:
    """The part of a call that queues work: (the list of) what this work uses. An exception must not free it."""
    used: List[Any] = []
    try:
        yield used
    except BaseException:
        if used:
            launch.keep(used)
        raise


class CudaLaunch:
    """One operation on CUDA tensors."""

    def __init__(self, comm_stream: "torch.cuda.Stream", previous_event: Optional[EventOverlap],
                 async_finish: bool) -> None:
        self._current = torch.cuda.current_stream(comm_stream.device)
        self._async = async_finish
        self._comm = comm_stream
        self._stream = self._current
        given = previous_event.event if previous_event is not None else None
        if async_finish or given is not None:
            self._stream = comm_stream
            if given is not None:
                given.wait_on(comm_stream)
            else:
                comm_stream.wait_stream(self._current)
        self.aside = self._stream is not self._current
        self.address = self._stream.cuda_stream or DEFAULT_STREAM

    def context(self) -> ContextManager[Any]:
        """The context for torch's own operations, including allocations."""
        return contextlib.nullcontext() if self._stream is self._current else torch.cuda.stream(self._stream)

    def join(self, tensors: Iterable[Any]) -> None:
        """Later work of the current stream comes after the operation, and may use its tensors. A capture has waited for
        it before it began."""
        if torch.cuda.is_current_stream_capturing():
            return
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_stream(self._stream)
        use_on(current, tensors, given=True)

    def keep(self, _tensors: Any) -> None:
        """Called where the call fails. The memory of its tensors is used again behind the work now queued: by work of
        the current stream, or of the stream that they were allocated on."""
        if self.aside:
            self._current.wait_stream(self._stream)

    def finish(self, inputs: Iterable[Any], outputs: Iterable[Any]) -> EventOverlap:
        """Called when all work is queued. Makes the current stream wait for it, or returns an event."""
        if self._stream is self._current:
            return EventOverlap()
        use_on(self._stream, inputs, given=True)
        use_on(self._current, outputs)
        if self._async:
            return EventOverlap(StreamEvent(self._stream))
        self._current.wait_stream(self._stream)
        return EventOverlap()
