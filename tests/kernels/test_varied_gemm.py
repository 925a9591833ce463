"""The varied kernel against fp64: sizes, dtypes, layouts, addresses, plans, gradients, and features of a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from moe_kernels import plan_varied_grouped_gemm, varied_grouped_gemm
from moe_kernels.kernels import varied
from moe_kernels.ops import batched
from moe_kernels.runtime.cache import isolated, plans
from moe_kernels.testing import assert_grouped_gemm_close

NAN = float("nan")
Shapes = list[tuple[int, int, int]]  # M, N, K
SHAPES: dict[str, Shapes] = {
    "worked example": [(192, 320, 128), (256, 448, 192)],
    "one element": [(1, 1, 1)],
    "no tile divides": [(70, 33, 41), (1, 97, 5), (3, 1, 7), (65, 64, 63)],
    "empty ones among them": [(0, 4, 5), (20, 24, 16), (4, 0, 5), (5, 7, 0), (9, 3, 2), (0, 0, 0)],
    "only empty ones": [(0, 4, 5), (4, 0, 5), (0, 0, 0)],
    "many": [(8 * (p % 5), 16, 24) for p in range(33)],
}


def make(
    shapes: Shapes,
    device: str,
    dtype: torch.dtype = torch.float16,
    columns: tuple[bool, bool] = (False, False),
    seed: int = 0,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return random lists of `[M, K]` and `[K, N]`, each a transposed view if `columns`."""
    generator = torch.Generator(device).manual_seed(seed)

    def one(rows: int, cols: int, transposed: bool) -> Tensor:
        shape = (cols, rows) if transposed else (rows, cols)
        x = torch.randn(shape, dtype=torch.float32, device=device, generator=generator)
        return x.t() if transposed else x

    A = [one(M, K, columns[0]).to(dtype) for M, _, K in shapes]
    B = [(one(K, N, columns[1]) * max(K, 1) ** -0.5).to(dtype) for _, N, K in shapes]
    return A, B


def assert_close(outs: list[Tensor], A: list[Tensor], B: list[Tensor]) -> None:
    assert len(outs) == len(A)
    for out, a, b in zip(outs, A, B, strict=True):
        assert_grouped_gemm_close(out, a, b, torch.tensor([0, len(a)], device=a.device))


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_sizes(shapes: Shapes, device: str) -> None:
    A, B = make(shapes, device)
    outs = varied_grouped_gemm(A, B)
    assert all(out.is_contiguous() for out in outs)
    assert_close(outs, A, B)


@pytest.mark.parametrize(
    ("dtype", "columns"),
    [
        (torch.float16, (True, False)),
        (torch.float16, (False, True)),
        (torch.bfloat16, (False, False)),
        (torch.float32, (True, True)),
    ],
    ids=str,
)
def test_layouts_and_dtypes(columns: tuple[bool, bool], dtype: torch.dtype, device: str) -> None:
    A, B = make([(72, 40, 48), (24, 16, 80), (1, 8, 8)], device, dtype, columns)
    outs = varied_grouped_gemm(A, B)
    assert {out.dtype for out in outs} == {dtype}
    assert_close(outs, A, B)


@pytest.mark.parametrize("columns", [(False, False), (False, True), (True, False), (True, True)], ids=str)
@pytest.mark.parametrize("shapes", [[(24, 1, 64), (40, 1, 32)], [(1, 40, 64), (1, 24, 32)], [(40, 24, 1), (8, 16, 1)]])
def test_vectors(shapes: Shapes, columns: tuple[bool, bool], device: str) -> None:
    """Either dimension of a vector is contiguous."""
    A, B = make(shapes, device, columns=columns)
    assert_close(varied_grouped_gemm(A, B), A, B)


