"""What the compiler makes of the kernels around the grouped GEMM: TMA and WGMMA in wgrad, no spills anywhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from sm90 import compile_for_sm90, ptxas_says, stand_ins

from moe_kernels.form import Form
from moe_kernels.kernels import activation, grouped_gemm, grouped_wgrad, launch, one_token, permute, route, swiglu_ffn

SHARED_MEMORY = 232_448  # bytes that a block can have on an H200


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the launchers would compile."""
    asked_for: list[Any] = []

    def note(kernel: Any, args: Any, config: Any, *, wide: bool = False, tf32: bool = False, **_: Any) -> Any:
        asked_for.append((launch._variant(kernel, wide, tf32), args, config))
        return lambda *_: None

    monkeypatch.setattr(grouped_gemm, "compile_kernel", note)
    for module in (activation, grouped_wgrad, one_token, permute, route, swiglu_ffn):
        monkeypatch.setattr(module, "compile_kernel", note)
        monkeypatch.setattr(module, "_plans", {})
    return asked_for


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def lean_reports(asked_for: list[Any]) -> list[dict[str, Any]]:
    reports = [compile_for_sm90(*asked) for asked in asked_for]
    for report in reports:
        assert report["shared"] <= SHARED_MEMORY
        assert report["stack"] == 0
    return reports


