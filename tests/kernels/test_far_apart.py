"""Rows, offsets and biases with few elements, but so far apart in memory that their addresses need 64 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_kernels import grouped_gemm, grouped_gemm_wgrad, grouped_mm, permute, reference, route, swiglu_ffn
from moe_kernels.testing import assert_grouped_gemm_close, make_inputs

_Spread = Callable[[Tensor], Tensor]


@pytest.fixture
def spread(device: str, tmp_path: Path) -> Iterator[_Spread]:
    """What gives the same values in a view of more than 2^31 elements."""

    def spread(x: Tensor) -> Tensor:
        row = (2**31 // (len(x) - 1) // 16 + 1) * 16
        elements = (len(x) - 1) * row + x[0].numel()
        if device == "cpu":  # a file without contents takes no memory
            memory = torch.from_file(str(tmp_path / "memory"), shared=True, size=elements, dtype=x.dtype)
        else:
            torch.use_deterministic_algorithms(False)  # filling this with NaN takes long
            memory = torch.empty(elements, dtype=x.dtype, device=device)
        return memory.as_strided(x.shape, (row, *x[0].stride())).copy_(x)

    yield spread
    torch.cuda.empty_cache()  # there are other tests at the same time


@pytest.mark.parametrize("rows", [5, 150])
def test_offsets(rows: int, spread: _Spread, device: str) -> None:
    A, B, group_offsets = make_inputs([rows, 0, rows + 20, 3], 32, 64, dtype=torch.float16, device=device)
    far = spread(group_offsets)
    assert_grouped_gemm_close(grouped_gemm(A, B, far), A, B, group_offsets)
    gradient = grouped_gemm_wgrad(A, A, far)
    exact = torch.stack([a.T @ a for a in A.double().tensor_split(group_offsets[1:-1].cpu().long())])
    torch.testing.assert_close(gradient.double(), exact, rtol=1e-2, atol=5e-2)
    assert_swiglu_close(A, B, group_offsets, far=far)


@pytest.mark.parametrize("rows", [5, 150])
def test_bias(rows: int, spread: _Spread, device: str) -> None:
    A, B, group_offsets = make_inputs([rows, 0, rows + 20, 3], 32, 64, dtype=torch.float16, device=device)
    bias = torch.randn(4, 32, device=device).half()
    far = spread(bias)
    out = grouped_mm(A, B, offs=group_offsets[1:], bias=far)
    exact = reference.grouped_linear(A.double(), B.double(), group_offsets, bias.double(), torch.float64)
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)
    assert_swiglu_close(A, B, group_offsets, bias=far)


@pytest.mark.parametrize("rows", [3, 20, 70])
def test_rows(rows: int, spread: _Spread, device: str) -> None:
    A, B, group_offsets = make_inputs([rows, rows + 2], 32, 64, dtype=torch.float16, device=device)
    far = spread(A)
    assert_grouped_gemm_close(grouped_gemm(far, B, group_offsets), A, B, group_offsets)
    assert_swiglu_close(far, B, group_offsets)


def assert_swiglu_close(
    A: Tensor, B: Tensor, group_offsets: Tensor, *, far: Tensor | None = None, bias: Tensor | None = None
) -> None:
    act = swiglu_ffn(A, B.mT.contiguous(), group_offsets if far is None else far, gate_up_bias=bias)
    bias = None if bias is None else bias.double()
    exact = reference.swiglu_ffn(A.double(), B.mT.double(), group_offsets, gate_up_bias=bias)
    torch.testing.assert_close(act.double(), exact, rtol=1e-2, atol=1e-2)


def test_slots(spread: _Spread, device: str) -> None:
    ids = torch.randint(0, 4, (12, 1), device=device)
    gates = torch.rand(12, 1, device=device)
    expected = reference.route(ids, gates, 4)
    far = spread(ids)
    for topk_ids in (ids, far):
        routing = route(topk_ids, gates, 4)
        assert all(torch.equal(a, b) for a, b in zip(routing, expected, strict=True))
    hidden = torch.randn(12, 40, device=device)
    moved = permute(hidden, routing._replace(slot_to_row=spread(routing.slot_to_row)))
    assert torch.equal(moved, reference.permute(hidden, expected))
