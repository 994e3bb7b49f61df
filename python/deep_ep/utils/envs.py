# SPDX-License-Identifier: Apache-2.0
"""The surroundings of a test: process groups, seeds, rates of NVLink and RDMA."""

import functools
import glob
import os
import random
import re
import subprocess
from typing import Any, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist

from .._checks import refused

_seeds = {"local": 0, "global": 0}
_local_rank: Optional[int] = None
_CARDS = "/sys/class/infiniband"


class EnvOverride:
    """Sets variables of the environment for a `with` block: (name, value, whether to) of each."""

    def __init__(self, envs: List[Tuple[str, str, bool]]) -> None:
        self.envs = {name: value for name, value, enabled in envs if enabled}
        self._old: Dict[str, Optional[str]] = {}

    def __enter__(self) -> "EnvOverride":
        self._old = {name: os.environ.get(name) for name in self.envs}
        os.environ.update(self.envs)
        return self

    def __exit__(self, *_: Any) -> None:
        for name, value in self._old.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def init_seed(global_seed: int) -> None:
    """Seeds torch and random: each rank has its own seed, the global one plus its rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    _seeds.update({"global": global_seed, "local": global_seed + rank})
    torch.manual_seed(_seeds["local"])
    random.seed(_seeds["local"])


def get_local_seed() -> int:
    """The seed of this rank."""
    return _seeds["local"]


def get_global_seed() -> int:
    """The seed that all ranks were given."""
    return _seeds["global"]


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Prints on all ranks, or on the first of each node; then a barrier."""
    local = int(os.environ.get("LOCAL_RANK", "0")) if _local_rank is None else _local_rank  # as torchrun sets it
    if not once_in_node or local == 0:
        print(s, flush=True)
    dist.barrier()


def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> Tuple[int, int, Any]:
    """Creates the process group: (rank, ranks, group). WORLD_SIZE and RANK count nodes here; MASTER_ADDR and
    MASTER_PORT name the first one. Without a GPU the backend is gloo, and tensors are the CPU's."""
    global _local_rank
    _local_rank = local_rank
    nodes, node = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    address = "tcp://%s:%s" % (os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "8361"))
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    ranks = nodes * num_local_ranks
    dist.init_process_group("nccl" if gpu and torch.cuda.device_count() >= num_local_ranks else "gloo",
                            init_method=address, world_size=ranks, rank=node * num_local_ranks + local_rank)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("cuda" if gpu else "cpu")
    init_seed(seed)
    return dist.get_rank(), ranks, dist.new_group(list(range(ranks)))


def get_physical_domain_size(group: Any) -> Tuple[int, int]:
    """(nodes, ranks per node): see deep_ep.get_physical_domain_size."""
    from .._domains import get_physical_domain_size as found

    return found(group)


def get_logical_domain_size(group: Any, allow_hybrid_mode: bool = True) -> Tuple[int, int]:
    """(scale-out ranks, scale-up ranks): see deep_ep.get_logical_domain_size."""
    from .._domains import get_logical_domain_size as found

    return found(group, allow_hybrid_mode)


def check_nvlink_connections(group: Any) -> None:
    """Passes always: EPX finds out which ranks share memory, and uses the network between the others."""


def check_torch_deterministic() -> None:
    """Raises if torch would fill new tensors while other streams write them."""
    if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:
        raise refused("torch.use_deterministic_algorithms: expected torch.utils.deterministic."
                      "fill_uninitialized_memory = False with it")


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


@functools.lru_cache(maxsize=None)
def get_nvlink_gbs(factor: float = 0.9) -> float:
    """GB/s of this GPU's NVLinks together, times the factor; 0 if there are none."""
    first = re.split(r"^GPU \d+:", _output("nvidia-smi", "nvlink", "-s"), flags=re.MULTILINE)[1:2]
    return factor * sum(float(rate) for rate in re.findall(r"Link \d+: *([\d.]+) GB/s", "".join(first)))


def get_sm_read_gbs() -> float:
    """GB/s that one SM reads, in DeepEP 2.5's model."""
    return 180


def get_sm_write_gbs() -> float:
    """GB/s that one SM writes, in DeepEP 2.5's model."""
    return 45


def _card(nic_name: Optional[str]) -> str:
    return nic_name or os.environ.get("EP_NIC_NAME", "mlx5_0")


def get_rdma_gbs(nic_name: Optional[str] = None) -> float:
    """GB/s of an RDMA card's port; 0 if there is no such card. None: the card of EP_NIC_NAME, or mlx5_0."""
    for path in sorted(glob.glob(os.path.join(_CARDS, _card(nic_name), "ports", "*", "rate"))):
        with open(path, encoding="ascii") as file:
            match = re.match(r"([\d.]+) Gb/sec", file.read())
        if match:
            return float(match.group(1)) / 8
    return 0.0


def check_fast_rdma_atomic_support(nic_name: Optional[str] = None) -> bool:
    """True if the card is of the type MT4131."""
    try:
        with open(os.path.join(_CARDS, _card(nic_name), "hca_type"), encoding="ascii") as file:
            return file.read().strip() == "MT4131"
    except OSError:
        return False
