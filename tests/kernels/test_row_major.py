"""Row-major copies of operands: bit for bit, and results of products that use them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import building
import pytest
import torch
from torch import Tensor

from moe_kernels import grouped_gemm, grouped_gemm_jagged, grouped_gemm_wgrad, grouped_mm, swiglu_ffn
from moe_kernels.kernels.row_major import row_major_copy
from moe_kernels.runtime import cache
from moe_kernels.runtime import compile as compiler
from moe_kernels.runtime.plan import Builder
from moe_kernels.runtime.signature import Counts, Operator
from moe_kernels.runtime.symbolic import SymbolicTensor
from moe_kernels.testing import assert_grouped_gemm_close, assert_within_budget, make_inputs

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "rows of odd strides": lambda x: torch.nn.functional.pad(x, (0, 3))[..., : x.size(-1)],
    "every second column": lambda x: torch.stack([x, x + 1], dim=-1)[..., 0],
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def copied(x: Tensor) -> Tensor:
    """Return the copy that a plan makes of `x`, without the columns that fill its rows."""

    def draw(builder: Builder, inputs: Any, _: Any) -> SymbolicTensor:
        return row_major_copy(builder, inputs[0])

    globals()["plan_copied"] = draw
    operator = Operator("copied", __name__, ("x",), ("x",), lambda tensors, _: Counts(len(tensors[0])))
    with cache.isolated():
        made: Tensor = cache.call(operator, (x,), ())
    return made[..., : x.size(-1)]


@layouts
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_bit_for_bit(layout: str, dtype: torch.dtype, device: str, fresh_plans: None) -> None:
    for shape, strides in (((150, 80), (80, 1)), ((150, 67), (80, 1)), ((3, 150, 67), (150 * 80, 80, 1))):
        x = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=device).view(dtype)
        source = LAYOUTS[layout](x)
        copy = copied(source)
        assert copy.stride() == strides and copy.data_ptr() % 16 == 0
        assert torch.equal(copy.view(torch.int16), source.contiguous().view(torch.int16))


def test_of_an_expanded_operand(device: str, fresh_plans: None) -> None:
    x = torch.randn((), device=device).half()
    assert torch.equal(copied(x.expand(150, 72)), x.expand(150, 72))


def test_of_other_element_sizes(device: str, fresh_plans: None) -> None:
    x = torch.randint(256, (150, 67), dtype=torch.uint8, device=device)
    copy = copied(x.view(torch.float8_e4m3fn))
    assert copy.stride() == (80, 1)
    assert torch.equal(copy.view(torch.uint8), x)


def test_of_several_matrices_after_one(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Helion omits the stride between matrices from the code for one, which several must not use."""
    monkeypatch.setattr(compiler, "_hosts", {})
    for shape, strides in (((150, 67), (80, 1)), ((1, 150, 67), (12000, 80, 1)), ((3, 150, 67), (12000, 80, 1))):
        x = torch.randn(shape, device=device).half()
        copy = building.run(row_major_copy, {"x": x})
        assert copy.stride() == strides
        assert torch.equal(copy[..., :67], x)


@pytest.mark.gpu
def test_weights_of_each_group_after_one_of_all_groups(
    device: str, fresh_plans: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_hosts", {})
    for per_group in (False, True):
        A, B, offsets = make_inputs(
            [700, 0, 900, 33], 72, 131, dtype=torch.bfloat16, device=device, per_group=per_group, transposed=True
        )
        assert_grouped_gemm_close(grouped_gemm_jagged(A, B, offsets), A, B, offsets)


@pytest.mark.gpu
def test_of_more_than_2_to_the_31_elements(device: str) -> None:
    M, C = 600_000, 4096
    source = torch.empty(C, M, dtype=torch.int16, device=device).random_().view(torch.bfloat16).T
    copy = copied(source)
    for rows in (slice(0, 300), slice(-300, None)):
        assert torch.equal(copy[rows].view(torch.int16), source[rows].contiguous().view(torch.int16))


@pytest.mark.gpu
@layouts
def test_products_have_the_bits_of_row_major_operands(layout: str, device: str) -> None:
    """With TMA, products read copies; operands of 16-bit elements and over 128 rows."""
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("TMA needs compute capability 9.0")
    M, K, N, G = 3000, 256, 512, 4
    A, d_out = (torch.randn(M, C, dtype=torch.bfloat16, device=device) for C in (K, N))
    W = torch.randn(G, N, K, dtype=torch.bfloat16, device=device)
    offsets = torch.tensor([0, 700, 700, 2000, 2990], dtype=torch.int32, device=device)
    change = LAYOUTS[layout]
    a, d = change(A), change(d_out)
    for call, given, plain in (
        (grouped_gemm, (a, W.mT), (A, W.mT)),
        (grouped_gemm_wgrad, (a, d), (A, d_out)),
        (swiglu_ffn, (a, W), (A, W)),
    ):
        expected = call(*plain, offsets)
        assert (expected != 0).float().mean() > 0.5
        assert torch.equal(call(*given, offsets), expected)
    expanded = torch.ones((), dtype=torch.bfloat16, device=device).expand(M, N)
    expected = grouped_gemm_wgrad(A, expanded.contiguous(), offsets)
    assert torch.equal(grouped_gemm_wgrad(A, expanded, offsets), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("K", "N"), [(131, 512), (512, 259), (1003, 1001), (100, 72)])
@pytest.mark.parametrize("layout", ["[G, N, K]", "[G, K, N]", "every second column"])
def test_products_of_rows_of_any_length(K: int, N: int, layout: str, device: str) -> None:
    """Rows and weights are copied, because their rows are no multiples of 16 bytes or have holes."""
    sizes = [700, 0, 900, 33]
    transposed = layout == "[G, N, K]"
    A, B, offsets = make_inputs(sizes, N, K, dtype=torch.bfloat16, device=device, transposed=transposed)
    if layout == "every second column":
        B = LAYOUTS[layout](B)
    assert_grouped_gemm_close(grouped_gemm(A, B, offsets), A, B, offsets)
    d_out = torch.randn(sum(sizes), N, dtype=torch.bfloat16, device=device)
    for out in (grouped_gemm_wgrad(A, d_out, offsets), grouped_gemm_wgrad(d_out, A, offsets).mT):
        exact = torch.stack([A[a:b].double().T @ d_out[a:b].double() for a, b in itertools.pairwise(offsets.tolist())])
        plain = torch.stack([A[a:b].T @ d_out[a:b] for a, b in itertools.pairwise(offsets.tolist())])
        assert_within_budget(out, plain, exact)


@pytest.mark.gpu
def test_graphs_replay_with_other_values(device: str) -> None:
    """The copy is part of the graph."""
    A = torch.randn(256, 3000, dtype=torch.bfloat16, device=device).T
    d_out = torch.randn(512, 3000, dtype=torch.bfloat16, device=device).T
    offs = torch.tensor([700, 700, 3000], dtype=torch.int32, device=device)
    grouped_mm(A.T, d_out, offs=offs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = grouped_mm(A.T, d_out, offs=offs)
    A.normal_()
    offs.copy_(torch.tensor([1, 2000, 2500]))
    graph.replay()
    assert torch.equal(out, grouped_mm(A.T, d_out, offs=offs))
