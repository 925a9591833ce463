from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from moe_kernels import reference, uniform_grouped_gemm

sizes = st.integers(0, 5)


def inputs(G: int, M: int, N: int, K: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(G + 7 * M + 49 * N + 343 * K)
    shapes = (G, M, K), (G, K, N)
    A, B = (torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes)
    return A, B


@settings(deadline=None, max_examples=30)
@given(G=sizes, M=sizes, N=sizes, K=sizes)
def test_each_group_meets_its_own_matrix(G: int, M: int, N: int, K: int) -> None:
    A, B = inputs(G, M, N, K)
    expected = torch.zeros(G, M, N, dtype=torch.float64)
    for g in range(G):
        for m in range(M):
            expected[g, m] = (A[g, m, :, None] * B[g]).sum(0)
    flat_A, flat_B = A.reshape(G * M, K), B.reshape(G * K, N)
    for a, b in ((A, B), (flat_A, flat_B), (A, flat_B), (flat_A, B)):
        out = uniform_grouped_gemm(a, b, G)
        torch.testing.assert_close(out, expected.view(*a.shape[:-1], N), rtol=1e-12, atol=1e-12)


def test_result_dtypes() -> None:
    A, B = inputs(2, 3, 4, 5, torch.bfloat16)
    assert torch.equal(uniform_grouped_gemm(A, B, 2), torch.bmm(A, B))
    for a, b, out_dtype in ((A, B, torch.float32), (A, B.half(), None), (A.float(), B, torch.float16)):
        out = uniform_grouped_gemm(a, b, 2, out_dtype=out_dtype)
        expected = torch.bmm(a.float(), b.float()).to(out_dtype or torch.promote_types(a.dtype, b.dtype))
        assert out.dtype == expected.dtype
        assert torch.equal(out, expected)
    assert uniform_grouped_gemm(A.double(), B, 2).dtype == torch.float64


@pytest.mark.parametrize("flat", [True, False])
def test_gradients(flat: bool) -> None:
    A, B = (x.requires_grad_() for x in inputs(2, 3, 4, 2))

    def product(a: Tensor, b: Tensor) -> Tensor:
        return uniform_grouped_gemm(a.flatten(0, 1), b.flatten(0, 1), 2) if flat else uniform_grouped_gemm(a, b, 2)

    assert gradcheck(product, (A, B))
    assert gradgradcheck(product, (A, B))


ok = torch.zeros(6, 4)
flat_B = torch.zeros(8, 5)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([1], flat_B, 2), TypeError, "A: expected a torch.Tensor, got list"),
        ((ok, None, 2), TypeError, "B: expected a torch.Tensor, got NoneType"),
        ((ok, flat_B, 2.0), TypeError, "num_groups: expected an int, got float"),
        ((ok, flat_B, True), TypeError, "num_groups: expected an int, got bool"),
        ((ok, flat_B, -2), ValueError, "num_groups: expected at least 0, got -2"),
        ((ok.long(), flat_B, 2), TypeError, r"A: expected one of bfloat16, .*got torch.int64"),
        ((ok, flat_B.bool(), 2), TypeError, r"B: expected one of bfloat16, .*got torch.bool"),
        ((ok[0], flat_B, 2), ValueError, r"A: expected shape \[G \* M, K\] or \[G, M, K\], got \[4\]"),
        ((ok, flat_B[None, None], 2), ValueError, r"B: expected shape \[G \* K, N\] or .*got \[1, 1, 8, 5\]"),
        ((ok, flat_B, 4), ValueError, r"A: expected rows that 4 groups share evenly, got \[6, 4\]"),
        ((ok, flat_B, 0), ValueError, r"A: expected rows that 0 groups share evenly, got \[6, 4\]"),
        ((ok.view(2, 3, 4), flat_B, 3), ValueError, r"A: expected 3 groups, got \[2, 3, 4\]"),
        ((ok, flat_B[:-1], 2), ValueError, r"B: expected shape \[G \* K, N\] = \[8, N\] for A \[6, 4\], got \[7, 5\]"),
        ((ok, flat_B.view(2, 2, 10), 2), ValueError, r"B: expected shape \[G, K, N\] = \[2, 4, N\] .*got \[2, 2, 10\]"),
        ((ok, flat_B.to("meta"), 2), ValueError, "B: expected on cpu with A, got on meta"),
    ],
)
@pytest.mark.parametrize("function", [uniform_grouped_gemm, reference.uniform_grouped_gemm])
def test_refusals(function: Any, arguments: tuple[Any, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        function(*arguments)


@pytest.mark.parametrize("out_dtype", [torch.int32, "float32"])
def test_refused_result_dtypes(out_dtype: Any) -> None:
    with pytest.raises(TypeError, match="out_dtype: expected one of"):
        uniform_grouped_gemm(ok, flat_B, 2, out_dtype=out_dtype)


def test_exported_with_any_number_of_groups() -> None:
    class Layer(torch.nn.Module):
        def forward(self, A: Tensor, B: Tensor) -> Tensor:
            return uniform_grouped_gemm(A, B, A.size(0))

    G = torch.export.Dim("G", min=2)
    A, B = torch.randn(5, 2, 3), torch.randn(5, 3, 4)
    program = torch.export.export(Layer(), (A[:3], B[:3]), dynamic_shapes={"A": {0: G}, "B": {0: G}})
    torch.testing.assert_close(program.module()(A, B), torch.bmm(A, B))
