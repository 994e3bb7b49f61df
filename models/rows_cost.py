#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What A and B of rows.pml cost one source: rounds, turns and bytes between nodes (the table of docs/models.md).

A (a plain rank is its own relay): a lane to every rank; slots have the memory of today's slots and windows.
B (inboxes): a lane to the relay of every other node, as today. Rounds end where one lane is full, as in ht_cut.h."""
import random

TOKENS, TOPK, NODE, SLOTS, TURN = 4096, 8, 8, 8, 4
PAYLOAD = 7168 * 2
ROW = PAYLOAD + 32 + 208  # with weights, and its record
RELAY_BYTES, WINDOW_BYTES = 400 << 20, 450 << 20


def routing(ranks, hot):
    """The ranks of every token; hot: each token goes to the last rank too."""
    for _ in range(TOKENS):
        yield {ranks - 1, *random.sample(range(ranks - 1), TOPK - 1)} if hot else set(random.sample(range(ranks), TOPK))


def rounds(tokens, rows):
    """Rounds of consecutive tokens, at most `rows` rows of one to any lane."""
    count, filled = 1, {}
    for lanes in tokens:
        if any(filled.get(lane, 0) == rows for lane in lanes):
            count, filled = count + 1, {}
        for lane in lanes:
            filled[lane] = filled.get(lane, 0) + 1
    return count


def room(lanes, memory):
    return max(1, min(TOKENS // SLOTS, memory // (SLOTS * lanes * ROW))) if lanes else 0


random.seed(1)
print("ranks hot | rows a round A B | rounds A B | turns A B | MB between nodes A B")
for ranks in 8, 16, 64, 256, 1024:
    for hot in 0, 1:
        tokens = [tuple(t - {0}) for t in routing(ranks, hot)]
        nodes = [{r // NODE for r in t} - {0} for t in tokens]
        others = ranks // NODE - 1
        a = room(2 * (ranks - 1), RELAY_BYTES + WINDOW_BYTES)  # one slot there, one for what comes back
        b = room(min(2, others) * others + others, RELAY_BYTES)  # relays have room for twice the usual sources
        turns = ra, rb = rounds(tokens, a), rounds(nodes, b) if others else 0
        far = [[r for r in t if r >= NODE] for t in tokens]
        sent = [sum(len(t) for t in way) * PAYLOAD / 1e6 for way in (far, nodes)]
        print(f"{ranks:5} {hot:3} | {a} {b} | {ra} {rb} | {' '.join(str(-(-r // TURN)) for r in turns)} | "
              f"{sent[0]:.0f} {sent[1]:.0f}")
