from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from moe_kernels import (
    MoE,
    checks,
    group_offsets_from_offs,
    group_offsets_from_sizes,
    group_sizes,
    grouped_gemm,
    grouped_gemm_wgrad,
    grouped_mm,
    moe_mlp,
    offs_from_group_offsets,
    permute,
    quantize,
    quantize_weight,
    route,
    swiglu_ffn,
    topk_sigmoid,
    topk_softmax,
    uniform_grouped_gemm,
    unpack_groups,
    unpermute,
)
from moe_kernels.checks import (
    check_grouped_gemm,
    check_grouped_gemm_wgrad,
    check_grouped_mm,
    clamp_offsets,
    validate_offs,
    validate_offsets,
)
from moe_kernels.runtime import cache

KERNEL_DTYPES = [torch.bfloat16, torch.float16, torch.float32]
DTYPES = [*KERNEL_DTYPES, torch.float64]
M, G, K, N = 5, 2, 3, 4


def arguments(device: str = "meta", **changes: Any) -> list[Any]:
    """Return valid arguments of check_grouped_gemm, with `changes` applied."""
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
    (
        {"group_offsets": [0, 1, 2]},
        TypeError,
        r"group_offsets: expected a torch.Tensor, got list; pass torch.tensor\(group_offsets, dtype=torch.int32",
    ),
    (
        {"A_packed": (torch.ones(2, K).to(torch.float8_e4m3fn), torch.ones(2, 1))},
        TypeError,
        "A_packed: .*got tuple; pass ScaledTensor",
    ),
    ({"A_packed": [meta(2, K)]}, TypeError, "A_packed: .*got list; pack_groups packs .* torch.stack stacks"),
    (
        {"B": meta(G, K, N, dtype=torch.float8_e4m3fn)},
        TypeError,
        r"B: .*got torch.float8_e4m3fn; pass fp8 with its scales, as moe_kernels.quantize returns it: ScaledTensor",
    ),
    ({"A_packed": meta(M, K, dtype=torch.int32)}, TypeError, "A_packed: expected one of .*got torch.int32"),
    ({"A_packed": meta(M, K, dtype=torch.bool)}, TypeError, "A_packed: expected one of .*got torch.bool"),
    ({"B": meta(G, K, N, dtype=torch.int8)}, TypeError, r"B: .*got torch.int8; .* as in .* \* scales$"),
    ({"B": meta(G, K, N, dtype=torch.complex64)}, TypeError, "B: expected one of .*got torch.complex64"),
    ({"out_dtype": torch.int32}, TypeError, "out_dtype: expected one of .*got torch.int32"),
    ({"out_dtype": "float32"}, TypeError, "out_dtype: expected one of .*got 'float32'"),
    ({"out_dtype": []}, TypeError, r"out_dtype: expected one of .*got \[\]"),
    ({"A_packed": meta(K)}, ValueError, r"A_packed: expected shape \[M, K\], got \[3\]"),
    ({"A_packed": meta(1, M, K)}, ValueError, r"A_packed: expected shape \[M, K\], got \[1, 5, 3\]"),
    ({"B": meta(K)}, ValueError, r"B: expected shape \[K, N\] or \[G, K, N\], got \[3\]"),
    ({"B": meta(1, G, K, N)}, ValueError, r"B: expected shape .*got \[1, 2, 3, 4\]"),
    ({"B": meta(G, N, K)}, ValueError, r"B: .*got K = 4 in shape \[2, 4, 3\]; for \[G, N, K\] pass W.mT$"),
    ({"B": meta(N, K)}, ValueError, r"B: .*got K = 4 in shape \[4, 3\]; for \[N, K\] pass W.mT$"),
    ({"B": meta(G, N, N)}, ValueError, r"B: expected K = 3 .*got K = 4 in shape \[2, 4, 4\]$"),
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
        r"group_offsets: expected length G \+ 1 = 3 for B \[2, 3, 4\], got 2; for sizes \[G\] pass "
        r"group_offsets_from_sizes\(sizes\), and for PyTorch's offs \[G\], the ends of the groups, "
        r"group_offsets_from_offs\(offs\)$",
    ),
    (
        {"group_offsets": meta(G + 2, dtype=torch.int32)},
        ValueError,
        r"group_offsets: expected length G \+ 1 = 3 for B \[2, 3, 4\], got 4$",
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
            r"offs: expected length G = 2 .*got 3; for group_offsets \[G \+ 1\] pass offs_from_group_offsets",
        ),
        ({"offs": meta(G)}, TypeError, "offs: expected int32 or int64, got torch.float32"),
        ({"mat_a": None}, TypeError, "mat_a: expected a torch.Tensor, got NoneType"),
        ({"mat_a": meta(M, K + 1)}, ValueError, r"mat_b: expected K = 4 as in mat_a \[5, 4\], got K = 3"),
        ({"mat_b": meta(G, K, N).int()}, TypeError, "mat_b: expected one of .*got torch.int32"),
        ({"mat_a": meta(1, G, M, K)}, ValueError, r"mat_a: expected shape \[M, K\] or \[G, M, K\], got \[1, 2, 5, 3\]"),
        ({"mat_b": meta(K)}, ValueError, r"mat_b: expected shape \[K, N\] or \[G, K, N\], got \[3\]"),
        ({"mat_b": meta(K + 1, N)}, ValueError, r"mat_b: expected K = 3 as in mat_a.* got K = 4 in shape \[4, 4\]$"),
        ({"mat_b": meta(K, N), "offs": None}, ValueError, "offs: expected the groups' ends.*got None"),
        (
            {"mat_b": meta(K, N), "bias": meta(G, N)},
            ValueError,
            r"bias: expected None unless mat_a is \[M, K\] and mat_b is",
        ),
        ({"mat_b": meta(K, N), "offs": meta(G)}, TypeError, "offs: expected int32 or int64, got torch.float32"),
        ({"mat_b": meta(K, N), "out_dtype": torch.int8}, TypeError, "out_dtype: expected one of .*got torch.int8"),
        ({"mat_b": torch.empty(K, N)}, ValueError, "mat_b: expected on meta with mat_a, got on cpu"),
        ({"mat_a": meta(G, M, K)}, ValueError, "offs: expected None for two 3-D operands, got a value"),
        ({"mat_a": meta(G + 1, M, K), "offs": None}, ValueError, "mat_b: expected G = 3 as in mat_a"),
        ({"mat_a": meta(G + 1, M, K), "mat_b": meta(K, N)}, ValueError, "offs: expected length G = 3 .*got 2$"),
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


