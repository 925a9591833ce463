"""The kernels that compute both products of an expert's first half and its activation, against fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from building import run

from moe_kernels import moe_mlp, reference, route, swiglu_ffn
from moe_kernels.glu import GLUSpec
from moe_kernels.kernels.swiglu_ffn import multiply_activated
from moe_kernels.ops.layer import adjacent
from moe_kernels.runtime import cache
from moe_kernels.runtime.plan import Builder
from moe_kernels.testing import assert_within_budget

NAN = float("nan")
SILU, GPT_OSS = GLUSpec("silu", True, False, 0.0, 0.0), GLUSpec("clamped_swiglu", True, True, 1.702, 7.0)
DEEPSEEK_V4 = GLUSpec("clamped_silu", True, False, 0.0, 1.0)


def multiply_into(
    act: torch.Tensor,  # [M, I], written
    preact: torch.Tensor | None,  # [M, 2I], written
    A: torch.Tensor,  # [M, H], or [T, H] with row_to_slot
    w: torch.Tensor,  # [E, H, 2I]
    group_offsets: torch.Tensor,
    spec: GLUSpec,
    row_to_slot: torch.Tensor | None = None,
    top_k: int = 0,
    bias: torch.Tensor | None = None,  # [E, 2I]
) -> None:
    def steps(
        builder: Builder, act: Any, preact: Any, A: Any, w: Any, offsets: Any, row_to_slot: Any, bias: Any
    ) -> None:
        gate, up = spec.halves(w, None)
        biases, preacts = spec.parts(bias, None, apart=False), spec.parts(preact, None, apart=False)
        multiply_activated(builder, A, gate, up, offsets, row_to_slot, biases, act, preacts, top_k, spec)

    tensors = {"act": act, "preact": preact, "A": A, "w": w, "offsets": group_offsets}
    tensors |= {"row_to_slot": row_to_slot, "bias": bias}
    run(steps, tensors, rows=("act", "preact", "A", "row_to_slot"), groups=w.size(0))


def assert_launch_close(
    rows: torch.Tensor,  # [M, H]: the rows that A provides
    weight: torch.Tensor,  # [E, 2I, H]
    group_offsets: torch.Tensor,
    spec: GLUSpec,
    *,
    A: torch.Tensor | None = None,  # [T, H]
    row_to_slot: torch.Tensor | None = None,
    top_k: int = 0,
    bias: torch.Tensor | None = None,
    save_preact: bool = False,
    columns: bool = False,
) -> None:
    M, I = len(rows), weight.size(1) // 2  # noqa: E741
    w = weight.mT.contiguous() if columns else weight.mT
    canvas = torch.full((M + 32, I + 16), 7.0, dtype=rows.dtype, device=rows.device)
    act = canvas[16 : 16 + M, 8 : 8 + I]
    preact = torch.full((M, 2 * I), NAN, dtype=rows.dtype, device=rows.device) if save_preact else None
    source = rows if A is None else A
    multiply_into(act, preact, source, w, group_offsets, spec, row_to_slot, top_k, bias)

    def half(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        preact = reference.grouped_linear(rows.to(dtype), w.to(dtype), group_offsets, bias, None)
        return preact, reference.activate(preact, None, spec)

    plain_preact, plain = half(rows.dtype)
    exact_preact, exact = half(torch.float64)
    assert_within_budget(act, plain, exact, scale=16 * exact.abs().max().item())
    first, end = group_offsets[[0, -1]].tolist()
    assert not act[:first].any()
    assert not act[end:].any()
    if preact is not None:
        inside = slice(first, end)
        scale = 16 * exact_preact.abs().max().item()
        assert_within_budget(preact[inside], plain_preact[inside], exact_preact[inside], scale=scale)
    act.fill_(7.0)
    assert (canvas == 7.0).all()


def offsets(values: list[int], device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("values", [[3, 10, 10, 30, 45], [0, 100, 390]], ids=["few rows", "many rows"])
@pytest.mark.parametrize(
    ("spec", "columns", "all_tensors"),
    [(SILU, False, False), (SILU, False, True), (GPT_OSS, True, True), (DEEPSEEK_V4, False, False)],
    ids=["silu", "silu, bias, saved", "gpt-oss, columns, bias, saved", "clamped silu"],
)
def test_rows(values: list[int], spec: GLUSpec, columns: bool, all_tensors: bool, device: str) -> None:
    E, M = len(values) - 1, values[-1] + 5
    weight = (torch.randn(E, 80, 24, device=device) * 24**-0.5).half()
    rows = torch.randn(M, 24, device=device).half()
    rows[values[-1] :] = NAN
    bias = torch.randn(E, 80, device=device) if all_tensors else None
    group_offsets = offsets(values, device)
    assert_launch_close(rows, weight, group_offsets, spec, bias=bias, save_preact=all_tensors, columns=columns)


@pytest.mark.parametrize(("T", "top_k", "E"), [(1, 3, 16), (20, 3, 4), (100, 3, 2)], ids=["decode", "few", "many"])
def test_gathered(T: int, top_k: int, E: int, device: str) -> None:
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
        save_preact=T == 20,
    )


@pytest.mark.parametrize(("H", "I"), [(1, 4), (4, 1), (1, 1)])
@pytest.mark.parametrize("top_k", [0, 2])
def test_extents_of_1_with_many_rows(H: int, I: int, top_k: int, device: str) -> None:  # noqa: E741
    """Nothing beside the tensors is read, although shapes are static for 128 or more rows per expert."""
    M, group_offsets = 256, offsets([0, 128, 256], device)
    weight, bias = torch.randn(2, 2 * I, H, device=device), torch.randn(2, 2 * I, device=device)
    hidden = torch.randn(M // max(top_k, 1), H, device=device)
    row_to_slot = torch.randperm(M, device=device).int() if top_k else None
    rows = hidden if row_to_slot is None else hidden[row_to_slot // top_k]
    gathered: dict[str, Any] = {"A": hidden, "row_to_slot": row_to_slot, "top_k": top_k} if top_k else {}
    assert_launch_close(rows, weight, group_offsets, SILU, bias=bias, save_preact=True, **gathered)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("save_preact", [False, True])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("rows", [2, 20, 50, 300])
def test_shapes_of_models(rows: int, columns: bool, save_preact: bool, dtype: torch.dtype, device: str) -> None:
    for E, H, I in ((16, 1024, 384), (8, 720, 1440), (4, 97, 131)):  # noqa: E741
        M = E * rows
        sizes = torch.multinomial(torch.softmax(torch.randn(E), 0), M, replacement=True).bincount(minlength=E)
        group_offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).int().to(device)
        weight = (torch.randn(E, 2 * I, H, device=device) * H**-0.5).to(dtype)
        A = torch.randn(M, H, device=device).to(dtype)
        bias = torch.randn(E, 2 * I, device=device) if save_preact else None
        assert_launch_close(A, weight, group_offsets, SILU, bias=bias, save_preact=save_preact, columns=columns)


@pytest.mark.gpu
@pytest.mark.parametrize("first", [1100, 130])
def test_another_number_of_rows_makes_no_plan(first: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a plan was begun")

    weight = (torch.randn(4, 256, 128, device=device) * 0.1).bfloat16()
    for M in range(first, first + 20):
        rows = torch.randn(M, 128, device=device).bfloat16()
        if first + 1 == M:
            monkeypatch.setattr(cache, "_load", refuse)
        group_offsets = offsets([0, 30, M - 50, M - 50, M], device)
        exact = reference.swiglu_ffn(rows.double(), weight.double(), group_offsets)
        plain = reference.swiglu_ffn(rows, weight, group_offsets)
        out = swiglu_ffn(rows, weight, group_offsets)
        assert_within_budget(out, plain, exact, scale=16 * exact.abs().max().item())


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(device: str) -> None:
    torch.use_deterministic_algorithms(False)  # filling these tensors with NaN takes long
    E, H, I, M = 400, 2048, 1408, 800  # noqa: E741
    weight = torch.empty(E, 2 * I, H, device=device, dtype=torch.bfloat16).normal_(std=H**-0.5)
    rows = torch.randn(M, H, device=device).bfloat16()
    group_offsets = offsets([0] * (E - 1) + [300, 800], device)
    act = torch.empty(M, I, device=device, dtype=torch.bfloat16)
    multiply_into(act, None, rows, weight.mT, group_offsets, SILU)
    exact = reference.activate(rows[300:].double() @ weight[-1].double().T, None, SILU)
    torch.testing.assert_close(act[300:].double(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_pytorchs_tf32_setting_decides_for_float32_weights(dtype: torch.dtype, device: str) -> None:
    """The dtype of the rows does not matter, and neither does an existing plan for the same tensors."""
    rows = torch.randn(20, 32, device=device).to(dtype)
    w = torch.randn(2, 32, 32, device=device) * 32**-0.5
    before = torch.backends.cuda.matmul.fp32_precision
    group_offsets = offsets([0, 7, 20], device)
    try:
        with cache.isolated():
            for plans, precision in enumerate(("tf32", "ieee"), 1):
                torch.backends.cuda.matmul.fp32_precision = precision
                swiglu_ffn(rows, w, group_offsets)
                assert len(cache.plans.entries) == plans
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("M", [20, 300])
def test_rows_cast_for_tf32(M: int, device: str) -> None:
    rows = torch.randn(M, 32, device=device).bfloat16()
    w = (torch.randn(1, 48, 32, device=device) * 32**-0.5).half()
    group_offsets = offsets([0, M], device)
    exact = reference.swiglu_ffn(rows.double(), w.double(), group_offsets)
    plain = reference.swiglu_ffn(rows, w, group_offsets)
    assert_within_budget(swiglu_ffn(rows, w, group_offsets), plain, exact, scale=16 * exact.abs().max().item())


def test_weights_of_two_dtypes_in_one_memory(device: str) -> None:
    """They are not read as one tensor, although `up` is where the second half of one would be."""
    I, H = 16, 24  # noqa: E741
    both = torch.randn(2, 2 * I, H, device=device).half()
    gate, up = both[:, :I], both[:, I:].view(torch.bfloat16)
    up.copy_(torch.randn(2, I, H))
    rows, group_offsets = torch.randn(9, H, device=device).half(), offsets([0, 4, 9], device)
    assert torch.equal(
        swiglu_ffn(rows, gate, group_offsets, w_up=up), swiglu_ffn(rows, gate, group_offsets, w_up=up.clone())
    )
    ids, weights = torch.randint(0, 2, (9, 2), device=device), torch.rand(9, 2, device=device)
    down = torch.randn(2, H, I, device=device).half()
    assert torch.equal(*(moe_mlp(rows, ids, weights, gate, down, w_up=w) for w in (up, up.clone())))


@pytest.mark.skipif(torch.cuda.is_available(), reason="its allocator decides what lies where")
@pytest.mark.parametrize("M", [20, 300])
def test_weights_that_are_neighbours_by_chance(M: int, device: str) -> None:
    I, H = 32, 24  # noqa: E741
    memory = np.random.default_rng(0).standard_normal((2, I, H)).astype(np.float16)
    gate, up = (torch.from_numpy(half).as_strided((1, I, H), (2 * I * H, H, 1)) for half in memory)
    assert up.data_ptr() == gate.data_ptr() + gate.nbytes
    assert not adjacent(gate.mT, up.mT)
    both = torch.from_numpy(memory.copy()).view(1, 2 * I, H)
    assert adjacent(both[:, :I].mT, both[:, I:].mT) and not adjacent(both[:, I:].mT, both[:, :I].mT)
    assert not adjacent(both[:, :I].mT, both[:, I:].view(torch.bfloat16).mT)
    rows = torch.randn(M, H, device=device).half()
    act = swiglu_ffn(rows, gate, offsets([0, M], device), w_up=up)

    def half(dtype: torch.dtype) -> torch.Tensor:
        return reference.activate(rows.to(dtype) @ gate[0].to(dtype).T, rows.to(dtype) @ up[0].to(dtype).T, SILU)

    exact = half(torch.float64)
    assert_within_budget(act, half(rows.dtype), exact, scale=16 * exact.abs().max().item())


@pytest.mark.parametrize("rows", [2, 100])
def test_a_second_weight_of_a_wider_dtype(rows: int, device: str) -> None:
    """It is multiplied in its own dtype, whatever the number of rows: in float16 it would be infinite."""
    offsets = torch.tensor([0, rows, 2 * rows], device=device)
    hidden = 1e-3 * torch.rand(2 * rows, 32, device=device).half()
    w_gate_up, w_up = torch.rand(2, 16, 32, device=device).half(), 1e5 * (1 + torch.rand(2, 16, 32, device=device))
    found = swiglu_ffn(hidden, w_gate_up, offsets, w_up=w_up)
    expected = reference.swiglu_ffn(hidden.double(), w_gate_up.double(), offsets, w_up=w_up.double())
    assert found.dtype == torch.float16 and expected.abs().min() > 0
    torch.testing.assert_close(found.double(), expected, rtol=4e-3, atol=0)


@pytest.mark.parametrize("with_up", [False, True], ids=["one weight", "two"])
def test_second_derivatives_with_rows_in_no_group(with_up: bool, device: str) -> None:
    """The persistent kernel writes the preactivations of rows in groups only, and memory may hold NaN elsewhere."""
    E, H, I = 1, 16, 16  # noqa: E741
    rows, v = (torch.randn(72, n, dtype=torch.float16, device=device).requires_grad_() for n in (H, I))
    w = torch.randn(E, 2 * I, H, dtype=torch.float16, device=device) * H**-0.5
    weights = {"w_gate_up": w[:, :I], "w_up": w[:, I:]} if with_up else {"w_gate_up": w}
    offsets = torch.tensor([0, 64], dtype=torch.int32, device=device)

    def second(function: Any, dtype: torch.dtype) -> torch.Tensor:
        x, u = (y.detach().to(dtype).requires_grad_() for y in (rows, v))
        out = function(x, group_offsets=offsets, **{name: weight.to(dtype) for name, weight in weights.items()})
        (d_rows,) = torch.autograd.grad(out, x, u, create_graph=True)
        return torch.autograd.grad(d_rows.square().sum(), u)[0]

    found, exact = second(swiglu_ffn, torch.float16), second(reference.swiglu_ffn, torch.float64)
    assert_within_budget(found, second(reference.swiglu_ffn, torch.float16), exact, scale=exact.abs().amax().item())
    assert not found[64:].any()
