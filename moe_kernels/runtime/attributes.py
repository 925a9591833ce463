"""Temporary replacement of attributes of modules and classes, mostly Triton's, Helion's and PyTorch's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Held while Helion or Triton's interpreter runs: they are not thread-safe, nor is Python 3.11's `ast`, which they use.
one_at_a_time = threading.RLock()


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
