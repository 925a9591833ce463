"""All private names of PyTorch in this package, each with a public replacement in case it is missing.

They save host time, or provide what PyTorch has no public function for. Those that are imported when they are used, at
the end, have no replacement: the error names the version. C++ names are used only with tested versions of PyTorch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad as _forward_ad

from moe_kernels import requirements

_C: Any = torch._C if requirements.is_tested(torch.__version__, *requirements.TESTED["torch"]) else SimpleNamespace()
forward_ad: Any = _forward_ad if hasattr(_forward_ad, "_current_level") else SimpleNamespace(_current_level=-1)
_guards: Any = getattr(getattr(_C, "_dynamo", None), "guards", None)


def _missing(answer: Any) -> Callable[..., Any]:
    return lambda *_: answer


# The allocator of the code that torch.compile generates.
empty_strided_cuda: Any = getattr(_guards, "_empty_strided_cuda", None)
# The guards by which torch.compile checks whether a call's arguments match those that it has compiled for.
tensor_guards: Any = getattr(_guards, "TensorGuards", None)

current_device: Callable[[], int] = getattr(_C, "_cuda_getDevice", torch.cuda.current_device)
# Whether a profiler that shows operators by their names is on.
profiled: Callable[[], bool] = getattr(getattr(_C, "_autograd", None), "_profiler_enabled", _missing(False))
autocast_enabled: Callable[[], bool] = getattr(_C, "_is_any_autocast_enabled", _missing(True))
_dispatch_modes: Callable[[], int] = getattr(_C, "_len_torch_dispatch_stack", _missing(1))
_functorch: Any = getattr(_C, "_functorch", None)
_unknown_transform = SimpleNamespace(key=_missing(None))
_functorch_level: Callable[[], Any] = getattr(_functorch, "peek_interpreter_stack", _missing(_unknown_transform))
_is_wrapped: Callable[[Any], bool] = getattr(_functorch, "is_functorch_wrapped_tensor", _missing(False))
_is_batched: Callable[[Any], bool] = getattr(_functorch, "is_batchedtensor", _missing(False))
_unwrapped: Callable[[Any], Any] = getattr(_functorch, "get_unwrapped", _missing(None))
_FUNCTIONALIZE = getattr(getattr(_functorch, "TransformType", None), "Functionalize", "Functionalize")
jit_tracing: Callable[[], Any] = getattr(_C, "_get_tracing_state", _missing(None))
_key_included: Callable[[Any], bool] = getattr(_C, "_dispatch_tls_is_dispatch_key_included", _missing(False))
_no_keys = SimpleNamespace(raw_repr=_missing(0))
_included: Callable[[], Any] = getattr(_C, "_dispatch_tls_local_include_set", _missing(_no_keys))
_excluded: Callable[[], Any] = getattr(_C, "_dispatch_tls_local_exclude_set", _missing(_no_keys))
CAST_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # that autocast converts
_key_excluded: Callable[[Any], bool] = getattr(_C, "_dispatch_tls_is_dispatch_key_excluded", _missing(False))
_parsed_key: Callable[[str], Any] = getattr(_C, "_dispatch_key_parse", _missing(None))
# The mode in which torch.autograd.grad(is_grads_batched=True) runs a backward pass. It is no transform of torch.func.
_VMAP_MODE = _parsed_key("VmapMode")
_VIEWS = _parsed_key("ADInplaceOrView")
unpack_dual: Callable[..., Any] = _forward_ad.unpack_dual
# Whether the running backward pass executes a node of autograd's graph.
_executed: Callable[[Any], bool] = getattr(_C, "_will_engine_execute_node", _missing(True))
# Autograd does not see views that are taken there either, so results may be changed in place.
below_autograd: Callable[[], Any] = getattr(_C, "_AutoDispatchBelowADInplaceOrView", torch.no_grad)
_unsafe_view: Any = getattr(torch.ops.aten, "_unsafe_view", None)


def _no_forward_mode(_: bool) -> Any:
    raise NotImplementedError(
        f"moe_kernels has no forward-mode derivatives with this PyTorch: use reverse mode (torch {torch.__version__})"
    )


enable_forward_mode: Callable[[bool], Any] = getattr(_forward_ad, "_set_fwd_grad_enabled", _no_forward_mode)
PLAIN = frozenset((Tensor, torch.nn.Parameter))  # types of tensors that do not wrap another one


def reshaped(result: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a result that nothing else refers to in another shape, not as a view.

    FSDP2 gathers a module's weights for the backward pass in a hook on the module's result. An in-place operation on a
    view would remove that hook from the graph.
    """
    if _unsafe_view is None or jit_tracing() is not None:  # which takes extents given to `torch.ops` for constants
        return result.reshape(shape).clone()
    return _unsafe_view(result, shape)


