# SPDX-License-Identifier: Apache-2.0
"""epx.autograd: a Mixture-of-Experts layer over ranks, and its gradients, against the same layer in one process."""

from typing import List, NamedTuple, Tuple

import deep_ep
import torch
from epx import autograd
from suite import World

HIDDEN, TOPK = 64, 3


class Layer(NamedTuple):
    """The inputs of all ranks and all experts, the same on every rank."""

    x: List[torch.Tensor]
    idx: List[torch.Tensor]
    weights: List[torch.Tensor]
    grad: List[torch.Tensor]
    experts: torch.Tensor

    def leaves(self, dtype: torch.dtype, rank: int, local: int) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mine = slice(rank * local, (rank + 1) * local)
        return tuple(t.detach().clone().requires_grad_(True)
                     for t in (self.x[rank].to(dtype), self.weights[rank], self.experts[mine]))


def draw(world: World, tokens: List[int], experts: int, reachable: int, seed: int) -> Layer:
    """`tokens` of each rank, to the first `reachable` experts; some entries are -1."""
    generator = torch.Generator().manual_seed(seed)

    def idx(count: int) -> torch.Tensor:
        chosen = torch.rand(count, reachable, generator=generator).argsort(1)[:, :TOPK]
        return torch.where(torch.rand(count, TOPK, generator=generator) < 0.1, -1, chosen)

    def normal(*shape: int) -> torch.Tensor:
        return world.to(torch.randn(*shape, generator=generator))

    return Layer([normal(n, HIDDEN) for n in tokens], [world.to(idx(n)) for n in tokens],
                 [world.to(torch.rand(n, TOPK, generator=generator)) for n in tokens],
                 [normal(n, HIDDEN) for n in tokens],
                 normal(experts, HIDDEN, HIDDEN) * HIDDEN**-0.5)


def one_process(layer: Layer, dtype: torch.dtype) -> Tuple[List[torch.Tensor], ...]:
    """Outputs, and gradients of inputs and weights, per rank; gradients of the experts."""
    x = [t.to(dtype).float().detach().clone().requires_grad_(True) for t in layer.x]
    weights = [t.clone().requires_grad_(True) for t in layer.weights]
    experts = layer.experts.clone().requires_grad_(True)
    outs = []
    for rows, idx, w in zip(x, layer.idx, weights):
        every = torch.tanh(torch.einsum("th,ehk->tek", rows, experts))
        picked = every.gather(1, idx.clamp_min(0)[..., None].expand(-1, -1, HIDDEN))
        outs.append((picked * (w * (idx >= 0))[..., None]).sum(1))
    torch.autograd.backward(outs, layer.grad)
    return outs, [t.grad for t in x], [t.grad for t in weights], experts.grad


