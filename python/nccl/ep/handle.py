# SPDX-License-Identifier: Apache-2.0
"""Handles: one routing each, and the arguments of dispatch and combine."""

import dataclasses
from typing import Any, Optional

from . import _abi
from ._bound import address, bound, stream_pointer
from ._library import call
from .enums import CombineQuantizationRecipe, DispatchQuantizationRecipe, ExpertIdKind, PassDir
from .tensor import Tensor


@bound(_abi.HandleConfigStruct)
class HandleConfig:
    """High throughput, EXPERT_MAJOR: the zone of each expert starts at a multiple of this many rows."""

    dispatch_output_per_expert_alignment: int = 0


@bound(_abi.DispatchConfigStruct)
class DispatchConfig:
    send_only: int = 0  # low latency: the receive half is complete()'s
    round_scales: int = 0
    pass_direction: PassDir = PassDir.FWD
    quantization_recipe: DispatchQuantizationRecipe = dataclasses.field(
        default=DispatchQuantizationRecipe.NONE, metadata={"lowpp": "quant_recipe"})


@bound(_abi.CombineConfigStruct)
class CombineConfig:
    send_only: int = 0
    pass_direction: PassDir = PassDir.FWD
    quantization_recipe: CombineQuantizationRecipe = dataclasses.field(
        default=CombineQuantizationRecipe.NONE, metadata={"lowpp": "quant_recipe"})


@bound(_abi.LayoutInfoStruct)
class LayoutInfo:
    """Tensors that counts are written to: high throughput's at the update, low latency's at the dispatch."""

    expert_counters: Optional[Tensor] = None
    src_rank_counters: Optional[Tensor] = None
    expert_offsets: Optional[Tensor] = None
    recv_total_counter: Optional[Tensor] = None
    recv_topk_idx_kind: ExpertIdKind = ExpertIdKind.AUTO


@bound(_abi.DispatchInputsStruct)
class DispatchInputs:
    tokens: Optional[Tensor] = None
    topk_weights: Optional[Tensor] = None
    scales: Optional[Tensor] = None


@bound(_abi.DispatchOutputsStruct)
class DispatchOutputs:
    tokens: Optional[Tensor] = None
    topk_weights: Optional[Tensor] = None
    scales: Optional[Tensor] = None
    topk_idx: Optional[Tensor] = None


@bound(_abi.CombineInputsStruct)
class CombineInputs:
    tokens: Optional[Tensor] = None
    topk_weights: Optional[Tensor] = None
    scales: Optional[Tensor] = None


@bound(_abi.CombineOutputsStruct)
class CombineOutputs:
    tokens: Optional[Tensor] = None
    topk_weights: Optional[Tensor] = None  # low latency, EXPERT_MAJOR: read


class Handle:
    """Made by Group.create_handle or Group.init_handle."""

    def __init__(self, ptr: int, topk_idx: Optional[Tensor] = None, memory: Optional[Tensor] = None) -> None:
        self._ptr = ptr
        self._routing = topk_idx  # low latency reads it again at each dispatch and combine
        self._memory = memory  # with the handle's tables

    @property
    def ptr(self) -> int:
        """The ncclEpHandle_t."""
        if not self._ptr:
            raise _abi.NcclInvalid("Handle: it has been destroyed")
        return self._ptr

    def update(self, topk_idx: Tensor, *, layout_info: Optional[LayoutInfo] = None, stream: Any) -> None:
        """Another routing. High throughput: collective."""
        call("ncclEpUpdateHandle", self.ptr, topk_idx.ptr, address(layout_info), stream_pointer(stream))
        self._routing = topk_idx

    def dispatch(self, inputs: DispatchInputs, outputs: DispatchOutputs, *, layout_info: Optional[LayoutInfo] = None,
                 config: Optional[DispatchConfig] = None, stream: Any) -> None:
        call("ncclEpDispatch", self.ptr, address(inputs), address(outputs), address(layout_info), address(config),
             stream_pointer(stream))

    def combine(self, inputs: CombineInputs, outputs: CombineOutputs, *, config: Optional[CombineConfig] = None,
                stream: Any) -> None:
        call("ncclEpCombine", self.ptr, address(inputs), address(outputs), address(config), stream_pointer(stream))

    def complete(self, *, config: int = 0, stream: Any) -> None:
        """The receive half of what was sent with send_only."""
        call("ncclEpComplete", self.ptr, config, stream_pointer(stream))

    def destroy(self) -> None:
        if self._ptr:
            call("ncclEpHandleDestroy", self._ptr)
            self._ptr, self._routing, self._memory = 0, None, None

    def __repr__(self) -> str:
        return "<Handle ptr=%#x>" % self._ptr if self._ptr else "<Handle destroyed>"
