"""Which worker computes which tile of a varied grouped GEMM, in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Tile(NamedTuple):
    """The tile of one problem's output that starts at row `row * block_m` and column `column * block_n`."""

    problem: int
    row: int
    column: int


def tile_counts(shapes: Sequence[tuple[int, int, int]], block_m: int, block_n: int) -> list[tuple[int, int]]:
    """Return the numbers of tiles along M and along N for each problem `(M, N, K)`."""
    return [(-(-M // block_m), -(-N // block_n)) for M, N, _ in shapes]


def varied_schedule(
    shapes: Sequence[tuple[int, int, int]], block_m: int, block_n: int, num_workers: int
) -> list[list[Tile]]:
    """Return the tiles of each worker of `varied_grouped_gemm`, in order.

    The tiles of all problems `(M, N, K)` are numbered one problem after another, each in row-major order; worker w of W
    takes tiles w, w + W, w + 2 W, ...

    Examples:
        Two problems, [192, 128] x [128, 320] and [256, 192] x [192, 448], have 3 x 5 and 4 x 7 tiles of 64 x 64.

        >>> workers = varied_schedule([(192, 320, 128), (256, 448, 192)], 64, 64, num_workers=6)
        >>> [len(tiles) for tiles in workers]
        [8, 7, 7, 7, 7, 7]
        >>> [tuple(tile) for tile in workers[2][:4]]  # tiles 2, 8, 14 and 20; the last one is the sixth of problem 1
        [(0, 0, 2), (0, 1, 3), (0, 2, 4), (1, 0, 5)]

    Raises:
        ValueError: `block_m`, `block_n` or `num_workers` is not an int, or below 1; `shapes` does not have the form
            `[(M, N, K), ...]` with ints of at least 0.
    """
    for name, value in (("block_m", block_m), ("block_n", block_n), ("num_workers", num_workers)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}: expected an int of at least 1, got {value!r}")
    if not isinstance(shapes, Sequence) or not all(map(_is_shape, shapes)):
        raise ValueError(f"shapes: expected [(M, N, K), ...] with ints of at least 0, got {shapes!r}")
    counts = tile_counts(shapes, block_m, block_n)
    tiles = [Tile(p, i // n, i % n) for p, (m, n) in enumerate(counts) for i in range(m * n)]
    return [tiles[worker::num_workers] for worker in range(num_workers)]


def _is_shape(shape: object) -> bool:
    return isinstance(shape, Sequence) and len(shape) == 3 and all(type(n) is int and n >= 0 for n in shape)
