"""The gating kernel against plain PyTorch: the choice exactly, weights within the budget, ties, NaN, infinities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_kernels import reference, topk_sigmoid, topk_softmax
from moe_kernels.rules.gating import MOST_EXPERTS
from moe_kernels.runtime import cache
from moe_kernels.testing import assert_within_budget

NAN, INF = float("nan"), float("inf")
SHAPES = [(1, 1, 1), (5, 8, 2), (3, 60, 4), (70, 64, 8), (9, 128, 8), (2, 300, 10), (4, 5, 5), (2, 1000, 3)]
GROUPS = [
    (6, 8, 3, 4, 2),
    (5, 256, 8, 8, 4),
    (3, 160, 6, 8, 3),
    (3, 60, 7, 12, 5),
    (4, 12, 3, 12, 3),
    (2, 12, 12, 4, 4),
]


def different(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers about 0, all different within a row, whose scores are different, too."""
    columns = torch.rand(shape).argsort(dim=-1)
    return (columns * (8.0 / shape[-1]) - 4.0).to(dtype)


def assert_chosen(
    chosen: tuple[Tensor, Tensor],
    logits: Tensor,
    top_k: int,
    softmax: bool,
    *,
    bias: Tensor | None = None,
    renormalize: bool = True,
    groups: tuple[int, int] = (1, 1),
    scale: float = 1.0,
) -> None:
    ids, topk_weights = chosen
    assert torch.equal(ids, reference.topk_ids(logits, bias, top_k, softmax, *groups))
    plain, exact = (reference.topk_weights(x, ids, softmax, renormalize, scale) for x in (logits, logits.double()))
    assert_within_budget(topk_weights, plain, exact, scale=scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("T", "E", "top_k"), SHAPES)
def test_softmax(T: int, E: int, top_k: int, renormalize: bool, dtype: torch.dtype, device: str) -> None:
    logits = different(T, E, dtype=dtype).to(device)
    chosen = topk_softmax(logits, top_k, renormalize=renormalize)
    assert_chosen(chosen, logits, top_k, True, renormalize=renormalize)
    assert "choose_experts" in [operator for operator, *_ in cache.plans.entries]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("T", "E", "top_k"), SHAPES)
def test_sigmoid(T: int, E: int, top_k: int, biased: bool, device: str) -> None:
    """A biased score below 0 is better than another expert in no program."""
    logits, bias = different(T, E).to(device), different(E).to(device) - 3 if biased else None
    chosen = topk_sigmoid(logits, top_k, renormalize=True, bias=bias, scale=2.5)
    assert_chosen(chosen, logits, top_k, False, bias=bias, scale=2.5)
    plain = topk_sigmoid(logits, top_k, renormalize=False, bias=bias)
    assert_chosen(plain, logits, top_k, False, bias=bias, renormalize=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("T", "E", "top_k", "num_groups", "top_groups"), GROUPS)
def test_the_best_groups(
    T: int, E: int, top_k: int, num_groups: int, top_groups: int, dtype: torch.dtype, device: str
) -> None:
    logits, bias = torch.randn(T, E, device=device), torch.randn(E, device=device).to(dtype) - 2
    groups = (num_groups, top_groups)
    chosen = topk_sigmoid(
        logits, top_k, renormalize=True, bias=bias, num_groups=num_groups, top_groups=top_groups, scale=2.5
    )
    assert_chosen(chosen, logits, top_k, False, bias=bias, groups=groups, scale=2.5)


def test_a_bias_of_minus_infinity_is_better_than_another_group(device: str) -> None:
    bias = torch.tensor([3.0, 3.0, -INF, 0.0, 0.0, 0.0], device=device)
    for order in (slice(None), [3, 4, 5, 0, 1, 2]):
        logits = torch.tensor([[0.5, 0.0, 4.0, 1.0, 2.0, 3.0]] * 4, device=device)[:, order]
        options: dict[str, Any] = {"renormalize": False, "num_groups": 2, "top_groups": 1}
        ids, topk_weights = topk_sigmoid(logits, 3, bias=bias[order], **options)
        assert logits.gather(1, ids).tolist() == [[0.5, 0.0, 4.0]] * 4
        torch.testing.assert_close(topk_weights, logits.gather(1, ids).sigmoid())


def test_of_equal_scores_the_lowest_expert(device: str) -> None:
    logits = torch.zeros(3, 20, device=device)
    logits[1, 7:9] = 1
    for ids, _ in (topk_softmax(logits, 4, renormalize=True), topk_sigmoid(logits, 4, renormalize=True)):
        assert ids.tolist() == [[0, 1, 2, 3], [7, 8, 0, 1], [0, 1, 2, 3]]
    ids, _ = topk_sigmoid(logits[:1], 6, renormalize=True, num_groups=5, top_groups=3)
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5]]


