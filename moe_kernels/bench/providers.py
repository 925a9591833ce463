"""The operators that suites measure, each with what it takes turns between: PyTorch's ways, ours, peers'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from moe_kernels.bench import ffn, peers
from moe_kernels.bench.suites import Case
from moe_kernels.testing import assert_grouped_gemm_close, byte_count, flop_count, group_sizes_for, make_inputs
from moe_kernels.timing import Call

_MORE_ROWS = 4  # as many other numbers of rows a case's host time is measured with
_CHECKED_GROUPS = 12
_CHECKED_ROWS = 1024


@dataclass(frozen=True)
class Provider:
    """One way to compute an operator."""

    label: str
    make: Callable[[Any], Call]  # from an operator's inputs; what it does itself is not timed
    package: str | None = None  # of another project; without it the provider is skipped
    by_default: bool = True  # False: has to be named, because it is slow to prepare
    ours: bool = False
    same_result: bool = True  # False for a yardstick that computes something else
    graphs: bool = True  # False if a call cannot be captured into a CUDA graph
    result: Callable[[Any, Any], Any] = lambda inputs, made: made  # the operator's result, from what the call returns

    @property
    def installed(self) -> bool:
        return self.package is None or find_spec(self.package) is not None


@dataclass(frozen=True)
class Operator:
    """Inputs, providers and checks of one operator; `baseline` is what the others are compared with."""

    providers: dict[str, Provider]
    baseline: str
    ours: str
    layouts: dict[str, str]  # a case's layout: how records call it
    weights: Callable[[Case, torch.device], Any]
    inputs: Callable[[Case, Any, torch.device], Any]  # from a case and its weights
    other_rows: Callable[[Any], Sequence[Any]]  # the inputs, each time with another number of rows
    check: Callable[[Any, Any], float]  # result, inputs -> relative error; AssertionError if the result is wrong
    work: Callable[[Any], tuple[int, int]]  # inputs -> FLOPs and bytes, of real rows only
    memory: Callable[[Case], int]  # bytes of inputs and one result
    dimensions: str = "G, M, N, K"  # what these are
    trains: bool = False  # a call computes gradients, for which inference mode is no place; its memory is measured


@dataclass(frozen=True)
class Inputs:
    """Of a grouped GEMM."""

    rows: Tensor  # [M + _MORE_ROWS, K]
    A: Tensor  # [M, K], the first of them
    B: Tensor  # [G, K, N], or [K, N] for all groups
    group_offsets: Tensor  # [G + 1] int32
    sizes: list[int]

    @property
    def offs(self) -> Tensor:  # [G]
        return self.group_offsets[1:].contiguous()


def _weights(case: Case, device: torch.device, per_group: bool) -> Tensor:
    empty = [0] * case.G
    dtype = getattr(torch, case.dtype)
    transposed = case.layout == "gnk"
    return make_inputs(empty, case.N, case.K, dtype=dtype, device=device, per_group=per_group, transposed=transposed)[1]


def _inputs(case: Case, B: Tensor, device: torch.device) -> Inputs:
    sizes = group_sizes_for(case.sizes, case.G, case.M)
    rows, _, group_offsets = make_inputs(
        [*sizes, _MORE_ROWS], 0, case.K, dtype=B.dtype, device=device, per_group=False, seed=1
    )
    return Inputs(rows, rows[: case.M], B, group_offsets[:-1], sizes)


def _other_rows(inputs: Inputs) -> list[Inputs]:
    """More rows at the end, which are in no group."""
    M = len(inputs.A)
    return [replace(inputs, A=inputs.rows[: M + more]) for more in range(1, _MORE_ROWS + 1)]


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


def _torch(inputs: Inputs) -> Call:
    offs = inputs.offs
    return lambda: torch._grouped_mm(inputs.A, inputs.B, offs)


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


def _loop(inputs: Inputs) -> Call:
    out = inputs.A.new_empty(len(inputs.A), inputs.B.size(2))
    sizes = [*inputs.sizes, len(inputs.A) - sum(inputs.sizes)]
    groups = zip(torch.split(inputs.A, sizes), inputs.B.unbind(0), torch.split(out, sizes), strict=False)
    products = [(a, b, o) for a, b, o in groups if len(a)]

    def loop_of_mm() -> Tensor:
        for a, b, o in products:
            torch.mm(a, b, out=o)
        return out

    return loop_of_mm


def _mm(inputs: Inputs) -> Call:
    B = inputs.B if inputs.B.dim() == 2 else inputs.B[0]
    return lambda: torch.mm(inputs.A, B)


def _grouped(per_group: bool, layouts: dict[str, str], baseline: str, providers: dict[str, Provider]) -> Operator:
    return Operator(
        providers,
        baseline,
        "ours",
        layouts,
        weights=lambda case, device: _weights(case, device, per_group),
        inputs=_inputs,
        other_rows=_other_rows,
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
    return [Inputs(a, a, b[None], torch.tensor([0, len(a)], device=a.device), [len(a)]) for a, b in pairs]


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


def _mm_list(inputs: Lists) -> Call:
    products = [(a, b, a.new_empty(len(a), b.size(1))) for a, b in zip(inputs.group_A, inputs.group_B, strict=True)]

    def loop_of_mm() -> list[Tensor]:
        for a, b, o in products:
            torch.mm(a, b, out=o)
        return [o for *_, o in products]

    return loop_of_mm


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


def _packed(inputs: Inputs, made: Tensor) -> Tensor:
    return made.flatten(0, 1)


def _all_rows(case: Case) -> Case:
    """A case of the suite `uniform` with the rows of all groups as M."""
    return replace(case, M=case.G * case.M, sizes="uniform")


def _layers(trains: bool) -> Operator:
    made = ffn.training if trains else lambda make: make
    return Operator(
        {
            "transformers": Provider("transformers", made(ffn.transformers), "transformers"),
            "compiled": Provider("transformers, compiled", made(ffn.compiled), "transformers"),
            "ours": Provider("moe_mlp", made(ffn.ours), ours=True),
        },
        "transformers",
        "ours",
        {"gkn": "[E, H, 2I]", "gnk": "[E, 2I, H]"},
        weights=ffn.weights_of,
        inputs=lambda case, weights, device: ffn.layer_of(case, weights, device, trains),
        other_rows=ffn.other_tokens,
        check=ffn.check if trains else lambda out, layer: ffn.check({"out": out}, layer),
        work=lambda layer: ffn.work(layer, backward=trains),
        memory=lambda case: ffn.memory(case, trains),
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
            "torch": Provider("torch._grouped_mm", _torch),
            **_OURS,
            "no-table": Provider("persistent, table made beforehand", _without_table, ours=True),
            "loop": Provider("loop of torch.mm", _loop),
            "dense": Provider("one dense torch.mm, same FLOPs", _mm, same_result=False),
            "quack": Provider("quack", peers.quack, "quack"),
            "quack-tuned": Provider("quack, tuned", peers.quack_tuned, "quack", by_default=False),
            "deepgemm": Provider(
                "DeepGEMM, rows padded beforehand", peers.deep_gemm, "deep_gemm", result=peers.without_padding
            ),
            "triton_kernels": Provider(
                "triton_kernels, metadata made beforehand",
                peers.triton_kernels,
                "triton_kernels",
                result=peers.without_batch,
            ),
        },
    ),
    "shared_gemm": _grouped(
        False,
        {"gkn": "[K, N]", "gnk": "[N, K] transposed"},
        "mm",
        {"mm": Provider("torch.mm", _mm), **_OURS},
    ),
    "uniform": replace(
        _grouped(
            True,
            {"gkn": "[G, K, N]", "gnk": "[G, N, K] transposed"},
            "bmm",
            {
                "bmm": Provider("torch.bmm", _bmm(None), result=_packed),
                "torch": Provider("torch._grouped_mm", _torch),
                "ours": Provider("uniform_grouped_gemm", _uniform(None), ours=True, result=_packed),
                "bmm-fp32": Provider("torch.bmm, float32 result", _bmm(torch.float32), result=_packed),
                "ours-fp32": Provider(
                    "uniform_grouped_gemm, float32 result", _uniform(torch.float32), ours=True, result=_packed
                ),
            },
        ),
        inputs=lambda case, B, device: _inputs(_all_rows(case), B, device),
        other_rows=lambda inputs: [inputs],
        memory=lambda case: _memory(_all_rows(case), per_group=True),
    ),
    "varied": Operator(
        {
            "loop": Provider("loop of torch.mm", _mm_list),
            "ours": Provider("varied_grouped_gemm, planned", _planned, ours=True),
            "call": Provider("varied_grouped_gemm", _varied, ours=True, graphs=False),
        },
        "loop",
        "ours",
        {"gkn": "[K, N] each", "gnk": "[N, K] each, transposed"},
        weights=_list_weights,
        inputs=_list_inputs,
        other_rows=lambda inputs: [inputs],
        check=_check_list,
        work=_work_of_list,
        memory=lambda case: sum(_memory(replace(case, G=1, M=M, N=N, K=K), True) for M, N, K in case.problems),
    ),
    "ffn": _layers(trains=False),
    "ffn-train": _layers(trains=True),
}
