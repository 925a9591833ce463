"""Layers with `compute`: results and gradients of the kernels, against their twins and against float64."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from training import COMPUTE, DIFFERENTIABLE, exactly, run

from moe_kernels import QuantizedWeight, moe_mlp, quantize, quantize_weight, reference, requirements
from moe_kernels.ops import activate_backward, quantized_grouped_gemm, quantized_moe_mlp
from moe_kernels.testing import make_experts, make_tokens

NAN, INF = float("nan"), float("inf")


def make(
    T: int,
    H: int,
    I: int,  # noqa: E741
    E: int,
    top_k: int,
    dtype: torch.dtype,
    device: str,
    bias: bool = False,
) -> dict[str, Any]:
    """Return arguments of `moe_mlp`: every 7th id is dropped, and no token picks the last expert."""
    hidden, topk_ids, topk_weights = make_tokens(T, H, E - 1, top_k, dtype=dtype, device=device)
    topk_ids.view(-1)[3::7] = E
    w_gate_up, w_down = make_experts(E, H, I, dtype=dtype, device=device)
    made = {"hidden": hidden, "topk_ids": topk_ids, "topk_weights": topk_weights.float()}
    made |= {"w_gate_up": w_gate_up, "w_down": w_down}
    if bias:
        made |= {
            "gate_up_bias": torch.randn(w_gate_up.shape[:2], device=device).to(dtype),
            "down_bias": torch.randn(E, H, device=device).to(dtype),
        }
    return made


def by_twins(
    arguments: dict[str, Any], d_out: Tensor, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> dict[str, Tensor]:
    """Return what `run` returns on a CPU, without kernels."""
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "0")
        return run({name: x.cpu() for name, x in arguments.items()}, d_out.cpu(), **options)


def assert_as_twins(
    arguments: dict[str, Any], d_out: Tensor, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> dict[str, Tensor]:
    """Assert errors against float64 of at most twice the twins': the largest, their norm, the median, and each row's.

    Hopper's tensor cores add products of fp8 in about 14 bits. So on a GPU an element of act may be rounded to the
    other of two fp8 numbers: this is up to 2^-4 of the element, which may be most of a token's result.
    """
    made = run(arguments, d_out, **options)
    twins = by_twins(arguments, d_out, monkeypatch, **options)
    right = exactly({name: x.cpu() for name, x in arguments.items()}, d_out.cpu(), **options)
    for name, x in made.items():
        slack = 1 if x.is_cuda else 2**-5
        exact = right[name].flatten(1)
        differences = [y.cpu().double().flatten(1) - exact for y in (x, twins[name])]
        largest, twins_largest, most = (y.abs().max() for y in (*differences, exact))
        assert largest <= 2 * twins_largest + slack * 2**-4 * most, f"{name}: error {largest}, twin's {twins_largest}"
        size, error, twins_error = (y.norm(dim=1) for y in (exact, *differences))
        budget = 2 * twins_error.norm() + slack * (2**-8 * size.norm() + 2**-4 * size.max())
        assert error.norm() <= budget, f"{name}: error {error.norm()}, budget {budget}"
        typical = 2 * twins_error.median() + slack * 2**-6 * size.median()
        assert error.median() <= typical, f"{name}: median error {error.median()}, budget {typical}"
        assert 0 < budget < size.norm() / 5, name  # a clamp's gradient jumps where rounding crosses the limit
        # One row per token, or per expert's weight.
        each = 2 * twins_error + slack * 0.15 * size + budget / 4
        assert (error <= each).all(), f"{name}: errors {error}, of {size}"
        assert x.stride() == twins[name].stride(), name
    return made


# One dtype and one size, so that tests share kernels: generating these takes most of the time.
SIZES: dict[str, Any] = {"H": 136, "I": 40, "E": 3, "dtype": torch.float16}


@pytest.mark.parametrize(
    ("compute", "options"),
    [
        ("fp8_rowwise", {}),
        ("fp8_block", {"activation": "clamped_swiglu", "interleaved": True, "alpha": 1.3, "limit": 0.7}),
    ],
    ids=["rowwise, SwiGLU", "block, gpt-oss"],
)
def test_as_the_twins(compute: str, options: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second case has biases."""
    arguments = make(T=10, top_k=2, **SIZES, device=device, bias=bool(options))
    d_out = torch.randn(10, 136, device=device)
    made = assert_as_twins(arguments, d_out, monkeypatch, compute=compute, **options)
    assert not made["w_down"][2].any()


