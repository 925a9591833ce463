"""The kernel and `Config` for a product that is ragged along the contraction, by rule."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_kernels.rules import Addressing, Choice, bounds_loads, fitting, indexing, offsets_block
from moe_kernels.rules.config import Config


@dataclass(frozen=True)
class Problem:
    """The properties that a choice may depend on."""

    M: int  # rounded down to a power of two
    P: int  # columns of X, rows of a result
    Q: int  # columns of Y and of a result
    G: int
    dtype: torch.dtype  # of the product: the operands' common type
    tf32: bool  # fp32 products may use tf32
    tma: bool  # X and Y can be read by TMA
    tma_out: bool  # the result has 16-bit elements and can be written by TMA
    int64_rows: bool  # addresses in X, Y or the offsets do not fit into 32 bits
    int64_out: bool  # addresses in one group's result do not fit into 32 bits


PERSISTENT_FROM_ROWS = 256  # mean rows per group for `wgrad_persistent`; see benchmarks/notes.md
PERSISTENT_BLOCK_M = 64
MOST_BELOW = 8  # the most row tiles that `wgrad_persistent` computes in a column before the next column
LARGE_FROM_ROWS = 1024


def rule(problem: Problem) -> Choice:
    """The choice for any problem; it compiles on every GPU."""
    rows = problem.M // problem.G
    tma = problem.tma and not problem.int64_out and problem.M >= 64 and problem.dtype != torch.float32
    # A persistent program stores a tile by TMA while it loads for the next one.
    tma_out = tma and problem.tma_out
    index = problem.int64_out or (problem.int64_rows and not tma)
    narrow = min(problem.P, problem.Q)
    whole = tma_out and problem.P % 128 == 0 and problem.Q % 256 == 0
    if whole and narrow > 128 and rows >= PERSISTENT_FROM_ROWS:
        by_tma = Addressing(True, True, True, index)
        return Choice("persistent", PERSISTENT_BLOCK_M, by_tma, persistent(problem.G, tma=True))
    # Tiles that hold whole rows or columns are small: many programs share an SM, and have many loads in flight. If 128
    # wide, they also divide the result of the largest group among more programs.
    thin = rows >= (128 if tma else 256) if narrow <= 64 else tma and 96 < narrow <= 128 and rows >= 256
    options = indexing(*bounds_loads(problem.G), tma, tma, tma_out)
    if problem.dtype == torch.float32:
        block_m, block_p, block_q, num_warps, num_stages = 32, 64, 64, 4, 3
    elif thin:
        block_m, num_stages = (64, 4) if tma else (128, 3)
        block_p, block_q = (128 if n == narrow else 64 for n in (problem.P, problem.Q))
        num_warps = 4
    elif not tma:
        block_m, block_p, block_q, num_warps, num_stages = 32, 64, 128, 4, 3
    elif not tma_out:
        block_m, block_p, block_q, num_warps, num_stages = 64, 128, 256, 8, 4
        if problem.Q < 256 <= problem.P:
            block_p, block_q = 256, 128
    elif rows >= LARGE_FROM_ROWS and problem.Q >= 256 and narrow > 128:
        block_m, block_p, block_q, num_warps, num_stages = 64, 128, 256, 8, 3
    else:  # two programs per SM: sums are short, and one program stores while the other multiplies
        block_m, block_p, block_q, num_warps, num_stages = 32, 128, 128, 4, 5
        options["num_sm_multiplier"] = 2
    if tma_out and not thin:
        options["pid_type"] = "persistent_interleaved"
    blocks = [fitting(block_q, problem.Q), fitting(block_p, problem.P)]
    config = Config(block_sizes=blocks, num_warps=num_warps, num_stages=num_stages, l2_groupings=[16], **options)
    return Choice("basic", block_m, Addressing(tma, tma, tma_out, index), config)


def persistent(G: int, tma: bool) -> Config:
    """The config of `wgrad_persistent`."""
    options = indexing(*[False] * 4, tma, tma, tma, tma, False, False)
    return Config(block_sizes=[offsets_block(G)], num_warps=8, num_stages=4, pid_type="flat", **options)
