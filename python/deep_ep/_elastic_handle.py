# SPDX-License-Identifier: Apache-2.0
"""EPHandle: what a dispatch of ElasticBuffer returns for later dispatches and for combine."""

from typing import Any, List, Optional

import torch

from ._checks import wrong
from ._elastic_engine import ElasticRouting
from ._routing import ATTRIBUTE

# The constructor's arguments, in DeepEP's order.
_FIELDS = (
    "do_expand", "num_experts", "expert_alignment", "num_max_tokens_per_rank", "num_sms", "topk_idx", "num_recv_tokens",
    "num_expanded_tokens", "num_recv_tokens_per_expert_list", "psum_num_recv_tokens_per_scaleup_rank",
    "psum_num_recv_tokens_per_expert", "num_unaligned_recv_tokens_per_expert", "recv_src_metadata",
    "dst_buffer_slot_idx", "token_metadata_at_forward", "channel_linked_list")


class EPHandle:
    """One routing: counts of what this rank received, and where each row came from. docs/python.md has the fields.

    A handle that is made of the fields of another one has the routing of that one: `recv_src_metadata` carries it.
    A handle keeps its routing where `recv_src_metadata` is replaced, by its first lines for example.
    """

    def __init__(self, do_expand: bool, num_experts: int, expert_alignment: int, num_max_tokens_per_rank: int,
                 num_sms: int, topk_idx: torch.Tensor, num_recv_tokens: int, num_expanded_tokens: int,
                 num_recv_tokens_per_expert_list: List[int], psum_num_recv_tokens_per_scaleup_rank: torch.Tensor,
                 psum_num_recv_tokens_per_expert: torch.Tensor, num_unaligned_recv_tokens_per_expert: torch.Tensor,
                 recv_src_metadata: torch.Tensor, dst_buffer_slot_idx: Optional[torch.Tensor] = None,
                 token_metadata_at_forward: Optional[torch.Tensor] = None,
                 channel_linked_list: Optional[torch.Tensor] = None) -> None:
        self.do_expand = do_expand
        self.num_experts = num_experts
        self.expert_alignment = expert_alignment
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_sms = num_sms
        self.topk_idx = topk_idx
        self.num_recv_tokens = num_recv_tokens
        self.num_expanded_tokens = num_expanded_tokens
        self.num_recv_tokens_per_expert_list = num_recv_tokens_per_expert_list
        self.psum_num_recv_tokens_per_scaleup_rank = psum_num_recv_tokens_per_scaleup_rank
        self.psum_num_recv_tokens_per_expert = psum_num_recv_tokens_per_expert
        self.num_unaligned_recv_tokens_per_expert = num_unaligned_recv_tokens_per_expert
        self.recv_src_metadata = recv_src_metadata
        self._dst_buffer_slot_idx = dst_buffer_slot_idx
        self.token_metadata_at_forward = token_metadata_at_forward
        self.channel_linked_list = channel_linked_list
        self.cached_recv_src_metadata_before_sort: Optional[torch.Tensor] = None
        self._routing: Any = getattr(recv_src_metadata, ATTRIBUTE, None)  # if other metadata is assigned

    @property
    def dst_buffer_slot_idx(self) -> torch.Tensor:
        """int32 [T,K]. EPX sends each row straight to its place and has no slots: all are -1. Made for each reader:
        another stream, or one behind a capture, would not wait for the first."""
        if self._dst_buffer_slot_idx is None:
            return torch.full_like(self.topk_idx, -1, dtype=torch.int32)
        return self._dst_buffer_slot_idx

    @dst_buffer_slot_idx.setter
    def dst_buffer_slot_idx(self, value: Optional[torch.Tensor]) -> None:
        self._dst_buffer_slot_idx = value

    def deterministic_sort(self) -> None:
        """Does nothing: EPX's rows are sorted."""

    def __repr__(self) -> str:
        return "EPHandle(%s)" % ", ".join("%s=%r" % (name, getattr(self, name)) for name in _FIELDS[:5])


def routing_of(handle: Any) -> ElasticRouting:
    """The routing of a handle."""
    routing = getattr(getattr(handle, "recv_src_metadata", None), ATTRIBUTE, None) or getattr(handle, "_routing", None)
    if not isinstance(handle, EPHandle) or not isinstance(routing, ElasticRouting):
        raise wrong("handle", "an EPHandle that ElasticBuffer.dispatch returned", "one without its routing: it was "
                    "pickled, or made of other tensors" if isinstance(handle, EPHandle) else type(handle).__name__)
    return routing
