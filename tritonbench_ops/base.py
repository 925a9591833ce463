"""The base class of our operators. Importing this module needs TritonBench."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from tritonbench.utils.triton_op import BenchmarkOperator, Mode

from moe_kernels import rules
from moe_kernels.runtime.cache import isolated
from tritonbench_ops import plots
from tritonbench_ops.registration import Refused

_log = logging.getLogger(__name__)


def checked(provider: Callable[..., Callable[[], Any]]) -> Callable[..., Callable[[], Any]]:
    """Compare a provider's result with float64 before it is timed; a wrong one raises AssertionError."""

    @functools.wraps(provider)
    def build(self: Operator, *inputs: Any) -> Callable[[], Any]:
        with isolated(), rules.record() as chosen:
            call = provider(self, *inputs)
            self.check(call(), *inputs)
        self.chosen[provider.__name__] = chosen[-1][1] if chosen else None
        return call

    return build


class Operator(BenchmarkOperator):  # type: ignore[misc]
    """An operator checked against float64; forward only, unless a subclass has FWD_ONLY = False and `get_bwd_fn`.

    A subclass defines `cases`, `make`, `check`, the providers, and the metrics, which TritonBench registers under the
    name of the module that defines them.
    """

    DEFAULT_PRECISION = "bf16"
    DEFAULT_METRICS = ["latency", "tflops", "speedup", "accuracy"]  # noqa: RUF012
    FWD_ONLY = True
    not_ours: frozenset[str] = frozenset()  # providers whose configs are not those of our rules
    ceilings = frozenset({plots.CEILING})  # providers that compute something else

    def __init__(self, tb_args: Any, extra_args: list[str] | None = None):
        super().__init__(tb_args, extra_args)
        if self.FWD_ONLY and self.mode not in (Mode.FWD, Mode.FWD_NO_GRAD):
            raise Refused(f"--mode: {self.name} has fwd and fwd_no_grad, got {self.mode.value}")
        self.chosen: dict[str, Any] = {}  # by provider, the choice of its first call, or None
        if self.dtype is None:
            raise Refused(f"--precision: expected bf16, fp16, fp32 or tf32, got {tb_args.precision}")

    @property
    def cases(self) -> Sequence[Any]:
        raise NotImplementedError

    def make(self, case: Any) -> tuple[Any, ...]:
        """Return the inputs of the providers for `case`."""
        raise NotImplementedError

    def check(self, out: Any, *inputs: Any) -> None:
        """Raise AssertionError if `out` is not the right result for `inputs`."""
        raise NotImplementedError

    def result(self, name: str, made: Any) -> Any:
        """Return the result of provider `name` for `check`, from the result of its timed call."""
        return made

    def get_input_iter(self) -> Iterator[tuple[Any, ...]]:
        for case in self.cases:
            self.case = case
            yield self.make(case)

    # Defined under both of its names, because TritonBench's version creates all inputs to count them.
    def get_available_num_inputs(self) -> int:
        return len(self.cases)

    count_example_inputs = get_available_num_inputs

    def accuracy(self, fn: Any, baseline_fn: Any) -> bool | None:
        """Whether a second call is right after the first result was set to NaN; None for ceilings and fwd_no_grad."""
        if fn._name in self.ceilings or self.mode == Mode.FWD_NO_GRAD:
            return None
        tree_map_only(torch.Tensor, lambda out: out.detach().fill_(torch.nan), fn())
        try:
            self.check(self.result(fn._name, fn()), *self.example_inputs)
        except AssertionError as error:
            _log.warning("%s is wrong: %s", fn._name, error)
            return False
        return True

    def best_config(self, fn: Any) -> Any:
        if fn._name in self.not_ours | self.ceilings:
            theirs = super().best_config(fn)
            return None if theirs == "unknown" else theirs
        choice = self.chosen.get(fn._name)
        first = choice is not None and self.mode in (Mode.FWD, Mode.FWD_NO_GRAD)
        return described(choice) if first else chosen_config(fn)

    def plot(self) -> None:
        """Draw the results to <op>.png, in --output-dir or else in ~/tritonbench_plots/<op>."""
        text = io.StringIO()
        self.output.write_csv_to_file(text)
        found = plots.read(text.getvalue())
        problem = plots.missing() or (None if plots.plotted(found) else "no tflops, gbps or speedup to plot")
        if problem:
            print(f"--plot: {problem}")
            return
        folder = self.tb_args.output_dir or Path.home() / "tritonbench_plots" / self.name
        file = Path(folder) / f"{self.name}.png"
        plots.draw(found, file)
        print(f"Plot saved to {file}")


def gigabytes_per_second(moved: int, metrics: Any) -> float | None:
    """Return GB/s for `moved` bytes in the measured time, or None without a time."""
    return float(moved / metrics.latency / 1e6) if metrics.latency else None


def chosen_config(call: Callable[[], Any]) -> dict[str, Any] | str:
    """Return the config that `call` uses, or "plain PyTorch"; of several products, that of the last one."""
    with contextlib.ExitStack() as stack:
        chosen = stack.enter_context(rules.record())
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # other threads' choices are not recorded
        stack.enter_context(isolated())  # a cached plan makes no choice
        call()
    return described(chosen[-1][1]) if chosen else "plain PyTorch"


def described(choice: Any) -> dict[str, Any]:
    """Return the fields and the config of a choice, for `best_config`."""
    said = {
        name: getattr(choice, name) for name in ("variant", "block_m", "block_n", "source") if hasattr(choice, name)
    }
    return {**said, **choice.config.config}
