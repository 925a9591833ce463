"""Jagged grouped GEMM: `out[rows of g] = A_packed[rows of g] @ B[g] (+ bias[g])`.

The rows of group g are `group_offsets[g]:group_offsets[g + 1]`, with the offsets read as
clamp(cummax(group_offsets), 0, M). They divide the rows into G + 2 regions: region 0 precedes the first group, region
r is group r - 1, and region G + 1 follows the last group. Rows of the two outer regions are set to zero.

A tile is a run of at most `block_m` rows of one region. Region r's first tile has number `start_r // block_m + r`,
which leaves room for a partly filled last tile in every region. So a program finds its rows from the offsets alone, and
the host bounds the number of tiles by M and G without reading an offset.
"""

from __future__ import annotations

from dataclasses import replace

import helion.language as hl
import torch

from moe_kernels import rules
from moe_kernels.kernels import grouped_gemm_tails, grouped_gemm_tall
from moe_kernels.kernels.declare import jagged_fields, kernel, left_operand, whole_blocks, written_without_kernel
from moe_kernels.kernels.grouped_gemm_tails import load_rows
from moe_kernels.kernels.inline import BY_ROW, biased, block_of, int32, numbered_row, skip_regions, unmasked
from moe_kernels.kernels.row_major import LONG, row_major, weights_row_major
from moe_kernels.kernels.tiles import listed, plan_table, store_rows, tile_count, tile_numbers, windows
from moe_kernels.rules import grouped as grouped_rules
from moe_kernels.rules.config import Config
from moe_kernels.runtime.plan import Builder, Operands
from moe_kernels.runtime.symbolic import SymbolicTensor, lies_transposed, most, needs_int64

_PREPEND_CONFIG = Config(block_sizes=[256], num_warps=4)


