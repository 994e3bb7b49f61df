# SPDX-License-Identifier: Apache-2.0
"""All-gathers of several threads over one process group.

torch pairs the collectives of a process group by their order, and threads have none in common on all ranks: two threads
that create groups at the same time would read each other's bytes. So an exchange is a round of the whole process. Each
rank sends the parts that its threads have given since, each with the number of its bootstrap, and keeps what comes for
threads that are not here yet:

    rank 0, threads a and b      rank 1, threads a and b
    a: round 1, sends a    <-->  b: round 1, sends b
    a: round 2, sends b    <-->  b: round 2, sends a      both threads of both ranks have all their parts

All ranks run the same rounds and see the same parts, so an all-gather is complete on all ranks after the same round. A
rank whose all-gathers are complete runs no more rounds until its next one: the others wait for it in torch. One thread
alone needs one round per all-gather.

A part also says where its bootstrap is: which attempt, and which step of it. All-gathers are the steps; a rank that has
left one before its end (Ctrl-C, say) begins another attempt. When its next part comes, the ranks behind it are told
that they wait in vain, and begin that attempt as well:

    rank 0                                          rank 1
    attempt 0, step 5: interrupted in its wait
    attempt 1, step 0: sends a part       <-->      attempt 0, step 5: sends a part, raises PeerError
    attempt 1, step 0: waits                        attempt 1, step 0: starts over

A rank that is behind in the same attempt has lost parts of a round that failed there, and begins another one itself.
"""

import collections
import threading
import time
from typing import Any, Callable, DefaultDict, Dict, Iterable, List, NamedTuple, Optional, Tuple

from ._interrupts import Interrupts
from .errors import MismatchError, PeerError, Status, make_error

_WHAT = "epx"
_LONGEST_SLEEP_S = 0.02
_MOST_IDLE_ROUNDS = 5000  # 100 s

_At = Tuple[int, int]  # attempt and step


class LeftError(PeerError):
    """Another rank has left the all-gather that this rank was in, and is in another one."""


class Place:
    """Of a bootstrap in the rounds."""

    number = 0  # given at first use
    at: _At = (0, 0)  # of its next all-gather

    def leave(self) -> None:
        """Begins another attempt: this rank does not take part in the rest of what the others wait for."""
        self.at = (self.at[0] + 1, 0)


class _End(NamedTuple):
    """How an all-gather of this rank has ended."""

    outcome: Any  # the parts of all ranks, or an exception
    following: _At  # of the next one


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


class _Parts:
    """Of one bootstrap: the last part of each rank until all are there, then the end of this rank's all-gather. A rank
    that sends another part before has left the all-gather of the last one."""

    def __init__(self, rank: int, nranks: int) -> None:
        self._rank, self._nranks = rank, nranks
        self._of_rank: Dict[int, Tuple[_At, bytes]] = {}
        self._end: Optional[_End] = None

    def add(self, rank: int, part: Tuple[_At, bytes]) -> None:
        """A part that came."""
        self._of_rank[rank] = part

    def take_end(self) -> Optional[_End]:
        """The end of this rank's all-gather, once."""
        end, self._end = self._end, None
        return end

    def complete(self) -> None:
        """Ends what is complete, or waits in vain; on all ranks after the same round."""
        newest = max((at for at, _data in self._of_rank.values()), default=(0, 0))
        ahead = {rank: part for rank, part in self._of_rank.items() if part[0] == newest}
        own = self._of_rank.get(self._rank)
        if own is not None and self._rank not in ahead:
            why = LeftError(Status.PEER, "bootstrap: rank %s has left the all-gather that rank %d is in (it was "
                            "interrupted, or failed): start over on all ranks" % (_listed(ahead), self._rank))
            self._end = _End(why, (newest[0] + (newest[0] == own[0][0]), 0))
        self._of_rank = ahead
        if len(ahead) == self._nranks:
            self._end = _End([ahead[rank][1] for rank in range(self._nranks)], (newest[0], newest[1] + 1))
            self._of_rank = {}

    def empty(self) -> bool:
        """True if nothing is kept."""
        return self._end is None and not self._of_rank

    def refuse(self) -> None:
        """Drops all parts, for the ranks make different calls; on all ranks after the same round."""
        lack = set(range(self._nranks)) - set(self._of_rank)
        self.lose(False, make_error(Status.MISMATCH, "bootstrap: ranks make different calls: rank %s not the one that "
                                    "rank %d makes" % (_listed(lack), self._rank)))
        self._of_rank = {}

    def lose(self, leave: bool, why: Exception) -> None:
        """Ends this rank's all-gather, if it is in one. `leave`: other ranks may have gone on with it."""
        part = self._of_rank.pop(self._rank, None)
        if part is not None:
            self._end = _End(why, (part[0][0] + 1, 0) if leave else part[0])


