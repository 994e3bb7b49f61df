# SPDX-License-Identifier: Apache-2.0
"""The handles of HybridEPBuffer: tuples with DeepEP's fields, for callers that read them."""

from typing import Any, NamedTuple, Optional, Tuple

import torch

from ._checks import wrong
from ._elastic_handle import EPHandle
from ._high_throughput import LazyHandle
from ._streams import Origin


class Routing(NamedTuple):
    """The routing of a dispatch."""

    elastic: EPHandle
    topk_idx: torch.Tensor
    num_experts: int
    token_slots: int  # DeepEP's num_of_tokens_per_rank
    origin: Origin
    tokens_per_expert: Optional[torch.Tensor] = None  # with permute: padded
    recv_topk_idx: Optional[torch.Tensor] = None  # without: local experts of each row
    limit: Optional[int] = None  # with permute: the rows beyond which they are dropped

    @property
    def permuted(self) -> bool:
        """True for a dispatch_with_permute()."""
        return self.tokens_per_expert is not None

    def join(self) -> "Routing":
        """The same, which the stream that is current now may use."""
        elastic, counts = self.elastic, self.tokens_per_expert
        self.origin.join([
            counts if counts is not None and counts.is_cuda else None,  # on the host, unless the call was non_blocking
            self.topk_idx, self.recv_topk_idx, elastic.recv_src_metadata, elastic.psum_num_recv_tokens_per_scaleup_rank,
            elastic.psum_num_recv_tokens_per_expert, elastic.num_unaligned_recv_tokens_per_expert])
        return self


class HybridEPHandle(LazyHandle):
    """8 fields, and 12 with permute. Those that callers read: [3], int32 [1], tokens with an expert here; [4], bool
    [tokens, local experts], the rows that are here; with permute [7], rows of each local expert without padding, and
    [-1], int32 [1]: 1 if rows were dropped. They are computed whenever one is read: a graph may have been replayed
    since the last time."""

    routing: Routing

    def _all(self) -> Tuple[Any, ...]:
        return _fields(self.routing.join())


def make_handle(routing: Routing) -> HybridEPHandle:
    """The handle of a routing."""
    return HybridEPHandle(routing, 12 if routing.permuted else 8, None)


def routing_of(handle: Any, permuted: bool) -> Routing:
    """The routing of a handle, or of a plain tuple of its fields."""
    call = "dispatch_with_permute()" if permuted else "dispatch()"
    found = getattr(handle, "routing", None)
    if not isinstance(found, Routing) and isinstance(handle, (tuple, list)):
        found = next((field for field in handle if isinstance(field, Routing)), None)
    if not isinstance(found, Routing) or found.permuted != permuted:
        raise wrong("handle", "the handle of a " + call, type(handle).__name__ if not isinstance(
            found, Routing) else "that of another kind of dispatch")
    return found.join()


def _fields(routing: Routing) -> Tuple[Any, ...]:
    elastic = routing.elastic
    received = elastic.psum_num_recv_tokens_per_scaleup_rank[-1:]
    first = (None, None, None, received, _local_map(routing))
    last = (routing.token_slots, routing, routing.topk_idx.shape[0])
    if not routing.permuted:
        return first + last
    return (*first, None, None, _kept(elastic, routing.limit), *last, _dropped(elastic, routing.limit))


def _starts(elastic: EPHandle) -> torch.Tensor:
    """int32 [local experts]: the first row of each expert, if no row is dropped."""
    return elastic.psum_num_recv_tokens_per_expert - elastic.num_unaligned_recv_tokens_per_expert


def _kept(elastic: EPHandle, limit: Optional[int]) -> torch.Tensor:
    """int32 [local experts]: rows of each expert, without padding, that are below the limit."""
    rows = elastic.num_unaligned_recv_tokens_per_expert
    return rows if limit is None else torch.minimum(rows, (limit - _starts(elastic)).clamp(min=0))


def _dropped(elastic: EPHandle, limit: Optional[int]) -> torch.Tensor:
    """int32 [1]: 1 if rows are beyond the limit."""
    ends = elastic.psum_num_recv_tokens_per_expert
    if limit is None:
        return torch.zeros_like(ends[-1:])
    beyond = (ends > limit) & (elastic.num_unaligned_recv_tokens_per_expert > 0)
    return beyond.any().to(torch.int32).view(1)


def padded_counts(elastic: EPHandle, limit: Optional[int]) -> torch.Tensor:
    """int64 [local experts]: rows of each expert, with padding, that are below the limit."""
    align = elastic.expert_alignment
    ends = ((elastic.num_unaligned_recv_tokens_per_expert.long() + align - 1) // align * align).cumsum(0)
    if limit is not None:
        ends = ends.clamp(max=limit)
    return ends.diff(prepend=torch.zeros_like(ends[:1]))


def _local_map(routing: Routing) -> torch.Tensor:
    """bool [tokens, local experts]: a line for each token that came here, by source rank and token."""
    elastic = routing.elastic
    local = elastic.num_unaligned_recv_tokens_per_expert.shape[0]
    if routing.recv_topk_idx is not None:
        return _marked(routing.recv_topk_idx, local)
    starts = _starts(elastic)[1:].contiguous()
    at = elastic.recv_src_metadata[:, 2:]
    behind = torch.arange(at.shape[0], device=at.device) >= elastic.psum_num_recv_tokens_per_scaleup_rank[-1]
    experts = torch.bucketize(at.contiguous(), starts, right=True)
    absent = (at < 0) | behind[:, None]
    if routing.limit is not None:
        absent |= at >= routing.limit
    return _marked(torch.where(absent, -1, experts), local)


def _marked(experts: torch.Tensor, local: int) -> torch.Tensor:
    """bool [tokens, local] of local experts [tokens, K], where -1 is none."""
    chosen = torch.zeros(experts.shape[0], local + 1, dtype=torch.bool, device=experts.device)
    return chosen.scatter_(1, torch.where(experts < 0, local, experts).long(), True)[:, :local]
