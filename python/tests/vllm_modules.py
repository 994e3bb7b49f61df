# SPDX-License-Identifier: Apache-2.0
"""vLLM's own DeepEP back ends on deep_ep (make frameworks). EPX_TEST_VLLM is the folder of files of its source package.

Managers that make buffers (device_communicators/all2all.py), and prepare and finalize of the three back ends, run as
they are. The kernels between them, of experts and of quantisation, are plain expressions of torch here.
"""

import contextlib
import importlib
import os
import threading
import types
from typing import Any, Callable, Dict, Iterator, List
from unittest import mock

import deep_ep
import torch
import torch.distributed as dist
from foreign import Finder, Nothing, without_gpu
from reference import Work, calc_diff, combine_weighted, expert_result, same_bits, uncast_fp8
from suite import World

HIDDEN, TOPK, MOST = 2048, 3, 16
_MOE, _COMM = "vllm.model_executor.layers.fused_moe.", "vllm.distributed.device_communicators."
REAL = (_MOE + "modular_kernel", _MOE + "topk_weight_and_reduce", _MOE + "prepare_finalize.deepep_ht",
        _MOE + "prepare_finalize.deepep_ll", _MOE + "prepare_finalize.deepep_v2", _COMM + "all2all",
        _COMM + "base_device_communicator", "vllm.v1.worker.ubatching")
NO_QUANT = types.SimpleNamespace(
    is_block_quantized=False, quant_dtype=None, a1_scale=None, a2_scale=None, a1_gscale=None, block_shape=None,
    per_act_token_quant=False, is_scale_swizzled=False)
ENVS = types.SimpleNamespace(
    VLLM_DEEPEP_BUFFER_SIZE_MB=64, VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE=False,
    VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL=False, VLLM_DEEPEPLL_NVFP4_DISPATCH=False,
    VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE=False, VLLM_DEEPEP_V2_PREFER_OVERLAP=False,
    VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION=False)


def _group_of_one() -> Any:
    return types.SimpleNamespace(rank_in_group=0, world_size=1)


def _no_quant(x: torch.Tensor, scale: Any, *args: Any, **kwargs: Any) -> Any:
    return x, None


class HostStream:
    """In place of a stream, where there is no GPU: work on the CPU is done when its call returns."""

    def wait_event(self, event: Any) -> None:
        pass


_current = threading.local()


def current_stream() -> Any:
    """vLLM's: the stream of this thread."""
    return torch.cuda.current_stream() if torch.cuda.is_available() else getattr(_current, "stream", None)


