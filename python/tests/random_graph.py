# SPDX-License-Identifier: Apache-2.0
"""Random programs with CUDA graphs: calls are captured once, and replayed with other rows and another routing.

Other calls of the same buffer come between the replays. On CPU tensors the same calls are made again instead.
"""

import gc
import random
import types
from typing import Any, Callable, Dict, List, Tuple

import deep_ep
import torch
import torch.distributed as dist
from random_buffer import Low
from random_elastic import Handle, Program, Routed, Tokens, as_bias, same, up
from suite import World

MOST_GRAPHS = 3


class Recording:
    """Calls that can be made again. A rank that is masked takes no part. `garbage` is collected during the capture."""

    def __init__(self, world: World, calls: Callable[[], None], check: Callable[[], None], takes_part: bool,
                 garbage: List[Any]) -> None:
        self.calls, self.graph = calls, None
        if takes_part:
            calls()  # before it is captured
            check()
        if world.device.type != "cuda":
            garbage.clear()
            return
        # Ranks that share a GPU: nobody waits for another one while that instantiates a graph. An old graph that is
        # found during a capture would end it: torch's own limit.
        gc.collect()
        torch.cuda.synchronize()
        world.meet()
        self.graph = torch.cuda.CUDAGraph()
        if takes_part:
            with torch.cuda.graph(self.graph):
                if garbage:
                    garbage.clear()
                    gc.collect()
                calls()
        world.meet()

    def replay(self) -> None:
        """Makes the calls again."""
        if self.graph is None:
            self.calls()
        else:
            self.graph.replay()


class Graphs:
    """What programs with graphs share. A graph is an object with draw(), calls() and check(); its results stay as they
    are until it is replayed."""

    world: World
    rng: random.Random
    held: List[Tuple[str, torch.Tensor, torch.Tensor]]
    text: List[str]
    settle: Callable[[int], None]
    report: Callable[..., str]
    graphs: List[Any]

    def takes_part(self) -> bool:
        """Is this rank one of those that capture and replay?"""
        return True

    def record(self, graph: Any) -> None:
        """Captures a new graph."""
        self.settle(0)
        graph.draw()
        graph.held = []
        graph.recording = Recording(self.world, graph.calls, lambda: self.looked_at(graph), self.takes_part(),
                                    [self.used_buffer()] if self.rng.random() < 0.3 else [])
        graph.held = []  # of the calls before the capture
        self.graphs.append(graph)
        if len(self.graphs) > MOST_GRAPHS:
            self.forget(self.graphs[1:])

    def forget(self, kept: List[Any]) -> None:
        """Releases the other graphs while no rank waits for another one: torch frees their memory then, which on a GPU
        that ranks share waits for the kernels of all."""
        self.settle(0)
        self.rest()
        self.graphs = kept
        self.rest()

    def rest(self) -> None:
        """All ranks have come here, and have queued nothing."""
        if self.world.device.type == "cuda":
            gc.collect()
            torch.cuda.synchronize()
            self.world.meet()

    def used_buffer(self) -> Any:
        """A buffer that nobody destroys, in a cycle that only the garbage collector finds."""
        buffer = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=4, hidden=32, num_topk=1)
        idx = self.world.to(torch.zeros(2, 1, dtype=torch.int64))
        buffer.dispatch(self.world.to(torch.zeros(2, 32).bfloat16()), idx, num_experts=self.world.nranks)
        cycle: List[Any] = [buffer]
        cycle.append(cycle)
        return cycle

    def replay(self) -> None:
        """Replays a graph with other contents of its tensors."""
        self.settle(0)
        graph = self.rng.choice(self.graphs)
        self.unchanged(graph)
        graph.draw()
        self.text.append("replay %d" % self.graphs.index(graph))
        if self.takes_part():
            graph.recording.replay()
            self.looked_at(graph)

    def looked_at(self, graph: Any) -> None:
        """Checks the results, and keeps them apart from those of other calls."""
        self.held, others = graph.held, self.held
        graph.check()
        self.held = others

    def unchanged(self, graph: Any) -> None:
        """Nobody has written to the results since the last replay."""
        for name, got, want in graph.held:
            assert same(got, want), self.report("since the replay: " + name, got, want)
        graph.held.clear()

    def step_of_graphs(self, others: Callable[[], None], make: Callable[[], Any]) -> None:
        """One step."""
        what = self.rng.choice(("other", "other", "record", "replay", "replay", "replay", "forget"))
        if what == "other":
            others()
        elif what == "record" or not self.graphs:
            self.record(make())
        elif what == "replay":
            self.replay()
        else:
            self.forget(self.graphs[1:])

    def end_of_graphs(self, others: Callable[[], None]) -> None:
        """The end of the program: graphs are released before the buffer, or after it."""
        for graph in self.graphs:
            self.unchanged(graph)
        if self.rng.random() < 0.5:
            self.forget([])
        others()
        self.forget([])


