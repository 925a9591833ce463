from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_kernels import quantize, testing
from moe_kernels.reference import grouped_gemm, scaled_grouped_gemm
from moe_kernels.testing import (
    SizeKind,
    assert_grouped_gemm_close,
    assert_scaled_grouped_gemm_close,
    assert_within_budget,
    byte_count,
    flop_count,
    group_sizes_for,
    make_experts,
    make_inputs,
    make_tokens,
    plain_product,
)

SIZES = [0, 1, 40, 0, 7]
Inputs = tuple[Tensor, Tensor, Tensor]


def problem(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Inputs]:
    """Return a correct result with its inputs."""
    inputs = make_inputs(SIZES, 24, 64, dtype=dtype, device="cpu")
    return grouped_gemm(*inputs), inputs


def test_tokens_choose_different_experts_unevenly() -> None:
    hidden, topk_ids, topk_weights = make_tokens(4000, 8, 16, 4, dtype=torch.bfloat16, device="cpu", seed=3)
    assert (hidden.shape, hidden.dtype) == ((4000, 8), torch.bfloat16)
    assert (topk_ids.shape, topk_ids.dtype, topk_weights.shape, topk_weights.dtype) == (
        (4000, 4),
        torch.int64,
        (4000, 4),
        torch.bfloat16,
    )
    assert (topk_ids.sort(dim=1).values.diff(dim=1) > 0).all() and topk_ids.min() == 0 and topk_ids.max() == 15
    assert (topk_weights > 0).all() and (topk_weights.float().sum(1) - 1).abs().max() < 0.02
    sizes = topk_ids.flatten().bincount(minlength=16)
    assert sizes.max() > 1.5 * sizes.min()
    again = make_tokens(4000, 8, 16, 4, dtype=torch.bfloat16, device="cpu", seed=3)
    assert all(map(torch.equal, (hidden, topk_ids, topk_weights), again))
    assert not torch.equal(topk_ids, make_tokens(4000, 8, 16, 4, dtype=torch.bfloat16, device="cpu")[1])


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_keep_the_variance(transposed: bool) -> None:
    w_gate_up, w_down = make_experts(3, 64, 40, dtype=torch.float32, device="cpu", transposed=transposed)
    assert w_gate_up.shape == ((3, 64, 80) if transposed else (3, 80, 64))
    assert w_down.shape == ((3, 40, 64) if transposed else (3, 64, 40))
    assert w_gate_up.is_contiguous() and w_down.is_contiguous()
    assert w_gate_up.var().item() == pytest.approx(1 / 64, rel=0.1)
    assert w_down.var().item() == pytest.approx(1 / 40, rel=0.1)


