# SPDX-License-Identifier: Apache-2.0
"""One process: descriptors of tensors, waits that end, processes that end."""

import ctypes
import inspect
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import unittest
import weakref
from typing import Any, Dict, List, Tuple
from unittest import mock

import numpy
import slow
import torch

import epx
from deep_ep import _elastic_meeting
from deep_ep._elastic_meeting import Meeting
from deep_ep.utils import testing
from deep_ep.utils._operations import Calls
from epx import _rounds as rounds
from epx import dlpack
from epx._abi import TensorStruct
from epx._library import load
from epx.tensors import describe


def described(tensor, dtype=None):
    """(dtype, shape, strides) of a descriptor."""
    struct = TensorStruct()
    describe("t", tensor, struct, dtype)
    n = struct.ndim
    return epx.DType(struct.dtype), list(struct.shape[:n]), list(struct.stride[:n])


class SharedRounds(unittest.TestCase):
    """Two threads of a process group, where an all-gather of one carries the part of the other."""

    def failed(self, exchange, expected, told):
        shared, one, other = rounds.Rounds(0, 2), rounds.Place(), rounds.Place()
        shared._begin(other, b"of another thread")  # which is about to wait
        with self.assertRaises(expected):
            shared.gather(one, b"lost", exchange)
        error = shared._wait_for(other.number, lambda _own: self.fail("waits for a part that is lost")).outcome
        self.assertIsInstance(error, epx.EpxError)
        self.assertIn(told, str(error))
        for place in (one, other):
            self.assertEqual(shared.gather(place, b"next", lambda own: [own, own]), [b"next", b"next"])

    def test_both_threads_are_told(self) -> None:
        self.failed(lambda _own: ["of the program", ()], epx.MismatchError, "all-gather of the program's own")

    def test_interrupted(self) -> None:
        self.failed(mock.Mock(side_effect=KeyboardInterrupt), KeyboardInterrupt, "interrupted in another")

    def test_lost_parts(self) -> None:
        """Rank 1 has gone on with a part that rank 0 never got: rank 0 begins again, and rank 1 is to follow."""
        shared, place = rounds.Rounds(0, 2), rounds.Place()
        with self.assertRaises(epx.PeerError):
            shared.gather(place, b"", lambda own: [own, (rounds._WHAT, False, {1: ((0, 1), b"next")})])
        self.assertEqual(place.at, (1, 0))
        self.assertEqual(shared.gather(place, b"0", lambda own: [own, (rounds._WHAT, False, {1: ((1, 0), b"1")})]),
                         [b"0", b"1"])


class Interrupts(unittest.TestCase):
    def test_in_callbacks(self) -> None:
        """Ctrl-C at random moments of calls of the C library that call back is KeyboardInterrupt, always."""
        boot, data, noise = epx.Bootstrap(0, 1, lambda data: [data]), ctypes.create_string_buffer(8), []
        at = ctypes.addressof(data)
        with mock.patch.object(sys, "unraisablehook", noise.append):
            for _ in range(100):
                timer = threading.Timer(0.001, os.kill, (os.getpid(), signal.SIGINT))
                with self.assertRaises(KeyboardInterrupt):
                    timer.start()
                    while boot.run(lambda: boot._callback(None, at, at, 8)) == 0:
                        pass
                timer.join()
                self.assertIs(signal.getsignal(signal.SIGINT), signal.default_int_handler)
        self.assertFalse(noise)

    def test_at_the_end_of_create(self) -> None:
        """The group was created, and is destroyed."""
        created = []

        def create(out, boot, config):
            status = epx._library.load().epx_group_create(out, boot, config)
            created.append(out._obj.value)
            os.kill(os.getpid(), signal.SIGINT)
            return status
        with mock.patch.object(epx.group, "load", lambda: mock.Mock(epx_group_create=create)):
            with self.assertRaises(KeyboardInterrupt):
                epx.Group(epx.Bootstrap(0, 1, lambda data: [data]), num_experts=1, max_tokens_per_rank=1,
                          max_hidden_bytes=16)
        self.assertEqual(epx._library.load().epx_group_stats_reset(created[0]), epx.Status.ARGUMENT)


