# SPDX-License-Identifier: Apache-2.0
"""BufferAllocator: a plan of tensors that will share one piece of memory."""

from typing import Any, List, Tuple

import torch

from .._checks import describe, refused, wrong
from .._elastic_sizes import ALIGNMENT, up


class BufferAllocator:
    """Tensors without memory, each at a multiple of 2 MiB; materialize() gives them theirs."""

    def __init__(self) -> None:
        self.alignment = ALIGNMENT
        self.allocations: List[Tuple[torch.Tensor, int]] = []  # with their offsets
        self.num_bytes = 0
        self.materialized = False

    def allocate(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the device "meta", until materialize()."""
        if self.materialized:
            raise refused("allocate: expected a plan that has no memory yet, got one that is materialized")
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self.allocations.append((tensor, self.num_bytes))
        self.num_bytes = up(self.num_bytes + tensor.numel() * tensor.element_size(), self.alignment)
        return tensor

    def materialize(self, storage: torch.Tensor) -> None:
        """The tensors become views of `storage`, uint8 [num_bytes] on any device."""
        if self.materialized:
            raise refused("materialize: expected a plan that has no memory yet, got one that is materialized")
        if not isinstance(storage, torch.Tensor) or storage.dtype is not torch.uint8 or not storage.is_contiguous() or \
                storage.numel() != self.num_bytes:
            raise wrong("storage", "a contiguous uint8 tensor of %d bytes" % self.num_bytes, describe(storage))
        if not hasattr(torch.utils, "swap_tensors"):
            raise refused("materialize: expected torch 2.2 or newer, got %s" % torch.__version__)
        for tensor, offset in self.allocations:
            part = storage.view(-1)[offset:offset + tensor.numel() * tensor.element_size()]
            torch.utils.swap_tensors(tensor, part.view(tensor.dtype).view(tensor.shape))
        self.materialized = True
