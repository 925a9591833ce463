"""The persistent grouped GEMM with whole tiles, 128 x 256, and smaller ones.

A group's last tile is half empty on average, but takes as long as a full one. Here, a last tile of at most 64 rows may
be a tail, a tile of 64 rows. It is one where that saves more than it costs: if the group has many rows, or no other
tile. The list of tiles is built on the device, so one plan serves every routing of the same number of rows.

If N exceeds a multiple of 256 by 64 or 128, and groups have many rows, the last column of tiles is a `narrow` one of
that width, with 128 rows each. For N = 2880, 12 columns of 256 would compute 7% more than N. Then only a group's only
tile may be a tail.

A loop over tiles is flattened only if all have the same size, so each program has a loop for each size, and some
programs compute tails or narrow tiles while the others compute whole tiles. All go through the groups in order at the
same pace, so a group's weights are in the L2 cache when its tail is computed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import helion.language as hl
import torch
from torch import Tensor

from moe_kernels import rules
from moe_kernels.kernels.declare import kernel
from moe_kernels.kernels.inline import divide, int32, unmasked
from moe_kernels.kernels.tiles import ALONE, listed, place, plan_table, shares, windows
from moe_kernels.rules import grouped as grouped_rules
from moe_kernels.rules.config import Config
from moe_kernels.runtime.plan import Builder
from moe_kernels.runtime.symbolic import SymbolicTensor


def _preset(*arguments: Any) -> Config:
    A, _, _, bias, _, _, out, _, _, _, narrow, *_ = arguments
    return grouped_rules.tails(out.size(1), A.size(1), bias is not None, rules.BY_POINTERS, narrow)


@kernel(_preset, static_shapes=True)
def jagged_tails(
    A_packed: Tensor,  # [M, K]
    B: Tensor,  # [G, K, N]; [G, N, K] if `transposed`
    tiles: Tensor,  # [1 + max_tiles, 3] int32, from tile_table with tails
    bias: Tensor | None,  # [G, N]
    narrow_out: Tensor | None,  # [M, N], or its `_windows` of a narrow tile if `tma`; None without a narrow column
    tails_out: Tensor,  # the same memory, in windows of a tail's height, without a narrow column, if `tma`
    out: Tensor,  # the same memory, in windows of 128 rows, without a narrow column, if `tma`
    tail_cost: int,  # the time of a tail, in 64ths of a whole tile's
    log2_group_m: int,  # group_m whole tiles of a column precede the next column
    columns: hl.constexpr,  # the number of columns of tiles: cdiv(N - narrow, 256)
    narrow: hl.constexpr,  # the width of the narrow column, 64 or 128; 0 if there is none
    narrow_cost: hl.constexpr,  # the time of one of its tiles, in 64ths of a whole tile's
    shared: hl.constexpr,  # all groups have the same weight; B has a first extent of 1
    transposed: hl.constexpr,
    tma: hl.constexpr,  # A_packed, B and out are accessed by TMA, which clips to a tensor or window
    pieces: hl.constexpr,  # number of stores per 256 columns: 2 or 4
    workers: hl.constexpr,
) -> Tensor:
    """Each worker walks its share of the tails and narrow tiles (none for most workers), then of the whole tiles."""
    K = A_packed.size(1)
    N = B.size(1) if transposed else B.size(2)
    block_k = hl.register_block_size(16, 128)
    narrow_k = hl.register_block_size(16, 128)
    hl.pdl_wait()  # launched while tile_table still runs
    for tile_w in hl.tile(workers, block_size=1):
        row_tiles = tiles[0, 0]
        tail_tiles = tiles[0, 1]
        cost, log2 = int32(tail_cost, row_tiles), int32(log2_group_m, row_tiles)
        narrow_tiles = row_tiles + tail_tiles if narrow else None
        of_tails, of_narrow, of_whole = shares(
            row_tiles * columns, tail_tiles * columns, tile_w.id, workers, cost, narrow_tiles, narrow_cost
        )
        num_tails, tail_workers = of_tails
        num_narrow, first_narrow, narrow_workers = of_narrow
        num_whole, num_early, first, others, first_late = of_whole
        for tile_i in hl.tile(num_tails, block_size=1):
            position = int32(tile_w.id, row_tiles) + int32(tile_i.id, row_tiles) * tail_workers
            t = divide(position, columns)
            n = position - t * columns
            group, row0, end = listed(tiles, 1 + row_tiles + t)
            matrix = group * (not shared)
            tail = hl.zeros([64, 256], dtype=torch.float32)
            for tile_k in hl.tile(K, block_size=block_k):
                tail_rows = load_rows(A_packed, row0, end, tile_k, 64, tma)
                tail = hl.dot(tail_rows, load_weight(B, matrix, n, N, tile_k, 256, transposed, tma), acc=tail)
            tail = add_bias(tail, bias, group, n, N)
            _store(tails_out, row0, end, n, tail.to(out.dtype), pieces, tma)

        if narrow_out is not None:
            for tile_c in hl.tile(num_narrow, block_size=1):
                t = 1 + first_narrow + int32(tile_c.id, row_tiles) * narrow_workers
                last = t * 0 + columns
                group, row0, end = listed(tiles, t)
                matrix = group * (not shared)
                sums = hl.zeros([128, narrow], dtype=torch.float32)
                for tile_c_k in hl.tile(K, block_size=narrow_k):
                    rows = load_rows(A_packed, row0, end, tile_c_k, 128, tma)
                    weight = load_weight(B, matrix, last, N, tile_c_k, narrow, transposed, tma)
                    sums = hl.dot(rows, weight, acc=sums)
                sums = add_bias(sums, bias, group, last, N)
                store_columns(narrow_out, row0, end, last * (256 // narrow), sums.to(out.dtype), tma)

        for tile_j in hl.tile(num_whole, block_size=1):
            j = int32(tile_j.id, row_tiles)
            position = torch.where(j < num_early, first + j * others, first_late + (j - num_early) * workers)
            t, n = place(position, row_tiles, columns, log2)
            group, row0, end = listed(tiles, 1 + t)
            matrix = group * (not shared)
            acc = hl.zeros([128, 256], dtype=torch.float32)
            for tile_k in hl.tile(K, block_size=block_k):
                a = load_rows(A_packed, row0, end, tile_k, 128, tma)
                acc = hl.dot(a, load_weight(B, matrix, n, N, tile_k, 256, transposed, tma), acc=acc)
            acc = add_bias(acc, bias, group, n, N)
            _store(out, row0, end, n, acc.to(out.dtype), pieces, tma)
    return out


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


def add_bias(tile: Tensor, bias: Tensor | None, group: Tensor, n: Tensor, N: int) -> Tensor:
    """Return a tile of columns from n * 256 on with the group's biases added, if there are any."""
    if bias is None:
        return tile
    columns = n * 256 + hl.arange(tile.size(1))
    return tile + hl.load(bias, [group, columns], extra_mask=columns < N).to(torch.float32).unsqueeze(0)


