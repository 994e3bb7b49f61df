# SPDX-License-Identifier: Apache-2.0
"""The pipeline-parallel ring of ElasticBuffer: tensors to and from the neighbours.

Each directed pair of neighbours has an EPX group of two ranks, the sender and the receiver, with a low-latency slot for
each tensor in flight.

    sender, send n                                      receiver, recv n
    complete operation n - inflight, which waits
      until the receiver has received it
    send half of operation n: tensor to slot  ------->  operation n without rows of its own: wait for the slot, take
      n % inflight of its own heap, or to the             its rows to recv, copy them to the tensor
      receiver's over the network
                            <-------------------------  the slot may be used again

Everything runs on the caller's current stream. A send waits for nobody while fewer than `inflight` tensors are not
received, so ranks may all send first, and no kernel of a send stays on a GPU that the receiver's kernels need.

A tensor is rows of _ROW bytes, the last one padded. The weight of a row says how many bytes of the last one count, so
that the receiver knows how large the tensor was. On a GPU the host does not wait for that: a later call looks at it.
"""

import collections
import contextlib
import json
import re
import uuid
from typing import Any, Callable, Deque, Dict, Iterator, List, NamedTuple, Tuple

import epx
import torch
from epx.errors import make_error

from ._checks import describe, wrong
from ._elastic_engine import ElasticEngine
from ._elastic_meeting import compare
from ._elastic_move import Mover, as_rows, current_stream

_ROW = 2048  # divides most activations: other tensors pass through a copy whose end is padded
_RECEIVER = 1  # its number in the group of two
_GPU_AGENTS = 128  # eight multiprocessors: receivers that share a GPU wait there at the same time
_MOST_UNCHECKED = 256  # receives on a GPU whose sizes are yet to come


def _edges(ranks: int) -> List[Tuple[int, int]]:
    """All directed pairs of neighbours, in the order in which all ranks create their groups."""
    return sorted({(r, (r + step) % ranks) for r in range(ranks) for step in (1, ranks - 1)})


def _pair_bootstrap(engine: ElasticEngine, name: str, edge: Tuple[int, int]) -> epx.Bootstrap:
    """An all-gather of two ranks, through the store of torch.distributed."""
    import torch.distributed as dist

    store = dist.PrefixStore("epx/%s/%d-%d" % (name, *edge), engine.store)
    me, steps = edge.index(engine.rank), [0]

    def gather(data: bytes) -> List[bytes]:
        steps[0] += 1
        store.set("%d/%d" % (steps[0], me), data)
        return [data if r == me else bytes(store.get("%d/%d" % (steps[0], r))) for r in range(2)]

    return epx.Bootstrap(me, 2, gather)


@contextlib.contextmanager
def _in_words_of_the_ring(call: str, edge: Tuple[int, int]) -> Iterator[None]:
    """Errors of a group of two name its ranks 0 and 1, which are ranks of the ring."""
    try:
        yield
    except (epx.PeerError, epx.TimeoutExpired) as failure:
        said = re.sub(r"\brank ([01])\b", lambda found: "rank %d" % edge[int(found.group(1))], failure.message)
        raise type(failure)(failure.status, "%s: from rank %d to rank %d: %s" % (call, *edge, said)) from failure


class _Unchecked(NamedTuple):
    """A receive on a GPU into `wanted` bytes. `said`: what the sender says, once the event has passed."""

    event: Any
    said: torch.Tensor
    wanted: int


