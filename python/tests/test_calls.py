# SPDX-License-Identifier: Apache-2.0
"""Any arguments for the calls in C: a wrong one is an exception with a sentence. EPX_TEST_SEED and EPX_TEST_SCALE as in
the other random tests; an hour of it is EPX_TEST_SCALE=700."""

import os
import random
import socket
import unittest
from typing import Any, Callable, Dict, List

import torch
import torch.distributed as dist

import deep_ep
from deep_ep._memory import calls
from seeds import drawn

PROGRAMS, TOKENS, HIDDEN, EXPERTS, TOPK = 200, 8, 128, 16, 4
WEIRD: List[Any] = [None, 0, -1, 9, 1 << 80, (1 << 63) - 1, 1.5, "x", b"y", [], (), {}, True, torch, torch.Tensor,
                    [1, 2], (None, None), float("nan"), torch.bfloat16]
FAILURES = (RuntimeError, ValueError, TypeError, OverflowError, AttributeError)  # and no SystemError


class Own(torch.Tensor):
    """A subclass without anything."""


def emptied(x: torch.Tensor) -> torch.Tensor:
    """A tensor without its memory."""
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def tensors(x: torch.Tensor, idx: torch.Tensor) -> List[Callable[[], Any]]:
    """Tensors that are right somewhere, and that are right nowhere."""
    fp8 = x.to(torch.float8_e4m3fn)
    return [
        lambda: x, lambda: idx, lambda: torch.rand(TOKENS, TOPK), x.t, lambda: x[:0], lambda: x[::2], x.float,
        lambda: fp8, lambda: (fp8, torch.rand(TOKENS, 1)), lambda: [fp8, torch.rand(TOKENS)], lambda: (x, x),
        lambda: (fp8, torch.rand(TOKENS, 3)), lambda: (fp8, torch.rand(1, 1).expand(TOKENS, 1)),
        lambda: x.as_subclass(Own), lambda: torch.nn.Parameter(x.float()), lambda: emptied(x), x.to_sparse,
        lambda: x.to("meta"), lambda: torch.randn(TOKENS, TOPK, dtype=torch.complex64).conj().imag,
        lambda: torch.randn(TOKENS, TOPK, dtype=torch.complex64).conj(), lambda: torch.randn(2, 2, 2, 2, 2, 2),
        lambda: torch.tensor(3.0), lambda: idx + 9, idx.int, lambda: torch.full((TOKENS, TOPK), 1 << 62),
        lambda: torch.zeros(1, dtype=torch.int32), lambda: torch.ones(TOKENS, 1, dtype=torch.bool),
        lambda: torch.zeros(EXPERTS, dtype=torch.int32)]


class Arguments(unittest.TestCase):
    def program(self, buffer: deep_ep.Buffer, rng: random.Random) -> None:
        """Calls of which some have a wrong argument, or several."""
        x, idx = torch.randn(TOKENS, HIDDEN).bfloat16(), torch.rand(TOKENS, EXPERTS).argsort(1)[:, :TOPK].contiguous()
        any_one = tensors(x, idx)

        def other() -> Any:
            return rng.choice(WEIRD) if rng.random() < 0.5 else rng.choice(any_one)()

        def tried(call: Callable[..., Any], *given: Any, **named: Any) -> Any:
            try:
                return call(*given, **named)
            except FAILURES as failure:
                self.assertTrue(str(failure))
                return None
        per_rank, _nodes, per_expert, in_rank, _event = buffer.get_dispatch_layout(idx, EXPERTS)
        given: Dict[str, Any] = dict(
            x=x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=idx,
            topk_weights=torch.rand(TOKENS, TOPK))
        for _ in range(rng.choice((0, 1, 1, 2))):
            given[rng.choice([*given, "handle", "expert_alignment", "config", "previous_event", "async_finish",
                              "allocate_on_comm_stream", "num_recv_tokens_per_expert_as_cuda"])] = other()
        result = tried(buffer.dispatch, **given)
        if result is not None and result[4] is not None:
            back: Dict[str, Any] = dict(x=result[0], handle=result[4], topk_weights=result[2])
            for _ in range(rng.choice((0, 1, 2))):
                back[rng.choice(["x", "handle", "topk_weights", "bias", "config", "previous_event",
                                 "async_finish"])] = other()
            tried(buffer.combine, **back)
            tried(buffer.dispatch, other(), handle=rng.choice((result[4], other())))
        tried(buffer.get_dispatch_layout, other(), rng.choice((EXPERTS, other())))
        for call, count in ((calls.layout, 6), (calls.dispatch, 17), (calls.combine, 9), (calls.Heap, 6),
                            (calls.Place, 10)):
            tried(call, *[other() for _ in range(rng.choice((count, rng.randint(0, 20))))])

    def test_programs(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:%d" % port, rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        os.environ.setdefault("EPX_ALLOC_BYTES", "16M")
        buffer = deep_ep.Buffer(dist.group.WORLD, explicitly_destroy=True)
        self.addCleanup(buffer.destroy)
        for seed in drawn(PROGRAMS):
            self.program(buffer, random.Random(seed))


if __name__ == "__main__":
    unittest.main()
