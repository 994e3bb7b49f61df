# SPDX-License-Identifier: Apache-2.0
"""Groups: all ranks that exchange tokens."""

import atexit
import collections
import ctypes
import math
import os
import threading
import time
import weakref
from typing import Any, Callable, Deque, Dict, List, NamedTuple, Optional, Set, Tuple

from . import _abi
from ._abi import Device, DType, Layout, Mode, TensorStruct
from ._library import check, load
from .bootstrap import Bootstrap
from .errors import ArgumentError, Status, UsageError, make_error
from .handle import Handle
from .memory import Block
from .streams import CpuWaiter, Event, Stream, poll, stream_address
from .tensors import describe

_living: "weakref.WeakSet[Group]" = weakref.WeakSet()


class GroupInfo(NamedTuple):
    """What a group is: its rank, its nodes, its device."""

    rank: int
    nranks: int
    node: int
    nnodes: int
    ranks_per_node: int
    num_experts: int
    local_experts: int
    device: Device
    num_agents: int
    timeout_ms: int
    max_recv_tokens: int
    device_name: str
    net_name: str


class ErrorInfo(NamedTuple):
    """The first asynchronous error of a group since the last clear."""

    status: Status
    rank: int
    peer: int
    expected: int
    seen: int
    phase: str
    message: str


