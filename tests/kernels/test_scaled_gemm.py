"""The kernels of fp8 products with scales, against float64 products of the dequantised operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_kernels import dequantize, group_offsets_from_sizes, grouped_gemm, ops, quantize, reference, scaled_grouped_mm
from moe_kernels.kernels import fast_persistent, promoted_persistent, scaled_jagged
from moe_kernels.kernels.inline import BY_REGION
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
# Options of a call: the format of its operands, variant, fast_accumulation.
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
gpu = pytest.mark.gpu


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
    """Return A `[M + outside, K]`, B `[G, K, N]` or `[K, N]`, and offsets for groups of these sizes."""
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


@pytest.mark.parametrize(("rows", "format"), [(20, "rowwise"), (200, "block")])
def test_calls_like_an_earlier_one_are_repeats(
    rows: int, format: str, device: str, repeats: Callable[[str], None]
) -> None:
    """Each call has new tensors, perhaps with other numbers of rows; other formats and options are not repeats."""

    def given(M: int) -> tuple[ScaledTensor, ScaledTensor, torch.Tensor]:
        return operands([M // 4 - 1, 0, M // 4 + 1, M - 2 * (M // 4)], 64, 200, format, device)

    for M in (4 * rows, 4 * rows, 4 * rows + 1, 4 * rows + 3):
        tensors = given(M)
        assert_scaled_grouped_gemm_close(grouped_gemm(*tensors), *tensors)
        repeats("scaled_grouped_gemm")
    assert len(cache.plans.recent["scaled_grouped_gemm"]) == 1
    for options in ({"out_dtype": torch.float32}, {"variant": "basic"}, {"validate": True}):
        with pytest.raises(AssertionError, match="no repeat"):
            grouped_gemm(*tensors, **options)
    with pytest.raises(TypeError, match="fast_accumulation: expected True or False, got 0"):
        grouped_gemm(*tensors, fast_accumulation=0)
    A, B, group_offsets = tensors
    with pytest.raises(ValueError, match="A_packed, B: expected the formats"):
        grouped_gemm(A._replace(format="128x128"), B, group_offsets)
    for scales in (A.scales.mT.flatten(), A.scales.contiguous().mT):  # as many, but flat or transposed
        with pytest.raises(ValueError, match=r"A_packed.scales: expected shape \[M, "):
            grouped_gemm(A._replace(scales=scales), B, group_offsets)


@kernels
@pytest.mark.parametrize(
    ("K", "N"),
    [(16, 48), (129, 130), (320, 201), (1, 3), *(pytest.param(*KN, marks=gpu) for KN in ((97, 130), (320, 200)))],
)
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
    """Gradients in e5m2, where an infinity stays in its group, and a result in float32."""
    A, B, group_offsets = operands([20, 0, 75], 48, 160, kernel[0], device, dtypes=(E5M2, E4M3))
    out = product(kernel, A, B, group_offsets, torch.float32)
    assert out.dtype == torch.float32
    assert_scaled_grouped_gemm_close(out, A, B, group_offsets)
    A.data.view(torch.uint8)[20:, ::3] = 0x7C
    again = product(kernel, A, B, group_offsets, torch.float32)
    assert torch.equal(again[:20], out[:20])
    assert not again[20:].isfinite().any()


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
    """NaN in data or scales of other groups' rows, other weights, or rows in no group; and infinite scales."""
    sizes = [30, 50, 9, 0]
    A, B, group_offsets = operands(sizes, 48, 160, kernel[0], device, outside=7)
    expected = product(kernel, A, B, group_offsets)
    for part, value in (("data", torch.nan), ("scales", torch.nan), ("scales", torch.inf)):
        left, right = (x._replace(data=x.data.clone(), scales=x.scales.clone()) for x in (A, B))
        wrong = torch.full((), value, device=device).to(getattr(A, part).dtype)
        for tensor, places in ((getattr(left, part), (slice(30, 80), slice(89, None))), (getattr(right, part), (1, 3))):
            for place in places:
                tensor[place] = wrong
        out = product(kernel, left, right, group_offsets)
        assert not out[30:80].isfinite().any()
        for rows in (slice(0, 30), slice(80, None)):
            assert torch.equal(out[rows], expected[rows])


