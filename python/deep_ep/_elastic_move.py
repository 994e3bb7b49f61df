# SPDX-License-Identifier: Apache-2.0
"""Bytes moved by dispatch: each row of a tensor is a token whose experts are the ranks that it goes to. Dispatch copies
bits, orders rows by (source rank, row) and works inside a node and between nodes, so barriers, all-gathers, table
fetches and sends between neighbours need no kernels of their own."""

from typing import Any, Dict, Iterable, List, Optional, Tuple

import epx
import torch

from ._checks import refused
from ._elastic_engine import ElasticEngine
from ._elastic_streams import comm_stream
from ._streams import capture_of, settle

MOST_FANOUT = 32  # destinations of one row


def default_device() -> torch.device:
    """The current GPU, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def current_stream(device: torch.device) -> Any:
    """The current stream, as EPX's calls take it."""
    return None if device.type == "cpu" else torch.cuda.current_stream(device)


def as_rows(t: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """A contiguous tensor as bf16 [rows, row_bytes / 2]; EPX moves bits."""
    return t.reshape(-1).view(torch.uint8).view(-1, row_bytes).view(torch.bfloat16)


class Mover:
    """A group whose experts are its ranks, with handles that are kept per routing."""

    def __init__(self, group: epx.Group, device: torch.device) -> None:
        self.group, self.device = group, device
        self._fixed: Dict[Any, epx.Handle] = {}
        self._free: Optional[epx.Handle] = None
        self.capturing = capture_of(device)
        self.captured = False  # True once an operation was captured into a graph

    def record_capture(self) -> None:
        """Called in each operation that can be captured."""
        if self.capturing():
            self.captured = True

    def need(self, keys: Iterable[Any]) -> None:
        """In a capture: these handles are there."""
        if not all(key in self._fixed for key in keys):
            raise refused("a capture: expected the same call, with tensors of the same sizes, once before it: its "
                          "routing is exchanged then, for other calls too")

    def fixed(self, key: Any, idx: Any, stream: Any) -> epx.Handle:
        """The handle with the routing that `idx()` gives, made at first use, by all ranks alike. `idx()` is freed when
        its update is queued: on a GPU, `stream` is the current one."""
        handle = self._fixed.get(key)
        if handle is None:
            if self.capturing():
                self.need([key])
            topk_idx = idx()
            handle = self._fixed[key] = self.group.handle(
                epx.Mode.HIGH_THROUGHPUT, epx.Layout.FLAT, topk_idx.shape[1])
            handle.update(topk_idx, stream=stream)
        return handle

    def fresh(self, idx: torch.Tensor, stream: Any) -> epx.Handle:
        """A handle with a new routing of one destination per row; the one before is not used any more. On a GPU,
        `stream` is the current one."""
        if self._free is None:
            self._free = self.group.handle(epx.Mode.HIGH_THROUGHPUT, epx.Layout.FLAT, 1)
        self._free.update(idx, stream=stream)
        return self._free

    def settle(self) -> None:
        """CPU tensors: waits until the work is done."""
        if self.device.type == "cpu":
            settle(self.group)

    def close(self, wait: bool) -> None:
        """Destroys the group. Local. `wait`: see epx.Group.destroy()."""
        self._fixed.clear()
        self._free = None
        self.group.destroy(wait)


class Barriers:
    """Barriers of all ranks on a stream: an update of an empty routing waits for the counts of every rank."""

    def __init__(self, engine: ElasticEngine) -> None:
        self._engine = engine
        self._movers: Dict[torch.device, Tuple[Mover, epx.Handle, torch.Tensor]] = {}

    def _mover(self, device: torch.device) -> Tuple[Mover, epx.Handle, torch.Tensor]:
        if device not in self._movers:
            mover = Mover(self._engine.small_group(device), device)
            handle = mover.group.handle(epx.Mode.HIGH_THROUGHPUT, epx.Layout.FLAT, 1)
            self._movers[device] = (mover, handle, torch.empty(0, 1, dtype=torch.int64, device=device))
        return self._movers[device]

    def run(self, on_comm_stream: bool, joined: bool, with_cpu_sync: bool) -> None:
        """One barrier, on the communication stream or on the current one. `joined`: behind what is queued on the other
        of the two, which goes on behind the barrier."""
        device = default_device()
        mover, handle, nothing = self._mover(device)
        mover.record_capture()
        if device.type == "cpu":
            handle.update(nothing)
            mover.settle()
            return
        current = torch.cuda.current_stream(device)
        comm = comm_stream(device) if on_comm_stream or joined else current
        stream, other = (comm, current) if on_comm_stream else (current, comm)
        before = after = joined and stream != other  # the caller may be on the communication stream
        if before and stream == current and mover.capturing():
            # A capture waits only for streams that are in it, and what comes later on the other one waits by itself.
            with torch.cuda.stream(other):
                before, after = mover.capturing(), False
        if with_cpu_sync:
            torch.cuda.synchronize(device)
        if before:
            stream.wait_stream(other)
        handle.update(nothing, stream=stream)
        if after:
            other.wait_stream(stream)
        if with_cpu_sync:
            torch.cuda.synchronize(device)

    @property
    def captured(self) -> bool:
        """True if a barrier was captured into a graph."""
        return any(mover.captured for mover, _handle, _nothing in self._movers.values())

    def close(self) -> None:
        """Lets go of the groups, which the engine destroys."""
        self._movers.clear()


def all_ranks(nranks: int) -> List[List[int]]:
    """The ranks in parts of at most MOST_FANOUT."""
    return [list(range(first, min(first + MOST_FANOUT, nranks))) for first in range(0, nranks, MOST_FANOUT)]
