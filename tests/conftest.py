"""Start the longest tests first, on different workers of `--dist worksteal`, so that no worker runs them all last."""

from __future__ import annotations

import atexit
import gc
import os
import zlib

import pytest
from processes import WORKERS

# PyTorch threads that wait for cores in use by other workers take 30 times as long as a single thread.
if WORKERS > 1:
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // WORKERS))
# Compiled objects stay alive, and searching them for reference cycles takes a tenth of the tests' time.
gc.set_threshold(100_000, 50, 100)

LONGEST = ("test_interpreter.py", "test_lowering.py", "test_ahead.py")
TOGETHER = "test_ahead.py"  # its tests share a fixture that takes minutes


@pytest.hookimpl(trylast=True)  # after `-m` and `-k` have deselected tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    units: dict[str, list[pytest.Item]] = {}
    others: list[pytest.Item] = []
    for item in items:
        name = item.path.name
        kept = units.setdefault(name if name == TOGETHER else item.nodeid, []) if name in LONGEST else others
        kept.append(item)
    shares: list[list[pytest.Item]] = [[] for _ in range(WORKERS)]
    for i, unit in enumerate(units.values()):
        shares[i % WORKERS] += unit
    length = -(-len(items) // WORKERS)  # number of consecutive tests that each worker starts with
    items.clear()
    for share in shares:
        missing = max(0, length - len(share))
        items += share + others[:missing]
        del others[:missing]
    items += others


@pytest.fixture(autouse=True)
def _a_test_draws_the_same_numbers_in_every_run(request: pytest.FixtureRequest) -> None:
    import torch  # not before OMP_NUM_THREADS is set, which PyTorch reads once

    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


def pytest_sessionfinish() -> None:
    """Exempt objects from pytest's five final collections, which take seconds with many compiled objects."""
    gc.freeze()
    atexit.register(gc.unfreeze)
