# SPDX-License-Identifier: Apache-2.0
"""The calls that frameworks make, argument for argument (docs/frameworks.md): Megatron-LM, xtuner, vLLM, SGLang,
Primus-Turbo, UCCL-EP.

Experts do nothing here: a row comes back as it was sent, once from every rank that got it, so that what combine must
give is known. The other modules compare everything else.
"""

import contextlib
from typing import Any, Iterator, NamedTuple, Optional, Tuple

import deep_ep
import torch
import torch.distributed as dist
from deep_ep import _resizable
from deep_ep.utils import EventHandle, EventOverlap
from reference import cast_fp8, same_bits
from suite import World

TOKENS, HIDDEN, TOPK = 24, 512, 4


class Batch(NamedTuple):
    """This rank's tokens and their experts."""

    x: torch.Tensor
    idx: torch.Tensor
    weights: torch.Tensor
    experts: int

    def times(self, ranks: int) -> torch.Tensor:
        """How many ranks each token goes to."""
        at = torch.where(self.idx >= 0, self.idx // (self.experts // ranks), ranks)
        return torch.nn.functional.one_hot(at, ranks + 1)[:, :, :ranks].amax(1).sum(1)

    def returned(self, ranks: int) -> torch.Tensor:
        """What an unweighted combine gives."""
        return (self.x.float() * self.times(ranks)[:, None]).to(self.x.dtype)


def batch(world: World, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(100 * seed + world.rank)
    experts = 4 * world.nranks
    idx = torch.rand(TOKENS, experts, generator=generator).argsort(1)[:, :TOPK]
    idx = torch.where(torch.rand(TOKENS, TOPK, generator=generator) < 0.1, -1, idx)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    return Batch(world.to(x), world.to(idx), world.to(torch.rand(TOKENS, TOPK, generator=generator)), experts)


def check_weights(got: torch.Tensor, sent: Batch) -> None:
    assert torch.equal(got, torch.where(sent.idx >= 0, sent.weights, 0.0))


def hinted(group: Any, hidden_bytes: int, configs: Tuple[deep_ep.Config, ...]) -> Tuple[int, int]:
    """Bytes for a buffer, as Megatron-LM, SGLang and Primus-Turbo ask for them."""
    nvl = max(config.get_nvl_buffer_size_hint(hidden_bytes, group.size()) for config in configs)
    rdma = max(config.get_rdma_buffer_size_hint(hidden_bytes, group.size()) for config in configs)
    return nvl, rdma


# ---- Megatron-LM: training, forward and backward

def megatron_layer(buffer: deep_ep.Buffer, sent: Batch, ranks: int, asynchronous: bool) -> None:
    """Forward and backward of one MoE layer."""
    def before() -> Optional[EventOverlap]:
        return EventOverlap(EventHandle()) if asynchronous else None

    how = dict(async_finish=asynchronous, allocate_on_comm_stream=asynchronous)
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
        sent.idx, sent.experts, previous_event=before(), **how)
    # The layout's event is given on as it is, also where it holds none.
    rows, _, row_weights, counts, handle, after = buffer.dispatch(
        sent.x, topk_idx=sent.idx, topk_weights=sent.weights, num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
        previous_event=event, **how)
    if asynchronous:
        after.current_stream_wait()
    assert torch.tensor(counts).sum().item() >= rows.shape[0]

    out, _, after = buffer.combine(rows, handle=handle, async_finish=asynchronous, previous_event=before(),
                                   allocate_on_comm_stream=asynchronous)
    if asynchronous:
        after.current_stream_wait()
    assert same_bits(out, sent.returned(ranks))

    # Backward: a combine's gradient is dispatched along the handle, a dispatch's is combined with its weights.
    grad, *nothing, after = buffer.dispatch(out.contiguous(), handle=handle, previous_event=before(), **how)
    assert nothing == [None] * 4
    if asynchronous:
        after.current_stream_wait()
    assert grad.shape == rows.shape
    grad, grad_weights, after = buffer.combine(rows.contiguous(), handle, topk_weights=row_weights.float(),
                                               previous_event=before(), **how)
    if asynchronous:
        after.current_stream_wait()
    assert same_bits(grad, sent.returned(ranks))
    check_weights(grad_weights, sent)


def test_megatron(world: World) -> None:
    group = dist.group.WORLD
    old = deep_ep.Buffer.num_sms
    deep_ep.Buffer.set_num_sms(24)
    configs = (deep_ep.Buffer.get_dispatch_config(group.size()), deep_ep.Buffer.get_combine_config(group.size()))
    nvl, rdma = hinted(group, HIDDEN * 2, configs)
    buffer = deep_ep.Buffer(group, nvl, rdma)
    assert not (buffer.group != group or buffer.num_nvl_bytes < nvl or buffer.num_rdma_bytes < rdma)
    for asynchronous in (False, True):
        megatron_layer(buffer, batch(world), world.nranks, asynchronous)
    deep_ep.Buffer.set_num_sms(old)


# ---- xtuner: training, with events of deep_ep_cpp and handles as saved tensors

class XtunerDispatch(torch.autograd.Function):
    """Backward is a combine by a handle of the tensors that autograd kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights: torch.Tensor, buffer: deep_ep.Buffer, sent: Batch) -> Any:
        layout = buffer.get_dispatch_layout(sent.idx, sent.experts, previous_event=xtuner_event(), async_finish=True,
                                            allocate_on_comm_stream=True)
        per_rank, per_node, per_expert, in_rank, event = layout
        rows, row_idx, row_weights, counts, handle, event = buffer.dispatch(
            x, topk_idx=sent.idx, topk_weights=weights, num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
            previous_event=event, async_finish=True, allocate_on_comm_stream=True)
        event.current_stream_wait()
        ctx.save_for_backward(*handle)
        ctx.buffer = buffer
        return rows, row_idx, row_weights, counts, handle

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _idx: Any, grad_weights: torch.Tensor, *_: Any) -> Any:
        x, weights, event = ctx.buffer.combine(
            grad, ctx.saved_tensors, topk_weights=grad_weights, previous_event=xtuner_event(), async_finish=True,
            allocate_on_comm_stream=True)
        event.current_stream_wait()
        return x, weights, None, None


class XtunerCombine(torch.autograd.Function):
    """Backward is a dispatch by such a handle."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, buffer: deep_ep.Buffer, handle: Any) -> torch.Tensor:
        out, _weights, event = buffer.combine(rows, handle, previous_event=xtuner_event(), async_finish=True,
                                              allocate_on_comm_stream=True)
        event.current_stream_wait()
        ctx.save_for_backward(*handle)
        ctx.buffer = buffer
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        rows, *_, event = ctx.buffer.dispatch(
            grad.contiguous(), handle=ctx.saved_tensors, previous_event=xtuner_event(), async_finish=True,
            allocate_on_comm_stream=True)
        event.current_stream_wait()
        return rows, None, None


def xtuner_event() -> EventOverlap:
    from deep_ep_cpp import EventHandle as Compiled  # xtuner imports it beside deep_ep, whether it is there or not

    return EventOverlap(Compiled())


def test_xtuner(world: World) -> None:
    """One node and two. A low-latency buffer serves high throughput, too."""
    sent, ranks = batch(world, 5), world.nranks
    for buffer in world.buffers():
        for _step in range(2):
            x, weights = (t.clone().requires_grad_() for t in (sent.x, sent.weights))
            rows, row_idx, row_weights, _counts, handle = XtunerDispatch.apply(x, weights, buffer, sent)
            out = XtunerCombine.apply(rows, buffer, handle)
            assert same_bits(out, sent.returned(ranks))
            (out.float().sum() + (3 * row_weights * (row_idx >= 0)).sum()).backward()
            assert torch.equal(x.grad.float(), sent.times(ranks)[:, None].expand(-1, HIDDEN).float())
            check_weights(weights.grad, sent._replace(weights=torch.full_like(sent.weights, 3.0)))


# ---- vLLM: serving

def test_vllm_high_throughput(world: World) -> None:
    sent, ranks = batch(world, 1), world.nranks
    buffer: deep_ep.Buffer = deep_ep.Buffer(
        group=dist.group.WORLD, num_nvl_bytes=1 << 26, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=1,
        explicitly_destroy=True)
    config: Optional[deep_ep.Config] = deep_ep.Buffer.get_dispatch_config(ranks)
    previous = deep_ep.Buffer.capture()
    for payload in (sent.x, cast_fp8(sent.x)):
        per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
            topk_idx=sent.idx, num_experts=sent.experts, previous_event=previous, async_finish=False,
            allocate_on_comm_stream=False)
        rows, row_idx, row_weights, counts, handle, event = buffer.dispatch(
            x=payload, handle=None, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=sent.idx, topk_weights=sent.weights,
            expert_alignment=1, config=config, previous_event=previous, async_finish=False,
            allocate_on_comm_stream=False)
        assert event.event is None
        assert len(counts) == sent.experts // ranks and sum(counts) == (row_idx >= 0).sum().item()
        rows = rows[0] if isinstance(rows, tuple) else rows
        assert row_weights.shape == row_idx.shape == (rows.shape[0], TOPK)
        out, _, event = buffer.combine(
            x=rows.bfloat16(), handle=handle, topk_weights=None, config=deep_ep.Buffer.get_combine_config(ranks),
            previous_event=previous, async_finish=False, allocate_on_comm_stream=False)
        plain = payload[0].bfloat16() if isinstance(payload, tuple) else payload
        assert event.event is None and same_bits(out, sent._replace(x=plain).returned(ranks))
    buffer.destroy()


