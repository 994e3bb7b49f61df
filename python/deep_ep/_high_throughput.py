# SPDX-License-Identifier: Apache-2.0
"""High throughput: what its calls in C (python/calls) ask of Python, and the fields of handles."""

import struct
from typing import Any, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import epx
import torch

from . import _checks as checks
from ._checks import wrong
from ._engine import Engine, Pool
from ._layout import NVL_PEERS, in_nodes, nodes_on, receive_field, send_fields, source_meta
from ._routing import Handle, HighThroughputRouting, attach
from ._streams import CudaLaunch, HostLaunch, Origin, hinted, join, queueing, refuse_capture

Launch = Union[HostLaunch, CudaLaunch]


def high_pool(engine: Engine, tokens: torch.Tensor, experts: int, count: int, hidden_bytes: int, topk: int,
              worst: bool) -> Pool:
    """The pool for a dispatch. Collective if there is none."""
    if not worst:
        refuse_capture(tokens.device, "dispatch", "give num_worst_tokens")
    return engine.high_throughput(tokens.device, experts, count, hidden_bytes, topk)


def larger_pool(engine: Engine, pool: Pool, failure: epx.EpxError, tokens: torch.Tensor, experts: int, count: int,
                hidden_bytes: int, topk: int, worst: bool) -> Pool:
    """A rank has more tokens than the group is for: all ranks have learnt it in the update, and create a larger one.
    With num_worst_tokens no rank waits for the update, so they do not learn it at the same point."""
    if worst or pool.group.error() is not None:
        raise hinted(failure) from None
    pool.finish()  # the update still uses tensors of the call that failed
    return engine.grow_high_throughput(tokens.device, experts, count, hidden_bytes, topk)


def routing_indices(engine: Engine, in_rank: torch.Tensor, per_expert: torch.Tensor) -> torch.Tensor:
    """Indices where the caller has none: one expert on each rank that the token goes to."""
    ranks, experts = engine.nranks, per_expert.shape[0]
    local = engine.local_experts(experts)
    if ranks > 32:
        raise wrong("topk_idx", "a tensor, which is required with more than 32 ranks", "None")
    first = torch.arange(ranks, device=in_rank.device) * local
    if (ranks - 1) * local >= experts:
        raise wrong("num_tokens_per_expert", "experts on each of %d ranks where topk_idx is None" % ranks,
                    "%d experts" % experts)
    return torch.where(in_rank, first, -1)


