"""Generate one Python function from a plan, which fills in a call's extents and addresses and runs all steps.

The function's source is generated from integers and the names below only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_kernels.runtime import torch_internals
from moe_kernels.runtime.launch import Launcher
from moe_kernels.runtime.plan import Alloc, Call, Plan
from moe_kernels.runtime.signature import Operator
from moe_kernels.runtime.symbolic import contiguous_strides, text


def _bmm(A: Tensor, B: Tensor, dtype: torch.dtype | None, groups: int) -> Tensor:
    if torch.is_autocast_enabled(A.device.type):  # operands have been cast before, if they had to be
        with torch.autocast(A.device.type, enabled=False):
            return _bmm(A, B, dtype, groups)
    a, b = (x if x.dim() == 3 else x.view(groups, -1, x.size(1)) for x in (A, B))
    out = torch.bmm(a, b) if dtype is None else torch.bmm(a, b, out_dtype=dtype)
    return out if A.dim() == 3 else torch_internals.reshaped(out, (out.size(0) * out.size(1), out.size(2)))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "zero": lambda target: target.zero_(),
    "mm": lambda a, b, out: torch.mm(a, b if b.dim() == 2 else b[0], out=out),
    "bmm": _bmm,
    "cast": lambda x, dtype: x.to(dtype, memory_format=torch.contiguous_format),
    "contiguous": lambda x: x.reshape(-1).contiguous(),
}


class _Body:
    """The generated statements of a plan, and the values of the names in them."""

    def __init__(self, plan: Plan, launchers: Mapping[str, Launcher], device: torch.device):
        self.plan, self.launchers = plan, launchers
        self.names: dict[str, Any] = {"empty_strided": torch_internals.allocator(device)}
        self.of_inputs: dict[str, str] = {}  # extents and addresses of inputs, by name
        self.statements: list[str] = []
        for launcher in launchers.values():
            for statement in launcher.before(device, self.named):
                if statement not in self.statements:
                    self.statements.append(statement)
        for step, ended in zip(plan.steps, plan.no_longer_used, strict=True):
            self.statements += self._step(step)
            self.statements += [f"del t{variable}" for variable in ended]  # later steps may reuse the memory
        self.statements.append(f"return {', '.join(f't{i}' for i in plan.results) or 'None'}")

    def named(self, kind: str, value: Any) -> str:
        """Return a name for `value`, and record it."""
        for name, known in self.names.items():
            if known is value and name.startswith(kind):
                return name
        name = f"{kind}_{len(self.names)}"
        self.names[name] = value
        return name

    def number(self, n: Any) -> str:
        return text(n, lambda tensor, dim: self._input(f"n{tensor}_{dim}", f"t{tensor}.shape[{dim}]"))

    def _input(self, name: str, value: str) -> str:
        self.of_inputs[name] = value
        return name

    def address(self, variable: int, offset: int = 0) -> str:
        name = f"p{variable}"
        if variable < len(self.plan.inputs):
            self._input(name, f"t{variable}.data_ptr()")
        return f"{name} + {offset}" if offset > 0 else f"{name} - {-offset}" if offset else name

    def _step(self, step: Any) -> list[str]:
        if isinstance(step, Alloc):
            shape, strides = ", ".join(map(self.number, step.shape)), contiguous_strides(step.shape)
            dtype = self.named("dtype", step.dtype)
            made = f"t{step.variable} = empty_strided(({shape},), {tuple(map(int, strides))}, {dtype})"
            return [made, f"p{step.variable} = t{step.variable}.data_ptr()"]
        if isinstance(step, Call):
            return self._call(step)
        return [self.launchers[step.binary].statement(step, self)]

    def _call(self, step: Call) -> list[str]:
        function, target = self.named("call", _FUNCTIONS[step.function]), f"t{step.variable}"
        arguments = ", ".join(f"t{i}" for i in step.arguments)
        if step.function == "zero":
            return [f"{function}({target})"]
        if step.function == "mm":
            return [f"{function}({arguments}, {target})"]
        if step.function == "cast":
            arguments += f", {self.named('dtype', step.dtype)}"
        if step.function == "bmm":
            arguments += f", {self.named('dtype', step.dtype) if step.dtype is not None else None}, {step.groups}"
        return [f"{target} = {function}({arguments})", f"p{step.variable} = {target}.data_ptr()"]


def emit(plan: Plan, launchers: Mapping[str, Launcher], device: torch.device) -> Callable[..., Any]:
    """Return the function `run(*inputs)` of `plan`, for tensors on `device`, which must be the current one."""
    body = _Body(plan, launchers, device)
    loads = [f"{name} = {value}" for name, value in body.of_inputs.items()]
    return define(f"run({_parameters(plan)})", [*loads, *body.statements], body.names)


def emit_repeat(
    plan: Plan,
    launchers: Mapping[str, Launcher],
    device: torch.device,
    inputs: Sequence[Tensor | None],
    operator: Operator,
    requested: Any,
    bounds: tuple[int, int],
) -> Callable[..., Any] | None:
    """Return `repeat(requested, *inputs)`, which runs the plan for matching calls and returns None for others.

    A call matches if `requested` is equal, the current device and the dispatcher's state (autocast, inference mode,
    modes, transforms) are those of now, and the tensors are like these and aligned to 16 bytes. The rows of the
    operator's first input with rows are within `bounds`, and those of the others in the same ratio to them as here. The
    result is None if such a function cannot be generated.
    """
    present = [i for i, x in enumerate(inputs) if x is not None]
    tensors = [x for x in inputs if x is not None]
    if any([x.data_ptr() % 16 for x in tensors]):
        return None
    dynamic = [i for i in present if operator.has_rows[i]]
    sizes: list[list[int | None]] = [list(x.shape) for x in tensors]
    for i in dynamic:
        sizes[present.index(i)][0] = None
    try:
        # None for strides: they must equal those of these tensors.
        guards = torch_internals.tensor_guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=None)
        alike = guards.check
    except (AttributeError, RuntimeError, TypeError, ValueError):  # a private class of PyTorch
        return None
    body = _Body(plan, launchers, device)
    names = {
        "alike": alike,
        "expected": requested,
        "grad_enabled": torch.is_grad_enabled(),
        "forward_level": torch_internals.forward_level(),
        "is_grad_enabled": torch.is_grad_enabled,
        "forward_ad": torch_internals.forward_ad,
        "current_device": torch_internals.current_device,
        "guards": guards,
    }
    low, high = bounds
    absent = "".join(f" or t{i} is not None" for i, x in enumerate(inputs) if x is None)
    extents = {name: value for name, value in body.of_inputs.items() if name.startswith("n")}
    addresses = {f"p{i}": f"t{i}.data_ptr()" for i in present}
    checks: list[str] = []
    for i in dynamic:
        extents[f"n{i}_0"] = f"t{i}.shape[0]"
        relation = _relation(f"n{i}_0", inputs[i], f"n{dynamic[0]}_0", inputs[dynamic[0]])
        if relation is None:
            return None
        checks.append(f"not {low} <= n{i}_0 <= {high}" if i == dynamic[0] else relation)
    modes = "is_grad_enabled() is not grad_enabled or forward_ad._current_level != forward_level"
    statements = [
        "try:",
        f"    if requested != expected or {modes}{absent}: return None",
        *(f"    {name} = {value}" for name, value in extents.items()),
        # First, because a comparison of a symbolic extent, as in torch.export, would restrict it.
        f"    if {' or '.join(['not alike(' + ', '.join(f't{i}' for i in present) + ')', *checks])}: return None",
        "except (AttributeError, IndexError, RuntimeError, TypeError, ValueError): return None",
        *([f"if current_device() != {device.index}: return None"] if device.type == "cuda" else []),
        *(f"{name} = {value}" for name, value in addresses.items()),
        f"if ({' | '.join(addresses)}) % 16: return None",
        *body.statements,
    ]
    return define(f"repeat(requested, {_parameters(plan)})", statements, body.names | names)


def _relation(name: str, tensor: Tensor | None, rows_name: str, rows: Tensor | None) -> str | None:
    """Return code that tests if the ratio of two row counts is not as here; None if neither divides the other."""
    assert tensor is not None and rows is not None
    here, n = tensor.size(0), rows.size(0)
    if here and n and here % n == 0:
        return f"{name} != {rows_name} * {here // n}"
    return f"{name} * {n // here} != {rows_name}" if here and n and n % here == 0 else None


def _parameters(plan: Plan) -> str:
    return ", ".join(f"t{i}" for i in range(len(plan.inputs)))


def define(signature: str, statements: Sequence[str], names: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function `def signature: statements`, with `names` as its globals."""
    known = dict(names)
    exec("\n    ".join([f"def {signature}:", *statements]), known)
    return known.pop(signature.partition("(")[0])  # avoids a reference cycle
