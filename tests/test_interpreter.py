"""Runs tests/kernels in Triton's interpreter, in separate processes: Triton reads TRITON_INTERPRET when imported.

There are only as many processes as keep all workers busy, because each imports Helion.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from processes import WORKERS, run_tests

from moe_kernels import requirements

FILES = sorted((Path(__file__).parent / "kernels").glob("test_*.py"))
PARTS = min(WORKERS, len(FILES))


def why_not() -> str:
    """Return the problems that prevent Triton's interpreter from running here, or an empty string."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        return "; ".join(requirements.problems())


# Only these tests are skipped for this reason: numpy 2.4 breaks the interpreter of Triton 3.6.
@pytest.mark.skipif("numpy" in why_not(), reason=why_not())
@pytest.mark.parametrize("part", range(PARTS))
def test_kernels_in_the_interpreter(part: int) -> None:
    run_tests(FILES[part::PARTS], os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""})
