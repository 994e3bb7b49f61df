# SPDX-License-Identifier: Apache-2.0
"""Tensors in a group's heap, where other ranks read and write them in place.

A tensor keeps its memory as long as the tensor or a view of it is referenced, even after the buffer is destroyed. On a
GPU, queued work may still use memory that was released. Such memory is reused only by work that runs later: on the same
stream, or on a stream that waits for it.
"""

import collections
import copy
import math
import sys
import weakref
from typing import Any, Deque, Dict, List, Optional, Tuple, Union

import epx
import torch
from epx.dlpack import CPU, CUDA, Export, TorchKeeper
from torch.utils.dlpack import from_dlpack

from ._resizable import make_resizable

# DLPack's (code, bits) of each dtype.
_KINDS = {torch.bfloat16: (4, 16), torch.float16: (2, 16), torch.float32: (2, 32), torch.int32: (0, 32),
          torch.int64: (0, 64), torch.uint8: (1, 8), torch.float8_e4m3fn: (1, 8)}  # FP8 is passed as bytes

_LARGE = 4 << 20

Part = Tuple[Tuple[int, ...], torch.dtype, Optional[Tuple[int, ...]]]  # shape, dtype, strides or None


class Form:
    """The layout of tensors that share a piece of memory, each at its own offset. All are dense, with any strides."""

    def __init__(self, *parts: Part) -> None:
        self.parts = parts
        self.places: List[int] = []
        nbytes = 0
        for shape, dtype, _strides in parts:
            self.places.append(nbytes)
            nbytes += (math.prod(shape) * dtype.itemsize + 255) // 256 * 256
        self.nbytes = nbytes
        # Rounded up in steps of about an eighth, so that a dispatch with slightly more or fewer rows reuses the piece;
        # of a large piece also in steps of a thirty-second, for heaps that have no room for the other.
        self.piece_bytes = self._rounded(4)
        self.tight_bytes = self._rounded(6) if nbytes >= _LARGE else self.piece_bytes

    def _rounded(self, bits: int) -> int:
        step = max(512, 1 << max(self.nbytes.bit_length() - bits, 0))
        return (self.nbytes + step - 1) // step * step

    def cut(self, rows: int) -> "Form":
        """The same places with tensors of fewer rows."""
        less = copy.copy(self)
        less.parts = tuple(((rows, *shape[1:]), dtype, strides) for shape, dtype, strides in self.parts)
        return less

    def exports(self, address: int, device: Tuple[int, int]) -> List[Export]:
        """The DLPack exports of the tensors in a piece at an address."""
        return [Export(address + place, shape, device, _KINDS[dtype], strides)
                for (shape, dtype, strides), place in zip(self.parts, self.places)]

    def tensors(self, exports: List[Export], owner: Any) -> List[torch.Tensor]:
        """The tensors. Each keeps `owner` alive."""
        keeper = TorchKeeper(owner)
        tensors = []
        for export, (_shape, dtype, _strides) in zip(exports, self.parts):
            tensor = from_dlpack(keeper.capsule(export))
            make_resizable(tensor)
            tensors.append(tensor if tensor.dtype is dtype else tensor.view(dtype))
        return tensors

    def ordinary(self, device: torch.device) -> List[torch.Tensor]:
        """The same tensors in ordinary memory."""
        return [torch.empty(shape, dtype=dtype, device=device) if strides is None else
                torch.empty_strided(shape, strides, dtype=dtype, device=device) for shape, dtype, strides in self.parts]


def wait_for(stream: Optional[int], device: torch.device) -> None:
    """Makes later work of the current stream wait for the work queued on another stream, given by its number."""
    if stream is not None:
        torch.cuda.current_stream(device).wait_stream(stream_of(stream, device))


def stream_of(number: int, device: torch.device) -> "torch.cuda.Stream":
    """The stream with a number. 0 and 1 are the default stream; the C library uses 1 for it."""
    return torch.cuda.ExternalStream(number, device) if number > 1 else torch.cuda.default_stream(device)


