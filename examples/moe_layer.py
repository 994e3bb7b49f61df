#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A Mixture-of-Experts layer over several ranks, on NumPy arrays: examples/moe_layer.c in Python. Start it with

    epx run -n 4 python3 examples/moe_layer.py

or with torchrun, mpirun or srun. The program computes every token's result by itself too, and compares.
"""
import sys

import epx
import numpy as np

TOKENS, HIDDEN, INNER, TOPK, EXPERTS = 32, 64, 48, 2, 8

# Parameters that every rank has: of the gate, and of all experts (a real program has its own experts' only).
model = np.random.default_rng(1)
router = model.standard_normal((HIDDEN, EXPERTS), np.float32)
up = model.standard_normal((EXPERTS, HIDDEN, INNER), np.float32) / HIDDEN
down = model.standard_normal((EXPERTS, INNER, HIDDEN), np.float32)


def gate(x):
    """The experts with the largest scores, and the softmax of these scores."""
    scores = x @ router
    idx = np.argsort(-scores, axis=1)[:, :TOPK].astype(np.int32)
    best = np.exp(np.take_along_axis(scores, idx, 1) - scores.max(1, keepdims=True))
    return idx, (best / best.sum(1, keepdims=True)).astype(np.float32)


def expert(e, rows):
    return np.maximum(rows @ up[e], 0) @ down[e]


def moe(group, handle, x, idx, weights):
    """The layer. Nothing here knows how many ranks or machines there are."""
    handle.update(idx)
    rows, counts = handle.recv_count()  # the ranks have exchanged how many rows each will get
    received, row_weights = np.empty((rows, HIDDEN), np.float32), np.empty(rows, np.float32)
    handle.dispatch(x, received, topk_weights=weights, out_topk_weights=row_weights)
    group.sync()

    first, begin = group.info.rank * group.info.local_experts, 0
    for e, count in enumerate(counts, first):  # rows are sorted by expert
        if not count:  # always so of the last rank's places beyond the last expert, where ranks do not divide experts
            continue
        mine = slice(begin, begin + count)
        received[mine] = expert(e, received[mine]) * row_weights[mine, None]
        begin += count

    y = np.empty_like(x)
    handle.combine(received, y)
    group.sync()
    return y


def main():
    group = epx.Group(modes=epx.Mode.HIGH_THROUGHPUT, layouts=1 << epx.Layout.EXPERT_MAJOR, num_experts=EXPERTS,
                      max_tokens_per_rank=TOKENS, max_hidden_bytes=HIDDEN * 4, max_topk=TOPK)
    handle = group.handle(epx.Mode.HIGH_THROUGHPUT, epx.Layout.EXPERT_MAJOR, topk=TOPK)
    rank = group.info.rank
    x = np.random.default_rng(100 + rank).standard_normal((TOKENS, HIDDEN), np.float32)
    idx, weights = gate(x)
    y = moe(group, handle, x, idx, weights)

    expected = [sum(w * expert(e, row) for e, w in zip(idx[t], weights[t])) for t, row in enumerate(x)]
    wrong = int((np.abs(y - expected) > 1e-4).sum())
    print(f"rank {rank} of {group.info.nranks}: {TOKENS} tokens through {EXPERTS} experts, {wrong} wrong values")
    group.destroy()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
