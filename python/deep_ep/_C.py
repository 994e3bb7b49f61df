# SPDX-License-Identifier: Apache-2.0
"""What callers read of DeepEP's compiled module. EPX has no compiled Python module."""

import torch

from ._elastic_sizes import ALIGNMENT, buffer_bytes
from .config import Config
from .utils import EventHandle

__all__ = ["Config", "EventHandle", "calculate_elastic_buffer_size", "get_elastic_buffer_alignment",
           "is_sm90_compiled", "topk_idx_t"]

topk_idx_t = torch.int64


def is_sm90_compiled() -> bool:
    """Always True: see Buffer.is_sm90_compiled()."""
    return True


def get_elastic_buffer_alignment() -> int:
    """Sizes of an ElasticBuffer are multiples of this."""
    return ALIGNMENT


def calculate_elastic_buffer_size(num_scaleout_ranks: int, num_scaleup_ranks: int, is_scaleup_nvlink: bool,
                                  num_max_tokens_per_rank: int, hidden: int, num_topk: int = 0,
                                  use_fp8_dispatch: bool = False, allow_multiple_reduction: bool = True) -> int:
    """The formula of ElasticBuffer.get_buffer_size_hint()."""
    return buffer_bytes((num_scaleout_ranks, num_scaleup_ranks), is_scaleup_nvlink, num_max_tokens_per_rank, hidden,
                        num_topk, use_fp8_dispatch, allow_multiple_reduction)
