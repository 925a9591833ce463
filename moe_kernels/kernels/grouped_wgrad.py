"""Grouped GEMM that is ragged along the contraction: `out[g] = X[rows of g]^T @ Y[rows of g]`.

The gradient of a grouped GEMM's weights. The rows of group g are `group_offsets[g]:group_offsets[g + 1]`, with the
offsets read as clamp(cummax(group_offsets), 0, M). Of a group's last rows both operands are masked, since 0 * NaN is
NaN; a group without rows gives zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import helion
import helion.language as hl
import torch

from moe_kernels import checks
from moe_kernels.configs import wgrad as configs
from moe_kernels.kernels.inline import divide, halve, unmasked
from moe_kernels.kernels.launch import (
    INT32_MAX,
    compile_kernel,
    kernel,
    plan_and_launch,
    span,
    tf32_allowed,
    tma_readable,
    without_ones,
)
from moe_kernels.plans import Plans


def _preset(
    X: torch.Tensor,
    Y: torch.Tensor,
    group_offsets: torch.Tensor,
    row_to_slot: torch.Tensor | None,
    out: torch.Tensor,
    *rest: Any,
) -> helion.Config:
    return configs.rule(_problem(X, Y, out, X.size(0), rest[-2], clips=False)).config


@kernel(_preset)
def wgrad(
    X: torch.Tensor,  # [M, P], or `_windows` of it if `tma_X`; [T, P] if `gathered` is 0
    Y: torch.Tensor,  # [M, Q], or `_windows` of it if `tma_Y`; [T, Q] if `gathered` is 1
    group_offsets: torch.Tensor,  # [G + 1]
    row_to_slot: torch.Tensor | None,  # [M] int32
    out: torch.Tensor,  # [G, P, Q]
    odd_M: int,  # 2 * M + 1
    width: hl.constexpr,  # a power of two, at least G + 1; 0 for offsets that are clamped already
    block_m: hl.constexpr,
    tma_X: hl.constexpr,  # X is read by TMA, which takes what is past the end of a window for zeros
    tma_Y: hl.constexpr,
    gathered: hl.constexpr,  # which operand is tokens, row r being that of token row_to_slot[r] // top_k; -1 for none
    top_k: hl.constexpr,
) -> torch.Tensor:
    """Over the tiles of all groups; each program walks its group's rows."""
    G, P, Q = out.size()
    dtype = torch.promote_types(X.dtype, Y.dtype)
    for tile_q, tile_p, tile_g in hl.tile([Q, P, G], block_size=[None, None, 1]):
        zero = hl.zeros([], dtype=torch.int32)
        g = tile_g.id + zero
        if width:
            index = hl.arange(width)
            offsets = torch.clamp(hl.load(group_offsets, [index], extra_mask=index <= G), min=0)
            offsets = torch.minimum(offsets.to(torch.int64), halve(odd_M, zero).to(torch.int64)).to(torch.int32)
            start = torch.amax(torch.where(index <= g, offsets, 0))
            end = torch.amax(torch.where(index <= g + 1, offsets, 0))
        else:
            start = group_offsets[g].to(torch.int32)
            end = group_offsets[g + 1].to(torch.int32)
        acc = hl.zeros([tile_p, tile_q], dtype=torch.float32)
        for step in hl.tile(divide(end - start + (block_m - 1), block_m), block_size=1):
            row0 = start + step.id * block_m
            stop = torch.minimum(row0 + block_m, end)
            window = row0 + block_m - stop + hl.arange(block_m)
            rows = row0.to(torch.int64) + hl.arange(block_m)
            inside = rows < end
            source = rows
            if row_to_slot is not None:
                source = divide(hl.load(row_to_slot, [rows], extra_mask=inside), top_k)
            if tma_X:
                x = unmasked(hl.load(X, [stop, window, tile_p]))
            elif gathered == 0:
                x = hl.load(X, [source, tile_p], extra_mask=inside[:, None])
            else:
                x = hl.load(X, [rows, tile_p], extra_mask=inside[:, None])
            if tma_Y:
                y = unmasked(hl.load(Y, [stop, window, tile_q]))
            elif gathered == 1:
                y = hl.load(Y, [source, tile_q], extra_mask=inside[:, None])
            else:
                y = hl.load(Y, [rows, tile_q], extra_mask=inside[:, None])
            acc = hl.dot(x.to(dtype).T, y.to(dtype), acc=acc)
        out[g.to(torch.int64), tile_p, tile_q] = acc.to(out.dtype)
    return out


def _windows(rows: torch.Tensor, block_m: int) -> torch.Tensor:
    """`[M, N]` as `[M, block_m, N]`, where `[m]` is the window of `block_m` rows that ends before row m.

    TMA clips each coordinate by itself: reading from further down in the window that ends where a group does gives
    zeros for what comes after. The windows of the first rows begin before `rows`, where no tensor can. So this view
    only has the shape and strides, and a direct launch moves the descriptor `block_m` rows back.
    """
    row, column = rows.stride()
    return rows.as_strided((rows.size(0) - block_m + 1, block_m, rows.size(1)), (row, row, column))


