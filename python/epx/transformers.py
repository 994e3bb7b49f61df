# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism of Hugging Face's transformers over EPX: ``import epx.transformers``, and then
``DistributedConfig(..., ep_implementation="epx")``. It needs transformers 5.23 and torch 2.7, or newer ones.

A rank brings rows to the experts in one of two ways::

    a batch each      rows --dispatch--> experts of their ranks --combine--> rows
    one batch for     few rows: every rank runs its own experts on all rows, which it has, and sends its part of
    all ranks             every sum to all others
                      many rows: every rank takes a slice of the batch, as if it were its own; the sums go to all

Sums are taken in the order of the ranks, so that all ranks have the same bits.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from . import _use, autograd

__all__ = ["EpxEP"]

#: Most rows of a batch that all ranks have, times ranks, for which parts of sums are sent instead of rows
MOST_PARTS = 512
_HANDLES = 16  # kept per group: of as many sizes of batches


class _Group:
    """The ranks of one process group of expert parallelism, and the buffer that all layers share."""

    _of: Dict[Any, "_Group"] = {}

    def __init__(self, group: Any, num_experts: int) -> None:
        deep_ep = _use.load("deep_ep")
        self.buffer = deep_ep.Buffer(group, num_nvl_bytes=0)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.num_experts = num_experts
        self._handles: Dict[Any, Any] = {}

    @staticmethod
    def of(group: Any, num_experts: int) -> "_Group":
        key = (tuple(dist.get_process_group_ranks(group)), num_experts)
        if key not in _Group._of:
            _Group._of[key] = _Group(group, num_experts)
        return _Group._of[key]

    def to_all(self, rows: torch.Tensor, peers: Sequence[int], key: Any) -> torch.Tensor:
        """The rows of all `peers`, in their order, on all of them. Calls of all peers have the same key, which says how
        many rows each has."""
        handle = self._handles.get((key, *peers))
        if handle is not None:
            return self.buffer.dispatch(rows, handle=handle)[0]
        local = self.num_experts // self.size
        idx = torch.tensor(peers, device=rows.device).mul(local).expand(rows.shape[0], len(peers)).contiguous()
        weights = torch.zeros(idx.shape, device=rows.device)
        received, _, _, _, handle = _dispatch(self.buffer, rows, idx, weights, self.num_experts)
        if len(self._handles) == _HANDLES:
            self._handles.pop(next(iter(self._handles)))
        self._handles[(key, *peers)] = handle
        return received


def _dispatch(buffer: Any, rows: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, num_experts: int,
              worst: int = 0) -> Tuple[Any, ...]:
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, num_experts)
    return buffer.dispatch(rows, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node,
                           is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=idx,
                           topk_weights=weights, num_worst_tokens=worst)[:5]


def _capturing(rows: torch.Tensor) -> bool:
    return rows.is_cuda and torch.cuda.is_current_stream_capturing()


_Exchange = Callable[[torch.Tensor], torch.Tensor]


