"""When a call is taken for one like an earlier one, and goes to its plan without being checked again."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from moe_kernels import dispatch, traced
from moe_kernels.plans import set_aside
from moe_kernels.traced import StandIn

M, K, N, G = 100, 64, 32, 8
Call = tuple[str, Tensor, Tensor, Tensor, torch.dtype | None]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The numbers of rows that the plan for `like()` has been called with, on CPU tensors taken for CUDA's."""
    seen: list[int] = []

    def plan(A_packed: Tensor, B: Tensor, group_offsets: Tensor, bias: None, out: Tensor) -> None:
        assert B.dim() == 3 and out.shape == (len(A_packed), N)
        seen.append(len(A_packed))

    monkeypatch.setattr(dispatch, "on_current_device", lambda tensor: True)
    monkeypatch.setattr(dispatch, "current_device", lambda: -1)
    with set_aside(), torch.no_grad():
        dispatch._plans[dispatch._key(*call()[:4], None, None)] = known(plan)
        yield seen


def call(**changed: Any) -> Call:
    A = torch.zeros(M, K, dtype=torch.bfloat16)
    B = torch.nn.Parameter(torch.zeros(G, K, N, dtype=torch.bfloat16))
    values = {"variant": "auto", "A": A, "B": B, "offsets": torch.zeros(G + 1, dtype=torch.int32), "out_dtype": None}
    variant, A, B, offsets, out_dtype = {**values, **changed}.values()
    return variant, A, B, offsets, out_dtype


def known(plan: Callable[..., None]) -> dispatch._Known:
    return dispatch._Known(plan, [])


class Subclass(Tensor):
    pass


KNOWN: dict[str, Callable[[], Call]] = {
    "other memory": call,
    "more rows": lambda: call(A=torch.zeros(127, K, dtype=torch.bfloat16)),
    "fewer rows": lambda: call(A=torch.zeros(64, K, dtype=torch.bfloat16)),
}
OTHER: dict[str, Callable[[], Call]] = {
    "another variant": lambda: call(variant="basic"),
    "another result": lambda: call(out_dtype=torch.float32),
    "twice the rows": lambda: call(A=torch.zeros(128, K, dtype=torch.bfloat16)),
    "half the rows": lambda: call(A=torch.zeros(63, K, dtype=torch.bfloat16)),
    "another contraction": lambda: call(A=torch.zeros(M, 2 * K, dtype=torch.bfloat16)),
    "a slice": lambda: call(A=torch.zeros(M, 2 * K, dtype=torch.bfloat16)[:, :K]),
    "not aligned": lambda: call(A=torch.zeros(M * K + 1, dtype=torch.bfloat16)[1:].view(M, K)),
    "another dtype": lambda: call(A=torch.zeros(M, K, dtype=torch.float16)),
    "transposed": lambda: call(B=torch.zeros(G, N, K, dtype=torch.bfloat16).mT),
    "shared": lambda: call(B=torch.zeros(K, N, dtype=torch.bfloat16)),
    "int64": lambda: call(offsets=torch.zeros(G + 1, dtype=torch.int64)),
    "one group more": lambda: call(offsets=torch.zeros(G + 2, dtype=torch.int32)),
    "a subclass": lambda: call(A=torch.zeros(M, K, dtype=torch.bfloat16).as_subclass(Subclass)),
    "offsets of a subclass": lambda: call(offsets=torch.zeros(G + 1, dtype=torch.int32).as_subclass(Subclass)),
    "no tensor": lambda: call(offsets=[0] * (G + 1)),
    "no offsets": lambda: call(offsets=None),
}
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "gradients": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "a dispatch mode": lambda: FlopCounterMode(display=False),
    "forward derivatives": forward_ad.dual_level,
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_call_like_an_earlier_one_goes_to_its_plan(name: str, calls: list[int]) -> None:
    for _ in range(3):
        args = KNOWN[name]()
        out = dispatch._again(*args)
        assert out is not None and out.dtype == torch.bfloat16
        assert calls == [len(args[1])] * len(calls)
    assert len(calls) == 3 and len(dispatch._plans.recent) == 1


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", OTHER)
def test_another_call_does_not(name: str, warm: bool, calls: list[int]) -> None:
    if warm:
        dispatch._again(*call())
    calls.clear()
    assert dispatch._again(*OTHER[name]()) is None and not calls


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", MODES)
def test_nor_does_one_that_somebody_records(name: str, warm: bool, calls: list[int]) -> None:
    if warm:
        dispatch._again(*call())
    calls.clear()
    with MODES[name]():
        assert dispatch._again(*call()) is None and not calls
    assert dispatch._again(*call()) is not None and calls == [M]


def test_nor_does_one_inside_a_transform(calls: list[int]) -> None:
    variant, A, *rest = call()
    dispatch._again(variant, A, *rest)
    calls.clear()

    def inside(A: Tensor) -> Tensor:
        assert dispatch._again(variant, A, *rest) is None
        return A

    torch.func.vmap(inside)(torch.stack([A, A]))
    torch.func.vjp(inside, A)
    assert not calls


def test_plans_that_are_set_aside_are_not_found(calls: list[int]) -> None:
    dispatch._again(*call())
    with set_aside():
        assert dispatch._again(*call()) is None
    assert dispatch._again(*call()) is not None


