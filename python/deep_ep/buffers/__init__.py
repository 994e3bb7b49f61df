# SPDX-License-Identifier: Apache-2.0
"""DeepEP's modules of buffers: elastic (V2) and legacy (V1)."""
