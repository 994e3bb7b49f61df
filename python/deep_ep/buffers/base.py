# SPDX-License-Identifier: Apache-2.0
"""What DeepEP 2.5's buffers have in common."""

from typing import Any, List, Optional, Tuple


class Context:
    """The ranks and the bytes of a buffer, by the names of DeepEP's contexts. EPX has no workspace of a fixed size."""

    num_workspace_bytes = 0

    def __init__(self, num_bytes: int, physical: Tuple[int, int], logical: Tuple[int, int], storage: int = 0) -> None:
        self.num_gpu_buffer_bytes, self.num_rdma_storage_bytes = num_bytes, storage
        self._physical, self._logical = physical, logical

    def get_physical_domain_size(self) -> Tuple[int, int]:
        """(nodes, ranks per node)."""
        return self._physical

    def get_logical_domain_size(self) -> Tuple[int, int]:
        """(scale-out ranks, scale-up ranks)."""
        return self._logical


class BufferBase:
    """Of this class are EPBuffer, PPBuffer and EngramBuffer."""

    context: Optional[Context] = None

    @property
    def main_context(self) -> Optional[Context]:
        """The context; None after destroy()."""
        return self.context

    def _groups(self) -> List[Any]:
        """EPX's groups that the buffer has now."""
        return []

    def print_memory_usage(self) -> None:
        """Prints this rank's bytes: of the buffer, and of the heaps of its groups, for tensors."""
        groups = self._groups()
        assert self.context is not None
        print("deep_ep.%s: %d bytes; %d groups, whose heaps have %d bytes for tensors" % (
            type(self).__name__, self.context.num_gpu_buffer_bytes, len(groups),
            sum(group.alloc_bytes for group in groups)), flush=True)
