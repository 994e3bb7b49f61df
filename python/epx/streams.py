# SPDX-License-Identifier: Apache-2.0
"""Streams and events, on a GPU and on the CPU, and waits that Ctrl-C can interrupt."""

import collections
import ctypes
import threading
import time
from typing import Any, Deque, List, Optional, Tuple

from ._abi import Device
from ._library import check, load
from ._owner import Owner
from .errors import ArgumentError, Status

# CUDA's number of the default stream. 0 cannot be used: in EPX, NULL is the group's own stream.
_CUDA_DEFAULT_STREAM = 1
_SLICE_S = 0.1


def stream_address(group: Owner, stream: Any) -> Optional[int]:
    """The C library's value for a stream. None is the group's own; on a GPU, also a torch stream or its number."""
    if stream is None:
        return None
    if isinstance(stream, Stream):
        return stream.address
    number = getattr(stream, "cuda_stream", stream)
    if group.device == Device.CPU or not isinstance(number, int):
        raise ArgumentError(
            Status.ARGUMENT, "stream: expected None%s, got %r" % (
                " or a stream of this group" if group.device == Device.CPU
                else ", a stream of this group or a torch stream",
                stream))
    return number or _CUDA_DEFAULT_STREAM


class Stream:
    """A stream of a group's device. It is destroyed with the group."""

    def __init__(self, group: "StreamOwner") -> None:
        out = ctypes.c_void_p()
        check(load().epx_stream_create(group.address, ctypes.byref(out)))
        self._group = group
        self._address = out.value or 0

    @property
    def address(self) -> int:
        """The address of the C stream; on a GPU, the number of a CUDA stream."""
        self._group.address  # raises if the group was destroyed
        return self._address

    def sync(self) -> None:
        """Waits for all work queued on this stream. Raises the group's error, if there is one."""
        self._group.sync(self)

    def query(self) -> bool:
        """True if all work queued on this stream is complete."""
        return _ready(load().epx_stream_query(self._group.address, self.address))

    def wait_event(self, event: "Event") -> None:
        """Makes later work on this stream wait for the event."""
        check(load().epx_stream_wait_event(self._group.address, self.address, event.address))


class Event:
    """A point in a stream's work. It is destroyed with the group. An event that was never recorded is complete."""

    def __init__(self, group: Owner) -> None:
        out = ctypes.c_void_p()
        check(load().epx_event_create(group.address, ctypes.byref(out)))
        self._group = group
        self._address = out.value or 0

    @property
    def address(self) -> int:
        """The address of the C event."""
        self._group.address
        return self._address

    def record(self, stream: Any = None) -> None:
        """Records the event after the work that is queued on the stream now."""
        check(load().epx_event_record(self.address, stream_address(self._group, stream)))

    def query(self) -> bool:
        """True if the stream has reached the event."""
        return _ready(load().epx_event_query(self.address))

    def sync(self) -> None:
        """Waits until the stream has reached the event. Raises the group's error, if there is one."""
        poll(self.query)
        check(load().epx_event_sync(self.address))

    def __del__(self) -> None:
        group = getattr(self, "_group", None)
        if group is not None and group.alive:
            load().epx_event_destroy(self._address)


def _ready(status: int) -> bool:
    if status == Status.NOT_READY:
        return False
    check(status)
    return True


