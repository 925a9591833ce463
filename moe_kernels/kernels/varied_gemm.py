"""Varied grouped GEMM: `out[p] = A[p] @ B[p]`, where each problem has its own sizes, strides and addresses.

A fixed number of workers computes the tiles of all problems, in order: worker w of W takes tiles w, w + W, ... A table
on the device gives each problem's tiles and memory layout. Its addresses are relative to the first non-empty tensor of
each list, so that ordinary loads reach all tensors.
"""

from __future__ import annotations

from typing import Any

import helion.language as hl
import torch
from torch import Tensor

from moe_kernels import rules
from moe_kernels.kernels.declare import kernel
from moe_kernels.rules import varied as varied_rules
from moe_kernels.rules.config import Config
from moe_kernels.runtime.plan import Builder, Operands
from moe_kernels.runtime.symbolic import SymbolicTensor


def _preset(
    ends: torch.Tensor, num_tiles: Any, table: Any, A: torch.Tensor, B: Any, out: Any, *constants: Any
) -> Config:
    *_, block_m, block_n = constants
    return varied_rules.make(ends.size(0), block_m, block_n, varied_rules.BLOCK_K[A.element_size()], 4, 3, 1).config


def _quotient(a: Tensor, b: Tensor) -> Tensor:
    """As `inline.divide`, but cast in the same expression, since Triton may count in 64 bits here."""
    return hl.inline_triton("({0} // {1}).to(tl.int32)", args=(a, b), output_like=a)


@kernel(_preset)
def varied(
    ends: Tensor,  # [P] int64: inclusive prefix sum of the problems' numbers of tiles
    num_tiles: Tensor,  # [] int64: ends[P - 1]
    table: Tensor,  # [P, 16] int64: M, N, K, first tile, tiles per row; start and two strides of A, of B, of out; 0, 0
    A: Tensor,  # [_]: addresses of A[p] are relative to its first element; the same for B and out
    B: Tensor,
    out: Tensor,
    contiguous_a: hl.constexpr,
    contiguous_b: hl.constexpr,
    contiguous_c: hl.constexpr,
    unit_a: hl.constexpr,
    unit_b: hl.constexpr,
    unit_c: hl.constexpr,
    unit_m: hl.constexpr,
    unit_n: hl.constexpr,
    unit_k: hl.constexpr,
    block_m: hl.constexpr,
    block_n: hl.constexpr,
) -> Tensor:
    """One or a few workers per SM; each finds a tile's problem by counting the problems that end before it.

    The next launch may begin before this one ends, and waits for it.
    """
    hl.pdl_launch_dependents()
    hl.pdl_wait()
    P = ends.size(0)
    for tile_t in hl.tile(num_tiles, block_size=1):
        p = hl.zeros([], dtype=torch.int32)
        t = (tile_t.begin + p).to(torch.int32)
        for tile_p in hl.tile(P):
            before = (ends[tile_p] <= t) & (tile_p.index < P)
            p = p + torch.sum(before.to(torch.int32), dtype=torch.int32)
        M = (table[p, 0] * unit_m).to(torch.int32)
        N = (table[p, 1] * unit_n).to(torch.int32)
        K = (table[p, 2] * unit_k).to(torch.int32)
        tiles_n = table[p, 4].to(torch.int32)
        local = t - table[p, 3].to(torch.int32)
        tile_m = _quotient(local, tiles_n)
        tile_n = local - tile_m * tiles_n
        a0 = table[p, 5] * unit_a
        b0 = table[p, 8] * unit_b
        c0 = table[p, 11] * unit_c
        rows = (tile_m * block_m + hl.arange(block_m)).to(torch.int64)
        columns = (tile_n * block_n + hl.arange(block_n)).to(torch.int64)
        # Units are 1 where no dimension is contiguous.
        if contiguous_a == 0:
            a_rows = a0 + rows
        else:
            a_rows = a0 + rows * (table[p, 6] * unit_a)
        a_stride = table[p, 7] * unit_a
        if contiguous_b == 1:
            b_columns = b0 + columns
        else:
            b_columns = b0 + columns * (table[p, 10] * unit_b)
        b_stride = table[p, 9] * unit_b
        acc = hl.zeros([block_m, block_n], dtype=torch.float32)
        for tile_k in hl.tile(K):
            k = tile_k.index.to(torch.int64)
            if contiguous_a == 1:
                a_at = a_rows[:, None] + k[None, :]
            else:
                a_at = a_rows[:, None] + k[None, :] * a_stride
            if contiguous_b == 0:
                b_at = k[:, None] + b_columns[None, :]
            else:
                b_at = k[:, None] * b_stride + b_columns[None, :]
            a = hl.load(A, [a_at], extra_mask=(rows < M)[:, None])
            b = hl.load(B, [b_at], extra_mask=(columns < N)[None, :])
            acc = hl.dot(a, b, acc=acc)
        if contiguous_c == 1:
            c_at = c0 + rows[:, None] * (table[p, 12] * unit_c) + columns[None, :]
        elif contiguous_c == 0:
            c_at = c0 + rows[:, None] + columns[None, :] * (table[p, 13] * unit_c)
        else:
            c_at = c0 + rows[:, None] * table[p, 12] + columns[None, :] * table[p, 13]
        hl.store(out, [c_at], acc.to(out.dtype), extra_mask=(rows < M)[:, None] & (columns < N)[None, :])
    return out


def plan_varied(
    builder: Builder, tensors: Operands, options: tuple[varied_rules.Layout, int, int, Config]
) -> tuple[SymbolicTensor, ...]:
    """Plan the launch for ends `[P]`, num_tiles `[]`, table `[P, 16]`, and the address bases A, B and out `[_]`."""
    layout, block_m, block_n, config = options
    ends, num_tiles, table, *bases = tensors
    arguments = (ends, num_tiles, table, *bases, *layout, block_m, block_n)
    dtype = bases[0].dtype
    precision = varied_rules.precision_of(dtype, rules.tf32_allowed(dtype), layout.contiguous_b == 0, builder.gpu)
    builder.launch(varied, arguments, config, int64_index=True, precision=precision)
    return ()
