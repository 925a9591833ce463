"""Two gloo ranks in float64: outputs and all gradients equal those of one process with all experts.

The same ranks also run MoE under FSDP2, because starting them takes longer than everything else.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moe_kernels import MoE, checks, grouped_gemm, moe_mlp, ops, quantize_once, swiglu_ffn
from moe_kernels.expert_parallel import combine, dispatch

P, E, TOP_K, H, I = 2, 6, 2, 5, 4  # noqa: E741
CASES = {  # tokens of each rank, and the ids to draw from
    "uneven": ((7, 4), range(E)),
    "nothing for rank 0": ((5, 6), range(3, 6)),
    "one expert for all": ((5, 6), range(1)),
    "rank 1 has no tokens": ((8, 0), range(E)),
    "no tokens": ((0, 0), range(E)),
    "dropped slots": ((6, 7), range(-1, E + 2)),
    "all dropped": ((3, 3), range(E, E + 2)),
}
RESIDUALS = [((5, H), None), ((2, 3, H), None), ((5, H), "fp8_block")]  # shape of the hidden states, and compute


def make(case: str) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Return both full weights, and each rank's tokens, ids, topk_weights and upstream gradients."""
    tokens, ids = CASES[case]
    generator = torch.Generator().manual_seed(len(case))

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    weights = [randn(E, 2 * I, H), randn(E, H, I)]
    return weights, [
        {
            "hidden": randn(T, H),
            "topk_ids": torch.tensor(ids)[torch.randint(len(ids), (T, TOP_K), generator=generator)],
            "topk_weights": randn(T, TOP_K),
            "upstream": randn(T, H),
        }
        for T in tokens
    ]


def layer(compute: str | None) -> nn.Sequential:
    torch.manual_seed(0)
    dtype = torch.float32 if compute else torch.float64
    return nn.Sequential(MoE(H, I, E, TOP_K, renormalize=True, compute=compute, dtype=dtype))


def gradients_of_residual(model: nn.Sequential, shape: tuple[int, ...], rank: int) -> list[Any]:
    """Return the parameters' gradients of the layer's result plus hidden states, which are added in place."""
    generator, dtype = torch.Generator().manual_seed(rank), next(model.parameters()).dtype
    x, upstream = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))
    model.zero_grad()
    h = model(x)
    h += x
    h.backward(upstream)
    return [p.grad for p in model.parameters()]


def residuals_under_fsdp2(rank: int) -> list[list[Tensor]]:
    from torch.distributed.fsdp import fully_shard

    mesh, found = init_device_mesh("cpu", (P,)), []
    for shape, compute in RESIDUALS:
        model = layer(compute)
        keeps = compute is not None
        # Not the root alone, whose weights stay gathered until the backward.
        fully_shard(model[0], mesh=mesh, reshard_after_forward=not keeps)
        fully_shard(model, mesh=mesh)
        if compute:
            with (
                pytest.raises(TypeError, match=r"layer '0' are sharded: call unshard\(\) of each"),
                quantize_once(model),
            ):
                pass
        model[0].unshard()
        counted = patch("moe_kernels.experts.ops.quantized_moe_mlp", side_effect=ops.quantized_moe_mlp)
        with warnings.catch_warnings(), quantize_once(model), counted as operator:
            warnings.simplefilter("error")  # for example, that the result of a module is a view
            for last in (False, True):
                model[0].set_reshard_after_backward(last or not keeps)
                gradients = gradients_of_residual(model, shape, rank)
            # Gradients of weights that stay unsharded are not found by `zero_grad`, and add up.
            found.append([d.full_tensor() / (2 if keeps else 1) for d in gradients])
            assert [call.args[7] is not None for call in operator.call_args_list] == [True, True] * keeps
    with pytest.raises(TypeError, match=r"^w_gate_up: expected a plain parameter, .* before it is sharded"):
        model[0].quantize("fp8_block")
    return found


