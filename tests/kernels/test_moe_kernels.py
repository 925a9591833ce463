"""Experts and their layer with the kernels, forward and all gradients, against fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from moe_kernels import MoE, group_offsets_from_sizes, moe_mlp, reference, route, swiglu_ffn
from moe_kernels.glu import ACTIVATIONS, CLAMPED, GLUSpec
from moe_kernels.kernels import layer as planners
from moe_kernels.kernels import one_token
from moe_kernels.ops import activate, activate_backward
from moe_kernels.rules import layer as rules
from moe_kernels.runtime import cache, symbolic, torch_internals
from moe_kernels.runtime import compile as compiler
from moe_kernels.runtime.cache import isolated
from moe_kernels.testing import assert_within_budget

NAN = float("nan")
LAYERS: dict[str, dict[str, Any]] = {
    "SwiGLU": {},
    "two weights, biases": {"two": True, "bias": True, "activation": "gelu"},
    "gpt-oss": {"interleaved": True, "transposed": True, "bias": True, "activation": "clamped_swiglu", "limit": 5.0},
    "DeepSeek-V4": {"activation": "clamped_silu", "limit": 5.0},
    "without a gate": {"gated": False, "activation": "relu_squared", "transposed": True},
}


def make(
    layer: dict[str, Any],
    T: int,
    H: int,
    I: int,  # noqa: E741
    E: int,
    top_k: int,
    device: str,
    dtype: torch.dtype,
    kind: str = "uniform",
) -> tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]:
    """Return tensors, ids, some of them dropped, and options; scaled so that the outputs are O(1)."""
    options = dict(layer)
    two, bias = options.pop("two", False), options.pop("bias", False)
    transposed = options.get("transposed", False)
    W = 2 * I if options.get("gated", True) and not two else I

    def weight(outputs: int, inputs: int) -> torch.Tensor:
        shape = (E, inputs, outputs) if transposed else (E, outputs, inputs)
        return (2 * torch.randn(shape, device=device) * max(inputs, 1) ** -0.5).to(dtype)

    tensors = {
        "hidden": torch.randn(T, H, device=device).to(dtype),
        "topk_weights": torch.rand(T, top_k, device=device) + 0.1,
        "w_gate_up": weight(W, H),
        "w_down": weight(H, I),
    }
    if two:
        tensors["w_up"] = weight(I, H)
    if bias:
        tensors |= {"gate_up_bias": torch.randn(E, W, device=device), "down_bias": torch.randn(E, H, device=device)}
        if two:
            tensors["up_bias"] = torch.randn(E, I, device=device)
    ids = torch.rand(T, E).topk(top_k).indices if kind == "uniform" else torch.full((T, top_k), E // 2)
    ids = torch.where(torch.rand(T, top_k) < 0.1, torch.full_like(ids, E), ids)
    return tensors, ids.to(device), options


def run(function: Any, tensors: dict[str, torch.Tensor], ids: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    others = {
        key: value for key, value in tensors.items() if key not in ("hidden", "topk_weights", "w_gate_up", "w_down")
    }
    first = (tensors["topk_weights"], tensors["w_gate_up"], tensors["w_down"])
    out: torch.Tensor = function(tensors["hidden"], ids, *first, **others, **options)
    return out


def with_gradients(
    function: Any, tensors: dict[str, torch.Tensor], ids: torch.Tensor, options: dict[str, Any], upstream: torch.Tensor
) -> dict[str, torch.Tensor]:
    tensors = {key: value.detach().requires_grad_() for key, value in tensors.items()}
    out = run(function, tensors, ids, options)
    grads = torch.autograd.grad(out, list(tensors.values()), upstream.to(out.dtype))
    return {"out": out.detach(), **dict(zip(tensors, grads, strict=True))}


def in_float64(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors in float64 on the CPU, where the references accept it."""
    return {key: value.cpu().double() for key, value in tensors.items()}


