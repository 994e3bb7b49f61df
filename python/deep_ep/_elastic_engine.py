# SPDX-License-Identifier: Apache-2.0
"""The EPX groups of an ElasticBuffer.

The number of experts is known at the first dispatch only, so the group is created there, for the tokens, hidden size
and top-k of the buffer. It is replaced by a larger one when a call needs more. All ranks pass the same values in the
same calls, so all ranks decide alike, and a call within the limits asks nobody.
"""

from typing import Any, Dict, List, Optional, Tuple

import epx
import torch

from ._elastic_meeting import Meeting
from ._engine import Engine, Pool
from ._routing import Routing
from ._settings import Settings

_SPARE_HANDLES = 3
_BYTES_PER_ENTRY = 8 + 4  # beside a row: an index and a weight
_ROW_BYTES = 40 << 20  # for rows in torch's memory, where results take all of num_bytes
_SMALL_BYTES = 4 << 20  # small results, and what alignment takes
_MOST_SPARE = 19 << 20  # with those, for rows of expanded dispatches, and for handles beside the heap
_HANDLE_BYTES = 8 * 7 * 4  # per token and expert: tables of int32 of the first handles, with expansion and without
_MOST_EXPANDED = 2.25  # times the rows of all tokens of all ranks: for more rows of expanded dispatches no heap is made
_NO_LIMIT = 2**31 - 1  # of a handle that drops rows: each update says how many this rank takes
_DEFAULT_TOPK = 8
_DEFAULT_TIMEOUT_S = 100  # DeepEP's and EPX's: EPX_TIMEOUT_MS counts where the caller leaves it


