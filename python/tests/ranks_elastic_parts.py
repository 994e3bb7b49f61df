# SPDX-License-Identifier: Apache-2.0
"""ElasticBuffer beside dispatch and combine: sizes, names, attributes, events, barrier, lifetime."""

import contextlib
import gc
import inspect
import io
import os
import tempfile
import time
import warnings
from typing import Any, Callable, List
from unittest import mock

import deep_ep
import epx
import torch
import torch.distributed as dist
from deep_ep import _elastic_meeting
from deep_ep._elastic_meeting import Meeting
from ranks_elastic import HIDDEN, MAX, elastic, make_work, send
from reference import same_bits
from suite import World, environment, refused

BIG = 64 << 20


def is_refused(call: Callable[[], Any], what: str) -> bool:
    """Does it end with a UsageError whose text has `what`?"""
    try:
        call()
    except epx.UsageError as failure:
        assert what in str(failure), failure
        return True
    return False


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
        deep_ep.Buffer(group)._sms_of(config)
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
