"""scaled_grouped_gemm and scaled_wgrad."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_kernels import reference
from moe_kernels.ops.library import along_rows, check_rows, define, refusing, use_kernels
from moe_kernels.runtime import cache
from moe_kernels.runtime.signature import Counts, Operator
from moe_kernels.runtime.torch_internals import PLAIN
from moe_kernels.scaled import ScaledTensor

# Of programs that were traced without gradients; the checks of the public functions refuse other calls.
NO_GRADIENTS = "{} has no gradients: run this program under torch.no_grad(), or trace one with bfloat16 operands"
SCALED_GROUPED_GEMM = Operator(
    "scaled_grouped_gemm",
    planner="moe_kernels.kernels.scaled_gemm",
    inputs=("A", "scales_A", "B", "scales_B", "group_offsets", "bias"),
    rows=("A", "scales_A"),
    counts=lambda tensors, _: Counts(tensors[0].size(0), groups=tensors[4].size(0) - 1),
)

SCALED_WGRAD = Operator(
    "scaled_wgrad",
    planner="moe_kernels.kernels.scaled_wgrad",
    inputs=("X", "scales_X", "Y", "scales_Y", "group_offsets"),
    rows=("X", "Y"),
    counts=lambda tensors, options: Counts(tensors[0].size(0), (tensors[2].size(0),)),
)


def _scaled_grouped_gemm(
    A: Tensor,  # [M, K]
    scales_A: Tensor,  # [M, 1] or [M, cdiv(K, 128)]
    B: Tensor,  # [K, N] or [G, K, N]
    scales_B: Tensor,  # [.., 1, N] or [.., cdiv(K, 128), cdiv(N, 128)]
    group_offsets: Tensor,  # [G + 1]
    bias: Tensor | None,  # [G, N]
    out_dtype: torch.dtype,
    variant: str,
    fast_accumulation: bool,
) -> Tensor:  # [M, N]
    if not use_kernels(A):
        rowwise = scales_B.shape[-2:] == (1, B.size(-1))
        formats = ("rowwise", "rowwise") if rowwise else ("1x128", "128x128")
        operands = ScaledTensor(A, scales_A, formats[0]), ScaledTensor(B, scales_B, formats[1])
        return reference.scaled_grouped_gemm(*operands, group_offsets, bias, out_dtype=out_dtype)
    check_rows("A", A.size(0))
    A, B = along_rows(A), along_rows(B.mT).mT
    scales_A = flattened(scales_A, A)
    return cache.call(
        SCALED_GROUPED_GEMM, (A, scales_A, B, scales_B, group_offsets, bias), (out_dtype, variant, fast_accumulation)
    )


def flattened(scales: Any, rows: Any) -> Any:
    """Return column-major block scales of `rows [M, K]`, as `quantize` returns them, with strides that do not depend on
    M: in one dimension, or `[M, 1]` for one block per row. Return other arguments unchanged, including those that
    checks refuse.
    """
    if torch.compiler.is_dynamo_compiling():  # the comparisons below would guard on M
        return scales
    for x in (scales, rows):
        if type(x) not in PLAIN or x.layout != torch.strided or x.is_nested or x.dim() != 2:
            return scales
    M, parts = scales.shape
    if rows.size(0) != M or scales.stride() != (1, M):
        return scales
    if parts == 1:
        return scales.as_strided((M, 1), (1, 1))
    return scales.as_strided((M * parts,), (1,))


def _scaled_grouped_gemm_fake(A: Tensor, scales_A: Tensor, B: Tensor, *others: Any) -> Tensor:
    _, _, _, out_dtype, *_ = others
    return A.new_empty((A.size(0), B.size(-1)), dtype=out_dtype)


scaled_grouped_gemm = define(
    "scaled_grouped_gemm(Tensor A, Tensor scales_A, Tensor B, Tensor scales_B, Tensor group_offsets, Tensor? bias,"
    " ScalarType out_dtype, str variant, bool fast_accumulation) -> Tensor",
    _scaled_grouped_gemm,
    _scaled_grouped_gemm_fake,
    *refusing(NO_GRADIENTS.format("grouped_gemm of fp8 operands")),
)


def _scaled_wgrad(
    X: Tensor,  # [M, P]
    scales_X: Tensor,  # [G, P]
    Y: Tensor,  # [M, Q]
    scales_Y: Tensor,  # [G, Q]
    group_offsets: Tensor,  # [G + 1]
    out_dtype: torch.dtype,
    fast_accumulation: bool,
) -> Tensor:  # [G, P, Q]
    if not use_kernels(X):
        return reference.scaled_wgrad(X, scales_X, Y, scales_Y, group_offsets, out_dtype)
    check_rows("mat_b", X.size(0))
    # In one dimension, strides do not depend on M.
    x, y = (rows.T.contiguous().view(-1) for rows in (X, Y))
    return cache.call(SCALED_WGRAD, (x, scales_X, y, scales_Y, group_offsets), (out_dtype, fast_accumulation))


def _scaled_wgrad_fake(
    X: Tensor, scales_X: Tensor, Y: Tensor, scales_Y: Tensor, group_offsets: Tensor, out_dtype: torch.dtype, _: bool
) -> Tensor:
    return X.new_empty((*scales_X.shape, scales_Y.size(1)), dtype=out_dtype)


scaled_wgrad = define(
    "scaled_wgrad(Tensor X, Tensor scales_X, Tensor Y, Tensor scales_Y, Tensor group_offsets, ScalarType out_dtype,"
    " bool fast_accumulation) -> Tensor",
    _scaled_wgrad,
    _scaled_wgrad_fake,
    *refusing(NO_GRADIENTS.format("scaled_grouped_mm")),
)