@pytest.mark.parametrize(
    ("a", "b", "counted"),
    [
        ((7, 4), (3, 4, 5), "rows"),
        ((3, 5, 4), (4, 7), "columns"),
        ((5, 7), (7, 4), "rows of mat_b"),
    ],
)
def test_validate_names_what_offs_divide(a: tuple[int, ...], b: tuple[int, ...], counted: str) -> None:
    with pytest.raises(ValueError, match=rf"^offs\[2\]: expected 3 .* to 7 \(the number of {counted}\), got 8$"):
        validate_offs(torch.tensor([2, 3, 8]), torch.ones(a), torch.ones(b))


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


@pytest.mark.parametrize("value", ["False", 1, [True]])
def test_validate_is_a_bool_or_none(value: Any) -> None:
    for call in (
        lambda: grouped_gemm(A_PACKED, torch.ones(G, K, N), OFFSETS, validate=value),
        lambda: route(IDS, WEIGHTS, G, validate=value),
        lambda: moe_mlp(**CALLS[moe_mlp], validate=value),
        lambda: swiglu_ffn(A_PACKED, torch.ones(G, 2, K), OFFSETS, validate=value),
    ):
        with pytest.raises(TypeError, match=r"^validate: expected True or False, got "):
            call()


def test_an_option_of_training_is_checked_without_it() -> None:
    with pytest.raises(TypeError, match=r"^fp8_wgrad: expected True or False, got 'a'"):
        moe_mlp(**CALLS[moe_mlp], fp8_wgrad="a")


def test_grouped_gemm_wgrad_takes_what_it_should() -> None:
    A, D, offsets = meta(M, K, dtype=torch.bfloat16), meta(M, N), meta(G + 1, dtype=torch.int32)
    assert check_grouped_gemm_wgrad(A, D, offsets, None) == torch.float32
    assert check_grouped_gemm_wgrad(A, D, offsets.long(), torch.bfloat16) == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"A_packed": None}, TypeError, "A_packed: expected a torch.Tensor, got NoneType"),
        ({"A_packed": meta(M)}, ValueError, r"A_packed: expected shape \[M, K\], got \[5\]"),
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
    """Return a call of every public function that takes offsets, with 5 rows and 3 groups."""
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
    monkeypatch.setattr(cache, "repeat", lambda *_: torch.zeros(()))  # values are checked before
    index = r"offs\[1\]" if name.startswith("grouped_mm") else r"group_offsets\[2\]"
    with pytest.raises(ValueError, match=rf"^{index}: expected 2 .* to 5 .*, got 1"):
        _products(offsets)[name]()


