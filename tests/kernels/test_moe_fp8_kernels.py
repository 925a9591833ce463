"""Layers with fp8 weights: the data that their kernels quantise, bit for bit, and results against the twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_kernels import MoE, ScaledTensor, dequantize, moe_mlp, quantize, reference, topk_softmax
from moe_kernels.glu import GLUSpec
from moe_kernels.kernels import activation, permute, scaled_gemm
from moe_kernels.rules import quantize as rules
from moe_kernels.runtime import cache
from moe_kernels.runtime.plan import Builder
from moe_kernels.runtime.signature import Counts, Operator
from moe_kernels.runtime.symbolic import SymbolicTensor
from moe_kernels.scaled import FP8_COMPUTE
from moe_kernels.testing import assert_within_budget

FORMATS = ("rowwise", "128x128")
NAN, INF = float("nan"), float("inf")
FC = {"w1": (256, 128), "w3": (256, 128), "w2": (128, 256)}  # inputs and outputs of an expert's linear layers
SILU = GLUSpec("silu", True, False, 1.702, 7.0)
LAYERS: dict[str, dict[str, Any]] = {
    "SwiGLU": {},
    "gpt-oss": {"activation": "clamped_swiglu", "interleaved": True, "alpha": 1.3, "limit": 0.7},
    "without a gate": {"gated": False, "activation": "relu_squared"},
}


def parts_of(format: str) -> str:
    return "rowwise" if format == "rowwise" else "1x128"


def make(
    T: int,
    H: int,
    I: int,  # noqa: E741
    E: int,
    top_k: int,
    format: str,
    device: str,
    options: dict[str, Any],
    bias: bool = False,
) -> dict[str, Any]:
    """Return arguments of `moe_mlp`: every 7th id is dropped, and no token picks the last expert."""
    W = 2 * I if options.get("gated", True) else I
    ids = torch.randint(0, max(1, E - 1), (T, top_k), dtype=torch.int64)
    ids.view(-1)[3::7] = E
    made: dict[str, Any] = {
        "hidden": torch.randn(T, H).bfloat16(),
        "topk_ids": ids,
        "topk_weights": torch.rand(T, top_k) + 0.1,
    }
    if bias:
        made |= {"gate_up_bias": torch.randn(E, W).bfloat16(), "down_bias": torch.randn(E, H).bfloat16()}
    made = {name: x.to(device) for name, x in made.items()}
    made["w_gate_up"] = quantize((torch.randn(E, W, H) / H**0.5).to(device), format)
    made["w_down"] = quantize((torch.randn(E, H, I) / I**0.5).to(device), format)
    return made


def exactly(arguments: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """Compute the layer of the dequantised weights in float64, quantising the same intermediates as the twin."""
    topk_weights, parts = arguments["topk_weights"], parts_of(arguments["w_gate_up"].format)
    w_in, w_out = (dequantize(arguments[name], torch.float64).mT for name in ("w_gate_up", "w_down"))
    b_in, b_out = (arguments[name].double() if name in arguments else None for name in ("gate_up_bias", "down_bias"))
    routing = reference.route(arguments["topk_ids"], topk_weights, len(w_in))

    def product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        values = dequantize(reference.quantize(rows, parts), torch.float64)
        return reference.grouped_linear(values, weight, routing.group_offsets, bias, None)

    preact = product(reference.permute(arguments["hidden"], routing), w_in, b_in)
    act = reference.activate(preact, None, SILU._replace(**options))
    routed = topk_weights.double(), routing.slot_to_row, routing.group_offsets, topk_weights.size(1)
    return reference.combine_rows(product(act, w_out, b_out), *routed, torch.float64)


def assert_near_twin(out: Tensor, arguments: dict[str, Any], options: dict[str, Any]) -> None:
    """Assert errors against float64 of at most twice the twin's: of all elements, of all tokens, and of each token.

    A token's budget comes from the token where the twin's error is largest: both errors mostly come from few values per
    token that fp8 rounds the other way. The terms added to the budgets allow for results rounded the other way.
    """
    right, twin = exactly(arguments, options), reference.moe_mlp(**arguments, **options)
    assert (out.shape, out.dtype) == (twin.shape, twin.dtype)
    difference, twins = (x.double() - right for x in (out, twin))
    assert difference.abs().max() <= 2 * twins.abs().max() + 2**-8 * right.abs().max()
    size, error, twins_error = (x.norm(dim=1) for x in (right, difference, twins))
    assert error.norm() <= 2 * twins_error.norm() + 2**-9 * size.norm()
    largest = (twins_error / size)[size > 0].max()
    assert largest < 0.1
    assert (error <= (2 * largest + 2**-9) * size).all(), f"errors {error / size}, the twin's {twins_error / size}"
    assert right.any()


def assert_as_twin(arguments: dict[str, Any], options: dict[str, Any]) -> Tensor:
    out = moe_mlp(**arguments, **options)
    assert_near_twin(out, arguments, options)
    return out


@pytest.mark.parametrize(
    ("T", "H", "I", "E", "top_k", "name", "bias", "format"),
    [
        (2, 256, 128, 4, 2, "SwiGLU", False, "rowwise"),
        (5, 200, 72, 6, 2, "gpt-oss", True, "rowwise"),
        (5, 200, 72, 6, 2, "gpt-oss", True, "128x128"),
        (40, 200, 136, 3, 2, "without a gate", True, "128x128"),
    ],
)
def test_as_the_twin(
    T: int,
    H: int,
    I: int,  # noqa: E741
    E: int,
    top_k: int,
    name: str,
    bias: bool,
    format: str,
    device: str,
) -> None:
    options = LAYERS[name]
    arguments = make(T, H, I, E, top_k, format, device, options, bias)
    out = assert_as_twin(arguments, options)
    if T == 5:
        assert torch.equal(moe_mlp(**arguments, **options), out)


@pytest.mark.parametrize(("T", "format"), [(1, "rowwise"), (6, "128x128")])
def test_calls_like_an_earlier_one_are_repeats(
    T: int, format: str, device: str, repeats: Callable[[str], None], few_programs: None
) -> None:
    """Each call has new tensors, perhaps with another number of tokens; calls with other options are not repeats."""
    for tokens in (T, T, T + (T > 1)):
        arguments = make(tokens, 200, 72, 6, 2, format, device, {}, True)
        out = moe_mlp(**arguments)
        (assert_near_twin(out, arguments, {}) if T > 1 else assert_exact_but_for_weights(arguments, {}))
        repeats("scaled_moe_mlp")
    assert len(cache.plans.recent["scaled_moe_mlp"]) == 1
    rowwise: list[dict[str, Any]] = [{"fast_accumulation": True}] if format == "rowwise" else []
    for options in ({"activation": "gelu"}, {"interleaved": True}, *rowwise):
        with pytest.raises(AssertionError, match="no repeat"):
            moe_mlp(**arguments, **options)
    for options in ({"transposed": True}, {"up_bias": arguments["gate_up_bias"]}):
        with pytest.raises(ValueError):
            moe_mlp(**arguments, **options)
    for name, value in (("fast_accumulation", 0), ("transposed", 0), ("gated", 1), ("interleaved", 0)):
        with pytest.raises(TypeError, match=f"^{name}: expected True or False, got {value}"):
            moe_mlp(**arguments, **{name: value})
    with pytest.raises(TypeError, match=r"^alpha: expected a number, got torch\.Tensor"):
        moe_mlp(**arguments, alpha=torch.tensor(1.702, dtype=torch.float64))  # type: ignore[arg-type]


def assert_exact_but_for_weights(arguments: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """Assert at most twice the error of plain PyTorch with dequantised weights: only the weights are quantised."""

    def layer(dtype: torch.dtype, device: str) -> Tensor:
        given = {name: x.to(device) for name, x in arguments.items() if not isinstance(x, ScaledTensor)}
        given = {name: x.to(dtype) if x.is_floating_point() else x for name, x in given.items()}
        weights = {name: dequantize(x).to(device, dtype) for name, x in arguments.items() if name not in given}
        return reference.moe_mlp(**given, **weights, **options)

    hidden = arguments["hidden"]
    exact = layer(torch.float64, "cpu").to(hidden.device)
    out = moe_mlp(**arguments, **options)
    plain = layer(hidden.dtype, hidden.device.type)
    assert_within_budget(out, plain, exact, scale=16 * exact.abs().max().item())
    return out


@pytest.fixture
def launched(fresh_plans: None, few_programs: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the kernels in the plans that are created."""
    names: list[str] = []
    launch = Builder.launch

    def note(builder: Builder, kernel: Any, *rest: Any, **options: Any) -> None:
        names.append(kernel.name)
        launch(builder, kernel, *rest, **options)

    monkeypatch.setattr(Builder, "launch", note)
    return names


