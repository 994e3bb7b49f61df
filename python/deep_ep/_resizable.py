# SPDX-License-Identifier: Apache-2.0
"""Storages over EPX's memory that can be resized, as torch's own can.

torch marks a storage over foreign memory as not resizable and gives it no allocator, and no function of torch changes
that afterwards. Two fields of the C++ object decide: a flag, and the address of the allocator that resize_() asks for
new memory. Both are found by comparing storages of both kinds and tried once, in a storage of this module. If torch has
moved them elsewhere, nothing is ever written, and storages stay as torch made them.
"""

import ctypes
import functools
import sys
from typing import List, Optional, Tuple

import torch

_WORDS = 10  # of a storage object; every torch since 2.1 has at least eleven
_FIRST = 7  # word behind the size
_Words = ctypes.c_uint64 * _WORDS


def _words(storage: torch.UntypedStorage) -> Tuple[int, ...]:
    return tuple(_Words.from_address(storage._cdata))


def _candidates() -> List[Tuple[int, int, int]]:
    """Offsets of the flag and of the allocator that may be right, and the address of the CPU's allocator."""
    foreign = _words(torch.frombuffer(bytearray(96), dtype=torch.uint8).untyped_storage())
    theirs = [torch.empty(count, dtype=torch.uint8, device="cpu").untyped_storage() for count in (96, 96, 160)]
    own = [_words(storage) for storage in theirs]
    # The allocator is an address in torch's own storages, the same in all, and none in the other.
    allocators = [i for i in range(_FIRST, _WORDS) if foreign[i] == 0 and own[0][i] > 4096
                  and own[0][i] == own[1][i] == own[2][i]]
    # The flag is a byte of the word before it, in newer versions of torch of the one before that. A byte between fields
    # may look like it by chance.
    return [(flag * 8 + byte, i * 8, own[0][i]) for i in allocators for flag in (i - 1, i - 2) for byte in range(8)
            if flag >= _FIRST and _byte(foreign[flag], byte) == 0 and all(_byte(words[flag], byte) == 1
                                                                          for words in own)]


def _byte(word: int, which: int) -> int:
    return word.to_bytes(8, sys.byteorder)[which]


def _works(flag: int, allocator: int, address: int) -> bool:
    """Tries the offsets: a storage of foreign memory is resized to nothing and back."""
    tensor = torch.frombuffer(bytearray(b"\1" * 96), dtype=torch.uint8)
    storage = tensor.untyped_storage()
    if storage.resizable():
        return False
    ctypes.c_uint64.from_address(storage._cdata + allocator).value = address
    ctypes.c_uint8.from_address(storage._cdata + flag).value = 1
    if not storage.resizable() or storage.nbytes() != 96:
        return False
    storage.resize_(0)
    storage.resize_(128)
    tensor.fill_(3)
    return storage.nbytes() == 128 and int(tensor.sum()) == 288


@functools.lru_cache(maxsize=None)
def _place() -> Optional[Tuple[int, int, int]]:
    """The candidate that works, or None."""
    with torch.inference_mode(False):
        found = _candidates() if hasattr(torch.UntypedStorage, "resizable") else []
        return next((one for one in found if _works(*one)), None)


@functools.lru_cache(maxsize=None)
def patch_of(device: torch.device) -> Tuple[int, int, int]:
    """What a storage of a device needs to be resized, for python/calls: offsets of a flag that becomes 1 and of the
    allocator, and the allocator. Three zeros where that is not known."""
    place = _place()
    if place is None:
        return 0, 0, 0
    flag, allocator, address = place
    if device.type != "cpu":
        with torch.inference_mode(False):
            address = _words(torch.empty(512, dtype=torch.uint8, device=device).untyped_storage())[allocator // 8]
    return flag, allocator, address
