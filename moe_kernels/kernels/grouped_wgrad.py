"""Grouped GEMM that is ragged along the contraction: `out[g] = X[rows of g]^T @ Y[rows of g]`.

This is the gradient of a grouped GEMM's weights. The rows of group g are `group_offsets[g]:group_offsets[g + 1]`, with
the offsets read as clamp(cummax(group_offsets), 0, M). Both operands are masked past the end of a group, since 0 * NaN
is NaN; an empty group gives zeros.

A tile of the result takes cdiv(rows of its group, block_m) steps. Nested loops over tiles and steps wait for loads
whenever a tile begins, and Triton does not flatten them if the number of steps varies. So `wgrad_persistent` has one
loop over the steps of all tiles of a worker, and loads for the next tile while it multiplies for the current one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import helion.language as hl
import torch

from moe_kernels import rules
from moe_kernels.kernels.declare import kernel, left_operand, tma_readable, whole_blocks, written_without_kernel
from moe_kernels.kernels.inline import bounds_of, clamped, divide, int32, running_max, unmasked
from moe_kernels.kernels.row_major import row_major
from moe_kernels.rules import wgrad as wgrad_rules
from moe_kernels.runtime.plan import Builder, Operands
from moe_kernels.runtime.symbolic import SymbolicTensor, least, most, needs_int64


@kernel()
def wgrad(
    X: torch.Tensor,  # [M, P], or its `_windows` if `tma`
    Y: torch.Tensor,  # [M, Q], or its `_windows` if `tma`
    group_offsets: torch.Tensor,  # [G + 1]
    out: torch.Tensor,  # [G, P, Q]
    num_rows: int,  # M
    width: hl.constexpr,  # a power of two, at least G + 1; 0 for offsets that are already clamped and in order
    block_m: hl.constexpr,
    tma: hl.constexpr,  # X and Y are read by TMA, which returns zeros in front of a window
) -> torch.Tensor:
    """Grid over the tiles of all groups, with a loop over the rows of a tile's group."""
    G, P, Q = out.size()
    dtype = torch.promote_types(X.dtype, Y.dtype)
    for tile_q, tile_p, tile_g in hl.tile([Q, P, G], block_size=[None, None, 1]):
        zero = hl.zeros([], dtype=torch.int32)
        g = tile_g.id + zero
        start, end = bounds_of(group_offsets, g, int32(num_rows, zero), width)
        acc = hl.zeros([tile_p, tile_q], dtype=torch.float32)
        for step in hl.tile(divide(end - start + (block_m - 1), block_m), block_size=1):
            row0 = start + step.id * block_m
            if tma:
                rows = torch.clamp(end - row0 - block_m, max=0) + hl.arange(block_m)
                x = unmasked(hl.load(X, [row0, rows, tile_p]))
                y = unmasked(hl.load(Y, [row0, rows, tile_q]))
            else:
                rows = row0.to(torch.int64) + hl.arange(block_m)
                x = hl.load(X, [rows, tile_p], extra_mask=(rows < end)[:, None])
                y = hl.load(Y, [rows, tile_q], extra_mask=(rows < end)[:, None])
            acc = hl.dot(x.to(dtype).T, y.to(dtype), acc=acc)
        out[g.to(torch.int64), tile_p, tile_q] = acc.to(out.dtype)
    return out


