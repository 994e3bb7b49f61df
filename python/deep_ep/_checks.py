# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments. A failure names the argument, what was expected and what was given. Nothing was sent then.

DeepEP's checks raise AssertionError in Python and RuntimeError in C++. Programs may expect either: EPX's errors are
RuntimeErrors, and the errors of this package are also AssertionErrors.
"""

import math
import operator
from typing import Any, Optional, Sequence, Tuple

import epx
import torch
from epx import Status
from epx.bootstrap import NO_PROCESS_GROUP


MAX_TOPK = 32  # EPX's limits
MOST = 1 << 20  # experts, tokens of a rank, rows of an alignment
MOST_RANKS = 4096


class ArgumentError(epx.ArgumentError, AssertionError):
    """An argument is wrong."""

    __module__ = "deep_ep"


class UsageError(epx.UsageError, AssertionError):
    """The call is not allowed now, or not on this buffer."""

    __module__ = "deep_ep"


def wrong(name: str, expected: str, given: Any) -> ArgumentError:
    """The exception for a wrong argument."""
    return ArgumentError(Status.ARGUMENT, "%s: expected %s, got %s" % (name, expected, given))


def refused(why: str) -> UsageError:
    """The exception for a call that is not allowed."""
    return UsageError(Status.USAGE, why)


def describe(value: Any) -> str:
    """What was given, for a message."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    if value.layout is not torch.strided:
        return "%s %s with layout %s" % (value.dtype, list(value.shape), value.layout)
    return "%s %s with strides %s on %s" % (value.dtype, list(value.shape), value.stride(), value.device)


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(d).replace("torch.", "") for d in dtypes)


def tensor(name: str, value: Any, dtypes: Sequence[torch.dtype], shape: Sequence[Optional[int]],
           device: Optional[torch.device] = None, contiguous: bool = True) -> torch.Tensor:
    """Checks for a tensor of one of the dtypes. None in the shape means any extent."""
    if not isinstance(value, torch.Tensor):
        raise wrong(name, "a tensor", type(value).__name__)
    if value.dtype not in dtypes:
        raise wrong(name, "dtype " + _names(dtypes), str(value.dtype).replace("torch.", ""))
    if value.dim() != len(shape) or any(s is not None and s != v for s, v in zip(shape, value.shape)):
        text = ", ".join("*" if s is None else str(s) for s in shape)
        raise wrong(name, "shape [%s]" % text, list(value.shape))
    if contiguous and not value.is_contiguous():
        raise wrong(name, "a contiguous tensor", "strides %s" % (value.stride(),))
    if device is not None and value.device != device:
        raise wrong(name, "a tensor on %s" % device, value.device)
    return value


def dense(name: str, value: Any, dims: Optional[int] = None) -> torch.Tensor:
    """Checks for a tensor of any dtype that is not sparse, with so many dimensions."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or dims not in (None, value.dim()):
        raise wrong(name, "a tensor%s" % (" of %d dimensions" % dims if dims else ""), describe(value))
    return value


def optional(name: str, value: Any, dtypes: Sequence[torch.dtype], shape: Sequence[Optional[int]],
             device: Optional[torch.device] = None) -> Optional[torch.Tensor]:
    """Checks for None or a tensor, as tensor() does."""
    return None if value is None else tensor(name, value, dtypes, shape, device)


def positive(name: str, value: Any, least: int = 1) -> int:
    """Checks for an integer of any kind, NumPy's too, of at least `least`."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise wrong(name, "an integer of at least %d" % least, repr(value))
    return number


def at_most(name: str, value: Any, most: int, least: int = 1) -> int:
    """Checks for an integer of any kind from `least` to `most`."""
    if positive(name, value, least) > most:
        raise wrong(name, "at most %d" % most, value)
    return operator.index(value)


def rate(name: str, value: Any, may_be_0: bool = False) -> float:
    """Checks for a rate: a finite number above 0, or 0 where that means one that is looked up."""
    try:
        number = float(value) if hasattr(value, "__float__") else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last: a tensor of several numbers
        number = math.nan
    if not (0 < number < math.inf or may_be_0 and number == 0):
        raise wrong(name, "a number above 0%s" % (", or 0" if may_be_0 else ""), describe(value) if isinstance(
            value, torch.Tensor) else repr(value))
    return number


