"""Both products of an expert's first half at once, with the activation at their end: `act = f(A @ gate) * (A @ up)`.

Rows, groups, slots and tiles are those of grouped_gemm.py. A row of A is read once for both products. The rows may be
given as tokens, read through `row_to_slot`: then nothing has to be gathered beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import helion
import helion.language as hl
import torch

from moe_kernels import configs
from moe_kernels.configs import swiglu as rules
from moe_kernels.form import Form
from moe_kernels.kernels.activation import activated
from moe_kernels.kernels.inline import clamped, divide, first_row, halve, multiple, running_max, unmasked
from moe_kernels.kernels.launch import (
    INT32_MAX,
    compile_kernel,
    far_apart,
    interpreted,
    kernel,
    plan_and_launch,
    span,
    tf32_allowed,
    tma_readable,
    without_ones,
)
from moe_kernels.kernels.tiles import compile_table, num_slots, some_table, tile_count, windows
from moe_kernels.plans import Plans, kind


def _preset_basic(
    A: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, group_offsets: torch.Tensor, *rest: Any
) -> helion.Config:
    return rules.basic(_problem(A, gate, up, group_offsets.size(0) - 1, rest[:6], clips=False)).config


def _preset_persistent(
    A: torch.Tensor, pairs: torch.Tensor, tiles: torch.Tensor, num_tiles: torch.Tensor, *rest: Any
) -> helion.Config:
    gate, up = pairs.unflatten(0, (-1, 2)).unbind(1)
    return rules.persistent(_problem(A, gate, up, gate.size(0), rest[:6], clips=False)).config


@kernel(_preset_basic)
def swiglu(
    A: torch.Tensor,  # [M, H], or [T, H] if `top_k`
    gate: torch.Tensor,  # [E, H, I]; the last two swapped if `transposed`
    up: torch.Tensor,  # like gate
    group_offsets: torch.Tensor,  # [E + 1]
    row_to_slot: torch.Tensor | None,  # [M] int32
    gate_bias: torch.Tensor | None,  # [E, I]
    up_bias: torch.Tensor | None,  # [E, I]
    act: torch.Tensor,  # [M, I]
    h_gate: torch.Tensor | None,  # [M, I]: what act is made of
    h_up: torch.Tensor | None,  # [M, I]
    slots: int,
    odd_M: int,
    top_k: hl.constexpr,  # row r is that of token row_to_slot[r] // top_k; 0 if A has the rows themselves
    transposed: hl.constexpr,
    mask_rows: hl.constexpr,
    slot_per_row: hl.constexpr,
    name: hl.constexpr,
    alpha: hl.constexpr,
    limit: hl.constexpr,
) -> torch.Tensor:
    """For few rows per expert: a grid over slots and columns, as `jagged`."""
    hl.pdl_launch_dependents()
    hl.pdl_wait()
    H = A.size(1)
    I = act.size(1)  # noqa: E741
    E = group_offsets.size(0) - 1
    block_m = hl.register_block_size(16, 128)
    dtype = torch.promote_types(A.dtype, gate.dtype)
    for tile_s, tile_i in hl.tile([slots, I], block_size=[1, None]):
        region = hl.zeros([], dtype=torch.int32)
        M = halve(odd_M, region)
        slot = tile_s.id + region
        start = hl.zeros([], dtype=torch.int32)
        end = M
        previous = hl.zeros([], dtype=torch.int32)
        for tile_g in hl.tile(E + 1):
            ends = running_max(clamped(group_offsets, tile_g.index, M), previous)
            if slot_per_row:
                before = (ends <= slot) & (tile_g.index <= E)
            else:
                before = (divide(ends, block_m) + tile_g.index + 1 <= slot) & (tile_g.index <= E)
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
            acc_gate = hl.zeros([block_m, tile_i], dtype=torch.float32)
            acc_up = hl.zeros([block_m, tile_i], dtype=torch.float32)
            load0 = row0
            if not mask_rows:
                load0 = torch.minimum(row0, M - block_m)
            rows = load0.to(torch.int64) + hl.arange(block_m)
            inside = (rows >= row0) & (rows < end)
            if (region >= 1) & (region <= E):
                group = (region - 1).to(torch.int64)
                source = rows
                if row_to_slot is not None:
                    source = divide(hl.load(row_to_slot, [rows], extra_mask=inside), top_k).to(rows.dtype)
                for tile_h in hl.tile(H):
                    if mask_rows:
                        a = hl.load(A, [source, tile_h], extra_mask=inside[:, None])
                    else:
                        a = unmasked(hl.load(A, [load0 + hl.arange(block_m), tile_h]))
                    if transposed:
                        w_gate = gate[group, tile_i, tile_h].T
                        w_up = up[group, tile_i, tile_h].T
                    else:
                        w_gate = gate[group, tile_h, tile_i]
                        w_up = up[group, tile_h, tile_i]
                    acc_gate = hl.dot(a.to(dtype), w_gate.to(dtype), acc=acc_gate)
                    acc_up = hl.dot(a.to(dtype), w_up.to(dtype), acc=acc_up)
                if gate_bias is not None:
                    acc_gate = acc_gate + gate_bias[group, tile_i].to(torch.float32)[None, :]
                if up_bias is not None:
                    acc_up = acc_up + up_bias[group, tile_i].to(torch.float32)[None, :]
            result = activated(acc_gate, acc_up, name, alpha, limit)
            hl.store(act, [rows, tile_i], result.to(act.dtype), extra_mask=inside[:, None])
            if h_gate is not None:
                hl.store(h_gate, [rows, tile_i], acc_gate.to(act.dtype), extra_mask=inside[:, None])
                hl.store(h_up, [rows, tile_i], acc_up.to(act.dtype), extra_mask=inside[:, None])
    return act


# With static shapes, because Helion makes a descriptor of several rows of `pairs` at once only if strides are static.
@kernel(_preset_persistent, static_shapes=True)
def swiglu_persistent(
    A: torch.Tensor,  # [M, H], or [T, H] if `top_k`
    pairs: torch.Tensor,  # [2 * E, I, H]: gate and up of each expert
    tiles: torch.Tensor,  # [1 + slots, 3] int32, of tile_table
    num_tiles: torch.Tensor,  # [] int32: tiles[0, 0]
    row_to_slot: torch.Tensor | None,  # [M] int32
    gate_bias: torch.Tensor | None,  # [E, I]
    up_bias: torch.Tensor | None,  # [E, I]
    act: torch.Tensor,  # [M, I], or `windows` of it if `tma_out`, as the next two
    h_gate: torch.Tensor | None,
    h_up: torch.Tensor | None,
    top_k: hl.constexpr,
    block_m: hl.constexpr,  # that of `tiles`
    block_i: hl.constexpr,
    tma_A: hl.constexpr,  # A is read by TMA, which takes rows outside of it for zeros
    tma_B: hl.constexpr,  # so are the weights
    tma_out: hl.constexpr,  # results are written by TMA, which leaves out what is past the end of a window
    name: hl.constexpr,
    alpha: hl.constexpr,
    limit: hl.constexpr,
) -> torch.Tensor:
    """One program per SM walks the listed tiles, as `jagged_persistent`.

    Both weights' columns are one operand of one product. The compiler would keep two products in a flattened loop from
    overlapping.
    """
    H = A.size(1)
    I = act.size(1)  # noqa: E741
    dtype = torch.promote_types(A.dtype, pairs.dtype)
    hl.pdl_wait()  # launched while tile_table still runs
    for tile_t, tile_i in hl.tile([num_tiles, I], block_size=[1, block_i]):
        t = tile_t.id + 1
        expert = tiles[t, 0].to(torch.int64)
        row0 = tiles[t, 1]
        end = tiles[t, 2]
        rows = row0.to(torch.int64) + hl.arange(block_m)
        source = rows
        if row_to_slot is not None:
            source = divide(hl.load(row_to_slot, [rows], extra_mask=rows < end), top_k).to(rows.dtype)
        acc = hl.zeros([block_m, 2 * block_i], dtype=torch.float32)
        for tile_h in hl.tile(H):
            if tma_A:
                a = unmasked(hl.load(A, [row0 + hl.arange(block_m), tile_h]))
            else:
                a = hl.load(A, [source, tile_h], extra_mask=(rows < end)[:, None])
            pair = hl.load(pairs, [2 * expert + hl.arange(2), tile_i, tile_h])
            if tma_B:
                pair = unmasked(pair)
            w = pair.reshape(2 * block_i, tile_h.block_size)
            acc = hl.dot(a.to(dtype), w.to(dtype).T, acc=acc)
        gate, up = hl.split(acc.reshape(block_m, 2, block_i).permute(0, 2, 1))
        if gate_bias is not None:
            gate = gate + gate_bias[expert, tile_i].to(torch.float32)[None, :]
        if up_bias is not None:
            up = up + up_bias[expert, tile_i].to(torch.float32)[None, :]
        result = activated(gate, up, name, alpha, limit)
        if tma_out:
            window = row0 + block_m - end + hl.arange(block_m)
            hl.store(act, [window, tile_i, end], result.to(act.dtype))
            if h_gate is not None:
                hl.store(h_gate, [window, tile_i, end], gate.to(act.dtype))
                hl.store(h_up, [window, tile_i, end], up.to(act.dtype))
        else:
            hl.store(act, [rows, tile_i], result.to(act.dtype), extra_mask=(rows < end)[:, None])
            if h_gate is not None:
                hl.store(h_gate, [rows, tile_i], gate.to(act.dtype), extra_mask=(rows < end)[:, None])
                hl.store(h_up, [rows, tile_i], up.to(act.dtype), extra_mask=(rows < end)[:, None])
    return act


_Optional = torch.Tensor | None


def _pairs(A: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> _Optional:
    """Both weights, [E, H, I] each, as one [2 * E, I, H], if they can be, and `swiglu_persistent` is good at it."""
    E, H, I = gate.shape  # noqa: E741
    row = gate.stride(2)
    if not gate.stride() == up.stride() == (2 * I * row, 1, row):
        return None
    if up.data_ptr() - gate.data_ptr() != I * row * gate.element_size():
        return None
    if up.untyped_storage().data_ptr() != gate.untyped_storage().data_ptr():
        return None  # two that happen to be neighbours
    pairs = gate.as_strided((2 * E, I, H), (I * row, row, 1))
    if interpreted():
        return pairs
    lean = torch.promote_types(A.dtype, gate.dtype).itemsize == 2 and 2 * span(A) <= INT32_MAX
    return pairs if lean and min(H, I) >= 16 and tma_readable(pairs) else None


def fuses(A: torch.Tensor, w_in: torch.Tensor, w_up: _Optional, form: Form, M: int) -> bool:
    """Whether the kernels here are faster than `grouped_gemm` and `activate`: for `M` rows of `A`, or made of it."""
    if M // w_in.size(0) < configs.PERSISTENT_FROM_ROWS:
        return not form.interleaved or w_in.stride(2) != 1  # rows of each weight, or columns, lie in one piece
    gate, up = form.halves(w_in, w_up)
    assert up is not None
    return _pairs(A, gate, up) is not None


def _problem(
    A: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    E: int,
    rest: Sequence[_Optional],  # row_to_slot, gate_bias, up_bias, act, h_gate, h_up
    clips: bool,
    paired: bool = False,
    far: bool = False,  # offsets or biases need 64 bits
) -> rules.Problem:
    row_to_slot, gate_bias, up_bias, act, h_gate, h_up = rest
    assert act is not None
    M, I = act.shape  # noqa: E741
    H = A.size(1)
    dtype = torch.promote_types(A.dtype, gate.dtype)
    outs = [out for out in (act, h_gate, h_up) if out is not None]
    tma_A = not far and H >= 16 and row_to_slot is None and tma_readable(A)
    tma_B = min(H, I) >= 16 and tma_readable(gate) and tma_readable(up)
    return rules.Problem(
        rows=configs.floor_power_of_2(M // E),
        M=configs.floor_power_of_2(M),
        I=I,
        H=H,
        E=E,
        dtype=dtype,
        tf32=tf32_allowed(dtype),
        gathered=row_to_slot is not None,
        keeps=h_gate is not None,
        biases=(gate_bias is not None) + (up_bias is not None),
        paired=paired,
        tma_A=tma_A,
        tma_B=tma_B,
        tma_out=clips and I >= 16 and all(tma_readable(out) for out in outs),
        # M may double before there is a new plan. TMA takes 32-bit coordinates whatever the span.
        wide_A=far or 2 * max(span(t) for t in (A, row_to_slot) if t is not None) > INT32_MAX,
        wide_B=max(span(gate), span(up)) > INT32_MAX,
        wide_out=max(2 * span(out) for out in outs) > INT32_MAX,
    )


_plans: Plans[Callable[..., None]] = Plans()


def launch(
    A: torch.Tensor,  # [M, H], or [T, H] with row_to_slot
    gate: torch.Tensor,  # [E, H, I]
    up: torch.Tensor,  # [E, H, I]
    group_offsets: torch.Tensor,  # [E + 1]
    row_to_slot: _Optional,  # [M] int32
    gate_bias: _Optional,  # [E, I]
    up_bias: _Optional,  # [E, I]
    act: torch.Tensor,  # [M, I], written
    h_gate: _Optional,  # [M, I], written
    h_up: _Optional,  # [M, I], written
    top_k: int,  # 0 without row_to_slot
    form: Form,
) -> Callable[..., None]:
    """Write the activation, and what it is made of if asked for. Nothing is checked; no tensor may be empty.

    Kernels are compiled once for all that the key names. M is in it by its magnitude alone. The result does it again
    for other tensors of this kind, all but the last two arguments.
    """
    tensors = (A, gate, up, group_offsets, row_to_slot, gate_bias, up_bias, act, h_gate, h_up)
    M, E = act.size(0), gate.size(0)
    key = (
        M.bit_length(),
        (M // E).bit_length(),
        A.size(1),
        gate.shape,
        group_offsets.dtype,
        act.device,
        top_k,
        form,
        tf32_allowed(torch.promote_types(A.dtype, gate.dtype)),
        _pairs(A, gate, up) is not None,
        *map(kind, tensors),
    )
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = plan_and_launch(partial(_plan, top_k=top_k, form=form), *tensors)
    else:
        plan(*tensors)
    return plan


def _plan(
    A: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    group_offsets: torch.Tensor,
    row_to_slot: _Optional,
    *others: Any,  # gate_bias, up_bias, act, h_gate, h_up
    top_k: int,
    form: Form,
    clips: bool = True,  # TMA may be relied upon to leave out what is outside of a tensor
) -> Callable[..., None]:
    E = gate.size(0)
    pairs = _pairs(A, gate, up)
    transposed = gate.stride(1) == 1 != gate.stride(2)
    lies_as = (lambda w: w.transpose(1, 2)) if transposed else (lambda w: w)
    far = far_apart(group_offsets, *others[:2])
    problem = _problem(A, lies_as(gate), lies_as(up), E, (row_to_slot, *others), clips, pairs is not None, far)
    if not clips:
        problem = replace(problem, tma_A=False)  # a last tile reaches past the end
    choice = rules.rule(problem)
    block_m = choice.block_m
    tma_A, tma_B, tma_out, wide = choice.access
    biases = [None if x is None else without_ones(x) for x in others[:2]]
    outs = others[2:]
    # What the kernels are compiled for. TMA has no use for Helion's limit on the elements of a tensor: show it fewer.
    a = A.narrow(0, 0, block_m) if tma_A else without_ones(A)

    def few(w: torch.Tensor) -> torch.Tensor:
        return w.narrow(0, 0, min(2, w.size(0))) if tma_B else without_ones(w, keep_first=True)

    to = None if row_to_slot is None else without_ones(row_to_slot)
    compiled = partial(compile_kernel, config=choice.config, wide=wide, tf32=problem.tf32)
    options = (form.activation, form.alpha, form.limit)

    if not choice.persistent:
        slot_per_row = problem.rows == 0
        settled = (top_k, transposed, not tma_A, slot_per_row, *options)
        like = [None if out is None else without_ones(out) for out in outs]
        run = compiled(
            swiglu,
            (a, few(lies_as(gate)), few(lies_as(up)), group_offsets, to, *biases, *like, 3, 3, *settled),
            prepare=lambda A, gate, up, *rest: (A, lies_as(gate), lies_as(up), *rest),
            fixed={1, 2},
        )

        def basic(*tensors: Any) -> None:
            M = tensors[7].size(0)
            run(*tensors, M | 1 if slot_per_row else num_slots(M, E, block_m), 2 * M + 1, *settled)

        return basic

    def view(out: _Optional) -> _Optional:
        return out if out is None or not tma_out else windows(out, block_m)

    def prepare(A: Any, gate: Any, tiles: Any, _: Any, *rest: Any) -> tuple[Any, ...]:
        number = tile_count(tiles)
        pairs = gate.as_strided(shape, strides)
        return A, pairs, tiles, number, *rest[:3], *(view(out) for out in rest[3:6]), *rest[6:]

    assert pairs is not None
    shape, strides = pairs.shape, pairs.stride()
    settled = (top_k, block_m, choice.block_i, tma_A, tma_B, tma_out, *options)
    act = outs[0]
    tiles = some_table(act)
    list_tiles = compile_table(group_offsets, act, block_m)
    like = [None if out is None else without_ones(view(out.narrow(0, 0, block_m)) if tma_out else out) for out in outs]
    run = compiled(
        swiglu_persistent,
        (a, few(pairs), tiles, tile_count(tiles), to, *biases, *like, *settled),
        prepare=prepare,
        clipped=({0: 0} if tma_A else {})
        | ({7 + i: block_m for i, out in enumerate(outs) if out is not None} if tma_out else {}),
        fixed={1},
    )

    def persistent(A: Any, gate: Any, _: Any, group_offsets: Any, *rest: Any) -> None:
        tiles = list_tiles(group_offsets, rest[3])
        run(A, gate, tiles, tiles, *rest, *settled)

    return persistent
