"""The first half of an expert in fp8 by one kernel: both products, the activation, and act quantised "1x128".

    act = f(gate) * up    for gate, up = A @ W_gate^T, A @ W_up^T with scales of blocks, as in scaled_gemm.py

A tile has 128 columns of act, which a scale is for. What act is made of is neither rounded nor written.
"""

from __future__ import annotations

from dataclasses import replace

import helion.language as hl
import torch
from torch import Tensor

from moe_kernels.glu import GLUSpec
from moe_kernels.kernels.activation import activated
from moe_kernels.kernels.declare import kernel
from moe_kernels.kernels.inline import unmasked
from moe_kernels.kernels.quantize import inverse, largest_of_rows, scale_of, scaled
from moe_kernels.kernels.scaled_gemm import block_product, problem_of, scaled_sum
from moe_kernels.kernels.tiles import plan_table, tile_count
from moe_kernels.rules import scaled as scaled_rules
from moe_kernels.rules.config import Config
from moe_kernels.runtime.plan import Builder
from moe_kernels.runtime.symbolic import SymbolicTensor, least
from moe_kernels.scaled import BLOCK


@kernel(lambda *_: Config(block_sizes=[]))
def scaled_swiglu(
    A: Tensor,  # [M, H] fp8
    scales_A: Tensor,  # [M, cdiv(H, 128)] fp32
    gate: Tensor,  # [E, I, H] fp8; I is a multiple of 128
    up: Tensor,  # [E, I, H] fp8
    scales_B: Tensor,  # [E, 2I / 128, cdiv(H, 128)] fp32: of gate, then of up
    tiles: Tensor,  # [1 + max_tiles, 3] int32, of tile_table
    num_tiles: Tensor,  # [] int32: tiles[0, 0]
    gate_bias: Tensor | None,  # [E, I]
    up_bias: Tensor | None,  # [E, I]
    data: Tensor,  # [M, I] fp8, written
    scales: Tensor,  # [M, I / 128] fp32, written
    block_m: hl.constexpr,  # that of `tiles`
    inline_ptx: hl.constexpr,
    tma_A: hl.constexpr,  # A is read by TMA, which takes rows outside of it for zeros
    largest: hl.constexpr,
    name: hl.constexpr,
    alpha: hl.constexpr,
    limit: hl.constexpr,
) -> Tensor:
    """Persistent programs walk the listed tiles, as `promoted_persistent`, with gate and up in place of two halves."""
    H = A.size(1)
    I = data.size(1)  # noqa: E741
    steps = (H + 127) // 128
    of_gate = I // 128
    hl.pdl_wait()
    for tile_t, tile_i in hl.tile([num_tiles, I], block_size=[1, 128]):
        t = tile_t.id + 1
        expert = tiles[t, 0].to(torch.int64)
        row0 = tiles[t, 1]
        end = tiles[t, 2]
        rows = row0.to(torch.int64) + hl.arange(block_m)
        rows_scaled = torch.where(rows < end, rows, row0)
        acc_gate = hl.zeros([block_m, tile_i], dtype=torch.float32)
        acc_up = hl.zeros([block_m, tile_i], dtype=torch.float32)
        next_a = hl.load(scales_A, [rows_scaled, 0])
        next_gate = scales_B[expert, tile_i.id, 0]
        next_up = scales_B[expert, tile_i.id + of_gate, 0]
        for tile_h in hl.tile(H, block_size=128):
            if tma_A:
                a = unmasked(hl.load(A, [row0 + hl.arange(block_m), tile_h]))
            else:
                a = hl.load(A, [rows, tile_h], extra_mask=(rows < end)[:, None])
            step = hl.zeros([], dtype=torch.int32) + (tile_h.id + 1)
            step = torch.where(step < steps, step, 0)
            scale_gate = (next_a * next_gate)[:, None]
            scale_up = (next_a * next_up)[:, None]
            next_a = hl.load(scales_A, [rows_scaled, step])
            next_gate = scales_B[expert, tile_i.id, step]
            next_up = scales_B[expert, tile_i.id + of_gate, step]
            product = block_product(a, gate[expert, tile_i, tile_h].T, acc_gate)
            acc_gate = scaled_sum(product, scale_gate, acc_gate, inline_ptx)
            product = block_product(a, up[expert, tile_i, tile_h].T, acc_up)
            acc_up = scaled_sum(product, scale_up, acc_up, inline_ptx)
        if gate_bias is not None:
            acc_gate = acc_gate + gate_bias[expert, tile_i].to(torch.float32)[None, :]
            acc_up = acc_up + up_bias[expert, tile_i].to(torch.float32)[None, :]
        act = activated(acc_gate, acc_up, name, alpha, limit)
        scale = scale_of(largest_of_rows(act, hl.zeros([block_m], dtype=torch.int32)), largest, False)
        y = scaled(act, inverse(scale)[:, None])
        hl.store(data, [rows, tile_i], y.to(data.dtype), extra_mask=(rows < end)[:, None])
        hl.store(scales, [rows, tile_i.id], scale, extra_mask=rows < end)
    return data


def multiply_activated_quantized(
    builder: Builder,
    A: SymbolicTensor,  # [M, H] fp8
    scales_A: SymbolicTensor,  # [M, cdiv(H, 128)]
    w_in: SymbolicTensor,  # [E, 2I, H] fp8
    scales_B: SymbolicTensor,  # [E, cdiv(2I, 128), cdiv(H, 128)]
    group_offsets: SymbolicTensor,  # [E + 1]
    b_in: SymbolicTensor | None,  # [E, 2I]
    spec: GLUSpec,
) -> tuple[SymbolicTensor, SymbolicTensor] | None:
    """act `[M, I]` in fp8 and its scales "1x128" for the rows of groups, or None where two kernels are faster."""
    M, I = A.size(0), w_in.size(1) // 2  # noqa: E741
    if not spec.gated or spec.interleaved or I % BLOCK or least(M) == 0:
        return None
    like_data = replace(A, shape=(M, I), strides=(I, 1))
    problem = problem_of(builder, A, scales_A, w_in, scales_B, group_offsets, b_in, like_data, False)
    if not scaled_rules.fuses_swiglu(problem):
        return None
    choice = scaled_rules.swiglu(problem)
    tma_A, _, _, int64_index = choice.addressing
    data, scales = builder.alloc((M, I), A.dtype), builder.alloc((M, I // BLOCK), torch.float32)
    tiles = plan_table(builder, group_offsets, scales, choice.block_m)
    if tma_A:
        A = replace(A, tma_clipped=True)
    halves = (replace(w_in.narrow(1, first, I), few_groups=True) for first in (0, I))
    biases = (None, None) if b_in is None else (b_in.narrow(1, 0, I), b_in.narrow(1, I, I))
    constants = (choice.block_m, builder.gpu.backend == "cuda", tma_A, torch.finfo(A.dtype).max)
    operands = (A, scales_A, *halves, replace(scales_B, few_groups=True), tiles, tile_count(tiles), *biases)
    arguments = (*operands, data, scales, *constants, spec.activation, spec.alpha, spec.limit)
    builder.launch(scaled_swiglu, arguments, choice.config, int64_index=int64_index)
    return data, scales
