"""Configs of fp8 products that are ragged along the contraction, and of the kernel that quantises their operands."""

from __future__ import annotations

from typing import Any

from moe_kernels.rules import block_for, bounds_loads, indexing
from moe_kernels.rules.config import Config
from moe_kernels.scaled import BLOCK

HALF = 64  # rows of half a tile of the result
PADDING = Config(block_sizes=[32], num_warps=4)  # of `pad_columns`


def columns(squares: bool) -> Config:
    """The config of `quantize_columns`, for blocks of 128 rows: 64 elements per thread."""
    width = BLOCK if squares else BLOCK // 2
    return Config(block_sizes=[width], num_warps=width // 16)


def product(Q: int, G: int, tma: bool, block_scaled: bool) -> Config:
    """The config of `scaled_wgrad` for results of Q columns, like those of promoted products in `rules.scaled`."""
    scales = [False] * 3
    first = scales if block_scaled else []
    options: dict[str, Any] = indexing(*bounds_loads(G), *first, tma, tma, tma, *scales, False, False)
    block_q, num_warps, num_stages = (128, 4, 3) if tma else (32, 8, 2)
    return Config(
        block_sizes=[block_for(Q, block_q)],
        num_warps=num_warps,
        num_stages=num_stages,
        pid_type="persistent_interleaved",
        num_sm_multiplier=2,
        l2_groupings=[4],
        **options,
    )
