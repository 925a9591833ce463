"""Weights' gradients in fp8: what is quantised along the rows, bit for bit, and the products against float64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_kernels import reference
from moe_kernels.checks import clamp_offsets
from moe_kernels.kernels import scaled_wgrad, tiles
from moe_kernels.ops import quantized_wgrad
from moe_kernels.runtime import cache
from moe_kernels.runtime.plan import Builder
from moe_kernels.runtime.signature import Counts, Operator
from moe_kernels.runtime.symbolic import SymbolicTensor
from moe_kernels.scaled import BLOCK
from moe_kernels.testing import assert_within_budget, group_sizes_for

NAN = float("nan")
OFFSETS = {
    "any sizes": [0, 1, 130, 130, 258],
    "rows outside": [7, 20, 20, 163],
    "malformed": [-5, 150, 40, 240, 90_000],
    "empty": [0, 0, 0],
    "one": [0, 128],
}


def spread(R: int, C: int, dtype: torch.dtype, device: str) -> Tensor:
    """Random, in each column of another magnitude."""
    return (torch.randn(R, C) * 2.0 ** torch.randint(-5, 5, (1, C))).to(dtype).to(device)


def offsets_of(values: list[int], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def columns(x: Tensor, group_offsets: Tensor, row_to_token: Tensor | None) -> tuple[Tensor, Tensor]:
    """The data in slots, and the bits of the largest magnitudes, that a plan makes of `x`."""
    rows = x if row_to_token is None else row_to_token
    G = len(group_offsets) - 1

    def draw(builder: Builder, inputs: Any, _: Any) -> tuple[SymbolicTensor, SymbolicTensor]:
        tokens, offsets, to_token = inputs
        first = tokens if to_token is None else to_token
        M = first.size(0)
        table = tiles.plan_table(builder, offsets, first, BLOCK, zeros=False)
        count = tiles.max_num_tiles(M, G, BLOCK)
        return scaled_wgrad._quantize(builder, tokens, to_token, table, count, M, G)

    globals()["plan_columns"] = draw
    names = ("x", "group_offsets", "row_to_token")
    operator = Operator("columns", __name__, names, ("x", "row_to_token"), lambda *_: Counts(len(x), (len(rows),), G))
    with cache.set_aside():
        data, amax = cache.call(operator, (x, group_offsets, row_to_token), ())
    return data, amax


@pytest.mark.parametrize(
    ("name", "gathered"), [("any sizes", True), ("rows outside", False), ("malformed", False), ("empty", False)]
)
def test_columns_are_quantised_bit_for_bit(name: str, gathered: bool, device: str, fresh_plans: None) -> None:
    """Also those that hold NaN, infinity or zeros, and those of few rows; of rows, and of tokens."""
    M, C = 260, 72
    x = spread(M, C, torch.bfloat16, device)
    x[140, 3], x[150, 4], x[:, 5] = NAN, -float("inf"), 0
    group_offsets = offsets_of(OFFSETS[name], device)
    row_to_token = torch.randint(0, M, (M,), dtype=torch.int32).to(device) if gathered else None
    rows = x if row_to_token is None else x[row_to_token.long()]
    right, scales = reference.quantize_columns(rows, group_offsets)
    data, amax = columns(x, group_offsets, row_to_token)
    largest = amax.view(torch.float32)
    made = torch.where(largest < torch.inf, largest.clamp(min=2.0**-100) * torch.tensor(1 / 448), NAN)
    assert torch.equal(made.view(torch.int32), scales.view(torch.int32))
    offsets = clamp_offsets(group_offsets, M).tolist()
    for g, (start, end) in enumerate(pairwise(offsets)):
        first, count = start // BLOCK + g, -(-(end - start) // BLOCK)
        found = data[first : first + count, :C].transpose(1, 2).reshape(-1, C).view(torch.uint8)
        assert torch.equal(found[: end - start], right[start:end].view(torch.uint8))
        assert not found[end - start :].any()
    assert name == "empty" or (right.view(torch.uint8) & 0x7F != 0).float().mean() > 0.2


def assert_right(
    out: Tensor, X: Tensor, Y: Tensor, group_offsets: Tensor, x_rows: Tensor | None, y_rows: Tensor | None
) -> None:
    """Group by group against the product in float64 of what was quantised; empty groups are exact zeros."""
    plain = reference.quantized_wgrad(X, Y, group_offsets, x_rows, y_rows, out.dtype)
    values = []
    for x, rows in ((X, x_rows), (Y, y_rows)):
        data, scales = reference.quantize_columns(x if rows is None else x[rows.long()], group_offsets)
        values.append((data.double(), scales.double()))
    (a, scales_a), (b, scales_b) = values
    for g, (start, end) in enumerate(pairwise(clamp_offsets(group_offsets, len(a)).tolist())):
        exact = (a[start:end].T @ b[start:end]) * scales_a[g][:, None] * scales_b[g]
        terms = (a[start:end].abs().T @ b[start:end].abs()) * scales_a[g][:, None] * scales_b[g]
        scale = terms.amax().item() if end > start else 0.0
        scale *= 2**-13 / torch.finfo(torch.float32).eps if out.is_cuda else 1
        assert_within_budget(out[g], plain[g], exact, scale=scale, name=f"group {g}")
        if start == end:
            assert not out[g].any()


@pytest.mark.parametrize(
    ("name", "P", "Q", "dtype"),
    [
        ("any sizes", 130, 40, torch.float32),
        ("rows outside", 1, 129, torch.float16),
        ("malformed", 72, 40, torch.bfloat16),
        ("empty", 72, 40, torch.bfloat16),
        ("one", 72, 40, torch.bfloat16),
    ],
)
def test_products(name: str, P: int, Q: int, dtype: torch.dtype, device: str) -> None:
    group_offsets = offsets_of(OFFSETS[name], device)
    X, Y = spread(260, P, dtype, device), spread(260, Q, dtype, device)
    out = quantized_wgrad(X, Y, group_offsets, None, None, False, dtype)
    assert_right(out, X, Y, group_offsets, None, None)
    if name == "one":
        assert torch.equal(quantized_wgrad(X, Y, group_offsets, None, None, False, dtype), out)


def test_of_tokens_in_the_other_memory_order(device: str) -> None:
    M, T = 260, 90
    group_offsets = offsets_of([3, 140, 200], device)
    tokens, Y = spread(T, 72, torch.bfloat16, device), spread(M, 40, torch.bfloat16, device)
    row_to_token = torch.randint(0, T, (M,), dtype=torch.int32).to(device)
    out = quantized_wgrad(tokens, Y, group_offsets, row_to_token, None, True, torch.bfloat16)
    assert out.mT.is_contiguous()
    assert_right(out, tokens, Y, group_offsets, row_to_token, None)


def test_nan_of_a_group_stays_there(device: str) -> None:
    """In a column, and in rows of no group."""
    X, Y = (spread(220, C, torch.bfloat16, device) for C in (72, 40))
    group_offsets = offsets_of([10, 140, 200, 210], device)
    right = quantized_wgrad(X, Y, group_offsets, None, None, False, torch.float32)
    X[:10], Y[210:], X[150, 7], Y[160, 9] = NAN, NAN, NAN, float("inf")
    out = quantized_wgrad(X, Y, group_offsets, None, None, False, torch.float32)
    assert torch.equal(out[::2], right[::2])
    wrong = out[1].isnan()
    assert wrong[7].all() and wrong[:, 9].all()
    assert wrong.sum() == 72 + 40 - 1
    assert torch.equal(out[1][~wrong], right[1][~wrong])


@pytest.mark.gpu
def test_more_groups_than_a_program_looks_at(device: str) -> None:
    G, M = 1030, 300
    sizes = torch.tensor(group_sizes_for("random", G, M), dtype=torch.int32)
    group_offsets = torch.cat((torch.zeros(1, dtype=torch.int32), sizes.cumsum(0, dtype=torch.int32))).to(device)
    X, Y = (spread(M, 16, torch.bfloat16, device) for _ in range(2))
    out = quantized_wgrad(X, Y, group_offsets, None, None, False, torch.float32)
    assert_right(out, X, Y, group_offsets, None, None)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("M", "T", "P", "Q", "G"),
    [
        (600, 600, 4096, 2048, 270),  # the result has 2.3e9 elements
        (600, 600, 4099, 2047, 270),
        (600_000, 600_000, 4096, 64, 4),  # X has 2.5e9 elements
        (600_000, 600_000, 4095, 64, 4),
        (600_000, 1000, 4096, 64, 4),  # of few tokens
    ],
)
def test_more_than_2_to_the_31_elements(M: int, T: int, P: int, Q: int, G: int, device: str) -> None:
    """The last group's product, and the last columns of the one before it."""
    torch.use_deterministic_algorithms(False)  # filling these tensors with NaN takes long
    X = torch.empty(T, P, device=device, dtype=torch.bfloat16).normal_()
    Y = torch.empty(M, Q, device=device, dtype=torch.bfloat16).normal_()
    tokens = torch.arange(M, dtype=torch.int32, device=device) % T
    group_offsets = torch.zeros(G + 1, dtype=torch.int32, device=device)
    group_offsets[-2], group_offsets[-1] = M - 300, M
    out = quantized_wgrad(X, Y, group_offsets, tokens if T < M else None, None, False, torch.bfloat16)
    for g, start, end, columns in ((G - 1, M - 300, M, slice(None)), (G - 2, 0, M - 300, slice(-16, None))):
        rows = X[:, columns][tokens[start:end].long()]
        assert_right(out[g : g + 1, columns], rows, Y[start:end], offsets_of([0, end - start], device), None, None)
    assert not out[0].any()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("P", "Q", "G", "M"), [(4096, 2048, 32, 20_000), (2880, 5760, 8, 9000), (2048, 768, 128, 65_536)]
)
def test_sizes_of_models(P: int, Q: int, G: int, M: int, device: str) -> None:
    sizes = torch.tensor(group_sizes_for("empty", G, M), dtype=torch.int32)
    group_offsets = torch.cat((torch.zeros(1, dtype=torch.int32), sizes.cumsum(0, dtype=torch.int32))).to(device)
    X, Y = (torch.randn(M, C, dtype=torch.bfloat16, device=device) for C in (P, Q))
    out = quantized_wgrad(X, Y, group_offsets, None, None, False, torch.bfloat16)
    assert_right(out, X, Y, group_offsets, None, None)
    for _ in range(5):
        assert torch.equal(quantized_wgrad(X, Y, group_offsets, None, None, False, torch.bfloat16), out)