@kernel(static_shapes=True)
def wgrad_persistent(
    X: torch.Tensor,  # [M, P / 128, 128]; X and Y are `_windows` if `tma`
    Y: torch.Tensor,  # [M, Q / 256, 256]
    group_offsets: torch.Tensor,  # [G + 1] int32, from `order_offsets`
    out: torch.Tensor,  # [G, P / 128, 128, Q / 128, 128]
    G: hl.constexpr,
    block_m: hl.constexpr,
    group_p: hl.constexpr,  # tiles of a column that precede the next column; a divisor of P / 128
    workers: hl.constexpr,
    tma: hl.constexpr,
) -> torch.Tensor:
    """Worker w goes through the steps of tiles w, w + workers, ..., which are numbered group by group."""
    columns = Y.size(1)
    per_group = out.size(1) * columns
    hl.pdl_wait()
    for tile_w in hl.tile(workers, block_size=1):
        tile = int32(tile_w.id, hl.zeros([], dtype=torch.int32))
        steps = hl.zeros([], dtype=torch.int32)
        for tile_g in hl.tile(G):
            g = tile_g.index
            there = g < G
            rows = hl.load(group_offsets, [g + 1], extra_mask=there) - hl.load(group_offsets, [g], extra_mask=there)
            # A tile of an empty group takes one step, with no rows.
            each = torch.where(there, torch.clamp(divide(rows + (block_m - 1), block_m), min=1), 0)
            first = g * per_group - 1 - tile + workers
            tiles = divide(first + per_group, workers) - divide(first, workers)
            steps = steps + torch.sum(each * tiles, dtype=torch.int32)
        group, p, q = _place(tile, G, per_group, columns, group_p)
        row0 = group_offsets[group]
        end = group_offsets[group + 1]
        acc = hl.zeros([128, 256], dtype=torch.float32)
        for step in hl.tile(steps, block_size=1):  # noqa: B007
            if tma:
                inside = torch.clamp(end - row0 - block_m, max=0) + hl.arange(block_m)
                x = unmasked(hl.load(X, [row0, p, inside, slice(None)]))
                y = unmasked(hl.load(Y, [row0, q, inside, slice(None)]))
            else:
                rows = row0.to(torch.int64) + hl.arange(block_m)
                x = hl.load(X, [rows, p, slice(None)], extra_mask=(rows < end)[:, None])
                y = hl.load(Y, [rows, q, slice(None)], extra_mask=(rows < end)[:, None])
            row0 = row0 + block_m
            last = row0 >= end
            acc = hl.dot(x.T, y, acc=acc)
            if last:  # store in halves, which leaves shared memory for four stages of loads
                left, right = hl.split(acc.to(out.dtype).reshape(128, 2, 128).permute(0, 2, 1))
                hl.store(out, [group.to(torch.int64), p, slice(None), 2 * q, slice(None)], left)
                hl.store(out, [group.to(torch.int64), p, slice(None), 2 * q + 1, slice(None)], right)
                acc = hl.zeros([128, 256], dtype=torch.float32)  # compiles to: the next product overwrites acc
            tile = torch.where(last, tile + workers, tile)
            group, p, q = _place(tile, G, per_group, columns, group_p)
            row0 = torch.where(last, hl.load(group_offsets, [group], extra_mask=last), row0)
            end = torch.where(last, hl.load(group_offsets, [group + 1], extra_mask=last), end)
    return out


def _place(tile: torch.Tensor, G: int, per_group: int, columns: int, group_p: int) -> tuple[torch.Tensor, ...]:
    """Return the group, row and column of `tile`; past the last tile, the group stays in bounds of `group_offsets`."""
    group = torch.clamp(divide(tile, per_group), max=G - 1)
    local = tile - group * per_group
    block = divide(local, group_p * columns)
    local = local - block * (group_p * columns)
    q = divide(local, group_p)
    return group, block * group_p + local - q * group_p, q


@kernel()
def order_offsets(
    group_offsets: torch.Tensor,  # [G + 1]
    ordered: torch.Tensor,  # [G + 1] int32
    num_rows: int,  # M
) -> torch.Tensor:
    """Write clamp(cummax(group_offsets), 0, M) to `ordered`."""
    hl.pdl_launch_dependents()
    hl.pdl_wait()
    for _ in hl.grid(1):
        previous = hl.zeros([], dtype=torch.int32)
        M = int32(num_rows, previous)
        for tile_g in hl.tile(group_offsets.size(0)):
            offsets = running_max(clamped(group_offsets, tile_g.index, M), previous)
            ordered[tile_g] = offsets
            previous = torch.amax(offsets)
    return ordered


def _windows(rows: SymbolicTensor, block_m: int) -> SymbolicTensor:
    """Return `rows [M, N]` as `[M, block_m, N]`; `[m]` is the window of `block_m` rows that begins with row m.

    `[M, n, N / n]` becomes `[M, n, block_m, N / n]`. TMA clips each coordinate separately: the last rows of a
    group, if fewer than `block_m`, are read by a box that begins before the window of the first of them, so zeros
    precede these rows. The windows of the last rows end after `rows`. None may begin before `rows`, because the
    hardware reads the start of a window if a box is entirely outside of it in any dimension.
    """
    M, *inner = rows.shape
    row, *strides = rows.strides
    window, steps = [*inner[:-1], block_m, inner[-1]], [*strides[:-1], row, strides[-1]]
    view = rows.as_strided((M, *window), (row, *steps), 0)
    return replace(view, tma_clipped=True)


