"""The kernel and `Config` for products of fp8 operands with scales, by rule."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from moe_kernels import rules
from moe_kernels.rules import grouped as grouped_rules
from moe_kernels.rules.config import Config

BLOCK_K = 128  # of block scales; also what the tensor cores accumulate before a sum leaves them
LEAST_BLOCK_K = 32  # the least that Triton supports for fp8
PERSISTENT_FROM_ROWS = 64
HEIGHT, WIDTH = 64, 128  # of the basic kernel's largest tiles


@dataclass(frozen=True)
class Problem(rules.Access):
    """The properties that a choice may depend on."""

    rows: int  # mean rows per group, rounded down to a power of two; 0 if less than 1
    M: int  # rounded down to a power of two
    N: int
    K: int
    G: int
    block_scaled: bool
    fast: bool  # sums stay in the tensor cores
    out_dtype: torch.dtype
    has_bias: bool
    multiprocessors: int = 0  # of the GPU; 0 if unknown


def rule(problem: Problem, variant: str = "auto") -> rules.Choice:
    """The choice for any problem."""
    if variant == "auto":
        many = problem.rows >= PERSISTENT_FROM_ROWS and problem.tma_A and problem.tma_B
        variant = "persistent" if many and not _at_once(problem) else "basic"
    if problem.K == 0:
        variant = "basic"
    return _persistent(problem) if variant == "persistent" else _basic(problem)


def _at_once(problem: Problem) -> bool:
    """Whether the basic kernel computes all tiles at once; a persistent kernel would have nothing to overlap."""
    tiles = grouped_rules.most_tiles(problem.M, problem.N, problem.G, HEIGHT, WIDTH)
    # Three programs share an SM. Block-scaled sums are added up faster by the persistent kernel, from some K on.
    if problem.block_scaled:
        return problem.K <= 1024 and tiles <= 2 * problem.multiprocessors
    return tiles <= 3 * problem.multiprocessors


def _basic(problem: Problem) -> rules.Choice:
    block_m = 16 if problem.rows < 16 else 32 if problem.rows < 32 else HEIGHT
    addressing = _addressing(problem, block_m, tma_out=False)
    if problem.tma_A and addressing.tma_B:
        num_warps, (block_n, num_stages) = 4, _width_and_stages(problem, block_m)
    else:  # pointers read odd strides byte by byte, which takes registers
        num_warps, block_n, num_stages = 8, 64, 2
    blocks = [block_m, rules.fitting(block_n, problem.N), rules.offsets_block(problem.G), _block_k(problem)]
    scales = [False] * 2
    options = rules.indexing(False, *addressing[:2], *scales, *[False] * problem.has_bias, False)
    config = Config(block_sizes=blocks, num_warps=num_warps, num_stages=num_stages, l2_groupings=[4], **options)
    return rules.Choice("basic", block_m, addressing, config)


def _width_and_stages(problem: Problem, block_m: int) -> tuple[int, int]:
    """The number of columns of a tile, and the stages of loads, with which the SMs have the most loads in flight."""
    # At most M groups have rows.
    tiles = grouped_rules.most_tiles(problem.M, problem.N, min(problem.G, problem.M), block_m, WIDTH)
    per_sm = tiles / problem.multiprocessors if problem.multiprocessors else math.inf
    if problem.rows < PERSISTENT_FROM_ROWS:
        return (WIDTH // 2, 4) if per_sm <= 2 else (WIDTH, 3)
    # The shared memory of an SM holds three programs with half the width in 4 stages, two with 4 and three with 3.
    if problem.block_scaled or per_sm > 2:
        return WIDTH, 3
    return (WIDTH // 2 if per_sm <= 1.5 else WIDTH), 4


def _persistent(problem: Problem) -> rules.Choice:
    block_m = 128
    addressing = _addressing(problem, block_m if problem.fast else block_m // 2, tma_out=problem.fast)
    by_tma = addressing.tma_A and addressing.tma_B
    bias, tables = [False] * problem.has_bias, [False] * 3
    a, b, out, _ = addressing
    if problem.fast:
        block_n, num_warps, num_stages = 256, 8, 4
        if not by_tma:
            block_n, num_stages = 32, 2
        elif problem.out_dtype == torch.float32:
            block_n = 128  # the result's tile shares the memory with the next tile's loads
        options = rules.persistent_options(8, addressing)
        options |= rules.indexing(*tables, a, b, False, False, *bias, out)
        blocks = [rules.fitting(block_n, problem.N), _block_k(problem)]
    else:
        block_n, num_warps, num_stages = (128, 4, 3) if by_tma else (32, 8, 2)
        options = {"pid_type": "persistent_interleaved", "l2_groupings": [8], "num_sm_multiplier": 2}
        scales = [False] * 3
        loads = [*scales, b, a, a, *scales] if problem.block_scaled else [b, a, a, *scales]
        options |= rules.indexing(*tables, *loads, *bias, False, False)
        blocks = [rules.fitting(block_n, problem.N)]
    config = Config(block_sizes=blocks, num_warps=num_warps, num_stages=num_stages, **options)
    return rules.Choice("persistent", block_m, addressing, config)


def _block_k(problem: Problem) -> int:
    if problem.block_scaled:
        return BLOCK_K
    return max(LEAST_BLOCK_K, rules.fitting(BLOCK_K, problem.K))


def _addressing(problem: Problem, block_m: int, tma_out: bool) -> rules.Addressing:
    # A descriptor's block may not have more rows than its tensor. Shorter rows were not timed by TMA.
    long = problem.K > 64
    tma_A, tma_B = problem.tma_A and long and block_m <= problem.M, problem.tma_B and long
    return rules.addressing(problem, tma_A, tma_B, tma_out and tma_A and tma_B and problem.tma_out)
