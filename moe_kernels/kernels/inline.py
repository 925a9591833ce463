"""Functions shared by kernel bodies, and inline Triton where Helion has no equivalent."""

from __future__ import annotations

from typing import Any

import helion.language as hl
import torch

from moe_kernels.runtime.compile import SAME

# How a kernel numbers its tiles.
BY_ROW = 0  # tile i begins at row i; it is empty if no tile begins there
BY_REGION = 1  # region by region: region r's first tile has number start_r // block_m + r


def int32(n: int, like: torch.Tensor) -> torch.Tensor:
    """Return a number as int32, such as a loop index, since Triton may count the loop in 64 bits.

    `like`: any int32 scalar; Helion takes the result's shape and type from it.
    """
    return hl.inline_triton("tl.cast({0}, tl.int32)", args=(n,), output_like=like)


def as_float(bits: torch.Tensor) -> torch.Tensor:
    """Return the float32 with these bits, an int32."""
    like = torch.zeros_like(bits, dtype=torch.float32)
    return hl.inline_triton("{0}.to(tl.float32, bitcast=True)", args=(bits,), output_like=like)


def by_triton(function: str, x: torch.Tensor) -> torch.Tensor:
    """Return an elementwise function of Triton's language, where Helion's is one that its interpreter lacks."""
    return hl.inline_triton(f"tl.{function}({{0}})", args=(x,), output_like=x)


def divide(a: torch.Tensor, b: int) -> torch.Tensor:
    """a // b for a >= 0, b > 0, without the sign handling of Python's `//`."""
    return hl.inline_triton("{0} // {1}", args=(a, b), output_like=a)


def multiple(a: torch.Tensor, b: int) -> torch.Tensor:
    """Whether a >= 0 is a multiple of b > 0."""
    return hl.inline_triton("{0} % {1} == 0", args=(a, b), output_like=a == 0)


def unmasked(tile: torch.Tensor) -> torch.Tensor:
    """Return `tile`, an operand that TMA reads, hidden from Helion's masking. TMA returns zeros outside a tensor, but
    Helion does not know that, and would load a tile that it has to mask through pointers.
    """
    return hl.inline_triton(SAME, args=(tile,), output_like=tile)


def block_of(B: torch.Tensor, g: Any, rows: Any, columns: Any, transposed: bool) -> torch.Tensor:
    """Return a block of matrix g of B `[G, R, C]`, which is stored as `[G, C, R]` if `transposed`."""
    if transposed:
        return hl.load(B, [g, columns, rows]).T
    return hl.load(B, [g, rows, columns])


def biased(acc: torch.Tensor, bias: torch.Tensor | None, g: torch.Tensor, columns: Any) -> torch.Tensor:
    """Return rows of group g with its `bias [G, N]` added, if there is one."""
    return acc if bias is None else acc + hl.load(bias, [g, columns]).to(torch.float32).unsqueeze(0)


def histogram(values: torch.Tensor, width: int, counted: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return how many of the `values` selected by `counted` equal each of 0..width - 1; `like` is [width] int32."""
    return hl.inline_triton("tl.histogram({0}, {1}, mask={2})", args=(values, width, counted), output_like=like)


def lookup(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return table[index] for a table in registers."""
    return hl.inline_triton("tl.gather({0}, {1}, 0)", args=(table, index), output_like=index)


def clamped(group_offsets: torch.Tensor, index: torch.Tensor, M: torch.Tensor) -> torch.Tensor:
    """Return the offsets at `index`, clamped to 0..M; 0 at index -1."""
    offsets = torch.clamp(hl.load(group_offsets, [index], extra_mask=index >= 0), min=0)
    return torch.minimum(offsets.to(torch.int64), M.to(torch.int64)).to(torch.int32)


def bounds_of(
    group_offsets: torch.Tensor,  # [G + 1]
    g: torch.Tensor,
    M: torch.Tensor,
    width: int,  # a power of two, at least G + 1; 0 for offsets that are already clamped and in order
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first row of group g and the row after its last."""
    if width:
        index = hl.arange(width)
        offsets = torch.clamp(hl.load(group_offsets, [index], extra_mask=index < group_offsets.size(0)), min=0)
        offsets = torch.minimum(offsets.to(torch.int64), M.to(torch.int64)).to(torch.int32)
        return torch.amax(torch.where(index <= g, offsets, 0)), torch.amax(torch.where(index <= g + 1, offsets, 0))
    return hl.load(group_offsets, [g]).to(torch.int32), hl.load(group_offsets, [g + 1]).to(torch.int32)


def running_max(offsets: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    """Return the cumulative maximum of `offsets`, starting from `previous`."""
    return torch.maximum(hl.associative_scan(torch.maximum, offsets, dim=0), previous)


def first_row(tile: torch.Tensor, region: torch.Tensor, region_start: torch.Tensor, block_m: int) -> torch.Tensor:
    """Return the first row of `tile`, numbered BY_REGION. Regions are the groups and the rows before and after them."""
    return region_start + (tile - divide(region_start, block_m) - region) * block_m


def skip_regions(
    found: tuple[torch.Tensor, ...],  # what this returned for the offsets before: at first 0, 0, M, 0
    group_offsets: torch.Tensor,  # [G + 1]
    index: torch.Tensor,  # of the offsets that follow
    G: int,
    M: torch.Tensor,
    tile: torch.Tensor,
    by_row: torch.Tensor,  # tiles are numbered BY_ROW, not BY_REGION
    block_m: int,
) -> tuple[torch.Tensor, ...]:
    """Return the region of `tile` and its first and end row, as far as the offsets up to `index` tell, and the last of
    these offsets.
    """
    region, start, end, previous = found
    ends = running_max(clamped(group_offsets, index, M), previous)
    following = index + 1
    number = torch.where(by_row, ends, divide(ends, block_m) + following)  # of the first tile of the next region
    before = (number <= tile) & (index <= G)
    region = region + torch.sum(before.to(torch.int32), dtype=torch.int32)
    start = torch.maximum(start, torch.amax(torch.where(before, ends, 0)))
    end = torch.minimum(end, torch.amin(torch.where(before, M, ends)))
    return region, start, end, torch.amax(ends)


def numbered_row(
    tile: torch.Tensor, region: torch.Tensor, start: torch.Tensor, end: torch.Tensor, by_row: torch.Tensor, block_m: int
) -> torch.Tensor:
    """Return the first row of `tile` in its region, rows `start` to `end`; `end` for a row where no tile begins."""
    row = torch.where(by_row, tile, first_row(tile, region, start, block_m))
    into_region = row - start
    return torch.where(multiple(into_region, block_m), row, end)