def plan_grouped_gemm_wgrad(builder: Builder, tensors: Operands, options: tuple[torch.dtype]) -> SymbolicTensor:
    """Plan the result `[G, P, Q]` from X `[M, P]`, Y `[M, Q]` and group_offsets `[G + 1]`."""
    X, Y, group_offsets = tensors
    (dtype,) = options
    out = builder.alloc((group_offsets.size(0) - 1, X.size(1), Y.size(1)), dtype)
    if written_without_kernel(builder, out, most(X.size(0)) == 0):
        return out
    X, Y = row_major(builder, left_operand(builder, X, Y.dtype), Y)
    M, (G, P, Q), gpu = X.size(0), out.shape, builder.gpu
    compute_dtype, int64_offsets = torch.promote_types(X.dtype, Y.dtype), needs_int64(group_offsets)
    problem = wgrad_rules.Problem(
        M=rules.floor_power_of_2(least(M)),
        P=P,
        Q=Q,
        G=G,
        dtype=compute_dtype,
        tf32=rules.tf32_allowed(compute_dtype),
        tma=not int64_offsets and tma_readable(gpu, X) and tma_readable(gpu, Y),
        tma_out=out.element_size() == 2 and tma_readable(gpu, out),
        # `int64_rows` applies to pointers only: TMA takes 32-bit coordinates whatever the extent.
        int64_rows=int64_offsets or needs_int64(X, Y),
        int64_out=needs_int64(out.select(0, 0)),
    )
    choice = wgrad_rules.rule(problem)
    block_m, tma = choice.block_m, choice.addressing.tma_A
    if choice.variant == "persistent":
        multiply_persistent(builder, X, Y, group_offsets, out, tma)
        return out
    group_offsets, width = searchable(builder, group_offsets, M)
    if tma:
        X, Y, out = whole_blocks(_windows(X, block_m)), whole_blocks(_windows(Y, block_m)), whole_blocks(out)
    # `few_groups`, because the kernel indexes groups of the result in 64 bits.
    arguments = (X, Y, group_offsets, replace(out, few_groups=True), M, width, block_m, tma)
    precision = "tf32" if problem.tf32 else "ieee"  # "tf32x3" is slower where operands are contracted along rows
    builder.launch(wgrad, arguments, choice.config, int64_index=choice.addressing.int64_index, precision=precision)
    return out


def multiply_persistent(
    builder: Builder,
    X: SymbolicTensor,  # [M, P], P a multiple of 128
    Y: SymbolicTensor,  # [M, Q], Q a multiple of 256
    group_offsets: SymbolicTensor,  # [G + 1]
    out: SymbolicTensor,  # [G, P, Q], written
    tma: bool,
) -> None:
    """Write the product to `out` with `wgrad_persistent`."""
    G, P, Q = out.shape
    block_m = wgrad_rules.PERSISTENT_BLOCK_M
    offsets = _ordered(builder, group_offsets, X.size(0))
    X, Y = X.unflatten(1, (P // 128, 128)), Y.unflatten(1, (Q // 256, 256))
    if tma:
        X, Y = (_windows(rows, block_m) for rows in (X, Y))
    tiles = replace(out, few_groups=True).unflatten(1, (P // 128, 128)).unflatten(3, (Q // 128, 128))
    group_p = max(n for n in range(1, wgrad_rules.MOST_BELOW + 1) if P // 128 % n == 0)
    arguments = (X, Y, offsets, tiles, G, block_m, group_p, builder.gpu.multiprocessors, tma)
    builder.launch(wgrad_persistent, arguments, wgrad_rules.persistent(G, tma))


def searchable(builder: Builder, group_offsets: SymbolicTensor, M: Any) -> tuple[SymbolicTensor, int]:
    """Return the offsets and `width` for `bounds_of`; ordered offsets and 0 from MOST_OFFSETS groups on."""
    G = group_offsets.size(0) - 1
    if G < rules.MOST_OFFSETS:
        return group_offsets, max(2, 1 << G.bit_length())
    return _ordered(builder, group_offsets, M), 0


def _ordered(builder: Builder, group_offsets: SymbolicTensor, M: Any) -> SymbolicTensor:
    """Return clamp(cummax(group_offsets), 0, M), `[G + 1]` int32."""
    ordered = builder.alloc(group_offsets.shape, torch.int32)
    config = rules.offsets_of(group_offsets.size(0) - 1)
    int64_index = needs_int64(group_offsets)
    builder.launch(order_offsets, (group_offsets, ordered, M), config, int64_index=int64_index)
    return ordered
