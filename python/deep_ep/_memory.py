# SPDX-License-Identifier: Apache-2.0
"""Tensors in a group's heap, where other ranks read and write them in place.

A tensor keeps its memory as long as the tensor or a view of it is referenced, even after the buffer is destroyed. On a
GPU, queued work may still use memory that was released. Such memory is reused only by work that runs later: on the same
stream, or on a stream that waits for it.
"""

import bisect
import collections
import copy
import itertools
import math
import sys
import threading
import weakref
from typing import Any, Deque, Dict, FrozenSet, Iterable, List, Optional, Protocol, Set, Tuple, Union

import epx
import torch
from epx.dlpack import CPU, CUDA, Export, TorchKeeper
from torch.utils.dlpack import from_dlpack

from ._resizable import make_resizable

# DLPack's (code, bits) of each dtype.
_KINDS = {torch.bfloat16: (4, 16), torch.float16: (2, 16), torch.float32: (2, 32), torch.int32: (0, 32),
          torch.int64: (0, 64), torch.uint8: (1, 8), torch.float8_e4m3fn: (1, 8)}  # FP8 is passed as bytes

_LARGE = 4 << 20
_SMALL_SHARE = 64  # of a heap: pieces of at most so much lie at its end (group/alloc.c)

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
    addresses, number = [tensor.data_ptr() for tensor in used], stream.cuda_stream
    for ref in CudaHeap.living:
        heap = ref()
        if heap is not None:
            heap.use_on(number, addresses)
    for tensor in used if given and kept_sets else ():
        found = kept_sets.get(tensor.untyped_storage().data_ptr())
        kept = found() if found is not None else None
        if kept is not None:
            kept.is_used_on(number)


class Revocable(Protocol):
    """Memory that tensors of a heap refer to."""

    address: int
    nbytes: int

    def revoke(self) -> None:
        """Lets the heap give it out again, although tensors refer to it."""


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
        made = self.make_revocable(form)
        return None if made is None else made[0]

    def make_revocable(self, form: Form) -> Optional[Tuple[List[torch.Tensor], Revocable]]:
        """As try_make(), with what can revoke() the memory. It lives as long as a tensor refers to the memory."""
        block = self._alloc(form.nbytes) if form.nbytes else None
        if block is None:
            return None
        return form.tensors(form.exports(block.address, self._where), block), block

    def _try_alloc(self, nbytes: int) -> Optional[epx.Block]:
        try:
            return self._group.alloc(nbytes)
        except epx.OutOfMemoryError:
            return None

    def _alloc(self, nbytes: int) -> Optional[epx.Block]:
        block = self._try_alloc(nbytes)
        if block is None:
            self._group.prune()
            for keeper in list(self.keepers):
                keeper.shed()
            block = self._try_alloc(nbytes)
        return block

    def export(self, nbytes: int) -> Optional[torch.Tensor]:
        """uint8 [nbytes] of memory that no tensor has, or None."""
        made = self.try_make(Form(((nbytes,), torch.uint8, None)))
        return made[0] if made else None

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
    """A piece of the heap of a GPU, kept for reuse. `stream` is the number of the CUDA stream that has reserved the
    piece, or that was current when it was released. Queued work of that stream may still use the piece, and of those in
    `before`."""

    once = False  # True: scratch memory, which is not kept for reuse as a piece
    before: FrozenSet[int] = frozenset()

    def __init__(self, block: epx.Block, stream: int, in_graph: bool) -> None:
        self.block, self.address, self.nbytes = block, block.address, block.nbytes
        self.stream, self.in_graph = stream, in_graph
        self._form: Optional[Form] = None
        self._exports: List[Export] = []

    def streams(self) -> Set[int]:
        """The numbers of the streams whose queued work may still use the piece."""
        return {self.stream, *self.before}

    def exports(self, form: Form, device: Tuple[int, int]) -> List[Export]:
        """The exports of a form in this piece. They are reused while the form is the same."""
        if form is not self._form:
            self._form, self._exports = form, form.exports(self.address, device)
        return self._exports


class _Lease:
    """A piece in use. When the lease is no longer referenced, the piece is returned to the heap."""

    _used = False  # by work that was queued since
    _revoked = False

    def __init__(self, heap: "CudaHeap", piece: _Piece) -> None:
        self._heap, self.piece = heap, piece
        self.address, self.nbytes = piece.address, piece.nbytes

    def use_on(self, stream: int, device: torch.device) -> None:
        """The current stream, which has this number, may use the piece from now on."""
        piece = self.piece
        if piece.stream != stream or piece.before:
            for number in sorted(piece.streams() - {stream}):
                wait_for(number, device)
        piece.stream, piece.before, self._used = stream, frozenset(), True

    def revoke(self) -> None:
        """Returns the piece, although tensors refer to it. The current stream, which may have used them, is not
        captured."""
        if not self._revoked:
            self._revoked = True
            self._heap.take_back(self.piece, self._used)

    def __del__(self) -> None:
        if not self._revoked and not sys.is_finalizing():
            self._heap.take_back(self.piece, self._used)


