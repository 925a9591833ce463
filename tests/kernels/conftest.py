"""Tests of the kernels themselves, on a GPU or, started by test_interpreter.py, on a CPU in Triton's interpreter.

New memory is filled with NaN here, so that an output element that a kernel does not write is detected.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton

from moe_kernels import requirements
from moe_kernels.rules.config import Config
from moe_kernels.runtime import cache, interpreter, torch_internals
from moe_kernels.runtime.attributes import one_at_a_time
from moe_kernels.runtime.signature import Operator

INTERPRETED = requirements.interpreted()
if not INTERPRETED and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]

_empty_strided_cuda = torch_internals.empty_strided_cuda


def _poisoned(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    out: torch.Tensor = _empty_strided_cuda(shape, strides, dtype)
    return out.fill_(torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max)


if _empty_strided_cuda is not None:
    torch_internals.empty_strided_cuda = _poisoned  # before any plan: its function holds the allocator


_GUARD = 4096  # bytes in front of each allocation of a plan, and behind it; in the interpreter only
_guarded: list[tuple[torch.Tensor, int]] = []  # memory with both guards, and the bytes between them


def _between_guards(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if all(shape) else 0
    memory = torch.full((extent * dtype.itemsize + 2 * _GUARD,), 0xFF, dtype=torch.uint8)
    _guarded.append((memory, extent * dtype.itemsize))
    return torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), _GUARD // dtype.itemsize, shape, strides)


_interpret = interpreter._interpret
# Of the running kernel, if it is checked, the addresses of its arguments: the first of each, and that behind the last.
_running: list[list[tuple[int, int]]] = []


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    begin = storage.data_ptr()
    for memory, size in _guarded:
        if memory.untyped_storage().data_ptr() == begin:
            return begin + _GUARD, begin + _GUARD + size
    return begin, begin + storage.nbytes()


def _interpret_in_bounds(function: Any, grid: tuple[int, ...], *arguments: Any) -> None:
    """Launch a kernel so that it fails where it reads outside of its arguments, even if it does not use what it reads.

    The kernel of varied products is not checked, since it reads addresses in a table.
    """
    with one_at_a_time:
        if "varied" not in function.__name__:
            _running.append([_span(x) for x in arguments if isinstance(x, torch.Tensor) and x.numel()])
        try:
            _interpret(function, grid, *arguments)
        finally:
            _running.clear()


def _load_in_bounds(pointers: Any, mask: Any, *rest: Any) -> Any:
    for spans in _running:
        read = pointers.data[np.broadcast_to(mask.data.astype(bool), pointers.data.shape)]
        inside = [(begin <= read) & (read < end) for begin, end in spans]
        assert not read.size or np.logical_or.reduce(inside).all(), "read outside of all arguments"
    return _load(pointers, mask, *rest)


if INTERPRETED:
    torch_internals.allocator = lambda device: _between_guards
    interpreter._interpret = _interpret_in_bounds
    _load = triton.runtime.interpreter.interpreter_builder.create_masked_load
    triton.runtime.interpreter.interpreter_builder.create_masked_load = _load_in_bounds


@pytest.fixture(autouse=True)
def _nothing_is_written_beside_allocations() -> Iterator[None]:
    _guarded.clear()
    yield
    for memory, size in _guarded:
        guards = torch.cat((memory[:_GUARD], memory[_GUARD + size :]))
        assert (guards == 0xFF).all(), f"written beside an allocation of {size} bytes"


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
    """Fix the random numbers: near a discontinuity, such as the limit of a clamp, rounding can change the side."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _leave_memory_to_other_workers() -> Iterator[None]:
    """Free PyTorch's cached memory, which other processes on the same GPU cannot use; tests/guarded.py caches none."""
    yield
    if not INTERPRETED and "MOE_KERNELS_GUARD" not in os.environ and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _poison_uninitialised_memory() -> Iterator[None]:
    """Fill memory that PyTorch itself allocates."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def fresh_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Create plans anew and store them for this test only, for tests that change what a plan depends on."""
    monkeypatch.setenv("MOE_KERNELS_CACHE_DIR", str(tmp_path / "plans"))
    monkeypatch.setenv("MOE_KERNELS_CACHE_READONLY", "")
    with cache.isolated():
        yield


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Start without plans; return a function that makes calls of the named operator fail unless they are repeats."""
    call = cache.call

    def only(name: str) -> None:
        def refuse(operator: Operator, *rest: Any) -> Any:
            assert operator.name != name, "no repeat"
            return call(operator, *rest)

        monkeypatch.setattr(cache, "call", refuse)

    monkeypatch.setattr(torch_internals, "on_current_device", lambda tensor: True)
    with cache.isolated():
        yield only


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, let kernels for one token use few programs, since many are slow, and several loop rounds."""
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
    """Let PyTorch's setting allow tf32 for products of float32."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before
