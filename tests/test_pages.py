"""README and docs: code and commands run, links are valid, and tables and plots agree with the results."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import runpy
import shlex
import statistics
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import python_path

import moe_kernels
from benchmarks import report, tables
from benchmarks.__main__ import arguments as arguments_of_benchmarks
from benchmarks.run import Results
from moe_kernels import __main__ as main
from moe_kernels import ahead, commands, requirements
from moe_kernels.models import MODELS
from moe_kernels.runtime import targets
from moe_kernels.tuning import search

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MEASURED = [ROOT / "benchmarks" / "README.md", ROOT / "benchmarks" / "notes.md"]
FENCE = re.compile(r"(?:^(<!-- [^\n]* -->)\n)?^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", report.PAGES, ids=str)
def test_tables_and_plots_match_the_results(page: Path) -> None:
    assert "<!-- end of table -->" in (ROOT / page).read_text()
    assert not report.write_page(ROOT / page, check=True), "run `python -m benchmarks.report`"


def test_the_report_finds_the_pages_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert report.main(["--check"]) == 0


def test_the_report_names_a_page_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        report.main([str(tmp_path / "none.md")])
    assert f"argument page: no file {tmp_path / 'none.md'}" in capsys.readouterr().err


def test_a_changed_table_is_noticed(tmp_path: Path) -> None:
    """A check writes nothing."""
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    copy = tmp_path / "README.md"
    text = README.read_text()
    changed = text.replace("| one product, ", "| two products, ", 1)
    assert changed != text
    copy.write_text(changed)
    assert report.main([str(copy), "--check"]) == 1
    assert copy.read_text() == changed


def test_contributing_lists_the_kinds_of_tables() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    kinds = {
        kind
        for page in report.PAGES
        for kind in re.findall(r"^<!-- ([\w ]+): \S+ -->\n", (ROOT / page).read_text(), re.M)
    }
    assert {"training table", "overview"} <= kinds
    for kind in kinds:
        assert f"| `<!-- {kind}: " in text


@pytest.mark.parametrize("picture", sorted((ROOT / "benchmarks" / "results").rglob("*.png")), ids=lambda p: p.name)
def test_plots_are_small(picture: Path) -> None:
    assert picture.stat().st_size < 250_000  # mostly labels, where there are dozens of inputs


def fp8_records(gpu: str, name: str, part: str) -> list[dict[str, Any]]:
    results = Results.read(ROOT / "benchmarks" / "results" / gpu / name)
    return [record for record in results.records if record["part"] == part]


def ratios(found: list[dict[str, Any]], base: str, label: str) -> list[float]:
    """Return the speedup of provider `label` over provider `base` in each record."""
    return [record["us"][base] / record["us"][label] for record in found]


def between(numbers: list[float], digits: int) -> str:
    low, high = (f"{end:.{digits}f}" for end in (min(numbers), max(numbers)))
    return low if low == high else f"{low} to {high}"


def mean_and_lowest(found: list[tuple[float, str]]) -> str:
    """Return the cells with the geometric mean of these speedups, and the lowest with the name of its case."""
    lowest, name = min(found)
    return f"{statistics.geometric_mean(ratio for ratio, _ in found):.2f} | {lowest:.2f} ({name})"


def test_means_in_performance_match_the_results() -> None:
    """The table and the sentence on all cases of a file, which no command writes."""
    text = " ".join((ROOT / "docs" / "performance.md").read_text().split())
    folder = ROOT / "benchmarks" / "results" / "nvidia-h200"
    base, ours = tables.roles("table")
    for name, load in (("table.json", "bursts"), ("table-load.json", "sustained")):
        found, first = [], []
        for case in tables.by_case(Results.read(folder / name).records):
            us = {provider: record["us"] for (provider, timing), record in case.items() if timing == "graph"}
            fastest = min(us[provider] for provider in (base, *tables._others("table", us)))
            first += [provider.partition(",")[0] for provider in us if us[provider] == fastest]
            found.append((fastest / us[ours], next(iter(case.values()))["case"]))
        assert len(found) == 22
        assert f"| the 22 lines below | {load} | {mean_and_lowest(found)} |" in text
        numbers = first.count("DeepGEMM"), first.count("loop of torch.mm")
        assert "DeepGEMM is the fastest other in {} and a loop of `torch.mm` in {}.".format(*numbers) in text
    shared = [
        {provider: record["us"] for (provider, timing), record in case.items() if timing == "graph"}
        for case in tables.by_case(Results.read(folder / "shared.json").records)
    ]
    added = max(us["grouped_gemm"] / us["torch.mm"] - 1 for us in shared if us["torch.mm"] > 100)
    assert f"adds at most {100 * added:.1f}% to the time of a large product" in text

    speedups = []
    for case in tables.by_case(Results.read(folder / "table-torch-2.15.json").records):
        speedups.append((case[base, "graph"]["us"] / case[ours, "graph"]["us"], next(iter(case.values()))["case"]))
    mean, lowest = mean_and_lowest(speedups).split(" | ")
    assert len(speedups) == 22
    assert f"in these 22 lines has a geometric mean of {mean}; the lowest is {lowest}." in text

    for name, others, cells in (
        ("wide.json", [], "both products of 14 models, 64 to 65536 rows, five routings | bursts"),
        ("wide.json", [base], f"the same, over `{base}` alone | bursts"),
        ("wide-load.json", [], "five of these models, 4096 to 65536 rows | sustained"),
    ):
        records = Results.read(folder / name).records
        speedups = ((tables.over_best(r, others), f"{r['M']} rows, N = {r['N']}, K = {r['K']}") for r in records)
        found = [(ratio, case) for ratio, case in speedups if ratio is not None]
        assert f"| {cells} | {mean_and_lowest(found)} |" in text

    for name, before, after in (
        ("ffn-load", "Under sustained load, `moe_mlp` had speedups of ", " in the forward pass of these cases,"),
        ("ffn-train-load", "in the forward pass of these cases, and of ", " in forward and backward pass;"),
    ):
        results = Results.read(folder / f"{name}.json")
        assert results.meta["load"]
        cases = [
            {p: r["us"] for (p, timing), r in case.items() if timing == "graph"}
            for case in tables.by_case(results.records)
        ]
        assert f"{before}{between([us['transformers'] / us['moe_mlp'] for us in cases], 2)}{after}" in text

    peaks = [
        [case[provider, "eager"]["peak_mb"] for provider in ("transformers", "transformers, compiled", "moe_mlp")]
        for case in tables.by_case(Results.read(folder / "ffn-train.json").records)
    ]
    assert all(ours <= compiled for _, compiled, ours in peaks)
    below = between([100 - 100 * ours / eager for eager, _, ours in peaks], 0)
    assert f"is at most that of the compiled transformers layer, and {below}% below that of the eager one." in text


def test_ranges_in_low_precision_match_the_results() -> None:
    """The sentences and the table that give ranges over cases, which no command writes."""
    text = " ".join((ROOT / "docs" / "low_precision.md").read_text().split())
    layers = fp8_records("nvidia-h200", "fp8.json", "layer")
    many = [record for record in layers if int(record["case"].partition("T = ")[2]) >= 4096]
    few = [record for record in layers if record["case"].endswith(("T = 16", "T = 64"))]
    for name, label in (
        ('`"fp8_rowwise"`, `fast_accumulation=True`', "moe_mlp, rowwise, fast_accumulation"),
        ('`"fp8_rowwise"`', "moe_mlp, rowwise"),
        ('`"fp8_block"`', "moe_mlp, 128x128"),
    ):
        cells = [between(ratios(found, "moe_mlp, bfloat16", label), 1) for found in (many, few)]
        assert f"| inference, {name} | {' | '.join(cells)} |" in text
    fast = [1 / speedup for speedup in ratios(many, "moe_mlp, rowwise", "moe_mlp, rowwise, fast_accumulation")]
    assert f"it takes {between(fast, 2)} of the time with thousands of tokens" in text

    training = fp8_records("nvidia-h200", "fp8.json", "training")
    for name, label in (
        ('`compute="fp8_rowwise"`, `fast_accumulation=True`', "step, fp8_rowwise, fast_accumulation"),
        ('`compute="fp8_rowwise"`', "step, fp8_rowwise"),
        ('`compute="fp8_block"`', "step, fp8_block"),
    ):
        assert f"| training, {name} | {between(ratios(training, 'step, bfloat16', label), 1)} |" in text
        before = between(ratios(training, "step, bfloat16", f"{label}, weights quantised beforehand"), 1)
        assert f"| training within `quantize_once`, {name} | {before} |" in text
    rowwise, blockwise = (
        between([1 / ratio for ratio in ratios(training, "step, bfloat16", f"quantize_weight for {name}")], 2)
        for name in ("fp8_rowwise", "fp8_block")
    )
    times = f'{rowwise} of a step in bfloat16 for `"fp8_rowwise"`, and {blockwise} for `"fp8_block"`'
    assert f"plus 1/n of quantising both weights: {times}" in text
    for gpu, name in itertools.product(("nvidia-h200", "nvidia-h100-80gb-hbm3"), ("fp8.json", "fp8-load.json")):
        for record in fp8_records(gpu, name, "training"):
            us, large = record["us"], record["case"].startswith(("mixtral", "dsv3"))
            target, microbatches = (1.25, 4) if large else (1.1, 8)
            each = us["step, fp8_rowwise, fast_accumulation, weights quantised beforehand"]
            assert us["step, bfloat16"] / (each + us["quantize_weight for fp8_rowwise"] / microbatches) > target
    h100: dict[bool, list[str]] = {False: [], True: []}
    for name in ("fp8.json", "fp8-load.json"):
        found = fp8_records("nvidia-h100-80gb-hbm3", name, "training")
        steps = [label for label in found[0]["us"] if label.startswith("step, fp8")]
        for before, ranges in h100.items():
            labels = [label for label in steps if label.endswith("weights quantised beforehand") == before]
            ranges.append(between([ratio for label in labels for ratio in ratios(found, "step, bfloat16", label)], 2))
    (bursts, load), (held_bursts, held_load) = h100.values()
    assert f"On an H100 training steps in fp8 had speedups of {bursts}, and under sustained load of {load};" in text
    assert f"within `quantize_once` these were {held_bursts}, and {held_load}." in text

    rates = [
        record["quantize_gbps"]
        for record in fp8_records("nvidia-h200", "fp8.json", "product")
        if record["M"] >= 8192 and "quantize_gbps" in record
    ]
    rowwise, blockwise = (between([rate["copy"] / rate[name] for rate in rates], 2) for name in ("rowwise", "1x128"))
    assert f"quantising takes {rowwise} times as long as a copy" in text
    assert f'in `"rowwise"`, and {blockwise} times as long in `"1x128"`' in text


def test_a_process_with_filled_caches_was_ready_in_time() -> None:
    """The committed measurement keeps the limits, in seconds, on the first call and on the first of each shape."""
    measured = json.loads((ROOT / "benchmarks" / "results" / "nvidia-h200" / "start_up.json").read_text())
    layer, training = measured["layer, caches filled"], measured["training, caches filled"]
    assert layer["first grouped_gemm"] < 0.6 and layer["worst of them"] < 0.25
    assert training["first step"] < 0.5 and training["first step of another T"] < 0.25
    assert not any(part[f"imports {name}"] for part in (layer, training) for name in ("helion", "torch._inductor"))


def test_counts_of_plans_in_compiling_ahead() -> None:
    text = " ".join((ROOT / "docs" / "compiling_ahead.md").read_text().split())
    name, tokens = "qwen3-30b-a3b", range(1, 8193)
    layer = ahead.requests(tokens, ahead.LayerShape(*MODELS[name]), targets.KNOWN["h200"])
    assert f"has {len(layer)} plans and" in text
    training, forward = (len(ahead.collect(ahead._calls(name, tokens, training))) for training in (True, False))
    assert f"makes {training} plans: " in text
    assert f"without `--training`, {forward}." in text


def blocks(page: Path, language: str) -> list[str]:
    """Return the blocks in a language that are not marked as fragments."""
    found = [(mark, code) for mark, name, code in FENCE.findall(page.read_text()) if name == language]
    return [code for mark, code in found if not mark.startswith("<!-- fragment")]


def of_page(page: Path) -> str:
    return str(page.relative_to(ROOT))


PRINTED = {
    "README.md": "[[300, 256], [0, 256], [17, 256], [1, 256]]\n",
    "docs/products.md": "[8, 128, 64] [1024, 64] [[192, 320], [256, 448]]\n",
}


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=of_page)
def test_python_blocks_run(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Each runs separately, as if pasted into a file; in this process, unless it changes the environment."""
    if page.stem == "transformers":
        pytest.importorskip("transformers")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("HELION_FORCE_AUTOTUNE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for block in blocks(page, "python"):
        if "os.environ" not in block:
            exec(compile(block, page.name, "exec"), {"__name__": "__main__"})
            continue
        file = tmp_path / "block.py"
        file.write_text(block)
        env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": python_path()}
        done = subprocess.run([sys.executable, file], env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
    assert capsys.readouterr().out == PRINTED.get(of_page(page), "")


@pytest.mark.parametrize("page", PAGES, ids=of_page)
def test_fragments_are_python(page: Path) -> None:
    """Each fragment states why it is one."""
    for mark, language, code in FENCE.findall(page.read_text()):
        if language == "python" and mark.startswith("<!-- fragment"):
            assert mark.startswith("<!-- fragment: ")
            compile(code, page.name, "exec")


def test_commands_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `python -m moe_kernels` and `python -m benchmarks` on the pages has valid arguments."""
    ran = []
    monkeypatch.setattr(requirements, "problems", dict)
    for module, name in (
        (commands, "compile_main"),
        (commands, "cache_main"),
        (commands, "print_layer"),
        (search, "main"),
        (main, "demo"),
        (main, "info"),
    ):
        monkeypatch.setattr(module, name, lambda *_, name=name: ran.append(name) or 0)
    text = "\n".join(page.read_text() for page in PAGES)
    found = re.findall(r"python -m (moe_kernels|benchmarks) ([\w-][^`\n]*)", text)
    assert len(found) > 8
    for module, line in found:
        if module == "moe_kernels":
            assert main.main(shlex.split(line)) == 0, line
        else:
            arguments_of_benchmarks(shlex.split(line))
    assert len(set(ran)) > 4


def test_recorded_commands_are_accepted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands that the results name have valid arguments: without a GPU, only the GPU is missing."""
    pytest.importorskip("transformers")  # benchmarks.transformers_stack imports it
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(requirements, "problems", dict)
    monkeypatch.delenv("RANK", raising=False)
    for file in (ROOT / "benchmarks" / "results").rglob("*.json"):
        results = json.loads(file.read_text())
        words = shlex.split(results.get("meta", results)["command"])
        module, *arguments = words[words.index("-m") + 1 :]
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        with suppress(SystemExit):
            importlib.import_module(module if "." in module else f"{module}.__main__").main()
        assert re.search("needs a CUDA GPU|start this with: torchrun", capsys.readouterr().err), file


@pytest.mark.parametrize("page", [*PAGES, *MEASURED], ids=of_page)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"`[^`]+`", "", FENCE.sub("", page.read_text()))
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]+))?\)", text):
        if target.startswith("https://"):
            continue
        file = page.parent / target if target else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, anchor


@pytest.mark.parametrize("page", PAGES, ids=of_page)
def test_tables_have_at_most_eight_columns(page: Path) -> None:
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    assert all(line.replace("\\|", "").count("|") <= tables.SHORT + 1 for line in rows)


def test_the_page_of_versions_matches_its_results() -> None:
    script = runpy.run_path(str(ROOT / ".ci" / "versions.py"))
    assert script["page"](json.loads(script["RESULTS"].read_text())) == script["PAGE"].read_text()


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 200


def test_the_reference_names_every_public_function() -> None:
    reference = ROOT / "docs" / "reference"
    index = (reference / "index.md").read_text()
    documented = re.findall(
        r"^::: (\S+)$", "\n".join(page.read_text() for page in reference.glob("*.md")), re.MULTILINE
    )
    for name in moe_kernels.__all__:
        assert f"| `{name}(" in index, name
        assert any(path.endswith(f".{name}") for path in documented), name


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_each_example_is_named_on_a_page(example: Path) -> None:
    assert any(f"examples/{example.name}" in page.read_text() for page in PAGES)
