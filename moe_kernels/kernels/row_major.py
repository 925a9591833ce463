"""Row-major copies of operands that TMA cannot read as they are."""

from __future__ import annotations

from dataclasses import replace

import helion.language as hl
import torch

from moe_kernels import rules
from moe_kernels.kernels.declare import kernel, tma_readable
from moe_kernels.runtime.plan import Builder
from moe_kernels.runtime.signature import FEW_TOKENS
from moe_kernels.runtime.symbolic import SymbolicTensor, least, lies_transposed, needs_int64

LONG = 65  # Products that contract fewer columns are bound by the traffic of their results.


@kernel()
def copy_row_major(
    x: torch.Tensor,  # [G, M, C]
    copy: torch.Tensor,  # [G, M, P], P the next multiple of 16; written, with zeros in the columns from C on
) -> torch.Tensor:
    """Copy matrices."""
    C = x.size(2)
    for tile_g, tile_m, tile_c in hl.tile(copy.size(), block_size=[1, None, None]):
        inside = (tile_c.index < C)[None, None, :]
        copy[tile_g, tile_m, tile_c] = hl.load(x, [tile_g, tile_m, tile_c], extra_mask=inside)
    return copy


def row_major(builder: Builder, *operands: SymbolicTensor, shortest: int = 16) -> tuple[SymbolicTensor, ...]:
    """Return `operands`, each `[M, C]` or `[G, M, C]`, with row-major copies where these let TMA read all of them.

    Products that read operands through pointers take several times as long. Few rows are not copied, nor are rows of
    less than `shortest` elements that are no multiple of 16 bytes: that takes as long as it saves.
    """
    gpu = builder.gpu
    if not gpu.has_tma or not all([tma_readable(gpu, x) or _large(x, shortest) for x in operands]):
        return operands
    return tuple([x if tma_readable(gpu, x) else row_major_copy(builder, x) for x in operands])


def weights_row_major(builder: Builder, A: SymbolicTensor, B: SymbolicTensor, G: int) -> SymbolicTensor:
    """Return `B [_, R, C]`, the weights of a product of `A [M, _]` in G groups, or their row-major copy.

    With few rows per group, the copy takes longer than it saves. Weights expanded from one matrix are not copied, since
    the copy would need G times their memory.
    """
    many = least(A.size(0)) // G >= rules.ROW_MAJOR_WEIGHTS_FROM_ROWS
    worthwhile = many and A.element_size() <= 2 and B.stride(0) != 0
    return row_major(builder, B, shortest=LONG)[0] if worthwhile else B


def _large(x: SymbolicTensor, shortest: int) -> bool:
    C = x.size(-1)
    whole = C > 0 and C * x.element_size() % 16 == 0
    return x.element_size() <= 2 and least(x.size(-2)) > FEW_TOKENS and (whole or shortest <= C)


def row_major_copy(builder: Builder, x: SymbolicTensor) -> SymbolicTensor:
    """Return a copy of `x [M, C]` or `[G, M, C]`, with rows that begin at multiples of 16 bytes."""
    *outer, C = x.shape
    copy = builder.alloc((*outer, -(-C // 16) * 16), x.dtype)
    matrices = [replace(y if y.dim() == 3 else y.unsqueeze(0), few_groups=True) for y in (x, copy)]
    config = rules.TRANSPOSED_ROWS if lies_transposed(x) else rules.WHOLE_ROWS
    builder.launch(copy_row_major, tuple(matrices), config, int64_index=needs_int64(*matrices))
    return copy.narrow(-1, 0, C)
