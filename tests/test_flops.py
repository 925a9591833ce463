"""`moe_kernels.flops`: PyTorch's counter of floating-point operations counts the operators' products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import moe_kernels.flops  # noqa: F401
from moe_kernels import (
    MoE,
    ScaledTensor,
    grouped_gemm,
    grouped_gemm_wgrad,
    grouped_mm,
    moe_mlp,
    quantize,
    swiglu_ffn,
    uniform_grouped_gemm,
    varied_grouped_gemm,
)

OPERATORS = torch.ops.moe_kernels
G, M, K, N, T, TOP_K, H, I = 3, 20, 32, 48, 10, 2, 64, 16  # noqa: E741
OFFSETS = torch.tensor([0, 7, 7, 20], dtype=torch.int32)
OF_A_LAYER = 2 * T * TOP_K * (2 * I * H + I * H)  # forward, with gate and up


def counted(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    total: int = counter.get_total_flops()
    return total


def layer(**options: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, H, generator=generator).bfloat16().requires_grad_()
    topk_ids = torch.randint(G, (T, TOP_K), generator=generator)
    topk_weights = torch.rand(T, TOP_K, generator=generator)
    weights = [torch.randn(*shape, generator=generator).bfloat16() for shape in ((G, 2 * I, H), (G, H, I))]
    for weight in weights:
        weight.requires_grad_()
    return moe_mlp(hidden, topk_ids, topk_weights, *weights, **options)


def test_products() -> None:
    A, B, d_out = torch.randn(M, K), torch.randn(G, K, N), torch.randn(M, N)
    each = 2 * M * K * N
    assert counted(lambda: grouped_gemm(A, B, OFFSETS)) == each
    assert counted(lambda: grouped_gemm(A, B[0], OFFSETS)) == each
    assert counted(lambda: grouped_mm(A, B, offs=OFFSETS[1:])) == each
    assert counted(lambda: grouped_gemm_wgrad(A, d_out, OFFSETS)) == each
    assert counted(lambda: uniform_grouped_gemm(A[:18], B, G)) == 2 * 18 * K * N
    shapes = [(3, 5, 7), (11, 2, 4)]
    pairs = [(torch.randn(m, k), torch.randn(k, n)) for m, n, k in shapes]
    assert counted(lambda: varied_grouped_gemm(*map(list, zip(*pairs, strict=True)))) == sum(
        2 * m * n * k for m, n, k in shapes
    )
    assert counted(lambda: swiglu_ffn(A, torch.randn(G, 2 * N, K), OFFSETS)) == 2 * each
    gate, up = torch.randn(2, G, N, K)
    assert counted(lambda: swiglu_ffn(A, gate, OFFSETS, w_up=up)) == 2 * each
    ids = torch.zeros(M, 1, dtype=torch.int64)
    assert counted(lambda: moe_mlp(A, ids, torch.ones(M, 1), gate, B, w_up=up)) == 3 * each


def test_gradients_take_twice_as_many() -> None:
    A, B = torch.randn(M, K, requires_grad=True), torch.randn(G, K, N, requires_grad=True)
    assert counted(lambda: grouped_gemm(A, B, OFFSETS).sum().backward()) == 3 * 2 * M * K * N
    assert counted(lambda: grouped_gemm(A.detach(), B, OFFSETS).sum().backward()) == 2 * 2 * M * K * N


@pytest.mark.parametrize(
    "options", [{}, {"compute": "fp8_block"}, {"compute": "fp8_rowwise"}, {"compute": "fp8_block", "fp8_wgrad": False}]
)
def test_layers(options: dict[str, Any]) -> None:
    with torch.no_grad():
        assert counted(lambda: layer(**options)) == OF_A_LAYER
    assert counted(lambda: layer(**options)) == OF_A_LAYER
    assert counted(lambda: layer(**options).sum().backward()) == 3 * OF_A_LAYER


def test_layers_with_weights_in_fp8() -> None:
    moe = MoE(H, I, G, TOP_K, renormalize=True)
    x = torch.randn(T, H)
    router = 2 * T * H * G
    assert counted(lambda: moe(x)) == router + OF_A_LAYER
    moe.quantize("fp8_block")
    with torch.no_grad():
        assert counted(lambda: moe(x)) == router + OF_A_LAYER


def test_operands_with_scales() -> None:
    A, W = quantize(torch.randn(M, K), "rowwise"), quantize(torch.randn(G, N, K), "rowwise")
    assert isinstance(A, ScaledTensor)
    assert counted(lambda: grouped_gemm(A, W.mT, OFFSETS)) == 2 * M * K * N
    x = torch.randn(M, K).to(torch.float8_e4m3fn), torch.ones(G, K)
    y = torch.randn(M, N).to(torch.float8_e4m3fn), torch.ones(G, N)
    assert counted(lambda: OPERATORS.scaled_wgrad(*x, *y, OFFSETS, torch.bfloat16, False)) == 2 * M * K * N


def test_every_operator_with_a_product_has_a_formula() -> None:
    from torch.utils.flop_counter import flop_registry

    names = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("moe_kernels::")}
    without = {name for name in names if getattr(OPERATORS, name.partition("::")[2]) not in flop_registry}
    moves = {"choose_experts", "route", "scatter_rows", "combine_rows", "dot_rows"}
    elementwise = {"activate", "activate_backward", "first_order"}
    elementwise |= {"quantize", "quantize_weight"}
    assert {name.partition("::")[2] for name in without} == moves | elementwise


def test_torch_compile_weighs_the_operators() -> None:
    """The partitioner estimates how long an operator takes by the same formulas."""
    A, B = torch.randn(M, K, requires_grad=True), torch.randn(G, K, N, requires_grad=True)
    compiled = torch.compile(lambda: grouped_gemm(A, B, OFFSETS).sum(), backend="aot_eager")
    assert counted(lambda: compiled().backward()) == 3 * 2 * M * K * N
