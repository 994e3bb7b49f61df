# SPDX-License-Identifier: Apache-2.0
"""Other libraries' process groups."""
