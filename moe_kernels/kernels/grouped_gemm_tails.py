"""The persistent grouped GEMM with tiles of two heights, which the rows of each group decide: 128 rows, and 64.

The last tile of a group is half empty on average, but takes as long as a full one. Here, a last tile of at most 64 rows
is a tile of half the height, a tail, where that saves more than it costs: in a group of many rows, or of no others. The
list of tiles is made on the device, so one plan is right for every routing of the same number of rows.

A loop over tiles is only flattened if all are of one height, so each program has two such loops, and some programs walk
tails while the others walk whole tiles. Both go through the groups from the first to the last at the same pace, so a
group's weights are in the L2 cache when its tail is computed.
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
    tiles: Tensor,  # [1 + max_tiles, 3] int32, of tile_table with tails
    bias: Tensor | None,  # [G, N]
    tails_out: Tensor,  # [M, N], or `_windows` of it if `tma`
    out: Tensor,  # the same memory, in other windows
    odd_tail_cost: int,  # 2 * tail_cost + 1: the time of a tail, that of a whole tile being 64
    odd_log2_group_m: int,  # 2 * log2(group_m) + 1: whole tiles below each other, before those in the next column
    columns: hl.constexpr,  # of 256: cdiv(N, 256)
    shared: hl.constexpr,  # B is, and has a first extent of 1
    transposed: hl.constexpr,
    tma: hl.constexpr,  # everything is read and written by TMA, which leaves out what is outside of a tensor or window
    pieces: hl.constexpr,  # that a tile is stored in
    workers: hl.constexpr,
) -> Tensor:
    """Each worker walks its share of the tails (none for most workers), and then its share of the whole tiles."""
    K = A_packed.size(1)
    N = B.size(1) if transposed else B.size(2)
    block_k = hl.register_block_size(16, 128)
    hl.pdl_wait()  # for tile_table, which need not have ended when this is launched
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
    """[block_m, block_k]. TMA may read rows of the next group, which are not stored."""
    if tma:
        return unmasked(hl.load(A_packed, [row0 + hl.arange(block_m), tile_k]))
    rows = row0.to(torch.int64) + hl.arange(block_m)
    return hl.load(A_packed, [rows, tile_k], extra_mask=(rows < end).unsqueeze(1))


def _weight(B: Tensor, index: Tensor, n: Tensor, N: int, tile_k: Any, transposed: bool, tma: bool) -> Tensor:
    """[block_k, 256]. TMA takes columns past the last for zeros."""
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
    """[1, 256]"""
    columns = n * 256 + hl.arange(256)
    return hl.load(bias, [group, columns], extra_mask=columns < N).to(torch.float32).unsqueeze(0)


def _store(out: Tensor, row0: Tensor, end: Tensor, n: Tensor, tile: Tensor, pieces: int, tma: bool) -> None:
    """The n-th 256 columns, in rows row0 to `end`; in pieces, which leaves shared memory for four stages of loads."""
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
    """The n-th columns of that many, in rows row0 to `end`. TMA leaves out those past the last."""
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
    B: SymbolicTensor,  # [G, K, N], or [1, K, N] for one that all groups share; [_, N, K] if `transposed`
    group_offsets: SymbolicTensor,  # [G + 1]
    bias: SymbolicTensor | None,  # [G, N]
    out: SymbolicTensor,  # [M, N], N a multiple of 64
    problem: rules.Problem,
) -> None:
    """Write the product to `out` by `jagged_tails`."""
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
    """`windows` of `height` rows, `[height, M + 1, N / width, width]`."""
    return windows(out, height).transpose(1, 2).unflatten(2, (out.size(1) // width, width))
