"""The loop of `tune` on a CPU: Helion's autotuner, the clock of the GPU and the kernels are replaced by stand-ins."""

from __future__ import annotations

import argparse
import errno
import math
import os
import re
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import helion
import pytest
import torch

from moe_kernels import kernels as exported
from moe_kernels import models, reference, rules
from moe_kernels.rules import grouped
from moe_kernels.runtime import cache, targets, torch_internals
from moe_kernels.tuning import entries, search

GPU = targets.Gpu("NVIDIA Test 9000", "cuda", 90, 132, 232448)
CPU = torch.device("cpu")
TASKS = [search.Task(4, 512, 96, 64, "float32", transposed) for transposed in (False, True)]


def problem_of(rows: int, M: int, N: int, K: int, G: int, dtype: torch.dtype, **changed: Any) -> grouped.Problem:
    flags = dict.fromkeys(("tf32", "has_bias"), False)
    flags |= dict.fromkeys(("tma_A", "tma_B", "tma_out"), True)
    return grouped.Problem(rows, M, N, K, G, dtype, **flags | changed)


class Bench:
    """Stand-ins for functions that need a GPU, and a record of their calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.searches: list[tuple[helion.Kernel[Any], Any, str]] = []
        self.speed: Callable[[rules.Choice], float] = lambda choice: 100.0
        self.find: Callable[[helion.Kernel[Any]], helion.Config] = lambda kernel: self.seeds(kernel)[0]
        self.wrong: Callable[[rules.Choice], bool] = lambda choice: False
        self.made: dict[Any, rules.Choice] = {}
        memory = types.SimpleNamespace(total_memory=2**37)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
        monkeypatch.setattr(search.Inputs, "problem", self.problem)
        monkeypatch.setattr(search.Inputs, "calls", lambda inputs, choice: self.calls(inputs, choice))
        monkeypatch.setattr(search, "interleaved", self.interleaved)
        monkeypatch.setattr(search, "kernel_calls", lambda choice, inputs: (exported.jagged, [()] * 3))

    @staticmethod
    def seeds(kernel: helion.Kernel[Any]) -> Any:
        return kernel.settings.autotune_seed_configs

    @staticmethod
    def problem(inputs: search.Inputs) -> grouped.Problem:
        A, B, _, _ = inputs.tensors[0]
        (M, K), (G, _, N) = A.shape, B.shape
        return problem_of(rules.floor_power_of_2(M // G), M, N, K, G, A.dtype)

    def calls(self, inputs: search.Inputs, choice: rules.Choice) -> list[Callable[[], torch.Tensor]]:
        def call(A: torch.Tensor, B: torch.Tensor, offsets: torch.Tensor, bias: None) -> torch.Tensor:
            out = reference.grouped_gemm(A, B, offsets)
            if self.wrong(choice):
                out[-1] += 1
            return out

        calls = [partial(call, *tensors) for tensors in inputs.tensors]
        self.made |= dict.fromkeys(calls, choice)
        return calls

    def interleaved(self, calls: dict[Any, Any], rounds: int, device: torch.device) -> dict[Any, float]:
        return {key: self.speed(self.made[call]) for key, call in calls.items()}

    def autotune_multi(self, kernel: helion.Kernel[Any], arg_sets: Any, *, cache_tag: str) -> helion.Config:
        self.searches.append((kernel, arg_sets, cache_tag))
        return self.find(kernel)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    made = Bench(monkeypatch)
    # The lambda, unlike a bound method, becomes a method of the kernel, and so passes it to `autotune_multi`.
    monkeypatch.setattr(helion.Kernel, "autotune_multi", lambda kernel, *a, **k: made.autotune_multi(kernel, *a, **k))
    return made


def run(file: Path, budget: float = 300.0, force: bool = False, todo: list[search.Task] = TASKS) -> int:
    return search.tune(todo, file, GPU.name, CPU, budget, force)


def stages(choice: rules.Choice) -> Any:
    return choice.config.config["num_stages"]


def found_with_9_stages(kernel: helion.Kernel[Any]) -> helion.Config:
    return helion.Config(**{**Bench.seeds(kernel)[0].config, "num_stages": 9})


def test_a_faster_config_is_written_and_found_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench.find = found_with_9_stages
    bench.speed = lambda choice: 80.0 if stages(choice) == 9 else 100.0
    file = entries.file_in(tmp_path, GPU.name)
    monkeypatch.setenv("MOE_KERNELS_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    rules.reload()
    problem = problem_of(128, 512, 96, 64, 4, torch.float32, gpu=GPU)
    with pytest.warns(RuntimeWarning, match="no config has been tuned"):
        assert grouped.choose(problem).source == "rule"
    assert run(file) == 0
    written = entries.read(file, GPU.name)
    assert [(e.us, e.rule_us, e.config["num_stages"]) for e in written] == [(80.0, 100.0, 9)] * 2
    assert {e.bucket.transposed for e in written} == {False, True}
    assert "--shapes 4,512,96,64 --dtype float32 --layout gkn" in written[0].command
    choice = grouped.choose(problem)  # the files are read again
    assert choice.source == str(file) and stages(choice) == 9
    rules.reload()


def test_how_helion_is_asked(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELION_BACKEND", "cute")
    monkeypatch.setenv("HELION_INTERPRET", "1")
    run(tmp_path / "f.json", todo=TASKS[:1])
    [(kernel, arg_sets, tag)] = bench.searches
    settings = kernel.settings
    assert len(arg_sets) == len(search.ROUTINGS) and tag
    assert settings.index_dtype == torch.int32 and settings.dot_precision == "ieee" and not settings.static_shapes
    assert settings.autotune_force_persistent and settings.backend == "triton"
    assert settings.ref_mode == helion.RefMode.OFF
    assert 20 <= settings.autotune_budget_seconds <= 225
    assert len(Bench.seeds(kernel)) > 5
    accepts = settings.autotune_config_filter
    assert accepts is not None and all(accepts(seed) is seed for seed in Bench.seeds(kernel))
    seed = Bench.seeds(kernel)[0].config
    assert accepts(helion.Config(**{**seed, "pid_type": "flat"})) is None
    assert accepts(helion.Config(**{**seed, "block_sizes": [256, 64]})) is None  # more than N = 96


def test_a_search_from_a_tuned_config_with_tma_stores(bench: Bench) -> None:
    """As of `tune --force`. Without its stores by TMA, which a search does not use, the config is still legal."""
    problem = problem_of(512, 32768, 1536, 2048, 64, torch.bfloat16, gpu=GPU)
    by_rule = grouped.rule(problem, "persistent", 128)
    assert by_rule.addressing.tma_out
    kernel, config = by_rule.variant, by_rule.config.config
    where = (grouped.bucket_of(problem), by_rule.block_m, by_rule.addressing.tma)
    entry = entries.Entry(kernel, *where, config, 1.0, 1.0, 1, entries.installed_versions(), "", "")
    search.search(problem, [replace(by_rule, entry=entry)], search.grouped_inputs(TASKS[0], CPU), 60)
    [(searched, *_)] = bench.searches
    accepts, [seed] = searched.settings.autotune_config_filter, Bench.seeds(searched)
    assert accepts is not None and accepts(seed) is seed


def test_blocks_in_a_search_fit_into_the_operands(bench: Bench, tmp_path: Path) -> None:
    """Helion's search accesses tensors smaller than a block by pointers, so rows of 8 elements are not searched."""
    problem = problem_of(2048, 16384, 96, 40, 8, torch.bfloat16)
    for variant, blocks in (("basic", [128, 64, 16, 32]), ("persistent", [64, 32])):
        assert search.within(grouped.rule(problem, variant, 128), problem).config.config["block_sizes"] == blocks
    run(tmp_path / "f.json", todo=[replace(TASKS[0], K=8)])
    assert not bench.searches
    assert entries.read(tmp_path / "f.json", GPU.name)


