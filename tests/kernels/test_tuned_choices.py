"""The runtime as `tune` uses it: kernels with a given choice, and their arguments. On a GPU, also a whole search."""

from __future__ import annotations

import itertools
import math
import types
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_kernels import grouped_gemm, reference, rules, uniform_grouped_gemm
from moe_kernels.ops.products import GROUPED_GEMM
from moe_kernels.rules import grouped, uniform, varied
from moe_kernels.runtime import cache, targets
from moe_kernels.runtime import compile as compiler
from moe_kernels.runtime.plan import Launch, Plan, Request
from moe_kernels.runtime.signature import portable, signature, symbolic
from moe_kernels.tuning import entries, search

TASK = search.Task(3, 160, 32, 48, "float32", False)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("variant", ["basic", "persistent"])
def test_kernel_calls(device: str, variant: str, transposed: bool) -> None:
    inputs = search.grouped_inputs(replace(TASK, transposed=transposed), torch.device(device))
    choice = grouped.rule(inputs.problem(), variant)
    if choice.addressing.tma_out:
        choice = search.storing(choice, tma_out=False)
    kernel, arg_sets = search.kernel_calls(choice, inputs)
    assert kernel.name == {"basic": "jagged", "persistent": "jagged_persistent"}[variant]
    assert len(arg_sets) == len(search.ROUTINGS)
    with rules.force(choice):
        before = replace(inputs, operator=search._ARGUMENTS).steps()
    launched = [step.kernel.name for step in before if isinstance(step, Request)]
    assert launched == {"basic": [], "persistent": ["tile_table"]}[variant]
    weight = inputs.tensors[0][1]
    stored = weight.transpose(1, 2) if transposed else weight
    results = set()
    for args, (A, B, offsets, _) in zip(arg_sets, inputs.tensors, strict=True):
        assert len(args) == len(kernel.signature.parameters)
        named = dict(zip(kernel.signature.parameters, args, strict=True))
        for name, expected in (("A_packed", A), ("B", stored)):
            assert place(named[name]) == place(expected)
        out = named["out"]
        assert out.shape == (TASK.M, TASK.N) and not out.any()
        results.add(out.data_ptr())
        if variant == "basic":
            assert place(named["group_offsets"]) == place(offsets)
            assert named["max_tiles"] >= len(tiles_of(offsets, choice.block_m))
        else:
            listed = tiles_of(offsets, choice.block_m)
            assert named["num_tiles"].item() == len(listed)
            assert named["tiles"][1 : 1 + len(listed)].tolist() == listed
        if device == "cuda":
            run_by_helion(kernel, choice, args)
            search.check_close(out, reference.grouped_gemm(A, B, offsets))
    assert len(results) == len(arg_sets)  # the results do not overwrite each other


def place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def tiles_of(offsets: torch.Tensor, block_m: int) -> list[list[int]]:
    return [
        [g, row, min(row + block_m, end)]
        for g, (begin, end) in enumerate(itertools.pairwise(offsets.tolist()))
        for row in range(begin, end, block_m)
    ]


def run_by_helion(kernel: Any, choice: rules.Choice, args: tuple[Any, ...]) -> None:
    """Run the kernel as Helion's autotuner does for its reference result."""
    import helion

    bound = helion.kernel(kernel.fn, static_shapes=False, index_dtype=torch.int32, dot_precision="ieee").bind(args)
    bound.compile_config(helion.Config(**choice.config.config))(*args)


def test_calls_under_a_choice_are_right(device: str) -> None:
    """This includes a height that the rule does not give, which changes the table of tiles."""
    inputs = search.grouped_inputs(TASK, torch.device(device))
    choices = search.alternatives(inputs.problem())
    assert len({(choice.variant, choice.block_m) for choice in choices}) >= 3
    for choice in choices:
        with rules.record() as made:
            calls = inputs.calls(choice)
        assert [chosen for _, chosen in made] == [choice]
        for call, (A, B, offsets, _) in zip(calls, inputs.tensors, strict=True):
            search.check_close(call(), reference.grouped_gemm(A, B, offsets))