class ElasticSettings(Settings):
    """The sizes that the caller of ElasticBuffer gives; 0 = not given."""

    def __init__(self, num_bytes: int, max_tokens: int, hidden: int, topk: int, gpu_timeout_s: int,
                 use_fabric: bool, cpu_timeout_s: int = 300) -> None:
        super().__init__(num_bytes, 0, False, use_fabric)
        self.cpu_timeout_s, self.gpu_timeout_s = cpu_timeout_s, gpu_timeout_s
        self.elastic_tokens, self.hidden, self.topk = max_tokens, hidden, topk
        self.timeout_ms = 0 if gpu_timeout_s == _DEFAULT_TIMEOUT_S else gpu_timeout_s * 1000

    def high_throughput_memory(self, device: torch.device, given: int, nranks: int, nnodes: int,
                               config: Dict[str, Any]) -> Dict[str, int]:
        """On one node of GPUs the heap has room for the largest result of a dispatch without CPU sync, which num_bytes
        has: a row for every token of every rank. Expanded dispatches to as many ranks as top-k may have a few rows
        more: there is room for those, too. EPX's own rows take little more than that. A result that finds no room is
        copied once more."""
        memory = super().high_throughput_memory(device, given, nranks, nnodes, config)
        if memory and nnodes == 1:
            row = config["max_hidden_bytes"] + config["max_topk"] * _BYTES_PER_ENTRY
            results = min(nranks * config["max_tokens_per_rank"] * row, given)
            handles = _HANDLE_BYTES * config["max_tokens_per_rank"] * config["max_topk"]
            results += max(min(results // 32 + _SMALL_BYTES, _MOST_SPARE - handles), _SMALL_BYTES)
            if results > memory["alloc_bytes"]:
                memory = {"ht_node_bytes": min(memory["ht_node_bytes"], _ROW_BYTES), "alloc_bytes": results}
        return memory

    @staticmethod
    def with_expanded(memory: Dict[str, int], given: int, nranks: int, nnodes: int, config: Dict[str, Any],
                      rows: int) -> Dict[str, int]:
        """The same with room for so many rows of an expanded dispatch, and a few more, on one node of GPUs. Where there
        are more of them than tokens of all ranks, num_bytes does not have them: other libraries return them in torch's
        memory. Buffers with less than those tokens need are left as they are."""
        row = config["max_hidden_bytes"] + config["max_topk"] * _BYTES_PER_ENTRY
        tokens = nranks * config["max_tokens_per_rank"]
        if not memory or nnodes > 1 or given < tokens * row or rows > _MOST_EXPANDED * tokens \
                or (rows + rows // 64) * row <= memory["alloc_bytes"] - _SMALL_BYTES // 2:
            return memory
        return dict(memory, alloc_bytes=max(memory["alloc_bytes"], (rows + rows // 24) * row + 2 * _SMALL_BYTES))


class ElasticPool(Pool):
    """A group, its heap, and free handles by layout, top-k, alignment and whether they drop rows."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.plans: Dict[Any, Any] = {}

    def _make(self, layout: epx.Layout, topk: int, alignment: int, drops: bool) -> epx.Handle:
        return self.made(self.group.handle(
            epx.Mode.HIGH_THROUGHPUT, layout, topk, alignment, source_map=layout is epx.Layout.EXPERT_MAJOR,
            drop_rows=_NO_LIMIT if drops else 0))

    def _free(self, handle_kind: Tuple[epx.Layout, int, int, bool], in_graph: bool) -> List[epx.Handle]:
        return self._handles[(*handle_kind, in_graph)]  # type: ignore[index]

    def take_handle(self, layout: epx.Layout, topk: int, alignment: int, drops: bool = False) -> epx.Handle:
        """Returns a free handle, or creates one: see Pool.take(). `drops`: its updates may drop rows."""
        capturing, kind = self.capturing(), (layout, topk, alignment, drops)
        for in_graph in (True, False) if capturing else (False,):
            free = self._free(kind, in_graph)
            if free:
                return free.pop()
        if not self.on_cpu and not capturing:  # nothing can be allocated during a capture
            self._free(kind, False).extend(self._make(*kind) for _ in range(_SPARE_HANDLES))
        return self._make(*kind)

    def give(self, handle: epx.Handle, in_graph: bool) -> None:
        """Returns a handle whose routing is no longer referenced."""
        self._free((handle.layout, handle.topk, handle.expert_alignment, handle.drop_rows > 0), in_graph).append(handle)

    def close(self, wait: bool = True) -> None:
        """Destroys the group."""
        self.plans.clear()
        super().close(wait)


class ElasticRouting(Routing):
    """The routing of a dispatch, `captured` or not: `tokens` sent, `rows` of the result, `lines` of its source map.
    With expansion, `used`: the rows that combine reads, as far as the host knows them; `flat`: the same routing without
    expansion, if it was used."""

    def __init__(self, pool: ElasticPool, handle: epx.Handle, tokens: int) -> None:
        self.captured = pool.capturing()
        super().__init__(pool, handle, self.captured)
        self.tokens = tokens
        self.rows = self.lines = self.used = 0
        self.flat: Optional[ElasticRouting] = None
        self.num_sms = 0  # that the caller gave to the dispatch


class ElasticEngine(Engine):
    """The groups of one ElasticBuffer."""

    settings: ElasticSettings

    def __init__(self, bootstrap: epx.Bootstrap, settings: ElasticSettings, alike: Dict[str, int]) -> None:
        """`alike`: arguments of the constructor that are the same on all ranks."""
        super().__init__(bootstrap, settings)
        self._small: Dict[torch.device, epx.Group] = {}
        self._meeting = Meeting(bootstrap, alike)
        self.store = self._meeting.store  # of torch.distributed, if all ranks have the same one

    def elastic_pool(self, device: torch.device, num_experts: int, max_tokens: int, hidden_bytes: int,
                     topk: int, alignment: int = 0) -> ElasticPool:
        """The pool for a dispatch of these sizes. It is created if needed, which is collective. `alignment`: of a
        dispatch with expansion, for whose rows there is room if it is the one that the pool is created for; else 0."""
        pool = self._high.get((device, num_experts))
        if pool is None or max_tokens > pool.max_tokens or not pool.fits(topk, hidden_bytes):
            self._meet("Dispatch CPU wait", "num_cpu_timeout_secs", self.settings.cpu_timeout_s,
                       "this rank makes a group for num_max_tokens_per_rank = %d, %d bytes per row, top-k %d of %d "
                       "experts, on %s; all ranks pass the same" % (
                           max_tokens, hidden_bytes, topk, num_experts, device.type))
            had = (pool.max_tokens, pool.hidden_bytes, pool.topk) if pool is not None else (0, 0, 0)
            self._replace(self._high.pop((device, num_experts), None), self._old_high)  # first: it may need its memory
            given = self.settings
            pool = self._make_elastic(
                device, num_experts, max(max_tokens, given.elastic_tokens, had[0]),
                max(hidden_bytes, 2 * given.hidden, had[1]), max(topk, given.topk or _DEFAULT_TOPK, had[2]),
                max(max_tokens, given.elastic_tokens, had[0]) * topk + self.local_experts(num_experts) * alignment // 2
                if alignment else 0)
            self._high[(device, num_experts)] = pool
        assert isinstance(pool, ElasticPool)
        return pool

    def _meet(self, what: str, limit: str, timeout_s: float, why: str = "") -> None:
        """Called before a group is created; `why` is for the message. Not for another attempt after Ctrl-C: ranks that
        have met already wait for each other in the all-gather itself."""
        if not self.bootstrap.left:
            self._meeting.wait(what, limit, timeout_s, why)

    def _make_elastic(self, device: torch.device, num_experts: int, max_tokens: int, hidden_bytes: int,
                      topk: int, expanded_rows: int) -> ElasticPool:
        config = dict(
            modes=epx.Mode.HIGH_THROUGHPUT, num_experts=num_experts, max_tokens_per_rank=max_tokens,
            max_hidden_bytes=hidden_bytes, max_topk=topk,
            layouts=(1 << epx.Layout.FLAT) | (1 << epx.Layout.EXPERT_MAJOR))
        given = self.settings.num_nvl_bytes
        memory = self.settings.high_throughput_memory(device, given, self.nranks, self.nnodes, config)
        config.update(self.settings.with_expanded(memory, given, self.nranks, self.nnodes, config, expanded_rows))
        group = self._group(device, timeout_ms=self.settings.timeout_ms, **config)
        return ElasticPool(group, device, max_tokens, topk, hidden_bytes)

    def small_group(self, device: torch.device) -> epx.Group:
        """A group for barriers. It is created if needed, which is collective."""
        group = self._small.get(device)
        if group is None:
            self._meet("barrier", *self._gpu_timeout())
            group = self._small[device] = self._group(
                device, modes=epx.Mode.HIGH_THROUGHPUT, num_experts=self.nranks, max_tokens_per_rank=1,
                max_hidden_bytes=16, max_topk=1, alloc_bytes=4096, num_agents=1, timeout_ms=self.settings.timeout_ms)
        return group

    def _gpu_timeout(self) -> Tuple[str, float]:
        """(its name, seconds): of every wait of the groups."""
        if self.settings.timeout_ms:
            return "num_gpu_timeout_secs", self.settings.gpu_timeout_s
        return "EPX_TIMEOUT_MS / 1000", 1e-3 * self.timeout_ms

    def _close_small(self, wait: bool = True) -> None:
        small, self._small = self._small, {}
        for group in small.values():
            group.destroy(wait)

    def recover(self) -> None:
        """Destroys the groups; the next calls create new ones."""
        self._close_small()
        self.bootstrap.left = False  # as on the other ranks: all of them meet before the next group
        super().recover()

    def close(self, handles_too: bool) -> None:
        """Destroys the groups. Local."""
        self._close_small(wait=handles_too)
        super().close(handles_too)


def local_index(node_of: Tuple[int, ...]) -> Optional[int]:
    """Ranks per node, where all nodes have as many and each has consecutive ranks; else None."""
    nnodes = max(node_of) + 1
    per = len(node_of) // nnodes
    return per if node_of == tuple(r // per for r in range(nnodes * per)) else None
