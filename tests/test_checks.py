import runpy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from moe_kernels import checks, grouped_gemm, grouped_gemm_wgrad, grouped_mm, swiglu_ffn
from moe_kernels.checks import (
    check_grouped_gemm,
    check_grouped_gemm_wgrad,
    check_grouped_mm,
    clamp_offsets,
    validate_offsets,
)

KERNEL_DTYPES = [torch.bfloat16, torch.float16, torch.float32]
DTYPES = [*KERNEL_DTYPES, torch.float64]
M, G, K, N = 5, 2, 3, 4


def arguments(device: str = "meta", **changes: Any) -> list[Any]:
    """Arguments of check_grouped_gemm that are fine, but for the changes."""
    values: dict[str, Any] = {
        "A_packed": torch.empty(M, K, device=device),
        "B": torch.empty(G, K, N, device=device),
        "group_offsets": torch.empty(G + 1, dtype=torch.int32, device=device),
        "out_dtype": None,
    }
    return list({**values, **changes}.values())


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_every_pair_of_dtypes(device: str) -> None:
    for a, b, out in product(DTYPES, DTYPES, [None, *DTYPES]):
        A, B = torch.empty(M, K, dtype=a, device=device), torch.empty(G, K, N, dtype=b, device=device)
        assert check_grouped_gemm(*arguments(device, A_packed=A, B=B, out_dtype=out)) == (
            out or torch.promote_types(a, b)
        )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_shared_weight_with_any_number_of_groups(length: int, dtype: torch.dtype) -> None:
    call = arguments(B=meta(K, N), group_offsets=meta(length, dtype=dtype))
    assert check_grouped_gemm(*call) == torch.float32


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (5, 0, 3, 4), (5, 2, 0, 4), (5, 2, 3, 0), (0, 0, 0, 0)])
def test_zero_sizes(shape: tuple[int, int, int, int]) -> None:
    m, g, k, n = shape
    offsets = meta(g + 1, dtype=torch.int64)
    assert check_grouped_gemm(meta(m, k), meta(g, k, n), offsets, None) == torch.float32


