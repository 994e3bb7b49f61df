# SPDX-License-Identifier: Apache-2.0
"""One rank of a program for nccl.ep, without torch and without a GPU: low latency staged and rank-major, high
throughput flat and expert-major, forward and backward; version 2's DROP, eager mode and recipes. Every value is
compared.

    nccl_program.py epx       EPX's own nccl.ep, with communicators of its own
    nccl_program.py nvidia    NVIDIA's nccl4py and nccl-extensions, pointed at libnccl_ep.so

scripts/check_nccl_python.sh runs both.

Rank r's token t is r * 100 + t + 1 in every column, exact in bf16 sums of this size; experts return what they get.
"""

import copy
import dataclasses
import os
import sys
import types
import weakref

import numpy as np

WHICH = sys.argv[1] if len(sys.argv) > 1 else "epx"
TOKENS, HIDDEN, TOPK, LOCAL = 6, 256, 2, 2


def communicator():
    """All ranks; every rank makes the id by itself (NCCL_COMM_ID)."""
    if WHICH == "epx":
        return ep.Communicator.from_launcher()
    import nccl.core as core
    os.environ.setdefault("NCCL_COMM_ID", "%s:%s" % (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]))
    return core.Communicator.init(int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]), core.get_unique_id())


import nccl.ep as ep  # noqa: E402

KINDS = {np.float32: 7, np.int64: 4, np.int32: 2, np.uint8: 1}  # ncclDataType_t
BF16, FP8 = 9, 10
EXPECTED = "nccl/ep" if WHICH == "epx" else "site-packages"


class Array:
    """NumPy memory and its descriptor, by address: what both packages take for memory of the host."""

    def __init__(self, shape, dtype=np.float32, fill=0, kind=None):
        self.np = np.full(shape, fill, dtype)
        self.ep = ep.Tensor(self.np.ctypes.data, dtype=kind or KINDS[dtype], shape=self.np.shape)


class Case:
    """This rank's tokens and routing."""

    def __init__(self, rank, nranks):
        self.rank, self.nranks, self.experts = rank, nranks, nranks * LOCAL
        self.tokens, self.weights = Array((TOKENS, HIDDEN)), Array((TOKENS, TOPK))
        self.idx, self.out = Array((TOKENS, TOPK), np.int64), Array((TOKENS, HIDDEN), fill=-1)
        self.tokens.np[:] = self.token(rank)[:, None]
        self.idx.np[:] = self.routing(rank)
        self.weights.np[:] = self.weight(rank)

    def token(self, rank):
        return rank * 100.0 + np.arange(TOKENS) + 1

    def routing(self, rank):
        first = (rank + np.arange(TOKENS)) % self.experts
        idx = np.stack([first, (first + 1 + np.arange(TOKENS) % 2) % self.experts], axis=1)
        idx[TOKENS - 1, 1] = -1  # the last token has one expert
        return idx

    def weight(self, rank):
        return np.float32([[0.5, 0.25]] * TOKENS) * (1 + rank % 2)

    def arriving(self, expert):
        """(rank, token, k) of the rows of an expert, in order."""
        return [(r, t, k) for r in range(self.nranks) for t in range(TOKENS) for k in range(TOPK)
                if self.routing(r)[t, k] == expert]

    def sums(self, weighted):
        valid = self.idx.np >= 0
        factor = (self.weights.np * valid).sum(1) if weighted else valid.sum(1)
        return np.repeat((self.token(self.rank) * factor)[:, None], HIDDEN, axis=1)


def group(comm, algorithm, **more):
    case = Case(comm.rank, comm.nranks)
    config = ep.GroupConfig(algorithm=algorithm, num_experts=case.experts, max_dispatch_tokens_per_rank=TOKENS,
                            max_token_bytes=HIDDEN * 4, **more)
    return ep.Group.create(comm, config), case


