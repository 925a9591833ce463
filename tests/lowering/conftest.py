"""These tests make torch report a GPU, so ../test_lowering.py starts them in separate processes."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

if os.environ.get("MOE_KERNELS_LOWERING") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def generated_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Helion generates code for example extents. PyTorch records what it takes for granted about them: only that they
    are 1, or not, may be among it, because the key of generated code (`_Example.dynamic`) says nothing else of them.
    Nor does a user see warnings of Helion or PyTorch about it.
    """
    import helion
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    bound_kernel = sys.modules[helion.Kernel.__module__].BoundKernel
    generate, relations, warned = bound_kernel.to_triton_code, set(), []

    def to_triton_code(self: Any, *args: Any, **options: Any) -> Any:
        with warnings.catch_warnings(record=True) as found:
            code = generate(self, *args, **options)
        warned.extend(f"{self.kernel.name}: {warning.message}" for warning in found)
        for guard in self.env.shape_env.guards:
            extents = [x for x in guard.expr.free_symbols if symbol_is_type(x, SymT.SIZE)]
            if extents and str(guard.expr) not in (f"Eq({extents[0]}, 1)", f"Ne({extents[0]}, 1)"):
                relations.add(f"{self.kernel.name}: {guard.expr}")
        return code

    monkeypatch.setattr(bound_kernel, "to_triton_code", to_triton_code)
    yield
    assert not relations
    assert not warned
