# SPDX-License-Identifier: Apache-2.0
"""Memory of EPX as DLPack capsules, so that torch and others make tensors over it that keep its owner alive."""

import ctypes
import sys
from typing import Any, Dict, Optional, Sequence, Tuple

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
_Extents = ctypes.c_int64 * 8


class _Managed(ctypes.Structure):
    """``DLManagedTensor``, and the arrays that it points to."""

    _fields_ = [("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter), ("extents", _Extents)]


_given: Dict[int, Any] = {}  # what consumers hold of Keeper's capsules, by the address of its struct


@_Deleter
def _delete(address: int) -> None:
    _given.pop(address, None)


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_copy = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0)
_SHAPE_AT = _Managed.extents.offset
_TENSOR_BYTES = ctypes.sizeof(DLTensor)
_BYTE = (1, 8)
_Byte = ctypes.c_char * 1
_Pointer = ctypes.POINTER(ctypes.c_int64)


class Export:
    """Memory at an address as a tensor, prepared once for capsules that follow one another.

    `kind` is DLPack's (code, bits) of an element, bytes if not said; at most four dimensions, contiguous without
    strides.
    """

    def __init__(self, address: int, shape: Sequence[int], device: Tuple[int, int], kind: Tuple[int, int] = _BYTE,
                 strides: Optional[Sequence[int]] = None) -> None:
        ndim = len(shape)
        managed = self._managed = _Managed()
        at = self.at = ctypes.addressof(managed)
        managed.tensor = DLTensor(
            address, device[0], device[1], ndim, kind[0], kind[1], 1, ctypes.cast(at + _SHAPE_AT, _Pointer),
            ctypes.cast(at + _SHAPE_AT + 32, _Pointer) if strides is not None else None, 0)
        managed.extents[:ndim] = shape
        if strides is not None:
            managed.extents[4:4 + ndim] = strides
        managed.deleter = _delete


class Keeper:
    """Makes capsules; whoever consumes one keeps `owner` alive.

    A consumer that lets go while an exception is under way loses that exception, as Python cannot be called then. Where
    torch is there, TorchKeeper does better.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def capsule(self, export: Export) -> Any:
        """A capsule, to be consumed once. The next one of the same export when that has been let go."""
        _given[export.at] = (export, self._owner)
        return _new_capsule(export.at, b"dltensor", None)


class TorchKeeper:
    """The same by means of torch: a tensor of one byte keeps `owner` alive, and its capsules are made to describe other
    memory. What torch calls when a consumer lets go is no Python. Exports must live until their capsules are
    consumed."""

    def __init__(self, owner: Any) -> None:
        torch = sys.modules["torch"]
        byte: Any = _Byte()
        byte.owner = owner
        self._tensor = torch.frombuffer(byte, dtype=torch.uint8)
        self._to_dlpack = torch.utils.dlpack.to_dlpack

    def capsule(self, export: Export) -> Any:
        """A capsule, to be consumed once."""
        capsule = self._to_dlpack(self._tensor)
        _copy(_pointer_of(capsule, b"dltensor"), export.at, _TENSOR_BYTES)
        return capsule


def look_into(capsule: Any) -> DLTensor:
    """The tensor in a capsule that nobody has consumed; valid as long as the capsule lives."""
    return DLTensor.from_address(_pointer_of(capsule, b"dltensor"))