def test_experts_repeat_with_the_seed() -> None:
    like: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cpu"}
    first, again, other = (make_experts(2, 8, 4, **like, seed=seed) for seed in (0, 0, 1))
    for a, b, c in zip(first, again, other, strict=True):
        assert a.dtype == torch.bfloat16
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(get_args(SizeKind)),
    G=st.integers(3, 40),
    M=st.integers(0, 500),
    seed=st.integers(0, 9),
)
def test_sizes_add_up_and_repeat(kind: SizeKind, G: int, M: int, seed: int) -> None:
    sizes = group_sizes_for(kind, G, M, seed)
    assert len(sizes) == G
    assert sum(sizes) == M
    assert min(sizes) >= 0
    assert sizes == group_sizes_for(kind, G, M, seed)
    if kind == "uniform":
        assert max(sizes) - min(sizes) <= 1
    elif kind == "one":
        assert sizes[G // 2] == M
    elif kind == "empty":
        assert not any(sizes[::3])
        assert sizes[-1] == 0
    elif kind == "nine-tenths":
        others = [size for g, size in enumerate(sizes) if g != G // 2]
        assert sum(others) == (M // 10 if G > 1 else 0)
        assert not others or max(others) - min(others) <= 1
    elif kind == "half-empty":
        assert not any(sizes[1::2])


def test_uniform_puts_the_remainder_first() -> None:
    assert group_sizes_for("uniform", 4, 10) == [3, 3, 2, 2]


@pytest.mark.parametrize("kind", ["softmax", "zipf", "random"])
def test_drawn_sizes_follow_the_documented_recipe(kind: SizeKind) -> None:
    generator = torch.Generator().manual_seed(5)
    if kind == "zipf":
        probabilities = torch.tensor([1 / (g + 1) ** 1.5 for g in range(16)], dtype=torch.float64)
    else:
        scale = {"softmax": 0.5, "random": 2.0}[kind]
        probabilities = torch.softmax(scale * torch.randn(16, generator=generator), 0)
    drawn = torch.multinomial(probabilities, 1000, replacement=True, generator=generator).tolist()
    assert group_sizes_for(kind, 16, 1000, seed=5) == [drawn.count(g) for g in range(16)]


def test_groups_that_are_not_empty_are_drawn_alone() -> None:
    assert group_sizes_for("half-empty", 32, 1000, seed=5)[::2] == group_sizes_for("softmax", 16, 1000, seed=5)


def test_seeds_differ() -> None:
    assert group_sizes_for("softmax", 16, 1000, seed=0) != group_sizes_for("softmax", 16, 1000, seed=1)


@pytest.mark.parametrize("kind", get_args(SizeKind))
def test_sizes_of_no_groups_or_no_rows(kind: SizeKind) -> None:
    assert group_sizes_for(kind, 0, 0) == []
    assert group_sizes_for(kind, 2, 0) == [0, 0]
    with pytest.raises(ValueError, match=f"^G: no group of kind '{kind}' can hold M = 3 rows, got G = 0"):
        group_sizes_for(kind, 0, 3)


def test_sizes_refuse() -> None:
    with pytest.raises(ValueError, match=r"^kind: expected one of uniform, softmax, .*got 'evn'"):
        group_sizes_for("evn", 2, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^G: no group of kind 'empty'"):
        group_sizes_for("empty", 2, 3)
    with pytest.raises(ValueError, match=r"^G, M: expected at least 0, got G = 2, M = -3"):
        group_sizes_for("uniform", 2, -3)
    with pytest.raises(ValueError, match=r"^G, M: expected at least 0, got G = -2, M = 0"):
        group_sizes_for("uniform", -2, 0)


@pytest.mark.parametrize("per_group", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_inputs(per_group: bool, transposed: bool) -> None:
    A, B, group_offsets = make_inputs(
        SIZES, 24, 64, dtype=torch.float16, device="cpu", per_group=per_group, transposed=transposed
    )
    assert A.shape == (48, 64)
    assert B.shape == ((5, 64, 24) if per_group else (64, 24))
    assert A.dtype == B.dtype == torch.float16
    assert (group_offsets.tolist(), group_offsets.dtype) == ([0, 0, 1, 41, 41, 48], torch.int32)
    assert B.is_contiguous() is not transposed
    assert B.transpose(-2, -1).is_contiguous() is transposed
    assert 0.9 < grouped_gemm(A, B, group_offsets).float().std() < 1.1


def test_inputs_repeat_with_the_seed() -> None:
    first, again, other = (make_inputs(SIZES, 3, 4, dtype=torch.float32, device="cpu", seed=seed) for seed in (0, 0, 1))
    for a, b, c in zip(first[:2], again[:2], other[:2], strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


def test_inputs_without_a_reduction() -> None:
    A, B, _ = make_inputs([2], 3, 0, dtype=torch.float32, device="cpu")
    assert (A.shape, B.shape) == ((2, 0), (1, 0, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("per_group", [False, True])
def test_a_right_result_passes(dtype: torch.dtype, per_group: bool) -> None:
    inputs = make_inputs(SIZES, 24, 64, dtype=dtype, device="cpu", per_group=per_group)
    report = assert_grouped_gemm_close(grouped_gemm(*inputs), *inputs)
    assert SIZES[report["group"]] > 0
    assert 2 * report["max_plain_error"] < report["budget"]
    assert 0 <= report["ratio"] == report["max_error"] / report["budget"] <= 1


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_another_order_of_summation_passes(out_dtype: torch.dtype) -> None:
    A, B, group_offsets = make_inputs(SIZES, 24, 512, dtype=torch.bfloat16, device="cpu")
    first, second = (
        grouped_gemm(A[:, half], B[:, half], group_offsets, out_dtype=torch.float32)
        for half in (slice(256), slice(256, 512))
    )
    assert_grouped_gemm_close((first + second).to(out_dtype), A, B, group_offsets)


def zero(out: Tensor, inputs: Inputs) -> Tensor:
    return torch.zeros_like(out)


def zero_one_row(out: Tensor, inputs: Inputs) -> Tensor:
    out[45] = 0
    return out


def swap_experts(out: Tensor, inputs: Inputs) -> Tensor:
    A, B, group_offsets = inputs
    return grouped_gemm(A, B[[0, 1, 4, 3, 2]], group_offsets)


def start_a_group_late(out: Tensor, inputs: Inputs) -> Tensor:
    A, B, group_offsets = inputs
    shifted = group_offsets.clone()
    shifted[3:5] += 1
    return grouped_gemm(A, B, shifted)


def drop_the_last_of_k(out: Tensor, inputs: Inputs) -> Tensor:
    A, B, group_offsets = inputs
    return grouped_gemm(A[:, :-1], B[:, :-1], group_offsets)


def put_a_nan(out: Tensor, inputs: Inputs) -> Tensor:
    out[45, 3] = float("nan")
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("spoil", "group"),
    [
        (zero, r"group 1 \(rows 0:1\): error .* exceeds the budget"),
        (zero_one_row, r"group 4 \(rows 41:48\): error .* exceeds the budget"),
        (swap_experts, r"group 2 \(rows 1:41\): error .* exceeds the budget"),
        (start_a_group_late, r"group 4 \(rows 41:48\): error .* exceeds the budget"),
        (drop_the_last_of_k, r"group 1 \(rows 0:1\): error .* exceeds the budget"),
        (put_a_nan, r"group 4 \(rows 41:48\): NaN or infinity in other places"),
    ],
)
def test_a_wrong_result_fails(spoil, group: str, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    out, inputs = problem(dtype)
    with pytest.raises(AssertionError, match=f"^{group}"):
        assert_grouped_gemm_close(spoil(out, inputs), *inputs)


def test_the_budget_is_twice_plain_pytorchs_error_plus_the_floor() -> None:
    _, (A, B, group_offsets) = problem(torch.float32)
    ref = grouped_gemm(A.double(), B.double(), group_offsets)
    plain = grouped_gemm(A, B, group_offsets)
    scale = grouped_gemm(A.double().abs(), B.double().abs(), group_offsets)
    for g, rows in ((1, slice(0, 1)), (2, slice(1, 41)), (4, slice(41, 48))):
        plain_error = (plain[rows] - ref[rows]).abs().max().item()
        budget = 2 * plain_error + 2 * 2**-23 * scale[rows].max().item()
        # `out` is in float64, so that its error can be set exactly; the plain product of A and B stays in float32.
        out = ref.clone()
        out[rows.stop - 1, 3] += 0.999 * budget
        report = assert_grouped_gemm_close(out, A, B, group_offsets)
        assert report["group"] == g
        assert report["budget"] == pytest.approx(budget, rel=1e-9)
        assert report["max_plain_error"] == pytest.approx(plain_error, rel=1e-9)
        out[rows.stop - 1, 3] = ref[rows.stop - 1, 3] - 1.001 * budget
        with pytest.raises(AssertionError, match=f"^group {g} "):
            assert_grouped_gemm_close(out, A, B, group_offsets)


def test_a_groups_budget_is_its_own() -> None:
    out, (A, B, group_offsets) = problem()
    A[41:] *= 2**-20
    out[41:] *= 2**-20
    assert_grouped_gemm_close(out, A, B, group_offsets)
    out[41:] = 0
    with pytest.raises(AssertionError, match=r"^group 4 "):
        assert_grouped_gemm_close(out, A, B, group_offsets)


def test_plain_dtype_widens_the_budget_to_that_dtypes() -> None:
    _, inputs = problem(torch.float32)
    A, B, group_offsets = inputs
    out = grouped_gemm(A.bfloat16(), B.bfloat16(), group_offsets, out_dtype=torch.float32)
    with pytest.raises(AssertionError, match=r"^group 1 "):
        assert_grouped_gemm_close(out, *inputs)
    report = assert_grouped_gemm_close(out, *inputs, plain_dtype=torch.bfloat16)
    assert report["max_plain_error"] == pytest.approx(report["max_error"], rel=1e-3)


@pytest.mark.parametrize("spoilt", [None, 0, 7])
@pytest.mark.parametrize("value", [1e-30, float("nan")])
def test_rows_in_no_group_have_to_be_zeros(spoilt: int | None, value: float) -> None:
    A, B, _ = make_inputs([8], 24, 64, dtype=torch.float32, device="cpu")
    group_offsets = torch.tensor([1, 6])
    out = grouped_gemm(A, B, group_offsets)
    A[[0, 6, 7]] = float("nan")
    if spoilt is None:
        assert_grouped_gemm_close(out, A, B, group_offsets)
        return
    out[spoilt, 23] = value
    with pytest.raises(AssertionError, match=f"^row {spoilt} is in no group"):
        assert_grouped_gemm_close(out, A, B, group_offsets)


@pytest.mark.parametrize("wrong", [None, float("-inf"), float("nan"), 0.0, 65504.0])
def test_nan_and_infinities_have_to_be_in_the_references_places(wrong: float | None) -> None:
    _, (A, B, group_offsets) = problem(torch.float16)
    A[5, 0] = float("nan")
    A[43, 0] = float("-inf")
    A[46] = 60000.0  # overflows float16; the reference only overflows when it is rounded
    B[4, :, 2] = 0.5
    out = grouped_gemm(A, B, group_offsets)
    assert out[46, 2].isposinf()
    if wrong is None:
        assert_grouped_gemm_close(out, A, B, group_offsets)
        return
    out[46, 2] = wrong
    with pytest.raises(AssertionError, match=r"^group 4 .*NaN or infinity in other places"):
        assert_grouped_gemm_close(out, A, B, group_offsets)


def test_finite_elements_beside_a_nan_still_count() -> None:
    _, (A, B, group_offsets) = problem()
    A[43, 0] = float("nan")
    out = grouped_gemm(A, B, group_offsets)
    assert_grouped_gemm_close(out, A, B, group_offsets)
    out[44, 1] += 0.5
    with pytest.raises(AssertionError, match=r"^group 4 .*exceeds the budget"):
        assert_grouped_gemm_close(out, A, B, group_offsets)


def test_inputs_that_cancel_are_refused() -> None:
    A = torch.tensor([[1.0, 1.0]])
    B = torch.tensor([[[1.0], [-1.0 + 2**-22]]])
    group_offsets = torch.tensor([0, 1])
    for out in (grouped_gemm(A, B, group_offsets), torch.zeros(1, 1)):
        with pytest.raises(ValueError, match=r"^group 0 \(rows 0:1\): budget too loose"):
            assert_grouped_gemm_close(out, A, B, group_offsets)


@pytest.mark.parametrize("K", [0, 4])
def test_a_reference_of_zeros_asks_for_zeros(K: int) -> None:
    A, B, group_offsets = make_inputs([2, 3], 3, K, dtype=torch.float32, device="cpu")
    out = torch.zeros(5, 3)
    assert_grouped_gemm_close(out, A, B * 0, group_offsets)
    out[4, 0] = 1e-30
    with pytest.raises(AssertionError, match=r"^group 1 .*exceeds the budget 0"):
        assert_grouped_gemm_close(out, A, B * 0, group_offsets)


def test_products_that_cancel_to_zeros_ask_for_zeros() -> None:
    A, B = torch.tensor([[1.0, 1.0]]), torch.tensor([[[1.0], [-1.0]]])
    assert assert_grouped_gemm_close(torch.zeros(1, 1), A, B, torch.tensor([0, 1]))["budget"] == 0


def test_every_block_of_a_large_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "_BLOCK_ELEMENTS", 5 * 64)
    out, inputs = problem()
    whole = assert_grouped_gemm_close(out, *inputs)
    for row in (1, 20, 40):
        spoilt = out.clone()
        spoilt[row, 0] += 1
        with pytest.raises(AssertionError, match=r"^group 2 "):
            assert_grouped_gemm_close(spoilt, *inputs)
    monkeypatch.undo()
    assert assert_grouped_gemm_close(out, *inputs) == pytest.approx(whole)


def test_wrong_shape_fails() -> None:
    out, inputs = problem()
    for wrong, shape in ((out[1:], "47, 24"), (out[:, :1], "48, 1")):
        with pytest.raises(AssertionError, match=rf"^out: expected shape \[48, 24\], got \[{shape}\]"):
            assert_grouped_gemm_close(wrong, *inputs)


def test_nothing_to_compare() -> None:
    A, B, group_offsets = make_inputs([0, 0], 3, 4, dtype=torch.float32, device="cpu")
    assert assert_grouped_gemm_close(torch.zeros(0, 3), A, B, group_offsets)["group"] == -1


def test_flop_count() -> None:
    assert flop_count([2, 0, 3], 7, 11) == 2 * 5 * 7 * 11


def test_byte_count() -> None:
    A_and_out = 5 * 11 * 2 + 5 * 7 * 4
    assert byte_count([2, 0, 3], 7, 11, torch.bfloat16, torch.float32, True) == A_and_out + 2 * 7 * 11 * 2
    assert byte_count([2, 0, 3], 7, 11, torch.bfloat16, torch.float32, False) == A_and_out + 7 * 11 * 2
    assert byte_count([0, 0], 7, 11, torch.bfloat16, torch.float32, False) == 0


def test_assert_within_budget() -> None:
    exact = torch.randn(40, 30, dtype=torch.float64)
    plain = exact.bfloat16()
    assert assert_within_budget(plain, plain, exact) == 0.5
    with pytest.raises(AssertionError, match=r"^rows: error .* exceeds the budget"):
        assert_within_budget(torch.zeros_like(plain), plain, exact, name="rows")
    for wrong in (float("nan"), float("inf")):
        broken = plain.clone()
        broken[3, 4] = wrong
        with pytest.raises(AssertionError, match="exceeds the budget"):
            assert_within_budget(broken, plain, exact)
    with pytest.raises(ValueError, match="budget too loose"):
        assert_within_budget(plain, plain * 1.5, exact)
    with pytest.raises(ValueError, match="budget too loose"):
        assert_within_budget(plain, plain, exact, scale=1e7)
    for other in (exact[0], exact[:, :1], exact.T):
        with pytest.raises(AssertionError, match=r"^out: expected \[.*\] as exact, got \[40, 30\]$"):
            assert_within_budget(plain, plain, other)
    with pytest.raises(AssertionError, match=r"expected \[40, 30\] torch\.bfloat16, got \[30, 40\]"):
        assert_within_budget(plain.T, plain, exact)
    with pytest.raises(AssertionError, match=r"expected \[40, 30\] torch\.bfloat16, got \[40, 30\] torch\.float32"):
        assert_within_budget(plain.float(), plain, exact)
    with pytest.raises(ValueError, match="budget too loose: nan"):
        assert_within_budget(plain, plain * torch.nan, exact)
    zeros = torch.zeros(3, 4)
    assert assert_within_budget(zeros, zeros, zeros.double()) == 0
    with pytest.raises(AssertionError, match="exceeds the budget"):
        assert_within_budget(zeros + 1e-30, zeros, zeros.double())
    assert assert_within_budget(zeros[:0], zeros[:0], zeros[:0].double()) == 0


def test_a_budget_may_be_a_tenth_of_the_largest_element() -> None:
    exact = torch.ones(2, 3, dtype=torch.float64)
    assert assert_within_budget(exact, exact + 0.049, exact) == 0
    with pytest.raises(ValueError, match=r"budget too loose: 1.020e-01 is over a tenth"):
        assert_within_budget(exact, exact + 0.051, exact)


def test_results_that_are_no_tensors() -> None:
    wrong: Any = [1.0]
    offsets, x = torch.tensor([0, 2]), torch.ones(2, 8)
    with pytest.raises(TypeError, match=r"^out: expected a tensor, got list"):
        assert_grouped_gemm_close(wrong, x, torch.ones(1, 8, 4), offsets)
    rows, weight = quantize(x, "rowwise"), quantize(torch.ones(1, 4, 8), "rowwise").mT
    with pytest.raises(TypeError, match=r"^out: expected a tensor, got list"):
        assert_scaled_grouped_gemm_close(wrong, rows, weight, offsets)
    with pytest.raises(TypeError, match=r"^group_offsets: expected a torch\.Tensor"):
        assert_scaled_grouped_gemm_close(torch.ones(2, 4), rows, weight, wrong)


def test_inputs_and_experts_under_another_default_device() -> None:
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    expected = *make_inputs([2, 0, 1], 4, 8, **options), *make_experts(2, 8, 4, **options)
    with torch.device("meta"):
        made = *make_inputs([2, 0, 1], 4, 8, **options), *make_experts(2, 8, 4, **options)
    assert all(map(torch.equal, made, expected))


@pytest.mark.parametrize("kind", get_args(SizeKind))
def test_sizes_under_another_default_device(kind: SizeKind) -> None:
    expected = group_sizes_for(kind, 8, 100)
    with torch.device("meta"):
        assert group_sizes_for(kind, 8, 100) == expected


def test_tokens_under_another_default_device() -> None:
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    expected = make_tokens(4, 8, 4, 2, **options)
    with torch.device("meta"):
        made = make_tokens(4, 8, 4, 2, **options)
    assert all(map(torch.equal, made, expected))
    with pytest.raises(ValueError, match=r"^top_k: expected 1 to 4, got 5"):
        make_tokens(4, 8, 4, 5, **options)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_another_default_dtype_changes_nothing(default: torch.dtype) -> None:
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    sizes, tokens = [group_sizes_for(kind, 8, 256) for kind in get_args(SizeKind)], make_tokens(4, 8, 4, 2, **options)
    torch.set_default_dtype(default)
    try:
        assert [group_sizes_for(kind, 8, 256) for kind in get_args(SizeKind)] == sizes
        assert all(map(torch.equal, make_tokens(4, 8, 4, 2, **options), tokens))
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_budget_within_autocast() -> None:
    """Plain PyTorch would multiply in bfloat16, whose error is no measure for float32."""
    A, B, group_offsets = make_inputs([20, 0, 30], 8, 64, dtype=torch.float32, device="cpu")
    out = grouped_gemm(A, B, group_offsets)
    scaled = quantize(A, "1x128"), quantize(B.mT, "128x128").mT
    of_scaled = scaled_grouped_gemm(*scaled, group_offsets, out_dtype=torch.float32)
    plain = plain_product(A, B[0], torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert_grouped_gemm_close(out, A, B, group_offsets)
        assert_scaled_grouped_gemm_close(of_scaled, *scaled, group_offsets)
        assert torch.equal(plain_product(A, B[0], torch.float32), plain)
        with pytest.raises(AssertionError, match="exceeds the budget"):
            assert_grouped_gemm_close(out + 2e-3, A, B, group_offsets)
        with pytest.raises(AssertionError, match="exceeds the budget"):
            assert_scaled_grouped_gemm_close(of_scaled + 2e-3, *scaled, group_offsets)
