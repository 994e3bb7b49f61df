#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A rank is killed, and a new process takes its place. Start it, without a launcher, with

    python3 examples/replacement.py

The program starts four ranks, which dispatch and combine in both modes. It kills rank 2 with SIGKILL and starts another
process for rank 2, which joins the group by its ticket (epx.Group.ticket, epx.Group.join). The others find out in
their next operation and call error_clear(), which takes the new process in; then all four go on. The new process is
killed once more, by then rank 2 of the group, and replaced again.
"""
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

import epx
import numpy as np

RANKS, VICTIM, KILLS, STEPS = 4, 2, 2, 10
TOKENS, HIDDEN, TOPK, EXPERTS = 16, 64, 2, 8
CONFIG = dict(num_experts=EXPERTS, max_tokens_per_rank=TOKENS, max_hidden_bytes=4 * HIDDEN, max_topk=TOPK,
              device=epx.Device.CPU, enable_mask=1, timeout_ms=2000)


def wrong_values(group, handle, low_latency, rank, step):
    """One dispatch and one combine. An expert returns its rows as they are, so a token's result is the token."""
    tokens = np.full((TOKENS, HIDDEN), rank * 1000 + step, np.float32)
    idx = np.array([[(rank + t + step) % EXPERTS, (rank + t + step + 3) % EXPERTS] for t in range(TOKENS)], np.int64)
    weights = np.full((TOKENS, TOPK), 0.5, np.float32)
    out = np.zeros((TOKENS, HIDDEN), np.float32)
    handle.update(idx)
    if low_latency:
        rows = np.empty((group.info.local_experts, RANKS * TOKENS, HIDDEN), np.float32)
        handle.dispatch(tokens, rows)
        handle.combine(rows, out, topk_weights=weights)
    else:
        count, _ = handle.recv_count()
        rows, shares = np.empty((count, HIDDEN), np.float32), np.empty((count, TOPK), np.float32)
        handle.dispatch(tokens, rows, topk_weights=weights, out_topk_weights=shares)
        group.sync()
        handle.combine(rows * shares.sum(1, keepdims=True), out)
    group.sync()
    return int((out != tokens).sum())


def all_there(group):
    mask = np.zeros(RANKS, np.int32)
    group.mask_query(mask)
    group.sync()
    return mask.all()


def work(group, rank, kills):
    """Steps in both modes; the last ones after all kills. Returns the number of wrong values."""
    high = group.handle(epx.Mode.HIGH_THROUGHPUT, epx.Layout.FLAT, TOPK)
    low = group.handle(epx.Mode.LOW_LATENCY, epx.Layout.EXPERT_MAJOR, TOPK)
    wrong = 0
    while True:
        for step in range(STEPS if kills else 0):  # all are there again
            wrong += wrong_values(group, low, True, rank, step) + wrong_values(group, high, False, rank, step)
        if kills == KILLS:
            return wrong
        print("rank %d works" % rank, flush=True)
        try:
            while True:
                wrong += wrong_values(group, high, False, rank, 0)
        except epx.EpxError as error:
            print("rank %d: %s" % (rank, error), flush=True)
        group.error_clear()  # collective: also admits the process that has come
        while not all_there(group):  # it comes late; a real program would work without the rank meanwhile
            time.sleep(0.1)
            group.mask_clean()
        kills += 1


def be_rank(rank, folder, kills):
    ticket = os.path.join(folder, "ticket")  # in a folder that only this user can read
    if kills:
        with open(ticket) as file:
            group = epx.Group.join(file.read(), rank, timeout=60, **CONFIG)
    else:
        group = epx.Group(**CONFIG)
        if rank == 0:
            with open(ticket + ".new", "w") as file:
                file.write(group.ticket())
            os.rename(ticket + ".new", ticket)
    wrong = work(group, rank, kills)
    print("rank %d: %d steps after the last replacement, %d wrong values" % (rank, STEPS, wrong), flush=True)
    group.destroy()
    return wrong != 0


def start(rank, folder, kills, port):
    environment = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1",
                       MASTER_PORT=str(port))
    return subprocess.Popen([sys.executable, __file__, str(rank), folder, str(kills)], env=environment,
                            stdout=subprocess.PIPE, text=True)


def await_line(process, text):
    """Prints what the process says until a line has the text."""
    for line in process.stdout:
        sys.stdout.write(line)
        if text in line:
            return
    raise SystemExit("a rank has ended before it said: " + text)


def main():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        ranks = [start(r, folder, 0, port) for r in range(RANKS)]
        for kills in range(1, KILLS + 1):
            for process in ranks:
                await_line(process, "works")
            time.sleep(0.2)
            ranks[VICTIM].send_signal(signal.SIGKILL)
            ranks[VICTIM].wait()
            print("rank %d was killed; another process comes" % VICTIM, flush=True)
            ranks[VICTIM] = start(VICTIM, folder, kills, port)
        for process in ranks:
            sys.stdout.write(process.communicate()[0])
        return max(process.returncode != 0 for process in ranks)


if __name__ == "__main__":
    sys.exit(be_rank(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])) if len(sys.argv) > 1 else main())
