"""Configs of the kernels that quantise: 32 or 64 elements per thread, or 8 where they also compute an activation's
gradient, all loaded before they are used.
"""

from __future__ import annotations

from typing import Any

from moe_kernels.rules.config import Config
from moe_kernels.scaled import BLOCK

AT_ONCE = 16384  # the most elements of a row that a program holds
AT_ONCE_ALONE = 32768  # the same for a program that does nothing else than quantising rows
MOST_WITH_ONE_SCALE = 8192  # the most columns of gate with which the activation's backward pass quantises rows
_OF_A_PROGRAM = 4096
_OF_A_THREAD = 32
SQUARES = Config(block_sizes=[], num_warps=16)  # of `quantize_squares`, for blocks of 128 x 128
TRANSPOSED = Config(block_sizes=[64], num_warps=4)  # of `quantize_transposed`, for blocks of 128 rows and 64 columns


def one_pass(width: int, transposed: bool) -> Config:
    """The config of `quantize_parts`, with a scale for each row of a tile of `width` columns."""
    rows, columns, num_warps = _tile(width, transposed)
    return Config(block_sizes=[columns, rows], num_warps=num_warps)


def _tile(width: int, transposed: bool) -> tuple[int, int, int]:
    """Return the rows and columns that a program holds, and its warps."""
    columns = width_of_part(width, 1)
    # If rows are adjacent in memory (`transposed`), 64 of them fill a cache line.
    rows = max(64 if transposed else 1, _OF_A_PROGRAM // columns)
    of_a_thread = _OF_A_THREAD if transposed else 2 * _OF_A_THREAD
    return rows, columns, max(1, rows * columns // (32 * of_a_thread))


def finds_amax(weights: Any) -> bool:
    """Whether the amax of each column of "rowwise" weights `[E, N, K]`, by which columns are quantised, is found while
    rows are: if these are contiguous and not longer than AT_ONCE, and there are any.
    """
    return weights.stride(2) == 1 and 0 < weights.size(2) <= AT_ONCE and weights.size(1) > 0


def rows_and_amax(K: int, itemsize: int, shared_memory: int) -> Config:
    """The config of `quantize_rows_and_amax`: 128 rows per program, which are loaded up to 4 stages ahead."""
    rows, columns, num_warps = _tile(K, False)
    stages = max(1, min(4, shared_memory // (rows * columns * itemsize) - 1))
    return Config(block_sizes=[rows, columns, max(rows, 128)], num_warps=num_warps, range_num_stages=[0, stages])


def two_passes(transposed: bool) -> Config:
    """The config of `quantize_rows`, which reads rows twice: singly, or 64 at once if they are adjacent in memory."""
    rows, columns = (64, 64) if transposed else (1, _OF_A_PROGRAM)
    return Config(block_sizes=[rows, columns, columns], num_warps=rows * columns // (32 * _OF_A_THREAD))


def width_of_part(K: int, parts: int) -> int:
    """The columns, a power of two, of one part of a row that has 1 or ceil(K / 128) `parts`."""
    return BLOCK if parts > 1 else max(16, 1 << (K - 1).bit_length())


def parts_of_a_row(K: int, parts: int) -> Config:
    """The config of kernels with a program per row and block of its parts."""
    width = width_of_part(K, parts)
    block = min(max(1, _OF_A_PROGRAM // width), 1 << (parts - 1).bit_length())
    return Config(block_sizes=[block], num_warps=max(1, block * width // (32 * _OF_A_THREAD)))


def quantises_gradient(I: int, rowwise: bool, gated: bool, interleaved: bool) -> bool:  # noqa: E741
    """Whether `weighted_backward` quantises the gradient of preactivations, `[R, 2I]` if `gated`.

    Longer rows with one scale take longer than a kernel of their own. Elsewhere blocks of 128 must not have columns of
    both gate and up.
    """
    return I <= MOST_WITH_ONE_SCALE if rowwise else not gated or (I % BLOCK == 0 and not interleaved)


def weighted_backward(I: int, format: str | None) -> tuple[Config, int]:  # noqa: E741
    """The config of `weighted_backward`, and the columns of a part, which has one scale if there is a `format`."""
    width = BLOCK if format == "1x128" else width_of_part(I, 1)
    if format is None:
        width = min(1024, width)
    parts = min(max(1, 1024 // width), 1 << (-(-I // width) - 1).bit_length())
    return Config(block_sizes=[parts], num_warps=max(1, parts * width // 256)), width