def test_malformed_offsets_of_an_ffn_are_named_if_asked() -> None:
    """The first half checks the offsets only if asked."""
    call = partial(swiglu_ffn, A_PACKED, torch.ones(G, 2, K), OFFSETS.flip(0))
    with pytest.raises(ValueError, match=r"^group_offsets\[0\]: expected 0, got "):
        call(validate=True)
    assert call(validate=False).shape == (M, 1)


@pytest.mark.parametrize("name", ["grouped_gemm", "route"])
def test_validation_under_vmap_and_of_fake_tensors(name: str) -> None:
    calls: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
        "grouped_gemm": (lambda x: grouped_gemm(A_PACKED, torch.ones(G, K, N), x, validate=True), OFFSETS),
        "route": (lambda x: route(x, WEIGHTS, 3, validate=True)[0], IDS),
    }
    call, values = calls[name]
    call(values)
    with pytest.raises(
        RuntimeError, match=r"^validate=True .* reads values on the host, which .*torch\.vmap .* validate=False"
    ):
        torch.vmap(call)(values[None])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        call(mode.from_tensor(values))


@pytest.mark.parametrize("limit", [-1.0, float("nan")])
def test_limits_of_clamped_activations(limit: float) -> None:
    options: dict[str, Any] = {"hidden": A_PACKED, "topk_ids": IDS, "topk_weights": WEIGHTS, "w_gate_up": GATE_UP}
    for activation in ("clamped_swiglu", "clamped_silu"):
        moe_mlp(**options, w_down=DOWN, activation=activation, limit=float("inf"))
        with pytest.raises(ValueError, match=f"^limit: expected at least 0, got {limit}"):
            moe_mlp(**options, w_down=DOWN, activation=activation, limit=limit)
    moe_mlp(**options, w_down=DOWN, limit=limit)  # not used by silu


@pytest.mark.parametrize("alpha", [float("nan"), float("inf"), -float("inf")])
def test_alpha_of_clamped_swiglu(alpha: float) -> None:
    options: dict[str, Any] = {"hidden": A_PACKED, "topk_ids": IDS, "topk_weights": WEIGHTS, "w_gate_up": GATE_UP}
    with pytest.raises(ValueError, match=f"^alpha: expected a finite number, got {alpha}"):
        moe_mlp(**options, w_down=DOWN, activation="clamped_swiglu", alpha=alpha)
    for activation in ("clamped_silu", "silu"):
        moe_mlp(**options, w_down=DOWN, activation=activation, alpha=alpha)  # not used


A_PACKED, ROWS, GATE_UP, DOWN = torch.ones(M, K), torch.ones(M, N), torch.ones(G, 8, K), torch.ones(G, K, 4)
IDS, WEIGHTS, OFFSETS = torch.zeros(M, 2, dtype=torch.int64), torch.ones(M, 2), torch.tensor([0, 2, 5])
CALLS: dict[Callable[..., Any], dict[str, Any]] = {
    grouped_gemm: {"A_packed": A_PACKED, "B": torch.ones(G, K, N), "group_offsets": OFFSETS},
    grouped_gemm_wgrad: {"A_packed": A_PACKED, "d_out": ROWS, "group_offsets": OFFSETS},
    grouped_mm: {"mat_a": A_PACKED, "mat_b": torch.ones(G, K, N), "offs": OFFSETS[1:], "bias": torch.ones(G, N)},
    uniform_grouped_gemm: {"A": torch.ones(G, M, K), "B": torch.ones(G, K, N), "num_groups": G},
    swiglu_ffn: {
        "rows": A_PACKED,
        "w_gate_up": GATE_UP[:, :4],
        "group_offsets": OFFSETS,
        "w_up": GATE_UP[:, 4:],
        "gate_up_bias": torch.ones(G, 4),
        "up_bias": torch.ones(G, 4),
    },
    moe_mlp: {
        "hidden": A_PACKED,
        "topk_ids": IDS,
        "topk_weights": WEIGHTS,
        "w_gate_up": GATE_UP,
        "w_down": DOWN,
        "gate_up_bias": torch.ones(G, 8),
        "down_bias": torch.ones(G, K),
    },
    route: {"topk_ids": IDS, "topk_weights": WEIGHTS, "num_experts": G},
    permute: {"hidden": A_PACKED, "routing": route(IDS, WEIGHTS, G)},
    unpermute: {"rows": torch.ones(2 * M, K), "routing": route(IDS, WEIGHTS, G)},
    topk_softmax: {"logits": ROWS, "top_k": 2, "renormalize": True},
    topk_sigmoid: {"logits": ROWS, "top_k": 2, "renormalize": True, "bias": torch.ones(N), "num_groups": 2},
    unpack_groups: {"packed": A_PACKED, "group_offsets": OFFSETS},
    group_sizes: {"group_offsets": OFFSETS},
    group_offsets_from_sizes: {"sizes": OFFSETS},
    group_offsets_from_offs: {"offs": OFFSETS},
    offs_from_group_offsets: {"group_offsets": OFFSETS},
}
UNSUITABLE: dict[str, Callable[[Any], Any]] = {
    "a list": lambda x: x.tolist() if isinstance(x, Tensor) else list(x),
    "a tuple": tuple,
    "a list of tensors": list,
    "a generator": lambda x: (row for row in x),
    "a string": lambda x: "0",
    "sparse": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "jagged": lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("unsuitable", UNSUITABLE)
@pytest.mark.parametrize(
    ("function", "name"),
    [(function, name) for function, call in CALLS.items() for name in call if name != "renormalize"],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_arguments_of_other_types(function: Callable[..., Any], name: str, unsuitable: str) -> None:
    call = CALLS[function]
    function(**call)
    value = call[name]
    if not isinstance(value, Tensor) and (isinstance(value, int) or unsuitable in ("sparse", "nested", "jagged")):
        bad: Any = "0" if unsuitable == "a string" else 2.0
    else:
        bad = UNSUITABLE[unsuitable](value)
    with pytest.raises(TypeError, match=rf"^{name}: expected "):
        function(**{**call, name: bad})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("w_gate_up", lambda w: w.mT, r"got \[2, 3, 8\]; for \[E, H, 2I\] pass transposed=True$"),
        ("w_gate_up", lambda w: w[..., :2], r"got \[2, 8, 2\]$"),
        ("w_down", lambda w: w.mT, r"shape \[E, H, I\] = \[2, 3, 4\], got \[2, 4, 3\]; pass w_down.mT$"),
        ("w_down", lambda w: w[:, :2], r"shape \[E, H, I\] = \[2, 3, 4\], got \[2, 2, 4\]$"),
    ],
)
def test_weights_the_other_way(name: str, change: Callable[[Tensor], Tensor], message: str) -> None:
    call = CALLS[moe_mlp]
    with pytest.raises(ValueError, match=rf"^{name}: .*{message}"):
        moe_mlp(**{**call, name: change(call[name])})


