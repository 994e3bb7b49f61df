# SPDX-License-Identifier: Apache-2.0
"""Config: tuning parameters of DeepEP, and hints for the sizes of a buffer."""

from typing import Dict, Tuple

from ._checks import MOST, positive

_CHUNKS = {"num_max_nvl_chunked_send_tokens": 6, "num_max_nvl_chunked_recv_tokens": 256,
           "num_max_rdma_chunked_send_tokens": 6, "num_max_rdma_chunked_recv_tokens": 256}
# Tokens per rank for which the hints are computed. A buffer accepts more: see docs/python.md.
_HINT_TOKENS = 4096
_RANKS_PER_NODE = 8


class _Default(int):
    """A number that the program has not set."""


DEFAULT_SMS = _Default(20)  # DeepEP's


def most_sms(num_sms: int) -> int:
    """SMs that a call may take, as EPX's calls have it; 0: the group's own number."""
    return 0 if isinstance(num_sms, _Default) else min(int(num_sms), MOST)


class Config:
    """DeepEP's tuning parameters. A call takes at most `num_sms` SMs where the program has set it; it also sets the
    number of channels in the handles of dispatches. EPX does not use the others."""

    def __init__(self, num_sms: int = DEFAULT_SMS, num_max_nvl_chunked_send_tokens: int = 6,
                 num_max_nvl_chunked_recv_tokens: int = 256, num_max_rdma_chunked_send_tokens: int = 6,
                 num_max_rdma_chunked_recv_tokens: int = 256) -> None:
        self.num_sms = num_sms
        self.num_max_nvl_chunked_send_tokens = num_max_nvl_chunked_send_tokens
        self.num_max_nvl_chunked_recv_tokens = num_max_nvl_chunked_recv_tokens
        self.num_max_rdma_chunked_send_tokens = num_max_rdma_chunked_send_tokens
        self.num_max_rdma_chunked_recv_tokens = num_max_rdma_chunked_recv_tokens
        for name, value in vars(self).items():
            positive("Config: " + name, value, 0 if name == "num_sms" else 1)

    def unused(self) -> Dict[str, Tuple[int, int]]:
        """The fields that have no effect, with their defaults."""
        return {name: (getattr(self, name), default) for name, default in _CHUNKS.items()}

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes for `num_nvl_bytes`: the rows that a rank receives if every rank sends it 4096 tokens."""
        return positive("num_ranks", num_ranks) * _HINT_TOKENS * _aligned(hidden_bytes)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes for `num_rdma_bytes`: the rows in flight between nodes of eight ranks; 0 inside a node."""
        others = (positive("num_ranks", num_ranks) + _RANKS_PER_NODE - 1) // _RANKS_PER_NODE - 1
        return 2 * others * _HINT_TOKENS * _aligned(hidden_bytes)


def _aligned(hidden_bytes: int) -> int:
    return (positive("hidden_bytes", hidden_bytes) + 127) // 128 * 128
