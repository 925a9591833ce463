"""quantize and quantize_weight."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels import reference
from moe_kernels.ops.library import check_rows, define, use_kernels
from moe_kernels.runtime import cache
from moe_kernels.runtime.signature import Counts, Operator
from moe_kernels.runtime.symbolic import lies_transposed
from moe_kernels.scaled import scales_shape

_PLANNER = "moe_kernels.kernels.quantize"
QUANTIZE = Operator("quantize", _PLANNER, ("x",), ("x",), lambda tensors, _: Counts(tensors[0].size(0)))
# For weights: their number of rows is constant, so loads along the rows of a transposed layout can be wide.
QUANTIZE_CONSTANT_ROWS = Operator("quantize", _PLANNER, ("x",), (), lambda *_: Counts(0))
QUANTIZE_WEIGHT = Operator("quantize_weight", _PLANNER, ("weight",), (), lambda *_: Counts(0))


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


quantize = define(
    "quantize(Tensor x, str format, ScalarType dtype, bool power_of_two) -> (Tensor, Tensor)", _quantize, _quantize_fake
)


def _quantize_weight(weight: Tensor, rowwise: bool) -> tuple[Tensor, ...]:
    if use_kernels(weight) and weight.numel() > 0:
        return cache.call(QUANTIZE_WEIGHT, (weight,), (rowwise,))
    return reference.quantize_weight(weight, rowwise)


def _quantize_weight_fake(weight: Tensor, rowwise: bool) -> tuple[Tensor, ...]:
    format = "rowwise" if rowwise else "128x128"
    made = (_quantize_fake(w, format, torch.float8_e4m3fn, False) for w in (weight, weight.mT))
    (data, scales), (backward, backward_scales) = made
    return data, scales, backward, backward_scales if rowwise else scales.new_empty(0)


quantize_weight = define(
    "quantize_weight(Tensor weight, bool rowwise) -> (Tensor, Tensor, Tensor, Tensor)",
    _quantize_weight,
    _quantize_weight_fake,
)
