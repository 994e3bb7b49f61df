#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Spreads the experts of a Hugging Face MoE model over ranks with EPX, and compares with the model in one process.

    torchrun --nproc-per-node 4 examples/hf_moe.py                    # a small random Qwen3-MoE; nothing is downloaded
    torchrun --nproc-per-node 4 examples/hf_moe.py --model qwen3 mixtral

Needs torch and transformers (4.51 or newer). Every rank reads its own prompts: the prompts go through the
high-throughput mode, then tokens are decoded one by one through the low-latency mode. The program ends with an error
unless, on every rank,

  - the logits of the prompts are those of one process: max |a - b| <= 1e-4 * max |b|, in float32,
  - so are the logits of each decoded token, <= 2e-2 * max |b|: the low-latency mode carries bfloat16. That much
    rounding can turn the choice between two nearly equal experts, so decoding takes the choices of the one process.

To use EPX in another model, replace its MoE block as `spread` does here: two calls, dispatch and combine.
"""

import argparse
import copy
import os
import sys

import deep_ep
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from epx import autograd

HIDDEN, EXPERTS, TOPK, LAYERS, VOCABULARY = 128, 16, 4, 3, 512
PROMPT_TOLERANCE, DECODE_TOLERANCE = 1e-4, 2e-2


def build(name):
    """A model with random weights, the same on every rank."""
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
    common = dict(vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=4,
                  num_key_value_heads=2, max_position_embeddings=512, num_experts_per_tok=TOPK, initializer_range=0.08)
    torch.manual_seed(0)
    if name == "mixtral":
        return MixtralForCausalLM(MixtralConfig(intermediate_size=96, num_local_experts=EXPERTS, **common)).eval()
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(moe_intermediate_size=96, intermediate_size=192, head_dim=32,
                                              num_experts=EXPERTS, norm_topk_prob=True, **common)).eval()


class SpreadBlock(nn.Module):
    """Takes the place of a model's MoE block: this rank's experts, and EPX to reach the others."""

    def __init__(self, block, buffer, max_decoded):
        super().__init__()
        local = EXPERTS // buffer.group_size
        self.first, self.local, self.buffer, self.max_decoded = buffer.rank * local, local, buffer, max_decoded
        self.router = block.gate.weight
        self.choices = []  # of the one process, for tokens to decode
        if isinstance(block.experts, nn.ModuleList):  # transformers 4: a module per expert
            self.experts = block.experts[self.first:self.first + local]
            self.also_logits = True
        else:  # transformers 5: one tensor per matrix, over all experts
            mine = slice(self.first, self.first + local)
            self.gate_up, self.down = (nn.Parameter(w[mine].detach().clone())
                                       for w in (block.experts.gate_up_proj, block.experts.down_proj))
            self.activation = block.experts.act_fn
            self.also_logits = False

    def expert(self, e, rows):
        if self.also_logits:
            return self.experts[e](rows)
        gate, up = F.linear(rows, self.gate_up[e]).chunk(2, dim=-1)
        return F.linear(self.activation(gate) * up, self.down[e])

    def forward(self, hidden_states):
        x = hidden_states.reshape(-1, HIDDEN)
        logits = F.linear(x, self.router)
        likely = logits.float().softmax(-1)
        prompt = hidden_states.shape[1] > 1
        idx = likely.topk(TOPK, dim=-1).indices if prompt else self.choices.pop(0)
        weights = likely.gather(1, idx)
        weights = weights / weights.sum(-1, keepdim=True)
        if prompt:
            y = autograd.moe(self.buffer, x, idx, weights, EXPERTS, self.expert)
        else:
            y = self.decode(x, idx, weights)
        y = y.view_as(hidden_states)
        return (y, logits) if self.also_logits else y

    def decode(self, x, idx, weights):
        """Low latency: rows arrive sorted by expert, and combine applies the weights."""
        rows, counts, handle, _, _ = self.buffer.low_latency_dispatch(x.bfloat16(), idx, self.max_decoded, EXPERTS,
                                                                      use_fp8=False)
        out = torch.zeros_like(rows)
        for e, count in enumerate(counts.tolist()):
            if count:
                out[e, :count] = self.expert(e, rows[e, :count].to(x.dtype)).to(rows.dtype)
        return self.buffer.low_latency_combine(out, idx, weights, handle)[0].to(x.dtype)


def moe_blocks(model):
    """(layer, name of its MoE block)"""
    return [(layer, "mlp" if hasattr(layer, "mlp") else "block_sparse_moe") for layer in model.model.layers]


def spread(model, buffer, max_decoded, choices):
    for (layer, name), chosen in zip(moe_blocks(model), choices):
        block = SpreadBlock(getattr(layer, name), buffer, max_decoded)
        block.choices = chosen[1:]  # the first call is the prompts'
        setattr(layer, name, block)


def record_choices(model):
    """A list per layer, to which each call of the model adds the experts that its router chose."""
    choices = []
    for layer, name in moe_blocks(model):
        chosen = []
        choices.append(chosen)

        def hook(_module, _inputs, out, chosen=chosen):
            logits = out[0] if isinstance(out, tuple) else out
            chosen.append(logits.float().softmax(-1).topk(TOPK, dim=-1).indices)

        getattr(layer, name).gate.register_forward_hook(hook)
    return choices


@torch.no_grad()
def run(model, prompts, steps, given=None):
    """Logits of the prompts and of each decoded token. `given`: tokens to decode, instead of the likeliest ones."""
    out = model(prompts, use_cache=True)
    logits, tokens = [out.logits], []
    for step in range(steps):
        tokens.append(out.logits[:, -1:].argmax(-1) if given is None else given[step])
        out = model(tokens[-1], past_key_values=out.past_key_values, use_cache=True)
        logits.append(out.logits)
    return logits, tokens


def make_buffer(ranks, max_decoded):
    """One buffer for both modes."""
    config = deep_ep.Buffer.get_dispatch_config(ranks)
    hidden_bytes = HIDDEN * 4
    rdma = max(config.get_rdma_buffer_size_hint(hidden_bytes, ranks),
               deep_ep.Buffer.get_low_latency_rdma_size_hint(max_decoded, HIDDEN, ranks, EXPERTS))
    return deep_ep.Buffer(dist.group.WORLD, config.get_nvl_buffer_size_hint(hidden_bytes, ranks), rdma,
                          low_latency_mode=True, num_qps_per_rank=EXPERTS // ranks, explicitly_destroy=True)


def apart(logits, reference):
    return ((logits - reference).abs().max() / reference.abs().max()).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["qwen3"], choices=("qwen3", "mixtral"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--prompts", type=int, default=2, help="per rank, default 2")
    parser.add_argument("--length", type=int, default=48, help="of a prompt, default 48")
    parser.add_argument("--decode", type=int, default=8, help="tokens, default 8")
    args = parser.parse_args()
    for name, least in (("prompts", 1), ("length", 2), ("decode", 1)):  # calls with one token each decode
        if getattr(args, name) < least:
            parser.error(f"--{name}: expected {least} or more, got {getattr(args, name)}")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if EXPERTS % ranks:
        sys.exit(f"hf_moe: expected a number of ranks that divides {EXPERTS} experts, got {ranks}")
    if args.device == "cuda":
        args.device = f"cuda:{int(os.environ.get('LOCAL_RANK', rank)) % torch.cuda.device_count()}"
        torch.cuda.set_device(args.device)

    good = all([compare(name, args, rank, ranks) for name in args.model])
    if rank == 0:
        print("hf_moe: " + ("passed" if good else "FAILED"), flush=True)
    return 0 if good else 1


def compare(name, args, rank, ranks):
    """Whether the logits of a model over ranks are those of one process; rank 0 says how far apart they are."""
    model = build(name).to(args.device)
    prompts = torch.randint(VOCABULARY, (args.prompts, args.length), generator=torch.Generator().manual_seed(rank))
    prompts = prompts.to(args.device)
    one_process = copy.deepcopy(model)
    choices = record_choices(one_process)
    reference, tokens = run(one_process, prompts, args.decode)
    buffer = make_buffer(ranks, args.prompts)
    spread(model, buffer, args.prompts, choices)
    logits, _ = run(model, prompts, args.decode, tokens)
    buffer.destroy()

    mine = (apart(logits[0], reference[0]), max([apart(a, b) for a, b in zip(logits[1:], reference[1:])], default=0.0))
    results = [None] * ranks
    dist.all_gather_object(results, mine)
    prompt, decoded = (max(r[i] for r in results) for i in (0, 1))
    good = prompt <= PROMPT_TOLERANCE and decoded <= DECODE_TOLERANCE
    if rank == 0:
        print(f"{name} on {ranks} ranks, {EXPERTS // ranks} of {EXPERTS} experts each")
        print(f"prompts, high throughput: logits at most {prompt:.1e} apart, allowed {PROMPT_TOLERANCE}")
        print(f"decoding, low latency:    logits at most {decoded:.1e} apart, allowed {DECODE_TOLERANCE}", flush=True)
    return good


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Without destroy_process_group(), in which torch 2.6 may wait for gloo's thread, and that for Python's lock
    os._exit(code)