def break_graph(reason: str) -> None:
    """Make torch.compile end its graph here. With fullgraph=True its error gives the reason.

    Raises:
        RuntimeError: in torch.export, which cannot have more than one graph.
    """
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break(msg=reason)
    elif torch.compiler.is_compiling():
        raise RuntimeError(reason)


def outside_graphs(reason: str, run: Callable[..., Any], *args: Any) -> Any:
    """Return `run(*args)`, called outside of compiled graphs. Errors are those of `break_graph`."""
    break_graph(reason)
    if torch.compiler.is_dynamo_compiling():  # after the end of a graph, Dynamo goes on with the next one
        run = torch.compiler.disable(run)  # type: ignore[no-untyped-call]
    return run(*args)


def on_current_device(tensor: Tensor) -> bool:
    """Whether `tensor` is on the CUDA device that launches go to."""
    return tensor.is_cuda and tensor.get_device() == current_device()


def entered(tensor: Tensor) -> AbstractContextManager[Any]:
    """Return the context in which launches go to the device of `tensor`."""
    if tensor.is_cpu or on_current_device(tensor):
        return nullcontext()
    return torch.get_device_module(tensor.device).device(tensor.device)


def allocator(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """Return the function that allocates a tensor of a shape, strides and dtype on `device`, the current one."""
    if device.type == "cuda" and empty_strided_cuda is not None:
        return empty_strided_cuda
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def can_bypass_dispatcher(*tensors: Tensor | None) -> bool:
    """Whether bypassing torch.library and autograd is unobservable.

    Raises:
        NotImplementedError: as for `eager`.
    """
    return eager(*tensors) and not differentiated(*tensors) and not profiled()


def differentiated(*tensors: Tensor | None) -> bool:
    """Whether autograd records a function of these tensors."""
    return torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in tensors])


def asked_gradients(ctx: Any) -> Sequence[Any]:
    """Return for which inputs of an autograd.Function the running backward pass asks gradients, in the form of
    `ctx.needs_input_grad`.

    `torch.autograd.grad` and `backward(inputs=...)` may ask for fewer than require grad, as pipelines do that compute
    the gradients of weights later than those of activations. PyTorch raises an error for a leaf whose gradient is
    returned, not accumulated. That takes 10 us or more, so leaves after it count as asked for.
    """
    needed: Sequence[Any] = ctx.needs_input_grad
    if torch.compiler.is_dynamo_compiling():
        return needed
    answers: list[bool] = []  # for inputs that require grad
    returns = False
    for node, _ in ctx.next_functions:
        if node is None:
            continue
        try:
            answers.append((returns and hasattr(node, "variable")) or _executed(node))
        except RuntimeError:
            returns = True
            answers.append(True)
    # Another backward pass, or none, runs if the function's own node was called by hand.
    return _in_form(needed, iter(answers)) if any(answers) else needed


def _in_form(needed: Any, answers: Iterator[bool]) -> Any:
    if isinstance(needed, (list, tuple)):  # also of a list of tensors
        return [_in_form(one, answers) for one in needed]
    return needed and next(answers)


