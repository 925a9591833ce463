"""Timing: calls take turns, each with a cold L2 cache, and the median is reported.

Clocks differ between runs, so compare only calls that took turns.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

Call = Callable[[], Any]
_Key = TypeVar("_Key")

_FLUSH_BYTES = 256 << 20  # several times the L2 cache of any GPU


def interleaved(
    calls: Mapping[_Key, Call], rounds: int, device: torch.device, *, cold: bool = True
) -> dict[_Key, float]:
    """Return median microseconds of each call over `rounds` rounds, in which all calls take turns in changing order.

    On a GPU, this is the time between two events around the call; if `cold`, the L2 cache is overwritten before it.
    On a CPU, it is the host's time. Kernels must be compiled beforehand.
    """
    keys = list(calls)
    if not keys:
        return {}
    times: dict[_Key, list[float]] = {key: [] for key in keys}
    measure = _host_round if device.type == "cpu" else _device_round(device, cold)
    for numbers in itertools.islice(_orders(len(keys)), rounds):
        order = [keys[i] for i in numbers]
        for key, us in zip(order, measure([calls[key] for key in order]), strict=True):
            times[key].append(us)
    return {key: statistics.median(values) for key, values in times.items()}


def _orders(n: int) -> Iterator[list[int]]:
    """Yield orders of n calls in which each takes every place, and follows every other, equally often: in n rounds if n
    is even, in 2 n otherwise.

    This is a Williams design (E. J. Williams, Australian Journal of Scientific Research A 2, 1949). In a mere rotation,
    a call would nearly always follow the same other one, and begin at the clocks that this one leaves.
    """
    zigzag = [(-1) ** j * ((j + 1) // 2) for j in range(n)]  # 0, -1, 1, -2, 2: its steps differ
    for i in itertools.count():
        order = [(i + j) % n for j in zigzag]
        yield order[::-1] if n % 2 and i % 2 else order


def host_microseconds(calls: Iterable[Call], device: torch.device, at_once: int = 5) -> float:
    """Return median microseconds until a call returns, without waiting for the device.

    Takes `at_once` calls at a time from the iterator `calls`. The device is synchronized before these, so that none
    waits for space in the launch queue.
    """
    times: list[float] = []
    remaining = iter(calls)
    while batch := list(itertools.islice(remaining, at_once)):
        _synchronize(device)
        times += _host_round(batch)
    _synchronize(device)
    return statistics.median(times)


def captured(call: Call, times: int = 1) -> Call:
    """Return the replay of a CUDA graph with `times` calls of `call`, which must have run once before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()

    def replay(kept: Call = call) -> None:  # `kept` keeps alive the memory that the graph reads
        graph.replay()

    return replay


def gpu_is_lost(device: torch.device) -> bool:
    """Whether the GPU has become unusable for this process after an error."""
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
