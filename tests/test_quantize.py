"""Quantising to fp8 and back, on CPU tensors through the reference: explicit definition, shapes, strides, errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_kernels import ScaledTensor, dequantize, ops, quantize, quantize_weight, reference
from moe_kernels.scaled import FORMATS, FP8_DTYPES

E4M3, E5M2 = FP8_DTYPES
NAN, INF = float("nan"), float("inf")


def blocks_of(shape: tuple[int, int], format: str) -> list[tuple[slice, slice]]:
    height, width = {"rowwise": (1, shape[1]), "1x128": (1, 128), "128x128": (128, 128)}[format]
    starts = [(r, k) for r in range(0, shape[0], height) for k in range(0, shape[1], width)]
    return [(slice(r, r + height), slice(k, k + width)) for r, k in starts]


def nearest_fp8(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the nearest fp8 numbers, found by comparing with all of them; ties go to even bits."""
    bits = torch.arange(256).to(torch.uint8)
    numbers = bits.view(dtype).double()
    kept = numbers.isfinite() & ~((numbers == 0) & (bits > 127))
    numbers, odd = numbers[kept], (bits[kept] & 1).double()
    distance = (values.double().flatten()[:, None] - numbers).abs()
    nearest = distance == distance.amin(1, keepdim=True)
    return numbers[torch.where(nearest, odd, 2.0).argmin(1)].view(values.shape)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_the_definition(format: str, dtype: torch.dtype, power_of_two: bool) -> None:
    x = torch.randn(131, 140, dtype=torch.bfloat16) * 2.0 ** torch.randint(-6, 6, (131, 140))
    data, scales, name = quantize(x, format, dtype=dtype, power_of_two=power_of_two)
    assert (name, data.dtype, scales.dtype, data.shape) == (format, dtype, torch.float32, x.shape)
    largest = {E4M3: 448.0, E5M2: 57344.0}[dtype]
    for (rows, columns), scale in zip(blocks_of((131, 140), format), scales.flatten(), strict=True):
        block = x[rows, columns].float()
        expected = block.abs().max() * torch.tensor(1 / largest)
        if power_of_two:
            expected = torch.tensor(2.0 ** math.ceil(math.log2(expected)))
        assert scale == expected
        assert torch.equal(data[rows, columns].double().abs(), nearest_fp8(block * (1 / scale), dtype).abs())
        assert torch.equal(data[rows, columns].float().signbit(), block.signbit())
        # e4m3 keeps 3 bits of the mantissa, e5m2 2.
        error = (dequantize(ScaledTensor(data, scales, format))[rows, columns] - block).abs()
        assert (error <= block.abs() * (2**-4 if dtype == E4M3 else 2**-3) + scale * 2**-9).all()


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_not_finite_spoils_its_block_alone(format: str) -> None:
    for bad in (NAN, INF, -INF):
        x = torch.ones(130, 200)
        x[1, 3] = bad
        data, scales, _ = made = quantize(x, format)
        rows, columns = next(block for block in blocks_of((130, 200), format) if block[0].stop > 1)
        values = dequantize(made)
        assert values[rows, columns].isnan().all()
        assert not data[rows, columns].float().any()
        assert scales.isnan().sum() == 1
        assert values.isnan().sum() == values[rows, columns].numel()
        assert (values[~values.isnan()] - 1).abs().max() < 1e-6


@pytest.mark.parametrize("format", ["rowwise", "1x128", "128x128"])
def test_of_whole_blocks_in_the_other_memory_order(format: str) -> None:
    x = torch.randn(2, 256, 384, dtype=torch.bfloat16)
    made, right = quantize(x.mT, format), quantize(x.mT.contiguous(), format)
    assert torch.equal(made.data.view(torch.uint8), right.data.view(torch.uint8)) and made.data.is_contiguous()
    assert torch.equal(made.scales, right.scales)


