"""quantized_moe_mlp: a layer of experts that computes its products in fp8, and its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_kernels import reference
from moe_kernels.glu import GLUSpec
from moe_kernels.ops.layer import activate_backward, weight_gradient
from moe_kernels.ops.library import check_rows, define, use_kernels
from moe_kernels.ops.moves import combine_rows, dot_rows, scatter_rows
from moe_kernels.ops.products import bias_gradient, grouped_gemm, grouped_gemm_wgrad
from moe_kernels.ops.quantized import no_second_order, quantized_grouped_gemm, quantized_wgrad
from moe_kernels.runtime import cache
from moe_kernels.runtime.signature import Counts, Operator
from moe_kernels.runtime.symbolic import lies_transposed

QUANTIZED_MOE_MLP = Operator(
    "quantized_moe_mlp",
    planner="moe_kernels.kernels.layer",
    inputs=("hidden", "topk_weights", "group_offsets", "slot_to_row", "w_in", "w_out", "b_in", "b_out"),
    rows=("hidden", "topk_weights", "slot_to_row"),
    counts=lambda tensors, _: Counts(tensors[0].size(0), (tensors[3].size(0),), groups=tensors[4].size(0)),
)


def _quantized_moe_mlp(
    hidden: Tensor,  # [T, H]
    topk_weights: Tensor,  # [T, top_k]
    group_offsets: Tensor,  # [E + 1]
    row_to_slot: Tensor,  # [R]
    slot_to_row: Tensor,  # [R]
    w_in: Tensor,  # [E, H, 2I] or [E, H, I]
    w_out: Tensor,  # [E, I, H]
    b_in: Tensor | None,  # [E, 2I] or [E, I]
    b_out: Tensor | None,  # [E, H]
    rowwise: bool,
    fp8_wgrad: bool,
    save_preact: bool,
    *spec: Any,
) -> tuple[Tensor, Tensor]:
    """The layer's result `[T, H]`, and if `save_preact` the rows' preact; else an empty tensor."""
    tensors = (hidden, topk_weights, group_offsets, slot_to_row, w_in, w_out, b_in, b_out)
    if not use_kernels(hidden) or 0 in (*topk_weights.shape, *w_in.shape, *w_out.shape):
        out, preact = reference.quantized_moe_mlp(*tensors, rowwise, GLUSpec(*spec))
        return out, preact if save_preact else preact.new_empty(0)
    check_rows("topk_ids", slot_to_row.size(0))
    made: tuple[Tensor, Tensor] = cache.call(QUANTIZED_MOE_MLP, tensors, (rowwise, save_preact, GLUSpec(*spec)))
    return made


def _quantized_moe_mlp_fake(
    hidden: Tensor,
    topk_weights: Tensor,
    group_offsets: Tensor,
    row_to_slot: Tensor,
    slot_to_row: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    b_in: Tensor | None,
    b_out: Tensor | None,
    rowwise: bool,
    fp8_wgrad: bool,
    save_preact: bool,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    preact = hidden.new_empty((slot_to_row.size(0), w_in.size(2)) if save_preact else (0,))
    return hidden.new_empty(hidden.shape), preact


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.rowwise, ctx.fp8_wgrad, ctx.save_preact = inputs[:12]
    ctx.spec = inputs[12:]
    ctx.save_for_backward(*tensors, output[1] if ctx.save_preact else None)
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, d_out: Tensor | None, d_preact: Tensor | None) -> tuple[Tensor | None, ...]:
    """Saves nothing in fp8: hidden states and weights are quantised again, along the dimensions contracted here.

    As in the gradient of `moe_mlp`, act is made again from `preact`, and d_topk_weights is <d_out @ w_out^T, act>.
    """
    hidden, topk_weights, group_offsets, row_to_slot, slot_to_row, w_in, w_out, b_in, b_out, preact = ctx.saved_tensors
    ctx.maybe_clear_saved_tensors()  # so that preact ends below, unless the graph is kept for another backward
    need, rowwise, top_k = ctx.needs_input_grad, ctx.rowwise, topk_weights.size(1)
    result: list[Tensor | None] = [None] * len(need)
    if d_preact is not None and ctx.save_preact:
        no_second_order()
    if d_out is None:
        return tuple(result)
    if not ctx.save_preact:
        preact = quantized_grouped_gemm(hidden, w_in, group_offsets, slot_to_row, b_in, rowwise, hidden.dtype)
    d_act = quantized_grouped_gemm(d_out, w_out.mT, group_offsets, slot_to_row, None, rowwise, preact.dtype)
    d_preact, _, weighted, d_topk_weights = activate_backward(
        preact, None, d_act, topk_weights, row_to_slot, group_offsets, need[6], *ctx.spec
    )
    del preact, d_act
    routing = slot_to_row, group_offsets, top_k
    if need[0]:
        d_sorted = quantized_grouped_gemm(d_preact, w_in.mT, group_offsets, None, None, rowwise, hidden.dtype)
        result[0] = combine_rows(d_sorted, None, *routing, hidden.dtype)
        del d_sorted
    row_to_token = torch.div(row_to_slot, top_k, rounding_mode="floor") if ctx.fp8_wgrad else None

    def scattered(tokens: Tensor) -> Tensor:
        rows: Tensor = scatter_rows(tokens, None, *routing, tokens.dtype)
        return rows

    if need[5]:
        if row_to_token is None:
            result[5] = weight_gradient(scattered(hidden), d_preact, group_offsets, w_in)
        else:
            result[5] = quantized_wgrad(
                hidden, d_preact, group_offsets, row_to_token, None, lies_transposed(w_in), w_in.dtype
            )
    if need[7] and b_in is not None:
        result[7] = bias_gradient(d_preact, group_offsets, b_in.dtype)
    del d_preact
    biased = b_out is not None and (need[1] or need[8])
    d_rows = scattered(d_out) if biased or (need[6] and row_to_token is None) else None
    if need[6]:
        if row_to_token is None:
            assert d_rows is not None
            result[6] = weight_gradient(weighted, d_rows, group_offsets, w_out)
        else:
            result[6] = quantized_wgrad(
                weighted, d_out, group_offsets, None, row_to_token, lies_transposed(w_out), w_out.dtype
            )
    if b_out is not None and need[8]:
        assert d_rows is not None
        dtype = torch.promote_types(topk_weights.dtype, torch.float32)
        weights = scatter_rows(d_out.new_ones(d_out.size(0), 1, dtype=dtype), topk_weights, *routing, dtype)
        result[8] = grouped_gemm_wgrad(weights, d_rows, group_offsets, False, False, b_out.dtype)[:, 0]
    if b_out is not None and need[1]:
        assert d_rows is not None
        ones = d_rows.new_ones(1, 1).expand(d_rows.size(0), 1)
        biases = grouped_gemm(ones, b_out.unsqueeze(1), group_offsets, None, d_rows.dtype, "auto")
        d_topk_weights = d_topk_weights + dot_rows(d_out, biases, *routing, topk_weights.dtype)
    result[1] = d_topk_weights if need[1] else None
    return tuple(result)


quantized_moe_mlp = define(
    "quantized_moe_mlp(Tensor hidden, Tensor topk_weights, Tensor group_offsets, Tensor row_to_slot,"
    " Tensor slot_to_row, Tensor w_in, Tensor w_out, Tensor? b_in, Tensor? b_out, bool rowwise, bool fp8_wgrad,"
    " bool save_preact, str activation, bool gated, bool interleaved, float alpha, float limit) -> (Tensor, Tensor)",
    _quantized_moe_mlp,
    _quantized_moe_mlp_fake,
    _setup,
    _gradient,
)
