# SPDX-License-Identifier: Apache-2.0
"""Runs the tests that need ranks: every function test_* of the modules named, on all ranks at once.

    torchrun --nproc-per-node 8 suite.py [MODULE...] [-k PART[,PART...]] [--leave-out PART]
    python suite.py --fork 8 ...

With --fork the ranks are children of a process that has imported all modules: the imports of torch and of frameworks
take 6 s of CPU time, once instead of on each rank. Not for CUDA tensors. Prints a line per test and "N passed, M
failed, K skipped, L not run" at the end; goes on after a failure, with other buffers, until there are three, on a GPU
until there is one.
EPX_TEST_DEVICE=cuda runs them on CUDA tensors, all ranks on one GPU unless there are more; EPX_TEST_NODES=0 leaves out
two nodes, which need libfabric; EPX_TEST_STACKS_S=8 prints the Python stacks of every rank whose test takes longer than
8 s.
"""

import argparse
import contextlib
import datetime
import faulthandler
import gc
import importlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from typing import Any, Callable, Dict, Iterator, List, Tuple
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import deep_ep  # noqa: E402
from deep_ep._engine import Engine  # noqa: E402
from deep_ep import _memory, _streams  # noqa: E402
import epx  # noqa: E402
import slow  # noqa: E402

MOST_FAILURES = 3
MODULES = sorted(name[:-3] for name in os.listdir(os.path.dirname(os.path.abspath(__file__)))
                 if name.startswith("ranks_"))


class Stopped(Exception):
    """A rank has failed."""


class Skipped(Exception):
    """A test that cannot run here; every rank says so."""