@pytest.mark.parametrize(
    ("name", "H", "I", "bias", "dtype", "format"),
    [
        ("SwiGLU", 200, 72, False, torch.float32, "rowwise"),
        ("SwiGLU", 256, 128, True, torch.bfloat16, "128x128"),
        ("gpt-oss", 136, 72, True, torch.float16, "rowwise"),
        ("gpt-oss", 136, 72, True, torch.float16, "128x128"),
        ("without a gate", 16, 8, True, torch.float32, "128x128"),
    ],
)
def test_one_token(
    name: str,
    H: int,
    I: int,  # noqa: E741
    bias: bool,
    dtype: torch.dtype,
    format: str,
    launched: list[str],
    device: str,
) -> None:
    """Blocks of up begin within a square, a slot is dropped, an expert is chosen twice; others must not be read."""
    options = LAYERS[name]
    arguments = make(1, H, I, 5, 4, format, device, options, bias)
    arguments["hidden"] = arguments["hidden"].to(dtype)
    arguments["topk_ids"].copy_(torch.tensor([[3, -1, 1, 3]]))
    right = assert_exact_but_for_weights(arguments, options)
    assert launched[-2:] == ["first_half", "second_half"]
    arguments["topk_weights"][0, 1] = NAN
    for weight in (arguments["w_gate_up"], arguments["w_down"]):
        weight.data.view(torch.uint8)[[0, 2, 4]] = 0x7F  # NaN
        weight.scales[[0, 2, 4]] = NAN
    assert torch.equal(moe_mlp(**arguments, **options), right)
    arguments["w_down"].scales[1, 0] = NAN
    out = moe_mlp(**arguments, **options)
    reached = 1 if format == "rowwise" else 128
    assert out[:, :reached].isnan().all()
    assert torch.equal(out[:, reached:], right[:, reached:])
    arguments["topk_ids"].fill_(5)
    assert not moe_mlp(**arguments, **options).any()


