# SPDX-License-Identifier: Apache-2.0
"""The part of a group that the objects made from it need: the C group and its device, as long as it exists.

Streams, memory and handles extend it where they are defined (streams.py, memory.py, handle.py); group.py puts these
together. So each module imports only those before it.
"""

import ctypes
from typing import NamedTuple, Optional

from ._abi import Device
from ._library import load
from .errors import Status, UsageError


class GroupInfo(NamedTuple):
    """What a group is: its rank, its nodes, its device."""

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

    def __init__(self) -> None:
        self._lib: ctypes.CDLL = load()
        self._address: Optional[int] = None
        self._why = "was not created"

    @property
    def address(self) -> int:
        """The group as the C library sees it. Raises UsageError where it has gone: destroyed, or left behind by
        fork."""
        if self._address is None:
            raise UsageError(Status.USAGE, "the group %s" % self._why)
        return self._address

    @property
    def alive(self) -> bool:
        """May it be used? Not after destroy(), nor in a process forked from the one that created it."""
        return self._address is not None
