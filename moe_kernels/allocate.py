"""Memory for results and workspaces, where the host's time counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# What torch.compile's own code allocates by.
_empty_strided_cuda: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)


def on_current_device(tensor: Tensor) -> bool:
    """Whether `tensor` is on the CUDA device that launches go to."""
    return tensor.is_cuda and tensor.get_device() == current_device()


def empty(shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    """`like.new_empty(shape, dtype=dtype)` of up to three extents; on the current device in 0.5 us instead of 1.6."""
    if type(like) is Tensor and on_current_device(like):
        strides = (shape[1] * shape[2], shape[2], 1) if len(shape) == 3 else (*shape[1:], 1)
        return empty_strided(like)(tuple(shape), strides, dtype)
    return like.new_empty(shape, dtype=dtype)


def empty_strided(like: Tensor) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """What makes tensors of a shape, strides and dtype on the device of `like`, while that is the current one."""
    if like.is_cuda and _empty_strided_cuda is not None:
        made: Callable[..., Tensor] = _empty_strided_cuda
        return made
    device = like.device
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)
