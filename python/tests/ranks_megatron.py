# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's own MoE layer (megatron-core from PyPI): its flex dispatcher on deep_ep against its all-to-all.

Two layers with the same weights get the same tokens: one exchanges tokens by torch's all_to_all, which EPX has no part
in, the other through deep_ep. Outputs, gradients of the input and of every weight, and twenty training steps are
compared. Backward runs on autograd's own thread. On CUDA tensors all ranks may share one GPU: the matrix products,
allocations and module loads of some ranks then run while others wait in an operation.
"""

import contextlib
import functools
import os
from typing import Any, Dict, Iterator, List, Tuple
from unittest import mock

import torch
import torch._dynamo
import torch.distributed as dist
from suite import World, environment

TOPK, STEPS = 2, 20
TORCH_ALL_TO_ALL, TORCH_ZEROS = dist.all_to_all_single, torch.zeros
# Each rank's tokens are another number: batch and length of the sequence.
SHAPES = ((2, 24), (1, 17), (3, 8), (1, 40))


def megatron(world: World) -> Any:
    """The modules of megatron-core that are used here."""
    try:
        from megatron.core import parallel_state
        from megatron.core.models.gpt import moe_module_specs
        from megatron.core.transformer import transformer_config
        from megatron.core.transformer.moe import moe_utils
    except ImportError as missing:
        world.skip("no megatron-core: %s" % missing)
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16 looks for it also where there is no Transformer Engine
        moe_utils.te_general_gemm = None
    return parallel_state, moe_module_specs, transformer_config


class NoStream:
    """In place of torch.cuda.Stream, where there is no GPU: work on the CPU is done when its call returns."""

    def wait_stream(self, other: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self) -> "NoStream":
        return self


def all_to_all(output: Any, given: Any, output_split_sizes: Any = None, input_split_sizes: Any = None,
               **more: Any) -> Any:
    """torch's, for splits that are tensors: Megatron turns those into lists that come from a GPU alone."""
    splits = [split.tolist() if hasattr(split, "tolist") else split for split in (output_split_sizes,
                                                                                  input_split_sizes)]
    return TORCH_ALL_TO_ALL(output, given, *splits, **more)


def zeros(*shape: Any, **more: Any) -> torch.Tensor:
    """torch's, without a GPU: Megatron's HybridEP manager has a flag there since 0.18."""
    return TORCH_ZEROS(*shape, **{key: value for key, value in more.items() if (key, value) != ("device", "cuda")})


@contextlib.contextmanager
def without_gpu() -> Iterator[None]:
    """Megatron asks for the current GPU and for streams without asking whether there is a GPU."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in () if torch.cuda.is_available() else (
                (torch.cuda, "current_device", lambda: torch.device("cpu")), (torch.cuda, "Stream", NoStream),
                (torch.cuda, "current_stream", NoStream), (dist, "all_to_all_single", all_to_all),
                (torch, "zeros", zeros),
                (torch.cuda, "stream", lambda stream: contextlib.nullcontext())):
            stack.enter_context(mock.patch.object(owner, name, value))
        # Compiling what Megatron marks for it would take a minute.
        stack.enter_context(mock.patch.object(torch._dynamo.config, "disable", True))
        yield


@functools.lru_cache(maxsize=None)
def initialize(world: World) -> None:
    """Every rank has experts of its own: expert parallelism over the world."""
    megatron(world)[0].initialize_model_parallel(expert_model_parallel_size=world.nranks)


def config_for(dispatcher: str, world: World, hidden: int, experts: int, **more: Any) -> Any:
    config = megatron(world)[2].TransformerConfig
    if not hasattr(config, "moe_flex_dispatcher_backend"):  # before 0.16
        more["moe_enable_deepep"] = dispatcher == "flex"
    return config(
        num_layers=1, hidden_size=hidden, ffn_hidden_size=2 * hidden, num_attention_heads=4, num_moe_experts=experts,
        moe_router_topk=TOPK, moe_router_dtype="fp32", moe_router_load_balancing_type="none",
        moe_token_dispatcher_type=dispatcher, moe_grouped_gemm=False, moe_permute_fusion=False,
        expert_model_parallel_size=world.nranks, add_bias_linear=False, use_cpu_initialization=True,
        gradient_accumulation_fusion=False, bf16=True, params_dtype=torch.bfloat16, **more)


def layer(dispatcher: str, world: World, hidden: int, experts: int, **more: Any) -> torch.nn.Module:
    """One MoE layer. Weights depend on the rank alone; the router's are the same everywhere."""
    initialize(world)
    spec = megatron(world)[1].get_moe_module_spec(use_te=False, num_experts=experts, moe_grouped_gemm=False)
    config = config_for(dispatcher, world, hidden, experts, **more)
    made = spec.module(config, spec.submodules) if hasattr(spec, "module") else spec(config)  # before 0.18, since
    made.set_layer_number(1)
    made = made.to(world.device)
    with torch.no_grad():
        for name, weight in sorted(made.named_parameters()):
            seed = 7 if "router" in name else 1000 + world.rank
            values = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed + len(name)))
            weight.copy_((values / weight.shape[-1] ** 0.5).to(weight.dtype))
    return made


