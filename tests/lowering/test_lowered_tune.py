"""What `tune` asks of Helion, up to the measurements, and what the compiler makes of the configs that are bundled."""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import helion
import pytest
import torch
from helion.autotuner import benchmark_provider

sys.path.insert(0, str(Path(__file__).parent))
from sm90 import stand_ins
from test_lowered_grouped_gemm import SHARED_MEMORY, compiled
from test_lowered_uniform_gemm import compiled as compiled_uniform
from test_lowered_varied_gemm import compiled as compiled_varied

from moe_kernels import configs, tune
from moe_kernels.configs import store, uniform, varied
from moe_kernels.kernels import launch, tiles

KERNELS = {"basic": "jagged", "persistent": "jagged_persistent", "tails": "jagged_tails"}
BUNDLED = [
    (file, entry)
    for file in sorted(Path(configs.__file__).parent.glob("*.json"))
    for entry in store.read(file, json.loads(file.read_text())["gpu"])
]


class Provider(benchmark_provider.LocalBenchmarkProvider):
    """Measures nothing: makes 7 stages and no grouping the fastest."""

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


def fake_inputs(task: tune.Task) -> tune.Inputs:
    dtype = tune.DTYPES[task.dtype]
    shape = (task.G, task.N, task.K) if task.transposed else (task.G, task.K, task.N)
    inputs = tune.Inputs.__new__(tune.Inputs)
    inputs.A = torch.empty(task.M, task.K, dtype=dtype, device="cuda")
    B = torch.empty(shape, dtype=dtype, device="cuda")
    inputs.B = B.transpose(1, 2) if task.transposed else B
    inputs.offsets = [torch.empty(task.G + 1, dtype=torch.int32, device="cuda") for _ in tune.ROUTINGS]
    inputs.outs = [torch.empty(task.M, task.N, dtype=dtype, device="cuda") for _ in tune.ROUTINGS]
    return inputs


@pytest.mark.parametrize(("variant", "transposed"), [("basic", False), ("persistent", True)])
def test_helion_searches_legal_configs_alone(monkeypatch: pytest.MonkeyPatch, variant: str, transposed: bool) -> None:
    monkeypatch.setattr(benchmark_provider, "LocalBenchmarkProvider", Provider)
    for module in (launch, tiles):
        monkeypatch.setattr(module, "compile_kernel", lambda *_, **__: lambda *_: None)
    monkeypatch.setattr(Provider, "seen", [])
    rows = 256 if variant == "persistent" else 4
    task = tune.Task(16, 16 * rows, 1536, 2048, "bfloat16", transposed)
    with stand_ins():
        inputs = fake_inputs(task)
        with configs.noted() as made:
            tune._plan(None, inputs)
        problem = made[0][0]
        start = configs.rule(problem, variant)
        seeds = [start, *tune.neighbours(start, problem)]
        found = tune.search(problem, seeds, inputs, 6)
        searched, its_problem = start, problem
        if variant == "persistent":
            searched, its_problem = tune._storing(start, tma_out=False), replace(problem, tma_out=False)
        kernel, arg_sets = tune.kernel_calls(searched, inputs)
        spec = launch._variant(kernel, False, problem.tf32).bind(arg_sets[0]).config_spec
    assert len(Provider.seen) > 60
    for config in Provider.seen:
        assert configs.why_illegal(replace(searched, config=config), its_problem) is None
    assert len({str(config) for config in Provider.seen}) > 20
    assert (found.variant, found.block_m) == (variant, start.block_m)
    assert configs.why_illegal(found, problem) is None
    assert abs(found.config.config["num_stages"] - 7) < 3  # the seeds have 3 to 5
    for config in Provider.seen[:30]:
        full = copy.deepcopy(config)
        short = helion.Config(**tune.concise(config.config), **configs._indexing(variant, False, searched.access))
        spec.normalize(full)
        spec.normalize(short)
        assert full == short


