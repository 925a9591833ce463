"""Uniform grouped GEMM: `out[g] = A[g] @ B[g]`, all groups of the same sizes.

One launch has a grid over (group, rows, columns). If tiles fill the groups exactly, `uniform_folded` stacks the groups
along the rows of one matrix. Otherwise `uniform` uses the group as a coordinate of 3-D descriptors: TMA clips a tile
that exceeds its group, so rows of the next group are not read.
"""

from __future__ import annotations

from typing import Any

import helion.language as hl
import torch

from moe_kernels import rules
from moe_kernels.kernels.declare import kernel, left_operand, tma_readable, whole_blocks
from moe_kernels.kernels.inline import block_of, unmasked
from moe_kernels.rules import uniform as uniform_rules
from moe_kernels.rules.config import Config
from moe_kernels.runtime.plan import Builder, Operands
from moe_kernels.runtime.symbolic import SymbolicTensor, lies_transposed, needs_int64
from moe_kernels.runtime.targets import INTERPRETER


def _preset(A: torch.Tensor, B: torch.Tensor, out: torch.Tensor, N: int, K: int, *_: Any) -> Config:
    a, b, o = (SymbolicTensor(0, x.dtype, tuple(x.shape), x.stride(), aligned=False) for x in (A, B, out))
    return uniform_rules.by_kernel(_problem(Builder(INTERPRETER, ()), a, b, o, N, K, False, False)).config


@kernel(lambda A, B, out, G, M, *layout: _preset(A, B, out.view(G, M, out.size(1)), *layout))
def uniform_folded(
    A: torch.Tensor,  # [G * M, K], or [G * K, M] if `a_columns`
    B: torch.Tensor,  # [G * K, N], or [G * N, K] if `b_columns`
    out: torch.Tensor,  # [G * M, N]
    G: hl.constexpr,
    M: hl.constexpr,  # a multiple of the row block
    N: hl.constexpr,
    K: hl.constexpr,  # a multiple of the block along K
    a_columns: hl.constexpr,
    b_columns: hl.constexpr,
) -> torch.Tensor:
    """One program per tile of a group. The next launch may begin before this one ends, and waits for it."""
    dtype = torch.promote_types(A.dtype, B.dtype)
    hl.pdl_launch_dependents()
    hl.pdl_wait()
    for tile_g, tile_m, tile_n in hl.tile([G, M, N], block_size=[1, None, None]):
        g = tile_g.begin
        acc = hl.zeros([tile_m, tile_n], dtype=torch.float32)
        for tile_k in hl.tile(K):
            if a_columns:
                a = A[tile_k.index + g * K, tile_m].T
            else:
                a = A[tile_m.index + g * M, tile_k]
            if b_columns:
                b = B[tile_n.index + g * N, tile_k].T
            else:
                b = B[tile_k.index + g * K, tile_n]
            acc = hl.dot(unmasked(a).to(dtype), unmasked(b).to(dtype), acc=acc)
        out[tile_m.index + g * M, tile_n] = acc.to(out.dtype)
    return out


@kernel(_preset)
def uniform(
    A: torch.Tensor,  # [G, M, K], or [G, K, M] if `a_columns`
    B: torch.Tensor,  # [G, K, N], or [G, N, K] if `b_columns`
    out: torch.Tensor,  # [G, M, N]
    N: hl.constexpr,
    K: hl.constexpr,
    a_columns: hl.constexpr,
    b_columns: hl.constexpr,
    tma_A: hl.constexpr,  # A is read by TMA, which returns zeros outside of it
    tma_B: hl.constexpr,
) -> torch.Tensor:
    """The same product, for any sizes and strides."""
    G = out.size(0)
    M = out.size(1)
    dtype = torch.promote_types(A.dtype, B.dtype)
    hl.pdl_launch_dependents()
    hl.pdl_wait()
    for tile_g, tile_m, tile_n in hl.tile([G, M, N], block_size=[1, None, None]):
        g = tile_g.begin
        acc = hl.zeros([tile_m, tile_n], dtype=torch.float32)
        for tile_k in hl.tile(K):
            a = block_of(A, g, tile_m, tile_k, a_columns)
            if tma_A:
                a = unmasked(a)
            b = block_of(B, g, tile_k, tile_n, b_columns)
            if tma_B:
                b = unmasked(b)
            acc = hl.dot(a.to(dtype), b.to(dtype), acc=acc)
        out[g, tile_m, tile_n] = acc.to(out.dtype)
    return out