class Meetings(unittest.TestCase):
    def test_many_ranks_ask_the_store_seldom(self) -> None:
        """2000 ranks that wait for one, half an hour: all together a thousand times a second."""
        meeting, store, clock = Meeting(epx.Bootstrap(0, 1, lambda data: [data]), {}), mock.Mock(), mock.Mock()

        def sleep(seconds):
            clock.monotonic.return_value += seconds
        store.check.return_value, clock.sleep.side_effect, clock.monotonic.return_value = False, sleep, 0.0
        meeting._nranks = 2000
        with mock.patch.object(_elastic_meeting, "time", clock):
            self.assertFalse(meeting._decided(store, 1800.0))
        self.assertLess(store.check.call_count, 950)

    def test_a_store_that_does_not_answer_set(self) -> None:
        """What a client sets is at the server before the answer to its next question, and no sooner."""
        server, parts, barrier, here = {}, [b"", b""], threading.Barrier(2), threading.local()

        class Client:
            def __init__(self):
                self.sent = {}

            def set(self, key, value):
                self.sent[key] = value

            def check(self, keys):
                server.update(self.sent)
                self.sent.clear()
                return all(key in server for key in keys)

            def delete_key(self, key):
                return server.pop(key, None) is not None

        found = [None, None]

        def meet(rank):
            def allgather(data):
                parts[rank] = data
                barrier.wait(60)
                gathered = list(parts)
                barrier.wait(60)
                return gathered
            here.store = Client()
            found[rank] = _elastic_meeting._common_store(epx.Bootstrap(rank, 2, allgather), {})[1] is here.store
        with mock.patch.object(_elastic_meeting, "_store", lambda: here.store):
            threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.assertEqual(found, [True, True])


class Kernels(unittest.TestCase):
    """bench_kineto's names on a GPU, in a profile with the names of docs/cuda.md. (ranks_elastic_parts has the CPU.)"""

    def found(self, kernels: List[Tuple[str, float]], calls: Dict[str, int], name: str, per_period: int = 1) -> Any:
        events = [types.SimpleNamespace(
            name="%s(launch_info)" % kernel, device_type=torch.autograd.DeviceType.CUDA,
            time_range=types.SimpleNamespace(start=at, elapsed_us=lambda us=us: us))
            for at, (kernel, us) in enumerate(kernels)]
        made = Calls(False)
        made._calls.update({method: [[1e-3]] * count for method, count in calls.items()})
        return testing._durations(types.SimpleNamespace(events=lambda: events), made, name, per_period)

    def test_launches_of_an_operation_are_added(self) -> None:
        kernels = [("epx_ht::notify", 5.0), ("epx_ht::dispatch", 10.0), ("epx_ht::dispatch", 20.0),
                   ("epx_ht::combine", 40.0), ("void cutlass::dispatch_rows", 900.0)] * 3
        calls = {"dispatch": 3, "combine": 3, "barrier": 3}
        for name, us in (("dispatch_impl", 30.0), ("dispatch_copy_epilogue_impl", 30.0), ("combine_impl", 40.0),
                         ("combine_reduce_epilogue_impl", 40.0), ("barrier", 5.0), ("send_impl", 30.0),
                         ("dispatch_rows", 900.0), ("no such kernel", 0)):
            self.assertAlmostEqual(self.found(kernels, calls, name), us / 1e6, msg=name)
        self.assertAlmostEqual(self.found(kernels, {}, "dispatch_impl"), 15e-6)  # replays of a graph: per launch

    def test_kernels_of_one_node(self) -> None:
        kernels = [("epx_ll_one_node::dispatch", 3.0), ("epx_ll_one_node::dispatch", 7.0),
                   ("epx_ll_one_node::combine_logfmt", 8.0)] * 2
        self.assertEqual([round(1e6 * t) for t in self.found(kernels, {}, "dispatch", 2)], [3, 7])
        self.assertAlmostEqual(self.found(kernels, {"low_latency_combine": 2}, "combine_impl"), 8e-6)

    def test_cpu_tensors_of_a_program_with_a_gpu(self) -> None:
        self.assertAlmostEqual(self.found([("sin", 1.0)], {"dispatch": 4}, "dispatch_impl"), 1e-3)
        with self.assertRaisesRegex(AssertionError, "expected one kernel, got"):
            self.found([("sin_a", 1.0), ("sin_b", 1.0)], {}, "sin")