def _store(out: Tensor, row0: Tensor, end: Tensor, n: Tensor, tile: Tensor, pieces: int, tma: bool) -> None:
    """Store rows row0 to `end`, columns from n * 256 on, in pieces to leave shared memory for four stages of loads."""
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
    problem: grouped_rules.Problem,
) -> None:
    """Write the product to `out` with `jagged_tails`."""
    tma, narrow = choice.addressing.tma_out, grouped_rules.narrow_column(problem)
    columns = -(-(out.size(1) - narrow) // grouped_rules.TAILS_WIDTH)
    pieces = grouped_rules.tail_pieces(out.size(1), narrow)
    unsplit = ALONE if narrow else grouped_rules.UNSPLIT
    tiles = plan_table(builder, group_offsets, out, grouped_rules.TAILS_HEIGHT, unsplit)
    outs, shared = (out if narrow else None, out, out), B.size(0) == 1
    if tma:
        A_packed = replace(A_packed, tma_clipped=True)
        whole = out.as_strided((out.size(0), out.size(1) - narrow), out.strides, 0)
        of_narrow = _windows(out, 128, narrow) if narrow else None
        outs = of_narrow, _windows(whole, 64, 256 // pieces), _windows(whole, 128, 256 // pieces)
    numbers = grouped_rules.tail_cost(problem), grouped_rules.row_group(problem).bit_length() - 1
    of_columns = columns, narrow, grouped_rules.narrow_cost(narrow)
    constants = (*of_columns, shared, problem.transposed, tma, pieces, builder.gpu.multiprocessors)
    arguments = (A_packed, B, tiles, bias, *outs, *numbers, *constants)
    builder.launch(jagged_tails, arguments, choice.config, int64_index=choice.addressing.int64_index)


def _windows(out: SymbolicTensor, height: int, width: int) -> SymbolicTensor:
    """Return `windows` of `height` rows as `[height, M + 1, N / width, width]`."""
    return windows(out, height).transpose(1, 2).unflatten(2, (out.size(1) // width, width))
