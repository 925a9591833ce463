"""The config that a uniform grouped GEMM gets, by rule. Written down from measurements on an H200."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import helion
import torch


@dataclass(frozen=True)
class Problem:
    """What a choice may depend on."""

    G: int
    M: int
    N: int
    K: int
    dtype: torch.dtype  # of the product: the operands' common type
    out_dtype: torch.dtype
    tf32: bool  # fp32 products may use tf32
    tma_A: bool  # A can be read by TMA
    tma_B: bool
    tma_out: bool  # out can be written by TMA
    wide_A: bool  # A's addresses do not fit into 32 bits
    wide_B: bool
    wide_out: bool
    a_columns: bool  # A lies in memory as [G, K, M]
    b_columns: bool  # B lies in memory as [G, N, K]
    device: torch.device


@dataclass(frozen=True)
class Choice:
    """How the kernel is compiled."""

    tma_A: bool
    tma_B: bool
    tma_out: bool
    wide: bool  # addresses that pointers are used for do not fit into 32 bits
    config: helion.Config


def choose(problem: Problem) -> Choice:
    """The config for `problem`."""
    return rule(problem)


def rule(problem: Problem) -> Choice:
    """The choice where nothing has been tuned: it compiles everywhere."""
    block_m, block_n, block_k, num_warps, num_stages = _blocks(problem)
    return make(problem, [block_m, block_n, block_k], tma_out=True, num_warps=num_warps, num_stages=num_stages)


def make(problem: Problem, block_sizes: list[int], *, tma_out: bool, **options: Any) -> Choice:
    """The choice with these blocks and options; memory is accessed as the tensors allow."""
    tma_A, tma_B, tma_out = problem.tma_A, problem.tma_B, tma_out and problem.tma_out
    if tma_A or tma_B or tma_out:
        options["host_tensor_descriptors"] = True
    block_m, block_n, block_k = block_sizes
    return Choice(
        tma_A=tma_A,
        tma_B=tma_B,
        tma_out=tma_out,
        wide=(problem.wide_A and not tma_A) or (problem.wide_B and not tma_B) or (problem.wide_out and not tma_out),
        config=helion.Config(
            block_sizes=[_within(block_m, problem.M), _within(block_n, problem.N), _within(block_k, problem.K)],
            indexing=["tensor_descriptor" if tma else "pointer" for tma in (tma_A, tma_B, tma_out)],
            **options,
        ),
    )


def _within(block: int, extent: int) -> int:
    """`block` or less: a power of two from 16 on that a descriptor of `extent` elements can have."""
    return min(block, max(16, 1 << (extent.bit_length() - 1)))


def _blocks(problem: Problem) -> tuple[int, int, int, int, int]:
    """(block_m, block_n, block_k, num_warps, num_stages)"""
    if problem.dtype == torch.float32:
        return (64, 64, 32, 8, 3)
    if not (problem.tma_A and problem.tma_B):
        return (64, 64, 64, 4, 3)
    if problem.M <= 64 or problem.N <= 64:
        return (64, 64, 128, 4, 4)
    return (128, 256, 64, 8, 4)
