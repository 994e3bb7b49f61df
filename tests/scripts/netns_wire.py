#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A bad wire between network interfaces, for kernels without netem: netns_wire.py [options] INTERFACE...

Every frame that comes out of one interface goes into all others, later, in another order, or not at all:

    --delay-ms D   how long a frame is under way
    --loss P       percent of the frames that are lost
    --reorder P    percent of the frames that overtake: they are under way for no time
    --double P     percent of the frames that arrive twice
    --corrupt P    percent of the frames of which one bit changes, behind the Ethernet header
    --swallow N    no frame with more than N bytes behind the Ethernet header arrives, and nobody is told
    --seed S       of the choices
    --commands     takes commands from standard input, a line each; each is confirmed by the same line:

    cut            nothing arrives any more
    cut INTERFACE  nothing that comes out of this interface arrives
    mend           all wires are whole
    swallow N      as the option; 0: everything arrives

Runs until it gets SIGTERM, then says what it did.
"""
import argparse
import heapq
import random
import select
import signal
import socket
import struct
import sys
import time

SOL_PACKET, PACKET_VNET_HDR, ETH_P_ALL, PACKET_OUTGOING = 263, 15, 3, 4
VNET_HEADER, ETHERNET_HEADER, NEEDS_CHECKSUM = 10, 14, 1


def open_port(name):
    """Frames come and go with the header in which the kernel notes what checksums and lengths it has left open."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    port.bind((name, ETH_P_ALL))
    port.setblocking(False)
    return port


def add_checksum(frame):
    """Fills in the checksum that the sender has left to its card, so that who receives sees a change behind it."""
    frame = bytearray(frame)
    flags, _, _, _, start, offset = struct.unpack_from("=BBHHHH", frame)
    if not flags & NEEDS_CHECKSUM:
        return frame
    start += VNET_HEADER
    text = bytes(frame[start:]) + b"\0" * (len(frame) - start & 1)
    total = sum(struct.unpack(f"!{len(text) // 2}H", text))  # with the pseudo header's sum, where the checksum will be
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    struct.pack_into("!H", frame, start + offset, ~total & 0xFFFF)
    struct.pack_into("=BBHHHH", frame, 0, flags & ~NEEDS_CHECKSUM, 0, 0, 0, 0, 0)
    return frame


class Wire:
    def __init__(self, options):
        self.options = options
        self.cut = set()  # ports whose frames do not arrive
        self.random = random.Random(options.seed)
        self.ports = [open_port(name) for name in options.interface]
        self.names = dict(zip(options.interface, self.ports))
        self.under_way = []  # (when it arrives, number, port it came from, frame)
        self.counts = {"forwarded": 0, "lost": 0, "overtook": 0, "doubled": 0, "corrupted": 0, "swallowed": 0}
        self.number = 0

    def take(self, port):
        while True:
            try:
                frame, address = port.recvfrom(1 << 17)
            except OSError:  # nothing more, or the interface is down
                return
            if address[2] != PACKET_OUTGOING:
                self.accept(port, frame)

    def command(self, line):
        word, _, what = line.partition(" ")
        if word == "cut":
            self.cut = {self.names[what]} if what else set(self.ports)
        elif word == "mend":
            self.cut = set()
        elif word == "swallow":
            self.options.swallow = int(what)
        else:
            raise SystemExit(f"wire: no command: {line}")
        print(line, flush=True)

    def chance(self, percent):
        return percent > 0 and self.random.uniform(0, 100) < percent

    def changed(self, frame):
        frame = add_checksum(frame)
        at = self.random.randrange(VNET_HEADER + ETHERNET_HEADER, len(frame))
        frame[at] ^= 1 << self.random.randrange(8)
        return bytes(frame)

    def accept(self, port, frame):
        if port in self.cut or self.chance(self.options.loss):
            self.counts["lost"] += 1
            return
        if 0 < self.options.swallow < len(frame) - VNET_HEADER - ETHERNET_HEADER:
            self.counts["swallowed"] += 1
            return
        if self.chance(self.options.corrupt):
            self.counts["corrupted"] += 1
            frame = self.changed(frame)
        self.send_later(port, frame)
        if self.chance(self.options.double):
            self.counts["doubled"] += 1
            self.send_later(port, frame)

    def send_later(self, port, frame):
        due = time.monotonic()
        if self.chance(self.options.reorder):
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
        if self.options.commands:
            poll.register(0, select.POLLIN)
        print("wire: ready", flush=True)
        while True:
            wait = 1000.0
            if self.under_way:
                wait = max(0.0, 1000 * (self.under_way[0][0] - time.monotonic()))
            for fd, _ in poll.poll(wait):
                if fd:
                    self.take(by_fd[fd])
                    continue
                line = sys.stdin.readline()
                if not line:
                    return
                self.command(line.strip())
            self.deliver()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay-ms", type=float, default=0)
    parser.add_argument("--loss", type=float, default=0)
    parser.add_argument("--reorder", type=float, default=0)
    parser.add_argument("--double", type=float, default=0)
    parser.add_argument("--corrupt", type=float, default=0)
    parser.add_argument("--swallow", type=int, default=0)
    parser.add_argument("--commands", action="store_true")
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