@pytest.mark.parametrize("format", FORMATS)
def test_one_token_of_small_extents_and_odd_strides(format: str, launched: list[str], device: str) -> None:
    for H, I, E in ((1, 1, 1), (5, 1, 2), (130, 260, 2)):  # noqa: E741
        arguments = make(1, H, I, E, 2, format, device, {}, bias=True)
        arguments["hidden"] = torch.randn(H, 3, device=device)[:, 1:2].T
        arguments["topk_ids"].fill_(E - 1)
        arguments["topk_weights"] = torch.ones(1, 1, device=device).expand(1, 2)
        assert_exact_but_for_weights(arguments, {})
        assert launched[-2:] == ["first_half", "second_half"]


@torch.no_grad()
@pytest.mark.parametrize("format", ["fp8_rowwise", "fp8_block"])
def test_quantized_layer(format: str, device: str) -> None:
    """A layer made from modules, also compared with the dequantised weights' layer, which quantises no activations."""
    experts = [torch.nn.ModuleDict({n: torch.nn.Linear(*x, bias=False) for n, x in FC.items()}) for _ in range(4)]
    router, options = torch.randn(4, 256), {"top_k": 2, "renormalize": True, "activation": "silu"}
    plain, made = (MoE.from_experts(experts, router, **options).to(device, torch.bfloat16) for _ in range(2))
    w_gate_up, w_down = (quantize(w, FP8_COMPUTE[format]) for w in (plain.w_gate_up, plain.w_down))
    plain.w_gate_up.copy_(dequantize(w_gate_up))
    plain.w_down.copy_(dequantize(w_down))
    hidden = torch.randn(2, 256, device=device).bfloat16()
    out = made.quantize(format)(hidden)
    topk_ids, topk_weights = topk_softmax(hidden @ plain.router.T, 2, renormalize=True)
    arguments = {"hidden": hidden, "topk_ids": topk_ids, "topk_weights": topk_weights}
    assert_near_twin(out, arguments | {"w_gate_up": w_gate_up, "w_down": w_down}, {})
    exact = plain.to("cpu", torch.float64)(hidden.cpu().double())
    assert 0.005 * exact.norm() < (out.cpu() - exact).norm() < 0.06 * exact.norm()


