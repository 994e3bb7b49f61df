# SPDX-License-Identifier: Apache-2.0
"""Low latency: dispatch and combine of up to a thousand tokens, with send and receive apart if asked.

The host's time counts here: the structs that the C library is given are made once per kind of call (a plan) and only
pointed elsewhere afterwards.
"""

import contextlib
import ctypes
import functools
from typing import Any, Callable, Optional, Tuple

import epx
import torch
from epx import _abi
from epx._library import check, load
from epx.tensors import fill

from . import _checks as checks
from ._checks import wrong
from ._engine import Engine, Pool
from ._routing import Handle, Routing, attach, find
from ._streams import settle
from .utils import EventOverlap

_DTYPES = {torch.bfloat16: epx.DType.BF16, torch.int64: epx.DType.INT64, torch.int32: epx.DType.INT32}


class LowLatencyRouting(Routing):
    """Of a low-latency dispatch. `staged` holds the tensors of a send whose receive half has not been asked for."""

    staged: Any = None

    def __init__(self, pool: Pool, handle: epx.Handle, max_tokens: int, tokens: int) -> None:
        super().__init__(pool, handle)
        self.address = handle.address
        self.max_tokens = max_tokens
        self.tokens = tokens
        self.combine_buffer: Optional[torch.Tensor] = None

    def __del__(self) -> None:
        group = self.pool.group
        if self.staged is not None and group.alive:
            # Its hook was never called, and the other ranks wait for this rank's half.
            load().epx_complete(self.address, stream_of(self.pool.device))
            group.hold(self.staged)
        super().__del__()


def stream_of(device: torch.device) -> Optional[int]:
    """The current stream, for the C library."""
    if device.type == "cpu":
        return None
    return torch._C._cuda_getCurrentRawStream(device.index) or 1


def _struct(dtype: int, shape: Tuple[int, ...], stride: Optional[Tuple[int, ...]] = None) -> _abi.TensorStruct:
    struct = _abi.TensorStruct()
    fill(struct, 0, dtype, shape, stride)
    return struct


