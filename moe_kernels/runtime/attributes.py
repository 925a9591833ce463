"""Attributes of modules and classes, mostly Triton's, Helion's and PyTorch's, replaced for a while."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# For Helion and Triton's interpreter. They are not made for several threads, nor is the `ast` of Python 3.11 they use.
one_at_a_time = threading.RLock()


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """In here, attributes of `owner` that it has got have these values."""
    there = [name for name in values if hasattr(owner, name)]
    before = {name: vars(owner)[name] for name in there if name in vars(owner)}  # the others are inherited
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