def check_expert_major(case, received, counters):
    for local in range(LOCAL):
        rows = case.arriving(case.rank * LOCAL + local)
        assert counters[local] == len(rows), (counters, rows)
        for row, (rank, token, _) in enumerate(rows):
            assert (received[local, row] == case.token(rank)[token]).all(), (local, row)


def low_latency(comm, staged):
    """EXPERT_MAJOR: the combine applies the weights."""
    own, case = group(comm, ep.Algorithm.LOW_LATENCY)
    received = Array((LOCAL, case.nranks * TOKENS, HIDDEN))
    counters = Array((LOCAL,), np.int32)
    handle = own.create_handle(ep.Layout.EXPERT_MAJOR, case.idx.ep, stream=0)
    for _ in range(3):
        received.np[:] = -1
        handle.dispatch(ep.DispatchInputs(tokens=case.tokens.ep), ep.DispatchOutputs(tokens=received.ep),
                        layout_info=ep.LayoutInfo(expert_counters=counters.ep),
                        config=ep.DispatchConfig(send_only=staged), stream=0)
        handle.complete(stream=0)
        synchronize()
        check_expert_major(case, received.np, counters.np)
        case.out.np[:] = -1
        handle.combine(ep.CombineInputs(tokens=received.ep),
                       ep.CombineOutputs(tokens=case.out.ep, topk_weights=case.weights.ep),
                       config=ep.CombineConfig(send_only=staged), stream=0)
        handle.complete(stream=0)
        synchronize()
        assert (case.out.np == case.sums(weighted=True)).all(), case.out.np[:, 0]
    handle.destroy()
    own.destroy()


def low_latency_rank_major(comm, by_struct):
    """RANK_MAJOR, with global ids: the caller sums the experts of a rank. by_struct: the kind of ids is set in the C
    struct that the object keeps, as TensorRT-LLM does it."""
    own, case = group(comm, ep.Algorithm.LOW_LATENCY)
    received = Array((case.nranks, TOKENS, HIDDEN))
    weights, ids = Array((case.nranks, TOKENS, TOPK)), Array((case.nranks, TOKENS, TOPK), np.int32, 77)
    counters = Array((case.nranks,), np.int32)
    handle = own.create_handle(ep.Layout.RANK_MAJOR, case.idx.ep, stream=0)
    info = ep.LayoutInfo(src_rank_counters=counters.ep)
    if by_struct:
        info._lowpp.recv_topk_idx_kind = int(ep.ExpertIdKind.GLOBAL)
    else:
        info = ep.LayoutInfo(src_rank_counters=counters.ep, recv_topk_idx_kind=ep.ExpertIdKind.GLOBAL)
    handle.dispatch(ep.DispatchInputs(tokens=case.tokens.ep, topk_weights=case.weights.ep),
                    ep.DispatchOutputs(tokens=received.ep, topk_weights=weights.ep, topk_idx=ids.ep),
                    layout_info=info, stream=0)
    synchronize()
    mine = range(case.rank * LOCAL, (case.rank + 1) * LOCAL)
    for rank in range(case.nranks):
        sent = [t for t in range(TOKENS) if any(e in mine for e in case.routing(rank)[t])]
        assert counters.np[rank] == len(sent)
        for row, token in enumerate(sent):
            assert (received.np[rank, row] == case.token(rank)[token]).all()
            here = [e if e in mine else -1 for e in case.routing(rank)[token]]
            assert list(ids.np[rank, row]) == here, (ids.np[rank, row], here)
            assert (weights.np[rank, row] == case.weight(rank)[token]).all()
            factor = sum(w for e, w in zip(here, case.weight(rank)[token]) if e >= 0)
            received.np[rank, row] *= factor
        assert (ids.np[rank, len(sent):] == -1).all()
    combine(case, handle, received, case.sums(weighted=True))
    handle.destroy()
    own.destroy()


