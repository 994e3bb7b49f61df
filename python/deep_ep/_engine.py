# SPDX-License-Identifier: Apache-2.0
"""The EPX groups of a buffer.

A DeepEP buffer is created with a number of bytes. An EPX group is created with the numbers of experts and tokens, the
hidden size and top-k. So a group is created in the first call, when these sizes are known, and is replaced by a larger
one when a later call needs more. All ranks pass the same values in the same calls, so all ranks decide alike. Only the
number of tokens differs between ranks. A rank that has more tokens than the group is for says so in the update, and all
ranks then create a larger group together. A replaced group is destroyed with the last handle of its routings, or with
the buffer if an operation was captured into a graph.

If the bytes of a low-latency buffer are a hinted value, the sizes follow from them. That group is created with the
buffer, so that a rank may be missing from the first operation on.
"""

import collections
import os
import struct
import weakref
from typing import Any, DefaultDict, Dict, List, Optional, Tuple

import epx
import torch
from epx._library import load

from ._checks import refused
from ._memory import Heap, calls
from ._settings import LOW_LATENCY_TOPK, Settings, hinted_sizes
from ._streams import capture_of, settle


_SPARE_HANDLES = 3


class Pool:
    """A group, its heap, and free handles for reuse."""

    def __init__(self, group: epx.Group, device: torch.device, max_tokens: int, topk: int, hidden_bytes: int) -> None:
        self.group = group
        self.device = device
        self.lib = load()
        self.on_cpu = device.type == "cpu"
        self.capturing = capture_of(device)
        self._index = device.index or 0
        self.max_tokens = max_tokens
        self.topk = topk
        self.hidden_bytes = hidden_bytes
        self.heap = Heap(group, device)
        info = group.info
        self._place = calls.Place(device, -1 if self.on_cpu else self._index, self.heap.native, info.nranks,
                                  info.local_experts, info.nnodes, info.num_experts, topk, hidden_bytes,
                                  info.max_recv_tokens)
        self.combine_plans: Dict[Any, Any] = {}  # low latency, by kind of call
        self.combine_buffers: List[Optional[torch.Tensor]] = [None, None]
        self.next_combine_buffer = 0
        self.used = False  # True after the first dispatch
        self.routings = 0  # number of routings that are referenced
        self.captured = False  # True once an operation was captured into a graph
        self._left_alone = False
        self._replaced = False
        self.common = True  # the same ranks have it: all of them until it was replaced
        self.closed = False  # the group itself lives until the last of its memory is released
        # All handles. A routing in a reference cycle is finalized together with what only it refers to: a handle must
        # not be among that, for it would end while the routing gives it back.
        self._made: List[epx.Handle] = []
        # Free handles, by (top-k, used in graphs).
        self._handles: DefaultDict[Tuple[int, bool], List[epx.Handle]] = collections.defaultdict(list)

    def take(self, mode: epx.Mode, layout: epx.Layout, topk: int) -> epx.Handle:
        """Returns a free handle, or creates one.

        Operations of a group run in the order in which they are issued. So a handle may be used for another routing as
        soon as the previous routing is no longer referenced. A graph may be replayed at any time, so handles that were
        captured are reused for graphs only.
        """
        capturing = self.capturing()
        for in_graph in (True, False) if capturing else (False,):
            free = self.free_handles(topk, in_graph)
            if free:
                return free.pop()
        if not self.on_cpu and not capturing:
            # Spare handles for captures: there, HIP cannot allocate memory, and CUDA is slow.
            for _ in range(_SPARE_HANDLES):
                self.give(self.made(self.group.handle(mode, layout, topk)), False)
        return self.made(self.group.handle(mode, layout, topk))

    def made(self, handle: epx.Handle) -> epx.Handle:
        """Keeps a new handle as long as the pool."""
        self._made.append(handle)
        return handle

    def free_handles(self, topk: int, in_graph: bool) -> List[epx.Handle]:
        """The list of free handles itself, not a copy."""
        return self._handles[(topk, in_graph)]

    def give(self, handle: epx.Handle, in_graph: bool) -> None:
        """Returns a handle whose routing is no longer referenced."""
        self._handles[(handle.topk, in_graph)].append(handle)

    def routing_gone(self) -> None:
        """Called by a finalizer when a routing is no longer referenced."""
        self.routings -= 1
        self._close_if_unused(wait=False)

    def _close_if_unused(self, wait: bool) -> None:
        if not self.routings and (self._left_alone or self._replaced and not self.captured):
            self.close(wait)

    def close(self, wait: bool = True) -> None:
        """Destroys the group. The heap is freed with the last of its tensors. `wait`: see epx.Group.destroy()."""
        self.closed = True
        self.combine_buffers = [None, None]
        self.combine_plans.clear()
        self.heap.close()
        self.group.destroy(wait)

    def check_open(self) -> None:
        """Raises if the buffer was destroyed: at once, and on every rank alike. Which ranks still have tensors of the
        group, and with them the group, differs."""
        if self.closed:
            raise refused("the buffer of this handle was destroyed, or has recovered from a failure since")
        self.group.address  # raises in a forked process

    def finish(self) -> None:
        """Waits for all queued work."""
        self.group.sync() if self.on_cpu else torch.cuda.synchronize(self.device)

    def leave_alone(self) -> None:
        """Called by the finalizer of the buffer. Handles that are still referenced work with another one, as in
        DeepEP."""
        self._left_alone = True
        self._close_if_unused(wait=False)

    def replace(self) -> None:
        """Called when a larger one takes its place. Handles that are still referenced work as before, and so do graphs,
        as long as the buffer lives."""
        self._replaced, self.common = True, self.captured
        self._close_if_unused(wait=True)

    def stream(self) -> Optional[int]:
        """The current stream, for the C library."""
        # 0 is torch's default stream, but NULL is the group's own stream in EPX. 1 is CUDA's default stream.
        return None if self.on_cpu else torch._C._cuda_getCurrentRawStream(self._index) or 1

    def active(self) -> torch.Tensor:
        """int32 [R] on the device of the pool: 1 for each active rank, 0 for each masked rank."""
        out = torch.empty(self.group.info.nranks, dtype=torch.int32, device=self.device)
        self.group.mask_query(out, stream=None if self.on_cpu else torch.cuda.current_stream(self.device))
        if self.on_cpu:
            try:
                settle(self.group)
            except epx.EpxError:
                pass  # of an earlier operation: the next one raises it. The mask is there all the same, as on a GPU.
        return out

    def fits(self, topk: int, hidden_bytes: int) -> bool:
        """True if the group is large enough."""
        return topk <= self.topk and hidden_bytes <= self.hidden_bytes


