# SPDX-License-Identifier: Apache-2.0
"""What stands behind the handle tuples that callers see.

A tuple has DeepEP's fields; one of its tensors carries the routing as an attribute, so that the tuple may be copied, or
taken apart and put together again, as long as its tensors are the same.
"""

from typing import Any, Optional, Tuple, Type, TypeVar

import epx
import torch

from ._checks import wrong
from ._engine import Pool

ATTRIBUTE = "_epx_routing"
_R = TypeVar("_R", bound="Routing")


class Routing:
    """One routing: an EPX handle and what is known of it. The handle is used again when nobody refers to the
    routing."""

    def __init__(self, pool: Pool, handle: epx.Handle, in_graph: bool) -> None:
        self.pool = pool
        pool.routings += 1
        self.handle = handle
        self.in_graph = in_graph

    def __del__(self) -> None:
        if self.pool.group.alive:
            self.pool.give(self.handle, self.in_graph)
        self.pool.routing_gone()

    def __deepcopy__(self, _memo: Any) -> "Routing":
        return self  # whoever copies the tensors of a handle has another handle of the same routing

    def __reduce__(self) -> Any:
        return type(None), ()  # tensors of a handle may be saved, but have no routing elsewhere


class HighThroughputRouting(Routing):
    """Of a high-throughput dispatch: `tokens` of this rank, `rows` received (or the bound given for them)."""

    def __init__(self, pool: Pool, handle: epx.Handle, tokens: int) -> None:
        super().__init__(pool, handle, pool.capturing())
        self.tokens = tokens
        self.rows = 0


def attach(tensor: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Makes a tensor of the tuple carry the routing."""
    setattr(tensor, ATTRIBUTE, routing)
    return tensor


def find(kind: Type[_R], handle: Any) -> _R:
    """The routing of a handle tuple."""
    whole = getattr(handle, "routing", None)
    if isinstance(whole, kind):
        return whole
    if isinstance(handle, (tuple, list)):
        for field in handle:
            routing: Optional[Routing] = getattr(field, ATTRIBUTE, None)
            if isinstance(routing, kind):
                return routing
    raise wrong("handle", "a handle that a %s dispatch returned" % (
        "high-throughput" if kind is HighThroughputRouting else "low-latency"), _describe(handle))


def _describe(handle: Any) -> str:
    if isinstance(handle, (tuple, list)):
        return "%d fields, none of which carries such a routing" % len(handle)
    return type(handle).__name__


Handle = Tuple[Any, ...]