def test_zeros_and_what_is_smaller_than_the_smallest_scale() -> None:
    x = torch.tensor([[0.0, -0.0], [2.0**-100, 2.0**-103], [1e-45, -1e-45]])
    data, scales, _ = quantize(x, "rowwise")
    assert torch.equal(scales, torch.full((3, 1), 2.0**-100 * (1 / 448)))
    assert data.float().tolist() == [[0, 0], [448, 56], [0, 0]]
    assert (quantize(x, "rowwise", power_of_two=True).scales == 2.0**-108).all()


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_only_scales_above_a_power_of_two_are_rounded_up(dtype: torch.dtype) -> None:
    largest = torch.tensor(torch.finfo(dtype).max)
    x = torch.stack([largest / 2, largest, largest.nextafter(2 * largest), 2 * largest])[:, None]
    assert quantize(x, "rowwise", dtype=dtype, power_of_two=True).scales.flatten().tolist() == [0.5, 1, 2, 2]


def test_shapes_and_strides() -> None:
    for shape, format, scales, strides in [
        ((5, 300), "rowwise", (5, 1), (1, 1)),
        ((5, 300), "1x128", (5, 3), (1, 5)),
        ((130, 300), "128x128", (2, 3), (3, 1)),
        ((2, 130, 300), "rowwise", (2, 130, 1), (130, 1, 1)),
        ((2, 130, 300), "1x128", (2, 130, 3), (390, 1, 130)),
        ((2, 130, 300), "128x128", (2, 2, 3), (6, 3, 1)),
        ((5, 0), "rowwise", (5, 1), (1, 1)),
        ((5, 0), "1x128", (5, 0), None),
        ((0, 300), "128x128", (0, 3), None),
    ]:
        x = torch.randn(shape)
        made = quantize(x, format)
        assert (made.shape, made.scales.shape) == (shape, scales)
        assert made.data.is_contiguous()
        assert strides is None or made.scales.stride() == strides
        assert torch.equal(dequantize(made), dequantize(made.mT).mT)
        if x.numel():
            assert (dequantize(made) - x).abs().max() < x.abs().max() / 16


def test_a_transposed_weight_and_float64() -> None:
    weights = torch.randn(2, 70, 140)
    made = quantize(weights.mT, "128x128").mT
    right = quantize(weights, "128x128")
    assert torch.equal(made.scales, right.scales)
    assert torch.equal(made.data.float(), right.data.float())
    double = quantize(weights.double(), "1x128")
    assert torch.equal(double.data.float(), quantize(weights, "1x128").data.float())
    assert dequantize(made, torch.bfloat16).dtype == torch.bfloat16
    assert torch.equal(dequantize(made, torch.float64), dequantize(made).double())


def test_no_gradient() -> None:
    x = torch.randn(4, 130, requires_grad=True)
    for function in (quantize, reference.quantize):
        assert not any(part.requires_grad for part in function(x, "1x128")[:2])
    for compute in ("fp8_rowwise", "fp8_block"):
        assert not any(part.requires_grad for made in quantize_weight(x[None], compute)[1:] for part in made[:2])


@pytest.mark.parametrize("format", FORMATS)
def test_traced_and_without_memory(format: str) -> None:
    x = torch.randn(4, 2, 130)
    for tensor in (x[:, 0], x):
        meta, real = quantize(tensor.to("meta"), format), quantize(tensor, format)
        for a, b in zip(meta[:2], real[:2], strict=True):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        traced = torch.compile(lambda t: dequantize(quantize(t, format)), fullgraph=True, backend="aot_eager")
        assert torch.equal(traced(tensor), dequantize(real))
    torch.library.opcheck(torch.ops.moe_kernels.quantize.default, (x, format, E4M3, True))


def test_the_operator_is_the_reference() -> None:
    x = torch.randn(3, 300)
    data, scales = ops.quantize(x, "1x128", E5M2, False)
    right = reference.quantize(x, "1x128", dtype=E5M2)
    assert torch.equal(data.view(torch.uint8), right.data.view(torch.uint8))
    assert torch.equal(scales, right.scales)