@pytest.mark.parametrize("rows", [4, 64, 512])
def test_every_alternative_compiles(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    shape = (16, 16 * rows, 1536, 2048)
    problem = configs.Problem(
        rows, 16 * rows, 1536, 2048, 16, torch.bfloat16, False, True, True, True, False, False, False, False
    )
    choices = tune.alternatives(problem)
    assert len(choices) >= 2
    for choice in choices:
        with configs.pinned(choice):
            reports = compiled(monkeypatch, "auto", shape)
        monkeypatch.undo()
        report = reports[KERNELS[choice.variant]]
        assert report["code"].count("_desc.load(") == (3 if choice.variant == "tails" else 2)
        assert report["stack"] == 0


@pytest.mark.parametrize(
    ("file", "entry"),
    BUNDLED,
    ids=[f"{f.stem} {e.kernel} {e.bucket.rows} {e.bucket.N} {e.bucket.K}" for f, e in BUNDLED],
)
def test_bundled_configs(monkeypatch: pytest.MonkeyPatch, file: Path, entry: store.Entry) -> None:
    """Each compiles within an H200's shared memory, with the TMA loads that it names."""
    bucket = entry.bucket
    if bucket.op != "grouped_gemm":
        check_form(monkeypatch, file, entry)
        return
    dtype = torch.float32 if bucket.dtype == "tf32" else getattr(torch, bucket.dtype)
    problem = configs.Problem(
        bucket.rows,
        configs.floor_power_of_2(entry.M),
        bucket.N,
        bucket.K,
        bucket.G,
        dtype,
        bucket.dtype == "tf32",
        tma_A=True,
        tma_B=True,
        tma_out=True,
        wide_A=False,
        wide_B=False,
        wide_out=False,
        has_bias=False,
        transposed=bucket.transposed,
    )
    choice = configs._adapted(store.Found(entry, file, 0.0), problem)
    assert configs.why_illegal(choice, problem) is None
    shape = (bucket.G, entry.M, bucket.N, bucket.K)
    with configs.pinned(choice):
        reports = compiled(monkeypatch, "auto", shape, dtype=dtype, transposed=bucket.transposed)
    report = reports[KERNELS[choice.variant]]
    assert report["shared"] <= SHARED_MEMORY
    assert report["code"].count("_desc.load(") == choice.access.tma_A + choice.access.tma_B


def check_form(monkeypatch: pytest.MonkeyPatch, file: Path, entry: store.Entry) -> None:
    """A config for uniform or varied products is used for what it was tuned for, and compiles."""
    bucket = entry.bucket
    name, _, out_name = bucket.dtype.partition(" to ")
    dtype = torch.float32 if name == "tf32" else getattr(torch, name)
    if entry.kernel == "bmm":
        return
    rules: Any = uniform if bucket.op == "uniform" else varied
    used = []

    def choose(problem: Any) -> Any:
        used.append(rules.adapted(entry, problem, str(file)))
        return used[0]

    monkeypatch.setattr(rules, "choose", choose)
    columns = (False, bucket.transposed)
    if bucket.op == "uniform":
        shape = (bucket.G, bucket.rows, bucket.N, bucket.K)
        out_dtype = getattr(torch, out_name) if out_name else dtype
        report = compiled_uniform(monkeypatch, shape, dtype=dtype, columns=columns, out_dtype=out_dtype, rule=False)
        assert report["code"].count("_desc.load(") == sum(name in entry.tma for name in ("A", "B"))
    else:
        compiled_varied(monkeypatch, [(bucket.rows, bucket.N, bucket.K)] * bucket.G, dtype=dtype, columns=columns)
    assert used[0].entry is entry


def test_bundled_entries_of_the_other_forms_would_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one of each, whether or not there are any in the files."""
    values = dict(us=1.0, rule_us=1.0, versions=store.installed_versions(), date="", command="")
    made = store.Entry(
        "folded",
        store.Bucket("bfloat16 to float32", False, 512, 64, 512, 8, "uniform"),
        64,
        ["A", "B", "out"],
        {"block_sizes": [64, 64, 128], "num_warps": 4, "num_stages": 4},
        M=4096,
        **values,
    )
    check_form(monkeypatch, Path("file"), made)
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        check_form(monkeypatch, Path("file"), replace(made, config={**made.config, "num_stages": 8}))
    monkeypatch.undo()
    config = varied.stored(varied.make(4, 128, 64, 64, 4, 4, 1))
    bucket = store.Bucket("float16", True, 256, 256, 256, 4, "varied")
    check_form(monkeypatch, Path("file"), store.Entry("varied", bucket, 128, [], config, M=1024, **values))
