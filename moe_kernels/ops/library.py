"""How an operator is registered, and the function that calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_kernels import dispatch

_library: Any = torch.library
_LIBRARY = _library.Library("moe_kernels", "FRAGMENT")


def define(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Register an operator; return the function that calls it, past torch.library where nobody would notice."""
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
        if not dispatch.eager(*tensors) or dispatch.profiled():
            return operator(*args)
        return (recorded if dispatch.differentiated(*tensors) else run)(*args)

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
        with torch._C._AutoDispatchBelowAutograd():
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