def check_low_latency(out: torch.Tensor, sent: Batch, tolerance: float) -> None:
    """Experts that do nothing: a token times the sum of its weights."""
    want = sent.x.float() * torch.where(sent.idx >= 0, sent.weights, 0.0).sum(1, keepdim=True)
    assert out.shape == want.shape and out.dtype == torch.bfloat16
    apart = (out.float() - want).abs().max().item()
    assert apart <= tolerance * want.abs().max().item(), apart


def uncast(rows: Any) -> torch.Tensor:
    """bf16 of (e4m3, float scales per 128 channels)."""
    if isinstance(rows, torch.Tensor):
        return rows
    values, scales = rows
    spread = scales.float().repeat_interleave(128, dim=-1)
    return (values.float() * spread).bfloat16()


def packed_scales(scales: torch.Tensor) -> torch.Tensor:
    """float scales of UE8M0, four to an int32."""
    bytes_ = torch.stack([(scales >> (8 * i)) & 0xFF for i in range(4)], dim=-1).flatten(-2)
    return (bytes_ << 23).to(torch.int32).view(torch.float32)


def test_vllm_low_latency(world: World) -> None:
    sent, ranks = batch(world, 2), world.nranks
    rdma = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=TOKENS, hidden=HIDDEN, num_ranks=ranks, num_experts=sent.experts)
    buffer = deep_ep.Buffer(
        group=dist.group.WORLD, num_nvl_bytes=1 << 20, num_rdma_bytes=rdma, low_latency_mode=True,
        num_qps_per_rank=sent.experts // ranks, allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False,
        explicitly_destroy=True, enable_shrink=True)
    for fp8, ue8m0 in ((False, False), (True, False), (True, True)):
        rows, counts, handle, _, hook = buffer.low_latency_dispatch(
            sent.x, sent.idx, TOKENS, sent.experts, use_fp8=fp8, round_scale=ue8m0, use_ue8m0=ue8m0,
            async_finish=False, return_recv_hook=True)
        hook()
        assert counts.dtype == torch.int32 and counts.shape == (sent.experts // ranks,)
        if ue8m0:
            rows = (rows[0], packed_scales(rows[1]))
        out = world.to(torch.empty_like(sent.x))
        given, _, hook = buffer.low_latency_combine(
            uncast(rows).contiguous(), sent.idx, sent.weights, handle, async_finish=False, zero_copy=False,
            return_recv_hook=True, out=out)
        hook()
        assert given.data_ptr() == out.data_ptr()
        check_low_latency(out, sent, 0.1 if fp8 else 0.02)
    mask = world.to(torch.ones(ranks, dtype=torch.int32))
    buffer.low_latency_query_mask_buffer(mask)
    assert not mask.any()
    buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
    dist.barrier()
    buffer.low_latency_clean_mask_buffer()
    buffer.destroy()


# ---- SGLang: serving, both modes on one buffer

def sglang_normal(buffer: deep_ep.Buffer, sent: Batch, ranks: int, asynchronous: bool, config: deep_ep.Config) -> None:
    previous = deep_ep.Buffer.capture() if asynchronous else None
    per_rank, per_node, per_expert, in_rank, previous = buffer.get_dispatch_layout(
        sent.idx, sent.experts, previous_event=previous, async_finish=asynchronous,
        allocate_on_comm_stream=previous is not None)
    rows, row_idx, _, counts, handle, event = buffer.dispatch(
        sent.x, topk_idx=sent.idx, topk_weights=sent.weights, num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
        previous_event=previous, async_finish=asynchronous,
        allocate_on_comm_stream=(previous is not None) and asynchronous, expert_alignment=128, config=config)
    if asynchronous:
        event.current_stream_wait()
    real = [(row_idx == e).sum().item() for e in range(sent.experts // ranks)]
    assert counts == [-(-n // 128) * 128 for n in real]
    previous = deep_ep.Buffer.capture() if asynchronous else None
    out, _, event = buffer.combine(rows, handle, async_finish=asynchronous, previous_event=previous,
                                   allocate_on_comm_stream=previous is not None, config=config)
    if asynchronous:
        event.current_stream_wait()
    assert same_bits(out, sent.returned(ranks))


def sglang_low_latency(buffer: deep_ep.Buffer, sent: Batch, hooked: bool) -> None:
    assert sent.x.shape[0] * buffer.group_size * TOPK > 0  # its estimate of rows per expert reads group_size
    rows, counts, handle, event, hook = buffer.low_latency_dispatch(
        sent.x, sent.idx, TOKENS, sent.experts, use_fp8=True, async_finish=not hooked, return_recv_hook=hooked,
        round_scale=False, use_ue8m0=False)
    hook() if hooked else event.current_stream_wait()
    out, event, hook = buffer.low_latency_combine(
        x=uncast(rows).contiguous(), topk_idx=sent.idx, topk_weights=sent.weights, handle=handle,
        async_finish=not hooked, return_recv_hook=hooked)
    hook() if hooked else event.current_stream_wait()
    check_low_latency(out, sent, 0.1)


def test_sglang(world: World) -> None:
    group, ranks = dist.group.WORLD, world.nranks
    sent = batch(world, 3)
    json = dict(num_sms=24, num_max_nvl_chunked_send_tokens=6, num_max_nvl_chunked_recv_tokens=256,
                num_max_rdma_chunked_send_tokens=6, num_max_rdma_chunked_recv_tokens=128)
    config = deep_ep.Config(**json)
    nvl, rdma = hinted(group, HIDDEN * 2, (config, deep_ep.Buffer.get_combine_config(ranks)))
    rdma = max(rdma, deep_ep.Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, ranks, sent.experts))
    buffer = deep_ep.Buffer(group, nvl, rdma, low_latency_mode=True,
                            num_qps_per_rank=max(deep_ep.Buffer.num_sms, sent.experts // ranks), allow_mnnvl=True)
    for choice in (False, True):
        sglang_normal(buffer, sent, ranks, choice, config)
        assert buffer.low_latency_mode
        buffer.clean_low_latency_buffer(TOKENS, HIDDEN, sent.experts)
        sglang_low_latency(buffer, sent, choice)


# ---- Primus-Turbo: training without waiting for counts

def test_primus_turbo(world: World) -> None:
    group, ranks = dist.group.WORLD, world.nranks
    sent = batch(world, 4)
    configs = (deep_ep.Buffer.get_dispatch_config(ranks), deep_ep.Buffer.get_combine_config(ranks))
    buffer = deep_ep.Buffer(group, *hinted(group, HIDDEN * 2, configs), use_default_stream_as_comm_stream=True)
    worst = ranks * TOKENS
    for as_tensor, bound in ((True, 0), (True, worst), (False, worst)):
        per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
            sent.idx, sent.experts, previous_event=None, async_finish=False, allocate_on_comm_stream=False)
        rows, row_idx, row_weights, counts, handle, _ = buffer.dispatch(
            sent.x, topk_idx=sent.idx, topk_weights=sent.weights, num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
            previous_event=event, async_finish=False, allocate_on_comm_stream=False,
            num_recv_tokens_per_expert_as_cuda=as_tensor, num_worst_tokens=bound)
        real = torch.stack([(row_idx == e).sum() for e in range(sent.experts // ranks)])
        if as_tensor:
            assert isinstance(counts, torch.Tensor) and counts.device == sent.x.device
            assert counts.dtype == torch.int64 and torch.equal(counts, real)
        else:
            assert counts == []
        assert not bound or rows.shape[0] == worst
        # Its combine is asynchronous without an event to wait for.
        out, _, event = buffer.combine(rows, handle=handle, async_finish=True, previous_event=None,
                                       allocate_on_comm_stream=False)
        event.current_stream_wait()
        assert same_bits(out, sent.returned(ranks))
        grad, grad_weights, _ = buffer.combine(rows.contiguous(), handle, topk_weights=row_weights.float())
        check_weights(grad_weights, sent)


# ---- UCCL-EP: proxies that a program starts and stops

def test_uccl(world: World) -> None:
    group, sent = dist.group.WORLD, batch(world, 5)
    proxies, workers = deep_ep.initialize_uccl(0, 0, world.rank, world.nranks, group, use_normal_mode=True,
                                               is_intranode=True, rdma_buffer_is_host_allocated=False)
    buffer = deep_ep.Buffer(group, int(2e9), 0, low_latency_mode=False, num_qps_per_rank=1, explicitly_destroy=True,
                            is_intranode=True)
    for proxy in proxies + buffer.proxies:
        buffer.connect_atomic_buffer(proxy)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(sent.idx, sent.experts)
    rows, _idx, _weights, _counts, handle, _ = buffer.dispatch(
        sent.x, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert, topk_idx=sent.idx, topk_weights=sent.weights)
    buffer.reset_rdma_buffer()
    assert same_bits(buffer.combine(rows, handle)[0], sent.returned(world.nranks))
    buffer.destroy()
    deep_ep.destroy_uccl(buffer.proxies, buffer.workers)
    deep_ep.destroy_uccl(proxies, workers)


# ---- DeepEP's own tests


@contextlib.contextmanager
def other_defaults() -> Iterator[None]:
    """As DeepEP's init_dist: bf16, a default device, inference_mode. On this device no memory can be read: a tensor of
    EPX that goes by it is found out."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), torch.inference_mode():
            yield
    finally:
        torch.set_default_dtype(before)


def test_other_defaults(world: World) -> None:
    """What torch makes by default does not matter: the first dispatch once crashed in a process whose default device
    was the GPU."""
    sent, ranks = batch(world, 5), world.nranks
    _resizable._place.cache_clear()  # as in a new process
    with other_defaults():
        buffer = deep_ep.Buffer(dist.group.WORLD, 1 << 24, 1 << 24, low_latency_mode=True)
        elastic = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=TOKENS, hidden=HIDDEN)
        hybrid = deep_ep.HybridEPBuffer(dist.group.WORLD, HIDDEN, TOKENS, sent.experts // ranks)
        per_rank, per_node, per_expert, in_rank, _event = buffer.get_dispatch_layout(sent.idx, sent.experts)
        recv, _idx, weights, _counts, handle, _event = buffer.dispatch(
            sent.x, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert, topk_idx=sent.idx, topk_weights=sent.weights)
        one, one_weights, _event = buffer.combine(recv, handle, topk_weights=weights)
        assert len(list(handle)) == 6
        recv, _idx, weights, handle, _event = elastic.dispatch(sent.x, sent.idx, sent.weights,
                                                               num_experts=sent.experts)
        two, two_weights, _event = elastic.combine(recv, handle, topk_weights=weights)
        rows, _count, handle, _event, _hook = buffer.low_latency_dispatch(sent.x, sent.idx, TOKENS, sent.experts,
                                                                          use_fp8=False)
        three, _event, _hook = buffer.low_latency_combine(rows, sent.idx, sent.weights, handle)
        recv, _probs, _scales, counts, handle = hybrid.dispatch_with_permute(
            hidden=sent.x, topk_idx=sent.idx, topk_weights=sent.weights, num_of_experts=sent.experts)
        four, _probs = hybrid.combine_with_unpermute(hidden=recv, handle=handle)
    assert same_bits(one, sent.returned(ranks)) and same_bits(two, one)
    check_weights(one_weights, sent)
    check_weights(two_weights, sent)
    total = torch.where(sent.idx >= 0, sent.weights, 0.0).sum(1, keepdim=True)
    assert torch.allclose(three.float(), sent.x.float() * total, rtol=0.02, atol=0.02)
    assert counts.device.type == "cpu" and int(counts.sum()) == recv.shape[0]
    assert torch.allclose(four.float(), sent.x.float() * (sent.idx >= 0).sum(1, keepdim=True), rtol=0.02, atol=0.02)
