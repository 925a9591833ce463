"""Expert layers: `swiglu_ffn`, the fused first half of each expert, and `moe_mlp`, the whole layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_kernels import checks, ops
from moe_kernels.glu import GLUSpec, columns
from moe_kernels.ops.layer import MOE_MLP
from moe_kernels.ops.scaled import SCALED_MOE_MLP
from moe_kernels.runtime import cache
from moe_kernels.runtime.torch_internals import autocast, differentiated
from moe_kernels.scaled import QuantizedWeight, ScaledTensor


def swiglu_ffn(
    rows: Tensor,  # [M, H]
    w_gate_up: Tensor,  # [E, 2I, H], or [E, H, 2I] if transposed; I in place of 2I with w_up or gated=False
    group_offsets: Tensor,  # [E + 1]
    *,
    w_up: Tensor | None = None,  # [E, I, H], or [E, H, I] if transposed
    gate_up_bias: Tensor | None = None,  # [E, 2I], or [E, I] with w_up or gated=False
    up_bias: Tensor | None = None,  # [E, I]
    activation: str = "silu",
    gated: bool = True,
    transposed: bool = False,
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    validate: bool | None = None,
) -> Tensor:
    """Compute the first half of each expert: `act = f(rows @ gate) * (rows @ up)`, by default SwiGLU.

    Rows are grouped as by `grouped_gemm`. Rows outside all groups give zeros, and NaN in one group never reaches
    another. The activation is computed in float32, on a CPU in float64 if an operand is. Gradients of any order are
    supported.

    Args:
        rows: `[M, H]`, sorted by expert; dtypes as for `grouped_gemm`.
        w_gate_up: gate and up in one tensor, gate first: `[E, 2I, H]`. With `w_up` it holds only the gate, and with
            `gated=False` the single weight: `[E, I, H]`.
        group_offsets: `[E + 1]` int32 or int64.
        w_up: `[E, I, H]`, for gate and up in separate tensors.
        gate_up_bias, up_bias: `[E, 2I]` or `[E, I]`, added in float32; `up_bias` only with `w_up`.
        activation: f: "silu", "gelu" (by erf), "gelu_tanh" (its approximation by tanh), "relu", or "relu_squared",
            `relu(x)**2`. Two more clamp gate to at most `limit`, and up to `-limit..limit`: "clamped_swiglu", gpt-oss's
            `gate * sigmoid(alpha * gate) * (up + 1)`; and "clamped_silu", DeepSeek-V4's `silu(gate) * up`. These two
            need `gated=True`.
        gated: False for `act = f(rows @ w)`.
        transposed: weights are `[E, H, 2I]` or `[E, H, I]`.
        interleaved: gate and up alternate along the dimension of 2I of `w_gate_up`, as in gpt-oss, gate first; not
            with `w_up` or `gated=False`.
        alpha: for "clamped_swiglu"; the default is that of gpt-oss.
        limit: for "clamped_swiglu" and "clamped_silu"; the default is that of gpt-oss, DeepSeek-V4 uses 10.
        validate: as for `grouped_gemm`.

    Returns:
        act `[M, I]`, in the promoted dtype of `rows` and `w_gate_up`.

    Raises:
        TypeError, ValueError: an argument has a wrong dtype, or a wrong rank, shape or device; options exclude each
            other.
        RuntimeError: `torch.vmap` vectorizes a call with `validate`.
        ImportError: as for `grouped_gemm`.
    """
    spec = GLUSpec(activation, gated, interleaved, alpha, limit)
    rows, w_gate_up, w_up = autocast(rows, w_gate_up, w_up)
    experts = checks.Experts(w_gate_up, None, w_up, gate_up_bias, up_bias, None, spec, transposed)
    checks.check_swiglu_ffn(rows, group_offsets, experts)
    if checks.validation_enabled(validate):
        checks.validate_offsets(group_offsets, rows.size(0))
    w_in, w_up = columns(w_gate_up, transposed), columns(w_up, transposed)
    save_preact = differentiated(rows, w_in, w_up, gate_up_bias, up_bias)
    return ops.swiglu_ffn(rows, group_offsets, w_in, w_up, gate_up_bias, up_bias, save_preact, *spec)[0]


def moe_mlp(
    hidden: Tensor,  # [T, H]
    topk_ids: Tensor,  # [T, top_k]
    topk_weights: Tensor,  # [T, top_k]
    w_gate_up: Tensor | ScaledTensor | QuantizedWeight,  # [E, 2I, H]; other layouts as for swiglu_ffn
    w_down: Tensor | ScaledTensor | QuantizedWeight,  # [E, H, I], or [E, I, H] if transposed
    *,
    w_up: Tensor | None = None,  # [E, I, H], or [E, H, I] if transposed
    gate_up_bias: Tensor | None = None,  # [E, 2I], or [E, I] with w_up or gated=False
    up_bias: Tensor | None = None,  # [E, I]
    down_bias: Tensor | None = None,  # [E, H]
    activation: str = "silu",
    gated: bool = True,
    transposed: bool = False,
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    compute: str | None = None,
    fp8_wgrad: bool = True,
    fast_accumulation: bool = False,
    validate: bool | None = None,
) -> Tensor:
    """Compute a layer of experts: `out[t] = sum over k of topk_weights[t, k] * expert[topk_ids[t, k]](hidden[t])`.

    Here `expert(x) = act @ w_down^T + down_bias`, with the act of `swiglu_ffn`. The result is that of calling `route`,
    `permute`, `swiglu_ffn`, `grouped_gemm` and `unpermute` in turn. Besides the arguments and the routing, only the
    result of the first product is saved for the backward pass.

    The weights may be in fp8, as returned by `quantize`, both "rowwise" or both "128x128". Hidden states and act are
    then quantised within the call, as "rowwise" for "rowwise" weights and as "1x128" for "128x128" weights. The kernels
    for one token, with `top_k` of at most 16, do not quantise them. With fp8 weights neither `w_up` nor `transposed` is
    supported, and there are no gradients.

    With `compute`, weights in bfloat16, float16 or float32 are quantised in every call, unless `quantize_weight` did so
    before, and so are all other operands of the products, forward and backward, each to e4m3 with scales of its own.
    "fp8_rowwise" uses "rowwise" operands. "fp8_block" uses "128x128" weights and "1x128" rows, and saves the fp8
    weights for the backward pass, unless they were quantised before. Both compute the weights' gradients, whose
    operands are transposed, from "1x128" by "128x128". The products return the dtype of the hidden states, and each
    gradient has the dtype of its argument. `compute` supports neither `w_up` nor `transposed`, and the gradients cannot
    be differentiated again. In float16, act times a token's weight may overflow before it is quantised; in bfloat16 and
    float32 it does not.

    Args:
        hidden: `[T, H]`; dtypes as for `grouped_gemm`.
        topk_ids: `[T, top_k]` int32 or int64; an id outside `0..E - 1` drops its slot.
        topk_weights: `[T, top_k]`, in any of these dtypes; applied in float32.
        w_gate_up, w_up, gate_up_bias, up_bias: as for `swiglu_ffn`, by default gate and up in one `[E, 2I, H]`.
        w_down: `[E, H, I]`; a `ScaledTensor` if `w_gate_up` is one, and a `QuantizedWeight` if that is one.
        down_bias: `[E, H]`, added in float32.
        activation, gated, interleaved, alpha, limit: as for `swiglu_ffn`.
        transposed: all weights are stored transposed, `[E, H, 2I]` and `[E, I, H]`.
        compute: None, "fp8_rowwise" or "fp8_block".
        fp8_wgrad: with `compute`, False computes the weights' gradients from operands that are not quantised. Without
            `compute` no operand of these gradients is quantised, and `fp8_wgrad` has no effect.
        fast_accumulation: as for `grouped_gemm`, for products with "rowwise" weights; not used for weights' gradients.
        validate: as for `route`.

    Returns:
        `[T, H]`, in the promoted dtype of `hidden`, `w_gate_up` and `w_down`; with fp8 weights or `compute`, in that of
        `hidden`. Differentiable in all arguments except the ids, unless the weights are in fp8.

    Raises:
        TypeError, ValueError, ImportError: as for `route` and `swiglu_ffn`.
        RuntimeError: as for `route`; the weights are in fp8, and autograd would record the call or an argument has a
            forward-mode tangent; with `compute`, derivatives of second order or in forward mode; fp8 on a GPU of
            compute capability below 8.9.
    """
    spec = GLUSpec(activation, gated, interleaved, alpha, limit)
    biases = (gate_up_bias, up_bias, down_bias)
    if compute is not None:
        experts = checks.Experts(w_gate_up, w_down, w_up, *biases, spec, transposed)
        options = (compute, fast_accumulation, fp8_wgrad)
        return _quantized_moe_mlp(hidden, topk_ids, topk_weights, experts, *options, validate)
    if fp8_wgrad is not True:
        checks.check_bools(fp8_wgrad=fp8_wgrad)
    if isinstance(w_gate_up, ScaledTensor) or isinstance(w_down, ScaledTensor):
        experts = checks.Experts(w_gate_up, w_down, w_up, *biases, spec, transposed)
        return _scaled_moe_mlp(hidden, topk_ids, topk_weights, experts, fast_accumulation, validate)
    if fast_accumulation is not False:
        others = "products that are not in fp8; it is for 'rowwise' weights and compute='fp8_rowwise'"
        checks.check_no_fast_accumulation(fast_accumulation, others)
    given: Any = (hidden, topk_ids, topk_weights, None, None, None, w_gate_up, w_down, w_up, *biases)
    types = (type(transposed), type(gated), type(interleaved), type(alpha), type(limit))
    requested = (types, transposed, spec)
    validates = checks.validation_enabled(validate)
    if not validates and w_up is None and (known := cache.repeat(MOE_MLP, given, requested)) is not None:
        return known
    hidden, first, w_up, second = autocast(hidden, w_gate_up, w_up, w_down)
    experts = checks.Experts(first, second, w_up, *biases, spec, transposed)
    checks.check_moe_mlp(hidden, topk_ids, topk_weights, experts)
    if validates:
        checks.validate_ids(topk_ids, first.size(0))
    tensors = (hidden, topk_ids, topk_weights, first, second, w_up, *biases)
    if differentiated(*tensors):
        return ops.moe_mlp(*tensors, transposed, *spec)[0]
    layer: Tensor = ops.moe_layer(*tensors, transposed, *spec)
    if w_up is None:
        cache.remember(MOE_MLP, given, requested, (transposed, False, False, spec))
    return layer


def _scaled_moe_mlp(
    hidden: Tensor,  # [T, H]
    topk_ids: Tensor,  # [T, top_k]
    topk_weights: Tensor,  # [T, top_k]
    experts: checks.Experts,
    fast_accumulation: bool,
    validate: bool | None,
) -> Tensor:
    """`moe_mlp` with fp8 weights."""
    first, second = checks.scaled_both("w_gate_up", experts.w_gate_up, "w_down", experts.w_down)
    weights = (first.data, first.scales, second.data, second.scales, experts.gate_up_bias, experts.down_bias)
    given = (hidden, topk_ids, topk_weights, None, None, None, *weights)
    transposed, spec = experts.transposed, experts.spec
    flags = (type(fast_accumulation), type(transposed), type(spec.gated), type(spec.interleaved))
    types = (*flags, type(spec.alpha), type(spec.limit))
    requested = (first.format, second.format, types, fast_accumulation, transposed, spec)
    validates = checks.validation_enabled(validate)
    repeats = not validates and experts.w_up is None and experts.up_bias is None
    if repeats and (known := cache.repeat(SCALED_MOE_MLP, given, requested)) is not None:
        return known
    (hidden,) = autocast(hidden)
    checks.check_scaled_moe_mlp(hidden, topk_ids, topk_weights, experts, fast_accumulation)
    if validates:
        checks.validate_ids(topk_ids, first.shape[0])
    products = first.format == "rowwise", fast_accumulation
    out: Tensor = ops.scaled_moe_mlp(hidden, topk_ids, topk_weights, *weights, *products, *experts.spec)
    cache.remember(SCALED_MOE_MLP, given, requested, (*products, experts.spec))
    return out


def _quantized_moe_mlp(
    hidden: Tensor,  # [T, H]
    topk_ids: Tensor,  # [T, top_k]
    topk_weights: Tensor,  # [T, top_k]
    experts: checks.Experts,
    compute: str,
    fast_accumulation: bool,
    fp8_wgrad: bool,
    validate: bool | None,
) -> Tensor:
    """`moe_mlp` with `compute`."""
    (hidden,) = autocast(hidden)
    checks.check_quantized_moe_mlp(hidden, topk_ids, topk_weights, experts, compute, fast_accumulation, fp8_wgrad)
    first, second = experts.w_gate_up, experts.w_down
    quantized: tuple[Tensor | None, ...] = (None,) * 8
    if isinstance(first, QuantizedWeight):
        parts = (first.forward, first.backward, second.forward, second.backward)
        quantized = tuple(x for part in parts for x in (part.data, part.scales))
        first, second = first.weight, second.weight
    if checks.validation_enabled(validate):
        checks.validate_ids(topk_ids, first.size(0))
    parameters = (first, second, experts.gate_up_bias, experts.down_bias)
    save = differentiated(hidden, topk_weights, *parameters)
    options = (compute == "fp8_rowwise", fast_accumulation, fp8_wgrad, save, *experts.spec)
    out: Tensor = ops.quantized_moe_mlp(hidden, topk_ids, topk_weights, *parameters, *quantized, *options)[0]
    return out
