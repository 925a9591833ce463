"""The compiled code of float32 products: three tf32 products each, whose operands in registers are waited for."""

from __future__ import annotations

import pytest
import torch
from sm90 import TRITON, empty, lowered, requests, waits_for_each

from moe_kernels.glu import GLUSpec
from moe_kernels.ops.layer import SWIGLU_FFN
from moe_kernels.ops.products import GROUPED_GEMM, GROUPED_GEMM_WGRAD

BF16, FP32 = torch.bfloat16, torch.float32

columns = pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])


def weight(G: int, K: int, N: int, columns: bool, dtype: torch.dtype = FP32) -> torch.Tensor:
    """Return B `[G, K, N]`, of which rows or `columns` are contiguous."""
    return empty(G, N, K, dtype=dtype).mT if columns else empty(G, K, N, dtype=dtype)


@columns
@pytest.mark.parametrize(("left", "right"), [(FP32, FP32), (BF16, FP32)], ids=["float32", "bfloat16 and float32"])
@pytest.mark.parametrize(
    ("variant", "rows", "height"), [("auto", 4, 16), ("auto", 20, 32), ("auto", 64, 64), ("auto", 300, 128)]
)
def test_grouped_gemm(
    variant: str, rows: int, height: int, left: torch.dtype, right: torch.dtype, columns: bool
) -> None:
    tensors = empty(16 * rows, 2048, dtype=left), weight(16, 2048, 1536, columns, right), empty(17, dtype=torch.int32)
    (product,) = requests(GROUPED_GEMM, (*tensors, None), (FP32, variant))
    assert (product.kernel.name, product.precision) == ("jagged", "tf32x3")
    assert product.config.config["block_sizes"][0] == height
    report = lowered(product)
    spills = TRITON == (3, 7) and (height, left, columns) == (16, FP32, False)
    assert report["stack"] <= (16 if spills else 0)
    # Each sum of a block of K is three products; WGMMA needs 64 rows.
    assert report["wgmma"] % 3 == report["mma_sync"] % 3 == 0
    assert (report["wgmma"] > 0, report["mma_sync"] > 0) == (height >= 64, height < 64)
    assert waits_for_each(report["ptx"])


@columns
@pytest.mark.parametrize("right", [FP32, BF16], ids=["float32", "float32 and bfloat16"])
@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("variant", ["basic", "persistent"])
def test_strides_that_tma_cannot_read(variant: str, rows: int, right: torch.dtype, columns: bool) -> None:
    offsets, bias = empty(5, dtype=torch.int64), empty(4, 97)
    tensors = empty(4 * rows, 259, dtype=FP32), weight(4, 259, 97, columns, right), offsets, bias
    *_, product = requests(GROUPED_GEMM, tensors, (BF16, variant))
    report = lowered(product)
    assert product.precision == "tf32x3" and report["tma_load"] == report["stack"] == 0
    assert report["wgmma"] + report["mma_sync"] > 0 and waits_for_each(report["ptx"])


@columns
def test_persistent(columns: bool) -> None:
    tensors = empty(4096, 2048, dtype=FP32), weight(16, 2048, 1536, columns), empty(17, dtype=torch.int32), None
    *_, product = requests(GROUPED_GEMM, tensors, (FP32, "persistent"))
    report = lowered(product)
    assert (product.kernel.name, product.precision) == ("jagged_persistent", "tf32x3")
    assert report["stack"] == 0 and report["wgmma"] > 0 and waits_for_each(report["ptx"])


@columns
@pytest.mark.parametrize(("rows", "kernel"), [(4, "swiglu"), (20, "swiglu"), (40, "jagged"), (300, "jagged")])
def test_first_half(rows: int, kernel: str, columns: bool) -> None:
    """With many rows, the product and the activation have kernels of their own."""
    tensors = empty(16 * rows, 2048, dtype=FP32), empty(17, dtype=torch.int32), weight(16, 2048, 1536, columns)
    spec = GLUSpec("silu", True, False, 1, 1)
    product, *others = requests(SWIGLU_FFN, (*tensors, None, None, None), (False, False, spec))
    assert [one.kernel.name for one in others] == ([] if kernel == "swiglu" else ["activate"])
    assert (product.kernel.name, product.precision) == (kernel, "tf32x3")
    report = lowered(product)
    assert report["stack"] == 0 and report["wgmma"] + report["mma_sync"] > 0
    assert waits_for_each(report["ptx"])


def test_weight_gradients_multiply_without_tensor_cores() -> None:
    tensors = empty(4096, 2048, dtype=FP32), empty(4096, 1536, dtype=FP32), empty(17, dtype=torch.int32)
    *_, product = requests(GROUPED_GEMM_WGRAD, tensors, (FP32,))
    report = lowered(product)
    assert product.precision == "ieee"
    assert report["wgmma"] == report["mma_sync"] == report["stack"] == 0
