# SPDX-License-Identifier: Apache-2.0
"""The pipeline-parallel ring of ElasticBuffer: tensors to and from the neighbours.

Each directed pair of neighbours has an EPX group of two ranks, the sender and the receiver. A send copies its tensor
and queues the transfer on a stream of the pair, where it waits for the receiver; the caller's stream goes on, until
the copies of `inflight` tensors are still on their way.
"""

import collections
from typing import Any, Deque, Dict, List, Tuple

import epx
import torch

from ._checks import wrong
from ._elastic_engine import ElasticEngine
from ._elastic_move import Mover, as_rows, current_stream
from ._streams import HostEvent, StreamEvent

_ROW = 16384
_RECEIVER = 1  # its number in the group of two
# Two multiprocessors of a GPU. The kernels of a send stay on the GPU until the receiver comes, those of both directions
# and of every rank that shares the GPU at the same time: with as many as a group of two takes by itself, they would
# leave no room for the receivers' kernels, and all would wait for good.
_GPU_AGENTS = 32


def _edges(ranks: int) -> List[Tuple[int, int]]:
    """All directed pairs of neighbours, in the order in which all ranks create their groups."""
    return sorted({(r, (r + step) % ranks) for r in range(ranks) for step in (1, ranks - 1)})


def _pair_bootstrap(engine: ElasticEngine, name: str, edge: Tuple[int, int]) -> epx.Bootstrap:
    """An all-gather of two ranks, through the store of torch.distributed."""
    import torch.distributed as dist

    store = dist.PrefixStore("epx/%s/%d-%d" % (name, *edge), dist.distributed_c10d._get_default_store())
    me, steps = edge.index(engine.rank), [0]

    def gather(data: bytes) -> List[bytes]:
        steps[0] += 1
        store.set("%d/%d" % (steps[0], me), data)
        return [data if r == me else bytes(store.get("%d/%d" % (steps[0], r))) for r in range(2)]

    return epx.Bootstrap(me, 2, gather)


class _Channel:
    """One directed pair."""

    def __init__(self, engine: ElasticEngine, name: str, edge: Tuple[int, int], device: torch.device, rows: int,
                 inflight: int) -> None:
        group = engine._group(
            device, bootstrap=_pair_bootstrap(engine, name, edge), modes=epx.Mode.HIGH_THROUGHPUT, num_experts=2,
            max_tokens_per_rank=rows, max_hidden_bytes=_ROW, max_topk=1, max_recv_tokens=rows, alloc_bytes=1 << 20,
            ranks_per_node=0, num_agents=0 if device.type == "cpu" else _GPU_AGENTS,
            timeout_ms=engine.settings.timeout_ms)
        self.mover, self._device, self._inflight = Mover(group, device), device, inflight
        self._stream = None if device.type == "cpu" else torch.cuda.Stream(device=device)
        self._sent: Deque[Any] = collections.deque()
        # Made here: an allocation on a GPU may wait for a kernel that waits for the peer, which may allocate too.
        self._handle = group.handle(epx.Mode.HIGH_THROUGHPUT, epx.Layout.FLAT, 1)
        self._idx = torch.full((rows, 1), _RECEIVER, dtype=torch.int32, device=device)

    def _transfer(self, rows: torch.Tensor, out: torch.Tensor, stream: Any) -> None:
        self._handle.update(self._idx[:rows.shape[0]], stream=stream)
        self._handle.dispatch(rows, out, stream=stream)

    def _each_part(self, t: torch.Tensor) -> List[torch.Tensor]:
        """The tensor as rows of _ROW bytes, and the rest as one row."""
        flat = t.reshape(-1).view(torch.uint8)
        whole = flat.numel() // _ROW * _ROW
        parts = [as_rows(flat[:whole], _ROW)] if whole else []
        return parts + ([as_rows(flat[whole:], flat.numel() - whole)] if whole < flat.numel() else [])

    def send(self, t: torch.Tensor) -> None:
        """Queues the transfer of a copy."""
        if len(self._sent) >= self._inflight:
            self._sent.popleft().current_stream_wait()
        copy = t.clone()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            copy.record_stream(self._stream)
        for part in self._each_part(copy):
            self._transfer(part, part[:0], self._stream)
        self._sent.append(HostEvent(self.mover.group) if self._stream is None else StreamEvent(self._stream))

    def recv(self, t: torch.Tensor) -> None:
        """Receives into a tensor, on the current stream."""
        for part in self._each_part(t):
            self._transfer(part[:0], part, current_stream(self._device))
        self.mover.settle()


class Pipeline:
    """The channels of one rank."""

    def __init__(self, engine: ElasticEngine, device: torch.device, name: str, tensor_bytes: int,
                 inflight: int) -> None:
        self._rank, self._ranks, self._bytes = engine.rank, engine.nranks, tensor_bytes
        self._device = device
        rows = tensor_bytes // _ROW + 1
        self._channels: Dict[Tuple[int, int], _Channel] = {
            edge: _Channel(engine, name, edge, device, rows, inflight)
            for edge in _edges(engine.nranks) if engine.rank in edge and edge[0] != edge[1]}

    def _check(self, t: Any, name: str, peer: int) -> None:
        if peer not in ((self._rank + 1) % self._ranks, (self._rank - 1) % self._ranks) or peer == self._rank:
            raise wrong(name, "a neighbour of rank %d in the ring of %d" % (self._rank, self._ranks), peer)
        if not isinstance(t, torch.Tensor) or not t.is_contiguous() or t.device != self._device:
            raise wrong("t", "a contiguous tensor on %s" % self._device, type(t).__name__)
        nbytes = t.numel() * t.element_size()
        if nbytes % 32 or not 0 < nbytes <= self._bytes:
            raise wrong("t", "a multiple of 32 bytes, at most %d" % self._bytes, nbytes)

    def send(self, t: Any, peer: int) -> None:
        """Sends to a neighbour."""
        self._check(t, "dst_rank_idx", peer)
        self._channels[(self._rank, peer)].send(t)

    def recv(self, t: Any, peer: int) -> None:
        """Receives from a neighbour."""
        self._check(t, "src_rank_idx", peer)
        self._channels[(peer, self._rank)].recv(t)

    def close(self) -> None:
        """Destroys the groups. Local."""
        for channel in self._channels.values():
            channel.mover.close()
        self._channels.clear()
