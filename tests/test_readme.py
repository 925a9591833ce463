"""The pages' tables of measurements, and the plots beside them, are those that their JSON gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import report

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


@pytest.mark.parametrize("page", report.PAGES, ids=str)
def test_tables_and_plots_match_the_results(page: Path) -> None:
    assert "<!-- table: " in (ROOT / page).read_text()
    assert not report.write_page(ROOT / page, check=True), "run `python -m benchmarks.report`"


def test_a_changed_table_is_noticed(tmp_path: Path) -> None:
    """And nothing is written by a check."""
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    copy = tmp_path / "README.md"
    text = README.read_text()
    changed = text.replace("| dsv3_ep_up (", "| dsv3_ep_upp (", 1)
    assert changed != text
    copy.write_text(changed)
    assert report.main([str(copy), "--check"]) == 1
    assert copy.read_text() == changed


@pytest.mark.parametrize("picture", sorted((ROOT / "benchmarks" / "results").rglob("*.png")), ids=lambda p: p.name)
def test_plots_are_small(picture: Path) -> None:
    assert picture.stat().st_size < 250_000  # most of it the names of dozens of inputs, where there are as many


def test_the_numbers_of_uniform_and_varied_groups_are_measured() -> None:
    def measured(suite: str) -> dict[tuple[str, str, str], float]:
        records = json.loads((ROOT / f"benchmarks/results/nvidia-h200/{suite}.json").read_text())["records"]
        return {(r["case"], r["timing"], r["provider"]): r["us"] for r in records}

    ours = "uniform_grouped_gemm"
    uniform, varied = measured("uniform"), measured("varied")
    rows = [
        [f"| (8, {M}, 64, {M}), {label} |"]
        + [
            f" {uniform[f'{M} x 64 x {M}', timing, provider]:.2f} |"
            for provider in (ours, f"{ours}, float32 result", "torch.bmm", "torch._grouped_mm")
        ]
        for M, label, timing in ((512, "cold", "graph"), (512, "warm", "warm"), (2048, "cold", "graph"))
    ]
    for n in (128, 256, 512, 1024):
        providers = "varied_grouped_gemm, planned", "loop of torch.mm"
        rows += [[f"| 4 x {n}^3 |", *(f" {varied[f'4 x {n}^3', 'graph', provider]:.2f} |" for provider in providers)]]
    lines = README.read_text().splitlines()
    assert all("".join(row) in lines for row in rows)


def test_the_seconds_of_start_up_are_measured() -> None:
    results = json.loads((ROOT / "benchmarks/results/nvidia-h200/start_up.json").read_text())
    states = "nothing cached", "caches filled", "compiled on a machine without a GPU"
    table = README.read_text().partition("<!-- start-up -->")[2].partition("<!-- end of start-up -->")[0]
    shown = [line.split("|")[2:-1] for line in table.strip().splitlines()[2:]]
    measured = [
        [f" {results[f'{part}, {state}'][key]:.2f} " for state in states]
        for part, keys in {
            "layer": ("first grouped_gemm", "25 calls", "worst of them"),
            "training": ("first step", "first step of another T"),
        }.items()
        for key in keys
    ]
    assert shown == measured
