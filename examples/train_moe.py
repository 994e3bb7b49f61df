#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small byte-level MoE language model twice: in one process, and with its experts spread over ranks by EPX.

    torchrun --nproc-per-node 8 examples/train_moe.py                     # 300 steps on the CPU
    torchrun --nproc-per-node 8 examples/train_moe.py --device cuda       # ranks may share a GPU
    torchrun --nproc-per-node 8 examples/train_moe.py --plot loss.png     # needs matplotlib

Each rank has all of the model but the experts, of which it has its share, and trains on its share of every batch. Rank
0 first trains the whole model on the whole batches. The program ends with an error unless

  - the gradients of the first step agree: for each parameter |g - g_one| <= tolerance * |g_one| (Euclidean norms),
  - the loss follows that of one process: |loss - loss_one| <= tolerance at the mean over each tenth of the steps,
  - the loss has fallen: the last tenth is below 3/4 of the first step's. Fewer than 20 steps are not asked for that.
"""

import argparse
import copy
import glob
import os
import sys

import deep_ep
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from epx import autograd

REPOSITORY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
# What rounding may do. The model is float32; an exchange in bfloat16 rounds rows and their gradients, and then some
# tokens of the second layer choose another expert: with few tokens per expert that is a good part of an expert's
# gradient.
TOLERANCE = {"float32": (1e-4, 0.01), "bfloat16": (0.25, 0.05)}  # of gradients (relative), of losses (nats)


class Experts(nn.Module):
    """Experts of a layer: two matrices each."""

    def __init__(self, count, hidden, inner):
        super().__init__()
        self.up = nn.ParameterList(nn.Parameter(torch.randn(inner, hidden) * hidden**-0.5) for _ in range(count))
        self.down = nn.ParameterList(nn.Parameter(torch.randn(hidden, inner) * inner**-0.5) for _ in range(count))

    def forward(self, e, rows):
        return F.linear(F.silu(F.linear(rows, self.up[e])), self.down[e])

    def keep(self, first, count):
        self.up, self.down = self.up[first:first + count], self.down[first:first + count]


class MoE(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.num_experts, self.topk = args.experts, args.topk
        self.router = nn.Linear(args.hidden, args.experts, bias=False)
        self.experts = Experts(args.experts, args.hidden, 2 * args.hidden)
        self.dtype = getattr(torch, args.exchange)
        self.buffer = None  # of EPX, once the experts are spread

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weights, idx = self.router(flat).float().softmax(-1).topk(self.topk, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        if self.buffer is None:
            y = self.one_process(flat, idx, weights)
        else:
            y = autograd.moe(self.buffer, flat.to(self.dtype), idx, weights, self.num_experts,
                             lambda e, rows: self.experts(e, rows.float())).float()
        return y.view_as(x)

    def one_process(self, x, idx, weights):
        out = torch.zeros_like(x)
        for e in range(self.num_experts):
            row, k = torch.where(idx == e)
            if row.numel():
                out = out.index_add(0, row, self.experts(e, x[row]) * weights[row, k, None])
        return out

    def spread(self, buffer):
        """Keeps this rank's experts only; EPX brings tokens to the others."""
        count = -(-self.num_experts // buffer.group_size)
        self.experts.keep(buffer.rank * count, count)
        self.buffer = buffer


class Block(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.heads = args.heads
        self.norm_attention, self.norm_moe = nn.LayerNorm(args.hidden), nn.LayerNorm(args.hidden)
        self.qkv, self.out = nn.Linear(args.hidden, 3 * args.hidden), nn.Linear(args.hidden, args.hidden)
        self.moe = MoE(args)

    def forward(self, x):
        b, t, h = x.shape
        q, k, v = self.qkv(self.norm_attention(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, h)
        x = x + self.out(attended)
        return x + self.moe(self.norm_moe(x))


class Model(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, args.hidden), nn.Embedding(args.length, args.hidden)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.layers))
        self.norm, self.head = nn.LayerNorm(args.hidden), nn.Linear(args.hidden, 256)

    def forward(self, tokens):
        x = self.bytes(tokens) + self.places.weight[:tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def corpus():
    """The documents of this repository, as bytes."""
    names = sorted(glob.glob(os.path.join(REPOSITORY, "*.md")) + glob.glob(os.path.join(REPOSITORY, "docs", "*.md")))
    text = b"".join(open(name, "rb").read() for name in names)
    if len(text) < 10000:
        sys.exit(f"train_moe: expected the repository's documents beside examples/, found {len(text)} bytes of them")
    return torch.tensor(list(text))


def batches(args, text):
    """The same whole batches on every rank: [batch, length + 1] bytes each."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(args.steps):
        begin = torch.randint(len(text) - args.length - 1, (args.batch,), generator=generator)
        yield torch.stack([text[b:b + args.length + 1] for b in begin]).to(args.device)


def train(model, args, text, rank, ranks):
    """Trains on this rank's share of each batch; returns the losses of whole batches, and the first step's
    gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate)
    experts = {id(p) for block in model.blocks for p in block.moe.experts.parameters()}
    losses, first = [], None
    for batch in batches(args, text):
        mine = batch.chunk(ranks)[rank]
        loss = F.cross_entropy(model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        if ranks > 1:
            loss = average(model, experts, loss, ranks)
        if first is None:
            first = {name: p.grad.to("cpu", copy=True) for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        losses.append(loss.item())
        if rank == 0 and len(losses) % 50 == 0:
            print(f"{'EPX, ' + str(ranks) + ' ranks' if ranks > 1 else 'one process'}: step {len(losses)}, "
                  f"loss {losses[-1]:.4f}", flush=True)
    return losses, first


def average(model, experts, loss, ranks):
    """The loss of the whole batch is the mean over ranks. So are the gradients, but an expert's are already sums over
    the tokens of all ranks."""
    total = [loss.detach().reshape(1)]
    total += [p.grad.flatten() for p in model.parameters() if id(p) not in experts]
    flat = torch.cat(total)
    dist.all_reduce(flat)
    flat /= ranks
    at = 1
    for p in model.parameters():
        if id(p) in experts:
            if p.grad is not None:
                p.grad /= ranks
        else:
            p.grad.copy_(flat[at:at + p.numel()].view_as(p))
            at += p.numel()
    return flat[0]


def worst_gradient(model, first, reference, rank):
    """(relative difference, name) of the parameter whose first gradient is furthest from one process'."""
    worst = (0.0, "none")
    for name, mine in first.items():
        head, mark, place = name.rpartition("experts.")
        if mark:  # "up.3" of this rank is another number in the whole model
            matrix, number = place.split(".")
            local = len(model.blocks[0].moe.experts.up)
            name = f"{head}{mark}{matrix}.{int(number) + rank * local}"
        whole = reference[name]
        worst = max(worst, (((mine - whole).norm() / whole.norm().clamp_min(1e-12)).item(), name))
    return worst


def tenths(losses):
    """Parts of the steps, none of them empty."""
    return torch.tensor(losses).tensor_split(min(10, len(losses)))


def plot(path, one, spread, args, ranks):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, height_ratios=(3, 1))
    top.plot(one, color="0.55", linewidth=3, label="one process")
    top.plot(spread, color="tab:blue", linewidth=1, label=f"EPX, {ranks} ranks")
    top.set_ylabel("loss (nats per byte)")
    top.set_title(f"{args.experts} experts, top-{args.topk}, {args.layers} layers; "
                  f"exchange in {args.exchange} on {args.device}")
    top.legend()
    bottom.plot([b - a for a, b in zip(one, spread)], color="tab:red", linewidth=1)
    bottom.axhline(0, color="0.8", linewidth=1, zorder=0)
    bottom.set_ylabel("difference")
    bottom.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--exchange", default="float32", choices=sorted(TOLERANCE), help="type of what EPX carries")
    for name, value in (("steps", 300), ("batch", 16), ("length", 64), ("hidden", 64), ("layers", 2), ("heads", 4),
                        ("experts", 16), ("topk", 2)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate, default 0.003")
    parser.add_argument("--plot", help="write a picture of both losses here (PNG)")
    args = parser.parse_args()
    for name in ("steps", "batch", "length", "hidden", "layers", "heads", "experts", "topk"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: expected 1 or more, got {getattr(args, name)}")
    if args.topk > args.experts:
        parser.error(f"--topk: expected at most --experts ({args.experts}), got {args.topk}")
    if args.hidden % args.heads:
        parser.error(f"--hidden: expected a multiple of --heads ({args.heads}), got {args.hidden}")
    if args.hidden * getattr(torch, args.exchange).itemsize % 16:
        parser.error(f"--hidden: expected rows of a multiple of 16 bytes, got {args.hidden} {args.exchange}")
    return args


def main():
    args = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if args.batch % ranks or args.experts % ranks:
        sys.exit(f"train_moe: expected --batch ({args.batch}) and --experts ({args.experts}) "
                 f"to be multiples of {ranks} ranks")
    if args.device == "cuda":
        args.device = f"cuda:{int(os.environ.get('LOCAL_RANK', rank)) % torch.cuda.device_count()}"
        torch.cuda.set_device(args.device)
    text = corpus()
    torch.manual_seed(0)
    model = Model(args).to(args.device)

    # Every rank learns the losses and first gradients of one process from rank 0.
    one = [train(copy.deepcopy(model), args, text, 0, 1) if rank == 0 else None]
    dist.broadcast_object_list(one, device=torch.device("cpu"))
    losses_one, gradients_one = one[0]

    hidden_bytes = args.hidden * 4
    config = deep_ep.Buffer.get_dispatch_config(ranks)
    buffer = deep_ep.Buffer(dist.group.WORLD, config.get_nvl_buffer_size_hint(hidden_bytes, ranks),
                            config.get_rdma_buffer_size_hint(hidden_bytes, ranks), explicitly_destroy=True)
    for block in model.blocks:
        block.moe.spread(buffer)
    losses, gradients = train(model, args, text, rank, ranks)

    worst = [None] * ranks
    dist.all_gather_object(worst, worst_gradient(model, gradients, gradients_one, rank))
    buffer.destroy()
    failed = report(args, max(worst), losses_one, losses) if rank == 0 else 0
    if rank == 0 and args.plot:
        plot(args.plot, losses_one, losses, args, ranks)
    return failed


def report(args, worst, one, spread):
    gradient_limit, loss_limit = TOLERANCE[args.exchange]
    apart = max(abs(a.mean() - b.mean()).item() for a, b in zip(tenths(one), tenths(spread)))
    last = tenths(spread)[-1].mean().item()
    print(f"first gradients: at most {worst[0]:.2e} apart ({worst[1]}), allowed {gradient_limit:.0e}")
    print(f"losses: at most {apart:.2e} apart over a tenth of the steps, allowed {loss_limit}")
    print(f"loss: {spread[0]:.4f} at first, {last:.4f} at last; one process {tenths(one)[-1].mean().item():.4f}")
    fallen = last < 0.75 * spread[0] or args.steps < 20
    good = worst[0] <= gradient_limit and apart <= loss_limit and fallen
    print("train_moe: " + ("passed" if good else "FAILED"), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Without destroy_process_group(), in which torch 2.6 may wait for gloo's thread, and that for Python's lock
    os._exit(code)
