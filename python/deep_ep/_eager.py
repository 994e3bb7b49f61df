# SPDX-License-Identifier: Apache-2.0
"""Functions that torch.compile calls and does not trace.

DeepEP's functions are C++, where torch.compile ends a graph and begins another one behind the call. These are Python
over ctypes: traced, they fail, or leave work out. Marking one loads nothing of torch.compile, which takes seconds.
"""

import functools
import types
from typing import Any, Callable, Type, TypeVar

import torch

_frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
_Class = TypeVar("_Class")


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """For torch before 2.7, which cannot be told to leave alone what a function calls."""
    set_callback = _frames.set_eval_frame

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        callback = set_callback(None)
        try:
            return function(*args, **kwargs)
        finally:
            set_callback(callback)
    _frames.skip_code(call.__code__)
    return call


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, left as it is by torch.compile, and what it calls."""
    if hasattr(_frames, "set_code_exec_strategy"):
        skip = _frames._FrameAction.SKIP
        _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, skip))
    elif hasattr(_frames, "skip_code"):
        function = _wrapped(function)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def eager_class(cls: Type[_Class]) -> Type[_Class]:
    """Marks the constructor and the public methods of a class."""
    for name, value in list(vars(cls).items()):
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(value, staticmethod):
            setattr(cls, name, staticmethod(eager(value.__func__)))
        elif isinstance(value, types.FunctionType) and not hasattr(value, "__wrapped__"):  # not a context manager
            setattr(cls, name, eager(value))
    return cls
