"""Plans as data: symbolic integers, signatures, JSON, the generated function, the plan cache and its repeats."""

from __future__ import annotations

import ast
import errno
import gc
import importlib.util
import itertools
import json
import math
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from moe_kernels import grouped_gemm, moe_mlp, quantize, rules
from moe_kernels.ops.products import GROUPED_GEMM
from moe_kernels.runtime import attributes, cache, targets, torch_internals
from moe_kernels.runtime.emit import _bmm, emit, emit_repeat
from moe_kernels.runtime.launch import DirectLauncher, TritonLauncher
from moe_kernels.runtime.plan import Alloc, Call, Constant, Descriptor, Launch, Plan, Pointer, plan_from_json
from moe_kernels.runtime.signature import (
    MAX_ROWS,
    Counts,
    Operator,
    depends_on_tf32,
    portable,
    rows_bounds,
    rows_class,
    signature,
    symbolic,
)
from moe_kernels.runtime.symbolic import (
    INT32_MAX,
    SymbolicInt,
    SymbolicTensor,
    int_from_json,
    least,
    lies_transposed,
    most,
    needs_int64,
    text,
)
from moe_kernels.runtime.symbolic import value as value_of
from moe_kernels.runtime.torch_internals import autocast, can_bypass_dispatcher, eager

CPU = torch.device("cpu")
Number = tuple[Any, int]  # an int or a SymbolicInt, and its value in a call

# Symbolic integers and tensors


@st.composite
def extents(draw: st.DrawFn) -> Number:
    low, value, high = sorted(draw(st.lists(st.integers(0, 2000), min_size=3, max_size=3)))
    return SymbolicInt.extent(value, 1, low, high), value  # `x[value][1]` below


def operations(numbers: st.SearchStrategy[Number]) -> st.SearchStrategy[Number]:
    known = (st.integers(0, 1) | st.integers(0, 300)).map(lambda n: (n, n))
    either = st.tuples(numbers, numbers | known) | st.tuples(known, numbers)

    def total(pair: tuple[Number, Number]) -> Number:
        return pair[0][0] + pair[1][0], pair[0][1] + pair[1][1]

    def product(pair: tuple[Number, Number]) -> Number:
        return pair[0][0] * pair[1][0], pair[0][1] * pair[1][1]

    def quotient(pair: tuple[Number, Number]) -> Number:
        return pair[0][0] // (pair[1][0] + 1), pair[0][1] // (pair[1][1] + 1)

    def difference(pair: tuple[Number, Number]) -> Number:
        (n, value), (m, other) = pair
        return n + most(m) - m, value + most(m) - other

    return st.one_of(
        either.map(total),
        either.map(product),
        st.tuples(numbers, numbers | known).map(quotient),
        st.tuples(numbers, numbers | known).map(difference),
    )


def evaluated(n: Any) -> int:
    value: int = eval(text(n, lambda i, dim: f"({i} * {dim})"))
    return value


@given(st.recursive(extents(), operations, max_leaves=6))
def test_arithmetic_and_bounds_are_those_of_integers(number: Number) -> None:
    n, value = number
    assert least(n) <= value <= most(n)
    assert evaluated(n) == value


@given(st.recursive(st.integers(0, 63).map(lambda i: (SymbolicInt.extent(i, 1, i, i), i)), operations, max_leaves=6))
def test_integers_survive_json(number: Number) -> None:
    n, value = number
    written = json.dumps(n.to_json() if isinstance(n, SymbolicInt) else n)
    assert evaluated(int_from_json(json.loads(written), 64)) == value


