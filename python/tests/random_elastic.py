# SPDX-License-Identifier: Apache-2.0
"""Random programs for ElasticBuffer: calls with random arguments, compared with what DeepEP's interface promises.

All ranks draw the same numbers, so that each knows what the others send. Results are looked at when their call ends,
and again at the end of the program: memory that another call has used meanwhile would show.
"""

import random
from typing import Any, Callable, Dict, List, Optional, Tuple

import deep_ep
import torch
from elastic_reference import rough, up
from suite import World

DTYPES = (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.float8_e5m2)
IDX_DTYPES = (torch.int64, torch.int64, torch.int32, torch.int16, torch.int8)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Are all bits equal?"""
    if got.shape != want.shape or got.dtype != want.dtype or not got.numel():
        return got.shape == want.shape and got.dtype == want.dtype
    # contiguous() keeps the strides of a tensor with one column
    bits = [t.cpu().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for t in (got, want)]
    return torch.equal(*bits)


def as_bias(biases: List[torch.Tensor]) -> Any:
    """None, a tensor or a pair."""
    return None if not biases else biases[0] if len(biases) == 1 else tuple(biases)


class Tokens:
    """Rows of all ranks, and scales or None."""

    def __init__(self, rng: random.Random, counts: List[int], like: Optional["Tokens"] = None) -> None:
        if like is None:
            self.dtype, self.packs = rng.choice(DTYPES), 0
            self.hidden = 16 // self.dtype.itemsize * rng.randint(1, 40)
            if rng.random() < 0.4:
                self.dtype, self.hidden = torch.float8_e4m3fn, 16 * rng.randint(1, 30)
                self.packs = rng.randint(1, -(-self.hidden // 32))
            self.pack_dtype = rng.choice((torch.float32, torch.int32))
        else:
            self.dtype, self.hidden, self.packs, self.pack_dtype = like.dtype, like.hidden, like.packs, like.pack_dtype
        nbytes = self.hidden * self.dtype.itemsize
        gen = torch.Generator().manual_seed(rng.getrandbits(31))
        self.rows = [torch.randint(0, 127, (n, nbytes), generator=gen, dtype=torch.uint8).view(self.dtype)
                     if n else torch.empty(0, self.hidden, dtype=self.dtype) for n in counts]
        self.scales = [torch.randint(-2**31, 2**31 - 1, (n, max(self.packs, 1)), generator=gen).to(torch.int32)
                       for n in counts]
        self.strides = rng.choice(("rows", "columns", "cut", "same", "one"))
        if self.strides == "same":  # one row for all tokens of a rank
            self.scales = [scales[:1].expand(len(scales), -1) for scales in self.scales]
        if self.strides == "one":  # one scale for all
            self.scales = [scales[:1, :1].expand(len(scales), scales.shape[1]) for scales in self.scales]

    def given(self, world: World, rank: int) -> Any:
        """The argument of this rank."""
        rows = world.to(self.rows[rank])
        if not self.packs:
            return rows
        scales = self.scales[rank].contiguous().view(self.pack_dtype)
        if self.strides == "same":
            return rows, world.to(scales[:1]).expand(len(scales), -1)
        if self.strides == "one":
            return rows, world.to(scales[:1, :1]).expand(len(scales), scales.shape[1])
        if self.strides == "columns":
            scales = scales.t().contiguous().t()
        elif self.strides == "cut":
            wide = torch.zeros(scales.shape[0] + 1, scales.shape[1] + 3, dtype=scales.dtype)
            wide[1:, 2:-1] = scales
            scales = wide[1:, 2:-1]
        return rows, world.to(scales) if self.strides != "cut" else world.to(wide)[1:, 2:-1]

    def of(self, places: List[Optional[Tuple[int, int, int]]]) -> List[torch.Tensor]:
        """[rows] or [rows, scales] of (rank, token, k); None is zero."""
        zero = torch.zeros(self.hidden * self.dtype.itemsize, dtype=torch.uint8).view(self.dtype)
        none = torch.zeros(max(self.packs, 1), dtype=torch.int32)
        rows = torch.stack([zero if at is None else self.rows[at[0]][at[1]] for at in places]) if places else \
            torch.empty(0, self.hidden, dtype=self.dtype)
        scales = torch.stack([none if at is None else self.scales[at[0]][at[1]] for at in places]) if places else \
            torch.empty(0, max(self.packs, 1), dtype=torch.int32)
        return [rows, scales.view(self.pack_dtype)] if self.packs else [rows]


class Routed:
    """The routing of all ranks."""

    def __init__(self, rng: random.Random, ranks: int, most: int) -> None:
        self.ranks, self.local = ranks, rng.choice((1, 2, 3, 5, 8))
        self.experts = ranks * self.local
        self.topk = rng.randint(1, min(16, self.experts)) if rng.random() < 0.8 else min(self.experts, 32)
        self.most = most
        self.idx_dtype = rng.choice(IDX_DTYPES)
        self.counts = [rng.choice((0, 1, most, rng.randint(0, most))) for _ in range(ranks)]
        self.idx: List[List[List[int]]] = []
        self.draw(rng, rng.choice((0, 0.1, 0.6, 1)), rng.random() < 0.15)
        if rng.random() < 0.1:  # all to one rank
            self.idx = [[[e if e // self.local == 1 else -1 for e in line] for line in lines] for lines in self.idx]

    def draw(self, rng: random.Random, none: float, repeats: bool = False) -> None:
        """Indices of all ranks, of which a part is -1; a token may name an expert again."""
        def line() -> List[int]:
            experts = range(self.experts)
            chosen = rng.choices(experts, k=self.topk) if repeats else rng.sample(experts, self.topk)
            return [-1 if rng.random() < none else e for e in chosen]
        self.idx = [[line() for _ in range(count)] for count in self.counts]

    def tensor(self, world: World, rank: int) -> torch.Tensor:
        """topk_idx of a rank."""
        return world.to(torch.tensor(self.idx[rank], dtype=self.idx_dtype).view(self.counts[rank], self.topk))

    def weights(self, rng: random.Random) -> List[torch.Tensor]:
        """Weights of all ranks."""
        gen = torch.Generator().manual_seed(rng.getrandbits(31))
        return [torch.rand(n, self.topk, generator=gen) for n in self.counts]

    def flat(self, me: int) -> List[Tuple[int, int]]:
        """(rank, token) of each row of rank `me` without expansion."""
        return [(s, t) for s in range(self.ranks) for t, line in enumerate(self.idx[s])
                if any(e >= 0 and e // self.local == me for e in line)]

    def zones(self, me: int, align: int) -> Tuple[List[Optional[Tuple[int, int, int]]], List[int], List[int]]:
        """With expansion: (rank, token, k) of each row or None, real ends of zones, real counts."""
        rows: List[Optional[Tuple[int, int, int]]] = []
        ends, counts = [], []
        for expert in range(me * self.local, (me + 1) * self.local):
            mine = [(s, t, k) for s in range(self.ranks) for t, line in enumerate(self.idx[s])
                    for k, e in enumerate(line) if e == expert]
            counts.append(len(mine))
            ends.append(len(rows) + len(mine))
            rows += mine
            rows += [None] * (up(len(mine), align) - len(mine))
        return rows, ends, counts


class Handle:
    """What a program keeps of a dispatch."""

    def __init__(self, routed: Routed, align: int, expand: bool, sync: bool, tokens: Tokens, handle: Any) -> None:
        self.routed, self.align, self.expand, self.sync, self.tokens = routed, align, expand, sync, tokens
        self.handle = handle


def fold(rows: List[Tuple[int, int, torch.Tensor]], dtype: torch.dtype) -> List[Tuple[int, int, torch.Tensor]]:
    """Rows (group, k, data) that are summed group by group in k-order, rounded; in order of each group's last k."""
    out = []
    for group in {row[0] for row in rows}:
        total = torch.zeros_like(rows[0][2], dtype=torch.float32)
        members = [row for row in rows if row[0] == group]
        for _group, _k, data in members:
            total = total + data.float()
        out.append((group, members[-1][1], total.to(dtype)))
    return sorted(out, key=lambda row: row[1])


