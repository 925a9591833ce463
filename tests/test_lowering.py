"""Runs tests/lowering in a process of its own, in which torch believes that there is an H200."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without a GPU")
def test_lowering_for_sm90() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"MOE_KERNELS_LOWERING": "1", "OMP_NUM_THREADS": "1"}
    folder = Path(__file__).parent / "lowering"
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(folder)]
    result = subprocess.run(run, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
