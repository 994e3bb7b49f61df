# SPDX-License-Identifier: Apache-2.0
"""DeepEP's modules of buffers: elastic (V2.1), ep, pp, engram, allocator and base (2.5), and legacy (V1)."""
