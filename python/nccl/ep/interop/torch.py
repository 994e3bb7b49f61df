# SPDX-License-Identifier: Apache-2.0
"""A communicator of the ranks of a torch.distributed process group."""

from typing import Any

from ..communicator import Communicator, UniqueId, get_unique_id

__all__ = ["get_nccl_comm_from_group"]


def get_nccl_comm_from_group(group: Any = None) -> Communicator:
    """A new communicator with the ranks of `group` (None: all), in their order. Collective; any backend will do."""
    import torch.distributed as dist

    if not dist.is_initialized():
        raise RuntimeError("get_nccl_comm_from_group: call torch.distributed.init_process_group first")
    rank, nranks = dist.get_rank(group), dist.get_world_size(group)
    first = dist.get_process_group_ranks(group)[0] if group is not None else 0
    box = [get_unique_id().as_bytes if rank == 0 else None]
    dist.broadcast_object_list(box, src=first, group=group)
    return Communicator.init(nranks, rank, UniqueId.from_bytes(box[0]))
