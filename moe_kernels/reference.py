"""The package's functions in plain PyTorch: the specification, the tests' oracle and the CPU path.

    out[group g rows] = A_packed[group g rows] @ B[g]        (or @ B, one weight for all groups)
    out[g] = A[g] @ B[g]                                     (uniform and varied)

They take any device and bfloat16, float16, float32 or float64, read the offsets on the host (a sync), and
leave the gradients to autograd.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import check_grouped_gemm, check_grouped_mm, check_uniform, check_varied, clamp_offsets
from .packing import group_offsets_from_offs, group_sizes


def grouped_gemm(
    A_packed: Tensor,  # [M, K]
    B: Tensor,  # [K, N] or [G, K, N]
    group_offsets: Tensor,  # [G + 1]
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # [M, N]
    """Multiply the rows of each group with the group's weight, or with the one weight that all share.

    If `A_packed`, `B` and the result have one dtype, the products are `torch.mm` in that dtype. Otherwise
    the operands are converted to float32, or float64 if one of them is, and the products rounded at the end.

    Args:
        A_packed: `[M, K]`, any strides.
        B: `[K, N]` or `[G, K, N]`, any strides.
        group_offsets: `[G + 1]` int32 or int64, taken as `checks.clamp_offsets`.
        out_dtype: of the result; None is `torch.promote_types(A_packed.dtype, B.dtype)`.

    Returns:
        `[M, N]`. Rows in no group are exact zeros, and so are their gradients and those of the weights of
        empty groups, whatever values stand there.

    Raises:
        TypeError, ValueError: see `checks.check_grouped_gemm`.
    """
    result = check_grouped_gemm(A_packed, B, group_offsets, out_dtype, reference=True)
    M, N = A_packed.shape[0], B.shape[-1]
    compute = result if A_packed.dtype == B.dtype == result else _accumulation_dtype(A_packed, B)
    offsets = clamp_offsets(group_offsets, M).tolist()
    first, last = offsets[0], offsets[-1]
    if B.dim() == 2:
        weights, offsets = [B], [first, last]
    elif len(B) == 0:
        # One empty product keeps the result differentiable in both operands.
        weights, offsets = [B.sum(0)], [first, first]
    else:
        weights = list(B.unbind(0))
    sizes = [end - start for start, end in pairwise(offsets)]
    # split and unbind rather than indexing: their backward writes each gradient once, not once per group.
    groups = torch.split(A_packed[first:last], sizes)
    products = [(a.to(compute) @ b.to(compute)).to(result) for a, b in zip(groups, weights, strict=True)]
    before, after = (A_packed.new_zeros(rows, N, dtype=result) for rows in (first, M - last))
    return torch.cat([before, *products, after])


def grouped_mm(
    mat_a: Tensor,  # [M, K]
    mat_b: Tensor,  # [G, K, N]
    *,
    offs: Tensor | None = None,  # [G]
    bias: Tensor | None = None,  # [G, N]
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # [M, N]
    """`torch.nn.functional.grouped_mm` for a packed `mat_a` and one weight per group.

    Args:
        mat_a: `[M, K]`, any strides.
        mat_b: `[G, K, N]`, any strides.
        offs: `[G]` int32 or int64, the inclusive ends of the groups; required.
        bias: `[G, N]`, added to each row of its group in float32 (float64 if an argument is) before the
            result is rounded. It does not change the result's dtype.
        out_dtype: of the result; None is `torch.promote_types(mat_a.dtype, mat_b.dtype)`.

    Returns:
        `[M, N]`. Rows in no group are exact zeros, without a bias.

    Raises:
        NotImplementedError: other ranks than 2-D `mat_a` with 3-D `mat_b`.
        TypeError, ValueError: see `checks.check_grouped_mm`.
    """
    result = check_grouped_mm(mat_a, mat_b, offs, bias, out_dtype, reference=True)
    assert offs is not None  # checked above
    group_offsets = group_offsets_from_offs(offs)
    if bias is None:
        return grouped_gemm(mat_a, mat_b, group_offsets, out_dtype=result)
    compute = _accumulation_dtype(mat_a, mat_b, bias)
    products = grouped_gemm(mat_a, mat_b, group_offsets, out_dtype=compute)
    M = mat_a.shape[0]
    sizes = group_sizes(clamp_offsets(group_offsets, M))
    biases = bias.to(compute).repeat_interleave(sizes, dim=0)
    # The first group starts at row 0, so only rows at the end can be in no group.
    return (products + F.pad(biases, (0, 0, 0, M - biases.shape[0]))).to(result)


def uniform_grouped_gemm(
    A: Tensor,  # [G * M, K] or [G, M, K]
    B: Tensor,  # [G * K, N] or [G, K, N]
    num_groups: int,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # [G * M, N] or [G, M, N], like A
    """Multiply groups that are all of one size: `out[g] = A[g] @ B[g]`.

    The products are `torch.bmm`, in the dtypes in which `grouped_gemm` computes.

    Args:
        A: `[G, M, K]`, or `[G * M, K]` with the groups one below the other; any strides.
        B: `[G, K, N]` or `[G * K, N]`, any strides.
        num_groups: `G`.
        out_dtype: of the result; None is `torch.promote_types(A.dtype, B.dtype)`.

    Raises:
        TypeError, ValueError: see `checks.check_uniform`.
    """
    result = check_uniform(A, B, num_groups, out_dtype, reference=True)
    compute = result if A.dtype == B.dtype == result else _accumulation_dtype(A, B)
    M = A.shape[-2] if A.dim() == 3 else A.shape[0] // max(num_groups, 1)
    a = A.to(compute).reshape(num_groups, M, A.shape[-1])
    b = B.to(compute).reshape(num_groups, A.shape[-1], B.shape[-1])
    out = torch.bmm(a, b).to(result)
    return out if A.dim() == 3 else out.flatten(0, 1)


def varied_grouped_gemm(
    group_A: Sequence[Tensor],  # P of [M_p, K_p]
    group_B: Sequence[Tensor],  # P of [K_p, N_p]
    *,
    out: Sequence[Tensor] | None = None,  # P of [M_p, N_p]
) -> list[Tensor]:
    """Multiply matrices pair by pair, each pair of its own sizes: `torch.mm(group_A[p], group_B[p])`.

    Args:
        group_A: list of `[M_p, K_p]`, all of one dtype, any strides.
        group_B: list of `[K_p, N_p]` of the same dtype.
        out: list of `[M_p, N_p]` to write to, without gradients; by default new tensors.

    Raises:
        TypeError, ValueError: see `checks.check_varied`.
    """
    check_varied(group_A, group_B, out, reference=True)
    if out is None:
        return [torch.mm(a, b) for a, b in zip(group_A, group_B, strict=True)]
    with torch.no_grad():
        return [torch.mm(a, b, out=o) for a, b, o in zip(group_A, group_B, out, strict=True)]


def _accumulation_dtype(*operands: Tensor) -> torch.dtype:
    return torch.float64 if any(operand.dtype == torch.float64 for operand in operands) else torch.float32
