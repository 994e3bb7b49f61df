# SPDX-License-Identifier: Apache-2.0
"""Ranks that are busy with something else while others wait for them, in every phase of both modes.

On CUDA tensors all ranks may share one GPU. Half of them compute, allocate, load code, capture a graph or wait for the
device just before their part of an operation, whose other half has long been queued by the rest. An operation that kept
them from it would end in a timeout. Shapes grow from call to call, so that no library has seen them before. Values are
small integers and weights powers of two: every result is exact.
"""

from typing import Any, Callable, Dict, Iterator, Tuple

import deep_ep
import torch
from suite import World

TOKENS, HIDDEN, TOPK = 24, 256, 4
ROUNDS = 2
shapes = iter(range(40, 1 << 20, 8))


# ---- What keeps a rank busy


def new_products(world: World) -> None:
    """Matrix products of shapes never seen, in three types."""
    n = next(shapes)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        left = torch.ones(n, n + 8, device=world.device, dtype=dtype)
        assert int((left @ left.T)[0, 0]) in range(n, n + 17)


def allocations(world: World) -> None:
    """Memory that the allocator has to get from the driver, and to give back."""
    held = [torch.empty((1 << 20) + next(shapes), device=world.device) for _ in range(4)]
    held[0].fill_(1)
    del held
    if world.device.type == "cuda":
        torch.cuda.empty_cache()


def module_loading(world: World) -> None:
    """Functions of torch that come with code of their own, loaded at their first use."""
    n = next(shapes)
    x = torch.eye(n, device=world.device)
    for function in (torch.fft.rfft, torch.linalg.cholesky, torch.linalg.qr, torch.sort, torch.cumsum):
        function(x, **({"dim": 0} if function is torch.cumsum else {}))


def graph_capture(world: World) -> None:
    """A graph of this rank alone."""
    if world.device.type != "cuda":
        return
    x, graph = torch.ones(next(shapes), device=world.device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = x * 2 + 1
    graph.replay()
    assert int(y[0]) == 3


def host_synchronization(world: World) -> None:
    """A value that comes to the host, and a wait for a stream of its own."""
    assert int(torch.arange(next(shapes), device=world.device)[3]) == 3
    if world.device.type == "cuda":
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):
            torch.ones(1024, device=world.device).sum()
        other.synchronize()


BUSY: Dict[str, Callable[[World], None]] = {
    "products": new_products, "allocations": allocations, "modules": module_loading, "capture": graph_capture,
    "synchronization": host_synchronization}


# ---- Operations in phases: a generator stops wherever a rank may be late


def routing(world: World, experts: int, seed: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """(x, indices) of this rank."""
    rng = torch.Generator().manual_seed(100 * seed + world.rank)
    x = torch.randint(-8, 9, (TOKENS, HIDDEN), generator=rng).bfloat16()
    return world.to(x), world.to(torch.rand(TOKENS, experts, generator=rng).argsort(1)[:, :TOPK].contiguous())


def high_throughput(world: World, buffer: deep_ep.Buffer, seed: int) -> Iterator[None]:
    """Layout, dispatch with a new routing, combine."""
    x, idx = routing(world, 2 * world.nranks, seed)
    weights = torch.full(idx.shape, 0.25, device=world.device)
    per_rank, per_node, per_expert, in_rank, _event = buffer.get_dispatch_layout(idx, 2 * world.nranks)
    yield
    recv, _idx, recv_weights, _counts, handle, _event = buffer.dispatch(
        x, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert, topk_idx=idx, topk_weights=weights)
    yield
    out, out_weights, _event = buffer.combine(recv, handle, topk_weights=recv_weights)
    yield
    assert torch.equal(out, (x.float() * in_rank.sum(1, keepdim=True)).bfloat16())
    assert torch.equal(out_weights, weights)


def low_latency(world: World, buffer: deep_ep.Buffer, seed: int, hooks: bool) -> Iterator[None]:
    """Dispatch and combine; with hooks, their halves."""
    x, idx = routing(world, 2 * world.nranks, seed)
    weights = torch.full(idx.shape, 0.25, device=world.device)
    recv, _counts, handle, _event, hook = buffer.low_latency_dispatch(
        x, idx, TOKENS, 2 * world.nranks, use_fp8=False, return_recv_hook=hooks)
    yield
    if hooks:
        hook()
        yield
    out, _event, hook = buffer.low_latency_combine(recv.clone(), idx, weights, handle, return_recv_hook=hooks)
    yield
    if hooks:
        hook()
        yield
    assert torch.equal(out, x)


def run_late(world: World, operation: Callable[[int], Iterator[None]], phases: int) -> None:
    """In each phase, with each way of being busy, the odd ranks come late, then the even ones."""
    seed = 0
    for busy in BUSY.values():
        for late_phase in range(phases):
            for late in range(ROUNDS):
                seed += 1
                for phase, _ in enumerate(operation(seed)):
                    if phase == late_phase and world.rank % 2 == late:
                        busy(world)


def test_busy_ranks_in_high_throughput(world: World) -> None:
    """Products, allocations, code, graphs and waits of some ranks while others wait in layout, dispatch, combine."""
    run_late(world, lambda seed: high_throughput(world, world.buffer(), seed), 3)


def test_busy_ranks_in_low_latency(world: World) -> None:
    """The same in whole calls of low latency."""
    run_late(world, lambda seed: low_latency(world, world.buffer(), seed, False), 2)


def test_busy_ranks_in_low_latency_with_hooks(world: World) -> None:
    """The same between the halves of calls."""
    run_late(world, lambda seed: low_latency(world, world.buffer(), seed, True), 4)


class Exchange(torch.autograd.Function):
    """There and back, forwards and backwards; `busy` runs before the backward pass, on autograd's own thread."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, world: World, busy: Callable[[World], None], seed: int) -> torch.Tensor:
        ctx.world, ctx.busy, ctx.seed = world, busy, seed
        for _ in high_throughput(world, world.buffer(), seed):
            pass
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.world.rank % 2:
            ctx.busy(ctx.world)
        for _ in high_throughput(ctx.world, ctx.world.buffer(), ctx.seed + 1):
            pass
        return grads[0] * 2, None, None, None


def test_busy_ranks_on_autograds_thread(world: World) -> None:
    """Backward passes meet in an operation while some ranks are still busy with products of their own."""
    for seed, busy in enumerate(BUSY.values()):
        x = torch.ones(4, 4, device=world.device, requires_grad=True)
        y = Exchange.apply(x, world, busy, 1000 + 2 * seed)
        (y @ torch.ones(4, next(shapes), device=world.device)).sum().backward()
        assert x.grad is not None and float(x.grad[0, 0]) > 0
