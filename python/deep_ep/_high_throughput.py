# SPDX-License-Identifier: Apache-2.0
"""High throughput: dispatch and combine of thousands of tokens, inside a node and between nodes."""

import struct
from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import epx
import torch

from . import _checks as checks
from ._checks import wrong
from ._engine import Engine, Pool
from ._fresh import FreshDispatch, fresh_plan
from ._layout import NVL_PEERS, in_nodes, nodes_on, receive_field, send_fields, source_meta
from ._memory import Made
from ._routing import Handle, HighThroughputRouting, attach, find
from ._streams import CudaLaunch, HostLaunch, Origin, hinted, queueing, refuse_capture

Launch = Union[HostLaunch, CudaLaunch]
_PAYLOADS = (torch.bfloat16, torch.float16, torch.float32)


class DispatchRequest:
    """The checked arguments of a dispatch with a new routing."""

    def __init__(self, engine: Engine, x: Any, is_token_in_rank: Any, num_tokens_per_expert: Any, topk_idx: Any,
                 topk_weights: Any, expert_alignment: int, num_worst_tokens: int, max_sms: int) -> None:
        self.tokens, self.scales = checks.tokens(x)
        self.device = checks.device_of("x", self.tokens)
        checks.row_bytes("x", self.tokens)
        count, ranks = self.tokens.shape[0], engine.nranks
        self.in_rank = checks.tensor("is_token_in_rank", is_token_in_rank, (torch.bool,), (count, ranks), self.device)
        self.per_expert = checks.tensor(
            "num_tokens_per_expert", num_tokens_per_expert, (torch.int32,), (None,), self.device)
        self.experts = self.per_expert.shape[0]
        self.topk_idx = checks.optional("topk_idx", topk_idx, (torch.int64, torch.int32), (count, None), self.device)
        topk = self.topk_idx.shape[1] if self.topk_idx is not None else None
        self.topk_weights = checks.optional("topk_weights", topk_weights, (torch.float32,), (count, topk), self.device)
        if (self.topk_idx is None) != (self.topk_weights is None):
            raise wrong("topk_weights", "topk_idx and topk_weights, both or neither", "one of them")
        self.alignment = checks.positive("expert_alignment", expert_alignment)
        self.worst = checks.positive("num_worst_tokens", num_worst_tokens, 0)
        self.max_sms = max_sms  # 0: EPX's own number
        if self.worst and self.topk_idx is None:
            raise wrong("topk_idx", "a tensor where num_worst_tokens is given", "None")

    def routing_indices(self, engine: Engine) -> torch.Tensor:
        """The top-k indices for EPX: the caller's, or one expert on each rank that the token goes to."""
        if self.topk_idx is not None:
            return self.topk_idx
        ranks, local = engine.nranks, engine.local_experts(self.experts)
        if ranks > 32:
            raise wrong("topk_idx", "a tensor, which is required with more than 32 ranks", "None")
        first = torch.arange(ranks, device=self.device) * local
        if (ranks - 1) * local >= self.experts:
            raise wrong("num_tokens_per_expert", "experts on each of %d ranks where topk_idx is None" % ranks,
                        "%d experts" % self.experts)
        return torch.where(self.in_rank, first, -1)


def dispatch(engine: Engine, launch_on: Any, request: DispatchRequest, channels: int,
             counts_as_tensor: bool) -> Tuple[Any, ...]:
    """A dispatch with a new routing: exchanges counts, then rows. Returns the result of Buffer.dispatch()."""
    if not request.worst:
        refuse_capture(request.device, "dispatch", "give num_worst_tokens")
    if counts_as_tensor and request.topk_idx is None:
        raise wrong("topk_idx", "a tensor where num_recv_tokens_per_expert_as_cuda is given", "None")
    tokens = request.tokens
    topk = request.topk_idx.shape[1] if request.topk_idx is not None else engine.nranks
    if not 1 <= topk <= 32:
        raise wrong("topk_idx", "1 to 32 experts per token", topk)
    hidden_bytes = tokens.shape[1] * max(2, tokens.element_size())
    pool = engine.high_throughput(request.device, request.experts, tokens.shape[0], hidden_bytes, topk)
    try:
        return _dispatch(engine, pool, launch_on, request, topk, channels, counts_as_tensor)
    except epx.OverflowingError as failure:
        # A rank has more tokens than the group is for: all ranks have learnt it in the update. With num_worst_tokens
        # no rank waits for the update, so they do not learn it at the same point.
        if request.worst or pool.group.error() is not None:
            raise hinted(failure) from None
        pool.finish()  # the update still uses tensors of the frame that failed
    pool = engine.grow_high_throughput(request.device, request.experts, tokens.shape[0], hidden_bytes, topk)
    return _dispatch(engine, pool, launch_on, request, topk, channels, counts_as_tensor)


