"""What takes minutes begins first, so that no worker of `-n 2 --dist worksteal` waits for it alone at the end."""

from __future__ import annotations

import pytest

LONGEST = ("test_interpreter.py", "test_lowering.py", "test_ahead.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)