def test_fp8_where_there_is_none() -> None:
    w = quantize(torch.ones(G, 8, K), "rowwise")
    with pytest.raises(
        TypeError, match=r"^w_gate_up: .*got ScaledTensor; fp8 is for grouped_gemm and moe_mlp, .*dequantize"
    ):
        swiglu_ffn(A_PACKED, w, OFFSETS)


def test_transposed_weights_without_need() -> None:
    w = torch.ones(G, 8, K)
    with pytest.raises(ValueError, match=r"^w_gate_up: .*; for \[E, 2I, H\] pass transposed=False$"):
        swiglu_ffn(A_PACKED, w, OFFSETS, transposed=True)
    with pytest.raises(
        ValueError, match=r"^group_offsets: expected length E \+ 1 = 3 .*; for sizes \[E\] pass .* PyTorch's offs \[E\]"
    ):
        swiglu_ffn(A_PACKED, w, OFFSETS[1:])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"activation": "swish"}, ValueError, "activation: expected one of silu, .*got 'swish'"),
        ({"activation": torch.nn.SiLU()}, ValueError, r"activation: expected one of silu, .*got SiLU\(\)"),
        ({"activation": "clamped_swiglu", "gated": False}, ValueError, "gated: expected True for clamped_swiglu"),
        ({"top_k": 2.0}, TypeError, "top_k: expected an int, got float"),
        ({"top_k": True}, TypeError, "top_k: expected an int, got bool"),
        ({"top_k": 0}, ValueError, "top_k: expected 1 to 4, got 0"),
        ({"top_k": 5}, ValueError, "top_k: expected 1 to 4, got 5"),
        ({"hidden_size": 0}, ValueError, "hidden_size: expected at least 1, got 0"),
        ({"intermediate_size": -1}, ValueError, "intermediate_size: expected at least 1, got -1"),
        ({"num_experts": 0}, ValueError, "num_experts: expected at least 1, got 0"),
        ({"num_experts": "4"}, TypeError, "num_experts: expected an int, got str"),
        ({"num_experts": np.int64(4)}, TypeError, r"num_experts: expected an int, got numpy\.int64"),
        ({"compute": "fp8"}, ValueError, "compute: expected None or one of 'fp8_block', 'fp8_rowwise', got 'fp8'"),
        *(
            ({name: "False"}, TypeError, f"{name}: expected True or False, got 'False'")
            for name in ("gated", "renormalize", "fp8_wgrad", "fast_accumulation")
        ),
    ],
)
def test_a_layer_is_checked_when_it_is_made(change: dict[str, Any], error: type[Exception], message: str) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 6, "num_experts": 4, "top_k": 2, "renormalize": True}
    with pytest.raises(error, match=f"^{message}"):
        MoE(**{**sizes, **change})