@kernels
def test_layouts_and_repeats(kernel: tuple[str, str, bool], device: str) -> None:
    """Layouts that tensor cores do not take are copied, scales may have any strides, memory beside K is not read."""
    A, B, group_offsets = operands([20, 0, 45], 48, 160, kernel[0], device)
    expected = product(kernel, A, B, group_offsets)
    for _ in range(2 if device == "cpu" else 20):
        assert torch.equal(product(kernel, A, B, group_offsets), expected)
    by_columns = A.scales.mT.contiguous().mT
    left, right = (torch.cat([x, torch.full_like(x, torch.nan)], dim=-1)[..., :160] for x in (A.data, B.data.mT))
    out = product(kernel, A._replace(data=left), B._replace(data=right.mT), group_offsets)
    assert torch.equal(out, expected)
    every_second = torch.stack([A.data, A.data], dim=1)[:, 0]
    for data in (A.data.mT.contiguous().mT, every_second):
        out = product(kernel, A._replace(data=data, scales=by_columns), B, group_offsets)
        assert torch.equal(out, expected)
    for weight in (B.data.contiguous(), B.data.permute(2, 1, 0).contiguous().permute(2, 1, 0)):
        out = product(kernel, A, B._replace(data=weight, scales=B.scales.contiguous()), group_offsets)
        assert torch.equal(out, expected)


def pytorchs(A: ScaledTensor, B: ScaledTensor, format: str) -> tuple[Any, ...]:
    """Return the operands in the form that `scaled_grouped_mm` takes."""
    scales = (A.scales[..., 0], B.scales[..., 0, :]) if format == "rowwise" else (A.scales, B.scales)
    return A.data, B.data, scales[0], RECIPES_OF[format][0], scales[1], RECIPES_OF[format][1]


@pytest.mark.parametrize("kernel", [*KERNELS[:1], *KERNELS[2:]], ids=str)
def test_bias(kernel: tuple[str, str, bool], device: str) -> None:
    """It is added in float32, only to rows in groups, and may have another dtype than the result, and any strides."""
    format, variant, fast = kernel
    A, B, group_offsets = operands([20, 0, 75], 51, 160, format, device, outside=5)
    out_dtype = torch.float32 if format == "rowwise" else torch.bfloat16
    bias = torch.randn(51, 3, device=device).half().T
    if format == "block" and variant == "basic":
        bias = bias[1:2].expand(3, 51)

    def call(bias: torch.Tensor) -> torch.Tensor:
        operands = A.data, A.scales, B.data, B.scales, group_offsets
        made: torch.Tensor = ops.scaled_grouped_gemm(*operands, bias, out_dtype, variant, fast)
        return made

    out = call(bias)
    assert out.dtype == out_dtype
    assert_scaled_grouped_gemm_close(out, A, B, group_offsets, bias)
    assert not out[95:].any()
    if variant == "basic":
        options: dict[str, Any] = {"bias": bias, "offs": group_offsets[1:], "output_dtype": out_dtype}
        assert torch.equal(scaled_grouped_mm(*pytorchs(A, B, format), **options), out)
    if bias.stride(0):
        bias[1:] = torch.nan
        again = call(bias)
        assert torch.equal(again[:20], out[:20])
        assert again[20:95].isnan().all()
        assert not again[95:].any()


@pytest.mark.parametrize("kernel", [KERNELS[0], KERNELS[3], KERNELS[5]], ids=str)
def test_biases_of_groups_that_share_a_weight(kernel: tuple[str, str, bool], device: str) -> None:
    A, B, group_offsets = operands([3, 0, 4], 32, 48, kernel[0], device, shared=True)
    bias = torch.randn(3, 32, device=device)
    out = ops.scaled_grouped_gemm(
        A.data, A.scales, B.data, B.scales, group_offsets, bias, torch.float32, kernel[1], kernel[2]
    )
    assert_scaled_grouped_gemm_close(out, A, B, group_offsets, bias)


@pytest.mark.parametrize("format", ["rowwise", pytest.param("block", marks=gpu)])
def test_bias_alone(format: str, device: str) -> None:
    """The result without a contraction is the bias."""
    A, B, group_offsets = operands([4, 0, 3], 20, 0, format, device, outside=2)
    bias = torch.randn(3, 20, device=device)
    out = scaled_grouped_mm(*pytorchs(A, B, format), bias=bias, offs=group_offsets[1:], output_dtype=torch.float32)
    expected = torch.cat([bias[:1].expand(4, 20), bias[2:].expand(3, 20), bias.new_zeros(2, 20)])
    assert torch.equal(out, expected)


