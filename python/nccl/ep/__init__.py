# SPDX-License-Identifier: Apache-2.0
"""NCCL EP's Python interface (``nccl.ep``) over EPX.

Names, fields and values are those of NVIDIA's package. EPX adds the masks and the asynchronous error of a group, the
two steps of creating a handle, ``Communicator`` for machines without nccl4py, and ``synchronize``. docs/nccl_ep.md.
"""

from ._abi import DataType, NCCLEpError, NcclInvalid
from ._library import get_lib_path, get_lib_version
from .allocator import AllocConfig, AllocFn, FreeFn
from .communicator import Communicator, UniqueId, get_unique_id
from .enums import (Algorithm, CombineQuantizationRecipe, DispatchQuantizationRecipe, ExpertIdKind, Layout,
                    OverflowPolicy, PassDir, ZeroCopyMode)
from .group import Group, GroupConfig, synchronize
from .handle import (CombineConfig, CombineInputs, CombineOutputs, DispatchConfig, DispatchInputs, DispatchOutputs,
                     Handle, HandleConfig, LayoutInfo)
from .tensor import Tensor

__version__ = "0.1.0"

__all__ = [
    "Algorithm", "AllocConfig", "AllocFn", "CombineConfig", "CombineInputs", "CombineOutputs",
    "CombineQuantizationRecipe", "Communicator", "DataType", "DispatchConfig", "DispatchInputs", "DispatchOutputs",
    "DispatchQuantizationRecipe", "ExpertIdKind", "FreeFn", "Group", "GroupConfig", "Handle", "HandleConfig", "Layout",
    "LayoutInfo", "NCCLEpError", "NcclInvalid", "OverflowPolicy", "PassDir", "Tensor", "UniqueId", "ZeroCopyMode",
    "get_lib_path", "get_lib_version", "get_unique_id", "synchronize",
]
