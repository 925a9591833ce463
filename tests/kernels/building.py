"""Run a planner by itself: into tensors of a test, or for views that no operator gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from moe_kernels.runtime import compile as compiler
from moe_kernels.runtime import launch, targets
from moe_kernels.runtime.emit import emit
from moe_kernels.runtime.interpreter import InterpreterLauncher
from moe_kernels.runtime.plan import Builder, Plan
from moe_kernels.runtime.signature import Counts, Operator, symbolic
from moe_kernels.runtime.symbolic import SymbolicTensor

Draw = Callable[..., "SymbolicTensor | tuple[SymbolicTensor, ...] | None"]


def build(
    steps: Draw,  # takes a builder, and a symbolic tensor for each of `tensors`
    tensors: Mapping[str, torch.Tensor | None],
    rows: tuple[str, ...] = (),  # tensors whose first extent is a symbol; that of the first one is the number of rows
    groups: int = 1,
) -> tuple[Plan, dict[str, compiler.Specialization]]:
    """Return the plan for `tensors`, and the kernels with their specializations, from which binaries are compiled."""
    given = tuple(tensors.values())
    counts = Counts(len(_first(tensors[name] for name in rows[:1])) if rows else 0, groups=groups)
    operator = Operator("built", "", tuple(tensors), rows, lambda *_: counts)
    builder = Builder(targets.of_tensor(_first(given)), operator.inputs)
    made = steps(builder, *symbolic(operator, given, None))
    return compiler.to_plan(builder, () if made is None else made if isinstance(made, tuple) else (made,))


def run(
    steps: Draw,
    tensors: Mapping[str, torch.Tensor | None],
    rows: tuple[str, ...] = (),
    groups: int = 1,
) -> Any:
    """Return the results of `steps` for `tensors`."""
    return function(*build(steps, tensors, rows, groups), _first(tensors.values()).device)(*tensors.values())


def function(
    plan: Plan, specialized: Mapping[str, compiler.Specialization], device: torch.device
) -> Callable[..., Any]:
    """Return the function of a plan, which launches kernels as calls do."""
    gpu = targets.of_device(device.type, device.index or 0)
    launchers: dict[str, launch.Launcher]
    if gpu.backend == "interpreter":
        launchers = {name: InterpreterLauncher(one.function) for name, one in specialized.items()}
    else:
        compiling = compiler.Compiling(gpu)
        for one in specialized.values():
            compiling.begin(one)
        binaries = compiling.binaries(fewer_stages=False)
        with launch.libraries(binaries.values()):
            launchers = {name: launch.launcher(launch.compiled_kernel(one)) for name, one in binaries.items()}
    return emit(plan, launchers, device)


def _first(tensors: Any) -> torch.Tensor:
    found: torch.Tensor = next(x for x in tensors if x is not None)
    return found
