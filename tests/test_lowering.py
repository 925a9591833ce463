"""Runs tests/lowering in separate processes, in which torch is made to report an H200."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from processes import WORKERS, run_tests

FILES = sorted((Path(__file__).parent / "lowering").glob("test_*.py"))
PARTS = min(WORKERS, len(FILES))


@pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without a GPU")
@pytest.mark.parametrize("part", range(PARTS))
def test_lowering_for_sm90(part: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run_tests(FILES[part::PARTS], environment | {"MOE_KERNELS_LOWERING": "1"})
