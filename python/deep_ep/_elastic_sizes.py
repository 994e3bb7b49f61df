# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of ElasticBuffer: bytes of buffers, numbers of SMs and of queue pairs. Callers compare these numbers
with DeepEP's, or pass them back; EPX itself sizes its memory by the calls."""

import math
from typing import Any, Iterable, List, NamedTuple, Sequence, Tuple, Union

import torch

from ._checks import MAX_TOPK, positive, wrong

ALIGNMENT = 2 << 20  # of every size of a buffer
RDMA_ALIGNMENT, TMA_ALIGNMENT = 64, 32  # DeepEP's
_SHALLOWEST, _DEEPEST = 1024, 32768  # queue pairs of Engram
_FORWARDED = 1280  # tokens per source node that DeepEP has in flight between nodes

Shapes = Union[Sequence[int], Iterable[Sequence[int]]]


def up(value: int, step: int = 32) -> int:
    """Rounded up to a multiple."""
    return -(-value // step) * step


def _dispatch_bytes(hidden: int, topk: int, fp8: bool) -> int:
    """Bytes of a token in dispatch."""
    scales = -(-hidden // 32) if fp8 else 0
    return up(hidden * (1 if fp8 else 2)) + up(4 * scales) + up(8 * topk + 4 * (1 + topk))


def buffer_bytes(domains: Tuple[int, int], nvlink: bool, tokens: int, hidden: int, topk: int, fp8: bool,
                 multiple: bool) -> int:
    """Bytes of a buffer. `domains`: scale-out and scale-up ranks; `nvlink`: the latter are one NVLink domain;
    `multiple`: sums may be rounded more than once (allow_multiple_reduction)."""
    out, ranks = domains
    topk = topk or MAX_TOPK
    if out == 1:
        sent = tokens * (ranks + (0 if nvlink else 1))
        back = tokens * (min(ranks, topk) if multiple else topk)
        back += 0 if nvlink else ranks * tokens * (1 if multiple else topk)
    else:
        forwarded = out * (tokens + _FORWARDED)
        sent = ranks * out * tokens + tokens + forwarded
        back = (min(ranks, topk) if multiple else topk) * out * tokens
        back += (min(out, topk) if multiple else topk) * tokens + (1 if multiple else topk) * forwarded
    combined = up(2 * hidden) + up(8 * topk)
    return up(max(sent * _dispatch_bytes(hidden, topk, fp8), back * combined), ALIGNMENT)


def engram_bytes(entries: int, hidden: int, tokens: int, dtype: torch.dtype) -> Tuple[int, int]:
    """(GPU bytes, CPU bytes) of Engram storage."""
    row = up(hidden * dtype.itemsize)
    return up(row * tokens, ALIGNMENT), up(row * entries, ALIGNMENT)


def engram_config(peers: int, requests: int, mega_reads: int, reads_per_qp: int) -> Tuple[int, int, bool]:
    """(queue pairs, their depth, whether cards must have fewer reads in flight) for so many requests to all peers. A
    read takes 10 us, and a card does so many millions a second."""
    qps = max(math.ceil(mega_reads * 10 / reads_per_qp / peers), 1)
    needed = -(-requests // (qps * peers))
    if needed > _DEEPEST:
        return int(-(-requests // (_DEEPEST * peers)) * 1.05), _DEEPEST, True
    return qps, max(_SHALLOWEST, 1 << (needed - 1).bit_length()), False


def pipeline_bytes(tensor_bytes: int, inflight: int) -> int:
    """Bytes of the pipeline-parallel ring: two neighbours, two directions."""
    return up(up(tensor_bytes) * inflight * 4, ALIGNMENT)


def shape_list(shapes: Shapes) -> Tuple[List[Tuple[int, ...]], bool]:
    """(the shapes as a list, whether it is one shape and no sequence of them). Extents are integers of any kind."""
    try:
        given: List[Any] = list(shapes)
        one = all(hasattr(extent, "__index__") for extent in given)
        return [tuple(positive("shapes", extent, 0) for extent in shape) for shape in ([given] if one else given)], one
    except TypeError:
        raise wrong("shapes", "a shape or a sequence of shapes", repr(shapes)) from None


def gathered_bytes(shapes: Shapes, dtype: torch.dtype, ranks: int) -> int:
    """Bytes of the all-gathers of tensors of these shapes."""
    return sum(up(ranks * math.prod(shape) * dtype.itemsize) for shape in shape_list(shapes)[0])


def _reached(experts: int, topk: int, groups: int) -> float:
    """The expected number of `groups` equal groups of experts that a token reaches, with a random top-k."""
    missed = math.comb(experts - experts // groups, topk) / math.comb(experts, topk)
    return groups * (1.0 - missed)


class Traffic:
    """What moves per byte that a rank receives, in DeepEP's model."""

    def __init__(self, read: float, write: float, rdma: float, nvlink: float) -> None:
        self.read, self.write, self.rdma, self.nvlink = read, write, rdma, nvlink


def _traffic(domains: Tuple[int, int], nvlink_ranks: int, experts: int, topk: int) -> Traffic:
    out, ranks = domains
    reached = _reached(experts, topk, out * ranks)
    if out > 1:
        nodes = _reached(experts, topk, out)
        return Traffic((1 + nodes) / reached, 1 + 1 / reached + nodes / (reached * out),
                       nodes * (1 - 1 / out) / reached, 1 - 1 / ranks)
    near = nvlink_ranks / ranks
    return Traffic(1 / reached, near + (1 / reached if nvlink_ranks < ranks else 0), 1 - near,
                   near * (1 - 1 / nvlink_ranks))


class Model(NamedTuple):
    """How DeepEP gets a number of SMs from rates: whether those of combine count too, what is added, and the step."""

    counts_combine: bool
    factor: float
    step: int


V2 = Model(False, 1.25, 2)
V2_5 = Model(True, 1.3, 4)


def theoretical_sms(domains: Tuple[int, int], nvlink_ranks: int, experts: int, topk: int, most: int,
                    rates: Tuple[float, float, float, float], model: Model = V2) -> int:
    """SMs that keep up with the network. `rates`: GB/s of RDMA and NVLink, and that one SM reads and writes."""
    rdma_gbs, nvlink_gbs, read_gbs, write_gbs = rates
    traffic = _traffic(domains, nvlink_ranks, experts, topk)
    bounded_by_rdma = domains[0] > 1 and (
        not nvlink_gbs or (rdma_gbs and traffic.rdma / rdma_gbs > traffic.nvlink / nvlink_gbs))
    share, gbs = (traffic.rdma, rdma_gbs) if bounded_by_rdma else (traffic.nvlink, nvlink_gbs)
    if share <= 0 or gbs <= 0:
        return max(4, most // 2 * 2)
    seconds = [traffic.read / read_gbs, traffic.write / write_gbs]  # of one SM, for a byte that a rank receives
    if model.counts_combine:
        seconds += [(traffic.write - traffic.nvlink) / read_gbs, (traffic.read + traffic.nvlink) / write_gbs]
    needed = math.ceil(max(seconds) * gbs / share * model.factor)
    return max(4, min(up(needed, model.step), most // 2 * 2))


def theoretical_qps(num_sms: int, hybrid: bool, allocated: int) -> int:
    """Queue pairs for this many SMs."""
    return min(16 * num_sms + 1 if hybrid else min(num_sms, 9), allocated)


def default_qps(hybrid: bool, fast_atomics: bool) -> int:
    """Queue pairs to allocate where the caller does not say."""
    if not hybrid:
        return 17
    return 65 if fast_atomics else 129
