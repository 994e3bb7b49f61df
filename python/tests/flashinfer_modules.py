# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's own fleet, handle and masks over NCCL EP (flashinfer.moe_ep) on EPX's nccl.ep (make frameworks).
EPX_TEST_FLASHINFER is the folder of a dozen files of its wheel.

Tokens are small whole numbers, exact in bf16 however they are summed. Expert e multiplies by 1 + e % 2.
"""

import contextlib
import importlib
import itertools
import os
import warnings
from typing import Any, Iterator, List, Optional
from unittest import mock

import torch
import torch.distributed as dist
from foreign import Finder
from suite import World

import nccl.ep as ep

HIDDEN, TOKENS, TOPK, LOCAL = 2048, 6, 2, 2
_MOE = "flashinfer.moe_ep."
_NCCL_EP = _MOE + "backends.split.comm.nccl_ep."
_REAL = tuple(_MOE + name for name in (
    "errors", "algo_knobs", "config", "weights", "core.bootstrap_utils", "core.validation.common", "core.comm.fleet",
    "core.comm.handle", "core.comm.fault_tolerance")) + tuple(_NCCL_EP + name for name in (
        "fleet", "handle", "_mask_ffi"))


def module(world: World, name: str) -> Any:
    folder = os.environ.get("EPX_TEST_FLASHINFER", "")
    if not os.path.isdir(folder):
        world.skip("EPX_TEST_FLASHINFER: no files of FlashInfer")
    # What the package itself has: is the back end built? The folder's other modules are kernels.
    Finder("flashinfer", folder, _REAL, {_MOE[:-1]: {"_require_built": lambda backend: None}}).install()
    return importlib.import_module(_MOE + name if not name.startswith("flashinfer") else name)


class OnGpu(torch.Tensor):
    """Handle.update wants its indices on a GPU."""

    is_cuda = True  # type: ignore[assignment]


@contextlib.contextmanager
def played_gpu(world: World) -> Iterator[None]:
    """Memory that FlashInfer asks for on a GPU, or pinned, is the host's where there is none."""
    empty = torch.empty
    with contextlib.ExitStack() as stack:
        if world.device.type == "cpu":
            stack.enter_context(mock.patch.object(torch, "empty", lambda *size, device=None, pin_memory=False, **more:
                                                  empty(*size, **more)))
            stack.enter_context(mock.patch.object(torch.version, "cuda", None))
            stack.enter_context(mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False))
        yield


