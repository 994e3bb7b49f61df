# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's own AutoEP on deep_ep (make frameworks). EPX_TEST_DEEPSPEED is the folder of two files of its source.

auto_ep_comm.py and AutoEPMoELayer's way through it run as they are, with linear experts. DeepSpeed's module replacement
and its router are not part of that.
"""

import collections
import importlib
import os
import types
from typing import Any, Dict, Optional
from unittest import mock

import deep_ep
import torch
import torch.distributed as dist
from foreign import Finder, without_gpu
from suite import World
from torch.utils.checkpoint import checkpoint
from torchtitan_modules import HIDDEN, MOST, TOPK, Layer, check_close

_INJECT = "deepspeed.module_inject."
GIVEN = {"deepspeed.comm": {"barrier": lambda group, device_ids: dist.barrier(group)}}


def deepspeed(world: World) -> Any:
    """(module_inject.auto_ep_comm, .auto_ep_layer)."""
    folder = os.environ.get("EPX_TEST_DEEPSPEED", "")
    if not os.path.isdir(folder):
        world.skip("EPX_TEST_DEEPSPEED: no files of deepspeed")
    Finder("deepspeed", folder, (_INJECT + "auto_ep_comm", _INJECT + "auto_ep_layer"), GIVEN).install()
    return [importlib.import_module(_INJECT + name) for name in ("auto_ep_comm", "auto_ep_layer")]


class Moe(torch.nn.Module):
    """What AutoEPMoELayer's way through DeepEP reads of a layer."""

    def __init__(self, world: World, comm: Any, scope: int, apply: str) -> None:
        super().__init__()
        self.ep_group, self.deepep_scope, self.score_apply, self.row_weighting_impl = (
            dist.group.WORLD, scope, apply, "eager")
        self.num_experts, self.num_local_experts, self.top_k, self.hidden_size = 4 * world.nranks, 4, TOPK, HIDDEN
        self.comm_max_tokens_per_rank, self.comm_num_sm, self.comm_qp_margin = MOST, comm.DEFAULT_COMM_SMS, 4
        self._deepep_exchange, self._deepep_replay = None, comm.DeepEPCheckpointReplay()


def run(file: Any, moe: Moe, layer: Layer, reentrant: Optional[bool]) -> torch.Tensor:
    """The layer's output, with activation checkpointing of either form or without."""

    def forward(x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return file.AutoEPMoELayer._deepep_route(moe, x, types.SimpleNamespace(
            selected_experts=layer.idx, top_scores=scores))

    moe.experts = layer.apply
    if reentrant is None:
        return forward(layer.x, layer.scores)
    return checkpoint(forward, layer.x, layer.scores, use_reentrant=reentrant)


def counted(calls: Dict[str, int]) -> Any:
    """Counts dispatches: new ones, those of backward, and those that repeat a forward, with its weights."""
    dispatch = deep_ep.ElasticBuffer.dispatch

    def counting(*args: Any, **given: Any) -> Any:
        again = "backward" if given.get("topk_weights") is None else "repeated"
        calls["new" if given.get("handle") is None else again] += 1
        return dispatch(*args, **given)

    return mock.patch.object(deep_ep.ElasticBuffer, "dispatch", counting)


@without_gpu()
def test_deepspeed_autoep(world: World) -> None:
    """Outputs and gradients: weights before or after the experts, and checkpoints: those of the form that keeps the
    forward's graph dispatch by its handle again, the reentrant ones anew."""
    comm, file = deepspeed(world)
    scope = comm.new_exchange_scope()
    moes = [Moe(world, comm, scope, apply) for apply in ("post", "pre")]
    for step, (tokens, reentrant) in enumerate(((20, None), (MOST, False), (7, True), (11, False))):
        layers = [Layer(world, tokens - world.rank % 3, 2 * step + i) for i in range(2)]
        calls: Dict[str, int] = collections.Counter()
        with counted(calls):
            outs = [run(file, moe, layer, reentrant) for moe, layer in zip(moes, layers)]
            for layer, out in reversed(list(zip(layers, outs))):
                layer.check(out)
        assert calls == {"new": 4 if reentrant else 2, "backward": 2, **({"repeated": 2} if reentrant is False else {})}
        with torch.no_grad():
            out = run(file, moes[0], layers[1], None)
        check_close(out, layers[1].expected()[0])
    exchange = moes[0]._deepep_exchange
    assert exchange is moes[1]._deepep_exchange and exchange.holders == 2
    world.meet()
    comm.destroy_exchanges(moes[0])
    assert not exchange.destroyed
    comm.destroy_exchanges(torch.nn.ModuleList(moes))
    assert exchange.destroyed and not comm._SHARED_EXCHANGES
