# SPDX-License-Identifier: Apache-2.0
"""Dataclasses that stand for a C struct."""

import dataclasses
from typing import Any, Callable, Type

from ._abi import Struct


def bound(struct: Type[Struct]) -> Callable[[type], type]:
    """A keyword-only dataclass with `_lowpp`: its C struct, one object that calls read. A field that is set later is
    set there too; what is set there alone stays."""

    def decorate(cls: type) -> type:
        cls = dataclasses.dataclass(kw_only=True)(cls)
        names = {field.name: field.metadata.get("lowpp", field.name) for field in dataclasses.fields(cls)}
        kept = "_lowpp_kept"

        def lowpp(self: Any) -> Struct:
            own = self.__dict__.get(kept)
            if own is None:
                own = self.__dict__[kept] = struct()
                for name, to in names.items():
                    _store(own, to, getattr(self, name))
            return own

        def set_field(self: Any, name: str, value: Any) -> None:
            object.__setattr__(self, name, value)
            if name in names and kept in self.__dict__:
                _store(self.__dict__[kept], names[name], value)

        def state(self: Any) -> dict:  # of a copy, which has a struct of its own
            return {name: value for name, value in self.__dict__.items() if name != kept}

        cls._lowpp = property(lowpp)  # type: ignore[attr-defined]
        cls.__setattr__, cls.__getstate__ = set_field, state  # type: ignore[assignment,attr-defined]
        return cls

    return decorate


def _store(struct: Struct, name: str, value: Any) -> None:
    """A struct inside, the address of a tensor, or a number; None is 0."""
    if hasattr(value, "_lowpp"):
        value = value._lowpp
    elif hasattr(value, "ptr"):
        value = int(value.ptr)
    setattr(struct, name, value or 0)


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
