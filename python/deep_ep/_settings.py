# SPDX-License-Identifier: Apache-2.0
"""The sizes of EPX's groups, from the bytes of a buffer and from environment variables."""

import os
import re
import warnings
from typing import Any, Dict, Optional, Tuple

import epx
import torch

_GIB = 1 << 30
_INFLIGHT = 4  # maximum number of low-latency operations with an outstanding receive half
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
    return dict(
        modes=epx.Mode.LOW_LATENCY, num_experts=num_experts, max_tokens_per_rank=max_tokens,
        max_hidden_bytes=hidden_bytes, max_topk=topk, max_inflight=_INFLIGHT,
        alloc_bytes=3 * slab + slab * 3 // 4 + (1 << 20))


def low_latency_hint(max_tokens: int, hidden: int, nranks: int, num_experts: int) -> int:
    """The bytes of such a group on each rank. A buffer of this many bytes knows the sizes: see hinted_sizes()."""
    config = low_latency_config(max_tokens, num_experts, 2 * hidden, LOW_LATENCY_TOPK, nranks)
    nbytes = epx.memory(nranks, device=epx.Device.CPU, **config)["heap_bytes"]
    _hinted[(nbytes, nranks)] = (max_tokens, hidden, num_experts)
    return nbytes


def hinted_sizes(nbytes: int, nranks: int) -> Optional[Tuple[int, int, int]]:
    """(tokens per rank, hidden size, experts) for which low_latency_hint() last returned this many bytes, or None."""
    return _hinted.get((nbytes, nranks))


class Settings:
    """The settings of a buffer."""

    def __init__(self, num_nvl_bytes: int, num_rdma_bytes: int, enable_shrink: bool) -> None:
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.enable_shrink = enable_shrink
        self.max_tokens = _variable("EPX_DEEP_EP_MAX_TOKENS", 4096)
        self.gpu_bytes = _variable("EPX_DEEP_EP_GPU_BYTES", 2 * _GIB)

    def high_throughput_memory(self, device: torch.device, nranks: int, max_tokens: int,
                               hidden_bytes: int) -> Tuple[int, int]:
        """(rows that fit into EPX's receive buffer, bytes of the heap for tensors).

        (0, 0) on the CPU: the worst case of rows and the default heap. Memory that is not touched costs nothing there.
        """
        if device.type == "cpu":
            return 0, 0
        rows = max(self.num_nvl_bytes, self.gpu_bytes // 2) // hidden_bytes
        return min(rows, nranks * max_tokens), max(self.num_nvl_bytes, self.gpu_bytes)

    def low_latency_config(self, max_tokens: int, num_experts: int, hidden_bytes: int, topk: int,
                           nranks: int) -> Dict[str, Any]:
        """The configuration of a low-latency group."""
        config = low_latency_config(max_tokens, num_experts, hidden_bytes, topk, nranks)
        config["enable_mask"] = int(self.enable_shrink)
        return config
