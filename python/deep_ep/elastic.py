# SPDX-License-Identifier: Apache-2.0
"""Names of DeepEP's V2 interface. They can be imported. Using one raises an error that names the V1 interface."""

from typing import Any, NoReturn


def _later(name: str) -> NoReturn:
    raise NotImplementedError(
        "deep_ep.%s belongs to DeepEP's V2 interface, which EPX does not have yet: "
        "expected deep_ep.Buffer (V1), which EPX "
        "implements completely" % name)


class ElasticBuffer:
    """DeepEP's V2 buffer. Not supported yet: creating one raises NotImplementedError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _later("ElasticBuffer")


class EPHandle:
    """The handle of a V2 buffer. Not supported yet: creating one raises NotImplementedError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _later("EPHandle")


def get_physical_domain_size(*args: Any, **kwargs: Any) -> Any:
    """Part of DeepEP's V2 interface. Raises NotImplementedError."""
    _later("get_physical_domain_size")


def get_logical_domain_size(*args: Any, **kwargs: Any) -> Any:
    """Part of DeepEP's V2 interface. Raises NotImplementedError."""
    _later("get_logical_domain_size")