class Heap:
    """Tensors in the heap of a group on the CPU."""

    def __init__(self, group: epx.Group, device: torch.device) -> None:
        self._group = group
        self._device = device
        self.keepers: "weakref.WeakSet[Any]" = weakref.WeakSet()  # Results objects that keep tensors of this heap
        self._where = {"cpu": (CPU, 0), "cuda": (CUDA, device.index or 0)}[device.type]

    def empty(self, shape: Tuple[int, ...], dtype: torch.dtype,
              strides: Optional[Tuple[int, ...]] = None) -> torch.Tensor:
        """A tensor in the heap, or in ordinary memory if the heap is full."""
        return self.several((shape, dtype, strides))[0]

    def several(self, *parts: Part) -> List[torch.Tensor]:
        """Tensors that share a piece of the heap. The piece is free again when all of them are released."""
        form = Form(*parts)
        return self.try_make(form) or form.ordinary(self._device)

    def try_make(self, form: Form) -> Optional[List[torch.Tensor]]:
        """The tensors of a form, or None if the heap is full."""
        block = self._alloc(form.nbytes) if form.nbytes else None
        if block is None:
            return None
        return form.tensors(form.exports(block.address, self._where), block)

    def _try_alloc(self, nbytes: int) -> Optional[epx.Block]:
        try:
            return self._group.alloc(nbytes)
        except epx.OutOfMemoryError:
            return None

    def _alloc(self, nbytes: int) -> Optional[epx.Block]:
        block = self._try_alloc(nbytes)
        if block is None:
            for keeper in list(self.keepers):
                keeper.shed(None)
            block = self._try_alloc(nbytes)
        return block

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if the tensor is known to be in the heap. Not tracked on the CPU, where no caller needs it."""
        return False

    def prepare_graphs(self, form: Form) -> None:
        """Keeps memory for captured calls, of which a CPU has none."""

    def try_capture(self, form: Form) -> Optional[List[torch.Tensor]]:
        """The tensors of a form for a captured call, of which a CPU has none."""
        return None

    def close(self) -> None:
        """Frees the pieces that are kept for reuse."""


class _Piece:
    """A piece of the heap of a GPU, kept for reuse. `stream` is the number of the CUDA stream
    that was current when the piece was released. Queued work of that stream may still use the piece."""

    def __init__(self, block: epx.Block, in_graph: bool = False) -> None:
        self.block, self.nbytes = block, block.nbytes
        self.in_graph = in_graph
        self.stream = 0
        self._form: Optional[Form] = None
        self._exports: List[Export] = []

    def exports(self, form: Form, device: Tuple[int, int]) -> List[Export]:
        """The exports of a form in this piece. They are reused while the form is the same."""
        if form is not self._form:
            self._form, self._exports = form, form.exports(self.block.address, device)
        return self._exports


class _Lease:
    """A piece in use. When the lease is no longer referenced, the piece is returned to the heap."""

    def __init__(self, heap: "CudaHeap", piece: _Piece) -> None:
        self._heap = heap
        self._piece = piece

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._heap.take_back(self._piece)


class Reserved:
    """A reserved piece of the heap of a GPU. The tensors of its form can be created later."""

    def __init__(self, form: Form, piece: _Piece, lease: _Lease, where: Tuple[int, int]) -> None:
        self.form, self.address = form, piece.block.address
        self._piece, self._lease, self._where = piece, lease, where

    def cut(self, rows: int) -> None:
        """Only the first rows of each tensor are used."""
        self.form = self.form.cut(rows)

    def addresses(self) -> List[int]:
        """Of the tensors."""
        return [self.address + place for place in self.form.places]

    def tensors(self) -> List[torch.Tensor]:
        """The tensors. They keep the piece in use."""
        return self.form.tensors(self._piece.exports(self.form, self._where), self._lease)


class Ordinary:
    """Tensors in torch's own memory, in place of a Reserved."""

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


Made = Union[Reserved, Ordinary]


def _fit(holes: List[int], sizes: List[int]) -> bool:
    """True if pieces of these sizes find room, each in the first hole that is large enough."""
    left = holes[:]
    for size in sizes:
        place = next((i for i, hole in enumerate(left) if hole >= size), None)
        if place is None:
            return False
        left[place] -= size
    return True


