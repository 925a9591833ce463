"""The kernels of fp8 products with scales against float64 on the dequantised operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_kernels import group_offsets_from_sizes, grouped_gemm, quantize, reference, scaled_grouped_mm
from moe_kernels.kernels import fast_persistent, promoted_persistent, scaled_jagged
from moe_kernels.runtime import cache
from moe_kernels.runtime.signature import signature
from moe_kernels.scaled import ScaledTensor
from moe_kernels.testing import assert_scaled_grouped_gemm_close, assert_within_budget

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {"rowwise": ("rowwise", "rowwise"), "block": ("1x128", "128x128")}
RECIPES: Any = torch.nn.functional.ScalingType  # type: ignore[attr-defined]
RECIPES_OF = {
    "rowwise": (RECIPES.RowWise, RECIPES.RowWise),
    "block": (RECIPES.BlockWise1x128, RECIPES.BlockWise128x128),
}
# What a call is asked for: the format of its operands, variant, fast_accumulation.
KERNELS = [
    ("rowwise", "basic", False),
    ("rowwise", "basic", True),
    ("rowwise", "persistent", False),
    ("rowwise", "persistent", True),
    ("block", "basic", False),
    ("block", "persistent", False),
]
kernels = pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: f"{k[0]} {k[1]}{' fast' * k[2]}")
formats = pytest.mark.parametrize("format", FORMATS)


def operands(
    sizes: list[int],
    N: int,
    K: int,
    format: str,
    device: str,
    *,
    dtypes: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
    shared: bool = False,
    outside: int = 0,
) -> tuple[ScaledTensor, ScaledTensor, torch.Tensor]:
    """A `[M + outside, K]`, B `[G, K, N]` or `[K, N]`, and offsets for groups of these sizes."""
    generator = torch.Generator().manual_seed(K + N)
    A = torch.randn(sum(sizes) + outside, K, generator=generator)
    W = torch.randn(*(() if shared else (len(sizes),)), N, K, generator=generator) * max(K, 1) ** -0.5
    left, right = FORMATS[format]
    group_offsets = group_offsets_from_sizes(torch.tensor(sizes, dtype=torch.int32, device=device))
    return (
        quantize(A.to(device), left, dtype=dtypes[0]),
        quantize(W.to(device), right, dtype=dtypes[1]).mT,
        group_offsets,
    )


def product(
    kernel: tuple[str, str, bool],
    A: ScaledTensor,
    B: ScaledTensor,
    group_offsets: torch.Tensor,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    _, variant, fast = kernel
    return grouped_gemm(A, B, group_offsets, variant=variant, fast_accumulation=fast, out_dtype=out_dtype)


@kernels
@pytest.mark.parametrize(("K", "N"), [(16, 48), (97, 130), (320, 200), (1, 3)])
def test_extents(kernel: tuple[str, str, bool], K: int, N: int, device: str) -> None:
    A, B, group_offsets = operands([0, 9, 0, 1, 70, 0], N, K, kernel[0], device)
    out = product(kernel, A, B, group_offsets)
    assert out.dtype == torch.bfloat16
    assert_scaled_grouped_gemm_close(out, A, B, group_offsets)


@kernels
@pytest.mark.parametrize(
    ("sizes", "shared"), [([2, 0, 1], False), ([0, 0, 0], True), ([1] * 9, True), ([140, 5], False)], ids=str
)
def test_group_sizes(kernel: tuple[str, str, bool], sizes: list[int], shared: bool, device: str) -> None:
    A, B, group_offsets = operands(sizes, 48, 160, kernel[0], device, shared=shared, outside=5)
    assert_scaled_grouped_gemm_close(product(kernel, A, B, group_offsets), A, B, group_offsets)


@kernels
def test_dtypes(kernel: tuple[str, str, bool], device: str) -> None:
    """Gradients in e5m2, and a result in float32."""
    A, B, group_offsets = operands([20, 0, 75], 48, 160, kernel[0], device, dtypes=(E5M2, E4M3))
    out = product(kernel, A, B, group_offsets, torch.float32)
    assert out.dtype == torch.float32
    assert_scaled_grouped_gemm_close(out, A, B, group_offsets)


@formats
def test_other_dtypes(format: str, device: str) -> None:
    A, B, group_offsets = operands([20, 0, 75], 48, 160, format, device, dtypes=(E4M3, E5M2))
    out = grouped_gemm(A, B, group_offsets, out_dtype=torch.float16)
    assert out.dtype == torch.float16
    assert_scaled_grouped_gemm_close(out, A, B, group_offsets)


@kernels
def test_malformed_offsets(kernel: tuple[str, str, bool], device: str) -> None:
    A, B, _ = operands([16] * 5, 48, 160, kernel[0], device)
    for values in ([3, 20, 10, -5, 95, 60], [80, 70, 0, 0, 0, 0], [-(2**40), 16, 2**33] * 2):
        dtype = torch.int64 if max(values) > 2**31 else torch.int32
        group_offsets = torch.tensor(values, dtype=dtype, device=device)
        assert_scaled_grouped_gemm_close(product(kernel, A, B, group_offsets), A, B, group_offsets)


@kernels
def test_nan_stays_in_its_group(kernel: tuple[str, str, bool], device: str) -> None:
    """In data and in scales, of rows in other groups, of other weights, and of rows in none."""
    sizes = [30, 50, 9, 0]
    A, B, group_offsets = operands(sizes, 48, 160, kernel[0], device, outside=7)
    expected = product(kernel, A, B, group_offsets)
    nan = torch.full_like(A.data, torch.nan, dtype=torch.float32).to(E4M3)
    for part in ("data", "scales"):
        data, scales, weight, weight_scales = (x.clone() for x in (A.data, A.scales, B.data, B.scales))
        for rows in (slice(30, 80), slice(89, None)):
            if part == "data":
                data[rows] = nan[rows]
            else:
                scales[rows] = torch.nan
        for g in (1, 3):
            if part == "data":
                weight[g] = nan[0, 0]
            else:
                weight_scales[g] = torch.nan
        out = product(
            kernel, A._replace(data=data, scales=scales), B._replace(data=weight, scales=weight_scales), group_offsets
        )
        assert out[30:80].isnan().all()
        for rows in (slice(0, 30), slice(80, None)):
            assert torch.equal(out[rows], expected[rows])


@kernels
def test_layouts_and_repeats(kernel: tuple[str, str, bool], device: str) -> None:
    """Others than tensor cores take are copied, and scales may have any strides."""
    A, B, group_offsets = operands([20, 0, 45], 48, 160, kernel[0], device)
    expected = product(kernel, A, B, group_offsets)
    for _ in range(2 if device == "cpu" else 20):
        assert torch.equal(product(kernel, A, B, group_offsets), expected)
    by_columns = A.scales.mT.contiguous().mT
    beside = torch.cat([A.data, torch.full_like(A.data, 1.0)], dim=1)[:, :160]
    every_second = torch.stack([A.data, A.data], dim=1)[:, 0]
    for data in (A.data.mT.contiguous().mT, beside, every_second):
        out = product(kernel, A._replace(data=data, scales=by_columns), B, group_offsets)
        assert torch.equal(out, expected)
    for weight in (B.data.contiguous(), B.data.permute(2, 1, 0).contiguous().permute(2, 1, 0)):
        out = product(kernel, A, B._replace(data=weight, scales=B.scales.contiguous()), group_offsets)
        assert torch.equal(out, expected)


@pytest.mark.parametrize(("format", "out_dtype"), [("rowwise", torch.float32), ("block", torch.bfloat16)], ids=str)
def test_bias(format: str, out_dtype: torch.dtype, device: str) -> None:
    """Added in float32, to rows in groups alone; of another dtype than the result, and of any strides."""
    A, B, group_offsets = operands([20, 0, 75], 48, 160, format, device, outside=5)
    recipes = RECIPES_OF[format]
    scales = (A.scales[:, 0], B.scales[:, 0]) if format == "rowwise" else (A.scales, B.scales)
    call: Any = (A.data, B.data, scales[0], recipes[0], scales[1], recipes[1])
    bias = torch.randn(48, 3, device=device).half().T
    if format == "block":
        bias = bias[1:2].expand(3, 48)
    out = scaled_grouped_mm(*call, bias=bias, offs=group_offsets[1:], output_dtype=out_dtype)
    assert out.dtype == out_dtype
    assert_scaled_grouped_gemm_close(out, A, B, group_offsets, bias)
    assert not out[95:].any()


@pytest.mark.parametrize("kernel", [KERNELS[0], KERNELS[3], KERNELS[5]], ids=str)
@pytest.mark.parametrize(("M", "K", "N"), [(0, 32, 16), (8, 0, 16), (8, 32, 0)])
def test_nothing_to_multiply(kernel: tuple[str, str, bool], M: int, K: int, N: int, device: str) -> None:
    A, B = torch.zeros(M, K, dtype=E4M3, device=device), torch.zeros(2, K, N, dtype=E4M3, device=device)
    rowwise = kernel[0] == "rowwise"
    blocks = 1 if rowwise else -(-K // 128)
    left = ScaledTensor(A, torch.ones(M, blocks, device=device), FORMATS[kernel[0]][0])
    right = ScaledTensor(B, torch.ones(2, blocks, N if rowwise else -(-N // 128), device=device), FORMATS[kernel[0]][1])
    out = product(kernel, left, right, torch.tensor([0, M // 2, M], device=device))
    assert out.shape == (M, N)
    assert not out.any()


@pytest.mark.parametrize("rows", [3, 20, 50, 130])
@formats
def test_the_rule(format: str, rows: int, device: str) -> None:
    """Few and many rows per group, with the variant left open."""
    A, B, group_offsets = operands([rows, 2 * rows], 48, 160, format, device)
    assert_scaled_grouped_gemm_close(grouped_gemm(A, B, group_offsets), A, B, group_offsets)


def test_kernels_called_directly(device: str) -> None:
    """They have configs of their own."""
    if device == "cpu":
        pytest.skip("Helion launches no kernel on a CPU")
    A, B, group_offsets = operands([64, 100], 64, 128, "rowwise", device)
    right = B.mT
    out = torch.empty(164, 64, dtype=torch.bfloat16, device=device)
    basic: Any = (group_offsets, None, out, 15, 329, False, False, False, True, False, False)
    scaled_jagged(A.data, A.scales, right.data, right.scales, *basic)
    assert_scaled_grouped_gemm_close(out, A, B, group_offsets)
    tiles = torch.tensor([[2, 0, 0], [0, 0, 64], [1, 64, 164]], dtype=torch.int32, device=device)
    for kernel, constants in ((fast_persistent, (128, False, False)), (promoted_persistent, (64, False, True, False))):
        out.fill_(torch.nan)
        kernel(A.data, A.scales, right.data, right.scales, tiles, tiles[0, 0], None, out, False, *constants)
        assert_scaled_grouped_gemm_close(out, A, B, group_offsets)


FORMS = {  # of scaled_grouped_mm: the shapes of mat_a and mat_b, and whether there are offs
    "grouped rows": ((75, 160), (3, 160, 48), True),
    "grouped columns": ((3, 40, 160), (160, 75), True),
    "grouped contraction": ((40, 75), (75, 48), True),
    "without offs": ((3, 40, 160), (3, 160, 48), False),
}


@pytest.mark.parametrize("ends", [[20, 20, 70], [60, -5, 90]], ids=str)
@pytest.mark.parametrize(
    ("format", "form"),
    [*(("rowwise", form) for form in FORMS), ("block", "grouped rows"), ("block", "without offs")],
)
def test_scaled_grouped_mm(format: str, form: str, ends: list[int], device: str) -> None:
    """All forms that it has; the groups have other scales where the contraction is grouped."""
    shape_a, shape_b, has_offs = FORMS[form]
    rowwise = format == "rowwise"
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).to(device) for shape in (shape_a, shape_b))
    offs = torch.tensor(ends, dtype=torch.int32, device=device) if has_offs else None
    A, B = quantize(a, FORMATS[format][0]), quantize(b.mT, FORMATS[format][1]).mT
    scales = [A.scales[..., 0], B.scales[..., 0, :]] if rowwise else [A.scales, B.scales]
    if form == "grouped contraction":
        scales = [torch.cat([x, x / 2, x * 3]) for x in scales]
    recipes = RECIPES_OF[format]
    call: Any = (A.data, B.data, scales[0], recipes[0], scales[1], recipes[1])
    plain = reference.scaled_grouped_mm(*call, offs=offs)
    exact = reference.scaled_grouped_mm(*call, offs=offs, output_dtype=torch.float32).double()
    assert_within_budget(scaled_grouped_mm(*call, offs=offs), plain, exact)


@pytest.mark.gpu
@kernels
def test_graphs_replay_with_other_offsets(kernel: tuple[str, str, bool]) -> None:
    A, B, group_offsets = operands([100, 0, 200], 256, 512, kernel[0], "cuda")
    product(kernel, A, B, group_offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = product(kernel, A, B, group_offsets)
    for values in ([0, 0, 300, 300], [10, 50, 60, 290], [0, 100, 100, 300]):
        group_offsets.copy_(torch.tensor(values))
        graph.replay()
        assert_scaled_grouped_gemm_close(out, A, B, group_offsets)


@pytest.mark.gpu
@pytest.mark.parametrize("form", [form for form, (_, _, has_offs) in FORMS.items() if has_offs])
def test_graphs_of_scaled_grouped_mm_replay_with_other_offsets(form: str) -> None:
    shape_a, shape_b, _ = FORMS[form]
    A, B = quantize(torch.randn(shape_a, device="cuda"), "rowwise"), quantize(torch.randn(shape_b).mT.cuda(), "rowwise")
    scales = A.scales[..., 0], B.scales[..., 0]
    if form == "grouped contraction":
        scales = torch.cat([scales[0]] * 3), torch.cat([scales[1]] * 3)
    offs = torch.tensor([20, 20, 70], dtype=torch.int32, device="cuda")
    call: Any = (A.data, B.data.mT, scales[0], RECIPES.RowWise, scales[1], RECIPES.RowWise)
    scaled_grouped_mm(*call, offs=offs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = scaled_grouped_mm(*call, offs=offs)
    for ends in ([0, 0, 75], [60, -5, 90], [20, 30, 40]):
        offs.copy_(torch.tensor(ends))
        graph.replay()
        assert torch.equal(out, scaled_grouped_mm(*call, offs=offs))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [KERNELS[i] for i in (0, 3, 4, 5)], ids=str)
@pytest.mark.parametrize(
    ("M", "N", "K", "G"),
    [
        (256, 4096, 1024, 520),  # B of 2.2e9 elements
        (256, 4095, 1027, 520),  # the same without TMA
        (600_000, 4096, 64, 4),  # out of 2.5e9 elements
        (2_200_000, 32, 1024, 4),  # A of 2.3e9 elements
        (2_200_000, 32, 1027, 4),
    ],
)
def test_more_than_2_to_the_31_elements(
    kernel: tuple[str, str, bool], M: int, N: int, K: int, G: int, device: str
) -> None:
    """The last rows, and one in the middle."""
    torch.use_deterministic_algorithms(False)  # filling these tensors with NaN takes long
    left, right = FORMATS[kernel[0]]
    A = quantize(torch.empty(M, K, dtype=torch.bfloat16, device=device).normal_(), left)
    B = quantize(torch.empty(G, N, K, dtype=torch.bfloat16, device=device).normal_(std=K**-0.5), right).mT
    sizes = torch.full((G,), M // G if M > G else 0, device=device)
    sizes[-1] += M - sizes.sum()
    group_offsets = group_offsets_from_sizes(sizes)
    out = product(kernel, A, B, group_offsets)
    middle = int((group_offsets <= M // 2).sum()) - 1
    for start, end, g in ((M - 128, M, G - 1), (M // 2, M // 2 + 1, middle)):
        rows = A._replace(data=A.data[start:end], scales=A.scales[start:end])
        weight = B._replace(data=B.data[g : g + 1], scales=B.scales[g : g + 1])
        one_group = torch.tensor([0, end - start], device=device)
        assert_scaled_grouped_gemm_close(out[start:end], rows, weight, one_group)


@pytest.mark.parametrize("variant", ["basic", "persistent"])
def test_one_plan_for_all_numbers_of_rows_of_a_class(
    variant: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the strides of scales depend on the number of rows where these lie next to each other in memory."""
    seen: set[Any] = set()
    call = cache.call

    def noting(operator: Any, tensors: Any, options: Any) -> Any:
        seen.add(signature(operator, tensors, options))
        return call(operator, tensors, options)

    for rows in (70, 75):
        A, B, group_offsets = operands([rows, rows], 48, 160, "block", device)
        assert A.scales.stride() == (1, 2 * rows)
        with monkeypatch.context() as patch:
            patch.setattr(cache, "call", noting)
            out = grouped_gemm(A, B, group_offsets, variant=variant)
        assert_scaled_grouped_gemm_close(out, A, B, group_offsets)
    assert len(seen) == 1