def index(name: str, value: Any, end: int) -> int:
    """Checks for an integer of any kind from 0 to end - 1."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number < end:
        raise wrong(name, "0 to %d" % (end - 1), repr(value))
    return number


def dtype(name: str, value: Any) -> torch.dtype:
    """Checks for a dtype of torch."""
    if not isinstance(value, torch.dtype):
        raise wrong(name, "a torch.dtype", repr(value))
    return value


def process_group(value: Any) -> Any:
    """Checks for a process group of torch.distributed, or None for that of all ranks, and returns the group."""
    import torch.distributed as dist

    if value is None:
        if not dist.is_initialized():
            raise refused(NO_PROCESS_GROUP)
        return dist.group.WORLD
    if isinstance(value, int) and not isinstance(value, bool):  # what torch gives to ranks that are not in a group
        raise wrong("group", "a process group that this rank is in", repr(value))
    if not all(callable(getattr(value, name, None)) for name in ("rank", "size")):
        raise wrong("group", "a process group of torch.distributed, or None", type(value).__name__)
    return value


def topk(name: str, value: Any) -> int:
    """Checks for a number of experts per token, or 0 for any."""
    number = positive(name, value, 0)
    if number > MAX_TOPK:
        raise wrong(name, "at most %d, EPX's limit" % MAX_TOPK, number)
    return number


def device_of(name: str, value: torch.Tensor) -> torch.device:
    """The device of a tensor, CPU or CUDA."""
    if value.device.type not in ("cpu", "cuda"):
        raise wrong(name, "a tensor on the CPU or on a CUDA device", value.device)
    return value.device


def tokens(x: Any) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """(tokens, scales) of a high-throughput dispatch. `x` is bf16, fp16 or fp32, or a pair of e4m3 and its scales."""
    if not isinstance(x, (tuple, list)):
        return tensor("x", x, (torch.bfloat16, torch.float16, torch.float32), (None, None)), None
    if len(x) != 2:
        raise wrong("x", "a tensor or a pair (tokens, scales)", "%d items" % len(x))
    rows = tensor("x[0]", x[0], (torch.float8_e4m3fn,), (None, None))
    dims = x[1].dim() if isinstance(x[1], torch.Tensor) else 2
    shape = (rows.shape[0],) if dims == 1 else (rows.shape[0], None)
    scales = tensor("x[1]", x[1], (torch.float32, torch.int32), shape, rows.device, contiguous=False)
    groups("x[1]", rows, scales)
    return rows, scales


def groups(name: str, rows: torch.Tensor, scales: torch.Tensor) -> None:
    """Checks the scales of a row: one for each group of channels, or four in an int32. DeepEP's contract has groups of
    128, and its kernels copy any number of scales; EPX takes groups of any power of two."""
    hidden, columns = rows.shape[1], 1 if scales.dim() == 1 else scales.shape[1]
    if columns not in (-(-hidden // (1 << i)) for i in range(hidden.bit_length() + 1)):
        raise wrong(name, "a scale for each group of channels ([%d, %d] for groups of 128)" % (
            rows.shape[0], -(-hidden // 128)), list(scales.shape))


def spread(scales: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """The scales, copied if Tensor.expand() made them: EPX takes positive strides."""
    if scales is None or not scales.numel() or all(
            stride > 0 or extent == 1 for stride, extent in zip(scales.stride(), scales.shape)):
        return scales
    return scales.contiguous()


def row_bytes(name: str, value: torch.Tensor) -> None:
    """Checks that the rows are a multiple of 16 bytes."""
    nbytes = value.shape[-1] * value.element_size()
    if nbytes < 16 or nbytes % 16:
        raise wrong(name, "rows of a multiple of 16 bytes", "%d %s = %d bytes" % (value.shape[-1], value.dtype, nbytes))
