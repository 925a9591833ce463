"""What a plan does in a call, as the text of one function.

A plan is functions within functions, each of which asks the same tensors for their extents and addresses again. That is
most of the host's time for a call beside the launches themselves. So a plan is called with stand-ins once, which note
what it allocates and launches, and the notes are compiled to be called from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Notes:
    """Statements, and what the names in them stand for."""

    statements: list[str] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)

    def note(self, statement: str, names: Mapping[str, Any]) -> None:
        self.statements.append(statement)
        self.names.update(names)


@dataclass(eq=False)
class Number:
    """Stands for an integer that only a call knows: what depends on its value cannot be noted."""

    text: str

    def __str__(self) -> str:
        return self.text

    def __add__(self, other: object) -> Number:
        return Number(f"({self} + {other})")

    def __mul__(self, other: object) -> Number:
        return Number(f"({self} * {other})")

    def __floordiv__(self, other: object) -> Number:
        return Number(f"({self} // {other})")

    def __or__(self, other: object) -> Number:
        return Number(f"({self} | {other})")

    __radd__ = __add__
    __rmul__ = __mul__

    def __eq__(self, other: object) -> bool:
        raise TypeError(f"{self} is not known yet")

    def __bool__(self) -> bool:
        raise TypeError(f"{self} is not known yet")


@dataclass(eq=False)
class StandIn:
    """Stands for a tensor, of which a plan may ask how many rows it has, and for other memory where it lies."""

    name: str
    rows: Number
    notes: Notes

    @property
    def shape(self) -> tuple[Number]:
        return (self.rows,)

    @property
    def pointer(self) -> str:
        return f"{self.name}_pointer"

    @property
    def asks_pointer(self) -> str:
        """The statement that has to come before `pointer` is used."""
        return f"{self.pointer} = {self.name}.data_ptr()"

    def new_empty(self, shape: tuple[Number, int], dtype: torch.dtype) -> StandIn:
        """For memory of so many rows and columns; in the notes, `empty_strided` is what allocates it."""
        rows, columns = shape
        new = StandIn(f"new{len(self.notes.statements)}", rows, self.notes)
        memory = f"{new.name} = empty_strided(({rows}, {columns}), ({columns}, 1), {new.name}_dtype)"
        self.notes.note(f"{memory}; {new.asks_pointer}", {f"{new.name}_dtype": dtype})
        return new


def define(signature: str, statements: Sequence[str], names: Mapping[str, Any]) -> Callable[..., Any]:
    """The function `def signature: statements`, where `names` are known."""
    known = dict(names)
    exec("\n    ".join([f"def {signature}:", *statements]), known)
    made: Callable[..., Any] = known.pop(signature.partition("(")[0])  # or it would hold itself
    return made
