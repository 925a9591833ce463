"""Memory for results and workspaces, where the host's time counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# What torch.compile's own code allocates by, and where.
_empty_strided_cuda: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)


def on_current_device(tensor: Tensor) -> bool:
    """Whether `tensor` is on the CUDA device that launches go to."""
    return tensor.is_cuda and tensor.get_device() == _current_device()


def empty(shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    """`like.new_empty(shape, dtype=dtype)` of up to three extents; on the current device in 0.5 us instead of 1.6."""
    if type(like) is Tensor and on_current_device(like) and _empty_strided_cuda is not None:
        strides = (shape[1] * shape[2], shape[2], 1) if len(shape) == 3 else (*shape[1:], 1)
        out: Tensor = _empty_strided_cuda(tuple(shape), strides, dtype)
        return out
    return like.new_empty(shape, dtype=dtype)


def empty_rows(M: int, N: int, dtype: torch.dtype, like: Tensor) -> Tensor:
    """`empty((M, N), dtype, like)`, in less time, for a `like` that is known to be on the current device, if on any."""
    if like.is_cuda and _empty_strided_cuda is not None:
        out: Tensor = _empty_strided_cuda((M, N), (N, 1), dtype)
        return out
    return like.new_empty((M, N), dtype=dtype)
