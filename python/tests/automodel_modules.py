# SPDX-License-Identifier: Apache-2.0
"""NeMo AutoModel's own dispatchers on deep_ep (make frameworks). EPX_TEST_AUTOMODEL is the folder of three files of its
wheel: MoEFlexTokenDispatcher with the back ends deepep and hybridep, and the autograd functions below it."""

import contextlib
import importlib
import os
from typing import Any, Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist
from foreign import Finder, without_gpu
from reference import same_bits
from suite import World
from torchtitan_modules import MOST, TOPK, Layer, check_close

_MEGATRON = "nemo_automodel.components.moe.megatron."
REAL = (_MEGATRON + "fused_a2a", _MEGATRON + "token_dispatcher", _MEGATRON + "moe_utils")
GIVEN = {"nemo_automodel.shared.import_utils": {"safe_import_te": lambda *_names: (False, None)}}


def automodel(world: World) -> Any:
    """(fused_a2a, token_dispatcher)."""
    folder = os.environ.get("EPX_TEST_AUTOMODEL", "")
    if not os.path.isdir(folder):
        world.skip("EPX_TEST_AUTOMODEL: no files of nemo_automodel")
    Finder("nemo_automodel", folder, REAL, GIVEN).install()
    with mock.patch.object(torch, "compile", lambda function: function):  # importing its compiler takes seconds
        return [importlib.import_module(name) for name in REAL[:2]]


@contextlib.contextmanager
def first_call(world: World) -> Iterator[None]:
    """The first dispatch of hybridep waits for the GPU, without asking whether there is one."""
    with mock.patch.object(torch.cuda, "synchronize", lambda *_device: None) if world.device.type == "cpu" else \
            contextlib.nullcontext():
        yield


def check(world: World, file: Any, config: Any, steps: Any) -> None:
    """A dispatcher, and layers of linear experts on it."""
    dispatcher = file.MoEFlexTokenDispatcher(4, list(range(4 * world.rank, 4 * world.rank + 4)), config,
                                             dist.group.WORLD)
    for step, tokens in enumerate(steps):
        layer = Layer(world, tokens, step)
        rows, counts, probs = dispatcher.token_permutation2(layer.x, tokens, layer.scores, layer.idx)
        out = dispatcher.token_unpermutation((layer.apply(rows, counts).float() * probs[:, None]).to(rows.dtype))
        layer.check(out)


@without_gpu()
def test_automodel_deepep(world: World) -> None:
    """Dispatches and combines on the current stream, and asynchronous ones; another number of tokens on each rank."""
    a2a, file = automodel(world)
    for asynchronous in (False, True):
        check(world, file, file.TokenDispatcherConfig(
            moe_flex_dispatcher_backend="deepep", moe_router_topk=TOPK, num_moe_experts=4 * world.nranks,
            moe_share_token_dispatcher=False, moe_deepep_async_dispatch=asynchronous), (20, MOST - world.rank, 7))
    world.meet()
    a2a.free_buffer()


@without_gpu()
def test_automodel_hybridep(world: World) -> None:
    """By map and by indices, padded to the largest rank; pinned sizes, with which nothing waits on the host."""
    a2a, file = automodel(world)
    for how in (dict(), dict(moe_hybridep_compact_routing=True, moe_hybridep_permute_fusion=True),
                dict(moe_hybridep_num_sms_preprocessing=8, moe_hybridep_num_blocks_permute=4,
                     moe_hybridep_num_blocks_unpermute=4)):
        config = file.TokenDispatcherConfig(
            moe_flex_dispatcher_backend="hybridep", moe_router_topk=TOPK, num_moe_experts=4 * world.nranks,
            moe_share_token_dispatcher=False, **how)
        with first_call(world):
            check(world, file, config, (20, MOST - world.rank, 7))
        world.meet()
        a2a.reset_hybrid_ep_buffer()


def replayed(dispatch: Callable[[], Any], scope: Any, recorder: Any) -> None:
    """What activation checkpointing does: the forward records handles, and its repetition dispatches by them."""
    with scope(recorder, "record"):
        first = dispatch()
    if hasattr(recorder, "finalize"):
        recorder.finalize()
    recorder.rewind()
    with scope(recorder, "replay"):
        second = dispatch()
    for got, want in zip(second[:2], first[:2]):
        assert same_bits(got, want)
    assert recorder.replay_misses == 0 and second[4] is first[4]


@without_gpu()
def test_automodel_replays(world: World) -> None:
    """Dispatches that are repeated by their handles, of both back ends, and the gradients of what they return."""
    a2a, _file = automodel(world)
    layer = Layer(world, 20 - world.rank, 3)
    replayed(lambda: a2a.fused_dispatch(layer.x, layer.idx, layer.scores, layer.experts, dist.group.WORLD),
             a2a.dispatch_replay_scope, a2a.DispatchReplayRecorder())
    layer = Layer(world, 20, 4)  # HybridEP's ranks have as many tokens as each other
    probs = torch.zeros(20, layer.experts, device=layer.idx.device).scatter(1, layer.idx, layer.scores)
    outs = []

    def dispatch() -> Any:
        outs.append(a2a.hybrid_ep_dispatch(layer.x, None, probs, dist.group.WORLD, layer.local, topk_idx=layer.idx,
                                           num_experts=layer.experts))
        return outs[-1]

    with first_call(world):
        replayed(dispatch, a2a.hybridep_dispatch_replay_scope, a2a.HybridEPDispatchReplayRecorder())
    rows, row_probs, _scales, counts, handle = outs[1]
    done = (layer.apply(rows, counts).float() * row_probs[:, None]).to(rows.dtype)
    out = a2a.hybrid_ep_combine(done, handle, num_permuted_tokens=int(counts.sum()))
    layer.check(out)
    check_close(out.detach(), layer.expected()[0])
    world.meet()
    a2a.free_buffer()
    a2a.reset_hybrid_ep_buffer()
