# SPDX-License-Identifier: Apache-2.0
"""Counts and prefix sums: get_dispatch_layout() before there is a group, and the fields of high-throughput handles.

DeepEP divides the tokens of a rank into C channels of ceil(T / C) tokens each. EPX has no channels; the fields are
computed for callers that read them.
"""

import functools
from typing import Optional, Tuple

import torch

NVL_PEERS = 8  # ranks per node in DeepEP: the width of send_nvl_head


def dispatch_layout(topk_idx: torch.Tensor, num_experts: int, nranks: int, node_of: Tuple[int, ...]) -> Tuple[
        torch.Tensor, Optional[torch.Tensor], torch.Tensor, torch.Tensor]:
    """(tokens per rank, tokens per node or None, tokens per expert, is token in rank). Does not synchronise. Expert ids
    out of range are not counted; dispatch reports them."""
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
