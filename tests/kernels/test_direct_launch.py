"""The text of a launch, alone and as a part of a plan's."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
from triton.tools.tensor_descriptor import TensorDescriptor

import moe_kernels
from moe_kernels import dispatch, grouped_gemm, reference
from moe_kernels.allocate import empty
from moe_kernels.kernels import direct_launch, launch
from moe_kernels.kernels.direct_launch import Launch, _observable
from moe_kernels.kernels.tiles import windows
from moe_kernels.plans import set_aside
from moe_kernels.testing import assert_grouped_gemm_close, assert_within_budget, make_inputs
from moe_kernels.traced import Notes, Number, StandIn, define


def launcher(text: str, names: dict[str, Any], *like: Any) -> Callable[..., None]:
    """Of a launch that is settled already."""
    made = launch._Launcher(lambda *_: None, lambda *args: args, {}, ())
    made.direct = Launch(text, names)
    made.launch = made.direct.compiled(like)
    return made


def test_a_plan_in_one_function_does_the_same() -> None:
    seen: list[Any] = []
    A, offsets, out = torch.ones(40, 3), torch.zeros(5), torch.ones(40, 8)
    some = torch.ones(1, 3)
    listing = launcher(
        "note(7, {0.pointer}, {1.pointer} - 8, {1.rows} + 1, {2} * 4)", {"note": note_in(seen)}, out, some, 3
    )
    multiply = launcher(
        "note({0.pointer}, {0.rows}, {1.pointer}, {3.pointer}, constant)",
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
    asked_for = []

    def empty_strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        asked_for.append((shape, strides, dtype))
        return torch.empty_strided(shape, strides, dtype=dtype)

    traced = define("traced(A, group_offsets, out)", statements, {"empty_strided": empty_strided, **notes.names})
    assert not seen

    for M in (40, 33, 1):
        for call in (plan, traced):
            call(A[:M], offsets, out[:M])
        first, second = seen[:2], seen[2:]
        for (seven, at_offsets, tiles, slots, odd), (at_A, rows, at_tiles, at_out, none) in (first, second):
            assert (seven, at_offsets, at_A, at_out) == (7, offsets.data_ptr(), A.data_ptr(), out.data_ptr())
            assert tiles == at_tiles - 8
            assert (slots, odd, rows, none) == (((M // 16 + 5) | 1) + 1, (2 * M + 1) * 4, M, None)
        assert asked_for.pop() == (((M // 16 + 5) | 1, 3), (3, 1), torch.int32)
        seen.clear()


def note_in(seen: list[Any]) -> Callable[..., None]:
    return lambda *args: seen.append(args)


@pytest.mark.parametrize("version", ["3.6", "3.7"])
def test_what_a_launch_is_made_of(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher and a driver that only note what they are given, in place of this version of Triton's."""
    seen: list[Any] = []

    def closure(launcher: Callable[..., None]) -> Callable[..., None]:
        return lambda *args: launcher(*args)

    launcher = SimpleNamespace(
        launch=closure(note_in(seen)),
        **dict(launch_cooperative_grid=False, launch_pdl=True, global_scratch_size=0, profile_scratch_size=0),
        **(dict(arg_annotations=["kinds"], kernel_signature=b"signature") if version == "3.7" else {}),
    )
    meta = {"elem_type": 6, "elem_size": 2, "swizzle": 3, "fp4_padded": False}
    blocks = [16, 32], [1, 16, 32], [16, 1, 32]
    metadata = SimpleNamespace(tensordesc_meta=[meta | {"block_size": block} for block in blocks])
    binary = SimpleNamespace(run=launcher, metadata=metadata, function=99, packed_metadata=(4, 1, 1000))
    encode = "fill_tma_descriptor_tiled" if version == "3.7" else "fill_tma_descriptor"
    utils = SimpleNamespace(**{encode: lambda pointer, *encoding: (pointer, *encoding)})
    active = SimpleNamespace(
        utils=utils, get_current_device=lambda: 3, get_current_stream=lambda device: f"of {device}"
    )
    monkeypatch.setattr(direct_launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(direct_launch, "default_launcher", lambda *_, **__: binary)

    def run(A: Tensor, B: Tensor, ends: Tensor, bias: None, out: Tensor, slots: int, odd: int, _launcher: Any) -> None:
        a, b = (TensorDescriptor.from_tensor(x, block) for x, block in zip((A, B), blocks, strict=False))
        o = TensorDescriptor(out, [16, out.size(2), 64], [64, 64, 1], blocks[2])  # as Helion puts columns last
        _launcher("kernel", (slots * 4,), a, b, ends, o, odd, slots, 1.5, num_warps=4)

    def tensors(M: int) -> tuple[Any, ...]:
        half = torch.float16
        whole = torch.zeros(M, 64, dtype=half)
        return torch.zeros(M, 64, dtype=half), torch.zeros(3, 64, 64, dtype=half), torch.zeros(4), None, whole

    def given(M: int) -> tuple[Any, ...]:
        *others, out = tensors(M)
        return *others, windows(out, 16)

    launch_ = direct_launch.direct(run, (*given(32), 3, 5), {0: 0, 4: 16}, {1}).compiled((*given(32), 3, 5))
    for M in (32, 100):
        A, B, ends, _, out = tensors(M)
        launch_(A, B, ends, None, out, 7, 2 * M + 1)
        given_to_launcher, packed, unobserved, scratch = seen.pop(), (4, 1, 1000), (None, None, None), (None, None)
        if version == "3.7":
            *settled, arguments = given_to_launcher
            expected = [packed, *unobserved, *scratch, ["kinds"], b"signature"]
        else:
            settled, arguments = list(given_to_launcher[:13]), given_to_launcher[13:]
            expected = [*scratch, packed, *unobserved]
        assert settled == [28, 1, 1, "of 3", 99, False, True, *expected]
        encoding = lambda block: (3, 2, TMA_DTYPE_DEVICE_TO_HOST[6], block)  # noqa: E731
        shapes = [M, 64], [3, 64, 64], [16, M + 16, 64]
        strides = [64, 1], [4096, 64, 1], [64, 64, 1]
        places = A.data_ptr(), B.data_ptr(), out.data_ptr() - 16 * 64 * 2
        a, b, o = (
            [(place, *encoding(block), shape, stride, 0), *shape, *stride]
            for place, block, shape, stride in zip(places, blocks, shapes, strides, strict=True)
        )
        assert arguments == (*a, *b, ends.data_ptr(), *o, 2 * M + 1, 7, 1.5)


@pytest.mark.parametrize("listens", [True, False])
def test_a_profiler_is_told_of_a_launch(listens: bool) -> None:
    text = _observable("raw", "{0} * 4, 1, 1", "metadata({0})", "{1.pointer}, {1.rows}")
    seen: list[Any] = []
    hook = SimpleNamespace(calls=[print] if listens else [])
    hooks = SimpleNamespace(launch_enter_hook=hook, launch_exit_hook="exit")
    names = {"raw": note_in(seen), "metadata": lambda n: f"of {n}", "hooks": hooks}
    tensor = torch.ones(5, 2)
    Launch(text, names).compiled((3, tensor))(7, tensor)
    told = ("of 7", hook, "exit") if listens else (None, None, None)
    assert seen == [(28, 1, 1, *told, tensor.data_ptr(), 5)]


def test_what_is_not_known_yet_decides_nothing() -> None:
    M = Number("M")
    assert str((M // 16 + M + 2) | 1) == "(((" + "(M // 16) + M) + 2) | 1)"
    for decide in (bool, lambda M: M == 100, lambda M: M != 100, lambda M: M < 100, lambda M: max(M, 3)):
        with pytest.raises(TypeError):
            decide(M)


def test_what_cannot_be_launched_directly_cannot_be_noted() -> None:
    called: list[Any] = []
    made = launch._Launcher(called.append, lambda *args: args, {}, ())
    made.launch = called.append
    with pytest.raises(TypeError, match="takes tensors"):
        made(StandIn("A", Number("rows"), Notes()))
    made(torch.ones(1))
    assert len(called) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["[G, K, N]", "[G, N, K]", "[K, N]"])
@pytest.mark.parametrize(
    ("variant", "rows", "N"), [("basic", 20, 96), ("basic", 2, 96), ("persistent", 300, 192), ("persistent", 1100, 256)]
)
def test_a_known_call_is_one_function(variant: str, rows: int, N: int, layout: str, device: str) -> None:
    """Of the basic kernel, also by a slot for each row, of the persistent one, and of the one with tails apart."""
    G = 4 if rows > 2 else 16

    def inputs(M: int) -> tuple[Tensor, Tensor, Tensor]:
        sizes = [M // 4 - 1, 0, M // 4 + 1, *[0] * (G - 4), M - 2 * (M // 4)]
        transposed, per_group = layout == "[G, N, K]", layout != "[K, N]"
        return make_inputs(
            sizes, N, 128, dtype=torch.bfloat16, device=device, transposed=transposed, per_group=per_group
        )

    dispatch._plans.clear()
    for M in (4 * rows, 4 * rows, 4 * rows + 1, 4 * rows + 3):
        tensors = inputs(M)
        assert_grouped_gemm_close(grouped_gemm(*tensors, variant=variant), *tensors)
    assert len(dispatch._plans) == 1
    (replay,) = dispatch._plans.recent
    assert "plan" not in replay.__globals__


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "launches"), [(20, 1), (300, 2)])
def test_tritons_hooks_see_a_known_call(rows: int, launches: int, device: str) -> None:
    from triton import knobs

    tensors = make_inputs([rows] * 4, 192, 128, dtype=torch.bfloat16, device=device)
    for _ in range(2):
        grouped_gemm(*tensors)
    seen: list[Any] = []
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        out = grouped_gemm(*tensors)
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    assert len(seen) == launches
    assert_grouped_gemm_close(out, *tensors)
    grouped_gemm(*tensors)
    assert len(seen) == launches


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "N"), [(20, 64), (200, 64), (1100, 256)])
def test_where_nothing_can_be_launched_directly(
    rows: int, N: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a Triton whose launchers look different: the kernels may not rely on TMA then to leave out anything."""

    def unknown(*_: Any) -> None:
        raise KeyError("no such launcher")

    monkeypatch.setattr(direct_launch, "_direct", unknown)
    A, B, group_offsets = make_inputs([rows, 0, rows + 7], N, 64, dtype=torch.bfloat16, device=device)
    guard = torch.full((A.size(0) + 300, 64), float("nan"), dtype=A.dtype, device=device)
    A = guard[: A.size(0)].copy_(A)
    w = B.mT.contiguous()
    with set_aside():
        for _ in range(2):
            assert_grouped_gemm_close(grouped_gemm(A, B, group_offsets), A, B, group_offsets)
        act = moe_kernels.swiglu_ffn(A, w, group_offsets)
        gradient = moe_kernels.grouped_gemm_wgrad(A, A, group_offsets)
    exact = reference.swiglu_ffn(A.double(), w.double(), group_offsets)
    assert_within_budget(act, reference.swiglu_ffn(A, w, group_offsets), exact, scale=16 * exact.abs().amax().item())
    exact = reference.grouped_gemm_wgrad(A.double(), A.double(), group_offsets)
    plain = reference.grouped_gemm_wgrad(A, A, group_offsets)
    assert_within_budget(gradient, plain, exact, scale=16 * exact.abs().amax().item())
