"""Grouped GEMM that is ragged along the contraction, in fp8: `out[g] = X[rows of g]^T @ Y[rows of g]`.

The gradient of a grouped GEMM's weights. fp8 tensor cores need both operands contiguous along the contraction, which
here are the rows. So X and Y are quantised to copies that are transposed 128 rows at a time:

    data [slots, C, 128]    group g has the slots start // 128 + g, and following, for its rows from `start` on

Only there groups are padded, with zeros, to multiples of 128 rows. A column of a group has one scale. As in
`scaled_gemm`, sums leave the tensor cores after each 128 rows.
"""

from __future__ import annotations

from dataclasses import replace

import helion.language as hl
import torch

from moe_kernels.kernels.declare import kernel
from moe_kernels.kernels.grouped_wgrad import searchable
from moe_kernels.kernels.inline import bounds_of, decode_odd, divide, int32, unmasked
from moe_kernels.kernels.quantize import inverse, largest_of_columns, scale_of, scaled
from moe_kernels.kernels.scaled_gemm import add_product
from moe_kernels.kernels.tiles import max_num_tiles, plan_table
from moe_kernels.rules import scaled_wgrad as rules
from moe_kernels.runtime.plan import Builder
from moe_kernels.runtime.symbolic import SymbolicTensor, most, needs_int64
from moe_kernels.scaled import BLOCK

_LARGEST = torch.finfo(torch.float8_e4m3fn).max


@kernel(lambda *_: rules.columns())
def quantize_columns(
    data: torch.Tensor | None,  # [slots, C up to a multiple of 128, 128] fp8, written
    amax: torch.Tensor,  # [G, C] int32, the bits of magnitudes; written if there is no data
    x: torch.Tensor,  # [M, C], or tokens [T, C]
    row_to_token: torch.Tensor | None,  # [M] int32
    tiles: torch.Tensor,  # [1 + max_tiles, 3] int32, of tile_table for 128 rows
    max_tiles: int,
    largest: hl.constexpr,
) -> torch.Tensor:
    """Launched twice: the first finds the largest magnitude of each group's columns, the second quantises them.

    The maximum is one of integers, so the order of the atomics does not matter.
    """
    C = x.size(1)
    for tile_c, tile_t in hl.tile([C, max_tiles], block_size=[None, 1]):
        num_tiles = tiles[0, 0]
        t = int32(tile_t.id + 1, num_tiles)
        if t <= num_tiles:
            if data is not None:
                t = num_tiles + 1 - t  # backwards, for what was read last the first time is in the L2 cache
            group = tiles[t, 0]
            row0 = tiles[t, 1]
            rows = row0 + hl.arange(128)
            inside = rows < tiles[t, 2]
            if row_to_token is not None:
                rows = hl.load(row_to_token, [rows], extra_mask=inside)
            tile = hl.load(x, [rows.to(torch.int64), tile_c], extra_mask=inside[:, None])
            if data is None:
                found = largest_of_columns(tile, hl.zeros([tile_c], dtype=torch.int32))
                hl.atomic_max(amax, [group, tile_c], found)
            else:
                factor = inverse(scale_of(amax[group, tile_c], largest, False))
                y = scaled(tile, factor[None, :]).to(data.dtype)
                slot = (divide(row0, 128) + group).to(torch.int64)
                hl.store(data, [slot, tile_c, hl.arange(128)], y.T)
    return amax


