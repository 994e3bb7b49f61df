# SPDX-License-Identifier: Apache-2.0
"""Groups: sets of ranks that exchange tokens."""

import atexit
import contextlib
import ctypes
import gc
import operator
import os
import sys
import threading
import time
import weakref
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple

from . import _abi
from ._abi import Device, DType
from ._library import check, load
from ._owner import GroupInfo
from .bootstrap import Bootstrap
from .errors import ArgumentError, EpxError, Status, make_error
from .handle import HandleOwner, queue
from .memory import HeapOwner
from .streams import poll, stream_address
from .tensors import describe

_living: "weakref.WeakValueDictionary[int, Group]" = weakref.WeakValueDictionary()  # by id()
_ending: "Set[Group]" = set()  # that nobody refers to any more, while their work is under way
_MOMENT_S = 1.0  # for work that other ranks have to join, where nobody asked to wait: in finalizers, and at exit


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
            whole = operator.index(value) if hasattr(value, "__index__") else value  # ctypes takes no integers of NumPy
            setattr(struct, name, value.encode() if isinstance(value, str) else whole)
        except (TypeError, ValueError):
            raise ArgumentError(
                Status.ARGUMENT, "config.%s: expected %s, got %r" % (
                    name, "text" if name == "net" else "an integer", value)) from None
    return struct


def memory(nranks: int, **config: Any) -> Dict[str, int]:
    """The bytes that a group with this configuration would use on each rank. Local: needs no other rank."""
    info = _abi.MemoryInfoStruct()
    check(load().epx_group_memory(ctypes.byref(_make_config(config)), nranks, ctypes.byref(info)))
    return {name: getattr(info, name) for name in info.names()}


def _interruptible(call: Callable[[], int], undo: Callable[[], Any]) -> Tuple[int, str]:
    """Runs a call that may block for long on a separate thread, so that Ctrl-C can interrupt the wait for it. What such
    a call still does, nobody has: undo() follows its end. A caller that Ctrl-C interrupts behind that calls it too."""
    result: List[Any] = []
    left: List[bool] = []
    lock = threading.Lock()

    def run() -> None:
        try:
            status = call()
            ended: Any = status, load().epx_last_error().decode("utf-8", "replace") if status else ""
        except Exception as error:  # arguments that ctypes refuses
            ended = error
        with lock:
            result.append(ended)
            late = bool(left)
        if late:
            undo()

    def outcome() -> Tuple[int, str]:
        if isinstance(result[0], Exception):
            raise result[0]
        return result[0]

    if threading.current_thread() is not threading.main_thread():
        run()  # Python delivers signals to the main thread only
        return outcome()
    thread = threading.Thread(target=run, daemon=True, name="epx")
    try:
        thread.start()
        while thread.is_alive():
            thread.join(0.1)
        return outcome()
    except BaseException:
        with lock:
            left.append(True)
            ended = bool(result)
        if ended:
            undo()
        raise


