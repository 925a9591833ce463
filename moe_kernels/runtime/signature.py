"""The signature of a call, which determines its plan, and the numbers of rows that share a signature.

A plan serves all numbers of rows of a class. The classes are those that rules distinguish: powers of two of the rows
and of the mean rows per group, and the limits of a few kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_kernels.runtime.symbolic import SymbolicInt, SymbolicTensor

FEW_TOKENS = 128  # up to this number, rows are moved by more programs of fewer columns each
RANK_UP_TO = 1024  # the most slots that one launch ranks
_LIMITS = (FEW_TOKENS, RANK_UP_TO)
MAX_ROWS = 2**30 - 1  # the sum of two row numbers is an int32

Tensors = Sequence[Tensor | None]


class Counts(NamedTuple):
    """The numbers of rows in a call: `rows` is the first extent of the first of `Operator.rows`."""

    rows: int
    others: tuple[int, ...] = ()  # proportional to `rows`, and used by rules as well, such as slots beside tokens
    groups: int = 1  # among which the largest of these counts is shared


def _rows_of_first_input(tensors: Any, options: Any) -> Counts:
    return Counts(tensors[0].size(0))


@dataclass(frozen=True)
class Operator:
    """An operator that is run by plans."""

    name: str
    planner: str  # the module of `kernels` that has `plan_<name>(builder, tensors, options)`
    inputs: tuple[str, ...]  # of which the first is never None
    rows: tuple[str, ...]  # inputs whose first extent changes from call to call
    counts: Callable[[Any, Any], Counts] = _rows_of_first_input  # from (tensors, options)

    @functools.cached_property
    def has_rows(self) -> tuple[bool, ...]:
        return tuple(name in self.rows for name in self.inputs)

    @functools.cached_property
    def multiplied(self) -> tuple[bool, ...]:
        """Which inputs tensor cores may multiply, in tf32 if they are float32 and PyTorch's settings allow it."""
        return tuple(
            not name.startswith(("scales_", "b_")) and not name.endswith(("bias", "topk_weights", "logits"))
            for name in self.inputs
        )


_HALVES = {torch.float16, torch.bfloat16}  # a product of the two is one of float32


def extent_class(n: int) -> tuple[int, ...]:
    """The class of a number of rows, as rules distinguish it."""
    return n.bit_length(), n > FEW_TOKENS, n > RANK_UP_TO


def extent_bounds(n: int) -> tuple[int, int]:
    """The smallest and the largest number of the class of `n`."""
    low, high = (1 << n.bit_length()) >> 1, (1 << n.bit_length()) - 1
    for limit in _LIMITS:
        low, high = (max(low, limit + 1), high) if n > limit else (low, min(high, limit))
    return low, high


def rows_class(counts: Counts) -> tuple[int, ...]:
    """The class of the rows of a call, as rules distinguish it."""
    rows, others, groups = counts
    found, largest = extent_class(rows), rows
    for n in others:
        found, largest = found + extent_class(n), max(largest, n)
    return (*found, (largest // max(groups, 1)).bit_length())


def rows_bounds(counts: Counts) -> tuple[int, int]:
    """The smallest and the largest number of rows of a call with the same `rows_class`."""
    n, groups = counts.rows, max(counts.groups, 1)
    if n == 0:
        return 0, 0
    low, high = extent_bounds(n)
    bounds = [(c, *extent_bounds(c)) for c in counts.others if c]  # 0 for all numbers of rows, if for one
    largest = max((n, *counts.others))
    bits = (largest // groups).bit_length()
    bounds.append((largest, groups * (1 << bits >> 1), (groups << bits) - 1))
    for c, c_low, c_high in bounds:
        low, high = max(low, -(-c_low * n // c)), min(high, c_high * n // c)
    return low, high


def signature(operator: Operator, tensors: Tensors, options: Any) -> tuple[Any, ...]:
    """What a plan depends on in a call, including the devices of the tensors. Rows appear by their class alone.

    It does not contain tuned entries (`rules.tuned_digest`), nor settings of the compilers (`store.environment`).
    Every call that is no repeat computes it; reading an attribute of a tensor takes about 0.1 us.
    """
    key: list[Any] = [operator.name, options, rows_class(operator.counts(tensors, options))]
    dtypes = set()
    for tensor, has_rows, multiplied in zip(tensors, operator.has_rows, operator.multiplied, strict=True):
        if tensor is None:
            key.append(None)
            continue
        dtype, shape = tensor.dtype, tensor.shape
        if multiplied:
            dtypes.add(dtype)
        key += (
            dtype,
            shape[1:] if has_rows else shape,
            tensor.stride(),
            tensor.data_ptr() % 16 == 0,
            tensor.get_device(),
        )
    if torch.float32 in dtypes or dtypes >= _HALVES:
        key += ["tf32", torch.backends.cuda.matmul.fp32_precision == "tf32"]  # "none", the default, means "ieee"
    return tuple(key)


def depends_on_tf32(key: tuple[Any, ...]) -> bool:
    """Whether a plan with this signature depends on PyTorch's setting for products of float32."""
    return "tf32" in key


def portable(key: tuple[Any, ...]) -> str:
    """A signature as text, without device indices, which may differ in another process."""
    kept = [part for part in key if type(part) is not int]
    return repr([list(part) if isinstance(part, torch.Size) else part for part in kept])


def symbolic(operator: Operator, tensors: Tensors, options: Any) -> tuple[SymbolicTensor | None, ...]:
    """Return the symbolic tensors that a planner gets for the tensors of a call."""
    counts = operator.counts(tensors, options)
    low, high = rows_bounds(counts)
    made: list[SymbolicTensor | None] = []
    for i, (tensor, has_rows) in enumerate(zip(tensors, operator.has_rows, strict=True)):
        if tensor is None:
            made.append(None)
            continue
        shape: list[Any] = list(tensor.shape)
        if has_rows and shape[0] > 0:
            n, rows = shape[0], max(counts.rows, 1)
            shape[0] = SymbolicInt.extent(i, 0, low * n // rows, -(-high * n // rows))
        aligned, device = tensor.data_ptr() % 16 == 0, tensor.device.type
        made.append(SymbolicTensor(i, tensor.dtype, tuple(shape), tensor.stride(), aligned, device=device))
    return tuple(made)
