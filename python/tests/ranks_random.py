# SPDX-License-Identifier: Apache-2.0
"""Random programs of every buffer, on one node and on several. A failure names its seed: EPX_TEST_SEED runs the
programs from that one on, EPX_TEST_SCALE times as many."""

import os
from typing import Any, Iterable

import torch.distributed as dist
from random_buffer import High, Low
from random_elastic import Program
from random_hybrid import Hybrid
from suite import World, environment

PROGRAMS = 2  # of each kind: on one node, and on two
STEPS = 8


def run(world: World, *kinds: Any, seeds: Iterable[int] = ()) -> None:
    """Programs of one kind, or of several that take turns."""
    first = int(os.environ.get("EPX_TEST_SEED", "1"))
    for seed in seeds or range(first, first + PROGRAMS * int(os.environ.get("EPX_TEST_SCALE", "1"))):
        nodes = 2 if world.nodes and seed % 2 == 0 and world.nranks % 2 == 0 else 1
        cut = {} if nodes == 1 else {"EPX_RANKS_PER_NODE": str(world.nranks // nodes), "EPX_NET": "ofi:tcp"}
        with environment(**cut):
            try:
                programs = [kind(world, seed + 100000 * i, dist.group.WORLD, world.nranks, world.nranks // nodes)
                            for i, kind in enumerate(kinds)]
                for i in range(STEPS):
                    programs[i % len(programs)].step()
                for program in programs:
                    program.finish()
            except BaseException as failure:
                raise AssertionError("EPX_TEST_SEED=%d on %d ranks, %d nodes" % (
                    seed, world.nranks, nodes)) from failure
        world.meet()


def test_elastic_programs(world: World) -> None:
    run(world, Program)


def test_high_throughput_programs(world: World) -> None:
    run(world, High)


def test_low_latency_programs(world: World) -> None:
    run(world, Low)


def test_rows_of_odd_bytes(world: World) -> None:
    """FP8 of 200 channels: on a GPU, lanes of a warp copied unequal parts of a row, and some lost the next address."""
    run(world, Low, seeds=(6005,))


def test_hybrid_programs(world: World) -> None:
    run(world, Hybrid)


def test_programs_that_take_turns(world: World) -> None:
    run(world, Program, High, Low, Program)
