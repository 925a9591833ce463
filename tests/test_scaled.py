"""Products of fp8 operands with scales in plain PyTorch: refused arguments, and results against float64."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch

from moe_kernels import (
    ScaledTensor,
    group_offsets_from_sizes,
    grouped_gemm,
    moe_mlp,
    quantize,
    reference,
    scaled_grouped_mm,
)
from moe_kernels.ops import scaled as operators
from moe_kernels.ops.scaled import flattened
from moe_kernels.runtime import cache, targets
from moe_kernels.testing import assert_scaled_grouped_gemm_close, assert_within_budget

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPES: Any = torch.nn.functional.ScalingType  # type: ignore[attr-defined]
SWIZZLES: Any = torch.nn.functional.SwizzleType  # type: ignore[attr-defined]
M, G, K, N = 12, 3, 200, 136
FORMATS = {"rowwise": ("rowwise", "rowwise"), "block": ("1x128", "128x128")}
formats = pytest.mark.parametrize("format", FORMATS)


def operands(format: str, dtype: torch.dtype = E4M3) -> tuple[ScaledTensor, ScaledTensor, torch.Tensor]:
    torch.manual_seed(0)
    left, right = FORMATS[format]
    A, W = quantize(torch.randn(M, K), left, dtype=dtype), quantize(torch.randn(G, N, K) * K**-0.5, right)
    return A, W.mT, group_offsets_from_sizes(torch.tensor([4, 0, 6]))


def test_no_gradients_of_a_traced_product() -> None:
    A, B, group_offsets = operands("rowwise")

    class Product(torch.nn.Module):
        def forward(self, scales: torch.Tensor) -> torch.Tensor:
            return grouped_gemm(A._replace(scales=scales), B, group_offsets)

    exported = torch.export.export(Product(), (A.scales,))
    with pytest.raises(RuntimeError, match=r"grouped_gemm of fp8 operands has no gradients: .* torch\.no_grad\(\)"):
        exported.module()(A.scales.requires_grad_()).sum().backward()


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_rows_whose_number_depends_on_values() -> None:
    """The product compiles and exports, with scales stored column by column."""
    _, B, _ = operands("block")
    x, mask, group_offsets = torch.randn(M, K), torch.arange(M) % 3 > 0, torch.tensor([0, 3, 3, 8])

    class Product(torch.nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return grouped_gemm(quantize(x[mask.nonzero().squeeze(1)], "1x128"), B, group_offsets)

    right = Product()(x, mask)
    assert right.shape == (8, N) and right.any()
    assert torch.equal(torch.compile(Product(), fullgraph=True, backend="aot_eager")(x, mask), right)
    for strict in (False, True):
        assert torch.equal(torch.export.export(Product(), (x, mask), strict=strict).module()(x, mask), right)


def test_scales_that_are_no_plain_tensors() -> None:
    A, B, group_offsets = operands("block")
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for scales, text in ((ragged, "got a nested one"), ([1.0], "got list"), (None, "got NoneType")):
        with pytest.raises(TypeError, match=f"^A_packed.scales: .*{text}"):
            grouped_gemm(A._replace(scales=scales), B, group_offsets)


@formats
def test_values(format: str) -> None:
    """Quantised data times their scales equal the original values, up to rounding."""
    x = torch.randn(300, 200)
    for kind in FORMATS[format]:
        values = reference.dequantize(quantize(x, kind))
        assert ((values - x).abs() <= x.abs() / 16 + x.abs().amax() / 2**15).all()
        if kind != "1x128":  # for activations only
            assert torch.equal(reference.dequantize(quantize(x, kind).mT), values.mT)


@formats
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("out_dtype", [None, torch.float16, torch.float32], ids=str)
def test_results(format: str, dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
    A, B, group_offsets = operands(format, dtype)
    out = grouped_gemm(A, B, group_offsets, out_dtype=out_dtype)
    assert out.dtype == (out_dtype or torch.bfloat16)
    assert_scaled_grouped_gemm_close(out, A, B, group_offsets)
    for broken in (torch.zeros_like(out), out.roll(1, 0), torch.cat((out, torch.zeros_like(out[:1])))):
        with pytest.raises(AssertionError):
            assert_scaled_grouped_gemm_close(broken, A, B, group_offsets)


@formats
def test_a_shared_weight(format: str) -> None:
    A, B, group_offsets = operands(format)
    shared = B._replace(data=B.data[0], scales=B.scales[0])
    out = grouped_gemm(A, shared, group_offsets, variant="basic")
    assert_scaled_grouped_gemm_close(out, A, shared, group_offsets)


@formats
def test_nothing_outside_of_groups(format: str) -> None:
    """Not even NaN scales have an effect there."""
    A, B, group_offsets = operands(format)
    scales = A.scales.clone()
    scales[10:] = torch.nan
    assert not grouped_gemm(A._replace(scales=scales), B, group_offsets)[10:].any()


def test_meta_tensors() -> None:
    A, B, group_offsets = operands("rowwise")
    to_meta = [x._replace(data=x.data.to("meta"), scales=x.scales.to("meta")) for x in (A, B)]
    out = grouped_gemm(*to_meta, group_offsets.to("meta"))
    assert (out.shape, out.dtype, out.is_meta) == ((M, N), torch.bfloat16, True)


@formats
def test_autocast_changes_nothing(format: str) -> None:
    A, B, group_offsets = operands(format)
    out = grouped_gemm(A, B, group_offsets, out_dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(grouped_gemm(A, B, group_offsets, out_dtype=torch.float32), out)


@formats
def test_compiled(format: str) -> None:
    A, B, group_offsets = operands(format)
    compiled = torch.compile(grouped_gemm, fullgraph=True, backend="eager")
    assert torch.equal(compiled(A, B, group_offsets), grouped_gemm(A, B, group_offsets))


def test_operator() -> None:
    A, B, group_offsets = operands("block")
    arguments = (A.data, A.scales, B.data, B.scales, group_offsets, None, torch.bfloat16, "auto", False)
    # PyTorch's schema check multiplies the arguments, which is not possible in fp8.
    utils = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.moe_kernels.scaled_grouped_gemm.default, arguments, test_utils=utils)
    scales = torch.ones(G, K), torch.ones(G, 5)
    arguments = (A.data, scales[0], torch.ones(M, 5).to(E5M2), scales[1], group_offsets, torch.bfloat16, True)
    torch.library.opcheck(torch.ops.moe_kernels.scaled_wgrad.default, arguments, test_utils=utils)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"A": torch.zeros(M, K)}, TypeError, "A_packed: expected a ScaledTensor, as for B, got Tensor"),
        ({"B": torch.zeros(G, K, N)}, TypeError, "B: expected a ScaledTensor, as for A_packed, got Tensor"),
        ({"A.data": torch.zeros(M, K)}, TypeError, "A_packed.data: expected float8_e4m3fn or float8_e5m2, got"),
        ({"B.scales": torch.ones(G, 1, N).half()}, TypeError, "B.scales: expected float32, got torch.float16"),
        ({"A.scales": torch.ones(M)}, ValueError, "A_packed.scales: expected shape [M, 1] = [12, 1], got [12]"),
        ({"A.scales": torch.ones(M, 2)}, ValueError, "A_packed.scales: expected shape [M, 1] = [12, 1], got [12, 2]"),
        ({"B.scales": torch.ones(G, N, 1)}, ValueError, "[G, 1, N] = [3, 1, 136], got [3, 136, 1]; pass B.scales.mT"),
        ({"A.format": "1x128"}, ValueError, "or '1x128' and '128x128', got '1x128' and 'rowwise'"),
        ({"A.data": torch.zeros(M, 64).to(E4M3)}, ValueError, "B: expected K = 64 as in A_packed [12, 64]"),
        ({"offsets": torch.zeros(G, dtype=torch.int32)}, ValueError, "group_offsets: expected length G + 1 = 4"),
        ({"B.data": torch.zeros(G, 2, K, N).to(E4M3)}, ValueError, "B: expected shape [K, N] or [G, K, N]"),
        ({"out_dtype": torch.float64}, TypeError, "out_dtype: expected bfloat16, float16 or float32, got"),
        ({"variant": "tails"}, ValueError, 'variant: expected "auto"'),
        ({"B.scales": torch.ones(G, 1, N, requires_grad=True)}, RuntimeError, "have no gradients"),
        ({"B.scales": torch.ones(G, 1, N, device="meta")}, ValueError, "B.scales: expected on cpu with B.data"),
        (
            {
                "A.data": torch.zeros(M, K, device="meta", dtype=E4M3),
                "A.scales": torch.ones(M, 1, device="meta"),
                "offsets": torch.zeros(G + 1, dtype=torch.int32, device="meta"),
            },
            ValueError,
            "B: expected on meta with A_packed, got on cpu",
        ),
    ],
)
def test_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    A, B, group_offsets = operands("rowwise")
    given: dict[str, Any] = {"A": A, "B": B}
    options: dict[str, Any] = {}
    for name, value in changes.items():
        operand, _, part = name.partition(".")
        if part:
            given[operand] = given[operand]._replace(**{part: value})
        elif name == "offsets":
            group_offsets = value
        else:
            (given if name in given else options)[name] = value
    with pytest.raises(error, match=re.escape(message)):
        grouped_gemm(given["A"], given["B"], group_offsets, **options)


def test_no_tangents() -> None:
    A, B, group_offsets = operands("rowwise")
    with pytest.raises(RuntimeError, match=r"no forward-mode derivatives, but .* has a tangent: multiply what"):
        torch.func.jvp(lambda s: grouped_gemm(A._replace(scales=s), B, group_offsets), (A.scales,), (A.scales,))


def test_constants_in_forward_mode() -> None:
    """Operators run below autograd, where tensors cannot be asked for a tangent."""
    A, B, group_offsets = operands("rowwise")
    x = torch.ones(3)
    expected = grouped_gemm(A, B, group_offsets)
    value, tangent = torch.func.jvp(lambda x: grouped_gemm(A, B, group_offsets) * x.sum(), (x,), (x,))
    assert expected.any() and torch.equal(value, 3 * expected) and torch.equal(tangent, value)


def test_fast_accumulation_is_for_rowwise_operands() -> None:
    A, B, group_offsets = operands("block")
    with pytest.raises(ValueError, match="fast_accumulation: expected False for '1x128' and '128x128'"):
        grouped_gemm(A, B, group_offsets, fast_accumulation=True)
    plain: Any = torch.ones(M, K), torch.ones(G, K, N), group_offsets
    with pytest.raises(ValueError, match=r"fast_accumulation: expected False for plain tensors.*, got True"):
        grouped_gemm(*plain, fast_accumulation=True)
    for wrong in (0, None, "x"):
        with pytest.raises(TypeError, match=f"fast_accumulation: expected True or False, got {wrong!r}"):
            grouped_gemm(*plain, fast_accumulation=wrong)  # type: ignore[arg-type]
    assert grouped_gemm(*operands("rowwise"), fast_accumulation=True).any()


def test_offsets_are_validated() -> None:
    A, B, _ = operands("rowwise")
    with pytest.raises(ValueError, match=re.escape("group_offsets[1]")):
        grouped_gemm(A, B, torch.tensor([0, -5, 3, 9]), validate=True)


@pytest.mark.parametrize("name", ["a100", "l40s"])
def test_gpus_without_fp8(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without e4m3 the error comes before compiling and gives advice; calls with e4m3, or e5m2 anywhere, compile."""
    from moe_kernels.runtime import compile as compiler

    class Compiled(Exception):
        pass

    def lower(*_: Any) -> None:
        raise Compiled

    A, B, group_offsets = operands("rowwise")
    hidden, ids, weights = torch.randn(M, 32), torch.zeros(M, 1, dtype=torch.int32), torch.ones(M, 1)
    experts = quantize(torch.randn(4, 32, 32), "128x128"), quantize(torch.randn(4, 32, 16), "128x128")
    recipes = A.data, B.data, A.scales[:, 0], RECIPES.RowWise, B.scales[:, 0], RECIPES.RowWise
    monkeypatch.setattr(operators, "use_kernels", lambda *_: True)
    monkeypatch.setattr(cache, "plans", cache.PlanCache())
    monkeypatch.setattr(cache.plans, "reads_store", False)
    monkeypatch.setattr(targets, "of_device", lambda kind, index: targets.KNOWN[name])
    monkeypatch.setattr(compiler, "lower", lower)
    too_old = r"need a GPU of compute capability 8\.9 or newer, and NVIDIA A100.* has 8\.0: multiply.*dequantize"
    expected, text = (RuntimeError, too_old) if name == "a100" else (Compiled, None)
    for call in (
        lambda: grouped_gemm(A, B, group_offsets),
        lambda: scaled_grouped_mm(*recipes, offs=group_offsets[1:]),
        lambda: moe_mlp(hidden, ids, weights, *experts),
        lambda: quantize(hidden, "rowwise"),
    ):
        with pytest.raises(expected, match=text):
            call()
    with pytest.raises(Compiled):
        quantize(hidden, "rowwise", dtype=E5M2)