def _dispatch(engine: Engine, pool: Pool, launch_on: Any, request: DispatchRequest, topk: int, channels: int,
              counts_as_tensor: bool) -> Tuple[Any, ...]:
    tokens, given = request.tokens, request.scales
    launch: Launch = launch_on(pool.group)
    with queueing(launch) as used:
        with launch.context():
            request.scales = checks.spread(request.scales)
            idx = request.routing_indices(engine)
            routing = HighThroughputRouting(
                pool, pool.take(epx.Mode.HIGH_THROUGHPUT, epx.Layout.FLAT, topk), tokens.shape[0])
            counts = Counts(engine.nranks, request.device,
                            engine.local_experts(request.experts) if counts_as_tensor else 0)
            fresh = FreshDispatch(fresh_plan(pool, request), request, engine.nnodes == 1)
            used += [request, idx, counts, fresh]  # kept where what follows is interrupted
            routing.handle.update(idx, counts.info(fresh.expected), stream=launch.address)
            fresh.begin(routing.handle, launch.address)
            rows, per_expert_list = _received(engine, routing, request)
            routing.rows = rows
            fast = fresh.finish(routing.handle, rows, launch.address)
            recv = _Received(pool, launch, request, rows, topk if request.topk_idx is not None else 0, fast)
            if fast is None:
                routing.handle.dispatch(
                    tokens, recv.tokens, scales=_two_dim(request.scales), topk_weights=request.topk_weights,
                    out_scales=_two_dim(recv.scales), out_topk_weights=recv.weights, out_topk_idx=recv.idx,
                    src_rank=recv.src_rank, src_token=recv.src_token, max_sms=request.max_sms, stream=launch.address)
            handle = make_handle(engine, launch, routing, request.in_rank, counts, recv, channels)
            aligned = None if counts.experts is None else counts.aligned(request.alignment)
        # With indices, nothing has read in_rank yet, but the fields of a handle in a graph.
        in_rank = request.in_rank if request.topk_idx is None or routing.in_graph else None
        inputs = [tokens, given, request.scales, idx, request.topk_weights, in_rank]
        event = launch.finish(inputs, [recv.tokens, recv.scales, recv.idx, recv.weights, aligned, recv.src_rank,
                                       recv.src_token, counts.flat, *(handle if routing.in_graph else ())])
    out = (recv.tokens, recv.scales) if recv.scales is not None else recv.tokens
    return out, recv.idx, recv.weights, per_expert_list if aligned is None else aligned, handle, event


class Counts:
    """The counts that the ranks exchange."""

    def __init__(self, nranks: int, device: torch.device, local_experts: int) -> None:
        """`local_experts` is 0 if the caller does not ask for a tensor of their row counts."""
        flat = self.flat = torch.empty(nranks * (nranks + 2), dtype=torch.int32, device=device)
        self.matrix = flat[:nranks * nranks].view(nranks, nranks)
        self.tokens = flat[nranks * nranks:nranks * (nranks + 1)]
        self.relayed = flat[nranks * (nranks + 1):]
        self.experts = torch.empty(local_experts, dtype=torch.int64, device=device) if local_experts else None

    def info(self, expected_rows: int) -> epx.LayoutInfo:
        """The tensors as an argument of Handle.update()."""
        return epx.LayoutInfo(
            expected_rows, rank_matrix=self.matrix, rank_tokens=self.tokens, relay_counts=self.relayed,
            expert_counts=self.experts)

    def aligned(self, alignment: int) -> torch.Tensor:
        """The number of rows of each local expert, rounded up to the alignment."""
        assert self.experts is not None
        return self.experts if alignment == 1 else (self.experts + alignment - 1) // alignment * alignment