class World:
    """The ranks, and buffers that tests share."""

    def __init__(self) -> None:
        self.rank, self.nranks = dist.get_rank(), dist.get_world_size()
        self.device = torch.device(os.environ.get("EPX_TEST_DEVICE", "cpu"))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.rank % torch.cuda.device_count())
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._buffers: Dict[Any, deep_ep.Buffer] = {}
        self._abandoned: List[deep_ep.Buffer] = []
        self._nodes = os.environ.get("EPX_TEST_NODES", "1") != "0"

    @property
    def nodes(self) -> bool:
        """True where tests use two nodes."""
        return self._nodes

    def buffer(self) -> deep_ep.Buffer:
        """All ranks, one node."""
        return self._shared("one", {})

    def node_buffer(self) -> deep_ep.Buffer:
        """All ranks, two nodes cut out of this machine, over libfabric's tcp."""
        if not self._nodes:
            raise Skipped("EPX_TEST_NODES=0")
        return self._shared("two", {"EPX_RANKS_PER_NODE": str(self.nranks // 2), "EPX_NET": "ofi:tcp"})

    def buffers(self) -> Iterator[deep_ep.Buffer]:
        """One after the other, as the environment that makes nodes is set for each."""
        yield self.buffer()
        if self._nodes:
            yield self.node_buffer()

    def _shared(self, name: str, environment: Dict[str, str]) -> deep_ep.Buffer:
        # The environment is read when groups are made, at first use: it stays as long as the test.
        for key in ("EPX_RANKS_PER_NODE", "EPX_NET"):
            os.environ.pop(key, None)
        os.environ.update(environment)
        if name not in self._buffers:
            self._buffers[name] = deep_ep.Buffer(
                dist.group.WORLD, 1 << 28, 0, low_latency_mode=True, explicitly_destroy=True)
        return self._buffers[name]

    def deadline(self, ms: int) -> str:
        """EPX_TIMEOUT_MS for a test that waits for a deadline, or for none: longer on a busy machine, the same on all
        ranks. Collective."""
        said = [slow.factor() if self.rank == 0 else 0.0]
        dist.broadcast_object_list(said, 0)
        return str(int(ms * said[0]))

    def close(self) -> None:
        """Ends the shared buffers."""
        for buffer in self._buffers.values():
            buffer.destroy()
        self._buffers.clear()

    def abandon(self) -> None:
        """After a failure, in which ranks may have left each other alone: the next test gets buffers of its own."""
        self._abandoned += self._buffers.values()
        self._buffers.clear()

    def meet(self, why: str = "") -> None:
        """A barrier. A rank that has failed says why, and all ranks raise Stopped."""
        said: List[Any] = [None] * self.nranks
        dist.all_gather_object(said, why)
        bad = [(r, text) for r, text in enumerate(said) if text]
        # Ranks that waited in vain are not the ones to ask.
        bad.sort(key=lambda item: "TIMEOUT:" in str(item[1]) or "PEER:" in str(item[1]))
        if bad:
            raise Stopped("on %d ranks; rank %d: %s" % (len(bad), *bad[0]))

    def skip(self, why: str) -> None:
        """Ends the test, which cannot run here."""
        raise Skipped(why)

    def only(self, device: str) -> None:
        """The rest of the test is for tensors of one kind of device."""
        if self.device.type != device:
            self.skip("needs %s tensors" % device)

    def to(self, tensor: torch.Tensor) -> torch.Tensor:
        """To the device under test."""
        return tensor.to(self.device)


@contextlib.contextmanager
def as_in_a_capture() -> Iterator[None]:
    """Calls that wait on the host find the current stream captured, also of the CPU."""
    for engine in [engine for engine in gc.get_objects() if type(engine) is Engine]:
        engine._last_high = None  # whose capture is not looked at otherwise, as it is on the CPU
    with mock.patch.object(_streams, "capture_of", lambda device: lambda: True):
        yield


def refused_in_a_capture(call: Callable[[], Any], instead: str) -> None:
    """The call is refused there at once, with a sentence that has `instead`."""
    with as_in_a_capture():
        try:
            call()
        except epx.UsageError as error:
            assert "expected no capture" in str(error) and instead in str(error), error
        else:
            raise AssertionError("expected an error about " + instead)


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Sets variables for a while."""
    old = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in old.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextlib.contextmanager
def reads(*tensors: torch.Tensor) -> Iterator[List[Any]]:
    """Calls on CPU tensors say that their work reads these tensors, or writes to them: on a GPU, torch has to know.
    Gives what they say that they return."""
    said: List[Any] = []
    returned: List[Any] = []
    finish = _streams.HostLaunch.finish

    def note(launch: Any, inputs: Any, outputs: Any) -> Any:
        inputs, outputs = list(inputs), list(outputs)
        said.extend(inputs)
        returned.extend(outputs)
        return finish(launch, inputs, outputs)
    with mock.patch.object(_streams.HostLaunch, "finish", note):
        yield returned
    assert all(any(one is tensor for one in said) or tensor.is_cuda for tensor in tensors)


@contextlib.contextmanager
def as_on_a_gpu(world: "World") -> Iterator[None]:
    """CPU tensors, with the rules for memory of a GPU's heap."""
    if world.device.type != "cpu":
        yield
        return
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(_memory, "streams_of", _memory.Streams))
        patches.enter_context(mock.patch.object(_memory, "stream_of", mock.Mock()))
        patches.enter_context(mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False))
        patches.enter_context(mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda _index: 0, create=True))
        yield


@contextlib.contextmanager
def refused(what: str) -> Iterator[None]:
    """What is done here ends with a ValueError whose text has `what`."""
    try:
        yield
    except ValueError as error:
        assert what in str(error), error
    else:
        raise AssertionError("expected an error about " + what)


def collect(names: List[str], part: str, leave_out: str) -> List[Tuple[str, Callable[[World], None]]]:
    """The tests, in the order of the files and of their lines."""
    tests = []
    for name in names:
        module = importlib.import_module(name)
        tests += [("%s.%s" % (name, attr), value) for attr, value in vars(module).items()
                  if attr.startswith("test_") and callable(value)
                  and any(one in "%s.%s" % (name, attr) for one in part.split(","))
                  and not (leave_out and leave_out in attr)]
    return tests


def errors_of_groups() -> str:
    """On a GPU an operation that has failed shows as a wrong result; its group knows why."""
    errors = [group.error() for group in gc.get_objects() if type(group) is epx.Group and group.alive]
    return "".join("%s\n" % error.message for error in errors if error is not None)


