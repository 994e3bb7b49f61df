# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face's transformers with ep_implementation="epx" (make frameworks): what one process computes.
They have random weights. It needs transformers 5.23, torch 2.8 and accelerate, or newer ones."""

import contextlib
import copy
import shutil
import tempfile
from typing import Any, Dict, Iterator, Tuple
from unittest import mock

import epx.transformers
import torch
import torch.distributed as dist
import transformers
from suite import World
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

VOCABULARY, HIDDEN, EXPERTS, TOPK = 256, 128, 16, 4
COMMON = dict(vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=4, max_position_embeddings=512, num_experts_per_tok=TOPK, initializer_range=0.08,
              pad_token_id=0, bos_token_id=1, eos_token_id=None)
MODELS: Dict[str, Tuple[str, Dict[str, Any]]] = {
    "qwen3": ("Qwen3Moe", dict(moe_intermediate_size=96, intermediate_size=192, head_dim=32, num_experts=EXPERTS,
                               norm_topk_prob=True)),
    "mixtral": ("Mixtral", dict(intermediate_size=96, num_local_experts=EXPERTS)),
    "deepseek": ("DeepseekV3", dict(moe_intermediate_size=96, intermediate_size=192, n_routed_experts=EXPERTS,
                                    n_shared_experts=1, first_k_dense_replace=1, n_group=4, topk_group=2,
                                    q_lora_rank=64, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16,
                                    v_head_dim=32)),
    "gpt_oss": ("GptOss", dict(intermediate_size=96, num_local_experts=EXPERTS, head_dim=32, sliding_window=64)),
    "glm": ("Glm4Moe", dict(moe_intermediate_size=96, intermediate_size=192, n_routed_experts=EXPERTS, head_dim=32,
                            n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1)),
}


transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@contextlib.contextmanager
def saved(name: str) -> Iterator[str]:
    """A folder with the model, which rank 0 makes and removes."""
    folder = [tempfile.mkdtemp(prefix="epx-model-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    try:
        if dist.get_rank() == 0:
            family, settings = MODELS[name]
            torch.manual_seed(7)
            config = getattr(transformers, family + "Config")(**{**COMMON, **settings})
            getattr(transformers, family + "ForCausalLM")(config).save_pretrained(folder[0])
        dist.barrier()
        yield folder[0]
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0])


def load(folder: str, **distributed: Any) -> torch.nn.Module:
    config = dict(distributed_config=DistributedConfig(**distributed)) if distributed else {}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **config).eval()


def spread(world: World, folder: str) -> Iterator[Tuple[str, torch.nn.Module, torch.Generator]]:
    """(how, the model over all ranks, a generator of its batches): one batch for all ranks, for half of them, or a
    batch each."""
    for batches in (1, 2, world.nranks):
        sharing = world.nranks // batches
        model = load(folder, tp_size=sharing, fsdp_size=batches, ep_size=world.nranks, ep_implementation="epx")
        yield "%d batches" % batches, model, torch.Generator().manual_seed(world.rank // sharing)


def prompts(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, shape, generator=generator)


def close(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    apart = ((got - want).abs().max() / want.abs().max().clamp_min(1e-20)).item()
    assert apart <= 2e-5, "%s: %.1e apart" % (what, apart)


def inference(world: World, folder: str) -> None:
    """Logits of prompts (of more rows than are sent as parts of sums, and of fewer), and what generate() adds."""
    alone = load(folder)
    for how, model, generator in spread(world, folder):
        for shape in ((2, 151), (1, 3)):
            ids = prompts(generator, *shape)
            with torch.no_grad():
                close("%s: logits of %s" % (how, list(shape)), model(ids).logits, alone(ids).logits)
        ids = prompts(generator, 2, 9)
        limits = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False)
        assert torch.equal(model.generate(ids, **limits), alone.generate(ids, **limits)), how


def training(world: World, folder: str) -> None:
    """Losses and gradients of all weights, router and experts included; a rank may have no rows of its own."""
    for how, model, generator in spread(world, folder):
        for shape in ((2, 75), (1, 3)):
            alone = copy.deepcopy(load(folder)).train()
            model.train().zero_grad()
            ids = prompts(generator, *shape)
            want, got = alone(ids, labels=ids).loss, model(ids, labels=ids).loss
            close(how + ": loss", got, want)
            want.backward()
            got.backward()
            weights = dict(alone.named_parameters())
            for weight, parameter in model.named_parameters():
                grad, expected = parameter.grad, weights[weight].grad
                assert (grad is None) == (expected is None), "%s: %s" % (how, weight)
                if grad is None:
                    continue
                dist.all_reduce(expected)  # the mean over all batches
                expected /= world.nranks
                grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                close("%s: gradient of %s" % (how, weight), grad, expected)


def check(world: World, name: str) -> None:
    with saved(name) as folder:
        inference(world, folder)
        training(world, folder)


def test_qwen3(world: World) -> None:
    check(world, "qwen3")


def test_mixtral(world: World) -> None:
    check(world, "mixtral")


def test_deepseek(world: World) -> None:
    check(world, "deepseek")


def test_gpt_oss(world: World) -> None:
    check(world, "gpt_oss")


def test_glm(world: World) -> None:
    check(world, "glm")


class Layer:
    """The experts of one layer, on their own: real ones of Qwen3-MoE, and EPX's implementation over all ranks."""

    def __init__(self, world: World, shared: bool) -> None:
        torch.manual_seed(11)
        config = transformers.Qwen3MoeConfig(**{**COMMON, **MODELS["qwen3"][1]}, experts_implementation="batched_mm")
        mesh = init_device_mesh(world.device.type, (1, world.nranks), mesh_dim_names=("one", "all"))
        self.alone, experts = (Qwen3MoeExperts(config).to(world.device) for _ in range(2))
        mine = slice(world.rank * EXPERTS // world.nranks, (world.rank + 1) * EXPERTS // world.nranks)
        with torch.no_grad():
            for name, weights in self.alone.named_parameters():
                weights.normal_(std=0.08)
                setattr(experts, name, torch.nn.Parameter(weights[mine].clone()))
        experts.num_experts //= world.nranks
        experts._is_expert_parallel = True
        self.spread = epx.transformers.EpxEP(experts, mesh["all"], mesh["all" if shared else "one"])

    def batch(self, world: World, seed: int, rows: int) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        weights, idx = torch.rand(rows, EXPERTS, generator=generator).topk(TOPK)
        return (torch.randn(rows, HIDDEN, generator=generator).to(world.device), idx.to(world.device),
                weights.to(world.device))


def test_rows_that_no_host_counts(world: World) -> None:
    """What a capture records where each rank has a batch: room for all rows, of which some do not arrive."""
    layer = Layer(world, False)
    batch = layer.batch(world, world.rank, 5)
    with torch.no_grad(), mock.patch.object(epx.transformers, "_capturing", lambda rows: True):
        close("rows", layer.spread(*batch), layer.alone(*batch))


def test_decode_in_a_graph(world: World) -> None:
    """A layer recorded in a CUDA graph computes other batches when it is replayed."""
    if world.device.type != "cuda":
        world.skip("needs a GPU")
    for shared in (True, False):
        layer = Layer(world, shared)
        seed = 0 if shared else world.rank
        given = layer.batch(world, seed, 3)
        with torch.no_grad():
            for _ in range(3):
                layer.spread(*given)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = layer.spread(*given)
            for again in range(1, 4):
                batch = layer.batch(world, seed + 100 * again, 3)
                for tensor, value in zip(given, batch):
                    tensor.copy_(value)
                graph.replay()
                close("replay %d" % again, out, layer.alone(*batch))


def test_experts_matter(world: World) -> None:
    """The comparison fails when one rank's experts are others: they have a part in every result above."""
    with saved("qwen3") as folder:
        _how, model, generator = next(spread(world, folder))
        ids = prompts(generator, 1, 8)
        with torch.no_grad():
            before = model(ids).logits
            for name, parameter in model.named_parameters():
                if ".experts." in name and world.rank == 1:
                    parameter.to_local().zero_()
            assert (model(ids).logits - before).abs().max() > 1e-2
