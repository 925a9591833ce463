"""Products in fp8 that are ragged along the contraction, against float64; quantising along the rows, bit for bit."""

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
from moe_kernels.ops import scaled_wgrad as rowwise_wgrad
from moe_kernels.runtime import cache
from moe_kernels.runtime.plan import Builder
from moe_kernels.runtime.signature import Counts, Operator
from moe_kernels.runtime.symbolic import SymbolicTensor
from moe_kernels.scaled import BLOCK
from moe_kernels.testing import assert_within_budget, group_sizes_for

NAN = float("nan")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OFFSETS = {
    "any sizes": [0, 1, 130, 130, 258],
    "rows outside": [7, 20, 20, 163],
    "malformed": [-5, 150, 40, 240, 90_000],
    "empty": [0, 0, 0],
    "one": [0, 128],
    "all blocks": [0, 3, 260],
}


def spread(R: int, C: int, dtype: torch.dtype, device: str) -> Tensor:
    """Return random values with a different magnitude in each column."""
    return (torch.randn(R, C) * 2.0 ** torch.randint(-5, 5, (1, C))).to(dtype).to(device)


def offsets_of(values: list[int], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def columns(x: Tensor, group_offsets: Tensor, row_to_slot: Tensor | None, squares: bool) -> tuple[Tensor, Tensor]:
    """Return the data and scales, in slots, that a plan computes from `x`."""
    rows = x if row_to_slot is None else row_to_slot
    G = len(group_offsets) - 1

    def draw(builder: Builder, inputs: Any, _: Any) -> tuple[SymbolicTensor, SymbolicTensor]:
        tokens, offsets, to_slot = inputs
        first = tokens if to_slot is None else to_slot
        table = tiles.plan_table(builder, offsets, None, BLOCK, M=first.size(0))
        return scaled_wgrad._quantize(builder, tokens, to_slot, first.size(0), table, G, 2, squares)

    globals()["plan_columns"] = draw
    names = ("x", "group_offsets", "row_to_slot")
    operator = Operator("columns", __name__, names, ("x", "row_to_slot"), lambda *_: Counts(len(x), (len(rows),), G))
    with cache.isolated():
        data, scales = cache.call(operator, (x, group_offsets, row_to_slot), ())
    return data, scales


@pytest.mark.parametrize("squares", [False, True], ids=["columns", "squares"])
@pytest.mark.parametrize(
    ("name", "gathered", "dtype"),
    [
        ("any sizes", True, torch.bfloat16),
        ("rows outside", False, torch.float16),
        ("malformed", False, torch.float32),
        ("empty", False, torch.float32),
    ],
)
def test_columns_are_quantised_bit_for_bit(
    name: str, gathered: bool, dtype: torch.dtype, squares: bool, device: str, fresh_plans: None
) -> None:
    """Columns of rows or of tokens, with NaN, infinity, zeros or subnormals, and few rows."""
    M, C = 260, 300
    x = spread(M, C, dtype, device)
    x[140, 3], x[150, 4], x[:, 5] = NAN, -float("inf"), 0
    x[:, 256:] *= torch.finfo(dtype).smallest_normal
    group_offsets = offsets_of(OFFSETS[name], device)
    row_to_slot = torch.randperm(2 * M, dtype=torch.int32)[:M].to(device) if gathered else None
    rows = x if row_to_slot is None else x[row_to_slot.long() // 2]
    data, scales = columns(x, group_offsets, row_to_slot, squares)
    offsets = clamp_offsets(group_offsets, M).tolist()
    for g, (start, end) in enumerate(pairwise(offsets)):
        first, count = start // BLOCK + g, -(-(end - start) // BLOCK)
        right = reference.quantize(rows[start:end].T, "128x128" if squares else "1x128")
        found = data[first : first + count, :C].transpose(1, 2).reshape(-1, C).view(torch.uint8)
        assert torch.equal(found[: end - start], right.data.T.view(torch.uint8))
        assert not found[end - start :].any()
        assert torch.equal(scales[first : first + count].T.view(torch.int32), right.scales.view(torch.int32))
        assert start == end or (found[: end - start] & 0x7F != 0).float().mean() > 0.2


def assert_right(
    out: Tensor, X: Tensor, Y: Tensor, group_offsets: Tensor, x_row_to_slot: Tensor | None, y_row_to_slot: Tensor | None
) -> None:
    """Compare each group with the float64 product of the quantised operands; empty groups are exact zeros."""
    plain = reference.quantized_wgrad(X, Y, group_offsets, x_row_to_slot, y_row_to_slot, out.dtype)
    x, y = (
        rows if slots is None else rows[slots.long() // (len(slots) // len(rows))]
        for rows, slots in ((X, x_row_to_slot), (Y, y_row_to_slot))
    )
    for g, (start, end) in enumerate(pairwise(clamp_offsets(group_offsets, len(x)).tolist())):
        a, b = (
            reference.dequantize(reference.quantize(rows[start:end].T, format)).double()
            for rows, format in ((x, "1x128"), (y, "128x128"))
        )
        scale = (a.abs() @ b.abs().T).amax().item() if end > start else 0.0
        scale *= 2**-13 / torch.finfo(torch.float32).eps if out.is_cuda else 1
        assert_within_budget(out[g], plain[g], a @ b.T, scale=scale, name=f"group {g}")
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
        ("all blocks", 72, 40, torch.bfloat16),
    ],
)
def test_products(name: str, P: int, Q: int, dtype: torch.dtype, device: str) -> None:
    group_offsets = offsets_of(OFFSETS[name], device)
    X, Y = spread(260, P, dtype, device), spread(260, Q, dtype, device)
    given = X.clone()
    out = quantized_wgrad(X, Y, group_offsets, None, None, False, dtype)
    assert torch.equal(X, given)
    assert_right(out, X, Y, group_offsets, None, None)
    if name == "one":
        assert torch.equal(quantized_wgrad(X, Y, group_offsets, None, None, False, dtype), out)


def test_of_tokens_in_the_other_memory_order(device: str) -> None:
    M, T = 260, 130
    group_offsets = offsets_of([3, 140, 200], device)
    tokens, Y = spread(T, 72, torch.bfloat16, device), spread(M, 40, torch.bfloat16, device)
    row_to_slot = torch.randperm(M, dtype=torch.int32).to(device)
    out = quantized_wgrad(tokens, Y, group_offsets, row_to_slot, None, True, torch.bfloat16)
    assert out.mT.is_contiguous()
    assert_right(out.mT, Y, tokens, group_offsets, None, row_to_slot)


def test_nan_of_a_group_stays_there(device: str) -> None:
    """NaN affects a column of X, or 128 columns of Y; in rows of no group it has no effect."""
    X, Y = (spread(220, C, torch.bfloat16, device) for C in (72, 140))
    group_offsets = offsets_of([10, 140, 200, 210], device)
    right = quantized_wgrad(X, Y, group_offsets, None, None, False, torch.float32)
    X[:10], Y[210:], X[150, 7], Y[160, 130] = NAN, NAN, NAN, float("inf")
    out = quantized_wgrad(X, Y, group_offsets, None, None, False, torch.float32)
    assert torch.equal(out[::2], right[::2])
    wrong = out[1].isnan()
    assert wrong[7].all() and wrong[:, 128:].all()
    assert wrong.sum() == 72 * 12 + 128
    assert torch.equal(out[1][~wrong], right[1][~wrong])


def rowwise_operands(
    M: int, P: int, Q: int, G: int, device: str, dtypes: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3)
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return X `[M, P]`, scales `[G, P]`, Y `[M, Q]` and scales `[G, Q]`; X and Y are contiguous along M."""
    X, Y = (torch.randn(C, M, device=device).to(dtype).T for C, dtype in zip((P, Q), dtypes, strict=True))
    scales_X, scales_Y = (2.0 ** torch.randint(-5, 5, (G, C), device=device) for C in (P, Q))
    return X, scales_X, Y, scales_Y


def assert_rowwise_right(
    out: Tensor, X: Tensor, scales_X: Tensor, Y: Tensor, scales_Y: Tensor, group_offsets: Tensor, fast: bool
) -> None:
    """Compare each group with the float64 product of the operands; empty groups are exact zeros."""
    rounding = 2 ** -(12 if fast else 13) / torch.finfo(torch.float32).eps if out.is_cuda else 1
    offsets = clamp_offsets(group_offsets, len(X)).tolist()
    for g, (start, end) in enumerate(pairwise(offsets)):
        x, y = (rows[start:end].double() * scales[g].double() for rows, scales in ((X, scales_X), (Y, scales_Y)))
        scale = (x.abs().T @ y.abs()).amax().item() if end > start else 0.0
        scale *= rounding
        plain = (x.float().T @ y.float()).to(out.dtype)
        assert_within_budget(out[g], plain, x.T @ y, scale=scale, name=f"group {g}")
        if start == end:
            assert not out[g].any()


@pytest.mark.parametrize("fast", [False, True], ids=["exact", "fast"])
@pytest.mark.parametrize(
    ("name", "P", "Q", "dtype", "dtypes"),
    [
        ("any sizes", 130, 40, torch.float32, (E4M3, E5M2)),
        ("rows outside", 1, 129, torch.float16, (E5M2, E4M3)),
        ("malformed", 72, 40, torch.bfloat16, (E4M3, E4M3)),
        ("empty", 72, 40, torch.bfloat16, (E5M2, E5M2)),
        ("one", 72, 40, torch.bfloat16, (E4M3, E4M3)),
    ],
)
def test_rowwise_products(
    name: str,
    P: int,
    Q: int,
    dtype: torch.dtype,
    dtypes: tuple[torch.dtype, torch.dtype],
    fast: bool,
    device: str,
) -> None:
    group_offsets = offsets_of(OFFSETS[name], device)
    operands = rowwise_operands(260, P, Q, len(group_offsets) - 1, device, dtypes)
    X, scales_X, Y, scales_Y = operands
    given = X.clone()
    out = rowwise_wgrad(*operands, group_offsets, dtype, fast)
    assert torch.equal(X.view(torch.uint8), given.view(torch.uint8))
    assert_rowwise_right(out, *operands, group_offsets, fast)
    assert name == "empty" or (out != 0).any()
    copied = X.contiguous(), scales_X.T.contiguous().T, torch.stack([Y, Y], 1)[:, 0], scales_Y
    assert torch.equal(rowwise_wgrad(*copied, group_offsets, dtype, fast), out)


@pytest.mark.parametrize(
    ("M", "P", "Q", "G"), [(33, 17, 0, 2), (33, 0, 17, 2), (0, 17, 16, 2), (33, 0, 0, 1), (0, 0, 0, 0)]
)
def test_rowwise_operands_without_elements(M: int, P: int, Q: int, G: int, device: str) -> None:
    group_offsets = torch.full((G + 1,), M, dtype=torch.int32, device=device)
    out = rowwise_wgrad(*rowwise_operands(M, P, Q, G, device), group_offsets, torch.bfloat16, False)
    assert out.shape == (G, P, Q) and not out.any()


@pytest.mark.parametrize("fast", [False, True], ids=["exact", "fast"])
def test_nan_of_a_rowwise_group_stays_there(fast: bool, device: str) -> None:
    """In data it affects a row or column of the result, and none in rows of no group or in scales of empty groups."""
    X, scales_X, Y, scales_Y = rowwise_operands(220, 72, 140, 4, device)
    group_offsets = offsets_of([10, 140, 200, 200, 210], device)
    right = rowwise_wgrad(X, scales_X, Y, scales_Y, group_offsets, torch.float32, fast)
    X[:10], Y[210:], X[150, 7], Y[160, 130], scales_X[2], scales_Y[2] = NAN, NAN, NAN, NAN, NAN, NAN
    out = rowwise_wgrad(X, scales_X, Y, scales_Y, group_offsets, torch.float32, fast)
    assert torch.equal(out[[0, 2, 3]], right[[0, 2, 3]])
    wrong = out[1].isnan()
    assert wrong[7].all() and wrong[:, 130].all()
    assert wrong.sum() == 72 + 140 - 1
    assert torch.equal(out[1][~wrong], right[1][~wrong])


@pytest.mark.gpu
def test_more_groups_than_a_program_looks_at(device: str) -> None:
    G, M = 1030, 300
    sizes = torch.tensor(group_sizes_for("random", G, M), dtype=torch.int32)
    group_offsets = torch.cat((torch.zeros(1, dtype=torch.int32), sizes.cumsum(0, dtype=torch.int32))).to(device)
    X, Y = (spread(M, 16, torch.bfloat16, device) for _ in range(2))
    out = quantized_wgrad(X, Y, group_offsets, None, None, False, torch.float32)
    assert_right(out, X, Y, group_offsets, None, None)
    operands = rowwise_operands(M, 16, 16, G, device)
    out = rowwise_wgrad(*operands, group_offsets, torch.float32, True)
    assert_rowwise_right(out, *operands, group_offsets, True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("M", "T", "P", "Q", "G"),
    [
        (600, 600, 4096, 2048, 270),  # the result has 2.3e9 elements
        (600, 600, 4099, 2047, 270),
        (600_000, 600_000, 4096, 64, 4),  # X has 2.5e9 elements
        (600_000, 600_000, 4095, 64, 4),
        (600_000, 1000, 4096, 64, 4),  # X has few tokens
    ],
)
def test_more_than_2_to_the_31_elements(M: int, T: int, P: int, Q: int, G: int, device: str) -> None:
    """The last group's product and the last columns of the one before it are compared."""
    torch.use_deterministic_algorithms(False)  # filling these tensors with NaN takes long
    X = torch.empty(T, P, device=device, dtype=torch.bfloat16).normal_()
    Y = torch.empty(M, Q, device=device, dtype=torch.bfloat16).normal_()
    row = torch.arange(M, dtype=torch.int32, device=device)
    tokens, top_k = row % T, M // T
    group_offsets = torch.zeros(G + 1, dtype=torch.int32, device=device)
    group_offsets[-2], group_offsets[-1] = M - 300, M
    out = quantized_wgrad(
        X, Y, group_offsets, tokens * top_k + row // T if T < M else None, None, False, torch.bfloat16
    )
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


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True], ids=["exact", "fast"])
@pytest.mark.parametrize(
    ("M", "P", "Q", "G"),
    [
        (600, 4096, 2048, 270),  # the result has 2.3e9 elements
        (600_000, 4096, 64, 4),  # X has 2.5e9 elements
        (600_000, 64, 4095, 4),  # Y has 2.5e9 elements
    ],
)
def test_rowwise_with_more_than_2_to_the_31_elements(M: int, P: int, Q: int, G: int, fast: bool, device: str) -> None:
    """The last group's product and the last columns of the one before it are compared."""
    torch.use_deterministic_algorithms(False)  # filling these tensors with NaN takes long
    X, Y = (torch.empty(C, M, dtype=torch.bfloat16, device=device).normal_().to(E4M3).T for C in (P, Q))
    scales_X, scales_Y = (2.0 ** torch.randint(-5, 5, (G, C), device=device) for C in (P, Q))
    group_offsets = torch.zeros(G + 1, dtype=torch.int32, device=device)
    many = max(M - 6000, 0)  # with more rows in the group before the last, the error of fast sums says nothing
    group_offsets[-3], group_offsets[-2], group_offsets[-1] = many, M - 300, M
    out = rowwise_wgrad(X, scales_X, Y, scales_Y, group_offsets, torch.bfloat16, fast)
    for g, start, end, columns in ((G - 1, M - 300, M, slice(None)), (G - 2, many, M - 300, slice(-16, None))):
        one = X[start:end, columns], scales_X[g : g + 1, columns], Y[start:end], scales_Y[g : g + 1]
        assert_rowwise_right(out[g : g + 1, columns], *one, offsets_of([0, end - start], device), fast)
    assert not out[0].any()


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True], ids=["exact", "fast"])
@pytest.mark.parametrize(
    ("P", "Q", "G", "M"), [(4096, 2048, 32, 20_000), (2880, 5760, 8, 9001), (2048, 768, 128, 65_536)]
)
def test_rowwise_sizes_of_models(P: int, Q: int, G: int, M: int, fast: bool, device: str) -> None:
    sizes = torch.tensor(group_sizes_for("empty", G, M), dtype=torch.int32)
    group_offsets = torch.cat((torch.zeros(1, dtype=torch.int32), sizes.cumsum(0, dtype=torch.int32))).to(device)
    operands = rowwise_operands(M, P, Q, G, device)
    out = rowwise_wgrad(*operands, group_offsets, torch.bfloat16, fast)
    assert_rowwise_right(out, *operands, group_offsets, fast)
    for _ in range(5):
        assert torch.equal(rowwise_wgrad(*operands, group_offsets, torch.bfloat16, fast), out)


@pytest.mark.gpu
def test_exact_rowwise_sums_are_closer_than_fast_ones(device: str) -> None:
    """Fast sums, in 14 bits, differ by over 2^-12 of the largest sum of magnitudes, exact ones by 2^-17."""
    group_offsets = offsets_of([0, 7000, 7000, 16_000], device)
    operands = rowwise_operands(16_000, 256, 256, 3, device)
    exact = rowwise_wgrad(*operands, group_offsets, torch.float32, False)
    fast = rowwise_wgrad(*operands, group_offsets, torch.float32, True)
    x, y = (rows.double() for rows in (operands[0], operands[2]))
    for g, rows in ((0, slice(0, 7000)), (2, slice(7000, None))):
        right = (x[rows].T @ y[rows]) * operands[1][g, :, None].double() * operands[3][g].double()
        assert (exact[g] - right).norm() <= (fast[g] - right).norm() / 4
