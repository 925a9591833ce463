"""What has been settled for a kind of call, kept until there are very many kinds."""

from __future__ import annotations

from typing import Any, TypeVar

_T = TypeVar("_T")
_MOST = 4096


class Plans(dict[tuple[Any, ...], _T]):
    """By everything that a plan depends on: the plan. It empties itself before it holds more than 4096."""

    def __setitem__(self, key: tuple[Any, ...], plan: _T) -> None:
        if len(self) >= _MOST:
            self.clear()
        super().__setitem__(key, plan)
