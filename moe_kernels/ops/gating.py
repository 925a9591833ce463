"""choose_experts: the top_k experts of each token, and their weights."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels import reference
from moe_kernels.ops.library import define, use_kernels
from moe_kernels.rules.gating import MOST_EXPERTS
from moe_kernels.runtime import cache
from moe_kernels.runtime.signature import Operator

CHOOSE_EXPERTS = Operator("choose_experts", "moe_kernels.kernels.gating", ("logits", "bias"), ("logits",))


def _choose_experts(
    logits: Tensor,  # [T, E]
    bias: Tensor | None,  # [E]
    top_k: int,
    softmax: bool,  # or else sigmoid
    renormalize: bool,
    num_groups: int,
    top_groups: int,
    scale: float,
) -> tuple[Tensor, Tensor]:  # topk_ids and topk_weights [T, top_k]
    float64 = torch.float64 in (logits.dtype, None if bias is None else bias.dtype)
    if use_kernels(logits) and not float64 and logits.size(1) <= MOST_EXPERTS:
        options = (top_k, softmax, renormalize, num_groups, top_groups, scale)
        ids, weights = cache.call(CHOOSE_EXPERTS, (logits, bias), options)
        return ids, weights
    ids = reference.topk_ids(logits, bias, top_k, softmax, num_groups, top_groups)
    return ids, reference.topk_weights(logits, ids, softmax, renormalize, scale)


def _fake(logits: Tensor, bias: Tensor | None, top_k: int, *_: object) -> tuple[Tensor, Tensor]:
    shape, dtype = (logits.size(0), top_k), torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=dtype)


choose_experts = define(_choose_experts, _fake, results=2)
