# SPDX-License-Identifier: Apache-2.0
"""HybridEPBuffer: the interface of DeepEP's branch hybrid-ep, as Megatron-LM calls it, over ElasticBuffer's expansion.

A routing is a map bool [T, E]. EPX routes by indices [T, K], with the same K on all ranks, so a map becomes the indices
of its columns, with -1 behind them. K is the same for every map with E columns.
"""

import struct
from typing import Any, NamedTuple, Optional, Tuple

import torch

from . import _checks as checks
from ._checks import wrong
from ._elastic_handle import EPHandle
from .elastic import ElasticBuffer

_MOST_TOPK = 32
_Permuted = Tuple[torch.Tensor, Optional[torch.Tensor], Optional[torch.Tensor], torch.Tensor, "HybridEPHandle"]


class HybridEPHandle(NamedTuple):
    """The routing of a dispatch_with_permute()."""

    elastic: EPHandle
    topk_idx: torch.Tensor
    num_experts: int
    rows: int  # of the received tensors; more than the routing has where the caller asked for more
    tokens_per_expert: torch.Tensor


def _indices_of(routing_map: torch.Tensor) -> torch.Tensor:
    """int64 [T, K]: the columns that are set, ascending, then -1."""
    experts = routing_map.shape[1]
    columns = torch.arange(experts, device=routing_map.device)
    ordered = torch.where(routing_map, columns, experts).sort(1).values[:, :min(experts, _MOST_TOPK)]
    return torch.where(ordered == experts, -1, ordered).contiguous()


