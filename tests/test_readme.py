"""README.md's table of measurements is the one that its JSON gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_table_matches_the_results() -> None:
    assert subprocess.run([sys.executable, ROOT / "benchmarks/readme_table.py", "--check"]).returncode == 0
