# SPDX-License-Identifier: Apache-2.0
"""Becomes EPX's deep_ep_cpp, which epx-moe has (epx/_use.py)."""

from epx._use import become

become(__name__)
