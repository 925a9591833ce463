"""The loop of `tune` on a CPU: Helion's autotuner, the clock of the GPU and the kernels are replaced by stand-ins."""

from __future__ import annotations

import argparse
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import helion
import pytest
import torch

from moe_kernels import configs, reference, tune
from moe_kernels import kernels as exported
from moe_kernels.configs import store

GPU = "NVIDIA Test 9000"
CPU = torch.device("cpu")
TASKS = [tune.Task(4, 512, 96, 64, "float32", transposed) for transposed in (False, True)]


class Bench:
    """Stand-ins for what needs a GPU, and a record of what they were asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.searches: list[tuple[helion.Kernel[Any], Any, str]] = []
        self.speed: Callable[[configs.Choice], float] = lambda choice: 100.0
        self.find: Callable[[helion.Kernel[Any]], helion.Config] = lambda kernel: self.seeds(kernel)[0]
        self.wrong: Callable[[configs.Choice], bool] = lambda choice: False
        self.plans: dict[Any, configs.Choice] = {}
        memory = types.SimpleNamespace(total_memory=2**37)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
        monkeypatch.setattr(tune, "_plan", self.plan)
        monkeypatch.setattr(tune, "_bound", lambda plan, tensors: plan)
        monkeypatch.setattr(tune, "interleaved", self.interleaved)
        monkeypatch.setattr(tune, "kernel_calls", lambda choice, inputs: (exported.jagged, [()] * 3))
        monkeypatch.setattr(helion.Kernel, "autotune_multi", self.autotune_multi)

    @staticmethod
    def seeds(kernel: helion.Kernel[Any]) -> Any:
        return kernel.settings.autotune_seed_configs

    def plan(self, choice: configs.Choice | None, inputs: tune.Inputs) -> Callable[..., None]:
        M, N = inputs.outs[0].shape
        rows = configs.floor_power_of_2(M // inputs.B.size(0))
        made = configs.Problem(
            rows,
            M,
            N,
            inputs.A.size(1),
            inputs.B.size(0),
            inputs.A.dtype,
            False,
            True,
            True,
            True,
            False,
            False,
            False,
            False,
        )
        chosen = choice or configs.choose(made)

        def call(A: Any, B: Any, offsets: Any, bias: None, out: torch.Tensor) -> None:
            out.copy_(reference.grouped_gemm(A, B, offsets))
            if self.wrong(chosen):
                out[-1] += 1

        self.plans[call] = chosen
        return call

    def interleaved(self, calls: dict[Any, Any], rounds: int, device: torch.device) -> dict[Any, float]:
        return {key: self.speed(self.plans[call]) for key, call in calls.items()}

    def autotune_multi(self, kernel: helion.Kernel[Any], arg_sets: Any, *, cache_tag: str) -> helion.Config:
        self.searches.append((kernel, arg_sets, cache_tag))
        return self.find(kernel)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    made = Bench(monkeypatch)
    # A class keeps a function as a method, and `autotune_multi` has to get the kernel.
    monkeypatch.setattr(helion.Kernel, "autotune_multi", lambda kernel, *a, **k: made.autotune_multi(kernel, *a, **k))
    return made


def run(file: Path, budget: float = 300.0, force: bool = False, todo: list[tune.Task] = TASKS) -> int:
    return tune.tune(todo, file, GPU, CPU, budget, force)


def stages(choice: configs.Choice) -> Any:
    return choice.config.config["num_stages"]


def found_with_9_stages(kernel: helion.Kernel[Any]) -> helion.Config:
    return helion.Config(**{**Bench.seeds(kernel)[0].config, "num_stages": 9})


def test_a_faster_config_is_written_and_found_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench.find = found_with_9_stages
    bench.speed = lambda choice: 80.0 if stages(choice) == 9 else 100.0
    file = store.file_in(tmp_path, GPU)
    assert run(file) == 0
    entries = store.read(file, GPU)
    assert [(e.us, e.rule_us, e.config["num_stages"]) for e in entries] == [(80.0, 100.0, 9)] * 2
    assert {e.bucket.transposed for e in entries} == {False, True}
    assert "--shapes 4,512,96,64 --dtype float32 --layout gkn" in entries[0].command

    monkeypatch.setenv("MOE_KERNELS_CONFIG_DIR", str(tmp_path))
    monkeypatch.setattr(store, "gpu_of", lambda device: store.Gpu(GPU, (9, 0)))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    configs.reload()
    problem = configs.Problem(128, 512, 96, 64, 4, torch.float32, False, True, True, True, False, False, False, False)
    choice = configs.choose(replace(problem, device=torch.device("cuda", 0)))
    assert choice.source == str(file) and stages(choice) == 9
    configs.reload()


def test_how_helion_is_asked(bench: Bench, tmp_path: Path) -> None:
    run(tmp_path / "f.json", todo=TASKS[:1])
    [(kernel, arg_sets, tag)] = bench.searches
    settings = kernel.settings
    assert len(arg_sets) == len(tune.ROUTINGS) and tag
    assert settings.index_dtype == torch.int32 and settings.dot_precision == "ieee" and not settings.static_shapes
    assert settings.autotune_force_persistent
    assert 20 <= settings.autotune_budget_seconds <= 225
    assert len(Bench.seeds(kernel)) > 5
    accepts = settings.autotune_config_filter
    assert accepts is not None and all(accepts(seed) is seed for seed in Bench.seeds(kernel))
    seed = Bench.seeds(kernel)[0].config
    assert accepts(helion.Config(**{**seed, "pid_type": "flat"})) is None
    assert accepts(helion.Config(**{**seed, "block_sizes": [256, 64]})) is None  # more than N = 96


@pytest.mark.parametrize(("us", "replaced"), [(99.5, False), (98.5, True)])
def test_a_gain_of_less_than_a_percent_is_none(bench: Bench, tmp_path: Path, us: float, replaced: bool) -> None:
    bench.find = found_with_9_stages
    bench.speed = lambda choice: us if stages(choice) == 9 else 100.0
    run(tmp_path / "f.json", todo=TASKS[:1])
    [made] = store.read(tmp_path / "f.json", GPU)
    assert (made.config["num_stages"] == 9) == replaced
    assert made.us == (us if replaced else 100.0)


def test_a_wrong_result_never_wins(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench.find = found_with_9_stages
    bench.speed = lambda choice: 10.0 if stages(choice) == 9 else 100.0
    bench.wrong = lambda choice: stages(choice) == 9
    run(tmp_path / "f.json", todo=TASKS[:1])
    assert store.read(tmp_path / "f.json", GPU)[0].config["num_stages"] != 9
    assert "does not work" in capsys.readouterr().out


def test_what_is_there_is_skipped_unless_forced(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "f.json"
    run(file, todo=TASKS[:1])
    run(file)
    assert len(bench.searches) == 2
    assert capsys.readouterr().out.count("there already") == 1
    run(file, force=True)
    assert len(bench.searches) == 4 and len(store.read(file, GPU)) == 2


def test_entries_of_other_versions_are_tuned_again(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    run(file, todo=TASKS[:1])
    [made] = store.read(file, GPU)
    file.unlink()
    store.write(file, GPU, [replace(made, versions=replace(made.versions, triton="2.1.0"))])
    run(file, todo=TASKS[:1])
    assert len(bench.searches) == 2


def test_ctrl_c_keeps_what_is_done(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "f.json"

    def interrupted(kernel: helion.Kernel[Any]) -> helion.Config:
        if len(bench.searches) == 2:
            raise KeyboardInterrupt
        return Bench.seeds(kernel)[0]

    bench.find = interrupted
    assert run(file) == 130
    assert len(store.read(file, GPU)) == 1
    assert "Interrupted" in capsys.readouterr().err
    assert run(file) == 0
    assert len(store.read(file, GPU)) == 2 and len(bench.searches) == 3


def test_a_failed_search_leaves_the_best_neighbour(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(kernel: helion.Kernel[Any]) -> helion.Config:
        raise helion.exc.NoConfigFound

    bench.find = fails
    bench.speed = lambda choice: 50.0 if choice.block_m == 64 else 100.0
    assert run(tmp_path / "f.json", todo=TASKS[:1]) == 0
    [made] = store.read(tmp_path / "f.json", GPU)
    assert made.block_m == 64 and made.us == 50.0
    assert "NoConfigFound" in capsys.readouterr().err


def test_a_task_that_fails_does_not_stop_the_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.wrong = lambda choice: False
    one = tune.tune_one
    monkeypatch.setattr(tune, "tune_one", lambda task, *rest: one(task, *rest) if task.transposed else torch.empty(-1))
    assert run(tmp_path / "f.json") == 1
    assert len(store.read(tmp_path / "f.json", GPU)) == 1
    assert "failed: RuntimeError" in capsys.readouterr().err


def test_little_time_means_no_search_but_an_entry(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.speed = lambda choice: 60.0 if choice.config.config["l2_groupings"] == [1] else 100.0
    assert run(tmp_path / "f.json", budget=20, todo=TASKS[:1]) == 0
    [made] = store.read(tmp_path / "f.json", GPU)
    assert made.config["l2_groupings"] == [1] and not bench.searches
    assert "too little time" in capsys.readouterr().out


def test_spent_time_leaves_the_rest(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(tune.time, "monotonic", lambda: now[0])

    def slow(kernel: helion.Kernel[Any]) -> helion.Config:
        now[0] += 1000
        return Bench.seeds(kernel)[0]

    bench.find = slow
    assert run(tmp_path / "f.json") == 0
    assert len(store.read(tmp_path / "f.json", GPU)) == 1
    assert "1 problems are left" in capsys.readouterr().out


def test_weights_that_are_too_large_are_tuned_with_fewer_groups(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tune._fitting(tune.Task(256, 65536, 4096, 7168, "bfloat16", True), CPU) == (64, 16384)
    assert tune._fitting(tune.Task(8, 16384, 4096, 7168, "bfloat16", True), CPU) == (8, 16384)


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    tune.add_arguments(parser)
    return parser.parse_args(list(arguments))


def test_the_tasks_of_a_model() -> None:
    todo = tune.tasks(options("--model", "qwen3-30b-a3b", "--tokens", "16", "8192"))
    assert [(t.G, t.M, t.N, t.K) for t in todo] == [
        (128, 128, 1536, 2048),
        (128, 128, 2048, 768),
        (128, 65536, 1536, 2048),
        (128, 65536, 2048, 768),
    ]
    assert all(t.transposed and t.dtype == "bfloat16" for t in todo)


def test_the_tasks_of_shapes() -> None:
    todo = tune.tasks(options("--shapes", "8,64,32,16", "4,4,4,4", "8,64,32,16", "--layout", "both"))
    assert todo == [
        tune.Task(*shape, "bfloat16", transposed)
        for shape in ((8, 64, 32, 16), (4, 4, 4, 4))
        for transposed in (False, True)
    ]


@pytest.mark.parametrize(
    ("text", "expected"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400)], ids=lambda value: str(value)
)
def test_durations(text: str, expected: float) -> None:
    assert tune.seconds(text) == expected


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--model", "qwen3-30b-a3b", "--shapes", "1,1,1,1"],
        ["--model", "no-such-model"],
        ["--shapes", "1,2,3"],
        ["--shapes", "1,2,3,0"],
        ["--model", "olmoe", "--budget", "soon"],
        ["--model", "olmoe", "--budget", "0m"],
    ],
    ids=str,
)
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        options(*arguments)
    assert left.value.code == 2
    assert "error" in capsys.readouterr().err


def test_concise_leaves_out_defaults_alone() -> None:
    values = {
        "block_sizes": [0, 0],
        "range_flattens": [True, None],
        "range_unroll_factors": [0, 0],
        "loop_orders": [[0, 1]],
        "load_eviction_policies": ["", ""],
        "maxnreg": None,
        "atomic_indexing": [],
        "num_sm_multiplier": 1,
        "num_stages": 1,
    }
    assert tune.concise(values) == {"block_sizes": [0, 0], "range_flattens": [True, None], "num_stages": 1}


@pytest.mark.parametrize("rows", [1, 32, 128, 1024])
def test_alternatives_and_neighbours_are_legal_and_distinct(rows: int) -> None:
    problem = configs.Problem(
        rows, 64 * rows, 1536, 2048, 64, torch.bfloat16, False, True, True, True, False, False, False, False
    )
    start = tune.alternatives(problem)
    assert configs.rule(problem) in start
    for choice in [choice for choice in start if choice.variant != "tails"]:  # which has one config
        near = tune.neighbours(choice, problem)
        assert 5 <= len(near) <= 12
        assert all(configs.why_illegal(made, problem) is None and made.block_m == choice.block_m for made in near)
        assert len(list(tune.unique([choice, *near]))) == len(near) + 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_check_close_sees_one_wrong_element_and_changes_nothing(dtype: torch.dtype) -> None:
    right = torch.randn(20, 30).to(dtype)
    before = right.clone()
    tune.check_close(right * (1 + torch.finfo(dtype).eps), right)
    tune.check_close((right, 1), (right + 1, 1))  # the arguments, which are not compared
    for wrong in (0.5, float("nan")):
        other = right.clone()
        other[7, 9] += wrong
        with pytest.raises(AssertionError):
            tune.check_close(other, right)
    assert torch.equal(right, before)
