"""Tiny random models of transformers with our experts, against theirs in float64; budget: twice float32's error."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_kernels import ahead, moe_mlp, requirements, rules
from moe_kernels.integrations import transformers as integration
from moe_kernels.runtime import launch, store
from moe_kernels.runtime.plan import Launch, Plan
from moe_kernels.runtime.targets import Gpu

if integration._default_apply_gate is None:
    pytest.skip("transformers 5 is not installed: pip install -e '.[transformers]'", allow_module_level=True)

import transformers
from tiny_models import MODELS, TOKENS, make
from transformers.activations import ACT2FN
from transformers.integrations import moe as registry

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    integration.register()
    yield
    torch.compiler.reset()


def step(model: Any, implementation: str, dtype: torch.dtype, backend: str | None = None) -> dict[str, Tensor]:
    """Return the logits, and all parameters' gradients for random upstream gradients."""
    model = model.to(dtype)
    model.set_experts_implementation(implementation)
    model.zero_grad()
    device = model.device
    forward = model if backend is None else torch.compile(model, fullgraph=True, backend=backend)
    logits = forward(input_ids=TOKENS.to(device), use_cache=False).logits
    upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    logits.backward(upstream)
    gradients = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach().double(), **gradients}


def assert_close(ours: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor], slack: float) -> None:
    """Allow each tensor twice plain's distance from float64, plus `slack` times its largest element."""
    assert ours.keys() == exact.keys()
    for name, want in exact.items():
        largest = float(want.abs().max())
        budget = 2 * float((plain[name] - want).abs().max()) + slack * largest
        assert largest == 0 or budget < largest / 10, name
        error = float((ours[name] - want).abs().max())
        assert error <= budget, f"{name}: error {error:.2e}, budget {budget:.2e}"


