"""Which kernel and which `helion.Config` a problem gets: so far a rule, written down from measurements on an H200."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import helion
import torch


@dataclass(frozen=True)
class Problem:
    """What a choice may depend on. Everything but `rows` is fixed for a layer; `rows` comes in powers of two."""

    rows: int  # mean rows per group, rounded down to a power of two; 0 if less than 1
    M: int  # rounded down to a power of two
    N: int
    K: int
    G: int
    dtype: torch.dtype  # of the product: the operands' common type
    tf32: bool  # fp32 products may use tf32
    tma_A: bool  # A_packed can be read by TMA
    tma_B: bool
    has_bias: bool


@dataclass(frozen=True)
class Choice:
    """`variant` is "basic" or "persistent"; `mask_rows` and `block_m` are the kernels' arguments of these names."""

    variant: str
    block_m: int
    mask_rows: bool
    config: helion.Config


# (block_n, block_k, num_warps, num_stages, l2_grouping), for a block_m; 16-bit types
_BASIC = {16: (128, 128, 4, 4, 4), 32: (128, 128, 4, 3, 4), 64: (128, 64, 4, 4, 4), 128: (256, 64, 8, 3, 4)}
_PERSISTENT = {64: (256, 32, 4, 4, 8), 128: (256, 64, 8, 4, 8)}
_POINTERS = {16: (64, 64, 4, 3, 4), 32: (64, 64, 4, 3, 4), 64: (128, 32, 4, 3, 4), 128: (128, 32, 8, 3, 4)}
_TF32 = {16: (64, 32, 4, 3, 4), 32: (64, 32, 4, 3, 4), 64: (64, 32, 4, 3, 4), 128: (128, 32, 8, 3, 4)}
_IEEE = {16: (64, 32, 4, 3, 4), 32: (64, 32, 4, 3, 4), 64: (64, 32, 4, 3, 4), 128: (64, 32, 8, 3, 4)}

PERSISTENT_FROM_ROWS = 64
MAX_BLOCK_G = 1024  # offsets that a program looks at together


def choose(problem: Problem, variant: str = "auto") -> Choice:
    """The kernel and config for `problem`; `variant` "basic" or "persistent" leaves only the config to choose."""
    if variant == "auto":
        variant = "persistent" if problem.rows >= PERSISTENT_FROM_ROWS else "basic"
    return _basic(problem) if variant == "basic" else persistent(problem)


def _basic(problem: Problem) -> Choice:
    block_m = next(m for m in (16, 32, 64, 128) if m >= min(problem.rows, 128))
    mask_rows = block_m > problem.M
    block_n, block_k, tma_a, tma_b, options = _blocks(problem, _BASIC, block_m, mask_rows)
    block_g = min(_power_of_2_from(problem.G + 1), MAX_BLOCK_G)
    indexing = ["pointer", tma_a, tma_b, *["pointer"] * (1 + problem.has_bias)]
    config = helion.Config(block_sizes=[block_m, block_n, block_g, block_k], **_with_indexing(indexing), **options)
    return Choice("basic", block_m, mask_rows, config)


def persistent(problem: Problem, block_m: int = 128) -> Choice:
    """As `choose` for the persistent kernel, for a `block_m` that the caller may already have settled."""
    mask_rows = block_m > problem.M
    block_n, block_k, tma_a, tma_b, options = _blocks(problem, _PERSISTENT, block_m, mask_rows)
    indexing = [*["pointer"] * 4, tma_a, tma_b, *["pointer"] * (1 + problem.has_bias)]
    if tma_a == tma_b == "tensor_descriptor":
        options["range_flattens"] = [True, None]  # overlaps one tile's stores with the next one's loads
    config = helion.Config(
        block_sizes=[block_n, block_k],
        pid_type="persistent_interleaved",
        num_sm_multiplier=2 if options["num_warps"] == 4 else 1,
        **_with_indexing(indexing),
        **options,
    )
    return Choice("persistent", block_m, mask_rows, config)


def _blocks(
    problem: Problem, presets: dict[int, tuple[int, ...]], block_m: int, mask_rows: bool
) -> tuple[int, int, str, str, dict[str, Any]]:
    if problem.dtype == torch.float32:
        presets = _TF32 if problem.tf32 else _IEEE
    elif not (problem.tma_B and min(problem.N, problem.K) >= 16):
        presets = _POINTERS
    block_n, block_k, num_warps, num_stages, l2_grouping = presets[block_m]
    # A descriptor's block may not exceed its tensor; a dot needs 16 of each.
    block_n, block_k = min(block_n, _power_of_2_to(problem.N)), min(block_k, _power_of_2_to(problem.K))
    tma_a = problem.tma_A and not mask_rows and problem.K >= 16
    tma_b = problem.tma_B and min(problem.N, problem.K) >= 16
    options = {"num_warps": num_warps, "num_stages": num_stages, "l2_groupings": [l2_grouping]}
    names = ("pointer", "tensor_descriptor")
    return block_n, block_k, names[tma_a], names[tma_b], options


def _with_indexing(indexing: list[str]) -> dict[str, Any]:
    if "tensor_descriptor" in indexing:
        return {"indexing": indexing, "host_tensor_descriptors": True}
    return {"indexing": indexing}


def _power_of_2_to(n: int) -> int:
    return max(16, 1 << (n.bit_length() - 1)) if n else 16


def _power_of_2_from(n: int) -> int:
    return 1 << (n - 1).bit_length()


def tile_table(G: int, N: int) -> helion.Config:
    """The config of the kernel that lists the persistent kernel's tiles."""
    return helion.Config(
        block_sizes=[min(_power_of_2_from(G + 1), MAX_BLOCK_G), min(_power_of_2_to(N), 64)], num_warps=4
    )