def layer_in(compute: str | None) -> Callable[..., Any]:
    hidden, ids = torch.randn(3, 8), torch.zeros(3, 2, dtype=torch.int64)
    arguments = (hidden, ids, torch.ones(3, 2), torch.randn(4, 8, 8), torch.randn(4, 8, 4))
    return lambda **options: moe_mlp(*arguments, **options, compute=compute)


def layer_of_fp8(**options: Any) -> Tensor:
    weights = (quantize(torch.randn(*shape), "rowwise") for shape in ((4, 8, 8), (4, 8, 4)))
    return moe_mlp(torch.randn(3, 8), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2), *weights, **options)


def module_in_fp8(**attributes: Any) -> Tensor:
    layer = MoE(8, 4, 4, 2, renormalize=True, compute="fp8_rowwise")
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer(torch.randn(3, 8))


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        *[("2", "str"), (None, "NoneType"), (True, "bool")],
        *[(torch.tensor(2.0), "torch.Tensor"), (np.float32(2), "numpy.float32")],
    ],
    ids=str,
)
def test_options_that_are_no_numbers(value: Any, kind: str) -> None:
    layer = layer_in(None)
    for name in ("alpha", "limit"):
        with pytest.raises(TypeError, match=f"^{name}: expected a number, got {kind}$"):
            layer(**{name: value})
    with pytest.raises(TypeError, match=r"^scale: expected a number, got"):
        topk_sigmoid(torch.randn(3, 4), 2, renormalize=True, scale=value)


def test_options_that_are_no_floats() -> None:
    layer = layer_in(None)
    for name in ("alpha", "limit"):
        with pytest.raises(
            ValueError, match=f"^{name}: expected a number in the range of float, got an int of 1329 bits"
        ):
            layer(**{name: 10**400})
    with pytest.raises(ValueError, match=r"^scale: expected a number in the range of float"):
        topk_sigmoid(torch.randn(3, 4), 2, renormalize=True, scale=-(10**400))
    layer(limit=2**1023)


@pytest.mark.parametrize("offsets", [torch.zeros(0).int(), torch.zeros(1, 3).int(), torch.tensor(3).int()], ids=str)
def test_a_routing_with_other_offsets(offsets: Tensor) -> None:
    routing = route(IDS, WEIGHTS, G)._replace(group_offsets=offsets)
    for move, tensor in ((permute, A_PACKED), (unpermute, torch.ones(2 * M, K))):
        with pytest.raises(ValueError, match=r"^routing\.group_offsets: expected a "):
            move(tensor, routing)


@pytest.mark.parametrize("value", ["False", 0, None, torch.tensor(True)], ids=str)
@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda **options: quantize(torch.randn(2, 8), "rowwise", **options), ["power_of_two"]),
        (lambda **options: topk_softmax(torch.randn(3, 4), 2, **options), ["renormalize"]),
        (lambda **options: topk_sigmoid(torch.randn(3, 4), 2, **options), ["renormalize"]),
        (lambda **options: unpermute(torch.ones(2 * M, K), route(IDS, WEIGHTS, G), **options), ["weighted"]),
        (
            lambda **options: swiglu_ffn(torch.randn(M, 8), torch.randn(G, 8, 8), OFFSETS, **options),
            ["gated", "interleaved", "transposed"],
        ),
        (layer_in(None), ["gated", "interleaved", "transposed", "fp8_wgrad"]),
        (layer_in("fp8_rowwise"), ["gated", "interleaved", "transposed", "fp8_wgrad", "fast_accumulation"]),
        (layer_of_fp8, ["gated", "interleaved", "transposed", "fp8_wgrad", "fast_accumulation"]),
        (module_in_fp8, ["gated", "renormalize", "fp8_wgrad", "fast_accumulation"]),
    ],
)
def test_options_that_are_no_bools(call: Callable[..., Any], names: list[str], value: Any) -> None:
    """Such values would silently count as True or False."""
    for name in names:
        with pytest.raises(TypeError, match=f"^{name}: expected True or False, got "):
            call(**{name: value})


def test_options_that_depend_on_sizes_are_compiled() -> None:
    """Comparisons of symbolic sizes are symbolic, too."""

    def layer(hidden: Tensor, ids: Tensor, first: Tensor, second: Tensor) -> Tensor:
        options = {"gated": first.size(1) == 2 * second.size(2), "transposed": first.size(1) == hidden.size(1)}
        return moe_mlp(hidden, ids, torch.ones_like(hidden[:, :2]), first, second, **options)

    torch._dynamo.reset()
    arguments = torch.randn(5, 8), torch.randint(3, (5, 2)), torch.randn(3, 6, 8), torch.randn(3, 8, 3)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(*arguments), layer(*arguments))