def views(x: Tensor) -> dict[str, Tensor]:
    """Return `x` as other views of memory, whose gaps hold NaN."""
    rows, cols = x.shape
    wide = torch.full((rows, cols + 9), NAN, dtype=x.dtype, device=x.device)
    sparse = torch.full((rows, 3 * cols), NAN, dtype=x.dtype, device=x.device)
    return {
        "misaligned": wide[:, 1 : cols + 1].copy_(x),
        "row gaps": wide.clone()[:, :cols].copy_(x),
        "gaps in both": sparse[:, ::3].copy_(x),
        "transposed": x.t().contiguous().t(),
        "a row for all": x[:1].expand_as(x),
    }


@pytest.mark.parametrize("names", [("misaligned", "row gaps"), ("gaps in both", "a row for all"), ("transposed", None)])
def test_strides(names: tuple[str, str | None], device: str) -> None:
    """The first name is for the first problem; the second, if any, for the second problem."""
    A, B = make([(40, 24, 32), (20, 40, 48)], device)

    def view(tensors: list[Tensor]) -> list[Tensor]:
        return [views(x).get(name, x) for name, x in zip(names, tensors, strict=True)]

    for a, b in ((view(A), B), (A, view(B))):
        assert_close(varied_grouped_gemm(a, b), a, b)


def test_views_of_one_tensor_and_the_same_one_twice(device: str) -> None:
    x = torch.randn(64, 64, device=device, dtype=torch.float16) / 8
    A = [x[40:, :32], x[:8], x, x]
    B = [x[8:40, 8:], x.t(), x, x.t()]
    assert_close(varied_grouped_gemm(A, B), A, B)
    other = torch.randn(64, 64, device=device, dtype=torch.float16)
    assert_close(varied_grouped_gemm([x, x], [x, x]), [x, x], [x, x])
    assert_close(varied_grouped_gemm([x, other], [other, x]), [x, other], [other, x])


@pytest.mark.parametrize(("where", "poison"), [("A", NAN), ("B", NAN), ("B", float("inf"))])
def test_one_problems_nan_stays_there(where: str, poison: float, device: str) -> None:
    A, B = make([(24, 40, 72), (5, 9, 17), (30, 16, 8)], device)
    clean = varied_grouped_gemm(A, B)
    (A if where == "A" else B)[1].fill_(poison)
    outs = varied_grouped_gemm(A, B)
    assert torch.equal(outs[0], clean[0])
    assert torch.equal(outs[2], clean[2])
    assert not outs[1].isfinite().any()


@pytest.mark.parametrize("how", ["function", "plan"])
def test_out(how: str, device: str) -> None:
    A, B = make([(24, 40, 72), (5, 9, 17), (3, 4, 0)], device)
    canvas = torch.full((60, 60), 7.0, dtype=A[0].dtype, device=device)
    out = [canvas[1:25, 2:42], canvas[30:35, 50:59], canvas[40:43, 1:5]]
    result = plan_varied_grouped_gemm(A, B, out=out)() if how == "plan" else varied_grouped_gemm(A, B, out=out)
    assert [r.data_ptr() for r in result] == [o.data_ptr() for o in out]
    assert_close(out, A, B)
    for o in out:
        o.fill_(7.0)
    assert (canvas == 7).all()
    columns = [torch.empty(40, 24, dtype=A[0].dtype, device=device).t(), *out[1:]]
    assert_close(varied_grouped_gemm(A, B, out=columns), A, B)


def test_a_plan_reads_what_its_tensors_hold(device: str) -> None:
    shapes = [(24, 40, 72), (0, 3, 3), (5, 9, 17)]
    A, B = make(shapes, device)
    plan = plan_varied_grouped_gemm(A, B)
    first = plan()
    assert_close(first, A, B)
    kept = [out.clone() for out in first]
    for new, old in zip(make(shapes, device, seed=1)[0], A, strict=True):
        old.copy_(new)
    second = plan()
    assert_close(second, A, B)
    assert all(torch.equal(x, y) for x, y in zip(first, kept, strict=True))
    assert [out.data_ptr() % 16 for out in second if out.numel()] == [0, 0]
    second[0].zero_()
    assert second[2]._version == 0


