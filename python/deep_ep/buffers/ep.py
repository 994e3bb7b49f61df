# SPDX-License-Identifier: Apache-2.0
"""EPBuffer: ElasticBuffer's dispatch and combine by the name and the arguments of DeepEP's later development."""

import os
from typing import Any, List, Optional

import torch

from .. import _checks as checks
from .. import _elastic_sizes as sizes
from .. import comm
from .._checks import wrong
from .._eager import eager_class
from ..elastic import ElasticBuffer, EPHandle
from ..utils import EventOverlap
from ..utils.envs import get_sm_read_gbs, get_sm_write_gbs
from .base import BufferBase, Context

__all__ = ["EPBuffer", "EPHandle"]


@eager_class
class EPBuffer(BufferBase, ElasticBuffer):
    """As ElasticBuffer, without a CPU part, and with results that come from the event (defer_epilogue)."""

    barrier = comm.barrier  # type: ignore[assignment]
    _sm_model = sizes.V2_5

    def __init__(self, group: Any, num_bytes: Optional[int] = None, num_max_tokens_per_rank: int = 0, hidden: int = 0,
                 num_topk: int = 0, use_fp8_dispatch: bool = False, lb_allocation_plan_or_num_bytes: Any = 0,
                 deterministic: bool = False, allow_hybrid_mode: bool = True, allow_multiple_reduction: bool = True,
                 prefer_overlap_with_compute: bool = True, sl_idx: Optional[int] = None, num_allocated_qps: int = 0,
                 num_cpu_timeout_secs: int = 300, num_gpu_timeout_secs: int = 100,
                 explicitly_destroy: bool = False) -> None:
        """lb_allocation_plan_or_num_bytes: expected 0; EPX has no region for load balancing."""
        if not isinstance(lb_allocation_plan_or_num_bytes, int) or lb_allocation_plan_or_num_bytes != 0:
            raise wrong("lb_allocation_plan_or_num_bytes", "0: EPX has no region for load balancing",
                        lb_allocation_plan_or_num_bytes)
        super().__init__(
            group, num_bytes, 0, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch, deterministic,
            allow_hybrid_mode, allow_multiple_reduction, prefer_overlap_with_compute, 3 if sl_idx is None else sl_idx,
            num_allocated_qps, num_cpu_timeout_secs, num_gpu_timeout_secs, explicitly_destroy)
        if sl_idx is None and not os.environ.get("EP_OVERRIDE_RDMA_SL"):
            self.sl_idx = int(os.environ.get("EP_DEFAULT_RDMA_SL") or self.sl_idx)
        self.context = Context(self.num_bytes, self.get_physical_domain_size(), self.get_logical_domain_size())

    def destroy(self) -> None:
        """As ElasticBuffer's."""
        super().destroy()
        self.context = None

    def _groups(self) -> List[Any]:
        return [pool.group for pool in self._open()._pools() if not pool.closed]

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int, num_scaleout_topk: int = 0, rdma_gbs: float = 0,
                                nvlink_gbs: float = 0, sm_read_gbs: float = 0, sm_write_gbs: float = 0) -> int:
        """As ElasticBuffer's, by the model of DeepEP 2.5; a rate of 0 is looked up."""
        return super().get_theoretical_num_sms(
            num_experts, num_topk, num_scaleout_topk, rdma_gbs, nvlink_gbs,
            checks.rate("sm_read_gbs", sm_read_gbs, True) or get_sm_read_gbs(),
            checks.rate("sm_write_gbs", sm_write_gbs, True) or get_sm_write_gbs())

    def dispatch(self, x: Any, topk_idx: Optional[torch.Tensor] = None,  # type: ignore[override]
                 topk_weights: Optional[torch.Tensor] = None,
                 cumulative_local_expert_recv_stats: Optional[torch.Tensor] = None, num_experts: Optional[int] = None,
                 num_max_tokens_per_rank: Optional[int] = None, expert_alignment: Optional[int] = None,
                 num_sms: int = 0, num_qps: int = 0, previous_event: Any = None,
                 async_with_compute_stream: bool = False, allocate_on_comm_stream: bool = False,
                 handle: Optional[EPHandle] = None, do_handle_copy: bool = False, do_cpu_sync: Optional[bool] = None,
                 do_expand: bool = False, do_zero_padding: bool = False, use_tma_aligned_col_major_sf: bool = False,
                 defer_epilogue: bool = False) -> Any:
        """As ElasticBuffer.dispatch(). With defer_epilogue, returns an event whose current_stream_wait() returns the
        other four results. All work is queued here all the same, and with do_cpu_sync the host waits here."""
        _check_deferred(defer_epilogue, async_with_compute_stream)
        result = super().dispatch(
            x, topk_idx, topk_weights, cumulative_local_expert_recv_stats, num_experts, num_max_tokens_per_rank,
            expert_alignment, num_sms, num_qps, previous_event, None, async_with_compute_stream,
            allocate_on_comm_stream, handle, do_handle_copy, do_cpu_sync, do_expand, do_zero_padding,
            use_tma_aligned_col_major_sf)
        return _deferred(result) if defer_epilogue else result

    def combine(self, x: torch.Tensor, handle: EPHandle,  # type: ignore[override]
                topk_weights: Optional[torch.Tensor] = None, bias: Any = None, num_sms: int = 0, num_qps: int = 0,
                previous_event: Any = None, async_with_compute_stream: bool = False,
                allocate_on_comm_stream: bool = False, defer_epilogue: bool = False) -> Any:
        """As ElasticBuffer.combine(). With defer_epilogue, returns an event whose current_stream_wait() returns the
        other two results."""
        _check_deferred(defer_epilogue, async_with_compute_stream)
        result = super().combine(x, handle, topk_weights, bias, num_sms, num_qps, previous_event, None,
                                 async_with_compute_stream, allocate_on_comm_stream)
        return _deferred(result) if defer_epilogue else result


def _check_deferred(defer_epilogue: bool, asynchronous: bool) -> None:
    if defer_epilogue and not asynchronous:
        raise wrong("defer_epilogue", "async_with_compute_stream=True with it", "async_with_compute_stream=False")


def _deferred(result: Any) -> EventOverlap:
    event: EventOverlap = result[-1]
    event.register_hook_after_wait(lambda: result[:-1])
    return event
