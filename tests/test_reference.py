from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from moe_kernels import reference
from moe_kernels.checks import clamp_offsets
from moe_kernels.glu import GLUSpec
from moe_kernels.reference import grouped_gemm, grouped_gemm_wgrad, grouped_mm
from moe_kernels.testing import make_inputs

NAN = float("nan")
SIZES = [0, 1, 0, 17, 3, 0]
sizes_strategy = st.lists(st.integers(0, 6), min_size=1, max_size=6)


def inputs(sizes: list[int], dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return make_inputs(sizes, 5, 7, dtype=dtype, device="cpu", **options)


class _RecordMatmuls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.overloadpacket is torch.ops.aten.mm:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def row_by_row(A: Tensor, B: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    """Compute the specification row by row; `spans` has (start, end) of each group."""
    out = torch.zeros(A.shape[0], B.shape[-1], dtype=torch.float64)
    for g, (start, end) in enumerate(spans):
        for row in range(start, end):
            out[row] = (A[row].double()[:, None] * B[g].double()).sum(0)
    return out


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("transposed", [False, True])
def test_each_group_meets_its_own_weight(index_dtype: torch.dtype, transposed: bool) -> None:
    A, B, group_offsets = inputs(SIZES, transposed=transposed)
    expected = row_by_row(A, B, [(0, 0), (0, 1), (1, 1), (1, 18), (18, 21), (21, 21)])
    out = grouped_gemm(A, B, group_offsets.to(index_dtype))
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("offsets", "spans"),
    [
        ([0, 2, 4], [(0, 2), (2, 4)]),
        ([1, 2, 4], [(1, 2), (2, 4)]),
        ([0, 4, 2], [(0, 4), (4, 4)]),
        ([-5, 2, 9], [(0, 2), (2, 6)]),
        ([8, 3, 1], [(6, 6), (6, 6)]),
        ([0, 0, 0], [(0, 0), (0, 0)]),
    ],
)
def test_any_offsets_are_taken_as_clamped(offsets: list[int], spans: list[tuple[int, int]]) -> None:
    A, B, _ = inputs([3, 3])
    expected = row_by_row(A, B, spans)
    torch.testing.assert_close(grouped_gemm(A, B, torch.tensor(offsets)), expected, rtol=1e-12, atol=1e-12)
    shared = row_by_row(A, B[:1], [(spans[0][0], spans[-1][1])])
    out = grouped_gemm(A, B[0], torch.tensor(offsets))
    torch.testing.assert_close(out, shared, rtol=1e-12, atol=1e-12)
    for row in range(6):
        if not any(start <= row < end for start, end in spans):
            assert not out[row].any()


def test_noncontiguous_offsets_and_strided_operands() -> None:
    A, B, group_offsets = inputs(SIZES)
    expected = grouped_gemm(A, B, group_offsets)
    A_strided = torch.full((21, 15), NAN, dtype=torch.float64)[:, 1:15:2].copy_(A)
    offsets_strided = torch.full((7, 3), 99, dtype=torch.int32)[:, 1].copy_(group_offsets)
    out = grouped_gemm(A_strided, B, offsets_strided)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    row = A[:1].expand(21, 7)
    expected = grouped_gemm(row.contiguous(), B, group_offsets)
    torch.testing.assert_close(grouped_gemm(row, B, group_offsets), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_one_dtype_is_multiplied_in_that_dtype(dtype: torch.dtype) -> None:
    A, B, group_offsets = inputs([3, 2], dtype)
    with _RecordMatmuls() as record:
        out = grouped_gemm(A, B, group_offsets)
    # Values alone would not show the dtype, because a product in float32 usually rounds to the same.
    assert record.dtypes == [dtype, dtype]
    assert torch.equal(out, torch.cat([torch.mm(A[:3], B[0]), torch.mm(A[3:], B[1])]))


@pytest.mark.parametrize(
    ("a", "b", "out", "compute"),
    [
        (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32),
        (torch.bfloat16, torch.float16, None, torch.float32),
        (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32),
        (torch.float16, torch.float64, None, torch.float64),
        (torch.float64, torch.float64, torch.bfloat16, torch.float64),
        (torch.float32, torch.float32, torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.float64, torch.float32),
    ],
)
def test_mixed_dtypes_are_multiplied_in_a_wider_one(
    a: torch.dtype, b: torch.dtype, out: torch.dtype | None, compute: torch.dtype
) -> None:
    A, B, group_offsets = inputs([3, 2])
    A, B = A.to(a), B.to(b)
    wide_A, wide_B = A.to(compute), B.to(compute)
    expected = torch.cat([wide_A[:3] @ wide_B[0], wide_A[3:] @ wide_B[1]])
    result = grouped_gemm(A, B, group_offsets, out_dtype=out)
    assert result.dtype == (out or torch.promote_types(a, b))
    assert torch.equal(result, expected.to(result.dtype))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("M", "G", "K", "N"), [(0, 2, 3, 4), (5, 0, 3, 4), (5, 2, 0, 4), (5, 2, 3, 0), (0, 0, 0, 0)])
def test_zero_sizes_give_zeros_and_zero_gradients(M: int, G: int, K: int, N: int, shared: bool) -> None:
    A = torch.randn(M, K, requires_grad=True)
    B = torch.randn((K, N) if shared else (G, K, N), requires_grad=True)
    group_offsets = torch.tensor([0, *[M] * G], dtype=torch.int32)
    out = grouped_gemm(A, B, group_offsets)
    assert torch.equal(out, torch.zeros(M, N))
    dA, dB = torch.autograd.grad(out, (A, B), torch.randn_like(out))
    assert torch.equal(dA, torch.zeros_like(A))
    assert torch.equal(dB, torch.zeros_like(B))


@pytest.mark.parametrize("shared", [False, True])
def test_rows_outside_and_weights_of_empty_groups_are_exact_zeros_even_over_nan(shared: bool) -> None:
    A, B, _ = inputs([8, 0], per_group=not shared)
    A[:2] = NAN
    A[6:] = NAN
    if not shared:
        B[1] = NAN
    A.requires_grad_()
    B.requires_grad_()
    out = grouped_gemm(A, B, torch.tensor([2, 6, 6]))
    upstream = torch.randn_like(out)
    dA, dB = torch.autograd.grad(out, (A, B), upstream)
    weight, d_weight = (B, dB) if shared else (B[0], dB[0])
    for rows, d_rows in ((out[:2], dA[:2]), (out[6:], dA[6:])):
        assert torch.equal(rows, torch.zeros_like(rows))
        assert torch.equal(d_rows, torch.zeros_like(d_rows))
    torch.testing.assert_close(out[2:6], A[2:6] @ weight)
    torch.testing.assert_close(dA[2:6], upstream[2:6] @ weight.T)
    torch.testing.assert_close(d_weight, A[2:6].T @ upstream[2:6])
    if not shared:
        assert torch.equal(dB[1], torch.zeros_like(dB[1]))


@pytest.mark.parametrize("poison", [NAN, float("inf")])
@pytest.mark.parametrize("where", ["rows", "weight"])
def test_one_groups_nan_stays_in_its_group(where: str, poison: float) -> None:
    A, B, group_offsets = inputs([3, 4, 2])
    upstream = torch.randn(9, 5, dtype=torch.float64)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
        out = grouped_gemm(a, b, group_offsets)
        dA, dB = torch.autograd.grad(out, (a, b), upstream)
        return out.detach(), dA, dB

    clean = run()
    if where == "rows":
        A[3:7] = poison
    else:
        B[1] = poison
    poisoned = run()
    for before, after, own in zip(clean, poisoned, (slice(3, 7), slice(3, 7), slice(1, 2)), strict=True):
        others = torch.ones(len(before), dtype=torch.bool)
        others[own] = False
        assert torch.equal(before[others], after[others])
    assert not poisoned[0][3:7].isfinite().any()


@pytest.mark.parametrize("offsets", [[0, 2, 2, 5], [1, 3, 4, 4]])
@pytest.mark.parametrize("shared", [False, True])
def test_gradients(offsets: list[int], shared: bool) -> None:
    A = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    B = torch.randn((3, 2) if shared else (3, 3, 2), dtype=torch.float64, requires_grad=True)
    group_offsets = torch.tensor(offsets)

    def product(a: Tensor, b: Tensor) -> Tensor:
        return grouped_gemm(a, b, group_offsets)

    assert gradcheck(product, (A, B))
    assert gradgradcheck(product, (A, B))


@settings(deadline=None, max_examples=25)
@given(sizes=sizes_strategy, data=st.data())
def test_permuting_experts_permutes_their_rows(sizes: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(sizes))))
    A, B, group_offsets = inputs(sizes)
    A_split, out_split = A.split(sizes), grouped_gemm(A, B, group_offsets).split(sizes)
    permuted = torch.cat([A_split[g] for g in order])
    offsets = torch.tensor([sum(sizes[g] for g in order[:i]) for i in range(len(order) + 1)])
    out = grouped_gemm(permuted, B[list(order)], offsets)
    expected = torch.cat([out_split[g] for g in order])
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=25)
@given(sizes=sizes_strategy, data=st.data())
def test_splitting_a_group_changes_nothing(sizes: list[int], data: st.DataObject) -> None:
    g = data.draw(st.integers(0, len(sizes) - 1))
    first = data.draw(st.integers(0, sizes[g]))
    A, B, group_offsets = inputs(sizes)
    cut = group_offsets[g] + first
    split_offsets = torch.cat([group_offsets[: g + 1], cut.view(1), group_offsets[g + 1 :]])
    split_B = torch.cat([B[: g + 1], B[g:]])
    out = grouped_gemm(A, split_B, split_offsets)
    torch.testing.assert_close(out, grouped_gemm(A, B, group_offsets), rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=25)
