"""Operators of fp8 data with scales: quantize, quantize_weight, scaled_grouped_gemm, scaled_wgrad, scaled_moe_mlp."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_kernels import reference
from moe_kernels.glu import GLUSpec
from moe_kernels.ops.layer import layer_operator, run_layer
from moe_kernels.ops.library import along_rows, check_rows, define, refusing, use_kernels
from moe_kernels.runtime import cache
from moe_kernels.runtime.signature import Counts, Operator
from moe_kernels.runtime.symbolic import lies_transposed
from moe_kernels.runtime.torch_internals import PLAIN
from moe_kernels.scaled import ScaledTensor, scales_shape

# Of programs that were traced without gradients; the checks of the public functions refuse other calls.
NO_GRADIENTS = "{} has no gradients: run this program under torch.no_grad(), or trace one with bfloat16 operands"
_PLANNER = "moe_kernels.kernels.quantize"
# For weights: their number of rows is constant, so loads along the rows of a transposed layout can be wide.
QUANTIZE_CONSTANT_ROWS = Operator("quantize", _PLANNER, ("x",), (), lambda *_: Counts(0))
QUANTIZE = Operator("quantize", _PLANNER, ("x",), ("x",))
QUANTIZE_WEIGHT = Operator("quantize_weight", _PLANNER, ("weight",), (), lambda *_: Counts(0))
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
SCALED_MOE_MLP = layer_operator(
    "scaled_moe_mlp", "w_gate_up", "scales_gate_up", "w_down", "scales_down", "gate_up_bias", "down_bias"
)


def _quantize(x: Tensor, format: str, dtype: torch.dtype, power_of_two: bool) -> tuple[Tensor, Tensor]:
    if not use_kernels(x) or x.numel() == 0:
        data, scales, _ = reference.quantize(x, format, dtype=dtype, power_of_two=power_of_two)
        return data, scales
    check_rows("x", x.size(-2))
    operator = QUANTIZE_CONSTANT_ROWS if x.dim() == 3 or lies_transposed(x) else QUANTIZE
    data, scales = cache.call(operator, (x,), (format, dtype, power_of_two))
    if format == "1x128":
        *groups, R, parts = scales_shape(x.shape, format)
        scales = scales.view(*groups, parts, R).mT
    return data, scales


def _quantize_fake(x: Tensor, format: str, dtype: torch.dtype, power_of_two: bool) -> tuple[Tensor, Tensor]:
    *groups, rows, parts = scales_shape(x.shape, format)
    shape = (*groups, parts, rows) if format == "1x128" else (*groups, rows, parts)
    scales = x.new_empty(shape, dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dtype), scales.mT if format == "1x128" else scales


quantize = define(_quantize, _quantize_fake)


def _quantize_weight(weight: Tensor, rowwise: bool) -> tuple[Tensor, ...]:
    if use_kernels(weight) and weight.numel() > 0:
        return cache.call(QUANTIZE_WEIGHT, (weight,), (rowwise,))
    return reference.quantize_weight(weight, rowwise)


def _quantize_weight_fake(weight: Tensor, rowwise: bool) -> tuple[Tensor, ...]:
    format = "rowwise" if rowwise else "128x128"
    made = (_quantize_fake(w, format, torch.float8_e4m3fn, False) for w in (weight, weight.mT))
    (data, scales), (backward, backward_scales) = made
    return data, scales, backward, backward_scales if rowwise else scales.new_empty(0)


quantize_weight = define(_quantize_weight, _quantize_weight_fake, results=4)


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
    _scaled_grouped_gemm, _scaled_grouped_gemm_fake, *refusing(NO_GRADIENTS.format("grouped_gemm of fp8 operands"))
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


scaled_wgrad = define(_scaled_wgrad, _scaled_wgrad_fake, *refusing(NO_GRADIENTS.format("scaled_grouped_mm")))


def _scaled_moe_mlp(
    hidden: Tensor,  # [T, H]
    topk_ids: Tensor,  # [T, top_k]
    topk_weights: Tensor,  # [T, top_k]
    w_gate_up: Tensor,  # [E, 2I, H] or [E, I, H]
    scales_gate_up: Tensor,  # [E, 2I, 1], or [E, cdiv(2I, 128), cdiv(H, 128)] unless `rowwise`
    w_down: Tensor,  # [E, H, I]
    scales_down: Tensor,  # [E, H, 1] or [E, cdiv(H, 128), cdiv(I, 128)]
    gate_up_bias: Tensor | None,  # [E, 2I] or [E, I]
    down_bias: Tensor | None,  # [E, H]
    rowwise: bool,
    fast_accumulation: bool,
    *spec: Any,
) -> Tensor:  # [T, H]
    if use_kernels(hidden) and topk_ids.numel() == 0:  # without a read on the host, as the reference has
        return hidden.new_zeros(hidden.shape)
    if not use_kernels(hidden) or 0 in (*w_gate_up.shape, *w_down.shape):
        format = "rowwise" if rowwise else "128x128"
        weights = ScaledTensor(w_gate_up, scales_gate_up, format), ScaledTensor(w_down, scales_down, format)
        named: dict[str, Any] = {"gate_up_bias": gate_up_bias, "down_bias": down_bias, **GLUSpec(*spec)._asdict()}
        return reference.moe_mlp(hidden, topk_ids, topk_weights, *weights, **named)
    parameters = (along_rows(w_gate_up), scales_gate_up, along_rows(w_down), scales_down, gate_up_bias, down_bias)
    options = (rowwise, fast_accumulation, GLUSpec(*spec))
    return run_layer(SCALED_MOE_MLP, (hidden, topk_ids, topk_weights), parameters, options)[0]


scaled_moe_mlp = define(
    _scaled_moe_mlp,
    lambda hidden, *_: torch.empty_like(hidden, memory_format=torch.contiguous_format),
    *refusing(NO_GRADIENTS.format("moe_mlp with fp8 weights")),
)
