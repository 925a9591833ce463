"""uniform_grouped_gemm and varied_grouped_gemm."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_kernels import reference, rules
from moe_kernels.ops.library import check_rows, define, save_operands, use_kernels
from moe_kernels.rules import varied as varied_rules
from moe_kernels.runtime import cache, targets, torch_internals
from moe_kernels.runtime.signature import Counts, Operator
from moe_kernels.schedule import tile_counts

UNIFORM_GROUPED_GEMM = Operator(
    "uniform_grouped_gemm", "moe_kernels.kernels.uniform_gemm", ("A", "B"), (), lambda *_: Counts(0)
)
VARIED = Operator(
    "varied",
    planner="moe_kernels.kernels.varied_gemm",
    inputs=("ends", "num_tiles", "table", "A", "B", "out"),
    rows=("ends", "table"),
)


def _uniform_grouped_gemm(
    A: Tensor,  # [G, M, K]
    B: Tensor,  # [G, K, N]
    out_dtype: torch.dtype,
) -> Tensor:  # [G, M, N]
    if not use_kernels(A, B):
        return reference.uniform_grouped_gemm(A, B, A.size(0), out_dtype=out_dtype)
    return cache.call(UNIFORM_GROUPED_GEMM, (A, B), (A.size(0), out_dtype))


def _uniform_backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    A, B = ctx.saved_tensors
    a_dtype, b_dtype = ctx.dtypes
    need_A, need_B, *_ = torch_internals.asked_gradients(ctx)
    dA = uniform_grouped_gemm(d_out, B.transpose(1, 2), a_dtype) if need_A else None
    dB = uniform_grouped_gemm(A.transpose(1, 2), d_out, b_dtype) if need_B else None
    return dA, dB, None


def _varied_grouped_gemm(
    group_A: Sequence[Tensor],  # P of [M_p, K_p]
    group_B: Sequence[Tensor],  # P of [K_p, N_p]
) -> list[Tensor]:  # P of [M_p, N_p]
    if not use_kernels(group_A[0]):
        return reference.varied_grouped_gemm(group_A, group_B)
    outs = _varied_fake(group_A, group_B)
    varied_launch(group_A, group_B, outs)()
    return outs


def _varied_fake(group_A: Sequence[Tensor], group_B: Sequence[Tensor]) -> list[Tensor]:
    return [a.new_empty((a.size(0), b.size(1))) for a, b in zip(group_A, group_B, strict=True)]


def _varied_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    group_A, group_B = inputs
    # Unlike in the backward, the flags of both lists are one after the other.
    needs_A, needs_B = ctx.needs_input_grad[: len(group_A)], ctx.needs_input_grad[len(group_A) :]
    kept_A = [a if needed else None for a, needed in zip(group_A, needs_B, strict=False)]
    ctx.save_for_backward(*kept_A, *(b if needed else None for b, needed in zip(group_B, needs_A, strict=True)))
    ctx.set_materialize_grads(False)


def _varied_backward(ctx: Any, d_outs: Sequence[Tensor | None]) -> tuple[list[Tensor | None], ...]:
    P = len(d_outs)
    saved = ctx.saved_tensors  # read once: activation checkpointing unpacks them only once
    A, B = saved[:P], saved[P:]
    grads: tuple[list[Tensor | None], ...] = ([None] * P, [None] * P)
    reached = [(p, d_out) for p, d_out in enumerate(d_outs) if d_out is not None]
    need_A, need_B = torch_internals.asked_gradients(ctx)
    dA = [(p, d_out, B[p].t()) for p, d_out in reached if need_A[p]]
    dB = [(p, A[p].t(), d_out) for p, d_out in reached if need_B[p]]
    for found, products in zip(grads, (dA, dB), strict=True):
        if products:
            places, left, right = zip(*products, strict=True)
            for p, grad in zip(places, varied_grouped_gemm(list(left), list(right)), strict=True):
                found[p] = grad
    return grads


def _varied_pair_by_pair(group_A: Sequence[Tensor], group_B: Sequence[Tensor]) -> list[Tensor]:
    pairs = zip(group_A, group_B, strict=True)
    return [uniform_grouped_gemm(a.unsqueeze(0), b.unsqueeze(0), a.dtype).squeeze(0) for a, b in pairs]


uniform_grouped_gemm = define(
    _uniform_grouped_gemm,
    lambda A, B, out_dtype: A.new_empty((A.size(0), A.size(1), B.size(2)), dtype=out_dtype),
    lambda ctx, inputs, output: save_operands(ctx, *inputs[:2]),
    _uniform_backward,
)
varied_grouped_gemm = define(_varied_grouped_gemm, _varied_fake, _varied_setup, _varied_backward, _varied_pair_by_pair)


def varied_launch(
    group_A: Sequence[Tensor], group_B: Sequence[Tensor], outs: Sequence[Tensor], wait: bool = False
) -> Callable[..., None]:
    """Return the function that writes the products to `outs`, or to the same parts of a buffer passed to it.

    Raises:
        ValueError: a tensor is a negated view, or has no memory, such as one that wraps another.
        RuntimeError: in the capture of a CUDA graph.
    """
    for name, tensors in {"group_A": group_A, "group_B": group_B, "out": outs}.items():
        for p, tensor in enumerate(tensors):
            if tensor.is_neg():
                raise ValueError(
                    f"{name}[{p}]: expected a tensor as it is in memory, got a negated view: resolve_neg()"
                )
            fake = not tensor.is_meta and torch_internals.has_no_values(tensor)
            if fake or not torch_internals.has_memory(tensor):
                raise ValueError(
                    f"{name}[{p}]: expected a tensor with memory, which a plan and out= need, got "
                    f"{type(tensor).__name__} without: pass the tensor that it wraps, or a copy"
                )
    first = group_A[0]
    problems = [(a, b, o) for a, b, o in zip(group_A, group_B, outs, strict=True) if o.numel()]
    if not problems:
        return lambda *_: None
    group_A, group_B, outs = zip(*problems, strict=True)

    capturing = torch.cuda.is_current_stream_capturing if first.is_cuda else lambda: False
    if capturing():
        raise RuntimeError(
            "varied_grouped_gemm: its copy to the device cannot be captured in a CUDA graph; "
            "make a plan_varied_grouped_gemm beforehand and capture a call of it"
        )
    with torch_internals.entered(first):
        # VariedLaunch chooses its config outside the plan cache, whose fallback does not cover that choice.
        launch = rules.with_fallback(lambda: VariedLaunch(group_A, group_B, outs, wait))
        if first.is_cpu:
            return launch
        streams = {torch.accelerator.current_stream()}  # that the allocator knows to read the table

    def on_device(*buffer: Tensor) -> None:
        with torch_internals.entered(first):
            stream = torch.accelerator.current_stream()
            if stream not in streams and not capturing():
                launch.table.record_stream(stream)  # it may be freed while this call still reads it
                streams.add(stream)
            launch(*buffer)

    return on_device


class VariedLaunch:
    """A table on the device and the kernel that walks it; calling the object launches the kernel.

    `group_A`, `group_B`, `outs`: `[M_p, K_p]`, `[K_p, N_p]`, `[M_p, N_p]`, of one dtype and device, unchecked. M_p and
    N_p may not be 0. All tensors are read and written in place, without copies.
    """

    def __init__(
        self,
        group_A: Sequence[Tensor],
        group_B: Sequence[Tensor],
        outs: Sequence[Tensor],
        wait: bool = False,  # block until the table is on the device, so that launches from any stream see it
    ):
        shapes = tuple((a.size(0), b.size(1), a.size(1)) for a, b in zip(group_A, group_B, strict=True))
        check_rows("group_A", max(M for M, _, _ in shapes))
        self.kept = group_A, group_B, outs  # kept alive, because the table holds their addresses
        lists, first = (group_A, group_B, outs), outs[0]
        bases = [next((tensor for tensor in tensors if tensor.numel()), first) for tensors in lists]
        most = 16 // first.element_size()
        described = [_in_memory(tensors, base, most) for tensors, base in zip(lists, bases, strict=True)]
        places, contiguous, units = zip(*described, strict=True)
        extent_units = [math.gcd(most, *extents) for extents in zip(*shapes, strict=True)]  # of M, N, K
        layout = varied_rules.Layout(*contiguous, *units, *extent_units)
        aligned = layout.contiguous_a < 2 and layout.contiguous_b < 2 and layout.unit_a == layout.unit_b == most
        gpu = targets.of_tensor(first)
        problem = varied_rules.Problem(
            shapes,
            first.dtype,
            aligned,
            b_columns=layout.contiguous_b == 0,
            num_sms=gpu.multiprocessors,
            tf32=rules.tf32_allowed(first.dtype),
            gpu=gpu,
        )
        choice = varied_rules.choose(problem)
        blocks = choice.block_m, choice.block_n
        counts = tile_counts(shapes, *blocks)
        ends = list(itertools.accumulate(m * n for m, n in counts))
        records = [ends[-1], 0]
        m_unit, n_unit, k_unit = extent_units
        for (M, N, K), (m, n), end, a, b, out in zip(shapes, counts, ends, *places, strict=True):
            records += (M // m_unit, N // n_unit, K // k_unit, end - m * n, n, *a, *b, *out, 0, 0)
        P = len(shapes)
        # Each part begins at a multiple of 16 bytes, whatever P.
        self.table = _on_device(records + ends, first.device, wait)
        total, table, ends_ = self.table.split_with_sizes([2, 16 * P, P])
        self.tensors = (ends_, total.select(0, 0), table.view(P, 16), *(base.as_strided((1,), (1,)) for base in bases))
        self.run = cache.find(VARIED, self.tensors, (layout, *blocks, choice.config))

    def __call__(self, buffer: Tensor | None = None) -> None:
        """Launch the kernel; `buffer [_]`, if given, replaces the buffer that all of `outs` are parts of."""
        *inputs, out = self.tensors
        self.run(*inputs, out if buffer is None else buffer)


def _in_memory(tensors: Sequence[Tensor], base: Tensor, most: int) -> tuple[list[tuple[int, int, int]], int, int]:
    """Return (offset from `base`, *strides) of each matrix; the dimension that is contiguous in all, or 2; and the unit
    of these numbers in elements: the largest common divisor, up to `most`, of those that the kernel uses. If both
    dimensions are contiguous, as those of vectors, it is the one with the larger unit.
    """
    size, origin = base.element_size(), base.data_ptr()
    places: list[tuple[int, int, int]] = []
    candidates = {0, 1}
    for tensor in tensors:
        (rows, columns), (down, right) = tensor.shape, tensor.stride()
        if rows == 0 or columns == 0:
            places.append((0, 0, 0))
            continue
        # The stride of a dimension of size 1 is irrelevant.
        if rows == 1:
            down = 0
        elif down != 1:
            candidates.discard(0)
        if columns == 1:
            right = 0
        elif right != 1:
            candidates.discard(1)
        places.append(((tensor.data_ptr() - origin) // size, down, right))
    units = [(math.gcd(most, *[p[0] for p in places], *[p[2 - d] for p in places]), d) for d in candidates]
    unit, contiguous = max(units, default=(1, 2))
    return [(offset // unit, down // unit, right // unit) for offset, down, right in places], contiguous, unit


def _on_device(values: list[int], device: torch.device, wait: bool) -> Tensor:
    """Copy `values` to `device` as int64, in one copy; block until it is done if `wait`."""
    if device.type == "cpu" or wait:
        return torch.tensor(values, dtype=torch.int64, device=device)
    # On the CPU also under `torch.set_default_device`: a copy that torch.tensor makes to another device blocks.
    pinned = torch.tensor(values, dtype=torch.int64, device="cpu", pin_memory=True)
    return pinned.to(device, non_blocking=True)
