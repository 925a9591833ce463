"""The jagged kernels against fp64: sizes, dtypes, layouts, odd extents, malformed offsets, NaN isolation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from building import run
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_kernels import group_offsets_from_sizes, grouped_gemm, grouped_mm, reference, rules
from moe_kernels.kernels.grouped_gemm import multiply
from moe_kernels.runtime import cache
from moe_kernels.runtime.plan import Builder
from moe_kernels.runtime.symbolic import SymbolicTensor
from moe_kernels.testing import assert_grouped_gemm_close, assert_within_budget, group_sizes_for, make_inputs

variants = pytest.mark.parametrize("variant", ["basic", "persistent"])
SIZES = {
    "empty groups": [0, 5, 0, 0, 35, 1, 40, 0],
    "1 to 17": list(range(1, 18)),
    "one has all": [0, 150, 0],
    "longer than a tile": [130, 20, 257],
    "few rows": [1, 0, 2],
    "one group": [40],
    "one row": [1],
}


def offsets(values: list[int], device: str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


@variants
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("per_group", [True, False], ids=["per group", "shared"])
def test_group_sizes(variant: str, sizes: list[int], per_group: bool, device: str) -> None:
    A, B, group_offsets = make_inputs(sizes, 48, 64, dtype=torch.float16, device=device, per_group=per_group)
    assert_grouped_gemm_close(grouped_gemm(A, B, group_offsets, variant=variant), A, B, group_offsets)


@variants
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("transposed", [True, False], ids=["B [G, N, K] viewed", "B [G, K, N]"])
def test_dtypes_and_weight_layouts(variant: str, dtype: torch.dtype, transposed: bool, device: str) -> None:
    A, B, group_offsets = make_inputs([70, 0, 130], 72, 40, dtype=dtype, device=device, transposed=transposed)
    out = grouped_gemm(A, B, group_offsets, variant=variant)
    assert out.dtype == dtype
    assert_grouped_gemm_close(out, A, B, group_offsets)


@variants
@pytest.mark.parametrize("transposed", [True, False], ids=["B [G, N, K] viewed", "B [G, K, N]"])
@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30], ids=str)
def test_float32_of_all_magnitudes(variant: str, transposed: bool, magnitude: float, device: str) -> None:
    """Tensor cores multiply float32 in parts. Infinity and NaN give what they give in PyTorch."""
    sizes = [3, 20, 130]
    A, B, group_offsets = make_inputs(sizes, 48, 96, dtype=torch.float32, device=device, transposed=transposed)
    A = A * magnitude
    A[1, 5], A[7, 0], A[7, 1], A[9, 95], A[100, 3] = torch.inf, torch.inf, torch.inf, torch.nan, -torch.inf
    plain, exact = (reference.grouped_gemm(x, y, group_offsets) for x, y in ((A, B), (A.double(), B.double())))
    out = grouped_gemm(A, B, group_offsets, variant=variant)
    assert torch.equal(out.isnan(), plain.isnan()) and torch.equal(out.isinf(), plain.isinf())
    assert torch.equal(out[plain.isinf()], plain[plain.isinf()])
    finite = plain.isfinite().all(1)
    assert finite.sum() == 149
    for e, rows in enumerate(torch.arange(len(A), device=device).split(sizes)):
        kept = rows[finite[rows]]
        scale = (A[kept].double().abs() @ B[e].double().abs()).max().item()
        assert_within_budget(out[kept], plain[kept], exact[kept], scale=scale)


@variants
@pytest.mark.parametrize(("K", "N"), [(1, 1), (16, 1), (1, 16), (3, 7), (7, 9), (97, 259), (17, 16), (16, 3)])
def test_extents_that_no_tile_divides(variant: str, K: int, N: int, device: str) -> None:
    A, B, group_offsets = make_inputs([9, 0, 17, 130], N, K, dtype=torch.float16, device=device)
    assert_grouped_gemm_close(grouped_gemm(A, B, group_offsets, variant=variant), A, B, group_offsets)


@pytest.mark.parametrize("transposed", [True, False], ids=["B [G, N, K] viewed", "B [G, K, N]"])
@pytest.mark.parametrize(
    ("K", "N"),
    [
        *[(1, 768), (4, 768), (8, 520), (36, 768), (64, 768), (256, 264), (512, 1), (512, 8), (512, 20), (1024, 36)],
        # No power of two, so blocks are larger than the operands; 20 and 132 elements are no multiples of 16 bytes.
        *[(24, 264), (48, 520), (72, 264), (20, 264), (132, 72), (256, 24), (256, 72), (256, 96), (256, 160)],
    ],
)
def test_adapters_of_low_rank(K: int, N: int, transposed: bool, device: str) -> None:
    """Few columns, or a small K. On a GPU the groups are large enough for the kernels that the rule has for these."""
    sizes = group_sizes_for("softmax", 32, 8192) if device == "cuda" else [70, 0, 40]
    A, B, group_offsets = make_inputs(sizes, N, K, dtype=torch.float16, device=device, transposed=transposed)
    assert_grouped_gemm_close(grouped_gemm(A, B, group_offsets), A, B, group_offsets)


@variants
@pytest.mark.parametrize(
    ("a_dtype", "b_dtype", "out_dtype"),
    [
        (torch.float16, torch.float32, None),
        (torch.bfloat16, torch.float16, None),
        (torch.float16, torch.float16, torch.float32),
        (torch.float32, torch.float32, torch.bfloat16),
    ],
)
def test_mixed_and_output_dtypes(
    variant: str, a_dtype: torch.dtype, b_dtype: torch.dtype, out_dtype: torch.dtype | None, device: str
) -> None:
    A, B, group_offsets = make_inputs([20, 30], 32, 48, dtype=torch.float32, device=device)
    A, B = A.to(a_dtype), B.to(b_dtype)
    out = grouped_gemm(A, B, group_offsets, out_dtype=out_dtype, variant=variant)
    assert out.dtype == (out_dtype or torch.promote_types(a_dtype, b_dtype))
    assert_grouped_gemm_close(out, A, B, group_offsets)


@variants
@pytest.mark.usefixtures("tf32")
def test_left_operands_cast_for_tf32(variant: str, device: str) -> None:
    """tf32 represents all values of bfloat16 and float16."""
    A, B, group_offsets = make_inputs([20, 30], 32, 48, dtype=torch.bfloat16, device=device)
    for left in (A, A.t().contiguous().t(), A[:, :1].expand(50, 48)):
        out = grouped_gemm(left, B.half(), group_offsets, variant=variant)
        assert out.dtype == torch.float32
        assert_grouped_gemm_close(out, left, B.half(), group_offsets)


@variants
@pytest.mark.parametrize(
    "values",
    [[3, 20, 10, -5, 95, 60], [0, 500, 20, 30, 40, 50], [-9, -1, 0, 7, 7, 2**31 - 1], [80, 70, 60, 0, 0, 0], [0] * 6],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_malformed_offsets_are_clamped(variant: str, values: list[int], dtype: torch.dtype, device: str) -> None:
    A, B, _ = make_inputs([16] * 5, 32, 24, dtype=torch.float16, device=device)
    group_offsets = offsets(values, device, dtype)
    out = grouped_gemm(A, B, group_offsets, variant=variant)
    assert_grouped_gemm_close(out, A, B, group_offsets)


def test_int64_offsets_beyond_int32(device: str) -> None:
    A, B, _ = make_inputs([16] * 2, 32, 24, dtype=torch.float16, device=device)
    group_offsets = offsets([-(2**40), 16, 2**33], device, torch.int64)
    assert_grouped_gemm_close(grouped_gemm(A, B, group_offsets), A, B, group_offsets)


@variants
def test_offsets_with_a_stride(variant: str, device: str) -> None:
    A, B, group_offsets = make_inputs([9, 0, 30], 32, 24, dtype=torch.float16, device=device)
    strided = torch.stack([group_offsets, torch.full_like(group_offsets, 7)], dim=1)[:, 0]
    assert not strided.is_contiguous()
    assert_grouped_gemm_close(grouped_gemm(A, B, strided, variant=variant), A, B, group_offsets)


def _strided_inputs(A: torch.Tensor, B: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    wide = torch.full((A.size(0), A.size(1) + 9), float("nan"), dtype=A.dtype, device=A.device)
    beside_nan = wide[:, 1 : A.size(1) + 1]
    beside_nan.copy_(A)
    big = torch.full((*B.shape[:-1], B.size(-1) + 5), float("nan"), dtype=B.dtype, device=B.device)
    sliced = big[..., : B.size(-1)]
    sliced.copy_(B)
    every_second = torch.full((2 * A.size(0), A.size(1)), float("nan"), dtype=A.dtype, device=A.device)[::2]
    every_second.copy_(A)
    return {
        "A column-major": (A.t().contiguous().t(), B),
        "A misaligned, NaN beside it": (beside_nan, B),
        "every second row of A": (every_second, B),
        "A expanded": (A[:, :1].expand_as(A), B),
        "B with NaN in its gaps": (A, sliced),
        "B in reverse order of dimensions": (A, B.permute(2, 1, 0).contiguous().permute(2, 1, 0)),
        "B expanded": (A, B[:1].expand_as(B)),
    }


@variants
@pytest.mark.parametrize("case", range(7))
def test_strides(variant: str, case: int, device: str) -> None:
    A, B, group_offsets = make_inputs([9, 0, 140], 40, 24, dtype=torch.float16, device=device)
    A, B = list(_strided_inputs(A, B).values())[case]
    assert_grouped_gemm_close(grouped_gemm(A, B, group_offsets, variant=variant), A, B, group_offsets)


@variants
@pytest.mark.parametrize("K", [24, 20], ids=["K 24", "K 20, no tile divides it"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=str)
def test_nan_stays_in_its_group(variant: str, K: int, poison: float, device: str) -> None:
    A, B, group_offsets = make_inputs([9, 0, 17, 33, 140], 40, K, dtype=torch.float16, device=device)
    group_offsets = group_offsets.clone()
    group_offsets[-1] -= 100  # the last rows belong to no group
    clean = grouped_gemm(A, B, group_offsets, variant=variant)
    A, B = A.clone(), B.clone()
    first, end = group_offsets[2:4].tolist()
    A[first:end] = poison
    A[group_offsets[-1] :] = poison
    B[1] = poison  # the weight of an empty group
    B[3] = poison
    out = grouped_gemm(A, B, group_offsets, variant=variant)
    assert_grouped_gemm_close(out, A, B, group_offsets)
    assert torch.equal(out[:first], clean[:first])
    assert torch.equal(out[group_offsets[4] :], clean[group_offsets[4] :])
    assert not out[first:end].isfinite().any()


@variants
def test_fp16_overflow_is_inf(variant: str, device: str) -> None:
    A, B, group_offsets = make_inputs([20, 30], 32, 48, dtype=torch.float16, device=device)
    A[3] *= 1e4
    B *= 10
    out = grouped_gemm(A, B, group_offsets, variant=variant)
    assert out.isinf().any()
    assert not out.isnan().any()
    assert torch.equal(out.isinf(), reference.grouped_gemm(A, B, group_offsets).isinf())


@variants
@pytest.mark.parametrize(("M", "K", "N", "G"), [(0, 8, 8, 3), (5, 8, 0, 3), (5, 0, 8, 3), (5, 8, 8, 0)])
def test_extents_of_zero(variant: str, M: int, K: int, N: int, G: int, device: str) -> None:
    A, B = torch.ones(M, K, device=device), torch.ones(G, K, N, device=device)
    out = grouped_gemm(A, B, torch.full((G + 1,), M, dtype=torch.int32, device=device) * 0, variant=variant)
    assert out.shape == (M, N)
    assert torch.equal(out, torch.zeros(M, N, device=device))


@variants
@pytest.mark.usefixtures("fresh_plans")
def test_offsets_read_in_chunks(variant: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MOST_OFFSETS", 16)
    sizes = group_sizes_for("zipf", 20, 60)
    sizes[16] = 0
    A, B, group_offsets = make_inputs(sizes, 16, 16, dtype=torch.float16, device=device)
    assert_grouped_gemm_close(grouped_gemm(A, B, group_offsets, variant=variant), A, B, group_offsets)


@variants
def test_writes_stay_in_bounds(variant: str, device: str) -> None:
    A, B, group_offsets = make_inputs([9, 0, 140], 40, 24, dtype=torch.float16, device=device)
    M, N = A.size(0), 40
    canvas = torch.full((M + 64, N + 48), 7.0, dtype=torch.float16, device=device)
    out = canvas[32 : 32 + M, 24 : 24 + N]

    def steps(builder: Builder, A: SymbolicTensor, B: SymbolicTensor, offsets: Any, out: SymbolicTensor) -> None:
        multiply(builder, A, B, offsets, None, out, variant)

    run(steps, {"A": A, "B": B, "offsets": group_offsets, "out": out}, rows=("A", "out"), groups=3)
    assert_grouped_gemm_close(out, A, B, group_offsets)
    out.fill_(7.0)
    assert (canvas == 7.0).all()


@variants
def test_repeats_are_bit_identical(variant: str, device: str) -> None:
    A, B, group_offsets = make_inputs([9, 0, 140], 40, 24, dtype=torch.float16, device=device)
    first = grouped_gemm(A, B, group_offsets, variant=variant)
    for _ in range(20 if device == "cuda" else 3):
        assert torch.equal(first, grouped_gemm(A, B, group_offsets, variant=variant))


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.one_of(st.just(0), st.integers(1, 40)), min_size=6, max_size=6),
    before=st.integers(0, 20),
    after=st.integers(0, 20),
    variant=st.sampled_from(["basic", "persistent"]),
)
def test_any_sizes_and_rows_outside(sizes: list[int], before: int, after: int, variant: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    A, B, _ = make_inputs([before, *sizes, after], 32, 24, dtype=torch.float16, device=device)
    B = B[1:-1]
    group_offsets = before + group_offsets_from_sizes(torch.tensor(sizes, dtype=torch.int32, device=device))
    A[:before], A[A.size(0) - after :] = float("nan"), float("inf")
    assert_grouped_gemm_close(grouped_gemm(A, B, group_offsets, variant=variant), A, B, group_offsets)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("stride", [1, 2])
def test_grouped_mm_like_an_earlier_call_is_a_repeat(
    stride: int, index_dtype: torch.dtype, device: str, repeats: Callable[[str], None]
) -> None:
    """Each call has new tensors, perhaps with other rows. One program of `prepend_zero` does not read all groups."""
    bias = torch.randn(300, 24, device=device, dtype=torch.float16)
    for last in (1, 1, 3):
        A, B, group_offsets = make_inputs([4, *[0] * 298, last], 24, 32, dtype=torch.float16, device=device)
        offs = group_offsets[1:].to(index_dtype).repeat_interleave(stride)[::stride]
        out = grouped_mm(A, B, offs=offs, bias=bias)
        expected = reference.grouped_mm(A.double(), B.double(), offs=offs, bias=bias.double())
        torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)
        repeats("grouped_mm")
    assert len(cache.plans.recent["grouped_mm"]) == 1
    options: dict[str, Any]
    for options in ({"out_dtype": torch.float32}, {"bias": None}):
        with pytest.raises(AssertionError, match="no repeat"):
            grouped_mm(A, B, offs=offs, **{"bias": bias, **options})


def test_ends_of_grouped_mm_past_int32(device: str) -> None:
    """The last group ends where the rows do."""
    A, B, _ = make_inputs([3, 4], 24, 32, dtype=torch.float16, device=device)
    out = grouped_mm(A, B, offs=torch.tensor([3, 2**32 + 1], device=device))
    expected = grouped_mm(A, B, offs=torch.tensor([3, 7], device=device))
    assert expected.any(1).all() and torch.equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("M", [200, 4000], ids=["few rows", "many rows"])
def test_grouped_mm_in_a_graph_with_other_offs(M: int, device: str) -> None:
    G = 16
    A, B, group_offsets = make_inputs(group_sizes_for("softmax", G, M), 192, 128, dtype=torch.bfloat16, device=device)
    offs = group_offsets[1:].clone()
    grouped_mm(A, B, offs=offs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = grouped_mm(A, B, offs=offs)
    for kind in ("softmax", "zipf", "one", "empty"):
        sizes = torch.tensor(group_sizes_for(kind, G, M), device=device)
        group_offsets[1:] = sizes.cumsum(0)
        offs.copy_(group_offsets[1:])
        out.fill_(float("nan"))
        graph.replay()
        assert_grouped_gemm_close(out, A, B, group_offsets)


@pytest.mark.parametrize("rows", [3, 100], ids=["few rows", "many rows"])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_grouped_mm_with_bias(rows: int, out_dtype: torch.dtype | None, device: str) -> None:
    A, B, group_offsets = make_inputs([rows, 0, rows, 5], 40, 24, dtype=torch.float16, device=device)
    bias = torch.randn(4, 40, device=device, dtype=torch.float16)
    offs = group_offsets[1:].clone()
    offs[-1] -= 4
    out = grouped_mm(A, B, offs=offs, bias=bias, out_dtype=out_dtype)
    expected = reference.grouped_mm(A.double(), B.double(), offs=offs, bias=bias.double())
    assert out.dtype == (out_dtype or torch.float16)
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(out[-4:], torch.zeros_like(out[-4:]))
    without = grouped_mm(A[:, :0], B[:, :0], offs=offs, bias=bias)
    torch.testing.assert_close(without[: rows + 1], torch.cat([bias[:1].expand(rows, -1), bias[2:3]]))