@pytest.mark.parametrize("compute", COMPUTE)
def test_gradients_in_float16_overflow_with_the_tokens_weights_only(
    compute: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a weight of 0.004 or 0 multiplies it, the gradient of act exceeds 65504."""
    arguments = make(T=10, top_k=2, **SIZES, device=device)
    arguments["topk_weights"].copy_(torch.tensor([0.004, 0.0]))
    arguments["w_down"] *= 60
    d_out = 1024 * torch.randn(10, 136, device=device)
    made = assert_as_twins(arguments, d_out, monkeypatch, compute=compute)
    assert made["topk_weights"].abs().max() > 65504


def test_whole_blocks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert has more than 128 tokens, topk_weights are strided, and weights are in float32."""
    arguments = make(T=150, top_k=2, H=136, I=128, E=3, dtype=torch.float16, device=device)
    arguments |= {name: arguments[name].float() for name in ("w_gate_up", "w_down")}
    arguments["topk_weights"] = arguments["topk_weights"].T.contiguous().T
    d_out = torch.randn(150, 136, device=device)
    made = assert_as_twins(arguments, d_out, monkeypatch, compute="fp8_block")
    assert not made["w_down"][2].any()


@pytest.mark.parametrize(("compute", "I"), [("fp8_rowwise", 40), ("fp8_block", 128)])
def test_nan_of_a_token_stays_there(compute: str, I: int, device: str) -> None:  # noqa: E741
    """NaN affects the token's results and gradients, and its experts' gradients; all else has the same bits."""
    arguments = make(T=6, top_k=2, **{**SIZES, "I": I}, device=device)
    arguments["topk_ids"][:] = torch.tensor([[0, 0], [0, 0], [0, 0], [1, 1], [-1, 3], [2, 2]])
    d_out = torch.randn(6, 136, device=device)
    right = run(arguments, d_out, compute=compute)
    arguments["hidden"][3:5, 7], d_out[4:, 9] = NAN, NAN
    made = run(arguments, d_out, compute=compute)
    for name, spoilt in (("out", [3]), ("hidden", [3, 5]), ("topk_weights", [3, 5])):
        others = [t for t in range(6) if t not in spoilt]
        assert made[name][spoilt].isnan().all(), name
        assert torch.equal(made[name][others], right[name][others]), name
        assert not made[name][4].any()
    for name in ("w_gate_up", "w_down"):
        assert torch.equal(made[name][0], right[name][0]), name
        assert made[name][1:].isnan().flatten(1).any(1).all(), name


def test_strides_and_unquantised_weights_gradients(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states by columns, weights in the other memory order, one upstream gradient for all tokens."""
    arguments = make(T=10, top_k=2, **SIZES, device=device)
    for name in ("hidden", "w_gate_up", "w_down"):
        arguments[name] = arguments[name].mT.contiguous().mT
    d_out = torch.randn(1, 136, device=device).half().expand(10, 136)
    for compute, fp8_wgrad in (("fp8_block", True), ("fp8_block", False), ("fp8_rowwise", False)):
        made = assert_as_twins(arguments, d_out, monkeypatch, compute=compute, fp8_wgrad=fp8_wgrad)
        for name in ("w_gate_up", "w_down"):
            assert made[name].stride() == arguments[name].stride(), name


@pytest.mark.parametrize("compute", COMPUTE)
def test_weights_quantised_before(compute: str, device: str) -> None:
    """Results and gradients have the same bits, of weights in both memory orders and fp8 data in others."""
    arguments = make(T=10, top_k=2, **SIZES, device=device, bias=True)
    arguments["w_down"] = arguments["w_down"].mT.contiguous().mT
    d_out = torch.randn(10, 136, device=device)
    right = run(arguments, d_out, compute=compute)
    for name, x in run(arguments, d_out, compute=compute, quantized_before=True).items():
        assert x.any() and torch.equal(x, right[name]), name
    strided = {}
    for name in ("w_gate_up", "w_down"):
        weight, *parts = quantize_weight(arguments[name], compute)
        data = (part.data.mT.contiguous().mT for part in parts)
        strided[name] = QuantizedWeight(weight, *(p._replace(data=x) for p, x in zip(parts, data, strict=True)))
    hidden = arguments["hidden"].requires_grad_()
    out = moe_mlp(**(arguments | strided), compute=compute)
    assert torch.equal(out, right["out"])
    assert torch.equal(torch.autograd.grad(out, hidden, d_out.to(out.dtype))[0], right["hidden"])


@pytest.mark.parametrize("format", ["plain", "rowwise", "block", *COMPUTE])
def test_nothing_is_read_on_the_host_for_no_tokens(format: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = make(0, 64, 32, 4, 2, torch.float16, device, bias=True)
    options: dict[str, Any] = {}
    if format in COMPUTE:
        options["compute"] = format
    elif format != "plain":
        scaled = "rowwise" if format == "rowwise" else "128x128"
        arguments |= {name: quantize(arguments[name].float(), scaled) for name in ("w_gate_up", "w_down")}
    grad = format not in ("rowwise", "block")
    inputs = [x.requires_grad_() for name, x in arguments.items() if name in DIFFERENTIABLE and grad]
    monkeypatch.setattr(Tensor, "tolist", lambda _: pytest.fail("the host reads a tensor"))
    monkeypatch.setattr(Tensor, "item", lambda _: pytest.fail("the host reads a number"))
    out = moe_mlp(**arguments, **options)
    assert (out.shape, out.dtype) == ((0, 64), torch.float16)
    if grad:
        for x, gradient in zip(inputs, torch.autograd.grad(out, inputs, out.detach()), strict=True):
            assert gradient.shape == x.shape and not gradient.any()


def test_no_tokens(device: str) -> None:
    arguments = make(T=1, top_k=2, **SIZES, device=device, bias=True)
    arguments |= {name: arguments[name][:0] for name in ("hidden", "topk_ids", "topk_weights")}
    made = run(arguments, torch.empty(0, 136, device=device), compute="fp8_rowwise")
    assert made["out"].shape == made["hidden"].shape == (0, 136)
    for name in DIFFERENTIABLE[2:]:
        assert made[name].shape == arguments[name].shape and not made[name].any(), name


def test_weights_are_kept_in_the_other_order(device: str) -> None:
    """Data and scales have the same bits."""
    arguments = make(T=10, top_k=2, **SIZES, device=device)
    weights = arguments["w_gate_up"], arguments["w_down"]
    tensors = (arguments["hidden"], arguments["topk_ids"], arguments["topk_weights"], *weights, None, None)
    spec = "silu", True, False, 1.0, 1.0
    made = quantized_moe_mlp(*tensors, *[None] * 8, False, False, True, True, *spec)
    for i, w in enumerate(weights):
        data, scales, _ = reference.quantize(w, "128x128")
        kept, kept_scales = made[2 + 2 * i : 4 + 2 * i]
        assert torch.equal(kept, data.mT.contiguous().view(torch.uint8))
        assert torch.equal(kept_scales, scales)
        assert kept.any()


def test_amax_of_columns_is_kept(device: str) -> None:
    """Products by weights that are quantised with it have the same bits as without it."""
    arguments = make(T=10, top_k=2, **SIZES, device=device)
    by_rows, by_columns = arguments["w_gate_up"], arguments["w_down"].mT.contiguous().mT
    tensors = (arguments["hidden"], arguments["topk_ids"], arguments["topk_weights"], by_rows, by_columns, None, None)
    options = (*[None] * 8, True, False, True, True, "silu", True, False, 1.0, 1.0)
    _, _, data, amax, *others = quantized_moe_mlp(*tensors, *options)[:6]
    assert [x.numel() for x in (data, *others)] == [0, 0, 0]
    assert torch.equal(amax.view(torch.float32), by_rows.float().abs().amax(1))
    rows = torch.randn(10, by_rows.size(1), device=device).half()
    group_offsets = torch.tensor([0, *range(2, 2 + by_rows.size(0))], dtype=torch.int32, device=device)
    made, right = (
        quantized_grouped_gemm(rows, None, by_rows, found, group_offsets, None, None, True, False, torch.float16)
        for found in (amax, None)
    )
    assert right.any() and torch.equal(made, right)


@pytest.mark.parametrize("weigh", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("format", "I"), [("rowwise", 72), ("rowwise", 300), ("1x128", 128), ("1x128", 1152)])
def test_activation_backward_quantises(format: str, I: int, gated: bool, weigh: bool, device: str) -> None:  # noqa: E741
    """The gradient has the bits of `quantize`, and the other results those without a format. The gradients of the
    router's weights are sums over columns, which Triton 3.9 rounds otherwise on a GPU.

    This includes rows of zeros, with infinity and NaN, subnormals, and rows in no group.
    """
    R, spec = 14, ("silu" if gated else "relu_squared", gated, False, 1.0, 1.0)
    preact = torch.randn(R, 2 * I if gated else I, device=device).half()
    d_act = (torch.randn(R, I, device=device) * 2.0 ** torch.randint(-9, 5, (R, 1), device=device)).half()
    d_act[1], d_act[2, 3], d_act[3, I - 1], preact[4, 0] = 0, INF, NAN, NAN
    d_act[5] = torch.finfo(torch.float16).smallest_normal / 4
    order = (
        torch.rand(R // 2, 2, device=device),
        torch.randperm(R, dtype=torch.int32).to(device),
        torch.tensor([0, 5, 11], dtype=torch.int32, device=device),
    )
    *made, data, scales = activate_backward(preact, None, d_act, *order, weigh, format, *spec)
    *right, _, _ = activate_backward(preact, None, d_act, *order, weigh, None, *spec)
    *_, of_magnitudes, _, _ = activate_backward(preact.abs(), None, d_act.abs(), *order, weigh, None, *spec)
    *exact, (sums, others) = zip(made, right, strict=True)
    for a, b in exact:
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    of_magnitudes *= 2.0**-22 if device == "cuda" and requirements.minor(triton.__version__) == (3, 9) else 0
    rounded = (sums - others).abs() <= of_magnitudes
    assert (rounded | (sums == others) | (sums.isnan() & others.isnan())).all() and others.nan_to_num().any()
    assert made[0][:4].any() and not made[0][11:].any()
    twin = reference.quantize(made[0], format)
    assert torch.equal(data, twin.data.view(torch.uint8))
    assert torch.equal(scales.view(torch.int32), twin.scales.contiguous().view(torch.int32))


@pytest.mark.parametrize("rowwise", [True, False], ids=["rowwise", "block"])
def test_products_of_any_offsets(rowwise: bool, device: str) -> None:
    """The product of rows is zero outside all groups, for offsets that do not come from a routing."""
    A, B = torch.randn(50, 136, device=device).half(), torch.randn(3, 40, 136, device=device).half().mT
    group_offsets = torch.tensor([-3, 20, 7, 44], dtype=torch.int32, device=device)
    out = quantized_grouped_gemm(A, None, B, None, group_offsets, None, None, rowwise, False, torch.float16)
    right = reference.quantized_grouped_gemm(A, None, B, None, group_offsets, None, None, rowwise, torch.float16)
    assert (out - right).float().norm() < 2**-10 * right.float().norm()
    assert not out[44:].any()


OTHERS: dict[str, dict[str, Any]] = {
    "without a gate": {"gated": False, "activation": "relu_squared"},
    "GELU": {"activation": "gelu"},
    "DeepSeek-V4": {"activation": "clamped_silu", "limit": 0.7},
}


@pytest.mark.gpu
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("compute", COMPUTE)
def test_other_layers(compute: str, name: str, top_k: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, options = make(T=24, top_k=top_k, **SIZES, device=device, bias=True), OTHERS[name]
    if not options.get("gated", True):
        arguments |= {part: arguments[part][:, : SIZES["I"]] for part in ("w_gate_up", "gate_up_bias")}
    d_out = torch.randn(24, 136, device=device)
    assert_as_twins(arguments, d_out, monkeypatch, compute=compute, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("compute", COMPUTE)
def test_the_same_bits_in_other_modes(compute: str, device: str) -> None:
    """Frozen halves, checkpoints, autocast, no gradients, and the gradient of a sum."""
    arguments = make(T=24, top_k=2, **SIZES, device=device, bias=True)
    d_out = torch.ones((), dtype=torch.float16, device=device).expand(24, 136)
    right = run(arguments, d_out.contiguous(), compute=compute)
    leaves = {name: arguments[name].detach().requires_grad_() for name in DIFFERENTIABLE}
    ids = arguments["topk_ids"]

    def layer(*values: Tensor) -> Tensor:
        return moe_mlp(topk_ids=ids, **dict(zip(DIFFERENTIABLE, values, strict=True)), compute=compute)

    for trained in (("hidden", "topk_weights"), ("w_gate_up",), ("w_down",), DIFFERENTIABLE[4:]):
        given = [leaves[name] if name in trained else arguments[name] for name in DIFFERENTIABLE]
        gradients = torch.autograd.grad(layer(*given), [leaves[name] for name in trained], d_out)
        for name, x in zip(trained, gradients, strict=True):
            assert torch.equal(x, right[name]), name
    out = checkpoint(layer, *leaves.values(), use_reentrant=False)
    for name, x in zip(leaves, torch.autograd.grad(out, list(leaves.values()), d_out), strict=True):
        assert torch.equal(x, right[name]), name
    with torch.no_grad():
        assert torch.equal(layer(*leaves.values()), right["out"])
    with torch.autocast(device, dtype=torch.float16):
        made = run({**arguments, "hidden": arguments["hidden"].float()}, d_out, compute=compute)
    for name, x in made.items():
        assert torch.equal(x.half(), right[name].half()), name


@pytest.mark.gpu
@pytest.mark.parametrize("compute", COMPUTE)
def test_compiled(compute: str, device: str) -> None:
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()

    def layer(given: dict[str, Any]) -> Tensor:
        return moe_mlp(**given, compute=compute)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for T in (64, 1, 0, 200):
        arguments, d_out = (
            make(T, 256, 128, 8, 2, torch.bfloat16, device, bias=True),
            torch.randn(T, 256, device=device),
        )
        right = run(arguments, d_out, compute=compute)
        given = {name: x.detach().requires_grad_(name in DIFFERENTIABLE) for name, x in arguments.items()}
        out = compiled(given)
        gradients = torch.autograd.grad(out, [given[name] for name in DIFFERENTIABLE], d_out.to(out.dtype))
        for name, x in zip(("out", *DIFFERENTIABLE), (out, *gradients), strict=True):
            torch.testing.assert_close(x, right[name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.gpu
@pytest.mark.parametrize("rowwise", [True, False], ids=["rowwise", "block"])
@pytest.mark.parametrize(("M", "K", "N", "G"), [(600_000, 4096, 32, 4), (600_000, 4095, 32, 4), (256, 4096, 2048, 270)])
def test_products_of_more_than_2_to_the_31_elements(M: int, K: int, N: int, G: int, rowwise: bool, device: str) -> None:
    """Rows, or weights, are quantised and multiplied; the results of the last rows are compared."""
    torch.use_deterministic_algorithms(False)  # filling these tensors with NaN takes long
    A = torch.empty(M, K, dtype=torch.bfloat16, device=device).normal_()
    B = torch.empty(G, N, K, dtype=torch.bfloat16, device=device).normal_(std=K**-0.5).mT
    group_offsets = torch.zeros(G + 1, dtype=torch.int32, device=device)
    group_offsets[-2], group_offsets[-1] = M - 128, M
    out = quantized_grouped_gemm(A, None, B, None, group_offsets, None, None, rowwise, False, torch.bfloat16)
    last = torch.tensor([0, 128], device=device)
    right = reference.quantized_grouped_gemm(A[-128:], None, B[-1:], None, last, None, None, rowwise, torch.bfloat16)
    assert (out[-128:] - right).double().norm() < 2**-7 * right.double().norm()


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(device: str) -> None:
    """The first product's result and gradient have more; tokens' results equal those in smaller batches."""
    torch.use_deterministic_algorithms(False)  # filling these tensors with NaN takes long
    T, parts = 300_000, 3
    arguments = make(T, 128, 2048, 4, 2, torch.bfloat16, device)
    d_out = torch.randn(T, 128, device=device)
    made = run(arguments, d_out, compute="fp8_block")
    of_tokens = ("hidden", "topk_ids", "topk_weights")
    chunks = zip(*(arguments[name].chunk(parts) for name in of_tokens), d_out.chunk(parts), strict=True)
    weights = {name: torch.zeros_like(arguments[name], dtype=torch.float32) for name in ("w_gate_up", "w_down")}
    for i, (*few, d) in enumerate(chunks):
        right = run(arguments | dict(zip(of_tokens, few, strict=True)), d, compute="fp8_block")
        for name in ("out", "hidden", "topk_weights"):
            assert difference(made[name].chunk(parts)[i], right[name]) < 2**-5, name
        for name, total in weights.items():
            total += right[name]
    for name, total in weights.items():
        assert difference(made[name], total) < 0.08, name


def difference(a: Tensor, b: Tensor) -> float:
    """Return the norm of the difference, relative to that of `b`."""
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.gpu
@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize(
    ("T", "H", "I", "E", "top_k"), [(1, 2048, 768, 128, 8), (300, 2048, 768, 128, 8), (2048, 2880, 2880, 32, 4)]
)
def test_sizes_of_models(
    T: int,
    H: int,
    I: int,  # noqa: E741
    E: int,
    top_k: int,
    compute: str,
    device: str,
) -> None:
    """The layer in bfloat16 is the reference, because it is far closer to float64 than fp8 is."""
    arguments = make(T, H, I, E, top_k, torch.bfloat16, device)
    d_out = torch.randn(T, H, device=device)
    made, right = run(arguments, d_out, compute=compute), run(arguments, d_out)
    for name, x in made.items():
        error, size = (y.double().flatten(1).norm(dim=1) for y in (x - right[name], right[name]))
        assert error.norm() < (0.3 if x.numel() <= 8 else 0.08) * size.norm(), name  # sums of few terms may cancel
        # For each token, or expert's weight; gradients of few terms, which may cancel, are compared with the largest.
        assert (error < 0.25 * size + 0.05 * size.max()).all(), name
    for _ in range(3):
        again = run(arguments, d_out, compute=compute)
        assert all(torch.equal(x, again[name]) for name, x in made.items())


@pytest.mark.gpu
def test_fast_accumulation(device: str) -> None:
    """Sums in both passes differ from exact ones, and are as close to bfloat16."""
    arguments, d_out = make(1024, 2048, 1024, 8, 2, torch.bfloat16, device), torch.randn(1024, 2048, device=device)
    options: dict[str, Any] = {"compute": "fp8_rowwise"}
    made, exact = run(arguments, d_out, **options, fast_accumulation=True), run(arguments, d_out, **options)
    right = run(arguments, d_out)
    for name, x in made.items():
        assert not torch.equal(x, exact[name]), name
        assert difference(x, right[name]) < 1.1 * difference(exact[name], right[name]) + 2**-8, name
    again = run(arguments, d_out, **options, fast_accumulation=True)
    assert all(torch.equal(x, again[name]) for name, x in made.items())
    assert difference(made["hidden"], exact["hidden"]) > 2**-12


@pytest.mark.gpu
@pytest.mark.parametrize("fp8_wgrad", [True, False])
@pytest.mark.parametrize("compute", COMPUTE)
def test_the_host_never_waits(compute: str, fp8_wgrad: bool, device: str) -> None:
    arguments = make(500, 512, 256, 16, 4, torch.bfloat16, device, bias=True)
    d_out, options = torch.randn(500, 512, device=device), {"compute": compute, "fp8_wgrad": fp8_wgrad}
    first = run(arguments, d_out, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = run(arguments, d_out, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(x, again[name]) for name, x in first.items())


def most_held(arguments: dict[str, Any], results: int, compute: str, fp8_wgrad: bool) -> int:
    """Return the bytes that a step in bfloat16 must hold at once: in its forward pass, or for the gradient of w_down.

    Rows of groups are padded to multiples of 128 only in the operands of weights' gradients, in fp8.
    """
    (T, H), (E, _, I), R = arguments["hidden"].shape, arguments["w_down"].shape, arguments["topk_ids"].numel()  # noqa: E741
    weights = 3 * E * H * I * (1 if compute == "fp8_rowwise" else 2)  # in fp8, "fp8_block" in both orders
    forward = weights + R * (H + I) + 2 * (R * 2 * I + R * H + T * H)  # operands in fp8, and results of products
    columns = sum(-(-n // 128) * 128 for n in (H, I))
    operands = 128 * (R // 128 + E) * columns if fp8_wgrad else 2 * R * H
    return max(forward, results + 2 * R * I + operands)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8_wgrad", [True, False])
@pytest.mark.parametrize("compute", COMPUTE)
def test_memory(compute: str, fp8_wgrad: bool, device: str) -> None:
    """With about 16 rows per group: the bytes that must be held, plus a tenth of them for scales and tables."""
    arguments, options = make(1024, 128, 64, 512, 8, torch.bfloat16, device), {"fp8_wgrad": fp8_wgrad}
    d_out = torch.randn(1024, 128, device=device).bfloat16()
    gc.collect()  # what other tests left
    before, deadline = torch.cuda.memory_allocated(), time.monotonic() + 5
    results = sum(x.nbytes for x in run(arguments, d_out, compute=compute, **options).values())
    gc.collect()
    while torch.cuda.memory_allocated() > before and time.monotonic() < deadline:
        time.sleep(0.01)  # autograd's thread may hold the gradients for some time
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(arguments, d_out, compute=compute, **options)
    held = torch.cuda.max_memory_allocated() - before
    assert results < held <= 1.1 * most_held(arguments, results, compute, fp8_wgrad)


@pytest.mark.gpu
@pytest.mark.parametrize("compute", COMPUTE)
def test_graph_replay(compute: str, device: str) -> None:
    arguments = make(200, 256, 128, 8, 2, torch.bfloat16, device)
    given = {name: x.detach().requires_grad_(name in DIFFERENTIABLE) for name, x in arguments.items()}
    leaves, d_out = [given[name] for name in DIFFERENTIABLE if name in given], torch.randn(200, 256, device=device)

    def step() -> list[Tensor]:
        out = moe_mlp(**given, compute=compute)
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out.to(out.dtype))]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    for _ in range(3):
        given["topk_ids"].random_(-1, 9)
        given["hidden"].data.normal_()
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(made, step(), strict=True))
