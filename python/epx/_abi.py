# SPDX-License-Identifier: Apache-2.0
"""The structs, enums and prototypes of include/epx/epx.h in ctypes. tests/test_abi.py compares them with the header."""

import ctypes
import enum
from ctypes import (POINTER, c_char, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p)
from typing import List

MAX_NDIM = 4
MAX_TOPK = 32
TICKET_BYTES = 8192
HANDLE_COMPACT_TOPK = 1
HANDLE_SOURCE_MAP = 2
SUM_TOPK_ORDER = 1
SUM_ROUND_RANKS = 2
SUM_ROUND_NODES = 4
SUM_MXFP8 = 8


class DType(enum.IntEnum):
    """Element types (``epx_dtype``). FP8_E4M3 is OCP e4m3 "fn": no infinities, maximum 448."""

    BF16 = 1
    FP16 = 2
    FP32 = 3
    FP8_E4M3 = 4
    INT32 = 5
    INT64 = 6
    UINT8 = 7


class Device(enum.IntEnum):
    """The device of a group's tensors (``epx_device``). AUTO is the CPU unless ``EPX_DEVICE`` names another device."""

    AUTO = 0
    CPU = 1
    CUDA = 2
    HIP = 3


class Mode(enum.IntEnum):
    """The mode of a handle (``epx_mode``). Combined as bits: the modes that a group supports."""

    LOW_LATENCY = 1
    HIGH_THROUGHPUT = 2


class Layout(enum.IntEnum):
    """The layout of received rows (``epx_layout``). Low latency supports EXPERT_MAJOR and RANK_MAJOR; high throughput
    supports EXPERT_MAJOR and FLAT."""

    EXPERT_MAJOR = 1
    RANK_MAJOR = 2
    FLAT = 3


class RecvPart(enum.IntEnum):
    """Parts of EPX's own receive buffer (``epx_recv_part``)."""

    TOKENS = 1
    SCALES = 2


class Direction(enum.IntEnum):
    """The direction of a high-throughput operation (``epx_direction``). BACKWARD is for gradients."""

    FORWARD = 0
    BACKWARD = 1


ELEMENT_BYTES = {
    DType.BF16: 2, DType.FP16: 2, DType.FP32: 4, DType.FP8_E4M3: 1, DType.INT32: 4, DType.INT64: 8, DType.UINT8: 1,
}


class Struct(ctypes.Structure):
    """A struct whose first field is its own size, like all structs of EPX."""

    def __init__(self, **fields) -> None:
        super().__init__(**fields)
        self.size = ctypes.sizeof(self)

    @classmethod
    def names(cls) -> List[str]:
        """The names of the fields, without ``size`` and ``reserved``."""
        return [field[0] for field in cls._fields_ if field[0] not in ("size", "reserved")]


class TensorStruct(Struct):
    _fields_ = [
        ("size", c_uint32), ("dtype", c_int32), ("ndim", c_int32), ("reserved", c_uint32), ("data", c_void_p),
        ("shape", c_int64 * MAX_NDIM), ("stride", c_int64 * MAX_NDIM),
    ]


ALLGATHER = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_size_t)


class BootstrapStruct(Struct):
    _fields_ = [
        ("size", c_uint32), ("rank", c_int32), ("nranks", c_int32), ("reserved", c_uint32), ("allgather", ALLGATHER),
        ("context", c_void_p),
    ]


class WorldStruct(Struct):
    _fields_ = [
        ("size", c_uint32), ("rank", c_int32), ("nranks", c_int32), ("local_rank", c_int32), ("local_nranks", c_int32),
        ("port", c_int32), ("host", c_char * 512), ("launcher", c_char * 32),
    ]


class GroupConfigStruct(Struct):
    _fields_ = [
        ("size", c_uint32), ("device", c_int32), ("device_index", c_int32), ("modes", c_uint32),
        ("num_experts", c_int32), ("max_tokens_per_rank", c_int32), ("max_hidden_bytes", c_int32),
        ("max_topk", c_int32), ("max_recv_tokens", c_int32), ("layouts", c_uint32), ("max_inflight", c_int32),
        ("num_agents", c_int32), ("ranks_per_node", c_int32), ("enable_mask", c_int32), ("timeout_ms", c_int32),
        ("alloc_bytes", c_uint64), ("net", c_char * 16), ("device_alloc", c_void_p), ("device_free", c_void_p),
        ("device_context", c_void_p), ("ht_buffer_bytes", c_uint64), ("ht_node_bytes", c_uint64),
        ("use_fabric", c_int32), ("reserved", c_int32),
    ]


