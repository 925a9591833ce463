"""From a Helion kernel and a config to a compiled callable that the launchers hold."""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import helion
import numpy as np
import torch
import torch.distributed._symmetric_memory as symmetric_memory
from helion.runtime.settings import default_autotuner_fn
from triton import language as tl
from triton.runtime import interpreter

from moe_kernels.kernels import direct_launch
from moe_kernels.traced import StandIn

INT32_MAX = 2**31 - 1
_INTERPRETED_WORKERS = 4
_NOTHING: Mapping[int, int] = {}


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class _Preset:
    """Stands where Helion expects a search: answers with the rule's config, and searches only when forced to."""

    def __init__(self, rule: Callable[..., helion.Config], bound: Any, args: Sequence[Any], options: dict[str, Any]):
        self.rule, self.bound, self.args, self.options = rule, bound, args, options

    def autotune(self, *, skip_cache: bool = False) -> helion.Config:
        if skip_cache:
            return default_autotuner_fn(self.bound, self.args, **self.options).autotune(skip_cache=True)
        return self.rule(*(getattr(arg, "value", arg) for arg in self.args))  # a constexpr has a value


def kernel(
    rule: Callable[..., helion.Config], *, static_shapes: bool = False
) -> Callable[[Callable[..., Any]], helion.Kernel[Any]]:
    """`@helion.kernel` for shapes that change at every call, with `rule(*args)` in place of an automatic search.

    With `static_shapes` a kernel may be compiled for other first extents than it is called with, if it uses none.
    """
    return helion.kernel(
        static_shapes=static_shapes,
        autotuner_fn=lambda bound, args, **options: _Preset(rule, bound, args, options),
        # HELION_AUTOTUNE_EFFORT=none would mean blocks of 16 x 16 x 16 instead of the rule.
        autotune_effort="quick" if os.environ.get("HELION_AUTOTUNE_EFFORT") == "quick" else "full",
    )


@functools.cache
def _variant(kernel: helion.Kernel[Any], wide: bool, tf32: bool) -> helion.Kernel[Any]:
    index_dtype = torch.int64 if wide else torch.int32
    precision = "tf32" if tf32 else "ieee"
    static = kernel.settings.static_shapes
    return helion.kernel(kernel.fn, static_shapes=static, index_dtype=index_dtype, dot_precision=precision)


def compile_kernel(
    kernel: helion.Kernel[Any],
    args: Sequence[Any],
    config: helion.Config,
    *,
    wide: bool = False,
    tf32: bool = False,
    prepare: Callable[..., Sequence[Any]] = lambda *args: args,
    clipped: Mapping[int, int] = _NOTHING,
    fixed: Container[int] = (),
) -> Callable[..., Any]:
    """Compile `kernel` under `config` for every call whose arguments are like `args`.

    That is: their dtypes and strides, all but their first extents, whether their data is aligned to 16 bytes, and their
    integers' class (1, a multiple of 16, other). The caller answers for it, and for what the config assumes. `wide`
    computes addresses in 64 bits; without it `args` may be narrowed views, as long as the real tensors beyond 2^31
    elements are reached through TMA only. `prepare` turns the arguments of a call into those of the kernel: views of
    the same memory, where a view is needed. All calls have to come from the same device.

    `clipped` has the indices of tensors outside of which the kernel reads or writes, relying on TMA not to go there,
    and how many rows before the tensor its descriptor begins. `fixed` has the indices of tensors whose first extent
    stays as well: a call may be given ones of other shapes that `prepare` views as what the kernel takes.
    """
    args = _apart(args)
    if interpreted():
        interpret = _compile_interpreted(kernel, args, config, wide)
        return lambda *args: interpret(*prepare(*args))
    return _Launcher(_compiled(_variant(kernel, wide, tf32), args, config), prepare, clipped, fixed)


_one_at_a_time = threading.Lock()  # what patches functions of PyTorch or Triton meanwhile


def _compiled(kernel: helion.Kernel[Any], args: Sequence[Any], config: helion.Config) -> Callable[..., Any]:
    """Helion's generated function.

    Once there is a process group, Helion asks PyTorch which tensors are in symmetric memory. Where PyTorch cannot tell,
    as in 2.11, it would take all for such, and compile every grid as a loop of one program per SM.
    """
    none_is = mock.patch.object(symmetric_memory, "is_symm_mem_tensor", lambda _: False, create=True)
    with _one_at_a_time, nullcontext() if hasattr(symmetric_memory, "is_symm_mem_tensor") else none_is:
        return kernel.bind(tuple(args)).compile_config(config)


def plan_and_launch(make: Callable[..., Callable[..., None]], *tensors: Any) -> Callable[..., None]:
    """The plan that `make` gives for `tensors`, called on them once; made with `clips=False`, not to rely on TMA to
    leave out what is outside of a tensor, where that cannot be launched directly.
    """
    try:
        plan = make(*tensors)
        plan(*tensors)
    except direct_launch.Unavailable:
        plan = make(*tensors, clips=False)
        plan(*tensors)
    return plan


def _apart(args: Sequence[Any]) -> list[Any]:
    """`args`, with a view for a tensor that has been given before: Helion and a direct launch take one object for one
    argument, and in the next call it may be two.
    """
    return [
        arg.detach() if isinstance(arg, torch.Tensor) and any(arg is other for other in args[:i]) else arg
        for i, arg in enumerate(args)
    ]


