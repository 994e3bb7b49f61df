# SPDX-License-Identifier: Apache-2.0
"""Memory from a group's heap, for NumPy, torch and others."""

import sys
from typing import TYPE_CHECKING, Any, Dict, Tuple

from . import dlpack
from ._abi import Device

if TYPE_CHECKING:
    from .group import Group


class Block:
    """A piece of a group's heap. ``torch.from_dlpack`` and ``numpy.asarray`` make byte arrays over it that keep it alive."""

    def __init__(self, group: "Group", address: int, nbytes: int) -> None:
        self.group = group
        self.address = address
        self.nbytes = nbytes

    def __getattr__(self, name: str) -> Dict[str, Any]:
        expected = "__array_interface__" if self.group.device == Device.CPU else "__cuda_array_interface__"
        if name != expected:
            raise AttributeError("Block has no attribute %r" % name)
        return {"data": (self.address, False), "shape": (self.nbytes,), "strides": None, "typestr": "|u1", "version": 3}

    def __dlpack_device__(self) -> Tuple[int, int]:
        """DLPack's (device type, index)."""
        kind = {Device.CPU: dlpack.CPU, Device.CUDA: dlpack.CUDA, Device.HIP: dlpack.ROCM}[self.group.device]
        return kind, self.group.device_index

    def __dlpack__(self, stream: Any = None, **_: Any) -> Any:
        """A DLPack capsule over the bytes."""
        export = dlpack.Export(self.address, (self.nbytes,), self.__dlpack_device__())
        keeper = dlpack.TorchKeeper if "torch" in sys.modules else dlpack.Keeper
        return keeper((self, export)).capsule(export)

    def __len__(self) -> int:
        return self.nbytes

    def __del__(self) -> None:
        group = getattr(self, "group", None)
        if group is not None:
            group._release(self.address)
