"""The activation between the two products of an expert, elementwise, computed in float32.

act = f(gate) * up              or f(gate) without up
clamped_swiglu (gpt-oss):       act = gate * sigmoid(alpha * gate) * (up + 1), gate at most limit, up within +-limit
clamped_silu (DeepSeek-V4):     act = silu(gate) * up, with the same limits
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import helion.language as hl
import torch

from moe_kernels.glu import CLAMPED, GLUSpec
from moe_kernels.kernels.declare import is_empty, kernel
from moe_kernels.kernels.inline import by_triton
from moe_kernels.kernels.quantize import inverse, largest_of, plan_quantize, scale_of, scaled
from moe_kernels.rules import by_rows
from moe_kernels.rules import quantize as quantize_rules
from moe_kernels.runtime.plan import Builder, Operands
from moe_kernels.runtime.symbolic import SymbolicTensor, needs_int64
from moe_kernels.scaled import scales_shape


def nonlinear(x: torch.Tensor, name: str, alpha: float) -> torch.Tensor:
    """Return f(x)."""
    if name in ("silu", "clamped_silu"):
        return x * torch.sigmoid(x)
    if name == "clamped_swiglu":
        return x * torch.sigmoid(alpha * x)
    if name == "gelu":
        return 0.5 * x * (1.0 + by_triton("erf", x * 0.7071067811865476))
    if name == "gelu_tanh":
        return x * torch.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    positive = torch.clamp(x, min=0.0)
    if name == "relu":
        return positive
    return positive * positive


def _slope(x: torch.Tensor, name: str, alpha: float) -> torch.Tensor:
    """Return f'(x)."""
    if name in ("silu", "clamped_silu"):
        s = torch.sigmoid(x)
        return s * (1.0 + x * (1.0 - s))
    if name == "clamped_swiglu":
        s = torch.sigmoid(alpha * x)
        return s * (1.0 + alpha * x * (1.0 - s))
    if name == "gelu":
        density = 0.3989422804014327 * by_triton("exp", -0.5 * x * x)
        return 0.5 * (1.0 + by_triton("erf", x * 0.7071067811865476)) + x * density
    if name == "gelu_tanh":
        u = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        s = torch.sigmoid(u)
        return s + x * s * torch.sigmoid(-u) * (1.5957691216057308 + 0.21406444881780073 * x * x)  # 1 - s would cancel
    if name == "relu":
        return torch.where(x > 0, 1.0, 0.0)
    return 2.0 * torch.clamp(x, min=0.0)


def activated(gate: torch.Tensor, up: torch.Tensor | None, name: str, alpha: float, limit: float) -> torch.Tensor:
    """Return act for float32 tiles."""
    if up is None:
        return nonlinear(gate, name, alpha)
    if name in CLAMPED:
        gate = torch.clamp(gate, max=limit)
        return nonlinear(gate, name, alpha) * _clamped_up(up, name, limit)
    return nonlinear(gate, name, alpha) * up


def _block(x: torch.Tensor | None, index: list[Any], inside: torch.Tensor | None = None) -> Any:
    """Return a block of `x` in float32; None if there is no `x`."""
    return None if x is None else hl.load(x, index, extra_mask=inside).to(torch.float32)


def _clamped_up(up: torch.Tensor, name: str, limit: float) -> torch.Tensor:
    """Return the factor that multiplies f(gate)."""
    up = torch.clamp(up, min=-limit, max=limit)
    return up + 1.0 if name == "clamped_swiglu" else up


@kernel()
def activate(
    act: torch.Tensor,  # [R, I], written
    gate: torch.Tensor,  # [R, I]
    up: torch.Tensor | None,  # [R, I]
    name: hl.constexpr,
    alpha: hl.constexpr,
    limit: hl.constexpr,
) -> torch.Tensor:
    """One program per row and block of columns."""
    for tile_r, tile_i in hl.tile(act.size(), block_size=[1, None]):
        r = (tile_r.id + hl.zeros([], dtype=torch.int32)).to(torch.int64)
        g, u = _block(gate, [r, tile_i]), _block(up, [r, tile_i])
        act[r, tile_i] = activated(g, u, name, alpha, limit).to(act.dtype)
    return act


