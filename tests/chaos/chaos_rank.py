# SPDX-License-Identifier: Apache-2.0
"""One rank in Python of a job to which chaos.py does bad things; chaos_rank.c has the protocol.

    chaos_rank.py TABLE MODE MASK TIMEOUT_MS

Experts return what they get, and weights sum up to 1: the result of every token is the token.
"""
import mmap
import os
import struct
import sys
import time

import epx
import torch

TOKENS, HIDDEN, TOPK, AFTER_ROUNDS, AFTER, GO_S = 5, 64, 2, 8, 100000, 60
RANK, NRANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def report(text):
    print(text, flush=True)


class Table:
    """64-bit numbers that this rank and chaos.py share: last, go, round of each rank."""

    def __init__(self, path):
        with open(path, "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 0)

    def __getitem__(self, index):
        return struct.unpack_from("q", self.memory, 8 * index)[0]

    def __setitem__(self, index, value):
        struct.pack_into("q", self.memory, 8 * index, value)


class Rank:
    def __init__(self, low, mask, timeout_ms):
        self.low = low
        self.experts = 2 * NRANKS
        self.group = epx.Group(num_experts=self.experts, max_tokens_per_rank=TOKENS, max_hidden_bytes=HIDDEN * 2,
                               max_topk=TOPK, modes=int(epx.Mode.LOW_LATENCY if low else epx.Mode.HIGH_THROUGHPUT),
                               enable_mask=mask, timeout_ms=timeout_ms, alloc_bytes=1 << 20)
        layout = epx.Layout.EXPERT_MAJOR if low else epx.Layout.FLAT
        self.handle = self.group.handle(epx.Mode.LOW_LATENCY if low else epx.Mode.HIGH_THROUGHPUT, layout, topk=TOPK)
        rows = (2, NRANKS * TOKENS, HIDDEN) if low else (NRANKS * TOKENS, HIDDEN)
        self.rows = torch.zeros(rows, dtype=torch.bfloat16)
        self.out = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
        self.row_weights = torch.zeros(NRANKS * TOKENS, TOPK)
        self.row_idx = torch.zeros(NRANKS * TOKENS, TOPK, dtype=torch.int64)
        self.active = [1] * NRANKS

    def draw(self, number):
        """Tokens and routing of a round: experts on ranks that are left."""
        generator = torch.Generator().manual_seed(number * 64 + RANK)
        ids = [e for e in range(self.experts) if self.active[e // 2]]
        self.x = torch.randint(-64, 64, (TOKENS, HIDDEN), generator=generator).to(torch.bfloat16)
        self.idx = torch.stack([torch.tensor(ids)[torch.randperm(len(ids), generator=generator)[:TOPK]]
                                for _ in range(TOKENS)])

    def round(self, number):
        """One dispatch and combine; None, or what is wrong with the result. Failures are exceptions."""
        weights = torch.full((TOKENS, TOPK), 0.5)
        self.draw(number)
        self.out.fill_(77)
        self.handle.update(self.idx)
        if self.low:
            self.handle.dispatch(self.x, self.rows)
            self.handle.combine(self.rows, self.out, topk_weights=weights)
            self.group.sync()
        else:
            self.handle.dispatch(self.x, self.rows, topk_weights=weights, out_topk_weights=self.row_weights,
                                 out_topk_idx=self.row_idx)
            self.group.sync()
            mine = (self.row_idx >= 0).to(torch.float32) * self.row_weights
            self.rows.mul_(mine.sum(1, keepdim=True).to(torch.bfloat16))
            self.handle.combine(self.rows, self.out)
            self.group.sync()
        return None if torch.equal(self.out, self.x) else "round %d: combined rows are not the tokens" % number

    def recover(self, table):
        until = time.monotonic() + GO_S
        while not table[1] and time.monotonic() < until:
            time.sleep(0.001)
        if table[1] != 1:
            return None
        self.group.error_clear()
        if self.group.masks:
            mask = torch.zeros(NRANKS, dtype=torch.int32)
            self.group.mask_query(mask)
            self.group.sync()
            self.active = mask.tolist()
        for i in range(AFTER_ROUNDS):
            wrong = self.round(AFTER + i)
            if wrong:
                return wrong
        report("recovered " + ",".join(str(r) for r in range(NRANKS) if self.active[r]))
        return None


def run(rank, table):
    number = 0
    while number < table[0]:
        table[2 + RANK] = number
        began = time.monotonic()
        try:
            wrong = rank.round(number)
        except epx.EpxError as failure:
            error = rank.group.error()
            if error is None:
                return "no error of the group after %s" % failure
            report("fault %d %d %d %s" % (error.status, error.peer, (time.monotonic() - began) * 1000, error.message))
            return rank.recover(table)
        if wrong:
            return wrong
        if number == 0:
            report("ready")
        number += 1
    return None


def main(path, mode, mask, timeout_ms):
    wrong = None
    try:
        rank = Rank(mode == "ll", int(mask), int(timeout_ms))
        wrong = run(rank, Table(path))
        rank.group.destroy()
    except epx.EpxError as failure:
        wrong = str(failure)
    report("failed " + wrong if wrong else "ok")
    sys.exit(wrong is not None)


main(*sys.argv[1:])
