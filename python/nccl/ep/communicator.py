# SPDX-License-Identifier: Apache-2.0
"""Communicators, for machines without nccl4py: as much of ``nccl.core`` as a group needs."""

import ctypes
import os
from typing import Any, Optional, Sequence, Union

from epx import _abi as _epx_abi
from epx import _library as _epx

from ._abi import NcclInvalid
from ._library import load_nccl

ID_BYTES = 128


class _Id(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * ID_BYTES)]


def _call(name: str, *arguments: Any) -> None:
    status = getattr(load_nccl(), name)(*arguments)
    if status:
        text = load_nccl().ncclGetLastError
        text.restype = ctypes.c_char_p
        raise RuntimeError("%s: NCCL error code %d: %s" % (
            name, status, (text(None) or b"").decode("utf-8", "replace")))


class UniqueId:
    """128 bytes that the ranks of one communicator share."""

    def __init__(self, data: bytes) -> None:
        if len(data) != ID_BYTES:
            raise NcclInvalid("UniqueId: expected %d bytes, got %d" % (ID_BYTES, len(data)))
        self._data = bytes(data)

    @classmethod
    def from_bytes(cls, data: bytes) -> "UniqueId":
        return cls(data)

    @property
    def as_bytes(self) -> bytes:
        return self._data

    def __bytes__(self) -> bytes:
        return self._data


def get_unique_id(empty: bool = False) -> UniqueId:
    """A new id, made on the machine of rank 0; with NCCL_COMM_ID=HOST:PORT every rank makes the same. `empty`: zeros,
    to be overwritten by what rank 0 sends."""
    own = _Id()
    if not empty:
        _call("ncclGetUniqueId", ctypes.byref(own))
    return UniqueId(bytes(own))


class Communicator:
    """An ncclComm_t."""

    def __init__(self, ptr: int = 0) -> None:
        self._ptr = ptr

    @classmethod
    def init(cls, nranks: int, rank: int, unique_id: Union[UniqueId, Sequence[UniqueId]]) -> "Communicator":
        """Collective."""
        ids = [unique_id] if isinstance(unique_id, UniqueId) else list(unique_id)
        ptr = ctypes.c_void_p()
        if len(ids) == 1:  # NCCL before 2.23 has no ncclCommInitRankScalable
            _call("ncclCommInitRank", ctypes.byref(ptr), ctypes.c_int(nranks), _Id.from_buffer_copy(bytes(ids[0])),
                  ctypes.c_int(rank))
        else:
            data = ctypes.create_string_buffer(b"".join(bytes(one) for one in ids), ID_BYTES * len(ids))
            _call("ncclCommInitRankScalable", ctypes.byref(ptr), ctypes.c_int(nranks), ctypes.c_int(rank),
                  ctypes.c_int(len(ids)), data, None)
        return cls(ptr.value or 0)

    @classmethod
    def from_launcher(cls) -> "Communicator":
        """All ranks that torchrun, mpirun, srun or `epx run` has started."""
        world = _epx_abi.WorldStruct()
        _epx.check(_epx.load().epx_world_query(ctypes.byref(world)))
        if world.nranks == 1:
            return cls.init(1, 0, get_unique_id())
        before = os.environ.get("NCCL_COMM_ID")
        where = before or "%s:%d" % (world.host.decode(), world.port)
        _setenv("NCCL_COMM_ID", where)
        try:
            own = get_unique_id()
        finally:
            _setenv("NCCL_COMM_ID", before)
        return cls.init(world.nranks, world.rank, own)

    def _number(self, name: str) -> int:
        value = ctypes.c_int()
        _call(name, ctypes.c_void_p(self.ptr), ctypes.byref(value))
        return value.value

    @property
    def ptr(self) -> int:
        if not self._ptr:
            raise NcclInvalid("Communicator: it has been destroyed")
        return self._ptr

    @property
    def rank(self) -> int:
        return self._number("ncclCommUserRank")

    @property
    def nranks(self) -> int:
        return self._number("ncclCommCount")

    def destroy(self) -> None:
        if self._ptr:
            _call("ncclCommDestroy", ctypes.c_void_p(self._ptr))
            self._ptr = 0

    def register_window(self, data: int, size: int, flags: int = 0) -> "Window":
        """A window over memory of mem_alloc or of the caller; see Tensor's `window`."""
        handle = ctypes.c_void_p()
        _call("ncclCommWindowRegister", ctypes.c_void_p(self.ptr), ctypes.c_void_p(data), ctypes.c_size_t(size),
              ctypes.byref(handle), ctypes.c_int(flags))
        return Window(self, handle.value or 0)


class Window:
    """Memory that the communicator knows."""

    def __init__(self, comm: Communicator, handle: int) -> None:
        self._comm: Optional[Communicator] = comm
        self.handle = handle

    def close(self) -> None:
        if self._comm is not None:
            _call("ncclCommWindowDeregister", ctypes.c_void_p(self._comm.ptr), ctypes.c_void_p(self.handle))
            self._comm = None


def _setenv(name: str, value: Optional[str]) -> None:
    """For this process's C code too."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
