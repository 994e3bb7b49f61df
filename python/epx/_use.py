# SPDX-License-Identifier: Apache-2.0
"""Packages of EPX that have names of other projects: ``deep_ep``, and with it ``deep_ep_cpp`` and ``hybrid_ep_cpp``.

They are installed in ``epx/dropins/NAME``, where no import looks, so that they share no file with others of that name.
:func:`use` puts that folder first. The distribution epx-moe-deep-ep has a module ``deep_ep.py``, which Python finds
only where no folder ``deep_ep`` is beside it, and which becomes EPX's package (:func:`become`).
"""

import importlib
import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any, List

_MAIN = {"deep_ep": "deep_ep", "deep_ep_cpp": "deep_ep", "hybrid_ep_cpp": "deep_ep"}  # a name's package


def _folder(name: str) -> str:
    """The folder with EPX's package `name`, and those that belong to it."""
    if _MAIN.get(name) != name:
        raise ImportError("epx.use: expected one of %s, got %r" % (", ".join(sorted(set(_MAIN.values()))), name))
    here = os.path.dirname(os.path.abspath(__file__))
    installed, sources = os.path.join(here, "dropins", name), os.path.dirname(here)
    for folder, mark in ((installed, name), (sources, "names")):  # only a source tree has a folder `names`
        if os.path.isdir(os.path.join(folder, mark)):
            return folder
    raise ImportError("epx.use: expected the folder %s; install epx-moe anew" % installed)


class _Finder:
    """Finds EPX's packages of these names in a folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        return importlib.machinery.PathFinder.find_spec(fullname, [self._folder]) if fullname in _MAIN else None


def _is_ours(module: ModuleType, folder: str) -> bool:
    return os.path.abspath(getattr(module, "__file__", None) or "").startswith(os.path.join(folder, ""))


def _check_unused(name: str, folder: str) -> None:
    """Raises ImportError if another project's package of that name is imported already."""
    module = sys.modules.get(name)
    if module is not None and not _is_ours(module, folder):
        raise ImportError("epx.use: expected that nothing has imported %s, got another project's (%s); call "
                          "epx.use(%r) first" % (name, getattr(module, "__file__", None), name))


def use(name: str) -> None:
    """``import NAME`` takes EPX's package from now on, also in processes that this one starts.

    Another project's package of that name may be installed, and must not be imported yet. `name` is "deep_ep"; it
    brings ``deep_ep_cpp`` and ``hybrid_ep_cpp`` with it.
    """
    folder = _folder(name)
    _check_unused(name, folder)
    sys.path[:] = [folder, *(path for path in sys.path if path != folder)]  # multiprocessing hands it on
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *(path for path in inherited if path not in ("", folder))])


def load(name: str) -> ModuleType:
    """EPX's package, for EPX's own code, whichever ``import NAME`` would find."""
    main = _MAIN[name]
    folder = _folder(main)
    _check_unused(main, folder)
    if name not in sys.modules:
        finder = _Finder(folder)
        sys.meta_path.insert(0, finder)
        try:
            importlib.import_module(name)
        finally:
            sys.meta_path.remove(finder)
    return sys.modules[name]


def become(name: str) -> None:
    """Replaces the module that calls it, which is being imported as `name`, by EPX's package."""
    main = _MAIN[name]
    if name != main and not _is_ours(importlib.import_module(main), _folder(main)):
        raise ImportError("%s: expected EPX's %s beside it, got another project's (%s); call epx.use(%r) before"
                          % (name, main, sys.modules[main].__file__, main))
    del sys.modules[name]
    load(name)


def main(arguments: List[str]) -> None:
    """``python -m epx.use NAME... -- PROGRAM [ARGUMENT...]``"""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    names, command = arguments[:at], arguments[at + 1:]
    if not names or not command:
        sys.exit("usage: python -m epx.use NAME... -- PROGRAM [ARGUMENT...]")
    try:
        for name in names:
            use(name)
        os.execvp(command[0], command)
    except ImportError as error:
        sys.exit(str(error))
    except OSError as error:
        sys.exit("epx.use: %s: %s" % (command[0], error.strerror))