class Descriptors(unittest.TestCase):
    def test_torch(self) -> None:
        pairs = ((torch.bfloat16, epx.DType.BF16), (torch.float16, epx.DType.FP16), (torch.float32, epx.DType.FP32),
                 (torch.float8_e4m3fn, epx.DType.FP8_E4M3), (torch.int32, epx.DType.INT32),
                 (torch.int64, epx.DType.INT64), (torch.uint8, epx.DType.UINT8))
        for dtype, expected in pairs:
            self.assertEqual(described(torch.empty(3, 4, dtype=dtype)), (expected, [3, 4], [4, 1]))
        self.assertEqual(described(torch.empty(3, 4).t()), (epx.DType.FP32, [4, 3], [1, 4]))

    def test_numpy(self) -> None:
        self.assertEqual(described(numpy.zeros((2, 3), numpy.float32)), (epx.DType.FP32, [2, 3], [0, 0]))
        self.assertEqual(described(numpy.zeros((2, 6), numpy.int64)[:, ::2]), (epx.DType.INT64, [2, 3], [6, 2]))
        self.assertEqual(described(numpy.zeros((2, 3), numpy.uint16), epx.DType.BF16)[0], epx.DType.BF16)

    def test_dlpack(self) -> None:
        class Wrapped:
            def __dlpack__(self):
                return torch.zeros(2, 8, dtype=torch.bfloat16)[:, ::2].__dlpack__()

        self.assertEqual(described(Wrapped()), (epx.DType.BF16, [2, 4], [8, 2]))

    def test_refused(self) -> None:
        for tensor, words in ((None, "NoneType"), ("x", "str"), (torch.zeros(1, dtype=torch.bool), "torch.bool"),
                              (numpy.zeros(1, numpy.float64), "float64"), (torch.zeros(()), "1 to 4 dimensions"),
                              (torch.zeros(1, 1, 1, 1, 1), "got 5"), (torch.zeros(3).to_sparse(), "strided"),
                              (torch.zeros(1, 1).expand(2, 3), "positive strides"),
                              (numpy.broadcast_to(numpy.float32(1), (2, 3)), "positive strides")):
            with self.assertRaisesRegex(epx.ArgumentError, "t: expected .*") as caught:
                described(tensor)
            self.assertIn(words, str(caught.exception))


class Compiled(unittest.TestCase):
    def test_torch_compile_leaves_deep_ep_alone(self) -> None:
        """torch.compile calls what is marked. Marking does not load torch.compile, which takes seconds."""
        loaded = "torch._dynamo" in sys.modules
        from deep_ep import Buffer, ElasticBuffer, HybridEPBuffer
        self.assertEqual("torch._dynamo" in sys.modules, loaded)
        for function in (Buffer.__init__, Buffer.dispatch, Buffer.get_low_latency_rdma_size_hint, ElasticBuffer.combine,
                         HybridEPBuffer.dispatch_with_permute):
            self.assertTrue(function._torchdynamo_disable, function)
        # Megatron looks for this argument.
        self.assertIn("fuse_permute_dispatch", inspect.signature(HybridEPBuffer.dispatch_with_permute).parameters)


class Owner:
    """Something that memory belongs to."""


