"""quantized_moe_mlp: a layer of experts that computes its products in fp8, and its gradient, with their operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_kernels import reference
from moe_kernels.glu import GLUSpec
from moe_kernels.ops.layer import (
    SPEC_LENGTH,
    activate_backward,
    dots_with_down_bias,
    layer_operator,
    run_layer,
    unweighted_dtype,
    weight_gradient,
    weights_of_rows,
)
from moe_kernels.ops.library import along_rows, check_rows, define, free_saved, if_needed, refusing, use_kernels
from moe_kernels.ops.moves import combine_rows, route_fake, scatter_rows
from moe_kernels.ops.products import bias_gradient, gradient_transposed, wgrad_fake
from moe_kernels.rules.quantize import finds_amax, quantises_gradient
from moe_kernels.runtime import cache, torch_internals
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
    inputs=("X", "Y", "group_offsets", "x_row_to_slot", "y_row_to_slot"),
    rows=("X", "Y", "x_row_to_slot", "y_row_to_slot"),
    counts=_counts_of_wgrad,
)
QUANTIZED_MOE_MLP = layer_operator(
    "quantized_moe_mlp", "w_gate_up", "scales_in", "w_down", "scales_out", "b_in", "b_out"
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
    if use_kernels(A) and 0 in (M, B.size(2)):
        return A.new_empty((M, B.size(2)), dtype=out_dtype)
    if not use_kernels(A) or 0 in (*A.shape, *B.shape):
        return reference.quantized_grouped_gemm(*tensors, rowwise, out_dtype)
    check_rows("A", M)
    top_k = M // A.size(0)
    return cache.call(QUANTIZED_GROUPED_GEMM, tensors, (rowwise, fast_accumulation, out_dtype, top_k))


def _quantized_grouped_gemm_fake(A: Tensor, scales_A: Tensor | None, B: Tensor, *others: Any) -> Tensor:
    _, _, slot_to_row, *_, out_dtype = others
    return A.new_empty(((A if slot_to_row is None else slot_to_row).size(0), B.size(2)), dtype=out_dtype)


def _quantized_wgrad(
    X: Tensor,  # [M, P], or tokens [T, P] with x_row_to_slot
    Y: Tensor,  # [M, Q], or tokens [T, Q] with y_row_to_slot
    group_offsets: Tensor,  # [G + 1]
    x_row_to_slot: Tensor | None,  # [M] int32
    y_row_to_slot: Tensor | None,  # [M] int32
    transposed: bool,  # the memory layout of the result is [G, Q, P]
    out_dtype: torch.dtype,
) -> Tensor:  # [G, P, Q]
    if transposed:
        return _quantized_wgrad(Y, X, group_offsets, y_row_to_slot, x_row_to_slot, False, out_dtype).mT
    if not use_kernels(X, Y):
        return reference.quantized_wgrad(X, Y, group_offsets, x_row_to_slot, y_row_to_slot, out_dtype)
    M = (X if x_row_to_slot is None else x_row_to_slot).size(0)
    check_rows("X", M)
    top_k = M // max(min(X.size(0), Y.size(0)), 1)
    return cache.call(QUANTIZED_WGRAD, (X, Y, group_offsets, x_row_to_slot, y_row_to_slot), (out_dtype, top_k))


def _quantized_wgrad_fake(X: Tensor, Y: Tensor, group_offsets: Tensor, *others: Any) -> Tensor:
    _, _, transposed, out_dtype = others
    return wgrad_fake(X, Y, group_offsets, False, transposed, out_dtype)


_FIRST_ORDER_ONLY = refusing(
    "moe_mlp: with compute there are neither gradients of gradients nor forward-mode derivatives; "
    "pass compute=None for them"
)


def _first_order(gradient: Tensor, source: Tensor) -> Tensor:
    return gradient.clone()


first_order = define(_first_order, lambda gradient, source: torch.empty_like(gradient), *_FIRST_ORDER_ONLY)
quantized_grouped_gemm = define(_quantized_grouped_gemm, _quantized_grouped_gemm_fake, *_FIRST_ORDER_ONLY)
quantized_wgrad = define(_quantized_wgrad, _quantized_wgrad_fake, *_FIRST_ORDER_ONLY)


def _quantized_moe_mlp(
    hidden: Tensor,  # [T, H]
    topk_ids: Tensor,  # [T, top_k]
    topk_weights: Tensor,  # [T, top_k]
    w_gate_up: Tensor,  # [E, 2I, H] or [E, I, H]
    w_down: Tensor,  # [E, H, I]
    b_in: Tensor | None,  # [E, 2I] or [E, I]
    b_out: Tensor | None,  # [E, H]
    data_in: Tensor | None,  # w_gate_up in fp8; all eight are None, or none is
    scales_in: Tensor | None,  # [E, 2I, 1], or [E, cdiv(2I, 128), cdiv(H, 128)] unless `rowwise`
    backward_in: Tensor | None,  # [E, H, 2I], w_gate_up^T in fp8
    backward_scales_in: Tensor | None,  # [E, H, 1] or [E, cdiv(H, 128), cdiv(2I, 128)]
    data_out: Tensor | None,  # the same of w_down
    scales_out: Tensor | None,
    backward_out: Tensor | None,
    backward_scales_out: Tensor | None,
    rowwise: bool,
    fast_accumulation: bool,
    fp8_wgrad: bool,
    save: bool,
    *spec: Any,
) -> tuple[Tensor, ...]:
    """Return the results of `reference.quantized_moe_mlp` and the routing of `route`. Fp8 data are returned as uint8,
    because autograd and vmap refuse fp8.
    """
    if use_kernels(hidden) and topk_ids.numel() == 0:  # without a read on the host, as the reference has
        made = _quantized_results(hidden, topk_ids, w_gate_up, w_down, data_in is not None, rowwise, save)
        made[0].zero_()
        made[-3].zero_()
        return made
    slots = (topk_ids, topk_weights)
    first = (w_gate_up, None) if data_in is None else (along_rows(data_in), scales_in)
    second = (w_down, None) if data_out is None else (along_rows(data_out), scales_out)
    if not use_kernels(hidden) or 0 in (*w_gate_up.shape, *w_down.shape):
        routing = reference.route(*slots, w_gate_up.size(0))[:3]
        group_offsets, _, slot_to_row = routing
        rows = (hidden, topk_weights, group_offsets, slot_to_row)
        made = reference.quantized_moe_mlp(*rows, *first, *second, b_in, b_out, rowwise, save, GLUSpec(*spec))
    else:
        options = (rowwise, fast_accumulation, save, GLUSpec(*spec))
        made, routing = run_layer(QUANTIZED_MOE_MLP, (hidden, *slots), (*first, *second, b_in, b_out), options)
    return tuple([x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x for x in (*made, *routing)])


def _quantized_moe_mlp_fake(*inputs: Any) -> tuple[Tensor, ...]:
    hidden, topk_ids, _, w_gate_up, w_down, _, _, data_in, *_ = inputs
    rowwise, _, _, save = inputs[-SPEC_LENGTH - 4 : -SPEC_LENGTH]
    return _quantized_results(hidden, topk_ids, w_gate_up, w_down, data_in is not None, rowwise, save)


def _quantized_results(
    hidden: Tensor, topk_ids: Tensor, w_gate_up: Tensor, w_down: Tensor, given: bool, rowwise: bool, save: bool
) -> tuple[Tensor, ...]:
    """Allocate the results of `_quantized_moe_mlp`; `given` if the weights were quantised before."""
    saved = [hidden.new_empty((topk_ids.numel(), w_gate_up.size(1)) if save else (0,))]
    keeps = save and not given
    for w in (w_gate_up, w_down):
        E, N, K = w.shape
        data = w.new_empty((E, K, N) if keeps and not rowwise else (0,), dtype=torch.uint8)
        if rowwise:
            kept = w.new_empty((E, K) if keeps and finds_amax(w) else (0,), dtype=torch.int32)
        else:
            kept = w.new_empty(scales_shape(w.shape, "128x128") if keeps else (0,), dtype=torch.float32)
        saved += data, kept
    return hidden.new_empty(hidden.shape), *saved, *route_fake(topk_ids, w_gate_up.size(0))


def _quantized_moe_mlp_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.rowwise, ctx.fast_accumulation, ctx.fp8_wgrad, ctx.save = inputs[:-SPEC_LENGTH]
    hidden, _, topk_weights, *parameters = tensors[:7]
    data_in, scales_in, backward_in, backward_scales_in, _, _, backward_out, backward_scales_out = tensors[7:]
    ctx.spec = inputs[-SPEC_LENGTH:]
    _, preact, *weights = output[:-3]
    routing = output[-3:]
    ctx.mark_non_differentiable(*output[1:])
    if data_in is not None:
        backward_scales_in, backward_scales_out = backward_scales_in.mT, backward_scales_out.mT
    elif ctx.save:
        backward_in, backward_scales_in, backward_out, backward_scales_out = weights
    # Only the gradient of hidden states multiplies by w_gate_up, in fp8.
    by_in = if_needed(ctx, 0, backward_in), if_needed(ctx, 0, backward_scales_in)
    again = (preact, None, None) if ctx.save else (None, data_in, scales_in)
    ctx.save_for_backward(
        hidden, topk_weights, *routing, *parameters, *again, *by_in, backward_out, backward_scales_out
    )
    ctx.set_materialize_grads(False)


def _backward_operand(w: Tensor, data: Tensor | None, scales: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the weight as the gradient multiplies by it, and its scales, its columns' amax, or None."""
    if data is None or scales is None or scales.numel() == 0:
        return w, None
    return (data.mT if data.numel() else w), scales


