"""The public grouped GEMM functions: check, choose, call."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_kernels import checks, packing, reference


def grouped_gemm(
    A_packed: Tensor,  # [M, K]
    B: Tensor,  # [K, N] or [G, K, N]
    group_offsets: Tensor,  # [G + 1]
    *,
    out_dtype: torch.dtype | None = None,
    variant: str = "auto",
    validate: bool | None = None,
) -> Tensor:
    """Multiply each group's rows by the group's matrix: `out[rows of g] = A_packed[rows of g] @ B[g]`.

    Group g owns the rows `group_offsets[g]:group_offsets[g + 1]`. Rows that belong to no group come back as zeros.
    Products are accumulated in fp32. The offsets stay on the device and are never read by the host, so a call can be
    captured into a CUDA graph and replayed with other offsets; malformed ones are taken as
    clamp(cummax(group_offsets), 0, M) and never lead out of bounds.

    Args:
        A_packed: `[M, K]`, the rows of all groups one after another; bfloat16, float16 or float32, any strides. On a
            CPU float64 too.
        B: `[K, N]`, shared by all groups, or `[G, K, N]`; dtypes as for `A_packed`, any strides: the transposed view
            of a `[G, N, K]` parameter costs nothing extra.
        group_offsets: `[G + 1]` int32 or int64, exclusive prefix sums of the group sizes, `group_offsets[0] == 0`.
        out_dtype: dtype of the result; by default `torch.promote_types(A_packed.dtype, B.dtype)`.
        variant: "basic" (a grid over the tiles of all groups), "persistent" (one worker per SM walks a list of tiles)
            or "auto", which picks the faster of the two by rows per group.
        validate: True checks the offsets on the host, which waits for the device; None does so if the environment
            has MOE_KERNELS_VALIDATE=1.

    Returns:
        `[M, N]`, contiguous.

    Raises:
        TypeError, ValueError: an argument has a wrong dtype, or a wrong rank, shape or device.
        ImportError: the kernels are needed and a package they need is missing or too old.
        NotImplementedError: a gradient is asked for and plain PyTorch does not do the work, as it does on a CPU.
    """
    validate = checks.validation_enabled(validate)
    if not validate and (out := _again(variant, A_packed, B, group_offsets, out_dtype)) is not None:
        return out
    if variant not in ("auto", "basic", "persistent"):
        raise ValueError(f'variant: expected "auto", "basic" or "persistent", got {variant!r}')
    dtype = checks.check_grouped_gemm(A_packed, B, group_offsets, out_dtype)
    if validate:
        checks.validate_offsets(group_offsets, A_packed.size(0))
    if not _use_kernels(A_packed):
        return reference.grouped_gemm(A_packed, B, group_offsets, out_dtype=out_dtype)
    key = _key(variant, A_packed, B, group_offsets, None, out_dtype)
    return _run(key, variant, A_packed, B if B.dim() == 3 else B.unsqueeze(0), group_offsets, None, dtype)


def grouped_gemm_jagged(A_packed: Tensor, B: Tensor, group_offsets: Tensor) -> Tensor:
    """`grouped_gemm` by the basic kernel: a grid over the output tiles of all groups."""
    return grouped_gemm(A_packed, B, group_offsets, variant="basic")


def grouped_gemm_jagged_persistent(A_packed: Tensor, B: Tensor, group_offsets: Tensor) -> Tensor:
    """`grouped_gemm` by the persistent kernel: a fixed number of workers walks the output tiles of all groups."""
    return grouped_gemm(A_packed, B, group_offsets, variant="persistent")


def grouped_mm(
    mat_a: Tensor,  # [M, K]
    mat_b: Tensor,  # [G, K, N]
    *,
    offs: Tensor | None = None,  # [G]
    bias: Tensor | None = None,  # [G, N]
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`torch.nn.functional.grouped_mm` for 2-D x 3-D, with bias, out_dtype, and any dtype, size and strides.

    `out[offs[g - 1]:offs[g]] = mat_a[offs[g - 1]:offs[g]] @ mat_b[g] + bias[g]`, with `offs[-1]` read as 0 for the
    first group. Rows at or past the last of `offs`, which PyTorch leaves uninitialised, are zeros.

    Args:
        mat_a: `[M, K]`; dtypes and strides as for `grouped_gemm`.
        mat_b: `[G, K, N]`.
        offs: `[G]` int32 or int64, the row at which each group ends.
        bias: `[G, N]`, added in fp32 before the result is rounded.
        out_dtype: as for `grouped_gemm`.

    Returns:
        `[M, N]`, contiguous.

    Raises:
        NotImplementedError: another combination of ranks than 2-D x 3-D.
        TypeError, ValueError, ImportError: as for `grouped_gemm`.
    """
    dtype = checks.check_grouped_mm(mat_a, mat_b, offs, bias, out_dtype)
    if not _use_kernels(mat_a):
        return reference.grouped_mm(mat_a, mat_b, offs=offs, bias=bias, out_dtype=out_dtype)
    assert offs is not None  # checked
    group_offsets = packing.group_offsets_from_offs(offs)
    key = _key("auto", mat_a, mat_b, group_offsets, bias, out_dtype)
    return _run(key, "auto", mat_a, mat_b, group_offsets, bias, dtype)


