"""Grouped GEMMs of packed rows: check and cast the arguments, and call the operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_kernels import checks, ops, packing
from moe_kernels.batched import uniform_grouped_gemm
from moe_kernels.ops.products import GROUPED_GEMM, GROUPED_MM
from moe_kernels.ops.scaled import SCALED_GROUPED_GEMM, flattened
from moe_kernels.runtime import cache
from moe_kernels.runtime.torch_internals import autocast, reshaped
from moe_kernels.scaled import ScaledTensor


def grouped_gemm(
    A_packed: Tensor | ScaledTensor,  # [M, K]
    B: Tensor | ScaledTensor,  # [K, N] or [G, K, N]
    group_offsets: Tensor,  # [G + 1]
    *,
    out_dtype: torch.dtype | None = None,
    variant: str = "auto",
    fast_accumulation: bool = False,
    validate: bool | None = None,
) -> Tensor:
    """Multiply each group's rows by the group's matrix: `out[rows of g] = A_packed[rows of g] @ B[g]`.

    Group g owns the rows `group_offsets[g]:group_offsets[g + 1]`. Rows outside all groups come back as zeros. Products
    are accumulated in float32, those of float64 in float64. The host never reads the offsets, so a call can be captured
    in a CUDA graph and replayed with other offsets. Malformed offsets are treated as clamp(cummax(group_offsets), 0,
    M): no access is out of bounds. Gradients of any order are supported, except for ScaledTensors.

    Args:
        A_packed: `[M, K]`, the rows of all groups one after another; bfloat16, float16 or float32, on a CPU also
            float64; any strides. An operand whose layout TMA cannot read may be copied in each call.
        B: `[K, N]`, shared by all groups, or `[G, K, N]`; dtypes as for `A_packed`, any strides: the transposed view
            of a `[G, N, K]` parameter costs nothing extra. If `A_packed` or `B` is a ScaledTensor, its data are copied
            in each call unless they are contiguous along K.
        group_offsets: `[G + 1]` int32 or int64, exclusive prefix sums of the group sizes, `group_offsets[0] == 0`.
        out_dtype: dtype of the result; by default `torch.promote_types(A_packed.dtype, B.dtype)`, and bfloat16 for
            ScaledTensors.
        variant: "basic" (a grid over the tiles of all groups), "persistent" (one worker per SM walks a list of tiles),
            or "auto", which chooses by tuned entries, or else by the sizes of the product, also from further kernels.
        fast_accumulation: for "rowwise" ScaledTensors, True lets the tensor cores, which keep about 14 bits of a sum,
            add up all of K. False lets them add up 128 products at a time; these partial sums are added in float32.
        validate: True raises ValueError for malformed offsets, and waits for the device; None does so if the
            environment variable MOE_KERNELS_VALIDATE was 1 at import.

    Returns:
        `[M, N]`, contiguous.

    Raises:
        TypeError, ValueError: an argument has a wrong dtype, or a wrong rank, shape or device.
        RuntimeError: a ScaledTensor requires grad or has a tangent (products in fp8 have no derivatives); float8_e4m3fn
            on a GPU of compute capability below 8.9; validation while torch.vmap vectorizes over the offsets.
        ImportError: the kernels are needed, and a package they need is missing or does not work with the others.
    """
    validate = checks.validation_enabled(validate)
    if isinstance(A_packed, ScaledTensor) or isinstance(B, ScaledTensor):
        return _scaled_grouped_gemm(A_packed, B, group_offsets, None, out_dtype, variant, fast_accumulation, validate)
    if fast_accumulation is not False:
        checks.check_no_fast_accumulation(fast_accumulation, "plain tensors; it is for rowwise ScaledTensors")
    given, requested = (A_packed, B, group_offsets, None), (out_dtype, variant)
    if not validate and (known := cache.repeat(GROUPED_GEMM, given, requested)) is not None:
        return known
    _check_variant(variant)
    left, right = autocast(A_packed, B)
    dtype = checks.check_grouped_gemm(left, right, group_offsets, out_dtype)
    if validate:
        checks.validate_offsets(group_offsets, left.size(0))
    result: Tensor = ops.grouped_gemm(left, right, group_offsets, None, dtype, variant)
    cache.remember(GROUPED_GEMM, given, requested, (dtype, variant))
    return result


def _scaled_grouped_gemm(
    A_packed: Tensor | ScaledTensor,  # [M, K]
    B: Tensor | ScaledTensor,  # [K, N] or [G, K, N]
    group_offsets: Tensor,  # [G + 1]
    bias: Tensor | None,  # [G, N]
    out_dtype: torch.dtype | None,
    variant: str,
    fast_accumulation: bool,
    validate: bool,
) -> Tensor:
    A, weight = checks.scaled_both("A_packed", A_packed, "B", B)
    given = (A.data, flattened(A.scales, A.data), weight.data, weight.scales, group_offsets, bias)
    rank = getattr(A.scales, "ndim", None)  # 1-D scales are refused, even if they look like flattened ones
    requested = (A.format, weight.format, rank, out_dtype, variant, type(fast_accumulation), fast_accumulation)
    if not validate and (known := cache.repeat(SCALED_GROUPED_GEMM, given, requested)) is not None:
        return known
    _check_variant(variant)
    dtype = checks.check_scaled_grouped_gemm(A, weight, group_offsets, bias, out_dtype, fast_accumulation)
    if validate:
        checks.validate_offsets(group_offsets, A.shape[0])
    operands = A.data, A.scales, weight.data, weight.scales
    options = (dtype, variant, fast_accumulation)
    out: Tensor = ops.scaled_grouped_gemm(*operands, group_offsets, bias, *options)
    cache.remember(SCALED_GROUPED_GEMM, given, requested, options)
    return out


def _check_variant(variant: str) -> None:
    if variant not in ("auto", "basic", "persistent"):
        raise ValueError(f'variant: expected "auto", "basic" or "persistent", got {variant!r}')


def grouped_gemm_jagged(
    A_packed: Tensor,  # [M, K]
    B: Tensor,  # [K, N] or [G, K, N]
    group_offsets: Tensor,  # [G + 1]
) -> Tensor:  # [M, N]
    """Compute `grouped_gemm` by the basic kernel: a grid over the output tiles of all groups.

    Arguments, result and errors are those of `grouped_gemm` with variant="basic".
    """
    return grouped_gemm(A_packed, B, group_offsets, variant="basic")


def grouped_gemm_jagged_persistent(
    A_packed: Tensor,  # [M, K]
    B: Tensor,  # [K, N] or [G, K, N]
    group_offsets: Tensor,  # [G + 1]
) -> Tensor:  # [M, N]
    """Compute `grouped_gemm` by the persistent kernel: a fixed number of workers walks the tiles of all groups.

    Arguments, result and errors are those of `grouped_gemm` with variant="persistent".
    """
    return grouped_gemm(A_packed, B, group_offsets, variant="persistent")


def grouped_gemm_wgrad(
    A_packed: Tensor,  # [M, K]
    d_out: Tensor,  # [M, N]
    group_offsets: Tensor,  # [G + 1]
    *,
    out_dtype: torch.dtype | None = None,
    validate: bool | None = None,
) -> Tensor:
    """Compute the gradient of `grouped_gemm` with respect to `B`: `out[g] = A_packed[rows of g].T @ d_out[rows of g]`.

    Products are accumulated in float32, those of float64 in float64. Groups without rows give exact zeros. Rows outside
    all groups do not affect the result, even if they hold NaN. Malformed offsets are treated as by `grouped_gemm`.
    Gradients of any order are supported.

    Args:
        A_packed: `[M, K]`; dtypes and strides as for `grouped_gemm`.
        d_out: `[M, N]`; dtypes and strides as for `grouped_gemm`.
        group_offsets: `[G + 1]` int32 or int64.
        out_dtype: dtype of the result; by default `torch.promote_types(A_packed.dtype, d_out.dtype)`.
        validate: as for `grouped_gemm`.

    Returns:
        `[G, K, N]`, contiguous.

    Raises:
        TypeError, ValueError, RuntimeError, ImportError: as for `grouped_gemm`.
    """
    A_packed, d_out = autocast(A_packed, d_out)
    dtype = checks.check_grouped_gemm_wgrad(A_packed, d_out, group_offsets, out_dtype)
    if checks.validation_enabled(validate):
        checks.validate_offsets(group_offsets, A_packed.size(0))
    return ops.grouped_gemm_wgrad(A_packed, d_out, group_offsets, False, False, dtype)


def grouped_mm(
    mat_a: Tensor,  # [M, K] or [G, M, K]
    mat_b: Tensor,  # [G, K, N] or [K, N]
    *,
    offs: Tensor | None = None,  # [G]
    bias: Tensor | None = None,  # [G, N]
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute `torch.nn.functional.grouped_mm`, also with a bias, an out_dtype, mixed dtypes, any sizes and strides.

        [M, K]    x [G, K, N]  ->  [M, N]        the rows of mat_a are grouped
        [M, K]    x [K, N]     ->  [G, M, N]     the contraction is grouped
        [G, M, K] x [K, N]     ->  [M, N]        the columns of mat_b are grouped
        [G, M, K] x [G, K, N]  ->  [G, M, N]     without offs

    Group g has the rows (columns) `offs[g - 1]:offs[g]`, the first group `0:offs[0]`. Rows and columns of the result at
    or past `offs[-1]` are zeros; PyTorch leaves them uninitialised. Gradients of any order are supported.

    Args:
        mat_a, mat_b: shapes as above; dtypes and strides as for `grouped_gemm`.
        offs: `[G]` int32 or int64, where each group ends.
        bias: `[G, N]`, only for the first form; added in float32 before the result is rounded.
        out_dtype: as for `grouped_gemm`.

    Returns:
        Shape as above; contiguous, except in the third form, which returns a transposed view.

    Raises:
        TypeError, ValueError, RuntimeError, ImportError: as for `grouped_gemm`; offsets are checked on the host if the
            environment variable MOE_KERNELS_VALIDATE was 1 at import.
    """
    validate = checks.validation_enabled(None)
    given, requested = (mat_a, mat_b, offs, bias), (out_dtype,)
    if not validate and (known := cache.repeat(GROUPED_MM, given, requested)) is not None:
        return known
    mat_a, mat_b = autocast(mat_a, mat_b)
    dtype = checks.check_grouped_mm(mat_a, mat_b, offs, bias, out_dtype)
    if offs is None:
        return uniform_grouped_gemm(mat_a, mat_b, mat_a.size(0), out_dtype=dtype)
    if validate:
        checks.validate_offs(offs, mat_a, mat_b)
    if mat_b.dim() == 3 and mat_a.dim() == 2:
        result: Tensor = ops.grouped_mm(mat_a, mat_b, offs, bias, dtype)
        cache.remember(GROUPED_MM, given, requested, (dtype, "auto"))
        return result
    group_offsets = packing.group_offsets_from_offs(offs)
    if mat_a.dim() == 2:
        return grouped_gemm_wgrad(mat_a.T, mat_b, group_offsets, out_dtype=dtype, validate=False)
    return grouped_gemm(mat_b.T, mat_a.mT, group_offsets, out_dtype=dtype, validate=False).T


