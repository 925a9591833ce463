"""`python -m benchmarks.wide` on a CPU: its cases, its timings, and how it resumes a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks import inputs as given
from benchmarks import run, wide
from benchmarks.operators import OPERATORS
from benchmarks.suites import Case
from moe_kernels.models import MODELS
from moe_kernels.runtime import targets
from moe_kernels.timing import Call
from moe_kernels.tuning import entries
from tritonbench_ops.baselines import Inputs, grouped_mm

CPU = torch.device("cpu")
CASE = Case("model up", 4, 40, 48, 32, "zipf", "gnk")
LABELS = {key: provider.label for key, provider in OPERATORS["grouped_gemm"].providers.items()}


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(run, "ceilings", lambda device: {"tflops": 1.0, "gbps": 1.0})


def replaced(monkeypatch: pytest.MonkeyPatch, key: str, make: Callable[[Inputs], Call]) -> None:
    monkeypatch.setitem(wide._PROVIDERS, key, replace(wide._PROVIDERS[key], make=make, package=None))


def measured(case: Case = CASE, *keys: str) -> run.Record:
    return wide.measure(case, given.weights(case, CPU, per_group=True), keys or ("torch", "ours"), CPU)


def test_every_model_has_cases_before_the_rows_grow() -> None:
    cases = wide.cases_of(MODELS, wide.ROWS)
    assert len(cases) == 2 * len(MODELS) * 5 * 5 == len(set(map(wide.key_of, cases)))
    first = cases[: len(cases) // 5]
    assert {case.M for case in first} == {64} and {case.name.split()[0] for case in first} == set(MODELS)
    assert [wide.key_of(case) for case in cases if case.name == "qwen3-30b-a3b down" and case.M == 1024] == [
        (128, 1024, 2048, 768, sizes) for sizes in ("uniform", "softmax", "zipf", "nine-tenths", "half-empty")
    ]
    assert all(case.layout == "gnk" for case in cases)


def test_models_of_one_shape_are_one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "twin", MODELS["olmoe"])
    assert {case.name for case in wide.cases_of(["olmoe", "twin"], [64])} == {"olmoe up", "olmoe down"}


def test_the_estimate_counts_what_is_read() -> None:
    """If one group has all rows, one weight is read; with many groups, all weights are."""
    base = Case("a", 256, 4096, 4096, 7168, "one", "gnk")
    one, all_ = (wide.gpu_seconds([replace(base, sizes=sizes)], 3) for sizes in ("one", "uniform"))
    assert one == pytest.approx(24 * (2 * 4096 * 4096 * 7168 / 650e12 + 60e-6))
    bytes_ = 2 * (4096 * 7168 + 4096 * 4096 + 256 * 4096 * 7168)
    assert all_ == pytest.approx(24 * (bytes_ / 4.2e12 + 60e-6))


def test_a_case() -> None:
    record = measured()
    assert wide.key_of(record) == wide.key_of(CASE) and record["case"] == "model up"
    assert record["us"].keys() == {LABELS["torch"], LABELS["ours"]} and min(record["us"].values()) > 0
    assert record["errors"] == {} and record["rounds"] in (5, 20)


def test_a_case_that_is_behind_is_timed_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    for provider, us, rounds in (("quack", 96.0, [5]), ("quack", 94.0, [5, 20]), ("torch", 98.0, [5, 20])):
        asked: list[int] = []

        def interleaved(
            calls: dict[str, Call],
            n: int,
            *_: Any,
            asked: list[int] = asked,
            provider: str = provider,
            us: float = us,
            **__: Any,
        ) -> dict[str, float]:
            asked.append(n)
            return {LABELS["torch"]: 99.5, LABELS["ours"]: 100.0, LABELS[provider]: us}

        monkeypatch.setattr("benchmarks.timing.interleaved", interleaved)
        assert measured()["rounds"] == rounds[-1] and asked == rounds


def test_a_wrong_provider_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def zero_row(inputs: Inputs) -> Call:
        return lambda: grouped_mm(inputs)().index_fill(0, torch.tensor([7]), 0)

    def fails(inputs: Inputs) -> Call:
        raise RuntimeError("not supported\nmore")

    replaced(monkeypatch, "ours", zero_row)
    replaced(monkeypatch, "quack", fails)
    record = measured(CASE, "torch", "ours", "quack")
    assert record["us"].keys() == {LABELS["torch"]}
    assert record["errors"] == {
        LABELS["ours"]: "AssertionError: wrong: relative error 1.0e+00 of a row",
        LABELS["quack"]: "RuntimeError: not supported",
    }


def test_the_largest_error_is_of_a_row() -> None:
    expected = torch.randn(5000, 16, generator=torch.Generator().manual_seed(0))
    assert wide.largest_error(expected, expected) == 0
    for value, error in ((0.0, 1.0), (float("nan"), float("inf"))):
        out = expected.clone()
        out[4999] = value
        assert wide.largest_error(out, expected) == pytest.approx(error)
    assert wide.largest_error(expected[1:], expected) == float("inf")


def test_tuned_entries_are_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = targets.KNOWN["h200"]
    bundled = json.loads(entries.file_in(entries.BUNDLED, gpu.name).read_text())["entries"][0]
    versions = entries.Versions(*(bundled[package] for package in ("torch", "triton", "helion")))
    monkeypatch.setattr(entries, "installed_versions", lambda: versions)
    entries.reload()
    tuned = entries.digest(gpu)
    with wide.untuned():
        assert entries.files_for(gpu) == [] == entries.load(gpu) and entries.digest(gpu) != tuned
    assert entries.load(gpu) and entries.digest(gpu) == tuned
    monkeypatch.undo()
    entries.reload()


def command(folder: Path, *more: str) -> list[str]:
    return [str(folder / "wide.jsonl"), "--json", str(folder / "wide.json"), "--tiny", *more]


def test_a_run_takes_up_where_another_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, measure = tmp_path / "wide.jsonl", wide.measure
    seen: list[Any] = []

    def stops(case: Case, *arguments: Any) -> run.Record:
        if len(seen) == 3:
            seen.append(None)
            raise KeyboardInterrupt
        seen.append(wide.key_of(case))
        return measure(case, *arguments)

    monkeypatch.setattr(wide, "measure", stops)
    assert wide.main(command(tmp_path)) == 130
    assert len(run.Results.read(tmp_path / "wide.json").records) == 3
    assert "quack: left out, quack is not installed" in capsys.readouterr().out
    with file.open("a") as lines:
        lines.write('{"suite": "wide", "case": "cut o')
    assert wide.main(command(tmp_path)) == 0
    assert "7 cases, 3 done before" in capsys.readouterr().out
    results = run.Results.read(tmp_path / "wide.json")
    assert [wide.key_of(record) for record in results.records] == list(map(wide.key_of, wide._TINY))
    assert results.meta["runs"] == 2 and len([key for key in seen if key]) == 10
    metas, records = wide.read_lines(file)
    assert len(metas) == 2 and records == results.records
    assert all(json.loads(line) for line in file.read_text().splitlines())
    assert wide.main(command(tmp_path)) == 0 and len(seen) == 11
    text = capsys.readouterr().out
    assert "| half-empty | 2 |" in text and "Times are of eager calls" in text


def test_an_interrupted_run_replaces_no_results_of_more_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wide.main(command(tmp_path)) == 0
    before = (tmp_path / "wide.json").read_text()
    (tmp_path / "wide.jsonl").unlink()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(wide, "measure", interrupted)
    assert wide.main(command(tmp_path)) == 130
    assert (tmp_path / "wide.json").read_text() == before


def test_runs_of_other_days_and_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dates are those of all runs that measured a case, and all are of one driver and the same other libraries."""
    meta = run.meta

    def of(date: str, **changes: Any) -> None:
        monkeypatch.setattr(run, "meta", lambda *given: meta(*given) | {"date": date} | changes)

    of("2026-01-01", peers={"quack": "1", "deep_gemm": None})
    assert wide.main([*command(tmp_path), "--budget", "1000", "--providers", "ours"]) == 0
    of("2026-02-02", peers={"quack": "1", "deep_gemm": "3"})
    assert wide.main([*command(tmp_path), "--providers", "ours"]) == 0
    assert run.Results.read(tmp_path / "wide.json").meta["date"] == "2026-01-01"
    assert wide.main([*command(tmp_path), "--providers", "ours", "torch"]) == 0
    assert run.Results.read(tmp_path / "wide.json").meta["date"] == "2026-01-01 to 2026-02-02"
    of("2026-02-02", peers={"quack": "2", "deep_gemm": None})
    assert wide.main(command(tmp_path)) == 2
    assert "wide.jsonl is of quack 1: name another file" in capsys.readouterr().err
    of("2026-02-02", driver="other", peers={})
    assert wide.main(command(tmp_path)) == 2
    assert "wide.jsonl is of driver " in capsys.readouterr().err


