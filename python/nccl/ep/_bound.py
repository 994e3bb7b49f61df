# SPDX-License-Identifier: Apache-2.0
"""Dataclasses that stand for a C struct."""

import dataclasses
from typing import Any, Callable, Type

from ._abi import Struct


def bound(struct: Type[Struct]) -> Callable[[type], type]:
    """A keyword-only dataclass with `_lowpp`: the C struct of its present values, kept alive by the object."""

    def decorate(cls: type) -> type:
        cls = dataclasses.dataclass(kw_only=True)(cls)
        names = {field.name: field.metadata.get("lowpp", field.name) for field in dataclasses.fields(cls)}
        kept = "_lowpp_kept"

        def lowpp(self: Any) -> Struct:
            values = {to: _value(getattr(self, name)) for name, to in names.items()}
            fresh = struct(**{to: value for to, value in values.items() if value is not None})
            object.__setattr__(self, kept, fresh)
            return fresh

        cls._lowpp = property(lowpp)  # type: ignore[attr-defined]
        return cls

    return decorate


def _value(value: Any) -> Any:
    """A struct inside, the address of a tensor, or a number."""
    if hasattr(value, "_lowpp"):
        return value._lowpp
    return int(value.ptr) if hasattr(value, "ptr") else value


def address(value: Any) -> int:
    """The address of a dataclass's struct; NULL for None."""
    return 0 if value is None else value._lowpp.ptr


def stream_pointer(stream: Any) -> int:
    """The cudaStream_t of an int, an object of cuda.core, of torch, or with __cuda_stream__; None is the default."""
    if isinstance(stream, bool):
        raise TypeError("stream: expected a stream or its address, got a bool")
    if stream is None or isinstance(stream, int):
        return stream or 0
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    for name in ("handle", "cuda_stream"):
        if hasattr(stream, name):
            return int(getattr(stream, name))
    raise TypeError("stream: expected an int, a stream of cuda.core or torch, or __cuda_stream__, got %r" % (stream,))
