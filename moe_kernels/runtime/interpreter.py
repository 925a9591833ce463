"""Launches in Triton's interpreter, on CPU tensors: it lets CI without a GPU run the kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from triton import language as tl
from triton.runtime import interpreter

from moe_kernels.runtime.attributes import one_at_a_time, replaced
from moe_kernels.runtime.plan import Constant, Launch, Pointer

# By Triton's type: PyTorch's dtype, and that of the interpreter's array, which may hold only the bits.
_FP8 = {tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8), tl.float8e5: (torch.float8_e5m2, torch.uint8)}
_FLOATS = _FP8 | {
    tl.bfloat16: (torch.bfloat16, torch.uint16),
    tl.float16: (torch.float16, torch.float16),
    tl.float32: (torch.float32, torch.float32),
}


class InterpreterLauncher:
    """Launcher that calls `function[grid](*arguments)`, with tensors as pointers.

    Raises:
        RuntimeError: Triton has no interpreter.
    """

    def __init__(self, function: Any):
        if not isinstance(tl.cdiv, interpreter.InterpretedFunction):
            raise RuntimeError(
                "TRITON_INTERPRET=1 was set after Triton had been imported, and Triton has no interpreter then: set it "
                "before, as in `TRITON_INTERPRET=1 python program.py`"
            )
        self.function = function

    def before(self, device: torch.device, named: Callable[[str, Any], str]) -> list[str]:
        return []

    def statement(self, launch: Launch, body: Any) -> str:
        grid = ", ".join(body.number(n) for n in launch.grid)
        arguments = ", ".join(self._argument(x, body) for x in launch.arguments)
        return f"{body.named('interpret', _interpret)}({body.named('function', self.function)}, ({grid},), {arguments})"

    def _argument(self, x: Any, body: Any) -> str:
        if isinstance(x, Pointer):
            return f"{body.named('shifted', _shifted)}(t{x.variable}, {x.offset})" if x.offset else f"t{x.variable}"
        return str(body.named("constant", x.value) if isinstance(x, Constant) else body.number(x))


def _shifted(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """Return a one-element view that begins `offset` bytes into `tensor`."""
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + offset // tensor.element_size())


def _interpret(function: Any, grid: tuple[int, ...], *arguments: Any) -> None:
    with one_at_a_time, _lean():
        function[grid](*arguments)


@contextmanager
def _lean() -> Iterator[None]:
    """Patch Triton's interpreter for one launch: less overhead, and exact bfloat16 and fp8 in products and casts.

    It would patch its language again at every call of a device function, check for overflows that it reports in debug
    mode only, and create types anew for every value. It would also multiply raw bits of bfloat16, lose the NaN of fp8,
    and truncate instead of rounding. Casts to fp8 saturate as on GPUs. Additions still use raw bits, so kernels compute
    in float32. Masks may be integers, which Triton 3.9 refuses.
    """
    # If Triton lacks one of these two private names, which only save time, its replacement below is never called.
    replace: Any = getattr(interpreter, "_patch_lang", None)
    dtype_of: Any = getattr(interpreter, "_get_np_dtype", None)
    done: set[int] = set()
    builder = interpreter.interpreter_builder
    options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)

    def replace_once(fn: Callable[..., Any]) -> Any:
        if id(fn.__globals__) in done:
            return None  # only the launch itself, which is the first call, uses the scope that restores the originals
        done.add(id(fn.__globals__))
        return replace(fn)

    dot, cast = builder.create_dot, builder.cast_impl
    fp_to_fp = builder.create_fp_to_fp
    load, store = builder.create_masked_load, builder.create_masked_store

    def exact_dot(a: Any, b: Any, *rest: Any) -> Any:
        return dot(*(in_float32(x) if x.dtype.scalar in (tl.bfloat16, *_FP8) else x for x in (a, b)), *rest)

    def in_float32(x: Any) -> Any:
        return cast_fp8_exactly(x, tl.float32, None) if x.dtype.scalar in _FP8 else cast_exactly(x, tl.float32)

    def cast_exactly(src: Any, dst_type: Any) -> Any:
        scalars = src.dtype.scalar, dst_type.scalar
        if scalars == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle((src.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        if scalars == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.array(src.data)).bfloat16().view(torch.uint16).numpy()
            return interpreter.TensorHandle(rounded, tl.bfloat16)
        return cast(src, dst_type)

    def cast_fp8_exactly(src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        scalars = src.dtype.scalar, dst_type.scalar
        if not any(x in _FP8 for x in scalars) or not all(x in _FLOATS for x in scalars):
            return fp_to_fp(src, dst_type, rounding_mode)
        (source, _), (dtype, bits) = (_FLOATS[x] for x in scalars)
        value = torch.from_numpy(np.array(src.data)).view(source).float()
        if scalars[1] in _FP8:
            value = value.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
        return interpreter.TensorHandle(value.to(dtype).view(bits).numpy(), scalars[1])

    def truth(mask: Any) -> Any:
        return interpreter.TensorHandle(mask.data.astype(bool), tl.int1)

    def masked_load(ptrs: Any, mask: Any, *rest: Any) -> Any:
        return load(ptrs, truth(mask), *rest)

    def masked_store(ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return store(ptrs, value, truth(mask), *rest)

    dtypes: dict[str, Any] = {}
    blocks: dict[Any, dict[str, Any]] = {}  # the attributes of a block's type
    values: dict[str, dict[str, Any]] = {}  # the attributes that all values of a type share
    init_block, init_value = tl.block_type.__init__, tl.tensor.__init__

    def dtype_once(of: Any) -> Any:
        if of.name not in dtypes:
            dtypes[of.name] = dtype_of(of)
        return dtypes[of.name]

    def init_block_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        if key not in blocks:
            init_block(self, element_ty, shape)
            blocks[key] = vars(self)
        self.__dict__ = blocks[key]

    def init_value_once(self: Any, handle: Any, type: Any) -> None:
        if type.name not in values:
            init_value(self, handle, type)
            values[type.name] = dict(vars(self))
        self.__dict__ = values[type.name] | {"handle": handle, "type": type}

    with (
        replaced(builder, create_dot=exact_dot, cast_impl=cast_exactly, create_fp_to_fp=cast_fp8_exactly),
        replaced(builder, create_masked_load=masked_load, create_masked_store=masked_store, options=options),
        replaced(interpreter, _patch_lang=replace_once, _get_np_dtype=dtype_once),
        replaced(tl.block_type, __init__=init_block_once),
        replaced(tl.tensor, __init__=init_value_once),
    ):
        yield
