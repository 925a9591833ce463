"""Attributes of other packages' modules and classes, which may be missing, and their temporary replacement."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

# Held while Helion or Triton's interpreter runs: they are not thread-safe, nor is Python 3.11's `ast`, which they use.
one_at_a_time = threading.RLock()


def module_or_empty(name: str) -> Any:
    """Return a private module of another package, or an object without attributes if this version has none."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return SimpleNamespace()


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Within the block, give attributes of `owner` these values. Names that it does not have are ignored."""
    there = [name for name in values if hasattr(owner, name)]
    before = {name: vars(owner)[name] for name in there if name in vars(owner)}  # the rest are inherited
    try:
        for name in there:
            setattr(owner, name, values[name])
        yield
    finally:
        for name in there:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)
