"""Rows, offsets and biases with few elements, but so far apart in memory that their addresses need 64 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from building import run
from torch import Tensor

from moe_kernels import (
    grouped_gemm,
    grouped_gemm_wgrad,
    grouped_mm,
    permute,
    quantize,
    reference,
    route,
    swiglu_ffn,
    topk_sigmoid,
    unpermute,
)
from moe_kernels.kernels.permute import scatter_scaled
from moe_kernels.ops import scaled_grouped_gemm
from moe_kernels.runtime.plan import Builder
from moe_kernels.runtime.symbolic import SymbolicTensor
from moe_kernels.testing import (
    assert_grouped_gemm_close,
    assert_scaled_grouped_gemm_close,
    assert_within_budget,
    make_inputs,
)

_Spread = Callable[[Tensor], Tensor]


@pytest.fixture
def spread(device: str, tmp_path: Path) -> Iterator[_Spread]:
    """Return a function that copies its argument into a view that spans more than 2^31 elements."""

    def spread(x: Tensor) -> Tensor:
        row = (2**31 // (len(x) - 1) // 16 + 1) * 16
        elements = (len(x) - 1) * row + x[0].numel()
        if device == "cpu":  # a sparse file takes no memory
            memory = torch.from_file(str(tmp_path / "memory"), shared=True, size=elements, dtype=x.dtype)
        else:
            torch.use_deterministic_algorithms(False)  # filling this with NaN takes long
            memory = torch.empty(elements, dtype=x.dtype, device=device)
        return memory.as_strided(x.shape, (row, *x[0].stride())).copy_(x)

    yield spread
    torch.cuda.empty_cache()  # other tests run at the same time


ROWS = pytest.mark.parametrize("rows", [5, 250], ids=["basic", "persistent"])


@ROWS
def test_offsets(rows: int, spread: _Spread, device: str) -> None:
    A, B, group_offsets = make_inputs([rows, 0, rows + 20, 250], 32, 64, dtype=torch.float16, device=device)
    far = spread(group_offsets)
    assert_grouped_gemm_close(grouped_gemm(A, B, far), A, B, group_offsets)
    assert_grouped_gemm_close(grouped_mm(A, B, offs=far[1:]), A, B, group_offsets)
    w = B.mT.contiguous()
    assert_as(reference.swiglu_ffn, swiglu_ffn(A, w, far), A, w, group_offsets)
    small = A * A.size(0) ** -0.5
    assert_as(reference.grouped_gemm_wgrad, grouped_gemm_wgrad(A, small, far), A, small, group_offsets)


@ROWS
def test_bias(rows: int, spread: _Spread, device: str) -> None:
    A, B, group_offsets = make_inputs([rows, 0, rows + 20, rows], 32, 64, dtype=torch.float16, device=device)
    bias = torch.randn(4, 32, device=device).half()
    far = spread(bias)
    out = grouped_mm(A, B, offs=group_offsets[1:], bias=far)
    assert_as(reference.grouped_linear, out, A, B, group_offsets, bias, None)
    w = B.mT.contiguous()
    act = swiglu_ffn(A, w, group_offsets, gate_up_bias=far)
    assert_as(partial(reference.swiglu_ffn, gate_up_bias=bias), act, A, w, group_offsets)


@pytest.mark.parametrize("rows", [3, 20, 70, 250])
def test_rows(rows: int, spread: _Spread, device: str) -> None:
    A, B, group_offsets = make_inputs([rows, rows + 2], 32, 64, dtype=torch.float16, device=device)
    far = spread(A)
    assert_grouped_gemm_close(grouped_gemm(far, B, group_offsets), A, B, group_offsets)
    w = B.mT.contiguous()
    assert_as(reference.swiglu_ffn, swiglu_ffn(far, w, group_offsets), A, w, group_offsets)


def test_logits(spread: _Spread, device: str) -> None:
    logits, bias = torch.randn(5, 8, device=device), torch.randn(8, device=device)
    for given in ((spread(logits), bias), (logits, spread(bias))):
        ids, topk_weights = topk_sigmoid(given[0], 3, renormalize=True, bias=given[1])
        assert torch.equal(ids, reference.topk_ids(logits, bias, 3, False, 1, 1))
        torch.testing.assert_close(topk_weights, reference.topk_weights(logits, ids, False, True, 1.0))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 300], ids=["basic", "persistent"])
def test_weights_of_more_than_2_30_elements(rows: int, device: str) -> None:
    K, N = 4096, 263_168
    B = torch.empty(2, N, K, dtype=torch.bfloat16, device=device).normal_().mT
    A = torch.randn(2 * rows, K, device=device).bfloat16()
    group_offsets = torch.tensor([0, rows, 2 * rows], dtype=torch.int32, device=device)
    out = grouped_gemm(A, B, group_offsets)
    for columns in (slice(64), slice(N - 64, N)):
        assert_grouped_gemm_close(out[:, columns], A, B[:, :, columns], group_offsets)


@pytest.mark.parametrize(
    ("formats", "rows", "part"), [(("rowwise", "rowwise"), 70, "scales"), (("1x128", "128x128"), 3, "data")], ids=str
)
def test_rows_in_fp8(formats: tuple[str, str], rows: int, part: str, spread: _Spread, device: str) -> None:
    A, B, group_offsets = make_inputs([rows, rows + 2], 32, 160, dtype=torch.float16, device=device)
    left, right = quantize(A, formats[0]), quantize(B.mT, formats[1]).mT
    far = left._replace(**{part: spread(getattr(left, part))})
    assert_scaled_grouped_gemm_close(grouped_gemm(far, right, group_offsets), left, right, group_offsets)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("formats", "variant"), [(("rowwise", "rowwise"), "basic"), (("1x128", "128x128"), "persistent")], ids=str
)
def test_offsets_and_bias_in_fp8(formats: tuple[str, str], variant: str, spread: _Spread, device: str) -> None:
    A, B, group_offsets = make_inputs([70, 5, 1], 32, 160, dtype=torch.float16, device=device)
    left, right = quantize(A, formats[0]), quantize(B.mT, formats[1]).mT
    bias = torch.randn(3, 32, device=device).half()
    operands, options = (*left[:2], *right[:2]), (torch.bfloat16, variant, False)
    out = scaled_grouped_gemm(*operands, spread(group_offsets), bias, *options)
    assert_scaled_grouped_gemm_close(out, left, right, group_offsets, bias)
    out = scaled_grouped_gemm(*operands, group_offsets, spread(bias), *options)
    assert_scaled_grouped_gemm_close(out, left, right, group_offsets, bias)


def test_rows_that_are_quantised(spread: _Spread, device: str) -> None:
    x = torch.randn(5, 160, device=device).half()
    made, expected = quantize(spread(x), "1x128"), quantize(x, "1x128")
    assert torch.equal(made.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(made.scales, expected.scales)


def test_columns_that_are_moved(spread: _Spread, device: str) -> None:
    """Here the elements of one row are far apart."""
    ids = torch.randint(0, 4, (12, 2), device=device)
    routing = route(ids, torch.rand(12, 2, device=device), 4)
    hidden = torch.randn(40, 12, device=device)
    assert torch.equal(permute(spread(hidden).mT, routing), reference.permute(hidden.mT, routing))
    rows = torch.randn(40, 24, device=device)
    assert torch.equal(unpermute(spread(rows).mT, routing), reference.unpermute(rows.mT, routing))


def test_columns_that_are_moved_and_quantised(spread: _Spread, device: str) -> None:
    hidden = torch.randn(160, 12, device=device).half()
    routing = reference.route(torch.randint(0, 4, (12, 2), device=device), torch.ones(12, 2, device=device), 4)

    def steps(builder: Builder, tokens: SymbolicTensor, *order: SymbolicTensor) -> tuple[SymbolicTensor, ...]:
        return scatter_scaled(builder, tokens, *order, 2, "1x128")

    order = {"slot_to_row": routing.slot_to_row, "group_offsets": routing.group_offsets}
    data, scales = run(steps, {"tokens": spread(hidden).mT, **order})
    expected = reference.quantize(reference.permute(hidden.mT, routing), "1x128")
    assert torch.equal(data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(scales, expected.scales)


def assert_as(function: Callable[..., Tensor], out: Tensor, *args: Any) -> None:
    """Assert that `out` agrees with `function(*args)`."""
    in_float64 = (x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)
    exact = function(*in_float64)
    assert_within_budget(out, function(*args), exact, scale=16 * exact.abs().amax().item())


def test_slots(spread: _Spread, device: str) -> None:
    ids = torch.randint(0, 4, (12, 1), device=device)
    topk_weights = torch.rand(12, 1, device=device)
    expected = reference.route(ids, topk_weights, 4)
    far = spread(ids)
    for topk_ids in (ids, far):
        routing = route(topk_ids, topk_weights, 4)
        assert all(torch.equal(a, b) for a, b in zip(routing, expected, strict=True))
    hidden = torch.randn(12, 40, device=device)
    moved = permute(hidden, routing._replace(slot_to_row=spread(routing.slot_to_row)))
    assert torch.equal(moved, reference.permute(hidden, expected))
