# SPDX-License-Identifier: Apache-2.0
"""Random programs for the heap of a GPU: tensors that are made, used, dropped and revoked on any stream, memory of
graphs, exports, and sessions of all-gathers in the same heap.

The streams are those of played_cuda.py, with vector clocks: work that uses memory is behind all earlier work that used
it, because its stream has waited for that of the other. The host never waits.
"""

import contextlib
import os
import random
import types
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple
from unittest import mock

import epx
import torch
from deep_ep import _elastic_streams
from deep_ep._elastic_gather import Gathers, _Place
from deep_ep._memory import Form, Heap, Part, use_on
from played_cuda import Stream, by_number, capturing, comm, default, now, on_stream, side

STEPS = 100
RANKS = 2  # of the all-gathers

third = Stream("third", 9)
streams = (default, comm, side, third)


class Clocks:
    """Behind which work of each stream the next work of each stream runs."""

    def __init__(self) -> None:
        numbers = [stream.cuda_stream for stream in streams]
        self._behind = {number: dict.fromkeys(numbers, 0) for number in numbers}

    def wait(self, stream: Stream, other: Stream) -> None:
        """A stream waits for another one."""
        clock = self._behind[stream.cuda_stream]
        for number, count in self._behind[other.cuda_stream].items():
            clock[number] = max(clock[number], count)

    def work(self, stream: Stream) -> int:
        """Queues work. Returns its number, among the work of this stream."""
        clock = self._behind[stream.cuda_stream]
        clock[stream.cuda_stream] += 1
        return clock[stream.cuda_stream]

    def is_behind(self, stream: Stream, other: Stream, number: int) -> bool:
        """Does what is queued next on a stream run behind this work of the other one?"""
        return self._behind[stream.cuda_stream][other.cuda_stream] >= number

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """All streams follow these clocks."""
        with mock.patch.object(Stream, "wait_stream", lambda stream, other: self.wait(stream, other)), \
                mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None), \
                mock.patch.dict(by_number, {third.cuda_stream: third}), \
                mock.patch.dict(_elastic_streams._comm_streams, {0: comm}):
            yield


class Use:
    """Work that uses memory."""

    def __init__(self, owner: "Owner", stream: Stream, number: int) -> None:
        self.owner, self.stream, self.number = owner, stream, number

    def __str__(self) -> str:
        return "work %d of %s, which uses %s" % (self.number, self.stream.name, self.owner)


class Owner:
    """Somebody who has a range of the heap: by a tensor, or because a session gathers it. `reserved_on`: the stream
    that made it. `home`: where its contents are ready."""

    revoked = False  # True: the heap has taken the memory back

    def __init__(self, kind: str, number: int, begin: int, nbytes: int) -> None:
        self.kind, self.number, self.begin, self.end = kind, number, begin, begin + nbytes
        self.reserved_on = self.home = now[0]
        self.tensor: Optional[torch.Tensor] = None

    def __str__(self) -> str:
        return "%s %d at %d to %d" % (self.kind, self.number, self.begin, self.end)

    def overlaps(self, other: "Owner") -> bool:
        """Do they have memory in common?"""
        return self.begin < other.end and other.begin < self.end


class WatchedHeap(Heap):
    """A program learns what is revoked."""

    def __init__(self, program: "Program") -> None:
        super().__init__(program.group, torch.device("cpu"))
        self._program = program

    def revoke(self, address: int) -> None:
        super().revoke(address)
        for owner in self._program.alive():
            if owner.begin == address - self._program.group.alloc_address:
                owner.revoked = True


class Gpu:
    """Passes for the device of any tensor."""

    type, index = "cuda", 0

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


class Sessions(Gathers):
    """All-gathers of one rank, which only tell a program of their memory and of their work."""

    def __init__(self, program: "Program") -> None:  # pylint: disable=super-init-not-called
        self._program, self._heap = program, program.heap
        self._device: Any = Gpu()
        self._engine: Any = types.SimpleNamespace(nranks=RANKS, rank=0)
        self._mover = mock.Mock(capturing=lambda: capturing[0], captured=False)
        self._limits = (1 << 40, 1 << 40)
        self._session, self._used, self._count = None, 0, 0
        self._pending, self._made, self._given, self._captured, self._ended = [], [], [], [], []

    @property
    def runs(self) -> bool:
        """Is there a session?"""
        return self._session is not None

    def _make(self, wanted: Sequence[Tuple[Tuple[int, ...], torch.dtype]],
              given: Sequence[torch.Tensor] = ()) -> List[_Place]:
        places = super()._make(wanted, given)
        for place in places:
            self._program.gathers_into(place)
        return places

    def _send(self, t: torch.Tensor, place: _Place, stream: Any) -> None:
        self._program.sends(t, place, stream)

    def _let_go(self) -> None:
        super()._let_go()
        if not self._made and not self._given:
            self._program.in_session.clear()


