"""A layer of experts for one token: matrix-vector products, one slot at a time, without sorting.

A slot is one of the token's top_k choices. Its expert is read from `topk_ids` where it is needed, so that the layer is
two kernels. An id outside `0..E - 1` drops its slot.

Weights in fp8 have scales. They are multiplied in float32, 128 elements of a row at a time, and a scale is applied to
each such sum. Activations are not quantised.
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
from moe_kernels.scaled import BLOCK

_BLOCK = 1024  # elements of a weight's row that a program reads at once


def _config(width: int, scaled: bool) -> Config:
    """One row of a weight per program, or two long ones: many small programs on an SM keep the most loads in flight."""
    if scaled:  # as many bytes are twice as many elements; short rows leave threads for a second one
        parts = min(2 * _BLOCK, 1 << (width - 1).bit_length()) // BLOCK
        return Config(block_sizes=[max(1, parts), 1 if 1024 < width <= 8192 else 2], num_warps=4)
    rows = 1 if width <= 4096 else 2
    return Config(block_sizes=[fitting(_BLOCK, width), rows], num_warps=4)


def _sums(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """[rows, parts]: the products with x `[1, parts, 128]` of parts of rows, w `[rows, parts, 128]`."""
    return torch.sum(w.to(torch.float32) * x, dim=2)


@kernel(lambda act, hidden, ids, gate, up, gate_bias, up_bias, scales, *_: _config(hidden.size(1), scales is not None))
def first_half(
    act: torch.Tensor,  # [top_k, I], written
    hidden: torch.Tensor,  # [1, H]
    topk_ids: torch.Tensor,  # [top_k]
    gate: torch.Tensor,  # [E, I, H]
    up: torch.Tensor | None,  # [E, I, H]
    gate_bias: torch.Tensor | None,  # [E, I]
    up_bias: torch.Tensor | None,  # [E, I]
    scales: torch.Tensor | None,  # [E, cdiv(2I, height), cdiv(H, 128)]: of the weight that gate and up are rows of
    programs: int,  # at least top_k; odd
    odd_k: int,  # 2 * top_k + 1
    first_up: int,  # the row in that weight where up begins
    distance: hl.constexpr,  # between the rows of gate in it
    height: hl.constexpr,  # rows that share a scale
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
    block_h = hl.register_block_size(1, 4096)  # columns, or parts of 128 where there are scales
    for tile_k, tile_i in hl.tile([programs, I], block_size=[1, None]):
        zero = hl.zeros([], dtype=torch.int32)
        slot = tile_k.id + zero
        if slot < decode_odd(odd_k, zero):
            expert = topk_ids[slot].to(torch.int64)
            if (expert >= 0) & (expert < E):
                sum_gate = hl.zeros([tile_i, block_h], dtype=torch.float32)
                sum_up = hl.zeros([tile_i, block_h], dtype=torch.float32)
                in_both = tile_i.index * distance
                if scales is None:
                    for tile_h in hl.tile(H, block_size=block_h):
                        x = hidden[zero, tile_h].to(torch.float32)[None, :]
                        sum_gate = sum_gate + gate[expert, tile_i, tile_h].to(torch.float32) * x
                        if up is not None:
                            sum_up = sum_up + up[expert, tile_i, tile_h].to(torch.float32) * x
                else:
                    for tile_p in hl.tile(scales.size(2), block_size=block_h):
                        columns = ((tile_p.index * 128)[:, None] + hl.arange(128)[None, :])[None]
                        rows, inside = tile_i.index[:, None, None], columns < H
                        x = hl.load(hidden, [zero, columns], extra_mask=inside).to(torch.float32)
                        sums = _sums(hl.load(gate, [expert, rows, columns], extra_mask=inside), x)
                        sum_gate = sum_gate + sums * scales[expert, in_both // height, tile_p]
                        if up is not None:
                            sums = _sums(hl.load(up, [expert, rows, columns], extra_mask=inside), x)
                            sum_up = sum_up + sums * scales[expert, (in_both + first_up) // height, tile_p]
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


@kernel(lambda out, act, ids, topk_weights, weight, bias, scales, *_: _config(act.size(1), scales is not None))
def second_half(
    out: torch.Tensor,  # [1, H], written
    act: torch.Tensor,  # [top_k, I]
    topk_ids: torch.Tensor,  # [top_k]
    topk_weights: torch.Tensor,  # [top_k]
    weight: torch.Tensor,  # [E, H, I]
    bias: torch.Tensor | None,  # [E, H]
    scales: torch.Tensor | None,  # [E, cdiv(H, height), cdiv(I, 128)]
    top_k: hl.constexpr,
    height: hl.constexpr,  # rows that share a scale
    rounds: hl.constexpr,  # each slot's row to the dtype of `out` before it is weighted, so that it may overflow
) -> torch.Tensor:
    """A program per block of columns, which adds up the slots in float32."""
    hl.pdl_wait()
    H = out.size(1)
    I = act.size(1)  # noqa: E741
    E = weight.size(0)
    block_i = hl.register_block_size(1, 4096)  # as in the first half
    for tile_h in hl.tile(H):
        zero = hl.zeros([], dtype=torch.int32)
        sums = hl.zeros([tile_h, block_i], dtype=torch.float32)
        total = hl.zeros([tile_h], dtype=torch.float32)
        for k in hl.static_range(top_k):
            slot = zero + k
            expert = topk_ids[slot].to(torch.int64)
            kept = (expert >= 0) & (expert < E)
            factor = torch.where(kept, topk_weights[slot].to(torch.float32), 0.0)
            if scales is None:
                for tile_i in hl.tile(I, block_size=block_i):
                    w = hl.load(weight, [expert, tile_h, tile_i], extra_mask=kept)
                    x = hl.load(act, [slot, tile_i], extra_mask=kept).to(torch.float32)
                    if not rounds:
                        x = factor * x
                    sums = sums + w.to(torch.float32) * x[None, :]
            else:
                for tile_p in hl.tile(scales.size(2), block_size=block_i):
                    columns = ((tile_p.index * 128)[:, None] + hl.arange(128)[None, :])[None]
                    rows, inside = tile_h.index[:, None, None], (columns < I) & kept
                    x = hl.load(act, [slot, columns], extra_mask=inside).to(torch.float32)
                    products = _sums(hl.load(weight, [expert, rows, columns], extra_mask=inside), x)
                    products = products * hl.load(scales, [expert, tile_h.index // height, tile_p], extra_mask=kept)
                    if not rounds:
                        products = factor * products
                    sums = sums + products
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
    scales: tuple[SymbolicTensor | None, SymbolicTensor | None] = (None, None),
) -> None:
    """Write a layer's result. No tensor may be empty.

    Weights in fp8 have scales `[E, R, 1]` or `[E, cdiv(R, 128), cdiv(K, 128)]`, for the R rows of gate and up together,
    and for those of down.
    """
    stored = [None if w is None else replace(w.transpose(1, 2), few_groups=True) for w in weights]
    gate, up, down = stored
    assert gate is not None and down is not None
    top_k, width, H, scaled = topk_ids.size(1), gate.size(1), hidden.size(1), scales[0] is not None
    topk_ids, topk_weights = topk_ids.select(0, 0), topk_weights.select(0, 0)
    act = builder.alloc((top_k, width), dtype)
    int64_index = needs_int64(out, act, hidden, topk_ids, topk_weights, *stored, *biases, *scales)
    first, height = _by_parts(scales[0], width * (2 if spec.gated else 1), H)
    place = (1, 2) if spec.interleaved else (width, 1)
    constants = (height, spec.activation, spec.alpha, spec.limit)
    arguments = (act, hidden, topk_ids, gate, up, *biases[:2], first, top_k | 1, 2 * top_k + 1, *place, *constants)
    builder.launch(first_half, arguments, _config(H, scaled), int64_index=int64_index)
    second, height = _by_parts(scales[1], out.size(1), width)
    rounds = out.dtype == torch.float16
    arguments = (out, act, topk_ids, topk_weights, down, biases[2], second, top_k, height, rounds)
    builder.launch(second_half, arguments, _config(width, scaled), int64_index=int64_index)


def _by_parts(scales: SymbolicTensor | None, rows: int, K: int) -> tuple[SymbolicTensor | None, int]:
    """Scales `[E, .., cdiv(K, 128)]` of a weight `[E, rows, K]`, and the rows that share one."""
    if scales is None:
        return None, 1
    scales = replace(scales, few_groups=True)
    if scales.shape[1:] != (rows, 1):
        return scales, BLOCK
    return scales.as_strided((scales.size(0), rows, -(-K // BLOCK)), (*scales.strides[:2], 0), 0), 1
