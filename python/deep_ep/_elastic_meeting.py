# SPDX-License-Identifier: Apache-2.0
"""Ranks that are about to create a group meet in the store of torch.distributed first.

A group is created in an all-gather, which a rank cannot leave when another one does not come: it would wait for the
timeout of the process group, half an hour, which then cannot be used any more. A rank that gives up ends the meeting in
the store: those that come later do not follow it into the all-gather, but meet again, and so may it.
"""

import json
import time
import uuid
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

import epx
from epx.errors import make_error

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.01
_MOST_QUESTIONS = 1000  # to the store in a second, of all ranks together
_MET, _GIVEN_UP = b"met", b"given up"  # outcomes of a meeting
_OUTCOME_S = 10.0  # for a rank to store the outcome on which it has decided


def _store() -> Optional[Any]:
    """The store of the default process group, if there is one."""
    import torch.distributed as dist

    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


def _tried(call: Callable[..., Any], *arguments: Any) -> bool:
    """False if the store cannot do it: that of torch's MPI can do nothing."""
    try:
        return call(*arguments) is not False
    except RuntimeError:
        return False


def compare(given: Sequence[Dict[str, Any]]) -> None:
    """Raises, on all ranks, if they have given different arguments."""
    for name, first in given[0].items():
        other = next((rank for rank, values in enumerate(given) if values.get(name) != first), None)
        if other is not None:
            raise make_error(epx.Status.MISMATCH, "%s: expected the same on all ranks, got %r on rank 0 and %r on rank "
                             "%d" % (name, first, given[other].get(name), other))


def _common_store(bootstrap: epx.Bootstrap, alike: Dict[str, int]) -> Tuple[str, Optional[Any]]:
    """(a name that is the same on all ranks, and nobody else's; the store, if all ranks have the same one). Collective.
    A process group may join ranks that were initialized apart, each part with a store of its own. `alike`: arguments
    that are compared with those of the other ranks."""
    store, own = _store() if bootstrap.nranks > 1 else None, "epx/meeting/" + uuid.uuid4().hex
    # A store over TCP does not answer set(). The answer to the question behind it says that the key is there: a rank
    # that hears of it in the all-gather may be faster than the key.
    there = store is not None and _tried(store.set, own, "") and _tried(store.check, [own])
    parts = [json.loads(part) for part in bootstrap.allgather(json.dumps([own, alike]).encode())]
    names = [name for name, _given in parts]
    seen = there and _tried(store.check, names)  # type: ignore[union-attr]
    common = all(part == b"\1" for part in bootstrap.allgather(b"\1" if seen else b"\0"))
    if there:
        _tried(store.delete_key, own)  # type: ignore[union-attr]
    compare([given for _name, given in parts])
    return names[0], store if common else None


class Meeting:
    """The meetings of one buffer, one after the other. Creating it is collective. `alike`: arguments that are the same
    on all ranks."""

    def __init__(self, bootstrap: epx.Bootstrap, alike: Dict[str, int]) -> None:
        self._rank, self._nranks = bootstrap.rank, bootstrap.nranks
        self._name, self.store = _common_store(bootstrap, alike)
        self._number = 0
        self._said = False  # that this rank is there
        self._old: List[int] = []  # meetings whose keys are still in the store

    def _key(self, what: Any, number: Optional[int] = None) -> str:
        return "%s/%d/%s" % (self._name, self._number if number is None else number, what)

    def wait(self, what: str, limit: str, timeout_s: float, why: str = "") -> None:
        """Returns when all ranks are there, or at once without a store. `what` waits, for as long as `limit` says;
        `why`: more for the message."""
        end, never = time.monotonic() + timeout_s, set(range(self._nranks))
        while self.store is not None:
            late = not self._meet(self.store, end)
            met = self.store.get(self._key("outcome")) == _MET
            absent = set() if met else self._absent(self.store)
            never &= absent  # others have come, and given up before this rank
            self._end(self.store, met)
            if met:
                return
            if late and absent:
                raise make_error(epx.Status.TIMEOUT, "%s: rank %s did not make this call within %s = %g%s" % (
                    what, ", ".join(map(str, sorted(never or absent))), limit, timeout_s, why and " (%s)" % why))

    def _meet(self, store: Any, end: float) -> bool:
        """Returns when the meeting has an outcome; False if it had none by then, and this rank gave up."""
        if not self._said:  # it has after Ctrl-C
            store.set(self._key(self._rank), "")
            self._said = True
            if store.add(self._key("count"), 1) == self._nranks:
                self._decide(store, _MET)
        if self._decided(store, end):
            return True
        self._decide(store, _GIVEN_UP)
        if not self._decided(store, time.monotonic() + _OUTCOME_S):
            raise make_error(epx.Status.TIMEOUT, "a meeting of ranks: expected its outcome from the rank that decided")
        return False

    def _decide(self, store: Any, outcome: bytes) -> None:
        """The first rank to decide stores the outcome. (compare_set() would do it in one step, but torch 2.3 and older
        make its result without Python's lock, and may crash.)"""
        if store.add(self._key("deciders"), 1) == 1:
            store.set(self._key("outcome"), outcome)

    def _decided(self, store: Any, end: float) -> bool:
        pause, longest = _FIRST_PAUSE_S, max(_LONGEST_PAUSE_S, self._nranks / _MOST_QUESTIONS)
        while not store.check([self._key("outcome")]):
            if time.monotonic() > end:
                return False
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return True

    def _absent(self, store: Any) -> Set[int]:
        return {rank for rank in range(self._nranks) if not store.check([self._key(rank)])}

    def _end(self, store: Any, met: bool) -> None:
        """Goes on to the next meeting. Where all ranks are in one, they have left those before: their keys can go."""
        if met:
            for number in self._old:
                for what in (self._rank, "count", "deciders", "outcome") if self._rank == 0 else (self._rank,):
                    _tried(store.delete_key, self._key(what, number))
            self._old = []
        self._old.append(self._number)
        self._number += 1
        self._said = False
