"""The scripts of benchmarks/ on a CPU with tiny sizes, and the tables made from what they write."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import python_path
from torch import Tensor

from benchmarks import accuracy, convergence, fp8, plots, report, run, start_up, tables, wide
from benchmarks.__main__ import main
from moe_kernels import grouped_gemm, moe_mlp, ops, quantize
from tritonbench_ops import ffn
from tritonbench_ops.baselines import Provider

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs pip install -e '.[transformers]'"
)


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return benchmarks/transformers_stack.py, with one thread, because more slow down such small models."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield importlib.import_module("benchmarks.transformers_stack")
    torch.set_num_threads(threads)


def table_of(file: Path, folder: Path) -> str:
    """Return the README that the report writes for `file`, after testing that `--check` detects changes in it."""
    readme = folder / "README.md"
    readme.write_text(f"<!-- table: {file.name} -->\n<!-- end of table -->\n")
    assert report.main([str(readme), "--check"]) == 1
    assert report.main([str(readme)]) == 0
    text = readme.read_text()
    assert report.main([str(readme), "--check"]) == 0
    readme.write_text(text.replace("| ", "| 1", 1))
    assert report.main([str(readme), "--check"]) == 1
    return text


@pytest.mark.parametrize("script", [accuracy, convergence, fp8, wide])
def test_a_folder_in_place_of_a_file_is_refused(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--tiny", "--json", str(tmp_path), *([str(tmp_path / "wide.jsonl")] if script is wide else [])]
    with pytest.raises(SystemExit):
        script.main(arguments)
    assert "argument --json: expected a file, got the folder " in capsys.readouterr().err


@needs_transformers
def test_transformers_stack(stack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "transformers.json"
    arguments = ["--tiny", "--rounds", "1", "--json", str(file)]
    assert stack.main([*arguments, "--parts", "prefill", "decode", "compiled"]) == 0
    make_call = stack.make_call

    def without_memory(model: Any, *arguments: Any) -> Any:
        call = make_call(model, *arguments)

        def checked() -> None:
            if model.config._experts_implementation == "batched_mm":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 384.00 GiB.")
            call()

        return checked

    monkeypatch.setattr(stack, "make_call", without_memory)
    assert stack.main([*arguments, "--parts", "training"]) == 0
    results = run.Results.read(file)
    assert results.meta["transformers"] and results.meta["command"].endswith("--parts training")
    found = {(r["part"], r["implementation"]): r for r in results.records}
    parts = {part: stack.IMPLEMENTATIONS[: 3 if part == "compiled" else 4] for part in stack.PARTS}
    assert found.keys() == {(part, name) for part, names in parts.items() for name in names}
    for (part, name), record in found.items():
        if (part, name) == ("training", "batched_mm"):
            assert record["error"].startswith("OutOfMemoryError: CUDA out of memory")
            assert record["ms"] is record["tokens_per_s"] is record["first_s"] is None
        else:
            assert record["error"] is None
            tokens = record["batch"] * record["length"]
            assert record["tokens_per_s"] == pytest.approx(1e3 * tokens / record["ms"], rel=1e-2)
    text = table_of(file, tmp_path)
    assert "| training, 2 x 8 |" in text and text.count("out of memory") == 1
    assert not plots.pictures(results, tmp_path)


@needs_transformers
def test_a_failure_of_ours_is_the_exit_status(stack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: Any, *_: Any) -> Any:
        def call() -> None:
            if model.config._experts_implementation == "moe_kernels":
                raise RuntimeError("no\nmore")

        return call

    monkeypatch.setattr(stack, "make_call", fail)
    assert stack.main(["--tiny", "--rounds", "1", "--parts", "prefill"]) == 1


@needs_transformers
def test_a_wrong_result_is_not_timed(stack: Any) -> None:
    registry = sys.modules["transformers.integrations.moe"]
    stack.integration.register()
    model = stack.make_model(True, torch.device("cpu"))
    stack.check(model)

    def swapped(experts: Any, hidden: Any, ids: Any, topk_weights: Any) -> Any:
        return stack.integration.experts_forward(experts, hidden, ids ^ 1, topk_weights)

    registry.ExpertsInterface.register("moe_kernels", swapped)
    try:
        with pytest.raises(AssertionError, match=r"^moe_kernels: error"):
            stack.check(model)
    finally:
        stack.integration.register()


@needs_transformers
@pytest.mark.parametrize(
    ("arguments", "needed"),
    [([], "--tiny runs without"), (["--tiny", "--rounds", "0"], "expected a positive whole number, got '0'")],
)
def test_the_stack_says_what_it_needs(
    stack: Any, arguments: list[str], needed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        stack.main(arguments)
    assert needed in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--part", "host"]])
def test_start_up_asks_for_a_gpu(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["start_up", *arguments])
    with pytest.raises(SystemExit):
        start_up.main()
    assert "needs a CUDA GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["convergence", "expert_parallel", "fp8", pytest.param("transformers_stack", marks=needs_transformers)]
)
@pytest.mark.parametrize(
    "content",
    [
        "{broken",
        "[]",
        '{"meta": {}, "records": [{"suite": "table"}], "skipped": []}',
        '{"meta": null, "records": [], "skipped": []}',
    ],
)
def test_a_file_without_results_to_keep_is_refused(
    name: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results.json"
    file.write_text(content)
    with pytest.raises(SystemExit):
        importlib.import_module(f"benchmarks.{name}").main(["--tiny", "--json", str(file)])
    assert f"argument --json: {str(file)!r} has no results of this command" in capsys.readouterr().err
    assert file.read_text() == content


@pytest.mark.parametrize("option", ["--json", "--csv", "--plot"])
def test_a_file_that_cannot_be_written_is_refused(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a file").write_text("")
    (tmp_path / "read only").mkdir()
    temporary = tempfile.TemporaryFile

    def on_disk(dir: Path) -> Any:
        if dir == tmp_path / "read only":
            raise PermissionError(errno.EACCES, "Permission denied")
        return temporary(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", on_disk)
    for folder in ("a file", "read only", "/proc"):
        file = tmp_path / folder / "not there" / "results"
        with pytest.raises(SystemExit):
            main(["--suite", "smoke", option, str(file)])
        assert f"argument {option}: {str(file)!r} cannot be written" in capsys.readouterr().err


def test_start_up_refuses_a_folder_to_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["start_up", "--json", str(tmp_path)])
    with pytest.raises(SystemExit):
        start_up.main()
    assert "expected a file, got the folder" in capsys.readouterr().err


def test_start_up_needs_a_folder_of_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise it would time a compilation as that of a compiled folder."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", ["start_up", "--compiled", str(tmp_path)])
    with pytest.raises(SystemExit):
        start_up.main()
    assert "--compiled: `python -m moe_kernels compile` has made no plans in" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--csv"])
def test_devices_and_pipes_are_not_replaced(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As root, /dev/null would be."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SystemExit):
        main(["--suite", "smoke", option, str(tmp_path / "pipe")])
    assert f"argument {option}: expected a file, got the device or pipe" in capsys.readouterr().err
    assert (tmp_path / "pipe").is_fifo()


def test_a_link_to_a_file_stays(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for text in ("first", "second"):
        run.replace_file(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == text


def test_start_up_reads_plans_of_its_own_folders_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_KERNELS_CACHE_READONLY", "elsewhere")
    environments: list[dict[str, str]] = []

    def started(*_: Any, env: dict[str, str], **__: Any) -> subprocess.CompletedProcess[str]:
        environments.append(env)
        return subprocess.CompletedProcess([], 0, "{}", "")

    monkeypatch.setattr(subprocess, "run", started)
    start_up.child("layer", start_up._folders("root", "layer"))
    assert environments[0]["MOE_KERNELS_CACHE_READONLY"] == ""


@pytest.mark.parametrize("compiled", [[], ["--compiled", "folder"]], ids=["alone", "compiled"])
def test_start_up_is_shown_with_the_states_it_measured(
    compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans compiled elsewhere are measured only with --compiled, which the recorded command names."""
    keys = ("first grouped_gemm", "25 calls", "worst of them", "first step", "first step of another T", "first product")
    file = tmp_path / "start_up.json"
    (tmp_path / "folder" / "environment" / "plans").mkdir(parents=True)
    (tmp_path / "folder" / "environment" / "plans" / "key").touch()
    monkeypatch.chdir(tmp_path)
    children: list[dict[str, str]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(start_up, "child", lambda _, given: children.append(given) or dict.fromkeys(keys, 1.0))
    monkeypatch.setattr(start_up, "OTHERS", ("torch",))
    monkeypatch.setattr(sys, "argv", ["start_up", *compiled, "--json", str(file)])
    start_up.main()
    measured = json.loads(file.read_text())
    assert ("--compiled" in measured["command"]) == bool(compiled)
    ahead = [given for given in children if given["MOE_KERNELS_CACHE_READONLY"] == str(tmp_path / "folder")]
    assert len({given["MOE_KERNELS_CACHE_DIR"] for given in ahead}) == len(ahead) == 2 * bool(compiled)
    rows = [line for line in tables.start_up(measured).splitlines() if line.startswith("|")]
    assert rows[0].count("|") == 4 + bool(compiled)
    assert len(rows) == 2 + len(keys)
    del measured["torch, caches filled"]
    measured["training, nothing cached"] = {"error": "out of memory"}
    assert tables.start_up(measured).count(" | - |") == 2


def test_calls_with_fewer_rows() -> None:
    """Host times of new numbers of rows are of the same call without its last rows."""
    offsets = torch.tensor([0, 3, 5], dtype=torch.int32)
    A, B = torch.randn(5, 256), torch.randn(2, 64, 256)
    rows = quantize(A, "1x128"), quantize(B, "128x128").mT
    for left, right in ((A, B.mT), rows):
        call = partial(grouped_gemm, left, right, offsets, out_dtype=torch.float32)
        torch.testing.assert_close(fp8.with_fewer_rows(call, 2)(), call()[:3])
    ids, weights = torch.tensor([[0], [1], [1]]), torch.ones(3, 1)
    layer = partial(moe_mlp, torch.randn(3, 64), ids, weights, torch.randn(2, 16, 64) / 8, torch.randn(2, 64, 8))
    torch.testing.assert_close(fp8.with_fewer_rows(layer, 1)(), layer()[:2], rtol=1e-4, atol=1e-4)


def test_new_numbers_of_rows_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "_SEEN", {})
    called: list[list[int]] = [[]]

    def product(A: Tensor, B: Tensor) -> Tensor:
        called[-1].append(len(A))
        return A @ B

    cases = [torch.randn(rows, 8) for rows in (40, 40, 40, 38)]
    for A in cases:
        fp8.host_times({"grouped_gemm": partial(product, A, torch.randn(8, 4))}, 4, torch.device("cpu"))
        called.append([])
    earlier, counts = set[int](), []
    for A, rows in zip(cases, called, strict=False):
        warm = {len(A) - n for n in (0, *run.WARM_ROWS)}
        new = [n for n in dict.fromkeys(rows) if n not in warm]
        assert not earlier.intersection(new)
        counts.append(len(new))
        earlier |= {*new, *warm}
    assert counts == [12, 12, 9, 0]
    fresh = fp8.host_times({"grouped_gemm": partial(product, cases[0], torch.randn(8, 5))}, 1, torch.device("cpu"))
    assert fresh["host_new_rows_us"]


@pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")
def test_expert_parallel(tmp_path: Path) -> None:
    """The records of two ranks are added to the existing ones of one rank."""
    file = tmp_path / "expert_parallel.json"
    layer = {"suite": "expert_parallel", "H": 64, "I": 32, "E": 16, "top_k": 8, "dtype": "float32", "first_s": 0.1}
    one = layer | {"ranks": 1, "ms": 5.0, "comm": 0.01, "error_share": 0.2}
    before = [
        one | {"scaling": "weak", "tokens_per_rank": 32, "tokens_per_s": 6400.0},
        one | {"scaling": "strong", "tokens_per_rank": 64, "tokens_per_s": 12800.0},
    ]
    run.Results(run.meta(torch.device("cpu"), "before"), before).write(file)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "benchmarks.expert_parallel", "--tiny", "--rounds", "2", "--json", str(file)]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": python_path()}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    made = json.loads(file.read_text())
    assert made["meta"]["command"].endswith("-m benchmarks.expert_parallel --rounds 2 --tiny")
    records = made["records"]
    assert records[:2] == before
    assert [(r["scaling"], r["ranks"], r["tokens_per_rank"]) for r in records[2:]] == [
        ("weak", 2, 32),
        ("strong", 2, 32),
    ]
    for record in records[2:]:
        assert record.keys() == before[0].keys()
        assert 0 < record["comm"] < 1 and 0 <= record["error_share"] <= 1
        assert record["tokens_per_s"] == pytest.approx(1e3 * 64 / record["ms"], rel=1e-2)
    text = table_of(file, tmp_path)
    rows = [line for line in text.splitlines() if line.startswith(("| weak", "| strong"))]
    assert [row.split(" |")[0] for row in rows] == ["| weak, 1", "| weak, 2", "| strong, 1", "| strong, 2"]
    assert rows[0] == "| weak, 1 | 16 | 32 | 5.0 | 6400 | 1.00 | 1% | 0 |"
    assert all(row in done.stdout for row in rows)


