# SPDX-License-Identifier: Apache-2.0
"""All-gather sessions of ElasticBuffer: every rank's rows go to all ranks, and arrive in the order of ranks."""

import contextlib
import functools
import math
from typing import Any, Callable, List, Optional, Sequence, Tuple, Union

import epx
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ._checks import describe, refused, wrong
from ._checks import dtype as check_dtype
from ._elastic_engine import ElasticEngine
from ._elastic_move import MOST_FANOUT, Mover, all_ranks, current_stream
from ._elastic_sizes import Shapes, shape_list, up
from ._elastic_streams import comm_stream
from ._memory import Form, Heap, use_on

_LEAST_ROW, _MOST_ROW = 4096, 32768
_MOST_GATHERS = 32


@functools.lru_cache(maxsize=None)
def row_bytes(nbytes: int) -> int:
    """The rows that a tensor is cut into: one row, rounded up to 16, up to 32 KiB. Of a larger tensor a multiple of 16
    that divides it, of 4 to 32 KiB. If none does, it gets as few rows as there can be, with little behind the end."""
    if nbytes <= _MOST_ROW:
        return max(up(nbytes, 16), 16)
    few = up(-(-nbytes // -(-nbytes // _MOST_ROW)), 16)
    return next((row for row in range(_MOST_ROW, _LEAST_ROW - 1, -16) if nbytes % row == 0), few)


def heap_bytes(session_bytes: int) -> int:
    """Of two full sessions with tensors of the same sizes. Pieces of the heap are rounded up by an eighth at most, and
    rows by less than a hundredth; the rest is for small tensors."""
    return up(2 * (session_bytes + session_bytes // 7) + (8 << 20), 1 << 20)


class _Memory:
    """The memory of a gathered tensor, to be taken although tensors refer to it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.address, self.nbytes = tensor.data_ptr(), tensor.nbytes
        self._storage = StorageWeakRef(tensor.untyped_storage())

    def referred(self) -> bool:
        """True while a tensor refers to it."""
        return not self._storage.expired()


class _Place:
    """A gathered tensor in the heap: [R, bytes], each rank's part rounded up where no row size divides it."""

    flat: torch.Tensor
    memory: Optional[_Memory] = None

    def __init__(self, device: torch.device, ranks: int, shape: Tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype, self.ranks = shape, dtype, ranks
        self.nbytes = math.prod(shape) * dtype.itemsize
        self.row = row_bytes(self.nbytes)
        self.part = up(self.nbytes, self.row)
        self.form = Form(((ranks, self.part), torch.uint8, None))
        if not self.nbytes:
            self.flat = self.form.ordinary(device)[0]

    def take(self, heap: Heap) -> bool:
        """Takes memory of the heap, if it has room."""
        if self.nbytes:
            made = heap.try_make(self.form)
            if made is None:
                return False
            self.flat, self.memory = made[0], _Memory(made[0])
        return True

    def mine(self, rank: int) -> torch.Tensor:
        """This rank's part."""
        if not self.nbytes:
            return torch.empty(self.shape, dtype=self.dtype, device=self.flat.device)
        return self.flat[rank, :self.nbytes].view(self.dtype).view(self.shape)

    def gathered(self) -> torch.Tensor:
        """All parts, [R, ...]."""
        if not self.nbytes:
            return torch.empty(self.ranks, *self.shape, dtype=self.dtype, device=self.flat.device)
        return self.flat[:, :self.nbytes].view(self.dtype).view(self.ranks, *self.shape) if self.part == self.nbytes \
            else self.flat[:, :self.nbytes].contiguous().view(self.dtype).view(self.ranks, *self.shape)


class Gathers:
    """The configuration and the session of one buffer."""

    def __init__(self, engine: ElasticEngine, device: torch.device, session_bytes: int, gathers: int) -> None:
        ranks = engine.nranks
        rows = session_bytes // ranks // _LEAST_ROW + _MOST_GATHERS
        group = engine._group(
            device, modes=epx.Mode.HIGH_THROUGHPUT, num_experts=ranks, max_tokens_per_rank=rows,
            max_hidden_bytes=_MOST_ROW, max_topk=min(ranks, MOST_FANOUT), max_recv_tokens=1,
            alloc_bytes=heap_bytes(session_bytes), timeout_ms=engine.settings.timeout_ms)
        self._mover = Mover(group, device)
        self._heap = Heap(group, device)
        self._engine, self._device = engine, device
        self._limits = (session_bytes, gathers)
        self._session: Optional[object] = None
        self._used, self._count = 0, 0
        self._pending: List[_Place] = []
        # Of the session. The communication stream uses them when the caller has dropped them: the heap would give their
        # memory to the caller, who writes what is to be gathered next, on the current stream.
        self._made: List[_Place] = []
        self._given: List[torch.Tensor] = []  # likewise: record_stream() has no effect on a tensor in a heap
        self._captured: List[_Place] = []  # that graphs write to whenever they are replayed
        self._ended: List[_Memory] = []  # of sessions that have ended, the oldest first, not captured

    def begin(self) -> None:
        """Begins a session."""
        if self._session is not None:
            raise refused("create_agrs_session: expected no session, got one that has not ended")
        if self._made or self._given:  # of a session that ended in a capture
            self._let_go()
        self._session, self._used, self._count = object(), 0, 0

    def end(self) -> None:
        """Ends the session. Its memory is used again behind its all-gathers, which the current stream waits for."""
        self._need_session("destroy_agrs_session")
        self._session = None
        self._pending.clear()
        self._let_go()

    def _let_go(self) -> None:
        """Lets go of the memory of a session that has ended. Not in a capture, which cannot wait for all-gathers that
        were queued before it: the next session does."""
        if self._mover.capturing():
            return
        if self._device.type != "cpu":
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(comm_stream(self._device))
            # Which may be another one than that of the session, and than the one that their memory is used on next.
            use_on(current, [*(place.flat for place in self._made), *self._given], given=True)
        captured = {id(place) for place in self._captured}
        self._ended += [place.memory for place in self._made if place.memory is not None and id(place) not in captured]
        self._made.clear()
        self._given.clear()
        self._ended = [memory for memory in self._ended if memory.referred()]

    def _need_session(self, call: str) -> None:
        if self._session is None:
            raise refused("%s: expected a session (create_agrs_session)" % call)

    def _revoke(self, given: Sequence[torch.Tensor]) -> bool:
        """Takes the memory of the oldest tensor of a session that has ended, and that a caller still refers to. Not of
        those that are gathered in this session: these, and those of this call. False if there is none."""
        addresses = [t.data_ptr() for t in (*self._given, *given)]
        for place, memory in enumerate(self._ended):
            if memory.referred() and not any(0 <= at - memory.address < memory.nbytes for at in addresses):
                self._mover.settle()
                self._heap.revoke(memory.address)
                del self._ended[place]
                return True
        return False

    def _make(self, wanted: Sequence[Tuple[Tuple[int, ...], torch.dtype]],
              given: Sequence[torch.Tensor] = ()) -> List[_Place]:
        """Places of these shapes and dtypes, for the given tensors. What is refused leaves the session as it was."""
        if self._mover.capturing():
            raise refused("all_gather: a capture takes tensors of agrs_get_inplace_tensor only, made before it: what a "
                          "capture allocates is in the graph's memory, where other ranks cannot write")
        ranks = self._engine.nranks
        used = self._used + sum(up(ranks * math.prod(shape) * dtype.itemsize) for shape, dtype in wanted)
        if used > self._limits[0]:
            raise refused("all_gather: expected at most num_max_session_bytes = %d in a session, got %d" % (
                self._limits[0], used))
        places = [_Place(self._device, ranks, *one) for one in wanted]
        for place in places:
            while not place.take(self._heap):
                if not self._revoke(given):
                    raise refused("all_gather: expected room for %d bytes more; tensors that were captured, or "
                                  "that are gathered in this session, keep theirs" % (place.ranks * place.part))
        self._used = used
        self._made.extend(places)
        return places

    def inplace(self, shapes: Shapes, dtype: torch.dtype) -> Union[torch.Tensor, Tuple[torch.Tensor, ...]]:
        """This rank's places of the next all-gathers, which take them in this order, one or several at once."""
        self._need_session("agrs_get_inplace_tensor")
        given, one = shape_list(shapes)
        self._pending = self._make([(shape, check_dtype("dtype", dtype)) for shape in given])
        places = tuple(place.mine(self._engine.rank) for place in self._pending)
        return places[0] if one else places

    def _places(self, tensors: Sequence[torch.Tensor]) -> List[_Place]:
        count = len(tensors)
        places, self._pending = self._pending[:count], self._pending[count:]
        if not places:
            return self._make([(tuple(t.shape), t.dtype) for t in tensors], tensors)
        if [place.mine(self._engine.rank).data_ptr() for place in places] != [t.data_ptr() for t in tensors]:
            self._pending.clear()
            raise wrong("tensors", "those of agrs_get_inplace_tensor, in the same order", "others")
        return places

    def run(self, given: Any) -> Tuple[Any, ...]:
        """One all-gather, of one tensor or of several."""
        self._need_session("all_gather")
        tensors = list(given) if isinstance(given, (tuple, list)) else [given]
        for t in tensors:
            if not isinstance(t, torch.Tensor) or not t.is_contiguous() or t.device != self._device:
                raise wrong("t", "contiguous tensors on %s" % self._device, describe(t))
        if self._count == self._limits[1]:
            raise refused("all_gather: expected at most num_max_all_gathers_per_session = %d" % self._count)
        if self._mover.capturing():
            self._mover.need(key for place in self._pending[:len(tensors)] for key, _ranks in self._routings(place))
        places = self._places(tensors)
        self._count += 1
        self._mover.record_capture()
        if self._mover.capturing():
            self._captured.extend(places)
        self._given.extend(tensors)
        stream = self._begin(tensors)
        for t, place in zip(tensors, places):
            self._send(t, place, stream)
        return (*self._results(places, stream), self._handle(stream))

    def _begin(self, tensors: Sequence[torch.Tensor]) -> Any:
        if self._device.type == "cpu":
            return None
        stream = comm_stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        for t in tensors:
            t.record_stream(stream)
        return stream

    def _routings(self, place: _Place) -> List[Tuple[Tuple[int, int], List[int]]]:
        """The routings of a place by their keys, with the ranks that each sends to."""
        rows = place.part // place.row
        return [((rows, ranks[0]), ranks) for ranks in all_ranks(self._engine.nranks)] if rows else []

    def _send(self, t: torch.Tensor, place: _Place, stream: Any) -> None:
        mine = place.mine(self._engine.rank)
        if t.data_ptr() != mine.data_ptr():
            if stream is None:
                mine.copy_(t)
            else:
                with torch.cuda.stream(stream):
                    mine.copy_(t)
        rows = place.part // place.row
        if not rows:
            return
        source = place.flat[self._engine.rank].view(rows, place.row).view(torch.bfloat16)
        out = place.flat.view(-1, place.row).view(torch.bfloat16)
        for key, ranks in self._routings(place):
            def idx(ranks: List[int] = ranks) -> torch.Tensor:
                # Not of a list, whose copy to a GPU the host would wait for, and for what is queued before it.
                row = torch.arange(ranks[0], ranks[-1] + 1, dtype=torch.int32, device=self._device)
                return row.repeat(rows, 1)
            # The indices are allocated, written, read and freed in the order of one stream: nobody keeps them.
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                handle = self._mover.fixed(key, idx, stream)
            handle.dispatch(source, out if self._engine.rank in ranks else out[:0], stream=stream)

    def _results(self, places: List[_Place], stream: Any) -> List[torch.Tensor]:
        if stream is None:
            if any(place.part != place.nbytes for place in places):
                self._mover.settle()
            return [place.gathered() for place in places]
        with torch.cuda.stream(stream):
            results = [place.gathered() for place in places]
        for result in results:  # one that is no view of the heap may be freed while the current stream uses it
            result.record_stream(torch.cuda.current_stream(self._device))
        return results

    def _handle(self, stream: Any) -> Callable[[], None]:
        session, current = self._session, current_stream(self._device)

        def wait() -> None:
            if session is not self._session:
                raise refused("all_gather: expected its handle() within the same session")
            if current is None:
                self._mover.settle()
                return
            if torch.cuda.current_stream(self._device) != current:
                raise refused("all_gather: expected its handle() with the same current stream")
            current.wait_stream(stream)
        return wait

    @property
    def captured(self) -> bool:
        """True if an all-gather was captured into a graph."""
        return self._mover.captured

    def close(self, wait: bool) -> None:
        """Destroys the group. Local."""
        self._pending.clear()
        self._made.clear()
        self._given.clear()
        self._captured.clear()
        self._ended.clear()
        self._heap.close()
        self._mover.close(wait)
