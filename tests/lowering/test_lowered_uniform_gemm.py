"""The compiled code of the uniform kernel: WGMMA, TMA, no spills, shared memory that fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sm90 import HELION_1_5_0, SHARED_MEMORY, empty, lowered, requests

from moe_kernels.ops.batched import UNIFORM_GROUPED_GEMM
from moe_kernels.rules import uniform as rules


def compiled(
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, int, int, int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    columns: tuple[bool, bool] = (False, False),
    misaligned: bool = False,
    out_dtype: torch.dtype | None = None,
    rule: bool = True,
) -> dict[str, Any]:
    """Return the compiled kernel's report; with `rule`, of the rule's kernel even if torch.bmm is preferred."""
    if rule:
        monkeypatch.setattr(rules, "choose", rules.by_kernel)
    G, M, N, K = shape

    def operand(rows: int, cols: int, transposed: bool) -> torch.Tensor:
        if transposed:
            return empty(G, cols, rows + misaligned, dtype=dtype).narrow(2, 0, rows).mT
        return empty(G, rows, cols + misaligned, dtype=dtype).narrow(2, 0, cols)

    tensors = operand(M, K, columns[0]), operand(K, N, columns[1])
    (request,) = requests(UNIFORM_GROUPED_GEMM, tensors, (G, out_dtype or dtype))
    report = lowered(request)
    assert report["shared"] <= SHARED_MEMORY
    assert report["stack"] == 0
    return report


@pytest.mark.parametrize(
    ("shape", "columns"),
    [
        ((8, 2048, 64, 2048), (False, False)),
        ((8, 512, 64, 512), (False, True)),
        ((8, 4096, 4096, 4096), (False, False)),
        ((8, 4096, 4096, 4096), (False, True)),
        ((8, 4096, 4096, 4096), (True, False)),
    ],
    ids=str,
)
def test_everything_by_tma(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int, int], columns: tuple[bool, bool]
) -> None:
    report = compiled(monkeypatch, shape, columns=columns)
    assert report["code"].count("_desc.load(") == 2
    assert report["tma_load"] >= 2
    assert report["cp_async"] == 0
    assert report["wgmma"] > 0
    assert "gdc_launch_dependents" in report["code"]
    assert report["code"].index("gdc_wait") < report["code"].index("_desc.load(")
    assert report["name"] == "uniform_folded"


@pytest.mark.parametrize(
    ("shape", "kernel"),
    [
        ((8, 512, 8, 512), "uniform_folded"),
        ((8, 1000, 48, 1000), "uniform"),
        ((8, 500, 72, 520), "uniform"),
    ],
    ids=str,
)
def test_blocks_that_are_larger_than_a_tensor(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int, int], kernel: str
) -> None:
    report = compiled(monkeypatch, shape)
    assert report["code"].count("_desc.load(") == 2
    assert report["wgmma"] > 0
    assert report["name"] == kernel


@pytest.mark.parametrize("M", [2048, 2000])
def test_wide_outputs_of_four_bytes(monkeypatch: pytest.MonkeyPatch, M: int) -> None:
    report = compiled(monkeypatch, (2, M, 2048, 1024), out_dtype=torch.float32)
    assert report["wgmma"] > 0
    # Helion 1.5.1 stores by pointers if it cannot see that the tiles end where the tensor does.
    assert report["tma_store"] > 0 or not HELION_1_5_0
    assert report["name"] == ("uniform_folded" if M == 2048 else "uniform")


def test_two_programs_share_an_sm_where_there_are_more_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program occupies 1 KiB more than it requests."""
    shared = [compiled(monkeypatch, (8, M, 64, 2048), out_dtype=torch.float32)["shared"] + 1024 for M in (512, 2048)]
    assert 2 * shared[0] > 228 << 10 >= 2 * shared[1]


@pytest.mark.parametrize(
    ("shape", "dtype", "misaligned"),
    [
        ((8, 512, 256, 512), torch.float16, True),
        ((8, 512, 256, 512), torch.float32, False),
        ((4, 97, 259, 33), torch.float16, False),
        ((4, 97, 259, 33), torch.float32, True),
        ((3, 1, 1, 1), torch.float16, False),
    ],
    ids=str,
)
def test_other_tensors(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int, int], dtype: torch.dtype, misaligned: bool
) -> None:
    report = compiled(monkeypatch, shape, dtype=dtype, misaligned=misaligned)
    assert ("A_desc.load(" in report["code"]) == (not misaligned and shape[-1] == 512)


def test_more_than_2_to_the_31_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (5, 131_072, 4096, 4096)
    report = compiled(monkeypatch, shape)
    assert report["code"].count("_desc.load(") == 2
    report = compiled(monkeypatch, shape, misaligned=True)
    assert "_desc.load(" not in report["code"]
    assert "tl.int64" in report["code"]