class Exports(unittest.TestCase):
    def setUp(self) -> None:
        self.memory = torch.arange(24, dtype=torch.int32)
        self.export = dlpack.Export(self.memory.data_ptr(), (3, 2), (dlpack.CPU, 0), (0, 32), (1, 4))

    def test_owners_live_as_long_as_tensors(self) -> None:
        for kind in (dlpack.Keeper, dlpack.TorchKeeper):
            for _ in range(3):  # the same export again and again
                owner = Owner()
                alive = weakref.ref(owner)
                tensor = torch.from_dlpack(kind(owner).capsule(self.export))
                del owner
                view = tensor[1:]
                self.assertEqual(view.tolist(), [[1, 5], [2, 6]])
                del tensor
                self.assertIsNotNone(alive())
                del view
                self.assertIsNone(alive())

    def test_two_tensors_of_one_owner(self) -> None:
        owner = Owner()
        alive = weakref.ref(owner)
        keeper = dlpack.TorchKeeper(owner)
        other = dlpack.Export(self.memory.data_ptr() + 40, (14,), (dlpack.CPU, 0), (0, 32))
        first, second = (torch.from_dlpack(keeper.capsule(export)) for export in (self.export, other))
        del owner, keeper
        del first
        self.assertEqual(second.tolist(), list(range(10, 24)))
        self.assertIsNotNone(alive())
        del second
        self.assertIsNone(alive())

    def test_capsules_that_nobody_consumes(self) -> None:
        owner = Owner()
        alive = weakref.ref(owner)
        dlpack.TorchKeeper(owner).capsule(self.export)
        del owner
        self.assertIsNone(alive())

    def test_an_exception_passes(self) -> None:
        """A tensor that nobody else refers to goes while an exception is under way."""
        with mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="1"):
            group = epx.Group(num_experts=1, max_tokens_per_rank=1, max_hidden_bytes=16, alloc_bytes=1 << 16)
        with self.assertRaises(ZeroDivisionError):
            print(torch.from_dlpack(group.alloc(1 << 15)), 1 // 0)
        block = group.alloc(1 << 15)  # there is room: it went back
        self.assertEqual((1 << 15,), block.__array_interface__["shape"])
        for none in ("__cuda_array_interface__", "group_of_others"):
            self.assertFalse(hasattr(block, none))
        self.assertFalse(hasattr(epx.Block.__new__(epx.Block), "group"))  # its constructor was interrupted
        del block
        with mock.patch.object(group, "_blocks", FullSet()), self.assertRaises(MemoryError):
            group.alloc(3 << 14)  # fails behind the call
        group.alloc(3 << 14)
        group.destroy()
        self.assertFalse(group.alive)


class FullSet(set):
    """Takes nothing."""

    def add(self, _item) -> None:
        """Fails."""
        raise MemoryError


class Lifetimes(unittest.TestCase):
    """A group whose own stream is idle, with a stream that runs a function of the test."""

    def setUp(self) -> None:
        with mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="1"):
            self.group = epx.Group(num_experts=1, max_tokens_per_rank=1, max_hidden_bytes=16)
        self.stream = self.group.stream()

    def queue(self, function) -> None:
        self.called = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: function())
        self.assertEqual(0, self.group._lib.epx_stream_call(self.group.address, self.stream.address, self.called, None))

    def test_a_group_in_use_is_not_destroyed(self) -> None:
        errors = []

        def end() -> None:
            try:
                self.group.destroy()
            except epx.UsageError as error:
                errors.append(error)

        self.queue(end)
        self.stream.sync()
        self.assertEqual((len(errors), self.group.alive), (1, True))
        self.group.destroy()
        self.assertFalse(self.group.alive)

    def test_tensors_live_until_all_streams_are_done(self) -> None:
        held, seen = Owner(), []
        alive = weakref.ref(held)
        self.queue(lambda: (time.sleep(0.2), seen.append(alive() is not None)))
        self.group.hold(held, self.stream)
        del held
        self.group.destroy()
        self.assertEqual((seen, alive()), ([True], None))

    def behind(self, call) -> None:
        """Ctrl-C comes when the C library has queued something."""
        interrupted = mock.Mock(side_effect=KeyboardInterrupt)
        with mock.patch.object(epx.group, "check", interrupted), mock.patch.object(epx.handle, "check", interrupted):
            with self.assertRaises(KeyboardInterrupt):
                call()

    def test_interrupt_behind_the_query_of_a_mask(self) -> None:
        """The stream writes the mask later."""
        self.group.destroy()
        with mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="1"):
            self.group = epx.Group(num_experts=1, max_tokens_per_rank=1, max_hidden_bytes=16, enable_mask=1)
        self.stream = self.group.stream()
        go, out = threading.Event(), numpy.zeros(1, numpy.int32)
        alive = weakref.ref(out)
        self.queue(lambda: go.wait(20))
        self.behind(lambda: self.group.mask_query(out, self.stream))
        del out
        self.assertIsNotNone(alive())
        go.set()
        self.stream.sync()
        self.group.prune()
        self.assertIsNone(alive())

    def test_interrupt_behind_the_receive_half(self) -> None:
        """Its tensors live until it has run, also where the next operation is staged before."""
        handle = self.group.handle(epx.Mode.LOW_LATENCY, epx.Layout.EXPERT_MAJOR, 1)
        handle.update(torch.zeros(1, 1, dtype=torch.int64))

        def send() -> Any:
            out = torch.zeros(1, 1, 8, dtype=torch.bfloat16)
            handle.dispatch(torch.ones(1, 8, dtype=torch.bfloat16), out, send_only=True, stream=self.stream)
            return weakref.ref(out)
        go = threading.Event()
        self.queue(lambda: go.wait(20))
        first = send()
        self.behind(lambda: handle.complete(self.stream))
        second = send()
        self.assertIsNotNone(first())
        go.set()
        handle.complete(self.stream)
        self.stream.sync()
        self.group.prune()
        self.assertEqual((first(), second()), (None, None))

    def test_interrupt_behind_the_call_of_a_wait(self) -> None:
        """The stream posts the semaphore later, so that nobody else may get its memory."""
        waiter = epx.streams.CpuWaiter()
        semaphore = waiter._semaphore
        with mock.patch.object(epx.streams, "check", side_effect=KeyboardInterrupt):
            with self.assertRaises(KeyboardInterrupt):
                waiter.wait(self.group.address, None)
        self.assertTrue(any(kept is semaphore for kept in waiter._abandoned))
        semaphore = waiter._semaphore
        with self.assertRaises(epx.EpxError):
            waiter.wait(None, None)
        self.assertIs(semaphore, waiter._semaphore)  # nothing was queued

    def test_a_group_that_was_not_created(self) -> None:
        group = epx.Group.__new__(epx.Group)
        self.assertFalse(group.alive)
        self.group.destroy()


