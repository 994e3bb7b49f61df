# SPDX-License-Identifier: Apache-2.0
"""HybridEPBuffer: the interface of DeepEP's branch hybrid-ep, as Megatron-LM calls it, over ElasticBuffer.

A routing is a map bool [T, E]. EPX routes by indices [T, K], with the same K on all ranks, so a map becomes the indices
of its columns, with -1 behind them. K is the same for every map with E columns.
"""

import struct
from typing import Any, NamedTuple, Optional, Tuple

import epx
import torch

from . import _checks as checks
from . import _elastic_dispatch as operations
from . import _unused as unused
from ._checks import wrong
from ._eager import eager_class
from ._elastic_handle import EPHandle
from ._elastic_streams import launcher
from ._hybrid_handle import HybridEPHandle, Routing, make_handle, padded_counts, routing_of
from ._streams import Origin, hinted, refuse_capture
from .elastic import ElasticBuffer

_MOST_TOPK = 32
_INDICES = (torch.int64, torch.int32, torch.int16, torch.int8)
_LATEST_S = 1800  # a rank may come to its first dispatch so late; torch's collectives wait as long
_Dispatched = Tuple[torch.Tensor, Optional[torch.Tensor], Optional[torch.Tensor], HybridEPHandle]
_Permuted = Tuple[torch.Tensor, Optional[torch.Tensor], Optional[torch.Tensor], torch.Tensor, HybridEPHandle]


def _indices_of(routing_map: torch.Tensor) -> torch.Tensor:
    """int64 [T, K]: the columns that are set, ascending, then -1."""
    experts = routing_map.shape[1]
    columns = torch.arange(experts, device=routing_map.device)
    ordered = torch.where(routing_map, columns, experts).sort(1).values[:, :min(experts, _MOST_TOPK)]
    return torch.where(ordered == experts, -1, ordered).contiguous()


