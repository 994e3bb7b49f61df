# SPDX-License-Identifier: Apache-2.0
"""What dispatch and combine must give, in plain torch on the CPU, and inputs that every rank can compute for every
other."""

import functools
from typing import List, Optional, Tuple

import torch


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """DeepEP's measure of difference: 1 - 2 sum (x+1)(y+1) / sum ((x+1)^2 + (y+1)^2), of tensors of one shape."""
    assert x.shape == y.shape, (x.shape, y.shape)
    x, y = x.double() + 1, y.double() + 1
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum()) if x.numel() else 0.0


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Are shapes, dtypes and all bits equal? (FP8 has no comparison.)"""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    x, y = (t.cpu().contiguous() for t in (x, y))
    return x.numel() == 0 or torch.equal(x.view(torch.uint8), y.view(torch.uint8))


class Work:
    """The inputs of all ranks for one exchange, drawn from a seed."""

    def __init__(self, nranks: int, tokens: int, hidden: int, experts: int, topk: int, seed: int = 1,
                 uneven: bool = True, dropped: bool = True) -> None:
        self.nranks, self.hidden, self.experts, self.topk = nranks, hidden, experts, topk
        self.local = -(-experts // nranks)
        self.x: List[torch.Tensor] = []
        self.idx: List[torch.Tensor] = []
        self.weights: List[torch.Tensor] = []
        for rank in range(nranks):
            rng = torch.Generator().manual_seed(1000 * seed + rank)
            n = max(tokens - (rank * tokens) // (2 * nranks), 0) if uneven else tokens
            if uneven and rank == nranks - 1 and nranks > 2:
                n = 0 if seed % 2 else n
            self.x.append(torch.randn(n, hidden, generator=rng).bfloat16())
            idx = torch.rand(n, experts, generator=rng).argsort(1)[:, :topk].contiguous()
            if dropped and n:
                idx[torch.rand(n, topk, generator=rng) < 0.1] = -1
            self.idx.append(idx)
            self.weights.append(torch.rand(n, topk, generator=rng))

    def ranks_of(self, rank: int) -> torch.Tensor:
        """bool [T, R]: where the tokens of a rank go."""
        idx = self.idx[rank]
        goes = torch.zeros(idx.shape[0], self.nranks + 1, dtype=torch.bool)
        goes.scatter_(1, torch.where(idx < 0, self.nranks, torch.div(idx, self.local, rounding_mode="floor")), True)
        return goes[:, :self.nranks]

    @functools.lru_cache(maxsize=None)
    def flat(self, me: int) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """What rank `me` receives in high throughput: (source rank, source token, rows, local top-k, weights)."""
        ranks, tokens, rows, idx, weights = [], [], [], [], []
        for s in range(self.nranks):
            at = self.ranks_of(s)[:, me].nonzero().flatten()
            ranks.append(torch.full_like(at, s))
            tokens.append(at)
            rows.append(self.x[s][at])
            mine = self.idx[s][at]
            here = (mine >= 0) & (torch.div(mine, self.local, rounding_mode="floor") == me)
            idx.append(torch.where(here, mine - me * self.local, -1))
            weights.append(torch.where(here, self.weights[s][at], 0.0))
        return torch.cat(ranks), torch.cat(tokens), torch.cat(rows), torch.cat(idx), torch.cat(weights)

    def expert_counts(self, me: int) -> List[int]:
        """Rows of each local expert of rank `me`."""
        counts = torch.zeros(self.nranks * self.local, dtype=torch.int64)
        for idx in self.idx:
            counts += torch.bincount(idx[idx >= 0], minlength=counts.numel())
        return counts[me * self.local:(me + 1) * self.local].tolist()

    def by_expert(self, me: int) -> List[List[Tuple[int, int]]]:
        """For each local expert of rank `me`, its (source rank, source token) in order."""
        lists: List[List[Tuple[int, int]]] = [[] for _ in range(self.local)]
        for s in range(self.nranks):
            for t, row in enumerate(self.idx[s].tolist()):
                for e in row:
                    if e >= 0 and e // self.local == me:
                        lists[e % self.local].append((s, t))
        return lists


def expert_result(rows: torch.Tensor, expert: int) -> torch.Tensor:
    """What expert number `expert` makes of rows, in bf16: enough to tell experts and rows apart."""
    return (rows.float() * (1.0 + expert / 16.0)).bfloat16()


def combine_flat(work: Work, me: int, results: List[torch.Tensor], bias: List[torch.Tensor],
                 node_of: Optional[List[int]] = None) -> torch.Tensor:
    """The sum of rank `me`'s rows: results[r] are what rank r returns for its flat rows. In fp32: the bias first, then
    node by node; another node's sum is rounded, as it crosses in bf16."""
    goes = work.ranks_of(me)
    out = torch.zeros(goes.shape[0], work.hidden)
    for b in bias:
        out += b.float()
    node_of = node_of or [0] * work.nranks
    for node in range(max(node_of) + 1):
        part = torch.zeros_like(out)
        for r in range(work.nranks):
            if node_of[r] != node:
                continue
            ranks, tokens, *_ = work.flat(r)
            mine = ranks == me
            target = out if node == node_of[me] else part
            target.index_add_(0, tokens[mine], results[r][mine].float())
        if node != node_of[me]:
            out += part.bfloat16().float()
    return out.bfloat16()


