"""`moe_mlp` with `compute`, forward and backward on CPU tensors, through the reference; `MoE(compute=...)`; errors."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.library import opcheck
from torch.nn.utils import parametrize
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from training import COMPUTE, DIFFERENTIABLE, exactly, run

from moe_kernels import (
    MoE,
    QuantizedWeight,
    ScaledTensor,
    ahead,
    moe_mlp,
    ops,
    quantize,
    quantize_once,
    quantize_weight,
)
from moe_kernels.ahead import collect, layers_of

T, H, I, E, TOP_K = 40, 160, 136, 4, 2  # noqa: E741
LAYERS: dict[str, dict[str, Any]] = {
    "SwiGLU": {},
    "gpt-oss": {"activation": "clamped_swiglu", "interleaved": True, "alpha": 1.3, "limit": 0.7},
    "without a gate": {"gated": False, "activation": "relu_squared"},
    "GELU": {"activation": "gelu"},
    "DeepSeek-V4": {"activation": "clamped_silu", "limit": 0.7},
}


def make(dtype: torch.dtype, *, bias: bool = False, gated: bool = True, top_k: int = TOP_K) -> dict[str, Any]:
    """Return arguments of `moe_mlp`; some ids are dropped, and no token picks the last expert."""
    W = 2 * I if gated else I
    ids = torch.randint(0, E - 1, (T, top_k))
    ids[2, -1], ids[5, 0] = -1, E
    made: dict[str, Any] = {
        "hidden": torch.randn(T, H, dtype=dtype),
        "topk_ids": ids,
        "topk_weights": torch.rand(T, top_k) + 0.1,
        "w_gate_up": (torch.randn(E, W, H) / H**0.5).to(dtype),
        "w_down": (torch.randn(E, H, I) / I**0.5).to(dtype),
    }
    if bias:
        made |= {"gate_up_bias": torch.randn(E, W, dtype=dtype), "down_bias": torch.randn(E, H, dtype=dtype)}
    return made


def difference(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize(
    ("name", "bias", "fp8_wgrad", "top_k"),
    [
        ("SwiGLU", False, True, 2),
        ("SwiGLU", True, False, 2),
        ("gpt-oss", True, True, 2),
        ("without a gate", False, True, 2),
        ("GELU", True, True, 1),
        ("DeepSeek-V4", False, False, 1),
    ],
)
@pytest.mark.parametrize("compute", COMPUTE)
def test_the_formula(compute: str, name: str, bias: bool, fp8_wgrad: bool, top_k: int) -> None:
    options = LAYERS[name]
    arguments = make(torch.float32, bias=bias, gated=options.get("gated", True), top_k=top_k)
    d_out = torch.randn(T, H)
    exact = exactly(arguments, d_out, compute, fp8_wgrad, **options)
    made = run(arguments, d_out, compute=compute, fp8_wgrad=fp8_wgrad, **options)
    for part, right in exact.items():
        # An element that is rounded to the other of two adjacent fp8 numbers differs by up to an eighth of itself.
        assert difference(made[part], right) < 3e-3, part
        assert made[part].dtype == torch.float32
        assert made[part].stride() == (right if part == "out" else arguments[part]).stride(), part
    for part in ("w_gate_up", "w_down"):
        assert not made[part][E - 1].any()
    assert not made["topk_weights"][5, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("compute", COMPUTE)
def test_close_to_the_layer_in_its_dtype(compute: str, dtype: torch.dtype) -> None:
    """Gradients have the dtypes of the arguments, also with float32 weights beside bfloat16 hidden states."""
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


@pytest.mark.parametrize("where", ["hidden", "d_out"])
@pytest.mark.parametrize("compute", COMPUTE)
def test_nan_of_a_token_stays_there(compute: str, where: str) -> None:
    """It stays in the token's result and gradients, and in the parameters' gradients of its experts."""
    arguments, d_out = make(torch.bfloat16, bias=True), torch.randn(T, H)
    arguments["topk_ids"][3] = 1
    right = run(arguments, d_out, compute=compute)
    (arguments["hidden"] if where == "hidden" else d_out)[3, 7] = torch.nan
    made = run(arguments, d_out, compute=compute)
    others, experts = torch.arange(T) != 3, torch.arange(E) != 1
    if where == "d_out":
        assert torch.equal(made["out"], right["out"])
    for name in ("out", "hidden", "topk_weights")[where == "d_out" :]:
        assert torch.equal(made[name][others], right[name][others]), name
        assert made[name][3].isnan().all(), name
    for name in DIFFERENTIABLE[2:]:
        assert torch.equal(made[name][experts], right[name][experts]), name
        # The gradient of down_bias has only the NaN of d_out, and does not depend on hidden states.
        spoilt = made[name][1].isnan()
        assert spoilt.sum() == (where == "d_out") if name == "down_bias" else spoilt.any(), name


def by_columns(x: Tensor) -> Tensor:
    """Return `x` with its last two dimensions in the other memory order."""
    return x.mT.contiguous().mT


LAYOUTS = {
    "hidden by columns": lambda given, d_out: ({"hidden": by_columns(given["hidden"])}, d_out),
    "every second hidden": lambda given, d_out: ({"hidden": given["hidden"].repeat_interleave(2, 1)[:, ::2]}, d_out),
    "one hidden state": lambda given, d_out: ({"hidden": given["hidden"][:1].expand(T, H)}, d_out),
    "routing by columns": lambda given, d_out: (
        {name: by_columns(given[name]) for name in ("topk_ids", "topk_weights")},
        d_out,
    ),
    "weights by columns": lambda given, d_out: (
        {name: by_columns(given[name]) for name in ("w_gate_up", "w_down")},
        d_out,
    ),
    "one bias": lambda given, d_out: (
        {name: given[name][:1].expand(E, -1) for name in ("gate_up_bias", "down_bias")},
        d_out,
    ),
    "d_out by columns": lambda given, d_out: ({}, by_columns(d_out)),
    "d_out of one token": lambda given, d_out: ({}, d_out[:1].expand(T, H)),
    "d_out of a sum": lambda given, d_out: ({}, d_out[0, 0].expand(T, H)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("compute", COMPUTE)
def test_strides(compute: str, layout: str) -> None:
    """Strides change no bit, except those of weights, which the weights' gradients have, too.

    The memory order of a weight decides which operand of its gradient has one scale per square.
    """
    arguments, d_out = make(torch.bfloat16, bias=True), torch.randn(T, H, dtype=torch.bfloat16)
    changed, d_out = LAYOUTS[layout](arguments, d_out)
    arguments |= changed
    contiguous = {name: x.contiguous() for name, x in arguments.items()}
    assert not any(x.is_contiguous() for x in changed.values() or (d_out,))
    made, right = run(arguments, d_out, compute=compute), run(contiguous, d_out.contiguous(), compute=compute)
    for name, x in made.items():
        if layout == "weights by columns" and name.startswith("w_"):
            assert 0 < (x - right[name]).norm() < 0.08 * right[name].norm(), name
        else:
            assert torch.equal(x, right[name]), name
        assert not name.startswith("w_") or x.stride() == arguments[name].stride(), name


@pytest.mark.parametrize("fp8_wgrad", [True, False])
@pytest.mark.parametrize(
    "trained",
    [("hidden",), ("topk_weights",), ("w_gate_up",), ("w_down",), DIFFERENTIABLE[4:], DIFFERENTIABLE[:2]],
    ids=", ".join,
)
def test_frozen_halves(trained: tuple[str, ...], fp8_wgrad: bool) -> None:
    """The gradients have the same bits, and no product is computed for a gradient that is not needed."""
    arguments, d_out = make(torch.bfloat16, bias=True), torch.randn(T, H, dtype=torch.bfloat16)
    options: dict[str, Any] = {"compute": "fp8_block", "fp8_wgrad": fp8_wgrad}
    right = run(arguments, d_out, **options)
    given = {name: x.detach().requires_grad_(name in trained) for name, x in arguments.items()}
    out = moe_mlp(**given, **options)
    with profile(activities=[ProfilerActivity.CPU]) as shown:
        found = torch.autograd.grad(out, [given[name] for name in trained], d_out)
    for name, x in zip(trained, found, strict=True):
        assert torch.equal(x, right[name]), name
    called = [event.name.removeprefix("moe_kernels::") for event in shown.events()]
    weights = sum(name.startswith("w_") for name in trained)
    assert called.count("quantized_wgrad") == (weights if fp8_wgrad else 0)
    assert called.count("quantized_grouped_gemm") == 1 + ("hidden" in trained)


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
    tensors = [given[name] for name in ("hidden", "topk_ids", "topk_weights", "w_gate_up", "w_down")]
    biases, spec = (given["gate_up_bias"], given["down_bias"]), ("silu", True, False, 1.702, 7.0)
    opcheck(
        torch.ops.moe_kernels.quantized_moe_mlp.default,
        (*tensors, *biases, *[None] * 8, compute == "fp8_rowwise", False, True, True, *spec),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


@pytest.mark.parametrize("compute", COMPUTE)
def test_operator_of_the_layer_that_saves_nothing(compute: str) -> None:
    arguments, spec = make(torch.bfloat16), ("silu", True, False, 1.702, 7.0)
    given = (*arguments.values(), *[None] * 10, compute == "fp8_rowwise", False, True, False, *spec)
    operator = torch.ops.moe_kernels.quantized_moe_mlp.default
    out, *saved, _, _, _ = operator(*given)
    assert out.shape == (T, H) and len(saved) == 5
    assert all(x.numel() == 0 for x in saved)
    opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))


def test_operators_of_the_gradient() -> None:
    """Their fake implementations and their registration are checked."""
    x, y = torch.randn(T, H), torch.randn(T, I)
    offsets, rows = torch.tensor([0, 7, 7, T], dtype=torch.int32), torch.arange(T, dtype=torch.int32)
    w = torch.randn(3, H, I)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for transposed in (False, True):
        given: tuple[Any, ...] = (x, y, offsets, rows, None, transposed, torch.bfloat16)
        opcheck(torch.ops.moe_kernels.quantized_wgrad.default, given, test_utils=checks)
    tokens, (data, scales, _) = (x[: T // 2], None), quantize(x, "rowwise")
    for left, slots in ((tokens, rows), ((data.view(torch.uint8), scales), None)):
        given = (*left, w, None, offsets, slots, None, True, True, torch.float32)
        opcheck(torch.ops.moe_kernels.quantized_grouped_gemm.default, given, test_utils=checks)
    order, spec = (torch.rand(T // 2, 2), rows, offsets), ("silu", True, False, 1.702, 7.0)
    for weigh, format in ((True, None), (False, "rowwise"), (True, "1x128")):
        given = (torch.randn(T, 2 * I), None, y, *order, weigh, format, *spec)
        opcheck(torch.ops.moe_kernels.activate_backward.default, given, test_utils=checks)


def test_a_gradient_in_fp8_refuses_gradients() -> None:
    order = (torch.rand(T // 2, 2), torch.arange(T, dtype=torch.int32), torch.tensor([0, T], dtype=torch.int32))
    preact, d_act, spec = torch.randn(T, 2 * I, requires_grad=True), torch.randn(T, I), ("silu", True, False, 1.0, 1.0)
    d_preact, *_ = torch.ops.moe_kernels.activate_backward(preact, None, d_act, *order, False, None, *spec)
    d_preact.sum().backward()
    assert preact.grad is not None and preact.grad.any()
    d_preact, *_ = torch.ops.moe_kernels.activate_backward(preact, None, d_act, *order, False, "rowwise", *spec)
    with pytest.raises(RuntimeError, match="a gradient in fp8 has no gradients"):
        d_preact.sum().backward()


@pytest.mark.parametrize("compute", COMPUTE)
def test_transforms(compute: str) -> None:
    """torch.func gives the same gradients, also per sample."""
    arguments, d_out = make(torch.float32, bias=True), torch.randn(T, H)
    ids = arguments.pop("topk_ids")

    def loss(values: dict[str, Tensor]) -> Tensor:
        return (moe_mlp(topk_ids=ids, **values, compute=compute) * d_out).sum()

    samples = [arguments, {name: x.flip(0) for name, x in arguments.items()}]
    expected = [run({"topk_ids": ids, **one}, d_out, compute=compute) for one in samples]
    single = torch.func.grad(loss)(arguments)
    stacked = {name: torch.stack([one[name] for one in samples]) for name in single}
    both = torch.func.vmap(torch.func.grad(loss))(stacked)
    for name, x in single.items():
        assert torch.equal(x, expected[0][name]), name
        assert torch.equal(both[name], torch.stack([one[name] for one in expected])), name


REFUSED = "neither gradients of gradients nor forward-mode derivatives; pass compute=None"


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("fp8_wgrad", [True, False])
@pytest.mark.parametrize("compute", COMPUTE)
def test_gradients_of_gradients(compute: str, fp8_wgrad: bool, constant: bool) -> None:
    """They are refused for every gradient, also with some arguments frozen, or a constant gradient of the result."""
    arguments, d_out = make(torch.float32, bias=True), torch.randn(T, H, requires_grad=not constant)
    options: dict[str, Any] = {"compute": compute, "fp8_wgrad": fp8_wgrad}
    for trained in (DIFFERENTIABLE, *([name] for name in DIFFERENTIABLE), ("hidden", "gate_up_bias")):
        given = {name: x.detach().requires_grad_(name in trained) for name, x in arguments.items()}
        leaves = [given[name] for name in trained]
        of = leaves if constant else [*leaves, d_out]
        for x in torch.autograd.grad(moe_mlp(**given, **options), leaves, d_out, create_graph=True):
            with pytest.raises(RuntimeError, match=REFUSED):
                torch.autograd.grad(x.square().sum(), of, retain_graph=True, allow_unused=True)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_of_gradients_and_forward_mode_by_transforms(name: str) -> None:
    arguments = {
        "hidden": torch.randn(3, 4),
        "topk_ids": torch.tensor([[0, 1], [1, 2], [-1, 1]]),
        "topk_weights": torch.rand(3, 2),
        "w_gate_up": torch.randn(2, 6, 4),
        "w_down": torch.randn(2, 4, 3),
        "gate_up_bias": torch.randn(2, 6),
        "down_bias": torch.randn(2, 4),
    }
    x = arguments.pop(name)

    def layer(value: Tensor) -> Tensor:
        return moe_mlp(**arguments, **{name: value}, compute="fp8_rowwise")

    def loss(value: Tensor) -> Tensor:
        return layer(value).square().sum()

    def linear(value: Tensor) -> Tensor:
        return layer(value).sum()

    for call in (
        lambda: torch.func.grad(lambda y: torch.func.grad(loss)(y).square().sum())(x),
        lambda: torch.func.grad(lambda y: torch.func.grad(linear)(y).square().sum())(x),
        lambda: torch.autograd.functional.hvp(linear, x, x),
        lambda: torch.func.hessian(loss)(x),
        lambda: torch.func.jvp(layer, (x,), (x,)),
        lambda: torch.no_grad()(torch.func.jvp)(layer, (x,), (x,)),
    ):
        with pytest.raises(RuntimeError, match=REFUSED):
            call()
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=REFUSED):
        layer(forward_ad.make_dual(x, x))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints(use_reentrant: bool) -> None:
    arguments, d_out = make(torch.bfloat16, bias=True), torch.randn(T, H, dtype=torch.bfloat16)
    right = run(arguments, d_out, compute="fp8_block")
    given = [arguments[name].detach().requires_grad_() for name in DIFFERENTIABLE]

    def layer(*values: Tensor) -> Tensor:
        others = dict(zip(DIFFERENTIABLE, values, strict=True))
        return moe_mlp(topk_ids=arguments["topk_ids"], **others, compute="fp8_block")

    checkpoint(layer, *given, use_reentrant=use_reentrant).backward(d_out)
    for name, x in zip(DIFFERENTIABLE, given, strict=True):
        assert torch.equal(x.grad, right[name]), name


@pytest.mark.parametrize("compute", COMPUTE)
def test_what_is_not_saved_is_computed_again(compute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, d_out = make(torch.bfloat16, bias=True), torch.randn(T, H)
    right = run(arguments, d_out, compute=compute)
    monkeypatch.setattr("moe_kernels.experts.differentiated", lambda *_: False)
    for name, x in run(arguments, d_out, compute=compute).items():
        assert torch.equal(x, right[name]), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("compute", COMPUTE)
def test_weights_quantised_before(compute: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and gradients have the same bits, also if nothing is saved; nothing quantises weights again."""
    arguments, d_out = make(torch.bfloat16, bias=True), torch.randn(T, H, dtype=torch.bfloat16)
    changed, d_out = LAYOUTS[layout](arguments, d_out)
    arguments |= changed
    right = run(arguments, d_out, compute=compute)
    for _ in range(2):
        made = run(arguments, d_out, compute=compute, quantized_before=True)
        for name, x in made.items():
            assert torch.equal(x, right[name]) and x.stride() == right[name].stride(), name
        monkeypatch.setattr("moe_kernels.experts.differentiated", lambda *_: False)
    before = [quantize_weight(arguments[name], compute) for name in ("w_gate_up", "w_down")]
    for weight, _, _ in before:
        weight.zero_()
    hidden = arguments["hidden"].detach().requires_grad_()
    out = moe_mlp(**{**arguments, "w_gate_up": before[0], "w_down": before[1], "hidden": hidden}, compute=compute)
    assert torch.equal(out, right["out"])
    assert torch.equal(torch.autograd.grad(out, hidden, d_out)[0], right["hidden"])


