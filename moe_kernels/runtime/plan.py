"""A plan: what a kind of call does on the device, as data.

    Plan(inputs, steps, results)    steps: Alloc(variable, shape, dtype), Call(function, ...), Launch(binary, grid, ...)

Variables are numbered, inputs first. Extents of inputs and addresses are symbols, which a call fills in. A planner in
`kernels/` builds a plan with a `Builder`, `compile` turns its requests into binaries, and `emit` generates a function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch

from moe_kernels.runtime.symbolic import SymbolicInt, SymbolicTensor, contiguous_strides, int_from_json
from moe_kernels.runtime.targets import Gpu

_NO_E4M3 = (
    "kernels for float8_e4m3fn need a GPU of compute capability 8.9 or newer, and {} has {}.{}: multiply in bfloat16, "
    "with moe_kernels.dequantize(x, torch.bfloat16) of what is in fp8, and without compute"
)
Operands = tuple[Any, ...]  # what a planner gets: a SymbolicTensor, or None, for each input of its operator
# The PyTorch functions that a `Call` may name, as `emit` implements them.
FUNCTIONS = ("zero", "mm", "bmm", "cast", "contiguous")
TYPES = {  # Triton's names of the dtypes that plans can hold
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int64: "i64",
    torch.int32: "i32",
}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TYPES}


@dataclass(frozen=True)
class Alloc:
    """A new contiguous tensor."""

    variable: int
    shape: tuple[Any, ...]  # int or SymbolicInt; all but the first are int
    dtype: torch.dtype


@dataclass(frozen=True)
class Call:
    """A call of a PyTorch function, one of FUNCTIONS, whose result is a variable."""

    function: str
    variable: int  # written to, or set to the result
    arguments: tuple[int, ...]  # variables
    dtype: torch.dtype | None = None  # of the result, if the function takes one
    groups: int = 0  # number of groups in 2-D operands, stacked along the rows


@dataclass(frozen=True)
class Pointer:
    """The address of a variable, plus `offset` bytes."""

    variable: int
    offset: int


@dataclass(frozen=True)
class Descriptor:
    """A TMA descriptor."""

    variable: int
    offset: int
    shape: tuple[Any, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Constant:
    """A value compiled into a kernel; Triton's launcher still expects an argument in its place."""

    value: Any


@dataclass(frozen=True)
class Launch:
    """A kernel launch. `binary` is the key of the compiled kernel: see `store` and `compile`."""

    binary: str
    grid: tuple[Any, ...]
    arguments: tuple[Any, ...]  # Pointer, Descriptor, Constant, int or SymbolicInt


@dataclass(frozen=True)
class Plan:
    """Steps for inputs of these names. `results` are the variables that are returned."""

    inputs: tuple[str, ...]
    steps: tuple[Alloc | Call | Launch, ...]
    results: tuple[int, ...]

    @property
    def binaries(self) -> list[str]:
        """The keys of the launched binaries, each once."""
        return list(dict.fromkeys(step.binary for step in self.steps if isinstance(step, Launch)))

    @property
    def no_longer_used(self) -> list[list[int]]:
        """For each step, the variables that it is the last to use. Inputs and results are not among them."""
        last: dict[int, int] = {}
        for i, step in enumerate(self.steps):
            for variable in _variables(step):
                last[variable] = i
        kept = {*range(len(self.inputs)), *self.results}
        return [[v for v, end in last.items() if end == i and v not in kept] for i in range(len(self.steps))]

    def to_json(self) -> dict[str, Any]:
        return {one.name: _to_json(getattr(self, one.name)) for one in fields(self)}


def _variables(step: Alloc | Call | Launch) -> tuple[int, ...]:
    if isinstance(step, Launch):
        return tuple(x.variable for x in step.arguments if isinstance(x, (Pointer, Descriptor)))
    return (step.variable, *(step.arguments if isinstance(step, Call) else ()))


@dataclass(frozen=True, eq=False)
class Request:
    """A kernel to compile under a config, and to launch with `arguments`."""

    kernel: Any  # helion.Kernel
    arguments: tuple[Any, ...]  # SymbolicTensor, None, int, SymbolicInt, or constants
    config: Any  # rules.Config
    int64_index: bool
    precision: str


