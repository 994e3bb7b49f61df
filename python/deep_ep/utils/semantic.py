# SPDX-License-Identifier: Apache-2.0
"""Small helpers of DeepEP's Python code."""

import functools
import weakref
from typing import Any, Callable, Optional


def value_or(value: Optional[Any], default: Any) -> Any:
    """The value, or the default for None."""
    return default if value is None else value


def weak_lru(maxsize: Optional[int] = 128, typed: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """functools.lru_cache for methods: the cache does not keep the object alive."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.lru_cache(maxsize, typed)
        def cached(self_ref: Any, *args: Any, **kwargs: Any) -> Any:
            return method(self_ref(), *args, **kwargs)

        @functools.wraps(method)
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            return cached(weakref.ref(self), *args, **kwargs)

        return called

    return decorate
