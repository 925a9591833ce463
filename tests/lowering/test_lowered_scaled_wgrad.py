"""The compiled code of products in fp8 that are ragged along the contraction: WGMMA, TMA, no spills, wide stores."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from sm90 import FP8_STACK, TRITON_3_6, empty, lowered, ptxas_says, requests

from moe_kernels.ops.quantized import QUANTIZED_GROUPED_GEMM, QUANTIZED_WGRAD
from moe_kernels.ops.scaled import SCALED_WGRAD

I32 = torch.int32
SIZES = [(32768, 7168, 4096, 32), (8192, 14336, 4096, 8), (65536, 1536, 2048, 128), (16384, 2880, 97, 32)]


def reports_of(
    M: int, P: int, Q: int, G: int, dtype: torch.dtype = torch.bfloat16, top_k: int = 1
) -> list[dict[str, Any]]:
    """Return the reports of the launches, in their order; X are tokens if `top_k` is more than 1."""
    slots = empty(M, dtype=I32) if top_k > 1 else None
    tensors = (empty(M // top_k, P), empty(M, Q), empty(G + 1, dtype=I32), slots, None)
    return [lowered(request) for request in requests(QUANTIZED_WGRAD, tensors, (dtype, top_k))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Sums are taken from the tensor cores after each step, element by element; two programs fit on an SM.

    All registers are in use: with Triton 3.7 and later, a few values are spilled around the loop.
    """
    report = reports_of(*sizes, dtype)[-1]
    assert_in_fp8(report, "e4m3", stack=0 if TRITON_3_6 else 56)
    assert report["ptx"].count("fma.rn.f32") >= (128 if sizes[2] >= 128 else 64)


def assert_in_fp8(report: dict[str, Any], y_type: str, stack: int) -> None:
    assert report["name"] == "scaled_wgrad"
    assert report["stack"] <= stack
    fp8 = re.findall(rf"wgmma\.mma_async\S*\.m64n\d+k32\.f32\.e4m3\.{y_type}", report["ptx"])
    assert len(fp8) == report["wgmma"] > 0 and report["mma_sync"] == 0
    assert "Potential Performance Loss" not in ptxas_says(report["ptx"])
    assert len(re.findall(r"_desc\w*\.load\(", report["code"])) == 3 and report["cp_async"] == 0
    assert 2 * (report["shared"] + 1024) <= 228 << 10
    assert report["grid"][0] == 2 * 132


@pytest.mark.parametrize("fast", [False, True], ids=["exact", "fast"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rowwise_products(sizes: tuple[int, int, int, int], fast: bool) -> None:
    """Exact sums are taken from the tensor cores after each step; data in fp8 are copied in 16 bytes at a time."""
    M, P, Q, G = sizes
    dtypes = torch.float8_e4m3fn, torch.float8_e5m2
    x, y = (empty(M * C, dtype=dtype) for C, dtype in zip((P, Q), dtypes, strict=True))
    scales_X, scales_Y = (empty(G, C, dtype=torch.float32) for C in (P, Q))
    options = (torch.bfloat16, fast)
    tensors = (x, scales_X, y, scales_Y, empty(G + 1, dtype=I32))
    table, *copies, report = [lowered(request) for request in requests(SCALED_WGRAD, tensors, options)]
    assert table["name"] == "tile_table"
    for copy in copies:
        assert copy["name"] == "pad_columns" and copy["stack"] == 0
        assert re.findall(r"st\.global[\w.:]*", copy["ptx"]) == ["st.global.v4.b32"] * 2
    assert_in_fp8(report, "e5m2", stack=0 if TRITON_3_6 else 56)
    assert (report["ptx"].count("add.rn.f32") >= (128 if Q >= 128 else 64)) == (not fast)


@pytest.mark.parametrize("top_k", [1, 8], ids=["rows", "tokens"])
def test_quantising(top_k: int) -> None:
    """Accesses have 16 bytes, except for the tile list, the map and scales; four elements are transposed at once."""
    table, *columns, _ = reports_of(32768, 4096, 2048, 32, top_k=top_k)
    assert table["name"] == "tile_table"
    assert [report["name"] for report in columns] == ["quantize_columns"] * 2
    for report in columns:
        assert report["stack"] == 0
        assert report["regs"] <= (80 if TRITON_3_6 else 128)
        assert "cvt.rn.satfinite.e4m3x2.f32" in report["ptx"] and "atom" not in report["ptx"]
        accesses = re.findall(r"(?:ld|st)\.global[\w.:]*", report["ptx"])
        assert sum(".v4" in access for access in accesses) >= 4, accesses
        assert all("b8" not in access and "b16" not in access for access in accesses), accesses
        assert not re.search(r"(?:ld|st)\.shared\.(?:v2\.)?b8\b", report["ptx"])


def test_large_spans() -> None:
    """The rows, or the result, have more than 2^31 elements."""
    assert "tl.int64" in reports_of(600_000, 4096, 128, 8)[1]["code"]
    report = reports_of(256, 65536, 65536, 2)[-1]
    assert report["name"] == "scaled_wgrad" and "tl.int64" in report["code"]


@pytest.mark.parametrize(
    ("rowwise", "fast"), [(True, True), (True, False), (False, False)], ids=["rowwise, fast", "rowwise", "block"]
)
def test_gradients_of_rows(rowwise: bool, fast: bool) -> None:
    """The weights in these products are quantised in the other order."""
    w_down = empty(32, 7168, 2048)  # as stored
    tensors = (empty(4096, 7168), None, w_down, None, empty(33, dtype=I32), empty(32768, dtype=I32), None)
    options = (rowwise, fast, torch.bfloat16, 8)
    found = [lowered(request) for request in requests(QUANTIZED_GROUPED_GEMM, tensors, options)]
    names = ["scatter_quantized", "quantize_rows" if rowwise else "quantize_squares", "tile_table"]
    assert [report["name"] for report in found] == [*names, f"{'fast' if fast else 'promoted'}_persistent"]
    assert all(report["stack"] <= FP8_STACK for report in found)
