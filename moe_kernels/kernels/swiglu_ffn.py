"""The gate and up products of the experts in one kernel, with the activation: `act = f(A @ gate) * (A @ up)`.

Rows, groups and tiles are those of grouped_gemm.py. A row of A is read once for both products. A may also hold tokens,
which are read through `row_to_slot`, so that no gather is needed beforehand.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import helion.language as hl
import torch

from moe_kernels import rules
from moe_kernels.glu import GLUSpec
from moe_kernels.kernels.activation import activated
from moe_kernels.kernels.declare import jagged_fields, kernel, left_operand, tma_readable, whole_blocks
from moe_kernels.kernels.inline import BY_ROW, biased, block_of, divide, int32, numbered_row, skip_regions, unmasked
from moe_kernels.kernels.row_major import LONG, row_major
from moe_kernels.kernels.tiles import listed, plan_table, store_rows, tile_count, tile_numbers, windows
from moe_kernels.rules import swiglu as swiglu_rules
from moe_kernels.runtime.plan import Builder
from moe_kernels.runtime.symbolic import SymbolicTensor, least, lies_transposed, needs_int64


@kernel()
def swiglu(
    A: torch.Tensor,  # [M, H], or [T, H] if `top_k`
    gate: torch.Tensor,  # [E, H, I]; [E, I, H] if `transposed`
    up: torch.Tensor,  # as gate
    group_offsets: torch.Tensor,  # [E + 1]
    row_to_slot: torch.Tensor | None,  # [M] int32
    gate_bias: torch.Tensor | None,  # [E, I]
    up_bias: torch.Tensor | None,  # [E, I]
    act: torch.Tensor,  # [M, I]
    preact_gate: torch.Tensor | None,  # [M, I]: with preact_up, the preactivations
    preact_up: torch.Tensor | None,  # [M, I]
    max_tiles: int,
    numbering: int,
    top_k: hl.constexpr,  # row r is token row_to_slot[r] // top_k; 0 if A holds the rows themselves
    transposed: hl.constexpr,
    mask_rows: hl.constexpr,
    name: hl.constexpr,
    alpha: hl.constexpr,
    limit: hl.constexpr,
) -> torch.Tensor:
    """Grid over tiles and columns, as in `jagged`; for few rows per expert."""
    hl.pdl_launch_dependents()
    hl.pdl_wait()
    H = A.size(1)
    I = act.size(1)  # noqa: E741
    E = group_offsets.size(0) - 1
    block_m = hl.register_block_size(16, 128)
    dtype = torch.promote_types(A.dtype, gate.dtype)
    for tile_t, tile_i in hl.tile([max_tiles, I], block_size=[1, None]):
        region = hl.zeros([], dtype=torch.int32)
        M = int32(act.size(0), region)
        by_row = int32(numbering, region) == BY_ROW
        tile = tile_t.id + region
        start = hl.zeros([], dtype=torch.int32)
        end = M
        previous = hl.zeros([], dtype=torch.int32)
        for tile_g in hl.tile(E + 1):
            region, start, end, previous = skip_regions(
                (region, start, end, previous), group_offsets, tile_g.index, E, M, tile, by_row, block_m
            )
        row0 = numbered_row(tile, region, start, end, by_row, block_m)
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
                    w_gate = block_of(gate, group, tile_h, tile_i, transposed)
                    w_up = block_of(up, group, tile_h, tile_i, transposed)
                    acc_gate = hl.dot(a.to(dtype), w_gate.to(dtype), acc=acc_gate)
                    acc_up = hl.dot(a.to(dtype), w_up.to(dtype), acc=acc_up)
                acc_gate, acc_up = biased(acc_gate, gate_bias, group, tile_i), biased(acc_up, up_bias, group, tile_i)
            result = activated(acc_gate, acc_up, name, alpha, limit)
            hl.store(act, [rows, tile_i], result.to(act.dtype), extra_mask=inside[:, None])
            if preact_gate is not None:
                hl.store(preact_gate, [rows, tile_i], acc_gate.to(act.dtype), extra_mask=inside[:, None])
                hl.store(preact_up, [rows, tile_i], acc_up.to(act.dtype), extra_mask=inside[:, None])
    return act


# Static shapes, because only with static strides does Helion create a descriptor that spans two matrices of `pairs`.
@kernel(static_shapes=True)
def swiglu_persistent(
    A: torch.Tensor,  # [M, H], or [T, H] if `top_k`
    pairs: torch.Tensor,  # [2 * E, I, H]: gate and up of each expert in turn
    tiles: torch.Tensor,  # [1 + max_tiles, 3] int32, from tile_table
    num_tiles: torch.Tensor,  # [] int32: tiles[0, 0]
    row_to_slot: torch.Tensor | None,  # [M] int32
    gate_bias: torch.Tensor | None,  # [E, I]
    up_bias: torch.Tensor | None,  # [E, I]
    act: torch.Tensor,  # [M, I]; this and the next two are `windows` if `tma_out`
    preact_gate: torch.Tensor | None,
    preact_up: torch.Tensor | None,
    top_k: hl.constexpr,
    block_m: hl.constexpr,  # the tile height of `tiles`
    block_i: hl.constexpr,
    tma_A: hl.constexpr,  # A is read by TMA, which returns zeros past its last row
    tma_B: hl.constexpr,  # the weights are read by TMA
    tma_out: hl.constexpr,  # results are written by TMA, which drops rows past the end of a window
    name: hl.constexpr,
    alpha: hl.constexpr,
    limit: hl.constexpr,
) -> torch.Tensor:
    """One program per SM, which takes every num_SM-th listed tile, as in `jagged_persistent`.

    The columns of both weights form one operand of one product, because the compiler would not overlap two products in
    a flattened loop.
    """
    H = A.size(1)
    I = act.size(1)  # noqa: E741
    dtype = torch.promote_types(A.dtype, pairs.dtype)
    hl.pdl_wait()  # launched while tile_table still runs
    for tile_t, tile_i in hl.tile([num_tiles, I], block_size=[1, block_i]):
        expert, row0, end = listed(tiles, tile_t.id + 1)
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
        gate, up = biased(gate, gate_bias, expert, tile_i), biased(up, up_bias, expert, tile_i)
        result = activated(gate, up, name, alpha, limit)
        store_rows(act, row0, end, tile_i, result, tma_out)
        if preact_gate is not None:
            store_rows(preact_gate, row0, end, tile_i, gate, tma_out)
            store_rows(preact_up, row0, end, tile_i, up, tma_out)
    return act


def fuses(
    A: SymbolicTensor, w_in: SymbolicTensor, w_up: SymbolicTensor | None, spec: GLUSpec, M: Any, builder: Builder
) -> bool:
    """Whether these kernels are faster than `grouped_gemm` and `activate` for `M` rows, those of `A` or gathered."""
    if not spec.gated or least(M) == 0 or 0 in w_in.shape:
        return False
    if w_up is not None and w_up.dtype != w_in.dtype:  # it would be cast to the dtype of the other product
        return False
    dtype = torch.promote_types(A.dtype, w_in.dtype)
    precision = rules.precision_of(dtype, rules.tf32_allowed(dtype), builder.gpu)
    if least(M) // w_in.size(0) < swiglu_rules.separate_from_rows(precision):
        return not spec.interleaved or w_in.stride(2) != 1  # each weight has contiguous rows or columns
    gate, up = spec.halves(w_in, w_up)
    assert up is not None
    return _pairs(A, gate, up, builder) is not None


def _pairs(A: SymbolicTensor, gate: SymbolicTensor, up: SymbolicTensor, builder: Builder) -> SymbolicTensor | None:
    """Return gate and up `[E, H, I]` as one view `[2 * E, I, H]`, or None if that does not suit `swiglu_persistent`."""
    E, H, I = gate.shape  # noqa: E741
    row = gate.stride(2)
    if not gate.strides == up.strides == (2 * I * row, 1, row) or gate.variable != up.variable:
        return None
    if up.offset - gate.offset != I * row * gate.element_size():
        return None
    pairs = gate.as_strided((2 * E, I, H), (I * row, row, 1), 0)
    if builder.gpu.backend == "interpreter":
        return pairs if I > 1 else None  # Helion masks the load of a bias as if it had several columns
    lean = torch.promote_types(A.dtype, gate.dtype).itemsize == 2 and not needs_int64(A)
    return pairs if lean and min(H, I) >= 16 and tma_readable(builder.gpu, pairs) else None


def multiply_activated(
    builder: Builder,
    A: SymbolicTensor,  # [M, H], or [T, H] with row_to_slot
    gate: SymbolicTensor,  # [E, H, I]
    up: SymbolicTensor,  # [E, H, I]
    group_offsets: SymbolicTensor,  # [E + 1]
    row_to_slot: SymbolicTensor | None,  # [M] int32
    biases: tuple[SymbolicTensor | None, SymbolicTensor | None],  # [E, I], for gate and up
    act: SymbolicTensor,  # [M, I], written
    preacts: tuple[SymbolicTensor | None, SymbolicTensor | None],  # [M, I] for gate and up, written
    top_k: int,  # 0 without row_to_slot
    spec: GLUSpec,
) -> None:
    """Write the activation, and the preactivations if given. No tensor may be empty."""
    (A,) = row_major(builder, left_operand(builder, A, gate.dtype), shortest=LONG)
    (M, I), H, E = act.shape, A.size(1), gate.size(0)  # noqa: E741
    pairs, transposed = _pairs(A, gate, up, builder), lies_transposed(gate)
    if transposed:
        gate, up = gate.transpose(1, 2), up.transpose(1, 2)
    dtype, gpu = torch.promote_types(A.dtype, gate.dtype), builder.gpu
    fields = jagged_fields(gpu, A, (gate, up), (act, *preacts), group_offsets, row_to_slot, *biases)
    problem = swiglu_rules.Problem(
        I=I,
        H=H,
        E=E,
        dtype=dtype,
        precision=rules.precision_of(dtype, rules.tf32_allowed(dtype), gpu),
        gathered=row_to_slot is not None,
        save_preact=preacts[0] is not None,
        biases=sum(bias is not None for bias in biases),
        paired=pairs is not None,
        slow_memory=gpu.slow_memory,
        **fields | {"tma_A": fields["tma_A"] and row_to_slot is None},
    )
    choice = swiglu_rules.rule(problem)
    block_m = choice.block_m
    tma_A, tma_B, tma_out, int64_index = choice.addressing
    options = (spec.activation, spec.alpha, spec.limit)
    if choice.variant == "basic":
        gate, up = replace(gate, few_groups=True), replace(up, few_groups=True)
        numbers = tile_numbers(M, E, block_m, problem.rows == 0)
        operands = [A, gate, up, act, *preacts]
        if tma_A or tma_B:
            operands = [None if x is None else whole_blocks(x) for x in operands]
        tensors = (*operands[:3], group_offsets, row_to_slot, *biases, *operands[3:])
        arguments = (*tensors, *numbers, top_k, transposed, not tma_A, *options)
        builder.launch(swiglu, arguments, choice.config, int64_index=int64_index, precision=problem.precision)
        return
    assert pairs is not None
    tiles = plan_table(builder, group_offsets, act, block_m)
    if tma_A:
        A = replace(A, tma_clipped=True)
    outs: list[SymbolicTensor | None] = [act, *preacts]
    if tma_out:
        outs = [None if out is None else windows(out, block_m) for out in outs]
    constants = (top_k, block_m, choice.block_n, tma_A, tma_B, tma_out, *options)
    pairs = replace(pairs, few_groups=True)
    arguments = (A, pairs, tiles, tile_count(tiles), row_to_slot, *biases, *outs, *constants)
    builder.launch(swiglu_persistent, arguments, choice.config, int64_index=int64_index, precision=problem.precision)
