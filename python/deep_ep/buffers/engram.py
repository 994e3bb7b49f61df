# SPDX-License-Identifier: Apache-2.0
"""EngramBuffer: tables of several layers, whose rows lie on all ranks. It is one table of ElasticBuffer's, which has
the rows of all layers of a rank one behind the other, so that one fetch serves all layers."""

import functools
import json
from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch

from .. import _checks as checks
from .. import _elastic_sizes as sizes
from .. import comm
from .._checks import describe, wrong
from .._domains import get_physical_domain_size
from .._eager import eager_class
from .._elastic_engram import Engram, gather_scales, on_any_stream
from .._elastic_meeting import compare
from ..elastic import ElasticBuffer
from ..utils.envs import check_fast_rdma_atomic_support
from .base import BufferBase, Context

__all__ = ["EngramBuffer"]


class _Layers:
    """What set_config() says."""

    def __init__(self, entries: Sequence[int], hidden: int, tokens: int, entries_per_token: int, dtype: torch.dtype,
                 packs: int) -> None:
        self.entries = [checks.positive("num_entries_per_layer", number) for number in entries]
        self.hidden, self.tokens = checks.positive("hidden", hidden), checks.positive("num_max_tokens", tokens)
        self.per_token = checks.positive("num_entries_per_token", entries_per_token)
        self.dtype, self.packs = checks.dtype("dtype", dtype), checks.positive("num_sf_packs", packs, 0)
        self.first = [sum(self.entries[:layer]) for layer in range(len(self.entries))]  # row of each on every rank
        if not self.entries:
            raise wrong("num_entries_per_layer", "at least one layer", "none")
        if (dtype is torch.float8_e4m3fn) != bool(packs) or dtype not in (torch.float8_e4m3fn, torch.bfloat16):
            raise wrong("dtype, num_sf_packs", "bf16 and 0, or e4m3 and packs", "%s and %d" % (dtype, packs))

    @property
    def storage_bytes(self) -> int:
        """Of the rows of a rank."""
        return sum(self.entries) * self.hidden * self.dtype.itemsize

    @property
    def fetched_bytes(self) -> int:
        """Of the rows that a fetch returns."""
        return len(self.entries) * self.tokens * self.per_token * self.hidden * self.dtype.itemsize

    def scale_bytes(self, nodes: int) -> int:
        """Of a rank's part of the scales."""
        return sum(self.entries) * nodes * self.packs * 4


def _bare(complete: Callable[[], Tuple[torch.Tensor, Any]]) -> torch.Tensor:
    return complete()[0]