class GroupInfoStruct(Struct):
    _fields_ = [
        ("size", c_uint32), ("rank", c_int32), ("nranks", c_int32), ("node", c_int32), ("nnodes", c_int32),
        ("ranks_per_node", c_int32), ("num_experts", c_int32), ("local_experts", c_int32), ("device", c_int32),
        ("num_agents", c_int32), ("timeout_ms", c_int32), ("max_recv_tokens", c_int32), ("device_name", c_char * 32),
        ("net_name", c_char * 16),
    ]


class MemoryInfoStruct(Struct):
    _fields_ = [
        ("size", c_uint32), ("reserved", c_uint32), ("heap_bytes", c_uint64), ("control_bytes", c_uint64),
        ("low_latency_bytes", c_uint64), ("high_throughput_bytes", c_uint64), ("alloc_bytes", c_uint64),
        ("ll_receive_bytes", c_uint64), ("ht_receive_bytes", c_uint64),
    ]


class HandleConfigStruct(Struct):
    _fields_ = [
        ("size", c_uint32), ("mode", c_int32), ("layout", c_int32), ("topk", c_int32), ("expert_alignment", c_int32),
        ("flags", c_uint32), ("memory", c_void_p), ("memory_bytes", c_uint64), ("drop_rows", c_int32),
        ("reserved", c_uint32),
    ]


_TENSOR = POINTER(TensorStruct)


class DispatchLayoutOutputsStruct(Struct):
    _fields_ = [
        ("size", c_uint32), ("reserved", c_uint32), ("tokens_per_rank", _TENSOR), ("tokens_per_node", _TENSOR),
        ("tokens_per_expert", _TENSOR), ("token_in_rank", _TENSOR),
    ]


class LayoutInfoStruct(Struct):
    _fields_ = [
        ("size", c_uint32), ("expected_rows", c_uint32), ("expert_counts", _TENSOR), ("expert_offsets", _TENSOR),
        ("rank_counts", _TENSOR), ("total", _TENSOR), ("layout_range", _TENSOR), ("expert_stats", _TENSOR),
        ("wait_ns", _TENSOR), ("rank_matrix", _TENSOR), ("rank_tokens", _TENSOR), ("relay_counts", _TENSOR),
        ("expert_rows", _TENSOR), ("expert_ends", _TENSOR), ("source_ends", _TENSOR), ("drop_rows", c_uint32),
        ("reserved", c_uint32),
    ]


class DispatchInputsStruct(Struct):
    _fields_ = [
        ("size", c_uint32), ("reserved", c_uint32), ("tokens", _TENSOR), ("scales", _TENSOR), ("topk_weights", _TENSOR),
        ("topk_idx", _TENSOR), ("global_scale", _TENSOR),
    ]


class DispatchOutputsStruct(Struct):
    _fields_ = [
        ("size", c_uint32), ("reserved", c_uint32), ("tokens", _TENSOR), ("scales", _TENSOR), ("topk_weights", _TENSOR),
        ("topk_idx", _TENSOR), ("src_rank", _TENSOR), ("src_token", _TENSOR), ("source_map", _TENSOR),
    ]


class DispatchConfigStruct(Struct):
    _fields_ = [
        ("size", c_uint32), ("send_only", c_int32), ("round_scale", c_int32), ("direction", c_int32),
        ("source_stride", c_int32), ("global_ids", c_int32), ("max_sms", c_int32), ("if_expected", c_int32),
        ("nvfp4", c_int32), ("reserved", c_uint32),
    ]


class CombineInputsStruct(Struct):
    _fields_ = [
        ("size", c_uint32), ("reserved", c_uint32), ("tokens", _TENSOR), ("topk_weights", _TENSOR),
        ("bias", _TENSOR * 2), ("row_scales", _TENSOR), ("signals", _TENSOR), ("topk_idx", _TENSOR),
    ]


class CombineOutputsStruct(Struct):
    _fields_ = [("size", c_uint32), ("reserved", c_uint32), ("tokens", _TENSOR), ("topk_weights", _TENSOR)]


class CombineConfigStruct(Struct):
    _fields_ = [
        ("size", c_uint32), ("send_only", c_int32), ("logfmt", c_int32), ("direction", c_int32), ("wait_ns", _TENSOR),
        ("sum", c_uint32), ("max_sms", c_int32), ("nvfp4", c_int32), ("signal_rows", c_int32),
        ("signal_value", c_uint32), ("reserved", c_uint32),
    ]


class ErrorInfoStruct(Struct):
    _fields_ = [
        ("size", c_uint32), ("status", c_int32), ("rank", c_int32), ("peer", c_int32), ("expected", c_int64),
        ("seen", c_int64), ("phase", c_char * 32), ("message", c_char * 256),
    ]


