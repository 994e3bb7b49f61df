# SPDX-License-Identifier: Apache-2.0
"""EPX, expert-parallel exchange, for Python: a thin layer over the C library, without a compiled extension."""
