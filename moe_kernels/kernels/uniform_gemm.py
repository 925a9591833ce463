"""Uniform grouped GEMM: `out[g] = A[g] @ B[g]`, every group of the same sizes.

One launch with a grid over (group, rows, columns). The group is a coordinate of the 3-D descriptors through which the
operands are read, so a tile that sticks out of its group is cut off there by TMA, and nothing is read of the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import helion
import helion.language as hl
import torch

from moe_kernels.configs import uniform as configs
from moe_kernels.kernels.inline import unmasked as _unmasked
from moe_kernels.kernels.launch import (
    INT32_MAX,
    compile_kernel,
    kernel,
    span,
    tf32_allowed,
    tma_readable,
)


def _preset(A: torch.Tensor, B: torch.Tensor, out: torch.Tensor, *layout: Any) -> helion.Config:
    N, K, a_columns, b_columns, *_ = layout
    return configs.rule(_problem(A, B, out, N, K, a_columns, b_columns)).config


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
    """A program to a tile of one group. The next launch may begin before this one ends, and waits for it."""
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
                a = _unmasked(a)
            if b_columns:
                b = B[g, tile_n, tile_k].T
            else:
                b = B[g, tile_k, tile_n]
            if tma_B:
                b = _unmasked(b)
            acc = hl.dot(a.to(dtype), b.to(dtype), acc=acc)
        out[g, tile_m, tile_n] = acc.to(out.dtype)
    return out


def _problem(
    A: torch.Tensor, B: torch.Tensor, out: torch.Tensor, N: int, K: int, a_columns: bool, b_columns: bool
) -> configs.Problem:
    dtype = torch.promote_types(A.dtype, B.dtype)
    return configs.Problem(
        G=out.size(0),
        M=out.size(1),
        N=N,
        K=K,
        dtype=dtype,
        out_dtype=out.dtype,
        tf32=tf32_allowed(dtype),
        # A descriptor's block has at least 16 of each.
        tma_A=min(A.shape[1:]) >= 16 and tma_readable(A),
        tma_B=min(B.shape[1:]) >= 16 and tma_readable(B),
        tma_out=min(out.shape[1:]) >= 16 and tma_readable(out),
        wide_A=span(A) > INT32_MAX,
        wide_B=span(B) > INT32_MAX,
        wide_out=span(out) > INT32_MAX,
        a_columns=a_columns,
        b_columns=b_columns,
        device=out.device,
    )


_plans: dict[tuple[Any, ...], Callable[..., None]] = {}
_MOST_PLANS = 4096


def launch(
    A: torch.Tensor,  # [G, M, K]
    B: torch.Tensor,  # [G, K, N]
    out: torch.Tensor,  # [G, M, N]
) -> None:
    """Write the products to `out`. Nothing is checked; no extent may be 0.

    The kernel is chosen and compiled once for all that the key names.
    """
    a_dtype, b_dtype = A.dtype, B.dtype
    key = (
        a_dtype,
        A.shape,
        A.stride(),
        A.data_ptr() % 16,
        A.device,
        b_dtype,
        B.shape,
        B.stride(),
        B.data_ptr() % 16,
        out.dtype,
        out.stride(),
        out.data_ptr() % 16,
        (a_dtype == torch.float32 or b_dtype == torch.float32) and tf32_allowed(torch.float32),
    )
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = _plan(A, B, out)
    plan(A, B, out)


def _plan(A: torch.Tensor, B: torch.Tensor, out: torch.Tensor) -> Callable[..., None]:
    N, K = out.size(2), A.size(2)
    a_columns, b_columns = (x.stride(1) == 1 != x.stride(2) for x in (A, B))
    as_A = (lambda A: A.transpose(1, 2)) if a_columns else (lambda A: A)
    as_B = (lambda B: B.transpose(1, 2)) if b_columns else (lambda B: B)
    A, B = as_A(A), as_B(B)
    problem = _problem(A, B, out, N, K, a_columns, b_columns)
    choice = configs.choose(problem)
    constants = (N, K, a_columns, b_columns, choice.tma_A, choice.tma_B)
    run = compile_kernel(
        uniform,
        (_like(A, choice.tma_A), _like(B, choice.tma_B), _like(out, choice.tma_out), *constants),
        choice.config,
        wide=choice.wide,
        tf32=problem.tf32,
        # Views, and so two objects even if A is B: in the next call it may not be.
        prepare=lambda A, B, *rest: (as_A(A.detach()), as_B(B.detach()), *rest),
    )

    def plan(A: torch.Tensor, B: torch.Tensor, out: torch.Tensor) -> None:
        run(A, B, out, *constants)

    return plan


def _like(tensor: torch.Tensor, tma: bool) -> torch.Tensor:
    """What to compile for in place of `tensor [G, _, _]`.

    Helion would drop the masks and strides of extents of 1, and TMA for more than 2^31 elements, which it can read.
    """
    if tma:
        for dim, most in enumerate((2, 256, 256)):
            tensor = tensor.narrow(dim, 0, min(most, tensor.size(dim)))
        return tensor
    sizes = [max(size, 2) for size in tensor.shape]
    if sizes == list(tensor.shape):
        return tensor.detach()  # an object of its own: Helion would take two operands that are one object for one
    return torch.empty_strided(sizes, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
