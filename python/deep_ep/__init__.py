# SPDX-License-Identifier: Apache-2.0
"""DeepEP's interface over EPX: Buffer (V1), ElasticBuffer (2.1), EPBuffer, PPBuffer and EngramBuffer (2.5), and
HybridEPBuffer (Megatron-LM's), with the same names, arguments and results, on GPUs and CPUs, over any network."""

import epx
import torch

if not hasattr(epx, "Group"):
    raise ImportError("deep_ep: expected EPX's epx, got another project's (%s); do: pip uninstall -y epx epx-moe; "
                      "pip install epx-moe" % epx.__file__)

from . import _C as _C  # programs use deep_ep._C without importing it
from ._C import get_num_allocation_alignment, get_num_rdma_alignment, get_num_tma_alignment
from ._checks import ArgumentError, UsageError
from .buffer import Buffer
from .buffers.allocator import BufferAllocator
from .buffers.base import BufferBase
from .buffers.engram import EngramBuffer
from .buffers.ep import EPBuffer
from .buffers.pp import PPBuffer
from .comm import destroy_all_managed_nccl_comm
from .config import Config
from .elastic import ElasticBuffer, EPHandle, get_logical_domain_size, get_physical_domain_size
from .hybrid import HybridEPBuffer
from .utils import EventHandle, EventOverlap, check_nvlink_connections, destroy_uccl, initialize_uccl

__version__ = "2.1.0+epx"

topk_idx_t = torch.int64

__all__ = [
    "__version__", "ArgumentError", "Buffer", "BufferAllocator", "BufferBase", "check_nvlink_connections", "Config",
    "destroy_all_managed_nccl_comm", "destroy_uccl", "ElasticBuffer", "EngramBuffer", "EPBuffer", "EPHandle",
    "EventHandle", "EventOverlap", "get_logical_domain_size", "get_num_allocation_alignment", "get_num_rdma_alignment",
    "get_num_tma_alignment", "get_physical_domain_size", "HybridEPBuffer", "initialize_uccl", "PPBuffer", "topk_idx_t",
    "UsageError",
]