def _write_quantised(
    data: torch.Tensor,  # [R, I] fp8
    scales: torch.Tensor,  # [R, parts]
    x: torch.Tensor,  # [P, width]: parts of row r
    amax: torch.Tensor,  # [P] int32
    r: torch.Tensor,
    part: torch.Tensor,  # [P], the columns of scales
    columns: torch.Tensor,  # [P, width], the columns of data
    inside: torch.Tensor,  # [P, width]
    largest: float,
) -> None:
    scale = scale_of(amax, largest, False)
    hl.store(scales, [r, part], scale)
    y = scaled(x, inverse(scale).unsqueeze(1))
    hl.store(data, [r, columns], y.to(data.dtype), extra_mask=inside)


@kernel()
def activate_quantized(
    data: torch.Tensor,  # [R, I] fp8, written
    scales: torch.Tensor,  # [R, parts], written
    gate: torch.Tensor,  # [R, I]
    up: torch.Tensor | None,  # [R, I]
    width: hl.constexpr,  # columns of a part
    largest: hl.constexpr,
    name: hl.constexpr,
    alpha: hl.constexpr,
    limit: hl.constexpr,
) -> torch.Tensor:
    """Write act in fp8, quantised as by `quantize` from float32: one program per row and block of its parts."""
    hl.pdl_wait()
    I = data.size(1)  # noqa: E741
    for tile_r, tile_p in hl.tile(scales.size(), block_size=[1, None]):
        r = (tile_r.id + hl.zeros([], dtype=torch.int32)).to(torch.int64)
        columns = (tile_p.index * width)[:, None] + hl.arange(width)[None, :]
        inside = columns < I
        g = _block(gate, [r, columns], inside)
        u = _block(up, [r, columns], inside)
        act = activated(g, u, name, alpha, limit)
        amax = largest_of(act, hl.zeros([tile_p], dtype=torch.int32), 1)
        _write_quantised(data, scales, act, amax, r, tile_p.index, columns, inside, largest)
    return data


@kernel()
def activate_backward(
    d_gate: torch.Tensor,  # [R, I], written
    d_up: torch.Tensor | None,  # [R, I], written
    gate: torch.Tensor,  # [R, I]
    up: torch.Tensor | None,  # [R, I]
    d_act: torch.Tensor,  # [R, I]
    name: hl.constexpr,
    alpha: hl.constexpr,
    limit: hl.constexpr,
) -> torch.Tensor:
    """One program per row and block of columns."""
    for tile_r, tile_i in hl.tile(d_gate.size(), block_size=[1, None]):
        r = (tile_r.id + hl.zeros([], dtype=torch.int32)).to(torch.int64)
        g, d, u = _block(gate, [r, tile_i]), _block(d_act, [r, tile_i]), _block(up, [r, tile_i])
        dg, du = _gradients(g, u, d, name, alpha, limit)
        d_gate[r, tile_i] = dg.to(d_gate.dtype)
        if d_up is not None:
            d_up[r, tile_i] = du.to(d_gate.dtype)
    return d_gate