@pytest.mark.parametrize("compute", COMPUTE)
def test_weights_quantised_before_in_other_modes(compute: str) -> None:
    """Compiled, as an operator, under torch.func, and on meta tensors."""
    arguments, d_out = make(torch.float32, bias=True), torch.randn(T, H)
    right = run(arguments, d_out, compute=compute)
    ids, names = arguments.pop("topk_ids"), ("w_gate_up", "w_down")

    def layer(values: dict[str, Tensor], parts: list[tuple[ScaledTensor, ...]]) -> Tensor:
        before = {name: QuantizedWeight(values[name], *both) for name, both in zip(names, parts, strict=True)}
        return moe_mlp(topk_ids=ids.to(values["hidden"].device), **{**values, **before}, compute=compute)

    parts = [quantize_weight(arguments[name], compute)[1:] for name in names]
    found = torch.func.grad(lambda values: (layer(values, parts) * d_out).sum())(arguments)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    leaves = {name: x.requires_grad_() for name, x in arguments.items()}
    gradients = torch.autograd.grad(compiled(leaves, parts), list(leaves.values()), d_out)
    for name, x in zip(leaves, gradients, strict=True):
        assert torch.equal(x, right[name]) and torch.equal(found[name], right[name]), name
    tensors = [leaves["hidden"], ids, *(leaves[name] for name in DIFFERENTIABLE[1:])]
    quantized = [x for both in parts for scaled in both for x in scaled[:2]]
    rowwise = compute == "fp8_rowwise"
    options = (rowwise, False, True, True, "silu", True, False, 1.702, 7.0)
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")  # the schema's compares fp8
    opcheck(torch.ops.moe_kernels.quantized_moe_mlp.default, (*tensors, *quantized, *options), test_utils=checks)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(torch.ops.moe_kernels.quantize_weight.default, (arguments["w_down"].detach(), rowwise), test_utils=checks)
    meta = {name: x.detach().to("meta").requires_grad_() for name, x in leaves.items()}
    layer(meta, [quantize_weight(meta[name], compute)[1:] for name in names]).sum().backward()
    for name, x in meta.items():
        assert x.grad is not None and x.grad.stride() == right[name].stride(), name