REFUSALS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": [1.0]}, TypeError, r"x: expected a torch\.Tensor, got list"),
    ({"x": torch.ones(3, 4).int()}, TypeError, "x: expected one of .* got torch.int32"),
    ({"x": torch.ones(3, 4).to(E4M3)}, TypeError, "x: expected one of .* got torch.float8_e4m3fn"),
    ({"x": torch.ones(3)}, ValueError, r"x: expected shape \[R, K\] or \[G, R, K\], got \[3\]"),
    ({"x": torch.ones(1, 2, 3, 4)}, ValueError, r"x: expected shape .*got \[1, 2, 3, 4\]"),
    ({"format": ["1x128"]}, ValueError, "format: expected one of 'rowwise', '1x128', '128x128', got \\['1x128'\\]"),
    ({"format": "tensor"}, ValueError, "format: expected one of 'rowwise', '1x128', '128x128', got 'tensor'"),
    ({"dtype": torch.int8}, TypeError, "dtype: expected float8_e4m3fn or float8_e5m2, got torch.int8"),
]


@pytest.mark.parametrize(("change", "error", "text"), REFUSALS, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("function", [quantize, reference.quantize])
def test_quantize_refuses(function: Any, change: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        function(**{"x": torch.ones(3, 4), "format": "rowwise", **change})


GOOD = quantize(torch.ones(130, 4), "128x128")


@pytest.mark.parametrize(
    ("scaled", "dtype", "error", "text"),
    [
        (GOOD.data, torch.float32, TypeError, "scaled: expected a ScaledTensor, got Tensor"),
        (GOOD, torch.int32, TypeError, "dtype: expected bfloat16, .* got torch.int32"),
        (GOOD, "bfloat16", TypeError, "dtype: expected bfloat16, .* got 'bfloat16'"),
        (GOOD._replace(data=torch.ones(130, 4)), torch.float32, TypeError, "scaled.data: expected float8_e4m3fn or"),
        (GOOD._replace(scales=GOOD.scales.half()), torch.float32, TypeError, "scaled.scales: expected float32, got"),
        (GOOD._replace(format="x"), torch.float32, ValueError, "scaled.format: expected one of .* got 'x'"),
        (
            GOOD._replace(data=GOOD.data[0]),
            torch.float32,
            ValueError,
            r"scaled.data: expected shape \[..., R, K\], got",
        ),
        (
            GOOD._replace(scales=torch.ones(3, 1)),
            torch.float32,
            ValueError,
            r"scaled.scales: expected shape \[2, 1\] of '128x128' for data \[130, 4\], got \[3, 1\]",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_dequantize_refuses(scaled: Any, dtype: torch.dtype, error: type[Exception], text: str) -> None:
    for function in (dequantize, reference.dequantize):
        with pytest.raises(error, match=text):
            function(scaled, dtype)


@pytest.mark.parametrize("default", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("format", ["rowwise", "1x128", "128x128"])
def test_the_default_dtype_changes_nothing(format: str, default: torch.dtype) -> None:
    x = torch.randn(40, 200)
    expected = quantize(x, format)
    torch.set_default_dtype(default)
    try:
        found = quantize(x, format)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found.scales, expected.scales)
    assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("format", ["rowwise", "1x128", "128x128"])
def test_rows_that_only_the_data_tells_in_export(format: str, transposed: bool, strict: bool) -> None:
    class Chosen(torch.nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            scaled = quantize(x[mask], format)
            return dequantize(scaled.mT if transposed else scaled)

    x = torch.randn(9, 300)
    exported = torch.export.export(Chosen(), (x, torch.arange(9) < 5), strict=strict).module()
    for rows in (9, 2, 1, 0):
        mask = torch.arange(9) < rows
        out = exported(x, mask)
        assert torch.equal(out, Chosen()(x, mask)) and bool(out.any()) == (rows > 0)
