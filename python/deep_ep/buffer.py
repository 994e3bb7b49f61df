# SPDX-License-Identifier: Apache-2.0
"""Buffer: DeepEP's V1 interface."""

import atexit
import contextlib
import weakref
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import epx
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from . import _checks as checks
from . import _low_latency
from . import _unused as unused
from ._calls import calls
from ._checks import refused, wrong
from ._eager import eager_class
from ._engine import Engine, Pool
from ._settings import Settings, low_latency_hint
from ._streams import CudaLaunch, HostLaunch, overlap_of
from .config import DEFAULT_SMS, Config, most_sms
from .utils import EventHandle, EventOverlap, initialize_uccl

_Tokens = Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
_Handle = Tuple[Any, ...]
_Event = Union[None, EventOverlap, EventHandle]


_living: "weakref.WeakSet[Buffer]" = weakref.WeakSet()


class Runtime:
    """The methods of `Buffer.runtime` that callers use."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def is_available(self) -> bool:
        """True until the buffer is destroyed."""
        return not self._engine.closed

    def get_num_rdma_ranks(self) -> int:
        """The number of nodes."""
        return self._engine.nnodes

    def get_rdma_rank(self) -> int:
        """The node of this rank."""
        return self._engine.node

    def get_local_device_id(self) -> int:
        """The number of this rank's GPU, or -1."""
        return torch.cuda.current_device() if torch.cuda.is_available() else -1


