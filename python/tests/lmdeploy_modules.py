# SPDX-License-Identifier: Apache-2.0
"""LMDeploy's own DeepEP dispatchers on deep_ep (make frameworks). EPX_TEST_LMDEPLOY is the folder of two files of its
wheel. Kernels of experts and of quantisation are plain expressions of torch here."""

import importlib
import os
from typing import Any

import torch
import torch.distributed as dist
from foreign import Finder, without_gpu
from reference import Work, calc_diff, cast_fp8, combine_weighted, expert_result, same_bits, uncast_fp8
from suite import World, environment

HIDDEN, TOPK, MOST = 256, 3, 16
_BACKENDS = "lmdeploy.pytorch.backends."
REAL = (_BACKENDS + "cuda.token_dispatcher", _BACKENDS + "token_dispatcher")
GIVEN = {"lmdeploy.pytorch.envs": {"deep_ep_buffer_num_sms": 20,
                                   "env_to_int": lambda name, value: int(os.environ.get(name, value))}}


def lmdeploy(world: World) -> Any:
    """The module of dispatchers, whose buffer is not there yet."""
    folder = os.environ.get("EPX_TEST_LMDEPLOY", "")
    if not os.path.isdir(folder):
        world.skip("EPX_TEST_LMDEPLOY: no files of lmdeploy")
    Finder("lmdeploy", folder, REAL, GIVEN).install()
    file = importlib.import_module(REAL[0])
    assert file.use_deepep
    file.DeepEPBuffer._explicitly_destroy = True
    return file


def given_to(work: Work) -> Any:
    """Arguments of the dispatchers."""
    return dict(group=dist.group.WORLD, num_experts=work.experts, num_local_experts=work.local, hidden_size=HIDDEN,
                params_dtype=torch.bfloat16, num_max_dispatch_tokens_per_rank=MOST)


