# SPDX-License-Identifier: Apache-2.0
"""The enums of nccl_ep.h, with its values."""

import enum


class Algorithm(enum.IntEnum):
    LOW_LATENCY = 0
    HIGH_THROUGHPUT = 1


class Layout(enum.IntEnum):
    """How received tokens lie. Low latency: EXPERT_MAJOR, RANK_MAJOR. High throughput: EXPERT_MAJOR, FLAT."""

    UNSET = 0
    EXPERT_MAJOR = 1
    RANK_MAJOR = 2
    FLAT = 3


class PassDir(enum.IntEnum):
    FWD = 0
    BWD = 1


class OverflowPolicy(enum.IntEnum):
    """High throughput: what becomes of rows beyond max_recv_tokens_per_rank."""

    AUTO = 0
    TRAP = 1
    DROP = 2


class ZeroCopyMode(enum.IntEnum):
    AUTO = 0
    OFF = 1
    ON = 2


class ExpertIdKind(enum.IntEnum):
    """The numbering of received expert ids."""

    AUTO = 0
    LOCAL = 1
    GLOBAL = 2


class DispatchQuantizationRecipe(enum.IntEnum):
    NONE = 0
    FWD = 1
    DS_FP8E3M4 = 2


class CombineQuantizationRecipe(enum.IntEnum):
    NONE = 0
    NVFP4 = 1
    MXFP8 = 2
