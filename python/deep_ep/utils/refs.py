# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine in plain torch, over torch.distributed: what DeepEP's tests compare with."""

import math
from typing import Any, List, Optional, Tuple

import torch
import torch.distributed as dist

from .envs import get_global_seed

_PRIME = 131071


def _to_each_rank(values: torch.Tensor, rows: List[torch.Tensor]) -> Tuple[torch.Tensor, List[int]]:
    """Sends rows[r] of [T, columns] to rank r, as bytes. Returns what came, by rank, and the rows of each."""
    given = torch.tensor([at.numel() for at in rows], dtype=torch.int64, device=values.device)
    taken = torch.empty_like(given)
    dist.all_to_all_single(taken, given)
    flat = torch.empty(0, values.shape[1] * values.element_size(), dtype=torch.uint8, device=values.device)
    if values.numel():
        flat = values.contiguous().view(torch.uint8)
    out = torch.empty(int(taken.sum()), flat.shape[1], dtype=torch.uint8, device=values.device)
    dist.all_to_all_single(out, flat[torch.cat(rows)], taken.tolist(), given.tolist())
    return out.view(values.dtype), taken.tolist()


def dispatch(x: Any, topk_idx: torch.Tensor, topk_weights: Optional[torch.Tensor], num_max_tokens_per_rank: int,
             num_experts: int) -> Tuple[Any, torch.Tensor, Optional[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Without expansion, by (source rank, token): (recv_x or a pair, recv_topk_idx, recv_topk_weights, source rank *
    num_max_tokens_per_rank + token of each row, rows of each rank)."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    local = num_experts // ranks
    owner = torch.where(topk_idx < 0, -1, torch.div(topk_idx, local, rounding_mode="floor"))
    rows = [(owner == r).any(1).nonzero().flatten() for r in range(ranks)]

    def send(values: torch.Tensor) -> torch.Tensor:
        return _to_each_rank(values, rows)[0]

    tokens = x if isinstance(x, (tuple, list)) else (x,)
    received = tuple(send(part) for part in tokens)
    idx = send(topk_idx) - rank * local
    idx = torch.where((idx >= 0) & (idx < local), idx, -1)
    weights = send(topk_weights) if topk_weights is not None else None
    numbers = rank * num_max_tokens_per_rank + torch.arange(topk_idx.shape[0], device=topk_idx.device)
    sources, counts = _to_each_rank(numbers.to(torch.int32)[:, None], rows)
    return (received if len(tokens) > 1 else received[0], idx, weights, sources[:, 0],
            torch.tensor(counts, dtype=torch.int32))


def generate_pre_combine_data(src_token_global_idx: torch.Tensor, num_max_tokens_per_rank: int, num_topk: int,
                              hidden: int) -> torch.Tensor:
    """bf16 [tokens, num_topk, hidden]: what the expert of each entry returns, a function of the token's global index
    and the global seed."""
    device = src_token_global_idx.device
    most = dist.get_world_size() * num_max_tokens_per_rank * num_topk
    entry = src_token_global_idx.long()[:, None] * num_topk + torch.arange(num_topk, device=device)
    phase = ((entry * _PRIME % most).float() + 1) / most
    channels = torch.arange(1, hidden + 1, device=device, dtype=torch.float32)
    return torch.sin(phase[..., None] * channels + math.sin(float(get_global_seed()))).to(torch.bfloat16)


def ordered_accumulate(data: torch.Tensor, initial_value: Optional[torch.Tensor] = None) -> torch.Tensor:
    """The sum over dimension 1, in order, in fp32, rounded once."""
    total = torch.zeros_like(data[:, 0], dtype=torch.float32) if initial_value is None else initial_value.float()
    for k in range(data.shape[1]):
        total = total + data[:, k].float()
    return total.to(data.dtype)


def _fold(y: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Sums the entries of each group in order, rounds, and stores the sum at the group's last entry; 0 elsewhere."""
    out = torch.zeros_like(y)
    topk = y.shape[1]
    for last in range(topk):
        later = (group[:, last + 1:] == group[:, last:last + 1]).any(1)
        total = torch.zeros_like(y[:, 0], dtype=torch.float32)
        for k in range(last + 1):
            same = (group[:, k] == group[:, last])[:, None]
            total = torch.where(same, total + y[:, k].float(), total)
        out[:, last] = torch.where(later[:, None], out[:, last], total.to(y.dtype))
    return out


def combine(y: torch.Tensor, topk_idx: torch.Tensor, num_scaleout_ranks: int, num_scaleup_ranks: int, num_experts: int,
            bias: Any, reduce_in_local: bool, reduce_in_scaleup: bool) -> torch.Tensor:
    """[tokens, hidden]: sums of y [tokens, num_topk, hidden]. Sums of ranks (reduce_in_local) and of scale-up domains
    (reduce_in_scaleup) are rounded first; `bias` is None, a tensor or a pair."""
    local = num_experts // (num_scaleout_ranks * num_scaleup_ranks)
    rank = torch.where(topk_idx < 0, -1, torch.div(topk_idx, local, rounding_mode="floor"))
    if reduce_in_local:
        y = _fold(y, rank)
    if reduce_in_scaleup:
        y = _fold(y, torch.where(rank < 0, -1, torch.div(rank, num_scaleup_ranks, rounding_mode="floor")))
    given = bias if isinstance(bias, (tuple, list)) else () if bias is None else (bias,)
    start = None
    for part in given:
        start = part.float() if start is None else start + part.float()
    return ordered_accumulate(y, start)
