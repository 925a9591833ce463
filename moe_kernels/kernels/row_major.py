"""Row-major copies of operands that TMA cannot read as they are."""

from __future__ import annotations

from dataclasses import replace

import helion.language as hl
import torch

from moe_kernels import rules
from moe_kernels.kernels.declare import kernel, tma_readable
from moe_kernels.runtime.plan import Builder
from moe_kernels.runtime.signature import FEW_TOKENS
from moe_kernels.runtime.symbolic import SymbolicTensor, contiguous_strides, least, needs_int64


@kernel()
def copy_row_major(
    x: torch.Tensor,  # [M, C]
    copy: torch.Tensor,  # [M, C], contiguous, written
) -> torch.Tensor:
    """Copy a matrix by square tiles, whose rows and columns both fill cache lines."""
    for tile_m, tile_c in hl.tile(x.size()):
        copy[tile_m, tile_c] = x[tile_m, tile_c]
    return copy


def row_major(builder: Builder, x: SymbolicTensor) -> SymbolicTensor:
    """Return `x [M, C]`, or a row-major copy if TMA can read only the copy, and M is large.

    Products that read a transposed or expanded operand through pointers take several times as long.
    """
    copied = replace(x, strides=contiguous_strides(x.shape), aligned=True)
    large = x.element_size() == 2 and least(x.size(0)) > FEW_TOKENS
    if not large or tma_readable(builder.gpu, x) or not tma_readable(builder.gpu, copied):
        return x
    copy = builder.alloc(x.shape, x.dtype)
    builder.launch(copy_row_major, (x, copy), rules.ROW_MAJOR, int64_index=needs_int64(x, copy))
    return copy