def _preset(
    variant: str, A: torch.Tensor, B: torch.Tensor, G: int, bias: torch.Tensor | None, out: torch.Tensor
) -> Config:
    """The rule's config without TMA, for direct calls of the kernels."""
    M, K = A.shape
    dtype = torch.promote_types(A.dtype, B.dtype)
    by_pointers = grouped_rules.Problem(
        rows=rules.floor_power_of_2(M // G),
        M=rules.floor_power_of_2(M),
        N=out.size(1),
        K=K,
        G=G,
        dtype=dtype,
        tf32=rules.tf32_allowed(dtype),
        has_bias=bias is not None,
    )
    return grouped_rules.rule(by_pointers, variant).config


@kernel(lambda A, B, group_offsets, bias, out, *_: _preset("basic", A, B, group_offsets.size(0) - 1, bias, out))
def jagged(
    A_packed: torch.Tensor,  # [M, K]
    B: torch.Tensor,  # [G, K, N], or [1, K, N] if `shared`; [_, N, K] if `transposed`
    group_offsets: torch.Tensor,  # [G + 1]
    bias: torch.Tensor | None,  # [G, N]
    out: torch.Tensor,  # [M, N]
    max_tiles: int,  # at least the number of tiles
    numbering: int,  # BY_REGION, or BY_ROW, which needs fewer max_tiles if M < G
    shared: hl.constexpr,  # all groups have the same weight
    transposed: hl.constexpr,
    mask_rows: hl.constexpr,  # False reads A in whole tiles, which needs M >= block_m
) -> torch.Tensor:
    """Grid over tiles and columns; each program finds its group by counting the offsets before its tile."""
    hl.pdl_launch_dependents()
    hl.pdl_wait()
    K = A_packed.size(1)
    N = out.size(1)
    G = group_offsets.size(0) - 1
    block_m = hl.register_block_size(16, 128)
    dtype = torch.promote_types(A_packed.dtype, B.dtype)
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
            acc = hl.zeros([block_m, tile_n], dtype=torch.float32)
            load0 = row0
            if not mask_rows:
                load0 = torch.minimum(row0, M - block_m)
            rows = load0.to(torch.int64) + hl.arange(block_m)
            if (region >= 1) & (region <= G):
                group = (region - 1).to(torch.int64)
                weight = group * (not shared)
                for tile_k in hl.tile(K):
                    if mask_rows:
                        a = hl.load(A_packed, [rows, tile_k], extra_mask=(rows < end)[:, None])
                    else:
                        a = unmasked(hl.load(A_packed, [load0 + hl.arange(block_m), tile_k]))
                    b = block_of(B, weight, tile_k, tile_n, transposed)
                    acc = hl.dot(a.to(dtype), b.to(dtype), acc=acc)
                acc = biased(acc, bias, group, tile_n)
            inside = (rows >= row0) & (rows < end)
            hl.store(out, [rows, tile_n], acc.to(out.dtype), extra_mask=inside[:, None])
    return out


@kernel(lambda A, B, tiles, num_tiles, bias, out, *_: _preset("persistent", A, B, B.size(0), bias, out))
def jagged_persistent(
    A_packed: torch.Tensor,  # [M, K]
    B: torch.Tensor,  # [G, K, N], or [1, K, N] if `shared`; [_, N, K] if `transposed`
    tiles: torch.Tensor,  # [1 + max_tiles, 3] int32, from tile_table
    num_tiles: torch.Tensor,  # [] int32: tiles[0, 0]
    bias: torch.Tensor | None,  # [G, N]
    out: torch.Tensor,  # [M, N], or `windows` of it if `tma_out`
    shared: hl.constexpr,  # all groups have the same weight
    transposed: hl.constexpr,
    block_m: hl.constexpr,  # the tile height of `tiles`
    tma_A: hl.constexpr,  # A_packed is read by TMA, which returns zeros past its last row
    tma_out: hl.constexpr,  # out is written by TMA, which drops rows past the end of a window
) -> torch.Tensor:
    """One program per SM, which takes every num_SM-th listed tile, so that any group sizes give a balanced load."""
    K = A_packed.size(1)
    N = out.size(1)
    dtype = torch.promote_types(A_packed.dtype, B.dtype)
    hl.pdl_wait()  # launched while tile_table still runs
    for tile_t, tile_n in hl.tile([num_tiles, N], block_size=[1, None]):
        group, row0, end = listed(tiles, tile_t.id + 1)
        weight = group * (not shared)
        acc = hl.zeros([block_m, tile_n], dtype=torch.float32)
        for tile_k in hl.tile(K):
            a = load_rows(A_packed, row0, end, tile_k, block_m, tma_A)
            b = block_of(B, weight, tile_k, tile_n, transposed)
            acc = hl.dot(a.to(dtype), b.to(dtype), acc=acc)
        acc = biased(acc, bias, group, tile_n)
        store_rows(out, row0, end, tile_n, acc, tma_out)
    return out


@kernel()
def prepend_zero(
    offs: torch.Tensor,  # [G]
    group_offsets: torch.Tensor,  # [G + 1]
) -> torch.Tensor:
    """group_offsets = 0, *offs."""
    hl.pdl_launch_dependents()
    hl.pdl_wait()
    for tile_g in hl.tile(group_offsets.size(0)):
        group_offsets[tile_g] = hl.load(offs, [tile_g.index - 1], extra_mask=tile_g.index > 0)
    return group_offsets


def plan_grouped_mm(builder: Builder, tensors: Operands, options: tuple[torch.dtype, str]) -> SymbolicTensor:
    """Plan `grouped_gemm` with PyTorch's `offs [G]` instead of group_offsets."""
    mat_a, mat_b, offs, bias = tensors
    group_offsets = builder.alloc((offs.size(0) + 1,), offs.dtype)
    builder.launch(prepend_zero, (offs, group_offsets), _PREPEND_CONFIG, int64_index=needs_int64(offs))
    return plan_grouped_gemm(builder, (mat_a, mat_b, group_offsets, bias), options)


def plan_grouped_gemm(builder: Builder, tensors: Operands, options: tuple[torch.dtype, str]) -> SymbolicTensor:
    """Plan the product of A_packed `[M, K]`, B `[G, K, N]` or `[K, N]`, group_offsets and a bias `[G, N]` or None."""
    A_packed, B, group_offsets, bias = tensors
    dtype, variant = options
    out = builder.alloc((A_packed.size(0), B.size(-1)), dtype)
    shared = B.dim() == 2 or B.size(0) == 1
    one_dtype = A_packed.dtype == B.dtype == dtype
    whole = most(A_packed.size(0)) and out.size(1) and A_packed.size(1) and group_offsets.size(0) > 1
    if variant == "auto" and shared and bias is None and one_dtype and whole and builder.gpu.backend != "interpreter":
        # One weight for all groups: one dense product of all rows, then zeros in the rows outside all groups.
        builder.call("mm", (A_packed, B), out)
        plan_table(builder, group_offsets, out, 128)
    else:
        multiply(builder, A_packed, B if B.dim() == 3 else B.unsqueeze(0), group_offsets, bias, out, variant)
    return out


def multiply(
    builder: Builder,
    A_packed: SymbolicTensor,  # [M, K]
    B: SymbolicTensor,  # [G, K, N], or [1, K, N] for one weight that all groups share
    group_offsets: SymbolicTensor,  # [G + 1]
    bias: SymbolicTensor | None,  # [G, N]
    out: SymbolicTensor,  # [M, N]
    variant: str = "auto",  # or "basic" or "persistent"
) -> None:
    """Write the jagged product to `out`."""
    (M, K), G = A_packed.shape, group_offsets.size(0) - 1
    if written_without_kernel(builder, out, G == 0 or (K == 0 and bias is None)):
        return
    (A_packed,) = row_major(builder, left_operand(builder, A_packed, B.dtype), shortest=LONG)
    shared, transposed = B.size(0) == 1, lies_transposed(B)
    B = weights_row_major(builder, A_packed, B.transpose(1, 2) if transposed else B, G)
    B = replace(B, few_groups=True)
    problem = _problem(builder, A_packed, B, group_offsets, bias, out, transposed)
    choice = grouped_rules.choose(problem, variant)
    if choice.variant in ("tails", "tall"):
        kernel_file = grouped_gemm_tails if choice.variant == "tails" else grouped_gemm_tall
        kernel_file.multiply(builder, choice, A_packed, B, group_offsets, bias, out, problem)
        return
    block_m = choice.block_m
    tma_A, tma_B, tma_out, int64_index = choice.addressing
    if tma_A or tma_B:
        A_packed, B, out = whole_blocks(A_packed), whole_blocks(B), whole_blocks(out)
    if choice.variant == "basic":
        numbers = tile_numbers(M, G, block_m, problem.rows == 0)
        arguments = (A_packed, B, group_offsets, bias, out, *numbers, shared, transposed, not tma_A)
        builder.launch(jagged, arguments, choice.config, int64_index=int64_index, precision=problem.precision)
        return
    tiles = plan_table(builder, group_offsets, out, block_m)
    if tma_A:
        A_packed = replace(A_packed, tma_clipped=True)
    if tma_out:
        out = windows(out, block_m)
    arguments = (A_packed, B, tiles, tile_count(tiles), bias, out, shared, transposed, block_m, tma_A, tma_out)
    builder.launch(jagged_persistent, arguments, choice.config, int64_index=int64_index, precision=problem.precision)


def _problem(
    builder: Builder,
    A_packed: SymbolicTensor,
    B: SymbolicTensor,  # [_, N, K] if `transposed`, otherwise [_, K, N]
    group_offsets: SymbolicTensor,
    bias: SymbolicTensor | None,
    out: SymbolicTensor,
    transposed: bool,
) -> grouped_rules.Problem:
    dtype, gpu = torch.promote_types(A_packed.dtype, B.dtype), builder.gpu
    return grouped_rules.Problem(
        N=out.size(1),
        K=A_packed.size(1),
        G=group_offsets.size(0) - 1,
        dtype=dtype,
        tf32=rules.tf32_allowed(dtype),
        has_bias=bias is not None,
        transposed=transposed,
        out_dtype=None if out.dtype == dtype else out.dtype,
        gpu=gpu,
        **jagged_fields(gpu, A_packed, [B], [out], group_offsets, bias),
    )
