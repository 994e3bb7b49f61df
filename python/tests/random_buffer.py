# SPDX-License-Identifier: Apache-2.0
"""Random programs for Buffer, high throughput and low latency: see random_elastic.py."""

import contextlib
import random
from typing import Any, Callable, Dict, List, Optional, Tuple

import deep_ep
import torch
from random_elastic import Routed, as_bias, end_and_compare, same, up
from reference import cast_fp8, cast_nvfp4, unpack_ue8m0
from suite import World

Later = Tuple[Optional[Callable[[], Any]], Callable[[], None]]  # a call: waits for it, if it must be, and checks it


class Base:
    """What programs of both modes share."""

    def __init__(self, world: World, seed: int, ranks: int, per_node: int) -> None:
        self.world, self.me, self.ranks, self.per_node = world, world.rank, ranks, per_node
        self.rng = random.Random(seed)
        self.rng_local = random.Random(self.rng.random() + self.me)
        self.rng_more = random.Random(-seed)  # of what was added later: programs of known seeds stay as they were
        self.held: List[Tuple[str, torch.Tensor, torch.Tensor]] = []
        self.text: List[str] = []
        self.later: List[Later] = []
        self.waits_later = False
        self.most_later = 2  # calls that are waited for later
        self.buffer: deep_ep.Buffer

    def hold(self, what: str, got: torch.Tensor, want: torch.Tensor) -> None:
        """Compares, now and at the end."""
        assert same(got, want), self.report(what, got, want)
        if self.rng_local.random() < 0.5:
            self.held.append((what, got, want))

    def report(self, what: str, got: torch.Tensor, want: torch.Tensor) -> str:
        """A failure."""
        return "%s: got %s %s %s, expected %s %s %s\n%s" % (
            what, got.dtype, list(got.shape), got.cpu().float() if got.numel() < 600 else "", want.dtype,
            list(want.shape), want.float() if want.numel() < 600 else "", "\n".join(self.text[-12:]))

    def finish(self) -> None:
        """The end."""
        end_and_compare(self)

    def ended(self, event: Any, hook: Any, asynchronous: bool, hooked: bool = False,
              check: Callable[[], None] = lambda: None) -> Later:
        """Waits for a call and checks it, now or later."""
        assert (event.event is not None) == asynchronous and (hook is not None) == hooked, self.text[-1]
        call = event.current_stream_wait if asynchronous else hook, check
        self.later.append(call)
        self.settle(self.rng.randint(0, self.most_later) if self.waits_later else 0)
        return call

    def settle(self, most: int) -> None:
        """Waits for calls and checks them, until so many are left: all ranks in the same order."""
        while len(self.later) > most:
            # A masked rank draws the same.
            self.end(self.later[self.rng.randrange(len(self.later)) if len(self.later) > 1 else 0])

    def end(self, call: Later) -> None:
        """Waits for a call and checks it."""
        self.later.remove(call)
        wait, check = call
        if wait is not None:
            wait()
        check()


