# SPDX-License-Identifier: Apache-2.0
"""Converts tensors of other libraries to EPX's tensor descriptors.

Accepted are torch tensors, objects with ``__cuda_array_interface__``, NumPy arrays and other objects with
``__array_interface__``, and objects with DLPack. This module imports none of these libraries.
"""

import sys
from typing import Any, Dict, Optional, Sequence, Tuple

from ._abi import DType, MAX_NDIM, TensorStruct
from .dlpack import look_into
from .errors import ArgumentError, Status

_TYPESTR = {"f2": DType.FP16, "f4": DType.FP32, "i4": DType.INT32, "i8": DType.INT64, "u1": DType.UINT8}
_NAMES = {"bfloat16": DType.BF16, "float8_e4m3fn": DType.FP8_E4M3}  # types of ml_dtypes, which have no typestr
# (code, bits) of DLPack
_DLPACK = {
    (2, 16): DType.FP16, (2, 32): DType.FP32, (4, 16): DType.BF16, (10, 8): DType.FP8_E4M3, (0, 32): DType.INT32,
    (0, 64): DType.INT64, (1, 8): DType.UINT8,
}
_torch_dtypes: Dict[Any, DType] = {}


def torch_dtypes() -> Dict[Any, DType]:
    """The torch dtypes that EPX supports. Empty until torch is imported."""
    torch = sys.modules.get("torch")
    if not _torch_dtypes and torch is not None and hasattr(torch, "Tensor"):
        pairs = (("bfloat16", DType.BF16), ("float16", DType.FP16), ("float32", DType.FP32), ("int32", DType.INT32),
                 ("int64", DType.INT64), ("uint8", DType.UINT8), ("float8_e4m3fn", DType.FP8_E4M3))
        for name, dtype in pairs:
            if hasattr(torch, name):
                _torch_dtypes[getattr(torch, name)] = dtype
    return _torch_dtypes


def fill(struct: TensorStruct, data: int, dtype: int, shape: Sequence[int], stride: Optional[Sequence[int]]) -> None:
    """Fills a descriptor. Strides are in elements; None means contiguous."""
    ndim = len(shape)
    struct.dtype = dtype
    struct.ndim = ndim
    struct.data = data
    struct.shape[:ndim] = shape
    struct.stride[:ndim] = (0,) * ndim if stride is None else stride


def describe(name: str, tensor: Any, struct: TensorStruct, dtype: Optional[DType] = None) -> Any:
    """Describes `tensor` in `struct`. Returns the object that must stay alive while the descriptor is used.

    `dtype` overrides the dtype of the tensor, for memory with another meaning (bf16 stored as uint16). Raises
    ArgumentError, with `name` in the message, if EPX cannot describe the tensor.
    """
    data, found, shape, stride, keep = _look(name, tensor, dtype)
    if len(shape) > MAX_NDIM or len(shape) < 1:
        raise ArgumentError(
            Status.ARGUMENT, "%s: expected 1 to %d dimensions, got %d" % (name, MAX_NDIM, len(shape)))
    if stride is not None and not any(stride) and all(shape) and max(shape) > 1:  # in C, that means contiguous
        raise ArgumentError(
            Status.ARGUMENT, "%s: expected positive strides, got %s of shape %s" % (name, tuple(stride), tuple(shape)))
    fill(struct, data, int(dtype or found or 0), shape, stride)
    return keep


_Looked = Tuple[int, Optional[DType], Sequence[int], Optional[Sequence[int]], Any]


def _look(name: str, tensor: Any, dtype: Optional[DType]) -> _Looked:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, getattr(torch, "Tensor", ())):
        return _look_torch(name, tensor, dtype)
    for attribute in ("__cuda_array_interface__", "__array_interface__"):
        interface = getattr(tensor, attribute, None)
        if interface is not None:
            return _look_array(name, tensor, interface, dtype)
    if hasattr(tensor, "__dlpack__"):
        return _look_dlpack(name, tensor, dtype)
    raise ArgumentError(
        Status.ARGUMENT,
        "%s: expected a torch tensor, a NumPy array, or an object with __cuda_array_interface__ or __dlpack__, got %s"
        % (name, type(tensor).__name__))


def _unknown(name: str, given: Any) -> ArgumentError:
    return ArgumentError(
        Status.ARGUMENT,
        "%s: expected dtype bfloat16, float16, float32, float8_e4m3fn, int32, int64 or uint8, got %s" % (name, given))


def _look_torch(name: str, tensor: Any, dtype: Optional[DType]) -> _Looked:
    found = torch_dtypes().get(tensor.dtype)
    if found is None and dtype is None:
        raise _unknown(name, tensor.dtype)
    if tensor.layout is not sys.modules["torch"].strided:
        raise ArgumentError(Status.ARGUMENT, "%s: expected a strided tensor, got %s" % (name, tensor.layout))
    return tensor.data_ptr(), found, tensor.shape, tensor.stride(), tensor


def _look_array(name: str, tensor: Any, interface: Dict[str, Any], dtype: Optional[DType]) -> _Looked:
    typestr = interface["typestr"]
    found = _TYPESTR.get(typestr[1:])
    if found is None or typestr[0] == ">":
        found = _NAMES.get(getattr(getattr(tensor, "dtype", None), "name", ""))
    if found is None and dtype is None:
        raise _unknown(name, getattr(tensor, "dtype", typestr))
    if interface.get("data") is None:
        raise ArgumentError(Status.ARGUMENT, "%s: expected an interface with a data pointer, got none" % name)
    item = int(typestr[2:])
    strides = interface.get("strides")
    if strides is not None:
        if any(s % item for s in strides):
            raise ArgumentError(
                Status.ARGUMENT, "%s: expected strides of whole elements, got %s bytes of %d" % (name, strides, item))
        strides = tuple(s // item for s in strides)
    return interface["data"][0], found, tuple(interface["shape"]), strides, (tensor, interface)


def _look_dlpack(name: str, tensor: Any, dtype: Optional[DType]) -> _Looked:
    capsule = tensor.__dlpack__()
    # The capsule is kept and not renamed ("consumed"), so its producer frees the tensor when the capsule is freed.
    t = look_into(capsule)
    found = _DLPACK.get((t.code, t.bits))
    if t.lanes != 1 or (found is None and dtype is None):
        raise _unknown(name, "code %d with %d bits and %d lanes (DLPack)" % (t.code, t.bits, t.lanes))
    strides = tuple(t.strides[:t.ndim]) if t.strides else None
    return (t.data or 0) + t.byte_offset, found, tuple(t.shape[:t.ndim]), strides, capsule
