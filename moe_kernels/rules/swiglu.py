"""The kernel and `Config` for the first half of an expert, by rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moe_kernels.rules import Access, Choice, addressing, basic_height, block_for, fitting, indexing, offsets_block
from moe_kernels.rules.config import Config


@dataclass(frozen=True)
class Problem(Access):
    """The properties that a choice may depend on."""

    rows: int  # mean rows per expert, rounded down to a power of two; 0 if less than 1
    M: int  # rounded down to a power of two
    I: int  # noqa: E741
    H: int
    E: int
    dtype: torch.dtype  # of the products: the operands' common type
    precision: str  # of products: see `rules.precision_of`
    gathered: bool  # rows are read through an index
    save_preact: bool  # the preactivations are written, too
    biases: int
    paired: bool  # the persistent kernel supports the weights
    slow_memory: bool = False  # as `Gpu.slow_memory`


PERSISTENT_FROM_ROWS = 64  # mean rows per expert, for the layouts that the persistent kernel supports
# block_m: (block_i, block_k, num_warps, num_stages); the first table is for 16-bit types read by TMA
_TMA = {16: (64, 128, 4, 4), 32: (64, 64, 4, 4), 64: (64, 64, 4, 4), 128: (128, 64, 8, 4)}
_POINTERS = {16: (32, 64, 4, 3), 32: (32, 64, 4, 3), 64: (32, 32, 4, 3)}
_FP32 = {16: (32, 32, 4, 3), 32: (32, 32, 4, 3), 64: (32, 16, 8, 2)}
_TF32X3 = (64, 32, 8, 3)  # whatever block_m


def rule(problem: Problem) -> Choice:
    """The choice for any problem; it compiles on every GPU."""
    return persistent(problem) if problem.paired and problem.rows >= _persistent_from_rows(problem) else basic(problem)


def separate_from_rows(precision: str) -> int:
    """The mean rows per expert from which layouts that the persistent kernel does not support are multiplied by
    `grouped_gemm`, before an activation kernel.
    """
    return 32 if precision == "tf32x3" else 128


def _persistent_from_rows(problem: Problem) -> int:
    """The mean rows per expert from which the persistent kernel is faster; see benchmarks/notes.md."""
    # The programs of the basic kernel start in the order of its tiles, so those that share a weight read it together.
    large = problem.E > 8 and 2 * problem.E * problem.H * problem.I * problem.dtype.itemsize > 1 << 30
    int64 = problem.int64_A or problem.int64_out  # then the basic kernel reads everything by pointers
    return 256 if problem.slow_memory and large and not int64 else PERSISTENT_FROM_ROWS


def basic(problem: Problem) -> Choice:
    """The rule's config of `swiglu`."""
    tall = problem.paired and problem.rows >= PERSISTENT_FROM_ROWS  # only with slow memory: see `_persistent_from_rows`
    block_m = 128 if tall else min(basic_height(problem.rows), 64)
    by_tma = addressing(problem, problem.tma_A and block_m <= problem.M, problem.tma_B, False)
    tma_A, tma_B, *_ = by_tma
    presets = _FP32 if problem.dtype == torch.float32 else _TMA if tma_B else _POINTERS
    block_i, block_k, num_warps, num_stages = _TF32X3 if problem.precision == "tf32x3" else presets[block_m]
    block_i, block_k = fitting(block_i, problem.I), fitting(block_k, problem.H)
    blocks = [block_m, block_i, offsets_block(problem.E), block_k]
    before, after = [False] * (1 + problem.gathered), [False] * (problem.biases + _results(problem))
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages, "l2_groupings": [8 if tall else 4]}
    options |= indexing(*before, tma_A, tma_B, tma_B, *after)
    config = Config(block_sizes=blocks, **options)
    return Choice("basic", block_m, by_tma, config, block_i)


def persistent(problem: Problem) -> Choice:
    """The rule's config of `swiglu_persistent`."""
    block_m, block_i, block_k = 128, block_for(problem.I, 128), block_for(problem.H, 64)
    tma_A, tma_B = problem.tma_A and block_m <= problem.M, problem.tma_B
    by_tma = addressing(problem, tma_A, tma_B, problem.tma_out and tma_B)
    tma_A, tma_B, tma_out, _ = by_tma
    tables, biases, stores = [False] * (3 + problem.gathered), [False] * problem.biases, [tma_out] * _results(problem)
    options = indexing(*tables, tma_A, tma_B, *biases, *stores)
    if tma_B:
        options["range_flattens"] = [True, None]
    config = Config(
        block_sizes=[block_k], pid_type="persistent_interleaved", l2_groupings=[8], num_warps=8, num_stages=4, **options
    )
    return Choice("persistent", block_m, by_tma, config, block_i)


def _results(problem: Problem) -> int:
    return 3 if problem.save_preact else 1
