"""A layer's result and gradients by name, for the tests of the reference and of the kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_kernels import moe_mlp

COMPUTE = ("fp8_rowwise", "fp8_block")
DIFFERENTIABLE = ("hidden", "topk_weights", "w_gate_up", "w_down", "gate_up_bias", "down_bias")


def run(arguments: dict[str, Any], d_out: Tensor, **options: Any) -> dict[str, Tensor]:
    """The result, "out", and the gradients by name."""
    given = {name: x.detach().requires_grad_(name in DIFFERENTIABLE) for name, x in arguments.items()}
    out = moe_mlp(**given, **options)
    names = [name for name in DIFFERENTIABLE if name in given]
    gradients = torch.autograd.grad(out, [given[name] for name in names], d_out.to(out.dtype))
    return {"out": out.detach(), **dict(zip(names, gradients, strict=True))}