REFUSALS = [
    ({"A_packed": None}, TypeError, "A_packed: expected a torch.Tensor, got NoneType"),
    ({"B": [[1.0]]}, TypeError, "B: expected a torch.Tensor, got list"),
    ({"group_offsets": None}, TypeError, "group_offsets: expected a torch.Tensor, got NoneType"),
    ({"group_offsets": [0, 1, 2]}, TypeError, "group_offsets: expected a torch.Tensor, got list"),
    ({"A_packed": meta(M, K, dtype=torch.int32)}, TypeError, "A_packed: expected one of .*got torch.int32"),
    ({"A_packed": meta(M, K, dtype=torch.bool)}, TypeError, "A_packed: expected one of .*got torch.bool"),
    ({"B": meta(G, K, N, dtype=torch.int8)}, TypeError, "B: expected one of .*got torch.int8"),
    ({"B": meta(G, K, N, dtype=torch.complex64)}, TypeError, "B: expected one of .*got torch.complex64"),
    ({"out_dtype": torch.int32}, TypeError, "out_dtype: expected one of .*got torch.int32"),
    ({"out_dtype": "float32"}, TypeError, "out_dtype: expected one of .*got float32"),
    ({"out_dtype": []}, TypeError, r"out_dtype: expected one of .*got \[\]"),
    ({"A_packed": meta(K)}, ValueError, r"A_packed: expected shape \[M, K\], got \[3\]"),
    ({"A_packed": meta(1, M, K)}, ValueError, r"A_packed: expected shape \[M, K\], got \[1, 5, 3\]"),
    ({"B": meta(K)}, ValueError, r"B: expected shape \[K, N\] or \[G, K, N\], got \[3\]"),
    ({"B": meta(1, G, K, N)}, ValueError, r"B: expected shape .*got \[1, 2, 3, 4\]"),
    ({"B": meta(G, N, K)}, ValueError, r"B: expected K = 3 .*got K = 4 in shape \[2, 4, 3\]"),
    ({"B": meta(N, K)}, ValueError, r"B: expected K = 3 .*got K = 4 in shape \[4, 3\]"),
    *(
        (
            {"group_offsets": meta(G + 1, dtype=dtype)},
            TypeError,
            f"group_offsets: expected int32.*got {dtype}",
        )
        for dtype in (torch.int16, torch.uint8, torch.bool, torch.float32)
    ),
    (
        {"group_offsets": meta(1, G + 1, dtype=torch.int32)},
        ValueError,
        r"group_offsets: expected a 1-D tensor, got shape \[1, 3\]",
    ),
    (
        {"group_offsets": meta(G, dtype=torch.int32)},
        ValueError,
        r"group_offsets: expected length G \+ 1 = 3 for B \[2, 3, 4\], got 2",
    ),
    (
        {"B": meta(K, N), "group_offsets": meta(0, dtype=torch.int32)},
        ValueError,
        "group_offsets: expected a length of at least 1, got 0",
    ),
    ({"B": torch.empty(G, K, N)}, ValueError, "B: expected on meta with A_packed, got on cpu; move one with "),
    (
        {"group_offsets": torch.zeros(G + 1, dtype=torch.int32)},
        ValueError,
        "group_offsets: expected on meta with A_packed, got on cpu",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSALS)
def test_refusals_name_the_argument(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        check_grouped_gemm(*arguments(**changes))


def test_cuda_takes_what_the_kernels_take() -> None:
    with FakeTensorMode():
        for a, b, out in product(DTYPES, DTYPES, [None, *DTYPES]):
            A, B = torch.empty(M, K, dtype=a, device="cuda"), torch.empty(G, K, N, dtype=b, device="cuda")
            call = arguments("cuda", A_packed=A, B=B, out_dtype=out)
            if torch.float64 not in (a, b, out):
                assert check_grouped_gemm(*call) == (out or torch.promote_types(a, b))
                continue
            name = "A_packed" if a == torch.float64 else "B" if b == torch.float64 else "out_dtype"
            message = (
                f"^{name}: expected one of bfloat16, float16, float32 on cuda "
                r"\(CPU tensors may also be float64, through the reference\), got torch.float64"
            )
            with pytest.raises(TypeError, match=message):
                check_grouped_gemm(*call)
            assert check_grouped_gemm(*call, reference=True) == (out or torch.promote_types(a, b))


def test_cuda_operands_with_offsets_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    # With a GPU, PyTorch makes a real tensor on a device before its first fake one; cuda:1 need not exist.
    monkeypatch.setattr("torch._subclasses.fake_tensor.init_gpu_context", lambda *_: None)
    with FakeTensorMode():
        for device in ("cpu", "cuda:1"):
            offsets = torch.empty(G + 1, dtype=torch.int32, device=device)
            with pytest.raises(ValueError, match=f"group_offsets: expected on cuda:0 with A_packed, got on {device}"):
                check_grouped_gemm(*arguments("cuda:0", group_offsets=offsets))


def test_grouped_mm_takes_ends_and_bias() -> None:
    a, b, offs = (
        meta(M, K, dtype=torch.bfloat16),
        meta(G, K, N, dtype=torch.bfloat16),
        meta(G, dtype=torch.int32),
    )
    assert check_grouped_mm(a, b, offs, None, None) == torch.bfloat16
    assert check_grouped_mm(a, b, offs.long(), meta(G, N), torch.float32) == torch.float32
    assert check_grouped_mm(a, b, offs, meta(G, N), None) == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"offs": None}, ValueError, "offs: expected the groups' ends.*got None"),
        ({"offs": [1, 2]}, TypeError, "offs: expected a torch.Tensor, got list"),
        (
            {"offs": meta(G + 1, dtype=torch.int32)},
            ValueError,
            "offs: expected length G = 2 for mat_b .*got 3",
        ),
        ({"offs": meta(G)}, TypeError, "offs: expected int32 or int64, got torch.float32"),
        ({"mat_a": None}, TypeError, "mat_a: expected a torch.Tensor, got NoneType"),
        ({"mat_a": meta(M, K + 1)}, ValueError, r"mat_b: expected K = 4 as in mat_a \[5, 4\], got K = 3"),
        ({"mat_b": meta(G, K, N).int()}, TypeError, "mat_b: expected one of .*got torch.int32"),
        ({"mat_a": meta(1, G, M, K)}, ValueError, r"mat_a: expected shape \[M, K\], got \[1, 2, 5, 3\]"),
        ({"mat_b": meta(K)}, ValueError, r"mat_b: expected shape \[K, N\] or \[G, K, N\], got \[3\]"),
        ({"mat_b": meta(K + 1, N)}, ValueError, r"mat_b: expected \[K, N\] with K = 3 as in mat_a.* got \[4, 4\]"),
        ({"mat_b": meta(K, N), "offs": None}, ValueError, "offs: expected the groups' ends.*got None"),
        ({"mat_b": meta(K, N), "bias": meta(G, N)}, ValueError, r"bias: expected None for mat_a \[M, K\] with mat_b"),
        ({"mat_b": meta(K, N), "offs": meta(G)}, TypeError, "offs: expected int32 or int64, got torch.float32"),
        ({"mat_b": meta(K, N), "out_dtype": torch.int8}, TypeError, "out_dtype: expected one of .*got torch.int8"),
        ({"mat_b": torch.empty(K, N)}, ValueError, "mat_b: expected on meta with mat_a, got on cpu"),
        ({"mat_a": meta(G, M, K)}, ValueError, "offs: expected None for two 3-D operands, got a value"),
        ({"mat_a": meta(G + 1, M, K), "offs": None}, ValueError, "mat_b: expected G = 3 as in mat_a"),
        ({"mat_a": meta(G + 1, M, K), "mat_b": meta(K, N)}, ValueError, "offs: expected length G = 3 for mat_a.*got 2"),
        ({"mat_a": meta(G, M, K).int(), "mat_b": meta(K, N)}, TypeError, "mat_a: expected one of .*got torch.int32"),
        ({"bias": [1.0]}, TypeError, "bias: expected a torch.Tensor, got list"),
        ({"bias": meta(G, N).int()}, TypeError, "bias: expected one of .*got torch.int32"),
        ({"bias": meta(N)}, ValueError, r"bias: expected shape \[G, N\] = \[2, 4\], got \[4\]"),
        ({"bias": torch.empty(G, N)}, ValueError, "bias: expected on meta with mat_a, got on cpu"),
        ({"out_dtype": torch.int8}, TypeError, "out_dtype: expected one of .*got torch.int8"),
    ],
)
def test_grouped_mm_refusals(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    values = {
        "mat_a": meta(M, K),
        "mat_b": meta(G, K, N),
        "offs": meta(G, dtype=torch.int32),
        "bias": None,
        "out_dtype": None,
    }
    with pytest.raises(error, match=f"^{message}"):
        check_grouped_mm(**{**values, **changes})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("offsets", "expected"),
    [
        ([0, 2, 2, 5], [0, 2, 2, 5]),
        ([0, 4, 2, 5], [0, 4, 4, 5]),
        ([-3, -1, 2], [0, 0, 2]),
        ([2, 9, 4], [2, 5, 5]),
        ([8, 0], [5, 5]),
        ([7], [5]),
        ([], []),
    ],
)
def test_clamp(offsets: list[int], expected: list[int], dtype: torch.dtype) -> None:
    clamped = clamp_offsets(torch.tensor(offsets, dtype=dtype), 5)
    assert (clamped.tolist(), clamped.dtype) == (expected, dtype)


