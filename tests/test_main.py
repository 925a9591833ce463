"""`python -m moe_kernels`, on a machine without a GPU or one whose GPUs are hidden."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from processes import python_path

import moe_kernels
from moe_kernels import __main__ as cli
from moe_kernels import requirements, rules
from moe_kernels.rules import grouped
from moe_kernels.runtime import targets
from moe_kernels.tuning import entries

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ["grouped_gemm_jagged", "grouped_gemm_jagged_persistent", "grouped_gemm"]


def run(*arguments: str, first: Sequence[Path] = ()) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "HELION_FORCE_AUTOTUNE")}
    env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": python_path(*first)}
    command = [sys.executable, "-m", "moe_kernels", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)


def hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    installed = requirements.installed
    monkeypatch.setattr(requirements, "installed", lambda name: None if name == package else installed(name))


def test_demo_checks_every_kernel_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("demo")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    if problems := requirements.problems():  # numpy is too new for the interpreter of Triton 3.6
        assert done.returncode == 1 and next(iter(problems)) in done.stderr and requirements.fix() in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert "interpreter" in done.stdout and "say nothing about the speed on a GPU" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("grouped_gemm")]
    assert [row[0] for row in rows] == KERNELS * 2
    for row in rows:
        error, budget, result = row[-3:]
        assert result == "ok"
        assert 0 < float(error) <= float(budget)


def test_demo_fails_if_a_result_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The persistent kernel returns zeros, and plain PyTorch replaces the other kernels."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name in KERNELS:
        monkeypatch.setattr(moe_kernels, name, moe_kernels.reference.grouped_gemm)
    monkeypatch.setattr(
        moe_kernels,
        "grouped_gemm_jagged_persistent",
        lambda A, B, group_offsets: A.new_zeros(A.size(0), B.size(-1)),
    )
    monkeypatch.setattr(requirements, "problems", dict)
    assert cli.main(["demo"]) == 1
    captured = capsys.readouterr()
    assert captured.out.count("WRONG") == 2 and captured.out.count(" ok") == 4
    assert "2 of 6 results are wrong" in captured.out
    assert "exceeds the budget" in captured.err


def test_demo_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    hide(monkeypatch, "helion")
    assert cli.main(["demo"]) == 1
    error = capsys.readouterr().err
    assert "helion is not installed" in error and "pip install 'helion==1.5.0'" in error


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_info_lists_versions_and_configs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    for text in (
        f"moe_kernels      {moe_kernels.__version__}",
        f"torch            {metadata.version('torch')}",
        "none usable",
        "off (TRITON_INTERPRET",
    ):
        assert text in out
    assert "derived on an H200 and an H100" in out
    assert "2048 rows per group >= " in out and "4 rows per group < " in out
    table = [re.split("  +", line) for line in out.splitlines()]
    (header,) = [row for row in table if row[0] == "layer"]
    shown = [dict(zip(header, row, strict=True)) for row in table[table.index(header) + 1 :]]
    assert {row["kernel"] for row in shown} >= {"jagged", "jagged_tails"}
    assert {row["variant"] for row in shown} <= {"basic", "persistent"}


@pytest.mark.parametrize(
    ("cuda", "xpu", "gpus"),
    [
        (True, True, ["NVIDIA Test 9000, compute capability 9.0", "NVIDIA Test 9000, compute capability 9.0"]),
        (False, True, ["Intel Test 9000"]),
        (False, False, []),
    ],
)
def test_info_names_each_gpu(cuda: bool, xpu: bool, gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA Test 9000")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.xpu, "is_available", lambda: xpu)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda index: "Intel Test 9000")
    monkeypatch.setattr(requirements, "nvidia_driver", lambda: "570.86" if cuda else None)
    monkeypatch.setattr(torch.version, "cuda", "13.0" if cuda else None)
    expected = [(f"GPU {i}", name) for i, name in enumerate(gpus)]
    assert cli._gpu_fields() == [
        *(expected or [("GPU", "none usable: CPU tensors are multiplied in plain PyTorch")]),
        ("driver", "570.86" if cuda else "no NVIDIA driver found"),
        ("torch built for", "CUDA 13.0" if cuda else "no CUDA"),
    ]


def info_on(gpu: targets.Gpu, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what `info` prints on a machine with this GPU."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(targets, "of_device", lambda kind, index: gpu)
    monkeypatch.setattr(cli, "_gpu", lambda: "cuda")
    monkeypatch.setattr(cli, "_gpu_fields", list)
    rules.reload()
    assert cli.main(["info"]) == 0
    rules.reload()
    return capsys.readouterr().out


def test_info_names_the_entry_and_its_distance(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The GPU has one tuned entry, near the second of the typical shapes."""
    gpu = targets.Gpu("NVIDIA Test 9000", "cuda", 90, 132, 232448)
    by_tma = dict.fromkeys(("tma_A", "tma_B", "tma_out"), True)
    problem = grouped.Problem(512, 65536, 1536, 1792, 128, torch.bfloat16, tf32=False, has_bias=False, **by_tma)
    by_rule = grouped.rule(problem)
    made = entries.Entry(
        by_rule.variant,
        grouped.bucket_of(problem),
        by_rule.block_m,
        by_rule.addressing.tma,
        {**by_rule.config.config, "num_stages": 3},
        600.0,
        610.0,
        65536,
        entries.installed_versions(),
        "2026-01-01",
        "",
    )
    file = entries.file_in(tmp_path, gpu.name)
    entries.write(file, gpu.name, [made])
    (tmp_path / "nvidia-sm90.json").write_text("{")
    monkeypatch.setenv("MOE_KERNELS_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    monkeypatch.setattr(entries, "BUNDLED", tmp_path / "none")
    text = info_on(gpu, monkeypatch, capsys)
    assert f"{file}: 1 entries" in text and "not there" in text
    assert f"tuned: {file}, distance 0.19 from 512 rows per group, N 1536, K 1792, G 128" in text
    (float32,) = [line for line in text.splitlines() if line.startswith("Qwen3-30B-A3B, prefill, float32")]
    assert re.search(r"basic +rule: float32 as three products in TF32 +jagged ", float32)
    assert text.count("rule: ") == 3
    assert f"Note: moe_kernels: {tmp_path / 'nvidia-sm90.json'} is not valid JSON" in text


def test_info_where_the_user_may_not_look_into_the_cache_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    hidden, real = str(tmp_path / "hidden"), os.stat

    def refuse(path: Any, *rest: Any, **options: Any) -> os.stat_result:
        if not isinstance(path, int) and str(path).startswith(hidden):
            raise PermissionError(path)
        return real(path, *rest, **options)

    monkeypatch.setenv("XDG_CACHE_HOME", hidden)
    monkeypatch.setattr(os, "stat", refuse)
    text = info_on(targets.KNOWN["h200"], monkeypatch, capsys)
    assert f"{hidden}/moe_kernels/configs/nvidia-h200.json: not there" in text


def test_info_on_a_gpu_whose_kernels_use_pointers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = info_on(targets.KNOWN["a100"], monkeypatch, capsys)
    assert text.count(" 0 of 3 tensors by TMA") == len(cli._TYPICAL) and "jagged_tails" not in text


@pytest.mark.usefixtures("no_gpu")
def test_tune_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "--model", "qwen3-30b-a3b"]) == 2
    assert "tune needs a CUDA GPU: torch finds none" in capsys.readouterr().err