def _probe_group(bootstrap: epx.Bootstrap, use_fabric: bool) -> epx.Group:
    """The smallest possible group; on the GPU where GPUs of several hosts may be one node."""
    config: Dict[str, Any] = dict(num_experts=1, max_tokens_per_rank=1, max_hidden_bytes=16, max_topk=1,
                                  modes=epx.Mode.HIGH_THROUGHPUT, alloc_bytes=4096, num_agents=1,
                                  use_fabric=int(use_fabric))
    if (use_fabric or os.environ.get("EPX_FABRIC", "0") != "0") and torch.cuda.is_available():
        try:
            return epx.Group(bootstrap, device=epx.Device.CUDA, device_index=torch.cuda.current_device(), **config)
        except epx.UnsupportedError:  # this build has no CUDA
            pass
    return epx.Group(bootstrap, device=epx.Device.CPU, **config)


def probe_nodes(bootstrap: epx.Bootstrap, use_fabric: bool = False) -> Tuple[epx.GroupInfo, Tuple[int, ...]]:
    """(a group's properties, node of each rank). Collective."""
    probe = _probe_group(bootstrap, use_fabric)
    info = probe.info
    nodes = [struct.unpack("i", part)[0] for part in bootstrap.allgather(struct.pack("i", info.node))]
    probe.destroy()
    return info, tuple(nodes)


