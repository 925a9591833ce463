"""The operators of the suites, each with its providers: PyTorch, ours, peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import moe_kernels
from benchmarks import gating
from benchmarks import inputs as given
from benchmarks.suites import Case
from moe_kernels.ops.products import GROUPED_GEMM
from moe_kernels.runtime import cache, signature
from moe_kernels.runtime.emit import emit
from moe_kernels.runtime.plan import Alloc, Launch, Plan
from moe_kernels.timing import Call
from tritonbench_ops import baselines, ffn
from tritonbench_ops.baselines import PEERS, Inputs, Provider


@dataclass(frozen=True)
class Operator:
    """Inputs, providers and checks of one operator; `baseline` is the provider that speedups refer to, "ours" ours."""

    providers: dict[str, Provider]
    baseline: str
    layouts: dict[str, str]  # by a case's layout, its name in records
    weights: Callable[[Case, torch.device], Any]
    inputs: Callable[[Case, Any, torch.device], Any]  # from a case and its weights
    longer: Callable[[Any, int], Any]  # inputs, number -> inputs with this many more rows
    check: Callable[[Any, Any], float]  # result, inputs -> relative error; AssertionError if the result is wrong
    work: Callable[[Any], tuple[int, int]]  # inputs -> FLOPs and bytes, of real rows only
    memory: Callable[[Case], int]  # bytes of inputs and one result
    dimensions: str = "G, M, N, K"  # the meaning of these fields of a case
    layout_of: str = "weight layout"  # what the layouts are those of
    trains: bool = False  # calls compute gradients: no inference mode, and memory is measured


def _ours(name: str) -> Callable[[Inputs], Call]:
    def make(inputs: Inputs) -> Call:
        function = getattr(moe_kernels, name)
        return lambda: function(inputs.A, inputs.B, inputs.group_offsets)

    return make


def _without_table(inputs: Inputs) -> Call:
    """Return the persistent kernel's launch alone: tiles listed beforehand, rows outside all groups not zeroed."""
    tensors, options = (inputs.A, inputs.B, inputs.group_offsets, None), (inputs.A.dtype, "persistent")
    return launch_alone(GROUPED_GEMM, tensors, options, -1)[0]


def launch_alone(
    operator: signature.Operator, tensors: signature.Tensors, options: Any, which: int
) -> tuple[Call, Sequence[Tensor]]:
    """Return a call of launch number `which` of an operator's plan alone, and the tensors that the plan allocates.

    The tensors are in the plan's order, filled by a run of the whole plan. The call returns the plan's results.
    """
    cache.find(operator, tensors, options)(*tensors)
    entry = cache.plans.get(signature.signature(operator, tensors, options))
    assert entry is not None
    plan, device = entry.plan, next(x.device for x in tensors if x is not None)
    made = sorted(step.variable for step in plan.steps if isinstance(step, Alloc))
    memory = emit(replace(plan, results=tuple(made)), entry.launchers, device)(*tensors)
    names = tuple(f"made {variable}" for variable in made)  # numbered directly after the inputs
    launch = [step for step in plan.steps if isinstance(step, Launch)][which]
    kernel = emit(Plan((*plan.inputs, *names), (launch,), plan.results), entry.launchers, device)
    return lambda: kernel(*tensors, *memory), memory


def _grouped(per_group: bool, baseline: str, providers: dict[str, Provider]) -> Operator:
    groups = "G, " if per_group else ""
    return Operator(
        providers,
        baseline,
        {"gkn": f"[{groups}K, N]", "gnk": f"[{groups}N, K] transposed"},
        weights=lambda case, device: given.weights(case, device, per_group),
        inputs=given.packed,
        longer=given.longer,
        check=given.check,
        work=given.work,
        memory=lambda case: given.memory(case, per_group),
    )


def _planned(inputs: given.Lists) -> Call:
    return moe_kernels.plan_varied_grouped_gemm(inputs.group_A, inputs.group_B)


def _varied(inputs: given.Lists) -> Call:
    return lambda: moe_kernels.varied_grouped_gemm(inputs.group_A, inputs.group_B)


def _bmm(out_dtype: torch.dtype | None) -> Callable[[Inputs], Call]:
    def make(inputs: Inputs) -> Call:
        A, B = given.batches(inputs)
        return lambda: torch.bmm(A, B) if out_dtype is None else torch.bmm(A, B, out_dtype=out_dtype)

    return make


