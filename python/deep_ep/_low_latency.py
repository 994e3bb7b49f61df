# SPDX-License-Identifier: Apache-2.0
"""Low latency: dispatch and combine of up to a thousand tokens, optionally with separate send and receive halves.

Host time is critical here. Arguments are not checked again if an earlier call had the same shapes, and the structs for
the C library are prepared (see _plans.py).
"""

import contextlib
import gc
from typing import Any, Callable, NamedTuple, Optional, Tuple

import epx
import torch
from epx._library import check

from . import _checks as checks
from ._checks import refused, wrong
from ._eager import eager
from ._engine import Engine
from ._memory import use_on
from ._plans import Cast, CombinePlan, DispatchPlan, Overlap, as_nvfp4
from ._routing import ATTRIBUTE, Handle, Routing, find
from ._streams import settle
from .utils import EventOverlap


class LowLatencyRouting(Routing):
    """The routing of a low-latency dispatch. `staged` holds the tensors of a send whose hook was not called yet, which
    runs on the stream `staged_on`."""

    staged: Any = None
    staged_on: Optional[int] = None
    combine_buffer: Optional[torch.Tensor] = None

    def __init__(self, plan: DispatchPlan, in_graph: bool, topk_idx: torch.Tensor, tokens: int) -> None:
        self.in_graph = in_graph
        self.handle, self.address = plan.take_handle(in_graph)
        self.pool = plan.pool
        self.pool.routings += 1
        if in_graph:
            self.pool.captured = True
        self.max_tokens = plan.max_tokens
        self.topk_idx = topk_idx  # if combine gets the same tensor, it is not checked again
        self.version = _version(topk_idx)
        self.tokens = tokens

    def __del__(self) -> None:
        pool = getattr(self, "pool", None)
        if pool is None:
            return  # __init__ failed before there was a handle
        if pool.group.alive:
            if self.staged is not None and not pool.closed:
                # The hook was never called, and the other ranks wait for the receive half of this rank. (They do not
                # if this rank has destroyed the buffer.)
                stream = pool.stream()
                pool.lib.epx_complete(self.address, stream)
                pool.group.hold(self.staged)
                with contextlib.suppress(RuntimeError):  # of a GPU that runs nothing any more
                    self._used_on(stream, self.staged)
            pool.give(self.handle, self.in_graph)
        pool.routing_gone()

    @eager
    def receive(self) -> None:
        """The hook of a staged operation. After it, the results are complete for the current stream."""
        held = self.staged
        if held is None:
            return
        pool = self.pool
        stream = pool.stream()
        status = pool.lib.epx_complete(self.address, stream)
        if status:
            check(status)
        if pool.on_cpu:
            pool.group.hold(held)
        self._used_on(stream, held)
        self.staged = None
        if pool.on_cpu:
            settle(pool.group)

    def _used_on(self, stream: Optional[int], held: Any) -> None:
        """The receive half uses the tensors, which are the send's, on the current stream, which has this number."""
        if stream == self.staged_on:
            return
        current = torch.cuda.current_stream(self.pool.device)
        for one in held:
            use_on(current, one if isinstance(one, list) else (one,))


def _may_retry(status: int, capturing: bool) -> bool:
    """True if an operation that found all slots staged may try again: hooks may have been garbage, of an exception say,
    and are collected now, or were just before. Not in a capture, which finalizers of others may break."""
    if status != epx.Status.BUSY or capturing:
        return False
    gc.collect()
    return True


def _version(tensor: torch.Tensor) -> Optional[int]:
    """A number that changes with every write to a tensor, or None: torch does not count writes in inference_mode()."""
    return None if tensor.is_inference() else tensor._version


def _look(tensor: Any) -> Any:
    """The properties of a tensor that are checked. What is no tensor has a look that no checked argument has."""
    try:
        return tensor.shape, tensor.dtype, tensor.device, tensor.is_contiguous()
    except AttributeError:
        return "no tensor"


