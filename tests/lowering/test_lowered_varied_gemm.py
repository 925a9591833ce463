"""The compiled code of the varied kernel: WGMMA, wide asynchronous loads, no spills, shared memory that fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sm90 import H200, SHARED_MEMORY, TRITON, TRITON_3_9, empty, lowered, requests, waits_for_each

from moe_kernels import rules
from moe_kernels.ops import batched
from moe_kernels.rules import varied
from moe_kernels.runtime import cache, targets

Shapes = list[tuple[int, int, int]]


def compiled(
    monkeypatch: pytest.MonkeyPatch,
    shapes: Shapes,
    *,
    dtype: torch.dtype = torch.float16,
    columns: tuple[bool, bool] = (False, False),
    choice: rules.Choice | None = None,
    stack: int = 0,
) -> dict[str, Any]:
    """Return the report of the launch; `stack` is the most bytes per thread that it may spill."""
    asked_for: list[Any] = []
    monkeypatch.setattr(cache, "find", lambda *call: asked_for.extend(requests(*call)))
    monkeypatch.setattr(batched, "_on_device", lambda values, *_: empty(len(values), dtype=torch.int64))
    monkeypatch.setattr(targets, "of_tensor", lambda _: H200)
    if choice is not None:
        monkeypatch.setattr(varied, "choose", lambda _: choice)

    def operand(rows: int, cols: int, transposed: bool) -> torch.Tensor:
        return empty(cols, rows, dtype=dtype).t() if transposed else empty(rows, cols, dtype=dtype)

    A = [operand(M, K, columns[0]) for M, _, K in shapes]
    B = [operand(K, N, columns[1]) for _, N, K in shapes]
    batched.VariedLaunch(A, B, [operand(M, N, False) for M, N, _ in shapes])
    (request,) = asked_for
    report = lowered(request)
    assert report["shared"] <= SHARED_MEMORY
    assert report["stack"] <= stack
    assert report["grid"][0] % 132 == 0
    return report


@pytest.mark.parametrize(
    ("size", "columns"),
    [
        (128, (False, False)),
        (256, (False, False)),
        (512, (False, False)),
        (1024, (False, False)),
        (1024, (True, False)),
        (1024, (False, True)),
    ],
    ids=str,
)
def test_squares(monkeypatch: pytest.MonkeyPatch, size: int, columns: tuple[bool, bool]) -> None:
    report = compiled(monkeypatch, [(size, size, size)] * 4, columns=columns)
    assert (report["wgmma"] > 0) == (size > 128)  # tiles of 32 x 32 are too small for it
    # Both operands are loaded once per stage in flight and once in the loop.
    assert report["cp_async"] >= 6


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_float32(monkeypatch: pytest.MonkeyPatch, columns: bool) -> None:
    """Tensor cores multiply it in parts if B is stored as [N, K]; each product is waited for."""
    stack = (16 if TRITON_3_9 else 8 if TRITON == (3, 8) else 0) if columns else 0
    report = compiled(monkeypatch, [(512, 768, 1024)] * 4, dtype=torch.float32, columns=(False, columns), stack=stack)
    assert (report["wgmma"] > 0) == columns
    assert report["mma_sync"] == 0 and waits_for_each(report["ptx"])


@pytest.mark.parametrize(("blocks", "of"), varied._BLOCKS.items(), ids=str)
def test_blocks_of_the_rule(monkeypatch: pytest.MonkeyPatch, blocks: tuple[int, int], of: varied._Blocks) -> None:
    for options in dict.fromkeys((of.few, of.many)):
        report = compiled(monkeypatch, [(512, 512, 512)] * 4, choice=varied.make(4, *blocks, *options))
        workers = options[-1]
        assert report["grid"][0] == 132 * workers
        assert report["shared"] <= 233_472 // workers - 1024  # an SM's share per program, less 1 KiB
        assert report["regs"] * 32 * options[1] * workers <= 1 << 16


@pytest.mark.parametrize(
    ("shapes", "dtype"),
    [
        ([(97, 33, 65), (1, 1, 1)], torch.bfloat16),
        ([(97, 33, 65), (1, 1, 1)], torch.float32),
        ([(100, 20, 12)] * 3, torch.bfloat16),
        ([(8 * p, 264, 520) for p in range(1, 40)], torch.float32),
    ],
    ids=["odd, bfloat16", "odd, float32", "multiples of 4", "many"],
)
def test_other_problems(monkeypatch: pytest.MonkeyPatch, shapes: Shapes, dtype: torch.dtype) -> None:
    report = compiled(monkeypatch, shapes, dtype=dtype)
    # Loads of less than 4 bytes are not asynchronous.
    assert (report["cp_async"] > 0) == (shapes[0][0] != 97 or dtype == torch.float32)