def test_tune_in_the_interpreter(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(requirements, "problems", dict)  # none of the interpreter
    assert cli.main(["tune", "--shapes", "8,64,64,64"]) == 2
    assert "TRITON_INTERPRET" in capsys.readouterr().err


def test_tune_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    hide(monkeypatch, "helion")
    assert cli.main(["tune", "--model", "olmoe"]) == 1
    assert "pip install 'helion==1.5.0'" in capsys.readouterr().err


def test_what_needs_no_helion(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of these two, only the list."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    hide(monkeypatch, "helion")
    assert cli.main(["compile", "--list"]) == 0
    assert "qwen3-30b-a3b" in capsys.readouterr().out
    assert cli.main(["info", "--model", "qwen3-30b-a3b", "--gpu", "h200"]) == 1
    assert "pip install 'helion==1.5.0'" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["compile", "--model", "olmoe", "--gpu", "h200"], ["tune", "--model", "olmoe"]])
def test_helion_that_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    monkeypatch.setattr(requirements, "problems", dict)
    error = ImportError("cannot import name 'x' from 'helion'")
    monkeypatch.setattr(cli.commands, "compile_main", Mock(side_effect=error))
    monkeypatch.setattr(cli.tune, "main", Mock(side_effect=error))
    assert cli.main(command) == 1
    said, fix = capsys.readouterr().err.splitlines()
    assert said == f"{command[0]}: {error}" and fix.startswith("To fix it: pip install ")


