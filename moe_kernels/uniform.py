"""`uniform_grouped_gemm`: check, choose, call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_kernels import checks, reference
from moe_kernels.dispatch import use_kernels


def uniform_grouped_gemm(
    A: Tensor,  # [G * M, K] or [G, M, K]
    B: Tensor,  # [G * K, N] or [G, K, N]
    num_groups: int,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply groups that are all of one size: `out[g] = A[g] @ B[g]`, in one launch.

    Products are accumulated in fp32. Nothing of one group reaches another's result. A call can be captured into a CUDA
    graph. Gradients, also of gradients, are products of the same kind.

    Args:
        A: `[G, M, K]`, or `[G * M, K]` with the groups one below the other; bfloat16, float16 or float32, any
            strides. On a CPU float64 too.
        B: `[G, K, N]` or `[G * K, N]`; dtypes and strides as for `A`.
        num_groups: `G`.
        out_dtype: dtype of the result; by default `torch.promote_types(A.dtype, B.dtype)`.

    Returns:
        `[G, M, N]` for a 3-D `A`, `[G * M, N]` for a 2-D one; contiguous.

    Raises:
        TypeError, ValueError: an argument has a wrong dtype, or a wrong rank, shape or device.
        ImportError: the kernels are needed and a package they need is missing or too old.
    """
    dtype = checks.check_uniform(A, B, num_groups, out_dtype)
    G = num_groups
    if not use_kernels(A):
        return reference.uniform_grouped_gemm(A, B, num_groups, out_dtype=out_dtype)
    a = A if A.dim() == 3 else A.view(G, A.size(0) // max(G, 1), A.size(1))
    b = B if B.dim() == 3 else B.view(G, A.size(-1), B.size(1))
    if torch.is_grad_enabled() and (A.requires_grad or B.requires_grad):
        out = _differentiable(a, b, dtype)
    else:
        out = _product(a, b, dtype)
    return out if A.dim() == 3 else out.flatten(0, 1)


class _Product(torch.autograd.Function):
    """`A [G, M, K] @ B [G, K, N]`, and its gradients by itself, so that these have gradients too."""

    @staticmethod
    def forward(ctx: Any, A: Tensor, B: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(A, B)
        return _product(A, B, dtype)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        A, B = ctx.saved_tensors
        dA = _differentiable(d_out, B.transpose(1, 2), A.dtype) if ctx.needs_input_grad[0] else None
        dB = _differentiable(A.transpose(1, 2), d_out, B.dtype) if ctx.needs_input_grad[1] else None
        return dA, dB, None


def _differentiable(A: Tensor, B: Tensor, dtype: torch.dtype) -> Tensor:
    out: Tensor = _Product.apply(A, B, dtype)  # type: ignore[no-untyped-call]
    return out


def _product(A: Tensor, B: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty((A.size(0), A.size(1), B.size(2)), dtype=dtype, device=A.device)
    if out.numel() == 0:
        return out
    if A.size(2) == 0:
        return out.zero_()

    from moe_kernels.kernels.uniform_gemm import launch

    if A.is_cpu:
        # Triton's interpreter multiplies bfloat16 as raw bits and truncates when it stores it.
        A, B = (x.float() if x.dtype == torch.bfloat16 else x for x in (A, B))
        result = torch.empty_like(out, dtype=torch.float32)
        launch(A, B, result)
        return out.copy_(result)
    module = torch.cuda if A.is_cuda else torch.xpu
    if A.device.index == module.current_device():
        launch(A, B, out)
    else:
        with module.device(A.device):
            launch(A, B, out)
    return out