class Group(HandleOwner, HeapOwner):
    """A set of ranks that exchange tokens. Creating one is collective; all ranks pass the same configuration.

    `config` holds the fields of ``epx_group_config``: num_experts, max_tokens_per_rank, max_hidden_bytes, max_topk,
    modes, device, and so on. Without a bootstrap, the environment variables of the launcher are used (torchrun, mpirun,
    srun, `epx run`), or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    """

    was_destroyed = False
    last_error: Optional[ErrorInfo] = None  # of a group that was destroyed: that of its operations, if there was one

    def __init__(self, bootstrap: Optional[Bootstrap] = None, **config: Any) -> None:
        boot = ctypes.byref(bootstrap.struct) if bootstrap is not None else None
        self._open(bootstrap, config, lambda out, struct: load().epx_group_create(out, boot, struct))

    @classmethod
    def join(cls, ticket: str, rank: int, timeout: float = 0.0, **config: Any) -> "Group":
        """Takes the place of a rank that has ended, with the same configuration as the others. Waits, at most
        `timeout` seconds (0: the group's timeout), until the members admit this process in their next error_clear()
        or mask_clean()."""
        group = cls.__new__(cls)
        text = ctypes.create_string_buffer(ticket.encode())
        milliseconds = min(int(timeout * 1000), 2**31 - 1)
        group._open(None, config, lambda out, struct: load().epx_group_join(out, text, rank, struct, milliseconds))
        return group

    def ticket(self) -> str:
        """Text by which another process can join(). It is a secret unless the job has one: docs/security.md."""
        text = ctypes.create_string_buffer(_abi.TICKET_BYTES)
        check(self._lib.epx_group_ticket(self.address, text, _abi.TICKET_BYTES))
        return text.value.decode()

    def _open(self, bootstrap: Optional[Bootstrap], config: Dict[str, Any], call: Callable[[Any, Any], int]) -> None:
        HandleOwner.__init__(self)
        self._closing = False
        self.masks = bool(config.get("enable_mask"))  # True: ranks may be masked
        self._bootstrap = bootstrap  # the C library may call it until the group is destroyed
        struct = _make_config(config)
        out = ctypes.c_void_p()
        _tidy()  # this group may need the memory
        destroys = [self._lib.epx_group_destroy]  # once, by the thread that takes it

        def undo() -> None:
            if out.value and destroys:  # None: the call has not ended, or has failed
                with contextlib.suppress(IndexError):
                    destroys.pop()(out.value)

        try:
            self._check_collective(lambda: call(ctypes.byref(out), ctypes.byref(struct)), undo)
            self._take(out.value, struct)
        except BaseException:  # Ctrl-C, say, also behind the end of the call
            undo()
            self._address = None
            raise

    def _take(self, address: Optional[int], struct: _abi.GroupConfigStruct) -> None:
        self._address = address
        self._pid = os.getpid()
        self.info = self._query()
        self.device = self.info.device
        self.device_index = struct.device_index
        self.alloc_bytes = memory(1, num_experts=1, max_tokens_per_rank=1, max_hidden_bytes=16, ranks_per_node=1,
                                  alloc_bytes=struct.alloc_bytes)["alloc_bytes"]
        _living[id(self)] = self
        self._find_heap()

    def _check_collective(self, call: Callable[[], int], undo: Callable[[], None] = lambda: None) -> None:
        status, message = (self._bootstrap.run(call), "") if self._bootstrap is not None else _interruptible(call, undo)
        if status:
            raise make_error(status, message or self._lib.epx_last_error().decode("utf-8", "replace"))

    def _query(self) -> GroupInfo:
        struct = _abi.GroupInfoStruct()
        check(self._lib.epx_group_query(self.address, ctypes.byref(struct)))
        values = {name: _text(getattr(struct, name)) for name in GroupInfo._fields}
        values["device"] = Device(values["device"])
        return GroupInfo(**values)

    # ---- Lifetime

    def destroy(self, wait: bool = True) -> None:
        """Waits for queued work, at most for its deadlines, and frees the group. If memory of alloc() is still
        referenced, the heap is freed with the last reference. TimeoutExpired: the group is destroyed, but a thread has
        not returned from the network's library. After any other error, such as UsageError while another thread is
        inside a call of the group, the group is as it was.

        Without `wait`, for finalizers: where work on the CPU takes longer than a second, the group is destroyed after
        its end, when Python collects garbage, creates a group or exits."""
        if self._address is None or self._closing:
            return
        if not wait and self.device == Device.CPU and not self._idle_soon():
            _living[id(self)] = self  # a finalizer comes after weak references have ended
            _ending.add(self)
            return
        self._wait_for_held()  # tensors of the heap among it would keep the group for ever
        if self._address is None or self._closing:  # by another thread, or by a finalizer of what was held
            return
        self._closing = True
        try:
            if not self._blocks:
                self._finish()
        except BaseException:  # Ctrl-C, say: the next call goes on
            self._closing = self._address is None
            raise

    def _idle(self) -> bool:
        """True if no work is under way."""
        self.prune()
        return not self._held and self._lib.epx_stream_query(self._address, None) != Status.NOT_READY

    def _idle_soon(self) -> bool:
        limit = time.monotonic() + _MOMENT_S
        poll(lambda: self._idle() or time.monotonic() > limit)
        return self._idle()

    def _heap_unused(self) -> None:
        if self._closing:
            self._finish()

    def _finish(self) -> None:
        """Waits for queued work and frees the group. Ctrl-C interrupts the wait."""
        address = self._address
        if address is None:
            return
        if self._lib.epx_group_error(address, None) == 0:
            self._wait(None)
        self.last_error = self.error()
        with self._pruning:
            self._address, self._why, self.was_destroyed = None, "was destroyed", True
            status = self._lib.epx_group_destroy(address)
        if status not in (Status.OK, Status.TIMEOUT):  # the group is as it was
            self._address, self._closing, self.was_destroyed = address, False, False
        else:  # not before: work of other streams may have used what was held; its events went with the group
            self._events.clear()
            self._held.clear()
            self._bootstrap = None
        check(status)

    def _finish_at_exit(self) -> None:
        """Like _finish(), for a process that exits. Queued work that waits for other ranks gets one second; after that
        the group is not destroyed, and the operating system frees it. Destroying is worth this wait because between
        nodes it delivers the last writes."""
        limit = time.monotonic() + _MOMENT_S
        while self._lib.epx_stream_query(self.address, None) == Status.NOT_READY:
            if time.monotonic() > limit:
                self._address, self._why = None, "was abandoned when Python exited"
                return
            time.sleep(1e-3)
        self._finish()

    def _forked(self) -> None:
        self._address = None
        self._why = ("was created by process %d before it forked this one, which cannot use EPX: start it by exec "
                     "(multiprocessing's \"spawn\"), or fork before the first group" % self._pid)
        self._held.clear()
        self._events.clear()

    def __del__(self) -> None:
        self.destroy(wait=False)

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_: Any) -> None:
        self.destroy()

    # ---- Masks, errors, statistics

    def mask_query(self, out: Any, stream: Any = None) -> None:
        """Writes the mask into an int32 tensor [ranks] on the device."""
        struct = _abi.TensorStruct()
        keep = describe("out", out, struct)
        if struct.dtype != DType.INT32 or struct.ndim != 1 or struct.shape[0] != self.info.nranks:
            raise ArgumentError(Status.ARGUMENT, "out: expected int32 [%d], got dtype %s and shape %s" % (
                self.info.nranks, DType(struct.dtype).name, list(struct.shape[:struct.ndim])))
        queue(self._lib.epx_mask_query, (self.address, struct.data, stream_address(self, stream)),
              self.hold, (keep, stream))

    def mask_update(self, mask: List[int], stream: Any = None) -> None:
        """Sets the mask: 1 = active, 0 = masked (EPX neither sends to the rank nor waits for it)."""
        if len(mask) != self.info.nranks or any(m not in (0, 1) for m in mask):
            raise ArgumentError(
                Status.ARGUMENT, "mask: expected %d values of 0 or 1, got %r" % (self.info.nranks, mask))
        values = (ctypes.c_int32 * len(mask))(*mask)
        check(self._lib.epx_mask_update(self.address, ctypes.addressof(values), stream_address(self, stream)))

    def mask_clean(self, stream: Any = None) -> None:
        """Makes all ranks active again. Collective over the active ranks and those that return."""
        number = stream_address(self, stream)
        self._check_collective(lambda: self._lib.epx_mask_clean(self.address, number))

    def error(self) -> Optional[ErrorInfo]:
        """The first asynchronous error since the last clear, or None. Does not block."""
        struct = _abi.ErrorInfoStruct()
        if self._lib.epx_group_error(self.address, ctypes.byref(struct)) == 0:
            return None
        values = {name: _text(getattr(struct, name)) for name in ErrorInfo._fields}
        values["status"] = Status(values["status"])
        return ErrorInfo(**values)

    def error_clear(self) -> None:
        """Clears the error. If it ended an operation, every rank must call this; the group is then usable again."""
        self._check_collective(lambda: self._lib.epx_group_error_clear(self.address))

    def abort(self, why: Status = Status.SYSTEM) -> None:
        """Ends the group's operations on all ranks, at once: this rank cannot take part in what the others wait for,
        after Ctrl-C say. They raise PeerError, which names this rank; error_clear() on all of them goes on. Local."""
        check(self._lib.epx_group_abort(self.address, int(why)))

    def order_with(self, other: "Group") -> None:
        """Runs the operations of both groups in the order of their calls, on whatever streams. Local."""
        check(self._lib.epx_group_order_with(self.address, other.address))

    def stats(self) -> Dict[str, int]:
        """The counters since creation or the last reset: operations, rows, bytes, waits."""
        struct = _abi.StatsStruct()
        check(self._lib.epx_group_stats(self.address, ctypes.byref(struct)))
        return {name: getattr(struct, name) for name in struct.names()}

    def stats_reset(self) -> None:
        """Sets the counters to zero."""
        check(self._lib.epx_group_stats_reset(self.address))


def _groups() -> List[Group]:
    # Not by an iterator: another thread may create a group meanwhile.
    return [group for group in (ref() for ref in _living.valuerefs()) if group is not None]


def _tidy() -> None:
    """Lets go of what groups held for work that has run, and destroys those whose end was put off until then. Not on a
    GPU: this is any thread, and a call of CUDA would change its current device."""
    for group in _groups():
        if group.device == Device.CPU:
            group.prune()
            if group in _ending and (not group.alive or group._idle()):
                _ending.discard(group)
                _end(group.destroy)


def _end(destroy: Callable[[], None]) -> None:
    try:
        destroy()
    except EpxError as error:  # the other groups have to be destroyed too
        print("epx: a group was not destroyed: %s" % error, file=sys.stderr)


def _collecting(phase: str, info: Dict[str, Any]) -> None:
    # A group and tensors of its heap that it holds keep each other. Python does not see that: torch has the tensors.
    if phase == "start" and info["generation"] > 0:
        _tidy()


def _after_fork() -> None:
    for group in _groups():
        group._forked()
    _ending.clear()


def _at_exit() -> None:
    for group in _groups():
        if group.alive:
            _end(group._finish_at_exit)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
gc.callbacks.append(_collecting)
