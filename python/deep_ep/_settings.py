# SPDX-License-Identifier: Apache-2.0
"""How large EPX's groups are made, from the bytes a buffer was given and from the environment."""

import os
import re
import warnings
from typing import Any, Dict, Optional, Tuple

import epx
import torch

_GIB = 1 << 30
_INFLIGHT = 4  # low-latency operations whose receive half may be outstanding
LOW_LATENCY_TOPK = 11  # experts per token that a low-latency group serves from the start: DeepEP's most

# Sizes by the bytes that were hinted for them, and by ranks: (tokens per rank, hidden size, experts).
_hinted: Dict[Tuple[int, int], Tuple[int, int, int]] = {}


def _variable(name: str, fallback: int) -> int:
    """A positive number, which may end in K, M or G; another value is warned about and ignored, as the library does."""
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
    """A low-latency group with room for one receive tensor and two of get_next_low_latency_combine_buffer()."""
    return dict(
        modes=epx.Mode.LOW_LATENCY, num_experts=num_experts, max_tokens_per_rank=max_tokens,
        max_hidden_bytes=hidden_bytes, max_topk=topk, max_inflight=_INFLIGHT,
        alloc_bytes=3 * _slab(max_tokens, num_experts, hidden_bytes, nranks) + (1 << 20))


def low_latency_hint(max_tokens: int, hidden: int, nranks: int, num_experts: int) -> int:
    """Bytes that such a group takes on each rank. A buffer that is given them knows the sizes, see hinted_sizes()."""
    config = low_latency_config(max_tokens, num_experts, 2 * hidden, LOW_LATENCY_TOPK, nranks)
    nbytes = epx.memory(nranks, device=epx.Device.CPU, **config)["heap_bytes"]
    _hinted[(nbytes, nranks)] = (max_tokens, hidden, num_experts)
    return nbytes


def hinted_sizes(nbytes: int, nranks: int) -> Optional[Tuple[int, int, int]]:
    """(tokens per rank, hidden size, experts) for which low_latency_hint() last said so many bytes."""
    return _hinted.get((nbytes, nranks))


class Settings:
    """What a buffer was given."""

    def __init__(self, num_nvl_bytes: int, num_rdma_bytes: int, enable_shrink: bool) -> None:
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.enable_shrink = enable_shrink
        self.max_tokens = _variable("EPX_DEEP_EP_MAX_TOKENS", 16384)
        self.gpu_bytes = _variable("EPX_DEEP_EP_GPU_BYTES", 2 * _GIB)

    def high_throughput_memory(self, device: torch.device, nranks: int, max_tokens: int,
                               hidden_bytes: int) -> Tuple[int, int]:
        """(rows that may pass through EPX's receive buffer, bytes of the heap for tensors).

        On the CPU memory that nobody touches costs nothing: the worst case, and the library's default.
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
