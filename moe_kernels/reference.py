"""The package's functions in plain PyTorch: the specification, the tests' oracle and the CPU path.

    out[group g rows] = A_packed[group g rows] @ B[g]        (or @ B, one weight for all groups)
    out[g] = A[g] @ B[g]                                     (uniform and varied)

They run on any device and leave gradients to autograd. Autocast applies to their products as to others of PyTorch,
while the kernels' functions cast only operands, so call them outside of it. Products that are not in fp8 take bfloat16,
float16, float32 or float64. Grouped products read the offsets on the host (a sync). Arguments are checked as those of
the public functions, by `checks`, and raise the same errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import checks
from .glu import CLAMPED, GLUSpec, columns
from .packing import group_offsets_from_offs, group_sizes
from .routing_maps import Routing
from .rules.quantize import finds_amax
from .scaled import BLOCK, ScaledTensor, scales_shape


def grouped_gemm(
    A_packed: Tensor,  # [M, K]
    B: Tensor,  # [K, N] or [G, K, N]
    group_offsets: Tensor,  # [G + 1]
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # [M, N]
    """Multiply each group's rows by the group's weight, or by the one that all share; see `moe_kernels.grouped_gemm`.

    If `A_packed`, `B` and the result have one dtype, the products are `torch.mm` in that dtype. Otherwise
    the operands are converted to float32, or to float64 if one of them is, and the products are rounded at the end.

    Rows outside all groups are exact zeros. So are their gradients and the weight gradients of empty groups, even if
    the operands hold NaN there.
    """
    result = checks.check_grouped_gemm(A_packed, B, group_offsets, out_dtype, reference=True)
    M, N = A_packed.shape[0], B.shape[-1]
    compute = result if A_packed.dtype == B.dtype == result else _accumulation_dtype(A_packed, B)
    offsets = checks.clamp_offsets(group_offsets, M).tolist()
    first, last = offsets[0], offsets[-1]
    if B.dim() == 2:
        weights, offsets = [B], [first, last]
    elif len(B) == 0:
        # One empty product keeps the result differentiable in both operands.
        weights, offsets = [B.sum(0)], [first, first]
    else:
        weights = list(B.unbind(0))
    sizes = [end - start for start, end in pairwise(offsets)]
    # split and unbind rather than indexing: their backward writes each gradient once, not once per group.
    groups = torch.split(A_packed[first:last], sizes)
    products = [(a.to(compute) @ b.to(compute)).to(result) for a, b in zip(groups, weights, strict=True)]
    before, after = (A_packed.new_zeros(rows, N, dtype=result) for rows in (first, M - last))
    return torch.cat([before, *products, after])


def grouped_gemm_wgrad(
    A_packed: Tensor,  # [M, K]
    d_out: Tensor,  # [M, N]
    group_offsets: Tensor,  # [G + 1]
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # [G, K, N]
    """Compute the gradient of `grouped_gemm` with respect to `B`: `out[g] = A_packed[rows of g].T @ d_out[rows of g]`.

    Offsets and `out_dtype` are as for `grouped_gemm`. Empty groups give exact zeros. Rows outside all groups do not
    affect the result, even if they hold NaN.
    """
    result = checks.check_grouped_gemm_wgrad(A_packed, d_out, group_offsets, out_dtype, reference=True)
    compute = result if A_packed.dtype == d_out.dtype == result else _accumulation_dtype(A_packed, d_out)
    offsets = checks.clamp_offsets(group_offsets, A_packed.shape[0]).tolist()
    if len(offsets) == 1:
        # One empty product keeps the result differentiable in both operands.
        return (A_packed[:0].T @ d_out[:0].to(A_packed.dtype)).to(result).expand(0, -1, -1)
    sizes = [end - start for start, end in pairwise(offsets)]
    split_A, split_d = (torch.split(x[offsets[0] : offsets[-1]], sizes) for x in (A_packed, d_out))
    products = [(a.to(compute).T @ d.to(compute)).to(result) for a, d in zip(split_A, split_d, strict=True)]
    return torch.stack(products)


def grouped_mm(
    mat_a: Tensor,  # [M, K] or [G, M, K]
    mat_b: Tensor,  # [G, K, N] or [K, N]
    *,
    offs: Tensor | None = None,  # [G]
    bias: Tensor | None = None,  # [G, N]
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute `torch.nn.functional.grouped_mm`, in the four forms of `moe_kernels.grouped_mm`.

    The bias is added as by `grouped_linear`, and does not change the result's dtype. Rows or columns outside all groups
    are exact zeros, to which no bias is added.
    """
    result = checks.check_grouped_mm(mat_a, mat_b, offs, bias, out_dtype, reference=True)
    if offs is None:
        return uniform_grouped_gemm(mat_a, mat_b, len(mat_a), out_dtype=result)
    group_offsets = group_offsets_from_offs(offs)
    if mat_b.dim() == 2:
        if mat_a.dim() == 2:
            return grouped_gemm_wgrad(mat_a.T, mat_b, group_offsets, out_dtype=result)
        return grouped_gemm(mat_b.T, mat_a.mT, group_offsets, out_dtype=result).T
    return grouped_linear(mat_a, mat_b, group_offsets, bias, result)


