# SPDX-License-Identifier: Apache-2.0
"""Random programs for the heap of a GPU: tensors that are made, used, dropped and revoked on any stream, memory of
graphs, exports, and sessions of all-gathers in the same heap.

The streams are those of played_cuda.py, with vector clocks: work that uses memory is behind all earlier work that used
it, because its stream has waited for that of the other, or the host has.
"""

import contextlib
import os
import random
import types
import weakref
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple
from unittest import mock

import epx
import torch
from deep_ep import _elastic_streams
from deep_ep._elastic_gather import Gathers, _Place
from deep_ep._memory import CudaHeap, Form, Part, Reserved, use_on
from played_cuda import Stream, by_number, capturing, comm, default, now, on_stream, side

STEPS = 100
RANKS = 2  # of the all-gathers

third = Stream("third", 9)
streams = (default, comm, side, third)


class Clocks:
    """Behind which work of each stream the next work of each stream runs, and how much of it the host has waited
    for."""

    def __init__(self) -> None:
        numbers = [stream.cuda_stream for stream in streams]
        self._behind = {number: dict.fromkeys(numbers, 0) for number in numbers}
        self._host = dict.fromkeys(numbers, 0)
        self.host_waits = 0

    @staticmethod
    def _merge(clock: Dict[int, int], other: Dict[int, int]) -> None:
        for number, count in other.items():
            clock[number] = max(clock[number], count)

    def wait(self, stream: Stream, other: Stream) -> None:
        """A stream waits for another one."""
        self._merge(self._behind[stream.cuda_stream], self._behind[other.cuda_stream])

    def synchronize(self, stream: Stream) -> None:
        """The host waits for a stream."""
        self.host_waits += 1
        self._merge(self._host, self._behind[stream.cuda_stream])

    def work(self, stream: Stream) -> int:
        """Queues work. Returns its number, among the work of this stream."""
        clock = self._behind[stream.cuda_stream]
        self._merge(clock, self._host)
        clock[stream.cuda_stream] += 1
        return clock[stream.cuda_stream]

    def is_behind(self, stream: Stream, other: Stream, number: int) -> bool:
        """Does what is queued next on a stream run behind this work of the other one?"""
        return max(self._behind[stream.cuda_stream][other.cuda_stream], self._host[other.cuda_stream]) >= number

    def is_done(self, stream: Stream, number: int) -> bool:
        """Has the host waited for this work?"""
        return self._host[stream.cuda_stream] >= number

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """All streams follow these clocks."""
        with mock.patch.object(Stream, "wait_stream", lambda stream, other: self.wait(stream, other)), \
                mock.patch.object(Stream, "synchronize", lambda stream: self.synchronize(stream)), \
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
    """Somebody who has a range of the heap: by tensors, by what makes them later, or because a session gathers it.
    `reserved_on`: the stream that made it. `home`: where its contents are ready."""

    memory: Optional["weakref.ref[Any]"] = None  # that can be revoked

    def __init__(self, kind: str, number: int, begin: int, nbytes: int) -> None:
        self.kind, self.number, self.begin, self.end = kind, number, begin, begin + nbytes
        self.reserved_on = self.home = now[0]
        self.tensors: List[torch.Tensor] = []
        self.reserved: Optional[Reserved] = None

    def __str__(self) -> str:
        return "%s %d at %d to %d" % (self.kind, self.number, self.begin, self.end)

    def overlaps(self, other: "Owner") -> bool:
        """Do they have memory in common?"""
        return self.begin < other.end and other.begin < self.end

    def revoked(self) -> bool:
        """Has the heap taken the memory back?"""
        lease = self.memory() if self.memory is not None else None
        return lease is not None and bool(lease._revoked)

    def revoke(self) -> None:
        """The heap takes the memory back."""
        lease = self.memory() if self.memory is not None else None
        if lease is not None:
            lease.revoke()

    def make(self) -> None:
        """The tensors, if they were only reserved."""
        if self.reserved is not None:
            self.tensors, self.reserved = self.reserved.tensors(), None

    def drop(self) -> None:
        """All that refers to the memory, but for sessions."""
        self.tensors, self.reserved = [], None


