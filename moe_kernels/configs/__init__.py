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
    wide: bool  # addresses do not fit into 32 bits
    has_bias: bool


@dataclass(frozen=True)
class Choice:
    """`variant` is "basic" or "persistent"; `mask_rows` and `block_m` are the kernels' arguments of these names."""

    variant: str
    block_m: int
    mask_rows: bool
    tma_A: bool  # A_packed is read by TMA
    tma_B: bool
    config: helion.Config


_Presets = dict[int, tuple[int, int, int, int, int]]
# block_m: (block_n, block_k, num_warps, num_stages, l2_grouping); the first two with TMA and for 16-bit types
_BASIC: _Presets = {16: (128, 128, 4, 4, 4), 32: (128, 64, 4, 4, 4), 64: (128, 64, 4, 4, 4), 128: (256, 64, 8, 4, 4)}
_PERSISTENT: _Presets = {128: (256, 64, 8, 4, 16)}
_POINTERS: _Presets = {16: (64, 64, 4, 3, 4), 32: (64, 64, 4, 3, 4), 64: (128, 32, 4, 3, 4), 128: (128, 32, 8, 3, 4)}
_TF32: _Presets = {16: (64, 32, 4, 3, 4), 32: (64, 32, 4, 3, 4), 64: (64, 32, 4, 3, 4), 128: (128, 32, 8, 3, 4)}
_IEEE: _Presets = {16: (64, 32, 4, 3, 4), 32: (64, 32, 4, 3, 4), 64: (64, 32, 4, 3, 4), 128: (64, 32, 8, 3, 4)}

PERSISTENT_FROM_ROWS = 128
MAX_BLOCK_G = 1024  # offsets that a program looks at together


def choose(problem: Problem, variant: str = "auto") -> Choice:
    """The kernel and config for `problem`; a `variant` that is given leaves only the config to choose."""
    if variant == "auto":
        variant = "persistent" if problem.rows >= PERSISTENT_FROM_ROWS else "basic"
    if variant == "persistent":
        block_m, presets = 128, _PERSISTENT
    else:
        # Half of a tile that is twice the mean is wasted; two tiles instead of one read the weight twice.
        block_m = next(block for rows, block in ((128, 128), (32, 64), (16, 32), (0, 16)) if problem.rows >= rows)
        presets = _BASIC
    mask_rows = block_m > problem.M
    # A descriptor may not have more than its tensor, nor less than 16 bytes.
    tma_A = problem.tma_A and not mask_rows and problem.K >= 16
    tma_B = problem.tma_B and min(problem.N, problem.K) >= 16
    if problem.dtype == torch.float32:
        presets = _TF32 if problem.tf32 else _IEEE
    elif not tma_B:
        presets = _POINTERS
    block_n, block_k, num_warps, num_stages, l2_grouping = presets[block_m]
    block_n, block_k = _block_for(problem.N, block_n), _block_for(problem.K, block_k)

    loads = ["tensor_descriptor" if tma else "pointer" for tma in (tma_A, tma_B)]
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages, "l2_groupings": [l2_grouping]}
    if tma_A or tma_B:
        options["host_tensor_descriptors"] = True
    # `indexing` goes by the order of the accesses in the kernel: tables, A_packed, B, bias, out.
    after = ["pointer"] * (1 + problem.has_bias)
    if variant == "persistent":
        options["pid_type"] = "persistent_interleaved"
        if tma_A and tma_B:
            options["range_flattens"] = [True, None]  # overlaps one tile's stores with the next one's loads
        blocks, indexing = [block_n, block_k], [*["pointer"] * 4, *loads, *after]
    else:
        blocks, indexing = [block_m, block_n, _offsets_block(problem.G), block_k], ["pointer", *loads, *after]
    config = helion.Config(block_sizes=blocks, indexing=indexing, **options)
    return Choice(variant, block_m, mask_rows, tma_A, tma_B, config)


def floor_power_of_2(n: int) -> int:
    """The largest power of two up to `n`; 0 for 0."""
    return 1 << (n.bit_length() - 1) if n else 0


def _block_for(n: int, most: int) -> int:
    """The block that a descriptor of `n` elements, or a mask, can have: a power of two from 16 to `most`."""
    return min(max(16, floor_power_of_2(n)), most)


def _offsets_block(G: int) -> int:
    return min(1 << G.bit_length(), MAX_BLOCK_G)  # at least G + 1


def tile_table(G: int, N: int) -> helion.Config:
    """The config of the kernel that lists the persistent kernel's tiles."""
    return helion.Config(block_sizes=[_offsets_block(G), _block_for(N, 64)], num_warps=1)
