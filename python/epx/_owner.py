# SPDX-License-Identifier: Apache-2.0
"""The base class of a group: the C group and its device.

streams.py, memory.py and handle.py extend this class with what their objects need, and group.py combines them. Imports
therefore have one direction only.
"""

import ctypes
from typing import NamedTuple, Optional

from ._abi import Device
from ._library import load
from .errors import Status, UsageError


class GroupInfo(NamedTuple):
    """The properties of a group: rank, nodes, device."""

    rank: int
    nranks: int
    node: int
    nnodes: int
    ranks_per_node: int
    num_experts: int
    local_experts: int
    device: Device
    num_agents: int
    timeout_ms: int
    max_recv_tokens: int
    device_name: str
    net_name: str


class Owner:
    """Owns a group of the C library."""

    info: GroupInfo
    device: Device
    device_index: int
    # Of the class, so that an object whose creation failed at its first line has them too.
    _address: Optional[int] = None
    _why = "was not created"

    def __init__(self) -> None:
        self._lib: ctypes.CDLL = load()

    @property
    def address(self) -> int:
        """The address of the C group. Raises UsageError if the group was destroyed, or if this process was forked from
        the one that created it."""
        if self._address is None:
            raise UsageError(Status.USAGE, "the group %s" % self._why)
        return self._address

    @property
    def alive(self) -> bool:
        """True while the group may be used: not after destroy(), nor in a process forked from its creator."""
        return self._address is not None
