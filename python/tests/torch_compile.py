# SPDX-License-Identifier: Apache-2.0
"""torch.compile around deep_ep (make frameworks; loading torch.compile takes longer than the tests). A graph ends at
each call of deep_ep, and another one begins behind it, as at DeepEP's C++ functions."""

from typing import Any, Tuple

import deep_ep
import epx.autograd
import torch
import torch._dynamo
import torch.distributed as dist
from deep_ep.utils import EventHandle, EventOverlap
from reference import Work
from suite import World


def test_compiled_training(world: World) -> None:
    work, buffer = Work(world.nranks, 16, 64, 2 * world.nranks, 2, seed=81), world.buffer()
    idx = world.to(work.idx[world.rank])

    def layer(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.relu(epx.autograd.moe(buffer, x * 2, idx, weights, work.experts, lambda e, rows: rows + e)) + 1

    def step(function: Any) -> Tuple[Any, ...]:
        x, weights = (world.to(t[world.rank]).clone().requires_grad_(True) for t in (work.x, work.weights))
        out = function(x, weights)
        out.float().sum().backward()
        return out.detach(), x.grad, weights.grad

    want, compiled = step(layer), torch.compile(layer, backend="aot_eager")
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(step(compiled), want))


def test_compiled_calls(world: World) -> None:
    """Buffers are made, used and released inside compiled code: V1 with events, low latency with hooks, V2."""
    work, group = Work(world.nranks, 16, 64, 2 * world.nranks, 2, seed=82), dist.group.WORLD
    given = [world.to(t[world.rank]) for t in (work.x, work.idx, work.weights)]

    def calls(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        high = deep_ep.Buffer(group, 1 << 24, 0)
        ranks, nodes, experts, in_rank, _event = high.get_dispatch_layout(idx, work.experts)
        rows, _idx, _weights, _counts, handle, event = high.dispatch(
            x * 2, num_tokens_per_rank=ranks, num_tokens_per_rdma_rank=nodes, is_token_in_rank=in_rank,
            num_tokens_per_expert=experts, topk_idx=idx, topk_weights=weights, async_finish=True,
            previous_event=EventOverlap(EventHandle()))
        event.current_stream_wait()
        first, _weights, event = high.combine(rows * 2, handle, async_finish=True)
        with event:
            other = x + 1
        hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(32, 64, world.nranks, work.experts)
        low = deep_ep.Buffer(group, 0, hint, low_latency_mode=True)
        packed, _counts, handle, _event, hook = low.low_latency_dispatch(
            x, idx, 32, work.experts, use_fp8=False, return_recv_hook=True)
        hook()
        second, _event, hook = low.low_latency_combine(packed * 1, idx, weights, handle, return_recv_hook=True)
        hook()
        elastic = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=32, hidden=64, num_topk=2)
        rows, _idx, _weights, handle, _event = elastic.dispatch(
            x, topk_idx=idx, topk_weights=weights, num_experts=work.experts, num_max_tokens_per_rank=32)
        third = elastic.combine(rows * 2, handle)[0]
        return first + 1, other, second + 1, third + 1

    want = calls(*given)
    assert all(torch.equal(a, b) for a, b in zip(torch.compile(calls, backend="aot_eager")(*given), want))
    world.meet()