def weighted(work: Work, me: int, rows: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What the experts of a rank make of its rows, weighted and summed. `idx` has local experts."""
    total = torch.zeros(rows.shape, dtype=torch.float32)
    for k in range(idx.shape[1]):
        for e in range(work.local):
            at = idx[:, k] == e
            total[at] += weights[at, k, None] * expert_result(rows[at], me * work.local + e).float()
    return total.bfloat16()


@without_gpu()
def test_lmdeploy_permuted(world: World) -> None:
    """DeepEPTokenDispatcher: rows by expert, and their weighted sums."""
    file = lmdeploy(world)
    me, work = world.rank, Work(world.nranks, 20, HIDDEN, 2 * world.nranks, TOPK, seed=81)
    dispatcher = file.DeepEPTokenDispatcher(**given_to(work))
    for _ in range(2):
        rows, _idx, _weights, counts = dispatcher.dispatch(*(world.to(t[me]) for t in (work.x, work.idx, work.weights)))
        assert counts.tolist() == work.expert_counts(me)
        done, at = torch.empty_like(rows, device="cpu"), 0
        for expert, count in enumerate(counts.tolist() if len(rows) else []):
            done[at:at + count] = expert_result(rows[at:at + count].cpu(), me * work.local + expert)
            at += count
        assert at == len(rows)
        out = dispatcher.combine(world.to(done))
        assert calc_diff(out.cpu(), combine_weighted(work, me)) < 1e-4
    dispatcher.release()
    world.meet()
    assert file.DeepEPBuffer.destroy()


@without_gpu()
def test_lmdeploy_normal(world: World) -> None:
    """DeepEPTokenDispatcherNormal: BF16 and FP8, on the current stream, and with events as its micro-batches do it."""
    file = lmdeploy(world)
    me, work = world.rank, Work(world.nranks, 20, HIDDEN, 2 * world.nranks, TOPK, seed=82)
    dispatcher = file.DeepEPTokenDispatcherNormal(**given_to(work), expert_alignment=128)
    x, idx, weights = (world.to(t[me]) for t in (work.x, work.idx, work.weights))
    for fp8 in (False, True):
        sent = tuple(world.to(t) for t in cast_fp8(work.x[me])) if fp8 else x
        for asynchronous in (False, True):
            if asynchronous:
                got, got_idx, got_weights, counts, handle, event = dispatcher.dispatch_normal_async(
                    sent, idx, weights, work.experts, dispatcher.get_buffer().capture())
                event.current_stream_wait()
            else:
                got, got_idx, got_weights, counts = dispatcher.dispatch(sent, idx, weights)
            assert counts == [-(-n // 128) * 128 for n in work.expert_counts(me)]
            rows = uncast_fp8(got[0].cpu(), got[1].cpu()) if fp8 else got.cpu()
            assert calc_diff(rows, work.flat(me)[2]) < 1e-3 if fp8 else same_bits(rows, work.flat(me)[2])
            done = world.to(weighted(work, me, rows, got_idx.cpu(), got_weights.cpu()))
            if asynchronous:
                out, event = dispatcher.combine_normal_async(done, handle, dispatcher.get_buffer().capture())
                event.current_stream_wait()
            else:
                out = dispatcher.combine(done)
            assert calc_diff(out.cpu(), combine_weighted(work, me)) < 2e-3
    world.meet()
    assert file.DeepEPBuffer.destroy() and not file.DeepEPBuffer.destroy()


@without_gpu()
def test_lmdeploy_low_latency(world: World) -> None:
    """DeepEPTokenDispatcherLowLatency after a normal one on the same buffer: hooks and events, FP8 and BF16."""
    file = lmdeploy(world)
    me, work = world.rank, Work(world.nranks, 12, HIDDEN, 2 * world.nranks, TOPK, seed=84)
    x, idx, weights = (world.to(t[me]) for t in (work.x, work.idx, work.weights))
    with environment(DEEPEP_ENABLE_MNNVL="0"):
        normal = file.DeepEPTokenDispatcherNormal(**given_to(work))
    mode = file.DeepEPBuffer.set_deepep_mode
    for hooks in (False, True):
        mode(file.DeepEPMode.NORMAL)
        got, got_idx, got_weights, _counts = normal.dispatch(x, idx, weights)
        out = normal.combine(world.to(weighted(work, me, got.cpu(), got_idx.cpu(), got_weights.cpu())))
        assert calc_diff(out.cpu(), combine_weighted(work, me)) < 1e-4
        dispatcher = file.DeepEPTokenDispatcherLowLatency(**given_to(work), return_recv_hook=hooks)
        assert dispatcher.get_buffer() is normal.get_buffer()
        assert mode(file.DeepEPMode.LOW_LATENCY)[1]  # the buffer is clean
        for fp8 in (True, False):
            if fp8:
                packed, _idx, _weights, masked, _expected = dispatcher.dispatch(x, idx, weights, work.experts)
                rows = uncast_fp8(*(part.value.cpu() for part in packed))
            else:
                got, masked, handle, event, hook = dispatcher.dispatch_async(x, idx, use_fp8=False,
                                                                             async_finish=not hooks)
                hook() if hooks else event.current_stream_wait()
                # LMDeploy wraps the parts of an FP8 result; those of a BF16 tensor are its experts
                rows = torch.stack([part.value for part in got]).cpu()
            assert masked.tolist() == [len(places) for places in work.by_expert(me)]
            done = torch.zeros(work.local, world.nranks * MOST, HIDDEN, dtype=torch.bfloat16)
            for expert, count in enumerate(masked.tolist()):
                done[expert, :count] = expert_result(rows[expert, :count], me * work.local + expert)
            if fp8:
                out = dispatcher.combine(world.to(done), idx, weights)
            else:
                out, event, hook = dispatcher.combine_async(world.to(done), idx, weights, handle, not hooks)
                hook() if hooks else event.current_stream_wait()
            assert calc_diff(out.cpu(), combine_weighted(work, me)) < (2e-3 if fp8 else 1e-5)
    world.meet()
    assert file.DeepEPBuffer.destroy()