def check_flat(case, received, ids, weights):
    """A row per (rank, token) that has an expert here."""
    mine, row = range(case.rank * LOCAL, (case.rank + 1) * LOCAL), 0
    for rank in range(case.nranks):
        for token in range(TOKENS):
            pairs = sorted((e - mine[0], w) for e, w in zip(case.routing(rank)[token], case.weight(rank)[token])
                           if e in mine)
            if pairs:
                assert (received[row] == case.token(rank)[token]).all(), row
                assert list(ids[row][:len(pairs)]) == [e for e, _ in pairs] and (ids[row][len(pairs):] == -1).all()
                assert list(weights[row][:len(pairs)]) == [w for _, w in pairs]
                received[row] *= len(pairs)  # the experts' results, summed
                row += 1
    return row


class Flat:
    """A handle of FLAT and what a dispatch of the case brings, in tensors of so many rows."""

    def __init__(self, own, case, rows):
        self.received, self.weights = Array((rows, HIDDEN), fill=-1), Array((rows, TOPK))
        self.ids, self.total = Array((rows, TOPK), np.int64), Array((1,), np.int32)
        self.counters = Array((LOCAL,), np.int32)
        info = ep.LayoutInfo(expert_counters=self.counters.ep, recv_total_counter=self.total.ep)
        self.handle = own.create_handle(ep.Layout.FLAT, case.idx.ep, layout_info=info, stream=0)
        self.handle.dispatch(ep.DispatchInputs(tokens=case.tokens.ep, topk_weights=case.weights.ep),
                             ep.DispatchOutputs(tokens=self.received.ep, topk_weights=self.weights.ep,
                                                topk_idx=self.ids.ep), stream=0)
        synchronize()


def combine(case, handle, received, expected):
    """Returns the rows as they are; without weights."""
    handle.combine(ep.CombineInputs(tokens=received.ep), ep.CombineOutputs(tokens=case.out.ep), stream=0)
    synchronize()
    assert (case.out.np == expected).all(), case.out.np[:, 0]


def high_throughput_flat(comm):
    rows = comm.nranks * TOKENS
    own, case = group(comm, ep.Algorithm.HIGH_THROUGHPUT, max_recv_tokens_per_rank=rows)
    flat = Flat(own, case, rows)
    assert flat.total.np[0] == check_flat(case, flat.received.np, flat.ids.np, flat.weights.np)
    assert list(flat.counters.np) == [len(case.arriving(case.rank * LOCAL + e)) for e in range(LOCAL)]
    combine(case, flat.handle, flat.received, case.sums(weighted=False))
    flat.handle.destroy()
    own.destroy()


