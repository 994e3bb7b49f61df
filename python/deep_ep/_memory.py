# SPDX-License-Identifier: Apache-2.0
"""Tensors in a group's heap, where other ranks read and write them in place.

A tensor keeps its memory for as long as it or any view of it lives, also after the buffer is destroyed. On a GPU a piece
that was let go may still be in use by queued work: it is given out again only to work that waits for that.
"""

import collections
import math
import sys
from typing import Any, Deque, Dict, List, Optional, Set, Tuple

import epx
import torch
from epx import dlpack
from torch.utils.dlpack import from_dlpack


class _Lease:
    """A piece of the heap in use; when nobody refers to it, it goes back."""

    def __init__(self, heap: "CudaHeap", block: epx.Block) -> None:
        self._heap = heap
        self._block = block

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._heap.take_back(self._block)


_KINDS = {torch.bfloat16: (4, 16), torch.float16: (2, 16), torch.float32: (2, 32), torch.int32: (0, 32),
          torch.int64: (0, 64), torch.uint8: (1, 8), torch.float8_e4m3fn: (1, 8)}  # DLPack's; FP8 travels as bytes


class Heap:
    """Tensors in the heap of a group on the CPU."""

    def __init__(self, group: epx.Group, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._where = {"cpu": (dlpack.CPU, 0), "cuda": (dlpack.CUDA, device.index or 0)}[device.type]

    def empty(self, shape: Tuple[int, ...], dtype: torch.dtype, strides: Optional[Tuple[int, ...]] = None) -> torch.Tensor:
        """A tensor in the heap, or in ordinary memory where the heap has no room; dense, whatever its strides."""
        return self.several((shape, dtype, strides))[0]

    def several(self, *parts: Tuple[Tuple[int, ...], torch.dtype, Optional[Tuple[int, ...]]]) -> List[torch.Tensor]:
        """Tensors that share a piece of the heap: it is free again when all of them are gone. (shape, dtype, strides or
        None) each."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype, _strides in parts]
        total = sum((size + 255) // 256 * 256 for size in sizes)
        piece = self._piece(total) if total else None
        tensors, at = [], 0
        for (shape, dtype, strides), size in zip(parts, sizes):
            if piece is None or not size:
                tensors.append(self._ordinary(shape, dtype, strides))
                continue
            tensor = from_dlpack(dlpack.export(piece[0], piece[1] + at, shape, self._where, _KINDS[dtype], strides))
            tensors.append(tensor if tensor.dtype is dtype else tensor.view(dtype))
            at += (size + 255) // 256 * 256
        return tensors

    def _ordinary(self, shape: Tuple[int, ...], dtype: torch.dtype, strides: Optional[Tuple[int, ...]]) -> torch.Tensor:
        if strides is not None:
            return torch.empty_strided(shape, strides, dtype=dtype, device=self._device)
        return torch.empty(shape, dtype=dtype, device=self._device)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Is it known to lie in the heap? On the CPU nobody needs to know."""
        return False

    def close(self) -> None:
        """Gives back what is kept for later."""

    def _piece(self, nbytes: int) -> Optional[Tuple[Any, int]]:
        """(what to keep alive, address), or None."""
        try:
            block = self._group.alloc(nbytes)
        except epx.OutOfMemoryError:
            return None
        return block, block.address


class CudaHeap(Heap):
    """Tensors in the heap of a group on a GPU: pieces are kept by size, each with the event that says it is free."""

    def __init__(self, group: epx.Group, device: torch.device) -> None:
        super().__init__(group, device)
        self._returned: Deque[Tuple[epx.Block, Any]] = collections.deque()  # __del__ may run anywhere: no lock here
        self._free: Dict[int, List[Tuple[epx.Block, Any]]] = {}
        self._lent: Set[int] = set()  # addresses
        self._closed = False

    def holds(self, tensor: torch.Tensor) -> bool:
        """Does it lie in the heap?"""
        return tensor.untyped_storage().data_ptr() in self._lent

    def close(self) -> None:
        """Gives back what is kept for later, and what comes from now on."""
        self._closed = True
        self._returned.clear()
        self._free.clear()

    def take_back(self, block: epx.Block) -> None:
        """A piece is no longer referred to; queued work of the current stream may still use it."""
        self._lent.discard(block.address)
        if self._closed:
            return
        event = None
        if not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
        self._returned.append((block, event))

    def _piece(self, nbytes: int) -> Optional[Tuple[Any, int]]:
        if torch.cuda.is_current_stream_capturing():
            return None  # a graph replays on its own memory, which torch's allocator keeps for it
        # In steps of an eighth, so that the next dispatch, with a few rows more or less, finds a piece of its size.
        step = max(512, 1 << nbytes.bit_length() - 4)
        nbytes = (nbytes + step - 1) // step * step
        self._collect()
        same = self._free.get(nbytes)
        if same:
            block, event = same.pop()
            torch.cuda.current_stream(self._device).wait_event(event)
        else:
            fresh = self._alloc(nbytes)
            if fresh is None:
                return None
            block = fresh
        self._lent.add(block.address)
        return _Lease(self, block), block.address

    def _collect(self) -> None:
        while self._returned:
            block, event = self._returned.popleft()
            if event is None:
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(self._device))
            self._free.setdefault(block.nbytes, []).append((block, event))

    def _alloc(self, nbytes: int) -> Optional[epx.Block]:
        try:
            return self._group.alloc(nbytes)
        except epx.OutOfMemoryError:
            # There may be pieces of other sizes: they go back, once nothing uses them.
            for event in [event for pieces in self._free.values() for _block, event in pieces]:
                event.synchronize()
            self._free.clear()
        try:
            return self._group.alloc(nbytes)
        except epx.OutOfMemoryError:
            return None