@pytest.mark.parametrize("format", FORMATS)
def test_nan_of_a_token_stays_there(format: str, device: str) -> None:
    """A token whose slots are all dropped stays zero even if it holds NaN."""
    arguments = make(5, 200, 72, 2, 2, format, device, {}, bias=True)
    arguments["topk_ids"][:] = 0
    arguments["topk_ids"][2] = -1
    right = moe_mlp(**arguments)
    arguments["hidden"][2:4, 7] = NAN
    out = moe_mlp(**arguments)
    others = torch.arange(5, device=device) != 3
    assert out[3].isnan().all()
    assert torch.equal(out[others], right[others])
    assert not out[2].any()


def run(name: str, tensors: dict[str, Tensor], draw: Any) -> tuple[Tensor, ...]:
    """Return the results of a part of a plan for these tensors."""
    first = next(iter(tensors.values()))
    operator = Operator(name, __name__, tuple(tensors), tuple(tensors)[:1], lambda *_: Counts(first.size(0)))
    globals()[f"plan_{name}"] = lambda builder, inputs, _: draw(builder, *inputs)
    with cache.isolated():
        made: tuple[Tensor, ...] = cache.call(operator, tuple(tensors.values()), ())
    return made


def assert_same_bits(made: tuple[Tensor, ...], right: ScaledTensor) -> None:
    assert torch.equal(made[0].view(torch.uint8), right.data.view(torch.uint8))
    assert torch.equal(made[1].contiguous().view(torch.int32), right.scales.contiguous().view(torch.int32))


@pytest.mark.parametrize("format", ["rowwise", "1x128"])
def test_gathered_rows_are_those_of_quantize(format: str, device: str, fresh_plans: None) -> None:
    """This includes tokens with NaN, infinity, zeros and subnormals, and dropped slots."""
    long = [(rules.AT_ONCE + 8, torch.bfloat16)] if format == "rowwise" else []
    for H, dtype in [(16, torch.float32), (200, torch.bfloat16), (200, torch.float16), *long]:
        hidden = (torch.randn(9, H) * 2.0 ** torch.randint(-9, 5, (9, 1))).to(dtype).to(device)
        hidden[1, 3], hidden[2, H - 1], hidden[4] = NAN, -INF, 0
        subnormals = torch.randn(2, H, device=device) * torch.finfo(dtype).smallest_normal
        hidden[5], hidden[6, 1::2] = subnormals[0].to(dtype), subnormals[1, 1::2].to(dtype)
        ids = torch.randint(-1, 5, (9, 3)).to(device)
        ids[1:7, 0] = torch.arange(6, device=device) % 4
        routing = reference.route(ids, torch.ones(9, 3, device=device), 4)
        right = reference.quantize(reference.permute(hidden, routing), format)

        def draw(builder: Builder, tokens: SymbolicTensor, slots: SymbolicTensor, offsets: SymbolicTensor) -> Any:
            return permute.scatter_scaled(builder, tokens, slots, offsets, 3, format)

        tensors = {"tokens": hidden, "slot_to_row": routing.slot_to_row, "group_offsets": routing.group_offsets}
        assert_same_bits(run("gather", tensors, draw), right)


