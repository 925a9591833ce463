"""The pages' tables of measurements, and the plots beside them, are those that their JSON gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_kernels.bench import report

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


@pytest.mark.parametrize("page", report.PAGES, ids=str)
def test_tables_and_plots_match_the_results(page: Path) -> None:
    assert "<!-- table: " in (ROOT / page).read_text()
    assert not report.write_page(ROOT / page, check=True), "run `python -m moe_kernels.bench.report`"


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
