"""Launch a compiled Triton kernel with only what changes between calls left to do on the host.

Helion's generated function and Triton's launcher together take 30 to 50 us of a launch to work out what a plan has
settled: which binary the arguments call for, sizes, strides, descriptors. `direct` finds out once where tensors and
integers end up among the binary's arguments, and gives the text of a launch that fills in just those. It leans on the
launchers of Triton 3.6 and 3.7; where they look different, calls go the ordinary way.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from helion.runtime import default_launcher
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_kernels.traced import Notes, Number, StandIn, define

# For a kernel's first integers, the others being settled; odd, like what they stand for.
_STAND_INS = ((1_000_003, 1_000_033, 1_000_037), (1_000_039, 1_000_081, 1_000_099))
_MOST_ENCODED = 1024  # descriptors of 128 bytes


class Unavailable(Exception):
    """This kernel cannot be launched directly with this version of Triton."""


@dataclass(frozen=True)
class Launch:
    """A launch in which all is settled but the tensors and plain integers of a call."""

    text: str  # an expression, and a format of stand-ins for the call's arguments
    names: Mapping[str, Any]  # the other names in it

    def statement(self, args: Sequence[Any]) -> str:
        """The launch for `args`: a `StandIn` for each tensor, an int or a `Number` for each integer."""
        return self.text.format(*args)

    def compiled(self, args: Sequence[Any]) -> Callable[..., None]:
        """What launches, for arguments like `args`."""
        stand_ins = [
            StandIn(f"a{i}", Number(f"a{i}_rows"), Notes()) if isinstance(arg, torch.Tensor) else Number(f"a{i}")
            for i, arg in enumerate(args)
        ]
        statement = self.statement(stand_ins)
        tensors = [x for x in stand_ins if isinstance(x, StandIn)]
        asked = [x.asks_pointer for x in tensors if x.pointer in statement]
        asked += [f"{x.rows} = {x.name}.shape[0]" for x in tensors if x.rows.text in statement]
        return define(f"launch({', '.join(f'a{i}' for i in range(len(args)))})", [*asked, statement], self.names)


def direct(
    run: Callable[..., Any], args: Sequence[Any], clipped: Mapping[int, int], fixed: Container[int] = ()
) -> Launch:
    """The launch that `run`, Helion's generated function, would make; nothing is launched here.

    It is for calls that differ from `args` in tensors and plain integers alone, from the current device. Of the
    tensors, the dtype, strides, alignment to 16 bytes and all but the first extent stay; the integers keep their class
    (Triton's: 1, multiple of 16, other). It may be given another tensor than `run`, of the same memory, where `run`
    has a view. `clipped` has the indices of the tensors that have to be read or written by TMA alone, and how many
    rows before the tensor its descriptor begins. `fixed` has the indices of those whose first extent stays, too:
    nothing of a tensor that is given for one matters but where it begins.

    Raises:
        Unavailable: a launch does not look as expected.
    """
    try:
        return _direct(run, args, clipped, fixed)
    except (AttributeError, ImportError, KeyError, StopIteration, TypeError) as error:
        raise Unavailable(f"{type(error).__name__}: {error}") from error


_numbers = itertools.count()


def _direct(run: Callable[..., Any], args: Sequence[Any], clipped: Mapping[int, int], fixed: Container[int]) -> Launch:
    made: list[Any] = []

    def compile_only(kernel: Any, *launch_args: Any, **options: Any) -> None:
        made.append(default_launcher(_CompileOnly(kernel), *launch_args, **options))

    run(*args, _launcher=compile_only)
    binary = made[0]
    launcher = binary.run
    integers = [i for i, arg in enumerate(args) if type(arg) is int]
    first, second = (_recorded(run, args, integers, values) for values in _STAND_INS)
    descriptions = iter(getattr(binary.metadata, "tensordesc_meta", None) or ())
    number = next(_numbers)  # in all names, so that launches can be parts of one function
    names: dict[str, Any] = {"stream": driver.active.get_current_stream, "hooks": knobs.runtime}

    def named(kind: str, value: Any) -> str:
        name = f"{kind}{number}_{len(names)}"
        names[name] = value
        return name

    pointers: list[int] = []
    encoded = False
    flat: list[str] = []
    for a, b in zip(first[1], second[1], strict=True):
        if isinstance(a, torch.Tensor):
            index = _index_of(a, args)
            pointers.append(index)
            flat.append(f"{{{index}.pointer}}")
        elif isinstance(a, TensorDescriptor):
            index = _index_of(a.base, args)
            encoded = True
            descriptor = _Descriptor(a, next(descriptions))
            pointer, extent = f"{{{index}.pointer}}", f"{{{index}.rows}}"
            if index in fixed:
                extent = str(a.shape[descriptor.changing])
            if before := clipped.get(index, 0):
                pointer += f" - {before * a.base.stride(0) * a.base.element_size()}"
                extent += f" + {before}"
            extents = [str(size) for size in a.shape]
            extents[descriptor.changing] = extent
            flat += [f"{named('descriptor', descriptor)}[{pointer}, {extent}]", *extents, *map(str, a.strides)]
        elif a == b:
            flat.append(named("constant", a))
        else:
            index = next(i for i, x, y in zip(integers, *_STAND_INS, strict=False) if (a, b) == (x, y))
            flat.append(f"{{{index}}}")
    if clipped.keys() & set(pointers):
        raise Unavailable("a tensor is not reached by TMA")
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        raise Unavailable("scratch memory")
    raw = inspect.getclosurevars(launcher.launch).nonlocals["launcher"] if encoded else launcher.launch
    grid = f"{_grid(first[0], second[0], integers)}, 1, 1"
    stream = f"stream({driver.active.get_current_device()})"
    settled = named("function", binary.function), repr(launcher.launch_cooperative_grid), repr(launcher.launch_pdl)
    to = f"{grid}, {stream}, {', '.join(settled)}"
    packed = named("packed", binary.packed_metadata)
    no_scratch = "None, None"
    arguments = "".join(f"{argument}, " for argument in flat)
    if hasattr(launcher, "arg_annotations"):  # Triton 3.7 has one launcher for all kernels
        kinds = named("kinds", launcher.arg_annotations), named("signature", launcher.kernel_signature)
        to, arguments = f"{to}, {packed}", f"{no_scratch}, {', '.join(kinds)}, ({arguments})"
    else:
        to = f"{to}, {no_scratch}, {packed}"
    metadata = f"{named('binary', binary)}.launch_metadata(({grid}), {stream})"
    return Launch(_observable(named("raw", raw), to, metadata, arguments), names)


def _observable(raw: str, to: str, metadata: str, arguments: str) -> str:
    """A launch that a profiler is told of, if one listens to Triton's hooks."""
    told = f"{raw}({to}, {metadata}, hooks.launch_enter_hook, hooks.launch_exit_hook, {arguments})"
    return f"{told} if hooks.launch_enter_hook.calls else {raw}({to}, None, None, None, {arguments})"


class _CompileOnly:
    """Stands for a Triton kernel where it would be launched."""

    def __init__(self, kernel: Any):
        self.kernel = kernel

    def run(self, *args: Any, warmup: bool, **options: Any) -> Any:
        return self.kernel.run(*args, warmup=True, **options)


def _recorded(
    run: Callable[..., Any], args: Sequence[Any], integers: Sequence[int], values: Sequence[int]
) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """The grid and arguments of the launch that `run` would make with `values` for the integers."""
    changed = list(args)
    for i, value in zip(integers, values, strict=False):
        changed[i] = value
    made: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []
    run(*changed, _launcher=lambda fn, grid, *launch_args, **_: made.append((grid, launch_args)))
    return made[0]


def _grid(first: tuple[int, ...], second: tuple[int, ...], integers: Sequence[int]) -> str:
    """The format of the grid's only extent: a constant, or a multiple of an argument."""
    if len(first) != 1:
        raise Unavailable("a grid of several dimensions")
    if first == second:
        return str(first[0])
    for i, a, b in zip(integers, *_STAND_INS, strict=False):
        if first[0] % a == 0 and first[0] // a * b == second[0]:
            return f"{{{i}}} * {first[0] // a}"
    raise Unavailable("a grid that is no multiple of an argument")


def _index_of(tensor: torch.Tensor, args: Sequence[Any]) -> int:
    """Which of the arguments `tensor` is; several may be of the same memory in this call, and of others in the next."""
    return next(i for i, arg in enumerate(args) if arg is tensor)


class _Descriptor(dict[tuple[int, int], Any]):
    """By address and extent: a TMA descriptor among a binary's arguments, encoded when it is first asked for.

    The extent that changes is the outermost of those that a block has one of, or else the first.
    """

    def __init__(self, like: TensorDescriptor, meta: dict[str, Any]):
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST  # not in every build of Triton

        super().__init__()
        if like.padding != "zero" or meta["fp4_padded"] or getattr(like, "round_f32_to_tf32", False):
            raise Unavailable("an unusual descriptor")
        utils = driver.active.utils
        self.encode = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor
        kind = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
        self.encoding = (meta["swizzle"], meta["elem_size"], kind, meta["block_size"])
        self.shape, self.strides = list(like.shape), list(like.strides)
        self.changing = like.block_shape.index(1) if 1 in like.block_shape else 0

    def __missing__(self, key: tuple[int, int]) -> Any:
        if len(self) >= _MOST_ENCODED:
            self.clear()
        pointer, extent = key
        shape = [*self.shape[: self.changing], extent, *self.shape[self.changing + 1 :]]
        encoded = self[key] = self.encode(pointer, *self.encoding, shape, self.strides, 0)
        return encoded