def test_integers_have_the_values_of_a_call() -> None:
    rows, tokens = SymbolicInt.extent(0, 0, 1, 64), SymbolicInt.extent(2, 1, 0, 8)
    extents = [(40, 7), (), (3, 5)]
    assert [value_of(n, extents) for n in (rows, tokens, 12)] == [40, 5, 12]
    assert value_of((rows // 16 + 5 - tokens) * 3, extents) == 6


def test_what_is_not_known_yet_decides_nothing() -> None:
    M = SymbolicInt.extent(0, 0, 1, 200)
    assert str((M // 16 + M + 2) * 3) == "((((extent(0, 0) // 16) + extent(0, 0)) + 2) * 3)"
    decisions: list[Callable[[Any], Any]] = [
        bool,
        hash,
        lambda M: M == 100,
        lambda M: M != 100,
        lambda M: M < 100,
        lambda M: max(M, 3),
        lambda M: range(M),
    ]
    for decide in decisions:
        with pytest.raises(TypeError):
            decide(M)


@pytest.mark.parametrize("other", [-1, 1.5, True, "1", None], ids=repr)
def test_only_integers_of_at_least_0_are_reckoned_with(other: Any) -> None:
    M = SymbolicInt.extent(0, 0, 1, 200)
    for operation in (lambda: M + other, lambda: M * other, lambda: M // other, lambda: other + M):
        with pytest.raises(TypeError):
            operation()


VIEWS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda x: x,
    "mT": lambda x: x.mT,
    "transpose": lambda x: x.transpose(0, 2),
    "narrow": lambda x: x.narrow(1, 2, 3),
    "narrow, last": lambda x: x.narrow(-1, 3, 5),
    "even": lambda x: x[..., ::2],
    "odd": lambda x: x[..., 1::2],
    "even, then odd": lambda x: x[..., ::2][..., 1::2],
    "unsqueeze, first": lambda x: x.unsqueeze(0),
    "unsqueeze, inner": lambda x: x.unsqueeze(1),
    "unsqueeze, last": lambda x: x.unsqueeze(3),
    "unflatten": lambda x: x.unflatten(1, (2, 3)),
    "select": lambda x: x.select(0, 1),
    "select, last": lambda x: x.select(2, 7),
    "select twice": lambda x: x.select(0, 1).select(0, 2),
    "flatten": lambda x: x.flatten(),
    "as_strided": lambda x: x.as_strided((2, 4), (3, 1), 8),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", VIEWS)
def test_views_of_symbolic_tensors_are_those_of_tensors(name: str, dtype: torch.dtype) -> None:
    x = torch.empty(2, 6, 8, dtype=dtype)
    described = SymbolicTensor(3, dtype, tuple(x.shape), x.stride(), aligned=True)
    view, made = (VIEWS[name](one) for one in (x, described))
    assert (made.variable, made.dtype, made.dim()) == (3, dtype, view.dim())
    assert (made.size(), made.stride()) == (tuple(view.shape), view.stride())
    assert (made.size(-1), made.stride(0)) == (view.size(-1), view.stride(0))
    assert made.offset == view.storage_offset() * dtype.itemsize
    assert made.aligned == (made.offset % 16 == 0)
    assert not VIEWS[name](replace(described, aligned=False)).aligned
    assert made.is_contiguous() == view.is_contiguous()


@pytest.mark.parametrize(
    ("shape", "strides", "transposed"),
    [
        ((2, 3, 4), (12, 4, 1), False),
        ((2, 3, 4), (12, 1, 3), True),
        ((3, 4), (1, 3), True),
        ((3, 4), (8, 2), False),
        ((3, 1), (1, 1), False),
        ((1, 4), (1, 1), False),
    ],
)
def test_matrices_that_lie_transposed(shape: tuple[int, ...], strides: tuple[int, ...], transposed: bool) -> None:
    tensor = torch.empty_strided(shape, strides, device="meta")
    described = SymbolicTensor(0, torch.float16, shape, strides, aligned=True)
    assert lies_transposed(tensor) == lies_transposed(described) == transposed


def test_symbolic_tensors_are_contiguous_whatever_the_stride_of_a_single_element() -> None:
    rows = SymbolicInt.extent(0, 0, 1, 64)
    for shape, strides, contiguous in (
        ((rows, 8), (8, 1), True),
        ((rows, 8), (9, 1), False),
        ((1, 8), (9, 1), True),
        ((8, 1), (1, 9), True),
        ((8, 2), (1, 8), False),
        ((SymbolicInt.extent(0, 0, 1, 1), 8), (9, 1), True),  # the class of one token
        ((SymbolicInt.extent(0, 0, 0, 2), 8), (9, 1), False),
    ):
        assert SymbolicTensor(0, torch.float16, shape, strides, aligned=True).is_contiguous() == contiguous
    assert SymbolicTensor(0, torch.float16, (rows, 8), (8, 1), aligned=True).unsqueeze(0).strides == (1, 8, 1)


@pytest.mark.parametrize(("last", "needed"), [(INT32_MAX, False), (INT32_MAX + 1, True)])
def test_offsets_that_do_not_fit_into_32_bits(last: int, needed: bool) -> None:
    rows = SymbolicInt.extent(0, 0, 0, last // 2 + 1)
    x = SymbolicTensor(0, torch.float16, (rows, last % 2 + 1), (2, 1), aligned=True)
    assert needs_int64(None, x) == needs_int64(x, None) == needed


sizes = st.integers(0, 300) | st.integers(900, 1200) | st.integers(0, MAX_ROWS)


@st.composite
def counts_of_calls(draw: st.DrawFn) -> tuple[Callable[[int], Counts], int, int]:
    """Draw a function from rows to Counts, a number of rows, and a number of which all row counts are multiples."""
    k, groups, n = draw(st.integers(1, 16)), draw(st.integers(0, 300)), draw(sizes)
    kind = draw(st.sampled_from(["rows", "tokens", "slots"]))
    if kind == "tokens":  # rows are tokens, with their slots
        return (lambda n: Counts(n, (n * k,), groups)), n // k, 1
    if kind == "slots":  # rows are slots, with their tokens
        return (lambda n: Counts(n, (n // k,), groups)), n // k * k, k
    return (lambda n: Counts(n, groups=groups)), n, 1


@given(counts_of_calls(), st.randoms(use_true_random=False))
def test_bounds_are_those_of_the_class(of_call: tuple[Callable[[int], Counts], int, int], random: Any) -> None:
    counts, n, step = of_call
    low, high = rows_bounds(counts(n))
    wanted = rows_class(counts(n))
    assert 0 <= low <= n <= high
    inside = [-(-low // step) * step, high // step * step, random.randint(-(-low // step), high // step) * step]
    for rows in inside:
        assert rows_class(counts(rows)) == wanted
    for rows in (inside[0] - step, inside[1] + step):
        assert rows < 0 or rows_class(counts(rows)) != wanted


@given(counts_of_calls(), st.randoms(use_true_random=False))
def test_extents_of_a_plan_hold_those_of_its_calls(
    of_call: tuple[Callable[[int], Counts], int, int], random: Any
) -> None:
    counts, n, step = of_call
    operator = Operator("op", "", ("x", "y"), ("x", "y"), lambda *_: counts(n))

    def others(n: int) -> int:
        return (counts(n).others or (n,))[0]

    x, y = symbolic(operator, [torch.empty(rows, 3, device="meta") for rows in (n, others(n))], None)
    assert x is not None and y is not None and x.shape[1] == y.shape[1] == 3
    low, high = (
        -(-end // step) * step if i == 0 else end // step * step for i, end in enumerate(rows_bounds(counts(n)))
    )
    for rows in (low, high, random.randint(low // step, high // step) * step):
        assert least(x.shape[0]) <= rows <= most(x.shape[0])
        assert least(y.shape[0]) <= others(rows) <= most(y.shape[0])


M, K, N, G = 100, 64, 32, 8
Given = tuple[Tensor, Tensor, Tensor, "torch.dtype | None", str]


def call(**changed: Any) -> Given:
    """Return the arguments of a `grouped_gemm`, with some changed."""
    A = torch.zeros(M, K, dtype=torch.bfloat16)
    B = torch.nn.Parameter(torch.zeros(G, K, N, dtype=torch.bfloat16))
    values = {"A": A, "B": B, "offsets": torch.zeros(G + 1, dtype=torch.int32), "out_dtype": None, "variant": "auto"}
    A, B, offsets, out_dtype, variant = {**values, **changed}.values()
    return A, B, offsets, out_dtype, variant


class Subclass(Tensor):
    pass


ALIKE: dict[str, Callable[[], Given]] = {
    "other memory": call,
    "more rows": lambda: call(A=torch.zeros(127, K, dtype=torch.bfloat16)),
    "fewer rows": lambda: call(A=torch.zeros(64, K, dtype=torch.bfloat16)),
}
OTHER: dict[str, Callable[[], Given]] = {
    "another variant": lambda: call(variant="basic"),
    "another result": lambda: call(out_dtype=torch.float32),
    "twice the rows": lambda: call(A=torch.zeros(128, K, dtype=torch.bfloat16)),
    "half the rows": lambda: call(A=torch.zeros(63, K, dtype=torch.bfloat16)),
    "no rows": lambda: call(A=torch.zeros(0, K, dtype=torch.bfloat16)),
    "another contraction": lambda: call(
        A=torch.zeros(M, 2 * K, dtype=torch.bfloat16), B=torch.zeros(G, 2 * K, N, dtype=torch.bfloat16)
    ),
    "a slice": lambda: call(A=torch.zeros(M, 2 * K, dtype=torch.bfloat16)[:, :K]),
    "not aligned": lambda: call(A=torch.zeros(M * K + 1, dtype=torch.bfloat16)[1:].view(M, K)),
    "weights not aligned": lambda: call(B=torch.zeros(G * K * N + 1, dtype=torch.bfloat16)[1:].view(G, K, N)),
    "another dtype": lambda: call(A=torch.zeros(M, K, dtype=torch.float16)),
    "transposed": lambda: call(B=torch.zeros(G, N, K, dtype=torch.bfloat16).mT),
    "shared": lambda: call(B=torch.zeros(K, N, dtype=torch.bfloat16)),
    "int64": lambda: call(offsets=torch.zeros(G + 1, dtype=torch.int64)),
    "one group more": lambda: call(
        B=torch.zeros(G + 1, K, N, dtype=torch.bfloat16), offsets=torch.zeros(G + 2, dtype=torch.int32)
    ),
}
NO_CALLS: dict[str, Callable[[], Given]] = {
    "a subclass": lambda: call(A=torch.zeros(M, K, dtype=torch.bfloat16).as_subclass(Subclass)),
    "offsets of a subclass": lambda: call(offsets=torch.zeros(G + 1, dtype=torch.int32).as_subclass(Subclass)),
    "a negated view": lambda: call(A=torch.zeros(M, K, dtype=torch.complex64).conj().imag),
    "on another device": lambda: call(A=torch.zeros(M, K, dtype=torch.bfloat16, device="meta")),
    "one group too many": lambda: call(offsets=torch.zeros(G + 2, dtype=torch.int32)),
    "one dimension more": lambda: call(A=torch.zeros(M, K, 1, dtype=torch.bfloat16)),
    "no dimension": lambda: call(A=torch.zeros((), dtype=torch.bfloat16)),
    "no tensor": lambda: call(offsets=[0] * (G + 1)),
    "no offsets": lambda: call(offsets=None),
    "no rows at all": lambda: call(A=None),
}


def signature_of(given: Given, operator: Operator = GROUPED_GEMM) -> tuple[Any, ...]:
    *tensors, out_dtype, variant = given
    return signature(operator, (*tensors, None), (out_dtype, variant))


@pytest.mark.parametrize("name", ALIKE)
def test_calls_that_share_a_signature(name: str) -> None:
    assert signature_of(ALIKE[name]()) == signature_of(call())


@pytest.mark.parametrize("name", OTHER)
def test_calls_that_do_not(name: str) -> None:
    assert signature_of(OTHER[name]()) != signature_of(call())


@pytest.mark.parametrize("name", ["A", "B"])
def test_alignment_to_8_bytes_is_not_to_16(name: str) -> None:
    shape = {"A": (M, K), "B": (G, K, N)}[name]
    moved = torch.zeros(math.prod(shape) + 4, dtype=torch.bfloat16)[4:].view(shape)
    assert moved.data_ptr() % 16 == 8
    given = call(**{name: moved})
    assert signature_of(given) != signature_of(call())
    *tensors, out_dtype, variant = given
    inputs = symbolic(GROUPED_GEMM, (*tensors, None), (out_dtype, variant))
    assert [x.aligned for x in inputs if x is not None] == [name != "A", name != "B", True]


def test_operators_share_no_signature() -> None:
    assert signature_of(call(), replace(GROUPED_GEMM, name="another")) != signature_of(call())


def test_devices_share_no_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    on_one = signature_of(call())
    monkeypatch.setattr(Tensor, "get_device", lambda tensor: 1)
    assert signature_of(call()) != on_one


def test_what_products_of_float32_may_use_is_in_their_signature() -> None:
    def signatures(precision: Any) -> list[tuple[Any, ...]]:
        torch.backends.cuda.matmul.fp32_precision = precision
        float16 = torch.zeros(M, K, dtype=torch.float16)
        of = (call(), call(A=torch.zeros(M, K)), call(B=torch.zeros(G, K, N)), call(A=float16))
        return [signature_of(x) for x in of]

    before = torch.backends.cuda.matmul.fp32_precision
    try:
        of_two = list(zip(signatures("tf32"), signatures("ieee"), strict=True))
        assert signatures("none") == signatures("ieee")  # of a new process, and after naming PyTorch's default
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert [tf32 == ieee for tf32, ieee in of_two] == [True, False, False, False]


def test_a_signature_on_disk_names_no_device() -> None:
    key = signature_of(call())
    elsewhere = tuple(3 if type(part) is int else part for part in key)
    assert elsewhere != key and portable(elsewhere) == portable(key)
    assert len({portable(signature_of(x())) for x in (call, *OTHER.values())}) == 1 + len(OTHER)


ROWS = SymbolicInt.extent(0, 0, 1, 1000)
PLAN = Plan(
    ("A", "offsets", "out"),
    (
        Alloc(3, (ROWS // 16 + 5, 3), torch.int32),
        Call("zero", 3, ()),
        Call("cast", 4, (1,), torch.int64),
        Call("bmm", 5, (0, 2), torch.float32, groups=2),
        Launch("first", (7,), (Pointer(4, 0), Pointer(3, -8), ROWS // 16 + 5, ROWS * 2 + 1)),
        Launch("second", (ROWS, 2), (Descriptor(0, 16, (ROWS, 3), (3, 1), (16, 4), torch.bfloat16), Constant(None), 1)),
    ),
    (3, 2),
)


def test_a_plan_survives_json() -> None:
    value = json.loads(json.dumps(PLAN.to_json()))
    again = plan_from_json(value)
    assert again.to_json() == value
    assert again.inputs == PLAN.inputs and again.results == PLAN.results
    assert again.binaries == PLAN.binaries == ["first", "second"]
    assert [type(step) for step in again.steps] == [type(step) for step in PLAN.steps]
    assert again.steps[1:4] == PLAN.steps[1:4]
    assert [str(n) for n in again.steps[0].shape] == [str(n) for n in PLAN.steps[0].shape]  # type: ignore[union-attr]


def changed(path: str, value: Any) -> Any:
    """Return the JSON of PLAN with `value` at a path such as "steps.0.alloc"."""
    plan: Any = json.loads(json.dumps(PLAN.to_json()))
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
    inner = plan
    for part in parents:
        inner = inner[part]
    assert last in inner if isinstance(inner, dict) else last < len(inner)
    inner[last] = value
    return plan


def test_a_collector_is_gone_after_an_error() -> None:
    with pytest.raises(RuntimeError), cache.collecting(lambda *_: None):
        raise RuntimeError
    assert not cache.collects()


MALFORMED: list[tuple[str, Any]] = [
    ("steps.2.call", "system"),
    ("steps.2.call", ["zero"]),
    ("steps.2.variable", -1),
    ("steps.2.variable", "4"),
    ("steps.2.variable", True),
    ("steps.2.arguments", [1, 9]),
    ("steps.2.arguments", [1, "0"]),
    ("steps.2.arguments", [1.0]),
    ("steps.2.arguments", None),
    ("steps.1.variable", 9),  # to be filled, but not allocated
    ("steps.1", {"call": "mm", "variable": 9, "arguments": [0, 1], "dtype": None, "groups": 0}),
    ("steps.3.dtype", "object"),
    ("steps.3.groups", "2"),
    ("steps.0.alloc", -1),
    ("steps.0.alloc", "3"),
    ("steps.0.alloc", 3.0),
    ("steps.0.shape", "33"),
    ("steps.0.shape", [["__import__('os')", 0, 0]]),
    ("steps.0.shape", [["extent", 3, 0]]),  # not an input
    ("steps.0.shape", [["extent", -1, 0]]),
    ("steps.0.shape", [["extent", "0", 0]]),
    ("steps.0.shape", [["extent", 0, "0"]]),
    ("steps.0.shape", [["extent", 0, -1]]),
    ("steps.0.shape", [["+", 1, ["extent", 7, 0]]]),
    ("steps.0.shape", [["**", 9, 9]]),
    ("steps.0.shape", [1.5]),
    ("steps.0.dtype", "uint8"),
    ("steps.4.launch", "../../binary"),
    ("steps.4.launch", 3),
    ("steps.4.grid", ["n0_0"]),
    ("steps.4.arguments.0.pointer", 9),
    ("steps.4.arguments.0.pointer", "4"),
    ("steps.4.arguments.0.pointer", 4.0),
    ("steps.4.arguments.0.offset", "0"),
    ("steps.4.arguments.0.offset", None),
    ("steps.4.arguments.2", "rows"),
    ("steps.4.arguments.2", {"address": 0}),
    ("steps.5.arguments.0.descriptor", 9),
    ("steps.5.arguments.0.strides", ["3", 1]),
    ("steps.5.arguments.0.block_shape", [16, 4.0]),
    ("steps.5.arguments.0.shape", [["extent", 5, 0], 3]),
    ("steps.5.arguments.1.constant", [1]),
    ("steps.5", {"run": "ls"}),
    ("steps.5", []),
    ("steps", 5),
    ("inputs", [0, 1, 2]),
    ("results", [9]),
    ("results", ["2"]),
    ("results", [2.0]),
]


@pytest.mark.parametrize(("path", "value"), MALFORMED, ids=str)
def test_a_malformed_plan_is_refused(path: str, value: Any) -> None:
    with pytest.raises(ValueError):
        plan_from_json(changed(path, value))


ALLOC = {"alloc": 1, "shape": [1], "dtype": "int32"}
CONTIGUOUS = {"call": "contiguous", "variable": 1, "arguments": [0], "dtype": None, "groups": 0}


@pytest.mark.parametrize("step", [ALLOC, CONTIGUOUS])
def test_a_variable_is_a_number(step: dict[str, Any]) -> None:
    for key in ("alloc", "variable"):
        if key in step:
            plan_from_json({"inputs": ["A"], "steps": [step], "results": [1]})
            for variable in (-1, "1", 1.0, True, None, [1]):
                with pytest.raises(ValueError):
                    plan_from_json({"inputs": ["A"], "steps": [step | {key: variable}], "results": [0]})


@pytest.mark.parametrize("value", [None, [], "plan", {}, {"inputs": [], "steps": []}], ids=str)
def test_what_is_no_plan_is_refused(value: Any) -> None:
    with pytest.raises(ValueError):
        plan_from_json(value)


class Noting:
    """A launcher that records the grid and the arguments of each launch."""

    def __init__(self, seen: list[Any]):
        self.note = lambda *launch: seen.append(launch)

    def before(self, device: torch.device, named: Callable[[str, Any], str]) -> list[str]:
        return []

    def statement(self, launch: Launch, body: Any) -> str:
        grid = "".join(f"{body.number(n)}, " for n in launch.grid)
        arguments = ", ".join(self.argument(x, body) for x in launch.arguments)
        return f"{body.named('note', self.note)}(({grid}), {arguments})"

    def argument(self, x: Any, body: Any) -> str:
        if isinstance(x, (Pointer, Descriptor)):
            return str(body.address(x.variable, x.offset))
        return str(body.named("constant", x.value)) if isinstance(x, Constant) else str(body.number(x))


def test_a_plan_is_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    allocated: list[Any] = []

    def allocator(device: torch.device) -> Callable[..., Tensor]:
        def allocate(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            allocated.append((shape, strides, dtype, device))
            return torch.full(shape, 7, dtype=dtype)

        return allocate

    monkeypatch.setattr(torch_internals, "allocator", allocator)
    noting = Noting(seen)
    launchers = {"first": noting, "second": noting}
    for plan in (PLAN, plan_from_json(PLAN.to_json())):
        steps = [step for step in plan.steps if step != PLAN.steps[3]]  # a CPU cannot run it
        run = emit(Plan(plan.inputs, tuple(steps), plan.results), launchers, CPU)
        for rows in (40, 34, 2):
            A, out = torch.ones(rows, 4, dtype=torch.bfloat16), torch.ones(8, 3, dtype=torch.bfloat16)
            offsets = torch.tensor([0, 5, 99, 3], dtype=torch.int32)
            table, result = run(A, offsets, out)
            max_tiles = rows // 16 + 5
            assert result is out
            assert table.shape == (max_tiles, 3) and not table.any()
            assert allocated == [((max_tiles, 3), (3, 1), torch.int32, CPU)]
            (first, at_offsets, at_table, tiles, odd), second = seen
            assert (first, at_table, tiles, odd) == ((7,), table.data_ptr() - 8, max_tiles, 2 * rows + 1)
            assert at_offsets != offsets.data_ptr()  # the address of the clamped copy
            assert second == ((rows, 2), A.data_ptr() + 16, None, 1)
            seen.clear(), allocated.clear()


def test_memory_is_freed_after_its_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Tensor]] = []
    alive: list[list[bool]] = []

    def allocate(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty_strided(shape, strides, dtype=dtype)
        made.append(weakref.ref(tensor))
        return tensor

    def launch(*variables: int) -> Launch:
        return Launch("kernel", (1,), tuple(Pointer(variable, 4 * variable) for variable in variables))

    monkeypatch.setattr(torch_internals, "allocator", lambda device: allocate)
    noting = Noting([])
    noting.note = lambda *_: alive.append([tensor() is not None for tensor in made])
    first, second, result, unused = (Alloc(variable, (ROWS, 4), torch.float32) for variable in (2, 3, 4, 5))
    steps = (first, launch(0, 2), second, launch(2, 3), result, unused, launch(3, 4), launch(0, 1, 4))
    run = emit(Plan(("A", "B"), steps, (4, 1)), {"kernel": noting}, CPU)
    out, same = run(torch.ones(6, 4), B := torch.ones(3))
    assert alive == [[True], [True, True], [False, True, True, False], [False, False, True, False]]
    assert out.shape == (6, 4) and same is B


def test_functions_of_pytorch_in_a_plan() -> None:
    A, B, offsets = torch.randn(6, 4), torch.randn(2, 4, 5), torch.tensor([3, 99, 2, 5], dtype=torch.int32)
    steps = (
        Alloc(3, (ROWS, 5), torch.float32),
        Call("mm", 3, (0, 1)),
        Call("bmm", 4, (0, 1), None, groups=2),
        Call("contiguous", 5, (1,)),
        Call("cast", 6, (2,), torch.int64),
        Alloc(7, (3, 2), torch.int64),
        Call("zero", 7, ()),
    )
    # A is packed: its groups follow each other along the rows.
    product, products, flat, longer, zeros = emit(Plan(("A", "B", "offsets"), steps, (3, 4, 5, 6, 7)), {}, CPU)(
        A, B.transpose(1, 2).contiguous().transpose(1, 2), offsets
    )
    torch.testing.assert_close(product, A @ B[0])
    torch.testing.assert_close(products, torch.bmm(A.view(2, 3, 4), B).view(6, 5))
    assert torch.equal(flat, B.flatten()) and flat.is_contiguous()
    assert torch.equal(longer, offsets.long()) and longer.dtype == torch.int64
    assert torch.equal(zeros, torch.zeros(3, 2, dtype=torch.int64))
    run = emit(Plan(("A", "B"), (Call("bmm", 2, (0, 1), None, groups=2),), (2,)), {}, CPU)
    assert torch.equal(run(A.view(2, 3, 4), B), torch.bmm(A.view(2, 3, 4), B))
    with torch.autocast("cpu", torch.bfloat16):  # as in the backward pass of a product of float32
        both = run(A.view(2, 3, 4), B)
    assert torch.equal(both, torch.bmm(A.view(2, 3, 4), B))


def test_new_memory_is_pytorchs_where_its_private_allocator_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fast(*_: Any) -> Tensor:
        return torch.ones(1)

    monkeypatch.setattr(torch_internals, "empty_strided_cuda", fast)
    cuda = torch.device("cuda", 0)
    assert torch_internals.allocator(cuda) is fast
    made = torch_internals.allocator(CPU)((2, 3), (1, 2), torch.float16)
    assert (made.shape, made.stride(), made.dtype, made.device) == ((2, 3), (1, 2), torch.float16, CPU)
    monkeypatch.setattr(torch_internals, "empty_strided_cuda", None)
    assert callable(torch_internals.allocator(cuda)) and torch_internals.allocator(cuda) is not fast


def entry() -> cache._Entry:
    return cache._Entry(lambda: None, PLAN, {})


def test_the_least_recently_used_plan_is_evicted() -> None:
    plans = cache.PlanCache(limit=3)
    for i in range(3):
        plans.put((i,), entry())
    assert plans.get((0,)) is plans.entries[0,]
    plans.put((3,), entry())
    assert list(plans.entries) == [(2,), (0,), (3,)]
    plans.put((2,), entry())
    assert set(plans.entries) == {(2,), (0,), (3,)}
    assert plans.get((1,)) is None


def test_plans_are_set_aside_and_come_back() -> None:
    plans = cache.plans
    with cache.isolated():
        kept = entry()
        plans.put((1,), kept)
        plans.recent["op"] = (len,)
        with pytest.raises(RuntimeError), cache.isolated():
            assert not plans.entries and not plans.recent
            plans.put((1,), entry())
            plans.recent["op"] = (max,)
            raise RuntimeError
        assert dict(plans.entries) == {(1,): kept} and plans.recent == {"op": (len,)}
        cache.clear()
        assert not plans.entries and not plans.recent


def test_plans_are_forgotten_with_the_entries_that_they_depend_on() -> None:
    with cache.isolated():
        cache.plans.put((1,), entry())
        cache.plans.recent["op"] = (len,)
        cache.reload()
        assert not cache.plans.entries and not cache.plans.recent


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Yield the row counts of the launches so far; CPU tensors count as tensors of the current GPU."""
    seen: list[int] = []
    noting = Noting([])
    noting.note = lambda grid: seen.append(*grid)

    def load(operator: Operator, inputs: Sequence[Any], options: Any, *_: Any) -> tuple[Plan, dict[str, Any]]:
        A, B, *_ = inputs
        steps = Alloc(4, (A.shape[0], B.shape[-1]), options[0]), Launch("kernel", (A.shape[0],), ())
        return Plan(operator.inputs, steps, (4,)), {"kernel": noting}

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(cache, "_load", load)
    monkeypatch.setattr(torch_internals, "on_current_device", lambda tensor: True)
    with cache.isolated(), torch.no_grad():
        yield seen


def run(*given: Any) -> Tensor:
    A, B, offsets, out_dtype, variant = given
    return grouped_gemm(A, B, offsets, out_dtype=out_dtype, variant=variant)


def again(*given: Any) -> Tensor | None:
    """Return the result of a call if it is a repeat, else None."""
    *tensors, out_dtype, variant = given
    out: Tensor | None = cache.repeat(GROUPED_GEMM, (*tensors, None), (out_dtype, variant))
    return out


def repeats() -> tuple[Any, ...]:
    return cache.plans.recent.get("grouped_gemm", ())


@pytest.mark.parametrize("name", ALIKE)
def test_a_call_like_an_earlier_one_is_a_repeat(name: str, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    run(*call())
    calls.clear()
    monkeypatch.setattr(cache, "call", Mock(side_effect=AssertionError("no repeat")))
    for function in (again, run, again):
        given = ALIKE[name]()
        rows = len(given[0])
        out = function(*given)
        assert out is not None and out.dtype == torch.bfloat16 and out.shape == (rows, N) and out.is_contiguous()
        assert calls.pop() == rows and not calls
    assert len(repeats()) == len(cache.plans.entries) == 1


@pytest.mark.parametrize("name", OTHER)
def test_another_call_is_not(name: str, calls: list[int]) -> None:
    run(*call())
    calls.clear()
    given = OTHER[name]()
    assert again(*given) is None and not calls
    out = run(*given)
    A, B, _, out_dtype, _ = given
    assert out.shape == (len(A), N) and out.dtype == (out_dtype or torch.promote_types(A.dtype, B.dtype))
    assert calls == [len(A)] and len(cache.plans.entries) == 2


@pytest.mark.parametrize("name", NO_CALLS)
def test_what_the_checks_or_torch_library_have_to_see_is_not(name: str, calls: list[int]) -> None:
    run(*call())
    calls.clear()
    assert again(*NO_CALLS[name]()) is None and not calls


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "gradients": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "a dispatch mode": lambda: FlopCounterMode(display=False),
    "forward derivatives": forward_ad.dual_level,
    "a profiler": lambda: profile(activities=[ProfilerActivity.CPU]),
    "plans set aside": cache.isolated,
}


@pytest.mark.parametrize("name", MODES)
def test_nor_is_one_that_somebody_records(name: str, calls: list[int]) -> None:
    run(*call())
    calls.clear()
    with MODES[name]():
        assert again(*call()) is None and not calls
    assert again(*call()) is not None and calls == [M]


@pytest.mark.parametrize("name", ["gradients", "autocast", "a dispatch mode", "forward derivatives", "a profiler"])
def test_nor_is_there_a_repeat_of_one_that_somebody_records(name: str, calls: list[int]) -> None:
    with MODES[name]():
        run(*call())
    assert not repeats()


def test_nor_is_one_inside_a_transform(calls: list[int]) -> None:
    A, *rest = call()
    run(A, *rest)
    calls.clear()

    def inside(A: Tensor) -> Tensor:
        assert again(A, *rest) is None
        return A

    torch.func.vmap(inside)(torch.stack([A, A]))
    torch.func.vjp(inside, A)
    assert not calls


def test_nor_is_one_that_needs_a_gradient(calls: list[int]) -> None:
    with torch.enable_grad():
        A, _, *rest = call()
        B = torch.zeros(G, K, N, dtype=torch.bfloat16)
        run(A, B, *rest)
        assert again(A, B, *rest) is not None
        calls.clear()
        for a, b in ((A.clone().requires_grad_(), B), (A, B.clone().requires_grad_())):
            assert again(a, b, *rest) is None and not calls


def test_inference_mode_is_a_kind_of_its_own(calls: list[int]) -> None:
    with torch.inference_mode():
        given = call()
        run(*given)
        assert again(*given) is not None
    assert again(*call()) is None
    run(*call())
    assert again(*call()) is not None and len(repeats()) == 2
    with torch.inference_mode():
        assert again(*given) is not None


def plain_weights() -> Given:
    return call(B=torch.zeros(G, K, N, dtype=torch.bfloat16))


def of_inference() -> Given:
    with torch.inference_mode():
        return call()


TWO_KINDS: dict[str, list[tuple[Callable[[], AbstractContextManager[Any]], Callable[[], Given]]]] = {
    "gradients": [(torch.no_grad, plain_weights), (torch.enable_grad, plain_weights)],
    "inference mode": [(torch.no_grad, call), (torch.inference_mode, call)],
    "within an operator": [(nullcontext, call), (torch._C._AutoDispatchBelowAutograd, call)],
    "class": [
        (torch.no_grad, plain_weights),
        (torch.no_grad, lambda: call(B=torch.nn.Parameter(torch.zeros(G, K, N, dtype=torch.bfloat16), False))),
    ],
    "requires_grad": [
        (torch.no_grad, plain_weights),
        (torch.no_grad, lambda: call(B=torch.zeros(G, K, N, dtype=torch.bfloat16, requires_grad=True))),
    ],
    "tensors of inference mode": [(torch.inference_mode, call), (torch.inference_mode, of_inference)],
}


@pytest.mark.parametrize("name", TWO_KINDS)
def test_each_of_two_kinds_has_its_own_repeat(name: str, calls: list[int]) -> None:
    kinds = [(mode, make()) for mode, make in TWO_KINDS[name]]
    for mode, arguments in kinds:
        with mode():
            run(*arguments)
    for mode, arguments in kinds:
        with mode():
            assert again(*arguments) is not None
    assert len(repeats()) == 2 and calls == [M] * 4


def test_a_few_kinds_are_looked_at_first(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeats beyond these few are not generated again, which would take much longer than a call."""
    made: list[Any] = []

    def record(*args: Any) -> Any:
        made.append(args)
        return emit_repeat(*args)

    monkeypatch.setattr(cache, "emit_repeat", record)
    every = [M << i for i in range(20)]
    for rows in every * 3:
        out = run(*call(A=torch.zeros(1, K, dtype=torch.bfloat16).expand(rows, K)))
        assert len(out) == rows
    assert calls == every * 3 and len(repeats()) == 16 and len(made) == 20


def test_a_repeat_that_is_found_late_is_looked_at_first_from_then_on(calls: list[int]) -> None:
    kinds = [call(A=torch.zeros(1, K, dtype=torch.bfloat16).expand(M << i, K)) for i in range(6)]
    for arguments in kinds:
        run(*arguments)
    before = repeats()
    assert again(*kinds[1]) is not None and calls[-1] == M << 1
    assert repeats() == (before[4], *before[:4], before[5])


def test_not_very_many_kinds_share_a_plan(calls: list[int]) -> None:
    for options in (
        list(itertools.product((None, torch.bfloat16), ("A", "B", "both", "none"), *[(False, True)] * 2)) * 2
    ):
        out_dtype, of, parameter, inference = options
        A, B, *rest = call(out_dtype=out_dtype)
        A, B = A.requires_grad_(of in ("A", "both")), (B if parameter else B.data).requires_grad_(of in ("B", "both"))
        with torch.inference_mode() if inference else nullcontext():
            assert run(A, B, *rest).shape == (M, N)
    (known,) = cache.plans.entries.values()
    assert len(known.repeats) == len(repeats()) == 8 and len(calls) == 64


VALIDATED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "grouped_gemm": (
        lambda make, **options: grouped_gemm(make(4, 8), make(2, 5, 8).mT, torch.tensor([0, 5, 4]), **options),
        r"^group_offsets\[1\]: expected",
    ),
    "moe_mlp": (
        lambda make, **options: moe_mlp(
            torch.ones(2, 8), torch.tensor([[0], [3]]), torch.ones(2, 1), make(3, 10, 8), make(3, 8, 5), **options
        ),
        r"^topk_ids\[1, 0\]: expected 0 to 2, got 3",
    ),
}


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", VALIDATED)
def test_a_repeat_does_not_bypass_validation(name: str, fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    known = torch.zeros(())
    monkeypatch.setattr(cache, "repeat", lambda *_: known)
    function, text = VALIDATED[name]

    def make(*shape: int) -> Any:
        return quantize(torch.ones(shape), "rowwise") if fp8 else torch.ones(shape)

    assert function(make, validate=False) is known
    with pytest.raises(ValueError, match=text):
        function(make, validate=True)


FLOAT32: dict[str, Callable[[], Given]] = {
    "rows": lambda: call(A=torch.zeros(M, K)),
    "weights": lambda: call(B=torch.zeros(G, K, N)),
    "all": lambda: call(A=torch.zeros(M, K), B=torch.zeros(G, K, N)),
    "float16 by bfloat16": lambda: call(A=torch.zeros(M, K, dtype=torch.float16)),
}


@pytest.mark.parametrize("name", FLOAT32)
def test_products_of_float32_are_not_repeated(name: str, calls: list[int]) -> None:
    """A setting of PyTorch decides whether they may use tf32."""
    for _ in range(2):
        run(*FLOAT32[name]())
    assert calls == [M, M] and not repeats()


@pytest.mark.parametrize(
    ("name", "multiplied"),
    [
        ("scales_A", False),
        ("topk_weights", False),
        ("bias", False),
        ("b_in", False),
        ("gate_up_bias", False),
        ("B", True),
    ],
)
def test_float32_that_is_not_multiplied_depends_on_no_setting(name: str, multiplied: bool) -> None:
    operator = Operator("op", "", ("A", name), ("A",), lambda *_: Counts(4))
    tensors = torch.zeros(4, 8, dtype=torch.float16), torch.zeros(4, 1)
    assert depends_on_tf32(signature(operator, tensors, None)) == multiplied


@pytest.mark.parametrize("name", ["not aligned", "weights not aligned"])
def test_tensors_that_are_not_aligned_are_not_repeated(name: str, calls: list[int]) -> None:
    for _ in range(2):
        run(*OTHER[name]())
    assert calls == [M, M] and not repeats()


def test_a_call_from_another_device_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same holds for a call with tensors of another device, which guards reject."""
    seen: list[Any] = []
    current = [1]
    monkeypatch.setattr(torch_internals, "current_device", lambda: current[0])
    plan = Plan(("A", "B"), (Launch("kernel", (ROWS,), ()),), (0,))
    device = torch.device("cuda", 1)
    A = torch.zeros(4, 8, dtype=torch.float16)
    operator = Operator("op", "", plan.inputs, plan.inputs, lambda *_: Counts(4))
    made = emit_repeat(plan, {"kernel": Noting(seen)}, device, (A, None), operator, "asked", (1, 9))
    assert made is not None and made("asked", A, None) is A and seen.pop() == ((4,),)
    assert made("else", A, None) is None and made("asked", A, A) is None
    current[0] = 0
    assert made("asked", A, None) is None and not seen


def test_an_attempt_to_repeat_does_not_restrict_symbolic_extents() -> None:
    """As in torch.export, whose symbolic extents would be those of the class of an earlier call."""
    plan = Plan(("A", "B"), (Launch("kernel", (ROWS,), ()),), (0,))
    operator = Operator("op", "", plan.inputs, plan.inputs, lambda *_: Counts(4))
    A = torch.zeros(4, 8, dtype=torch.float16)
    made = emit_repeat(plan, {"kernel": Noting([])}, CPU, (A, None), operator, None, (4, 7))
    assert made is not None
    attempts: list[Any] = []

    def traced(A: Tensor) -> Tensor:
        attempts.append(made(None, A, None))
        return A * 2

    graph = make_fx(traced, tracing_mode="symbolic")(A)
    assert attempts == [None] and made(None, A, None) is A
    assert not [guard.expr for guard in graph.shape_env.guards if {">", "<"} & {*str(guard.expr)}]


def test_options_without_a_truth_value_are_not_repeated() -> None:
    plan = Plan(("A", "B"), (Launch("kernel", (ROWS,), ()),), (0,))
    operator = Operator("op", "", plan.inputs, plan.inputs, lambda *_: Counts(4))
    A = torch.zeros(4, 8, dtype=torch.float16)
    made = emit_repeat(plan, {"kernel": Noting([])}, CPU, (A, None), operator, (7.0,), (4, 7))
    assert made is not None and made((7.0,), A, None) is A
    assert made((numpy.array([7.0, 7.0]),), A, None) is None


def test_2d_products_of_bmm_are_no_views() -> None:
    with torch.no_grad():
        assert not _bmm(torch.ones(6, 4), torch.ones(8, 5), None, 2)._is_view()


def test_examples_are_on_the_current_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.11 allocates on the device of a fake tensor, for which other processes may have reserved it."""
    compiler = pytest.importorskip("moe_kernels.runtime.compile")
    if torch.cuda.is_available():
        index = torch.cuda.device_count() - 1  # fake tensors need a GPU that exists
    else:
        index = 1
        monkeypatch.setattr("torch._subclasses.fake_tensor.init_gpu_context", lambda device: None, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: index)
    for gpu, device in ((targets.KNOWN["h200"], f"cuda:{index}"), (targets.INTERPRETER, "cpu")):
        with compiler._example_tensors(gpu) as make:
            assert make(compiler._Example(torch.float16, (4, 8), (8, 1))).device == torch.device(device)


@pytest.mark.parametrize(
    ("like", "alike", "others"),
    [
        ((8, 24), [(8, 24), (9, 27), (30, 90)], [(8, 25), (8, 23), (11, 24), (5, 15), (31, 93)]),
        ((24, 8), [(24, 8), (27, 9), (6, 2), (30, 10)], [(24, 9), (25, 8), (27, 8), (3, 1), (33, 11)]),
        ((8, 8), [(8, 8), (6, 6), (30, 30)], [(8, 9), (9, 8), (5, 5), (31, 31)]),
    ],
    ids=str,
)
def test_rows_that_are_multiples_of_rows(like: Any, alike: Any, others: Any) -> None:
    seen: list[Any] = []
    plan = Plan(("A", "B", "C"), (Launch("kernel", (ROWS, SymbolicInt.extent(2, 0, 0, 99)), ()),), (0,))
    operator = Operator("op", "", plan.inputs, ("A", "C"), lambda *_: Counts(8))

    def inputs(rows: int, others: int) -> tuple[Tensor, Tensor, Tensor]:
        empty = torch.zeros(100, 8, dtype=torch.float16)
        return empty[:rows], torch.zeros(3, dtype=torch.int64), empty[:others]

    made = emit_repeat(plan, {"kernel": Noting(seen)}, CPU, inputs(*like), operator, None, (6, 30))
    assert made is not None
    for rows in alike:
        assert made(None, *inputs(*rows)) is not None and seen.pop() == (rows,)
    for rows in others:
        assert made(None, *inputs(*rows)) is None and not seen
    for rows in ((8, 25), (8, 7), (0, 8), (8, 0)):
        none = emit_repeat(plan, {"kernel": Noting(seen)}, CPU, inputs(*rows), operator, None, (0, 30))
        assert none is None


@pytest.mark.parametrize("guards", [None, lambda *_, **__: int("no such argument"), lambda *_, **__: object()])
def test_without_guards_calls_go_on(guards: Any, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_internals, "tensor_guards", guards)
    for _ in range(2):
        assert run(*call()).shape == (M, N)
    assert calls == [M, M] and not repeats()


def test_what_fails_in_a_repeat_is_raised_and_not_done_again(calls: list[int]) -> None:
    run(*call())
    (repeat,) = repeats()
    (name,) = (name for name in repeat.__globals__ if name.startswith("note"))

    def fails(grid: Any) -> None:
        calls.append(-1)
        raise RuntimeError("out of memory")

    note, repeat.__globals__[name] = repeat.__globals__[name], fails
    with pytest.raises(RuntimeError, match="out of memory"):
        run(*call())
    repeat.__globals__[name] = note
    assert run(*call()).shape == (M, N) and calls == [M, -1, M]


@pytest.mark.usefixtures("calls")
def test_repeats_are_freed_with_their_plans() -> None:
    run(*call())
    gone = weakref.ref(repeats()[0])
    gc.disable()
    try:
        cache.clear()
        assert gone() is None
    finally:
        gc.enable()


def test_the_collector_is_paused_while_a_plan_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    enabled: list[bool] = []

    def build_steps(*_: Any) -> Any:
        enabled.append(gc.isenabled())
        raise RuntimeError("no plan")

    monkeypatch.setattr(cache, "build_steps", build_steps)
    for disabled in (False, True):
        try:
            if disabled:
                gc.disable()
            with pytest.raises(RuntimeError, match="no plan"):
                cache.make_plan(GROUPED_GEMM, [], None, targets.KNOWN["h200"])
            assert gc.isenabled() is not disabled
        finally:
            gc.enable()
    assert enabled == [False, False]


def test_the_collector_is_paused_for_the_plans_of_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    enabled: list[bool] = []

    def build_steps(*_: Any) -> Any:
        enabled.append(gc.isenabled())
        time.sleep(0.1)  # the other thread begins, or ends, meanwhile
        enabled.append(gc.isenabled())
        raise RuntimeError("no plan")

    def find() -> None:
        with pytest.raises(RuntimeError, match="no plan"):
            cache.find(GROUPED_GEMM, (*call()[:3], None), (torch.bfloat16, "auto"))

    monkeypatch.setattr(cache, "build_steps", build_steps)
    threads = [threading.Thread(target=find) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert gc.isenabled() and len(enabled) >= 4 and not any(enabled)


@pytest.mark.parametrize("launches", [False, True])
def test_a_process_forks_between_plans_and_launches(launches: bool) -> None:
    """Otherwise the child would wait for a thread that it does not have."""
    lock = attributes.one_at_a_time if launches else cache.plans.lock
    begun = threading.Event()

    def work() -> None:
        with lock, cache._collector_paused():
            begun.set()
            time.sleep(0.2)

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(10)
    child = os.fork()
    if child == 0:
        os._exit(not (lock.acquire(timeout=2) and gc.isenabled()))
    assert os.waitpid(child, 0)[1] == 0
    thread.join()
    assert lock.acquire(timeout=2)
    lock.release()


class Direct(DirectLauncher):
    """A direct launch that calls `launch`, for a kernel that Triton would launch with `by_triton`."""

    def __init__(self, launch: Callable[[], None], by_triton: Callable[..., None], text: str | None = None):
        self.launch, self.text = launch, text
        self.kernel = type("Kernel", (), {"__getitem__": lambda self, grid: by_triton})()

    def before(self, device: torch.device, named: Callable[[str, Any], str]) -> list[str]:
        return []

    def statement(self, launch: Launch, body: Any) -> str:
        if self.text is not None:
            raise ImportError(self.text)
        return f"{body.named('raw', self.launch)}()"


@pytest.fixture
def launched(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., None], Any], list[str]]:
    """Return a function that makes plans launch through a `Direct` and returns the launches in order."""
    done: list[str] = []
    load = cache._load

    def set_up(fails: Callable[[], None], text: str | None = None, triton_fails: Any = lambda: None) -> list[str]:
        def launch() -> None:
            done.append("direct")
            fails()

        def by_triton(*_: Any) -> None:
            done.append("triton")
            triton_fails()

        monkeypatch.setattr(cache.plans, "launchers", {})
        way = Direct(launch, by_triton, text)
        monkeypatch.setattr(cache, "_load", lambda *args: (load(*args)[0], {"kernel": way}))
        return done

    return set_up


def raises(*errors: Exception | None) -> Callable[[], None]:
    """Return a function whose successive calls raise these errors, and nothing after that."""
    rest = list(errors)

    def fail() -> None:
        if rest and (error := rest.pop(0)) is not None:
            raise error

    return fail


def test_kernels_are_launched_directly(launched: Any) -> None:
    done = launched(raises())
    for _ in range(3):
        run(*call())
    assert done == ["direct"] * 3 and len(repeats()) == 1 and not cache.plans.launchers


@pytest.mark.parametrize("error", [TypeError, IndexError, ValueError, RuntimeError, AttributeError, ImportError])
@pytest.mark.parametrize("text", [False, True], ids=["when launched", "when its text is made"])
def test_a_direct_launch_that_fails_at_first_goes_by_triton_from_then_on(
    error: type[Exception], text: bool, launched: Any
) -> None:
    """This includes repeats, calls without one, and other plans that launch the same kernel."""
    done = launched(raises(*[error("another launcher")] * 9), text="no such thing" if text else None)
    for _ in range(2):
        assert run(*call()).shape == (M, N)
    assert len(repeats()) == 1
    cache.plans.recent.clear()
    run(*call())
    assert done == ["direct"] * (not text) + ["triton"] * 3
    assert [type(way) for way in cache.plans.launchers.values()] == [TritonLauncher]


def test_a_direct_launch_that_fails_later_is_not_repeated(launched: Any) -> None:
    done = launched(raises(None, None, RuntimeError("an illegal memory access")))
    for _ in range(2):
        run(*call())
    with pytest.raises(RuntimeError, match="illegal"):
        run(*call())
    cache.plans.recent.clear()
    run(*call())
    assert done == ["direct"] * 4


@pytest.mark.parametrize(
    ("error", "tried"),
    [
        (torch.OutOfMemoryError("no memory"), ["direct"]),
        (KeyboardInterrupt(), ["direct"]),
        (RuntimeError("no device"), ["direct", "triton"]),
    ],
    ids=repr,
)
def test_a_failure_that_has_nothing_to_do_with_the_launcher_changes_no_way(
    error: Any, tried: list[str], launched: Any
) -> None:
    done = launched(raises(error), triton_fails=raises(error))
    with pytest.raises(type(error)):
        run(*call())
    for _ in range(2):
        run(*call())
    assert done == [*tried, "direct", "direct"] and not cache.plans.launchers


class Making:
    """Stand-ins for the planner, the compiler and the store of plans, and a record of what they do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stored: bool, found: bool, leaves: bool, *errors: Any):
        self.done: list[str] = []
        self.found = found  # whether the compiler takes a binary from the store
        self.fail = raises(*errors)  # in successive calls of `load`
        kept = (PLAN, {"first": "stored"}) if stored else None
        compiler = SimpleNamespace(Compiling=self.compiling, within_shared_memory=lambda *source: source)
        monkeypatch.setattr("moe_kernels.runtime.compile", compiler, raising=False)
        monkeypatch.setitem(sys.modules, "moe_kernels.runtime.compile", compiler)
        monkeypatch.setattr(cache, "make_plan", self.plan)
        monkeypatch.setattr(cache.launch, "ensure_cache", lambda: None)
        monkeypatch.setattr(cache.launch, "leave_cache", lambda: self.done.append("leave") or leaves)
        monkeypatch.setattr(cache.store, "read_plan", lambda key, known: self.done.append("read") or kept)
        monkeypatch.setattr(cache.store, "write_plan", lambda key, plan, binaries: self.done.append(f"keep {binaries}"))

    def plan(self, *arguments: Any) -> tuple[Plan, dict[str, Any]]:
        *_, begin = arguments
        self.done.append("plan")
        begin("source")
        return PLAN, {"first": "source"}

    def compiling(self, gpu: targets.Gpu, replace: bool = False) -> Any:
        def binaries(fewer_stages: bool) -> dict[str, str]:
            assert begun == ["source"] and fewer_stages == (rules.forced() is None)
            self.done.append("compile again" if replace else "compile")
            return {"first": "new" if replace else "found" if self.found else "made"}

        begun: list[str] = []
        return SimpleNamespace(begin=begun.append, binaries=binaries, found=self.found)

    def load(self, binaries: Any, sources: Any) -> None:
        self.done.append(f"load {binaries['first']}")
        assert sources == ({} if binaries["first"] == "stored" else {"first": "source"})
        self.fail()

    def __call__(self) -> list[str]:
        cache.plan_of(GROUPED_GEMM, (), None, "text", targets.KNOWN["h200"], self.load)
        return self.done


KEEP = "keep {'first': 'made'}"
NEW = ["plan", "compile", "load made"]
FULL, REFUSED = OSError(errno.ENOSPC, "No space left"), OSError(errno.EACCES, "Permission denied")


@pytest.mark.parametrize(
    ("stored", "errors", "done"),
    [
        (True, [], ["read", "load stored"]),
        (True, [RuntimeError("no symbol")], ["read", "load stored", *NEW, KEEP]),
        (True, [FULL], ["read", "load stored", *NEW, KEEP]),
        (False, [], ["read", *NEW, KEEP]),
        (False, [FULL], ["read", *NEW, "leave", *NEW, KEEP]),
    ],
)
def test_a_plan_is_read_or_made(
    stored: bool, errors: list[Exception], done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that cannot be loaded is made again, and so is one for which a disk was full."""
    assert Making(monkeypatch, stored, False, True, *errors)() == done


def test_binaries_of_the_store_that_cannot_be_loaded_are_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    making = Making(monkeypatch, False, True, True, RuntimeError("no symbol"))
    again = ["compile again", "load new", "keep {'first': 'new'}"]
    assert making() == ["read", "plan", "compile", "load found", *again]


@pytest.mark.parametrize(
    ("stored", "found", "leaves", "errors", "done"),
    [
        (True, False, True, [torch.OutOfMemoryError("no memory")], ["read", "load stored"]),
        (False, True, True, [torch.OutOfMemoryError("no memory")], ["read", "plan", "compile", "load found"]),
        (False, False, True, [RuntimeError("no symbol")], ["read", *NEW]),
        (False, True, True, [REFUSED], ["read", "plan", "compile", "load found"]),
        (False, False, False, [FULL], ["read", *NEW, "leave"]),
        (False, False, True, [FULL, FULL], ["read", *NEW, "leave", *NEW]),
    ],
)
def test_what_making_a_plan_again_cannot_help(
    stored: bool, found: bool, leaves: bool, errors: list[Exception], done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised, and nothing is stored."""
    making = Making(monkeypatch, stored, found, leaves, *errors)
    with pytest.raises(type(errors[0]), match=str(errors[0].args[-1])):
        making()
    assert making.done == done


def test_plans_under_a_forced_choice_are_neither_read_nor_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    making = Making(monkeypatch, True, False, True)
    with rules.force("choice"):
        assert making() == NEW
    making.done.clear()
    with cache.isolated():
        assert making() == [*NEW, KEEP]


def test_a_kernel_is_compiled_by_triton_if_it_does_not_take_the_binary(monkeypatch: pytest.MonkeyPatch) -> None:
    Making(monkeypatch, False, False, True)
    monkeypatch.setattr(cache.launch, "compiled_kernel", Mock(side_effect=TypeError("another class")))
    binary: Any = "binary"
    assert cache._kernel(binary, "source", targets.KNOWN["h200"]) == ("source", targets.KNOWN["h200"])
    with pytest.raises(TypeError, match="another class"):
        cache._kernel(binary, None, targets.KNOWN["h200"])


def transformed(transform: Callable[..., Any]) -> Callable[[Tensor], bool]:
    def found(x: Tensor) -> bool:
        answers: list[bool] = []

        def inside(x: Tensor) -> Tensor:
            answers.append(can_bypass_dispatcher(x))
            return x * 1

        transform(inside, x)
        return answers[-1]

    return found


def within(mode: Callable[[], AbstractContextManager[Any]]) -> Callable[[Tensor], bool]:
    def found(x: Tensor) -> bool:
        with mode():
            return can_bypass_dispatcher(x)

    return found


def left_by_a_transform(x: Tensor) -> Tensor:
    """Return a tensor of torch.func.grad, which PyTorch's own functions unwrap."""
    left: list[Tensor] = []
    torch.func.grad(lambda x: (left.append(x * 2), left[-1].sum())[1])(x)
    return left[0]


OBSERVED: dict[str, Callable[[Tensor], bool]] = {
    "a dispatch mode": within(lambda: FlopCounterMode(display=False)),
    "a profiler": within(lambda: profile(activities=[ProfilerActivity.CPU])),
    "forward derivatives": within(forward_ad.dual_level),
    "vmap": transformed(lambda f, x: torch.func.vmap(f)(x)),
    "vjp": transformed(lambda f, x: torch.func.vjp(f, x)),
    "functionalize": transformed(lambda f, x: torch.func.functionalize(f)(x)),
    "tracing": transformed(lambda f, x: torch.jit.trace(f, x, check_trace=False)),
    "a subclass": lambda x: can_bypass_dispatcher(x.as_subclass(Subclass)),
    "a negated view": lambda x: can_bypass_dispatcher(torch.complex(x, x).conj().imag),
    "a transform that has ended": lambda x: can_bypass_dispatcher(left_by_a_transform(x)),
    "zeros without memory": lambda x: can_bypass_dispatcher(torch._efficientzerotensor(2, 3)),
    "a gradient": lambda x: can_bypass_dispatcher(x, x.clone().requires_grad_()),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", OBSERVED)
def test_what_observes_a_call(name: str) -> None:
    x = torch.ones(2, 3)
    assert can_bypass_dispatcher(x, None, torch.nn.Parameter(x, requires_grad=False))
    assert not OBSERVED[name](x)
    assert can_bypass_dispatcher(x)


def test_several_upstreams_at_once_are_a_transform() -> None:
    answers: list[bool] = []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, d: Tensor) -> Tensor:
            answers.append(eager(d))
            return d

    x = torch.ones(3, requires_grad=True)
    out = Asks.apply(x)
    torch.autograd.grad(out, x, torch.ones(3), retain_graph=True)
    torch.autograd.grad(out, x, torch.ones(2, 3), is_grads_batched=True)
    assert answers == [True, False]


@pytest.mark.parametrize("name", ["grad", "vmap", "functionalize"])
def test_what_transforms_a_call(name: str) -> None:
    answers: list[bool] = []

    def inside(x: Tensor) -> Tensor:
        answers.append(torch_internals.transformed())
        return x.sum()

    getattr(torch.func, name)(inside)(torch.ones(2, 3))
    assert answers == [name != "functionalize"]
    assert not torch_internals.transformed()


def test_gradients_and_profilers_leave_a_call_eager() -> None:
    x = torch.ones(2, requires_grad=True)
    assert eager(x) and not can_bypass_dispatcher(x)
    with torch.no_grad():
        assert can_bypass_dispatcher(x)
        with profile(activities=[ProfilerActivity.CPU]):
            assert eager(x) and not can_bypass_dispatcher(x)


def test_operands_as_autocast_would_have_them() -> None:
    single, half, double, integers = (
        torch.ones(2, dtype=x) for x in (torch.float32, torch.float16, torch.float64, torch.int32)
    )
    operands = single, half, double, integers, None
    assert all(x is y for x, y in zip(autocast(*operands), operands, strict=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a, b, *others = autocast(*operands)
        assert a.dtype == b.dtype == torch.bfloat16
        assert all(x is y for x, y in zip(others, operands[2:], strict=True))
        with torch.autocast("cpu", enabled=False):
            assert autocast(single)[0] is single


def internals_without(*missing: str, patch: pytest.MonkeyPatch) -> Any:
    """Return a copy of `torch_internals` for a PyTorch whose torch._C lacks these names."""
    bare: Any = SimpleNamespace(**vars(torch._C))
    for name in missing:
        inner = bare
        *parents, last = name.split(".")
        for parent in parents:
            setattr(inner, parent, SimpleNamespace(**vars(getattr(inner, parent))))
            inner = getattr(inner, parent)
        vars(inner).pop(last, None)
    spec = importlib.util.find_spec("moe_kernels.runtime.torch_internals")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    with patch.context() as context:
        context.setattr(torch, "_C", bare)
        spec.loader.exec_module(module)
    return module


def test_without_the_private_names_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = internals_without(*vars(torch._C), patch=monkeypatch)
    x = torch.ones(2, requires_grad=True)
    assert bare.tensor_guards is None and bare.empty_strided_cuda is None
    assert bare.current_device is torch.cuda.current_device and not bare.profiled()
    assert bare.transformed()  # so calls go through an autograd.Function that transforms support
    # If it is unknown whether a call is observed, it goes through torch.library.
    assert not bare.eager(x.detach()) and not bare.can_bypass_dispatcher(x.detach()) and bare.autocast_enabled()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert bare.autocast(x)[0].dtype == torch.bfloat16
    assert bare.autocast(x)[0] is x
    with bare.below_autograd():
        assert not (x * 1).requires_grad


def test_without_the_private_names_of_forward_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_current_level", "_set_fwd_grad_enabled"):
        monkeypatch.delattr(forward_ad, name)
    bare = internals_without(patch=monkeypatch)
    assert bare.forward_level() == -1 and bare.eager(torch.ones(1)) and not bare.has_tangent(torch.ones(1))
    with pytest.raises(NotImplementedError, match=rf"use reverse mode \(torch {re.escape(torch.__version__)}"):
        bare.enable_forward_mode(True)


INSTEAD: dict[str, Callable[[Any], bool]] = {  # by name in torch._C: whether its replacement is in use
    "_dynamo.guards._empty_strided_cuda": lambda x: x.empty_strided_cuda is None,
    "_dynamo.guards.TensorGuards": lambda x: x.tensor_guards is None,
    "_cuda_getDevice": lambda x: x.current_device is torch.cuda.current_device,
    "_autograd._profiler_enabled": lambda x: x.profiled is not torch._C._autograd._profiler_enabled,
    "_is_any_autocast_enabled": lambda x: x.autocast_enabled(),
    "_len_torch_dispatch_stack": lambda x: not x.eager(torch.ones(1)),
    "_functorch.peek_interpreter_stack": lambda x: x.transformed() and not x.eager(torch.ones(1)),
    "_functorch.TransformType": lambda x: x._FUNCTIONALIZE == "Functionalize",
    "_get_tracing_state": lambda x: x.jit_tracing is not torch._C._get_tracing_state,
    "_dispatch_tls_is_dispatch_key_included": lambda x: (
        x._key_included is not torch._C._dispatch_tls_is_dispatch_key_included
    ),
    "_dispatch_key_parse": lambda x: x._VMAP_MODE is None,
    "_AutoDispatchBelowADInplaceOrView": lambda x: x.below_autograd is torch.no_grad,
    "_will_engine_execute_node": lambda x: x._executed is not torch._C._will_engine_execute_node,
}


@pytest.mark.parametrize("name", INSTEAD)
def test_without_one_private_name_of_pytorch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products, gradients and transforms are correct without it."""
    without = internals_without(name, patch=monkeypatch)
    assert INSTEAD[name](without)
    if hasattr(torch._C, "_cuda_getDevice") or "cuda" not in name:  # a CPU build has none
        assert not INSTEAD[name](internals_without(patch=monkeypatch))
    for key, value in vars(without).items():
        if not key.startswith("__"):
            monkeypatch.setattr(torch_internals, key, value)
    A = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    B = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    expected, upstream = torch.cat([A[:2] @ B[0], A[2:] @ B[1]]), torch.randn(5, 4, dtype=torch.float64)
    found = grouped_gemm(A, B, offsets)
    gradients = torch.autograd.grad(expected, (A, B), upstream)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, (A, B), upstream), gradients)
    _, vjp = torch.func.vjp(lambda A, B: grouped_gemm(A, B, offsets), A.detach(), B.detach())
    torch.testing.assert_close(vjp(upstream), gradients)


ROOT = Path(__file__).parents[1]
SOURCES = {
    str(file.relative_to(ROOT)): file
    for folder in ("moe_kernels", "tritonbench_ops", "benchmarks")
    for file in ROOT.glob(f"{folder}/**/*.py")
}


def test_mocks_are_for_tests() -> None:
    assert len(SOURCES) > 100
    assert [name for name, file in SOURCES.items() if "mock" in file.read_text(encoding="utf-8")] == []


def private_names(file: Path) -> set[str]:
    """Return the private names of PyTorch that a file imports or uses."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    return {match[0] for name in found if (match := re.match(r"torch(\.\w+)*?\._(?!_)\w+", name))}


def test_private_names_of_pytorch_stand_in_one_file() -> None:
    """Benchmarks may also use those that they compare with."""
    found = {name: private_names(file) for name, file in SOURCES.items()}
    internal = found.pop("moe_kernels/runtime/torch_internals.py")
    assert "torch._C" in internal
    assert {name: names for name, names in found.items() if names and name.startswith("moe_kernels/")} == {}
    measured = {"torch._grouped_mm", "torch._scaled_grouped_mm", "torch._functorch", "torch.utils._pytree"}
    assert set().union(*found.values()) <= measured
