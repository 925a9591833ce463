"""`moe_mlp` with `compute`, forward and backward on CPU tensors, through the reference; `MoE(compute=...)`; errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from training import COMPUTE, DIFFERENTIABLE, run

from moe_kernels import MoE, dequantize, moe_mlp, quantize, reference
from moe_kernels.ahead import collect, layers_of
from moe_kernels.glu import GLUSpec

T, H, I, E, TOP_K = 40, 160, 136, 4, 2  # noqa: E741
LAYERS: dict[str, dict[str, Any]] = {
    "SwiGLU": {},
    "gpt-oss": {"activation": "clamped_swiglu", "interleaved": True, "alpha": 1.3, "limit": 0.7},
    "without a gate": {"gated": False, "activation": "relu_squared"},
}


def make(dtype: torch.dtype, *, bias: bool = False, gated: bool = True) -> dict[str, Any]:
    """Arguments of `moe_mlp`; some ids are dropped, and no token picks the last expert."""
    W = 2 * I if gated else I
    ids = torch.randint(0, E - 1, (T, TOP_K))
    ids[2, 1], ids[5, 0] = -1, E
    made: dict[str, Any] = {
        "hidden": torch.randn(T, H, dtype=dtype),
        "topk_ids": ids,
        "topk_weights": torch.rand(T, TOP_K) + 0.1,
        "w_gate_up": (torch.randn(E, W, H) / H**0.5).to(dtype),
        "w_down": (torch.randn(E, H, I) / I**0.5).to(dtype),
    }
    if bias:
        made |= {"gate_up_bias": torch.randn(E, W, dtype=dtype), "down_bias": torch.randn(E, H, dtype=dtype)}
    return made


def difference(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def by_hand(
    arguments: dict[str, Any], d_out: Tensor, compute: str, fp8_wgrad: bool, spec: GLUSpec
) -> dict[str, Tensor]:
    """The same, expert by expert in float64, with each operand quantised where the definition says so."""
    weights, parts = ("rowwise", "rowwise") if compute == "fp8_rowwise" else ("128x128", "1x128")

    def q(x: Tensor, format: str) -> Tensor:
        return dequantize(quantize(x, format), torch.float64)

    def wgrad(x: Tensor, y: Tensor) -> Tensor:
        return q(x.T, "1x128") @ q(y.T, "128x128").T if fp8_wgrad else x.T @ y

    given = {name: x.double() if x.is_floating_point() else x for name, x in arguments.items()}
    hidden, ids, topk_weights, w_in, w_out = (
        given[x] for x in ("hidden", "topk_ids", "topk_weights", "w_gate_up", "w_down")
    )
    made = {name: torch.zeros_like(given[name]) for name in DIFFERENTIABLE if name in given}
    made["out"] = torch.zeros_like(hidden)
    for e in range(E):
        t, k = (ids == e).nonzero(as_tuple=True)
        if not len(t):
            continue
        b_in = given["gate_up_bias"][e] if "gate_up_bias" in given else 0
        b_out = given["down_bias"][e] if "down_bias" in given else 0
        w, d = topk_weights[t, k, None], d_out.double()[t]
        preact = q(hidden[t], parts) @ q(w_in[e], weights).T + b_in
        act = reference.activate(preact, None, spec)
        y = q(act, parts) @ q(w_out[e], weights).T + b_out
        made["out"].index_add_(0, t, w * y)
        d_act = q(d, parts) @ q(w_out[e].T, weights).T
        leaf = preact.clone().requires_grad_()
        (d_preact,) = torch.autograd.grad(reference.activate(leaf, None, spec), leaf, w * d_act)
        made["topk_weights"][t, k] = (act * d_act).sum(1) + (d * b_out).sum(1)
        made["hidden"].index_add_(0, t, q(d_preact, parts) @ q(w_in[e].T, weights).T)
        made["w_gate_up"][e] = wgrad(d_preact, hidden[t])
        made["w_down"][e] = wgrad(d, w * act)
        if "down_bias" in given:
            made["gate_up_bias"][e], made["down_bias"][e] = d_preact.sum(0), (w * d).sum(0)
    return made


@pytest.mark.parametrize(
    ("name", "bias", "fp8_wgrad"),
    [("SwiGLU", False, True), ("SwiGLU", True, False), ("gpt-oss", True, True), ("without a gate", False, True)],
)
@pytest.mark.parametrize("compute", COMPUTE)
def test_the_formula(compute: str, name: str, bias: bool, fp8_wgrad: bool) -> None:
    options = LAYERS[name]
    arguments, d_out = make(torch.float32, bias=bias, gated=options.get("gated", True)), torch.randn(T, H)
    spec = GLUSpec(
        **{"activation": "silu", "gated": True, "interleaved": False, "alpha": 1.702, "limit": 7.0, **options}
    )
    exact = by_hand(arguments, d_out, compute, fp8_wgrad, spec)
    made = run(arguments, d_out, compute=compute, fp8_wgrad=fp8_wgrad, **options)
    for part, right in exact.items():
        # An element that is rounded to the other of two numbers in fp8 is an eighth of itself away.
        assert difference(made[part], right) < 3e-3, part
        assert made[part].dtype == torch.float32
        assert made[part].stride() == (right if part == "out" else arguments[part]).stride(), part
    for part in ("w_gate_up", "w_down"):
        assert not made[part][E - 1].any()
    assert not made["topk_weights"][5, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("compute", COMPUTE)
def test_close_to_the_layer_in_its_dtype(compute: str, dtype: torch.dtype) -> None:
    """And of the dtypes of the arguments, also with weights in float32 beside hidden states in bfloat16."""
    arguments, d_out = make(dtype, bias=True), torch.randn(T, H)
    arguments["hidden"] = arguments["hidden"].bfloat16()
    right = run(arguments, d_out)
    made = run(arguments, d_out, compute=compute)
    assert made["out"].dtype == torch.bfloat16
    for name, x in made.items():
        assert name == "out" or x.dtype == arguments[name].dtype, name
        assert difference(x, right[name]) < 0.08, name
    assert difference(made["w_gate_up"], right["w_gate_up"]) > 0.005
    unquantised = run(arguments, d_out, compute=compute, fp8_wgrad=False)
    for name in ("w_gate_up", "w_down"):
        assert difference(unquantised[name], right[name]) < difference(made[name], right[name]), name
    assert torch.equal(unquantised["hidden"], made["hidden"])


@pytest.mark.parametrize("compute", COMPUTE)
def test_nan_of_a_token_stays_there(compute: str) -> None:
    """In the result and the gradient of hidden states; in weights' gradients with its experts."""
    arguments, d_out = make(torch.bfloat16), torch.randn(T, H)
    arguments["topk_ids"][3] = 1
    right = run(arguments, d_out, compute=compute)
    arguments["hidden"][3, 7] = torch.nan
    made = run(arguments, d_out, compute=compute)
    others = torch.arange(T) != 3
    for name in ("out", "hidden", "topk_weights"):
        assert torch.equal(made[name][others], right[name][others])
        assert made[name][3].isnan().all()
    experts = torch.arange(E) != 1
    for name in ("w_gate_up", "w_down"):
        assert torch.equal(made[name][experts], right[name][experts])
        assert made[name][1].isnan().any()


