# SPDX-License-Identifier: Apache-2.0
"""Scores of a gate whose load is unbalanced: one rank gets `ratio` times the tokens of each other."""

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
    """How many tokens the hot rank gets, so that it has `ratio` times what each other rank gets; all, if that is not
    possible.

    A token of the hot rank has one expert there and the rest elsewhere; other tokens have none there. With h hot tokens
    each other rank gets h * q(K - 1) + (T - h) * q(K), and h = ratio times that is linear in h.
    """
    local = num_experts // num_ranks
    fewer = reach_probability(num_experts - local, local, num_topk - 1)
    all_picks = reach_probability(num_experts - local, local, num_topk)
    return min(float(num_tokens), ratio * num_tokens * all_picks / (1.0 + ratio * (all_picks - fewer)))


def _ranks_of_tokens(num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float) -> torch.Tensor:
    """bool [num_tokens, num_ranks]: which ranks get which token. Rank 0 gets `ratio` times what each other rank gets,
    as far as top-k can do it; the others' numbers differ by 1 at most. A token has as many ranks as at random."""
    local = num_experts // num_ranks
    least = -(-num_topk // local)  # a rank takes `local` entries at most
    most = max(float(least), min(num_topk, num_ranks, (ratio + num_ranks - 1) / ratio))  # the hot rank gets all tokens
    usual = num_ranks * reach_probability(num_experts, local, num_topk)
    total = round(num_tokens * min(max(usual, least), most))
    each, more = divmod(total, num_tokens)
    wanted = torch.full((num_tokens,), each, dtype=torch.int64)
    wanted[torch.randperm(num_tokens)[:more]] += 1
    hot = min(num_tokens, round(total * ratio / (ratio + num_ranks - 1)))
    order = torch.argsort(wanted + torch.rand(num_tokens, dtype=torch.float32), descending=True)
    chosen = torch.zeros(num_tokens, num_ranks, dtype=torch.bool)
    chosen[order[:hot], 0] = True
    # The other places are dealt to the other ranks in turn: a token's are different ranks, as it has fewer than those.
    places = torch.repeat_interleave(torch.arange(num_tokens), wanted - chosen[:, 0].long())
    turn = 1 + torch.randperm(num_ranks - 1)
    chosen[places, turn[torch.arange(places.shape[0]) % (num_ranks - 1)]] = True
    return chosen


def _exact_scores(scores: torch.Tensor, num_ranks: int, num_topk: int, ratio: float) -> torch.Tensor:
    """Raises the scores of the experts of chosen ranks above all others, one expert of each rank most of all."""
    num_tokens, num_experts = scores.shape
    local = num_experts // num_ranks
    chosen = _ranks_of_tokens(num_tokens, num_experts, num_ranks, num_topk, ratio)
    scores += 2.0 * chosen.repeat_interleave(local, 1)
    tokens, ranks = chosen.nonzero(as_tuple=True)
    scores[tokens, ranks * local + torch.randint(0, local, ranks.shape)] += 2.0
    return scores


def get_unbalanced_scores(num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float,
                          precise: bool = False) -> torch.Tensor:
    """fp32 scores [num_tokens, num_experts] whose top-k gives rank 0 `ratio` times the tokens of each other rank: by
    chance, or with `precise` in exact numbers, as near as top-k can come. 1 or less: the same for all ranks."""
    scores = torch.rand(num_tokens, num_experts, dtype=torch.float32)
    if not num_tokens or num_ranks == 1:
        return scores
    if precise:
        return _exact_scores(scores, num_ranks, num_topk, max(ratio, 1.0))
    if ratio <= 1.0 or num_topk > num_experts - num_experts // num_ranks:
        return scores
    local = num_experts // num_ranks
    wanted = hot_tokens(num_tokens, num_experts, num_ranks, num_topk, ratio)
    hot = (torch.rand(num_tokens, dtype=torch.float32, device=scores.device) < wanted / num_tokens).nonzero()[:, 0]
    scores[:, :local] -= 2.0  # nobody by chance, but scores of all experts differ
    scores[hot, torch.randint(0, local, hot.shape, device=scores.device)] += 4.0
    return scores