class High(Base):
    """A high-throughput program."""

    def __init__(self, world: World, seed: int, group: Any, ranks: int, per_node: int) -> None:
        super().__init__(world, seed, ranks, per_node)
        self.most = self.rng.choice((1, 6, 19, 40))
        self.buffer = deep_ep.Buffer(group, 1 << 26, 1 << 26 if per_node < ranks else 0, explicitly_destroy=True)
        # Handles of one buffer serve another.
        self.buffers = [self.buffer] if self.rng_more.random() < 0.7 else [
            self.buffer, deep_ep.Buffer(group, 1 << 24, 0, explicitly_destroy=True)]
        self.kept: List[Any] = []
        self.event: Any = None

    def streams(self) -> Dict[str, Any]:
        """Arguments about streams."""
        rng = self.rng
        options: Dict[str, Any] = dict(async_finish=rng.random() < 0.4)
        if rng.random() < 0.4:
            options["previous_event"] = rng.choice((
                self.buffer.capture(), deep_ep.EventHandle(), deep_ep.EventOverlap(), self.event,
                self.event and self.event.event))
            if options["previous_event"] is not None and options["async_finish"]:
                options["allocate_on_comm_stream"] = rng.random() < 0.5
        if rng.random() < 0.3:
            options["config"] = deep_ep.Config(rng.choice((2, 8, 20)))
        return options

    def tokens(self, counts: List[int], hidden: int, fp8: bool, packed: bool) -> Tuple[List[Any], Any]:
        """(rows, scales or None) of all ranks, and what this rank gives."""
        gen = torch.Generator().manual_seed(self.rng.getrandbits(31))
        rows = [torch.randn(n, hidden, generator=gen).bfloat16() for n in counts]
        if not fp8:
            return [(x, None) for x in rows], self.world.to(rows[self.me])
        pairs = []
        for x in rows:
            values, scales = cast_fp8(x) if len(x) else (x.to(torch.float8_e4m3fn), torch.zeros(0, -(-hidden // 128)))
            pairs.append((values, scales.view(torch.int32) if packed else scales))
        values, scales = pairs[self.me]
        columns = self.rng.random() < 0.5
        return pairs, (self.world.to(values), self.world.to(scales.t().contiguous()).t() if columns else
                       self.world.to(scales))

    def check_layout(self, routed: Routed, layout: Tuple[Any, ...]) -> None:
        """get_dispatch_layout()."""
        lines, local = routed.idx[self.me], routed.local
        goes = torch.tensor([[any(e >= 0 and e // local == r for e in line) for r in range(self.ranks)]
                             for line in lines], dtype=torch.bool).view(len(lines), self.ranks)
        per_rank, per_node, per_expert, in_rank, _event = layout
        self.hold("is_token_in_rank", in_rank, goes)
        self.hold("num_tokens_per_rank", per_rank, goes.sum(0, dtype=torch.int32))
        flat = [e for line in lines for e in line]
        self.hold("num_tokens_per_expert", per_expert, torch.tensor(
            [flat.count(e) for e in range(routed.experts)], dtype=torch.int32))
        nodes = self.ranks // self.per_node
        assert (per_node is None) == (nodes == 1)
        if per_node is not None:
            self.hold("num_tokens_per_rdma_rank", per_node, goes.view(len(lines), nodes, self.per_node).any(2).sum(
                0, dtype=torch.int32))

    def check_handle(self, routed: Routed, handle: Any, rows: int) -> None:
        """The fields that callers read."""
        flat = routed.flat(self.me)
        goes = [[any(e >= 0 and e // routed.local == r for e in line) for r in range(self.ranks)]
                for line in routed.idx[self.me]]
        if self.per_node < self.ranks:
            assert len(handle) == 10 and handle[0].tolist() == goes
            assert handle[6].tolist() == [sum(1 for s, _ in flat if s <= i) for i in range(self.ranks)], self.text[-1]
            assert handle[7].shape == (rows, 8) and handle[7].dtype is torch.uint8
            return
        assert len(handle) == 6 and handle[4].tolist() == goes
        sent = [[sum(1 for s, _ in routed.flat(r) if s <= i) for r in range(self.ranks)] for i in range(self.ranks)]
        assert handle[0].tolist() == sent, self.text[-1]
        assert handle[3][:len(flat)].tolist() == [t for _, t in flat], self.text[-1]

    def dispatch(self) -> None:
        """A new routing."""
        rng, world, me = self.rng, self.world, self.me
        routed = Routed(rng, self.ranks, rng.choice((self.most, 2 * self.most)))
        routed.idx_dtype = rng.choice((torch.int64, torch.int32))
        fp8, packed = rng.random() < 0.4, rng.random() < 0.5
        hidden = (16 if fp8 else 8) * rng.randint(1, 30)
        pairs, given = self.tokens(routed.counts, hidden, fp8, packed)
        topk, align = rng.random() < 0.8, rng.choice((1, 4, 5, 128))
        flat = routed.flat(me)
        most_rows = max(len(routed.flat(r)) for r in range(self.ranks))
        worst = most_rows + rng.choice((1, 9)) if topk and rng.random() < 0.3 else 0
        weights, options = routed.weights(rng), self.streams()
        idx = routed.tensor(world, me)
        self.text.append("dispatch counts=%s E=%d K=%d hidden=%d fp8=%s topk=%s align=%d worst=%d %s" % (
            routed.counts, routed.experts, routed.topk, hidden, fp8, topk, align, worst, options))
        layout = self.buffer.get_dispatch_layout(idx, routed.experts)
        self.check_layout(routed, layout)
        more: Dict[str, Any] = dict(topk_idx=idx, topk_weights=world.to(weights[me])) if topk else {}
        call = rng.choice((self.buffer.dispatch, self.buffer.internode_dispatch))
        recv, recv_idx, recv_weights, counts, handle, event = call(
            given, num_tokens_per_rank=layout[0], num_tokens_per_rdma_rank=layout[1], is_token_in_rank=layout[3],
            num_tokens_per_expert=layout[2], expert_alignment=align, num_worst_tokens=worst, **more, **options)
        self.ended(event, None, options["async_finish"])
        self.event = event if options["async_finish"] else None
        rows = worst or len(flat)
        self.check_rows(pairs, flat, recv, rows)
        assert counts == ([] if worst else [up(n, align) for n in routed.zones(me, 1)[2]]), (counts, self.text[-1])
        if topk:
            here = [[e >= 0 and e // routed.local == me for e in routed.idx[s][t]] for s, t in flat]
            want = torch.full((rows, routed.topk), -1, dtype=routed.idx_dtype)
            mass = torch.zeros(len(flat), routed.topk)
            for i, (s, t) in enumerate(flat):
                for k, e in enumerate(routed.idx[s][t]):
                    if here[i][k]:
                        want[i, k], mass[i, k] = e - me * routed.local, weights[s][t, k]
            self.hold("recv_topk_idx", recv_idx, want)
            self.hold("recv_topk_weights", recv_weights[:len(flat)], mass)
        else:
            assert recv_idx is None and recv_weights is None
        if rng.random() < 0.5:
            self.check_handle(routed, handle, rows)
        self.kept.append((routed, hidden, rows, handle, topk))

    def check_rows(self, pairs: List[Any], flat: List[Tuple[int, int]], recv: Any, rows: int) -> None:
        """Rows and scales of a dispatch."""
        parts = list(recv) if isinstance(recv, tuple) else [recv]
        assert len(parts) == (1 if pairs[0][1] is None else 2) and all(p.shape[0] == rows for p in parts), self.text[-1]
        for i, part in enumerate(parts):
            want = torch.stack([pairs[s][i][t] for s, t in flat]) if flat else pairs[0][i][:0]
            assert part.is_contiguous()
            self.hold("rows", part[:len(flat)], want)

    def cached(self) -> None:
        """By handle."""
        routed, hidden, rows, handle, _topk = self.rng.choice(self.kept)
        pairs, given = self.tokens(routed.counts, hidden, hidden % 16 == 0 and self.rng.random() < 0.4, False)
        options = self.streams()
        self.text.append("cached %s" % options)
        recv, *none, event = self.rng_more.choice(self.buffers).dispatch(given, handle=handle, **options)
        assert none == [None] * 4
        self.ended(event, None, options["async_finish"])
        self.check_rows(pairs, routed.flat(self.me), recv, rows)

    def combine(self) -> None:
        """Sums of rows of ranks."""
        rng, world, me = self.rng, self.world, self.me
        routed, hidden, rows, handle, topk = rng.choice(self.kept)
        salt, weighted, options = rng.getrandbits(20), topk and rng.random() < 0.5, self.streams()
        gen = torch.Generator().manual_seed(rng.getrandbits(31))
        biases = [[torch.randn(n, hidden, generator=gen).bfloat16() for n in routed.counts]
                  for _ in range(rng.randint(0, 2))]
        self.text.append("combine hidden=%d rows=%d w=%s bias=%d %s" % (hidden, rows, weighted, len(biases), options))
        in_place = rng.random() < 0.5
        x, mass = torch.full((rows, hidden), 9.0).bfloat16(), torch.full((rows, routed.topk), 9.0)
        for i, (s, t) in enumerate(routed.flat(me)):
            x[i], mass[i] = self.value(me, s, t, hidden, salt), self.mass(me, s, t, routed.topk, salt)
        given = world.to(x)
        if in_place:  # rows in memory that a dispatch has returned, where others read them
            zeros = world.to(torch.zeros(routed.counts[me], hidden, dtype=torch.bfloat16))
            given = self.buffer.dispatch(zeros, handle=handle)[0].copy_(given)
        other = self.rng_more.choice(self.buffers)
        call = rng.choice((other.combine, other.internode_combine))
        combined, back, event = call(
            given, handle, topk_weights=world.to(mass) if weighted else None,
            bias=as_bias([world.to(bias[me]) for bias in biases]), **options)
        self.ended(event, None, options["async_finish"])
        out, sums = torch.zeros(routed.counts[me], hidden), torch.zeros(routed.counts[me], routed.topk)
        for bias in biases:
            out = out + bias[me].float()
        for r in range(self.ranks):
            for s, t in routed.flat(r):
                if s == me:
                    out[t] = out[t] + self.value(r, s, t, hidden, salt).float()
                    sums[t] = sums[t] + self.mass(r, s, t, routed.topk, salt)
        if self.per_node == self.ranks:
            self.hold("combined", combined, out.bfloat16())
        else:
            assert combined.shape == out.shape and torch.allclose(combined.cpu().float(), out, rtol=0.03, atol=0.12), \
                self.report("combined", combined, out.bfloat16())
        assert (back is not None) == weighted
        if back is not None:
            self.hold("combined weights", back, sums)

    @staticmethod
    def value(rank: int, s: int, t: int, hidden: int, salt: int) -> torch.Tensor:
        """What a rank returns for a token."""
        gen = torch.Generator().manual_seed(salt + (s * 4096 + t) * 64 + rank)
        return (torch.randn(hidden, generator=gen) * 2).bfloat16()

    @staticmethod
    def mass(rank: int, s: int, t: int, topk: int, salt: int) -> torch.Tensor:
        """The weights that a rank returns for a token: sums of them are exact."""
        return torch.tensor([float((salt + s * 31 + t * 7 + rank * 5 + k) % 997) for k in range(topk)])

    def step(self) -> None:
        """One call."""
        what = self.rng.choice((self.dispatch, self.dispatch, self.cached, self.combine, self.combine, self.drop))
        if self.kept or what == self.dispatch:
            what()

    def drop(self) -> None:
        """Lets go of a handle, and of some results."""
        self.kept.pop(self.rng.randrange(len(self.kept)))
        self.held = [item for item in self.held if self.rng_local.random() < 0.6]


class Overlapped:
    """A low-latency combine whose rows become ready while it runs, and the signals that say so."""

    def __init__(self, program: "Low", returns: bool) -> None:
        rng, rows = program.rng_more, program.ranks * program.most
        self.world, self.local = program.world, program.local
        self.late = returns and rng.random() < 0.7  # rows are written when the call has returned
        self.block = rng.choice((0, 1, 3, 64))
        self.value = rng.randint(1, 3)
        self.signals = self.world.to(torch.zeros(
            self.local * (-(-rows // self.block) if self.block else 1), dtype=torch.int32))
        self.num_sms = rng.choice((None, 1, 2, 8))
        if self.late and self.signals.is_cuda:
            self.num_sms = 2  # what writes the rows needs room on the GPU
        self.full = torch.empty(0)
        self.ready: Any = None  # the rows may be written
        program.text.append("overlap late=%s block=%d" % (self.late, self.block))

    def begin(self, rows: torch.Tensor) -> Dict[str, Any]:
        """The arguments of the call."""
        if self.late:
            self.full = rows.clone()
            rows.fill_(float("nan"))  # what is read too early
            self.ready = deep_ep.Buffer.capture().event
        else:
            self.signals.fill_(self.value)
        given: Dict[str, Any] = dict(src_signals=self.signals, src_signal_expect_value=self.value)
        if self.block:
            given = dict(comp_signal=self.signals, block_m=self.block, threshold=self.value)
        return dict(given, overlap=True, num_sms=self.num_sms)

    def end(self, rows: torch.Tensor) -> None:
        """Writes the rows of one expert after the other, if that is still to do."""
        side = torch.cuda.Stream() if self.late and rows.is_cuda else None
        if side is not None:
            self.ready.wait_on(side)
        with torch.cuda.stream(side) if side is not None else contextlib.nullcontext():
            for l in range(self.local if self.late else 0):
                rows[l] = self.full[l]
                self.signals.view(self.local, -1)[l].fill_(self.value)
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)


class Low(Base):
    """A low-latency program."""

    shrinks = True  # ranks may be masked

    def __init__(self, world: World, seed: int, group: Any, ranks: int, per_node: int) -> None:
        super().__init__(world, seed, ranks, per_node)
        rng = self.rng
        self.most, self.local = rng.choice((1, 4, 16)), rng.choice((1, 2, 5))
        self.hidden = rng.choice((24, 64, 128, 200, 384, 512, 1024))
        self.shrink = rng.random() < 0.3 and self.shrinks
        nbytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(self.most, self.hidden, ranks, ranks * self.local)
        self.buffer = deep_ep.Buffer(group, 0, nbytes if rng.random() < 0.7 else 1 << 20, low_latency_mode=True,
                                     explicitly_destroy=True, enable_shrink=self.shrink)
        self.waits_later, self.most_later = not self.shrink, 1  # two operations of a buffer may be outstanding
        self.last: Dict[str, List[Later]] = {"dispatch": [], "combine": []}  # the last two of each kind
        self.out: List[Any] = []  # dispatches whose combine is still to come
        self.begun = False
        self.masked = -1  # a rank that the others go on without

    def draw(self) -> Routed:
        """A routing of this buffer's experts."""
        routed = Routed(self.rng, self.ranks, self.most)
        routed.local, routed.experts = self.local, self.ranks * self.local
        # More than DeepEP's 11 may make a new group, for which a masked rank would be needed.
        routed.topk = self.rng.randint(1, min(routed.experts, 11 if self.shrink else 16))
        routed.idx_dtype = self.rng.choice((torch.int64, torch.int32))
        none = self.rng.choice((0, 0.2, 0.8))
        routed.draw(self.rng, none)
        return routed

    def tokens(self, routed: Routed) -> List[torch.Tensor]:
        """Rows of all ranks."""
        gen = torch.Generator().manual_seed(self.rng.getrandbits(31))
        return [(torch.randn(n, self.hidden, generator=gen) * self.rng.choice((0.05, 1.0, 30.0))).bfloat16()
                for n in routed.counts]

    def draw_cast(self) -> Tuple[str, Dict[str, Any], float]:
        """What rows are sent as, the arguments for it, and x_global_scale."""
        cast = self.rng.choice(("bf16", "fp8", "round", "ue8m0") + (("nvfp4",) if self.hidden % 64 == 0 else ()))
        options: Dict[str, Any] = {
            "bf16": dict(use_fp8=False), "fp8": {}, "round": dict(round_scale=True), "nvfp4": dict(use_nvfp4=True),
            "ue8m0": dict(round_scale=True, use_ue8m0=True)}[cast]
        scale = self.rng.choice((1.0, 37.5))
        if cast == "nvfp4":
            options["x_global_scale"] = self.world.to(torch.tensor([scale]))
        return cast, options, scale

    def dispatch(self) -> None:
        """A dispatch; its combine comes later."""
        rng, world, me = self.rng, self.world, self.me
        routed = self.draw()
        x = self.tokens(routed)
        cast, options, scale = self.draw_cast()
        asynchronous, hooked = rng.choice(((False, False), (True, False), (False, True)))
        stats = world.to(torch.full((self.local,), 3, dtype=torch.int32)) if rng.random() < 0.4 else None
        cost = world.to(torch.zeros(self.ranks, dtype=torch.int64)) if rng.random() < 0.3 else None
        self.text.append("ll dispatch M=%d counts=%s E=%d K=%d hidden=%d %s async=%s hook=%s" % (
            self.most, routed.counts, routed.experts, routed.topk, self.hidden, cast, asynchronous, hooked))
        idx = routed.tensor(world, me)
        self.take_out(routed)
        if me == self.masked:
            self.out.append((routed, None, None, None))
            return
        self.take_slot("dispatch")
        recv, counts, handle, event, hook = self.buffer.low_latency_dispatch(
            world.to(x[me]), idx, self.most, routed.experts, stats, cost, async_finish=asynchronous,
            return_recv_hook=hooked, **options)
        zones = self.zones(routed)

        def check() -> None:
            self.check(routed, x, zones, cast, scale, recv, counts, handle)
            if stats is not None:
                want = torch.tensor([3 + len(zone) for zone in zones], dtype=torch.int32)
                assert same(stats, want), self.report("stats", stats, want)
            assert cost is None or bool((cost >= 0).all())
            self.out.append((routed, zones, handle, idx))
        self.last["dispatch"].append(self.ended(event, hook, asynchronous, hooked, check))

    def take_slot(self, kind: str) -> None:
        """Waits for the call before the last one of a kind: the next one takes its slot (max_inflight in epx.h)."""
        while len(self.last[kind]) > 1:
            call = self.last[kind].pop(0)
            if call in self.later:
                self.end(call)

    def take_out(self, routed: Routed) -> None:
        """Takes a masked rank out of a routing."""
        if self.masked >= 0:
            routed.idx = [[[-1 if e // self.local == self.masked or r == self.masked else e for e in line]
                           for line in lines] for r, lines in enumerate(routed.idx)]

    def zones(self, routed: Routed) -> List[Any]:
        """(rank, token, k) of the rows of each expert of this rank."""
        rows = [at for at in routed.zones(self.me, 1)[0] if at is not None]
        return [[(s, t, k) for s, t, k in rows if routed.idx[s][t][k] == self.me * self.local + l]
                for l in range(self.local)]

    def rows_back(self, zones: List[Any], salt: int, size: float) -> torch.Tensor:
        """What the experts of this rank return; noise where nothing is read."""
        y = torch.full((self.local, self.ranks * self.most, self.hidden), 9.0).bfloat16()
        for l, zone in enumerate(zones):
            for i, (s, t, k) in enumerate(zone):
                y[l, i] = self.value(s, t, k, salt, size)
        return y

    def check(self, routed: Routed, x: List[torch.Tensor], zones: List[Any], cast: str, scale: float, recv: Any,
              counts: torch.Tensor, handle: Any) -> None:
        """What was received."""
        rows = self.ranks * self.most
        src, ranges, most, hidden, experts = handle
        assert (most, hidden, experts) == (self.most, self.hidden, routed.experts)
        self.hold("counts", counts, torch.tensor([len(zone) for zone in zones], dtype=torch.int32))
        assert src.shape == (self.local, rows) and ranges.shape == (self.local, self.ranks)
        for l, zone in enumerate(zones):
            n = len(zone)
            self.hold("src_info", src[l, :n], torch.tensor([t for _s, t, _k in zone], dtype=torch.int32))
            for s in range(self.ranks):
                begin, count = sum(1 for at in zone if at[0] < s), sum(1 for at in zone if at[0] == s)
                assert int(ranges[l, s]) == begin << 32 | count, self.text[-1]
            if not n:
                continue
            want = torch.stack([x[s][t] for s, t, _k in zone])
            if cast == "bf16":
                self.hold("rows", recv[l, :n], want)
            elif cast == "nvfp4":
                codes, scales = cast_nvfp4(want, scale)
                self.hold("codes", recv[0][:n, :, l], codes)
                i, j = torch.arange(n)[:, None], torch.arange(hidden // 16)
                tiles = recv[1].cpu().view(torch.uint8)[i % 32, i % 128 // 32, i // 128, j % 4, j // 4, l]
                assert same(tiles, scales.view(torch.uint8)), self.report("scales", tiles, scales.view(torch.uint8))
            else:
                values, scales = cast_fp8(want, cast != "fp8")
                self.hold("values", recv[0][l, :n], values)
                got = recv[1][l, :n].cpu()
                got = unpack_ue8m0(got, scales.shape[1]) if cast == "ue8m0" else got
                assert same(got, scales), self.report("scales", got, scales)

    def combine(self) -> None:
        """The combine of an earlier dispatch."""
        rng, world, me = self.rng, self.world, self.me
        routed, zones, handle, idx = self.out.pop(rng.randrange(len(self.out)))
        logfmt, zero_copy = rng.random() < 0.3, rng.random() < 0.4
        zero_copy = zero_copy and not logfmt
        asynchronous, hooked = rng.choice(((False, False), (True, False), (False, True)))
        salt, size = rng.getrandbits(20), rng.choice((0.3, 3.0))
        weights = routed.weights(rng)
        self.text.append("ll combine logfmt=%s zero_copy=%s async=%s hook=%s" % (
            logfmt, zero_copy, asynchronous, hooked))
        in_place, given_out, cut = rng.random() < 0.5, rng.random() < 0.4, rng.random() < 0.3
        overlap = Overlapped(self, asynchronous or hooked) if self.rng_more.random() < 0.3 and not logfmt else None
        if me == self.masked:
            return
        y = world.to(self.rows_back(zones, salt, size))
        if zero_copy:
            given = self.buffer.get_next_low_latency_combine_buffer(handle)
            given.copy_(y)
            y = given if in_place else torch.full_like(y, 7.0)
        out = world.to(torch.full((routed.counts[me], self.hidden), 5.0).bfloat16()) if given_out else None
        lines = [list(line) for line in routed.idx[me]]
        if cut:
            lines = [[-1 if self.rng_local.random() < 0.3 else e for e in line] for line in lines]
            idx = world.to(torch.tensor(lines, dtype=routed.idx_dtype).view(routed.counts[me], routed.topk))
        rows = given if zero_copy else y
        more = {} if overlap is None else overlap.begin(rows)
        self.take_slot("combine")
        combined, event, hook = self.buffer.low_latency_combine(
            y, idx, world.to(weights[me]), handle, use_logfmt=logfmt, zero_copy=zero_copy, async_finish=asynchronous,
            return_recv_hook=hooked, out=out, **more)
        if overlap is not None:
            overlap.end(rows)
        assert out is None or combined is out
        self.last["combine"].append(self.ended(event, hook, asynchronous, hooked, lambda: self.check_sums(
            routed, lines, weights[me], salt, size, logfmt, combined)))

    def check_sums(self, routed: Routed, lines: List[List[int]], weights: torch.Tensor, salt: int, size: float,
                   logfmt: bool, combined: torch.Tensor) -> None:
        """The result of a combine."""
        me = self.me
        want = torch.zeros(routed.counts[me], self.hidden, dtype=torch.float64)
        size_of = torch.zeros_like(want)
        for t, line in enumerate(lines):
            for k, e in enumerate(line):
                if e >= 0:
                    part = float(weights[t, k]) * self.value(me, t, k, salt, size).double()
                    want[t] += part
                    size_of[t] += part.abs()
        assert combined.shape == want.shape
        wrong = (combined.cpu().double() - want).abs() > (0.04 if logfmt else 2.0**-8 * 1.01) * want.abs() + size_of * (
            0.04 if logfmt else 1e-6)
        assert not wrong.any(), self.report("combined at %s" % wrong.nonzero()[:4].tolist(), combined, want)

    def value(self, s: int, t: int, k: int, salt: int, size: float) -> torch.Tensor:
        """What the expert of (rank, token, k) returns."""
        gen = torch.Generator().manual_seed(salt + (s * 4096 + t) * 64 + k)
        return (torch.randn(self.hidden, generator=gen) * size).bfloat16()

    def step(self) -> None:
        """One call."""
        if self.out and (len(self.out) > 2 or self.rng.random() < 0.5):
            self.combine()
        else:
            self.dispatch()
            self.begun = True
        if self.waits_later:
            self.settle(self.rng.randint(0, self.most_later))
        if self.rng.random() < 0.15 and self.me != self.masked:
            self.buffer.clean_low_latency_buffer(self.most, self.hidden, self.ranks * self.local)
        if self.shrink and self.begun and self.rng.random() < 0.3:
            self.mask()

    def mask(self) -> None:
        """The others go on without a rank, or with it again."""
        while self.out:
            self.combine()
        if self.masked >= 0:
            self.text.append("clean")
            self.buffer.low_latency_clean_mask_buffer()
            self.masked = -1
        else:
            self.masked = self.rng.randrange(self.ranks)
            self.text.append("mask %d" % self.masked)
            if self.me != self.masked:
                self.buffer.low_latency_update_mask_buffer(self.masked, True)
        if self.me != self.masked:
            status = self.world.to(torch.full((self.ranks,), 7, dtype=torch.int32))
            self.buffer.low_latency_query_mask_buffer(status)
            assert status.tolist() == [int(r == self.masked) for r in range(self.ranks)], (status, self.text[-8:])

    def finish(self) -> None:
        """The end."""
        self.settle(0)
        if self.masked >= 0:
            self.mask()
        super().finish()


class SecondBatch(Low):
    """A low-latency program beside another one, in the same buffer."""

    def __init__(self, first: Low, seed: int) -> None:
        Base.__init__(self, first.world, seed, first.ranks, first.per_node)
        self.most, self.local, self.hidden = first.most, first.local, first.hidden
        self.shrink, self.waits_later, self.begun, self.masked = False, True, True, -1
        self.buffer, self.out, self.last = first.buffer, [], first.last
        self.most_later = first.most_later = 0

    def finish(self) -> None:
        """The end, before that of the first one."""
        self.settle(0)
        for name, got, want in self.held:
            assert same(got, want), self.report("later: " + name, got, want)
