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
from moe_kernels.kernels.declare import kernel
from moe_kernels.kernels.inline import decode_odd
from moe_kernels.kernels.quantize import inverse, largest_of, plan_quantize, scale_of, scaled
from moe_kernels.rules import by_rows
from moe_kernels.rules import quantize as quantize_rules
from moe_kernels.runtime.plan import Builder, Operands
from moe_kernels.runtime.symbolic import SymbolicTensor, most, needs_int64
from moe_kernels.scaled import scales_shape


def _by_triton(function: str, x: torch.Tensor) -> torch.Tensor:
    return hl.inline_triton(f"tl.{function}({{0}})", args=(x,), output_like=x)


def nonlinear(x: torch.Tensor, name: str, alpha: float) -> torch.Tensor:
    """Return f(x)."""
    if name in ("silu", "clamped_silu"):
        return x * torch.sigmoid(x)
    if name == "clamped_swiglu":
        return x * torch.sigmoid(alpha * x)
    if name == "gelu":
        return 0.5 * x * (1.0 + _by_triton("erf", x * 0.7071067811865476))
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
        density = 0.3989422804014327 * _by_triton("exp", -0.5 * x * x)
        return 0.5 * (1.0 + _by_triton("erf", x * 0.7071067811865476)) + x * density
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


def _clamped_up(up: torch.Tensor, name: str, limit: float) -> torch.Tensor:
    """Return the factor that multiplies f(gate)."""
    up = torch.clamp(up, min=-limit, max=limit)
    return up + 1.0 if name == "clamped_swiglu" else up


@kernel()
def activate(
    act: torch.Tensor,  # [R, I], written
    gate: torch.Tensor,  # [R, I]
    up: torch.Tensor | None,  # [R, I]
    programs: int,  # at least R; odd
    odd_R: int,  # 2 * R + 1
    name: hl.constexpr,
    alpha: hl.constexpr,
    limit: hl.constexpr,
) -> torch.Tensor:
    """One program per row and block of columns."""
    width = act.size(1)
    for tile_r, tile_i in hl.tile([programs, width], block_size=[1, None]):
        zero = hl.zeros([], dtype=torch.int32)
        r = (tile_r.id + zero).to(torch.int64)
        if r < decode_odd(odd_R, zero):
            g = gate[r, tile_i].to(torch.float32)
            if up is None:
                act[r, tile_i] = activated(g, None, name, alpha, limit).to(act.dtype)
            else:
                act[r, tile_i] = activated(g, up[r, tile_i].to(torch.float32), name, alpha, limit).to(act.dtype)
    return act


@kernel()
def activate_quantized(
    data: torch.Tensor,  # [R, I] fp8, written
    scales: torch.Tensor,  # [R, parts], written
    gate: torch.Tensor,  # [R, I]
    up: torch.Tensor | None,  # [R, I]
    programs: int,  # at least R; odd
    odd_R: int,  # 2 * R + 1
    width: hl.constexpr,  # columns of a part
    largest: hl.constexpr,
    name: hl.constexpr,
    alpha: hl.constexpr,
    limit: hl.constexpr,
) -> torch.Tensor:
    """Write act in fp8, quantised as by `quantize` from float32: one program per row and block of its parts."""
    hl.pdl_wait()
    I = data.size(1)  # noqa: E741
    for tile_r, tile_p in hl.tile([programs, scales.size(1)], block_size=[1, None]):
        zero = hl.zeros([], dtype=torch.int32)
        r = (tile_r.id + zero).to(torch.int64)
        if r < decode_odd(odd_R, zero):
            columns = (tile_p.index * width)[:, None] + hl.arange(width)[None, :]
            act = hl.load(gate, [r, columns], extra_mask=columns < I).to(torch.float32)
            if up is None:
                act = activated(act, None, name, alpha, limit)
            else:
                u = hl.load(up, [r, columns], extra_mask=columns < I).to(torch.float32)
                act = activated(act, u, name, alpha, limit)
            amax = largest_of(act, hl.zeros([tile_p], dtype=torch.int32), 1)
            scale = scale_of(amax, largest, False)
            y = scaled(act, inverse(scale)[:, None])
            hl.store(data, [r, columns], y.to(data.dtype), extra_mask=columns < I)
            scales[r, tile_p] = scale
    return data


@kernel()
def activate_backward(
    d_gate: torch.Tensor,  # [R, I], written
    d_up: torch.Tensor | None,  # [R, I], written
    gate: torch.Tensor,  # [R, I]
    up: torch.Tensor | None,  # [R, I]
    d_act: torch.Tensor,  # [R, I]
    programs: int,  # at least R; odd
    odd_R: int,  # 2 * R + 1
    name: hl.constexpr,
    alpha: hl.constexpr,
    limit: hl.constexpr,
) -> torch.Tensor:
    """One program per row and block of columns."""
    width = d_gate.size(1)
    for tile_r, tile_i in hl.tile([programs, width], block_size=[1, None]):
        zero = hl.zeros([], dtype=torch.int32)
        r = (tile_r.id + zero).to(torch.int64)
        if r < decode_odd(odd_R, zero):
            g = gate[r, tile_i].to(torch.float32)
            d = d_act[r, tile_i].to(torch.float32)
            if up is None:
                d_gate[r, tile_i] = (d * _slope(g, name, alpha)).to(d_gate.dtype)
            else:
                dg, du = _gated_backward(g, up[r, tile_i].to(torch.float32), d, name, alpha, limit)
                d_gate[r, tile_i] = dg.to(d_gate.dtype)
                d_up[r, tile_i] = du.to(d_gate.dtype)
    return d_gate