def _uniform(out_dtype: torch.dtype | None) -> Callable[[Inputs], Call]:
    def make(inputs: Inputs) -> Call:
        A, B = given.batches(inputs)
        return lambda: moe_kernels.uniform_grouped_gemm(A, B, len(A), out_dtype=out_dtype)

    return make


def _packed(inputs: Inputs, made: Tensor) -> Tensor:
    return made.flatten(0, 1)


def _layers(trains: bool) -> Operator:
    made = ffn.training if trains else lambda make: make
    return Operator(
        {
            "transformers": Provider("transformers", made(ffn.transformers), "transformers"),
            "compiled": Provider("transformers, compiled", made(ffn.compiled), "transformers", any_rows=False),
            "ours": Provider("moe_mlp", made(ffn.ours), ours=True),
        },
        "transformers",
        {"gkn": "[E, H, 2I]", "gnk": "[E, 2I, H]"},
        weights=given.experts,
        inputs=lambda case, weights, device: given.layer(case, weights, device, trains),
        longer=given.more_tokens,
        check=ffn.check if trains else lambda out, layer: ffn.check({"out": out}, layer),
        work=lambda layer: ffn.work(layer, backward=trains),
        memory=lambda case: given.layer_memory(case, trains),
        dimensions="E, T * top_k, I, H",
        trains=trains,
    )


_OURS = {
    "ours": Provider("grouped_gemm", _ours("grouped_gemm"), ours=True),
    "basic": Provider("basic", _ours("grouped_gemm_jagged"), ours=True),
    "persistent": Provider("persistent", _ours("grouped_gemm_jagged_persistent"), ours=True),
}
_IN_FLOAT32: dict[str, Any] = {"result": _packed, "moved": partial(given.bytes_moved, result=torch.float32)}
OPERATORS = {
    "grouped_gemm": _grouped(
        True,
        "torch",
        {
            "torch": Provider("torch._grouped_mm", baselines.grouped_mm),
            **_OURS,
            "no-table": Provider("persistent, table made beforehand", _without_table, ours=True),
            "loop": Provider("loop of torch.mm", baselines.loop),
            "dense": Provider(
                "one dense torch.mm, same FLOPs",
                baselines.dense,
                same_result=False,
                moved=partial(given.bytes_moved, per_group=False),
            ),
            **PEERS,
        },
    ),
    "float32": _grouped(
        True,
        "loop",
        {"loop": Provider("loop of torch.mm", baselines.loop), **_OURS},
    ),
    "shared_gemm": _grouped(
        False,
        "mm",
        {"mm": Provider("torch.mm", baselines.dense), **_OURS},
    ),
    "uniform": replace(
        _grouped(
            True,
            "bmm",
            {
                "bmm": Provider("torch.bmm", _bmm(None), result=_packed),
                "torch": Provider("torch._grouped_mm", baselines.grouped_mm),
                "ours": Provider("uniform_grouped_gemm", _uniform(None), ours=True, result=_packed),
                "bmm-fp32": Provider("torch.bmm, float32 result", _bmm(torch.float32), **_IN_FLOAT32),
                "ours-fp32": Provider(
                    "uniform_grouped_gemm, float32 result", _uniform(torch.float32), ours=True, **_IN_FLOAT32
                ),
            },
        ),
        inputs=lambda case, B, device: given.packed(given.all_rows(case), B, device),
        longer=given.all_longer,
        memory=lambda case: given.memory(given.all_rows(case), per_group=True),
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
        {"gkn": "[K, N] each", "gnk": "[N, K] each, transposed"},
        weights=given.list_weights,
        inputs=given.lists,
        longer=given.longer_lists,
        check=given.check_lists,
        work=given.work_of_lists,
        memory=lambda case: sum(given.memory(replace(case, G=1, M=M, N=N, K=K), True) for M, N, K in case.problems),
    ),
    "gating": Operator(
        {
            "torch": Provider("PyTorch", gating.plain),
            "compiled": Provider("PyTorch, compiled", gating.compiled, any_rows=False),
            "ours": Provider("moe_kernels", gating.ours, ours=True),
        },
        "torch",
        {"gkn": "[T, E]", "gnk": "[T, E]"},
        weights=gating.bias,
        inputs=gating.logits,
        longer=gating.longer,
        check=gating.check,
        work=lambda inputs: (0, gating.moved(inputs)),
        memory=lambda case: case.M * (case.G * 2 + case.N * 12),
        dimensions="E, T, top_k, groups",
        layout_of="logits",
    ),
    "ffn": _layers(trains=False),
    "ffn-train": _layers(trains=True),
}
