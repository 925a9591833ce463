"""Gating: the top_k experts of each token by softmax or sigmoid of its logits, and their weights.

A program has all logits of a few tokens in registers. It takes the best expert top_k times, each time by two reductions
over the experts. Scores are compared as integers in the order of the numbers, so NaN is the best, as in torch.topk, and
of equal scores that of the lowest expert.
"""

from __future__ import annotations

import helion.language as hl
import torch

from moe_kernels.kernels.declare import kernel
from moe_kernels.kernels.inline import as_float, by_triton
from moe_kernels.rules import gating as rules
from moe_kernels.runtime.plan import Builder, Operands
from moe_kernels.runtime.symbolic import SymbolicTensor, most, needs_int64

_EXCLUDED = -(2**31)  # below the integer of any number
_NAN = 0x7FC00000
_MAGNITUDE = 0x7FFFFFFF


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """Return int32 in the order of the float32 `x`, with NaN as the largest."""
    like = torch.zeros_like(x, dtype=torch.int32)
    bits = hl.inline_triton("{0}.to(tl.int32, bitcast=True)", args=(x,), output_like=like)
    return torch.where(x == x, torch.where(bits < 0, bits ^ _MAGNITUDE, bits), _NAN)


def _number(ordered: torch.Tensor) -> torch.Tensor:
    """Return the float32 that has the integer `ordered`."""
    return as_float(torch.where(ordered < 0, ordered ^ _MAGNITUDE, ordered))


def _best(order: torch.Tensor, column: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest number of each row of `order [rows, width]`, and its first column, int32."""
    best = torch.amax(order, dim=1)
    equal = order == best.unsqueeze(1)
    return best, torch.amin(torch.where(equal, column.unsqueeze(0), width), dim=1).to(torch.int32)


@kernel()
def choose_experts(
    logits: torch.Tensor,  # [T, E]
    bias: torch.Tensor | None,  # [E]
    topk_ids: torch.Tensor,  # [T, top_k] int64, written
    topk_weights: torch.Tensor,  # [T, top_k] float32, written
    softmax: hl.constexpr,  # or else sigmoid
    renormalize: hl.constexpr,
    num_groups: hl.constexpr,
    top_groups: hl.constexpr,
    scale: hl.constexpr,
    experts: hl.constexpr,  # powers of two, at least E, num_groups and top_k
    groups: hl.constexpr,
    chosen: hl.constexpr,
) -> torch.Tensor:
    hl.pdl_launch_dependents()
    hl.pdl_wait()
    T, E = logits.size()
    top_k = topk_ids.size(1)
    for tile_t in hl.tile(T):
        expert = hl.arange(experts)
        inside = (expert < E)[None, :]
        x = hl.load(logits, [tile_t, expert], extra_mask=inside).to(torch.float32)
        if softmax:
            x = torch.where(inside, x, float("-inf"))
            x = by_triton("exp", x - torch.amax(x, dim=1)[:, None])
            scores = x / torch.sum(x, dim=1)[:, None]
        else:
            scores = torch.sigmoid(x)
        choice = scores
        if bias is not None:
            choice = scores + hl.load(bias, [expert], extra_mask=expert < E).to(torch.float32)[None, :]
        order = torch.where(inside, _ordered(choice), _EXCLUDED)

        if num_groups > 1:
            group = expert // (E // num_groups)
            number = hl.arange(groups)
            of_groups = hl.full([tile_t, groups], _EXCLUDED, dtype=torch.int32)
            for tile_g in hl.tile(num_groups, block_size=1):
                of_group = torch.where((group == tile_g.id)[None, :], order, _EXCLUDED)
                best, first = _best(of_group, expert, experts)
                others = torch.where(expert[None, :] == first[:, None], _EXCLUDED, of_group)
                second = torch.amax(others, dim=1)
                score = _number(best) + torch.where(second == _EXCLUDED, 0.0, _number(second))
                of_groups = torch.where((number == tile_g.id)[None, :], _ordered(score)[:, None], of_groups)
            allowed = hl.zeros([tile_t, experts], dtype=torch.int32)
            for _tile in hl.tile(top_groups, block_size=1):
                best, first = _best(of_groups, number, groups)
                of_groups = torch.where(number[None, :] == first[:, None], _EXCLUDED, of_groups)
                allowed = torch.where(group[None, :] == first[:, None], 1, allowed)
            order = torch.where(allowed == 1, order, _EXCLUDED)

        place = hl.arange(chosen)
        ids = hl.zeros([tile_t, chosen], dtype=torch.int32)
        weights = hl.zeros([tile_t, chosen], dtype=torch.float32)
        for tile_k in hl.tile(top_k, block_size=1):
            best, first = _best(order, expert, experts)
            is_first = expert[None, :] == first[:, None]
            if bias is None:
                weight = _number(best)
            else:
                weight = torch.sum(torch.where(is_first, scores, 0.0), dim=1)
            order = torch.where(is_first, _EXCLUDED, order)
            here = (place == tile_k.id)[None, :]
            ids = torch.where(here, first[:, None], ids)
            weights = torch.where(here, weight[:, None], weights)
        if renormalize:
            # The sigmoids of all chosen experts may underflow to zero.
            weights = weights / (torch.sum(weights, dim=1) + (0.0 if softmax else 1e-20))[:, None]
        kept = (place < top_k)[None, :]
        hl.store(topk_ids, [tile_t, place], ids.to(torch.int64), extra_mask=kept)
        hl.store(topk_weights, [tile_t, place], weights * scale, extra_mask=kept)
    return topk_ids


def plan_choose_experts(
    builder: Builder, tensors: Operands, options: tuple[int, bool, bool, int, int, float]
) -> tuple[SymbolicTensor, SymbolicTensor]:
    """Plan topk_ids and topk_weights `[T, top_k]` from logits `[T, E]` and a bias `[E]` or None."""
    logits, bias = tensors
    top_k, softmax, renormalize, num_groups, top_groups, scale = options
    T, E = logits.shape
    outs = builder.alloc((T, top_k), torch.int64), builder.alloc((T, top_k), torch.float32)
    if most(T):
        powers = [1 << (n - 1).bit_length() for n in (E, num_groups, top_k)]
        tensors = (logits, bias, *outs)
        arguments = (*tensors, softmax, renormalize, num_groups, top_groups, scale, *powers)
        builder.launch(choose_experts, arguments, rules.config(powers[0]), int64_index=needs_int64(*tensors))
    return outs
