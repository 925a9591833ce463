"""What `tune` does for uniform and varied products: time a grid of configs in turns, and keep the fastest."""

from __future__ import annotations

import datetime
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_kernels import tune
from moe_kernels.timing import gpu_is_lost, interleaved

if TYPE_CHECKING:
    from moe_kernels.configs import store, uniform, varied

_Make = Callable[[Any], Callable[[], Any]]  # from a choice to a call, which returns the result
_FINALISTS = 5


def bucket(task: tune.Task) -> store.Bucket:
    """What the entry for `task` is found by."""
    from moe_kernels.configs import store
    from moe_kernels.kernels.launch import tf32_allowed

    dtype = tune.DTYPES[task.dtype]
    name = store.dtype_label(dtype, tf32_allowed(dtype))
    return store.Bucket(name, task.transposed, task.M, task.N, task.K, task.G, task.op)


def tune_one(task: tune.Task, device: torch.device, share: float) -> store.Entry:
    """The best entry for `task` that is found in about `share` seconds."""
    from moe_kernels.configs import store, varied
    from moe_kernels.configs import uniform as rules

    until = time.monotonic() + share
    entry: dict[str, Any]
    if task.op == "uniform":
        problem, make = _uniform(task, device)
        start = [rules.rule(problem), rules.choose(problem), *uniform_grid(problem)]
        found, us, rule_us = _fastest(start, make, uniform_variations, device, until)
        blocks: Any = found.config.config.get("block_sizes", [0])
        config = tune.concise(found.config.config)
        entry = {"kernel": found.kernel, "block_m": blocks[0], "tma": found.access.tma, "config": config}
    else:
        listed, make = _varied(task, device)
        choices = [varied.rule(listed), varied.choose(listed), *varied_grid(listed)]
        best, us, rule_us = _fastest(choices, make, lambda choice: iter(()), device, until)
        entry = {"kernel": "varied", "block_m": best.block_m, "tma": [], "config": varied.stored(best)}
    return store.Entry(
        bucket=bucket(task),
        us=round(us, 2),
        rule_us=round(rule_us, 2),
        M=task.G * task.M,
        versions=store.installed_versions(),
        date=datetime.date.today().isoformat(),
        command=tune.command(task),
        **entry,
    )


def uniform_grid(problem: uniform.Problem) -> Iterator[uniform.Choice]:
    """torch.bmm and configs of the kernels that fit into an H200's shared memory."""
    from moe_kernels.configs import SHARED_MEMORY, fitting
    from moe_kernels.configs import uniform as rules

    if problem.bmm:
        yield rules.BMM
    yield rules.by_kernel(problem)
    size = problem.dtype.itemsize
    for block_m, block_n, block_k in itertools.product((64, 128), (256, 128, 64, 32), (128, 64, 256)):
        block_m, block_n, block_k = (
            fitting(block, extent)
            for block, extent in zip((block_m, block_n, block_k), (problem.M, problem.N, problem.K), strict=True)
        )
        for stages in (3, 4, 5, 6):
            shared = (stages * (block_m + block_n) * block_k) * size + block_m * block_n * problem.out_dtype.itemsize
            if shared <= SHARED_MEMORY:
                warps = 8 if block_m * block_n >= 128 * 128 else 4
                yield rules.make(problem, (block_m, block_n, block_k), num_warps=warps, num_stages=stages)


def uniform_variations(choice: uniform.Choice) -> Iterator[uniform.Choice]:
    """`choice` with the tiles in other orders."""
    import helion

    if choice.kernel != "bmm":
        for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
            yield replace(choice, config=helion.Config(**{**choice.config.config, "loop_orders": [order]}))


def varied_grid(problem: varied.Problem) -> Iterator[varied.Choice]:
    """Tiles from 32 x 32 to 256 x 128, by one or two workers per SM."""
    from moe_kernels.configs import SHARED_MEMORY
    from moe_kernels.configs import varied as rules

    size = problem.dtype.itemsize
    for block_m, block_n, block_k in itertools.product((128, 64, 32, 256), (256, 128, 64, 32), (64, 32, 128)):
        block_k = block_k * 2 // size
        warps = 8 if block_m * block_n >= 128 * 128 else 4
        for stages, per_sm in ((3, 1), (4, 1), (6, 1), (3, 2), (5, 2)):
            if block_m * block_n <= 1 << 15 and per_sm * stages * (block_m + block_n) * block_k * size <= SHARED_MEMORY:
                yield rules.make(len(problem.shapes), block_m, block_n, block_k, warps, stages, per_sm)


