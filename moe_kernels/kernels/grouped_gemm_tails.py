"""The persistent grouped GEMM with tiles of two sizes: whole tiles, 128 x 256, and tails, which are smaller.

A group's last tile is half empty on average, but takes as long as a full one. Here, a last tile of at most 64 rows may
be a tail, a tile of 64 rows. It is one where that saves more than it costs: if the group has many rows, or no other
tile. The list of tiles is built on the device, so one plan serves every routing of the same number of rows.

If groups have so many rows that this saves little, and N exceeds a multiple of 256 by 64 or 128, the tails are instead
the tiles of a last, `narrow` column of that width, with 128 rows each. For N = 2880, 12 columns of 256 would compute 7%
more than N.

A loop over tiles is flattened only if all have the same size, so each program has two loops, and some programs
compute tails while the others compute whole tiles. Both go through the groups in order at the same pace, so a group's
weights are in the L2 cache when its tail is computed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import helion.language as hl
import torch
from torch import Tensor

from moe_kernels import rules
from moe_kernels.kernels.declare import kernel
from moe_kernels.kernels.inline import decode_odd, divide, int32, unmasked
from moe_kernels.kernels.tiles import NO_TAILS, place, plan_table, shares, windows
from moe_kernels.rules.config import Config
from moe_kernels.runtime.plan import Builder
from moe_kernels.runtime.symbolic import SymbolicTensor


def _preset(
    A: Tensor, B: Any, tiles: Any, bias: Any, tails_out: Any, out: Tensor, cost: Any, log2: Any, *constants: Any
) -> Config:
    by_pointers = rules.Addressing(False, False, False, int64_index=False)
    _, narrow, *_ = constants
    return rules.tails(out.size(1), A.size(1), bias is not None, by_pointers, narrow)


@kernel(_preset, static_shapes=True)
def jagged_tails(
    A_packed: Tensor,  # [M, K]
    B: Tensor,  # [G, K, N]; [G, N, K] if `transposed`
    tiles: Tensor,  # [1 + max_tiles, 3] int32, from tile_table with tails
    bias: Tensor | None,  # [G, N]
    tails_out: Tensor,  # [M, N], or its `_windows` of a tail's height if `tma`
    out: Tensor,  # the same memory, in windows of 128 rows, without a narrow column, if `tma`
    odd_tail_cost: int,  # 2 * tail_cost + 1: the time of a tail, in 64ths of a whole tile's
    odd_log2_group_m: int,  # 2 * log2(group_m) + 1; group_m whole tiles of a column precede the next column
    columns: hl.constexpr,  # the number of columns of tiles: cdiv(N - narrow, 256)
    narrow: hl.constexpr,  # the width of the narrow column, 64 or 128; 0 if tails have 64 rows
    shared: hl.constexpr,  # all groups have the same weight; B has a first extent of 1
    transposed: hl.constexpr,
    tma: hl.constexpr,  # A_packed, B and out are accessed by TMA, which clips to a tensor or window
    pieces: hl.constexpr,  # number of stores per 256 columns: 2 or 4
    workers: hl.constexpr,
) -> Tensor:
    """Each worker walks its share of the tails (none for most workers), and then its share of the whole tiles."""
    K = A_packed.size(1)
    N = B.size(1) if transposed else B.size(2)
    tail_height, tail_width = (128, narrow) if narrow else (64, 256)
    block_k = hl.register_block_size(16, 128)
    tail_k = hl.register_block_size(16, 128)  # of a narrow column
    hl.pdl_wait()  # launched while tile_table still runs
    for tile_w in hl.tile(workers, block_size=1):
        row_tiles = tiles[0, 0]
        log2_group_m = decode_odd(odd_log2_group_m, row_tiles)
        tail_cost = decode_odd(odd_tail_cost, row_tiles)
        tails = row_tiles if narrow else tiles[0, 1] * columns
        share = shares(row_tiles * columns, tails, tile_w.id, workers, tail_cost)
        num_tails, first_tail, s, num_whole, num_early, first, others, first_late = share
        for tile_i in hl.tile(num_tails, block_size=1):
            position = first_tail + int32(tile_i.id, s) * s
            listed, n = _place_of_tail(position, row_tiles, columns, narrow)
            group = tiles[listed, 0].to(torch.int64)
            row0 = tiles[listed, 1]
            end = tiles[listed, 2]
            matrix = group * (not shared)
            acc = hl.zeros([tail_height, tail_width], dtype=torch.float32)
            for tile_k in hl.tile(K, block_size=tail_k if narrow else block_k):
                a = load_rows(A_packed, row0, end, tile_k, tail_height, tma)
                acc = hl.dot(a, load_weight(B, matrix, n, N, tile_k, tail_width, transposed, tma), acc=acc)
            if bias is not None:
                acc = acc + load_bias(bias, group, n, N, tail_width)
            _store(tails_out, row0, end, n, acc.to(out.dtype), 1 if narrow else pieces, tma)

        for tile_j in hl.tile(num_whole, block_size=1):
            j = int32(tile_j.id, s)
            position = torch.where(j < num_early, first + j * others, first_late + (j - num_early) * workers)
            t, n = place(position, row_tiles, columns, log2_group_m)
            group = tiles[1 + t, 0].to(torch.int64)
            row0 = tiles[1 + t, 1]
            end = tiles[1 + t, 2]
            matrix = group * (not shared)
            acc = hl.zeros([128, 256], dtype=torch.float32)
            for tile_k in hl.tile(K, block_size=block_k):
                a = load_rows(A_packed, row0, end, tile_k, 128, tma)
                acc = hl.dot(a, load_weight(B, matrix, n, N, tile_k, 256, transposed, tma), acc=acc)
            if bias is not None:
                acc = acc + load_bias(bias, group, n, N, 256)
            _store(out, row0, end, n, acc.to(out.dtype), pieces, tma)
    return out


def _place_of_tail(position: Tensor, row_tiles: Tensor, columns: int, narrow: int) -> tuple[Tensor, Tensor]:
    """Return the row of the table, and the column, of the tail at `position`."""
    if narrow:
        return 1 + position, position * 0 + columns
    t = divide(position, columns)
    return 1 + row_tiles + t, position - t * columns


def load_rows(A_packed: Tensor, row0: Tensor, end: Tensor, tile_k: Any, block_m: int, tma: bool) -> Tensor:
    """Return rows of A_packed, `[block_m, block_k]`. TMA may read rows of the next group, which are not stored."""
    if tma:
        return unmasked(hl.load(A_packed, [row0 + hl.arange(block_m), tile_k]))
    rows = row0.to(torch.int64) + hl.arange(block_m)
    return hl.load(A_packed, [rows, tile_k], extra_mask=(rows < end).unsqueeze(1))


def load_weight(
    B: Tensor, index: Tensor, n: Tensor, N: int, tile_k: Any, width: int, transposed: bool, tma: bool
) -> Tensor:
    """Return `width` columns of a weight, from n * 256 on: `[block_k, width]`. TMA returns zeros past the last one."""
    columns = n * 256 + hl.arange(width)
    if tma:
        if transposed:
            return unmasked(hl.load(B, [index, columns, tile_k])).T
        return unmasked(hl.load(B, [index, tile_k, columns]))
    inside = columns < N
    if transposed:
        return hl.load(B, [index, columns, tile_k], extra_mask=inside.unsqueeze(1)).T
    return hl.load(B, [index, tile_k, columns], extra_mask=inside.unsqueeze(0))


def load_bias(bias: Tensor, group: Tensor, n: Tensor, N: int, width: int) -> Tensor:
    """Return `width` biases of a group, from n * 256 on: `[1, width]`."""
    columns = n * 256 + hl.arange(width)
    return hl.load(bias, [group, columns], extra_mask=columns < N).to(torch.float32).unsqueeze(0)


def _store(out: Tensor, row0: Tensor, end: Tensor, n: Tensor, tile: Tensor, pieces: int, tma: bool) -> None:
    """Store rows row0 to `end`, columns from n * 256 on, in pieces to leave shared memory for four stages of loads."""
    if pieces == 1:
        store_columns(out, row0, end, n * (256 // tile.size(1)), tile, tma)
        return
    left, right = _halves(tile)
    if pieces == 2:
        store_columns(out, row0, end, 2 * n, left, tma)
        store_columns(out, row0, end, 2 * n + 1, right, tma)
    else:
        first, second = _halves(left)
        third, fourth = _halves(right)
        store_columns(out, row0, end, 4 * n, first, tma)
        store_columns(out, row0, end, 4 * n + 1, second, tma)
        store_columns(out, row0, end, 4 * n + 2, third, tma)
        store_columns(out, row0, end, 4 * n + 3, fourth, tma)


def _halves(tile: Tensor) -> tuple[Tensor, Tensor]:
    height, width = tile.shape
    return hl.split(tile.reshape(height, 2, width // 2).permute(0, 2, 1))


def store_columns(out: Tensor, row0: Tensor, end: Tensor, n: Tensor, tile: Tensor, tma: bool) -> None:
    """Store the n-th block of columns, as wide as `tile`, in rows row0 to `end`. TMA drops columns past the last."""
    height, width = tile.shape
    if tma:
        hl.store(out, [row0 + height - end + hl.arange(height), end, n, slice(None)], tile)
    else:
        rows = row0.to(torch.int64) + hl.arange(height)
        columns = n * width + hl.arange(width)
        inside = (rows < end).unsqueeze(1) & (columns < out.size(1)).unsqueeze(0)
        hl.store(out, [rows.unsqueeze(1), columns.unsqueeze(0)], tile, extra_mask=inside)


def multiply(
    builder: Builder,
    choice: rules.Choice,
    A_packed: SymbolicTensor,  # [M, K]
    B: SymbolicTensor,  # [G, K, N], or [1, K, N] for one weight that all groups share; [_, N, K] if problem.transposed
    group_offsets: SymbolicTensor,  # [G + 1]
    bias: SymbolicTensor | None,  # [G, N]
    out: SymbolicTensor,  # [M, N], N a multiple of 64
    problem: rules.Problem,
) -> None:
    """Write the product to `out` with `jagged_tails`."""
    tma, narrow = choice.addressing.tma_out, rules.narrow_column(problem)
    columns = -(-(out.size(1) - narrow) // rules.TAILS_WIDTH)
    pieces = rules.tail_pieces(out.size(1), narrow)[1]
    tiles = plan_table(builder, group_offsets, out, rules.TAILS_HEIGHT, NO_TAILS if narrow else rules.UNSPLIT)
    outs, shared = (out, out), B.size(0) == 1
    if tma:
        A_packed = replace(A_packed, tma_clipped=True)
        whole = out.as_strided((out.size(0), out.size(1) - narrow), out.strides, 0)
        of_tails = (128, narrow) if narrow else (64, 256 // pieces)
        outs = _windows(out, *of_tails), _windows(whole, 128, 256 // pieces)
    numbers = 2 * rules.tail_cost(problem) + 1, 2 * (rules.row_group(problem).bit_length() - 1) + 1
    constants = (columns, narrow, shared, problem.transposed, tma, pieces, builder.gpu.multiprocessors)
    arguments = (A_packed, B, tiles, bias, *outs, *numbers, *constants)
    builder.launch(jagged_tails, arguments, choice.config, int64_index=choice.addressing.int64_index, tf32=problem.tf32)


def _windows(out: SymbolicTensor, height: int, width: int) -> SymbolicTensor:
    """Return `windows` of `height` rows as `[height, M + 1, N / width, width]`."""
    return windows(out, height).transpose(1, 2).unflatten(2, (out.size(1) // width, width))