@eager_class
class Buffer:
    """Expert-parallel communication for a group of ranks: high throughput (dispatch, combine) and low latency
    (low_latency_dispatch, low_latency_combine), inside a node and between nodes, for CUDA and CPU tensors.

    Creating a buffer is collective. docs/python.md lists the differences from DeepEP.
    """

    num_sms: int = DEFAULT_SMS

    def __init__(self, group: Any = None, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0,
                 low_latency_mode: bool = False,
                 num_qps_per_rank: int = 24, allow_nvlink_for_low_latency_mode: bool = True, allow_mnnvl: bool = False,
                 explicitly_destroy: bool = False, enable_shrink: bool = False, comm: Any = None,
                 use_default_stream_as_comm_stream: bool = False, use_fabric: Optional[bool] = None,
                 is_intranode: Optional[bool] = None) -> None:
        """`group` is a torch.distributed group of any backend (only all_gather_object is used). Without it, `comm` is
        an mpi4py communicator.

        num_nvl_bytes and num_rdma_bytes are hints for the memory to reserve on a GPU. With allow_mnnvl or use_fabric
        (an addition of forks), GPUs of several hosts whose NVLinks are one fabric are one node; where the driver of any
        rank does not offer that, the log of rank 0 says why, and hosts are nodes. num_qps_per_rank and
        allow_nvlink_for_low_latency_mode are accepted and have no effect.
        use_default_stream_as_comm_stream is an addition of Primus-Turbo: operations run on the stream that is current
        when they are called. is_intranode is an addition of UCCL-EP; EPX finds the nodes itself.
        """
        checks.positive("num_nvl_bytes", num_nvl_bytes, 0)
        checks.positive("num_rdma_bytes", num_rdma_bytes, 0)
        if group is None and comm is None:
            checks.process_group(None)  # where there is none, dist.group.WORLD is None too
            raise wrong("group, comm", "one of them", "neither")
        bootstrap = epx.bootstrap.from_torch(checks.process_group(group)) if group is not None \
            else epx.bootstrap.from_mpi(comm)
        self._engine = Engine(bootstrap, Settings(num_nvl_bytes, num_rdma_bytes, enable_shrink,
                                                  bool(allow_mnnvl or use_fabric)))
        self.rank = bootstrap.rank
        self.group_size = bootstrap.nranks
        unused.variables(self.rank)
        unused.arguments(self.rank, "deep_ep.Buffer", num_qps_per_rank=(num_qps_per_rank, 24),
                         allow_nvlink_for_low_latency_mode=(bool(allow_nvlink_for_low_latency_mode), True),
                         is_intranode=(is_intranode, None))
        self.group = group if group is not None else comm
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        self.runtime: Optional[Runtime] = Runtime(self._engine)
        self.proxies, self.workers = initialize_uccl()
        self._comm_stream: Any = None
        self._last_config: Optional[Config] = None
        self._on_current_stream = use_default_stream_as_comm_stream
        self._local: Dict[bool, StorageWeakRef] = {}
        self._masks_itself = False  # EPX has no such rank: only a query shows it
        if low_latency_mode:
            self._engine.prepare_low_latency()
        _living.add(self)

    def destroy(self) -> None:
        """Destroys the buffer; needs explicitly_destroy=True. Result tensors stay valid while they are referenced."""
        if not self.explicitly_destroy:
            raise refused("destroy: expected a buffer created with explicitly_destroy=True")
        self._close(True)

    def recover(self, graphs_released: bool = False) -> None:
        """After a failure: the buffer can be used again. All ranks call it before the next operation.

        For operations that ended with an error on any rank: num_worst_tokens was too small, a rank was interrupted
        (Ctrl-C) or late. Handles from before are not valid any more, nor are graphs: where operations were captured,
        the caller says by `graphs_released` that no graph will be replayed. An addition to DeepEP's interface.
        """
        self._engine.check_graphs(graphs_released)
        self._engine.recover()
        self._masks_itself = False

    def connect_atomic_buffer(self, proxy: Any) -> None:
        """Does nothing: a name of UCCL-EP, whose proxies are started apart from a buffer."""

    def reset_rdma_buffer(self) -> None:
        """Does nothing: a name of UCCL-EP. EPX's memory needs no cleaning between operations."""

    def _close(self, handles_too: bool) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None and not engine.closed:
            engine.close(handles_too)
        self.runtime = None

    def __del__(self) -> None:
        if not getattr(self, "explicitly_destroy", False):
            self._close(False)

    # ---- Settings

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Always True: EPX also has the features that DeepEP has only on Hopper."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Sets the number of SMs, an even number, that high-throughput calls without a config take at most: 0 for EPX's
        own number, which EPX_NUM_AGENTS sets and no call exceeds."""
        if not isinstance(new_num_sms, int) or new_num_sms < 0 or new_num_sms % 2:
            raise wrong("new_num_sms", "an even integer of at least 0", repr(new_num_sms))
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Records an event on the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int,
                                       num_experts: int) -> int:
        """The bytes of low latency's tensors on each rank, for `num_rdma_bytes`; rows on their way take a few percent
        more. A low-latency buffer with exactly this value creates its low-latency group at once, for these sizes. With
        another value it creates the group in the first dispatch."""
        return low_latency_hint(
            checks.at_most("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, checks.MOST),
            checks.at_most("hidden", hidden, checks.MOST), checks.at_most("num_ranks", num_ranks, checks.MOST_RANKS),
            checks.at_most("num_experts", num_experts, checks.MOST))

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """The Config for dispatch. It does not depend on the number of ranks."""
        checks.positive("num_ranks", num_ranks)
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """The Config for combine. It does not depend on the number of ranks."""
        checks.positive("num_ranks", num_ranks)
        return Config(Buffer.num_sms)

    def get_comm_stream(self) -> Any:
        """The communication stream, a torch.cuda.Stream. Raises RuntimeError without a GPU."""
        if self._on_current_stream and torch.cuda.is_available():
            return torch.cuda.current_stream()
        if self._comm_stream is None:
            if not torch.cuda.is_available():
                raise RuntimeError("get_comm_stream: expected a CUDA device; CPU tensors have no streams")
            self._comm_stream = torch.cuda.Stream(priority=-1)
        return self._comm_stream

    def get_local_buffer_tensor(self, dtype: torch.dtype, size: Optional[torch.Size] = None, offset: int = 0,
                                use_rdma_buffer: bool = False) -> torch.Tensor:
        """Scratch memory of num_nvl_bytes (or num_rdma_bytes) bytes, from byte `offset` on. Only the caller uses it.
        EPX stores its own state elsewhere, so clearing this memory is harmless and not necessary; on a GPU, replays
        of graphs do not run beside that. It is that of the buffer's tensors where there are none of so many bytes, else
        torch's, and returns there with the last tensor of it. The host may wait for work that uses it."""
        nbytes = self.num_rdma_bytes if use_rdma_buffer else self.num_nvl_bytes
        flat = self._scratch(use_rdma_buffer, nbytes)
        checks.positive("offset", offset, 0)
        usable = max(nbytes - offset, 0) // dtype.itemsize * dtype.itemsize
        tensor = flat[offset:offset + usable].view(dtype)
        if size is None:
            return tensor
        if torch.Size(size).numel() > tensor.numel():
            raise wrong("size", "at most %d elements" % tensor.numel(), list(size))
        return tensor[:torch.Size(size).numel()].view(size)

    def _scratch(self, rdma: bool, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes]: the memory of tensors that the caller still has, or new memory."""
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        kept = self._local.get(rdma)
        storage = None if kept is None or kept.expired() else torch.UntypedStorage._new_with_weak_ptr(kept.cdata)
        if storage is not None:
            return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))
        flat = None
        for pool in self._open().pools(rdma):
            if flat is None and pool.device == device:
                flat = pool.heap.export(nbytes)
        if flat is None:
            flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._follow()
        self._local[rdma] = StorageWeakRef(flat.untyped_storage())
        return flat

    def _follow(self) -> None:
        """What the caller writes into new memory of the heap comes behind all operations."""
        if self._comm_stream is not None and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().wait_stream(self._comm_stream)

    # ---- High throughput

    def _open(self) -> Engine:
        if self._engine.closed:
            raise refused("the buffer was destroyed")
        return self._engine

    def _launcher(self, device: torch.device, given: _Event, async_finish: bool,
                  allocate_on_comm_stream: bool) -> Callable[[Any], Any]:
        self._open()
        previous_event = overlap_of("previous_event", given)
        if allocate_on_comm_stream and (previous_event is None or not async_finish):
            raise wrong("allocate_on_comm_stream", "previous_event and async_finish with it",
                        "previous_event=%r, async_finish=%r" % (previous_event, async_finish))
        if device.type == "cpu":
            return lambda group: HostLaunch(group, previous_event, async_finish)
        return lambda _group: CudaLaunch(self.get_comm_stream(), previous_event, async_finish)

    def _sms_of(self, config: Any) -> int:
        """The number of SMs of a config, which is checked, or without one that of the class."""
        if config is None:
            return Buffer.num_sms
        if config is not self._last_config:
            if not isinstance(config, Config):
                raise wrong("config", "a Config or None", type(config).__name__)
            self._last_config = config
            unused.arguments(self.rank, "deep_ep.Config", **config.unused())
        return config.num_sms

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int,
                            previous_event: _Event = None, async_finish: bool = False,
                            allocate_on_comm_stream: bool = False) -> Tuple[
                                torch.Tensor, Optional[torch.Tensor], torch.Tensor, torch.Tensor, EventOverlap]:
        """The counts for dispatch: (num_tokens_per_rank i32[R], num_tokens_per_rdma_rank i32[nodes] or None inside a
        node, num_tokens_per_expert i32[E], is_token_in_rank bool[T,R], event). -1 in topk_idx means no expert. An id of
        num_experts or more raises an error: here on the CPU, in dispatch on a GPU."""
        return calls.layout(self, topk_idx, num_experts, previous_event, async_finish, allocate_on_comm_stream)

    def dispatch(self, x: _Tokens, handle: Optional[_Handle] = None, num_tokens_per_rank: Optional[torch.Tensor] = None,
                 num_tokens_per_rdma_rank: Optional[torch.Tensor] = None,
                 is_token_in_rank: Optional[torch.Tensor] = None, num_tokens_per_expert: Optional[torch.Tensor] = None,
                 topk_idx: Optional[torch.Tensor] = None, topk_weights: Optional[torch.Tensor] = None,
                 expert_alignment: int = 1, num_worst_tokens: int = 0, config: Optional[Config] = None,
                 previous_event: _Event = None, async_finish: bool = False,
                 allocate_on_comm_stream: bool = False, num_recv_tokens_per_expert_as_cuda: bool = False) -> Tuple[
                     _Tokens, Optional[torch.Tensor], Optional[torch.Tensor], Union[None, List[int], torch.Tensor],
                     Optional[_Handle], EventOverlap]:
        """Sends tokens to the ranks of their experts, one row per (token, rank), ordered by source rank and token.

        `x` is bf16 [T,H] or a pair (e4m3, scales). Returns (recv_x or (recv_x, recv_scales), recv_topk_idx,
        recv_topk_weights, num_recv_tokens_per_expert_list, handle, event). With the `handle` of an earlier dispatch,
        its routing is reused, and all results except recv_x and the event are None. With
        num_recv_tokens_per_expert_as_cuda, an addition of Primus-Turbo, the list is an int64 tensor on the device of x.
        This also holds with num_worst_tokens, where the list would be empty.
        """
        num_sms = self._sms_of(config)
        return calls.dispatch(
            self, x, handle, num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert,
            topk_idx, topk_weights, expert_alignment, num_worst_tokens, max(num_sms // 2, 1), most_sms(num_sms),
            previous_event, async_finish, allocate_on_comm_stream, num_recv_tokens_per_expert_as_cuda)

    def combine(self, x: torch.Tensor, handle: _Handle, topk_weights: Optional[torch.Tensor] = None, bias: Any = None,
                config: Optional[Config] = None, previous_event: _Event = None,
                async_finish: bool = False, allocate_on_comm_stream: bool = False) -> Tuple[
                    torch.Tensor, Optional[torch.Tensor], EventOverlap]:
        """Sends rows back to their source and sums them without weights. Returns (combined_x, combined_topk_weights or
        None, event). Sums are in fp32: first the bias, then the ranks in ascending order, rounded once."""
        return calls.combine(self, x, handle, topk_weights, bias, most_sms(self._sms_of(config)), previous_event,
                             async_finish, allocate_on_comm_stream)

    # dispatch() and combine() work inside a node and between nodes. Aliases have their signatures.
    internode_dispatch = dispatch
    internode_combine = combine

    # ---- Low latency

    def _low_latency_launcher(self, x: Any, async_finish: bool, return_recv_hook: bool) -> Optional[
            Callable[[Any], Any]]:
        """None if the operation runs on the current stream and no wait is needed."""
        self._open()
        if return_recv_hook:
            if async_finish:
                raise wrong("async_finish, return_recv_hook", "at most one of them", "both")
            return None
        if not isinstance(x, torch.Tensor):
            raise wrong("x", "a tensor", type(x).__name__)
        return None if x.is_cuda and not async_finish else self._launcher(x.device, None, async_finish, False)

    def low_latency_dispatch(self, x: torch.Tensor, topk_idx: torch.Tensor, num_max_dispatch_tokens_per_rank: int,
                             num_experts: int, cumulative_local_expert_recv_stats: Optional[torch.Tensor] = None,
                             dispatch_wait_recv_cost_stats: Optional[torch.Tensor] = None, use_fp8: bool = True,
                             round_scale: bool = False, use_ue8m0: bool = False, async_finish: bool = False,
                             return_recv_hook: bool = False, use_nvfp4: bool = False,
                             x_global_scale: Optional[torch.Tensor] = None) -> Tuple[
                                 _Tokens, torch.Tensor, _Handle, EventOverlap, Optional[Callable[[], None]]]:
        """Sends tokens to their experts. Returns (recv_x [El,R*M,H] or (e4m3, scales), recv_count i32[El], handle,
        event, hook).

        With return_recv_hook, this call queues only the send half, on the current stream; the hook queues the receive
        half.

        use_nvfp4 and x_global_scale are additions of SGLang's DeepEP: rows travel as NVFP4, and recv_x is (codes u8
        [R*M,H/2,El], scales e4m3 [32,4,ceil(R*M/128),4,H/64,El]), both permuted views of what matrix kernels read. An
        element is code * scale / x_global_scale. use_nvfp4 comes before use_fp8, whose default is True.
        """
        use_fp8 = use_fp8 and not use_nvfp4
        if not use_fp8:  # as in DeepEP: both are about the scales of FP8
            round_scale = use_ue8m0 = False
        if use_ue8m0 and not round_scale:
            raise wrong("use_ue8m0", "round_scale with it", "round_scale=%r" % round_scale)
        engine, launcher = self._engine, None
        if engine.closed or async_finish or not return_recv_hook:
            launcher = self._low_latency_launcher(x, async_finish, return_recv_hook)
        return _low_latency.dispatch(
            engine, launcher, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts,
            cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats,
            _low_latency.Cast(use_fp8, round_scale, use_ue8m0, use_nvfp4), x_global_scale, return_recv_hook)

    def low_latency_combine(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: _Handle,
                            use_logfmt: bool = False, zero_copy: bool = False, async_finish: bool = False,
                            return_recv_hook: bool = False, out: Optional[torch.Tensor] = None,
                            combine_wait_recv_cost_stats: Optional[torch.Tensor] = None, overlap: bool = False,
                            src_signals: Optional[torch.Tensor] = None, src_signal_expect_value: int = 0,
                            packed_recv_count: Optional[torch.Tensor] = None,
                            comp_signal: Optional[torch.Tensor] = None, block_m: int = 64, threshold: int = 0,
                            num_sms: Optional[int] = None) -> Tuple[
                                torch.Tensor, EventOverlap, Optional[Callable[[], None]]]:
        """Computes weighted sums of the experts' rows, in top-k order, in fp32, rounded once. Returns (combined_x
        [T,H], event, hook).

        With `overlap`, an addition of SGLang's DeepEP, another kernel may still compute the rows: those of an expert
        are sent, expert by expert, when its signal has reached a value. Either src_signals [El] and
        src_signal_expect_value, or comp_signal [El*ceil(R*M/block_m)], one for each block_m rows, and threshold. The
        call takes at most num_sms SMs. packed_recv_count is not needed. Without `overlap` all of these have no effect.
        """
        engine, launcher = self._engine, None
        if engine.closed or async_finish or not return_recv_hook:
            launcher = self._low_latency_launcher(x, async_finish, return_recv_hook)
        return _low_latency.combine(
            launcher, x, topk_idx, topk_weights, handle, use_logfmt, zero_copy, return_recv_hook, out,
            combine_wait_recv_cost_stats, None if not overlap else _low_latency.OverlapArgs(
                src_signals, src_signal_expect_value, comp_signal, block_m, threshold, num_sms or 0))

    def get_next_low_latency_combine_buffer(self, handle: _Handle) -> torch.Tensor:
        """A bf16 tensor [El,R*M,H] that other ranks can read. Fill it, then combine with zero_copy=True."""
        return _low_latency.next_combine_buffer(handle, self._follow)

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Has nothing to clean: the modes of EPX share no memory, and counters are never cleared. With enable_shrink it
        is a barrier, as in DeepEP: a rank that does not join is masked."""
        checks.positive("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank)
        checks.positive("hidden", hidden)
        checks.positive("num_experts", num_experts)
        engine = self._open()
        if self.enable_shrink:
            for device in engine.low_latency_devices(num_max_dispatch_tokens_per_rank, num_experts):
                nothing = torch.empty(0, hidden, dtype=torch.bfloat16, device=device)
                self.low_latency_dispatch(nothing, torch.empty(0, 1, dtype=torch.int64, device=device),
                                          num_max_dispatch_tokens_per_rank, num_experts, use_fp8=False)

    # ---- Masks

    def _mask_pools(self, not_in_graphs: str = "") -> List[Pool]:
        if not self.enable_shrink:
            raise refused("masks: expected a buffer created with enable_shrink=True")
        pools = self._open().low_latency_pools()
        if not_in_graphs and any(pool.capturing() for pool in pools):
            raise refused("%s: expected no capture, for it waits on the host, got a current stream that is captured "
                          "into a graph: call it outside; replays see the masks that are set when they run" %
                          not_in_graphs)
        return pools

    def _mask_left_pools(self, rank: int, mask: bool) -> None:
        """The same for handles of groups that were replaced. A rank that has missed operations there stays masked."""
        for pool in self._engine.left_low_latency_pools():
            with contextlib.suppress(epx.UsageError):
                _set_mask(pool, rank, mask)

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """mask=True masks the rank from the next low-latency operation or replay of a graph on, in the order of the
        current stream: EPX neither sends to it nor waits for it. mask=False undoes this until that operation, and
        raises an error afterwards. Then all ranks must call low_latency_clean_mask_buffer() to reactivate the rank."""
        pools = self._mask_pools("low_latency_update_mask_buffer")
        rank_to_mask = checks.index("rank_to_mask", rank_to_mask, self.group_size)
        if mask and not pools:
            raise refused("low_latency_update_mask_buffer: expected an earlier low-latency dispatch "
                          "by all ranks, got none")
        if rank_to_mask == self.rank:
            self._masks_itself = mask
            return
        before = [_is_masked(pool, rank_to_mask) for pool in pools]
        try:
            for pool in pools:
                _set_mask(pool, rank_to_mask, mask)
        except epx.UsageError:
            for pool, was_masked in zip(pools, before):
                if was_masked != _is_masked(pool, rank_to_mask):
                    _set_mask(pool, rank_to_mask, was_masked)
            raise refused("low_latency_update_mask_buffer: rank %d is masked and has missed operations: expected "
                          "low_latency_clean_mask_buffer(), called by all ranks, to bring it back" %
                          rank_to_mask) from None
        self._mask_left_pools(rank_to_mask, mask)

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Writes 1 for each masked rank and 0 for each active rank into an int32 [R] tensor. Before the first
        low-latency dispatch, no rank is masked."""
        pools = self._mask_pools()
        checks.tensor("mask_status", mask_status, (torch.int32,), (self.group_size,))
        if any(pool.capturing() for pool in pools):
            pools = self._captured_masks(pools, mask_status)
        mask_status.zero_()
        for pool in pools:
            mask_status |= (1 - pool.active()).to(mask_status.device)
        if self._masks_itself:
            mask_status[self.rank] = 1

    @staticmethod
    def _captured_masks(pools: List[Pool], mask_status: torch.Tensor) -> List[Pool]:
        """The pools whose masks a graph can read: those of the device."""
        pools = [pool for pool in pools if pool.device == mask_status.device and pool.capturing()]
        if not pools:
            raise wrong("mask_status", "a tensor of the device whose stream is captured", mask_status.device)
        for pool in pools:
            pool.captured = True
        return pools

    def low_latency_clean_mask_buffer(self) -> None:
        """Makes all ranks active again. Collective over the active ranks and those that return: a masked rank has
        missed operations, and they must agree where it goes on. DeepEP's is local. A rank that calls it alone gets a
        timeout that names a rank it waited for, and may call it again."""
        pools = self._mask_pools("low_latency_clean_mask_buffer")
        self._masks_itself = False
        for pool in pools:
            pool.group.mask_clean(stream=_stream(pool.device))


def _stream(device: torch.device) -> Any:
    return None if device.type == "cpu" else torch.cuda.current_stream(device)


def _is_masked(pool: Pool, rank: int) -> bool:
    return not pool.active()[rank]


def _set_mask(pool: Pool, rank: int, mask: bool) -> None:
    active = pool.active().tolist()
    active[rank] = int(not mask)
    pool.group.mask_update(active, stream=_stream(pool.device))


def _at_exit() -> None:
    # If a process group lives until Python exits, an exception in its destructor may end the process. So drop it here.
    for buffer in list(_living):
        buffer._engine.leave()
        buffer.group = None


atexit.register(_at_exit)