class Rounds:
    """The rounds of one process group."""

    def __init__(self, rank: int, nranks: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._numbers = 0
        self._unsent: Dict[int, Tuple[_At, bytes]] = {}
        self._parts: DefaultDict[int, _Parts] = collections.defaultdict(lambda: _Parts(rank, nranks))
        self._idle = 0  # rounds in a row in which nobody sent anything; alike on all ranks

    def gather(self, place: Place, data: bytes, exchange: Callable[[Any], List[Any]]) -> List[bytes]:
        """The parts of all ranks for a bootstrap. `exchange` is an all-gather of objects."""
        self._begin(place, data)
        try:
            end = self._wait_for(place.number, exchange)
        except BaseException:  # Ctrl-C, say: nobody waits for this part's all-gather any more
            self._unsent.pop(place.number, None)
            raise
        place.at = end.following
        if isinstance(end.outcome, Exception):
            raise end.outcome
        return end.outcome

    def _begin(self, place: Place, data: bytes) -> None:
        with self._lock:
            if not place.number:  # bootstraps of a process group begin in the same order on all ranks
                self._numbers += 1
                place.number = self._numbers
            self._parts[place.number].take_end()  # of an all-gather that this rank has left
            self._unsent[place.number] = (place.at, data)
            place.leave()  # unless the all-gather ends first

    def _wait_for(self, number: int, exchange: Callable[[Any], List[Any]]) -> _End:
        while True:
            with self._lock:
                parts = self._parts[number]
                end = parts.take_end()
                if end is None:
                    self._round(exchange)
                    end = parts.take_end()
                if end is not None:
                    self._forget()
                    return end
                idle = self._idle
            time.sleep(min(idle * 1e-3, _LONGEST_SLEEP_S))

    def _forget(self) -> None:
        for number in [number for number, parts in self._parts.items() if parts.empty()]:
            del self._parts[number]

    def _round(self, exchange: Callable[[Any], List[Any]]) -> None:
        # Ctrl-C comes after it: torch's all-gather of objects is two collectives, and a rank that leaves between them
        # is out of step with the others for ever. Python cannot interrupt torch's waits in any case.
        with Interrupts():
            sent, self._unsent = self._unsent, {}
            try:
                heard = exchange((_WHAT, threading.active_count() > 1, sent))
                if any(not isinstance(one, tuple) or one[:1] != (_WHAT,) for one in heard):
                    raise MismatchError(Status.MISMATCH, "bootstrap: expected all ranks in calls of EPX, got an "
                                        "all-gather of the program's own on some")
                self._hear(heard)
            except BaseException as error:
                self._fail(sent, error)
                if not isinstance(error, Exception):
                    raise

    def _hear(self, heard: List[Any]) -> None:
        for rank, (_what, _threads, given) in enumerate(heard):
            for of, part in given.items():
                self._parts[of].add(rank, part)
        for parts in self._parts.values():
            parts.complete()
        self._idle = 0 if any(given for _what, _threads, given in heard) else self._idle + 1
        # Other threads may yet come with the parts that lack.
        if self._idle >= (_MOST_IDLE_ROUNDS if any(threads for _what, threads, _given in heard) else 1):
            self._idle = 0
            for parts in self._parts.values():
                parts.refuse()

    def _fail(self, sent: Dict[int, Tuple[_At, bytes]], error: BaseException) -> None:
        """A round failed: what was exchanged in it is lost here, and all threads that wait are told."""
        for of, part in sent.items():
            self._parts[of].add(self._rank, part)
        why = error if isinstance(error, Exception) else make_error(
            Status.SYSTEM, "bootstrap: an all-gather of several threads was interrupted in another one: %r" % error)
        for parts in self._parts.values():
            parts.lose(not isinstance(error, MismatchError), why)  # all ranks see a mismatch
        self._idle = 0