def refuse_flat_weights() -> None:
    """FSDP1 leaves flat parts of weights, or weights without memory."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for original in (False, True):
        model = FullyShardedDataParallel(layer("fp8_block"), use_orig_params=original, device_id=torch.device("cpu"))
        model(torch.ones(3, H)).sum().backward()
        with pytest.raises(TypeError, match=r"sharded: .* within FSDP1's summon_full_params"), quantize_once(model):
            pass
        with pytest.raises(TypeError, match=r"^w_gate_up: expected a plain parameter, .* before it is sharded"):
            model.module[0].quantize("fp8_block")
        with FullyShardedDataParallel.summon_full_params(model), quantize_once(model):
            model.module(torch.ones(3, H))


def spread(
    topk_ids: Tensor, group: Any, hidden: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor
) -> Tensor:
    rows, exchange = dispatch(hidden, topk_ids, topk_weights, E, group)
    act = swiglu_ffn(rows, w_gate_up, exchange.group_offsets)
    return combine(grouped_gemm(act, w_down.mT, exchange.group_offsets), exchange)


def check_compiled(group: Any) -> None:
    """Compare a layer of one rank with the same one compiled, for changing numbers of rows."""

    def layer(topk_ids: Tensor, hidden: Tensor, *weights: Tensor) -> Tensor:
        rows, exchange = dispatch(hidden, topk_ids, torch.ones_like(topk_ids, dtype=torch.float64), E, group)
        ids = exchange.expert_ids
        return combine(moe_mlp(rows, ids, torch.ones_like(ids, dtype=torch.float32), *weights), exchange)

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager")
    for case in CASES:
        weights, (x, _) = make(case)
        inputs = [v.requires_grad_() for v in (x["hidden"], *weights)]
        results = [each(x["topk_ids"], *inputs) for each in (compiled, layer)]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(torch.autograd.grad(out, inputs, x["upstream"]) for out in results))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"dispatch reads the numbers of rows on the host"):
        torch.compile(layer, fullgraph=True, backend="eager")(x["topk_ids"], *inputs)
    rows, exchange = dispatch(inputs[0], x["topk_ids"], torch.ones_like(x["topk_ids"], dtype=torch.float64), E, group)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"combine exchange rows outside of compiled graphs"):
        torch.compile(combine, fullgraph=True, backend="eager")(rows, exchange)


def in_fp8(x: dict[str, Tensor], w_gate_up: Tensor, w_down: Tensor) -> list[Tensor]:
    """Return the result of this rank's tokens, with its experts' products in fp8, and all gradients, in float32."""
    inputs = [v.detach().float().requires_grad_() for v in (x["hidden"], x["topk_weights"], w_gate_up, w_down)]
    rows, exchange = dispatch(inputs[0], x["topk_ids"], inputs[1], E)
    ids = exchange.expert_ids
    rows = moe_mlp(rows, ids, torch.ones_like(ids, dtype=torch.float32), *inputs[2:], compute="fp8_block")
    out = combine(rows, exchange)
    return [out.detach(), *torch.autograd.grad(out, inputs, x["upstream"].float())]


def check_gradients_for_rank_0_alone(case: str, rank: int, expected: list[Tensor]) -> None:
    """Let only the tokens of rank 0 require grad, and compare with the result and gradients where all do."""
    weights, ranks = make(case)
    w_gate_up, w_down = (w.chunk(P)[rank].clone().requires_grad_() for w in weights)
    x, topk_weights = ranks[rank], ranks[rank]["topk_weights"].requires_grad_()
    hidden = x["hidden"].requires_grad_(rank == 0)
    out = spread(x["topk_ids"], None, hidden, topk_weights, w_gate_up, w_down)
    leaves, nodes = [], [out.grad_fn]
    for node in nodes:
        nodes += [one for one, _ in node.next_functions if one is not None and one not in nodes]
        leaves += [node.variable] if hasattr(node, "variable") else []
    given = {id(leaf) for leaf in (hidden, topk_weights, w_gate_up, w_down)}
    assert all(leaf.numel() == 0 for leaf in leaves if id(leaf) not in given)  # autograd would keep its gradient
    out.backward(x["upstream"])
    d_hidden = torch.zeros_like(hidden) if hidden.grad is None else hidden.grad
    wanted = [expected[0], expected[1] * (rank == 0), *expected[2:]]
    torch.testing.assert_close([out.detach(), d_hidden, topk_weights.grad, w_gate_up.grad, w_down.grad], wanted)


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    limit = timedelta(minutes=3)  # of waiting for the other rank
    dist.init_process_group("gloo", f"file://{folder}/store", limit, rank=rank, world_size=P)
    results: dict[str, Any] = {}
    for case in CASES:
        weights, ranks = make(case)
        w_gate_up, w_down = (w.chunk(P)[rank].clone().requires_grad_() for w in weights)
        x = ranks[rank]
        inputs = (x["hidden"].requires_grad_(), x["topk_weights"].requires_grad_(), w_gate_up, w_down)
        group = init_device_mesh("cpu", (P,)) if case == "uneven" else None
        layer = partial(spread, x["topk_ids"], group)
        out = layer(*inputs)
        results[case] = [out.detach(), *torch.autograd.grad(out, inputs, x["upstream"])]
        out, pullback = torch.func.vjp(layer, *(v.detach() for v in inputs))
        results[f"{case}, torch.func"] = [out, *pullback(x["upstream"])]
        results[f"{case}, fp8"] = in_fp8(x, w_gate_up, w_down)
    for case in ("uneven", "rank 1 has no tokens"):
        check_gradients_for_rank_0_alone(case, rank, results[case])
    routed = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    disabled = r"hidden: gradients are recorded on ranks \[1\] .* and disabled, .* on ranks \[0\]: enable them"
    with pytest.raises(RuntimeError, match=disabled), torch.set_grad_enabled(rank == 1):
        dispatch(torch.ones(1, H, requires_grad=True), *routed, E)
    hidden = torch.ones(1, H, requires_grad=rank == 1)
    with pytest.raises(RuntimeError, match=disabled):
        if rank == 1:
            dispatch(hidden, *routed, E)
        else:
            torch.func.grad(lambda scale: (dispatch(hidden, *routed, E)[0] * scale).sum())(torch.ones(()))
    for enabled in (False, rank == 1):  # allowed, as no rank records gradients
        with torch.set_grad_enabled(enabled):
            assert combine(*dispatch(torch.ones(1, H), *routed, E)).sum() == H
    with pytest.raises(ValueError, match=r"num_experts: expected a multiple of the group's 2 ranks, got 7"):
        dispatch(torch.ones(1, H), *routed, 7)
    with pytest.raises(ValueError, match=rf"hidden: expected H = {H + rank} and .* have \[{4 * H}, {4 * (H + 1)}\]"):
        dispatch(torch.ones(1, H + rank), *routed, E)
    halves = torch.float16, torch.bfloat16  # rows of one size, whose bits mean other values
    with pytest.raises(ValueError, match=rf"hidden: expected .*{halves[rank]} on all ranks .*, in float16, bfloat16$"):
        dispatch(torch.ones(1, H, dtype=halves[rank]), *routed, E)
    rows, exchange = dispatch(torch.ones(1, H), *routed, E)  # rank 1 has no rows
    with patch.object(checks, "_VALIDATE", True):
        assert combine(rows, exchange).sum() == H
        with pytest.raises(ValueError, match=rf"^rows: expected H = {H} and .*{halves[rank]} on .* in float16, bfloat"):
            combine(rows.to(halves[rank]), exchange)
    unlike = torch.tensor([[0, -1 if rank else 3]]), torch.ones(1, 2)
    here = (
        r"topk_ids\[0, 1\]: expected 0 to .*, got -1; to drop" if rank else r"topk_ids: .* on ranks \[1\] of the group;"
    )
    for checked in (True, rank == 1, None):  # all ranks, the one with the wrong id alone, or by the environment
        with patch.object(checks, "_VALIDATE", checked is None), pytest.raises(ValueError, match=here):
            dispatch(torch.ones(1, H), *unlike, E, validate=checked)
    with pytest.raises(ValueError, match=here):  # rank 0 drops a slot on purpose
        dispatch(torch.ones(1, H), torch.tensor([[0, -1]]), torch.ones(1, 2), E, validate=rank == 1)
    assert sum(dispatch(torch.ones(1, H), *unlike, E, validate=False)[1].sent) == 2 - rank
    with pytest.raises(ValueError, match="group: expected a one-dimensional DeviceMesh, got 2 dimensions"):
        dispatch(torch.ones(1, H), *routed, E, init_device_mesh("cpu", (1, P)))
    for without_values in (lambda x: x.to("meta"), FakeTensorMode().from_tensor):
        with pytest.raises(ValueError, match=r"^topk_ids: expected values, .* got a meta or fake tensor"):
            dispatch(*map(without_values, (torch.ones(1, H), *routed)), E)
    of_rank_0, mesh_of_rank_0 = dist.new_group([0]), DeviceMesh("cpu", [0])
    if rank == 0:
        check_compiled(of_rank_0)
        with patch.object(checks, "_VALIDATE", True):
            assert combine(*dispatch(torch.ones(1, H), *routed, E, of_rank_0)).sum() == H
    else:
        for group in (of_rank_0, mesh_of_rank_0):
            with pytest.raises(ValueError, match="group: expected a process group of which this rank is a member"):
                dispatch(torch.ones(1, H), *routed, E, group)
    results["residuals"] = residuals_under_fsdp2(rank)
    refuse_flat_weights()
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
    # DTensor's caches keep FSDP2's process group and gloo's threads alive. A thread that frees a tensor while the
    # interpreter shuts down aborts the process (pytorch issue 190489), so exit without a shutdown.
    os._exit(0)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, list[Tensor]]]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    mp.spawn(run_rank, (str(folder),), nprocs=P)
    yield [torch.load(folder / f"{rank}.pt") for rank in range(P)]


def in_one_process(case: str, dtype: torch.dtype, **options: Any) -> list[Tensor]:
    """Return the result of all tokens, and all gradients."""
    weights, ranks = make(case)
    whole = {name: torch.cat([rank[name] for rank in ranks]) for name in ranks[0]}
    inputs = [x.to(dtype).requires_grad_() for x in (whole["hidden"], whole["topk_weights"], *weights)]
    out = moe_mlp(inputs[0], whole["topk_ids"], *inputs[1:], **options)
    return [out.detach(), *torch.autograd.grad(out, inputs, whole["upstream"].to(dtype))]


def of_all_ranks(case: str, results: list[dict[str, list[Tensor]]]) -> list[Tensor]:
    return [torch.cat(parts) for parts in zip(*(rank[case] for rank in results), strict=True)]


@pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")
@pytest.mark.parametrize("way", ["", ", torch.func"])
@pytest.mark.parametrize("case", CASES)
def test_ranks_give_what_one_process_gives(case: str, way: str, results: list[dict[str, list[Tensor]]]) -> None:
    for got, want in zip(of_all_ranks(case + way, results), in_one_process(case, torch.float64), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")
@pytest.mark.parametrize("case", CASES)
def test_ranks_in_fp8(case: str, results: list[dict[str, list[Tensor]]]) -> None:
    """A token's weight is applied before or after other operands are rounded to fp8, so gradients differ a little."""
    ours, expected = of_all_ranks(f"{case}, fp8", results), in_one_process(case, torch.float32, compute="fp8_block")
    for got, want, tolerance in zip(ours, expected, (1e-6, 0.05, 0.05, 0.05, 0.05), strict=True):
        assert got.shape == want.shape
        assert (got - want).norm() <= tolerance * want.norm()


@pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")
def test_a_residual_in_place_under_fsdp2(results: list[dict[str, Any]]) -> None:
    for i, (shape, compute) in enumerate(RESIDUALS):
        whole, tolerance = layer(compute), 1e-6 if compute else 1e-12
        ranks = [[d.clone() for d in gradients_of_residual(whole, shape, rank)] for rank in range(P)]
        for rank in range(P):
            for got, *each in zip(results[rank]["residuals"][i], *ranks, strict=True):
                torch.testing.assert_close(got, sum(each) / P, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")
def test_transforms_that_dispatch_does_not_support() -> None:
    """The errors say what to use instead."""
    hidden, ids, w = torch.randn(5, H), torch.randint(E, (5, TOP_K)), torch.rand(5, TOP_K)
    tracked = hidden.clone().requires_grad_()

    def layer(hidden: Tensor) -> Tensor:
        return combine(*dispatch(hidden, ids, w, E))

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        expected = w.sum(1, keepdim=True)
        torch.testing.assert_close(layer(hidden), hidden * expected)
        (gradient,) = torch.func.vjp(layer, hidden)[1](hidden)
        torch.testing.assert_close(gradient, hidden * expected)
        for transformed in (
            lambda: torch.func.jvp(layer, (hidden,), (hidden,)),
            lambda: torch.func.jacrev(layer)(hidden),
            lambda: torch.vmap(layer)(torch.stack((hidden, hidden))),
            lambda: torch.autograd.grad(layer(tracked), tracked, torch.stack((hidden, hidden)), is_grads_batched=True),
        ):
            with pytest.raises(RuntimeError, match=r"only grad and vjp of torch\.func: .*call vjp once per vector$"):
                transformed()
    finally:
        dist.destroy_process_group()


def test_combine_names_what_it_needs() -> None:
    with pytest.raises(TypeError, match=r"^exchange: expected the Exchange that dispatch returns, got Tensor$"):
        combine(torch.ones(2, 4), torch.ones(2, 4))  # type: ignore[arg-type]


@pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")
def test_dispatch_names_the_group_that_it_needs() -> None:
    hidden, ids = torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"^group: expected a ProcessGroup, a DeviceMesh or None, got str$"):
        dispatch(hidden, ids, torch.ones(2, 1), 4, "world")  # type: ignore[arg-type]


@pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")
@pytest.mark.parametrize(
    ("num_experts", "error", "got"),
    [
        ("4", TypeError, "an int, got str"),
        (4.0, TypeError, "an int, got float"),
        (-2, ValueError, "at least 0, got -2"),
    ],
)
def test_dispatch_checks_the_number_of_experts(num_experts: Any, error: type[Exception], got: str) -> None:
    hidden, ids = torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(error, match=f"^num_experts: expected {got}"):
        dispatch(hidden, ids, torch.ones(2, 1), num_experts)