class StatsStruct(Struct):
    _fields_ = [("size", c_uint32), ("reserved", c_uint32)] + [
        (name, c_uint64) for name in (
            "ll_dispatches", "ll_combines", "ht_updates", "ht_dispatches", "ht_combines", "rows_sent", "rows_received",
            "rows_returned", "bytes_peer", "bytes_local", "waits", "wait_ns", "timeouts", "rows_remote",
            "net_commands", "net_puts", "net_signals", "net_bytes", "net_arrivals", "net_window_waits", "net_sleeps",
            "net_refused", "net_stuck")
    ]


# The C name of each struct.
STRUCTS = {
    "epx_tensor": TensorStruct, "epx_bootstrap": BootstrapStruct, "epx_world": WorldStruct,
    "epx_group_config": GroupConfigStruct,
    "epx_group_info": GroupInfoStruct, "epx_memory_info": MemoryInfoStruct, "epx_handle_config": HandleConfigStruct,
    "epx_dispatch_layout_outputs": DispatchLayoutOutputsStruct,
    "epx_layout_info": LayoutInfoStruct, "epx_dispatch_inputs": DispatchInputsStruct,
    "epx_dispatch_outputs": DispatchOutputsStruct, "epx_dispatch_config": DispatchConfigStruct,
    "epx_combine_inputs": CombineInputsStruct, "epx_combine_outputs": CombineOutputsStruct,
    "epx_combine_config": CombineConfigStruct, "epx_error_info": ErrorInfoStruct, "epx_stats": StatsStruct,
}

# The argument types of each function: "p" a pointer or an address, "i" an int, "z" a size_t, "l" an int64. All
# functions return a status, except those in OTHER_RESULTS.
FUNCTIONS = {
    "epx_strerror": "i", "epx_last_error": "", "epx_version": "p", "epx_dtype_size": "i",
    "epx_world_query": "p",
    "epx_group_create": "ppp", "epx_group_ticket": "ppz", "epx_group_join": "ppipi", "epx_group_destroy": "p",
    "epx_group_query": "pp", "epx_group_set_timeout": "pi", "epx_group_memory": "pip",
    "epx_alloc": "pzp", "epx_free": "pp", "epx_register": "ppzpp",
    "epx_stream_create": "pp", "epx_stream_destroy": "pp", "epx_stream_sync": "pp", "epx_stream_query": "pp",
    "epx_stream_call": "pppp", "epx_event_create": "pp", "epx_event_destroy": "p", "epx_event_record": "pp",
    "epx_event_sync": "p", "epx_event_query": "p", "epx_stream_wait_event": "ppp",
    "epx_graph_begin": "pp", "epx_graph_end": "ppp", "epx_graph_launch": "pp", "epx_graph_destroy": "p",
    "epx_handle_create": "ppp", "epx_handle_destroy": "p", "epx_handle_memory": "ppp", "epx_handle_update": "pppp",
    "epx_dispatch_layout": "pppp", "epx_handle_recv_poll": "pl", "epx_handle_recv_tokens": "pp",
    "epx_handle_recv_fits": "pp",
    "epx_handle_recv_count": "ppp", "epx_handle_recv_tensor": "piillp",
    "epx_dispatch": "pppppp", "epx_combine": "ppppp", "epx_complete": "pp",
    "epx_mask_query": "ppp", "epx_mask_update": "ppp", "epx_mask_clean": "pp",
    "epx_mask_clean_active": "pp", "epx_mask_left_out": "pp",
    "epx_group_error": "pp", "epx_group_error_clear": "p", "epx_group_abort": "pi",
    "epx_group_order_with": "pp", "epx_group_stats": "pp", "epx_group_stats_reset": "p",
}
OTHER_RESULTS = {"epx_strerror": c_char_p, "epx_last_error": c_char_p, "epx_dtype_size": c_size_t}
_KINDS = {"p": c_void_p, "i": c_int, "z": c_size_t, "l": c_int64}


# These functions may wait for work or for other ranks, so they are called without Python's global lock. All others are
# called with the lock held. Reason: memory is freed and events are destroyed in whichever thread drops the last
# reference to a tensor, and no other thread may be inside the same group at that moment.
WAITING = {
    "epx_group_create", "epx_group_join", "epx_group_destroy",
    "epx_stream_destroy", "epx_stream_sync", "epx_event_sync",
    "epx_handle_destroy", "epx_handle_recv_count", "epx_handle_recv_poll", "epx_handle_recv_tokens",
    "epx_handle_recv_fits", "epx_mask_clean", "epx_mask_clean_active", "epx_group_error_clear",
}


def declare(library: ctypes.CDLL) -> None:
    """Sets the argument and result types of every function, and which of them are called with Python's lock held."""
    locked = ctypes.PyDLL(library._name, handle=library._handle)
    for name, arguments in FUNCTIONS.items():
        function = getattr(library if name in WAITING else locked, name)
        function.argtypes = [_KINDS[kind] for kind in arguments]
        function.restype = OTHER_RESULTS.get(name, c_int)
        setattr(library, name, function)
