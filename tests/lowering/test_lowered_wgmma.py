"""No WGMMA takes its left operand from registers: `sm90.report` raises if one does, in any test of this folder.

The other files compile the rules' configs for 16-bit types, and the tuned entries. This file adds operands of several
dtypes, and float32 in tf32.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import pytest
import torch
import triton
import triton.language as tl
from sm90 import empty, lowered, report, requests, waits_for_each

from moe_kernels import rules
from moe_kernels.glu import GLUSpec
from moe_kernels.kernels import layer
from moe_kernels.ops.batched import UNIFORM_GROUPED_GEMM
from moe_kernels.ops.layer import MOE_MLP, SWIGLU_FFN
from moe_kernels.ops.products import GROUPED_GEMM, GROUPED_GEMM_WGRAD
from moe_kernels.rules import uniform
from moe_kernels.runtime.compile import Specialization
from moe_kernels.runtime.plan import Request

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SILU = GLUSpec("silu", True, False, 1.0, 1.0)

dtypes = pytest.mark.parametrize(
    ("left", "right"), [(FP32, FP32), (BF16, FP32), (FP32, BF16), (BF16, FP16)], ids=lambda dtype: str(dtype)[6:]
)
columns = pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])


@pytest.fixture(autouse=True)
def _tf32_by_rule(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    monkeypatch.setattr(rules.entries, "near", lambda *_: [])
    monkeypatch.setattr(uniform, "choose", uniform.by_kernel)
    monkeypatch.setattr(layer, "fuses", lambda *_: True)
    yield
    torch.backends.cuda.matmul.fp32_precision = before


def matrix(*shape: int, dtype: torch.dtype, transposed: bool) -> torch.Tensor:
    *groups, rows, cols = shape
    return empty(*groups, cols, rows, dtype=dtype).mT if transposed else empty(*shape, dtype=dtype)


def assert_wgmma(asked_for: Sequence[Request]) -> None:
    """Assert that the last requested kernel uses WGMMA, and that all of them compile."""
    assert [lowered(request) for request in asked_for][-1]["wgmma"] > 0


@dtypes
@columns
@pytest.mark.parametrize(("variant", "rows"), [("basic", 50), ("basic", 128), ("persistent", 256)])
def test_grouped_gemm(left: torch.dtype, right: torch.dtype, transposed: bool, variant: str, rows: int) -> None:
    B = matrix(8, 2048, 1536, dtype=right, transposed=transposed)
    tensors = empty(8 * rows, 2048, dtype=left), B, empty(9, dtype=torch.int32), None
    assert_wgmma(requests(GROUPED_GEMM, tensors, (FP32, variant)))


@dtypes
def test_wgrad(left: torch.dtype, right: torch.dtype) -> None:
    tensors = empty(65536, 2048, dtype=left), empty(65536, 1536, dtype=right), empty(129, dtype=torch.int32)
    assert_wgmma(requests(GROUPED_GEMM_WGRAD, tensors, (FP32,)))


@dtypes
@columns
def test_uniform(left: torch.dtype, right: torch.dtype, transposed: bool) -> None:
    A = matrix(8, 512, 512, dtype=left, transposed=transposed)
    B = matrix(8, 512, 256, dtype=right, transposed=transposed)
    assert_wgmma(requests(UNIFORM_GROUPED_GEMM, (A, B), (8, FP32)))


@dtypes
@pytest.mark.parametrize(("transposed", "top_k"), [(False, 0), (True, 8)], ids=["rows", "columns, tokens"])
def test_first_half(left: torch.dtype, right: torch.dtype, transposed: bool, top_k: int) -> None:
    E, H, I, M = 16, 2048, 768, 1024  # noqa: E741
    w_in = matrix(E, H, 2 * I, dtype=right, transposed=transposed)
    rows, offsets, index = empty(M // max(top_k, 1), H, dtype=left), *(empty(n, dtype=torch.int32) for n in (E + 1, M))
    tensors = rows, offsets, w_in, None, None, None
    operator, options = SWIGLU_FFN, (False, False, SILU)
    if top_k:
        slots = empty(M // top_k, top_k, dtype=torch.int64), empty(M // top_k, top_k, dtype=FP32)
        w_out = matrix(E, I, H, dtype=right, transposed=True)
        operator, tensors = MOE_MLP, (rows, *slots, offsets, index, index, w_in, w_out, None, None, None, None)
        options = (True, False, False, SILU)
    asked_for = requests(operator, tensors, options)
    first = next(i for i, request in enumerate(asked_for) if request.kernel.name == "swiglu")
    assert_wgmma(asked_for[: first + 1])


@triton.jit
def multiply(A, B, out, scale: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, 64)
    at = i[:, None] * 64 + i[None, :]
    a = tl.load(A + at)
    tl.store(out + at, tl.dot(a * scale if scale else a, tl.load(B + at)))


@pytest.mark.parametrize("scale", [0, 2], ids=["", "in registers"])
def test_a_left_operand_in_registers_is_found(scale: int) -> None:
    types, aligned = ("*bf16", "*bf16", "*fp32", "constexpr"), {(i,): [["tt.divisibility", 16]] for i in range(3)}
    made = Specialization(f"by hand {scale}", multiply, types, {(3,): scale}, aligned, {"num_warps": 4})
    if scale:
        with pytest.raises(AssertionError, match="multiply: the left operand of a WGMMA is in registers"):
            report(made)
    else:
        assert report(made)["wgmma"] > 0


@pytest.mark.parametrize(
    ("following", "waits"),
    [
        ("wait 0", True),
        ("wait 1\nwait 0", False),
        ("@%p1 bra $L__1;\nwait 0", False),
        ("$L__1:\nwait 0", False),
        ("", False),
    ],
)
def test_what_counts_as_a_wait_for_each(following: str, waits: bool) -> None:
    """A loop may overwrite the operand before the wait that follows the loop."""
    begun = "wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%r1,%r2}, {%r3,%r4}, %rd1, 1, 1, 1;\n"
    ptx = begun + re.sub(r"wait (\d)", r"wgmma.wait_group.sync.aligned \1;", following)
    assert waits_for_each(ptx) == waits
