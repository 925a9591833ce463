"""torchtitan's own experts and ours with the same weights, against the formula in float64."""

from __future__ import annotations

import importlib.util
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels import requirements
from moe_kernels.integrations import torchtitan as integration

NAME = "moe_kernels.integrations.torchtitan.grouped_experts"
SIZES = [5, 0, 16, 3]
E, D, H, R = len(SIZES), 32, 48, sum(SIZES) + 6  # the last six rows are no expert's
installed = importlib.util.find_spec("torchtitan") is not None
needs_torchtitan = pytest.mark.skipif(not installed, reason="needs torchtitan: pip install 'torchtitan>=0.3'")


@pytest.mark.skipif(installed, reason="torchtitan is installed")
def test_says_what_is_missing() -> None:
    with pytest.raises(ImportError, match="pip install 'torchtitan"):
        integration.grouped_experts(None)


def step(experts: torch.nn.Module, x: Tensor, upstream: Tensor, device: str) -> list[Tensor]:
    """The output and all gradients, on the rows that experts own."""
    experts.zero_grad()
    x = x.clone().requires_grad_()
    out = experts(x, torch.tensor(SIZES, device=device))
    owned = sum(SIZES)
    if type(experts) is integration.MoEKernelsExperts:
        assert not out[owned:].any()
    out[:owned].backward(upstream[:owned])
    assert x.grad is not None
    if type(experts) is integration.MoEKernelsExperts:
        assert not x.grad[owned:].any()
    weights = (experts.w1_EFD, experts.w2_EDF, experts.w3_EFD)
    return [y.detach().double() for y in (out[:owned], x.grad[:owned], *(w.grad for w in weights))]


def exact(weights: list[Tensor], x: Tensor, upstream: Tensor) -> list[Tensor]:
    inputs = [t.detach().double().requires_grad_() for t in (x[: sum(SIZES)], *weights)]
    groups = [
        (F.silu(rows @ w1.T) * (rows @ w3.T)) @ w2.T
        for rows, w1, w2, w3 in zip(inputs[0].split(SIZES), *inputs[1:], strict=True)
    ]
    out = torch.cat(groups)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream[: sum(SIZES)].double())]


def check(device: str) -> None:
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    torch.manual_seed(0)
    config = GroupedExperts.Config(dim=D, hidden_dim=H, num_experts=E)
    dispatcher = LocalTokenDispatcher.Config(num_experts=E, top_k=2)
    whole = RoutedExperts.Config(inner_experts=config, token_dispatcher=dispatcher)
    assert len(apply_overrides(OverrideConfig(imports=[NAME]), whole)) == 1
    plain, ours = (c.build().to(device, torch.bfloat16) for c in (config, whole.inner_experts))
    assert type(ours) is integration.MoEKernelsExperts
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_(std=0.2)
    ours.load_state_dict(plain.state_dict())
    x, upstream = (torch.randn(R, D).to(device, torch.bfloat16) for _ in range(2))
    x[sum(SIZES) :] = float("nan")
    weights = [plain.w1_EFD, plain.w2_EDF, plain.w3_EFD]
    results = step(ours, x, upstream, device), step(plain, x, upstream, device), exact(weights, x, upstream)
    for got, theirs, want in zip(*results, strict=True):
        budget = 2 * float((theirs - want).abs().max()) + 1e-6
        assert budget < float(want.abs().max()) / 10
        assert float((got - want).abs().max()) <= budget


@needs_torchtitan
def test_the_same_as_its_own_experts() -> None:
    check("cpu")


@needs_torchtitan
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_same_as_its_own_experts_on_the_gpu() -> None:
    check("cuda")


@needs_torchtitan
def test_untested_versions_warn_once_and_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.models.common.moe import GroupedExperts

    config = GroupedExperts.Config(dim=D, hidden_dim=H, num_experts=E)
    requirements.warn_if_untested.cache_clear()
    monkeypatch.setattr(integration.metadata, "version", lambda _: "0.2.1")
    with pytest.warns(UserWarning, match="tested with torchtitan 0.3, this is 0.2.1"):
        integration.grouped_experts(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(integration.grouped_experts(config), integration.MoEKernelsExperts.Config)
