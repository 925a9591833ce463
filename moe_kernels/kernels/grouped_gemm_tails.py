"""The persistent grouped GEMM with two heights of tiles: 128 rows, and 64 for the end of a group where that is enough.

A group's last tile is half empty on average, and yet takes the time of a full one. Here those that are at most half
full, the tails, are tiles of half the height. A loop over tiles is only flattened if all are of one height, so each
program has two such loops, and some programs walk tails while the others walk whole tiles. Both go through the groups
from the first to the last at the same pace, so a group's weights are in the L2 cache when its tail is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import helion
import helion.language as hl
import torch
from torch import Tensor

from moe_kernels import configs
from moe_kernels.kernels.inline import divide, int32, unmasked
from moe_kernels.kernels.launch import compile_kernel, kernel, worker_count
from moe_kernels.kernels.tiles import compile_table, place, shares, some_table, windows


def _preset(A_packed: Tensor, B: Tensor, tiles: Tensor, bias: Tensor | None, *_: Any) -> helion.Config:
    return configs.tails(A_packed.size(1), bias is not None, configs.Access(False, False, False, wide=False))


@kernel(_preset, static_shapes=True)
def jagged_tails(
    A_packed: Tensor,  # [M, K]
    B: Tensor,  # [G, K, N]; [G, N, K] if `transposed`; if `tma`, with N as [columns, 256]
    tiles: Tensor,  # [1 + G + slots, 3] int32, of tile_table with `tails_apart`
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
    """Each worker walks its share of the tails, which most have none of, and then its share of the whole tiles."""
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
    """The n-th columns of that many, in rows row0 to `end`."""
    height, width = tile.shape
    if tma:
        hl.store(out, [row0 + height - end + hl.arange(height), end, n, slice(None)], tile)
    else:
        rows = row0.to(torch.int64) + hl.arange(height)
        columns = n * width + hl.arange(width)
        hl.store(out, [rows.unsqueeze(1), columns.unsqueeze(0)], tile, extra_mask=(rows < end).unsqueeze(1))


def plan(
    choice: configs.Choice,
    A_packed: Tensor,  # [M, K]
    B: Tensor,  # [G, K, N], or [1, K, N] for one that all groups share; N a multiple of 256
    group_offsets: Tensor,  # [G + 1]
    bias: Tensor | None,  # [G, N]
    out: Tensor,  # [M, N]
    transposed: bool,  # B lies in memory as [G, N, K]
    tf32: bool,
) -> Callable[..., None]:
    """What multiplies such tensors by `jagged_tails`; nothing is launched."""
    G, columns = group_offsets.size(0) - 1, out.size(1) // configs.TAILS_WIDTH
    tma = choice.access.tma_out
    cost = configs.tail_cost(A_packed.size(1))
    settled = (G, columns, len(B) == 1, transposed, tma, worker_count(out.device), cost, 16)

    def prepare(
        A_packed: Tensor, B: Tensor, tiles: Tensor, bias: Tensor | None, tails_out: Tensor, out: Tensor, *rest: Any
    ) -> tuple[Any, ...]:
        if transposed:
            B = B.transpose(1, 2)
        if tma:
            B = B.unflatten(1 if transposed else 2, (columns, configs.TAILS_WIDTH))
            tails_out, out = _windows(tails_out, 64, 256), _windows(out, 128, 128)
        return A_packed, B, tiles, bias, tails_out, out, *rest

    # TMA has no use for Helion's limit on the elements of a tensor: compile for fewer.
    a, b, o = A_packed, B, out
    if tma:
        a, b, o = (
            a.narrow(0, 0, configs.TAILS_HEIGHT),
            b.narrow(0, 0, min(2, len(b))),
            o.narrow(0, 0, configs.TAILS_HEIGHT),
        )
    run = compile_kernel(
        jagged_tails,
        prepare(a, b, some_table(out), bias, o, o, *settled),
        choice.config,
        wide=choice.access.wide,
        tf32=tf32,
        prepare=prepare,
        clipped={0: 0, 4: 64, 5: 128} if tma else {},
        fixed={1},
    )
    list_tiles = compile_table(group_offsets, out, configs.TAILS_HEIGHT, tails_apart=True)

    def tails(A_packed: Tensor, B: Tensor, group_offsets: Tensor, bias: Tensor | None, out: Tensor) -> None:
        run(A_packed, B, list_tiles(group_offsets, out), bias, out, out, *settled)

    return tails


def _windows(out: Tensor, height: int, width: int) -> Tensor:
    """`windows` of so many rows, `[height, M, N / width, width]`."""
    return windows(out, height).transpose(1, 2).unflatten(2, (-1, width))
