# SPDX-License-Identifier: Apache-2.0
"""Ranks die at chosen points of an exchange, and other processes join in their places:

    python3 python/tests/join_deaths.py low|high [NET]

Four ranks. What they do when one dies is low latency, or high throughput; between two deaths all results of both modes
are compared, also while a place is empty. With NET they are two nodes. A rank kills itself (SIGKILL):

    in dispatch   rank 2, right after the call, which only queues the operation; its place is taken at once
    between       rank 0, when the dispatch has ended; its place is taken when the others have gone on without it
    in combine    rank 2 again, by now the process that joined; the first that comes for its place dies while it waits
    two           rank 1 in dispatch, and rank 3 when it hears of that, before it recovers; both places are taken

Nobody dies before all ranks have ended the steps that must succeed: an operation ends on each rank by itself, and what
the network of a rank has not delivered when it dies is lost, though others may still wait for it.

Ends with 0 if all went on with right results, each time with all four ranks.
"""
import ctypes
import mmap
import os
import signal
import socket
import sys
import time
import traceback
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional

import epx
import numpy as np
import slow

RANKS, STEPS, TOKENS, HIDDEN, TOPK, EXPERTS = 4, 3, 8, 32, 2, 8
JOIN_S = 60
LOW, HIGH = sys.argv[1] == "low", sys.argv[1] == "high"
NET = sys.argv[2] if len(sys.argv) > 2 else ""


class Story(NamedTuple):
    point: str
    victim: int
    second: Optional[int] = None  # dies when it hears of the first
    late: bool = False            # the others go on without it for a while
    doomed: bool = False          # the first process that comes dies while it waits


STORIES = [Story("dispatch", 2), Story("between", 0, late=True), Story("combine", 2, doomed=True),
           Story("dispatch", 1, second=3)]

