"""What an expert layer does around its products: activate, swiglu_ffn, moe_mlp, and what these are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_kernels import dispatch, reference
from moe_kernels.allocate import empty
from moe_kernels.form import Form
from moe_kernels.ops.library import define
from moe_kernels.ops.moves import combine_rows, dot_rows, scatter_rows
from moe_kernels.ops.products import bias_gradient, grouped_gemm, grouped_gemm_wgrad, lies_transposed

_FORM = "str activation, bool gated, bool interleaved, float alpha, float limit"


def _activate(h: Tensor, h_up: Tensor | None, *form: Any) -> Tensor:  # [R, 2I] or [R, I], [R, I] -> [R, I]
    form = Form(*form)
    if not dispatch.use_kernels(h):
        return reference.activate(h, h_up, form)
    gate, up = form.halves(h, h_up)
    act = empty(gate.shape, h.dtype, h)
    if act.numel() > 0:
        from moe_kernels.kernels import activation as kernels

        dispatch.on_device(
            h, kernels.launch, kernels.activate, (act, gate, up), form.activation, form.alpha, form.limit
        )
    return act


def _activate_fake(h: Tensor, h_up: Tensor | None, *form: Any) -> Tensor:
    gate, _ = Form(*form).halves(h, h_up)
    return h.new_empty(gate.shape)


def _activate_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    h, h_up, *ctx.form = inputs
    ctx.save_for_backward(h, h_up)


def _activate_gradient(ctx: Any, d_act: Tensor) -> tuple[Any, ...]:
    h, h_up = ctx.saved_tensors
    d_h, d_h_up, _, _ = activate_backward(h, h_up, d_act, None, None, None, False, *ctx.form)
    return d_h, None if h_up is None else d_h_up, *[None] * len(ctx.form)


def _activate_backward(
    h: Tensor,  # [R, 2I] or [R, I]
    h_up: Tensor | None,  # [R, I]
    d_act: Tensor,  # [R, I]
    topk_weights: Tensor | None,  # [T, top_k]
    row_to_slot: Tensor | None,  # [R]
    group_offsets: Tensor | None,  # [E + 1]
    weigh: bool,
    *form: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `reference.activate_backward`, with empty tensors for what there is not; weighted act only if `weigh`."""
    form = Form(*form)
    if not dispatch.use_kernels(h):
        found = reference.activate_backward(h, h_up, d_act, topk_weights, row_to_slot, group_offsets, form)
        d_h, d_h_up, weighted, dots = (h.new_empty(0) if x is None else x for x in found)
        return d_h, d_h_up, weighted if weigh else h.new_empty(0), dots
    gate, up = form.halves(h, h_up)
    d_h, d_h_up, weighted, dots = _activate_backward_fake(
        h, h_up, d_act, topk_weights, row_to_slot, group_offsets, weigh, *form
    )
    if gate.numel() == 0:
        dots.zero_()
    else:
        from moe_kernels.kernels import activation as kernels

        d_gate, d_up = form.halves(d_h, None if h_up is None else d_h_up)
        options = form.activation, form.alpha, form.limit
        if topk_weights is None:
            tensors: tuple[Tensor | None, ...] = (d_gate, d_up, gate, up, d_act)
            dispatch.on_device(h, kernels.launch, kernels.activate_backward, tensors, *options)
        else:
            tensors = (
                d_gate,
                d_up,
                weighted if weigh else None,
                dots.view(-1),
                gate,
                up,
                d_act,
                topk_weights.reshape(-1),
            )
            tensors = (*tensors, row_to_slot, group_offsets)
            dispatch.on_device(h, kernels.launch, kernels.weighted_backward, tensors, *options)
    return d_h, d_h_up, weighted, dots