class Pair:
    """A low-latency dispatch and its combine."""

    def __init__(self, program: Low) -> None:
        rng, world = program.rng, program.world
        self.program, self.routed = program, program.draw()
        self.cast, self.options, self.scale = program.draw_cast()
        ways = ((False, False), (True, False), (False, True))
        self.ways = rng.choice(ways), rng.choice(ways)
        self.logfmt = rng.random() < 0.2
        self.zero_copy = rng.random() < 0.4 and not self.logfmt
        self.overlap = rng.random() < 0.2 and not self.logfmt
        count, rows = self.routed.counts[program.me], program.ranks * program.most
        self.x = world.to(torch.zeros(count, program.hidden).bfloat16())
        self.idx = self.routed.tensor(world, program.me)
        self.weights = world.to(torch.zeros(count, self.routed.topk))
        self.y = world.to(torch.zeros(program.local, rows, program.hidden).bfloat16())
        self.signals = world.to(torch.zeros(program.local, dtype=torch.int32))
        self.stats = world.to(torch.zeros(program.local, dtype=torch.int32)) if rng.random() < 0.4 else None
        self.out = world.to(torch.zeros(count, program.hidden).bfloat16()) if rng.random() < 0.4 else None
        self.text = "pair counts=%s E=%d K=%d hidden=%d %s ways=%s logfmt=%s zero_copy=%s overlap=%s" % (
            self.routed.counts, self.routed.experts, self.routed.topk, program.hidden, self.cast, self.ways,
            self.logfmt, self.zero_copy, self.overlap)

    def draw(self) -> None:
        """New contents of the same tensors."""
        program, rng = self.program, self.program.rng
        self.routed.draw(rng, rng.choice((0, 0.2, 0.8)))
        self.rows, self.given = program.tokens(self.routed), self.routed.weights(rng)[program.me]
        self.idx.copy_(self.routed.tensor(program.world, program.me))
        program.take_out(self.routed)
        self.zones = program.zones(self.routed)
        self.salt, self.size = rng.getrandbits(20), rng.choice((0.3, 3.0))
        self.x.copy_(self.rows[program.me])
        self.weights.copy_(self.given)
        self.y.copy_(program.rows_back(self.zones, self.salt, self.size))
        self.signals.fill_(1)
        if self.stats is not None:
            self.stats.fill_(3)

    def dispatch(self) -> Any:
        """Returns what waits for it, or None."""
        asynchronous, hooked = self.ways[0]
        recv, counts, self.handle, event, hook = self.program.buffer.low_latency_dispatch(
            self.x, self.idx, self.program.most, self.routed.experts, self.stats, async_finish=asynchronous,
            return_recv_hook=hooked, **self.options)
        self.received = recv, counts, self.handle
        return event.current_stream_wait if asynchronous else hook

    def combine(self) -> Any:
        """Returns what waits for it, or None."""
        asynchronous, hooked = self.ways[1]
        y = self.y
        if self.zero_copy:
            y = self.program.buffer.get_next_low_latency_combine_buffer(self.handle).copy_(y)
        more: Dict[str, Any] = dict(overlap=True, src_signals=self.signals, src_signal_expect_value=1)
        self.combined, event, hook = self.program.buffer.low_latency_combine(
            y, self.idx, self.weights, self.handle, use_logfmt=self.logfmt, zero_copy=self.zero_copy,
            async_finish=asynchronous, return_recv_hook=hooked, out=self.out, **(more if self.overlap else {}))
        return event.current_stream_wait if asynchronous else hook

    def check(self) -> None:
        """Compares the results."""
        program = self.program
        program.check(self.routed, self.rows, self.zones, self.cast, self.scale, *self.received)
        if self.stats is not None:
            program.hold("stats", self.stats, torch.tensor([3 + len(zone) for zone in self.zones], dtype=torch.int32))
        program.check_sums(self.routed, self.routed.idx[program.me], self.given, self.salt, self.size, self.logfmt,
                           self.combined)


