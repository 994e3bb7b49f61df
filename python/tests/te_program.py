# SPDX-License-Identifier: Apache-2.0
"""One rank of a program for TransformerEngine's expert parallelism: the exported C functions of its released library
(transformer_engine/ep.h), which opens libnccl_ep.so itself. Without torch and without a GPU; every value is compared.

EPX_TEST_TRANSFORMERENGINE is a folder with that file of its wheel; scripts/frameworks.sh makes the rest of the
environment: EPX's stand-ins are preloaded, and libraries that the calls do not need are empty.

Token t of rank r has small whole numbers, exact in bf16; expert e multiplies by 1 + e % 2.
"""

import ctypes
import os
from ctypes import POINTER, Structure, byref, c_int, c_size_t, c_uint64, c_void_p

import numpy as np

os.environ.setdefault("NCCL_COMM_ID", "%s:%s" % (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]))
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TOKENS, HIDDEN, TOPK, LOCAL, ALIGNMENT = 9, 512, 3, 2, 16
EXPERTS = LOCAL * RANKS
MOST = RANKS * TOKENS * TOPK + LOCAL * ALIGNMENT
BYTE, INT32, INT64, FLOAT32, BFLOAT16, E4M3, E8M0 = 0, 2, 3, 4, 6, 7, 9  # NVTEDType
DATA, SCALES = 0, 4  # NVTETensorParam
PLAIN, MXFP8 = 0, 1  # NVTEScalingMode


class Shape(Structure):
    _fields_ = [("data", c_size_t * 15), ("ndim", c_size_t)]


class BasicTensor(Structure):
    _fields_ = [("data", c_void_p), ("dtype", c_int), ("shape", Shape)]


class Window(Structure):
    """NVTECommWindow."""

    _fields_ = [("window", c_void_p), ("offset", c_uint64), ("scale_window", c_void_p), ("scale_offset", c_uint64)]


class GroupConfig(Structure):
    _fields_ = [("struct_size", c_size_t), *((name, c_int) for name in (
        "ep_size", "num_experts", "max_tokens_per_rank", "max_recv_tokens_per_rank", "hidden_dim", "num_comm_sms",
        "max_token_dtype", "zero_copy", "num_topk", "drop_on_overflow"))]


class LayerConfig(Structure):
    _fields_ = [("struct_size", c_size_t), ("top_k", c_int), ("alignment", c_size_t)]


def open_lazily(path):
    """Functions of libraries that are empty here are never called: they are not looked for."""
    libc = ctypes.CDLL(None)
    libc.dlopen.restype, libc.dlopen.argtypes = c_void_p, [ctypes.c_char_p, c_int]
    libc.dlerror.restype = ctypes.c_char_p
    handle = libc.dlopen(path.encode(), os.RTLD_LAZY)
    if not handle:
        raise OSError(libc.dlerror().decode())
    return ctypes.CDLL(path, handle=handle)


cuda = nccl = ctypes.CDLL(None)  # the stand-ins, preloaded
te = open_lazily(os.path.join(os.environ["EPX_TEST_TRANSFORMERENGINE"], "transformer_engine", "wheel_lib",
                              "libtransformer_engine.so"))
for _name in ("nvte_create_tensor", "nvte_ep_handle_mem_size"):
    getattr(te, _name).restype = c_void_p
te.nvte_set_tensor_param.argtypes = [POINTER(c_void_p), c_int, POINTER(BasicTensor)]
te.nvte_destroy_tensor.argtypes = [c_void_p]


def check(status, what):
    assert status == 0, "%s: %d" % (what, status)


def communicator():
    unique, comm = ctypes.create_string_buffer(128), c_void_p()

    class Id(Structure):
        _fields_ = [("internal", ctypes.c_char * 128)]

    check(nccl.ncclGetUniqueId(unique), "ncclGetUniqueId")  # of NCCL_COMM_ID: the same on all ranks
    nccl.ncclCommInitRank.argtypes = [POINTER(c_void_p), c_int, Id, c_int]
    check(nccl.ncclCommInitRank(byref(comm), RANKS, Id.from_buffer_copy(unique), RANK), "ncclCommInitRank")
    return comm