def test_inference_mode_is_a_kind_of_its_own(calls: list[int]) -> None:
    with torch.inference_mode():
        for _ in range(2):
            assert dispatch._again(*call()) is not None
    assert dispatch._again(*call()) is not None and len(dispatch._plans.recent) == 2


def test_a_few_kinds_are_looked_at_first(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """And those beyond the few are not made again: that takes much longer than a call."""
    made: list[str] = []
    define = traced.define
    monkeypatch.setattr(traced, "define", lambda *args: (made.append(args[0]), define(*args))[1])
    plan = dispatch._plans[dispatch._key(*call()[:4], None, None)].plan
    every = [M << i for i in range(10)]
    for rows in every * 3:
        args = call(A=torch.zeros(rows, K, dtype=torch.bfloat16))
        dispatch._plans.setdefault(dispatch._key(*args[:4], None, None), known(plan))
        out = dispatch._again(*args)
        assert out is not None and len(out) == rows
    assert calls == every * 3 and len(dispatch._plans.recent) == 8 and len(made) == 10


def test_not_very_many_kinds_have_one_key(calls: list[int]) -> None:
    key = dispatch._key(*call()[:4], None, None)
    for options in list(itertools.product((None, torch.bfloat16), *[(False, True)] * 3)) * 2:
        out_dtype, of_A, of_B, inference = options
        args = call(out_dtype=out_dtype)
        args[1].requires_grad_(of_A), args[2].requires_grad_(of_B)
        with torch.inference_mode() if inference else nullcontext():
            assert dispatch._again(*args) is not None
    assert len(dispatch._plans[key].replays) == 8 and len(calls) == 32


@pytest.mark.parametrize("name", ["float32", "not aligned"])
def test_some_kinds_are_not_replayed(name: str, calls: list[int]) -> None:
    args = call(A=torch.zeros(M, K)) if name == "float32" else OTHER["not aligned"]()
    dispatch._plans[dispatch._key(*args[:4], None, None)] = known(dispatch._plans.popitem()[1].plan)
    for _ in range(2):
        assert dispatch._again(*args) is not None
    assert calls == [M, M] and not dispatch._plans.recent


def test_a_call_from_another_device_is_not_replayed(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch._again(*call())
    calls.clear()
    dispatch._again(*call())
    assert calls == [M]
    (replay,) = dispatch._plans.recent
    replay.__globals__["current_device"] = lambda: 1
    assert replay(*call()) is None and calls == [M]


def test_without_guards_calls_go_on(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for guards in (None, lambda *_, **__: int("no such argument")):
        monkeypatch.setattr(dispatch, "_TensorGuards", guards)
        assert dispatch._again(*call()) is not None
    assert calls == [M, M] and not dispatch._plans.recent


def test_a_plan_that_only_launches_becomes_one_function(calls: list[int]) -> None:
    seen: list[int] = []
    planned: list[object] = []

    def plan(A_packed: Any, B: Any, group_offsets: Any, bias: None, out: Any) -> None:
        planned.append(A_packed)
        slots = 2 * A_packed.shape[0] + 1
        if isinstance(A_packed, StandIn):
            text = f"seen.extend(({slots.text}, {out.pointer}, {group_offsets.pointer}))"
            A_packed.notes.note(text, {"seen": seen})
        else:
            seen.extend((slots, out.data_ptr(), group_offsets.data_ptr()))

    dispatch._plans[dispatch._key(*call()[:4], None, None)] = known(plan)
    for M in (100, 101, 127, 64):
        args = call(A=torch.zeros(M, K, dtype=torch.bfloat16))
        out = dispatch._again(*args)
        assert out is not None and out.shape == (M, N) and out.is_contiguous() and out.dtype == torch.bfloat16
        assert seen == [2 * M + 1, out.data_ptr(), args[3].data_ptr()]
        seen.clear()
    assert [type(A) for A in planned] == [Tensor, StandIn]


def test_what_fails_is_raised_and_not_done_again(calls: list[int]) -> None:
    def plan(A_packed: Tensor, *_: Any) -> None:
        calls.append(A_packed.size(0))
        if len(calls) == 2:
            raise RuntimeError("out of memory")

    dispatch._plans[dispatch._key(*call()[:4], None, None)] = known(plan)
    assert dispatch._again(*call()) is not None
    with pytest.raises(RuntimeError, match="out of memory"):
        dispatch._again(*call())
    assert dispatch._again(*call()) is not None and calls == [M] * 3


def test_a_plan_that_asks_how_many_rows_there_are_is_not_frozen(calls: list[int]) -> None:
    def plan(A_packed: Any, *_: Any) -> None:
        if A_packed.shape[0] == M:
            calls.append(M)

    dispatch._plans[dispatch._key(*call()[:4], None, None)] = known(plan)
    for rows in (M, M + 1, M):
        assert dispatch._again(*call(A=torch.zeros(rows, K, dtype=torch.bfloat16))) is not None
    assert calls == [M, M]


@pytest.mark.usefixtures("calls")
def test_replays_are_freed_with_their_plans() -> None:
    dispatch._again(*call())
    gone = weakref.ref(dispatch._plans.recent[0])
    gc.disable()
    try:
        dispatch._plans.clear()
        assert gone() is None
    finally:
        gc.enable()
