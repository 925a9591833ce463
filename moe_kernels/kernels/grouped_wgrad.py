"""Grouped GEMM that is ragged along the contraction: `out[g] = X[rows of g]^T @ Y[rows of g]`.

The gradient of a grouped GEMM's weights. The rows of group g are `group_offsets[g]:group_offsets[g + 1]`, with the
offsets read as clamp(cummax(group_offsets), 0, M). Of a group's last rows both operands are masked, since 0 * NaN is
NaN; a group without rows gives zeros.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import helion.language as hl
import torch

from moe_kernels import rules
from moe_kernels.kernels.declare import kernel, left_operand, tma_readable
from moe_kernels.kernels.inline import decode_odd, divide, unmasked
from moe_kernels.rules import wgrad as wgrad_rules
from moe_kernels.rules.config import Config
from moe_kernels.runtime.plan import Builder
from moe_kernels.runtime.symbolic import SymbolicTensor, least, most, needs_int64


def _preset(X: torch.Tensor, Y: torch.Tensor, group_offsets: torch.Tensor, out: torch.Tensor, *_: Any) -> Config:
    (G, P, Q), dtype = out.shape, torch.promote_types(X.dtype, Y.dtype)
    by_pointers = dict(tf32=rules.tf32_allowed(dtype), tma=False, tma_out=False, int64_rows=False, int64_out=False)
    problem = wgrad_rules.Problem(rules.floor_power_of_2(X.size(0)), P, Q, G, dtype, **by_pointers)
    return wgrad_rules.rule(problem).config


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
            offsets = torch.minimum(offsets.to(torch.int64), decode_odd(odd_M, zero).to(torch.int64)).to(torch.int32)
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


def _windows(rows: SymbolicTensor, block_m: int) -> SymbolicTensor:
    """`[M, N]` as `[M + 1, block_m, N]`, where `[m]` is the window of `block_m` rows that ends before row m.

    TMA clips each coordinate by itself: reading from further down in the window that ends where a group does gives
    zeros for what comes after. The windows of the first rows begin before `rows`.
    """
    row, column = rows.strides
    view = rows.as_strided((rows.size(0) + 1, block_m, rows.size(1)), (row, row, column), -block_m * row)
    return replace(view, tma_clipped=True)


def plan_grouped_gemm_wgrad(
    builder: Builder, tensors: tuple[SymbolicTensor | None, ...], options: tuple[torch.dtype]
) -> SymbolicTensor:
    """Plan the result `[G, P, Q]` from X `[M, P]`, Y `[M, Q]` and group_offsets `[G + 1]`."""
    X, Y, group_offsets = tensors
    assert X is not None and Y is not None and group_offsets is not None
    (dtype,) = options
    out = builder.alloc((group_offsets.size(0) - 1, X.size(1), Y.size(1)), dtype)
    if 0 in out.shape:
        return out
    if most(X.size(0)) == 0:
        builder.zero(out)
        return out
    X = left_operand(builder, X, Y.dtype)
    M, G = X.size(0), out.size(0)
    problem = _problem(builder, X, Y, out)
    if needs_int64(group_offsets):
        problem = replace(problem, tma=False, int64_rows=True)
    choice = wgrad_rules.rule(problem)
    block_m, tma = choice.block_m, choice.tma
    width = max(2, 1 << G.bit_length()) if G < wgrad_rules.MOST_OFFSETS else 0
    if not width:
        shape = group_offsets.shape, group_offsets.dtype
        group_offsets = builder.call("clamp_offsets", (group_offsets, X), shape)
    if tma:
        X, Y = _windows(X, block_m), _windows(Y, block_m)
    # Groups of the result are told apart in 64 bits.
    arguments = (X, Y, group_offsets, replace(out, few_groups=True), M * 2 + 1, width, block_m, tma)
    builder.launch(wgrad, arguments, choice.config, int64_index=choice.int64_index, tf32=problem.tf32)
    return out


def _problem(builder: Builder, X: SymbolicTensor, Y: SymbolicTensor, out: SymbolicTensor) -> wgrad_rules.Problem:
    (G, P, Q), gpu = out.shape, builder.gpu
    dtype = torch.promote_types(X.dtype, Y.dtype)
    return wgrad_rules.Problem(
        M=rules.floor_power_of_2(least(X.size(0))),
        P=P,
        Q=Q,
        G=G,
        dtype=dtype,
        tf32=rules.tf32_allowed(dtype),
        tma=min(P, Q) >= 16 and tma_readable(gpu, X) and tma_readable(gpu, Y),
        tma_out=min(P, Q) >= 16 and out.element_size() == 2 and tma_readable(gpu, out),
        # TMA takes 32-bit coordinates whatever the extent.
        int64_rows=needs_int64(X, Y),
        int64_out=needs_int64(out.select(0, 0)),
    )
