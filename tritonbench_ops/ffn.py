"""A layer of experts, from hidden states, ids and topk_weights to its output: inputs, providers, check.

    out[t] = sum over k of topk_weights[t, k] * expert[topk_ids[t, k]](hidden[t])
    expert[e](x) = (silu(gate) * up) @ w_down[e]^T          gate, up = halves of x @ w_gate_up[e]^T

A call includes sorting the ids and, in training, the gradients of hidden states, topk_weights and both weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_kernels import moe_mlp
from moe_kernels.testing import assert_within_budget, flop_count
from moe_kernels.timing import Call

_CHECKED_TOKENS = 32  # in addition to one token of each expert
_PER_TOKEN, _PER_EXPERT = ("hidden", "topk_weights"), ("w_gate_up", "w_down")


@dataclass(frozen=True)
class Layer:
    """The inputs of a layer, and the gradient of its output; in training, the `leaves` require gradients."""

    hidden: Tensor  # [T, H]
    topk_ids: Tensor  # [T, top_k] int64
    topk_weights: Tensor  # [T, top_k]
    w_gate_up: Tensor  # [E, 2I, H], or [E, H, 2I] if transposed
    w_down: Tensor  # [E, H, I], or [E, I, H] if transposed
    d_out: Tensor  # [T, H], the gradient of the output
    transposed: bool = False

    @property
    def trains(self) -> bool:
        return self.hidden.requires_grad

    @property
    def leaves(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in (*_PER_TOKEN, *_PER_EXPERT)}

    @cached_property
    def sizes(self) -> list[int]:
        """The number of rows of each expert."""
        return self.topk_ids.flatten().bincount(minlength=len(self.w_down)).tolist()

    @cached_property
    def sample(self) -> Sample:
        return Sample(self)


def make_layer(
    hidden: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    *,
    trains: bool,
    transposed: bool = False,
) -> Layer:
    """Return a layer of these tensors and a random `d_out`; its `leaves` require gradients if `trains`."""
    generator = torch.Generator(hidden.device).manual_seed(2)
    d_out = torch.randn(hidden.shape, dtype=hidden.dtype, device=hidden.device, generator=generator)
    hidden, topk_weights, w_gate_up, w_down = (
        x.detach().requires_grad_(trains) for x in (hidden, topk_weights, w_gate_up, w_down)
    )
    return Layer(hidden, topk_ids, topk_weights, w_gate_up, w_down, d_out, transposed)


def work(layer: Layer, forward: bool = True, backward: bool = False) -> tuple[int, int]:
    """Return FLOPs of the products, and bytes: inputs read once, results written once, without ids and topk_weights.

    Weights of experts without rows are not counted; gradients of the weights are counted for all experts.
    """
    E, H = len(layer.w_down), layer.hidden.size(1)
    width = layer.w_down[0].numel() // H
    per_pass = 3 * flop_count(layer.sizes, width, H)
    filled = sum(size > 0 for size in layer.sizes)
    rows = 1 + forward + 2 * backward  # hidden, out, then d_out and d_hidden, each [T, H]
    elements = rows * layer.hidden.numel() + (filled + E * backward) * 3 * width * H
    return (forward + 2 * backward) * per_pass, elements * layer.hidden.dtype.itemsize


def ours(layer: Layer) -> Call:
    return lambda: moe_mlp(*_arguments(layer), layer.w_gate_up, layer.w_down, transposed=layer.transposed)


def transformers(layer: Layer) -> Call:
    """Return the experts of transformers (https://github.com/huggingface/transformers), on `torch._grouped_mm`."""
    forward, experts = _transformers(layer)
    return lambda: forward(experts, *_arguments(layer))


def compiled(layer: Layer) -> Call:
    """Return the experts of transformers under torch.compile, for these shapes alone."""
    forward, experts = _transformers(layer)
    forward = torch.compile(forward, fullgraph=True, dynamic=False)
    return lambda: forward(experts, *_arguments(layer))


def _arguments(layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
    return layer.hidden, layer.topk_ids, layer.topk_weights


def _transformers(layer: Layer) -> tuple[Callable[..., Tensor], nn.Module]:
    moe = import_module("transformers.integrations.moe")

    class Experts(nn.Module):
        def __init__(self, config: None):
            super().__init__()
            self.num_experts = len(layer.w_down)
            self.gate_up_proj, self.down_proj = layer.w_gate_up, layer.w_down
            self.act_fn = nn.SiLU()

    # The decorator adds the flags that the forward of the same version of transformers reads.
    decorate = moe.use_experts_implementation(is_transposed=layer.transposed)
    return moe.grouped_mm_experts_forward, decorate(Experts)(None)


def training(make: Callable[[Layer], Call]) -> Callable[[Layer], Call]:
    """Return a provider of the output and the four gradients, given one of the output alone."""

    def made(layer: Layer) -> Call:
        forward = make(layer)

        def call() -> dict[str, Tensor]:
            with torch.enable_grad():
                out = forward()
            return {"out": out.detach(), **gradients(layer, out)}

        return call

    return made


def gradients(layer: Layer, out: Tensor, retain_graph: bool = False) -> dict[str, Tensor]:
    """Return the gradients of hidden states, topk_weights and both weights, from the output."""
    grads = torch.autograd.grad(out, list(layer.leaves.values()), layer.d_out, retain_graph=retain_graph)
    return dict(zip(layer.leaves, grads, strict=True))


def expert(x: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """Compute one expert in plain PyTorch, [n, H] -> [n, H], from [2I, H] and [H, I]; row i times topk_weights[i]."""
    gate, up = (x @ w_gate_up.T).chunk(2, dim=1)
    return topk_weights[:, None] * ((F.silu(gate) * up) @ w_down.T)


class Sample:
    """Sampled tokens and experts, with the expected results for them in float64 and in the layer's own dtype.

    For `tokens`: `out`, and in training the gradients `hidden` and `topk_weights`, each `[S, ...]`. For `experts`, in
    training only: the gradients `w_gate_up` and `w_down`, each `[len(experts), ...]`.
    """

    def __init__(self, layer: Layer):
        T = len(layer.hidden)
        filled = [e for e, size in enumerate(layer.sizes) if size]
        spread = torch.linspace(0, T - 1, min(T, _CHECKED_TOKENS), dtype=torch.float64).round().long().tolist()
        first = [int((layer.topk_ids == e).any(1).nonzero()[0]) for e in filled]
        self.tokens = torch.tensor(sorted({*spread, *first}), device=layer.hidden.device)
        largest = max(filled, key=lambda e: layer.sizes[e])
        self.experts = sorted({filled[0], largest, filled[-1]}) if layer.trains else []
        self.exact = self._results(layer, torch.float64)
        self.plain = self._results(layer, layer.hidden.dtype)

    def _results(self, layer: Layer, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the results, summed over the experts in their order, as in the models of transformers."""
        ids = layer.topk_ids[self.tokens]
        out = layer.hidden.new_zeros(ids.size(0), layer.hidden.size(1), dtype=dtype)
        found = {"out": out}
        if layer.trains:
            found |= {"hidden": torch.zeros_like(out), "topk_weights": torch.zeros_like(ids, dtype=dtype)}
        for e in sorted(set(ids.flatten().tolist())):
            s, k = (ids == e).nonzero(as_tuple=True)
            y, *grads = _one(layer, e, self.tokens[s], k, dtype, _PER_TOKEN if layer.trains else ())
            out.index_add_(0, s, y)
            if grads:
                found["hidden"].index_add_(0, s, grads[0])
                found["topk_weights"][s, k] = grads[1]
        if layer.trains:
            for name in _PER_EXPERT:
                weight = getattr(layer, name)
                found[name] = weight.new_zeros(len(self.experts), *weight.shape[1:], dtype=dtype)
            for i, e in enumerate(self.experts):
                t, k = (layer.topk_ids == e).nonzero(as_tuple=True)
                _, found["w_gate_up"][i], found["w_down"][i] = _one(layer, e, t, k, dtype, _PER_EXPERT)
        return found

    def of(self, name: str, whole: Tensor) -> Tensor:
        """Return the sampled part of a provider's result `whole`."""
        return whole[torch.tensor(self.experts, device=whole.device) if name in _PER_EXPERT else self.tokens]


def _one(layer: Layer, e: int, t: Tensor, k: Tensor, dtype: torch.dtype, of: Sequence[str]) -> tuple[Tensor, ...]:
    """Return, in `dtype`, expert `e`'s part of the output of tokens `t`, as their choice `k`, and gradients of `of`."""
    w_gate_up, w_down = layer.w_gate_up[e], layer.w_down[e]
    values = {
        "hidden": layer.hidden[t],
        "topk_weights": layer.topk_weights[t, k],
        "w_gate_up": w_gate_up,
        "w_down": w_down,
    }
    leaves = {name: x.detach().to(dtype).requires_grad_(name in of) for name, x in values.items()}
    x, topk_weights, w_gate_up, w_down = leaves.values()
    with torch.enable_grad():
        y = (
            expert(x, topk_weights, w_gate_up.T, w_down.T)
            if layer.transposed
            else expert(x, topk_weights, w_gate_up, w_down)
        )
    grads = torch.autograd.grad(y, [leaves[name] for name in of], layer.d_out[t].to(dtype)) if of else ()
    return y.detach(), *grads


def check(results: Mapping[str, Tensor], layer: Layer) -> float:
    """Compare samples of `out`, and of gradients named after their inputs, with the error budget of plain PyTorch.

    Returns:
        The largest `||result - exact|| / ||exact||` of the results.

    Raises:
        AssertionError: a result is wrong; the text names it.
    """
    sample, worst = layer.sample, 0.0
    for name, whole in results.items():
        title = name if name == "out" else f"gradient of {name}"
        shape = (layer.hidden if name == "out" else layer.leaves[name]).shape
        if whole.shape != shape:
            raise AssertionError(f"{title}: expected shape {list(shape)}, got {list(whole.shape)}")
        x, exact = sample.of(name, whole.detach()), sample.exact[name]
        # The sums of absolute values, which bound rounding in float32, are some ten times as large as the results.
        assert_within_budget(x, sample.plain[name], exact, scale=16 * exact.abs().max().item(), name=title)
        worst = max(worst, ((x.double() - exact).norm() / exact.norm()).item())
    return worst
