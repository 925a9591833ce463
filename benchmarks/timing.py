"""Timing beside `moe_kernels.timing`: replays of CUDA graphs, sustained load, and the host's time."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from moe_kernels.timing import Call, host_times, interleaved, synchronize

_Key = TypeVar("_Key")
_LOAD = "load"  # the key of the dense products among the calls


def captured(call: Call, times: int = 1) -> tuple[Call, Any]:
    """Return the replay of a CUDA graph with `times` calls of `call`, which must have run once before; and its result.

    The result is that of the last call, filled with NaN before the graph is replayed once: what the graph does not
    compute stays NaN.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            out = call()

    def replay(kept: Call = call) -> None:  # `kept` keeps alive the memory that the graph reads
        graph.replay()

    for x in pytree.tree_leaves(out):
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            x.fill_(float("nan"))
    replay()
    return replay, out


def prepared(call: Call, device: torch.device) -> tuple[Call, Any]:
    """Return the call to time, on a GPU the replay of a CUDA graph, and its result."""
    out = call()
    if device.type == "cpu":
        return call, out
    del out
    return captured(call)


def in_turns(
    calls: Mapping[_Key, Call], rounds: int, device: torch.device, *, cold: bool = True, load: bool = False
) -> dict[_Key, float]:
    """Call `interleaved`; `load` adds dense products of about 50 ms to each round.

    They hold the GPU at its power limit, where clocks are those of sustained load.
    """
    if not load:
        return interleaved(calls, rounds, device, cold=cold)
    size, times = (256, 1) if device.type == "cpu" else (8192, 30)
    a, out = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))

    def products() -> None:
        for _ in range(times):
            torch.mm(a, a, out=out)

    medians = interleaved({**calls, _LOAD: products}, rounds, device, cold=cold)
    del medians[_LOAD]
    return medians


def host_microseconds(calls: Iterable[Call], device: torch.device, at_once: int = 5) -> float:
    """Return median microseconds until a call returns, without waiting for the device.

    Takes `at_once` calls at a time from the iterator `calls`. The device is synchronized before these, so that none
    waits for space in the launch queue.
    """
    times: list[float] = []
    remaining = iter(calls)
    while batch := list(itertools.islice(remaining, at_once)):
        synchronize(device)
        times += host_times(batch)
    synchronize(device)
    return statistics.median(times)