def _problem(
    X: torch.Tensor, Y: torch.Tensor, out: torch.Tensor, M: int, gathered: int, clips: bool
) -> configs.Problem:
    G, P, Q = out.shape
    dtype = torch.promote_types(X.dtype, Y.dtype)
    return configs.Problem(
        M=configs.floor_power_of_2(M),
        P=P,
        Q=Q,
        G=G,
        dtype=dtype,
        tf32=tf32_allowed(dtype),
        tma=clips and min(P, Q) >= 16 and all(tma_readable(x) for i, x in enumerate((X, Y)) if i != gathered),
        gathered=gathered,
        tma_out=min(P, Q) >= 16 and out.element_size() == 2 and tma_readable(out),
        # M may double before there is a new plan. TMA takes 32-bit coordinates whatever the span.
        wide_rows=2 * max(span(X), span(Y)) > INT32_MAX,
        wide_tokens=gathered >= 0 and 2 * span((X, Y)[gathered]) > INT32_MAX,
        wide_out=span(out.select(0, 0)) > INT32_MAX,
    )


_plans: Plans[Callable[..., None]] = Plans()


def launch(
    X: torch.Tensor,  # [M, P]
    Y: torch.Tensor,  # [M, Q]
    group_offsets: torch.Tensor,  # [G + 1]
    out: torch.Tensor,  # [G, P, Q]
    *,
    row_to_slot: torch.Tensor | None = None,  # [M] int32
    gathered: int = -1,  # 0 or 1 with row_to_slot: X, or Y, has a row of each token, [T, P] or [T, Q]
    top_k: int = 1,  # slots of a token
) -> None:
    """Write the products to `out`. Nothing is checked; M, P, Q and G may not be 0.

    A kernel is compiled once for all that the key names. M is in it by its magnitude alone.
    """
    M = X.size(0) if row_to_slot is None else row_to_slot.size(0)
    key = (
        M.bit_length(),
        X.dtype,
        X.stride(),
        X.data_ptr() % 16,
        X.device,
        Y.dtype,
        Y.stride(),
        Y.data_ptr() % 16,
        group_offsets.dtype,
        group_offsets.stride(),
        group_offsets.data_ptr() % 16,
        out.dtype,
        out.shape,
        out.stride(),
        out.data_ptr() % 16,
        row_to_slot is not None and (gathered, top_k, row_to_slot.data_ptr() % 16),
        (X.dtype == torch.float32 or Y.dtype == torch.float32) and tf32_allowed(torch.float32),
    )
    tensors = (X, Y, group_offsets, row_to_slot, out)
    plan = _plans.get(key)
    if plan is None:
        _plans[key] = plan_and_launch(partial(_plan, gathered=gathered, top_k=top_k), *tensors)
        return
    plan(*tensors)


def _plan(
    X: torch.Tensor,
    Y: torch.Tensor,
    group_offsets: torch.Tensor,
    row_to_slot: torch.Tensor | None,
    out: torch.Tensor,
    gathered: int = -1,
    top_k: int = 1,
    clips: bool = True,  # TMA may be relied upon to give zeros for what is outside of a tensor
) -> Callable[..., None]:
    M = X.size(0) if row_to_slot is None else row_to_slot.size(0)
    choice = configs.rule(_problem(X, Y, out, M, gathered, clips))
    block_m, tma_X, tma_Y = choice.block_m, choice.tma_X, choice.tma_Y
    G = out.size(0)
    width = max(2, 1 << G.bit_length()) if G < configs.MOST_OFFSETS else 0

    def view(rows: torch.Tensor, tma: bool) -> torch.Tensor:
        return _windows(rows, block_m) if tma else rows

    def like(rows: torch.Tensor, tma: bool) -> torch.Tensor:
        # TMA has no use for Helion's limit on the elements of a tensor: show it fewer.
        return without_ones(view(rows.narrow(0, 0, block_m), True) if tma else rows)

    # Nor has `out`, whose groups are told apart in 64 bits.
    o = without_ones(out if choice.wide else out.narrow(0, 0, min(2, G)))
    to = None if row_to_slot is None else without_ones(row_to_slot)
    settled = (width, block_m, tma_X, tma_Y, gathered, top_k)
    run = compile_kernel(
        wgrad,
        (like(X, tma_X), like(Y, tma_Y), group_offsets, to, o, 3, *settled),
        choice.config,
        wide=choice.wide,
        tf32=tf32_allowed(torch.promote_types(X.dtype, Y.dtype)),
        prepare=lambda X, Y, *rest: (view(X, tma_X), view(Y, tma_Y), *rest),
        clipped={i: block_m for i, tma in enumerate((tma_X, tma_Y)) if tma},
    )

    def plan(
        X: torch.Tensor,
        Y: torch.Tensor,
        group_offsets: torch.Tensor,
        row_to_slot: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        M = X.size(0) if row_to_slot is None else row_to_slot.size(0)
        if not width:
            group_offsets = checks.clamp_offsets(group_offsets, M)
        run(X, Y, group_offsets, row_to_slot, out, 2 * M + 1, *settled)

    return plan
