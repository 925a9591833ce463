"""A layer of experts for one token: matrix-vector products, one slot at a time, without sorting.

A slot is one of the token's top_k choices. Both kernels read its expert from `topk_ids`, so no other kernel is needed.
An id outside `0..E - 1` drops its slot.

A thread reads runs of 16 bytes of a weight's row, and adds up the products of a run in float32. The scales of fp8
weights are applied to the sum of each run. Activations are not quantised.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import helion.language as hl
import torch

from moe_kernels.glu import GLUSpec
from moe_kernels.kernels.activation import activated
from moe_kernels.kernels.declare import kernel
from moe_kernels.kernels.inline import unmasked
from moe_kernels.rules.config import Config
from moe_kernels.runtime.plan import Builder
from moe_kernels.runtime.symbolic import SymbolicTensor, needs_int64
from moe_kernels.scaled import BLOCK


def _config(width: int, dtype: torch.dtype) -> Config:
    """One row of `width` weights per program: many small programs per SM keep the most loads in flight. The
    same bytes take more instructions in fp8; programs of one warp have the fewest besides the products.
    """
    runs = max(2, 1 << (-(-width * dtype.itemsize // 16) - 1).bit_length())
    block, num_warps = (64, 1) if dtype.itemsize == 1 else (128, 4)
    return Config(block_sizes=[min(block, runs), 1], num_warps=num_warps)


def _dots(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return dot products along the last dimension, a run of elements, in float32."""
    return torch.sum(unmasked(w.to(torch.float32) * x), dim=-1)