def _use_kernels(A: Tensor) -> bool:
    if A.is_cuda or A.is_xpu:
        return True
    return A.is_cpu and os.environ.get("TRITON_INTERPRET") == "1" and A.dtype != torch.float64


_plans: dict[tuple[Any, ...], tuple[Callable[..., None], int, torch.dtype]] = {}  # and N and dtype of the result
_MOST_PLANS = 4096


def _key(
    variant: str,
    A_packed: Tensor,
    B: Tensor,
    group_offsets: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
) -> tuple[Any, ...]:
    """Everything that checks, choice and compiled code depend on; M is in it by its magnitude alone.

    This is on the way of every call, where an attribute of a tensor takes some 0.1 us.
    """
    M, K = A_packed.shape
    G = group_offsets.size(0) - 1
    a_dtype, b_dtype = A_packed.dtype, B.dtype
    return (
        variant,
        out_dtype,
        M.bit_length(),
        G and (M // G).bit_length(),
        K,
        a_dtype,
        A_packed.stride(),
        A_packed.data_ptr() % 16,
        A_packed.get_device(),
        b_dtype,
        B.shape,
        B.stride(),
        B.data_ptr() % 16,
        B.get_device(),
        group_offsets.shape,
        group_offsets.dtype,
        group_offsets.stride(),
        group_offsets.data_ptr() % 16,
        group_offsets.get_device(),
        None if bias is None else (bias.dtype, bias.stride(), bias.data_ptr() % 16),
        (a_dtype == torch.float32 or b_dtype == torch.float32) and torch.backends.cuda.matmul.fp32_precision,
    )


def _again(
    variant: str, A_packed: Tensor, B: Tensor, group_offsets: Tensor, out_dtype: torch.dtype | None
) -> Tensor | None:
    """The result if there has been such a call before, from the current device, without gradients."""
    try:
        plan, N, dtype = _plans[_key(variant, A_packed, B, group_offsets, None, out_dtype)]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None  # what is wrong, if anything is, the checks find
    if (
        not A_packed.is_cuda
        or A_packed.get_device() != torch.cuda.current_device()
        or (torch.is_grad_enabled() and (A_packed.requires_grad or B.requires_grad))
    ):
        return None
    out = A_packed.new_empty((A_packed.size(0), N), dtype=dtype)
    plan(A_packed, B if B.dim() == 3 else B.unsqueeze(0), group_offsets, None, out)
    return out


def _run(
    key: tuple[Any, ...],
    variant: str,
    A_packed: Tensor,  # [M, K]
    B: Tensor,  # [G, K, N], or [1, K, N] for one that all groups share
    group_offsets: Tensor,  # [G + 1]
    bias: Tensor | None,  # [G, N]
    dtype: torch.dtype,
) -> Tensor:  # [M, N]
    if torch.is_grad_enabled() and (
        A_packed.requires_grad or B.requires_grad or (bias is not None and bias.requires_grad)
    ):
        raise NotImplementedError(
            "the kernels have no backward yet: call under torch.no_grad(), or on detached tensors"
        )
    M, K = A_packed.shape
    out = A_packed.new_empty((M, B.size(2)), dtype=dtype)
    if out.numel() == 0:
        return out
    if group_offsets.size(0) == 1 or (K == 0 and bias is None):
        return out.zero_()
    if M > 2**31 - 1:
        raise ValueError(f"A_packed: expected at most 2**31 - 1 rows, got {M}")

    if A_packed.is_cpu:
        # Triton's interpreter multiplies bfloat16 as raw bits and truncates when it stores it.
        A_packed, B = (x.float() if x.dtype == torch.bfloat16 else x for x in (A_packed, B))
        bias = None if bias is None else bias.float()
        result = torch.empty_like(out, dtype=torch.float32)
        _call(key, variant, A_packed, B, group_offsets, bias, result)
        return out.copy_(result)
    with (torch.cuda if A_packed.is_cuda else torch.xpu).device(A_packed.device):
        _call(key, variant, A_packed, B, group_offsets, bias, out)
    return out


def _call(
    key: tuple[Any, ...], variant: str, A: Tensor, B: Tensor, offsets: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    if key in _plans:
        _plans[key][0](A, B, offsets, bias, out)
        return
    from moe_kernels.kernels import grouped_gemm as kernels

    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
    _plans[key] = kernels.plan(variant, A, B, offsets, bias, out), B.size(2), out.dtype
