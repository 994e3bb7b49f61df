# SPDX-License-Identifier: Apache-2.0
"""The structs for the C library for one kind of dispatch of ElasticBuffer. They are created once; each call changes
their addresses and row counts. On a GPU this is the time between the counts' arrival and the launch."""

import ctypes
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import epx
import torch
from epx import _abi
from epx._library import check, load
from epx.errors import make_error
from epx.tensors import fill

from ._elastic_engine import ElasticPool
from ._fresh import RowGuess
from ._memory import Form, Made, Part

_DTYPES = {torch.bfloat16: epx.DType.BF16, torch.float16: epx.DType.FP16, torch.float32: epx.DType.FP32,
           torch.int32: epx.DType.INT32, torch.int64: epx.DType.INT64}
# Dtypes whose tensors a heap makes; rows of others are made as bytes and viewed.
_MADE = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8)
_SLICE_US = 50000

_Forms = Tuple[Form, Optional[Form], Optional[Form]]  # of rows and scales, of indices and weights, of the source map


class Kind(NamedTuple):
    """What the structs depend on."""

    expand: bool
    columns: int
    dtype: torch.dtype
    topk: int
    idx_dtype: torch.dtype
    scales: Optional[Tuple[int, torch.dtype, bool]]  # columns, dtype, column-major
    weighted: bool
    mapped: bool  # with a source map
    turned: bool = False  # scales are column-major in the result alone, by a copy


def _memory(pool: ElasticPool, form: Form) -> Made:
    """Tensors of a form, in the heap if there is room."""
    return Made(pool.heap.try_make(form) or form.ordinary(pool.device))


class Counts:
    """The counts that a routing gives, int32: source_ends, expert_ends and expert_rows."""

    def __init__(self, pool: ElasticPool, sources: int, local_experts: int) -> None:
        self.tensors = tuple(torch.empty(count, dtype=torch.int32, device=pool.device)
                             for count in (sources, local_experts, local_experts))

    def addresses(self) -> Iterator[int]:
        """Of the tensors."""
        return (one.data_ptr() for one in self.tensors)


class Memories(NamedTuple):
    """Of rows and scales, of indices and weights, of the source map."""

    large: Made
    small: Optional[Made]
    source_map: Optional[Made]

    def cut(self, rows: int, lines: int) -> None:
        """Only so many rows, and lines of the source map, are used."""
        self.large.cut(rows)
        if self.small is not None:
            self.small.cut(rows)
        if self.source_map is not None:
            self.source_map.cut(lines)


