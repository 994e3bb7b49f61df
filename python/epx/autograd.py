# SPDX-License-Identifier: Apache-2.0
"""Training with EPX: dispatch and combine as differentiable functions of torch's autograd.

The gradient of a dispatch is a combine with the same routing. The gradient of a combine is a dispatch with it::

    forward     x ---dispatch---> rows ---experts---> rows' ---combine---> y
    backward   dx <--combine---- drows <--experts--- drows' <--dispatch--- dy

:func:`moe` is a complete Mixture-of-Experts layer. :func:`dispatch` and :func:`combine` are its two halves, for layers
with their own computation in between. All three take a ``deep_ep.Buffer`` and are collective: every rank of the
buffer's group calls them in the same order, in forward and, through autograd, in backward. This includes ranks that
send or receive no tokens.
"""

from __future__ import annotations

from typing import Any, Callable, List, NamedTuple, Tuple

import torch
from torch.autograd.function import once_differentiable

__all__ = ["Received", "combine", "dispatch", "moe"]


class Received(NamedTuple):
    """The result of :func:`dispatch` on this rank: N rows, ordered by (source rank, source token)."""

    x: torch.Tensor  #: [N, H]: one row per token that has an expert on this rank
    topk_idx: torch.Tensor  #: [N, K] int64: the local number of the expert, or -1 if it is on another rank
    topk_weights: torch.Tensor  #: [N, K] float32: the weight of the expert, or a constant 0 if it is on another rank
    tokens_per_expert: List[int]  #: number of rows of each local expert
    route: "Route"  #: the routing, for :func:`combine`


class Route(NamedTuple):
    """The routing of one dispatch. `link` connects the combine to the dispatch directly in autograd's graph."""

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
        ctx.save_for_backward(idx)
        notes.extend((counts, handle))
        return rows, idx, weights, x.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_rows, _idx, grad_weights, _link):
        # Where the expert is on another rank, the received weight is 0 whatever the token's is. Combine adds up the
        # entries of all ranks that have the token.
        idx, = ctx.saved_tensors
        own = torch.where(idx < 0, 0, grad_weights)
        grad_x, grad_topk_weights, _ = ctx.buffer.combine(grad_rows.contiguous(), ctx.handle, topk_weights=own)
        return grad_x, grad_topk_weights, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, link, buffer, handle):
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(rows.contiguous(), handle)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):
        grad_rows = ctx.buffer.dispatch(grad_y.contiguous(), handle=ctx.handle)[0]
        # The gradient of the link is zero, but it must exist. It makes autograd run the backward of the dispatch on
        # every rank, also on a rank whose experts received no rows and therefore have no path to it. That backward is
        # a combine, which the other ranks wait for.
        return grad_rows, grad_y.new_zeros(()), None, None


def dispatch(buffer: Any, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor,
             num_experts: int) -> Received:
    """Sends each row of `x` [T, H] to the ranks of its experts.

    `topk_idx` [T, K] int64 holds expert numbers of the whole group, or -1 for none. `topk_weights` [T, K] float32 are
    sent with the rows. Gradients flow to `x` and to `topk_weights`.
    """
    notes: List[Any] = []
    rows, idx, weights, link = _Dispatch.apply(x, topk_weights, topk_idx, buffer, num_experts, notes)
    counts, handle = notes
    # Where the inputs are frozen and the experts are not, combine has a backward on ranks without rows too.
    link.requires_grad_(torch.is_grad_enabled())
    return Received(rows, idx, weights, counts, Route(buffer, handle, link))


def combine(rows: torch.Tensor, route: Route) -> torch.Tensor:
    """Returns rows [N, H], in the order in which :func:`dispatch` returned them, to their tokens and sums them: [T, H].

    The sum is not weighted: the caller multiplies the rows by ``Received.topk_weights``.
    """
    return _Combine.apply(rows, route.link, route.buffer, route.handle)


def moe(buffer: Any, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int,
        expert: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A Mixture-of-Experts layer whose experts are distributed over the ranks of `buffer`.

    ``expert(e, rows)`` applies local expert `e` (from 0) to rows [n, H]. It is called only for experts that have rows.
    Returns, for each row of `x`, the sum over its top-k of weight times expert output: [T, H].
    """
    received = dispatch(buffer, x, topk_idx, topk_weights, num_experts)
    out = torch.zeros(received.x.shape, dtype=torch.float32, device=x.device)
    for e in range(len(received.tokens_per_expert)):
        row, k = torch.where(received.topk_idx == e)
        if row.numel():
            out = out.index_add(0, row, expert(e, received.x[row]).float() * received.topk_weights[row, k, None])
    return combine(out.to(x.dtype), received.route)
