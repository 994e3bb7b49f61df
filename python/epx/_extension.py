# SPDX-License-Identifier: Apache-2.0
"""Loads epx_calls.abi3.so, the calls that are in C (python/calls), from the folder of the C library."""

import ctypes
import importlib.machinery
import importlib.util
import os
import sysconfig
from typing import Any, Optional

from ._library import load
from .errors import EpxError, Status

_NAME = "epx_calls.abi3.so"
_module: Optional[Any] = None


class _Info(ctypes.Structure):
    """``Dl_info`` of dladdr()."""

    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("symbol", ctypes.c_char_p),
                ("address", ctypes.c_void_p)]


def _folder(library: ctypes.CDLL) -> str:
    """Where the library was loaded from."""
    info = _Info()
    ctypes.CDLL(None).dladdr(ctypes.cast(library.epx_version, ctypes.c_void_p), ctypes.byref(info))
    return os.path.dirname(os.path.realpath(os.fsdecode(info.file or b"")))


def calls() -> Any:
    """The module, loaded once per process. Raises EpxError where there is none."""
    global _module
    if _module is None:
        library = load()
        path = os.path.join(_folder(library), _NAME)
        if sysconfig.get_config_var("Py_GIL_DISABLED"):
            raise EpxError(Status.UNSUPPORTED, "%s: expected a Python with its global lock, got a free-threaded one: "
                           "use another build of Python" % _NAME)
        try:
            loader = importlib.machinery.ExtensionFileLoader("epx._calls", path)
            spec = importlib.util.spec_from_file_location("epx._calls", path, loader=loader)
            assert spec is not None
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
        except (ImportError, OSError) as error:
            raise EpxError(Status.UNSUPPORTED, "%s: expected it beside the C library, in %s; got: %s" % (
                _NAME, os.path.dirname(path), error)) from None
        module.open(library._handle)
        _module = module
    return _module