TIMEOUT_MS = int(1500 * slow.factor())
LIMIT_S = 70 + TIMEOUT_MS // 100  # a story lasts a deadline and a half, or two of them
CONFIG = dict(num_experts=EXPERTS, max_tokens_per_rank=TOKENS, max_hidden_bytes=4 * HIDDEN, max_topk=TOPK,
              device=epx.Device.CPU, enable_mask=1, timeout_ms=TIMEOUT_MS, net=NET,
              ranks_per_node=RANKS // 2 if NET else 0)
# Shared with all processes: the ticket; two bytes for each rank, how many stories it has gone on from with an empty
# place, and how many it has begun.
TICKET, DEGRADED, BEGUN = 4096, 4096, 4096 + RANKS
TABLE = mmap.mmap(-1, TICKET + 2 * RANKS)


def await_all(ranks: Iterable[int], at: int, number: int) -> None:
    """Until each of `ranks` has done so with that story: DEGRADED, BEGUN."""
    limit = time.monotonic() + LIMIT_S
    while any(TABLE[at + r] <= number for r in ranks):
        if time.monotonic() > limit:
            raise AssertionError("story %d: %s" % (number, [TABLE[at + r] for r in range(RANKS)]))
        time.sleep(0.002)


# ---- A rank

class Rank:
    def __init__(self, group: epx.Group, rank: int) -> None:
        self.group, self.rank = group, rank
        self.high = group.handle(epx.Mode.HIGH_THROUGHPUT, epx.Layout.FLAT, TOPK)
        self.low = group.handle(epx.Mode.LOW_LATENCY, epx.Layout.EXPERT_MAJOR, TOPK)

    def members(self) -> List[int]:
        mask = np.zeros(RANKS, np.int32)
        self.group.mask_query(mask)
        self.group.sync()
        return mask.tolist()

    def end(self) -> None:
        self.group.sync()
        error = self.group.error()
        if error is not None:  # low latency goes on without a rank by itself
            raise epx.EpxError(error.status, error.message)

    def step(self, low: bool, step: int, at: Callable[[str], None] = lambda point: None) -> None:
        """One dispatch and one combine. An expert returns its rows as they are: a token's result is the token, times
        the weights of the experts whose ranks are there."""
        there = self.members()
        idx = np.array([[(self.rank + t + step) % EXPERTS, (self.rank + t + step + 3) % EXPERTS]
                        for t in range(TOKENS)], np.int64)
        tokens = np.full((TOKENS, HIDDEN), self.rank * 1000 + step + 1, np.float32)
        weights, out = np.full((TOKENS, TOPK), 0.5, np.float32), np.zeros((TOKENS, HIDDEN), np.float32)
        (self.low if low else self.high).update(idx)
        (self.exchange_low if low else self.exchange_high)(tokens, weights, out, at)
        share = np.array([[there[e * RANKS // EXPERTS] for e in row] for row in idx]).sum(1, keepdims=True) * 0.5
        if self.members() == there and not np.array_equal(out, tokens * share):
            raise AssertionError("rank %d, step %d, %s, ranks %s: wrong results" % (
                self.rank, step, "low latency" if low else "high throughput", there))

    def exchange_low(self, tokens: np.ndarray, weights: np.ndarray, out: np.ndarray, at: Callable[[str], None]) -> None:
        rows = np.zeros((self.group.info.local_experts, RANKS * TOKENS, HIDDEN), np.float32)
        self.low.dispatch(tokens, rows)
        at("dispatch")
        self.end()
        at("between")
        self.low.combine(rows, out, topk_weights=weights)
        at("combine")
        self.end()

    def exchange_high(self, tokens: np.ndarray, weights: np.ndarray, out: np.ndarray,
                      at: Callable[[str], None]) -> None:
        count, _ = self.high.recv_count()
        rows, shares = np.zeros((count, HIDDEN), np.float32), np.zeros((count, TOPK), np.float32)
        self.high.dispatch(tokens, rows, topk_weights=weights, out_topk_weights=shares)
        at("dispatch")
        self.end()
        at("between")
        self.high.combine(rows * shares.sum(1, keepdims=True), out)
        at("combine")
        self.end()

    def until_all_there(self, number: int) -> None:
        """Both modes work while a place is empty."""
        while not all(self.members()):
            TABLE[DEGRADED + self.rank] = number + 1
            for low in (True, False):
                self.step(low, 100 + number)
            time.sleep(0.02)
            self.group.mask_clean()

    def live(self, number: int) -> None:
        """One story: a step in which a rank dies, and what follows until all places are taken again."""
        story = STORIES[number]

        def at(point: str) -> None:
            if point == story.point and self.rank == story.victim:
                os.kill(os.getpid(), signal.SIGKILL)

        TABLE[BEGUN + self.rank] = number + 1
        await_all(range(RANKS), BEGUN, number)
        try:
            for step in range(1000):
                self.step(LOW, step, at)
        except epx.EpxError as error:
            print("rank %d: %s" % (self.rank, error), flush=True)
        else:
            raise AssertionError("nothing has failed")
        if self.rank == story.second:
            os.kill(os.getpid(), signal.SIGKILL)
        self.group.mask_clean() if LOW else self.group.error_clear()

    def work(self, first: int) -> None:
        for number in range(first, len(STORIES) + 1):
            if number > 0:  # members have recovered, and this process may have joined
                self.until_all_there(number - 1)
            if self.rank == 0:  # an older one is good as long as one of its members is there
                TABLE[:TICKET] = self.group.ticket().encode().ljust(TICKET, b"\0")
            for step in range(STEPS):
                for low in (True, False):
                    self.step(low, step)
            if number < len(STORIES):
                self.live(number)


def be_rank(rank: int, first: int) -> None:
    """first: the story that follows; 0: the process is one of the first."""
    os.environ.update(RANK=str(rank))
    if first:
        group = epx.Group.join(TABLE[:TICKET].rstrip(b"\0").decode(), rank, timeout=JOIN_S, **CONFIG)
    else:
        group = epx.Group(**CONFIG)
    Rank(group, rank).work(first)
    group.destroy()


# ---- Who starts them

def start(rank: int, first: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with who has started it
    try:
        be_rank(rank, first)
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)


def await_death(pids: Dict[int, int], rank: int) -> None:
    _, status = os.waitpid(pids.pop(rank), 0)
    if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
        raise AssertionError("rank %d has ended with status %d before it was to die" % (rank, status))


def replace(pids: Dict[int, int], number: int) -> None:
    story = STORIES[number]
    await_death(pids, story.victim)
    if story.late:
        await_all(pids, DEGRADED, number)
    if story.doomed:
        doomed = start(story.victim, number + 1)
        time.sleep(0.2)
        os.kill(doomed, signal.SIGKILL)
        os.waitpid(doomed, 0)
    pids[story.victim] = start(story.victim, number + 1)
    if story.second is not None:
        await_death(pids, story.second)
        pids[story.second] = start(story.second, number + 1)


def main() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    signal.alarm(LIMIT_S)
    pids = {rank: start(rank, 0) for rank in range(RANKS)}
    try:
        for number in range(len(STORIES)):
            replace(pids, number)
        status = [os.waitpid(pids.pop(rank), 0)[1] for rank in range(RANKS)]
    finally:
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
    print("%d stories, %d ranks: %s" % (len(STORIES), RANKS, "ok" if not any(status) else status))
    return int(any(status))


if __name__ == "__main__":
    sys.exit(main())
