"""The compiled code of the kernels that quantise: loads and stores of 16 bytes, no spills, few registers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from sm90 import FP8_STACK, H200, empty, lowered, requests

from moe_kernels.glu import GLUSpec
from moe_kernels.ops.quantized import QUANTIZED_GROUPED_GEMM, QUANTIZED_MOE_MLP
from moe_kernels.ops.scaled import QUANTIZE, QUANTIZE_CONSTANT_ROWS
from moe_kernels.runtime import compile as compiler
from moe_kernels.runtime.plan import Request
from moe_kernels.runtime.signature import Operator

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
F32 = torch.float32


def report_of(operator: Operator, x: torch.Tensor, format: str, dtype: torch.dtype = E4M3) -> dict[str, Any]:
    (request,) = requests(operator, (x,), (format, dtype, False))
    report = lowered(request)
    whole = x.size(-1) % 16 == 0  # else it is stored byte by byte, each with its own address
    assert report["stack"] <= (FP8_STACK if whole else 4 * FP8_STACK)
    assert "div.rn.f32" in report["ptx"]
    assert f"cvt.rn.satfinite.{ {E4M3: 'e4m3x2', E5M2: 'e5m2x2'}[dtype] }.f32" in report["ptx"]
    assert not re.search(r"mul\.[\w.]*ftz|div\.full", report["ptx"])  # exact, and subnormals are not flushed
    return report


def transposing(weights: torch.Tensor) -> Request:
    """Return the launch that quantises the columns of weights `[E, N, K]` by their amax."""
    E, N, K = weights.shape
    tensors = (empty(64, N), None, weights, empty(E, K, dtype=torch.int32), empty(E + 1), None, None)
    return requests(QUANTIZED_GROUPED_GEMM, tensors, (True, False, torch.bfloat16, 1))[1]


def narrow_accesses(report: dict[str, Any]) -> list[str]:
    found = re.findall(r"(?:ld|st)\.global[\w.:]*", report["ptx"])
    return [access for access in found if ".v4" not in access]


@pytest.mark.parametrize(
    ("operator", "x", "format", "kernel"),
    [
        (QUANTIZE, empty(65536, 2880), "rowwise", "quantize_parts"),
        (QUANTIZE, empty(65536, 7168), "rowwise", "quantize_parts"),
        (QUANTIZE, empty(65536, 2048, dtype=F32), "rowwise", "quantize_parts"),
        (QUANTIZE, empty(65536, 14336), "rowwise", "quantize_parts"),
        (QUANTIZE, empty(65536, 18432), "rowwise", "quantize_parts"),
        (QUANTIZE, empty(8192, 28672, dtype=F32), "rowwise", "quantize_parts"),
        (QUANTIZE, empty(8192, 32784), "rowwise", "quantize_rows"),
        (QUANTIZE, empty(65536, 7168), "1x128", "quantize_parts"),
        (QUANTIZE, empty(600_000, 4096), "1x128", "quantize_parts"),  # more than 2^31 elements
        (QUANTIZE_CONSTANT_ROWS, empty(128, 1536, 2048), "128x128", "quantize_squares"),
        (QUANTIZE_CONSTANT_ROWS, empty(128, 2048, 1536).mT, "128x128", "quantize_squares"),
        (QUANTIZE_CONSTANT_ROWS, empty(128, 1536, 2048), "rowwise", "quantize_parts"),
        (QUANTIZE_CONSTANT_ROWS, empty(128, 2048, 1536).mT, "rowwise", "quantize_rows"),
        (QUANTIZE_CONSTANT_ROWS, empty(2048, 1536).mT, "1x128", "quantize_parts"),
    ],
)
def test_wide_accesses(operator: Operator, x: torch.Tensor, format: str, kernel: str) -> None:
    """Only stores of scales are narrower."""
    report = report_of(operator, x, format)
    assert report["name"] == kernel
    narrow = narrow_accesses(report)
    assert all(access.startswith("st.global") and access.endswith("b32") for access in narrow), narrow
    assert len(narrow) <= 2
    assert report["regs"] <= 128


@pytest.mark.parametrize("format", ["rowwise", "1x128", "128x128"])
@pytest.mark.parametrize("x", [empty(4096, 97), empty(600_000, 4099)], ids=["narrow", "int64"])
def test_any_width(x: torch.Tensor, format: str) -> None:
    assert report_of(QUANTIZE, x, format, E5M2)["regs"] <= 255


def read_too_early(sass: str) -> list[str]:
    """Return the instructions that take a 16-bit half from a register which does not hold one yet.

    ptxas 12.8 generates such code if pairs of fp8 values are stored both as a part of 32 bits and byte by byte.
    """
    writer: dict[str, str] = {}
    found = []
    for text in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?(\S.*?) ;", sass):
        half = re.match(r"LOP3\.LUT R\d+, (R\d+)(?:\.reuse)?, 0xffff, RZ", text)
        if half and writer.get(half[1]) not in ("PRMT", "F2FP"):
            found.append(text)
        if written := re.match(r"(\w+)\S* (R\d+)", text):
            writer[written[2]] = written[1]
    return found


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=str)
def test_no_half_is_read_too_early(dtype: torch.dtype, by_columns: bool) -> None:
    T, H, I, E, top_k = 4096, 2048, 768, 8, 2  # noqa: E741
    if by_columns:
        weights = empty(E, H, 2 * I, dtype=dtype).mT, empty(E, I, H, dtype=dtype).mT
    else:
        weights = empty(E, 2 * I, H, dtype=dtype), empty(E, H, I, dtype=dtype)
    slots = empty(T, top_k, dtype=torch.int64), empty(T, top_k, dtype=F32)
    maps = (empty(n, dtype=torch.int32) for n in (E + 1, T * top_k, T * top_k))
    tensors = (empty(T, H, dtype=dtype), *slots, *maps, weights[0], None, weights[1], None, None, None)
    layers = ((rowwise, False, True, GLUSpec("silu", True, False, 1.0, 1.0)) for rowwise in (False, True))
    reports = [lowered(request) for options in layers for request in requests(QUANTIZED_MOE_MLP, tensors, options)]
    if not by_columns:
        reports.append(lowered(transposing(weights[0])))
    x = empty(2048, 1536, dtype=dtype).mT
    reports += [
        lowered(*requests(QUANTIZE_CONSTANT_ROWS, (x,), (f, E4M3, False))) for f in ("rowwise", "1x128", "128x128")
    ]
    quantising = [report for report in reports if "quantize" in report["name"]]
    assert len({report["name"] for report in quantising}) == (5 if by_columns else 7)
    for report in quantising:
        assert "F2FP" in report["sass"]
        assert not read_too_early(report["sass"]), report["name"]


def test_numbers_share_generated_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of squares are not constants of the kernel: the code is shared, the arguments differ."""
    monkeypatch.setattr(compiler, "_hosts", {})
    weights = [empty(128, 1536, 2048), empty(8, 4096, 2048)]
    found = [requests(QUANTIZE_CONSTANT_ROWS, (w,), ("128x128", E4M3, False)) for w in weights]
    made = [compiler.lower(request, H200) for (request,) in found]
    assert len(compiler._hosts) == 1
    (first, one), (second, other) = made
    assert one.function is other.function
    assert first.grid != second.grid and first.arguments != second.arguments


