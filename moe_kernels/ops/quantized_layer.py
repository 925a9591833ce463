"""quantized_moe_mlp: a layer of experts that computes its products in fp8, and its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_kernels import reference
from moe_kernels.glu import GLUSpec
from moe_kernels.ops.layer import (
    SPEC,
    SPEC_LENGTH,
    dots_with_down_bias,
    layer_operator,
    run_layer,
    weight_gradient,
    weights_of_rows,
)
from moe_kernels.ops.library import along_rows, define, free_saved, needs, use_kernels
from moe_kernels.ops.moves import combine_rows, route_fake, scatter_rows
from moe_kernels.ops.products import bias_gradient
from moe_kernels.ops.quantized import (
    differentiable_once,
    quantized_activate_backward,
    quantized_grouped_gemm,
    quantized_wgrad,
)
from moe_kernels.rules.quantize import finds_amax, quantises_gradient
from moe_kernels.runtime.symbolic import lies_transposed
from moe_kernels.scaled import BLOCK

QUANTIZED_MOE_MLP = layer_operator(
    "quantized_moe_mlp", "w_gate_up", "scales_in", "w_down", "scales_out", "b_in", "b_out"
)


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
    slots = (topk_ids, topk_weights)
    first = (w_gate_up, None) if data_in is None else (along_rows(data_in), scales_in)
    second = (w_down, None) if data_out is None else (along_rows(data_out), scales_out)
    if not use_kernels(hidden) or 0 in (*topk_weights.shape, *w_gate_up.shape, *w_down.shape):
        routing = reference.route(*slots, w_gate_up.size(0))[:3]
        group_offsets, _, slot_to_row = routing
        rows = (hidden, topk_weights, group_offsets, slot_to_row)
        made = reference.quantized_moe_mlp(*rows, *first, *second, b_in, b_out, rowwise, save, GLUSpec(*spec))
    else:
        options = (rowwise, fast_accumulation, save, GLUSpec(*spec))
        made, routing = run_layer(QUANTIZED_MOE_MLP, (hidden, *slots), (*first, *second, b_in, b_out), options)
    return tuple([x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x for x in (*made, *routing)])


def _quantized_moe_mlp_fake(*inputs: Any) -> tuple[Tensor, ...]:
    hidden, topk_ids, _, w_gate_up, w_down, _, _, given, *_ = inputs
    rowwise, _, _, save = inputs[-SPEC_LENGTH - 4 : -SPEC_LENGTH]
    saved = [hidden.new_empty((topk_ids.numel(), w_gate_up.size(1)) if save else (0,))]
    keeps = save and given is None
    for w in (w_gate_up, w_down):
        E, N, K = w.shape
        data = w.new_empty((E, K, N) if keeps and not rowwise else (0,), dtype=torch.uint8)
        if rowwise:
            kept = w.new_empty((E, K) if keeps and finds_amax(w) else (0,), dtype=torch.int32)
        else:
            kept = w.new_empty((E, -(-N // BLOCK), -(-K // BLOCK)) if keeps else (0,), dtype=torch.float32)
        saved += data, kept
    return hidden.new_empty(hidden.shape), *saved, *route_fake(topk_ids, w_gate_up.size(0))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
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
    by_in = needs(ctx, 0, backward_in), needs(ctx, 0, backward_scales_in)
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


@differentiable_once
def _gradient(ctx: Any, d_out: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    """Quantise hidden states again, along the dimension contracted here, and "rowwise" weights, unless that happened
    before: by their columns' amax if the forward pass found it.

    As in the gradient of `moe_mlp`, act is recomputed from `preact`, and d_topk_weights is <d_out @ w_out^T, act>.
    """
    hidden, topk_weights, group_offsets, row_to_slot, slot_to_row, *others = ctx.saved_tensors
    w_gate_up, w_down, b_in, b_out, preact, data_in, scales_in, *back = others
    by_in, by_out = _backward_operand(w_gate_up, *back[:2]), _backward_operand(w_down, *back[2:])
    del others, back
    free_saved(ctx)
    if d_out is None:
        return (None,) * len(ctx.needs_input_grad)
    need_hidden, _, need_topk_weights, need_w_in, need_w_out, need_b_in, need_b_out, *_ = ctx.needs_input_grad
    w_in, w_out = w_gate_up.mT, w_down.mT
    d_hidden = d_w_in = d_w_out = d_b_in = d_b_out = None
    products, routing = (ctx.rowwise, ctx.fast_accumulation), (slot_to_row, group_offsets, topk_weights.size(1))
    tokens, spec = (group_offsets, slot_to_row), GLUSpec(*ctx.spec)
    if not ctx.save:
        first = (w_in, None) if data_in is None else (data_in.mT, scales_in.mT)
        preact = quantized_grouped_gemm(hidden, None, *first, *tokens, b_in, *products, hidden.dtype)
    d_act = quantized_grouped_gemm(d_out, None, *by_out, *tokens, None, *products, preact.dtype)
    format = None
    if need_hidden and quantises_gradient(d_act.size(1), ctx.rowwise, spec.gated, spec.interleaved):
        format = "rowwise" if ctx.rowwise else "1x128"
    order = topk_weights, row_to_slot, group_offsets
    d_preact, weighted, d_topk_weights, *d_quantized = quantized_activate_backward(
        preact, d_act, *order, need_w_out, format, *spec
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
        transposed = lies_transposed(w_in)
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
        transposed = lies_transposed(w_out)
        d_w_out = quantized_wgrad(weighted, d_out, group_offsets, None, row_to_slot, transposed, w_out.dtype)
    if not need_topk_weights:
        d_topk_weights = None
    elif b_out is not None:
        d_topk_weights = d_topk_weights + dots_with_down_bias(d_out, topk_weights, b_out, *routing)
    d_weights = (None if d is None else d.mT for d in (d_w_in, d_w_out))
    return d_hidden, None, d_topk_weights, *d_weights, d_b_in, d_b_out, *[None] * (len(ctx.needs_input_grad) - 7)


quantized_moe_mlp = define(
    "quantized_moe_mlp(Tensor hidden, Tensor topk_ids, Tensor topk_weights, Tensor w_gate_up, Tensor w_down,"
    " Tensor? b_in, Tensor? b_out, Tensor? data_in, Tensor? scales_in, Tensor? backward_in, Tensor? backward_scales_in,"
    " Tensor? data_out, Tensor? scales_out, Tensor? backward_out, Tensor? backward_scales_out,"
    " bool rowwise, bool fast_accumulation, bool fp8_wgrad, bool save,"
    f" {SPEC}) -> ({', '.join(['Tensor'] * 9)})",
    _quantized_moe_mlp,
    _quantized_moe_mlp_fake,
    _setup,
    _gradient,
)