def assert_layer_close(tensors: dict[str, torch.Tensor], ids: torch.Tensor, options: dict[str, Any]) -> None:
    upstream = torch.randn_like(tensors["hidden"])
    ours = with_gradients(moe_mlp, tensors, ids, options, upstream)
    plain = with_gradients(reference.moe_mlp, tensors, ids, options, upstream)
    exact = with_gradients(reference.moe_mlp, in_float64(tensors), ids.cpu(), options, upstream.cpu().double())
    for name, value in ours.items():
        # Sums in fp32 are long, and those of absolute values about ten times as large as the result; for topk_weights a
        # hundred times, since an expert's result and the upstream gradient are nearly orthogonal.
        scale = (128 if name == "topk_weights" else 16) * exact[name].abs().max().item()
        assert_within_budget(value, plain[name], exact[name].to(value.device), scale=scale, name=name)
        assert value.stride() == plain[name].stride() or name == "out" or value.is_contiguous()


@pytest.mark.parametrize("name", ["SwiGLU", "gpt-oss", "DeepSeek-V4"])
def test_layers(name: str, device: str) -> None:
    assert_layer_close(*make(LAYERS[name], 20, 24, 40, 5, 2, device, torch.float16))


@pytest.mark.parametrize("name", ["two weights, biases", "without a gate"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_of_other_layers_and_dtypes(name: str, dtype: torch.dtype, device: str) -> None:
    if (name, dtype) == ("without a gate", torch.float32) and device == "cpu":
        pytest.skip("enough in the interpreter")
    tensors, ids, options = make(LAYERS[name], 20, 24, 40, 5, 2, device, dtype)
    exact = run(reference.moe_mlp, in_float64(tensors), ids.cpu(), options).to(device)
    plain = run(reference.moe_mlp, tensors, ids, options)
    out = run(moe_mlp, tensors, ids, options)
    assert_within_budget(out, plain, exact, scale=16 * exact.abs().max().item())


def test_few_tokens(device: str) -> None:
    # In float32, because the rounding of an expert with a row or two depends on chance.
    tensors, ids, options = make({}, 2, 24, 40, 5, 4, device, torch.float32)
    ids[ids == 5] = 0
    assert_layer_close(tensors, ids, options)


@pytest.fixture
def of_one_token(fresh_plans: None, monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Record the dtype of each plan created with the kernels for one token."""
    made: list[torch.dtype] = []

    def multiply(builder: Any, hidden: Any, *rest: Any) -> Any:
        made.append(hidden.dtype)
        return one_token.multiply_one_token(builder, hidden, *rest)

    monkeypatch.setattr(planners, "multiply_one_token", multiply)
    return made


ONE_TOKEN: dict[str, dict[str, Any]] = {
    "SwiGLU": {},
    "two weights, biases": LAYERS["two weights, biases"],
    "gpt-oss's, by rows": LAYERS["gpt-oss"] | {"transposed": False},
    "DeepSeek-V4": LAYERS["DeepSeek-V4"] | {"limit": 1.0},
    "without a gate": {"gated": False, "activation": "relu_squared", "bias": True},
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        # The interpreter emulates bfloat16, which is slow.
        pytest.param(name, dtype, marks=[pytest.mark.gpu] * (dtype == torch.bfloat16 and name != "SwiGLU"))
        for name in ONE_TOKEN
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    ],
    ids=str,
)
@pytest.mark.usefixtures("few_programs")
def test_one_token(name: str, dtype: torch.dtype, of_one_token: list[torch.dtype], device: str) -> None:
    """A slot is dropped, an expert is chosen twice, and the weights of the other experts must not be read."""
    H, I = (1100, 72) if device == "cuda" else (40, 24)  # noqa: E741
    tensors, ids, options = make(ONE_TOKEN[name], 1, H, I, 5, 4, device, dtype)
    ids.copy_(torch.tensor([[3, -1, 1, 3]]))
    tensors["topk_weights"][0, 1] = NAN
    plain = {key: value.clone() for key, value in tensors.items()}
    plain["topk_weights"][0, 1] = 0.0
    for key, value in tensors.items():
        if key not in ("hidden", "topk_weights"):
            value[[0, 2, 4]] = NAN
    exact = run(reference.moe_mlp, in_float64(plain), ids.cpu(), options).to(device)
    expected = run(reference.moe_mlp, plain, ids, options)
    for _ in range(3 if device == "cuda" else 1):  # the second and third calls may be repeats
        out = run(moe_mlp, tensors, ids, options)
        assert_within_budget(out, expected, exact, scale=16 * exact.abs().max().item())
    assert of_one_token == [dtype]
    ids.fill_(5)
    assert not run(moe_mlp, tensors, ids, options).any()


@pytest.mark.parametrize(("E", "H", "I", "top_k"), [(1, 1, 1, 1), (1, 8, 8, 1), (3, 1, 5, 2), (3, 5, 1, 2)])
def test_one_token_of_small_extents_and_odd_strides(
    E: int,
    H: int,
    I: int,  # noqa: E741
    top_k: int,
    of_one_token: list[torch.dtype],
    device: str,
) -> None:
    tensors, _, options = make({"bias": True}, 1, H, I, E, top_k, device, torch.float16)
    tensors["hidden"] = torch.randn(H, 3, device=device).half()[:, 1:2].T
    tensors["topk_weights"] = tensors["topk_weights"][:, :1].expand(1, top_k)
    ids = torch.randint(E, (1, 2 * top_k), dtype=torch.int32, device=device)[:, ::2]
    exact = run(reference.moe_mlp, in_float64(tensors), ids.cpu(), options).to(device)
    out = run(moe_mlp, tensors, ids, options)
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)
    assert of_one_token == [torch.float16]


@pytest.mark.usefixtures("fresh_plans")
@pytest.mark.parametrize("name", ["hidden", "topk_ids", "topk_weights", "down_bias"])
def test_one_token_with_a_long_span(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses have 64 bits even if a small tensor is a view that spans more than 2^31 elements."""
    int64_index = []

    def lowered(request: Any, gpu: Any) -> Any:
        int64_index.append(request.int64_index)
        return lower(request, gpu)

    lower = compiler.lower
    monkeypatch.setattr(compiler, "lower", lowered)
    monkeypatch.setattr(symbolic, "INT32_MAX", 1000)
    tensors, ids, options = make({"bias": True}, 1, 8, 8, 3, 2, device, torch.float16)

    def far_apart(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x] * 1001, -1)[..., 0]

    if name == "topk_ids":
        ids = far_apart(ids)
    else:
        tensors[name] = far_apart(tensors[name])
    exact = run(reference.moe_mlp, in_float64(tensors), ids.cpu(), options).to(device)
    out = run(moe_mlp, tensors, ids, options)
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)
    assert int64_index == [True, True]


def test_one_token_overflows_as_others_do(of_one_token: list[torch.dtype], device: str) -> None:
    tensors, ids, options = make({"bias": True}, 1, 24, 16, 3, 2, device, torch.float16)
    ids.copy_(torch.tensor([[0, 2]]))
    tensors["w_down"][2] *= 2e4  # some results of a row exceed 65504; a tenth of them does not
    tensors["topk_weights"].copy_(torch.tensor([[1.0, 0.1]]))
    expected = run(reference.moe_mlp, tensors, ids, options)
    out = run(moe_mlp, tensors, ids, options)
    assert of_one_token == [torch.float16]
    assert expected.isinf().any()
    assert expected.isfinite().any()
    torch.testing.assert_close(out, expected, rtol=0.0, atol=2e-3 * 65504)


def test_one_token_with_many_slots(
    of_one_token: list[torch.dtype], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels for one token would take long to compile for more than a few."""
    monkeypatch.setattr(rules, "_MOST_SLOTS", 2)
    for top_k, plans in ((3, 0), (2, 1)):
        tensors, ids, options = make({}, 1, 16, 8, 3, top_k, device, torch.float16)
        exact = run(reference.moe_mlp, in_float64(tensors), ids.cpu(), options).to(device)
        expected = run(reference.moe_mlp, tensors, ids, options)
        out = run(moe_mlp, tensors, ids, options)
        assert_within_budget(out, expected, exact, scale=16 * exact.abs().max().item())
        assert len(of_one_token) == plans


@pytest.mark.parametrize(("T", "H", "I"), [(0, 8, 16), (4, 0, 16), (4, 8, 0)])
def test_extents_of_zero(T: int, H: int, I: int, device: str) -> None:  # noqa: E741
    tensors, ids, options = make({"two": True, "bias": True}, T, H, I, 3, 2, device, torch.float32)
    upstream = torch.randn(T, H, device=device)
    ours = with_gradients(moe_mlp, tensors, ids, options, upstream)
    expected = with_gradients(reference.moe_mlp, tensors, ids, options, upstream)
    torch.testing.assert_close(ours, expected)


def test_without_gradients_it_gives_the_same_bits(device: str) -> None:
    tensors, ids, options = make({}, 20, 24, 40, 5, 2, device, torch.float16)
    inference = run(moe_mlp, tensors, ids, options)
    for _ in range(3 if device == "cuda" else 1):
        assert torch.equal(inference, run(moe_mlp, tensors, ids, options))
    tensors["hidden"].requires_grad_()
    assert torch.equal(run(moe_mlp, tensors, ids, options).detach(), inference)


@pytest.mark.parametrize(
    ("name", "up_bias", "biases"),
    [
        ("SwiGLU", True, torch.float16),
        ("gpt-oss", True, torch.float16),
        ("gpt-oss", True, torch.float32),
        ("two weights, biases", True, torch.float16),
        ("two weights, biases", False, torch.float16),
    ],
)
def test_calls_like_an_earlier_one(
    name: str, up_bias: bool, biases: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call has new tensors, perhaps with another number of tokens; without a second weight they are repeats."""
    monkeypatch.setattr(torch_internals, "on_current_device", lambda tensor: True)
    layer = LAYERS[name] | {"bias": True, "interleaved": False}
    with isolated():
        for T in (6, 6, 7, 5):
            tensors, ids, options = make(layer, T, 24, 40, 5, 2, device, torch.float16)
            tensors = {key: value.to(biases) if key.endswith("bias") else value for key, value in tensors.items()}
            if not up_bias:
                tensors.pop("up_bias", None)
            out = run(moe_mlp, tensors, ids, options)
            exact = run(reference.moe_mlp, in_float64(tensors), ids.cpu(), options).to(device)
            plain = run(reference.moe_mlp, tensors, ids, options)
            assert_within_budget(out, plain, exact, scale=16 * exact.abs().max().item())
        assert [operator for operator, *_ in cache.plans.entries] == ["moe_mlp"]
        assert len(cache.plans.recent.get("moe_mlp", ())) == ("w_up" not in tensors)
        for option in ("transposed", "gated", "interleaved"):
            value = int(options.get(option, option == "gated"))
            with pytest.raises(TypeError, match=f"^{option}: expected True or False, got {value}"):
                run(moe_mlp, tensors, ids, options | {option: value})
        for option, default in (("alpha", 1.702), ("limit", 7.0)):
            value = torch.tensor(options.get(option, default), dtype=torch.float64)  # equal, but not a number
            with pytest.raises(TypeError, match=rf"^{option}: expected a number, got torch\.Tensor"):
                run(moe_mlp, tensors, ids, options | {option: value})


def test_a_second_weight_that_lies_elsewhere(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up can be read as one tensor if they are adjacent in memory, which may not hold in the next call."""
    monkeypatch.setattr(torch_internals, "on_current_device", lambda tensor: True)
    E, I, H = 2, 16, 24  # noqa: E741
    tensors, ids, options = make({}, 130, H, I, E, 2, device, torch.float16)
    both = tensors["w_gate_up"]
    with isolated():
        for up in (both, both, both, both.flip(0), both.flip(0)):
            weights = {"w_gate_up": both[:, :I], "w_up": up[:, I:]}
            out = run(moe_mlp, tensors | weights, ids, options)
            expected = run(reference.moe_mlp, tensors | weights, ids, options)
            torch.testing.assert_close(out, expected, rtol=1e-2, atol=3e-2)
        assert [operator for operator, *_ in cache.plans.entries] == ["moe_mlp", "moe_mlp"]


def test_dropped_tokens_and_experts_without_tokens(device: str) -> None:
    tensors, ids, options = make({}, 20, 24, 40, 5, 2, device, torch.float16)
    ids[3] = -1
    ids[ids == 2] = 0
    tensors["hidden"][3] = NAN
    tensors["w_gate_up"][2] = NAN
    tensors["w_down"][2] = NAN
    upstream = torch.randn(20, 24, device=device).half()
    ours = with_gradients(moe_mlp, tensors, ids, options, upstream)
    for name in ("out", "hidden", "topk_weights"):
        assert ours[name].isfinite().all(), name
        assert not ours[name][3].any(), name
    for name in ("w_gate_up", "w_down"):
        assert ours[name].isfinite().all(), name
        assert not ours[name][2].any(), name


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activations(activation: str, dtype: torch.dtype, device: str) -> None:
    routing = route(torch.tensor([[0, 1], [5, 2], [1, 1]], device=device), torch.rand(3, 2, device=device), 3)
    order = (routing.topk_weights, routing.row_to_slot, routing.group_offsets)
    tolerance = {"rtol": 1e-5 if dtype == torch.float32 else 1e-2, "atol": 1e-5}
    for gated, two in ((True, False), (True, True), (False, False)):
        if device == "cpu" and (gated, two) != (True, activation == "silu"):
            continue
        if activation in CLAMPED and not gated:
            continue
        spec = GLUSpec(activation, gated, gated and not two and dtype == torch.float32, 1.3, 0.7)
        preact = torch.randn(6, 40, device=device).to(dtype)
        preact_up = torch.randn(6, 40, device=device).to(dtype) if two else None
        act = activate(preact, preact_up, *spec)
        torch.testing.assert_close(act, reference.activate(preact, preact_up, spec), **tolerance)
        d = torch.randn(6, act.size(1), device=device).to(dtype)
        for arguments in ((None, None, None), order):
            found = activate_backward(preact, preact_up, d, *arguments, arguments is order, None, *spec)
            expected = reference.activate_backward(preact, preact_up, d, *arguments, spec)
            for x, y in zip(found, (*expected, None, None), strict=True):
                if y is None:
                    assert x.numel() == 0
                else:
                    torch.testing.assert_close(x, y, **tolerance)
        unweighted = activate_backward(preact, preact_up, d, *order, False, None, *spec)
        assert unweighted[2].numel() == 0
        assert all(torch.equal(x, y) for i, (x, y) in enumerate(zip(unweighted, found, strict=True)) if i != 2)


def test_weights_of_slots_in_the_other_memory_order(device: str) -> None:
    ids, topk_weights = torch.tensor([[0, 1], [5, 2], [1, 1]], device=device), torch.rand(2, 3, device=device).T
    group_offsets, row_to_slot, *_ = route(ids, topk_weights, 3)
    preact, d = torch.randn(6, 40, device=device), torch.randn(6, 20, device=device)
    spec = GLUSpec("silu", True, False, 1.0, 1.0)
    found, expected = (
        activate_backward(preact, None, d, w, row_to_slot, group_offsets, True, None, *spec)
        for w in (topk_weights, topk_weights.contiguous())
    )
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("activation", sorted(set(ACTIVATIONS) - set(CLAMPED)))
@pytest.mark.parametrize("function", [activate_backward, None], ids=["kernel", "reference"])
def test_derivative_in_float32(function: Any, activation: str, device: str) -> None:
    spec = GLUSpec(activation, False, False, 1.0, 1.0)
    x = torch.linspace(-3, 3, 4096, device=device).view(8, 512)
    exact_x = x.double().requires_grad_()
    (exact,) = torch.autograd.grad(reference.activate(exact_x, None, spec).sum(), exact_x)
    if function is None:
        found = reference.activate_backward(x, None, torch.ones_like(x), None, None, None, spec)
    else:
        found = function(x, None, torch.ones_like(x), None, None, None, False, None, *spec)
    assert (found[0] - exact).abs().max() < 6e-7  # a difference that cancels has 8e-7


@pytest.mark.parametrize("activation", ["relu", *CLAMPED])
def test_derivative_where_it_jumps(activation: str, device: str) -> None:
    """relu has the derivative 0 at 0, and a clamp has 1 at its limits (0 for torch.clamp since PyTorch 2.15)."""
    spec = GLUSpec(activation, True, False, 1.3, 7.0)
    gate = torch.tensor([0.0, 0.0, 7.0, 7.0, 7.5, 1.0, 1.0, 1.0], device=device)
    up = torch.tensor([2.0, -7.0, 7.0, 1.0, 1.0, -7.0, 7.0, 7.5], device=device)
    preact = torch.cat((gate, up))[None].requires_grad_()
    g, u = preact.chunk(2, 1)
    if activation in CLAMPED:
        g, u = g.where(g <= 7, 7), u.where(u.abs() <= 7, 7 * u.sign())
    f = torch.relu(g) if activation == "relu" else g * torch.sigmoid((1.3 if activation == "clamped_swiglu" else 1) * g)
    d = torch.randn(1, 8, device=device)
    (expected,) = torch.autograd.grad(f * (u + 1 if activation == "clamped_swiglu" else u), preact, d)
    found = activate_backward(preact.detach(), None, d, None, None, None, False, None, *spec)
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("fresh_plans")
def test_one_tensor_for_two_arguments_and_then_two(device: str) -> None:
    spec = GLUSpec("silu", True, False, 1.0, 1.0)
    gate, up, d = torch.randn(3, 6, 40, device=device)
    for tensors in ((gate, gate, d), (gate, up, gate), (gate, up, up), (gate, up, d)):
        expected = reference.activate_backward(*tensors, None, None, None, spec)[:2]
        torch.testing.assert_close(activate_backward(*tensors, None, None, None, False, None, *spec)[:2], expected)
    w_gate, w_up = torch.randn(2, 3, 24, 40, device=device) * 24**-0.5  # the layout that the kernel takes
    rows = torch.randn(30, 24, device=device)
    offsets = group_offsets_from_sizes(torch.tensor([10, 0, 20], device=device))
    for up in (w_gate, w_up):
        expected = reference.swiglu_ffn(rows, w_gate, offsets, w_up=up, transposed=True)
        torch.testing.assert_close(swiglu_ffn(rows, w_gate, offsets, w_up=up, transposed=True), expected)


def test_rows_in_no_group(device: str) -> None:
    tensors, _, _ = make({}, 1, 24, 40, 4, 1, device, torch.float16)
    rows = torch.randn(50, 24, device=device).half()
    rows[40:] = NAN
    offsets = group_offsets_from_sizes(torch.tensor([20, 0, 17, 3], device=device))
    out = swiglu_ffn(rows, tensors["w_gate_up"], offsets)
    assert not out[40:].any()
    exact = reference.swiglu_ffn(rows[:40].double(), tensors["w_gate_up"].double(), offsets)
    plain = reference.swiglu_ffn(rows[:40], tensors["w_gate_up"], offsets)
    assert_within_budget(out[:40], plain, exact, scale=10.0)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["uniform", "one"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("T", [1, 64, 1000])
def test_at_the_size_of_models(name: str, T: int, kind: str, device: str) -> None:
    dtype = torch.bfloat16 if T > 64 else torch.float32
    layer = LAYERS[name]
    if T > 64 and "limit" in layer:
        layer = layer | {"limit": 100.0}  # bfloat16 may round past a limit, where the gradient becomes zero
    for H, I, E, top_k in ((512, 384, 8, 4), (360, 720, 32, 2)) if T > 64 else ((1024, 384, 64, 8), (1440, 720, 16, 4)):  # noqa: E741
        assert_layer_close(*make(layer, T, H, I, E, top_k, device, dtype, kind))


def test_gradients_in_float16_overflow_with_the_tokens_weights_only(device: str) -> None:
    """Before a weight of 0.02 or 0 multiplies it, the gradient of act exceeds 65504."""
    tensors, ids, options = make({}, 4, 16, 8, 2, 2, device, torch.float16)
    ids.copy_(torch.tensor([[0, 1]] * 4))
    tensors["topk_weights"].copy_(torch.tensor([[0.02, 0.0]] * 4))
    tensors["w_down"].fill_(8.0)
    d_out = torch.full_like(tensors["hidden"], 1024.0)
    exact = with_gradients(reference.moe_mlp, in_float64(tensors), ids.cpu(), options, d_out.cpu().double())
    found = with_gradients(moe_mlp, tensors, ids, options, d_out)
    for name, right in exact.items():
        assert (found[name].cpu() - right).norm() < 4e-3 * right.norm(), name


@pytest.mark.parametrize("compute", [None, "fp8_rowwise", "fp8_block"])
def test_the_gradient_of_weights_of_slots_is_rounded_once(compute: str | None, device: str) -> None:
    """It is the sum of two that may cancel, of the second product and of its bias."""
    tensors, ids, options = make({"bias": True}, 8, 16, 8, 2, 2, device, torch.float32)
    tensors["topk_weights"].fill_(1.0)
    d_out = torch.randn_like(tensors["hidden"])
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        given = tensors | {"topk_weights": tensors["topk_weights"].to(dtype)}
        found = with_gradients(moe_mlp, given, ids, options | {"compute": compute}, d_out)
        gradients.append(found["topk_weights"])
    assert gradients[0].bfloat16().ne(gradients[0]).any()
    assert torch.equal(gradients[1], gradients[0].bfloat16())


@pytest.mark.parametrize("compute", [None, "fp8_rowwise", "fp8_block"])
def test_gradients_that_pytorch_knows_to_be_zero(compute: str | None, device: str) -> None:
    """The derivative of `sgn` has no memory that kernels could read."""
    layer = MoE(24, 40, 5, 2, renormalize=True, compute=compute, device=device, dtype=torch.float16)
    x = torch.randn(7, 24, device=device, dtype=torch.float16, requires_grad=True)
    for _ in range(2):
        torch.sgn(layer(x)).sum().backward()
    for leaf in (x, *layer.parameters()):
        assert leaf.grad is not None and not leaf.grad.any()


@pytest.mark.gpu
def test_repeats_are_bit_identical_and_the_host_never_waits(device: str) -> None:
    tensors, ids, options = make({}, 500, 512, 256, 16, 4, device, torch.bfloat16)
    upstream = torch.randn(500, 512, device=device).bfloat16()
    first = with_gradients(moe_mlp, tensors, ids, options, upstream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        repeats = [with_gradients(moe_mlp, tensors, ids, options, upstream) for _ in range(20)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for repeat in repeats:
        assert all(torch.equal(first[name], repeat[name]) for name in first)


@pytest.mark.gpu
def test_a_tokens_bits_are_those_it_has_among_more_tokens(device: str) -> None:
    tensors, ids, options = make({}, 2048, 2048, 768, 128, 8, device, torch.bfloat16)
    among = run(moe_mlp, tensors, ids, options)
    for T in (3, 64, 500):
        few = {name: tensor[:T] if name in ("hidden", "topk_weights") else tensor for name, tensor in tensors.items()}
        assert torch.equal(run(moe_mlp, few, ids[:T], options), among[:T])


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 16, 600])
def test_graph_capture_of_forward_and_backward(T: int, device: str) -> None:
    tensors, ids, options = make({}, T, 512, 256, 16, 4, device, torch.bfloat16)
    upstream = torch.randn(T, 512, device=device).bfloat16()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        with_gradients(moe_mlp, tensors, ids, options, upstream)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = with_gradients(moe_mlp, tensors, ids, options, upstream)
    for shift in range(3):
        ids.copy_(torch.where(ids < 16, (ids + shift) % 16, ids))
        graph.replay()
        eager = with_gradients(moe_mlp, tensors, ids, options, upstream)
        assert all(torch.equal(captured[name], eager[name]) for name in eager)


@pytest.mark.gpu
def test_graph_capture_of_one_token(of_one_token: list[torch.dtype], device: str) -> None:
    tensors, ids, options = make({}, 1, 512, 256, 16, 4, device, torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(moe_mlp, tensors, ids, options)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(moe_mlp, tensors, ids, options)
    assert of_one_token == [torch.bfloat16]
    for first in (0, 3, 14):  # at the end, some ids belong to no expert
        ids.copy_(torch.arange(first, first + 4)[None])
        tensors["hidden"].normal_()
        graph.replay()
        assert torch.equal(captured, run(moe_mlp, tensors, ids, options))


@pytest.mark.gpu
def test_compiled(device: str) -> None:
    torch.use_deterministic_algorithms(False)
    compiled = torch.compile(moe_mlp, fullgraph=True, dynamic=True)
    for T in (64, 1, 0, 200):
        tensors, ids, options = make({}, T, 512, 256, 16, 4, device, torch.bfloat16)
        upstream = torch.randn(T, 512, device=device).bfloat16()
        eager = with_gradients(moe_mlp, tensors, ids, options, upstream)
        found = with_gradients(compiled, tensors, ids, options, upstream)
        for name in eager:
            torch.testing.assert_close(found[name], eager[name])
        assert torch.equal(run(compiled, tensors, ids, options), run(moe_mlp, tensors, ids, options))


def test_float64_beside_float32_goes_by_the_reference_in_the_interpreter(device: str) -> None:
    if device != "cpu":
        pytest.skip("float64 is for CPUs")
    for T in (1, 3):
        for wide in ("hidden", "w_gate_up", "w_down"):
            tensors, ids, options = make(LAYERS["SwiGLU"], T, 4, 3, 4, 2, device, torch.float32)
            tensors = {n: (x.double() if n == wide else x).requires_grad_() for n, x in tensors.items()}
            results = []
            for function in (moe_mlp, reference.moe_mlp):
                out = function(topk_ids=ids, **tensors, **options)
                results.append((out, *torch.autograd.grad(out.sum(), tuple(tensors.values()))))
            torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("T", [1, 3])
def test_options_that_are_numpys_floats(T: int, device: str) -> None:
    hidden = torch.randn(T, 16, device=device, requires_grad=True)
    weights = torch.randn(2, 32, 16, device=device) / 4, torch.randn(2, 16, 16, device=device) / 4
    routed = torch.zeros(T, 1, dtype=torch.int64, device=device), torch.ones(T, 1, device=device)
    results = []
    for of in (np.float64, float):
        cache.clear()  # the two are equal, and would share a plan
        options: dict[str, Any] = {"activation": "clamped_swiglu", "alpha": of(1.5), "limit": of(0.5)}
        with torch.no_grad():
            results.append(moe_mlp(hidden, *routed, *weights, **options))
        results += torch.autograd.grad(moe_mlp(hidden, *routed, *weights, **options).sum(), hidden)
    assert results[0].any() and results[1].any()
    assert all(map(torch.equal, results[:2], results[2:]))
