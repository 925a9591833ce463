"""Experts and their layer on CPU tensors, through the reference: explicit formulas, and all gradients."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize
from torch.profiler import ProfilerActivity, profile

from moe_kernels import (
    MoE,
    group_offsets_from_sizes,
    moe_mlp,
    quantize_once,
    reference,
    route,
    swiglu_ffn,
    topk_sigmoid,
    topk_softmax,
)
from moe_kernels.glu import ACTIVATIONS, CLAMPED, GLUSpec, columns
from moe_kernels.ops import layer
from moe_kernels.runtime import torch_internals

T, H, I, E, TOP_K = 4, 3, 2, 4, 2  # noqa: E741
IDS = torch.tensor([[0, 2], [4, 1], [2, 2], [-1, 3]])  # two slots are dropped, and a token picks an expert twice
LAYERS: dict[str, dict[str, Any]] = {
    "SwiGLU": {},
    "two weights": {"two": True},
    "two weights, biases": {"two": True, "bias": True, "activation": "gelu"},
    "transposed": {"transposed": True, "activation": "gelu_tanh", "bias": True},
    "gpt-oss": {
        "interleaved": True,
        "transposed": True,
        "bias": True,
        "activation": "clamped_swiglu",
        "alpha": 1.3,
        "limit": 0.7,
    },
    "DeepSeek-V4": {"activation": "clamped_silu", "limit": 0.7},
    "without a gate": {"gated": False, "activation": "relu_squared", "bias": True},
    "relu": {"gated": False, "activation": "relu"},
}


def make(layer: dict[str, Any], dtype: torch.dtype = torch.float64, tokens: int = T) -> dict[str, Any]:
    """Return the differentiable arguments of a layer, and its options."""
    options = dict(layer)
    two, bias = options.pop("two", False), options.pop("bias", False)
    transposed = options.get("transposed", False)
    W = 2 * I if options.get("gated", True) and not two else I

    def weight(outputs: int, inputs: int) -> Tensor:
        shape = (E, inputs, outputs) if transposed else (E, outputs, inputs)
        return torch.randn(shape, dtype=dtype, requires_grad=True)

    def vector(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, requires_grad=True)

    tensors = {
        "hidden": vector(tokens, H),
        "topk_weights": vector(tokens, TOP_K),
        "w_gate_up": weight(W, H),
        "w_down": weight(H, I),
    }
    if two:
        tensors["w_up"] = weight(I, H)
    if bias:
        tensors |= {"gate_up_bias": vector(E, W), "down_bias": vector(E, H)}
        if two:
            tensors["up_bias"] = vector(E, I)
    return {"tensors": tensors, "options": options}


def one_expert(x: Tensor, e: int, arguments: dict[str, Any]) -> Tensor:
    """Compute one expert for one token by its formula."""
    tensors, options = arguments["tensors"], arguments["options"]
    transposed = options.get("transposed", False)

    def product(x: Tensor, weight: str, bias: str) -> Tensor:
        w = tensors[weight][e]
        y = x @ (w if transposed else w.T)
        return y + tensors[bias][e] if bias in tensors else y

    h = product(x, "w_gate_up", "gate_up_bias")
    activation = options.get("activation", "silu")
    f = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
        "relu_squared": lambda x: F.relu(x) ** 2,
        "clamped_swiglu": lambda x: x * torch.sigmoid(options["alpha"] * x),
        "clamped_silu": F.silu,
    }[activation]
    if not options.get("gated", True):
        act = f(h)
    else:
        if "w_up" in tensors:
            gate, up = h, product(x, "w_up", "up_bias")
        elif options.get("interleaved", False):
            gate, up = h[::2], h[1::2]
        else:
            gate, up = h.chunk(2)
        if activation in CLAMPED:
            gate, up = gate.clamp(max=options["limit"]), up.clamp(-options["limit"], options["limit"])
        if activation == "clamped_swiglu":
            up = up + 1
        act = f(gate) * up
    return product(act, "w_down", "down_bias")


def call(function: Any, arguments: dict[str, Any], ids: Tensor = IDS) -> Tensor:
    tensors = dict(arguments["tensors"])
    first = [tensors.pop(name) for name in ("hidden", "topk_weights", "w_gate_up", "w_down")]
    out: Tensor = function(first[0], ids, *first[1:], **tensors, **arguments["options"])
    return out


@pytest.mark.parametrize("function", [moe_mlp, reference.moe_mlp])
@pytest.mark.parametrize("name", LAYERS)
def test_token_by_token(name: str, function: Any) -> None:
    arguments = make(LAYERS[name])
    expected = torch.zeros(T, H, dtype=torch.float64)
    for t in range(T):
        for k in range(TOP_K):
            e = int(IDS[t, k])
            if 0 <= e < E:
                tensors = arguments["tensors"]
                expected[t] += (tensors["topk_weights"][t, k] * one_expert(tensors["hidden"][t], e, arguments)).detach()
    torch.testing.assert_close(call(function, arguments).detach(), expected)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_first_and_second_order(name: str) -> None:
    arguments = make(LAYERS[name])
    names = list(arguments["tensors"])

    def layer(*values: Tensor) -> Tensor:
        return call(moe_mlp, arguments | {"tensors": dict(zip(names, values, strict=True))})

    values = tuple(arguments["tensors"].values())
    assert gradcheck(layer, values)
    assert gradgradcheck(layer, values)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_lie_as_what_they_are_of(name: str) -> None:
    arguments = make(LAYERS[name])
    out = call(moe_mlp, arguments)
    out.backward(torch.randn_like(out))
    for key, value in arguments["tensors"].items():
        assert value.grad.stride() == value.stride(), key


@pytest.mark.parametrize(
    "needed", ["hidden", "topk_weights", "w_gate_up", "w_down", "w_up", "gate_up_bias", "up_bias", "down_bias"]
)
def test_a_gradient_alone(needed: str) -> None:
    arguments = make(LAYERS["two weights, biases"])
    out = call(moe_mlp, arguments)
    upstream = torch.randn_like(out)
    (expected,) = torch.autograd.grad(out, arguments["tensors"][needed], upstream)
    for key, value in arguments["tensors"].items():
        value.requires_grad_(key == needed)
    call(moe_mlp, arguments).backward(upstream)
    torch.testing.assert_close(arguments["tensors"][needed].grad, expected)
    assert all(value.grad is None for key, value in arguments["tensors"].items() if key != needed)


@pytest.mark.parametrize("name", ["SwiGLU", "two weights, biases", "without a gate"])
@pytest.mark.parametrize("needed", [("w_down",), ("down_bias",), ("w_down", "down_bias")])
def test_gradients_of_the_second_product_alone(name: str, needed: tuple[str, ...]) -> None:
    """They have the same bits, and need no product with `w_down`."""
    arguments = make(LAYERS[name] | {"bias": True}, torch.bfloat16)
    tensors, out = arguments["tensors"], call(moe_mlp, arguments)
    upstream = torch.randn_like(out)
    expected = torch.autograd.grad(out, [tensors[key] for key in needed], upstream)
    for key, value in tensors.items():
        value.requires_grad_(key in needed)
    out = call(moe_mlp, arguments)
    with profile(activities=[ProfilerActivity.CPU]) as shown:
        found = torch.autograd.grad(out, [tensors[key] for key in needed], upstream)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert "moe_kernels::grouped_gemm" not in [event.name for event in shown.events()]


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_that_no_gradient_needs_may_change(dtype: torch.dtype, two: bool) -> None:
    """As those of frozen experts. The gradient has their dtype, also beside weights in float32."""
    rows = torch.randn(9, 16).to(dtype).requires_grad_()
    weights = [torch.randn(3, 8, 16) for _ in range(2)] if two else [torch.randn(3, 16, 16), None]
    offsets = group_offsets_from_sizes(torch.tensor([4, 0, 5]))
    for weight in weights:  # the gradient of either needs the rows
        if weight is not None:
            given = rows * 1
            out = swiglu_ffn(given, weights[0], offsets, w_up=weights[1])
            weight.requires_grad_()
            recorded = swiglu_ffn(given, weights[0], offsets, w_up=weights[1])
            weight.requires_grad_(False)
            (expected,) = torch.autograd.grad(recorded.sum(), rows, retain_graph=True)
            given.add_(1)
            (found,) = torch.autograd.grad(out.sum(), rows)
            assert found.dtype == dtype
            assert torch.equal(found, expected)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                recorded.sum().backward()


def test_the_backward_keeps_one_product_of_the_rows() -> None:
    kept: list[Tensor] = []
    arguments = make({})
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        call(moe_mlp, arguments)
    R = T * TOP_K
    assert [tuple(x.shape) for x in kept if x.dim() == 2 and len(x) == R] == [(R, 2 * I)]


def test_what_the_backward_kept_ends_before_weights_gradients_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, ended = [], []
    activate_backward, weight_gradient = layer.activate_backward, layer.weight_gradient

    def note(h: Tensor, *rest: Any) -> Any:
        kept.append(StorageWeakRef(h.untyped_storage()))
        return activate_backward(h, *rest)

    def look(*args: Any) -> Tensor:
        ended.append(kept[-1].expired())
        return weight_gradient(*args)

    monkeypatch.setattr(layer, "activate_backward", note)
    monkeypatch.setattr(layer, "weight_gradient", look)
    arguments = make({})
    out, tensors = call(moe_mlp, arguments), list(arguments["tensors"].values())
    upstream = torch.randn_like(out)
    first = torch.autograd.grad(out, tensors, upstream, retain_graph=True)
    assert ended == [False, False]
    second = torch.autograd.grad(out, tensors, upstream)
    assert ended[2:] == [True, True]
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("keep", [True, False])
def test_opcheck(name: str, keep: bool) -> None:
    arguments = make(LAYERS[name])
    tensors = arguments["tensors"]
    defaults = {"activation": "silu", "gated": True, "interleaved": False, "alpha": 0.7, "limit": 0.7}
    form = GLUSpec(**{key: arguments["options"].get(key, default) for key, default in defaults.items()})
    transposed = arguments["options"].get("transposed", False)
    w_gate_up, w_down, w_up = map(tensors.get, ("w_gate_up", "w_down", "w_up"))
    biases = [tensors.get(name) for name in ("gate_up_bias", "up_bias", "down_bias")]
    operators = torch.ops.moe_kernels
    layer = (tensors["hidden"], IDS, tensors["topk_weights"], w_gate_up, w_down, w_up, *biases)
    opcheck(operators.moe_mlp.default, (*layer, transposed, *form))
    opcheck(operators.moe_layer.default, (*(None if x is None else x.detach() for x in layer), transposed, *form))
    opcheck(operators.moe_layer.default, (*layer, transposed, *form))
    rows, offsets = torch.randn(8, H, dtype=torch.float64), route(IDS, tensors["topk_weights"], E)[0]
    w_in, w_up = columns(w_gate_up, transposed), columns(w_up, transposed)
    opcheck(operators.swiglu_ffn.default, (rows, offsets, w_in, w_up, *biases[:2], keep, *form))


def test_what_was_exported_without_gradients_has_them() -> None:
    """Programs are often exported under no_grad or with frozen parameters, and later differentiated."""
    module = MoE(H, I, E, TOP_K, renormalize=True, dtype=torch.float64)
    hidden = torch.randn(5, H, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        exported = torch.export.export(module, (torch.randn(5, H, dtype=torch.float64),)).module()
    inputs, found = (hidden, *module.parameters()), (hidden, *exported.parameters())

    def gradients(function: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        first = torch.autograd.grad(function(hidden).square().sum(), inputs, create_graph=True)
        return [*first, *torch.autograd.grad(sum(d.cos().sum() for d in first), inputs)]

    torch.testing.assert_close(gradients(exported, found), gradients(module, inputs))


def test_opcheck_of_the_activation() -> None:
    h = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    d, topk_weights = torch.randn(6, 2, dtype=torch.float64, requires_grad=True), torch.randn(3, 2, requires_grad=True)
    routing = route(torch.tensor([[0, 1], [3, 1], [0, 0]]), topk_weights, 3)
    form = ("silu", True, False, 1.0, 1.0)
    operators = torch.ops.moe_kernels
    opcheck(operators.activate.default, (h, None, *form))
    opcheck(operators.activate.default, (h, h.detach() + 1, *form))
    opcheck(operators.activate_backward.default, (h, None, d, None, None, None, False, None, *form))
    order = (routing.row_to_slot, routing.group_offsets)
    opcheck(operators.activate_backward.default, (h, None, d, topk_weights.double(), *order, True, None, *form))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_activations_backward_is_its_derivative(activation: str) -> None:
    for gated, two in ((True, False), (True, True), (False, False)):
        if activation in CLAMPED and not gated:
            continue
        form = GLUSpec(activation, gated, gated and not two, 1.3, 0.7)
        h = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
        h_up = torch.randn(9, 6, dtype=torch.float64, requires_grad=True) if two else None
        act = reference.activate(h, h_up, form)
        d = torch.randn_like(act)
        expected = torch.autograd.grad(act, [h, h_up] if two else [h], d)
        found = reference.activate_backward(h, h_up, d, None, None, None, form)
        torch.testing.assert_close(found[: len(expected)], expected)


def test_rows_past_the_last_offset_and_one_experts_nan() -> None:
    arguments = make({})["tensors"]
    rows = torch.randn(9, H, dtype=torch.float64)
    offsets = group_offsets_from_sizes(torch.tensor([2, 0, 3, 2]))
    rows[7:] = float("nan")
    clean = swiglu_ffn(rows, arguments["w_gate_up"], offsets).detach()
    assert torch.equal(clean[7:], torch.zeros(2, I, dtype=torch.float64))
    with torch.no_grad():
        arguments["w_gate_up"][2] = float("nan")
    out = swiglu_ffn(rows, arguments["w_gate_up"], offsets).detach()
    assert torch.equal(out[[0, 1, 5, 6]], clean[[0, 1, 5, 6]])
    assert out[2:5].isnan().all()


def test_offsets_that_start_late() -> None:
    arguments = make(LAYERS["gpt-oss"])
    rows, offsets = torch.randn(6, H, dtype=torch.float64), torch.tensor([2, 3, 3, 5, 5])
    options = arguments["options"] | {"gate_up_bias": arguments["tensors"]["gate_up_bias"]}
    out = swiglu_ffn(rows, arguments["tensors"]["w_gate_up"], offsets, **options).detach()
    shifted = swiglu_ffn(rows[2:], arguments["tensors"]["w_gate_up"], offsets - 2, **options).detach()
    # Not the same bits: PyTorch rounds the last elements of a sigmoid on a CPU otherwise than the first.
    torch.testing.assert_close(out[2:], shifted, rtol=1e-14, atol=1e-15)
    assert not out[:2].any()


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens: int) -> None:
    arguments = make({}, tokens=tokens)
    out = call(moe_mlp, arguments, torch.randint(0, E, (tokens, TOP_K)))
    assert out.shape == (tokens, H)
    out.backward(torch.randn_like(out))
    if tokens == 0:
        assert not arguments["tensors"]["w_gate_up"].grad.any()


def test_compiled_without_graph_breaks() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(moe_mlp, fullgraph=True, dynamic=True, backend=counter)
    compiled_first = 0
    for tokens in (5, 9, 1, 0, 17):
        arguments = make(LAYERS["transposed"], tokens=tokens)
        ids = torch.randint(-1, E + 1, (tokens, TOP_K))
        upstream = torch.randn(tokens, H, dtype=torch.float64)
        tensors = list(arguments["tensors"].values())
        out, expected = call(compiled, arguments, ids), call(moe_mlp, arguments, ids)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(
            torch.autograd.grad(out, tensors, upstream), torch.autograd.grad(expected, tensors, upstream)
        )
        compiled_first = compiled_first or counter.frame_count
    assert counter.frame_count <= compiled_first + 2  # one token and no tokens are compiled separately


def test_compiled_in_a_nested_region() -> None:
    torch._dynamo.reset()
    moes = nn.ModuleList([MoE(H, I, E, TOP_K, renormalize=True) for _ in range(2)])

    @torch.compiler.nested_compile_region
    def block(moe: nn.Module, x: Tensor) -> Tensor:
        return x + moe(x)

    def model(x: Tensor) -> Tensor:
        for moe in moes:
            x = block(moe, x)
        return x

    hidden = torch.randn(5, H)
    results = []
    for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        out = call(hidden)
        results.append((out, *torch.autograd.grad(out.square().sum(), list(moes.parameters()))))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", ["moe_mlp", "in fp8", "swiglu_ffn"])
def test_the_backward_in_compiled_autograd(name: str) -> None:
    """Nothing else is compiled, so that compiled autograd traces the gradients themselves."""
    torch._dynamo.reset()
    arguments = make({}, torch.float32)
    if name == "in fp8":
        arguments["options"]["compute"] = "fp8_block"
    tensors, offsets = arguments["tensors"], group_offsets_from_sizes(torch.tensor([2, 0, 1, 1]))
    used = [tensors["hidden"], tensors["w_gate_up"]]
    if name == "swiglu_ffn":
        out, expected = (swiglu_ffn(*used, offsets) for _ in range(2))
    else:
        out, expected = (call(moe_mlp, arguments) for _ in range(2))
    upstream = torch.randn_like(out)
    with compiled_autograd._enable(torch.compile(fullgraph=True, backend="aot_eager")):
        out.backward(upstream)
    torch.testing.assert_close([x.grad for x in used], list(torch.autograd.grad(expected, used, upstream)))


def test_autocast_and_inference_mode() -> None:
    arguments = make({}, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = call(moe_mlp, arguments)
    assert out.dtype == torch.bfloat16
    out.backward(torch.randn_like(out))
    assert all(value.grad.dtype == torch.float32 for value in arguments["tensors"].values())
    expected = call(moe_mlp, arguments).detach()
    with torch.inference_mode():
        assert torch.equal(call(moe_mlp, arguments), expected)


REFUSALS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"activation": "swish"}, ValueError, "activation: expected one of silu, .*got 'swish'; SwiGLU is silu with"),
    ({"activation": "clamped_swiglu", "gated": False}, ValueError, "gated: expected True for clamped_swiglu"),
    ({"activation": "clamped_silu", "gated": False}, ValueError, "gated: expected True for clamped_silu"),
    ({"w_up": torch.zeros(E, I, H), "gated": False}, ValueError, "w_up: expected None for experts without a gate"),
    ({"w_up": torch.zeros(E, I, H), "interleaved": True}, ValueError, "interleaved: expected False unless"),
    ({"up_bias": torch.zeros(E, I)}, ValueError, "up_bias: expected None without w_up"),
    ({"hidden": torch.zeros(T)}, ValueError, r"hidden: expected shape \[T, H\], got \[4\]"),
    ({"hidden": torch.zeros(T + 1, H)}, ValueError, r"topk_ids: expected T = 5 as in hidden \[5, 3\], got \[4, 2\]"),
    ({"hidden": torch.zeros(T, H).long()}, TypeError, "hidden: expected one of .*got torch.int64"),
    ({"w_gate_up": torch.zeros(E, 2 * I)}, ValueError, r"w_gate_up: expected shape \[E, 2I, H\] with H = 3, got"),
    ({"w_gate_up": torch.zeros(E, 2 * I + 1, H)}, ValueError, r"w_gate_up: expected shape .* with an even 2I"),
    ({"transposed": True}, ValueError, r"w_gate_up: expected shape \[E, H, 2I\] with H = 3, got \[4, 4, 3\]"),
    (
        {"w_up": torch.zeros(E, I + 1, H)},
        ValueError,
        r"w_up: expected shape \[E, I, H\] = \[4, 4, 3\], got \[4, 3, 3\]$",
    ),
    (
        {"w_down": torch.zeros(E, I, H)},
        ValueError,
        r"w_down: .* \[E, H, I\] = \[4, 3, 2\], got \[4, 2, 3\]; pass w_down.mT$",
    ),
    ({"w_down": torch.zeros(E, H, I).int()}, TypeError, "w_down: expected one of .*got torch.int32"),
    ({"w_down": None}, TypeError, "w_down: expected a torch.Tensor, got NoneType"),
    ({"down_bias": torch.zeros(E, I)}, ValueError, r"down_bias: expected shape \[E, H\] = \[4, 3\], got \[4, 2\]"),
    (
        {"gate_up_bias": torch.zeros(E, I)},
        ValueError,
        r"gate_up_bias: expected shape \[E, 2I\] = \[4, 4\], got \[4, 2\]",
    ),
    ({"w_down": torch.zeros(E, H, I, device="meta")}, ValueError, "w_down: expected on cpu with hidden, got on meta"),
    ({"topk_ids": IDS.float()}, TypeError, "topk_ids: expected int32 or int64, got torch.float32; ids come before"),
    (
        {"topk_weights": torch.zeros(T, 1)},
        ValueError,
        r"topk_weights: expected shape \[4, 2\] as topk_ids, got \[4, 1\]",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSALS)
def test_refusals(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    values: dict[str, Any] = {
        "hidden": torch.zeros(T, H),
        "topk_ids": IDS,
        "topk_weights": torch.zeros(T, TOP_K),
        "w_gate_up": torch.zeros(E, 2 * I, H),
        "w_down": torch.zeros(E, H, I),
    }
    with pytest.raises(error, match=f"^{message}"):
        moe_mlp(**{**values, **changes})


def test_swiglu_ffn_refusals() -> None:
    rows, w = torch.zeros(5, H), torch.zeros(E, 2 * I, H)
    with pytest.raises(ValueError, match=r"^group_offsets: expected length E \+ 1 = 5 for w_gate_up .*, got 4"):
        swiglu_ffn(rows, w, torch.zeros(4, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"^group_offsets: expected int32 or int64"):
        swiglu_ffn(rows, w, torch.zeros(5))
    with pytest.raises(ValueError, match=r"^rows: expected shape \[M, H\], got \[5\]"):
        swiglu_ffn(rows[:, 0], w, torch.zeros(5, dtype=torch.int32))


def test_validation() -> None:
    arguments = make({})
    arguments["options"]["validate"] = True
    with pytest.raises(ValueError, match=r"^topk_ids\[1, 0\]: expected 0 to 3, got 4"):
        call(moe_mlp, arguments)


def test_the_module() -> None:
    layer = MoE(H, I, E, TOP_K, renormalize=True, dtype=torch.float64)
    hidden = torch.randn(2, 5, H, dtype=torch.float64, requires_grad=True)
    out = layer(hidden)
    assert out.shape == hidden.shape
    tokens = hidden.detach().view(-1, H)
    probabilities = (tokens @ layer.router.T).softmax(-1)
    topk_weights, ids = probabilities.topk(TOP_K)
    topk_weights = topk_weights / topk_weights.sum(1, keepdim=True)
    expected = reference.moe_mlp(tokens, ids, topk_weights, layer.w_gate_up, layer.w_down)
    torch.testing.assert_close(out.view(-1, H), expected)
    out.backward(torch.randn_like(out))
    for value in (hidden, *layer.parameters()):
        assert value.grad is not None
        assert value.grad.any()
    assert all(bool((w.abs() <= w.size(-1) ** -0.5).all()) for w in layer.parameters())
    assert "num_experts=4, top_k=2, renormalize=" in repr(layer)
    assert [layer(hidden[:, :tokens]).shape for tokens in (0, 1)] == [(2, 0, H), (2, 1, H)]
    ungated = MoE(H, I, E, 1, renormalize=True, gated=False)
    assert [tuple(w.shape) for w in ungated.parameters()] == [(E, H), (E, I, H), (E, H, I)]
    with pytest.raises(ValueError, match=r"^top_k: expected 1 to 4, got 5"):
        MoE(H, I, E, 5, renormalize=True)
    with pytest.raises(
        ValueError, match=r"^hidden: expected on cpu with the layer, got on meta; move one with \.to\(\)"
    ):
        layer(hidden.to("meta"))
    for shape in ((2, H + 1), ()):
        with pytest.raises(ValueError, match=r"^hidden: expected shape \[\.\.\., H\] with H = 3, got"):
            layer(torch.zeros(shape, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"^hidden: expected torch.float64 as the router, got torch.bfloat16"):
        layer(hidden.bfloat16())
    with pytest.raises(TypeError, match=r"^hidden: expected a torch.Tensor, got list"):
        layer([0.0] * H)
    layer.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.zeros(2, H, dtype=torch.bfloat16)).dtype == torch.bfloat16
        for dtype in (torch.float64, torch.int64):  # autocast does not convert these
            with pytest.raises(TypeError, match=rf"^hidden: expected torch.float32 .*, got {dtype}; .* with \.to\(\)$"):
                layer(torch.zeros(2, H, dtype=dtype))
    with pytest.raises(TypeError, match=r"^hidden: .* torch.float32 .*, got torch.bfloat16; .*, or use autocast$"):
        layer.to("meta")(torch.zeros(2, H, dtype=torch.bfloat16, device="meta"))


def test_a_router_is_computed_once_in_each_call() -> None:
    """Spectral norms change their state whenever the weight is read, and random parametrisations draw again."""
    calls: list[Tensor] = []

    class Counted(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            calls.append(weight)
            return weight

    layer = MoE(H, I, E, TOP_K, renormalize=True)
    parametrize.register_parametrization(layer, "router", Counted())
    calls.clear()
    layer(torch.randn(3, H))
    assert len(calls) == 1


@pytest.mark.parametrize("shape", [(E + 1, H), (E - 1, H), (H,), (E, H, 1)], ids=str)
@pytest.mark.parametrize("form", ["plain", "compute", "quantised", "once"])
def test_a_router_of_another_number_of_experts(form: str, shape: tuple[int, ...]) -> None:
    """As after some experts were removed: the others' ids would drop their slots."""
    compute = "fp8_block" if form in ("compute", "once") else None
    layer = MoE(H, I, E, TOP_K, renormalize=True, compute=compute).requires_grad_(False)
    if form == "quantised":
        layer.quantize("fp8_rowwise")
    layer.router = nn.Parameter(torch.ones(shape))
    context = quantize_once(layer) if form == "once" else nullcontext()
    with context, pytest.raises(ValueError, match=r"^router: expected shape \[E, H\] with E = 4 as"):
        layer(torch.ones(5, H))


