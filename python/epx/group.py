# SPDX-License-Identifier: Apache-2.0
"""Groups: all ranks that exchange tokens."""

import atexit
import ctypes
import os
import threading
import time
import weakref
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from . import _abi
from ._abi import Device, DType
from ._library import check, load
from ._owner import GroupInfo
from .bootstrap import Bootstrap
from .errors import ArgumentError, Status, make_error
from .handle import HandleOwner
from .memory import HeapOwner
from .streams import stream_address
from .tensors import describe

_living: "weakref.WeakSet[Group]" = weakref.WeakSet()


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


class Group(HandleOwner, HeapOwner):
    """A set of ranks that exchange tokens. Creating one is collective; all ranks give the same configuration.

    `config` are the fields of ``epx_group_config``: num_experts, max_tokens_per_rank, max_hidden_bytes, max_topk,
    modes, device, and so on. Without a bootstrap the launcher's variables are read (torchrun,
    mpirun, srun, `epx run`), or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    """

    def __init__(self, bootstrap: Optional[Bootstrap] = None, **config: Any) -> None:
        super().__init__()
        self._closing = False
        self.masks = bool(config.get("enable_mask"))  # may ranks be masked?
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

    def destroy(self) -> None:
        """Waits for queued work and frees all. Memory of alloc() that is still referenced keeps the heap until it
        goes."""
        if self._address is None or self._closing:
            return
        self._closing = True
        if not self._blocks:
            self._finish()

    def _heap_unused(self) -> None:
        if self._closing:
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
        """As _finish(), for a process that is going: work that waits for others gets a second, and is left to the
        system then. Between nodes the last writes are delivered by destroying the group, hence the trouble."""
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

    # ---- Masks, errors, statistics

    def mask_query(self, out: Any, stream: Any = None) -> None:
        """Writes the mask into a tensor of the device, int32 [ranks]."""
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
