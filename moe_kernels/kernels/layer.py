"""Plans of whole layers of experts: the steps of their parts, one after another.

hidden --route--> expert order --first half--> act --grouped_gemm--> rows --combine--> out

With products in fp8, the kernel that writes rows quantises them, except "rowwise" rows longer than AT_ONCE, and weights
in other dtypes are quantised first. The kernels for one token do not quantise activations.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_kernels.glu import GLUSpec, columns
from moe_kernels.kernels import scaled_gemm
from moe_kernels.kernels.activation import plan_activate, write_scaled_activation
from moe_kernels.kernels.grouped_gemm import multiply
from moe_kernels.kernels.one_token import multiply_one_token
from moe_kernels.kernels.permute import plan_combine_rows, plan_scatter_rows, scatter_scaled
from moe_kernels.kernels.quantize import plan_quantize, plan_quantize_and_amax, plan_quantize_transposed
from moe_kernels.kernels.route import plan_route
from moe_kernels.kernels.swiglu_ffn import fuses, multiply_activated
from moe_kernels.rules import quantize as quantize_rules
from moe_kernels.rules.layer import one_token_is_faster
from moe_kernels.runtime.plan import Builder, Operands
from moe_kernels.runtime.symbolic import SymbolicTensor, most

_E4M3 = torch.float8_e4m3fn
_Optional = SymbolicTensor | None


def plan_swiglu_ffn(
    builder: Builder, tensors: Operands, options: tuple[bool, bool, GLUSpec]
) -> tuple[SymbolicTensor, ...]:
    """Plan act, and preactivations if saved, from rows `[M, H]`, group_offsets, w_in, w_up, b_in and b_up."""
    rows, group_offsets, *parameters = tensors
    return _first_half(builder, rows, group_offsets, None, None, 0, parameters, *options)


def plan_moe_mlp(
    builder: Builder, tensors: Operands, options: tuple[bool, bool, bool, GLUSpec]
) -> SymbolicTensor | tuple[SymbolicTensor, ...]:
    """Plan the result `[T, H]` and, if `training`, also preactivations and the routing unless that is given."""
    hidden, topk_ids, topk_weights, *routing, w_gate_up, w_down, w_up, b_in, b_up, b_out = tensors
    transposed, adjacent, training, spec = options
    w_in, w_out, w_up = (columns(w, transposed) for w in (w_gate_up, w_down, w_up))
    top_k = topk_ids.size(1)
    if not training and one_token_is_faster(most(hidden.size(0)), top_k, w_in, w_out):
        parameters = (w_in, w_up, w_out, b_in, b_up, b_out)
        return multiply_one_token(builder, hidden, topk_ids, topk_weights, parameters, spec)
    (group_offsets, row_to_slot, slot_to_row), computed = _routing(builder, topk_ids, routing, w_out.size(0))
    first = (w_in, w_up, b_in, b_up)
    moved = (hidden, group_offsets, row_to_slot, slot_to_row, top_k)
    act, *preacts = _first_half(builder, *moved, first, training, adjacent, spec)
    dtype = torch.promote_types(act.dtype, w_out.dtype)
    rows = builder.alloc((act.size(0), w_out.size(2)), dtype)
    multiply(builder, act, w_out, group_offsets, b_out, rows)
    out = plan_combine_rows(builder, (rows, topk_weights, slot_to_row, group_offsets), (top_k, dtype))
    return (out, *preacts, *computed) if training else out


def plan_scaled_moe_mlp(builder: Builder, tensors: Operands, options: tuple[bool, bool, GLUSpec]) -> SymbolicTensor:
    """Plan the result `[T, H]` with fp8 weights."""
    hidden, topk_ids, topk_weights, *routing, w_in, scales_in, w_out, scales_out, b_in, b_out = tensors
    rowwise, fast, spec = options
    if one_token_is_faster(most(hidden.size(0)), topk_ids.size(1), w_in.mT, w_out.mT):
        parameters = (w_in.mT, None, w_out.mT, b_in, None, b_out)
        return multiply_one_token(builder, hidden, topk_ids, topk_weights, parameters, spec, (scales_in, scales_out))
    (group_offsets, _, slot_to_row), _ = _routing(builder, topk_ids, routing, w_in.size(0))
    weights = (w_in, scales_in), (w_out, scales_out)
    order = hidden, topk_weights, group_offsets, slot_to_row
    return _scaled_layer(builder, *order, weights, (b_in, b_out), rowwise, fast, spec)[0]


def _routing(
    builder: Builder, topk_ids: SymbolicTensor, given: Any, E: int
) -> tuple[tuple[SymbolicTensor, ...], tuple[SymbolicTensor, ...]]:
    """Return the routing, and what of it is computed here: all of it unless it is given."""
    computed = plan_route(builder, (topk_ids,), (E,)) if given[0] is None else ()
    return computed or tuple(given), computed


def plan_quantized_moe_mlp(
    builder: Builder, tensors: Operands, options: tuple[bool, bool, bool, GLUSpec]
) -> tuple[SymbolicTensor, ...]:
    """Plan the result `[T, H]`, the tensors that `reference.quantized_moe_mlp` saves, empty unless `save`, and the
    routing unless that is given. Weights with scales are in fp8.
    """
    hidden, topk_ids, topk_weights, *routing, w_gate_up, scales_in, w_down, scales_out, b_in, b_out = tensors
    rowwise, fast, save, spec = options
    (group_offsets, _, slot_to_row), computed = _routing(builder, topk_ids, routing, w_down.size(0))
    weights: list[Any] = []
    saved: list[SymbolicTensor] = []
    for w, given in ((w_gate_up, scales_in), (w_down, scales_out)):
        both_orders = save and not rowwise and given is None
        other_order = builder.alloc(w.mT.shape if both_orders else (0,), _E4M3)
        if given is not None:
            data, scales = w, given
            kept = builder.alloc((0,), torch.int32 if rowwise else torch.float32)
        elif save and rowwise and quantize_rules.finds_amax(w):
            data, scales, kept = plan_quantize_and_amax(builder, w)
        else:
            data, scales = _scaled_weight(builder, w, rowwise, other_order if both_orders else None)
            kept = scales if both_orders else builder.alloc((0,), torch.int32 if rowwise else torch.float32)
        weights.append((data, scales))
        saved += other_order, kept
    order = hidden, topk_weights, group_offsets, slot_to_row
    out, preact = _scaled_layer(builder, *order, weights, (b_in, b_out), rowwise, fast, spec)
    return out, preact if save else builder.alloc((0,), preact.dtype), *saved, *computed


def plan_quantized_grouped_gemm(
    builder: Builder, tensors: Operands, options: tuple[bool, bool, torch.dtype, int]
) -> SymbolicTensor:
    """Plan the fp8 product of A `[M, K]`, or tokens `[T, K]` with slot_to_row, and B `[G, K, N]`.

    Operands are quantised, except those in fp8. For a B in another dtype `scales_B` is None, or amax `[G, N]` of its
    columns as int32.
    """
    A, scales_A, B, scales_B, group_offsets, slot_to_row, bias = tensors
    rowwise, fast, dtype, top_k = options
    format = _format(rowwise)
    if scales_A is not None:
        data, scales = A, scales_A
    elif slot_to_row is not None:
        data, scales = scatter_scaled(builder, A, slot_to_row, group_offsets, top_k, format)
    else:
        data, scales = plan_quantize(builder, (A,), (format, _E4M3, False))
    out = builder.alloc((data.size(0), B.size(2)), dtype)
    if scales_B is None:
        right, scales_B = _scaled_weight(builder, B.mT, rowwise)
    elif B.dtype == _E4M3:
        right, scales_B = B.mT, scales_B.mT
    else:
        right, scales_B = plan_quantize_transposed(builder, B, scales_B)
    scaled_gemm.multiply(builder, data, scales, right, scales_B, group_offsets, bias, out, fast=fast)
    return out


def _format(rowwise: bool) -> str:
    """Return the format of rows that are multiplied with "rowwise" weights, or else with "128x128" weights."""
    return "rowwise" if rowwise else "1x128"


def _scaled_weight(
    builder: Builder, w: SymbolicTensor, rowwise: bool, other_order: _Optional = None
) -> tuple[SymbolicTensor, SymbolicTensor]:
    """Quantise weights `[G, N, K]` to data and scales; see `plan_quantize` for `other_order [G, K, N]`."""
    return plan_quantize(builder, (w,), ("rowwise" if rowwise else "128x128", _E4M3, False), other_order)


def _scaled_layer(
    builder: Builder,
    hidden: Any,  # [T, H]
    topk_weights: Any,  # [T, top_k]
    group_offsets: Any,  # [E + 1]
    slot_to_row: Any,  # [R]
    weights: Any,  # (data, scales) of [E, 2I, H] or [E, I, H], and of [E, H, I]
    biases: Any,  # [E, 2I] or [E, I], and [E, H], or None
    rowwise: bool,
    fast: bool,  # fast accumulation, only with `rowwise`
    spec: GLUSpec,
) -> tuple[SymbolicTensor, SymbolicTensor]:
    """Return the result `[T, H]` and the preactivation `[R, 2I]` or `[R, I]`."""
    (w_in, scales_in), (w_out, scales_out) = weights
    R, top_k, dtype = slot_to_row.size(0), topk_weights.size(1), hidden.dtype
    format, (b_in, b_out) = _format(rowwise), biases
    x = scatter_scaled(builder, hidden, slot_to_row, group_offsets, top_k, format)
    preact = builder.alloc((R, w_in.size(1)), dtype)
    scaled_gemm.multiply(builder, *x, w_in, scales_in, group_offsets, b_in, preact, fast=fast)
    act = write_scaled_activation(builder, preact, format, spec)
    rows = builder.alloc((R, w_out.size(1)), dtype)
    scaled_gemm.multiply(builder, *act, w_out, scales_out, group_offsets, b_out, rows, fast=fast)
    slots = (rows, topk_weights, slot_to_row, group_offsets)
    return plan_combine_rows(builder, slots, (top_k, dtype)), preact


def _first_half(
    builder: Builder,
    A: SymbolicTensor,  # [M, H], or tokens [T, H] with a routing
    group_offsets: SymbolicTensor,  # [E + 1]
    row_to_slot: _Optional,  # [M]
    slot_to_row: _Optional,  # [M]
    top_k: int,
    parameters: Any,  # w_in [E, H, 2I] or [E, H, I], w_up [E, H, I], b_in [E, 2I] or [E, I], b_up [E, I]
    save_preact: bool,
    adjacent: bool,  # w_up begins halfway between two experts of w_in, in the same storage
    spec: GLUSpec,
) -> tuple[SymbolicTensor, SymbolicTensor, SymbolicTensor]:
    """Return act `[M, I]` and its preactivations, which are empty unless `save_preact`."""
    w_in, w_up, b_in, b_up = parameters
    if adjacent:
        w_up = w_in.as_strided(w_up.shape, w_up.strides, w_in.stride(0) // 2)
    M = A.size(0) if row_to_slot is None else row_to_slot.size(0)
    width = spec.width(w_in.size(2), w_up is not None)
    dtype = torch.promote_types(A.dtype, w_in.dtype)
    if fuses(A, w_in, w_up, spec, M, builder):
        act = builder.alloc((M, width), dtype)
        preact = builder.alloc((M, w_in.size(2)), dtype) if save_preact else None
        preact_up = builder.alloc((M, width), dtype) if save_preact and w_up is not None else None
        gate, up = spec.halves(w_in, w_up)
        biases, preacts = (spec.parts(*x, apart=w_up is not None) for x in ((b_in, b_up), (preact, preact_up)))
        multiply_activated(builder, A, gate, up, group_offsets, row_to_slot, biases, act, preacts, top_k, spec)
    else:
        if slot_to_row is not None:
            A = plan_scatter_rows(builder, (A, None, slot_to_row, group_offsets), (top_k, A.dtype))
        preact, preact_up = builder.alloc((M, w_in.size(2)), dtype), None
        multiply(builder, A, w_in, group_offsets, b_in, preact)
        if w_up is not None:
            preact_up = builder.alloc((M, width), dtype)
            multiply(builder, A, w_up, group_offsets, b_up, preact_up)
        act = plan_activate(builder, (preact, preact_up), (spec,))
        if not save_preact:
            preact = preact_up = None
    saved = [builder.alloc((0,), dtype) if x is None else x for x in (preact, preact_up)]
    return act, saved[0], saved[1]
