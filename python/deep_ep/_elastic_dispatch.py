# SPDX-License-Identifier: Apache-2.0
"""ElasticBuffer.dispatch and combine over EPX's handles: FLAT without expansion, EXPERT_MAJOR with it."""

from typing import Any, List, NamedTuple, Optional, Tuple

import epx
import torch
from epx import _abi

from . import _checks as checks
from ._checks import refused, wrong
from ._elastic_engine import ElasticEngine, ElasticPool, ElasticRouting
from ._elastic_handle import EPHandle, routing_of
from ._elastic_plan import Counts, DispatchPlan, Kind, Result, plan_for
from ._high_throughput import sum_rows, usable
from ._memory import use_on
from ._routing import attach
from ._streams import queueing

_INDICES = (torch.int64, torch.int32, torch.int16, torch.int8)
_PAYLOADS = (torch.bfloat16, torch.float16, torch.float32)


class Domains(NamedTuple):
    """Ranks as ElasticBuffer's caller sees them: scale-out and scale-up ranks; `hybrid`: two levels."""

    scaleout: int
    scaleup: int

    @property
    def hybrid(self) -> bool:
        """True if there are two levels."""
        return self.scaleout > 1


class Request:
    """The checked arguments of a dispatch, but for its routing."""

    def __init__(self, x: Any, topk_weights: Any, do_expand: bool, do_zero_padding: bool, tma_scales: bool,
                 num_sms: int) -> None:
        self.num_sms = num_sms  # 0: EPX's own number
        self.given = self.x, self.scales = _tokens(x)
        self.device = checks.device_of("x", self.x)
        checks.row_bytes("x", self.x)
        if do_zero_padding and not do_expand:
            raise wrong("do_zero_padding", "do_expand with it", "do_expand=False")
        self.expand, self.tma_scales = bool(do_expand), bool(tma_scales)
        self.weights = topk_weights

    def copy_in(self) -> None:
        """Copies what EPX does not read as it is, in the context of the launch, which may wait for the tensors."""
        if self.scales is None and self.x.data_ptr() % 2:  # bytes travel as pairs of them
            self.x = self.x.clone()
        self.scales = checks.spread(self.scales)

    @property
    def count(self) -> int:
        """The number of tokens."""
        return self.x.shape[0]

    def hidden_bytes(self, hidden_known: bool) -> int:
        """Bytes of the widest row: combine returns bf16. A byte that is no FP8 may be two values of FP4, unless the
        caller has said how many values a row has."""
        packed = self.x.element_size() == 1 and not hidden_known and "float8" not in str(self.x.dtype)
        return max(self.x.shape[1] * max(4 if packed else 2, self.x.element_size()), 16)

    def check_weights(self, topk: int) -> None:
        """Checks the weights for a top-k."""
        checks.optional("topk_weights", self.weights, (torch.float32,), (self.count, topk), self.device)

    def kind(self, topk: int, idx_dtype: torch.dtype, mapped: bool) -> Kind:
        """What the plan depends on."""
        scales, turned = None, False
        if self.scales is not None:
            turned = self.tma_scales and self.device.type == "cuda"
            scales = (self.scales.shape[1], self.scales.dtype, self.tma_scales and not turned)
        return Kind(self.expand, self.x.shape[1], self.x.dtype, topk, idx_dtype, scales, self.weights is not None,
                    mapped, turned)