@kernel()
def first_half(
    act: torch.Tensor,  # [top_k, I], written
    hidden: torch.Tensor,  # [1, H]
    topk_ids: torch.Tensor,  # [top_k]
    gate: torch.Tensor,  # [E, I, H]
    up: torch.Tensor | None,  # [E, I, H]
    gate_bias: torch.Tensor | None,  # [E, I]
    up_bias: torch.Tensor | None,  # [E, I]
    scales: torch.Tensor | None,  # [E, cdiv(2I, height), cdiv(H, 128)], of w_gate_up, whose rows are gate and up
    first_up: int,  # first row of up in w_gate_up
    runs: int,  # runs of `run` elements in a row, at least 2
    distance: hl.constexpr,  # between the rows of gate in w_gate_up
    height: hl.constexpr,  # rows that share a scale
    run: hl.constexpr,  # elements of a weight that a thread reads at once
    name: hl.constexpr,
    alpha: hl.constexpr,
    limit: hl.constexpr,
) -> torch.Tensor:
    """One program per slot and block of columns. Rows of dropped slots are not written."""
    hl.pdl_wait()
    hl.pdl_launch_dependents()
    H = hidden.size(1)
    E = gate.size(0)
    block_r = hl.register_block_size(1, 4096)
    for tile_k, tile_i in hl.tile(act.size(), block_size=[1, None]):
        zero = hl.zeros([], dtype=torch.int32)
        slot = tile_k.id + zero
        expert = topk_ids[slot].to(torch.int64)
        if (expert >= 0) & (expert < E):
            sum_gate = hl.zeros([tile_i, block_r], dtype=torch.float32)
            sum_up = hl.zeros([tile_i, block_r], dtype=torch.float32)
            rows, in_both = tile_i.index[:, None, None], tile_i.index[:, None] * distance
            for tile_r in hl.tile(runs, block_size=block_r):
                columns = ((tile_r.index * run)[:, None] + hl.arange(run)[None, :])[None]
                inside, part = columns < H, (tile_r.index * run // 128)[None, :]
                x = hl.load(hidden, [zero, columns], extra_mask=inside).to(torch.float32)
                sums = _dots(hl.load(gate, [expert, rows, columns], extra_mask=inside), x)
                if scales is not None:
                    sums = sums * hl.load(scales, [expert, in_both // height, part])
                sum_gate = sum_gate + sums
                if up is not None:
                    sums = _dots(hl.load(up, [expert, rows, columns], extra_mask=inside), x)
                    if scales is not None:
                        sums = sums * hl.load(scales, [expert, (in_both + first_up) // height, part])
                    sum_up = sum_up + sums
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


@kernel()
def second_half(
    out: torch.Tensor,  # [1, H], written
    act: torch.Tensor,  # [top_k, I]
    topk_ids: torch.Tensor,  # [top_k]
    topk_weights: torch.Tensor,  # [top_k]
    weight: torch.Tensor,  # [E, H, I]
    bias: torch.Tensor | None,  # [E, H]
    scales: torch.Tensor | None,  # [E, cdiv(H, height), cdiv(I, 128)]
    runs: int,  # runs of `run` elements in a row, at least 2
    top_k: hl.constexpr,
    height: hl.constexpr,  # rows that share a scale
    run: hl.constexpr,  # elements of a weight that a thread reads at once
    rounds: hl.constexpr,  # round each slot's row to the dtype of `out` before weighting it, so that it may overflow
) -> torch.Tensor:
    """One program per block of columns, which adds up the slots in float32."""
    hl.pdl_wait()
    H = out.size(1)
    I = act.size(1)  # noqa: E741
    E = weight.size(0)
    block_r = hl.register_block_size(1, 4096)
    for tile_h in hl.tile(H):
        zero = hl.zeros([], dtype=torch.int32)
        sums = hl.zeros([tile_h, block_r], dtype=torch.float32)
        total = hl.zeros([tile_h], dtype=torch.float32)
        for tile_k in hl.tile(top_k, block_size=1):
            slot = tile_k.id + zero
            expert = topk_ids[slot].to(torch.int64)
            kept = (expert >= 0) & (expert < E)
            factor = torch.where(kept, topk_weights[slot].to(torch.float32), 0.0)
            for tile_r in hl.tile(runs, block_size=block_r):
                columns = ((tile_r.index * run)[:, None] + hl.arange(run)[None, :])[None]
                rows, inside = tile_h.index[:, None, None], (columns < I) & kept
                x = hl.load(act, [slot, columns], extra_mask=inside).to(torch.float32)
                products = _dots(hl.load(weight, [expert, rows, columns], extra_mask=inside), x)
                if scales is not None:
                    row, part = (tile_h.index // height)[:, None], (tile_r.index * run // 128)[None, :]
                    products = products * hl.load(scales, [expert, row, part], extra_mask=kept)
                if not rounds:
                    products = factor * products
                sums = sums + products
            if rounds:
                added = torch.sum(sums, dim=1)
                if bias is not None:
                    added = added + hl.load(bias, [expert, tile_h], extra_mask=kept).to(torch.float32)
                total = total + factor * added.to(out.dtype).to(torch.float32)
                sums = hl.zeros([tile_h, block_r], dtype=torch.float32)
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
    parameters: Any,  # w_in [E, H, 2I] or [E, H, I], w_up [E, H, I], w_out [E, I, H], b_in, b_up, b_out
    spec: GLUSpec,
    scales: tuple[SymbolicTensor | None, SymbolicTensor | None] = (None, None),  # of fp8 weights
) -> SymbolicTensor:  # [1, H]
    """Return a layer's result. No tensor may be empty.

    The scales of fp8 weights are `[E, R, 1]` or `[E, cdiv(R, 128), cdiv(K, 128)]`: first those for the R rows of gate
    and up together, then those for the R rows of down.
    """
    w_in, w_up, w_out, b_in, b_up, b_out = parameters
    dtype = out_dtype = hidden.dtype  # of act and of the result
    if scales[0] is not None:
        dtype = torch.float32 if dtype == torch.float16 else dtype  # act may overflow float16, but not scaled fp8
    else:
        dtype = torch.promote_types(dtype, w_in.dtype)
        out_dtype = torch.promote_types(dtype, w_out.dtype)
    out = builder.alloc((1, w_out.size(2)), out_dtype)
    biases = (*spec.parts(b_in, b_up, apart=w_up is not None), b_out)
    weights: Any = (*spec.halves(w_in, w_up), w_out)
    stored: list[Any] = [None if w is None else replace(w.transpose(1, 2), few_groups=True) for w in weights]
    gate, up, down = stored
    top_k, width, H = topk_ids.size(1), gate.size(1), hidden.size(1)
    topk_ids, topk_weights = topk_ids.select(0, 0), topk_weights.select(0, 0)
    act = builder.alloc((top_k, width), dtype)
    int64_index = needs_int64(out, act, hidden, topk_ids, topk_weights, *stored, *biases, *scales)
    first, height = _by_parts(scales[0], width * (2 if spec.gated else 1), H)
    place = (1, 2) if spec.interleaved else (width, 1)
    run = 16 // gate.dtype.itemsize
    constants = (place[1], height, run, spec.activation, spec.alpha, spec.limit)
    sizes = (place[0], max(2, -(-H // run)))
    arguments = (act, hidden, topk_ids, gate, up, *biases[:2], first, *sizes, *constants)
    builder.launch(first_half, arguments, _config(H, gate.dtype), int64_index=int64_index)
    second, height = _by_parts(scales[1], out.size(1), width)
    rounds = out.dtype == torch.float16
    sizes = (max(2, -(-width // run)), top_k, height, run, rounds)
    arguments = (out, act, topk_ids, topk_weights, down, biases[2], second, *sizes)
    config = _config(width, down.dtype).unrolled(0, top_k, 0)  # so that the loads of all slots are in flight together
    builder.launch(second_half, arguments, config, int64_index=int64_index)
    return out


def _by_parts(scales: SymbolicTensor | None, rows: int, K: int) -> tuple[SymbolicTensor | None, int]:
    """Return the scales `[E, .., cdiv(K, 128)]` of a weight `[E, rows, K]`, and the number of rows that share one."""
    if scales is None:
        return None, 1
    scales = replace(scales, few_groups=True)
    if scales.shape[1:] != (rows, 1):
        return scales, BLOCK
    return scales.as_strided((scales.size(0), rows, -(-K // BLOCK)), (*scales.strides[:2], 0), 0), 1
