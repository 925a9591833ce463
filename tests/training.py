"""A layer's result and gradients by name, for the tests of the reference and of the kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_kernels import dequantize, moe_mlp, quantize_weight, reference
from moe_kernels.glu import GLUSpec

COMPUTE = ("fp8_rowwise", "fp8_block")
DIFFERENTIABLE = ("hidden", "topk_weights", "w_gate_up", "w_down", "gate_up_bias", "down_bias")


def run(
    arguments: dict[str, Any], d_out: Tensor, *, quantized_before: bool = False, **options: Any
) -> dict[str, Tensor]:
    """Return the result, "out", and the gradients, by name."""
    given = {name: x.detach().requires_grad_(name in DIFFERENTIABLE) for name, x in arguments.items()}
    passed = dict(given)
    if quantized_before:
        passed |= {name: quantize_weight(given[name], options["compute"]) for name in ("w_gate_up", "w_down")}
    out = moe_mlp(**passed, **options)
    names = [name for name in DIFFERENTIABLE if name in given]
    gradients = torch.autograd.grad(out, [given[name] for name in names], d_out.to(out.dtype))
    return {"out": out.detach(), **dict(zip(names, gradients, strict=True))}


def exactly(
    arguments: dict[str, Any], d_out: Tensor, compute: str, fp8_wgrad: bool = True, **options: Any
) -> dict[str, Tensor]:
    """Compute the same as `run`, expert by expert in float64, with operands quantised where the definition says so."""
    spec = GLUSpec("silu", True, False, 1.702, 7.0)._replace(**options)
    weights, parts = ("rowwise", "rowwise") if compute == "fp8_rowwise" else ("128x128", "1x128")

    def q(x: Tensor, format: str) -> Tensor:
        return dequantize(reference.quantize(x, format), torch.float64)

    def wgrad(x: Tensor, y: Tensor, name: str) -> Tensor:
        if not fp8_wgrad:
            return x.T @ y
        formats = ("1x128", "128x128") if arguments[name].stride(-1) == 1 else ("128x128", "1x128")
        return q(x.T, formats[0]) @ q(y.T, formats[1]).T

    given = {name: x.double() if x.is_floating_point() else x for name, x in arguments.items()}
    hidden, ids, topk_weights, w_in, w_out = (
        given[x] for x in ("hidden", "topk_ids", "topk_weights", "w_gate_up", "w_down")
    )
    made = {name: torch.zeros_like(given[name]) for name in DIFFERENTIABLE if name in given}
    made["out"] = torch.zeros_like(hidden)
    for e in range(len(w_in)):
        t, k = (ids == e).nonzero(as_tuple=True)
        if not len(t):
            continue
        b_in = given["gate_up_bias"][e] if "gate_up_bias" in given else 0
        b_out = given["down_bias"][e] if "down_bias" in given else 0
        w, d = topk_weights[t, k, None], d_out.to(arguments["hidden"].dtype).double()[t]
        preact = q(hidden[t], parts) @ q(w_in[e], weights).T + b_in
        act = reference.activate(preact, None, spec)
        y = q(act, parts) @ q(w_out[e], weights).T + b_out
        made["out"].index_add_(0, t, w * y)
        d_act = q(d, parts) @ q(w_out[e].T, weights).T
        leaf = preact.clone().requires_grad_()
        (d_preact,) = torch.autograd.grad(reference.activate(leaf, None, spec), leaf, w * d_act)
        made["topk_weights"][t, k] = (act * d_act).sum(1) + (d * b_out).sum(1)
        made["hidden"].index_add_(0, t, q(d_preact, parts) @ q(w_in[e].T, weights).T)
        made["w_gate_up"][e] = wgrad(d_preact, hidden[t], "w_gate_up")
        made["w_down"][e] = wgrad(d, w * act, "w_down")
        if "down_bias" in given:
            made["gate_up_bias"][e], made["down_bias"][e] = d_preact.sum(0), (w * d).sum(0)
    return made
