"""Gradients, torch.compile, export and autocast of the operators, on CPU tensors through the reference."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad, functional, gradcheck, gradgradcheck
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.library import opcheck
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from moe_kernels import (
    MoE,
    grouped_gemm,
    grouped_gemm_wgrad,
    grouped_mm,
    moe_mlp,
    permute,
    quantize,
    reference,
    route,
    swiglu_ffn,
    uniform_grouped_gemm,
    unpermute,
    varied_grouped_gemm,
)
from moe_kernels.ops.library import use_kernels
from moe_kernels.runtime import cache, torch_internals
from moe_kernels.runtime.signature import MAX_ROWS
from moe_kernels.scaled import ScaledTensor

OPERATORS = torch.ops.moe_kernels
OFFSETS = torch.tensor([1, 3, 3, 6], dtype=torch.int32)  # of 7 rows: the first and the last belong to no group


def random(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = True) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_(grad)


class Calls(TorchDispatchMode):
    """Records the names of our operators that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "moe_kernels":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def products() -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    return {
        "per group": (lambda A, B: grouped_gemm(A, B, OFFSETS), (random(7, 3), random(3, 3, 2))),
        "transposed": (lambda A, B: grouped_gemm(A, B.mT, OFFSETS), (random(7, 3), random(3, 2, 3))),
        "shared": (lambda A, B: grouped_gemm(A, B, OFFSETS), (random(7, 3), random(3, 2))),
        "bias": (
            lambda A, B, bias: grouped_mm(A, B, offs=OFFSETS[1:], bias=bias),
            (random(7, 3), random(3, 3, 2), random(3, 2)),
        ),
        "wgrad": (lambda A, D: grouped_gemm_wgrad(A, D, OFFSETS), (random(7, 3), random(7, 2))),
        "2-D x 2-D": (lambda A, B: grouped_mm(A, B, offs=OFFSETS[1:]), (random(2, 7), random(7, 3))),
        "3-D x 2-D": (lambda A, B: grouped_mm(A, B, offs=OFFSETS[1:]), (random(3, 2, 4), random(4, 7))),
        "uniform": (lambda A, B: uniform_grouped_gemm(A, B, 3), (random(3, 2, 4), random(3, 4, 2))),
        "uniform, flat": (lambda A, B: uniform_grouped_gemm(A, B, 3), (random(6, 4), random(12, 2))),
        "varied": (
            lambda *tensors: varied_grouped_gemm(tensors[:2], tensors[2:])[1],
            (random(2, 3), random(1, 2), random(3, 2), random(2, 4)),
        ),
        "3-D x 3-D": (grouped_mm, (random(3, 2, 4), random(3, 4, 2))),
    }


@pytest.mark.parametrize("name", products())
def test_gradients_of_first_and_second_order(name: str) -> None:
    function, inputs = products()[name]
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


def moves() -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    routing = route(torch.tensor([[0, 2], [4, 1], [2, 2]]), torch.ones(3, 2), 4)
    to, offsets = routing.slot_to_row, routing.group_offsets
    return {
        "permute": (lambda x: permute(x, routing), (random(3, 5),)),
        "unpermute": (lambda y, g: unpermute(y, routing._replace(topk_weights=g)), (random(6, 5), random(3, 2))),
        "unpermute, not weighted": (lambda y: unpermute(y, routing, weighted=False), (random(6, 5),)),
        "scatter_rows": (
            lambda x, g: OPERATORS.scatter_rows(x, g, to, offsets, 2, torch.float64),
            (random(3, 5), random(3, 2)),
        ),
        "dot_rows": (
            lambda x, y: OPERATORS.dot_rows(x, y, to, offsets, 2, torch.float64),
            (random(3, 5), random(6, 5)),
        ),
    }


@pytest.mark.parametrize("name", moves())
def test_gradients_of_moves(name: str) -> None:
    function, inputs = moves()[name]
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