@kernel()
def weighted_backward(
    d_gate: torch.Tensor,  # [R, I], written
    d_up: torch.Tensor | None,  # [R, I], written
    weighted: torch.Tensor | None,  # [R, I], written
    dots: torch.Tensor,  # [R], written
    gate: torch.Tensor,  # [R, I]
    up: torch.Tensor | None,  # [R, I]
    d_act: torch.Tensor,  # [R, I]
    weights: torch.Tensor,  # [R]
    row_to_slot: torch.Tensor,  # [R] int32
    group_offsets: torch.Tensor,  # [E + 1] int32
    programs: int,  # at least R; odd
    odd_R: int,  # 2 * R + 1
    name: hl.constexpr,
    alpha: hl.constexpr,
    limit: hl.constexpr,
) -> torch.Tensor:
    """Gradients of weights[slot] * act, with that product and dots[slot] = <act, d_act>: one program per row.

    Rows at and past group_offsets[-1] have a weight of zero.
    """
    width = d_gate.size(1)
    E = group_offsets.size(0) - 1
    for tile_r in hl.tile(programs, block_size=1):
        zero = hl.zeros([], dtype=torch.int32)
        r = (tile_r.id + zero).to(torch.int64)
        if r < decode_odd(odd_R, zero):
            slot = row_to_slot[r]
            w = torch.where(r < group_offsets[E], weights[slot].to(torch.float32), 0.0)
            dot = hl.zeros([], dtype=torch.float32)
            for tile_i in hl.tile(width):
                g = gate[r, tile_i].to(torch.float32)
                d = d_act[r, tile_i].to(torch.float32)
                if up is None:
                    act = activated(g, None, name, alpha, limit)
                    d_gate[r, tile_i] = (w * d * _slope(g, name, alpha)).to(d_gate.dtype)
                else:
                    u = up[r, tile_i].to(torch.float32)
                    act = activated(g, u, name, alpha, limit)
                    dg, du = _gated_backward(g, u, w * d, name, alpha, limit)
                    d_gate[r, tile_i] = dg.to(d_gate.dtype)
                    d_up[r, tile_i] = du.to(d_gate.dtype)
                if weighted is not None:
                    weighted[r, tile_i] = (w * act).to(weighted.dtype)
                dot = dot + torch.sum(act * d)
            # The preactivations of rows at and past group_offsets[E] may be uninitialised.
            dots[slot] = torch.where(r < group_offsets[E], dot, 0.0).to(dots.dtype)
    return d_gate


def _gated_backward(
    gate: torch.Tensor, up: torch.Tensor, d: torch.Tensor, name: str, alpha: float, limit: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of gate and up for float32 tiles."""
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
    arguments = (data, scales, gate, up, R | 1, R * 2 + 1, width, largest, spec.activation, spec.alpha, spec.limit)
    config = quantize_rules.parts_of_a_row(I, parts)
    builder.launch(activate_quantized, arguments, config, int64_index=needs_int64(data, scales, gate, up))
    return data, scales


def plan_activate_backward(
    builder: Builder, tensors: Operands, options: tuple[bool, GLUSpec]
) -> tuple[SymbolicTensor, ...]:
    """Plan `reference.activate_backward` from preact, preact_up, d_act, topk_weights, row_to_slot and group_offsets.

    Results: the gradients of preact and preact_up, weighted act if the first option is True, and the gradient of
    topk_weights. Results that do not exist are empty tensors.
    """
    preact, preact_up, d_act, topk_weights, row_to_slot, group_offsets = tensors
    weigh, spec = options
    gate, up = spec.halves(preact, preact_up)
    d_preact = builder.alloc(preact.shape, preact.dtype)
    d_preact_up = builder.alloc((0,) if preact_up is None else preact_up.shape, preact.dtype)
    d_gate, d_up = spec.halves(d_preact, None if preact_up is None else d_preact_up)
    if topk_weights is None:
        _launch(builder, activate_backward, (d_gate, d_up, gate, up, d_act), spec)
        return d_preact, d_preact_up, *(builder.alloc((0,), preact.dtype) for _ in range(2))
    weighted = builder.alloc(d_act.shape if weigh else (0,), preact.dtype)
    d_weights = builder.alloc(topk_weights.shape, topk_weights.dtype)
    if _is_empty(gate):
        builder.zero(d_weights)
    if not topk_weights.is_contiguous():
        R = topk_weights.flatten().size(0)
        topk_weights = builder.call("contiguous", (topk_weights,), ((R,), topk_weights.dtype))
    written = (d_gate, d_up, weighted if weigh else None, d_weights.flatten())
    arguments = (*written, gate, up, d_act, topk_weights.flatten(), row_to_slot, group_offsets)
    _launch(builder, weighted_backward, arguments, spec)
    return d_preact, d_preact_up, weighted, d_weights


def _is_empty(tensor: SymbolicTensor) -> bool:
    return any(most(n) == 0 for n in tensor.shape)


def _launch(builder: Builder, kernel: Any, tensors: Sequence[SymbolicTensor | None], spec: GLUSpec) -> None:
    """Launch over the rows of the first tensor."""
    first = tensors[0]
    assert first is not None
    if _is_empty(first):
        return
    R = first.size(0)
    arguments = (*tensors, R | 1, R * 2 + 1, spec.activation, spec.alpha, spec.limit)
    builder.launch(kernel, arguments, by_rows(first.size(1)), int64_index=needs_int64(*tensors))
