# SPDX-License-Identifier: Apache-2.0
"""The call sequences of frameworks around ElasticBuffer, as whole MoE layers; and dispatch and combine in a graph."""

from typing import Any, List

import deep_ep
import torch
import torch.distributed as dist
from elastic_reference import Expanded, combined, flat_results
from ranks_elastic import HIDDEN, MAX, check_flat, elastic, make_work, send
from reference import Work, calc_diff, same_bits
from suite import World


def factor(expert: int) -> float:
    """What expert number `expert` multiplies its rows by."""
    return 0.5 + (expert % 7) / 4.0


def layer(work: Work, me: int) -> torch.Tensor:
    """The MoE layer of rank `me` in fp32: sum over k of weight * factor * x."""
    scale = torch.zeros(work.x[me].shape[0])
    for k in range(work.topk):
        idx = work.idx[me][:, k]
        factors = torch.tensor([factor(e) if e >= 0 else 0.0 for e in idx.tolist()])
        scale += work.weights[me][:, k] * factors
    return work.x[me].float() * scale[:, None]


def run_zones(world: World, work: Work, rows: torch.Tensor, weights: torch.Tensor, ends: List[int],
              alignment: int) -> torch.Tensor:
    """Grouped products over zones, given by their ends ("psum layout")."""
    out, start = torch.zeros(rows.shape, dtype=torch.bfloat16, device=rows.device), 0
    for expert, end in enumerate(ends):
        zone = slice(start, end)
        out[zone] = (rows[zone].float() * factor(world.rank * work.local + expert) * weights[zone, None]).bfloat16()
        start = -(-end // alignment) * alignment
    return out


def run_rows(world: World, work: Work, rows: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The same over rows with several experts each."""
    factors = torch.tensor([factor(world.rank * work.local + e) for e in range(work.local)] + [0.0])
    scale = (factors.to(rows.device)[idx] * weights).sum(1)  # -1 is the last
    return (rows.float() * scale[:, None]).bfloat16()


def test_vllm_v2(world: World) -> None:
    """[E] 9, vLLM: keywords only; M rounded up to a power of two and another in every step; both modes of CPU sync."""
    with elastic(world, use_fp8_dispatch=False, allow_hybrid_mode=False, prefer_overlap_with_compute=False,
                 allow_multiple_reduction=False) as buffer:
        assert buffer.get_theoretical_num_sms(num_experts=3 * world.nranks, num_topk=4) >= 4
        for seed, tokens, eager in ((2, None, True), (3, 32, False), (4, 128, False), (5, None, True)):
            work = make_work(world, seed)
            recv, recv_idx, weights, handle, event = buffer.dispatch(
                x=world.to(work.x[world.rank]), topk_idx=world.to(work.idx[world.rank]),
                topk_weights=world.to(work.weights[world.rank]), num_experts=work.experts,
                num_max_tokens_per_rank=tokens, do_expand=eager, do_cpu_sync=eager, async_with_compute_stream=False)
            assert event.event is None
            count = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
            if eager:
                assert sum(handle.num_recv_tokens_per_expert_list) == recv.shape[0]
                y = run_zones(world, work, recv, weights, handle.psum_num_recv_tokens_per_expert.tolist(), 1)
            else:
                assert handle.num_recv_tokens_per_expert_list == [] and (recv_idx[count:] == -1).all()
                y = torch.zeros_like(recv)
                y[:count] = run_rows(world, work, recv[:count], recv_idx[:count], weights[:count])
            out, out_weights, _event = buffer.combine(x=y, handle=handle, topk_weights=None,
                                                      async_with_compute_stream=False)
            assert out_weights is None and calc_diff(out.cpu(), layer(work, world.rank).bfloat16()) < 1e-4


def test_sglang_v2(world: World) -> None:
    """[E] 9, SGLang: never destroyed; decode expands to zones of 128 without CPU sync, prefill does not expand."""
    buffer = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=MAX, hidden=HIDDEN, num_topk=4,
                                   use_fp8_dispatch=True, allow_hybrid_mode=False, sl_idx=0,
                                   prefer_overlap_with_compute=False)
    work = make_work(world, 4)
    num_sms = buffer.get_theoretical_num_sms(work.experts, work.topk)
    num_qps = buffer.get_theoretical_num_qps(num_sms)
    for decode in (False, True):
        recv, recv_idx, weights, handle, event = buffer.dispatch(
            world.to(work.x[world.rank]), topk_idx=world.to(work.idx[world.rank]),
            topk_weights=world.to(work.weights[world.rank]), num_experts=work.experts, num_max_tokens_per_rank=MAX,
            expert_alignment=128, num_sms=num_sms, num_qps=num_qps, use_tma_aligned_col_major_sf=True,
            do_expand=decode, do_cpu_sync=not decode)
        assert event.event is None and handle.num_sms == num_sms
        if decode:
            y = run_zones(world, work, recv, weights, handle.psum_num_recv_tokens_per_expert.tolist(), 128)
        else:
            assert handle.psum_num_recv_tokens_per_scaleup_rank[-1].item() == recv.shape[0]
            y = run_rows(world, work, recv, recv_idx, weights)
        out, _weights, _event = buffer.combine(y, handle=handle, topk_weights=None, num_sms=num_sms, num_qps=num_qps)
        assert calc_diff(out.cpu(), layer(work, world.rank).bfloat16()) < 1e-4


def test_megatron_v2(world: World) -> None:
    """[E] 9, Megatron: hint and constructor agree; asynchronous, after an event; backward of dispatch is a combine with
    weights, backward of combine a dispatch with the handle."""
    hint = deep_ep.ElasticBuffer.get_buffer_size_hint(
        dist.group.WORLD, num_max_tokens_per_rank=MAX, hidden=HIDDEN, num_topk=4)
    with elastic(world, num_bytes=hint) as buffer:
        assert buffer.group == dist.group.WORLD and buffer.num_bytes >= hint and buffer.num_max_tokens_per_rank >= MAX
        work, me = make_work(world, 4), world.rank
        options = dict(async_with_compute_stream=True, allocate_on_comm_stream=True)
        recv, recv_idx, weights, handle, event = buffer.dispatch(
            world.to(work.x[me]), topk_idx=world.to(work.idx[me]), topk_weights=world.to(work.weights[me]),
            num_experts=work.experts, num_max_tokens_per_rank=MAX, expert_alignment=16, num_sms=0,
            previous_event=buffer.capture(), **options)
        event.current_stream_wait()
        assert handle.num_recv_tokens_per_expert_list == [-(-n // 16) * 16 for n in work.expert_counts(me)]
        out, _weights, event = buffer.combine(run_rows(world, work, recv, recv_idx, weights), handle=handle,
                                              num_sms=handle.num_sms, previous_event=buffer.capture(), **options)
        event.current_stream_wait()
        assert calc_diff(out.cpu(), layer(work, me).bfloat16()) < 1e-4
        grad, _idx, _weights, same, event = buffer.dispatch(
            world.to(work.x[me]), handle=handle, num_sms=handle.num_sms, previous_event=buffer.capture(), **options)
        event.current_stream_wait()
        assert same is handle and same_bits(grad, recv)
        rows = flat_results(work, me, recv.shape[0])
        back, back_weights, event = buffer.combine(world.to(rows), handle=handle, topk_weights=weights,
                                                   num_sms=handle.num_sms, previous_event=buffer.capture(), **options)
        event.current_stream_wait()
        assert same_bits(back, combined(work, me, world.nranks, False, True, False, []))
        assert torch.equal(back_weights.cpu(), torch.where(work.idx[me] >= 0, work.weights[me], 0.0))


def test_deepspeed_v2(world: World) -> None:
    """[E] 9, DeepSpeed's AutoEP: QPs for 12 SMs, expanded; backward is a combine with the gradients of the weights, and
    a dispatch by the expanded handle that does not say do_expand again: it returns a row per token."""
    num_sms, me = 12, world.rank
    with elastic(world, num_topk=4, use_fp8_dispatch=False, num_allocated_qps=num_sms + 4) as buffer:
        num_qps = buffer.get_theoretical_num_qps(num_sms)
        assert 0 < num_qps <= num_sms + 4
        work = make_work(world, 7)
        recv, none, weights, handle, _event = buffer.dispatch(
            world.to(work.x[me]), topk_idx=world.to(work.idx[me]).to(deep_ep.topk_idx_t),
            topk_weights=world.to(work.weights[me]).float(), num_experts=work.experts, do_expand=True,
            expert_alignment=1, num_sms=num_sms, num_qps=num_qps)
        y = run_zones(world, work, recv, weights, handle.psum_num_recv_tokens_per_expert.tolist(), 1)
        out, *_ = buffer.combine(y, handle=handle, topk_weights=None, num_sms=num_sms)
        assert none is None and calc_diff(out.cpu(), layer(work, me).bfloat16()) < 1e-4
        back, back_weights, _event = buffer.combine(y, handle=handle, topk_weights=2 * weights, num_sms=num_sms)
        assert same_bits(back, out) and torch.equal(
            back_weights.cpu(), torch.where(work.idx[me] >= 0, 2 * work.weights[me], 0.0))
        rows, *_ = buffer.dispatch(world.to(work.x[me]), handle=handle, num_sms=num_sms, num_qps=num_qps)
        assert same_bits(rows, work.flat(me)[2])


def deepgemm(world: World, buffer: Any) -> None:
    for alignment in (16, 32, 64, 128):
        work, me = make_work(world, 2), world.rank
        stats = world.to(torch.zeros(work.local, dtype=torch.int32))
        recv, _idx, _weights, handle, _event = send(
            world, buffer, work, cumulative_local_expert_recv_stats=stats, expert_alignment=alignment,
            do_cpu_sync=False, do_handle_copy=False, do_expand=True, use_tma_aligned_col_major_sf=True)
        assert stats.tolist() == work.expert_counts(me)
        bias = torch.randn(work.x[me].shape, generator=torch.Generator().manual_seed(me)).bfloat16()
        rows = Expanded(work, me, alignment).results(work, recv.shape[0])
        out, *_ = buffer.combine(world.to(rows), handle, bias=world.to(bias))
        assert same_bits(out, combined(work, me, world.nranks, True, False, False, [bias]))


def test_deepgemm_v2(world: World) -> None:
    """[E] 9, DeepGEMM: one reduction, alignments of 16 to 128, no CPU sync, no copy of the handle, stats, bias. It
    takes EPBuffer where there is one, whose barrier has other arguments."""
    for kind, options in ((deep_ep.ElasticBuffer, {"use_comm_stream": False}),
                          (deep_ep.EPBuffer, {"wait_comm_stream": False})):
        with elastic(world, kind=kind, use_fp8_dispatch=True, allow_multiple_reduction=False, num_cpu_timeout_secs=30,
                     num_gpu_timeout_secs=10) as buffer:
            buffer.barrier(**options)
            deepgemm(world, buffer)


def _both(buffer: deep_ep.ElasticBuffer, work: Work, inputs: Any, expand: bool) -> Any:
    x, idx, weights = inputs
    recv, recv_idx, recv_weights, handle, _event = buffer.dispatch(
        x, idx, weights, num_experts=work.experts, do_cpu_sync=False, do_expand=expand)
    out, *_ = buffer.combine(recv, handle)
    return recv, recv_idx, recv_weights, handle, out


def test_graph_v2(world: World) -> None:
    """[E] 4: without CPU sync nothing waits on the host: both layouts are captured and replayed with other inputs."""
    world.only("cuda")
    me = world.rank
    with elastic(world) as buffer:
        works = [make_work(world, seed, uneven=False) for seed in (2, 4, 6)]
        inputs = [world.to(t[me].clone()) for t in (works[0].x, works[0].idx, works[0].weights)]
        for expand in (False, True):
            _both(buffer, works[0], inputs, expand)
            torch.cuda.synchronize()
            world.meet()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = _both(buffer, works[0], inputs, expand)
            world.meet()
            for work in works[1:]:
                for tensor, value in zip(inputs, (work.x[me], work.idx[me], work.weights[me])):
                    tensor.copy_(value)
                graph.replay()
                torch.cuda.synchronize()
                if not expand:
                    check_flat(world, work, results[:4] + (None,), lambda x: x, False)
                else:
                    zones = Expanded(work, me, 1)
                    assert same_bits(results[0][:len(zones.source)], zones.rows(work.x))
                check_flat(world, work, send(world, buffer, work), lambda x: x, True)  # between replays
