# SPDX-License-Identifier: Apache-2.0
"""Random programs for HybridEPBuffer: see random_elastic.py."""

import random
from typing import Any, Dict, List, Optional, Tuple

import deep_ep
import torch
from random_elastic import Routed, fold, same
from suite import World

Place = Optional[Tuple[int, int, int]]


class Hybrid:
    """One buffer and its calls."""

    def __init__(self, world: World, seed: int, group: Any, ranks: int, per_node: int) -> None:
        self.world, self.rng, self.me = world, random.Random(seed), world.rank
        self.ranks, self.per_node = ranks, per_node
        self.local = self.rng.choice((1, 2, 5))
        self.most = self.rng.choice((2, 9, 30))
        self.hidden = self.rng.choice((16, 128, 256))
        self.buffer = deep_ep.HybridEPBuffer(group, self.hidden, self.most, self.local)
        self.kept: List[Any] = []
        self.text: List[str] = []

    def report(self, what: str, got: Any, want: Any) -> str:
        """A failure."""
        return "%s: got %s, expected %s\n%s" % (what, got, want, "\n".join(self.text[-8:]))

    def draw(self) -> Routed:
        """A routing of this buffer's experts, without repetition."""
        rng, routed = self.rng, Routed(self.rng, self.ranks, self.most)
        routed.local, routed.experts = self.local, self.ranks * self.local
        routed.topk, routed.idx_dtype = rng.randint(1, min(routed.experts, 32)), torch.int64
        none = rng.choice((0, 0.2, 0.8, 1))
        routed.draw(rng, none)
        return routed

    def inputs(self, routed: Routed) -> Tuple[Dict[str, Any], List[torch.Tensor], bool]:
        """The routing as arguments; probs [T, E] of all ranks; by map: entries are in the order of experts."""
        rng, me, world = self.rng, self.me, self.world
        gen = torch.Generator().manual_seed(rng.getrandbits(31))
        maps = []
        for lines in routed.idx:
            marks = torch.zeros(len(lines), routed.experts, dtype=torch.bool)
            for t, line in enumerate(lines):
                marks[t, [e for e in line if e >= 0]] = True
            maps.append(marks)
        probs = [torch.rand(marks.shape, generator=gen) * marks for marks in maps]
        if rng.random() < 0.6:
            for lines in routed.idx:  # what a map says
                for line in lines:
                    line[:] = sorted(e for e in line if e >= 0) + [-1] * sum(1 for e in line if e < 0)
            return dict(routing_map=world.to(maps[me]), probs=world.to(probs[me])), probs, True
        lines = routed.idx[me]
        weights = torch.tensor([[float(probs[me][t, e]) if e >= 0 else 0.5 for e in line]
                                for t, line in enumerate(lines)]).view(len(lines), routed.topk)
        return dict(topk_idx=routed.tensor(world, me), topk_weights=world.to(weights),
                    num_of_experts=routed.experts), probs, False

    def rows(self, routed: Routed) -> List[torch.Tensor]:
        """Tokens of all ranks."""
        gen = torch.Generator().manual_seed(self.rng.getrandbits(31))
        return [torch.randn(n, self.hidden, generator=gen).bfloat16() for n in routed.counts]

    def dispatch(self) -> None:
        """With permutation, a new routing."""
        rng, world, me = self.rng, self.world, self.me
        routed, pad = self.draw(), rng.choice((None, 1, 4, 16))
        x = self.rows(routed)
        given, probs, _by_map = self.inputs(routed)
        if rng.random() < 0.2:
            given = {name: value for name, value in given.items() if name not in ("probs", "topk_weights")}
        weighted = "probs" in given or "topk_weights" in given
        every = [routed.zones(r, pad or 1)[0] for r in range(self.ranks)]
        limits: List[Optional[int]] = [None] * self.ranks
        if rng.random() < 0.5:
            limits = [max(0, len(zones) + rng.choice((-7, -1, 0, 0, 3, 20))) for zones in every]
            given.update(num_permuted_tokens=limits[me], non_blocking=True)
        self.text.append("permute counts=%s E=%d K=%d pad=%s limits=%s map=%s w=%s" % (
            routed.counts, routed.experts, routed.topk, pad, limits, _by_map, weighted))
        got = self.buffer.dispatch_with_permute(hidden=world.to(x[me]), pad_multiple=pad, **given)
        kept: List[List[Place]] = [zones if limit is None else zones[:limit] for zones, limit in zip(every, limits)]
        handle = got[4]
        self.check(kept[me], limits[me], x, probs if weighted else None, got, routed)
        padded = [-(-n // (pad or 1)) * (pad or 1) for n in routed.zones(me, 1)[2]]
        ends = [sum(padded[:i]) for i in range(len(padded) + 1)]
        if limits[me] is not None:
            ends = [min(end, limits[me]) for end in ends]
        want = [b - a for a, b in zip(ends, ends[1:])]
        assert got[3].tolist() == want and got[3].dtype is torch.int64, self.report("tokens_per_expert", got[3], want)
        lost = any(at is not None for at in every[me][len(kept[me]):])
        assert handle[-1].tolist() == [int(lost)], self.report("overflow", handle[-1], lost)
        stay = [routed.idx[at[0]][at[1]][at[2]] - me * self.local for at in kept[me] if at is not None]
        want = [stay.count(l) for l in range(self.local)]
        assert handle[7].tolist() == want, self.report("[7]", handle[7], want)
        assert int(handle[3]) == len(routed.flat(me))
        self.kept.append((routed, kept, limits, handle))

    def check(self, places: List[Place], limit: Optional[int], x: List[torch.Tensor],
              probs: Optional[List[torch.Tensor]], got: Any, routed: Routed) -> None:
        """Rows and probs."""
        rows = len(places) if limit is None else limit
        want = torch.zeros(rows, self.hidden, dtype=torch.bfloat16)
        mass = torch.zeros(rows)
        for i, at in enumerate(places):
            if at is not None:
                want[i] = x[at[0]][at[1]]
                mass[i] = 0 if probs is None else probs[at[0]][at[1], routed.idx[at[0]][at[1]][at[2]]]
        assert same(got[0], want), self.report("rows", got[0], want)
        assert (got[1] is None) == (probs is None) and (probs is None or same(got[1].view(-1), mass)), self.report(
            "probs", got[1], mass)
        assert got[2] is None

    def again(self) -> None:
        """By handle."""
        routed, kept, limits, handle = self.rng.choice(self.kept)
        x = self.rows(routed)
        given: Dict[str, Any] = {}
        probs = None
        if self.rng.random() < 0.5:
            gen = torch.Generator().manual_seed(self.rng.getrandbits(31))
            probs = [torch.rand(n, routed.experts, generator=gen) for n in routed.counts]
            given["probs"] = self.world.to(probs[self.me])
        self.text.append("permute by handle, probs=%s" % (probs is not None))
        got = self.buffer.dispatch_with_permute(hidden=self.world.to(x[self.me]), handle=handle,
                                                num_permuted_tokens=limits[self.me], **given)
        self.check(kept[self.me], limits[self.me], x, probs, got, routed)

    def combine(self) -> None:
        """With the reverse of the permutation."""
        rng, world, me = self.rng, self.world, self.me
        routed, kept, limits, handle = rng.choice(self.kept)
        salt, weighted = rng.getrandbits(20), rng.random() < 0.5
        rows = len(kept[me]) if limits[me] is None else limits[me]
        y, mass = torch.full((rows, self.hidden), 9.0).bfloat16(), torch.full((rows,), 9.0)
        for i, at in enumerate(kept[me]):
            if at is not None:
                y[i], mass[i] = self.value(at, salt), float((salt + at[0] * 31 + at[1] * 7 + at[2]) % 997)
        self.text.append("unpermute w=%s" % weighted)
        combined, back = self.buffer.combine_with_unpermute(
            hidden=world.to(y), probs=world.to(mass) if weighted else None, handle=handle)
        stays = {at for places in kept for at in places if at is not None}
        want = torch.zeros(routed.counts[me], self.hidden)
        probs = torch.zeros(routed.counts[me], routed.experts)
        for t, line in enumerate(routed.idx[me]):
            here = [(e // self.local, k, self.value((me, t, k), salt)) for k, e in enumerate(line)
                    if e >= 0 and (me, t, k) in stays]
            for k, e in enumerate(line):
                if e >= 0 and (me, t, k) in stays:
                    probs[t, e] = float((salt + me * 31 + t * 7 + k) % 997)
            here = fold(here, torch.bfloat16) if here else []
            if self.per_node < self.ranks and here:
                here = fold([(r // self.per_node, k, row) for r, k, row in here], torch.bfloat16)
            for _group, _k, row in here:
                want[t] = want[t] + row.float()
        assert same(combined, want.bfloat16()), self.report("combined", combined, want)
        assert (back is not None) == weighted
        assert back is None or same(back, probs), self.report("probs back", back, probs)

    def value(self, at: Tuple[int, int, int], salt: int) -> torch.Tensor:
        """What the expert of (rank, token, k) returns."""
        gen = torch.Generator().manual_seed(salt + (at[0] * 4096 + at[1]) * 64 + at[2])
        return (torch.randn(self.hidden, generator=gen) * 2).bfloat16()

    def step(self) -> None:
        """One call."""
        what = self.rng.choice((self.dispatch, self.again, self.combine, self.combine))
        if self.kept or what == self.dispatch:
            what()
        if len(self.kept) > 3:
            self.kept.pop(0)

    def finish(self) -> None:
        """The end."""