@kernel(lambda X, Y, amax_X, amax_Y, *_: rules.product(amax_Y.size(1), amax_Y.size(0), tma=False))
def scaled_wgrad(
    X: torch.Tensor,  # [slots, P up to a multiple of 128, 128] fp8
    Y: torch.Tensor,  # [slots, Q up to a multiple of 128, 128] fp8
    amax_X: torch.Tensor,  # [G, P] int32
    amax_Y: torch.Tensor,  # [G, Q] int32
    group_offsets: torch.Tensor,  # [G + 1]
    out: torch.Tensor,  # [G, P, Q]
    odd_M: int,  # 2 * M + 1
    width: hl.constexpr,  # a power of two, at least G + 1; 0 for offsets that are clamped already
    half: hl.constexpr,  # rows of a result
    largest: hl.constexpr,
    inline_ptx: hl.constexpr,
) -> torch.Tensor:
    """Over the tiles of all groups, in two halves each, as `promoted_persistent`.

    Columns of X and Y past P and Q are never written, and what is made of them is not stored.
    """
    G, P, Q = out.size()
    for tile_q, tile_p, tile_g, tile_k in hl.tile([Q, P, G, X.size(2)], block_size=[None, 2 * half, 1, 128]):
        zero = hl.zeros([], dtype=torch.int32)
        g = int32(tile_g.id, zero)
        start, end = bounds_of(group_offsets, g, decode_odd(odd_M, zero), width)
        first = divide(start, 128) + g
        p0 = int32(tile_p.begin, zero)
        acc_upper = hl.zeros([half, tile_q], dtype=torch.float32)
        acc_lower = hl.zeros([half, tile_q], dtype=torch.float32)
        for step in hl.tile(divide(end - start + 127, 128), block_size=1):
            slot = (first + int32(step.id, zero)).to(torch.int64)
            y = unmasked(hl.load(Y, [slot, tile_q, tile_k])).T
            x_upper = unmasked(hl.load(X, [slot, p0 + hl.arange(half), tile_k]))
            x_lower = unmasked(hl.load(X, [slot, p0 + half + hl.arange(half), tile_k]))
            acc_upper = add_product(x_upper, y, acc_upper, inline_ptx)
            acc_lower = add_product(x_lower, y, acc_lower, inline_ptx)
        upper = p0 + hl.arange(half)
        lower = upper + half
        scale_upper = scale_of(hl.load(amax_X, [g, upper], extra_mask=upper < P), largest, False)[:, None]
        scale_lower = scale_of(hl.load(amax_X, [g, lower], extra_mask=lower < P), largest, False)[:, None]
        scale_y = scale_of(amax_Y[g, tile_q], largest, False)[None, :]
        acc_upper = acc_upper * scale_upper * scale_y
        acc_lower = acc_lower * scale_lower * scale_y
        group = g.to(torch.int64)
        hl.store(out, [group, upper, tile_q], acc_upper.to(out.dtype), extra_mask=(upper < P)[:, None])
        hl.store(out, [group, lower, tile_q], acc_lower.to(out.dtype), extra_mask=(lower < P)[:, None])
    return out


def plan_quantized_wgrad(
    builder: Builder, tensors: tuple[SymbolicTensor | None, ...], options: tuple[torch.dtype]
) -> SymbolicTensor:
    """Plan the result `[G, P, Q]` from X `[M, P]`, Y `[M, Q]`, group_offsets `[G + 1]` and the rows' maps or None.

    With a map `[M]`, X or Y are tokens.
    """
    X, Y, group_offsets, x_rows, y_rows = tensors
    assert X is not None and Y is not None and group_offsets is not None
    (dtype,) = options
    G, P, Q = group_offsets.size(0) - 1, X.size(1), Y.size(1)
    out = builder.alloc((G, P, Q), dtype)
    rows = X if x_rows is None else x_rows
    M = rows.size(0)
    if 0 in out.shape:
        return out
    if most(M) == 0:
        builder.zero(out)
        return out
    tiles = plan_table(builder, group_offsets, rows, BLOCK, zeros=False)
    max_tiles = max_num_tiles(M, G, BLOCK)
    x, amax_x = _quantize(builder, X, x_rows, tiles, max_tiles, M, G)
    y, amax_y = _quantize(builder, Y, y_rows, tiles, max_tiles, M, G)
    group_offsets, width = searchable(builder, group_offsets, M)
    constants = (M * 2 + 1, width, rules.HALF, _LARGEST, builder.gpu.backend == "cuda")
    # Slots and groups are told apart in 64 bits.
    arguments = (x, y, amax_x, amax_y, group_offsets, replace(out, few_groups=True), *constants)
    int64_index = needs_int64(out.select(0, 0), group_offsets, amax_x, amax_y)
    config = rules.product(Q, G, tma=builder.gpu.has_tma and not int64_index)
    builder.launch(scaled_wgrad, arguments, config, int64_index=int64_index)
    return out


def _quantize(
    builder: Builder,
    x: SymbolicTensor,  # [M, C], or tokens [T, C]
    row_to_token: SymbolicTensor | None,  # [M]
    tiles: SymbolicTensor,  # [1 + max_tiles, 3]
    max_tiles: int,
    M: int,
    G: int,
) -> tuple[SymbolicTensor, SymbolicTensor]:
    """Data `[slots, C up to a multiple of 128, 128]`, and the bits of the largest magnitudes `[G, C]`."""
    C = x.size(1)
    data = builder.alloc((M // BLOCK + G, -(-C // BLOCK) * BLOCK, BLOCK), torch.float8_e4m3fn)
    data = replace(data, few_groups=True)
    amax = builder.alloc((G, C), torch.int32)
    builder.zero(amax)
    for written in (None, data):
        arguments = (written, amax, x, row_to_token, tiles, max_tiles, _LARGEST)
        builder.launch(quantize_columns, arguments, rules.columns(), int64_index=needs_int64(x, amax))
    return data, amax
