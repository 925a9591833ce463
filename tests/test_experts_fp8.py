"""Layers of experts with fp8 weights on CPU tensors, through the reference; `MoE.quantize`; errors."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.library import opcheck
from torch.nn.utils import parametrize, prune

from moe_kernels import (
    MoE,
    ScaledTensor,
    dequantize,
    grouped_gemm,
    moe_mlp,
    permute,
    quantize,
    reference,
    route,
    topk_softmax,
    unpermute,
)
from moe_kernels import nn as nn_module
from moe_kernels.ahead import collect, layers_of
from moe_kernels.glu import GLUSpec
from moe_kernels.runtime import cache
from moe_kernels.scaled import FP8_COMPUTE

T, H, I, E, TOP_K = 12, 160, 136, 4, 2  # noqa: E741
FORMATS = ("rowwise", "128x128")
LAYERS: dict[str, dict[str, Any]] = {
    "SwiGLU": {},
    "gpt-oss": {"activation": "clamped_swiglu", "interleaved": True, "alpha": 1.3, "limit": 0.7},
    "DeepSeek-V4": {"activation": "clamped_silu", "limit": 0.7},
    "without a gate": {"gated": False, "activation": "relu_squared"},
    "gelu": {"activation": "gelu"},
}


def make(format: str, dtype: torch.dtype = torch.bfloat16, bias: bool = False, gated: bool = True) -> dict[str, Any]:
    """Return arguments of `moe_mlp`; some ids are dropped, and no token picks the last expert."""
    W = 2 * I if gated else I
    ids = torch.randint(0, E - 1, (T, TOP_K))
    ids[2, 1], ids[5, 0] = -1, E
    made: dict[str, Any] = {
        "hidden": torch.randn(T, H, dtype=dtype),
        "topk_ids": ids,
        "topk_weights": torch.rand(T, TOP_K),
        "w_gate_up": quantize(torch.randn(E, W, H) / H**0.5, format),
        "w_down": quantize(torch.randn(E, H, I) / I**0.5, format),
    }
    if bias:
        made |= {"gate_up_bias": torch.randn(E, W, dtype=dtype), "down_bias": torch.randn(E, H, dtype=dtype)}
    return made


def float64_of(arguments: dict[str, Any], format: str, spec: GLUSpec) -> Tensor:
    """Compute the layer slot by slot in float64 from dequantised operands, quantising intermediates as it does."""
    parts = "rowwise" if format == "rowwise" else "1x128"
    hidden = dequantize(quantize(arguments["hidden"], parts), torch.float64)
    w_in, w_out = (dequantize(arguments[name], torch.float64) for name in ("w_gate_up", "w_down"))
    out = torch.zeros(T, H, dtype=torch.float64)
    for t in range(T):
        for k in range(TOP_K):
            e = int(arguments["topk_ids"][t, k])
            if not 0 <= e < E:
                continue
            h = hidden[t] @ w_in[e].T
            if "gate_up_bias" in arguments:
                h = h + arguments["gate_up_bias"][e].double()
            act = reference.activate(h[None], None, spec)
            y = dequantize(quantize(act, parts), torch.float64)[0] @ w_out[e].T
            if "down_bias" in arguments:
                y = y + arguments["down_bias"][e].double()
            out[t] += arguments["topk_weights"][t, k].double() * y
    return out


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("format", FORMATS)
def test_the_formula(format: str, name: str, bias: bool) -> None:
    options = LAYERS[name]
    arguments = make(format, torch.float32, bias, options.get("gated", True))
    spec = GLUSpec(
        **{"activation": "silu", "gated": True, "interleaved": False, "alpha": 1.702, "limit": 7.0, **options}
    )
    exact = float64_of(arguments, format, spec)
    out = moe_mlp(**arguments, **options)
    # An element that is rounded to the other of two adjacent fp8 numbers differs by up to an eighth of itself.
    assert float((out - exact).norm() / exact.norm()) < 3e-3
    in_bfloat16 = make_bfloat16(arguments)
    again = moe_mlp(**in_bfloat16, **options)
    assert again.dtype == torch.bfloat16
    assert float((again - exact).norm() / exact.norm()) < 0.05
    assert torch.equal(again, reference.moe_mlp(**in_bfloat16, **options))


def make_bfloat16(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in arguments.items()
    }


@pytest.mark.parametrize("format", FORMATS)
def test_close_to_the_original_weights(format: str) -> None:
    weights = torch.randn(E, 2 * I, H) / H**0.5, torch.randn(E, H, I) / I**0.5
    arguments = make(format, torch.float32)
    exact = reference.moe_mlp(*(arguments[x] for x in ("hidden", "topk_ids", "topk_weights")), *weights)
    arguments |= {"w_gate_up": quantize(weights[0], format), "w_down": quantize(weights[1], format)}
    out = moe_mlp(**arguments)
    assert 0.005 < float((out - exact).norm() / exact.norm()) < 0.08


@pytest.mark.parametrize("format", FORMATS)
def test_nan_of_a_token_stays_there(format: str) -> None:
    arguments = make(format)
    right = moe_mlp(**arguments)
    arguments["hidden"][3, 7] = torch.nan
    out = moe_mlp(**arguments)
    others = torch.arange(T) != 3
    assert out[3].isnan().all()
    assert torch.equal(out[others], right[others])


@pytest.mark.parametrize("format", FORMATS)
def test_traced_and_without_memory(format: str) -> None:
    arguments = make(format, bias=True)
    right = moe_mlp(**arguments)
    traced = torch.compile(moe_mlp, fullgraph=True, backend="aot_eager")
    assert torch.equal(traced(**arguments), right)
    weights = {name: arguments[name] for name in ("w_gate_up", "w_down")}
    meta = {name: x.to("meta") for name, x in arguments.items() if name not in weights}
    meta |= {name: ScaledTensor(x.data.to("meta"), x.scales.to("meta"), format) for name, x in weights.items()}
    made = moe_mlp(**meta)
    assert (made.shape, made.dtype, made.stride()) == (right.shape, right.dtype, right.stride())
    routed = (arguments["hidden"], arguments["topk_ids"], arguments["topk_weights"])
    given = (*routed, *weights["w_gate_up"][:2], *weights["w_down"][:2], None, None)
    opcheck(
        torch.ops.moe_kernels.scaled_moe_mlp.default,
        (*given, format == "rowwise", format == "rowwise", "silu", True, False, 1.702, 7.0),
        test_utils=(
            "test_autograd_registration",
            "test_faketensor",
            "test_aot_dispatch_dynamic",
        ),  # the other tests multiply fp8
    )


@pytest.mark.parametrize("format", FORMATS)
def test_no_tokens_and_autocast(format: str) -> None:
    arguments = make(format, torch.float32)
    empty = {name: arguments[name][:0] for name in ("hidden", "topk_ids", "topk_weights")}
    assert moe_mlp(**{**arguments, **empty}).shape == (0, H)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert moe_mlp(**arguments).dtype == torch.bfloat16


GOOD = make("128x128")
W_IN, W_OUT = GOOD["w_gate_up"], GOOD["w_down"]
REFUSALS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"transposed": True}, ValueError, r"transposed: expected False for products.*quantize\(w\.mT, \.\.\.\)"),
    ({"w_up": torch.ones(E, I, H)}, ValueError, r"w_up: expected None for products.*torch\.cat\(\(gate, up\), 1\)"),
    ({"up_bias": torch.ones(E, I)}, ValueError, "up_bias: expected None without w_up"),
    ({"w_down": torch.ones(E, H, I)}, TypeError, "w_down: expected a ScaledTensor, as for w_gate_up, got Tensor"),
    ({"w_gate_up": torch.ones(E, 2 * I, H)}, TypeError, "w_gate_up: expected a ScaledTensor, as for w_down, got Ten"),
    ({"w_down": quantize(torch.ones(E, H, I), "rowwise")}, ValueError, "expected the formats 'rowwise' and 'rowwise'"),
    ({"w_down": W_OUT._replace(data=torch.ones(E, H, I))}, TypeError, "w_down.data: expected float8_e4m3fn"),
    (
        {"w_down": quantize(torch.ones(E, H, I), "128x128", dtype=torch.float8_e5m2)},
        TypeError,
        "w_down.data: expected float8_e4m3fn, got torch.float8_e5m2",
    ),
    ({"w_down": W_OUT._replace(scales=W_OUT.scales.half())}, TypeError, "w_down.scales: expected float32, got"),
    (
        {"w_gate_up": W_IN._replace(scales=torch.ones(E, 1, 2))},
        ValueError,
        r"w_gate_up.scales: expected shape \[E, cdiv\(2I, 128\), cdiv\(H, 128\)\] = \[4, 3, 2\], got \[4, 1, 2\]",
    ),
    ({"w_down": W_OUT._replace(data=W_OUT.data[:, 1:])}, ValueError, r"w_down: expected shape \[E, H, I\]"),
    ({"hidden": torch.ones(T, H + 1)}, ValueError, r"w_gate_up: expected shape \[E, 2I, H\] with H = 161"),
    (
        {"hidden": torch.ones(T, H).double()},
        TypeError,
        "hidden: expected bfloat16, float16 or float32, got",
    ),
    ({"down_bias": torch.ones(E, H + 1)}, ValueError, r"down_bias: expected shape \[E, H\]"),
    ({"gate_up_bias": torch.ones(E, 1)}, ValueError, r"gate_up_bias: expected shape \[E, 2I\]"),
    (
        {"topk_ids": torch.ones(T + 1, TOP_K).long(), "topk_weights": torch.ones(T + 1, TOP_K)},
        ValueError,
        "expected T =",
    ),
    ({"activation": "swish"}, ValueError, "activation: expected one of"),
    ({"fast_accumulation": True}, ValueError, "fast_accumulation: expected False for '1x128' and '128x128'"),
    (
        {"fast_accumulation": True, "w_gate_up": torch.ones(E, 2 * I, H), "w_down": torch.ones(E, H, I)},
        ValueError,
        "fast_accumulation: expected False for products that are not in fp8.*compute='fp8_rowwise'",
    ),
    ({"validate": True}, ValueError, r"topk_ids\[2, 1\]: expected 0 to 3, got -1"),
    (
        {"w_down": ScaledTensor(W_OUT.data.to("meta"), W_OUT.scales.to("meta"), "128x128")},
        ValueError,
        "w_down: expected on cpu with w_gate_up, got on meta",
    ),
    (
        {"down_bias": torch.ones(E, H, device="meta")},
        ValueError,
        "down_bias: expected on cpu with w_gate_up, got on meta",
    ),
    (
        {"w_down": W_OUT._replace(scales=W_OUT.scales.clone().requires_grad_())},
        RuntimeError,
        "w_down.scales: moe_mlp with fp8 weights has no gradients",
    ),
]


@pytest.mark.parametrize(
    ("change", "error", "text"), REFUSALS, ids=[f"{', '.join(change)}: {text}" for change, _, text in REFUSALS]
)
def test_refuses(change: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        moe_mlp(**{**GOOD, **change})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the options of the calls that were looked for among the repeats; none is found."""
    seen: list[Any] = []
    monkeypatch.setattr(cache, "repeat", lambda operator, tensors, requested: seen.append(requested))
    return seen


