# SPDX-License-Identifier: Apache-2.0
"""SGLang's own DeepEP dispatchers on deep_ep (make frameworks). EPX_TEST_SGLANG is the folder of its unpacked wheel.

The wheel's files token_dispatcher/deepep.py, deepep_v2.py and base.py and moe/utils.py run as they are. What they
import beside them needs compiled kernels and a server; here it is objects that do nothing, but for the few settings
that are given.
"""

import importlib
import os
import sys
import types
from typing import Any, Dict
from unittest import mock

import torch
import torch.distributed as dist
from foreign import Finder, without_gpu
from reference import (Work, calc_diff, cast_fp8, combine_weighted, expert_result, same_bits, uncast_fp8,
                       uncast_nvfp4)
from suite import World

MOST, HIDDEN, TOPK = 16, 256, 3
_MOE = "sglang.srt.layers.moe."
REAL = (_MOE + "token_dispatcher.base", _MOE + "token_dispatcher.deepep", _MOE + "utils",
        _MOE + "token_dispatcher.deepep_v2")


class Setting:
    """A variable of sglang.srt.environ."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def get(self) -> Any:
        return self._value


class Settings:
    """Variables; those that are not given are off."""

    SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK = Setting(MOST)
    SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK = Setting(MOST)
    SGLANG_DEEPEP_V2_NUM_SMS = Setting(0)

    def __getattr__(self, name: str) -> Setting:
        return Setting(False)


GIVEN: Dict[str, Dict[str, Any]] = {
    "sglang.srt.environ": {"envs": Settings()},
    "sglang.srt.layers": {"deep_gemm_wrapper": types.SimpleNamespace(
        ENABLE_JIT_DEEPGEMM=True, DEEPGEMM_BLACKWELL=False, DEEPGEMM_SCALE_UE8M0=False,
        DEEPGEMM_NEED_TMA_ALIGNED_SCALES=False)},
    "sglang.srt.layers.dp_attention": {"get_is_extend_in_batch": lambda: PREFILL[0]},
    "sglang.kernels.ops.quantization.fp8_kernel": {
        "sglang_per_token_group_quant_fp8": lambda x, block, **how: tuple(t.to(x.device) for t in cast_fp8(x.cpu()))},
    "sglang.srt.runtime_context": {
        "get_resources": lambda: RESOURCES, "get_parallel": lambda: types.SimpleNamespace(attn_dp_size=2),
        "get_exec": lambda: types.SimpleNamespace(moe=types.SimpleNamespace(deepep_v2_mode="direct"))},
    "sglang.srt.utils": {"is_blackwell": lambda: BLACKWELL[0]},
}
RESOURCES = types.SimpleNamespace(buffers={})
BLACKWELL, PREFILL = [False], [False]


def sglang(world: World, name: str = "deepep") -> Any:
    """SGLang's module of a dispatcher."""
    if not os.path.isdir(os.environ.get("EPX_TEST_SGLANG", "")):
        world.skip("EPX_TEST_SGLANG: no unpacked wheel of sglang")
    Finder("sglang", os.environ["EPX_TEST_SGLANG"], REAL, GIVEN).install()
    return importlib.import_module(_MOE + "token_dispatcher." + name)


def make(world: World, deepep: Any, which: str, dtype: str, **how: bool) -> Any:
    """One of SGLang's dispatchers, with a buffer of its own."""
    RESOURCES.buffers.clear()
    utils: Any = sys.modules[_MOE + "utils"]
    output = getattr(utils.DispatcherOutputDtype, dtype)
    experts = 2 * world.nranks
    with mock.patch.object(deepep, "get_deepep_output_dtype", lambda dispatcher: output):
        return getattr(deepep, which)(
            group=dist.group.WORLD, router_topk=TOPK, permute_fusion=True, num_experts=experts, num_local_experts=2,
            hidden_size=HIDDEN, params_dtype=torch.bfloat16, deepep_mode=utils.DeepEPMode.AUTO, **how)


def topk_of(world: World, work: Work) -> Any:
    """What SGLang's router gives."""
    me = world.rank
    return types.SimpleNamespace(topk_weights=world.to(work.weights[me]), topk_ids=world.to(work.idx[me]))


def expert_rows(work: Work, me: int, rows: int) -> torch.Tensor:
    """Results of the local experts for the rows that they received."""
    full = torch.zeros(work.local, rows, work.hidden, dtype=torch.bfloat16)
    for expert, places in enumerate(work.by_expert(me)):
        for n, (s, t) in enumerate(places):
            full[expert, n] = (work.x[s][t].float() * (1 + (me * work.local + expert) / 16.0)).bfloat16()
    return full