class Sources(NamedTuple):
    """Where each received row came from; `bounded`: rows past the last one are -1."""

    src_rank: torch.Tensor
    src_token: torch.Tensor
    bounded: bool


class _Received:
    """The result tensors of a dispatch with a new routing. Rows and small tensors are in separate allocations, so that
    keeping a handle does not keep the rows."""

    def __init__(self, pool: Pool, launch: Launch, request: DispatchRequest, rows: int, topk: int,
                 fast: Optional[Tuple[Made, Made, Made]]) -> None:
        """`fast`: the memory that a FreshPlan has used, or None."""
        tokens, scales = request.tokens, request.scales
        self.bounded = request.worst > 0
        if fast is not None:
            self.tokens, self.scales = (*fast[0].tensors(), None)[:2]
            self.src_rank, self.src_token = fast[1].tensors()
            self.idx, self.weights = fast[2].tensors()
            return
        self.tokens = pool.heap.empty((rows, tokens.shape[1]), tokens.dtype)
        self.scales = None
        if scales is not None:
            self.scales = pool.heap.empty((rows, *scales.shape[1:]), scales.dtype)
        self.src_rank, self.src_token = pool.heap.several(((rows,), torch.int32, None), ((rows,), torch.int32, None))
        if self.bounded:
            launch.follow()
            self.src_rank.fill_(-1)  # rows past the end are not written
            self.src_token.fill_(-1)
        self.idx = self.weights = None
        if topk:
            assert request.topk_idx is not None
            self.idx, self.weights = pool.heap.several(
                ((rows, topk), request.topk_idx.dtype, None), ((rows, topk), torch.float32, None))


