# SPDX-License-Identifier: Apache-2.0
"""Becomes EPX's deep_ep, which epx-moe has (epx/_use.py)."""

import epx

if not hasattr(epx, "Group"):  # before epx._use, which another project's epx has not
    raise ImportError("deep_ep: expected EPX's epx, got another project's (%s); do: pip uninstall -y epx epx-moe; "
                      "pip install epx-moe" % epx.__file__)

from epx._use import become

become(__name__)