def wgrad_report(
    asked_for: list[Any], M: int, P: int, Q: int, G: int, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    with stand_ins():
        offsets = empty(G + 1, dtype=torch.int32)
        grouped_wgrad._plan(empty(M, P, dtype=dtype), empty(M, Q, dtype=dtype), offsets, empty(G, P, Q, dtype=dtype))
    return lean_reports(asked_for)[0]


@pytest.mark.parametrize(
    ("M", "P", "Q", "G"),
    [
        (65536, 2048, 1536, 128),
        (65536, 768, 128, 128),  # columns of X on the long side
        (8192, 4096, 28672, 8),
        (65536, 2048, 1536, 2048),  # offsets clamped beforehand
        (600_000, 4096, 4096, 512),  # more than 2^31 elements everywhere
    ],
)
def test_wgrad(asked_for: list[Any], M: int, P: int, Q: int, G: int) -> None:
    report = wgrad_report(asked_for, M, P, Q, G)
    assert report["code"].count("_desc.load(") == 2
    assert report["tma_load"] >= 2
    assert report["wgmma"] > 0


@pytest.mark.parametrize(
    ("M", "P", "Q", "dtype"),
    [
        (4096, 97, 259, torch.bfloat16),
        (40, 512, 512, torch.bfloat16),
        (4096, 1, 512, torch.bfloat16),
        (4096, 512, 512, torch.float32),
        (600_000, 4099, 4095, torch.bfloat16),
    ],
)
def test_wgrad_without_tma(asked_for: list[Any], M: int, P: int, Q: int, dtype: torch.dtype) -> None:
    report = wgrad_report(asked_for, M, P, Q, 8, dtype)
    assert "_desc.load(" not in report["code"]


@pytest.mark.parametrize(("R", "E"), [(8, 128), (4096, 512), (5000, 8), (65536, 128), (327_680, 512), (10**7, 1024)])
def test_route(asked_for: list[Any], R: int, E: int) -> None:
    with stand_ins():
        i32 = torch.int32
        route.launch(empty(R, dtype=torch.int64), empty(E + 1, dtype=i32), empty(R, dtype=i32), empty(R, dtype=i32))
    assert len(lean_reports(asked_for)) == (1 if R <= route.RANK_UP_TO else 2)


@pytest.mark.parametrize(("T", "top_k", "H"), [(1, 8, 2048), (8192, 8, 2048), (4096, 2, 4096), (8192, 10, 7168)])
def test_moves(asked_for: list[Any], T: int, top_k: int, H: int) -> None:
    with stand_ins():
        rows, tokens, topk_weights = empty(T * top_k, H), empty(T, H), empty(T, top_k, dtype=torch.float32)
        indices = (empty(T * top_k, dtype=torch.int32), empty(129, dtype=torch.int32), top_k)
        permute.launch(permute.scatter_rows, (rows, tokens, None), *indices)
        permute.launch(permute.combine_rows, (tokens, rows, topk_weights), *indices)
        permute.launch(permute.dot_rows, (topk_weights, tokens, rows), *indices)
    for report in lean_reports(asked_for):
        assert report["shared"] < 1024


@pytest.mark.parametrize(
    ("H", "I", "E", "top_k"), [(2048, 768, 128, 8), (4096, 14336, 8, 2), (7168, 2048, 256, 8), (97, 50, 4, 1)]
)
def test_one_token(asked_for: list[Any], H: int, I: int, E: int, top_k: int) -> None:  # noqa: E741
    with stand_ins():
        form = Form("silu", True, False, 1.0, 1.0)
        slots = empty(top_k, dtype=torch.int64), empty(top_k, dtype=torch.float32)
        weights = (*form.halves(empty(E, 2 * I, H).mT, None), empty(E, H, I).mT)
        one_token.launch(empty(1, H), empty(top_k, I), empty(1, H), *slots, *weights, None, None, None, form)
    first, second = lean_reports(asked_for)
    if H % 16 == 0:
        assert "ld.global.v4" in first["ptx"]
        assert "ld.global.v4" in second["ptx"]


@pytest.mark.parametrize("name", ["silu", "gelu", "clamped_swiglu"])
@pytest.mark.parametrize(("R", "width"), [(65536, 768), (8192, 14336)])
def test_activation(asked_for: list[Any], R: int, width: int, name: str) -> None:
    with stand_ins():
        d_h, h, d_act, weighted = empty(R, 2 * width), empty(R, 2 * width), empty(R, width), empty(R, width)
        dots, weights = empty(R, dtype=torch.float32), empty(R, dtype=torch.float32)
        order = empty(R, dtype=torch.int32), empty(129, dtype=torch.int32)
        halves = [x.narrow(1, start, width) for x in (h, d_h) for start in (0, width)]
        gate, up, d_gate, d_up = halves
        form = (name, 1.702, 7.0)
        activation.launch(activation.activate, (d_act, gate, up), *form)
        activation.launch(activation.activate_backward, (d_gate, d_up, gate, up, d_act), *form)
        tensors = (d_gate, d_up, weighted, dots, gate, up, d_act, weights, *order)
        activation.launch(activation.weighted_backward, tensors, *form)
    for report in lean_reports(asked_for):
        assert report["regs"] <= 128


@pytest.mark.parametrize(
    ("keep", "bias", "top_k"), [(False, False, 0), (True, False, 8), (False, True, 8), (True, True, 0)]
)
def test_swiglu_of_many_rows(asked_for: list[Any], keep: bool, bias: bool, top_k: int) -> None:
    report = swiglu_report(asked_for, 65536, 2048, 768, 128, keep=keep, bias=bias, top_k=top_k)
    assert report["code"].count("_desc.load(") == (1 if top_k else 2)
    assert report["code"].count("_desc.store(") == (3 if keep else 1)
    assert report["wgmma"] > 0
    assert "flatten=True" in report["code"]
    assert "serialized" not in ptxas_says(report["ptx"])


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("R", [8, 128, 512, 4096, 8192])
def test_swiglu_of_few_tokens(asked_for: list[Any], R: int, columns: bool) -> None:
    report = swiglu_report(asked_for, R, 2048, 768, 128, top_k=8, columns=columns)
    assert report["code"].count("_desc.load(") == 2
    assert report["cp_async"] > 0


@pytest.mark.parametrize("E", [8192, 4096], ids=["basic", "persistent"])
def test_swiglu_of_more_than_2_to_the_31_elements_of_tokens(asked_for: list[Any], E: int) -> None:
    """Of odd rows, which TMA cannot read."""
    report = swiglu_report(asked_for, 600_000, 4099, 64, E, top_k=1)
    assert "tl.int64" in report["code"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("M", "H", "I"), [(65536, 97, 259), (4096, 2048, 768), (100, 64, 64)])  # fmt: skip
def test_swiglu_of_other_shapes(asked_for: list[Any], M: int, H: int, I: int, dtype: torch.dtype) -> None:  # noqa: E741
    swiglu_report(asked_for, M, H, I, 16, keep=True, dtype=dtype)


def swiglu_report(
    asked_for: list[Any],
    M: int,
    H: int,
    I: int,  # noqa: E741
    E: int,
    *,
    keep: bool = False,
    columns: bool = False,
    bias: bool = False,
    top_k: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    form = Form("silu", True, False, 1.0, 1.0)
    with stand_ins():
        weight = empty(E, H, 2 * I, dtype=dtype) if columns else empty(E, 2 * I, H, dtype=dtype).transpose(1, 2)
        biases = form.halves(empty(E, 2 * I, dtype=dtype), None) if bias else (None, None)
        kept = form.halves(empty(M, 2 * I, dtype=dtype), None) if keep else (None, None)
        swiglu_ffn._plan(
            empty(M // max(top_k, 1), H, dtype=dtype),
            *form.halves(weight, None),
            empty(E + 1, dtype=torch.int32),
            empty(M, dtype=torch.int32) if top_k else None,
            *biases,
            empty(M, I, dtype=dtype),
            *kept,
            top_k=top_k,
            form=form,
        )
    return lean_reports(asked_for)[-1]
