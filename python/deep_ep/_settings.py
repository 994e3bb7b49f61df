# SPDX-License-Identifier: Apache-2.0
"""The sizes of EPX's groups, from the bytes of a buffer and from environment variables."""

import os
import re
import warnings
from typing import Any, Dict, Optional, Tuple

import epx
import torch

_GIB = 1 << 30
_LEAST = 16 << 20  # bytes of a heap for tensors, and of a buffer for rows
_MOST_ROWS = 512 << 20  # bytes of a buffer for rows
_MOST_SLOTS = 400 << 20  # bytes of a buffer for rows between nodes
_INFLIGHT = 2  # low-latency operations of a kind with an outstanding receive half: as many as DeepEP has memory for
LOW_LATENCY_TOPK = 11  # initial top-k limit of a low-latency group: DeepEP's maximum

# (hinted bytes, ranks) -> (tokens per rank, hidden size, experts).
_hinted: Dict[Tuple[int, int], Tuple[int, int, int]] = {}


def _variable(name: str, fallback: int) -> int:
    """A positive number with an optional suffix K, M or G. Other values are ignored with a warning, as in C."""
    text = os.environ.get(name, "")
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    value = int(match.group(1)) << {"": 0, "K": 10, "M": 20, "G": 30}[match.group(2)] if match else 0
    if text and value < 1:
        warnings.warn("%s: expected a positive number, got %r; %d is used" % (name, text, fallback))
    return value or fallback


def _slab(max_tokens: int, num_experts: int, hidden_bytes: int, nranks: int) -> int:
    """Bytes of a low-latency receive tensor."""
    return -(-num_experts // nranks) * nranks * max_tokens * hidden_bytes


def low_latency_config(max_tokens: int, num_experts: int, hidden_bytes: int, topk: int, nranks: int) -> Dict[str, Any]:
    """A low-latency group whose heap holds two of get_next_low_latency_combine_buffer() and a receive tensor, or three
    FP8 ones (half as large, with scales): of this call, of the call before it, and of graphs."""
    slab = _slab(max_tokens, num_experts, hidden_bytes, nranks)
    config = dict(
        modes=epx.Mode.LOW_LATENCY, num_experts=num_experts, max_tokens_per_rank=max_tokens,
        max_hidden_bytes=hidden_bytes, max_topk=topk, max_inflight=_INFLIGHT)
    # What is beyond 1 MiB tells nearly all sizes with slabs of the same bytes apart, for hinted_sizes(). It does not
    # depend on the top-k: the heap has the bytes of the hint, also where a dispatch has more experts per token.
    alloc_bytes = 3 * slab + slab * 3 // 4 + (1 << 20)
    own = epx.memory(nranks, device=epx.Device.CPU, alloc_bytes=alloc_bytes,
                     **dict(config, max_topk=LOW_LATENCY_TOPK))["low_latency_bytes"]
    return dict(config, alloc_bytes=alloc_bytes + own % (1 << 20))


def low_latency_hint(max_tokens: int, hidden: int, nranks: int, num_experts: int) -> int:
    """The bytes for tensors in the heap of such a group, all of which get_local_buffer_tensor() may give out. EPX's own
    slots are a few percent more. A buffer of this many bytes knows the sizes: see hinted_sizes()."""
    config = low_latency_config(max_tokens, num_experts, 2 * hidden, LOW_LATENCY_TOPK, nranks)
    nbytes = config["alloc_bytes"]
    _hinted[(nbytes, nranks)] = (max_tokens, hidden, num_experts)
    return nbytes


def hinted_sizes(nbytes: int, nranks: int) -> Optional[Tuple[int, int, int]]:
    """(tokens per rank, hidden size, experts) for which low_latency_hint() last returned this many bytes, or None. Few
    sizes have the same bytes as others; of these the last count, and a buffer for the others makes its group later."""
    return _hinted.get((nbytes, nranks))


class Settings:
    """The settings of a buffer."""

    def __init__(self, num_nvl_bytes: int, num_rdma_bytes: int, enable_shrink: bool,
                 use_fabric: bool = False) -> None:
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.enable_shrink = enable_shrink
        self.use_fabric = use_fabric  # GPUs of several hosts may be one node
        self.max_tokens = _variable("EPX_DEEP_EP_MAX_TOKENS", 4096)
        self.gpu_bytes = _variable("EPX_DEEP_EP_GPU_BYTES", 2 * _GIB)
        self.gpu_bytes_set = "EPX_DEEP_EP_GPU_BYTES" in os.environ

    def high_throughput_memory(self, device: torch.device, given: int, nranks: int, nnodes: int,
                               config: Dict[str, Any]) -> Dict[str, int]:
        """What the configuration of a high-throughput group says of memory: of the heap for tensors, of EPX's buffer
        for rows in torch's own memory, and of that for rows between nodes. On a GPU all are no more than `given`, or a
        few MiB.

        Nothing on the CPU, where memory that is not touched costs nothing.
        """
        if device.type == "cpu":
            return {}
        heap = given if given and not self.gpu_bytes_set else max(given, self.gpu_bytes)
        if nnodes > 1:
            least = epx.memory(nranks, device=epx.Device.CPU, ranks_per_node=-(-nranks // nnodes), ht_buffer_bytes=1,
                               ht_node_bytes=1, alloc_bytes=4096, **config)["heap_bytes"]
            part = max((heap - least) // 4, _LEAST)
            rows, slots = min(part, _MOST_ROWS), min(part, _MOST_SLOTS)
            return {"ht_node_bytes": rows, "ht_buffer_bytes": slots,
                    "alloc_bytes": max(heap - least - rows - slots, _LEAST)}
        # Results come first: of a small heap they need nearly all.
        rows = min(max(heap // (4 if heap >= _GIB else 8), _LEAST), _MOST_ROWS)
        return {"ht_node_bytes": rows, "alloc_bytes": max(heap - rows, _LEAST)}

    def low_latency_config(self, max_tokens: int, num_experts: int, hidden_bytes: int, topk: int,
                           nranks: int) -> Dict[str, Any]:
        """The configuration of a low-latency group."""
        config = low_latency_config(max_tokens, num_experts, hidden_bytes, topk, nranks)
        config["enable_mask"] = int(self.enable_shrink)
        return config
