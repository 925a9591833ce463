"""The persistent grouped GEMM with tiles of two heights, 128 and 64 rows, chosen by the number of rows of each group.

A group's last tile is half empty on average, but takes as long as a full one. Here, a last tile of at most 64 rows may
be a tail, a tile of 64 rows. It is one where that saves more than it costs: if the group has many rows, or no other
tile. The list of tiles is built on the device, so one plan serves every routing of the same number of rows.

A loop over tiles is flattened only if all have the same height, so each program has two loops, and some programs
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
from moe_kernels.kernels.tiles import place, plan_table, shares, windows
from moe_kernels.rules.config import Config
from moe_kernels.runtime.plan import Builder
from moe_kernels.runtime.symbolic import SymbolicTensor


def _preset(A_packed: Tensor, B: Tensor, tiles: Tensor, bias: Any, tails_out: Tensor, out: Tensor, *_: Any) -> Config:
    by_pointers = rules.Addressing(False, False, False, int64_index=False)
    return rules.tails(out.size(1), A_packed.size(1), bias is not None, by_pointers)


@kernel(_preset, static_shapes=True)
def jagged_tails(
    A_packed: Tensor,  # [M, K]
    B: Tensor,  # [G, K, N]; [G, N, K] if `transposed`
    tiles: Tensor,  # [1 + max_tiles, 3] int32, from tile_table with tails
    bias: Tensor | None,  # [G, N]
    tails_out: Tensor,  # [M, N], or its `_windows` of 64 rows if `tma`
    out: Tensor,  # the same memory, in windows of 128 rows if `tma`
    odd_tail_cost: int,  # 2 * tail_cost + 1: the time of a tail, in 64ths of a whole tile's
    odd_log2_group_m: int,  # 2 * log2(group_m) + 1; group_m whole tiles of a column precede the next column
    columns: hl.constexpr,  # the number of column tiles: cdiv(N, 256)
    shared: hl.constexpr,  # all groups have the same weight; B has a first extent of 1
    transposed: hl.constexpr,
    tma: hl.constexpr,  # A_packed, B and out are accessed by TMA, which clips to a tensor or window
    pieces: hl.constexpr,  # number of stores per tile: 2 or 4
    workers: hl.constexpr,
) -> Tensor:
    """Each worker walks its share of the tails (none for most workers), and then its share of the whole tiles."""
    K = A_packed.size(1)
    N = B.size(1) if transposed else B.size(2)
    block_k = hl.register_block_size(16, 128)
    hl.pdl_wait()  # launched while tile_table still runs
    for tile_w in hl.tile(workers, block_size=1):
        row_tiles = tiles[0, 0]
        log2_group_m = decode_odd(odd_log2_group_m, row_tiles)
        tail_cost = decode_odd(odd_tail_cost, row_tiles)
        share = shares(row_tiles * columns, tiles[0, 1] * columns, tile_w.id, workers, tail_cost)
        num_tails, first_tail, s, num_whole, num_early, first, others, first_late = share
        for tile_i in hl.tile(num_tails, block_size=1):
            position = first_tail + int32(tile_i.id, s) * s
            t = divide(position, columns)
            n = position - t * columns
            listed = 1 + row_tiles + t
            group = tiles[listed, 0].to(torch.int64)
            row0 = tiles[listed, 1]
            end = tiles[listed, 2]
            matrix = group * (not shared)
            acc = hl.zeros([64, 256], dtype=torch.float32)
            for tile_k in hl.tile(K, block_size=block_k):
                a = _rows(A_packed, row0, end, tile_k, 64, tma)
                acc = hl.dot(a, _weight(B, matrix, n, N, tile_k, transposed, tma), acc=acc)
            if bias is not None:
                acc = acc + _bias(bias, group, n, N)
            _store(tails_out, row0, end, n, acc.to(out.dtype), pieces, tma)

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
                a = _rows(A_packed, row0, end, tile_k, 128, tma)
                acc = hl.dot(a, _weight(B, matrix, n, N, tile_k, transposed, tma), acc=acc)
            if bias is not None:
                acc = acc + _bias(bias, group, n, N)
            _store(out, row0, end, n, acc.to(out.dtype), pieces, tma)
    return out


def _rows(A_packed: Tensor, row0: Tensor, end: Tensor, tile_k: Any, block_m: int, tma: bool) -> Tensor:
    """Return rows of A_packed, `[block_m, block_k]`. TMA may read rows of the next group, which are not stored."""
    if tma:
        return unmasked(hl.load(A_packed, [row0 + hl.arange(block_m), tile_k]))
    rows = row0.to(torch.int64) + hl.arange(block_m)
    return hl.load(A_packed, [rows, tile_k], extra_mask=(rows < end).unsqueeze(1))


def _weight(B: Tensor, index: Tensor, n: Tensor, N: int, tile_k: Any, transposed: bool, tma: bool) -> Tensor:
    """Return the n-th 256 columns of a weight, `[block_k, 256]`. TMA returns zeros past the last column."""
    columns = n * 256 + hl.arange(256)
    if tma:
        if transposed:
            return unmasked(hl.load(B, [index, columns, tile_k])).T
        return unmasked(hl.load(B, [index, tile_k, columns]))
    inside = columns < N
    if transposed:
        return hl.load(B, [index, columns, tile_k], extra_mask=inside.unsqueeze(1)).T
    return hl.load(B, [index, tile_k, columns], extra_mask=inside.unsqueeze(0))


def _bias(bias: Tensor, group: Tensor, n: Tensor, N: int) -> Tensor:
    """Return the n-th 256 biases of a group, `[1, 256]`."""
    columns = n * 256 + hl.arange(256)
    return hl.load(bias, [group, columns], extra_mask=columns < N).to(torch.float32).unsqueeze(0)


def _store(out: Tensor, row0: Tensor, end: Tensor, n: Tensor, tile: Tensor, pieces: int, tma: bool) -> None:
    """Store the n-th 256 columns of rows row0 to `end`, in pieces to leave shared memory for four stages of loads."""
    left, right = _halves(tile)
    if pieces == 2:
        _store_piece(out, row0, end, 2 * n, left, tma)
        _store_piece(out, row0, end, 2 * n + 1, right, tma)
    else:
        first, second = _halves(left)
        third, fourth = _halves(right)
        _store_piece(out, row0, end, 4 * n, first, tma)
        _store_piece(out, row0, end, 4 * n + 1, second, tma)
        _store_piece(out, row0, end, 4 * n + 2, third, tma)
        _store_piece(out, row0, end, 4 * n + 3, fourth, tma)


def _halves(tile: Tensor) -> tuple[Tensor, Tensor]:
    height, width = tile.shape
    return hl.split(tile.reshape(height, 2, width // 2).permute(0, 2, 1))


def _store_piece(out: Tensor, row0: Tensor, end: Tensor, n: Tensor, tile: Tensor, tma: bool) -> None:
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
    columns = -(-out.size(1) // rules.TAILS_WIDTH)
    tma = choice.addressing.tma_out
    pieces = rules.tail_pieces(out.size(1))
    tiles = plan_table(builder, group_offsets, out, rules.TAILS_HEIGHT, unsplit=rules.UNSPLIT)
    outs, shared = (out, out), B.size(0) == 1
    if tma:
        A_packed = replace(A_packed, tma_clipped=True)
        outs = _windows(out, 64, 256 // pieces), _windows(out, 128, 256 // pieces)
    numbers = 2 * rules.tail_cost(problem) + 1, 2 * (rules.row_group(problem).bit_length() - 1) + 1
    constants = (columns, shared, problem.transposed, tma, pieces, builder.gpu.multiprocessors)
    arguments = (A_packed, B, tiles, bias, *outs, *numbers, *constants)
    builder.launch(jagged_tails, arguments, choice.config, int64_index=choice.addressing.int64_index, tf32=problem.tf32)


def _windows(out: SymbolicTensor, height: int, width: int) -> SymbolicTensor:
    """Return `windows` of `height` rows as `[height, M + 1, N / width, width]`."""
    return windows(out, height).transpose(1, 2).unflatten(2, (out.size(1) // width, width))
