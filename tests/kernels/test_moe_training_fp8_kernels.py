"""Layers with `compute`: results and gradients of the kernels against those of the twins, and against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from training import COMPUTE, DIFFERENTIABLE, run

from moe_kernels import moe_mlp, reference
from moe_kernels.ops import quantized_grouped_gemm, quantized_moe_mlp
from moe_kernels.testing import make_experts, make_tokens

NAN = float("nan")


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
    """Arguments of `moe_mlp`: every 7th id is dropped, and no token picks the last expert."""
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
    """The same on a CPU, without kernels."""
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "0")
        return run({name: x.cpu() for name, x in arguments.items()}, d_out.cpu(), **options)


def assert_as_twins(
    arguments: dict[str, Any], d_out: Tensor, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> dict[str, Tensor]:
    """Within the error of the twins in their dtype, twice, which is mostly that of roundings the other way."""
    made = run(arguments, d_out, **options)
    twins = by_twins(arguments, d_out, monkeypatch, **options)
    exact = {name: x.float() if x.is_floating_point() else x for name, x in arguments.items()}
    right = by_twins(exact, d_out, monkeypatch, **options)
    for name, x in made.items():
        exactly = right[name].double().flatten(1)
        size, error, twins_error = (
            y.norm(dim=1) for y in (exactly, *(z.cpu().double().flatten(1) - exactly for z in (x, twins[name])))
        )
        budget = 2 * twins_error.norm() + 2**-8 * size.norm()
        assert error.norm() <= budget, f"{name}: error {error.norm()}, budget {budget}"
        assert 0 < budget < size.norm() / 10, name
        # Of each token, or each expert's weight.
        assert (error <= 0.15 * size + budget / 4).all(), f"{name}: errors {error}, of {size}"
        assert x.stride() == twins[name].stride(), name
    return made


# Of one dtype and one size, so that they share kernels: most of the time goes into generating these.
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
    """The second with biases."""
    arguments = make(T=10, top_k=2, **SIZES, device=device, bias=bool(options))
    d_out = torch.randn(10, 136, device=device)
    made = assert_as_twins(arguments, d_out, monkeypatch, compute=compute, **options)
    assert not made["w_down"][2].any()


@pytest.mark.parametrize("activation", ["silu", "clamped_silu"])
def test_gradients_at_once(activation: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of gate and up in halves of 128 columns, with more than 128 tokens of an expert, and scattered weights."""
    arguments = make(T=150, top_k=2, H=136, I=128, E=3, dtype=torch.float16, device=device)
    arguments["topk_weights"] = arguments["topk_weights"].T.contiguous().T
    d_out = torch.randn(150, 136, device=device)
    made = assert_as_twins(arguments, d_out, monkeypatch, compute="fp8_block", activation=activation, limit=0.7)
    assert not made["w_down"][2].any()


@pytest.mark.parametrize(("compute", "I"), [("fp8_rowwise", 40), ("fp8_block", 128)])
def test_nan_of_a_token_stays_there(compute: str, I: int, device: str) -> None:  # noqa: E741
    """In results and gradients of tokens; in weights' gradients with its experts. All else has the same bits."""
    arguments = make(T=6, top_k=2, **{**SIZES, "I": I}, device=device)
    arguments["topk_ids"][:] = torch.tensor([[0, 2], [0, 2], [0, 2], [1, 1], [-1, 3], [0, 2]])
    d_out = torch.randn(6, 136, device=device)
    right = run(arguments, d_out, compute=compute)
    arguments["hidden"][3:5, 7] = NAN
    made = run(arguments, d_out, compute=compute)
    others = [0, 1, 2, 4, 5]
    for name in ("out", "hidden", "topk_weights"):
        assert made[name][3].isnan().all(), name
        assert torch.equal(made[name][others], right[name][others]), name
        assert not made[name][4].any()
    for name in ("w_gate_up", "w_down"):
        assert torch.equal(made[name][::2], right[name][::2]), name
        assert made[name][1].isnan().any(), name


def test_no_tokens(device: str) -> None:
    arguments = make(T=1, top_k=2, **SIZES, device=device, bias=True)
    arguments |= {name: arguments[name][:0] for name in ("hidden", "topk_ids", "topk_weights")}
    made = run(arguments, torch.empty(0, 136, device=device), compute="fp8_rowwise")
    assert made["out"].shape == made["hidden"].shape == (0, 136)
    for name in DIFFERENTIABLE[2:]:
        assert made[name].shape == arguments[name].shape and not made[name].any(), name


def test_weights_are_kept_in_the_other_order(device: str) -> None:
    """Bit for bit, with their scales."""
    arguments = make(T=10, top_k=2, **SIZES, device=device)
    routing = reference.route(arguments["topk_ids"], arguments["topk_weights"], 3)
    weights = arguments["w_gate_up"].mT, arguments["w_down"].mT
    tensors = (arguments["hidden"], arguments["topk_weights"], *routing[:3], *weights, None, None)
    spec = "silu", True, False, 1.0, 1.0
    made = quantized_moe_mlp(*tensors, False, True, True, *spec)
    for i, w in enumerate(weights):
        data, scales, _ = reference.quantize(w.mT, "128x128")
        kept, kept_scales = made[2 + 2 * i : 4 + 2 * i]
        assert torch.equal(kept, data.mT.contiguous().view(torch.uint8))
        assert torch.equal(kept_scales, scales)
        assert kept.any()


@pytest.mark.parametrize("rowwise", [True, False], ids=["rowwise", "block"])
def test_products_of_any_offsets(rowwise: bool, device: str) -> None:
    """Of rows, with offsets that are not those of a routing: zeros outside all groups."""
    A, B = torch.randn(50, 136, device=device).half(), torch.randn(3, 40, 136, device=device).half().mT
    group_offsets = torch.tensor([-3, 20, 7, 44], dtype=torch.int32, device=device)
    out = quantized_grouped_gemm(A, B, None, group_offsets, None, None, rowwise, torch.float16)
    right = reference.quantized_grouped_gemm(A, B, None, group_offsets, None, None, rowwise, torch.float16)
    assert (out - right).float().norm() < 2**-10 * right.float().norm()
    assert not out[44:].any()


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
    """Against the layer in bfloat16, which is nearer to float64 than fp8 is by far."""
    arguments = make(T, H, I, E, top_k, torch.bfloat16, device)
    d_out = torch.randn(T, H, device=device)
    made, right = run(arguments, d_out, compute=compute), run(arguments, d_out)
    for name, x in made.items():
        error, size = (y.double().flatten(1).norm(dim=1) for y in (x - right[name], right[name]))
        assert error.norm() < 0.08 * size.norm(), name
        # Of each token, or each expert's weight; gradients of few terms, which may cancel, beside the largest.
        assert (error < 0.25 * size + 0.02 * size.max()).all(), name
    for _ in range(3):
        again = run(arguments, d_out, compute=compute)
        assert all(torch.equal(x, again[name]) for name, x in made.items())


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