def test_compiling_alone_needs_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        wide.main(command(tmp_path, "--compile-only"))
    assert "--compile-only compiles in the processes of --jobs" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", [b"[]\n", b"\xff\xfe\n", b'{"a": 1}\n', b'{"meta": 5}\n', b'{"meta": {}, "records": []}\n']
)
def test_a_file_of_something_else_is_refused(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wide.jsonl").write_bytes(content)
    assert wide.main(command(tmp_path)) == 2
    assert "wide.jsonl was not written by this command: name another file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        wide.main([*command(tmp_path), "--json", str(tmp_path / "wide.jsonl")])
    assert "--json would replace FILE" in capsys.readouterr().err


def test_cases_of_fewer_providers_are_measured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert wide.main([*command(tmp_path), "--providers", "ours"]) == 0
    assert wide.main([*command(tmp_path), "--providers", "torch", "ours"]) == 0
    assert "10 cases, 0 done before" in capsys.readouterr().out
    records = run.Results.read(tmp_path / "wide.json").records
    assert [wide.key_of(record) for record in records] == list(map(wide.key_of, wide._TINY))
    assert all(record["us"].keys() == {LABELS["torch"], LABELS["ours"]} for record in records)
    assert wide.main([*command(tmp_path), "--providers", "torch"]) == 0
    assert "0 cases, 10 done before" in capsys.readouterr().out
    assert run.Results.read(tmp_path / "wide.json").records == records


def test_a_spent_budget_ends_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(wide.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(
        wide,
        "measure",
        lambda case, *_: {"suite": "wide", "case": case.name, "rounds": 5, "us": {}, "errors": {}} | vars(case),
    )
    monkeypatch.setattr(run, "elapsed", lambda begun: "")
    monkeypatch.setattr(run, "meta", lambda *_: dict.fromkeys(("gpu", "torch", "triton", "helion", "driver", "date")))
    monkeypatch.setattr(wide.tables, "markdown", lambda results: "")
    assert wide.main(command(tmp_path, "--budget", "35")) == 0
    assert len(run.Results.read(tmp_path / "wide.json").records) == 3


def test_results_of_another_gpu_are_not_added_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = dict.fromkeys(("gpu", "torch", "triton", "helion"), "other")
    (tmp_path / "wide.jsonl").write_text(json.dumps({"meta": other}) + "\n")
    assert wide.main(command(tmp_path)) == 2
    assert "wide.jsonl is of gpu other, torch other" in capsys.readouterr().err
    assert not (tmp_path / "wide.json").exists()


def test_other_files_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such as the results that --json has written."""
    assert wide.main(command(tmp_path)) == 0
    results = (tmp_path / "wide.json").read_text()
    (tmp_path / "wide.jsonl").write_text(results)
    assert wide.main(command(tmp_path)) == 2
    assert "wide.jsonl was not written by this command" in capsys.readouterr().err
    assert (tmp_path / "wide.jsonl").read_text() == results


def test_without_a_provider_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A later run would take the cases for measured."""
    monkeypatch.setitem(wide._PROVIDERS, "quack", replace(wide._PROVIDERS["quack"], package="no_such_package"))
    assert wide.main([*command(tmp_path), "--providers", "quack"]) == 2
    assert capsys.readouterr().err == "not installed: quack\n"
    assert not list(tmp_path.iterdir())


def test_a_gpu_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert wide.main([str(tmp_path / "wide.jsonl")]) == 2
    assert "--tiny runs without" in capsys.readouterr().err


def test_a_failure_of_ours_is_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(inputs: Inputs) -> Call:
        raise RuntimeError("no")

    replaced(monkeypatch, "ours", fails)
    assert wide.main(command(tmp_path)) == 1


class Sent(NamedTuple):
    cases: list[Case]
    running: int  # including this one


def test_compiling_keeps_to_the_gpus_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """One routing of each number of rows, largest weights first; after a failure the rest is still compiled."""
    sent: list[Sent] = []
    open_: list[Future[None]] = []

    class Pool:
        def __init__(self, jobs: int, mp_context: Any):
            assert jobs == 3

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: Any) -> None: ...

        def submit(self, function: Any, cases: list[Case], *_: Any) -> Future[None]:
            open_.append(Future())
            sent.append(Sent(cases, len(open_)))
            return open_[-1]

    class Finished(NamedTuple):
        done: list[Future[None]]

    def finish(running: Any, return_when: str) -> Finished:
        first = open_.pop(0)
        first.set_exception(RuntimeError("out of memory"))
        return Finished([first])

    monkeypatch.setattr(wide, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(wide, "wait", finish)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(60e9), int(140e9)))
    wide.compile_beforehand(wide.cases_of(["kimi-k2", "olmoe", "qwen3-next"], [64, 4096]), ["ours"], 3, CPU)
    assert len(sent) == 6 and all({case.sizes for case in one.cases} == {"uniform"} for one in sent)
    assert all(sorted(case.M for case in one.cases) == [64, 4096] for one in sent)
    assert [one.cases[0].name for one in sent[:2]] == ["kimi-k2 up", "kimi-k2 down"]
    assert max(one.running for one in sent) == 3
    sent.clear()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(20e9), int(140e9)))
    wide.compile_beforehand(wide.cases_of(["kimi-k2"], [64]), ["ours"], 3, CPU)
    assert [one.running for one in sent] == [1, 1]


def test_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[int, ...]] = []

    def fails(inputs: Inputs) -> Call:
        called.append((*inputs.A.shape, *inputs.B.stride(), len(inputs.group_offsets)))
        raise RuntimeError("no")

    replaced(monkeypatch, "ours", fails)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    wide._compile([CASE, replace(CASE, M=8)], ["ours"], CPU)
    assert called == [(40, 32, 48 * 32, 1, 32, 5), (8, 32, 48 * 32, 1, 32, 5)]