def combine_weighted(work: Work, me: int) -> torch.Tensor:
    """Low latency: sums of expert_result() times weight, in top-k order, in fp32, rounded once."""
    x, out = work.x[me], torch.zeros(work.x[me].shape[0], work.hidden)
    for t, row in enumerate(work.idx[me].tolist()):
        for k, e in enumerate(row):
            if e >= 0:
                out[t] += work.weights[me][t, k] * expert_result(x[t], e).float()
    return out.bfloat16()


def cast_fp8(x: torch.Tensor, round_scale: bool = False) -> Tuple[torch.Tensor, torch.Tensor]:
    """Per 128 channels: (e4m3 values, fp32 scales to multiply by)."""
    rows, hidden = x.shape
    groups = -(-hidden // 128)
    padded = torch.zeros(rows, groups * 128, device=x.device)
    padded[:, :hidden] = x.float()
    blocks = padded.view(rows, groups, 128)
    amax = blocks.abs().amax(2).clamp(min=1e-4)
    # A number divided by a tensor is its reciprocal times the number, rounded twice: divide two tensors.
    scale_inv, scale = amax * torch.tensor(1.0 / 448.0), torch.full_like(amax, 448.0) / amax
    if round_scale:
        exponent = torch.ceil(torch.log2(amax.double() / 448.0)).float()
        scale_inv, scale = torch.exp2(exponent), torch.exp2(-exponent)
    values = (blocks * scale.unsqueeze(2)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values.view(rows, groups * 128)[:, :hidden].contiguous(), scale_inv


def uncast_fp8(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows again, from e4m3 [..., H] and fp32 [..., H/128]."""
    wide = scales.repeat_interleave(128, dim=-1)[..., :values.shape[-1]]
    return (values.float() * wide).bfloat16()


def unpack_ue8m0(packed: torch.Tensor, groups: int) -> torch.Tensor:
    """fp32 scales out of int32 that hold four exponents each."""
    parts = [(packed >> (8 * i)) & 0xFF for i in range(4)]
    exponents = torch.stack(parts, -1).flatten(-2)[..., :groups]
    return (exponents << 23).to(torch.int32).view(torch.float32)


def _flush(x: torch.Tensor) -> torch.Tensor:
    """Subnormal values are 0."""
    return torch.where(x.abs() < 2.0 ** -126, torch.zeros_like(x).copysign(x), x)


def cast_nvfp4(x: torch.Tensor, global_scale: float) -> Tuple[torch.Tensor, torch.Tensor]:
    """Per 16 channels: (u8 [T, H/2] of two e2m1 codes, the even channel in the low half; e4m3 scales [T, H/16]).
    docs/formats.md has a table of what cannot be encoded."""
    rows, hidden = x.shape
    blocks = x.float().view(rows, hidden // 16, 16)
    most, given, huge = blocks.abs().amax(2), torch.tensor(global_scale).abs(), global_scale > 2.0 ** 126
    lost = most.isnan() | (most != 0) & (given < 2.0 ** -126) | (huge & (most >= 2.0 ** -114))
    scaled = _flush(_flush(most * torch.tensor(1.0 / 6.0)) * torch.tensor(global_scale))
    scaled = torch.where(lost, float("nan"), torch.where(torch.tensor(huge), 0.0, scaled))
    scales = scaled.clamp(max=448).to(torch.float8_e4m3fn)
    one = torch.ones_like(scaled)
    inverse = torch.where(scaled == 0, 0.0, _flush(
        one / _flush(scales.float() * _flush(one / _flush(torch.tensor(global_scale))))))
    values = blocks * inverse.unsqueeze(2)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    distance = (values.abs().clamp(max=6).double().unsqueeze(-1) - table.double()).abs()
    even_first = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # of two values as near, the one with the even code
    codes = even_first[distance[..., even_first].argmin(-1)] | torch.where(values.signbit(), 8, 0)
    codes = torch.where(lost.unsqueeze(2) | values.isnan(), 7, torch.where(torch.tensor(huge), 0, codes))
    codes = codes.view(rows, hidden // 2, 2).to(torch.uint8)
    return codes[..., 0] | codes[..., 1] << 4, scales


def uncast_nvfp4(codes: torch.Tensor, scales: torch.Tensor, global_scale: float) -> torch.Tensor:
    """fp32 [T, H] again."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    values = torch.stack([table[(codes & 15).long()], table[(codes >> 4).long()]], -1).flatten(1)
    return values * scales.float().repeat_interleave(16, 1) / global_scale
