"""A layer of experts for one token: products of matrices and a vector, a slot at a time, and nothing is sorted.

A slot is one of the token's top_k choices. Its expert is read from `topk_ids` where it is needed, so that the layer is
two kernels. An id outside `0..E - 1` drops its slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import helion
import helion.language as hl
import torch

from moe_kernels.configs import fitting
from moe_kernels.form import Form
from moe_kernels.kernels.activation import activated
from moe_kernels.kernels.inline import halve
from moe_kernels.kernels.launch import INT32_MAX, compile_kernel, kernel, span, without_ones
from moe_kernels.plans import Plans, kind

_BLOCK = 1024  # elements of a weight's row that a program reads at once
_MOST_SLOTS = 16  # the second kernel has a loop for each: 128 would take most of a minute to compile


def _config(width: int) -> helion.Config:
    """A weight's row per program, or two long ones: small programs, many on an SM, keep the most loads under way."""
    rows = 1 if width <= 4096 else 2
    return helion.Config(block_sizes=[fitting(_BLOCK, width), rows], num_warps=4)


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
        if slot < halve(odd_k, zero):
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


_Optional = torch.Tensor | None
_plans: Plans[Callable[..., None]] = Plans()


def takes(top_k: int, w_in: torch.Tensor, w_out: torch.Tensor) -> bool:
    """Whether the slots are few, and the weights, `[E, H, 2I]` and `[E, I, H]`, lie in memory with what is summed over
    side by side.
    """
    return top_k <= _MOST_SLOTS and w_in.stride(1) == w_out.stride(1) == 1


def launch(
    out: torch.Tensor,  # [1, H], written
    act: torch.Tensor,  # [top_k, I], written
    hidden: torch.Tensor,  # [1, H]
    topk_ids: torch.Tensor,  # [top_k]
    topk_weights: torch.Tensor,  # [top_k]
    gate: torch.Tensor,  # [E, H, I]
    up: _Optional,  # [E, H, I]
    w_out: torch.Tensor,  # [E, I, H]
    gate_bias: _Optional,  # [E, I]
    up_bias: _Optional,  # [E, I]
    out_bias: _Optional,  # [E, H]
    form: Form,
) -> Callable[..., None]:
    """Write a layer's result, and on the way what stands between its products. Nothing is checked; no tensor may be
    empty. The result does it again for other tensors of this kind, all but the last argument.
    """
    tensors = (out, act, hidden, topk_ids, topk_weights, gate, up, w_out, gate_bias, up_bias, out_bias)
    key = (
        form,
        out.device,
        *(None if t is None else t.shape for t in tensors),
        *map(kind, tensors),
    )
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = _plan(tensors, form)
    plan(*tensors)
    return plan


def _plan(tensors: Sequence[Any], form: Form) -> Callable[..., None]:
    out, act, hidden, topk_ids, topk_weights, gate, up, w_out, gate_bias, up_bias, out_bias = tensors
    top_k, rounds = act.size(0), out.dtype == torch.float16
    wide = max(span(t) for t in tensors if t is not None) > INT32_MAX

    def as_stored(*args: Any) -> list[Any]:
        """Weights [E, inputs, outputs] as they lie in memory."""
        return [arg.mT if isinstance(arg, torch.Tensor) and arg.dim() == 3 else arg for arg in args]

    def compiled(kernel: Any, args: Sequence[Any], width: int) -> Callable[..., None]:
        like = [
            without_ones(arg, keep_first=arg.dim() == 3) if isinstance(arg, torch.Tensor) else arg
            for arg in as_stored(*args)
        ]
        return compile_kernel(kernel, like, _config(width), wide=wide, prepare=as_stored)

    settled = (form.activation, form.alpha, form.limit)
    first = compiled(first_half, (act, hidden, topk_ids, gate, up, gate_bias, up_bias, 3, 3, *settled), hidden.size(1))
    second = compiled(second_half, (out, act, topk_ids, topk_weights, w_out, out_bias, top_k, rounds), act.size(1))

    def plan(*tensors: _Optional) -> None:
        out, act, hidden, topk_ids, topk_weights, gate, up, w_out, gate_bias, up_bias, out_bias = tensors
        first(act, hidden, topk_ids, gate, up, gate_bias, up_bias, top_k | 1, 2 * top_k + 1, *settled)
        second(out, act, topk_ids, topk_weights, w_out, out_bias, top_k, rounds)

    return plan
