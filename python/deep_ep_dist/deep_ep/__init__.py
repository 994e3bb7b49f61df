# SPDX-License-Identifier: Apache-2.0
"""DeepEP's interface, provided by EPX: this name is epx.deep_ep."""

from epx import deep_ep_alias

deep_ep_alias.install()