@pytest.mark.parametrize("format", ["rowwise", "1x128"])
@pytest.mark.parametrize("name", LAYERS)
def test_activation_is_quantised(name: str, format: str, device: str, fresh_plans: None) -> None:
    """The bits are those of `quantize` for act; if f is exact, the twin's, else the error is at most twice the twin's.

    This includes rows with zeros, as rows in no group have, subnormals, infinity and NaN.
    """
    spec = SILU._replace(**LAYERS[name])
    for width in (72, 200, *((rules.AT_ONCE + 8,) if (name, format) == ("SwiGLU", "rowwise") else ())):
        preact = torch.randn(11, 2 * width if spec.gated else width).bfloat16().to(device)
        preact[1] = 0
        preact[2] *= 2.0**-130
        preact[3] *= 2.0**-60
        for row, value in enumerate((NAN, INF, -INF), start=4):
            preact[row, 4] = value
            preact[row + 3, -1] = value  # of up, if there is a gate

        def draw(builder: Builder, x: SymbolicTensor) -> Any:
            act = activation.plan_activate(builder, (x, None), (spec,), torch.float32)
            return *activation.write_scaled_activation(builder, x, format, spec), act

        data, scales, act = run("activation", {"preact": preact}, draw)
        assert_same_bits((data, scales), reference.quantize(act, format))
        right = reference.quantize(reference.activate(preact.float(), None, spec), format)
        if name == "without a gate":
            assert_same_bits((data, scales), right)
        assert torch.equal(scales.isnan(), right.scales.isnan())
        assert right.scales.isnan().any(1).any() and not right.scales[:4].isnan().any()
        finite = ~right.scales.isnan().any(1)
        exact = reference.activate(preact.double(), None, spec)[finite]
        values = dequantize(ScaledTensor(data, scales, format)).double()[finite]
        budget = 2 * (dequantize(right).double()[finite] - exact).norm(dim=1)
        assert ((values - exact).norm(dim=1) <= budget).all()
        ordinary = exact.norm(dim=1) > 2.0**-100
        assert ordinary.sum() >= 2 and (budget <= exact.norm(dim=1) / 8)[ordinary].all()


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("T", "H", "I", "E", "top_k"),
    [
        (1, 2048, 768, 128, 8),
        (1, 4096, 14336, 8, 2),
        (1, 2880, 2880, 32, 4),
        (300, 2048, 768, 128, 8),
        (4096, 2880, 2880, 32, 4),
    ],
)
def test_sizes_of_models(T: int, H: int, I: int, E: int, top_k: int, format: str, device: str) -> None:  # noqa: E741
    arguments = make(T, H, I, E, top_k, format, device, {})
    out = assert_as_twin(arguments, {}) if T > 1 else assert_exact_but_for_weights(arguments, {})
    for _ in range(5):
        assert torch.equal(moe_mlp(**arguments), out)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [40, 2048])
def test_fast_accumulation(T: int, device: str) -> None:
    """The sums differ from exact ones, are as close to float64, and have the same bits on repeat."""
    arguments = make(T, 4096, 1024, 8, 2, "rowwise", device, {})
    exact, fast = moe_mlp(**arguments), moe_mlp(**arguments, fast_accumulation=True)
    assert_near_twin(fast, arguments, {})
    assert not torch.equal(fast, exact)
    for _ in range(3):
        assert torch.equal(moe_mlp(**arguments, fast_accumulation=True), fast)
        assert torch.equal(moe_mlp(**arguments), exact)


@pytest.mark.parametrize("fast", [False, True])
def test_both_products_accumulate_as_asked(fast: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One fast product would be enough for a result that differs from the exact one."""
    asked: list[bool] = []
    monkeypatch.setattr(scaled_gemm, "multiply", lambda *_, fast: asked.append(fast))
    with cache.isolated():
        moe_mlp(**make(3, 32, 32, 3, 2, "rowwise", device, {}), fast_accumulation=fast)
    assert asked == [fast, fast]


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_more_experts_than_are_sorted_at_once(format: str, device: str) -> None:
    assert_as_twin(make(600, 128, 64, 1100, 2, format, device, {}), {})


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 40])
@pytest.mark.parametrize("format", FORMATS)
def test_graph_replay(format: str, T: int, device: str) -> None:
    arguments = make(T, 256, 128, 8, 2, format, device, {})
    moe_mlp(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe_mlp(**arguments)
    for _ in range(3):
        arguments["topk_ids"].random_(-1, 9)
        arguments["hidden"].normal_()
        graph.replay()
        assert torch.equal(out, moe_mlp(**arguments))