@pytest.mark.parametrize("kernel", [KERNELS[0], KERNELS[3], KERNELS[5]], ids=str)
@pytest.mark.parametrize(("M", "K", "N", "G"), [(0, 32, 16, 2), (8, 0, 16, 2), (8, 32, 0, 2), (8, 32, 16, 0)])
def test_nothing_to_multiply(kernel: tuple[str, str, bool], M: int, K: int, N: int, G: int, device: str) -> None:
    A, B = torch.zeros(M, K, dtype=E4M3, device=device), torch.zeros(G, K, N, dtype=E4M3, device=device)
    rowwise = kernel[0] == "rowwise"
    blocks = 1 if rowwise else -(-K // 128)
    left = ScaledTensor(A, torch.ones(M, blocks, device=device), FORMATS[kernel[0]][0])
    right = ScaledTensor(B, torch.ones(G, blocks, N if rowwise else -(-N // 128), device=device), FORMATS[kernel[0]][1])
    group_offsets = torch.tensor([0, M // 2, M][: G + 1], device=device)
    for out in (
        product(kernel, left, right, group_offsets),
        scaled_grouped_mm(*pytorchs(left, right, kernel[0]), offs=group_offsets[1:]),
    ):
        assert out.shape == (M, N)
        assert not out.any()


@pytest.mark.parametrize("rows", [3, 20, 50, 130])
@formats
def test_the_rule(format: str, rows: int, device: str) -> None:
    """Few and many rows per group, with the variant chosen by the rule."""
    A, B, group_offsets = operands([rows, 2 * rows], 48, 160, format, device)
    assert_scaled_grouped_gemm_close(grouped_gemm(A, B, group_offsets), A, B, group_offsets)


def test_kernels_called_directly(device: str) -> None:
    """They use their own configs."""
    if device == "cpu":
        pytest.skip("Helion launches no kernel on a CPU")
    A, B, group_offsets = operands([64, 100], 64, 128, "rowwise", device)
    right = B.mT
    out = torch.empty(164, 64, dtype=torch.bfloat16, device=device)
    basic: Any = (group_offsets, None, out, 15, BY_REGION, False, False, False, True, False)
    scaled_jagged(A.data, A.scales, right.data, right.scales, *basic)
    assert_scaled_grouped_gemm_close(out, A, B, group_offsets)
    tiles = torch.tensor([[2, 0, 0], [0, 0, 64], [1, 64, 164]], dtype=torch.int32, device=device)
    for kernel, constants in ((fast_persistent, (128, False, False)), (promoted_persistent, (64, False, True, False))):
        out.fill_(torch.nan)
        kernel(A.data, A.scales, right.data, right.scales, tiles, tiles[0, 0], None, out, False, *constants)
        assert_scaled_grouped_gemm_close(out, A, B, group_offsets)


FORMS = {  # forms of scaled_grouped_mm: shapes of mat_a and mat_b, and whether offs are given
    "grouped rows": ((75, 161), (3, 161, 51), True),
    "grouped columns": ((3, 40, 161), (161, 75), True),
    "grouped contraction": ((39, 75), (75, 51), True),
    "without offs": ((3, 39, 161), (3, 161, 51), False),
}


@pytest.mark.parametrize("ends", [[20, 20, 70], [60, -5, 90]], ids=str)
@pytest.mark.parametrize(
    ("format", "form"),
    [*(("rowwise", form) for form in FORMS), ("block", "grouped rows"), ("block", "without offs")],
)
def test_scaled_grouped_mm(format: str, form: str, ends: list[int], device: str) -> None:
    """All its forms, with any strides; if the contraction is grouped, the groups have different scales."""
    shape_a, shape_b, has_offs = FORMS[form]
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).to(device) for shape in (shape_a, shape_b))
    offs = torch.tensor(ends, dtype=torch.int32, device=device) if has_offs else None
    A, B = quantize(a, FORMATS[format][0]), quantize(b.mT, FORMATS[format][1]).mT
    call: Any = list(pytorchs(A, B, format))
    if form == "grouped contraction":
        call[2::2] = (torch.cat([x, x / 2, x * 3]) for x in call[2::2])
    if ends[0] > ends[1]:
        call[:2] = call[0].mT.contiguous().mT, call[1].contiguous()
        call[2::2] = (torch.stack([x, x], dim=-1)[..., 0] for x in call[2::2])
    plain = reference.scaled_grouped_mm(*call, offs=offs)
    exact = reference.scaled_grouped_mm(*call, offs=offs, output_dtype=torch.float32).double()
    assert_within_budget(scaled_grouped_mm(*call, offs=offs), plain, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_beside_pytorch(form: str, fast: bool, device: str) -> None:
    """PyTorch supports these sizes, too."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("PyTorch's kernels are for compute capability 9.0")
    M, N, K, G = 208, 256, 1024, 3
    total = 608  # rows, columns or contraction of all groups
    shape_a, shape_b = {
        "grouped rows": ((total, K), (G, N, K)),
        "grouped columns": ((G, M, K), (total, K)),
        "grouped contraction": ((M, total), (N, total)),
        "without offs": ((G, M, K), (G, N, K)),
    }[form]
    A, B = (quantize(torch.randn(shape, device=device), "rowwise") for shape in (shape_a, shape_b))
    call: Any = list(pytorchs(A, B.mT, "rowwise"))
    if form == "grouped contraction":
        call[2::2] = (torch.cat([x, x / 2, x * 3]) for x in call[2::2])
    offs = None if form == "without offs" else torch.tensor([160, 224, total], dtype=torch.int32, device=device)
    out = scaled_grouped_mm(*call, offs=offs, use_fast_accum=fast)
    theirs = torch._scaled_grouped_mm(*call[:3], call[4], offs, out_dtype=torch.bfloat16, use_fast_accum=fast)
    exact, terms = (
        reference.scaled_grouped_mm(*data, *call[2:], offs=offs, output_dtype=torch.float32).double()
        for data in (call[:2], [x.float().abs().to(E4M3) for x in call[:2]])
    )
    scale = terms.amax().item() * 2**-13 / torch.finfo(torch.float32).eps  # as in `testing`
    assert_within_budget(out, theirs, exact, scale=scale)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [KERNELS[i] for i in (2, 3, 5)], ids=str)
def test_sizes_of_models(kernel: tuple[str, str, bool], device: str) -> None:
    """The last blocks of K and N are half full."""
    A, B, group_offsets = operands([700, 0, 1300, 33], 2880, 2880, kernel[0], device)
    out = product(kernel, A, B, group_offsets)
    assert_scaled_grouped_gemm_close(out, A, B, group_offsets)
    for _ in range(5):
        assert torch.equal(product(kernel, A, B, group_offsets), out)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [KERNELS[i] for i in (2, 3, 5)], ids=str)
@pytest.mark.parametrize(("K", "N"), [(203, 136), (96, 200), (112, 24), (70, 331)])
def test_rows_of_any_length(kernel: tuple[str, str, bool], K: int, N: int, device: str) -> None:
    """With many rows, rows that are no multiple of 16 bytes are copied, and TMA reads blocks larger than K or N."""
    A, B, group_offsets = operands([700, 0, 900, 33], N, K, kernel[0], device)
    assert_scaled_grouped_gemm_close(product(kernel, A, B, group_offsets), A, B, group_offsets)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["basic", "persistent"])
@pytest.mark.parametrize("K", [7168, 14336])
def test_exact_sums_are_closer_than_fast_ones(K: int, variant: str, device: str) -> None:
    """Fast sums, in 14 bits, differ by over 2^-12 of the largest sum of magnitudes, exact ones by 2^-17."""
    A, B, group_offsets = operands([300, 0, 212], 256, K, "rowwise", device)
    left, right = dequantize(A).double(), dequantize(B).double()
    exact = reference.grouped_gemm(left, right, group_offsets)
    errors = [
        product(("rowwise", variant, fast), A, B, group_offsets, torch.float32).double() - exact
        for fast in (False, True)
    ]
    assert errors[0].norm() <= errors[1].norm() / 4
    terms = reference.grouped_gemm(left.abs(), right.abs(), group_offsets)
    assert errors[0].abs().amax() <= 2**-13 * terms.amax()


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
    """The last rows and one in the middle are compared."""
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
    """Strides of scales that are adjacent along the rows depend on the number of rows, but the plan does not."""
    seen: set[Any] = set()
    call = cache.call

    def noting(operator: Any, tensors: Any, options: Any) -> Any:
        seen.add(signature(operator, tensors, options))
        return call(operator, tensors, options)

    for rows in (70, 75):
        A, B, group_offsets = operands([rows, rows], 48, 160, "block", device)
        assert A.scales.stride() == (1, 2 * rows)
        with monkeypatch.context() as patch, cache.isolated():  # repeated calls do not look for a plan
            patch.setattr(cache, "call", noting)
            out = grouped_gemm(A, B, group_offsets, variant=variant)
        assert_scaled_grouped_gemm_close(out, A, B, group_offsets)
    assert len(seen) == 1