def test_a_row_with_nan_chooses_experts_that_exist(device: str) -> None:
    logits = different(4, 12).to(device)
    logits[1, 5], logits[2] = NAN, -NAN
    right = topk_softmax(logits[::3], 3, renormalize=False)
    for chosen in (topk_softmax(logits, 3, renormalize=False), topk_sigmoid(logits, 3, renormalize=False)):
        ids, topk_weights = chosen
        assert torch.equal(ids[::3], right[0])
        assert [len(set(row)) for row in ids.tolist()] == [3] * 4 and ids.min() >= 0 and ids.max() < 12
        assert topk_weights[::3].isfinite().all() and topk_weights[2].isnan().all()
    assert ids[1, 0] == 5 and topk_weights[1, 0].isnan() and topk_weights[1, 1:].isfinite().all()
    grouped = topk_sigmoid(logits, 3, renormalize=False, num_groups=4, top_groups=2)[0]
    assert grouped[1, 0] == 5 and [len(set(row)) for row in grouped.tolist()] == [3] * 4


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_logit_that_is_not_finite_is_not_hidden(value: float, recorded: bool, device: str) -> None:
    logits = torch.tensor([[0.5, 2.0, 1.0, value], [0.0, 1.0, 2.0, 3.0]], device=device, requires_grad=recorded)
    for renormalize in (True, False):
        _, topk_weights = topk_softmax(logits, 2, renormalize=renormalize)
        assert topk_weights[0].isnan().all() and topk_weights[1].isfinite().all()


def test_nan_with_a_sign_is_the_best_too(device: str) -> None:
    bias = torch.tensor([0, 0, -(1 << 22), 0], dtype=torch.int32).view(torch.float32).to(device)
    assert bias[2].isnan()
    ids, _ = topk_sigmoid(torch.zeros(1, 4, device=device), 2, renormalize=False, bias=bias)
    assert ids.tolist() == [[2, 0]]


def test_a_bias_is_added_in_float32(device: str) -> None:
    bias = torch.tensor([1.0, 1.0001, 1.0002, 1.0], device=device)
    ids, _ = topk_sigmoid(torch.zeros(1, 4, device=device), 2, renormalize=False, bias=bias)
    assert ids.tolist() == [[2, 1]]


def test_infinite_logits(device: str) -> None:
    logits = torch.tensor([[-INF, 1.0, -INF, 2.0], [-INF] * 4, [0.0, INF, 1.0, 2.0], [-200.0] * 4], device=device)
    ids, topk_weights = topk_softmax(logits, 3, renormalize=True)
    assert ids[0].tolist() == [3, 1, 0] and topk_weights[1:3].isnan().all()
    torch.testing.assert_close(topk_weights[0, :2], torch.tensor([2.0, 1.0], device=device).softmax(0))
    assert topk_weights[0, 2] == 0 and (topk_weights[3] - 1 / 3).abs().max() < 1e-6
    ids, topk_weights = topk_sigmoid(logits, 3, renormalize=True)
    assert ids[2].tolist() == [1, 3, 2] and topk_weights.isfinite().all()
    assert not topk_weights[1].any() and not topk_weights[3].any()  # all sigmoids are 0: no division by 0


@pytest.mark.parametrize("kind", ["transposed", "expanded", "every second", "no tokens"])
def test_layouts_of_logits(kind: str, device: str) -> None:
    logits = {
        "transposed": lambda: different(7, 20).t().contiguous().t(),
        "expanded": lambda: different(1, 20).expand(7, 20),
        "every second": lambda: different(7, 40)[:, ::2],
        "no tokens": lambda: torch.zeros(0, 20),
    }[kind]().to(device)
    ids, topk_weights = topk_softmax(logits, 3, renormalize=True)
    assert torch.equal(ids, reference.topk_ids(logits, None, 3, True, 1, 1))
    torch.testing.assert_close(topk_weights, reference.topk_weights(logits, ids, True, True, 1.0))


def test_what_has_no_kernel(device: str) -> None:
    """float64, a bias in float64, and more experts than a program holds."""
    for logits, bias in (
        (different(3, 9).double(), None),
        (different(3, 9), different(9).double()),
        (torch.randn(2, MOST_EXPERTS + 1), None),
    ):
        given = logits.to(device), None if bias is None else bias.to(device)
        with cache.isolated():
            ids, topk_weights = topk_sigmoid(given[0], 3, renormalize=True, bias=given[1])
            assert not cache.plans.entries
        assert torch.equal(ids, reference.topk_ids(*given, 3, False, 1, 1))
        assert topk_weights.dtype == torch.promote_types(logits.dtype, torch.float32)