def test_a_plan_keeps_its_tensors(device: str) -> None:
    A, B = make([(24, 40, 72), (5, 9, 17)], device)
    plan = plan_varied_grouped_gemm([a.clone() for a in A], [b.clone() for b in B])
    torch.full((4, 2**16), NAN, dtype=A[0].dtype, device=device)
    assert_close(plan(), A, B)


def test_problems_that_differ_share_a_compiled_kernel(device: str) -> None:
    with isolated():
        for shapes in ([(128, 32, 64), (64, 16, 32), (16, 16, 128)], [(120, 16, 32), (64, 32, 64), (8, 16, 136)]):
            A, B = make(shapes, device)
            assert_close(varied_grouped_gemm(A, B), A, B)
        assert len(plans.entries) == 1


def test_gradients(device: str) -> None:
    shapes = [(24, 16, 40), (0, 3, 4), (3, 4, 0), (5, 9, 17)]
    A, B = make(shapes, device, torch.float32)
    upstream, _ = make([(M, 1, N) for M, N, _ in shapes], device, torch.float32, seed=1)
    a, b = ([x.clone().requires_grad_() for x in tensors] for tensors in (A, B))
    grads = torch.autograd.grad(varied_grouped_gemm(a, b), [*a, *b], upstream)
    assert_close(list(grads[:4]), upstream, [x.t() for x in B])
    assert_close(list(grads[4:]), [x.t() for x in A], upstream)


