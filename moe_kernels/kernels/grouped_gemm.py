"""Jagged grouped GEMM: `out[rows of g] = A_packed[rows of g] @ B[g] (+ bias[g])`.

The rows of group g are `group_offsets[g]:group_offsets[g + 1]`, with the offsets read as
clamp(cummax(group_offsets), 0, M). They cut the rows into G + 2 regions: region 0 lies before the first group, region
r is group r - 1, region G + 1 lies past the last group; rows of the two outer regions are set to zero.

A slot is a run of at most `block_m` rows of one region. Region r's first slot has number
`start_r // block_m + r`: that leaves room for the partly filled slot at every region's end, so a program finds its
rows from the offsets alone, and the host bounds the number of slots by M and G without reading an offset.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import helion
import helion.language as hl
import torch

from moe_kernels import configs
from moe_kernels.kernels import grouped_gemm_tails
from moe_kernels.kernels.inline import clamped, divide, first_row, halve, multiple, running_max, unmasked
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
from moe_kernels.kernels.tiles import compile_table, num_slots, some_table, tile_count, windows


def _preset_basic(
    A_packed: torch.Tensor,
    B: torch.Tensor,
    group_offsets: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *_: Any,
) -> helion.Config:
    return configs.rule(_problem(A_packed, B, group_offsets.size(0) - 1, bias, out), "basic").config


def _preset_persistent(
    A_packed: torch.Tensor,
    B: torch.Tensor,
    tiles: torch.Tensor,
    num_tiles: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *_: Any,
) -> helion.Config:
    return configs.rule(_problem(A_packed, B, B.size(0), bias, out), "persistent").config


@kernel(_preset_basic)
def jagged(
    A_packed: torch.Tensor,  # [M, K]
    B: torch.Tensor,  # [G, K, N], or [1, K, N] for one that all groups share; the last two swapped if `transposed`
    group_offsets: torch.Tensor,  # [G + 1]
    bias: torch.Tensor | None,  # [G, N]
    out: torch.Tensor,  # [M, N]
    slots: int,  # enough of them; odd, and so never a multiple of 16, which Triton would compile anew for
    odd_M: int,  # 2 * M + 1, odd for the same reason
    shared: hl.constexpr,  # B is
    transposed: hl.constexpr,
    mask_rows: hl.constexpr,  # False needs M >= the largest block_m: A is then read in whole tiles
    slot_per_row: hl.constexpr,  # slot i is row i, and a tile if one begins there: fewer slots if M < G
) -> torch.Tensor:
    """A grid over slots and columns; each program finds its group by counting the offsets before its slot."""
    hl.pdl_launch_dependents()
    hl.pdl_wait()
    K = A_packed.size(1)
    N = out.size(1)
    G = group_offsets.size(0) - 1
    block_m = hl.register_block_size(16, 128)
    dtype = torch.promote_types(A_packed.dtype, B.dtype)
    for tile_s, tile_n in hl.tile([slots, N], block_size=[1, None]):
        region = hl.zeros([], dtype=torch.int32)
        M = halve(odd_M, region)
        slot = tile_s.id + region
        start = hl.zeros([], dtype=torch.int32)
        end = M
        previous = hl.zeros([], dtype=torch.int32)
        for tile_g in hl.tile(G + 1):
            ends = running_max(clamped(group_offsets, tile_g.index, M), previous)
            if slot_per_row:
                before = (ends <= slot) & (tile_g.index <= G)
            else:
                before = (divide(ends, block_m) + tile_g.index + 1 <= slot) & (tile_g.index <= G)
            region = region + torch.sum(before.to(torch.int32), dtype=torch.int32)
            start = torch.maximum(start, torch.amax(torch.where(before, ends, 0)))
            end = torch.minimum(end, torch.amin(torch.where(before, M, ends)))
            previous = torch.amax(ends)
        if slot_per_row:
            into_group = slot - start
            row0 = torch.where(multiple(into_group, block_m), slot, end)
        else:
            row0 = first_row(slot, region, start, block_m)
        if row0 < end:
            acc = hl.zeros([block_m, tile_n], dtype=torch.float32)
            load0 = row0
            if not mask_rows:
                load0 = torch.minimum(row0, M - block_m)
            rows = load0.to(torch.int64) + hl.arange(block_m)
            if (region >= 1) & (region <= G):
                group = (region - 1).to(torch.int64)
                weight = group * (not shared)
                for tile_k in hl.tile(K):
                    if mask_rows:
                        a = hl.load(A_packed, [rows, tile_k], extra_mask=(rows < end)[:, None])
                    else:
                        a = unmasked(hl.load(A_packed, [load0 + hl.arange(block_m), tile_k]))
                    if transposed:
                        b = B[weight, tile_n, tile_k].T
                    else:
                        b = B[weight, tile_k, tile_n]
                    acc = hl.dot(a.to(dtype), b.to(dtype), acc=acc)
                if bias is not None:
                    acc = acc + bias[group, tile_n].to(torch.float32)[None, :]
            inside = (rows >= row0) & (rows < end)
            hl.store(out, [rows, tile_n], acc.to(out.dtype), extra_mask=inside[:, None])
    return out


@kernel(_preset_persistent)
def jagged_persistent(
    A_packed: torch.Tensor,  # [M, K]
    B: torch.Tensor,  # [G, K, N], or [1, K, N] for one that all groups share; the last two swapped if `transposed`
    tiles: torch.Tensor,  # [1 + slots, 3] int32, of tile_table
    num_tiles: torch.Tensor,  # [] int32: tiles[0, 0]
    bias: torch.Tensor | None,  # [G, N]
    out: torch.Tensor,  # [M, N], or `windows` of it if `tma_out`
    shared: hl.constexpr,  # B is
    transposed: hl.constexpr,
    block_m: hl.constexpr,  # that of `tiles`
    tma_A: hl.constexpr,  # A_packed is read by TMA, which takes rows outside of it for zeros
    tma_out: hl.constexpr,  # out is written by TMA, which leaves out what is past the end of a window
) -> torch.Tensor:
    """One program per SM; each walks every num_SM-th of the listed tiles, so the work is even whatever the groups."""
    K = A_packed.size(1)
    N = out.size(1)
    dtype = torch.promote_types(A_packed.dtype, B.dtype)
    hl.pdl_wait()  # launched while tile_table still runs
    for tile_t, tile_n in hl.tile([num_tiles, N], block_size=[1, None]):
        t = tile_t.id + 1
        group = tiles[t, 0].to(torch.int64)
        weight = group * (not shared)
        row0 = tiles[t, 1]
        end = tiles[t, 2]
        acc = hl.zeros([block_m, tile_n], dtype=torch.float32)
        for tile_k in hl.tile(K):
            if tma_A:
                a = unmasked(hl.load(A_packed, [row0 + hl.arange(block_m), tile_k]))
            else:
                rows = row0.to(torch.int64) + hl.arange(block_m)
                a = hl.load(A_packed, [rows, tile_k], extra_mask=(rows < end)[:, None])
            if transposed:
                b = B[weight, tile_n, tile_k].T
            else:
                b = B[weight, tile_k, tile_n]
            acc = hl.dot(a.to(dtype), b.to(dtype), acc=acc)
        if bias is not None:
            acc = acc + bias[group, tile_n].to(torch.float32)[None, :]
        if tma_out:
            hl.store(out, [row0 + block_m - end + hl.arange(block_m), tile_n, end], acc.to(out.dtype))
        else:
            rows = row0.to(torch.int64) + hl.arange(block_m)
            hl.store(out, [rows, tile_n], acc.to(out.dtype), extra_mask=(rows < end)[:, None])
    return out


def _problem(
    A_packed: torch.Tensor,
    B: torch.Tensor,
    G: int,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    transposed: bool = False,
    clips: bool = False,
    far: bool = False,  # offsets or biases need 64 bits
) -> configs.Problem:
    M, K = A_packed.shape
    dtype = torch.promote_types(A_packed.dtype, B.dtype)
    N = out.size(1)
    # M may double before there is a new plan. TMA takes 32-bit coordinates whatever the span.
    return configs.Problem(
        rows=configs.floor_power_of_2(M // G),
        M=configs.floor_power_of_2(M),
        N=N,
        K=K,
        G=G,
        dtype=dtype,
        tf32=tf32_allowed(dtype),
        # A descriptor's block has at least 16 of each.
        tma_A=not far and K >= 16 and tma_readable(A_packed),
        tma_B=min(K, N) >= 16 and tma_readable(B),
        tma_out=clips and N >= 16 and tma_readable(out),
        wide_A=far or 2 * span(A_packed) > INT32_MAX,
        wide_B=span(B) > INT32_MAX,
        wide_out=2 * span(out) > INT32_MAX,
        has_bias=bias is not None,
        transposed=transposed,
        out_dtype=None if out.dtype == dtype else out.dtype,
        device=A_packed.device,
        slow_memory=configs.slow_memory(A_packed.device),
    )


def plan(
    variant: str,  # "auto", "basic" or "persistent"
    A_packed: torch.Tensor,  # [M, K]
    B: torch.Tensor,  # [G, K, N], or [1, K, N] for one that all groups share
    group_offsets: torch.Tensor,  # [G + 1]
    bias: torch.Tensor | None,  # [G, N]
    out: torch.Tensor,  # [M, N]
) -> Callable[..., None]:
    """Choose and compile kernels, write the jagged product to `out`, and return what does it again, for tensors that
    `dispatch` has one key for, given in the same order. Nothing is checked; M, N and G may not be 0.
    """
    one_dtype = A_packed.dtype == B.dtype == out.dtype
    dense = variant == "auto" and B.size(0) == 1 and bias is None and one_dtype and out.device.type != "cpu"
    make = _dense_plan if dense else partial(_plan, variant)
    # A tuned config that does not work here gives way to the rule's.
    return configs.settle(partial(plan_and_launch, make, A_packed, B, group_offsets, bias, out))


def _dense_plan(
    A_packed: torch.Tensor,
    B: torch.Tensor,
    group_offsets: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> Callable[..., None]:
    """One weight for all groups: one dense product of all rows, then zeros over the rows in no group."""
    zero_outside = compile_table(group_offsets, out, 128)

    def dense(
        A_packed: torch.Tensor,
        B: torch.Tensor,
        group_offsets: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        torch.mm(A_packed, B.squeeze(0), out=out)
        zero_outside(group_offsets, out)

    return dense


def _plan(
    variant: str,
    A_packed: torch.Tensor,
    B: torch.Tensor,
    group_offsets: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    clips: bool = True,  # TMA may be relied upon to leave out what is outside of a tensor
) -> Callable[..., None]:
    G = group_offsets.size(0) - 1
    shared = B.size(0) == 1
    transposed = B.stride(1) == 1 != B.stride(2)
    lies_as = (lambda B: B.transpose(1, 2)) if transposed else (lambda B: B)
    B = lies_as(B)
    problem = _problem(A_packed, B, G, bias, out, transposed, clips, far_apart(group_offsets, bias))
    if not clips:
        problem = replace(problem, tma_A=False)  # a last tile reaches past the end
    choice = configs.choose(problem, variant)
    if choice.variant == "tails":
        return grouped_gemm_tails.plan(choice, A_packed, lies_as(B), group_offsets, bias, out, transposed, problem.tf32)
    block_m = choice.block_m
    tma_A, tma_B, tma_out, wide = choice.access
    # What the kernels are compiled for. TMA has no use for Helion's limit on the elements of a tensor: show it fewer.
    a = A_packed.narrow(0, 0, block_m) if tma_A else without_ones(A_packed)
    b = B.narrow(0, 0, min(2, B.size(0))) if tma_B else without_ones(B, keep_first=True)
    bias = None if bias is None else without_ones(bias)
    compiled = partial(compile_kernel, config=choice.config, wide=wide, tf32=problem.tf32)

    if choice.variant == "basic":
        slot_per_row = problem.rows == 0
        run = compiled(
            jagged,
            (a, b, group_offsets, bias, without_ones(out), 3, 3, shared, transposed, not tma_A, slot_per_row),
            prepare=lambda A_packed, B, *rest: (A_packed, lies_as(B), *rest),
            fixed={1},
        )

        def basic(
            A_packed: torch.Tensor,
            B: torch.Tensor,
            group_offsets: torch.Tensor,
            bias: torch.Tensor | None,
            out: torch.Tensor,
        ) -> None:
            M = A_packed.shape[0]
            slots = M | 1 if slot_per_row else num_slots(M, G, block_m)
            run(A_packed, B, group_offsets, bias, out, slots, 2 * M + 1, shared, transposed, not tma_A, slot_per_row)

        return basic

    def prepare(
        A_packed: torch.Tensor,
        B: torch.Tensor,
        tiles: torch.Tensor,
        _: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        *rest: Any,
    ) -> tuple[Any, ...]:
        if tma_out:
            out = windows(out, block_m)
        return A_packed, lies_as(B), tiles, tile_count(tiles), bias, out, *rest

    tiles = some_table(out)
    list_tiles = compile_table(group_offsets, out, block_m)
    o = without_ones(windows(out.narrow(0, 0, block_m), block_m) if tma_out else out)
    number = tile_count(tiles)
    run = compiled(
        jagged_persistent,
        (a, b, tiles, number, bias, o, shared, transposed, block_m, tma_A, tma_out),
        prepare=prepare,
        clipped=({0: 0} if tma_A else {}) | ({5: block_m} if tma_out else {}),
        fixed={1},
    )

    def persistent(
        A_packed: torch.Tensor,
        B: torch.Tensor,
        group_offsets: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        tiles = list_tiles(group_offsets, out)
        run(A_packed, B, tiles, tiles, bias, out, shared, transposed, block_m, tma_A, tma_out)

    return persistent
