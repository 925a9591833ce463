from __future__ import annotations

import itertools
import types
from collections import Counter
from collections.abc import Callable, Iterator
from unittest.mock import Mock

import pytest
import torch

from benchmarks.timing import captured, host_microseconds
from moe_kernels import timing

CPU = torch.device("cpu")


class Clock:
    """A clock that advances only in `sleep`, so that the machine's other work is not timed."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


time = Clock()


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "time", time)


def wait(seconds: float) -> Callable[[], None]:
    return lambda: time.sleep(seconds)


class Event:
    """An event that records the host's time."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.seconds - self.seconds)


@pytest.fixture(params=["cpu", "stand-in for a GPU"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "cpu":
        return CPU
    monkeypatch.setattr(timing, "_FLUSH_BYTES", 16)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device, **rest: empty(*size, **rest))
    module = types.SimpleNamespace(Event=Event, synchronize=lambda device: None)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return torch.device("cuda", 0)


def test_times_belong_to_their_calls(device: torch.device) -> None:
    times = timing.interleaved({"slow": wait(0.004), "fast": wait(0)}, 5, device)
    assert times == pytest.approx({"slow": 4000, "fast": 0})


def test_the_median_counts(device: torch.device) -> None:
    pauses = iter([0.05, 0, 0, 0, 0.05])
    assert timing.interleaved({"a": lambda: time.sleep(next(pauses))}, 5, device) == pytest.approx({"a": 0})


def test_the_calls_take_turns_in_changing_order(device: torch.device) -> None:
    order: list[str] = []
    timing.interleaved({name: lambda name=name: order.append(name) for name in "abc"}, 4, device)
    assert "".join(order) == "acb" + "cab" + "cba" + "bca"


@pytest.mark.parametrize("n", range(1, 9))
def test_each_call_takes_every_place_and_follows_every_other(n: int) -> None:
    rounds = n if n % 2 == 0 else 2 * n
    orders = list(itertools.islice(timing._orders(n), rounds))
    places = Counter((i, place) for order in orders for place, i in enumerate(order))
    neighbours = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert len(places) == n * n and set(places.values()) == {rounds // n}
    assert len(neighbours) == n * (n - 1) and set(neighbours.values()) <= {rounds // n}


@pytest.mark.parametrize("cold", [False, True])
def test_the_cache_is_flushed_before_the_events_and_the_device_awaited_after_them(
    cold: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    class Recorded(Event):
        def record(self) -> None:
            super().record()
            order.append("record")

    flush, gpu = Mock(zero_=lambda: order.append("flush")), torch.device("cuda", 0)
    empty = Mock(return_value=flush)
    module = types.SimpleNamespace(Event=Recorded, synchronize=lambda device: order.append(f"wait for {device}"))
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    timing.interleaved({"a": lambda: order.append("a")}, 1, gpu, cold=cold)
    assert order == ["flush"] * cold + ["record", "a", "record", "wait for cuda:0"]
    assert empty.call_args.args == (timing._FLUSH_BYTES if cold else 0,)
    timing.synchronize(CPU)
    timing.synchronize(gpu)
    assert order[-2:] == ["wait for cuda:0"] * 2


def test_no_calls() -> None:
    assert timing.interleaved({}, 3, CPU) == {}


def test_host_time_goes_round_the_calls() -> None:
    counts = [0, 0, 0]

    def count(i: int) -> None:
        counts[i] += 1
        time.sleep(0.002 if i else 0)

    assert host_microseconds([lambda i=i: count(i) for i in range(3)] * 3, CPU) == pytest.approx(2000)
    assert counts == [3, 3, 3]


def test_the_queue_is_emptied_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr("benchmarks.timing.synchronize", lambda device: events.append("wait"))
    host_microseconds(itertools.repeat(lambda: events.append("call"), 50), CPU)
    longest = max(len(list(run)) for kind, run in itertools.groupby(events) if kind == "call")
    assert events.count("call") == 50 and longest == 5 and events[-1] == "wait"


def test_calls_are_made_when_their_turn_comes() -> None:
    """Creating them is not timed."""
    order: list[str] = []

    def calls() -> Iterator[Callable[[], None]]:
        for _ in range(7):
            order.append("made")
            time.sleep(0.5)
            yield lambda: order.append("called")

    assert host_microseconds(calls(), CPU) == 0
    assert order == ["made"] * 5 + ["called"] * 5 + ["made"] * 2 + ["called"] * 2


def test_a_lost_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert not timing.gpu_is_lost(CPU)
    monkeypatch.setattr(timing, "synchronize", Mock(side_effect=error))
    assert timing.gpu_is_lost(torch.device("cuda", 0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_call() -> None:
    x = torch.ones(1000, device="cuda")
    y, missing = torch.empty(2, 1000, device="cuda")
    runs = torch.zeros(1, device="cuda")

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        runs.add_(1)
        return torch.add(x, 1, out=y), missing

    call()
    replay, (out, stays) = captured(call)
    assert out is y and torch.equal(y, x + 1) and runs.item() == 2  # captured without a run, then replayed
    assert stays is missing and missing.isnan().all()  # no kernel of the graph computes it
    x.fill_(7)
    replay()
    replay()
    assert torch.equal(y, torch.full_like(y, 8)) and runs.item() == 4
    times = timing.interleaved({"replay": replay, "eager": lambda: x.add_(1)}, 5, x.device)
    assert all(0 < us < 1e5 for us in times.values())
