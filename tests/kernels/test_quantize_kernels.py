"""Quantising, bit for bit as its twin does: sizes, strides, and values at the limits of the floating-point range."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from building import run
from torch import Tensor

from moe_kernels import ScaledTensor, quantize, quantize_weight, reference
from moe_kernels.kernels.quantize import (
    plan_quantize,
    plan_quantize_and_amax,
    plan_quantize_transposed,
    quantize_squares,
)
from moe_kernels.rules import quantize as rules
from moe_kernels.runtime.plan import Builder
from moe_kernels.runtime.symbolic import SymbolicTensor
from moe_kernels.scaled import FORMATS, FP8_COMPUTE, FP8_DTYPES

E4M3, E5M2 = FP8_DTYPES
NAN, INF = float("nan"), float("inf")


def assert_as_twin(x: Tensor, format: str, **options: Any) -> ScaledTensor:
    made, right = quantize(x, format, **options), reference.quantize(x, format, **options)
    for name, width in (("data", torch.uint8), ("scales", torch.int32)):
        a, b = getattr(made, name), getattr(right, name)
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()), name
        wrong = a.contiguous().view(width) != b.contiguous().view(width)
        assert not wrong.any(), f"{name}: {int(wrong.sum())} of {wrong.numel()} differ, first {wrong.nonzero()[0]}"
    return made


def spread(R: int, K: int, dtype: torch.dtype, device: str) -> Tensor:
    """Return random values with a different magnitude in each row and column."""
    powers = torch.randint(-6, 6, (R, 1)) + torch.randint(-3, 3, (1, K))
    return (torch.randn(R, K) * 2.0**powers).to(dtype).to(device)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {}),
        (torch.float16, {"dtype": E5M2}),
        (torch.float32, {"power_of_two": True}),
        (torch.bfloat16, {"dtype": E5M2, "power_of_two": True}),
    ],
    ids=str,
)
def test_as_the_twin(format: str, dtype: torch.dtype, options: dict[str, Any], device: str) -> None:
    made = assert_as_twin(spread(129, 300, dtype, device), format, **options)
    assert (made.data.view(torch.uint8) & 0x7F != 0).float().mean() > 0.5


SPECIAL = {
    "zeros": [0.0],
    "negative zeros": [-0.0, 0.0],
    "subnormals": [1e-40, -3e-39, 1e-45],
    "subnormals of float16": [2.0**-24, -3 * 2.0**-24, 2.0**-15 - 2.0**-24],
    "tiny": [1e-38, 2e-39, -1e-38],
    "below the smallest scale": [2.0**-100, 2.0**-101, -(2.0**-99)],
    "largest of bfloat16": [3.38e38, -1e38, 1.0],
    "largest of float32": [3.4028234663852886e38, -1.7e38],
    "largest of fp8": [448.0, -448.0, 17.0, 0.001],
    "next to the largest of fp8": [448 + 2.0**-15, -448.0],
    "halfway": [448.0, 9.5, 10.5, 11.5, 0.0009765625, 0.0029296875, 0.0048828125],
    "NaN": [1.0, NAN, 2.0],
    "infinity": [1.0, INF],
    "minus infinity": [-INF, 0.0],
    "all": [NAN, INF, -INF, 0.0],
    "one": [1.0],
}


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"power_of_two": True},
    {"dtype": E5M2},
    {"dtype": E5M2, "power_of_two": True},
)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("dtype", "interpreted"),
    [(torch.float32, OPTIONS[1:3]), (torch.bfloat16, OPTIONS[::3]), (torch.float16, OPTIONS[::2])],
    ids=["float32", "bfloat16", "float16"],
)
def test_special_values(format: str, dtype: torch.dtype, interpreted: tuple[dict[str, Any], ...], device: str) -> None:
    """Each kind has a row, or for squares a group; in "1x128" the second part of a row is ordinary."""
    rows = []
    for values in SPECIAL.values():
        row = torch.tensor(values).repeat(-(-129 // len(values)))[:129]
        if format == "1x128":
            row = torch.cat([row[:128], torch.randn(72)])
        rows.append(row)
    x = torch.stack(rows).to(dtype).to(device)
    if format == "128x128":
        x = torch.stack([row.expand(3, -1) for row in x])
    ends = ~x.cpu().isfinite().flatten(1).all(1)
    for options in interpreted if device == "cpu" else OPTIONS:
        made = assert_as_twin(x, format, **options)
        first = made.scales[..., 0].cpu().flatten()
        assert torch.equal(first.isnan(), ends)
        if format == "1x128":
            assert made.scales[:, 1].isfinite().all()
        data = made.data.float().cpu().flatten(1)[:, :128]
        assert not data.isnan().any()
        assert not data[ends].any()
        ordinary = [list(SPECIAL).index(name) for name in ("halfway", "one", "largest of bfloat16")]
        assert torch.equal(data[ordinary].any(1), ~ends[ordinary])


@pytest.mark.parametrize("format", FORMATS)
def test_sizes(format: str, device: str) -> None:
    for R, K in [(0, 16), (1, 1), (17, 1), (1, 16), (129, 16), (17, 127), (1, 128), (17, 128), (129, 129), (3, 2880)]:
        assert_as_twin(spread(R, K, torch.bfloat16, device), format)
    for shape in [(0, 3, 130), (3, 0, 130), (3, 5, 0)]:
        assert_as_twin(torch.zeros(shape, device=device), format)
    assert_as_twin(torch.zeros(5, 0, device=device), format)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_weights_and_strides(format: str, dtype: torch.dtype, device: str) -> None:
    weights = spread(3 * 130, 200, dtype, device).view(3, 130, 200)
    assert_as_twin(weights, format)
    made = assert_as_twin(weights.mT, format).mT
    assert made.shape == weights.shape
    assert_as_twin(weights[1].t(), format)
    assert_as_twin(weights[1, ::2, 1:131], format)
    assert_as_twin(weights[:, 1, ::3], format)
    assert_as_twin(weights[0, :1].expand(5, 200), format)
    assert_as_twin(weights[1:2, :, :130].transpose(0, 1), format)


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_squares_in_both_orders(dtype: torch.dtype, by_columns: bool, device: str) -> None:
    for G, R, K in [(2, 136, 130), (1, 128, 256), (2, 7, 8)]:
        x = spread(G * R, K, dtype, device).view(G, R, K)
        x = x.mT.contiguous().mT if by_columns else x

        def steps(builder: Builder, x: SymbolicTensor) -> tuple[SymbolicTensor, ...]:
            other_order = builder.alloc(x.mT.shape, E4M3)
            return *plan_quantize(builder, (x,), ("128x128", E4M3, False), other_order), other_order

        data, scales, other_order = run(steps, {"x": x}, groups=G)
        right = reference.quantize(x, "128x128")
        assert torch.equal(scales, right.scales)
        assert torch.equal(data.view(torch.uint8), right.data.view(torch.uint8))
        assert torch.equal(other_order.mT.view(torch.uint8), right.data.view(torch.uint8))


def test_no_scale_is_written_behind_the_last(device: str) -> None:
    x = torch.randn(1, 256, 200, device=device)
    data, scales = torch.empty_like(x, dtype=E4M3), torch.full((8,), NAN, device=device)

    def steps(builder: Builder, data: SymbolicTensor, scales: SymbolicTensor, x: SymbolicTensor) -> None:
        squares = scales.as_strided((1, 2, 2), (4, 2, 1), 0)
        builder.launch(quantize_squares, (data, None, squares, x, 448.0, False), rules.SQUARES)

    run(steps, {"data": data, "scales": scales, "x": x})
    assert torch.equal(scales[:4].view(2, 2), reference.quantize(x[0], "128x128").scales)
    assert scales[4:].isnan().all()


def test_long_rows(device: str) -> None:
    """A tile holds a row of the first two widths, and no tile one of the third."""
    for K in (rules.AT_ONCE + 8, rules.AT_ONCE_ALONE, rules.AT_ONCE_ALONE + 8):
        x = spread(6, K, torch.bfloat16, device)
        x[3, -1], x[4, 0], x[5] = NAN, INF, 0.0
        assert_as_twin(x, "rowwise")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("G", "R", "K"), [(2, 130, 264), (3, 5, 1), (1, 1, 72), (2, 128, 130), (1, 300, 16), (2, 7, 8)]
)
def test_rows_and_then_columns(G: int, R: int, K: int, dtype: torch.dtype, device: str) -> None:
    """Rows are quantised together with amax of the columns, and columns by that, as their twins."""
    x = spread(G * R, K, dtype, device).view(G, R, K)
    x[0, -1, 0], x[-1, R // 2, K // 2] = 0.0, INF
    if R > 4:
        x[0, :, -1], x[0, 3], x[0, 1, 0] = 0.0, 0.0, NAN
        x[0, 2] *= torch.finfo(dtype).smallest_normal
    assert rules.finds_amax(x)

    def steps(builder: Builder, x: SymbolicTensor) -> tuple[SymbolicTensor, ...]:
        *of_rows, amax = plan_quantize_and_amax(builder, x)
        return *of_rows, *plan_quantize_transposed(builder, x, amax), amax

    *made, amax = run(steps, {"x": x}, groups=G)
    finite = x.isfinite().all(1)
    assert torch.equal(amax.view(torch.float32)[finite], x.float().abs().amax(1)[finite])
    for data, scales, right in zip(made[::2], made[1::2], (x, x.mT), strict=True):
        twin = reference.quantize(right, "rowwise")
        assert torch.equal(data.view(torch.uint8), twin.data.view(torch.uint8))
        assert torch.equal(scales.view(torch.int32), twin.scales.view(torch.int32))


def test_strided_rows_and_then_columns(device: str) -> None:
    x = spread(3 * 140, 3 * 200, torch.bfloat16, device).view(3, 140, 600)[1:, ::2, 40:241]
    data, scales, amax = run(plan_quantize_and_amax, {"x": x}, groups=2)
    twin = reference.quantize(x, "rowwise")
    assert torch.equal(data.view(torch.uint8), twin.data.view(torch.uint8)) and torch.equal(scales, twin.scales)
    data, scales = run(plan_quantize_transposed, {"x": x, "amax": amax}, groups=2)
    twin = reference.quantize(x.mT, "rowwise")
    assert torch.equal(data.view(torch.uint8), twin.data.view(torch.uint8)) and torch.equal(scales, twin.scales)


@pytest.mark.parametrize("compute", FP8_COMPUTE)
def test_weights_in_both_orders(compute: str, device: str) -> None:
    """Of all memory orders, with rows that no tile holds, and without elements."""
    weights = [
        spread(2 * 130, 264, torch.bfloat16, device).view(2, 130, 264),
        spread(2 * 72, 130, torch.float32, device).view(2, 72, 130).mT,
        spread(2 * 6, rules.AT_ONCE + 8, torch.bfloat16, device).view(2, 6, -1)[:, ::2],
        torch.empty(2, 0, 16, device=device),
        torch.empty(0, 8, 16, device=device),
    ]
    for weight in weights:
        weight[:1, :1] = 0.0
        weight[1:, 1:, 1:2] = NAN
        made = quantize_weight(weight, compute)
        assert made.weight is weight
        for part, x in ((made.forward, weight), (made.backward, weight.mT)):
            twin = reference.quantize(x, FP8_COMPUTE[compute])
            assert part.format == twin.format and part.data.is_contiguous()
            assert torch.equal(part.data.view(torch.uint8), twin.data.view(torch.uint8))
            assert torch.equal(part.scales.view(torch.int32), twin.scales.view(torch.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("R", "K"), [(5000, 7168), (70_000, 2880), (300, 20_000), (300, 40_000)])
def test_sizes_of_models(format: str, R: int, K: int, device: str) -> None:
    x = torch.randn(R, K, device=device, dtype=torch.bfloat16)
    x[R // 2, K // 2] = NAN
    made = assert_as_twin(x, format)
    again = quantize(x, format)
    for a, b in zip(made[:2], again[:2], strict=True):
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_more_than_2_to_the_31_elements(format: str, device: str) -> None:
    R, K = 600_000, 4099
    x = torch.randn(100, K, device=device, dtype=torch.bfloat16).expand(R // 100, 100, K).reshape(R, K)
    made = quantize(x, format)
    last = R // 128 * 128 - 128 * 100  # the start of a block, past 2^31 elements
    start = quantize(x[last:], format)
    assert torch.equal(made.data[last:].view(torch.uint8), start.data.view(torch.uint8))
    assert torch.equal(made.scales[last // 128 if format == "128x128" else last :], start.scales)


@pytest.mark.gpu
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_weights_of_more_than_2_to_the_31_elements(format: str, by_columns: bool, device: str) -> None:
    torch.use_deterministic_algorithms(False)  # filling these tensors with NaN takes long
    weights = torch.empty(270, 2048, 4096, device=device, dtype=torch.bfloat16).normal_()
    weights = weights.mT if by_columns else weights
    made = quantize(weights, format)
    for g in (0, 135, 269):
        right = reference.quantize(weights[g], format)
        assert torch.equal(made.data[g].view(torch.uint8), right.data.view(torch.uint8))
        assert torch.equal(made.scales[g], right.scales)


@pytest.mark.gpu
def test_graph_replay(device: str) -> None:
    x = spread(40, 300, torch.bfloat16, device)
    for format in FORMATS:
        quantize(x, format)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = quantize(x, format)
        x.copy_(spread(40, 300, torch.bfloat16, device))
        graph.replay()
        right = reference.quantize(x, format)
        assert torch.equal(made.data.view(torch.uint8), right.data.view(torch.uint8))
        assert torch.equal(made.scales, right.scales)