class Pairs:
    """One or two pairs, which may overlap."""

    def __init__(self, program: Low) -> None:
        self.pairs = [Pair(program) for _ in range(program.rng.randint(1, 2))]
        self.together = program.rng.random() < 0.5
        program.text.append("; ".join(pair.text for pair in self.pairs) + " together=%s" % self.together)

    def draw(self) -> None:
        """New contents of the same tensors."""
        for pair in self.pairs:
            pair.draw()

    def calls(self) -> None:
        """What is captured."""
        for turn in [self.pairs] if self.together else [[pair] for pair in self.pairs]:
            for begin in (Pair.dispatch, Pair.combine):
                for wait in [begin(pair) for pair in turn]:
                    if wait is not None:
                        wait()

    def check(self) -> None:
        """Compares the results."""
        for pair in self.pairs:
            pair.check()


class LowGraphs(Graphs, Low):
    """A low-latency program with graphs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.graphs = []

    def takes_part(self) -> bool:
        """A masked rank does not."""
        return self.me != self.masked

    def step(self) -> None:
        """One call, or a graph."""
        if self.masked < 0:  # all ranks capture a graph, for one that is masked may be back before a replay
            self.step_of_graphs(super().step, lambda: Pairs(self))
        elif self.graphs and self.rng.random() < 0.5:
            self.replay()
        else:
            super().step()

    def finish(self) -> None:
        """The end."""
        self.end_of_graphs(super().finish)


class Layer:
    """A dispatch of an ElasticBuffer or one by a handle from before, and a combine."""

    def __init__(self, program: Program) -> None:
        rng, world, me = program.rng, program.world, program.me
        self.program, self.seed = program, rng.getrandbits(31)
        self.kept = rng.choice(program.kept) if program.kept and rng.random() < 0.3 else None
        self.cached = self.kept is not None
        self.expand, self.tma, self.weighted, self.copy = (rng.random() < 0.5 for _ in range(4))
        if self.kept is None:
            self.kept = self.new_handle()
        self.expand = self.kept.expand
        routed = self.kept.routed
        self.tokens = Tokens(rng, routed.counts, self.kept.tokens)
        if self.tokens.strides in ("same", "one"):  # nothing can be written to these
            self.tokens.strides = "rows"
        self.dtype, self.hidden = program.draw_rows_back(self.tokens)
        self.weighted_back = rng.random() < 0.5 and (program.multiple or not self.expand)
        self.stats = world.to(torch.zeros(routed.local, dtype=torch.int32)) if rng.random() < 0.4 else None
        count = routed.counts[me]
        self.x, self.idx = self.tokens.given(world, me), routed.tensor(world, me)
        self.weights = world.to(torch.zeros(count, routed.topk))
        y, mass = program.rows_back(self.kept, me, self.hidden, self.dtype, 0, 0)
        self.y, self.mass = world.to(y), world.to(mass)
        self.biases = [world.to(torch.zeros(count, self.hidden).to(self.dtype)) for _ in range(rng.randint(0, 2))]
        program.text.append("layer cached=%s counts=%s E=%d K=%d %s hidden=%d packs=%d M=%d align=%d expand=%s tma=%s "
                            "w=%s %s; back %s %d w=%s bias=%d seed=%d" % (
                                self.cached, routed.counts, routed.experts, routed.topk, self.tokens.dtype,
                                self.tokens.hidden, self.tokens.packs, routed.most, self.kept.align, self.expand,
                                self.tma, self.weighted, self.tokens.strides, self.dtype, self.hidden,
                                self.weighted_back, len(self.biases), self.seed))

    def new_handle(self) -> Handle:
        """A dispatch without CPU sync, before it is made."""
        rng, program = self.program.rng, self.program
        routed, align = Routed(rng, program.ranks, rng.randint(1, 2 * program.most)), rng.choice((1, 3, 16, 128))
        worst = up(routed.ranks * routed.most * min(routed.topk, routed.local) + (align - 1) * routed.local, align)
        return Handle(routed, align, self.expand, False, Tokens(rng, routed.counts),
                      types.SimpleNamespace(num_expanded_tokens=worst))

    def draw(self) -> None:
        """New contents of the same tensors."""
        program, rng, me = self.program, self.program.rng, self.program.me
        routed = self.kept.routed
        if not self.cached:
            routed.draw(rng, rng.choice((0, 0.1, 0.6, 1)), rng.random() < 0.15)
            self.idx.copy_(routed.tensor(program.world, me))
        self.tokens, self.given = Tokens(rng, routed.counts, self.tokens), routed.weights(rng)
        rows = self.tokens.given(program.world, me)
        for old, new in zip(self.x, rows) if self.tokens.packs else ((self.x, rows),):
            old.copy_(new)
        self.weights.copy_(self.given[me])
        self.salt = rng.getrandbits(20)
        gen = torch.Generator().manual_seed(rng.getrandbits(31))
        self.added = [[torch.randn(n, self.hidden, generator=gen).to(self.dtype) for n in routed.counts]
                      for _ in self.biases]
        for bias, value in zip(self.biases, self.added):
            bias.copy_(value[me])
        y, mass = program.rows_back(self.kept, me, self.hidden, self.dtype, self.salt, 0)
        self.y.copy_(y)
        self.mass.copy_(mass)
        if self.stats is not None:
            self.stats.fill_(5)

    def calls(self) -> None:
        """What is captured: the same arguments every time."""
        buffer, rng, routed = self.program.buffer, random.Random(self.seed), self.kept.routed
        weights = self.weights if self.weighted else None
        more: Dict[str, Any] = dict(handle=self.kept.handle, topk_weights=weights) if self.cached else dict(
            topk_idx=self.idx, topk_weights=weights, cumulative_local_expert_recv_stats=self.stats,
            num_experts=routed.experts, num_max_tokens_per_rank=routed.most, expert_alignment=self.kept.align,
            do_cpu_sync=False, do_handle_copy=self.copy)
        *self.received, handle, event = buffer.dispatch(
            self.x, do_expand=self.expand, do_zero_padding=self.expand, use_tma_aligned_col_major_sf=self.tma, **more,
            **self.program.streams(rng, None))
        if event.event is not None:
            event.current_stream_wait()
        self.kept.handle = handle
        self.combined, self.back, event = buffer.combine(
            self.y, handle, self.mass if self.weighted_back else None, bias=as_bias(self.biases),
            **self.program.streams(rng, None))
        if event.event is not None:
            event.current_stream_wait()

    def check(self) -> None:
        """Compares the results."""
        program, kept, me = self.program, self.kept, self.program.me
        program.check_handle(kept)
        program.check_rows(kept, self.tokens, *self.received, self.given if self.weighted else None, self.expand,
                           self.tma)
        if self.stats is not None and not self.cached:
            program.hold("stats", self.stats, torch.tensor(kept.routed.zones(me, 1)[2], dtype=torch.int32) + 5)
        program.hold("combined", self.combined, program.sums(
            kept, self.hidden, self.dtype, self.salt, [bias[me] for bias in self.added]))
        assert (self.back is not None) == self.weighted_back
        if self.back is not None:
            program.hold("combined weights", self.back, program.weights_back(kept, self.salt))


class ElasticGraphs(Graphs, Program):
    """A program of an ElasticBuffer with graphs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.graphs = []

    def step(self) -> None:
        """One call, or a graph."""
        self.step_of_graphs(super().step, lambda: Layer(self))

    def finish(self) -> None:
        """The end."""
        self.end_of_graphs(super().finish)