@given(sizes=sizes_strategy)
def test_equal_weights_are_one_shared_weight(sizes: list[int]) -> None:
    A, B, group_offsets = inputs(sizes, per_group=False)
    per_group = grouped_gemm(A, B.expand(len(sizes), 7, 5), group_offsets)
    torch.testing.assert_close(grouped_gemm(A, B, group_offsets), per_group, rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=25)
@given(sizes=sizes_strategy, x=st.floats(-3, 3), y=st.floats(-3, 3))
def test_linear_in_each_operand(sizes: list[int], x: float, y: float) -> None:
    A, B, group_offsets = inputs(sizes)
    A2, B2, _ = inputs(sizes, seed=1)
    out = grouped_gemm(A, B, group_offsets)
    in_A = x * out + y * grouped_gemm(A2, B, group_offsets)
    in_B = x * out + y * grouped_gemm(A, B2, group_offsets)
    torch.testing.assert_close(grouped_gemm(x * A + y * A2, B, group_offsets), in_A, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(grouped_gemm(A, x * B + y * B2, group_offsets), in_B, rtol=1e-9, atol=1e-9)


def test_refusals_come_from_the_checks() -> None:
    A, B, group_offsets = inputs([3, 2])
    with pytest.raises(TypeError, match="A_packed: expected one of"):
        grouped_gemm(A.long(), B, group_offsets)
    with pytest.raises(ValueError, match=r"group_offsets: expected length G \+ 1 = 3"):
        grouped_gemm(A, B, group_offsets[1:])
    with pytest.raises(ValueError, match=r"mat_b: expected K = 6"):
        grouped_mm(A[:, 1:], B, offs=group_offsets[1:])


def test_grouped_mm_is_pytorchs_where_that_is_defined() -> None:
    A, B, group_offsets = make_inputs([3, 0, 13], 16, 32, dtype=torch.bfloat16, device="cpu")
    offs = group_offsets[1:]
    expected = torch.nn.functional.grouped_mm(A, B, offs=offs)
    out = grouped_mm(A, B, offs=offs)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("offs", "group_of_row"),
    [
        ([2, 2, 6], [0, 0, 2, 2, 2, 2, None, None]),
        ([9, 1, 4], [0] * 8),
        ([-1, 0, 3], [2, 2, 2, *[None] * 5]),
    ],
)
def test_grouped_mm_adds_the_bias_before_rounding(
    offs: list[int], group_of_row: list[int | None], index_dtype: torch.dtype
) -> None:
    A, B, _ = inputs([8, 0, 0], torch.bfloat16)
    bias = torch.randn(3, 5)
    out = grouped_mm(A, B, offs=torch.tensor(offs, dtype=index_dtype), bias=bias)
    product = grouped_gemm(A, B, torch.tensor([0, *offs]), out_dtype=torch.float32)
    for row, g in enumerate(group_of_row):
        expected = torch.zeros(5) if g is None else product[row] + bias[g]
        assert torch.equal(out[row], expected.bfloat16())


