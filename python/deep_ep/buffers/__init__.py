# SPDX-License-Identifier: Apache-2.0
"""DeepEP's modules of buffers: elastic (V2), ep (its later form) and legacy (V1)."""
