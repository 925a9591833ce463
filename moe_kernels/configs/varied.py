"""The blocks and config that a varied grouped GEMM gets, by rule. Written down from measurements on an H200."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import helion
import torch

from moe_kernels.schedule import tile_counts

BLOCK_K = {2: 64, 4: 32}  # by the bytes of an element: 128 of them are what shared memory is read in
# (block_m, block_n): (block_k, num_warps, num_stages, workers per SM), for 16-bit types
_BLOCKS = {
    (128, 256): (64, 8, 3, 1),
    (128, 128): (64, 8, 4, 1),
    (64, 128): (64, 4, 4, 1),
    (64, 64): (64, 4, 4, 2),
}


@dataclass(frozen=True)
class Choice:
    """`block_m` and `block_n` are the kernel's arguments of these names."""

    block_m: int
    block_n: int
    config: helion.Config


def choose(shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, aligned: bool, num_sms: int) -> Choice:
    """The blocks and config for the problems `(M, N, K)`; `aligned` if 16 bytes of A and B can be loaded together."""
    return rule(shapes, dtype, aligned, num_sms)


def rule(shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, aligned: bool, num_sms: int) -> Choice:
    """The choice where nothing has been tuned: it compiles everywhere."""
    if not aligned:
        return make(len(shapes), 64, 64, BLOCK_K[dtype.itemsize] // 2, 8, 3, 1)
    if dtype == torch.float32:
        return make(len(shapes), 64, 64, BLOCK_K[dtype.itemsize], 8, 3, 1)
    blocks = min(_BLOCKS, key=lambda blocks: _cost(shapes, blocks, num_sms))
    return make(len(shapes), *blocks, *_BLOCKS[blocks])


def make(P: int, block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int, per_sm: int) -> Choice:
    """The choice with these blocks and options for P problems."""
    config = helion.Config(
        block_sizes=[min(1024, max(2, 1 << (P - 1).bit_length())), block_k],
        num_warps=num_warps,
        num_stages=num_stages,
        pid_type="persistent_interleaved",
        num_sm_multiplier=per_sm,
    )
    return Choice(block_m, block_n, config)


def _cost(shapes: Sequence[tuple[int, int, int]], blocks: tuple[int, int], num_sms: int) -> float:
    block_m, block_n = blocks
    counts = tile_counts(shapes, block_m, block_n)
    tiles = sum(m * n for m, n in counts)
    waves = -(-tiles // num_sms)
    return waves * block_m * block_n
