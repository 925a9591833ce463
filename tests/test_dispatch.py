"""When a call is taken for one like an earlier one, and goes to its plan without being checked again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from moe_kernels import dispatch
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
        dispatch._plans[dispatch._key(*call()[:4], None, None)] = plan, N, torch.bfloat16
        yield seen


def call(**changed: Any) -> Call:
    A = torch.zeros(M, K, dtype=torch.bfloat16)
    B = torch.nn.Parameter(torch.zeros(G, K, N, dtype=torch.bfloat16))
    values = {"variant": "auto", "A": A, "B": B, "offsets": torch.zeros(G + 1, dtype=torch.int32), "out_dtype": None}
    variant, A, B, offsets, out_dtype = {**values, **changed}.values()
    return variant, A, B, offsets, out_dtype


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


def test_a_few_kinds_are_looked_at_first(calls: list[int]) -> None:
    plan = dispatch._plans[dispatch._key(*call()[:4], None, None)]
    every = [M << i for i in range(10)]
    for rows in every:
        args = call(A=torch.zeros(rows, K, dtype=torch.bfloat16))
        dispatch._plans[dispatch._key(*args[:4], None, None)] = plan
        dispatch._again(*args)
    assert calls == every and len(dispatch._plans.recent) == 8


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

    dispatch._plans[dispatch._key(*call()[:4], None, None)] = plan, N, torch.bfloat16
    for M in (100, 101, 127, 64):
        args = call(A=torch.zeros(M, K, dtype=torch.bfloat16))
        out = dispatch._again(*args)
        assert out is not None and out.shape == (M, N) and out.is_contiguous() and out.dtype == torch.bfloat16
        assert seen == [2 * M + 1, out.data_ptr(), args[3].data_ptr()]
        seen.clear()
    assert [type(A) for A in planned] == [Tensor, StandIn]


def test_what_fails_is_left_to_an_ordinary_call(calls: list[int]) -> None:
    def plan(A_packed: Tensor, *_: Any) -> None:
        calls.append(A_packed.size(0))
        if len(calls) == 2:
            raise RuntimeError("out of memory")

    dispatch._plans[dispatch._key(*call()[:4], None, None)] = plan, N, torch.bfloat16
    assert [dispatch._again(*call()) is not None for _ in range(3)] == [True, False, True]
    assert calls == [M] * 3
