"""The kernels that make both products of an expert's first half and its activation, against fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_kernels import reference, route
from moe_kernels.form import Form
from moe_kernels.kernels import swiglu_ffn as kernels
from moe_kernels.testing import assert_within_budget

NAN = float("nan")
SILU, GPT_OSS = Form("silu", True, False, 0.0, 0.0), Form("clamped_swiglu", True, True, 1.702, 7.0)


def assert_launch_close(
    rows: torch.Tensor,  # [M, H]: what A's rows are
    weight: torch.Tensor,  # [E, 2I, H]
    group_offsets: torch.Tensor,
    form: Form,
    *,
    A: torch.Tensor | None = None,  # [T, H]
    row_to_slot: torch.Tensor | None = None,
    top_k: int = 0,
    bias: torch.Tensor | None = None,
    keep: bool = False,
    columns: bool = False,
) -> None:
    M, I = len(rows), weight.size(1) // 2  # noqa: E741
    w = weight.mT.contiguous() if columns else weight.mT
    gate, up = form.halves(w, None)
    biases = (None, None) if bias is None else form.halves(bias, None)
    canvas = torch.full((M + 32, I + 16), 7.0, dtype=rows.dtype, device=rows.device)
    act = canvas[16 : 16 + M, 8 : 8 + I]
    h = torch.full((M, 2 * I), NAN, dtype=rows.dtype, device=rows.device) if keep else None
    kept = (None, None) if h is None else form.halves(h, None)
    source = rows if A is None else A
    kernels.launch(source, gate, up, group_offsets, row_to_slot, *biases, act, *kept, top_k, form)

    def half(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        h = reference.grouped_linear(rows.to(dtype), w.to(dtype), group_offsets, bias, None)
        return h, reference.activate(h, None, form)

    plain_h, plain = half(rows.dtype)
    exact_h, exact = half(torch.float64)
    assert_within_budget(act, plain, exact, scale=16 * exact.abs().max().item())
    first, end = group_offsets[[0, -1]].tolist()
    assert not act[:first].any()
    assert not act[end:].any()
    if h is not None:
        inside = slice(first, end)
        scale = 16 * exact_h.abs().max().item()
        assert_within_budget(h[inside], plain_h[inside], exact_h[inside], scale=scale)
    act.fill_(7.0)
    assert (canvas == 7.0).all()


def offsets(values: list[int], device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("values", [[3, 10, 10, 30, 45], [0, 100, 390]], ids=["few rows", "many rows"])
@pytest.mark.parametrize(
    ("form", "columns", "all_tensors"),
    [(SILU, False, False), (SILU, False, True), (GPT_OSS, True, True)],
    ids=["silu", "silu, bias, kept", "gpt-oss, columns, bias, kept"],
)
def test_rows(values: list[int], form: Form, columns: bool, all_tensors: bool, device: str) -> None:
    torch.manual_seed(0)
    E, M = len(values) - 1, values[-1] + 5
    weight = (torch.randn(E, 80, 24, device=device) * 24**-0.5).half()
    rows = torch.randn(M, 24, device=device).half()
    rows[values[-1] :] = NAN
    bias = torch.randn(E, 80, device=device) if all_tensors else None
    group_offsets = offsets(values, device)
    assert_launch_close(rows, weight, group_offsets, form, bias=bias, keep=all_tensors, columns=columns)


@pytest.mark.parametrize(("T", "top_k", "E"), [(1, 3, 16), (20, 3, 4), (100, 3, 2)], ids=["decode", "few", "many"])
def test_gathered(T: int, top_k: int, E: int, device: str) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, E + 1, (T, top_k), device=device)
    routing = route(ids, torch.ones(T, top_k, device=device), E)
    weight = (torch.randn(E, 80, 24, device=device) * 24**-0.5).half()
    hidden = torch.randn(T, 24, device=device).half()
    rows = hidden[routing.row_to_slot.long() // top_k]
    assert_launch_close(
        rows,
        weight,
        routing.group_offsets,
        SILU,
        A=hidden,
        row_to_slot=routing.row_to_slot,
        top_k=top_k,
        keep=T == 20,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("rows", [2, 20, 50, 300])
def test_shapes_of_models(rows: int, columns: bool, keep: bool, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    for E, H, I in ((16, 1024, 384), (8, 720, 1440), (4, 97, 131)):  # noqa: E741
        M = E * rows
        sizes = torch.multinomial(torch.softmax(torch.randn(E), 0), M, replacement=True).bincount(minlength=E)
        group_offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).int().to(device)
        weight = (torch.randn(E, 2 * I, H, device=device) * H**-0.5).to(dtype)
        A = torch.randn(M, H, device=device).to(dtype)
        bias = torch.randn(E, 2 * I, device=device) if keep else None
        assert_launch_close(A, weight, group_offsets, SILU, bias=bias, keep=keep, columns=columns)


@pytest.mark.gpu
def test_another_number_of_rows_compiles_nothing(device: str) -> None:
    import triton

    compiled: list[str] = []
    weight = (torch.randn(4, 256, 128, device=device) * 0.1).bfloat16()
    for first in (1100, 130):
        for M in range(first, first + 20):
            rows = torch.randn(M, 128, device=device).bfloat16()
            if first + 1 == M:
                triton.knobs.runtime.jit_post_compile_hook = lambda *_, repr, **__: compiled.append(repr)
            assert_launch_close(rows, weight, offsets([0, 30, M - 50, M - 50, M], device), SILU)
        triton.knobs.runtime.jit_post_compile_hook = None
    assert compiled == []


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(device: str) -> None:
    torch.use_deterministic_algorithms(False)  # filling these tensors with NaN takes long
    E, H, I, M = 400, 2048, 1408, 800  # noqa: E741
    weight = torch.empty(E, 2 * I, H, device=device, dtype=torch.bfloat16).normal_(std=H**-0.5)
    rows = torch.randn(M, H, device=device).bfloat16()
    group_offsets = offsets([0] * (E - 1) + [300, 800], device)
    act = torch.empty(M, I, device=device, dtype=torch.bfloat16)
    w = weight.mT
    kernels.launch(rows, *SILU.halves(w, None), group_offsets, None, None, None, act, None, None, 0, SILU)
    exact = reference.activate(rows[300:].double() @ weight[-1].double().T, None, SILU)
    torch.testing.assert_close(act[300:].double(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_pytorchs_tf32_setting_decides_for_float32_weights(dtype: torch.dtype, device: str) -> None:
    """Whatever the dtype of the rows, and also for tensors that there has been a plan for."""
    rows = torch.randn(20, 32, device=device).to(dtype)
    w = torch.randn(2, 32, 32, device=device) * 32**-0.5
    before = torch.backends.cuda.matmul.fp32_precision
    kernels._plans.clear()
    try:
        for plans, precision in enumerate(("tf32", "ieee"), 1):
            torch.backends.cuda.matmul.fp32_precision = precision
            act = torch.empty(20, 16, dtype=torch.float32, device=device)
            group_offsets = offsets([0, 7, 20], device)
            kernels.launch(rows, *SILU.halves(w.mT, None), group_offsets, None, None, None, act, None, None, 0, SILU)
            assert len(kernels._plans) == plans
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.skipif(torch.cuda.is_available(), reason="its allocator decides what lies where")
@pytest.mark.parametrize("M", [20, 300])
def test_weights_that_are_neighbours_by_chance(M: int, device: str) -> None:
    I, H = 32, 24  # noqa: E741
    memory = np.random.default_rng(0).standard_normal((2, I, H)).astype(np.float16)
    gate, up = (torch.from_numpy(half).as_strided((1, I, H), (2 * I * H, H, 1)) for half in memory)
    assert up.data_ptr() == gate.data_ptr() + gate.nbytes
    rows = torch.randn(M, H, device=device).half()
    act = torch.empty(M, I, dtype=rows.dtype, device=device)
    kernels.launch(rows, gate.mT, up.mT, offsets([0, M], device), None, None, None, act, None, None, 0, SILU)

    def half(dtype: torch.dtype) -> torch.Tensor:
        return reference.activate(rows.to(dtype) @ gate[0].to(dtype).T, rows.to(dtype) @ up[0].to(dtype).T, SILU)

    exact = half(torch.float64)
    assert_within_budget(act, half(rows.dtype), exact, scale=16 * exact.abs().max().item())
