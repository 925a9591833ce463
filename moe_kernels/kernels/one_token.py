"""A layer of experts for one token: matrix-vector products, one slot at a time, without sorting.

A slot is one of the token's top_k choices. Its expert is read from `topk_ids` where it is needed, so that the layer is
two kernels. An id outside `0..E - 1` drops its slot.
"""

from __future__ import annotations

from dataclasses import replace

import helion.language as hl
import torch

from moe_kernels.glu import GLUSpec
from moe_kernels.kernels.activation import activated
from moe_kernels.kernels.declare import kernel
from moe_kernels.kernels.inline import decode_odd
from moe_kernels.rules import fitting
from moe_kernels.rules.config import Config
from moe_kernels.runtime.plan import Builder
from moe_kernels.runtime.symbolic import SymbolicTensor, needs_int64

_BLOCK = 1024  # elements of a weight's row that a program reads at once


def _config(width: int) -> Config:
    """One row of a weight per program, or two long ones: many small programs on an SM keep the most loads in flight."""
    rows = 1 if width <= 4096 else 2
    return Config(block_sizes=[fitting(_BLOCK, width), rows], num_warps=4)


@kernel(lambda act, hidden, *_: _config(hidden.size(1)))
def first_half(
    act: torch.Tensor,  # [top_k, I], written
    hidden: torch.Tensor,  # [1, H]
    topk_ids: torch.Tensor,  # [top_k]
    gate: torch.Tensor,  # [E, I, H]
    up: torch.Tensor | None,  # [E, I, H]
    gate_bias: torch.Tensor | None,  # [E, I]
    up_bias: torch.Tensor | None,  # [E, I]
    programs: int,  # at least top_k; odd
    odd_k: int,  # 2 * top_k + 1
    name: hl.constexpr,
    alpha: hl.constexpr,
    limit: hl.constexpr,
) -> torch.Tensor:
    """A program per slot and block of columns. Rows of dropped slots are not written."""
    hl.pdl_wait()
    hl.pdl_launch_dependents()
    H = hidden.size(1)
    I = act.size(1)  # noqa: E741
    E = gate.size(0)
    block_h = hl.register_block_size(16, 4096)
    for tile_k, tile_i in hl.tile([programs, I], block_size=[1, None]):
        zero = hl.zeros([], dtype=torch.int32)
        slot = tile_k.id + zero
        if slot < decode_odd(odd_k, zero):
            expert = topk_ids[slot].to(torch.int64)
            if (expert >= 0) & (expert < E):
                sum_gate = hl.zeros([tile_i, block_h], dtype=torch.float32)
                sum_up = hl.zeros([tile_i, block_h], dtype=torch.float32)
                for tile_h in hl.tile(H, block_size=block_h):
                    x = hidden[zero, tile_h].to(torch.float32)[None, :]
                    sum_gate = sum_gate + gate[expert, tile_i, tile_h].to(torch.float32) * x
                    if up is not None:
                        sum_up = sum_up + up[expert, tile_i, tile_h].to(torch.float32) * x
                h_gate = torch.sum(sum_gate, dim=1)
                if gate_bias is not None:
                    h_gate = h_gate + gate_bias[expert, tile_i].to(torch.float32)
                if up is None:
                    result = activated(h_gate, None, name, alpha, limit)
                else:
                    h_up = torch.sum(sum_up, dim=1)
                    if up_bias is not None:
                        h_up = h_up + up_bias[expert, tile_i].to(torch.float32)
                    result = activated(h_gate, h_up, name, alpha, limit)
                act[slot, tile_i] = result.to(act.dtype)
    return act


@kernel(lambda out, act, *_: _config(act.size(1)))
def second_half(
    out: torch.Tensor,  # [1, H], written
    act: torch.Tensor,  # [top_k, I]
    topk_ids: torch.Tensor,  # [top_k]
    topk_weights: torch.Tensor,  # [top_k]
    weight: torch.Tensor,  # [E, H, I]
    bias: torch.Tensor | None,  # [E, H]
    top_k: hl.constexpr,
    rounds: hl.constexpr,  # each slot's row to the dtype of `out` before it is weighted, so that it may overflow
) -> torch.Tensor:
    """A program per block of columns, which adds up the slots in float32."""
    hl.pdl_wait()
    H = out.size(1)
    I = act.size(1)  # noqa: E741
    E = weight.size(0)
    block_i = hl.register_block_size(16, 4096)
    for tile_h in hl.tile(H):
        zero = hl.zeros([], dtype=torch.int32)
        sums = hl.zeros([tile_h, block_i], dtype=torch.float32)
        total = hl.zeros([tile_h], dtype=torch.float32)
        for k in hl.static_range(top_k):
            slot = zero + k
            expert = topk_ids[slot].to(torch.int64)
            kept = (expert >= 0) & (expert < E)
            factor = torch.where(kept, topk_weights[slot].to(torch.float32), 0.0)
            for tile_i in hl.tile(I, block_size=block_i):
                w = hl.load(weight, [expert, tile_h, tile_i], extra_mask=kept)
                x = hl.load(act, [slot, tile_i], extra_mask=kept).to(torch.float32)
                if not rounds:
                    x = factor * x
                sums = sums + w.to(torch.float32) * x[None, :]
            if rounds:
                row = torch.sum(sums, dim=1)
                if bias is not None:
                    row = row + hl.load(bias, [expert, tile_h], extra_mask=kept).to(torch.float32)
                total = total + factor * row.to(out.dtype).to(torch.float32)
                sums = hl.zeros([tile_h, block_i], dtype=torch.float32)
            elif bias is not None:
                b = hl.load(bias, [expert, tile_h], extra_mask=kept)
                total = total + factor * b.to(torch.float32)
        total = total + torch.sum(sums, dim=1)
        out[zero, tile_h] = total.to(out.dtype)
    return out


def multiply_one_token(
    builder: Builder,
    hidden: SymbolicTensor,  # [1, H]
    topk_ids: SymbolicTensor,  # [1, top_k]
    topk_weights: SymbolicTensor,  # [1, top_k]
    weights: tuple[SymbolicTensor, SymbolicTensor | None, SymbolicTensor],  # gate and up [E, H, I], down [E, I, H]
    biases: tuple[SymbolicTensor | None, SymbolicTensor | None, SymbolicTensor | None],  # [E, I], [E, I], [E, H]
    out: SymbolicTensor,  # [1, H], written
    dtype: torch.dtype,  # of the activations
    spec: GLUSpec,
) -> None:
    """Write a layer's result. No tensor may be empty."""
    stored = [None if w is None else replace(w.transpose(1, 2), few_groups=True) for w in weights]
    gate, up, down = stored
    assert gate is not None and down is not None
    top_k = topk_ids.size(1)
    topk_ids, topk_weights = topk_ids.select(0, 0), topk_weights.select(0, 0)
    act = builder.alloc((top_k, gate.size(1)), dtype)
    int64_index = needs_int64(out, act, hidden, topk_ids, topk_weights, *stored, *biases)
    constants = (spec.activation, spec.alpha, spec.limit)
    arguments = (act, hidden, topk_ids, gate, up, *biases[:2], top_k | 1, 2 * top_k + 1, *constants)
    builder.launch(first_half, arguments, _config(hidden.size(1)), int64_index=int64_index)
    rounds = out.dtype == torch.float16
    arguments = (out, act, topk_ids, topk_weights, down, biases[2], top_k, rounds)
    builder.launch(second_half, arguments, _config(act.size(1)), int64_index=int64_index)