def poll(ready: Any) -> None:
    """Polls until ready() is true: without a pause for 200 us, then every 20 us to 1 ms. Ctrl-C interrupts it."""
    start = time.perf_counter()
    step = 20e-6
    while not ready():
        if time.perf_counter() - start > 200e-6:
            time.sleep(step)
            step = min(2 * step, 1e-3)


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class CpuWaiter:
    """Sleeps until a stream of the CPU device has done its queued work. It sleeps in slices, so that Ctrl-C is handled.

    The stream posts a semaphore, so the waiter does not poll. Only one thread may use a waiter at a time.
    """

    _abandoned: List[Any] = []  # semaphores that a stream may still post

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._post = ctypes.cast(libc.sem_post, ctypes.c_void_p).value
        self._init = libc.sem_init
        self._wait = libc.sem_timedwait
        self._limit = _Timespec()
        self._new()

    def _new(self) -> None:
        self._semaphore = ctypes.create_string_buffer(64)  # sem_t has 32 bytes
        self._init(self._semaphore, 0, 0)

    def wait(self, group_address: int, stream: Optional[int]) -> None:
        """Returns when the work that is queued on the stream now is complete."""
        done = False
        try:  # from here on: Ctrl-C may come behind the call, and the stream posts all the same
            status = load().epx_stream_call(group_address, stream, self._post, ctypes.addressof(self._semaphore))
            done = status != Status.OK  # nothing is queued
            check(status)
            while not done:
                now = time.time() + _SLICE_S
                self._limit.seconds = int(now)
                self._limit.nanoseconds = int((now - int(now)) * 1e9)
                done = self._wait(self._semaphore, ctypes.byref(self._limit)) == 0
        finally:
            if not done:
                self._abandoned.append(self._semaphore)
                self._new()


class StreamOwner(Owner):
    """The part of a group that owns streams and events."""

    def __init__(self) -> None:
        super().__init__()
        # Addresses of C events, which end with the group. Objects for them would be finalized before others that are
        # in the same garbage and still call hold().
        self._held: Deque[Tuple[int, Any]] = collections.deque()
        self._events: List[int] = []
        self._pruning = threading.RLock()  # of one thread at a time, and not while the group is destroyed
        self._waiter: Optional[CpuWaiter] = None
        # True: operations keep their tensors alive until they have run. A caller whose memory is freed in stream order,
        # such as torch's memory on a GPU, may set this to False.
        self.holds = True

    def stream(self) -> Stream:
        """Creates a stream of the group's device."""
        return Stream(self)

    def event(self) -> Event:
        """Creates an event."""
        return Event(self)

    def sync(self, stream: Any = None) -> None:
        """Waits for the work queued on a stream (None: the group's own). Raises the group's asynchronous error, if
        there is one."""
        number = stream_address(self, stream)
        self._wait(number)
        self.prune()
        check(self._lib.epx_stream_sync(self.address, number))

    def _wait(self, stream: Optional[int]) -> None:
        if self.device != Device.CPU:
            poll(lambda: self._lib.epx_stream_query(self.address, stream) != Status.NOT_READY)
            return
        waiter, self._waiter = self._waiter or CpuWaiter(), None  # another thread then creates its own
        waiter.wait(self.address, stream)
        self._waiter = waiter

    def hold(self, objects: Any, stream: Any = None) -> None:
        """Keeps objects alive until the work now queued on the stream has run. Does nothing if `holds` is False."""
        if not self.holds:
            return
        event = self._events.pop() if self._events else self._new_event()
        check(self._lib.epx_event_record(event, stream_address(self, stream)))
        self._held.append((event, objects))
        self.prune()

    def _new_event(self) -> int:
        out = ctypes.c_void_p()
        check(self._lib.epx_event_create(self.address, ctypes.byref(out)))
        return out.value or 0

    def prune(self) -> None:
        """Lets go of what was held for work that has run. Any thread may call it, at any time."""
        if not self._held or not self._pruning.acquire(blocking=False):
            return
        try:
            while self._held and self._address is not None:
                entry = self._held[0]  # and no popleft(): Ctrl-C before the answer would free the objects
                if self._lib.epx_event_query(entry[0]) == Status.NOT_READY:
                    return
                if self._held and self._held[0] is entry:  # else a finalizer has pruned while this one asked
                    self._held.popleft()
                    self._events.append(entry[0])
        finally:
            self._pruning.release()

    def _wait_for_held(self) -> None:
        """Waits for all work that holds objects, and lets go of these. Every operation ends by its deadline; what is
        not complete long after that stays held."""
        timeout = 2e-3 * self.info.timeout_ms + 1
        limit = time.monotonic() + timeout

        def done() -> bool:
            nonlocal limit
            before = len(self._held)
            self.prune()
            if len(self._held) < before:
                limit = time.monotonic() + timeout
            return not self._held or time.monotonic() > limit
        poll(done)