def _check_dispatch(engine: Engine, x: Any, topk_idx: Any, max_tokens: int, num_experts: int, stats: Any,
                    wait: Any) -> Tuple[int, int]:
    """(max_tokens, num_experts), as Python's integers."""
    checks.tensor("x", x, (torch.bfloat16,), (None, None))
    device = checks.device_of("x", x)
    max_tokens = checks.at_most("num_max_dispatch_tokens_per_rank", max_tokens, checks.MOST)
    num_experts = checks.at_most("num_experts", num_experts, checks.MOST)
    if x.shape[0] > max_tokens:
        raise wrong("x", "at most num_max_dispatch_tokens_per_rank = %d tokens" % max_tokens, x.shape[0])
    checks.row_bytes("x", x)
    checks.tensor("topk_idx", topk_idx, (torch.int64, torch.int32), (x.shape[0], None), device)
    if not 1 <= topk_idx.shape[1] <= 32:
        raise wrong("topk_idx", "1 to 32 experts per token", topk_idx.shape[1])
    checks.optional("cumulative_local_expert_recv_stats", stats, (torch.int32,),
                    (engine.local_experts(num_experts),), device)
    checks.optional("dispatch_wait_recv_cost_stats", wait, (torch.int64,), (engine.nranks,), device)
    return max_tokens, num_experts


def _check_nvfp4(x: torch.Tensor, cast: Cast, global_scale: Any) -> None:
    if cast.use_nvfp4 and x.shape[1] % 64:
        raise wrong("x", "a multiple of 64 channels with use_nvfp4", x.shape[1])
    if global_scale is not None:
        if not cast.use_nvfp4:
            raise wrong("x_global_scale", "None without use_nvfp4", "a tensor")
        if not isinstance(global_scale, torch.Tensor) or global_scale.numel() != 1:
            raise wrong("x_global_scale", "a tensor of one float", repr(global_scale))
        checks.tensor("x_global_scale", global_scale.view(1), (torch.float32,), (1,), x.device)


def _dispatch_plan(engine: Engine, x: torch.Tensor, topk_idx: torch.Tensor, max_tokens: int, num_experts: int,
                   cast: Cast, staged: bool) -> DispatchPlan:
    """The plan for arguments that are already checked."""
    hidden, topk = x.shape[1], topk_idx.shape[1]
    pool = engine.low_latency(x.device, max_tokens, num_experts, 2 * hidden, topk)
    pool.used = True
    key = (pool, hidden, topk, topk_idx.dtype, cast, staged)
    plan = engine.plans_of_pools.get(key)
    if plan is None:
        plan = engine.plans_of_pools[key] = DispatchPlan(pool, hidden, topk, topk_idx.dtype, cast, max_tokens, staged)
    return plan


def dispatch(engine: Engine, launch_on: Any, x: torch.Tensor, topk_idx: torch.Tensor, max_tokens: int,
             num_experts: int, stats: Optional[torch.Tensor], wait: Optional[torch.Tensor],
             cast: Cast, global_scale: Optional[torch.Tensor], staged: bool) -> Tuple[Any, ...]:
    """Returns the result of Buffer.low_latency_dispatch().

    The operation runs on the stream that `launch_on` chooses. Without `launch_on`, and always if it is staged, it runs
    on the current stream.
    """
    look = _look(x)
    key = (look, _look(topk_idx), max_tokens, num_experts, cast, staged)
    try:
        plan = engine.plans.get(key)
    except TypeError:  # a list, say
        plan = None
    if plan is None or stats is not None or wait is not None or global_scale is not None:
        max_tokens, num_experts = _check_dispatch(engine, x, topk_idx, max_tokens, num_experts, stats, wait)
        _check_nvfp4(x, cast, global_scale)
        if plan is None:
            key = (look, key[1], max_tokens, num_experts, cast, staged)
            plan = engine.plans[key] = _dispatch_plan(engine, x, topk_idx, max_tokens, num_experts, cast, staged)
    pool, tokens = plan.pool, look[0][0]
    capturing = pool.capturing()
    launch = launch_on(pool.group) if launch_on is not None else None
    routing = LowLatencyRouting(plan, capturing, topk_idx, tokens)
    if launch is None:
        stream = pool.stream()
        rows, small = plan.receive_tensors(stream, capturing, False)
    else:
        stream = launch.address
        with launch.context():
            rows, small = plan.receive_tensors(stream, capturing, launch.aside)
    src, counts, ranges = small
    event, hook = EventOverlap(), None
    if staged:
        # The routing keeps alive what the receive half uses, from before the call on: Ctrl-C may come behind it. It
        # must not refer to src, because src refers to the routing, but to another tensor with the memory of src.
        routing.staged_on = stream
        routing.staged = (x, topk_idx, stats, wait, global_scale, rows, counts, ranges, src.data)
        hook = routing.receive
    try:
        status = plan.run(routing.address, tokens, x, topk_idx, stats, wait, global_scale, stream)
        if status and _may_retry(status, capturing):
            status = plan.run(routing.address, tokens, x, topk_idx, stats, wait, global_scale, stream)
        if status:
            routing.staged = None
            check(status)
        if staged:
            if pool.on_cpu:
                settle(pool.group)  # the caller may change x after this returns
        elif launch is not None:
            event = launch.finish((x, topk_idx, stats, wait, global_scale), (*rows, *small))
    except BaseException:
        if launch is not None:
            launch.keep((x, topk_idx, stats, wait, global_scale, rows, small))
        raise
    setattr(src, ATTRIBUTE, routing)
    handle: Handle = (src, ranges, max_tokens, plan.hidden, num_experts)
    received: Any = rows[0] if len(rows) == 1 else (rows[0], rows[1])
    return as_nvfp4(*received) if cast.use_nvfp4 else received, counts, handle, event, hook