class Sizes:
    """Of the tensors that rank `source` has sent."""

    def __init__(self, device: torch.device, source: int, rows: int, capturing: Callable[[], bool]) -> None:
        self._device, self._source, self._capturing = device, source, capturing
        # The number of rows, of both ranks, then from the fifth place on the weights of rows. (The default dtype and
        # the default device are the caller's.)
        self._said = torch.empty(4 + 2 * rows, dtype=torch.float32, device=device)
        self.counts, self.weights = self._said[:2].view(torch.int32), self._said[4:].view(2, rows, 1)
        gpu = device.type != "cpu"
        self._host = torch.empty(_MOST_UNCHECKED if gpu else 0, 5, dtype=torch.float32, device="cpu", pin_memory=gpu)
        self._unchecked: Deque[_Unchecked] = collections.deque()
        self._queued = 0

    def check(self, wanted: int) -> None:
        """Raises if the last tensor did not have so many bytes. On a GPU check_earlier() does, when they are known."""
        if self._device.type == "cpu":
            self._compare(self._said, wanted)
        elif len(self._unchecked) < _MOST_UNCHECKED and not self._capturing():
            said, event = self._host[self._queued % _MOST_UNCHECKED], torch.cuda.Event()
            said.copy_(self._said[:5], non_blocking=True)
            event.record(torch.cuda.current_stream(self._device))
            self._unchecked.append(_Unchecked(event, said, wanted))
            self._queued += 1

    def check_earlier(self) -> None:
        """As check(), of earlier tensors, as far as the host knows their sizes."""
        while self._unchecked and not self._capturing() and self._unchecked[0].event.query():
            _event, said, wanted = self._unchecked.popleft()
            self._compare(said, wanted)

    def _compare(self, said: torch.Tensor, wanted: int) -> None:
        sent = (int(said[:1].view(torch.int32)) - 1) * _ROW + int(said[4])
        if sent != wanted:
            raise make_error(epx.Status.MISMATCH, "pp_recv: t: expected a tensor of the %d bytes that rank %d sent, "
                             "got one of %d bytes" % (sent, self._source, wanted))


