"""Registration of an operator, and the function that calls it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_kernels.runtime import cache, torch_internals
from moe_kernels.runtime.signature import MAX_ROWS

_library: Any = torch.library
_LIBRARY = _library.Library("moe_kernels", "FRAGMENT")


def define(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Register an operator; return the function that calls it, which bypasses torch.library if unobservable."""
    name = schema.partition("(")[0]
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    _LIBRARY.define(schema, tags=tags)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    _library.register_fake(f"moe_kernels::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        _library.register_autograd(f"moe_kernels::{name}", backward, setup_context=setup_context, lib=_LIBRARY)
    operator = getattr(torch.ops.moe_kernels, name).default
    takes_lists = "[]" in schema
    recorded = operator
    if setup_context is not None and backward is not None and not takes_lists:
        recorded = _recorded(name, run, setup_context, backward)

    def call(*args: Any) -> Any:
        every = [one for arg in args for one in (arg if isinstance(arg, list) else (arg,))] if takes_lists else args
        tensors = [one for one in every if isinstance(one, Tensor)]
        if not torch_internals.eager(*tensors) or torch_internals.profiled():
            return operator(*args)
        return (recorded if torch_internals.differentiated(*tensors) else run)(*args)

    call.__name__ = name
    return call


def _recorded(
    name: str,
    run: Callable[..., Any],
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
) -> Callable[..., Any]:
    """The operator as autograd alone sees it. What torch.library makes of the same takes the host 0.1 ms longer where
    there are many arguments.
    """

    def forward(ctx: Any, *args: Any) -> Any:
        with torch_internals.below_autograd():
            output = run(*args)
        setup_context(ctx, args, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(name, (torch.autograd.Function,), methods)
    apply: Callable[..., Any] = function.apply
    return apply


def needs(ctx: Any, i: int, value: Tensor | None) -> Tensor | None:
    """`value` if the gradient of input i will be asked for."""
    return value if ctx.needs_input_grad[i] else None


def use_kernels(A: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels do the work, for these operands: on a GPU, or in Triton's interpreter unless in float64."""
    if A.is_cuda or A.is_xpu or (A.is_meta and cache.collects()):
        return True
    if not A.is_cpu or os.environ.get("TRITON_INTERPRET") != "1":
        return False
    return all([x is None or x.dtype != torch.float64 for x in (A, *others)])


def check_rows(name: str, M: int) -> None:
    """Raise ValueError for more rows than the kernels count."""
    if M > MAX_ROWS:
        raise ValueError(f"{name}: expected at most {MAX_ROWS} rows, got {M}")
