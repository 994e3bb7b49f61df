# SPDX-License-Identifier: Apache-2.0
"""Statuses of the C library, and the exceptions they become."""

import enum
from typing import Dict, Type


class Status(enum.IntEnum):
    """What a call of the C library returned (``epx_status``)."""

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
    """A call failed. ``status`` says in which way, ``message`` is the library's sentence."""

    def __init__(self, status: int, message: str) -> None:
        try:
            self.status = Status(status)
        except ValueError:
            self.status = Status.INTERNAL
        self.message = message
        super().__init__("%s: %s" % (self.status.name, message))

    def __reduce__(self):
        return (type(self), (int(self.status), self.message))


class ArgumentError(EpxError, ValueError):
    """A value is wrong: dtype, shape, strides, range. Nothing was sent."""


class UsageError(EpxError):
    """The call is not allowed now, or not with this configuration. Nothing was sent."""


class MismatchError(EpxError):
    """Ranks disagree about a configuration or a call."""


class OverflowingError(EpxError):
    """A receive tensor is too small for what arrives."""


class OutOfMemoryError(EpxError, MemoryError):
    """No memory, or no more of the heap that ``Group.alloc`` serves from."""


class TimeoutExpired(EpxError, TimeoutError):
    """A wait reached its deadline: the message names rank, peer and phase."""


class PeerError(EpxError):
    """Another rank failed, and said so."""


class BusyError(EpxError):
    """Too many staged operations in flight."""


class UnsupportedError(EpxError):
    """This build or this machine cannot do it."""


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


def make_error(status: int, message: str) -> EpxError:
    """The exception of the class that belongs to a status."""
    return _CLASSES.get(status, EpxError)(status, message)