def test_grouped_mm_result_dtype() -> None:
    A, B, group_offsets = inputs([3, 2], torch.bfloat16)
    offs, bias = group_offsets[1:], torch.randn(2, 5, dtype=torch.float64)
    assert grouped_mm(A, B, offs=offs, bias=bias).dtype == torch.bfloat16
    for out_dtype in (torch.float16, torch.float32, torch.float64):
        assert grouped_mm(A, B, offs=offs, out_dtype=out_dtype).dtype == out_dtype
        assert grouped_mm(A, B, offs=offs, bias=bias, out_dtype=out_dtype).dtype == out_dtype


def test_a_float64_bias_is_added_in_float64() -> None:
    A, B, group_offsets = inputs([3, 2], torch.float32)
    bias = torch.randn(2, 5, dtype=torch.float64)
    out = grouped_mm(A, B, offs=group_offsets[1:], bias=bias, out_dtype=torch.float64)
    products = grouped_gemm(A, B, group_offsets).double()
    assert torch.equal(out, products + torch.cat([bias[:1].expand(3, -1), bias[1:].expand(2, -1)]))


def test_grouped_mm_gradients() -> None:
    A = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    B = torch.randn(3, 3, 2, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    offs = torch.tensor([2, 2, 4])

    def product(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return grouped_mm(a, b, offs=offs, bias=c)

    assert gradcheck(product, (A, B, bias))
    d_bias = torch.autograd.grad(product(A, B, bias), bias, torch.randn(5, 2, dtype=torch.float64))[0]
    assert torch.equal(d_bias[1], torch.zeros(2, dtype=torch.float64))
    assert d_bias[0].all()


def test_grouped_mm_without_groups() -> None:
    A, B, bias = (torch.randn(shape, requires_grad=True) for shape in [(4, 3), (0, 3, 2), (0, 2)])
    out = grouped_mm(A, B, offs=torch.empty(0, dtype=torch.int32), bias=bias)
    assert torch.equal(out, torch.zeros(4, 2))
    out.backward(torch.randn(4, 2))
    assert A.grad is not None
    assert torch.equal(A.grad, torch.zeros(4, 3))


@pytest.mark.parametrize(
    ("a_shape", "b_shape"), [((32, 16), (16, 8)), ((3, 8, 16), (16, 24)), ((3, 8, 16), (3, 16, 8))], ids=str
)
def test_other_forms_of_grouped_mm_are_pytorchs(a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> None:
    a, b = torch.randn(a_shape).bfloat16(), torch.randn(b_shape).bfloat16()
    offs = None if len(b_shape) == 3 else torch.tensor([8, 8, b_shape[len(a_shape) - 2]], dtype=torch.int32)
    expected = torch.nn.functional.grouped_mm(a, b, offs=offs)
    out = grouped_mm(a, b, offs=offs)
    assert (out.shape, out.dtype) == (expected.shape, torch.bfloat16)
    torch.testing.assert_close(out, expected)
    assert grouped_mm(a, b, offs=offs, out_dtype=torch.float32).dtype == torch.float32


def test_columns_past_the_last_end_are_zeros() -> None:
    a, b = torch.randn(2, 3, 4), torch.randn(4, 9)
    b[:, 7:] = NAN
    out = grouped_mm(a, b, offs=torch.tensor([2, 7]))
    assert torch.equal(out[:, 7:], torch.zeros(3, 2))
    torch.testing.assert_close(out[:, :7], torch.cat([a[0] @ b[:, :2], a[1] @ b[:, 2:7]], 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("offsets", [[0, 1, 1, 18, 21], [3, 2, 30], [-1, 5], [4], [0, 0]], ids=str)
def test_wgrad_group_by_group(offsets: list[int], dtype: torch.dtype) -> None:
    A, D = torch.randn(21, 3).to(dtype), torch.randn(21, 2).to(dtype)
    out = grouped_gemm_wgrad(A, D, torch.tensor(offsets))
    assert (out.shape, out.dtype) == ((len(offsets) - 1, 3, 2), dtype)
    clamped = clamp_offsets(torch.tensor(offsets), 21).tolist()
    for g, (start, end) in enumerate(pairwise(clamped)):
        expected = sum((torch.outer(A[r].double(), D[r].double()) for r in range(start, end)), torch.zeros(3, 2))
        torch.testing.assert_close(out[g].double(), expected.double(), rtol=2e-2, atol=4e-2)
        if start == end:
            assert torch.equal(out[g], torch.zeros_like(out[g]))
    assert grouped_gemm_wgrad(A, D, torch.tensor(offsets), out_dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize(("M", "G", "K", "N"), [(0, 2, 3, 4), (5, 0, 3, 4), (5, 2, 0, 4), (5, 2, 3, 0), (0, 0, 0, 0)])
def test_wgrad_of_zero_sizes(M: int, G: int, K: int, N: int) -> None:
    A, D = torch.randn(M, K, requires_grad=True), torch.randn(M, N, requires_grad=True)
    out = grouped_gemm_wgrad(A, D, torch.tensor([0] * (G + 1)))
    assert torch.equal(out, torch.zeros(G, K, N))
    dA, dD = torch.autograd.grad(out, (A, D), torch.randn_like(out))
    assert torch.equal(dA, torch.zeros_like(A)) and torch.equal(dD, torch.zeros_like(D))


@pytest.mark.parametrize(
    ("a", "d", "out", "compute"),
    [
        (torch.float32, torch.float32, torch.bfloat16, torch.float32),
        (torch.float64, torch.float64, torch.float32, torch.float64),
        (torch.bfloat16, torch.float32, None, torch.float32),
        (torch.float16, torch.float64, torch.bfloat16, torch.float64),
    ],
)
def test_wgrad_of_mixed_dtypes_is_summed_in_a_wider_one(
    a: torch.dtype, d: torch.dtype, out: torch.dtype | None, compute: torch.dtype
) -> None:
    A, D = torch.randn(21, 3).to(a), torch.randn(21, 2).to(d)
    result = grouped_gemm_wgrad(A, D, torch.tensor([0, 17, 21]), out_dtype=out)
    assert result.dtype == (out or torch.promote_types(a, d))
    wide_A, wide_D = A.to(compute), D.to(compute)
    assert torch.equal(result, torch.stack([wide_A[:17].T @ wide_D[:17], wide_A[17:].T @ wide_D[17:]]).to(result.dtype))
    nothing = grouped_gemm_wgrad(A, D, torch.tensor([4]), out_dtype=out)
    assert (nothing.shape, nothing.dtype) == ((0, 3, 2), result.dtype)


def test_wgrad_is_the_gradient_of_the_product() -> None:
    A, B, group_offsets = inputs(SIZES)
    B.requires_grad_()
    out = grouped_gemm(A, B, group_offsets)
    upstream = torch.randn_like(out)
    (expected,) = torch.autograd.grad(out, B, upstream)
    torch.testing.assert_close(grouped_gemm_wgrad(A, upstream, group_offsets), expected)


def test_grouped_mm_needs_offs() -> None:
    for b_shape in ((2, 3, 2), (3, 2)):
        with pytest.raises(ValueError, match="offs: expected the groups' ends"):
            grouped_mm(torch.zeros(4, 3), torch.zeros(b_shape))


def test_the_layers_arguments_are_checked() -> None:
    E, H, I = 4, 16, 8  # noqa: E741
    given: dict[str, Any] = {
        "hidden": torch.randn(5, H),
        "topk_ids": torch.zeros(5, 2, dtype=torch.int64),
        "topk_weights": torch.ones(5, 2),
        "w_gate_up": torch.randn(E, 2 * I, H),
        "w_down": torch.randn(E, H, I),
    }
    assert reference.moe_mlp(**given).shape == (5, H)
    wrong = [
        ({"w_down": torch.randn(E, H + 3, I)}, ValueError, "w_down"),
        ({"w_down": torch.randn(H, I)}, ValueError, "w_down"),
        ({"down_bias": torch.ones(1, H)}, ValueError, "down_bias"),
        ({"down_bias": torch.ones(E, H, dtype=torch.int32)}, TypeError, "down_bias"),
    ]
    for change, error, name in wrong:
        with pytest.raises(error, match=f"^{name}: expected"):
            reference.moe_mlp(**given | change)


def test_dropped_rows_have_no_gradients() -> None:
    """Rows from group_offsets[-1] on, even if they hold NaN."""
    preact, d_act = torch.randn(4, 6), torch.randn(4, 3)
    row_to_slot, group_offsets = torch.tensor([2, 0, 3, 1]), torch.tensor([0, 1, 2])
    tensors = preact, None, d_act, torch.rand(2, 2) + 0.5, row_to_slot, group_offsets
    d_preact, _, weighted, dots = reference.activate_backward(*tensors, GLUSpec("silu", True, False, 1.702, 7.0))
    assert weighted is not None and dots is not None
    for rows in (d_preact, weighted, dots.view(-1, 1)[row_to_slot]):
        assert rows[:2].all() and not rows[2:].any()
    preact[2:] = NAN
    again = reference.activate_backward(*tensors, GLUSpec("silu", True, False, 1.702, 7.0))[3]
    assert again is not None and torch.equal(again, dots)


@pytest.mark.parametrize(
    ("activation", "alpha", "offset"), [("clamped_swiglu", 1.702, 1.0), ("clamped_silu", 1.0, 0.0)]
)
def test_gradients_at_the_limits(activation: str, alpha: float, offset: float) -> None:
    """They pass at the limit itself, as those of `torch.clamp` before PyTorch 2.15."""
    gate, up = torch.tensor([[2.0, 1.0, 2.5, -3.0, 0.5]]), torch.tensor([[1.0, 2.0, 0.5, -2.0, 2.5]])
    preact, d_act = torch.cat((gate, up), 1).requires_grad_(), torch.rand(1, 5) + 0.5
    g, u = preact.chunk(2, 1)
    g, u = g.where(g <= 2, 2), u.where(u.abs() <= 2, 2 * u.sign())
    (expected,) = torch.autograd.grad(g * torch.sigmoid(alpha * g) * (u + offset), preact, d_act)
    spec = GLUSpec(activation, True, False, alpha, 2.0)
    d_preact = reference.activate_backward(preact.detach(), None, d_act, None, None, None, spec)[0]
    torch.testing.assert_close(d_preact, expected)


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.bfloat16, 6.99), (torch.float16, 6.9999), (torch.bfloat16, 7.0)], ids=str
)
def test_a_limit_that_the_dtype_does_not_hold(dtype: torch.dtype, limit: float) -> None:
    """Gate and up are compared with it in float32, as they are clamped, not with the limit rounded to their dtype."""
    preact, d_act = torch.tensor([[7.0, 3.0, 7.0, -7.0]]), torch.ones(1, 2)
    spec = GLUSpec("clamped_silu", True, False, 1.0, limit)
    expected = reference.activate_backward(preact.double(), None, d_act.double(), None, None, None, spec)[0]
    assert (expected == 0).tolist() == [[limit < 7, False, limit < 7, limit < 7]]
    d_preact = reference.activate_backward(preact.to(dtype), None, d_act.to(dtype), None, None, None, spec)[0]
    torch.testing.assert_close(d_preact.double(), expected, rtol=1e-2, atol=0.0)


@pytest.mark.parametrize(("activation", "expected"), [("relu", [0.0, 0.0, 1.0]), ("relu_squared", [0.0, 0.0, 4.0])])
def test_gradients_at_zero(activation: str, expected: list[float]) -> None:
    spec = GLUSpec(activation, False, False, 1.702, 7.0)
    tensors = torch.tensor([[-1.0, 0.0, 2.0]]), None, torch.ones(1, 3), None, None, None
    assert reference.activate_backward(*tensors, spec)[0].tolist() == [expected]