def _text(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _make_config(config: Dict[str, Any]) -> _abi.GroupConfigStruct:
    struct = _abi.GroupConfigStruct()
    known = struct.names()
    for name, value in config.items():
        if name not in known:
            raise ArgumentError(
                Status.ARGUMENT, "config: expected names of %s, got %s" % (", ".join(known), name))
        try:
            setattr(struct, name, value.encode() if isinstance(value, str) else value)
        except (TypeError, ValueError):
            raise ArgumentError(
                Status.ARGUMENT, "config.%s: expected %s, got %r" % (
                    name, "text" if name == "net" else "an integer", value)) from None
    return struct


def memory(nranks: int, **config: Any) -> Dict[str, int]:
    """Bytes that a group with this configuration would take on each rank; needs no other rank."""
    info = _abi.MemoryInfoStruct()
    check(load().epx_group_memory(ctypes.byref(_make_config(config)), nranks, ctypes.byref(info)))
    return {name: getattr(info, name) for name in info.names()}


def _interruptible(call: Callable[[], int]) -> Tuple[int, str]:
    """Runs a call that may block for long on a thread of its own, so that Ctrl-C ends the wait for it."""
    result: List[Any] = []

    def run() -> None:
        status = call()
        result.append((status, load().epx_last_error().decode("utf-8", "replace") if status else ""))

    if threading.current_thread() is not threading.main_thread():
        run()  # no signal arrives here
        return result[0]
    thread = threading.Thread(target=run, daemon=True, name="epx")
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    return result[0]


class Group:
    """A set of ranks that exchange tokens. Creating one is collective; all ranks give the same configuration.

    `config` are the fields of ``epx_group_config``: num_experts, max_tokens_per_rank, max_hidden_bytes, max_topk,
    modes, device, and so on. Without a bootstrap the launcher's variables are read (torchrun,
    mpirun, srun, `epx run`), or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    """

    def __init__(self, bootstrap: Optional[Bootstrap] = None, **config: Any) -> None:
        self._address: Optional[int] = None
        self._why = "was not created"
        self._closing = False
        self._blocks: Set[int] = set()  # addresses; blocks end in any thread, and each step here is one that cannot be split
        self._held: Deque[Tuple[Event, Any]] = collections.deque()
        self._events: List[Event] = []
        self._lost_handles: List[Tuple[int, Any]] = []  # to be destroyed, and what their staged operations use
        self._waiter: Optional[CpuWaiter] = None
        # Do operations keep their tensors alive until they have run? Callers whose memory is freed in the order of a
        # stream, as torch's on a GPU, may say no.
        self.holds = True
        self.masks = bool(config.get("enable_mask"))  # may ranks be masked?
        self._lib = load()
        self._bootstrap = bootstrap  # the C library may call it as long as the group lives
        struct = _make_config(config)
        out = ctypes.c_void_p()
        boot = ctypes.byref(bootstrap.struct) if bootstrap is not None else None
        self._check_collective(lambda: self._lib.epx_group_create(ctypes.byref(out), boot, ctypes.byref(struct)))
        self._address = out.value
        self._pid = os.getpid()
        self.info = self._query()
        self.device = self.info.device
        self.device_index = struct.device_index
        _living.add(self)

    def _check_collective(self, call: Callable[[], int]) -> None:
        status, message = (call(), "") if self._bootstrap is not None else _interruptible(call)
        if status and not message:
            message = self._lib.epx_last_error().decode("utf-8", "replace")
        error = self._bootstrap.take_error() if self._bootstrap is not None else None
        if error is not None:
            raise error
        if status:
            raise make_error(status, message)

    def _query(self) -> GroupInfo:
        struct = _abi.GroupInfoStruct()
        check(self._lib.epx_group_query(self.address, ctypes.byref(struct)))
        values = {name: _text(getattr(struct, name)) for name in GroupInfo._fields}
        values["device"] = Device(values["device"])
        return GroupInfo(**values)

    # ---- Life

    @property
    def address(self) -> int:
        """The group as the C library sees it. Raises UsageError where it has gone: destroyed, or left behind by fork."""
        if self._address is None:
            raise UsageError(Status.USAGE, "the group %s" % self._why)
        return self._address

    @property
    def alive(self) -> bool:
        """May it be used? Not after destroy(), nor in a process forked from the one that created it."""
        return self._address is not None

    def destroy(self) -> None:
        """Waits for queued work and frees all. Memory of alloc() that is still referenced keeps the heap until it goes."""
        if self._address is None or self._closing:
            return
        self._closing = True
        if not self._blocks:
            self._finish()

    def _finish(self) -> None:
        """Waits for queued work, which Ctrl-C may end, and frees all."""
        address = self._address
        if address is None:
            return
        if self._lib.epx_group_error(address, None) == 0:
            self._wait(None)
        self._events.clear()
        self._held.clear()
        self._address, self._why = None, "was destroyed"
        self._lib.epx_group_destroy(address)
        self._bootstrap = None

    def _finish_at_exit(self) -> None:
        """As _finish(), for a process that is going: work that waits for others gets a second, and is left to the system
        then. Between nodes the last writes are delivered by destroying the group, hence the trouble."""
        limit = time.monotonic() + 1.0
        while self._lib.epx_stream_query(self.address, None) == Status.NOT_READY:
            if time.monotonic() > limit:
                self._address, self._why = None, "was left when Python ended"
                return
            time.sleep(1e-3)
        self._finish()

    def _forked(self) -> None:
        self._address = None
        self._why = "was created by process %d before it forked this one: create a new group here" % self._pid
        self._held.clear()
        self._events.clear()

    def __del__(self) -> None:
        if getattr(self, "_address", None) is not None:
            self._finish()

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_: Any) -> None:
        self.destroy()

    # ---- Memory

    def alloc(self, nbytes: int) -> Block:
        """Memory that every rank of the node can reach: tensors there are exchanged without a copy.

        It is freed when the block and all that was made from it (``torch.from_dlpack(block)``) are gone.
        """
        out = ctypes.c_void_p()
        check(self._lib.epx_alloc(self.address, nbytes, ctypes.byref(out)))
        address = out.value or 0
        self._blocks.add(address)
        return Block(self, address, nbytes)

    def register(self, tensor: Any, stream: Any = None) -> bool:
        """Registers the tensor's memory; True if a high-throughput combine reads its rows in place, in any number.

        Memory of alloc() is always read in place. Other memory is exported to the ranks of the node, which import it in
        their next call; a later register() then returns True. Does not wait.
        """
        struct, in_place = TensorStruct(), ctypes.c_int()
        keep = describe("tensor", tensor, struct)
        shape, stride = struct.shape[:struct.ndim], struct.stride[:struct.ndim]
        if 0 in shape:
            return True
        if not any(stride):  # contiguous
            elements = math.prod(shape)
        else:
            elements = 1 + sum((n - 1) * step for n, step in zip(shape, stride))
        check(self._lib.epx_register(self.address, struct.data, elements * self._lib.epx_dtype_size(struct.dtype),
                                     stream_address(self, stream), ctypes.byref(in_place)))
        del keep
        return bool(in_place.value)

    def _release(self, address: int) -> None:
        self._blocks.discard(address)  # before it can be given out again
        if self._address is not None:
            self._lib.epx_free(self._address, address)
            if self._closing and not self._blocks:
                self._finish()

    # ---- Waiting

    def stream(self) -> Stream:
        """A new stream of the group's device."""
        return Stream(self)

    def event(self) -> Event:
        """A new event."""
        return Event(self)

    def sync(self, stream: Any = None) -> None:
        """Waits for the work queued on a stream (None: the group's own). Raises the asynchronous error, if there is one."""
        number = stream_address(self, stream)
        self._wait(number)
        self._prune()
        check(self._lib.epx_stream_sync(self.address, number))

    def _wait(self, stream: Optional[int]) -> None:
        if self.device != Device.CPU:
            poll(lambda: self._lib.epx_stream_query(self.address, stream) != Status.NOT_READY)
            return
        waiter, self._waiter = self._waiter or CpuWaiter(), None  # another thread makes its own
        waiter.wait(self.address, stream)
        self._waiter = waiter

    def hold(self, objects: Any, stream: Any = None) -> None:
        """Keeps objects alive until what is queued on the stream now has run. Does nothing where `holds` is False."""
        if not self.holds:
            return
        event = self._events.pop() if self._events else Event(self)
        check(self._lib.epx_event_record(event.address, stream_address(self, stream)))
        self._held.append((event, objects))
        self._prune()

    def _prune(self) -> None:
        held = self._held
        while held and self._lib.epx_event_query(held[0][0].address) != Status.NOT_READY:
            self._events.append(held.popleft()[0])

    # ---- Handles, masks, errors, statistics

    def handle(self, mode: Mode, layout: Layout, topk: int, expert_alignment: int = 0, compact: bool = False) -> Handle:
        """A handle: one routing. Local; `compact` puts local experts first in received top-k rows."""
        self._end_lost_handles()
        return Handle(self, mode, layout, topk, expert_alignment, compact)

    def _end_lost_handles(self) -> None:
        while self._lost_handles:
            address, staged = self._lost_handles.pop()
            if staged is not None:
                # The other ranks wait for its receive half.
                self._lib.epx_complete(address, None)
            self._lib.epx_handle_destroy(address)  # waits for it

    def mask_query(self, out: Any, stream: Any = None) -> None:
        """Writes the mask into a tensor of the device, int32 [ranks]."""
        from .tensors import describe

        struct = _abi.TensorStruct()
        keep = describe("out", out, struct)
        if struct.dtype != DType.INT32 or struct.ndim != 1 or struct.shape[0] != self.info.nranks:
            raise ArgumentError(Status.ARGUMENT, "out: expected int32 [%d], got dtype %s and shape %s" % (
                self.info.nranks, DType(struct.dtype).name, list(struct.shape[:struct.ndim])))
        number = stream_address(self, stream)
        check(self._lib.epx_mask_query(self.address, struct.data, number))
        self.hold(keep, stream)

    def mask_update(self, mask: List[int], stream: Any = None) -> None:
        """Sets the mask: 1 = active, 0 = neither sent to nor waited for."""
        if len(mask) != self.info.nranks or any(m not in (0, 1) for m in mask):
            raise ArgumentError(
                Status.ARGUMENT, "mask: expected %d values of 0 or 1, got %r" % (self.info.nranks, mask))
        values = (ctypes.c_int32 * len(mask))(*mask)
        check(self._lib.epx_mask_update(self.address, ctypes.addressof(values), stream_address(self, stream)))

    def mask_clean(self, stream: Any = None) -> None:
        """All ranks active again. Collective over the active ranks and those that come back."""
        number = stream_address(self, stream)
        self._check_collective(lambda: self._lib.epx_mask_clean(self.address, number))

    def error(self) -> Optional[ErrorInfo]:
        """The first asynchronous error since the last clear, or None. Never blocks."""
        struct = _abi.ErrorInfoStruct()
        if self._lib.epx_group_error(self.address, ctypes.byref(struct)) == 0:
            return None
        values = {name: _text(getattr(struct, name)) for name in ErrorInfo._fields}
        values["status"] = Status(values["status"])
        return ErrorInfo(**values)

    def error_clear(self) -> None:
        """Clears the error. After one that ended an operation every rank calls it, and the group may be used again."""
        self._check_collective(lambda: self._lib.epx_group_error_clear(self.address))

    def stats(self) -> Dict[str, int]:
        """Counters since creation or the last reset: operations, rows, bytes, waits."""
        struct = _abi.StatsStruct()
        check(self._lib.epx_group_stats(self.address, ctypes.byref(struct)))
        return {name: getattr(struct, name) for name in struct.names()}

    def stats_reset(self) -> None:
        """Sets the counters to zero."""
        check(self._lib.epx_group_stats_reset(self.address))


def _after_fork() -> None:
    for group in list(_living):
        group._forked()


def _at_exit() -> None:
    for group in list(_living):
        if group.alive:
            group._finish_at_exit()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