class _Channel:
    """One directed pair."""

    def __init__(self, engine: ElasticEngine, name: str, edge: Tuple[int, int], recv_rows: torch.Tensor,
                 inflight: int) -> None:
        device, rows = recv_rows.device, recv_rows.shape[1]
        group = engine._group(
            device, bootstrap=_pair_bootstrap(engine, name, edge), modes=epx.Mode.LOW_LATENCY, num_experts=2,
            max_tokens_per_rank=rows, max_hidden_bytes=_ROW, max_topk=1, max_inflight=inflight, alloc_bytes=1 << 20,
            ranks_per_node=0, num_agents=0 if device.type == "cpu" else _GPU_AGENTS,
            timeout_ms=engine.settings.timeout_ms)
        self.mover, self._device, self._recv_rows = Mover(group, device), device, recv_rows
        # Made here: an allocation on a GPU may wait for kernels that wait for the peer.
        count = inflight if engine.rank == edge[0] else 1
        self._handles = [group.handle(epx.Mode.LOW_LATENCY, epx.Layout.RANK_MAJOR, 1) for _ in range(count)]
        self._idx = torch.full((rows, 1), _RECEIVER, dtype=torch.int32, device=device)
        self._whole = torch.full((rows, 1), float(_ROW), dtype=torch.float32, device=device)  # of rows without padding
        self.sizes = Sizes(device, edge[0], rows, self.mover.capturing)
        self._info = epx.LayoutInfo(rank_counts=self.sizes.counts)
        # On a GPU: the last receive has copied its rows. The next one may be on another stream.
        self._copied = torch.cuda.Event() if device.type != "cpu" else None
        self._sent = 0

    def _rows(self, t: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """(the tensor as rows of _ROW bytes, their weights)."""
        flat = t.reshape(-1).view(torch.uint8)
        rows, rest = -(-flat.numel() // _ROW), flat.numel() % _ROW
        weights = self._whole[:rows] if not rest else torch.full_like(self._whole[:rows], float(rest))
        if rest or flat.data_ptr() % 16:
            padded = torch.empty(rows * _ROW, dtype=torch.uint8, device=self._device)
            padded[:flat.numel()] = flat
            flat = padded
        return as_rows(flat, _ROW), weights

    def send(self, t: torch.Tensor) -> None:
        """Queues a send on the current stream."""
        self.mover.record_capture()
        stream, (rows, weights) = current_stream(self._device), self._rows(t)
        handle = self._handles[self._sent % len(self._handles)]
        handle.complete(stream)  # of the send that used the slot before
        handle.update(self._idx[:rows.shape[0]])
        handle.dispatch(rows, self._recv_rows, topk_weights=weights, out_topk_weights=self.sizes.weights,
                        send_only=True, stream=stream)
        self._sent += 1
        self.mover.settle()

    def recv(self, t: torch.Tensor) -> None:
        """Receives into a tensor, on the current stream."""
        self.mover.record_capture()
        stream, handle = current_stream(self._device), self._handles[0]
        copied = None if self.mover.capturing() else self._copied
        if copied is not None:
            stream.wait_event(copied)
        handle.update(self._idx[:0])
        handle.dispatch(self._recv_rows[0, :0], self._recv_rows, topk_weights=self._whole[:0],
                        out_topk_weights=self.sizes.weights, info=self._info, send_only=True, stream=stream)
        handle.complete(stream)
        self.mover.settle()
        flat = t.view(-1).view(torch.uint8)
        self.sizes.check(flat.numel())
        flat.copy_(self._recv_rows.view(-1).view(torch.uint8)[:flat.numel()])
        if copied is not None:
            copied.record(stream)


class Pipeline:
    """The channels of one rank."""

    def __init__(self, engine: ElasticEngine, device: torch.device, tensor_bytes: int, inflight: int) -> None:
        self._rank, self._ranks, self._bytes = engine.rank, engine.nranks, tensor_bytes
        self._device = device
        rows = -(-tensor_bytes // _ROW)
        # Low latency may receive the rows of both ranks. Senders name receive rows too, into which nothing comes.
        recv_rows = [torch.empty(2, rows, _ROW // 2, dtype=torch.bfloat16, device=device) for _ in range(2)]
        before = (self._rank - 1) % self._ranks
        name = self._agree(engine, dict(num_max_tensor_bytes=tensor_bytes, num_max_inflight_tensors=inflight))
        self._channels: Dict[Tuple[int, int], _Channel] = {
            edge: _Channel(engine, name, edge, recv_rows[edge == (before, self._rank)], inflight)
            for edge in _edges(engine.nranks) if engine.rank in edge and edge[0] != edge[1]}

    @staticmethod
    def _agree(engine: ElasticEngine, given: Dict[str, int]) -> str:
        """A name for the pairs' keys in the store. Raises on all ranks if their configurations differ: ranks of a pair
        that found it would leave the pairs beside them alone."""
        parts = [json.loads(part) for part in engine.bootstrap.allgather(
            json.dumps([uuid.uuid4().hex, given]).encode())]
        compare([values for _name, values in parts])
        return parts[0][0]

    def _check(self, t: Any, name: str, peer: int) -> None:
        if peer not in ((self._rank + 1) % self._ranks, (self._rank - 1) % self._ranks) or peer == self._rank:
            raise wrong(name, "a neighbour of rank %d in the ring of %d" % (self._rank, self._ranks), peer)
        if not isinstance(t, torch.Tensor) or not t.is_contiguous() or t.device != self._device:
            raise wrong("t", "a contiguous tensor on %s" % self._device, describe(t))
        nbytes = t.numel() * t.element_size()
        if nbytes % 32 or not 0 < nbytes <= self._bytes:
            raise wrong("t", "a multiple of 32 bytes, at most %d" % self._bytes, nbytes)

    def _check_earlier(self) -> None:
        """Behind a call that is queued: the neighbour of this one waits for it, whatever an earlier one was."""
        for channel in self._channels.values():
            channel.sizes.check_earlier()

    def send(self, t: Any, peer: int) -> None:
        """Sends to a neighbour."""
        self._check(t, "dst_rank_idx", peer)
        with _in_words_of_the_ring("pp_send", (self._rank, peer)):
            self._channels[(self._rank, peer)].send(t)
        self._check_earlier()

    def recv(self, t: Any, peer: int) -> None:
        """Receives from a neighbour."""
        self._check(t, "src_rank_idx", peer)
        with _in_words_of_the_ring("pp_recv", (peer, self._rank)):
            self._channels[(peer, self._rank)].recv(t)
        self._check_earlier()

    @property
    def groups(self) -> List[epx.Group]:
        """Of the pairs that this rank is in."""
        return [channel.mover.group for channel in self._channels.values()]

    @property
    def captured(self) -> bool:
        """True if a send or a receive was captured into a graph."""
        return any(channel.mover.captured for channel in self._channels.values())

    def close(self, wait: bool) -> None:
        """Destroys the groups. Local."""
        for channel in self._channels.values():
            channel.mover.close(wait)
        self._channels.clear()
