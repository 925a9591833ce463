"""The compiled code of a layer with fp8 weights: the kernels that quantise their results."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from sm90 import FP8_STACK, HELION_1_5_0, empty, lowered, requests

from moe_kernels.glu import GLUSpec
from moe_kernels.ops.scaled import SCALED_MOE_MLP
from moe_kernels.runtime.plan import Request
from moe_kernels.scaled import scales_shape

E4M3, F32 = torch.float8_e4m3fn, torch.float32


def launches(
    T: int,
    H: int,
    I: int,  # noqa: E741
    E: int,
    top_k: int,
    format: str,
    spec: GLUSpec,
    bias: bool = False,
    fast: bool = False,
) -> list[Request]:
    W = 2 * I if spec.gated else I
    weights = []
    for shape in ((E, W, H), (E, H, I)):
        weights += [empty(*shape, dtype=E4M3), empty(*scales_shape(shape, format), dtype=F32)]
    routed = (empty(T, H), empty(T, top_k, dtype=torch.int64), empty(T, top_k, dtype=F32))
    biases = (empty(E, W), empty(E, H)) if bias else (None, None)
    return requests(SCALED_MOE_MLP, (*routed, None, None, None, *weights, *biases), (format == "rowwise", fast, spec))


def quantising(found: list[Request]) -> dict[str, dict[str, Any]]:
    reports = {}
    for request in found:
        if "quantize" in request.kernel.name:
            report = reports[request.kernel.name] = lowered(request)
            assert report["stack"] == 0
            assert "cvt.rn.satfinite.e4m3x2.f32" in report["ptx"]
            assert "div.rn.f32" in report["ptx"]
    return reports


def narrow_accesses(report: dict[str, Any]) -> list[str]:
    found = re.findall(r"(?:ld|st)\.global[\w.:]*", report["ptx"])
    return [access for access in found if ".v4" not in access]


SILU = GLUSpec("silu", True, False, 1.702, 7.0)
GPT_OSS = GLUSpec("clamped_swiglu", True, True, 1.702, 7.0)
RELU = GLUSpec("relu_squared", False, False, 1.702, 7.0)
LAYERS = {
    "dsv3": (8192, 7168, 2048, 32, 8),
    "mixtral, few tokens": (16, 4096, 14336, 8, 2),
}


@pytest.mark.parametrize("format", ["rowwise", "128x128"])
@pytest.mark.parametrize("layer", LAYERS)
def test_wide_accesses_and_no_spills(layer: str, format: str) -> None:
    """All have 16 bytes, except accesses to scales and to the positions of a token's slots."""
    reports = quantising(launches(*LAYERS[layer], format, SILU))
    assert len(reports) == 2
    for report in reports.values():
        narrow = narrow_accesses(report)
        assert all(access.endswith("b32") for access in narrow), narrow
        assert len(narrow) <= 1 + 2 * LAYERS[layer][4]
        assert report["regs"] <= 72


@pytest.mark.parametrize(
    ("layer", "spec"),
    [((4096, 2880, 2880, 32, 4), GPT_OSS), ((4096, 200, 97, 5, 2), RELU), ((600_000, 4096, 1024, 8, 2), SILU)],
)
@pytest.mark.parametrize("format", ["rowwise", "128x128"])
def test_any_activation_and_width(layer: tuple[int, int, int, int, int], format: str, spec: GLUSpec) -> None:
    """This includes odd extents, and more than 2^31 elements."""
    reports = quantising(launches(*layer, format, spec, bias=True))
    assert set(reports) == {"scatter_quantized", "activate_quantized"}
    assert all(report["regs"] <= 255 for report in reports.values())


def test_products_of_a_layer_are_those_of_fp8() -> None:
    for T, many in ((8192, True), (16, False)):
        for format, fast in (("rowwise", False), ("128x128", False), ("rowwise", True)):
            name = f"{'fast' if fast else 'promoted'}_persistent" if many else "scaled_jagged"
            every = launches(T, 2048, 768, 16, 8, format, SILU, fast=fast)
            found = [request for request in every if request.kernel.name == name]
            assert len(found) == 2
            for request in found:
                report = lowered(request)
                assert ("add.rn.f32" in report["ptx"]) == (format == "rowwise" and not fast)
                assert report["stack"] <= FP8_STACK
                assert report["tma_load"] >= 2
                assert "wgmma.mma_async.sync.aligned" in report["ptx"]
                assert ".f32.e4m3.e4m3" in report["ptx"]


@pytest.mark.parametrize(
    ("layer", "format", "spec"),
    [
        ((1, 2048, 768, 128, 8), "128x128", SILU),
        ((1, 4096, 14336, 8, 2), "rowwise", SILU),
        ((1, 7168, 2048, 256, 8), "128x128", SILU),  # more than 2^31 elements
        ((1, 97, 50, 4, 1), "rowwise", GPT_OSS),
    ],
)
def test_one_token(layer: tuple[int, int, int, int, int], format: str, spec: GLUSpec) -> None:
    """Two kernels read weights and activations 16 bytes at a time, and exchange only sums between warps."""
    found = launches(*layer, format, spec, bias=spec is GPT_OSS)
    assert [request.kernel.name for request in found] == ["first_half", "second_half"]
    for request in found:
        report = lowered(request)
        assert report["stack"] <= (0 if HELION_1_5_0 else 8)
        assert report["regs"] <= (64 if HELION_1_5_0 else 72)
        assert report["shared"] <= 4096
        assert "cvt.rn.f16x2.e4m3x2" in report["ptx"]
        if layer[1] % 16 == 0:
            loads = re.findall(r"ld\.global[\w.:]*", report["ptx"])
            assert loads.count("ld.global.v4.b32") >= 3
            assert not [load for load in loads if load.endswith(("b8", "b16"))]
