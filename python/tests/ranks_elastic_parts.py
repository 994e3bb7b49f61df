# SPDX-License-Identifier: Apache-2.0
"""ElasticBuffer beside dispatch and combine: sizes, names, barrier, lifetime, Engram, pipeline, all-gather."""

import contextlib
import copy
import ctypes
import functools
import gc
import inspect
import io
import os
import random
import tempfile
import time
import warnings
from typing import Any, Callable, Iterator, List
from unittest import mock

import deep_ep
import epx
import torch
import torch.distributed as dist
from deep_ep import _elastic_meeting
from deep_ep import elastic as elastic_module
from deep_ep._elastic_gather import Gathers
from deep_ep._elastic_meeting import Meeting
from deep_ep._elastic_move import default_device
from deep_ep._memory import CudaHeap
from ranks_elastic import HIDDEN, MAX, elastic, make_work, send
from reference import same_bits
from suite import World, environment, refused

BIG = 64 << 20


def test_what_has_no_effect_is_said_once(world: World) -> None:
    """Arguments that are accepted and do nothing, and variables: in the log of rank 0, once for each."""
    from deep_ep import _unused

    group = dist.group.WORLD
    with environment(EPX_LOG="info", EP_REUSE_NCCL_COMM="0", EP_JIT_DEBUG="1", EP_NIC_NAME="card"), \
            mock.patch.object(_unused, "_printed", set()), contextlib.redirect_stderr(io.StringIO()) as printed:
        for _ in range(2):
            deep_ep.Buffer(group, num_qps_per_rank=12, allow_nvlink_for_low_latency_mode=False)
            with elastic(world, sl_idx=0, num_allocated_qps=9) as buffer:
                buffer.barrier(sequential=False)
                buffer._check_resources(4, 5)
        # On one host: that hosts have no fabric is said once in a process, and ranks_high_throughput counts it.
        hybrid = deep_ep.HybridEPBuffer(group, 64, 8, 2, use_mnnvl=True, num_blocks_permute=3)
        assert hybrid._elastic._engine.settings.use_fabric
        config = deep_ep.Config(20, 8, 256)
        deep_ep.Buffer(group)._check_config(config)
    names = [line.split("info: ")[1].split("=")[0].split(": ")[-1] for line in printed.getvalue().splitlines()]
    assert names == ([] if world.rank else [
        "EP_JIT_DEBUG", "EP_REUSE_NCCL_COMM", "num_qps_per_rank", "allow_nvlink_for_low_latency_mode", "sl_idx",
        "num_allocated_qps", "sequential", "num_qps", "num_blocks_permute", "num_max_nvl_chunked_send_tokens"]), names


