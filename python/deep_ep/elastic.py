# SPDX-License-Identifier: Apache-2.0
"""ElasticBuffer: DeepEP's V2 interface."""

import atexit
import contextlib
import os
import warnings
import weakref
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, Union

import epx
import torch

from . import _checks as checks
from . import _elastic_dispatch as operations
from . import _elastic_sizes as sizes
from . import _unused as unused
from ._checks import refused, wrong
from ._eager import eager_class
from ._elastic_dispatch import Domains
from ._elastic_engine import ElasticEngine, ElasticSettings, local_index
from ._elastic_engram import Engram, check_storage
from ._elastic_gather import Gathers
from ._elastic_handle import EPHandle
from ._elastic_move import Barriers, default_device
from ._elastic_pipeline import Pipeline
from ._elastic_streams import comm_stream, launcher
from ._domains import get_logical_domain_size, get_physical_domain_size
from ._streams import refuse_capture
from .buffer import Runtime
from .utils import EventHandle, EventOverlap
from .utils.envs import check_fast_rdma_atomic_support, check_torch_deterministic, get_nvlink_gbs, get_rdma_gbs

__all__ = ["ElasticBuffer", "EPHandle", "get_logical_domain_size", "get_physical_domain_size"]

_Tokens = Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
_living: "weakref.WeakSet[ElasticBuffer]" = weakref.WeakSet()
_MOST_SMS = 2**31 - 1  # of EPX's argument: at most so many are used
_WHOLE_GPU_SMS = 132  # where there is no GPU to ask
_CPU_NVLINK_GBS = 430.0


