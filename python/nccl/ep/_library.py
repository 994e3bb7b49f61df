# SPDX-License-Identifier: Apache-2.0
"""Finds libnccl_ep.so, and the library of communicators.

libnccl_ep.so lies beside libepx.so (epx/lib of the wheel, build/ of the source tree), or where the loader finds it.
Communicators are those of NCCL if the process has loaded libnccl.so.2 before and the machine has a GPU, else of EPX's
stand-in beside libnccl_ep.so, else of a libnccl.so.2 that the loader finds. torch loads NCCL on every machine, with a
GPU or without; without one NCCL makes no communicator.
"""

import ctypes
import os
from pathlib import Path
from typing import Any, List, Optional, Tuple

from epx import _library as _epx

from . import _abi

_NOLOAD = 0x4  # RTLD_NOLOAD of glibc

_ep: Optional[ctypes.CDLL] = None
_nccl: Optional[ctypes.CDLL] = None


def _beside(library: ctypes.CDLL, name: str) -> List[str]:
    folder = os.path.dirname(os.path.realpath(library._name)) if os.sep in library._name else ""
    return [path for path in (os.path.join(folder, name), os.path.join(folder, name + ".0"))
            if folder and os.path.exists(path)]


def _open(names: List[str]) -> ctypes.CDLL:
    reasons = []
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            reasons.append("%s: %s" % (name, error))
    raise OSError("expected one of these libraries; got: " + "; ".join(reasons))


def load() -> ctypes.CDLL:
    """libnccl_ep.so, loaded once."""
    global _ep
    if _ep is None:
        library = _open([*_beside(_epx.load(), "libnccl_ep.so"), "libnccl_ep.so.0", "libnccl_ep.so"])
        _abi.declare(library)
        _ep = library
    return _ep


def _has_gpu() -> bool:
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def _loaded_nccl() -> Optional[ctypes.CDLL]:
    """What the process has under NCCL's name and can use: the stand-in may have that name, too."""
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=_NOLOAD)
    except OSError:
        return None
    return library if hasattr(library, "epxNcclHostAllGather") or _has_gpu() else None


def load_nccl() -> ctypes.CDLL:
    """The library of communicators, loaded once."""
    global _nccl
    if _nccl is None:
        _nccl = _loaded_nccl() or _open([*_beside(load(), "libepx_nccl.so"), "libepx_nccl.so.0", "libnccl.so.2"])
    return _nccl


def call(name: str, *arguments: Any) -> None:
    """Calls a function of libnccl_ep.so; raises NCCLEpError with its message if it fails."""
    status = getattr(load(), name)(*arguments)
    if status:
        raise _abi.NCCLEpError(status, (load().ncclEpxGetLastError() or b"").decode("utf-8", "replace"))


def get_lib_version() -> Any:
    """The release of the loaded library, as packaging.version.Version where that package is, else as text."""
    number = ctypes.c_int()
    call("ncclEpGetVersion", ctypes.byref(number))
    text = "%d.%d.%d" % _decode(number.value)
    try:
        from packaging.version import Version
    except ImportError:
        return text
    return Version(text)


def _decode(number: int) -> Tuple[int, int, int]:
    return number // 10000, number % 10000 // 100, number % 100


def get_lib_path() -> Optional[Path]:
    """The file of the loaded library, or None where only the loader knows it."""
    name = load()._name
    return Path(name) if os.sep in name else None