def test_sizes_agree_with_the_vectors(world: World) -> None:
    """[E] 2, 3: the size formula, and that hint and constructor agree."""
    from deep_ep._C import calculate_elastic_buffer_size as size
    from deep_ep._C import get_elastic_buffer_alignment

    assert get_elastic_buffer_alignment() == 2097152
    assert size(2, 8, True, 4096, 7168, 8) == 1218445312
    for tokens, fp8, topk, expected in ((4096, False, 8, 473956352), (4096, True, 8, 471859200),
                                        (8192, True, 8, 943718400), (128, True, 8, 16777216),
                                        (4096, False, 0, 484442112)):
        assert size(1, 8, True, tokens, 7168, topk, fp8) == expected
    hint = deep_ep.ElasticBuffer.get_buffer_size_hint(dist.group.WORLD, 128, 256, num_topk=4)
    with elastic(world, num_max_tokens_per_rank=128, hidden=256) as buffer:
        assert buffer.num_bytes == hint and hint % 2097152 == 0
        assert buffer.get_engram_storage_size_hint(1000, 100, 10) == (2 << 20, 2 << 20)
        assert buffer.get_engram_storage_size_hint(1 << 16, 100, 1 << 15) == (8 << 20, 14 << 20)  # rows of 224 bytes
        assert buffer.get_engram_storage_size_hint(1 << 16, 100, 1 << 15, torch.uint8) == (4 << 20, 8 << 20)  # 128
        assert buffer.get_pp_buffer_size_hint(1 << 20, 3) == 12 << 20
        assert buffer.get_pp_buffer_size_hint(1, 1 << 14) == 2 << 20 and \
            buffer.get_pp_buffer_size_hint(33, 1 << 14) == 4 << 20
        assert buffer.get_agrs_num_max_session_bytes(dist.group.WORLD, (3, 5), torch.bfloat16) == \
            -(-world.nranks * 30 // 32) * 32
        assert buffer.get_agrs_num_max_session_bytes(dist.group.WORLD, [(16,), (32,)], torch.float32) == \
            world.nranks * 192
        assert buffer.get_agrs_buffer_size_hint(dist.group.WORLD, 5 << 20) == 6 << 20


def test_sms_and_qps(world: World) -> None:
    """[E] 3: even, at least 4, as published for 8x2, 8x4 and 8; queue pairs; prefer_overlap_with_compute."""
    from deep_ep._elastic_sizes import V2_5, default_qps, theoretical_qps, theoretical_sms

    for domains, expected in (((2, 8), 12), ((4, 8), 6), ((1, 8), 14)):
        assert theoretical_sms(domains, 8, 256, 8, 132, (50, 430, 200, 50)) == expected
    for domains, expected in (((2, 8), 16), ((4, 8), 8), ((1, 8), 16)):  # by the model of 2.5
        assert theoretical_sms(domains, 8, 256, 8, 132, (50, 430, 180, 45), V2_5) == expected
    assert (default_qps(True, False), default_qps(True, True), default_qps(False, False)) == (129, 65, 17)
    assert [theoretical_qps(sms, False, 17) for sms in (4, 9, 12)] == [4, 9, 9]
    assert [theoretical_qps(sms, True, 129) for sms in (4, 8, 12)] == [65, 129, 129]
    with elastic(world) as buffer:
        sms = buffer.get_theoretical_num_sms(16, 4)
        assert sms % 2 == 0 and sms >= 4 and sms == buffer.get_theoretical_num_sms(num_experts=16, num_topk=4)
        with refused("num_topk: expected at most num_experts = 16"):
            buffer.get_theoretical_num_sms(16, 17)
        with refused("num_experts: expected an integer of at least %d" % world.nranks):
            buffer.get_theoretical_num_sms(world.nranks - 1, 1)
        # As DeepEP, by the argument: on one node, too.
        assert buffer.num_allocated_qps in (65, 129)
        assert buffer.get_theoretical_num_qps(4) == 65 and buffer.get_theoretical_num_qps(
            64) == buffer.num_allocated_qps
        buffer._check_qps(18)
    with elastic(world, allow_hybrid_mode=False) as buffer:
        assert buffer.num_allocated_qps == 17 and buffer.get_theoretical_num_qps(64) == 9
        with refused("num_qps: expected at most num_allocated_qps = 17"):
            buffer._check_qps(18)
    with elastic(world, prefer_overlap_with_compute=False, num_allocated_qps=5) as buffer:
        assert buffer.get_theoretical_num_sms(16, 4) >= 64 and buffer.get_theoretical_num_qps(20) == 5


def test_names(world: World) -> None:
    """[E] 1: what DeepEP's callers and tests import."""
    from deep_ep.buffers.allocator import BufferAllocator
    from deep_ep.buffers.base import BufferBase
    from deep_ep.buffers.elastic import ElasticBuffer, EPHandle
    from deep_ep.buffers.engram import EngramBuffer
    from deep_ep.buffers.ep import EPBuffer
    from deep_ep.buffers.legacy import Buffer
    from deep_ep.buffers.pp import PPBuffer
    from deep_ep.utils import EventHandle, EventOverlap
    from deep_ep.utils.comm import NCCLCommHandle, destroy_all_managed_nccl_comm, get_nccl_comm_handle
    from deep_ep.utils.event import EventHandle as again
    from deep_ep.utils.find_pkgs import find_nccl_root, find_nvshmem_root
    from deep_ep.utils.semantic import value_or, weak_lru

    assert (ElasticBuffer, EPHandle, Buffer) == (deep_ep.ElasticBuffer, deep_ep.EPHandle, deep_ep.Buffer)
    assert (BufferAllocator, BufferBase, EngramBuffer, EPBuffer, PPBuffer) == (
        deep_ep.BufferAllocator, deep_ep.BufferBase, deep_ep.EngramBuffer, deep_ep.EPBuffer, deep_ep.PPBuffer)
    assert again is EventHandle and deep_ep.EventOverlap is EventOverlap and weak_lru is not None
    assert deep_ep.__version__.startswith("2.1.0") and value_or(None, 3) == 3
    group = dist.group.WORLD
    assert deep_ep.get_physical_domain_size(group) == (1, world.nranks)
    assert deep_ep.get_logical_domain_size(group, allow_hybrid_mode=False) == (1, world.nranks)
    assert isinstance(get_nccl_comm_handle(group), NCCLCommHandle)
    fresh = get_nccl_comm_handle(group, force_new_comm=True)
    assert fresh.nccl_comm is fresh.get() is group and fresh.managed
    destroy_all_managed_nccl_comm()
    assert fresh.get() is None
    find_nccl_root(), find_nvshmem_root()
    compiled = deep_ep._C
    assert (compiled.EventHandle, compiled.Config, compiled.topk_idx_t) == (
        EventHandle, deep_ep.Config, deep_ep.topk_idx_t) and compiled.is_sm90_compiled()
    deep_ep.utils.envs.check_nvlink_connections(group)


def test_comm(world: World) -> None:
    """deep_ep.comm of DeepEP 2.5: functions of a buffer, and of a group or a buffer."""
    from deep_ep import comm
    from deep_ep.utils import comm as older
    from deep_ep.utils import envs

    assert deep_ep.comm is comm and older.get_nccl_comm_handle is comm.get_nccl_comm_handle
    assert deep_ep.destroy_all_managed_nccl_comm is comm.destroy_all_managed_nccl_comm
    assert deep_ep.EPBuffer.barrier.__doc__ == comm.barrier.__doc__
    group, whole = dist.group.WORLD, (1, world.nranks)
    for hybrid in (True, False):
        with elastic(world, nodes=2 if world.nodes and world.nranks % 2 == 0 else 1, kind=deep_ep.EPBuffer,
                     allow_hybrid_mode=hybrid) as buffer:
            physical = buffer.get_physical_domain_size()
            assert (physical == whole) != (world.nodes and world.nranks % 2 == 0)
            for given in (buffer, group):
                for asked in (comm, envs, deep_ep):
                    assert asked.get_physical_domain_size(given) == physical
                    assert asked.get_logical_domain_size(given) == (
                        physical if hybrid or given is group else whole), (given, asked)
                assert comm.get_logical_domain_size(given, hybrid) == (physical if hybrid else whole)
            comm.barrier(buffer)
            comm.barrier(buffer, wait_comm_stream=False, with_cpu_sync=True)
            if world.device.type == "cuda":
                assert comm.get_comm_stream(buffer) == buffer.get_comm_stream()
            else:
                with contextlib.suppress(RuntimeError):
                    comm.get_comm_stream(buffer)
                    raise AssertionError("a communication stream without a GPU")


def test_argument_names(world: World) -> None:
    """[E] 1, 2, 3, [R] 6: the names of arguments, by which callers pass them."""
    from deep_ep.utils import comm, envs, gate, math, testing

    group = "group num_max_tokens_per_rank hidden num_topk use_fp8_dispatch allow_hybrid_mode allow_multiple_reduction"
    sms = "num_experts num_topk num_scaleout_topk rdma_gbs nvlink_gbs sm_read_gbs sm_write_gbs"
    for function, names in (
            (deep_ep.ElasticBuffer.get_buffer_size_hint, group),
            (deep_ep.ElasticBuffer.get_theoretical_num_sms, "self " + sms),
            (deep_ep.ElasticBuffer.get_engram_storage_size_hint, "num_entries hidden num_max_tokens_per_rank dtype"),
            (deep_ep.ElasticBuffer.get_pp_buffer_size_hint, "num_max_tensor_bytes num_max_inflight_tensors"),
            (deep_ep.ElasticBuffer.get_agrs_buffer_size_hint, "group num_max_session_bytes"),
            (deep_ep.ElasticBuffer.pp_set_config, "self num_max_tensor_bytes num_max_inflight_tensors"),
            (deep_ep.ElasticBuffer.pp_send, "self t dst_rank_idx num_sms"),
            (deep_ep.ElasticBuffer.pp_recv, "self t src_rank_idx num_sms"),
            (deep_ep.ElasticBuffer.agrs_set_config, "self num_max_session_bytes num_max_all_gathers_per_session"),
            (deep_ep.ElasticBuffer.agrs_new_session, "self enabled"),
            (envs.init_dist, "local_rank num_local_ranks seed"), (envs.dist_print, "s once_in_node"),
            (envs.init_seed, "global_seed"), (envs.get_nvlink_gbs, "factor"), (envs.get_rdma_gbs, "nic_name"),
            (envs.check_fast_rdma_atomic_support, "nic_name"),
            (gate.get_unbalanced_scores, "num_tokens num_experts num_ranks num_topk ratio precise"),
            (comm.get_nccl_comm_handle, "group force_new_comm")):
        assert list(inspect.signature(function).parameters) == names.split(), (function, names)
    assert list(inspect.signature(comm.NCCLCommHandle).parameters) == ["nccl_comm", "managed"]
    assert envs.get_nvlink_gbs() >= 0 and envs.check_torch_deterministic() is None
    testing.flush_l2_cache()
    one = torch.arange(6, dtype=torch.int32)
    assert math.hash_tensor(one) == 15 and math.hash_tensors(one, (one, None), one) == 15


def test_ep_buffer(world: World) -> None:
    """EPBuffer, DeepEP's later name: its arguments, and results that come from the event of a deferred epilogue."""
    work = make_work(world, seed=3)
    buffer = deep_ep.EPBuffer(dist.group.WORLD, None, 24, HIDDEN, 4, False, 0, True, explicitly_destroy=True)
    assert isinstance(buffer, deep_ep.ElasticBuffer) and buffer.deterministic and buffer.num_cpu_bytes == 0
    for expand in (False, True):
        rows, idx, weights, handle, event = send(world, buffer, work, do_expand=expand, do_zero_padding=expand)
        assert event.event is None
        event = send(world, buffer, work, do_expand=expand, do_zero_padding=expand, defer_epilogue=True,
                     async_with_compute_stream=True)
        assert isinstance(event, deep_ep.EventOverlap)
        late, late_idx, late_weights, late_handle = event.current_stream_wait(release_handle=True)
        assert same_bits(late, rows) and torch.equal(late_weights, weights) and event.event is None
        assert (late_idx is None) == (idx is None) and (idx is None or torch.equal(late_idx, idx))
        combined, back, _event = buffer.combine(rows, handle, weights)
        event = buffer.combine(late, late_handle, late_weights, defer_epilogue=True, async_with_compute_stream=True)
        again, again_back = event.current_stream_wait()
        assert same_bits(again, combined) and torch.equal(again_back, back)
        for what, call in (("defer_epilogue", lambda: buffer.combine(late, late_handle, defer_epilogue=True)),
                           ("lb_allocation_plan", lambda: deep_ep.EPBuffer(
                               dist.group.WORLD, lb_allocation_plan_or_num_bytes=4096))):
            with refused(what):
                call()
    buffer.destroy()


def test_what_2_5_asks_a_buffer(world: World) -> None:
    """context, main_context, print_memory_usage, sl_idx of EPBuffer; alignments, sizes and refusals of deep_ep._C."""
    group, whole = dist.group.WORLD, (1, world.nranks)
    work = make_work(world, 3)
    with elastic(world, kind=deep_ep.EPBuffer) as buffer:
        context = buffer.context
        assert isinstance(buffer, deep_ep.BufferBase) and buffer.main_context is context
        assert context.get_physical_domain_size() == context.get_logical_domain_size() == whole
        assert (context.num_gpu_buffer_bytes, context.num_workspace_bytes, context.num_rdma_storage_bytes) == (
            buffer.num_bytes, 0, 0)
        for groups in (0, 1):
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                buffer.print_memory_usage()
            text = "deep_ep.EPBuffer: %d bytes; %d groups" % (buffer.num_bytes, groups)
            assert printed.getvalue().startswith(text), printed.getvalue()
            send(world, buffer, work)
        assert buffer.num_bytes == deep_ep._C.calculate_ep_buffer_size(
            deep_ep.comm.get_nccl_comm_handle(group).get(), MAX, HIDDEN, 4, False, True, True)
    assert buffer.context is None and buffer.main_context is None
    assert is_refused(buffer.print_memory_usage, "destroyed")
    for variables, given, expected in (({}, {}, 3), ({"EP_DEFAULT_RDMA_SL": "5"}, {}, 5),
                                       ({"EP_DEFAULT_RDMA_SL": "5"}, {"sl_idx": 1}, 1),
                                       ({"EP_DEFAULT_RDMA_SL": "5", "EP_OVERRIDE_RDMA_SL": "0"}, {"sl_idx": 1}, 0),
                                       ({"EP_DEFAULT_RDMA_SL": "5", "EP_OVERRIDE_RDMA_SL": "0"}, {}, 0)):
        with environment(**variables), elastic(world, kind=deep_ep.EPBuffer, **given) as buffer:
            assert buffer.sl_idx == expected
    for module in (deep_ep, deep_ep._C):
        assert (module.get_num_allocation_alignment(), module.get_num_rdma_alignment(),
                module.get_num_tma_alignment()) == (2097152, 64, 32)
    assert not hasattr(deep_ep._C, "EPBuffer") and not hasattr(deep_ep._C, "no_such_name")
    try:
        deep_ep._C.EPBuffer
    except AttributeError as failure:
        assert "no compiled runtime; its buffers are in deep_ep" in str(failure)


def test_surroundings(world: World) -> None:
    """[E] 1, 4, 8: dist_print, get_rdma_gbs, bench_kineto; EP_NIC_NAME, EP_OVERRIDE_RDMA_SL, EP_USE_NVIDIA_TOOLS;
    torch's deterministic mode with fill_uninitialized_memory is refused."""
    from deep_ep.utils import envs, testing

    with tempfile.TemporaryDirectory() as cards, mock.patch.object(envs, "_CARDS", cards):
        for name, rate, kind in (("mlx5_0", "100 Gb/sec", "MT4129"), ("card", "400 Gb/sec (4X NDR)", "MT4131")):
            os.makedirs(os.path.join(cards, name, "ports", "1"))
            for file, text in (("ports/1/rate", rate), ("hca_type", kind)):
                with open(os.path.join(cards, name, file), "w", encoding="ascii") as out:
                    out.write(text + "\n")
        assert envs.get_rdma_gbs() == 12.5 and not envs.check_fast_rdma_atomic_support()
        assert envs.get_rdma_gbs("card") == 50 and envs.get_rdma_gbs("none") == 0
        with environment(EP_NIC_NAME="card"):
            assert envs.get_rdma_gbs() == 50 and envs.check_fast_rdma_atomic_support()
    for once, local, said in ((False, "3", "word\n"), (True, "0", "word\n"), (True, "3", "")):
        with environment(LOCAL_RANK=local), contextlib.redirect_stdout(io.StringIO()) as printed, \
                mock.patch.object(dist, "barrier", lambda: print("all")):
            envs.dist_print("word", once)
        assert printed.getvalue() == said + "all\n"
    with environment(EP_USE_NVIDIA_TOOLS="1"):
        assert testing.bench_kineto(lambda: 1 // 0, "kernel") == 1
        assert tuple(testing.bench_kineto(lambda: 1 // 0, ("a", "b"))) == (1, 1)
    x = torch.ones(1 << 20, device=world.device)
    sine, nothing = testing.bench_kineto(x.sin_, ("sin_kernel", "no such kernel"), num_tests=3,
                                         suppress_kineto_output=True, barrier_comm_profiling=world.device.type == "cpu")
    assert nothing == 0 and (0 < sine < 1 if world.device.type == "cuda" else sine == 0)
    work = make_work(world, 2)
    with environment(EP_OVERRIDE_RDMA_SL="5"), elastic(world, sl_idx=1) as buffer:
        assert buffer.sl_idx == 5
        _x, _idx, _weights, handle, _event = send(world, buffer, work)
        torch.use_deterministic_algorithms(True)
        try:
            for call in (lambda: send(world, buffer, work),
                         lambda: buffer.combine(torch.empty(handle.num_recv_tokens, HIDDEN, dtype=torch.bfloat16,
                                                            device=world.device), handle)):
                try:
                    call()
                except AssertionError as failure:
                    assert "fill_uninitialized_memory" in str(failure)
                else:
                    raise AssertionError("not refused")
            torch.utils.deterministic.fill_uninitialized_memory = False
            send(world, buffer, work)
        finally:
            torch.utils.deterministic.fill_uninitialized_memory = True
            torch.use_deterministic_algorithms(False)


def test_utilities_of_2_5(world: World) -> None:
    """deep_ep.utils of DeepEP 2.5: byte counts, silence, variables, rates of an SM, and a buffer that knows these."""
    from deep_ep.utils import envs, testing

    for text, number in (("1G", 1 << 30), ("64M", 64 << 20), ("512k", 512 << 10), ("1048576", 1 << 20),
                         (" 2 TiB ", 2 << 40), ("1.5 KB", 1536), (".5g", 1 << 29), ("7b", 7)):
        assert testing.parse_num_bytes(text) == number, text
    for text in ("", "much", "0", "-1", "1.2.3", "1P", ".", "1 G G"):
        try:
            testing.parse_num_bytes(text)
        except ValueError as failure:
            assert repr(text) in str(failure)
        else:
            raise AssertionError("accepted: %r" % text)
    with tempfile.TemporaryFile() as file:
        kept = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            with testing.suppress_stdout_stderr():
                os.write(1, b"library")
                print("python")
            with testing.empty_suppress():
                os.write(1, b"heard")
        finally:
            os.dup2(kept, 1)
            os.close(kept)
        file.seek(0)
        assert file.read() == b"heard"
    with environment(EPX_TEST_A="old"):
        with envs.EnvOverride([("EPX_TEST_A", "new", True), ("EPX_TEST_B", "b", True), ("EPX_TEST_C", "c", False)]):
            assert [os.environ.get("EPX_TEST_" + name) for name in "ABC"] == ["new", "b", None]
        assert [os.environ.get("EPX_TEST_" + name) for name in "ABC"] == ["old", None, None]
    assert (envs.get_sm_read_gbs(), envs.get_sm_write_gbs()) == (180, 45)
    with elastic(world, kind=deep_ep.EPBuffer) as buffer:
        sms = buffer.get_theoretical_num_sms(16, 4, nvlink_gbs=430)
        assert sms % 4 == 0 and sms == buffer.get_theoretical_num_sms(
            16, 4, nvlink_gbs=430, sm_read_gbs=180, sm_write_gbs=45)
        assert buffer.get_theoretical_num_sms(16, 4, nvlink_gbs=430, sm_read_gbs=90, sm_write_gbs=22) > sms
        with refused("sm_read_gbs: expected a number above 0, or 0"):
            buffer.get_theoretical_num_sms(16, 4, sm_read_gbs=-1)
    with elastic(world) as older:
        with refused("sm_read_gbs: expected a number above 0, got 0"):
            older.get_theoretical_num_sms(16, 4, sm_read_gbs=0)


def test_bench_kineto(world: World) -> None:
    """[E] 7: the names of DeepEP's tests have times, so that nobody divides by 0; what did not run has none."""
    from deep_ep.utils.testing import bench_kineto

    def bench(fn: Callable[[], Any], names: Any, **options: Any) -> Any:
        return bench_kineto(fn, names, num_tests=4, suppress_kineto_output=True, **options)

    work, before = make_work(world, 3), vars(deep_ep.EPBuffer)["dispatch"]
    for kind in (deep_ep.ElasticBuffer, deep_ep.EPBuffer):
        with elastic(world, kind=kind) as buffer:
            rows, _idx, _weights, handle, _event = send(world, buffer, work)
            together = dict(barrier_comm_profiling=True, barrier=buffer.barrier)
            for options in ({}, dict(async_with_compute_stream=True), dict(do_expand=True)):
                times = bench(lambda: send(world, buffer, work, **options), (
                    "dispatch_impl", "dispatch_copy_epilogue_impl", "combine_impl", "barrier"), **together)
                assert 0 < times[0] < 1 and times[1] == times[0] and times[2] == 0 and times[3] > 0, times
            times = bench(lambda: buffer.combine(rows, handle), ("combine_impl", "combine_reduce_epilogue_impl"))
            assert 0 < times[0] == times[1] < 1
            assert 0 < bench(lambda: [buffer.barrier() for _ in range(5)], "barrier", **together) < 1
            if kind is deep_ep.EPBuffer:
                deferred = dict(defer_epilogue=True, async_with_compute_stream=True)
                assert bench(lambda: send(world, buffer, work, **deferred).wait()[0], "dispatch_impl") > 0
    with elastic(world, num_bytes=BIG) as buffer:
        buffer.pp_set_config(4096, 2)
        one = world.to(torch.ones(64))

        def ring() -> None:
            buffer.pp_send(one, (world.rank + 1) % world.nranks)
            buffer.pp_recv(one, (world.rank - 1) % world.nranks)
        assert min(bench(ring, ("send_impl", "recv_impl"))) > 0
    assert vars(deep_ep.EPBuffer)["dispatch"] is before
    low_latency(world, bench)


def low_latency(world: World, bench: Callable[..., Any]) -> None:
    """V1's: two kernels per period are the call and its hook."""
    if world.device.type == "cuda":
        return  # kernels have these names there
    buffer, experts = world.buffer(), 2 * world.nranks
    x = torch.ones(8, 512).bfloat16()
    idx = torch.arange(16).view(8, 2) % experts

    def pair(hooked: bool) -> None:
        rows, _count, handle, _event, hook = buffer.low_latency_dispatch(
            x, idx, 8, experts, use_fp8=False, return_recv_hook=hooked)
        hook and hook()
        _x, _event, hook = buffer.low_latency_combine(rows, idx, torch.ones(8, 2), handle, return_recv_hook=hooked)
        hook and hook()
    whole = bench(lambda: pair(False), ("dispatch", "combine"))
    halves = bench(lambda: pair(True), ("dispatch", "combine"), num_kernels_per_period=2)
    assert min(whole) > 0 and all(len(parts) == 2 and min(parts) > 0 for parts in halves), (whole, halves)


def test_attributes(world: World) -> None:
    """[E] 2: attributes that callers read, and reuse of a buffer by its group and bytes."""
    with elastic(world) as buffer:
        assert buffer.group == dist.group.WORLD and buffer.rank_idx == world.rank and buffer.num_ranks == world.nranks
        assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks) == (1, world.nranks)
        assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == (0, world.rank)
        assert (buffer.num_rdma_ranks, buffer.num_nvlink_ranks) == (1, world.nranks)
        assert buffer.allow_hybrid_mode and buffer.allow_multiple_reduction and buffer.prefer_overlap_with_compute
        assert not buffer.deterministic and buffer.explicitly_destroy and buffer.runtime is not None
    assert buffer.runtime is None


def test_events(world: World) -> None:
    """[E] 4: EventOverlap: its hook runs once, after the first wait, and there is one only; calling the object sets
    release_handle for the next `with`; without an event there is nothing to wait for."""
    ran: List[int] = []
    event = deep_ep.EventOverlap(deep_ep.EventHandle(), (torch.ones(1),))
    event.register_hook_after_wait(fn=lambda: ran.append(1))
    try:
        event.register_hook_after_wait(lambda: ran.append(2))
    except AssertionError:
        pass
    else:
        raise AssertionError("a second hook was taken")
    event.current_stream_wait()
    event.current_stream_wait()
    assert ran == [1] and event.hook_after_wait is None and event.event is not None and len(event.extra_tensors) == 1
    with event(release_handle=True) as same:
        assert same is event or same is None
    assert event.event is None and event.extra_tensors is None
    event, failures = deep_ep.EventOverlap(deep_ep.EventHandle()), [1]
    event.register_hook_after_wait(lambda: failures.pop() // 0 if failures else "result")
    try:
        event.wait()
    except ZeroDivisionError:
        assert event.hook_after_wait is not None  # a hook that has failed may be tried again
    assert event.wait() == "result" and event.wait() is None and event.hook_after_wait is None
    event = deep_ep.EventOverlap()
    with event:  # no event: nothing to wait for
        pass
    with refused("EventOverlap.event"):
        event.current_stream_wait()
    assert type(deep_ep.ElasticBuffer.capture()) is deep_ep.EventHandle
    assert type(deep_ep.Buffer.capture()) is deep_ep.EventOverlap


def test_sizes_of_all_gathers(world: World) -> None:
    """[R] 3: bytes of a session, each tensor rounded up to 32; of a buffer, to 2 MiB; [R] 1: the formula of _C."""
    group, ranks = dist.group.WORLD, world.nranks
    one = deep_ep.ElasticBuffer.get_agrs_num_max_session_bytes(group, (3, 5), torch.bfloat16)
    assert one == -(-ranks * 30 // 32) * 32
    assert deep_ep.ElasticBuffer.get_agrs_num_max_session_bytes(group, [(3, 5), (3, 5)], torch.bfloat16) == 2 * one
    assert deep_ep.ElasticBuffer.get_agrs_buffer_size_hint(group, one) == 2 << 20
    assert deep_ep._C.calculate_elastic_buffer_size(1, 8, True, 4096, 7168, 8) == 473956352


def test_barrier(world: World) -> None:
    """[E] 3: nobody passes before the last rank has come; in all forms; with num_bytes alone."""
    with elastic(world, num_bytes=1 << 30, num_max_tokens_per_rank=0, hidden=0) as buffer:
        for options in ({}, {"use_comm_stream": False}, {"with_cpu_sync": True}, {"sequential": False}):
            buffer.barrier(**options)
        begin = time.perf_counter()
        if world.rank == 1:
            time.sleep(0.2)
        buffer.barrier(with_cpu_sync=True)
        assert world.rank == 1 or time.perf_counter() - begin > 0.1
        for _ in range(20):
            buffer.barrier()
    with elastic(world, kind=deep_ep.EPBuffer) as buffer:
        for options in ({}, {"wait_comm_stream": False}, {"with_cpu_sync": True}, {"sequential": False}):
            if world.rank == 1:
                time.sleep(0.1)
            begin = time.perf_counter()
            buffer.barrier(**options)
            if world.device.type == "cpu" and options:  # the first one makes a group
                assert world.rank == 1 or time.perf_counter() - begin > 0.05
        with refused("context_idx"):
            buffer.barrier(context_idx=1)


def test_cpu_timeout(world: World) -> None:
    """[E] 2: the host's wait for counts is bounded by num_cpu_timeout_secs: "Dispatch CPU wait". So is that for the
    ranks in the first dispatch, which goes on when they come."""
    work = make_work(world, 2)
    with elastic(world, num_cpu_timeout_secs=1, num_gpu_timeout_secs=3) as buffer:
        for why in ("rank 1 did not make this call", "counts of the other ranks"):
            if world.rank != 1:
                try:
                    send(world, buffer, work)
                    raise AssertionError("a dispatch without rank 1 succeeded")
                except epx.TimeoutExpired as error:
                    assert "Dispatch CPU wait" in str(error) and why in str(error), error
                    assert "num_cpu_timeout_secs = 1" in str(error), error
            world.meet()
            if why.startswith("rank"):
                send(world, buffer, work)
                world.meet()


def times_out(call: Callable[[], Any], *words: str) -> None:
    """Checks that it does, and says so."""
    try:
        call()
    except epx.TimeoutExpired as error:
        assert all(word in str(error) for word in words), error
        return
    raise AssertionError("expected TimeoutExpired")


def test_meetings(world: World) -> None:
    """A rank that comes when the others have given up does not go on without them; then all meet. The deadline of a
    barrier is EPX_TIMEOUT_MS. Ranks whose stores are not one and the same, or can do nothing, do not meet."""
    meeting = Meeting(epx.bootstrap.from_torch(), {})
    if world.rank != 1:
        times_out(lambda: meeting.wait("call", "limit", 0.2), "call: rank ", "1", " did not", "limit = 0.2")
    world.meet()
    if world.rank == 1:
        times_out(lambda: meeting.wait("call", "limit", 0.2), "call: rank 0", "limit = 0.2")
    world.meet()
    for _ in range(3):
        meeting.wait("call", "limit", 60)
    assert meeting._old == [meeting._number - 1]
    with environment(EPX_TIMEOUT_MS="70000"), elastic(world) as buffer:
        engine = buffer._engine
        given, engine.timeout_ms = engine.timeout_ms, 50
        if world.rank != 1:
            times_out(buffer.barrier, "barrier: rank ", "EPX_TIMEOUT_MS / 1000 = 0.05")
            times_out(lambda: buffer.pp_set_config(1 << 10, 2), "barrier: rank ", "EPX_TIMEOUT_MS / 1000 = 0.05")
        world.meet()
        engine.timeout_ms = given
        assert engine._gpu_timeout() == ("EPX_TIMEOUT_MS / 1000", 70)
        buffer.barrier()
    for store in (dist.HashStore(), dist.PrefixStore("none", dist.Store())):
        with mock.patch.object(_elastic_meeting, "_store", lambda store=store: store), elastic(world) as buffer:
            buffer._engine._meeting.wait("call", "limit", 0)
            assert is_refused(lambda: buffer.pp_set_config(1 << 10, 2), "ranks that share a store")


def test_release_is_local(world: World) -> None:
    """[E] 2, 3: destroy() needs explicitly_destroy and may be repeated; a dropped buffer waits for nobody; results stay
    valid; one that was not destroyed warns."""
    work = make_work(world, 2)
    buffer = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=24, hidden=128)
    try:
        buffer.destroy()
        raise RuntimeError("destroy() of a buffer without explicitly_destroy")
    except AssertionError:
        pass
    recv = send(world, buffer, work)[0]
    if world.rank % 2:  # half of the ranks; the others keep theirs
        del buffer
        gc.collect()
    dist.barrier()
    assert same_bits(recv, work.flat(world.rank)[2])
    buffer = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=24, hidden=128, explicitly_destroy=True)
    recv = send(world, buffer, work)[0]
    if world.rank == 0:
        buffer.destroy()
        buffer.destroy()
    dist.barrier()
    assert same_bits(recv, work.flat(world.rank)[2])
    if world.rank:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            del buffer
            gc.collect()
        assert any("destroy()" in str(warning.message) for warning in seen)


def test_references(world: World) -> None:
    """[E] 1: deep_ep.utils.refs, .math, .gate and .testing as DeepEP's tests use them, against ElasticBuffer itself."""
    from deep_ep.utils import math as m
    from deep_ep.utils import refs
    from deep_ep.utils.envs import get_global_seed, get_local_seed, init_seed
    from deep_ep.utils.gate import get_unbalanced_scores, rank_load
    from deep_ep.utils.testing import bench

    state = torch.get_rng_state()
    init_seed(3)
    assert get_global_seed() == 3 and get_local_seed() == 3 + world.rank
    tokens, hidden, topk, experts = 24, 256, 4, 4 * world.nranks
    scores = world.to(get_unbalanced_scores(tokens - world.rank, experts, world.nranks, topk, 1.0))
    weights, idx = torch.topk(scores, topk, dim=-1, sorted=False)
    x = world.to(torch.randn(tokens - world.rank, hidden).bfloat16())
    for fp8 in (False, True):
        given = m.per_token_cast_to_fp8(x) if fp8 else x
        with elastic(world, num_max_tokens_per_rank=tokens, hidden=hidden) as buffer:
            recv, recv_idx, recv_weights, handle, _ = buffer.dispatch(given, idx, weights, num_experts=experts)
            want, want_idx, want_weights, sources, counts = refs.dispatch(given, idx, weights, tokens, experts)
            for got, expected in zip(recv if fp8 else (recv,), want if fp8 else (want,)):
                assert same_bits(got, expected)
            assert torch.equal(recv_idx, want_idx) and torch.equal(handle.recv_src_metadata[:, 0], sources)
            assert torch.equal(recv_weights[recv_idx >= 0], want_weights[recv_idx >= 0])
            assert counts.sum() == handle.num_recv_tokens
            y = refs.generate_pre_combine_data(sources, tokens, topk, hidden)
            y[recv_idx == -1] = 0
            mine = refs.generate_pre_combine_data(
                world.rank * tokens + torch.arange(len(x), device=world.device), tokens, topk, hidden)
            out, *_ = buffer.combine(refs.ordered_accumulate(y), handle)
            assert torch.equal(out, refs.combine(mine, idx, 1, world.nranks, experts, None, True, False))
    assert m.calc_diff(x, x) < 1e-9 and m.ceil_div(7, 2) == 4 and m.align(7, 4) == 8 and m.safe_div(0, 0) == 0
    assert m.calc_diff(m.per_token_cast_back(*m.per_token_cast_to_fp8(x)), x) < 1e-3
    assert [t.shape for t in m.per_token_cast_to_fp8(x[:0, :200])] == [(0, 200), (0, 2)]
    ones = torch.ones(3, 512).to(torch.float8_e4m3fn)  # one column of four exponents, column-major: 2^1
    assert m.per_token_cast_back(ones, torch.full((1, 3), 0x80808080 - 2**32, dtype=torch.int32).T).unique().item() == 2
    assert m.count_bytes(x, (x, None)) == 2 * x.numel() * 2 and m.hash_tensors(x, x) == 0
    pairs = torch.tensor([[1, 1, 0], [-1, 2, 2]])
    m.inplace_unique(pairs, 3)
    assert pairs.tolist() == [[1, 0, -1], [2, -1, -1]]
    grouped = m.create_grouped_scores(torch.ones(1, 4), torch.tensor([[1]]), 2)
    assert grouped.tolist() == [[0.0, 0.0, 1.0, 1.0]]
    load = rank_load(torch.topk(get_unbalanced_scores(4096, 64, 8, 4, 2.0, True), 4).indices, 64, 8).float()
    assert abs(float(load[0] / load[1:].mean()) - 2.0) < 0.1
    assert bench(lambda: None, 1, 3)[0] >= 0
    torch.set_rng_state(state)


def test_engram(world: World) -> None:
    """[R] 6: rows of any rank by global index, bf16 and e4m3 with scales, row-major and column-major; in one slice and
    in several."""
    from deep_ep import _elastic_engram

    whole = _elastic_engram._SLICE_TOKENS, _elastic_engram._LEAST_SLICE
    for nodes, limits in ((1, whole), (2, whole), (1, (10, 10))):
        _elastic_engram._SLICE_TOKENS, _elastic_engram._LEAST_SLICE = limits
        try:
            _check_engram(world, nodes)
        finally:
            _elastic_engram._SLICE_TOKENS, _elastic_engram._LEAST_SLICE = whole


def _check_engram(world: World, nodes: int) -> None:
    entries, hidden, tokens, n = 50, 96, 9, 3
    with elastic(world, nodes, num_bytes=BIG, num_cpu_bytes=BIG // 2) as buffer:
        for fp8 in (False, True):
            tables = [torch.randn(entries, hidden, generator=torch.Generator().manual_seed(r)).bfloat16()
                      for r in range(world.nranks)]
            tables = [t.to(torch.float8_e4m3fn) for t in tables] if fp8 else tables
            sf = torch.arange(world.nranks * entries * 2, dtype=torch.int32).view(-1, 2) if fp8 else None
            buffer.engram_write(world.to(tables[world.rank]), None if sf is None else world.to(sf))
            rng = torch.Generator().manual_seed(world.rank)
            count = 0 if world.rank == 1 else tokens
            idx = torch.randint(0, world.nranks * entries, (count, n), generator=rng, dtype=torch.int32)
            whole = torch.cat([t.view(torch.uint8) for t in tables])
            for tma in (False, True):
                with mock.patch.object(buffer._engine.bootstrap, "allgather", None):  # which has no deadline
                    data, scales = buffer.engram_fetch(world.to(idx), use_tma_aligned_col_major_sf=tma)()
                assert data.shape == (count, n * hidden) and data.dtype == tables[0].dtype
                want = whole[idx.reshape(-1).long()].reshape(count, n * whole.shape[1])
                assert not count or torch.equal(data.cpu().view(torch.uint8), want)
                assert (scales is None) == (sf is None)
                if sf is not None:
                    assert torch.equal(scales.cpu(), sf[idx.reshape(-1).long()].reshape(count, n * 2))
                    assert not tma or scales.stride() == (1, -(-count // 4) * 4)


def check_engram_buffer(world: World) -> None:
    """Layers of different sizes; ranks with different numbers of tokens; results in any order."""
    kind, group, ranks, me = deep_ep.EngramBuffer, dist.group.WORLD, world.nranks, world.rank
    entries, hidden, tokens, n = [37, 5, 64], 64, 7, 3
    for fp8 in (False, True):
        dtype, packs = (torch.float8_e4m3fn, 2) if fp8 else (torch.bfloat16, 0)
        sizes = kind.get_storage_size_hint(group, entries, hidden, tokens, n, dtype, packs)
        assert sizes == ((4 << 20, 2 << 20) if fp8 else (2 << 20, 2 << 20))
        buffer = kind(group, *sizes, False, *kind.get_theoretical_config(group, 3, tokens, n), explicitly_destroy=True)
        assert (buffer.num_gpu_bytes, buffer.context.num_rdma_storage_bytes, buffer.rank_idx) == (*sizes, me)
        assert is_refused(lambda: buffer.fetch(None), "expected set_config() before it")
        buffer.set_config(entries, hidden, tokens, n, dtype, packs)
        rng = torch.Generator().manual_seed(5)
        tables = [torch.randn(ranks * e, hidden, generator=rng).to(dtype) for e in entries]
        sfs = [torch.randint(0, 99, (ranks * e, packs), dtype=torch.int32, generator=rng) for e in entries]
        for turn in (0, 1):  # another write replaces the tables
            tables = [table.roll(turn, 0) for table in tables]
            buffer.write([world.to(t[me * e:(me + 1) * e].clone()) for t, e in zip(tables, entries)],
                         [world.to(sf) for sf in sfs] if fp8 else None)
            for step in range(3):
                count = 0 if me == step else tokens - step
                idx = torch.stack([torch.randint(0, ranks * e, (count, n), dtype=torch.int32) for e in entries])
                hooks = buffer.fetch(world.to(idx), use_tma_aligned_col_major_sf=step > 0)
                for layer in ((2, 0, 1), (0, 1, 2), (1, 2, 0))[step]:
                    got, flat = hooks[layer](), idx[layer].reshape(-1).long()
                    data, scales = got if fp8 else (got, None)
                    assert data.shape == (count, n * hidden) and data.dtype is dtype
                    want = tables[layer].view(torch.uint8)[flat].reshape(count, n * hidden * dtype.itemsize)
                    assert torch.equal(data.cpu().view(torch.uint8), want), layer
                    if fp8:
                        assert torch.equal(scales.cpu(), sfs[layer][flat].reshape(count, n * packs))
                        assert not step or scales.stride() == (1, -(-count // 4) * 4)
        if world.device.type == "cpu":
            with refused("indices[1]: expected 0 to %d" % (5 * ranks - 1)):
                buffer.fetch(torch.full((3, 1, n), 5 * ranks, dtype=torch.int32))
        for what, call in (("num_max_tokens", lambda: buffer.fetch(world.to(torch.zeros(3, 8, n, dtype=torch.int32)))),
                           ("storages", lambda: buffer.write([])), ("indices", lambda: buffer.fetch(idx[:1])),
                           ("num_rdma_storage_bytes", lambda: buffer.set_config([1 << 20], hidden, 1, 1)),
                           ("num_gpu_bytes", lambda: buffer.set_config([8], hidden, 1 << 20, 1)),
                           ("dtype", lambda: buffer.set_config([8], hidden, 1, 1, torch.float32))):
            with refused(what):
                call()
        buffer.barrier(wait_comm_stream=False)
        buffer.destroy()


def test_engram_buffer(world: World) -> None:
    """EngramBuffer of DeepEP 2.5, inside a node and with every rank a node; ranks that differ are named."""
    from deep_ep._elastic_sizes import engram_config

    check_engram_buffer(world)
    if world.nodes:
        with environment(EPX_RANKS_PER_NODE="1", EPX_NET="ofi:tcp"):
            check_engram_buffer(world)
    buffer = deep_ep.EngramBuffer(dist.group.WORLD, 2 << 20, 2 << 20, False, 1, 1024, explicitly_destroy=True)
    try:
        buffer.set_config([4, 4 + (world.rank == 1)], 32, 1, 1)
    except epx.MismatchError as failure:
        assert "entries" in str(failure), failure
    else:
        raise AssertionError("ranks with layers of different sizes")
    buffer.destroy()
    assert engram_config(1, 100, 45, 16) == (29, 1024, False) and engram_config(4, 100, 90, 16) == (15, 1024, False)
    assert engram_config(1, 29 * 1025, 45, 16) == (29, 2048, False)
    assert engram_config(1, 29 * 32768 + 1, 45, 16) == (31, 32768, True)


def check_pipeline(world: World) -> None:
    """First in, first out per directed pair; all ranks send as much as may be in flight before anyone receives."""
    with elastic(world, num_bytes=BIG) as buffer:
        buffer.pp_set_config(1 << 16, 3 if world.nranks > 2 else 6)  # of two ranks, one is both neighbours
        after, before = (world.rank + 1) % world.nranks, (world.rank - 1) % world.nranks
        shapes = [(64, 16), (512,), (3, 32), (128, 128), (16,)]

        def tensor(source: int, to_next: bool, i: int) -> torch.Tensor:
            rng = torch.Generator().manual_seed(1000 * source + 100 * to_next + i)
            return torch.randn(shapes[i % len(shapes)], generator=rng).bfloat16()
        for start in (0, 3):
            for i in range(start, start + 3):
                sent = [(world.to(tensor(world.rank, to_next, i)), after if to_next else before)
                        for to_next in (True, False)]
                for t, peer in sent:
                    buffer.pp_send(t, peer)
                    t.zero_()  # a send has its own copy
            if world.device.type == "cuda":
                torch.cuda.synchronize()  # the sends are complete, not queued behind their receivers
            dist.barrier()
            for i in range(start, start + 3):
                for source, to_next in ((before, True), (after, False)):
                    got = world.to(torch.zeros(shapes[i % len(shapes)]).bfloat16())
                    buffer.pp_recv(got, source)
                    assert same_bits(got, tensor(source, to_next, i)), (i, source)
        if world.device.type == "cuda":
            receive_first(world, buffer, before, after, lambda source: tensor(source, True, 6))


def receive_first(world: World, buffer: Any, before: int, after: int, tensor: Any) -> None:
    """Receives that are queued before the sends, on another stream: nothing orders the two."""
    got, sent = world.to(torch.zeros_like(tensor(before))), world.to(tensor(world.rank))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        buffer.pp_recv(got, before)
    buffer.pp_send(sent, after)
    torch.cuda.synchronize()
    assert same_bits(got, tensor(before)), before


def test_pipeline(world: World) -> None:
    """[R] 6: inside a node."""
    check_pipeline(world)


def check_pp_buffer(world: World) -> None:
    """A ring as a buffer of its own: random neighbours, as many in flight as there may be."""
    inflight, ranks, me = 3, world.nranks, world.rank
    buffer = deep_ep.PPBuffer(dist.group.WORLD, 4096, inflight, explicitly_destroy=True)
    rng, queued = random.Random(1), {}

    def receive(edge: Any) -> None:
        sent, n = queued[edge].pop(0)
        if edge[1] == me:
            one = world.to(torch.zeros(n))
            buffer.recv(one, edge[0])
            assert one.unique().tolist() == [sent]

    for step in range(60):
        source = rng.randrange(ranks)
        edge = (source, (source + rng.choice((1, -1))) % ranks)
        queue = queued.setdefault(edge, [])
        if len(queue) == inflight or queue and rng.random() < 0.4:
            receive(edge)
        else:
            queue.append((step + 1, 8 * rng.randrange(1, 128)))
            if edge[0] == me:
                buffer.send(world.to(torch.full((queue[-1][1],), step + 1.0)), edge[1], num_sms=4)
    for edge in queued:
        while queued[edge]:
            receive(edge)
    assert isinstance(buffer, deep_ep.BufferBase) and buffer.main_context.num_gpu_buffer_bytes == 2 << 20
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        buffer.print_memory_usage()
    assert printed.getvalue().startswith("deep_ep.PPBuffer: 2097152 bytes; %d groups" % (4 if ranks > 2 else 2))
    world.meet()
    buffer.destroy()
    buffer.destroy()
    assert buffer.runtime is None and buffer.main_context is None
    assert is_refused(lambda: buffer.send(world.to(torch.ones(64)), (me + 1) % ranks), "destroyed")


def test_pp_buffer(world: World) -> None:
    """PPBuffer of DeepEP 2.5, inside a node and with every rank a node."""
    check_pp_buffer(world)
    if world.nodes:
        with environment(EPX_RANKS_PER_NODE="1", EPX_NET="ofi:tcp"):
            check_pp_buffer(world)
    for what, arguments in (("num_max_tensor_bytes", (0, 4)), ("num_max_inflight_tensors", (64, -1))):
        with refused(what + ": expected an integer of at least 1"):
            deep_ep.PPBuffer(dist.group.WORLD, *arguments)
    local = deep_ep.PPBuffer(dist.group.WORLD, 64, 1)
    assert is_refused(local.destroy, "explicitly_destroy=True")
    del local  # on each rank by itself
    gc.collect()


def test_buffer_allocator(world: World) -> None:
    """BufferAllocator of DeepEP 2.5: a plan of tensors, and the memory that they get."""
    plan = deep_ep.BufferAllocator()
    tensors = [plan.allocate(shape, dtype) for shape, dtype in (
        ((3, 5), torch.float32), ((7,), torch.bfloat16), ((0,), torch.int64), ((2 << 20,), torch.uint8))]
    assert all(t.is_meta for t in tensors) and not plan.materialized
    assert [offset for _tensor, offset in plan.allocations] == [0, 2 << 20, 4 << 20, 4 << 20]
    assert (plan.num_bytes, plan.alignment) == (6 << 20, 2 << 20)
    for bad in (torch.empty(4, dtype=torch.uint8), torch.empty(6 << 20, dtype=torch.int8), None):
        with refused("storage: expected a contiguous uint8 tensor of 6291456 bytes"):
            plan.materialize(bad)
    storage = torch.zeros(plan.num_bytes, dtype=torch.uint8, device=world.device)
    if not hasattr(torch.utils, "swap_tensors"):
        assert is_refused(lambda: plan.materialize(storage), "torch 2.2")
        return
    plan.materialize(storage)
    assert plan.materialized and [t.shape for t in tensors] == [(3, 5), (7,), (0,), (2 << 20,)]
    for value, tensor in enumerate(tensors):
        assert tensor.device == world.device and not tensor.numel() or tensor.data_ptr() % 4 == 0
        tensor.fill_(value + 1)
    assert tensors[0].data_ptr() == storage.data_ptr() and storage[4 << 20:].unique().tolist() == [4]
    assert storage[2 << 20:(2 << 20) + 14].view(torch.bfloat16).tolist() == [2.0] * 7
    assert is_refused(lambda: plan.allocate((1,), torch.int8), "that has no memory yet")
    assert is_refused(lambda: plan.materialize(storage), "that has no memory yet")


def check_pipeline_sizes(world: World) -> None:
    """A tensor of another size than was sent: both sizes are named, and the ring goes on with the next tensor."""
    gpu = world.device.type == "cuda"
    with elastic(world, num_bytes=BIG) as buffer:
        buffer.pp_set_config(1 << 16, 4)
        after, before = (world.rank + 1) % world.nranks, (world.rank - 1) % world.nranks
        for sent, wanted in ((4096, 2048), (2048, 4096), (2048, 2016), (2016, 2048), (32, 64), (65536, 32)):
            got = torch.full((wanted,), 7, dtype=torch.uint8, device=world.device)
            said = "MISMATCH: pp_recv: t: expected a tensor of the %d bytes that rank %d sent, got one of %d" % (
                sent, before, wanted)
            for n, fill in ((sent, 1), (wanted, 2)):
                buffer.pp_send(torch.full((n,), fill, dtype=torch.uint8, device=world.device), after)
            errors = []
            for n in range(2):  # on a GPU the host does not wait: the second call may say it, and has received
                try:
                    buffer.pp_recv(got, before)
                except epx.MismatchError as error:
                    errors.append(str(error))
                if gpu:
                    torch.cuda.synchronize()
                elif n == 0:
                    assert errors and got.unique().tolist() == [7]
            assert len(errors) == 1 and said in errors[0], errors
            assert got.unique().tolist() == [2]
    world.meet()


def test_pipeline_sizes(world: World) -> None:
    """[R] 6: inside a node, and with every rank a node. Also with another default dtype, as init_dist() sets."""
    check_pipeline_sizes(world)
    old = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        if world.nodes:
            with environment(EPX_RANKS_PER_NODE="1", EPX_NET="ofi:tcp"):
                check_pipeline_sizes(world)
    finally:
        torch.set_default_dtype(old)


def test_pipeline_deadline(world: World) -> None:
    """[R] 6: the error names ranks of the ring, on the CPU in the call itself."""
    if world.device.type == "cuda":
        world.skip("needs CPU tensors")
    last = world.nranks - 1
    with elastic(world, num_bytes=BIG, num_gpu_timeout_secs=1) as buffer:
        buffer.pp_set_config(4096, 2)
        if world.rank == last:
            try:
                buffer.pp_recv(torch.ones(64), last - 1)
            except (epx.TimeoutExpired, epx.PeerError) as error:
                said = str(error)
                assert "pp_recv: from rank %d to rank %d" % (last - 1, last) in said, said
                assert "no response from rank %d" % (last - 1) in said and "recover()" in said, said
            else:
                raise AssertionError("a receive from a rank that does not send ended well")
        world.meet()


def test_pipeline_between_nodes(world: World) -> None:
    """[R] 6: every rank is a node."""
    if not world.nodes:
        world.skip("EPX_TEST_NODES=0")
    with environment(EPX_RANKS_PER_NODE="1", EPX_NET="ofi:tcp"):
        check_pipeline(world)


def check_all_gather(world: World) -> None:
    """Sessions of gathers, all of them queued before the first is waited for."""
    dtype, ranks = torch.bfloat16, world.nranks
    with elastic(world, num_bytes=BIG) as buffer:
        buffer.agrs_set_config(16 << 20, 16)
        rng = random.Random(1)
        for session in range(3):
            with buffer.agrs_new_session():
                waits: List[Any] = []
                for i in range(6):
                    shapes = [(rng.choice((1, 3, 64)), rng.choice((8, 100, 2048))) for _ in range(rng.choice((1, 2)))]

                    def value(r: int, j: int) -> torch.Tensor:
                        seed = ((session * 8 + i) * 4 + j) * 64 + r
                        return torch.randn(shapes[j], generator=torch.Generator().manual_seed(seed)).bfloat16()
                    mine = [world.to(value(world.rank, j)) for j in range(len(shapes))]
                    if rng.random() < 0.5:
                        places = buffer.agrs_get_inplace_tensor(shapes, dtype)
                        for place, t in zip(places, mine):
                            place.copy_(t)
                        mine = list(places)
                    want = [torch.stack([value(r, j) for r in range(ranks)]) for j in range(len(shapes))]
                    if rng.random() < 0.5:  # all at once
                        *got, done = buffer.all_gather(mine if len(mine) > 1 or rng.random() < 0.5 else mine[0])
                        waits.append((done, got, want))
                        continue
                    for t, one in zip(mine, want):
                        result, done = buffer.all_gather(t)
                        waits.append((done, [result], [one]))
                if not session:
                    place = buffer.agrs_get_inplace_tensor((2, 8), dtype)
                    assert place.shape == (2, 8) and place.dtype is dtype and place.device == world.device
                    try:
                        buffer.all_gather(torch.zeros(2, 8, dtype=dtype, device=world.device))
                    except AssertionError as failure:
                        assert "agrs_get_inplace_tensor" in str(failure)
                    else:
                        raise AssertionError("not refused: another tensor than that of agrs_get_inplace_tensor")
                rng.shuffle(waits)
                for done, got, want in waits:
                    done()
                    for g, w in zip(got, want):
                        assert g.shape == w.shape and torch.equal(g.cpu(), w)
        with buffer.agrs_new_session(enabled=False):
            buffer.create_agrs_session()
        all_ranks, done = buffer.all_gather(torch.full((2, 8), world.rank, dtype=dtype, device=world.device))
        done()
        assert torch.equal(all_ranks.cpu()[:, 0, 0].float(), torch.arange(ranks).float())
        buffer.destroy_agrs_session()


def test_all_gather(world: World) -> None:
    """[R] 6: one and several tensors, in place or not, waited for in any order, session after session."""
    check_all_gather(world)


class LateGathers(Gathers):
    """On the CPU, with memory as on a GPU, and a communication stream that runs when somebody waits for it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._heap = CudaHeap(self._mover.group, self._device)
        self._late: List[Callable[[], None]] = []

    def _flush(self) -> None:
        while self._late:
            self._late.pop(0)()
        self._mover.settle()

    def end(self) -> None:
        self._flush()  # test_cuda_streams.test_a_session_ends_behind_its_all_gathers
        super().end()

    @staticmethod
    def _bare(tensor: torch.Tensor) -> torch.Tensor:
        """A tensor as queued work has it, which keeps no memory."""
        memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
        return torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)

    def _queued(self, place: Any) -> Any:
        queued = copy.copy(place)
        queued.flat = self._bare(place.flat)
        return queued

    def _send(self, t: torch.Tensor, place: Any, stream: Any) -> None:
        queued = self._queued(place)
        # Torch's memory is what record_stream() keeps.
        self._late.append(functools.partial(
            super()._send, self._bare(t) if self._heap.holds(t) else t, queued, stream))

    def _results(self, places: Any, stream: Any) -> List[torch.Tensor]:
        results = []
        for place in places:
            result = place.gathered()
            if place.part != place.nbytes:  # a copy, which is queued too
                self._late.append(functools.partial(self._copy, result, self._queued(place).flat[:, :place.nbytes]))
            results.append(result)
        return results

    def _copy(self, result: torch.Tensor, rows: torch.Tensor) -> None:
        self._mover.settle()
        result.view(self._engine.nranks, -1).view(torch.uint8).copy_(rows)

    def _handle(self, stream: Any) -> Callable[[], None]:
        return self._flush


@contextlib.contextmanager
def late_stream() -> Iterator[None]:
    """All-gathers are LateGathers."""
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False), \
            mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, create=True), \
            mock.patch.object(elastic_module, "Gathers", LateGathers):
        yield


def test_all_gather_behind_a_late_stream(world: World) -> None:
    """[R] 6: memory of a gather that is under way is given to nobody."""
    world.only("cpu")
    with late_stream():
        check_all_gather(world)


def test_gathered_tensors_are_gathered(world: World) -> None:
    """[R] 6: a tensor of an earlier session, which is dropped while the gather is under way."""
    world.only("cpu")
    with late_stream(), elastic(world, num_bytes=BIG) as buffer:
        buffer.agrs_set_config(16 << 20, 4)
        mine = torch.arange(4096) + world.rank
        with buffer.agrs_new_session():
            gathered, wait = buffer.all_gather(mine)
            wait()
        want = torch.stack([gathered.clone()] * world.nranks)
        with buffer.agrs_new_session():
            again, wait = buffer.all_gather(gathered)
            del gathered
            buffer.agrs_get_inplace_tensor(mine.shape, mine.dtype).fill_(-1)
            wait()
            assert torch.equal(again, want)


def is_refused(call: Callable[[], Any], what: str) -> bool:
    """Does it end with a UsageError whose text has `what`?"""
    try:
        call()
    except epx.UsageError as failure:
        assert what in str(failure), failure
        return True
    return False


def refuses_recovery(buffer: deep_ep.ElasticBuffer) -> bool:
    """Does recover() ask for the graphs to be released?"""
    return is_refused(buffer.recover, "graphs_released=True")


def test_graph_of_parts(world: World) -> None:
    """Barriers of both buffers and an all-gather in place, whose session ends in the capture, replayed."""
    world.only("cuda")
    with elastic(world, num_bytes=BIG) as buffer:
        other = deep_ep.EPBuffer(dist.group.WORLD, num_bytes=BIG, explicitly_destroy=True)
        buffer.agrs_set_config(1 << 20, 8)
        given = torch.zeros(16, dtype=torch.int64, device=world.device)
        with buffer.agrs_new_session():  # for the routing
            buffer.all_gather(given)[1]()
        buffer.create_agrs_session()
        place = buffer.agrs_get_inplace_tensor((16,), torch.int64)
        buffer.barrier()
        other.barrier()
        torch.cuda.synchronize()
        world.meet()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            buffer.barrier()
            other.barrier()
            place.copy_(given)
            gathered, wait = buffer.all_gather(place)
            wait()
            other.barrier()  # the communication stream is in the capture now
            result = gathered.clone()
            buffer.destroy_agrs_session()
        world.meet()
        for number in (5, 7):
            given.fill_(number + world.rank)
            graph.replay()
            torch.cuda.synchronize()
            assert result[:, 0].tolist() == [number + rank for rank in range(world.nranks)]
            with buffer.agrs_new_session():  # between replays
                eager, wait = buffer.all_gather(given + 1)
                wait()
                assert eager[:, 15].tolist() == [number + 1 + rank for rank in range(world.nranks)]
        del graph
        other.destroy()


def test_captured_parts(world: World) -> None:
    """A barrier and an all-gather that were captured into a graph: their groups live until the caller says that the
    graphs are released, also where the all-gather is configured again."""
    with elastic(world, num_bytes=BIG) as buffer:
        buffer.barrier()
        mover, _handle, _nothing = buffer._barriers._mover(default_device())
        captures, mover.capturing = mover.capturing, lambda: True  # as in a capture
        buffer.barrier()
        mover.capturing = captures
        assert refuses_recovery(buffer) and mover.group.alive
        world.meet()
        buffer.recover(graphs_released=True)
        assert not mover.group.alive

        buffer.agrs_set_config(1 << 20, 4)
        old = buffer._parts["gathers"]
        captures = old._mover.capturing
        with buffer.agrs_new_session():  # one that is refused in a capture leaves nothing behind
            place = buffer.agrs_get_inplace_tensor((16,), torch.int64)
            place.fill_(world.rank)
            old._mover.capturing = lambda: True
            assert is_refused(lambda: buffer.all_gather(place), "once before it")
            old._mover.capturing = captures
            assert not old._mover.captured and not old._captured and not old._count
            gathered, wait = buffer.all_gather(place)
            wait()
            assert gathered[:, 0].tolist() == list(range(world.nranks)) and gathered.data_ptr() == place.data_ptr() - (
                world.rank * place.nbytes)
        for captured in (False, True):
            with buffer.agrs_new_session():
                place = buffer.agrs_get_inplace_tensor((16,), torch.int64)
                place.fill_(world.rank)
                old._mover.capturing = lambda captured=captured: captured
                gathered, wait = buffer.all_gather(place)
                wait()
                assert captured == is_refused(lambda: buffer.all_gather(place.clone()), "a capture takes")
                old._mover.capturing = captures
            assert gathered[:, 0].tolist() == list(range(world.nranks))
        at = gathered.data_ptr()
        del gathered, wait, place  # in the heap, where a replay writes
        one = torch.zeros(16, dtype=torch.int64, device=world.device)
        with buffer.agrs_new_session():
            later = [buffer.all_gather(one) for _ in range(4)]
            assert at not in [gathered.data_ptr() for gathered, _wait in later]
        del later
        buffer.agrs_set_config(1 << 20, 4)
        assert old._mover.group.alive and refuses_recovery(buffer)
        world.meet()
        buffer.recover(graphs_released=True)
        assert not old._mover.group.alive and not refuses_recovery(buffer)