def check(name: str, backend: str | None = None, device: str = "cpu", implementation: str = "moe_kernels") -> None:
    model = make(name).to(device)
    ours = step(model, implementation, torch.float32, backend)
    if backend == "inductor":  # rounds elsewhere than eager PyTorch, depending on what it tunes on this machine
        plain = step(model, "batched_mm", torch.float32, backend)  # transformers' own, in one graph as ours
    else:
        plain = step(model, "eager", torch.float32)
    assert_close(ours, plain, step(model, "eager", torch.float64), 16 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", MODELS)
def test_compiled_without_graph_breaks(name: str) -> None:
    check(name, "aot_eager")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("backend", [None, "inductor"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_on_the_gpu(name: str, backend: str | None) -> None:
    check(name, backend, "cuda")


def test_wrong_experts_are_noticed() -> None:
    def zeros(experts: nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return integration.experts_forward(experts, hidden, ids, weights) * 0

    def swapped(experts: nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return integration.experts_forward(experts, hidden, ids ^ 1, weights)

    for wrong in (zeros, swapped):
        registry.ExpertsInterface.register("wrong", wrong)
        with pytest.raises(AssertionError, match="error"):
            check("Qwen3Moe", implementation="wrong")


@pytest.mark.parametrize("name", MODELS)
def test_generate(name: str) -> None:
    """Generation gives the tokens of eager, and every step calls our function."""
    calls = []

    def counted(experts: nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        calls.append(hidden.size(0))
        return integration.experts_forward(experts, hidden, ids, weights)

    registry.ExpertsInterface.register("counted", counted)
    model, texts = make(name), []
    for implementation in ("eager", "counted"):
        model.set_experts_implementation(implementation)
        texts.append(
            model.generate(TOKENS[:, :4], attention_mask=torch.ones(2, 4), max_new_tokens=6, do_sample=False).tolist()
        )
    assert texts[0] == texts[1]
    layers = 1 if name == "DeepseekV3" else 2
    assert calls[:layers] == [8] * layers and calls[layers:].count(2) == len(calls) - layers > 0


E, H, I, TOP_K = 4, 8, 6, 2  # noqa: E741
IDS = torch.tensor([[0, 3], [1, 4], [3, 0], [4, 4], [0, 1]])  # 4 is a sentinel, and expert 2 has no row
FLAGS: dict[str, tuple[dict[str, bool], str]] = {
    "silu": ({}, "silu"),
    "swish": ({}, "swish"),
    "gelu, transposed": ({"is_transposed": True}, "gelu"),
    "gelu_new, bias": ({"has_bias": True}, "gelu_new"),
    "gelu_pytorch_tanh": ({}, "gelu_pytorch_tanh"),
    "relu, no gate": ({"has_gate": False}, "relu"),
    "relu2, no gate, transposed, bias": ({"has_gate": False, "is_transposed": True, "has_bias": True}, "relu2"),
    "an activation of its own": ({"has_bias": True}, "quick_gelu"),
    "the same without a gate": ({"has_gate": False}, "mish"),
    "a gate of its own": ({"is_concatenated": False, "is_transposed": True, "has_bias": True}, "silu"),
    "norm": ({"has_post_expert_norm": True}, "silu"),
}


def make_experts(flags: dict[str, bool], act: str) -> Any:
    class Experts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts = E
            self.act_fn = ACT2FN[act]
            if flags.get("has_post_expert_norm"):
                self.post_expert_norm = nn.RMSNorm(H, eps=1e-5)
            first, width = ("gate_up_proj", 2 * I) if flags.get("has_gate", True) else ("up_proj", I)
            for name, outputs, inputs in ((first, width, H), ("down_proj", H, I)):
                shape = (E, inputs, outputs) if flags.get("is_transposed") else (E, outputs, inputs)
                setattr(self, name, nn.Parameter(torch.randn(shape) / inputs**0.5))
                if flags.get("has_bias"):
                    setattr(self, f"{name}_bias", nn.Parameter(torch.randn(E, outputs)))

        def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            raise AssertionError("not chosen")

    if not flags.get("is_concatenated", True):

        def _apply_gate(self: Any, h: Tensor) -> Tensor:
            return torch.tanh(h[..., ::2]) * h[..., 1::2]

        Experts._apply_gate = _apply_gate  # type: ignore[attr-defined]
    torch.manual_seed(0)
    experts = registry.use_experts_implementation(Experts, **flags)(SimpleNamespace(_experts_implementation=None))
    experts._is_expert_parallel = True
    return experts


def experts_step(
    experts: Any, implementation: str, dtype: torch.dtype, device: str = "cpu", ids: Tensor = IDS, forward: Any = None
) -> dict[str, Tensor]:
    """Return the output and all gradients; topk_weights are 0 where the id is a sentinel, as in the library."""
    experts.to(device, dtype).zero_grad()
    experts.config._experts_implementation = implementation
    generator = torch.Generator().manual_seed(1)
    hidden, weights, upstream = (torch.randn(5, n, generator=generator).bfloat16() for n in (H, TOP_K, H))
    weights = weights.masked_fill(ids >= E, 0)
    hidden, weights, upstream = (x.to(device, dtype) for x in (hidden, weights, upstream))
    hidden.requires_grad_()
    weights.requires_grad_()
    ids = ids.to(device, copy=True)  # batched_mm of 5.8 writes into the ids
    out = (experts if forward is None else forward)(hidden, ids, weights)
    assert out.dtype == dtype
    out.backward(upstream)
    gradients = {name: p.grad.double() for name, p in experts.named_parameters()}
    return {"out": out.detach().double(), "hidden": hidden.grad.double(), "weights": weights.grad.double(), **gradients}


def check_experts(case: str, dtype: torch.dtype, device: str = "cpu") -> None:
    flags, act = FLAGS[case]
    if not flags.keys() <= inspect.signature(registry.use_experts_implementation).parameters.keys():
        pytest.skip(f"transformers {transformers.__version__} does not know {', '.join(flags)}")
    experts = make_experts(flags, act).to(dtype)
    ours = experts_step(experts, "moe_kernels", dtype, device)
    plain = experts_step(experts, "batched_mm", dtype, device)
    exact = experts_step(experts, "batched_mm", torch.float64, device)
    sentinel = (IDS >= E).to(device)
    assert not ours["weights"][sentinel].any()
    for result in (plain, exact):
        result["weights"] = result["weights"].masked_fill(sentinel, 0)  # not zero in every version of the library
    assert not ours["hidden"][3].any() and not ours["out"][3].any()
    assert_close(ours, plain, exact, 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("case", FLAGS)
def test_flags_and_sentinels(case: str) -> None:
    check_experts(case, torch.float32)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", FLAGS)
def test_flags_and_sentinels_on_the_gpu(case: str) -> None:
    check_experts(case, torch.bfloat16, "cuda")


@pytest.mark.parametrize("case", FLAGS)
def test_fused_where_the_library_would_do_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags, act = FLAGS[case]
    if not flags.keys() <= inspect.signature(registry.use_experts_implementation).parameters.keys():
        pytest.skip(f"transformers {transformers.__version__} does not know {', '.join(flags)}")
    calls = []
    monkeypatch.setattr(integration, "moe_mlp", lambda hidden, *_, **__: calls.append(hidden) or hidden)
    experts = make_experts(flags, act)
    integration.experts_forward(experts, torch.randn(5, H), IDS, torch.randn(5, TOP_K))
    assert len(calls) == (
        case not in ("an activation of its own", "the same without a gate", "a gate of its own", "norm")
    )


FAMILIES = {  # class, activation, alpha, limit
    # Families with a gate or an activation function of their own.
    "lfm2_moe": ("Lfm2MoeExperts", "silu", None, None),
    "gpt_oss": ("GptOssExperts", "clamped_swiglu", 1.3, 1.0),
    "minimax_m3_vl": ("MiniMaxM3VLExperts", "clamped_swiglu", 1.3, 1.0),
    "openai_privacy_filter": ("OpenAIPrivacyFilterExperts", "clamped_swiglu", 1.3, 1.0),
    "deepseek_v4": ("DeepseekV4Experts", "clamped_silu", None, 1.0),
    "glm5_next": ("Glm5NextTextExperts", "clamped_silu", None, 1.0),
    "hy_v4": ("HYV4Experts", "clamped_silu", None, 1.0),
    "hy_v4_vl": ("HYV4VLExperts", "clamped_silu", None, 1.0),
    # Models of these families read an image's sizes on the host, a graph break with any experts. The experts have none.
    "ernie4_5_vl_moe": ("Ernie4_5_VLMoeMoeExperts", "silu", None, None),
    "glm4v_moe": ("Glm4vMoeTextExperts", "silu", None, None),
    "qwen3_omni_moe": ("Qwen3OmniMoeThinkerTextExperts", "silu", None, None),
    "qwen4_exp": ("Qwen4ExpTextExperts", "silu", None, None),
}


def make_family(family: str, hidden_act: str = "silu") -> Any:
    """Return the library's experts, with weights that take gate and up past their limit on both sides."""
    name = FAMILIES[family][0]
    try:
        experts_class = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)
    except (ModuleNotFoundError, AttributeError):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    sizes = {"hidden_size": H, "intermediate_size": I, "moe_intermediate_size": I, "num_experts_per_tok": TOP_K}
    counts = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), E)
    numbers = {"swiglu_alpha": 1.3, "swiglu_limit": 1, "hidden_act": hidden_act}
    config = SimpleNamespace(_experts_implementation=None, **sizes, **counts, **numbers)
    torch.manual_seed(0)
    width = (I,) if family == "ernie4_5_vl_moe" else ()
    experts = experts_class(config, *width)
    if family in ("gpt_oss", "openai_privacy_filter"):
        experts.alpha, experts.limit = 1.3, 1  # constants in older versions of the library
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    return experts


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_fused(family: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and all gradients agree with the family's own loop over experts."""
    asked_for = []

    def noted(*arguments: Any, **options: Any) -> Tensor:
        asked_for.append(tuple(options.get(name) for name in ("activation", "alpha", "limit")))
        return moe_mlp(*arguments, **options)

    monkeypatch.setattr(integration, "moe_mlp", noted)
    experts = make_family(family)
    exact = experts_step(experts, "batched_mm", torch.float64, ids=IDS % E)  # one family's loop computes in float32
    plain = experts_step(experts, "eager", torch.float32, ids=IDS % E)
    assert asked_for == []
    forward = torch.compile(experts, fullgraph=True, backend="aot_eager") if compiled else None
    ours = experts_step(experts, "moe_kernels", torch.float32, ids=IDS % E, forward=forward)
    assert asked_for == [FAMILIES[family][1:]]
    assert_close(ours, plain, exact, 4 * torch.finfo(torch.float32).eps)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_families_on_the_gpu(family: str) -> None:
    experts = make_family(family)
    exact = experts_step(experts, "batched_mm", torch.float64, "cuda", IDS % E)
    plain = experts_step(experts, "eager", torch.float32, "cuda", IDS % E)
    ours = experts_step(experts, "moe_kernels", torch.float32, "cuda", IDS % E)
    assert_close(ours, plain, exact, 16 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_made_ahead(family: str) -> None:
    experts = make_family(family)
    experts.config._experts_implementation = "moe_kernels"
    activation, alpha, limit = FAMILIES[family][1:]
    (wanted,) = {
        one.options[-1]
        for one in ahead.collect(ahead._calls(experts, [9], training=False))
        if one.operator == "moe_mlp"
    }
    assert wanted.activation == activation
    assert wanted.alpha == alpha or alpha is None
    assert wanted.limit == limit or limit is None


@pytest.mark.parametrize(
    ("config", "top_k"),
    [
        ("Qwen3MoeConfig", {"num_experts_per_tok": 3}),
        ("AriaTextConfig", {"moe_topk": 3}),
        ("HunYuanMoEV1Config", {"moe_topk": [3, 3]}),  # of each layer
        ("Gemma4TextConfig", {"top_k_experts": 3}),
    ],
)
def test_experts_per_token_of_a_config(config: str, top_k: dict[str, Any]) -> None:
    if not hasattr(transformers, config):
        pytest.skip(f"transformers {transformers.__version__} has no {config}")
    assert ahead._top_k(SimpleNamespace(config=getattr(transformers, config)(**top_k))) == 3


def test_a_config_without_experts_per_token() -> None:
    with pytest.raises(ValueError, match="what: Linear: its config has none of num_experts_per_tok, moe_topk"):
        experts = nn.Linear(2, 2)
        experts.config = SimpleNamespace()
        ahead._top_k(experts)


def test_a_model_is_made_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache filled for the shape of a model's layers has all plans of the model."""
    asked: list[int] = []

    def fill(wanted: Sequence[ahead.PlanRequest], gpu: Gpu, *_: Any) -> list[None]:
        asked.append(len(wanted))
        for one in wanted:
            key = store.plan_key(one.signature, gpu, rules.tuned_digest(gpu))
            store.write_plan(key, Plan(("x",), (Launch(key, (1,), ()),), (0,)), {key: binary_of(key)})
        return []

    def binary_of(key: str) -> store.Binary:
        return store.write_binary(store.Binary(key, (), (), "{}", "cubin", key.encode()))

    monkeypatch.setenv("MOE_KERNELS_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("MOE_KERNELS_CACHE_READONLY", "")
    monkeypatch.setattr(ahead, "_making", fill)
    monkeypatch.setattr(launch, "build_libraries", lambda records, renew: len(records))
    model = make("Qwen3Moe").to(torch.bfloat16)
    model.set_experts_implementation("moe_kernels")
    of_shape = ahead.compile_ahead(ahead.LayerShape(32, 24, 8, 3), tokens=range(1, 9), gpu="h200")
    of_model = ahead.compile_ahead(model, tokens=range(1, 9), gpu="h200")
    assert asked == [of_shape.plans, 0] and 0 < of_model.plans == of_model.binaries < of_shape.plans
    ahead.compile_ahead(model, tokens=[20], gpu="h200")
    assert asked[2:] == [2]  # for topk_weights in bfloat16 and in float32


class Twice(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_compiled_with_a_cached_parametrization() -> None:
    """As PEFT computes adapters of experts: the weight is the same tensor in all of a call."""
    experts = make_family("lfm2_moe")
    experts.config._experts_implementation = "moe_kernels"
    nn.utils.parametrize.register_parametrization(experts, "gate_up_proj", Twice())
    inputs = torch.randn(5, H), IDS % E, torch.randn(5, TOP_K)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    with nn.utils.parametrize.cached():
        torch.testing.assert_close(compiled(*inputs), experts(*inputs))


def test_gates_that_differ_from_those_of_the_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another activation function, no limit, and a derived class use the class's own gate."""
    monkeypatch.setattr(integration, "moe_mlp", None)
    limitless = make_family("deepseek_v4")
    del limitless.limit

    def apply_gate(self: Any, h: Tensor) -> Tensor:
        return h[..., ::2]

    def without_limit(self: Any, h: Tensor) -> Tensor:
        return h[..., 1::2]

    without_limit.__module__ = type(limitless).__module__  # a gate of the library whose limit is no attribute
    limitless._apply_gate = without_limit.__get__(limitless)
    derived = make_family("gpt_oss")
    derived.__class__ = type("Derived", (type(derived),), {"_apply_gate": apply_gate})
    for experts in (limitless, derived, make_family("deepseek_v4", hidden_act="gelu")):
        ours = experts_step(experts, "moe_kernels", torch.float64, ids=IDS % E)
        expected = experts_step(experts, "batched_mm", torch.float64, ids=IDS % E)
        torch.testing.assert_close(ours, expected)


def test_hooks_and_gates_of_an_instance_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks on an activation, for statistics or sparsity, and a gate that one layer has in place of its class's."""
    monkeypatch.setattr(integration, "moe_mlp", None)
    layers = [make_experts({}, "silu") for _ in range(6)]
    layers[0]._apply_gate = lambda h: h[..., :I].clamp(max=0.3) * h[..., I:]
    seen: list[int] = []
    layers[1].act_fn.register_forward_hook(lambda module, inputs, out: out.where(out.abs() > 0.2, 0))
    layers[2].act_fn.register_forward_pre_hook(lambda module, inputs: (inputs[0] / 2,))
    layers[3].act_fn.register_full_backward_hook(lambda module, d_inputs, d_outputs: (d_inputs[0] / 2,))
    layers[4].act_fn.register_full_backward_pre_hook(lambda module, d_outputs: (d_outputs[0] / 2,))
    layers[5].act_fn.register_forward_hook(lambda module, inputs, out: seen.append(out.numel()))
    for experts in layers:
        ours = experts_step(experts, "moe_kernels", torch.float64, ids=IDS % E)
        expected = experts_step(experts, "batched_mm", torch.float64, ids=IDS % E)
        torch.testing.assert_close(ours, expected)
    assert seen == [5 * TOP_K * I] * 2


@pytest.mark.parametrize("act", ["silu", "mish"], ids=["in one call", "between two products"])
def test_ids_are_validated_unless_there_are_sentinels(act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = make_experts({}, act)
    arguments = torch.randn(5, H), IDS, torch.randn(5, TOP_K)
    monkeypatch.setattr("moe_kernels.checks._VALIDATE", True)
    integration.experts_forward(experts, *arguments)
    experts._is_expert_parallel = False
    with pytest.raises(ValueError, match=r"^topk_ids\[1, 1\]: expected 0 to 3, got 4"):
        integration.experts_forward(experts, *arguments)
    del experts._is_expert_parallel  # which not all versions of transformers have
    integration.experts_forward(experts, *arguments)


@pytest.mark.parametrize("act", ["silu", "mish"], ids=["in one call", "between two products"])
def test_the_dtype_under_autocast(act: str) -> None:
    experts, hidden, weights = make_experts({}, act), torch.randn(5, H), torch.rand(5, TOP_K)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out = integration.experts_forward(experts, hidden, IDS, weights)
        exact = integration.experts_forward(experts.double(), hidden.double(), IDS, weights.double())
    assert out.dtype == torch.float32 and exact.dtype == torch.float64
    assert (out - exact).norm() < 0.02 * exact.norm()


def test_a_gate_that_computes_in_another_dtype() -> None:
    experts = make_experts({}, "silu").bfloat16()
    arguments, results = (torch.randn(5, H).bfloat16(), IDS, torch.rand(5, TOP_K).bfloat16()), []
    for dtype in (torch.float32, torch.bfloat16):
        experts._apply_gate = lambda h, dtype=dtype: (h[..., :I].float().tanh() * h[..., I:]).to(dtype)
        results.append(integration.experts_forward(experts, *arguments))
    assert results[0].any() and torch.equal(*results)


def test_unknown_layouts_and_devices_say_what_to_do() -> None:
    experts = make_experts({}, "silu")
    arguments = torch.randn(5, H), IDS, torch.randn(5, TOP_K)
    with pytest.raises(ValueError, match="w_gate_up: expected on cpu with hidden, got on meta; move one"):
        integration.experts_forward(experts.to("meta"), *arguments)
    del experts.down_proj
    experts.down_proj = nn.ModuleList()
    with pytest.raises(TypeError, match=r'Experts\.down_proj: expected one tensor .* got ModuleList; .*"eager"'):
        integration.experts_forward(experts, *arguments)
    del experts.gate_up_proj
    with pytest.raises(TypeError, match=r"Experts\.gate_up_proj: .* got nothing of this name"):
        integration.experts_forward(experts, *arguments)


def test_untested_versions_warn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("4.57.1", "6.0.0.dev0"):
        requirements.warn_if_untested.cache_clear()
        monkeypatch.setattr(integration.metadata, "version", lambda _, version=version: version)
        with pytest.warns(UserWarning, match=f"tested with transformers .*, this is {version}; if it fails: pip inst"):
            integration.register()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            integration.register()
    for version in integration.TESTED:
        monkeypatch.setattr(integration.metadata, "version", lambda _, version=version: f"{version}.7")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            integration.register()
