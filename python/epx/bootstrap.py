# SPDX-License-Identifier: Apache-2.0
"""The bootstrap of a group: an all-gather of bytes, made from torch.distributed, mpi4py or any other library.

Without a bootstrap, the C library detects the launcher by its environment variables: torchrun, `epx run`, mpirun (Open
MPI, MPICH, Intel MPI) or srun. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT may also be set by hand.
"""

import ctypes
import weakref
from typing import Any, Callable, List, Optional

from ._abi import ALLGATHER, BootstrapStruct
from ._interrupts import Interrupts
from ._rounds import LeftError, Place, Rounds
from .errors import ArgumentError, Status

NO_PROCESS_GROUP = ("group: expected a process group, got None while torch.distributed is not initialized; call "
                    "torch.distributed.init_process_group() first")

_rounds: "weakref.WeakKeyDictionary[Any, Rounds]" = weakref.WeakKeyDictionary()  # by process group


class Bootstrap:
    """An all-gather for creating groups: `gather(data)` returns the bytes of every rank, in rank order. `leave()` is
    called between the all-gathers of a call of the C library if this rank does not take part in the rest."""

    left = False  # True: the last call of the C library was left (Ctrl-C), and ranks wait for this one, or it for them

    def __init__(self, rank: int, nranks: int, gather: Callable[[bytes], List[bytes]],
                 leave: Callable[[], None] = lambda: None) -> None:
        self.rank = rank
        self.nranks = nranks
        self._gather = gather
        self._errors: List[BaseException] = []
        self._interrupts = Interrupts()
        self._callback = ALLGATHER(_callback(nranks, gather, leave, self._errors, self._interrupts))
        self.struct = BootstrapStruct(rank=rank, nranks=nranks, allgather=self._callback)

    def allgather(self, data: bytes) -> List[bytes]:
        """The bytes of every rank, in rank order."""
        return self._gather(data)

    def run(self, call: Callable[[], int]) -> int:
        """Makes a call of the C library with this bootstrap, and returns its status. Raises the exception that ended an
        all-gather, if there was one."""
        self._errors.clear()
        self.left = False
        with self._interrupts:
            status = call()
        if not self._errors:
            return status
        error = self._errors.pop()
        self.left = isinstance(error, LeftError) or not isinstance(error, Exception)
        raise error


def _callback(nranks: int, gather: Callable[[bytes], List[bytes]], leave: Callable[[], None],
              errors: List[BaseException], interrupts: Interrupts) -> Callable[[int, int, int, int], int]:
    """The function that the C library calls. An exception must not leave it; it is stored in `errors` for the caller.

    It has no reference to the Bootstrap: a reference cycle would keep a process group alive until Python ends.
    """

    def called(_context: int, send: int, recv: int, size: int) -> int:
        try:
            try:
                interrupts.deliver()
            except BaseException:
                leave()
                raise
            parts = gather(ctypes.string_at(send, size))
            if len(parts) != nranks or any(len(part) != size for part in parts):
                raise ValueError("bootstrap: expected %d parts of %d bytes, got %s" % (
                    nranks, size, [len(part) for part in parts]))
            ctypes.memmove(recv, b"".join(parts), size * nranks)
            return 0
        except BaseException as error:  # includes KeyboardInterrupt
            errors[:] = [error]
            return 1

    interrupts.callback = called.__code__
    return called


def from_torch(group: Any = None) -> Bootstrap:
    """A bootstrap over a torch.distributed process group, also over one that torch has no list of ranks for. It uses
    only all_gather_object, so gloo is sufficient.

    Threads may use several bootstraps of one process group at the same time. The first all-gathers of each come in the
    same order on all ranks. Where a rank has left an all-gather (Ctrl-C, say), its next one raises PeerError on those
    that wait in the old one; they may start over.
    """
    import torch.distributed as dist

    if group is not None and not isinstance(group, int) and not all(
            callable(getattr(group, name, None)) for name in ("rank", "size")):  # an int: torch's name for no group
        raise ArgumentError(Status.ARGUMENT, "group: expected a process group of torch.distributed, or None, got %s" % (
            type(group).__name__))
    if group is None and not dist.is_initialized():
        raise ArgumentError(Status.ARGUMENT, NO_PROCESS_GROUP)
    nranks = dist.get_world_size(group)
    if nranks < 1:
        raise ArgumentError(Status.ARGUMENT, "group: expected a process group that this rank is in, got %r" % (group,))
    of = dist.group.WORLD if group is None else group
    rank = of.rank()  # dist.get_rank(group) translates that of the default group, which not every group is made of
    rounds = _rounds.setdefault(of, Rounds(rank, nranks))
    place = Place()

    def exchange(own: Any) -> List[Any]:
        parts: List[Any] = [None] * nranks
        dist.all_gather_object(parts, own, group)
        return parts

    def gather(data: bytes) -> List[bytes]:
        return rounds.gather(place, data, exchange)

    return Bootstrap(rank, nranks, gather, place.leave)


def from_mpi(comm: Any) -> Bootstrap:
    """A bootstrap over an mpi4py communicator."""
    if not all(callable(getattr(comm, name, None)) for name in ("Get_rank", "Get_size", "allgather")):
        raise ArgumentError(Status.ARGUMENT, "comm: expected a communicator of mpi4py, got %s" % type(comm).__name__)
    return Bootstrap(comm.Get_rank(), comm.Get_size(), comm.allgather)
