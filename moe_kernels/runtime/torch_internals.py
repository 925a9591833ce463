"""Every private name of PyTorch that this package uses, and what takes over where there is none.

They save the host's time, or answer what PyTorch has no public question for. Of a PyTorch that was not tested none of
its C++ names is used.
"""

from __future__ import annotations

from collections.abc import Callable
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


# What torch.compile's own code allocates by.
empty_strided_cuda: Any = getattr(_guards, "_empty_strided_cuda", None)
# By these torch.compile tells whether the arguments of a call are like those that it has compiled for.
tensor_guards: Any = getattr(_guards, "TensorGuards", None)

current_device: Callable[[], int] = getattr(_C, "_cuda_getDevice", torch.cuda.current_device)
# A profiler that shows operators by their names is on.
profiled: Callable[[], bool] = getattr(getattr(_C, "_autograd", None), "_profiler_enabled", _missing(False))
autocast_enabled: Callable[[], bool] = getattr(_C, "_is_any_autocast_enabled", _missing(True))
_dispatch_modes: Callable[[], int] = getattr(_C, "_len_torch_dispatch_stack", _missing(1))
_functorch_level: Callable[[], Any] = getattr(getattr(_C, "_functorch", None), "peek_interpreter_stack", _missing(True))
_jit_tracing: Callable[[], Any] = getattr(_C, "_get_tracing_state", _missing(None))
_key_included: Callable[[Any], bool] = getattr(_C, "_dispatch_tls_is_dispatch_key_included", _missing(False))
# What torch.autograd.grad(is_grads_batched=True) runs a backward pass in; it is none of torch.func's transforms.
_VMAP_MODE = getattr(_C, "_dispatch_key_parse", _missing(None))("VmapMode")
below_autograd: Callable[[], Any] = getattr(_C, "_AutoDispatchBelowAutograd", torch.no_grad)
unpack_dual: Callable[..., Any] = _forward_ad.unpack_dual
_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def on_current_device(tensor: Tensor) -> bool:
    """Whether `tensor` is on the CUDA device that launches go to."""
    return tensor.is_cuda and tensor.get_device() == current_device()


def allocator(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """What makes tensors of a shape, strides and dtype on `device`, while that is the current one."""
    if device.type == "cuda" and empty_strided_cuda is not None:
        made: Callable[..., Tensor] = empty_strided_cuda
        return made
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def can_bypass_dispatcher(*tensors: Tensor | None) -> bool:
    """Whether bypassing torch.library and autograd is unobservable.

    Raises:
        NotImplementedError: as for `eager`.
    """
    return eager(*tensors) and not differentiated(*tensors) and not profiled()


def differentiated(*tensors: Tensor | None) -> bool:
    """Whether autograd records what is computed from these."""
    return torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in tensors])


def eager(*tensors: Tensor | None) -> bool:
    """Whether nothing traces or transforms a call; autograd may still record it, and a profiler show it.

    Nor is one of the tensors a view that PyTorch negates before an operator gets it, such as the imaginary part of a
    conjugate.

    Raises:
        NotImplementedError: a tensor has a tangent, which torch.library's operators would drop silently.
    """
    if torch.compiler.is_dynamo_compiling() or _dispatch_modes():
        return False
    if forward_level() >= 0:
        for tensor in tensors:
            if tensor is not None and unpack_dual(tensor).tangent is not None:
                raise NotImplementedError("moe_kernels has no forward-mode derivatives: use reverse mode")
        return False
    if _functorch_level() is not None or _jit_tracing() is not None:
        return False
    if _VMAP_MODE is not None and _key_included(_VMAP_MODE):
        return False
    return all([x is None or (type(x) in _PLAIN and not x.is_neg()) for x in tensors])


def forward_level() -> int:
    """The level of forward-mode differentiation that a call is in; -1 outside."""
    return int(forward_ad._current_level)


# Those that the kernels or the references run on. Not all versions of Dynamo can trace `is_autocast_available`.
_AUTOCAST_DEVICES = frozenset({"cpu", "cuda", "xpu"})


def autocast(*operands: Any) -> tuple[Any, ...]:
    """The operands of a product as torch.autocast would have them; None, float64 and what is no float stay."""
    if not (torch.compiler.is_dynamo_compiling() or autocast_enabled()):
        return operands
    cast = []
    for operand in operands:
        if isinstance(operand, Tensor) and operand.is_floating_point() and operand.dtype != torch.float64:
            device_type = operand.device.type
            if device_type in _AUTOCAST_DEVICES and torch.is_autocast_enabled(device_type):
                operand = operand.to(torch.get_autocast_dtype(device_type))
        cast.append(operand)
    return tuple(cast)