def make_stream():
    stream = c_void_p()
    check(cuda.cudaStreamCreate(byref(stream)), "cudaStreamCreate")
    return stream


COMM = communicator()
STREAM = make_stream()


def synchronize():
    check(cuda.cudaStreamSynchronize(STREAM), "cudaStreamSynchronize")


def bf16(values):
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    assert (bits & 0xffff == 0).all(), "not exact in bf16"
    return (bits >> 16).astype(np.uint16)


def floats(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Buffer:
    """Memory of the stand-in for CUDA, or of a window, and its NVTETensor."""

    def __init__(self, shape, dtype, kind, fill=0, scales=None, windows=False):
        self.bytes = max(1, int(np.prod(shape)) * np.dtype(dtype).itemsize)
        self.scales, self.window = scales, None
        memory = c_void_p()
        allocate = nccl.ncclMemAlloc if windows else cuda.cudaMalloc
        check(allocate(byref(memory), c_size_t(self.bytes)), "memory")
        self.memory = memory.value
        self.np = np.frombuffer((ctypes.c_char * self.bytes).from_address(self.memory), dtype,
                                int(np.prod(shape))).reshape(shape)
        self.np[...] = fill
        if windows:
            self.window = c_void_p()
            check(nccl.ncclCommWindowRegister(COMM, memory, c_size_t(self.bytes), byref(self.window), 1), "window")
        self.tensor = c_void_p(te.nvte_create_tensor(MXFP8 if scales else PLAIN))
        for param, of, its_kind in ((DATA, self, kind), *(((SCALES, scales, E8M0),) if scales else ())):
            basic = BasicTensor(of.memory, its_kind, Shape(of.np.shape, of.np.ndim))
            te.nvte_set_tensor_param(byref(self.tensor), param, byref(basic))

    def at(self):
        """NVTECommWindow."""
        return Window(self.window, 0, self.scales.window if self.scales else None, 0)


class Case:
    """All ranks' tokens, weights and experts, and where rows go."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)  # the same on all ranks
        self.idx = np.stack([np.stack([rng.permutation(EXPERTS)[:TOPK] for _ in range(TOKENS)])
                             for _ in range(RANKS)]).astype(np.int64)
        self.idx[:, TOKENS - 1, 1:] = -1
        self.tokens = (rng.integers(1, 32, (RANKS, TOKENS, 1)) + np.arange(HIDDEN) % 7).astype(np.float32)
        self.weights = rng.random((RANKS, TOKENS, TOPK), np.float32)
        self.rows, self.counts = [], []  # of this rank: (row, rank, token, k, expert)
        at = 0
        for expert in range(RANK * LOCAL, (RANK + 1) * LOCAL):
            hits = np.argwhere(self.idx == expert)  # in the order of source, token
            self.rows += [(at + i, *hit, expert) for i, hit in enumerate(hits)]
            self.counts.append(-(-len(hits) // ALIGNMENT) * ALIGNMENT)
            at += self.counts[-1]
        self.total = at

    def factor(self, rank, token):
        return sum(1 + expert % 2 for expert in self.idx[rank, token] if expert >= 0)

    def expected_rows(self, source, rows):
        out = np.zeros((rows, *source.shape[2:]), source.dtype)
        for row, rank, token, _k, _expert in self.rows:
            out[row] = source[rank, token]
        return out


def initialize(**more):
    config = GroupConfig(struct_size=ctypes.sizeof(GroupConfig), ep_size=RANKS, num_experts=EXPERTS,
                         max_tokens_per_rank=TOKENS, max_recv_tokens_per_rank=MOST, hidden_dim=HIDDEN,
                         max_token_dtype=BFLOAT16)
    for name, value in more.items():
        setattr(config, name, value)
    te.nvte_ep_initialize(COMM, byref(config))


class Layer:
    """One routing with all tensors of a layer."""

    def __init__(self, case, rows=MOST, windows=False):
        self.case, self.rows = case, rows
        self.config = LayerConfig(ctypes.sizeof(LayerConfig), TOPK, ALIGNMENT)
        self.memory = Buffer((te.nvte_ep_handle_mem_size(byref(self.config)),), np.uint8, BYTE)
        self.idx = Buffer((TOKENS, TOPK), np.int64, INT64, case.idx[RANK])
        self.tokens = Buffer((TOKENS, HIDDEN), np.uint16, BFLOAT16, bf16(case.tokens[RANK]))
        self.weights = Buffer((TOKENS, TOPK), np.float32, FLOAT32, case.weights[RANK])
        self.received = Buffer((rows, HIDDEN), np.uint16, BFLOAT16, 0x5a5a, windows=windows)
        self.row_weights = Buffer((rows,), np.float32, FLOAT32, -1)
        self.experts_out = Buffer((rows, HIDDEN), np.uint16, BFLOAT16, windows=windows)
        self.result = Buffer((TOKENS, HIDDEN), np.uint16, BFLOAT16, 0x5a5a)

    def prepare(self, counts, total):
        te.nvte_ep_prepare(self.memory.tensor, self.idx.tensor, counts.tensor, total.tensor if total else None,
                           byref(self.config), STREAM)
        synchronize()

    def dispatch(self):
        te.nvte_ep_dispatch(self.memory.tensor, self.idx.tensor, self.tokens.tensor, Window(), self.weights.tensor,
                            Window(), self.received.tensor, self.received.at(), self.row_weights.tensor, Window(),
                            STREAM)
        synchronize()

    def fused(self, counts, total):
        te.nvte_ep_prepare_and_dispatch(
            self.memory.tensor, self.idx.tensor, self.tokens.tensor, Window(), self.weights.tensor, Window(),
            self.received.tensor, self.received.at(), self.row_weights.tensor, Window(), counts.tensor,
            total.tensor if total else None, byref(self.config), STREAM)
        synchronize()

    def check_received(self):
        case = self.case
        expected = case.expected_rows(case.tokens, case.total)
        assert (floats(self.received.np[:case.total]) == expected).all()
        weights = np.zeros(case.total, np.float32)
        for row, rank, token, k, _expert in case.rows:
            weights[row] = case.weights[rank, token, k]
        assert (self.row_weights.np[:case.total] == weights).all()

    def combine(self):
        out = np.zeros((self.rows, HIDDEN), np.float32)
        for row, rank, token, _k, expert in self.case.rows:
            out[row] = self.case.tokens[rank, token] * (1 + expert % 2)
        self.experts_out.np[...] = bf16(out)
        te.nvte_ep_combine(self.memory.tensor, self.experts_out.tensor, self.experts_out.at(), self.result.tensor,
                           STREAM)
        synchronize()
        expected = [self.case.tokens[RANK, t] * self.case.factor(RANK, t) for t in range(TOKENS)]
        assert (floats(self.result.np) == np.array(expected)).all()

    def backward(self):
        """Gradients: of the combine to every row, of the dispatch back to tokens and weights."""
        case = self.case
        grads = Buffer((self.rows, HIDDEN), np.uint16, BFLOAT16, 0x5a5a, windows=self.received.window is not None)
        te.nvte_ep_combine_bwd(self.memory.tensor, self.tokens.tensor, Window(), grads.tensor, grads.at(), STREAM)
        synchronize()
        assert (floats(grads.np[:case.total]) == case.expected_rows(case.tokens, case.total)).all()
        row_grads = Buffer((self.rows,), np.float32, FLOAT32, 0)
        for row, rank, token, k, expert in case.rows:
            row_grads.np[row] = case.weights[rank, token, k] * (expert + 1)
        token_grads = Buffer((TOKENS, HIDDEN), np.uint16, BFLOAT16, 0x5a5a)
        weight_grads = Buffer((TOKENS, TOPK), np.float32, FLOAT32, -1)
        te.nvte_ep_dispatch_bwd(self.memory.tensor, grads.tensor, grads.at(), row_grads.tensor, Window(),
                                token_grads.tensor, weight_grads.tensor, STREAM)
        synchronize()
        valid = case.idx[RANK] >= 0
        assert (floats(token_grads.np) == case.tokens[RANK] * valid.sum(1)[:, None]).all()
        assert (weight_grads.np == np.where(valid, case.weights[RANK] * (case.idx[RANK] + 1), 0)
                .astype(np.float32)).all()


def check_counts(case, counts, total):
    assert (counts.np == case.counts).all(), (counts.np, case.counts)
    assert total is None or total.np[0] == case.total, (total.np, case.total)


def counters(dtype):
    kind = {np.int32: INT32, np.int64: INT64}[dtype]
    return Buffer((LOCAL,), dtype, kind, -7), Buffer((1,), dtype, kind, -7)


def forward_and_back(windows):
    """prepare, dispatch, combine and their backward passes; then with other routings, in the same memory."""
    layer = Layer(Case(1), windows=windows)
    for seed in (1, 2, 3):
        layer.case = case = Case(seed)
        for buffer, values in ((layer.idx, case.idx[RANK]), (layer.weights, case.weights[RANK]),
                               (layer.tokens, bf16(case.tokens[RANK]))):
            buffer.np[...] = values
        counts, total = counters(np.int64)
        layer.prepare(counts, total if seed > 1 else None)
        check_counts(case, counts, total if seed > 1 else None)
        layer.dispatch()
        layer.check_received()
        layer.combine()
        layer.backward()


def fused(windows):
    """Counts come from the dispatch: int32 and int64, with a total and without."""
    for seed, dtype in ((4, np.int32), (5, np.int64)):
        layer = Layer(Case(seed), windows=windows)
        counts, total = counters(dtype)
        total = total if seed == 4 else None
        for _ in range(2):
            counts.np[:] = -7
            layer.fused(counts, total)
            check_counts(layer.case, counts, total)
            layer.check_received()
        layer.combine()
        layer.backward()


def mxfp8(windows):
    """Rows of E4M3 with E8M0 scales, byte by byte; padding has neither."""
    case, counts = Case(6), counters(np.int64)[0]
    rng = np.random.default_rng(60)
    values = rng.integers(0, 127, (RANKS, TOKENS, HIDDEN), np.uint8)
    scales = rng.integers(100, 140, (RANKS, TOKENS, HIDDEN // 32), np.uint8)
    layer = Layer(case, windows=windows)
    layer.tokens = Buffer((TOKENS, HIDDEN), np.uint8, E4M3, values[RANK],
                          Buffer((TOKENS, HIDDEN // 32), np.uint8, E8M0, scales[RANK]))
    layer.received = Buffer((MOST, HIDDEN), np.uint8, E4M3, 0x5a,
                            Buffer((MOST, HIDDEN // 32), np.uint8, E8M0, 0x5a, windows=windows), windows)
    for together in (False, True):
        layer.received.np[...] = layer.received.scales.np[...] = 0x5a
        if together:
            layer.fused(counts, None)
        else:
            layer.prepare(counts, None)
            layer.dispatch()
        check_counts(case, counts, None)
        assert (layer.received.np[:case.total] == case.expected_rows(values, case.total)).all()
        assert (layer.received.scales.np[:case.total] == case.expected_rows(scales, case.total)).all()
    layer.combine()


def eager():
    """No number of rows: tensors have as many as the routing brings."""
    case = Case(7)
    layer = Layer(case, rows=case.total)
    counts, total = counters(np.int64)
    layer.prepare(counts, total)
    check_counts(case, counts, total)
    layer.dispatch()
    layer.check_received()
    layer.combine()


def dropping():
    """Room for less than comes: the first rows of the padded zones stay, and all calls go on."""
    case = Case(8)
    room = ALIGNMENT * 2
    layer = Layer(case, rows=room)
    counts, total = counters(np.int32)
    layer.prepare(counts, total)
    assert total.np[0] == case.total
    assert (counts.np == [min(case.counts[0], room), max(0, min(case.counts[1], room - case.counts[0]))]).all()
    layer.dispatch()


def main():
    for windows in (False, True):
        initialize(zero_copy=int(windows))
        forward_and_back(windows)
        fused(windows)
        mxfp8(windows)
        te.nvte_ep_shutdown()
    initialize(max_recv_tokens_per_rank=0, num_topk=TOPK)
    eager()
    te.nvte_ep_shutdown()
    initialize(max_recv_tokens_per_rank=ALIGNMENT * 2, drop_on_overflow=1)
    dropping()
    te.nvte_ep_shutdown()
    check(nccl.ncclCommDestroy(COMM), "ncclCommDestroy")
    if RANK == 0:
        print("TransformerEngine on libnccl_ep.so, %d ranks: ok" % RANKS)


main()
