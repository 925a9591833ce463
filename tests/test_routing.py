"""Routing and the moves between token order and expert order, on CPU tensors through the reference; and gating."""

from __future__ import annotations

import doctest
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

import moe_kernels.routing
from moe_kernels import Routing, permute, reference, route, topk_sigmoid, topk_softmax, unpermute

NAN = float("nan")
choices = st.integers(1, 4).flatmap(
    lambda top_k: st.lists(st.lists(st.integers(-2, 6), min_size=top_k, max_size=top_k), min_size=1, max_size=9)
)


def routed(ids: Any, num_experts: int, dtype: torch.dtype = torch.float64) -> Routing:
    topk_ids = torch.as_tensor(ids)
    return route(topk_ids, torch.rand(topk_ids.shape, dtype=dtype), num_experts)


def test_the_docstrings_example() -> None:
    result = doctest.testmod(moe_kernels.routing_maps)
    assert (result.failed, result.attempted) == (0, 7)


@settings(deadline=None, max_examples=60)
@given(ids=choices, num_experts=st.integers(0, 6))
def test_rows_stand_in_the_order_of_expert_and_slot(ids: list[list[int]], num_experts: int) -> None:
    group_offsets, row_to_slot, slot_to_row, _ = routed(ids, num_experts)
    experts = [e if 0 <= e < num_experts else num_experts for token in ids for e in token]
    order = sorted(range(len(experts)), key=lambda slot: (experts[slot], slot))
    assert row_to_slot.tolist() == order
    assert [order[row] for row in slot_to_row.tolist()] == list(range(len(order)))
    assert group_offsets.tolist() == [sum(other < e for other in experts) for e in range(num_experts + 1)]
    assert group_offsets.dtype == row_to_slot.dtype == slot_to_row.dtype == torch.int32


def test_no_tokens_and_no_experts() -> None:
    empty = torch.empty(0, 2, dtype=torch.int64)
    group_offsets, row_to_slot, slot_to_row, topk_weights = route(empty, torch.empty(0, 2), 3)
    assert (group_offsets.tolist(), row_to_slot.tolist(), slot_to_row.tolist()) == ([0] * 4, [], [])
    assert topk_weights.shape == (0, 2)
    assert routed([[0, 1]], 0).group_offsets.tolist() == [0]


def test_ids_of_either_width_and_any_strides() -> None:
    ids = torch.randint(-1, 5, (7, 3))
    expected = routed(ids, 4)[:3]
    strided = torch.full((7, 6), 3, dtype=torch.int32)[:, ::2].copy_(ids)
    for other in (ids.int(), ids.t().contiguous().t(), strided):
        assert all(torch.equal(a, b) for a, b in zip(routed(other, 4)[:3], expected, strict=True))


REFUSALS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"topk_ids": [[0]]}, TypeError, r"topk_ids: expected a torch\.Tensor, got list"),
    ({"topk_ids": torch.zeros(3, 2)}, TypeError, "topk_ids: expected int32 or int64, got torch.float32"),
    ({"topk_ids": torch.zeros(6, dtype=torch.int64)}, ValueError, r"topk_ids: expected shape \[T, top_k\].*got \[6\]"),
    ({"topk_ids": torch.zeros(3, 0, dtype=torch.int64)}, ValueError, r"topk_ids: expected shape .*got \[3, 0\]"),
    (
        {"topk_weights": torch.zeros(3, 3)},
        ValueError,
        r"topk_weights: expected shape \[3, 2\] as topk_ids, got \[3, 3\]",
    ),
    ({"topk_weights": torch.zeros(3, 2).int()}, TypeError, "topk_weights: expected one of .* got torch.int32"),
    (
        {"topk_weights": torch.zeros(3, 2, device="meta")},
        ValueError,
        "topk_weights: expected on cpu with topk_ids, got on meta",
    ),
    ({"num_experts": 4.0}, TypeError, "num_experts: expected an int, got float"),
    ({"num_experts": True}, TypeError, "num_experts: expected an int, got bool"),
    ({"num_experts": -1}, ValueError, "num_experts: expected at least 0, got -1"),
]


