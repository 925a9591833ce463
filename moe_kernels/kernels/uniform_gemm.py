"""Uniform grouped GEMM: `out[g] = A[g] @ B[g]`, every group of the same sizes.

One launch with a grid over (group, rows, columns). Where tiles fill the groups exactly, the groups are one matrix, one
below the other, and the group is folded into the row. Elsewhere it is a coordinate of 3-D descriptors: a tile that
sticks out of its group is cut off there by TMA, and nothing is read of the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import helion
import helion.language as hl
import torch

from moe_kernels import configs
from moe_kernels.allocate import empty
from moe_kernels.configs import uniform as rules
from moe_kernels.kernels.inline import unmasked
from moe_kernels.kernels.launch import (
    INT32_MAX,
    compile_kernel,
    kernel,
    span,
    tf32_allowed,
    tma_readable,
)


def _preset_folded(A: torch.Tensor, B: torch.Tensor, out: torch.Tensor, G: int, M: int, *layout: Any) -> helion.Config:
    A, B, out = (x.view(G, x.size(0) // G, x.size(1)) for x in (A, B, out))
    return _preset(A, B, out, *layout)


def _preset(A: torch.Tensor, B: torch.Tensor, out: torch.Tensor, *layout: Any) -> helion.Config:
    N, K, a_columns, b_columns, *_ = layout
    return rules.by_kernel(_problem(A, B, out, N, K, a_columns, b_columns)).config


@kernel(_preset_folded)
def uniform_folded(
    A: torch.Tensor,  # [G * M, K], or [G * K, M] if `a_columns`
    B: torch.Tensor,  # [G * K, N], or [G * N, K] if `b_columns`
    out: torch.Tensor,  # [G * M, N]
    G: hl.constexpr,
    M: hl.constexpr,  # a multiple of the block of rows
    N: hl.constexpr,
    K: hl.constexpr,  # a multiple of the block along K
    a_columns: hl.constexpr,
    b_columns: hl.constexpr,
) -> torch.Tensor:
    """A program to a tile of one group. The next launch may begin before this one ends, and waits for it."""
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
    tma_A: hl.constexpr,  # A is read by TMA, which takes what is outside of it for zeros
    tma_B: hl.constexpr,
) -> torch.Tensor:
    """The same for any sizes and strides."""
    G = out.size(0)
    M = out.size(1)
    dtype = torch.promote_types(A.dtype, B.dtype)
    hl.pdl_launch_dependents()
    hl.pdl_wait()
    for tile_g, tile_m, tile_n in hl.tile([G, M, N], block_size=[1, None, None]):
        g = tile_g.begin
        acc = hl.zeros([tile_m, tile_n], dtype=torch.float32)
        for tile_k in hl.tile(K):
            if a_columns:
                a = A[g, tile_k, tile_m].T
            else:
                a = A[g, tile_m, tile_k]
            if tma_A:
                a = unmasked(a)
            if b_columns:
                b = B[g, tile_n, tile_k].T
            else:
                b = B[g, tile_k, tile_n]
            if tma_B:
                b = unmasked(b)
            acc = hl.dot(a.to(dtype), b.to(dtype), acc=acc)
        out[g, tile_m, tile_n] = acc.to(out.dtype)
    return out


def _problem(
    A: torch.Tensor, B: torch.Tensor, out: torch.Tensor, N: int, K: int, a_columns: bool, b_columns: bool
) -> rules.Problem:
    """Of `A`, `B` and `out` as `uniform` takes them."""
    dtype = torch.promote_types(A.dtype, B.dtype)
    one_dtype = A.dtype == B.dtype == out.dtype
    widened = A.dtype == B.dtype and dtype.itemsize == 2 and out.dtype == torch.float32 and out.is_cuda
    return rules.Problem(
        G=out.size(0),
        M=out.size(1),
        N=N,
        K=K,
        dtype=dtype,
        out_dtype=out.dtype,
        tf32=tf32_allowed(dtype),
        bmm=(one_dtype or widened) and not out.is_cpu and _has_rows(A) and _has_rows(B),
        flat=all(x.stride(0) == x.size(1) * x.stride(1) for x in (A, B, out)),
        tma_A=tma_readable(A),
        tma_B=tma_readable(B),
        tma_out=tma_readable(out),
        wide_A=span(A) > INT32_MAX,
        wide_B=span(B) > INT32_MAX,
        wide_out=span(out) > INT32_MAX,
        a_columns=a_columns,
        b_columns=b_columns,
        device=out.device,
    )


def _has_rows(x: torch.Tensor) -> bool:
    """Whether each matrix of `x [G, _, _]` is one for cuBLAS: contiguous rows, which do not overlap."""
    return x.stride(2) == 1 and x.stride(1) >= max(x.size(2), 1)


def plan(
    A: torch.Tensor,  # [G, M, K] or [G * M, K]
    B: torch.Tensor,  # [G, K, N] or [G * K, N]
    G: int,
    dtype: torch.dtype,
    choice: rules.Choice | None = None,
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Choose a way to compute the products, or take `choice`, and compile it: what returns them in `dtype`.

    The result has `A`'s rank. The plan is for tensors with the shapes, strides, dtypes, device and alignment to 16
    bytes of these. Nothing is checked; no extent may be 0.
    """
    a, b = _groups(A, G), _groups(B, G)
    M, N, K = a.size(1), b.size(2), a.size(2)
    shape = (G, M, N) if A.dim() == 3 else (G * M, N)
    a_columns, b_columns = (x.stride(1) == 1 != x.stride(2) for x in (a, b))

    def stored(x: torch.Tensor, columns: bool) -> torch.Tensor:
        return _groups(x, G).transpose(1, 2) if columns else _groups(x, G)

    out = A.new_empty((G, M, N), dtype=dtype)
    problem = _problem(stored(A, a_columns), stored(B, b_columns), out, N, K, a_columns, b_columns)
    choice = choice or rules.choose(problem)
    if choice.kernel == "bmm":
        return _bmm(G, None if dtype == A.dtype else dtype)

    if choice.kernel == "folded":
        kernel, constants = uniform_folded, (G, M, N, K, a_columns, b_columns)
        flat = lambda x: x.view(-1, x.size(2))  # noqa: E731
    else:
        kernel, constants = uniform, (N, K, a_columns, b_columns, *choice.access[:2])
        flat = lambda x: x  # noqa: E731

    def prepare(A: torch.Tensor, B: torch.Tensor, out: torch.Tensor, *rest: Any) -> tuple[Any, ...]:
        return flat(stored(A, a_columns)), flat(stored(B, b_columns)), flat(out.view(G, M, N)), *rest

    like = zip(prepare(A, B, out), choice.access[:3], strict=True)
    run = compile_kernel(
        kernel,
        (*(_like(x, tma) for x, tma in like), *constants),
        choice.config,
        wide=choice.access.wide,
        tf32=problem.tf32,
        prepare=prepare,
        fixed=range(3),
    )

    def call(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        out = empty(shape, dtype, A)
        run(A, B, out, *constants)
        return out

    return call


def plan_and_call(
    A: torch.Tensor, B: torch.Tensor, G: int, dtype: torch.dtype
) -> tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], torch.Tensor]:
    """A plan and its first result. A tuned config that does not work here gives way to the rule's."""

    def attempt() -> tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], torch.Tensor]:
        made = plan(A, B, G, dtype)
        return made, made(A, B)

    return configs.settle(attempt)


def _bmm(G: int, out_dtype: torch.dtype | None) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def bmm(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        a, b = _groups(A, G), _groups(B, G)
        out = torch.bmm(a, b) if out_dtype is None else torch.bmm(a, b, out_dtype=out_dtype)
        return out if A.dim() == 3 else out.view(-1, out.size(2))

    return bmm


def _groups(x: torch.Tensor, G: int) -> torch.Tensor:
    """`[G, _, _]` of what may be given with the groups one below the other."""
    return x if x.dim() == 3 else x.view(G, x.size(0) // G, x.size(1))


def _like(tensor: torch.Tensor, tma: bool) -> torch.Tensor:
    """What to compile for in place of `tensor`.

    Helion would drop the masks and strides of extents of 1, and TMA for more than 2^31 elements, which it can read, and
    for blocks larger than the tensor, of which it reads zeros.
    """
    if tma:
        *groups, rows, columns = tensor.shape
        sizes = [*(min(2, G) for G in groups), *(min(256, max(16, 1 << (n - 1).bit_length())) for n in (rows, columns))]
    else:
        sizes = [max(size, 2) for size in tensor.shape]
    if sizes == list(tensor.shape):
        return tensor
    return torch.empty_strided(sizes, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
