"""The persistent grouped GEMM with two heights of tiles: 128 rows, and 64 for the end of a group where that is enough.

The last tile of a group is half empty on average, but takes as long as a full one. Here, last tiles that are at most
half full, the tails, have half the height. A flattened loop needs tiles of one height, so each program has two loops,
and some programs walk tails while the others walk whole tiles. Both go through the groups in order and at the same
pace, so the weights of a group are in the L2 cache when its tail is computed.
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
from moe_kernels.kernels.tiles import place, plan_table, shares, windows
from moe_kernels.rules.config import Config
from moe_kernels.runtime.plan import Builder
from moe_kernels.runtime.symbolic import SymbolicTensor


def _preset(A_packed: Tensor, B: Tensor, tiles: Tensor, bias: Tensor | None, *_: Any) -> Config:
    return rules.tails(A_packed.size(1), bias is not None, rules.Addressing(False, False, False, int64_index=False))


@kernel(_preset, static_shapes=True)
def jagged_tails(
    A_packed: Tensor,  # [M, K]
    B: Tensor,  # [G, K, N]; [G, N, K] if `transposed`; if `tma`, with N as [columns, 256]
    tiles: Tensor,  # [1 + G + max_tiles, 3] int32, of tile_table with `tails_apart`
    bias: Tensor | None,  # [G, N]
    tails_out: Tensor,  # [M, N], or `_windows` of it if `tma`
    out: Tensor,  # the same memory, in other windows
    G: hl.constexpr,
    columns: hl.constexpr,  # N / 256
    shared: hl.constexpr,  # B is, and has a first extent of 1
    transposed: hl.constexpr,
    tma: hl.constexpr,  # everything is read and written by TMA, which leaves out what is outside of a tensor or window
    workers: hl.constexpr,
    tail_cost: hl.constexpr,  # the time of a tail, that of a whole tile being 64
    group_m: hl.constexpr,  # so many whole tiles below each other come before those in the next column
) -> Tensor:
    """Each worker walks its share of the tails (none for most workers), and then its share of the whole tiles."""
    K = A_packed.size(1)
    block_k = hl.register_block_size(16, 128)
    hl.pdl_wait()  # for tile_table, which need not have ended when this is launched
    for tile_w in hl.tile(workers, block_size=1):
        row_tiles = tiles[0, 0]
        share = shares(row_tiles * columns, tiles[0, 1] * columns, tile_w.id, workers, tail_cost)
        num_tails, first_tail, s, num_whole, num_early, first, others, first_late = share
        for tile_i in hl.tile(num_tails, block_size=1):
            position = first_tail + int32(tile_i.id, s) * s
            t = divide(position, columns)
            n = position - t * columns
            group = tiles[1 + t, 0].to(torch.int64)
            row0 = tiles[1 + t, 1]
            end = tiles[1 + t, 2]
            matrix = group * (not shared)
            acc = hl.zeros([64, 256], dtype=torch.float32)
            for tile_k in hl.tile(K, block_size=block_k):
                a = _rows(A_packed, row0, end, tile_k, 64, tma)
                acc = hl.dot(a, _weight(B, matrix, n, tile_k, transposed, tma), acc=acc)
            if bias is not None:
                acc = acc + bias[group, n * 256 + hl.arange(256)].to(torch.float32)[None, :]
            _store(tails_out, row0, end, n, acc.to(out.dtype), tma)

        for tile_j in hl.tile(num_whole, block_size=1):
            j = int32(tile_j.id, s)
            position = torch.where(j < num_early, first + j * others, first_late + (j - num_early) * workers)
            t, n = place(position, row_tiles, columns, group_m)
            group = tiles[1 + G + t, 0].to(torch.int64)
            row0 = tiles[1 + G + t, 1]
            end = tiles[1 + G + t, 2]
            matrix = group * (not shared)
            acc = hl.zeros([128, 256], dtype=torch.float32)
            for tile_k in hl.tile(K, block_size=block_k):
                a = _rows(A_packed, row0, end, tile_k, 128, tma)
                acc = hl.dot(a, _weight(B, matrix, n, tile_k, transposed, tma), acc=acc)
            if bias is not None:
                acc = acc + bias[group, n * 256 + hl.arange(256)].to(torch.float32)[None, :]
            # In two halves, which leaves shared memory for four stages of loads.
            left, right = hl.split(acc.to(out.dtype).reshape(128, 2, 128).permute(0, 2, 1))
            _store(out, row0, end, 2 * n, left, tma)
            _store(out, row0, end, 2 * n + 1, right, tma)
    return out


def _rows(A_packed: Tensor, row0: Tensor, end: Tensor, tile_k: Any, block_m: int, tma: bool) -> Tensor:
    """[block_m, block_k]. TMA may read rows of the next group, which are not stored."""
    if tma:
        return unmasked(hl.load(A_packed, [row0 + hl.arange(block_m), tile_k]))
    rows = row0.to(torch.int64) + hl.arange(block_m)
    return hl.load(A_packed, [rows, tile_k], extra_mask=(rows < end).unsqueeze(1))


def _weight(B: Tensor, index: Tensor, n: Tensor, tile_k: Any, transposed: bool, tma: bool) -> Tensor:
    """[block_k, 256]"""
    columns = [n, slice(None)] if tma else [n * 256 + hl.arange(256)]
    if transposed:
        return unmasked(hl.load(B, [index, *columns, tile_k])).T
    return unmasked(hl.load(B, [index, tile_k, *columns]))


def _store(out: Tensor, row0: Tensor, end: Tensor, n: Tensor, tile: Tensor, tma: bool) -> None:
    """Store the n-th block of columns in rows row0 to `end`."""
    height, width = tile.shape
    if tma:
        hl.store(out, [row0 + height - end + hl.arange(height), end, n, slice(None)], tile)
    else:
        rows = row0.to(torch.int64) + hl.arange(height)
        columns = n * width + hl.arange(width)
        hl.store(out, [rows.unsqueeze(1), columns.unsqueeze(0)], tile, extra_mask=(rows < end).unsqueeze(1))


def multiply(
    builder: Builder,
    choice: rules.Choice,
    A_packed: SymbolicTensor,  # [M, K]
    B: SymbolicTensor,  # [G, K, N], or [1, K, N] for one that all groups share; [_, N, K] if `transposed`
    group_offsets: SymbolicTensor,  # [G + 1]
    bias: SymbolicTensor | None,  # [G, N]
    out: SymbolicTensor,  # [M, N], N a multiple of 256
    transposed: bool,
    tf32: bool,
) -> None:
    """Write the product to `out` by `jagged_tails`."""
    G, columns = group_offsets.size(0) - 1, out.size(1) // rules.TAILS_WIDTH
    tma = choice.addressing.tma_out
    tiles = plan_table(builder, group_offsets, out, rules.TAILS_HEIGHT, tails_apart=True)
    outs, shared = (out, out), B.size(0) == 1
    if tma:
        A_packed = replace(A_packed, tma_clipped=True)
        B = B.unflatten(1 if transposed else 2, (columns, rules.TAILS_WIDTH))
        outs = _windows(out, 64, 256), _windows(out, 128, 128)
    cost = rules.tail_cost(A_packed.size(1))
    constants = (G, columns, shared, transposed, tma, builder.gpu.multiprocessors, cost, 16)
    arguments = (A_packed, B, tiles, bias, *outs, *constants)
    builder.launch(jagged_tails, arguments, choice.config, int64_index=choice.addressing.int64_index, tf32=tf32)


def _windows(out: SymbolicTensor, height: int, width: int) -> SymbolicTensor:
    """`windows` of `height` rows, `[height, M + 1, N / width, width]`."""
    return windows(out, height).transpose(1, 2).unflatten(2, (out.size(1) // width, width))
