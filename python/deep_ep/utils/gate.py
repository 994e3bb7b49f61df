# SPDX-License-Identifier: Apache-2.0
"""Scores of a gate whose load is unbalanced: one rank gets `ratio` times the tokens of the average rank."""

import math

import torch


def reach_probability(num_experts: int, num_local_experts: int, picks: int) -> float:
    """The probability that `picks` different experts of num_experts include one of the local ones."""
    if picks <= 0:
        return 0.0
    return 1.0 - math.comb(num_experts - num_local_experts, picks) / math.comb(num_experts, picks)


def rank_load(topk_idx: torch.Tensor, num_experts: int, num_ranks: int) -> torch.Tensor:
    """How many tokens each rank gets: int64 [num_ranks]."""
    local = num_experts // num_ranks
    owner = torch.where(topk_idx < 0, num_ranks, torch.div(topk_idx, local, rounding_mode="floor"))
    seen = torch.zeros(topk_idx.shape[0], num_ranks + 1, dtype=torch.bool, device=topk_idx.device)
    return seen.scatter_(1, owner.long(), True)[:, :num_ranks].sum(0)


def hot_tokens(num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float) -> float:
    """How many tokens the hot rank gets, so that it has `ratio` times the average; all, if that is not possible.

    A token of the hot rank has one expert there and the rest elsewhere; other tokens have none there. With h hot tokens
    each other rank gets h * q(K - 1) + (T - h) * q(K), and h = ratio * average is linear in h.
    """
    local, others = num_experts // num_ranks, num_ranks - 1
    fewer = reach_probability(num_experts - local, local, num_topk - 1)
    all_picks = reach_probability(num_experts - local, local, num_topk)
    slope = num_ranks - ratio - ratio * others * (fewer - all_picks)
    wanted = ratio * others * num_tokens * all_picks
    return num_tokens if slope <= 0 else min(float(num_tokens), wanted / slope)


def get_unbalanced_scores(num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float,
                          precise: bool = False) -> torch.Tensor:
    """fp32 scores [num_tokens, num_experts] whose top-k gives rank 0 `ratio` times the tokens of the average rank. With
    `precise`, the number of its tokens is exact; otherwise each token goes there by chance. 1 or less: random."""
    scores = torch.rand(num_tokens, num_experts, dtype=torch.float32)
    if ratio <= 1.0 or not num_tokens or num_ranks == 1 or num_topk > num_experts - num_experts // num_ranks:
        return scores
    local = num_experts // num_ranks
    wanted = hot_tokens(num_tokens, num_experts, num_ranks, num_topk, ratio)
    if precise:
        hot = torch.randperm(num_tokens, device=scores.device)[:round(wanted)]
    else:
        hot = (torch.rand(num_tokens, dtype=torch.float32, device=scores.device) < wanted / num_tokens).nonzero()[:, 0]
    scores[:, :local] -= 2.0  # nobody by chance, but scores of all experts differ
    scores[hot, torch.randint(0, local, hot.shape, device=scores.device)] += 4.0
    return scores
