# SPDX-License-Identifier: Apache-2.0
"""Memory from a group's heap, usable by NumPy, torch and others."""

import ctypes
import math
import sys
from typing import Any, Dict, Set, Tuple

from . import dlpack
from ._abi import Device, TensorStruct
from ._library import check
from .streams import StreamOwner, stream_address
from .tensors import describe


class Block:
    """An allocation in a group's heap. ``torch.from_dlpack`` and ``numpy.asarray`` make byte arrays over it, which keep
    it alive."""

    def __init__(self, group: "HeapOwner", address: int, nbytes: int) -> None:
        self.address = address  # 0: there is nothing to free
        self.nbytes = nbytes
        self.revoked = False  # True: it was freed
        self.group = group

    def __getattr__(self, name: str) -> Dict[str, Any]:
        # The name first: a block whose constructor was interrupted has no group.
        on_cpu = name == "__array_interface__"
        if not on_cpu and name != "__cuda_array_interface__" or on_cpu != (self.group.device == Device.CPU):
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

    def revoke(self) -> None:
        """Frees the memory now. What was made from it can be read as long as it is referenced, even after the group was
        destroyed, but has the bytes of whoever allocates the memory next."""
        if self.address and not self.revoked:
            self.revoked = True
            self.group._free(self.address)

    def __del__(self) -> None:
        group = getattr(self, "group", None)
        if group is not None and self.address:
            group._release(self)


class HeapOwner(StreamOwner):
    """The part of a group that owns heap memory."""

    alloc_bytes: int  # of the heap, for alloc()
    alloc_address: int  # where these begin

    def __init__(self) -> None:
        super().__init__()
        # The blocks, by id(). One may be released on any thread, so every operation on this set must be atomic.
        self._blocks: Set[int] = set()

    def _find_heap(self) -> None:
        """Sets `alloc_address`, where the memory of alloc() begins. Before there is a block."""
        out = ctypes.c_void_p()
        check(self._lib.epx_alloc(self.address, self.alloc_bytes, ctypes.byref(out)))
        self.alloc_address = out.value or 0
        check(self._lib.epx_free(self.address, out))

    def alloc(self, nbytes: int) -> Block:
        """Allocates memory that every rank of the node can access. Tensors there are exchanged without a copy.

        The memory is freed when the block and all tensors made from it (``torch.from_dlpack(block)``) are released.
        """
        block, out = Block(self, 0, nbytes), ctypes.c_void_p()  # first: what fails behind the call is freed with it
        check(self._lib.epx_alloc(self.address, nbytes, ctypes.byref(out)))
        block.address = out.value or 0
        self._blocks.add(id(block))
        return block

    def register(self, tensor: Any, stream: Any = None) -> bool:
        """Registers the tensor's memory. True if a high-throughput combine reads any number of its rows in place.

        Memory of alloc() is always read in place. Other memory is exported to the ranks of the node, which import it in
        their next call. After that, register() returns True. Does not wait.
        """
        struct, in_place = TensorStruct(), ctypes.c_int()
        keep = describe("tensor", tensor, struct)
        shape, stride = struct.shape[:struct.ndim], struct.stride[:struct.ndim]
        if 0 in shape:
            return True
        if not any(stride):  # contiguous
            elements = math.prod(shape)
        else:
            elements = 1 + sum((n - 1) * step for n, step in zip(shape, stride))
        check(self._lib.epx_register(self.address, struct.data, elements * self._lib.epx_dtype_size(struct.dtype),
                                     stream_address(self, stream), ctypes.byref(in_place)))
        del keep
        return bool(in_place.value)

    def _free(self, address: int) -> None:
        if self._address is not None:
            self._lib.epx_free(self._address, address)

    def _release(self, block: Block) -> None:
        self._blocks.discard(id(block))
        if not block.revoked:
            self._free(block.address)
        if self._address is not None and not self._blocks:
            self._heap_unused()

    def _heap_unused(self) -> None:
        """Called when the last block was released."""
