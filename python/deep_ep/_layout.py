# SPDX-License-Identifier: Apache-2.0
"""Counts and prefix sums: get_dispatch_layout(), and the fields of high-throughput handles.

DeepEP divides the tokens of a rank into C channels of ceil(T / C) tokens each. EPX has no channels; the fields are
computed for callers that read them.
"""

import ctypes
import functools
from typing import Any, Dict, List, Optional, Tuple

import epx
import torch
from epx import _abi
from epx._library import check, load
from epx.tensors import fill

from ._checks import wrong
from ._engine import Pool
from ._results import Results

KEPT_SIZES = 8  # numbers of tokens whose results are kept for reuse
NVL_PEERS = 8  # ranks per node in DeepEP: the width of send_nvl_head


def dispatch_layout(topk_idx: torch.Tensor, num_experts: int, nranks: int, node_of: Tuple[int, ...]) -> Tuple[
        torch.Tensor, Optional[torch.Tensor], torch.Tensor, torch.Tensor]:
    """(tokens per rank, tokens per node or None, tokens per expert, is token in rank). Does not synchronise.

    Expert ids out of range are not counted. dispatch reports them; on the CPU, check_experts() reports them earlier.
    """
    local = -(-num_experts // nranks)
    none = (topk_idx < 0) | (topk_idx >= num_experts)
    experts = topk_idx.masked_fill(none, num_experts).long()
    ranks = torch.div(experts, local, rounding_mode="floor").masked_fill(none, nranks)
    per_expert = _count(experts.flatten(), num_experts)
    in_rank = _mark(ranks, nranks)
    per_node = None
    nnodes = max(node_of) + 1
    if nnodes > 1:
        per_node = in_nodes(in_rank, node_of).sum(0, dtype=torch.int32)
    return in_rank.sum(0, dtype=torch.int32), per_node, per_expert, in_rank


def check_experts(topk_idx: torch.Tensor, num_experts: int) -> None:
    """Raises for ids that are neither an expert nor -1. Does nothing on a GPU, where it would wait for the device."""
    if topk_idx.device.type != "cpu" or topk_idx.numel() == 0:
        return
    least, most = (int(value) for value in topk_idx.aminmax())
    if least < -1 or most >= num_experts:
        token, k = torch.nonzero((topk_idx < -1) | (topk_idx >= num_experts))[0].tolist()
        raise wrong("topk_idx[%d][%d]" % (token, k), "-1 (none) to %d (num_experts - 1)" % (num_experts - 1),
                    int(topk_idx[token, k]))


class LayoutPlan:
    """The structs for the C library for one kind of get_dispatch_layout() on a GPU. They are created once; each call
    only changes their data pointers."""

    def __init__(self, pool: Pool, topk: int, idx_dtype: torch.dtype) -> None:
        info = pool.group.info
        self._pool, self.device, self._lib = pool, pool.device, load()
        self._ranks, self._experts, self._nodes = info.nranks, info.num_experts, info.nnodes
        self._topk, self._dtype = topk, idx_dtype
        self._sizes = [self._ranks, self._experts, self._nodes]
        self._results: Dict[int, Results] = {}  # by the number of tokens
        self._idx, self._per_rank, self._per_node, self._per_expert, self._marks = (
            _abi.TensorStruct() for _ in range(5))
        fill(self._idx, 0, epx.DType.INT64 if idx_dtype is torch.int64 else epx.DType.INT32, (0, topk), None)
        fill(self._per_rank, 0, epx.DType.INT32, (self._ranks,), None)
        fill(self._per_node, 0, epx.DType.INT32, (self._nodes,), None)
        fill(self._per_expert, 0, epx.DType.INT32, (self._experts,), None)
        fill(self._marks, 0, epx.DType.UINT8, (0, self._ranks), None)
        pointer = ctypes.pointer
        self._outputs = _abi.DispatchLayoutOutputsStruct(
            tokens_per_rank=pointer(self._per_rank), tokens_per_expert=pointer(self._per_expert),
            token_in_rank=pointer(self._marks))
        if self._nodes > 1:
            self._outputs.tokens_per_node = pointer(self._per_node)
        self._addresses = ctypes.addressof(self._idx), ctypes.addressof(self._outputs)

    def fits(self, pool: Optional[Pool], topk_idx: Any, num_experts: int) -> bool:
        """Is this the plan for such a call on this pool? All that the checks of a call would look at."""
        if pool is not self._pool or num_experts != self._experts or type(topk_idx) is not torch.Tensor:
            return False
        shape = topk_idx.shape
        return (topk_idx.dtype is self._dtype and len(shape) == 2 and shape[1] == self._topk and shape[0] > 0 and
                topk_idx.get_device() == self.device.index and topk_idx.is_contiguous())

    def _make(self, tokens: int) -> List[torch.Tensor]:
        """New results: the counts by rank, expert and node, of one piece of memory, and the marks."""
        counts = torch.empty(sum(self._sizes), dtype=torch.int32, device=self.device).split_with_sizes(self._sizes)
        return [*counts, torch.empty(tokens, self._ranks, dtype=torch.bool, device=self.device)]

    def _results_for(self, tokens: int) -> Results:
        if len(self._results) >= KEPT_SIZES:
            self._results.clear()
        made = functools.partial(self._make, tokens)
        results = self._results[tokens] = Results(made, made, self.device)
        return results

    def run(self, topk_idx: torch.Tensor, stream: int, reuse: bool = True) -> Tuple[
            torch.Tensor, Optional[torch.Tensor], torch.Tensor, torch.Tensor]:
        """Like dispatch_layout(), with one kernel. Allocations took the host longer than the rest: see Results. Not
        `reuse`: other streams read the results, and torch's allocator is told of them."""
        tokens = topk_idx.shape[0]
        results = self._results.get(tokens) or self._results_for(tokens)
        capturing = self._pool.capturing()
        if capturing:
            self._pool.captured = True  # a replay runs the kernel with the memory of this group
        tensors, _kept = results.take(stream, not reuse or capturing)
        per_rank, per_expert, per_node, marks = tensors
        self._idx.shape[0] = self._marks.shape[0] = tokens
        self._idx.data, self._marks.data = topk_idx.data_ptr(), marks.data_ptr()
        self._per_rank.data, self._per_expert.data = per_rank.data_ptr(), per_expert.data_ptr()
        if self._nodes > 1:
            self._per_node.data = per_node.data_ptr()
        check(self._lib.epx_dispatch_layout(self._pool.group.address, *self._addresses, stream))
        return per_rank, per_node if self._nodes > 1 else None, per_expert, marks


def _count(values: torch.Tensor, n: int) -> torch.Tensor:
    """The number of occurrences of each of 0..n-1. The value n means none."""
    zeros = torch.zeros(n + 1, dtype=torch.int32, device=values.device)
    return zeros.scatter_add_(0, values, torch.ones_like(values, dtype=torch.int32))[:n].contiguous()


def _mark(columns: torch.Tensor, n: int) -> torch.Tensor:
    """bool [T, n]: which of 0..n-1 occur in each row of `columns`. The value n means none."""
    zeros = torch.zeros(columns.shape[0], n + 1, dtype=torch.bool, device=columns.device)
    return zeros.scatter_(1, columns, True)[:, :n].contiguous()


@functools.lru_cache(maxsize=None)
def nodes_on(device: torch.device, node_of: Tuple[int, ...]) -> torch.Tensor:
    """The node of each rank, int64 [R]. Created once, because the host waits for each copy to a GPU."""
    with torch.inference_mode(False):
        return torch.tensor(node_of, device=device)


def in_nodes(in_rank: torch.Tensor, node_of: Tuple[int, ...]) -> torch.Tensor:
    """bool [T, nodes]: which nodes each token goes to."""
    node = nodes_on(in_rank.device, node_of)
    counts = torch.zeros(in_rank.shape[0], max(node_of) + 1, dtype=torch.int32, device=in_rank.device)
    return counts.index_add_(1, node, in_rank.to(torch.int32)) > 0


def send_fields(goes: torch.Tensor, channels: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """For bool [T, X]: (inclusive prefix sum over channels [X, C], index of each token within its channel [T, X], or
    -1)."""
    tokens = goes.shape[0]
    per = max(-(-tokens // channels), 1)
    before = torch.zeros(tokens + 1, goes.shape[1], dtype=torch.int32, device=goes.device)
    torch.cumsum(goes, 0, dtype=torch.int32, out=before[1:])
    ends = (torch.arange(1, channels + 1, device=goes.device) * per).clamp_(max=tokens)
    starts = torch.div(torch.arange(tokens, device=goes.device), per, rounding_mode="floor") * per
    head = torch.where(goes, before[:-1] - before[starts], -1)
    return before[ends].t().contiguous(), head


def receive_field(src_rank: torch.Tensor, src_token: torch.Tensor, rank_tokens: torch.Tensor,
                  channels: int) -> torch.Tensor:
    """Rows of each source rank before each of its channels, [R, C]. Rows with source -1 are not counted."""
    nranks = rank_tokens.shape[0]
    per = torch.div(rank_tokens + (channels - 1), channels, rounding_mode="floor").clamp_(min=1)
    source = src_rank.clamp(min=0).long()
    place = source * channels + torch.div(src_token, per[source], rounding_mode="floor")
    counts = _count(place.masked_fill_(src_rank < 0, nranks * channels), nranks * channels).view(nranks, channels)
    return counts.cumsum(1, dtype=torch.int32) - counts


def source_meta(src_rank: torch.Tensor, node_of: Tuple[int, ...], local_rank: int) -> torch.Tensor:
    """uint8 [N, 8]: the node of the source and the bit of this rank, each as int32."""
    node = nodes_on(src_rank.device, node_of)[src_rank.clamp(min=0).long()].to(torch.int32)
    bits = torch.full_like(node, 1 << local_rank)
    return torch.stack((node, bits), 1).view(torch.uint8)
