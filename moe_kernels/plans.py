"""What has been settled for a kind of call, kept until there are very many kinds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor

_T = TypeVar("_T")
_MOST = 4096
_every: list[Plans[Any]] = []


class Plans(dict[tuple[Any, ...], _T]):
    """By everything that a plan depends on: the plan. It empties itself before it holds more than 4096."""

    def __init__(self) -> None:
        super().__init__()
        self.recent: tuple[Any, ...] = ()  # what is looked at first; not kept by `set_aside`
        _every.append(self)

    def clear(self) -> None:
        self.recent = ()
        super().clear()

    def __setitem__(self, key: tuple[Any, ...], plan: _T) -> None:
        if len(self) >= _MOST:
            self.clear()
        super().__setitem__(key, plan)


def kind(tensor: Tensor | None) -> tuple[Any, ...] | None:
    """What compiled code depends on of a tensor whose extents, if they matter, are a part of the key."""
    return None if tensor is None else (tensor.dtype, tensor.stride(), tensor.data_ptr() % 16)


@contextmanager
def set_aside() -> Iterator[None]:
    """In here all calls make plans of their own, as the first ones of a process."""
    kept = [dict(plans) for plans in _every]
    try:
        for plans in _every:
            plans.clear()
        yield
    finally:
        for plans in _every:  # there may be more now
            plans.clear()
        for plans, known in zip(_every, kept, strict=False):
            plans.update(known)
