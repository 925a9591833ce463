"""For tests that start processes of their own."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def python_path(*first: Path) -> str:
    """PYTHONPATH with these folders and the checkout before what it has, by which Helion may be found."""
    return os.pathsep.join(filter(None, (*map(str, first), str(ROOT), os.environ.get("PYTHONPATH"))))