def gradients_of(call: Any, layer: MoE, tokens: list[Tensor]) -> list[Tensor]:
    """Return the results and gradients of some calls in a row."""
    layer.zero_grad()
    made = []
    for x in tokens:
        x = x.clone().requires_grad_()
        out = call(x)
        out.backward(x.detach().flip(0))
        made += [out.detach(), x.grad]
    return [*made, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]


def quantises(call: Callable[[], Any]) -> bool:
    """Whether a call quantises weights, by what it passes to the operator, or gives it fp8 data."""
    with mock.patch("moe_kernels.experts.ops.quantized_moe_mlp", side_effect=ops.quantized_moe_mlp) as operator:
        call()
    assert operator.call_count == 1
    return operator.call_args.args[7] is None


@pytest.mark.parametrize("compute", COMPUTE)
def test_weights_are_quantised_once(compute: str) -> None:
    """Results and gradients have the same bits within the context, which weights do not outlive."""
    layer = MoE(H, I, E, TOP_K, renormalize=True, compute=compute)
    other = MoE(H, I, E, TOP_K, renormalize=True).quantize("fp8_block")
    model, tokens = torch.nn.ModuleList([other, torch.nn.Sequential(layer)]), [torch.randn(T, H) for _ in range(3)]
    right = gradients_of(layer, layer, tokens)
    assert quantises(lambda: layer(tokens[0]))
    with quantize_once(model):
        for made, expected in zip(gradients_of(layer, layer, tokens), right, strict=True):
            assert torch.equal(made, expected)
        kept = weakref.ref(layer._kept.weights[0].forward.data)
        assert not quantises(lambda: layer(tokens[0]))
        with quantize_once(layer):
            assert not quantises(lambda: layer(tokens[0]))
        assert not quantises(lambda: layer(tokens[0]))
        assert quantises(lambda: copy.deepcopy(layer)(tokens[0]))
        assert quantises(lambda: copy.copy(layer)(tokens[0]))
        assert quantises(lambda: pickle.loads(pickle.dumps(layer))(tokens[0]))
        layer.compute = next(name for name in COMPUTE if name != compute)
        assert quantises(lambda: layer(tokens[0]))
        layer.compute = None
        layer(tokens[0])
        layer.compute = compute
        assert not quantises(lambda: layer(tokens[0]))
    assert quantises(lambda: layer(tokens[0]))
    with pytest.raises(KeyError), quantize_once(model):
        raise KeyError
    assert quantises(lambda: layer(tokens[0]))
    gc.collect()
    assert kept() is None