def _weights_of(probs: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
    """f32 [T, K] of f32 [T, E]; 0 where there is no index."""
    return torch.where(topk_idx < 0, 0.0, probs.gather(1, topk_idx.clamp(min=0, max=probs.shape[1] - 1)))


def _weights(probs: Optional[torch.Tensor], topk_weights: Optional[torch.Tensor], topk_idx: torch.Tensor,
             experts: int) -> Optional[torch.Tensor]:
    """f32 [T, K] of either form of weights; of both, probs count. None without either."""
    if probs is not None:
        _check_probs(probs, topk_idx.shape[0], experts)
        return _weights_of(probs.float(), topk_idx.long())
    return None if topk_weights is None else checks.dense("topk_weights", topk_weights, 2).float().contiguous()


def _weights_again(routing: Routing, probs: Optional[torch.Tensor], topk_idx: Optional[torch.Tensor],
                   topk_weights: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """f32 [T, K] in the order of a handle's indices. Those given with the weights may be in another one, or fewer."""
    experts = routing.num_experts
    if topk_idx is not None and topk_idx is not routing.topk_idx and topk_weights is not None and probs is None:
        idx = checks.tensor("topk_idx", topk_idx, _INDICES, (routing.topk_idx.shape[0], None), contiguous=False)
        weights = checks.dense("topk_weights", topk_weights, 2).float()
        if weights.shape != idx.shape:
            raise wrong("topk_weights", "the shape of topk_idx, %s" % list(idx.shape), list(weights.shape))
        probs = probs_of_weights(weights, idx, experts)
    return _weights(probs, topk_weights, routing.topk_idx, experts)


def _check_probs(probs: Any, rows: int, columns: int) -> None:
    if not isinstance(probs, torch.Tensor) or tuple(probs.shape) != (rows, columns):
        raise wrong("probs", "a tensor [%d, %d]" % (rows, columns), checks.describe(probs))


def probs_of_weights(weights: torch.Tensor, topk_idx: torch.Tensor, experts: int) -> torch.Tensor:
    """f32 [T, E] of f32 [T, K]; 0 where there is no index, or one that no expert has."""
    idx = topk_idx.long()  # int8 has no 128
    spread = torch.zeros(weights.shape[0], experts + 1, dtype=weights.dtype, device=weights.device)
    spread.scatter_(1, torch.where((idx < 0) | (idx >= experts), experts, idx), weights)
    return spread[:, :experts].contiguous()


def _rows(hidden: Any, scaling_factor: Optional[torch.Tensor]) -> Any:
    """What ElasticBuffer takes."""
    checks.dense("hidden", hidden, 2)
    if scaling_factor is None:
        return hidden.contiguous()
    checks.groups("scaling_factor", hidden, checks.dense("scaling_factor", scaling_factor, 2))
    return hidden.contiguous(), scaling_factor


def _first(count: Optional[int], *parts: Optional[torch.Tensor]) -> Any:
    """The first `count` rows of each."""
    return parts if count != 0 else tuple(None if part is None else part[:0] for part in parts)


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
        group = checks.process_group(group)
        hidden_dim = checks.at_most("hidden_dim", hidden_dim, checks.MOST)
        num_local_experts = checks.at_most("num_local_experts", num_local_experts, checks.MOST)
        max_num_of_tokens_per_rank = checks.at_most("max_num_of_tokens_per_rank", max_num_of_tokens_per_rank,
                                                    checks.MOST, 0)
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.hidden_dim, self.num_local_experts, self.use_fp8 = hidden_dim, num_local_experts, use_fp8
        # ElasticBuffer's combine takes 0 as the number of the dispatch.
        self._sms = (checks.at_most("num_sms_dispatch_api", num_sms_dispatch_api or 0, checks.MOST, 0),
                     checks.at_most("num_sms_combine_api", num_sms_combine_api or 0, checks.MOST, 0) or checks.MOST)
        experts = num_local_experts * self.group_size
        # Ranks may give different numbers of tokens: the largest counts for all.
        given = [struct.unpack("q", part)[0] for part in epx.bootstrap.from_torch(group).allgather(
            struct.pack("q", max_num_of_tokens_per_rank))]
        self._elastic = (_OverFabric if use_mnnvl else ElasticBuffer)(
            group, num_max_tokens_per_rank=max(1, *given), hidden=hidden_dim,
            num_topk=min(experts, _MOST_TOPK), num_cpu_timeout_secs=_LATEST_S)
        engine = self._elastic._open()
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
        self.num_of_hybrid_ep_ranks_per_nvlink_domain = len(mates)
        self.configurer = self._configurer()

    def _configurer(self) -> "_Configurer":
        return _Configurer(BufferConfig(
            self.hidden_dim, self.max_num_of_tokens_per_rank, self.num_local_experts,
            self.num_of_hybrid_ep_ranks_per_nvlink_domain, self.num_of_nodes))

    def empty_jit_cache(self) -> None:
        """Does nothing: EPX compiles nothing at run time."""

    def recover(self, graphs_released: bool = False) -> None:
        """After a failure: the buffer can be used again. All ranks call it before the next operation. Handles and
        graphs from before are not valid any more (ElasticBuffer.recover). An addition to DeepEP's interface."""
        self._elastic.recover(graphs_released)

    def _routing(self, hidden: torch.Tensor, routing_map: Any, probs: Any, topk_idx: Any, topk_weights: Any,
                 experts: Any, on_device: bool) -> Tuple[torch.Tensor, Optional[torch.Tensor], int]:
        """(indices, weights or None, experts) of either form of a routing; of both, the map counts. `on_device`: where
        a token has too many experts, its first is one that does not exist, and the operation fails."""
        if topk_idx is not None and routing_map is None:
            if experts is None:
                raise wrong("num_of_experts", "a number with topk_idx", "None")
            idx = checks.tensor("topk_idx", topk_idx, _INDICES, (hidden.shape[0], None), contiguous=False).contiguous()
            return idx, _weights(probs, topk_weights, idx, experts), experts
        if not isinstance(routing_map, torch.Tensor) or routing_map.dtype != torch.bool or routing_map.dim() != 2 or \
                routing_map.shape[0] != hidden.shape[0]:
            raise wrong("routing_map", "a bool tensor [%d, experts], topk_idx, or a handle" % hidden.shape[0],
                        getattr(routing_map, "shape", type(routing_map).__name__))
        experts = routing_map.shape[1]
        idx = _indices_of(routing_map)
        if on_device and experts > _MOST_TOPK:
            idx[:, 0] = torch.where(routing_map.sum(1) > _MOST_TOPK, experts, idx[:, 0])
        return idx, _weights(probs, None, idx, experts), experts

    def _slots(self, hidden: torch.Tensor, given: Any, waits: bool) -> Tuple[int, int]:
        """(the tokens that any rank may have in this call: DeepEP's num_of_tokens_per_rank, the same on all ranks; and
        in any call from this one on, once it is not refused)."""
        count, most = hidden.shape[0], self.max_num_of_tokens_per_rank
        if given is not None:
            given = checks.at_most("num_of_tokens_per_rank", given, checks.MOST, 0)
            if given < count:
                raise wrong("num_of_tokens_per_rank", "at least the %d tokens of this rank" % count, given)
            most = max(most, given)
        if not waits and count > most:
            raise wrong("hidden", "at most %d tokens where nothing waits on the host, or a larger "
                        "num_of_tokens_per_rank, the same on all ranks" % most, count)
        return count if given is None else given, most

    def _raise_to(self, most: int) -> None:
        if most > self.max_num_of_tokens_per_rank:
            self.max_num_of_tokens_per_rank = most
            self.configurer = self._configurer()

    def dispatch_with_permute(self, *, hidden: torch.Tensor, topk_idx: Optional[torch.Tensor] = None,
                              topk_weights: Optional[torch.Tensor] = None,
                              num_of_experts_per_rank: Optional[int] = None, num_of_experts: Optional[int] = None,
                              use_fp8: Optional[bool] = None, routing_map: Optional[torch.Tensor] = None,
                              probs: Optional[torch.Tensor] = None, scaling_factor: Optional[torch.Tensor] = None,
                              num_permuted_tokens: Any = None, pad_multiple: Optional[int] = None,
                              num_of_tokens_per_rank: Optional[int] = None,
                              handle: Optional[HybridEPHandle] = None, non_blocking: bool = False,
                              fuse_permute_dispatch: bool = False, num_dispatched_tokens: Any = None,
                              use_host_meta: Optional[bool] = None) -> _Permuted:
        """Sends each token to its experts: one row per (token, expert), grouped by expert, each expert's rows padded
        with zeros to a multiple of pad_multiple. Returns (rows, probs of the rows or None, scales of the rows or None,
        int64 padded rows of each local expert, handle). With a handle, its routing is used again.

        The number of rows is waited for on the host, and tokens_per_expert is on the CPU. With non_blocking (or
        use_host_meta=False, its older name) nothing waits on the host: there are num_permuted_tokens rows, zero behind
        those that were received, and tokens_per_expert is on the device of `hidden`. Rows whose place is beyond them
        are dropped: handle[-1] is 1 then, tokens_per_expert counts those that stay, and combine adds nothing for the
        others. num_permuted_tokens may be another number on each rank.
        """
        self._unused(fuse_permute_dispatch=(bool(fuse_permute_dispatch), False),
                     num_dispatched_tokens=(num_dispatched_tokens is not None, False))
        if use_host_meta is not None:
            non_blocking = not use_host_meta
        x = _rows(hidden, scaling_factor)
        if handle is not None:
            routing = routing_of(handle, True)
            weights = _weights_again(routing, probs, topk_idx, topk_weights)
            return self._permuted_again(x, routing, weights, handle)
        count = None
        if non_blocking:
            count = checks.positive("num_permuted_tokens", num_permuted_tokens, 0)
        else:
            refuse_capture(hidden.device, "dispatch_with_permute", "give num_permuted_tokens, with non_blocking=True")
        slots, most = self._slots(hidden, num_of_tokens_per_rank, not non_blocking)
        idx, weights, experts = self._routing(hidden, routing_map, probs, topk_idx, topk_weights, num_of_experts,
                                              non_blocking)
        alignment = checks.positive("pad_multiple", pad_multiple or 1)
        # EPX drops rows beyond a number that is at least 1.
        (data, scales), row_probs, _idx, elastic = self._dispatch(
            x, idx, weights, experts, alignment, None if count is None else max(count, 1), not non_blocking, True, most)
        if not non_blocking:
            _check_most(routing_map)
            counts = torch.tensor(elastic.num_recv_tokens_per_expert_list, dtype=torch.int64, device="cpu")
        else:
            counts = padded_counts(elastic, count)
        routing = Routing(elastic, idx, experts, slots, Origin(idx.device), counts, None, count)
        return (*_first(count, data, row_probs, scales), counts, make_handle(routing))

    def _permuted_again(self, x: Any, routing: Routing, weights: Optional[torch.Tensor],
                        handle: HybridEPHandle) -> _Permuted:
        rows, _idx, row_probs, _handle, _event = self._elastic.dispatch(
            x, topk_weights=weights, handle=routing.elastic, do_expand=True, num_sms=self._sms[0])
        data, scales = rows if isinstance(rows, tuple) else (rows, None)
        assert routing.tokens_per_expert is not None
        return (*_first(routing.limit, data, row_probs, scales), routing.tokens_per_expert, handle)

    def _checked(self, x: Any, idx: torch.Tensor, weights: Optional[torch.Tensor], experts: int, alignment: int,
                 cpu_sync: bool, expand: bool, most: int) -> Tuple[operations.Request, operations.Routed]:
        """The arguments of a dispatch with a new routing. A rank may have more tokens than others know of."""
        request = operations.Request(x, weights, expand, expand, False, self._sms[0])
        how = operations.routed(self._elastic._open(), request, idx, None, experts, max(most, request.count), alignment,
                                cpu_sync, True)
        return request, how._replace(max_tokens=most)

    def _dispatch(self, x: Any, idx: torch.Tensor, weights: Optional[torch.Tensor], experts: int, alignment: int,
                  rows: Optional[int], cpu_sync: bool, expand: bool, most: int) -> Tuple[Any, Any, Any, EPHandle]:
        """((rows, scales), weights, local experts or None, handle) of a dispatch with a new routing. `rows`: how many
        results have, without CPU sync; with expand, those beyond are dropped. `most`: tokens of a rank."""
        elastic = self._elastic
        engine = elastic._open()
        for again in (False, True):
            request, how = self._checked(x, idx, weights, experts, alignment, cpu_sync, expand, most)
            self._raise_to(most)
            try:
                got, recv_idx, got_weights, handle, _event = operations.dispatch(
                    engine, launcher(request.device, None, None, False, False), request,
                    how._replace(rows=rows, drop=expand and rows is not None),
                    elastic._domains, self._sms[0], elastic.num_cpu_timeout_secs)
                return got if isinstance(got, tuple) else (got, None), got_weights, recv_idx, handle
            except epx.OverflowingError as failure:
                # A rank has more tokens than the group is for: all ranks have learnt it in the update.
                pool = engine.high_throughput_pool(request.device, experts)
                if again or not cpu_sync or pool is None or pool.group.error() is not None:
                    raise hinted(failure) from None
                pool.finish()  # the update still uses tensors of the frame that failed
                most = self._grow(request.count)
        raise AssertionError("not reached")

    def _grow(self, count: int) -> int:
        """Room for the tokens of all ranks. Collective."""
        parts = self._elastic._open().bootstrap.allgather(struct.pack("q", count))
        most = max(struct.unpack("q", part)[0] for part in parts)
        return max(self.max_num_of_tokens_per_rank, 1 << (most - 1).bit_length())

    def _unused(self, **given: Any) -> None:
        unused.arguments(self.rank, "deep_ep.HybridEPBuffer", **given)

    def _columns(self, experts: int) -> Tuple[int, int]:
        """(experts of this node, first of this rank among them): the columns of probs of rows."""
        local = experts // self.group_size
        return self.num_of_hybrid_ep_ranks_per_nvlink_domain * local, self.local_rank * local

    def dispatch(self, hidden: torch.Tensor, scaling_factor: Optional[torch.Tensor] = None,
                 topk_idx: Optional[torch.Tensor] = None, topk_weights: Optional[torch.Tensor] = None,
                 num_of_experts: Optional[int] = None, probs: Optional[torch.Tensor] = None,
                 routing_map: Optional[torch.Tensor] = None, num_dispatched_tokens_tensor: Any = None,
                 num_dispatched_tokens: Optional[int] = None, handle: Optional[HybridEPHandle] = None,
                 num_of_tokens_per_rank: Optional[int] = None) -> _Dispatched:
        """Sends each token once to each rank of its experts. Returns (rows by source rank and token, f32 probs [rows,
        experts of this node] or None, scales or None, handle). Probs of other ranks' experts are 0. With a handle, its
        routing is used again. With num_dispatched_tokens, the number of rows, nothing waits on the host."""
        x = _rows(hidden, scaling_factor)
        self._unused(num_dispatched_tokens_tensor=(num_dispatched_tokens_tensor is not None, False))
        if handle is not None:
            routing = routing_of(handle, False)
            assert routing.recv_topk_idx is not None
            weights = _weights_again(routing, probs, topk_idx, topk_weights)
            rows, idx, got, _handle, _event = self._elastic.dispatch(x, topk_weights=weights, handle=routing.elastic,
                                                                     num_sms=self._sms[0])
            data, scales = rows if isinstance(rows, tuple) else (rows, None)
            return data, self._spread(got, routing.recv_topk_idx, routing.num_experts), scales, handle
        waits = num_dispatched_tokens is None
        if waits:
            refuse_capture(hidden.device, "dispatch", "give num_dispatched_tokens")
        count = None if waits else checks.positive("num_dispatched_tokens", num_dispatched_tokens, 0)
        slots, most = self._slots(hidden, num_of_tokens_per_rank, waits)
        idx, weights, experts = self._routing(hidden, routing_map, probs, topk_idx, topk_weights, num_of_experts,
                                              not waits)
        (data, scales), got, recv_idx, elastic = self._dispatch(x, idx, weights, experts, 1, count, waits, False,
                                                                most)
        if waits:
            _check_most(routing_map)
        return data, self._spread(got, recv_idx, experts), scales, make_handle(
            Routing(elastic, idx, experts, slots, Origin(idx.device), None, recv_idx))

    def _spread(self, weights: Optional[torch.Tensor], recv_idx: torch.Tensor, experts: int) -> Optional[torch.Tensor]:
        if weights is None:
            return None
        columns, first = self._columns(experts)
        return probs_of_weights(weights, torch.where(recv_idx < 0, -1, recv_idx.long() + first), columns)

    def combine(self, hidden: torch.Tensor, probs: Optional[torch.Tensor] = None,
                handle: Optional[HybridEPHandle] = None) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """Sends the rows of a dispatch() back and sums those of each token, without weights. Returns ([T, H], f32
        [T, E] of the probs of rows, or None)."""
        routing = routing_of(handle, False)
        assert routing.recv_topk_idx is not None
        weights = None
        if probs is not None:
            columns, first = self._columns(routing.num_experts)
            _check_probs(probs, routing.recv_topk_idx.shape[0], columns)
            at = torch.where(routing.recv_topk_idx < 0, -1, routing.recv_topk_idx.long() + first)
            weights = _weights_of(probs.float(), at)
        return self._combine(hidden, routing, weights)

    def _combine(self, hidden: torch.Tensor, routing: Routing,
                 weights: Optional[torch.Tensor]) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        rows = checks.dense("hidden", hidden, 2).contiguous()
        combined, back, _event = self._elastic.combine(rows, routing.elastic, weights, num_sms=self._sms[1])
        return combined, None if back is None else probs_of_weights(back, routing.topk_idx, routing.num_experts)

    def combine_with_unpermute(self, *, hidden: torch.Tensor, probs: Optional[torch.Tensor] = None,
                               handle: Optional[HybridEPHandle] = None, pad_multiple: Optional[int] = None,
                               fuse_unpermute_combine: bool = False, num_dispatched_tokens: Any = None,
                               non_blocking: bool = False) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """Sends rows back and sums those of each token, without weights. Returns (bf16 [T, H], f32 [T, E] of the probs
        of rows, or None). Nothing waits on the host, with and without non_blocking."""
        self._unused(fuse_unpermute_combine=(bool(fuse_unpermute_combine), False),
                     num_dispatched_tokens=(num_dispatched_tokens is not None, False))
        routing = routing_of(handle, True)
        weights = None if probs is None else checks.dense("probs", probs).reshape(-1).float().contiguous()
        if routing.limit == 0:  # the dispatch had one row, which it did not return
            checks.dense("hidden", hidden, 2)
            hidden = torch.cat([hidden, hidden.new_zeros(1, hidden.shape[1])])
            weights = None if weights is None else torch.cat([weights, weights.new_zeros(1)])
        return self._combine(hidden, routing, weights)


def _check_most(routing_map: Optional[torch.Tensor]) -> None:
    """After the host has waited for the rows: looking at the map does not wait for more."""
    if routing_map is None or routing_map.shape[1] <= _MOST_TOPK or not routing_map.numel():
        return
    most = int(routing_map.sum(1).max())
    if most > _MOST_TOPK:
        raise wrong("routing_map", "at most %d experts per token" % _MOST_TOPK, most)
