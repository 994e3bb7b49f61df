# SPDX-License-Identifier: Apache-2.0
"""Helpers of DeepEP: events, and what its tests and callers use (math, envs, refs, gate, testing, comm)."""

from .event import EventHandle, EventOverlap
from .uccl import check_nvlink_connections, destroy_uccl, initialize_uccl

__all__ = ["EventHandle", "EventOverlap", "check_nvlink_connections", "destroy_uccl", "initialize_uccl"]