def training_steps(H: int, I: int, E: int, rowwise: bool, dtype: torch.dtype = torch.bfloat16) -> list[Request]:  # noqa: E741
    """Return the launches of a forward pass in training."""
    weights = empty(E, 2 * I, H, dtype=dtype), empty(E, H, I, dtype=dtype)
    slots = empty(64, 8, dtype=torch.int64), empty(64, 8, dtype=F32)
    maps = (empty(n, dtype=torch.int32) for n in (E + 1, 512, 512))
    tensors = (empty(64, H, dtype=dtype), *slots, *maps, weights[0], None, weights[1], None, None, None)
    return requests(QUANTIZED_MOE_MLP, tensors, (rowwise, False, True, GLUSpec("silu", True, False, 1.0, 1.0)))


@pytest.mark.parametrize(
    ("H", "I", "E", "dtype"),
    [(2048, 768, 128, torch.bfloat16), (4096, 14336, 8, torch.bfloat16), (4096, 14336, 8, F32), (7168, 2048, 32, F32)],
)
def test_rows_and_amax_of_columns(H: int, I: int, E: int, dtype: torch.dtype) -> None:  # noqa: E741
    """Rows are loaded some stages ahead, and the next pass over the weights writes 16 bytes of a column at a time."""
    steps = training_steps(H, I, E, True, dtype)
    found = [lowered(step) for step in steps if step.kernel.name == "quantize_rows_and_amax"]
    assert len(found) == 2
    for report in found:
        assert report["stack"] == 0
        assert "cp.async.cg.shared.global" in report["ptx"]
        assert re.search(r"(?:atom|red)\.global\.gpu\.relaxed\.max\.s32", report["ptx"])
        assert [access[:9] for access in narrow_accesses(report)] == ["st.global"]  # of scales
    transposed = lowered(transposing(empty(E, 2 * I, H)))
    assert transposed["name"] == "quantize_transposed" and transposed["stack"] == 0 and transposed["regs"] <= 64
    assert sorted(access[:9] for access in narrow_accesses(transposed)) == ["ld.global", "st.global"]  # amax, scales


def test_weights_in_both_orders() -> None:
    """Weights of a layer trained in fp8 are read and written 16 bytes at a time in either order."""
    steps = training_steps(2048, 768, 128, False)
    squares = [step for step in steps if step.kernel.name == "quantize_squares"]
    assert len(squares) == 2
    for report in map(lowered, squares):
        assert report["stack"] == 0 and report["regs"] <= 72
        assert [access[:9] for access in narrow_accesses(report)] == ["st.global"]  # of scales