def tokens(world: World, step: int, hidden: int, scale: int = 1) -> Tuple[torch.Tensor, torch.Tensor]:
    """Input and target of a step: another number of tokens each time."""
    batch, length = SHAPES[(world.rank + step) % len(SHAPES)]
    rng = torch.Generator().manual_seed(100 * step + world.rank)
    x, target = (torch.randn(length * scale, batch, hidden, generator=rng).bfloat16() for _ in range(2))
    return world.to(x), world.to(target)


def run_step(made: torch.nn.Module, x: torch.Tensor, target: torch.Tensor) -> Dict[str, torch.Tensor]:
    """Forward and backward: output, gradient of the input, and of every weight."""
    x = x.clone().requires_grad_(True)
    made.zero_grad(set_to_none=True)
    out, bias = made(x)
    assert bias is None
    ((out.float() - target.float()) ** 2).mean().backward()
    grads = {name: weight.grad for name, weight in made.named_parameters()}
    return {"output": out.detach(), "input.grad": x.grad, **grads}


def sgd(made: torch.nn.Module, rate: float = 0.05) -> None:
    """Router gradients are averaged over the ranks, as data parallelism does; an expert's stay."""
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.grad is None:
                continue
            grad = weight.grad.float()
            if "router" in name:
                mean = grad.cpu()
                dist.all_reduce(mean)
                grad = (mean / dist.get_world_size()).to(grad.device)
            weight -= (rate * grad).to(weight.dtype)


def compare(got: Dict[str, torch.Tensor], want: Dict[str, torch.Tensor], step: int, within: float) -> None:
    """Both round to BF16, in another order: within a few units of the last place of the largest value."""
    assert got.keys() == want.keys()
    for name, expected in want.items():
        value = got[name]
        assert (value is None) == (expected is None), name
        if expected is None:
            continue
        most = expected.float().abs().max().clamp(min=1e-6)
        off = ((value.float() - expected.float()).abs().max() / most).item()
        assert off <= within, "step %d: %s is off by %.4f of its largest value" % (step, name, off)


def check_layer(world: World, hidden: int, experts: int, steps: int, scale: int = 1, **more: Any) -> None:
    """Steps of both layers, side by side. The weights are set equal before each step: errors do not add up."""
    plain = layer("alltoall", world, hidden, experts)
    flex = layer("flex", world, hidden, experts, **more)
    for step in range(steps):
        flex.load_state_dict(plain.state_dict())
        x, target = tokens(world, step, hidden, scale)
        want = run_step(plain, x, target)
        compare(run_step(flex, x, target), want, step, within=0.03)
        sgd(plain)


def train(made: torch.nn.Module, world: World, hidden: int, steps: int) -> List[float]:
    """Steps of its own weights; the loss of every step, over all ranks."""
    losses = []
    for step in range(steps):
        x, target = tokens(world, step % 4, hidden)
        out = run_step(made, x, target)["output"]
        loss = ((out.float() - target.float()) ** 2).mean().cpu()
        sgd(made)
        dist.all_reduce(loss)
        losses.append(loss.item() / world.nranks)
    return losses


def release() -> None:
    """Megatron keeps one buffer for the process: it ends with the test, on all ranks at once."""
    from megatron.core.transformer.moe import fused_a2a
    if fused_a2a._buffer is not None:
        fused_a2a._buffer = None


