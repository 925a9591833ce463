"""The package's functions in plain PyTorch: the specification, the tests' oracle and the CPU path.

    out[group g rows] = A_packed[group g rows] @ B[g]        (or @ B, one weight for all groups)
    out[g] = A[g] @ B[g]                                     (uniform and varied)

They take any device and bfloat16, float16, float32 or float64, read the offsets on the host (a sync), and
leave the gradients to autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import (
    check_grouped_gemm,
    check_grouped_gemm_wgrad,
    check_grouped_mm,
    check_permute,
    check_route,
    check_uniform,
    check_unpermute,
    check_varied,
    clamp_offsets,
)
from .packing import group_offsets_from_offs, group_sizes

if TYPE_CHECKING:
    from .routing import Routing


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


def grouped_gemm_wgrad(
    A_packed: Tensor,  # [M, K]
    d_out: Tensor,  # [M, N]
    group_offsets: Tensor,  # [G + 1]
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # [G, K, N]
    """The gradient of `grouped_gemm` in `B [G, K, N]`: `out[g] = A_packed[rows of g].T @ d_out[rows of g]`.

    Args:
        A_packed: `[M, K]`, any strides.
        d_out: `[M, N]`, any strides.
        group_offsets: `[G + 1]` int32 or int64, taken as `checks.clamp_offsets`.
        out_dtype: of the result; None is `torch.promote_types(A_packed.dtype, d_out.dtype)`.

    Returns:
        `[G, K, N]`. Empty groups have exact zeros. Rows in no group count for nothing, whatever values stand there.

    Raises:
        TypeError, ValueError: see `checks.check_grouped_gemm_wgrad`.
    """
    result = check_grouped_gemm_wgrad(A_packed, d_out, group_offsets, out_dtype, reference=True)
    compute = result if A_packed.dtype == d_out.dtype == result else _accumulation_dtype(A_packed, d_out)
    offsets = clamp_offsets(group_offsets, A_packed.shape[0]).tolist()
    if len(offsets) == 1:
        # One empty product keeps the result differentiable in both operands.
        return (A_packed[:0].T @ d_out[:0].to(A_packed.dtype)).to(result).expand(0, -1, -1)
    sizes = [end - start for start, end in pairwise(offsets)]
    split_A, split_d = (torch.split(x[offsets[0] : offsets[-1]], sizes) for x in (A_packed, d_out))
    products = [(a.to(compute).T @ d.to(compute)).to(result) for a, d in zip(split_A, split_d, strict=True)]
    return torch.stack(products)


def grouped_mm(
    mat_a: Tensor,  # [M, K] or [G, M, K]
    mat_b: Tensor,  # [G, K, N] or [K, N]
    *,
    offs: Tensor | None = None,  # [G]
    bias: Tensor | None = None,  # [G, N]
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`torch.nn.functional.grouped_mm`.

        [M, K]    x [G, K, N]  ->  [M, N]        the rows of mat_a are grouped
        [M, K]    x [K, N]     ->  [G, M, N]     the contraction is grouped
        [G, M, K] x [K, N]     ->  [M, N]        the columns of mat_b are grouped
        [G, M, K] x [G, K, N]  ->  [G, M, N]     without offs

    Args:
        mat_a, mat_b: as above, any strides.
        offs: `[G]` int32 or int64, the inclusive ends of the groups.
        bias: `[G, N]`, for the first form only, added to each row of its group in float32 (float64 if an argument
            is) before the result is rounded. It does not change the result's dtype.
        out_dtype: of the result; None is `torch.promote_types(mat_a.dtype, mat_b.dtype)`.

    Returns:
        As above. Rows or columns in no group are exact zeros, without a bias.

    Raises:
        TypeError, ValueError: see `checks.check_grouped_mm`.
    """
    result = check_grouped_mm(mat_a, mat_b, offs, bias, out_dtype, reference=True)
    if offs is None:
        compute = result if mat_a.dtype == mat_b.dtype == result else _accumulation_dtype(mat_a, mat_b)
        return torch.bmm(mat_a.to(compute), mat_b.to(compute)).to(result)
    group_offsets = group_offsets_from_offs(offs)
    if mat_b.dim() == 2:
        if mat_a.dim() == 2:
            return grouped_gemm_wgrad(mat_a.T, mat_b, group_offsets, out_dtype=result)
        return grouped_gemm(mat_b.T, mat_a.mT, group_offsets, out_dtype=result).T
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


