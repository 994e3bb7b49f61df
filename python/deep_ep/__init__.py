# SPDX-License-Identifier: Apache-2.0
"""DeepEP's interface over EPX: Buffer (V1) and ElasticBuffer (V2), with the same names, arguments and results, on GPUs
and CPUs, over any network."""

import torch

from .buffer import Buffer
from .config import Config
from .elastic import ElasticBuffer, EPHandle, get_logical_domain_size, get_physical_domain_size
from .utils import EventHandle, EventOverlap

__version__ = "2.1.0+epx"

topk_idx_t = torch.int64

__all__ = [
    "Buffer", "Config", "ElasticBuffer", "EPHandle", "EventHandle", "EventOverlap", "get_logical_domain_size",
    "get_physical_domain_size", "topk_idx_t", "__version__",
]
