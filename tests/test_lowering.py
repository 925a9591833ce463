"""Runs tests/lowering in processes of their own, in which torch believes that there is an H200."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FILES = sorted((Path(__file__).parent / "lowering").glob("test_*.py"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without a GPU")
@pytest.mark.parametrize("part", range(2))
def test_lowering_for_sm90(part: int) -> None:
    files = map(str, FILES[part::2])
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"MOE_KERNELS_LOWERING": "1", "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files]
    result = subprocess.run(run, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