def test_a_parametrised_layer_is_copied_without_kept_weights() -> None:
    """The classes that PyTorch makes for such modules copy attributes themselves."""
    layer, x = MoE(H, I, E, TOP_K, renormalize=True, compute="fp8_rowwise"), torch.randn(T, H)
    parametrize.register_parametrization(layer, "w_down", torch.nn.Identity())
    with parametrize.cached(), quantize_once(layer):
        assert not quantises(lambda: layer(x))
        copied = copy.deepcopy(layer)
        assert quantises(lambda: copied(x))
    assert quantises(lambda: copied(x))
    with parametrize.cached(), quantize_once(copied):
        assert not quantises(lambda: copied(x))


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_has_no_kept_weights(strict: bool) -> None:
    layer, other = (MoE(H, I, E, TOP_K, renormalize=True, compute="fp8_rowwise") for _ in range(2))
    x = torch.randn(T, H)
    with quantize_once(layer):
        program = torch.export.export(layer, (x,), strict=strict).module()
    program.load_state_dict(other.state_dict(), strict=False)
    assert torch.equal(program(x), other(x))


def test_contexts_that_end_in_any_order() -> None:
    layer, x = MoE(H, I, E, TOP_K, renormalize=True, compute="fp8_block"), torch.randn(T, H)
    contexts = [quantize_once(layer) for _ in range(2)]
    for context in contexts:
        context.__enter__()
    assert not quantises(lambda: layer(x))
    for context in contexts:
        context.__exit__(None, None, None)
        assert quantises(lambda: layer(x))


