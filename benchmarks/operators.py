"""The operators that suites measure, each with its providers: PyTorch's ways, ours, peers'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any
from unittest import mock

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
from moe_kernels.timing import Call
from tritonbench_ops import baselines, ffn
from tritonbench_ops.baselines import PEERS, Inputs, Provider

_CHECKED_GROUPS = 12
_CHECKED_ROWS = 1024


@dataclass(frozen=True)
class Operator:
    """Inputs, providers and checks of one operator; `baseline` is what the others are compared with."""

    providers: dict[str, Provider]
    baseline: str
    ours: str
    layouts: dict[str, str]  # a case's layout: how records call it
    weights: Callable[[Case, torch.device], Any]
    inputs: Callable[[Case, Any, torch.device], Any]  # from a case and its weights
    longer: Callable[[Any, int], Any]  # the inputs, with so many rows more
    check: Callable[[Any, Any], float]  # result, inputs -> relative error; AssertionError if the result is wrong
    work: Callable[[Any], tuple[int, int]]  # inputs -> FLOPs and bytes, of real rows only
    memory: Callable[[Case], int]  # bytes of inputs and one result
    dimensions: str = "G, M, N, K"  # what these are
    trains: bool = False  # a call computes gradients, for which inference mode is no place; its memory is measured


def _weights(case: Case, device: torch.device, per_group: bool) -> Tensor:
    empty = [0] * case.G
    dtype = getattr(torch, case.dtype)
    transposed = case.layout == "gnk"
    return make_inputs(empty, case.N, case.K, dtype=dtype, device=device, per_group=per_group, transposed=transposed)[1]


def _inputs(case: Case, B: Tensor, device: torch.device) -> Inputs:
    sizes = group_sizes_for(case.sizes, case.G, case.M)
    A, _, group_offsets = make_inputs(sizes, 0, case.K, dtype=B.dtype, device=device, per_group=False, seed=1)
    return Inputs(A, B, group_offsets, sizes)


def _repeat_last(x: Tensor, more: int) -> Tensor:
    return torch.cat((x, x[-1:].expand(more, *x.shape[1:])))


def _longer(inputs: Inputs, more: int) -> Inputs:
    """The last group has more rows."""
    group_offsets = inputs.group_offsets.clone()
    group_offsets[-1] += more
    sizes = [*inputs.sizes[:-1], inputs.sizes[-1] + more]
    return replace(inputs, A=_repeat_last(inputs.A, more), group_offsets=group_offsets, sizes=sizes)


def _check(out: Tensor, inputs: Inputs) -> float:
    """Hold rows spread over a sample of groups against the tests' error budget; ||out - ref|| / ||ref|| over them."""
    expected = (inputs.A.size(0), inputs.B.size(-1))
    if out.shape != expected:
        raise AssertionError(f"shape {list(out.shape)}, expected {list(expected)}")
    starts = [0, *accumulate(inputs.sizes)]
    groups = _sample(inputs.sizes)
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
            reason = str(error).partition(": ")[2]  # less the group's name among the sampled rows
            raise AssertionError(f"wrong in group {g}: {reason}") from error
        exact = a.double() @ b.double()
        difference += (o.double() - exact).square().sum().item()
        norm += exact.square().sum().item()
    return (difference / norm) ** 0.5 if norm else 0.0


