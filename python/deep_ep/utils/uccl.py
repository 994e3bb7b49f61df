# SPDX-License-Identifier: Apache-2.0
"""Names that UCCL-EP adds to deep_ep. Programs written for it start and stop its proxies by them; EPX's groups have
proxies of their own, which start and end with the group."""

from typing import Any, List, Tuple


def initialize_uccl(scratch: Any = None, scratch_nbytes: int = 0, rank: int = 0, num_ranks: int = 1, group: Any = None,
                    num_experts: int = 0, **more: Any) -> Tuple[List[Any], List[Any]]:
    """Nothing to start: (proxies, workers) are empty."""
    return [], []


def destroy_uccl(proxies: Any = None, workers: Any = None, **more: Any) -> None:
    """Nothing to stop."""


def check_nvlink_connections(group: Any = None) -> None:
    """Nothing to check: ranks without NVLink use what there is."""