@settings(deadline=None, max_examples=50)
@given(offsets=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=6), rows=st.integers(0, 9))
def test_clamped_offsets_are_in_bounds_and_sorted(offsets: list[int], rows: int) -> None:
    clamped = clamp_offsets(torch.tensor(offsets, dtype=torch.int32), rows).tolist()
    assert clamped == [min(max(0, *offsets[: i + 1]), rows) for i in range(len(offsets))]
    assert clamped == sorted(clamped)


def test_clamp_with_more_rows_than_int32_holds() -> None:
    offsets = torch.tensor([0, 2**31 - 1], dtype=torch.int32)
    assert clamp_offsets(offsets, 2**31 + 7).tolist() == [0, 2**31 - 1]
    assert clamp_offsets(torch.tensor([0, 2**40]), 2**33).tolist() == [0, 2**33]


def test_clamp_of_noncontiguous_offsets_without_reading_them() -> None:
    assert clamp_offsets(torch.tensor([0, 9, 7, 9, 3, 9])[::2], 5).tolist() == [0, 5, 5]
    assert clamp_offsets(meta(3, dtype=torch.int32), 5).shape == (3,)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 2], r"group_offsets\[0\]: expected 0, got 1"),
        ([-2, 2], r"group_offsets\[0\]: expected 0, got -2"),
        ([0, 3, -1, 9], r"group_offsets\[2\]: expected 3 .* to 5 .*got -1"),
        ([0, 3, 2, 1], r"group_offsets\[2\]: expected 3 .* to 5 .*got 2"),
        ([0, 3, 6, 2], r"group_offsets\[2\]: expected 3 .* to 5 .*got 6"),
    ],
)
def test_validate_names_the_first_bad_index(offsets: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_offsets(torch.tensor(offsets), 5)


@pytest.mark.parametrize("offsets", [[0], [0, 0, 0], [0, 2, 5], [0, 2, 2, 3]])
def test_validate_accepts(offsets: list[int]) -> None:
    validate_offsets(torch.tensor(offsets, dtype=torch.int32), 5)


@settings(deadline=None, max_examples=50)
@given(offsets=st.lists(st.integers(-1, 6), min_size=1, max_size=5))
def test_validate_refuses_what_clamping_changes_and_a_late_start(offsets: list[int]) -> None:
    tensor = torch.tensor(offsets)
    if offsets[0] == 0 and torch.equal(clamp_offsets(tensor, 5), tensor):
        validate_offsets(tensor, 5)
    else:
        with pytest.raises(ValueError, match=r"^group_offsets\[\d\]"):
            validate_offsets(tensor, 5)


@pytest.mark.parametrize(
    ("validate", "environment", "expected"),
    [(True, "0", True), (False, "1", False), (None, "1", True), (None, "0", False), (None, None, False)],
)
def test_validation_enabled(
    validate: bool | None, environment: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOE_KERNELS_VALIDATE", raising=False)
    if environment is not None:
        monkeypatch.setenv("MOE_KERNELS_VALIDATE", environment)
    again = runpy.run_path(checks.__file__)  # as at import
    assert again["validation_enabled"](validate) is expected


def test_grouped_gemm_wgrad_takes_what_it_should() -> None:
    A, D, offsets = meta(M, K, dtype=torch.bfloat16), meta(M, N), meta(G + 1, dtype=torch.int32)
    assert check_grouped_gemm_wgrad(A, D, offsets, None) == torch.float32
    assert check_grouped_gemm_wgrad(A, D, offsets.long(), torch.bfloat16) == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"A_packed": None}, TypeError, "A_packed: expected a torch.Tensor, got NoneType"),
        ({"A_packed": meta(M)}, ValueError, r"A_packed: expected a 2-D tensor, got shape \[5\]"),
        ({"A_packed": meta(M, K).int()}, TypeError, "A_packed: expected one of .*got torch.int32"),
        ({"d_out": meta(M + 1, N)}, ValueError, r"d_out: expected M = 5 as in A_packed \[5, 3\], got shape \[6, 4\]"),
        ({"d_out": torch.empty(M, N)}, ValueError, "d_out: expected on meta with A_packed, got on cpu"),
        ({"group_offsets": meta(G)}, TypeError, "group_offsets: expected int32 or int64, got torch.float32"),
        ({"group_offsets": meta(0).int()}, ValueError, "group_offsets: expected a length of at least 1, got 0"),
        ({"out_dtype": torch.int8}, TypeError, "out_dtype: expected one of .*got torch.int8"),
    ],
)
def test_grouped_gemm_wgrad_refusals(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    values = {
        "A_packed": meta(M, K),
        "d_out": meta(M, N),
        "group_offsets": meta(G + 1, dtype=torch.int32),
        "out_dtype": None,
    }
    with pytest.raises(error, match=f"^{message}"):
        check_grouped_gemm_wgrad(**{**values, **changes})


def _products(offsets: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Every public function that takes offsets, on 5 rows and 3 groups."""
    rows, B = torch.ones(5, 4), torch.ones(3, 4, 6)
    offs = offsets[1:]
    return {
        "grouped_gemm": lambda: grouped_gemm(rows, B, offsets),
        "grouped_gemm_wgrad": lambda: grouped_gemm_wgrad(rows, rows, offsets),
        "grouped_mm of rows": lambda: grouped_mm(rows, B, offs=offs),
        "grouped_mm of the contraction": lambda: grouped_mm(rows.T, rows, offs=offs),
        "grouped_mm of columns": lambda: grouped_mm(B.mT, rows.T, offs=offs),
        "swiglu_ffn": lambda: swiglu_ffn(rows, B.mT, offsets),
    }


@pytest.mark.parametrize("name", _products(torch.empty(4)))
def test_the_environment_turns_validation_on_everywhere(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = torch.tensor([0, 2, 1, 5])
    _products(offsets)[name]()
    monkeypatch.setattr(checks, "_VALIDATE", True)
    with pytest.raises(ValueError, match=r"^group_offsets\[2\]: expected 2 .* to 5 .*, got 1"):
        _products(offsets)[name]()
