# SPDX-License-Identifier: Apache-2.0
"""The nodes of a process group's ranks, as DeepEP names them: (RDMA ranks, NVLink ranks)."""

import os
import weakref
from typing import Any, Dict, Tuple

import epx

from ._checks import process_group
from ._elastic_engine import local_index
from ._engine import probe_nodes

# By group; the variable that cuts a machine into nodes may change between tests.
_known: "weakref.WeakKeyDictionary[Any, Dict[str, Tuple[int, int]]]" = weakref.WeakKeyDictionary()


def get_physical_domain_size(group: Any) -> Tuple[int, int]:
    """(nodes, ranks per node) of a process group, or of a buffer in its place. The first call for a group is
    collective. Where the nodes have different sizes, or do not have consecutive ranks, all ranks count as one node."""
    if hasattr(group, "get_physical_domain_size"):
        return group.get_physical_domain_size()
    group = process_group(group)
    cut = os.environ.get("EPX_RANKS_PER_NODE", "")
    known = _known.setdefault(group, {})
    if cut not in known:
        node_of = probe_nodes(epx.bootstrap.from_torch(group))[1]
        per = local_index(node_of) or len(node_of)
        known[cut] = (len(node_of) // per, per)
    return known[cut]


def get_logical_domain_size(group: Any, allow_hybrid_mode: bool = True) -> Tuple[int, int]:
    """(scale-out ranks, scale-up ranks): the physical sizes in hybrid mode, else (1, ranks). Those of a buffer are in
    its own mode."""
    if hasattr(group, "get_logical_domain_size"):
        return group.get_logical_domain_size()
    physical = get_physical_domain_size(group)
    return physical if allow_hybrid_mode else (1, physical[0] * physical[1])
