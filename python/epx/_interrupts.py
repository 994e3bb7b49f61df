# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C where it must not end what is under way."""

import signal
import threading
import types
from typing import Any, Optional


class Interrupts:
    """A context in which Ctrl-C is put off: to its end, or, if `callback` is set, out of that function.

    A callback is for calls of the C library that call back. Python runs a signal's handler when the C library has
    returned or called back: then at the first instruction of the callback, before its `try`. ctypes would drop the
    exception there, and return anything. So the handler is put off until the callback says so.
    """

    def __init__(self) -> None:
        self.callback: Optional[types.CodeType] = None
        self._handler: Any = None
        self._inside = False  # True: only the callback is left alone
        self._came = 0

    def __enter__(self) -> None:
        handler = signal.getsignal(signal.SIGINT)
        self._handler = handler if callable(handler) and threading.current_thread() is threading.main_thread() else None
        self._came = 0
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handle)
        self._inside = self.callback is not None

    def __exit__(self, *_: Any) -> None:
        self._inside = False
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self.deliver()

    def _handle(self, number: int, frame: Optional[types.FrameType]) -> None:
        # An exception at the first instruction of __exit__() would leave this handler in place.
        put_off = (self.callback, Interrupts.__enter__.__code__, Interrupts.__exit__.__code__)
        if not self._inside or (frame is not None and frame.f_code in put_off):
            self._came = number
        else:
            self._handler(number, frame)

    def deliver(self) -> None:
        """Calls the handler, which may raise KeyboardInterrupt, for a signal that came."""
        number, self._came = self._came, 0
        if number:
            self._handler(number, None)
