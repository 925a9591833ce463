"""Quantise to fp8 in blocks, each with its own scale. The results equal `reference.quantize` bit for bit.

    amax = max |x|    scale = max(amax, 2**-100) * (1 / largest)    data = fp8(x * (1 / scale))

With `power_of_two` the scale is rounded up to a power of two. amax is computed from the bits of |x|: as integers they
have the order of |x|, with infinity and NaN above all finite values.
"""

from __future__ import annotations

from typing import Any

import helion.language as hl
import torch

from moe_kernels.kernels.declare import kernel
from moe_kernels.kernels.inline import as_float
from moe_kernels.rules import quantize as rules
from moe_kernels.runtime.plan import Builder
from moe_kernels.runtime.symbolic import SymbolicTensor, lies_transposed, needs_int64
from moe_kernels.scaled import BLOCK, scales_shape

_INFINITY, _NAN = 0x7F800000, 0x7FC00000
_SMALLEST = 0x0D800000  # 2**-100
_E4M3 = torch.float8_e4m3fn


def magnitude(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of |x| in float32, as int32."""
    x = x.to(torch.float32)
    return hl.inline_triton(
        "{0}.to(tl.int32, bitcast=True) & 0x7fffffff", args=(x,), output_like=torch.zeros_like(x, dtype=torch.int32)
    )


def largest_of(tile: torch.Tensor, like: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Return the bits of the largest magnitude along `dim`, or of all, of a tile masked with zeros.

    `like` is an int32 tensor of the result's shape.
    """
    text = "tl.max({0})" if dim is None else f"tl.max({{0}}, {dim})"
    return hl.inline_triton(text, args=(magnitude(tile),), output_like=like)


def largest_of_tiles(*tiles: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude at each position of tiles of one shape, two or four.

    The bits of 16-bit types are compared without conversion, two in one instruction.
    """
    if tiles[0].dtype == torch.float32:
        bits = "{%d}.to(tl.int32, bitcast=True) & 0x7fffffff"
    else:
        bits = "{%d}.to(tl.int16, bitcast=True) & 0x7fff"
    terms = [bits % i for i in range(len(tiles))]
    while len(terms) > 1:
        terms = [f"tl.maximum({a}, {b})" for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return hl.inline_triton(f"{terms[0]}.to({{0}}.dtype, bitcast=True)", args=tiles, output_like=tiles[0])


def columns_of(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the transpose `[C, 4 * n]` of rows, of which a, b, c and d `[n, C]` are every fourth, from 0, 1, 2 and 3.

    They are joined before they are converted, so that a thread converts and stores four adjacent elements of a column.
    """
    rows = hl.join(hl.join(a, c), hl.join(b, d)).to(dtype)  # [n, C, 2, 2]
    return rows.permute(1, 0, 2, 3).reshape(a.size(1), 4 * a.size(0))


def transposed_rows(
    x: torch.Tensor,  # [G, R, K]
    g: Any,
    start: Any,  # the first of 128 rows
    R: Any,
    tile_k: Any,
    factor: torch.Tensor,  # of all elements, or [1, C] of columns
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the transpose `[C, 128]` of 128 rows, scaled and in fp8; zeros from row R on."""
    rows = start + 4 * hl.arange(32)
    a = scaled(hl.load(x, [g, rows, tile_k], extra_mask=(rows < R).unsqueeze(1)), factor)
    b = scaled(hl.load(x, [g, rows + 1, tile_k], extra_mask=(rows + 1 < R).unsqueeze(1)), factor)
    c = scaled(hl.load(x, [g, rows + 2, tile_k], extra_mask=(rows + 2 < R).unsqueeze(1)), factor)
    d = scaled(hl.load(x, [g, rows + 3, tile_k], extra_mask=(rows + 3 < R).unsqueeze(1)), factor)
    return columns_of(a, b, c, d, dtype)


def scale_of(amax: torch.Tensor, largest: float, power_of_two: bool) -> torch.Tensor:
    """Return the scale of a block from the bits of its amax; NaN if amax is not finite."""
    scale = as_float(torch.clamp(amax, min=_SMALLEST)) * (1.0 / largest)
    bits = magnitude(scale)
    if power_of_two:
        bits = (bits + 0x7FFFFF) & _INFINITY
    return as_float(torch.where(amax < _INFINITY, bits, _NAN))


def inverse(scale: torch.Tensor) -> torch.Tensor:
    """Return 1 / scale, rounded to nearest, which Triton's `/` on GPUs is not."""
    return hl.inline_triton("tl.math.div_rn(1.0, {0})", args=(scale,), output_like=scale)


def scaled(x: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Return x * inverse, with zeros for blocks whose inverse is NaN."""
    return torch.where(inverse == inverse, x.to(torch.float32) * inverse, 0.0)


@kernel()
def quantize_parts(
    data: torch.Tensor,  # [G, R, K], written
    scales: torch.Tensor,  # [G, parts, R], written
    x: torch.Tensor,  # [G, R, K]
    largest: hl.constexpr,
    power_of_two: hl.constexpr,
) -> torch.Tensor:
    """One scale per row of a tile, which is as wide as a part."""
    G, R, K = x.size()
    for tile_k, tile_r, tile_g in hl.tile([K, R, G], block_size=[None, None, 1]):
        g = tile_g.id
        tile = hl.load(x, [g, tile_r, tile_k])
        amax = largest_of(tile, hl.zeros([tile_r], dtype=torch.int32), 1)
        scale = scale_of(amax, largest, power_of_two)
        data[g, tile_r, tile_k] = scaled(tile, inverse(scale)[:, None]).to(data.dtype)
        scales[g, tile_k.id, tile_r] = scale
    return data


@kernel()
def quantize_rows(
    data: torch.Tensor,  # [G, R, K], written
    scales: torch.Tensor,  # [G, 1, R], written
    x: torch.Tensor,  # [G, R, K]
    largest: hl.constexpr,
    power_of_two: hl.constexpr,
) -> torch.Tensor:
    """One scale per row; no tile holds a whole row, so each is read twice."""
    G, R, K = x.size()
    for tile_r, tile_g in hl.tile([R, G], block_size=[None, 1]):
        g = tile_g.id
        amax = hl.zeros([tile_r], dtype=torch.int32)
        for tile_k in hl.tile(K):
            amax = torch.maximum(amax, largest_of(hl.load(x, [g, tile_r, tile_k]), amax, 1))
        scale = scale_of(amax, largest, power_of_two)
        scales[g, 0, tile_r] = scale
        factor = inverse(scale)
        for tile_k in hl.tile(K):
            tile = hl.load(x, [g, tile_r, tile_k])
            data[g, tile_r, tile_k] = scaled(tile, factor[:, None]).to(data.dtype)
    return data


@kernel()
def quantize_rows_and_amax(
    data: torch.Tensor,  # [G, R, K], written
    scales: torch.Tensor,  # [G * R], written
    amax: torch.Tensor,  # [G, K] int32, zeros; written: the bits of the largest magnitude of each column
    x: torch.Tensor,  # [G, R, K]
    largest: hl.constexpr,
) -> torch.Tensor:
    """One scale per row; a program takes some rows, and keeps the largest magnitudes of their columns meanwhile."""
    G, R, K = x.size()
    step = hl.register_block_size(1, 256)
    for tile_k, tile_r, tile_g in hl.tile([K, R, G], block_size=[None, None, 1]):
        g = tile_g.id
        of_columns = hl.zeros([step, tile_k], dtype=x.dtype)
        for part in hl.tile(tile_r.begin, tile_r.begin + tile_r.block_size, block_size=step):
            rows = part.index
            tile = hl.load(x, [g, part, tile_k], extra_mask=(rows < R)[:, None])
            of_columns = largest_of_tiles(of_columns, tile)
            scale = scale_of(largest_of(tile, hl.zeros([part], dtype=torch.int32), 1), largest, False)
            hl.store(scales, [g * R + rows], scale, extra_mask=rows < R)
            y = scaled(tile, inverse(scale)[:, None])
            hl.store(data, [g, part, tile_k], y.to(data.dtype), extra_mask=(rows < R)[:, None])
        hl.atomic_max(amax, [g, tile_k], largest_of(of_columns, hl.zeros([tile_k], dtype=torch.int32), 0))
    return data


@kernel()
def quantize_transposed(
    data: torch.Tensor,  # [G, K, R], written
    scales: torch.Tensor,  # [G, K], written
    amax: torch.Tensor,  # [G, K] int32, of `quantize_rows_and_amax`
    x: torch.Tensor,  # [G, R, K]
    largest: hl.constexpr,
) -> torch.Tensor:
    """One scale per column."""
    G, R, K = x.size()
    for tile_k, tile_r, tile_g in hl.tile([K, R, G], block_size=[None, 128, 1]):
        g = tile_g.id
        scale = scale_of(amax[g, tile_k], largest, False)
        hl.store(scales, [g, tile_k], scale)
        factor = inverse(scale)[None, :]
        y = transposed_rows(x, g, tile_r.begin, R, tile_k, factor, data.dtype)
        hl.store(data, [g, tile_k, tile_r], y)
    return data


@kernel()
def quantize_squares(
    data: torch.Tensor,  # [G, R, K], written
    transposed: torch.Tensor | None,  # [G, K, R], written
    scales: torch.Tensor,  # [G, ceil(R / 128), ceil(K / 128)], written
    x: torch.Tensor,  # [G, R, K]
    largest: hl.constexpr,
    power_of_two: hl.constexpr,
) -> torch.Tensor:
    """One scale per tile. `transposed` gets the same data, transposed.

    For this the tile is read again, from the cache, and other pairs of its values are converted to fp8: if one that is
    converted from float32 were stored in both orders, ptxas 12.8 would read its register too early.
    """
    G, R, K = x.size()
    for tile_k, tile_r, tile_g in hl.tile([K, R, G], block_size=[128, 128, 1]):
        g = tile_g.id
        tile = hl.load(x, [g, tile_r, tile_k])
        scale = scale_of(largest_of(tile, hl.zeros([], dtype=torch.int32)), largest, power_of_two)
        hl.store(scales, [g, tile_r.id, tile_k.id], scale)
        factor = inverse(scale)
        data[g, tile_r, tile_k] = scaled(tile, factor).to(data.dtype)
        if transposed is not None:
            transposed[g, tile_k, tile_r] = transposed_rows(x, g, tile_r.begin, R, tile_k, factor, data.dtype)
    return data


def plan_quantize(
    builder: Builder,
    tensors: tuple[SymbolicTensor, ...],
    options: tuple[str, torch.dtype, bool],
    other_order: SymbolicTensor | None = None,
) -> tuple[SymbolicTensor, SymbolicTensor]:
    """Plan data and scales of x `[R, K]` or `[G, R, K]`, no extent of which is 0. "1x128" scales have one dimension,
    `[ceil(K / 128) * R]` or `[G * ceil(K / 128) * R]`. "128x128" data is also written to `other_order [G, K, R]`.
    """
    (x,), (format, dtype, power_of_two) = tensors, options
    R, K = x.shape[-2:]
    *groups, blocks, parts = scales_shape(x.shape, format)
    G = groups[0] if groups else 1
    shape = (R * (parts * G),) if format == "1x128" else (*groups, blocks, parts)
    data, scales = builder.alloc(x.shape, dtype), builder.alloc(shape, torch.float32)
    written, read = (tensor if groups else _as_group(tensor) for tensor in (data, x))
    rows, columns = (blocks, parts) if format == "128x128" else (parts, R)
    outputs = [written, scales.as_strided((G, rows, columns), (rows * columns if groups else 0, columns, 1), 0)]
    transposed = lies_transposed(x)
    if format == "128x128":
        outputs.insert(1, other_order)
        kernel, config = quantize_squares, rules.SQUARES
    elif format == "1x128":
        kernel, config = quantize_parts, rules.one_pass(BLOCK, transposed)
    elif transposed or K > rules.AT_ONCE_ALONE:
        kernel, config = quantize_rows, rules.two_passes(transposed)
    else:
        kernel, config = quantize_parts, rules.one_pass(K, False)
    arguments = (*outputs, read, torch.finfo(dtype).max, power_of_two)
    builder.launch(kernel, arguments, config, int64_index=needs_int64(written, read))
    return data, scales


def plan_quantize_weight(
    builder: Builder, tensors: tuple[SymbolicTensor, ...], options: tuple[bool]
) -> tuple[SymbolicTensor, ...]:
    """Plan the results of `ops.quantize_weight` for a weight `[E, N, K]`, no extent of which is 0."""
    (weight,), (rowwise,) = tensors, options
    if not rowwise:
        backward = builder.alloc(weight.mT.shape, _E4M3)
        made = plan_quantize(builder, (weight,), ("128x128", _E4M3, False), backward)
        return *made, backward, builder.alloc((0,), torch.float32)
    if rules.finds_amax(weight):
        data, scales, amax = plan_quantize_and_amax(builder, weight)
        return data, scales, *plan_quantize_transposed(builder, weight, amax)
    both = [plan_quantize(builder, (x,), ("rowwise", _E4M3, False)) for x in (weight, weight.mT)]
    return *both[0], *both[1]


def plan_quantize_and_amax(
    builder: Builder, x: SymbolicTensor
) -> tuple[SymbolicTensor, SymbolicTensor, SymbolicTensor]:
    """Plan "rowwise" data `[G, R, K]` and scales `[G, R, 1]` of x, and the bits of amax `[G, K]` of its columns.

    `rules.finds_amax(x)` must be true.
    """
    G, R, K = x.shape
    data, scales = builder.alloc(x.shape, _E4M3), builder.alloc((G, R, 1), torch.float32)
    amax = builder.alloc((G, K), torch.int32)
    builder.zero(amax)
    arguments = (data, scales.flatten(), amax, x, torch.finfo(_E4M3).max)
    config = rules.rows_and_amax(K, x.dtype.itemsize, builder.gpu.shared_memory)
    builder.launch(quantize_rows_and_amax, arguments, config, int64_index=needs_int64(data, x))
    return data, scales, amax


def plan_quantize_transposed(
    builder: Builder, x: SymbolicTensor, amax: SymbolicTensor
) -> tuple[SymbolicTensor, SymbolicTensor]:
    """Plan "rowwise" data `[G, K, R]` and scales `[G, K, 1]` of x^T, from x `[G, R, K]` and its columns' amax."""
    G, R, K = x.shape
    data, scales = builder.alloc((G, K, R), _E4M3), builder.alloc((G, K, 1), torch.float32)
    arguments = (data, scales.select(2, 0), amax, x, torch.finfo(_E4M3).max)
    builder.launch(quantize_transposed, arguments, rules.TRANSPOSED, int64_index=needs_int64(data, x))
    return data, scales


def _as_group(rows: SymbolicTensor) -> SymbolicTensor:
    """Return the view `[1, R, K]`. Its first stride is 0, which for Triton is a multiple of 16 bytes."""
    return rows.as_strided((1, *rows.shape), (0, *rows.strides), 0)
