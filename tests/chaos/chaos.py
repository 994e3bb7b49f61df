#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Does bad things to jobs, one after the other, and checks after each that what must hold did (docs/chaos.md).

    chaos.py --build BUILD [--seconds S] [--seed N] [--only EVENT,...] [--python PROGRAM]

Hosts are network namespaces h0 and h1, joined through p0 and p1 by a wire (a bridge, or tests/scripts/netns_wire.py).
Everything lives in namespaces of its own, which chaos.sh makes and which end with it. Event number N of a seed is the
same whatever came before it; --first N --events 1 repeats it.
"""
import argparse
import ctypes
import glob
import mmap
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
RANKS, DEADLINE_MS, START_S, END_S = 4, 2000, 60, 60
SLACK_MS = 5000  # for a machine that does other things as well
LATE_MS = 50  # how slow ranks are to connect where a stranger must get in before
FOREVER = 1 << 60
ADDRESSES = ["10.78.0.1", "10.78.0.2"]


class Wrong(Exception):
    """Something that must hold does not."""


def run(command):
    return subprocess.run(command.split(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode


# ---- The network


class Wire:
    """Between the two hosts: good or bad, whole or cut."""

    def __init__(self):
        self.process = None
        for i, address in enumerate(ADDRESSES):
            made = run(f"ip netns add h{i}") == 0 and run(f"ip link add p{i} type veth peer name eth0 netns h{i}") == 0
            if not made:
                sys.exit(77)
            for line in (f"ip -n h{i} addr add {address}/24 dev eth0", f"ip -n h{i} link set lo up",
                         f"ip -n h{i} link set eth0 gso_max_size 1500", f"ip -n h{i} link set eth0 up",
                         f"ip link set p{i} up"):
                run(line)
        self.bridged = run("ip link add br0 type bridge") == 0
        for i in range(2) if self.bridged else ():
            run(f"ip link set p{i} master br0")
        if self.bridged:
            run("ip link set br0 up")
        else:
            self.play()

    def play(self, *options):
        """netns_wire.py in place of a bridge."""
        self.stop()
        program = os.path.join(HERE, "..", "scripts", "netns_wire.py")
        self.process = subprocess.Popen([sys.executable, program, *options, "p0", "p1"], stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True)
        if "ready" not in self.process.stdout.readline():
            sys.exit("chaos: no wire between hosts: neither a bridge nor packet sockets")

    def stop(self):
        if self.process:
            self.process.terminate()
            self.process.communicate()
        self.process = None

    def slow(self):
        """Frames take milliseconds, some are lost, some overtake."""
        if self.bridged and all(run(f"tc qdisc add dev p{i} root netem delay 3ms loss 0.5% reorder 20%") == 0
                                for i in range(2)):
            return
        if self.bridged:
            run("ip link set br0 down")
        self.play("--delay-ms", "3", "--loss", "0.5", "--reorder", "20")

    def good(self):
        for i in range(2):
            run(f"tc qdisc del dev p{i} root")
        if self.bridged:
            self.stop()
            run("ip link set br0 up")
        else:
            self.play()

    @staticmethod
    def cut(whole):
        run("ip link set p1 " + ("up" if whole else "down"))


# ---- A job


class Rank:
    """A process and what it has said."""

    def __init__(self, number, argv, environment, host):
        self.number, self.lines, self.host = number, [], host
        self.process = subprocess.Popen(["nsenter", f"--net=/run/netns/h{host}", *argv], env=environment, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace")
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()

    def _listen(self):
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def said(self, word):
        """The rest of the line that begins so, or None."""
        for line in list(self.lines):
            if line == word or line.startswith(word + " "):
                return line[len(word) + 1:]
        return None

    def ended(self):
        return self.process.poll() is not None


class Job:
    def __init__(self, world, event):
        self.event, self.ranks, self.victim = event, [], None
        self.path = os.path.join(world.work, "table")
        with open(self.path, "wb") as file:
            file.write(bytes(8 * 18))
        with open(self.path, "r+b") as file:
            self.table = mmap.mmap(file.fileno(), 0)
        self.set(0, FOREVER)
        self.port = 20000 + event.number % 20000

    def set(self, index, value):
        struct.pack_into("q", self.table, 8 * index, value)

    def get(self, index):
        return struct.unpack_from("q", self.table, 8 * index)[0]

    def start(self, world):
        event = self.event
        per = RANKS // event.nodes
        program = world.python_rank if event.python else [os.path.join(world.build, "tests", "chaos_rank")]
        for r in range(RANKS):
            environment = dict(os.environ, RANK=str(r), WORLD_SIZE=str(RANKS), MASTER_ADDR=ADDRESSES[0],
                               MASTER_PORT=str(self.port), EPX_RANKS_PER_NODE=str(per), EPX_BOOT_TIMEOUT_MS="40000",
                               EPX_SOCKET_IFNAME="=eth0", EPX_NET="ofi:tcp", EPX_LOG="error", OMP_NUM_THREADS="1",
                               EPX_SECRET=event.secret,
                               EPX_LIBRARY=os.path.join(world.build, "libepx.so"))
            if event.nodes == 1:
                environment.pop("EPX_RANKS_PER_NODE")
            if event.kind == "strangers":
                environment["CHAOS_LATE_MS"] = str(LATE_MS)
            self.ranks.append(Rank(r, [*program, self.path, event.mode, str(event.mask), str(DEADLINE_MS)],
                                   environment, r // per if event.nodes > 1 else 0))

    def wait(self, what, seconds, ranks=None):
        """Until what(rank) holds for all: else Wrong, with what each has said."""
        ranks = self.ranks if ranks is None else ranks
        until = time.monotonic() + seconds
        while not all(what(rank) for rank in ranks):
            if any(rank.said("failed") is not None for rank in ranks) or time.monotonic() > until:
                raise Wrong("; ".join(f"rank {r.number}: {r.lines[-1][:300] if r.lines else 'said nothing'}"
                                      for r in ranks if not what(r)))
            time.sleep(0.002)

    def ready(self):
        self.wait(lambda rank: rank.said("ready") is not None, START_S)

    def finish(self):
        """Nothing was to fail: some more rounds, then all end well."""
        self.set(0, max(self.get(2 + r) for r in range(RANKS)) + 20)
        self.wait(lambda rank: rank.said("ok") is not None, END_S)
        self.wait(lambda rank: rank.ended(), 20)

    def survivors(self):
        return [rank for rank in self.ranks if rank is not self.victim]

    def faults(self, ranks, culprits):
        """Each of these ranks has been told in time, and names one of the culprits, or says that it is not sure."""
        began = time.monotonic()
        self.wait(lambda rank: rank.said("fault") is not None, (2 * DEADLINE_MS + SLACK_MS) / 1000, ranks)
        right = 0
        for rank in ranks:
            _, peer, ms, text = rank.said("fault").split(" ", 3)
            if int(ms) > 2 * DEADLINE_MS + SLACK_MS:
                raise Wrong(f"rank {rank.number}: {ms} ms passed until it was told")
            if int(peer) == rank.number:  # one that was late itself names nobody: -1
                raise Wrong(f"rank {rank.number} names itself: {text}")
            if int(peer) not in culprits and not re.search(r"\bmay\b", text):
                raise Wrong(f"rank {rank.number} names rank {peer}, expected one of {sorted(culprits)}: {text}")
            right += int(peer) in culprits
        self.event.named += right
        self.event.told += len(ranks)
        return time.monotonic() - began

    def recover(self, ranks, active):
        self.set(1, 1)
        self.wait(lambda rank: rank.said("recovered") is not None, END_S, ranks)
        for rank in ranks:
            if rank.said("recovered") != ",".join(str(r) for r in active):
                raise Wrong(f"rank {rank.number} went on with ranks {rank.said('recovered')}, expected {active}")
        self.wait(lambda rank: rank.said("ok") is not None and rank.ended(), 30, ranks)

    def give_up(self, ranks):
        """Without enable_mask nobody goes on without the dead: ranks end, each with a status."""
        self.set(1, -1)
        self.wait(lambda rank: rank.said("ok") is not None and rank.ended(), 30, ranks)

    def end(self):
        for rank in self.ranks:
            if not rank.ended():
                rank.process.send_signal(signal.SIGCONT)
                rank.process.kill()
            rank.process.wait()
            rank.thread.join(5)
            rank.process.stdout.close()
        self.table.close()


# ---- Strangers


def listening(rank):
    """Ports on which processes of the rank's host listen."""
    with open(f"/proc/{rank.process.pid}/net/tcp", encoding="ascii") as file:
        rows = [line.split() for line in file][1:]
    return sorted({int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A"})


def enter(host):
    """This thread's sockets are the host's from now on."""
    with open(f"/run/netns/h{host}", "rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000):
            raise OSError(ctypes.get_errno(), "setns")


class Stranger(threading.Thread):
    """Connects to ports of a host again and again, says something, and stays or goes."""

    def __init__(self, host, ports, seed):
        super().__init__(daemon=True)
        self.host, self.ports, self.random, self.stopped, self.tries = host, ports, random.Random(seed), False, 0
        self.why = None

    def report(self):
        """What a stranger says: noise, a hello of the bootstrap, a greeting without the key, a frame, nothing."""
        noise = self.random.randbytes
        return self.random.choice([
            noise(self.random.randrange(1, 4096)),
            struct.pack("<IIQiiQ", 0x48585045, self.random.choice([1, 2, 3, 99]), self.random.getrandbits(64),
                        self.random.choice([-1, 0, 1, 3, 1 << 30]), self.random.choice([0, 4, 5]), 0),
            struct.pack("<IHH", 0x41585045, 1, self.random.choice([1, 2, 9])) + noise(32) + noise(32),
            struct.pack("<IIQQII", 0x46585045, self.random.randrange(9), 0, self.random.getrandbits(63), 0, 0),
            struct.pack("<IIQiiQ", 0x4d585045, 1, self.random.getrandbits(64), 1, 0, 1 << 40),
            b""])

    def run(self):
        kept = []
        try:
            enter(self.host)
            while not self.stopped:
                one = socket.socket()
                one.setblocking(False)
                self.tries += 1
                try:
                    one.connect((ADDRESSES[self.host], self.random.choice(self.ports)))
                except BlockingIOError:
                    pass
                except OSError:
                    one.close()
                    continue
                time.sleep(0.001)
                try:
                    one.send(self.report())
                except OSError:
                    pass
                kept.append(one)
                if len(kept) > 400:
                    kept.pop(self.random.randrange(len(kept))).close()
        except OSError as error:
            self.why = error
        for one in kept:
            one.close()


def start_forger(world, host, ports=()):
    """Writes to these ports through libfabric, or to each where somebody begins to listen."""
    return subprocess.Popen(["nsenter", f"--net=/run/netns/h{host}", os.path.join(world.build, "tests", "chaos_rank"),
                             "forge", ADDRESSES[host], *map(str, ports)], stdout=subprocess.DEVNULL,
                            stderr=subprocess.DEVNULL)


class Strangers:
    """At all ports of a job, also through libfabric: before there is a job, and when all ranks have connected."""

    def __init__(self, world, event):
        self.threads, self.forgers = [], [start_forger(world, host) for host in range(event.nodes)]

    def come(self, world, job):
        for host in sorted({rank.host for rank in job.ranks}):
            ports = listening(next(rank for rank in job.ranks if rank.host == host))
            if not ports:
                continue
            self.threads += [Stranger(host, ports, job.event.number * 8 + i) for i in range(2)]
            self.forgers.append(start_forger(world, host, ports))
        for thread in self.threads:
            thread.start()

    def stop(self):
        for thread in self.threads:
            thread.stopped = True
        for thread in self.threads:
            thread.join(10)
        for forger in self.forgers:
            forger.kill()
            forger.wait()

    def check(self):
        if not self.threads or any(thread.why or not thread.tries for thread in self.threads):
            raise Wrong("strangers could not connect: %s" % [thread.why for thread in self.threads])


# ---- Events: each starts from a job that works


def pick_victim(job):
    job.victim = job.ranks[job.event.random.randrange(RANKS)]
    return job.victim


def event_kill(world, job):
    """A rank is killed: the others name it, and go on without it where masks are enabled."""
    victim = pick_victim(job)
    victim.process.kill()
    job.faults(job.survivors(), {victim.number})
    if job.event.mask:
        job.recover(job.survivors(), [rank.number for rank in job.survivors()])
    else:
        job.give_up(job.survivors())


def event_stop(world, job):
    """A rank is stopped for longer than the deadline: the others name it; all go on when it is back."""
    victim = pick_victim(job)
    victim.process.send_signal(signal.SIGSTOP)
    job.faults(job.survivors(), {victim.number})
    victim.process.send_signal(signal.SIGCONT)
    job.wait(lambda rank: rank.said("fault") is not None, END_S, [victim])
    if int(victim.said("fault").split()[1]) == victim.number:
        raise Wrong(f"rank {victim.number} names itself: {victim.said('fault')}")
    job.recover(job.ranks, list(range(RANKS)))


def event_leave(world, job):
    """Low latency with masks: a rank is killed, or stopped for longer than the deadline. The others go on without it,
    with right results, or fail and name it; one that was stopped is told, and all that are left go on together."""
    victim, kills = pick_victim(job), job.event.random.randrange(3) == 0
    victim.process.send_signal(signal.SIGKILL if kills else signal.SIGSTOP)
    others, well = job.survivors(), [str(victim.number), None]
    job.wait(lambda rank: rank.said("masked") or rank.said("fault"), (2 * DEADLINE_MS + SLACK_MS) / 1000, others)
    job.faults([rank for rank in others if rank.said("fault")], {victim.number})
    for rank in others:
        if rank.said("masked") not in well:
            raise Wrong(f"rank {rank.number} has masked rank {rank.said('masked')}, not rank {victim.number}")
    time.sleep(job.event.random.uniform(0, 0.3))
    victim.process.send_signal(signal.SIGCONT)
    if not kills:
        job.wait(lambda rank: rank.said("fault"), END_S, [victim])
    time.sleep(job.event.random.uniform(0, 0.3))
    job.set(0, max(job.get(2 + rank.number) for rank in others) + 20)
    job.wait(lambda rank: rank.said("rests") is not None or rank.said("fault"), END_S, others)
    left = others if kills else job.ranks
    job.recover(left, [rank.number for rank in left])


def event_pause(world, job):
    """Ranks are stopped in turn, each for less than the deadline: nobody fails."""
    for _ in range(4):
        victim = job.event.random.choice(job.ranks)
        victim.process.send_signal(signal.SIGSTOP)
        time.sleep(job.event.random.uniform(0.05, 0.4))
        victim.process.send_signal(signal.SIGCONT)
        time.sleep(job.event.random.uniform(0, 0.1))
    job.finish()


def event_freeze(world, job):
    """All ranks of a node are frozen (by a cgroup where there is one) for less than the deadline, then for more."""
    frozen = [rank for rank in job.ranks if rank.host == job.ranks[-1].host] if job.event.nodes > 1 else job.ranks[-2:]
    others = [rank for rank in job.ranks if rank not in frozen]
    with world.freezer([rank.process.pid for rank in frozen]) as freeze:
        freeze(True)
        time.sleep(job.event.random.uniform(0.1, 0.4))
        freeze(False)
        time.sleep(0.2)
        if any(rank.said("fault") is not None for rank in job.ranks):
            raise Wrong("a rank failed though the others were frozen for less than the deadline")
        freeze(True)
        job.faults(others, {rank.number for rank in frozen})
        freeze(False)
        job.wait(lambda rank: rank.said("fault") is not None, 2 * DEADLINE_MS / 1000 + SLACK_MS / 1000, frozen)
    job.recover(job.ranks, list(range(RANKS)))


def event_cut(world, job):
    """The link is cut: each rank names one of the other node; all go on when it is back."""
    world.wire.cut(False)
    for host in (0, 1):
        job.faults([rank for rank in job.ranks if rank.host == host],
                   {rank.number for rank in job.ranks if rank.host != host})
    world.wire.cut(True)
    job.recover(job.ranks, list(range(RANKS)))


def event_blink(world, job):
    """The link is cut for less than TCP waits before it repeats something: nobody fails."""
    for _ in range(2):
        world.wire.cut(False)
        time.sleep(job.event.random.uniform(0.02, 0.15))
        world.wire.cut(True)
        time.sleep(1)  # what was lost has been repeated
    job.finish()


def event_slow(world, job):
    """The wire delays, loses and reorders frames: results are right."""
    world.wire.slow()
    time.sleep(1.5)
    job.finish()
    world.wire.good()


def event_strangers(world, job):
    """Strangers connect, stay, lie and forge arrivals: results are right, and nobody is accused."""
    strangers = Strangers(world, job.event)
    try:
        job.start(world)
        job.ready()
        strangers.come(world, job)
        time.sleep(2)
    finally:
        strangers.stop()
    strangers.check()
    job.finish()
    refused = [int(rank.said("refused") or 0) for rank in job.ranks]
    job.event.refused = sum(refused)
    # Ranks of the second node wait for those of the first to connect. Ranks in Python are not slow to.
    if job.event.nodes > 1 and not job.event.python and max(refused) < 2:
        raise Wrong("nothing that was forged has arrived: ranks refused %s" % refused)


def event_meeting(world, job):
    """Strangers are at the rendezvous while ranks meet."""
    strangers = Stranger(0, [job.port], job.event.number)
    strangers.start()
    job.start(world)
    job.ready()
    strangers.stopped = True
    strangers.join(10)
    job.finish()


EVENTS = {  # nodes, modes (with enable_mask: 1; 2: ranks will be masked)
    "kill": (event_kill, (1, 2), ("ll 0", "ht 0", "ht 1")),
    "stop": (event_stop, (1, 2), ("ll 0", "ht 0", "ht 1")),
    "leave": (event_leave, (1, 2), ("ll 2",)),
    "pause": (event_pause, (1, 2), ("ll 0", "ht 0", "ht 1")),
    "freeze": (event_freeze, (1, 2), ("ll 0", "ht 0", "ht 1")),
    "cut": (event_cut, (2,), ("ll 0", "ht 0", "ht 1")),
    "blink": (event_blink, (2,), ("ll 0", "ht 0")),
    "slow": (event_slow, (2,), ("ll 0", "ht 0")),
    "strangers": (event_strangers, (1, 2), ("ll 1", "ht 1")),
    "meeting": (event_meeting, (1, 2), ("ll 0", "ht 1")),
}


class Event:
    """Number N of a seed. The kinds take turns, so that a short run has all of them."""

    def __init__(self, options, number, kinds, python):
        self.number, self.random = number, random.Random(options.seed * 1000003 + number)
        self.kind = kinds[number % len(kinds)]
        self.function, nodes, modes = EVENTS[self.kind]
        turn = number // len(kinds)
        self.nodes = nodes[turn % len(nodes)]
        self.mode, mask = modes[(turn // len(nodes)) % len(modes)].split()
        self.mask = int(mask)
        self.python = python and (number + turn) % 4 == 3 and mask != "2"  # in C they look behind the first error
        self.secret = "of this job alone, %d" % number
        if self.kind == "leave" and self.random.randrange(2):  # a connection that nobody knows is not shut
            self.secret = "none"
        self.named = self.told = self.refused = 0

    def __str__(self):
        return "%s %s, %d node%s%s%s%s" % (self.kind, self.mode, self.nodes, "s" * (self.nodes > 1),
                                           ", masks" * (self.mask > 0), ", no secret" * (self.secret == "none"),
                                           ", Python" * self.python)


class Freezer:
    """A cgroup of version 1 or 2 with a freezer; signals where there is none."""

    def __init__(self, pids):
        self.pids, self.folder = pids, None

    def __enter__(self):
        for root, word in (("/sys/fs/cgroup/freezer", "freezer.state"), ("/sys/fs/cgroup", "cgroup.freeze")):
            folder = os.path.join(root, "epx-chaos-%d" % os.getpid())
            try:
                os.mkdir(folder)
                self.folder, self.file = folder, os.path.join(folder, word)
                for pid in self.pids:
                    with open(os.path.join(folder, "cgroup.procs"), "w", encoding="ascii") as file:
                        file.write(str(pid))
                with open(self.file, "r+", encoding="ascii"):
                    return self.set
            except OSError:
                self._remove()
        return self.set

    def set(self, frozen):
        if not self.folder:
            for pid in self.pids:
                os.kill(pid, signal.SIGSTOP if frozen else signal.SIGCONT)
            return
        words = ("FROZEN", "THAWED") if self.file.endswith("state") else ("1", "0")
        with open(self.file, "w", encoding="ascii") as file:
            file.write(words[0 if frozen else 1])

    def _remove(self):
        """Processes go back to where they were: a folder with some in it cannot be removed."""
        if not self.folder:
            return
        for pid in self.pids:
            try:
                with open(os.path.join(os.path.dirname(self.folder), "cgroup.procs"), "w", encoding="ascii") as file:
                    file.write(str(pid))
            except OSError:
                pass
        try:
            os.rmdir(self.folder)
        except OSError:
            pass
        self.folder = None

    def __exit__(self, *_):
        self.set(False)
        self._remove()


class World:
    def __init__(self, options):
        self.build, self.options, self.wire = os.path.abspath(options.build), options, Wire()
        self.work = tempfile.mkdtemp()
        self.python_rank = [options.python, os.path.join(HERE, "chaos_rank.py")] if options.python else None
        self.freezer = Freezer
        os.environ["PYTHONPATH"] = os.path.join(HERE, "..", "..", "python")

    @staticmethod
    def left_behind():
        """Files in shared memory, and processes of this namespace but for this one, its parent and the wire."""
        processes = []
        for path in glob.glob("/proc/[0-9]*"):
            try:
                with open(path + "/cmdline", encoding="utf-8", errors="replace") as file:
                    words = file.read().replace("\0", " ").strip()
            except OSError:
                continue
            if "chaos_rank" in words:
                processes.append(words)
        return sorted(glob.glob("/dev/shm/*")), sorted(processes)

    def play(self, event):
        before, job = self.left_behind(), Job(self, event)
        try:
            if event.function not in (event_meeting, event_strangers):  # these start it
                job.start(self)
                job.ready()
                time.sleep(event.random.uniform(0.02, 0.3))
            event.function(self, job)
        except Wrong as wrong:
            why = str(wrong) or "ranks did not end"
            said = [f"rank {rank.number}: {line}" for rank in job.ranks for line in rank.lines[-6:]]
        else:
            why, said = None, []
        finally:
            job.end()
            self.wire.cut(True)
            if event.kind == "slow":
                self.wire.good()
        after = self.left_behind()
        if not why and after != before:
            why = "left behind: %s" % [[x for x in new if x not in old] for old, new in zip(before, after)]
        return why, said


# ---- The run


def table(results):
    print("%-36s %6s %6s %14s %8s" % ("event", "times", "right", "named/told", "seconds"))
    for name in sorted(results):
        times, right, named, told, seconds = results[name]
        print("%-36s %6d %6d %14s %8.1f" % (name, times, right, "%d/%d" % (named, told) if told else "-", seconds))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", default="build")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=int(os.environ.get("EPX_TEST_SEED", time.time())) % 1000000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--events", type=int, default=1 << 30)
    parser.add_argument("--only", default=",".join(EVENTS))
    parser.add_argument("--python", default="")
    options = parser.parse_args()
    kinds, results, failures = options.only.split(","), {}, 0
    world, began, number = World(options), time.monotonic(), options.first
    print(f"chaos: seed {options.seed}, {options.seconds:.0f} s" + ("" if options.python else ", no Python ranks: "
          "there is no torch"), flush=True)
    while time.monotonic() - began < options.seconds and number < options.first + options.events:
        event, since = Event(options, number, kinds, bool(options.python)), time.monotonic()
        why, said = world.play(event)
        row = results.setdefault(str(event), [0, 0, 0, 0, 0.0])
        for i, value in enumerate((1, not why, event.named, event.told, time.monotonic() - since)):
            row[i] += value
        print("chaos: %d: %s: %s%s" % (number, event, "FAILED: " + why if why else "ok",
                                       ", %d forged arrivals were refused" % event.refused if event.refused else ""),
              flush=True)
        for line in said:
            print("    " + line)
        failures += bool(why)
        number += 1
    world.wire.stop()
    table(results)
    named, told = (sum(row[i] for row in results.values()) for i in (2, 3))
    print(f"chaos: {number - options.first} events, {failures} failed; {named} of {told} ranks named the culprit; "
          f"seed {options.seed}, {time.monotonic() - began:.0f} s")
    sys.exit(failures != 0 or (told and named < 0.99 * told))


main()
