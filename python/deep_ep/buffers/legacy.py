# SPDX-License-Identifier: Apache-2.0
"""Buffer, by the name of DeepEP's module."""

from ..buffer import Buffer

__all__ = ["Buffer"]
