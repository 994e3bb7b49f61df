# SPDX-License-Identifier: Apache-2.0
"""The programs of docs/python.md run as they are there."""

import os
import re
from typing import Any, Dict

import torch
from suite import World

PAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "docs", "python.md")


def program(number: int) -> str:
    """The Python block of that number."""
    with open(PAGE, encoding="utf-8") as file:
        return re.findall(r"^```python\n(.*?)^```", file.read(), flags=re.S | re.M)[number]


def test_first_program(world: World) -> None:
    code = program(0).replace('dist.init_process_group("gloo")\n', "")
    names: Dict[str, Any] = {"print": lambda *_: None}
    exec(compile(code, PAGE, "exec"), names)  # checks its result itself
    assert names["rows"].shape[1] == 128 and len(names["counts"]) == 2


def test_native_program(world: World) -> None:
    world.only("cpu")
    local, hidden = -(-8 // world.nranks), 7168
    x = torch.full((3, hidden), float(world.rank + 1)).bfloat16()
    names: Dict[str, Any] = dict(
        x=x, topk_idx=torch.tensor([[0, 7]] * 3),
        rows=torch.empty(local, world.nranks * 128, hidden, dtype=torch.bfloat16),
        counts=torch.empty(local, dtype=torch.int32), weights=torch.full((3, 2), 0.5), y=torch.empty_like(x))
    exec(compile(program(1), PAGE, "exec"), names)
    assert torch.equal(names["y"], x)
