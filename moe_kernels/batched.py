"""Grouped GEMMs of separate matrices: uniform (all groups of one size) and varied (each pair of its own size)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from moe_kernels import checks, ops, reference
from moe_kernels.ops.batched import UNIFORM_GROUPED_GEMM, varied_launch
from moe_kernels.ops.library import use_kernels, without_autocast
from moe_kernels.runtime import cache, torch_internals
from moe_kernels.runtime.torch_internals import autocast


def uniform_grouped_gemm(
    A: Tensor,  # [G * M, K] or [G, M, K]
    B: Tensor,  # [G * K, N] or [G, K, N]
    num_groups: int,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply groups of one size: `out[g] = A[g] @ B[g]`, in one launch.

    Products are accumulated in float32, those of float64 in float64. NaN or infinity in one group never reaches another
    group's result. A call can be captured in a CUDA graph. Gradients of any order are supported.

    `torch.bmm` computes the result where cuBLAS is faster: for more than 64 columns, for many rows with fewer than 16
    columns, in float32, and where TMA cannot read the operands. It is not used where it would copy an operand or does
    not support the dtypes.

    Args:
        A: `[G, M, K]`, or `[G * M, K]` with the groups one below the other; bfloat16, float16 or float32, on a CPU
            also float64; any strides.
        B: `[G, K, N]` or `[G * K, N]`; dtypes and strides as for `A`.
        num_groups: `G`.
        out_dtype: dtype of the result; by default `torch.promote_types(A.dtype, B.dtype)`.

    Returns:
        `[G, M, N]` for a 3-D `A`, `[G * M, N]` for a 2-D one; contiguous.

    Raises:
        TypeError, ValueError: an argument has a wrong dtype, or a wrong rank, shape or device.
        ImportError: the kernels are needed, and a package they need is missing or does not work with the others.
    """
    given, requested = (A, B), (type(num_groups), num_groups, out_dtype)
    if (known := cache.repeat(UNIFORM_GROUPED_GEMM, given, requested)) is not None:
        return known
    A, B = autocast(A, B)
    dtype = checks.check_uniform(A, B, num_groups, out_dtype)
    if use_kernels(A, B) and torch_internals.can_bypass_dispatcher(A, B):
        out: Tensor = cache.call(UNIFORM_GROUPED_GEMM, (A, B), (num_groups, dtype))
        cache.remember(UNIFORM_GROUPED_GEMM, given, requested, (num_groups, dtype))
        return out
    G = num_groups
    a = A if A.dim() == 3 else A.view(G, A.size(0) // max(G, 1), A.size(1))
    b = B if B.dim() == 3 else B.view(G, A.size(-1), B.size(1))
    recorded: Tensor = ops.uniform_grouped_gemm(a, b, dtype)
    return recorded if A.dim() == 3 else torch_internals.reshaped(recorded, (A.size(0), B.size(-1)))


def varied_grouped_gemm(
    group_A: Sequence[Tensor],  # P of [M_p, K_p]
    group_B: Sequence[Tensor],  # P of [K_p, N_p]
    *,
    out: Sequence[Tensor] | None = None,  # P of [M_p, N_p]
) -> list[Tensor]:
    """Multiply pairs of matrices in one launch, each pair of its own size: `out[p] = group_A[p] @ group_B[p]`.

    Products are accumulated in float32, those of float64 in float64. NaN or infinity in one pair never reaches another
    pair's result. Every call copies a table of addresses to the device; `plan_varied_grouped_gemm` copies it once, and
    its plan can be captured in a CUDA graph. Without `out`, gradients of any order are supported.

    Args:
        group_A: list of `[M_p, K_p]`; all tensors have one device and one dtype: bfloat16, float16 or float32, on a CPU
            also float64. Sizes may be 0; any strides.
        group_B: list of `[K_p, N_p]`.
        out: list of `[M_p, N_p]` to write to, any strides; by default new tensors. No element may be shared with
            another tensor of `out` or with an operand, which is not checked. With `out`, as for PyTorch's functions,
            autocast does not convert operands.

    Returns:
        list of `[M_p, N_p]`: `out`, or new contiguous tensors.

    Raises:
        TypeError, ValueError: an argument has a wrong dtype, or a wrong rank, shape or device.
        ImportError: the kernels are needed, and a package they need is missing or does not work with the others.
        RuntimeError: the call is captured in a CUDA graph; or `out` is given, and a tensor requires grad outside of
            `torch.no_grad()`, or has a forward-mode tangent, or `torch.vmap` transforms the call, as for `torch.mm`.
    """
    if out is None and isinstance(group_A, (list, tuple)) and isinstance(group_B, (list, tuple)):
        cast = autocast(*group_A, *group_B)
        group_A, group_B = cast[: len(group_A)], cast[len(group_A) :]
    if out is not None:
        return torch_internals.outside_graphs(_READS_ADDRESSES, _varied_to, group_A, group_B, out)
    checks.check_varied(group_A, group_B, None)
    return ops.varied_grouped_gemm(list(group_A), list(group_B)) if group_A else []


_READS_ADDRESSES = (
    "varied_grouped_gemm(out=) and its plans read addresses on the host, which fullgraph=True and torch.export rule "
    "out: call varied_grouped_gemm without out= there"
)


def _varied_to(group_A: Sequence[Tensor], group_B: Sequence[Tensor], out: Sequence[Tensor]) -> list[Tensor]:
    checks.check_varied(group_A, group_B, out)
    if not group_A:
        return []
    if use_kernels(group_A[0]):
        varied_launch(group_A, group_B, out)()
        torch.autograd.graph.increment_version(out)  # with which autograd detects writes to what it has saved
    else:
        reference.varied_grouped_gemm(group_A, group_B, out=out)
    return list(out)


def plan_varied_grouped_gemm(
    group_A: Sequence[Tensor],  # P of [M_p, K_p]
    group_B: Sequence[Tensor],  # P of [K_p, N_p]
    *,
    out: Sequence[Tensor] | None = None,  # P of [M_p, N_p]
) -> Callable[[], list[Tensor]]:
    """Return a plan: a function that computes `varied_grouped_gemm(group_A, group_B, out=out)` for these tensors.

    A call of the plan reads the current values of the tensors. It costs one launch and, without `out`, the allocation
    of one buffer for all results. It can be captured in a CUDA graph, which it has to outlive, as it keeps the tensors
    alive. It gives no gradients, and torch.compile runs it outside of its graphs. Arguments and errors are those of
    `varied_grouped_gemm`; ValueError also if autocast would cast an operand, and RuntimeError if an operand has a
    forward-mode tangent, or in a transform of torch.func.
    """
    return torch_internals.outside_graphs(_READS_ADDRESSES, _planned, group_A, group_B, out)


def _planned(
    group_A: Sequence[Tensor], group_B: Sequence[Tensor], out: Sequence[Tensor] | None
) -> Callable[[], list[Tensor]]:
    checks.check_varied(group_A, group_B, out)
    checks.check_planned((*group_A, *group_B))
    if not group_A:
        return list
    if out is None and any(cast is not given for given in (*group_A, *group_B) for cast in autocast(given)):
        raise ValueError(
            "plan_varied_grouped_gemm: autocast would convert the operands, and a plan reads the tensors that it was "
            f"given: convert them with .to({torch.get_autocast_dtype(group_A[0].device.type)}), or leave autocast"
        )
    return _Plan([a.detach() for a in group_A], [b.detach() for b in group_B], None if out is None else list(out))


class _Plan:
    """A launch for fixed tensors, and the layout of the results in one buffer; or the tensors for the reference."""

    def __init__(self, group_A: Sequence[Tensor], group_B: Sequence[Tensor], out: list[Tensor] | None):
        self.tensors = group_A, group_B
        self.out = out
        self.reference: Callable[[], list[Tensor]] | None = None
        if not use_kernels(group_A[0]):
            self.reference = partial(without_autocast(reference.varied_grouped_gemm), group_A, group_B, out=out)
            return
        self.shapes = [(a.size(0), b.size(1)) for a, b in zip(group_A, group_B, strict=True)]
        unit = 16 // group_A[0].element_size()
        sizes = [M * N + -M * N % unit for M, N in self.shapes]  # padded: each result begins at a multiple of 16 bytes
        self.starts = list(itertools.accumulate(sizes, initial=0))
        self.new_buffer = partial(torch.empty, self.starts[-1], dtype=group_A[0].dtype, device=group_A[0].device)
        if out is not None:
            self.launch = varied_launch(group_A, group_B, out, wait=True)
            return
        buffer = self.new_buffer()
        self.launch = varied_launch(group_A, group_B, self._parts(buffer), wait=True)
        buffer.untyped_storage().resize_(0)  # the launch keeps its parts, and each call has a buffer of its own

    def _parts(self, buffer: Tensor) -> list[Tensor]:
        with torch_internals.below_autograd():  # which sees no views, so changing one part does not invalidate another
            places = zip(self.shapes, self.starts, strict=False)
            return [buffer.as_strided((M, N), (max(N, 1), 1), start) for (M, N), start in places]

    def __call__(self) -> list[Tensor]:
        return torch_internals.outside_graphs(_READS_ADDRESSES, self._checked)

    def _checked(self) -> list[Tensor]:
        if self.out is not None:
            checks.check_out({"out": self.out})
        run = self.reference or self._launched
        if not torch_internals.wrapped():
            return run()
        with torch_internals.without_transforms():  # in which a buffer would have no memory of its own
            return run()

    def _launched(self) -> list[Tensor]:
        if self.out is not None:
            self.launch()
            torch.autograd.graph.increment_version(self.out)
            return list(self.out)
        buffer = self.new_buffer()
        self.launch(buffer)
        return self._parts(buffer)