def close(name: str, got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    apart = (got.float() - want).abs().max().item() if want.numel() else 0.0
    limit = tolerance * max(want.abs().max().item() if want.numel() else 0.0, 1e-6)
    assert got.shape == want.shape and apart <= limit, f"{name}: {apart} apart, allowed {limit}"


def check(world: World, buffer: deep_ep.Buffer, layer: Layer, dtype: torch.dtype, tolerance: float) -> None:
    rank, count = buffer.rank, layer.experts.shape[0]
    local = count // buffer.group_size
    outs, grad_x, grad_weights, grad_experts = one_process(layer, dtype)
    x, weights, experts = layer.leaves(dtype, rank, local)
    called: List[int] = []

    def expert(e: int, rows: torch.Tensor) -> torch.Tensor:
        called.append(e)
        assert rows.shape[0] > 0 and rows.dtype == dtype
        return torch.tanh(rows.float() @ experts[e])

    y = autograd.moe(buffer, x, layer.idx[rank], weights, count, expert)
    assert y.dtype == dtype
    y.backward(layer.grad[rank].to(dtype))
    close("output", y, outs[rank], tolerance)
    close("gradient of x", x.grad, grad_x[rank], tolerance)
    close("gradient of the weights", weights.grad, grad_weights[rank], tolerance)
    want = grad_experts[rank * local:(rank + 1) * local]
    close("gradient of the experts", torch.zeros_like(want) if experts.grad is None else experts.grad, want, tolerance)
    asked = {int(e) - rank * local for idx in layer.idx for e in idx.flatten() if int(e) // local == rank and e >= 0}
    assert called == sorted(asked), (called, sorted(asked))


def test_moe_and_its_gradients(world: World) -> None:
    tokens = [5 + 3 * r for r in range(world.nranks)]
    layer = draw(world, tokens, 2 * world.nranks, 2 * world.nranks, 1)
    check(world, world.buffer(), layer, torch.float32, 1e-5)
    check(world, world.buffer(), layer, torch.bfloat16, 3e-2)


def test_moe_between_nodes(world: World) -> None:
    tokens = [5 + 3 * r for r in range(world.nranks)]
    check(world, world.node_buffer(), draw(world, tokens, 2 * world.nranks, 2 * world.nranks, 2), torch.float32, 1e-5)


def test_ranks_without_tokens_and_without_rows(world: World) -> None:
    """Rank 1 has no token and the last rank's experts get none; both take part in the backward pass."""
    tokens = [0 if r == 1 else 6 for r in range(world.nranks)]
    layer = draw(world, tokens, 2 * world.nranks, max(2 * world.nranks - 2, TOPK), 3)
    check(world, world.buffer(), layer, torch.float32, 1e-5)


def test_frozen_inputs(world: World) -> None:
    """Only the experts learn. The ranks that have rows send the gradients of their outputs, and the others join."""
    layer = draw(world, [6] * world.nranks, 2 * world.nranks, TOPK, 5)
    _outs, _x, _weights, grad_experts = one_process(layer, torch.float32)
    rank, experts = world.rank, layer.experts[2 * world.rank:2 * world.rank + 2].clone().requires_grad_(True)
    y = autograd.moe(world.buffer(), layer.x[rank], layer.idx[rank], layer.weights[rank], 2 * world.nranks,
                     lambda e, rows: torch.tanh(rows @ experts[e]))
    y.backward(layer.grad[rank])
    want = grad_experts[2 * rank:2 * rank + 2]
    close("gradient of the experts", torch.zeros_like(want) if experts.grad is None else experts.grad, want, 1e-5)


def test_second_derivatives_are_refused(world: World) -> None:
    """And not 0, which they would be without a word."""
    layer = draw(world, [4] * world.nranks, world.nranks, world.nranks, 6)
    x, weights, _experts = layer.leaves(torch.float32, world.rank, 1)
    received = autograd.dispatch(world.buffer(), x, layer.idx[world.rank], weights, world.nranks)
    y = autograd.combine(received.x * received.topk_weights.sum(1, keepdim=True), received.route)
    slope, = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    try:
        slope.sum().backward()
    except RuntimeError as error:
        assert "once_differentiable" in str(error), error
    else:
        raise AssertionError("a second derivative was returned")


def test_two_layers_share_a_buffer(world: World) -> None:
    """Backward runs the layers in the opposite order, on every rank alike."""
    buffer, rank = world.buffer(), world.rank
    count = 2 * world.nranks
    layer = draw(world, [7] * world.nranks, count, count, 4)
    x, weights, experts = layer.leaves(torch.float32, rank, 2)
    y = x
    for _ in range(2):
        y = y + autograd.moe(buffer, y, layer.idx[rank], weights, count, lambda e, rows: torch.tanh(rows @ experts[e]))
    y.backward(layer.grad[rank])

    xs = [t.clone().requires_grad_(True) for t in layer.x]
    whole = layer.experts.clone().requires_grad_(True)
    outs = []
    for t, idx, w in zip(xs, layer.idx, layer.weights):
        for _ in range(2):
            every = torch.tanh(torch.einsum("th,ehk->tek", t, whole))
            picked = every.gather(1, idx.clamp_min(0)[..., None].expand(-1, -1, HIDDEN))
            t = t + (picked * (w * (idx >= 0))[..., None]).sum(1)
        outs.append(t)
    torch.autograd.backward(outs, layer.grad)
    close("output", y, outs[rank], 1e-5)
    close("gradient of x", x.grad, xs[rank].grad, 1e-5)
    close("gradient of the experts", experts.grad, whole.grad[2 * rank:2 * rank + 2], 1e-5)