def scaled_grouped_mm(
    mat_a: Tensor,  # [M, K] or [G, M, K]
    mat_b: Tensor,  # [G, K, N] or [K, N]
    scale_a: Tensor | list[Tensor],
    scale_recipe_a: Any,
    scale_b: Tensor | list[Tensor],
    scale_recipe_b: Any,
    swizzle_a: Any = None,
    swizzle_b: Any = None,
    bias: Tensor | None = None,  # [G, N]
    offs: Tensor | None = None,  # [G]
    output_dtype: torch.dtype | None = torch.bfloat16,
    contraction_dim: list[int] | tuple[int, ...] = (),
    use_fast_accum: bool = False,
) -> Tensor:
    """Compute `torch.nn.functional.scaled_grouped_mm` of fp8 operands of any size and strides, also with block scales.

        [M, K]    x [G, K, N]  ->  [M, N]        the rows of mat_a are grouped
        [M, K]    x [K, N]     ->  [G, M, N]     the contraction is grouped
        [G, M, K] x [K, N]     ->  [M, N]        the columns of mat_b are grouped
        [G, M, K] x [G, K, N]  ->  [G, M, N]     without offs

    Groups and zero rows are those of `grouped_mm`. Operands that are not contiguous along K are copied in each call.
    There are no gradients.

    Args:
        mat_a, mat_b: shapes as above; float8_e4m3fn or float8_e5m2, not necessarily the same one.
        scale_a, scale_recipe_a: float32 scales, or a list of one tensor, and their `ScalingType`. RowWise: `[M]` or
            `[G, M]`, for the second form `[G * M]`, one group after another. BlockWise1x128, for the first and the last
            form: `[M, cdiv(K, 128)]` or `[G, M, cdiv(K, 128)]`.
        scale_b, scale_recipe_b: the same for `mat_b`. RowWise: `[N]`, `[G, N]` or `[G * N]`. BlockWise128x128, together
            with BlockWise1x128 for `mat_a`: `[G, cdiv(K, 128), cdiv(N, 128)]`.
        swizzle_a, swizzle_b: None or `SwizzleType.NO_SWIZZLE`.
        bias: `[G, N]`, only for the first form; added in float32 before the result is rounded.
        offs: `[G]` int32 or int64, where each group ends.
        output_dtype: bfloat16, float16 or float32; None is bfloat16.
        contraction_dim: (-1, -2), or empty.
        use_fast_accum: as `fast_accumulation` of `grouped_gemm`; only for RowWise.

    Returns:
        Shape as above; contiguous, except in the third form, which returns a transposed view.

    Raises:
        TypeError, ValueError, RuntimeError, ImportError: as for `grouped_gemm`; ValueError also for other recipes and
            swizzles.
    """
    recipes = (scale_a, scale_recipe_a, scale_b, scale_recipe_b, swizzle_a, swizzle_b)
    options = (bias, offs, output_dtype, contraction_dim, use_fast_accum)
    a, b, dtype = checks.check_scaled_grouped_mm(mat_a, mat_b, *recipes, *options)
    if offs is None:
        G, M, K = mat_a.shape
        group_offsets = torch.arange(G + 1, dtype=torch.int64, device=mat_a.device) * M
        rows = ScaledTensor(mat_a.reshape(G * M, K), a.scales.flatten(0, 1), a.format)
        out = _scaled_grouped_gemm(rows, b, group_offsets, None, dtype, "auto", use_fast_accum, False)
        return reshaped(out, (G, M, mat_b.size(-1)))
    if checks.validation_enabled(None):
        checks.validate_offs(offs, mat_a, mat_b)
    group_offsets = packing.group_offsets_from_offs(offs)
    if mat_b.dim() == 3:
        return _scaled_grouped_gemm(a, b, group_offsets, bias, dtype, "auto", use_fast_accum, False)
    if mat_a.dim() == 3:
        out = _scaled_grouped_gemm(b.mT, a.mT, group_offsets, None, dtype, "auto", use_fast_accum, False)
        return out.T
    scales_a, scales_b = a.scales.squeeze(2), b.scales.squeeze(1)
    return ops.scaled_wgrad(mat_a.T, scales_a, mat_b, scales_b, group_offsets, dtype, use_fast_accum)
