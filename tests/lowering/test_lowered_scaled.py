"""The compiled code of fp8 products with scales: fp8 WGMMA, TMA, no spills, sums outside of the tensor cores."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from sm90 import FP8_STACK, SHARED_MEMORY, empty, lowered, ptxas_says, requests

from moe_kernels.ops.scaled import SCALED_GROUPED_GEMM

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def compiled(
    shape: tuple[int, int, int, int],
    block_scaled: bool,
    *,
    variant: str = "auto",
    fast: bool = False,
    bias: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    dtypes: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
    unaligned: tuple[str, ...] = (),
    spills: bool = False,
) -> dict[str, Any]:
    """Return the report of the product that a call with tensors like these compiles."""
    G, M, N, K = shape
    blocks = -(-K // 128)
    A, B = empty(M, K, dtype=dtypes[0]), empty(G, N, K, dtype=dtypes[1]).mT
    fp32 = torch.float32
    scales_A = empty(blocks * M, dtype=fp32) if block_scaled and blocks > 1 else empty(M, 1, dtype=fp32)
    scales_B = empty(G, -(-N // 128), blocks, dtype=fp32).mT if block_scaled else empty(G, N, 1, dtype=fp32).mT
    tensors = (A, scales_A, B, scales_B, empty(G + 1, dtype=torch.int32), empty(G, N) if bias else None)
    *_, product = requests(SCALED_GROUPED_GEMM, tensors, (out_dtype, variant, fast), unaligned)
    report = lowered(product)
    assert report["shared"] <= SHARED_MEMORY
    assert spills or report["stack"] <= FP8_STACK
    return report


def assert_fp8(report: dict[str, Any]) -> None:
    """Assert that tensor cores multiply in fp8, and that their instructions follow each other without a wait."""
    assert report["wgmma"] == len(
        re.findall(r"wgmma\.mma_async\S*\.m64n\d+k32\.f32\.e[45]m[23]\.e[45]m[23]", report["ptx"])
    )
    assert report["wgmma"] > 0 and report["mma_sync"] == 0
    assert "Potential Performance Loss" not in ptxas_says(report["ptx"])


def loads(report: dict[str, Any]) -> int:
    return len(re.findall(r"_desc\w*\.load\(", report["code"]))


@pytest.mark.parametrize("shape", [(8, 16384, 4096, 7168), (8, 16384, 2880, 2880), (128, 65536, 1536, 2048)], ids=str)
@pytest.mark.parametrize("block_scaled", [False, True], ids=["rowwise", "block-scaled"])
def test_promoted(shape: tuple[int, int, int, int], block_scaled: bool) -> None:
    """Each half of a tile is added to the sum, element by element; two programs fit on an SM."""
    report = compiled(shape, block_scaled)
    assert report["name"] == "promoted_persistent"
    assert_fp8(report)
    assert loads(report) == 3 and report["tma_load"] >= 3 and report["cp_async"] == 0
    assert report["ptx"].count("fma.rn.f32" if block_scaled else "add.rn.f32") >= 128
    assert 2 * (report["shared"] + 1024) <= 228 << 10
    assert report["grid"][0] == 2 * 132


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("shape", [(8, 16384, 4096, 7168), (8, 16384, 2880, 2880)], ids=str)
def test_fast(shape: tuple[int, int, int, int], bias: bool) -> None:
    report = compiled(shape, False, fast=True, bias=bias)
    assert report["name"] == "fast_persistent"
    assert_fp8(report)
    assert loads(report) == 2 and report["code"].count("out_desc.store(") == 2
    assert "flatten=True" in report["code"]
    assert "add.rn.f32" not in report["ptx"]


@pytest.mark.parametrize("block_scaled", [False, True], ids=["rowwise", "block-scaled"])
@pytest.mark.parametrize("rows", [1, 8, 20, 40])
def test_few_rows(rows: int, block_scaled: bool) -> None:
    """Weights are the left operand of WGMMA, and both operands are read by TMA."""
    report = compiled((128, 128 * rows, 1536, 2048), block_scaled)
    assert report["name"] == "scaled_jagged"
    assert_fp8(report)
    assert loads(report) == 2 and report["cp_async"] == 0
    assert report["ptx"].count("fma.rn.f32" if block_scaled else "add.rn.f32") >= 16


@pytest.mark.parametrize("block_scaled", [False, True], ids=["rowwise", "block-scaled"])
@pytest.mark.parametrize(("N", "width", "stages"), [(4096, 64, 4), (16384, 128, 3)])
def test_fewer_rows_than_a_tile(N: int, width: int, stages: int, block_scaled: bool) -> None:
    """Weights are read by TMA, as wide as with more rows, or half as wide in four stages if there are few tiles."""
    report = compiled((16, 8, N, 7168), block_scaled)
    assert report["name"] == "scaled_jagged"
    assert_fp8(report)
    assert loads(report) == 1
    barriers = report["shared"] - stages * (width + 16) * 128  # what loads need besides both operands of a stage
    assert 0 <= barriers <= 64


@pytest.mark.parametrize("fast", [False, True], ids=["", "fast"])
def test_other_dtypes(fast: bool) -> None:
    report = compiled((8, 16384, 1536, 2048), False, fast=fast, out_dtype=torch.float32, dtypes=(E5M2, E4M3), bias=True)
    assert_fp8(report)
    assert "e5m2.e4m3" in report["ptx"]


@pytest.mark.parametrize("variant", ["basic", "persistent"])
@pytest.mark.parametrize(("block_scaled", "fast"), [(False, False), (False, True), (True, False)])
def test_what_tma_cannot_read(variant: str, block_scaled: bool, fast: bool) -> None:
    """Rows that are no multiple of 16 bytes are copied for TMA if they are many."""
    assert loads(compiled((8, 128, 97, 259), block_scaled, variant=variant, fast=fast)) == 0
    assert loads(compiled((8, 4096, 256, 259), block_scaled, variant=variant, fast=fast)) >= 2


@pytest.mark.parametrize("unaligned", ["A", "B"])
@pytest.mark.parametrize("variant", ["basic", "persistent"])
def test_odd_addresses(variant: str, unaligned: str) -> None:
    M = 128 if unaligned == "A" else 1016  # with more rows, it would be copied
    report = compiled((8, M, 1536, 2048), True, variant=variant, unaligned=(unaligned,))
    assert f" {unaligned}_desc.load(" not in report["code"]


def test_weights_of_more_than_2_to_the_31_elements_keep_tma() -> None:
    assert loads(compiled((512, 512 * 128, 2048, 4096), True)) == 3


def test_large_spans_without_tma_are_addressed_in_64_bits() -> None:
    report = compiled((4, 600_000, 4099, 63), True, variant="persistent", spills=True)
    assert "tl.int64" in report["code"] and loads(report) == 0
