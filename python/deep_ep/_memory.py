# SPDX-License-Identifier: Apache-2.0
"""Tensors in a group's heap, where other ranks read and write them in place.

A tensor keeps its memory as long as the tensor or a view of it is referenced, even after the buffer is destroyed. On a
GPU, queued work may still use memory that was released: python/calls/heap.h says how it is given out again.
"""

import weakref
from typing import Any, Dict, Iterable, List, Optional, Tuple

import epx
import torch
from epx._extension import calls as load_calls

from ._resizable import patch_of

calls = load_calls()
_FEW = 256  # bytes by which what a group says of its heap may be too much: alignment

Part = Tuple[Tuple[int, ...], torch.dtype, Optional[Tuple[int, ...]]]  # shape, dtype, strides or None


class Form:
    """Tensors that are made together. All are dense, with any strides."""

    def __init__(self, *parts: Part) -> None:
        self.parts = parts
        self.native = tuple((dtype, tuple(shape), strides) for shape, dtype, strides in parts)

    def ordinary(self, device: torch.device) -> List[torch.Tensor]:
        """The tensors in ordinary memory."""
        return [torch.empty(shape, dtype=dtype, device=device) if strides is None else
                torch.empty_strided(shape, strides, dtype=dtype, device=device) for shape, dtype, strides in self.parts]


def wait_for(stream: Optional[int], device: torch.device) -> None:
    """Makes later work of the current stream wait for the work queued on another stream, given by its number."""
    if stream is not None:
        torch.cuda.current_stream(device).wait_stream(stream_of(stream, device))


def stream_of(number: int, device: torch.device) -> "torch.cuda.Stream":
    """The stream with a number. 0 and 1 are the default stream; the C library uses 1 for it."""
    return torch.cuda.ExternalStream(number, device) if number > 1 else torch.cuda.default_stream(device)


kept_sets: Dict[int, "weakref.ref[Any]"] = {}  # ResultSets, which use memory again, by addresses of their storages


def use_on(stream: "torch.cuda.Stream", tensors: Iterable[Optional[torch.Tensor]], given: bool = False) -> None:
    """Work that is queued on a stream uses tensors: their memory is given out again behind it. torch knows nothing of
    those in a heap, which may be that of another buffer: record_stream() has no effect on them. `given`: by a caller,
    who may have them of a call that keeps its results for the next one."""
    used = [tensor for tensor in tensors if tensor is not None]
    for tensor in used:
        tensor.record_stream(stream)
    if not used or torch.cuda.is_current_stream_capturing():  # nothing runs now, and nobody could wait for it
        return
    for tensor in used:
        calls.used_on(stream.cuda_stream, tensor.data_ptr())
    for tensor in used if given and kept_sets else ():
        found = kept_sets.get(tensor.untyped_storage().data_ptr())
        kept = found() if found is not None else None
        if kept is not None:
            kept.is_used_on(stream.cuda_stream)


class Streams:
    """The streams of a GPU, for its heaps."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._index = device, device.index or 0

    def current(self) -> Optional[int]:
        """The number of the current stream. None in a capture: a captured stream runs nothing now, and the work that
        uses a tensor is queued on the stream that has taken its memory."""
        return None if torch.cuda.is_current_stream_capturing() else torch._C._cuda_getCurrentRawStream(self._index)

    def wait(self, stream: int, other: int) -> None:
        """Later work of a stream waits for the work queued on another one."""
        stream_of(stream, self._device).wait_stream(stream_of(other, self._device))

    def settle(self) -> None:
        """The host waits for all work."""
        torch.cuda.synchronize(self._device)


def streams_of(device: torch.device) -> Optional[Streams]:
    """The streams of a device, or None for the CPU."""
    return None if device.type == "cpu" else Streams(device)


class Made:
    """Tensors of a form."""

    def __init__(self, tensors: List[torch.Tensor]) -> None:
        self._tensors = tensors

    def cut(self, rows: int) -> None:
        """Only the first rows of each tensor are used. These are no views, which autograd lets nobody change in place
        behind a function that returned them."""
        self._tensors = [tensor[:rows].data for tensor in self._tensors]

    def addresses(self) -> List[int]:
        """Of the tensors."""
        return [tensor.data_ptr() for tensor in self._tensors]

    def tensors(self) -> List[torch.Tensor]:
        """The tensors."""
        return self._tensors


class Heap:
    """Tensors in the heap of a group, all of whose memory it has."""

    def __init__(self, group: epx.Group, device: torch.device) -> None:
        self._group, self._device = group, device
        self.keepers: "weakref.WeakSet[Any]" = weakref.WeakSet()  # Results objects that keep tensors of this heap
        self.streams = streams_of(device)
        try:
            block = group.alloc(group.alloc_bytes)
        except epx.OutOfMemoryError:
            block = group.alloc(group.alloc_bytes - _FEW)
        self.native = calls.Heap(block, block.address, block.nbytes, -1 if device.type == "cpu" else device.index or 0,
                                 self.streams, patch_of(device))

    def _current(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self._device.index or 0) if self.streams is not None else 0

    def _take(self, form: Form, in_graph: bool) -> Optional[List[torch.Tensor]]:
        made = self.native.tensors(self._current(), in_graph, form.native)
        return None if any(tensor is None for tensor in made) else made

    def try_make(self, form: Form) -> Optional[List[torch.Tensor]]:
        """The tensors of a form, or None if there is no room. A graph needs memory of its own for replays, which
        torch's allocator keeps."""
        if self.streams is not None and torch.cuda.is_current_stream_capturing():
            return None
        made = self._take(form, False)
        if made is None and (self.keepers or self.streams is None):
            self._group.prune()
            for keeper in list(self.keepers):
                keeper.shed()
            made = self._take(form, False)
        return made

    def empty(self, shape: Tuple[int, ...], dtype: torch.dtype,
              strides: Optional[Tuple[int, ...]] = None) -> torch.Tensor:
        """A tensor in the heap, or in ordinary memory if the heap is full."""
        form = Form((shape, dtype, strides))
        return (self.try_make(form) or form.ordinary(self._device))[0]

    def export(self, nbytes: int) -> Optional[torch.Tensor]:
        """uint8 [nbytes] of memory that no tensor has, or None."""
        made = self.try_make(Form(((nbytes,), torch.uint8, None))) if nbytes else None
        return made[0] if made else None

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if the tensor is in the heap."""
        return self.native.holds(tensor.data_ptr())

    def prepare_graphs(self, form: Form) -> None:
        """Keeps memory for captured calls: eager calls may fill the rest. A CPU has none."""
        if self.streams is not None:
            self.native.prepare(*form.native)

    def try_capture(self, form: Form) -> Optional[List[torch.Tensor]]:
        """The tensors of a form for a call that is captured on the current stream, or None if there is no room."""
        return self._take(form, True) if self.streams is not None else None

    def revoke(self, address: int) -> None:
        """Gives the memory of a tensor out again behind the work of the current stream, although it is referred to."""
        self.native.revoke(address, self._current())

    def close(self) -> None:
        """The memory is freed with the last tensor."""
        self.native.close()
