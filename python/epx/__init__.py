# SPDX-License-Identifier: Apache-2.0
"""EPX (expert-parallel exchange) for Python: a thin layer over the C library, without a compiled extension.

A Group is a set of ranks. A Handle holds one routing. dispatch sends tokens to their experts, and combine returns the
results. A tensor may be a torch tensor, a NumPy array, or any object with DLPack or ``__cuda_array_interface__``. This
package imports neither torch nor NumPy.
"""

import ctypes as _ctypes
import warnings as _warnings

from . import _other, bootstrap
from ._abi import Device, Direction, DType, Layout, Mode, RecvPart
from ._library import check as _check, load as _load
from ._use import use
from .bootstrap import Bootstrap
from .errors import (ArgumentError, BusyError, EpxError, MismatchError, OutOfMemoryError, OverflowingError, PeerError,
                     Status, TimeoutExpired, UnsupportedError, UsageError)
from .group import ErrorInfo, Group, GroupInfo, memory
from .handle import Handle, LayoutInfo
from .memory import Block
from .streams import Event, Stream

__all__ = [
    "ArgumentError", "Block", "Bootstrap", "BusyError", "Device", "Direction", "DType", "EpxError", "ErrorInfo",
    "Event",
    "Group", "GroupInfo", "Handle", "Layout", "LayoutInfo", "MismatchError", "Mode", "OutOfMemoryError",
    "OverflowingError", "PeerError", "RecvPart", "Status", "Stream", "TimeoutExpired", "UnsupportedError", "UsageError",
    "__version__", "bootstrap", "library_version", "memory", "use",
]

__version__: str  #: that of the C library, which is loaded when it is asked for

if _other.beside():
    _warnings.warn(_other.beside(), RuntimeWarning, stacklevel=2)


def library_version() -> str:
    """The version of the C library in use, as "major.minor.patch"."""
    code = _ctypes.c_int()
    _check(_load().epx_version(_ctypes.byref(code)))
    return "%d.%d.%d" % (code.value // 10000, code.value // 100 % 100, code.value % 100)


def __getattr__(name: str) -> str:
    if name == "__version__":
        return library_version()
    raise AttributeError("module %r has no attribute %r" % (__name__, name))
