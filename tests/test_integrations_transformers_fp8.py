"""Tiny random models of transformers with experts in its fine-grained fp8, against dequantised ones in float64."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_kernels import ahead, dequantize, quantize, reference
from moe_kernels.ahead import collect, layers_of
from moe_kernels.integrations import transformers as integration
from moe_kernels.runtime import cache, targets

if integration._default_apply_gate is None:
    pytest.skip("transformers 5 is not installed: pip install -e '.[transformers]'", allow_module_level=True)

import tiny_models
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import TOKENS
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
if not hasattr(finegrained, "ALL_FP8_EXPERTS_FUNCTIONS"):
    pytest.skip("this version of transformers has no registry for fp8 experts", allow_module_level=True)

MODELS = ("Qwen3Moe", "DeepseekV3")
WEIGHTS = "model.safetensors"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
Make = Callable[..., tuple[Any, Any]]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Without a GPU or accelerate, transformers refuses such weights or dequantises them.
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    integration.register()
    yield
    torch.compiler.reset()


def save(name: str, folder: Path, scale_fmt: str, hidden_size: int = 256) -> Any:
    """Save a checkpoint with published names, each expert's weights in fp8 with their scales, and return its model.

    Only experts are in fp8: for each nn.Linear in fp8, transformers downloads kernels with the package `kernels`.
    """
    plain = tiny_models.make(name, 0.07, hidden_size=hidden_size, moe_intermediate_size=256)
    plain.save_pretrained(folder)
    state = load_file(folder / WEIGHTS)
    experts = [weight for weight in state if ".mlp.experts." in weight]
    assert len(experts) == 8 * 3 * (1 if name == "DeepseekV3" else 2)
    for weight in experts:
        power_of_two = scale_fmt == "ue8m0"
        state[weight], scales, _ = quantize(state[weight], "128x128", power_of_two=power_of_two)
        state[f"{weight}_scale_inv"] = scales.to(torch.float8_e8m0fnu) if power_of_two else scales
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "scale_fmt": scale_fmt,
        "modules_to_not_convert": [n for n, m in plain.named_modules() if isinstance(m, nn.Linear)],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return plain


def load(folder: Path, implementation: str = "moe_kernels", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    options |= {"experts_implementation": implementation, "attn_implementation": "eager", "dtype": dtype}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def dequantized(folder: Path) -> Any:
    """Load the model in plain PyTorch, with the weights as transformers dequantises them."""
    given = json.loads((folder / "config.json").read_text())["quantization_config"]
    del given["quant_method"]
    config = transformers.FineGrainedFP8Config(**given, dequantize=True)
    return load(folder, "eager", quantization_config=config)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return a function that loads a model with dequantised weights, and one with its experts in fp8."""

    def made(name: str, scale_fmt: str = "float", dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
        folder = tmp_path / f"{name}-{scale_fmt}"
        if not folder.exists():
            save(name, folder, scale_fmt)
        return dequantized(folder), load(folder, dtype=dtype)

    return made


def logits(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    out: Tensor = model(input_ids=tokens.to(model.device), use_cache=False).logits
    return out.double()


def relative_errors(out: Tensor, right: Tensor) -> list[float]:
    """Return the sorted relative errors of the tokens' logits."""
    errors: list[float] = ((out - right).norm(dim=-1) / right.norm(dim=-1)).flatten().sort().values.tolist()
    return errors


def check(plain: Any, fp8: Any, backend: str | None = None) -> None:
    forward = fp8 if backend is None else torch.compile(fp8, fullgraph=True, backend=backend)
    errors = relative_errors(logits(forward), logits(plain.double()))
    # Activations keep 3 bits, twice in each layer. A token near a tie may choose another expert in the second layer.
    assert errors[0] > 1e-4
    assert errors[7] < 0.07
    assert errors[-3] < 0.12


def check_generated(plain: Any, fp8: Any, **options: Any) -> None:
    """Check that new tokens are those that the dequantised model would choose, or about as good.

    Two may differ: as in `check`, a token near a tie may go to another expert.
    """
    tokens = TOKENS.to(fp8.device)
    options |= {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    made = fp8.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    assert made.shape == (2, 19)
    right = logits(plain.double(), made)[:, 6:-1]
    best, second = right.topk(2).values.unbind(-1)
    lost = best - right.gather(-1, made[:, 7:, None])[..., 0]
    near = 0.3 * right.std(-1)
    clear = best - second > near
    assert (lost >= near).sum() <= 2
    assert (lost[clear] > 0).sum() <= 2
    assert clear.float().mean() > 0.3


@torch.no_grad()
@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
@pytest.mark.parametrize("name", MODELS)
def test_logits(name: str, scale_fmt: str, make: Make) -> None:
    plain, fp8 = make(name, scale_fmt)
    experts = experts_of(fp8)
    assert experts.gate_up_proj.dtype == torch.float8_e4m3fn
    assert experts.down_proj_scale_inv.dtype == (torch.float32 if scale_fmt == "float" else torch.float8_e8m0fnu)
    check(plain, fp8)
    assert torch.equal(logits(make(name, scale_fmt)[1]), logits(fp8))


def check_sizes_that_no_block_divides(folder: Path, device: str) -> None:
    """A hidden state has 2.5 blocks: transformers itself cannot dequantise such weights."""
    plain = save("Qwen3Moe", folder, "float", hidden_size=320)
    plain.set_experts_implementation("eager")
    for name, weight in plain.named_parameters():
        if ".mlp.experts." in name:
            weight.copy_(dequantize(quantize(weight, "128x128")))
    fp8 = load(folder)
    assert experts_of(fp8).gate_up_proj_scale_inv.shape == (8, 4, 3)
    assert experts_of(fp8).down_proj_scale_inv.shape == (8, 3, 2)
    check(plain.to(device), fp8.to(device))


@torch.no_grad()
def test_sizes_that_no_block_divides(tmp_path: Path) -> None:
    check_sizes_that_no_block_divides(tmp_path, "cpu")


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_generate_and_compiled(name: str, make: Make) -> None:
    plain, fp8 = make(name)
    check_generated(plain, fp8)
    compiled = torch.compile(fp8, fullgraph=True, backend="aot_eager")
    assert (logits(compiled) - logits(fp8)).abs().max() < 1e-4 * logits(fp8).abs().max()


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_saved_by_transformers(name: str, make: Make, tmp_path: Path) -> None:
    """A loaded model is saved with the names and the bits that it was loaded with."""
    fp8 = make(name)[1]
    fp8.save_pretrained(tmp_path / "again")
    before, after = load_file(tmp_path / f"{name}-float" / WEIGHTS), load_file(tmp_path / "again" / WEIGHTS)
    assert before.keys() == after.keys()
    assert all(torch.equal(value.float(), after[key].float()) for key, value in before.items())
    assert torch.equal(logits(load(tmp_path / "again")), logits(fp8))


@torch.no_grad()
def test_wrong_experts_are_noticed(make: Make) -> None:
    def zeros(experts: nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return integration.fp8_experts_forward(experts, hidden, ids, weights) * 0

    def swapped(experts: nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return integration.fp8_experts_forward(experts, hidden, ids ^ 1, weights)

    plain, fp8 = make("Qwen3Moe")
    for wrong in (zeros, swapped):
        finegrained.ALL_FP8_EXPERTS_FUNCTIONS.register("moe_kernels", wrong)
        for checked in (check, check_generated):
            with pytest.raises(AssertionError):
                checked(plain, fp8)


@pytest.mark.gpu
@needs_gpu
@torch.no_grad()
@pytest.mark.parametrize(
    ("scale_fmt", "dtype"),
    [("float", torch.float32), ("ue8m0", torch.float32), ("float", torch.bfloat16), ("ue8m0", torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("name", MODELS)
def test_on_the_gpu(name: str, scale_fmt: str, dtype: torch.dtype, make: Make) -> None:
    plain, fp8 = (model.to("cuda") for model in make(name, scale_fmt, dtype))
    for backend in (None, "inductor"):
        check(plain, fp8, backend)
    check_generated(plain, fp8)


@pytest.mark.gpu
@needs_gpu
@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_generate_with_a_compiled_forward_on_the_gpu(name: str, make: Make) -> None:
    """Generation as in serving: bfloat16 and a static cache, for which transformers compiles the forward."""
    plain, fp8 = (model.to("cuda") for model in make(name, dtype=torch.bfloat16))
    check_generated(plain, fp8, cache_implementation="static")
    assert hasattr(fp8, "_compiled_call")


@pytest.mark.gpu
@needs_gpu
@torch.no_grad()
def test_sizes_that_no_block_divides_on_the_gpu(tmp_path: Path) -> None:
    check_sizes_that_no_block_divides(tmp_path, "cuda")


def experts_of(model: Any) -> Any:
    return next(m for m in model.modules() if isinstance(m, finegrained.FP8Experts))


@torch.no_grad()
def test_a_layer_and_its_gates(make: Make) -> None:
    """Gates of moe_mlp, the library's own gate between two products, and another rank's experts."""
    experts = experts_of(make("Qwen3Moe")[1])
    hidden = torch.randn(6, 256)
    ids, weights = torch.randint(0, 9, (6, 3)), torch.rand(6, 3)
    w_in, w_out = integration._scaled(experts, "gate_up_proj"), integration._scaled(experts, "down_proj")
    routing = reference.route(ids, weights, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert experts(hidden, ids, weights).dtype == torch.float32

    def expected() -> Tensor:
        offsets = routing.group_offsets
        rows = quantize(reference.permute(hidden, routing), "1x128")
        h = reference.scaled_grouped_gemm(rows, w_in.mT, offsets, out_dtype=torch.float32)
        act = quantize(experts._apply_gate(h), "1x128")
        return reference.unpermute(
            reference.scaled_grouped_gemm(act, w_out.mT, offsets, out_dtype=torch.float32), routing
        )

    hooked = nn.SiLU()
    hooked.register_forward_hook(lambda module, inputs, out: out.where(out.abs() > 0.2, 0))
    for attributes in (
        {},
        {"limit": 0.5},
        {"swiglu_alpha": 1.5, "swiglu_limit": 0.6, "limit": 0.6},
        {"gate_softcap": 2.0, "up_softcap": 3.0, "swiglu_alpha": None, "limit": None},
        {"gate_softcap": None},
        {"act_fn": nn.Tanh()},
        {"limit": 0.5},
        {"act_fn": hooked},
        {"act_fn": nn.SiLU(), "_apply_gate": lambda h: h[..., ::2]},
    ):
        if not all(hasattr(experts, name) for name in attributes):
            continue  # older versions of transformers have no such gates
        for name, value in attributes.items():
            setattr(experts, name, value)
        out, right = experts(hidden, ids, weights), expected()
        assert right.any() and out.dtype == right.dtype
        # A few elements are rounded to the other of two adjacent fp8 numbers.
        assert float((out - right).norm() / right.norm()) < 5e-3, attributes


def test_experts_without_a_gate_have_no_options_of_gates() -> None:
    options = {"swiglu_alpha": 1.5, "swiglu_limit": 0.5, "limit": 0.5, "gate_softcap": 2.0}
    for act_fn, expected in ((nn.ReLU(), {"activation": "relu"}), (nn.Tanh(), None)):
        experts = SimpleNamespace(has_gate=False, act_fn=act_fn, **options)
        assert integration._fp8_activation_options(experts) == expected


def test_refusals(make: Make) -> None:
    _, fp8 = make("Qwen3Moe")
    experts = experts_of(fp8)
    arguments = (torch.randn(6, 256), torch.randint(0, 8, (6, 3)), torch.rand(6, 3))
    for name, value, error, text in (
        (
            "block_size",
            (64, 64),
            ValueError,
            r"FP8Experts.block_size: expected \[128, 128\], got \(64, 64\); th",
        ),
        ("block_size", None, ValueError, r"FP8Experts.block_size: expected \[128, 128\], got None"),
        ("activation_scheme", "static", ValueError, "FP8Experts.activation_scheme: expected \"dynamic\", got 'static'"),
        (
            "down_proj",
            nn.Parameter(experts.down_proj.float()),
            TypeError,
            "FP8Experts.down_proj: expected float8_e4m3fn",
        ),
        ("down_proj_scale_inv", None, TypeError, "FP8Experts.down_proj_scale_inv: expected one tensor"),
    ):
        before = getattr(experts, name)
        setattr(experts, name, value)
        with pytest.raises(error, match=text):
            experts(*arguments)
        setattr(experts, name, before)
    hidden, *routed = arguments
    assert experts(hidden, *routed).any()
    with pytest.raises(RuntimeError, match=r"hidden: moe_mlp with fp8 weights has no gradients"):
        experts(hidden.requires_grad_(), *routed)
    experts.act_fn = nn.Tanh()  # not fused
    with pytest.raises(RuntimeError, match=r"^FP8Experts: experts in fp8 have no gradients.*no_grad"):
        experts(hidden, *routed)
    with torch.no_grad():
        assert experts(hidden, *routed).any()


@torch.no_grad()
def test_ids_are_validated_unless_there_are_sentinels(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """By moe_mlp, and between two products."""
    experts = experts_of(make("Qwen3Moe")[1])
    arguments = torch.randn(6, 256), torch.full((6, 3), 8), torch.rand(6, 3)
    monkeypatch.setattr("moe_kernels.checks._VALIDATE", True)
    for act_fn in (experts.act_fn, nn.Tanh()):
        experts.act_fn, experts._is_expert_parallel = act_fn, True
        assert not integration.fp8_experts_forward(experts, *arguments).any()
        experts._is_expert_parallel = False
        with pytest.raises(ValueError, match=r"^topk_ids\[0, 0\]: expected 0 to 7, got 8"):
            integration.fp8_experts_forward(experts, *arguments)
        del experts._is_expert_parallel  # which not all versions of transformers have
        assert not integration.fp8_experts_forward(experts, *arguments).any()


def test_versions_without_a_registry_for_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(finegrained, "ALL_FP8_EXPERTS_FUNCTIONS")
    integration.register()
    assert integration.registry.ALL_EXPERTS_FUNCTIONS["moe_kernels"] is integration.experts_forward


def test_plans_ahead(make: Make) -> None:
    _, fp8 = make("Qwen3Moe")
    assert len(layers_of(fp8)) == 1
    for dtype in (None, torch.float32):
        experts_of(fp8).config.dtype = dtype
        wanted = collect(ahead._calls(fp8, [1, 40], False))
        assert {one.operator for one in wanted} == {"scaled_moe_mlp"}
        hidden = [one.inputs[0] for one in wanted]
        assert {x.dtype for x in hidden if x is not None} == {dtype or torch.bfloat16}


def test_plans_ahead_of_another_gate(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    _, fp8 = make("Qwen3Moe")
    experts_of(fp8).act_fn = nn.Tanh()
    made: list[str] = []
    monkeypatch.setattr(cache, "plan_of", lambda operator, *_: made.append(operator.name))
    for one in collect(ahead._calls(fp8, [40], False)):
        ahead._make(one, targets.KNOWN["h200"])
    assert set(made) == {"route", "scatter_rows", "quantize", "scaled_grouped_gemm", "combine_rows"}


def test_gradients_are_refused_or_not_asked_for(make: Make) -> None:
    _, fp8 = make("Qwen3Moe")
    with pytest.raises(RuntimeError, match=r"torch\.no_grad\(\)"):
        logits(fp8)
