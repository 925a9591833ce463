"""How this package times: calls take turns, each finds a cold L2 cache, and the median counts.

One run's clocks are not the next one's, so only what took turns may be compared.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

Call = Callable[[], Any]
_Key = TypeVar("_Key")

_FLUSH_BYTES = 256 << 20  # several times the L2 cache of any GPU


def interleaved(
    calls: Mapping[_Key, Call], rounds: int, device: torch.device, *, cold: bool = True
) -> dict[_Key, float]:
    """Median microseconds of each call over `rounds` rounds, in which all take turns, the order rotating.

    On a GPU that is the time between two events around the call, after the L2 cache has been overwritten, if `cold`;
    what a call needs once, such as compiling, is to be done before. On a CPU it is the host's time.
    """
    keys = list(calls)
    if not keys:
        return {}
    times: dict[_Key, list[float]] = {key: [] for key in keys}
    measure = _host_round if device.type == "cpu" else _device_round(device, cold)
    for i in range(rounds):
        order = keys[i % len(keys) :] + keys[: i % len(keys)]
        for key, us in zip(order, measure([calls[key] for key in order]), strict=True):
            times[key].append(us)
    return {key: statistics.median(values) for key, values in times.items()}


def host_microseconds(calls: Iterable[Call], device: torch.device) -> float:
    """Median microseconds until a call returns, the device not waited for.

    Five calls at a time are taken from `calls`, which may make them only then; before them the device is synchronized,
    so that none waits for room in the queue.
    """
    times = []
    remaining = iter(calls)
    while batch := list(itertools.islice(remaining, 5)):
        _synchronize(device)
        for call in batch:
            start = time.perf_counter()
            call()
            times.append(1e6 * (time.perf_counter() - start))
    _synchronize(device)
    return statistics.median(times)


def captured(call: Call, times: int = 1) -> Call:
    """The replay of a CUDA graph of so many calls of `call`, which has been called before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    replay: Call = graph.replay
    return replay


def gpu_is_lost(device: torch.device) -> bool:
    """Whether an error has left the process without a usable GPU."""
    try:
        _synchronize(device)
    except RuntimeError:
        return True
    return False


def _host_round(calls: Sequence[Call]) -> list[float]:
    times = []
    for call in calls:
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    return times


def _device_round(device: torch.device, cold: bool) -> Callable[[Sequence[Call]], list[float]]:
    module: Any = torch.get_device_module(device)
    flush = torch.empty(_FLUSH_BYTES if cold else 0, dtype=torch.int8, device=device)

    def measure(calls: Sequence[Call]) -> list[float]:
        events = []
        for call in calls:
            start, end = (module.Event(enable_timing=True) for _ in range(2))
            if cold:
                flush.zero_()
            start.record()
            call()
            end.record()
            events.append((start, end))
        module.synchronize(device)
        return [1e3 * start.elapsed_time(end) for start, end in events]

    return measure


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
