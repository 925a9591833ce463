"""The grouped GEMM with a program per tile, in the order of the groups, and tiles of up to 192 rows.

Where reading the weights takes most of the time, a weight should be read once. Persistent programs drift apart, and
then the tiles of a group read it at different times. Here, as in `jagged`, programs start in the order of the tiles.
And a group's last rows, if at most 64, are part of the tile before, which multiplies 128 and 64 rows by each block of
the weight. So a group of up to 192 rows has one tile in each column.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import helion.language as hl
import torch
from torch import Tensor

from moe_kernels import rules
from moe_kernels.kernels.declare import kernel
from moe_kernels.kernels.grouped_gemm_tails import add_bias, load_rows, load_weight, store_columns
from moe_kernels.kernels.inline import int32
from moe_kernels.kernels.tiles import MERGED, listed, max_num_tiles, place, plan_table
from moe_kernels.rules import grouped as grouped_rules
from moe_kernels.rules.config import Config
from moe_kernels.runtime.plan import Builder
from moe_kernels.runtime.symbolic import SymbolicTensor


def _preset(A: Tensor, B: Any, tiles: Any, bias: Tensor | None, *_: Any) -> Config:
    return grouped_rules.tall(A.size(1), bias is not None, rules.BY_POINTERS)


@kernel(_preset, static_shapes=True)
def jagged_tall(
    A_packed: Tensor,  # [M, K]
    B: Tensor,  # [G, K, N]; [G, N, K] if `transposed`
    tiles: Tensor,  # [1 + max_tiles, 3] int32, from tile_table with MERGED
    bias: Tensor | None,  # [G, N]
    out: Tensor,  # [M, N]
    log2_group_m: int,  # group_m tiles of a column precede the next column
    programs: int,  # max_tiles * columns
    columns: hl.constexpr,  # the number of columns of tiles: cdiv(N, 256)
    shared: hl.constexpr,  # all groups have the same weight; B has a first extent of 1
    transposed: hl.constexpr,
    tma: hl.constexpr,  # A_packed and B are read by TMA
) -> Tensor:
    """Each program computes a tile: 128 x 256, or 192 x 256 as two products."""
    K = A_packed.size(1)
    N = B.size(1) if transposed else B.size(2)
    block_k = hl.register_block_size(16, 128)
    hl.pdl_wait()  # launched while tile_table still runs
    for tile_i in hl.tile(programs, block_size=1):
        row_tiles = tiles[0, 0]
        position = int32(tile_i.id, row_tiles)
        if position < row_tiles * columns:
            t, n = place(position, row_tiles, columns, int32(log2_group_m, row_tiles))
            group, row0, end = listed(tiles, 1 + t)
            matrix = group * (not shared)
            if end > row0 + 128:
                upper = hl.zeros([128, 256], dtype=torch.float32)
                lower = hl.zeros([64, 256], dtype=torch.float32)
                for tile_k in hl.tile(K, block_size=block_k):
                    a = load_rows(A_packed, row0, end, tile_k, 128, tma)
                    b = load_weight(B, matrix, n, N, tile_k, 256, transposed, tma)
                    upper = hl.dot(a, b, acc=upper)
                    lower = hl.dot(load_rows(A_packed, row0 + 128, end, tile_k, 64, tma), b, acc=lower)
                upper, lower = add_bias(upper, bias, group, n, N), add_bias(lower, bias, group, n, N)
                store_columns(out, row0, end, n, upper.to(out.dtype), False)
                store_columns(out, row0 + 128, end, n, lower.to(out.dtype), False)
            else:
                acc = hl.zeros([128, 256], dtype=torch.float32)
                for tile_k in hl.tile(K, block_size=block_k):
                    a = load_rows(A_packed, row0, end, tile_k, 128, tma)
                    acc = hl.dot(a, load_weight(B, matrix, n, N, tile_k, 256, transposed, tma), acc=acc)
                acc = add_bias(acc, bias, group, n, N)
                store_columns(out, row0, end, n, acc.to(out.dtype), False)
    return out


def multiply(
    builder: Builder,
    choice: rules.Choice,
    A_packed: SymbolicTensor,  # [M, K]
    B: SymbolicTensor,  # [G, K, N], or [1, K, N] for one weight that all groups share; [_, N, K] if problem.transposed
    group_offsets: SymbolicTensor,  # [G + 1]
    bias: SymbolicTensor | None,  # [G, N]
    out: SymbolicTensor,  # [M, N]
    problem: grouped_rules.Problem,
) -> None:
    """Write the product to `out` with `jagged_tall`."""
    (M, N), G, tma = out.shape, group_offsets.size(0) - 1, choice.addressing.tma_A
    tiles = plan_table(builder, group_offsets, out, choice.block_m, MERGED)
    columns = -(-N // grouped_rules.TAILS_WIDTH)
    numbers = grouped_rules.row_group(problem).bit_length() - 1, max_num_tiles(M, G, choice.block_m) * columns
    constants = (columns, B.size(0) == 1, problem.transposed, tma)
    arguments = (replace(A_packed, tma_clipped=tma), B, tiles, bias, out, *numbers, *constants)
    builder.launch(jagged_tall, arguments, choice.config, int64_index=choice.addressing.int64_index)