class Program:
    """One heap and what happens to it."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.text: List[str] = []
        self.clocks = Clocks()
        self.alloc_bytes = rng.choice((1 << 16, 1 << 16, 100000, 300000))
        with mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="1"):
            self.group = epx.Group(num_experts=1, max_tokens_per_rank=1, max_hidden_bytes=16,
                                   alloc_bytes=self.alloc_bytes, modes=epx.Mode.LOW_LATENCY)
        self.alloc_bytes = self.group.alloc_bytes
        self.uses: List[Use] = []
        self.living: List[Owner] = []  # of which the program has tensors
        self.in_session: List[Owner] = []  # that a session refers to
        self.giving: List[Owner] = []  # to the all-gather that begins
        self.heap = WatchedHeap(self)
        self.gathers = Sessions(self)
        self.just_gathered: List[Owner] = []
        self.old: List[torch.Tensor] = []  # that have lost their memory
        self.made = 0
        self.graphs = False  # True: some memory is of graphs
        small = self.alloc_bytes // 64
        self.of_graphs = [self.form(rng.choice((300, small, small + 1, 5000, rng.randint(1, self.alloc_bytes // 3))))
                          for _ in range(3)]
        self.calls: Dict[Callable[[], None], float] = {
            self.make: 8, self.use: 5, self.view: 1, self.drop: 5,
            self.revoke: 1.5, self.prepare: 0.5, self.capture: 1, self.export: 0.8, self.export_all: 0.5,
            self.gather: 4, self.end_session: 2}

    # ---- What is checked

    def alive(self) -> List[Owner]:
        """All that have memory."""
        return [owner for owner in {id(one): one for one in (*self.living, *self.giving, *self.in_session)}.values()
                if not owner.revoked]

    def owner(self, kind: str, tensor: torch.Tensor, captured: bool = False) -> Owner:
        """A new owner of memory, whose first work is queued on the current stream. What is captured runs at any later
        time: no work has used its memory."""
        self.made += 1
        begin = tensor.data_ptr() - self.group.alloc_address
        owner, stream = Owner(kind, self.made, begin, (tensor.nbytes + 255) // 256 * 256), now[0]
        owner.tensor = tensor
        self.text.append("    %s" % owner)
        assert 0 <= begin and owner.end <= self.alloc_bytes and self.heap.holds(tensor), "outside: %s" % owner
        for other in self.alive():
            assert not owner.overlaps(other), "%s overlaps %s" % (owner, other)
        before = [use for use in self.uses if owner.overlaps(use.owner)]
        if captured:
            assert not before, "%s may be replayed before %s" % (owner, before[0])
            return owner
        number = self.clocks.work(stream)
        for use in before:
            assert self.clocks.is_behind(stream, use.stream, use.number), "%s does not wait for %s" % (owner, use)
        self.uses = [use for use in self.uses if use.owner.begin < owner.begin or owner.end < use.owner.end]
        self.uses.append(Use(owner, stream, number))
        return owner

    def used(self, owner: Owner) -> None:
        """Work of the current stream uses what an owner has."""
        if now[0] is not owner.home:
            self.clocks.wait(now[0], owner.home)
        self.uses.append(Use(owner, now[0], self.clocks.work(now[0])))

    # ---- Calls

    def size(self) -> int:
        """Bytes of a tensor: around the border between small and large ones, and of all parts of the heap."""
        rng, whole, small = self.rng, self.alloc_bytes, self.alloc_bytes // 64
        return rng.choice((small - 1, small, small + 1, small + 257, rng.randint(1, small), rng.randint(1, 4 * small),
                           rng.randint(1, whole // 4), rng.randint(1, whole // 2), rng.randint(1, whole)))

    def form(self, nbytes: int) -> Form:
        """One tensor of so many bytes, and sometimes others in the same piece."""
        rng, parts = self.rng, []
        for size in (nbytes, *(rng.randint(1, 600) for _ in range(rng.choice((0, 0, 1, 2))))):
            part: Part = ((size,), torch.uint8, None)
            if rng.random() < 0.2:
                part = ((4, -(-size // 8)), torch.bfloat16, None)
            elif rng.random() < 0.1:
                part = ((4, -(-size // 16)), torch.float32, (1, 4))
            parts.append(part)
        return Form(*parts)

    def some(self, fits: Callable[[Owner], bool] = lambda owner: True) -> Optional[Owner]:
        """An owner that has tensors."""
        found = [owner for owner in self.living if fits(owner)]
        return self.rng.choice(found) if found else None

    def make(self) -> None:
        """Tensors that are made together."""
        for tensor in self.heap.try_make(self.form(self.size())) or ():
            self.living.append(self.owner("tensor", tensor))

    def view(self) -> None:
        """In place of a tensor."""
        owner = self.some()
        if owner is not None and owner.tensor is not None:
            self.text.append("    of %s" % owner)
            owner.tensor = owner.tensor[-1:]

    def use(self) -> None:
        """Work of the current stream, of which the heap learns if another stream has made the tensor; sometimes of
        tensors that have no memory."""
        if self.old and self.rng.random() < 0.1:
            use_on(now[0], [self.rng.choice(self.old)])  # type: ignore[arg-type]
        owner = self.some()
        if owner is None:
            return
        self.text.append("    of %s%s" % (owner, ", in a capture" if capturing[0] else ""))
        if not (capturing[0] or owner.revoked or owner.kind == "captured"):
            self.used(owner)
        if now[0] is not owner.reserved_on:
            use_on(now[0], [owner.tensor])  # type: ignore[arg-type]

    def drop(self) -> None:
        """A tensor whose last work, on the stream that drops it, is reported nowhere."""
        owner = self.some(lambda owner: owner.kind != "gathered" or self.rng.random() < 0.3)
        if owner is None:
            return
        used = self.rng.random() < 0.5 and not (capturing[0] or owner in self.in_session or owner.revoked or
                                                owner.kind == "captured")
        self.text.append("    %s%s" % (owner, " after a use" if used else ""))
        if used:
            self.used(owner)
        self.living.remove(owner)
        owner.tensor = None

    def revoke(self) -> None:
        """Memory is taken from its tensor. The current stream may have used it."""
        owner = self.some(lambda owner: owner.kind == "tensor" and owner not in self.in_session and not owner.revoked)
        if owner is None or owner.tensor is None:
            return
        used = self.rng.random() < 0.5
        self.text.append("    %s%s" % (owner, " after a use" if used else ""))
        if used:
            self.used(owner)
        self.heap.revoke(owner.begin + self.group.alloc_address)
        assert owner.revoked
        self.living.remove(owner)
        self.old.append(owner.tensor)
        owner.tensor = None
        if self.rng.random() < 0.5:
            self.old.pop(self.rng.randrange(len(self.old)))

    def prepare(self) -> None:
        """Memory for a graph."""
        self.graphs = True
        self.heap.prepare_graphs(self.rng.choice(self.of_graphs))

    def capture(self) -> None:
        """Calls that are captured on the current stream, and others in between."""
        stream = now[0] if now[0] is not default else side  # torch captures no default stream
        capturing[0] = True
        try:
            for _ in range(self.rng.randint(1, 4)):
                call = self.rng.choice((None, None, self.drop, self.use, self.refuse, self.end_session))
                with on_stream(stream if call is None else self.rng.choice(streams)):
                    if call is not None:
                        self.text.append("  %s: %s" % (now[0].name, call.__name__))
                        call()
                        continue
                    form = self.rng.choice(self.of_graphs)
                    self.graphs = True
                    for tensor in self.heap.try_capture(form) or ():
                        self.living.append(self.owner("captured", tensor, captured=True))
        finally:
            capturing[0] = False

    def refuse(self) -> None:
        """What a capture does not get."""
        assert self.heap.try_make(self.form(self.size())) is None and self.heap.export(self.size()) is None

    def export(self, nbytes: int = 0) -> None:
        """Scratch memory."""
        nbytes = nbytes or self.rng.choice((self.size(), self.size(), self.alloc_bytes))
        empty = not self.alive() and not self.graphs
        tensor = self.heap.export(nbytes)
        assert tensor is not None or not empty, "no tensor is in the heap, and it is not exported"
        if tensor is not None:
            self.living.append(self.owner("export", tensor))

    def export_all(self) -> None:
        """The whole heap, without any tensor in it."""
        if self.gathers.runs or self.in_session:
            return
        while self.living:
            with on_stream(self.rng.choice(streams)):
                self.living.pop().tensor = None
        self.export(self.alloc_bytes)

    # ---- All-gathers

    def gathers_into(self, place: _Place) -> None:
        """A session has memory for an all-gather."""
        owner = self.owner("gathered", place.flat)
        owner.tensor = None
        self.in_session.append(owner)
        self.just_gathered.append(owner)

    def sends(self, t: torch.Tensor, place: _Place, stream: Stream) -> None:
        """Work of the communication stream reads a tensor and writes the gathered one."""
        number = self.clocks.work(stream)
        for tensor in (t, place.flat):
            at = tensor.data_ptr() - self.group.alloc_address
            if 0 <= at < self.alloc_bytes:
                owner = next((one for one in self.alive() if one.begin <= at < one.end), None)
                assert owner is not None, "what is gathered has lost its memory"
                assert self.clocks.is_behind(stream, owner.home, self.last(owner)), \
                    "the all-gather does not wait for %s" % owner
                self.uses.append(Use(owner, stream, number))
                self.in_session.append(owner)

    def last(self, owner: Owner) -> int:
        """The number of the last work of its home that uses what an owner has."""
        return max((use.number for use in self.uses if use.owner is owner and use.stream is owner.home), default=0)

    def given(self, nbytes: int) -> torch.Tensor:
        """What is gathered: a tensor of torch's, or one that is in the heap."""
        owner = self.some(lambda owner: not owner.revoked and owner.kind != "captured" and
                          owner.tensor is not None and owner.tensor.is_contiguous())
        if owner is None or owner.tensor is None or self.rng.random() < 0.5:
            return torch.empty(nbytes, dtype=torch.uint8)
        self.text.append("    of %s" % owner)
        self.clocks.wait(now[0], owner.home)
        self.giving.append(owner)
        t = owner.tensor
        t = t[self.rng.randrange(len(t))] if t.dim() > 1 else t
        if owner.kind == "gathered" and self.rng.random() < 0.4:
            self.living.remove(owner)
            owner.tensor = None
        return t

    def gather(self) -> None:
        """One all-gather, of a new session if there is none."""
        rng, stream = self.rng, now[0]
        if stream is comm:
            return
        if not self.gathers.runs:
            self.gathers.begin()
        sizes = [self.size() // RANKS + 1 for _ in range(rng.choice((1, 1, 2, 3)))]
        self.just_gathered = []
        try:
            if rng.random() < 0.4:
                given = list(self.gathers.inplace([(size,) for size in sizes], torch.uint8))
            else:
                given = [self.given(size) for size in sizes]
            *results, wait = self.gathers.run(given)
        except epx.UsageError as error:
            assert "expected room" in str(error), str(error)
            return
        finally:
            self.forget_revoked()
            self.giving = []
        if rng.random() < 0.7:
            wait()
        for result, owner in zip(results, self.just_gathered):
            owner.home = stream if self.clocks.is_behind(stream, comm, self.last_of(comm)) else comm
            if self.heap.holds(result):  # it is no copy
                owner.tensor = result
                self.living.append(owner)

    def last_of(self, stream: Stream) -> int:
        """The number of the last work of a stream."""
        return max((use.number for use in self.uses if use.stream is stream), default=0)

    def forget_revoked(self) -> None:
        """Tensors whose memory the session took."""
        for owner in [owner for owner in self.living if owner.revoked]:
            self.text.append("    revoked: %s" % owner)
            assert owner not in (*self.in_session, *self.giving), "%s is gathered in this session" % owner
            self.living.remove(owner)
            if owner.tensor is not None:
                self.old.append(owner.tensor)

    def end_session(self) -> None:
        """On any stream."""
        if self.gathers.runs:
            self.gathers.end()

    # ---- The whole

    def step(self) -> None:
        """One call on one stream."""
        with on_stream(self.rng.choice(streams)):
            call = self.rng.choices(list(self.calls), list(self.calls.values()))[0]
            self.text.append("%s: %s" % (now[0].name, call.__name__))
            call()

    def drop_some(self, share: float) -> None:
        """A part of the tensors."""
        for owner in self.living:
            if self.rng.random() < share:
                owner.tensor = None

    def finish(self) -> None:
        """The end: the memory of the group goes with the last tensor."""
        self.text.append("the end")
        self.drop_some(0.3)
        self.gathers.close(False)
        self.in_session, self.just_gathered = [], []
        self.group.destroy()
        left = any(owner.tensor is not None for owner in self.living)
        assert self.group.alive or not left, "the memory of tensors is gone"
        self.old, self.uses = [], []
        self.drop_some(1)
        assert not self.group.alive, "nobody has tensors, and the memory of the group is there"

    def run(self) -> None:
        """All of it. A failure shows the last steps."""
        try:
            with self.clocks.shown():
                for _ in range(STEPS):
                    self.step()
                self.finish()
        except Exception as failure:
            raise AssertionError("%r\n%s" % (failure, "\n".join(self.text[-16:]))) from failure
