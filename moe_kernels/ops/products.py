"""grouped_gemm, grouped_mm of groups of rows, and grouped_gemm_wgrad."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_kernels import packing, reference
from moe_kernels.ops.library import check_rows, define, save_operands, use_kernels
from moe_kernels.runtime import cache, torch_internals
from moe_kernels.runtime.signature import Counts, Operator
from moe_kernels.runtime.symbolic import lies_transposed

_PLANNERS = "moe_kernels.kernels."
GROUPED_GEMM = Operator(
    "grouped_gemm",
    planner=_PLANNERS + "grouped_gemm",
    inputs=("A_packed", "B", "group_offsets", "bias"),
    rows=("A_packed",),
    counts=lambda tensors, _: Counts(tensors[0].size(0), groups=tensors[2].size(0) - 1),
)
GROUPED_MM = Operator(
    "grouped_mm",
    planner=_PLANNERS + "grouped_gemm",
    inputs=("mat_a", "mat_b", "offs", "bias"),
    rows=("mat_a",),
    counts=lambda tensors, _: Counts(tensors[0].size(0), groups=tensors[2].size(0)),
)
GROUPED_GEMM_WGRAD = Operator(
    "grouped_gemm_wgrad",
    planner=_PLANNERS + "grouped_wgrad",
    inputs=("X", "Y", "group_offsets"),
    rows=("X", "Y"),
    counts=lambda tensors, _: Counts(tensors[0].size(0), groups=tensors[2].size(0) - 1),
)


def _grouped_gemm(
    A_packed: Tensor,  # [M, K]
    B: Tensor,  # [K, N] or [G, K, N]
    group_offsets: Tensor,  # [G + 1]
    bias: Tensor | None,  # [G, N]
    out_dtype: torch.dtype,
    variant: str,
) -> Tensor:  # [M, N]
    if not use_kernels(A_packed, B):
        return reference.grouped_linear(A_packed, B, group_offsets, bias, out_dtype)
    check_rows("A_packed", A_packed.size(0))
    return cache.call(GROUPED_GEMM, (A_packed, B, group_offsets, bias), (out_dtype, variant))


def _grouped_gemm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    A_packed, B, group_offsets, bias, _, variant = inputs
    save_operands(ctx, A_packed, B, group_offsets)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.shared, ctx.transposed, ctx.variant = B.dim() == 2, gradient_transposed(B), variant


def _grouped_gemm_backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    A_packed, B, group_offsets = ctx.saved_tensors
    a_dtype, b_dtype = ctx.dtypes
    dA = dB = d_bias = None
    need_A, need_B, _, need_bias, *_ = torch_internals.asked_gradients(ctx)
    if need_A:
        dA = grouped_gemm(d_out, B.transpose(-2, -1), group_offsets, None, a_dtype, ctx.variant)
    if need_B:
        dB = grouped_gemm_wgrad(A_packed, d_out, group_offsets, ctx.shared, ctx.transposed, b_dtype)
    if need_bias:
        d_bias = bias_gradient(d_out, group_offsets, ctx.bias_dtype)
    return dA, dB, None, d_bias, None, None


def _grouped_mm(
    mat_a: Tensor,  # [M, K]
    mat_b: Tensor,  # [G, K, N]
    offs: Tensor,  # [G]
    bias: Tensor | None,  # [G, N]
    out_dtype: torch.dtype,
) -> Tensor:  # [M, N]
    if not use_kernels(mat_a, mat_b):
        group_offsets = packing.group_offsets_from_offs(offs)
        return reference.grouped_linear(mat_a, mat_b, group_offsets, bias, out_dtype)
    check_rows("mat_a", mat_a.size(0))
    return cache.call(GROUPED_MM, (mat_a, mat_b, offs, bias), (out_dtype, "auto"))


def _grouped_mm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    mat_a, mat_b, offs, bias, out_dtype = inputs
    group_offsets = packing.group_offsets_from_offs(offs)
    _grouped_gemm_setup(ctx, (mat_a, mat_b, group_offsets, bias, out_dtype, "auto"), output)


def gradient_transposed(weight: Tensor) -> bool:
    """Whether the gradient of `weight [.., K, N]` is stored as `[.., N, K]`, to lie as the weight does."""
    # Both strides of a transposed weight with K = 1 are 1, and those of another one with N = 1.
    return lies_transposed(weight) or weight.stride(-2) == 1 != weight.size(-1)


def bias_gradient(
    d_out: Tensor, group_offsets: Tensor, dtype: torch.dtype, weights: Tensor | None = None
) -> Tensor:  # [M, N] -> [G, N]
    """Return each group's sum of rows, with `weights [M, 1]` if given."""
    weights = d_out.new_ones(1, 1).expand(d_out.size(0), 1) if weights is None else weights
    return grouped_gemm_wgrad(weights, d_out, group_offsets, False, False, dtype)[:, 0]


