# SPDX-License-Identifier: Apache-2.0
"""The bootstrap of a group: an all-gather of bytes, made from torch.distributed, mpi4py or any other library.

Without a bootstrap, the C library detects the launcher by its environment variables: torchrun, `epx run`, mpirun (Open
MPI, MPICH, Intel MPI) or srun. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT may also be set by hand.
"""

import ctypes
from typing import Any, Callable, List, Optional

from ._abi import ALLGATHER, BootstrapStruct


class Bootstrap:
    """An all-gather for creating groups: `gather(data)` returns the bytes of every rank, in rank order."""

    def __init__(self, rank: int, nranks: int, gather: Callable[[bytes], List[bytes]]) -> None:
        self.rank = rank
        self.nranks = nranks
        self._gather = gather
        self._errors: List[BaseException] = []
        self._callback = ALLGATHER(_callback(nranks, gather, self._errors))
        self.struct = BootstrapStruct(rank=rank, nranks=nranks, allgather=self._callback)

    def allgather(self, data: bytes) -> List[bytes]:
        """The bytes of every rank, in rank order."""
        return self._gather(data)

    def take_error(self) -> Optional[BaseException]:
        """Returns and clears the exception that ended the last all-gather, or None."""
        return self._errors.pop() if self._errors else None


def _callback(nranks: int, gather: Callable[[bytes], List[bytes]],
              errors: List[BaseException]) -> Callable[[int, int, int, int], int]:
    """The function that the C library calls. An exception must not leave it; it is stored in `errors` for the caller.

    It has no reference to the Bootstrap: a reference cycle would keep a process group alive until Python ends.
    """

    def called(_context: int, send: int, recv: int, size: int) -> int:
        try:
            parts = gather(ctypes.string_at(send, size))
            if len(parts) != nranks or any(len(part) != size for part in parts):
                raise ValueError("bootstrap: expected %d parts of %d bytes, got %s" % (
                    nranks, size, [len(part) for part in parts]))
            ctypes.memmove(recv, b"".join(parts), size * nranks)
            return 0
        except BaseException as error:  # includes KeyboardInterrupt
            errors[:] = [error]
            return 1

    return called


def from_torch(group: Any = None) -> Bootstrap:
    """A bootstrap over a torch.distributed process group. It uses only all_gather_object, so gloo is sufficient."""
    import torch.distributed as dist

    nranks = dist.get_world_size(group)

    def gather(data: bytes) -> List[bytes]:
        parts: List[Any] = [None] * nranks
        dist.all_gather_object(parts, data, group)
        return parts

    return Bootstrap(dist.get_rank(group), nranks, gather)


def from_mpi(comm: Any) -> Bootstrap:
    """A bootstrap over an mpi4py communicator."""
    return Bootstrap(comm.Get_rank(), comm.Get_size(), comm.allgather)
