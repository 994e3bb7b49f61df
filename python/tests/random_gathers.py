# SPDX-License-Identifier: Apache-2.0
"""Random sessions of all-gathers: see random_elastic.py. Ranks keep and drop gathered tensors as they like; those of
sessions that have ended are gathered again, or lose their memory to later ones."""

import math
import random
from typing import Any, List, Optional, Tuple
from unittest import mock

import deep_ep
import torch
import torch.distributed as dist
from deep_ep import _elastic_gather
from deep_ep._elastic_sizes import up
from random_elastic import same
from suite import World

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)
MOST_GATHERS = 30
SMALL = 1 << 16  # bytes for small tensors

Call = Tuple[Any, List[torch.Tensor], List[torch.Tensor]]  # handle, gathered, wanted


class Kept:
    """A gathered tensor and what it has. `memory`: what can be taken from it, if it is in the heap."""

    def __init__(self, got: torch.Tensor, want: torch.Tensor) -> None:
        self.got, self.want = got, want
        self.memory: Any = None


class Sessions:
    """One buffer and its sessions."""

    def __init__(self, world: World, seed: int, group: Any, ranks: int, _per_node: int) -> None:
        self.world, self.rng, self.me = world, random.Random(seed), world.rank
        self.own = random.Random(100 * seed + world.rank)  # what this rank keeps
        self.group, self.ranks = group, ranks
        self.share = self.rng.choice((1 << 16, 100000, 1 << 18))  # bytes of a rank in a session
        self.buffer = deep_ep.ElasticBuffer(group, num_bytes=up(self.share * ranks, 2 << 20), explicitly_destroy=True)
        self.kept: List[Kept] = []  # by all ranks
        self.more: List[Kept] = []  # by this one
        self.given: List[Kept] = []  # to this session
        self.text: List[str] = ["share=%d" % self.share]
        # As heap_bytes(), with less for small tensors: sessions fill the memory.
        with mock.patch.object(_elastic_gather, "heap_bytes",
                               lambda nbytes: up(2 * (nbytes + nbytes // 7) + SMALL, 4096)):
            self.buffer.agrs_set_config(self.share * ranks, MOST_GATHERS)

    def report(self, what: str, got: torch.Tensor, want: torch.Tensor) -> str:
        """A failure."""
        return "%s: got %s, expected %s\n%s" % (what, got, want, "\n".join(self.text[-12:]))

    def shape(self, room: int) -> Tuple[Tuple[int, ...], torch.dtype]:
        """Of what each rank gives, of at most so many bytes, and the type."""
        rng, share, dtype = self.rng, self.share, self.rng.choice(DTYPES)
        # No more: what is gathered again keeps its place, and the memory may have no room for half a session at once.
        nbytes = min(room, rng.choice((0, 1, rng.randint(1, 1000), 32769, share // 5, share // 4, share // 4,
                                       share // 4, rng.randint(1, share // 4), rng.randint(1, share // 4))))
        count = nbytes // dtype.itemsize
        return rng.choice(((count,), (count // 8, 8), (2, count // 6, 3))), dtype

    def values(self, shape: Tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """What all ranks give, [R, ...]."""
        gen = torch.Generator().manual_seed(self.rng.getrandbits(31))
        count = self.ranks * math.prod(shape) * dtype.itemsize
        return torch.randint(0, 120, (count,), generator=gen, dtype=torch.uint8).view(dtype).view(self.ranks, *shape)

    def has_memory(self, kept: Kept) -> bool:
        """Has no session taken it?"""
        return kept.memory is None or any(one is kept.memory for one in self.buffer._parts["gathers"]._ended)

    def gathered_before(self) -> Optional[Kept]:
        """A tensor that no rank has lost, often the oldest one, whose memory is the next to be taken."""
        said: List[Any] = [None] * self.ranks
        dist.all_gather_object(said, [self.has_memory(kept) for kept in self.kept], group=self.group)
        found = [kept for i, kept in enumerate(self.kept) if all(one[i] for one in said)]
        return None if not found else found[0] if self.rng.random() < 0.8 else self.rng.choice(found)

    def gather(self, room: int) -> Tuple[int, List[Call]]:
        """One tensor or several, in place or not, at once or one after the other: bytes of the session, and the
        calls."""
        rng, buffer = self.rng, self.buffer
        few, in_place, at_once = rng.choice((1, 1, 2, 3)), rng.random() < 0.4, rng.random() < 0.5
        wanted = [self.values(*self.shape(room // self.ranks // few)) for _ in range(few)]
        kept = self.gathered_before() if self.kept and rng.random() < 0.6 else None
        if kept is not None:
            which, place = rng.randrange(self.ranks), rng.randrange(few)
            wanted[place] = torch.stack([kept.want[which]] * self.ranks)
        used = sum(up(want.nbytes) for want in wanted) + (kept.want.nbytes if kept is not None else 0)
        if used > room:
            return 0, []
        mine = [self.world.to(want[self.me]) for want in wanted]
        if kept is not None:
            # What this call is given keeps its memory; what a later one is given may lose it to this one.
            if in_place or place and not at_once:
                mine[place] = kept.got[which].clone()
            else:
                mine[place] = kept.got[which]
                self.given.append(kept)
            if rng.random() < 0.3:
                self.kept.remove(kept)
            del kept
        self.text.append("gather %s in_place=%s at_once=%s" % (
            [(want.dtype, list(want.shape)) for want in wanted], in_place, at_once))
        if in_place:
            if len({t.dtype for t in mine}) > 1:
                mine = [t.contiguous().view(torch.uint8) if t.dim() else t for t in mine]
                wanted = [want.view(torch.uint8) for want in wanted]
            inplace = buffer.agrs_get_inplace_tensor([t.shape for t in mine], mine[0].dtype)
            mine = [one.copy_(t) for one, t in zip(inplace, mine)]
        if at_once:
            *got, wait = buffer.all_gather(mine)
            return used, [(wait, got, wanted)]
        calls = []
        for t, want in zip(mine, wanted):
            got, wait = buffer.all_gather(t)
            calls.append((wait, [got], [want]))
        return used, calls

    def unchanged(self) -> None:
        """What earlier sessions gathered, where nobody has taken its memory."""
        for kept in (*self.kept, *self.more):
            if self.has_memory(kept):
                assert same(kept.got, kept.want), self.report("of an earlier session", kept.got, kept.want)

    def step(self) -> None:
        """One session."""
        rng, room = self.rng, self.share * self.ranks
        calls: List[Call] = []
        self.text.append("session")
        with self.buffer.agrs_new_session():
            for _ in range(rng.randint(3, 6)):
                used, more = self.gather(room)
                room -= used
                calls += more
                if calls and rng.random() < 0.3:
                    rng.choice(calls)[0]()
            rng.shuffle(calls)
            results = []
            for wait, tensors, wanted in calls:
                wait()
                results += [Kept(got, want) for got, want in zip(tensors, wanted)]
            for one in results:
                assert same(one.got, one.want), self.report("gathered", one.got, one.want)
            for one in self.given:
                assert self.has_memory(one), self.report("taken from this session", one.got, one.want)
            self.given.clear()
            memories = [place.memory for place in self.buffer._parts["gathers"]._made if place.memory is not None]
        self.unchanged()
        for one in results:
            one.memory = next((memory for memory in memories if self.is_in(one.got, memory)), None)
            if rng.random() < 0.8:
                self.kept.append(one)
            elif self.own.random() < 0.8:
                self.more.append(one)
        if rng.random() < 0.1:
            self.kept = [one for one in self.kept if rng.random() < 0.5]
        if self.own.random() < 0.1:
            self.more.clear()

    @staticmethod
    def is_in(t: torch.Tensor, memory: Any) -> bool:
        """Is it a view of this memory?"""
        return memory is not None and t.numel() > 0 and 0 <= t.data_ptr() - memory.address < memory.nbytes

    def finish(self) -> None:
        """The end: tensors stay as they are behind it."""
        self.unchanged()
        left = [kept for kept in (*self.kept, *self.more) if self.has_memory(kept)]
        self.buffer.destroy()
        for kept in left:
            assert same(kept.got, kept.want), self.report("behind the end", kept.got, kept.want)