def eager(*tensors: Tensor | None) -> bool:
    """Whether nothing traces or transforms a call. Autograd may still record it, and a profiler show it.

    False for tensor subclasses, and for tensors that PyTorch materialises before an operator gets them: negated views,
    such as the imaginary part of a conjugate, and gradients that it knows to be zero.

    Raises:
        NotImplementedError: torch.compile traces in forward mode, whose tangents torch.library's operators would drop
            silently.
    """
    if torch.compiler.is_dynamo_compiling():
        if forward_level() >= 0:
            raise NotImplementedError(
                "moe_kernels has no forward-mode derivatives under torch.compile: leave the function uncompiled, or "
                "differentiate what the compiled one returns by backward() or torch.autograd.grad"
            )
        return False
    if forward_level() >= 0 or _dispatch_modes():
        return False
    if _functorch_level() is not None or jit_tracing() is not None or in_vmap_mode():
        return False
    return all([x is None or (type(x) in PLAIN and not x.is_neg() and has_memory(x)) for x in tensors])


def dispatch_keys() -> tuple[int, ...]:
    """What this thread adds to and removes from the dispatch keys of tensors, on which guards depend."""
    return _included().raw_repr(), _excluded().raw_repr()


def has_memory(tensor: Tensor) -> bool:
    """Whether the values of `tensor` are at its address, if it has any. PyTorch has no memory for gradients that it
    knows to be zero, and wrappers have none of their own.
    """
    try:
        return bool(tensor.data_ptr()) or tensor.is_meta or not tensor.numel()
    except RuntimeError:  # of a transform of torch.func that has ended
        return False


def in_vmap_mode() -> bool:
    """Whether torch.autograd.grad(is_grads_batched=True) runs a backward pass, outside of torch.compile."""
    if torch.compiler.is_dynamo_compiling():
        return False
    return _VMAP_MODE is not None and _key_included(_VMAP_MODE)


def transformed(unknown: bool = True) -> bool:
    """Whether a call is in forward mode, or torch.func differentiates or vectorizes it, outside of torch.compile.

    `unknown` is the answer with versions of PyTorch that cannot be asked for transforms.
    """
    if torch.compiler.is_dynamo_compiling():
        return False
    level = _functorch_level()
    if level is _unknown_transform:
        return unknown or forward_level() >= 0
    return forward_level() >= 0 or (level is not None and bool(level.key() != _FUNCTIONALIZE))


def wrapped(*tensors: Tensor) -> bool:
    """Whether a transform of torch.func has wrapped one of these tensors, or wraps new ones, outside of torch.compile.
    These have no memory of their own.
    """
    if torch.compiler.is_dynamo_compiling() or _functorch_level() is None:
        return False
    return any(map(_is_wrapped, (*tensors, torch.empty(0))))


def forward_level() -> int:
    """The level of forward-mode differentiation that a call is in; -1 outside."""
    return int(forward_ad._current_level)


def has_tangent(*tensors: Tensor | None) -> bool:
    """Whether forward mode differentiates with respect to one of these tensors, outside of torch.compile.

    False below autograd, where operators run and tensors cannot be asked.
    """
    if forward_level() < 0 or torch.compiler.is_dynamo_compiling() or (_VIEWS is not None and _key_excluded(_VIEWS)):
        return False
    for x in tensors:
        while x is not None and _is_batched(x):  # torch.vmap cannot unpack it
            x = _unwrapped(x)
        if x is not None and unpack_dual(x).tangent is not None:
            return True
    return False


# The devices that kernels or references run on. Not all versions of Dynamo can trace `is_autocast_available`.
_AUTOCAST_DEVICES = frozenset({"cpu", "cuda", "xpu"})


def autocast(*operands: Any) -> tuple[Any, ...]:
    """Cast the operands of a product as torch.autocast does, but no float64, and no fp8, which has scales."""
    if not (torch.compiler.is_dynamo_compiling() or autocast_enabled()):
        return operands
    cast = [x.to(torch.get_autocast_dtype(x.device.type)) if autocasts(x) else x for x in operands]
    return tuple(cast)