def _weights_of(probs: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
    """f32 [T, K] of f32 [T, E]; 0 where there is no index."""
    return torch.where(topk_idx < 0, 0.0, probs.gather(1, topk_idx.clamp(min=0)))


def _probs_of(weights: torch.Tensor, topk_idx: torch.Tensor, experts: int) -> torch.Tensor:
    """f32 [T, E] of f32 [T, K]; 0 where there is no index."""
    spread = torch.zeros(weights.shape[0], experts + 1, dtype=weights.dtype, device=weights.device)
    spread.scatter_(1, torch.where(topk_idx < 0, experts, topk_idx).long(), weights)
    return spread[:, :experts].contiguous()


def _longer(tensor: Optional[torch.Tensor], rows: int) -> Optional[torch.Tensor]:
    """The tensor with rows of zeros behind it."""
    if tensor is None or tensor.shape[0] == rows:
        return tensor
    longer = tensor.new_zeros((rows, *tensor.shape[1:]))
    longer[:tensor.shape[0]] = tensor
    return longer


class HybridEPBuffer:
    """Dispatch with permutation to experts, and combine with its reverse. Creating a buffer is collective."""

    def __init__(self, group: Any, hidden_dim: int, max_num_of_tokens_per_rank: int, num_local_experts: int,
                 use_fp8: bool = False, num_sms_dispatch_api: Optional[int] = None,
                 num_sms_combine_api: Optional[int] = None, num_sms_preprocessing_api: Optional[int] = None,
                 num_blocks_permute: Optional[int] = None, num_blocks_unpermute: Optional[int] = None,
                 load_cached_kernels: bool = False, use_shared_buffer: bool = True,
                 enable_custom_allgather: bool = True,
                 num_of_hybrid_ep_ranks_per_nvlink_domain: Optional[int] = None,
                 use_mnnvl: Optional[bool] = None) -> None:
        """num_sms_dispatch_api and num_sms_combine_api limit the SMs of a call; the sizes are hints for memory. The
        other arguments are accepted without effect."""
        checks.positive("hidden_dim", hidden_dim)
        checks.positive("max_num_of_tokens_per_rank", max_num_of_tokens_per_rank, 0)
        checks.positive("num_local_experts", num_local_experts)
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.hidden_dim, self.num_local_experts, self.use_fp8 = hidden_dim, num_local_experts, use_fp8
        self._sms = num_sms_dispatch_api or 0, num_sms_combine_api or 0
        experts = num_local_experts * self.group_size
        self._elastic = ElasticBuffer(
            group, num_max_tokens_per_rank=max(max_num_of_tokens_per_rank, 1), hidden=hidden_dim,
            num_topk=min(experts, _MOST_TOPK))
        engine = self._elastic._open()
        given = [struct.unpack("q", part)[0]
                 for part in engine.bootstrap.allgather(struct.pack("q", max_num_of_tokens_per_rank))]
        # Ranks may have any number of tokens up to this one, in any call.
        self.max_num_of_tokens_per_rank = max(engine.settings.max_tokens, *given)
        self.num_of_nodes = self._elastic.num_rdma_ranks

    def _routing(self, hidden: torch.Tensor, routing_map: Any, probs: Any, topk_idx: Any, topk_weights: Any,
                 experts: Any) -> Tuple[torch.Tensor, Optional[torch.Tensor], int]:
        """(indices, weights or None, experts) of either form of a routing."""
        if topk_idx is not None:
            if routing_map is not None:
                raise wrong("routing_map, topk_idx", "one of them", "both")
            if experts is None:
                raise wrong("num_of_experts", "a number with topk_idx", "None")
            return topk_idx.contiguous(), topk_weights, experts
        if not isinstance(routing_map, torch.Tensor) or routing_map.dtype != torch.bool or routing_map.dim() != 2 or \
                routing_map.shape[0] != hidden.shape[0]:
            raise wrong("routing_map", "a bool tensor [%d, experts], topk_idx, or a handle" % hidden.shape[0],
                        getattr(routing_map, "shape", type(routing_map).__name__))
        experts = routing_map.shape[1]
        idx = _indices_of(routing_map)
        return idx, None if probs is None else _weights_of(probs.float(), idx), experts

    def dispatch_with_permute(self, *, hidden: torch.Tensor, topk_idx: Optional[torch.Tensor] = None,
                              topk_weights: Optional[torch.Tensor] = None,
                              num_of_experts_per_rank: Optional[int] = None, num_of_experts: Optional[int] = None,
                              use_fp8: Optional[bool] = None, routing_map: Optional[torch.Tensor] = None,
                              probs: Optional[torch.Tensor] = None, scaling_factor: Optional[torch.Tensor] = None,
                              num_permuted_tokens: Any = None, pad_multiple: Optional[int] = None,
                              handle: Optional[HybridEPHandle] = None, non_blocking: bool = False,
                              fuse_permute_dispatch: bool = False, num_dispatched_tokens: Any = None,
                              use_host_meta: Optional[bool] = None) -> _Permuted:
        """Sends each token to its experts: one row per (token, expert), grouped by expert, each expert's rows padded
        with zeros to a multiple of pad_multiple. Returns (rows, probs of the rows or None, scales of the rows or None,
        int64 padded rows of each local expert, handle). With a handle, its routing is used again.

        The number of rows is waited for on the host. With num_permuted_tokens there are so many rows, zero behind those
        that were received; an error if more were received. tokens_per_expert is on the CPU, or with non_blocking on the
        device of `hidden`.
        """
        x = hidden.contiguous() if scaling_factor is None else (hidden.contiguous(), scaling_factor)
        if handle is not None:
            rows, _idx, _weights, _handle, _event = self._elastic.dispatch(
                x, handle=handle.elastic, do_expand=True, num_sms=self._sms[0])
            data, scales = rows if isinstance(rows, tuple) else (rows, None)
            return (_longer(data, handle.rows), None, _longer(scales, handle.rows),  # type: ignore[return-value]
                    handle.tokens_per_expert, handle)
        idx, weights, experts = self._routing(hidden, routing_map, probs, topk_idx, topk_weights, num_of_experts)
        rows, _none, row_probs, elastic, _event = self._elastic.dispatch(
            x, idx, weights, num_experts=experts, num_max_tokens_per_rank=self.max_num_of_tokens_per_rank,
            expert_alignment=max(pad_multiple or 1, 1), do_expand=True, do_zero_padding=True, do_cpu_sync=True,
            num_sms=self._sms[0])
        _check_most(routing_map)
        data, scales = rows if isinstance(rows, tuple) else (rows, None)
        count = data.shape[0]
        if non_blocking and num_permuted_tokens is not None:
            count = int(num_permuted_tokens)
            if count < data.shape[0]:
                raise wrong("num_permuted_tokens", "at least the %d rows that were received" % data.shape[0], count)
        counts = torch.tensor(elastic.num_recv_tokens_per_expert_list, dtype=torch.int64)
        counts = counts.to(hidden.device) if non_blocking else counts
        made = HybridEPHandle(elastic, idx, experts, count, counts)
        return (_longer(data, count), _longer(row_probs, count), _longer(scales, count),  # type: ignore[return-value]
                counts, made)

    def combine_with_unpermute(self, *, hidden: torch.Tensor, probs: Optional[torch.Tensor] = None,
                               handle: Optional[HybridEPHandle] = None, pad_multiple: Optional[int] = None,
                               fuse_unpermute_combine: bool = False, num_dispatched_tokens: Any = None) -> Tuple[
                                   torch.Tensor, Optional[torch.Tensor]]:
        """Sends rows back and sums those of each token, without weights. Returns (bf16 [T, H], f32 [T, E] of the probs
        of rows, or None)."""
        if not isinstance(handle, HybridEPHandle):
            raise wrong("handle", "the handle of a dispatch_with_permute()", type(handle).__name__)
        combined, weights, _event = self._elastic.combine(
            hidden.contiguous(), handle.elastic, None if probs is None else probs.reshape(-1).float().contiguous(),
            num_sms=self._sms[1])
        if weights is None:
            return combined, None
        return combined, _probs_of(weights, handle.topk_idx, handle.num_experts)


def _check_most(routing_map: Optional[torch.Tensor]) -> None:
    """After the host has waited for the rows: looking at the map does not wait for more."""
    if routing_map is None or routing_map.shape[1] <= _MOST_TOPK or not routing_map.numel():
        return
    most = int(routing_map.sum(1).max())
    if most > _MOST_TOPK:
        raise wrong("routing_map", "at most %d experts per token" % _MOST_TOPK, most)