@pytest.mark.parametrize(("us", "replaced"), [(99.5, False), (98.5, True)])
def test_a_gain_of_less_than_a_percent_is_none(bench: Bench, tmp_path: Path, us: float, replaced: bool) -> None:
    bench.find = found_with_9_stages
    bench.speed = lambda choice: us if stages(choice) == 9 else 100.0
    run(tmp_path / "f.json", todo=TASKS[:1])
    [made] = entries.read(tmp_path / "f.json", GPU.name)
    assert (made.config["num_stages"] == 9) == replaced
    assert made.us == (us if replaced else 100.0)


def test_a_wrong_result_never_wins(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench.find = found_with_9_stages
    bench.speed = lambda choice: 10.0 if stages(choice) == 9 else 100.0
    bench.wrong = lambda choice: stages(choice) == 9
    run(tmp_path / "f.json", todo=TASKS[:1])
    assert entries.read(tmp_path / "f.json", GPU.name)[0].config["num_stages"] != 9
    assert "does not work" in capsys.readouterr().out


def test_what_is_there_is_skipped_unless_forced(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "f.json"
    run(file, todo=TASKS[:1])
    run(file)
    assert len(bench.searches) == 2
    assert capsys.readouterr().out.count("already tuned") == 1
    run(file, force=True)
    assert len(bench.searches) == 4 and len(entries.read(file, GPU.name)) == 2


def test_entries_of_other_versions_are_tuned_again(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    run(file, todo=TASKS[:1])
    [made] = entries.read(file, GPU.name)
    file.unlink()
    entries.write(file, GPU.name, [replace(made, versions=replace(made.versions, triton="2.1.0"))])
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
    assert len(entries.read(file, GPU.name)) == 1
    assert "Interrupted" in capsys.readouterr().err
    assert run(file) == 0
    assert len(entries.read(file, GPU.name)) == 2 and len(bench.searches) == 3


def test_a_failed_search_leaves_the_best_neighbour(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(kernel: helion.Kernel[Any]) -> helion.Config:
        raise helion.exc.NoConfigFound

    bench.find = fails
    bench.speed = lambda choice: 50.0 if choice.block_m == 64 else 100.0
    assert run(tmp_path / "f.json", todo=TASKS[:1]) == 0
    [made] = entries.read(tmp_path / "f.json", GPU.name)
    assert made.block_m == 64 and made.us == 50.0
    assert "NoConfigFound" in capsys.readouterr().err


def test_a_task_that_fails_does_not_stop_the_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.wrong = lambda choice: False
    one = search.tune_one
    monkeypatch.setattr(
        search, "tune_one", lambda task, *rest: one(task, *rest) if task.transposed else torch.empty(-1)
    )
    assert run(tmp_path / "f.json") == 1
    assert len(entries.read(tmp_path / "f.json", GPU.name)) == 1
    assert "failed: RuntimeError" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_to_is_found_before_the_search(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").touch()
    assert run(tmp_path / "taken" / "f.json") == 1
    assert not bench.searches and not bench.made
    assert capsys.readouterr().err.count("failed: FileExistsError") == len(TASKS)


def test_a_disk_that_fills_up_ends_no_other_search(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write = entries.write

    def full(file: Path, gpu: str, made: Sequence[entries.Entry]) -> None:
        if made and len(bench.searches) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, gpu, made)

    monkeypatch.setattr(entries, "write", full)
    assert run(tmp_path / "f.json") == 1
    assert len(entries.read(tmp_path / "f.json", GPU.name)) == len(TASKS) - 1
    assert "failed: OSError: [Errno 28]" in capsys.readouterr().err


def test_little_time_means_no_search_but_an_entry(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.speed = lambda choice: 60.0 if choice.config.config["l2_groupings"] == [1] else 100.0
    assert run(tmp_path / "f.json", budget=20, todo=TASKS[:1]) == 0
    [made] = entries.read(tmp_path / "f.json", GPU.name)
    assert made.config["l2_groupings"] == [1] and not bench.searches
    assert "too little time" in capsys.readouterr().out


def test_neighbours_are_timed_if_a_search_fails(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(kernel: Any) -> Any:
        raise RuntimeError("no config works")

    bench.find = fail
    bench.speed = lambda choice: 60.0 if choice.config.config["l2_groupings"] == [1] else 100.0
    assert run(tmp_path / "f.json", todo=TASKS[:1]) == 0
    [made] = entries.read(tmp_path / "f.json", GPU.name)
    assert made.config["l2_groupings"] == [1] and len(bench.searches) == 1
    assert "Helion's autotuner failed: RuntimeError: no config works" in capsys.readouterr().err


def test_spent_time_leaves_the_rest(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(search.time, "monotonic", lambda: now[0])

    def slow(kernel: helion.Kernel[Any]) -> helion.Config:
        now[0] += 1000
        return Bench.seeds(kernel)[0]

    bench.find = slow
    assert run(tmp_path / "f.json") == 0
    assert len(entries.read(tmp_path / "f.json", GPU.name)) == 1
    assert "1 problems are left" in capsys.readouterr().out


def test_weights_that_are_too_large_are_searched_with_fewer_groups(bench: Bench) -> None:
    task = search.Task(256, 65536, 4096, 7168, "bfloat16", True)
    assert search.fitting_part(task, CPU) == replace(task, G=64, M=16384)
    task = search.Task(8, 16384, 4096, 7168, "bfloat16", True)
    assert search.fitting_part(task, CPU) == task


@pytest.mark.parametrize(("memory", "groups"), [(620_000, 8), (610_000, 4), (425_000, 2), (1, 1)])
def test_what_does_not_fit_into_memory_is_searched_with_fewer_groups(
    memory: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Helion needs the operands five times; the operands of all groups stay beside those of fewer."""
    properties = types.SimpleNamespace(total_memory=memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    task = search.Task(8, 64, 64, 64, "bfloat16", True)
    assert search.fitting_part(task, CPU) == replace(task, G=groups, M=8 * groups)


@pytest.mark.parametrize("variant", ["basic", "persistent"])
def test_configs_searched_with_fewer_groups_are_timed_and_stored_for_all(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], variant: str
) -> None:
    task = search.Task(32, 2048, 96, 64, "float32", False)
    monkeypatch.setattr(search, "fitting_part", lambda task, _: replace(task, G=4, M=256))
    bench.find = found_with_9_stages
    bench.speed = lambda choice: (5.0 if stages(choice) == 9 else 10.0) if choice.variant == variant else 100.0
    timed = set()
    calls = bench.calls
    bench.calls = lambda inputs, choice: timed.add(inputs.tensors[0][1].size(0)) or calls(inputs, choice)  # type: ignore
    monkeypatch.setenv("MOE_KERNELS_CONFIG_DIR", str(tmp_path))
    file = entries.file_in(tmp_path, GPU.name)
    assert run(file, todo=[task]) == 0
    assert "searched with G=4 M=256" in capsys.readouterr().out and timed == {32}
    [(kernel, _, _)] = bench.searches
    if variant == "basic":
        assert {seed.config["block_sizes"][2] for seed in Bench.seeds(kernel)} == {rules.offsets_block(4)}
    [made] = entries.read(file, GPU.name)
    assert (made.bucket, made.M, made.kernel, made.config["num_stages"]) == (search.bucket(task), 2048, variant, 9)
    if variant == "basic":
        assert made.config["block_sizes"][2] == rules.offsets_block(32)
    rules.reload()
    problem = problem_of(64, 2048, 96, 64, 32, torch.float32, gpu=GPU)
    assert (grouped.bucket_of(problem), grouped.choose(problem).source) == (made.bucket, str(file))
    assert run(file, todo=[task]) == 0 and len(bench.searches) == 1


def test_configs_that_fewer_groups_cannot_use_are_not_searched(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With 2 rows TMA reads no A. The entry is then of a config for 16 rows all the same, timed beside their rule's."""
    task = search.Task(128, 16, 96, 64, "float16", True)
    monkeypatch.setattr(search, "fitting_part", lambda task, _: replace(task, G=16, M=2))
    bench.speed = lambda choice: 10.0 if choice.config.config["l2_groupings"] == [1] else 20.0
    monkeypatch.setenv("MOE_KERNELS_CONFIG_DIR", str(tmp_path))
    file = entries.file_in(tmp_path, GPU.name)
    assert run(file, todo=[task]) == 0 and not bench.searches
    assert "only neighbours of that config" in capsys.readouterr().out
    [made] = entries.read(file, GPU.name)
    rules.reload()
    problem = problem_of(0, 16, 96, 64, 128, torch.float16, gpu=GPU, transposed=True)
    by_rule = grouped.rule(problem)
    assert by_rule.addressing.tma_A and by_rule in bench.made.values()
    choice = grouped.choose(problem)
    assert (made.us, made.rule_us, choice.source) == (10.0, 20.0, str(file))
    assert choice.config.config["l2_groupings"] == [1] and choice.addressing.tma_A


def test_tuned_problems_take_none_of_the_time(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "f.json"
    run(file, todo=TASKS[:1])
    capsys.readouterr()
    run(file, todo=[*TASKS, replace(TASKS[0], K=128)], budget=600)
    told = capsys.readouterr().out
    assert "[2/3]" in told and "4 min 60 s" not in told
    assert re.search(r"\[2/3\] .*: 5 min 0 s of the remaining 10 min 0 s", told)


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    search.add_arguments(parser)
    return parser.parse_args(list(arguments))


def test_the_tasks_of_a_model() -> None:
    todo = search.tasks(options("--model", "qwen3-30b-a3b", "--tokens", "16", "8192"))
    assert [(t.G, t.M, t.N, t.K) for t in todo] == [
        (128, 128, 1536, 2048),
        (128, 128, 2048, 768),
        (128, 65536, 1536, 2048),
        (128, 65536, 2048, 768),
    ]
    assert all(t.transposed and t.dtype == "bfloat16" for t in todo)
    assert [t.M for t in search.tasks(options("--model", "olmoe"))] == [128, 128, 4096, 4096, 65536, 65536]


def test_the_tasks_of_shapes() -> None:
    todo = search.tasks(options("--shapes", "8,64,32,16", "4,4,4,4", "8,64,32,16", "--layout", "both"))
    assert todo == [
        search.Task(*shape, "bfloat16", transposed)
        for shape in ((8, 64, 32, 16), (4, 4, 4, 4))
        for transposed in (False, True)
    ]


def test_shapes_that_share_an_entry_are_one_task(capsys: pytest.CaptureFixture[str]) -> None:
    todo = search.tasks(options("--shapes", "128,8,96,64", "128,64,96,64", "128,127,96,64", "128,128,96,64"))
    assert [task.M for task in todo] == [8, 128]
    assert capsys.readouterr().out.count("has the same entry as M=8") == 2
    todo = search.tasks(options("--op", "uniform", "--shapes", "4,8,96,64", "4,9,96,64"))
    assert [task.M for task in todo] == [8, 9]


@pytest.mark.parametrize(
    ("text", "expected"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400)], ids=lambda value: str(value)
)
def test_durations(text: str, expected: float) -> None:
    assert search.seconds(text) == expected


@pytest.mark.parametrize(("text", "expected"), [("1", 1), (" 16 ", 16), ("2147483647", 2**31 - 1)])
def test_numbers(text: str, expected: int) -> None:
    assert models.positive(text) == expected


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--model", "qwen3-30b-a3b", "--shapes", "1,1,1,1"],
        ["--model", "no-such-model"],
        ["--shapes", "1,2,3"],
        ["--shapes", "1,2,3,0"],
        ["--shapes", "1,2,3,2147483648"],
        ["--model", "olmoe", "--budget", "soon"],
        ["--model", "olmoe", "--budget", "0m"],
        ["--model", "olmoe", "--budget", "9" * 400],
    ],
    ids=str,
)
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        options(*arguments)
    assert left.value.code == 2
    assert "error" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--model", "olmoe", "--op", "varied"], "--model has shapes for grouped_gemm, not for varied"),
        (["--shapes", "4,64,32,16", "--tokens", "16"], "--tokens is for --model"),
        (["--model", "olmoe", "--output", ""], "--output: expected a folder"),
    ],
    ids=["op", "tokens", "no name"],
)
def test_arguments_that_exclude_each_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], error: str
) -> None:
    monkeypatch.setattr(search, "_no_gpu", lambda: None)
    assert search.main(options(*arguments)) == 2
    assert capsys.readouterr().err.startswith(error)


@pytest.mark.parametrize("given", ["--output", "MOE_KERNELS_CONFIG_DIR", "neither"])
def test_the_folder_of_the_entries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str) -> None:
    """Entries of a folder that is searched earlier would hide those of a later one."""
    monkeypatch.setattr(search, "_no_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(targets, "of_device", lambda *_: GPU)
    files: list[Path] = []
    monkeypatch.setattr(search, "tune", lambda todo, file, *_: files.append(file) or 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    expected = tmp_path / "cache" / "moe_kernels" / "configs"
    if given == "neither":
        monkeypatch.delenv("MOE_KERNELS_CONFIG_DIR", raising=False)
    else:
        expected = tmp_path / "named"
        monkeypatch.setenv("MOE_KERNELS_CONFIG_DIR", str(expected))
    arguments = ["--model", "olmoe"]
    if given == "--output":
        expected = tmp_path / "output"
        arguments += ["--output", str(expected)]
    assert search.main(options(*arguments)) == 0
    assert files == [entries.file_in(expected, GPU.name)]


@pytest.mark.parametrize(("op", "folder"), [("uniform", True), ("varied", True), ("grouped_gemm", False)])
def test_shapes_of_every_product_are_tuned_if_there_is_a_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, op: str, folder: bool
) -> None:
    monkeypatch.setattr(search, "_no_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(targets, "of_device", lambda *_: GPU)
    monkeypatch.setattr(entries, "folders", lambda: [tmp_path] if folder else [])
    tuned: list[search.Task] = []
    monkeypatch.setattr(search, "tune", lambda todo, *_: tuned.extend(todo) or 0)
    code = search.main(options("--shapes", "4,64,32,16", "--op", op))
    error = capsys.readouterr().err
    if folder:
        assert (code, error) == (0, "") and [task.op for task in tuned] == [op]
    else:
        assert (code, error) == (2, "The user has no home folder: give --output.\n") and not tuned


def test_folders_in_the_users_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where no shell expands `~`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MOE_KERNELS_CONFIG_DIR", "~/named")
    assert entries.folders()[0] == tmp_path / "named"
    assert options("--model", "olmoe", "--output", "~/output").output == str(tmp_path / "output")


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
    assert search.concise(values) == {"block_sizes": [0, 0], "range_flattens": [True, None], "num_stages": 1}


@pytest.mark.parametrize("rows", [1, 32, 128, 1024])
def test_alternatives_and_neighbours_are_legal_and_distinct(rows: int) -> None:
    problem = problem_of(rows, 64 * rows, 1536, 2048, 64, torch.bfloat16)
    start = search.alternatives(problem)
    assert grouped.rule(problem) in start
    for choice in [choice for choice in start if choice.variant in ("basic", "persistent")]:  # others have one config
        near = search.neighbours(choice, problem)
        assert 5 <= len(near) <= 12
        assert all(grouped.why_illegal(made, problem) is None and made.block_m == choice.block_m for made in near)
        assert len({choice, *near}) == len(near) + 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_check_close_sees_one_wrong_element_and_changes_nothing(dtype: torch.dtype) -> None:
    right = torch.randn(20, 30).to(dtype)
    before = right.clone()
    search.check_close(right * (1 + torch.finfo(dtype).eps), right)
    search.check_close((right, 1), (right + 1, 1))  # arguments, which are not compared
    for wrong in (0.5, float("nan")):
        other = right.clone()
        other[7, 9] += wrong
        with pytest.raises(AssertionError):
            search.check_close(other, right)
    assert torch.equal(right, before)


def workload(choices: Sequence[int], calls: Callable[[int], list[Callable[[], torch.Tensor]]]) -> search.Workload:
    """Return a workload whose choices are numbers."""
    return search.Workload(
        choices=choices,
        calls=calls,
        near=lambda best, until: [],
        stored=lambda choice: {"kernel": "kernel", "block_m": 1, "tma": [], "config": {"choice": choice}},
    )


def test_what_a_config_leaves_out_shows() -> None:
    """Reused memory may hold the right result, so it is filled with NaN for the check, but not when calls are timed."""
    memory = torch.arange(4.0)
    filled = []

    def calls(choice: int) -> list[Callable[[], torch.Tensor]]:
        allocate = torch_internals.allocator(CPU)

        def call() -> torch.Tensor:
            out = allocate((4,), (1,), torch.float32)
            filled.append(bool(out.isnan().all()))
            out[: 4 - choice] = memory[: 4 - choice]
            return out

        return [call]

    trials = search.Trials(workload([], calls), CPU, math.inf)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(torch_internals, "allocator", lambda device: lambda *_: memory.clone())
        assert trials.add([0, 1, 0], at_least=3) == [0]
    assert filled == [True, False, True]
    assert trials.tried == {0, 1} and list(trials.calls) == [0]


def test_a_choice_of_another_result_than_the_first_that_works_is_out(capsys: pytest.CaptureFixture[str]) -> None:
    def calls(choice: int) -> list[Callable[[], torch.Tensor]]:
        if choice == 7:
            raise RuntimeError("out of resource")
        return [lambda: torch.full((2,), float(choice % 5))]

    trials = search.Trials(workload([], calls), CPU, math.inf)
    assert trials.add([7, 1, 2, 6, 1], at_least=1) == [1, 6]
    assert trials.add([6, 11], at_least=1) == [11]  # choices that were tried are not tried again
    assert capsys.readouterr().out.count("does not work") == 2


def test_spent_time_leaves_out_choices(capsys: pytest.CaptureFixture[str]) -> None:
    trials = search.Trials(workload([], lambda choice: [lambda: torch.zeros(1)]), CPU, 0.0)
    assert trials.add(range(5), at_least=3) == [0, 1, 2]
    assert trials.add([9, 10], at_least=1) == [9]
    assert capsys.readouterr().out.count("the time is over") == 2


def test_routings_count_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "interleaved", lambda calls, *_: {(i, j): 2.0 * (i + 1) * 4**j for i, j in calls})
    trials = search.Trials(workload([], lambda choice: [lambda: torch.zeros(1)] * 2), CPU, math.inf)
    trials.add([0, 1], at_least=2)
    assert trials.times(1) == pytest.approx({0: 4.0, 1: 8.0})
    assert trials.times(1, [1, 1, 5]) == pytest.approx({1: 8.0})


def test_nothing_that_works_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def calls(choice: int) -> list[Callable[[], torch.Tensor]]:
        raise RuntimeError("out of resource")

    monkeypatch.setitem(search.WORKLOADS, "uniform", lambda task, device: workload([0, 1], calls))
    with pytest.raises(RuntimeError, match="no config works, not even the rule's"):
        search.tune_one(search.Task(1, 1, 1, 1, "bfloat16", False, "uniform"), CPU, 1.0)


def test_a_config_that_works_is_kept_where_the_rules_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def calls(choice: int) -> list[Callable[[], torch.Tensor]]:
        if choice == 0:
            raise RuntimeError("out of resource")
        return [lambda: torch.zeros(1)]

    monkeypatch.setitem(search.WORKLOADS, "uniform", lambda task, device: workload([0, 1, 2], calls))
    monkeypatch.setattr(search, "interleaved", lambda calls, *_: {(i, j): 10.0 - i for i, j in calls})
    made = search.tune_one(search.Task(1, 1, 1, 1, "bfloat16", False, "uniform"), CPU, 1.0)
    assert (made.config, made.us, made.rule_us) == ({"choice": 2}, 8.0, 8.0)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("G", "M"), [(1, 64), (4, 2), (4, 63), (4, 64), (4, 4096)])
def test_the_bucket_of_a_task_is_that_of_its_problem(
    monkeypatch: pytest.MonkeyPatch, G: int, M: int, transposed: bool
) -> None:
    """This includes one group, which `grouped_gemm` computes as a dense product."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(total_memory=2**37))
    monkeypatch.setattr(targets, "of_tensor", lambda tensor: GPU)
    monkeypatch.setattr(entries, "near", lambda *_: [])
    task = search.Task(G, M, 96, 64, "bfloat16", transposed)
    problem = search.grouped_inputs(task, CPU).problem()
    assert (problem.gpu, problem.tma_A, problem.transposed) == (GPU, True, transposed)
    assert grouped.bucket_of(problem) == search.bucket(task)
    assert search.grouped_workload(task, CPU).choices[0] == grouped.rule(problem)


def test_weights_with_one_row_per_group_are_never_transposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory is the same in both layouts, and calls look for the other one."""
    monkeypatch.setattr(targets, "of_tensor", lambda tensor: GPU)
    monkeypatch.setattr(entries, "near", lambda *_: [])
    for transposed in (False, True):
        task = search.Task(4, 64, 96, 1, "float32", transposed)
        assert grouped.bucket_of(search.grouped_inputs(task, CPU).problem()) == search.bucket(task)


@pytest.mark.parametrize(("transposed", "N", "K"), [(False, 7, 24), (False, 8, 20), (True, 8, 20)])
def test_varied_products_that_no_entry_is_used_for_are_not_tuned(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    transposed: bool,
    N: int,
    K: int,
) -> None:
    monkeypatch.setattr(targets, "of_tensor", lambda tensor: GPU)
    monkeypatch.setattr(entries, "near", lambda *_: [])
    monkeypatch.setattr(cache, "find", lambda *_: None)
    task = search.Task(2, 32, N, K, "bfloat16", transposed, "varied")
    assert run(entries.file_in(tmp_path, GPU.name), todo=[task]) == 1
    assert "failed: ValueError: varied products use entries only if K" in capsys.readouterr().err
    assert not entries.read(entries.file_in(tmp_path, GPU.name), GPU.name)
    aligned = search.varied_workload(replace(task, N=8 if transposed else 16, K=24), CPU)
    assert aligned.choices[0].source == "rule"