def test_pytorchs_signature() -> None:
    theirs = inspect.signature(torch.nn.functional.scaled_grouped_mm).parameters  # type: ignore[attr-defined]
    for function in (scaled_grouped_mm, reference.scaled_grouped_mm):
        ours = inspect.signature(function).parameters
        assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]


functions = pytest.mark.parametrize("function", [scaled_grouped_mm, reference.scaled_grouped_mm], ids=["ours", "twin"])


def exact(x: ScaledTensor) -> torch.Tensor:
    return reference.dequantize(x).double()


def check(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Compare one group with its product in float64."""
    expected = left @ right
    plain = (left.float() @ right.float()).to(out.dtype)
    assert_within_budget(out, plain, expected, scale=(left.abs() @ right.abs()).amax().item())


@formats
@functions
def test_grouped_rows(function: Any, format: str) -> None:
    A, B, group_offsets = operands(format)
    rowwise = format == "rowwise"
    recipes = (RECIPES.RowWise,) * 2 if rowwise else (RECIPES.BlockWise1x128, RECIPES.BlockWise128x128)
    scales = (A.scales[:, 0], B.scales[:, 0]) if rowwise else (A.scales, B.scales)
    bias = torch.randn(G, N)
    call = [A.data, B.data, scales[0], recipes[0], [scales[1]], [recipes[1]]]
    out = function(*call, bias=bias, offs=group_offsets[1:].int(), swizzle_a=SWIZZLES.NO_SWIZZLE)
    assert_scaled_grouped_gemm_close(out, A, B, group_offsets, bias)


@functions
def test_empty_operands(function: Any) -> None:
    a, b, ones, no_offs = torch.ones(M, K).to(E4M3), torch.ones(K, N).to(E4M3), torch.ones, torch.zeros(0).int()
    for mat_a, mat_b, scale_a, scale_b, shape in (
        (a, b.expand(0, K, N), ones(M), ones(0, N), (M, N)),
        (a.expand(0, M, K), b, ones(0, M), ones(N), (M, N)),
        (a, b, ones(0), ones(0), (0, M, N)),
        (a.expand(0, M, K), b.expand(0, K, N), ones(0, M), ones(0, N), (0, M, N)),
        (a[:0].expand(G, 0, K), b.expand(G, K, N), ones(G, 0), ones(G, N), (G, 0, N)),
    ):
        offs = None if mat_a.dim() == mat_b.dim() == 3 else no_offs
        out = function(mat_a, mat_b, scale_a, RECIPES.RowWise, scale_b, RECIPES.RowWise, offs=offs)
        assert (out.shape, out.dtype) == (shape, torch.bfloat16)
        assert not out.any()


@formats
@functions
def test_without_offs(function: Any, format: str) -> None:
    left, right = FORMATS[format]
    A, W = quantize(torch.randn(G, M, K), left), quantize(torch.randn(G, N, K) * K**-0.5, right)
    rowwise = format == "rowwise"
    recipes = (RECIPES.RowWise,) * 2 if rowwise else (RECIPES.BlockWise1x128, RECIPES.BlockWise128x128)
    scales = (A.scales[..., 0], W.scales[..., 0]) if rowwise else (A.scales, W.mT.scales)
    out = function(A.data, W.data.mT, scales[0], recipes[0], scales[1], recipes[1], output_dtype=torch.float32)
    assert out.shape == (G, M, N)
    assert function is not scaled_grouped_mm or not out._is_view()
    for g in range(G):
        check(out[g], exact(A)[g], exact(W)[g].mT)


@functions
def test_grouped_columns(function: Any) -> None:
    A, W = (
        quantize(torch.randn(G, M, K), "rowwise"),
        quantize(torch.randn(N, K) * K**-0.5, "rowwise"),
    )
    offs = torch.tensor([50, 50, 130], dtype=torch.int32)
    out = function(A.data, W.data.T, A.scales[..., 0], RECIPES.RowWise, W.scales[:, 0], RECIPES.RowWise, offs=offs)
    assert (out.shape, out.dtype) == ((M, N), torch.bfloat16)
    check(out[:, :50], exact(A)[0], exact(W)[:50].T)
    check(out[:, 50:130], exact(A)[2], exact(W)[50:130].T)
    assert not out[:, 130:].any()


@functions
def test_grouped_contraction(function: Any) -> None:
    """The result of an empty group is zero even where its scales are NaN."""
    sizes = [64, 0, 130]
    generator = torch.Generator().manual_seed(0)
    lefts = [quantize(torch.randn(M, k, generator=generator), "rowwise") for k in (64, 1, 130)]
    rights = [quantize(torch.randn(N, k, generator=generator), "rowwise", dtype=E5M2) for k in (64, 1, 130)]
    a = torch.cat([x.data.float()[:, :k] for x, k in zip(lefts, sizes, strict=True)], 1).to(E4M3)
    b = torch.cat([x.data.float()[:, :k] for x, k in zip(rights, sizes, strict=True)], 1).to(E5M2)
    scale_a, scale_b = (torch.cat([x.scales[:, 0] for x in xs]) for xs in (lefts, rights))
    scale_a[M : 2 * M] = torch.nan
    offs = torch.tensor(sizes).cumsum(0).int()
    out = function(a, b.T, scale_a, RECIPES.RowWise, scale_b, RECIPES.RowWise, offs=offs, output_dtype=torch.float32)
    assert out.shape == (G, M, N)
    for g in (0, 2):
        check(out[g], exact(lefts[g]), exact(rights[g]).T)
    assert not out[1].any()
    for ends in ([64, 10, 194], [64, -5, 999]):  # taken as cummax, and clamped
        scales = scale_a, RECIPES.RowWise, scale_b, RECIPES.RowWise
        same = function(a, b.T, *scales, offs=torch.tensor(ends).int(), output_dtype=torch.float32)
        assert torch.equal(same, out)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"scale_recipe_a": RECIPES.BlockWise1x32}, ValueError, "expected RowWise and RowWise, or BlockWise1x128 and"),
        ({"scale_recipe_b": RECIPES.TensorWise}, ValueError, "got RowWise and TensorWise"),
        ({"swizzle_a": SWIZZLES.SWIZZLE_32_4_4}, ValueError, "swizzle_a: expected None or NO_SWIZZLE"),
        ({"swizzle_b": torch.ones(G, N)}, ValueError, "swizzle_b: expected None or NO_SWIZZLE, got Tensor"),
        ({"scale_a": torch.ones(M, 1)}, ValueError, "scale_a: expected shape [M] = [12], got [12, 1]"),
        ({"scale_b": [torch.ones(G, N)] * 2}, ValueError, "scale_b: expected one, got 2"),
        ({"scale_b": torch.ones(G, N).double()}, TypeError, "scale_b: expected float32, got torch.float64"),
        ({"mat_a": torch.ones(M, K)}, TypeError, "mat_a: expected float8_e4m3fn or float8_e5m2, got torch.float32"),
        ({"contraction_dim": (0, 1)}, ValueError, "contraction_dim: expected (-1, -2), got (0, 1)"),
        ({"contraction_dim": (-1,)}, ValueError, "contraction_dim: expected (-1, -2), got (-1,)"),
        ({"contraction_dim": -1}, TypeError, "contraction_dim: expected a list or tuple of ints, got -1"),
        ({"contraction_dim": [True, True]}, TypeError, "contraction_dim: expected a list or tuple of ints, got [True"),
        ({"offs": None}, ValueError, "offs: expected the groups' ends"),
        ({"bias": torch.ones(G, N).double()}, TypeError, "bias: expected bfloat16, float16 or float32, got"),
        ({"bias": 0.0}, TypeError, "bias: expected a torch.Tensor, got float"),
        (
            {"bias": torch.zeros(G, N, device="meta")},
            ValueError,
            "bias: expected on cpu with the operands, got on meta",
        ),
        (
            {"bias": torch.zeros(G, N, requires_grad=True)},
            RuntimeError,
            "an operand, its scales or the bias requires grad",
        ),
        ({"output_dtype": torch.float64}, TypeError, "output_dtype: expected bfloat16, float16 or float32, got"),
        (
            {
                "scale_recipe_a": RECIPES.BlockWise1x128,
                "scale_recipe_b": RECIPES.BlockWise128x128,
                "use_fast_accum": True,
            },
            ValueError,
            "use_fast_accum: expected False for BlockWise recipes",
        ),
    ],
)
def test_refused_by_scaled_grouped_mm(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    A, B, group_offsets = operands("rowwise")
    given = {
        "mat_a": A.data,
        "mat_b": B.data,
        "scale_a": A.scales[:, 0],
        "scale_recipe_a": RECIPES.RowWise,
        "scale_b": B.scales[:, 0],
        "scale_recipe_b": RECIPES.RowWise,
        "offs": group_offsets[1:],
    }
    with pytest.raises(error, match=re.escape(message)):
        scaled_grouped_mm(**(given | changes))


def test_blocks_with_a_2d_mat_b_are_refused() -> None:
    a, b = torch.zeros(M, K).to(E4M3), torch.zeros(K, N).to(E4M3)
    recipes = RECIPES.BlockWise1x128, RECIPES.BlockWise128x128
    with pytest.raises(ValueError, match="expected RowWise for a 2-D mat_b"):
        scaled_grouped_mm(a, b, torch.ones(M, 2), recipes[0], torch.ones(2, 2), recipes[1], offs=torch.tensor([5]))


@pytest.mark.parametrize(("K", "strides"), [(96, (1, 1)), (128, (1, 1)), (200, (1,))])
def test_strides_of_block_scales_do_not_depend_on_the_rows(K: int, strides: tuple[int, ...]) -> None:
    """Otherwise each number of rows would have a plan of its own."""
    for M in (5, 8):
        x = quantize(torch.randn(M, K), "1x128")
        found = flattened(x.scales, x.data)
        assert found.stride() == strides and torch.equal(found.flatten(), x.scales.mT.flatten())
