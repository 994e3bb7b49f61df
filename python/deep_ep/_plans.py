# SPDX-License-Identifier: Apache-2.0
"""Plans: the structs for the C library for one kind of low-latency call. They are created once. Each call only changes
their data pointers, because host time is critical here."""

import ctypes
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple

import epx
import torch
from epx import _abi
from epx._library import load
from epx.tensors import fill

from ._engine import Pool
from ._memory import Form, Part
from ._results import Results, ResultSet

_MOST_OUTS = 8  # the results of combine are kept for this many different numbers of tokens
_NVFP4_TILES = 2  # EPX_NVFP4_TILES
_DTYPES = {torch.bfloat16: epx.DType.BF16, torch.int64: epx.DType.INT64, torch.int32: epx.DType.INT32}


def _struct(dtype: int, shape: Tuple[int, ...], stride: Optional[Tuple[int, ...]] = None) -> _abi.TensorStruct:
    struct = _abi.TensorStruct()
    fill(struct, 0, dtype, shape, stride)
    return struct


class Cast(NamedTuple):
    """What a dispatch casts rows to."""

    use_fp8: bool
    round_scale: bool
    use_ue8m0: bool
    use_nvfp4: bool


class _Rows:
    """The received rows and their scales: their memory, and the structs that describe them to the C library."""

    def __init__(self, cast: Cast, local: int, rows: int, hidden: int) -> None:
        # Scales are column-major, as matrix kernels need them: the scales of consecutive rows are adjacent.
        groups = -(-hidden // (512 if cast.use_ue8m0 else 128))
        shape, stride = (local, rows, groups), (rows * groups, 1, rows)
        dtype = torch.float8_e4m3fn if cast.use_fp8 else torch.bfloat16
        self.parts: List[Part] = [((local, rows, hidden), dtype, None)]
        self.structs = [_struct(epx.DType.FP8_E4M3 if cast.use_fp8 else epx.DType.BF16, (local, rows, hidden))]
        if cast.use_fp8:
            self.parts.append((shape, torch.int32 if cast.use_ue8m0 else torch.float32, stride))
            self.structs.append(_struct(epx.DType.INT32 if cast.use_ue8m0 else epx.DType.FP32, shape, stride))
        if cast.use_nvfp4:
            tiles = -(-rows // 128)
            self.parts = [((local, rows, hidden // 2), torch.uint8, None),
                          ((local, tiles, hidden // 64, 512), torch.uint8, None)]
            self.structs = [_struct(epx.DType.UINT8, (local, rows, hidden // 2)),
                            _struct(epx.DType.INT32, (local, tiles * 128, hidden // 64))]


def as_nvfp4(codes: torch.Tensor, scales: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """The same memory in the order of dimensions that NVFP4's matrix kernels take: u8 [N,H/2,El] and e4m3
    [32,4,N/128,4,H/64,El]."""
    local, tiles, columns, _bytes = scales.shape
    return codes.permute(1, 2, 0), scales.view(torch.float8_e4m3fn).view(local, tiles, columns, 32, 4, 4).permute(
        3, 4, 1, 5, 2, 0)


class DispatchPlan:
    """The structs of one kind of dispatch."""

    def __init__(self, pool: Pool, hidden: int, topk: int, idx_dtype: torch.dtype, cast: Cast, max_tokens: int,
                 staged: bool) -> None:
        info = pool.group.info
        local, ranks = info.local_experts, info.nranks
        rows = ranks * max_tokens
        self.pool, self.hidden, self.max_tokens = pool, hidden, max_tokens
        self._topk, self._free = topk, pool.free_handles(topk, False)
        self.cast, received = cast, _Rows(cast, local, rows, hidden)
        # In a staged dispatch the receiver copies the rows, so ordinary memory is sufficient. Otherwise the senders
        # write the rows into the heap.
        source: Part = ((local, rows), torch.int32, None)
        small: List[Part] = [((local,), torch.int32, None), ((local, ranks), torch.int64, None)]
        rows_form, device, heap = Form(*received.parts), pool.device, pool.heap
        # The senders write the source tokens too, unless the receiver copies the rows.
        small_form, source_form = Form(source, *small) if staged else Form(*small), Form(source)
        self._rows = Results((lambda: rows_form.ordinary(device)) if staged else (lambda: heap.try_make(rows_form)),
                             lambda: rows_form.ordinary(device), device)
        self._sources = Results(lambda: heap.try_make(source_form), lambda: source_form.ordinary(device), device)
        self._capture_rows = lambda: heap.try_capture(rows_form)
        self._capture_sources = lambda: heap.try_capture(source_form)
        self._small = Results(lambda: small_form.ordinary(device), lambda: small_form.ordinary(device), device)
        self._staged = staged
        if not staged:
            heap.keepers.add(self._rows)
            heap.keepers.add(self._sources)
            if cast.use_fp8 and not pool.capturing():  # bf16 rows take what the heap has left when they are captured
                heap.prepare_graphs(rows_form)
        self._pointed: Tuple[Any, ...] = ()
        self._topk_idx = _struct(_DTYPES[idx_dtype], (0, topk))
        self._tokens = _struct(epx.DType.BF16, (0, hidden))
        self._global_scale = _struct(epx.DType.FP32, (1,))
        self._src_token = _struct(epx.DType.INT32, (local, rows))
        self._counts = _struct(epx.DType.INT32, (local,))
        self._ranges = _struct(epx.DType.INT64, (local, ranks))
        self._stats = _struct(epx.DType.INT32, (local,))
        self._wait = _struct(epx.DType.INT64, (ranks,))
        self._row_structs = received.structs
        self._small_structs = self._src_token, self._counts, self._ranges
        pointer = ctypes.pointer
        inputs = _abi.DispatchInputsStruct(tokens=pointer(self._tokens), topk_idx=pointer(self._topk_idx))
        outputs = _abi.DispatchOutputsStruct(tokens=pointer(received.structs[0]), src_token=pointer(self._src_token))
        if len(received.structs) > 1:
            outputs.scales = pointer(received.structs[1])
        self._info = _abi.LayoutInfoStruct(expert_counts=pointer(self._counts), layout_range=pointer(self._ranges))
        config = _abi.DispatchConfigStruct(send_only=staged, round_scale=cast.round_scale or cast.use_ue8m0,
                                            nvfp4=_NVFP4_TILES if cast.use_nvfp4 else 0)
        self._has_stats = self._has_wait = False
        self._ntokens = 0
        self._inputs = inputs
        self._keep = (inputs, outputs, config)
        self._dispatch = tuple(map(ctypes.addressof, (inputs, outputs, self._info, config)))
        self._lib = load()

    def take_handle(self, capturing: bool) -> Tuple[epx.Handle, int]:
        """A handle for one routing, and its address."""
        if self._free and not capturing:
            handle = self._free.pop()
        else:
            handle = self.pool.take(epx.Mode.LOW_LATENCY, epx.Layout.EXPERT_MAJOR, self._topk)
        return handle, handle._address or handle.address  # .address raises, with the reason, if there is none

    def receive_tensors(self, stream: Optional[int], capturing: bool,
                        aside: bool) -> Tuple[List[torch.Tensor], List[torch.Tensor]]:
        """The tensors for a call on the current stream: (rows and, for FP8, scales), (source tokens, counts, ranges).
        Points the structs to them. `aside`: the call runs on another stream than its caller's. What the caller's stream
        does with the rows is not ordered with later calls then, so that a graph does not use their memory again."""
        in_graph = capturing and not aside and not self._staged
        rows, rows_set = self._take(self._rows, self._capture_rows, in_graph, stream, capturing)
        small, small_set = self._small.take(stream, capturing)
        sources_set = None
        if not self._staged:
            sources, sources_set = self._take(self._sources, self._capture_sources, in_graph, stream, capturing)
            small = sources + small
        sets = (rows_set, small_set, sources_set)
        if self._pointed != sets or None in (sets[:2] if self._staged else sets):
            self._pointed = sets
            for struct, tensor in zip(self._row_structs, rows):
                struct.data = tensor.data_ptr()
            for struct, tensor in zip(self._small_structs, small):
                struct.data = tensor.data_ptr()
        return rows, small

    @staticmethod
    def _take(results: Results, capture: Callable[[], Optional[List[torch.Tensor]]], in_graph: bool,
              stream: Optional[int], capturing: bool) -> Tuple[List[torch.Tensor], Optional[ResultSet]]:
        """Tensors of the heap for a graph, if it has room for them; otherwise those of `results`."""
        captured = capture() if in_graph else None
        return (captured, None) if captured else results.take(stream, capturing)

    def run(self, address: int, ntokens: int, x: torch.Tensor, topk_idx: torch.Tensor, stats: Optional[torch.Tensor],
            wait: Optional[torch.Tensor], global_scale: Optional[torch.Tensor], stream: Optional[int]) -> int:
        """Dispatches with the handle at `address`. Returns the status."""
        if ntokens != self._ntokens:
            self._ntokens = self._topk_idx.shape[0] = self._tokens.shape[0] = ntokens
        self._topk_idx.data = topk_idx.data_ptr()
        self._tokens.data = x.data_ptr()
        if self.cast.use_nvfp4:
            self._inputs.global_scale = None if global_scale is None else ctypes.pointer(self._global_scale)
            self._global_scale.data = None if global_scale is None else global_scale.data_ptr()
        if stats is not None or wait is not None or self._has_stats or self._has_wait:
            self._point_to_counters(stats, wait)
        return self._lib.epx_dispatch(address, *self._dispatch, stream)

    def _point_to_counters(self, stats: Optional[torch.Tensor], wait: Optional[torch.Tensor]) -> None:
        """Points the structs to the statistics tensors of the caller, or to NULL."""
        self._has_stats, self._has_wait = stats is not None, wait is not None
        self._info.expert_stats = ctypes.pointer(self._stats) if stats is not None else None
        self._info.wait_ns = ctypes.pointer(self._wait) if wait is not None else None
        if stats is not None:
            self._stats.data = stats.data_ptr()
        if wait is not None:
            self._wait.data = wait.data_ptr()


class Overlap(NamedTuple):
    """When rows of a combine are ready: each of an expert's signals is for so many rows (0: all) and has this value."""

    per_expert: int
    rows: int
    value: int
    num_sms: int


class CombinePlan:
    """The structs of one kind of combine."""

    def __init__(self, pool: Pool, hidden: int, topk: int, max_tokens: int, use_logfmt: bool, staged: bool,
                 overlap: Optional[Overlap]) -> None:
        info = pool.group.info
        self.shape = (info.local_experts, info.nranks * max_tokens, hidden)
        self.checked: Set[Any] = set()  # the checked properties of arguments that were accepted
        self._device, self._hidden = pool.device, hidden
        self._outs: Dict[int, Results] = {}  # by number of tokens
        self._tokens = _struct(epx.DType.BF16, self.shape)
        self._weights = _struct(epx.DType.FP32, (0, topk))
        self._out = _struct(epx.DType.BF16, (0, hidden))
        self._wait = _struct(epx.DType.INT64, (info.nranks,))
        self._idx = _struct(epx.DType.INT64, (0, topk))
        pointer = ctypes.pointer
        inputs = _abi.CombineInputsStruct(tokens=pointer(self._tokens), topk_weights=pointer(self._weights))
        outputs = _abi.CombineOutputsStruct(tokens=pointer(self._out))
        self._config = _abi.CombineConfigStruct(send_only=staged, logfmt=use_logfmt)
        if overlap is not None:
            self._signals = _struct(epx.DType.INT32, (info.local_experts, overlap.per_expert))
            inputs.signals = pointer(self._signals)
            self._config.signal_rows, self._config.signal_value = overlap.rows, overlap.value
            self._config.max_sms = overlap.num_sms
        self._has_wait = self._has_idx = False
        self._ntokens = 0
        self._inputs, self._outputs = inputs, outputs
        self._combine = tuple(map(ctypes.addressof, (inputs, outputs, self._config)))
        self._lib = load()

    def new_out(self, ntokens: int, stream: Optional[int], capturing: bool) -> torch.Tensor:
        """A tensor for the result of a call on the current stream."""
        results = self._outs.get(ntokens) or self._new_outs(ntokens)
        return results.take(stream, capturing)[0][0]

    def _new_outs(self, ntokens: int) -> Results:
        form, device = Form(((ntokens, self._hidden), torch.bfloat16, None)), self._device
        if len(self._outs) >= _MOST_OUTS:
            self._outs.clear()
        results = self._outs[ntokens] = Results(lambda: form.ordinary(device), lambda: form.ordinary(device), device)
        return results

    def run(self, address: int, ntokens: int, x: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor,
            topk_idx: Optional[torch.Tensor], wait: Optional[torch.Tensor], signals: Optional[torch.Tensor],
            stream: Optional[int]) -> int:
        """Combines with the handle at `address`. `topk_idx`: None, or entries of -1 there are skipped. Returns the
        status."""
        if ntokens != self._ntokens:
            self._ntokens = self._weights.shape[0] = self._out.shape[0] = self._idx.shape[0] = ntokens
        self._tokens.data = x.data_ptr()
        self._weights.data = topk_weights.data_ptr()
        self._out.data = out.data_ptr()
        if signals is not None:
            self._signals.data = signals.data_ptr()
        if topk_idx is not None or self._has_idx:
            self._has_idx = topk_idx is not None
            self._inputs.topk_idx = ctypes.pointer(self._idx) if topk_idx is not None else None
            if topk_idx is not None:
                self._idx.data = topk_idx.data_ptr()
                self._idx.dtype = epx.DType.INT64 if topk_idx.dtype is torch.int64 else epx.DType.INT32
        if wait is not None or self._has_wait:
            self._has_wait = wait is not None
            self._config.wait_ns = ctypes.pointer(self._wait) if wait is not None else None
            if wait is not None:
                self._wait.data = wait.data_ptr()
        return self._lib.epx_combine(address, *self._combine, stream)