def _sample(sizes: Sequence[int]) -> list[int]:
    """Groups with rows: all or some, always the first, the last and the largest."""
    filled = [g for g, size in enumerate(sizes) if size]
    if len(filled) <= _CHECKED_GROUPS:
        return filled
    last = len(filled) - 1
    spread = {filled[i * last // (_CHECKED_GROUPS - 2)] for i in range(_CHECKED_GROUPS - 1)}
    return sorted(spread | {max(filled, key=lambda g: sizes[g])})


def _work(inputs: Inputs) -> tuple[int, int]:
    K, N = inputs.B.shape[-2:]
    dtype = inputs.A.dtype
    per_group = inputs.B.dim() == 3
    return flop_count(inputs.sizes, N, K), byte_count(inputs.sizes, N, K, dtype, dtype, per_group)


def _memory(case: Case, per_group: bool) -> int:
    elements = case.M * (case.K + case.N) + (case.G if per_group else 1) * case.N * case.K
    itemsize: int = getattr(torch, case.dtype).itemsize
    return elements * itemsize


def _ours(name: str) -> Callable[[Inputs], Call]:
    def make(inputs: Inputs) -> Call:
        import moe_kernels

        function = getattr(moe_kernels, name)
        return lambda: function(inputs.A, inputs.B, inputs.group_offsets)

    return make


def _without_table(inputs: Inputs) -> Call:
    """The persistent kernel by itself: the list of tiles is made beforehand, and no row outside the groups zeroed."""
    from moe_kernels.kernels import grouped_gemm, grouped_gemm_tails
    from moe_kernels.kernels.launch import compile_kernel

    made: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}

    def noting(kernel: Any, args: Any, *rest: Any, **options: Any) -> Callable[..., Any]:
        run = compile_kernel(kernel, args, *rest, **options)

        def call(*args: Any) -> Any:
            made[kernel.name] = (run, args)
            return run(*args)

        return call

    out = inputs.A.new_empty(len(inputs.A), inputs.B.size(2))
    tensors = (inputs.A, inputs.B, inputs.group_offsets, None, out)
    with (
        mock.patch.object(grouped_gemm, "compile_kernel", noting),
        mock.patch.object(grouped_gemm_tails, "compile_kernel", noting),
    ):
        grouped_gemm._plan("persistent", *tensors)(*tensors)
    [(run, args)] = made.values()

    def call() -> Tensor:
        run(*args)
        return out

    return call


def _grouped(per_group: bool, layouts: dict[str, str], baseline: str, providers: dict[str, Provider]) -> Operator:
    return Operator(
        providers,
        baseline,
        "ours",
        layouts,
        weights=lambda case, device: _weights(case, device, per_group),
        inputs=_inputs,
        longer=_longer,
        check=_check,
        work=_work,
        memory=lambda case: _memory(case, per_group),
    )


@dataclass(frozen=True)
class Lists:
    """Of a varied grouped GEMM."""

    group_A: list[Tensor]  # P of [M_p, K_p]
    group_B: list[Tensor]  # P of [K_p, N_p]


def _list_weights(case: Case, device: torch.device) -> list[Tensor]:
    dtype, transposed = getattr(torch, case.dtype), case.layout == "gnk"
    return [
        make_inputs([0], N, K, dtype=dtype, device=device, transposed=transposed, seed=p)[1][0]
        for p, (_, N, K) in enumerate(case.problems)
    ]


def _list_inputs(case: Case, group_B: list[Tensor], device: torch.device) -> Lists:
    dtype = getattr(torch, case.dtype)
    made = [
        make_inputs([M], 0, K, dtype=dtype, device=device, per_group=False, seed=len(group_B) + p)[0]
        for p, (M, _, K) in enumerate(case.problems)
    ]
    return Lists(made, group_B)


def _single(inputs: Lists) -> list[Inputs]:
    """Each product as a grouped GEMM of one group."""
    pairs = zip(inputs.group_A, inputs.group_B, strict=True)
    return [Inputs(a, b[None], torch.tensor([0, len(a)], device=a.device), [len(a)]) for a, b in pairs]


def _check_list(outs: list[Tensor], inputs: Lists) -> float:
    if len(outs) != len(inputs.group_A):
        raise AssertionError(f"{len(outs)} results, expected {len(inputs.group_A)}")
    worst = 0.0
    for p, (out, single) in enumerate(zip(outs, _single(inputs), strict=True)):
        try:
            worst = max(worst, _check(out, single))
        except AssertionError as error:
            raise AssertionError(f"product {p}: {error}") from error
    return worst


def _work_of_list(inputs: Lists) -> tuple[int, int]:
    flops, bytes_ = zip(*map(_work, _single(inputs)), strict=True)
    return sum(flops), sum(bytes_)


def _planned(inputs: Lists) -> Call:
    import moe_kernels

    return moe_kernels.plan_varied_grouped_gemm(inputs.group_A, inputs.group_B)


def _varied(inputs: Lists) -> Call:
    import moe_kernels

    return lambda: moe_kernels.varied_grouped_gemm(inputs.group_A, inputs.group_B)


def _batches(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """A [G, M, K] and B of groups that are all of one size."""
    G = len(inputs.sizes)
    return inputs.A.view(G, len(inputs.A) // G, -1), inputs.B


def _bmm(out_dtype: torch.dtype | None) -> Callable[[Inputs], Call]:
    def make(inputs: Inputs) -> Call:
        A, B = _batches(inputs)
        return lambda: torch.bmm(A, B) if out_dtype is None else torch.bmm(A, B, out_dtype=out_dtype)

    return make


def _uniform(out_dtype: torch.dtype | None) -> Callable[[Inputs], Call]:
    def make(inputs: Inputs) -> Call:
        import moe_kernels

        A, B = _batches(inputs)
        return lambda: moe_kernels.uniform_grouped_gemm(A, B, len(A), out_dtype=out_dtype)

    return make


def _all_longer(inputs: Inputs, more: int) -> Inputs:
    """Each of the groups, which are of one size, has more rows."""
    G = len(inputs.sizes)
    A = inputs.A.view(G, len(inputs.A) // G, -1)
    A = torch.cat((A, A[:, -1:].expand(-1, more, -1)), 1)
    group_offsets = inputs.group_offsets + more * torch.arange(G + 1, dtype=torch.int32, device=A.device)
    return replace(inputs, A=A.flatten(0, 1), group_offsets=group_offsets, sizes=[A.size(1)] * G)


def _packed(inputs: Inputs, made: Tensor) -> Tensor:
    return made.flatten(0, 1)


def _all_rows(case: Case) -> Case:
    """A case of the suite `uniform` with the rows of all groups as M."""
    return replace(case, M=case.G * case.M, sizes="uniform")


def _experts(case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    dtype, transposed = getattr(torch, case.dtype), case.layout == "gkn"
    return make_experts(case.G, case.K, case.N, dtype=dtype, device=device, transposed=transposed)


def _layer(case: Case, weights: tuple[Tensor, Tensor], device: torch.device, trains: bool) -> ffn.Layer:
    T, dtype = case.M // case.top_k, getattr(torch, case.dtype)
    tokens = make_tokens(T, case.K, case.G, case.top_k, dtype=dtype, device=device, seed=1)
    return ffn.make_layer(*tokens, *weights, trains=trains, transposed=case.layout == "gkn")


def _more_tokens(layer: ffn.Layer, more: int) -> ffn.Layer:
    of_tokens = {name: getattr(layer, name) for name in ("hidden", "topk_ids", "topk_weights", "d_out")}
    made: dict[str, Any] = {
        name: _repeat_last(x.detach(), more).requires_grad_(x.requires_grad) for name, x in of_tokens.items()
    }
    return replace(layer, **made)


def _layer_memory(case: Case, trains: bool) -> int:
    """Bytes of the weights, of their gradients, and of all rows between them."""
    elements = (1 + trains) * case.G * 3 * case.N * case.K + case.M * (2 * case.K + 3 * case.N)
    itemsize: int = getattr(torch, case.dtype).itemsize
    return elements * itemsize


def _layers(trains: bool) -> Operator:
    made = ffn.training if trains else lambda make: make
    return Operator(
        {
            "transformers": Provider("transformers", made(ffn.transformers), "transformers"),
            "compiled": Provider("transformers, compiled", made(ffn.compiled), "transformers", any_rows=False),
            "ours": Provider("moe_mlp", made(ffn.ours), ours=True),
        },
        "transformers",
        "ours",
        {"gkn": "[E, H, 2I]", "gnk": "[E, 2I, H]"},
        weights=_experts,
        inputs=lambda case, weights, device: _layer(case, weights, device, trains),
        longer=_more_tokens,
        check=ffn.check if trains else lambda out, layer: ffn.check({"out": out}, layer),
        work=lambda layer: ffn.work(layer, backward=trains),
        memory=lambda case: _layer_memory(case, trains),
        dimensions="E, T * top_k, I, H",
        trains=trains,
    )


_OURS = {
    "ours": Provider("grouped_gemm", _ours("grouped_gemm"), ours=True),
    "basic": Provider("basic", _ours("grouped_gemm_jagged"), ours=True),
    "persistent": Provider("persistent", _ours("grouped_gemm_jagged_persistent"), ours=True),
}
OPERATORS = {
    "grouped_gemm": _grouped(
        True,
        {"gkn": "[G, K, N]", "gnk": "[G, N, K] transposed"},
        "torch",
        {
            "torch": Provider("torch._grouped_mm", baselines.grouped_mm),
            **_OURS,
            "no-table": Provider("persistent, table made beforehand", _without_table, ours=True),
            "loop": Provider("loop of torch.mm", baselines.loop),
            "dense": Provider("one dense torch.mm, same FLOPs", baselines.dense, same_result=False),
            **PEERS,
        },
    ),
    "shared_gemm": _grouped(
        False,
        {"gkn": "[K, N]", "gnk": "[N, K] transposed"},
        "mm",
        {"mm": Provider("torch.mm", baselines.dense), **_OURS},
    ),
    "uniform": replace(
        _grouped(
            True,
            {"gkn": "[G, K, N]", "gnk": "[G, N, K] transposed"},
            "bmm",
            {
                "bmm": Provider("torch.bmm", _bmm(None), result=_packed),
                "torch": Provider("torch._grouped_mm", baselines.grouped_mm),
                "ours": Provider("uniform_grouped_gemm", _uniform(None), ours=True, result=_packed),
                "bmm-fp32": Provider("torch.bmm, float32 result", _bmm(torch.float32), result=_packed),
                "ours-fp32": Provider(
                    "uniform_grouped_gemm, float32 result", _uniform(torch.float32), ours=True, result=_packed
                ),
            },
        ),
        inputs=lambda case, B, device: _inputs(_all_rows(case), B, device),
        longer=_all_longer,
        memory=lambda case: _memory(_all_rows(case), per_group=True),
    ),
    "varied": Operator(
        {
            "loop": Provider(
                "loop of torch.mm", lambda inputs: baselines.loop_over_list(inputs.group_A, inputs.group_B)
            ),
            "ours": Provider("varied_grouped_gemm, planned", _planned, ours=True),
            "call": Provider("varied_grouped_gemm", _varied, ours=True, graphs=False),
        },
        "loop",
        "ours",
        {"gkn": "[K, N] each", "gnk": "[N, K] each, transposed"},
        weights=_list_weights,
        inputs=_list_inputs,
        longer=lambda inputs, more: replace(
            inputs, group_A=[*inputs.group_A[:-1], _repeat_last(inputs.group_A[-1], more)]
        ),
        check=_check_list,
        work=_work_of_list,
        memory=lambda case: sum(_memory(replace(case, G=1, M=M, N=N, K=K), True) for M, N, K in case.problems),
    ),
    "ffn": _layers(trains=False),
    "ffn-train": _layers(trains=True),
}
