"""The package's operators in torch.library, `torch.ops.moe_kernels.*`: schema, fake and autograd.

Every operator is functional, and every gradient is made of the same operators, so gradients of any order exist:

    grouped_gemm(A, B)   out[g] = A[g] @ B[g]                 dA = grouped_gemm(dOut, B^T), dB = wgrad(A, dOut)
    wgrad(A, D)          out[g] = A[g]^T @ D[g]               dA = grouped_gemm(D, dB^T),   dD = grouped_gemm(A, dB)
    scatter_rows(x, w)   rows[to[s]] = w[s] * x[s // top_k]   dx = combine_rows(d, w),      dw = dot_rows(x, d)
    combine_rows(y, w)   out[t] = sum w[s] * y[to[s]]         dy = scatter_rows(d, w),      dw = dot_rows(d, y)
    dot_rows(x, y)       w[s] = <x[s // top_k], y[to[s]]>     dx = combine_rows(y, d),      dy = scatter_rows(x, d)

The functions of these names here are what the rest of the package calls. In eager mode, where nothing records, they go
past torch.library, which costs the host more than some kernels take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_kernels import dispatch, reference

_library: Any = torch.library
_LIBRARY = _library.Library("moe_kernels", "FRAGMENT")


def _define(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Register an operator; return the function that calls `run`, directly where nobody would notice."""
    name = schema.partition("(")[0]
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    _LIBRARY.define(schema, tags=tags)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    _library.register_fake(f"moe_kernels::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        _library.register_autograd(f"moe_kernels::{name}", backward, setup_context=setup_context, lib=_LIBRARY)
    operator = getattr(torch.ops.moe_kernels, name).default

    def call(*args: Any) -> Any:
        return run(*args) if dispatch.unobserved(*args[:2]) else operator(*args)

    call.__name__ = name
    return call


def _needs(ctx: Any, i: int, value: Tensor | None) -> Tensor | None:
    """`value` if the gradient of input i will be asked for."""
    return value if ctx.needs_input_grad[i] else None


# grouped_gemm


def _grouped_gemm(
    A_packed: Tensor,  # [M, K]
    B: Tensor,  # [K, N] or [G, K, N]
    group_offsets: Tensor,  # [G + 1]
    bias: Tensor | None,  # [G, N]
    out_dtype: torch.dtype,
    variant: str,
) -> Tensor:  # [M, N]
    return dispatch.multiply(A_packed, B, group_offsets, bias, out_dtype, variant)


def _grouped_gemm_fake(
    A_packed: Tensor, B: Tensor, group_offsets: Tensor, bias: Tensor | None, out_dtype: torch.dtype, variant: str
) -> Tensor:
    return A_packed.new_empty((A_packed.size(0), B.size(-1)), dtype=out_dtype)


def _grouped_gemm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    A_packed, B, group_offsets, bias, _, variant = inputs
    ctx.save_for_backward(_needs(ctx, 1, A_packed), _needs(ctx, 0, B), group_offsets)
    ctx.dtypes = A_packed.dtype, B.dtype, None if bias is None else bias.dtype
    ctx.shared, ctx.transposed, ctx.variant = B.dim() == 2, B.stride(-1) != 1 and B.stride(-2) == 1, variant


def _grouped_gemm_backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    A_packed, B, group_offsets = ctx.saved_tensors
    a_dtype, b_dtype, bias_dtype = ctx.dtypes
    dA = dB = d_bias = None
    if ctx.needs_input_grad[0]:
        dA = grouped_gemm(d_out, B.transpose(-2, -1), group_offsets, None, a_dtype, ctx.variant)
    if ctx.needs_input_grad[1]:
        dB = grouped_gemm_wgrad(A_packed, d_out, group_offsets, ctx.shared, ctx.transposed, b_dtype)
    if ctx.needs_input_grad[3]:
        ones = d_out.new_ones(1, 1).expand(d_out.size(0), 1)
        d_bias = grouped_gemm_wgrad(ones, d_out, group_offsets, False, False, bias_dtype)[:, 0]
    return dA, dB, None, d_bias, None, None


# grouped_gemm_wgrad


def _wgrad(
    A_packed: Tensor,  # [M, K]
    d_out: Tensor,  # [M, N]
    group_offsets: Tensor,  # [G + 1]
    shared: bool,  # one result for all groups
    transposed: bool,  # the result lies in memory as [..., N, K]
    out_dtype: torch.dtype,
) -> Tensor:  # [G, K, N], or [K, N] if `shared`
    if transposed:
        return _wgrad(d_out, A_packed, group_offsets, shared, False, out_dtype).transpose(-2, -1)
    M, K = A_packed.shape
    if shared:
        # One group, of all rows that are in a group.
        group_offsets = torch.stack((group_offsets[0], group_offsets.amax()))
    if not dispatch.use_kernels(A_packed):
        out = reference.grouped_gemm_wgrad(A_packed, d_out, group_offsets, out_dtype=out_dtype)
        return out[0] if shared else out
    out = A_packed.new_empty((group_offsets.size(0) - 1, K, d_out.size(1)), dtype=out_dtype)
    if M == 0:
        out.zero_()
    elif out.numel() > 0:
        from moe_kernels.kernels import grouped_wgrad

        if A_packed.is_cpu:
            # Triton's interpreter multiplies bfloat16 as raw bits and truncates when it stores it.
            result = torch.empty_like(out, dtype=torch.float32)
            grouped_wgrad.launch(_widened(A_packed), _widened(d_out), group_offsets, result)
            out.copy_(result)
        else:
            _on_device(out, grouped_wgrad.launch, A_packed, d_out, group_offsets, out)
    return out[0] if shared else out


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.bfloat16 else x


def _on_device(like: Tensor, launch: Callable[..., None], *args: Any) -> None:
    """`launch(*args)` with the device of `like` as the current one."""
    module = torch.xpu if like.is_xpu else torch.cuda
    if like.is_cpu or like.device.index == module.current_device():
        launch(*args)
    else:
        with module.device(like.device):
            launch(*args)


def _wgrad_fake(
    A_packed: Tensor, d_out: Tensor, group_offsets: Tensor, shared: bool, transposed: bool, out_dtype: torch.dtype
) -> Tensor:
    groups = () if shared else (group_offsets.size(0) - 1,)
    K, N = A_packed.size(1), d_out.size(1)
    if transposed:
        return A_packed.new_empty((*groups, N, K), dtype=out_dtype).transpose(-2, -1)
    return A_packed.new_empty((*groups, K, N), dtype=out_dtype)


def _wgrad_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    A_packed, d_out, group_offsets, _, _, _ = inputs
    ctx.save_for_backward(_needs(ctx, 1, A_packed), _needs(ctx, 0, d_out), group_offsets)
    ctx.dtypes = A_packed.dtype, d_out.dtype


def _wgrad_backward(ctx: Any, dd_B: Tensor) -> tuple[Tensor | None, ...]:
    A_packed, d_out, group_offsets = ctx.saved_tensors
    a_dtype, d_dtype = ctx.dtypes
    dA = dd_out = None
    if ctx.needs_input_grad[0]:
        dA = grouped_gemm(d_out, dd_B.transpose(-2, -1), group_offsets, None, a_dtype, "auto")
    if ctx.needs_input_grad[1]:
        dd_out = grouped_gemm(A_packed, dd_B, group_offsets, None, d_dtype, "auto")
    return dA, dd_out, None, None, None, None


# route


def _route(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    R = topk_ids.numel()
    if R > 2**31 - 1:  # not among the checks, where it would limit what torch.export traces
        raise ValueError(f"topk_ids: expected at most 2**31 - 1 elements, got {R}")
    if dispatch.use_kernels(topk_ids) and R > 0 and num_experts > 0:
        from moe_kernels.kernels import route

        if R <= route.RANK_UP_TO or num_experts <= route.MOST_EXPERTS:
            sizes = (num_experts + 1, R, R)
            group_offsets, row_to_slot, slot_to_row = (topk_ids.new_empty(n, dtype=torch.int32) for n in sizes)
            _on_device(topk_ids, route.launch, topk_ids.reshape(-1), group_offsets, row_to_slot, slot_to_row)
            return group_offsets, row_to_slot, slot_to_row
    return reference.route(topk_ids, torch.empty_like(topk_ids, dtype=torch.float32), num_experts)[:3]


def _route_fake(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    R = topk_ids.numel()
    sizes = (num_experts + 1, R, R)
    first, second, third = (topk_ids.new_empty(size, dtype=torch.int32) for size in sizes)
    return first, second, third


# scatter_rows, combine_rows, dot_rows


def _scatter_rows(
    tokens: Tensor,  # [T, H]
    gates: Tensor | None,  # [T, top_k]
    slot_to_row: Tensor,  # [R]
    group_offsets: Tensor,  # [E + 1]
    top_k: int,
    out_dtype: torch.dtype,
) -> Tensor:  # [R, H]
    if not dispatch.use_kernels(tokens):
        return reference.scatter_rows(tokens, gates, slot_to_row, group_offsets, top_k, out_dtype)
    rows = tokens.new_empty((slot_to_row.size(0), tokens.size(1)), dtype=out_dtype)
    _move("scatter_rows", (rows, tokens, gates), slot_to_row, group_offsets, top_k)
    return rows


def _scatter_rows_fake(
    tokens: Tensor, gates: Tensor | None, slot_to_row: Tensor, group_offsets: Tensor, top_k: int, out_dtype: torch.dtype
) -> Tensor:
    return tokens.new_empty((slot_to_row.size(0), tokens.size(1)), dtype=out_dtype)


def _combine_rows(
    rows: Tensor,  # [R, H]
    gates: Tensor | None,  # [T, top_k]
    slot_to_row: Tensor,  # [R]
    group_offsets: Tensor,  # [E + 1]
    top_k: int,
    out_dtype: torch.dtype,
) -> Tensor:  # [T, H]
    if not dispatch.use_kernels(rows):
        return reference.combine_rows(rows, gates, slot_to_row, group_offsets, top_k, out_dtype)
    tokens = rows.new_empty((slot_to_row.size(0) // top_k, rows.size(1)), dtype=out_dtype)
    _move("combine_rows", (tokens, rows, gates), slot_to_row, group_offsets, top_k)
    return tokens


def _combine_rows_fake(
    rows: Tensor, gates: Tensor | None, slot_to_row: Tensor, group_offsets: Tensor, top_k: int, out_dtype: torch.dtype
) -> Tensor:
    return rows.new_empty((slot_to_row.size(0) // top_k, rows.size(1)), dtype=out_dtype)


def _dot_rows(
    tokens: Tensor,  # [T, H]
    rows: Tensor,  # [R, H]
    slot_to_row: Tensor,  # [R]
    group_offsets: Tensor,  # [E + 1]
    top_k: int,
    out_dtype: torch.dtype,
) -> Tensor:  # [T, top_k]
    if not dispatch.use_kernels(tokens):
        return reference.dot_rows(tokens, rows, slot_to_row, group_offsets, top_k, out_dtype)
    dots = tokens.new_empty((tokens.size(0), top_k), dtype=out_dtype)
    _move("dot_rows", (dots, tokens, rows), slot_to_row, group_offsets, top_k)
    return dots


def _move(
    name: str,
    tensors: tuple[Tensor | None, ...],  # the first is filled
    slot_to_row: Tensor,  # [R]
    group_offsets: Tensor,  # [E + 1]
    top_k: int,
) -> None:
    from moe_kernels.kernels import permute

    out = tensors[0]
    assert out is not None
    if any(t is not None and t.numel() == 0 for t in tensors):
        out.zero_()
        return
    # Triton's interpreter truncates when it stores bfloat16.
    result = torch.empty_like(out, dtype=torch.float32) if out.is_cpu and out.dtype == torch.bfloat16 else out
    _on_device(out, permute.launch, getattr(permute, name), (result, *tensors[1:]), slot_to_row, group_offsets, top_k)
    if result is not out:
        out.copy_(result)


def _dot_rows_fake(
    tokens: Tensor, rows: Tensor, slot_to_row: Tensor, group_offsets: Tensor, top_k: int, out_dtype: torch.dtype
) -> Tensor:
    return tokens.new_empty((tokens.size(0), top_k), dtype=out_dtype)


def _move_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    first, second, slot_to_row, group_offsets, top_k, _ = inputs
    ctx.save_for_backward(_needs(ctx, 1, first), _needs(ctx, 0, second), slot_to_row, group_offsets)
    ctx.top_k = top_k
    ctx.dtypes = first.dtype, None if second is None else second.dtype


def _scatter_rows_backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor | None, ...]:
    tokens, gates, slot_to_row, group_offsets = ctx.saved_tensors
    tokens_dtype, gates_dtype = ctx.dtypes
    d_tokens = d_gates = None
    if ctx.needs_input_grad[0]:
        d_tokens = combine_rows(d_rows, gates, slot_to_row, group_offsets, ctx.top_k, tokens_dtype)
    if ctx.needs_input_grad[1]:
        d_gates = dot_rows(tokens, d_rows, slot_to_row, group_offsets, ctx.top_k, gates_dtype)
    return d_tokens, d_gates, None, None, None, None


def _combine_rows_backward(ctx: Any, d_tokens: Tensor) -> tuple[Tensor | None, ...]:
    rows, gates, slot_to_row, group_offsets = ctx.saved_tensors
    rows_dtype, gates_dtype = ctx.dtypes
    d_rows = d_gates = None
    if ctx.needs_input_grad[0]:
        d_rows = scatter_rows(d_tokens, gates, slot_to_row, group_offsets, ctx.top_k, rows_dtype)
    if ctx.needs_input_grad[1]:
        d_gates = dot_rows(d_tokens, rows, slot_to_row, group_offsets, ctx.top_k, gates_dtype)
    return d_rows, d_gates, None, None, None, None


def _dot_rows_backward(ctx: Any, d_dots: Tensor) -> tuple[Tensor | None, ...]:
    tokens, rows, slot_to_row, group_offsets = ctx.saved_tensors
    tokens_dtype, rows_dtype = ctx.dtypes
    d_tokens = d_rows = None
    if ctx.needs_input_grad[0]:
        d_tokens = combine_rows(rows, d_dots, slot_to_row, group_offsets, ctx.top_k, tokens_dtype)
    if ctx.needs_input_grad[1]:
        d_rows = scatter_rows(tokens, d_dots, slot_to_row, group_offsets, ctx.top_k, rows_dtype)
    return d_tokens, d_rows, None, None, None, None


grouped_gemm = _define(
    "grouped_gemm(Tensor A_packed, Tensor B, Tensor group_offsets, Tensor? bias, ScalarType out_dtype, str variant)"
    " -> Tensor",
    _grouped_gemm,
    _grouped_gemm_fake,
    _grouped_gemm_setup,
    _grouped_gemm_backward,
)
grouped_gemm_wgrad = _define(
    "grouped_gemm_wgrad(Tensor A_packed, Tensor d_out, Tensor group_offsets, bool shared, bool transposed,"
    " ScalarType out_dtype) -> Tensor",
    _wgrad,
    _wgrad_fake,
    _wgrad_setup,
    _wgrad_backward,
)
route = _define("route(Tensor topk_ids, int num_experts) -> (Tensor, Tensor, Tensor)", _route, _route_fake)
_MOVE = "(Tensor {0}, Tensor{1}, Tensor slot_to_row, Tensor group_offsets, int top_k, ScalarType out_dtype) -> Tensor"
scatter_rows = _define(
    "scatter_rows" + _MOVE.format("tokens", "? gates"),
    _scatter_rows,
    _scatter_rows_fake,
    _move_setup,
    _scatter_rows_backward,
)
combine_rows = _define(
    "combine_rows" + _MOVE.format("rows", "? gates"),
    _combine_rows,
    _combine_rows_fake,
    _move_setup,
    _combine_rows_backward,
)
dot_rows = _define(
    "dot_rows" + _MOVE.format("tokens", " rows"), _dot_rows, _dot_rows_fake, _move_setup, _dot_rows_backward
)
