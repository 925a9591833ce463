"""Inputs of the operators: making them from a case, adding rows, checking results, counting work and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from benchmarks.suites import Case
from moe_kernels.testing import (
    assert_grouped_gemm_close,
    byte_count,
    flop_count,
    group_sizes_for,
    make_experts,
    make_inputs,
    make_tokens,
)
from tritonbench_ops import ffn
from tritonbench_ops.baselines import Inputs

_CHECKED_GROUPS = 12
_CHECKED_ROWS = 1024


def weights(case: Case, device: torch.device, per_group: bool) -> Tensor:
    empty = [0] * case.G
    dtype = getattr(torch, case.dtype)
    transposed = case.layout == "gnk"
    return make_inputs(empty, case.N, case.K, dtype=dtype, device=device, per_group=per_group, transposed=transposed)[1]


def packed(case: Case, B: Tensor, device: torch.device) -> Inputs:
    sizes = group_sizes_for(case.sizes, case.G, case.M)
    A, _, group_offsets = make_inputs(sizes, 0, case.K, dtype=B.dtype, device=device, per_group=False, seed=1)
    return Inputs(A, B, group_offsets, sizes)


def repeat_last(x: Tensor, more: int) -> Tensor:
    return torch.cat((x, x[-1:].expand(more, *x.shape[1:])))


def longer(inputs: Inputs, more: int) -> Inputs:
    """Return `inputs` with `more` rows added to the last group."""
    group_offsets = inputs.group_offsets.clone()
    group_offsets[-1] += more
    sizes = [*inputs.sizes[:-1], inputs.sizes[-1] + more]
    return replace(inputs, A=repeat_last(inputs.A, more), group_offsets=group_offsets, sizes=sizes)


def check(out: Tensor, inputs: Inputs) -> float:
    """Check rows of some groups against the tests' error budget, and return ||out - ref|| / ||ref|| over them."""
    expected = (inputs.A.size(0), inputs.B.size(-1))
    if out.shape != expected:
        raise AssertionError(f"shape {list(out.shape)}, expected {list(expected)}")
    starts = [0, *accumulate(inputs.sizes)]
    groups = sample(inputs.sizes)
    difference = norm = 0.0
    for g in groups:
        size = inputs.sizes[g]
        rows = torch.linspace(0, size - 1, min(size, _CHECKED_ROWS // len(groups)), dtype=torch.float64)
        index = starts[g] + rows.round().long().to(out.device)
        a, o = inputs.A[index], out[index]
        b = inputs.B[g] if inputs.B.dim() == 3 else inputs.B
        try:
            assert_grouped_gemm_close(o, a, b, torch.tensor([0, len(index)], device=out.device))
        except AssertionError as error:
            reason = str(error).partition(": ")[2]  # without the group's name, which refers to the sampled rows
            raise AssertionError(f"wrong in group {g}: {reason}") from error
        exact = a.double() @ b.double()
        difference += (o.double() - exact).square().sum().item()
        norm += exact.square().sum().item()
    return (difference / norm) ** 0.5 if norm else 0.0


def sample(sizes: Sequence[int]) -> list[int]:
    """Return the nonempty groups, or some of them, always with the first, the last and the largest."""
    filled = [g for g, size in enumerate(sizes) if size]
    if len(filled) <= _CHECKED_GROUPS:
        return filled
    last = len(filled) - 1
    spread = {filled[i * last // (_CHECKED_GROUPS - 2)] for i in range(_CHECKED_GROUPS - 1)}
    return sorted(spread | {max(filled, key=lambda g: sizes[g])})


def work(inputs: Inputs) -> tuple[int, int]:
    K, N = inputs.B.shape[-2:]
    return flop_count(inputs.sizes, N, K), bytes_moved(inputs, per_group=inputs.B.dim() == 3)


def bytes_moved(inputs: Inputs, *, per_group: bool = True, result: torch.dtype | None = None) -> int:
    """Return the bytes of operands and result, with one weight for all rows unless `per_group`."""
    K, N = inputs.B.shape[-2:]
    return byte_count(inputs.sizes, N, K, inputs.A.dtype, result or inputs.A.dtype, per_group)


def memory(case: Case, per_group: bool) -> int:
    elements = case.M * (case.K + case.N) + (case.G if per_group else 1) * case.N * case.K
    itemsize: int = getattr(torch, case.dtype).itemsize
    return elements * itemsize


def all_rows(case: Case) -> Case:
    """Return a case of the suite `uniform` with M as the rows of all groups."""
    return replace(case, M=case.G * case.M, sizes="uniform")


def batches(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return A as [G, M, K], for groups that are all of one size, and B."""
    G = len(inputs.sizes)
    return inputs.A.view(G, len(inputs.A) // G, -1), inputs.B


def all_longer(inputs: Inputs, more: int) -> Inputs:
    """Return `inputs`, whose groups are of one size, with `more` rows added to each group."""
    G = len(inputs.sizes)
    A = inputs.A.view(G, len(inputs.A) // G, -1)
    A = torch.cat((A, A[:, -1:].expand(-1, more, -1)), 1)
    group_offsets = inputs.group_offsets + more * torch.arange(G + 1, dtype=torch.int32, device=A.device)
    return replace(inputs, A=A.flatten(0, 1), group_offsets=group_offsets, sizes=[A.size(1)] * G)


@dataclass(frozen=True)
class Lists:
    """Inputs of a varied grouped GEMM."""

    group_A: list[Tensor]  # P of [M_p, K_p]
    group_B: list[Tensor]  # P of [K_p, N_p]


def list_weights(case: Case, device: torch.device) -> list[Tensor]:
    dtype, transposed = getattr(torch, case.dtype), case.layout == "gnk"
    return [
        make_inputs([0], N, K, dtype=dtype, device=device, transposed=transposed, seed=p)[1][0]
        for p, (_, N, K) in enumerate(case.problems)
    ]


def lists(case: Case, group_B: list[Tensor], device: torch.device) -> Lists:
    dtype = getattr(torch, case.dtype)
    made = [
        make_inputs([M], 0, K, dtype=dtype, device=device, per_group=False, seed=len(group_B) + p)[0]
        for p, (M, _, K) in enumerate(case.problems)
    ]
    return Lists(made, group_B)


def longer_lists(inputs: Lists, more: int) -> Lists:
    """Return `inputs` with `more` rows added to the last product."""
    *others, last = inputs.group_A
    return replace(inputs, group_A=[*others, repeat_last(last, more)])


def _single(inputs: Lists) -> list[Inputs]:
    """Return each product as a grouped GEMM of one group."""
    pairs = zip(inputs.group_A, inputs.group_B, strict=True)
    return [Inputs(a, b[None], torch.tensor([0, len(a)], device=a.device), [len(a)]) for a, b in pairs]


def check_lists(outs: list[Tensor], inputs: Lists) -> float:
    if len(outs) != len(inputs.group_A):
        raise AssertionError(f"{len(outs)} results, expected {len(inputs.group_A)}")
    worst = 0.0
    for p, (out, single) in enumerate(zip(outs, _single(inputs), strict=True)):
        try:
            worst = max(worst, check(out, single))
        except AssertionError as error:
            raise AssertionError(f"product {p}: {error}") from error
    return worst


def work_of_lists(inputs: Lists) -> tuple[int, int]:
    flops, bytes_ = zip(*map(work, _single(inputs)), strict=True)
    return sum(flops), sum(bytes_)


def experts(case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    dtype, transposed = getattr(torch, case.dtype), case.layout == "gkn"
    return make_experts(case.G, case.K, case.N, dtype=dtype, device=device, transposed=transposed)


def layer(case: Case, weights: tuple[Tensor, Tensor], device: torch.device, trains: bool) -> ffn.Layer:
    T, dtype = case.M // case.top_k, getattr(torch, case.dtype)
    tokens = make_tokens(T, case.K, case.G, case.top_k, dtype=dtype, device=device, seed=1)
    return ffn.make_layer(*tokens, *weights, trains=trains, transposed=case.layout == "gkn")


def more_tokens(layer: ffn.Layer, more: int) -> ffn.Layer:
    of_tokens = {name: getattr(layer, name) for name in ("hidden", "topk_ids", "topk_weights", "d_out")}
    made: dict[str, Any] = {
        name: repeat_last(x.detach(), more).requires_grad_(x.requires_grad) for name, x in of_tokens.items()
    }
    return replace(layer, **made)


def layer_memory(case: Case, trains: bool) -> int:
    """Return the bytes of the weights, of their gradients in training, and of all rows."""
    elements = (1 + trains) * case.G * 3 * case.N * case.K + case.M * (2 * case.K + 3 * case.N)
    itemsize: int = getattr(torch, case.dtype).itemsize
    return elements * itemsize
