# SPDX-License-Identifier: Apache-2.0
"""What ElasticBuffer must give, in plain torch on the CPU: facts of DeepEP V2, computed for one rank at a time."""

from typing import Any, Callable, List, Optional, Tuple

import torch
from reference import Work

Item = Tuple[int, torch.Tensor]  # its place in the top-k, and a row


def up(value: int, step: int) -> int:
    """Rounded up to a multiple."""
    return -(-value // step) * step


def rough(hidden: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A row whose sums with others show the order of the additions: half of the values are +2^n or -2^n, which cancel
    each other exactly, and the others lose bits if they are added in between. Of ordinary values another order changes
    one sum in 10^7. 32 of the large ones are no infinity in fp16: sums of those are NaNs, whose bits differ between
    processors."""
    rng = torch.Generator().manual_seed(seed)
    small, kind = torch.randn(hidden, generator=rng), torch.randint(-1, 3, (hidden,), generator=rng)
    large = 2.0 ** (10 if dtype is torch.float16 else 26)
    return torch.where(kind % 2 == 0, small * (0.001 if dtype is torch.float16 else 3), kind * large).to(dtype)


def expert_value(work: Work, source: int, token: int, k: int) -> torch.Tensor:
    """The row that the expert of (source, token, k) returns: bf16, different for every entry."""
    return rough(work.hidden, torch.bfloat16, (source * 4096 + token) * 64 + k)


def _fold(items: List[Item], key: Callable[[int], int]) -> List[Item]:
    """Sums the rows of each group in order, in fp32, rounds; a group has the place of its last member."""
    places: List[Item] = []
    for group in {key(k) for k, _row in items}:
        members = [(k, row) for k, row in items if key(k) == group]
        total = torch.zeros_like(members[0][1], dtype=torch.float32)
        for _k, row in members:
            total += row.float()
        places.append((members[-1][0], total.bfloat16()))
    return sorted(places, key=lambda item: item[0])


def combined(work: Work, me: int, per_node: int, expand: bool, multiple: bool, hybrid: bool,
             bias: List[torch.Tensor]) -> torch.Tensor:
    """combined_x of rank `me`, where each expert returns expert_value()."""
    out = torch.zeros(work.idx[me].shape[0], work.hidden)
    for b in bias:
        out += b.float()
    for t, row in enumerate(work.idx[me].tolist()):
        items = [(k, expert_value(work, me, t, k)) for k, e in enumerate(row) if e >= 0]
        if not expand or multiple:  # without expansion, the experts' rank has summed its rows
            items = _fold(items, lambda k: row[k] // work.local)
        if multiple and hybrid:
            items = _fold(items, lambda k: row[k] // (work.local * per_node))
        for _k, value in items:
            out[t] += value.float()
    return out.bfloat16()


class Expanded:
    """The zones of rank `me`: `source` has (rank, token, k) of each row, or None for padding."""

    def __init__(self, work: Work, me: int, alignment: int) -> None:
        self.source: List[Optional[Tuple[int, int, int]]] = []
        self.ends: List[int] = []
        self.counts: List[int] = []
        for expert in range(me * work.local, (me + 1) * work.local):
            rows = [(s, t, row.index(expert)) for s in range(work.nranks)
                    for t, row in enumerate(work.idx[s].tolist()) if expert in row]
            self.counts.append(len(rows))
            self.ends.append(len(self.source) + len(rows))
            self.source += rows
            self.source += [None] * (up(len(rows), alignment) - len(rows))

    def rows(self, values: List[torch.Tensor]) -> torch.Tensor:
        """Row by row from values[source rank][token]; padding is zero."""
        zero = torch.zeros_like(values[0][:1]) if len(values[0]) else torch.zeros(1, *values[0].shape[1:])
        return torch.cat([values[at[0]][at[1]:at[1] + 1] if at is not None else zero.to(values[0].dtype)
                          for at in self.source]) if self.source else values[0][:0]

    def weights(self, work: Work) -> torch.Tensor:
        """fp32 [X]; padding is zero."""
        return torch.tensor([float(work.weights[at[0]][at[1], at[2]]) if at is not None else 0.0
                             for at in self.source])

    def results(self, work: Work, rows: int) -> torch.Tensor:
        """What the experts return: bf16 [rows, H], noise in padding and behind it."""
        out = torch.full((rows, work.hidden), 7.0).bfloat16()
        for i, at in enumerate(self.source):
            if at is not None:
                out[i] = expert_value(work, *at)
        return out


def flat_results(work: Work, me: int, rows: int) -> torch.Tensor:
    """What rank `me` returns without expansion: the sum of its experts' rows in k-order, rounded."""
    ranks, tokens, *_ = work.flat(me)
    out = torch.full((rows, work.hidden), 7.0).bfloat16()
    for i, (s, t) in enumerate(zip(ranks.tolist(), tokens.tolist())):
        total = torch.zeros(work.hidden)
        for k, expert in enumerate(work.idx[s][t].tolist()):
            if expert >= 0 and expert // work.local == me:
                total += expert_value(work, s, t, k).float()
        out[i] = total.bfloat16()
    return out


def parts(x: Any) -> Tuple[torch.Tensor, ...]:
    """A pair, or a tensor as a tuple of one."""
    return x if isinstance(x, tuple) else (x,)
