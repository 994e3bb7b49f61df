# SPDX-License-Identifier: Apache-2.0
"""Result tensors whose memory is reused.

Creating and releasing GPU tensors takes more host time than anything else in a low-latency call. So the tensors are
kept here, and a call returns aliases of them. The memory is reused when only the kept tensors refer to it: no result,
no view of a result, no storage. As with torch's own allocator, a call on the same stream reuses it without a wait. A
call on another stream makes that stream wait for the earlier one.
"""

import collections
import contextlib
import ctypes
import sys
import weakref
from typing import Callable, Deque, FrozenSet, List, Optional, Sequence, Tuple

import torch

from ._memory import kept_sets, use_on, wait_for
from ._streams import DEFAULT_STREAM


def _read_count(storage: int) -> int:
    """The number of references to a storage, from its memory: the word behind the address of its functions."""
    return ctypes.c_uint32.from_address(storage + ctypes.sizeof(ctypes.c_void_p)).value


def _counts_references(count: Callable[[int], int]) -> bool:
    """True if the function follows aliases, views and storages of a tensor as they come and go."""
    tensor = torch.empty(2, device="cpu")
    storage = tensor.untyped_storage()._cdata
    held: List[object] = []
    seen = [count(storage)]
    for make in (lambda: tensor.data, lambda: tensor[1:], tensor.untyped_storage):
        held.append(make())
        seen.append(count(storage))
    held.clear()
    seen.append(count(storage))
    return seen == [1, 2, 3, 4, 1]


# The number of tensors that refer to a storage. Every torch for CUDA has this function, other builds from 2.7 on. An
# older torch is read in its place if a trial shows that the word counts; otherwise no memory is reused.
_use_count: Optional[Callable[[int], int]] = getattr(torch._C, "_storage_Use_Count", None)
if _use_count is None and _counts_references(_read_count):
    _use_count = _read_count
_MOST = 4  # kept sets: of outstanding operations, and of results that wait for their combine


class ResultSet:
    """Kept tensors, and the number of the stream that used them last. Those in `before` may still use them, too."""

    before: FrozenSet[int] = frozenset()
    _places: Sequence[int] = ()  # in kept_sets

    def __init__(self, tensors: List[torch.Tensor], stream: Optional[int]) -> None:
        assert _use_count is not None
        self.stream = stream
        self._kept = tensors
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        self._own = [(storage, _use_count(storage)) for storage in storages]
        self._self = weakref.ref(self)
        self._places = [tensor.untyped_storage().data_ptr() for tensor in tensors]
        kept_sets.update((place, self._self) for place in self._places if place)

    def __del__(self) -> None:
        """Whatever drops a set, also Ctrl-C in the middle of a call."""
        if not sys.is_finalizing():
            self.let_go()

    def let_go(self) -> None:
        """Drops the tensors. Their memory is used again behind the work of the current stream, which waits. A plan may
        still compare this set with that of its next call."""
        if self.stream is not None:
            with contextlib.suppress(RuntimeError):  # of a GPU that runs nothing any more
                device = self._kept[0].device
                current = torch._C._cuda_getCurrentRawStream(device.index or 0) or DEFAULT_STREAM
                if not torch.cuda.is_current_stream_capturing():
                    self.move(current, device)
        self.stream = None  # not before: behind Ctrl-C, __del__() waits
        for place in self._places:
            if kept_sets.get(place) is self._self:
                kept_sets.pop(place, None)
        self._kept = []

    def is_used_on(self, stream: int) -> None:
        """Work on the stream with this number uses one of the tensors. Somebody refers to it, so that none is idle."""
        number = stream or DEFAULT_STREAM
        if number != self.stream:
            self.before |= {number}

    def move(self, stream: Optional[int], device: torch.device) -> None:
        """Moves the set to a stream, which is the current one, and which waits for the others."""
        before, last = self.before, self.stream
        for number in sorted(before - {stream}):
            wait_for(number, device)
        if last != stream:
            wait_for(last, device)
            self.use_on(torch.cuda.current_stream(device))
        self.stream, self.before = stream, frozenset()

    def idle(self) -> bool:
        """True if nothing else refers to the memory. A set with a resized result is never idle again."""
        for storage, own in self._own:
            if _use_count(storage) != own:  # type: ignore[misc]
                return False
        return not self.resized()

    def resized(self) -> bool:
        """True if the storage of a result was resized: its memory is another, or gone."""
        for tensor, address in zip(self._kept, self._addresses):
            if tensor.data_ptr() != address:
                return True
        return False

    def tensors(self) -> List[torch.Tensor]:
        """New aliases for the next call, so that changes to a tensor object do not carry over to the next result."""
        return [tensor.data for tensor in self._kept]

    def use_on(self, stream: "torch.cuda.Stream") -> None:
        """Work on the stream uses the tensors."""
        use_on(stream, self._kept)


class Results:
    """Sets of tensors of one kind. `make` creates tensors to keep, or returns None if there is no memory for them.
    `plain` creates tensors that are not kept."""

    def __init__(self, make: Callable[[], Optional[List[torch.Tensor]]], plain: Callable[[], List[torch.Tensor]],
                 device: torch.device) -> None:
        self._make = make
        self._plain = plain
        self._device = device
        self._sets: Deque[ResultSet] = collections.deque()  # a set under inspection is not in it

    def take(self, stream: Optional[int], capturing: bool) -> Tuple[List[torch.Tensor], Optional[ResultSet]]:
        """Tensors for a call on the current stream, whose number is `stream`, and their set or None. During a capture
        the tensors are not shared, because the graph keeps them."""
        if capturing:
            return self._plain(), None
        sets = self._sets
        if sets:
            found = sets.popleft()
            # `before` last: another thread may drop the last reference behind an asynchronous call meanwhile.
            if found.stream == stream and found.idle() and not found.before:
                tensors = found.tensors()
                sets.append(found)
                return tensors, found
            sets.append(found)
        return self._take_another(stream)

    def _take_another(self, stream: Optional[int]) -> Tuple[List[torch.Tensor], Optional[ResultSet]]:
        found = self._find(stream)
        if found is None:
            with torch.inference_mode(False):
                made = self._make()
            if made is None:
                return self._plain(), None
            if _use_count is None or len(self._sets) >= _MOST:
                return made, None
            found = ResultSet(made, stream)
        tensors = found.tensors()
        self._sets.append(found)
        return tensors, found

    def _find(self, stream: Optional[int]) -> Optional[ResultSet]:
        sets = self._sets
        other = None
        for _ in range(len(sets)):
            try:
                one = sets.popleft()
            except IndexError:  # another thread has it
                break
            if one.idle():
                if one.stream == stream and not one.before:
                    if other is not None:
                        sets.append(other)
                    return one
                if other is None:
                    other = one
                    continue
            elif one.resized():
                continue
            sets.append(one)
        if other is not None:
            other.move(stream, self._device)
        return other

    def shed(self) -> None:
        """Frees the idle sets for reuse by work of the current stream."""
        for _ in range(len(self._sets)):
            try:
                one = self._sets.popleft()
            except IndexError:  # another thread has it
                return
            if one.idle():
                one.let_go()
            else:
                self._sets.append(one)
