"""Helion's search as `tune` starts it, up to the measurements, and the compiled code for the bundled configs."""

from __future__ import annotations

import copy
import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import helion
import pytest
import torch
from helion.autotuner import benchmark_provider
from sm90 import H200, SHARED_MEMORY, empty
from test_lowered_grouped_gemm import compiled
from test_lowered_uniform_gemm import compiled as compiled_uniform
from test_lowered_varied_gemm import compiled as compiled_varied

from moe_kernels import rules
from moe_kernels.ops.products import GROUPED_GEMM
from moe_kernels.rules import grouped, uniform, varied
from moe_kernels.runtime import cache, store, targets
from moe_kernels.runtime import compile as compiler
from moe_kernels.runtime.plan import Plan
from moe_kernels.runtime.signature import portable, signature, symbolic
from moe_kernels.runtime.symbolic import SymbolicTensor, contiguous_strides, value
from moe_kernels.tuning import entries, search

KERNELS = {"basic": "jagged", "persistent": "jagged_persistent", "tails": "jagged_tails", "tall": "jagged_tall"}
BUNDLED = [
    (file, entry)
    for file in sorted(Path(entries.__file__).parent.glob("*.json"))
    for entry in entries.read(file, json.loads(file.read_text())["gpu"])
]


class Provider(benchmark_provider.LocalBenchmarkProvider):
    """Stand-in for measurements: configs with 7 stages and without grouping are the fastest."""

    seen: ClassVar[list[helion.Config]] = []

    def _compute_baseline(self) -> tuple[object, Sequence[int], None]:
        assert self.settings.autotune_baseline_fn is not None
        return None, [4], None

    def setup(self) -> None: ...

    def benchmark(self, batch: list[helion.Config], **_: Any) -> list[Any]:
        results = []
        for config in batch:
            self.seen.append(config)
            us = 1.0 + abs(config.config["num_stages"] - 7) + 0.1 * config.config["l2_groupings"][0]
            result = benchmark_provider.BenchmarkResult(config, lambda *_: None, us, "ok", 0.1, time.perf_counter())
            results.append(result)
        return results


@contextmanager
def fake_inputs(task: search.Task) -> Iterator[tuple[search.Inputs, Callable[..., torch.Tensor]]]:
    """Yield inputs without memory, on an absent GPU, and a function that makes more such tensors."""
    with compiler._example_tensors(H200) as make:

        def tensor(*shape: int, dtype: torch.dtype = search.DTYPES[task.dtype]) -> torch.Tensor:
            return make(compiler._Example(dtype, shape, contiguous_strides(shape)))

        B = tensor(task.G, task.N, task.K) if task.transposed else tensor(task.G, task.K, task.N)
        A, B = tensor(task.M, task.K), B.transpose(1, 2) if task.transposed else B
        tensors = [(A, B, tensor(task.G + 1, dtype=torch.int32), None) for _ in search.ROUTINGS]
        yield search.Inputs(GROUPED_GEMM, tensors, (A.dtype, "persistent")), tensor


@pytest.mark.parametrize(("variant", "transposed"), [("basic", False), ("persistent", True)])
def test_helion_searches_legal_configs_alone(monkeypatch: pytest.MonkeyPatch, variant: str, transposed: bool) -> None:
    monkeypatch.setattr(benchmark_provider, "LocalBenchmarkProvider", Provider)
    monkeypatch.setattr(Provider, "seen", [])
    rows = 256 if variant == "persistent" else 4
    task = search.Task(16, 16 * rows, 1536, 2048, "bfloat16", transposed)
    with fake_inputs(task) as (inputs, new):

        def calls(inputs: search.Inputs, choice: Any) -> list[Callable[[], Any]]:
            """Return calls that allocate as a plan does, and launch nothing."""
            given = symbolic(inputs.operator, inputs.tensors[0], inputs.options)
            with rules.force(choice):
                builder, results = cache.build_steps(inputs.operator, given, inputs.options, H200)
            allocated = {getattr(step, "variable", None): step for step in builder.steps}

            def memory(x: SymbolicTensor, tensors: Sequence[Any]) -> torch.Tensor:
                if x.variable < len(tensors):
                    return tensors[x.variable]
                extents = [() if x is None else tuple(x.shape) for x in tensors]
                return new(*(value(n, extents) for n in allocated[x.variable].shape), dtype=x.dtype)

            return [lambda each=each: tuple(memory(x, each) for x in results) for each in inputs.tensors]

        monkeypatch.setattr(search.Inputs, "calls", calls)
        problem = inputs.problem()
        start = grouped.rule(problem, variant, 128 if variant == "persistent" else None)  # with tiles of one height
        seeds = [start, *search.neighbours(start, problem)]
        found = search.search(problem, seeds, inputs, 6)
        searched, its_problem = start, problem
        if variant == "persistent":
            searched, its_problem = search.storing(start, tma_out=False), replace(problem, tma_out=False)
        kernel, arg_sets = search.kernel_calls(searched, inputs)
        spec = compiler._variant(kernel, False, problem.precision).bind(arg_sets[0]).config_spec
    assert problem.tma_A and problem.tma_B and problem.tma_out and problem.transposed == transposed
    assert start.addressing.tma_out == (variant == "persistent")
    assert len(Provider.seen) > 60
    for config in Provider.seen:
        made = replace(searched, config=rules.Config(**config.config))
        assert grouped.why_illegal(made, its_problem) is None
    assert len({str(config) for config in Provider.seen}) > 20
    assert (found.variant, found.block_m) == (variant, start.block_m)
    assert grouped.why_illegal(found, problem) is None
    assert abs(found.config.config["num_stages"] - 7) < 3  # the seeds have 3 to 5
    addressing = grouped.indexing_of(variant, False, searched.addressing)
    for config in Provider.seen[:30]:
        full = copy.deepcopy(config)
        short = helion.Config(**search.concise(config.config), **addressing)
        spec.normalize(full)
        spec.normalize(short)
        assert full == short