def _check_combine(routing: LowLatencyRouting, plan: CombinePlan, x: Any, topk_idx: Any, topk_weights: Any, out: Any,
                   wait: Any) -> None:
    device, tokens, topk = routing.pool.device, routing.tokens, routing.handle.topk
    checks.tensor("x", x, (torch.bfloat16,), plan.shape, device)
    checks.tensor("topk_idx", topk_idx, (torch.int64, torch.int32), (tokens, topk), device)
    checks.tensor("topk_weights", topk_weights, (torch.float32,), (tokens, topk), device)
    checks.optional("out", out, (torch.bfloat16,), (tokens, plan.shape[2]), device)
    checks.optional("combine_wait_recv_cost_stats", wait, (torch.int64,), (routing.pool.group.info.nranks,), device)


class OverlapArgs(NamedTuple):
    """The arguments of low_latency_combine() for overlap with the kernel that computes its rows."""

    src_signals: Any
    src_signal_expect_value: int
    comp_signal: Any
    block_m: int
    threshold: int
    num_sms: int


def _overlap(given: OverlapArgs, local: int, rows: int) -> Tuple[Overlap, torch.Tensor]:
    """How the rows become ready, and the signals."""
    checks.positive("num_sms", given.num_sms, 0)
    if (given.comp_signal is None) == (given.src_signals is None):
        raise wrong("comp_signal, src_signals", "one of them with overlap",
                    "neither" if given.src_signals is None else "both")
    if given.comp_signal is None:
        how = Overlap(1, 0, checks.positive("src_signal_expect_value", given.src_signal_expect_value), given.num_sms)
        name, signals = "src_signals", given.src_signals
    else:
        block = checks.positive("block_m", given.block_m)
        how = Overlap(-(-rows // block), block, checks.positive("threshold", given.threshold), given.num_sms)
        name, signals = "comp_signal", given.comp_signal
    if not isinstance(signals, torch.Tensor) or signals.element_size() != 4 or not signals.is_contiguous() or \
            signals.numel() < local * how.per_expert:
        raise wrong(name, "a contiguous int32 tensor of at least %d signals" % (local * how.per_expert),
                    getattr(signals, "shape", type(signals).__name__))
    return how, signals


def combine(launch_on: Any, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor,
            handle: Handle, use_logfmt: bool, zero_copy: bool, staged: bool, out: Optional[torch.Tensor],
            wait: Optional[torch.Tensor], given: Optional[OverlapArgs]) -> Tuple[Any, ...]:
    """Returns the result of Buffer.low_latency_combine(). For `launch_on`, see dispatch()."""
    routing = getattr(handle[0], ATTRIBUTE, None) if type(handle) is tuple and handle else None
    if type(routing) is not LowLatencyRouting:
        routing = find(LowLatencyRouting, handle)
    pool, hidden, tokens = routing.pool, handle[3], routing.tokens
    if pool.closed or not pool.group.alive:
        pool.check_open()
    overlap, signals = None, None
    if given is not None:
        info = pool.group.info
        overlap, signals = _overlap(given, info.local_experts, info.nranks * routing.max_tokens)
    key = (hidden, routing.handle.topk, use_logfmt, staged, overlap)
    plan = pool.combine_plans.get(key)
    if plan is None:
        plan = pool.combine_plans[key] = CombinePlan(
            pool, hidden, routing.handle.topk, routing.max_tokens, use_logfmt, staged, overlap)
    looks = (tokens, _look(x), None if topk_idx is routing.topk_idx else _look(topk_idx), _look(topk_weights),
             None if out is None else _look(out))
    if looks not in plan.checked or wait is not None:
        _check_combine(routing, plan, x, topk_idx, topk_weights, out, wait)
        plan.checked.add(looks)
    if routing.staged is not None:
        raise refused("low_latency_combine: expected the hook of the last operation "
                      "with this handle to have been called")
    if zero_copy:
        x = _filled_buffer(routing, use_logfmt)
    # Combine uses the indices of the dispatch. It looks at these where the caller may have set entries to -1 since.
    looked = None
    if topk_idx is not routing.topk_idx or routing.version is None or _version(topk_idx) != routing.version:
        looked = topk_idx
    launch = launch_on(pool.group) if launch_on is not None else None
    stream = launch.address if launch is not None else pool.stream()
    capturing = pool.capturing()
    if capturing:
        routing.record_capture()
    if out is None:
        if launch is None:
            out = plan.new_out(tokens, stream, capturing)
        else:
            with launch.context():
                out = plan.new_out(tokens, stream, capturing)
    used = (x, topk_weights, looked, wait, signals, out)
    event = EventOverlap()
    if staged:
        routing.staged, routing.staged_on = used, stream
    try:
        status = plan.run(routing.address, tokens, x, topk_weights, out, looked, wait, signals, stream)
        if status and _may_retry(status, capturing):
            status = plan.run(routing.address, tokens, x, topk_weights, out, looked, wait, signals, stream)
        if status:
            routing.staged = None
            check(status)
        if staged and pool.on_cpu and signals is None:  # with signals, the caller has yet to write the rows
            settle(pool.group)
        elif launch is not None and not staged:
            event = launch.finish(used, (out,))
    except BaseException:  # Ctrl-C behind the call
        if launch is not None:
            launch.keep(used)
        raise
    return out, event, routing.receive if staged else None


def _filled_buffer(routing: LowLatencyRouting, use_logfmt: bool) -> torch.Tensor:
    if use_logfmt:
        raise wrong("zero_copy", "no zero_copy together with use_logfmt, which re-encodes the rows", "both")
    if routing.combine_buffer is None:
        raise refused("low_latency_combine: zero_copy: expected the rows in the tensor of "
                      "get_next_low_latency_combine_buffer(handle), which was not called")
    return routing.combine_buffer


def next_combine_buffer(handle: Handle, follow: Callable[[], None]) -> torch.Tensor:
    """bf16 [El, N, H] in the heap, for combine with zero_copy. Two tensors alternate and live as long as the buffer.
    follow() is called for new ones."""
    routing = find(LowLatencyRouting, handle)
    pool = routing.pool
    pool.check_open()
    shape = (pool.group.info.local_experts, pool.group.info.nranks * routing.max_tokens, handle[3])
    which = pool.next_combine_buffer
    pool.next_combine_buffer = (which + 1) % len(pool.combine_buffers)
    kept = pool.combine_buffers[which]
    if kept is None or kept.shape != shape:
        kept = pool.combine_buffers[which] = None
        kept = pool.combine_buffers[which] = pool.heap.empty(shape, torch.bfloat16)
        follow()
    routing.combine_buffer = kept
    return kept