CONTEXT = types.SimpleNamespace(dp_metadata=types.SimpleNamespace())
GIVEN: Dict[str, Dict[str, Any]] = {
    "vllm": {"envs": ENVS, "forward_context": types.SimpleNamespace(_forward_context=None)},
    "vllm.envs": vars(ENVS),
    "vllm.config": {"get_current_vllm_config": lambda: types.SimpleNamespace(
        parallel_config=types.SimpleNamespace(enable_fault_tolerance=True))},
    "vllm.distributed.parallel_state": {
        "get_dp_group": _group_of_one, "get_tp_group": _group_of_one,
        "in_the_same_node_as": lambda group, source_rank: [True] * group.size()},
    "vllm.forward_context": {"get_forward_context": lambda: CONTEXT},
    "vllm.utils.import_utils": {"has_deep_ep": lambda: True, "has_deep_ep_v2": lambda: True},
    "vllm.utils.math_utils": {"cdiv": lambda a, b: -(-a // b), "round_up": lambda a, b: -(-a // b) * b},
    "vllm.utils.torch_utils": {"PIN_MEMORY": False, "current_stream": current_stream},
    _MOE + "utils": {"moe_kernel_quantize_input": _no_quant},
}


def vllm(world: World) -> Any:
    """(all2all, prepare_finalize.deepep_ht, .deepep_ll, .deepep_v2, topk_weight_and_reduce)."""
    if not os.path.isdir(os.environ.get("EPX_TEST_VLLM", "")):
        world.skip("EPX_TEST_VLLM: no files of vllm")
    Finder("vllm", os.environ["EPX_TEST_VLLM"], REAL, GIVEN).install()
    return [importlib.import_module(name) for name in (
        _COMM + "all2all", REAL[2], REAL[3], REAL[4], _MOE + "topk_weight_and_reduce")]


def local_sum(work: Work, me: int, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What the experts of a rank make of its rows, weighted and summed; `ids` are global, others' are left out."""
    total = torch.zeros(rows.shape, dtype=torch.float32)
    for k in range(ids.shape[1]):
        mine = (ids[:, k] // work.local == me) & (ids[:, k] >= 0)
        for e in set(ids[mine, k].tolist()):
            at = mine & (ids[:, k] == e)
            total[at] += weights[at, k, None] * expert_result(rows[at], e).float()
    return total.bfloat16()


@without_gpu()
def test_vllm_high_throughput(world: World) -> None:
    """DeepEPHTAll2AllManager, DeepEPHTPrepareAndFinalize: asynchronous and not."""
    all2all, ht, _ll, _v2, reduce = vllm(world)
    me, work = world.rank, Work(world.nranks, 20, HIDDEN, 2 * world.nranks, TOPK, seed=71)
    manager = all2all.DeepEPHTAll2AllManager(dist.group.WORLD)
    buffer = manager.get_handle({})
    manager.set_num_sms(16)
    assert manager.get_handle({}) is buffer and deep_ep.Buffer.num_sms == 16
    module = ht.DeepEPHTPrepareAndFinalize(buffer, world.nranks, world.nranks, me * work.local)
    x, idx, weights = (world.to(t[me]) for t in (work.x, work.idx, work.weights))
    for asynchronous in (False, True):
        given = (x, weights, idx, work.experts, None, False, NO_QUANT)
        rows, scale, meta, ids, row_weights = module.prepare_async(*given)() if asynchronous else module.prepare(*given)
        assert scale is None and same_bits(rows, work.flat(me)[2])
        assert meta.expert_num_tokens_cpu.tolist() == work.expert_counts(me)
        done = world.to(local_sum(work, me, rows.cpu(), ids.cpu(), row_weights.cpu()))
        out = torch.empty_like(x)
        finalize = module.finalize_async if asynchronous else module.finalize
        receiver = finalize(out, done, row_weights, ids, False, reduce.TopKWeightAndReduceNoOP())
        if asynchronous:
            receiver()
        assert calc_diff(out.cpu(), combine_weighted(work, me)) < 1e-4
    world.meet()
    manager.destroy()


@without_gpu()
def test_vllm_low_latency(world: World) -> None:
    """DeepEPLLAll2AllManager with fault tolerance, DeepEPLLPrepareAndFinalize: BF16, FP8, hooks; clean_buffers."""
    all2all, _ht, ll, _v2, reduce = vllm(world)
    me, work = world.rank, Work(world.nranks, 12, HIDDEN, 2 * world.nranks, TOPK, seed=72)
    manager = all2all.DeepEPLLAll2AllManager(dist.group.WORLD)
    buffer = manager.get_handle(dict(
        max_num_tokens_per_dp_rank=MOST, token_hidden_size=HIDDEN, num_ep_ranks=world.nranks,
        num_global_experts=work.experts, num_local_experts=work.local))
    assert buffer.enable_shrink
    x, idx, weights = (world.to(t[me]) for t in (work.x, work.idx, work.weights))
    for fp8 in (False, True):
        module = ll.DeepEPLLPrepareAndFinalize(buffer, MOST, world.nranks, use_fp8_dispatch=fp8)
        blocks = types.SimpleNamespace(**{**vars(NO_QUANT), "block_shape": [128, 128] if fp8 else None})
        rows, scales, meta, _ids, _weights = module.prepare(x, weights, idx, work.experts, None, False, blocks)
        results = torch.zeros(work.local, world.nranks * MOST, HIDDEN, dtype=torch.bfloat16)
        for expert, places in enumerate(work.by_expert(me)):
            n = len(places)
            assert int(meta.expert_num_tokens[expert]) == n
            if n:
                sent = torch.stack([work.x[s][t] for s, t in places])
                got = rows[expert, :n].cpu()
                got = uncast_fp8(got, scales[expert, :n].cpu()) if fp8 else got
                assert calc_diff(got, sent) < (1e-3 if fp8 else 1e-12)
                results[expert, :n] = expert_result(sent, me * work.local + expert)
        out = torch.empty_like(x)
        hook, _receiver = module.finalize_async(out, world.to(results), weights, idx, False,
                                                reduce.TopKWeightAndReduceDelegate())
        hook()
        assert calc_diff(out.cpu(), combine_weighted(work, me)) < 1e-5
    with mock.patch.object(torch, "accelerator", Nothing()) if world.device.type == "cpu" else mock.patch.object(
            torch, "__version__", torch.__version__):
        if world.device.type == "cpu":  # vLLM makes it on a GPU
            all2all.DeepEPLLAll2AllManager._mask = torch.zeros(world.nranks, dtype=torch.int32)
        assert not manager.query_active_mask().any() and not manager.query_fault()
        manager.clean_buffers()
    module.prepare(x, weights, idx, work.experts, None, False, blocks)
    all2all.DeepEPLLAll2AllManager._mask = all2all.DeepEPLLAll2AllManager._last_mask = None
    world.meet()
    manager.destroy()


def globalize(ids: torch.Tensor, sums: torch.Tensor, offset: int, experts: int) -> torch.Tensor:
    """vLLM's Triton kernel of this purpose: global ids of rows that came, -1 elsewhere."""
    row = torch.arange(ids.shape[0], device=ids.device)[:, None]
    return torch.where((ids >= 0) & (ids + offset < experts) & (row < sums[-1]), ids + offset, -1)


@without_gpu()
def test_vllm_v2(world: World) -> None:
    """DeepEPV2All2AllManager, DeepEPV2PrepareAndFinalize: expanded with CPU sync, and not expanded without it."""
    all2all, _ht, _ll, v2, reduce = vllm(world)
    me, work = world.rank, Work(world.nranks, 20, HIDDEN, 2 * world.nranks, TOPK, seed=73)
    manager = all2all.DeepEPV2All2AllManager(dist.group.WORLD)
    with mock.patch.object(manager, "_check_gin_support", lambda group: None):  # asks NCCL
        buffer = manager.get_handle(dict(num_max_tokens_per_rank=64, hidden=HIDDEN, num_topk=TOPK,
                                         use_fp8_dispatch=False, num_experts=work.experts))
    assert manager.max_sms_used() >= 4
    CONTEXT.dp_metadata.num_tokens_across_dp_cpu = torch.tensor([t.shape[0] for t in work.x])
    x, idx, weights = (world.to(t[me]) for t in (work.x, work.idx, work.weights))
    for decode in (False, True):
        module = v2.DeepEPV2PrepareAndFinalize(buffer, world.nranks, world.nranks, me * work.local, work.experts,
                                               TOPK, use_cudagraph=decode)
        with mock.patch.object(v2, "_globalize_recv_topk_idx", globalize):
            rows, _scale, meta, ids, row_weights = module.prepare(
                x, weights, idx, work.experts, None, False, NO_QUANT)
        if decode:
            here = (ids >= 0).any(1).cpu()
            assert int(here.sum()) == work.flat(me)[2].shape[0]
            assert same_bits(rows[world.to(here)], work.flat(me)[2])
        else:
            assert meta.expert_num_tokens.tolist() == [len(places) for places in work.by_expert(me)]
        ids, kept = ids.cpu(), torch.where(ids.cpu() >= 0, row_weights.cpu(), 0.0)
        done = world.to(local_sum(work, me, torch.nan_to_num(rows.cpu()), ids, kept))
        out = torch.empty_like(x)
        module.finalize_async(out, done, row_weights, ids, False, reduce.TopKWeightAndReduceNoOP())()
        assert calc_diff(out.cpu(), combine_weighted(work, me)) < 1e-4
    world.meet()
    manager.destroy()


# ---- Two micro-batches in two threads (--enable-dbo)


@contextlib.contextmanager
def host_streams() -> Iterator[None]:
    """Streams and events of two threads, where there is no GPU."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in () if torch.cuda.is_available() else (
                (torch.cuda, "Stream", HostStream), (torch, "Event", Nothing),
                (torch.Tensor, "record_stream", lambda tensor, stream: None),
                (torch.cuda, "set_stream", lambda stream: setattr(_current, "stream", stream))):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def in_two_threads(world: World, layer: Callable[[int, Work], torch.Tensor], works: List[Work], rounds: int) -> None:
    """vLLM's threads and contexts: they take turns, each at work while the rows of the other are on their way."""
    ubatching = importlib.import_module("vllm.v1.worker.ubatching")
    faults: List[BaseException] = []

    def run(number: int) -> None:
        try:
            if world.device.type == "cuda":
                torch.cuda.set_device(world.device)
            with contexts[number]:
                for _ in range(rounds):
                    out = layer(number, works[number])
                    assert calc_diff(out.cpu(), combine_weighted(works[number], world.rank)) < 1e-4
        except BaseException as fault:
            faults.append(fault)

    with host_streams():
        ready = threading.Barrier(3)
        contexts = ubatching.make_ubatch_contexts(2, torch.cuda.Stream(), torch.cuda.Stream(), [CONTEXT] * 2, ready)
        threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(2)]
        for thread in threads:
            thread.start()
        ready.wait()
        contexts[0].cpu_wait_event.set()  # the first one begins
        for thread in threads:
            thread.join(60)
    for fault in faults:
        raise fault
    assert not any(thread.is_alive() for thread in threads), "a thread waits for the other one"


@without_gpu()
def test_vllm_dual_batch_high_throughput(world: World) -> None:
    """DeepEPHTPrepareAndFinalize of two threads on one buffer: previous_event is of the stream that computes."""
    all2all, ht, _ll, _v2, reduce = vllm(world)
    works = [Work(world.nranks, 20 + 9 * i, HIDDEN, 2 * world.nranks, TOPK, seed=74 + i) for i in range(2)]
    me, manager = world.rank, all2all.DeepEPHTAll2AllManager(dist.group.WORLD)
    module = ht.DeepEPHTPrepareAndFinalize(manager.get_handle({}), world.nranks, world.nranks, me * works[0].local)

    def layer(_number: int, work: Work) -> torch.Tensor:
        x, idx, weights = (world.to(t[me]) for t in (work.x, work.idx, work.weights))
        rows, _scale, _meta, ids, row_weights = module.prepare_async(
            x, weights, idx, work.experts, None, False, NO_QUANT)()
        done = world.to(local_sum(work, me, rows.cpu(), ids.cpu(), row_weights.cpu()))
        out = torch.empty_like(x)
        module.finalize_async(out, done, row_weights, ids, False, reduce.TopKWeightAndReduceNoOP())()
        return out

    in_two_threads(world, layer, works, 3)
    world.meet()
    manager.destroy()


@without_gpu()
def test_vllm_dual_batch_low_latency(world: World) -> None:
    """DeepEPLLPrepareAndFinalize of two threads on one buffer: the hook of one is called by the other one."""
    all2all, _ht, ll, _v2, reduce = vllm(world)
    ubatching = importlib.import_module("vllm.v1.worker.ubatching")
    works = [Work(world.nranks, 12 - 5 * i, HIDDEN, 2 * world.nranks, TOPK, seed=76 + i) for i in range(2)]
    me, manager = world.rank, all2all.DeepEPLLAll2AllManager(dist.group.WORLD)
    buffer = manager.get_handle(dict(
        max_num_tokens_per_dp_rank=MOST, token_hidden_size=HIDDEN, num_ep_ranks=world.nranks,
        num_global_experts=works[0].experts, num_local_experts=works[0].local))
    module = ll.DeepEPLLPrepareAndFinalize(buffer, MOST, world.nranks)

    def hand_over(hook: Callable[[], None], receiver: Callable[[], Any]) -> Any:
        """As vLLM's modular kernel does."""
        ubatching.dbo_register_recv_hook(hook)
        ubatching.dbo_yield()
        return receiver()

    def layer(_number: int, work: Work) -> torch.Tensor:
        x, idx, weights = (world.to(t[me]) for t in (work.x, work.idx, work.weights))
        ubatching.dbo_maybe_run_recv_hook()
        rows, _scale, _meta, _ids, _weights = hand_over(*module.prepare_async(
            x, weights, idx, work.experts, None, False, NO_QUANT))
        results = torch.zeros(rows.shape, dtype=torch.bfloat16)
        for expert, places in enumerate(work.by_expert(me)):
            results[expert, :len(places)] = expert_result(rows[expert, :len(places)].cpu(), me * work.local + expert)
        out = torch.empty_like(x)
        hand_over(*module.finalize_async(out, world.to(results), weights, idx, False,
                                         reduce.TopKWeightAndReduceDelegate()))
        return out

    in_two_threads(world, layer, works, 3)
    world.meet()
    manager.destroy()
