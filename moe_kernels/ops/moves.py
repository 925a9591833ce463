"""route, scatter_rows, combine_rows and dot_rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_kernels import dispatch, reference
from moe_kernels.allocate import empty
from moe_kernels.ops.library import define, needs


def _route(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    R = topk_ids.numel()
    if R > dispatch.MOST_ROWS:  # not among the checks, where it would limit what torch.export traces
        raise ValueError(f"topk_ids: expected at most {dispatch.MOST_ROWS} elements, got {R}")
    if dispatch.use_kernels(topk_ids) and R > 0 and num_experts > 0:
        from moe_kernels.kernels import route

        if route.sorts(R, num_experts):
            sizes = (num_experts + 1, R, R)
            group_offsets, row_to_slot, slot_to_row = (empty((n,), torch.int32, topk_ids) for n in sizes)
            slots = topk_ids.reshape(-1).contiguous()
            dispatch.on_device(topk_ids, route.launch, slots, group_offsets, row_to_slot, slot_to_row)
            return group_offsets, row_to_slot, slot_to_row
    return reference.route(topk_ids, torch.empty_like(topk_ids, dtype=torch.float32), num_experts)[:3]


def _route_fake(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    R = topk_ids.numel()
    sizes = (num_experts + 1, R, R)
    first, second, third = (topk_ids.new_empty(size, dtype=torch.int32) for size in sizes)
    return first, second, third


def _scatter_rows(
    tokens: Tensor,  # [T, H]
    topk_weights: Tensor | None,  # [T, top_k]
    slot_to_row: Tensor,  # [R]
    group_offsets: Tensor,  # [E + 1]
    top_k: int,
    out_dtype: torch.dtype,
) -> Tensor:  # [R, H]
    if not dispatch.use_kernels(tokens):
        return reference.scatter_rows(tokens, topk_weights, slot_to_row, group_offsets, top_k, out_dtype)
    rows = empty((slot_to_row.size(0), tokens.size(1)), out_dtype, tokens)
    _move("scatter_rows", (rows, tokens, topk_weights), slot_to_row, group_offsets, top_k)
    return rows


def _scatter_rows_fake(
    tokens: Tensor,
    topk_weights: Tensor | None,
    slot_to_row: Tensor,
    group_offsets: Tensor,
    top_k: int,
    out_dtype: torch.dtype,
) -> Tensor:
    return tokens.new_empty((slot_to_row.size(0), tokens.size(1)), dtype=out_dtype)


def _combine_rows(
    rows: Tensor,  # [R, H]
    topk_weights: Tensor | None,  # [T, top_k]
    slot_to_row: Tensor,  # [R]
    group_offsets: Tensor,  # [E + 1]
    top_k: int,
    out_dtype: torch.dtype,
) -> Tensor:  # [T, H]
    if not dispatch.use_kernels(rows):
        return reference.combine_rows(rows, topk_weights, slot_to_row, group_offsets, top_k, out_dtype)
    tokens = empty((slot_to_row.size(0) // top_k, rows.size(1)), out_dtype, rows)
    _move("combine_rows", (tokens, rows, topk_weights), slot_to_row, group_offsets, top_k)
    return tokens


def _combine_rows_fake(
    rows: Tensor,
    topk_weights: Tensor | None,
    slot_to_row: Tensor,
    group_offsets: Tensor,
    top_k: int,
    out_dtype: torch.dtype,
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
    dots = empty((tokens.size(0), top_k), out_dtype, tokens)
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
    indices = slot_to_row.contiguous(), group_offsets.contiguous()
    dispatch.on_device(out, permute.launch, getattr(permute, name), tensors, *indices, top_k)


def _dot_rows_fake(
    tokens: Tensor, rows: Tensor, slot_to_row: Tensor, group_offsets: Tensor, top_k: int, out_dtype: torch.dtype
) -> Tensor:
    return tokens.new_empty((tokens.size(0), top_k), dtype=out_dtype)


def _move_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    first, second, slot_to_row, group_offsets, top_k, _ = inputs
    ctx.save_for_backward(needs(ctx, 1, first), needs(ctx, 0, second), slot_to_row, group_offsets)
    ctx.top_k = top_k
    ctx.dtypes = first.dtype, None if second is None else second.dtype


def _scatter_rows_backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor | None, ...]:
    tokens, topk_weights, slot_to_row, group_offsets = ctx.saved_tensors
    tokens_dtype, weights_dtype = ctx.dtypes
    d_tokens = d_topk_weights = None
    if ctx.needs_input_grad[0]:
        d_tokens = combine_rows(d_rows, topk_weights, slot_to_row, group_offsets, ctx.top_k, tokens_dtype)
    if ctx.needs_input_grad[1]:
        d_topk_weights = dot_rows(tokens, d_rows, slot_to_row, group_offsets, ctx.top_k, weights_dtype)
    return d_tokens, d_topk_weights, None, None, None, None


def _combine_rows_backward(ctx: Any, d_tokens: Tensor) -> tuple[Tensor | None, ...]:
    rows, topk_weights, slot_to_row, group_offsets = ctx.saved_tensors
    rows_dtype, weights_dtype = ctx.dtypes
    d_rows = d_topk_weights = None
    if ctx.needs_input_grad[0]:
        d_rows = scatter_rows(d_tokens, topk_weights, slot_to_row, group_offsets, ctx.top_k, rows_dtype)
    if ctx.needs_input_grad[1]:
        d_topk_weights = dot_rows(d_tokens, rows, slot_to_row, group_offsets, ctx.top_k, weights_dtype)
    return d_rows, d_topk_weights, None, None, None, None


def _dot_rows_backward(ctx: Any, d_dots: Tensor) -> tuple[Tensor | None, ...]:
    tokens, rows, slot_to_row, group_offsets = ctx.saved_tensors
    tokens_dtype, rows_dtype = ctx.dtypes
    d_tokens = d_rows = None
    if ctx.needs_input_grad[0]:
        d_tokens = combine_rows(rows, d_dots, slot_to_row, group_offsets, ctx.top_k, tokens_dtype)
    if ctx.needs_input_grad[1]:
        d_rows = scatter_rows(tokens, d_dots, slot_to_row, group_offsets, ctx.top_k, rows_dtype)
    return d_tokens, d_rows, None, None, None, None


route = define("route(Tensor topk_ids, int num_experts) -> (Tensor, Tensor, Tensor)", _route, _route_fake)
_MOVE = "(Tensor {0}, Tensor{1}, Tensor slot_to_row, Tensor group_offsets, int top_k, ScalarType out_dtype) -> Tensor"
scatter_rows = define(
    "scatter_rows" + _MOVE.format("tokens", "? topk_weights"),
    _scatter_rows,
    _scatter_rows_fake,
    _move_setup,
    _scatter_rows_backward,
)
combine_rows = define(
    "combine_rows" + _MOVE.format("rows", "? topk_weights"),
    _combine_rows,
    _combine_rows_fake,
    _move_setup,
    _combine_rows_backward,
)
dot_rows = define(
    "dot_rows" + _MOVE.format("tokens", " rows"), _dot_rows, _dot_rows_fake, _move_setup, _dot_rows_backward
)
