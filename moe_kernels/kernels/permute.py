"""Token order <-> expert order.

    scatter_rows:   rows[slot_to_row[s]] = (topk_weights[s]) * tokens[s // top_k]
    combine_rows:   tokens[t] = sum over t's slots s, in order, of (topk_weights[s]) * rows[slot_to_row[s]]
    dot_rows:       dots[s] = sum over h of tokens[s // top_k, h] * rows[slot_to_row[s], h]

topk_weights are optional. The first two are each other's adjoint; the third is the gradient of topk_weights.
`scatter_quantized` is scatter_rows without weights, quantised to fp8, equal bit for bit to `quantize`. Each kernel
writes an element once, without atomics. Slots whose row is at or past `group_offsets[-1]` were dropped: they scatter
zeros, and their rows are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import helion.language as hl
import torch

from moe_kernels.kernels.declare import is_empty, kernel
from moe_kernels.kernels.quantize import inverse, largest_of, plan_quantize, scale_of, scaled
from moe_kernels.rules import by_rows
from moe_kernels.rules import quantize as quantize_rules
from moe_kernels.rules.config import Config
from moe_kernels.runtime.plan import Builder, Operands
from moe_kernels.runtime.signature import FEW_TOKENS
from moe_kernels.runtime.symbolic import SymbolicTensor, most, needs_int64
from moe_kernels.scaled import scales_shape


@kernel()
def scatter_rows(
    rows: torch.Tensor,  # [R, H], written
    tokens: torch.Tensor,  # [T, H]
    topk_weights: torch.Tensor | None,  # [T, top_k]
    slot_to_row: torch.Tensor,  # [R] int32
    group_offsets: torch.Tensor,  # [E + 1] int32
    top_k: hl.constexpr,
) -> torch.Tensor:
    """One program per token and block of columns, which it reads once and writes top_k times."""
    hl.pdl_wait()
    T, H = tokens.size()
    E = group_offsets.size(0) - 1
    for tile_t, tile_h in hl.tile([T, H], block_size=[1, None]):
        t = tile_t.id + hl.zeros([], dtype=torch.int32)
        end = group_offsets[E]
        x = tokens[t.to(torch.int64), tile_h]
        for tile_k in hl.tile(top_k, block_size=1):
            row = slot_to_row[t * top_k + tile_k.id]
            y = x.to(torch.float32)
            if topk_weights is not None:
                y = y * topk_weights[t, tile_k.id].to(torch.float32)
            rows[row.to(torch.int64), tile_h] = torch.where(row < end, y.to(rows.dtype), 0.0)
    return rows


@kernel()
def scatter_quantized(
    data: torch.Tensor,  # [R, H] fp8, written
    scales: torch.Tensor,  # [R, parts], written
    tokens: torch.Tensor,  # [T, H]
    slot_to_row: torch.Tensor,  # [R] int32
    group_offsets: torch.Tensor,  # [E + 1] int32
    top_k: hl.constexpr,
    width: hl.constexpr,  # columns of a part
    largest: hl.constexpr,
) -> torch.Tensor:
    """One program per token and block of its parts, which it reads and quantises once, and writes top_k times."""
    hl.pdl_wait()
    T, H = tokens.size()
    E = group_offsets.size(0) - 1
    for tile_t, tile_p in hl.tile([T, scales.size(1)], block_size=[1, None]):
        t = tile_t.id + hl.zeros([], dtype=torch.int32)
        end = group_offsets[E]
        columns = (tile_p.index * width)[:, None] + hl.arange(width)[None, :]
        x = hl.load(tokens, [t.to(torch.int64), columns], extra_mask=columns < H)
        none = hl.zeros([tile_p], dtype=torch.int32)
        scale = scale_of(largest_of(x, none, 1), largest, False)
        y = scaled(x, inverse(scale)[:, None])
        for tile_k in hl.tile(top_k, block_size=1):
            row = slot_to_row[t * top_k + tile_k.id]
            r = row.to(torch.int64)
            hl.store(data, [r, columns], torch.where(row < end, y, 0.0).to(data.dtype), extra_mask=columns < H)
            scales[r, tile_p] = torch.where(row < end, scale, scale_of(none, largest, False))
    return data


@kernel()
def combine_rows(
    tokens: torch.Tensor,  # [T, H], written
    rows: torch.Tensor,  # [R, H]
    topk_weights: torch.Tensor | None,  # [T, top_k]
    slot_to_row: torch.Tensor,  # [R] int32
    group_offsets: torch.Tensor,  # [E + 1] int32
    top_k: hl.constexpr,
) -> torch.Tensor:
    """One program per token and block of columns, which adds up the token's top_k rows in float32."""
    hl.pdl_wait()
    T, H = tokens.size()
    E = group_offsets.size(0) - 1
    for tile_t, tile_h in hl.tile([T, H], block_size=[1, None]):
        t = tile_t.id + hl.zeros([], dtype=torch.int32)
        end = group_offsets[E]
        acc = hl.zeros([tile_h], dtype=torch.float32)
        for tile_k in hl.tile(top_k, block_size=1):
            row = slot_to_row[t * top_k + tile_k.id]
            y = hl.load(rows, [row.to(torch.int64), tile_h], extra_mask=row < end).to(torch.float32)
            if topk_weights is not None:
                y = torch.where(row < end, y * topk_weights[t, tile_k.id].to(torch.float32), 0.0)
            acc = acc + y
        tokens[t.to(torch.int64), tile_h] = acc.to(tokens.dtype)
    return tokens


