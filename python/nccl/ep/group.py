# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks, their masks and their errors."""

import ctypes
import dataclasses
from typing import Any, List, Optional, Sequence, Union

from . import _abi
from ._bound import address, bound, stream_pointer
from ._library import call, load
from .allocator import AllocConfig
from .enums import Algorithm, Layout, OverflowPolicy, ZeroCopyMode
from .handle import Handle, HandleConfig, LayoutInfo
from .tensor import Tensor


@bound(_abi.GroupConfigStruct)
class GroupConfig:
    """ncclEpGroupConfig_t; 0 is NCCL_EP_AUTO where the field has one."""

    algorithm: Algorithm = Algorithm.LOW_LATENCY
    num_experts: int = 0
    max_dispatch_tokens_per_rank: int = 0
    max_recv_tokens_per_rank: int = 0
    max_token_bytes: int = 0
    rdma_buffer_size: int = 0
    num_qp_per_rank: int = 0
    num_channels: int = 0
    max_num_sms: int = 0
    alloc: AllocConfig = dataclasses.field(default_factory=AllocConfig)
    enable_mask: bool = False
    timeout_ns: int = 0
    zero_copy: ZeroCopyMode = ZeroCopyMode.AUTO
    overflow_policy: OverflowPolicy = OverflowPolicy.AUTO
    num_topk: int = 0
    dispatch_num_sms: int = 0
    combine_num_sms: int = 0


def synchronize(stream: Any = None) -> None:
    """CPU device: waits for the work of a stream. A GPU's streams are waited for by the GPU's own means."""
    call("ncclEpxStreamSynchronize", stream_pointer(stream))


class Group:
    """Ranks that exchange tokens."""

    def __init__(self, ptr: int) -> None:
        self._ptr = ptr
        self._nranks = 0

    @classmethod
    def create(cls, comm: Any, config: GroupConfig) -> "Group":
        """Collective over the ranks of `comm`, anything whose `ptr` is an ncclComm_t."""
        ptr = ctypes.c_void_p()
        load()
        call("ncclEpCreateGroup", ctypes.byref(ptr), int(comm.ptr), address(config))
        group = cls(ptr.value or 0)
        group._nranks = int(getattr(comm, "nranks", 0))
        return group

    @property
    def ptr(self) -> int:
        """The ncclEpGroup_t."""
        if not self._ptr:
            raise _abi.NcclInvalid("Group: it has been destroyed")
        return self._ptr

    def create_handle(self, layout: Layout, topk_idx: Tensor, *, layout_info: Optional[LayoutInfo] = None,
                      config: Optional[HandleConfig] = None, stream: Any) -> Handle:
        """A handle with its first routing."""
        ptr = ctypes.c_void_p()
        call("ncclEpCreateHandle", ctypes.byref(ptr), self.ptr, int(layout), topk_idx.ptr, address(layout_info),
             address(config), stream_pointer(stream))
        return Handle(ptr.value or 0, topk_idx)

    def destroy(self) -> None:
        if self._ptr:
            call("ncclEpGroupDestroy", self._ptr)
            self._ptr = 0

    def __repr__(self) -> str:
        return "<Group ptr=%#x>" % self._ptr if self._ptr else "<Group destroyed>"

    # What NVIDIA's package does not have.

    def handle_mem_size(self, layout: Layout, num_topk: int, *, config: Optional[HandleConfig] = None) -> int:
        """Bytes of memory that a handle needs."""
        size = ctypes.c_size_t()
        call("ncclEpHandleMemSize", self.ptr, int(layout), address(config), ctypes.byref(size), num_topk)
        return size.value

    def init_handle(self, layout: Layout, num_topk: int, *, handle_mem: Optional[Tensor] = None,
                    config: Optional[HandleConfig] = None) -> Handle:
        """A handle without a routing, in memory of the caller's if that is given."""
        ptr = ctypes.c_void_p()
        call("ncclEpInitHandle", ctypes.byref(ptr), self.ptr, int(layout), address(config), num_topk,
             handle_mem.ptr if handle_mem is not None else 0)
        return Handle(ptr.value or 0, memory=handle_mem)

    def mask_query(self, mask: Union[Tensor, int], *, stream: Any = None) -> None:
        """Writes an int32 per rank to `mask`, a tensor or an address in memory of the device: 1 active, 0 masked."""
        call("ncclEpMaskQuery", self.ptr, mask if isinstance(mask, int) else mask.data, stream_pointer(stream))

    def mask_update(self, mask: Union[Sequence[int], int], *, stream: Any = None) -> None:
        """Sets the mask: one number per rank, or the address of as many int32 in memory of the host."""
        if isinstance(mask, int):
            call("ncclEpMaskUpdate", self.ptr, mask, stream_pointer(stream))
            return
        if self._nranks and len(mask) != self._nranks:
            raise _abi.NcclInvalid("mask_update: expected %d numbers, got %d" % (self._nranks, len(mask)))
        values: List[int] = [int(bool(value)) for value in mask]
        call("ncclEpMaskUpdate", self.ptr, (ctypes.c_int * len(values))(*values), stream_pointer(stream))

    def set_timeout_ns(self, timeout_ns: Optional[int]) -> None:
        """Another GroupConfig.timeout_ns, for a group of one node; None and 0 are the default. Every rank calls it."""
        call("ncclEpxSetTimeout", self.ptr, timeout_ns or 0)

    def mask_clean(self, *, stream: Any = None) -> None:
        """Makes all ranks active again. The ranks that are not masked call it together."""
        call("ncclEpMaskClean", self.ptr, stream_pointer(stream))

    def async_error(self) -> bool:
        """Has an operation failed, or a rank been masked, since error_clear()? Of groups without masks, too."""
        error = ctypes.c_int()
        call("ncclEpxGetAsyncError", self.ptr, ctypes.byref(error))
        return error.value != 0

    get_async_error = async_error

    def error_clear(self) -> None:
        call("ncclEpxErrorClear", self.ptr)
