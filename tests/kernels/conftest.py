"""The tests of the kernels themselves: on a GPU, or in Triton's interpreter on a CPU (test_interpreter.py starts that).

Here `torch.empty` and `allocate.empty` are filled with NaN, so an output element that a kernel forgets shows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from moe_kernels import allocate

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/kernels/" not in str(item.path):
            continue
        if INTERPRETED and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        elif not INTERPRETED:
            item.add_marker("gpu")


@pytest.fixture
def device() -> str:
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture(autouse=True)
def _poison_uninitialised_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    take = allocate._empty_strided_cuda

    def poisoned(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        out: torch.Tensor = take(shape, strides, dtype)
        return out.fill_(torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max)

    monkeypatch.setattr(allocate, "_empty_strided_cuda", poisoned)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