ALONE = dict(os.environ, RANK="0", WORLD_SIZE="1")


def start(code: str, **environment: str) -> subprocess.Popen:
    """A Python process that prints "ready" when it is there."""
    process = subprocess.Popen([sys.executable, "-c", code], env={**ALONE, **environment}, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def finish(process: subprocess.Popen) -> tuple:
    """(exit status, what it printed after "ready", its errors). Not communicate(), which does not see what readline()
    took."""
    with process:
        out, err = process.stdout.read(), process.stderr.read()
        return process.wait(60), out, err


class Interruptible(unittest.TestCase):
    def test_a_call_that_was_left_is_undone(self) -> None:
        """Ctrl-C while a group is created: when the call ends after all, its group is destroyed, once."""
        go, undone = threading.Event(), threading.Semaphore(0)
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with self.assertRaises(KeyboardInterrupt):
            epx.group._interruptible(lambda: 0 * go.wait(60), undone.release)
        self.assertFalse(undone.acquire(timeout=0.2))
        go.set()
        self.assertTrue(undone.acquire(timeout=60))
        self.assertFalse(undone.acquire(timeout=0.2))
        self.assertEqual(epx.group._interruptible(lambda: 0, undone.release), (0, ""))
        self.assertFalse(undone.acquire(timeout=0.1))

    def test_arguments_that_ctypes_refuses(self) -> None:
        """The error of the call reaches the caller, from whichever thread."""
        raised = []

        def join() -> None:
            try:
                epx.Group.join("ticket", "one", num_experts=1, max_tokens_per_rank=1, max_hidden_bytes=16)
            except Exception as error:  # pylint: disable=broad-except
                raised.append(error)
        join()
        thread = threading.Thread(target=join)
        thread.start()
        thread.join()
        self.assertEqual([type(error) for error in raised], [ctypes.ArgumentError] * 2)

    def test_creation_interrupted_at_every_line(self) -> None:
        """Ctrl-C at any line of a creation: its group is destroyed, once."""
        lib, noise = load(), []
        create, destroy = lib.epx_group_create, lib.epx_group_destroy
        made, ended = [], []
        threads = threading.active_count()

        def count_create(out, boot, struct):
            status = create(out, boot, struct)
            made.append(status)
            return status

        def count_destroy(address):
            ended.append(destroy(address))
            return ended[-1]

        def interrupted_at(line, boot):
            left = [line]

            def trace(frame, event, _):
                if frame.f_code.co_filename != epx.group.__file__ or frame.f_code.co_name in ("_collecting", "_tidy"):
                    return None  # of a garbage collection, at any line
                left[0] -= event == "line"
                if left[0] == 0:
                    raise KeyboardInterrupt
                return trace

            sys.settrace(trace)
            try:
                group = epx.Group(boot, num_experts=1, max_tokens_per_rank=1, max_hidden_bytes=16, device=1)
            except KeyboardInterrupt:
                return True
            finally:
                sys.settrace(None)
            group.destroy()
            return False

        with mock.patch.object(lib, "epx_group_create", count_create), \
                mock.patch.object(lib, "epx_group_destroy", count_destroy), \
                mock.patch.object(sys, "unraisablehook", noise.append), \
                mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="1"):
            for boot in (None, epx.Bootstrap(0, 1, lambda data: [data])):
                line = 1
                while interrupted_at(line, boot):
                    until = time.monotonic() + 60  # a call that was left goes on
                    while threading.active_count() > threads and time.monotonic() < until:
                        time.sleep(1e-3)
                    self.assertEqual(len(made), len(ended), "line %d" % line)
                    line += 1
                self.assertGreater(line, 20)
        self.assertEqual((set(made), set(ended), noise), ({0}, {0}, []))


