# SPDX-License-Identifier: Apache-2.0
"""Arithmetic that DeepEP's tests share."""

from typing import Any, Tuple

import torch

_BLOCK = 128
_MOST = 448.0  # of e4m3


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """1 - 2 sum (x+1)(y+1) / sum ((x+1)^2 + (y+1)^2)."""
    a, b = x.double() + 1, y.double() + 1
    return float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())


def safe_div(a: float, b: float) -> float:
    """a / b, and 0 for 0 / 0."""
    return 0 if a == 0 and b == 0 else a / b


def ceil_div(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """The multiple of y that is not below x."""
    return ceil_div(x, y) * y


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """[m, n] as [m, blocks, 128], zeros behind the last column."""
    blocks = ceil_div(x.shape[1], _BLOCK)
    return torch.nn.functional.pad(x, (0, blocks * _BLOCK - x.shape[1])).view(x.shape[0], blocks, _BLOCK)


def per_token_cast_to_fp8(x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [m, n], fp32 scales [m, ceil(n / 128)] to multiply by)."""
    blocks = _blocks(x.float())
    largest = blocks.abs().amax(2).clamp(min=1e-4)
    values = (blocks * (_MOST / largest).unsqueeze(2)).to(torch.float8_e4m3fn)
    return values.flatten(1)[:, :x.shape[1]].contiguous(), largest / _MOST


def per_token_cast_back(x_fp8: torch.Tensor, x_scales: torch.Tensor) -> torch.Tensor:
    """bf16 [m, n] of e4m3 and its scales: fp32, or int32 that hold four exponents each."""
    if not x_fp8.numel():
        return x_fp8.to(torch.bfloat16)
    blocks = _blocks(x_fp8.float())
    scales = x_scales
    if scales.dtype is torch.int32:
        packed = scales.clone(memory_format=torch.contiguous_format)  # contiguous() keeps the stride of one column
        exponents = packed.view(torch.uint8).view(x_fp8.shape[0], -1)[:, :blocks.shape[1]]
        scales = (exponents.to(torch.int32) << 23).view(torch.float32)
    return (blocks * scales.reshape(x_fp8.shape[0], -1, 1)).flatten(1)[:, :x_fp8.shape[1]].to(torch.bfloat16)


def inplace_unique(x: torch.Tensor, num_slots: int) -> None:
    """Replaces each row by its different values of 0 to num_slots - 1, in descending order, then -1."""
    present = torch.zeros(x.shape[0], num_slots + 1, dtype=torch.bool, device=x.device)
    present.scatter_(1, torch.where(x < 0, num_slots, x).long(), True)
    slots = torch.arange(num_slots, device=x.device, dtype=x.dtype)
    found = torch.where(present[:, :num_slots], slots, -1).sort(1, descending=True).values
    kept = min(num_slots, x.shape[1])
    x.fill_(-1)
    x[:, :kept] = found[:, :kept]


def create_grouped_scores(scores: torch.Tensor, group_idx: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Scores [T, E], zero outside the groups of experts that each row of group_idx names."""
    chosen = torch.zeros(scores.shape[0], num_groups, dtype=torch.bool, device=scores.device)
    chosen.scatter_(1, group_idx.long(), True)
    return scores * chosen.repeat_interleave(scores.shape[1] // num_groups, dim=1)


def hash_tensor(t: torch.Tensor) -> int:
    """A sum of the tensor's bits."""
    flat = t.contiguous()
    return int(flat.view(torch.int32 if flat.element_size() == 4 else torch.uint8).sum())


def _flatten(tensors: Any) -> Any:
    for item in tensors:
        if isinstance(item, (tuple, list)):
            yield from _flatten(item)
        elif isinstance(item, torch.Tensor):
            yield item


def hash_tensors(*tensors: Any) -> int:
    """The exclusive or of hash_tensor(); tuples are looked into, None is skipped."""
    value = 0
    for tensor in _flatten(tensors):
        value ^= hash_tensor(tensor)
    return value


def count_bytes(*tensors: Any) -> int:
    """Bytes of all tensors; tuples are looked into, None is skipped."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _flatten(tensors))