def _tokens(x: Any) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """(rows of any dtype, scales of any dtype of 4 bytes or None)."""
    pair = x if isinstance(x, (tuple, list)) else (x, None)
    if len(pair) != 2:
        raise wrong("x", "a tensor or a pair (tokens, scales)", "%d items" % len(pair))
    rows, scales = pair
    if not isinstance(rows, torch.Tensor) or rows.dim() != 2 or not rows.is_contiguous():
        raise wrong("x", "a contiguous tensor [tokens, hidden]", checks.describe(rows))
    if scales is None:
        return rows, None
    if not isinstance(scales, torch.Tensor) or scales.dim() != 2 or scales.element_size() != 4 \
            or scales.shape[0] != rows.shape[0] or scales.device != rows.device:
        raise wrong("x[1]", "scales of 4 bytes [%d, *] on %s" % (rows.shape[0], rows.device), checks.describe(scales))
    most = -(-rows.shape[1] // 32)
    if not 1 <= scales.shape[1] <= most:
        raise wrong("x[1]", "1 to %d scales per row, one per 32 channels" % most, scales.shape[1])
    return rows, scales


class Routed(NamedTuple):
    """The arguments of a new routing."""

    topk_idx: torch.Tensor
    stats: Optional[torch.Tensor]
    num_experts: int
    max_tokens: int
    alignment: int
    cpu_sync: bool
    copy: bool
    rows: Optional[int] = None  # of the results, without CPU sync; None: the worst case
    drop: bool = False  # rows beyond those are dropped


def routed(engine: ElasticEngine, request: Request, topk_idx: Any, stats: Any, num_experts: Any, max_tokens: int,
           alignment: Any, cpu_sync: Any, copy: bool) -> Routed:
    """Checks the arguments of a new routing."""
    idx = checks.tensor("topk_idx", topk_idx, _INDICES, (request.count, None), request.device)
    if not 1 <= idx.shape[1] <= checks.MAX_TOPK:
        raise wrong("topk_idx", "1 to %d experts per token" % checks.MAX_TOPK, idx.shape[1])
    num_experts = checks.at_most("num_experts", num_experts, checks.MOST)
    if num_experts % engine.nranks:
        raise wrong("num_experts", "a multiple of the %d ranks" % engine.nranks, num_experts)
    max_tokens = checks.at_most("num_max_tokens_per_rank", max_tokens, checks.MOST)
    if request.count > max_tokens:
        raise wrong("x", "at most num_max_tokens_per_rank = %d tokens" % max_tokens, request.count)
    checks.optional("cumulative_local_expert_recv_stats", stats, (torch.int32,), (num_experts // engine.nranks,),
                    request.device)
    alignment = checks.at_most("expert_alignment", 1 if alignment is None else alignment, checks.MOST)
    return Routed(idx, stats, num_experts, max_tokens, alignment, cpu_sync is None or bool(cpu_sync), bool(copy))


class Sizes(NamedTuple):
    """Extents of a dispatch's results: exact, or the worst case. `expanded`: rows with expansion."""

    rows: int
    tokens: int
    expanded: int
    per_expert: List[int]
    used: int = 0  # with expansion: where the last row that carries a token ends; 0: not known on the host


def _worst(engine: ElasticEngine, request: Request, how: Routed) -> Sizes:
    local, align = how.num_experts // engine.nranks, how.alignment
    tokens = engine.nranks * how.max_tokens
    if how.rows is not None:  # if there are more, they are dropped, or the operation fails on the device
        return Sizes(how.rows, tokens, how.rows, [])
    rows = tokens * min(how.topk_idx.shape[1], local) + (align - 1) * local
    expanded = -(-rows // align) * align
    return Sizes(expanded if request.expand else tokens, tokens, expanded, [])


def _exact(plan: DispatchPlan, address: int, how: Routed, timeout_s: int) -> Sizes:
    rows, tokens, counts = plan.received(address, timeout_s)
    padded = [-(-n // how.alignment) * how.alignment for n in counts]
    ends = [sum(padded[:i]) + n for i, n in enumerate(counts) if n]
    return Sizes(rows, tokens, sum(padded), padded, ends[-1] if ends else 0)


def dispatch(engine: ElasticEngine, begin: Any, request: Request, how: Routed, domains: Domains, num_sms: int,
             timeout_s: int) -> Tuple[Any, ...]:
    """A dispatch with a new routing: exchanges counts, then rows. Returns the result of ElasticBuffer.dispatch()."""
    topk = how.topk_idx.shape[1]
    request.check_weights(topk)
    pool = engine.elastic_pool(request.device, how.num_experts, how.max_tokens,
                               request.hidden_bytes(engine.settings.hidden > 0), topk,
                               how.alignment if request.expand else 0)
    launch = begin(pool.group)
    with queueing(launch) as used:
        with launch.context():
            request.copy_in()
            idx = how.topk_idx if how.topk_idx.dtype.itemsize >= 4 else how.topk_idx.to(torch.int32)
            routing = new_routing(pool, request.expand, topk, how.alignment, request.count, how.drop)
            address = routing.handle.address
            plan = plan_for(pool, request.kind(topk, idx.dtype, True), domains.scaleup)
            counts = Counts(pool, domains.scaleup, how.num_experts // engine.nranks)
            guess = plan.guess(_worst(engine, request, how).rows) if how.cpu_sync and not how.drop else None
            used += [request, idx, counts, how.stats, guess]
            plan.update(address, idx, counts, how.stats, (how.rows or 0) if how.drop else 0, guess[0] if guess else 0,
                        launch.address)
            given = (address, request.x, request.scales, request.weights)
            if guess is not None:  # so that the GPU does not wait for the host
                plan.queue(*given, (guess[0], guess[0], how.max_tokens), guess[1], True, request.num_sms,
                           launch.address)
            sizes = _exact(plan, address, how, timeout_s) if how.cpu_sync else _worst(engine, request, how)
            routing.rows, routing.lines, routing.num_sms = sizes.rows, sizes.tokens, request.num_sms
            routing.used = sizes.used
            if guess is not None and plan.fits(address):
                result = plan.result(sizes.rows, sizes.tokens, guess[1])
            else:
                guess = used[-1] = None  # there may be no room for both; the one before does nothing
                result = plan.run(*given, (sizes.rows, sizes.tokens, how.max_tokens), request.num_sms, launch.address,
                                  used)
            kept_idx = how.topk_idx.clone() if how.copy else how.topk_idx
            handle = _make_handle(request, how, sizes, counts, result, routing, kept_idx, num_sms, domains)
            recv_idx = _narrowed(launch, result.idx, how.topk_idx.dtype)
        event = launch.finish(
            [*request.given, request.x, request.scales, how.topk_idx, idx, request.weights, how.stats],
            [result.x, result.scales, recv_idx, result.idx, result.weights, *counts.tensors, result.source_map,
             kept_idx if how.copy else None])
    return _rows(result), recv_idx, result.weights, handle, event


def new_routing(pool: ElasticPool, expand: bool, topk: int, alignment: int, tokens: int,
                drops: bool = False) -> ElasticRouting:
    """A routing without indices."""
    layout = epx.Layout.EXPERT_MAJOR if expand else epx.Layout.FLAT
    return ElasticRouting(pool, pool.take_handle(layout, topk, alignment, drops), tokens)


def _narrowed(launch: Any, idx: Optional[torch.Tensor], dtype: torch.dtype) -> Optional[torch.Tensor]:
    """The indices in the caller's dtype; EPX has 32 and 64 bits."""
    if idx is None or idx.dtype is dtype:
        return idx
    if idx.device.type == "cpu":
        launch.join([])  # torch's work on the CPU is not in the order of the stream
    return idx.to(dtype)


def _rows(result: Result) -> Any:
    return result.x if result.scales is None else (result.x, result.scales)


def _make_handle(request: Request, how: Routed, sizes: Sizes, counts: Counts, result: Result, routing: ElasticRouting,
                 topk_idx: torch.Tensor, num_sms: int, domains: Domains) -> EPHandle:
    source_ends, expert_ends, expert_rows = counts.tensors
    assert result.source_map is not None
    two_levels = torch.empty(0, dtype=torch.int32, device=request.device) if domains.hybrid else None
    return EPHandle(
        request.expand, how.num_experts, how.alignment, how.max_tokens, num_sms, topk_idx, sizes.tokens, sizes.expanded,
        sizes.per_expert, source_ends, expert_ends, expert_rows, attach(result.source_map, routing), None, two_levels,
        two_levels)


def dispatch_again(begin: Any, request: Request, handle: EPHandle, domains: Domains) -> Tuple[Any, ...]:
    """A dispatch with the routing of a handle."""
    routing = routing_of(handle)
    if request.expand and not handle.do_expand:
        raise wrong("do_expand", "False with the handle of a dispatch without expansion", True)
    pool = usable(routing, request.x)
    if request.count != routing.tokens:
        raise wrong("x", "%d tokens, as in the dispatch of the handle" % routing.tokens, request.count)
    topk, given = routing.handle.topk, handle.topk_idx.dtype
    request.check_weights(topk)
    idx_dtype = given if given.itemsize >= 4 else torch.int32
    launch = begin(pool.group)
    with queueing(launch) as used:
        with launch.context():
            request.copy_in()
            flat = handle.do_expand and not request.expand
            if flat:
                routing = _flat_routing(pool, handle, routing, launch, domains)
            plan = plan_for(pool, request.kind(topk, idx_dtype, False), domains.scaleup)
            used.append(request)
            result = plan.run(routing.handle.address, request.x, request.scales, request.weights, (routing.rows, 0, 0),
                              request.num_sms, launch.address, used)
            recv_idx = _narrowed(launch, result.idx, given)
        event = launch.finish([*request.given, request.x, request.scales, request.weights,
                               handle.topk_idx if flat else None],
                              [result.x, result.scales, recv_idx, result.idx, result.weights])
    return _rows(result), recv_idx, result.weights, handle, event


def _flat_routing(pool: Any, handle: EPHandle, expanded: ElasticRouting, launch: Any,
                  domains: Domains) -> ElasticRouting:
    """The routing of an expanded handle, for dispatches without expansion: made once, by all ranks alike, whichever
    handles of it they have. A capture makes one of its own for a handle from before it: it runs in replays alone."""
    flat = expanded.flat
    if flat is None:
        flat = new_routing(pool, False, expanded.handle.topk, handle.expert_alignment, expanded.tokens)
        if handle.topk_idx.is_cuda:  # a copy of the dispatch, which may have run on another stream
            use_on(torch.cuda.current_stream(handle.topk_idx.device), [handle.topk_idx], given=True)
        idx = handle.topk_idx if handle.topk_idx.dtype.itemsize >= 4 else handle.topk_idx.to(torch.int32)
        flat.handle.update(idx, stream=launch.address)
        flat.rows = flat.lines = expanded.lines
        if flat.captured == expanded.captured:
            expanded.flat = flat
    flat.record_capture()
    return flat


def sum_order(multiple: bool, expand: bool, domains: Domains) -> int:
    """The order of additions and the roundings of DeepEP, as EPX_SUM_* bits."""
    bits = _abi.SUM_TOPK_ORDER
    if multiple and expand:
        bits |= _abi.SUM_ROUND_RANKS
    if multiple and domains.hybrid:
        bits |= _abi.SUM_ROUND_NODES
    return bits


def _expanded(routing: ElasticRouting, x: torch.Tensor, weights: Any) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Rows and weights of an expanded combine, as many of both. There may be more or fewer rows than dispatch returned,
    but not fewer than are used. Where the host does not know how many these are, EPX's kernel does."""
    checks.optional("topk_weights", weights, (torch.float32,), (None,), x.device)
    if weights is not None and weights.shape[0] not in (x.shape[0], routing.rows):
        raise wrong("topk_weights", "%d weights, as x has rows, or %d, as dispatch returned" % (
            x.shape[0], routing.rows), weights.shape[0])
    rows = x.shape[0] if weights is None else min(x.shape[0], weights.shape[0])
    if rows < routing.used:
        raise wrong("x", "at least the %d rows that are used" % routing.used, rows)
    return x[:rows], None if weights is None else weights[:rows]


def combine(begin: Any, x: Any, handle: Any, topk_weights: Any, bias: Any, multiple: bool, domains: Domains,
            num_sms: int) -> Tuple[Any, ...]:
    """Sends rows back and sums them. `num_sms`: 0 for those of the handle's dispatch. Returns (combined_x,
    combined_topk_weights or None, event)."""
    routing = routing_of(handle)
    checks.tensor("x", x, _PAYLOADS, (None, None))
    usable(routing, x)
    if handle.do_expand and topk_weights is not None and not multiple:
        raise refused("combine: topk_weights of an expanded handle: expected allow_multiple_reduction=True")
    if handle.do_expand:
        x, topk_weights = _expanded(routing, x, topk_weights)
    else:
        lines = handle.recv_src_metadata.shape[0]  # a caller may have cut it to the lines that count
        if x.shape[0] not in (routing.rows, lines):
            raise wrong("x", "%d rows" % lines, x.shape[0])
        checks.optional("topk_weights", topk_weights, (torch.float32,), (x.shape[0], routing.handle.topk), x.device)
    return sum_rows(routing, begin, x, topk_weights, bias, sum_order=sum_order(multiple, handle.do_expand, domains),
                    max_sms=num_sms or routing.num_sms)