def test_the_most_experts(device: str) -> None:
    logits = different(2, MOST_EXPERTS).to(device)
    assert_chosen(topk_sigmoid(logits, 9, renormalize=True), logits, 9, False)


def test_calls_like_an_earlier_one_are_repeats(device: str, repeats: Callable[[str], None]) -> None:
    for T in (40, 40, 41, 50):
        logits = different(T, 24).to(device)
        assert_chosen(topk_softmax(logits, 3, renormalize=True), logits, 3, True)
        repeats("choose_experts")
    assert len(cache.plans.recent["choose_experts"]) == 1
    calls: list[Callable[[], Any]] = [
        lambda: topk_softmax(logits, 3, renormalize=False),
        lambda: topk_softmax(logits, 2, renormalize=True),
        lambda: topk_sigmoid(logits, 3, renormalize=True),
        lambda: topk_softmax(logits.half(), 3, renormalize=True),
    ]
    for call in calls:
        with pytest.raises(AssertionError, match="no repeat"):
            call()
    for wrong in ({"renormalize": 1}, {"renormalize": True, "top_k": True}):
        with pytest.raises(TypeError, match="expected"):
            topk_softmax(logits, **{"top_k": 3, **wrong})


def test_another_option_is_no_repeat(device: str, repeats: Callable[[str], None]) -> None:
    logits = different(5, 24).to(device)
    first: dict[str, Any] = {"num_groups": 4, "top_groups": 2, "scale": 2.5}
    for others in ({}, {}, {"scale": 1.5}, {"num_groups": 2}, {"top_groups": 3}):
        options = first | others
        chosen = topk_sigmoid(logits, 3, renormalize=True, **options)
        groups = options["num_groups"], options["top_groups"]
        assert_chosen(chosen, logits, 3, False, groups=groups, scale=options["scale"])
    assert len(cache.plans.recent["choose_experts"]) == 4


def test_export_of_a_symbolic_top_k_after_a_repeat(device: str, repeats: Callable[[str], None]) -> None:
    class Quarter(torch.nn.Module):
        def forward(self, logits: Tensor) -> tuple[Tensor, Tensor]:
            return topk_softmax(logits, logits.size(1) // 4, renormalize=True)

    logits, model = different(7, 20).to(device), Quarter()
    for _ in range(2):
        model(logits)
    auto = torch.export.Dim.AUTO
    program = torch.export.export(model, (logits,), dynamic_shapes=({0: auto, 1: auto},), strict=False).module()
    for T, E in ((7, 20), (5, 12)):
        logits = different(T, E).to(device)
        assert_chosen(program(logits), logits, E // 4, True)


@pytest.mark.parametrize("softmax", [True, False])
def test_autograd_changes_no_choice(softmax: bool, device: str) -> None:
    logits = torch.randn(40, 24, device=device)
    logits[:, 3] = logits[:, 9]  # a tie in each row
    function = topk_softmax if softmax else topk_sigmoid
    ids, topk_weights = function(logits, 5, renormalize=True)
    recorded_ids, recorded = function(logits.requires_grad_(), 5, renormalize=True)
    assert torch.equal(recorded_ids, ids) and recorded.requires_grad and not topk_weights.requires_grad
    torch.testing.assert_close(recorded, topk_weights)
    upstream = torch.randn_like(recorded)
    exact = logits.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(reference.topk_weights(exact, ids, softmax, True, 1.0), exact, upstream.double())
    (found,) = torch.autograd.grad(recorded, logits, upstream)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    assert expected.abs().max() > 0.05


@pytest.mark.gpu
def test_replays_of_a_graph(device: str) -> None:
    logits, bias = different(300, 256).to(device), torch.randn(256, device=device)
    options: dict[str, Any] = {"renormalize": True, "num_groups": 8, "top_groups": 4, "bias": bias}
    topk_sigmoid(logits, 8, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen = topk_sigmoid(logits, 8, **options)
    for _ in range(3):
        logits.copy_(torch.randn(300, 256))
        bias.normal_()
        graph.replay()
        assert_chosen(chosen, logits, 8, False, bias=bias, groups=(8, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("function", [topk_softmax, topk_sigmoid])
def test_compiled(function: Callable[..., Any], device: str) -> None:
    compiled = torch.compile(lambda x: function(x, 4, renormalize=True), fullgraph=True)
    for T in (5, 70, 71):
        logits = different(T, 24).to(device)
        assert_chosen(compiled(logits), logits, 4, function is topk_softmax)
        with_gradients = logits.clone().requires_grad_()
        found = torch.autograd.grad(compiled(with_gradients)[1].square().sum(), with_gradients)[0]
        torch.testing.assert_close(
            found,
            torch.autograd.grad(function(with_gradients, 4, renormalize=True)[1].square().sum(), with_gradients)[0],
        )
