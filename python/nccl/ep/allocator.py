# SPDX-License-Identifier: Apache-2.0
"""A group's allocator: C functions that libnccl_ep.so calls for its memory."""

import ctypes

from ._abi import AllocConfigStruct
from ._bound import bound

# int alloc(void **ptr, size_t bytes, void *context) and int free(void *ptr, void *context); 0 is success. Keep the
# objects alive as long as the group, and give ctypes.cast(fn, ctypes.c_void_p).value.
AllocFn = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_void_p)
FreeFn = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


@bound(AllocConfigStruct)
class AllocConfig:
    """Addresses of the functions, both or neither, and what they are given as context."""

    alloc_fn: int = 0
    free_fn: int = 0
    context: int = 0
