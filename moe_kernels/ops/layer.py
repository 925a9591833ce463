"""Operators of an expert layer: activate, swiglu_ffn, moe_mlp, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_kernels import reference
from moe_kernels.checks import clamp_offsets
from moe_kernels.glu import GLUSpec, columns
from moe_kernels.ops.library import check_rows, define, free_saved, schema_of, use_kernels
from moe_kernels.ops.moves import combine_rows, dot_rows, route, route_fake, scatter_rows
from moe_kernels.ops.products import bias_gradient, gradient_transposed, grouped_gemm, grouped_gemm_wgrad
from moe_kernels.rules.layer import sorts
from moe_kernels.runtime import cache, torch_internals
from moe_kernels.runtime.signature import Counts, Operator
from moe_kernels.scaled import scales_shape


def layer_operator(name: str, *parameters: str) -> Operator:
    """Operator of a layer with these parameters, of which the first has E matrices; see `run_layer`."""
    slots, maps = ("topk_ids", "topk_weights"), ("row_to_slot", "slot_to_row")

    def counts(tensors: Any, options: Any) -> Counts:
        hidden, topk_ids, _, _, _, _, weight, *_ = tensors
        return Counts(hidden.size(0), (topk_ids.numel(),), groups=weight.size(0))

    inputs = ("hidden", *slots, "group_offsets", *maps, *parameters)
    return Operator(name, "moe_kernels.kernels.layer", inputs, ("hidden", *slots, *maps), counts)


def run_layer(operator: Operator, tokens: Sequence[Tensor], parameters: Any, options: Any) -> tuple[Any, Any]:
    """Run the plan for `tokens`, which are hidden states, topk_ids and topk_weights.

    Return its results, and the routing if that is computed here, because the kernels cannot for all sizes, or else ().
    """
    _, topk_ids, topk_weights = tokens
    check_rows("topk_ids", topk_ids.numel())
    E = parameters[0].size(0)
    routing: Any = () if sorts(topk_ids.numel(), E) else reference.route(topk_ids, topk_weights, E)[:3]
    return cache.call(operator, (*tokens, *(routing or (None,) * 3), *parameters), options), routing


ACTIVATE = Operator("activate", "moe_kernels.kernels.activation", ("preact", "preact_up"), ("preact", "preact_up"))
ACTIVATE_BACKWARD = Operator(
    "activate_backward",
    planner="moe_kernels.kernels.activation",
    inputs=("preact", "preact_up", "d_act", "topk_weights", "row_to_slot", "group_offsets"),
    rows=("preact", "preact_up", "d_act", "topk_weights", "row_to_slot"),
)
SWIGLU_FFN = Operator(
    "swiglu_ffn",
    planner="moe_kernels.kernels.layer",
    inputs=("rows", "group_offsets", "w_in", "w_up", "b_in", "b_up"),
    rows=("rows",),
    counts=lambda tensors, _: Counts(tensors[0].size(0), groups=tensors[2].size(0)),
)
MOE_MLP = layer_operator("moe_mlp", "w_gate_up", "w_down", "w_up", "b_in", "b_up", "b_out")

SPEC_LENGTH = len(GLUSpec._fields)


def _activate(preact: Tensor, preact_up: Tensor | None, *spec: Any) -> Tensor:
    """Return act `[R, I]` from preact `[R, 2I]` or `[R, I]` and preact_up `[R, I]`."""
    if not use_kernels(preact):
        return reference.activate(preact, preact_up, GLUSpec(*spec))
    return cache.call(ACTIVATE, (preact, preact_up), (GLUSpec(*spec),))


def _activate_fake(preact: Tensor, preact_up: Tensor | None, *spec: Any) -> Tensor:
    gate, _ = GLUSpec(*spec).halves(preact, preact_up)
    return preact.new_empty(gate.shape)


def _activate_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    preact, preact_up, *ctx.spec = inputs
    ctx.save_for_backward(preact, preact_up)


def _activate_gradient(ctx: Any, d_act: Tensor) -> tuple[Any, ...]:
    preact, preact_up = ctx.saved_tensors
    order = (None, None, None)
    d_preact, d_preact_up, *_ = activate_backward(preact, preact_up, d_act, *order, False, None, *ctx.spec)
    return d_preact, None if preact_up is None else d_preact_up, *[None] * len(ctx.spec)


def _activate_backward(
    preact: Tensor,  # [R, 2I] or [R, I]
    preact_up: Tensor | None,  # [R, I]
    d_act: Tensor,  # [R, I]
    topk_weights: Tensor | None,  # [T, top_k]
    row_to_slot: Tensor | None,  # [R]
    group_offsets: Tensor | None,  # [E + 1]
    weigh: bool,
    format: str | None,
    *spec: Any,
) -> tuple[Tensor, ...]:
    """Return the results of `reference.activate_backward`, weighted act only if `weigh`; and d_preact in fp8, as uint8,
    with its scales if there is a `format`. Results that do not exist are empty tensors.
    """
    spec = GLUSpec(*spec)
    tensors = (preact, preact_up, d_act, topk_weights, row_to_slot, group_offsets)
    if use_kernels(preact) and not (format and preact.numel() == 0):
        *made, data, scales = cache.call(ACTIVATE_BACKWARD, tensors, (weigh, format, spec))
        return *made, data.view(torch.uint8), scales
    d_preact, d_preact_up, weighted, dots = reference.activate_backward(*tensors, spec)
    made = [preact.new_empty(0) if x is None else x for x in (d_preact, d_preact_up, weighted if weigh else None, dots)]
    if not format:
        return *made, *(preact.new_empty(0, dtype=dtype) for dtype in (torch.uint8, torch.float32))
    data, scales, _ = reference.quantize(d_preact, format)
    return *made, data.view(torch.uint8), scales.contiguous()


def _activate_backward_fake(*inputs: Any) -> tuple[Tensor, ...]:
    preact, preact_up, d_act, topk_weights, _, _, weigh, format, *_ = inputs
    d_preact_up = preact.new_empty((0,) if preact_up is None else preact_up.shape)
    weighted = preact.new_empty(d_act.shape if weigh else (0,))
    dots = preact.new_empty(0) if topk_weights is None else topk_weights.new_empty(topk_weights.shape)
    data = preact.new_empty(preact.shape if format else (0,), dtype=torch.uint8)
    scales = preact.new_empty(scales_shape(preact.shape, format) if format else (0,), dtype=torch.float32)
    return preact.new_empty(preact.shape), d_preact_up, weighted, dots, data, scales


def _activate_backward_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.weigh, ctx.format = inputs[:-SPEC_LENGTH]
    ctx.spec = inputs[-SPEC_LENGTH:]
    ctx.save_for_backward(*tensors)


def _activate_backward_gradient(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    """Second-order gradients, computed by plain PyTorch; none with a format."""
    if ctx.format:
        raise RuntimeError("activate_backward: a gradient in fp8 has no gradients")
    spec = GLUSpec(*ctx.spec)
    inputs = ctx.saved_tensors
    asked = [i for i in range(4) if ctx.needs_input_grad[i]]
    upstream: list[Tensor] = []

    def outputs(*values: Tensor) -> tuple[Tensor, ...]:
        given: list[Any] = [*inputs, spec]
        for i, value in zip(asked, values, strict=True):
            given[i] = value
        found = list(reference.activate_backward(*given))
        if not ctx.weigh:
            found[2] = None
        upstream[:] = [d for y, d in zip(found, grads[:4], strict=True) if y is not None]
        return tuple(y for y in found if y is not None)

    pullback: Any = torch.func.vjp(outputs, *(inputs[i] for i in asked))[1]
    by_input = dict(zip(asked, pullback(tuple(upstream)), strict=True))
    return *(by_input.get(i) for i in range(6)), None, None, *[None] * len(spec)


activate = define(_activate, _activate_fake, _activate_setup, _activate_gradient)
activate_backward = define(
    _activate_backward,
    _activate_backward_fake,
    _activate_backward_setup,
    _activate_backward_gradient,
    results=6,
)


def _swiglu_ffn(
    rows: Tensor,  # [M, H]
    group_offsets: Tensor,  # [E + 1]
    w_in: Tensor,  # [E, H, 2I] or [E, H, I]
    w_up: Tensor | None,  # [E, H, I]
    b_in: Tensor | None,  # [E, 2I] or [E, I]
    b_up: Tensor | None,  # [E, I]
    save_preact: bool,
    *spec: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return act `[M, I]` and the preactivations preact and preact_up, which are empty unless `save_preact`."""
    tensors = (rows, group_offsets, w_in, w_up, b_in, b_up)
    if not use_kernels(rows, w_in, w_up):
        act, *preacts = reference.first_half(*tensors, GLUSpec(*spec))
        preact, preact_up = (x if save_preact and x is not None else act.new_empty(0) for x in preacts)
        return act, preact, preact_up
    check_rows("rows", rows.size(0))
    return cache.call(SWIGLU_FFN, tensors, (save_preact, adjacent(w_in, w_up), GLUSpec(*spec)))