@pytest.mark.parametrize("function", [route, reference.route])
@pytest.mark.parametrize(("changes", "error", "message"), REFUSALS)
def test_route_refusals(function: Any, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    values = {"topk_ids": torch.zeros(3, 2, dtype=torch.int64), "topk_weights": torch.zeros(3, 2), "num_experts": 4}
    with pytest.raises(error, match=f"^{message}"):
        function(**{**values, **changes})


def test_validation_names_the_first_id_that_would_be_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.tensor([[0, 1], [3, 4], [-1, 0]])
    with pytest.raises(ValueError, match=r"^topk_ids\[1, 1\]: expected 0 to 3, got 4"):
        route(ids, torch.ones(3, 2), 4, validate=True)
    monkeypatch.setattr("moe_kernels.checks._VALIDATE", True)  # as with MOE_KERNELS_VALIDATE=1 at import
    with pytest.raises(ValueError, match=r"^topk_ids\[1, 1\]"):
        route(ids, torch.ones(3, 2), 4)
    route(ids, torch.ones(3, 2), 4, validate=False)


@settings(deadline=None, max_examples=30)
@given(ids=choices, num_experts=st.integers(0, 6))
def test_permute_and_unpermute_token_by_token(ids: list[list[int]], num_experts: int) -> None:
    routing = routed(ids, num_experts)
    T, top_k = routing.topk_weights.shape
    hidden = torch.randn(T, 3, dtype=torch.float64)
    rows = permute(hidden, routing)
    kept = [[0 <= e < num_experts for e in token] for token in ids]
    back = torch.zeros(T, 3, dtype=torch.float64)
    unweighted = back.clone()
    y = torch.randn(T * top_k, 3, dtype=torch.float64)
    for t in range(T):
        for k in range(top_k):
            row = routing.slot_to_row[t * top_k + k]
            assert torch.equal(rows[row], hidden[t] if kept[t][k] else torch.zeros(3, dtype=torch.float64))
            if kept[t][k]:
                back[t] += routing.topk_weights[t, k] * y[row]
                unweighted[t] += y[row]
    y[routing.group_offsets[-1] :] = NAN
    torch.testing.assert_close(unpermute(y, routing), back)
    torch.testing.assert_close(unpermute(y, routing, weighted=False), unweighted)
    # Each is the other's adjoint.
    inner = (rows * y.nan_to_num()).sum()
    torch.testing.assert_close(inner, (hidden * unweighted).sum())


def test_a_dropped_slot_has_no_influence_and_no_gradient() -> None:
    routing = routed([[0, 4], [-1, 1]], 4)
    topk_weights = routing.topk_weights.clone()
    topk_weights[0, 1] = topk_weights[1, 0] = NAN
    topk_weights.requires_grad_()
    rows = torch.randn(4, 3, dtype=torch.float64)
    rows[2:] = NAN
    rows.requires_grad_()
    out = unpermute(rows, routing._replace(topk_weights=topk_weights))
    out.backward(torch.randn_like(out))
    assert out.isfinite().all()
    assert topk_weights.grad is not None
    assert rows.grad is not None
    assert topk_weights.grad[0, 1] == topk_weights.grad[1, 0] == 0
    assert torch.equal(rows.grad[2:], torch.zeros(2, 3, dtype=torch.float64))
    assert topk_weights.grad[0, 0] != 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_unpermute_adds_in_float32_and_in_order(dtype: torch.dtype) -> None:
    routing = routed([[2, 0, 1]], 3, torch.float32)
    rows = torch.randn(3, 64).to(dtype)
    slots = rows[routing.slot_to_row.long()].float()
    topk_weights = routing.topk_weights[0]
    expected = (slots[0] * topk_weights[0] + slots[1] * topk_weights[1]) + slots[2] * topk_weights[2]
    out = unpermute(rows, routing)
    assert out.dtype == dtype
    assert torch.equal(out[0], expected.to(dtype))


def test_weights_in_float64_are_applied_in_float64() -> None:
    routing = routed([[2, 0, 1], [1, 2, 0]], 3)
    rows = torch.randn(6, 64, requires_grad=True)
    weights = routing.topk_weights.flatten()
    slots = rows.detach()[routing.slot_to_row.long()].double() * weights[:, None]
    out = unpermute(rows, routing)
    assert torch.equal(out, sum(slots.view(2, 3, 64).unbind(1)).float())
    upstream = torch.randn_like(out)
    out.backward(upstream)
    expected = upstream.repeat_interleave(3, 0).double() * weights[:, None]
    assert rows.grad is not None
    assert torch.equal(rows.grad[routing.slot_to_row.long()], expected.float())


@pytest.mark.parametrize(
    ("function", "name", "shape", "text"),
    [
        (permute, "hidden", (3, 4), r"\[T, H\] with T = 2, got \[3, 4\]"),
        (permute, "hidden", (2,), r"\[T, H\] with T = 2, got \[2\]"),
        (unpermute, "rows", (2, 4), r"\[R, H\] with R = 4, got \[2, 4\]"),
    ],
)
def test_move_refusals(function: Any, name: str, shape: tuple[int, ...], text: str) -> None:
    routing = routed([[0, 1], [1, 2]], 3)
    with pytest.raises(ValueError, match=f"^{name}: expected shape {text}"):
        function(torch.zeros(shape), routing)
    with pytest.raises(TypeError, match=f"^{name}: expected one of .* got torch.int64"):
        function(torch.zeros(shape).long(), routing)
    with pytest.raises(TypeError, match=f"^{name}: expected a torch.Tensor, got NoneType"):
        function(None, routing)
    right = (2, 4) if function is permute else (4, 4)
    with pytest.raises(ValueError, match=f"^{name}: expected on cpu with routing, got on meta"):
        function(torch.zeros(right, device="meta"), routing)


@pytest.mark.parametrize("function", [permute, unpermute])
def test_a_routing_that_does_not_fit_together(function: Any) -> None:
    routing = routed([[0, 1], [1, 2]], 3)
    values = torch.zeros(2 if function is permute else 4, 4)
    for field in ("slot_to_row", "group_offsets"):
        wrong = routing._replace(**{field: getattr(routing, field).long()})
        with pytest.raises(TypeError, match=rf"^routing\.{field}: expected int32, got torch.int64"):
            function(values, wrong)
    for topk_weights in (torch.ones(2, 1), torch.ones(2, 3)):
        with pytest.raises(
            ValueError, match=r"^routing: expected topk_weights \[T, top_k\] and slot_to_row \[T \* top_k\]"
        ):
            function(values, routing._replace(topk_weights=topk_weights))
    for topk_weights in (torch.tensor(1.0), torch.ones(2, 0)):
        with pytest.raises(ValueError, match=r"^routing: expected topk_weights \[T, top_k\]"):
            function(values, routing._replace(topk_weights=topk_weights))
    for field in ("topk_weights", "slot_to_row", "group_offsets"):
        with pytest.raises(TypeError, match=rf"^routing\.{field}: expected a torch.Tensor, got NoneType"):
            function(values, routing._replace(**{field: None}))
    with pytest.raises(ValueError, match=r"^routing\.topk_weights: expected on cpu with (hidden|rows), got on meta"):
        function(values, routing._replace(topk_weights=routing.topk_weights.to("meta")))
    without_slots = routing._replace(topk_weights=torch.ones(2, 0), slot_to_row=routing.slot_to_row[:0])
    with pytest.raises(ValueError, match=r"^routing: expected topk_weights \[T, top_k\]"):
        function(torch.zeros(2 if function is permute else 0, 4), without_slots)


@pytest.mark.parametrize("renormalize", [False, True])
def test_topk_softmax(renormalize: bool) -> None:
    logits = (torch.randperm(35).view(5, 7) / 8).bfloat16()  # all different
    ids, topk_weights = topk_softmax(logits, 3, renormalize=renormalize)
    probabilities = logits.float().exp() / logits.float().exp().sum(1, keepdim=True)
    assert topk_weights.dtype == torch.float32
    for t in range(5):
        best = sorted(range(7), key=lambda e: -probabilities[t, e].item())[:3]
        chosen = probabilities[t, best]
        assert ids[t].tolist() == best
        torch.testing.assert_close(topk_weights[t], chosen / chosen.sum() if renormalize else chosen)
    if renormalize:
        torch.testing.assert_close(topk_weights, logits.float().gather(1, ids).softmax(1))


def _deepseek(logits: Tensor, bias: Tensor, top_k: int, num_groups: int, top_groups: int) -> list[list[int]]:
    """Return the chosen experts, computed one token at a time."""
    chosen = []
    for token in torch.sigmoid(logits) + bias:
        groups = token.view(num_groups, -1)
        scores = [sum(sorted(group.tolist())[-2:]) for group in groups]
        best = sorted(range(num_groups), key=lambda g: -scores[g])[:top_groups]
        size = groups.size(1)
        allowed = [e for e in range(len(token)) if e // size in best]
        chosen.append(sorted(allowed, key=lambda e: -token[e].item())[:top_k])
    return chosen


@pytest.mark.parametrize(("num_groups", "top_groups", "top_k"), [(1, 1, 3), (4, 2, 3), (4, 1, 2), (2, 2, 8), (8, 3, 3)])
def test_topk_sigmoid(num_groups: int, top_groups: int, top_k: int) -> None:
    logits, bias = torch.randn(6, 8), torch.randn(8) - 2  # a biased score below 0 still beats an excluded expert
    groups = {"num_groups": num_groups, "top_groups": top_groups}
    ids, topk_weights = topk_sigmoid(logits, top_k, renormalize=True, bias=bias, scale=2.5, **groups)
    assert ids.tolist() == _deepseek(logits, bias, top_k, num_groups, top_groups)
    chosen = logits.sigmoid().gather(1, ids)
    torch.testing.assert_close(topk_weights, 2.5 * chosen / chosen.sum(1, keepdim=True))
    plain = topk_sigmoid(logits, 2, renormalize=False)
    torch.testing.assert_close(plain[1], logits.sigmoid().topk(2).values)


def test_topk_sigmoid_keeps_to_the_best_groups_with_a_bias_of_minus_infinity() -> None:
    """It switches expert 2 off, but only three experts can be chosen; the others' groups have lower scores."""
    bias = torch.tensor([3.0, 3.0, -torch.inf, 0.0, 0.0, 0.0])
    for order in (slice(None), [3, 4, 5, 0, 1, 2]):
        logits = torch.tensor([[0.5, 0.0, 4.0, 1.0, 2.0, 3.0]] * 4)[:, order]
        for top_k, best in ((2, [0.5, 0.0]), (3, [0.5, 0.0, 4.0])):
            ids, topk_weights = topk_sigmoid(
                logits, top_k, renormalize=False, bias=bias[order], num_groups=2, top_groups=1
            )
            assert logits.gather(1, ids).tolist() == [best] * 4
            torch.testing.assert_close(topk_weights, torch.tensor([best] * 4).sigmoid())


def test_topk_sigmoid_is_compiled_for_any_number_of_experts() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(topk_sigmoid, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens, experts, groups in ((5, 8, 4), (7, 18, 6)):
        logits, options = torch.randn(tokens, experts), {"renormalize": True, "num_groups": groups, "top_groups": 2}
        ids, topk_weights = compiled(logits, 3, **options)
        expected_ids, expected_weights = topk_sigmoid(logits, 3, **options)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(topk_weights, expected_weights)


def test_topk_sigmoid_is_compiled_for_any_scale() -> None:
    torch._dynamo.reset()
    counter, logits = CompileCounterWithBackend("eager"), torch.randn(5, 8)
    compiled = torch.compile(
        lambda scale: topk_sigmoid(logits, 3, renormalize=True, scale=scale), backend=counter, fullgraph=True
    )
    for scale in (1.0, 2.5, 3.0, 4.0):
        expected = topk_sigmoid(logits, 3, renormalize=True, scale=scale)
        torch.testing.assert_close(compiled(scale), expected)
    assert counter.frame_count == 2  # the first scale, and any other


@pytest.mark.parametrize("recorded", [False, True])
def test_topk_sigmoid_with_a_large_integer_as_the_scale(recorded: bool) -> None:
    logits = torch.randn(5, 8, requires_grad=recorded)
    found, expected = (topk_sigmoid(logits, 3, renormalize=True, scale=scale)[1] for scale in (2**70, 2.0**70))
    assert found.isfinite().all() and torch.equal(found, expected)


@pytest.mark.parametrize("recorded", [False, True])
def test_no_sigmoid_above_zero(recorded: bool) -> None:
    logits = torch.full((2, 8), -200.0, requires_grad=recorded)
    assert torch.equal(topk_sigmoid(logits, 3, renormalize=True)[1], torch.zeros(2, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_dtypes_of_gating_on_meta_tensors(dtype: torch.dtype) -> None:
    logits = torch.empty(5, 8, dtype=dtype, device="meta")
    found = topk_softmax(logits, 3, renormalize=True)
    assert [x.dtype for x in found] == [torch.int64, torch.promote_types(dtype, torch.float32)]


def test_topk_sigmoid_refusals() -> None:
    logits = torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"^bias: expected on cpu with logits, got on meta"):
        topk_sigmoid(logits, 2, renormalize=True, bias=torch.zeros(8, device="meta"))
    with pytest.raises(ValueError, match=r"^num_groups, top_groups: expected num_groups to divide E = 8, "):
        topk_sigmoid(logits, 2, renormalize=True, num_groups=3)
    with pytest.raises(ValueError, match=r"^num_groups, top_groups: .* got 4, 5"):
        topk_sigmoid(logits, 2, renormalize=True, num_groups=4, top_groups=5)
    with pytest.raises(ValueError, match=r"^num_groups, top_groups: .* got 0, 1"):
        topk_sigmoid(logits, 2, renormalize=True, num_groups=0)
    with pytest.raises(ValueError, match=r"^top_k: expected 1 to 4, got 5"):
        topk_sigmoid(logits, 5, renormalize=True, num_groups=4, top_groups=2)
    for shape in ((2, 1), (7,)):
        with pytest.raises(ValueError, match=r"^bias: expected shape \[E\] = \[8\], got"):
            topk_sigmoid(logits, 2, renormalize=True, bias=torch.zeros(shape))


@pytest.mark.parametrize("function", [topk_softmax, topk_sigmoid])
def test_gating_refusals(function: Any) -> None:
    for top_k in (0, 9):
        with pytest.raises(ValueError, match=rf"^top_k: expected 1 to 8, got {top_k}"):
            function(torch.zeros(2, 8), top_k, renormalize=True)
    with pytest.raises(ValueError, match=r"^logits: expected shape \[T, E\], got \[8\]"):
        function(torch.zeros(8), 2, renormalize=True)
    with pytest.raises(TypeError, match=r"^logits: expected one of .* got torch.int64"):
        function(torch.zeros(2, 8).long(), 2, renormalize=True)


@pytest.mark.parametrize("renormalize", [True, False])
def test_gates_carry_gradients_to_the_router(renormalize: bool) -> None:
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    # Each row has a value of its own. With equal rows per token, renormalised weights would give a constant.
    values = torch.linspace(1, 2, 8, dtype=torch.float64).unsqueeze(1)

    def layer(logits: Tensor) -> Tensor:
        ids, topk_weights = topk_softmax(logits, 2, renormalize=renormalize)
        routing = route(ids, topk_weights, 6)
        return unpermute(permute(torch.ones(4, 2, dtype=torch.float64), routing) * values, routing)

    assert torch.autograd.grad(layer(logits).square().sum(), logits)[0].abs().max() > 1e-3
    assert torch.autograd.gradcheck(layer, logits)


@pytest.mark.parametrize("num_groups", [1, 4])
def test_sigmoid_gating_traced_by_torch_jit(num_groups: int) -> None:
    options: Any = {"renormalize": True, "num_groups": num_groups, "top_groups": min(2, num_groups)}
    traced = torch.jit.trace(lambda logits: topk_sigmoid(logits, 2, **options), torch.randn(5, 8))
    logits = torch.randn(7, 8)
    assert all(map(torch.equal, traced(logits), topk_sigmoid(logits, 2, **options)))


_GATINGS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "softmax": lambda logits: topk_softmax(logits, 3, renormalize=True),
    "softmax, not renormalized": lambda logits: topk_softmax(logits, 3, renormalize=False),
    "sigmoid": lambda logits: topk_sigmoid(logits, 3, renormalize=True, num_groups=4, top_groups=2, scale=2.5),
}


class _Gating(torch.nn.Module):
    def __init__(self, gating: Callable[[Tensor], tuple[Tensor, Tensor]]):
        super().__init__()
        self.gating = gating

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return self.gating(logits)


_TRACERS: dict[str, Callable[[_Gating, Tensor], Callable[[Tensor], tuple[Tensor, Tensor]]]] = {
    "torch.jit": torch.jit.trace,
    "make_fx": lambda module, logits: make_fx(module)(logits),
    "export": lambda module, logits: torch.export.export(module, (logits,)).module(),
    "strict export": lambda module, logits: torch.export.export(module, (logits,), strict=True).module(),
}


@pytest.mark.parametrize("name", _GATINGS)
@pytest.mark.parametrize("tracer", _TRACERS)
def test_programs_traced_without_gradients_have_them(tracer: str, name: str) -> None:
    logits = torch.randn(5, 8)
    with torch.no_grad():
        traced = _TRACERS[tracer](_Gating(_GATINGS[name]), logits)
    logits.requires_grad_()
    (found,) = torch.autograd.grad(traced(logits)[1].square().sum(), logits)
    (expected,) = torch.autograd.grad(_GATINGS[name](logits)[1].square().sum(), logits)
    torch.testing.assert_close(found, expected)
    assert expected.abs().max() > 1e-3


@pytest.mark.parametrize("name", _GATINGS)
def test_compiled_transforms_of_gating(name: str) -> None:
    def loss(logits: Tensor) -> Tensor:
        return _GATINGS[name](logits)[1].square().sum()

    torch._dynamo.reset()
    logits = torch.randn(5, 8)
    for transform in (torch.func.grad(loss), torch.func.hessian(loss)):
        compiled = torch.compile(transform, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(logits), transform(logits))
    assert torch.func.grad(loss)(logits).abs().max() > 1e-3


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gating_does_not_hide_nan(value: float, recorded: bool) -> None:
    """Also where the expert that has it is not chosen."""
    logits = torch.tensor([[0.5, 2.0, 1.0, value], [0.0, 1.0, 2.0, 3.0]], requires_grad=recorded)
    for renormalize in (True, False):
        _, topk_weights = topk_softmax(logits, 2, renormalize=renormalize)
        assert topk_weights[0].isnan().all() and topk_weights[1].isfinite().all()