class Wrapped(Tensor):
    """A tensor subclass that holds its values in inner tensors, like those of torchao and torch.distributed."""

    inside: tuple[Tensor, ...]

    @staticmethod
    def __new__(cls, shape: Any, *inside: Tensor) -> Wrapped:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)  # type: ignore[no-any-return,attr-defined]

    def __init__(self, shape: Any, *inside: Tensor):
        for i, tensor in enumerate(inside):
            setattr(self, f"inside_{i}", tensor)
        self.held = [f"inside_{i}" for i in range(len(inside))]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return self.held, None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*tree_map_only(Wrapped, lambda x: x.inside_0, args), **(kwargs or {}))


def test_a_tensor_that_holds_another_one() -> None:
    B = torch.randn(G, K, N)
    assert torch.equal(grouped_gemm(A_PACKED, Wrapped(B.shape, B), OFFSETS), grouped_gemm(A_PACKED, B, OFFSETS))


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32], ids=str)
def test_a_quantized_tensor_of_pytorch(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=rf"^A_packed: .*got {dtype}; pass what its dequantize\(\) returns$"):
        grouped_gemm(torch.quantize_per_tensor(A_PACKED, 0.1, 0, dtype), torch.randn(G, K, N), OFFSETS)


def test_a_quantized_tensor() -> None:
    values, scales = torch.ones(G, K, N, dtype=torch.int8), torch.ones(G, 1, N)
    message = r"^B: .*got Wrapped, which holds its values as torch.int8, torch.float32; convert it with .dequantize\(\)"
    with pytest.raises(TypeError, match=message):
        grouped_gemm(A_PACKED, Wrapped(values.shape, values, scales), OFFSETS)


class Float8Tensor(Wrapped):
    """Stand-in for torchao's class: data in fp8, and scales."""

    __module__ = "torchao.quantization.quantize_.workflows.float8.float8_tensor"

    def detach(self) -> Float8Tensor:
        return self  # nn.Parameter takes the class of this result


class Float8TrainingTensor(Wrapped):
    """Stand-in for torchao's class, which has no `dequantize`."""

    __module__ = "torchao.float8.float8_training_tensor"

    def to_original_precision(self) -> Tensor:
        raise NotImplementedError


class Float8TrainingWeightWrapperTensor(Wrapped):
    """Stand-in for torchao's class: it holds the unquantised weight and changes PyTorch's products."""

    __module__ = "torchao.prototype.moe_training.tensor"


def expert_of(size: int) -> torch.nn.ModuleDict:
    return torch.nn.ModuleDict({name: torch.nn.Linear(size, size, bias=False) for name in ("up_proj", "down_proj")})


def test_tensors_of_torchao() -> None:
    """They are refused as operands, beside a ScaledTensor, and as a parameter of an expert."""
    data, scales = torch.zeros(G, K, N).to(torch.float8_e4m3fn), torch.ones(G, 1, N)
    quantized = Float8Tensor(data.shape, data, scales)
    how = r"expected a torch\.Tensor, got torchao's Float8Tensor: pass {0}\.dequantize\(\), .*quantize\({0}\.dequantize"
    for name, call in (
        ("B", lambda: grouped_gemm(A_PACKED, quantized, OFFSETS)),
        ("B", lambda: grouped_gemm(quantize(A_PACKED, "rowwise"), quantized, OFFSETS)),
        ("x", lambda: quantize(quantized, "rowwise")),
        ("w_down", lambda: moe_mlp(**{**CALLS[moe_mlp], "w_down": quantized})),
    ):
        with pytest.raises(TypeError, match=f"^{name}: {how.format(name)}"):
            call()
    training = Float8TrainingTensor(data.shape, data, scales)
    with pytest.raises(TypeError, match=r"^B: .*pass B\.to_original_precision\(\)"):
        grouped_gemm(A_PACKED, training, OFFSETS)
    wrapper = Float8TrainingWeightWrapperTensor(data.shape, torch.ones(G, K, N))
    with pytest.raises(TypeError, match=r"pass B\.inside_0, which is in torch\.float32, or leave .*torchtitan"):
        grouped_gemm(A_PACKED, wrapper, OFFSETS)
    expert = expert_of(K)
    weight = expert["up_proj"].weight
    expert["up_proj"].weight = torch.nn.Parameter(Float8Tensor(weight.shape, weight.detach(), torch.ones(K, 1)))
    with pytest.raises(TypeError, match=r"^experts\[0\]\.up_proj\.weight: .*torchao"):
        MoE.from_experts([expert], top_k=1, renormalize=True, activation="silu")