@without_gpu()
def test_sglang_normal(world: World) -> None:
    """_DeepEPDispatcherImplNormal: layout, dispatch, combine, with events."""
    deepep = sglang(world)
    for asynchronous in (False, True):
        work = Work(world.nranks, 20, HIDDEN, 2 * world.nranks, TOPK, seed=61)
        dispatcher = make(world, deepep, "_DeepEPDispatcherImplNormal", "BF16", async_finish=asynchronous)
        out = dispatcher.dispatch_b(*dispatcher.dispatch_a(world.to(work.x[world.rank]), topk_of(world, work)))
        assert same_bits(out.hidden_states, work.flat(world.rank)[2])
        assert out.num_recv_tokens_per_expert == [-(-n // 128) * 128 for n in work.expert_counts(world.rank)]
        combined = dispatcher.combine_b(*dispatcher.combine_a(out.hidden_states, out.topk_ids, out.topk_weights))
        times = work.ranks_of(world.rank).sum(1, keepdim=True)
        assert torch.allclose(combined.cpu().float(), work.x[world.rank].float() * times, rtol=0.02, atol=0.02)
        world.meet()


def check_low_latency(world: World, deepep: Any, dtype: str, overlap: str, **how: bool) -> None:
    work = Work(world.nranks, 12, HIDDEN, 2 * world.nranks, TOPK, seed=62)
    dispatcher = make(world, deepep, "_DeepEPDispatcherImplLowLatency", dtype, **how)
    scale = world.to(torch.tensor(300.0))
    dispatcher.quant_config = {"input_global_scale": scale} if dtype == "NVFP4" else {}
    out = dispatcher.dispatch_b(*dispatcher.dispatch_a(world.to(work.x[world.rank]), topk_of(world, work)))
    assert out.masked_m.tolist() == [len(places) for places in work.by_expert(world.rank)]
    rows = world.nranks * MOST
    if dtype == "NVFP4":
        assert out.hidden_states.shape == (rows, HIDDEN // 2, 2) and out.hidden_states_scale.dim() == 6
        places = work.by_expert(world.rank)[0]
        flat = out.hidden_states_scale.cpu().view(torch.uint8).permute(5, 2, 1, 0, 4, 3).reshape(2, -1, HIDDEN // 16)
        if places:
            sent = torch.stack([work.x[s][t] for s, t in places])
            got = uncast_nvfp4(out.hidden_states[:len(places), :, 0].cpu(),
                               flat[0, :len(places)].view(torch.float8_e4m3fn), 300.0)
            assert calc_diff(got, sent) < 0.02
    results = world.to(expert_rows(work, world.rank, rows))
    if overlap:  # the signals are there already: the order in which they come is tested in ranks_low_latency
        BLACKWELL[0] = overlap == "src_signals"
        per_expert = 1 if BLACKWELL[0] else -(-rows // 64)
        stream = mock.Mock() if world.device.type == "cpu" else torch.cuda.current_stream()
        dispatcher.set_overlap_args(
            types.SimpleNamespace(overlap=True, stream=stream, wait_event=mock.Mock(), num_sms=3, threshold=7,
                                  signal=world.to(torch.full((2 * per_expert,), 7, dtype=torch.int32))),
            dict(block_m=64, threshold=7))
    hidden, event, hook = dispatcher._combine_core(results, out.topk_ids, out.topk_weights)
    hook() if how["return_recv_hook"] else event.current_stream_wait()
    assert calc_diff(hidden.cpu(), combine_weighted(work, world.rank)) < 1e-5
    world.meet()


@without_gpu()
def test_sglang_low_latency(world: World) -> None:
    """_DeepEPDispatcherImplLowLatency: BF16, FP8 and NVFP4 dispatch, hooks and events, single-batch overlap."""
    deepep = sglang(world)
    for dtype in ("BF16", "FP8", "NVFP4"):
        for hook in (False, True):
            check_low_latency(world, deepep, dtype, "", return_recv_hook=hook)
    check_low_latency(world, deepep, "BF16", "comp_signal", return_recv_hook=True)
    check_low_latency(world, deepep, "NVFP4", "src_signals", return_recv_hook=False)
    RESOURCES.buffers.clear()


def weighted(work: Work, me: int, out: Any, fp8: bool) -> torch.Tensor:
    """What the experts of a rank make of what it received, by its weights."""
    rows = out.hidden_states.cpu()
    rows = uncast_fp8(rows, out.hidden_states_scale.cpu()) if fp8 else rows
    total, weights = torch.zeros(rows.shape), out.topk_weights.cpu()
    if out.is_expanded:
        start = 0
        for e, end in enumerate(out.psum_num_recv_tokens_per_expert.tolist()):
            zone = slice(start, end)
            total[zone] = expert_result(rows[zone], me * work.local + e).float() * weights[zone, None]
            start = -(-end // out.expert_alignment) * out.expert_alignment
    else:
        for k in range(work.topk):
            for e in range(work.local):
                at = out.topk_ids.cpu()[:, k] == e
                total[at] += expert_result(rows[at], me * work.local + e).float() * weights[at, k, None]
    return total.bfloat16()


@without_gpu()
def test_sglang_v2(world: World) -> None:
    """DeepEPv2Dispatcher: prefill, expanded and not, also of ranks without tokens, and decode; BF16 and FP8."""
    file = sglang(world, "deepep_v2")
    RESOURCES.buffers.clear()
    for fp8 in (False, True):
        for seed, prefill, expand in ((91, True, True), (93, True, False), (94, True, False), (95, False, True),
                                      (96, False, True)):
            me, work = world.rank, Work(world.nranks, 12, HIDDEN, 2 * world.nranks, TOPK, seed=seed)
            PREFILL[0] = prefill
            with mock.patch.object(Settings, "SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND", Setting(expand), create=True):
                dispatcher = file.DeepEPv2Dispatcher(dist.group.WORLD, TOPK, work.experts, work.local, HIDDEN,
                                                     torch.bfloat16, fp8)
            if hasattr(dispatcher, "prebuild"):  # 0.5.21 does not have it, nor an expanded prefill
                dispatcher.prebuild()
            elif prefill:
                expand = False
            out = dispatcher.dispatch(world.to(work.x[me]), topk_of(world, work))
            assert out.is_expanded == expand and out.use_masked_gemm != prefill
            combined = dispatcher.combine(file.DeepEPv2CombineInput(
                world.to(weighted(work, me, out, fp8)), None if expand else out.topk_weights))
            assert calc_diff(combined.cpu(), combine_weighted(work, me)) < (2e-3 if fp8 else 1e-4)
    world.meet()
    file.DeepEPv2Buffer.destroy()
    RESOURCES.buffers.clear()
