# SPDX-License-Identifier: Apache-2.0
"""Deadlines on a machine that is busy with other things, as in tests/lib/slow.c. A test whose deadline is short, so
that it need not wait long, would take a rank for dead that merely has no core."""

import time

SAMPLE_S, TOLERATED, MOST = 0.02, 2, 10


def factor() -> float:
    """How much longer deadlines must be: more than 1 where a busy thread gets less than half of a core now. All ranks
    of a group need the same deadline, so one process measures for all."""
    start, busy = time.monotonic(), time.thread_time()
    while time.thread_time() - busy < SAMPLE_S:
        pass
    return min(max((time.monotonic() - start) / SAMPLE_S / TOLERATED, 1.0), MOST)


def late(seconds: float, limit: float, before: float) -> bool:
    """Did what is over take longer than the limit, on a machine as slow as it was `before`, a factor(), or as slow as
    it is now? Deadlines cannot grow while ranks have them; other programs may have begun since."""
    return seconds > limit * before and seconds > limit * factor()
