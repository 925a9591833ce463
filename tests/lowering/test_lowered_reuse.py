"""Generated code is reused for other extents and strides: launches must be those of code generated for them alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sm90 import H200, empty, requests
from test_lowered_layer import LAYER_OPTIONS, UNROUTED, f32, i32

from moe_kernels.ops.layer import MOE_MLP
from moe_kernels.ops.products import GROUPED_GEMM, GROUPED_GEMM_WGRAD
from moe_kernels.ops.scaled import QUANTIZE, SCALED_GROUPED_GEMM
from moe_kernels.runtime import compile as compiler
from moe_kernels.runtime.plan import Request

matmul = torch.backends.cuda.matmul
BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
# Groups, contracted and result columns; rows of 131 elements are no multiple of 16 bytes.
EXTENTS = [(1, 512, 512), (1, 131, 259), (8, 512, 512), (8, 131, 259), (4, 512, 512)]


def products(G: int, K: int, N: int) -> list[Request]:
    asked_for = []
    for groups in ((), (G,)):  # one weight for all groups, or one per group
        for B in (empty(*groups, K, N), empty(*groups, N, K).mT):
            for variant in ("basic", "persistent"):
                asked_for += requests(GROUPED_GEMM, (empty(4096, K), B, i32(G + 1), None), (BF16, variant))
    return asked_for


def gradients(G: int, K: int, N: int) -> list[Request]:
    asked_for = requests(GROUPED_GEMM_WGRAD, (empty(4096, K), empty(4096, N), i32(G + 1)), (BF16,))
    before = matmul.fp32_precision
    for matmul.fp32_precision in ("ieee", "tf32"):
        tensors = f32(4096, K), f32(4096, N), i32(G + 1)
        asked_for += requests(GROUPED_GEMM_WGRAD, tensors, (FP32,))
    matmul.fp32_precision = before
    return asked_for


def scaled_products(G: int, K: int, N: int) -> list[Request]:
    A, B, offsets = empty(4096, K, dtype=FP8), empty(G, N, K, dtype=FP8).mT, i32(G + 1)
    squares = -(-K // 128), -(-N // 128)
    by_block = f32(4096 * squares[0]), f32(G, *squares[::-1]).mT
    by_row = f32(4096, 1), f32(G, N, 1).mT
    return [
        request
        for scales_A, scales_B in (by_row, by_block)[: 1 if K <= 128 else 2]
        for request in requests(SCALED_GROUPED_GEMM, (A, scales_A, B, scales_B, offsets, None), (BF16, "auto", False))
    ]


def layers(E: int, H: int, I: int) -> list[Request]:  # noqa: E741
    asked_for, top_k = [], min(E, 2)
    for T in (1, 16, 4096):
        slots = empty(T, top_k, dtype=torch.int64), f32(T, top_k)
        parameters = empty(E, 2 * I, H), empty(E, H, I), None, None, None, None
        tensors = empty(T, H), *slots, *UNROUTED, *parameters
        asked_for += requests(MOE_MLP, tensors, LAYER_OPTIONS)
    return asked_for


def layouts(G: int, K: int, N: int) -> list[Request]:
    """Products and quantisation of operands of few and of very many rows, with all kinds of strides."""
    asked_for = []
    for M in (48, 2**31 // K):
        padded = [empty(M, K + extra).narrow(1, 0, K) for extra in (0, 3, 8)]
        for A in (*padded, empty(M, 2 * K)[:, ::2], empty(K, M).mT, empty(M, 1).expand(M, K)):
            B = empty(G, N, K + 8).narrow(2, 0, K).mT
            asked_for += requests(GROUPED_GEMM, (A, B, i32(G + 1), None), (BF16, "basic"))
            asked_for += requests(QUANTIZE, (A,), ("rowwise", FP8, False))
    return asked_for


def launch(request: Request) -> str:
    """Return the launch, which names its binary by a hash of the generated code and of its specialization."""
    return repr(compiler.lower(request, H200)[0])


@pytest.mark.parametrize("calls", [products, layouts, gradients, scaled_products, layers])
def test_launches_are_those_of_a_new_process(
    calls: Callable[[int, int, int], list[Request]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for = {repr(request): request for extents in EXTENTS for request in calls(*extents)}
    monkeypatch.setattr(compiler, "_hosts", {})
    reused = {name: launch(request) for name, request in asked_for.items()}
    assert len(compiler._hosts) < len(asked_for)
    for name, request in asked_for.items():
        compiler._hosts.clear()
        assert reused[name] == launch(request)
