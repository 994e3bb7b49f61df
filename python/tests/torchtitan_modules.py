# SPDX-License-Identifier: Apache-2.0
"""torchtitan's own deepep and hybridep on deep_ep (make frameworks). EPX_TEST_TORCHTITAN is the folder of two files of
its wheel.

torchtitan registers its custom operators for CUDA tensors; here their functions are registered for CPU tensors as well.
"""

import importlib
import logging
import os
from typing import Any, Tuple

import torch
import torch.distributed as dist
from foreign import Finder, without_gpu
from suite import World

HIDDEN, TOPK, MOST = 64, 3, 32
_DEEPEP = "torchtitan.distributed.deepep."
_ON_CPU = set()


def titan(world: World, name: str) -> Any:
    """The module."""
    folder = os.environ.get("EPX_TEST_TORCHTITAN", "")
    if not os.path.isdir(folder):
        world.skip("EPX_TEST_TORCHTITAN: no files of torchtitan")
    Finder("torchtitan", folder, (_DEEPEP + "deepep", _DEEPEP + "hybridep"),
           {"torchtitan.tools.logging": {"logger": logging.getLogger("torchtitan")}}).install()
    return importlib.import_module(_DEEPEP + name)


class Layer:
    """A layer of linear experts on this rank, and what one rank alone makes of the same tokens."""

    def __init__(self, world: World, tokens: int, seed: int) -> None:
        rng = torch.Generator().manual_seed(100 * seed + world.rank)
        self.experts, self.local = 4 * world.nranks, 4
        x = torch.randn(tokens, HIDDEN, generator=rng).bfloat16()
        scores, idx = torch.rand(tokens, self.experts, generator=rng).topk(TOPK, 1)
        self.idx = world.to(idx)
        self.x, self.scores = (world.to(t).requires_grad_(True) for t in (x, scores.contiguous()))
        self.weight = torch.randn(self.local, HIDDEN, HIDDEN, generator=rng) / HIDDEN ** 0.5
        everyone = [torch.empty_like(self.weight) for _ in range(world.nranks)]
        dist.all_gather(everyone, self.weight)
        self.weight, self.all_weights = world.to(self.weight), world.to(torch.cat(everyone))

    def apply(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """The experts of this rank; rows behind their rows become 0."""
        parts, at = [], 0
        for expert, count in enumerate(counts.tolist()):
            parts.append((rows[at:at + count].float() @ self.weight[expert]).to(rows.dtype))
            at += count
        return torch.cat([*parts, torch.zeros_like(rows[at:])])

    def apply_by_idx(self, rows: torch.Tensor, idx: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The weighted sums of the experts of this rank; -1 is none of them."""
        out = torch.zeros(rows.shape, device=rows.device)
        for k in range(TOPK):
            score = torch.where(idx[:, k] < 0, 0, scores[:, k])
            weight = self.weight[idx[:, k].clamp(min=0)]
            out = out + score[:, None] * torch.einsum("th,thj->tj", rows.float(), weight)
        return out.to(rows.dtype)

    def expected(self) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(output, gradients of the tokens and of the scores)."""
        x, scores = (t.detach().clone().requires_grad_(True) for t in (self.x, self.scores))
        out = torch.zeros(x.shape, device=x.device)
        for k in range(TOPK):
            out = out + scores[:, k, None] * torch.einsum("th,thj->tj", x.float(), self.all_weights[self.idx[:, k]])
        out.square().sum().backward()
        return out.detach(), x.grad, scores.grad

    def check(self, out: torch.Tensor) -> None:
        """Output, and gradients of the sum of its squares."""
        out.float().square().sum().backward()
        for got, want in zip((out.detach(), self.x.grad, self.scores.grad), self.expected()):
            check_close(got, want)


def check_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Rows, products and sums round to BF16."""
    off = ((got.float() - want.float()).abs().max() / want.float().abs().max()).item()
    assert got.shape == want.shape and off < 0.03, off


@without_gpu()
def test_torchtitan_deepep(world: World) -> None:
    """Training with host sync, and inference expanded without it."""
    deepep = titan(world, "deepep")
    if world.device.type == "cpu" and "deepep" not in _ON_CPU:
        _ON_CPU.add("deepep")
        torch.library.impl(deepep._lib, "dispatch", "CPU")(deepep._dispatch_op_impl)
        torch.library.impl(deepep._lib, "combine", "CPU")(deepep._combine_op_impl)
    for step, tokens in enumerate((20, MOST, 7)):
        layer = Layer(world, tokens, step)
        deepep.get_buffer(dist.group.WORLD, hidden=HIDDEN, num_max_tokens_per_rank=MOST, num_topk=TOPK)
        given = layer.x, layer.idx, layer.scores, layer.local, layer.experts
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                rows, counts, state = deepep.dispatch_tokens(*given, num_tokens_per_rank=tokens, cudagraphable=True)
                out = deepep.combine_tokens(layer.apply(rows, counts), state)
                deepep.sync_combine()
            layer.check(out) if grad else check_close(out, layer.expected()[0])
    world.meet()
    deepep._buffer.destroy()
    deepep._buffer = None


@without_gpu()
def test_torchtitan_hybridep(world: World) -> None:
    """With and without host sync and padding."""
    try:
        from torch._library.opaque_object import CustomClassBase  # noqa: F401
    except ImportError:
        world.skip("torchtitan's hybridep needs a newer torch than %s" % torch.__version__)
    hybridep = titan(world, "hybridep")
    if world.device.type == "cpu" and "hybridep" not in _ON_CPU:
        _ON_CPU.add("hybridep")
        for op in (hybridep._dispatch_impl, hybridep._combine_impl, hybridep._dispatch_bwd_impl,
                   hybridep._combine_bwd_impl):
            op.register_kernel("cpu")(op._init_fn)
    for step, (tokens, pad, factor) in enumerate(((20, None, None), (MOST, 8, None), (7, None, 1.0), (9, 16, 1.0))):
        layer = Layer(world, tokens, step)
        hybridep.get_buffer(dist.group.WORLD, HIDDEN, MOST, layer.local)
        rows, counts, state = hybridep.dispatch_tokens(
            layer.x, layer.idx, layer.scores, layer.local, layer.experts, dist.group.WORLD,
            non_blocking_expert_capacity_factor=factor, pad_multiple=pad)
        layer.check(hybridep.combine_tokens(layer.apply(rows, counts), state, pad_multiple=pad))
    world.meet()
    hybridep._buffer = None
