"""Registration of an operator, and the function that calls it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NoReturn

import torch
from torch import Tensor

from moe_kernels import requirements
from moe_kernels.runtime import cache, torch_internals
from moe_kernels.runtime.signature import MAX_ROWS

_library: Any = torch.library
_LIBRARY = _library.Library("moe_kernels", "FRAGMENT")
SPEC = "str activation, bool gated, bool interleaved, float alpha, float limit"  # of GLUSpec
_TYPES = {  # of annotations, in schemas
    "Tensor | None": "Tensor?",
    "Sequence[Tensor]": "Tensor[]",
    "list[Tensor]": "Tensor[]",
    "str | None": "str?",
    "torch.dtype": "ScalarType",
}


def define(
    run: Callable[..., Any],
    fake: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    transformed: Callable[..., Any] | None = None,
    *,
    schema: str = "",
    results: int = 0,
) -> Callable[..., Any]:
    """Register an operator; return the function that calls it, which bypasses torch.library if that is unobservable.

    The schema is that of `schema_of(run, results)` unless given. Meta tensors get `fake`, also in eager mode.
    autograd.Function does not take lists of tensors: under torch.func transforms, an operator on lists calls
    `transformed` instead.
    """
    schema = schema or schema_of(run, results)
    run = without_autocast(run)

    def below_autograd(*args: Any) -> Any:
        with torch_internals.below_autograd():
            return run(*args)

    name = schema.partition("(")[0]
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    _LIBRARY.define(schema, tags=tags)
    _LIBRARY.impl(name, below_autograd, "CompositeExplicitAutograd")
    _library.register_fake(f"moe_kernels::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        _library.register_autograd(f"moe_kernels::{name}", backward, setup_context=setup_context, lib=_LIBRARY)
    operator = getattr(torch.ops.moe_kernels, name).default
    _library.register_vmap(f"moe_kernels::{name}", _looped(operator), lib=_LIBRARY)
    takes_lists = "[]" in schema
    recorded = operator
    in_transform = transformed or operator

    def call(*args: Any) -> Any:
        every = [one for arg in args for one in (arg if isinstance(arg, list) else (arg,))] if takes_lists else args
        tensors = [one for one in every if isinstance(one, Tensor)]
        if not torch_internals.eager(*tensors) or torch_internals.profiled():
            # The older vmap of autograd has no rule for lists.
            replaced = torch_internals.transformed() or (takes_lists and torch_internals.in_vmap_mode())
            return (in_transform if replaced else operator)(*args)
        if tensors[0].is_meta and not cache.collects():
            return operator(*args)
        return (recorded if torch_internals.differentiated(*tensors) else run)(*args)

    if setup_context is not None and backward is not None and not takes_lists:
        recorded = _recorded(name, below_autograd, setup_context, backward)
        in_transform = _transformed(name, operator, call, setup_context, backward)
    call.__name__ = name
    return call


def schema_of(run: Callable[..., Any], results: int = 0) -> str:
    """Return the schema of an operator by the name, without its underscore, and the annotations of `run`.

    `*spec` stands for the fields of GLUSpec, and `results` is the number of tensors in a `tuple[Tensor, ...]`.
    """
    parameters = inspect.signature(run).parameters.values()
    inputs = [SPEC if x.name == "spec" else f"{_TYPES.get(x.annotation, x.annotation)} {x.name}" for x in parameters]
    output = inspect.signature(run).return_annotation
    if results:
        output = f"tuple[{', '.join(['Tensor'] * results)}]"
    if output.startswith("tuple"):
        output = f"({output[6:-1]})"
    return f"{run.__name__.removeprefix('_')}({', '.join(inputs)}) -> {_TYPES.get(output, output)}"


def refusing(message: str) -> tuple[Callable[..., None], Callable[..., NoReturn]]:
    """Return `setup_context` and `backward` of an operator whose derivatives are a RuntimeError with this message."""

    def backward(*_: Any) -> NoReturn:
        raise RuntimeError(message)

    return lambda ctx, inputs, output: None, backward


def without_autocast(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `run` to disable CPU autocast, so that plain PyTorch computes in the dtypes of its arguments."""

    def plain(*args: Any, **options: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return run(*args, **options)
        with torch.autocast("cpu", enabled=False):
            return run(*args, **options)

    return plain


def _recorded(
    name: str, run: Callable[..., Any], setup_context: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """Return an autograd.Function for calls that only autograd observes. The one of torch.library takes the host 0.1 ms
    longer for operators with many arguments.
    """

    def forward(ctx: Any, *args: Any) -> Any:
        output = run(*args)
        setup_context(ctx, args, output)
        return output

    return _function(name, forward=forward, backward=backward)


def _transformed(
    name: str,
    operator: Callable[..., Any],
    call: Callable[..., Any],
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
) -> Callable[..., Any]:
    """Return an autograd.Function for torch.func transforms, most of which do not support torch.library's gradients."""

    def forward(*args: Any) -> Any:
        return operator(*args)

    def through_live_tensors(ctx: Any, *grads: Any) -> Any:
        return backward(_LiveContext(ctx), *grads)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        setup_context(ctx, inputs, output)
        if torch_internals.forward_level() < 0:
            return
        ctx.save_for_forward(*(x if isinstance(x, Tensor) else None for x in inputs))
        ctx.inputs = [None if isinstance(x, Tensor) else x for x in inputs]

    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Apply the adjoint of the backward, which is linear in the gradients of the results."""
        saved = zip(ctx.saved_tensors, ctx.inputs, strict=True)
        inputs = [other if tensor is None else torch_internals.unpack_dual(tensor).primal for tensor, other in saved]
        moving = [i for i, tangent in enumerate(tangents) if tangent is not None]
        moved: list[bool] = []  # whether each result has a tangent

        def of_moving(*values: Tensor) -> Any:
            by_input = dict(zip(moving, values, strict=True))
            out = call(*(by_input.get(i, x) for i, x in enumerate(inputs)))
            if isinstance(out, Tensor):
                return out
            moved[:] = [x.is_floating_point() for x in out]
            return tuple(compress(out, moved))

        with torch_internals.enable_forward_mode(True):  # for enclosing transforms
            out, pullback, *_ = torch.func.vjp(of_moving, *(inputs[i] for i in moving))
            zeros = torch.zeros_like(out) if isinstance(out, Tensor) else tuple(map(torch.zeros_like, out))
            adjoint: Any = torch.func.vjp(pullback, zeros)[1]
            found = adjoint(tuple(tangents[i] for i in moving))[0]
        if isinstance(found, Tensor):
            return found
        each = iter(found)
        return tuple([next(each) if has_tangent else None for has_tangent in moved])

    return _function(
        name, forward=forward, setup_context=save, backward=through_live_tensors, jvp=jvp, vmap=_looped(call)
    )


class _LiveContext:
    """A context whose saved tensors are live views, not wrappers of an ended transform as in the pullback of a vjp."""

    def __init__(self, ctx: Any):
        self._ctx = ctx

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    @property
    def saved_tensors(self) -> tuple[Tensor | None, ...]:
        return tuple([None if x is None else x.view_as(x) for x in self._ctx.saved_tensors])


def _function(name: str, **methods: Callable[..., Any]) -> Callable[..., Any]:
    static = {method: staticmethod(function) for method, function in methods.items()}
    function: Any = type(name, (torch.autograd.Function,), static)
    return function.apply


def _looped(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the vmap rule of an operator: one call per sample."""

    def rule(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        if info.batch_size == 0:
            raise ValueError("vmap: expected at least one sample for moe_kernels' operators, got a dimension of size 0")
        samples = [
            call(*(_sample(arg, dim, i) for arg, dim in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        if isinstance(samples[0], Tensor):
            return torch.stack(samples), 0
        stacked = type(samples[0])(map(torch.stack, zip(*samples, strict=True)))
        return stacked, type(stacked)([0] * len(stacked))

    return rule


def _sample(arg: Any, dim: Any, i: int) -> Any:
    if isinstance(dim, list):
        return [_sample(*each, i) for each in zip(arg, dim, strict=True)]
    return arg if dim is None else arg.select(dim, i)


def if_needed(ctx: Any, i: int, value: Tensor | None) -> Tensor | None:
    """Return `value` if the gradient of input i is needed, else None."""
    return value if ctx.needs_input_grad[i] else None


def save_operands(ctx: Any, first: Tensor, second: Tensor | None, *others: Tensor) -> None:
    """Save what the gradients of two operands need: each is needed for that of the other. Keep their dtypes."""
    ctx.save_for_backward(if_needed(ctx, 1, first), if_needed(ctx, 0, second), *others)
    ctx.dtypes = first.dtype, None if second is None else second.dtype


def free_saved(ctx: Any) -> None:
    """Let saved tensors be freed before the backward ends, unless the graph is retained for another one."""
    if not torch.compiler.is_dynamo_compiling():  # Dynamo, which traces the backward for compiled autograd, refuses it
        ctx.maybe_clear_saved_tensors()


def use_kernels(A: Tensor, *others: Tensor | None) -> bool:
    """Whether to use kernels: on a GPU, for collected calls on meta tensors, in Triton's interpreter unless float64."""
    if A.is_cuda or A.is_xpu or (A.is_meta and cache.collects()):
        return True
    if not A.is_cpu or not requirements.interpreted():
        return False
    return all([x is None or x.dtype != torch.float64 for x in (A, *others)])


def along_rows(operand: Tensor) -> Tensor:  # [..., R, K], contracted along K
    """Return the operand with contiguous rows, which tensor cores need in fp8; copied if they are not."""
    return operand if operand.stride(-1) == 1 else operand.contiguous()


def check_rows(name: str, M: int) -> None:
    """Raise ValueError for more than MAX_ROWS rows, which is the most that kernels can count."""
    if M > MAX_ROWS:
        raise ValueError(f"{name}: expected at most {MAX_ROWS} rows, got {M}; split them over several calls")