@kernel()
def weighted_backward(
    d_gate: torch.Tensor,  # [R, I], written
    d_up: torch.Tensor | None,  # [R, I], written
    weighted: torch.Tensor | None,  # [R, I], written
    dots: torch.Tensor,  # [R], written
    data_gate: torch.Tensor | None,  # [R, I] fp8, written: d_gate quantised as by `quantize`
    data_up: torch.Tensor | None,  # [R, I] fp8, written
    scales: torch.Tensor | None,  # [R, 1] if `rowwise`, or [R, parts] of d_gate and then of d_up; written
    gate: torch.Tensor,  # [R, I]
    up: torch.Tensor | None,  # [R, I]
    d_act: torch.Tensor,  # [R, I]
    weights: torch.Tensor,  # [R]
    row_to_slot: torch.Tensor,  # [R] int32
    group_offsets: torch.Tensor,  # [E + 1] int32
    rowwise: hl.constexpr,
    width: hl.constexpr,  # columns of a part; all if `rowwise`
    largest: hl.constexpr,
    name: hl.constexpr,
    alpha: hl.constexpr,
    limit: hl.constexpr,
) -> torch.Tensor:
    """Gradients of weights[slot] * act, with that product and dots[slot] = <act, d_act>: one program per row.

    Rows at and past group_offsets[-1] have a weight of zero.
    """
    I = d_gate.size(1)  # noqa: E741
    E = group_offsets.size(0) - 1
    parts = (I + width - 1) // width
    for tile_r in hl.tile(d_gate.size(0), block_size=1):
        r = (tile_r.id + hl.zeros([], dtype=torch.int32)).to(torch.int64)
        slot = row_to_slot[r]
        w = torch.where(r < group_offsets[E], weights[slot].to(torch.float32), 0.0)
        dot = hl.zeros([], dtype=torch.float32)
        for tile_p in hl.tile(parts):
            columns = (tile_p.index * width)[:, None] + hl.arange(width)[None, :]
            inside = columns < I
            g = _block(gate, [r, columns], inside)
            d = _block(d_act, [r, columns], inside)
            u = _block(up, [r, columns], inside)
            act = activated(g, u, name, alpha, limit)
            wide_gate, wide_up = _gradients(g, u, w * d, name, alpha, limit)
            dg = wide_gate.to(d_gate.dtype)
            if d_up is not None:
                du = wide_up.to(d_gate.dtype)
                hl.store(d_up, [r, columns], du, extra_mask=inside)
            hl.store(d_gate, [r, columns], dg, extra_mask=inside)
            if weighted is not None:
                hl.store(weighted, [r, columns], (w * act).to(weighted.dtype), extra_mask=inside)
            dot = dot + hl.inline_triton("tl.sum({0})", args=(act * d,), output_like=dot)
            if scales is not None:
                amax = largest_of(dg, hl.zeros([tile_p], dtype=torch.int32), 1)
                if up is not None:
                    amax_up = largest_of(du, hl.zeros([tile_p], dtype=torch.int32), 1)
                    part = tile_p.index + parts
                    if rowwise:
                        amax = torch.maximum(amax, amax_up)
                        amax_up = amax
                        part = tile_p.index
                    _write_quantised(data_up, scales, du, amax_up, r, part, columns, inside, largest)
                _write_quantised(data_gate, scales, dg, amax, r, tile_p.index, columns, inside, largest)
        # The preactivations of rows at and past group_offsets[E] may be uninitialised.
        dots[slot] = torch.where(r < group_offsets[E], dot, 0.0).to(dots.dtype)
    return d_gate


def _gradients(
    gate: torch.Tensor, up: torch.Tensor | None, d: torch.Tensor, name: str, alpha: float, limit: float
) -> tuple[torch.Tensor, Any]:
    """Return the gradients of gate and of up, which is None if there is no up, for float32 tiles."""
    if up is None:
        return d * _slope(gate, name, alpha), None
    if name in CLAMPED:
        g = torch.clamp(gate, max=limit)
        u = _clamped_up(up, name, limit)
        d_gate = torch.where(gate <= limit, d * u * _slope(g, name, alpha), 0.0)
        d_up = torch.where((up >= -limit) & (up <= limit), d * nonlinear(g, name, alpha), 0.0)
        return d_gate, d_up
    return d * up * _slope(gate, name, alpha), d * nonlinear(gate, name, alpha)


def plan_activate(
    builder: Builder, tensors: Operands, options: tuple[GLUSpec], dtype: torch.dtype | None = None
) -> SymbolicTensor:
    """Plan act `[R, I]` from a preactivation `[R, 2I]` or `[R, I]`, by default in its dtype, and that of up."""
    (preact, preact_up), (spec,) = tensors, options
    gate, up = spec.halves(preact, preact_up)
    act = builder.alloc(gate.shape, preact.dtype if dtype is None else dtype)
    _launch(builder, activate, (act, gate, up), spec)
    return act


