# SPDX-License-Identifier: Apache-2.0
"""ElasticBuffer and EPHandle, by the name of DeepEP's module."""

from ..elastic import ElasticBuffer, EPHandle

__all__ = ["ElasticBuffer", "EPHandle"]
