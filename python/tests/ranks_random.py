# SPDX-License-Identifier: Apache-2.0
"""Random programs of every buffer, on one node and on several. A failure names its seed: EPX_TEST_SEED runs the
programs from that one on, EPX_TEST_SCALE times as many."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Iterable, Iterator, List

import torch
import torch.distributed as dist
from random_autograd import Layers
from random_buffer import High, Low, SecondBatch
from random_elastic import Program
from random_gathers import Sessions
from random_graph import ElasticGraphs, LowGraphs
from random_hybrid import Hybrid
from ranks_elastic_gathers import late_stream
from seeds import drawn
from suite import World, environment

PROGRAMS = 2  # of each kind: on one node, and on two
STEPS = 8


@contextlib.contextmanager
def nodes_of(world: World, seed: int, ranks: int) -> Iterator[int]:
    """Ranks per node. A failure in it names the seed."""
    nodes = 2 if world.nodes and seed % 2 == 0 and ranks % 2 == 0 else 1
    cut = {} if nodes == 1 else {"EPX_RANKS_PER_NODE": str(ranks // nodes), "EPX_NET": "ofi:tcp"}
    with environment(**cut):
        try:
            yield ranks // nodes
        except BaseException as failure:
            raise AssertionError("EPX_TEST_SEED=%d on %d ranks, %d nodes" % (seed, ranks, nodes)) from failure


def make(world: World, seed: int, per_node: int, kinds: Iterable[Any]) -> List[Any]:
    """A program of each kind."""
    programs: List[Any] = []
    for i, kind in enumerate(kinds):
        programs.append(SecondBatch(programs[0], seed + 100000 * i) if kind is SecondBatch else kind(
            world, seed + 100000 * i, dist.group.WORLD, world.nranks, per_node))
    return programs


def run(world: World, *kinds: Any, seeds: Iterable[int] = ()) -> None:
    """Programs of one kind, or of several that take turns, each in a thread of its own."""
    for seed in seeds or drawn(PROGRAMS):
        with nodes_of(world, seed, world.nranks) as per_node, contextlib.ExitStack() as stack:
            programs = make(world, seed, per_node, kinds)
            calls: List[Callable[..., Any]] = [lambda step: step()]
            if len(programs) > 1:
                threads = [stack.enter_context(ThreadPoolExecutor(1, initializer=use, initargs=(world,)))
                           for _ in programs]
                calls = [lambda step, thread=thread: thread.submit(step).result() for thread in threads]
            for i in range(STEPS):
                calls[i % len(calls)](programs[i % len(programs)].step)
            for call, program in reversed(list(zip(calls, programs))):
                call(program.finish)
        world.meet()


def use(world: World) -> None:
    """A new thread uses the device of the others."""
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)


def test_elastic_programs(world: World) -> None:
    run(world, Program)


def test_high_throughput_programs(world: World) -> None:
    run(world, High)


def test_low_latency_programs(world: World) -> None:
    run(world, Low)


def test_rows_of_odd_bytes(world: World) -> None:
    """FP8 of 200 channels: on a GPU, lanes of a warp copied unequal parts of a row, and some lost the next address."""
    run(world, Low, seeds=(6005,))


def test_groups_of_one_buffer(world: World) -> None:
    """A top-k above 11 needs a second group: combines of both on two streams had no room on a GPU that ranks share."""
    run(world, Low, seeds=(95200, 95409))


def test_hybrid_programs(world: World) -> None:
    run(world, Hybrid)


def test_gradients(world: World) -> None:
    """Layers between groups of 1 to 4 ranks, side by side; on a GPU, one after the other."""
    for ranks in range(1, min(4, world.nranks) + 1):
        parts = [list(range(first, min(first + ranks, world.nranks))) for first in range(0, world.nranks, ranks)]
        groups = [dist.new_group(part) for part in parts]
        for seed in drawn(PROGRAMS):
            for i, (part, group) in enumerate(zip(parts, groups)):
                if world.rank in part:
                    train(world, seed, 100000 * ranks + 10000 * i, group)
                if world.device.type == "cuda":
                    world.meet()
            world.meet()


def train(world: World, seed: int, more: int, group: Any) -> None:
    """Layers between the ranks of a group."""
    with nodes_of(world, seed, group.size()) as per_node:
        layers = Layers(world, seed + more, group, per_node)
        for _ in range(STEPS // 2):
            layers.step()
        layers.finish()


def test_all_gather_sessions(world: World) -> None:
    run(world, Sessions)


def test_all_gather_sessions_behind_a_late_stream(world: World) -> None:
    """With the rules for memory of a GPU's heap, and all-gathers that run when somebody waits for them."""
    world.only("cpu")
    with late_stream():
        run(world, Sessions, seeds=drawn(1, 10))


def test_low_latency_graphs(world: World) -> None:
    run(world, LowGraphs, seeds=drawn(PROGRAMS if world.device.type == "cuda" else 1, 2))


def test_elastic_graphs(world: World) -> None:
    run(world, ElasticGraphs, seeds=drawn(PROGRAMS if world.device.type == "cuda" else 1, 2))


def test_programs_that_take_turns(world: World) -> None:
    run(world, Program, High, Low, Program, seeds=drawn(1, 2))


class Steady(Low):
    """A low-latency program without masks, beside which another one can use its buffer."""

    shrinks = False


def test_two_batches(world: World) -> None:
    """Two threads take turns with one buffer, as frameworks do that overlap two batches."""
    run(world, Steady, SecondBatch, seeds=drawn(1))


def test_programs_at_the_same_time(world: World) -> None:
    """Two threads, each with a buffer and a process group of its own, and nothing that keeps them in step."""
    world.only("cpu")  # on a GPU kernels of one process would wait behind each other, on each rank in another order
    groups = [dist.new_group(), dist.new_group()]
    for seed in drawn(1):
        with nodes_of(world, seed, world.nranks) as per_node:
            failures: List[BaseException] = []

            def work(i: int, kind: Any) -> None:
                try:
                    program = kind(world, seed + 100000 * i, groups[i], world.nranks, per_node)
                    for _ in range(STEPS // 2):
                        program.step()
                    program.finish()
                except BaseException as failure:
                    failures.append(failure)
            threads = [threading.Thread(target=work, args=(i, kind)) for i, kind in enumerate(
                ((High, Low), (Program, Low), (Program, High))[seed % 3])]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if failures:
                raise failures[0]
        world.meet()