def write_scaled_activation(
    builder: Builder,
    preact: SymbolicTensor,  # [R, 2I] or [R, I]
    format: str,  # "rowwise" or "1x128"
    spec: GLUSpec,
) -> tuple[SymbolicTensor, SymbolicTensor]:
    """Return act `[R, I]` in fp8 and its scales, as from `activate_quantized`."""
    gate, up = spec.halves(preact, None)
    R, I = gate.shape  # noqa: E741
    if format == "rowwise" and I > quantize_rules.AT_ONCE:
        act = plan_activate(builder, (preact, None), (spec,), torch.float32)
        return plan_quantize(builder, (act,), (format, torch.float8_e4m3fn, False))
    data = builder.alloc((R, I), torch.float8_e4m3fn)
    scales = builder.alloc(scales_shape((R, I), format), torch.float32)
    parts = scales.size(1)
    width, largest = quantize_rules.width_of_part(I, parts), torch.finfo(data.dtype).max
    arguments = (data, scales, gate, up, width, largest, spec.activation, spec.alpha, spec.limit)
    config = quantize_rules.parts_of_a_row(I, parts)
    builder.launch(activate_quantized, arguments, config, int64_index=needs_int64(data, scales, gate, up))
    return data, scales


def plan_activate_backward(
    builder: Builder, tensors: Operands, options: tuple[bool, str | None, GLUSpec]
) -> tuple[SymbolicTensor, ...]:
    """Plan `reference.activate_backward` from preact, preact_up, d_act, topk_weights, row_to_slot and group_offsets.

    Results: the gradients of preact and preact_up, weighted act if the first option is True, the gradient of
    topk_weights, and that of preact in fp8 with its scales `[R, parts]` if there is a format. Results that do not exist
    are empty tensors.
    """
    preact, preact_up, d_act, topk_weights, row_to_slot, group_offsets = tensors
    weigh, format, spec = options
    gate, up = spec.halves(preact, preact_up)
    d_preact = builder.alloc(preact.shape, preact.dtype)
    d_preact_up = builder.alloc((0,) if preact_up is None else preact_up.shape, preact.dtype)
    d_gate, d_up = spec.halves(d_preact, None if preact_up is None else d_preact_up)
    weighted = builder.alloc(d_act.shape if weigh else (0,), preact.dtype)
    shape, dtype = ((0,), preact.dtype) if topk_weights is None else (topk_weights.shape, topk_weights.dtype)
    d_weights = builder.alloc(shape, dtype)
    data = builder.alloc((0,) if format is None else preact.shape, torch.float8_e4m3fn)
    scales = builder.alloc((0,) if format is None else scales_shape(preact.shape, format), torch.float32)
    made = d_preact, d_preact_up, weighted, d_weights, data, scales
    if topk_weights is None:
        _launch(builder, activate_backward, (d_gate, d_up, gate, up, d_act), spec)
        return made
    if is_empty(gate):
        builder.zero(d_weights)
        return made
    if not topk_weights.is_contiguous():
        topk_weights = builder.call("contiguous", (topk_weights,), ((row_to_slot.size(0),), topk_weights.dtype))
    quantised = (None, None, None) if format is None else (*spec.halves(data, None), scales)
    written = (d_gate, d_up, weighted if weigh else None, d_weights.flatten(), *quantised)
    tensors = (*written, gate, up, d_act, topk_weights.flatten(), row_to_slot, group_offsets)
    config, width = quantize_rules.weighted_backward(gate.size(1), format)
    constants = (format == "rowwise", width, torch.finfo(data.dtype).max, spec.activation, spec.alpha, spec.limit)
    builder.launch(weighted_backward, (*tensors, *constants), config, int64_index=needs_int64(*tensors))
    return made


def _launch(builder: Builder, kernel: Any, tensors: Sequence[SymbolicTensor | None], spec: GLUSpec) -> None:
    """Launch over the rows of the first tensor."""
    first = tensors[0]
    assert first is not None
    if is_empty(first):
        return
    arguments = (*tensors, spec.activation, spec.alpha, spec.limit)
    builder.launch(kernel, arguments, by_rows(first.size(1)), int64_index=needs_int64(*tensors))
