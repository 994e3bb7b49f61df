# SPDX-License-Identifier: Apache-2.0
"""Where NCCL and NVSHMEM are installed. EPX needs neither; callers that print these paths get an answer."""

import importlib.util
import os
from typing import Optional, Sequence


def _package_root(name: str) -> Optional[str]:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    places: Sequence[str] = (spec.submodule_search_locations or []) if spec is not None else []
    return list(places)[0] if places else None


def _find(variables: Sequence[str], package: str) -> Optional[str]:
    for variable in variables:
        if os.environ.get(variable):
            return os.environ[variable]
    return _package_root(package)


def find_nccl_root() -> Optional[str]:
    """The folder of NCCL: EP_NCCL_ROOT_DIR, NCCL_DIR, or the package nvidia.nccl; None if there is none."""
    return _find(("EP_NCCL_ROOT_DIR", "NCCL_DIR"), "nvidia.nccl")


def find_nvshmem_root() -> Optional[str]:
    """The folder of NVSHMEM: EP_NVSHMEM_ROOT_DIR, NVSHMEM_DIR, or the package nvidia.nvshmem; None without one."""
    return _find(("EP_NVSHMEM_ROOT_DIR", "NVSHMEM_DIR"), "nvidia.nvshmem")