def test_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A peer that cannot be prepared does not fail the run; the reference replaces kernels that are launched alone."""

    def broken(inputs: Any) -> Any:
        raise RuntimeError("no compiler")

    def alone(operator: Any, tensors: Any, options: Any, which: int) -> Any:
        if operator is fp8.QUANTIZED_WGRAD:
            return lambda: ops.quantized_wgrad(*tensors, False, torch.bfloat16), ()
        hidden, _, _, _, group_offsets, slot_to_row, _ = tensors
        rowwise, _, dtype, top_k = options
        rows = ops.scatter_rows(hidden, None, slot_to_row, group_offsets, top_k, dtype)
        return lambda: None, quantize(rows, "rowwise" if rowwise else "1x128")[:2]

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(fp8, "_SEEN", {})
    monkeypatch.setattr(fp8, "use_kernels", lambda *_: True)
    monkeypatch.setattr(fp8, "launch_alone", alone)
    peers = {"one scale": Provider("broken", broken), "1x128 by 128x128": Provider("peer", broken, "no_such_package")}
    monkeypatch.setattr(fp8, "FP8_PEERS", peers)
    monkeypatch.setattr(fp8, "TRANSFORMERS", replace(fp8.TRANSFORMERS, make=ffn.ours))
    file = tmp_path / "fp8.json"
    assert fp8.main(["--tiny", "--rounds", "1", "--load", "--json", str(file)]) == 0
    assert "peer: left out, no_such_package is not installed" in capsys.readouterr().out
    results = run.Results.read(file)
    product, layer, training = results.records
    assert results.meta["load"] and not layer["errors"] and not training["errors"]
    assert product["errors"] == {"broken": "RuntimeError: no compiler"}
    products = {"grouped_gemm, bfloat16", "grouped_gemm, rowwise, fast_accumulation", "grouped_gemm, rowwise"}
    products |= {"grouped_gemm, 1x128 by 128x128"}
    assert product["rel_err"].keys() == product["host_us"].keys() == products < product["us"].keys()
    assert all(0 < error < fp8.LARGEST_ERROR for error in product["rel_err"].values())
    assert product["quantize_gbps"].keys() == {"rowwise", "1x128", "copy"}
    layers = {"moe_mlp, bfloat16", "moe_mlp, rowwise, fast_accumulation", "moe_mlp, rowwise", "moe_mlp, 128x128"}
    moves = {"permute, bfloat16", "permute, rowwise", "permute, 1x128"}
    assert layer["us"].keys() == layers | moves | {"transformers, bfloat16"} and layer["host_us"].keys() == layers
    assert product["host_new_rows_us"].keys() == products and layer["host_new_rows_us"].keys() == layers
    assert min(*product["host_new_rows_us"].values(), *layer["host_new_rows_us"].values()) > 0
    fast = "fp8_rowwise, fast_accumulation"
    rowwise = (fast, f"{fast}, bfloat16 wgrad", "fp8_rowwise")
    steps = ("bfloat16", *rowwise, "fp8_block", "fp8_block, bfloat16 wgrad")
    steps += tuple(f"{name}, weights quantised beforehand" for name in steps[1:])
    assert [label for label in training["us"] if label.startswith("step")] == [f"step, {name}" for name in steps]
    assert len(training["wgrad_tflops"]) == 6
    text = table_of(file, tmp_path)
    assert "| tiny (3, 40, 48, 160) |" in text and "| tiny, T = 5 (4, 10, 16, 32) |" in text
    assert "| tiny, T = 64 (4, 128, 48, 64) |" in text and "of eager calls" in text and "under sustained load" in text
    assert all(line.count(" | ") < tables.SHORT for line in text.splitlines())
    assert not plots.pictures(results, tmp_path)
    # Repeating one part keeps the records of the others.
    assert fp8.main(["--tiny", "--rounds", "1", "--load", "--json", str(file), "--part", "layer"]) == 0
    assert sorted(r["part"] for r in run.Results.read(file).records) == ["layer", "product", "training"]


def test_wrong_results_are_not_timed() -> None:
    right, wrong = torch.ones(3), torch.zeros(3)
    calls = {"a, bfloat16": lambda: right, "a, fp8": lambda: wrong, "b": lambda: [wrong[:0], right]}
    errors: dict[str, str] = {}
    timed = fp8.prepared_right(calls, fp8.check_of(), errors, torch.device("cpu"))
    assert timed.keys() == {"a, bfloat16"} and errors["a, fp8"] == "AssertionError: wrong: 1.0e+00 of the norm"


def test_a_wrong_layer_in_bfloat16_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither are those in fp8 that would be compared with it."""
    wrong = replace(fp8.TRANSFORMERS, make=lambda layer: lambda: layer.hidden, package=None)
    monkeypatch.setattr(fp8, "TRANSFORMERS", wrong)
    record = fp8.measure_layer(fp8.TINY_LAYERS[0], 1, torch.device("cpu"), load=False)
    assert wrong.label not in record["us"] and "exceeds the budget" in record["errors"][wrong.label]
    assert {"moe_mlp, bfloat16", "moe_mlp, rowwise"} <= record["us"].keys()

    moe_mlp = fp8.moe_mlp
    monkeypatch.setattr(fp8, "moe_mlp", lambda *operands, **options: 1.2 * moe_mlp(*operands, **options))
    layer = fp8.measure_layer(fp8.TINY_LAYERS[0], 1, torch.device("cpu"), load=False)
    training = fp8.measure_training(fp8.TINY_TRAINED[0], 1, torch.device("cpu"), load=False)
    for record, kind in ((layer, "moe_mlp"), (training, "step")):
        assert not [label for label in record["us"] if label.startswith(f"{kind},")]
        assert "exceeds the budget" in record["errors"].pop(f"{kind}, bfloat16")
        missing = f"AssertionError: nothing to compare with: {kind}, bfloat16, failed"
        assert [error for label, error in record["errors"].items() if label.startswith(kind)][-1] == missing


