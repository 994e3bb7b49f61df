# SPDX-License-Identifier: Apache-2.0
"""Random layers between ranks, and their gradients, against the same layer in one process.

All ranks draw the same numbers, so that each can compute the whole layer by plain torch: rows and weights are those of
the tokens of all ranks, taken by index, and a weight whose expert is on another rank is a constant. A formula makes
rows for combine of them, and a term of the loss, of which every received value may be a part.
"""

import random
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

import deep_ep
import torch
from epx import autograd
from random_elastic import Routed
from suite import World

Term = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
HIDDEN, MOST = 16, 6


def scalar(rng: random.Random, depth: int) -> Term:
    """A number per row, [N, 1], of rows [N, H] and weights [N, C]."""
    if depth and rng.random() < 0.6:
        one, other = scalar(rng, depth - 1), scalar(rng, depth - 1)
        return rng.choice((lambda rows, weights: one(rows, weights) * other(rows, weights),
                           lambda rows, weights: one(rows, weights) - other(rows, weights),
                           lambda rows, weights: torch.tanh(one(rows, weights))))
    number = rng.randint(0, 9)
    return rng.choice((
        lambda rows, weights: weights.sum(1, keepdim=True) * 3,
        lambda rows, weights: weights[:, number % weights.shape[1], None],
        lambda rows, weights: weights.square().sum(1, keepdim=True),
        lambda rows, weights: (number / 5 - weights).exp().mean(1, keepdim=True),
        lambda rows, weights: (1 + weights).prod(1, keepdim=True),
        lambda rows, weights: rows.mean(1, keepdim=True)))


def vector(rng: random.Random, depth: int) -> Term:
    """A row per row, [N, H]."""
    kind = rng.randrange(4) if depth else 0
    if kind == 0:
        return rng.choice((lambda rows, weights: rows, lambda rows, weights: torch.tanh(rows)))
    one, factor = vector(rng, depth - 1), scalar(rng, depth - 1)
    if kind == 1:
        other = vector(rng, depth - 1)
        return lambda rows, weights: one(rows, weights) + other(rows, weights)
    return lambda rows, weights: one(rows, weights) * factor(rows, weights)


