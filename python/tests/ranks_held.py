# SPDX-License-Identifier: Apache-2.0
"""Results that are held, as training holds those of its layers: most of them are in torch's own memory, because the
heap is full. On a GPU the other ranks' tokens are read where they are, and one rank moves its tokens at times."""

from typing import Any, Callable, List, Tuple

import deep_ep
import torch
import torch.distributed as dist
from ranks_high_throughput import layout
from suite import World, as_on_a_gpu, environment

_HELD, _CALLS, _MOVES = 6, 28, (3, 13, 14, 25)  # calls in which the last rank has its tokens elsewhere
_TOPK = 4
_MODULUS = 251  # values that bf16 has


def rows_of(ranks: torch.Tensor, tokens: torch.Tensor, hidden: int) -> torch.Tensor:
    """The rows of these tokens of these ranks. The first three values say whose they are."""
    rows = (ranks * 7 + tokens * 13)[:, None] + torch.arange(hidden, device=tokens.device)
    rows = (rows % _MODULUS).bfloat16()
    for column, value in enumerate((ranks, tokens // 256, tokens % 256)):
        rows[:, column] = value.bfloat16()
    return rows


class Layer:
    """One dispatch of all ranks: every rank knows the routing of the others. The numbers of tokens differ."""

    def __init__(self, world: World, tokens: int, hidden: int, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.world, self.hidden, self.experts = world, hidden, 4 * world.nranks
        counts = [tokens - (r * 5 + seed) % 7 if r or seed % 3 else 0 for r in range(world.nranks)]
        self.idx = [torch.rand(n, self.experts, generator=rng).topk(_TOPK).indices.to(world.device) for n in counts]
        mine = torch.arange(counts[world.rank], device=world.device)
        self.x = rows_of(torch.full_like(mine, world.rank), mine, hidden)
        self.tokens, self.every = tokens, [torch.rand(n, _TOPK, generator=rng).to(world.device) for n in counts]
        self.weights = self.every[world.rank]

    def move(self) -> None:
        """To memory that no call has had."""
        moved = torch.empty(self.x.shape[0] + 4096, self.hidden, dtype=self.x.dtype, device=self.x.device)
        self.x = moved[:self.x.shape[0]].copy_(self.x)

    def expected(self, expand: bool) -> torch.Tensor:
        """[rows here, rank and token], by expert if expanded, else each token once; then by rank and token."""
        me, local, lines = self.world.rank, self.experts // self.world.nranks, []
        for rank, idx in enumerate(self.idx):
            here = idx // local == me
            tokens, places = here.nonzero(as_tuple=True) if expand else (here.any(1).nonzero()[:, 0], None)
            first = idx[tokens, places] if expand else torch.zeros_like(tokens)
            lines.append(torch.stack([first, torch.full_like(tokens, rank), tokens], 1))
        every = torch.cat(lines)
        order = (every[:, 0] * 64 + every[:, 1]) * (1 << 20) + every[:, 2]
        return every[order.argsort()][:, 1:]

    def check(self, rows: torch.Tensor, expand: bool) -> None:
        """What a dispatch has returned."""
        expected = self.expected(expand)
        assert rows.shape == (expected.shape[0], self.hidden), (rows.shape, expected.shape)
        assert torch.equal(rows, rows_of(expected[:, 0], expected[:, 1], self.hidden))

    def check_topk(self, recv_idx: torch.Tensor, recv_weights: torch.Tensor) -> None:
        """What comes with the rows of a dispatch without expansion."""
        idx, weights = self._of(self.idx, self.expected(False)), self._of(self.every, self.expected(False))
        local = self.experts // self.world.nranks
        here = idx // local == self.world.rank
        assert torch.equal(recv_idx, torch.where(here, idx % local, -1))
        assert torch.equal(recv_weights, torch.where(here, weights, torch.zeros_like(weights)))

    def check_sources(self, meta: torch.Tensor, recv_weights: torch.Tensor, expand: bool) -> None:
        """The lines of V2's handle: the token, its rank, and with expansion the row of each of its experts here."""
        flat = self.expected(False)
        assert torch.equal(meta[:, :2].long(), torch.stack([flat[:, 0] * self.tokens + flat[:, 1], flat[:, 0]], 1))
        if not expand:
            return
        lines, places = (meta[:, 2:] >= 0).nonzero(as_tuple=True)
        rows = meta[lines, places + 2].long()
        assert torch.equal(rows.sort().values, torch.arange(len(recv_weights), device=rows.device))
        assert torch.equal(self.expected(True)[rows], flat[lines])
        assert torch.equal(recv_weights[rows], self._of(self.every, flat)[lines, places])

    @staticmethod
    def _of(tables: List[torch.Tensor], lines: torch.Tensor) -> torch.Tensor:
        """The lines of the ranks' tables for (rank, token)."""
        first = torch.tensor([0] + [len(table) for table in tables[:-1]], device=lines.device).cumsum(0)
        return torch.cat(tables)[first[lines[:, 0]] + lines[:, 1]]


def hold(world: World, tokens: int, hidden: int, expand: bool, dispatch: Callable[[Layer], Any],
         combine: Callable[[Any], torch.Tensor]) -> None:
    """Dispatches, of whose results the last ones are held, and combines of some."""
    held: List[Tuple[Layer, Any]] = []
    for i in range(_CALLS):
        del held[:-_HELD + 1]
        layer = Layer(world, tokens, hidden, i)
        if i in _MOVES and world.rank == world.nranks - 1:
            layer.move()
        held.append((layer, dispatch(layer)))
        for one, result in held if i % 7 == 6 else ():
            one.check(result[0], expand)
            if not expand:
                one.check_topk(result[1], result[2])
            if len(result) == 5:
                one.check_sources(result[3].recv_src_metadata, result[2], expand)
            assert result[0]._base is result[2]._base is None  # behind autograd's functions, views are not changed
            times = _TOPK if expand else (one.idx[world.rank] // 4).sort(1).values.diff(dim=1).ne(0).sum(1) + 1
            expected = one.x.float() * (times if expand else times[:, None])
            assert ((combine(result).float() - expected).abs() <= expected / 64).all()
        del layer
    world.meet()


def sizes(world: World) -> Tuple[int, int]:
    """(tokens, hidden): on a GPU more rows than the 40 MB for rows in torch's memory hold."""
    return (1024, 8192) if world.device.type == "cuda" else (40, 64)


def test_v2(world: World) -> None:
    """ElasticBuffer, with and without expansion."""
    tokens, hidden = sizes(world)
    with environment(EPX_HT_NODE_BYTES="8K", EPX_ALLOC_BYTES="100K") if world.device.type == "cpu" else environment(), \
            as_on_a_gpu(world):
        buffer = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=tokens, hidden=hidden, num_topk=_TOPK,
                                       explicitly_destroy=True)
        for expand in (False, True):
            hold(world, tokens, hidden, expand,
                 lambda layer: buffer.dispatch(layer.x, layer.idx[world.rank], layer.weights,
                                               num_experts=layer.experts, do_expand=expand),
                 lambda result: buffer.combine(result[0], result[3])[0])
        buffer.destroy()


def test_v1(world: World) -> None:
    """Buffer."""
    tokens, hidden = sizes(world)
    with environment(EPX_HT_NODE_BYTES="8K", EPX_ALLOC_BYTES="100K") if world.device.type == "cpu" else environment(), \
            as_on_a_gpu(world):
        buffer = deep_ep.Buffer(dist.group.WORLD, 200 << 20, 0, explicitly_destroy=True)

        def dispatch(layer: Layer) -> Any:
            idx = layer.idx[world.rank]
            return buffer.dispatch(layer.x, **layout(buffer, idx, layer.experts), topk_idx=idx,
                                   topk_weights=layer.weights)
        hold(world, tokens, hidden, False, dispatch, lambda result: buffer.combine(result[0], result[4])[0])
        buffer.destroy()
