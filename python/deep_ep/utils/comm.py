# SPDX-License-Identifier: Apache-2.0
"""DeepEP's handles of NCCL communicators. EPX has none: these keep the process group, for callers that pass them on."""

import weakref
from typing import Any, List

_managed: List["NCCLCommHandle"] = []
_known: "weakref.WeakKeyDictionary[Any, NCCLCommHandle]" = weakref.WeakKeyDictionary()


class NCCLCommHandle:
    """A communicator, here a process group; `managed`: made by this module."""

    def __init__(self, nccl_comm: Any, managed: bool) -> None:
        self._comm, self.managed = nccl_comm, managed

    def get(self) -> Any:
        """What the handle was made of; None after destroy_all_managed_nccl_comm()."""
        return self._comm

    def destroy(self) -> None:
        """Lets go of it."""
        self._comm = None


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
