"""Grouped GEMM that is ragged along the contraction: `out[g] = X[rows of g]^T @ Y[rows of g]`.

The gradient of a grouped GEMM's weights. The rows of group g are `group_offsets[g]:group_offsets[g + 1]`, with the
offsets read as clamp(cummax(group_offsets), 0, M). Of a group's last rows both operands are masked, since 0 * NaN is
NaN; a group without rows gives zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import helion
import helion.language as hl
import torch

from moe_kernels import checks, configs
from moe_kernels.configs import wgrad as rules
from moe_kernels.kernels.inline import divide, halve, unmasked
from moe_kernels.kernels.launch import (
    INT32_MAX,
    compile_kernel,
    far_apart,
    kernel,
    plan_and_launch,
    span,
    tf32_allowed,
    tma_readable,
    without_ones,
)
from moe_kernels.plans import Plans, kind


def _preset(X: torch.Tensor, Y: torch.Tensor, group_offsets: torch.Tensor, out: torch.Tensor, *_: Any) -> helion.Config:
    return rules.rule(_problem(X, Y, out, clips=False)).config


@kernel(_preset)
def wgrad(
    X: torch.Tensor,  # [M, P], or `_windows` of it if `tma`
    Y: torch.Tensor,  # [M, Q], or `_windows` of it if `tma`
    group_offsets: torch.Tensor,  # [G + 1]
    out: torch.Tensor,  # [G, P, Q]
    odd_M: int,  # 2 * M + 1
    width: hl.constexpr,  # a power of two, at least G + 1; 0 for offsets that are clamped already
    block_m: hl.constexpr,
    tma: hl.constexpr,  # X and Y are read by TMA, which takes what is past the end of a window for zeros
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
            if tma:
                stop = torch.minimum(row0 + block_m, end)
                rows = row0 + block_m - stop + hl.arange(block_m)
                x = unmasked(hl.load(X, [stop, rows, tile_p]))
                y = unmasked(hl.load(Y, [stop, rows, tile_q]))
            else:
                rows = row0.to(torch.int64) + hl.arange(block_m)
                x = hl.load(X, [rows, tile_p], extra_mask=(rows < end)[:, None])
                y = hl.load(Y, [rows, tile_q], extra_mask=(rows < end)[:, None])
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


def _problem(X: torch.Tensor, Y: torch.Tensor, out: torch.Tensor, clips: bool) -> rules.Problem:
    G, P, Q = out.shape
    M = X.size(0)
    dtype = torch.promote_types(X.dtype, Y.dtype)
    return rules.Problem(
        M=configs.floor_power_of_2(M),
        P=P,
        Q=Q,
        G=G,
        dtype=dtype,
        tf32=tf32_allowed(dtype),
        tma=clips and min(P, Q) >= 16 and tma_readable(X) and tma_readable(Y),
        tma_out=min(P, Q) >= 16 and out.element_size() == 2 and tma_readable(out),
        # M may double before there is a new plan. TMA takes 32-bit coordinates whatever the span.
        wide_rows=2 * max(span(X), span(Y)) > INT32_MAX,
        wide_out=span(out.select(0, 0)) > INT32_MAX,
    )


_plans: Plans[Callable[..., None]] = Plans()


def launch(
    X: torch.Tensor,  # [M, P]
    Y: torch.Tensor,  # [M, Q]
    group_offsets: torch.Tensor,  # [G + 1]
    out: torch.Tensor,  # [G, P, Q]
) -> None:
    """Write the products to `out`. Nothing is checked; M, P, Q and G may not be 0.

    A kernel is compiled once for all that the key names. M is in it by its magnitude alone.
    """
    key = (
        X.size(0).bit_length(),
        X.device,
        out.shape,
        tf32_allowed(torch.promote_types(X.dtype, Y.dtype)),
        *map(kind, (X, Y, group_offsets, out)),
    )
    plan = _plans.get(key)
    if plan is None:
        _plans[key] = plan_and_launch(_plan, X, Y, group_offsets, out)
        return
    plan(X, Y, group_offsets, out)


def _plan(
    X: torch.Tensor,
    Y: torch.Tensor,
    group_offsets: torch.Tensor,
    out: torch.Tensor,
    clips: bool = True,  # TMA may be relied upon to give zeros for what is outside of a tensor
) -> Callable[..., None]:
    problem = _problem(X, Y, out, clips)
    if far_apart(group_offsets):
        problem = replace(problem, tma=False, wide_rows=True)
    choice = rules.rule(problem)
    block_m, tma = choice.block_m, choice.tma
    G = out.size(0)
    width = max(2, 1 << G.bit_length()) if G < rules.MOST_OFFSETS else 0

    def view(rows: torch.Tensor) -> torch.Tensor:
        return _windows(rows, block_m) if tma else rows

    # What the kernel is compiled for. TMA has no use for Helion's limit on the elements of a tensor: show it fewer;
    # nor has `out`, whose groups are told apart in 64 bits.
    like = partial(torch.narrow, dim=0, start=0, length=block_m) if tma else without_ones
    o = without_ones(out if choice.wide else out.narrow(0, 0, min(2, G)))
    args = (without_ones(view(like(X))), without_ones(view(like(Y))), group_offsets, o, 3, width, block_m, tma)
    run = compile_kernel(
        wgrad,
        args,
        choice.config,
        wide=choice.wide,
        tf32=problem.tf32,
        prepare=lambda X, Y, *rest: (view(X), view(Y), *rest),
        clipped={0: block_m, 1: block_m} if tma else {},
    )

    def plan(X: torch.Tensor, Y: torch.Tensor, group_offsets: torch.Tensor, out: torch.Tensor) -> None:
        M = X.size(0)
        if not width:
            group_offsets = checks.clamp_offsets(group_offsets, M)
        run(X, Y, group_offsets, out, 2 * M + 1, width, block_m, tma)

    return plan
