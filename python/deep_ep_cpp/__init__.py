# SPDX-License-Identifier: Apache-2.0
"""The name of the compiled module of DeepEP's V1, for programs that import from it. Its names are deep_ep's."""

from deep_ep import Buffer as _Buffer
from deep_ep import Config, EventHandle, topk_idx_t

__all__ = ["Config", "EventHandle", "get_low_latency_rdma_size_hint", "is_sm90_compiled", "topk_idx_t"]

get_low_latency_rdma_size_hint = _Buffer.get_low_latency_rdma_size_hint
is_sm90_compiled = _Buffer.is_sm90_compiled


def __getattr__(name: str) -> None:
    why = ": EPX has no compiled runtime; deep_ep.Buffer is the buffer" if name == "Buffer" else ""
    raise AttributeError("module 'deep_ep_cpp' has no attribute %r%s" % (name, why))
