# SPDX-License-Identifier: Apache-2.0
"""What TensorRT-LLM, vLLM and SGLang do with nccl.ep, call by call (make frameworks): their own files cannot be had
without their compiled parts, or are not released yet. Every value is compared.

Token t of rank r is a small whole number in all columns, exact in bf16; expert e multiplies by 1 + e % 2.
"""

import itertools
from typing import Any, List

import torch
from suite import World

import nccl.ep as ep
from nccl.ep.interop.torch import get_nccl_comm_from_group

TOKENS, HIDDEN, TOPK, LOCAL = 6, 512, 2, 2


class Case:
    """A group, and every rank's tokens and routing."""

    def __init__(self, world: World, algorithm: ep.Algorithm, idx: torch.dtype = torch.int64, **more: Any) -> None:
        self.world, self.experts = world, LOCAL * world.nranks
        self.stream = torch.cuda.current_stream().cuda_stream if world.device.type == "cuda" else 5
        self.comm = get_nccl_comm_from_group()
        self.group = ep.Group.create(self.comm, ep.GroupConfig(
            algorithm=algorithm, num_experts=self.experts, max_dispatch_tokens_per_rank=TOKENS,
            max_token_bytes=HIDDEN * 2, **more))
        rng = torch.Generator().manual_seed(5)  # the same on all ranks
        shape = (world.nranks, TOKENS)
        self.all_idx = torch.rand(*shape, self.experts, generator=rng).topk(TOPK, 2).indices
        self.all_idx[:, TOKENS - 1, 1] = -1
        self.all_tokens = torch.randint(1, 32, (*shape, 1), generator=rng).expand(*shape, HIDDEN).bfloat16()
        self.all_weights = torch.tensor([0.5, 0.25]).repeat(*shape, 1)
        self.idx = world.to(self.all_idx[world.rank].to(idx).contiguous())
        self.tokens, self.weights = (world.to(t[world.rank].contiguous()) for t in (self.all_tokens, self.all_weights))

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16, fill: int = 9) -> torch.Tensor:
        return torch.full(shape, fill, dtype=dtype, device=self.world.device)

    def synchronize(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        else:
            ep.synchronize(self.stream)

    def sent_to(self, rank: int, source: int) -> List[int]:
        """Tokens of a source with an expert of the rank."""
        return [t for t in range(TOKENS) if any(e >= 0 and int(e) // LOCAL == rank for e in self.all_idx[source, t])]

    def here(self, source: int, token: int) -> List[int]:
        """By k: the expert, if it is one of this rank; else -1."""
        return [int(e) if e >= 0 and int(e) // LOCAL == self.world.rank else -1 for e in self.all_idx[source, token]]

    def check(self, combined: torch.Tensor, weighted: bool) -> None:
        rank = self.world.rank
        for token in range(TOKENS):
            factor = sum((1 + int(e) % 2) * (float(w) if weighted else 1)
                         for e, w in zip(self.all_idx[rank, token], self.all_weights[rank, token]) if e >= 0)
            assert (combined[token].cpu().float() == float(self.all_tokens[rank, token, 0]) * factor).all(), token

    def close(self) -> None:
        self.group.destroy()
        self.comm.destroy()


def test_tensorrt_llm(world: World) -> None:
    """Since 0.2: int32 indices, global ids by the kept struct, ids not filled before; a deadline of its own."""
    assert ep.get_lib_version() >= type(ep.get_lib_version())("0.2")
    case = Case(world, ep.Algorithm.LOW_LATENCY, torch.int32, zero_copy=ep.ZeroCopyMode.AUTO)
    case.group.set_timeout_ns(90 * 10**9)
    handle = case.group.create_handle(ep.Layout.RANK_MAJOR, ep.Tensor(case.idx), stream=case.stream)
    rows, counts = case.empty(world.nranks, TOKENS, HIDDEN), case.empty(world.nranks, dtype=torch.int32)
    ids = case.empty(world.nranks, TOKENS, TOPK, dtype=torch.int32, fill=77)
    weights = case.empty(world.nranks, TOKENS, TOPK, dtype=torch.float32)
    info = ep.LayoutInfo(src_rank_counters=ep.Tensor(counts))
    info._lowpp.recv_topk_idx_kind = int(ep.ExpertIdKind.GLOBAL)
    for _ in range(2):
        handle.dispatch(
            ep.DispatchInputs(tokens=ep.Tensor(case.tokens), topk_weights=ep.Tensor(case.weights)),
            ep.DispatchOutputs(tokens=ep.Tensor(rows), topk_weights=ep.Tensor(weights), topk_idx=ep.Tensor(ids)),
            layout_info=info, config=ep.DispatchConfig(), stream=case.stream)
        handle.complete(stream=case.stream)
        case.synchronize()
        results = torch.full_like(rows, 9)
        for source in range(world.nranks):
            sent = case.sent_to(world.rank, source)
            assert counts[source] == len(sent) and (ids[source, len(sent):] == -1).all()
            for row, token in enumerate(sent):
                assert torch.equal(rows[source, row].cpu(), case.all_tokens[source, token])
                assert ids[source, row].tolist() == case.here(source, token)
                assert torch.equal(weights[source, row].cpu(), case.all_weights[source, token])
                results[source, row] = rows[source, row] * sum(
                    (1 + e % 2) * float(w) for e, w in zip(ids[source, row].tolist(), weights[source, row]) if e >= 0)
        out = case.empty(TOKENS, HIDDEN)
        handle.combine(ep.CombineInputs(tokens=ep.Tensor(results)), ep.CombineOutputs(tokens=ep.Tensor(out)),
                       config=ep.CombineConfig(), stream=case.stream)
        handle.complete(stream=case.stream)
        case.synchronize()
        case.check(out, weighted=True)
    case.group.set_timeout_ns(None)
    handle.destroy()
    case.close()


def test_tensorrt_llm_recipes(world: World) -> None:
    """FP8 and NVFP4 rows with their scales, forwarded; what the experts make of them returns as NVFP4."""
    case = Case(world, ep.Algorithm.LOW_LATENCY, torch.int32)
    handle = case.group.create_handle(ep.Layout.RANK_MAJOR, ep.Tensor(case.idx), stream=case.stream)
    config = ep.DispatchConfig(quantization_recipe=ep.DispatchQuantizationRecipe.FWD)
    shape = (world.nranks, TOKENS)
    for kind, columns in ((ep.DataType.FLOAT8E4M3, HIDDEN), (ep.DataType.FLOAT4X2, HIDDEN // 2)):
        rng = torch.Generator().manual_seed(int(kind))
        values = torch.randint(0, 256, (*shape, columns), generator=rng).to(torch.uint8)
        scales = torch.randint(0, 256, (*shape, HIDDEN // 16), generator=rng).to(torch.uint8)
        own = [world.to(t[world.rank].contiguous()) for t in (values, scales)]
        rows, row_scales = case.empty(*values.shape, dtype=torch.uint8), case.empty(*scales.shape, dtype=torch.uint8)
        ids = case.empty(*shape, TOPK, dtype=torch.int32)
        weights = case.empty(*shape, TOPK, dtype=torch.float32)

        def described(tensor: torch.Tensor) -> ep.Tensor:
            return ep.Tensor(tensor.data_ptr(), dtype=kind, shape=tuple(tensor.shape))

        handle.dispatch(
            ep.DispatchInputs(tokens=described(own[0]), topk_weights=ep.Tensor(case.weights), scales=ep.Tensor(own[1])),
            ep.DispatchOutputs(tokens=described(rows), topk_weights=ep.Tensor(weights), topk_idx=ep.Tensor(ids),
                               scales=ep.Tensor(row_scales)), config=config, stream=case.stream)
        handle.complete(stream=case.stream)
        case.synchronize()
        for source in range(world.nranks):
            for row, token in enumerate(case.sent_to(world.rank, source)):
                assert torch.equal(rows[source, row].cpu(), values[source, token])
                assert torch.equal(row_scales[source, row].cpu(), scales[source, token])
    if world.device.type == "cpu":  # on a GPU it depends on which one
        results = case.empty(*shape, HIDDEN, fill=6)
        out, factors = case.empty(TOKENS, HIDDEN), torch.full((*shape, 1), 2688 / 6)
        handle.combine(ep.CombineInputs(tokens=ep.Tensor(results), scales=ep.Tensor(factors)),
                       ep.CombineOutputs(tokens=ep.Tensor(out)), stream=case.stream,
                       config=ep.CombineConfig(quantization_recipe=ep.CombineQuantizationRecipe.NVFP4))
        handle.complete(stream=case.stream)
        case.synchronize()
        for token in range(TOKENS):
            ranks = {int(e) // LOCAL for e in case.all_idx[world.rank, token] if e >= 0}
            assert (out[token] == 6 * len(ranks)).all()
    handle.destroy()
    case.close()


def test_vllm_low_latency(world: World) -> None:
    """EXPERT_MAJOR, sent and completed apart, as vLLM and SGLang overlap it; a new routing in the same handle."""
    case = Case(world, ep.Algorithm.LOW_LATENCY)
    handle = case.group.create_handle(ep.Layout.EXPERT_MAJOR, ep.Tensor(case.idx), stream=case.stream)
    rows = case.empty(LOCAL, world.nranks * TOKENS, HIDDEN)
    counts = case.empty(LOCAL, dtype=torch.int32)
    for turn in range(3):
        if turn:
            case.all_idx = case.all_idx.roll(1, 0)
            case.idx.copy_(case.all_idx[world.rank])
            handle.update(ep.Tensor(case.idx), stream=case.stream)
        handle.dispatch(ep.DispatchInputs(tokens=ep.Tensor(case.tokens)), ep.DispatchOutputs(tokens=ep.Tensor(rows)),
                        layout_info=ep.LayoutInfo(expert_counters=ep.Tensor(counts)),
                        config=ep.DispatchConfig(send_only=1), stream=case.stream)
        handle.complete(stream=case.stream)
        case.synchronize()
        results = torch.full_like(rows, 9)
        for local in range(LOCAL):
            expert = world.rank * LOCAL + local
            hits = [(r, t) for r, t, k in itertools.product(range(world.nranks), range(TOKENS), range(TOPK))
                    if case.all_idx[r, t, k] == expert]
            assert counts[local] == len(hits)
            for row, hit in enumerate(hits):
                assert torch.equal(rows[local, row].cpu(), case.all_tokens[hit])
            results[local, :len(hits)] = rows[local, :len(hits)] * (1 + expert % 2)
        out = case.empty(TOKENS, HIDDEN)
        handle.combine(ep.CombineInputs(tokens=ep.Tensor(results)),
                       ep.CombineOutputs(tokens=ep.Tensor(out), topk_weights=ep.Tensor(case.weights)),
                       config=ep.CombineConfig(send_only=1), stream=case.stream)
        handle.complete(stream=case.stream)
        case.synchronize()
        case.check(out, weighted=True)
    handle.destroy()
    case.close()


def test_vllm_high_throughput(world: World) -> None:
    """FLAT with the number of rows of the routing; local ids behind the counters."""
    most = world.nranks * TOKENS
    case = Case(world, ep.Algorithm.HIGH_THROUGHPUT, max_recv_tokens_per_rank=most)
    total, counts = case.empty(1, dtype=torch.int32), case.empty(LOCAL, dtype=torch.int32)
    handle = case.group.create_handle(
        ep.Layout.FLAT, ep.Tensor(case.idx), stream=case.stream,
        layout_info=ep.LayoutInfo(expert_counters=ep.Tensor(counts), recv_total_counter=ep.Tensor(total)))
    rows, ids = case.empty(most, HIDDEN), case.empty(most, TOPK, dtype=torch.int64)
    weights = case.empty(most, TOPK, dtype=torch.float32)
    handle.dispatch(
        ep.DispatchInputs(tokens=ep.Tensor(case.tokens), topk_weights=ep.Tensor(case.weights)),
        ep.DispatchOutputs(tokens=ep.Tensor(rows), topk_weights=ep.Tensor(weights), topk_idx=ep.Tensor(ids)),
        stream=case.stream)
    case.synchronize()
    results, at, experts = torch.full_like(rows, 9), 0, torch.zeros(LOCAL, dtype=torch.int32)
    for source in range(world.nranks):
        for token in case.sent_to(world.rank, source):
            pairs = zip(case.here(source, token), case.all_weights[source, token])
            here = sorted((e % LOCAL, float(w)) for e, w in pairs if e >= 0)
            assert torch.equal(rows[at].cpu(), case.all_tokens[source, token])
            assert ids[at].tolist() == [e for e, _w in here] + [-1] * (TOPK - len(here))
            assert weights[at, :len(here)].tolist() == [w for _e, w in here]
            results[at] = rows[at] * sum((1 + (world.rank * LOCAL + e) % 2) * w for e, w in here)
            for e, _w in here:
                experts[e] += 1
            at += 1
    assert int(total) == at and torch.equal(counts.cpu(), experts)
    out = case.empty(TOKENS, HIDDEN)
    handle.combine(ep.CombineInputs(tokens=ep.Tensor(results)), ep.CombineOutputs(tokens=ep.Tensor(out)),
                   stream=case.stream)
    case.synchronize()
    case.check(out, weighted=True)
    handle.destroy()
    case.close()
