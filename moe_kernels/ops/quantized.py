"""quantized_grouped_gemm, quantized_wgrad and quantized_activate_backward: fp8 products of operands in other dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_kernels import reference
from moe_kernels.glu import GLUSpec
from moe_kernels.ops.layer import SPEC
from moe_kernels.ops.library import along_rows, check_rows, define, refusing, use_kernels
from moe_kernels.ops.products import wgrad_fake
from moe_kernels.runtime import cache
from moe_kernels.runtime.signature import Counts, Operator
from moe_kernels.scaled import scales_shape


def _counts(tensors: Any, options: Any) -> Counts:
    """Count the rows of A, or its tokens and the rows of slot_to_row if that is given."""
    first, _, _, _, group_offsets, rows, *_ = tensors
    others = () if rows is None else (rows.size(0),)
    return Counts(first.size(0), others, groups=group_offsets.size(0) - 1)


def _counts_of_wgrad(tensors: Any, options: Any) -> Counts:
    """Count the rows of each operand and of each map."""
    X, Y, group_offsets, *maps = tensors
    others = (Y.size(0), *(rows.size(0) for rows in maps if rows is not None))
    return Counts(X.size(0), others, groups=group_offsets.size(0) - 1)


QUANTIZED_GROUPED_GEMM = Operator(
    "quantized_grouped_gemm",
    planner="moe_kernels.kernels.layer",
    inputs=("A", "scales_A", "B", "scales_B", "group_offsets", "slot_to_row", "bias"),
    rows=("A", "scales_A", "slot_to_row"),
    counts=_counts,
)
QUANTIZED_WGRAD = Operator(
    "quantized_wgrad",
    planner="moe_kernels.kernels.scaled_wgrad",
    inputs=("X", "Y", "group_offsets", "x_slots", "y_slots"),
    rows=("X", "Y", "x_slots", "y_slots"),
    counts=_counts_of_wgrad,
)

QUANTIZED_ACTIVATE_BACKWARD = Operator(
    "quantized_activate_backward",
    planner="moe_kernels.kernels.activation",
    inputs=("preact", "d_act", "topk_weights", "row_to_slot", "group_offsets"),
    rows=("preact", "d_act", "topk_weights", "row_to_slot"),
    counts=lambda tensors, _: Counts(tensors[0].size(0)),
)


def _quantized_grouped_gemm(
    A: Tensor,  # [M, K], fp8 data as uint8; or tokens [T, K] with slot_to_row
    scales_A: Tensor | None,  # [M, 1] or [M, ceil(K / 128)] of fp8 data
    B: Tensor,  # [G, K, N], fp8 data as uint8
    scales_B: Tensor | None,  # [G, 1, N] or [G, ceil(K / 128), ceil(N / 128)] of fp8 data; else None, or amax [G, N]
    group_offsets: Tensor,  # [G + 1]
    slot_to_row: Tensor | None,  # [M]
    bias: Tensor | None,  # [G, N]
    rowwise: bool,
    fast_accumulation: bool,
    out_dtype: torch.dtype,
) -> Tensor:  # [M, N]
    # Viewed here, because PyTorch 2.11 lacks this view under vmap.
    A, B = (x.view(torch.float8_e4m3fn) if x.dtype == torch.uint8 else x for x in (A, B))
    M = (A if slot_to_row is None else slot_to_row).size(0)
    if B.dtype == torch.float8_e4m3fn:
        B = along_rows(B.mT).mT
    tensors = (A, scales_A, B, scales_B, group_offsets, slot_to_row, bias)
    if not use_kernels(A) or 0 in (M, *A.shape, *B.shape):
        return reference.quantized_grouped_gemm(*tensors, rowwise, out_dtype)
    check_rows("A", M)
    top_k = M // A.size(0)
    return cache.call(QUANTIZED_GROUPED_GEMM, tensors, (rowwise, fast_accumulation, out_dtype, top_k))


def _quantized_grouped_gemm_fake(A: Tensor, scales_A: Tensor | None, B: Tensor, *others: Any) -> Tensor:
    _, _, slot_to_row, *_, out_dtype = others
    return A.new_empty(((A if slot_to_row is None else slot_to_row).size(0), B.size(2)), dtype=out_dtype)


def _quantized_wgrad(
    X: Tensor,  # [M, P], or tokens [T, P] with x_slots
    Y: Tensor,  # [M, Q], or tokens [T, Q] with y_slots
    group_offsets: Tensor,  # [G + 1]
    x_slots: Tensor | None,  # [M] int32, the rows' slots
    y_slots: Tensor | None,  # [M] int32
    transposed: bool,  # the memory layout of the result is [G, Q, P]
    out_dtype: torch.dtype,
) -> Tensor:  # [G, P, Q]
    if transposed:
        return _quantized_wgrad(Y, X, group_offsets, y_slots, x_slots, False, out_dtype).mT
    if not use_kernels(X, Y):
        return reference.quantized_wgrad(X, Y, group_offsets, x_slots, y_slots, out_dtype)
    M = (X if x_slots is None else x_slots).size(0)
    check_rows("X", M)
    top_k = M // max(min(X.size(0), Y.size(0)), 1)
    return cache.call(QUANTIZED_WGRAD, (X, Y, group_offsets, x_slots, y_slots), (out_dtype, top_k))


def _quantized_wgrad_fake(X: Tensor, Y: Tensor, group_offsets: Tensor, *others: Any) -> Tensor:
    _, _, transposed, out_dtype = others
    return wgrad_fake(X, Y, group_offsets, False, transposed, out_dtype)


def _quantized_activate_backward(
    preact: Tensor,  # [R, 2I] or [R, I]
    d_act: Tensor,  # [R, I]
    topk_weights: Tensor,  # [T, top_k]
    row_to_slot: Tensor,  # [R]
    group_offsets: Tensor,  # [E + 1]
    weigh: bool,
    format: str | None,
    *spec: Any,
) -> tuple[Tensor, ...]:
    """Return d_preact, weighted act if `weigh`, d_topk_weights, and d_preact in fp8 as uint8 with its scales, if there
    is a `format`. Results that do not exist are empty tensors.
    """
    spec = GLUSpec(*spec)
    order = topk_weights, row_to_slot, group_offsets
    if not use_kernels(preact) or preact.numel() == 0:
        found: Any = reference.activate_backward(preact, None, d_act, *order, spec)
        d_preact, _, weighted, d_topk_weights = found
        data, scales = (preact.new_empty(0, dtype=dtype) for dtype in (torch.uint8, torch.float32))
        if format:
            data, scales, _ = reference.quantize(d_preact, format)
        weighted = weighted if weigh else preact.new_empty(0)
        return d_preact, weighted, d_topk_weights, data.view(torch.uint8), scales.contiguous()
    tensors = (preact, d_act, *order)
    *made, data, scales = cache.call(QUANTIZED_ACTIVATE_BACKWARD, tensors, (weigh, format, spec))
    return *made, data.view(torch.uint8), scales


def _quantized_activate_backward_fake(*inputs: Any) -> tuple[Tensor, ...]:
    preact, d_act, topk_weights, _, _, weigh, format, *_ = inputs
    weighted = preact.new_empty(d_act.shape if weigh else (0,))
    data = preact.new_empty(preact.shape if format else (0,), dtype=torch.uint8)
    scales = preact.new_empty(scales_shape(preact.shape, format) if format else (0,), dtype=torch.float32)
    return preact.new_empty(preact.shape), weighted, topk_weights.new_empty(topk_weights.shape), data, scales


_FIRST_ORDER_ONLY = refusing(
    "moe_mlp: with compute there are neither gradients of gradients nor forward-mode derivatives; "
    "pass compute=None for them"
)


def differentiable_once(gradient: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """Wrap an operator's gradient so that differentiating its results raises RuntimeError."""

    def once(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found = gradient(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        return tuple(None if x is None else _first_order(x) for x in found)

    return once


_first_order = define("first_order(Tensor x) -> Tensor", torch.clone, torch.empty_like, *_FIRST_ORDER_ONLY)
quantized_grouped_gemm = define(
    "quantized_grouped_gemm(Tensor A, Tensor? scales_A, Tensor B, Tensor? scales_B, Tensor group_offsets,"
    " Tensor? slot_to_row, Tensor? bias, bool rowwise, bool fast_accumulation, ScalarType out_dtype) -> Tensor",
    _quantized_grouped_gemm,
    _quantized_grouped_gemm_fake,
    *_FIRST_ORDER_ONLY,
)
quantized_wgrad = define(
    "quantized_wgrad(Tensor X, Tensor Y, Tensor group_offsets, Tensor? x_slots, Tensor? y_slots, bool transposed,"
    " ScalarType out_dtype) -> Tensor",
    _quantized_wgrad,
    _quantized_wgrad_fake,
    *_FIRST_ORDER_ONLY,
)
quantized_activate_backward = define(
    "quantized_activate_backward(Tensor preact, Tensor d_act, Tensor topk_weights, Tensor row_to_slot,"
    f" Tensor group_offsets, bool weigh, str? format, {SPEC}) -> ({', '.join(['Tensor'] * 5)})",
    _quantized_activate_backward,
    _quantized_activate_backward_fake,
    *_FIRST_ORDER_ONLY,
)
