"""Helpers for tests that start processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))  # workers of this pytest run
ROOT = Path(__file__).resolve().parents[1]


def python_path(*first: Path) -> str:
    """Return PYTHONPATH with `first` and the checkout before its present entries, which may include Helion."""
    return os.pathsep.join(filter(None, (*map(str, first), str(ROOT), os.environ.get("PYTHONPATH"))))


def run_tests(files: list[Path], environment: dict[str, str]) -> None:
    """Run these test files in a separate pytest process and assert that they pass.

    The process exits without freeing compiled objects, which would take 20 s.
    """
    program = "import os, sys, pytest; code = pytest.main(); sys.stdout.flush(); sys.stderr.flush(); os._exit(code)"
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    run = [sys.executable, "-c", program, *options, *map(str, files)]
    result = subprocess.run(run, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


def stored_in(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the payload and the code in a file of the store."""
    _, line, code = path.read_bytes().split(b"\n", 2)
    return json.loads(line), code


def forget_store() -> None:
    """Forget the environment's name, checked folders and given warnings, as in a new process."""
    from moe_kernels.runtime import store  # not before OMP_NUM_THREADS is set, which PyTorch reads once

    for known in (store._versions, store._check_folder, store._is_of_user_alone):
        known.cache_clear()
    store._warned.clear()
