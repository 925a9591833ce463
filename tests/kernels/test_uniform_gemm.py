"""The uniform kernel against fp64: sizes, dtypes, layouts, NaN isolation, gradients, and features of a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_kernels import reference, rules, uniform_grouped_gemm
from moe_kernels.kernels import uniform_gemm as kernels
from moe_kernels.ops import batched
from moe_kernels.rules import uniform as uniform_rules
from moe_kernels.testing import assert_grouped_gemm_close

NAN = float("nan")


def make(
    G: int,
    M: int,
    N: int,
    K: int,
    device: str,
    dtype: torch.dtype = torch.float16,
    columns: tuple[bool, bool] = (False, False),
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Random `A [G, M, K]` and `B [G, K, N]`, each a view of a contiguous `[G, K, M]`, `[G, N, K]` if `columns`."""
    generator = torch.Generator(device).manual_seed(seed)
    tensors = []
    for (rows, cols), transposed in zip(((M, K), (K, N)), columns, strict=True):
        shape = (G, cols, rows) if transposed else (G, rows, cols)
        x = torch.randn(shape, dtype=torch.float32, device=device, generator=generator).to(dtype)
        tensors.append(x.transpose(1, 2) if transposed else x)
    return tensors[0], tensors[1] * K**-0.5


def assert_close(out: Tensor, A: Tensor, B: Tensor) -> None:
    G, M, K = A.shape
    offsets = torch.arange(G + 1, device=A.device) * M
    assert out.shape == (G, M, B.size(2))
    assert_grouped_gemm_close(out.reshape(G * M, -1), A.reshape(G * M, K), B, offsets)