def high_throughput_expert_major(comm, alignment=4):
    rows = comm.nranks * TOKENS * TOPK + LOCAL * alignment
    own, case = group(comm, ep.Algorithm.HIGH_THROUGHPUT, max_recv_tokens_per_rank=rows)
    received, weights = Array((rows, HIDDEN), fill=-1), Array((rows,), fill=-1)
    counters, offsets, total = Array((LOCAL,), np.int64), Array((LOCAL,), np.int64), Array((1,), np.int64)
    info = ep.LayoutInfo(expert_counters=counters.ep, expert_offsets=offsets.ep, recv_total_counter=total.ep)
    handle = own.create_handle(ep.Layout.EXPERT_MAJOR, case.idx.ep, layout_info=info, stream=0,
                               config=ep.HandleConfig(dispatch_output_per_expert_alignment=alignment))
    handle.dispatch(ep.DispatchInputs(tokens=case.tokens.ep, topk_weights=case.weights.ep),
                    ep.DispatchOutputs(tokens=received.ep, topk_weights=weights.ep), stream=0)
    synchronize()
    at = 0
    for local in range(LOCAL):
        pairs = case.arriving(case.rank * LOCAL + local)
        padded = -(-len(pairs) // alignment) * alignment
        assert offsets.np[local] == at and counters.np[local] == padded
        for row, (rank, token, k) in enumerate(pairs):
            assert (received.np[at + row] == case.token(rank)[token]).all()
            assert weights.np[at + row] == case.weight(rank)[token, k]
        assert (received.np[at + len(pairs):at + padded] == 0).all()
        at += padded
    assert total.np[0] == at
    combine(case, handle, received, case.sums(weighted=False))
    backward(case, handle, received, weights)
    handle.destroy()
    own.destroy()


def backward(case, handle, received, weights):
    """Weights come back in the order of k; -1 has none."""
    grads = Array((TOKENS, TOPK), fill=-1)
    handle.dispatch(ep.DispatchInputs(tokens=case.tokens.ep), ep.DispatchOutputs(tokens=received.ep),
                    config=ep.DispatchConfig(pass_direction=ep.PassDir.BWD), stream=0)
    handle.combine(ep.CombineInputs(tokens=received.ep, topk_weights=weights.ep),
                   ep.CombineOutputs(tokens=case.out.ep, topk_weights=grads.ep),
                   config=ep.CombineConfig(pass_direction=ep.PassDir.BWD), stream=0)
    synchronize()
    assert (grads.np == np.where(case.idx.np >= 0, case.weights.np, 0)).all(), grads.np


def drop(comm):
    """OverflowPolicy.DROP: every token goes to expert 0, and rank 0 takes the first TOKENS rows, its own."""
    own, case = group(comm, ep.Algorithm.HIGH_THROUGHPUT, max_recv_tokens_per_rank=TOKENS,
                      overflow_policy=ep.OverflowPolicy.DROP)
    case.idx.np[:] = [0, -1]
    flat = Flat(own, case, TOKENS)
    assert (flat.total.np[0], flat.counters.np[0]) == ((0, 0) if case.rank else (case.nranks * TOKENS, TOKENS))
    assert case.rank or (flat.received.np == case.token(0)[:, None]).all()
    combine(case, flat.handle, flat.received, 0 if case.rank else case.tokens.np)
    flat.handle.destroy()
    own.destroy()


def eager(comm):
    """No max_recv_tokens_per_rank: tensors have as many rows as came. Expert-major, which needs num_topk."""
    own, case = group(comm, ep.Algorithm.HIGH_THROUGHPUT, num_topk=TOPK)
    total = Array((1,), np.int32)
    handle = own.create_handle(ep.Layout.EXPERT_MAJOR, case.idx.ep, stream=0,
                               layout_info=ep.LayoutInfo(recv_total_counter=total.ep))
    synchronize()
    expected = [case.token(r)[t] for e in range(LOCAL) for r, t, _ in case.arriving(case.rank * LOCAL + e)]
    assert total.np[0] == len(expected)
    for rows in (len(expected) - 1, len(expected)):
        received, weights = Array((rows, HIDDEN)), Array((rows,))
        try:
            handle.dispatch(ep.DispatchInputs(tokens=case.tokens.ep, topk_weights=case.weights.ep),
                            ep.DispatchOutputs(tokens=received.ep, topk_weights=weights.ep), stream=0)
        except Exception as error:  # NCCLEpError lies in different modules
            assert rows < len(expected) and error.status == 4, error
        else:
            assert rows == len(expected)
    synchronize()
    assert (received.np == np.array(expected)[:, None]).all()
    handle.destroy()
    own.destroy()


def forward_scales(comm):
    """Recipe FWD: bytes of tokens and of scales arrive as they were."""
    rows = comm.nranks * TOKENS
    own, case = group(comm, ep.Algorithm.HIGH_THROUGHPUT, max_recv_tokens_per_rank=rows)
    tokens, scales = Array((TOKENS, HIDDEN), np.uint8, kind=FP8), Array((TOKENS, 32), np.uint8)
    tokens.np[:] = (np.arange(TOKENS * HIDDEN).reshape(TOKENS, HIDDEN) * 7 + case.rank) % 256
    scales.np[:] = np.arange(TOKENS)[:, None] + 16 * case.rank
    case.idx.np[:] = [case.rank * LOCAL, -1]  # to itself
    received, received_scales = Array((rows, HIDDEN), np.uint8, kind=FP8), Array((rows, 32), np.uint8)
    weights, ids = Array((rows, TOPK)), Array((rows, TOPK), np.int64)
    handle = own.create_handle(ep.Layout.FLAT, case.idx.ep, stream=0)
    handle.dispatch(ep.DispatchInputs(tokens=tokens.ep, topk_weights=case.weights.ep, scales=scales.ep),
                    ep.DispatchOutputs(tokens=received.ep, topk_weights=weights.ep, scales=received_scales.ep,
                                       topk_idx=ids.ep),
                    config=ep.DispatchConfig(quantization_recipe=ep.DispatchQuantizationRecipe.FWD), stream=0)
    synchronize()
    assert (received.np[:TOKENS] == tokens.np).all() and (received_scales.np[:TOKENS] == scales.np).all()
    handle.destroy()
    own.destroy()


def quantised(comm):
    """Low latency's recipes: ones are cast to 448 / 448, and sixes come back through NVFP4, once of each rank."""
    hidden, own, case = 512, *group(comm, ep.Algorithm.LOW_LATENCY)
    tokens = Array((TOKENS, hidden), np.uint16, 0x3f80, BF16)  # 1.0
    codes = Array((case.nranks, TOKENS, hidden), np.uint8, kind=FP8)
    scales, weights = Array((case.nranks, TOKENS, hidden // 128)), Array((case.nranks, TOKENS, TOPK))
    ids, counters = Array((case.nranks, TOKENS, TOPK), np.int32), Array((case.nranks,), np.int32)
    handle = own.create_handle(ep.Layout.RANK_MAJOR, case.idx.ep, stream=0)
    handle.dispatch(ep.DispatchInputs(tokens=tokens.ep, topk_weights=case.weights.ep),
                    ep.DispatchOutputs(tokens=codes.ep, topk_weights=weights.ep, scales=scales.ep, topk_idx=ids.ep),
                    layout_info=ep.LayoutInfo(src_rank_counters=counters.ep),
                    config=ep.DispatchConfig(quantization_recipe=ep.DispatchQuantizationRecipe.DS_FP8E3M4), stream=0)
    synchronize()
    for rank in range(case.nranks):
        came = counters.np[rank]
        assert (codes.np[rank, :came] == 0x7e).all() and (scales.np[rank, :came] == np.float32(1) / 448).all()
    rows = Array((case.nranks, TOKENS, hidden), np.uint16, 0x40c0, BF16)  # 6.0
    factors, out = Array((case.nranks, TOKENS, 1), fill=2688 / 6), Array((TOKENS, hidden), np.uint16, 0, BF16)
    handle.combine(ep.CombineInputs(tokens=rows.ep, scales=factors.ep), ep.CombineOutputs(tokens=out.ep),
                   config=ep.CombineConfig(quantization_recipe=ep.CombineQuantizationRecipe.NVFP4), stream=0)
    synchronize()
    ranks = [len({e // LOCAL for e in row if e >= 0}) for row in case.idx.np]
    assert ((out.np.astype(np.uint32) << 16).view(np.float32) == np.float32(ranks)[:, None] * 6).all(), out.np[:, 0]
    handle.destroy()
    own.destroy()


def pointer_alone(comm):
    """Of a communicator, Group.create asks for ptr alone."""
    config = ep.GroupConfig(num_experts=comm.nranks * LOCAL, max_dispatch_tokens_per_rank=TOKENS,
                            max_token_bytes=HIDDEN * 4)
    ep.Group.create(types.SimpleNamespace(ptr=comm.ptr), config).destroy()


def refusals(comm):
    own, case = group(comm, ep.Algorithm.LOW_LATENCY)
    try:
        own.create_handle(ep.Layout.FLAT, case.idx.ep, stream=0)
    except Exception as error:  # NCCLEpError lies in different modules
        assert type(error).__name__ == "NCCLEpError" and error.status == 4, error
    else:
        raise AssertionError("low latency has no FLAT")
    own.destroy()
    try:
        own.ptr
    except Exception as error:
        assert type(error).__name__ == "NcclInvalid"
    else:
        raise AssertionError("a group that was destroyed")


def structs(comm):
    """EPX's own package only. The C struct of an object is one: fields that are set later are in it, what is set in it
    stays, and a copy has its own."""
    counters = Array((comm.nranks,), np.int32)
    info = ep.LayoutInfo(src_rank_counters=counters.ep)
    kept = info._lowpp
    assert kept is info._lowpp and kept.src_rank_counters == counters.ep.ptr and kept.size == 48
    kept.recv_topk_idx_kind = 2
    info.src_rank_counters = None
    assert not kept.src_rank_counters and info._lowpp.recv_topk_idx_kind == 2
    other = copy.copy(info)
    assert other._lowpp is not kept and other._lowpp.recv_topk_idx_kind == 0
    config = ep.GroupConfig(num_experts=4, alloc=ep.AllocConfig(context=5))
    config.num_experts = 8
    assert (config._lowpp.num_experts, config._lowpp.alloc.context) == (8, 5)
    assert dataclasses.replace(config, num_topk=3)._lowpp.num_topk == 3 and config == config


def masks(comm):
    """EPX's own package only. Nobody is late: the mask is all ones, and updates are seen."""
    own, case = group(comm, ep.Algorithm.LOW_LATENCY, enable_mask=True)
    handle = own.create_handle(ep.Layout.EXPERT_MAJOR, case.idx.ep, stream=0)
    mask = Array((case.nranks,), np.int32, 7)
    own.mask_query(mask.ep, stream=0)
    synchronize()
    assert (mask.np == 1).all() and not own.async_error() and own.get_async_error() is False
    mask.np[:] = 7
    own.mask_query(mask.np.ctypes.data, stream=0)  # addresses, as FlashInfer gives them
    synchronize()
    assert (mask.np == 1).all()
    mask.np[(case.rank + 1) % case.nranks] = 0
    for values, active in ((mask.np.ctypes.data, False), ([1] * case.nranks, True)):
        own.mask_update(values, stream=0)
        own.mask_query(mask.ep, stream=0)
        synchronize()
        assert bool(mask.np[(case.rank + 1) % case.nranks]) == active and mask.np.sum() == case.nranks - (not active)
    try:
        own.mask_update([1] * (case.nranks + 1))
    except ep.NcclInvalid:
        pass
    else:
        raise AssertionError("a mask of another size")
    own.mask_clean(stream=0)
    own.error_clear()
    nbytes = own.handle_mem_size(ep.Layout.EXPERT_MAJOR, TOPK)
    assert nbytes > 0
    tables = np.zeros(nbytes + 16, np.uint8)
    tables = tables[-tables.ctypes.data % 16:][:nbytes]
    alive = weakref.ref(tables)
    second = own.init_handle(ep.Layout.EXPERT_MAJOR, TOPK, handle_mem=ep.Tensor(tables))
    del tables
    second.update(ep.Tensor(case.idx.np), stream=0)  # NumPy's own description
    assert alive() is not None  # the handle's tables are there
    second.destroy()
    assert alive() is None
    handle.destroy()
    own.destroy()


def synchronize():
    if WHICH == "epx":
        ep.synchronize()
    else:
        import ctypes
        assert ctypes.CDLL(None).ncclEpxStreamSynchronize(None) == 0


def main():
    assert EXPECTED in ep.__file__, ep.__file__
    comm = communicator()
    for staged in (0, 1):
        low_latency(comm, staged)
    for by_struct in (False, True):
        low_latency_rank_major(comm, by_struct)
    high_throughput_flat(comm)
    high_throughput_expert_major(comm)
    for feature in (drop, eager, forward_scales, quantised, pointer_alone, refusals):
        feature(comm)
    if WHICH == "epx":
        structs(comm)
        masks(comm)
    if comm.rank == 0:
        print("nccl.ep of %s over %s %s, %d ranks: ok" % (WHICH, ep.get_lib_path(), ep.get_lib_version(), comm.nranks))
    comm.destroy()


main()
