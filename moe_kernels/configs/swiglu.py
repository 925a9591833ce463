"""Which kernel and which `helion.Config` the first half of an expert gets, by rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import helion
import torch

from moe_kernels.configs import PERSISTENT_FROM_ROWS, block_for, floor_power_of_2, offsets_block

__all__ = ["Access", "Choice", "Problem", "floor_power_of_2", "rule"]


@dataclass(frozen=True)
class Problem:
    """What a choice may depend on."""

    rows: int  # mean rows per expert, rounded down to a power of two; 0 if less than 1
    M: int  # rounded down to a power of two
    I: int  # noqa: E741
    H: int
    E: int
    dtype: torch.dtype  # of the products: the operands' common type
    tf32: bool  # fp32 products may use tf32
    gathered: bool  # rows are read through an index
    keeps: bool  # what act is made of is written too
    biases: int
    tma_A: bool  # rows can be read by TMA
    tma_B: bool  # so can both weights
    tma_out: bool  # everything that is written can be, and TMA clips it
    wide: bool  # what TMA cannot reach does not fit into 32 bits


class Access(NamedTuple):
    """How memory is reached."""

    tma_A: bool
    tma_B: bool
    tma_out: bool


@dataclass(frozen=True)
class Choice:
    """`persistent` or basic; the kernels' argument `block_m`."""

    persistent: bool
    block_m: int
    access: Access
    wide: bool
    config: helion.Config


# block_m: (block_i, block_k, num_warps, num_stages); with TMA and for 16-bit types, the last one persistent
_TMA = {16: (64, 128, 4, 4), 32: (64, 64, 4, 4), 64: (64, 64, 4, 4), 128: (128, 64, 8, 4)}
_POINTERS = {16: (32, 64, 4, 3), 32: (32, 64, 4, 3), 64: (64, 32, 4, 3), 128: (64, 32, 8, 3)}
_FP32 = {16: (32, 32, 4, 3), 32: (32, 32, 4, 3), 64: (32, 32, 4, 3), 128: (32, 16, 8, 3)}


def rule(problem: Problem) -> Choice:
    """Total: it compiles everywhere."""
    persistent = problem.rows >= PERSISTENT_FROM_ROWS
    block_m = next(block for rows, block in ((128, 128), (32, 64), (16, 32), (0, 16)) if problem.rows >= rows)
    tma_A = problem.tma_A and not problem.gathered and block_m <= problem.M and not problem.wide
    tma_B = problem.tma_B and not problem.wide
    fp32 = problem.dtype == torch.float32
    tma_out = persistent and tma_A and tma_B and problem.tma_out and not fp32
    presets = _FP32 if fp32 else _TMA if tma_B else _POINTERS
    block_i, block_k, num_warps, num_stages = presets[block_m]
    block_i, block_k = block_for(problem.I, block_i), block_for(problem.H, block_k)
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages, "l2_groupings": [4]}
    if tma_A or tma_B:
        options["host_tensor_descriptors"] = True
    if persistent:
        options |= {"pid_type": "persistent_interleaved", "l2_groupings": [16]}
        if tma_A and tma_B and not fp32:
            options["range_flattens"] = [True, None]
        if tma_out:
            options["epilogue_subtile"] = 2
        blocks, tables = [block_i, block_k], 3
    else:
        blocks, tables = [block_m, block_i, offsets_block(problem.E), block_k], 1
    a, b, out = ("tensor_descriptor" if tma else "pointer" for tma in (tma_A, tma_B, tma_out))
    before = tables + problem.gathered
    outs = 3 if problem.keeps else 1
    indexing = [*["pointer"] * before, a, b, b, *["pointer"] * problem.biases, *[out] * outs]
    config = helion.Config(block_sizes=blocks, indexing=indexing, **options)
    return Choice(persistent, block_m, Access(tma_A, tma_B, tma_out), problem.wide, config)
