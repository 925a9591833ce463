"""Configs of the kernels that quantise: 32 or 64 elements to a thread, which reads them all ahead of their use."""

from __future__ import annotations

from moe_kernels.rules.config import Config
from moe_kernels.scaled import BLOCK

AT_ONCE = 16384  # elements of a row that a program holds
_OF_A_PROGRAM = 4096
_OF_A_THREAD = 32


def one_pass(width: int, transposed: bool) -> Config:
    """For tiles of this width, in which a row's part has a scale."""
    columns = width_of_part(width, 1)
    # Where rows lie next to each other in memory, 64 of them are a line of it.
    rows = max(64 if transposed else 1, _OF_A_PROGRAM // columns)
    of_a_thread = _OF_A_THREAD if transposed else 2 * _OF_A_THREAD
    return Config(block_sizes=[columns, rows], num_warps=max(1, rows * columns // (32 * of_a_thread)))


def two_passes(transposed: bool) -> Config:
    """For rows that are read twice: one by one, or several where they lie next to each other in memory."""
    rows, columns = (64, 64) if transposed else (1, _OF_A_PROGRAM)
    return Config(block_sizes=[rows, columns, columns], num_warps=rows * columns // (32 * _OF_A_THREAD))


def width_of_part(K: int, parts: int) -> int:
    """The columns, a power of two, that hold a part of a row in 1 or ceil(K / 128) `parts`."""
    return BLOCK if parts > 1 else max(16, 1 << (K - 1).bit_length())


def parts_of_a_row(K: int, parts: int) -> Config:
    """For a program per row and block of its parts."""
    width = width_of_part(K, parts)
    block = min(max(1, _OF_A_PROGRAM // width), 1 << (parts - 1).bit_length())
    return Config(block_sizes=[block], num_warps=max(1, block * width // (32 * _OF_A_THREAD)))


def height(int64_index: bool) -> int:
    """Rows of a square that are quantised at once; 64-bit addresses take registers."""
    return 32 if int64_index else 64


def square() -> Config:
    """For blocks of 128 x 128."""
    return Config(block_sizes=[], num_warps=8)
