"""Symbolic integers and tensors for planners. Their values are known only in a call.

A plan is made for a kind of call. Calls of one kind differ in the number of rows and in addresses. So an extent is an
int, or a `SymbolicInt` with bounds, and a tensor is a `SymbolicTensor`, which has no memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import add, floordiv, mul, sub
from typing import Any

import torch

INT32_MAX = 2**31 - 1

_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {"+": add, "-": sub, "*": mul, "//": floordiv}


def _operator(op: str) -> Callable[[Any, Any], SymbolicInt]:
    return lambda self, other: _operation(op, self, other)


@dataclass(frozen=True, eq=False)
class SymbolicInt:
    """`("extent", i, dim)`, an extent of a plan's i-th input, or `(operation, a, b)`, within `least` and `most`.

    Arithmetic returns another one. Comparing raises TypeError, because a plan must not depend on the value.
    """

    op: str
    args: tuple[Any, Any]
    least: int
    most: int

    @classmethod
    def extent(cls, tensor: int, dim: int, least: int, most: int) -> SymbolicInt:
        return cls("extent", (tensor, dim), least, most)

    __add__, __sub__, __mul__, __floordiv__ = (_operator(op) for op in _OPERATIONS)
    __radd__, __rmul__ = __add__, __mul__

    def __eq__(self, other: object) -> bool:
        raise TypeError(f"a plan cannot depend on the value of {self}")

    def __bool__(self) -> bool:
        raise TypeError(f"a plan cannot depend on the value of {self}")

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return text(self, lambda i, dim: f"extent({i}, {dim})")

    def to_json(self) -> list[Any]:
        return [self.op, *(x.to_json() if isinstance(x, SymbolicInt) else x for x in self.args)]


def _operation(op: str, a: Any, b: Any) -> SymbolicInt:
    for x in (a, b):
        if not isinstance(x, SymbolicInt) and (type(x) is not int or x < 0):
            raise TypeError(f"{op}: expected an integer of at least 0, got {x!r}")
    if op == "*" and 1 in [x for x in (a, b) if type(x) is int]:
        return b if type(a) is int else a
    least_first = (least(b), most(b)) if op not in ("-", "//") else (most(b), least(b))
    bounds = [_OPERATIONS[op](f(a), x) for f, x in zip((least, most), least_first, strict=True)]
    return SymbolicInt(op, (a, b), *bounds)


def least(n: Any) -> int:
    """The smallest value that `n` can have."""
    return n.least if isinstance(n, SymbolicInt) else int(n)


def most(n: Any) -> int:
    """The largest value that `n` can have."""
    return n.most if isinstance(n, SymbolicInt) else int(n)


def text(n: Any, extent: Callable[[int, int], str]) -> str:
    """Return the Python expression of `n`, in which `extent` names the extents."""
    if not isinstance(n, SymbolicInt):
        return str(int(n))
    if n.op == "extent":
        return extent(*n.args)
    return f"({text(n.args[0], extent)} {n.op} {text(n.args[1], extent)})"


def int_from_json(value: Any, inputs: int) -> Any:
    """Return an int, or the SymbolicInt whose `to_json` gave `value`, without its bounds, in a plan of some `inputs`.

    Raises:
        ValueError: `value` is neither an integer nor a valid operation of `SymbolicInt` on extents of these inputs.
    """
    if type(value) is int:
        return value
    if isinstance(value, list) and len(value) == 3:
        op, a, b = value
        if op == "extent" and type(a) is type(b) is int and 0 <= a < inputs and 0 <= b < 64:
            return SymbolicInt.extent(a, b, 0, 0)
        if isinstance(op, str) and op in _OPERATIONS:
            return SymbolicInt(op, (int_from_json(a, inputs), int_from_json(b, inputs)), 0, 0)
    raise ValueError(f"no integer expression: {value!r}")


def contiguous_strides(shape: Sequence[Any]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, as in PyTorch. All extents except the first must be integers."""
    return tuple(math.prod(max(n, 1) for n in shape[dim + 1 :]) for dim in range(len(shape)))


def lies_transposed(matrices: torch.Tensor | SymbolicTensor) -> bool:
    """Whether `matrices [.., a, b]` are stored as `[.., b, a]`."""
    return matrices.stride(-2) == 1 != matrices.stride(-1)


