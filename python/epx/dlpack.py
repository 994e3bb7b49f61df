# SPDX-License-Identifier: Apache-2.0
"""Memory of EPX as DLPack capsules, so that torch and others make tensors over it that keep its owner alive."""

import ctypes
from typing import Any, Dict, Tuple

CPU, CUDA, ROCM = 1, 2, 10  # DLDeviceType


class DLTensor(ctypes.Structure):
    """``DLTensor`` of DLPack."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]


_given: Dict[int, Tuple[Any, Any, Any]] = {}  # what consumers hold, by the address of its struct


@_Deleter
def _delete(address: int) -> None:
    _given.pop(address, None)


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def export_bytes(owner: Any, address: int, nbytes: int, device: Tuple[int, int]) -> Any:
    """A capsule over `nbytes` bytes (uint8) at `address`; whoever consumes it keeps `owner` alive. To be consumed once."""
    shape = (ctypes.c_int64 * 1)(nbytes)
    managed = _Managed()
    tensor = managed.tensor
    tensor.data, tensor.device_type, tensor.device_id = address, device[0], device[1]
    tensor.ndim, tensor.code, tensor.bits, tensor.lanes = 1, 1, 8, 1
    tensor.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
    managed.deleter = _delete
    at = ctypes.addressof(managed)
    _given[at] = (managed, shape, owner)
    return _new_capsule(at, b"dltensor", None)


def look_into(capsule: Any) -> DLTensor:
    """The tensor in a capsule that nobody has consumed; valid as long as the capsule lives."""
    return DLTensor.from_address(_pointer_of(capsule, b"dltensor"))