def test_a_router_in_a_dtype_of_storage() -> None:
    layer = MoE(H, I, E, TOP_K, renormalize=True).to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match=r"^router: expected bfloat16, .*, got torch\.float8_e4m3fn"):
        layer(torch.ones(5, H))


def test_only_the_layers_own_weights_are_drawn_again() -> None:
    layer = MoE(H, I, E, TOP_K, renormalize=True)
    layer.norm, layer.scale = nn.LayerNorm(H), nn.Parameter(torch.tensor(2.0))
    before = {name: x.clone() for name, x in layer.named_parameters()}
    layer.reset_parameters()
    changed = {name for name, x in layer.named_parameters() if not torch.equal(x, before[name])}
    assert changed == {"router", "w_gate_up", "w_down"}


def test_the_choice_of_a_layer_itself_is_not_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_kernels.checks._VALIDATE", True)  # as with MOE_KERNELS_VALIDATE=1 at import
    layer, tokens = MoE(H, I, E, TOP_K, renormalize=True), torch.randn(2, 3, H)
    torch.testing.assert_close(torch.vmap(layer)(tokens), layer(tokens))


def test_the_repr_of_a_layer_whose_weights_fsdp_has_flattened() -> None:
    layer = MoE(H, I, E, TOP_K, renormalize=True)
    assert f"hidden_size={H}, intermediate_size={I}, num_experts={E}, top_k={TOP_K}" in repr(layer)
    layer.w_down = nn.Parameter(torch.empty(0))
    assert repr(layer).startswith(f"MoE(top_k={TOP_K}, renormalize=True")


