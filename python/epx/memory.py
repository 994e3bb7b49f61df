# SPDX-License-Identifier: Apache-2.0
"""Memory from a group's heap, for NumPy, torch and others."""

import ctypes
from typing import TYPE_CHECKING, Any, Dict

from ._abi import Device

if TYPE_CHECKING:
    from .group import Group


class Block:
    """A piece of a group's heap. ``numpy.asarray`` and ``torch.as_tensor`` make byte arrays over it that keep it alive."""

    def __init__(self, group: "Group", address: int, nbytes: int) -> None:
        self.group = group
        self.address = address
        self.nbytes = nbytes
        interface = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
        if group.device == Device.CPU:
            self.__array_interface__: Dict[str, Any] = interface
        else:
            self.__cuda_array_interface__: Dict[str, Any] = dict(interface, strides=None)

    def buffer(self) -> Any:
        """The same memory through the buffer protocol, for ``torch.frombuffer``; CPU device only. It keeps the block."""
        array = (ctypes.c_char * self.nbytes).from_address(self.address)
        array.block = self
        return array

    def __len__(self) -> int:
        return self.nbytes

    def __del__(self) -> None:
        group = getattr(self, "group", None)
        if group is not None:
            group._release(self.address)
