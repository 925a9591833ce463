"""Meta tensors in eager mode: every public function returns what it returns on a CPU, except for the values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_kernels
from moe_kernels import (
    MoE,
    Routing,
    checks,
    dequantize,
    group_offsets_from_offs,
    group_offsets_from_sizes,
    group_sizes,
    grouped_gemm,
    grouped_gemm_jagged,
    grouped_gemm_jagged_persistent,
    grouped_gemm_wgrad,
    grouped_mm,
    moe_mlp,
    offs_from_group_offsets,
    pack_groups,
    permute,
    plan_varied_grouped_gemm,
    quantize,
    quantize_weight,
    route,
    scaled_grouped_mm,
    swiglu_ffn,
    topk_sigmoid,
    topk_softmax,
    uniform_grouped_gemm,
    unpack_groups,
    unpermute,
    varied_grouped_gemm,
)

G, K, N, M, T, TOP_K = 3, 4, 6, 7, 5, 2
OFFSETS = torch.tensor([0, 2, 2, 6])
IDS = torch.tensor([[0, 2], [1, 1], [2, 0], [0, 1], [2, 2]])
ROWWISE: Any = torch.nn.functional.ScalingType.RowWise  # type: ignore[attr-defined]
NO_TENSORS = {"LayerShape", "MoE", "QuantizedWeight", "Routing", "ScaledTensor", "compile_ahead", "quantize_once"}
NO_TENSORS |= {"unpack_groups", "varied_schedule"}

Case = tuple[Callable[..., Any], tuple[Any, ...]]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype)


def cases() -> dict[str, Case]:
    A, B, bias = randn(M, K), randn(G, K, N), randn(G, N)
    ids, topk_weights, hidden = IDS, randn(T, TOP_K), randn(T, K)
    w_gate_up, w_down = randn(G, 2 * N, K), randn(G, K, N)
    routing = route(ids, topk_weights, G)
    rows, columns = quantize(A, "rowwise"), quantize(B.mT, "rowwise")
    pairs = [randn(2, 3), randn(0, 2)], [randn(3, 4), randn(2, 5)]

    def written(*arguments: Any) -> list[Tensor]:
        group_A, group_B = arguments
        out = [a.new_empty(a.size(0), b.size(1)) for a, b in zip(group_A, group_B, strict=True)]
        with torch.no_grad():
            assert varied_grouped_gemm(group_A, group_B, out=out)[0] is out[0]
            assert plan_varied_grouped_gemm(group_A, group_B, out=out)()[1] is out[1]
        return out

    return {
        "grouped_gemm": (grouped_gemm, (A, B, OFFSETS)),
        "grouped_gemm, shared, strided": (grouped_gemm, (randn(K, M).T, randn(N, K).T, OFFSETS)),
        "grouped_gemm, two dtypes": (grouped_gemm, (A, B.half(), OFFSETS)),
        "grouped_gemm, validated": (lambda *x: grouped_gemm(*x, validate=True), (A, B, OFFSETS)),
        "grouped_gemm_jagged": (grouped_gemm_jagged, (A, B, OFFSETS)),
        "grouped_gemm_jagged_persistent": (grouped_gemm_jagged_persistent, (A, B, OFFSETS)),
        "grouped_gemm_wgrad": (grouped_gemm_wgrad, (A, randn(M, N), OFFSETS)),
        "grouped_mm": (lambda a, b, o, bias: grouped_mm(a, b, offs=o, bias=bias), (A, B, OFFSETS[1:].int(), bias)),
        "grouped_mm, 2-D x 2-D": (lambda a, b, o: grouped_mm(a, b, offs=o), (randn(3, M), A, OFFSETS[1:])),
        "grouped_mm, 3-D x 2-D": (lambda a, b, o: grouped_mm(a, b, offs=o), (randn(G, 2, K), A.T, OFFSETS[1:])),
        "grouped_mm, 3-D x 3-D": (grouped_mm, (randn(G, 2, K), B)),
        "scaled_grouped_mm": (
            lambda *x: scaled_grouped_mm(*(y.detach() for y in x[:3]), ROWWISE, x[3].detach(), ROWWISE, offs=x[4]),
            (rows.data, columns.data.mT, rows.scales.flatten(), columns.scales.flatten(1), OFFSETS[1:].int()),
        ),
        "scaled_grouped_mm, 2-D x 2-D": (
            lambda *x: scaled_grouped_mm(*(y.detach() for y in x[:3]), ROWWISE, x[3].detach(), ROWWISE, offs=x[4]),
            (rows.data.T, rows.data, torch.ones(G * K), torch.ones(G * K), OFFSETS[1:].int()),
        ),
        "uniform_grouped_gemm": (lambda a, b: uniform_grouped_gemm(a, b, G), (randn(G, 2, K), B)),
        "uniform_grouped_gemm, flat": (lambda a, b: uniform_grouped_gemm(a, b, G), (randn(G * 2, K), B)),
        "varied_grouped_gemm": (varied_grouped_gemm, pairs),
        "varied_grouped_gemm, out": (written, pairs),
        "plan_varied_grouped_gemm": (lambda a, b: plan_varied_grouped_gemm(a, b)(), pairs),
        "route": (lambda i, w: route(i, w, G, validate=True), (ids, topk_weights)),
        "permute": (lambda x, *r: permute(x, Routing(*r)), (hidden, *routing)),
        "unpermute": (lambda x, *r: unpermute(x, Routing(*r)), (randn(T * TOP_K, K), *routing)),
        "topk_softmax": (lambda x: topk_softmax(x, TOP_K, renormalize=True), (randn(T, 8),)),
        "topk_sigmoid": (
            lambda x, b: topk_sigmoid(x, TOP_K, renormalize=True, bias=b, num_groups=4, top_groups=2),
            (randn(T, 8), randn(8)),
        ),
        "quantize": (lambda x: quantize(x, "1x128")[:2], (randn(M, 130),)),
        "quantize, weights": (lambda x: quantize(x.mT, "128x128", dtype=torch.float8_e5m2)[:2], (randn(G, 130, 3),)),
        "quantize_weight": (lambda x: [y for part in quantize_weight(x, "fp8_block")[1:] for y in part[:2]], (B,)),
        "quantize_weight, rows": (lambda x: quantize_weight(x, "fp8_rowwise").backward[:2], (B.mT,)),
        "dequantize": (lambda x: dequantize(quantize(x, "rowwise"), torch.float16), (randn(M, K),)),
        "swiglu_ffn": (swiglu_ffn, (A, w_gate_up, OFFSETS)),
        "swiglu_ffn, two weights": (
            lambda a, w, o, up, b: swiglu_ffn(a, w, o, w_up=up, gate_up_bias=b, up_bias=b, activation="gelu"),
            (A, randn(G, N, K), OFFSETS, randn(G, N, K), bias),
        ),
        "moe_mlp": (lambda *x: moe_mlp(*x, validate=True), (hidden, ids, topk_weights, w_gate_up, w_down)),
        "moe_mlp, transposed": (
            lambda *x: moe_mlp(*x[:5], transposed=True, interleaved=True, activation="clamped_swiglu", down_bias=x[5]),
            (hidden, ids, topk_weights, w_gate_up.mT.contiguous(), w_down.mT.contiguous(), randn(G, K)),
        ),
        "moe_mlp, one token": (moe_mlp, (hidden[:1], ids[:1], topk_weights[:1], w_gate_up, w_down)),
        "moe_mlp, two dtypes": (moe_mlp, (hidden, ids, topk_weights, w_gate_up.double(), w_down.double())),
        "pack_groups": (lambda *x: pack_groups(x), (randn(2, 3), randn(0, 3))),
        "group_offsets_from_offs": (group_offsets_from_offs, (OFFSETS,)),
        "group_offsets_from_sizes": (group_offsets_from_sizes, (OFFSETS,)),
        "group_sizes": (group_sizes, (OFFSETS,)),
        "offs_from_group_offsets": (offs_from_group_offsets, (OFFSETS,)),
    }


def flat(values: Any) -> list[Tensor]:
    return [values] if isinstance(values, Tensor) else [one for value in values for one in flat(value)]


def moved(values: Any, device: str, grad: bool) -> Any:
    """Return tensors with the same strides on the device."""
    if isinstance(values, Tensor):
        copy = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device=device)
        if device == "cpu":
            copy.copy_(values)
        return copy.requires_grad_(grad and values.is_floating_point())
    return type(values)(moved(value, device, grad) for value in values)


def looks(tensors: list[Tensor]) -> list[Any]:
    return [(x.shape, x.stride(), x.dtype, x.requires_grad) for x in tensors]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", cases())
def test_looks_as_on_a_cpu(name: str, grad: bool) -> None:
    function, arguments = cases()[name]
    seen = []
    for device in ("cpu", "meta"):
        inputs = moved(arguments, device, grad)
        results = flat(function(*inputs))
        assert all(x.device.type == device for x in results)
        looked = looks(results)
        given, recorded = [x for x in flat(inputs) if x.requires_grad], [y for y in results if y.requires_grad]
        if recorded:
            found = torch.autograd.grad(recorded, given, [torch.ones_like(y) for y in recorded], allow_unused=True)
            looked += [None if d is None else looks([d])[0] for d in found]
            assert all(d is None or d.device.type == device for d in found)
        seen.append(looked)
    assert seen[0] == seen[1]


def test_no_function_is_left_out() -> None:
    assert {name.partition(",")[0] for name in cases()} == set(moe_kernels.__all__) - NO_TENSORS


@pytest.mark.parametrize("shape", [(T, K), (2, T, K)])
def test_the_module(shape: tuple[int, ...]) -> None:
    layer = MoE(K, N, G, TOP_K, renormalize=True, device="meta")
    hidden = torch.empty(shape, device="meta", requires_grad=True)
    out = layer(hidden)
    assert out.is_meta and out.shape == shape
    out.sum().backward()
    assert hidden.grad is not None and hidden.grad.shape == shape
    assert all(w.grad is not None and w.grad.is_meta and w.grad.shape == w.shape for w in layer.parameters())


def test_gradients_of_gradients() -> None:
    hidden, topk_weights, w_gate_up, w_down = (
        torch.empty(shape, device="meta", requires_grad=True)
        for shape in ((T, K), (T, TOP_K), (G, 2 * N, K), (G, K, N))
    )
    out = moe_mlp(hidden, IDS.to("meta"), topk_weights, w_gate_up, w_down)
    (first,) = torch.autograd.grad(out.sum(), hidden, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), w_down)
    assert first.shape == hidden.shape and second.shape == w_down.shape and second.is_meta


def test_what_needs_values_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^group_offsets: expected values, which the groups' shapes depend on, got a"):
        unpack_groups(torch.empty(6, 2, device="meta"), OFFSETS.to("meta"))
    monkeypatch.setattr(checks, "_VALIDATE", True)  # nothing to validate is no error
    assert MoE(K, N, G, TOP_K, renormalize=True, device="meta")(torch.empty(T, K, device="meta")).is_meta
