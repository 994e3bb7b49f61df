# SPDX-License-Identifier: Apache-2.0
"""PPBuffer: the pipeline-parallel ring of ElasticBuffer as a buffer of its own."""

from typing import Any, List, Optional

import torch

from .. import _checks as checks
from .._checks import refused
from .._eager import eager_class
from ..elastic import ElasticBuffer
from .base import BufferBase, Context

__all__ = ["PPBuffer"]


@eager_class
class PPBuffer(BufferBase):
    """Tensors to and from the neighbours in the ring of a group's ranks."""

    def __init__(self, group: Any, num_max_tensor_bytes: int, num_max_inflight_tensors: int,
                 sl_idx: Optional[int] = None, num_gpu_timeout_secs: int = 100,
                 explicitly_destroy: bool = False) -> None:
        """Collective. The arguments are those of ElasticBuffer and its pp_set_config()."""
        num_max_tensor_bytes = checks.positive("num_max_tensor_bytes", num_max_tensor_bytes)
        num_max_inflight_tensors = checks.positive("num_max_inflight_tensors", num_max_inflight_tensors)
        self.runtime: Optional[ElasticBuffer] = ElasticBuffer(
            group, ElasticBuffer.get_pp_buffer_size_hint(num_max_tensor_bytes, num_max_inflight_tensors),
            sl_idx=3 if sl_idx is None else sl_idx, num_gpu_timeout_secs=num_gpu_timeout_secs,
            explicitly_destroy=explicitly_destroy)
        self.group, self.explicitly_destroy = self.runtime.group, explicitly_destroy
        self.context = Context(self.runtime.num_bytes, self.runtime.get_physical_domain_size(),
                               self.runtime.get_logical_domain_size())
        self.runtime.pp_set_config(num_max_tensor_bytes, num_max_inflight_tensors)

    def _ring(self) -> ElasticBuffer:
        if self.runtime is None:
            raise refused("the buffer was destroyed")
        return self.runtime

    def _groups(self) -> List[Any]:
        return self._ring()._parts["pipeline"].groups

    def send(self, x: torch.Tensor, dst_rank_idx: int, num_sms: Optional[int] = None) -> None:
        """As ElasticBuffer.pp_send()."""
        self._ring().pp_send(x, dst_rank_idx, num_sms or 0)

    def recv(self, x: torch.Tensor, src_rank_idx: int, num_sms: Optional[int] = None) -> None:
        """As ElasticBuffer.pp_recv()."""
        self._ring().pp_recv(x, src_rank_idx, num_sms or 0)

    def destroy(self) -> None:
        """As ElasticBuffer.destroy(). Local."""
        if self.runtime is not None:
            self.runtime.destroy()
            self.runtime = self.context = None