class CudaHeap(Heap):
    """Tensors in the heap of a group on a GPU. Free pieces are kept for reuse. Work on the stream on which a piece was
    released runs after all work that used it. Any other stream waits for that stream first."""

    def __init__(self, group: epx.Group, device: torch.device) -> None:
        super().__init__(group, device)
        self._index = device.index or 0
        self._returned: Deque[_Piece] = collections.deque()  # without a lock, because __del__ may run at any point
        self._free: List[_Piece] = []
        # Pieces of graphs, by size and capturing stream. A graph may be replayed at any time, so eager calls never use
        # them. Replays with operations of one group run one after the other, so graphs share them.
        self._of_graphs: Dict[Tuple[int, int], List[_Piece]] = {}
        self._spare: List[_Piece] = []  # for graphs, not used yet
        # By address. A lease in a reference cycle is finalized together with what only it refers to, as in Pool.
        self._handed_out: Dict[int, _Piece] = {}
        self._first: Optional[int] = None  # the address where the heap begins: that of its first piece
        self._too_large = sys.maxsize  # bytes that had no room since the last piece was freed
        self._closed = False

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if the tensor is in the heap."""
        return tensor.untyped_storage().data_ptr() in self._handed_out

    def close(self) -> None:
        """Frees the pieces that are kept for reuse. Pieces returned later are freed at once."""
        self._closed = True
        self._returned.clear()
        self._free.clear()
        self._of_graphs.clear()
        self._spare.clear()

    def take_back(self, piece: _Piece) -> None:
        """Returns a piece that is no longer referenced. Queued work of the current stream may still use it."""
        self._handed_out.pop(piece.block.address, None)
        if not self._closed:
            # A captured stream runs nothing now. The work that uses the piece is queued on the stream that reserved it.
            if not piece.in_graph and not torch.cuda.is_current_stream_capturing():
                piece.stream = torch._C._cuda_getCurrentRawStream(self._index)
            self._returned.append(piece)

    def try_make(self, form: Form) -> Optional[List[torch.Tensor]]:
        """The tensors of a form, or None if the heap is full."""
        reserved = self.reserve(form)
        return None if reserved is None else reserved.tensors()

    def reserve(self, form: Form) -> Optional[Reserved]:
        """Reserves memory for the tensors of a form. Returns None if the heap is full."""
        made = self.reserve_all([form])
        return made[0] if made else None

    def reserve_all(self, forms: List[Form], evict: bool = True) -> List[Reserved]:
        """Reserves memory for the tensors of several forms, the largest first. Returns nothing if the heap is full.
        `evict`: free pieces that are too small make room, after a wait for the work that uses them, if all of the forms
        find room then."""
        # A graph needs its own memory for replays. torch's allocator keeps that memory.
        if torch.cuda.is_current_stream_capturing() or not all(form.nbytes for form in forms):
            return []
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        if self._returned:
            self._collect()
        pieces = self._take(forms, stream) or (self._make_room(forms, stream) if evict else None)
        for piece in pieces or ():
            if piece.stream != stream:
                wait_for(piece.stream, self._device)
            piece.stream = stream
            self._handed_out[piece.block.address] = piece
        return [Reserved(form, piece, _Lease(self, piece), self._where) for form, piece in zip(forms, pieces or ())]

    def _take(self, forms: List[Form], stream: int) -> Optional[List[_Piece]]:
        """Free pieces for the forms, or new ones."""
        pieces: List[_Piece] = []
        for form in forms:
            # One that is much too large is taken where the heap has no other, because it is there without a wait.
            piece = self._reuse(form.nbytes, max(form.piece_bytes, form.nbytes + form.nbytes // 8), stream) or \
                self._new(form.piece_bytes, stream) or self._new(form.tight_bytes, stream) or \
                self._reuse(form.nbytes, 2 * form.nbytes, stream)
            if piece is None:
                self._free += pieces
                return None
            pieces.append(piece)
        return pieces

    def _reuse(self, least: int, most: int, stream: int) -> Optional[_Piece]:
        """The smallest free piece of so many bytes, if possible of the same stream, and the last one of those."""
        best: Optional[_Piece] = None
        for piece in reversed(self._free):
            nbytes = piece.nbytes
            if least <= nbytes <= most and (best is None or nbytes < best.nbytes or (
                    nbytes == best.nbytes and best.stream != stream == piece.stream)):
                best = piece
        if best is not None:
            try:
                self._free.remove(best)
            except ValueError:  # another thread has it
                best = None
        return best

    def _new(self, nbytes: int, stream: int, in_graph: bool = False) -> Optional[_Piece]:
        block = self._try_alloc(nbytes) if nbytes < self._too_large else None
        if block is None:
            self._too_large = min(nbytes, self._too_large)
            return None
        self._first = block.address if self._first is None else min(self._first, block.address)
        piece = _Piece(block, in_graph)
        piece.stream = stream
        return piece

    def _make_room(self, forms: List[Form], stream: int) -> Optional[List[_Piece]]:
        """Pieces for the forms in place of free ones, with a little more room, if it is there, for the next ones."""
        if self.keepers:
            for keeper in list(self.keepers):
                keeper.shed(stream or 1)
            self._collect()
            pieces = self._take(forms, stream)
            if pieces:
                return pieces
        holes = self._holes()
        for share in (32, 64, 128, 256, 0):
            # Small ones first, so that large ones have what is behind them to themselves.
            sizes = [form.nbytes + (form.nbytes // share // 256 * 256 if share else 0) for form in reversed(forms)]
            if _fit(holes, sizes):
                break
        else:
            return None
        free, self._free = self._free, []
        try:
            for number in {piece.stream for piece in free}:
                stream_of(number, self._device).synchronize()
        except BaseException:  # as Ctrl-C: work may still use them
            self._free += free
            raise
        free.clear()
        self._too_large = sys.maxsize
        made = [self._new(size, stream) for size in sizes]
        pieces = [piece for piece in made if piece is not None]
        if len(pieces) < len(made):  # another thread has it
            self._free += pieces
            return None
        return pieces[::-1]

    def _holes(self) -> List[int]:
        """The bytes of the holes that there would be without the free pieces, by address. All pieces of the heap are
        known here: nobody waits for the work of free pieces in vain."""
        used = [*self._handed_out.values(), *self._spare, *(
            piece for pieces in self._of_graphs.values() for piece in pieces)]
        at = first = self._first or 0
        holes = []
        for address, nbytes in sorted((piece.block.address, piece.nbytes) for piece in used):
            holes.append(address - at)
            at = address + nbytes
        return [*holes, first + self._group.alloc_bytes - at]

    def prepare_graphs(self, form: Form) -> None:
        """Keeps a piece for graphs: eager calls may fill the rest, and nothing can be freed during a capture."""
        piece = self._new(form.nbytes, 0, in_graph=True)
        if piece is not None:
            self._spare.append(piece)

    def try_capture(self, form: Form) -> Optional[List[torch.Tensor]]:
        """The tensors of a form for a call that is captured on the current stream, or None if the heap is full."""
        if self._returned:
            self._collect()
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        same = self._of_graphs.get((form.nbytes, stream))
        piece = same.pop() if same else self._new_of_graphs(form.nbytes)
        if piece is None:
            return None
        piece.stream = stream
        self._handed_out[piece.block.address] = piece
        return form.tensors(piece.exports(form, self._where), _Lease(self, piece))

    def _new_of_graphs(self, nbytes: int) -> Optional[_Piece]:
        for piece in self._spare:
            if piece.nbytes == nbytes:
                self._spare.remove(piece)
                return piece
        return self._new(nbytes, 0, in_graph=True)

    def _collect(self) -> None:
        while self._returned:
            try:
                piece = self._returned.popleft()
            except IndexError:  # another thread has it
                return
            if piece.in_graph:
                self._of_graphs.setdefault((piece.nbytes, piece.stream), []).append(piece)
            else:
                self._free.append(piece)
