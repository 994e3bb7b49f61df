# SPDX-License-Identifier: Apache-2.0
"""High-throughput dispatches with a new routing on a GPU, with little host work between receive count and launch.

The GPU would be idle during that time. So the structs for the C library are prepared once for each kind of call, and
the dispatch is queued right behind the exchange of counts, into memory for a few more rows than the last dispatches
had. If a rank gets more rows than it expected, that dispatch does nothing on any rank, and is issued again with the
number that is known by then. The torch tensors over the memory are created after the kernels are queued.
"""

import ctypes
import sys
from typing import Any, Callable, List, Optional, Tuple, TypeVar

import epx
import torch
from epx import _abi
from epx._library import check, load
from epx.tensors import fill

from ._engine import Pool
from ._memory import CudaHeap, Form, Made, Ordinary, Part

_DTYPES = {torch.bfloat16: epx.DType.BF16, torch.float16: epx.DType.FP16, torch.float32: epx.DType.FP32,
           torch.float8_e4m3fn: epx.DType.FP8_E4M3, torch.int32: epx.DType.INT32, torch.int64: epx.DType.INT64}


_ALL = 8  # one of so many guesses tries all numbers of rows to spare
_SPARE = (32, 64, 128, 512)  # rows to spare: one of so many. The less memory there is, the fewer; at last, none
_AT_LEAST = 4  # rows by which a guess comes down
_FEW = 128  # rows that torch's memory may have for nothing, beside a quarter of those in it

_Memory = TypeVar("_Memory")


