"""The tests of the kernels themselves: on a GPU, or in Triton's interpreter on a CPU (test_interpreter.py starts that).

Here new memory is filled with NaN, so an output element that a kernel forgets shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_kernels import requirements
from moe_kernels.rules.config import Config
from moe_kernels.runtime import cache, torch_internals
from moe_kernels.runtime.signature import Operator

INTERPRETED = requirements.interpreted()
if not INTERPRETED and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]

_empty_strided_cuda = torch_internals.empty_strided_cuda


def _poisoned(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    out: torch.Tensor = _empty_strided_cuda(shape, strides, dtype)
    return out.fill_(torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max)


if _empty_strided_cuda is not None:
    torch_internals.empty_strided_cuda = _poisoned  # before there is a plan: its function holds the allocator


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
def _same_numbers_each_time() -> None:
    """A number beside a discontinuity, such as the limit of a clamp, may be rounded to its other side."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _leave_memory_to_other_workers() -> Iterator[None]:
    """Processes that share a GPU cannot use what PyTorch keeps in another."""
    yield
    if not INTERPRETED and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _poison_uninitialised_memory() -> Iterator[None]:
    """What PyTorch itself allocates, and in the interpreter plans too."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def fresh_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans are made anew, and kept for this test alone: for tests that change what a plan depends on."""
    monkeypatch.setenv("MOE_KERNELS_CACHE_DIR", str(tmp_path / "plans"))
    monkeypatch.setenv("MOE_KERNELS_CACHE_READONLY", "")
    with cache.set_aside():
        yield


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Without plans at first. Once it is called with an operator's name, calls of this fail unless they are replays."""
    call = cache.call

    def only(name: str) -> None:
        def refuse(operator: Operator, *rest: Any) -> Any:
            assert operator.name != name, "no replay"
            return call(operator, *rest)

        monkeypatch.setattr(cache, "call", refuse)

    monkeypatch.setattr(torch_internals, "on_current_device", lambda tensor: True)
    with cache.set_aside():
        yield only


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the kernels for one token in the interpreter, which takes long for many; and some rounds of their loops."""
    if not INTERPRETED:
        return
    from moe_kernels.kernels import one_token  # imports Helion

    chosen = one_token._config

    def config(*args: Any, **options: Any) -> Config:
        block, _ = chosen(*args, **options).config["block_sizes"]
        return Config(block_sizes=[min(4, block), 32], num_warps=4)

    monkeypatch.setattr(one_token, "_config", config)


@pytest.fixture
def tf32(fresh_plans: None) -> Iterator[None]:
    """PyTorch's setting allows tf32 for products of float32."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before