def run_one(world: World, name: str, test: Callable[[World], None]) -> str:
    """Runs a test: "", or why it was skipped. All ranks learn of a failure at their next meeting, and stop."""
    for key in ("EPX_RANKS_PER_NODE", "EPX_NET"):
        os.environ.pop(key, None)
    why = skipped = ""
    late = float(os.environ.get("EPX_TEST_STACKS_S", "0"))
    if late > 0:
        faulthandler.dump_traceback_later(late)
    try:
        test(world)
    except Stopped:
        raise
    except Skipped as reason:
        skipped = str(reason)
    except BaseException:
        why = "FAILED %s\n%s%s" % (name, traceback.format_exc(), errors_of_groups())
    world.meet(why)
    faulthandler.cancel_dump_traceback_later()
    return skipped


def preload(modules: List[str]) -> None:
    """Imports what tests import when they run. A framework that is not here is skipped by its tests."""
    if "ranks_megatron" not in modules:
        return
    for name in ("megatron.core.models.gpt.moe_module_specs", "megatron.core.transformer.moe.fused_a2a",
                 "transformers.models.qwen3_moe.modeling_qwen3_moe"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def start_rank(rank: int, nranks: int, port: int) -> int:
    """A child with the variables of a launcher; 0 in it."""
    pid = os.fork()
    if pid == 0:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(nranks), LOCAL_WORLD_SIZE=str(nranks),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return pid


def fork_ranks(nranks: int) -> Tuple[int, int]:
    """(rank, 0) in each of nranks children, (-1, exit status) here once all have ended. The first rank that fails ends
    the others."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    sys.stdout.flush()
    children: Dict[int, int] = {}
    for rank in range(nranks):
        pid = start_rank(rank, nranks, port)
        if pid == 0:
            return rank, 0
        children[pid] = rank
    result = 0
    while children:
        pid, status = os.wait()
        rank, code = children.pop(pid, -1), os.waitstatus_to_exitcode(status)
        if rank < 0 or code == 0:
            continue
        if not result:
            print("suite: rank %d ended with status %d" % (rank, code), file=sys.stderr)
            time.sleep(1)  # the others have failed too, and say why
            for other in children:
                os.kill(other, signal.SIGTERM)
        result = result or 1
    return -1, result


def run_all(tests: List[Tuple[str, Callable[[World], None]]]) -> int:
    """The exit status of a rank."""
    world, passed, skipped, failed = World(), 0, 0, 0
    for name, test in tests:
        start, reason = time.perf_counter(), ""
        try:
            reason = run_one(world, name, test)
            line = "skipped %s: %s" % (name, reason) if reason else \
                "ok %s (%.2f s)" % (name, time.perf_counter() - start)
        except Stopped as stopped:  # on all ranks
            line = str(stopped)
            failed += 1
            world.abandon()
        else:
            passed, skipped = passed + (not reason), skipped + bool(reason)
        if world.rank == 0:
            print(line, flush=True)
        if failed == (1 if world.device.type == "cuda" else MOST_FAILURES):
            break  # on a GPU ranks may have left each other alone in the middle of a meeting
    if not failed:
        world.close()
    if world.rank == 0:
        print("%d passed, %d failed, %d skipped, %d not run" % (
            passed, failed, skipped, len(tests) - passed - failed - skipped), flush=True)
    world.meet("")
    return 0 if passed and passed + skipped == len(tests) else 1


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("modules", nargs="*")
    parser.add_argument("-k", dest="part", default="")
    parser.add_argument("--leave-out", default="")
    parser.add_argument("--fork", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("EPX_TIMEOUT_MS", "30000")
    modules = args.modules or MODULES
    tests = collect(modules, args.part, args.leave_out)
    where: Dict[str, Any] = {}
    if args.fork:
        preload(modules)
        folder = tempfile.mkdtemp(prefix="epx-suite-")
        rank, code = fork_ranks(args.fork)
        if rank < 0:
            shutil.rmtree(folder)
            return code
        where = {"init_method": "file://%s/store" % folder, "rank": rank, "world_size": args.fork}
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120), **where)
    return run_all(tests)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not through the end of the process group: torch 2.6 joins gloo's thread there with Python's lock held, for which
    # that thread may wait, to free the tensors of the last exchange.
    os._exit(code)
