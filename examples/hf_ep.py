# SPDX-License-Identifier: Apache-2.0
"""A Mixture-of-Experts model of Hugging Face's transformers, its experts spread over ranks by EPX.

    torchrun --nproc-per-node 4 examples/hf_ep.py [MODEL]

Three lines are EPX's part: the import, and the two names in DistributedConfig. MODEL is a folder or a name on the Hub;
without it a Qwen3-MoE with random weights is made, and the tokens that it generates over the ranks have to be those of
one process. It needs transformers 5.23, torch 2.8 and accelerate (pip install "epx-moe[transformers]").
"""

import os
import sys
import tempfile
import time

import epx.transformers
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig


def random_model():
    """A folder with a model of 27 million parameters, which rank 0 makes."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(Qwen3MoeConfig(
            vocab_size=4096, hidden_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8,
            num_experts=32, num_experts_per_tok=4, moe_intermediate_size=128, initializer_range=0.05,
            eos_token_id=None)).save_pretrained(folder[0])
    dist.barrier()
    return folder[0]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks, name = dist.get_world_size(), sys.argv[1] if len(sys.argv) > 1 else random_model()
    config = DistributedConfig(tp_size=ranks, ep_size=ranks, ep_implementation="epx")
    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=config)
    prompt = torch.arange(2, 34).view(2, 16)
    begin = time.perf_counter()
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False)
    seconds = time.perf_counter() - begin
    good = len(sys.argv) > 1 or torch.equal(tokens, AutoModelForCausalLM.from_pretrained(name).generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False))
    if dist.get_rank() == 0:
        print("experts on %d ranks by EPX %s: %.1f tokens/s" % (ranks, epx.__version__, 32 / seconds))
        print("hf_ep: " + ("passed" if good else "FAILED: one process generates other tokens"))
    dist.barrier()
    return 0 if good else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # without a wait for gloo's threads