def end_and_compare(program: Any) -> None:
    """Looks at what a program has kept, before and after the end of its buffer."""
    program.settle(0)
    for when in ("later: ", "after destroy: "):
        for name, got, want in program.held:
            assert same(got, want), program.report(when + name, got, want)
        for buffer in getattr(program, "buffers", [program.buffer]) if when == "later: " else ():
            buffer.destroy()


class Program:
    """One buffer and its calls."""

    def __init__(self, world: World, seed: int, group: Any, ranks: int, per_node: int) -> None:
        self.world, self.rng, self.me = world, random.Random(seed), world.rank
        self.ranks, self.per_node = ranks, per_node
        rng = self.rng
        self.most = rng.choice((1, 5, 17, 40))
        self.multiple, self.hybrid = rng.random() < 0.5, rng.random() < 0.7
        self.options: Dict[str, Any] = dict(
            num_max_tokens_per_rank=self.most, hidden=rng.choice((16, 128, 384)), num_topk=rng.choice((0, 2, 8)),
            use_fp8_dispatch=rng.random() < 0.3, deterministic=rng.random() < 0.3, allow_hybrid_mode=self.hybrid,
            allow_multiple_reduction=self.multiple, explicitly_destroy=True)
        self.buffer = deep_ep.ElasticBuffer(group, **self.options)
        # Handles of one buffer serve another. A generator of its own: programs of known seeds stay as they were.
        self.rng_more = random.Random(-seed)
        self.buffers = [self.buffer] if self.rng_more.random() < 0.7 else [
            self.buffer, deep_ep.ElasticBuffer(group, **self.options)]
        self.two = per_node < ranks and self.hybrid
        self.kept: List[Handle] = []
        self.held: List[Tuple[str, torch.Tensor, torch.Tensor]] = []
        self.event: Any = None
        self.later: List[Tuple[Any, Callable[[], None]]] = []
        self.text: List[str] = []
        self.rng_local = random.Random(self.rng.random() + self.me)  # what a rank keeps is its own affair

    def hold(self, what: str, got: torch.Tensor, want: torch.Tensor) -> None:
        """Compares, now and at the end."""
        assert same(got, want), self.report(what, got, want)
        if self.rng_local.random() < 0.5:
            self.held.append((what, got, want))

    def report(self, what: str, got: torch.Tensor, want: torch.Tensor) -> str:
        """A failure."""
        where = ""
        if got.shape == want.shape and got.dtype == want.dtype:
            a, b = got.cpu().contiguous().view(got.shape), want.contiguous()
            odd = (a.view(torch.uint8) != b.view(torch.uint8)).view(a.shape[0], -1).any(1).nonzero().flatten()
            where = "rows %s of %d; first got %s want %s" % (
                odd[:8].tolist(), a.shape[0], a[odd[0]].flatten()[:8].tolist(), b[odd[0]].flatten()[:8].tolist())
        return "%s: %s %s, expected %s %s; %s\n%s" % (
            what, got.dtype, list(got.shape), want.dtype, list(want.shape), where, "\n".join(self.text[-12:]))

    def streams(self, rng: random.Random, event: Any) -> Dict[str, Any]:
        """Arguments about streams and events; `event` may be waited for."""
        asynchronous, comm = rng.random() < 0.4, rng.random() < 0.4
        options: Dict[str, Any] = dict(async_with_compute_stream=asynchronous, allocate_on_comm_stream=comm)
        if comm and rng.random() < 0.5:
            options["previous_event"] = rng.choice((self.buffer.capture(), event))
        if rng.random() < 0.2:
            options["previous_event_before_epilogue"] = self.buffer.capture()
        if rng.random() < 0.3:
            options["num_sms"] = rng.choice((2, 4, 24))
        return options

    def ended(self, event: Any, asynchronous: bool, check: Callable[[], None]) -> None:
        """Waits for a call and checks it, now or later."""
        assert (event.event is not None) == asynchronous
        self.event = event if asynchronous else None
        if asynchronous and self.rng.random() < 0.5:
            self.later.append((event, check))
            return
        if asynchronous:
            event.current_stream_wait()
        check()

    def settle(self, most: int) -> None:
        """Checks calls that were left for later, until so many are left."""
        while len(self.later) > most:
            event, check = self.later.pop(self.rng.randrange(len(self.later)))
            event.current_stream_wait()
            check()

    def dispatch(self) -> None:
        """A new routing."""
        rng, world, me = self.rng, self.world, self.me
        most = rng.choice((None, None, self.most, rng.randint(1, 2 * self.most)))
        routed = Routed(rng, self.ranks, self.most if most is None else most)
        tokens = Tokens(rng, routed.counts)
        expand, sync = rng.random() < 0.5, rng.choice((None, True, False))
        align = rng.choice((None, 1, 2, 3, 7, 16, 128))
        tma, weighted = rng.random() < 0.4, rng.random() < 0.7
        stats = rng.random() < 0.3
        copy = rng.random() < 0.6
        weights = routed.weights(rng)
        options = self.streams(rng, self.event)
        self.text.append("dispatch M=%s counts=%s E=%d K=%d %s hidden=%d packs=%d %s expand=%s sync=%s align=%s tma=%s "
                         "w=%s %s" % (most, routed.counts, routed.experts, routed.topk, tokens.dtype, tokens.hidden,
                                      tokens.packs, tokens.strides, expand, sync, align, tma, weighted, options))
        idx = routed.tensor(world, me)
        counted = world.to(torch.full((routed.local,), 5, dtype=torch.int32)) if stats else None
        recv, recv_idx, recv_weights, handle, event = self.buffer.dispatch(
            tokens.given(world, me), idx, world.to(weights[me]) if weighted else None, counted,
            num_experts=routed.experts, num_max_tokens_per_rank=most, expert_alignment=align, do_cpu_sync=sync,
            do_expand=expand, do_zero_padding=expand and rng.random() < 0.5, use_tma_aligned_col_major_sf=tma,
            do_handle_copy=copy, **options)
        kept = Handle(routed, align or 1, expand, sync is not False, tokens, handle)
        assert (handle.topk_idx.data_ptr() == idx.data_ptr()) == (not copy) or not idx.numel()

        def check() -> None:
            self.check_handle(kept)
            if counted is not None:
                want = torch.tensor(routed.zones(me, 1)[2], dtype=torch.int32) + 5
                assert same(counted, want), self.report("stats", counted, want)
            self.check_rows(kept, tokens, recv, recv_idx, recv_weights, weights if weighted else None, expand, tma)
        self.kept.append(kept)
        self.ended(event, options["async_with_compute_stream"], check)

    def check_handle(self, kept: Handle) -> None:
        """Every field with a promise."""
        handle, routed, me, align = kept.handle, kept.routed, self.me, kept.align
        flat, (zones, ends, counts) = routed.flat(me), routed.zones(me, align)
        scaleup = self.per_node if self.two else self.ranks
        where = "\n".join(self.text[-12:])
        sums = [sum(1 for s, _t in flat if s % scaleup <= i) for i in range(scaleup)]
        assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == sums, where
        assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts, where
        padded = [up(n, align) for n in counts]
        if not kept.expand:
            ends = [sum(padded[:i + 1]) for i in range(len(padded))]
        assert handle.psum_num_recv_tokens_per_expert.tolist() == ends, where
        assert (handle.do_expand, handle.num_experts, handle.expert_alignment, handle.num_max_tokens_per_rank) == (
            kept.expand, routed.experts, align, routed.most), where
        assert same(handle.topk_idx, routed.tensor(self.world, me)), where
        lines = len(flat) if kept.sync else routed.ranks * routed.most
        worst = up(routed.ranks * routed.most * min(routed.topk, routed.local) + (align - 1) * routed.local, align)
        assert handle.num_recv_tokens == lines and handle.num_expanded_tokens == (
            sum(padded) if kept.sync else worst), where
        assert handle.num_recv_tokens_per_expert_list == (padded if kept.sync else []), where
        meta = handle.recv_src_metadata
        assert meta.shape == (lines, routed.topk + 2) and meta.dtype is torch.int32, where
        assert meta[:len(flat), 0].tolist() == [s * routed.most + t for s, t in flat], where
        if kept.expand:
            place = {at: i for i, at in enumerate(zones)}
            want = [[place.get((s, t, k), -1) for k in range(routed.topk)] for s, t in flat]
            assert meta[:len(flat), 2:].tolist() == want, where

    def check_rows(self, kept: Handle, tokens: Tokens, recv: Any, recv_idx: Any, recv_weights: Any,
                   weights: Optional[List[torch.Tensor]], expand: bool, tma: bool) -> None:
        """The results of a dispatch."""
        routed, me = kept.routed, self.me
        flat, (zones, _ends, _counts) = routed.flat(me), routed.zones(me, kept.align)
        places: List[Any] = list(zones) if expand else [(s, t, 0) for s, t in flat]
        if kept.sync:
            rows = len(places)
        else:
            rows = kept.handle.num_expanded_tokens if expand else routed.ranks * routed.most
        parts = list(recv) if isinstance(recv, tuple) else [recv]
        wanted = tokens.of(places)
        assert len(parts) == len(wanted) and all(part.shape[0] == rows for part in parts), (
            [part.shape for part in parts], rows, self.text[-1])
        for part, want in zip(parts, wanted):
            self.hold("rows", part[:len(places)], want)
        if len(parts) == 2 and rows > 1 and parts[1].shape[1] > 1:
            assert parts[1].stride() == ((1, up(rows, 4)) if tma else (tokens.packs, 1)), self.text[-1]
        if expand:
            assert recv_idx is None
        else:
            lines = [[e - me * routed.local if e >= 0 and e // routed.local == me else -1 for e in routed.idx[s][t]]
                     for s, t in flat] + [[-1] * routed.topk] * (rows - len(flat))
            self.hold("recv_topk_idx", recv_idx, torch.tensor(lines, dtype=routed.idx_dtype).view(rows, routed.topk))
        if weights is None:
            assert recv_weights is None
        elif expand:
            assert recv_weights.shape == (rows,)
            self.hold("weights", recv_weights[:len(places)], torch.tensor(
                [0.0 if at is None else float(weights[at[0]][at[1], at[2]]) for at in places]))
        else:
            mass = [[float(weights[s][t, k]) if e >= 0 and e // routed.local == me else 0.0
                     for k, e in enumerate(routed.idx[s][t])] for s, t in flat]
            self.hold("weights", recv_weights[:len(flat)], torch.tensor(mass).view(len(flat), routed.topk))

    def cached(self) -> None:
        """A dispatch by handle."""
        rng, world, me = self.rng, self.world, self.me
        kept = rng.choice(self.kept)
        routed = kept.routed
        room = kept.tokens.hidden * max(2, kept.tokens.dtype.itemsize)
        other = Tokens(rng, routed.counts)
        fits = other.hidden * other.dtype.itemsize <= room and not other.packs
        tokens = other if fits else Tokens(rng, routed.counts, kept.tokens)
        expand, tma = kept.expand and rng.random() < 0.8, rng.random() < 0.4
        weights = routed.weights(rng) if rng.random() < 0.5 else None
        options = self.streams(rng, self.event)
        self.text.append("cached expand=%s of %s tma=%s w=%s %s" % (
            expand, kept.expand, tma, weights is not None, options))
        recv, recv_idx, recv_weights, handle, event = self.rng_more.choice(self.buffers).dispatch(
            tokens.given(world, me), topk_weights=None if weights is None else world.to(weights[me]),
            handle=kept.handle, do_expand=expand, do_zero_padding=expand and rng.random() < 0.5,
            use_tma_aligned_col_major_sf=tma, **options)
        assert handle is kept.handle
        self.ended(event, options["async_with_compute_stream"], lambda: self.check_rows(
            kept, tokens, recv, recv_idx, recv_weights, weights, expand, tma))

    def draw_rows_back(self, tokens: Tokens) -> Tuple[torch.dtype, int]:
        """(dtype, columns) of a combine."""
        dtype = self.rng.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32))
        room = tokens.hidden * max(2, tokens.dtype.itemsize)
        return dtype, self.rng.choice([h for h in (8, 16, 64, room // dtype.itemsize)
                                       if h * dtype.itemsize <= room and (h * dtype.itemsize) % 16 == 0])

    def combine(self) -> None:
        """A combine by handle."""
        rng, world, me = self.rng, self.world, self.me
        kept = rng.choice(self.kept)
        routed, (dtype, hidden) = kept.routed, self.draw_rows_back(kept.tokens)
        weighted = rng.random() < 0.5 and (self.multiple or not kept.expand)
        gen = torch.Generator().manual_seed(rng.getrandbits(31))
        biases = [[torch.randn(n, hidden, generator=gen).to(dtype) for n in routed.counts]
                  for _ in range(rng.randint(0, 2))]
        more = rng.choice((0, 0, 3, -1)) if kept.expand else 0
        salt = rng.getrandbits(20)
        options = self.streams(rng, self.event)
        self.text.append("combine %s hidden=%d expand=%s sync=%s w=%s bias=%d more=%d %s" % (
            dtype, hidden, kept.expand, kept.sync, weighted, len(biases), more, options))
        x, weights = self.rows_back(kept, me, hidden, dtype, salt, more)
        given = world.to(x)
        if more <= 0 and rng.random() < 0.5:  # rows in memory that a dispatch has returned, where others read them
            zeros = world.to(torch.zeros(routed.counts[me], hidden, dtype=dtype))
            there = self.buffer.dispatch(zeros, handle=kept.handle, do_expand=kept.expand)[0]
            given = there[:given.shape[0]].copy_(given)
        combined, back, event = self.rng_more.choice(self.buffers).combine(
            given, kept.handle, world.to(weights) if weighted else None,
            bias=as_bias([world.to(bias[me]) for bias in biases]), **options)
        assert (back is not None) == weighted

        def check() -> None:
            self.hold("combined", combined, self.sums(kept, hidden, dtype, salt, [b[me] for b in biases]))
            if back is not None:
                self.hold("combined weights", back, self.weights_back(kept, salt))
        self.ended(event, options["async_with_compute_stream"], check)

    @staticmethod
    def value(at: Tuple[int, int, int], hidden: int, dtype: torch.dtype, salt: int) -> torch.Tensor:
        """What the expert of (rank, token, k) returns."""
        return rough(hidden, dtype, salt + (at[0] * 4096 + at[1]) * 64 + at[2])

    def row_of_rank(self, routed: Routed, rank: int, s: int, t: int, hidden: int, dtype: torch.dtype,
                    salt: int) -> torch.Tensor:
        """Without expansion: the sum of a rank's experts for a token."""
        total = torch.zeros(hidden)
        for k, e in enumerate(routed.idx[s][t]):
            if e >= 0 and e // routed.local == rank:
                total += self.value((s, t, k), hidden, dtype, salt).float()
        return total.to(dtype)

    def rows_back(self, kept: Handle, me: int, hidden: int, dtype: torch.dtype, salt: int,
                  more: int) -> Tuple[torch.Tensor, torch.Tensor]:
        """(x, topk_weights) of this rank's combine; noise where nothing is read. `more`: rows behind those that
        dispatch returned; -1: without those behind the last that is used."""
        routed = kept.routed
        flat, zones = routed.flat(me), routed.zones(me, kept.align)[0]
        rows = (len(zones) if kept.expand else len(flat)) if kept.sync else (
            kept.handle.num_expanded_tokens if kept.expand else routed.ranks * routed.most)
        if more < 0:
            rows, more = max([i + 1 for i, at in enumerate(zones) if at is not None], default=0), 0
        x = torch.full((rows + more, hidden), 9.0).to(dtype)
        weights = torch.full((rows + more,) if kept.expand else (rows, routed.topk), 9.0)
        for i, at in enumerate(zones if kept.expand else []):
            if at is not None:
                x[i] = self.value(at, hidden, dtype, salt)
                weights[i] = self.weight(at, salt)
        for i, (s, t) in enumerate([] if kept.expand else flat):
            x[i] = self.row_of_rank(routed, me, s, t, hidden, dtype, salt)
            weights[i] = torch.tensor([self.weight((s, t, k), salt) if e >= 0 and e // routed.local == me else 9.0
                                       for k, e in enumerate(routed.idx[s][t])])
        return x, weights

    @staticmethod
    def weight(at: Tuple[int, int, int], salt: int) -> float:
        """The weight that returns for an entry."""
        return float(((at[0] * 4096 + at[1]) * 64 + at[2] + salt) % 65521)

    def weights_back(self, kept: Handle, salt: int) -> torch.Tensor:
        """combined_topk_weights of this rank."""
        routed = kept.routed
        return torch.tensor([[self.weight((self.me, t, k), salt) if e >= 0 else 0.0 for k, e in enumerate(line)]
                             for t, line in enumerate(routed.idx[self.me])]).view(routed.counts[self.me], routed.topk)

    def sums(self, kept: Handle, hidden: int, dtype: torch.dtype, salt: int,
             biases: List[torch.Tensor]) -> torch.Tensor:
        """combined_x of this rank."""
        routed, me, local = kept.routed, self.me, kept.routed.local
        out = torch.zeros(routed.counts[me], hidden)
        for bias in biases:
            out = out + bias.float()
        for t, line in enumerate(routed.idx[me]):
            rows = [(e // local, k, self.value((me, t, k), hidden, dtype, salt))
                    for k, e in enumerate(line) if e >= 0]
            if not rows:
                continue
            if not kept.expand or self.multiple:
                rows = fold(rows, dtype)
            if self.multiple and self.two:
                rows = fold([(rank // self.per_node, k, row) for rank, k, row in rows], dtype)
            for _group, _k, row in rows:
                out[t] = out[t] + row.float()
        return out.to(dtype)

    def step(self) -> None:
        """One call."""
        what = self.rng.choice((self.dispatch, self.dispatch, self.cached, self.combine, self.combine, self.drop,
                                self.barrier))
        if self.kept or what in (self.dispatch, self.barrier):
            what()
        self.settle(self.rng.randint(0, 3))

    def finish(self) -> None:
        """The end."""
        end_and_compare(self)

    def drop(self) -> None:
        """Lets go of a handle, and of some results."""
        self.kept.pop(self.rng.randrange(len(self.kept)))
        self.held = [item for item in self.held if self.rng_local.random() < 0.6]
        self.event = None

    def barrier(self) -> None:
        """A barrier."""
        self.buffer.barrier(self.rng.random() < 0.5, self.rng.random() < 0.5)