@pytest.mark.parametrize("name", products() | moves())
def test_autograd_alone_sees_what_the_operators_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, inputs = (products() | moves())[name]
    upstream = torch.randn_like(function(*inputs))

    def results() -> list[Tensor]:
        out = function(*inputs)
        found = torch.autograd.grad(out, inputs, upstream, create_graph=True, allow_unused=True)
        first = [d for d in found if d is not None]
        of_first = [d for d in first if d.requires_grad]
        second = torch.autograd.grad(of_first, inputs, list(map(torch.cos, of_first)), allow_unused=True)
        return [out, *first, *(d for d in second if d is not None)]

    past = results()
    monkeypatch.setattr(torch_internals, "profiled", lambda: True)
    for one, other in zip(past, results(), strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("name", products() | moves())
def test_results_and_gradients_may_be_changed_in_place(
    name: str, observed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, inputs = (products() | moves())[name]
    monkeypatch.setattr(torch_internals, "profiled", lambda: observed)

    def through_changed(change: Callable[[Tensor], Tensor]) -> tuple[Tensor | None, ...]:
        out = function(*inputs).square().sum()
        first = torch.autograd.grad(out, inputs, create_graph=True, allow_unused=True)
        changed = [change(x).sin().sum() for x in (function(*inputs), *first) if x is not None]
        return torch.autograd.grad(changed, inputs, allow_unused=True)

    torch.testing.assert_close(through_changed(lambda x: x.mul_(3)), through_changed(lambda x: x * 3))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", products() | moves())
def test_checkpoints(name: str, use_reentrant: bool) -> None:
    function, inputs = (products() | moves())[name]
    upstream = torch.randn_like(function(*inputs))
    function(*inputs).backward(upstream)
    expected, inputs = inputs, tuple(x.detach().requires_grad_() for x in inputs)
    checkpoint(function, *inputs, use_reentrant=use_reentrant).backward(upstream)
    for x, y in zip(inputs, expected, strict=True):
        assert x.grad is y.grad is None or torch.equal(x.grad, y.grad)


def operator_samples() -> list[tuple[Any, tuple[Any, ...]]]:
    A, B, D, topk_weights = random(7, 3), random(3, 3, 2), random(7, 2), random(3, 2)
    ids = torch.tensor([[0, 2], [4, 1], [2, 2]])
    routing = route(ids, topk_weights, 4)
    to, offsets = routing.slot_to_row, routing.group_offsets
    x, y, f64 = random(3, 5), random(6, 5), torch.float64
    bias_offsets = torch.tensor([0, 3, 3, 6])
    return [
        (OPERATORS.grouped_gemm, (A, B, OFFSETS, None, f64, "auto")),
        (OPERATORS.grouped_gemm, (A, B.mT.contiguous().mT, bias_offsets, random(3, 2), f64, "auto")),
        (OPERATORS.grouped_gemm, (A, B[0], OFFSETS, None, torch.float32, "auto")),
        (OPERATORS.grouped_gemm_wgrad, (A, D, OFFSETS, False, False, f64)),
        (OPERATORS.grouped_gemm_wgrad, (A, D, OFFSETS, False, True, f64)),
        (OPERATORS.grouped_gemm_wgrad, (A, D, OFFSETS, True, True, torch.float32)),
        (OPERATORS.uniform_grouped_gemm, (random(3, 2, 4), random(3, 4, 5), f64)),
        (OPERATORS.uniform_grouped_gemm, (random(3, 4, 2).mT, random(3, 5, 4).mT, torch.float32)),
        (OPERATORS.varied_grouped_gemm, ([random(2, 3), random(4, 2).t()], [random(3, 5), random(4, 1)])),
        (OPERATORS.route, (ids, 4)),
        (OPERATORS.route, (ids.int()[:0], 4)),
        (OPERATORS.scatter_rows, (x, None, to, offsets, 2, f64)),
        (OPERATORS.scatter_rows, (x, topk_weights, to, offsets, 2, f64)),
        (OPERATORS.combine_rows, (y, None, to, offsets, 2, f64)),
        (OPERATORS.combine_rows, (y, topk_weights, to, offsets, 2, torch.float32)),
        (OPERATORS.dot_rows, (x, y, to, offsets, 2, f64)),
    ]


@pytest.mark.parametrize("i", range(len(operator_samples())))
def test_opcheck(i: int) -> None:
    operator, args = operator_samples()[i]
    opcheck(operator.default, args)


@pytest.mark.parametrize(
    ("needed", "expected"),
    [((True, False), ["grouped_gemm"]), ((False, True), ["grouped_gemm_wgrad"]), ((True, True), None)],
)
def test_a_gradient_that_nobody_needs_is_not_computed(needed: tuple[bool, bool], expected: list[str] | None) -> None:
    A, B = (random(*shape, grad=grad) for shape, grad in zip([(7, 3), (3, 3, 2)], needed, strict=True))
    out = grouped_gemm(A, B, OFFSETS)
    upstream = torch.randn_like(out)
    with Calls() as calls:
        out.backward(upstream)
    assert calls.names == (expected or ["grouped_gemm", "grouped_gemm_wgrad"])
    assert (A.grad is not None, B.grad is not None) == needed


def layers() -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    ids = torch.tensor([[0, 2], [1, 0], [2, 1]])
    weights = random(3, 6, 4), random(3, 4, 3)
    return {
        "swiglu_ffn": (lambda rows, w: swiglu_ffn(rows, w, OFFSETS), (random(7, 4), weights[0])),
        "moe_mlp": (lambda x, g, w_in, w_out: moe_mlp(x, ids, g, w_in, w_out), (random(3, 4), random(3, 2), *weights)),
        "moe_mlp, biases": (
            lambda x, g, *w: moe_mlp(x, ids, g, *w[:2], gate_up_bias=w[2], down_bias=w[3]),
            (random(3, 4), random(3, 2), *weights, random(3, 6), random(3, 4)),
        ),
        "fp8, biases": (
            lambda x, g, *w: moe_mlp(x, ids, g, *w[:2], gate_up_bias=w[2], down_bias=w[3], compute="fp8_rowwise"),
            tuple(
                random(*shape, dtype=torch.float32)
                for shape in ((3, 32), (3, 2), (3, 64, 32), (3, 32, 32), (3, 64), (3, 32))
            ),
        ),
    }


CALLED = {  # operators that the gradient of each input alone calls
    "swiglu_ffn": ["activate_backward grouped_gemm", "activate_backward grouped_gemm_wgrad"],
    "moe_mlp": [
        "scatter_rows grouped_gemm activate_backward grouped_gemm combine_rows",
        "scatter_rows grouped_gemm activate_backward",
        "scatter_rows grouped_gemm activate_backward scatter_rows grouped_gemm_wgrad",
        "scatter_rows activate_backward grouped_gemm_wgrad",
    ],
    "moe_mlp, biases": [
        "scatter_rows grouped_gemm activate_backward grouped_gemm combine_rows",
        "scatter_rows grouped_gemm activate_backward grouped_gemm dot_rows",
        "scatter_rows grouped_gemm activate_backward scatter_rows grouped_gemm_wgrad",
        "scatter_rows activate_backward grouped_gemm_wgrad",
        "scatter_rows grouped_gemm activate_backward grouped_gemm_wgrad",
        "scatter_rows activate_backward scatter_rows grouped_gemm_wgrad",
    ],
    "fp8, biases": [
        "quantized_grouped_gemm activate_backward quantized_grouped_gemm combine_rows",
        "quantized_grouped_gemm activate_backward grouped_gemm dot_rows",
        "quantized_grouped_gemm activate_backward quantized_wgrad",
        "quantized_grouped_gemm activate_backward quantized_wgrad",
        "quantized_grouped_gemm activate_backward grouped_gemm_wgrad",
        "quantized_grouped_gemm activate_backward scatter_rows scatter_rows grouped_gemm_wgrad",
    ],
}


@pytest.mark.parametrize("profiled", [False, True])
@pytest.mark.parametrize("name", products() | moves() | layers())
def test_a_gradient_that_nobody_asks_for_is_not_computed(
    name: str, profiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, inputs = (products() | moves() | layers())[name]
    monkeypatch.setattr(torch_internals, "profiled", lambda: profiled)

    def copies(*required: int) -> list[Tensor]:
        return [x.detach().requires_grad_(i in required) * 1 for i, x in enumerate(inputs)]

    def called(out: Tensor, *of: Tensor) -> tuple[tuple[Tensor | None, ...], list[str]]:
        upstream = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape)
        with Calls() as calls:
            found = torch.autograd.grad(out, of, upstream, retain_graph=True, allow_unused=True)
        return found, calls.names

    every = copies(*range(len(inputs)))
    out = function(*every)
    all_at_once, most = called(out, *every)
    for i, expected in enumerate(all_at_once):
        (asked,), names = called(out, every[i])
        if expected is None:
            assert asked is None
            continue
        frozen = copies(i)
        (alone,), fewest = called(function(*frozen), frozen[i])
        for one in (asked, alone):
            assert one is not None and torch.equal(one, expected) and one.any()
        assert names == fewest and (name not in CALLED or names == CALLED[name][i].split())
    again, names = called(out, *every)
    assert names == most
    assert all(a is b or torch.equal(a, b) for a, b in zip(again, all_at_once, strict=True))


def test_gradients_of_leaves_that_a_backward_pass_asks_for() -> None:
    A, B = random(7, 3), random(3, 3, 2)
    out = grouped_gemm(A, B, OFFSETS).sum()
    of_A, of_B = torch.autograd.grad(out, (A, B), retain_graph=True)
    for x, expected, name in ((A, of_A, "grouped_gemm"), (B, of_B, "grouped_gemm_wgrad")):
        with Calls() as calls:
            out.backward(inputs=[x], retain_graph=True)
        assert calls.names == [name] and x.grad is not None and torch.equal(x.grad, expected)
    with Calls() as calls:
        assert torch.equal(torch.autograd.grad(out, B, retain_graph=True)[0], of_B)
    assert calls.names == ["grouped_gemm_wgrad"]
    with Calls() as calls:
        assert torch.equal(torch.autograd.grad(out, A)[0], of_A)
    assert calls.names == ["grouped_gemm", "grouped_gemm_wgrad"]  # PyTorch does not tell that only A is asked for
    out = grouped_gemm(A, B * 1, OFFSETS).sum()
    with Calls() as calls:
        assert torch.equal(torch.autograd.grad(out, A)[0], of_A)
    assert calls.names == ["grouped_gemm"]


def test_gradients_by_a_call_of_the_node_itself() -> None:
    A, B, upstream = random(7, 3), random(3, 3, 2), random(7, 2, grad=False)
    out = grouped_gemm(A, B, OFFSETS)  # without it PyTorch 2.11 drops what the node keeps
    node: Any = out.grad_fn
    expected = torch.autograd.grad(grouped_gemm(A, B, OFFSETS), (A, B), upstream)
    found = [node.apply(upstream)[:2]]
    x = random(1)
    x.register_hook(lambda _: found.append(node.apply(upstream)[:2]))
    x.sum().backward()  # of which the node is no part
    for dA, dB in found:
        assert torch.equal(dA, expected[0]) and torch.equal(dB, expected[1])
    assert len(found) == 2


def test_gradients_of_weights_in_a_later_pass() -> None:
    """As pipelines do: first those of activations, then those of weights from gradients between both."""
    (hidden, gates, *weights), ids = [x.detach().requires_grad_() for x in layers()["moe_mlp"][1]], [[0, 2]] * 3
    out = moe_mlp(hidden.cos(), torch.tensor(ids), gates, *weights).sin()
    expected = torch.autograd.grad(out.sum(), [hidden, gates, *weights], retain_graph=True)
    out.sum().backward(inputs=[hidden, gates], retain_graph=True)
    assert all(w.grad is None for w in weights)
    out.sum().backward(inputs=weights)
    for x, of_x in zip([hidden, gates, *weights], expected, strict=True):
        assert x.grad is not None and torch.equal(x.grad, of_x)


def test_the_two_backward_passes_of_pipelines_with_zero_bubbles() -> None:
    layer = MoE(6, 4, num_experts=3, top_k=2, renormalize=True, dtype=torch.float64)
    # PyTorch 2.11's second pass cannot start at a torch.autograd.Function that gives a stage's output.
    norms = [torch.nn.LayerNorm(6, dtype=torch.float64) for _ in range(2)]
    model = torch.nn.Sequential(norms[0], layer, norms[1])
    x, upstream = random(5, 6), random(5, 6, grad=False)
    d_x, *d_parameters = torch.autograd.grad(model(x), [x, *model.parameters()], upstream)
    out = model(x)
    with Calls() as calls:
        (found,), groups = stage_backward_input([out], [upstream], [x], model.parameters())
    assert torch.equal(found, d_x) and "grouped_gemm_wgrad" not in calls.names
    with Calls() as calls:
        stage_backward_weight(model.parameters(), groups)
    assert calls.names.count("grouped_gemm_wgrad") == 2 and "combine_rows" not in calls.names
    for parameter, expected in zip(model.parameters(), d_parameters, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, expected)


def test_what_no_gradient_needs_is_not_kept() -> None:
    A, frozen = random(7, 3), random(3, 3, 2, grad=False)
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        grouped_gemm(A, frozen, OFFSETS)
    assert (7, 3) not in kept
    assert (3, 3, 2) in kept


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("K", "N"), [(3, 2), (1, 2), (3, 1), (1, 1)])
def test_the_weights_gradient_lies_as_the_weight_does(K: int, N: int, shared: bool, transposed: bool) -> None:
    B = random(3, K, N, grad=False)[0 if shared else slice(None)].contiguous()
    B = (B.mT.contiguous().mT if transposed else B).requires_grad_()
    grouped_gemm(random(7, K), B, OFFSETS).backward(torch.randn(7, N, dtype=torch.float64))
    assert B.grad is not None
    assert B.grad.stride() == B.stride()


@pytest.mark.parametrize("N", [1, 4])
def test_the_gradient_of_a_weight_with_rows_that_only_the_data_tells(N: int) -> None:
    def product(A: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
        return grouped_gemm(A[:, mask], rows[mask], OFFSETS)

    A, rows, mask = random(7, 9), random(9, N), torch.arange(9) < 5
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(product, fullgraph=True, backend="aot_eager", dynamic=True)
        out = compiled(A, rows, mask)
    gradients = torch.autograd.grad(out.sum(), (A, rows))
    torch.testing.assert_close(gradients, torch.autograd.grad(product(A, rows, mask).sum(), (A, rows)))


def test_expanded_gradients_and_accumulation() -> None:
    A, B = random(7, 3), random(3, 3, 2)
    for _ in range(2):
        grouped_gemm(A, B, OFFSETS).sum().backward()
    a, b = A.detach().clone().requires_grad_(), B.detach().clone().requires_grad_()
    (2 * reference.grouped_gemm(a, b, OFFSETS)).sum().backward()
    torch.testing.assert_close((A.grad, B.grad), (a.grad, b.grad))


def test_rows_in_no_group_and_empty_groups_have_zero_gradients_even_over_nan() -> None:
    A, B, upstream = random(7, 3, grad=False), random(3, 3, 2), torch.randn(7, 2, dtype=torch.float64)
    A[[0, 6]] = float("nan")
    upstream[[0, 6]] = float("nan")
    A.requires_grad_()
    grouped_gemm(A, B, OFFSETS).backward(upstream)
    assert A.grad is not None
    assert B.grad is not None
    assert torch.equal(A.grad[[0, 6]], torch.zeros(2, 3, dtype=torch.float64))
    assert torch.equal(B.grad[1], torch.zeros(3, 2, dtype=torch.float64))
    assert B.grad.isfinite().all()


@pytest.mark.parametrize(("M", "G", "K", "N"), [(0, 2, 3, 4), (5, 0, 3, 4), (5, 2, 0, 4), (5, 2, 3, 0)])
@pytest.mark.parametrize("shared", [False, True])
def test_gradients_of_nothing_are_zeros(M: int, G: int, K: int, N: int, shared: bool) -> None:
    A, B = random(M, K), random(*((K, N) if shared else (G, K, N)))
    out = grouped_gemm(A, B, torch.tensor([0, *[M] * G]))
    out.backward(torch.randn_like(out))
    assert A.grad is not None
    assert B.grad is not None
    if 0 in (M, G, K, N):
        assert torch.equal(A.grad, torch.zeros_like(A))
        assert torch.equal(B.grad, torch.zeros_like(B))


def _layer(hidden: Tensor, ids: Tensor, topk_weights: Tensor, weight: Tensor) -> Tensor:
    routing = route(ids, topk_weights, weight.size(0))
    return unpermute(grouped_gemm(permute(hidden, routing), weight.mT, routing.group_offsets), routing)


def _layer_inputs(T: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return random(T, 4), torch.randint(0, 5, (T, 2)), random(T, 2), random(4, 4, 4)


def test_compiled_without_graph_breaks_for_any_number_of_tokens() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_layer, fullgraph=True, dynamic=True, backend=counter)
    for T in (5, 9, 1, 0, 17):
        inputs = _layer_inputs(T)
        eager = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        upstream = torch.randn(T, 4, dtype=torch.float64)
        out, expected = compiled(*inputs), _layer(*eager)
        torch.testing.assert_close(out, expected)
        out.backward(upstream)
        expected.backward(upstream)
        for x, y in zip(inputs, eager, strict=True):
            torch.testing.assert_close(x.grad, y.grad)
    assert counter.frame_count <= 3  # for many tokens, one token, and none


@pytest.mark.parametrize("name", ["uniform", "uniform, flat", "varied"])
def test_the_other_forms_compile_without_graph_breaks(name: str) -> None:
    torch._dynamo.reset()
    function, inputs = products()[name]
    results = []
    for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(0)
        out = call(*inputs)
        results.append((out, *torch.autograd.grad(out, inputs, torch.randn_like(out), allow_unused=True)))
    for eager, compiled in zip(*results, strict=True):
        assert (eager is None) == (compiled is None)
        assert eager is None or torch.equal(eager, compiled)


@pytest.mark.parametrize("name", ["uniform", "varied"])
def test_the_other_forms_under_autocast(name: str) -> None:
    function, inputs = products()[name]
    inputs = tuple(x.detach().float() for x in inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert function(*inputs).dtype == torch.bfloat16
    assert function(*inputs).dtype == torch.float32


def test_compiled_by_inductor() -> None:
    torch._dynamo.reset()
    inputs = [x.detach() for x in _layer_inputs(6)]
    torch.testing.assert_close(torch.compile(_layer, fullgraph=True)(*inputs), _layer(*inputs))


def test_exported() -> None:
    class Layer(torch.nn.Module):
        def forward(self, hidden: Tensor, ids: Tensor, topk_weights: Tensor, weight: Tensor) -> Tensor:
            return _layer(hidden, ids, topk_weights, weight)

    T = torch.export.Dim("T", min=2)
    dims = {"hidden": {0: T}, "ids": {0: T}, "topk_weights": {0: T}, "weight": None}
    program = torch.export.export(Layer(), tuple(x.detach() for x in _layer_inputs(6)), dynamic_shapes=dims)
    inputs = tuple(x.detach() for x in _layer_inputs(11))
    torch.testing.assert_close(program.module()(*inputs), _layer(*inputs))


def test_autocast() -> None:
    A, B = random(7, 3, dtype=torch.float32), random(3, 3, 2, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = grouped_gemm(A, B, OFFSETS)
        assert grouped_mm(A, B, offs=OFFSETS[1:]).dtype == torch.bfloat16
        not_rounded = grouped_gemm(A, B, OFFSETS, out_dtype=torch.float32)
        assert grouped_gemm(A.double(), B.double(), OFFSETS).dtype == torch.float64
        with pytest.raises(TypeError, match=r"A_packed: expected a torch\.Tensor"):
            grouped_gemm(None, B, OFFSETS)  # type: ignore[arg-type]
    a, b = A.bfloat16(), B.bfloat16()
    assert torch.equal(out, grouped_gemm(a, b, OFFSETS))
    assert torch.equal(not_rounded, grouped_gemm(a, b, OFFSETS, out_dtype=torch.float32))
    out.backward(torch.randn_like(out))
    assert A.grad is not None
    assert A.grad.dtype == torch.float32
    assert grouped_gemm(A, B, OFFSETS).dtype == torch.float32


def test_autocast_under_compile() -> None:
    torch._dynamo.reset()
    A, B = random(7, 3, dtype=torch.float32, grad=False), random(3, 3, 2, dtype=torch.float32, grad=False)
    compiled = torch.compile(lambda A, B: grouped_gemm(A, B, OFFSETS), fullgraph=True, backend="eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compiled(A, B).dtype == torch.bfloat16
    assert compiled(A, B).dtype == torch.float32


def test_inference_mode() -> None:
    A, B = random(7, 3), random(3, 3, 2)
    expected = grouped_gemm(A, B, OFFSETS).detach()
    with torch.inference_mode():
        assert torch.equal(grouped_gemm(A, B, OFFSETS), expected)


class Operators(TorchFunctionMode):
    """Records the names of this package's operators that are called through torch.library."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if getattr(func, "namespace", None) == "moe_kernels":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def test_only_calls_that_nobody_but_autograd_notices_go_past_the_operators() -> None:
    A, B = random(7, 3, grad=False), random(3, 3, 2, grad=False)
    with Calls() as calls:
        grouped_gemm(A, B, OFFSETS)
    assert calls.names == ["grouped_gemm"]
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (A, B, OFFSETS)]
        assert grouped_gemm(*fake).shape == (7, 2)
    assert grouped_gemm(*fake).shape == (7, 2)  # fake tensors outside of their mode
    with Operators() as operators:
        assert grouped_gemm(A, B, OFFSETS).shape == (7, 2)
        out = grouped_gemm(A.requires_grad_(), B, OFFSETS)
        with torch.no_grad():
            assert grouped_gemm(A, B, OFFSETS).shape == (7, 2)
        assert operators.names == []
        (gradient,) = torch.autograd.grad(out.square().sum(), A, create_graph=True)  # hidden from the mode
        assert out.grad_fn.name() == gradient.grad_fn.name() == "grouped_gemmBackward"
        with profile(activities=[ProfilerActivity.CPU]):
            grouped_gemm(A, B, OFFSETS)
    assert operators.names == ["grouped_gemm"]


def test_a_profiler_shows_what_a_layer_calls() -> None:
    hidden, topk_weights, w_gate_up, w_down = random(5, 4), random(5, 2), random(3, 6, 4), random(3, 4, 3)
    topk_ids = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]])
    with profile(activities=[ProfilerActivity.CPU]) as shown:
        moe_mlp(hidden, topk_ids, topk_weights, w_gate_up, w_down).sum().backward()
    names = {event.name.removeprefix("moe_kernels::") for event in shown.events()}
    backward = {"scatter_rows", "grouped_gemm", "activate_backward", "combine_rows", "grouped_gemm_wgrad"}
    assert {"moe_mlp"} | backward <= names


def transformable() -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    ids = torch.tensor([[0, 2], [4, 1], [2, 2]])
    hidden, topk_weights, w_gate_up, w_down = random(3, 2), random(3, 2), random(3, 4, 2), random(3, 2, 2)
    options: dict[str, Any] = {"activation": "clamped_swiglu", "interleaved": True, "transposed": True}

    def two_weights(h: Tensor, w: Tensor, gate: Tensor, down: Tensor, up: Tensor, bias: Tensor) -> Tensor:
        return moe_mlp(h, ids, w, gate, down, w_up=up, down_bias=bias)

    return {
        **{name: one for name, one in (products() | moves()).items() if name not in ("scatter_rows", "dot_rows")},
        "swiglu_ffn": (lambda x, w: swiglu_ffn(x, w, OFFSETS), (random(7, 2), w_gate_up)),
        "moe_mlp": (lambda h, *w: moe_mlp(h, ids, *w), (hidden, topk_weights, w_gate_up, w_down)),
        "moe_mlp, transposed": (
            lambda h, *w: moe_mlp(h, ids, *w, **options),
            (hidden, topk_weights, w_gate_up.detach().mT.contiguous(), w_down),
        ),
        "moe_mlp, two weights": (
            two_weights,
            (hidden, topk_weights, *(random(3, 2, 2) for _ in range(3)), random(3, 2)),
        ),
    }


@pytest.mark.parametrize("name", transformable())
def test_transforms_of_torch_func(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    function, inputs = transformable()[name]
    inputs = tuple(x.detach() for x in inputs)
    every = tuple(range(len(inputs)))

    def loss(*values: Tensor) -> Tensor:
        return function(*values).sin().sum()

    def plain(*values: Tensor) -> tuple[Tensor, ...]:
        values = tuple(x.detach().requires_grad_() for x in values)
        found = torch.autograd.grad(loss(*values), values, allow_unused=True)
        return tuple(torch.zeros_like(x) if d is None else d for x, d in zip(values, found, strict=True))

    close = torch.testing.assert_close
    first, second, jacobian = plain(*inputs), functional.hessian(loss, inputs), functional.jacobian(function, inputs)
    close(torch.func.grad(loss, every)(*inputs), first)
    close(torch.func.jacrev(function, every)(*inputs), jacobian)
    close(torch.func.jacrev(torch.func.grad(loss, every), every)(*inputs), second)
    close(torch.func.hessian(loss, every)(*inputs), second)
    close(torch.func.jacfwd(function, every)(*inputs), jacobian)
    out, pullback = torch.func.vjp(function, *inputs)
    upstream = torch.randn_like(out)
    values = [x.clone().requires_grad_() for x in inputs]
    expected = torch.autograd.grad(function(*values), values, upstream, allow_unused=True, materialize_grads=True)
    close(pullback(upstream), expected)  # called outside of the transform

    several = [torch.stack([x, x.cos(), x + 1], dim=-1) for x in inputs]
    samples = [[x[..., i] for x in several] for i in range(3)]
    close(torch.func.vmap(function, -1)(*several), torch.stack([function(*one) for one in samples]))
    for shared in (None, *every[1:][-1:]):  # per-sample gradients, also with an argument shared by the samples
        dims = tuple(None if i == shared else -1 for i in every)
        given = [x[..., 0] if i == shared else x for i, x in enumerate(several)]
        ones = [plain(*(one[i] if i != shared else samples[0][i] for i in every)) for one in samples]
        expected = tuple(map(torch.stack, zip(*ones, strict=True)))
        close(torch.func.vmap(torch.func.grad(loss, every), dims)(*given), expected)
    batched = [x.requires_grad_() for x in several]
    out = torch.func.vmap(loss, -1)(*batched)  # autograd outside of the transform
    found = torch.autograd.grad(out.sum(), batched, allow_unused=True, materialize_grads=True)
    close(found, tuple(torch.stack(d, dim=-1) for d in zip(*(plain(*one) for one in samples), strict=True)))
    assert "performance drop" not in capfd.readouterr().err


def test_a_shared_weights_gradient_takes_malformed_offsets_as_clamped() -> None:
    A = torch.randn(8, 4, dtype=torch.float64)
    B = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    grouped_gemm(A, B, torch.tensor([1, 6, 3])).sum().backward()
    torch.testing.assert_close(B.grad, A[1:6].sum(0)[:, None].expand(4, 5))


@pytest.mark.parametrize("name", ["per group", "wgrad", "uniform", "varied", "unpermute", "moe_mlp"])
def test_forward_mode(name: str) -> None:
    function, inputs = transformable()[name]
    tangents = tuple(map(torch.randn_like, inputs))
    grads = torch.autograd.grad(function(*inputs).sin().sum(), inputs, allow_unused=True, materialize_grads=True)
    expected = sum((d * t).sum() for d, t in zip(grads, tangents, strict=True))
    inputs = tuple(x.detach() for x in inputs)

    def loss(*values: Tensor) -> Tensor:
        return function(*values).sin().sum()

    for mode in (nullcontext(), Calls()):
        with forward_ad.dual_level(), mode:
            out = loss(*map(forward_ad.make_dual, inputs, tangents))
            torch.testing.assert_close(forward_ad.unpack_dual(out).tangent, expected)
    torch.testing.assert_close(torch.func.jvp(loss, inputs, tangents)[1], expected)
    torch.testing.assert_close(torch.func.linearize(loss, *inputs)[1](*tangents), expected)
    if name == "per group":
        assert gradcheck(function, tuple(x.requires_grad_() for x in inputs), check_forward_ad=True)


def test_forward_mode_twice() -> None:
    function, inputs = products()["per group"]
    inputs = tuple(x.detach() for x in inputs)

    def loss(*values: Tensor) -> Tensor:
        return function(*values).sin().sum()

    found = torch.func.jacfwd(torch.func.jacfwd(loss, (0, 1)), (0, 1))(*inputs)
    torch.testing.assert_close(found, functional.hessian(loss, inputs))


def test_forward_mode_is_refused_rather_than_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    function, inputs = products()["per group"]
    inputs = tuple(x.detach() for x in inputs)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: torch.func.jvp(function, x, x), fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"no forward-mode derivatives under torch\.compile"):
        compiled(*inputs)
    monkeypatch.setattr(torch_internals, "enable_forward_mode", torch_internals._no_forward_mode)
    with pytest.raises(NotImplementedError, match="with this PyTorch: use reverse mode"):
        torch.func.jvp(function, inputs, inputs)


def test_where_nothing_tells_of_transforms(monkeypatch: pytest.MonkeyPatch) -> None:
    function, inputs = products()["per group"]
    expected = torch.autograd.grad(function(*inputs).sin().sum(), inputs)
    monkeypatch.setattr(torch_internals, "_functorch_level", lambda: torch_internals._unknown_transform)
    torch.testing.assert_close(torch.autograd.grad(function(*inputs).sin().sum(), inputs), expected)
    found = torch.func.grad(lambda *x: function(*x).sin().sum(), (0, 1))(*inputs)
    torch.testing.assert_close(found, expected)


def test_per_sample_gradients_of_a_module() -> None:
    layer = MoE(4, 3, 3, 2, renormalize=True, dtype=torch.float64)
    weights = {name: w.detach() for name, w in layer.named_parameters()}
    samples = random(3, 5, 4, grad=False)

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, weights, (x,)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, samples)
    for i, x in enumerate(samples):
        expected = torch.autograd.grad(layer(x).square().sum(), layer.parameters())
        for (name, _), d in zip(layer.named_parameters(), expected, strict=True):
            torch.testing.assert_close(found[name][i], d)


@pytest.mark.parametrize("name", ["per group", "varied", "route"])
def test_vmap_of_operators(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The operators are called directly, as torch.compile calls them."""
    A, B = random(2, 7, 3, grad=False), random(3, 3, 2, grad=False)
    ids = torch.tensor([[[0, 2], [4, 1]], [[2, 2], [0, 0]]])
    function, several = {
        "per group": (lambda a: OPERATORS.grouped_gemm(a, B, OFFSETS, None, torch.float64, "auto"), A),
        "varied": (lambda a: tuple(OPERATORS.varied_grouped_gemm([a[:2], a], [B[0], B[1]])), A),
        "route": (lambda i: OPERATORS.route(i, 4), ids),
    }[name]
    results = [function(one) for one in several]
    expected = torch.stack(results) if name == "per group" else tuple(map(torch.stack, zip(*results, strict=True)))
    torch.testing.assert_close(torch.func.vmap(function)(several), expected)
    assert "performance drop" not in capfd.readouterr().err
    with pytest.raises(ValueError, match="vmap: expected at least one sample"):
        torch.func.vmap(function)(several[:0])


def test_vmap_under_compile() -> None:
    torch._dynamo.reset()
    A, B = random(2, 7, 3), random(3, 3, 2, grad=False)
    vmapped = torch.func.vmap(lambda a: grouped_gemm(a, B, OFFSETS))
    results = []
    for call in (vmapped, torch.compile(vmapped, fullgraph=True, backend="aot_eager")):
        out = call(A)
        results.append((out, *torch.autograd.grad(out.square().sum(), A)))
    torch.testing.assert_close(*results)


def test_functionalized() -> None:
    function, inputs = products()["per group"]
    assert torch.equal(torch.func.functionalize(function)(*inputs), function(*inputs))


@pytest.mark.parametrize("grad", [False, True])
def test_traced_by_torch_jit(grad: bool) -> None:
    A, B = random(7, 3, grad=grad), random(3, 3, 2, grad=False)
    traced = torch.jit.trace(lambda A: grouped_gemm(A, B, OFFSETS), A, check_trace=False)
    assert "moe_kernels::grouped_gemm" in str(traced.graph)
    torch.jit.save(traced, io.BytesIO())
    other = random(7, 3, grad=grad)
    assert torch.equal(traced(other), grouped_gemm(other, B, OFFSETS))


@pytest.mark.parametrize("shape", [(7,), (2, 3)], ids=str)
def test_a_layer_traced_by_torch_jit(shape: tuple[int, ...]) -> None:
    layer = MoE(8, 6, 4, 2, renormalize=True)
    with torch.no_grad():  # torch.jit.trace repeats the call without gradients, and compares both graphs
        traced = torch.jit.trace(layer, torch.randn(*shape, 8))
    other = torch.randn(*(2 * n for n in shape), 8)
    assert torch.equal(traced(other), layer(other))


def test_operands_of_two_dtypes() -> None:
    A, B = random(7, 3, dtype=torch.float32), random(3, 3, 2, dtype=torch.bfloat16)
    out = grouped_gemm(A, B, OFFSETS)
    out.backward(torch.randn_like(out))
    assert out.dtype == torch.float32
    assert A.grad is not None
    assert B.grad is not None
    assert (A.grad.dtype, B.grad.dtype) == (torch.float32, torch.bfloat16)


def test_what_the_reference_computes_is_what_the_operators_compute() -> None:
    assert not use_kernels(torch.empty(1, dtype=torch.float64))
    A, B = random(7, 3, dtype=torch.bfloat16), random(3, 3, 2, dtype=torch.bfloat16)
    a, b = A.detach().clone().requires_grad_(), B.detach().clone().requires_grad_()
    out, expected = grouped_gemm(A, B, OFFSETS), reference.grouped_gemm(a, b, OFFSETS)
    assert torch.equal(out, expected)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close((A.grad, B.grad), (a.grad, b.grad))


MANY = MAX_ROWS + 1


def on_meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def fp8(*shape: int) -> ScaledTensor:
    return ScaledTensor(on_meta(*shape, dtype=torch.float8_e4m3fn), on_meta(*shape[:-1], 1, dtype=f32), "rowwise")


f32, ends = torch.float32, on_meta(2, dtype=torch.int32)
bounds, w_in, w_out = on_meta(3, dtype=torch.int32), on_meta(2, 32, 16), on_meta(2, 16, 16)
slots = on_meta(MANY // 2, 2, dtype=torch.int64), on_meta(MANY // 2, 2)
TOO_MANY: dict[str, tuple[str, Callable[[], Any]]] = {
    "grouped_gemm": ("A_packed", lambda: grouped_gemm(on_meta(MANY, 16), w_out, bounds)),
    "grouped_gemm, fp8": ("A", lambda: grouped_gemm(fp8(MANY, 16), fp8(2, 16, 16).mT, bounds)),
    "grouped_gemm_wgrad": ("A_packed", lambda: grouped_gemm_wgrad(on_meta(MANY, 16), on_meta(MANY, 16), bounds)),
    "grouped_mm": ("mat_a", lambda: grouped_mm(on_meta(MANY, 16), w_out, offs=ends)),
    "swiglu_ffn": ("rows", lambda: swiglu_ffn(on_meta(MANY, 16), w_in, bounds)),
    "route": ("topk_ids", lambda: route(*slots, 4)),
    "moe_mlp": ("topk_ids", lambda: moe_mlp(on_meta(MANY // 2, 16), *slots, w_in, w_out)),
    "moe_mlp, fp8": ("topk_ids", lambda: moe_mlp(on_meta(MANY // 2, 16), *slots, fp8(2, 32, 16), fp8(2, 16, 16))),
    "moe_mlp, compute": (
        "topk_ids",
        lambda: moe_mlp(on_meta(MANY // 2, 16), *slots, w_in, w_out, compute="fp8_rowwise"),
    ),
    "quantize": ("x", lambda: quantize(on_meta(MANY, 16), "rowwise")),
}


@pytest.mark.parametrize("name", TOO_MANY)
def test_more_rows_than_kernels_can_count_are_refused(name: str) -> None:
    argument, call = TOO_MANY[name]
    refused = rf"^{argument}: expected at most {MAX_ROWS} rows, got {MANY}; split them over several calls$"
    planned = cache.collecting(lambda operator, *_: pytest.fail(f"{operator.name} is planned"))
    with torch.no_grad(), planned, pytest.raises(ValueError, match=refused):
        call()
