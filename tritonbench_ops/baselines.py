"""The baselines of our operators and of `benchmarks`: PyTorch and peers.

Each function takes an operator's inputs and returns the call to time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from moe_kernels.timing import Call
from tritonbench_ops import peers


@dataclass(frozen=True)
class Provider:
    """One way to compute an operator."""

    label: str
    make: Callable[[Any], Call]  # an operator's inputs -> the call to time; the preparation is not timed
    package: str | None = None  # package of another project; if it is missing, the provider is skipped
    by_default: bool = True  # False: runs only if named, because it is slow to prepare
    ours: bool = False
    same_result: bool = True  # False for a yardstick that computes something else
    any_rows: bool = True  # False if prepared for one number of rows, which takes seconds or minutes
    graphs: bool = True  # False if a call cannot be captured into a CUDA graph
    moved: Callable[[Any], int] | None = None  # an operator's inputs -> bytes moved, if not those of the operator
    result: Callable[[Any, Any], Any] = lambda inputs, made: made  # the operator's result, from what the call returns

    @property
    def installed(self) -> bool:
        return self.package is None or find_spec(self.package) is not None


@dataclass(frozen=True)
class Inputs:
    """Inputs of a grouped GEMM."""

    A: Tensor  # [M, K]
    B: Tensor  # [G, K, N], or [K, N] for all groups
    group_offsets: Tensor  # [G + 1] int32
    sizes: list[int]

    @property
    def offs(self) -> Tensor:  # [G]
        return self.group_offsets[1:].contiguous()


@dataclass(frozen=True)
class ScaledInputs:
    """Inputs of a grouped GEMM in fp8, with a scale for each block, or one for each operand."""

    A: Tensor  # [M, K]
    B: Tensor  # [G, K, N], the transpose of [G, N, K]
    scales_A: Tensor  # [M, K / 128 rounded up], or [1]
    scales_B: Tensor  # [G, K / 128 rounded up, N / 128 rounded up], or [1]
    group_offsets: Tensor  # [G + 1] int32
    sizes: list[int]


def grouped_mm(inputs: Inputs) -> Call:
    offs = inputs.offs
    return lambda: torch._grouped_mm(inputs.A, inputs.B, offs)


def loop(inputs: Inputs) -> Call:
    """Return a loop of `torch.mm` over the nonempty groups, into one result."""
    out = inputs.A.new_empty(len(inputs.A), inputs.B.size(2))
    sizes = [*inputs.sizes, len(inputs.A) - sum(inputs.sizes)]
    groups = zip(torch.split(inputs.A, sizes), inputs.B, torch.split(out, sizes), strict=False)
    products = [(a, b, o) for a, b, o in groups if len(a)]

    def loop_of_mm() -> Tensor:
        for a, b, o in products:
            torch.mm(a, b, out=o)
        return out

    return loop_of_mm


def loop_over_list(group_A: Sequence[Tensor], group_B: Sequence[Tensor]) -> Call:
    """Return a loop of `torch.mm` over the pairs, into a list of results."""
    products = [(a, b, a.new_empty(len(a), b.size(1))) for a, b in zip(group_A, group_B, strict=True)]

    def loop_of_mm() -> list[Tensor]:
        for a, b, o in products:
            torch.mm(a, b, out=o)
        return [o for *_, o in products]

    return loop_of_mm


def dense(inputs: Inputs) -> Call:
    """Return one `torch.mm` of all rows: as many FLOPs, and the same product if all groups share `B`."""
    B = inputs.B if inputs.B.dim() == 2 else inputs.B[0]
    return lambda: torch.mm(inputs.A, B)


PEERS = {
    "quack": Provider("quack", peers.quack, "quack"),
    "quack-tuned": Provider("quack, tuned", peers.quack_tuned, "quack", by_default=False, any_rows=False),
    "deepgemm": Provider(
        "DeepGEMM, rows padded beforehand", peers.deep_gemm, "deep_gemm", result=peers.without_padding
    ),
    "triton_kernels": Provider(
        "triton_kernels, metadata made beforehand", peers.triton_kernels, "triton_kernels", result=peers.without_batch
    ),
}

FP8_PEERS = {  # by the formats of their operands
    "1x128 by 128x128": Provider(
        "DeepGEMM, 1x128 by 128x128", peers.deep_gemm_fp8, "deep_gemm", result=peers.without_padding
    ),
    "one scale": Provider(
        "triton_kernels, one scale per tensor", peers.triton_kernels_fp8, "triton_kernels", result=peers.without_batch
    ),
}
