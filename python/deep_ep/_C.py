# SPDX-License-Identifier: Apache-2.0
"""What callers read of DeepEP's compiled module. EPX has no compiled Python module."""

from typing import Any

import torch

from ._elastic_sizes import ALIGNMENT, RDMA_ALIGNMENT, TMA_ALIGNMENT, buffer_bytes
from .config import Config
from .elastic import ElasticBuffer as _ElasticBuffer
from .utils import EventHandle

__all__ = ["Config", "EventHandle", "calculate_elastic_buffer_size", "calculate_ep_buffer_size",
           "get_elastic_buffer_alignment", "get_num_allocation_alignment", "get_num_rdma_alignment",
           "get_num_tma_alignment", "is_sm90_compiled", "topk_idx_t"]

topk_idx_t = torch.int64
_RUNTIMES = ("BucketBuffer", "Buffer", "BufferBase", "Context", "EPBuffer", "ElasticBuffer", "EngramBuffer", "PPBuffer")


def __getattr__(name: str) -> None:
    why = ": EPX has no compiled runtime; its buffers are in deep_ep" if name in _RUNTIMES else ""
    raise AttributeError("module 'deep_ep._C' has no attribute %r%s" % (name, why))


def is_sm90_compiled() -> bool:
    """Always True: see Buffer.is_sm90_compiled()."""
    return True


def get_elastic_buffer_alignment() -> int:
    """Sizes of an ElasticBuffer are multiples of this."""
    return ALIGNMENT


def get_num_allocation_alignment() -> int:
    """Sizes of buffers, and places in an allocation plan, are multiples of this."""
    return ALIGNMENT


def get_num_rdma_alignment() -> int:
    """Bytes that DeepEP aligns for RDMA."""
    return RDMA_ALIGNMENT


def get_num_tma_alignment() -> int:
    """Tensors of the pipeline ring are multiples of this many bytes."""
    return TMA_ALIGNMENT


def calculate_ep_buffer_size(nccl_comm: Any, num_max_tokens_per_rank: int, hidden: int, num_topk: int = 0,
                             use_fp8_dispatch: bool = False, allow_hybrid_mode: bool = True,
                             allow_multiple_reduction: bool = True) -> int:
    """EPBuffer.get_buffer_size_hint(). `nccl_comm`: what comm.get_nccl_comm_handle(group).get() gives, the group."""
    return _ElasticBuffer.get_buffer_size_hint(nccl_comm, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch,
                                               allow_hybrid_mode, allow_multiple_reduction)


def calculate_elastic_buffer_size(num_scaleout_ranks: int, num_scaleup_ranks: int, is_scaleup_nvlink: bool,
                                  num_max_tokens_per_rank: int, hidden: int, num_topk: int = 0,
                                  use_fp8_dispatch: bool = False, allow_multiple_reduction: bool = True) -> int:
    """The formula of ElasticBuffer.get_buffer_size_hint()."""
    return buffer_bytes((num_scaleout_ranks, num_scaleup_ranks), is_scaleup_nvlink, num_max_tokens_per_rank, hidden,
                        num_topk, use_fp8_dispatch, allow_multiple_reduction)
