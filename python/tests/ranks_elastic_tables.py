# SPDX-License-Identifier: Apache-2.0
"""ElasticBuffer's Engram tables and pipeline ring, and DeepEP 2.5's buffers of them."""

import contextlib
import gc
import io
import random
from typing import Any
from unittest import mock

import deep_ep
import epx
import torch
import torch.distributed as dist
from ranks_elastic import elastic
from ranks_elastic_parts import BIG, is_refused
from reference import same_bits
from suite import World, environment, refused, refused_in_a_capture


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
            refused_in_a_capture(lambda: buffer.engram_fetch(world.to(idx)), "call it outside")
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