def _quantized_moe_mlp_gradient(ctx: Any, d_out: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    """Quantise hidden states again, along the dimension contracted here, and "rowwise" weights, unless that happened
    before: by their columns' amax if the forward pass found it.

    As in the gradient of `moe_mlp`, act is recomputed from `preact`, and d_topk_weights is <d_out @ w_out^T, act>.
    If autograd records it, all gradients depend on `source`, a tensor that requires grad, so that they are refused when
    differentiated: they need not depend on others, such as a constant `d_out`.
    """
    hidden, topk_weights, group_offsets, row_to_slot, slot_to_row, *others = ctx.saved_tensors
    w_gate_up, w_down, b_in, b_out, preact, data_in, scales_in, *back = others
    by_in, by_out = _backward_operand(w_gate_up, *back[:2]), _backward_operand(w_down, *back[2:])
    del others, back
    free_saved(ctx)
    if d_out is None:
        return (None,) * len(ctx.needs_input_grad)
    need_hidden, _, need_topk_weights, *needed = torch_internals.asked_gradients(ctx)
    need_w_in, need_w_out, need_b_in, need_b_out = needed[:4]
    # These decide about plans, so that a pass that asks for fewer gradients needs no others.
    requires_hidden, _, requires_topk_weights, _, requires_w_out, *_ = ctx.needs_input_grad
    w_in, w_out = w_gate_up.mT, w_down.mT
    d_hidden = d_w_in = d_w_out = d_b_in = d_b_out = None
    products, routing = (ctx.rowwise, ctx.fast_accumulation), (slot_to_row, group_offsets, topk_weights.size(1))
    tokens, spec = (group_offsets, slot_to_row), GLUSpec(*ctx.spec)
    weights_dtype = topk_weights.dtype
    if b_out is not None and requires_topk_weights:  # their gradient is a sum of two, which is rounded once
        topk_weights = topk_weights.to(torch.promote_types(weights_dtype, torch.float32))
    if not ctx.save:
        first = (w_in, None) if data_in is None else (data_in.mT, scales_in.mT)
        preact = quantized_grouped_gemm(hidden, None, *first, *tokens, b_in, *products, hidden.dtype)
    d_act = quantized_grouped_gemm(d_out, None, *by_out, *tokens, None, *products, unweighted_dtype(preact.dtype))
    format = None
    if requires_hidden and quantises_gradient(d_act.size(1), ctx.rowwise, spec.gated, spec.interleaved):
        format = "rowwise" if ctx.rowwise else "1x128"
    order = topk_weights, row_to_slot, group_offsets
    d_preact, _, weighted, d_topk_weights, *d_quantized = activate_backward(
        preact, None, d_act, *order, requires_w_out, format, *spec
    )
    del preact, by_out, d_act
    if need_hidden:
        d_rows = d_quantized if format else (d_preact, None)
        d_sorted = quantized_grouped_gemm(*d_rows, *by_in, group_offsets, None, None, *products, hidden.dtype)
        d_hidden = combine_rows(d_sorted, None, *routing, hidden.dtype)
        del d_sorted, d_rows
    del by_in, d_quantized
    if need_w_in and not ctx.fp8_wgrad:
        rows = scatter_rows(hidden, None, *routing, hidden.dtype)
        d_w_in = weight_gradient(rows, d_preact, group_offsets, w_in)
        del rows
    elif need_w_in:
        transposed = gradient_transposed(w_in)
        d_w_in = quantized_wgrad(hidden, d_preact, group_offsets, row_to_slot, None, transposed, w_in.dtype)
    if need_b_in:
        d_b_in = bias_gradient(d_preact, group_offsets, b_in.dtype)
    del d_preact
    if need_b_out or (need_w_out and not ctx.fp8_wgrad):
        rows = scatter_rows(d_out, None, *routing, d_out.dtype)
        if need_b_out:
            d_b_out = bias_gradient(rows, group_offsets, b_out.dtype, weights_of_rows(topk_weights, *routing))
        if need_w_out and not ctx.fp8_wgrad:
            d_w_out = weight_gradient(weighted, rows, group_offsets, w_out)
        del rows
    if need_w_out and ctx.fp8_wgrad:
        transposed = gradient_transposed(w_out)
        d_w_out = quantized_wgrad(weighted, d_out, group_offsets, None, row_to_slot, transposed, w_out.dtype)
    if not need_topk_weights:
        d_topk_weights = None
    elif b_out is not None:
        d_topk_weights = d_topk_weights + dots_with_down_bias(d_out, topk_weights, b_out, *routing)
        d_topk_weights = d_topk_weights.to(weights_dtype)
    d_weights = (None if d is None else d.mT for d in (d_w_in, d_w_out))
    made = d_hidden, None, d_topk_weights, *d_weights, d_b_in, d_b_out, *[None] * (len(ctx.needs_input_grad) - 7)
    if not torch.is_grad_enabled():
        return made
    sources = (d_out, hidden, topk_weights, w_gate_up, w_down, b_in, b_out)
    source = next((x for x in sources if x is not None and x.requires_grad), None)
    return made if source is None else tuple(None if d is None else first_order(d, source) for d in made)


quantized_moe_mlp = define(
    _quantized_moe_mlp, _quantized_moe_mlp_fake, _quantized_moe_mlp_setup, _quantized_moe_mlp_gradient, results=9
)