def test_a_repeat_has_the_same_format_and_options(asked: list[Any]) -> None:
    for options in (
        {},
        {"fast_accumulation": True},
        {"interleaved": True},
        {"activation": "gelu"},
        {"activation": "clamped_swiglu"},
        {"activation": "clamped_swiglu", "alpha": 1.3},
        {"activation": "clamped_swiglu", "limit": 0.7},
        make("128x128"),
    ):
        moe_mlp(**{**make("rowwise"), **options})
    assert len(asked) == len(set(asked)) == 8


@pytest.mark.parametrize("name", ["fast_accumulation", "transposed", "gated", "interleaved"])
def test_a_number_for_a_bool_is_no_repeat(name: str, asked: list[Any]) -> None:
    """The options are equal, but the checks refuse numbers."""
    moe_mlp(**make("rowwise"))
    with pytest.raises(TypeError, match=f"^{name}: expected True or False, got [01]"):
        moe_mlp(**make("rowwise"), **{name: int(name == "gated")})
    assert len(asked) == len(set(asked)) == 2


@pytest.mark.parametrize("change", [{"w_up": torch.ones(E, I, H)}, {"up_bias": torch.ones(E, I)}], ids=", ".join)
def test_what_fp8_weights_rule_out_is_no_repeat(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    known = torch.zeros(())
    monkeypatch.setattr(cache, "repeat", lambda *_: known)
    assert moe_mlp(**GOOD) is known
    with pytest.raises(ValueError, match=f"^{', '.join(change)}: expected None"):
        moe_mlp(**GOOD, **change)


@pytest.mark.parametrize("name", ["hidden", "topk_weights"])
def test_no_gradients(name: str) -> None:
    arguments = {**GOOD, name: GOOD[name].clone().requires_grad_()}
    with pytest.raises(RuntimeError, match=rf"{name}: moe_mlp with fp8 .*torch\.no_grad\(\).*bfloat16 weights"):
        moe_mlp(**arguments)
    with torch.no_grad():
        assert torch.equal(moe_mlp(**arguments), moe_mlp(**GOOD))
    no_tangents = rf"{name}: moe_mlp with fp8 weights has no forward-mode derivatives.*pass bfloat16 weights"
    with pytest.raises(RuntimeError, match=no_tangents):
        torch.func.jvp(lambda x: moe_mlp(**{**GOOD, name: x}), (GOOD[name],), (GOOD[name],))


@pytest.mark.parametrize("tokens", [T, 1, 0])
def test_constants_in_forward_mode(tokens: int) -> None:
    given = {name: x[:tokens] if name in ("hidden", "topk_ids", "topk_weights") else x for name, x in GOOD.items()}
    expected, x = moe_mlp(**given), torch.ones(3)
    value, tangent = torch.func.jvp(lambda x: moe_mlp(**given) * x.sum(), (x,), (x,))
    assert expected.any() == (tokens > 0)
    torch.testing.assert_close(value, 3 * expected)
    assert torch.equal(tangent, value)
    hidden = given["hidden"][None]
    by_vmap = torch.vmap(lambda h: moe_mlp(**{**given, "hidden": h}))
    value, _ = torch.func.jvp(lambda x: by_vmap(hidden) * x.sum(), (x,), (x,))
    torch.testing.assert_close(value[0], 3 * expected)
    with pytest.raises(RuntimeError, match=r"hidden: .* has a tangent"):
        torch.func.jvp(by_vmap, (hidden,), (hidden,))


def layer(**options: Any) -> MoE:
    torch.manual_seed(0)
    return MoE(H, I, E, TOP_K, renormalize=True, dtype=torch.bfloat16, **options)


def test_no_gradients_of_an_exported_layer() -> None:
    exported = torch.export.export(layer().quantize("fp8_block").requires_grad_(False), (torch.ones(5, H).bfloat16(),))
    hidden = torch.randn(5, H).bfloat16().requires_grad_()
    with pytest.raises(RuntimeError, match=r"moe_mlp with fp8 weights has no gradients: .* torch\.no_grad\(\)"):
        exported.module()(hidden).sum().backward()


@torch.no_grad()
@pytest.mark.parametrize("format", ["fp8_block", "fp8_rowwise"])
def test_quantize_a_layer(format: str) -> None:
    plain, made = layer(), layer()
    assert made.quantize(format) is made
    with torch.enable_grad(), pytest.raises(RuntimeError, match=r"router\.requires_grad_\(False\)"):
        made(torch.randn(3, H).bfloat16())
    hidden = torch.randn(3, 4, H).bfloat16()
    form = {"fp8_block": "128x128", "fp8_rowwise": "rowwise"}[format]
    tokens = hidden.view(-1, H)
    routed = topk_softmax(tokens @ plain.router.T, TOP_K, renormalize=True)
    weights = quantize(plain.w_gate_up, form), quantize(plain.w_down, form)
    out = made(hidden)
    assert torch.equal(out, moe_mlp(tokens, *routed, *weights).view(3, 4, H))
    exact = plain(hidden)
    assert 0.005 < float((out - exact).norm() / exact.norm()) < 0.08
    assert [name for name, _ in made.named_parameters()] == ["router"]
    assert f"format={format}" in repr(made)
    assert "format" not in repr(plain)
    assert "compute" not in repr(layer(compute=format).quantize(format))  # which is ignored
    with pytest.raises(RuntimeError, match=f"quantised before, as '{format}'"):
        made.quantize("fp8_block")
    assert torch.equal(copy.deepcopy(made)(hidden), out)
    made.compile(backend="eager")
    copied = copy.deepcopy(made)
    copied.w_down_scales.zero_()
    assert not copied(hidden).any() and torch.equal(made(hidden), out)


@torch.no_grad()
@pytest.mark.parametrize("format", ["fp8_block", "fp8_rowwise"])
def test_fast_accumulation_of_a_layer(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is passed on only where it has an effect."""
    asked: list[bool] = []

    def noted(*arguments: Any, fast_accumulation: bool, **options: Any) -> Tensor:
        asked.append(fast_accumulation)
        return moe_mlp(*arguments, fast_accumulation=fast_accumulation, **options)

    monkeypatch.setattr(nn_module, "moe_mlp", noted)
    made, hidden = layer(fast_accumulation=True), torch.randn(5, H).bfloat16()
    made(hidden)
    assert "fast_accumulation" not in repr(made)
    made.quantize(format)(hidden)
    rowwise = format == "fp8_rowwise"
    assert asked == [False, rowwise] and ("fast_accumulation=True" in repr(made)) == rowwise
    made.fast_accumulation = False
    made(hidden)
    assert asked[2:] == [False]
    trained = layer(fast_accumulation=True, compute=format)
    trained(hidden)
    assert asked[3:] == [rowwise] and ("fast_accumulation=True" in repr(trained)) == rowwise


def test_quantize_refuses() -> None:
    with pytest.raises(ValueError, match="format: expected one of 'fp8_block', 'fp8_rowwise', got 'fp8'"):
        layer().quantize("fp8")
    with pytest.raises(ValueError, match=r"format: expected one of .*, got \['fp8_block'\]"):
        layer().quantize(["fp8_block"])  # type: ignore[arg-type]
    made = layer().quantize("fp8_block")
    with pytest.raises(RuntimeError, match="the weights of this layer are quantised, as 'fp8_block'"):
        made.reset_parameters()
    with pytest.raises(RuntimeError, match="has no gradients"):
        made(torch.ones(1, H, dtype=torch.bfloat16))  # the router's gradient would be requested
    made.requires_grad_(False)
    assert made(torch.ones(1, H, dtype=torch.bfloat16)).any()


@torch.no_grad()
@pytest.mark.parametrize("format", ["fp8_block", "fp8_rowwise"])
def test_saved_and_loaded(format: str) -> None:
    made, hidden = layer().quantize(format), torch.randn(5, H).bfloat16()
    file = io.BytesIO()
    torch.save(made.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    assert set(state) == {"router", "w_gate_up", "w_gate_up_scales", "w_down", "w_down_scales"}
    for assign in (False, True):
        other = MoE(H, I, E, TOP_K, renormalize=True, dtype=torch.bfloat16).quantize(format)
        other.load_state_dict(state, assign=assign)
        assert torch.equal(other(hidden), made(hidden))


@pytest.mark.parametrize("format", FORMATS)
def test_act_is_quantised_from_float32(format: str) -> None:
    """It is not rounded to the dtype of `hidden` before."""
    made, parts = make(format), "rowwise" if format == "rowwise" else "1x128"
    routing = route(made["topk_ids"], made["topk_weights"], E)
    rows = quantize(permute(made["hidden"], routing), parts)
    preact = grouped_gemm(rows, made["w_gate_up"].mT, routing.group_offsets)
    act = reference.activate(preact.float(), None, GLUSpec("silu", True, False, 1.702, 7.0))
    second = grouped_gemm(quantize(act, parts), made["w_down"].mT, routing.group_offsets)
    assert torch.equal(moe_mlp(**made), unpermute(second, routing))


@torch.no_grad()
@pytest.mark.parametrize("strict", [False, True])
def test_fp8_is_loaded_into_fp8_alone(strict: bool) -> None:
    made, plain = nn.Sequential(layer().quantize("fp8_rowwise")), nn.Sequential(layer())
    for into, source, way in ((plain, made, r"call quantize\(\) before"), (made, plain, "load the weights first")):
        before = {name: x.clone() for name, x in into.state_dict().items()}
        with pytest.raises(RuntimeError, match=rf"0\.w_gate_up: the layer is .*: {way}"):
            into.load_state_dict(source.state_dict(), strict=strict)
        assert all(torch.equal(x, before[name]) for name, x in into.state_dict().items())


@torch.no_grad()
def test_moved_and_cast_without_a_change_of_the_weights() -> None:
    made = nn.Sequential(layer().quantize("fp8_block"))
    before = {name: x.clone() for name, x in made[0].named_buffers()}
    for cast in (lambda: made.to(torch.float16), made.float, made.bfloat16, lambda: made.to("cpu", torch.float32)):
        cast()
        for name, x in made[0].named_buffers():
            assert x.dtype == before[name].dtype
            assert torch.equal(x.view(torch.uint8), before[name].view(torch.uint8))
    assert made[0].router.dtype == torch.float32
    assert made(torch.ones(2, H)).dtype == torch.float32
    meta = made.to("meta", torch.bfloat16)[0]
    assert {x.dtype for x in meta.buffers()} == {torch.float8_e4m3fn, torch.float32}
    assert all(x.is_meta for x in (*meta.buffers(), *meta.parameters()))
    assert made.to_empty(device="cpu")[0].w_gate_up.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("quantised", [False, True])
def test_modules_within_a_layer_may_stay_where_they_are(quantised: bool) -> None:
    made = layer()
    made.inner = nn.Linear(2, 2)
    if quantised:
        made.quantize("fp8_block")
    made.to_empty(device="meta", recurse=False)
    assert made.router.is_meta and made.w_down.is_meta and not made.inner.weight.is_meta


@torch.no_grad()
@pytest.mark.parametrize("format", ["fp8_block", "fp8_rowwise"])
def test_of_expert_modules(format: str) -> None:
    experts = [nn.Sequential(nn.Linear(H, I, bias=False), nn.ReLU(), nn.Linear(I, H, bias=False)) for _ in range(3)]
    router, hidden = torch.randn(3, H), torch.randn(4, H)
    made = MoE.from_experts(experts, router, top_k=2, renormalize=False).quantize(format)
    stacked = (torch.stack([expert[i].weight for expert in experts]) for i in (0, 2))
    weights = [quantize(w, FP8_COMPUTE[format]) for w in stacked]
    routed = topk_softmax(hidden @ router.T, 2, renormalize=False)
    right = moe_mlp(hidden, *routed, *weights, gated=False, activation="relu")
    assert right.any()
    assert torch.equal(made(hidden), right)


def test_collected() -> None:
    made = layer().quantize("fp8_rowwise")
    assert len(layers_of(nn.ModuleList([made, copy.deepcopy(made), layer(), layer().quantize("fp8_block")]))) == 3


def test_plans_ahead() -> None:
    from moe_kernels.ahead import _calls

    for format in ("fp8_block", "fp8_rowwise"):
        made = layer().quantize(format)
        wanted = collect(_calls(made, [1, 40], False))
        assert [one.operator for one in wanted if "moe" in one.operator] == ["scaled_moe_mlp"] * 2
        with pytest.raises(RuntimeError, match="has no gradients"):
            collect(_calls(made, [1], True))


def test_half_a_state_dict_is_refused_too() -> None:
    sizes: Any = {"hidden_size": 16, "intermediate_size": 8, "num_experts": 4, "top_k": 2, "renormalize": True}
    plain, quantised = MoE(**sizes), MoE(**sizes).quantize("fp8_rowwise")
    for layer, other in ((plain, quantised), (quantised, plain)):
        state = {name: value for name, value in other.state_dict().items() if name.startswith("w_down")}
        with pytest.raises(RuntimeError, match=r"w_down: the layer is "):
            layer.load_state_dict(state, strict=False)


@pytest.mark.parametrize("part", ["data", "scales"])
def test_data_or_scales_alone_are_refused(part: str) -> None:
    sizes: Any = {"hidden_size": 16, "intermediate_size": 8, "num_experts": 4, "top_k": 2, "renormalize": True}
    layer, other = (MoE(**sizes).quantize("fp8_rowwise") for _ in range(2))
    state = {name: value for name, value in other.state_dict().items() if ("scales" in name) == (part == "scales")}
    lacking = "w_gate_up_scales" if part == "data" else "w_gate_up"
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    with pytest.raises(RuntimeError, match=f"w_gate_up: expected data in fp8 and scales, got .* without {lacking}"):
        layer.load_state_dict(state, strict=False)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    layer.load_state_dict({"router": torch.ones(4, 16)}, strict=False)
    assert layer.router.eq(1).all()


def test_fp8_that_was_converted_is_refused_too() -> None:
    """The scales show that it is not the weights."""
    plain, quantised = (MoE(16, 8, 4, 2, renormalize=True) for _ in range(2))
    state = {name: x.float() for name, x in quantised.quantize("fp8_rowwise").state_dict().items()}
    before = {name: x.clone() for name, x in plain.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"w_gate_up: the layer is not quantised, .* has scales: multiply"):
        plain.load_state_dict(state, strict=False)
    assert all(torch.equal(x, before[name]) for name, x in plain.state_dict().items())


def test_hooks_convert_a_state_dict_before_it_is_looked_at() -> None:
    """As such hooks of other modules, and of modules around the layer."""
    plain, other, quantised = (MoE(16, 8, 4, 2, renormalize=True) for _ in range(3))
    state = quantised.quantize("fp8_rowwise").state_dict()
    names, calls = ("w_gate_up", "w_down"), []

    def dequantized(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        calls.append(module)
        for name in (f"{prefix}{name}" for name in names):
            state[name] = dequantize(ScaledTensor(state[name], state.pop(f"{name}_scales"), "rowwise"))

    plain.register_load_state_dict_pre_hook(dequantized)
    nn.Sequential(plain).load_state_dict({f"0.{name}": x for name, x in state.items()})
    assert calls == [plain]
    for name in names:
        expected = dequantize(ScaledTensor(state[name], state[f"{name}_scales"], "rowwise"))
        assert torch.equal(getattr(plain, name), expected)

    def renamed(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        for name in names:
            state[f"{prefix}{name}"] = state.pop(f"{prefix}{name}_fp8")

    other.register_load_state_dict_pre_hook(renamed)
    stored = {f"{name}_fp8" if name in names else name: x for name, x in state.items() if "scales" not in name}
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"w_gate_up: the layer is not quantised, and the state dict has .*e4m3"):
            other.load_state_dict(stored)


def test_codes_of_another_fp8_dtype_are_no_weights() -> None:
    layer = MoE(16, 8, 4, 2, renormalize=True)
    state = layer.state_dict() | {"w_down": layer.w_down.detach().to(torch.float8_e5m2)}
    with pytest.raises(
        RuntimeError, match=r"w_down: the layer is not quantised, and the state dict has .*e5m2: multiply the weights"
    ):
        layer.load_state_dict(state)


def test_what_is_no_tensor_is_named_as_by_other_modules() -> None:
    layer = MoE(16, 8, 4, 2, renormalize=True)
    with pytest.raises(RuntimeError, match=r'"w_down", expected torch\.Tensor .* but received <class \'list\'>'):
        layer.load_state_dict(layer.state_dict() | {"w_down": layer.w_down.tolist()})


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e5m2])
def test_bytes_and_other_codes_are_not_converted_to_weights(dtype: torch.dtype) -> None:
    """Files of fp8 weights often hold their bytes; copied as numbers, 0x38, which is 1.0, would become 56."""
    layer, other = (MoE(16, 8, 4, 2, renormalize=True).quantize("fp8_rowwise") for _ in range(2))
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    stored = other.w_down.view(dtype)
    way = (
        "multiply the weights by their scales"
        if dtype.is_floating_point
        else r"if these are the bytes of e4m3, pass \.view\("
    )
    for assign in (False, True):
        with pytest.raises(RuntimeError, match=f"w_down: the layer is quantised .* has {dtype}: {way}"):
            layer.load_state_dict(other.state_dict() | {"w_down": stored}, strict=False, assign=assign)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    layer.load_state_dict(other.state_dict() | {"w_down": stored.view(torch.float8_e4m3fn)})


@pytest.mark.parametrize("name", ["w_gate_up", "w_down"])
@pytest.mark.parametrize("way", ["parametrized", "pruned"])
def test_weights_that_are_computed_from_others_are_not_quantised(way: str, name: str) -> None:
    layer, hidden = MoE(16, 8, 4, 2, renormalize=True).requires_grad_(False), torch.randn(3, 16)
    if way == "parametrized":
        parametrize.register_parametrization(layer, name, nn.Tanh())
    else:
        prune.l1_unstructured(layer, name, amount=0.5)
    before = layer(hidden)
    with pytest.raises(RuntimeError, match=rf"^{name}: expected a parameter of the layer, .*: merge them first"):
        layer.quantize("fp8_block")
    assert layer.format is None and torch.equal(layer(hidden), before)
    if way == "parametrized":
        parametrize.remove_parametrizations(layer, name)
    else:
        prune.remove(layer, name)
    assert layer.quantize("fp8_block")(hidden).isfinite().all()


def test_a_layer_is_not_left_half_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    made, hidden = layer().requires_grad_(False), torch.randn(5, H).bfloat16()
    before = made(hidden)

    def fails(x: Tensor, *options: Any) -> ScaledTensor:
        if x is made.w_down:
            raise torch.OutOfMemoryError
        return quantize(x, *options)

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(nn_module, "quantize", fails)
        made.quantize("fp8_block")
    assert torch.equal(made(hidden), before)
    assert made.quantize("fp8_block")(hidden).isfinite().all()


def test_layers_in_float64_have_no_products_in_fp8() -> None:
    layer = MoE(16, 8, 4, 2, renormalize=True, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"^w_gate_up: expected bfloat16, float16 or float32, got torch\.float64"):
        layer.quantize("fp8_block")
    assert layer.w_gate_up.dtype == torch.float64 and layer.format is None
    for dtype, options in ((torch.float64, {"compute": "fp8_block"}), (torch.int32, {}), (torch.complex64, {})):
        with pytest.raises(TypeError, match=f"^dtype: expected bfloat16, .*, got {dtype}"):
            MoE(16, 8, 4, 2, renormalize=True, dtype=dtype, **options)