def adjacent(w_in: Tensor, w_up: Tensor | None) -> bool:
    """Whether `w_up` begins halfway between two experts of `w_in`, in one storage: both can be read as one tensor."""
    if w_up is None or w_in.stride() != w_up.stride() or w_in.dtype != w_up.dtype:
        return False
    middle = 2 * (w_up.data_ptr() - w_in.data_ptr()) == w_in.stride(0) * w_in.element_size()
    return middle and w_up.untyped_storage().data_ptr() == w_in.untyped_storage().data_ptr()


def _swiglu_ffn_fake(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows, _, w_in, w_up, _, _, save_preact, *spec = inputs
    dtype = torch.promote_types(rows.dtype, w_in.dtype)
    M, W = rows.size(0), w_in.size(2)
    act = rows.new_empty((M, GLUSpec(*spec).width(w_in.size(2), w_up is not None)), dtype=dtype)
    preact = rows.new_empty((M, W) if save_preact else (0,), dtype=dtype)
    return act, preact, rows.new_empty((M, W) if save_preact and w_up is not None else (0,), dtype=dtype)


def _swiglu_ffn_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    rows, group_offsets, w_in, w_up, b_in, b_up, ctx.save_preact, *ctx.spec = inputs
    _, preact, preact_up = output
    kept = (preact, preact_up) if ctx.save_preact else (None, None)
    ctx.dtype = rows.dtype
    needed = not ctx.save_preact or ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
    ctx.save_for_backward(rows if needed else None, group_offsets, w_in, w_up, b_in, b_up, *kept)
    ctx.set_materialize_grads(False)


def _swiglu_ffn_gradient(
    ctx: Any, d_act: Tensor | None, d_preact: Tensor | None, d_preact_up: Tensor | None
) -> tuple[Tensor | None, ...]:
    rows, group_offsets, w_in, w_up, b_in, b_up, preact, preact_up = ctx.saved_tensors
    free_saved(ctx)
    if not ctx.save_preact:
        _, preact, preact_up = swiglu_ffn(rows, group_offsets, w_in, w_up, b_in, b_up, True, *ctx.spec)
        d_preact = d_preact_up = None  # the gradients of empty tensors
    if d_act is not None:
        preact_up = None if w_up is None else preact_up
        if torch.is_grad_enabled():
            preact, preact_up = (_zeros_outside(x, group_offsets) for x in (preact, preact_up))
        found = activate_backward(preact, preact_up, d_act, None, None, None, False, None, *ctx.spec)
        d_preact, d_preact_up = _sum(found[0], d_preact), _sum(found[1], d_preact_up)
    del preact, preact_up
    need_rows, _, need_w_in, need_w_up, need_b_in, need_b_up, *_ = torch_internals.asked_gradients(ctx)
    d_preacts, needed = (d_preact, d_preact_up), (need_w_in, need_w_up, need_b_in, need_b_up)
    d_rows = _rows_gradient((w_in, w_up), d_preacts, group_offsets, ctx.dtype) if need_rows else None
    d_parameters = _parameter_gradients(needed, rows, (w_in, w_up, b_in, b_up), d_preacts, group_offsets)
    return d_rows, None, *d_parameters, None, *[None] * len(ctx.spec)


def _zeros_outside(preact: Tensor | None, group_offsets: Tensor) -> Tensor | None:
    """Replace rows in no group, which kernels do not write: second derivatives multiply them by zeros."""
    if preact is None:
        return None
    offsets, rows = clamp_offsets(group_offsets, preact.size(0)), torch.arange(preact.size(0), device=preact.device)
    return torch.where(((rows >= offsets[0]) & (rows < offsets[-1])).unsqueeze(1), preact, 0.0)


def _rows_gradient(
    weights: tuple[Tensor, Tensor | None],  # w_in, w_up
    d_preacts: tuple[Tensor | None, Tensor | None],  # [M, 2I] or [M, I], and [M, I]
    group_offsets: Tensor,  # [E + 1]
    dtype: torch.dtype | None = None,  # by default that of d_preacts
) -> Tensor | None:  # [M, H]
    d_rows: Tensor | None = None
    for weight, d in zip(weights, d_preacts, strict=True):
        if weight is not None and d is not None:
            d_rows = _sum(grouped_gemm(d, weight.mT, group_offsets, None, dtype or d.dtype, "auto"), d_rows)
    return d_rows


def _parameter_gradients(
    needed: tuple[bool, bool, bool, bool],  # one per parameter
    rows: Tensor | None,  # [M, H]; None if no weight's gradient is needed
    parameters: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],  # w_in, w_up, b_in, b_up
    d_preacts: tuple[Tensor | None, Tensor | None],  # [M, 2I] or [M, I], and [M, I]
    group_offsets: Tensor,  # [E + 1]
) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    for i, (parameter, d) in enumerate(zip(parameters, 2 * d_preacts, strict=True)):
        if not needed[i] or parameter is None or d is None:
            found.append(None)
        elif i < 2:
            found.append(weight_gradient(rows, d, group_offsets, parameter))
        else:
            found.append(bias_gradient(d, group_offsets, parameter.dtype))
    return found