@pytest.fixture
def mesh() -> Iterator[Any]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_a_dtensor(mesh: Any) -> None:
    weight = torch.nn.Parameter(distribute_tensor(torch.ones(G, 8, K), mesh, [Shard(0)]))
    message = r"got DTensor with the placements \(Shard\(dim=0\),\), .*\.to_local\(\).*moe_kernels\.expert_parallel"
    with pytest.raises(TypeError, match=rf"^w_gate_up: .*{message}"):
        moe_mlp(**{**CALLS[moe_mlp], "w_gate_up": weight})
    layer = MoE(K, 4, G, 2, renormalize=True)
    layer.router = torch.nn.Parameter(distribute_tensor(layer.router.detach(), mesh, [Replicate()]))
    with pytest.raises(TypeError, match=r"^router: .*got DTensor"):
        layer(A_PACKED)
    experts = [expert_of(K) for _ in range(G)]
    with pytest.raises(TypeError, match=r"^router: .*got DTensor"):
        MoE.from_experts(experts, layer.router, top_k=1, renormalize=True, activation="silu")
    sharded = distribute_tensor(experts[1]["down_proj"].weight.detach(), mesh, [Shard(0)])
    experts[1]["down_proj"].weight = torch.nn.Parameter(sharded)
    with pytest.raises(TypeError, match=r"^experts\[1\]\.down_proj\.weight: .*got DTensor"):
        MoE.from_experts(experts, None, top_k=1, renormalize=True, activation="silu")
    out = moe_mlp(**{**CALLS[moe_mlp], "w_gate_up": weight.to_local()})
    assert torch.equal(out, moe_mlp(**{**CALLS[moe_mlp], "w_gate_up": torch.ones(G, 8, K)}))


