"""Jagged grouped GEMM of fp8 operands with scales: `out[rows of g] = A[rows of g] @ B[g] (+ bias[g])`.

Groups and tiles are those of `grouped_gemm`. Both operands are contracted along their last dimension, which fp8 tensor
cores require: A `[M, K]`, B `[G, N, K]`. There are two formats of scales:

    rowwise        out = (A.data @ B.data^T) * scales_A[m] * scales_B[g, n]
    block-scaled   out = sum over k of (A.data[:, block k] @ B.data[g, :, block k]^T) * scales_A[m, k] *
                   scales_B[g, n // 128, k], for blocks of 128

Tensor cores accumulate products of fp8 in fewer bits than float32 has. So the sum of each block of K is added to the
accumulator outside the tensor cores, in float32: always with block scales, and with rowwise scales unless `fast`.
`inline_ptx`, for NVIDIA GPUs, writes that addition as PTX instructions.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import helion.language as hl
import torch
from torch import Tensor

from moe_kernels import rules
from moe_kernels.kernels.declare import jagged_fields, kernel, whole_blocks, written_without_kernel
from moe_kernels.kernels.grouped_gemm_tails import load_rows
from moe_kernels.kernels.inline import BY_ROW, biased, int32, numbered_row, skip_regions, unmasked
from moe_kernels.kernels.row_major import LONG, row_major, weights_row_major
from moe_kernels.kernels.tiles import listed, plan_table, store_rows, tile_count, tile_numbers, windows
from moe_kernels.rules import scaled as scaled_rules
from moe_kernels.rules.config import Config
from moe_kernels.runtime.plan import Builder, Operands
from moe_kernels.runtime.symbolic import SymbolicTensor
from moe_kernels.scaled import BLOCK


def _preset(variant: str, fast: bool, *arguments: Any) -> Config:
    """Return the rule's config without TMA, for direct calls of the kernels."""
    A, _, B, scales_B, *others = arguments
    bias, out = others[1:3] if variant == "basic" else others[2:4]  # after group_offsets, or tiles and num_tiles
    problem = scaled_rules.Problem(
        rows=rules.floor_power_of_2(A.size(0) // B.size(0)),
        M=rules.floor_power_of_2(A.size(0)),
        N=B.size(1),
        K=A.size(1),
        G=B.size(0),
        block_scaled=scales_B.shape[1:] != (B.size(1), 1),
        fast=fast,
        out_dtype=out.dtype,
        has_bias=bias is not None,
    )
    return scaled_rules.rule(problem, variant).config


def dot(a: Tensor, b: Tensor, acc: Tensor) -> Tensor:
    """Return acc + a @ b, added by the tensor cores. Helion has no product of two different fp8 types."""
    return hl.inline_triton("tl.dot({0}, {1}, acc={2})", args=(a, b, acc), output_like=acc)


def product_of(a: Tensor, b: Tensor, like: Tensor) -> Tensor:
    """Return a @ b in float32, shaped as `like`."""
    return hl.inline_triton("tl.dot({0}, {1})", args=(a, b), output_like=like)


def add_product(a: Tensor, b: Tensor, acc: Tensor, inline_ptx: bool) -> Tensor:
    """Return acc + a @ b, added outside the tensor cores by instructions that Triton cannot fuse into the product."""
    product = product_of(a, b, acc)
    if not inline_ptx:
        return acc + product
    return hl.inline_triton(
        """tl.inline_asm_elementwise(
    "add.rn.f32 $0, $1, $2;", "=f,f,f", [{0}, {1}], dtype=tl.float32, is_pure=False, pack=1)""",
        args=(product, acc),
        output_like=acc,
    )


def scaled_sum(product: Tensor, scale: Tensor, acc: Tensor, inline_ptx: bool) -> Tensor:
    """Return acc + product * scale, by instructions the compiler does not move: they free the product's registers."""
    if not inline_ptx:
        return acc + product * scale
    return hl.inline_triton(
        """tl.inline_asm_elementwise(
    "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [{0}, {1}, {2}], dtype=tl.float32, is_pure=False, pack=1)""",
        args=(product, scale, acc),
        output_like=acc,
    )


@kernel(partial(_preset, "basic", False))
def scaled_jagged(
    A: Tensor,  # [M, K] fp8
    scales_A: Tensor,  # [M, 1] fp32, or [M, cdiv(K, 128)] if `block_scaled`
    B: Tensor,  # [G, N, K] fp8, or [1, N, K] if `shared`
    scales_B: Tensor,  # [G, N, 1] fp32, or [G, cdiv(N, 128), cdiv(K, 128)] if `block_scaled`; [1, ..] if `shared`
    group_offsets: Tensor,  # [G + 1]
    bias: Tensor | None,  # [G, N]
    out: Tensor,  # [M, N]
    max_tiles: int,
    numbering: int,
    shared: hl.constexpr,  # all groups share one B
    block_scaled: hl.constexpr,
    fast: hl.constexpr,
    inline_ptx: hl.constexpr,
    tma_A: hl.constexpr,  # A is read by TMA, which returns zeros for rows outside A
) -> Tensor:
    """For few rows per group: a grid over tiles and columns, as `jagged`.

    Tiles of the result are computed transposed: WGMMA needs 64 rows in the left operand, which a weight has.
    """
    hl.pdl_launch_dependents()
    hl.pdl_wait()
    K = A.size(1)
    N = out.size(1)
    G = group_offsets.size(0) - 1
    block_m = hl.register_block_size(16, 128)
    for tile_i, tile_n in hl.tile([max_tiles, N], block_size=[1, None]):
        region = hl.zeros([], dtype=torch.int32)
        M = int32(out.size(0), region)
        by_row = int32(numbering, region) == BY_ROW
        tile = tile_i.id + region
        start = hl.zeros([], dtype=torch.int32)
        end = M
        previous = hl.zeros([], dtype=torch.int32)
        for tile_g in hl.tile(G + 1):
            region, start, end, previous = skip_regions(
                (region, start, end, previous), group_offsets, tile_g.index, G, M, tile, by_row, block_m
            )
        row0 = numbered_row(tile, region, start, end, by_row, block_m)
        if row0 < end:
            acc = hl.zeros([tile_n, block_m], dtype=torch.float32)
            rows = row0.to(torch.int64) + hl.arange(block_m)
            inside = rows < end
            if (region >= 1) & (region <= G):
                group = (region - 1).to(torch.int64)
                weight = group * (not shared)
                n_block = tile_n.begin // 128
                for tile_k in hl.tile(K):
                    a = load_rows(A, row0, end, tile_k, block_m, tma_A)
                    b = B[weight, tile_n, tile_k]
                    if block_scaled:
                        scale_a = hl.load(scales_A, [rows, tile_k.id], extra_mask=inside)
                        scale_b = scales_B[weight, n_block, tile_k.id]
                        acc = acc + product_of(b, a.T, acc) * (scale_a * scale_b)[None, :]
                    elif fast:
                        acc = dot(b, a.T, acc)
                    else:
                        acc = add_product(b, a.T, acc, inline_ptx)
                if not block_scaled:
                    scale_a = hl.load(scales_A, [rows, 0], extra_mask=inside)
                    acc = acc * scale_a[None, :] * scales_B[weight, tile_n, 0][:, None]
                if bias is not None:
                    acc = acc + bias[group, tile_n].to(torch.float32)[:, None]
            hl.store(out, [rows, tile_n], acc.T.to(out.dtype), extra_mask=inside[:, None])
    return out


@kernel(partial(_preset, "persistent", True))
def fast_persistent(
    A: Tensor,  # [M, K] fp8
    scales_A: Tensor,  # [M, 1] fp32
    B: Tensor,  # [G, N, K] fp8, or [1, N, K] if `shared`
    scales_B: Tensor,  # [G, N, 1] fp32, or [1, N, 1] if `shared`
    tiles: Tensor,  # [1 + max_tiles, 3] int32, of tile_table
    num_tiles: Tensor,  # [] int32: tiles[0, 0]
    bias: Tensor | None,  # [G, N]
    out: Tensor,  # [M, N], or `windows` of it if `tma_out`
    shared: hl.constexpr,
    block_m: hl.constexpr,  # rows of a tile of `tiles`
    tma_A: hl.constexpr,
    tma_out: hl.constexpr,  # out is written by TMA, which skips rows past the end of a window
) -> Tensor:
    """For many rows per group and `fast`: one program per SM walks the listed tiles, as `jagged_persistent`."""
    K = A.size(1)
    N = out.size(1)
    hl.pdl_wait()
    for tile_t, tile_n in hl.tile([num_tiles, N], block_size=[1, None]):
        group, row0, end = listed(tiles, tile_t.id + 1)
        weight = group * (not shared)
        rows = row0.to(torch.int64) + hl.arange(block_m)
        acc = hl.zeros([block_m, tile_n], dtype=torch.float32)
        for tile_k in hl.tile(K):
            a = load_rows(A, row0, end, tile_k, block_m, tma_A)
            acc = dot(a, B[weight, tile_n, tile_k].T, acc)
        scale_a = hl.load(scales_A, [rows, 0], extra_mask=rows < end)
        acc = acc * scale_a[:, None] * scales_B[weight, tile_n, 0][None, :]
        acc = biased(acc, bias, group, tile_n)
        store_rows(out, row0, end, tile_n, acc, tma_out)
    return out


@kernel(partial(_preset, "persistent", False))
def promoted_persistent(
    A: Tensor,  # [M, K] fp8
    scales_A: Tensor,  # [M, 1] fp32, or [M, cdiv(K, 128)] if `block_scaled`
    B: Tensor,  # [G, N, K] fp8, or [1, N, K] if `shared`
    scales_B: Tensor,  # [G, N, 1] fp32, or [G, cdiv(N, 128), cdiv(K, 128)] if `block_scaled`; [1, ..] if `shared`
    tiles: Tensor,  # [1 + max_tiles, 3] int32, of tile_table for 2 * half rows
    num_tiles: Tensor,  # [] int32: tiles[0, 0]
    bias: Tensor | None,  # [G, N]
    out: Tensor,  # [M, N]
    shared: hl.constexpr,
    half: hl.constexpr,  # rows of half a tile
    block_scaled: hl.constexpr,
    inline_ptx: hl.constexpr,
    tma_A: hl.constexpr,
) -> Tensor:
    """For many rows per group without `fast`: two programs per SM, one of which multiplies while the other adds.

    A tile is multiplied in two halves of its rows, so that products that are not yet added take half the registers.
    Block scales are loaded one step ahead.
    """
    K = A.size(1)
    N = out.size(1)
    steps = (K + 127) // 128
    hl.pdl_wait()
    for tile_t, tile_n in hl.tile([num_tiles, N], block_size=[1, None]):
        group, row0, end = listed(tiles, tile_t.id + 1)
        weight = group * (not shared)
        upper = row0.to(torch.int64) + hl.arange(half)
        lower = row0.to(torch.int64) + half + hl.arange(half)
        # Rows past the end are not stored; they use the scale of row0, which exists.
        upper_scaled = torch.where(upper < end, upper, row0)
        lower_scaled = torch.where(lower < end, lower, row0)
        acc_upper = hl.zeros([half, tile_n], dtype=torch.float32)
        acc_lower = hl.zeros([half, tile_n], dtype=torch.float32)
        n_block = tile_n.begin // 128
        if block_scaled:
            next_upper = hl.load(scales_A, [upper_scaled, 0])
            next_lower = hl.load(scales_A, [lower_scaled, 0])
            next_b = scales_B[weight, n_block, 0]
        for tile_k in hl.tile(K, block_size=128):
            b = B[weight, tile_n, tile_k].T
            if tma_A:
                a_upper = unmasked(hl.load(A, [row0 + hl.arange(half), tile_k]))
                a_lower = unmasked(hl.load(A, [row0 + half + hl.arange(half), tile_k]))
            else:
                a_upper = hl.load(A, [upper, tile_k], extra_mask=(upper < end)[:, None])
                a_lower = hl.load(A, [lower, tile_k], extra_mask=(lower < end)[:, None])
            if block_scaled:
                step = hl.zeros([], dtype=torch.int32) + (tile_k.id + 1)
                step = torch.where(step < steps, step, 0)
                scale_upper = (next_upper * next_b)[:, None]
                scale_lower = (next_lower * next_b)[:, None]
                next_upper = hl.load(scales_A, [upper_scaled, step])
                next_lower = hl.load(scales_A, [lower_scaled, step])
                next_b = scales_B[weight, n_block, step]
                acc_upper = scaled_sum(product_of(a_upper, b, acc_upper), scale_upper, acc_upper, inline_ptx)
                acc_lower = scaled_sum(product_of(a_lower, b, acc_lower), scale_lower, acc_lower, inline_ptx)
            else:
                acc_upper = add_product(a_upper, b, acc_upper, inline_ptx)
                acc_lower = add_product(a_lower, b, acc_lower, inline_ptx)
        if not block_scaled:
            scale_b = scales_B[weight, tile_n, 0][None, :]
            acc_upper = acc_upper * hl.load(scales_A, [upper_scaled, 0])[:, None] * scale_b
            acc_lower = acc_lower * hl.load(scales_A, [lower_scaled, 0])[:, None] * scale_b
        if bias is not None:
            added = bias[group, tile_n].to(torch.float32)[None, :]
            acc_upper = acc_upper + added
            acc_lower = acc_lower + added
        hl.store(out, [upper, tile_n], acc_upper.to(out.dtype), extra_mask=(upper < end)[:, None])
        hl.store(out, [lower, tile_n], acc_lower.to(out.dtype), extra_mask=(lower < end)[:, None])
    return out


def plan_scaled_grouped_gemm(
    builder: Builder, tensors: Operands, options: tuple[torch.dtype, str, bool]
) -> SymbolicTensor:
    """Plan the product of A `[M, K]`, B `[G, K, N]` or `[K, N]`, their scales, group_offsets and a bias or None.

    A and B are contiguous along K: the layout of B is `[G, N, K]`. The scales of A are as in `multiply`.
    """
    A, scales_A, B, scales_B, group_offsets, bias = tensors
    dtype, variant, fast = options
    out = builder.alloc((A.size(0), B.size(-1)), dtype)
    if B.dim() == 2:
        B, scales_B = B.unsqueeze(0), scales_B.unsqueeze(0)
    multiply(builder, A, scales_A, B.mT, scales_B.mT, group_offsets, bias, out, variant, fast)
    return out


def multiply(
    builder: Builder,
    A: SymbolicTensor,  # [M, K]
    scales_A: SymbolicTensor,  # [M, 1], or [M, cdiv(K, 128)], or 1-D if these are column-major
    B: SymbolicTensor,  # [G, N, K], or [1, N, K] if all groups share one
    scales_B: SymbolicTensor,  # [G, N, 1] or [G, cdiv(N, 128), cdiv(K, 128)]; [1, ..] with a shared B
    group_offsets: SymbolicTensor,  # [G + 1]
    bias: SymbolicTensor | None,  # [G, N]
    out: SymbolicTensor,  # [M, N]
    variant: str = "auto",  # or "basic" or "persistent"
    fast: bool = False,
) -> None:
    """Write the jagged product to `out`."""
    (M, K), N, G = A.shape, out.size(1), group_offsets.size(0) - 1
    if written_without_kernel(builder, out, G == 0 or (K == 0 and bias is None)):
        return
    if scales_A.dim() == 1:
        scales_A = scales_A.as_strided((M, -(-K // BLOCK)), (1, M), 0)
    shared = B.size(0) == 1
    (A,) = row_major(builder, A, shortest=LONG)
    B = weights_row_major(builder, A, B, G)
    B, scales_B = replace(B, few_groups=True), replace(scales_B, few_groups=True)
    problem = scaled_rules.Problem(
        N=N,
        K=K,
        G=G,
        block_scaled=scales_B.shape[1:] != (N, 1),
        fast=fast,
        out_dtype=out.dtype,
        has_bias=bias is not None,
        multiprocessors=builder.gpu.multiprocessors,
        **jagged_fields(builder.gpu, A, [B], [out], group_offsets, bias, scales_A, scales_B),
    )
    choice = scaled_rules.rule(problem, variant)
    block_m = choice.block_m
    tma_A, tma_B, tma_out, int64_index = choice.addressing
    if tma_A or tma_B:
        A, B, out = whole_blocks(replace(A, tma_clipped=tma_A)), whole_blocks(B), whole_blocks(out)
    operands, inline_ptx = (A, scales_A, B, scales_B), builder.gpu.backend == "cuda"
    if choice.variant == "basic":
        numbers = tile_numbers(M, G, block_m, problem.rows == 0)
        constants = (shared, problem.block_scaled, fast, inline_ptx, tma_A)
        arguments = (*operands, group_offsets, bias, out, *numbers, *constants)
        builder.launch(scaled_jagged, arguments, choice.config, int64_index=int64_index)
        return
    tiles = plan_table(builder, group_offsets, out, block_m)
    listed = (*operands, tiles, tile_count(tiles), bias)
    if fast:
        arguments = (*listed, windows(out, block_m) if tma_out else out, shared, block_m, tma_A, tma_out)
        builder.launch(fast_persistent, arguments, choice.config, int64_index=int64_index)
    else:
        arguments = (*listed, out, shared, block_m // 2, problem.block_scaled, inline_ptx, tma_A)
        builder.launch(promoted_persistent, arguments, choice.config, int64_index=int64_index)