class Reserved:
    """A reserved piece of the heap of a GPU. The tensors of its form can be created later."""

    def __init__(self, form: Form, lease: _Lease, where: Tuple[int, int]) -> None:
        self.form, self.address, self.lease = form, lease.address, lease
        self._where = where

    def cut(self, rows: int) -> None:
        """Only the first rows of each tensor are used."""
        self.form = self.form.cut(rows)

    def addresses(self) -> List[int]:
        """Of the tensors."""
        return [self.address + place for place in self.form.places]

    def tensors(self) -> List[torch.Tensor]:
        """The tensors. They keep the piece in use."""
        return self.form.tensors(self.lease.piece.exports(self.form, self._where), self.lease)


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


def _fit(holes: List[int], sizes: List[int], small: int) -> bool:
    """True if pieces of these sizes find room as in group/alloc.c: each in the first hole that is large enough, or in
    the last one, if it has no more than `small` bytes."""
    left = holes[:]
    for size in sizes:
        order = range(len(left)) if size > small else range(len(left) - 1, -1, -1)
        place = next((i for i in order if left[i] >= size), None)
        if place is None:
            return False
        left[place] -= size
    return True


class CudaHeap(Heap):
    """Tensors in the heap of a group on a GPU. Free pieces are kept for reuse. Work on the stream on which a piece was
    released runs after all work that used it. Any other stream waits for that stream first.

    Until close(), memory of a piece is freed only when the host has waited for the work that uses it: whatever
    interrupts a call, `_pieces` has the piece until then.
    """

    living: Tuple["weakref.ref[CudaHeap]", ...] = ()  # of the process. Replaced as a whole: other threads look at it
    _adding = threading.Lock()

    def __init__(self, group: epx.Group, device: torch.device) -> None:
        super().__init__(group, device)
        self._index = device.index or 0
        self._lock = threading.RLock()  # of what follows, but for _returned, because __del__ may run at any point
        self._returned: Deque[_Piece] = collections.deque()
        # All of them, by address. A lease in a reference cycle is finalized together with what only it refers to, as in
        # Pool.
        self._pieces: Dict[int, _Piece] = {}
        self._free: List[Tuple[int, int, int, _Piece]] = []  # bytes, stream, order of return, and the piece; sorted
        self._order = itertools.count()
        self._in_use = 0  # bytes of the pieces that are not free
        # Pieces of graphs, by size and capturing stream. A graph may be replayed at any time, so eager calls never use
        # them. Replays with operations of one group run one after the other, so graphs share them.
        self._of_graphs: Dict[Tuple[int, int], List[_Piece]] = {}
        self._spare: List[_Piece] = []  # for graphs, not used yet
        self._first = group.alloc_address
        self._small = group.alloc_bytes // _SMALL_SHARE
        self._too_large = sys.maxsize  # bytes that had no room since memory was freed
        self._behind: Set[int] = set()  # streams whose queued work may still use memory that was freed
        self._closed = False
        self._order_of_places: List[int] = []  # the addresses of the pieces, ascending, as of the last search in vain
        with CudaHeap._adding:
            CudaHeap.living = (*(ref for ref in CudaHeap.living if ref() is not None), weakref.ref(self))

    def use_on(self, stream: int, addresses: List[int]) -> None:
        """Work on the stream with this number uses what is at these addresses, in the heap or not. Somebody refers to
        it, so that its piece stays."""
        end = self._first + self._group.alloc_bytes
        for address in addresses:
            if self._first <= address < end:
                piece = self._piece_at(address)
                if piece is None:
                    self._order_of_places = sorted(self._pieces)
                    piece = self._piece_at(address)
                # Memory of graphs may be a part of the whole heap, which export() has given out: the rest knows.
                for one in [piece] if piece is not None and not piece.in_graph else self._exported():
                    if stream != one.stream:
                        one.before |= {stream}

    def _exported(self) -> List[_Piece]:
        return [piece for piece in tuple(self._pieces.values()) if piece.once]

    def _piece_at(self, address: int) -> Optional[_Piece]:
        places = self._order_of_places
        place = bisect.bisect_right(places, address) - 1
        piece = self._pieces.get(places[place]) if place >= 0 else None
        return piece if piece is not None and address < piece.address + piece.nbytes else None

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if the tensor is in the heap."""
        return tensor.untyped_storage().data_ptr() in self._pieces

    def close(self) -> None:
        """Frees the pieces that are kept for reuse. Pieces returned later are freed at once."""
        self._closed = True
        self._returned.clear()
        self._free.clear()
        self._of_graphs.clear()
        self._spare.clear()
        self._pieces.clear()  # those in use live as long as their leases

    def take_back(self, piece: _Piece, used: bool) -> None:
        """Returns a piece that is no longer referenced. Queued work of the current stream may still use it, if it was
        used at all, of the stream that reserved it, as the garbage collector runs wherever it happens to, and of those
        that use_on() was told of."""
        # A captured stream runs nothing now. The work that uses the piece is queued on the stream that reserved it.
        if used and not self._closed and not piece.in_graph and not torch.cuda.is_current_stream_capturing():
            current = torch._C._cuda_getCurrentRawStream(self._index)
            if current != piece.stream:
                piece.stream, piece.before = current, piece.before | {piece.stream}
        self._returned.append(piece)
        if self._closed:
            self.close()

    def _collect(self) -> None:
        while self._returned:
            try:
                piece = self._returned.popleft()
            except IndexError:  # another thread has it
                return
            if piece.in_graph and not piece.stream:
                self._spare.append(piece)
            elif piece.in_graph:
                self._of_graphs.setdefault((piece.nbytes, piece.stream), []).append(piece)
            else:
                self._in_use -= piece.nbytes
                if piece.once:
                    self._behind |= piece.streams()
                    self._too_large = sys.maxsize
                    self._pieces.pop(piece.address).block.revoke()  # as in _drop_free()
                else:
                    bisect.insort(self._free, (piece.nbytes, piece.stream, next(self._order), piece))

    def make_revocable(self, form: Form) -> Optional[Tuple[List[torch.Tensor], Revocable]]:
        """As in Heap."""
        reserved = self.reserve(form)
        return None if reserved is None else (reserved.tensors(), reserved.lease)

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
        with self._lock:
            leases = self._take(forms, stream) or (self._make_room(forms, stream) if evict else [])
            for lease in leases:
                lease.use_on(stream, self._device)
        return [Reserved(form, lease, self._where) for form, lease in zip(forms, leases)]

    def _take(self, forms: List[Form], stream: int) -> List[_Lease]:
        """Free pieces for the forms, or new ones; none if a form finds none."""
        self._collect()
        leases: List[_Lease] = []
        for form in forms:
            # One that is much too large is taken where the heap has no other, because it is there without a wait.
            piece = self._reuse(form.nbytes, max(form.piece_bytes, form.nbytes + form.nbytes // 8), stream) or \
                self._new(form.piece_bytes, stream) or self._new(form.tight_bytes, stream) or \
                self._reuse(form.nbytes, 2 * form.nbytes, stream)
            if piece is None:
                return []
            leases.append(_Lease(self, piece))
        return leases

    def _reuse(self, least: int, most: int, stream: int) -> Optional[_Piece]:
        """The smallest free piece of so many bytes, if possible of the same stream, and the last one of those."""
        free = self._free
        first = bisect.bisect_left(free, (least,))
        if first == len(free) or free[first][0] > most:
            return None
        last = bisect.bisect_left(free, (free[first][0], stream + 1)) - 1  # of this stream, or else of a lower number
        piece = free.pop(max(first, last))[-1]
        self._in_use += piece.nbytes
        return piece

    def _new(self, nbytes: int, stream: int, in_graph: bool = False) -> Optional[_Piece]:
        block = self._try_alloc(nbytes) if nbytes < self._too_large else None
        if block is None:
            self._too_large = min(nbytes, self._too_large)
            return None
        piece = self._pieces[block.address] = _Piece(block, stream, in_graph)
        if not in_graph:
            piece.before = frozenset(self._behind)
        self._in_use += nbytes
        return piece

    def _make_room(self, forms: List[Form], stream: int) -> List[_Lease]:
        """Pieces for the forms in place of free ones; none if they would find no room then."""
        if self.keepers:
            for keeper in list(self.keepers):
                keeper.shed()
            leases = self._take(forms, stream)
            if leases:
                return leases
        self._collect()  # what was taken for some of the forms
        sizes = self._room_for(forms)
        if not sizes:
            return []
        for number in sorted({number for entry in self._free for number in entry[-1].streams()}):
            stream_of(number, self._device).synchronize()
        self._drop_free()
        made = [self._new(size, stream) for size in sizes]
        leases = [_Lease(self, piece) for piece in reversed(made) if piece is not None]
        return leases if len(leases) == len(forms) else []

    def _room_for(self, forms: List[Form]) -> List[int]:
        """Bytes of pieces for the forms, in reverse order, that find room without the free pieces: with a little more,
        if it is there, for the next ones. Empty if there is no room: nobody waits for the work of free pieces in
        vain."""
        # Small ones first, so that large ones have what is behind them to themselves.
        sizes = [form.nbytes for form in reversed(forms)]
        if self._in_use + sum(sizes) > self._group.alloc_bytes:
            return []
        holes = self._holes()
        if not _fit(holes, sizes, self._small):
            return []
        for share in (32, 64, 128, 256):
            more = [nbytes + nbytes // share // 256 * 256 for nbytes in sizes]
            if _fit(holes, more, self._small):
                return more
        return sizes

    def _holes(self) -> List[int]:
        """The bytes of the holes that there would be without the free pieces, by address."""
        free = {entry[-1].address for entry in self._free}
        at = first = self._first
        holes = []
        for address in sorted(self._pieces.keys() - free):
            holes.append(address - at)
            at = address + self._pieces[address].nbytes
        return [*holes, first + self._group.alloc_bytes - at]

    def _drop_free(self) -> None:
        """Frees the memory of the free pieces, which no work uses any more."""
        free, self._free, self._too_large = self._free, [], sys.maxsize
        for entry in free:
            self._pieces.pop(entry[-1].address).block.revoke()  # a lease that was revoked may refer to it

    def export(self, nbytes: int) -> Optional[torch.Tensor]:
        """As Heap.export(). Where no tensor is in the heap, also what graphs have there: replays write it before they
        read it. Until the tensor is released, all others are made in torch's memory. Behind it there is room for pieces
        of any size, as captures find none in place of a free one."""
        form = Form(((nbytes,), torch.uint8, None))
        if not 0 < nbytes <= self._group.alloc_bytes or torch.cuda.is_current_stream_capturing():
            return None
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        with self._lock:
            self._collect()
            if self._exported():
                return None  # one at a time
            leases = self._take([form], stream) or self._make_room([form], stream)
            address = leases[0].piece.address if leases else self._first
            for lease in leases:
                lease.piece.once = True
            if not leases:
                leases = self._take_all(stream)
            for lease in leases:
                if not lease.piece.in_graph:
                    lease.use_on(stream, self._device)
        return form.tensors(form.exports(address, self._where), leases)[0] if leases else None

    def _take_all(self, stream: int) -> List[_Lease]:
        """The whole heap; nothing if a piece is in use."""
        self._collect()
        of_graphs = [*itertools.chain(*self._of_graphs.values()), *self._spare]
        if len(self._free) + len(of_graphs) < len(self._pieces):
            return []
        leases = []
        while self._free:
            piece = self._free.pop()[-1]
            self._in_use += piece.nbytes
            piece.once = True
            leases.append(_Lease(self, piece))
        self._of_graphs.clear()
        self._spare.clear()
        leases += [_Lease(self, piece) for piece in of_graphs]
        self._too_large = sys.maxsize
        # The largest first: then each gets a piece that fills it, although small ones go to the last hole with room.
        made = [self._new(hole, stream) for hole in sorted(self._holes(), reverse=True) if hole]
        for piece in made:
            if piece is not None:
                piece.once = True
                leases.append(_Lease(self, piece))
        return leases

    def prepare_graphs(self, form: Form) -> None:
        """Keeps a piece for graphs: eager calls may fill the rest, and nothing can be freed during a capture."""
        with self._lock:
            piece = self._new(form.nbytes, 0, in_graph=True)
            if piece is not None:
                self._spare.append(piece)

    def try_capture(self, form: Form) -> Optional[List[torch.Tensor]]:
        """The tensors of a form for a call that is captured on the current stream, or None if the heap is full."""
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        with self._lock:
            self._collect()
            same = self._of_graphs.get((form.nbytes, stream))
            piece = same.pop() if same else self._new_of_graphs(form.nbytes)
            if piece is None:
                return None
            piece.stream = stream
            lease = _Lease(self, piece)
        return form.tensors(piece.exports(form, self._where), lease)

    def _new_of_graphs(self, nbytes: int) -> Optional[_Piece]:
        for piece in self._spare:
            if piece.nbytes == nbytes:
                self._spare.remove(piece)
                return piece
        return self._new(nbytes, 0, in_graph=True)
