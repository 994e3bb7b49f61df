# SPDX-License-Identifier: Apache-2.0
"""Handles. A handle holds one routing, with its dispatches and combines."""

import ctypes
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from . import _abi
from ._abi import DType, Direction, Layout, Mode, RecvPart, TensorStruct
from ._library import check, load
from .errors import EpxError, Status, UsageError
from .streams import StreamOwner, stream_address
from .tensors import describe

_SLICE_US = 50000


def queue(call: Callable[..., int], arguments: Tuple[Any, ...], keep: Callable[..., None],
          kept: Tuple[Any, ...]) -> None:
    """Queues an operation, and keeps its tensors until it has run. Also where an exception that is not the C library's
    comes behind the call, that of Ctrl-C say: it may be queued, and would use memory that is freed."""
    try:
        check(call(*arguments))
        keep(*kept)
    except EpxError:
        raise
    except BaseException:
        keep(*kept)
        raise


class Arguments:
    """A struct of tensor pointers, prepared once. Each field has its own descriptor, which set() fills and links."""

    def __init__(self, struct: _abi.Struct, prefix: str) -> None:
        self.struct = struct
        self.address = ctypes.addressof(struct)
        self._prefix = prefix
        self._parts: Dict[str, Tuple[TensorStruct, Any]] = {}

    def set(self, field: str, tensor: Any, name: Optional[str] = None) -> Any:
        """Points a field to a tensor, or to NULL for None. Returns the object that must stay alive."""
        if tensor is None:
            setattr(self.struct, field, None)
            return None
        part = self._parts.get(field)
        if part is None:
            desc = TensorStruct()
            part = self._parts[field] = (desc, ctypes.pointer(desc))
        keep = describe(name or self._prefix + field, tensor, part[0])
        setattr(self.struct, field, part[1])
        return keep

    def fill(self, values: Dict[str, Any]) -> List[Any]:
        """Sets several fields. Returns the objects that must stay alive."""
        return [self.set(field, tensor) for field, tensor in values.items()]


class LayoutInfo:
    """Tensors on the device into which EPX writes counts of the received rows. All are optional. They are complete when
    the operation is complete.

    expert_counts, expert_offsets, rank_counts, total, layout_range, expert_stats, wait_ns: see ``epx_layout_info``.
    expected_rows is a number: Handle.dispatch(if_expected=True) may be queued before the number of rows is known.
    drop_rows is a number: the rows that this rank takes, for a handle that was created with drop_rows.
    """

    _FIELDS = tuple(name for name in _abi.LayoutInfoStruct.names() if name not in ("expected_rows", "drop_rows"))

    def __init__(self, expected_rows: int = 0, drop_rows: int = 0, **tensors: Any) -> None:
        struct = _abi.LayoutInfoStruct()
        struct.expected_rows, struct.drop_rows = expected_rows, drop_rows
        self._arguments = Arguments(struct, "info.")
        for name in tensors:
            if name not in self._FIELDS:
                raise TypeError("LayoutInfo: expected names of %s, got %s" % (", ".join(self._FIELDS), name))
        self._keep = self._arguments.fill(tensors)

    @property
    def address(self) -> int:
        """The address of the C struct."""
        return self._arguments.address


