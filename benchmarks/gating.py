"""Gating: from logits to each token's experts and their weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import moe_kernels
from benchmarks.inputs import repeat_last
from benchmarks.suites import Case
from moe_kernels import reference
from moe_kernels.timing import Call

_Chosen = tuple[Tensor, Tensor]  # topk_ids and topk_weights [T, top_k]


@dataclass(frozen=True)
class Logits:
    """Inputs of a gating: by sigmoid in the best half of `num_groups` groups if there is a bias, else by softmax."""

    logits: Tensor  # [T, E]
    bias: Tensor | None  # [E]
    top_k: int
    num_groups: int

    @property
    def top_groups(self) -> int:
        return max(1, self.num_groups // 2)


def bias(case: Case, device: torch.device) -> Tensor | None:
    """Return a bias [E] for the scores, if the case has groups of experts."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(case.G, generator=generator).mul(0.1).to(device) if case.K else None


def logits(case: Case, bias: Tensor | None, device: torch.device) -> Logits:
    generator = torch.Generator().manual_seed(1)
    made = torch.randn(case.M, case.G, generator=generator).to(device, getattr(torch, case.dtype))
    return Logits(made, bias, case.N, case.K)


def longer(inputs: Logits, more: int) -> Logits:
    return replace(inputs, logits=repeat_last(inputs.logits, more))


def ours(inputs: Logits) -> Call:
    if inputs.bias is None:
        return lambda: moe_kernels.topk_softmax(inputs.logits, inputs.top_k, renormalize=True)
    groups = {"num_groups": inputs.num_groups, "top_groups": inputs.top_groups}
    return lambda: moe_kernels.topk_sigmoid(inputs.logits, inputs.top_k, renormalize=True, bias=inputs.bias, **groups)


def plain(inputs: Logits) -> Call:
    """Return the gating by operators of PyTorch, as models have it."""
    return lambda: _plain(inputs.logits, inputs.bias, inputs.top_k, inputs.num_groups, inputs.top_groups)


def compiled(inputs: Logits) -> Call:
    function = torch.compile(_plain, dynamic=False)
    return lambda: function(inputs.logits, inputs.bias, inputs.top_k, inputs.num_groups, inputs.top_groups)


def _plain(logits: Tensor, bias: Tensor | None, top_k: int, num_groups: int, top_groups: int) -> _Chosen:
    if bias is None:
        weights, ids = logits.softmax(-1, dtype=torch.float32).topk(top_k, dim=-1)
    else:
        scores = logits.float().sigmoid()
        choice = scores + bias
        if num_groups > 1:
            T, E = scores.shape
            grouped = choice.view(T, num_groups, E // num_groups)
            best = grouped.topk(2, dim=-1)[0].sum(-1).topk(top_groups, dim=-1, sorted=False)[1]
            allowed = torch.zeros(T, num_groups, dtype=torch.bool, device=logits.device).scatter_(1, best, True)
            choice = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).view(T, E)
        ids = choice.topk(top_k, dim=-1)[1]
        weights = scores.gather(1, ids)
    return ids, weights / weights.sum(-1, keepdim=True)


def check(chosen: _Chosen, inputs: Logits) -> float:
    """Check the choice against float64 by its scores, since equal ones may differ in order; return the weights' error.

    Raises:
        AssertionError: another choice, or a weight with an error above 1e-5.
    """
    ids, weights = chosen
    softmax, exact = inputs.bias is None, inputs.logits.double()
    bias = None if inputs.bias is None else inputs.bias.double()
    right = reference.topk_ids(exact, bias, inputs.top_k, softmax, inputs.num_groups, inputs.top_groups)
    expected = reference.topk_weights(exact, ids, softmax, True, 1.0)
    scores = exact if bias is None else exact.sigmoid() + bias
    if (scores.gather(1, ids) - scores.gather(1, right)).abs().amax() > 1e-6:
        raise AssertionError("wrong choice of experts")
    error = (weights.double() - expected).norm() / expected.norm()
    if not error < 1e-5:
        raise AssertionError(f"weights have an error of {error:.1e}")
    return error.item()


def moved(inputs: Logits) -> int:
    """Return the bytes of the logits, and of the ids (int64) and weights (float32)."""
    return inputs.logits.nbytes + len(inputs.logits) * inputs.top_k * (8 + 4)