@pytest.fixture
def no_bmm(fresh_plans: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernels even if the rule prefers torch.bmm."""
    monkeypatch.setattr(uniform_rules, "choose", uniform_rules.by_kernel)


@pytest.mark.parametrize(
    ("G", "M", "N", "K"),
    [
        (2, 70, 40, 64),
        (1, 1, 1, 1),
        (4, 7, 3, 9),
        (2, 97, 97, 97),
        (2, 130, 8, 17),
        (3, 16, 7, 1),
    ],
)
def test_sizes(G: int, M: int, N: int, K: int, device: str) -> None:
    A, B = make(G, M, N, K, device)
    assert_close(uniform_grouped_gemm(A, B, G), A, B)


@pytest.mark.parametrize(
    ("dtype", "columns"),
    [
        (torch.float16, (True, False)),
        (torch.float16, (False, True)),
        (torch.bfloat16, (False, False)),
        (torch.float32, (True, True)),
    ],
    ids=str,
)
def test_layouts_and_dtypes(columns: tuple[bool, bool], dtype: torch.dtype, device: str) -> None:
    A, B = make(2, 72, 40, 48, device, dtype, columns)
    out = uniform_grouped_gemm(A, B, 2)
    assert out.dtype == dtype
    assert out.is_contiguous()
    assert_close(out, A, B)


@pytest.mark.parametrize(
    ("a_dtype", "b_dtype", "out_dtype"),
    [
        (torch.float16, torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float16, torch.float32, None),
        (torch.bfloat16, torch.float16, None),
        (torch.float32, torch.float32, torch.bfloat16),
    ],
)
def test_mixed_and_output_dtypes(
    a_dtype: torch.dtype, b_dtype: torch.dtype, out_dtype: torch.dtype | None, device: str
) -> None:
    A, B = make(2, 20, 32, 48, device)
    A, B = A.to(a_dtype), B.to(b_dtype)
    out = uniform_grouped_gemm(A, B, 2, out_dtype=out_dtype)
    assert out.dtype == (out_dtype or torch.promote_types(a_dtype, b_dtype))
    assert_close(out, A, B)


@pytest.mark.usefixtures("tf32")
def test_left_operands_cast_for_tf32(device: str) -> None:
    A, B = make(2, 20, 32, 48, device, torch.bfloat16, columns=(True, False))
    out = uniform_grouped_gemm(A, B.half(), 2)
    assert_close(out, A, B.half())
    assert torch.equal(uniform_grouped_gemm(A.reshape(40, 48), B.half().flatten(0, 1), 2), out.flatten(0, 1))


def test_flat_views(device: str) -> None:
    A, B = make(3, 20, 24, 32, device)
    expected = uniform_grouped_gemm(A, B, 3)
    flat_A, flat_B = A.flatten(0, 1), B.flatten(0, 1)
    for a, b in ((flat_A, flat_B), (flat_A, B), (A, flat_B)):
        out = uniform_grouped_gemm(a, b, 3)
        assert out.shape == ((60, 24) if a.dim() == 2 else (3, 20, 24))
        assert torch.equal(out, expected.view(out.shape))
    strided = torch.full((60, 41), NAN, dtype=A.dtype, device=device)[:, :32].copy_(flat_A)
    assert torch.equal(uniform_grouped_gemm(strided, B, 3), expected.flatten(0, 1))


def views(x: Tensor) -> dict[str, Tensor]:
    """Return `x [G, _, _]` as other views of memory, whose gaps hold NaN."""
    G, rows, cols = x.shape
    wide = torch.full((G, rows, cols + 9), NAN, dtype=x.dtype, device=x.device)
    every_second = torch.full((2 * G, rows, cols), NAN, dtype=x.dtype, device=x.device)
    return {
        "misaligned": wide[:, :, 1 : cols + 1].copy_(x),
        "row gaps": wide.clone()[:, :, :cols].copy_(x),
        "every second group": every_second[::2].copy_(x),
        "reversed dimensions": x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
        "groups inside": x.transpose(0, 1).contiguous().transpose(0, 1),
    }


@pytest.mark.parametrize(
    "name", ["misaligned", "row gaps", "every second group", "reversed dimensions", "groups inside"]
)
def test_strides(name: str, device: str) -> None:
    A, B = make(3, 40, 32, 48, device)
    expected = uniform_grouped_gemm(A, B, 3)
    for a, b in ((views(A)[name], B), (A, views(B)[name])):
        out = uniform_grouped_gemm(a, b, 3)
        assert_close(out, A, B)
        torch.testing.assert_close(out, expected)


def test_expanded(device: str) -> None:
    A, B = make(3, 40, 32, 48, device)
    for a, b in ((A[:1].expand_as(A), B), (A, B[:1].expand_as(B)), (A[:, :1].expand_as(A), B)):
        assert_close(uniform_grouped_gemm(a, b, 3), a, b)


@pytest.mark.usefixtures("fresh_plans")
def test_the_same_tensor_twice_and_then_two(device: str) -> None:
    A, B = make(2, 32, 32, 32, device)
    for a, b in ((A, A), (A, A.transpose(1, 2)), (A, B), (B, A.transpose(1, 2))):
        assert_close(uniform_grouped_gemm(a, b, 2), a, b)


@pytest.mark.parametrize(("G", "M", "N", "K"), [(0, 4, 5, 6), (2, 0, 5, 6), (2, 4, 0, 6), (2, 4, 5, 0), (0, 0, 0, 0)])
def test_zero_extents(G: int, M: int, N: int, K: int, device: str) -> None:
    A = torch.randn(G, M, K, device=device, requires_grad=True)
    B = torch.randn(G, K, N, device=device, requires_grad=True)
    out = uniform_grouped_gemm(A, B, G)
    assert torch.equal(out, torch.zeros(G, M, N, device=device))
    dA, dB = torch.autograd.grad(out, (A, B), torch.randn_like(out))
    assert torch.equal(dA, torch.zeros_like(A))
    assert torch.equal(dB, torch.zeros_like(B))


@pytest.mark.parametrize("where", ["A", "B"])
@pytest.mark.parametrize(
    ("M", "N", "K", "columns", "poison"),
    [
        (24, 40, 72, (False, False), float("inf")),
        (24, 40, 72, (True, True), NAN),
        (5, 9, 17, (False, False), NAN),
    ],
)
def test_one_groups_nan_stays_in_its_group(
    where: str, columns: tuple[bool, bool], poison: float, M: int, N: int, K: int, device: str
) -> None:
    A, B = make(3, M, N, K, device, columns=columns)
    clean = uniform_grouped_gemm(A, B, 3)
    (A if where == "A" else B)[1] = poison
    out = uniform_grouped_gemm(A, B, 3)
    assert torch.equal(out[::2], clean[::2])
    assert not out[1].isfinite().any()


@pytest.mark.parametrize("flat", [False, True], ids=["3-D", "2-D"])
def test_gradients(flat: bool, device: str) -> None:
    A, B = make(2, 24, 16, 40, device, torch.float32)
    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
    upstream = torch.randn(2, 24, 16, device=device)
    if flat:
        out = uniform_grouped_gemm(a.flatten(0, 1), b.flatten(0, 1), 2)
        dA, dB = torch.autograd.grad(out, (a, b), upstream.flatten(0, 1))
    else:
        dA, dB = torch.autograd.grad(uniform_grouped_gemm(a, b, 2), (a, b), upstream)
    assert_close(dA, upstream, B.transpose(1, 2))
    assert_close(dB, A.transpose(1, 2), upstream)


def test_only_the_gradients_that_are_needed(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    A, B = make(2, 24, 16, 40, device, torch.float32)
    out = uniform_grouped_gemm(A.requires_grad_(), B, 2)
    computed: list[torch.Size] = []
    product: Callable[..., Tensor] = batched.uniform_grouped_gemm
    noted = lambda a, *rest: computed.append(a.shape) or product(a, *rest)  # noqa: E731
    monkeypatch.setattr(batched, "uniform_grouped_gemm", noted)
    out.backward(torch.ones_like(out).expand_as(out))
    assert computed == [out.shape]  # only dA = d_out @ B^T
    assert B.grad is None


def test_gradients_of_gradients(device: str) -> None:
    A, B = make(2, 5, 6, 7, device, torch.float32)
    upstream, direction = torch.randn(2, 5, 6, device=device), torch.randn(2, 5, 7, device=device)
    results = []
    for product in (lambda a, b: uniform_grouped_gemm(a, b, 2), torch.bmm):
        a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
        (dA,) = torch.autograd.grad(product(a, b), a, upstream, create_graph=True)
        results.append(torch.autograd.grad(dA, b, direction)[0])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_bit_identical_on_repeat(device: str) -> None:
    A, B = make(2, 70, 40, 300, device)
    first = uniform_grouped_gemm(A, B, 2)
    for _ in range(3):
        assert torch.equal(uniform_grouped_gemm(A, B, 2), first)


def test_the_kernel_object_takes_the_rule(device: str) -> None:
    A, B = make(2, 70, 40, 48, device)
    out = torch.empty(2, 70, 40, dtype=A.dtype, device=device)
    kernels.uniform(A, B, out, 40, 48, False, False, False, False)
    assert_close(out, A, B)


@pytest.mark.parametrize("columns", [(False, False), (True, True)], ids=str)
def test_groups_folded_into_rows(columns: tuple[bool, bool], device: str) -> None:
    """The kernel object is called directly, because without TMA, on a CPU, no choice leads to it."""
    G, M, N, K = 3, 64, 40, 128
    A, B = make(G, M, N, K, device, columns=columns)
    out = torch.empty(G * M, N, dtype=A.dtype, device=device)
    flat = [(x.mT if transposed else x).flatten(0, 1) for x, transposed in zip((A, B), columns, strict=True)]
    clean = None
    for poisoned in (False, True):
        if poisoned:
            flat[1].view(G, -1, flat[1].size(1))[1] = NAN
        kernels.uniform_folded(*flat, out, G, M, N, K, *columns)
        if clean is None:
            clean = out.clone()
            assert_close(out.view(G, M, N), A, B)
    assert torch.equal(out.view(G, M, N)[::2], clean.view(G, M, N)[::2])


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize(
    ("G", "M", "N", "K"),
    [
        (8, 512, 64, 512),
        (8, 2048, 64, 2048),
        (8, 1000, 32, 1000),
        (16, 300, 1536, 520),
        (2, 2048, 2048, 1024),
        (4, 600, 8, 96),
        (8, 512, 8, 512),
        (8, 333, 97, 259),
    ],
)
@pytest.mark.parametrize("bmm", [True, False], ids=["any way", "by a kernel"])
def test_large_ones(
    G: int, M: int, N: int, K: int, columns: tuple[bool, bool], bmm: bool, request: pytest.FixtureRequest, device: str
) -> None:
    if not bmm:
        request.getfixturevalue("no_bmm")
    for out_dtype in (None, torch.float32):
        A, B = make(G, M, N, K, device, torch.bfloat16, columns)
        for _ in range(2):  # the second call is a repeat
            assert_close(uniform_grouped_gemm(A, B, G, out_dtype=out_dtype), A, B)
        flat = [x.reshape(-1, x.size(2)) for x in (A, B)]
        assert_close(uniform_grouped_gemm(*flat, G, out_dtype=out_dtype).view(G, M, N), A, B)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [(False, False), (True, True)], ids=str)
@pytest.mark.parametrize(("M", "N", "K"), [(512, 64, 512), (128, 8, 128), (100, 40, 200), (8, 8, 8)])
def test_nan_stays_where_descriptors_are_used(
    M: int, N: int, K: int, columns: tuple[bool, bool], no_bmm: None, device: str
) -> None:
    A, B = make(3, M, N, K, device, torch.bfloat16, columns)
    clean = uniform_grouped_gemm(A, B, 3)
    for poisoned in (A, B):
        kept = poisoned[1].clone()
        poisoned[1] = NAN
        out = uniform_grouped_gemm(A, B, 3)
        assert torch.equal(out[::2], clean[::2])
        assert not out[1].isfinite().any()
        poisoned[1] = kept


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_plans")
@pytest.mark.parametrize(("N", "expected"), [(64, "folded"), (65, "bmm"), (128, "bmm")])
def test_wide_outputs_are_cublas(N: int, expected: str, device: str) -> None:
    A, B = make(2, 256, N, 512, device, torch.bfloat16)
    with rules.record() as made:
        assert_close(uniform_grouped_gemm(A, B, 2), A, B)
    assert [choice.variant for _, choice in made] == [expected]
    overlapping = A.as_strided((2, 256, 512), (512, 1, 2))  # torch.bmm would copy it
    with rules.record() as made:
        out = uniform_grouped_gemm(overlapping, B, 2)
    assert [choice.variant for _, choice in made] == ["batched"]
    assert_close(out, overlapping, B)


@pytest.mark.gpu
def test_launches_in_a_row_wait_for_each_other(device: str) -> None:
    """A launch may begin before the launch whose result it reads has ended."""
    A, B = make(4, 512, 512, 512, device, torch.bfloat16)
    results = []
    for synchronised in (True, False):
        x = A
        for _ in range(50):
            x = uniform_grouped_gemm(x, B, 4)
            if synchronised:
                torch.cuda.synchronize()
        results.append(x)
    assert torch.equal(*results)


@pytest.mark.gpu
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "first call"])
def test_graph_capture(warm: bool, device: str) -> None:
    A, B = make(4, 200 if warm else 264, 64, 512, device, torch.bfloat16)
    if warm:
        uniform_grouped_gemm(A, B, 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = uniform_grouped_gemm(A, B, 4, out_dtype=torch.float32)
        again = uniform_grouped_gemm(out.to(A.dtype), B.transpose(1, 2), 4)
    A.copy_(make(4, 200 if warm else 264, 64, 512, device, torch.bfloat16, seed=1)[0])
    graph.replay()
    assert_close(out, A, B)
    assert_close(again, out.to(A.dtype), B.transpose(1, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("tf32", [True, False])
def test_fp32_follows_pytorchs_tf32_setting(tf32: bool, no_bmm: None, device: str) -> None:
    A, B = make(3, 200, 256, 2048, device, torch.float32)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        out = uniform_grouped_gemm(A, B, 3)
        if not tf32:
            assert_close(out, A, B)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    error = (out.double() - A.double() @ B.double()).abs().max().item()
    assert (1e-4 < error < 6e-3) if tf32 else (error < 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("G", "M", "N", "K", "misaligned"),
    [
        (5, 131_072, 16, 4096, False),  # A of 2.7e9 elements
        (5, 131_072, 16, 4096, True),
        (5, 16, 131_072, 4096, False),  # B
        (5, 131_072, 4096, 64, False),  # out
        (5, 131_072, 4095, 64, False),
    ],
)
def test_more_than_2_to_the_31_elements(
    G: int, M: int, N: int, K: int, misaligned: bool, no_bmm: None, device: str
) -> None:
    torch.use_deterministic_algorithms(False)  # filling these tensors with NaN takes long
    A = torch.empty(G * M * K + 1, device=device, dtype=torch.bfloat16).normal_()
    A = (A[1:] if misaligned else A[:-1]).view(G, M, K)
    B = torch.empty(G, K, N, device=device, dtype=torch.bfloat16).normal_(std=K**-0.5)
    out = uniform_grouped_gemm(A, B, G)
    for g in (0, G // 2, G - 1):
        rows, columns = slice(-min(M, 128), None), slice(-min(N, 128), None)
        exact = A[g, rows].double() @ B[g, :, columns].double()
        torch.testing.assert_close(out[g, rows, columns].double(), exact, rtol=1e-2, atol=2e-2)


@pytest.mark.gpu
def test_float64_is_for_the_cpu(device: str) -> None:
    with pytest.raises(TypeError, match="float64"):
        uniform_grouped_gemm(torch.zeros(1, 2, 2, device=device).double(), torch.zeros(1, 2, 2, device=device), 1)


def test_float64_beside_float32_goes_by_the_reference_in_the_interpreter(device: str) -> None:
    if device != "cpu":
        pytest.skip("float64 is for CPUs")
    A, B = torch.randn(2, 3, 4), torch.randn(2, 4, 5, dtype=torch.float64)
    assert torch.equal(uniform_grouped_gemm(A, B, 2), reference.uniform_grouped_gemm(A, B, 2))


@pytest.mark.usefixtures("repeats")
def test_a_number_of_groups_that_is_no_int_after_a_right_call(device: str) -> None:
    A, B = torch.randn(2, 8, 16, device=device), torch.randn(2, 16, 8, device=device)
    uniform_grouped_gemm(A, B, 2)
    for other in (2.0, torch.tensor(2)):
        with pytest.raises(TypeError, match=r"^num_groups: expected an int, got "):
            uniform_grouped_gemm(A, B, other)
