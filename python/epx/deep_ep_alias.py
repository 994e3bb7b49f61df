# SPDX-License-Identifier: Apache-2.0
"""Makes ``import deep_ep`` mean ``epx.deep_ep``, in this process.

The distribution ``python/deep_ep_dist`` calls this when it is imported. A program may also call it itself, before anything
imports ``deep_ep``, to try EPX without installing that distribution::

    import epx.deep_ep_alias
    epx.deep_ep_alias.install()
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

_OURS = "epx.deep_ep"


def install() -> None:
    """Puts ``epx.deep_ep`` and its modules into ``sys.modules`` under the name ``deep_ep``.

    Raises ImportError where another ``deep_ep`` was imported before: its classes would be mixed with EPX's.
    """
    module = importlib.import_module(_OURS)
    present = sys.modules.get("deep_ep", module)
    if present is not module and not _is_ours(present):
        raise ImportError("deep_ep_alias.install(): expected that nothing has imported deep_ep yet, got "
                          f"{getattr(present, '__file__', present)!r}; call it before the first `import deep_ep`")
    sys.modules["deep_ep"] = module
    for part in pkgutil.iter_modules(module.__path__):
        sys.modules[f"deep_ep.{part.name}"] = importlib.import_module(f"{_OURS}.{part.name}")


def _is_ours(module: object) -> bool:
    """The distribution's own deep_ep/__init__.py, while it is being imported."""
    return getattr(module, "deep_ep_alias", None) is sys.modules[__name__]
