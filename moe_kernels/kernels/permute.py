"""Token order <-> expert order.

    scatter_rows:   rows[slot_to_row[s]] = (topk_weights[s]) * tokens[s // top_k]
    combine_rows:   tokens[t] = sum over t's slots s, in order, of (topk_weights[s]) * rows[slot_to_row[s]]
    dot_rows:       dots[s] = sum over h of tokens[s // top_k, h] * rows[slot_to_row[s], h]

The first two are each other's adjoint; the third is the gradient of the router weights. Each writes an element once,
so nothing is added up by atomics. Slots whose row is at or past `group_offsets[-1]` were dropped: they scatter zeros,
and their rows are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import helion
import helion.language as hl
import torch

from moe_kernels.configs import by_rows
from moe_kernels.kernels.inline import halve
from moe_kernels.kernels.launch import INT32_MAX, compile_kernel, kernel, span, without_ones
from moe_kernels.plans import Plans, kind

_FEW_TOKENS = 128


@kernel(lambda rows, *_: by_rows(rows.size(1)))
def scatter_rows(
    rows: torch.Tensor,  # [R, H], written
    tokens: torch.Tensor,  # [T, H]
    topk_weights: torch.Tensor | None,  # [T, top_k]
    slot_to_row: torch.Tensor,  # [R] int32
    group_offsets: torch.Tensor,  # [E + 1] int32
    programs: int,  # at least T; odd
    odd_T: int,  # 2 * T + 1
    top_k: hl.constexpr,
) -> torch.Tensor:
    """A program per token and block of columns, which are read once and written top_k times."""
    hl.pdl_wait()
    H = rows.size(1)
    E = group_offsets.size(0) - 1
    for tile_t, tile_h in hl.tile([programs, H], block_size=[1, None]):
        zero = hl.zeros([], dtype=torch.int32)
        t = tile_t.id + zero
        if t < halve(odd_T, zero):
            end = group_offsets[E]
            x = tokens[t.to(torch.int64), tile_h]
            for k in hl.static_range(top_k):
                row = slot_to_row[t * top_k + k]
                y = x.to(torch.float32)
                if topk_weights is not None:
                    y = y * topk_weights[t, k].to(torch.float32)
                rows[row.to(torch.int64), tile_h] = torch.where(row < end, y.to(rows.dtype), 0.0)
    return rows


@kernel(lambda tokens, *_: _config(tokens.size(1), tokens.size(0)))
def combine_rows(
    tokens: torch.Tensor,  # [T, H], written
    rows: torch.Tensor,  # [R, H]
    topk_weights: torch.Tensor | None,  # [T, top_k]
    slot_to_row: torch.Tensor,  # [R] int32
    group_offsets: torch.Tensor,  # [E + 1] int32
    programs: int,  # at least T; odd
    odd_T: int,  # 2 * T + 1
    top_k: hl.constexpr,
) -> torch.Tensor:
    """A program per token and block of columns, in which its top_k rows are added up in float32."""
    hl.pdl_wait()
    H = tokens.size(1)
    E = group_offsets.size(0) - 1
    for tile_t, tile_h in hl.tile([programs, H], block_size=[1, None]):
        zero = hl.zeros([], dtype=torch.int32)
        t = tile_t.id + zero
        if t < halve(odd_T, zero):
            end = group_offsets[E]
            acc = hl.zeros([tile_h], dtype=torch.float32)
            for k in hl.static_range(top_k):
                row = slot_to_row[t * top_k + k]
                y = hl.load(rows, [row.to(torch.int64), tile_h], extra_mask=row < end).to(torch.float32)
                if topk_weights is not None:
                    y = torch.where(row < end, y * topk_weights[t, k].to(torch.float32), 0.0)
                acc = acc + y
            tokens[t.to(torch.int64), tile_h] = acc.to(tokens.dtype)
    return tokens


@kernel(lambda dots, tokens, *_: by_rows(tokens.size(1)))
def dot_rows(
    dots: torch.Tensor,  # [T, top_k], written
    tokens: torch.Tensor,  # [T, H]
    rows: torch.Tensor,  # [R, H]
    slot_to_row: torch.Tensor,  # [R] int32
    group_offsets: torch.Tensor,  # [E + 1] int32
    programs: int,  # at least T; odd
    odd_T: int,  # 2 * T + 1
    top_k: hl.constexpr,
) -> torch.Tensor:
    """A program per slot."""
    H = tokens.size(1)
    E = group_offsets.size(0) - 1
    for tile_t, tile_k in hl.tile([programs, top_k], block_size=[1, 1]):
        zero = hl.zeros([], dtype=torch.int32)
        t = tile_t.id + zero
        if t < halve(odd_T, zero):
            row = slot_to_row[t * top_k + tile_k.id]
            dot = hl.zeros([], dtype=torch.float32)
            if row < group_offsets[E]:
                for tile_h in hl.tile(H):
                    x = tokens[t.to(torch.int64), tile_h].to(torch.float32)
                    dot = dot + torch.sum(x * rows[row.to(torch.int64), tile_h].to(torch.float32))
            dots[t, tile_k.id] = dot.to(dots.dtype)
    return dots


def _config(width: int, T: int) -> helion.Config:
    # Few tokens give more programs, of fewer columns each.
    return by_rows(width, most=1024 if T > _FEW_TOKENS else 256)


_plans: Plans[Callable[..., None]] = Plans()


def launch(
    kernel: helion.Kernel[Any],  # one of the three
    tensors: Sequence[torch.Tensor | None],  # its leading arguments
    slot_to_row: torch.Tensor,  # [R] int32, contiguous
    group_offsets: torch.Tensor,  # [E + 1] int32, contiguous
    top_k: int,
) -> Callable[..., None]:
    """Fill the first of `tensors`. Nothing is checked; none of them may be empty.

    The result does it again for other tensors of this kind, given in the same way, with indices as `slot_to_row` and
    `group_offsets`.
    """
    R = slot_to_row.size(0)
    T = R // top_k
    key = (
        kernel.name,
        top_k,
        R.bit_length(),
        T > _FEW_TOKENS,
        group_offsets.size(0),
        slot_to_row.device,
        *(None if t is None else t.size(1) for t in tensors),
        *map(kind, (*tensors, slot_to_row, group_offsets)),
    )
    plan = _plans.get(key)
    if plan is None:
        like = [None if t is None else without_ones(t) for t in tensors]
        H = max(t.size(1) for t in tensors if t is not None)
        config = _config(H, T) if kernel is combine_rows else by_rows(H)
        # R may double before there is a new plan.
        wide = max(2 * span(t) for t in tensors if t is not None) > INT32_MAX
        args = (*like, without_ones(slot_to_row), group_offsets, 3, 3, top_k)
        plan = _plans[key] = _plan(compile_kernel(kernel, args, config, wide=wide), top_k)
    plan(tensors, slot_to_row, group_offsets)
    return plan


def _plan(run: Callable[..., None], top_k: int) -> Callable[..., None]:
    def plan(tensors: Sequence[torch.Tensor | None], slot_to_row: torch.Tensor, group_offsets: torch.Tensor) -> None:
        T = slot_to_row.size(0) // top_k
        run(*tensors, slot_to_row, group_offsets, T | 1, 2 * T + 1, top_k)

    return plan
