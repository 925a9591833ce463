"""The choice for a uniform grouped GEMM: a tuned entry for this GPU (see `tuning.entries`), or the rule.

The rule was derived from measurements on an H200, where cuBLAS is faster unless the output is narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moe_kernels import rules
from moe_kernels.rules.config import Config
from moe_kernels.runtime.symbolic import INT32_MAX
from moe_kernels.runtime.targets import Gpu
from moe_kernels.tuning import entries


@dataclass(frozen=True)
class Problem(rules.Access):
    """The properties that a choice may depend on."""

    G: int
    M: int
    N: int
    K: int
    dtype: torch.dtype  # of the product: the operands' common type
    out_dtype: torch.dtype
    tf32: bool  # fp32 products may use tf32
    bmm: bool  # torch.bmm gives this result, and copies no operand
    flat: bool  # the groups of each tensor are stacked without gaps, as one matrix
    a_columns: bool  # A is stored as [G, K, M]
    b_columns: bool  # B is stored as [G, N, K]
    gpu: Gpu | None = None  # None leaves the choice to the rule


BMM = rules.Choice("bmm", 0, rules.BY_POINTERS, Config())
THIN = 64  # columns up to which the kernels here are faster than cuBLAS
_SMS = 132


def choose(problem: Problem) -> rules.Choice:
    """How `problem` is computed."""
    return rules.chosen(problem, None if problem.a_columns else bucket_of(problem), adapted, rule)


def rule(problem: Problem) -> rules.Choice:
    """The choice without tuned entries; it works on every GPU."""
    thin = problem.N <= THIN and problem.tma_A and problem.tma_B and problem.dtype != torch.float32
    # Tiles have at least 16 columns. If N is less, the waste matters once there is more than one tile per SM.
    wasteful = problem.N < 16 and problem.G * -(-problem.M // 64) > _SMS
    return BMM if problem.bmm and (wasteful or not thin) else by_kernel(problem)


def by_kernel(problem: Problem) -> rules.Choice:
    """The rule's choice between the kernels of this package, without torch.bmm."""
    block_m, block_n, block_k, num_warps, num_stages = _blocks(problem)
    order: dict[str, Any] = {"loop_orders": [[2, 1, 0]]} if problem.N <= THIN else {}
    return make(problem, [block_m, block_n, block_k], num_warps=num_warps, num_stages=num_stages, **order)


def make(problem: Problem, block_sizes: Sequence[int], variant: str | None = None, /, **options: Any) -> rules.Choice:
    """The choice with these blocks and options: `variant`, or by default the folded one if that is possible.

    Tensors are accessed by TMA if they allow it.
    """
    addressing = rules.addressing(problem, problem.tma_A, problem.tma_B, problem.tma_out)
    extents = (problem.M, problem.N, problem.K)
    block_m, block_n, block_k = (rules.fitting(block, size) for block, size in zip(block_sizes, extents, strict=True))
    config = Config(block_sizes=[block_m, block_n, block_k], **(options | rules.indexing(*addressing[:3])))
    variant = variant or ("folded" if foldable(problem, block_m, block_k) else "batched")
    return rules.Choice(variant, block_m, addressing, config)


def foldable(problem: Problem, block_m: int, block_k: int) -> bool:
    """Whether the groups are stored as one matrix that TMA can read, of which no such tile spans two groups. TMA counts
    rows in int32.
    """
    whole = problem.M % block_m == 0 and problem.K % block_k == 0
    rows = problem.G * max(problem.M, problem.N, problem.K)  # of A, B or the result
    return problem.flat and problem.tma_A and problem.tma_B and whole and rows <= INT32_MAX


def _blocks(problem: Problem) -> tuple[int, int, int, int, int]:
    """(block_m, block_n, block_k, num_warps, num_stages)"""
    if problem.dtype == torch.float32:
        return (64, 64, 32, 8, 3)
    if not (problem.tma_A and problem.tma_B):
        return (64, 64, 64, 4, 3)
    if problem.M > 64 and problem.N > THIN:
        return (128, 512 // problem.out_dtype.itemsize, 64, 8, 3)
    # One program per SM has all of its loads in flight at once. With more tiles than SMs, two programs share an SM.
    block_m, block_n, block_k = 64, rules.fitting(64, problem.N), rules.fitting(128, problem.K)
    tiles = problem.G * -(-problem.M // block_m) * -(-problem.N // block_n)
    shared = rules.SHARED_MEMORY // (1 if tiles <= _SMS else 2) - block_m * block_n * problem.out_dtype.itemsize
    stage = (block_m + block_n) * block_k * problem.dtype.itemsize
    return (block_m, block_n, block_k, 4, min(5, shared // stage))


def bucket_of(problem: Problem) -> entries.Bucket:
    """The key of `problem` among tuned entries."""
    dtype = entries.dtype_label(problem.dtype, problem.tf32, problem.out_dtype)
    return entries.Bucket(dtype, problem.b_columns, problem.M, problem.N, problem.K, problem.G, op="uniform")


def adapted(entry: entries.Entry, problem: Problem) -> rules.Choice | None:
    """The choice of an entry, None if it cannot be used for `problem`."""
    if entry.kernel == "bmm":
        return BMM if problem.bmm else None
    options = dict(entry.config)
    blocks = options.pop("block_sizes", None)
    if not rules.are_blocks(blocks) or entry.kernel not in ("folded", "batched"):
        return None
    made = make(problem, blocks, entry.kernel, **options)
    sizes: Any = made.config.config["block_sizes"]
    if entry.kernel == "folded" and not foldable(problem, sizes[0], sizes[2]):
        return None
    return made if entry.tma == made.addressing.tma else None