def _grouped_gemm_wgrad(
    A_packed: Tensor,  # [M, K]
    d_out: Tensor,  # [M, N]
    group_offsets: Tensor,  # [G + 1]
    shared: bool,  # one result for all groups
    transposed: bool,  # the memory layout of the result is [..., N, K]
    out_dtype: torch.dtype,
) -> Tensor:  # [G, K, N], or [K, N] if `shared`
    if transposed:
        return _grouped_gemm_wgrad(d_out, A_packed, group_offsets, shared, False, out_dtype).transpose(-2, -1)
    if shared:
        # One group of all rows that belong to some group.
        group_offsets = torch.stack((group_offsets[0], group_offsets.amax()))
    if use_kernels(A_packed, d_out):
        check_rows("A_packed", A_packed.size(0))
        out: Tensor = cache.call(GROUPED_GEMM_WGRAD, (A_packed, d_out, group_offsets), (out_dtype,))
    else:
        out = reference.grouped_gemm_wgrad(A_packed, d_out, group_offsets, out_dtype=out_dtype)
    return out[0] if shared else out


def wgrad_fake(
    A_packed: Tensor, d_out: Tensor, group_offsets: Tensor, shared: bool, transposed: bool, out_dtype: torch.dtype
) -> Tensor:
    groups = () if shared else (group_offsets.size(0) - 1,)
    K, N = A_packed.size(1), d_out.size(1)
    if transposed:
        return A_packed.new_empty((*groups, N, K), dtype=out_dtype).transpose(-2, -1)
    return A_packed.new_empty((*groups, K, N), dtype=out_dtype)


def _wgrad_backward(ctx: Any, dd_B: Tensor) -> tuple[Tensor | None, ...]:
    A_packed, d_out, group_offsets = ctx.saved_tensors
    a_dtype, d_dtype = ctx.dtypes
    dA = dd_out = None
    need_A, need_d_out, *_ = torch_internals.asked_gradients(ctx)
    if need_A:
        dA = grouped_gemm(d_out, dd_B.transpose(-2, -1), group_offsets, None, a_dtype, "auto")
    if need_d_out:
        dd_out = grouped_gemm(A_packed, dd_B, group_offsets, None, d_dtype, "auto")
    return dA, dd_out, None, None, None, None


grouped_gemm = define(
    _grouped_gemm,
    lambda A, B, group_offsets, bias, out_dtype, variant: A.new_empty((A.size(0), B.size(-1)), dtype=out_dtype),
    _grouped_gemm_setup,
    _grouped_gemm_backward,
)
grouped_mm = define(
    _grouped_mm,
    lambda mat_a, mat_b, offs, bias, out_dtype: mat_a.new_empty((mat_a.size(0), mat_b.size(2)), dtype=out_dtype),
    _grouped_mm_setup,
    lambda ctx, d_out: _grouped_gemm_backward(ctx, d_out)[:5],
)
grouped_gemm_wgrad = define(
    _grouped_gemm_wgrad, wgrad_fake, lambda ctx, inputs, output: save_operands(ctx, *inputs[:3]), _wgrad_backward
)
