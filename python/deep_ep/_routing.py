# SPDX-License-Identifier: Apache-2.0
"""The routings behind the handle tuples of callers.

A handle tuple has DeepEP's fields. One of its tensors has the routing as an attribute. So the caller may copy the
tuple, or take it apart and rebuild it, as long as the tensors are the same.
"""

from typing import Any, Optional, Tuple, Type, TypeVar

import epx
import torch

from ._checks import wrong
from ._engine import Pool

ATTRIBUTE = "_epx_routing"
_R = TypeVar("_R", bound="Routing")


class Routing:
    """One routing: an EPX handle and its properties. The handle is reused when the routing is no longer referenced."""

    def __init__(self, pool: Pool, handle: epx.Handle, in_graph: bool) -> None:
        self.handle = handle
        self.in_graph = in_graph
        pool.routings += 1
        pool.captured |= in_graph
        self.pool = pool

    def record_capture(self) -> None:
        """Called in each operation with a routing that exists already. A graph may be replayed when the caller has
        dropped the routing: then only other graphs use its handle, and its group lives as long as the buffer."""
        if self.pool.capturing():
            self.in_graph = self.pool.captured = True

    def __del__(self) -> None:
        pool: Optional[Pool] = getattr(self, "pool", None)
        if pool is None:
            return  # Ctrl-C in __init__
        if pool.group.alive:
            pool.give(self.handle, self.in_graph)
        pool.routing_gone()

    def __deepcopy__(self, _memo: Any) -> "Routing":
        return self  # a copy of the tensors of a handle is a handle of the same routing

    def __reduce__(self) -> Any:
        return type(None), ()  # tensors of a handle can be pickled, but lose their routing


class HighThroughputRouting(Routing):
    """The routing of a high-throughput dispatch: `tokens` sent, `rows` received (or num_worst_tokens)."""

    def __init__(self, pool: Pool, handle: epx.Handle, tokens: int) -> None:
        super().__init__(pool, handle, pool.capturing())
        self.tokens = tokens
        self.rows = 0


def attach(tensor: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Stores the routing as an attribute of a tensor of the tuple."""
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
        return "%d fields without such a routing" % len(handle)
    return type(handle).__name__


Handle = Tuple[Any, ...]
