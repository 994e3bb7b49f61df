# SPDX-License-Identifier: Apache-2.0
"""DeepEP's module of HybridEPBuffer (branch hybrid-ep), under the name that torchtitan imports."""

from typing import Optional, Tuple

import torch

from .hybrid import HybridEPBuffer, probs_of_weights

__all__ = ["HybridEPBuffer", "indices_to_map"]


def indices_to_map(topk_idx: torch.Tensor, topk_weights: Optional[torch.Tensor], num_of_tokens: int,
                   num_of_experts: int) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """(bool [T, E], f32 [T, E] or None) of indices [T, K] and their weights. An index that no expert has is none."""
    idx = topk_idx.long()
    chosen = torch.zeros(num_of_tokens, num_of_experts + 1, dtype=torch.bool, device=idx.device)
    chosen.scatter_(1, torch.where((idx < 0) | (idx >= num_of_experts), num_of_experts, idx), True)
    probs = None if topk_weights is None else probs_of_weights(topk_weights.float(), idx, num_of_experts)
    return chosen[:, :num_of_experts].contiguous(), probs