def autocasts(operand: Any) -> bool:
    """Whether `autocast` converts this operand of a product."""
    if not isinstance(operand, Tensor) or operand.dtype not in CAST_DTYPES:
        return False
    device_type = operand.device.type
    return device_type in _AUTOCAST_DEVICES and torch.is_autocast_enabled(device_type)


def has_hooks(module: Any) -> bool:
    """Whether hooks of `module` itself may see or change its calls."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return any([getattr(module, kind, None) for kind in kinds])


def has_no_values(tensor: Tensor) -> bool:
    """Whether `tensor` is a meta tensor or, outside of torch.compile and torch.export, a fake one."""
    if tensor.is_meta or torch.compiler.is_compiling() or type(tensor) in PLAIN:
        return tensor.is_meta
    return isinstance(tensor, fake_tensors()[0])


def _imported(module: str, *names: str) -> tuple[Any, ...]:
    """Return names of a module; raise RuntimeError if this PyTorch has none of the first name."""
    try:
        found = importlib.import_module(module)
        return tuple(getattr(found, name) for name in names)
    except (ImportError, AttributeError) as error:
        raise requirements.lacks("torch", names[0]) from error


def fake_tensors() -> tuple[Any, ...]:
    """PyTorch's FakeTensor and FakeTensorMode."""
    return _imported("torch._subclasses.fake_tensor", "FakeTensor", "FakeTensorMode")


def without_modes() -> Any:
    """A context in which no dispatch mode is active."""
    (disabled,) = _imported("torch.utils._python_dispatch", "_disable_current_modes")
    return disabled()


def without_transforms() -> Any:
    """A context in which no transform of torch.func is active."""
    (cleared,) = _imported("torch._functorch.pyfunctorch", "temporarily_clear_interpreter_stack")
    return cleared()


@contextmanager
def without_symmetric_memory() -> Iterator[None]:
    """Report no tensor as being in symmetric memory if PyTorch cannot tell, as in 2.11. Once there is a process group,
    Helion would otherwise assume it of all tensors, and compile every grid as a loop of one program per SM.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    module: Any = symmetric_memory
    if hasattr(module, "is_symm_mem_tensor"):
        yield
        return
    module.is_symm_mem_tensor = lambda _: False
    try:
        yield
    finally:
        del module.is_symm_mem_tensor


def pretend(gpu: Any) -> None:
    """Have PyTorch and Inductor report this `targets.Gpu` for the rest of the process, to compile for an absent one."""
    (DeviceProperties,) = _imported("torch._inductor.runtime.hints", "DeviceProperties")
    major, minor = gpu.capability
    for_inductor = {
        "major": major,
        "multi_processor_count": gpu.multiprocessors,
        "warp_size": gpu.warp_size,
        "max_threads_per_multi_processor": 2048,
        "regs_per_multiprocessor": 65536,
    }
    properties = SimpleNamespace(
        **for_inductor,
        name=gpu.name,
        minor=minor,
        total_memory=80 << 30,
        max_threads_per_block=1024,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=gpu.shared_memory,
        shared_memory_per_multiprocessor=gpu.shared_memory + 1024,
        L2_cache_size=50 << 20,
        gcnArchName="",
        is_integrated=False,
        clock_rate=1980000,
        memory_clock_rate=2_000_000 if gpu.slow_memory else 3_200_000,
        memory_bus_width=6144,
    )
    answers = {
        "is_available": True,
        "current_device": 0,
        "device_count": 1,
        "get_device_capability": gpu.capability,
        "get_device_properties": properties,
        "get_device_name": gpu.name,
        "_lazy_init": None,
        "is_current_stream_capturing": False,
    }
    torch.version.cuda = torch.version.cuda or "13.0"
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, _answer=answer, **__: _answer)
    # A CUDA build of PyTorch would create a tensor on the GPU before the first fake one.
    fake_tensor: Any = importlib.import_module("torch._subclasses.fake_tensor")
    fake_tensor.init_gpu_context = lambda device: None
    described = DeviceProperties(type="cuda", index=0, cc=gpu.arch, **for_inductor)
    DeviceProperties.create = staticmethod(lambda device: described)
