"""uniform_grouped_gemm and varied_grouped_gemm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_kernels import uniform, varied
from moe_kernels.ops.library import define, needs


def _uniform(
    A: Tensor,  # [G, M, K]
    B: Tensor,  # [G, K, N]
    out_dtype: torch.dtype,
) -> Tensor:  # [G, M, N]
    return uniform.multiply(A, B, A.size(0), out_dtype)


def _uniform_fake(A: Tensor, B: Tensor, out_dtype: torch.dtype) -> Tensor:
    return A.new_empty((A.size(0), A.size(1), B.size(2)), dtype=out_dtype)


def _uniform_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    A, B, _ = inputs
    ctx.save_for_backward(needs(ctx, 1, A), needs(ctx, 0, B))
    ctx.dtypes = A.dtype, B.dtype


def _uniform_backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    A, B = ctx.saved_tensors
    a_dtype, b_dtype = ctx.dtypes
    dA = uniform_grouped_gemm(d_out, B.transpose(1, 2), a_dtype) if ctx.needs_input_grad[0] else None
    dB = uniform_grouped_gemm(A.transpose(1, 2), d_out, b_dtype) if ctx.needs_input_grad[1] else None
    return dA, dB, None


def _varied(
    group_A: Sequence[Tensor],  # P of [M_p, K_p]
    group_B: Sequence[Tensor],  # P of [K_p, N_p]
) -> list[Tensor]:  # P of [M_p, N_p]
    return varied.multiply(group_A, group_B)


def _varied_fake(group_A: Sequence[Tensor], group_B: Sequence[Tensor]) -> list[Tensor]:
    return [a.new_empty((a.size(0), b.size(1))) for a, b in zip(group_A, group_B, strict=True)]


def _varied_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    group_A, group_B = inputs
    ctx.save_for_backward(*group_A, *group_B)
    ctx.set_materialize_grads(False)


def _varied_backward(ctx: Any, d_outs: Sequence[Tensor | None]) -> tuple[list[Tensor | None], ...]:
    P = len(d_outs)
    saved = ctx.saved_tensors  # a checkpoint gives them once
    A, B = saved[:P], saved[P:]
    grads: tuple[list[Tensor | None], ...] = ([None] * P, [None] * P)
    reached = [(p, d_out) for p, d_out in enumerate(d_outs) if d_out is not None]
    dA = [(p, d_out, B[p].t()) for p, d_out in reached if ctx.needs_input_grad[0][p]]
    dB = [(p, A[p].t(), d_out) for p, d_out in reached if ctx.needs_input_grad[1][p]]
    for found, products in zip(grads, (dA, dB), strict=True):
        if products:
            places, left, right = zip(*products, strict=True)
            for p, grad in zip(places, varied_grouped_gemm(list(left), list(right)), strict=True):
                found[p] = grad
    return grads


uniform_grouped_gemm = define(
    "uniform_grouped_gemm(Tensor A, Tensor B, ScalarType out_dtype) -> Tensor",
    _uniform,
    _uniform_fake,
    _uniform_setup,
    _uniform_backward,
)
varied_grouped_gemm = define(
    "varied_grouped_gemm(Tensor[] group_A, Tensor[] group_B) -> Tensor[]",
    _varied,
    _varied_fake,
    _varied_setup,
    _varied_backward,
)