def test_changed_weights_are_quantised_again() -> None:
    """In place, and replaced, also by tensors that may get the id of the one before."""
    layer, x = MoE(H, I, E, TOP_K, renormalize=True, compute="fp8_block"), torch.randn(T, H)

    def assert_as_outside(weight: Tensor | None = None) -> None:
        given = {} if weight is None else {"w_down": weight}
        made = torch.func.functional_call(layer, given, (x.to(layer.w_down.dtype),))
        outside = copy.deepcopy(layer)
        assert torch.equal(made, torch.func.functional_call(outside, given, (x.to(layer.w_down.dtype),)))

    def load() -> None:
        layer.load_state_dict({name: y.detach() + 1 for name, y in layer.state_dict().items()}, assign=True)

    changes: list[Callable[[], Any]] = [
        lambda: layer.w_down.mul_(2),
        lambda: layer.w_gate_up.add_(1),
        load,
        lambda: setattr(layer.w_down, "data", torch.randn(E, H, I)),
        lambda: layer.bfloat16(),
        lambda: layer.float(),
    ]
    with torch.no_grad():
        for change in changes:
            with quantize_once(layer):
                assert not quantises(lambda: layer(x.to(layer.w_down.dtype)))
                assert_as_outside()
                change()
                assert_as_outside()
        with quantize_once(layer):
            for i in range(20):
                assert_as_outside(torch.randn(E, H, I) * (i + 1))
                del layer.w_down
                layer.w_down = torch.nn.Parameter(torch.randn(E, H, I) * (i + 1))
                assert_as_outside()


def test_weights_are_quantised_once_in_inference_mode() -> None:
    layer, x = MoE(H, I, E, TOP_K, renormalize=True, compute="fp8_rowwise"), torch.randn(T, H)
    right = gradients_of(layer, layer, [x])
    with torch.inference_mode():
        other = MoE(H, I, E, TOP_K, renormalize=True, compute="fp8_rowwise")
        context = quantize_once(torch.nn.ModuleList([layer, other]))
        context.__enter__()
        assert torch.equal(layer(x), right[0])
    for made, expected in zip(gradients_of(layer, layer, [x]), right, strict=True):
        assert torch.equal(made, expected)
    with torch.no_grad():
        assert torch.equal(other(x), other(x))
        assert not quantises(lambda: other(x))
    context.__exit__(None, None, None)


def test_quantize_once_names_the_layer_that_cannot_be_quantised() -> None:
    model = torch.nn.Sequential(*[MoE(H, I, E, TOP_K, renormalize=True, compute="fp8_block") for _ in range(2)])
    model[1].w_down.data = model[1].w_down.data.double()
    with pytest.raises(TypeError, match=r"^1\.w_down: .* got torch\.float64$"), quantize_once(model):
        pass
    model[0].compute = "fp8"
    for module, name in ((model, "0"), (model[0], "MoE")):
        with pytest.raises(ValueError, match=rf"^{name}\.compute: .* got 'fp8'$"), quantize_once(module):
            pass
    assert all(layer._kept is None for layer in model)


