# SPDX-License-Identifier: Apache-2.0
"""What DeepEP's later buffers share: barriers, the communication stream, sizes of domains, and handles of NCCL
communicators. EPX has no NCCL: a handle keeps the process group, for callers that pass it on."""

import weakref
from typing import Any, List, Optional, Tuple

from . import _domains
from ._checks import wrong

__all__ = ["NCCLCommHandle", "barrier", "destroy_all_managed_nccl_comm", "get_comm_stream", "get_logical_domain_size",
           "get_nccl_comm_handle", "get_physical_domain_size"]

_managed: List["NCCLCommHandle"] = []
_known: "weakref.WeakKeyDictionary[Any, NCCLCommHandle]" = weakref.WeakKeyDictionary()


class NCCLCommHandle:
    """A communicator, here a process group; `managed`: made by this module."""

    def __init__(self, nccl_comm: Any, managed: bool) -> None:
        self.nccl_comm, self.managed = nccl_comm, managed

    def get(self) -> Any:
        """What the handle was made of; None after destroy_all_managed_nccl_comm()."""
        return self.nccl_comm

    def destroy(self) -> None:
        """Lets go of it."""
        self.nccl_comm = None


def get_nccl_comm_handle(group: Any, force_new_comm: bool = False) -> NCCLCommHandle:
    """The handle of a group; a new one if asked for."""
    if force_new_comm:
        handle = NCCLCommHandle(group, True)
        _managed.append(handle)
        return handle
    if group not in _known:
        _known[group] = NCCLCommHandle(group, False)
    return _known[group]


def destroy_all_managed_nccl_comm() -> None:
    """Lets go of all handles that were made with force_new_comm."""
    for handle in _managed:
        handle.destroy()
    _managed.clear()


def barrier(buffer: Any, wait_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True,
            context_idx: Optional[int] = None) -> None:
    """A barrier of all ranks on the current stream. wait_comm_stream: behind what is queued on the communication
    stream, which goes on behind the barrier. `sequential` has no effect; context_idx: None, as there is one."""
    if context_idx not in (None, 0):
        raise wrong("context_idx", "None: this buffer has one group of ranks", repr(context_idx))
    buffer._barrier(False, wait_comm_stream, with_cpu_sync, sequential)


def get_comm_stream(buffer: Any) -> Any:
    """The communication stream, which all buffers of the process share. Raises RuntimeError without a GPU."""
    return buffer.get_comm_stream()


def get_physical_domain_size(group_or_buffer: Any) -> Tuple[int, int]:
    """(nodes, ranks per node) of a process group or of a buffer: see deep_ep.get_physical_domain_size."""
    return _domains.get_physical_domain_size(group_or_buffer)


def get_logical_domain_size(group_or_buffer: Any, allow_hybrid_mode: Optional[bool] = None) -> Tuple[int, int]:
    """(scale-out ranks, scale-up ranks) of a process group, in hybrid mode unless told otherwise, or of a buffer, in
    its mode."""
    return _domains.get_logical_domain_size(group_or_buffer, allow_hybrid_mode is None or allow_hybrid_mode)
