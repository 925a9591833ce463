"""`varied_grouped_gemm` and its plans: check, choose, call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from moe_kernels import checks, reference
from moe_kernels.dispatch import autocast, use_kernels


def varied_grouped_gemm(
    group_A: Sequence[Tensor],  # P of [M_p, K_p]
    group_B: Sequence[Tensor],  # P of [K_p, N_p]
    *,
    out: Sequence[Tensor] | None = None,  # P of [M_p, N_p]
) -> list[Tensor]:
    """Multiply matrices pair by pair, `group_A[p] @ group_B[p]`, each pair of its own sizes, in one launch.

    Products are accumulated in fp32. Nothing of one pair reaches another's result. Where the matrices lie is copied to
    the device at every call; `plan_varied_grouped_gemm` does that once, and its plan can be captured into a CUDA graph.

    Args:
        group_A: list of `[M_p, K_p]`; all tensors of one dtype, bfloat16, float16 or float32, and on one device; any
            sizes, 0 among them, and any strides. On a CPU float64 too.
        group_B: list of `[K_p, N_p]`.
        out: list of `[M_p, N_p]` to write to, any strides; by default new tensors. Without gradients.

    Returns:
        list of `[M_p, N_p]`: `out`, or new contiguous tensors.

    Raises:
        TypeError, ValueError: an argument has a wrong dtype, or a wrong rank, shape or device.
        ImportError: the kernels are needed and a package they need is missing or too old.
        RuntimeError: the call is being captured into a CUDA graph.
    """
    if out is None and isinstance(group_A, (list, tuple)) and isinstance(group_B, (list, tuple)):
        cast = autocast(*group_A, *group_B)
        group_A, group_B = cast[: len(group_A)], cast[len(group_A) :]
    checks.check_varied(group_A, group_B, out)
    if not group_A:
        return []
    if out is not None:
        with torch.no_grad():
            if use_kernels(group_A[0]):
                _launch(group_A, group_B, out)()
                _changed(out)
            else:
                reference.varied_grouped_gemm(group_A, group_B, out=out)
        return list(out)
    from moe_kernels import ops  # imports this module

    outs: list[Tensor] = ops.varied_grouped_gemm(list(group_A), list(group_B))
    return outs


def plan_varied_grouped_gemm(
    group_A: Sequence[Tensor],  # P of [M_p, K_p]
    group_B: Sequence[Tensor],  # P of [K_p, N_p]
    *,
    out: Sequence[Tensor] | None = None,  # P of [M_p, N_p]
) -> Callable[[], list[Tensor]]:
    """Prepare `varied_grouped_gemm(group_A, group_B, out=out)` for these tensors, to be called any number of times.

    A call of the plan reads what the tensors then hold, and costs a launch, and without `out` the allocation of one
    buffer that the new results are parts of. It can be captured into a CUDA graph, gives no gradients, and keeps the
    tensors alive. Arguments and errors are those of `varied_grouped_gemm`.
    """
    checks.check_varied(group_A, group_B, out)
    if not group_A:
        return list
    group_A, group_B = [a.detach() for a in group_A], [b.detach() for b in group_B]
    out = None if out is None else list(out)
    if group_A[0].is_cpu and not use_kernels(group_A[0]):
        return partial(varied_grouped_gemm, group_A, group_B, out=out)
    return _Plan(group_A, group_B, out)


class _Plan:
    """The launch for these tensors, and where in one buffer the results go."""

    def __init__(self, group_A: Sequence[Tensor], group_B: Sequence[Tensor], out: list[Tensor] | None):
        self.tensors = group_A, group_B
        self.out = out
        self.shapes = [(a.size(0), b.size(1)) for a, b in zip(group_A, group_B, strict=True)]
        unit = 16 // group_A[0].element_size()
        # Each result begins at a multiple of 16 bytes.
        self.sizes = [size for M, N in self.shapes for size in (M * N, -M * N % unit)]
        self.new_buffer = partial(torch.empty, sum(self.sizes), dtype=group_A[0].dtype, device=group_A[0].device)
        self.launch = _launch(group_A, group_B, self._parts(self.new_buffer()) if out is None else out)

    def _parts(self, buffer: Tensor) -> list[Tensor]:
        # Unsafe in that autograd does not know that the parts are of one tensor: writing to one leaves the others be.
        parts = torch.unsafe_split_with_sizes(buffer, self.sizes)[::2]
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def __call__(self) -> list[Tensor]:
        if self.out is not None:
            self.launch()
            _changed(self.out)
            return list(self.out)
        buffer = self.new_buffer()
        self.launch(buffer)
        return self._parts(buffer)


def multiply(group_A: Sequence[Tensor], group_B: Sequence[Tensor]) -> list[Tensor]:
    """The products of checked lists that nobody records."""
    if not use_kernels(group_A[0]):
        return reference.varied_grouped_gemm(group_A, group_B)
    outs = [
        torch.empty((a.size(0), b.size(1)), dtype=a.dtype, device=a.device)
        for a, b in zip(group_A, group_B, strict=True)
    ]
    _launch(group_A, group_B, outs)()
    return outs


def _changed(tensors: Sequence[Tensor]) -> None:
    """Let autograd know that these were written to, in case it has saved one."""
    torch.autograd.graph.increment_version(tensors)


def _launch(group_A: Sequence[Tensor], group_B: Sequence[Tensor], outs: Sequence[Tensor]) -> Callable[..., None]:
    """What writes the products to `outs`, or to those parts of the buffer that it is given."""
    for name, tensors in {"group_A": group_A, "group_B": group_B, "out": outs}.items():
        for p, tensor in enumerate(tensors):
            if tensor.is_neg():
                raise ValueError(
                    f"{name}[{p}]: expected a tensor as it is in memory, got a negated view: resolve_neg()"
                )
    first = group_A[0]
    problems = [(a, b, o) for a, b, o in zip(group_A, group_B, outs, strict=True) if o.numel()]
    if not problems:
        return lambda *_: None
    group_A, group_B, outs = zip(*problems, strict=True)

    from moe_kernels.kernels.varied_gemm import Launch

    if first.is_cpu:
        return Launch(group_A, group_B, outs)
    module = torch.cuda if first.is_cuda else torch.xpu
    if first.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "varied_grouped_gemm: what it copies to the device cannot be captured into a CUDA graph; "
            "make a plan_varied_grouped_gemm beforehand and capture a call of it"
        )
    if first.device.index == module.current_device():
        return Launch(group_A, group_B, outs)
    with module.device(first.device):
        launch = Launch(group_A, group_B, outs)

    def elsewhere(*buffer: Tensor) -> None:
        with module.device(first.device):
            launch(*buffer)

    return elsewhere