def _activate_backward_fake(
    h: Tensor,
    h_up: Tensor | None,
    d_act: Tensor,
    topk_weights: Tensor | None,
    row_to_slot: Tensor | None,
    group_offsets: Tensor | None,
    weigh: bool,
    *form: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_h = empty(h.shape, h.dtype, h)
    d_h_up = empty((0,), h.dtype, h) if h_up is None else empty(h_up.shape, h_up.dtype, h_up)
    if topk_weights is None:
        return d_h, d_h_up, empty((0,), h.dtype, h), empty((0,), h.dtype, h)
    weighted = empty(d_act.shape if weigh else (0,), h.dtype, h)
    return d_h, d_h_up, weighted, empty(topk_weights.shape, topk_weights.dtype, topk_weights)


def _activate_backward_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.weigh, ctx.activation, ctx.gated, ctx.interleaved, ctx.alpha, ctx.limit = inputs
    ctx.save_for_backward(*tensors)


def _activate_backward_gradient(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    """The second order, through plain PyTorch."""
    form = Form(ctx.activation, ctx.gated, ctx.interleaved, ctx.alpha, ctx.limit)
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, of which none was made from another: h depends on the weights only where the layer is differentiated.
        inputs: list[Any] = [None if x is None else x.view_as(x) for x in ctx.saved_tensors]
        inputs = [x.requires_grad_() if ctx.needs_input_grad[i] else x for i, x in enumerate(inputs)]
        h, h_up, d_act, topk_weights, row_to_slot, group_offsets = inputs
        outputs = list(reference.activate_backward(h, h_up, d_act, topk_weights, row_to_slot, group_offsets, form))
        if not ctx.weigh:
            outputs[2] = None
    asked = [i for i in range(4) if ctx.needs_input_grad[i]]
    pairs = [(y, d) for y, d in zip(outputs, grads, strict=True) if y is not None and y.requires_grad]
    found = torch.autograd.grad(
        [y for y, _ in pairs],
        [inputs[i] for i in asked],
        [d for _, d in pairs],
        create_graph=again,
        allow_unused=True,
    )
    by_input = dict(zip(asked, found, strict=True))
    return *(by_input.get(i) for i in range(6)), None, *[None] * len(form)


activate = define(
    f"activate(Tensor h, Tensor? h_up, {_FORM}) -> Tensor",
    _activate,
    _activate_fake,
    _activate_setup,
    _activate_gradient,
)
activate_backward = define(
    "activate_backward(Tensor h, Tensor? h_up, Tensor d_act, Tensor? topk_weights, Tensor? row_to_slot,"
    " Tensor? group_offsets,"
    f" bool weigh, {_FORM}) -> (Tensor, Tensor, Tensor, Tensor)",
    _activate_backward,
    _activate_backward_fake,
    _activate_backward_setup,
    _activate_backward_gradient,
)


def _swiglu_ffn(
    rows: Tensor,  # [M, H]
    group_offsets: Tensor,  # [E + 1]
    w_in: Tensor,  # [E, H, 2I] or [E, H, I]
    w_up: Tensor | None,  # [E, H, I]
    b_in: Tensor | None,  # [E, 2I] or [E, I]
    b_up: Tensor | None,  # [E, I]
    keep: bool,
    *form: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """act `[M, I]`, and if `keep` what it was made of, `h` and `h_up` (empty without `w_up`)."""
    act, *kept = _first_half(rows, group_offsets, None, 0, w_in, w_up, b_in, b_up, keep, Form(*form))
    return act, *_filled(act, kept)


def _filled(like: Tensor, kept: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """`h` and `h_up` as operators return them, empty for none."""
    h, h_up = (empty((0,), like.dtype, like) if x is None else x for x in kept)
    return h, h_up


def _first_half(
    A: Tensor,  # [M, H], or [T, H] with row_to_slot
    group_offsets: Tensor,  # [E + 1]
    row_to_slot: Tensor | None,  # [M]
    top_k: int,
    w_in: Tensor,
    w_up: Tensor | None,
    b_in: Tensor | None,
    b_up: Tensor | None,
    keep: bool,
    form: Form,
    slot_to_row: Tensor | None = None,  # [M], with row_to_slot
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    M = A.size(0) if row_to_slot is None else row_to_slot.size(0)
    dtype = torch.promote_types(A.dtype, w_in.dtype)
    if fused_is_faster(A, M, w_in, w_up, form):
        return _fused(A, M, group_offsets, row_to_slot, top_k, w_in, w_up, b_in, b_up, keep, form, dtype)
    if slot_to_row is not None:
        A = scatter_rows(A, None, slot_to_row, group_offsets, top_k, A.dtype)
    h = dispatch.multiply(A, w_in, group_offsets, b_in, dtype, "auto")
    h_up = None if w_up is None else dispatch.multiply(A, w_up, group_offsets, b_up, dtype, "auto")
    return _activate(h, h_up, *form), *((h, h_up) if keep else (None, None))


def _fused(
    A: Tensor,
    M: int,
    group_offsets: Tensor,
    row_to_slot: Tensor | None,
    top_k: int,
    w_in: Tensor,
    w_up: Tensor | None,
    b_in: Tensor | None,
    b_up: Tensor | None,
    keep: bool,
    form: Form,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    from moe_kernels.kernels import swiglu_ffn as kernels

    dispatch.check_rows("rows", M)
    act = empty((M, _width(w_in, w_up, form)), dtype, A)
    h = empty((M, w_in.size(2)), dtype, A) if keep else None
    h_up = empty((M, w_in.size(2)), dtype, A) if keep and w_up is not None else None

    gate, up = form.halves(w_in, w_up)
    (b_gate, b_up), (h_gate, h_of_up) = (form.parts(*x, apart=w_up is not None) for x in ((b_in, b_up), (h, h_up)))
    tensors = (A, gate, up, group_offsets, row_to_slot, b_gate, b_up, act, h_gate, h_of_up)
    dispatch.on_device(A, kernels.launch, *tensors, top_k, form)
    return act, h, h_up


def fused_is_faster(A: Tensor, M: int, w_in: Tensor, w_up: Tensor | None, form: Form) -> bool:
    """Whether one kernel does the whole first half, for `M` rows of `A`, or made of it."""
    if not form.gated or not dispatch.use_kernels(A, w_in, w_up) or M == 0 or w_in.numel() == 0:
        return False
    from moe_kernels.kernels import swiglu_ffn as kernels

    return kernels.fuses(A, w_in, w_up, form, M)


def _swiglu_ffn_fake(
    rows: Tensor,
    group_offsets: Tensor,
    w_in: Tensor,
    w_up: Tensor | None,
    b_in: Tensor | None,
    b_up: Tensor | None,
    keep: bool,
    *form: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(rows.dtype, w_in.dtype)
    M, W = rows.size(0), w_in.size(2)
    act = rows.new_empty((M, _width(w_in, w_up, Form(*form))), dtype=dtype)
    h = rows.new_empty((M, W) if keep else (0,), dtype=dtype)
    return act, h, rows.new_empty((M, W) if keep and w_up is not None else (0,), dtype=dtype)


def _width(w_in: Tensor, w_up: Tensor | None, form: Form) -> int:
    W = w_in.size(2)
    return W // 2 if form.gated and w_up is None else W


def _swiglu_ffn_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    rows, group_offsets, w_in, w_up, b_in, b_up, ctx.keep, *ctx.form = inputs
    _, h, h_up = output
    kept = (h, h_up) if ctx.keep else (None, None)
    ctx.save_for_backward(rows, group_offsets, w_in, w_up, b_in, b_up, *kept)
    ctx.set_materialize_grads(False)


def _swiglu_ffn_gradient(
    ctx: Any, d_act: Tensor | None, d_h: Tensor | None, d_h_up: Tensor | None
) -> tuple[Tensor | None, ...]:
    rows, group_offsets, w_in, w_up, b_in, b_up, h, h_up = ctx.saved_tensors
    ctx.maybe_clear_saved_tensors()  # as in the gradient of moe_mlp
    if not ctx.keep:
        _, h, h_up = swiglu_ffn(rows, group_offsets, w_in, w_up, b_in, b_up, True, *ctx.form)
        d_h = d_h_up = None  # of empty tensors
    if d_act is not None:
        h_up = None if w_up is None else h_up
        found = activate_backward(h, h_up, d_act, None, None, None, False, *ctx.form)
        d_h, d_h_up = _sum(found[0], d_h), _sum(found[1], d_h_up)
    del h, h_up
    d_rows, *weights = _projection_gradients(
        ctx.needs_input_grad[:1] + ctx.needs_input_grad[2:6], rows, group_offsets, (w_in, w_up, b_in, b_up), d_h, d_h_up
    )
    return d_rows, None, *weights, None, *[None] * len(ctx.form)


def _projection_gradients(
    needed: tuple[bool, ...],  # as the result
    rows: Tensor | None,  # [M, H]; None if no weight's gradient is needed
    group_offsets: Tensor,  # [E + 1]
    parameters: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],  # w_in, w_up, b_in, b_up
    d_h: Tensor | None,  # [M, 2I] or [M, I]
    d_h_up: Tensor | None,  # [M, I]
) -> list[Tensor | None]:
    """The gradients of rows and of the parameters."""
    w_in, w_up, b_in, b_up = parameters
    result: list[Tensor | None] = [None] * 5
    for i, weight, bias, d in ((0, w_in, b_in, d_h), (1, w_up, b_up, d_h_up)):
        if weight is None or d is None:
            continue
        if needed[0]:
            dtype = d.dtype if rows is None else rows.dtype
            result[0] = _sum(grouped_gemm(d, weight.mT, group_offsets, None, dtype, "auto"), result[0])
        if needed[1 + i]:
            result[1 + i] = _weight_gradient(rows, d, group_offsets, weight)
        if bias is not None and needed[3 + i]:
            result[3 + i] = bias_gradient(d, group_offsets, bias.dtype)
    return result


def _weight_gradient(rows: Tensor | None, d: Tensor, group_offsets: Tensor, weight: Tensor) -> Tensor:
    """Lies in memory as `weight` does."""
    d_weight: Tensor = grouped_gemm_wgrad(rows, d, group_offsets, False, lies_transposed(weight), weight.dtype)
    return d_weight


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


swiglu_ffn = define(
    "swiglu_ffn(Tensor rows, Tensor group_offsets, Tensor w_in, Tensor? w_up, Tensor? b_in, Tensor? b_up, bool keep,"
    f" {_FORM}) -> (Tensor, Tensor, Tensor)",
    _swiglu_ffn,
    _swiglu_ffn_fake,
    _swiglu_ffn_setup,
    _swiglu_ffn_gradient,
)


def _moe_mlp(
    hidden: Tensor,  # [T, H]
    topk_weights: Tensor,  # [T, top_k]
    group_offsets: Tensor,  # [E + 1]
    row_to_slot: Tensor,  # [R]
    slot_to_row: Tensor,  # [R]
    w_in: Tensor,  # [E, H, 2I] or [E, H, I]
    w_up: Tensor | None,  # [E, H, I]
    w_out: Tensor,  # [E, I, H]
    b_in: Tensor | None,  # [E, 2I] or [E, I]
    b_up: Tensor | None,  # [E, I]
    b_out: Tensor | None,  # [E, H]
    keep: bool,
    *form: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The layer's result `[T, H]`, and if `keep` the rows' `h` and `h_up`, as `swiglu_ffn`."""
    top_k = topk_weights.size(1)
    first = (w_in, w_up, b_in, b_up, keep, Form(*form), slot_to_row)
    act, *kept = _first_half(hidden, group_offsets, row_to_slot, top_k, *first)
    dtype = torch.promote_types(act.dtype, w_out.dtype)
    rows = dispatch.multiply(act, w_out, group_offsets, b_out, dtype, "auto")
    return combine_rows(rows, topk_weights, slot_to_row, group_offsets, top_k, dtype), *_filled(act, kept)


def _moe_mlp_fake(
    hidden: Tensor,
    topk_weights: Tensor,
    group_offsets: Tensor,
    row_to_slot: Tensor,
    slot_to_row: Tensor,
    w_in: Tensor,
    w_up: Tensor | None,
    w_out: Tensor,
    b_in: Tensor | None,
    b_up: Tensor | None,
    b_out: Tensor | None,
    keep: bool,
    *form: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(hidden.dtype, w_in.dtype)
    R, W = slot_to_row.size(0), w_in.size(2)
    out = hidden.new_empty((hidden.size(0), w_out.size(2)), dtype=torch.promote_types(dtype, w_out.dtype))
    h = hidden.new_empty((R, W) if keep else (0,), dtype=dtype)
    return out, h, hidden.new_empty((R, W) if keep and w_up is not None else (0,), dtype=dtype)


def _moe_mlp_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.keep, ctx.activation, ctx.gated, ctx.interleaved, ctx.alpha, ctx.limit = inputs
    _, h, h_up = output
    ctx.save_for_backward(*tensors, *((h, h_up) if ctx.keep else (None, None)))
    ctx.set_materialize_grads(False)


def _moe_mlp_gradient(
    ctx: Any, d_out: Tensor | None, d_h: Tensor | None, d_h_up: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Saves neither the rows, nor what follows `h`, nor the rows' results: <d_out, gate * act @ w_out> is linear in
    gate, so its gradient is <d_out @ w_out^T, act>, and act is made again from `h` on the way.
    """
    hidden, topk_weights, group_offsets, row_to_slot, slot_to_row, *parameters, h, h_up = ctx.saved_tensors
    ctx.maybe_clear_saved_tensors()  # so that h ends below, unless the graph is kept for another backward
    w_in, w_up, w_out, b_in, b_up, b_out = parameters
    form = (ctx.activation, ctx.gated, ctx.interleaved, ctx.alpha, ctx.limit)
    need = ctx.needs_input_grad
    top_k = topk_weights.size(1)
    routing = slot_to_row, group_offsets, top_k
    d_topk_weights = d_w_out = d_b_out = None
    if not ctx.keep:
        rows = scatter_rows(hidden, None, *routing, hidden.dtype)
        _, h, h_up = swiglu_ffn(rows, group_offsets, w_in, w_up, b_in, b_up, True, *form)
        del rows
        d_h = d_h_up = None  # of empty tensors
    d_rows = weighted = None
    if d_out is not None:
        d_rows = scatter_rows(d_out, None, *routing, d_out.dtype)
        d_act = grouped_gemm(d_rows, w_out.mT, group_offsets, None, h.dtype, "auto")
        d_h_by_act, d_h_up_by_act, weighted, d_topk_weights = activate_backward(
            h, None if w_up is None else h_up, d_act, topk_weights, row_to_slot, group_offsets, need[7], *form
        )
        del d_act
        d_h, d_h_up = _sum(d_h_by_act, d_h), _sum(d_h_up_by_act, d_h_up)
        del d_h_by_act, d_h_up_by_act
    del h, h_up
    # The first product's gradients before the second's, for what these need is smaller, and one or the other waits.
    first = (w_in, w_up, b_in, b_up)
    d_hidden = None
    if need[0]:
        needed = (True, False, False, False, False)
        d_sorted = _projection_gradients(needed, None, group_offsets, first, d_h, d_h_up)[0]
        d_hidden = None if d_sorted is None else combine_rows(d_sorted, None, *routing, hidden.dtype)
        del d_sorted
    needed = (False, need[5], need[6], need[8], need[9])
    rows = scatter_rows(hidden, None, *routing, hidden.dtype) if any(need[5:7]) else None
    d_first = _projection_gradients(needed, rows, group_offsets, first, d_h, d_h_up)[1:]
    del d_h, d_h_up, rows
    if d_out is not None and d_rows is not None:
        if need[7]:
            d_w_out = _weight_gradient(weighted, d_rows, group_offsets, w_out)
        if b_out is not None and need[10]:
            dtype = torch.promote_types(topk_weights.dtype, torch.float32)
            weights = scatter_rows(d_out.new_ones(d_out.size(0), 1, dtype=dtype), topk_weights, *routing, dtype)
            d_b_out = grouped_gemm_wgrad(weights, d_rows, group_offsets, False, False, b_out.dtype)[:, 0]
        if b_out is not None and need[1]:
            ones = d_rows.new_ones(1, 1).expand(d_rows.size(0), 1)
            biases = grouped_gemm(ones, b_out.unsqueeze(1), group_offsets, None, d_rows.dtype, "auto")
            d_topk_weights = d_topk_weights + dot_rows(d_out, biases, *routing, topk_weights.dtype)
    d_w_in, d_w_up, d_b_in, d_b_up = d_first
    d_parameters = (d_w_in, d_w_up, d_w_out, d_b_in, d_b_up, d_b_out)
    return d_hidden, d_topk_weights if need[1] else None, None, None, None, *d_parameters, None, *[None] * len(form)


moe_mlp = define(
    "moe_mlp(Tensor hidden, Tensor topk_weights, Tensor group_offsets, Tensor row_to_slot, Tensor slot_to_row,"
    " Tensor w_in,"
    " Tensor? w_up, Tensor w_out, Tensor? b_in, Tensor? b_up, Tensor? b_out, bool keep,"
    f" {_FORM}) -> (Tensor, Tensor, Tensor)",
    _moe_mlp,
    _moe_mlp_fake,
    _moe_mlp_setup,
    _moe_mlp_gradient,
)


def one_token_is_faster(hidden: Tensor, topk_ids: Tensor, w_in: Tensor, w_out: Tensor) -> bool:
    """Whether there is one token, and the kernels that sort nothing take it: they are faster."""
    if hidden.size(0) != 1 or not dispatch.use_kernels(hidden, w_in, w_out):
        return False
    if not all([x.numel() > 0 for x in (hidden, topk_ids, w_in, w_out)]):
        return False
    from moe_kernels.kernels import one_token

    return one_token.takes(topk_ids.size(1), w_in, w_out)


def _moe_mlp_of_one_token(
    hidden: Tensor,  # [1, H]
    topk_ids: Tensor,  # [1, top_k]
    topk_weights: Tensor,  # [1, top_k]
    w_in: Tensor,  # [E, H, 2I] or [E, H, I]
    w_up: Tensor | None,  # [E, H, I]
    w_out: Tensor,  # [E, I, H]
    b_in: Tensor | None,  # [E, 2I] or [E, I]
    b_up: Tensor | None,  # [E, I]
    b_out: Tensor | None,  # [E, H]
    *form: Any,
) -> Tensor:
    """The layer's result `[1, H]`; it has no gradient."""
    halves = Form(*form)
    if not dispatch.use_kernels(hidden):
        others: dict[str, Any] = {"w_up": w_up, "gate_up_bias": b_in, "up_bias": b_up, "down_bias": b_out}
        return reference.moe_mlp(
            hidden, topk_ids, topk_weights, w_in, w_out, transposed=True, **others, **halves._asdict()
        )
    from moe_kernels.kernels import one_token

    out = _moe_mlp_of_one_token_fake(hidden, topk_ids, topk_weights, w_in, w_up, w_out)
    dtype = torch.promote_types(hidden.dtype, w_in.dtype)
    act = hidden.new_empty((topk_ids.numel(), _width(w_in, w_up, halves)), dtype=dtype)
    biases = halves.parts(b_in, b_up, apart=w_up is not None)
    slots = topk_ids.reshape(-1), topk_weights.reshape(-1)
    tensors = (out, act, hidden, *slots, *halves.halves(w_in, w_up), w_out, *biases, b_out)
    dispatch.on_device(hidden, one_token.launch, *tensors, halves)
    return out


def _moe_mlp_of_one_token_fake(
    hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, w_in: Tensor, w_up: Tensor | None, w_out: Tensor, *_: Any
) -> Tensor:
    dtype = torch.promote_types(torch.promote_types(hidden.dtype, w_in.dtype), w_out.dtype)
    return hidden.new_empty((hidden.size(0), w_out.size(2)), dtype=dtype)


moe_mlp_of_one_token = define(
    "moe_mlp_of_one_token(Tensor hidden, Tensor topk_ids, Tensor topk_weights, Tensor w_in, Tensor? w_up, Tensor w_out,"
    f" Tensor? b_in, Tensor? b_up, Tensor? b_out, {_FORM}) -> Tensor",
    _moe_mlp_of_one_token,
    _moe_mlp_of_one_token_fake,
)