@pytest.mark.parametrize("activation", ["clamped_swiglu", "clamped_silu"])
def test_the_limit_of_the_modules_activation(activation: str) -> None:
    layer = MoE(H, I, E, TOP_K, renormalize=True, activation=activation, alpha=0.5, limit=0.1, dtype=torch.float64)
    hidden = torch.randn(5, H, dtype=torch.float64)
    ids, weights = topk_softmax(hidden @ layer.router.T, TOP_K, renormalize=True)
    arguments = hidden, ids, weights, layer.w_gate_up, layer.w_down
    torch.testing.assert_close(
        layer(hidden), reference.moe_mlp(*arguments, activation=activation, alpha=0.5, limit=0.1)
    )
    assert (layer(hidden) - reference.moe_mlp(*arguments, activation=activation)).abs().max() > 1e-3
    assert f"activation={activation}, gated=True, alpha=0.5, limit=0.1" in repr(layer)
    with pytest.raises(ValueError, match=r"^limit: expected at least 0, got -1"):
        MoE(H, I, E, TOP_K, renormalize=True, activation=activation, limit=-1.0)


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("shape", [(5, H), (2, 5, H), (H,)])
def test_the_modules_result_is_no_view(shape: tuple[int, ...], private: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not private:
        monkeypatch.setattr(torch_internals, "_unsafe_view", None)
    layer, hidden = MoE(H, I, E, TOP_K, renormalize=True), torch.randn(shape, requires_grad=True)
    out = layer(hidden)
    assert out.shape == shape and not out._is_view()
    expected, upstream = torch.autograd.grad(out, hidden, torch.ones(shape))[0], torch.ones(shape)
    h = layer(hidden)
    h += hidden
    h.backward(upstream)
    torch.testing.assert_close(hidden.grad, expected + upstream)


EXPERTS = [torch.nn.Sequential(torch.nn.Linear(3, 2, False), torch.nn.ReLU(), torch.nn.Linear(2, 3, False))]


@pytest.mark.parametrize(
    "call",
    [
        lambda **options: MoE(H, I, E, TOP_K, **options),
        lambda **options: MoE.from_experts(EXPERTS, top_k=1, **options),
        lambda **options: topk_softmax(torch.zeros(2, 3), 2, **options),
        lambda **options: topk_sigmoid(torch.zeros(2, 3), 2, **options),
    ],
)
def test_renormalize_has_no_default(call: Any) -> None:
    """Models differ in it, and a wrong default would silently change the results."""
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'renormalize'"):
        call()
    for renormalize in (False, True):
        call(renormalize=renormalize)