@kernel()
def dot_rows(
    dots: torch.Tensor,  # [T, top_k], written
    tokens: torch.Tensor,  # [T, H]
    rows: torch.Tensor,  # [R, H]
    slot_to_row: torch.Tensor,  # [R] int32
    group_offsets: torch.Tensor,  # [E + 1] int32
    top_k: hl.constexpr,
) -> torch.Tensor:
    """One program per slot."""
    T, H = tokens.size()
    E = group_offsets.size(0) - 1
    for tile_t, tile_k in hl.tile([T, top_k], block_size=[1, 1]):
        t = tile_t.id + hl.zeros([], dtype=torch.int32)
        row = slot_to_row[t * top_k + tile_k.id]
        dot = hl.zeros([], dtype=torch.float32)
        if row < group_offsets[E]:
            for tile_h in hl.tile(H):
                x = tokens[t.to(torch.int64), tile_h].to(torch.float32)
                dot = dot + torch.sum(x * rows[row.to(torch.int64), tile_h].to(torch.float32))
        dots[t, tile_k.id] = dot.to(dots.dtype)
    return dots


def plan_scatter_rows(builder: Builder, tensors: Operands, options: tuple[int, torch.dtype]) -> SymbolicTensor:
    """Plan rows `[R, H]` from tokens `[T, H]`, topk_weights or None, slot_to_row and group_offsets."""
    (tokens, topk_weights, slot_to_row, group_offsets), (top_k, dtype) = tensors, options
    rows = builder.alloc((slot_to_row.size(0), tokens.size(1)), dtype)
    config = by_rows(tokens.size(1)).unrolled(0, top_k)
    _launch(builder, scatter_rows, (rows, tokens, topk_weights), slot_to_row, group_offsets, top_k, config)
    return rows


def scatter_scaled(
    builder: Builder,
    tokens: SymbolicTensor,  # [T, H]
    slot_to_row: SymbolicTensor,  # [R]
    group_offsets: SymbolicTensor,  # [E + 1]
    top_k: int,
    format: str,  # "rowwise" or "1x128"
) -> tuple[SymbolicTensor, SymbolicTensor]:
    """Return rows `[R, H]` in fp8 and their scales, as from `scatter_quantized`."""
    R, H = slot_to_row.size(0), tokens.size(1)
    if format == "rowwise" and H > quantize_rules.AT_ONCE:
        rows = plan_scatter_rows(builder, (tokens, None, slot_to_row, group_offsets), (top_k, tokens.dtype))
        return plan_quantize(builder, (rows,), (format, torch.float8_e4m3fn, False))
    data = builder.alloc((R, H), torch.float8_e4m3fn)
    scales = builder.alloc(scales_shape((R, H), format), torch.float32)
    parts = scales.size(1)
    width, largest = quantize_rules.width_of_part(H, parts), torch.finfo(data.dtype).max
    arguments = (data, scales, tokens, slot_to_row, group_offsets, top_k, width, largest)
    config = quantize_rules.parts_of_a_row(H, parts).unrolled(0, top_k)
    builder.launch(scatter_quantized, arguments, config, int64_index=needs_int64(data, scales, tokens))
    return data, scales


def plan_combine_rows(builder: Builder, tensors: Operands, options: tuple[int, torch.dtype]) -> SymbolicTensor:
    """Plan tokens `[T, H]` from rows `[R, H]`, topk_weights or None, slot_to_row and group_offsets."""
    (rows, topk_weights, slot_to_row, group_offsets), (top_k, dtype) = tensors, options
    tokens = builder.alloc((slot_to_row.size(0) // top_k, rows.size(1)), dtype)
    # Few tokens: more programs, of fewer columns each.
    block = 1024 if most(tokens.size(0)) > FEW_TOKENS else 256
    config = by_rows(rows.size(1), block).unrolled(0, top_k)
    _launch(builder, combine_rows, (tokens, rows, topk_weights), slot_to_row, group_offsets, top_k, config)
    return tokens


def plan_dot_rows(builder: Builder, tensors: Operands, options: tuple[int, torch.dtype]) -> SymbolicTensor:
    """Plan dots `[T, top_k]` from tokens `[T, H]`, rows `[R, H]`, slot_to_row and group_offsets."""
    tokens, rows, slot_to_row, group_offsets = tensors
    top_k, dtype = options
    dots = builder.alloc((tokens.size(0), top_k), dtype)
    config = by_rows(tokens.size(1))
    _launch(builder, dot_rows, (dots, tokens, rows), slot_to_row, group_offsets, top_k, config)
    return dots


def _launch(
    builder: Builder,
    kernel: Any,
    tensors: Sequence[SymbolicTensor | None],  # the kernel's leading arguments
    slot_to_row: SymbolicTensor,
    group_offsets: SymbolicTensor,
    top_k: int,
    config: Config,
) -> None:
    """Launch `kernel`, which writes the first of `tensors`; fill that with zeros if a tensor is empty."""
    given = [x for x in tensors if x is not None]
    if any(is_empty(x) for x in given):
        builder.zero(given[0])
        return
    arguments = (*tensors, slot_to_row, group_offsets, top_k)
    builder.launch(kernel, arguments, config, int64_index=needs_int64(*given))
