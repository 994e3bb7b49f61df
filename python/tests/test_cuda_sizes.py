# SPDX-License-Identifier: Apache-2.0
"""Sizes of the memory of an ElasticBuffer."""

import collections
import os
import random
import unittest
from typing import Callable, Deque, Dict, Tuple
from unittest import mock

import epx
import torch
from deep_ep import _elastic_sizes
from deep_ep._elastic_engine import ElasticSettings
from deep_ep._elastic_plan import DispatchPlan, Kind, Result
from deep_ep._memory import Heap
from played_cuda import Played, story


class ElasticMemory(Played):
    """The heap of an ElasticBuffer on one node of GPUs."""

    def memory(self, ranks: int, tokens: int, hidden: int, topk: int, fp8: bool) -> Tuple[int, Dict[str, int]]:
        """(num_bytes by the hint, what the group is given)."""
        os.environ.pop("EPX_DEEP_EP_GPU_BYTES", None)
        given = _elastic_sizes.buffer_bytes((1, ranks), True, tokens, hidden, topk, fp8, True)
        return given, ElasticSettings(given, tokens, hidden, topk, 100, False).high_throughput_memory(
            torch.device("cuda", 0), given, ranks, 1,
            dict(max_hidden_bytes=2 * hidden, max_topk=topk, max_tokens_per_rank=tokens))

    @mock.patch.dict(os.environ)
    def test_the_largest_result_fits(self) -> None:
        for ranks, tokens, fp8 in ((8, 4096, False), (8, 4096, True), (64, 4096, True), (8, 128, False)):
            given, memory = self.memory(ranks, tokens, 7168, 8, fp8)
            row = 7168 + 4 * 56 if fp8 else 2 * 7168
            self.assertGreaterEqual(memory["alloc_bytes"], ranks * tokens * (row + 8 * 12) + (1 << 20))
            self.assertLess(sum(memory.values()), given + (56 << 20))

    @mock.patch.dict(os.environ)
    def test_all_of_a_group_fits(self) -> None:
        """num_bytes + 64 MiB: the whole heap, and eight handles, as after dispatches with expansion and without."""
        for ranks, tokens, hidden, topk, fp8 in (
                (8, 4096, 7168, 8, False), (8, 4096, 7168, 8, True), (1, 4096, 7168, 8, False),
                (2, 4096, 7168, 8, False), (4, 4096, 7168, 8, False), (16, 4096, 7168, 8, False),
                (16, 4096, 7168, 8, True), (64, 4096, 7168, 8, False), (72, 4096, 7168, 8, False),
                (8, 4096, 1024, 8, False), (8, 128, 7168, 8, False), (8, 128, 256, 4, False), (2, 64, 256, 8, False),
                (8, 8192, 7168, 8, False), (8, 4096, 7168, 2, False)):
            given, memory = self.memory(ranks, tokens, hidden, topk, fp8)
            whole = epx.memory(
                ranks, device=epx.Device.CPU, ranks_per_node=ranks, modes=epx.Mode.HIGH_THROUGHPUT,
                num_experts=4 * ranks, max_tokens_per_rank=tokens, max_hidden_bytes=2 * hidden, max_topk=topk,
                layouts=(1 << epx.Layout.FLAT) | (1 << epx.Layout.EXPERT_MAJOR), **memory)["heap_bytes"]
            handles = 8 * 7 * 4 * tokens * topk
            self.assertLess(whole + handles, given + (60 << 20))  # and what CUDA rounds up

    def all_inside(self, memory: Dict[str, int], handles: int, rows: Callable[[random.Random, int], int]) -> None:
        """Expanded dispatches with rows(rng, spread) of 21500 tokens beside so many earlier handles: nearly all are
        queued early, all results are in the heap, and the host hardly ever waits for the GPU."""
        with mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="1"):
            group = epx.Group(num_experts=1, max_tokens_per_rank=1, max_hidden_bytes=16, modes=epx.Mode.LOW_LATENCY,
                              alloc_bytes=memory["alloc_bytes"])
        self.addCleanup(group.destroy)
        pool = mock.Mock(group=group, device=torch.device("cpu"), heap=Heap(group, torch.device("cpu")))
        self.addCleanup(pool.heap.close)
        plan = DispatchPlan(pool, Kind(True, 7168, torch.bfloat16, 8, torch.int64, None, True, True), 8)
        rng, early, inside = random.Random(1), 0, 0
        kept: Deque[torch.Tensor] = collections.deque(maxlen=handles)  # tables of handles
        for spread in (1, 0):
            for _ in range(400):
                count = rows(rng, spread)
                guess = plan.guess(1 << 20)
                plan._guess.learn(count)
                if guess is not None and guess[0] >= count:
                    early += 1
                    result = plan.result(count, 21500, guess[1])
                else:
                    del guess
                    result = Result(plan._kind, count, plan._reserve(count, 21500))
                inside += pool.heap.holds(result.x) and pool.heap.holds(result.source_map)
                kept.append(result.source_map)
                guess = result = None
        self.assertEqual(inside, 800, (early, story))
        self.assertGreater(early, 790)
        self.assertLess(len(story), 8, story)

    @mock.patch.dict(os.environ)
    def test_expanded_rows_of_random_routings_fit(self) -> None:
        """As many as there are tokens, and a few more or fewer."""
        self.all_inside(self.memory(8, 4096, 7168, 8, False)[1], 0,
                        lambda rng, spread: round(rng.gauss(32768, 300 * spread)))

    @mock.patch.dict(os.environ)
    def test_expanded_rows_with_padding_fit(self) -> None:
        """Where a group is made for them: as many and the padding of 128, or twice as many as there are tokens."""
        for ranks, local in ((8, 32), (4, 64)):
            given, memory = self.memory(ranks, 4096, 7168, 8, False)
            config = dict(max_hidden_bytes=2 * 7168, max_topk=8, max_tokens_per_rank=4096)
            rows = 4096 * 8 + local * 64
            larger = ElasticSettings.with_expanded(memory, given, ranks, 1, config, rows)
            self.assertEqual(larger["ht_node_bytes"], memory["ht_node_bytes"])
            self.assertLess(sum(larger.values()), max(given, rows * 14432) + (72 << 20))
            self.all_inside(larger, 4, lambda rng, spread, local=local: sum(
                -(-round(rng.gauss(32768 / local, (32768 / local) ** 0.5 * spread)) // 128) * 128
                for _ in range(local)))
            # Not for other callers, nodes, devices, smaller buffers, nor many times as many rows.
            self.assertEqual(ElasticSettings.with_expanded(memory, given, ranks, 1, config, 0), memory)
            self.assertEqual(ElasticSettings.with_expanded(memory, given, ranks, 2, config, rows), memory)
            self.assertEqual(ElasticSettings.with_expanded(memory, given // 2, ranks, 1, config, rows), memory)
            self.assertEqual(ElasticSettings.with_expanded(memory, given, ranks, 1, config, 1 << 20), memory)
            self.assertEqual(ElasticSettings.with_expanded({}, given, ranks, 1, config, rows), {})

    def test_scales_that_are_turned(self) -> None:
        """Row by row where ranks write them, column by column in the result, and queued before rows are known."""
        with mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="1"):
            group = epx.Group(num_experts=1, max_tokens_per_rank=1, max_hidden_bytes=16, modes=epx.Mode.LOW_LATENCY,
                              alloc_bytes=1 << 20)
        self.addCleanup(group.destroy)
        pool = mock.Mock(group=group, device=torch.device("cpu"), heap=Heap(group, torch.device("cpu")))
        self.addCleanup(pool.heap.close)
        for dtype, seen in ((torch.float32, torch.float32), (torch.int32, torch.int32), (torch.uint32, torch.int32)):
            for rows in (7, 8, 1, 0):
                kind = Kind(True, 256, torch.float8_e4m3fn, 8, torch.int64, (2, dtype, False), True, True, True)
                plan = DispatchPlan(pool, kind, 8)
                memories = plan._reserve(rows, rows)
                words = torch.arange(rows * 2, dtype=torch.int32).view(rows, 2)
                memories.large.tensors()[1].view(torch.int32).copy_(words)
                result = Result(kind, rows, memories)
                assert result.scales is not None
                self.assertEqual(result.scales.dtype, dtype)
                self.assertEqual(result.scales.stride(), (1, (rows + 3) // 4 * 4))
                self.assertTrue(torch.equal(result.scales.view(seen).view(torch.int32), words))
                if rows > 1:
                    plan._guess.learn(rows)
                    guess = plan.guess(100)
                    assert guess is not None and guess[0] >= rows
                    guess[1].large.tensors()[1].view(torch.int32)[:rows].copy_(words)
                    early = plan.result(rows, rows, guess[1])
                    assert early.scales is not None
                    self.assertEqual((early.scales.shape, early.scales.stride()),
                                     (result.scales.shape, result.scales.stride()))
                    self.assertTrue(torch.equal(early.scales.view(torch.int32), words))


if __name__ == "__main__":
    unittest.main()
