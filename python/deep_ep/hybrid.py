# SPDX-License-Identifier: Apache-2.0
"""HybridEPBuffer: the interface of DeepEP's branch hybrid-ep, as Megatron-LM calls it, over ElasticBuffer.

A routing is a map bool [T, E]. EPX routes by indices [T, K], with the same K on all ranks, so a map becomes the indices
of its columns, with -1 behind them. K is the same for every map with E columns.
"""

import struct
from typing import Any, NamedTuple, Optional, Tuple

import torch

from . import _checks as checks
from . import _elastic_dispatch as operations
from . import _unused as unused
from ._checks import wrong
from ._eager import eager_class
from ._elastic_handle import EPHandle
from ._elastic_streams import launcher
from .elastic import ElasticBuffer

_MOST_TOPK = 32
_Dispatched = Tuple[torch.Tensor, Optional[torch.Tensor], Optional[torch.Tensor], "HybridEPHandle"]
_Permuted = Tuple[torch.Tensor, Optional[torch.Tensor], Optional[torch.Tensor], torch.Tensor, "HybridEPHandle"]


class HybridEPHandle(NamedTuple):
    """The routing of a dispatch."""

    elastic: EPHandle
    topk_idx: torch.Tensor
    num_experts: int
    tokens_per_expert: Optional[torch.Tensor]  # with permute
    recv_topk_idx: Optional[torch.Tensor]  # without: local experts of each row


def _indices_of(routing_map: torch.Tensor) -> torch.Tensor:
    """int64 [T, K]: the columns that are set, ascending, then -1."""
    experts = routing_map.shape[1]
    columns = torch.arange(experts, device=routing_map.device)
    ordered = torch.where(routing_map, columns, experts).sort(1).values[:, :min(experts, _MOST_TOPK)]
    return torch.where(ordered == experts, -1, ordered).contiguous()


