# SPDX-License-Identifier: Apache-2.0
"""DLPack capsules over EPX's memory. Tensors that torch and others make from a capsule keep its owner alive."""

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
    """``DLManagedTensor`` and the arrays that it points to."""

    _fields_ = [("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter), ("extents", _Extents)]


_given: Dict[int, Any] = {}  # what consumers of Keeper's capsules keep alive, by the address of the struct


@_Deleter
def _delete(address: int) -> None:
    _given.pop(address, None)


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
copy_bytes = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0)
_SHAPE_AT = _Managed.extents.offset
_TENSOR_BYTES = ctypes.sizeof(DLTensor)
_BYTE = (1, 8)
_Byte = ctypes.c_char * 1
_Pointer = ctypes.POINTER(ctypes.c_int64)


class Export:
    """A tensor over memory at an address, prepared once and used for a sequence of capsules.

    `kind` is DLPack's (code, bits) of an element, by default bytes. The tensor has at most four dimensions. Without
    strides it is contiguous.
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
    """Makes capsules whose consumers keep `owner` alive.

    The deleter runs Python code. If a consumer releases the tensor while an exception propagates, that exception is
    lost. TorchKeeper does not have this problem, but needs torch.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def capsule(self, export: Export) -> Any:
        """A capsule, to be consumed once. An export may have one capsule at a time: release it before the next."""
        _given[export.at] = (export, self._owner)
        return _new_capsule(export.at, b"dltensor", None)


class TorchKeeper:
    """Like Keeper, by means of torch: a one-byte tensor keeps `owner` alive, and its capsules are overwritten to
    describe the memory of an export. The deleter is torch's own and runs no Python code. An export must live until its
    capsules are consumed."""

    def __init__(self, owner: Any) -> None:
        torch = sys.modules["torch"]
        byte: Any = _Byte()
        byte.owner = owner
        self._tensor = torch.frombuffer(byte, dtype=torch.uint8)
        self._to_dlpack = torch.utils.dlpack.to_dlpack

    def capsule(self, export: Export) -> Any:
        """A capsule, to be consumed once."""
        capsule = self._to_dlpack(self._tensor)
        copy_bytes(_pointer_of(capsule, b"dltensor"), export.at, _TENSOR_BYTES)
        return capsule


def look_into(capsule: Any) -> DLTensor:
    """The tensor in a capsule that is not yet consumed. It is valid as long as the capsule lives."""
    return DLTensor.from_address(_pointer_of(capsule, b"dltensor"))
