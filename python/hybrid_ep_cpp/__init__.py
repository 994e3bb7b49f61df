# SPDX-License-Identifier: Apache-2.0
"""The name of the compiled module of DeepEP's branch hybrid-ep. Programs import it to see whether HybridEPBuffer is
there, and ask it which ranks share memory."""

from typing import Any

import deep_ep

__all__ = ["ExtendedMemoryAllocator", "HybridEpConfigInstance"]


class ExtendedMemoryAllocator:
    """Knows the nodes of ranks."""

    def detect_accessible_ranks(self, process_group: Any) -> int:
        """Ranks per node: HybridEPBuffer's num_of_hybrid_ep_ranks_per_nvlink_domain. The first call for a group is
        collective."""
        return deep_ep.get_physical_domain_size(process_group)[1]


class HybridEpConfigInstance:
    """Sizes of a call. `topk` tells programs that routings may be indices. EPX reads none of them."""

    hidden_dim = max_num_of_tokens_per_rank = num_of_experts_per_rank = num_of_ranks_per_node = num_of_nodes = 0
    pad_multiple = topk = 0


def __getattr__(name: str) -> None:
    why = ": EPX has no compiled runtime; deep_ep.HybridEPBuffer is the buffer" if name == "HybridEPBuffer" else ""
    raise AttributeError("module 'hybrid_ep_cpp' has no attribute %r%s" % (name, why))
