# SPDX-License-Identifier: Apache-2.0
"""Descriptors of tensors: where they are, their shape and type."""

import ctypes
import numbers
from typing import Any, Optional, Tuple

from . import _dlpack
from ._abi import DataType, NcclInvalid, TensorStruct

# Names of torch's and NumPy's types.
_NAMES = {
    "int8": DataType.INT8, "uint8": DataType.UINT8, "bool": DataType.UINT8, "int32": DataType.INT32,
    "uint32": DataType.UINT32, "int64": DataType.INT64, "uint64": DataType.UINT64, "float16": DataType.FLOAT16,
    "float32": DataType.FLOAT32, "float64": DataType.FLOAT64, "bfloat16": DataType.BFLOAT16,
    "float8_e4m3fn": DataType.FLOAT8E4M3, "float8_e5m2": DataType.FLOAT8E5M2,
    "float4_e2m1fn_x2": DataType.FLOAT4X2,
}
# Type strings of the array interfaces.
_STRINGS = {"i1": "int8", "u1": "uint8", "b1": "bool", "i4": "int32", "u4": "uint32", "i8": "int64", "u8": "uint64",
            "f2": "float16", "f4": "float32", "f8": "float64"}


def _named(name: str) -> DataType:
    if name not in _NAMES:
        raise NcclInvalid("Tensor: NCCL has no type for %s; it has %s" % (name, ", ".join(sorted(_NAMES))))
    return _NAMES[name]


def _from_interface(interface: dict) -> Tuple[int, Tuple[int, ...], DataType]:
    if interface.get("strides") is not None and not _contiguous(interface):
        raise NcclInvalid("Tensor: expected contiguous memory, got strides %s" % (interface["strides"],))
    name = _STRINGS.get(interface["typestr"].lstrip("<|="), interface["typestr"])
    return int(interface["data"][0]), tuple(interface["shape"]), _named(name)


def _contiguous(interface: dict) -> bool:
    step = int(interface["typestr"][2:])
    for extent, stride in zip(reversed(interface["shape"]), reversed(interface["strides"])):
        if extent > 1 and stride != step:
            return False
        step *= extent
    return True


def _resolve(buffer: Any) -> Tuple[int, Tuple[int, ...], DataType]:
    """Address, shape and type of a tensor of torch, or of an object with an array interface or DLPack."""
    if hasattr(buffer, "data_ptr") and hasattr(buffer, "is_contiguous"):
        if not buffer.is_contiguous():
            raise NcclInvalid("Tensor: expected a contiguous tensor, got strides %s" % (tuple(buffer.stride()),))
        return buffer.data_ptr(), tuple(buffer.shape), _named(str(buffer.dtype).split(".")[-1])
    for name in ("__cuda_array_interface__", "__array_interface__"):
        interface = getattr(buffer, name, None)
        if interface is not None:
            return _from_interface(interface)
    if hasattr(buffer, "__dlpack__"):
        data, shape, name = _dlpack.describe(buffer)
        return data, shape, _named(name)
    raise NcclInvalid("Tensor: expected a tensor of torch, an object with __cuda_array_interface__, "
                      "__array_interface__ or __dlpack__, or an address with dtype and shape, got %s"
                      % type(buffer).__name__)


class Tensor:
    """A descriptor; it keeps the object alive that it was made of, and not the memory of an address."""

    def __init__(self, buffer: Any, *, dtype: Any = None, shape: Optional[Tuple[int, ...]] = None, window: Any = None,
                 window_offset: Optional[int] = None) -> None:
        if isinstance(buffer, numbers.Integral) and not isinstance(buffer, bool):
            if dtype is None or shape is None:
                raise ValueError("Tensor: an address needs dtype and shape")
            data, sizes, kind = int(buffer), tuple(shape), DataType(int(dtype))
            self._buffer = None
        else:
            if dtype is not None or shape is not None:
                raise ValueError("Tensor: dtype and shape are for an address; a %s has its own"
                                 % type(buffer).__name__)
            data, sizes, kind = _resolve(buffer)
            self._buffer = buffer
        if not sizes:
            raise ValueError("Tensor: expected at least one dimension")
        if (window is None) != (window_offset is None):
            raise NcclInvalid("Tensor: expected window and window_offset both or neither")
        self._sizes, self._kind, self._window = sizes, kind, window
        self._extents = (ctypes.c_size_t * len(sizes))(*sizes)
        self._struct = TensorStruct(
            ndim=len(sizes), datatype=int(kind), data=data,
            sizes=ctypes.cast(self._extents, ctypes.POINTER(ctypes.c_size_t)),
            win_hdl=None if window is None else int(getattr(window, "handle", window)),
            win_offset=window_offset or 0)

    @property
    def ptr(self) -> int:
        """The address of the ncclEpTensor_t."""
        return self._struct.ptr

    @property
    def ndim(self) -> int:
        return len(self._sizes)

    @property
    def sizes(self) -> Tuple[int, ...]:
        return self._sizes

    @property
    def datatype(self) -> DataType:
        return self._kind

    @property
    def data(self) -> int:
        """The address of the memory."""
        return self._struct.data or 0

    @property
    def buffer(self) -> Any:
        """What the descriptor was made of; None for an address."""
        return self._buffer

    def __repr__(self) -> str:
        return "<Tensor sizes=%s dtype=%s data=%#x>" % (self._sizes, self._kind.name, self.data)
