"""The public grouped GEMM functions: check, choose, call."""

from __future__ import annotations

import os

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
    if variant not in ("auto", "basic", "persistent"):
        raise ValueError(f'variant: expected "auto", "basic" or "persistent", got {variant!r}')
    dtype = checks.check_grouped_gemm(A_packed, B, group_offsets, out_dtype)
    if checks.validation_enabled(validate):
        checks.validate_offsets(group_offsets, A_packed.size(0))
    if not _use_kernels(A_packed):
        return reference.grouped_gemm(A_packed, B, group_offsets, out_dtype=out_dtype)
    return _run(variant, A_packed, B if B.dim() == 3 else B.unsqueeze(0), group_offsets, None, dtype)


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
    return _run("auto", mat_a, mat_b, packing.group_offsets_from_offs(offs), bias, dtype)


def _use_kernels(A: Tensor) -> bool:
    if A.is_cuda or A.is_xpu:
        return True
    return A.is_cpu and os.environ.get("TRITON_INTERPRET") == "1" and A.dtype != torch.float64


def _run(
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
    out = torch.empty((M, B.size(2)), dtype=dtype, device=A_packed.device)
    if out.numel() == 0:
        return out
    if group_offsets.size(0) == 1 or (K == 0 and bias is None):
        return out.zero_()
    if M > 2**31 - 1:
        raise ValueError(f"A_packed: expected at most 2**31 - 1 rows, got {M}")

    from moe_kernels.kernels.grouped_gemm import launch

    if A_packed.is_cpu:
        # Triton's interpreter multiplies bfloat16 as raw bits and truncates when it stores it.
        A_packed, B = (x.float() if x.dtype == torch.bfloat16 else x for x in (A_packed, B))
        bias = None if bias is None else bias.float()
        result = torch.empty_like(out, dtype=torch.float32)
        launch(variant, A_packed, B, group_offsets, bias, result)
        return out.copy_(result)
    module = torch.cuda if A_packed.is_cuda else torch.xpu
    if A_packed.device.index == module.current_device():
        launch(variant, A_packed, B, group_offsets, bias, out)
    else:
        with module.device(A_packed.device):
            launch(variant, A_packed, B, group_offsets, bias, out)
    return out
