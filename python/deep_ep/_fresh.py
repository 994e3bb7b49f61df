# SPDX-License-Identifier: Apache-2.0
"""How many rows the next dispatch brings: V2 queues it right behind the exchange of counts, into memory for a few more
rows than the last ones had. If a rank gets more rows than it expected, that dispatch does nothing on any rank."""

import sys
from typing import Callable, Optional, Tuple, TypeVar

import torch

_ALL = 8  # one of so many guesses tries all numbers of rows to spare
_SPARE = (32, 64, 128, 512)  # rows to spare: one of so many. The less memory there is, the fewer; at last, none
_AT_LEAST = 4  # rows by which a guess comes down
_FEW = 128  # rows that torch's memory may have for nothing, beside a quarter of those in it

_Memory = TypeVar("_Memory")


class RowGuess:
    """Rows that the next dispatch of a kind will hardly exceed, by those before it."""

    def __init__(self) -> None:
        self._most, self._least = 0, sys.maxsize
        self._guesses = 0
        self._level = 0  # of _SPARE, which the last guesses had; its length: no rows to spare

    def rows(self, limit: int, level: int = 0) -> int:
        """0 if there was none yet. `limit`: more than so many there cannot be."""
        spare = self._most // _SPARE[level] + 127 if level < len(_SPARE) else 0
        return min((self._most + spare) // 64 * 64 if spare else self._most, limit) if self._most else 0

    def learn(self, rows: int) -> None:
        """Takes note of the rows of a dispatch. What was once more, or fewer, is forgotten slowly."""
        self._most = max(rows, self._most - max((self._most - rows) // 16, _AT_LEAST))
        self._least = min(rows, self._least + max((rows - self._least) // 16, _AT_LEAST))

    def reserve(self, limit: int, reserve: Callable[[int], Optional[_Memory]],
                ordinary: Callable[[int], Optional[_Memory]]) -> Optional[Tuple[int, _Memory]]:
        """(rows, memory for them), with as many rows to spare as there is memory for in the heap; `ordinary` memory if
        it is full and numbers of rows are much alike: results that are held keep all of it."""
        if not self._most:
            return None
        last = len(_SPARE)
        thorough = self._guesses % _ALL == 0
        self._guesses += 1
        tried = 0
        for level in range(last + 1) if thorough else (self._level, last):
            rows = self.rows(limit, level)
            if rows == tried:
                continue
            tried, memory = rows, reserve(rows)
            if memory is not None:
                self._level = level if thorough else min(self._level + 1, level)
                return rows, memory
        if self._most > self._least + self._least // 4 + _FEW:
            return None
        rows = self.rows(limit)
        try:
            memory = ordinary(rows)
        except torch.cuda.OutOfMemoryError:  # there may be room for the rows that come
            return None
        return None if memory is None else (rows, memory)
