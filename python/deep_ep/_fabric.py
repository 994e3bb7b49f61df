# SPDX-License-Identifier: Apache-2.0
"""Fabric handles, by which GPUs of other hosts of a rack could be mapped: EPX does not use them, and says so once."""

import ctypes
import logging
from typing import Optional

import torch

_FABRIC_SUPPORTED = 128  # CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
_said = False


def fabric_supported() -> Optional[bool]:
    """Does the driver offer fabric handles for the current GPU? None without a GPU."""
    if not torch.cuda.is_available():
        return None
    value = ctypes.c_int(0)
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(
            ctypes.byref(value), _FABRIC_SUPPORTED, torch.cuda.current_device())
    except (OSError, AttributeError):
        return None
    return status == 0 and value.value != 0


def say_unused(rank: int, nnodes: int) -> None:
    """A line in the log of rank 0 where the ranks are on several hosts: on one, fabric handles would change nothing."""
    global _said
    if _said or rank or nnodes == 1:
        return
    _said = True
    offered = {None: "no GPU here", True: "the driver offers fabric handles", False: "the driver offers none"}
    logging.getLogger("deep_ep").warning(
        "allow_mnnvl, use_fabric: no effect: EPX maps memory of GPUs of one host and reaches the %d nodes of this "
        "group by the network (%s)", nnodes, offered[fabric_supported()])
