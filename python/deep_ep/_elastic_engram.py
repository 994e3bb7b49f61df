# SPDX-License-Identifier: Apache-2.0
"""Engram storage of ElasticBuffer: a table whose rows lie on all ranks, fetched by index.

A fetch is two dispatches: the wanted entries go to their owners, and the owners' rows come back. So it is collective:
every rank calls it, with any number of indices.
"""

import json
from typing import Any, Callable, List, Optional, Tuple

import epx
import torch

from ._checks import describe, refused, wrong
from ._elastic_engine import ElasticEngine
from ._elastic_meeting import compare
from ._elastic_move import Mover, current_stream
from ._elastic_sizes import up
from ._streams import Origin, refuse_capture

_REQUEST_BYTES = 16
_SLICE_TOKENS, _LEAST_SLICE = 1 << 18, 1 << 12


def on_any_stream(rows: torch.Tensor, scales: Optional[torch.Tensor]) -> Callable[
        [], Tuple[torch.Tensor, Optional[torch.Tensor]]]:
    """A function that returns the tensors, complete for the stream that is current then: their work is queued on the
    one that is current now."""
    origin = Origin(rows.device)

    def result() -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        origin.join([rows, scales])
        return rows, scales
    return result


class Engram:
    """The table of one buffer."""

    captured = False  # a fetch waits on the host: it cannot be captured

    def __init__(self, engine: ElasticEngine, storage: torch.Tensor, sf: Optional[torch.Tensor],
                 fetch_bytes: int) -> None:
        # An entry's rank follows from this rank's number of entries.
        given = {"storage: dtype": str(storage.dtype), "storage: entries": storage.shape[0],
                 "storage: hidden": storage.shape[1]}
        compare([json.loads(part) for part in engine.bootstrap.allgather(json.dumps(given).encode())])
        self._engine, self._device = engine, storage.device
        self._hidden, self._dtype = storage.shape[1], storage.dtype
        self._entries, self._sf = storage.shape[0], sf
        row = storage.shape[1] * storage.element_size()
        self._row = up(row, 16)
        self._table = torch.zeros(storage.shape[0], self._row, dtype=torch.uint8, device=storage.device)
        self._table[:, :row] = storage.contiguous().view(torch.uint8)
        self.most = max(fetch_bytes // up(row), 1)
        # A fetch of more indices goes slice by slice: the tables of a group grow with its tokens.
        ranks = engine.nranks
        self._slice = min(self.most, max(_SLICE_TOKENS // ranks, _LEAST_SLICE))
        asked = max(self._slice, ranks)
        self._asks = self._mover(_REQUEST_BYTES, asked, asked * ranks)
        self._replies = self._mover(self._row, self._slice * ranks, self._slice)

    def _mover(self, hidden_bytes: int, tokens: int, rows: int) -> Mover:
        """`tokens` are sent by a rank at most, `rows` received."""
        group = self._engine._group(
            self._device, modes=epx.Mode.HIGH_THROUGHPUT, num_experts=self._engine.nranks, max_tokens_per_rank=tokens,
            max_hidden_bytes=hidden_bytes, max_topk=1, max_recv_tokens=rows, alloc_bytes=1 << 20,
            timeout_ms=self._engine.settings.timeout_ms)
        return Mover(group, self._device)

    def _slices(self, count: int) -> int:
        """How many slices the rank with the most indices needs."""
        if self.most <= self._slice:
            return 1
        ranks, stream = self._engine.nranks, current_stream(self._device)
        own = torch.full((ranks, _REQUEST_BYTES // 4), -(-count // self._slice), dtype=torch.int32, device=self._device)
        every = torch.empty_like(own)

        def idx() -> torch.Tensor:
            return torch.arange(ranks, dtype=torch.int32, device=self._device)[:, None].contiguous()
        handle = self._asks.fixed("slices", idx, stream)  # row r goes to rank r
        handle.dispatch(own.view(torch.bfloat16), every.view(torch.bfloat16), stream=stream)
        self._asks.settle()
        return int(every[:, 0].max())

    def fetch(self, indices: Any, tma_scales: bool) -> Callable[[], Tuple[torch.Tensor, Optional[torch.Tensor]]]:
        """Queues a fetch; the result of the returned function has the rows."""
        refuse_capture(self._device, "fetch", "call it outside")
        if not isinstance(indices, torch.Tensor) or indices.dtype is not torch.int32 or indices.dim() != 2 \
                or not indices.is_contiguous() or indices.device != self._device:
            raise wrong("indices", "contiguous int32 [tokens, n] on %s" % self._device, describe(indices))
        if indices.numel() > self.most:
            raise wrong("indices", "at most %d, for which the buffer has room" % self.most, indices.numel())
        self._check_range(indices)
        flat, width = indices.reshape(-1), self._hidden * self._dtype.itemsize
        parts = [self._fetch_slice(flat[i * self._slice:(i + 1) * self._slice])
                 for i in range(max(self._slices(flat.numel()), 1))]
        data = parts[0] if len(parts) == 1 else torch.cat(parts)
        result = data[:, :width].contiguous().view(self._dtype).view(
            indices.shape[0], indices.shape[1] * self._hidden)
        scales = None if self._sf is None else gather_scales(self._sf, indices, tma_scales)
        return on_any_stream(result, scales)

    def _check_range(self, indices: torch.Tensor) -> None:
        """On the CPU. On a GPU the host would have to wait for the indices."""
        if self._device.type == "cpu" and indices.numel():
            least, most = (int(end) for end in torch.aminmax(indices))
            if least < 0 or most >= self._engine.nranks * self._entries:
                raise wrong("indices", "0 to %d, rank * entries + entry" % (self._engine.nranks * self._entries - 1),
                            least if least < 0 else most)

    def _fetch_slice(self, flat: torch.Tensor) -> torch.Tensor:
        """The rows of these indices, as bytes."""
        stream = current_stream(self._device)
        owner = torch.div(flat, self._entries, rounding_mode="floor")
        wanted, sources = self._ask(flat - owner * self._entries, owner, stream)
        rows = self._reply(wanted, sources, flat.numel(), stream)
        data = torch.empty_like(rows)
        data[torch.argsort(owner, stable=True)] = rows  # they came by owner, in the order of the requests
        return data

    def _ask(self, entry: torch.Tensor, owner: torch.Tensor, stream: Any) -> Tuple[torch.Tensor, torch.Tensor]:
        """(entries that were asked of this rank, who asked), by rank and order."""
        request = torch.zeros(entry.shape[0], _REQUEST_BYTES // 4, dtype=torch.int32, device=self._device)
        request[:, 0] = entry
        handle = self._asks.fresh(owner[:, None].contiguous(), stream)
        count = handle.recv_count()[0]
        asked = torch.empty(count, _REQUEST_BYTES // 4, dtype=torch.int32, device=self._device)
        sources = torch.empty(count, dtype=torch.int32, device=self._device)
        handle.dispatch(request.view(torch.bfloat16), asked.view(torch.bfloat16), src_rank=sources, stream=stream)
        self._asks.settle()
        return asked[:, 0], sources

    def _reply(self, wanted: torch.Tensor, sources: torch.Tensor, count: int, stream: Any) -> torch.Tensor:
        """The rows that this rank asked for, by owner and order of the requests."""
        rows = self._table[wanted.long()].view(torch.bfloat16)
        out = torch.empty(count, self._row, dtype=torch.uint8, device=self._device)
        handle = self._replies.fresh(sources[:, None].contiguous(), stream)
        handle.dispatch(rows, out.view(torch.bfloat16), stream=stream)
        self._replies.settle()
        return out

    @property
    def groups(self) -> List[epx.Group]:
        """Those of requests and of replies."""
        return [self._asks.group, self._replies.group]

    def close(self, wait: bool) -> None:
        """Destroys the group. Local."""
        self._asks.close(wait)
        self._replies.close(wait)


def gather_scales(sf: torch.Tensor, indices: torch.Tensor, tma_scales: bool) -> torch.Tensor:
    """The scales of these rows, [tokens, n * packs]; `tma_scales`: by columns, each of a multiple of 4."""
    rows = sf[indices.reshape(-1).long()].reshape(indices.shape[0], indices.shape[1] * sf.shape[1])
    if not tma_scales:
        return rows
    out = torch.empty(rows.shape[1], up(rows.shape[0], 4), dtype=rows.dtype, device=rows.device)
    out[:, :rows.shape[0]] = rows.t()
    return out.as_strided(rows.shape, (1, out.shape[1]))


def check_storage(engine: ElasticEngine, storage: Any, sf: Any, most_bytes: int) -> None:
    """Checks the arguments of engram_write()."""
    if not isinstance(storage, torch.Tensor) or storage.dim() != 2 or not storage.is_contiguous() \
            or storage.dtype not in (torch.bfloat16, torch.float8_e4m3fn):
        raise wrong("storage", "a contiguous bf16 or e4m3 tensor [entries, hidden]", describe(storage))
    if (storage.dtype is torch.float8_e4m3fn) != (sf is not None):
        raise wrong("sf", "scales with e4m3 storage, None with bf16", "None" if sf is None else describe(sf))
    entries = engine.nranks * storage.shape[0]
    if sf is not None and (not isinstance(sf, torch.Tensor) or sf.dim() != 2 or sf.shape[0] != entries
                           or sf.element_size() != 4):
        raise wrong("sf", "4-byte scales [%d, *]" % entries, describe(sf))
    needed = up(storage.shape[1] * storage.element_size()) * storage.shape[0]
    if needed > most_bytes:
        raise refused("engram_write: expected at most num_cpu_bytes = %d, got %d bytes" % (most_bytes, needed))