def test_a_failed_capture_in_fp8_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on with the other calls and cases."""

    def prepared(call: Any, device: torch.device) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(fp8, "prepared", prepared)
    measures = (fp8.measure_product, fp8.measure_layer, fp8.measure_training)
    cases = (*fp8.TINY_PRODUCTS, *fp8.TINY_LAYERS, *fp8.TINY_TRAINED)
    for measure, case in zip(measures, cases, strict=True):
        record = measure(case, 1, torch.device("cpu"), False)
        assert not record["us"] and all(error.endswith("capturing") for error in record["errors"].values())
        assert fp8.speedups(record) == f"{case.name}: no times"


def test_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "accuracy.json"
    assert accuracy.main(["--tiny", "--cases", "3", "--json", str(file)]) == 0
    records = {
        part: [r for r in run.Results.read(file).records if r["part"] == part] for part in ("fp8", "float32", "random")
    }
    for record in records["fp8"]:
        assert len(record["errors"]) == 4 and all(1e-4 < error < 3e-3 for error in record["errors"].values())
    for record in records["float32"]:
        assert len(record["errors"]) == 2 and all(1e-9 < error < 2e-7 for error in record["errors"].values())
    assert len(records["random"]) == 15
    for record in records["random"]:
        assert (record["cases"], record["over"]) == (3, 0) and 0.01 < record["largest"] <= 1
    text = table_of(file, tmp_path)
    assert text.count("| `grouped_gemm_wgrad` |") == 5 and text.count("\n| 768 |") == 1
    readme = tmp_path / "README.md"
    readme.write_text("<!-- float32 accuracy: accuracy.json -->\n<!-- end of table -->\n")
    assert report.main([str(readme)]) == 0
    assert "| K | rows per group | `grouped_gemm` | `torch.mm` |" in readme.read_text()
    assert "| `grouped_gemm_wgrad` |" not in readme.read_text()
    assert accuracy.main(["--tiny", "--part", "fp8", "--json", str(file)]) == 0
    assert len(run.Results.read(file).records) == sum(map(len, records.values()))


@pytest.mark.parametrize(
    ("operator", "scale", "over"),
    [(name, *case) for name in accuracy.OPERATORS for case in ((1, 0), (1.1, 4), (0, 4), (torch.nan, 4))],
)
def test_wrong_results_are_over_the_budget(
    operator: str, scale: float, over: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = getattr(accuracy, operator)
    monkeypatch.setattr(accuracy, operator, lambda *operands, **options: scale * compute(*operands, **options))
    dtypes = (torch.bfloat16, torch.bfloat16)
    record = accuracy.random_cases(operator, dtypes, 4, True, torch.device("cpu"))
    assert record["over"] == over and (record["largest"] > 1) == bool(over)


def test_convergence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each way to compute gets the same weights and batches, and existing runs are not repeated."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked, moe_mlp = [], convergence.moe_mlp

    def noted(*arguments: Any, compute: str | None = None, fast_accumulation: bool = False) -> Any:
        asked.append(f"{compute}{'_fast' * fast_accumulation}")
        return moe_mlp(*arguments)

    monkeypatch.setattr(convergence, "moe_mlp", noted)
    file = tmp_path / "convergence.json"
    arguments = ["--tiny", "--steps", "3", "--json", str(file), "--only"]
    assert convergence.main([*arguments, "1:fp8_block"]) == 0
    assert set(asked) == {"fp8_block"}
    assert convergence.main([*arguments, "0:bfloat16", "1:bfloat16", "1:fp8_block"]) == 0
    assert asked.count("fp8_block") * 2 == asked.count("None")
    assert convergence.main([*arguments[:3], *arguments[5:], "0:fp8_rowwise_fast", "0:fp8_rowwise"]) == 0
    assert asked.count("fp8_rowwise_fast") == asked.count("fp8_rowwise") > 0
    assert f"seed 1, fp8_block: in {file}" in capsys.readouterr().out
    runs = {record["case"]: record for record in run.Results.read(file).records}
    assert runs.keys() == {"0:bfloat16", "1:bfloat16", "1:fp8_block"}
    assert runs["1:bfloat16"]["losses"] == runs["1:fp8_block"]["losses"] != runs["0:bfloat16"]["losses"]
    for record in runs.values():
        assert [step for step, _ in record["held_out"]] == [2, 3]
        assert len(record["losses"]) == 3 and record["final"] == record["held_out"][-1][1] > 0
        assert record["final_training"] == pytest.approx(sum(record["losses"][1:]) / 2, abs=1e-4)
    text = table_of(file, tmp_path)
    finals = [f"{runs[case]['final']:.4f}" for case in ("0:bfloat16", "1:bfloat16")]
    assert f"| `bfloat16` | {finals[0]} | {finals[1]} |" in text and "| `fp8_block` | - |" in text
    assert "![convergence](convergence.png)" in text
    before, trained = file.read_text(), len(asked)
    with pytest.raises(SystemExit, match="2"):
        convergence.main([*arguments[:2], "4", *arguments[3:], "0:bfloat16"])
    assert f"{file} has results of training {{" in capsys.readouterr().err
    assert file.read_text() == before and len(asked) == trained


def test_a_model_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(convergence, "LEARNING_RATE", 1e-2)
    text = torch.arange(3000).remainder(7).to(torch.uint8)
    record = convergence.train(0, "bfloat16", 60, convergence.TINY, text, text, torch.device("cpu"))
    assert record["losses"][0] > 4 and record["final"] < 2


def test_a_wrong_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("0:fp16", "bfloat16", "x:bfloat16"):
        with pytest.raises(SystemExit):
            convergence.main(["--tiny", "--only", text])
        assert (
            "expected SEED:COMPUTE with one of bfloat16, fp8_rowwise, fp8_rowwise_fast, fp8_block"
            in capsys.readouterr().err
        )


def test_results_under_another_load_are_not_kept(tmp_path: Path) -> None:
    file, meta, before = tmp_path / "fp8.json", {"gpu": "A"}, [{"part": "layer"}]
    for there, here in ((meta, meta | {"load": True}), (meta | {"load": True}, meta)):
        run.Results(there, before).write(file)
        results = run.Results(here)
        results.keep(file, "part")
        assert results.records == []


def test_results_that_a_run_cannot_add_to_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, meta = tmp_path / "fp8.json", {"gpu": "A", "torch": "2.11", "date": "1"}
    run.Results(meta, [{"part": "layer"}]).write(file)
    options = argparse.Namespace(tiny=False, json=file)
    for same in (meta, meta | {"date": "2"}):
        assert run.file_of(options, same, "fp8.json", adds=True) == file
    for other, text in (({"torch": "2.12"}, "torch 2.11"), ({"load": True}, "load None")):
        assert run.file_of(options, meta | other, "fp8.json") == file
        with pytest.raises(SystemExit, match="2"):
            run.file_of(options, meta | other, "fp8.json", adds=True)
        assert capsys.readouterr().err == f"{file} has results of {text}: move it, or name another file with --json\n"


def test_results_of_another_gpu_are_not_kept(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    meta = {"gpu": "A", "torch": "2.11", "date": "1"}
    run.Results(meta, [{"ranks": 1, "ms": 1}, {"ranks": 2, "ms": 2}]).write(file)
    for changed, kept in (({"date": "2"}, [{"ranks": 1, "ms": 1}]), ({"gpu": "B"}, []), ({"torch": "2.12"}, [])):
        results = run.Results(meta | changed, [{"ranks": 2, "ms": 3}])
        results.keep(file, "ranks")
        assert results.records == [*kept, {"ranks": 2, "ms": 3}]
    results = run.Results(meta, [])
    results.keep(tmp_path / "nothing.json", "ranks")
    assert results.records == []
