# SPDX-License-Identifier: Apache-2.0
"""NeMo AutoModel's own dispatchers on deep_ep (make frameworks). EPX_TEST_AUTOMODEL is the folder of three files of its
wheel: MoEFlexTokenDispatcher with the back ends deepep and hybridep, and the autograd functions below it."""

import contextlib
import importlib
import os
from typing import Any, Iterator, List
from unittest import mock

import deep_ep
import torch
import torch.distributed as dist
from foreign import Finder, without_gpu
from reference import same_bits
from suite import World
from torch.utils.checkpoint import checkpoint
from torchtitan_modules import MOST, TOPK, Layer

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


def check(world: World, file: Any, config: Any, layers: List[Layer]) -> None:
    """A dispatcher, and layers of linear experts on it."""
    dispatcher = file.MoEFlexTokenDispatcher(4, list(range(4 * world.rank, 4 * world.rank + 4)), config,
                                             dist.group.WORLD)
    for layer in layers:
        rows, counts, probs = dispatcher.token_permutation2(layer.x, len(layer.x), layer.scores, layer.idx)
        out = dispatcher.token_unpermutation((layer.apply(rows, counts).float() * probs[:, None]).to(rows.dtype))
        layer.check(out)


def uneven(world: World) -> List[Layer]:
    """Layers with another number of tokens on each rank, and in each step."""
    return [Layer(world, tokens, step) for step, tokens in enumerate((20, MOST - world.rank, 7))]


def balanced(world: World) -> List[Layer]:
    """Layers with other routings, in which each expert has as many rows as the others."""
    layers = [Layer(world, 4 * world.nranks, step) for step in range(3)]
    for step, layer in enumerate(layers):
        at = torch.arange(len(layer.x) * TOPK).view(-1, TOPK)
        layer.idx = world.to((at + 5 * step + world.rank) % layer.experts)
    return layers


@without_gpu()
def test_automodel_deepep(world: World) -> None:
    """Dispatches and combines on the current stream, and asynchronous ones; another number of tokens on each rank."""
    a2a, file = automodel(world)
    for asynchronous in (False, True):
        check(world, file, file.TokenDispatcherConfig(
            moe_flex_dispatcher_backend="deepep", moe_router_topk=TOPK, num_moe_experts=4 * world.nranks,
            moe_share_token_dispatcher=False, moe_deepep_async_dispatch=asynchronous), uneven(world))
    world.meet()
    a2a.free_buffer()


@without_gpu()
def test_automodel_hybridep(world: World) -> None:
    """By map and by indices, padded to the largest rank; SMs and blocks; and, for balanced routings, the first
    dispatch's number of rows in all others, which do not wait for it on the host then."""
    a2a, file = automodel(world)
    waited: List[bool] = []
    dispatch = deep_ep.HybridEPBuffer.dispatch_with_permute

    def dispatch_with_permute(*args: Any, **given: Any) -> Any:
        if given.get("handle") is None:  # backward has one
            waited.append(not given["non_blocking"])
        return dispatch(*args, **given)

    for how in (dict(), dict(moe_hybridep_compact_routing=True, moe_hybridep_permute_fusion=True),
                dict(moe_hybridep_num_sms_preprocessing=8, moe_hybridep_num_blocks_permute=4,
                     moe_hybridep_num_blocks_unpermute=4),
                dict(moe_benchmark_static_routing=True)):
        pinned = "moe_benchmark_static_routing" in how
        config = file.TokenDispatcherConfig(
            moe_flex_dispatcher_backend="hybridep", moe_router_topk=TOPK, num_moe_experts=4 * world.nranks,
            moe_share_token_dispatcher=False, **how)
        waited.clear()
        with first_call(world), mock.patch.object(deep_ep.HybridEPBuffer, "dispatch_with_permute",
                                                  dispatch_with_permute):
            check(world, file, config, balanced(world) if pinned else uneven(world))
        assert waited == [True, not pinned, not pinned], waited
        world.meet()
        a2a.reset_hybrid_ep_buffer()


def check_replayed(layer: Layer, forward: Any, dispatched: List[Any], scope: Any, recorder: Any) -> None:
    """A layer with activation checkpointing: the forward records handles, and its repetition dispatches by them."""
    out = checkpoint(forward, layer.x, layer.scores, use_reentrant=False,
                     context_fn=lambda: (scope(recorder, "record"), scope(recorder, "replay")))
    if hasattr(recorder, "finalize"):
        recorder.finalize()
    recorder.rewind()
    layer.check(out)
    (*first, handle), (*second, again) = dispatched
    assert recorder.replay_misses == 0 and again is handle
    for got, want in zip(second, first):
        assert same_bits(got, want)


@without_gpu()
def test_automodel_replays(world: World) -> None:
    """Activation checkpointing with both back ends: repeated dispatches, outputs and gradients."""
    a2a, _file = automodel(world)
    dispatched: List[Any] = []
    layer = Layer(world, 20 - world.rank, 3)

    def by_deepep(x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows, idx, probs, _counts, handle = a2a.fused_dispatch(x, layer.idx, scores, layer.experts, dist.group.WORLD)
        dispatched.append((rows.detach().clone(), probs.detach().clone(), handle))
        return a2a.fused_combine(layer.apply_by_idx(rows, idx, probs), dist.group.WORLD, handle)[0]

    check_replayed(layer, by_deepep, dispatched, a2a.dispatch_replay_scope, a2a.DispatchReplayRecorder())
    world.meet()
    a2a.free_buffer()
    dispatched.clear()
    layer = Layer(world, 20, 4)  # HybridEP's ranks have as many tokens as each other

    def by_hybridep(x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        probs = torch.zeros(20, layer.experts, device=x.device).scatter(1, layer.idx, scores)
        rows, row_probs, _scales, counts, handle = a2a.hybrid_ep_dispatch(
            x, None, probs, dist.group.WORLD, layer.local, topk_idx=layer.idx, num_experts=layer.experts)
        dispatched.append((rows.detach().clone(), row_probs.detach().clone(), handle))
        done = (layer.apply(rows, counts).float() * row_probs[:, None]).to(rows.dtype)
        return a2a.hybrid_ep_combine(done, handle, num_permuted_tokens=int(counts.sum()))

    with first_call(world):
        check_replayed(layer, by_hybridep, dispatched, a2a.hybridep_dispatch_replay_scope,
                       a2a.HybridEPDispatchReplayRecorder())
    world.meet()
    a2a.reset_hybrid_ep_buffer()