def _uniform(task: tune.Task, device: torch.device) -> tuple[uniform.Problem, _Make]:
    from moe_kernels import configs
    from moe_kernels.kernels import uniform_gemm

    A, (B,) = _operands(task, device, [(task.G,)])
    A = A.view(task.G, task.M, task.K)

    def make(choice: Any) -> Callable[[], Any]:
        plan = uniform_gemm.plan(A, B, task.G, A.dtype, choice)
        return lambda: plan(A, B)

    with configs.noted() as made:
        make(None)
    return made[0][0], make


def _varied(task: tune.Task, device: torch.device) -> tuple[varied.Problem, _Make]:
    from moe_kernels import configs
    from moe_kernels.kernels.varied_gemm import Launch

    A, group_B = _operands(task, device, [()] * task.G)
    group_A = list(A.view(task.G, task.M, task.K))
    outs = A.new_empty(task.G, task.M, task.N)

    def make(choice: Any) -> Callable[[], Any]:
        launch = Launch(group_A, group_B, list(outs), choice)

        def call() -> Tensor:
            launch()
            return outs

        return call

    with configs.noted() as made:
        make(None)
    return made[0][0], make


def _operands(task: tune.Task, device: torch.device, leading: list[tuple[int, ...]]) -> tuple[Tensor, list[Tensor]]:
    """`A [G * M, K]`, and for each of `leading` a B with these extents before K and N; results are O(1)."""
    dtype = tune.DTYPES[task.dtype]
    A = torch.randn(task.G * task.M, task.K, device=device).to(dtype)
    shape = (task.N, task.K) if task.transposed else (task.K, task.N)
    Bs = [(torch.randn(*more, *shape, device=device) * task.K**-0.5).to(dtype) for more in leading]
    return A, [B.transpose(-2, -1) if task.transposed else B for B in Bs]


def _fastest(
    choices: list[Any], make: _Make, vary: Callable[[Any], Iterator[Any]], device: torch.device, until: float
) -> tuple[Any, float, float]:
    """The fastest, its microseconds, and those of the first of `choices`, which keeps its place unless beaten clearly.

    The first three are looked at whatever the time.
    """
    calls: dict[int, Callable[[], Any]] = {}
    expected: list[Tensor] = []

    def add(choice: Any, index: int) -> None:
        try:
            call = make(choice)
            out = call()
            tune.check_close(out, (expected or [out])[0])
            if not expected:
                expected.append(out.clone())
            call()
            calls[index] = call
        except Exception as error:
            reason = str(error).split("\n")[0][:200]
            print(f"  does not work: {choice} ({type(error).__name__}: {reason})")
            if gpu_is_lost(device):
                raise

    listed = list(dict.fromkeys(choices))
    for i, choice in enumerate(listed):
        if i >= 3 and time.monotonic() > until:
            print(f"  the time is spent: {len(listed) - i} of {len(listed)} configs are not looked at")
            break
        add(choice, i)
    times = interleaved(calls, 7, device)
    if not times:
        raise RuntimeError("no config works, not even the rule's")
    best = sorted(times, key=lambda i: times[i])[:_FINALISTS]
    for choice in vary(listed[best[0]]):
        if choice not in listed and time.monotonic() < until:
            listed.append(choice)
            add(choice, len(listed) - 1)
            best.append(len(listed) - 1)
    finalists = {i: calls[i] for i in dict.fromkeys([0, *best]) if i in calls}
    times = interleaved(finalists, tune.ROUNDS, device)
    winner = min(times, key=lambda i: times[i])
    rule_us = times.get(0, times[winner])
    if 0 in times and times[winner] * tune.GAIN > rule_us:
        winner = 0
    return listed[winner], times[winner], rule_us
