"""Training steps of a layer in CUDA graphs: captured whole, by make_graphed_callables, and by torch.compile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels import MoE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("compute", [None, "fp8_rowwise", "fp8_block"]),
]
H, I, E, TOP_K = 512, 256, 16, 4  # noqa: E741


def layer(compute: str | None) -> MoE:
    return MoE(H, I, E, TOP_K, renormalize=True, compute=compute, device="cuda", dtype=torch.bfloat16)


def tokens(T: int) -> Tensor:
    return torch.randn(T, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def loss(out: Tensor) -> Tensor:
    return out.float().square().mean()


def step(module: MoE, x: Tensor, call: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """Return copies of the result and of all gradients."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    out = (module if call is None else call)(x)
    loss(out).backward()
    return [out.detach().clone(), *(leaf.grad.clone() for leaf in (x, *module.parameters()))]


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(bool(value.any()) for value in expected)
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)


def test_a_captured_step(compute: str | None) -> None:
    """Replays read other tokens, which have another routing, and other weights."""
    module, x = layer(compute), tokens(1000)
    eager = copy.deepcopy(module)
    # cuBLAS cannot be initialised in a capture: neither in this thread, nor in that of backward passes.
    F.linear(x, module.router).sum().backward()
    leaves = (x, *module.parameters())
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for leaf in leaves:
            leaf.grad.zero_()
        out = module(x)
        loss(out).backward()
    for factor in (1, 1.5):
        with torch.no_grad():
            x.copy_(tokens(1000))
            for weight, other in zip(module.parameters(), eager.parameters(), strict=True):
                weight.mul_(factor)
                other.mul_(factor)
        graph.replay()
        assert_same_bits([out.detach(), *(leaf.grad for leaf in leaves)], step(eager, x))


def test_make_graphed_callables(compute: str | None) -> None:
    module = layer(compute)
    eager = copy.deepcopy(module)
    graphed: Any = torch.cuda.make_graphed_callables(module, (tokens(512),))
    for _ in range(2):
        x = tokens(512)
        assert_same_bits(step(module, x, graphed), step(eager, x))


def test_compiled_with_cuda_graphs(compute: str | None) -> None:
    """The compiler may round the router's logits and the loss otherwise."""
    module = layer(compute)
    compiled = torch.compile(module, mode="reduce-overhead", fullgraph=True)
    for T in (256, 256, 256, 96, 96):
        torch.compiler.cudagraph_mark_step_begin()
        x = tokens(T)
        for found, expected in zip(step(module, x, compiled), step(module, x), strict=True):
            difference = (found.float() - expected.float()).norm()
            assert expected.any() and difference < 0.03 * expected.float().norm()
