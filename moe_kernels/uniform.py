"""`uniform_grouped_gemm`: check, choose, call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_kernels import checks, reference
from moe_kernels.allocate import on_current_device
from moe_kernels.dispatch import autocast, on_device, unobserved, use_kernels
from moe_kernels.plans import Plans


def uniform_grouped_gemm(
    A: Tensor,  # [G * M, K] or [G, M, K]
    B: Tensor,  # [G * K, N] or [G, K, N]
    num_groups: int,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply groups that are all of one size: `out[g] = A[g] @ B[g]`, in one launch.

    Products are accumulated in fp32. Nothing of one group reaches another's result. A call can be captured into a CUDA
    graph. Gradients, also of gradients, are products of the same kind. Where cuBLAS is faster the call is `torch.bmm`:
    for more than 64 columns, for many rows of fewer than 16, in float32, and where TMA cannot read the operands; unless
    it would have to copy an operand or does not know the dtypes.

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
    if (out := _again(A, B, num_groups, out_dtype)) is not None:
        return out
    A, B = autocast(A, B)
    dtype = checks.check_uniform(A, B, num_groups, out_dtype)
    if unobserved(A, B):
        return multiply(A, B, num_groups, dtype)
    G = num_groups
    a = A if A.dim() == 3 else A.view(G, A.size(0) // max(G, 1), A.size(1))
    b = B if B.dim() == 3 else B.view(G, A.size(-1), B.size(1))
    from moe_kernels import ops  # imports this module

    recorded: Tensor = ops.uniform_grouped_gemm(a, b, dtype)
    return recorded if A.dim() == 3 else recorded.flatten(0, 1)


_plans: Plans[Callable[[Tensor, Tensor], Tensor]] = Plans()


def _key(A: Tensor, B: Tensor, G: int, out_dtype: torch.dtype | None) -> tuple[Any, ...]:
    """Everything that checks, choice and compiled code depend on."""
    a_dtype, b_dtype = A.dtype, B.dtype
    return (
        G,
        out_dtype or (a_dtype if a_dtype == b_dtype else torch.promote_types(a_dtype, b_dtype)),
        a_dtype,
        A.shape,
        A.stride(),
        A.data_ptr() % 16,
        A.get_device(),
        b_dtype,
        B.shape,
        B.stride(),
        B.data_ptr() % 16,
        B.get_device(),
        (a_dtype == torch.float32 or b_dtype == torch.float32) and torch.backends.cuda.matmul.fp32_precision,
    )


def _again(A: Tensor, B: Tensor, num_groups: int, out_dtype: torch.dtype | None) -> Tensor | None:
    """The result if there has been such a call before, from the current device, and nobody records this one."""
    if not unobserved(A, B) or torch._C._is_any_autocast_enabled():
        return None
    try:
        plan = _plans[_key(A, B, num_groups, out_dtype)]
    except (AttributeError, KeyError, RuntimeError, TypeError):
        return None  # what is wrong, if anything is, the checks find
    if not on_current_device(A):
        return None
    return plan(A, B)


def multiply(A: Tensor, B: Tensor, G: int, dtype: torch.dtype) -> Tensor:
    """The products of checked tensors that nobody records, of 2 or 3 dimensions each; the result has as many as `A`."""
    if not use_kernels(A, B):
        return reference.uniform_grouped_gemm(A, B, G, out_dtype=dtype)
    M = A.size(-2) if A.dim() == 3 else A.size(0) // max(G, 1)
    K, N = A.size(-1), B.size(-1)
    if G * M * N * K == 0:
        return A.new_zeros((G, M, N) if A.dim() == 3 else (G * M, N), dtype=dtype)
    return on_device(A, _planned, A, B, G, dtype)


def _planned(A: Tensor, B: Tensor, G: int, dtype: torch.dtype) -> Tensor:
    key = _key(A, B, G, dtype)
    if (plan := _plans.get(key)) is not None:
        return plan(A, B)
    from moe_kernels.kernels import uniform_gemm as kernels

    plan, out = kernels.plan_and_call(A, B, G, dtype)
    _plans[key] = plan
    return out
