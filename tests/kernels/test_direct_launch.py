"""The text of a launch, alone and as a part of a plan's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_kernels import dispatch, grouped_gemm
from moe_kernels.allocate import empty
from moe_kernels.kernels import launch
from moe_kernels.kernels.direct_launch import Launch
from moe_kernels.testing import assert_grouped_gemm_close, make_inputs
from moe_kernels.traced import Notes, Number, StandIn, function


def launcher(text: str, names: dict[str, Any], *like: Any) -> Callable[..., None]:
    """Of a launch that is settled already."""
    made = launch._Launcher(lambda *_: None, lambda *args: args, {}, ())
    made.direct = Launch(text, names)
    made.function = made.direct.function(like)
    return made


def test_a_plan_in_one_function_does_the_same() -> None:
    seen: list[Any] = []
    A, offsets, out = torch.ones(40, 3), torch.zeros(5), torch.ones(40, 8)
    some = torch.ones(1, 3)
    listing = launcher(
        "note(7, {0.pointer}, {1.pointer} - 8, {1.rows.text} + 1, {2.text} * 4)", {"note": note_in(seen)}, out, some, 3
    )
    multiply = launcher(
        "note({0.pointer}, {0.rows.text}, {1.pointer}, {3.pointer}, constant)",
        {"note": note_in(seen), "constant": None},
        *(A, some, None, out, 5),
    )

    def plan(A: Any, group_offsets: Any, out: Any) -> None:
        M = A.shape[0]
        tiles = empty(((M // 16 + 3 + 2) | 1, 3), torch.int32, out)
        listing(group_offsets, tiles, 2 * M + 1)
        multiply(A, tiles, None, out, 5)

    notes = Notes()
    plan(*(StandIn(name, Number("rows"), notes) for name in ("A", "group_offsets", "out")))
    asked = [f"{name}_pointer = {name}.data_ptr()" for name in ("A", "group_offsets", "out")]
    statements = ["rows = A.shape[0]", *asked, *notes.statements]
    names = {"empty_strided": lambda *args: torch.empty_strided(*args[:2], dtype=args[2]), **notes.names}
    traced = function("traced(A, group_offsets, out)", statements, names)
    assert not seen

    for M in (40, 33, 1):
        for call in (plan, traced):
            call(A[:M], offsets, out[:M])
        first, second = seen[:2], seen[2:]
        for (seven, at_offsets, tiles, slots, odd), (at_A, rows, at_tiles, at_out, none) in (first, second):
            assert (seven, at_offsets, at_A, at_out) == (7, offsets.data_ptr(), A.data_ptr(), out.data_ptr())
            assert tiles == at_tiles - 8
            assert (slots, odd, rows, none) == (((M // 16 + 5) | 1) + 1, (2 * M + 1) * 4, M, None)
        seen.clear()


def note_in(seen: list[Any]) -> Callable[..., None]:
    return lambda *args: seen.append(args)


def test_what_cannot_be_launched_directly_cannot_be_noted() -> None:
    called: list[Any] = []
    made = launch._Launcher(called.append, lambda *args: args, {}, ())
    made.function = called.append
    with pytest.raises(TypeError, match="takes tensors"):
        made(StandIn("A", Number("rows"), Notes()))
    made(torch.ones(1))
    assert len(called) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("variant", "rows", "N"), [("basic", 20, 96), ("basic", 2, 96), ("persistent", 300, 192), ("auto", 1100, 256)]
)
def test_a_known_call_is_one_function(variant: str, rows: int, N: int, transposed: bool, device: str) -> None:
    """Of the basic kernel, also by a slot for each row, of the persistent one, and of the one with tails apart."""
    G = 4 if rows > 2 else 16

    def inputs(M: int) -> tuple[Tensor, Tensor, Tensor]:
        sizes = [M // 4 - 1, 0, M // 4 + 1, *[0] * (G - 4), M - 2 * (M // 4)]
        return make_inputs(sizes, N, 128, dtype=torch.bfloat16, device=device, transposed=transposed)

    dispatch._plans.clear()
    for M in (4 * rows, 4 * rows, 4 * rows + 1, 4 * rows + 3):
        tensors = inputs(M)
        assert_grouped_gemm_close(grouped_gemm(*tensors, variant=variant), *tensors)
    assert len(dispatch._plans) == 1
    (again,) = dispatch._plans.recent
    assert "plan" not in again.__code__.co_names