@eager_class
class ElasticBuffer:
    """Expert-parallel communication for a group of ranks, inside a node and between nodes, for CUDA and CPU tensors.

    Creating a buffer is collective; releasing it is not. docs/python.md lists the differences from DeepEP.
    """

    _use_fabric = False  # GPUs of several hosts may be one node: HybridEPBuffer's use_mnnvl
    _sm_model = sizes.V2

    def __init__(self, group: Any, num_bytes: Optional[int] = None, num_cpu_bytes: int = 0,
                 num_max_tokens_per_rank: int = 0, hidden: int = 0, num_topk: int = 0, use_fp8_dispatch: bool = False,
                 deterministic: bool = False, allow_hybrid_mode: bool = True, allow_multiple_reduction: bool = True,
                 prefer_overlap_with_compute: bool = True, sl_idx: int = 3, num_allocated_qps: int = 0,
                 num_cpu_timeout_secs: int = 300, num_gpu_timeout_secs: int = 100,
                 explicitly_destroy: bool = False) -> None:
        """`group` is a torch.distributed group of any backend. Without num_bytes, the next sizes give it. EPX creates
        its memory in the first dispatch, where the number of experts is known. Received rows are always sorted, as with
        `deterministic`. prefer_overlap_with_compute counts in get_theoretical_num_sms() alone; sl_idx and
        num_allocated_qps have no effect."""
        group = checks.process_group(group)
        num_cpu_bytes, num_max_tokens_per_rank, hidden, num_allocated_qps, sl_idx = (
            checks.positive(name, value, 0) for name, value in (
                ("num_cpu_bytes", num_cpu_bytes), ("num_max_tokens_per_rank", num_max_tokens_per_rank),
                ("hidden", hidden), ("num_allocated_qps", num_allocated_qps), ("sl_idx", sl_idx)))
        num_topk = checks.topk("num_topk", num_topk)
        num_cpu_timeout_secs = checks.positive("num_cpu_timeout_secs", num_cpu_timeout_secs)
        num_gpu_timeout_secs = checks.positive("num_gpu_timeout_secs", num_gpu_timeout_secs)
        self.num_cpu_bytes = num_cpu_bytes
        self.explicitly_destroy = explicitly_destroy
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.deterministic = deterministic
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.sl_idx = int(os.environ.get("EP_OVERRIDE_RDMA_SL") or sl_idx)
        self.num_cpu_timeout_secs, self.num_gpu_timeout_secs = num_cpu_timeout_secs, num_gpu_timeout_secs
        self.runtime: Optional[Runtime] = None
        bootstrap = epx.bootstrap.from_torch(group)
        num_bytes = _checked_bytes(num_bytes, num_cpu_bytes, num_max_tokens_per_rank, hidden)
        alike = dict(allow_hybrid_mode=int(allow_hybrid_mode), allow_multiple_reduction=int(allow_multiple_reduction))
        if num_bytes is None:
            alike.update(num_max_tokens_per_rank=num_max_tokens_per_rank, hidden=hidden, num_topk=num_topk)
        self._engine = ElasticEngine(bootstrap, ElasticSettings(
            num_bytes or 0, num_max_tokens_per_rank, hidden, num_topk, num_gpu_timeout_secs, self._use_fabric,
            num_cpu_timeout_secs), alike)
        self.group = group
        self.rank_idx, self.num_ranks = bootstrap.rank, bootstrap.nranks
        unused.variables(self.rank_idx)
        self._unused(sl_idx=(sl_idx, 3), num_allocated_qps=(num_allocated_qps, 0))
        self._set_domains()
        self.num_bytes = num_bytes if num_bytes is not None else sizes.buffer_bytes(
            self._domains, self.num_rdma_ranks == 1, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch,
            allow_multiple_reduction)
        self._engine.settings.num_nvl_bytes = self.num_bytes - num_cpu_bytes
        self.num_allocated_qps = num_allocated_qps or sizes.default_qps(  # on one node, too
            allow_hybrid_mode, allow_hybrid_mode and check_fast_rdma_atomic_support())
        self.runtime = Runtime(self._engine)
        self.nccl_comm_handle = None
        self._num_sms: Dict[Any, int] = {}
        self._barriers = Barriers(self._engine)
        self._parts: Dict[str, Any] = {}  # Engram, pipeline and all-gather, once they are configured
        self._old_parts: List[Any] = []  # that were configured again, and that graphs use
        _living.add(self)
        if os.environ.get("EP_BUFFER_DEBUG", "0") not in ("", "0"):
            print("deep_ep.ElasticBuffer: rank %d of %d, %d x %d domains, %d bytes" % (
                self.rank_idx, self.num_ranks, *self._domains, self.num_bytes), flush=True)

    def _set_domains(self) -> None:
        per = local_index(self._engine.node_of)
        self.num_nvlink_ranks = per if per is not None else self.num_ranks
        self.num_rdma_ranks = self.num_ranks // self.num_nvlink_ranks
        hybrid = self.allow_hybrid_mode and self.num_rdma_ranks > 1
        self._domains = Domains(self.num_rdma_ranks, self.num_nvlink_ranks) if hybrid else Domains(1, self.num_ranks)
        self.num_scaleout_ranks, self.num_scaleup_ranks = self._domains
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(self.rank_idx, self.num_scaleup_ranks)

    def _unused(self, **given: Any) -> None:
        unused.arguments(self.rank_idx, "deep_ep.ElasticBuffer", **given)

    # ---- Lifetime

    def destroy(self) -> None:
        """Destroys the buffer; needs explicitly_destroy=True. Local. Result tensors stay valid while they are
        referenced. A second call does nothing."""
        if not self.explicitly_destroy:
            raise refused("destroy: expected a buffer created with explicitly_destroy=True")
        self._close(True)

    def recover(self, graphs_released: bool = False) -> None:
        """After a failure: the buffer can be used again. All ranks call it before the next operation. Handles from
        before are not valid any more, nor are graphs: where operations were captured, the caller says by
        `graphs_released` that no graph will be replayed. Engram, pipeline and all-gather are to be configured again.
        An addition to DeepEP's interface."""
        self._open()
        self._engine.check_graphs(graphs_released, self._barriers.captured or any(
            part.captured for part in (*self._parts.values(), *self._old_parts)))
        self._close_parts(wait=True)
        self._engine.recover()

    def _close_parts(self, wait: bool) -> None:
        for part in (*self._parts.values(), *self._old_parts):
            part.close(wait)
        self._parts, self._old_parts = {}, []
        self._barriers.close()

    def _close(self, handles_too: bool) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None and not engine.closed:
            self._close_parts(wait=handles_too)
            engine.close(handles_too)
        self.runtime = None

    def __del__(self) -> None:
        if getattr(self, "runtime", None) is None:
            return
        if self.explicitly_destroy:
            warnings.warn("deep_ep.ElasticBuffer: expected destroy() before the buffer is released "
                          "(explicitly_destroy=True)")
        self._close(False)

    def _open(self) -> ElasticEngine:
        if self._engine.closed:
            raise refused("the buffer was destroyed")
        return self._engine

    # ---- Sizes

    @staticmethod
    def get_buffer_size_hint(group: Any, num_max_tokens_per_rank: int, hidden: int, num_topk: int = 0,
                             use_fp8_dispatch: bool = False, allow_hybrid_mode: bool = True,
                             allow_multiple_reduction: bool = True) -> int:
        """Bytes for `num_bytes`. The first call for a group is collective: it looks for the ranks' nodes."""
        num_max_tokens_per_rank = checks.positive("num_max_tokens_per_rank", num_max_tokens_per_rank)
        hidden, num_topk = checks.positive("hidden", hidden), checks.topk("num_topk", num_topk)
        nodes, _per_node = get_physical_domain_size(group)
        domains = get_logical_domain_size(group, allow_hybrid_mode)
        return sizes.buffer_bytes(domains, nodes == 1, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch,
                                  allow_multiple_reduction)

    @staticmethod
    def get_engram_storage_size_hint(num_entries: int, hidden: int, num_max_tokens_per_rank: int,
                                     dtype: torch.dtype = torch.bfloat16) -> Tuple[int, int]:
        """(GPU bytes, CPU bytes) of Engram storage."""
        return sizes.engram_bytes(
            checks.positive("num_entries", num_entries, 0), checks.positive("hidden", hidden, 0),
            checks.positive("num_max_tokens_per_rank", num_max_tokens_per_rank, 0), checks.dtype("dtype", dtype))

    @staticmethod
    def get_pp_buffer_size_hint(num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> int:
        """Bytes of the pipeline-parallel ring."""
        return sizes.pipeline_bytes(checks.positive("num_max_tensor_bytes", num_max_tensor_bytes, 0),
                                    checks.positive("num_max_inflight_tensors", num_max_inflight_tensors, 0))

    @staticmethod
    def get_agrs_num_max_session_bytes(group: Any, shapes: sizes.Shapes, dtype: torch.dtype) -> int:
        """Bytes of a session of all-gathers of these shapes: one shape, or a sequence of shapes."""
        return sizes.gathered_bytes(shapes, checks.dtype("dtype", dtype), checks.process_group(group).size())

    @staticmethod
    def get_agrs_buffer_size_hint(group: Any, num_max_session_bytes: int) -> int:
        """Bytes of a buffer for such sessions."""
        return sizes.up(checks.positive("num_max_session_bytes", num_max_session_bytes, 0), sizes.ALIGNMENT)

    def get_physical_domain_size(self) -> Tuple[int, int]:
        """(nodes, ranks per node)."""
        return self.num_rdma_ranks, self.num_nvlink_ranks

    def get_logical_domain_size(self) -> Tuple[int, int]:
        """(scale-out ranks, scale-up ranks)."""
        return self.num_scaleout_ranks, self.num_scaleup_ranks

    def _theoretical_sms(self, experts: int, topk: int, given: Tuple[float, float, float, float]) -> int:
        gpu = torch.cuda.is_available()
        most = torch.cuda.get_device_properties(0).multi_processor_count if gpu else _WHOLE_GPU_SMS
        rates = (given[0] or (get_rdma_gbs() if self._domains.hybrid else 0.0),
                 given[1] or (get_nvlink_gbs() if gpu else 0.0) or _CPU_NVLINK_GBS, *given[2:])
        count = sizes.theoretical_sms(
            self._domains, self.num_nvlink_ranks, experts, topk, most, rates, self._sm_model)
        return count if self.prefer_overlap_with_compute else max(count, min(64, most // 2 * 2))

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int, num_scaleout_topk: int = 0, rdma_gbs: float = 0,
                                nvlink_gbs: float = 0, sm_read_gbs: float = 200, sm_write_gbs: float = 50) -> int:
        """SMs that keep up with the network by DeepEP's model: an even number, at least 4. EPX's own number of SMs is
        that of EPX_NUM_AGENTS; calls that are given num_sms take no more."""
        if checks.positive("num_scaleout_topk", num_scaleout_topk, 0):
            raise wrong("num_scaleout_topk", "0", num_scaleout_topk)
        checks.positive("num_experts", num_experts, self.num_ranks)
        if checks.positive("num_topk", num_topk) > num_experts:
            raise wrong("num_topk", "at most num_experts = %d" % num_experts, num_topk)
        given = (checks.rate("rdma_gbs", rdma_gbs, True), checks.rate("nvlink_gbs", nvlink_gbs, True),
                 checks.rate("sm_read_gbs", sm_read_gbs), checks.rate("sm_write_gbs", sm_write_gbs))
        key = (num_experts, num_topk, given)
        if key not in self._num_sms:
            self._num_sms[key] = self._theoretical_sms(num_experts, num_topk, given)
        return self._num_sms[key]

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Queue pairs for this many SMs by DeepEP's model."""
        num_sms = checks.positive("num_sms", num_sms, 0)
        return sizes.theoretical_qps(num_sms, self.allow_hybrid_mode, self.num_allocated_qps)

    # ---- Streams

    @staticmethod
    def capture() -> EventHandle:
        """Records an event on the current stream."""
        return EventHandle()

    def get_comm_stream(self) -> Any:
        """The communication stream, which all buffers of the process share. Raises RuntimeError without a GPU."""
        return comm_stream()

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """A barrier of all ranks on the communication stream, or on the current stream. CPU: when the call returns, all
        ranks have called it. `sequential` has no effect."""
        self._barrier(use_comm_stream, use_comm_stream, with_cpu_sync, sequential)

    def _barrier(self, on_comm_stream: bool, joined: bool, with_cpu_sync: bool, sequential: bool = True) -> None:
        self._open()
        self._unused(sequential=(bool(sequential), True))
        self._barriers.run(on_comm_stream, joined, with_cpu_sync)

    # ---- Dispatch and combine

    def _check_qps(self, num_qps: int) -> None:
        if checks.positive("num_qps", num_qps, 0) > self.num_allocated_qps:
            raise wrong("num_qps", "at most num_allocated_qps = %d" % self.num_allocated_qps, num_qps)
        if num_qps:
            self._unused(num_qps=(num_qps, 0))

    def _check_resources(self, num_sms: int, num_qps: int) -> int:
        """The number of SMs."""
        num_sms = min(checks.positive("num_sms", num_sms, 0), _MOST_SMS)
        self._check_qps(num_qps)
        check_torch_deterministic()
        return num_sms

    def dispatch(self, x: _Tokens, topk_idx: Optional[torch.Tensor] = None, topk_weights: Optional[torch.Tensor] = None,
                 cumulative_local_expert_recv_stats: Optional[torch.Tensor] = None, num_experts: Optional[int] = None,
                 num_max_tokens_per_rank: Optional[int] = None, expert_alignment: Optional[int] = None,
                 num_sms: int = 0, num_qps: int = 0, previous_event: Any = None,
                 previous_event_before_epilogue: Any = None, async_with_compute_stream: bool = False,
                 allocate_on_comm_stream: bool = False, handle: Optional[EPHandle] = None, do_handle_copy: bool = True,
                 do_cpu_sync: Optional[bool] = None, do_expand: bool = False, do_zero_padding: bool = False,
                 use_tma_aligned_col_major_sf: bool = False) -> Tuple[
                     _Tokens, Optional[torch.Tensor], Optional[torch.Tensor], EPHandle, EventOverlap]:
        """Sends tokens to the ranks of their experts: one row per (token, rank), or with `do_expand` one per (token,
        expert) in zones that begin at multiples of expert_alignment. Returns (recv_x or (recv_x, recv_sf),
        recv_topk_idx or None, recv_topk_weights or None, handle, event). With a handle, its routing is reused.

        Without do_cpu_sync nothing waits on the host, and the results have the rows of the worst case.
        """
        engine = self._open()
        num_sms = self._check_resources(num_sms, num_qps)
        request = operations.Request(x, topk_weights, do_expand, do_zero_padding, use_tma_aligned_col_major_sf, num_sms)
        begin = launcher(request.device, previous_event, previous_event_before_epilogue, async_with_compute_stream,
                         allocate_on_comm_stream)
        if handle is not None:
            _check_cached(handle, topk_idx, cumulative_local_expert_recv_stats, num_experts, num_max_tokens_per_rank,
                          expert_alignment, do_cpu_sync)
            return operations.dispatch_again(begin, request, handle, self._domains)  # type: ignore[return-value]
        tokens = self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank
        how = operations.routed(engine, request, topk_idx, cumulative_local_expert_recv_stats, num_experts, tokens,
                                expert_alignment, do_cpu_sync, do_handle_copy)
        if how.cpu_sync:
            refuse_capture(request.device, "dispatch", "give do_cpu_sync=False")
        topk = min(how.topk_idx.shape[1], how.num_experts)  # more entries than experts: the others are -1
        used = num_sms or self.get_theoretical_num_sms(how.num_experts, topk)
        return operations.dispatch(engine, begin, request, how, self._domains, used,  # type: ignore[return-value]
                                   self.num_cpu_timeout_secs)

    def combine(self, x: torch.Tensor, handle: EPHandle, topk_weights: Optional[torch.Tensor] = None, bias: Any = None,
                num_sms: int = 0, num_qps: int = 0, previous_event: Any = None,
                previous_event_before_epilogue: Any = None, async_with_compute_stream: bool = False,
                allocate_on_comm_stream: bool = False) -> Tuple[torch.Tensor, Optional[torch.Tensor], EventOverlap]:
        """Sends rows back to their source and sums them without weights, after the bias (a tensor or a pair). Returns
        (combined_x, combined_topk_weights or None, event). The order of additions is DeepEP's."""
        self._open()
        num_sms = self._check_resources(num_sms, num_qps)
        device = checks.device_of("x", checks.tensor("x", x, (torch.bfloat16, torch.float16, torch.float32),
                                                     (None, None)))
        begin = launcher(device, previous_event, previous_event_before_epilogue, async_with_compute_stream,
                         allocate_on_comm_stream)
        return operations.combine(begin, x, handle, topk_weights, bias,  # type: ignore[return-value]
                                  self.allow_multiple_reduction, self._domains, num_sms)


    # ---- Engram, pipeline, all-gather

    def _set_part(self, name: str, make: Callable[[], Any]) -> None:
        """Replaces a part. Collective."""
        self._open()
        self._barrier(True, True, with_cpu_sync=True)
        old = self._parts.pop(name, None)
        if old is not None and old.captured:
            self._old_parts.append(old)
        elif old is not None:
            old.close(wait=True)
        self._parts[name] = make()
        self._barrier(True, True, with_cpu_sync=True)

    def _part(self, name: str, call: str, needed: str) -> Any:
        self._open()
        if name not in self._parts:
            raise refused("%s: expected %s() before it" % (call, needed))
        return self._parts[name]

    def engram_write(self, storage: torch.Tensor, sf: Optional[torch.Tensor] = None) -> None:
        """Stores this rank's rows of the table: bf16 [entries, hidden], or e4m3 with the scales `sf` of all ranks.
        Collective. The rows stay on the device of `storage`."""
        check_storage(self._open(), storage, sf, self.num_cpu_bytes)
        self._set_part("engram", lambda: Engram(self._engine, storage, sf, self.num_bytes - self.num_cpu_bytes))

    def engram_fetch(self, indices: torch.Tensor, num_qps: int = 0, use_tma_aligned_col_major_sf: bool = False) -> \
            Callable[[], Tuple[torch.Tensor, Optional[torch.Tensor]]]:
        """Fetches rows by global index, rank * entries + entry: int32 [tokens, n]. Returns a function whose result is
        (data [tokens, n * hidden], scales or None). Collective, unlike DeepEP's: all ranks call it, with any number of
        indices; it waits on the host for the number of rows that other ranks want."""
        part = self._part("engram", "engram_fetch", "engram_write")
        self._check_qps(num_qps)
        return part.fetch(indices, use_tma_aligned_col_major_sf)

    def pp_set_config(self, num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> None:
        """Prepares the ring. Collective."""
        num_max_tensor_bytes = checks.positive("num_max_tensor_bytes", num_max_tensor_bytes)
        num_max_inflight_tensors = checks.positive("num_max_inflight_tensors", num_max_inflight_tensors)
        needed = 4 * sizes.up(num_max_tensor_bytes) * num_max_inflight_tensors
        if needed > self.num_bytes:
            raise wrong("num_max_tensor_bytes, num_max_inflight_tensors", "at most num_bytes = %d" % self.num_bytes,
                        needed)
        if self._open().store is None and self.num_ranks > 1:
            raise refused("pp_set_config: expected ranks that share a store of torch.distributed (init_process_group "
                          "makes one), got none, or several")
        self._set_part("pipeline", lambda: Pipeline(self._engine, default_device(), num_max_tensor_bytes,
                                                    num_max_inflight_tensors))

    def pp_send(self, t: torch.Tensor, dst_rank_idx: int, num_sms: int = 0) -> None:
        """Sends a tensor to the previous or the next rank, first in, first out; does not wait for the receiver, unless
        num_max_inflight_tensors are on their way. num_sms has no effect."""
        self._unused(num_sms=(num_sms, 0))
        self._part("pipeline", "pp_send", "pp_set_config").send(t, dst_rank_idx)

    def pp_recv(self, t: torch.Tensor, src_rank_idx: int, num_sms: int = 0) -> None:
        """Receives a tensor from the previous or the next rank, on the current stream. num_sms has no effect."""
        self._unused(num_sms=(num_sms, 0))
        self._part("pipeline", "pp_recv", "pp_set_config").recv(t, src_rank_idx)

    def agrs_set_config(self, num_max_session_bytes: int, num_max_all_gathers_per_session: int) -> None:
        """Prepares all-gather sessions. Collective."""
        checks.positive("num_max_session_bytes", num_max_session_bytes)
        checks.positive("num_max_all_gathers_per_session", num_max_all_gathers_per_session)
        if num_max_session_bytes > self.num_bytes or num_max_all_gathers_per_session > 32:
            raise wrong("num_max_session_bytes, num_max_all_gathers_per_session",
                        "at most num_bytes = %d, and 32" % self.num_bytes,
                        "%d, %d" % (num_max_session_bytes, num_max_all_gathers_per_session))
        self._set_part("gathers", lambda: Gathers(self._engine, default_device(), num_max_session_bytes,
                                                  num_max_all_gathers_per_session))

    def _gathers(self, call: str) -> Gathers:
        return self._part("gathers", call, "agrs_set_config")

    def create_agrs_session(self) -> None:
        """Begins a session of all-gathers."""
        self._gathers("create_agrs_session").begin()

    def destroy_agrs_session(self) -> None:
        """Ends the session: waits for the current stream and for all ranks."""
        self._gathers("destroy_agrs_session").end()
        self._barrier(True, True, with_cpu_sync=False)

    @contextlib.contextmanager
    def agrs_new_session(self, enabled: bool = True) -> Iterator[None]:
        """A session for a `with` block. It ends with an exception too, then on this rank alone."""
        if enabled:
            self.create_agrs_session()
        try:
            yield
        except BaseException:
            if enabled:
                self._gathers("agrs_new_session").end()
            raise
        if enabled:
            self.destroy_agrs_session()

    def all_gather(self, t: Any) -> Tuple[Any, ...]:
        """Gathers a tensor, or several at once: (gathered [R, ...], ..., handle). handle() makes the current stream
        wait."""
        return self._gathers("all_gather").run(t)

    def agrs_get_inplace_tensor(self, shapes: sizes.Shapes, dtype: torch.dtype) -> Any:
        """This rank's place in the result of the next all_gather, or of the next ones: these must be given these
        tensors in the same order, one or several at once."""
        return self._gathers("agrs_get_inplace_tensor").inplace(shapes, dtype)


def _checked_bytes(num_bytes: Any, num_cpu_bytes: int, tokens: int, hidden: int) -> Optional[int]:
    """num_bytes, as Python's integer."""
    if num_bytes is None:
        if not tokens or not hidden:
            raise wrong("num_bytes", "a number, or num_max_tokens_per_rank and hidden", "None")
        if num_cpu_bytes:
            raise wrong("num_cpu_bytes", "num_bytes with it", "None")
        return None
    num_bytes = checks.positive("num_bytes", num_bytes)
    if num_bytes % sizes.ALIGNMENT:
        raise wrong("num_bytes", "a positive multiple of %d" % sizes.ALIGNMENT, num_bytes)
    if num_cpu_bytes % sizes.ALIGNMENT or num_cpu_bytes > num_bytes:
        raise wrong("num_cpu_bytes", "a multiple of %d, at most num_bytes" % sizes.ALIGNMENT, num_cpu_bytes)
    return num_bytes


def _check_cached(handle: Any, topk_idx: Any, stats: Any, num_experts: Any, tokens: Any, alignment: Any,
                  cpu_sync: Any) -> None:
    if topk_idx is not None or stats is not None:
        raise wrong("topk_idx, cumulative_local_expert_recv_stats", "None with a handle, which has the routing",
                    "a tensor")
    if cpu_sync:
        raise wrong("do_cpu_sync", "False or None with a handle, whose counts are known", repr(cpu_sync))
    for name, value in (("num_experts", num_experts), ("num_max_tokens_per_rank", tokens),
                        ("expert_alignment", alignment)):
        expected = getattr(handle, name, value)
        if value is not None and checks.positive(name, value, 0) != expected:
            raise wrong(name, "None or the handle's %r" % expected, repr(value))


def _at_exit() -> None:
    # As for Buffer: an exception in the destructor of a process group may end the process.
    for buffer in list(_living):
        buffer._engine.leave()
        buffer.group = None


atexit.register(_at_exit)
