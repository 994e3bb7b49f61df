# SPDX-License-Identifier: Apache-2.0
"""Finds and loads the C library.

Search order:

1. the file that ``EPX_LIBRARY`` names (if it is set, nothing else is tried);
2. ``epx/lib/`` inside this package, where a wheel stores the library and the modules of GPU devices;
3. ``build/`` of the source tree that contains this package;
4. ``libepx.so.0`` on the search path of the dynamic loader.
"""

import ctypes
import glob
import os
import sys
from typing import List, Optional

from . import _abi
from .errors import EpxError, Status, make_error

_SONAME = "libepx.so.0"

_library: Optional[ctypes.CDLL] = None


def places(pattern: str) -> List[str]:
    """Files of the C build, the shortest name first: of the package, then of the source tree that contains it.

    An editable installation has two folders: that of the sources, and that of what was built."""
    homes = [os.path.abspath(home) for home in sys.modules[__name__.rpartition(".")[0]].__path__]
    folders = [os.path.join(home, "lib") for home in homes]
    folders += [os.path.join(os.path.dirname(os.path.dirname(home)), "build") for home in homes]
    return [name for folder in folders for name in sorted(glob.glob(os.path.join(folder, pattern)), key=len)]


def candidates() -> List[str]:
    """The file names to try, in order."""
    named = os.environ.get("EPX_LIBRARY")
    if named:
        return [named]
    return [*places("libepx.so*"), _SONAME]


def load() -> ctypes.CDLL:
    """The C library, loaded once per process. If it is not found, raises EpxError with the names that were tried."""
    global _library
    if _library is None:
        library = _open(candidates())
        try:
            _abi.declare(library)
        except AttributeError as missing:
            raise _failure("%s: is another library, or another version (%s)" % (library._name, missing)) from None
        _library = library
    return _library


def check(status: int) -> None:
    """Raises the exception for a status other than OK, with the message of epx_last_error() for this thread."""
    if status:
        raise make_error(status, load().epx_last_error().decode("utf-8", "replace"))


def _open(names: List[str]) -> ctypes.CDLL:
    reasons = []
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            reasons.append(str(error) if name in str(error) else "%s: %s" % (name, error))
    raise _failure("; ".join(reasons))


def _failure(given: str) -> EpxError:
    """No library can be used: `given` says why not."""
    if os.environ.get("EPX_LIBRARY"):
        return EpxError(Status.UNSUPPORTED, "EPX_LIBRARY: expected this version's libepx.so, got %s; name that file, "
                        "or unset the variable" % given)
    return EpxError(Status.UNSUPPORTED, "expected this version's libepx.so in epx/lib of this package, in build/ of "
                    "the source tree, or as %s by the loader's rules, got %s; install EPX, or set EPX_LIBRARY to the "
                    "file" % (_SONAME, given))