def weight_gradient(rows: Tensor | None, d: Tensor, group_offsets: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of `weight [E, K, N]` from `rows [R, K]` and `d [R, N]`, in the weight's memory layout."""
    return grouped_gemm_wgrad(rows, d, group_offsets, False, gradient_transposed(weight), weight.dtype)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


swiglu_ffn = define(_swiglu_ffn, _swiglu_ffn_fake, _swiglu_ffn_setup, _swiglu_ffn_gradient)


def _moe_mlp(
    hidden: Tensor,  # [T, H]
    topk_ids: Tensor,  # [T, top_k]
    topk_weights: Tensor,  # [T, top_k]
    w_gate_up: Tensor,  # [E, 2I, H] or [E, I, H]; weights are transposed with `transposed`
    w_down: Tensor,  # [E, H, I]
    w_up: Tensor | None,  # [E, I, H]
    b_in: Tensor | None,  # [E, 2I] or [E, I]
    b_up: Tensor | None,  # [E, I]
    b_out: Tensor | None,  # [E, H]
    transposed: bool,
    *spec: Any,
) -> tuple[Tensor, ...]:
    """Return the layer's result `[T, H]`, preact and preact_up as `swiglu_ffn` does, and the routing of `route`."""
    weights = (w_gate_up, w_down, w_up)
    if use_kernels(hidden, *weights):
        tensors = (hidden, topk_ids, topk_weights, *weights, b_in, b_up, b_out)
        return _planned(tensors, transposed, True, GLUSpec(*spec))
    w_in, w_out, w_up = (columns(w, transposed) for w in weights)
    routing = reference.route(topk_ids, topk_weights, w_gate_up.size(0))
    rows, offsets = reference.permute(hidden, routing), routing.group_offsets
    act, *preacts = _swiglu_ffn(rows, offsets, w_in, w_up, b_in, b_up, True, *spec)
    rows = reference.grouped_linear(act, w_out, offsets, b_out, None)
    return reference.unpermute(rows, routing), *preacts, *routing[:3]


def _planned(tensors: Any, transposed: bool, training: bool, spec: GLUSpec) -> Any:
    """Return the layer's result or, if `training`, all of `_moe_mlp`'s results; `tensors` are the inputs of both."""
    w_gate_up, _, w_up, *_ = parameters = tensors[3:]
    options = (transposed, adjacent(w_gate_up, w_up), training, spec)
    made, routing = run_layer(MOE_MLP, tensors[:3], parameters, options)
    return (*made, *routing) if training else made


def _moe_mlp_fake(*inputs: Any) -> tuple[Tensor, ...]:
    hidden, topk_ids, _, w_gate_up, _, w_up, _, _, _, transposed, *_ = inputs
    out, R, W = _moe_layer_fake(*inputs), topk_ids.numel(), columns(w_gate_up, transposed).size(2)
    dtype = torch.promote_types(hidden.dtype, w_gate_up.dtype)
    preact_up = hidden.new_empty((0,) if w_up is None else (R, W), dtype=dtype)
    return out, hidden.new_empty((R, W), dtype=dtype), preact_up, *route_fake(topk_ids, w_gate_up.size(0))


def _moe_mlp_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    hidden, _, topk_weights, *parameters, ctx.transposed = inputs[:-SPEC_LENGTH]
    ctx.spec = inputs[-SPEC_LENGTH:]
    _, *preacts, group_offsets, row_to_slot, slot_to_row = output
    routing = (group_offsets, row_to_slot, slot_to_row)
    ctx.mark_non_differentiable(*routing)
    ctx.save_for_backward(hidden, topk_weights, *routing, *parameters, *preacts)
    ctx.set_materialize_grads(False)


def _moe_mlp_gradient(
    ctx: Any, d_out: Tensor | None, d_preact: Tensor | None, d_preact_up: Tensor | None, *_d_routing: None
) -> tuple[Tensor | None, ...]:
    """Recompute the rows, and act from `preact`, instead of saving them. The results of the rows are not needed:
    <d_out, w * act @ w_out> is linear in a slot's weight w, so the gradient of w is <d_out @ w_out^T, act>.
    """
    hidden, topk_weights, group_offsets, row_to_slot, slot_to_row, *parameters, preact, preact_up = ctx.saved_tensors
    free_saved(ctx)
    *weights, b_in, b_up, b_out = parameters
    w_in, w_out, w_up = (columns(w, ctx.transposed) for w in weights)
    need_hidden, _, need_topk_weights, *needed = torch_internals.asked_gradients(ctx)
    need_w_in, need_w_out, need_w_up, need_b_in, need_b_up, need_b_out, *_ = needed
    need_act = any((need_hidden, need_topk_weights, need_w_in, need_w_up, need_b_in, need_b_up))
    # These decide about plans, so that a pass that asks for fewer gradients needs no others.
    _, _, requires_topk_weights, _, requires_w_out, *_ = ctx.needs_input_grad
    spec = ctx.spec
    routing = slot_to_row, group_offsets, topk_weights.size(1)
    weights_dtype = topk_weights.dtype
    if b_out is not None and requires_topk_weights:  # their gradient is a sum of two, which is rounded once
        topk_weights = topk_weights.to(torch.promote_types(weights_dtype, torch.float32))
    d_topk_weights: Any = None
    d_w_out = d_b_out = None
    if preact is None:  # of `moe_layer`
        rows = scatter_rows(hidden, None, *routing, hidden.dtype)
        _, preact, preact_up = swiglu_ffn(rows, group_offsets, w_in, w_up, b_in, b_up, True, *spec)
        del rows
    d_rows = weighted = None
    if d_out is not None:
        d_rows = scatter_rows(d_out, None, *routing, d_out.dtype)
        if need_act:
            d_act = grouped_gemm(d_rows, w_out.mT, group_offsets, None, unweighted_dtype(preact.dtype), "auto")
        else:  # `weighted` does not depend on it
            d_act = preact.new_zeros(preact.size(0), w_out.size(1))
        preact_up = None if w_up is None else preact_up
        d_preact_by_act, d_preact_up_by_act, weighted, d_topk_weights, *_ = activate_backward(
            preact, preact_up, d_act, topk_weights, row_to_slot, group_offsets, requires_w_out, None, *spec
        )
        del d_act
        d_preact, d_preact_up = _sum(d_preact_by_act, d_preact), _sum(d_preact_up_by_act, d_preact_up)
        del d_preact_by_act, d_preact_up_by_act
    del preact, preact_up
    # The first product's gradients first: the tensors that the second's need are smaller, and stay alive meanwhile.
    d_preacts = (d_preact, d_preact_up)
    del d_preact, d_preact_up
    d_hidden = None
    if need_hidden:
        d_sorted = _rows_gradient((w_in, w_up), d_preacts, group_offsets)
        d_hidden = None if d_sorted is None else combine_rows(d_sorted, None, *routing, hidden.dtype)
        del d_sorted
    first, need_first = (w_in, w_up, b_in, b_up), (need_w_in, need_w_up, need_b_in, need_b_up)
    rows = scatter_rows(hidden, None, *routing, hidden.dtype) if need_w_in or need_w_up else None
    d_w_in, d_w_up, d_b_in, d_b_up = _parameter_gradients(need_first, rows, first, d_preacts, group_offsets)
    del d_preacts, rows
    if d_out is not None and d_rows is not None:
        if need_w_out:
            d_w_out = weight_gradient(weighted, d_rows, group_offsets, w_out)
        if need_b_out:
            d_b_out = bias_gradient(d_rows, group_offsets, b_out.dtype, weights_of_rows(topk_weights, *routing))
        if b_out is not None and need_topk_weights:
            d_topk_weights = d_topk_weights + dots_with_down_bias(d_out, topk_weights, b_out, *routing)
            d_topk_weights = d_topk_weights.to(weights_dtype)
    d_weights = (columns(d, ctx.transposed) for d in (d_w_in, d_w_out, d_w_up))
    if not need_topk_weights:
        d_topk_weights = None
    return d_hidden, None, d_topk_weights, *d_weights, d_b_in, d_b_up, d_b_out, None, *[None] * len(spec)


def unweighted_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the gradient of act `[R, I]` before a token's weight multiplies it, where that of
    preactivations is `dtype`: in float16 it may overflow although the product with the weight does not.
    """
    return torch.float32 if dtype == torch.float16 else dtype


def weights_of_rows(topk_weights: Tensor, slot_to_row: Tensor, group_offsets: Tensor, top_k: int) -> Tensor:  # [R, 1]
    """Return each row's weight, in float32 or float64."""
    dtype = torch.promote_types(topk_weights.dtype, torch.float32)
    ones = topk_weights.new_ones((topk_weights.size(0), 1), dtype=dtype)
    return scatter_rows(ones, topk_weights, slot_to_row, group_offsets, top_k, dtype)


def dots_with_down_bias(
    d_out: Tensor,  # [T, H]
    topk_weights: Tensor,  # [T, top_k]
    b_out: Tensor,  # [E, H]
    slot_to_row: Tensor,  # [R]
    group_offsets: Tensor,  # [E + 1]
    top_k: int,
) -> Tensor:  # [T, top_k]
    """Return the contribution of the bias to the gradient of topk_weights."""
    ones = d_out.new_ones(1, 1).expand(slot_to_row.size(0), 1)
    biases = grouped_gemm(ones, b_out.unsqueeze(1), group_offsets, None, d_out.dtype, "auto")
    return dot_rows(d_out, biases, slot_to_row, group_offsets, top_k, topk_weights.dtype)


moe_mlp = define(_moe_mlp, _moe_mlp_fake, _moe_mlp_setup, _moe_mlp_gradient, results=6)


def _moe_layer(*inputs: Any) -> Tensor:
    """Return the layer's result `[T, H]` from the inputs of `_moe_mlp`.

    For calls that autograd does not record. A program that was traced in one may be differentiated nonetheless.
    """
    *tensors, transposed = inputs[:-SPEC_LENGTH]
    hidden, _, _, *parameters = tensors
    if use_kernels(hidden, *parameters[:3]):
        layer: Tensor = _planned(tensors, transposed, False, GLUSpec(*inputs[-SPEC_LENGTH:]))
        return layer
    return _moe_mlp(*inputs)[0]


def _moe_layer_fake(hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, *others: Any) -> Tensor:
    first, second, *_ = others
    dtype = torch.promote_types(torch.promote_types(hidden.dtype, first.dtype), second.dtype)
    return hidden.new_empty(hidden.shape, dtype=dtype)


def _moe_layer_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _moe_mlp_setup(ctx, inputs, (output, None, None, *route(inputs[1], inputs[3].size(0))))


moe_layer = define(
    _moe_layer,
    _moe_layer_fake,
    _moe_layer_setup,
    lambda ctx, d_out: _moe_mlp_gradient(ctx, d_out, None, None),
    schema=schema_of(_moe_mlp).partition(" -> ")[0].replace("moe_mlp", "moe_layer") + " -> Tensor",
)