def plan_uniform_grouped_gemm(builder: Builder, tensors: Operands, options: tuple[int, torch.dtype]) -> SymbolicTensor:
    """Plan the product of A `[G, M, K]` or `[G * M, K]` and B `[G, K, N]` or `[G * K, N]`; the result has A's rank."""
    A, B = tensors
    G, dtype = options
    a, b = _groups(A, G), _groups(B, G)
    M, N, K = a.size(1), b.size(2), a.size(2)
    shape = (G, M, N) if A.dim() == 3 else (G * M, N)
    if G * M * N * K == 0:
        out = builder.alloc(shape, dtype)
        builder.zero(out)
        return out
    A = left_operand(builder, A, B.dtype)
    a = _groups(A, G)
    a_columns, b_columns = lies_transposed(a), lies_transposed(b)
    a, b = a.transpose(1, 2) if a_columns else a, b.transpose(1, 2) if b_columns else b
    planned = SymbolicTensor(-1, dtype, (G, M, N), (M * N, N, 1), aligned=True)
    problem = _problem(builder, a, b, planned, N, K, a_columns, b_columns)
    choice = uniform_rules.choose(problem)
    if choice.variant == "bmm":
        return builder.call("bmm", (A, B), (shape, dtype), None if dtype == A.dtype else dtype, groups=G)
    out = builder.alloc(shape, dtype)
    operands, kernel = [a, b, _groups(out, G)], uniform
    constants: tuple[Any, ...] = (N, K, a_columns, b_columns, *choice.addressing[:2])
    if choice.variant == "folded":
        operands, kernel = [_flat(x) for x in operands], uniform_folded
        constants = (G, M, N, K, a_columns, b_columns)
    by_tma = [whole_blocks(x) if tma else x for x, tma in zip(operands, choice.addressing[:3], strict=True)]
    int64_index = choice.addressing.int64_index
    precision = "tf32" if problem.tf32 else "ieee"
    builder.launch(kernel, (*by_tma, *constants), choice.config, int64_index=int64_index, precision=precision)
    return out


def _problem(
    builder: Builder,
    A: SymbolicTensor,  # A, B and out: as in `uniform`
    B: SymbolicTensor,
    out: SymbolicTensor,
    N: int,
    K: int,
    a_columns: bool,
    b_columns: bool,
) -> uniform_rules.Problem:
    dtype, gpu = torch.promote_types(A.dtype, B.dtype), builder.gpu
    on_gpu = gpu.backend != "interpreter"
    one_dtype = A.dtype == B.dtype == out.dtype
    widened = A.dtype == B.dtype and dtype.itemsize == 2 and out.dtype == torch.float32 and gpu.backend == "cuda"
    return uniform_rules.Problem(
        G=out.size(0),
        M=out.size(1),
        N=N,
        K=K,
        dtype=dtype,
        out_dtype=out.dtype,
        tf32=rules.tf32_allowed(dtype),
        bmm=(one_dtype or widened) and on_gpu and _has_rows(A) and _has_rows(B),
        flat=all(x.dim() == 3 and x.stride(0) == x.size(1) * x.stride(1) for x in (A, B, out)),
        tma_A=tma_readable(gpu, A),
        tma_B=tma_readable(gpu, B),
        tma_out=tma_readable(gpu, out),
        int64_A=needs_int64(A),
        int64_B=needs_int64(B),
        int64_out=needs_int64(out),
        a_columns=a_columns,
        b_columns=b_columns,
        gpu=gpu,
    )


def _has_rows(x: SymbolicTensor) -> bool:
    """Whether cuBLAS reads each matrix of `x [G, _, _]` without a copy: contiguous rows that do not overlap."""
    return x.dim() == 3 and x.stride(2) == 1 and x.stride(1) >= max(x.size(2), 1)


def _groups(x: SymbolicTensor, G: int) -> SymbolicTensor:
    """Return `x` as `[G, _, _]`; the groups of a 2-D `x` are stacked along its rows."""
    return x if x.dim() == 3 else x.unflatten(0, (G, x.size(0) // max(G, 1)))


def _flat(x: SymbolicTensor) -> SymbolicTensor:
    """Return `x [G, rows, columns]` as `[G * rows, columns]`."""
    G, rows, columns = x.shape
    return x.as_strided((G * rows, columns), x.strides[1:], 0)
