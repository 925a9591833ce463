"""The counting sort and the moves, exactly: order, dropped slots, any sizes; and sums as documented."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_kernels import Routing, permute, reference, route, unpermute
from moe_kernels.kernels import route as kernels
from moe_kernels.runtime import cache

NAN = float("nan")


def random_ids(T: int, top_k: int, num_experts: int, device: str, kind: str = "uniform") -> torch.Tensor:
    """Return ids, some of which are dropped."""
    if kind == "one":
        ids = torch.full((T, top_k), num_experts // 2)
    elif kind == "skewed":
        ids = (torch.rand(T, top_k) ** 4 * num_experts).long()
    else:
        ids = torch.randint(0, num_experts, (T, top_k))
    dropped = torch.rand(T, top_k) < 0.1
    return torch.where(dropped, torch.randint(-3, 0, (T, top_k)), ids).to(device)


def assert_routed(routing: Routing, ids: torch.Tensor, num_experts: int) -> None:
    expected = reference.route(ids, routing.topk_weights, num_experts)
    for name, actual, right in zip(Routing._fields, routing, expected, strict=True):
        assert actual.dtype == right.dtype, name
        assert torch.equal(actual, right), name


@pytest.fixture(params=["one launch", "two launches"])
def _launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "two launches":
        request.getfixturevalue("fresh_plans")
        monkeypatch.setattr(kernels, "RANK_UP_TO", 0)


@pytest.mark.usefixtures("_launches")
@pytest.mark.parametrize(("T", "top_k", "num_experts"), [(1, 1, 1), (1, 8, 5), (9, 3, 5), (70, 4, 33), (150, 2, 5)])
def test_order(T: int, top_k: int, num_experts: int, device: str) -> None:
    for kind in ("uniform", "skewed", "one"):
        ids = random_ids(T, top_k, num_experts, device, kind)
        assert_routed(route(ids, torch.rand(T, top_k, device=device), num_experts), ids, num_experts)


@pytest.mark.usefixtures("_launches")
def test_ids_that_name_no_expert(device: str) -> None:
    ids = torch.tensor([[0, 5], [2**31 - 1, -(2**31)], [3, 3], [5, 4]], device=device)
    for topk_ids in (ids, ids.int(), torch.full_like(ids, 5), ids + 2**40, ids.t().contiguous().t()):
        routing = route(topk_ids, torch.rand(4, 2, device=device), 5)
        assert_routed(routing, topk_ids, 5)


@pytest.mark.usefixtures("_launches")
@settings(max_examples=10, deadline=None)
@given(ids=st.lists(st.integers(-1, 5), min_size=2, max_size=60))
def test_any_ids(ids: list[int]) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    topk_ids = torch.tensor(ids, device=device)[: len(ids) // 2 * 2].view(-1, 2)
    assert_routed(route(topk_ids, torch.ones(topk_ids.shape, device=device), 5), topk_ids, 5)


def test_nothing_to_route(device: str) -> None:
    empty = torch.empty(0, 4, dtype=torch.int64, device=device)
    assert_routed(route(empty, torch.empty(0, 4, device=device), 3), empty, 3)
    ids = torch.zeros(3, 4, dtype=torch.int64, device=device)
    assert_routed(route(ids, torch.ones(3, 4, device=device), 0), ids, 0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("T", "top_k", "num_experts"),
    [
        *((T, 8, 128) for T in (1, 16, 64, 500, 513, 8192, 32768, 40000)),
        (4096, 2, 8),
        (4096, 8, 256),
        (32768, 10, 512),
        (300_000, 8, 1024),
        (2000, 8, 4096),
        (300, 8, 65536),
    ],
)
def test_order_at_the_size_of_models(T: int, top_k: int, num_experts: int, device: str) -> None:
    for kind in ("uniform", "skewed", "one"):
        ids = random_ids(T, top_k, num_experts, device, kind)
        for _ in range(3):
            assert_routed(route(ids, torch.rand(T, top_k, device=device), num_experts), ids, num_experts)


def _routing(T: int, top_k: int, num_experts: int, device: str, dtype: torch.dtype = torch.float32) -> Routing:
    ids = random_ids(T, top_k, num_experts, device)
    return route(ids, torch.rand(T, top_k, device=device).to(dtype), num_experts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("T", "top_k", "H"), [(9, 3, 40), (1, 1, 1), (20, 2, 1030)])
def test_permute_copies(T: int, top_k: int, H: int, dtype: torch.dtype, device: str) -> None:
    routing = _routing(T, top_k, 5, device)
    hidden = torch.randn(T, H, device=device).to(dtype)
    assert torch.equal(permute(hidden, routing), reference.permute(hidden, routing))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weighted", [True, False])
def test_unpermute_adds_in_float32_in_order_and_rounds_once(dtype: torch.dtype, weighted: bool, device: str) -> None:
    routing = _routing(20, 3, 5, device)
    rows = torch.randn(60, 40, device=device).to(dtype)
    rows[routing.group_offsets[-1] :] = NAN
    dropped = (routing.slot_to_row >= routing.group_offsets[-1]).view(20, 3)
    assert dropped.any()
    routing.topk_weights[dropped] = NAN
    out = unpermute(rows, routing, weighted=weighted)
    expected = reference.unpermute(rows, routing, weighted=weighted)
    if weighted:  # the multiplication and addition may be fused
        at_home = type(routing)(*(part.cpu() for part in routing))
        exact = reference.unpermute(rows.cpu().double(), at_home._replace(topk_weights=at_home.topk_weights.double()))
        eps = torch.finfo(dtype).eps / 2
        assert ((out.cpu() - exact).abs() <= eps * exact.abs() + 4 * torch.finfo(torch.float32).eps * 10).all()
    else:
        assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_the_moves(dtype: torch.dtype, device: str) -> None:
    routing = _routing(12, 3, 5, device)
    ids = routing.slot_to_row.long().view(12, 3)
    kept = ids < routing.group_offsets[-1]
    rows = torch.randn(36, 1030, device=device).to(dtype)
    rows[routing.group_offsets[-1] :] = NAN
    rows.requires_grad_()
    topk_weights = routing.topk_weights.clone().requires_grad_()
    out = unpermute(rows, routing._replace(topk_weights=topk_weights))
    upstream = torch.randn_like(out)
    out.backward(upstream)
    d_rows = torch.zeros(36, 1030, device=device)
    d_rows[ids] = upstream.float().unsqueeze(1) * topk_weights.detach().unsqueeze(2) * kept.unsqueeze(2)
    assert rows.grad is not None
    assert topk_weights.grad is not None
    assert torch.equal(rows.grad, d_rows.to(dtype))
    dots = (rows.detach().double()[ids].nan_to_num() * upstream.double().unsqueeze(1)).sum(2) * kept
    torch.testing.assert_close(topk_weights.grad.double(), dots, rtol=1e-5, atol=1e-4)
    hidden = torch.randn(12, 1030, device=device).to(dtype).requires_grad_()
    moved = permute(hidden, routing)
    upstream = torch.randn_like(moved)
    moved.backward(upstream)
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, reference.unpermute(upstream, routing, weighted=False))


def test_strided_operands_and_weights(device: str) -> None:
    routing = _routing(9, 3, 5, device)
    wide = torch.full((9, 47), NAN, device=device)
    hidden = wide[:, 3:43]
    hidden.copy_(torch.randn(9, 40))
    assert torch.equal(permute(hidden, routing), reference.permute(hidden.contiguous(), routing))
    column_major = hidden.t().contiguous().t()
    assert torch.equal(permute(column_major, routing), reference.permute(hidden.contiguous(), routing))
    rows = torch.randn(40, 27, device=device).t()
    topk_weights = routing.topk_weights.t().contiguous().t()
    out = unpermute(rows, routing._replace(topk_weights=topk_weights))
    torch.testing.assert_close(out, reference.unpermute(rows.contiguous(), routing))


def test_strides_of_indices_in_turn(device: str) -> None:
    """A plan for contiguous indices does not serve others."""
    apart = torch.randint(0, 5, (40, 2), device=device)
    one = apart.T[:1, :1].T  # with a stride that does not matter for its single element
    for ids in (one, apart[:, :1].contiguous(), apart[:, :1], apart[:, 1:].contiguous()):
        assert_routed(route(ids, torch.rand(ids.shape, device=device), 5), ids, 5)

    routing = _routing(40, 2, 5, device)
    hidden = torch.randn(40, 24, device=device)
    rows = reference.permute(hidden, routing)
    every_second = {
        name: torch.stack([part, torch.full_like(part, 7)], 1)[:, 0]
        for name, part in routing._asdict().items()
        if name != "topk_weights"
    }
    for other in ({}, every_second, {}):
        given = routing._replace(**other)
        assert torch.equal(permute(hidden, given), rows)
        torch.testing.assert_close(unpermute(rows, given), reference.unpermute(rows, routing))


def test_moves_of_nothing(device: str) -> None:
    for T, H, num_experts in ((0, 8, 3), (4, 0, 3), (4, 8, 0)):
        ids = torch.zeros(T, 2, dtype=torch.int64, device=device)
        routing = route(ids, torch.ones(T, 2, device=device), num_experts)
        rows = permute(torch.ones(T, H, device=device), routing)
        assert torch.equal(rows, torch.full((2 * T, H), float(num_experts > 0), device=device))
        out = unpermute(rows, routing)
        assert torch.equal(out, torch.full((T, H), 2.0 * (num_experts > 0), device=device))


def test_another_number_of_tokens_finds_its_plans(device: str) -> None:
    with cache.isolated():
        for T in (33, 40, 61):
            routing = _routing(T, 2, 5, device)
            hidden = torch.randn(T, 24, device=device)
            rows = permute(hidden, routing)
            assert torch.equal(rows, reference.permute(hidden, routing))
            torch.testing.assert_close(unpermute(rows, routing), reference.unpermute(rows, routing))
        assert sorted(operator for operator, *_ in cache.plans.entries) == ["combine_rows", "route", "scatter_rows"]


@pytest.mark.gpu
def test_repeats_are_bit_identical_and_the_host_never_waits(device: str) -> None:
    ids = random_ids(3000, 8, 64, device)
    topk_weights = torch.rand(3000, 8, device=device, requires_grad=True)
    hidden = torch.randn(3000, 512, device=device, dtype=torch.bfloat16, requires_grad=True)

    def run() -> list[torch.Tensor]:
        routing = route(ids, topk_weights, 64)
        out = unpermute(permute(hidden, routing), routing)
        return [*routing[:3], out.detach(), *torch.autograd.grad(out, (hidden, topk_weights), torch.ones_like(out))]

    first = run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        repeats = [run() for _ in range(20)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for repeat in repeats:
        assert all(torch.equal(a, b) for a, b in zip(first, repeat, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("T", [16, 3000])
def test_capture_and_replay_with_other_ids(T: int, device: str) -> None:
    hidden = torch.randn(T, 264, device=device, dtype=torch.bfloat16)
    ids, topk_weights = random_ids(T, 8, 60, device), torch.rand(T, 8, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routing = route(ids, topk_weights, 60)
        rows = permute(hidden, routing)
    for kind in ("uniform", "skewed", "one"):
        ids.copy_(random_ids(T, 8, 60, device, kind))
        graph.replay()
        assert_routed(routing, ids, 60)
        assert torch.equal(rows, reference.permute(hidden, routing))


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(device: str) -> None:
    torch.use_deterministic_algorithms(False)  # filling these tensors with NaN takes long
    T, top_k, H = 80_000, 8, 4096
    ids = torch.randint(0, 16, (T, top_k), device=device)
    routing = route(ids, torch.ones(T, top_k, device=device), 16)
    hidden = torch.empty(T, H, device=device, dtype=torch.bfloat16).normal_()
    rows = permute(hidden, routing)
    last = routing.row_to_slot[-1000:].long()
    assert torch.equal(rows[-1000:], hidden[last // top_k])
    out = unpermute(rows, routing)
    torch.testing.assert_close(out[-1000:].float(), 8 * hidden[-1000:].float(), rtol=1e-2, atol=0)
