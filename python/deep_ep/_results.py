# SPDX-License-Identifier: Apache-2.0
"""Results whose memory is used again.

To make a tensor on a GPU and to let it go takes more of the host's time than anything else in a low-latency call. So
its results are other names of tensors that are kept here, and the memory serves the next call as soon as nobody but the
kept tensors refers to it: no result, no view of one, no storage. As with torch's own allocator it then serves the
stream it served before without a wait; another stream is made to wait for that one.
"""

import collections
from typing import Callable, Deque, List, Optional, Tuple

import torch

from ._memory import wait_for

# How many tensors refer to a storage. Every torch for CUDA has it, others from 2.7 on; without it nothing is used
# again.
_use_count: Optional[Callable[[int], int]] = getattr(torch._C, "_storage_Use_Count", None)
_MOST = 4  # sets that are kept: as many as there may be operations ahead of their hooks


class ResultSet:
    """Tensors that are kept, and the stream that they served last, by its number."""

    def __init__(self, tensors: List[torch.Tensor], stream: Optional[int]) -> None:
        assert _use_count is not None
        self.stream = stream
        self._kept = tensors
        self._address = tensors[0].data_ptr()
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        self._own = [(storage, _use_count(storage)) for storage in storages]

    def idle(self) -> bool:
        """Does nobody else refer to the memory? Who resized a result has taken it away for good."""
        for storage, own in self._own:
            if _use_count(storage) != own:  # type: ignore[misc]
                return False
        return self._kept[0].data_ptr() == self._address

    def tensors(self) -> List[torch.Tensor]:
        """Other names for the next call: nothing that is done to a tensor object outlives it."""
        return [tensor.data for tensor in self._kept]

    def record_stream(self, stream: "torch.cuda.Stream") -> None:
        """As Tensor.record_stream()."""
        for tensor in self._kept:
            tensor.record_stream(stream)


class Results:
    """Sets of tensors of one kind. `make` makes those that are kept, or returns None where there is no memory for them,
    and `plain` others."""

    def __init__(self, make: Callable[[], Optional[List[torch.Tensor]]], plain: Callable[[], List[torch.Tensor]],
                 device: torch.device) -> None:
        self._make = make
        self._plain = plain
        self._device = device
        self._sets: Deque[ResultSet] = collections.deque()  # one that is being looked at is not in it

    def take(self, stream: Optional[int], capturing: bool) -> Tuple[List[torch.Tensor], Optional[ResultSet]]:
        """Tensors for a call on the current stream, which has this number, and the set that they belong to, if any. A
        graph that is captured keeps what it uses: it gets tensors of its own."""
        if capturing:
            return self._plain(), None
        sets = self._sets
        if sets:
            found = sets.popleft()
            if found.stream == stream and found.idle():
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
            one = sets.popleft()
            if one.idle():
                if one.stream == stream:
                    if other is not None:
                        sets.append(other)
                    return one
                if other is None:
                    other = one
                    continue
            sets.append(one)
        if other is not None:
            self._move(other, stream)
        return other

    def _move(self, one: ResultSet, stream: Optional[int]) -> None:
        """Lets a set serve another stream."""
        wait_for(one.stream, self._device)
        one.record_stream(torch.cuda.current_stream(self._device))
        one.stream = stream

    def shed(self, stream: Optional[int]) -> None:
        """Gives back what is not in use, for work of the current stream, which has this number."""
        for _ in range(len(self._sets)):
            one = self._sets.popleft()
            if not one.idle():
                self._sets.append(one)
            elif one.stream != stream:
                self._move(one, stream)