class Formula(NamedTuple):
    """What a rank computes: rows for combine, or None without one, and its own term of the loss."""

    back: Optional[Term]
    term: Optional[Term]

    def loss(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The term that needs no combine."""
        return rows.new_zeros(()) if self.term is None else self.term(rows, weights).sum()


def draw(rng: random.Random) -> Formula:
    """A formula of some of what is received."""
    kind = rng.choice(("combine", "term", "both", "both"))
    back = None if kind == "term" else vector(rng, 3)
    return Formula(back, None if kind == "combine" else rng.choice((scalar, scalar, vector))(rng, 2))


class Placed(NamedTuple):
    """The rows of a rank: their tokens' numbers among those of all ranks (-1: padding), and for each weight of a row
    the (token, k) that it is, or -1."""

    tokens: torch.Tensor
    weights: torch.Tensor


def place(routed: Routed, rank: int, way: "Way", per_node: int) -> Placed:
    """The rows of a rank in a buffer's order."""
    starts = [sum(routed.counts[:r]) for r in range(routed.ranks)]
    first = rank * routed.local
    if way.expands:
        zones = routed.zones(rank, way.alignment)[0]
        tokens = [-1 if at is None else starts[at[0]] + at[1] for at in zones]
        lines = [[-1 if at is None else tokens[i] * routed.topk + at[2]] for i, at in enumerate(zones)]
        return Placed(torch.tensor(tokens, dtype=torch.int64), torch.tensor(lines, dtype=torch.int64).view(-1, 1))
    columns, begin = routed.topk, 0
    if way.by_expert:  # a column for each expert of the node
        columns, begin = per_node * routed.local, rank // per_node * per_node * routed.local
    tokens, lines = [], []
    for s, t in routed.flat(rank):
        line = [-1] * columns
        for k, e in enumerate(routed.idx[s][t]):
            if first <= e < first + routed.local:
                line[e - begin if way.by_expert else k] = (starts[s] + t) * routed.topk + k
        tokens.append(starts[s] + t)
        lines.append(line)
    return Placed(torch.tensor(tokens, dtype=torch.int64), torch.tensor(lines, dtype=torch.int64).view(-1, columns))


class _Out(torch.autograd.Function):
    """A dispatch of a Way; its gradient is the combine with weights."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights: torch.Tensor, way: "Way") -> Any:
        ctx.way = way
        return (*way.dispatch(x, weights), x.new_zeros(()))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return (*ctx.way.combine(grads[0].contiguous(), grads[1].contiguous()), None)


class _Back(torch.autograd.Function):
    """A combine of a Way; its gradient is the dispatch by the handle."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, _link: torch.Tensor, way: "Way") -> torch.Tensor:
        ctx.way = way
        return way.combine(rows.contiguous(), None)[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.way.again(grads[0].contiguous()), grads[0].new_zeros(()), None


class Way:
    """A buffer, and how a framework makes autograd functions of its calls."""

    expands, by_expert, alignment = False, False, 1

    def __init__(self, buffer: Any, routed: Routed, idx: torch.Tensor) -> None:
        self.buffer, self.routed, self.idx = buffer, routed, idx
        self.handle: Any = None

    def out(self, x: torch.Tensor, weights: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """The dispatch, differentiable."""
        rows, received, self.link = _Out.apply(x, weights, self)
        return rows, received

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """The combine, differentiable."""
        return _Back.apply(rows, self.link, self)


class Epx(Way):
    """epx.autograd over deep_ep.Buffer."""

    def out(self, x: torch.Tensor, weights: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        self.received = autograd.dispatch(self.buffer, x, self.idx, weights, self.routed.experts)
        return self.received.x, self.received.topk_weights

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        return autograd.combine(rows, self.received.route)


class Elastic(Way):
    """ElasticBuffer. Its combine returns the weight that the rank of the expert gives."""

    def dispatch(self, x: torch.Tensor, weights: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """(rows, weights), and the handle."""
        rows, _idx, received, self.handle, _event = self.buffer.dispatch(
            x, self.idx, weights, num_experts=self.routed.experts, expert_alignment=self.alignment,
            do_expand=self.expands)
        return rows, received.unsqueeze(1) if self.expands else received

    def combine(self, rows: torch.Tensor, weights: Optional[torch.Tensor]) -> Any:
        """(sums, weights or None)."""
        if weights is not None and self.expands:
            weights = weights.squeeze(1)
        return self.buffer.combine(rows, self.handle, topk_weights=weights)[:2]

    def again(self, x: torch.Tensor) -> torch.Tensor:
        """Rows by the handle."""
        return self.buffer.dispatch(x, handle=self.handle, do_expand=self.expands)[0]


class Expanded(Elastic):
    """ElasticBuffer with a row per (token, expert)."""

    expands, alignment = True, 4


class Hybrid(Way):
    """HybridEPBuffer, by a map."""

    by_expert = True

    def spread(self, weights: torch.Tensor) -> torch.Tensor:
        """probs [T, E] of weights [T, K]."""
        probs = weights.new_zeros(weights.shape[0], self.routed.experts + 1)
        at = torch.where(self.idx < 0, self.routed.experts, self.idx)
        return probs.scatter(1, at, weights)[:, :-1].contiguous()

    def folded(self, probs: torch.Tensor) -> torch.Tensor:
        """The reverse of spread()."""
        return torch.where(self.idx < 0, 0, probs.gather(1, self.idx.clamp(min=0)))

    def given(self, weights: torch.Tensor) -> Any:
        """The routing as arguments."""
        return dict(probs=self.spread(weights), routing_map=self.spread(torch.ones_like(weights)) > 0)

    def dispatch(self, x: torch.Tensor, weights: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """(rows, weights), and the handle."""
        rows, probs, _scales, self.handle = self.buffer.dispatch(x, **self.given(weights))
        return rows, probs

    def combine(self, rows: torch.Tensor, weights: Optional[torch.Tensor]) -> Any:
        """(sums, weights or None)."""
        sums, probs = self.buffer.combine(rows, weights, self.handle)
        return sums, None if probs is None else self.folded(probs)

    def again(self, x: torch.Tensor) -> torch.Tensor:
        """Rows by the handle."""
        return self.buffer.dispatch(x, handle=self.handle)[0]


class Permuted(Hybrid):
    """HybridEPBuffer with permutation."""

    expands, by_expert, alignment = True, False, 4

    def dispatch(self, x: torch.Tensor, weights: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        rows, probs, _scales, _counts, self.handle = self.buffer.dispatch_with_permute(
            hidden=x, pad_multiple=self.alignment, **self.given(weights))
        return rows, probs.reshape(-1).unsqueeze(1)

    def combine(self, rows: torch.Tensor, weights: Optional[torch.Tensor]) -> Any:
        sums, probs = self.buffer.combine_with_unpermute(hidden=rows, probs=weights, handle=self.handle)
        return sums, None if probs is None else self.folded(probs)

    def again(self, x: torch.Tensor) -> torch.Tensor:
        return self.buffer.dispatch_with_permute(hidden=x, handle=self.handle)[0]


class Layers:
    """Layers between the ranks of one group: the same number of experts each, and one buffer of each kind."""

    def __init__(self, world: World, seed: int, group: Any, per_node: int) -> None:
        self.world, self.rng, self.per_node = world, random.Random(seed), per_node
        self.me, self.ranks, self.local = group.rank(), group.size(), self.rng.choice((1, 2, 3))
        self.buffers = (deep_ep.Buffer(group, 1 << 24, 0, explicitly_destroy=True, low_latency_mode=True),
                        deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=MOST, hidden=HIDDEN * 2,
                                              explicitly_destroy=True),
                        deep_ep.HybridEPBuffer(group, HIDDEN, MOST, self.local))

    def draw(self) -> Routed:
        """A routing of this group's experts, without repetition."""
        rng, routed = self.rng, Routed(self.rng, self.ranks, MOST)
        routed.local, routed.experts = self.local, self.ranks * self.local
        routed.topk, routed.idx_dtype = rng.randint(1, min(routed.experts, 5)), torch.int64
        routed.draw(rng, rng.choice((0, 0.2, 0.8)))
        return routed

    def tensors(self, routed: Routed, *shape: int) -> List[torch.Tensor]:
        """Random float32 of all ranks, a line per token."""
        gen = torch.Generator().manual_seed(self.rng.getrandbits(31))
        return [torch.rand(n, *shape, generator=gen) * 2 - 0.6 for n in routed.counts]

    def step(self) -> None:
        """A layer of each kind of call."""
        plain, elastic, hybrid = self.buffers
        for kind, buffer in ((Epx, plain), (Elastic, elastic), (Expanded, elastic), (Hybrid, hybrid),
                             (Permuted, hybrid)):
            routed = self.draw()
            self.layer(kind(buffer, routed, routed.tensor(self.world, self.me)), routed)
        self.low_latency(plain)

    def layer(self, way: Way, routed: Routed) -> None:
        """A layer and its gradients."""
        formula, me, to = draw(self.rng), self.me, self.world.to
        needs = self.rng.choice(((True, True), (True, True), (True, False), (False, True)))
        x, weights = self.tensors(routed, HIDDEN), self.tensors(routed, routed.topk)
        factors = self.tensors(routed, HIDDEN)
        own = [to(part[me].clone()).requires_grad_(need) for part, need in zip((x, weights), needs)]
        rows, received = way.out(*own)
        loss = formula.loss(rows, received)
        if formula.back is not None:
            loss = loss + (torch.tanh(way.back(formula.back(rows, received))) * to(factors[me])).sum()
        if loss.requires_grad:
            loss.backward()
        whole = [torch.cat(part).requires_grad_(need) for part, need in zip((x, weights), needs)]
        places = [place(routed, r, way, self.per_node) for r in range(self.ranks)]
        expected = self.expected(formula, *whole, places, torch.cat(factors))
        if expected.requires_grad:
            expected.backward()
        begin = sum(routed.counts[:me])
        for name, given, all_ranks in zip(("x", "topk_weights"), own, whole):
            self.compare("%s: gradient of %s" % (type(way).__name__, name), given.grad, all_ranks.grad, slice(
                begin, begin + routed.counts[me]))
        self.compare("%s: rows" % type(way).__name__, rows, picked(whole[0], places[me].tokens), slice(None))

    @staticmethod
    def expected(formula: Formula, x: torch.Tensor, weights: torch.Tensor, places: List[Placed],
                 factors: torch.Tensor) -> torch.Tensor:
        """The loss of all ranks, by plain torch."""
        loss, sums = x.new_zeros(()), torch.zeros_like(x)
        for tokens, entries in places:
            rows, received = picked(x, tokens), picked(weights.reshape(-1), entries)
            loss = loss + formula.loss(rows, received)
            if formula.back is not None:
                real = tokens >= 0
                sums = sums.index_add(0, tokens[real], formula.back(rows, received)[real])
        return loss if formula.back is None else loss + (torch.tanh(sums) * factors).sum()

    def compare(self, name: str, got: Optional[torch.Tensor], want: Optional[torch.Tensor], part: slice,
                tolerance: float = 1e-4) -> None:
        """Both are None, or close; no gradient is one of 0."""
        scale = 1.0 if want is None else max(want.abs().max().item() if want.numel() else 0, 1.0)
        want = None if want is None else want.detach()[part]
        left = torch.zeros(()) if got is None else got.detach().cpu().float()
        right = torch.zeros(()) if want is None else want
        assert got is None or want is None or left.shape == right.shape, (name, left.shape, right.shape)
        off = (left - right).abs().max().item() if (left - right).numel() else 0.0
        assert off <= tolerance * scale, "%s: rank %d of %d is %g off, allowed %g" % (
            name, self.me, self.ranks, off, tolerance * scale)

    def low_latency(self, buffer: Any) -> None:
        """The other mode, which has no gradients: the layer's output."""
        routed, me, to = self.draw(), self.me, self.world.to
        x = [part.bfloat16() for part in self.tensors(routed, HIDDEN)]
        weights, formula, idx = self.tensors(routed, routed.topk), vector(self.rng, 2), routed.tensor(self.world, me)
        rows, _counts, handle, _event, _hook = buffer.low_latency_dispatch(
            to(x[me]), idx, MOST, routed.experts, use_fp8=False)

        def expert(e: Any, rows: torch.Tensor) -> torch.Tensor:
            return formula(rows.float(), torch.full((rows.shape[0], 1), 0.1 * float(e), device=rows.device)).bfloat16()

        back = torch.stack([expert(me * self.local + e, part) for e, part in enumerate(rows)])
        sums = buffer.low_latency_combine(back, idx, to(weights[me]), handle)[0]
        want = torch.zeros(routed.counts[me], HIDDEN)
        for t, line in enumerate(routed.idx[me]):
            for k, e in enumerate(line):
                if e >= 0:
                    want[t] += weights[me][t, k] * expert(e, x[me][t:t + 1])[0].float()
        self.compare("low latency", sums, want, slice(None), 2e-2)

    def finish(self) -> None:
        """The end."""
        for buffer in self.buffers[:2]:
            buffer.destroy()


def picked(source: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Lines of a tensor; 0 where the index is -1."""
    with_zero = torch.cat([source, source.new_zeros(1, *source.shape[1:])])
    return with_zero[torch.where(at < 0, source.shape[0], at)]
