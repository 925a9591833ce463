"""Grouped GEMM that is ragged along the contraction, in fp8: `out[g] = X[rows of g]^T @ Y[rows of g]`.

This is the gradient of a grouped GEMM's weights. fp8 tensor cores need both operands contiguous along the contraction,
here the rows. So X and Y are copied, transposed 128 rows at a time:

    data [blocks, C, 128]    the rows of group g, from `start` on, fill blocks start // 128 + g and following

These copies pad each group with zeros to a multiple of 128 rows. There are two formats of scales:

    rowwise        X and Y are fp8 and already transposed, with a scale per group and column
    block-scaled   X and Y are quantised here: a block has one scale per column of X, and one per 128 columns of Y,
                   which is "1x128" by "128x128" of the transposed rows of a group

As in `scaled_gemm`, the sum of each 128 rows is added outside the tensor cores, unless `fast`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import helion.language as hl
import torch

from moe_kernels.kernels.declare import kernel, written_without_kernel
from moe_kernels.kernels.grouped_wgrad import searchable
from moe_kernels.kernels.inline import bounds_of, divide, int32, unmasked
from moe_kernels.kernels.quantize import columns_of, inverse, largest_of, largest_of_tiles, scale_of, scaled
from moe_kernels.kernels.scaled_gemm import add_product, dot, product_of, scaled_sum
from moe_kernels.kernels.tiles import max_num_tiles, plan_table
from moe_kernels.rules import scaled_wgrad as rules
from moe_kernels.runtime.plan import Builder, Operands
from moe_kernels.runtime.symbolic import SymbolicTensor, most, needs_int64
from moe_kernels.scaled import BLOCK

_LARGEST = torch.finfo(torch.float8_e4m3fn).max


@kernel()
def quantize_columns(
    data: torch.Tensor,  # [blocks, C rounded up to a multiple of 128, 128] fp8, written
    scales: torch.Tensor,  # [blocks, C], or [blocks, cdiv(C, 128)] if `squares`; written
    x: torch.Tensor,  # [M, C], or tokens [T, C] with row_to_slot
    row_to_slot: torch.Tensor | None,  # [M] int32
    tiles: torch.Tensor,  # [1 + max_tiles, 3] int32, of tile_table with block_m = 128
    max_tiles: int,
    top_k: hl.constexpr,
    squares: hl.constexpr,  # one scale per 128 rows and 128 columns
    largest: hl.constexpr,
) -> torch.Tensor:
    """One program per 128 rows of a group and block of columns, 128 with `squares`."""
    C = x.size(1)
    for tile_c, tile_t in hl.tile([C, max_tiles], block_size=[None, 1]):
        num_tiles = tiles[0, 0]
        t = int32(tile_t.id + 1, num_tiles)
        if t <= num_tiles:
            group = tiles[t, 0]
            row0 = tiles[t, 1]
            end = tiles[t, 2]
            block = (divide(row0, 128) + group).to(torch.int64)
            rows = row0 + 4 * hl.arange(32)
            a = _rows(x, rows, end, tile_c, row_to_slot, top_k)
            b = _rows(x, rows + 1, end, tile_c, row_to_slot, top_k)
            c = _rows(x, rows + 2, end, tile_c, row_to_slot, top_k)
            d = _rows(x, rows + 3, end, tile_c, row_to_slot, top_k)
            largest_4 = largest_of_tiles(a, b, c, d)
            if squares:
                scale = scale_of(largest_of(largest_4, group), largest, False)
                hl.store(scales, [block, tile_c.id], scale)
            else:
                scale = scale_of(largest_of(largest_4, hl.zeros([tile_c], dtype=torch.int32), 0), largest, False)
                hl.store(scales, [block, tile_c], scale)
            factor = inverse(scale) if squares else inverse(scale).unsqueeze(0)
            a, b, c, d = scaled(a, factor), scaled(b, factor), scaled(c, factor), scaled(d, factor)
            hl.store(data, [block, tile_c, hl.arange(128)], columns_of(a, b, c, d, data.dtype))
    return data


@kernel()
def pad_columns(
    data: torch.Tensor,  # [blocks, C rounded up to a multiple of 128, 128] fp8, written
    x: torch.Tensor,  # [C, M] fp8
    tiles: torch.Tensor,  # [1 + max_tiles, 3] int32, of tile_table with block_m = 128
    max_tiles: int,
) -> torch.Tensor:
    """Copy fp8 data that are already transposed. One program per 128 rows of a group and block of columns."""
    for tile_t, tile_c in hl.tile([max_tiles, x.size(0)], block_size=[1, None]):
        num_tiles = tiles[0, 0]
        t = int32(tile_t.id + 1, num_tiles)
        if t <= num_tiles:
            row0 = tiles[t, 1]
            block = (divide(row0, 128) + tiles[t, 0]).to(torch.int64)
            rows = row0 + hl.arange(128)
            inside = (rows < tiles[t, 2]).unsqueeze(0)
            hl.store(data, [block, tile_c, hl.arange(128)], hl.load(x, [tile_c, rows], extra_mask=inside))
    return data


def _rows(
    x: torch.Tensor, rows: torch.Tensor, end: torch.Tensor, tile_c: Any, row_to_slot: torch.Tensor | None, top_k: int
) -> torch.Tensor:
    """Load rows of x, or with row_to_slot the tokens of these rows; zeros from `end` on."""
    inside = rows < end
    if row_to_slot is not None:
        rows = divide(hl.load(row_to_slot, [rows], extra_mask=inside), top_k)
    return hl.load(x, [rows.to(torch.int64), tile_c], extra_mask=inside.unsqueeze(1))


def _computed_here(x: torch.Tensor, inline_ptx: bool) -> torch.Tensor:
    """Return `x` by an instruction that is not moved, so that values from it are computed after a loop, not before."""
    if not inline_ptx:
        return x
    return hl.inline_triton(
        """tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [{0}], dtype=tl.int32, is_pure=False, pack=1)""",
        args=(x,),
        output_like=x,
    )


@kernel()
def scaled_wgrad(
    X: torch.Tensor,  # [blocks, P rounded up to a multiple of 128, 128] fp8
    Y: torch.Tensor,  # [blocks, Q rounded up to a multiple of 128, 128] fp8
    scales_X: torch.Tensor,  # [blocks, P] if `block_scaled`, else [G, P]
    scales_Y: torch.Tensor,  # [blocks, cdiv(Q, 128)] if `block_scaled`, else [G, Q]
    group_offsets: torch.Tensor,  # [G + 1]
    out: torch.Tensor,  # [G, P, Q]
    num_rows: int,  # M
    block_scaled: hl.constexpr,
    fast: hl.constexpr,
    width: hl.constexpr,  # a power of two, at least G + 1; 0 for offsets that are clamped and in order already
    half: hl.constexpr,  # rows of half a tile of the result
    inline_ptx: hl.constexpr,
) -> torch.Tensor:
    """Compute the tiles of all groups in halves, with block scales loaded one step ahead, as `promoted_persistent`.

    Columns of X and Y past P and Q are uninitialised, and results from them are not stored.
    """
    G, P, Q = out.size()
    for tile_q, tile_p, tile_g, tile_k in hl.tile([Q, P, G, X.size(2)], block_size=[None, 2 * half, 1, 128]):
        zero = hl.zeros([], dtype=torch.int32)
        g = int32(tile_g.id, zero)
        start, end = bounds_of(group_offsets, g, int32(num_rows, zero), width)
        first = divide(start, 128) + g
        steps = divide(end - start + 127, 128)
        p0 = int32(tile_p.begin, zero)
        q_block = tile_q.begin // 128
        upper = p0 + hl.arange(half)
        lower = upper + half
        acc_upper = hl.zeros([half, tile_q], dtype=torch.float32)
        acc_lower = hl.zeros([half, tile_q], dtype=torch.float32)
        # Rows past P are not stored; they use the scale of row p0, which exists.
        upper_scaled = torch.where(upper < P, upper, p0)
        lower_scaled = torch.where(lower < P, lower, p0)
        if block_scaled:
            next_upper = hl.load(scales_X, [first, upper_scaled])
            next_lower = hl.load(scales_X, [first, lower_scaled])
            next_y = scales_Y[first, q_block]
        for step in hl.tile(steps, block_size=1):
            i = int32(step.id, zero)
            block = (first + i).to(torch.int64)
            y = unmasked(hl.load(Y, [block, tile_q, tile_k])).T
            x_upper = unmasked(hl.load(X, [block, p0 + hl.arange(half), tile_k]))
            x_lower = unmasked(hl.load(X, [block, p0 + half + hl.arange(half), tile_k]))
            if block_scaled:
                scale_upper = (next_upper * next_y)[:, None]
                scale_lower = (next_lower * next_y)[:, None]
                following = first + torch.where(i + 1 < steps, i + 1, 0)
                next_upper = hl.load(scales_X, [following, upper_scaled])
                next_lower = hl.load(scales_X, [following, lower_scaled])
                next_y = scales_Y[following, q_block]
                acc_upper = scaled_sum(product_of(x_upper, y, acc_upper), scale_upper, acc_upper, inline_ptx)
                acc_lower = scaled_sum(product_of(x_lower, y, acc_lower), scale_lower, acc_lower, inline_ptx)
            elif fast:
                acc_upper = dot(x_upper, y, acc_upper)
                acc_lower = dot(x_lower, y, acc_lower)
            else:
                acc_upper = add_product(x_upper, y, acc_upper, inline_ptx)
                acc_lower = add_product(x_lower, y, acc_lower, inline_ptx)
        if not block_scaled:
            scale_y = torch.where(steps > 0, scales_Y[g, tile_q], 0.0)[None, :]
            scale_upper = torch.where(steps > 0, hl.load(scales_X, [g, upper_scaled]), 0.0)[:, None]
            scale_lower = torch.where(steps > 0, hl.load(scales_X, [g, lower_scaled]), 0.0)[:, None]
            acc_upper = acc_upper * scale_upper * scale_y
            acc_lower = acc_lower * scale_lower * scale_y
        group = _computed_here(g, inline_ptx).to(torch.int64)
        upper = _computed_here(p0, inline_ptx) + hl.arange(half)
        lower = upper + half
        hl.store(out, [group, upper, tile_q], acc_upper.to(out.dtype), extra_mask=(upper < P)[:, None])
        hl.store(out, [group, lower, tile_q], acc_lower.to(out.dtype), extra_mask=(lower < P)[:, None])
    return out


def plan_quantized_wgrad(builder: Builder, tensors: Operands, options: tuple[torch.dtype, int]) -> SymbolicTensor:
    """Plan the result `[G, P, Q]` from X `[M, P]`, Y `[M, Q]`, group_offsets `[G + 1]` and the operands' row_to_slot.

    An operand whose row_to_slot `[M]` is not None is tokens `[M / top_k, ..]`.
    """
    X, Y, group_offsets, x_row_to_slot, y_row_to_slot = tensors
    dtype, top_k = options
    G, P, Q = group_offsets.size(0) - 1, X.size(1), Y.size(1)
    out = builder.alloc((G, P, Q), dtype)
    rows = X if x_row_to_slot is None else x_row_to_slot
    if written_without_kernel(builder, out, most(rows.size(0)) == 0):
        return out
    tiles = plan_table(builder, group_offsets, None, BLOCK, M=rows.size(0))
    x = _quantize(builder, X, x_row_to_slot, rows.size(0), tiles, G, top_k, squares=False)
    y = _quantize(builder, Y, y_row_to_slot, rows.size(0), tiles, G, top_k, squares=True)
    _multiply(builder, x, y, group_offsets, rows.size(0), out)
    return out


def plan_scaled_wgrad(builder: Builder, tensors: Operands, options: tuple[torch.dtype, bool]) -> SymbolicTensor:
    """Plan the result `[G, P, Q]` from fp8 data, which are `[P, M]` and `[Q, M]` in one dimension, scales `[G, P]` and
    `[G, Q]`, and group_offsets `[G + 1]`.
    """
    x, scales_X, y, scales_Y, group_offsets = tensors
    dtype, fast = options
    (G, P), Q = scales_X.shape, scales_Y.size(1)
    out = builder.alloc((G, P, Q), dtype)
    M = x.size(0) // max(P, 1)
    if written_without_kernel(builder, out, most(M) == 0):
        return out
    tiles = plan_table(builder, group_offsets, None, BLOCK, M=M)
    scales_X, scales_Y = replace(scales_X, few_groups=True), replace(scales_Y, few_groups=True)
    padded_x = _pad(builder, x.as_strided((P, M), (M, 1), 0), tiles, G)
    padded_y = _pad(builder, y.as_strided((Q, M), (M, 1), 0), tiles, G)
    _multiply(builder, (padded_x, scales_X), (padded_y, scales_Y), group_offsets, M, out, block_scaled=False, fast=fast)
    return out


def _multiply(
    builder: Builder,
    x: tuple[SymbolicTensor, SymbolicTensor],  # data and scales, as in `scaled_wgrad`
    y: tuple[SymbolicTensor, SymbolicTensor],
    group_offsets: SymbolicTensor,  # [G + 1]
    M: Any,
    out: SymbolicTensor,  # [G, P, Q]
    block_scaled: bool = True,
    fast: bool = False,
) -> None:
    """Write the product to `out`."""
    G, _, Q = out.shape
    group_offsets, width = searchable(builder, group_offsets, M)
    width = max(width, 128) if width else 0  # with a width of 16, ptxas spills a few bytes
    constants = (M, block_scaled, fast, width, rules.HALF, builder.gpu.backend == "cuda")
    # Slots and groups are indexed with 64 bits.
    arguments = (x[0], y[0], x[1], y[1], group_offsets, replace(out, few_groups=True), *constants)
    int64_index = needs_int64(out.select(0, 0), group_offsets, x[1], y[1])
    config = rules.product(Q, G, builder.gpu.has_tma and not int64_index, block_scaled)
    builder.launch(scaled_wgrad, arguments, config, int64_index=int64_index)


def _blocks(builder: Builder, M: Any, C: int, G: int, dtype: torch.dtype) -> SymbolicTensor:
    """Allocate the blocks of M rows and C columns in G groups: `[blocks, C rounded up to a multiple of 128, 128]`."""
    return replace(builder.alloc((M // BLOCK + G, -(-C // BLOCK) * BLOCK, BLOCK), dtype), few_groups=True)


def _quantize(
    builder: Builder,
    x: SymbolicTensor,  # [M, C], or tokens [T, C] with row_to_slot
    row_to_slot: SymbolicTensor | None,  # [M]
    M: Any,
    tiles: SymbolicTensor,  # [1 + max_tiles, 3]
    G: int,
    top_k: int,
    squares: bool,
) -> tuple[SymbolicTensor, SymbolicTensor]:
    """Return data and scales, written by `quantize_columns`."""
    C = x.size(1)
    data = _blocks(builder, M, C, G, torch.float8_e4m3fn)
    scales = builder.alloc((data.size(0), -(-C // BLOCK) if squares else C), torch.float32)
    constants = (1 if row_to_slot is None else top_k, squares, _LARGEST)
    arguments = (data, scales, x, row_to_slot, tiles, max_num_tiles(M, G, BLOCK), *constants)
    builder.launch(quantize_columns, arguments, rules.columns(squares), int64_index=needs_int64(x, scales))
    return data, scales


def _pad(builder: Builder, x: SymbolicTensor, tiles: SymbolicTensor, G: int) -> SymbolicTensor:
    """Return the blocks of fp8 data `x [C, M]`, written by `pad_columns`."""
    C, M = x.shape
    data = _blocks(builder, M, C, G, x.dtype)
    arguments = (data, x, tiles, max_num_tiles(M, G, BLOCK))
    builder.launch(pad_columns, arguments, rules.PADDING, int64_index=needs_int64(x))
    return data
