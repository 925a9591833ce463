"""The list of the row tiles of all groups, built on the device, and functions for kernels that walk it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import helion.language as hl
import torch

from moe_kernels import rules
from moe_kernels.kernels.declare import kernel
from moe_kernels.kernels.inline import BY_REGION, BY_ROW, clamped, divide, first_row, int32, running_max
from moe_kernels.runtime.plan import Builder
from moe_kernels.runtime.symbolic import SymbolicInt, SymbolicTensor, needs_int64

# Values of `unsplit` that are no number of rows.
NO_TAILS = (1 << 30) - 1  # all groups have tiles of one height
MERGED = NO_TAILS - 1  # a tail is part of the tile before it
ALONE = NO_TAILS - 2  # only a group's only tile may be a tail


@kernel(
    lambda group_offsets, out, *_: rules.tile_table(group_offsets.size(0) - 1, None if out is None else out.size(1))
)
def tile_table(
    group_offsets: torch.Tensor,  # [G + 1]
    out: torch.Tensor | None,  # [M, N]
    tiles: torch.Tensor,  # [1 + max_tiles, 3] int32
    max_tiles: int,
    num_rows: int,  # M
    most_unsplit: int,  # groups of at most so many rows have tiles of one height
    block_m: hl.constexpr,
) -> torch.Tensor:
    """List the row tiles of all groups, and set the rows of `out` outside all groups to zero.

    A tail is a group's last tile, if that has at most block_m // 2 rows and the group has either more than most_unsplit
    rows or no other tile; with NO_TAILS there are none. tiles[0, 0] is the number of whole tiles, and
    tiles[0, 1] that of tails. tiles[1 + i] = (group, first row, end row) is whole tile i; the tails follow. With
    MERGED, a whole tile ends with the tail that follows it in its group, and a group's only tile is whole.
    """
    G = group_offsets.size(0) - 1
    hl.pdl_wait()
    for tile_i in hl.tile(max_tiles, block_size=1):
        region = hl.zeros([], dtype=torch.int32)
        M, unsplit = int32(num_rows, region), int32(most_unsplit, region)
        tile = tile_i.id + region
        start = hl.zeros([], dtype=torch.int32)
        end = M
        previous = hl.zeros([], dtype=torch.int32)
        index = hl.zeros([], dtype=torch.int32)
        total = hl.zeros([], dtype=torch.int32)
        tail_index = hl.zeros([], dtype=torch.int32)
        tail_total = hl.zeros([], dtype=torch.int32)
        for tile_g in hl.tile(G + 1):
            starts = running_max(clamped(group_offsets, tile_g.index - 1, M), previous)
            ends = torch.maximum(starts, clamped(group_offsets, tile_g.index, M))
            grouped = (tile_g.index >= 1) & (tile_g.index <= G)
            rounding = torch.where(_unsplit(ends - starts, block_m, unsplit), block_m - 1, block_m // 2 - 1)
            count = torch.where(grouped, divide(ends - starts + rounding, block_m), 0)
            tail = (grouped & (ends - starts > count * block_m)).to(torch.int32)
            before = (divide(ends, block_m) + tile_g.index + 1 <= tile) & (tile_g.index <= G)
            region = region + torch.sum(before.to(torch.int32), dtype=torch.int32)
            start = torch.maximum(start, torch.amax(torch.where(before, ends, 0)))
            end = torch.minimum(end, torch.amin(torch.where(before, M, ends)))
            index = index + torch.sum(torch.where(before, count, 0), dtype=torch.int32)
            total = total + torch.sum(count, dtype=torch.int32)
            tail_index = tail_index + torch.sum(torch.where(before, tail, 0), dtype=torch.int32)
            tail_total = tail_total + torch.sum(tail, dtype=torch.int32)
            previous = torch.amax(ends)
        row0 = first_row(tile, region, start, block_m)
        if row0 < end:
            if (region >= 1) & (region <= G):
                whole = _unsplit(end - start, block_m, unsplit) | (end - row0 > block_m // 2)
                index = 1 + torch.where(whole, index + divide(row0 - start, block_m), total + tail_index)
                tiles[index, 0] = region - 1
                tiles[index, 1] = row0
                with_tail = (unsplit == MERGED) & (end - row0 <= block_m + block_m // 2)
                tiles[index, 2] = torch.where(with_tail, end, torch.minimum(row0 + block_m, end))
            elif out is not None:
                rows = row0.to(torch.int64) + hl.arange(block_m)
                for tile_n in hl.tile(out.size(1)):
                    zeros = hl.zeros([block_m, tile_n], dtype=out.dtype)
                    hl.store(out, [rows, tile_n], zeros, extra_mask=(rows < end)[:, None])
        if tile == 0:
            tiles[0, 0] = total
            tiles[0, 1] = tail_total
    return tiles


def listed(tiles: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the group of a listed tile in int64, its first row and its end row."""
    return hl.load(tiles, [index, 0]).to(torch.int64), hl.load(tiles, [index, 1]), hl.load(tiles, [index, 2])