@without_gpu()
def test_megatron_layer_matches_its_alltoall(world: World) -> None:
    megatron(world)
    check_layer(world, hidden=256, experts=4 * world.nranks, steps=4)
    release()


@without_gpu()
def test_megatron_trains_as_its_alltoall_does(world: World) -> None:
    megatron(world)
    args = (world, 128, 2 * world.nranks)
    want = train(layer("alltoall", *args), world, 128, STEPS)
    got = train(layer("flex", *args), world, 128, STEPS)
    assert sum(want[-4:]) < sum(want[:4]), "the loss does not fall: %s" % want  # every fourth step has the same tokens
    worst = max(abs(a - b) / b for a, b in zip(got, want))
    assert worst <= 0.01, "losses differ by %.4f: %s, %s" % (worst, got, want)
    release()


@without_gpu()
def test_megatron_dispatcher_without_tokens(world: World) -> None:
    """Megatron's router refuses a rank with no tokens; its flex dispatcher does not: one rank, then all, have none."""
    megatron(world)
    dispatcher = layer("flex", world, 128, 2 * world.nranks).token_dispatcher
    for step in range(3):
        rng = torch.Generator().manual_seed(10 * step + world.rank)
        count = 0 if step == 1 or world.rank == step else 5 + world.rank
        x = world.to(torch.randn(count, 1, 128, generator=rng).bfloat16()).requires_grad_()
        chosen = torch.zeros(count, 2 * world.nranks, dtype=torch.bool).scatter_(
            1, torch.rand(count, 2 * world.nranks, generator=rng).topk(TOPK, 1).indices, True)
        probs = world.to(torch.rand(chosen.shape, generator=rng) * chosen).requires_grad_()
        rows, _counts, weights = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(
            *dispatcher.dispatch_preprocess(x, world.to(chosen), probs)))
        rows = (rows.float() * weights.unsqueeze(-1)).to(rows.dtype)
        out = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(rows)))
        out.float().sum().backward()
        scale = probs.detach().sum(1)[:, None, None]
        assert out.shape == x.shape and torch.allclose(out.float(), x.float() * scale, rtol=0.03, atol=0.03)
        assert torch.allclose(x.grad.float(), scale.expand_as(x), rtol=0.03, atol=0.03)
        assert torch.allclose(probs.grad * world.to(chosen), x.float().sum(2) * world.to(chosen), rtol=0.05, atol=0.3)
    release()


@without_gpu()
def test_megatron_on_two_nodes(world: World) -> None:
    megatron(world)
    if os.environ.get("EPX_TEST_NODES", "1") == "0":
        world.skip("EPX_TEST_NODES=0")
    with environment(EPX_RANKS_PER_NODE=str(world.nranks // 2), EPX_NET="ofi:tcp"):
        check_layer(world, hidden=128, experts=2 * world.nranks, steps=2)
    release()


@without_gpu()
def test_megatron_layer_of_real_size_on_a_shared_gpu(world: World) -> None:
    """Matrix products of sizes never seen before, on every rank at another time, while others wait."""
    megatron(world)
    world.only("cuda")
    check_layer(world, hidden=2048, experts=8 * world.nranks, steps=6, scale=40)
    release()


@without_gpu()
def test_megatron_on_hybrid_ep(world: World) -> None:
    """The same with --moe-flex-dispatcher-backend hybridep: Megatron permutes nothing itself."""
    megatron(world)
    from megatron.core.transformer.moe import fused_a2a
    if getattr(fused_a2a, "hybrid_ep_dispatch", None) is None:
        world.skip("this megatron-core has no HybridEP")
    check_layer(world, hidden=128, experts=2 * world.nranks, steps=4, moe_flex_dispatcher_backend="hybridep")
    args = (world, 128, 2 * world.nranks)
    want = train(layer("alltoall", *args), world, 128, STEPS)
    got = train(layer("flex", *args, moe_flex_dispatcher_backend="hybridep"), world, 128, STEPS)
    worst = max(abs(a - b) / b for a, b in zip(got, want))
    assert worst <= 0.01, "losses differ by %.4f: %s, %s" % (worst, got, want)
    fused_a2a.reset_hybrid_ep_buffer()