def test_weights_are_quantised_once_in_compiled_code() -> None:
    """Code is compiled once for all contexts; it quantises no weights, but those that are passed in their place."""
    torch._dynamo.reset()
    layer = MoE(H, I, E, TOP_K, renormalize=True, compute="fp8_block")
    tokens = [torch.randn(T, H) for _ in range(3)]
    backend = torch._dynamo.testing.EagerAndRecordGraphs()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for factor in (1.0, 2.0):
        with torch.no_grad():
            layer.w_gate_up.mul_(factor)
        right = gradients_of(layer, layer, tokens)
        with quantize_once(layer):
            for made, expected in zip(gradients_of(compiled, layer, tokens), right, strict=True):
                assert torch.equal(made, expected)
    assert len(backend.graphs) == 1
    other = {"w_down": torch.randn(E, H, I)}
    with quantize_once(layer):
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for made, expected in zip(gradients_of(compiled, layer, tokens), right, strict=True):
            assert torch.equal(made, expected)
        with torch.no_grad():
            made = torch.compile(torch.func.functional_call, backend="aot_eager")(layer, other, (tokens[0],))
    assert torch.equal(made, torch.func.functional_call(layer, other, (tokens[0],)))
    with torch.no_grad(), quantize_once(layer):
        compiled(tokens[0])
        layer.bfloat16().float()  # rounds the weights, whose versions compiled code does not see
        assert torch.equal(compiled(tokens[0]), copy.deepcopy(layer)(tokens[0]))


@pytest.mark.parametrize("compute", COMPUTE)
def test_weights_are_quantised_once_with_checkpoints(compute: str) -> None:
    """Of both kinds, selective, around compiled code, and in it."""
    torch._dynamo.reset()
    layer, tokens = MoE(H, I, E, TOP_K, renormalize=True, compute=compute), [torch.randn(T, H) for _ in range(2)]
    right = gradients_of(layer, layer, tokens)
    compiled = torch.compile(layer, backend="aot_eager")
    every = partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda x: checkpoint(layer, x, use_reentrant=False),
        lambda x: checkpoint(layer, x, use_reentrant=True),
        lambda x: checkpoint(layer, x, use_reentrant=False, context_fn=every),
        lambda x: checkpoint(compiled, x, use_reentrant=False),
        torch.compile(lambda x: checkpoint(layer, x, use_reentrant=False), fullgraph=True, backend="aot_eager"),
    ]
    for call in calls:
        with quantize_once(layer):
            found = gradients_of(call, layer, tokens)
        for made, expected in zip(found, right, strict=True):
            assert torch.equal(made, expected)


@pytest.mark.parametrize("compute", COMPUTE)
def test_a_repeated_call_may_find_weights_elsewhere(compute: str) -> None:
    """As with FSDP2, which gathers weights again for the backward pass."""
    layer, tokens = MoE(H, I, E, TOP_K, renormalize=True, compute=compute), [torch.randn(T, H) for _ in range(2)]
    right = gradients_of(layer, layer, tokens)

    def call(x: Tensor) -> Tensor:
        out = checkpoint(layer, x, use_reentrant=False)
        with torch.no_grad():
            for weight in (layer.w_gate_up, layer.w_down):
                weight.data = weight.data.clone()
        return out

    with quantize_once(layer):
        found = gradients_of(call, layer, tokens)
    for made, expected in zip(found, right, strict=True):
        assert torch.equal(made, expected)


def test_weights_of_transforms_are_not_those_that_are_kept() -> None:
    layer = MoE(H, I, E, TOP_K, renormalize=True, compute="fp8_rowwise")
    hidden, parameters = torch.randn(T, H), {name: p.detach() for name, p in layer.named_parameters()}

    def loss(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layer, values, (hidden,)).square().sum()

    right = torch.func.grad(loss)(parameters)
    with quantize_once(layer):
        for name, x in torch.func.grad(loss)(parameters).items():
            assert torch.equal(x, right[name]), name


def test_quantize_once_of_fake_weights() -> None:
    """A fake tensor has no address; PyTorch warns when it is asked for one."""
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = MoE(256, 128, 4, 2, renormalize=True, compute="fp8_rowwise")
        with quantize_once(layer):
            assert layer(torch.randn(3, 256)).shape == (3, 256)


@torch.no_grad()
def test_quantize_once_leaves_layers_in_fp8_alone() -> None:
    layer = MoE(H, I, E, TOP_K, renormalize=True, compute="fp8_block").quantize("fp8_block")
    hidden = torch.randn(T, H)
    right = layer(hidden)
    with quantize_once(layer):
        assert torch.equal(layer(hidden), right)


def test_quantize_once_refuses() -> None:
    for module in (None, [MoE(H, I, E, TOP_K, renormalize=True)]):
        with pytest.raises(TypeError, match=r"^module: expected an nn\.Module, got"), quantize_once(module):
            pass
    model = torch.nn.ModuleList(MoE(H, I, E, TOP_K, renormalize=True, compute="fp8_block") for _ in range(2))
    model[1].double()
    with pytest.raises(TypeError, match=r"^1\.w_gate_up: expected bfloat16, float16 or float32"), quantize_once(model):
        pass
    assert quantises(lambda: model[0](torch.randn(T, H)))