@dataclass
class Builder:
    """Draws a plan for a GPU model: a planner allocates and launches on it, with symbolic tensors."""

    gpu: Gpu
    inputs: tuple[str, ...]
    steps: list[Alloc | Call | Request] = field(default_factory=list)
    variables: int = 0

    def __post_init__(self) -> None:
        self.variables = len(self.inputs)

    def alloc(self, shape: Sequence[Any], dtype: torch.dtype) -> SymbolicTensor:
        """Allocate a contiguous tensor."""
        made = self._variable(shape, dtype)
        self.steps.append(Alloc(made.variable, tuple(shape), dtype))
        return made

    def zero(self, tensor: SymbolicTensor) -> None:
        """Fill all of a tensor that was allocated here with zeros."""
        self.steps.append(Call("zero", tensor.variable, ()))

    def call(
        self,
        function: str,
        arguments: Sequence[SymbolicTensor],
        result: SymbolicTensor | tuple[Sequence[Any], torch.dtype],
        dtype: torch.dtype | None = None,
        groups: int = 0,
    ) -> SymbolicTensor:
        """Call one of FUNCTIONS. It writes to the tensor `result`, or returns a new one of that shape and dtype."""
        assert function in FUNCTIONS
        made = result if isinstance(result, SymbolicTensor) else self._variable(*result)
        self.steps.append(Call(function, made.variable, tuple(x.variable for x in arguments), dtype, groups))
        return made

    def launch(
        self, kernel: Any, arguments: Sequence[Any], config: Any, *, int64_index: bool = False, precision: str = "ieee"
    ) -> None:
        """Launch `kernel`, a `helion.Kernel`, compiled under `config`.

        `int64_index` computes offsets in 64 bits, which is required if a tensor accessed by pointers needs them.
        `precision` is Helion's `dot_precision`, of products of float32: see `rules.precision_of`.

        Raises:
            RuntimeError: the GPU has no float8_e4m3fn, which the kernel reads or writes.
        """
        if not self.gpu.has_e4m3 and torch.float8_e4m3fn in {getattr(x, "dtype", None) for x in arguments}:
            raise RuntimeError(_NO_E4M3.format(self.gpu.name, *self.gpu.capability))
        # Helion refuses subclasses of float, such as numpy.float64.
        plain = tuple(float(x) if isinstance(x, float) else x for x in arguments)
        self.steps.append(Request(kernel, plain, config, int64_index, precision))

    def _variable(self, shape: Sequence[Any], dtype: torch.dtype) -> SymbolicTensor:
        self.variables += 1
        return SymbolicTensor(self.variables - 1, dtype, tuple(shape), contiguous_strides(shape), aligned=True)


def _to_json(x: Any) -> Any:
    """Return part of a plan as JSON; a step or argument begins with its kind: `{"pointer": variable, "offset": 0}`."""
    if isinstance(x, tuple):
        return [_to_json(each) for each in x]
    if isinstance(x, torch.dtype):
        return str(x).removeprefix("torch.")
    if isinstance(x, (Alloc, Call, Launch, Pointer, Descriptor, Constant)):
        first, *others = fields(x)
        kind = {type(x).__name__.lower(): _to_json(getattr(x, first.name))}
        return kind | {one.name: _to_json(getattr(x, one.name)) for one in others}
    return x.to_json() if isinstance(x, SymbolicInt) else x


def plan_from_json(value: Any) -> Plan:
    """Inverse of `Plan.to_json`.

    Raises:
        ValueError: the content is not a valid plan.
    """
    try:
        inputs = tuple(value["inputs"])
        if not all(type(name) is str for name in inputs):
            raise ValueError("an input without a name")
        known = set(range(len(inputs)))
        number = partial(int_from_json, inputs=len(inputs))
        steps = tuple(_step(step, known, number) for step in value["steps"])
        results = tuple(value["results"])
        if not all(type(x) is int and x in known for x in results):
            raise ValueError("a result that nothing made")
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"no plan ({type(error).__name__}: {error})") from error
    return Plan(inputs, steps, results)


def _step(value: dict[str, Any], known: set[int], number: Callable[[Any], Any]) -> Alloc | Call | Launch:
    if "alloc" in value:
        known.add(_new(value["alloc"]))
        shape = (*map(number, value["shape"][:1]), *map(_int, value["shape"][1:]))
        return Alloc(value["alloc"], shape, _DTYPES[value["dtype"]])
    if "call" in value:
        if value["call"] not in FUNCTIONS or not all(type(x) is int and x in known for x in value["arguments"]):
            raise ValueError(f"no such call: {value}")
        if value["call"] in ("zero", "mm") and value["variable"] not in known:
            raise ValueError(f"nothing to write to: {value}")
        known.add(_new(value["variable"]))
        dtype = None if value["dtype"] is None else _DTYPES[value["dtype"]]
        return Call(value["call"], value["variable"], tuple(value["arguments"]), dtype, _int(value["groups"]))
    binary = value["launch"]
    if type(binary) is not str or not binary.isalnum():
        raise ValueError(f"no key of a binary: {binary!r}")
    arguments = tuple(_argument(x, known, number) for x in value["arguments"])
    return Launch(binary, tuple(map(number, value["grid"])), arguments)


def _argument(value: Any, known: set[int], number: Callable[[Any], Any]) -> Any:
    if not isinstance(value, dict):
        return number(value)
    if "constant" in value:
        if not isinstance(value["constant"], (int, float, str, type(None))):
            raise ValueError(f"no constant: {value}")
        return Constant(value["constant"])
    variable = value["pointer"] if "pointer" in value else value["descriptor"]
    if type(variable) is not int or variable not in known:
        raise ValueError(f"an address of nothing: {value}")
    if "pointer" in value:
        return Pointer(variable, _int(value["offset"]))
    return Descriptor(
        variable,
        _int(value["offset"]),
        tuple(map(number, value["shape"])),
        tuple(map(_int, value["strides"])),
        tuple(map(_int, value["block_shape"])),
        _DTYPES[value["dtype"]],
    )


def _new(variable: Any) -> int:
    if type(variable) is not int or variable < 0:
        raise ValueError(f"no variable: {variable!r}")
    return variable


def _int(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"expected an integer, got {value!r}")
    return value
