# SPDX-License-Identifier: Apache-2.0
"""All-gathers over a process group: of several threads, of ranks that make different calls, of groups of others."""

import datetime
import os
import signal
import threading
import time
from typing import Any, List
from unittest import mock

import deep_ep
import epx
import torch
import torch.distributed as dist
from epx import _rounds
from suite import World
from torch.distributed import distributed_c10d as c10d


def there_and_back(world: World, buffer: deep_ep.ElasticBuffer, hidden: int) -> bool:
    """True if a token that goes to the next rank and back is as it was."""
    x = torch.full((2, hidden), float(world.rank + hidden), dtype=torch.bfloat16)
    idx = torch.full((2, 1), (world.rank + 1) % world.nranks)
    recv, _idx, _weights, handle, _event = buffer.dispatch(x, idx, num_experts=world.nranks, num_max_tokens_per_rank=2)
    return torch.equal(buffer.combine(recv, handle)[0], x)


def test_two_threads_of_one_process_group(world: World) -> None:
    """Each thread makes groups, on each rank in another order: nothing that ranks exchange meets the other thread's."""
    world.only("cpu")
    buffers = [deep_ep.ElasticBuffer(dist.group.WORLD, 2 << 20, explicitly_destroy=True) for _ in range(2)]
    right: List[bool] = []

    def work(i: int) -> None:
        time.sleep(0.02 * ((i + world.rank) % 2))
        right.extend(there_and_back(world, buffers[i], hidden) for hidden in (64, 128))
    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 4, right
    for buffer in buffers:
        buffer.destroy()
    world.meet()


def test_bootstrap_of_a_group_of_others(world: World) -> None:
    """What dist.new_group() gives to ranks that are not in the group."""
    try:
        epx.bootstrap.from_torch(dist.GroupMember.NON_GROUP_MEMBER)
        raise AssertionError("expected ArgumentError")
    except epx.ArgumentError as error:
        assert "a process group that this rank is in" in str(error), error


def custom_group(world: World, rank: int, known: bool) -> dist.ProcessGroup:
    """As OpenRLHF and SGLang make groups of processes whose default groups differ: torch's own functions have no ranks
    of it, or, if `known`, those of the default group."""
    store = dist.PrefixStore("test_custom_groups/%d" % known, c10d._get_default_store())
    group, _store = c10d._new_process_group_helper(
        world.nranks, rank, [], "gloo", store, group_name="custom%d" % known, timeout=datetime.timedelta(seconds=60))
    if known:
        c10d._world.pg_group_ranks[group] = {r: r for r in range(world.nranks)}
    return group


def test_custom_groups(world: World) -> None:
    """The rank in a group is the one that the group says."""
    world.only("cpu")
    rank = world.nranks - 1 - world.rank
    for known in (False, True):
        group = custom_group(world, rank, known)
        boot = epx.bootstrap.from_torch(group)
        assert (boot.rank, boot.nranks) == (rank, world.nranks), (boot.rank, boot.nranks)
        assert boot.allgather(b"%d" % rank) == [b"%d" % r for r in range(world.nranks)]
        buffer = deep_ep.ElasticBuffer(group, 2 << 20, explicitly_destroy=True)
        assert buffer.rank_idx == rank and there_and_back(world, buffer, 64)
        world.meet()
        buffer.destroy()
        c10d._world.pg_group_ranks[group] = {r: r for r in range(world.nranks)}  # else it cannot be destroyed
        dist.destroy_process_group(group)  # torch's profiler looks at all groups


def test_ranks_that_use_different_bootstraps(world: World) -> None:
    """All are told whom they wait for, and go on."""
    boots = [epx.bootstrap.from_torch() for _ in range(2)]
    parts = [b"%d" % rank for rank in range(world.nranks)]
    assert all(boot.allgather(parts[world.rank]) == parts for boot in boots)
    most, _rounds._MOST_IDLE_ROUNDS = _rounds._MOST_IDLE_ROUNDS, 3  # other tests may have left a thread
    try:
        boots[world.rank == 0].allgather(b"lost")
        raise AssertionError("expected MismatchError")
    except epx.MismatchError as error:
        lack = ", ".join(str(r) for r in range(1, world.nranks)) if world.rank == 0 else "0"
        assert "rank %s not the one that rank %d makes" % (lack, world.rank) in str(error), error
    finally:
        _rounds._MOST_IDLE_ROUNDS = most
    assert all(boot.allgather(parts[world.rank]) == parts for boot in boots)