def route(topk_ids: Tensor, gates: Tensor, num_experts: int) -> Routing:
    """Sort the slots of `topk_ids [T, top_k]` by expert; see `moe_kernels.route`. Without a sync.

    Raises:
        TypeError, ValueError: see `checks.check_route`.
    """
    from .routing import Routing  # imports this module

    check_route(topk_ids, gates, num_experts)
    ids = topk_ids.reshape(-1)
    experts = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    experts, row_to_slot = torch.sort(experts, stable=True)
    starts = torch.arange(num_experts + 1, device=ids.device, dtype=ids.dtype)
    group_offsets = torch.searchsorted(experts, starts, out_int32=True)
    rows = torch.arange(ids.numel(), device=ids.device, dtype=torch.int32)
    slot_to_row = torch.empty_like(rows).scatter_(0, row_to_slot, rows)
    return Routing(group_offsets, row_to_slot.to(torch.int32), slot_to_row, gates)


def permute(hidden: Tensor, routing: Routing) -> Tensor:  # [T, H] -> [R, H]
    """Copy each token's row to the rows of its slots; see `moe_kernels.permute`.

    Raises:
        TypeError, ValueError: see `checks.check_permute`.
    """
    check_permute(hidden, routing)
    top_k = routing.gates.size(1)
    return scatter_rows(hidden, None, routing.slot_to_row, routing.group_offsets, top_k, hidden.dtype)


def unpermute(rows: Tensor, routing: Routing, *, weighted: bool = True) -> Tensor:  # [R, H] -> [T, H]
    """Add up each token's rows, weighted by its gates; see `moe_kernels.unpermute`.

    Raises:
        TypeError, ValueError: see `checks.check_unpermute`.
    """
    check_unpermute(rows, routing)
    gates = routing.gates if weighted else None
    top_k = routing.gates.size(1)
    return combine_rows(rows, gates, routing.slot_to_row, routing.group_offsets, top_k, rows.dtype)


def scatter_rows(
    tokens: Tensor,  # [T, H]
    gates: Tensor | None,  # [T, top_k]
    slot_to_row: Tensor,  # [R]
    group_offsets: Tensor,  # [E + 1]
    top_k: int,
    out_dtype: torch.dtype,
) -> Tensor:  # [R, H]
    """`rows[slot_to_row[s]] = gates[s] * tokens[s // top_k]`; zeros for the rows at and past group_offsets[-1]."""
    slots = tokens.repeat_interleave(top_k, dim=0)
    if gates is not None:
        compute = _accumulation_dtype(tokens, gates)
        slots = slots.to(compute) * gates.reshape(-1, 1).to(compute)
    row_to_slot = torch.empty_like(slot_to_row, dtype=torch.int64)
    row_to_slot[slot_to_row.long()] = torch.arange(len(slot_to_row), device=tokens.device)
    return _kept(slots, slot_to_row, group_offsets)[row_to_slot].to(out_dtype)


def combine_rows(
    rows: Tensor,  # [R, H]
    gates: Tensor | None,  # [T, top_k]
    slot_to_row: Tensor,  # [R]
    group_offsets: Tensor,  # [E + 1]
    top_k: int,
    out_dtype: torch.dtype,
) -> Tensor:  # [T, H]
    """`tokens[t] = sum over k of gates[t, k] * rows[slot_to_row[t * top_k + k]]`, less rows past group_offsets[-1]."""
    compute = _accumulation_dtype(rows) if gates is None else _accumulation_dtype(rows, gates)
    slots = rows[slot_to_row.long()].to(compute)
    if gates is not None:
        slots = slots * gates.reshape(-1, 1).to(compute)
    slots = _kept(slots, slot_to_row, group_offsets).view(-1, top_k, rows.shape[1])
    # Not sum(1): the order of its additions is not specified.
    total = torch.zeros_like(slots[:, 0])
    for k in range(top_k):
        total = total + slots[:, k]
    return total.to(out_dtype)


def dot_rows(
    tokens: Tensor,  # [T, H]
    rows: Tensor,  # [R, H]
    slot_to_row: Tensor,  # [R]
    group_offsets: Tensor,  # [E + 1]
    top_k: int,
    out_dtype: torch.dtype,
) -> Tensor:  # [T, top_k]
    """`dots[s] = <tokens[s // top_k], rows[slot_to_row[s]]>`; zero for slots past group_offsets[-1]."""
    compute = _accumulation_dtype(tokens, rows)
    products = tokens.to(compute).repeat_interleave(top_k, dim=0) * rows[slot_to_row.long()].to(compute)
    return _kept(products, slot_to_row, group_offsets).sum(1).view(-1, top_k).to(out_dtype)


def _kept(slots: Tensor, slot_to_row: Tensor, group_offsets: Tensor) -> Tensor:
    """`slots [R, H]` in the order of slots, with zeros for the dropped ones, whatever values stand there."""
    kept = (slot_to_row < group_offsets[-1]).unsqueeze(1)
    return torch.where(kept, slots, torch.zeros_like(slots))


def _accumulation_dtype(*operands: Tensor) -> torch.dtype:
    return torch.float64 if any(operand.dtype == torch.float64 for operand in operands) else torch.float32