class RowGuess:
    """Rows that the next dispatch of a kind will hardly exceed, by those before it."""

    def __init__(self) -> None:
        self._most, self._least = 0, sys.maxsize
        self._guesses = 0
        self._level = 0  # of _SPARE, which the last guesses had; its length: no rows to spare

    def rows(self, limit: int, level: int = 0) -> int:
        """0 if there was none yet. `limit`: more than so many there cannot be."""
        spare = self._most // _SPARE[level] + 127 if level < len(_SPARE) else 0
        return min((self._most + spare) // 64 * 64 if spare else self._most, limit) if self._most else 0

    def learn(self, rows: int) -> None:
        """Takes note of the rows of a dispatch. What was once more, or fewer, is forgotten slowly."""
        self._most = max(rows, self._most - max((self._most - rows) // 16, _AT_LEAST))
        self._least = min(rows, self._least + max((rows - self._least) // 16, _AT_LEAST))

    def reserve(self, limit: int, reserve: Callable[[int, bool], Optional[_Memory]],
                ordinary: Callable[[int], Optional[_Memory]]) -> Optional[Tuple[int, _Memory]]:
        """(rows, memory for them), with as many rows to spare as there is memory for in the heap; `ordinary` memory if
        it is full and numbers of rows are much alike: results that are held keep all of it. `reserve` is given rows,
        and whether to make room, which takes time, where that helps."""
        if not self._most:
            return None
        last = len(_SPARE)
        thorough = self._guesses % _ALL == 0
        self._guesses += 1
        tried = 0
        for level in range(last + 1) if thorough else (self._level, last):
            rows = self.rows(limit, level)
            if rows == tried:
                continue
            tried, memory = rows, reserve(rows, False)
            if memory is not None:
                self._level = level if thorough else min(self._level + 1, level)
                return rows, memory
        memory = reserve(tried, True)
        if memory is not None:
            return tried, memory
        if self._most > self._least + self._least // 4 + _FEW:
            return None
        rows = self.rows(limit)
        try:
            memory = ordinary(rows)
        except torch.cuda.OutOfMemoryError:  # there may be room for the rows that come
            return None
        return None if memory is None else (rows, memory)


class FreshPlan:
    """The structs of one kind of call."""

    def __init__(self, pool: Pool, heap: CudaHeap, request: Any) -> None:
        tokens, scales, idx = request.tokens, request.scales, request.topk_idx
        self._pool, self._heap, self._lib = pool, heap, load()
        self._hidden, self._dtype, self._idx_dtype, self._topk = tokens.shape[1], tokens.dtype, idx.dtype, idx.shape[1]
        self._scale_parts = (scales.shape[1], scales.dtype) if scales is not None else None
        names = ("tokens", "scales", "weights", "out", "out_scales", "out_weights", "out_idx", "src_rank", "src_token")
        self._at = {name: _abi.TensorStruct() for name in names}
        at, dtype = self._at, _DTYPES[tokens.dtype]
        fill(at["tokens"], 0, dtype, (0, self._hidden), None)
        fill(at["out"], 0, dtype, (0, self._hidden), None)
        fill(at["weights"], 0, epx.DType.FP32, (0, self._topk), None)
        fill(at["out_weights"], 0, epx.DType.FP32, (0, self._topk), None)
        fill(at["out_idx"], 0, _DTYPES[idx.dtype], (0, self._topk), None)
        fill(at["src_rank"], 0, epx.DType.INT32, (0,), None)
        fill(at["src_token"], 0, epx.DType.INT32, (0,), None)
        pointer = {name: ctypes.pointer(struct) for name, struct in at.items()}
        inputs = _abi.DispatchInputsStruct(tokens=pointer["tokens"], topk_weights=pointer["weights"])
        outputs = _abi.DispatchOutputsStruct(
            tokens=pointer["out"], topk_weights=pointer["out_weights"], topk_idx=pointer["out_idx"],
            src_rank=pointer["src_rank"], src_token=pointer["src_token"])
        if scales is not None:
            fill(at["scales"], 0, _DTYPES[scales.dtype], (0, scales.shape[1]), (0, 0))
            fill(at["out_scales"], 0, _DTYPES[scales.dtype], (0, scales.shape[1]), None)
            inputs.scales, outputs.scales = pointer["scales"], pointer["out_scales"]
        config = self._config = _abi.DispatchConfigStruct()
        self._guess = RowGuess()
        self._limit = pool.max_tokens * pool.group.info.nranks
        self._keep = inputs, outputs, config
        self._addresses = ctypes.addressof(inputs), ctypes.addressof(outputs), None, ctypes.addressof(config)

    def _inputs(self, request: Any) -> None:
        """Sets the data pointers and row counts of the inputs."""
        at, count = self._at, request.tokens.shape[0]
        at["tokens"].shape[0] = at["weights"].shape[0] = count
        at["tokens"].data, at["weights"].data = request.tokens.data_ptr(), request.topk_weights.data_ptr()
        if request.scales is not None:
            at["scales"].shape[0], at["scales"].data = count, request.scales.data_ptr()
            at["scales"].stride[0], at["scales"].stride[1] = request.scales.stride()

    def _outputs(self, names: List[str], made: Made, rows: int) -> None:
        """Sets the data pointers and row counts of the outputs."""
        for name, address in zip(names, made.addresses()):
            struct = self._at[name]
            struct.shape[0], struct.data = rows, address

    def guess(self) -> Optional[Tuple[int, "Results"]]:
        """(rows that a dispatch will hardly exceed, memory for them); None if there was none yet."""
        return self._guess.reserve(self._limit, self._try_reserve, self._ordinary)

    def learn(self, rows: int) -> None:
        """Takes note of the rows of a dispatch."""
        self._guess.learn(rows)

    def reserve(self, rows: int) -> "Results":
        """Memory of (rows, scales), of the sources, which a handle keeps, and of (indices, weights)."""
        return self._try_reserve(rows, True) or self._ordinary(rows)

    def _forms(self, rows: int) -> List[Form]:
        large: List[Part] = [((rows, self._hidden), self._dtype, None)]
        if self._scale_parts is not None:
            large.append(((rows, self._scale_parts[0]), self._scale_parts[1], None))
        return [Form(*large), Form(((rows,), torch.int32, None), ((rows,), torch.int32, None)),
                Form(((rows, self._topk), self._idx_dtype, None), ((rows, self._topk), torch.float32, None))]

    def _try_reserve(self, rows: int, evict: bool) -> Optional["Results"]:
        """In the heap, or not at all."""
        made = self._heap.reserve_all(self._forms(rows), evict)
        return (made[0], made[1], made[2]) if made else None

    def _ordinary(self, rows: int) -> "Results":
        """In torch's memory."""
        large, sources, small = (Ordinary(form.ordinary(self._pool.device)) for form in self._forms(rows))
        return large, sources, small

    def run(self, address: int, request: Any, rows: int, results: "Results", if_expected: bool, stream: Any) -> None:
        """Dispatches with the handle at `address` into memory for that many rows."""
        self._inputs(request)
        self._outputs(["out", "out_scales"], results[0], rows)
        self._outputs(["src_rank", "src_token"], results[1], rows)
        self._outputs(["out_idx", "out_weights"], results[2], rows)
        self._config.max_sms, self._config.if_expected = request.max_sms, if_expected
        check(self._lib.epx_dispatch(address, *self._addresses, stream))


class FreshDispatch:
    """One dispatch of a plan: queued before its number of rows is known, where that can be guessed."""

    def __init__(self, plan: Optional[FreshPlan], request: Any, one_node: bool) -> None:
        self._plan, self._request = plan, request
        self.expected, self._results = (plan.guess() if plan and one_node else None) or (0, None)

    def begin(self, handle: epx.Handle, stream: Any) -> None:
        """After the update, with `expected` rows, was queued."""
        if self._results is not None:
            self._plan.run(handle.address, self._request, self.expected, self._results, True, stream)

    def finish(self, handle: epx.Handle, rows: int, stream: Any) -> Optional["Results"]:
        """When the number of rows is known: the memory of the results, or None, with nothing done, if there is no
        plan."""
        plan, results = self._plan, self._results
        if plan is None:
            return None
        plan.learn(rows)
        if results is not None and handle.recv_fits():
            for made in results:
                made.cut(rows)
            return results
        results = self._results = None  # there may be no room for both; the one before does nothing
        results = plan.reserve(rows)
        plan.run(handle.address, self._request, rows, results, False, stream)
        return results


Results = Tuple[Made, Made, Made]


def fresh_plan(pool: Pool, request: Any) -> Optional[FreshPlan]:
    """The plan for a call, or None for calls that have none: no indices, num_worst_tokens given, or strided rows."""
    tokens, scales = request.tokens, request.scales
    if (not isinstance(pool.heap, CudaHeap) or request.topk_idx is None or request.worst or not tokens.is_contiguous()
            or not request.topk_weights.is_contiguous() or (scales is not None and scales.dim() != 2)
            or not tokens.shape[0]):
        return None
    key = (tokens.shape[1], tokens.dtype, request.topk_idx.shape[1], request.topk_idx.dtype,
           None if scales is None else (scales.shape[1], scales.dtype))
    plan = pool.fresh_plans.get(key)
    if plan is None:
        plan = pool.fresh_plans[key] = FreshPlan(pool, pool.heap, request)
    return plan