def problem_of(rows: int, M: int, N: int, K: int, G: int, dtype: torch.dtype, **changed: Any) -> grouped.Problem:
    flags = dict.fromkeys(("tf32", "has_bias"), False)
    flags |= dict.fromkeys(("tma_A", "tma_B", "tma_out"), True)
    return grouped.Problem(rows, M, N, K, G, dtype, **flags | changed)


@pytest.mark.parametrize("rows", [4, 64, 512])
def test_every_alternative_compiles(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    shape = (16, 16 * rows, 1536, 2048)
    choices = search.alternatives(problem_of(rows, 16 * rows, 1536, 2048, 16, torch.bfloat16))
    assert len(choices) >= 2
    for choice in choices:
        with rules.force(choice):
            reports = compiled(monkeypatch, "auto", shape)
        report = reports[KERNELS[choice.variant]]
        assert report["code"].count("_desc.load(") == {"tails": 3, "tall": 4}.get(choice.variant, 2)
        assert report["stack"] == 0


@pytest.mark.parametrize(
    ("file", "entry"),
    BUNDLED,
    ids=[f"{f.stem} {e.kernel} {e.bucket.rows} {e.bucket.N} {e.bucket.K}" for f, e in BUNDLED],
)
def test_bundled_configs(monkeypatch: pytest.MonkeyPatch, file: Path, entry: entries.Entry) -> None:
    """Each compiles, fits in an H200's shared memory, and has the TMA loads that it names."""
    bucket = entry.bucket
    if bucket.op != "grouped_gemm":
        check_product(monkeypatch, entry)
        return
    dtype = torch.float32 if bucket.dtype == "tf32" else getattr(torch, bucket.dtype)
    M = rules.floor_power_of_2(entry.M)
    flags = {"tf32": bucket.dtype == "tf32", "transposed": bucket.transposed}
    problem = problem_of(bucket.rows, M, bucket.N, bucket.K, bucket.G, dtype, **flags)
    choice = grouped.adapted(entry, problem)
    assert choice is not None and choice.addressing.tma == entry.tma
    assert grouped.why_illegal(choice, problem) is None
    shape = (bucket.G, entry.M, bucket.N, bucket.K)
    with rules.force(choice):
        reports = compiled(monkeypatch, "auto", shape, dtype=dtype, transposed=bucket.transposed)
    report = reports[KERNELS[choice.variant]]
    assert report["shared"] <= SHARED_MEMORY
    assert report["code"].count("_desc.load(") == choice.addressing.tma_A + choice.addressing.tma_B


def check_product(monkeypatch: pytest.MonkeyPatch, entry: entries.Entry) -> None:
    """Assert that a config for uniform or varied products is used for its own problem, and compiles."""
    bucket = entry.bucket
    name, _, out_name = bucket.dtype.partition(" to ")
    dtype = torch.float32 if name == "tf32" else getattr(torch, name)
    if entry.kernel == "bmm":
        return
    operators: Any = uniform if bucket.op == "uniform" else varied
    used = []

    def choose(problem: Any) -> Any:
        used.append(operators.adapted(entry, problem))
        return used[0]

    monkeypatch.setattr(operators, "choose", choose)
    columns = (False, bucket.transposed)
    if bucket.op == "uniform":
        shape = (bucket.G, bucket.rows, bucket.N, bucket.K)
        out_dtype = getattr(torch, out_name) if out_name else dtype
        report = compiled_uniform(monkeypatch, shape, dtype=dtype, columns=columns, out_dtype=out_dtype, rule=False)
        assert report["code"].count("_desc.load(") == sum(name in entry.tma for name in ("A", "B"))
    else:
        compiled_varied(monkeypatch, [(bucket.rows, bucket.N, bucket.K)] * bucket.G, dtype=dtype, columns=columns)
    assert used[0] is not None


def test_bundled_entries_of_the_other_products_would_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry of each kind is checked, whether or not the files have any."""
    values = dict(us=1.0, rule_us=1.0, versions=entries.installed_versions(), date="", command="")
    made = entries.Entry(
        "folded",
        entries.Bucket("bfloat16 to float32", False, 512, 64, 512, 8, "uniform"),
        64,
        ["A", "B", "out"],
        {"block_sizes": [64, 64, 128], "num_warps": 4, "num_stages": 4},
        M=4096,
        **values,
    )
    check_product(monkeypatch, made)
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        check_product(monkeypatch, replace(made, config={**made.config, "num_stages": 8}))
    monkeypatch.undo()
    config = varied.stored(varied.make(4, 128, 64, 64, 4, 4, 1))
    bucket = entries.Bucket("float16", True, 256, 256, 256, 4, "varied")
    check_product(monkeypatch, entries.Entry("varied", bucket, 128, [], config, M=1024, **values))


def test_an_entry_of_more_shared_memory_than_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is refused after compiling, here or ahead: the rule's config replaces it, with one warning."""
    monkeypatch.setenv("MOE_KERNELS_CONFIG_DIR", str(tmp_path / "configs"))
    monkeypatch.setenv("MOE_KERNELS_CACHE_DIR", str(tmp_path / "plans"))
    monkeypatch.setattr(cache, "plans", cache.PlanCache())
    rules.reload()
    tensors = (empty(32, 2048), empty(8, 512, 2048).mT, empty(9, dtype=torch.int32), None)
    options = (torch.bfloat16, "auto")
    inputs, text = symbolic(GROUPED_GEMM, tensors, options), portable(signature(GROUPED_GEMM, tensors, options))
    with rules.record() as made, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache.build_steps(GROUPED_GEMM, inputs, options, H200)
    [(problem, _)] = made
    by_rule = grouped.rule(problem)
    config = {**search.concise(by_rule.config.config), "block_sizes": [16, 256, 16, 128], "num_stages": 8}
    values = dict(us=1.0, rule_us=1.0, versions=entries.installed_versions(), date="", command="")
    entry = entries.Entry(
        **{**search.stored(by_rule), "config": config}, bucket=grouped.bucket_of(problem), M=32, **values
    )
    entries.write(entries.file_in(tmp_path / "configs", H200.name), H200.name, [entry])
    rules.reload()

    def make() -> Plan:
        return cache.plan_of(GROUPED_GEMM, inputs, options, text, H200)[0]

    with pytest.warns(RuntimeWarning, match="shared memory") as caught:
        plan = rules.with_fallback(make)
    assert sum("shared memory" in str(warning.message) for warning in caught) == 1
    for key in plan.binaries:
        binary = store.read_binary(key)
        assert binary is not None and json.loads(binary.metadata)["shared"] <= H200.shared_memory
    monkeypatch.setattr(cache, "plans", cache.PlanCache())
    monkeypatch.setattr(cache, "make_plan", lambda *_: pytest.fail("a plan is made again"))
    assert make().to_json() == plan.to_json()  # the stored plan is the rule's
    monkeypatch.undo()
    rules.reload()


def test_a_rule_of_more_shared_memory_than_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its kernels have fewer stages, here or ahead; under a forced choice it is an error."""
    monkeypatch.setenv("MOE_KERNELS_CACHE_DIR", str(tmp_path / "plans"))
    monkeypatch.setattr(cache, "plans", cache.PlanCache())
    gpu = targets.KNOWN["b200"]
    tensors = (empty(16384, 4096), empty(8, 2048, 4096).mT, empty(9, dtype=torch.int32), None)
    options = (torch.bfloat16, "auto")
    inputs, text = symbolic(GROUPED_GEMM, tensors, options), portable(signature(GROUPED_GEMM, tensors, options))

    def make() -> Plan:
        return cache.plan_of(GROUPED_GEMM, inputs, options, text, gpu)[0]

    with rules.record() as made, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no config has been tuned")
        plan = rules.with_fallback(make)
    metadata = [json.loads(binary.metadata) for key in plan.binaries if (binary := store.read_binary(key))]
    assert len(metadata) == 2 and all(values["shared"] <= gpu.shared_memory for values in metadata)
    assert {values["num_stages"] for values in metadata if values["shared"] > 100_000} == {3}
    (choice,) = [choice for _, choice in made if isinstance(choice, rules.Choice)]
    assert choice.config.config["num_stages"] == 4
    monkeypatch.setenv("MOE_KERNELS_CACHE_DIR", str(tmp_path / "others"))
    with rules.force(choice), pytest.raises(Exception, match="shared memory"):
        make()