@eager_class
class EngramBuffer(BufferBase, ElasticBuffer):
    """Tables of several layers. docs/python.md has the differences from DeepEP's."""

    barrier = comm.barrier  # type: ignore[assignment]

    def __init__(self, group: Any, num_gpu_bytes: int, num_rdma_storage_bytes: int, use_cpu_rdma_storage: bool,
                 num_allocated_qps: int, qp_depth: int, restrict_rd_atomic: bool = False,
                 allow_hybrid_mode: bool = True, sl_idx: Optional[int] = None, num_gpu_timeout_secs: int = 100,
                 explicitly_destroy: bool = False) -> None:
        """Collective. use_cpu_rdma_storage, num_allocated_qps, qp_depth and restrict_rd_atomic have no effect: rows
        stay on the device of what write() is given."""
        super().__init__(
            group, checks.positive("num_gpu_bytes", num_gpu_bytes) + checks.positive(
                "num_rdma_storage_bytes", num_rdma_storage_bytes), num_rdma_storage_bytes,
            allow_hybrid_mode=bool(allow_hybrid_mode), sl_idx=3 if sl_idx is None else sl_idx,
            num_allocated_qps=checks.positive("num_allocated_qps", num_allocated_qps),
            num_gpu_timeout_secs=num_gpu_timeout_secs, explicitly_destroy=explicitly_destroy)
        self._unused(use_cpu_rdma_storage=(bool(use_cpu_rdma_storage), False), qp_depth=(qp_depth, 1024),
                     restrict_rd_atomic=(bool(restrict_rd_atomic), False))
        self.num_gpu_bytes, self.num_rdma_storage_bytes = num_gpu_bytes, num_rdma_storage_bytes
        self.use_cpu_rdma_storage = use_cpu_rdma_storage
        self.context = Context(num_gpu_bytes, self.get_physical_domain_size(), self.get_logical_domain_size(),
                               num_rdma_storage_bytes)
        self._layers: Optional[_Layers] = None
        self._scales: Optional[List[torch.Tensor]] = None

    def destroy(self) -> None:
        """As ElasticBuffer's."""
        super().destroy()
        self.context = self._scales = None

    def _groups(self) -> List[Any]:
        self._open()
        return self._parts["engram"].groups if "engram" in self._parts else []

    @staticmethod
    def get_storage_size_hint(group: Any, num_entries_per_layer: Sequence[int], hidden: int, num_max_tokens: int,
                              num_entries_per_token: int, dtype: torch.dtype = torch.bfloat16,
                              num_sf_packs: int = 0) -> Tuple[int, int]:
        """(num_gpu_bytes, num_rdma_storage_bytes) of the constructor."""
        layers = _Layers(num_entries_per_layer, hidden, num_max_tokens, num_entries_per_token, dtype, num_sf_packs)
        scales = layers.scale_bytes(get_physical_domain_size(group)[0])
        return (sizes.up(layers.fetched_bytes, sizes.ALIGNMENT) + sizes.up(scales, sizes.ALIGNMENT),
                sizes.up(layers.storage_bytes, sizes.ALIGNMENT))

    @staticmethod
    def get_theoretical_config(group: Any, num_layers: int, num_max_tokens: int, num_entries_per_token: int,
                               num_max_read_requests_per_qp: int = 16) -> Tuple[int, int, bool]:
        """(num_allocated_qps, qp_depth, restrict_rd_atomic) of the constructor, by DeepEP's model, with as many peers
        as there are nodes."""
        requests = checks.positive("num_layers", num_layers) * checks.positive("num_max_tokens", num_max_tokens) * \
            checks.positive("num_entries_per_token", num_entries_per_token)
        return sizes.engram_config(
            get_physical_domain_size(group)[0], requests, 90 if check_fast_rdma_atomic_support() else 45,
            checks.positive("num_max_read_requests_per_qp", num_max_read_requests_per_qp))

    def set_config(self, num_entries_per_layer: Sequence[int], hidden: int, num_max_tokens: int,
                   num_entries_per_token: int, dtype: torch.dtype = torch.bfloat16, num_sf_packs: int = 0) -> None:
        """The sizes of what write() and fetch() are given. Collective."""
        layers = _Layers(num_entries_per_layer, hidden, num_max_tokens, num_entries_per_token, dtype, num_sf_packs)
        for name, needed, most in (
                ("num_rdma_storage_bytes", layers.storage_bytes, self.num_rdma_storage_bytes),
                ("num_gpu_bytes", layers.fetched_bytes + layers.scale_bytes(self.num_rdma_ranks), self.num_gpu_bytes)):
            if needed > most:
                raise wrong("set_config", "at most %s = %d" % (name, most), "%d bytes" % needed)
        rows = self.num_ranks * sum(layers.entries)
        if rows >= 1 << 31:
            raise wrong("num_entries_per_layer", "less than 2^31 rows on all ranks", rows)
        given = {name: str(value) for name, value in vars(layers).items()}
        parts = self._open().bootstrap.allgather(json.dumps(given).encode())
        compare([json.loads(part) for part in parts])
        self._layers = layers

    def write(self, storages: Sequence[torch.Tensor], sfs: Optional[Sequence[torch.Tensor]] = None) -> None:
        """Stores this rank's rows of each layer, [entries, hidden], with the scales of all ranks, [ranks * entries,
        packs]. Collective."""
        layers = self._configured("write")
        if len(storages) != len(layers.entries):
            raise wrong("storages", "%d tensors, one for each layer" % len(layers.entries), len(storages))
        for entries, storage in zip(layers.entries, storages):
            checks.tensor("storages", storage, (layers.dtype,), (entries, layers.hidden))
        if (sfs is None) != (not layers.packs) or sfs is not None and len(sfs) != len(layers.entries):
            raise wrong("sfs", "a tensor for each layer, if dtype is e4m3", "None" if sfs is None else len(sfs))
        for entries, scales in zip(layers.entries, sfs or ()):
            shape = (self.num_ranks * entries, layers.packs)
            if checks.dense("sfs", scales, 2).element_size() != 4 or scales.shape != shape:
                raise wrong("sfs", "4-byte scales [%d, %d]" % shape, describe(scales))
        rows = torch.cat([storage.view(torch.uint8) for storage in storages]).view(layers.dtype)
        copied = None if sfs is None else [scales.clone() for scales in sfs]  # before it: then they are complete
        self._set_part("engram", lambda: Engram(self._engine, rows, None, self._fetch_bytes(layers)))
        self._scales = copied

    @staticmethod
    def _fetch_bytes(layers: _Layers) -> int:
        return len(layers.entries) * layers.tokens * layers.per_token * sizes.up(layers.hidden * layers.dtype.itemsize)

    def fetch(self, indices: torch.Tensor, num_qps: int = 0, use_tma_aligned_col_major_sf: bool = True) -> \
            List[Callable[[], Any]]:
        """Fetches rows of all layers: int32 [layers, tokens, n] of rank * entries + entry. Returns a function for each
        layer, whose result is the rows [tokens, n * hidden], or with scales a pair. Collective, unlike DeepEP's."""
        layers = self._configured("fetch")
        table = self._part("engram", "fetch", "write")
        self._check_qps(num_qps)
        checks.tensor("indices", indices, (torch.int32,), (len(layers.entries), None, layers.per_token))
        if indices.shape[1] > layers.tokens:
            raise wrong("indices", "at most num_max_tokens = %d tokens" % layers.tokens, indices.shape[1])
        rows = torch.cat([self._rows(layers, layer, indices[layer]) for layer in range(len(layers.entries))])
        data, _none = table.fetch(rows, False)()
        parts = data.chunk(len(layers.entries)) if data.shape[0] else [data] * len(layers.entries)
        if self._scales is None:
            return [functools.partial(_bare, on_any_stream(part, None)) for part in parts]
        return [on_any_stream(part, gather_scales(scales, index, use_tma_aligned_col_major_sf))
                for part, scales, index in zip(parts, self._scales, indices)]

    def _configured(self, call: str) -> _Layers:
        self._open()
        if self._layers is None:
            raise checks.refused("%s: expected set_config() before it" % call)
        return self._layers

    def _rows(self, layers: _Layers, layer: int, index: torch.Tensor) -> torch.Tensor:
        """The rows of the one table that a layer's indices mean."""
        entries, most = layers.entries[layer], self.num_ranks * layers.entries[layer]
        if index.device.type == "cpu" and index.numel():  # on a GPU the host would have to wait for the indices
            for end in torch.aminmax(index):
                checks.index("indices[%d]" % layer, int(end), most)
        rank = torch.div(index, entries, rounding_mode="floor")
        return index + rank * (sum(layers.entries) - entries) + layers.first[layer]