class Case:
    """A fleet of all ranks, and every rank's tokens and routing."""

    def __init__(self, world: World, algorithm: str, layout: str = "EXPERT_MAJOR", knobs: Any = ()) -> None:
        self.world, self.config = world, module(world, "config")
        self.knobs = module(world, "algo_knobs")
        self.experts = LOCAL * world.nranks
        self.stream = torch.cuda.current_stream().cuda_stream if world.device.type == "cuda" else 7
        bootstrap = self.config.BootstrapConfig(world_size=world.nranks, rank=world.rank, stream=self.stream)
        params = self.config.FleetParams(
            num_experts=self.experts, max_tokens_per_rank=TOKENS, token_hidden_size=HIDDEN,
            algorithm=self.config.EpAlgorithm[algorithm], layout=self.config.EpLayout[layout])
        fleet = module(world, _NCCL_EP + "fleet").NcclEpFleet
        self.fleet = fleet(bootstrap, params, [getattr(self.knobs, name)(**more) for name, more in knobs])
        self.active = [True] * world.nranks
        self.draw(1)

    def draw(self, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)  # the same on all ranks
        shape = (self.world.nranks, TOKENS)
        self.all_idx = torch.stack([torch.stack([torch.randperm(self.experts, generator=rng)[:TOPK]
                                                 for _ in range(TOKENS)]) for _ in range(shape[0])])
        self.all_idx[:, TOKENS - 1, 1] = -1
        self.all_tokens = (torch.randint(1, 16, (*shape, 1), generator=rng) + torch.arange(HIDDEN) % 5).bfloat16()
        self.all_weights = torch.tensor([0.5, 0.25]).repeat(*shape, 1)
        mine = self.world.rank
        self.idx, self.tokens, self.weights = (self.world.to(t[mine].contiguous()) for t in (
            self.all_idx, self.all_tokens, self.all_weights))

    def handle(self, *more: Any) -> Any:
        params = self.config.HandleParams(topk_ids=self.idx)
        weights = self.knobs.HandleAlgoKnobTopKWeights(weights=self.weights)
        return self.fleet.create_handle(params, [weights, *more])

    def synchronize(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        else:
            ep.synchronize(self.stream)

    def dispatch(self, handle: Any) -> Any:
        out = handle.dispatch(self.config.DispatchInputParams(x=[self.tokens]))
        self.synchronize()
        return out

    def combine(self, handle: Any, rows: torch.Tensor) -> torch.Tensor:
        out = handle.combine(self.config.CombineInputParams(x=[rows]))
        self.synchronize()
        return out.x.cpu()

    def arriving(self, expert: int) -> List[Any]:
        """(rank, token, k) in the order of source and token."""
        return [hit for hit in itertools.product(range(self.world.nranks), range(TOKENS), range(TOPK))
                if self.all_idx[hit] == expert and self.active[hit[0]]]

    def check(self, combined: torch.Tensor, weighted: bool) -> None:
        for token in range(TOKENS):
            factor = sum((1 + int(e) % 2) * (float(w) if weighted else 1) for e, w in zip(
                self.all_idx[self.world.rank, token], self.all_weights[self.world.rank, token])
                if e >= 0 and self.active[int(e) // LOCAL])
            expected = self.all_tokens[self.world.rank, token].float() * factor
            assert torch.equal(combined[token].float(), expected), (token, combined[token, :3], expected[:3])


def expert_major(case: Case, handle: Any) -> None:
    out = case.dispatch(handle)
    rows, counts = out.expert_tensors, out.expert_counts.cpu()
    results = torch.full_like(rows, 9)
    for local in range(LOCAL):
        expert = case.world.rank * LOCAL + local
        hits = case.arriving(expert)
        assert counts[local] == len(hits), (counts, hits)
        expected = torch.stack([case.all_tokens[r, t] for r, t, _k in hits]) if hits else rows[local, :0].cpu()
        assert sorted(map(tuple, rows[local, :len(hits), :8].tolist())) == sorted(map(tuple, expected[:, :8].tolist()))
        assert torch.equal(rows[local, :len(hits)].cpu(), expected)
        results[local, :len(hits)] = rows[local, :len(hits)] * (1 + expert % 2)
    case.check(case.combine(handle, results), weighted=True)


def test_low_latency(world: World) -> None:
    """EXPERT_MAJOR, in one step and in two, with handles of every step and one that is updated."""
    with played_gpu(world):
        case = Case(world, "LOW_LATENCY")
        split = case.knobs.HandleAlgoKnobSplitOperation()
        for seed in range(1, 7):
            case.draw(seed)
            handle = case.handle(*([split] if seed % 2 else []))
            expert_major(case, handle)
            handle.destroy()
        handle = case.handle()
        for seed in (8, 9):
            case.draw(seed)
            idx = case.idx if world.device.type == "cuda" else case.idx.as_subclass(OnGpu)
            handle.update(case.config.HandleParams(topk_ids=idx))
            expert_major(case, handle)
        handle.destroy()
        case.fleet.destroy()


def test_rank_major(world: World) -> None:
    """The caller sums the experts of a rank, with the weights that came."""
    with played_gpu(world):
        case = Case(world, "LOW_LATENCY", "RANK_MAJOR")
        for seed in range(1, 4):
            case.draw(seed)
            handle = case.handle()
            out = case.dispatch(handle)
            rows = out.expert_tensors.cpu()
            idx, weights = (t.cpu().view(world.nranks, TOKENS, TOPK)
                            for t in (out.recv_topk_idx, out.recv_topk_weights))
            results = torch.full_like(rows, 9)
            for rank in range(world.nranks):
                sent = [t for t in range(TOKENS) if any(int(e) // LOCAL == world.rank for e in case.all_idx[rank, t])]
                assert out.expert_counts[rank] == len(sent)
                assert (idx[rank, len(sent):] == -1).all()
                for row, token in enumerate(sent):
                    assert torch.equal(rows[rank, row], case.all_tokens[rank, token])
                    assert torch.equal(weights[rank, row], case.all_weights[rank, token])
                    here = [int(e) % LOCAL if int(e) // LOCAL == world.rank else -1 for e in case.all_idx[rank, token]]
                    assert idx[rank, row].tolist() == here
                    factor = sum((1 + (world.rank * LOCAL + e) % 2) * float(w) for e, w in zip(here, weights[rank, row])
                                 if e >= 0)
                    results[rank, row] = rows[rank, row] * factor
            case.check(case.combine(handle, world.to(results)), weighted=True)
            handle.destroy()
        case.fleet.destroy()


def flat(case: Case, total: Optional[torch.Tensor], out: Any) -> torch.Tensor:
    """The experts' sums of the received rows."""
    world, rows = case.world, out.expert_tensors.reshape(-1, HIDDEN).cpu()
    idx, weights, results, at = out.recv_topk_idx.cpu(), out.recv_topk_weights.cpu(), torch.full_like(rows, 9), 0
    for rank, token in itertools.product(range(world.nranks), range(TOKENS)):
        pairs = zip(case.all_idx[rank, token], case.all_weights[rank, token])
        here = sorted((int(e) % LOCAL, float(w)) for e, w in pairs if e >= 0 and int(e) // LOCAL == world.rank)
        if not here:
            continue
        assert torch.equal(rows[at], case.all_tokens[rank, token])
        assert idx[at].tolist() == [e for e, _w in here] + [-1] * (TOPK - len(here))
        assert weights[at, :len(here)].tolist() == [w for _e, w in here]
        results[at] = rows[at] * sum(1 + (world.rank * LOCAL + e) % 2 for e, _w in here)
        at += 1
    assert total is None or int(total) == at, (total, at)
    return world.to(results)


def test_high_throughput(world: World) -> None:
    """FLAT, with the number of received rows and without."""
    with played_gpu(world):
        case = Case(world, "HIGH_THROUGHPUT")
        for seed in range(1, 5):
            case.draw(seed)
            total = world.to(torch.full((1,), -1, dtype=torch.int64 if seed == 2 else torch.int32))
            counted = [case.knobs.HandleAlgoKnobNumReceivedTokens(target=total)] if seed % 2 == 0 else []
            handle = case.handle(*counted)
            out = case.dispatch(handle)
            assert (out.recv_total_counter is None) == (not counted)
            case.check(case.combine(handle, flat(case, total if counted else None, out)), weighted=False)
            handle.destroy()
        case.fleet.destroy()


def test_masks(world: World) -> None:
    """The last rank is late: the others mask it by their deadline, go on without it, and readmit it."""
    if world.nranks == 1:
        world.skip("needs two ranks")
    late = world.nranks - 1
    timeout_ms = int(world.deadline(1500))
    with played_gpu(world):
        case = Case(world, "LOW_LATENCY", knobs=[("FleetAlgoKnobFaultTolerance", {"timeout_ms": timeout_ms})])
        fleet = case.fleet
        assert fleet.supports_fault_tolerance and not fleet.query_fault()
        handle = case.handle()
        expert_major(case, handle)
        handle.destroy()

        def query() -> List[int]:
            mask = fleet.query_active_mask()
            case.synchronize()
            return mask.cpu().tolist()

        assert query() == [1] * world.nranks
        fleet.set_active_mask([1] * world.nranks)
        assert query() == [1] * world.nranks
        dist.barrier()
        if world.rank != late:
            case.draw(2)
            handle = case.handle()
            case.dispatch(handle)  # ends at the deadline
            case.active[late] = False
            assert fleet.query_fault() and query() == [1] * late + [0]
            handle.destroy()
            case.draw(3)
            handle = case.handle()
            if late > 1:
                expert_major(case, handle)
            handle.destroy()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of NVIDIA's EXPERT_MAJOR, which leaves stale bytes
                fleet.clear_faults(readmit=True)
            assert not fleet.query_fault() and query() == [1] * world.nranks
        dist.barrier()
        case.active[late] = True
        case.draw(4)
        handle = case.handle()
        expert_major(case, handle)
        handle.destroy()
        fleet.destroy()