def test_an_interrupted_all_gather(world: World) -> None:
    """Rank 0 leaves an all-gather (Ctrl-C) after its part has gone to the others. They are told when it comes with the
    next one, and start over; nobody takes parts of the one for parts of the other."""
    boots = [epx.bootstrap.from_torch() for _ in range(2)]
    parts = [b"%d" % rank for rank in range(world.nranks)]
    assert all(boot.allgather(parts[world.rank]) == parts for boot in boots)
    if world.rank == 0:
        with mock.patch.object(_rounds, "time", mock.Mock(sleep=mock.Mock(side_effect=KeyboardInterrupt))):
            try:
                boots[0].allgather(b"lost")  # the others are in calls of boots[1]
                raise AssertionError("expected KeyboardInterrupt")
            except KeyboardInterrupt:
                pass
    assert boots[1].allgather(parts[world.rank]) == parts
    if world.rank:
        try:
            raise AssertionError("expected PeerError, got %r" % boots[0].allgather(b"in vain"))
        except epx.PeerError as error:
            assert "rank 0 has left the all-gather that rank %d is in" % world.rank in str(error), error
    assert all(boot.allgather(parts[world.rank]) == parts for boot in boots)


def test_ctrl_c_in_torch(world: World) -> None:
    """Ctrl-C while rank 0 waits in torch's all-gather, for ranks that come later: it takes part to the end, and the
    process group can be used as before."""
    boot = epx.bootstrap.from_torch()
    parts = [b"%d" % rank for rank in range(world.nranks)]
    assert boot.allgather(parts[world.rank]) == parts
    store, gather = dist.PrefixStore("test_ctrl_c_in_torch", c10d._get_default_store()), dist.all_gather_object

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        store.set("came", "1")
    timer = threading.Timer(0.1, interrupt)

    def interrupted(*arguments: Any) -> None:
        if timer.ident is None:
            timer.start()
        gather(*arguments)
    if world.rank:
        store.wait(["came"])
        assert boot.allgather(parts[world.rank]) == parts
    else:
        with mock.patch.object(dist, "all_gather_object", interrupted):
            try:
                boot.allgather(parts[0])
                raise AssertionError("expected KeyboardInterrupt")
            except KeyboardInterrupt:
                pass
        timer.join()
    world.meet()
    try:
        assert boot.allgather(parts[world.rank]) == parts
    except epx.PeerError:
        assert world.rank
        assert boot.allgather(parts[world.rank]) == parts


def interrupt_once(world: World, boot: epx.Bootstrap, between: bool, number: int = 1) -> Any:
    """Ctrl-C on rank 0, in an all-gather over torch, or between that one and the next; 1 is the next one."""
    gather, count = dist.all_gather_object, [0]

    def interrupted(*arguments: Any) -> None:
        gather(*arguments)
        count[0] += 1
        if world.rank == 0 and count[0] == number:
            if between:
                boot._interrupts._came = signal.SIGINT
            else:
                os.kill(os.getpid(), signal.SIGINT)
    return mock.patch.object(dist, "all_gather_object", interrupted)


def test_ctrl_c_in_the_first_dispatch(world: World) -> None:
    """Rank 0 has met the others and leaves while they create a group. It dispatches again, they raise PeerError and do
    so too: it does not wait for them at the next meeting, while they wait for it in torch."""
    world.only("cpu")
    for between in (False, True):
        buffer = deep_ep.ElasticBuffer(dist.group.WORLD, 2 << 20, num_cpu_timeout_secs=20, explicitly_destroy=True)
        begin = time.monotonic()
        with interrupt_once(world, buffer._engine.bootstrap, between):
            try:
                there_and_back(world, buffer, 64)
                raise AssertionError("expected an exception")
            except (KeyboardInterrupt, epx.PeerError) as error:
                assert isinstance(error, KeyboardInterrupt) == (world.rank == 0), error
        assert there_and_back(world, buffer, 64) and there_and_back(world, buffer, 128)
        assert time.monotonic() - begin < 20
        world.meet()
        buffer.destroy()


def test_ctrl_c_at_the_end_of_the_first_dispatch(world: World) -> None:
    """The others have the group, and rank 0 has not. All recover, and meet."""
    world.only("cpu")
    deadline = -(-int(world.deadline(1500)) // 1000)
    buffers = [deep_ep.ElasticBuffer(dist.group.WORLD, 2 << 20, num_gpu_timeout_secs=deadline, explicitly_destroy=True)
               for _ in range(2)]
    with mock.patch.object(dist, "all_gather_object", side_effect=dist.all_gather_object) as gathers:
        assert there_and_back(world, buffers[0], 64)
    with interrupt_once(world, buffers[1]._engine.bootstrap, False, gathers.call_count):
        try:
            there_and_back(world, buffers[1], 64)
            raise AssertionError("expected an exception")
        except (KeyboardInterrupt, epx.TimeoutExpired, epx.PeerError) as error:
            assert isinstance(error, KeyboardInterrupt) == (world.rank == 0), error
    world.meet()
    buffers[1].recover()
    try:
        assert there_and_back(world, buffers[1], 64)
    except epx.PeerError:
        assert world.rank and there_and_back(world, buffers[1], 64)
    world.meet()
    for buffer in buffers:
        buffer.destroy()
