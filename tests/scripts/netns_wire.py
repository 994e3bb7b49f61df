#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A bad wire between network interfaces, for kernels without netem: netns_wire.py [options] INTERFACE...

Every frame that comes out of one interface goes into all others, later, in another order, or not at all:

    --delay-ms D   how long a frame is under way
    --loss P       percent of the frames that are lost
    --reorder P    percent of the frames that overtake: they are under way for no time
    --seed S       of the choices

Runs until it gets SIGTERM, then says what it did.
"""
import argparse
import heapq
import random
import select
import signal
import socket
import time

SOL_PACKET, PACKET_VNET_HDR, ETH_P_ALL, PACKET_OUTGOING = 263, 15, 3, 4


def open_port(name):
    """Frames come and go with the header in which the kernel notes what checksums and lengths it has left open."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    port.bind((name, ETH_P_ALL))
    port.setblocking(False)
    return port


class Wire:
    def __init__(self, options):
        self.options = options
        self.random = random.Random(options.seed)
        self.ports = [open_port(name) for name in options.interface]
        self.under_way = []  # (when it arrives, number, port it came from, frame)
        self.counts = {"forwarded": 0, "lost": 0, "overtook": 0}
        self.number = 0

    def take(self, port):
        while True:
            try:
                frame, address = port.recvfrom(1 << 17)
            except OSError:  # nothing more, or the interface is down
                return
            if address[2] != PACKET_OUTGOING:
                self.accept(port, frame)

    def accept(self, port, frame):
        if self.random.uniform(0, 100) < self.options.loss:
            self.counts["lost"] += 1
            return
        due = time.monotonic()
        if self.random.uniform(0, 100) < self.options.reorder:
            self.counts["overtook"] += 1
        else:
            due += self.options.delay_ms / 1000
        self.number += 1
        heapq.heappush(self.under_way, (due, self.number, port, frame))

    def deliver(self):
        while self.under_way and self.under_way[0][0] <= time.monotonic():
            _, _, origin, frame = heapq.heappop(self.under_way)
            self.counts["forwarded"] += 1
            for port in self.ports:
                if port is not origin:
                    try:
                        port.send(frame)
                    except OSError:  # the interface is down or full: lost
                        self.counts["lost"] += 1

    def run(self):
        poll = select.poll()
        by_fd = {port.fileno(): port for port in self.ports}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        print("wire: ready", flush=True)
        while True:
            wait = 1000.0
            if self.under_way:
                wait = max(0.0, 1000 * (self.under_way[0][0] - time.monotonic()))
            for fd, _ in poll.poll(wait):
                self.take(by_fd[fd])
            self.deliver()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay-ms", type=float, default=0)
    parser.add_argument("--loss", type=float, default=0)
    parser.add_argument("--reorder", type=float, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("interface", nargs="+")
    wire = Wire(parser.parse_args())

    def end(*_):
        raise SystemExit

    signal.signal(signal.SIGTERM, end)
    try:
        wire.run()
    finally:
        print("wire: " + ", ".join(f"{n} {what}" for what, n in wire.counts.items()), flush=True)


main()