class DispatchPlan:
    """The structs of one kind of low-latency dispatch."""

    def __init__(self, pool: Pool, hidden: int, topk: int, idx_dtype: torch.dtype, casts: Tuple[bool, bool, bool],
                 max_tokens: int, staged: bool) -> None:
        use_fp8, round_scale, use_ue8m0 = casts
        info = pool.group.info
        local, ranks = info.local_experts, info.nranks
        rows = ranks * max_tokens
        self.pool, self.hidden, self.use_fp8, self.staged = pool, hidden, use_fp8, staged
        self.take = functools.partial(pool.take, epx.Mode.LOW_LATENCY, epx.Layout.EXPERT_MAJOR, topk)
        self.dtype = torch.float8_e4m3fn if use_fp8 else torch.bfloat16
        self.scale_dtype = torch.int32 if use_ue8m0 else torch.float32
        self.shapes = (local, rows, hidden), (local,), (local, rows), (local, ranks)
        self.topk = _struct(_DTYPES[idx_dtype], (0, topk))
        self.tokens = _struct(epx.DType.BF16, (0, hidden))
        self.out = _struct(epx.DType.FP8_E4M3 if use_fp8 else epx.DType.BF16, (local, rows, hidden))
        # Scales are column-major, as matrix kernels want them: consecutive rows are neighbours.
        groups = -(-hidden // (512 if use_ue8m0 else 128))
        self.scale_shape, self.scale_stride = (local, rows, groups), (rows * groups, 1, rows)
        self.scales = _struct(epx.DType.INT32 if use_ue8m0 else epx.DType.FP32, self.scale_shape, self.scale_stride)
        self.src_token = _struct(epx.DType.INT32, (local, rows))
        self.counts = _struct(epx.DType.INT32, (local,))
        self.ranges = _struct(epx.DType.INT64, (local, ranks))
        self.stats = _struct(epx.DType.INT32, (local,))
        self.wait = _struct(epx.DType.INT64, (ranks,))
        pointer = ctypes.pointer
        self.inputs = _abi.DispatchInputsStruct(tokens=pointer(self.tokens))
        self.outputs = _abi.DispatchOutputsStruct(tokens=pointer(self.out), src_token=pointer(self.src_token))
        if use_fp8:
            self.outputs.scales = pointer(self.scales)
        self.info = _abi.LayoutInfoStruct(expert_counts=pointer(self.counts), layout_range=pointer(self.ranges))
        self.config = _abi.DispatchConfigStruct(send_only=staged, round_scale=round_scale or use_ue8m0)
        self.stats_pointer, self.wait_pointer = pointer(self.stats), pointer(self.wait)
        self.has_stats = self.has_wait = False
        self.topk_shape, self.tokens_shape = self.topk.shape, self.tokens.shape
        self.topk_address = ctypes.addressof(self.topk)
        self.addresses = tuple(map(ctypes.addressof, (self.inputs, self.outputs, self.info, self.config)))

    def receive_tensors(self) -> Tuple[torch.Tensor, Optional[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows, scales or None, counts, source tokens, ranges. Rows of a staged dispatch are fetched by the receiver, so that
        ordinary memory will do; others are written by their senders."""
        device, heap, scales = self.pool.device, self.pool.heap, None
        rows_shape, counts_shape, src_shape, ranges_shape = self.shapes
        if self.staged:
            recv = torch.empty(rows_shape, dtype=self.dtype, device=device)
            if self.use_fp8:
                scales = torch.empty_strided(self.scale_shape, self.scale_stride, dtype=self.scale_dtype, device=device)
        elif self.use_fp8:
            recv, scales = heap.several((rows_shape, self.dtype, None),
                                        (self.scale_shape, self.scale_dtype, self.scale_stride))
        else:
            recv = heap.empty(rows_shape, self.dtype)
        counts = torch.empty(counts_shape, dtype=torch.int32, device=device)
        src = torch.empty(src_shape, dtype=torch.int32, device=device)
        return recv, scales, counts, src, torch.empty(ranges_shape, dtype=torch.int64, device=device)

    def point(self, x: torch.Tensor, topk_idx: torch.Tensor, recv: torch.Tensor, scales: Optional[torch.Tensor],
              counts: torch.Tensor, src: torch.Tensor, ranges: torch.Tensor) -> None:
        """Points the structs to the tensors of one call."""
        self.topk_shape[0] = self.tokens_shape[0] = x.size(0)
        self.topk.data, self.tokens.data = topk_idx.data_ptr(), x.data_ptr()
        self.out.data, self.src_token.data = recv.data_ptr(), src.data_ptr()
        self.counts.data, self.ranges.data = counts.data_ptr(), ranges.data_ptr()
        if scales is not None:
            self.scales.data = scales.data_ptr()

    def optional(self, stats: Optional[torch.Tensor], wait: Optional[torch.Tensor]) -> None:
        """Points to the counters that the caller adds up in, or to none."""
        if stats is not None:
            self.stats.data = stats.data_ptr()
        if self.has_stats != (stats is not None):
            self.has_stats = stats is not None
            self.info.expert_stats = self.stats_pointer if self.has_stats else None
        if wait is not None:
            self.wait.data = wait.data_ptr()
        if self.has_wait != (wait is not None):
            self.has_wait = wait is not None
            self.info.wait_ns = self.wait_pointer if self.has_wait else None


class CombinePlan:
    """The structs of one kind of low-latency combine."""

    def __init__(self, pool: Pool, hidden: int, topk: int, max_tokens: int, use_logfmt: bool, staged: bool) -> None:
        info = pool.group.info
        self.shape = (info.local_experts, info.nranks * max_tokens, hidden)
        self.tokens = _struct(epx.DType.BF16, self.shape)
        self.weights = _struct(epx.DType.FP32, (0, topk))
        self.out = _struct(epx.DType.BF16, (0, hidden))
        self.wait = _struct(epx.DType.INT64, (info.nranks,))
        pointer = ctypes.pointer
        self.inputs = _abi.CombineInputsStruct(tokens=pointer(self.tokens), topk_weights=pointer(self.weights))
        self.outputs = _abi.CombineOutputsStruct(tokens=pointer(self.out))
        self.config = _abi.CombineConfigStruct(send_only=staged, logfmt=use_logfmt)
        self.wait_pointer = pointer(self.wait)
        self.has_wait = False
        self.weights_shape, self.out_shape = self.weights.shape, self.out.shape
        self.addresses = tuple(map(ctypes.addressof, (self.inputs, self.outputs, self.config)))

    def point(self, tokens: int, x: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor) -> None:
        """Points the structs to the tensors of one call."""
        self.weights_shape[0] = self.out_shape[0] = tokens
        self.tokens.data, self.weights.data, self.out.data = x.data_ptr(), topk_weights.data_ptr(), out.data_ptr()

    def optional(self, wait: Optional[torch.Tensor]) -> None:
        """Points to the counters that the caller adds up in, or to none."""
        if wait is not None:
            self.wait.data = wait.data_ptr()
        if self.has_wait != (wait is not None):
            self.has_wait = wait is not None
            self.config.wait_ns = self.wait_pointer if self.has_wait else None


def _check_dispatch(engine: Engine, x: Any, topk_idx: Any, max_tokens: int, num_experts: int, stats: Any,
                    wait: Any) -> None:
    checks.tensor("x", x, (torch.bfloat16,), (None, None))
    device = checks.device_of("x", x)
    checks.positive("num_max_dispatch_tokens_per_rank", max_tokens)
    checks.positive("num_experts", num_experts)
    if x.shape[0] > max_tokens:
        raise wrong("x", "at most num_max_dispatch_tokens_per_rank = %d tokens" % max_tokens, x.shape[0])
    checks.row_bytes("x", x)
    checks.tensor("topk_idx", topk_idx, (torch.int64, torch.int32), (x.shape[0], None), device)
    if not 1 <= topk_idx.shape[1] <= 32:
        raise wrong("topk_idx", "1 to 32 experts per token", topk_idx.shape[1])
    checks.optional("cumulative_local_expert_recv_stats", stats, (torch.int32,),
                    (engine.local_experts(num_experts),), device)
    checks.optional("dispatch_wait_recv_cost_stats", wait, (torch.int64,), (engine.nranks,), device)


def _dispatch_plan(engine: Engine, x: Any, topk_idx: Any, max_tokens: int, num_experts: int, stats: Any, wait: Any,
                   casts: Tuple[bool, bool, bool], staged: bool) -> DispatchPlan:
    """The plan for these arguments, which are checked: what its key has in common with an earlier call's was checked then."""
    key = plan = None
    if isinstance(x, torch.Tensor) and isinstance(topk_idx, torch.Tensor):
        key = (x.device, x.dtype, x.shape[1:], topk_idx.device, topk_idx.dtype, topk_idx.shape[1:], max_tokens,
               num_experts, casts, staged)
        plan = engine.plans.get(key)
    if (plan is None or stats is not None or wait is not None or not x.size(0) == topk_idx.size(0) <= max_tokens
            or not x.is_contiguous() or not topk_idx.is_contiguous()):
        _check_dispatch(engine, x, topk_idx, max_tokens, num_experts, stats, wait)
    if plan is None:
        hidden, topk = x.shape[1], topk_idx.shape[1]
        pool = engine.low_latency(x.device, max_tokens, num_experts, 2 * hidden, topk)
        plan = engine.plans[key] = DispatchPlan(pool, hidden, topk, topk_idx.dtype, casts, max_tokens, staged)
    return plan


def dispatch(engine: Engine, launch_on: Any, x: torch.Tensor, topk_idx: torch.Tensor, max_tokens: int,
             num_experts: int, stats: Optional[torch.Tensor], wait: Optional[torch.Tensor],
             casts: Tuple[bool, bool, bool], staged: bool) -> Tuple[Any, ...]:
    """All that Buffer.low_latency_dispatch() returns. `casts` are use_fp8, round_scale, use_ue8m0; a staged dispatch runs on
    the current stream, another one where `launch_on` puts it."""
    plan = _dispatch_plan(engine, x, topk_idx, max_tokens, num_experts, stats, wait, casts, staged)
    pool = plan.pool
    launch = None if staged else launch_on(pool.group)
    routing = LowLatencyRouting(pool, plan.take(), max_tokens, x.size(0))
    if launch is None:
        recv, scales, counts, src, ranges = plan.receive_tensors()
        stream = stream_of(pool.device)
    else:
        with launch.context():
            recv, scales, counts, src, ranges = plan.receive_tensors()
        stream = launch.address
    plan.point(x, topk_idx, recv, scales, counts, src, ranges)
    plan.optional(stats, wait)
    lib = load()
    status = lib.epx_handle_update(routing.address, plan.topk_address, None, stream)
    check(status or lib.epx_dispatch(routing.address, *plan.addresses, stream))
    handle: Handle = (attach(src, routing), ranges, max_tokens, plan.hidden, num_experts)
    # The routing holds what a staged operation uses: of src the storage, as src itself holds the routing.
    event, hook = _finish(routing, launch, (x, topk_idx, stats, wait), (recv, scales, counts, ranges),
                          src.untyped_storage() if staged else src)
    return recv if scales is None else (recv, scales), counts, handle, event, hook


def _finish(routing: LowLatencyRouting, launch: Any, inputs: Tuple[Any, ...], outputs: Tuple[Any, ...],
            kept: Any) -> Tuple[EventOverlap, Optional[Callable[[], None]]]:
    """The event, and the hook that runs the receive half of a staged operation, for which there is no launch."""
    if launch is not None:
        return launch.finish(inputs, (*outputs, kept)), None
    on_cpu, group = routing.pool.device.type == "cpu", routing.pool.group
    routing.staged = (inputs, outputs, kept)
    if on_cpu:
        settle(group)  # the caller may change x when this returns

    def hook() -> None:
        """Receives: afterwards the tensors are complete for the current stream."""
        held = routing.staged
        if held is None:
            return
        check(load().epx_complete(routing.address, stream_of(routing.pool.device)))
        routing.staged = None
        if on_cpu:
            group.hold(held)
            settle(group)

    return EventOverlap(), hook


def _check_combine(routing: LowLatencyRouting, plan: CombinePlan, x: Any, topk_idx: Any, topk_weights: Any, out: Any,
                   wait: Any) -> None:
    device, tokens, topk = routing.pool.device, routing.tokens, routing.handle.topk
    if (isinstance(x, torch.Tensor) and x.dtype is torch.bfloat16 and x.shape == plan.shape and x.is_contiguous()
            and x.device == device):
        x = None  # the largest of them, and right: no need to look closer
    checks.optional("x", x, (torch.bfloat16,), plan.shape, device)
    checks.tensor("topk_idx", topk_idx, (torch.int64, torch.int32), (tokens, topk), device)
    checks.tensor("topk_weights", topk_weights, (torch.float32,), (tokens, topk), device)
    checks.optional("out", out, (torch.bfloat16,), (tokens, plan.shape[2]), device)
    checks.optional("combine_wait_recv_cost_stats", wait, (torch.int64,), (routing.pool.group.info.nranks,), device)


def combine(engine: Engine, launch_on: Any, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor,
            handle: Handle, use_logfmt: bool, zero_copy: bool, staged: bool, out: Optional[torch.Tensor],
            wait: Optional[torch.Tensor]) -> Tuple[Any, ...]:
    """All that Buffer.low_latency_combine() returns."""
    routing = find(LowLatencyRouting, handle)
    pool = routing.pool
    pool.group.address  # raises where the buffer was destroyed
    key = (handle[3], routing.handle.topk, use_logfmt, staged)
    plan = pool.combine_plans.get(key)
    if plan is None:
        plan = pool.combine_plans[key] = CombinePlan(
            pool, handle[3], routing.handle.topk, routing.max_tokens, use_logfmt, staged)
    _check_combine(routing, plan, x, topk_idx, topk_weights, out, wait)
    if routing.staged is not None:
        raise epx.UsageError(epx.Status.USAGE, "low_latency_combine: expected the hook of the last operation with this "
                             "handle to have been called")
    if zero_copy:
        x = _filled_buffer(routing, use_logfmt)
    launch = None if staged else launch_on(pool.group)
    if out is None:
        with launch.context() if launch is not None else contextlib.nullcontext():
            out = torch.empty((routing.tokens, handle[3]), dtype=torch.bfloat16, device=pool.device)
    plan.point(routing.tokens, x, topk_weights, out)
    plan.optional(wait)
    stream = launch.address if launch is not None else stream_of(pool.device)
    check(load().epx_combine(routing.address, *plan.addresses, stream))
    event, hook = _finish(routing, launch, (x, topk_weights, wait), (out,), None)
    return out, event, hook


def _filled_buffer(routing: LowLatencyRouting, use_logfmt: bool) -> torch.Tensor:
    if use_logfmt:
        raise wrong("zero_copy", "not together with use_logfmt, which writes rows anew", "both")
    if routing.combine_buffer is None:
        raise epx.UsageError(epx.Status.USAGE, "low_latency_combine: zero_copy: expected the rows in what "
                             "get_next_low_latency_combine_buffer(handle) returned, got no such call")
    return routing.combine_buffer


def next_combine_buffer(handle: Handle) -> torch.Tensor:
    """bf16 [El, N, H] in the heap, for combine with zero_copy. Two take turns; they stay as long as the buffer."""
    routing = find(LowLatencyRouting, handle)
    pool = routing.pool
    pool.group.address
    shape = (pool.group.info.local_experts, pool.group.info.nranks * routing.max_tokens, handle[3])
    which = pool.next_combine_buffer
    pool.next_combine_buffer = (which + 1) % len(pool.combine_buffers)
    kept = pool.combine_buffers[which]
    if kept is None or kept.shape != shape:
        kept = pool.combine_buffers[which] = None
        kept = pool.combine_buffers[which] = pool.heap.empty(shape, torch.bfloat16)
    routing.combine_buffer = kept
    return kept
