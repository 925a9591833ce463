"""Timing: calls take turns, each with a cold L2 cache, and the median is reported.

Clocks differ between runs, so compare only calls that took turns.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    measure = host_times if device.type == "cpu" else _device_round(device, cold)
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


def gpu_is_lost(device: torch.device) -> bool:
    """Whether the GPU has become unusable for this process after an error."""
    try:
        synchronize(device)
    except RuntimeError:
        return True
    return False


def host_times(calls: Sequence[Call]) -> list[float]:
    """Return the host's microseconds of each call, without waiting for the device."""
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


def synchronize(device: torch.device) -> None:
    """Wait for a device."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