class Engine:
    """The groups of one buffer."""

    def __init__(self, bootstrap: epx.Bootstrap, settings: Settings) -> None:
        self._bootstrap: Optional[epx.Bootstrap] = bootstrap
        self.settings = settings
        # Plans of low-latency dispatches: by the checked properties of the arguments, and by pool and kind of call.
        self.plans: Dict[Any, Any] = {}
        self.plans_of_pools: Dict[Any, Any] = {}
        self.closed = False
        self._high: Dict[Tuple[torch.device, int], Pool] = {}
        self._last_high: Optional[Pool] = None  # that of the last dispatch, of those
        self._low: Dict[Tuple[torch.device, int, int], Pool] = {}
        # Replaced ones, which handles or graphs use; some are closed.
        self._old_high: List[Pool] = []
        self._old_low: List[Pool] = []
        # On GPUs, those that were replaced included.
        self._groups: List[Tuple[int, "weakref.ref[epx.Group]"]] = []
        self.rank, self.nranks = bootstrap.rank, bootstrap.nranks
        info, self.node_of = probe_nodes(bootstrap, settings.use_fabric)
        self.node, self.nnodes, self.timeout_ms = info.node, info.nnodes, info.timeout_ms  # EPX_TIMEOUT_MS, or 100000

    def close(self, handles_too: bool) -> None:
        """Destroys the groups. Without `handles_too`, for finalizers, a group with referenced handles lives until they
        are released."""
        self.closed = True
        self._forget_plans()
        for pool in self._take_pools():
            pool.close() if handles_too else pool.leave_alone()
        self._bootstrap = None

    def check_graphs(self, graphs_released: bool, others: bool = False) -> None:
        """Raises if a graph may be replayed that would go on in the memory of groups that recover() destroys. `others`:
        operations of groups without a pool were captured."""
        if not graphs_released and (others or any(pool.captured for pool in self._pools())):
            raise refused("recover: operations of this buffer were captured into graphs, whose replays would use "
                          "memory that recover() frees: release these graphs on all ranks, then call "
                          "recover(graphs_released=True), and capture again")

    def recover(self) -> None:
        """Destroys the groups; the next calls create new ones."""
        self._forget_plans()
        for pool in self._take_pools():
            pool.close()

    def _pools(self) -> List[Pool]:
        return [*self._high.values(), *self._low.values(), *self._old_high, *self._old_low]

    def _take_pools(self) -> List[Pool]:
        """All of them; the engine has none from now on."""
        pools = [pool for pool in self._pools() if not pool.closed]
        self._last_high = None
        self._high.clear()
        self._low.clear()
        self._old_high.clear()
        self._old_low.clear()
        return pools

    @staticmethod
    def _replace(pool: Optional[Pool], old: List[Pool]) -> None:
        """A larger pool takes its place. While handles or graphs use it, it is one of the `old` ones."""
        if pool is not None:
            pool.replace()
            old[:] = [one for one in (*old, pool) if not one.closed]

    def _forget_plans(self) -> None:
        self.plans.clear()
        self.plans_of_pools.clear()

    def leave(self) -> None:
        """Called when Python exits: drops the process group. The EPX groups are destroyed by epx."""
        self._bootstrap = None

    @property
    def bootstrap(self) -> epx.Bootstrap:
        """The bootstrap. Raises if the buffer was destroyed."""
        if self._bootstrap is None:
            raise refused("the buffer was destroyed")
        return self._bootstrap

    def local_experts(self, num_experts: int) -> int:
        """Experts per rank."""
        return -(-num_experts // self.nranks)

    def high_throughput(self, device: torch.device, num_experts: int, tokens: int, hidden_bytes: int,
                        topk: int) -> Pool:
        """The pool for a dispatch of these sizes. It is created if needed, which is collective."""
        pool = self._high.get((device, num_experts))
        if pool is None or not pool.fits(topk, hidden_bytes):
            pool = self.grow_high_throughput(device, num_experts, tokens, hidden_bytes, topk)
        self._last_high = pool
        return pool

    def grow_high_throughput(self, device: torch.device, num_experts: int, tokens: int, hidden_bytes: int,
                             topk: int) -> Pool:
        """Replaces the pool by one for these sizes as well, and for the tokens of all ranks. Collective."""
        self._last_high, old = None, self._high.pop((device, num_experts), None)
        had = (old.max_tokens, old.hidden_bytes, old.topk) if old is not None else (0, 0, 8)
        self._replace(old, self._old_high)  # first: the new one may need its memory
        pool = self._make_high(device, num_experts, max(tokens, had[0]), max(hidden_bytes, had[1]), max(topk, had[2]))
        self._high[(device, num_experts)] = pool
        return pool

    def high_throughput_pool(self, device: torch.device, num_experts: int) -> Optional[Pool]:
        """The pool for these experts, or None if it does not exist yet."""
        return self._high.get((device, num_experts))

    def _make_high(self, device: torch.device, num_experts: int, tokens: int, hidden_bytes: int, topk: int) -> Pool:
        nbytes = self.settings.num_nvl_bytes + (self.settings.num_rdma_bytes if self.nnodes > 1 else 0)
        parts = [struct.unpack("2q", part) for part in self.bootstrap.allgather(struct.pack("2q", tokens, nbytes))]
        most = max(part[0] for part in parts)
        # A power of two: a caller whose batches grow slowly creates few groups.
        max_tokens = max(self.settings.max_tokens, 1 << (most - 1).bit_length() if most else 0)
        config = dict(modes=epx.Mode.HIGH_THROUGHPUT, num_experts=num_experts, max_tokens_per_rank=max_tokens,
                      max_hidden_bytes=hidden_bytes, max_topk=topk)
        config.update(self.settings.high_throughput_memory(
            device, min(part[1] for part in parts), self.nranks, self.nnodes, config))
        group = self._group(device, **config)
        return Pool(group, device, max_tokens, topk, hidden_bytes)

    def low_latency(self, device: torch.device, max_tokens: int, num_experts: int, hidden_bytes: int,
                    topk: int) -> Pool:
        """The pool for a dispatch of these sizes. The shapes depend on max_tokens, so each value has its own group."""
        key = (device, max_tokens, num_experts)
        pool = self._low.get(key)
        if pool is None or not pool.fits(topk, hidden_bytes):
            old = (pool.topk, pool.hidden_bytes) if pool else (LOW_LATENCY_TOPK, 0)
            self._check_all_active(pool, "num_max_dispatch_tokens_per_rank = %d, num_experts = %d, %d bytes per row, "
                                   "top-k %d" % (max_tokens, num_experts, hidden_bytes, topk))
            self._forget_plans()  # they may refer to the pool that is replaced
            if pool is not None:
                pool.captured = self._any_rank(pool.captured)
            self._replace(self._low.pop(key, None), self._old_low)  # first: the new one may need its memory
            pool = self._low[key] = self._make_low(
                device, max_tokens, num_experts, max(hidden_bytes, old[1]), max(topk, old[0]))
        return pool

    def _any_rank(self, flag: bool) -> bool:
        """True if it is so on any rank: cleaning masks is collective, so all ranks keep a group that a graph of one of
        them uses. Collective."""
        return any(part != b"\0" for part in self.bootstrap.allgather(b"\1" if flag else b"\0"))

    def _check_all_active(self, has: Optional[Pool], needs: str) -> None:
        """Raises if a rank is masked: it would not come to create a group, and the others would wait for it."""
        for pool in self.low_latency_pools() if self.settings.enable_shrink else ():
            masked = (pool.active() == 0).nonzero().flatten().tolist()
            if masked:
                limits = "" if has is None else " (there is one for %d bytes per row, top-k %d)" % (
                    has.hidden_bytes, has.topk)
                raise refused(
                    "low latency: %s: this needs a new group%s, which all ranks create together, and rank %s is "
                    "masked: call low_latency_clean_mask_buffer() on all ranks first, or make a new buffer of the "
                    "ranks that are left" % (needs, limits, ", ".join(map(str, masked))))

    def _make_low(self, device: torch.device, max_tokens: int, num_experts: int, hidden_bytes: int, topk: int) -> Pool:
        group = self._group(device, **self.settings.low_latency_config(
            max_tokens, num_experts, hidden_bytes, topk, self.nranks))
        return Pool(group, device, max_tokens, topk, hidden_bytes)

    def prepare_low_latency(self) -> None:
        """Creates the low-latency group now, if the bytes of the buffer give the same sizes on all ranks.

        The group is for the GPU, if there is one. If ranks may be masked, a group for CPU tensors is created as well;
        it uses memory only when CPU tensors are used.
        """
        sizes = hinted_sizes(self.settings.num_rdma_bytes, self.nranks) or (0, 0, 0)
        parts = self.bootstrap.allgather(struct.pack("3q", *sizes))
        if not all(sizes) or any(part != parts[0] for part in parts):
            return
        max_tokens, hidden, num_experts = sizes
        gpu = torch.cuda.is_available()
        if gpu:
            try:
                self.low_latency(torch.device("cuda", torch.cuda.current_device()),
                                 max_tokens, num_experts, 2 * hidden, 1)
            except epx.UnsupportedError:  # this build has no CUDA; CPU tensors still work
                gpu = False
        if not gpu or self.settings.enable_shrink:
            self.low_latency(torch.device("cpu"), max_tokens, num_experts, 2 * hidden, 1)

    def pools(self, low_latency: bool) -> List[Pool]:
        """The pools of a mode that exist."""
        return list((self._low if low_latency else self._high).values())

    def low_latency_pools(self) -> List[Pool]:
        """The low-latency pools that all ranks have: the present ones, and those that a graph used when they were
        replaced."""
        return [*self._low.values(), *(pool for pool in self._old_low if pool.common and not pool.closed)]

    def left_low_latency_pools(self) -> List[Pool]:
        """Those that were replaced and that this rank still has: other ranks may have released their handles."""
        return [pool for pool in self._old_low if not pool.common and not pool.closed]

    def low_latency_devices(self, max_tokens: int, num_experts: int) -> List[torch.device]:
        """The devices on which pools of this size have been used."""
        return [key[0] for key, pool in self._low.items() if pool.used and key[1:] == (max_tokens, num_experts)]

    def _group(self, device: torch.device, bootstrap: Optional[epx.Bootstrap] = None, **config: Any) -> epx.Group:
        """A group of all ranks, or of those of `bootstrap`: these make their calls in an order of their own."""
        kind = {"cpu": epx.Device.CPU, "cuda": epx.Device.CUDA}[device.type]
        group = epx.Group(bootstrap or self.bootstrap, device=kind, device_index=device.index or 0,
                          use_fabric=int(self.settings.use_fabric), **config)
        group.holds = device.type == "cpu"  # on a GPU, torch frees memory in stream order
        if device.type != "cpu" and bootstrap is None:
            self._put_in_order(group, device)
        return group

    def _put_in_order(self, group: epx.Group, device: torch.device) -> None:
        """The operations of a buffer run in the order of its calls, whichever groups they use: where ranks share a GPU,
        kernels of two groups may have no room at the same time, and each rank could begin with another one."""
        self._groups = [(index, ref) for index, ref in self._groups if ref() is not None]
        for index, ref in self._groups:
            other = ref()
            if index == (device.index or 0) and other is not None and other.alive:
                group.order_with(other)
        self._groups.append((device.index or 0, weakref.ref(group)))
