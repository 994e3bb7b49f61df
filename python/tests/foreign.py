# SPDX-License-Identifier: Apache-2.0
"""Single files of a framework, run as they are: what they import beside each other needs compiled kernels and a server,
and is objects here that do nothing, but for the few values that a test gives."""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from typing import Any, Dict, Iterator, Sequence
from unittest import mock

import torch


class Nothing:
    """Any function, object or setting: it is false, and whatever is asked of it gives itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self  # as a decorator, too

    def __getattr__(self, name: str) -> "Nothing":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, key: Any) -> "Nothing":
        return self

    def __or__(self, other: Any) -> "Nothing":  # in annotations
        return self

    __ror__ = __or__

    def __bool__(self) -> bool:
        return False


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The modules of a framework: the files of `real`, and for all others empty modules with what is `given`."""

    def __init__(self, package: str, folder: str, real: Sequence[str], given: Dict[str, Dict[str, Any]]) -> None:
        self._package, self._folder, self._real, self._given = package, folder, real, given

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] != self._package:
            return None
        if name in self._real:
            return importlib.util.spec_from_file_location(name, os.path.join(self._folder, *name.split(".")) + ".py")
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        module = types.ModuleType(spec.name)
        module.__path__ = []  # type: ignore[attr-defined]
        module.__dict__.update(self._given.get(spec.name, {}))
        module.__getattr__ = Nothing().__getattr__  # type: ignore[method-assign]
        return module

    def exec_module(self, module: Any) -> None:
        pass

    def install(self) -> None:
        """Makes the modules importable, once."""
        if not any(isinstance(finder, Finder) and finder._package == self._package for finder in sys.meta_path):
            sys.meta_path.insert(0, self)


@contextlib.contextmanager
def without_gpu() -> Iterator[None]:
    """Frameworks ask for properties of the GPU, and for streams, without asking whether there is one."""
    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            properties = mock.Mock(return_value=mock.Mock(multi_processor_count=132))
            stack.enter_context(mock.patch.object(torch.cuda, "get_device_properties", properties))
            stack.enter_context(mock.patch.object(torch.cuda, "stream", lambda stream: contextlib.nullcontext()))
        yield