@dataclass(frozen=True)
class SymbolicTensor:
    """A tensor of a plan: a view of a variable's memory that begins `offset` bytes into it.

    A planner takes views of it as of a `torch.Tensor`, and Helion's generated host functions accept it as one.
    """

    variable: int  # the plan's numbering: inputs first
    dtype: torch.dtype
    shape: tuple[Any, ...]  # int or SymbolicInt
    strides: tuple[Any, ...]  # int, or SymbolicInt if the tensor is accessed by pointers
    aligned: bool  # to 16 bytes
    offset: int = 0  # in bytes from the variable's address; below 0 only for `tma_clipped`
    tma_clipped: bool = False  # read or written out of bounds on purpose; TMA returns zeros, or writes nothing
    few_groups: bool = False  # kernels are compiled for a first extent of min(2, n), not n
    example_shape: tuple[Any, ...] | None = None  # the shape that kernels are compiled for, if not `shape`
    device: str = field(default="cuda", repr=False)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def stride(self, dim: int | None = None) -> Any:
        return self.strides if dim is None else self.strides[dim]

    def element_size(self) -> int:
        return self.dtype.itemsize

    @property
    def mT(self) -> SymbolicTensor:
        return self.transpose(-2, -1)

    def transpose(self, a: int, b: int) -> SymbolicTensor:
        shape, strides = list(self.shape), list(self.strides)
        shape[a], shape[b], strides[a], strides[b] = shape[b], shape[a], strides[b], strides[a]
        return replace(self, shape=tuple(shape), strides=tuple(strides))

    def narrow(self, dim: int, start: int, length: Any) -> SymbolicTensor:
        shape = list(self.shape)
        shape[dim] = length
        return self.as_strided(shape, self.strides, start * self.strides[dim])

    def __getitem__(self, index: tuple[Any, slice]) -> SymbolicTensor:
        """The view `[..., start::2]`. The last extent must be even."""
        _, every_other = index
        start = every_other.start or 0
        assert index[0] is Ellipsis and every_other == slice(every_other.start, None, 2)
        shape, strides = [*self.shape[:-1], self.shape[-1] // 2], [*self.strides[:-1], 2 * self.strides[-1]]
        return self.as_strided(shape, strides, start * self.strides[-1])

    def unsqueeze(self, dim: int) -> SymbolicTensor:
        shape, strides = list(self.shape), list(self.strides)
        strides.insert(dim, shape[dim] * strides[dim] if dim < len(shape) and type(shape[dim]) is int else 1)
        shape.insert(dim, 1)
        return replace(self, shape=tuple(shape), strides=tuple(strides))

    def unflatten(self, dim: int, sizes: tuple[int, int]) -> SymbolicTensor:
        outer, inner = sizes
        shape, strides = list(self.shape), list(self.strides)
        shape[dim : dim + 1] = (outer, inner)
        strides[dim : dim + 1] = (inner * strides[dim], strides[dim])
        return replace(self, shape=tuple(shape), strides=tuple(strides))

    def select(self, dim: int, index: int) -> SymbolicTensor:
        kept = [i for i in range(self.dim()) if i != dim]
        shape, strides = [self.shape[i] for i in kept], [self.strides[i] for i in kept]
        return self.as_strided(shape, strides, index * self.strides[dim])

    def flatten(self) -> SymbolicTensor:
        """Return a one-dimensional view. The tensor must be contiguous."""
        return self.as_strided([math.prod(self.shape)], [1], 0)

    def as_strided(self, shape: Sequence[Any], strides: Sequence[Any], first: int) -> SymbolicTensor:
        """The view that begins `first` elements into this one."""
        moved = first * self.element_size()
        aligned = self.aligned and moved % 16 == 0
        return replace(self, shape=tuple(shape), strides=tuple(strides), offset=self.offset + moved, aligned=aligned)

    def is_contiguous(self) -> bool:
        """Whether the strides are those of a contiguous tensor, apart from dimensions of size 1."""
        expected = contiguous_strides(self.shape)
        return all(
            most(size) <= 1 or stride == wanted
            for size, stride, wanted in zip(self.shape, self.strides, expected, strict=True)
        )


def needs_int64(*tensors: SymbolicTensor | None) -> bool:
    """Whether the offset in elements of the last element of one of `tensors` may not fit into 32 bits."""

    def last(x: SymbolicTensor) -> int:
        return sum((max(most(n), 1) - 1) * most(stride) for n, stride in zip(x.shape, x.strides, strict=True))

    return any(x is not None and last(x) > INT32_MAX for x in tensors)


def value(n: Any, extents: Sequence[Sequence[int]]) -> int:
    """Return the value of `n` for inputs of these extents."""
    if not isinstance(n, SymbolicInt):
        return int(n)
    if n.op == "extent":
        tensor, dim = n.args
        return int(extents[tensor][dim])
    return int(_OPERATIONS[n.op](*(value(x, extents) for x in n.args)))