def _two_dim(scales: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    return scales.unsqueeze(1) if scales is not None and scales.dim() == 1 else scales


def _received(engine: Engine, routing: HighThroughputRouting, request: DispatchRequest) -> Tuple[int, List[int]]:
    """(rows to allocate, aligned rows of each local expert). Waits for the counts unless num_worst_tokens is given."""
    if request.worst:
        return request.worst, []
    rows, counts = routing.handle.recv_count()
    if request.topk_idx is None:
        counts = _sum_counts(engine, request.per_expert)
    align = request.alignment
    return rows, [-(-n // align) * align for n in counts]


def _sum_counts(engine: Engine, per_expert: torch.Tensor) -> List[int]:
    """The rows of each local expert without a top-k: the counts of the callers, summed over the ranks."""
    own = per_expert.tolist()
    parts = engine.bootstrap.allgather(struct.pack("%di" % len(own), *own))
    local = engine.local_experts(len(own))
    sums = [sum(column) for column in zip(*(struct.unpack("%di" % len(own), part) for part in parts))]
    mine = sums[engine.rank * local:(engine.rank + 1) * local]
    return mine + [0] * (local - len(mine))


class LazyHandle(tuple):
    """The handle tuple of DeepEP: 6 fields inside a node, 10 between nodes. EPX does not need the fields. They are
    computed when one is first read, and complete for each stream that reads one."""

    _computed: Optional[Tuple[Tuple[Any, ...], Origin]]

    def __new__(cls, *values: Any) -> Any:
        """LazyHandle(routing, length, compute). One iterable of fields gives a plain tuple: some callers rebuild it."""
        if len(values) != 3:
            return tuple(*values)
        self = super().__new__(cls)
        self.routing, self._length, self._compute = values
        self._computed = None
        return self

    def _all(self) -> Tuple[Any, ...]:
        compute = self._compute
        if self._computed is None and compute is not None:
            fields = compute()
            if self.routing.pool.capturing():  # they are in the graph's memory, where replays write them
                return fields
            self._computed = fields, Origin(self.routing.pool.device)
            self._compute = None  # lets go of what it needed
        assert self._computed is not None
        fields, origin = self._computed
        origin.join(fields)
        return fields

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return iter(self._all())

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def __eq__(self, other: Any) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __contains__(self, value: Any) -> bool:
        return value in self._all()

    def __add__(self, other: Any) -> Tuple[Any, ...]:
        return self._all() + tuple(other)

    def __radd__(self, other: Any) -> Tuple[Any, ...]:
        return tuple(other) + self._all()

    def __mul__(self, count: Any) -> Tuple[Any, ...]:
        return self._all() * count

    __rmul__ = __mul__

    def index(self, *arguments: Any) -> int:
        """As tuple.index()."""
        return self._all().index(*arguments)

    def count(self, value: Any) -> int:
        """As tuple.count()."""
        return self._all().count(value)

    def __reduce__(self) -> Any:
        return tuple, (list(self._all()),)

    def __repr__(self) -> str:
        return repr(self._all())


def make_handle(engine: Engine, launch: Launch, routing: HighThroughputRouting, in_rank: torch.Tensor, counts: Counts,
                recv: _Received, channels: int) -> Handle:
    """The handle of a dispatch with a new routing."""

    sources = Sources(recv.src_rank, recv.src_token, recv.bounded)  # and not the rows
    if routing.in_graph:  # the fields follow every replay
        return _handle_fields(engine, routing, in_rank, counts, sources, channels)

    def compute() -> Tuple[Any, ...]:
        launch.join([in_rank, counts.flat, sources.src_rank, sources.src_token])
        return _handle_fields(engine, routing, in_rank, counts, sources, channels)
    return LazyHandle(routing, 6 if engine.nnodes == 1 else 10, compute)


def _handle_fields(engine: Engine, routing: HighThroughputRouting, in_rank: torch.Tensor, counts: Counts,
                   recv: Sources, channels: int) -> Handle:
    prefix, head = send_fields(in_rank, channels)
    recv_prefix = receive_field(recv.src_rank, recv.src_token, counts.tokens, channels)
    rank_prefix = counts.matrix.cumsum(0, dtype=torch.int32)
    if engine.nnodes == 1:
        return rank_prefix, prefix, recv_prefix, attach(recv.src_token, routing), in_rank, head
    goes = in_nodes(in_rank, engine.node_of)
    node_prefix, node_head = send_fields(goes, channels)
    relayed = torch.zeros(engine.nnodes, dtype=torch.int32, device=in_rank.device)
    relayed.index_add_(0, nodes_on(in_rank.device, engine.node_of), counts.relayed)
    relayed[engine.node] = goes[:, engine.node].sum()
    relayed_sum = relayed.cumsum(0, dtype=torch.int32)
    passing = 0 if recv.bounded else int(relayed_sum[-1])  # num_worst_tokens is given in order not to wait here
    local_rank = engine.node_of[:engine.rank].count(engine.node)
    meta = source_meta(recv.src_rank, engine.node_of, local_rank)
    return (in_rank, node_prefix, prefix, relayed[:, None].expand(-1, channels).contiguous(), relayed_sum, recv_prefix,
            rank_prefix[:, engine.rank].contiguous(), attach(meta, routing), node_head,
            torch.full((passing, NVL_PEERS), -1, dtype=torch.int32, device=in_rank.device))


def dispatch_again(engine: Engine, launch_on: Any, x: Any, handle: Handle, max_sms: int) -> Tuple[Any, ...]:
    """A dispatch with the routing of a handle."""
    tokens, given = checks.tokens(x)
    routing = find(HighThroughputRouting, handle)
    pool = usable(routing, tokens)
    if tokens.shape[0] != routing.tokens:
        raise wrong("x", "%d tokens, as in the dispatch of the handle" % routing.tokens, tokens.shape[0])
    launch: Launch = launch_on(pool.group)
    with queueing(launch) as used:
        with launch.context():
            scales = checks.spread(given)
            out = pool.heap.empty((routing.rows, tokens.shape[1]), tokens.dtype)
            out_scales = None
            if scales is not None:
                out_scales = pool.heap.empty((routing.rows, *scales.shape[1:]), scales.dtype)
            used += [tokens, given, scales, out, out_scales]
            routing.handle.dispatch(tokens, out, scales=_two_dim(scales), out_scales=_two_dim(out_scales),
                                    max_sms=max_sms, stream=launch.address)
        event = launch.finish([tokens, given, scales], [out, out_scales])
    return (out, out_scales) if out_scales is not None else out, None, None, None, None, event


def usable(routing: Any, tokens: torch.Tensor) -> Pool:
    """The pool of a routing. Raises if it cannot transfer such rows."""
    pool = routing.pool
    pool.check_open()
    if tokens.device != pool.device:
        raise wrong("x", "a tensor on %s, the device of the handle" % pool.device, tokens.device)
    checks.row_bytes("x", tokens)
    if tokens.shape[1] * tokens.element_size() > pool.hidden_bytes:
        raise wrong("x", "rows of at most %d bytes, the limit of the handle" % pool.hidden_bytes,
                    "%d bytes" % (tokens.shape[1] * tokens.element_size()))
    routing.record_capture()
    return pool


def combine(engine: Engine, launch_on: Any, x: Any, handle: Handle, topk_weights: Any, bias: Any,
            max_sms: int) -> Tuple[Any, ...]:
    """Sends rows back and sums them. Returns (combined_x, combined_topk_weights or None, event)."""
    routing = find(HighThroughputRouting, handle)
    checks.tensor("x", x, _PAYLOADS, (None, None))
    usable(routing, x)
    if x.shape[0] != routing.rows:
        raise wrong("x", "the %d rows that were received" % routing.rows, x.shape[0])
    checks.optional("topk_weights", topk_weights, (torch.float32,), (x.shape[0], routing.handle.topk), x.device)
    return sum_rows(routing, launch_on, x, topk_weights, bias, max_sms=max_sms)


def sum_rows(routing: Any, launch_on: Any, x: torch.Tensor, topk_weights: Optional[torch.Tensor], bias: Any,
             **how: int) -> Tuple[Any, ...]:
    """The combine of either buffer, of what was checked. `how`: of epx.Handle.combine()."""
    pool, topk = routing.pool, routing.handle.topk
    biases = bias_list(bias, (routing.tokens, x.shape[1]), x)
    launch: Launch = launch_on(pool.group)
    with queueing(launch) as used:
        with launch.context():
            used += [x, topk_weights, *biases]
            rows, weights = within_reach(pool, x, launch), within_reach(pool, topk_weights, launch)
            out = torch.empty(routing.tokens, x.shape[1], dtype=x.dtype, device=x.device)
            out_weights = None
            if topk_weights is not None:
                out_weights = torch.empty(routing.tokens, topk, dtype=torch.float32, device=x.device)
            used += [rows, weights, out, out_weights]
            routing.handle.combine(rows, out, topk_weights=weights, out_topk_weights=out_weights, bias=biases,
                                   stream=launch.address, **how)
        event = launch.finish([x, topk_weights, *biases], [out, out_weights])
    return out, out_weights, event


def bias_list(bias: Any, shape: Sequence[int], x: torch.Tensor) -> List[torch.Tensor]:
    given = list(bias) if isinstance(bias, (tuple, list)) else [bias]
    if len(given) > 2:
        raise wrong("bias", "None, a tensor or a pair of tensors", "%d tensors" % len(given))
    return [checks.tensor("bias", b, (x.dtype,), shape, x.device) for b in given if b is not None]


def within_reach(pool: Pool, x: Optional[torch.Tensor], launch: Launch) -> Optional[torch.Tensor]:
    """Returns `x`, or a copy of it in the heap. EPX reads registered memory in place and stages other memory in its
    receive buffer. A copy is needed if `x` is not registered yet and has more rows than the receive buffer."""
    if x is None or x.shape[0] <= pool.group.info.max_recv_tokens or pool.heap.holds(x):
        return x
    if pool.group.register(x, launch.address):
        return x
    copy = pool.heap.empty(x.shape, x.dtype)
    launch.follow()
    return copy.copy_(x)