@pytest.mark.parametrize("compute", COMPUTE)
def test_traced_and_without_memory(compute: str) -> None:
    arguments, d_out = make(torch.bfloat16, bias=True), torch.randn(T, H)
    right = run(arguments, d_out, compute=compute)

    def layer(given: dict[str, Any]) -> Tensor:
        return moe_mlp(**given, compute=compute)

    given = {name: x.detach().requires_grad_(name in DIFFERENTIABLE) for name, x in arguments.items()}
    out = torch.compile(layer, fullgraph=True, backend="aot_eager")(given)
    out.backward(d_out.to(out.dtype))
    assert torch.equal(out, right["out"])
    for name in DIFFERENTIABLE:
        assert torch.equal(given[name].grad, right[name]), name
    meta = {name: x.detach().to("meta").requires_grad_(x.requires_grad) for name, x in given.items()}
    made = moe_mlp(**meta, compute=compute)
    made.backward(torch.empty_like(made))
    assert (made.shape, made.dtype, made.stride()) == (out.shape, out.dtype, out.stride())
    for name in DIFFERENTIABLE:
        assert meta[name].grad.stride() == right[name].stride(), name


@pytest.mark.parametrize("compute", COMPUTE)
def test_operator_of_the_layer(compute: str) -> None:
    arguments = make(torch.bfloat16, bias=True)
    given = {name: x.requires_grad_(name in DIFFERENTIABLE) for name, x in arguments.items()}
    routing = reference.route(given["topk_ids"], given["topk_weights"], E)
    tensors = (given["hidden"], given["topk_weights"], *routing[:3], given["w_gate_up"].mT, given["w_down"].mT)
    biases, spec = (given["gate_up_bias"], given["down_bias"]), ("silu", True, False, 1.702, 7.0)
    opcheck(
        torch.ops.moe_kernels.quantized_moe_mlp.default,
        (*tensors, *biases, compute == "fp8_rowwise", True, True, *spec),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_gradients_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from operators of their own, and traced."""
    arguments, d_out = make(torch.bfloat16), torch.randn(T, H)
    arguments["w_gate_up"] = torch.randn(E, 2 * 128, H).bfloat16()
    arguments["w_down"] = torch.randn(E, H, 128).bfloat16()
    made = run(arguments, d_out, compute="fp8_block")
    given = {name: x.detach().requires_grad_(name in DIFFERENTIABLE) for name, x in arguments.items()}
    torch.compile(moe_mlp, fullgraph=True, backend="aot_eager")(**given, compute="fp8_block").backward(d_out.bfloat16())
    monkeypatch.setattr("moe_kernels.ops.quantized_layer._at_once", lambda *_: False)
    for name, x in run(arguments, d_out, compute="fp8_block").items():
        assert torch.equal(x, made[name]), name
        assert x.stride() == made[name].stride()
        assert name == "out" or torch.equal(given[name].grad, x)


def test_operators_of_the_gradient() -> None:
    """Their fakes, and how they are registered."""
    x, y = torch.randn(T, H), torch.randn(T, I)
    offsets, rows = torch.tensor([0, 7, 7, T], dtype=torch.int32), torch.arange(T, dtype=torch.int32)
    w = torch.randn(3, H, I)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for transposed in (False, True):
        given: tuple[Any, ...] = (x, y, offsets, rows, None, transposed, torch.bfloat16)
        opcheck(torch.ops.moe_kernels.quantized_wgrad.default, given, test_utils=checks)
    given = (x[: T // 2], w, None, offsets, rows, None, True, torch.float32)
    opcheck(torch.ops.moe_kernels.quantized_grouped_gemm.default, given, test_utils=checks)
    weights = [quantize(torch.randn(shape), "128x128") for shape in ((3, 256, H), (3, H, 128))]
    saved = [x for data, scales, _ in weights for x in (data.mT.contiguous().view(torch.uint8), scales)]
    hidden, preact, topk_weights = torch.randn(T // 2, H), torch.randn(T, 256), torch.rand(T // 2, 2)
    given = (hidden, hidden, preact, topk_weights, offsets, rows, rows, *saved, torch.float32, torch.bfloat16)
    spec = ("silu", True, False, 1.0, 1.0)
    opcheck(torch.ops.moe_kernels.quantized_moe_mlp_backward.default, (*given, *spec), test_utils=checks)


@pytest.mark.parametrize("compute", COMPUTE)
def test_transforms_and_second_order(compute: str) -> None:
    arguments = make(torch.float32)
    hidden, d_out = arguments.pop("hidden"), torch.randn(T, H)

    def loss(x: Tensor) -> Tensor:
        return (moe_mlp(x, **arguments, compute=compute) * d_out).sum()

    right = run({"hidden": hidden, **arguments}, d_out, compute=compute)["hidden"]
    assert torch.equal(torch.func.grad(loss)(hidden), right)
    leaf = hidden.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="neither gradients of gradients nor forward-mode derivatives"):
        grad.sum().backward()


@pytest.mark.parametrize("compute", COMPUTE)
def test_what_is_not_saved_is_computed_again(compute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, d_out = make(torch.bfloat16, bias=True), torch.randn(T, H)
    right = run(arguments, d_out, compute=compute)
    monkeypatch.setattr("moe_kernels.experts.differentiated", lambda *_: False)
    for name, x in run(arguments, d_out, compute=compute).items():
        assert torch.equal(x, right[name]), name


@pytest.mark.parametrize("compute", COMPUTE)
def test_no_tokens_and_autocast(compute: str) -> None:
    arguments = make(torch.float32)
    empty = {name: arguments[name][:0] for name in ("hidden", "topk_ids", "topk_weights")}
    made = run({**arguments, **empty}, torch.zeros(0, H), compute=compute)
    assert made["out"].shape == (0, H)
    assert made["w_gate_up"].shape == arguments["w_gate_up"].shape and not made["w_gate_up"].any()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert moe_mlp(**arguments, compute=compute).dtype == torch.bfloat16


@pytest.mark.parametrize("compute", COMPUTE)
def test_layer(compute: str) -> None:
    layer = MoE(H, I, E, TOP_K, renormalize=True, compute=compute)
    assert f"compute={compute}, fp8_wgrad=True" in repr(layer)
    hidden, d_out = torch.randn(3, T, H), torch.randn(3, T, H)
    gradients = []
    for layer.compute, layer.fp8_wgrad in ((None, True), (compute, True), (compute, False)):
        layer.zero_grad()
        layer(hidden).backward(d_out)
        gradients.append(layer.w_gate_up.grad.clone())
    exact, quantised, mixed = gradients
    assert 0.005 < difference(mixed, exact) < difference(quantised, exact) < 0.08
    layer.quantize(compute)
    with torch.no_grad():
        assert layer(hidden).isfinite().all()


def test_what_is_made_ahead() -> None:
    layer = MoE(256, 128, 8, 2, renormalize=True, compute="fp8_block", device="meta", dtype=torch.bfloat16)

    def call() -> None:
        (one,) = layers_of(layer)
        hidden = torch.empty(64, 256, dtype=torch.bfloat16, device="meta", requires_grad=True)
        one(hidden).backward(torch.empty(64, 256, dtype=torch.bfloat16, device="meta"))

    wanted = [one.operator for one in collect([call])]
    assert wanted.count("quantized_moe_mlp") == wanted.count("quantized_moe_mlp_backward") == 1
    assert not {"quantized_wgrad", "quantized_grouped_gemm", "grouped_gemm_wgrad"} & {*wanted}
    layer.compute = "fp8_rowwise"
    wanted = [one.operator for one in collect([call])]
    assert wanted.count("quantized_wgrad") == wanted.count("quantized_grouped_gemm") == 2
    assert wanted.count("quantized_moe_mlp") == 1
    assert "grouped_gemm_wgrad" not in wanted


GOOD = make(torch.bfloat16)
QUANTIZED = quantize(GOOD["w_down"], "rowwise")
REFUSALS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"compute": "fp8"}, ValueError, "compute: expected None or one of 'fp8_block', 'fp8_rowwise', got 'fp8'"),
    ({"compute": ["fp8_block"]}, ValueError, "compute: expected None or one of"),
    ({"w_gate_up": [1.0]}, TypeError, "w_gate_up: expected a torch.Tensor, got list"),
    ({"w_down": None}, TypeError, "w_down: expected a torch.Tensor, got NoneType"),
    ({"w_down": QUANTIZED}, ValueError, "compute: expected None for weights in fp8.*w_down is a ScaledTensor"),
    ({"transposed": True}, ValueError, "transposed: expected False with compute='fp8_block'.*pass w.mT"),
    ({"w_up": GOOD["w_down"].mT}, ValueError, r"w_up: expected None with compute='fp8_block'.*torch\.cat"),
    ({"up_bias": torch.ones(E, I)}, ValueError, "up_bias: expected None without w_up"),
    ({"hidden": torch.ones(T, H).double()}, TypeError, "hidden: expected bfloat16, float16 or float32, got torch.fl"),
    ({"w_down": GOOD["w_down"].double()}, TypeError, "w_down: expected bfloat16, float16 or float32, got torch.fl"),
    ({"w_down": GOOD["w_down"][:, 1:]}, ValueError, r"w_down: expected shape \[E, H, I\]"),
    ({"down_bias": torch.ones(E, H + 1)}, ValueError, r"down_bias: expected shape \[E, H\]"),
    ({"activation": "swish"}, ValueError, "activation: expected one of"),
    ({"validate": True}, ValueError, r"topk_ids\[2, 1\]: expected 0 to 3, got -1"),
]


@pytest.mark.parametrize(
    ("change", "error", "text"), REFUSALS, ids=[f"{', '.join(change)}: {text}" for change, _, text in REFUSALS]
)
def test_refuses(change: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        moe_mlp(**{**GOOD, "compute": "fp8_block", **change})


def test_layer_refuses() -> None:
    with pytest.raises(ValueError, match="compute: expected None or one of"):
        MoE(H, I, E, TOP_K, renormalize=True, compute="fp8")
