# SPDX-License-Identifier: Apache-2.0
"""Address, shape and type of an object with ``__dlpack__``: memory of cuda.core, of CuPy, JAX and others."""

import ctypes
from typing import Any, Tuple

from ._abi import NcclInvalid

# DLPack's codes with bits; of float8 and float4 those of DLPack 1.1.
_NAMES = {(0, 8): "int8", (0, 32): "int32", (0, 64): "int64", (1, 8): "uint8", (1, 32): "uint32", (1, 64): "uint64",
          (2, 16): "float16", (2, 32): "float32", (2, 64): "float64", (4, 16): "bfloat16", (6, 8): "bool",
          (10, 8): "float8_e4m3fn", (12, 8): "float8_e5m2"}


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


def describe(buffer: Any) -> Tuple[int, Tuple[int, ...], str]:
    """The name of the type is torch's. The memory stays the object's."""
    capsule = buffer.__dlpack__()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    found = _Tensor.from_address(pointer(capsule, b"dltensor"))
    shape = tuple(found.shape[:found.ndim])
    step = 1
    for i in reversed(range(found.ndim)):
        if found.strides and shape[i] > 1 and found.strides[i] != step:
            raise NcclInvalid("Tensor: expected contiguous memory, got strides %s" % (found.strides[:found.ndim],))
        step *= shape[i]
    name = _NAMES.get((found.code, found.bits)) if found.lanes == 1 else None
    if name is None:
        raise NcclInvalid("Tensor: NCCL has no type for DLPack's code %d with %d bits and %d lanes"
                          % (found.code, found.bits, found.lanes))
    return (found.data or 0) + found.byte_offset, shape, name