def _unsplit(rows: torch.Tensor, block_m: int, unsplit: torch.Tensor) -> torch.Tensor:
    """Whether a group of `rows` rows has only whole tiles, however few rows are in the last one."""
    few = torch.where(unsplit == MERGED, rows <= block_m, (rows > block_m // 2) & (rows <= unsplit))
    return (unsplit == NO_TAILS) | few


def shares(
    whole: torch.Tensor,
    tails: torch.Tensor,
    worker: int,
    workers: int,
    tail_cost: torch.Tensor,
    narrow: torch.Tensor | None = None,
    narrow_cost: int = 0,
) -> tuple[tuple[torch.Tensor, ...], ...]:
    """Return a worker's share of the `whole` tiles, the `tails`, and the `narrow` tiles, if there may be any. A tail
    costs `tail_cost`, a narrow tile `narrow_cost`, a whole tile 64.

    s workers begin with the tails or the narrow tiles while the others compute some of the whole tiles. Then all
    workers share the remaining whole tiles, starting with those others. s minimises the cost of the most loaded worker.

    Returns (num_tails, tail_workers), (num_narrow, first_narrow, narrow_workers), (num_whole, num_early, first, others,
    first_late): `num_tails` tails, numbers worker, worker + tail_workers, ...; `num_narrow` narrow tiles, numbers
    first_narrow, first_narrow + narrow_workers, ...; and `num_whole` whole tiles, of which the first `num_early` are
    first, first + others, ... and the rest first_late, first_late + workers, ...
    """
    # The cost for each s from 1 to 128.
    tried = hl.arange(128, dtype=torch.int32) + 1
    _, _, small_time = _small_tiles(tried, tails, tail_cost, narrow, narrow_cost)
    early = divide(small_time, 64)
    left = torch.clamp(whole - early * (workers - tried), min=0)
    most_early = torch.minimum(early, divide(whole + workers - tried - 1, torch.clamp(workers - tried, min=1)))
    time = torch.maximum(
        small_time + divide(left + tried - 1, workers) * 64, (most_early + divide(left + (workers - 1), workers)) * 64
    )
    # Penalise an s whose tails take less than three fifths of the time: a tail should be computed together with its
    # group's whole tiles, while the weights are in the L2 cache.
    time = torch.where(2 * early * workers < 3 * left, time + divide(time, 16), time)
    # Bounded so that time * 128 + s - 1 fits into an int32. No GPU's memory holds the results of so many tiles.
    time = torch.where(tried < workers, torch.clamp(time, max=1 << 22), 1 << 23)
    best = torch.amin(time * 128 + (tried - 1))
    s = best - divide(best, 128) * 128 + 1

    others = workers - s
    tail_workers, narrow_workers, early_time = _small_tiles(s, tails, tail_cost, narrow, narrow_cost)
    early_end = torch.minimum(divide(early_time, 64) * others, whole)
    w = int32(worker, s)
    is_early = w >= s
    first = torch.where(is_early, w - s, w + others)  # workers without small tiles come first
    num_tails = torch.where(w < tail_workers, _count(w, tail_workers, tails), 0)
    first_narrow = w - (s - narrow_workers)
    num_narrow = s * 0
    if narrow is not None:
        counted = _count(first_narrow, narrow_workers, narrow)
        num_narrow = torch.where(is_early | (first_narrow < 0), 0, counted)
    num_early = torch.where(is_early, _count(first, others, early_end), 0)
    first_late = early_end + first
    num_whole = num_early + _count(first_late, workers, whole)
    of_whole = num_whole, num_early, first, others, first_late
    return (num_tails, tail_workers), (num_narrow, first_narrow, narrow_workers), of_whole


def _small_tiles(
    s: torch.Tensor, tails: torch.Tensor, tail_cost: torch.Tensor, narrow: torch.Tensor | None, narrow_cost: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Divide s workers between tails and narrow tiles in proportion to their costs. Return the number of workers for
    each, at least 1, and the time until all are done. A single worker computes both.
    """
    if narrow is None:
        return s, s, divide(tails + s - 1, s) * tail_cost
    tails_work = (tails * tail_cost).to(torch.float32)
    work = tails_work + (narrow * narrow_cost).to(torch.float32)
    share = (s.to(torch.float32) * tails_work / torch.clamp(work, min=1) + 0.5).to(torch.int32)
    most = torch.clamp(s - torch.clamp(narrow, max=1), min=1)
    tail_workers = torch.clamp(torch.minimum(share, most), min=1)
    narrow_workers = torch.clamp(s - torch.where(tails > 0, tail_workers, 0), min=1)
    tails_time = divide(tails + tail_workers - 1, tail_workers) * tail_cost
    narrow_time = divide(narrow + narrow_workers - 1, narrow_workers) * narrow_cost
    one_does_both = (s < 2) & (tails > 0)
    time = torch.where(one_does_both, tails_time + narrow_time, torch.maximum(tails_time, narrow_time))
    return tail_workers, narrow_workers, time


def _count(first: torch.Tensor, step: Any, end: torch.Tensor) -> torch.Tensor:
    """Return how many of first, first + step, ... are below `end`."""
    return divide(torch.clamp(end - first + step - 1, min=0), step)


def place(
    position: torch.Tensor, row_tiles: torch.Tensor, columns: int, log2_group_m: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row tile and column of the tile at `position`: row tiles in groups of `group_m`, column by column.

    Shifts round to a row group, because another division by a number that is no constant takes too long between tiles.
    """
    first = (divide(position, columns) >> log2_group_m) << log2_group_m
    height = torch.minimum(row_tiles - first, (first * 0 + 1) << log2_group_m)
    position = position - first * columns
    n = divide(position, height)
    return first + position - n * height, n


def windows(out: SymbolicTensor, block_m: int) -> SymbolicTensor:
    """Return `out [M, N]` as `[block_m, N, M + 1]`; `[:, :, m]` is the window of the `block_m` rows before row m.

    TMA clips each coordinate separately: a tile of fewer rows is written at the end of the window that ends with it,
    and the rows that follow stay unchanged. The windows of the first rows begin before `out`.
    """
    row, column = out.strides
    view = out.as_strided((block_m, out.size(1), out.size(0) + 1), (row, column, row), -block_m * row)
    example = None if out.example_shape is None else (block_m, out.example_shape[1], out.size(0) + 1)
    return replace(view, tma_clipped=True, example_shape=example)


def store_rows(
    out: torch.Tensor,  # [M, N], or `windows` of it if `tma`
    row0: torch.Tensor,
    end: torch.Tensor,
    columns: Any,
    tile: torch.Tensor,  # [block_m, _], of which rows row0 to `end` are stored
    tma: bool,  # TMA drops rows past the end of a window
) -> None:
    """Store a listed tile in the dtype of `out`."""
    block_m = tile.size(0)
    if tma:
        hl.store(out, [row0 + block_m - end + hl.arange(block_m), columns, end], tile.to(out.dtype))
    else:
        rows = row0.to(torch.int64) + hl.arange(block_m)
        hl.store(out, [rows, columns], tile.to(out.dtype), extra_mask=(rows < end).unsqueeze(1))


def max_num_tiles(M: Any, G: int, block_m: int) -> Any:
    """Return an upper bound on the number of row tiles of G groups and the rows outside them."""
    return M // block_m + (G + 2)


def tile_numbers(M: Any, G: int, block_m: int, by_row: bool) -> tuple[Any, int]:
    """Return max_tiles and numbering, arguments of a kernel that finds its tiles from the offsets."""
    return (M, BY_ROW) if by_row else (max_num_tiles(M, G, block_m), BY_REGION)


def tile_count(tiles: SymbolicTensor) -> SymbolicTensor:
    """Return the number of whole tiles in a table, tiles[0, 0], as a tensor `[]`."""
    return tiles.select(0, 0).select(0, 0)


def plan_table(
    builder: Builder,
    group_offsets: SymbolicTensor,  # [G + 1]
    out: SymbolicTensor | None,  # [M, N]
    block_m: int,
    unsplit: int = NO_TAILS,
    *,
    M: SymbolicInt | int | None = None,  # if there is no `out`
) -> SymbolicTensor:  # [1 + max_tiles, 3]
    """List the tiles of `block_m` rows, and set the rows of `out` outside all groups to zero: see `tile_table`."""
    M = M if out is None else out.size(0)
    G = group_offsets.size(0) - 1
    max_tiles = max_num_tiles(M, G, block_m)
    tiles = builder.alloc((max_tiles + 1, 3), torch.int32)
    config = rules.tile_table(G, None if out is None else out.size(1))
    arguments = (group_offsets, out, tiles, max_tiles, M, unsplit, block_m)
    builder.launch(tile_table, arguments, config, int64_index=needs_int64(group_offsets, out))
    return tiles