READERS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str]] = {
    "unpack_groups": (unpack_groups, (A_PACKED, OFFSETS), "unpack_groups reads group_offsets on the host"),
    "grouped_gemm": (
        partial(grouped_gemm, validate=True),
        (A_PACKED, torch.ones(G, K, N), OFFSETS),
        r"validate=True \(or MOE_KERNELS_VALIDATE=1\) reads values on the host",
    ),
    "grouped_gemm_wgrad": (
        partial(grouped_gemm_wgrad, validate=True),
        (A_PACKED, torch.ones(len(A_PACKED), N), OFFSETS),
        r"validate=True \(or MOE_KERNELS_VALIDATE=1\) reads values on the host",
    ),
    "route": (
        partial(route, num_experts=G, validate=True),
        (IDS, WEIGHTS),
        r"validate=True \(or MOE_KERNELS_VALIDATE=1\) reads values on the host",
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_what_reads_values_says_so_under_compile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, arguments, message = READERS[name]

    def call(*arguments: Tensor) -> Any:
        return function(*arguments)

    class Module(torch.nn.Module):
        forward = staticmethod(call)

    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        torch.compile(call, fullgraph=True, backend="eager")(*arguments)
    with pytest.raises(RuntimeError, match=f"^{message}"):
        torch.export.export(Module(), arguments, strict=False)
    expected = tree_leaves(function(*arguments))
    for has_graph_break in (True, False):
        if not has_graph_break:
            monkeypatch.delattr(torch._dynamo, "graph_break")
        torch._dynamo.reset()
        found = tree_leaves(torch.compile(call, backend="eager")(*arguments))
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_the_interpreter_asked_for_too_late() -> None:
    program = """
import os, torch, triton
from moe_kernels import grouped_gemm
os.environ["TRITON_INTERPRET"] = "1"
grouped_gemm(torch.ones(5, 3), torch.ones(3, 4), torch.tensor([0, 5]))
"""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "RuntimeError: TRITON_INTERPRET=1 was set after Triton had been imported" in done.stderr.splitlines()[-1]


def test_likely_mistakes_are_named() -> None:
    rowwise = quantize(torch.ones(G, K, 4), "rowwise")  # scales of rows, where a product needs those of columns
    A = quantize(torch.ones(len(A_PACKED), K), "rowwise")
    with pytest.raises(
        ValueError, match=r"^B\.scales: expected .*; for \[\.\., K, N\] pass quantize\(B\.mT, 'rowwise'\)"
    ):
        grouped_gemm(A, rowwise, OFFSETS)
    with pytest.raises(
        ValueError,
        match=r"^format: .*got 'fp8_block'; '128x128' is the format of weights in MoE\.quantize\('fp8_block'\)$",
    ):
        quantize(torch.ones(4, 4), "fp8_block")
    batch, choice = torch.ones(2, 5, 8), torch.zeros(2, 5, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^logits: .*got \[2, 5, 8\]; pass logits\.flatten\(0, -2\)$"):
        topk_softmax(batch, 1, renormalize=True)
    with pytest.raises(ValueError, match=r"^topk_ids: .*got \[2, 5, 1\]; pass topk_ids\.flatten\(0, -2\)$"):
        route(choice, choice.float(), G)
    with pytest.raises(ValueError, match=r"^hidden: .*got \[2, 5, 8\]; pass hidden\.flatten\(0, -2\)$"):
        moe_mlp(batch, choice, choice.float(), torch.ones(G, 6, 8), torch.ones(G, 8, 3))
    with pytest.raises(ValueError, match=r"^top_k: expected 1 to 2, got 3; 1 of 4 groups have 2 of 8 experts$"):
        topk_sigmoid(torch.ones(5, 8), 3, renormalize=True, num_groups=4, top_groups=1)
    one, tokens = torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 8)
    gate_up, down = torch.ones(G, 6, 8), torch.ones(G, 8, 3)
    for transposed in (False, True):
        weights = (down.mT, gate_up.mT) if transposed else (down, gate_up)
        with pytest.raises(ValueError, match=r"^w_gate_up: expected .*; w_gate_up and w_down seem swapped$"):
            moe_mlp(tokens, one, one.float(), *weights, transposed=transposed)
        with pytest.raises(ValueError, match=rf"^w_gate_up: expected .* pass transposed={not transposed}$"):
            moe_mlp(tokens, one, one.float(), *(w.mT for w in weights[::-1]), transposed=transposed)
        with pytest.raises(ValueError, match=r"^w_down: expected .*; if w_gate_up holds gate and up, pass gated=True$"):
            moe_mlp(tokens, one, one.float(), *weights[::-1], transposed=transposed, gated=False)
    with pytest.raises(ValueError, match=r"^A_packed: .*got \[2, 5, 8\]; uniform_grouped_gemm takes \[G, M, K\]$"):
        grouped_gemm(batch, torch.ones(2, 8, 3), torch.tensor([0, 5, 10]))
    ids = torch.zeros(5, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^w_down: expected .*; if w_gate_up holds the gate alone, pass w_up$"):
        moe_mlp(torch.ones(5, 8), ids, torch.ones(5, 1), torch.ones(G, 6, 8), torch.ones(G, 8, 6))
    w1, w2, w3 = torch.ones(G, 6, 8), torch.ones(G, 8, 6), torch.ones(G, 6, 8)
    for up, down, transposed in ((w2, w3, False), (w2.mT, w3.mT, True)):
        gate = w1.mT if transposed else w1
        with pytest.raises(ValueError, match=r"^w_up: expected .*; w_up and w_down seem swapped: Mixtral's w1, w3, w2"):
            moe_mlp(torch.ones(5, 8), ids, torch.ones(5, 1), gate, down, w_up=up, transposed=transposed)
    with pytest.raises(ValueError, match=r"^group_offsets\[0\]: expected 0, got 2; .*group_offsets_from_offs"):
        unpack_groups(torch.ones(5, 2), torch.tensor([2, 5]))


def test_fp8_without_scales_under_autocast() -> None:
    A, B = torch.ones(5, 4).to(torch.float8_e4m3fn), torch.ones(G, 4, 6).to(torch.float8_e4m3fn)
    with torch.autocast("cpu"), pytest.raises(TypeError, match="pass fp8 with its scales"):
        grouped_gemm(A, B, OFFSETS)


def test_slices_of_fp8_operands() -> None:
    """They are tuples, as those of every NamedTuple. The error says how to take some experts."""
    rows, ids, w = torch.randn(3, 16), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    first, second = torch.randn(4, 16, 16), torch.randn(4, 16, 8)
    q, d = quantize(first, "rowwise"), quantize(second, "rowwise")
    some = r"got tuple; pass ScaledTensor\(data, scales, format\), of some experts"
    with pytest.raises(TypeError, match="^w_down: expected a ScaledTensor, as for w_gate_up, " + some):
        moe_mlp(rows, ids, w, q, d[:2])
    with pytest.raises(TypeError, match="^B: expected a ScaledTensor, as for A_packed, " + some):
        grouped_gemm(quantize(rows, "rowwise"), q.mT[:2], torch.tensor([0, 1, 3]))
    weights = [quantize_weight(x, "fp8_block")[:2] for x in (first, second)]
    with pytest.raises(
        TypeError, match=r"^w_gate_up: .*got tuple; pass a QuantizedWeight, .*quantize_weight\(weight\[:n\]"
    ):
        moe_mlp(rows, ids, w, *weights, compute="fp8_block")