class WatchedHeap(CudaHeap):
    """Room that was promised is found."""

    promised = False

    def _make_room(self, forms: List[Form], stream: int) -> Any:
        self.promised = False
        made = super()._make_room(forms, stream)
        assert made or not self.promised, "the host waited, and there is no room for %s" % [
            form.nbytes for form in forms]
        return made

    def _room_for(self, forms: List[Form]) -> List[int]:
        sizes = super()._room_for(forms)
        self.promised = bool(sizes)
        return sizes


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
        self.heap = WatchedHeap(self.group, torch.device("cpu"))
        self.gathers = Sessions(self)
        self.uses: List[Use] = []
        self.living: List[Owner] = []  # of which the program has tensors
        self.in_session: List[Owner] = []  # that a session refers to
        self.giving: List[Owner] = []  # to the all-gather that begins
        self.just_gathered: List[Owner] = []
        self.old: List[List[torch.Tensor]] = []  # tensors that have lost their memory
        self.made = 0
        small = self.alloc_bytes // 64
        self.of_graphs = [self.form(rng.choice((300, small, small + 1, 5000, rng.randint(1, self.alloc_bytes // 3))))
                          for _ in range(3)]
        self.calls: Dict[Callable[[], None], float] = {
            self.make: 6, self.reserve: 2, self.use: 5, self.make_tensors: 1, self.view: 1, self.drop: 5,
            self.revoke: 1.5, self.prepare: 0.5, self.capture: 1, self.export: 0.8, self.export_all: 0.5,
            self.gather: 4, self.end_session: 2}

    # ---- What is checked

    def alive(self) -> List[Owner]:
        """All that have memory."""
        return [owner for owner in {id(one): one for one in (*self.living, *self.giving, *self.in_session)}.values()
                if not owner.revoked()]

    def owner(self, kind: str, address: int, nbytes: int, captured: bool = False) -> Owner:
        """A new owner of memory, whose first work is queued on the current stream. What is captured runs at any later
        time: the host has waited for the work before, but for that of exports, which replays may be behind."""
        self.made += 1
        begin = address - self.group.alloc_address
        owner, stream = Owner(kind, self.made, begin, nbytes), now[0]
        self.text.append("    %s" % owner)
        assert 0 <= begin and owner.end <= self.alloc_bytes, "outside of the heap: %s" % owner
        for other in self.alive():
            assert not owner.overlaps(other), "%s overlaps %s" % (owner, other)
        before = [use for use in self.uses if owner.overlaps(use.owner)]
        if captured:
            for use in before:
                assert use.owner.kind == "export" or self.clocks.is_done(use.stream, use.number), \
                    "%s may be replayed before %s" % (owner, use)
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
        """Tensors that share a piece."""
        form = self.form(self.size())
        made = self.heap.make_revocable(form)
        if made is None:
            return
        tensors, lease = made
        owner = self.owner("tensors", lease.address, form.nbytes)
        assert [tensor.data_ptr() - lease.address for tensor in tensors] == form.places
        assert self.heap.holds(tensors[0])
        owner.tensors, owner.memory = tensors, weakref.ref(lease)
        self.living.append(owner)

    def reserve(self) -> None:
        """Several pieces at once, of which the tensors are made later. Nobody waits on the host without `evict`."""
        forms = sorted((self.form(self.size()) for _ in range(self.rng.randint(1, 3))),
                       key=lambda form: form.nbytes, reverse=True)
        evict, waits = self.rng.random() < 0.7, self.clocks.host_waits
        self.text.append("    of %s bytes, evict=%s" % ([form.nbytes for form in forms], evict))
        reserved = self.heap.reserve_all(forms, evict)
        assert len(reserved) in (0, len(forms)), "only %d forms" % len(reserved)
        assert evict or waits == self.clocks.host_waits, "the host waited"
        for one, form in zip(reserved, forms):
            owner = self.owner("reserved", one.address, form.nbytes)
            owner.reserved, owner.memory = one, weakref.ref(one.lease)
            if self.rng.random() < 0.2:
                one.cut(1)
            self.living.append(owner)

    def make_tensors(self) -> None:
        """Of what was reserved."""
        owner = self.some(lambda owner: owner.reserved is not None)
        if owner is not None:
            self.text.append("    of %s" % owner)
            owner.make()

    def view(self) -> None:
        """In place of a tensor."""
        owner = self.some(lambda owner: bool(owner.tensors))
        if owner is not None:
            self.text.append("    of %s" % owner)
            which = self.rng.randrange(len(owner.tensors))
            owner.tensors[which] = owner.tensors[which][-1:]

    def use(self) -> None:
        """Work of the current stream, of which the heap learns if another stream has made the tensors; sometimes of
        tensors that have no memory."""
        if self.old and self.rng.random() < 0.1:
            use_on(now[0], self.rng.choice(self.old))  # type: ignore[arg-type]
        owner = self.some()
        if owner is None:
            return
        self.text.append("    of %s%s" % (owner, ", in a capture" if capturing[0] else ""))
        owner.make()
        if not (capturing[0] or owner.revoked() or owner.kind == "captured"):
            self.used(owner)
        if owner.tensors and now[0] is not owner.reserved_on:
            use_on(now[0], [self.rng.choice(owner.tensors)])  # type: ignore[arg-type]

    def drop(self) -> None:
        """One tensor, or all of an owner: its last work, on the stream that drops it, is told to nobody."""
        owner = self.some(lambda owner: owner.kind != "gathered" or self.rng.random() < 0.3)
        if owner is None:
            return
        if len(owner.tensors) > 1 and self.rng.random() < 0.3:
            self.text.append("    one tensor of %s" % owner)
            owner.tensors.pop(self.rng.randrange(len(owner.tensors)))
            return
        used = self.rng.random() < 0.5 and not (capturing[0] or owner in self.in_session or owner.revoked() or
                                                owner.kind == "captured")
        self.text.append("    %s%s" % (owner, " after a use" if used else ""))
        if used:
            self.used(owner)
        self.living.remove(owner)
        owner.drop()

    def revoke(self) -> None:
        """Memory is taken from its tensors. The current stream may have used it."""
        owner = self.some(lambda owner: owner.memory is not None and owner not in self.in_session
                          and not owner.revoked())
        if owner is None:
            return
        used = self.rng.random() < 0.5
        self.text.append("    %s%s" % (owner, " after a use" if used else ""))
        if used:
            self.used(owner)
        owner.make()
        for _ in range(self.rng.choice((1, 1, 2))):
            owner.revoke()
        self.living.remove(owner)
        self.old.append(owner.tensors)
        if self.rng.random() < 0.5:
            self.old.pop(self.rng.randrange(len(self.old)))

    def prepare(self) -> None:
        """Memory for a graph."""
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
                    tensors = self.heap.try_capture(form)
                    if tensors is not None:
                        owner = self.owner("captured", tensors[0].data_ptr(), form.nbytes, captured=True)
                        owner.tensors = tensors
                        self.living.append(owner)
        finally:
            capturing[0] = False

    def refuse(self) -> None:
        """What a capture does not get."""
        form = self.form(self.size())
        assert self.heap.make_revocable(form) is None and not self.heap.reserve_all([form])
        assert self.heap.export(form.nbytes) is None

    def export(self, nbytes: int = 0) -> None:
        """Scratch memory, of which there is one at a time."""
        nbytes = nbytes or self.rng.choice((self.size(), self.size(), self.alloc_bytes))
        has = any(owner.kind == "export" for owner in self.alive())
        empty = not self.alive()
        tensor = self.heap.export(nbytes)
        assert tensor is None or not has, "a second export"
        assert tensor is not None or not empty, "no tensor is in the heap, and it is not exported"
        if tensor is not None:
            # All of its piece, which is freed with it.
            piece = self.heap._pieces.get(tensor.data_ptr())
            owner = self.owner("export", tensor.data_ptr(), max(nbytes, piece.nbytes if piece is not None else 0))
            owner.tensors = [tensor]
            self.living.append(owner)

    def export_all(self) -> None:
        """The whole heap, without any tensor in it."""
        if self.gathers.runs or self.in_session:
            return
        while self.living:
            with on_stream(self.rng.choice(streams)):
                self.living.pop().drop()
        self.export(self.alloc_bytes)

    # ---- All-gathers

    def gathers_into(self, place: _Place) -> None:
        """A session has memory for an all-gather."""
        lease = place.memory() if place.memory is not None else None
        assert lease is not None
        owner = self.owner("gathered", lease.address, place.form.nbytes)
        owner.memory = place.memory
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
        owner = self.some(lambda owner: bool(owner.tensors) and not owner.revoked()
                          and owner.kind != "captured" and owner.tensors[0].is_contiguous())
        if owner is None or self.rng.random() < 0.5:
            return torch.empty(nbytes, dtype=torch.uint8)
        self.text.append("    of %s" % owner)
        self.clocks.wait(now[0], owner.home)
        self.giving.append(owner)
        t = owner.tensors[0]
        t = t[self.rng.randrange(len(t))] if t.dim() > 1 else t
        if owner.kind == "gathered" and self.rng.random() < 0.4:
            self.living.remove(owner)
            owner.drop()
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
                owner.tensors = [result]
                self.living.append(owner)

    def last_of(self, stream: Stream) -> int:
        """The number of the last work of a stream."""
        return max((use.number for use in self.uses if use.stream is stream), default=0)

    def forget_revoked(self) -> None:
        """Tensors whose memory the session took."""
        for owner in [owner for owner in self.living if owner.revoked()]:
            self.text.append("    revoked: %s" % owner)
            assert owner not in (*self.in_session, *self.giving), "%s is gathered in this session" % owner
            self.living.remove(owner)
            self.old.append(owner.tensors)

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
        """A part of the tensors, of which some lose their memory first."""
        for owner in self.living:
            if self.rng.random() < 0.3:
                owner.revoke()
            if self.rng.random() < share:
                owner.drop()

    def finish(self) -> None:
        """The end: the memory of the group goes with the last tensor."""
        self.text.append("the end")
        self.drop_some(0.3)
        self.gathers.close(False)
        self.in_session, self.just_gathered = [], []
        self.group.destroy()
        left = any(owner.tensors or owner.reserved for owner in self.living if not owner.revoked())
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