def test_a_forced_choice_leaves_the_plans_of_others_alone(device: str) -> None:
    inputs = search.grouped_inputs(TASK, torch.device(device))
    A, B, offsets, _ = inputs.tensors[0]
    with cache.isolated():
        grouped_gemm(A, B, offsets, variant="persistent")
        before = dict(cache.plans.entries)
        inputs.calls(grouped.rule(inputs.problem(), "basic"))[0]()
        assert dict(cache.plans.entries) == before and len(before) == 1
        with rules.record() as made:
            grouped_gemm(A, B, offsets, variant="persistent")
        assert not made


def test_a_forced_choice_of_a_uniform_product(device: str) -> None:
    A, B = (torch.randn(2, 48, 48, device=device) for _ in range(2))
    with cache.isolated():
        with rules.record() as made:
            uniform_grouped_gemm(A, B, 2)
        [(problem, _)] = made
    forced = uniform.make(problem, [16, 32, 16], num_warps=4, num_stages=2)
    with cache.isolated(), rules.force(forced), rules.record() as made:
        out = uniform_grouped_gemm(A, B, 2)
    assert [choice for _, choice in made] == [forced]
    search.check_close(out, A @ B)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("op", ["grouped_gemm", "uniform", "varied"])
def test_an_entry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, op: str, transposed: bool) -> None:
    """Without time the rule's config and two more are timed, here by a clock for which the third is the fastest."""
    task = search.Task(3, 96 if op == "grouped_gemm" else 32, 32, 48, "float32", transposed, op)
    where = torch.device(device)
    clock: dict[Any, float] = {}

    def interleaved(calls: Any, *_: Any) -> dict[Any, float]:
        for choice, _ in calls:
            clock.setdefault(choice, {0: 3.0, 1: 2.0, 2: 1.0}.get(len(clock), 9.0))
        return {(choice, j): clock[choice] for choice, j in calls}

    monkeypatch.setattr(search, "interleaved", interleaved)
    if device == "cpu":
        memory = types.SimpleNamespace(total_memory=2**37)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    file = entries.file_in(tmp_path, "NVIDIA Test 9000")
    assert search.tune([task], file, "NVIDIA Test 9000", where, 0.5) == 0
    [made] = entries.read(file, "NVIDIA Test 9000")
    assert (made.us, made.rule_us, made.bucket) == (1.0, 3.0, search.bucket(task))
    options = "" if op == "grouped_gemm" else f"--op {op} "
    assert f"tune {options}--shapes 3,{task.M},32,48 --dtype float32" in made.command
    with rules.record() as made_for:
        work = search.WORKLOADS[op](task, where)
    problem, _ = made_for[-1]
    if op == "grouped_gemm":
        choice: Any = grouped.adapted(made, problem)
        assert choice.addressing.tma == made.tma and grouped.why_illegal(choice, problem) is None
        assert grouped.bucket_of(problem) == made.bucket
    else:
        operators: Any = uniform if op == "uniform" else varied
        choice = operators.adapted(made, problem)
        assert operators.bucket_of(problem) == made.bucket
    assert work.stored(choice) != work.stored(work.choices[0])
    for call, right in zip(work.calls(choice), work.calls(work.choices[0]), strict=True):
        expected = right().clone()
        assert not expected.isnan().any()
        search.check_close(call(), expected)