class _Sum(torch.autograd.Function):
    """The sum of all ranks' rows, on all of them. Its gradient is there too."""

    @staticmethod
    def forward(ctx: Any, summed: _Exchange, rows: torch.Tensor) -> torch.Tensor:
        return summed(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        return None, grad


class _Shared(torch.autograd.Function):
    """Tensors that all ranks have, and use for different experts: their gradients are sums over the ranks."""

    @staticmethod
    def forward(ctx: Any, summed: _Exchange, *tensors: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        ctx.summed = summed
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        return (None, *(ctx.summed(grad) for grad in grads))


class _Slice(torch.autograd.Function):
    """This rank's slice of tensors that all ranks have. Their gradients are those of all slices."""

    @staticmethod
    def forward(ctx: Any, gathered: _Exchange, span: slice, *tensors: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        ctx.gathered = gathered
        return tuple(tensor[span] for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        return (None, None, *(ctx.gathered(grad) for grad in grads))


class _Gather(torch.autograd.Function):
    """The slices of all ranks, on all of them. Their gradients are there too."""

    @staticmethod
    def forward(ctx: Any, gathered: _Exchange, span: slice, rows: torch.Tensor) -> torch.Tensor:
        ctx.span = span
        return gathered(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        return None, None, grad[ctx.span]


class EpxEP(EPImplementation):
    """``ep_implementation="epx"``."""

    def __init__(self, experts: torch.nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self._num_experts = self.num_local_experts * ep_mesh.size()
        self._group = _Group.of(ep_mesh.get_group(), self._num_experts)
        ranks = dist.get_process_group_ranks(ep_mesh.get_group())
        self._peers = [ranks.index(rank) for rank in dist.get_process_group_ranks(tp_mesh.get_group())]

    def __call__(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor,
                 top_k_weights: torch.Tensor) -> torch.Tensor:
        ranks = len(self._peers)
        if ranks == 1:
            return self._exchange(hidden_states, top_k_index, top_k_weights)
        if self.shares_batch and hidden_states.shape[0] * ranks <= MOST_PARTS:
            return self._in_parts(hidden_states, top_k_index, top_k_weights)
        return self._in_slices(hidden_states, top_k_index, top_k_weights)

    def _to_all(self, rows: torch.Tensor, key: Any) -> torch.Tensor:
        columns, missing = rows.shape[1], -rows.shape[1] % (16 // rows.element_size())  # rows of a multiple of 16 bytes
        if missing:
            rows = torch.nn.functional.pad(rows, (0, missing))
        return self._group.to_all(rows.contiguous(), self._peers, key)[:, :columns]

    def _in_parts(self, rows: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """This rank's experts on all rows, and the sums over the ranks."""
        def summed(part: torch.Tensor) -> torch.Tensor:
            parts = self._to_all(part, ("parts", len(part)))
            return parts.reshape(len(self._peers), *part.shape).sum(0, dtype=torch.float32).to(part.dtype)

        rows, weights = _Shared.apply(summed, rows, weights)
        elsewhere = idx // self.num_local_experts != self._group.rank
        ids = torch.where(elsewhere, self.num_local_experts, idx % self.num_local_experts)
        part = self.experts_forward(rows, ids, weights.masked_fill(elsewhere, 0.0))
        return _Sum.apply(summed, part.to(rows.dtype))

    def _in_slices(self, rows: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """A slice of the rows as if it were this rank's batch, and the sums of all slices."""
        count, ranks = len(rows), len(self._peers)
        each, mine = -(-count // ranks), self.tp_mesh.get_local_rank()
        span = slice(each * mine, each * (mine + 1))

        def gathered(part: torch.Tensor) -> torch.Tensor:
            return self._to_all(part, ("slices", count))

        part, scores = _Slice.apply(gathered, span, rows, weights)
        return _Gather.apply(gathered, span, self._exchange(part, idx[span], scores))

    def _exchange(self, rows: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The rows of this rank alone to their experts and back."""
        buffer, idx, rows = self._group.buffer, idx.long().contiguous(), rows.contiguous()
        if _capturing(rows):  # no host may wait for how many rows arrive
            worst = rows.shape[0] * self._group.size
            received, ids, scores, _, handle = _dispatch(buffer, rows, idx, weights.float(), self._num_experts, worst)
            return buffer.combine(self._experts(received, ids, scores, weights.dtype), handle)[0]
        received, ids, scores, _, route = autograd.dispatch(buffer, rows, idx, weights.float(), self._num_experts)
        return autograd.combine(self._experts(received, ids, scores, weights.dtype), route)

    def _experts(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype
                 ) -> torch.Tensor:
        """The weighted sums of this rank's experts. -1: an expert of another rank."""
        if not rows.shape[0]:  # one row of zeros, so that the experts' parameters have gradients on every rank
            zero, one = ids.new_zeros((1, 1)), weights.new_ones((1, 1)).to(dtype)
            return self.experts_forward(rows.sum(0, keepdim=True), zero, one).to(rows.dtype)[:0]
        weights = weights.masked_fill(ids < 0, 0.0).to(dtype)
        return self.experts_forward(rows, ids.masked_fill(ids < 0, self.num_local_experts), weights).to(rows.dtype)


EPImplementationInterface.register("epx", EpxEP)