def sum_counts(engine: Engine, per_expert: torch.Tensor, alignment: int) -> List[int]:
    """The aligned rows of each local expert without a top-k: the counts of the callers, summed over the ranks."""
    own = per_expert.tolist()
    parts = engine.bootstrap.allgather(struct.pack("%di" % len(own), *own))
    local = engine.local_experts(len(own))
    sums = [sum(column) for column in zip(*(struct.unpack("%di" % len(own), part) for part in parts))]
    mine = sums[engine.rank * local:(engine.rank + 1) * local]
    return [-(-n // alignment) * alignment for n in mine + [0] * (local - len(mine))]


def aligned(counts: torch.Tensor, alignment: int) -> torch.Tensor:
    """The number of rows of each local expert, rounded up to the alignment."""
    return counts if alignment == 1 else (counts + alignment - 1) // alignment * alignment


class LazyHandle(tuple):
    """The handle tuple of DeepEP: 6 fields inside a node, 10 between nodes. EPX does not need the fields. They are
    computed when one is first read, and complete for each stream that reads one."""

    _computed: Optional[Tuple[Tuple[Any, ...], Origin]]

    def __new__(cls, *values: Any) -> Any:
        """LazyHandle(routing, length, origin). One iterable of fields gives a plain tuple: some callers rebuild it."""
        if len(values) != 3:
            return tuple(*values)
        self = super().__new__(cls)
        self.routing, self._length, self._origin = values
        self._computed = None
        return self

    def _all(self) -> Tuple[Any, ...]:
        origin = self._origin
        if self._computed is None and origin is not None:
            engine, launch, parts, stream = origin
            join(self.routing.pool, launch, stream, [parts.in_rank, parts.counts, parts.sources])
            fields = _handle_fields(engine, self.routing, parts)
            if self.routing.pool.capturing():  # they are in the graph's memory, where replays write them
                return fields
            self._computed = fields, Origin(self.routing.pool.device)
            self._origin = None  # lets go of what it needed
        assert self._computed is not None
        fields, made = self._computed
        made.join(fields)
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


class Parts(NamedTuple):
    """What the fields of a handle are computed from."""

    in_rank: torch.Tensor
    counts: torch.Tensor  # of all ranks: [R,R] rows from rank to rank, [R] tokens, [R] tokens through each relay
    sources: torch.Tensor  # [2,N]: rank and token of each row, of which there may be fewer
    bounded: bool  # rows past the last one are there, and nothing is in them
    channels: int


def make_handle(engine: Engine, routing: HighThroughputRouting, launch: Optional[Launch], in_rank: torch.Tensor,
                counts: torch.Tensor, sources: torch.Tensor, bounded: bool, channels: int, stream: int) -> Handle:
    """The handle of a dispatch with a new routing, which was queued on a stream."""
    parts = Parts(in_rank, counts, sources, bounded, channels)
    if routing.in_graph:  # the fields follow every replay
        return _handle_fields(engine, routing, parts)
    return LazyHandle(routing, 6 if engine.nnodes == 1 else 10, (engine, launch, parts, stream))


def _handle_fields(engine: Engine, routing: HighThroughputRouting, parts: Parts) -> Handle:
    in_rank, counts, sources, bounded, channels = parts
    ranks = engine.nranks
    matrix, tokens, through = counts.split((ranks * ranks, ranks, ranks))
    matrix, sources = matrix.view(ranks, ranks), sources[:, :routing.rows]
    if bounded:  # rows past the end are not written
        ends = torch.arange(sources.shape[1], device=sources.device) >= matrix[:, engine.rank].sum()
        sources = sources.masked_fill(ends, -1)
    src_rank, src_token = sources[0], sources[1].data
    prefix, head = send_fields(in_rank, channels)
    recv_prefix = receive_field(src_rank, src_token, tokens, channels)
    rank_prefix = matrix.cumsum(0, dtype=torch.int32)
    if engine.nnodes == 1:
        return rank_prefix, prefix, recv_prefix, attach(src_token, routing), in_rank, head
    goes = in_nodes(in_rank, engine.node_of)
    node_prefix, node_head = send_fields(goes, channels)
    relayed = torch.zeros(engine.nnodes, dtype=torch.int32, device=in_rank.device)
    relayed.index_add_(0, nodes_on(in_rank.device, engine.node_of), through)
    relayed[engine.node] = goes[:, engine.node].sum()
    relayed_sum = relayed.cumsum(0, dtype=torch.int32)
    passing = 0 if bounded else int(relayed_sum[-1])  # num_worst_tokens is given in order not to wait here
    local_rank = engine.node_of[:engine.rank].count(engine.node)
    meta = source_meta(src_rank, engine.node_of, local_rank)
    return (in_rank, node_prefix, prefix, relayed[:, None].expand(-1, channels).contiguous(), relayed_sum, recv_prefix,
            rank_prefix[:, engine.rank].contiguous(), attach(meta, routing), node_head,
            torch.full((passing, NVL_PEERS), -1, dtype=torch.int32, device=in_rank.device))


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


def within_reach(pool: Pool, x: Optional[torch.Tensor], launch: Optional[Launch]) -> Optional[torch.Tensor]:
    """Returns `x`, or a copy of it in the heap. EPX reads registered memory in place and stages other memory in its
    receive buffer. A copy is needed if `x` is not registered yet and has more rows than the receive buffer."""
    if x is None or x.shape[0] <= pool.group.info.max_recv_tokens or pool.heap.holds(x):
        return x
    if pool.group.register(x, pool.stream() if launch is None else launch.address):
        return x
    return pool.heap.empty(x.shape, x.dtype).copy_(x)