@pytest.mark.parametrize("compute", COMPUTE)
def test_no_tokens_and_no_slots(compute: str) -> None:
    arguments, d_out = make(torch.float32, bias=True), torch.randn(T, H)
    empty = {name: arguments[name][:0] for name in ("hidden", "topk_ids", "topk_weights")}
    dropped = {"topk_ids": torch.full((T, TOP_K), E)}
    for changes, d in ((empty, d_out[:0]), (dropped, d_out)):
        made = run({**arguments, **changes}, d, compute=compute)
        assert made["out"].shape == d.shape
        for name, x in made.items():
            assert not x.any(), name
            assert name == "out" or x.shape == (arguments | changes)[name].shape, name


@pytest.mark.parametrize(("H", "I", "E"), [(16, 0, 2), (0, 4, 2), (0, 0, 2), (16, 4, 0)])
@pytest.mark.parametrize("compute", COMPUTE)
def test_sizes_of_zero(compute: str, H: int, I: int, E: int) -> None:  # noqa: E741
    given = {"hidden": torch.randn(3, H), "topk_ids": torch.zeros(3, 2, dtype=torch.int64)}
    given |= {"topk_weights": torch.rand(3, 2), "w_gate_up": torch.randn(E, 2 * I, H), "w_down": torch.randn(E, H, I)}
    for name, x in run(given, torch.randn(3, H), compute=compute).items():
        assert x.shape == given["hidden" if name == "out" else name].shape and not x.any(), name


@pytest.mark.parametrize("compute", COMPUTE)
def test_autocast_and_without_gradients(compute: str) -> None:
    """Autocast casts hidden states and nothing else."""
    arguments, d_out = make(torch.float32, bias=True), torch.randn(T, H)
    right = run(arguments | {"hidden": arguments["hidden"].bfloat16()}, d_out, compute=compute)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = run(arguments, d_out, compute=compute)
    for name, x in made.items():
        assert x.dtype == (torch.bfloat16 if name == "out" else torch.float32), name
        assert torch.equal(x, right[name].to(x.dtype)), name
    given = arguments | {name: arguments[name].clone().requires_grad_() for name in DIFFERENTIABLE}
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            out = moe_mlp(**given, compute=compute)
        assert not out.requires_grad
        assert torch.equal(out, run(arguments, d_out, compute=compute)["out"])


@pytest.mark.parametrize("compute", [None, *COMPUTE])
@pytest.mark.parametrize(("H", "I"), [(1, 4), (4, 1), (1, 1)])
def test_weights_gradients_lie_as_the_weights_with_a_size_of_one(compute: str | None, H: int, I: int) -> None:  # noqa: E741
    """`DistributedDataParallel` warns of other strides."""
    layer = MoE(H, I, E, TOP_K, renormalize=True, compute=compute)
    layer(torch.randn(5, H)).sum().backward()
    for name in ("w_gate_up", "w_down"):
        weight = getattr(layer, name)
        assert weight.grad.stride() == weight.stride(), name


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


def test_layer_from_experts() -> None:
    experts = [torch.nn.Sequential(*(torch.nn.Linear(*s, bias=False) for s in ((H, I), (I, H)))) for _ in range(E)]
    for expert in experts:
        expert.insert(1, torch.nn.ReLU())
    options = {"top_k": TOP_K, "renormalize": True}
    layer = MoE.from_experts(experts, torch.randn(E, H), **options, compute="fp8_block", fp8_wgrad=False)
    assert (layer.compute, layer.fp8_wgrad, layer.fast_accumulation) == ("fp8_block", False, False)
    assert MoE.from_experts(experts, **options, fast_accumulation=True).fast_accumulation
    exact = MoE.from_experts(experts, layer.router, **options)
    hidden = torch.randn(T, H)
    with torch.no_grad():
        assert 0.005 < difference(layer(hidden), exact(hidden)) < 0.08
    with pytest.raises(ValueError, match="compute"):
        MoE.from_experts(experts, **options, compute="fp8")


def test_compiled_without_graph_breaks_for_any_number_of_tokens() -> None:
    torch._dynamo.reset()
    layer = MoE(H, I, E, TOP_K, renormalize=True, compute="fp8_block")
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (5, 9, 17):
        gradients = []
        hidden, d_out = torch.randn(tokens, H), torch.randn(tokens, H)
        for call in (layer, compiled):
            x = hidden.clone().requires_grad_()
            out = call(x)
            gradients.append([out, *torch.autograd.grad(out, [x, *layer.parameters()], d_out)])
        for eager, found in zip(*gradients, strict=True):
            torch.testing.assert_close(found, eager)
    assert counter.frame_count <= 2


def test_what_is_made_ahead() -> None:
    layer = MoE(256, 128, 8, 2, renormalize=True, compute="fp8_block", device="meta", dtype=torch.bfloat16)

    def call() -> None:
        (one,) = layers_of(layer)
        hidden = torch.empty(64, 256, dtype=torch.bfloat16, device="meta", requires_grad=True)
        one(hidden).backward(torch.empty(64, 256, dtype=torch.bfloat16, device="meta"))

    wanted = [one.operator for one in collect([call])]
    assert wanted.count("quantized_wgrad") == 2
    assert wanted.count("quantized_grouped_gemm") == 2
    assert wanted.count("quantized_moe_mlp") == 1
    assert "grouped_gemm_wgrad" not in wanted
    both = [one.operator for one in collect([partial(ahead._run_module, layer, 64, True)])]
    assert sorted(set(both)) == sorted({*wanted, "quantize_weight"})
    assert both.count("quantized_moe_mlp") == both.count("quantize_weight") == 2


