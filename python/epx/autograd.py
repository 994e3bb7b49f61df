# SPDX-License-Identifier: Apache-2.0
"""Training with EPX: dispatch and combine that torch's autograd follows.

The gradient of a dispatch is a combine with the same routing, and the gradient of a combine is a dispatch with it::

    forward     x ---dispatch---> rows ---experts---> rows' ---combine---> y
    backward   dx <--combine---- drows <--experts--- drows' <--dispatch--- dy

:func:`moe` is a whole Mixture-of-Experts layer; :func:`dispatch` and :func:`combine` are its two halves for layers that
do their own work in between. All take a ``deep_ep.Buffer``, and are collective: every rank of the
buffer's group calls them, in forward and, through autograd, in backward, in the same order. A rank without tokens, or
to which no token came, takes part like any other.
"""

from __future__ import annotations

from typing import Any, Callable, List, NamedTuple, Tuple

import torch

__all__ = ["Received", "combine", "dispatch", "moe"]


class Received(NamedTuple):
    """What :func:`dispatch` brings to this rank, N rows in order of (source rank, source token)."""

    x: torch.Tensor  #: [N, H]: one row per token that has an expert here
    topk_idx: torch.Tensor  #: [N, K] int64: this rank's experts, counted from 0, and -1 for those of other ranks
    topk_weights: torch.Tensor  #: [N, K] float32: their weights, and 0
    tokens_per_expert: List[int]  #: rows of each of this rank's experts
    route: "Route"  #: the way back, for :func:`combine`


class Route(NamedTuple):
    """The routing of one dispatch. `link` ties the combine to it in autograd's graph, whatever lies in between."""

    buffer: Any
    handle: Tuple[Any, ...]
    link: torch.Tensor


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, topk_weights, topk_idx, buffer, num_experts, notes):
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
        rows, idx, weights, counts, handle, _ = buffer.dispatch(
            x.contiguous(), num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert, topk_idx=topk_idx, topk_weights=topk_weights)
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(idx)
        notes.extend((counts, handle))
        return rows, idx, weights, x.new_zeros(())

    @staticmethod
    def backward(ctx, grad_rows, _idx, grad_weights, _link):
        grad_x, grad_topk_weights, _ = ctx.buffer.combine(grad_rows.contiguous(), ctx.handle,
                                                          topk_weights=grad_weights.contiguous())
        return grad_x, grad_topk_weights, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, link, buffer, handle):
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(rows.contiguous(), handle)[0]

    @staticmethod
    def backward(ctx, grad_y):
        grad_rows = ctx.buffer.dispatch(grad_y.contiguous(), handle=ctx.handle)[0]
        # The link's gradient is nothing, but it must exist: it makes autograd go on to the dispatch on every rank, also
        # on one whose experts saw no row and so lead nowhere. The other ranks wait for that combine.
        return grad_rows, grad_y.new_zeros(()), None, None


def dispatch(buffer: Any, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor,
             num_experts: int) -> Received:
    """Sends each row of `x` [T, H] to the ranks of its experts.

    `topk_idx` [T, K] int64 names experts of the whole group, -1 for none; `topk_weights` [T, K] float32 travel along.
    Gradients flow to `x` and to `topk_weights`.
    """
    notes: List[Any] = []
    rows, idx, weights, link = _Dispatch.apply(x, topk_weights, topk_idx, buffer, num_experts, notes)
    counts, handle = notes
    return Received(rows, idx, weights, counts, Route(buffer, handle, link))


def combine(rows: torch.Tensor, route: Route) -> torch.Tensor:
    """Brings rows [N, H], placed as :func:`dispatch` gave them, back to their tokens, and sums them: [T, H].

    The sum has no weights: whoever computes the rows multiplies by ``Received.topk_weights``.
    """
    return _Combine.apply(rows, route.link, route.buffer, route.handle)


def moe(buffer: Any, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int,
        expert: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A Mixture-of-Experts layer whose experts are spread over the ranks of `buffer`.

    ``expert(e, rows)`` applies this rank's expert `e`, counted from 0, to rows [n, H]; it is called for experts that
    have rows. Returns, for each row of `x`, the sum over its top-k of weight times expert: [T, H].
    """
    received = dispatch(buffer, x, topk_idx, topk_weights, num_experts)
    out = torch.zeros(received.x.shape, dtype=torch.float32, device=x.device)
    for e in range(len(received.tokens_per_expert)):
        row, k = torch.where(received.topk_idx == e)
        if row.numel():
            out = out.index_add(0, row, expert(e, received.x[row]).float() * received.topk_weights[row, k, None])
    return combine(out.to(x.dtype), received.route)
