# SPDX-License-Identifier: Apache-2.0
"""Arguments and variables of DeepEP that are accepted and have no effect: with EPX_LOG=info the log says so, once for
each in a process."""

import os
import sys
from typing import Any, Set

# Of NCCL, NVSHMEM and compilation at run time, which EPX does not have.
_VARIABLES = ("EP_SUPPRESS_NCCL_CHECK", "EP_REUSE_NCCL_COMM", "EP_DISABLE_GIN", "EP_GIN_GDAKI_DEBUG",
              "EP_NUM_MAX_LOCAL_RANKS", "EP_NCCL_ROOT_DIR", "EP_NVSHMEM_ROOT_DIR", "EP_NUM_TOPK_IDX_BITS",
              "DISABLE_SM90_FEATURES", "DISABLE_AGGRESSIVE_PTX_INSTRS")
_PREFIXES = ("EP_JIT_", "NVSHMEM_")

_printed: Set[str] = set()


def _print_once(rank: int, name: str, value: Any) -> None:
    if name in _printed or os.environ.get("EPX_LOG", "").lower() not in ("info", "debug"):
        return
    _printed.add(name)
    print("epx: rank %d: info: %s=%s: accepted, no effect in EPX" % (rank, name, value), file=sys.stderr, flush=True)


def arguments(rank: int, call: str, **given: Any) -> None:
    """`given`: name=(value, default). Nothing is said of a default, nor by any rank but 0."""
    if rank == 0:
        for name, (value, default) in given.items():
            if value != default:
                _print_once(rank, "%s: %s" % (call, name), value)


def variables(rank: int) -> None:
    """Of the variables that are set."""
    if rank == 0:
        for name in sorted(os.environ):
            if name in _VARIABLES or name.startswith(_PREFIXES):
                _print_once(rank, name, os.environ[name])
