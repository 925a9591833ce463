"""Uniform and varied products on a CPU: results, gradients, refusals, and the schedule of varied products."""

from __future__ import annotations

import doctest
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.overrides import TorchFunctionMode

from moe_kernels import (
    plan_varied_grouped_gemm,
    reference,
    schedule,
    uniform_grouped_gemm,
    varied_grouped_gemm,
    varied_schedule,
)
from moe_kernels.ops.batched import VariedLaunch, _in_memory, _on_device
from moe_kernels.runtime import cache, torch_internals
from moe_kernels.schedule import Tile, tile_counts

sizes = st.integers(0, 5)


def uniform_inputs(G: int, M: int, N: int, K: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(G + 7 * M + 49 * N + 343 * K)
    shapes = (G, M, K), (G, K, N)
    A, B = (torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes)
    return A, B


@pytest.mark.parametrize("function", [uniform_grouped_gemm, reference.uniform_grouped_gemm])
@settings(deadline=None, max_examples=30)
@given(G=sizes, M=sizes, N=sizes, K=sizes)
def test_each_group_meets_its_own_matrix(function: Any, G: int, M: int, N: int, K: int) -> None:
    A, B = uniform_inputs(G, M, N, K)
    expected = torch.zeros(G, M, N, dtype=torch.float64)
    for g in range(G):
        for m in range(M):
            expected[g, m] = (A[g, m, :, None] * B[g]).sum(0)
    flat_A, flat_B = A.reshape(G * M, K), B.reshape(G * K, N)
    for a, b in ((A, B), (flat_A, flat_B), (A, flat_B), (flat_A, B)):
        out = function(a, b, G)
        torch.testing.assert_close(out, expected.view(*a.shape[:-1], N), rtol=1e-12, atol=1e-12)


def test_result_dtypes_of_uniform_products() -> None:
    A, B = uniform_inputs(2, 3, 4, 5, torch.bfloat16)
    assert torch.equal(uniform_grouped_gemm(A, B, 2), torch.bmm(A, B))
    for a, b, out_dtype in (
        (A, B, torch.float32),
        (A, B.half(), None),
        (A.float(), B, torch.float16),
        (A.float() / 3, B.float() / 3, torch.bfloat16),
    ):
        out = uniform_grouped_gemm(a, b, 2, out_dtype=out_dtype)
        expected = torch.bmm(a.float(), b.float()).to(out_dtype or torch.promote_types(a.dtype, b.dtype))
        assert out.dtype == expected.dtype
        assert torch.equal(out, expected)
    assert uniform_grouped_gemm(A.double(), B, 2).dtype == torch.float64


@pytest.mark.parametrize("flat", [True, False])
def test_gradients_of_uniform_products(flat: bool) -> None:
    A, B = (x.requires_grad_() for x in uniform_inputs(2, 3, 4, 2))

    def product(a: Tensor, b: Tensor) -> Tensor:
        return uniform_grouped_gemm(a.flatten(0, 1), b.flatten(0, 1), 2) if flat else uniform_grouped_gemm(a, b, 2)

    assert gradcheck(product, (A, B))
    assert gradgradcheck(product, (A, B))
    assert not product(A, B)._is_view()


ok = torch.zeros(6, 4)
flat_B = torch.zeros(8, 5)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([1], flat_B, 2), TypeError, "A: expected a torch.Tensor, got list"),
        ((ok, None, 2), TypeError, "B: expected a torch.Tensor, got NoneType"),
        ((ok, flat_B, 2.0), TypeError, "num_groups: expected an int, got float"),
        ((ok, flat_B, True), TypeError, "num_groups: expected an int, got bool"),
        ((ok, flat_B, -2), ValueError, "num_groups: expected at least 0, got -2"),
        ((ok.long(), flat_B, 2), TypeError, r"A: expected one of bfloat16, .*got torch.int64"),
        ((ok, flat_B.bool(), 2), TypeError, r"B: expected one of bfloat16, .*got torch.bool"),
        ((ok[0], flat_B, 2), ValueError, r"A: expected shape \[G \* M, K\] or \[G, M, K\], got \[4\]"),
        ((ok, flat_B[None, None], 2), ValueError, r"B: expected shape \[G \* K, N\] or .*got \[1, 1, 8, 5\]"),
        ((ok, flat_B, 4), ValueError, r"A: expected rows that 4 groups share evenly, got \[6, 4\]"),
        ((ok, flat_B, 0), ValueError, r"A: expected rows that 0 groups share evenly, got \[6, 4\]"),
        ((ok.view(2, 3, 4), flat_B, 3), ValueError, r"A: expected 3 groups, got \[2, 3, 4\]"),
        ((ok, flat_B[:-1], 2), ValueError, r"B: expected shape \[G \* K, N\] = \[8, N\] for A \[6, 4\], got \[7, 5\]"),
        (
            (ok, flat_B.view(2, 2, 10), 2),
            ValueError,
            r"B: expected K = 4 as in A \[6, 4\], got K = 2 in shape \[2, 2, 10\]$",
        ),
        ((ok, flat_B.view(1, 4, 10), 2), ValueError, r"B: expected shape \[G, K, N\] = \[2, 4, N\] .*got \[1, 4, 10\]"),
        ((ok, flat_B.view(2, 5, 4), 2), ValueError, r"B: .*got K = 5 in shape \[2, 5, 4\]; for \[G, N, K\] pass W.mT"),
        ((ok, flat_B.to("meta"), 2), ValueError, "B: expected on cpu with A, got on meta"),
    ],
)
@pytest.mark.parametrize("function", [uniform_grouped_gemm, reference.uniform_grouped_gemm])
def test_refusals_of_uniform_products(
    function: Any, arguments: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        function(*arguments)


def test_a_bool_is_no_repeat_of_a_number_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(cache, "repeat", lambda operator, tensors, requested: asked.append(requested))
    A, B = uniform_inputs(1, 3, 4, 2)
    uniform_grouped_gemm(A, B, 1)
    with pytest.raises(TypeError, match=r"^num_groups: expected an int, got bool"):
        uniform_grouped_gemm(A, B, True)
    assert len(asked) == len(set(asked)) == 2


@pytest.mark.parametrize("out_dtype", [torch.int32, "float32"])
def test_refused_result_dtypes_of_uniform_products(out_dtype: Any) -> None:
    with pytest.raises(TypeError, match="out_dtype: expected one of"):
        uniform_grouped_gemm(ok, flat_B, 2, out_dtype=out_dtype)


def test_uniform_products_exported_with_any_number_of_groups() -> None:
    class Layer(torch.nn.Module):
        def forward(self, A: Tensor, B: Tensor) -> Tensor:
            return uniform_grouped_gemm(A, B, A.size(0))

    G = torch.export.Dim("G", min=2)
    A, B = torch.randn(5, 2, 3), torch.randn(5, 3, 4)
    program = torch.export.export(Layer(), (A[:3], B[:3]), dynamic_shapes={"A": {0: G}, "B": {0: G}})
    torch.testing.assert_close(program.module()(A, B), torch.bmm(A, B))


shapes_strategy = st.lists(st.tuples(*[st.integers(0, 5)] * 3), max_size=5)
varied_functions = pytest.mark.parametrize(
    "function", [varied_grouped_gemm, plan_varied_grouped_gemm, reference.varied_grouped_gemm]
)


def varied_inputs(
    shapes: list[tuple[int, int, int]], dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(len(shapes))
    A = [torch.randn(M, K, dtype=torch.float64, generator=generator).to(dtype) for M, _, K in shapes]
    B = [torch.randn(K, N, dtype=torch.float64, generator=generator).to(dtype) for _, N, K in shapes]
    return A, B


@settings(deadline=None, max_examples=30)
@given(shapes=shapes_strategy)
def test_each_pair_is_multiplied(shapes: list[tuple[int, int, int]]) -> None:
    A, B = varied_inputs(shapes)
    expected = [(a[:, :, None] * b[None]).sum(1) for a, b in zip(A, B, strict=True)]
    given_out = [torch.full((M, N), float("nan"), dtype=torch.float64) for M, N, _ in shapes]
    plan = plan_varied_grouped_gemm(A, B)
    for outs in (
        varied_grouped_gemm(A, B),
        varied_grouped_gemm(tuple(A), tuple(B)),
        varied_grouped_gemm(A, B, out=given_out),
        varied_grouped_gemm(A, B, out=tuple(given_out)),
        given_out,
        plan(),
        plan_varied_grouped_gemm(A, B, out=given_out)(),
    ):
        assert type(outs) is list and len(outs) == len(expected)
        for out, exact in zip(outs, expected, strict=True):
            torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-12)


@varied_functions
def test_no_varied_products(function: Any) -> None:
    result = function([], [])
    assert (result() if function is plan_varied_grouped_gemm else result) == []


def test_autocast_refuses_to_plan_what_it_would_convert() -> None:
    """A plan reads the tensors that it was given, whereas the function multiplies converted copies."""
    A, B = ([x.bfloat16() for x in tensors] for tensors in varied_inputs([(2, 3, 4), (1, 2, 2)]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for out, a, b in zip(plan_varied_grouped_gemm(A, B)(), A, B, strict=True):
            assert torch.equal(out, a @ b)
        A, B = [a.float() for a in A], [b.float() for b in B]
        with pytest.raises(ValueError, match=r"autocast would convert the operands.*\.to\(torch\.bfloat16\)"):
            plan_varied_grouped_gemm(A, B)
        assert varied_grouped_gemm(A, B)[0].dtype == torch.bfloat16
        given = [a.new_zeros(a.size(0), b.size(1)) for a, b in zip(A, B, strict=True)]
        plan_varied_grouped_gemm(A, B, out=given)()  # which autocast does not convert
    for outs in (given, plan_varied_grouped_gemm(A, B)()):
        for out, a, b in zip(outs, A, B, strict=True):
            assert torch.equal(out, a @ b)


def test_autocast_converts_nothing_with_out() -> None:
    [a], [b] = varied_inputs([(2, 3, 4)], torch.float32)
    out = torch.empty(2, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert varied_grouped_gemm([a], [b], out=[out])[0] is out
    assert torch.equal(out, a @ b)


def test_gradients_of_varied_products() -> None:
    A, B = varied_inputs([(2, 3, 4), (1, 2, 2), (0, 2, 1)])
    tensors = [x.requires_grad_() for x in (*A, *B)]

    def product(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(varied_grouped_gemm(tensors[:3], tensors[3:]))

    assert gradcheck(product, tensors)
    assert gradgradcheck(product, tensors)


@pytest.mark.parametrize("of", ["group_A", "group_B", "out"])
@varied_functions
def test_varied_products_have_no_gradients_with_out(function: Any, of: str) -> None:
    """torch.mm(out=) has none either."""
    A, B = varied_inputs([(2, 3, 4), (1, 2, 2)])
    out = [torch.full((2, 3), float("nan"), dtype=torch.float64), torch.full((1, 2), float("nan"), dtype=torch.float64)]
    {"group_A": A, "group_B": B, "out": out}[of][1].requires_grad_()
    with pytest.raises(RuntimeError, match="requires grad"):
        torch.mm(A[1], B[1], out=out[1])
    with pytest.raises(RuntimeError, match=rf"^{of}\[1\]: out= has no gradients, but this tensor requires grad"):
        function(A, B, out=out)
    assert all(o.isnan().all() for o in out)
    with torch.no_grad():
        result = function(A, B, out=out)
        for o, a, b in zip(result() if function is plan_varied_grouped_gemm else result, A, B, strict=True):
            torch.testing.assert_close(o, a @ b)


@pytest.mark.parametrize("function", [varied_grouped_gemm, plan_varied_grouped_gemm])
def test_out_in_vmap(function: Any) -> None:
    A, B = varied_inputs([(2, 3, 4)])
    out = [torch.empty(2, 3, dtype=torch.float64)]
    with pytest.raises(RuntimeError, match=r"^out: expected None in torch\.vmap and transforms of torch\.func"):
        torch.vmap(lambda a: function([a], B, out=out))(torch.stack(A))
    plan = plan_varied_grouped_gemm(A, B, out=out)
    assert torch.equal(torch.vmap(lambda x: x + plan()[0])(torch.zeros(1, 1)), (A[0] @ B[0])[None])


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
@pytest.mark.parametrize("function", [varied_grouped_gemm, plan_varied_grouped_gemm])
def test_out_in_transforms_of_other_tensors(function: Any, transform: Any) -> None:
    A, B = varied_inputs([(2, 3, 4)])
    out = [torch.zeros(2, 3, dtype=torch.float64)]

    def inside(x: Tensor) -> Tensor:
        function(A, B, out=out)
        return x.sum()

    with pytest.raises(RuntimeError, match=r"^out: expected None in torch\.vmap and transforms of torch\.func"):
        transform(inside)(torch.ones(3))
    assert not out[0].any()


def test_more_rows_than_kernels_can_count() -> None:
    A, B, out = (torch.empty(shape, device="meta") for shape in ((2**30, 1), (1, 1), (2**30, 1)))
    with pytest.raises(ValueError, match=f"^group_A: expected at most {2**30 - 1} rows, got {2**30}; split"):
        VariedLaunch([B, A], [B, B], [B, out])


@pytest.mark.parametrize("N", [1, 2])
def test_the_contiguous_dimension_of_vectors_is_the_aligned_one(N: int) -> None:
    columns = [torch.zeros(N, K, dtype=torch.bfloat16).mT for K in (64, 32)]
    for matrices, contiguous in ((columns, 0), ([x.mT for x in columns], 1)):
        assert _in_memory(matrices, matrices[0], 8)[1:] == (contiguous, 8)


def test_no_plans_of_transformed_tensors() -> None:
    A, B = varied_inputs([(2, 3, 4)])
    for transform in (
        torch.vmap(lambda a: plan_varied_grouped_gemm([a], B)()[0]),
        lambda a: torch.func.jvp(lambda x: plan_varied_grouped_gemm([x[0]], B)()[0], (a,), (a,)),
    ):
        with pytest.raises(RuntimeError, match=r"^plan_varied_grouped_gemm: .* call varied_grouped_gemm there"):
            transform(torch.stack(A))
    plan = plan_varied_grouped_gemm(A, B)
    x = torch.ones(2, 3, dtype=torch.float64)
    value, tangent = torch.func.jvp(lambda x: x * plan()[0], (x,), (2 * x,))
    assert torch.equal(value, A[0] @ B[0]) and torch.equal(tangent, 2 * value)


def test_a_plan_gives_no_gradients() -> None:
    A, B = varied_inputs([(2, 3, 4)])
    (out,) = plan_varied_grouped_gemm([a.requires_grad_() for a in A], [b.requires_grad_() for b in B])()
    assert not out.requires_grad


def test_a_plan_keeps_a_list_of_its_own() -> None:
    A, B = varied_inputs([(2, 3, 4)])
    out = torch.zeros(2, 3, dtype=torch.float64)
    given = [out]
    plan = plan_varied_grouped_gemm(A, B, out=given)
    given[0] = torch.zeros_like(out)
    assert plan()[0] is out and torch.equal(out, A[0] @ B[0])
    assert not given[0].any()


@pytest.mark.parametrize("to", ["new", "out"])
def test_a_plan_is_freed_with_its_last_reference(to: str) -> None:
    """Not by the garbage collector later, as it keeps its tensors."""
    A, B = varied_inputs([(2, 3, 4)])
    kept = weakref.ref(plan_varied_grouped_gemm(A, B, out=[A[0].new_empty(2, 3)] if to == "out" else None))
    assert kept() is None


@varied_functions
def test_out_of_inference_mode(function: Any) -> None:
    A, B = varied_inputs([(2, 3, 4)])
    with torch.inference_mode():
        out = [torch.zeros(2, 3, dtype=torch.float64)]
        plan = plan_varied_grouped_gemm(A, B, out=out)
        assert torch.equal(plan()[0], A[0] @ B[0])
        out[0].zero_()
    for call in (lambda: function(A, B, out=out), plan):
        with pytest.raises(RuntimeError, match=r"^out\[0\]: a tensor of inference mode cannot be written to"):
            call()
    assert not out[0].any()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_plans_in_compiled_functions(backend: str) -> None:
    """They run outside of graphs; the results are those of eager calls."""
    A, B = varied_inputs([(2, 3, 4), (5, 1, 2)])
    plan = plan_varied_grouped_gemm(A, B)
    out = [torch.zeros(2, 3, dtype=torch.float64), torch.zeros(5, 1, dtype=torch.float64)]
    to_out = plan_varied_grouped_gemm(A, B, out=out)
    expected = 2 * A[0] @ B[0]
    for function in (
        lambda A, B: plan()[0] * 2,
        lambda A, B: to_out()[0] * 2,
        lambda A, B: plan_varied_grouped_gemm(A, B)()[0] * 2,
        lambda A, B: varied_grouped_gemm(A, B, out=out)[0] * 2,
    ):
        torch.testing.assert_close(torch.compile(function, backend=backend)(A, B), expected)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"_gemm\(out=\) and its plans read addresses"):
            torch.compile(function, backend=backend, fullgraph=True)(A, B)


def test_the_reference_in_one_graph() -> None:
    A, B = varied_inputs([(2, 3, 4)])
    out = [torch.zeros(2, 3, dtype=torch.float64)]
    for to in (None, out):
        compiled = torch.compile(
            lambda A, B, to=to: reference.varied_grouped_gemm(A, B, out=to), fullgraph=True, backend="eager"
        )
        torch.testing.assert_close(compiled(A, B)[0], A[0] @ B[0])
    assert bool(out[0].any())


def test_out_where_nothing_tells_of_transforms(monkeypatch: pytest.MonkeyPatch) -> None:
    A, B = varied_inputs([(2, 3, 4)])
    monkeypatch.setattr(torch_internals, "_functorch_level", lambda: torch_internals._unknown_transform)
    out = [torch.zeros(2, 3, dtype=torch.float64)]
    for call in (lambda: varied_grouped_gemm(A, B, out=out), plan_varied_grouped_gemm(A, B, out=out)):
        out[0].zero_()
        assert torch.equal(call()[0], A[0] @ B[0]) and bool(out[0].any())


def _planned(a: Tensor, B: list[Tensor]) -> Tensor:
    return plan_varied_grouped_gemm([a], B)()[0].sum().square()


def _to_out(a: Tensor, B: list[Tensor]) -> Tensor:
    return varied_grouped_gemm([a], B, out=[a.new_empty(2, 3)])[0].sum().square()


@pytest.mark.parametrize("function", [_planned, _to_out])
def test_nested_transforms_get_no_zeros(function: Any) -> None:
    """In forward mode, too, tensors that another transform has wrapped have no memory to read or write."""
    [a], B = varied_inputs([(2, 3, 4)])
    s = torch.ones(2, dtype=torch.float64)
    f = partial(function, B=B)
    for nested in (
        lambda: torch.func.jvp(lambda s: torch.func.grad(f)(a) * s.sum(), (s,), (s,)),
        lambda: torch.func.grad(lambda a: torch.func.jvp(lambda s: f(a) * s.sum(), (s,), (s,))[0])(a),
        lambda: torch.func.jvp(lambda s: torch.vmap(f)(a[None]) * s.sum(), (s,), (s,)),
        lambda: torch.func.hessian(f)(a),
    ):
        with pytest.raises(RuntimeError, match=r"^(plan_varied_grouped_gemm: plans|out: expected None in torch\.vmap)"):
            nested()


def test_the_schedules_example() -> None:
    assert doctest.testmod(schedule).attempted > 0
    assert doctest.testmod(schedule).failed == 0


@pytest.mark.parametrize("numbers", [(0, 2, 1), (2, -1, 1), (2, 2, 0), (2, 2.0, 1)], ids=str)
def test_a_schedule_needs_blocks_and_workers(numbers: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"(block_m|block_n|num_workers): expected an int of at least 1, got"):
        varied_schedule([(5, 3, 4)], *numbers)


@pytest.mark.parametrize("shapes", [None, 3, [1, 2], [(1, 2)], [(1, 2, 3.0)], [(1, -2, 3)], "abc"], ids=str)
def test_a_schedule_needs_shapes(shapes: Any) -> None:
    with pytest.raises(ValueError, match=r"shapes: expected \[\(M, N, K\), \.\.\.\] with ints of at least 0, got "):
        varied_schedule(shapes, 2, 2, 1)


def test_the_worked_example() -> None:
    """15 and 28 tiles, 6 workers: worker t % 6 computes tile t, counted across both problems."""
    shapes = [(192, 320, 128), (256, 448, 192)]
    assert tile_counts(shapes, 64, 64) == [(3, 5), (4, 7)]
    workers = varied_schedule(shapes, 64, 64, num_workers=6)
    assert [len(tiles) for tiles in workers] == [8, 7, 7, 7, 7, 7]
    in_order = [Tile(0, m, n) for m in range(3) for n in range(5)] + [Tile(1, m, n) for m in range(4) for n in range(7)]
    for w, tiles in enumerate(workers):
        assert tiles == in_order[w::6]
    # Worker 3 moves from problem 0 to problem 1 between its second tile, 9, and its third, 15.
    assert workers[3][:3] == [Tile(0, 0, 3), Tile(0, 1, 4), Tile(1, 0, 0)]


@settings(deadline=None, max_examples=30)
@given(shapes=st.lists(st.tuples(*[st.integers(0, 300)] * 3), max_size=5), workers=st.integers(1, 9))
def test_a_schedule_has_every_tile_once(shapes: list[tuple[int, int, int]], workers: int) -> None:
    covered = [torch.zeros(M, N, dtype=torch.int32) for M, N, _ in shapes]
    schedules = varied_schedule(shapes, 64, 32, workers)
    assert len(schedules) == workers
    assert max(map(len, schedules)) - min(map(len, schedules)) <= 1
    for p, row, column in (tile for tiles in schedules for tile in tiles):
        covered[p][row * 64 : row * 64 + 64, column * 32 : column * 32 + 32] += 1
    assert all((c == 1).all() for c in covered)


a, b, o = torch.zeros(3, 4), torch.zeros(4, 5), torch.zeros(3, 5)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((a, [b], None), TypeError, "group_A: expected a list of tensors, got Tensor"),
        (([a], None, None), TypeError, "group_B: expected a list of tensors, got NoneType"),
        (([a, a], [b], None), ValueError, "group_B: expected 2 tensors as in group_A, got 1"),
        (([], [b], None), ValueError, "group_B: expected 0 tensors as in group_A, got 1"),
        (([a], [b], []), ValueError, "out: expected 1 tensors as in group_A, got 0"),
        (([a], [b], o), TypeError, "out: expected a list of tensors, got Tensor"),
        (([None], [b], None), TypeError, r"group_A\[0\]: expected a torch.Tensor, got NoneType"),
        (([a, a], [b, 1], None), TypeError, r"group_B\[1\]: expected a torch.Tensor, got int"),
        (([a.int()], [b.int()], None), TypeError, r"group_A\[0\]: expected one of bfloat16.* got torch.int32"),
        (([a, a.half()], [b, b], None), TypeError, r"group_A\[1\]: expected torch.float32 as group_A\[0\]"),
        (([a], [b.bfloat16()], None), TypeError, r"group_B\[0\]: expected torch.float32 .* got torch.bfloat16"),
        (([a], [b], [o.double()]), TypeError, r"out\[0\]: expected torch.float32 .* got torch.float64"),
        (([a, a[0]], [b, b], None), ValueError, r"group_A\[1\]: expected a 2-D tensor, got shape \[4\]"),
        (([a], [b[None]], None), ValueError, r"group_B\[0\]: expected a 2-D tensor, got shape \[1, 4, 5\]"),
        (
            ([a, a], [b, b.to("meta")], None),
            ValueError,
            r"group_B\[1\]: expected on cpu with group_A\[0\], got on meta",
        ),
        (([a], [b], [o.to("meta")]), ValueError, r"out\[0\]: expected on cpu with group_A\[0\], got on meta"),
        (([a, a], [b, b[1:]], None), ValueError, r"group_B\[1\]: expected K = 4 as in group_A\[1\] .*got K = 3"),
        (([a], [b.T], None), ValueError, r"group_B\[0\]: .*got K = 5 in shape \[5, 4\]; for \[N, K\] pass W.mT"),
        (((x for x in [a]), [b], None), TypeError, r"group_A: expected .*got generator; pass list\(group_A\)$"),
        (([a], {b}, None), TypeError, r"group_B: expected .*got set; pass list\(group_B\)$"),
        (([a], {0: b}, None), TypeError, "group_B: expected a list of tensors, got dict$"),
        (([a], [b], (x for x in [o])), TypeError, r"out: expected .*got generator; pass list\(out\)$"),
        (
            ([a], [b.to_sparse()], None),
            TypeError,
            r"group_B\[0\]: expected a dense tensor, got layout .*\.to_dense\(\)",
        ),
        (([a], [b], [o.t()]), ValueError, r"out\[0\]: expected shape \[3, 5\], got \[5, 3\]"),
        (([a], [b], [o[:1].expand(3, 5)]), ValueError, r"out\[0\]: expected every element in memory of its own"),
        (([a], [b], [o.as_strided((3, 5), (1, 2))]), ValueError, r"expected every element .* got strides \(1, 2\)"),
    ],
)
@varied_functions
def test_refusals_of_varied_products(
    function: Any, arguments: tuple[Any, Any, Any], error: type[Exception], text: str
) -> None:
    group_A, group_B, out = arguments
    with pytest.raises(error, match=text):
        function(group_A, group_B, out=out)


@varied_functions
def test_an_empty_result_may_have_a_stride_of_zero(function: Any) -> None:
    A, B, out = torch.randn(3, 4), torch.randn(4, 0), torch.zeros(1, 0).expand(3, 0)
    made = function([A], [B], out=[out])
    assert (made if isinstance(made, list) else made())[0] is out


class Unpinned(TorchFunctionMode):
    """Makes new tensors without pinning their memory, which needs a GPU, and keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []

    def __torch_function__(self, function: Any, _: Any, args: Any = (), options: Any = None) -> Any:
        options = dict(options or {})
        pinned = options.pop("pin_memory", False)
        found = function(*args, **options)
        self.made += [found] * pinned
        return found


def test_the_table_is_pinned_under_another_default_device() -> None:
    with torch.device("meta"), Unpinned() as mode:  # meta in place of a GPU
        assert _on_device([1, 2], torch.device("meta"), wait=False).is_meta
    (pinned,) = mode.made
    assert pinned.device.type == "cpu" and pinned.tolist() == [1, 2]


@pytest.mark.parametrize("left", [True, False])
def test_an_operand_that_no_gradient_needs_may_change(left: bool) -> None:
    leaf = torch.randn(4, 4, requires_grad=True)
    operand, other = leaf * 1, torch.randn(4, 4)
    (out,) = varied_grouped_gemm(*([[operand], [other]] if left else [[other], [operand]]))
    with torch.no_grad():
        operand.mul_(2)  # raises in the backward if the product has kept it
    ones = torch.ones(4, 4)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), leaf)[0], ones @ other.T if left else other.T @ ones)


def test_batched_gradients() -> None:
    A, B = torch.randn(4, 3, requires_grad=True), torch.randn(3, 2, requires_grad=True)
    (out,) = varied_grouped_gemm([A], [B])
    upstream = torch.randn(5, 4, 2)
    batched = torch.autograd.grad(out, (A, B), upstream, is_grads_batched=True, retain_graph=True)
    loop = [torch.autograd.grad(out, (A, B), one, retain_graph=True) for one in upstream]
    for found, each in zip(batched, zip(*loop, strict=True), strict=True):
        torch.testing.assert_close(found, torch.stack(each))


def test_a_plan_computes_in_the_dtype_of_its_tensors() -> None:
    plan = plan_varied_grouped_gemm([torch.randn(3, 4)], [torch.randn(4, 5)])
    with torch.autocast("cpu"):
        assert plan()[0].dtype == torch.float32


def test_tangents_are_not_dropped_by_out() -> None:
    A, B = torch.randn(4, 4), torch.randn(4, 4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(A, torch.ones(4, 4))
        with pytest.raises(RuntimeError, match=r"^out: .* a tensor has a tangent"):
            varied_grouped_gemm([dual], [B], out=[torch.empty(4, 4)])
        into = torch.autograd.forward_ad.make_dual(torch.empty(4, 4), torch.ones(4, 4))
        with pytest.raises(RuntimeError, match=r"^out: .* a tensor has a tangent"):
            varied_grouped_gemm([A], [B], out=[into])
