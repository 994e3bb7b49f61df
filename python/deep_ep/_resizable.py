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
from typing import Dict, List, Optional, Tuple

import torch
from epx.dlpack import copy_bytes

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


class _Patch:
    """What a resizable storage has in the two places."""

    def __init__(self, flag: int, allocator: int, address: int) -> None:
        self._flag, self._allocator = flag, allocator
        self._true, self._address = ctypes.c_uint8(1), ctypes.c_uint64(address)
        self._at_true, self._at_address = ctypes.addressof(self._true), ctypes.addressof(self._address)

    def apply(self, storage: torch.UntypedStorage) -> None:
        """Makes the storage resizable."""
        at = storage._cdata
        copy_bytes(at + self._allocator, self._at_address, 8)
        copy_bytes(at + self._flag, self._at_true, 1)


def _works(flag: int, allocator: int, address: int) -> bool:
    """Tries the offsets: a storage of foreign memory is resized to nothing and back."""
    tensor = torch.frombuffer(bytearray(b"\1" * 96), dtype=torch.uint8)
    storage = tensor.untyped_storage()
    if storage.resizable():
        return False
    _Patch(flag, allocator, address).apply(storage)
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


_patches: Dict[torch.device, Optional[_Patch]] = {}


def _patch_of(device: torch.device) -> Optional[_Patch]:
    """The patch with torch's allocator for a device, or None where storages cannot be made resizable."""
    place = _place()
    if place is None:
        return None
    flag, allocator, address = place
    if device.type != "cpu":
        address = _words(torch.empty(512, dtype=torch.uint8, device=device).untyped_storage())[allocator // 8]
    return _Patch(flag, allocator, address)


def make_resizable(tensor: torch.Tensor) -> None:
    """Lets the storage of a tensor over foreign memory be resized. resize_() releases that memory, as soon as no other
    tensor has a part of it, and takes torch's own."""
    device = tensor.device
    try:
        patch = _patches[device]
    except KeyError:
        patch = _patches[device] = _patch_of(device)
    if patch is not None:
        patch.apply(tensor.untyped_storage())