def grouped_linear(
    A_packed: Tensor,  # [M, K]
    B: Tensor,  # [K, N] or [G, K, N]
    group_offsets: Tensor,  # [G + 1]
    bias: Tensor | None,  # [G, N]
    out_dtype: torch.dtype | None,
) -> Tensor:  # [M, N]
    """Compute `grouped_gemm` plus a bias per group, added in float32 (float64 if an argument is) before rounding."""
    if bias is None:
        return grouped_gemm(A_packed, B, group_offsets, out_dtype=out_dtype)
    compute = _accumulation_dtype(A_packed, B, bias)
    products = grouped_gemm(A_packed, B, group_offsets, out_dtype=compute)
    offsets = checks.clamp_offsets(group_offsets, len(A_packed))
    biases = bias.to(compute).repeat_interleave(group_sizes(offsets), dim=0)
    first, last = offsets[[0, -1]].tolist()
    result = out_dtype or torch.promote_types(A_packed.dtype, B.dtype)
    return (products + F.pad(biases, (0, 0, first, len(A_packed) - last))).to(result)


def scaled_grouped_gemm(
    A_packed: ScaledTensor,  # [M, K]
    B: ScaledTensor,  # [K, N] or [G, K, N]
    group_offsets: Tensor,  # [G + 1]
    bias: Tensor | None = None,  # [G, N]
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # [M, N]
    """Compute `grouped_linear` of the operands dequantised to float32, rounded once; `out_dtype` None is bfloat16."""
    result = checks.check_scaled_grouped_gemm(A_packed, B, group_offsets, bias, out_dtype)
    return grouped_linear(dequantize(A_packed), dequantize(B), group_offsets, bias, result)


def scaled_grouped_mm(
    mat_a: Tensor,  # [M, K] or [G, M, K]
    mat_b: Tensor,  # [G, K, N] or [K, N]
    scale_a: Tensor | list[Tensor],
    scale_recipe_a: Any,
    scale_b: Tensor | list[Tensor],
    scale_recipe_b: Any,
    swizzle_a: Any = None,
    swizzle_b: Any = None,
    bias: Tensor | None = None,  # [G, N]
    offs: Tensor | None = None,  # [G]
    output_dtype: torch.dtype | None = torch.bfloat16,
    contraction_dim: list[int] | tuple[int, ...] = (),
    use_fast_accum: bool = False,
) -> Tensor:
    """Compute `grouped_mm` of the operands dequantised to float32, rounded once; `output_dtype` None is bfloat16.

    `use_fast_accum` has no effect.
    """
    recipes = (scale_a, scale_recipe_a, scale_b, scale_recipe_b, swizzle_a, swizzle_b)
    options = (bias, offs, output_dtype, contraction_dim, use_fast_accum)
    a, b, result = checks.check_scaled_grouped_mm(mat_a, mat_b, *recipes, *options)
    if mat_a.dim() == mat_b.dim() == 2:
        assert offs is not None
        group_offsets = group_offsets_from_offs(offs)
        return scaled_wgrad(mat_a.T, a.scales[:, :, 0], mat_b, b.scales[:, 0], group_offsets, result)
    return grouped_mm(dequantize(a), dequantize(b), offs=offs, bias=bias, out_dtype=result)


def scaled_wgrad(
    X: Tensor,  # [M, P]
    scales_X: Tensor,  # [G, P]
    Y: Tensor,  # [M, Q]
    scales_Y: Tensor,  # [G, Q]
    group_offsets: Tensor,  # [G + 1]
    out_dtype: torch.dtype,
) -> Tensor:  # [G, P, Q]
    """Compute `grouped_gemm_wgrad` of fp8 operands, dequantised to float32 by each group's scales, rounded once."""
    offsets = checks.clamp_offsets(group_offsets, len(X))
    first, last = int(offsets[0]), int(offsets[-1])
    x, y = (
        rows[first:last].float() * scales.repeat_interleave(offsets.diff(), 0)
        for rows, scales in ((X, scales_X), (Y, scales_Y))
    )
    return grouped_gemm_wgrad(x, y, offsets - offsets[0], out_dtype=out_dtype)


def uniform_grouped_gemm(
    A: Tensor,  # [G * M, K] or [G, M, K]
    B: Tensor,  # [G * K, N] or [G, K, N]
    num_groups: int,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # [G * M, N] or [G, M, N], like A
    """Multiply groups of one size: `out[g] = A[g] @ B[g]`.

    The products are `torch.bmm`, in the same dtypes as in `grouped_gemm`.
    """
    result = checks.check_uniform(A, B, num_groups, out_dtype, reference=True)
    compute = result if A.dtype == B.dtype == result else _accumulation_dtype(A, B)
    M = A.shape[-2] if A.dim() == 3 else A.shape[0] // max(num_groups, 1)
    a = A.to(compute).reshape(num_groups, M, A.shape[-1])
    b = B.to(compute).reshape(num_groups, A.shape[-1], B.shape[-1])
    out = torch.bmm(a, b).to(result)
    return out if A.dim() == 3 else out.flatten(0, 1)


def varied_grouped_gemm(
    group_A: Sequence[Tensor],  # P of [M_p, K_p]
    group_B: Sequence[Tensor],  # P of [K_p, N_p]
    *,
    out: Sequence[Tensor] | None = None,  # P of [M_p, N_p]
) -> list[Tensor]:
    """Multiply pairs of matrices, each pair of its own size: `torch.mm(group_A[p], group_B[p])`."""
    checks.check_varied(group_A, group_B, out, reference=True)
    outs = [None] * len(group_A) if out is None else out
    return [torch.mm(a, b, out=o) for a, b, o in zip(group_A, group_B, outs, strict=True)]


def quantize(
    x: Tensor,  # [R, K] or [G, R, K]
    format: str,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    power_of_two: bool = False,
) -> ScaledTensor:
    """Quantise to fp8 with one scale per block; see `moe_kernels.quantize`. float64 is first rounded to float32."""
    checks.check_quantize(x, format, dtype, power_of_two, reference=True)
    *groups, R, K = x.shape
    *_, rows, parts = scales_shape(x.shape, format)
    height = BLOCK if format == "128x128" else 1
    width = max(K, 1) if format == "rowwise" else BLOCK
    padded = F.pad(x.detach().float(), (0, parts * width - K, 0, rows * height - R))
    blocks = padded.view(*groups, rows, height, parts, width)
    amax = blocks.abs().amax((-3, -1), keepdim=True)
    finite = amax < torch.inf
    scale = amax.clamp(min=2.0**-100) * torch.tensor(1 / torch.finfo(dtype).max, dtype=torch.float32, device=x.device)
    if power_of_two:
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    data = torch.where(finite, blocks * scale.reciprocal(), 0.0).to(dtype).reshape(padded.shape)
    scales = torch.where(finite, scale, torch.nan).view(*groups, rows, parts)
    if format == "1x128":
        scales = scales.mT.clone(memory_format=torch.contiguous_format).mT
    return ScaledTensor(data[..., :R, :K].clone(memory_format=torch.contiguous_format), scales, format)


def dequantize(scaled: ScaledTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return `data * scale` in float32, rounded once to `dtype`; see `moe_kernels.dequantize`."""
    checks.check_dequantize(scaled, dtype)
    data, scales, format = scaled
    along_k = -1 if scales.shape == scales_shape(data.shape, format) else -2  # -2 for `ScaledTensor.mT`
    for dim in {"rowwise": (), "1x128": (along_k,), "128x128": (-2, -1)}[format]:
        scales = scales.repeat_interleave(BLOCK, dim).narrow(dim, 0, data.shape[dim])
    return (data.float() * scales).to(dtype)


def topk_ids(
    logits: Tensor,  # [T, E]
    bias: Tensor | None,  # [E]
    top_k: int,
    softmax: bool,  # or else sigmoid
    num_groups: int,
    top_groups: int,
) -> Tensor:  # [T, top_k] int64
    """Choose experts; see `moe_kernels.topk_softmax` and `moe_kernels.topk_sigmoid`."""
    T, E = logits.shape
    dtype = torch.promote_types(logits.dtype, torch.float32)
    choice = logits.softmax(-1, dtype=dtype) if softmax else logits.to(dtype).sigmoid()
    if bias is not None:
        choice = choice + bias
    if num_groups > 1:
        grouped = choice.view(T, num_groups, E // num_groups)
        group_scores = grouped.topk(min(2, grouped.size(2)), dim=-1).values.sum(-1)
        chosen = torch.zeros_like(group_scores, dtype=torch.bool)
        chosen = chosen.scatter(1, group_scores.topk(top_groups, dim=-1).indices, 1)  # torch.jit has no bool there
        # A bias of -inf must not make an expert of a chosen group equal to those of other groups.
        finite = grouped.clamp(min=torch.finfo(grouped.dtype).min)
        choice = finite.masked_fill(~chosen[:, :, None], float("-inf")).view(T, E)
    return choice.topk(top_k, dim=-1).indices


def topk_weights(
    logits: Tensor,  # [T, E]
    topk_ids: Tensor,  # [T, top_k]
    softmax: bool,  # or else sigmoid
    renormalize: bool,
    scale: float,  # for sigmoid
) -> Tensor:  # [T, top_k]
    """Return the weights of chosen experts; see `moe_kernels.topk_softmax` and `moe_kernels.topk_sigmoid`."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if softmax:  # of all logits, so that NaN among them is not hidden
        chosen = logits.softmax(-1, dtype=dtype).gather(1, topk_ids)
        return chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen
    chosen = logits.gather(1, topk_ids).to(dtype).sigmoid()
    if renormalize:
        # The sigmoids of all chosen experts may underflow to zero.
        chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    return chosen * scale


def route(topk_ids: Tensor, topk_weights: Tensor, num_experts: int) -> Routing:
    """Sort the slots of `topk_ids [T, top_k]` by expert without a sync; see `moe_kernels.route`."""
    checks.check_route(topk_ids, topk_weights, num_experts)
    ids = topk_ids.reshape(-1)
    experts = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    experts, row_to_slot = torch.sort(experts, stable=True)
    starts = torch.arange(num_experts + 1, device=ids.device, dtype=ids.dtype)
    group_offsets = torch.searchsorted(experts, starts, out_int32=True)
    rows = torch.arange(ids.numel(), device=ids.device, dtype=torch.int32)
    slot_to_row = torch.empty_like(rows).scatter_(0, row_to_slot, rows)
    return Routing(group_offsets, row_to_slot.to(torch.int32), slot_to_row, topk_weights)


def permute(hidden: Tensor, routing: Routing) -> Tensor:  # [T, H] -> [R, H]
    """Copy each token's row to the rows of its slots; see `moe_kernels.permute`."""
    checks.check_moved("hidden", hidden, "T", routing)
    top_k = routing.topk_weights.size(1)
    return scatter_rows(hidden, None, routing.slot_to_row, routing.group_offsets, top_k, hidden.dtype)


def unpermute(rows: Tensor, routing: Routing, *, weighted: bool = True) -> Tensor:  # [R, H] -> [T, H]
    """Add up each token's rows, weighted by its topk_weights; see `moe_kernels.unpermute`."""
    checks.check_bools(weighted=weighted)
    checks.check_moved("rows", rows, "R", routing)
    topk_weights = routing.topk_weights if weighted else None
    top_k = routing.topk_weights.size(1)
    return combine_rows(rows, topk_weights, routing.slot_to_row, routing.group_offsets, top_k, rows.dtype)


def scatter_rows(
    tokens: Tensor,  # [T, H]
    topk_weights: Tensor | None,  # [T, top_k]
    slot_to_row: Tensor,  # [R]
    group_offsets: Tensor,  # [E + 1]
    top_k: int,
    out_dtype: torch.dtype,
) -> Tensor:  # [R, H]
    """Compute `rows[slot_to_row[s]] = topk_weights[s] * tokens[s // top_k]`; rows from group_offsets[-1] on are 0."""
    slots = tokens.repeat_interleave(top_k, dim=0)
    if topk_weights is not None:
        compute = _accumulation_dtype(tokens, topk_weights)
        slots = slots.to(compute) * topk_weights.reshape(-1, 1).to(compute)
    row_to_slot = torch.empty_like(slot_to_row, dtype=torch.int64)
    row_to_slot[slot_to_row.long()] = torch.arange(len(slot_to_row), device=tokens.device)
    return _kept(slots, slot_to_row, group_offsets)[row_to_slot].to(out_dtype)


def combine_rows(
    rows: Tensor,  # [R, H]
    topk_weights: Tensor | None,  # [T, top_k]
    slot_to_row: Tensor,  # [R]
    group_offsets: Tensor,  # [E + 1]
    top_k: int,
    out_dtype: torch.dtype,
) -> Tensor:  # [T, H]
    """Sum over k, without dropped slots: `tokens[t] = sum topk_weights[t, k] * rows[slot_to_row[t * top_k + k]]`."""
    compute = _accumulation_dtype(rows) if topk_weights is None else _accumulation_dtype(rows, topk_weights)
    slots = rows[slot_to_row.long()].to(compute)
    if topk_weights is not None:
        slots = slots * topk_weights.reshape(-1, 1).to(compute)
    slots = _kept(slots, slot_to_row, group_offsets).view(len(slots) // top_k, top_k, rows.shape[1])
    # Not sum(1), because the order of its additions is not specified.
    total = torch.zeros_like(slots[:, 0])
    for k in range(top_k):
        total = total + slots[:, k]
    return total.to(out_dtype)


def dot_rows(
    tokens: Tensor,  # [T, H]
    rows: Tensor,  # [R, H]
    slot_to_row: Tensor,  # [R]
    group_offsets: Tensor,  # [E + 1]
    top_k: int,
    out_dtype: torch.dtype,
) -> Tensor:  # [T, top_k]
    """Compute `dots[s] = <tokens[s // top_k], rows[slot_to_row[s]]>`; 0 for dropped slots."""
    compute = _accumulation_dtype(tokens, rows)
    products = tokens.to(compute).repeat_interleave(top_k, dim=0) * rows[slot_to_row.long()].to(compute)
    return _kept(products, slot_to_row, group_offsets).sum(1).view(-1, top_k).to(out_dtype)


def _kept(slots: Tensor, slot_to_row: Tensor, group_offsets: Tensor) -> Tensor:
    """Return `slots [R, H]`, which are in slot order, with zeros in place of dropped slots."""
    kept = (slot_to_row < group_offsets[-1]).unsqueeze(1)
    return torch.where(kept, slots, torch.zeros_like(slots))


def activate(
    preact: Tensor,  # [R, 2I] or [R, I]
    preact_up: Tensor | None,  # [R, I]
    spec: GLUSpec,
) -> Tensor:  # [R, I]
    """Compute the activation between an expert's two products in float32 or float64, rounded once; see `GLUSpec`."""
    gate, up = spec.halves(preact, preact_up)
    compute = _accumulation_dtype(preact)
    if up is None:
        return _nonlinear(gate.to(compute), spec)[0].to(preact.dtype)
    gate, up = _clamped(gate.to(compute), up.to(compute), spec)
    return (_nonlinear(gate, spec)[0] * up).to(preact.dtype)


def activate_backward(
    preact: Tensor,  # [R, 2I] or [R, I]
    preact_up: Tensor | None,  # [R, I]
    d_act: Tensor,  # [R, I]
    topk_weights: Tensor | None,  # [T, top_k]
    row_to_slot: Tensor | None,  # [R]
    group_offsets: Tensor | None,  # [E + 1]
    spec: GLUSpec,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of `w[r] * act[r]` from its gradient `d_act`, where `act = activate(preact, preact_up)`.

    `w` are the rows' topk_weights, with zeros for rows from group_offsets[-1] on, or ones if `topk_weights` is None.

    Returns:
        The gradients of preact and preact_up, and `w * act [R, I]` and the gradient of topk_weights; None if missing.
    """
    d = d_act.to(_accumulation_dtype(preact, d_act))
    if topk_weights is None or row_to_slot is None or group_offsets is None:
        _, d_preact, d_preact_up = _through_activation(preact, preact_up, d, spec)
        return d_preact, d_preact_up, None, None
    slots = row_to_slot.long()
    kept = torch.arange(len(slots), device=preact.device) < group_offsets[-1]
    w = torch.where(kept, topk_weights.reshape(-1)[slots].to(d.dtype), 0.0).unsqueeze(1)
    act, d_preact, d_preact_up = _through_activation(preact, preact_up, w * d, spec)
    products = torch.where(kept, (act * d).sum(1), 0.0)
    dots = torch.empty(topk_weights.numel(), dtype=d.dtype, device=preact.device).index_put((slots,), products)
    return d_preact, d_preact_up, (w * act).to(preact.dtype), dots.view(topk_weights.shape).to(topk_weights.dtype)


def _through_activation(
    preact: Tensor, preact_up: Tensor | None, d: Tensor, spec: GLUSpec
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return act, in the dtype of its gradient `d`, and the gradients of preact and preact_up."""
    gate, up = spec.halves(preact, preact_up)
    gate = gate.to(d.dtype)
    if up is None:
        act, slope = _nonlinear(gate, spec)
        return act, (d * slope).to(preact.dtype), None
    up = up.to(d.dtype)
    g, u = _clamped(gate, up, spec)
    f, slope = _nonlinear(g, spec)
    d_gate, d_up = d * u * slope, d * f
    if spec.activation in CLAMPED:
        d_gate = torch.where(gate <= spec.limit, d_gate, 0.0)
        d_up = torch.where(up.abs() <= spec.limit, d_up, 0.0)
    if preact_up is not None:
        return f * u, d_gate.to(preact.dtype), d_up.to(preact_up.dtype)
    both = torch.stack((d_gate, d_up), -1).flatten(1) if spec.interleaved else torch.cat((d_gate, d_up), 1)
    return f * u, both.to(preact.dtype), None


def _clamped(gate: Tensor, up: Tensor, spec: GLUSpec) -> tuple[Tensor, Tensor]:
    if spec.activation not in CLAMPED:
        return gate, up
    gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
    return gate, up + 1 if spec.activation == "clamped_swiglu" else up


def _nonlinear(x: Tensor, spec: GLUSpec) -> tuple[Tensor, Tensor]:
    """Return f(x) and its derivative."""
    if spec.activation in ("silu", *CLAMPED):
        a = spec.alpha if spec.activation == "clamped_swiglu" else 1.0
        s = torch.sigmoid(a * x)
        return x * s, s * (1 + a * x * (1 - s))
    if spec.activation == "gelu":
        normal = 0.5 * (1 + torch.erf(x * 0.5**0.5))
        return x * normal, normal + x * torch.exp(-0.5 * x * x) * (2 * torch.pi) ** -0.5
    if spec.activation == "gelu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2 u)
        a = 2 * (2 / torch.pi) ** 0.5
        u = a * (x + 0.044715 * x**3)
        s = torch.sigmoid(u)
        return x * s, s + x * s * torch.sigmoid(-u) * a * (1 + 3 * 0.044715 * x * x)
    positive = x.clamp(min=0)
    if spec.activation == "relu":
        return positive, (x > 0).to(x.dtype)
    return positive * positive, 2 * positive


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
) -> Tensor:  # [M, I]
    """Compute the first half of each expert; see `moe_kernels.swiglu_ffn`."""
    spec = GLUSpec(activation, gated, interleaved, alpha, limit)
    experts = checks.Experts(w_gate_up, None, w_up, gate_up_bias, up_bias, None, spec, transposed)
    checks.check_swiglu_ffn(rows, group_offsets, experts, reference=True)
    w_in, w_up = columns(w_gate_up, transposed), columns(w_up, transposed)
    return first_half(rows, group_offsets, w_in, w_up, gate_up_bias, up_bias, spec)[0]


def first_half(
    rows: Tensor,  # [M, H]
    group_offsets: Tensor,  # [E + 1]
    w_in: Tensor,  # [E, H, 2I] or [E, H, I]
    w_up: Tensor | None,  # [E, H, I]
    b_in: Tensor | None,  # [E, 2I] or [E, I]
    b_up: Tensor | None,  # [E, I]
    spec: GLUSpec,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute act `[M, I]`, and return also its preactivations, that of up only with `w_up`."""
    preact = grouped_linear(rows, w_in, group_offsets, b_in, None)
    preact_up = None if w_up is None else grouped_linear(rows, w_up, group_offsets, b_up, preact.dtype)
    return activate(preact, preact_up, spec), preact, preact_up


def moe_mlp(
    hidden: Tensor,  # [T, H]
    topk_ids: Tensor,  # [T, top_k]
    topk_weights: Tensor,  # [T, top_k]
    w_gate_up: Tensor | ScaledTensor,  # as for swiglu_ffn
    w_down: Tensor | ScaledTensor,  # [E, H, I], or [E, I, H] if transposed
    *,
    w_up: Tensor | None = None,  # as for swiglu_ffn, and so are the others
    gate_up_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,  # [E, H]
    activation: str = "silu",
    gated: bool = True,
    transposed: bool = False,
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:  # [T, H]
    """Compute a layer of experts; see `moe_kernels.moe_mlp`.

    With fp8 weights, the left operands of both products are quantised, act from float32. Both products are rounded to
    the dtype of `hidden`. The kernels for one token are more accurate, because they do not quantise the left operands.
    """
    spec = GLUSpec(activation, gated, interleaved, alpha, limit)
    experts = checks.Experts(w_gate_up, w_down, w_up, gate_up_bias, up_bias, down_bias, spec, transposed)
    if isinstance(w_gate_up, ScaledTensor) or isinstance(w_down, ScaledTensor):
        checks.check_scaled_moe_mlp(hidden, topk_ids, topk_weights, experts)
        first, second = checks.scaled_both("w_gate_up", w_gate_up, "w_down", w_down)
        group_offsets, _, slot_to_row, _ = route(topk_ids, topk_weights, first.shape[0])
        tokens, weights = (hidden, topk_weights, group_offsets, slot_to_row), (*first[:2], *second[:2])
        options = (first.format == "rowwise", False, spec)
        return quantized_moe_mlp(*tokens, *weights, gate_up_bias, down_bias, *options)[0]
    checks.check_moe_mlp(hidden, topk_ids, topk_weights, experts, reference=True)
    w_in, w_out, w_up = (columns(w, transposed) for w in (w_gate_up, w_down, w_up))
    routing = route(topk_ids, topk_weights, len(w_gate_up))
    rows, offsets = permute(hidden, routing), routing.group_offsets
    act, *_ = first_half(rows, offsets, w_in, w_up, gate_up_bias, up_bias, spec)
    return unpermute(grouped_linear(act, w_out, offsets, down_bias, None), routing)


def quantized_grouped_gemm(
    A: Tensor,  # [M, K], or tokens [T, K] with slot_to_row
    scales_A: Tensor | None,  # [M, 1] or [M, ceil(K / 128)] of an A in fp8
    B: Tensor,  # [G, K, N]
    scales_B: Tensor | None,  # [G, 1, N] or [G, ceil(K / 128), ceil(N / 128)] of a B in fp8
    group_offsets: Tensor,  # [G + 1]
    slot_to_row: Tensor | None,  # [M]
    bias: Tensor | None,  # [G, N]
    rowwise: bool,
    out_dtype: torch.dtype,
) -> Tensor:  # [M, N]
    """Compute `scaled_grouped_gemm` of operands that this quantises along K, as "rowwise" or as "1x128" and "128x128".

    An operand in fp8 is already quantised. The scales of others are found here.
    """
    formats = ("rowwise", "rowwise") if rowwise else ("1x128", "128x128")
    if slot_to_row is not None:
        A = scatter_rows(A, None, slot_to_row, group_offsets, len(slot_to_row) // max(len(A), 1), A.dtype)
    a = quantize(A, formats[0]) if scales_A is None else ScaledTensor(A, scales_A, formats[0])
    if scales_B is not None and B.dtype == torch.float8_e4m3fn:
        b = ScaledTensor(B, scales_B, formats[1])
    else:
        b = quantize(B.mT, formats[1]).mT
    return grouped_linear(dequantize(a), dequantize(b), group_offsets, bias, out_dtype)


def quantized_wgrad(
    X: Tensor,  # [M, P], or tokens [T, P] with x_row_to_slot
    Y: Tensor,  # [M, Q], or tokens [T, Q] with y_row_to_slot
    group_offsets: Tensor,  # [G + 1]
    x_row_to_slot: Tensor | None,  # [M]
    y_row_to_slot: Tensor | None,  # [M]
    out_dtype: torch.dtype,
) -> Tensor:  # [G, P, Q]
    """Compute `grouped_gemm_wgrad` of operands quantised along the rows of each group, in float32, rounded once.

    Each group's rows are quantised transposed: those of X as "1x128", those of Y as "128x128".
    """
    x, y = (
        rows if to_slot is None else rows[to_slot.long() // max(len(to_slot) // max(len(rows), 1), 1)]
        for rows, to_slot in ((X, x_row_to_slot), (Y, y_row_to_slot))
    )
    offsets = checks.clamp_offsets(group_offsets, len(x))
    values = []
    for rows, format in ((x, "1x128"), (y, "128x128")):
        made = torch.zeros_like(rows, dtype=torch.float32, memory_format=torch.contiguous_format)
        for start, end in pairwise(offsets.tolist()):
            made[start:end] = dequantize(quantize(rows[start:end].T, format)).T
        values.append(made)
    return grouped_gemm_wgrad(values[0], values[1], offsets, out_dtype=out_dtype)


def quantize_weight(weight: Tensor, rowwise: bool) -> tuple[Tensor, ...]:  # [E, N, K]
    """Return data and scales of a weight, and of its transpose; see `moe_kernels.quantize_weight`.

    The scales of the transpose are empty unless `rowwise`: in "128x128" they are the weight's, transposed.
    """
    format = "rowwise" if rowwise else "128x128"
    (data, scales, _), (backward, backward_scales, _) = (quantize(w, format) for w in (weight, weight.mT))
    return data, scales, backward, backward_scales if rowwise else scales.new_empty(0)


def quantized_moe_mlp(
    hidden: Tensor,  # [T, H]
    topk_weights: Tensor,  # [T, top_k]
    group_offsets: Tensor,  # [E + 1]
    slot_to_row: Tensor,  # [R]
    w_gate_up: Tensor,  # [E, 2I, H], or [E, I, H] if not gated
    scales_in: Tensor | None,  # of fp8 data
    w_down: Tensor,  # [E, H, I]
    scales_out: Tensor | None,
    b_in: Tensor | None,  # [E, 2I] or [E, I]
    b_out: Tensor | None,  # [E, H]
    rowwise: bool,
    save: bool,
    spec: GLUSpec,
) -> tuple[Tensor, ...]:
    """Quantise weights that have no scales and compute `moe_mlp`; see `moe_kernels.moe_mlp` with `compute`.

    Returns:
        The result `[T, H]`; the preactivation `[R, 2I]` or `[R, I]`; and of each weight `[E, N, K]` the fp8 data as
        `[E, K, N]`, contiguous, and the scales. All but the result are empty if not `save`, and data and scales also if
        the weight is in fp8. With `rowwise` the data are empty, and amax over N stands for the scales, as the bits of
        float32 in int32 `[E, K]`; it is empty unless `finds_amax`.
    """
    dtype, top_k = hidden.dtype, topk_weights.shape[1]
    weights: list[tuple[Tensor, Tensor | None]] = []
    saved: list[Tensor] = []
    for w, scales in ((w_gate_up, scales_in), (w_down, scales_out)):
        data = w.new_empty(0, dtype=torch.float8_e4m3fn)
        kept = w.new_empty(0, dtype=torch.int32 if rowwise else torch.float32)
        if save and scales is None and not rowwise:
            w, scales, data, _ = quantize_weight(w, rowwise)
            kept = scales
        elif save and scales is None and finds_amax(w):
            kept = w.float().abs().amax(1).view(torch.int32)
        weights.append((w.mT, None if scales is None else scales.mT))
        saved += data, kept
    preact = quantized_grouped_gemm(hidden, None, *weights[0], group_offsets, slot_to_row, b_in, rowwise, dtype)
    act = activate(preact.float(), None, spec)
    rows = quantized_grouped_gemm(act, None, *weights[1], group_offsets, None, b_out, rowwise, dtype)
    out = combine_rows(rows, topk_weights, slot_to_row, group_offsets, top_k, dtype)
    return out, preact if save else preact.new_empty(0), *saved


def _accumulation_dtype(*operands: Tensor) -> torch.dtype:
    return torch.float64 if any(operand.dtype == torch.float64 for operand in operands) else torch.float32
