"""Launch a compiled Triton kernel with only what changes between calls left to do on the host.

Helion's generated function and Triton's launcher together take 30 to 50 us of a launch to work out what a plan has
settled: which binary the arguments call for, sizes, strides, descriptors. A `DirectLaunch` notes once where tensors
and integers end up among the binary's arguments, and later fills in just those. It leans on the launcher of Triton
3.6; where that looks different, calls go the ordinary way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from helion.runtime import default_launcher
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

_STAND_INS = ((1_000_003, 1_000_033, 1_000_037), (1_000_039, 1_000_081, 1_000_099))  # odd, like what they stand for


class DirectLaunch:
    """One binary on one device, for calls that differ from the first in tensors and plain integers alone.

    Of the tensors, the dtype, strides, alignment to 16 bytes and all but the first extent stay; the integers keep their
    class (Triton's: 1, multiple of 16, other).
    """

    def __init__(self, run: Callable[..., Any], args: Sequence[Any]):
        """Call `run`, Helion's generated function, with `args` and remember how it launches."""
        made = []

        def launcher(*launch_args: Any, **options: Any) -> None:
            made.append(default_launcher(*launch_args, **options))

        run(*args, _launcher=launcher)
        self.binary = made[0]
        self.integers = [i for i, arg in enumerate(args) if type(arg) is int]
        first, second = (self._recorded(run, args, values) for values in _STAND_INS)
        self.grid = self._grid(first[0], second[0])
        self.template: list[Any] = []
        self.pointers: list[tuple[int, int]] = []  # (position in the template, index in args)
        self.counts: list[tuple[int, int]] = []
        self.descriptors: list[_Descriptor] = []
        metadata = iter(getattr(self.binary.metadata, "tensordesc_meta", None) or ())
        for a, b in zip(first[1], second[1], strict=True):
            self._add(a, b, args, metadata)
        launcher_ = self.binary.run
        self.raw = launcher_.launch
        if self.descriptors:
            self.raw = inspect.getclosurevars(self.raw).nonlocals["launcher"]
        if launcher_.global_scratch_size or launcher_.profile_scratch_size:
            raise NotImplementedError("scratch memory")
        self.device = driver.active.get_current_device()
        self.current_stream = driver.active.get_current_stream
        self.fixed = (self.binary.function, launcher_.launch_cooperative_grid, launcher_.launch_pdl, None, None)

    def _recorded(
        self, run: Callable[..., Any], args: Sequence[Any], values: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[Any, ...]]:
        """The grid and arguments of the launch that `run` would make with `values` for the integers."""
        changed = list(args)
        for i, value in zip(self.integers, values, strict=False):
            changed[i] = value
        made: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []
        run(*changed, _launcher=lambda fn, grid, *launch_args, **_: made.append((grid, launch_args)))
        return made[0]

    def _grid(self, first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int | None, int]:
        """(index of an argument or None, factor): the grid is their product."""
        if len(first) != 1:
            raise NotImplementedError("a grid of several dimensions")
        if first == second:
            return None, first[0]
        for i, a, b in zip(self.integers, *_STAND_INS, strict=False):
            if first[0] % a == 0 and first[0] // a * b == second[0]:
                return i, first[0] // a
        raise NotImplementedError("a grid that is no multiple of an argument")

    def _add(self, a: Any, b: Any, args: Sequence[Any], metadata: Any) -> None:
        position = len(self.template)
        if isinstance(a, torch.Tensor):
            self.pointers.append((position, _index_of(a, args)))
            self.template.append(None)
        elif isinstance(a, TensorDescriptor):
            descriptor = _Descriptor(
                position, next(i for i, arg in enumerate(args) if arg is a.base), a, next(metadata)
            )
            self.descriptors.append(descriptor)
            self.template += [None, *descriptor.shape, *descriptor.strides]
        elif a == b:
            self.template.append(a)
        else:
            pairs = list(zip(self.integers, *_STAND_INS, strict=False))
            self.counts.append((position, next(i for i, x, y in pairs if (a, b) == (x, y))))
            self.template.append(None)

    def __call__(self, args: Sequence[Any]) -> None:
        flat = self.template.copy()
        for position, i in self.pointers:
            flat[position] = args[i].data_ptr()
        for position, i in self.counts:
            flat[position] = args[i]
        for descriptor in self.descriptors:
            descriptor.fill(flat, args)
        i, factor = self.grid
        grid = factor if i is None else args[i] * factor
        stream = self.current_stream(self.device)
        self.raw(grid, 1, 1, stream, *self.fixed, self.binary.packed_metadata, None, None, None, *flat)


def _index_of(tensor: torch.Tensor, args: Sequence[Any]) -> int:
    """Which of the arguments lies where `tensor` does: itself, or a tensor that it is a view of."""
    pointer = tensor.data_ptr()
    return next(i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor) and arg.data_ptr() == pointer)


class _Descriptor:
    """A TMA descriptor among a binary's arguments, encoded again only if it is of other memory than the last time."""

    def __init__(self, position: int, index: int, like: TensorDescriptor, meta: dict[str, Any]):
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST  # not in every build of Triton

        self.position, self.index = position, index
        self.shape, self.strides = list(like.shape), list(like.strides)
        if self.strides != list(like.base.stride()) or like.padding != "zero" or meta["fp4_padded"]:
            raise NotImplementedError("a descriptor that is not the tensor's own")
        kind = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
        self.encoding = (meta["swizzle"], meta["elem_size"], kind, meta["block_size"])
        self.last: tuple[int, int, Any] = (0, 0, None)

    def fill(self, flat: list[Any], args: Sequence[Any]) -> None:
        tensor = args[self.index]
        pointer, extent = tensor.data_ptr(), tensor.size(0)
        known_pointer, known_extent, encoded = self.last
        if pointer != known_pointer or extent != known_extent:
            shape = [extent, *self.shape[1:]]
            encode = driver.active.utils.fill_tma_descriptor
            encoded = encode(pointer, *self.encoding, shape, self.strides, 0)
            self.last = (pointer, extent, encoded)
        flat[self.position] = encoded
        flat[self.position + 1] = extent


class Launcher:
    """Calls Helion's generated function `run`; from the second time on directly, where that is possible.

    All calls have to come from the same device.
    """

    def __init__(self, run: Callable[..., Any], prepare: Callable[..., Sequence[Any]]):
        """`prepare(*args)` gives the arguments of `run`: views of the same memory, where a view is needed."""
        self.run, self.prepare = run, prepare
        self.direct: DirectLaunch | None = None
        self.called = False

    def __call__(self, *args: Any) -> None:
        if self.direct is not None and not knobs.runtime.launch_enter_hook.calls:  # a profiler listens there
            self.direct(args)
            return
        prepared = self.prepare(*args)
        if self.called:
            self.run(*prepared)
            return
        self.called = True
        try:
            self.direct = DirectLaunch(self.run, prepared)
        except (AttributeError, ImportError, KeyError, NotImplementedError, StopIteration, TypeError):
            self.run(*prepared)