class _Launcher:
    """Calls Helion's generated function, directly where that is possible; for stand-ins, notes the launch."""

    def __init__(
        self,
        run: Callable[..., Any],
        prepare: Callable[..., Sequence[Any]],
        clipped: Mapping[int, int],
        fixed: Container[int],
    ):
        self.run, self.prepare, self.clipped, self.fixed = run, prepare, clipped, fixed
        self.direct: direct_launch.Launch | None = None
        self.launch: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> None:
        if isinstance(args[0], StandIn):
            if self.direct is None:
                raise TypeError("Helion's own function takes tensors alone")
            args[0].notes.note(self.direct.statement(args), self.direct.names)
            return
        if self.launch is None:
            self.launch = self._launch(args)
        self.launch(*args)

    def _launch(self, args: Sequence[Any]) -> Callable[..., Any]:
        prepared = _apart(self.prepare(*args))
        try:
            self.direct = direct_launch.direct(self.run, prepared, self.clipped, self.fixed)
        except direct_launch.Unavailable:
            if self.clipped:
                raise
            return lambda *args: self.run(*self.prepare(*args))
        return self.direct.compiled(prepared)


def _compile_interpreted(
    kernel: helion.Kernel[Any], args: Sequence[Any], config: helion.Config, wide: bool
) -> Callable[..., Any]:
    kept = {
        k: v for k, v in config.config.items() if k not in ("indexing", "host_tensor_descriptors", "range_flattens")
    }
    run = _compiled(_variant(kernel, wide, False), args, helion.Config(**kept))

    def launch(*args: Any) -> Any:
        with _one_at_a_time, _lean_interpreter():
            return run(*args)

    return launch


@contextmanager
def _lean_interpreter() -> Iterator[None]:
    """Triton's interpreter for one launch, without what takes most of its time: it would replace the functions of its
    language again at every call of a device function, and look for overflows that it reports in debug mode only. And
    with exact bfloat16 in products and casts from and to float32: it would multiply raw bits, and truncate where it
    should round. It still adds raw bits, so kernels compute in float32.
    """
    replace, done = interpreter._patch_lang, set()
    builder = interpreter.interpreter_builder
    options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)

    def replace_once(fn: Callable[..., Any]) -> Any:
        if id(fn.__globals__) in done:
            return None  # only the launch itself asks for what puts the originals back, and it comes first
        done.add(id(fn.__globals__))
        return replace(fn)

    dot, cast = builder.create_dot, builder.cast_impl

    def exact_dot(a: Any, b: Any, *rest: Any) -> Any:
        return dot(*(cast_exactly(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)), *rest)

    def cast_exactly(src: Any, dst_type: Any) -> Any:
        scalars = src.dtype.scalar, dst_type.scalar
        if scalars == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle((src.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        if scalars == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.array(src.data)).bfloat16().view(torch.uint16).numpy()
            return interpreter.TensorHandle(rounded, tl.bfloat16)
        return cast(src, dst_type)

    with (
        mock.patch.object(builder, "create_dot", exact_dot),
        mock.patch.object(builder, "cast_impl", cast_exactly),
        mock.patch.object(interpreter, "_patch_lang", replace_once),
        mock.patch.object(builder, "options", options),
        # Helion asks the device for the number of persistent workers, which a CPU cannot answer.
        mock.patch.object(helion.runtime, "get_num_sm", lambda device, **_: _INTERPRETED_WORKERS),
    ):
        yield


def worker_count(device: torch.device) -> int:
    """How many programs there are of a kernel that has one per SM."""
    if device.type == "cpu":
        return _INTERPRETED_WORKERS
    module = torch.cuda if device.type == "cuda" else torch.xpu
    properties = module.get_device_properties(device)
    return int(properties.multi_processor_count if device.type == "cuda" else properties.gpu_subslice_count)


def tf32_allowed(dtype: torch.dtype) -> bool:
    """Whether PyTorch's settings let products of `dtype` be computed in tf32."""
    return dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"


def tma_readable(tensor: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator (Hopper and later) can read `tensor`, 2-D or 3-D.

    It needs a base of 16-byte alignment, a last stride of 1 and others that are multiples of 16 bytes.
    """
    if tensor.device.type != "cuda" or torch.cuda.get_device_capability(tensor.device) < (9, 0):
        return False
    unit = 16 // tensor.element_size()
    *others, last = tensor.stride()
    return last == 1 and tensor.data_ptr() % 16 == 0 and all(s > 0 and s % unit == 0 for s in others)


def span(tensor: torch.Tensor) -> int:
    """The distance in elements from the first to the last one of `tensor`, in memory."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def far_apart(*vectors: torch.Tensor | None) -> bool:
    """Whether the elements of one of `vectors`, of which there are few, are so far apart that their addresses do not
    fit into 32 bits.
    """
    return any(x is not None and span(x) > INT32_MAX for x in vectors)


def without_ones(tensor: torch.Tensor, keep_first: bool = False) -> torch.Tensor:
    """A tensor to compile for in place of `tensor`: Helion would drop the masks and strides of extents of 1."""
    sizes = [size if keep_first and dim == 0 else max(size, 2) for dim, size in enumerate(tensor.shape)]
    if sizes == list(tensor.shape):
        return tensor
    return torch.empty_strided(sizes, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