GOOD = make(torch.bfloat16)
QUANTIZED = quantize(GOOD["w_down"], "rowwise")
BEFORE = {name: quantize_weight(GOOD[name], "fp8_block") for name in ("w_gate_up", "w_down")}
OF_E5M2 = quantize(GOOD["w_down"], "128x128", dtype=torch.float8_e5m2)
ON_META = ScaledTensor(*(part.to("meta") for part in BEFORE["w_down"].forward[:2]), BEFORE["w_down"].forward.format)
SHORT = BEFORE["w_down"].backward._replace(scales=BEFORE["w_down"].backward.scales[:, :1])


def spoilt(**parts: Any) -> dict[str, Any]:
    return {**BEFORE, "w_down": BEFORE["w_down"]._replace(**parts)}


REFUSALS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"compute": "fp8"}, ValueError, "compute: expected None or one of 'fp8_block', 'fp8_rowwise', got 'fp8'"),
    ({"compute": ["fp8_block"]}, ValueError, "compute: expected None or one of"),
    ({"w_gate_up": [1.0]}, TypeError, "w_gate_up: expected a torch.Tensor, got list"),
    ({"w_down": None}, TypeError, "w_down: expected a torch.Tensor, got NoneType"),
    ({"w_down": QUANTIZED}, ValueError, "compute: expected None for weights in fp8.*w_down is a ScaledTensor"),
    ({"transposed": True}, ValueError, "transposed: expected False for products in fp8, got True.* such as w.mT"),
    ({"w_up": GOOD["w_down"].mT}, ValueError, r"w_up: expected None for products in fp8, got a value.*torch\.cat"),
    ({"up_bias": torch.ones(E, I)}, ValueError, "up_bias: expected None without w_up"),
    ({"hidden": torch.ones(T, H).double()}, TypeError, "hidden: expected bfloat16, float16 or float32, got torch.fl"),
    ({"w_down": GOOD["w_down"].double()}, TypeError, "w_down: expected bfloat16, float16 or float32, got torch.fl"),
    ({"w_down": GOOD["w_down"][:, 1:]}, ValueError, r"w_down: expected shape \[E, H, I\]"),
    ({"down_bias": torch.ones(E, H + 1)}, ValueError, r"down_bias: expected shape \[E, H\]"),
    ({"activation": "swish"}, ValueError, "activation: expected one of"),
    ({"fast_accumulation": True}, ValueError, "fast_accumulation: expected False for '1x128' and '128x128'"),
    ({"validate": True}, ValueError, r"topk_ids\[2, 1\]: expected 0 to 3, got -1"),
    ({"w_down": BEFORE["w_down"]}, TypeError, "w_gate_up: expected a QuantizedWeight, as the other weight, got Tensor"),
    ({**BEFORE, "compute": "fp8_rowwise"}, ValueError, "w_gate_up.forward: expected the format 'rowwise' for compute="),
    (
        {**BEFORE, "compute": None},
        TypeError,
        "w_gate_up: expected a torch.Tensor, got QuantizedWeight; it is for",
    ),
    ({**BEFORE, "transposed": True}, ValueError, "transposed: expected False for products in fp8"),
    (spoilt(weight=GOOD["w_down"][:, 1:]), ValueError, r"w_down: expected shape \[E, H, I\]"),
    (spoilt(weight=None), TypeError, "w_down: expected a torch.Tensor, got NoneType"),
    (spoilt(forward=GOOD["w_down"]), TypeError, "w_down.forward: expected a ScaledTensor, got Tensor"),
    (spoilt(forward=OF_E5M2), TypeError, "w_down.forward.data: expected float8_e4m3fn, got torch.float8_e5m2"),
    (spoilt(backward=BEFORE["w_down"].forward), ValueError, r"w_down.backward.data: .* = \[4, 136, 160\]"),
    (spoilt(backward=SHORT), ValueError, r"w_down.backward.scales: .* = \[4, 2, 2\], got \[4, 1, 2\]"),
    (spoilt(forward=ON_META), ValueError, "w_down.forward.data: expected on cpu with w_down.weight, got on meta"),
]


@pytest.mark.parametrize(
    ("change", "error", "text"), REFUSALS, ids=[f"{', '.join(change)}: {text}" for change, _, text in REFUSALS]
)
def test_refuses(change: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        moe_mlp(**{**GOOD, "compute": "fp8_block", **change})


def test_quantize_weight_refuses() -> None:
    for weight, compute, error, text in (
        (GOOD["w_down"], "rowwise", ValueError, "compute: expected one of 'fp8_block', 'fp8_rowwise', got 'rowwise'"),
        (GOOD["w_down"], None, ValueError, "compute: expected one of 'fp8_block', 'fp8_rowwise', got None"),
        (GOOD["w_down"][0], "fp8_block", ValueError, r"weight: expected shape \[E, N, K\], got \[160, 136\]"),
        (GOOD["w_down"].double(), "fp8_block", TypeError, "weight: expected bfloat16, float16 or float32, got"),
        (BEFORE["w_down"], "fp8_block", TypeError, "weight: expected a torch.Tensor, got QuantizedWeight"),
    ):
        with pytest.raises(error, match=text):
            quantize_weight(weight, compute)


def test_layer_refuses() -> None:
    with pytest.raises(ValueError, match="compute: expected None or one of"):
        MoE(H, I, E, TOP_K, renormalize=True, compute="fp8")
    with pytest.raises(TypeError, match=r"^dtype: expected bfloat16, float16 or float32, got torch\.float64"):
        MoE(H, I, E, TOP_K, renormalize=True, compute="fp8_block", dtype=torch.float64)