def test_info_without_helion(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "helion", None)
    hide(monkeypatch, "helion")
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert "helion is not installed" in text and "pip install 'helion==1.5.0'" in text
    assert text.endswith("\nConfigs: not shown, because they need the missing packages.\n")


def test_info_with_a_helion_that_cannot_be_imported(tmp_path: Path) -> None:
    for error, helps in (("RuntimeError", True), ("FileNotFoundError", False)):
        (tmp_path / "helion.py").write_text(f"raise {error}('broken helion')\n")
        done = run("info", first=[tmp_path])
        assert done.returncode == 0, done.stderr
        assert f"{error}: broken helion" in done.stdout and (requirements.fix() in done.stdout) == helps


@pytest.mark.parametrize("option", [["--gpu", "h100"], ["--tokens", "1:4"]])
def test_info_about_a_gpu_or_tokens_needs_a_model(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["info", *option])
    assert "info: --gpu and --tokens need --model" in capsys.readouterr().err


def test_info_of_more_tokens_than_a_layer_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--model", "qwen3-30b-a3b", "--tokens", "1:134217729", "--gpu", "h200"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "info: tokens: expected 0 to 134217727, got 134217729\n" and not captured.out


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--help"], 0, "without a GPU"),
        (["demo", "--help"], 0, "Exits with 0 if every check passed"),
        (["demo", "--help"], 0, "Without a GPU"),
        (["info", "--help"], 0, "needs torch only"),
        (["tune", "--help"], 0, "Ctrl-C keeps what is done"),
        (["nonsense"], 2, "invalid choice"),
    ],
)
def test_arguments(arguments: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == code
    captured = capsys.readouterr()
    assert text in captured.out + captured.err


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: python -m moe_kernels" in capsys.readouterr().out


TRITONBENCH = {  # what `tritonbench_ops` uses of it
    "__init__.py": "",
    "utils/triton_op.py": """
from tritonbench_ops.providers import PROVIDERS
REGISTERED_BENCHMARKS = {"grouped_gemm": [provider.__name__ for provider in PROVIDERS]}
class BenchmarkOperator:
    def run(self): ...
""",
    "utils/run_utils.py": "def tritonbench_run(args):\n    print(args, flush=True)\n",
    "operators/__init__.py": "",
    "operators/grouped_gemm.py": "class Operator:\n    def get_input_iter(self): ...\n",
    "operators/op.py": """
import os
def _list_opbench_paths():
    return []
def list_operators():
    return [os.path.basename(path) for path in _list_opbench_paths()]
""",
}


@pytest.mark.parametrize(
    "arguments",
    (
        ["moe_kernels", "compile", "--list"],
        ["benchmarks", "--list"],
        ["benchmarks.wide", "wide.jsonl", "--tiny"],
        ["benchmarks.fp8", "--tiny", "--part", "product", "--rounds", "1"],
        ["tritonbench_ops", "--op", "moe_ffn", "--device", "cpu"],
    ),
    ids=lambda arguments: arguments[0],
)
def test_a_reader_that_has_enough(arguments: list[str], tmp_path: Path) -> None:
    """As in `python -m moe_kernels compile --list | head -1`, which ends before the rest is written."""
    for name, text in TRITONBENCH.items():
        file = tmp_path / "tritonbench" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    reader, writer = os.pipe()
    os.close(reader)
    env = os.environ | {"PYTHONPATH": python_path(tmp_path)}
    command = [sys.executable, "-m", *arguments]
    with open(writer, "w") as out:
        done = subprocess.run(
            command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=120, cwd=tmp_path, env=env
        )
    assert (done.returncode, done.stderr) == (1, "")


def test_a_folder_whose_name_the_locale_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    monkeypatch.setenv("MOE_KERNELS_CACHE_DIR", str(tmp_path / "caf\xe9"))
    done = run("cache")
    assert done.returncode == 0 and "/caf\\xe9: not there yet" in done.stdout


def test_importing_the_package_leaves_triton_alone() -> None:
    """Triton reads TRITON_INTERPRET when imported, so the demo has to set it before."""
    code = "import sys, moe_kernels; sys.exit('triton' in sys.modules or 'helion' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120, check=False).returncode == 0
