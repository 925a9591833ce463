"""Import this module to have the operators' products counted by `torch.utils.flop_counter`.

    import moe_kernels.flops

Then `FlopCounterMode` counts them, and so does torch.compile where it weighs what to recompute in the backward pass
(`torch._functorch.config.activation_memory_budget`). As for PyTorch's own operators, a multiplication and an addition
are two operations, and only products of matrices count. The values of the offsets are not read: all rows count, as if
each belonged to some group. Not part of `import moe_kernels`, because the counter imports Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from moe_kernels import ops

__all__: list[str] = []

_Shape = Sequence[int]
_OPERATORS = torch.ops.moe_kernels
assert ops  # whose import registers the operators


@register_flop_formula(
    [
        _OPERATORS.grouped_gemm,
        _OPERATORS.grouped_mm,
        _OPERATORS.uniform_grouped_gemm,
        _OPERATORS.scaled_grouped_gemm,
        _OPERATORS.quantized_grouped_gemm,
    ]
)
def _product(A: _Shape, *_: Any, out_shape: _Shape, **__: Any) -> int:
    return 2 * prod(out_shape) * A[-1]


@register_flop_formula(_OPERATORS.varied_grouped_gemm)
def _varied(group_A: list[_Shape], group_B: list[_Shape], **_: Any) -> int:
    return sum(2 * prod(A) * B[1] for A, B in zip(group_A, group_B, strict=True))


@register_flop_formula(_OPERATORS.grouped_gemm_wgrad)
def _wgrad(A_packed: _Shape, d_out: _Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(A_packed) * d_out[1]


@register_flop_formula(_OPERATORS.scaled_wgrad)
def _scaled_wgrad(X: _Shape, scales_X: _Shape, Y: _Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(X) * Y[1]


@register_flop_formula(_OPERATORS.quantized_wgrad)
def _quantized_wgrad(
    X: _Shape, Y: _Shape, group_offsets: _Shape, x_row_to_slot: _Shape | None, *_: Any, **__: Any
) -> int:
    rows = X if x_row_to_slot is None else x_row_to_slot
    return 2 * rows[0] * X[1] * Y[1]


@register_flop_formula(_OPERATORS.swiglu_ffn)
def _first_half(rows: _Shape, group_offsets: _Shape, w_in: _Shape, w_up: _Shape | None, *_: Any, **__: Any) -> int:
    return _by_experts(rows[0], w_in, w_up)


@register_flop_formula([_OPERATORS.moe_mlp, _OPERATORS.moe_layer])
def _layer(hidden: _Shape, topk_ids: _Shape, topk_weights: _Shape, *others: Any, **__: Any) -> int:
    w_gate_up, w_down, w_up, *_ = others
    return _by_experts(prod(topk_ids), w_gate_up, w_down, w_up)


@register_flop_formula(_OPERATORS.quantized_moe_mlp)
def _quantized_layer(hidden: _Shape, topk_ids: _Shape, topk_weights: _Shape, *others: Any, **__: Any) -> int:
    w_gate_up, w_down, *_ = others
    return _by_experts(prod(topk_ids), w_gate_up, w_down)


@register_flop_formula(_OPERATORS.scaled_moe_mlp)
def _scaled_layer(hidden: _Shape, topk_ids: _Shape, topk_weights: _Shape, *others: Any, **__: Any) -> int:
    w_gate_up, _, w_down, *_ = others
    return _by_experts(prod(topk_ids), w_gate_up, w_down)


def _by_experts(rows: int, *weights: _Shape | None) -> int:
    """The operations of products of each row with one expert's part of `weights [E, ...]`."""
    return sum(2 * rows * prod(weight[1:]) for weight in weights if weight is not None)
