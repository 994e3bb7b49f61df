# SPDX-License-Identifier: Apache-2.0
"""Results whose memory is used again.

To make a tensor on a GPU and to let it go takes more of the host's time than anything else in a low-latency call. So its
results are other names of tensors that are kept here, and the memory serves the next call as soon as nobody but the kept
tensors refers to it: no result, no view of one, no storage. As with torch's own allocator it then serves the stream it
served before without a wait; another stream is made to wait for that one.
"""

import collections
from typing import Callable, Deque, List, Optional, Tuple

import torch

from ._memory import wait_for

# How many tensors refer to a storage. Every torch for CUDA has it, others from 2.7 on; without it nothing is used again.
_use_count: Optional[Callable[[int], int]] = getattr(torch._C, "_storage_Use_Count", None)
_MOST = 4  # sets that are kept: as many as there may be operations ahead of their hooks


class ResultSet:
    """Tensors that are kept, and where they lie. `stream` is the one that they served last, by its number."""

    def __init__(self, tensors: List[torch.Tensor], stream: Optional[int]) -> None:
        self.tensors = tensors
        self.stream = stream
        self.addresses = [tensor.data_ptr() for tensor in tensors]
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        assert _use_count is not None
        self.own = [(storage, _use_count(storage)) for storage in storages]

    def idle(self) -> bool:
        """Does nobody else refer to the memory?"""
        for storage, own in self.own:
            if _use_count(storage) != own:  # type: ignore[misc]
                return False
        return True


class Results:
    """Sets of tensors of one kind. `make` makes those that are kept, or returns None where there is no memory for them, and
    `plain` others."""

    def __init__(self, make: Callable[[], Optional[List[torch.Tensor]]], plain: Callable[[], List[torch.Tensor]],
                 device: torch.device) -> None:
        self._make = make
        self._plain = plain
        self._device = device
        self._sets: Deque[ResultSet] = collections.deque()  # one that is being looked at is not in it

    def take(self, stream: Optional[int], capturing: bool) -> Tuple[List[torch.Tensor], Optional[ResultSet]]:
        """Tensors for a call on the current stream, which has this number, and the set that they belong to, if any. A graph
        that is captured keeps what it uses: it gets tensors of its own."""
        if capturing:
            return self._plain(), None
        if _use_count is None:
            return self._make() or self._plain(), None
        sets = self._sets
        found = sets.popleft() if sets else None
        if found is not None:
            for storage, own in found.own:  # as in idle(), but most calls come here and go no further
                if _use_count(storage) != own or found.stream != stream:
                    sets.append(found)
                    found = self._find(stream)
                    break
        if found is None:
            with torch.inference_mode(False):
                tensors = self._make()
            if tensors is None:
                return self._plain(), None
            if len(sets) >= _MOST:
                return tensors, None
            found = ResultSet(tensors, stream)
        tensors = [tensor.data for tensor in found.tensors]
        sets.append(found)
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
        for tensor in one.tensors:
            tensor.record_stream(torch.cuda.current_stream(self._device))
        one.stream = stream

    def shed(self, stream: Optional[int]) -> None:
        """Gives back what is not in use, for work of the current stream, which has this number."""
        for _ in range(len(self._sets)):
            one = self._sets.popleft()
            if not one.idle():
                self._sets.append(one)
            elif one.stream != stream:
                self._move(one, stream)