@pytest.mark.parametrize("op", ["grouped_gemm", "uniform", "varied"])
def test_what_a_config_leaves_out_shows(monkeypatch: pytest.MonkeyPatch, device: str, op: str) -> None:
    """The second choice launches nothing, in memory that has the right result of the first."""
    if device == "cpu":
        memory = types.SimpleNamespace(total_memory=2**37)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    task = search.Task(2, 64 if op == "grouped_gemm" else 32, 32, 32, "float32", False, op)
    work = search.WORKLOADS[op](task, torch.device(device))
    first, second = list(dict.fromkeys(work.choices))[:2]
    trials = search.Trials(work, torch.device(device), math.inf)
    assert trials.add([first], at_least=1) == [first]
    to_plan = compiler.to_plan

    def without_launches(*built: Any) -> tuple[Plan, dict[str, Any]]:
        plan, _ = to_plan(*built)
        return replace(plan, steps=tuple(step for step in plan.steps if not isinstance(step, Launch))), {}

    with monkeypatch.context() as patched:
        patched.setattr(compiler, "to_plan", without_launches)
        assert trials.add([second], at_least=1) == []
    trials.tried.remove(second)
    assert trials.add([second], at_least=1) == [second]


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["uniform", "varied"])
def test_a_grid(tmp_path: Path, op: str) -> None:
    gpu = torch.device("cuda", torch.cuda.current_device())
    name = targets.of_device("cuda", gpu.index).name
    file = entries.file_in(tmp_path, name)
    assert search.tune([search.Task(4, 256, 64, 256, "bfloat16", False, op)], file, name, gpu, 15.0) == 0
    [made] = entries.read(file, name)
    assert 0 < made.us <= made.rule_us


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2, 256])
def test_a_search(tmp_path: Path, rows: int) -> None:
    gpu = torch.device("cuda", torch.cuda.current_device())
    name = targets.of_device("cuda", gpu.index).name
    file = entries.file_in(tmp_path, name)
    task = search.Task(16, 16 * rows, 512, 1024, "bfloat16", True)
    assert search.tune([task], file, name, gpu, 60.0) == 0
    [made] = entries.read(file, name)
    assert 0 < made.us <= made.rule_us


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [False, True], ids=["made here", "made ahead"])
def test_an_entry_of_more_shared_memory_than_there_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ahead: bool
) -> None:
    """The rule's config takes over, with one warning."""
    gpu = targets.of_device("cuda", torch.cuda.current_device())
    monkeypatch.setenv("MOE_KERNELS_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("MOE_KERNELS_CACHE_DIR", str(tmp_path / "plans"))
    monkeypatch.setenv("MOE_KERNELS_CACHE_READONLY", "")
    monkeypatch.setattr(cache, "plans", cache.PlanCache())
    inputs = search.grouped_inputs(search.Task(8, 64, 512, 2048, "bfloat16", True), torch.device("cuda"))
    (A, B, offsets, _), options = inputs.tensors[0], (torch.bfloat16, "auto")
    problem = inputs.problem()
    by_rule = grouped.rule(problem, "basic")
    config = {**by_rule.config.config, "block_sizes": [16, 256, 16, 128], "num_stages": 8}  # 557 KB
    made = entries.Entry(
        bucket=grouped.bucket_of(problem),
        us=1.0,
        rule_us=2.0,
        M=A.size(0),
        versions=entries.installed_versions(),
        date="2026-01-01",
        command="",
        **{**search.stored(by_rule), "config": search.concise(config)},
    )
    entries.write(entries.file_in(tmp_path, gpu.name), gpu.name, [made])
    cache.reload()
    tensors = (A, B, offsets, None)
    text, given = portable(signature(GROUPED_GEMM, tensors, options)), symbolic(GROUPED_GEMM, tensors, options)
    try:
        with pytest.warns(RuntimeWarning, match="does not work here") as caught:
            if ahead:
                rules.with_fallback(lambda: cache.plan_of(GROUPED_GEMM, given, options, text, gpu))
            out = grouped_gemm(A, B, offsets)
        assert len(caught) == 1 and "shared memory" in str(caught[0].message)
        search.check_close(out, inputs.calls(by_rule)[0]())
        cache.reload()
        with warnings.catch_warnings():  # the stored plan is the rule's
            warnings.simplefilter("error")
            assert torch.equal(grouped_gemm(A, B, offsets), out)
    finally:
        monkeypatch.undo()
        cache.reload()
