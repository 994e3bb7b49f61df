# SPDX-License-Identifier: Apache-2.0
"""Handles of NCCL communicators, by the name of DeepEP 2.1's module: see deep_ep.comm."""

from ..comm import NCCLCommHandle, destroy_all_managed_nccl_comm, get_nccl_comm_handle

__all__ = ["NCCLCommHandle", "destroy_all_managed_nccl_comm", "get_nccl_comm_handle"]