class Handle:
    """One routing of a group. Created by Group.handle()."""

    def __init__(self, group: "HandleOwner", mode: Mode, layout: Layout, topk: int, expert_alignment: int = 0,
                 compact: bool = False, source_map: bool = False, drop_rows: int = 0) -> None:
        self._lib = load()
        self._address: Optional[int] = None
        self.group = group
        self.mode = Mode(mode)
        self.layout = Layout(layout)
        self.topk = topk
        self.expert_alignment = expert_alignment
        self.drop_rows = drop_rows
        config = _abi.HandleConfigStruct(
            mode=mode, layout=layout, topk=topk, expert_alignment=expert_alignment, drop_rows=drop_rows,
            flags=(_abi.HANDLE_COMPACT_TOPK if compact else 0) | (_abi.HANDLE_SOURCE_MAP if source_map else 0))
        out = ctypes.c_void_p()
        check(self._lib.epx_handle_create(ctypes.byref(out), group.address, ctypes.byref(config)))
        self._address = out.value
        self._topk = TensorStruct()
        self._topk_address = ctypes.addressof(self._topk)
        self._routing: Any = None  # low latency: the top-k indices, which every dispatch reads
        self._staged: Any = None
        self._dispatch = (
            Arguments(_abi.DispatchInputsStruct(), "inputs."), Arguments(_abi.DispatchOutputsStruct(), "outputs."),
            _abi.DispatchConfigStruct())
        self._combine = (
            Arguments(_abi.CombineInputsStruct(), "inputs."), Arguments(_abi.CombineOutputsStruct(), "outputs."),
            Arguments(_abi.CombineConfigStruct(), "config."))
        self._bias = (TensorStruct(), TensorStruct())

    @property
    def address(self) -> int:
        """The address of the C handle."""
        self.group.address  # raises if the group was destroyed
        if self._address is None:
            raise UsageError(Status.USAGE, "the handle was destroyed")
        return self._address

    def destroy(self) -> None:
        """Waits for queued operations and frees the handle. A staged operation must be completed before: complete()."""
        if self._address is not None and self.group.alive:
            check(self._lib.epx_handle_destroy(self._address))
        self._address = None

    def update(self, topk_idx: Any, info: Optional[LayoutInfo] = None, stream: Any = None) -> None:
        """Sets the routing: topk_idx is int32 or int64 [tokens, topk]; -1 = dropped.

        High throughput: collective. The handle keeps its own copy of the indices, and `info` is filled. Low latency:
        local. Each dispatch reads the indices when it runs.
        """
        keep = describe("topk_idx", topk_idx, self._topk)
        queue(self._lib.epx_handle_update, (
            self.address, self._topk_address, info.address if info else None, stream_address(self.group, stream)),
            self._keep_update, (keep, info, stream))

    def _keep_update(self, keep: Any, info: Any, stream: Any) -> None:
        if self.mode == Mode.LOW_LATENCY:
            self._routing = keep
        elif self.group.alive:
            self.group.hold((keep, info), stream)

    def recv_count(self) -> Tuple[int, List[int]]:
        """High throughput: waits for the update. Returns (rows to receive, unpadded rows of each local expert)."""
        address = self.address
        while True:  # in slices, so that Ctrl-C is handled
            status = self._lib.epx_handle_recv_poll(address, _SLICE_US)
            if status != Status.NOT_READY:
                check(status)
                break
        rows = ctypes.c_int64()
        counts = (ctypes.c_int64 * self.group.info.local_experts)()
        check(self._lib.epx_handle_recv_count(self.address, ctypes.byref(rows), ctypes.byref(counts)))
        return rows.value, list(counts)

    def recv_fits(self) -> bool:
        """High throughput: waits for the update. True if no rank gets more rows than it expected, so that
        dispatch(if_expected=True) has run or will run."""
        fits = ctypes.c_int()
        check(self._lib.epx_handle_recv_fits(self.address, ctypes.byref(fits)))
        return fits.value != 0

    def recv_tokens(self) -> int:
        """High throughput: waits for the update. Returns the number of tokens that have an expert on this rank."""
        tokens = ctypes.c_int64()
        check(self._lib.epx_handle_recv_tokens(self.address, ctypes.byref(tokens)))
        return tokens.value

    def recv_tensor(self, part: RecvPart, dtype: DType, rows: int, columns: int) -> TensorStruct:
        """High throughput: a descriptor of a tensor in EPX's own receive buffer. See ``epx_handle_recv_tensor``."""
        struct = TensorStruct()
        check(self._lib.epx_handle_recv_tensor(self.address, part, dtype, rows, columns, ctypes.byref(struct)))
        return struct

    def dispatch(self, tokens: Any, out: Any, *, scales: Any = None, topk_weights: Any = None, out_scales: Any = None,
                 out_topk_weights: Any = None, out_topk_idx: Any = None, src_rank: Any = None, src_token: Any = None,
                 source_map: Any = None, source_stride: int = 0, info: Optional[LayoutInfo] = None,
                 send_only: bool = False, round_scale: bool = False, direction: Direction = Direction.FORWARD,
                 if_expected: bool = False, nvfp4: int = 0, global_scale: Any = None, max_sms: int = 0,
                 stream: Any = None) -> None:
        """Sends each token to the ranks of its experts. Collective and asynchronous on the stream.

        For shapes, see ``epx_dispatch_inputs`` and ``epx_dispatch_outputs``. `info` is for low latency. With
        `send_only`, this call runs the send half and complete() runs the receive half. With `if_expected`, it does
        nothing if recv_fits() turns out to be False. `nvfp4` is 0 or one of ``EPX_NVFP4_*``.
        """
        inputs, outputs, config = self._dispatch
        keep = inputs.fill({"tokens": tokens, "scales": scales, "topk_weights": topk_weights,
                            "global_scale": global_scale})
        keep += outputs.fill({
            "tokens": out, "scales": out_scales, "topk_weights": out_topk_weights, "topk_idx": out_topk_idx,
            "src_rank": src_rank, "src_token": src_token, "source_map": source_map})
        config.source_stride, config.if_expected, config.nvfp4 = source_stride, if_expected, nvfp4
        config.max_sms = max_sms
        config.send_only, config.round_scale, config.direction = send_only, round_scale, direction
        queue(self._lib.epx_dispatch, (
            self.address, inputs.address, outputs.address, info.address if info else None,
            ctypes.addressof(config), stream_address(self.group, stream)),
            self._keep, ((keep, info, self._routing), send_only, stream))

    def combine(self, tokens: Any, out: Any, *, topk_weights: Any = None, out_topk_weights: Any = None,
                topk_idx: Any = None, bias: Sequence[Any] = (), send_only: bool = False, logfmt: bool = False,
                direction: Direction = Direction.FORWARD, wait_ns: Any = None, sum_order: int = 0,
                max_sms: int = 0, stream: Any = None) -> None:
        """Returns rows to their tokens and sums them. Collective and asynchronous on the stream. For shapes, see
        ``epx_combine_inputs``; `sum_order` holds bits of ``EPX_SUM_*``."""
        inputs, outputs, config = self._combine
        keep = inputs.fill({"tokens": tokens, "topk_weights": topk_weights, "topk_idx": topk_idx})
        keep += outputs.fill({"tokens": out, "topk_weights": out_topk_weights})
        keep.append(config.set("wait_ns", wait_ns))
        for i in range(2):
            given = bias[i] if i < len(bias) else None
            if given is not None:
                keep.append(describe("bias[%d]" % i, given, self._bias[i]))
            inputs.struct.bias[i] = ctypes.pointer(self._bias[i]) if given is not None else None
        config.struct.send_only, config.struct.logfmt, config.struct.direction = send_only, logfmt, direction
        config.struct.sum, config.struct.max_sms = sum_order, max_sms
        queue(self._lib.epx_combine, (
            self.address, inputs.address, outputs.address, config.address, stream_address(self.group, stream)),
            self._keep, (keep, send_only, stream))

    def complete(self, stream: Any = None) -> None:
        """Runs the receive half of the staged operation. Does nothing if there is none."""
        queue(self._lib.epx_complete, (self.address, stream_address(self.group, stream)),
              self._keep, (self._staged, False, stream))
        self._staged = None

    def _keep(self, keep: Any, send_only: bool, stream: Any) -> None:
        if send_only:
            self._staged = keep
        elif keep is not None and self.group.alive:
            self.group.hold(keep, stream)

    def __del__(self) -> None:
        # This may run on any thread, and destroying waits. The group destroys the handle when it creates the next one.
        address = getattr(self, "_address", None)
        if address is not None and self.group.alive:
            self.group._lost_handles.append((address, self._staged))


class HandleOwner(StreamOwner):
    """The part of a group that owns handles."""

    def __init__(self) -> None:
        super().__init__()
        self._lost_handles: List[Tuple[int, Any]] = []  # to destroy, with the tensors of their staged operations

    def handle(self, mode: Mode, layout: Layout, topk: int, expert_alignment: int = 0, compact: bool = False,
               source_map: bool = False, drop_rows: int = 0) -> Handle:
        """Creates a handle for one routing. Local. `compact` puts local experts first in received top-k rows;
        `source_map`: expert-major dispatches may ask for one. `drop_rows`, high throughput: 0, or the most rows that
        this rank receives; those beyond are dropped."""
        self._end_lost_handles()
        return Handle(self, mode, layout, topk, expert_alignment, compact, source_map, drop_rows)

    def _end_lost_handles(self) -> None:
        while self._lost_handles:
            address, staged = self._lost_handles.pop()
            if staged is not None:
                # The other ranks wait for the receive half of this rank.
                self._lib.epx_complete(address, None)
            self._lib.epx_handle_destroy(address)  # waits for the operation
