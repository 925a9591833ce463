"""Tiny random models of transformers whose experts are in its fine-grained fp8, on CPU tensors: against the dequantised
weights in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_kernels import ScaledTensor, dequantize, quantize, reference
from moe_kernels.ahead import collect, layers_of
from moe_kernels.integrations import transformers as integration

if integration._default_apply_gate is None:
    pytest.skip("transformers 5 is not installed: pip install -e '.[transformers]'", allow_module_level=True)

import transformers

finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
if not hasattr(finegrained, "ALL_FP8_EXPERTS_FUNCTIONS"):
    pytest.skip("this version of transformers has no registry for fp8 experts", allow_module_level=True)

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "moe_intermediate_size": 128,
    "num_experts_per_tok": 3,
    "intermediate_size": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 60,
}
MODELS: dict[str, Callable[[], Any]] = {
    "Qwen3Moe": lambda: transformers.Qwen3MoeConfig(**SIZES, num_experts=8, num_key_value_heads=2, head_dim=8),
    "DeepseekV3": lambda: transformers.DeepseekV3Config(
        **SIZES,
        num_key_value_heads=4,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
}
TOKENS = torch.arange(14).view(2, 7) * 5 % 61


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    integration.register()
    yield
    torch.compiler.reset()


@torch.no_grad()
def make(name: str, **options: Any) -> tuple[Any, Any]:
    """A model in float32, and the same with its experts in fp8; the first has the values of the second's weights."""
    torch.manual_seed(0)
    made = getattr(transformers, f"{name}ForCausalLM")
    plain, fp8 = (made._from_config(MODELS[name](), attn_implementation="eager").eval() for _ in range(2))
    for parameter_name, parameter in plain.named_parameters():
        if "norm" not in parameter_name:
            parameter.normal_(std=0.1)
    state = plain.state_dict()
    linears = [n for n, m in fp8.named_modules() if isinstance(m, nn.Linear)]
    config = transformers.FineGrainedFP8Config(modules_to_not_convert=linears, **options)
    fp8 = finegrained.replace_with_fp8_linear(fp8, linears, config)
    names = [n for n, m in fp8.named_modules() if isinstance(m, finegrained.FP8Experts)]
    assert names
    fp8.to_empty(device="cpu")
    for buffer_name, buffer in plain.named_buffers():  # not all are in the state
        fp8.get_buffer(buffer_name).copy_(buffer)
    scale_dtype = fp8.get_submodule(names[0]).down_proj_scale_inv.dtype
    for experts in names:
        for part in ("gate_up_proj", "down_proj"):
            weight = f"{experts}.{part}"
            data, scales, _ = quantize(state[weight], "128x128", power_of_two=scale_dtype != torch.float32)
            state[weight], state[f"{weight}_scale_inv"] = data, scales.to(scale_dtype)
    fp8.load_state_dict(state)
    for experts in names:
        for part in ("gate_up_proj", "down_proj"):
            data, scales = state[f"{experts}.{part}"], state[f"{experts}.{part}_scale_inv"].float()
            state[f"{experts}.{part}"] = dequantize(ScaledTensor(data, scales, "128x128"))
            del state[f"{experts}.{part}_scale_inv"]
    plain.load_state_dict(state)
    plain.set_experts_implementation("eager")
    fp8.set_experts_implementation("moe_kernels")
    return plain, fp8


def logits(model: Any) -> Tensor:
    out: Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return out.double()


@torch.no_grad()
@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
@pytest.mark.parametrize("name", MODELS)
def test_logits(name: str, scale_fmt: str) -> None:
    plain, fp8 = make(name, scale_fmt=scale_fmt)
    out, right = logits(fp8), logits(plain.double())
    # Of activations 3 bits are kept, twice in each layer. A token near a tie may go to another expert in the second.
    errors = ((out - right).norm(dim=-1) / right.norm(dim=-1)).flatten().sort().values
    assert float(errors[0]) > 1e-4
    assert float(errors[-3]) < 0.07
    other = logits(make(name, scale_fmt=scale_fmt)[1])
    assert torch.equal(out, other)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_generate_and_compiled(name: str) -> None:
    _, fp8 = make(name)
    made = fp8.generate(TOKENS, max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(TOKENS))
    assert made.shape == (2, 11)
    assert torch.equal(made[:, 7], logits(fp8)[:, -1].argmax(-1))
    compiled = torch.compile(fp8, fullgraph=True, backend="aot_eager")
    assert (logits(compiled) - logits(fp8)).abs().max() < 1e-4 * logits(fp8).abs().max()


def experts_of(model: Any) -> Any:
    return next(m for m in model.modules() if isinstance(m, finegrained.FP8Experts))


@torch.no_grad()
def test_a_layer_and_its_gates() -> None:
    """Those that moe_mlp has, the library's own beside two products, and another rank's experts."""
    experts = experts_of(make("Qwen3Moe")[1])
    hidden = torch.randn(6, 128)
    ids, weights = torch.randint(0, 9, (6, 3)), torch.rand(6, 3)
    w_in, w_out = integration._scaled(experts, "gate_up_proj"), integration._scaled(experts, "down_proj")
    routing = reference.route(ids, weights, 8)

    def expected() -> Tensor:
        offsets = routing.group_offsets
        rows = quantize(reference.permute(hidden, routing), "1x128")
        h = reference.scaled_grouped_gemm(rows, w_in.mT, offsets, out_dtype=torch.float32)
        act = quantize(experts._apply_gate(h), "1x128")
        return reference.unpermute(
            reference.scaled_grouped_gemm(act, w_out.mT, offsets, out_dtype=torch.float32), routing
        )

    for attributes in (
        {},
        {"limit": 0.5},
        {"swiglu_alpha": 1.5, "swiglu_limit": 0.6, "limit": 0.6},
        {"gate_softcap": 2.0, "up_softcap": 3.0, "swiglu_alpha": None, "limit": None},
        {"gate_softcap": None, "act_fn": nn.Tanh()},
    ):
        for name, value in attributes.items():
            setattr(experts, name, value)
        out, right = experts(hidden, ids, weights), expected()
        assert right.any()
        # A few elements are rounded to the other of two numbers in fp8.
        assert float((out - right).norm() / right.norm()) < 5e-3, attributes


def test_refusals() -> None:
    _, fp8 = make("Qwen3Moe")
    experts = experts_of(fp8)
    arguments = (torch.randn(6, 128), torch.randint(0, 8, (6, 3)), torch.rand(6, 3))
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


def test_plans_ahead() -> None:
    from moe_kernels.ahead import _calls

    _, fp8 = make("Qwen3Moe")
    assert len(layers_of(fp8)) == 1
    for dtype in (None, torch.float32):
        experts_of(fp8).config.dtype = dtype
        wanted = collect(_calls(fp8, [1, 40], False))
        assert {one.operator for one in wanted} == {"scaled_moe_mlp"}
        hidden = [one.inputs[0] for one in wanted]
        assert {x.dtype for x in hidden if x is not None} == {dtype or torch.bfloat16}


def test_gradients_are_refused_or_not_asked_for() -> None:
    _, fp8 = make("Qwen3Moe")
    with pytest.raises(RuntimeError, match=r"torch\.no_grad\(\)"):
        logits(fp8)
