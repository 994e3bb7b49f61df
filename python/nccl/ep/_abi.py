# SPDX-License-Identifier: Apache-2.0
"""The structs and functions of nccl_ep.h (API version 3) for ctypes, and its errors."""

import ctypes
import enum
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ulong, c_void_p
from typing import Any

MAGIC = 0xC00FFFEE
TENSOR_MAGIC = 0xCAFECAFE
# nccl4py sends 1 as well: the size of a struct says which fields it has.
API_VERSION = 1


class DataType(enum.IntEnum):
    """ncclDataType_t."""

    INT8 = 0
    UINT8 = 1
    INT32 = 2
    UINT32 = 3
    INT64 = 4
    UINT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    FLOAT8E4M3 = 10
    FLOAT8E5M2 = 11
    FLOAT4X2 = 12


class NcclInvalid(ValueError):
    """A call that cannot be made: a destroyed object, or an argument that does not fit."""

    __module__ = "nccl.ep"


class NCCLEpError(RuntimeError):
    """A call of libnccl_ep.so that failed; `status` is its ncclResult_t."""

    __module__ = "nccl.ep"

    def __init__(self, status: int, message: str = "") -> None:
        super().__init__("NCCL EP error code %d%s" % (status, ": " + message if message else ""))
        self.status = status


class Struct(ctypes.Structure):
    """A struct of nccl_ep.h: its size and its magic number are set."""

    MAGIC = MAGIC

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        if self._fields_[0][0] == "size":
            self.size, self.magic = ctypes.sizeof(self), self.MAGIC

    @property
    def ptr(self) -> int:
        return ctypes.addressof(self)


_HEAD = [("size", c_uint), ("magic", c_uint)]


class TensorStruct(Struct):
    MAGIC = TENSOR_MAGIC
    _fields_ = [*_HEAD, ("ndim", c_uint), ("datatype", c_int), ("data", c_void_p), ("win_hdl", c_void_p),
                ("win_offset", c_uint64), ("sizes", POINTER(c_size_t))]


class AllocConfigStruct(Struct):
    _fields_ = [("alloc_fn", c_void_p), ("free_fn", c_void_p), ("context", c_void_p)]


class GroupConfigStruct(Struct):
    _fields_ = [
        *_HEAD, ("version", c_uint), ("algorithm", c_int), ("num_experts", c_uint),
        ("max_dispatch_tokens_per_rank", c_uint), ("max_recv_tokens_per_rank", c_uint), ("max_token_bytes", c_uint),
        ("rdma_buffer_size", c_ulong), ("num_qp_per_rank", c_uint), ("num_channels", c_uint), ("max_num_sms", c_uint),
        ("alloc", AllocConfigStruct), ("enable_mask", c_uint), ("timeout_ns", c_uint64), ("zero_copy", c_int),
        ("overflow_policy", c_int), ("num_topk", c_uint), ("padding_v2", c_ubyte * 4), ("dispatch_num_sms", c_uint),
        ("combine_num_sms", c_uint),
    ]

    def __init__(self, **fields: Any) -> None:
        super().__init__(version=API_VERSION, **fields)


class HandleConfigStruct(Struct):
    _fields_ = [*_HEAD, ("dispatch_output_per_expert_alignment", c_size_t)]


class DispatchConfigStruct(Struct):
    _fields_ = [*_HEAD, ("send_only", c_uint), ("round_scales", c_uint), ("pass_direction", c_int),
                ("quant_recipe", c_int)]


class CombineConfigStruct(Struct):
    _fields_ = [*_HEAD, ("send_only", c_uint), ("pass_direction", c_int), ("quant_recipe", c_int)]


class LayoutInfoStruct(Struct):
    _fields_ = [*_HEAD, ("expert_counters", c_void_p), ("src_rank_counters", c_void_p), ("expert_offsets", c_void_p),
                ("recv_total_counter", c_void_p), ("recv_topk_idx_kind", c_int), ("padding_v2", c_ubyte * 4)]


class DispatchInputsStruct(Struct):
    _fields_ = [*_HEAD, ("tokens", c_void_p), ("topk_weights", c_void_p), ("scales", c_void_p)]


class DispatchOutputsStruct(Struct):
    _fields_ = [*_HEAD, ("tokens", c_void_p), ("topk_weights", c_void_p), ("scales", c_void_p), ("topk_idx", c_void_p)]


class CombineInputsStruct(Struct):
    _fields_ = [*_HEAD, ("tokens", c_void_p), ("topk_weights", c_void_p), ("scales", c_void_p)]


class CombineOutputsStruct(Struct):
    _fields_ = [*_HEAD, ("tokens", c_void_p), ("topk_weights", c_void_p)]


STRUCTS = {
    "ncclEpTensor_t": TensorStruct, "ncclEpAllocConfig_t": AllocConfigStruct, "ncclEpGroupConfig_t": GroupConfigStruct,
    "ncclEpHandleConfig_t": HandleConfigStruct, "ncclEpDispatchConfig_t": DispatchConfigStruct,
    "ncclEpCombineConfig_t": CombineConfigStruct, "ncclEpLayoutInfo_t": LayoutInfoStruct,
    "ncclEpDispatchInputs_t": DispatchInputsStruct, "ncclEpDispatchOutputs_t": DispatchOutputsStruct,
    "ncclEpCombineInputs_t": CombineInputsStruct, "ncclEpCombineOutputs_t": CombineOutputsStruct,
}

# "p" a pointer, an address or a stream; "i" an int; "l" a uint64. All return an ncclResult_t but ncclEpxGetLastError.
FUNCTIONS = {
    "ncclEpGetVersion": "p", "ncclEpCreateGroup": "ppp", "ncclEpGroupDestroy": "p", "ncclEpHandleMemSize": "pippi",
    "ncclEpInitHandle": "ppipip", "ncclEpUpdateHandle": "pppp", "ncclEpCreateHandle": "ppipppp",
    "ncclEpHandleDestroy": "p", "ncclEpDispatch": "pppppp", "ncclEpCombine": "ppppp", "ncclEpComplete": "ppp",
    "ncclEpMaskQuery": "ppp", "ncclEpMaskUpdate": "ppp", "ncclEpMaskClean": "pp", "ncclEpGetAsyncError": "pp",
    "ncclEpErrorClear": "p", "ncclEpxGetAsyncError": "pp", "ncclEpxErrorClear": "p",
    "ncclEpxSetTimeout": "pl", "ncclEpxStreamSynchronize": "p", "ncclEpxGetLastError": "",
}


def declare(library: ctypes.CDLL) -> None:
    """Gives the functions of libnccl_ep.so their types."""
    for name, kinds in FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes = [{"i": c_int, "l": c_uint64}.get(kind, c_void_p) for kind in kinds]
        function.restype = c_char_p if name == "ncclEpxGetLastError" else c_int