def _weights_of(probs: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
    """f32 [T, K] of f32 [T, E]; 0 where there is no index."""
    return torch.where(topk_idx < 0, 0.0, probs.gather(1, topk_idx.clamp(min=0, max=probs.shape[1] - 1)))


def probs_of_weights(weights: torch.Tensor, topk_idx: torch.Tensor, experts: int) -> torch.Tensor:
    """f32 [T, E] of f32 [T, K]; 0 where there is no index."""
    spread = torch.zeros(weights.shape[0], experts + 1, dtype=weights.dtype, device=weights.device)
    spread.scatter_(1, torch.where(topk_idx < 0, experts, topk_idx).long(), weights)
    return spread[:, :experts].contiguous()


def _zero_behind(tensor: Optional[torch.Tensor], ends: torch.Tensor) -> None:
    """Zeroes the rows behind those that were received."""
    if tensor is not None and tensor.numel():
        behind = torch.arange(tensor.shape[0], device=tensor.device) >= ends
        tensor.view(torch.uint8 if tensor.element_size() == 1 else tensor.dtype).masked_fill_(
            behind.view(-1, *[1] * (tensor.dim() - 1)), 0)


class _OverFabric(ElasticBuffer):
    _use_fabric = True


class BufferConfig(NamedTuple):
    """The sizes that a buffer was created with. Programs read them to see whether they need a larger one."""

    hidden_dim: int
    max_num_of_tokens_per_rank: int
    num_of_experts_per_rank: int
    num_of_ranks_per_node: int
    num_of_nodes: int


class _Configurer(NamedTuple):
    """DeepEP's place of the sizes."""

    buffer_config: BufferConfig


@eager_class
class HybridEPBuffer:
    """Dispatch with and without permutation to experts, and combine with its reverse. Creating one is collective."""

    def __init__(self, group: Any, hidden_dim: int, max_num_of_tokens_per_rank: int, num_local_experts: int,
                 use_fp8: bool = False, num_sms_dispatch_api: Optional[int] = None,
                 num_sms_combine_api: Optional[int] = None, num_sms_preprocessing_api: Optional[int] = None,
                 num_blocks_permute: Optional[int] = None, num_blocks_unpermute: Optional[int] = None,
                 load_cached_kernels: bool = False, use_shared_buffer: bool = True,
                 enable_custom_allgather: bool = True,
                 num_of_hybrid_ep_ranks_per_nvlink_domain: Optional[int] = None,
                 use_mnnvl: Optional[bool] = None) -> None:
        """num_sms_dispatch_api and num_sms_combine_api limit the SMs of a call; the sizes are hints for memory.
        use_mnnvl is what allow_mnnvl is for Buffer. The other arguments are accepted without effect."""
        checks.positive("hidden_dim", hidden_dim)
        checks.positive("max_num_of_tokens_per_rank", max_num_of_tokens_per_rank, 0)
        checks.positive("num_local_experts", num_local_experts)
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.hidden_dim, self.num_local_experts, self.use_fp8 = hidden_dim, num_local_experts, use_fp8
        self._sms = num_sms_dispatch_api or 0, num_sms_combine_api or 0
        experts = num_local_experts * self.group_size
        self._elastic = (_OverFabric if use_mnnvl else ElasticBuffer)(
            group, num_max_tokens_per_rank=max(max_num_of_tokens_per_rank, 1), hidden=hidden_dim,
            num_topk=min(experts, _MOST_TOPK))
        engine = self._elastic._open()
        given = [struct.unpack("q", part)[0]
                 for part in engine.bootstrap.allgather(struct.pack("q", max_num_of_tokens_per_rank))]
        # Ranks may have any number of tokens up to this one, in any call.
        self.max_num_of_tokens_per_rank = max(engine.settings.max_tokens, *given)
        self.num_of_nodes = self._elastic.num_rdma_ranks
        unused.arguments(
            self.rank, "deep_ep.HybridEPBuffer", num_sms_preprocessing_api=(num_sms_preprocessing_api, None),
            num_blocks_permute=(num_blocks_permute, None), num_blocks_unpermute=(num_blocks_unpermute, None),
            load_cached_kernels=(load_cached_kernels, False), use_shared_buffer=(use_shared_buffer, True),
            enable_custom_allgather=(enable_custom_allgather, True), num_of_hybrid_ep_ranks_per_nvlink_domain=(
                num_of_hybrid_ep_ranks_per_nvlink_domain, None))
        mates = [r for r, node in enumerate(engine.node_of) if node == engine.node]
        self.local_rank, self.node_rank = mates.index(self.rank), engine.node
        self.configurer = _Configurer(BufferConfig(hidden_dim, self.max_num_of_tokens_per_rank, num_local_experts,
                                                   len(mates), self.num_of_nodes))

    def recover(self, graphs_released: bool = False) -> None:
        """After a failure: the buffer can be used again. All ranks call it before the next operation. Handles and
        graphs from before are not valid any more (ElasticBuffer.recover). An addition to DeepEP's interface."""
        self._elastic.recover(graphs_released)

    def _routing(self, hidden: torch.Tensor, routing_map: Any, probs: Any, topk_idx: Any, topk_weights: Any,
                 experts: Any, on_device: bool) -> Tuple[torch.Tensor, Optional[torch.Tensor], int]:
        """(indices, weights or None, experts) of either form of a routing. `on_device`: where a token has too many
        experts, its first is one that does not exist, and the operation fails."""
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
        if on_device and experts > _MOST_TOPK:
            idx[:, 0] = torch.where(routing_map.sum(1) > _MOST_TOPK, experts, idx[:, 0])
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

        The number of rows is waited for on the host, and tokens_per_expert is on the CPU. With non_blocking nothing
        waits on the host: there are num_permuted_tokens rows, zero behind those that were received, and
        tokens_per_expert is on the device of `hidden`. If more were received, the operation fails, and a later call
        says so.
        """
        x = hidden.contiguous() if scaling_factor is None else (hidden.contiguous(), scaling_factor)
        if handle is not None:
            if handle.tokens_per_expert is None:
                raise wrong("handle", "the handle of a dispatch_with_permute()", "that of a dispatch()")
            rows, _idx, _weights, _handle, _event = self._elastic.dispatch(
                x, handle=handle.elastic, do_expand=True, num_sms=self._sms[0])
            data, scales = rows if isinstance(rows, tuple) else (rows, None)
            if not handle.elastic.num_recv_tokens_per_expert_list:
                _zero_behind(data, handle.tokens_per_expert.sum())
            return data, None, scales, handle.tokens_per_expert, handle
        count = None
        if non_blocking:
            count = checks.positive("num_permuted_tokens", num_permuted_tokens, 0)
            if count % max(pad_multiple or 1, 1):
                raise wrong("num_permuted_tokens", "a multiple of pad_multiple = %d" % (pad_multiple or 1), count)
        idx, weights, experts = self._routing(hidden, routing_map, probs, topk_idx, topk_weights, num_of_experts,
                                              non_blocking)
        (data, scales), row_probs, _idx, elastic = self._dispatch(
            x, idx, weights, experts, max(pad_multiple or 1, 1), count, not non_blocking, True)
        if not non_blocking:
            _check_most(routing_map)
            counts = torch.tensor(elastic.num_recv_tokens_per_expert_list, dtype=torch.int64, device="cpu")
        else:
            align = elastic.expert_alignment
            counts = (elastic.num_unaligned_recv_tokens_per_expert.long() + align - 1) // align * align
            for part in (data, row_probs, scales):
                _zero_behind(part, counts.sum())
        return data, row_probs, scales, counts, HybridEPHandle(elastic, idx, experts, counts, None)

    def _dispatch(self, x: Any, idx: torch.Tensor, weights: Optional[torch.Tensor], experts: int, alignment: int,
                  rows: Optional[int], cpu_sync: bool, expand: bool) -> Tuple[Any, Any, Any, EPHandle]:
        """((rows, scales), weights, local experts or None, handle) of a dispatch with a new routing. `rows`: how many
        results have, without CPU sync."""
        elastic = self._elastic
        engine = elastic._open()
        request = operations.Request(x, weights, expand, expand, False, self._sms[0])
        how = operations.routed(engine, request, idx, None, experts, self.max_num_of_tokens_per_rank, alignment,
                                cpu_sync, True)._replace(rows=rows)
        got, recv_idx, got_weights, handle, _event = operations.dispatch(
            engine, launcher(request.device, None, None, False, False), request, how, elastic._domains, self._sms[0],
            elastic.num_cpu_timeout_secs)
        return got if isinstance(got, tuple) else (got, None), got_weights, recv_idx, handle

    def _columns(self) -> Tuple[int, int]:
        """(experts of this node, first of this rank among them): the columns of probs of rows."""
        engine = self._elastic._open()
        mates = [r for r, node in enumerate(engine.node_of) if node == engine.node]
        return len(mates) * self.num_local_experts, mates.index(self.rank) * self.num_local_experts

    def dispatch(self, hidden: torch.Tensor, scaling_factor: Optional[torch.Tensor] = None,
                 topk_idx: Optional[torch.Tensor] = None, topk_weights: Optional[torch.Tensor] = None,
                 num_of_experts: Optional[int] = None, probs: Optional[torch.Tensor] = None,
                 routing_map: Optional[torch.Tensor] = None, num_dispatched_tokens_tensor: Any = None,
                 num_dispatched_tokens: Optional[int] = None, handle: Optional[HybridEPHandle] = None) -> _Dispatched:
        """Sends each token once to each rank of its experts. Returns (rows by source rank and token, f32 probs [rows,
        experts of this node] or None, scales or None, handle). Probs of other ranks' experts are 0. With a handle, its
        routing is used again. With num_dispatched_tokens, the number of rows, nothing waits on the host."""
        x = hidden.contiguous() if scaling_factor is None else (hidden.contiguous(), scaling_factor)
        if handle is not None:
            if handle.recv_topk_idx is None:
                raise wrong("handle", "the handle of a dispatch()", "that of a dispatch_with_permute()")
            weights = None if probs is None else _weights_of(probs.float(), handle.topk_idx)
            rows, idx, got, _handle, _event = self._elastic.dispatch(x, topk_weights=weights, handle=handle.elastic,
                                                                     num_sms=self._sms[0])
            data, scales = rows if isinstance(rows, tuple) else (rows, None)
            return data, self._spread(got, handle.recv_topk_idx), scales, handle
        waits = num_dispatched_tokens is None
        count = None if waits else checks.positive("num_dispatched_tokens", num_dispatched_tokens, 0)
        idx, weights, experts = self._routing(hidden, routing_map, probs, topk_idx, topk_weights, num_of_experts,
                                              not waits)
        (data, scales), got, recv_idx, elastic = self._dispatch(x, idx, weights, experts, 1, count, waits, False)
        if waits:
            _check_most(routing_map)
        return data, self._spread(got, recv_idx), scales, HybridEPHandle(elastic, idx, experts, None, recv_idx)

    def _spread(self, weights: Optional[torch.Tensor], recv_idx: torch.Tensor) -> Optional[torch.Tensor]:
        if weights is None:
            return None
        columns, first = self._columns()
        return probs_of_weights(weights, torch.where(recv_idx < 0, -1, recv_idx + first), columns)

    def combine(self, hidden: torch.Tensor, probs: Optional[torch.Tensor] = None,
                handle: Optional[HybridEPHandle] = None) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """Sends the rows of a dispatch() back and sums those of each token, without weights. Returns ([T, H], f32
        [T, E] of the probs of rows, or None)."""
        if not isinstance(handle, HybridEPHandle) or handle.recv_topk_idx is None:
            raise wrong("handle", "the handle of a dispatch()", type(handle).__name__)
        weights = None
        if probs is not None:
            at = torch.where(handle.recv_topk_idx < 0, -1, handle.recv_topk_idx + self._columns()[1])
            weights = _weights_of(probs.float(), at.long())
        return self._combine(hidden, handle, weights)

    def _combine(self, hidden: torch.Tensor, handle: HybridEPHandle,
                 weights: Optional[torch.Tensor]) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        combined, back, _event = self._elastic.combine(hidden.contiguous(), handle.elastic, weights,
                                                       num_sms=self._sms[1])
        return combined, None if back is None else probs_of_weights(back, handle.topk_idx, handle.num_experts)

    def combine_with_unpermute(self, *, hidden: torch.Tensor, probs: Optional[torch.Tensor] = None,
                               handle: Optional[HybridEPHandle] = None, pad_multiple: Optional[int] = None,
                               fuse_unpermute_combine: bool = False, num_dispatched_tokens: Any = None) -> Tuple[
                                   torch.Tensor, Optional[torch.Tensor]]:
        """Sends rows back and sums those of each token, without weights. Returns (bf16 [T, H], f32 [T, E] of the probs
        of rows, or None)."""
        if not isinstance(handle, HybridEPHandle) or handle.tokens_per_expert is None:
            raise wrong("handle", "the handle of a dispatch_with_permute()", type(handle).__name__)
        return self._combine(hidden, handle, None if probs is None else probs.reshape(-1).float().contiguous())


def _check_most(routing_map: Optional[torch.Tensor]) -> None:
    """After the host has waited for the rows: looking at the map does not wait for more."""
    if routing_map is None or routing_map.shape[1] <= _MOST_TOPK or not routing_map.numel():
        return
    most = int(routing_map.sum(1).max())
    if most > _MOST_TOPK:
        raise wrong("routing_map", "at most %d experts per token" % _MOST_TOPK, most)