class Processes(unittest.TestCase):
    def test_interrupt_while_ranks_meet(self) -> None:
        """Ctrl-C while a group waits for a rank that never comes."""
        process = start("""
import epx
print("ready", flush=True)
try:
    epx.Group(num_experts=2, max_tokens_per_rank=1, max_hidden_bytes=16)
except KeyboardInterrupt:
    print("interrupted", flush=True)
""", RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="9", EPX_BOOT_TIMEOUT_MS="30000")
        time.sleep(0.5)
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.stdout.readline(), "interrupted\n")
        self.assertLess(time.monotonic() - begin, slow.factor())  # a second, or more on a busy machine
        process.kill()
        finish(process)

    def test_groups_after_interrupts(self) -> None:
        """Ctrl-C while two of three ranks meet; then these two meet. The end of the old attempt is not theirs."""
        code = """
import os, epx
config = dict(num_experts=2, max_tokens_per_rank=1, max_hidden_bytes=16)
print("ready", flush=True)
try:
    epx.Group(**config)
except KeyboardInterrupt:
    print("interrupted", flush=True)
os.environ["WORLD_SIZE"] = "2"
with epx.Group(**config) as group:
    print(group.info.nranks, flush=True)
"""
        most, ranks = str(int(2000 * slow.factor())), []
        for _ in range(4):  # jobs: which of its threads goes first differs
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = str(free.getsockname()[1])
            ranks += [start(code, RANK=str(r), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                            EPX_BOOT_TIMEOUT_MS=most) for r in range(2)]
        time.sleep(0.5)
        for process in ranks:
            process.send_signal(signal.SIGINT)
        for process in ranks:
            status, out, err = finish(process)
            self.assertEqual((status, out), (0, "interrupted\n2\n"), err)

    def test_exit_with_everything_alive(self) -> None:
        """Groups, handles and memory that nobody destroyed do not trouble the end of a program."""
        process = start("""
import epx, torch
group = epx.Group(num_experts=1, max_tokens_per_rank=4, max_hidden_bytes=64)
handle = group.handle(epx.Mode.LOW_LATENCY, epx.Layout.EXPERT_MAJOR, 1)
kept = torch.from_dlpack(group.alloc(4096))
event = group.event()
event.record()
print("ready", flush=True)
""")
        self.assertEqual(finish(process), (0, "", ""))

    def test_init_dist(self) -> None:
        """[E] 1: deep_ep.utils.envs.init_dist, of two nodes with a rank each; of one where NCCL has one GPU."""
        code = """
import sys, torch, torch.distributed as dist
from deep_ep.utils.envs import get_global_seed, get_local_seed, init_dist
print("ready", flush=True)
rank, ranks, group = init_dist(0, 1, seed=5)
print(rank, ranks, group.size(), dist.get_backend() == ("nccl" if torch.cuda.device_count() else "gloo"),
      torch.get_default_dtype(), torch.empty(1).device.type == ("cuda" if torch.cuda.is_available() else "cpu"),
      get_global_seed(), get_local_seed(), flush=True)
dist.barrier()
"""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        nodes = 1 if torch.cuda.device_count() == 1 else 2
        all_nodes = [start(code, RANK=str(node), WORLD_SIZE=str(nodes), MASTER_PORT=port) for node in range(nodes)]
        for node, process in enumerate(all_nodes):
            status, out, err = finish(process)
            self.assertEqual((status, out), (0, "%d %d %d True torch.bfloat16 True 5 %d\n" % (
                node, nodes, nodes, 5 + node)), err)

    def test_fork(self) -> None:
        process = start("""
import os, epx
group = epx.Group(num_experts=1, max_tokens_per_rank=4, max_hidden_bytes=64)
handle = group.handle(epx.Mode.LOW_LATENCY, epx.Layout.EXPERT_MAJOR, 1)
block = group.alloc(100)
print("ready", flush=True)
child = os.fork()
if child == 0:
    try:
        group.sync()
    except epx.UsageError as error:
        print(error, flush=True)
    del block, handle
    group.destroy()
    raise SystemExit(0)
assert os.waitpid(child, 0)[1] == 0
group.sync()
group.destroy()
""")
        status, out, err = finish(process)
        self.assertEqual((status, err), (0, ""))
        self.assertRegex(out, r"USAGE: the group was created by process \d+ before it forked this one, which cannot "
                              r"use EPX: start it by exec .*, or fork before the first group")


if __name__ == "__main__":
    unittest.main()
