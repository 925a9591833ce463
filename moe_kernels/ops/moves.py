"""route, scatter_rows, combine_rows and dot_rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_kernels import reference
from moe_kernels.ops.library import check_rows, define, save_operands, use_kernels
from moe_kernels.rules.layer import sorts
from moe_kernels.runtime import cache, torch_internals
from moe_kernels.runtime.signature import Counts, Operator

ROUTE = Operator(
    "route",
    planner="moe_kernels.kernels.route",
    inputs=("topk_ids",),
    rows=("topk_ids",),
    counts=lambda tensors, _: Counts(tensors[0].size(0), (tensors[0].numel(),)),
)


def _move_operator(name: str, tokens: bool, *inputs: str) -> Operator:
    """Operator of a kernel that moves rows; `tokens` says that its first input has T rows rather than R."""

    def counts(tensors: Any, options: Any) -> Counts:
        R, top_k = tensors[2].size(0), options[0]
        return Counts(R // top_k, (R,)) if tokens else Counts(R, (R // top_k,))

    indices = ("slot_to_row", "group_offsets")
    return Operator(name, "moe_kernels.kernels.permute", (*inputs, *indices), (*inputs, "slot_to_row"), counts)


SCATTER_ROWS = _move_operator("scatter_rows", True, "tokens", "topk_weights")
COMBINE_ROWS = _move_operator("combine_rows", False, "rows", "topk_weights")
DOT_ROWS = _move_operator("dot_rows", True, "tokens", "rows")


def _route(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    R = topk_ids.numel()
    check_rows("topk_ids", R)  # not in `checks`, where it would limit the shapes that torch.export traces
    if use_kernels(topk_ids) and sorts(R, num_experts):
        return cache.call(ROUTE, (topk_ids,), (num_experts,))
    return reference.route(topk_ids, torch.empty_like(topk_ids, dtype=torch.float32), num_experts)[:3]


def route_fake(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    R = topk_ids.numel()
    sizes = (num_experts + 1, R, R)
    first, second, third = (topk_ids.new_empty(size, dtype=torch.int32) for size in sizes)
    return first, second, third


def _mover(operator: Operator, twin: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function that runs an operator: its kernel, or `twin` in `reference`, which documents the inputs."""

    def run(
        first: Tensor,  # [T, H] or [R, H]
        second: Tensor | None,
        slot_to_row: Tensor,  # [R]
        group_offsets: Tensor,  # [E + 1]
        top_k: int,
        out_dtype: torch.dtype,
    ) -> Tensor:
        if not use_kernels(first):
            return twin(first, second, slot_to_row, group_offsets, top_k, out_dtype)
        tensors = first, second, slot_to_row.contiguous(), group_offsets.contiguous()
        return cache.call(operator, tensors, (top_k, out_dtype))

    return run


def _move_fake(shape: Callable[[Tensor, int, int], tuple[int, int]]) -> Callable[..., Tensor]:
    """Return a fake whose result has the shape `shape(first, R, top_k)`."""

    def fake(first: Tensor, *others: Any) -> Tensor:
        _, slot_to_row, _, top_k, out_dtype = others
        return first.new_empty(shape(first, slot_to_row.size(0), top_k), dtype=out_dtype)

    return fake


def _move_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.top_k, _ = inputs
    save_operands(ctx, *tensors)


def _move_backward(of_first: Callable[..., Tensor], of_second: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return a gradient: `of_first(d, second, ..)` and `of_second(d, first, ..)`, where d is the result's gradient."""

    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        first, second, *indices = ctx.saved_tensors
        to = (*indices, ctx.top_k)
        need_first, need_second, *_ = torch_internals.asked_gradients(ctx)
        d_first = of_first(d, second, *to, ctx.dtypes[0]) if need_first else None
        d_second = of_second(d, first, *to, ctx.dtypes[1]) if need_second else None
        return d_first, d_second, None, None, None, None

    return backward


route = define(_route, route_fake)
_MOVE = "(Tensor {0}, Tensor{1}, Tensor slot_to_row, Tensor group_offsets, int top_k, ScalarType out_dtype) -> Tensor"
scatter_rows: Callable[..., Any] = define(
    _mover(SCATTER_ROWS, reference.scatter_rows),
    _move_fake(lambda tokens, R, top_k: (R, tokens.size(1))),
    _move_setup,
    _move_backward(lambda d, w, *to: combine_rows(d, w, *to), lambda d, x, *to: dot_rows(x, d, *to)),
    schema="scatter_rows" + _MOVE.format("tokens", "? topk_weights"),
)
combine_rows: Callable[..., Any] = define(
    _mover(COMBINE_ROWS, reference.combine_rows),
    _move_fake(lambda rows, R, top_k: (R // top_k, rows.size(1))),
    _move_setup,
    _move_backward(lambda d, w, *to: scatter_rows(d, w, *to), lambda d, y, *to: dot_rows(d, y, *to)),
    schema="combine_rows" + _MOVE.format("rows", "? topk_weights"),
)
dot_rows: Callable[..., Any] = define(
    _mover(DOT_ROWS, reference.dot_rows),
    _move_fake(lambda tokens, _, top_k: (tokens.size(0), top_k)),
    _move_setup,
    _move_backward(lambda d, y, *to: combine_rows(y, d, *to), lambda d, x, *to: scatter_rows(x, d, *to)),
    schema="dot_rows" + _MOVE.format("tokens", " rows"),
)
