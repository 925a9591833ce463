"""scaled_moe_mlp: a layer of experts with fp8 weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_kernels import reference
from moe_kernels.glu import GLUSpec
from moe_kernels.ops.layer import SPEC, layer_operator, run_layer
from moe_kernels.ops.library import along_rows, define, refusing, use_kernels
from moe_kernels.ops.scaled import NO_GRADIENTS
from moe_kernels.scaled import ScaledTensor

SCALED_MOE_MLP = layer_operator(
    "scaled_moe_mlp", "w_gate_up", "scales_gate_up", "w_down", "scales_down", "gate_up_bias", "down_bias"
)


def _scaled_moe_mlp(
    hidden: Tensor,  # [T, H]
    topk_ids: Tensor,  # [T, top_k]
    topk_weights: Tensor,  # [T, top_k]
    w_gate_up: Tensor,  # [E, 2I, H] or [E, I, H]
    scales_gate_up: Tensor,  # [E, 2I, 1], or [E, cdiv(2I, 128), cdiv(H, 128)] unless `rowwise`
    w_down: Tensor,  # [E, H, I]
    scales_down: Tensor,  # [E, H, 1] or [E, cdiv(H, 128), cdiv(I, 128)]
    gate_up_bias: Tensor | None,  # [E, 2I] or [E, I]
    down_bias: Tensor | None,  # [E, H]
    rowwise: bool,
    fast_accumulation: bool,
    *spec: Any,
) -> Tensor:  # [T, H]
    empty = 0 in (*topk_ids.shape, *w_gate_up.shape, *w_down.shape)
    if empty or not use_kernels(hidden):
        format = "rowwise" if rowwise else "128x128"
        weights = ScaledTensor(w_gate_up, scales_gate_up, format), ScaledTensor(w_down, scales_down, format)
        named: dict[str, Any] = {"gate_up_bias": gate_up_bias, "down_bias": down_bias, **GLUSpec(*spec)._asdict()}
        return reference.scaled_moe_mlp(hidden, topk_ids, topk_weights, *weights, **named)
    parameters = (along_rows(w_gate_up), scales_gate_up, along_rows(w_down), scales_down, gate_up_bias, down_bias)
    options = (rowwise, fast_accumulation, GLUSpec(*spec))
    return run_layer(SCALED_MOE_MLP, (hidden, topk_ids, topk_weights), parameters, options)[0]


scaled_moe_mlp = define(
    "scaled_moe_mlp(Tensor hidden, Tensor topk_ids, Tensor topk_weights, Tensor w_gate_up, Tensor scales_gate_up,"
    " Tensor w_down, Tensor scales_down, Tensor? gate_up_bias, Tensor? down_bias, bool rowwise,"
    f" bool fast_accumulation, {SPEC}) -> Tensor",
    _scaled_moe_mlp,
    lambda hidden, *_: torch.empty_like(hidden, memory_format=torch.contiguous_format),
    *refusing(NO_GRADIENTS.format("moe_mlp with fp8 weights")),
)