def test_only_the_gradients_that_are_needed(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    A, B = make([(24, 16, 40), (5, 9, 17), (8, 8, 8)], device, torch.float32)
    A[0].requires_grad_()
    B[2].requires_grad_()
    outs = varied_grouped_gemm(A, B)
    launched: list[list[torch.Size]] = []

    class Noted(batched.VariedLaunch):
        def __init__(self, group_A: Any, group_B: Any, outs: Any, wait: bool):
            launched.append([out.shape for out in outs])
            super().__init__(group_A, group_B, outs, wait)

    monkeypatch.setattr(batched, "VariedLaunch", Noted)
    upstream = torch.randn_like(outs[0])
    outs[0].backward(upstream)
    assert launched == [[A[0].shape]]
    assert_close([A[0].grad], [upstream], [B[0].t()])
    assert B[2].grad is None


def test_gradients_of_gradients(device: str) -> None:
    A, B = make([(5, 6, 7), (3, 4, 2)], device, torch.float32)
    upstream, _ = make([(5, 1, 6), (3, 1, 4)], device, torch.float32, seed=1)
    direction, _ = make([(5, 1, 7), (3, 1, 2)], device, torch.float32, seed=2)

    def loop(A: list[Tensor], B: list[Tensor]) -> list[Tensor]:
        return [a @ b for a, b in zip(A, B, strict=True)]

    products: list[Callable[..., list[Tensor]]] = [varied_grouped_gemm, loop]
    results = []
    for product in products:
        a, b = ([x.clone().requires_grad_() for x in tensors] for tensors in (A, B))
        dA = torch.autograd.grad(product(a, b), a, upstream, create_graph=True)
        results.append(torch.autograd.grad(dA, b, direction))
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def test_bit_identical_on_repeat(device: str) -> None:
    A, B = make(SHAPES["no tile divides"], device)
    first = varied_grouped_gemm(A, B)
    for _ in range(3):
        assert all(torch.equal(x, y) for x, y in zip(varied_grouped_gemm(A, B), first, strict=True))


def test_the_kernel_object_takes_the_rule(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    if device == "cpu":
        monkeypatch.setattr("helion.runtime.get_num_sm", lambda device, **_: 4)
    A, B = make([(70, 40, 48)], device)
    out = torch.empty(70, 40, dtype=A[0].dtype, device=device)
    with isolated():
        launch = batched.VariedLaunch(A, B, [out])
        ((_, (layout, block_m, block_n, _), *_),) = plans.entries
    varied(*launch.tensors, *layout, block_m, block_n)
    assert_close([out], A, B)


def test_a_plan_keeps_no_memory_for_results(device: str) -> None:
    A, B = make([(300, 80, 16)], device)
    plan = plan_varied_grouped_gemm(A, B)

    def results() -> int:
        tensors = [x for x in gc.get_objects() if type(x) is Tensor and x.layout is torch.strided]
        return sum(x.untyped_storage().nbytes() == 300 * 80 * A[0].element_size() for x in tensors)

    assert not results()
    outs = plan()
    assert results() and outs[0].untyped_storage().nbytes() >= outs[0].nbytes
    assert_close(outs, A, B)
    del outs
    assert not results()


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize(
    "shapes",
    [
        [(1024, 1024, 1024)] * 4,
        [(n, n, n) for n in (1024, 512, 256, 128)],
        [(300 + 8 * p, 264, 520) for p in range(16)],
        [(17 * p, 97, 259) for p in range(9)],
        [(2, 1536, 2048), (900, 8, 4096), (64, 7168, 512)],
    ],
    ids=lambda shapes: str(shapes[:2]),
)
def test_large_ones(shapes: Shapes, columns: tuple[bool, bool], device: str) -> None:
    A, B = make(shapes, device, torch.bfloat16, columns)
    assert_close(varied_grouped_gemm(A, B), A, B)


@pytest.mark.gpu
@pytest.mark.parametrize("given_out", [True, False])
def test_graph_capture_of_a_plan(given_out: bool, device: str) -> None:
    shapes = [(200, 64, 512), (64, 264, 128)]
    A, B = make(shapes, device, torch.bfloat16)
    out = [torch.empty(M, N, dtype=A[0].dtype, device=device) for M, N, _ in shapes] if given_out else None
    plan = plan_varied_grouped_gemm(A, B, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = plan()
    for new, old in zip(make(shapes, device, torch.bfloat16, seed=1)[0], A, strict=True):
        old.copy_(new)
    graph.replay()
    assert_close(outs, A, B)
    with pytest.raises(RuntimeError, match="plan_varied_grouped_gemm"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        varied_grouped_gemm(A, B)


def test_results_of_a_plan_are_no_views(device: str) -> None:
    """A view that was made without gradients cannot be changed in place with them."""
    A, B = make([(4, 8, 16), (3, 1, 7)], device)
    with torch.no_grad():
        outs = plan_varied_grouped_gemm(A, B)()
    assert not any(out._is_view() for out in outs)
    assert_close(outs, A, B)


@pytest.mark.gpu
def test_a_plan_on_another_stream(device: str) -> None:
    """It may be dropped before its call has read the table."""
    shapes = [(4096, 4096, 4096), (64, 264, 128)]
    A, B = make(shapes, device, torch.bfloat16)
    plan = plan_varied_grouped_gemm(A, B)
    plan()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        outs = plan()
    del plan
    overwritten = [torch.full((n,), -1, dtype=torch.int64, device=device) for n in range(8, 128) for _ in range(2)]
    side.synchronize()
    assert_close(outs, A, B)
    assert len(overwritten) == 240


@pytest.mark.gpu
@pytest.mark.parametrize("made_there", [True, False])
def test_a_plan_for_another_device(made_there: bool, device: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    A, B = make([(200, 64, 512), (64, 264, 128)], "cuda:1", torch.bfloat16)
    with torch.cuda.device(int(made_there)):
        plan = plan_varied_grouped_gemm(A, B)
    with torch.cuda.device(int(not made_there)):
        assert_close(plan(), A, B)
    assert_close(plan(), A, B)


@pytest.mark.gpu
def test_the_host_never_waits(device: str) -> None:
    A, B = make([(200, 64, 512), (64, 264, 128)], device, torch.bfloat16)
    varied_grouped_gemm(A, B)
    plan = plan_varied_grouped_gemm(A, B)  # waits for the copy of its table, which launches on any stream may read
    torch.cuda.set_sync_debug_mode("error")
    try:
        outs = varied_grouped_gemm(A, B)
        planned = plan()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_close(outs, A, B)
    assert_close(planned, A, B)


@pytest.mark.gpu
def test_tensors_more_than_2_to_the_31_elements_apart(device: str) -> None:
    torch.use_deterministic_algorithms(False)  # filling this tensor with NaN takes long
    memory = torch.empty(5_000_000_000, dtype=torch.bfloat16, device=device)
    elsewhere = torch.empty(2**14, dtype=torch.bfloat16, device=device)
    A = [x[: 2**13].view(64, 128) for x in (memory, memory[-(2**13) :], elsewhere)]
    B = [x[: 2**13].view(128, 64) for x in (memory[2**32 :], memory[2**15 :], memory[2**31 - 5 :])]
    for tensor in (*A, *B):
        tensor.normal_()
    outs = varied_grouped_gemm(A, B)
    for out, a, b in zip(outs, A, B, strict=True):
        torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-2, atol=1e-1)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(device: str) -> None:
    torch.use_deterministic_algorithms(False)
    shapes = [(600_000, 16, 4096), (8, 8, 16)]
    A = [torch.empty(M, K, device=device, dtype=torch.bfloat16).normal_() for M, _, K in shapes]
    B = [torch.empty(K, N, device=device, dtype=torch.bfloat16).normal_(std=K**-0.5) for _, N, K in shapes]
    outs = varied_grouped_gemm(A, B)
    torch.testing.assert_close(outs[0][-100:].double(), A[0][-100:].double() @ B[0].double(), rtol=1e-2, atol=2e-2)
    torch.testing.assert_close(outs[1].double(), A[1].double() @ B[1].double(), rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("planned", [False, True])
def test_autograd_notices_that_what_it_saved_was_written_to(planned: bool, device: str) -> None:
    A, B = make([(4, 4, 4)], device, torch.float32)
    out = [torch.zeros(4, 4, device=device)]
    weight = torch.ones(4, 4, device=device, requires_grad=True)
    loss = (weight * out[0]).sum()
    if planned:
        plan_varied_grouped_gemm(A, B, out=out)()
    else:
        varied_grouped_gemm(A, B, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_views_that_are_negated_when_they_are_read(device: str) -> None:
    """Functions that take addresses must refuse such views."""
    A, B, out = (torch.randn(8, 8, dtype=torch.complex64, device=device).conj().imag for _ in range(3))
    assert A.is_neg() and B.is_neg() and out.is_neg()
    plain_A, plain_B = A.resolve_neg(), B.resolve_neg()
    assert_close(varied_grouped_gemm([A], [B]), [plain_A], [plain_B])
    for lists, name in ((([A], [plain_B]), "group_A"), (([plain_A], [B]), "group_B")):
        with pytest.raises(ValueError, match=rf"{name}\[0\]: .*resolve_neg"):
            plan_varied_grouped_gemm(*lists)
        with pytest.raises(ValueError, match=rf"{name}\[0\]: .*resolve_neg"):
            varied_grouped_gemm(*lists, out=[torch.empty_like(plain_A)])
    with pytest.raises(ValueError, match=r"out\[0\]: .*resolve_neg"):
        varied_grouped_gemm([plain_A], [plain_B], out=[out])


@pytest.mark.parametrize("kind", ["wrapper", "fake", "zeros"])
def test_tensors_without_memory(kind: str, device: str) -> None:
    """Functions that take addresses must refuse them."""
    A, B = make([(3, 4, 5), (6, 7, 8)], device)
    fake = FakeTensorMode()

    def without_memory(x: Tensor) -> Tensor:
        if kind == "zeros":
            return torch._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device)
        return TwoTensor(x, x.clone()) if kind == "wrapper" else fake.from_tensor(x)

    outs = [torch.empty(a.size(0), b.size(1), dtype=a.dtype, device=device) for a, b in zip(A, B, strict=True)]
    for p in range(2):
        for name in ("group_A", "group_B", "out"):
            lists = {"group_A": [*A], "group_B": [*B], "out": [*outs]}
            lists[name][p] = without_memory(lists[name][p])
            for function in (varied_grouped_gemm, plan_varied_grouped_gemm):
                with pytest.raises(ValueError, match=rf"^{name}\[{p}\]: expected a tensor with memory"):
                    function(**lists)
    if kind == "fake":
        return
    found = varied_grouped_gemm([A[0], without_memory(A[1])], B)
    exact = A if kind == "wrapper" else [A[0], torch.zeros_like(A[1])]
    assert_close([x.a if isinstance(x, TwoTensor) else x for x in found], exact, B)


@pytest.mark.parametrize("function", [varied_grouped_gemm, plan_varied_grouped_gemm])
def test_out_in_one_graph(function: Any, device: str) -> None:
    A, B = make([(4, 5, 6)], device)
    out = [A[0].new_empty(4, 5)]
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"_gemm\(out=\) and its plans read addresses"):
        torch.compile(lambda: function(A, B, out=out), fullgraph=True, backend="eager")()


@pytest.mark.parametrize("function", ["plan", "plan with out", "new plan", "out"])
def test_outside_of_graphs(function: str, device: str) -> None:
    A, B = make([(4, 5, 6), (3, 2, 1)], device)
    out = [a.new_zeros(a.size(0), b.size(1)) for a, b in zip(A, B, strict=True)]
    plan = plan_varied_grouped_gemm(A, B, out=out if function == "plan with out" else None)
    calls = {
        "new plan": lambda A, B: plan_varied_grouped_gemm(A, B)(),
        "out": lambda A, B: varied_grouped_gemm(A, B, out=out),
    }
    call = calls.get(function, lambda A, B: plan())
    eager = [o.clone() for o in call(A, B)]
    for o in out:
        o.zero_()
    compiled = torch.compile(lambda A, B: [o * 2 for o in call(A, B)], backend="eager")
    assert all(torch.equal(o, e * 2) and bool(e.any()) for o, e in zip(compiled(A, B), eager, strict=True))


@pytest.mark.parametrize("to", ["new", "out"])
def test_a_plan_in_transforms(to: str, device: str) -> None:
    """Its tensors are constants to them; a buffer that a transform wraps would have no memory."""
    A, B = make([(4, 5, 6)], device)
    plan = plan_varied_grouped_gemm(A, B, out=None if to == "new" else [A[0].new_zeros(4, 5)])
    [product] = [o.clone() for o in plan()]
    assert bool(product.any())
    x = torch.ones_like(product)
    assert torch.equal(torch.func.grad(lambda x: (plan()[0] * x).sum())(x), product)
    value, tangent = torch.func.jvp(lambda x: plan()[0] * x, (x,), (2 * x,))
    assert torch.equal(value, product) and torch.equal(tangent, 2 * product)
    rows = torch.func.vmap(torch.func.grad(lambda x: (plan()[0] * x).sum()))(torch.stack([x, x]))
    assert torch.equal(rows, torch.stack([product, product]))
    for transform in (torch.func.grad, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))):
        with pytest.raises(RuntimeError, match=r"^plan_varied_grouped_gemm: .* call varied_grouped_gemm there"):
            transform(lambda x: (plan_varied_grouped_gemm(A, B)()[0] * x).sum())(x)
        with pytest.raises(RuntimeError, match=r"^out: expected None in torch\.vmap and transforms of torch\.func"):
            transform(lambda x: (varied_grouped_gemm(A, B, out=[product])[0] * x).sum())(x)


@pytest.mark.parametrize("written", ["leaf", "inference"])
def test_plans_write_what_calls_may_write(written: str, device: str) -> None:
    A, B = make([(4, 5, 6)], device)
    with torch.inference_mode(written == "inference"), torch.no_grad():
        out = [torch.zeros(4, 5, dtype=A[0].dtype, device=device)]
        if written == "leaf":
            out[0].requires_grad_()
        plan = plan_varied_grouped_gemm(A, B, out=out)
    for call in (plan, lambda: varied_grouped_gemm(A, B, out=out)):
        with pytest.raises(RuntimeError, match=r"^out\[0\]: (out= has no gradients|a tensor of inference mode)"):
            call()
    assert not out[0].any()
    with torch.inference_mode(written == "inference"), torch.no_grad():
        torch.testing.assert_close(plan()[0], A[0] @ B[0])