def _by_columns(scales: torch.Tensor) -> torch.Tensor:
    """A column-major copy, behind the dispatch on its stream. Words that ranks write for each other lie row by row:
    in columns each would be alone in its sector, and their places depend on rows that are not known early."""
    rows, columns = scales.shape
    turned = torch.empty_strided((rows, columns), (1, -(-rows // 4) * 4), dtype=scales.dtype, device=scales.device)
    return turned.copy_(scales)


class Result:
    """What a dispatch returns, but for the handle."""

    def __init__(self, kind: Kind, rows: int, memories: Memories) -> None:
        parts = memories.large.tensors()
        self.x = parts[0] if parts[0].dtype is kind.dtype else parts[0].view(kind.dtype)
        self.scales: Optional[torch.Tensor] = None
        if kind.scales is not None:
            made = _by_columns(parts[1]) if kind.turned else parts[1]
            made = made if made.dtype is kind.scales[1] else made.view(kind.scales[1])
            # As strides, because torch gives a tensor without rows others than (1, 0). No view, as in Ordinary.cut().
            self.scales = made.as_strided((rows, made.shape[0]), (1, made.shape[1])).data if kind.scales[2] else made
        small = memories.small.tensors() if memories.small is not None else []
        self.idx = small[0] if not kind.expand else None
        self.weights = small[-1] if kind.weighted else None
        self.source_map = memories.source_map.tensors()[0] if memories.source_map is not None else None


class DispatchPlan:
    """The structs of one kind of call."""

    def __init__(self, pool: ElasticPool, kind: Kind, sources: int) -> None:
        self._pool, self._kind, self._lib = pool, kind, load()
        info = pool.group.info
        self._experts, self._sources = info.local_experts, sources
        self._at: Dict[str, _abi.TensorStruct] = {}
        self._pointers: Dict[str, Any] = {}
        self._make_structs(kind, sources, info.local_experts)
        pointer = self._pointers
        self._info = _abi.LayoutInfoStruct(source_ends=pointer["source_ends"], expert_ends=pointer["expert_ends"],
                                           expert_rows=pointer["expert_rows"])
        self._inputs = _abi.DispatchInputsStruct(tokens=pointer["tokens"])
        self._outputs = _abi.DispatchOutputsStruct(tokens=pointer["out"])
        if kind.scales is not None:
            self._inputs.scales, self._outputs.scales = pointer["scales"], pointer["out_scales"]
        if kind.weighted:
            self._inputs.topk_weights, self._outputs.topk_weights = pointer["weights"], pointer["out_weights"]
        if not kind.expand:
            self._outputs.topk_idx = pointer["out_idx"]
        if kind.mapped:
            self._outputs.source_map = pointer["map"]
        self._config = _abi.DispatchConfigStruct()
        self._update = ctypes.addressof(self._at["idx"]), ctypes.addressof(self._info)
        self._dispatch = tuple(map(ctypes.addressof, (self._inputs, self._outputs))) + (
            None, ctypes.addressof(self._config))
        self._seen: List[int] = []  # the last counts, for a message
        self._last: Tuple[Tuple[int, int], _Forms] = ((-1, -1), (Form(), None, None))
        self._guess = RowGuess()

    def _make_structs(self, kind: Kind, sources: int, experts: int) -> None:
        # Rows are bytes on their way: those of a dtype that EPX does not know travel as bf16, those with scales as FP8.
        nbytes = kind.columns * kind.dtype.itemsize
        dtype = epx.DType.FP8_E4M3 if kind.scales is not None else _DTYPES.get(kind.dtype, epx.DType.BF16)
        width = {epx.DType.FP8_E4M3: 1, epx.DType.FP32: 4, epx.DType.INT32: 4, epx.DType.INT64: 8}.get(dtype, 2)
        if dtype in (epx.DType.INT32, epx.DType.INT64):
            dtype, width = epx.DType.BF16, 2
        shapes: Dict[str, Tuple[int, Tuple[int, ...]]] = {
            "idx": (_DTYPES[kind.idx_dtype], (0, kind.topk)), "stats": (epx.DType.INT32, (experts,)),
            "source_ends": (epx.DType.INT32, (sources,)), "expert_ends": (epx.DType.INT32, (experts,)),
            "expert_rows": (epx.DType.INT32, (experts,)), "tokens": (dtype, (0, nbytes // width)),
            "out": (dtype, (0, nbytes // width)), "weights": (epx.DType.FP32, (0, kind.topk)),
            "out_weights": (epx.DType.FP32, (0,) if kind.expand else (0, kind.topk)),
            "out_idx": (_DTYPES[kind.idx_dtype], (0, kind.topk)), "map": (epx.DType.INT32, (0, kind.topk + 2))}
        if kind.scales is not None:
            form = (epx.DType.FP32 if kind.scales[1] is torch.float32 else epx.DType.INT32, (0, kind.scales[0]))
            shapes["scales"] = shapes["out_scales"] = form
        for name, (code, shape) in shapes.items():
            struct = self._at[name] = _abi.TensorStruct()
            fill(struct, 0, code, shape, None)
            self._pointers[name] = ctypes.pointer(struct)

    def guess(self, limit: int) -> Optional[Tuple[int, Memories]]:
        """(a number of rows that the next dispatch will hardly exceed, memory for them); None where a dispatch cannot
        be queued before its rows are known. `limit`: more than so many there cannot be."""
        if self._pool.heap.streams is None or self._pool.group.info.nnodes > 1:
            return None
        # A token takes a line of the source map, and at least one row.
        return self._guess.reserve(limit, lambda rows: self._try_reserve(rows, rows), self._ordinary)

    def update(self, address: int, idx: torch.Tensor, counts: Counts, stats: Optional[torch.Tensor],
               drop_rows: int, expected_rows: int, stream: Any) -> None:
        """Gives the handle at `address` a routing, which fills the counts. `drop_rows`: 0, or the rows that this rank
        takes; what is beyond is dropped. `expected_rows`: those of guess(), or 0."""
        at = self._at
        self._info.drop_rows, self._info.expected_rows = drop_rows, expected_rows
        at["idx"].shape[0], at["idx"].data = idx.shape[0], idx.data_ptr()
        at["source_ends"].data, at["expert_ends"].data, at["expert_rows"].data = counts.addresses()
        self._info.expert_stats = self._pointers["stats"] if stats is not None else None
        if stats is not None:
            at["stats"].data = stats.data_ptr()
        check(self._lib.epx_handle_update(address, *self._update, stream))

    def received(self, address: int, timeout_s: int) -> Tuple[int, int, List[int]]:
        """Waits for the counts: (rows, tokens with an expert here, unpadded rows of each local expert)."""
        status, slices = epx.Status.NOT_READY, max(timeout_s * 1000000 // _SLICE_US, 1)
        while status == epx.Status.NOT_READY and slices:
            status = self._lib.epx_handle_recv_poll(address, _SLICE_US)
            slices -= 1
        if status == epx.Status.NOT_READY:
            raise make_error(
                epx.Status.TIMEOUT, "Dispatch CPU wait: the counts of the other ranks did not arrive within "
                "num_cpu_timeout_secs = %d; the last counts seen: %s; recover() on all ranks makes the buffer usable "
                "again" % (timeout_s, self._seen))
        check(status)
        # Not in the plan: these calls let other threads run, which may use the same plan.
        rows, tokens, counts = ctypes.c_int64(), ctypes.c_int64(), (ctypes.c_int64 * self._experts)()
        check(self._lib.epx_handle_recv_count(address, ctypes.byref(rows), ctypes.byref(counts)))
        check(self._lib.epx_handle_recv_tokens(address, ctypes.byref(tokens)))
        self._seen = list(counts)
        self._guess.learn(rows.value)
        return rows.value, tokens.value, self._seen

    def fits(self, address: int) -> bool:
        """After received(): did every rank get at most the rows that it had guessed?"""
        fits = ctypes.c_int()
        check(self._lib.epx_handle_recv_fits(address, ctypes.byref(fits)))
        return bool(fits.value)

    def _forms(self, rows: int, lines: int) -> _Forms:
        """Those of the last call, if it had as many rows: without CPU sync every call has."""
        last, forms = self._last
        if last != (rows, lines):
            forms = self._make_forms(rows, lines)
            self._last = ((rows, lines), forms)
        return forms

    def _make_forms(self, rows: int, lines: int) -> _Forms:
        kind = self._kind
        made = kind.dtype in _MADE
        large: List[Part] = [((rows, kind.columns) if made else (rows, kind.columns * kind.dtype.itemsize),
                              kind.dtype if made else torch.uint8, None)]
        if kind.scales is not None:
            columns, dtype, column_major = kind.scales
            shape = (columns, -(-rows // 4) * 4) if column_major else (rows, columns)
            large.append((shape, dtype if dtype in (torch.float32, torch.int32) else torch.int32, None))
        small: List[Part] = [] if kind.expand else [((rows, kind.topk), kind.idx_dtype, None)]
        if kind.weighted:
            small.append(((rows,) if kind.expand else (rows, kind.topk), torch.float32, None))
        source_map = Form(((lines, kind.topk + 2), torch.int32, None)) if kind.mapped else None
        return Form(*large), Form(*small) if small else None, source_map

    def _point(self, names: List[str], memory: Made, rows: int) -> None:
        for name, address in zip(names, memory.addresses()):
            self._at[name].shape[0], self._at[name].data = rows, address

    def _reserve(self, rows: int, lines: int) -> Memories:
        """In the heap, as far as there is room."""
        large, *others = self._forms(rows, lines)
        return Memories(_memory(self._pool, large),
                        *(None if form is None else _memory(self._pool, form) for form in others))

    def _ordinary(self, rows: int) -> Optional[Memories]:
        """In torch's memory. Rows may pass through the receive buffer: no more than it holds. Padding may be more."""
        if rows > self._pool.group.info.max_recv_tokens:
            return None
        return Memories(*(  # type: ignore[arg-type]
            None if form is None else Made(form.ordinary(self._pool.device)) for form in self._forms(rows, rows)))

    def _try_reserve(self, rows: int, lines: int) -> Optional[Memories]:
        """In the heap, or not at all."""
        made: List[Optional[Made]] = []
        for form in self._forms(rows, lines):
            tensors = self._pool.heap.try_make(form) if form is not None else None
            if form is not None and tensors is None:
                return None
            made.append(Made(tensors) if tensors is not None else None)
        return Memories(*made)  # type: ignore[arg-type]

    def run(self, address: int, x: torch.Tensor, scales: Optional[torch.Tensor], weights: Optional[torch.Tensor],
            sizes: Tuple[int, int, int], max_sms: int, stream: Any, used: List[Any]) -> Result:
        """Dispatches with the handle at `address`. `sizes`: rows, lines of the source map, its stride. `max_sms`: 0 for
        EPX's own number. Appends the memory of the result to `used`."""
        memories = self._reserve(sizes[0], sizes[1])
        used.append(memories)
        self.queue(address, x, scales, weights, sizes, memories, False, max_sms, stream)
        return Result(self._kind, sizes[0], memories)

    def result(self, rows: int, lines: int, memories: Memories) -> Result:
        """Of a dispatch that was queued before its rows were known, if these fit."""
        memories.cut(rows, lines)
        return Result(self._kind, rows, memories)

    def queue(self, address: int, x: torch.Tensor, scales: Optional[torch.Tensor], weights: Optional[torch.Tensor],
              sizes: Tuple[int, int, int], memories: Memories, if_expected: bool, max_sms: int, stream: Any) -> None:
        """As run(), into memory that is there. `if_expected`: it does nothing if rows do not fit."""
        kind, at, (rows, lines, stride) = self._kind, self._at, sizes
        at["tokens"].shape[0], at["tokens"].data = x.shape[0], x.data_ptr()
        self._point(["out", "out_scales"], memories.large, rows)
        if scales is not None:
            assert kind.scales is not None
            at["scales"].shape[0], at["scales"].data = scales.shape[0], scales.data_ptr()
            at["scales"].stride[0], at["scales"].stride[1] = scales.stride()
            at["out_scales"].stride[0], at["out_scales"].stride[1] = \
                (1, -(-rows // 4) * 4) if kind.scales[2] else (kind.scales[0], 1)
        if weights is not None:
            at["weights"].shape[0], at["weights"].data = weights.shape[0], weights.data_ptr()
        if memories.small is not None:
            self._point(([] if kind.expand else ["out_idx"]) + ["out_weights"], memories.small, rows)
        if memories.source_map is not None:
            self._point(["map"], memories.source_map, lines)
            self._config.source_stride = stride
        self._config.max_sms, self._config.if_expected = max_sms, if_expected
        check(self._lib.epx_dispatch(address, *self._dispatch, stream))


def plan_for(pool: ElasticPool, kind: Kind, sources: int) -> DispatchPlan:
    """The plan for a kind of call."""
    plan = pool.plans.get((kind, sources))
    if plan is None:
        plan = pool.plans[(kind, sources)] = DispatchPlan(pool, kind, sources)
    return plan
