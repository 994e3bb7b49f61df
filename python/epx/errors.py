# SPDX-License-Identifier: Apache-2.0
"""The statuses of the C library and the exceptions for them."""

import enum
from typing import Dict, Type


class Status(enum.IntEnum):
    """The result of a call of the C library (``epx_status``)."""

    OK = 0
    ARGUMENT = 1
    USAGE = 2
    MISMATCH = 3
    OVERFLOW = 4
    MEMORY = 5
    SYSTEM = 6
    TIMEOUT = 7
    PEER = 8
    BUSY = 9
    UNSUPPORTED = 10
    NOT_READY = 11
    INTERNAL = 12


class EpxError(RuntimeError):
    """A call failed. ``status`` is the kind of failure, ``message`` the message of the C library, in Python's names."""

    def __init__(self, status: int, message: str) -> None:
        try:
            self.status = Status(status)
        except ValueError:
            self.status = Status.INTERNAL
        # In Python's words: the C library's name what its callers can call.
        self.message = message.replace(
            "(epx_group_error_clear on all ranks recovers it)",
            "(Group.error_clear(), or deep_ep's Buffer.recover(), on all ranks recovers it)")
        super().__init__("%s: %s" % (self.status.name, self.message))

    def __reduce__(self):
        return (type(self), (int(self.status), self.message))


class ArgumentError(EpxError, ValueError):
    """An argument has a wrong dtype, shape, stride or value. Nothing was sent."""


class UsageError(EpxError):
    """The call is not allowed now, or not with this configuration. Nothing was sent."""


class MismatchError(EpxError):
    """The ranks gave different configurations or made different calls."""


class OverflowingError(EpxError):
    """A receive tensor is too small for the rows that arrive, or a rank has more tokens than the group is for."""


class OutOfMemoryError(EpxError, MemoryError):
    """Out of memory, or the heap of ``Group.alloc`` is full."""


class TimeoutExpired(EpxError, TimeoutError):
    """A wait reached its deadline. The message names rank, peer and phase."""


class PeerError(EpxError):
    """Another rank reported a failure."""


class BusyError(EpxError):
    """Too many staged operations are in flight."""


class UnsupportedError(EpxError):
    """This build or this machine does not support the call."""


_CLASSES: Dict[int, Type[EpxError]] = {
    Status.ARGUMENT: ArgumentError,
    Status.USAGE: UsageError,
    Status.MISMATCH: MismatchError,
    Status.OVERFLOW: OverflowingError,
    Status.MEMORY: OutOfMemoryError,
    Status.TIMEOUT: TimeoutExpired,
    Status.PEER: PeerError,
    Status.BUSY: BusyError,
    Status.UNSUPPORTED: UnsupportedError,
}


for _class in (EpxError, *_CLASSES.values()):
    _class.__module__ = "epx"  # the name by which programs have them


def make_error(status: int, message: str) -> EpxError:
    """The exception for a status, of the matching class."""
    return _CLASSES.get(status, EpxError)(status, message)
