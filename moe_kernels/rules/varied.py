"""The choice for a varied grouped GEMM: a tuned entry for this GPU (see `tuning.entries`), or the rule.

The rule was derived from measurements on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from moe_kernels import rules
from moe_kernels.rules.config import Config
from moe_kernels.runtime.targets import Gpu
from moe_kernels.schedule import tile_counts
from moe_kernels.tuning import entries

BLOCK_K = {2: 64, 4: 32}  # by element size in bytes: 128 bytes, the unit in which shared memory is read
_Options = tuple[int, int, int, int]  # block_k, num_warps, num_stages, workers per SM


class _Blocks(NamedTuple):
    """Options for 16-bit types, and the time of a step along K, relative to that of a 128 x 256 tile."""

    few: _Options  # for at most `tiles` tiles per SM: short steps, which begin sooner, or one worker
    tiles: int
    many: _Options
    average: float
    alone: float  # if there is only one tile


_BLOCKS = {
    (128, 256): _Blocks((32, 8, 6, 1), 2, (64, 8, 3, 1), average=1.0, alone=1.0),
    (128, 128): _Blocks((32, 8, 6, 1), 2, (64, 8, 4, 1), average=0.7, alone=0.7),
    (64, 128): _Blocks((64, 8, 5, 1), 1, (64, 8, 4, 2), average=0.45, alone=0.48),
    (64, 64): _Blocks((64, 4, 5, 1), 1, (64, 4, 5, 2), average=0.27, alone=0.39),
    (64, 32): _Blocks((64, 4, 5, 1), 1, (64, 4, 5, 2), average=0.2, alone=0.3),
    (32, 32): _Blocks((128, 4, 4, 1), 1, (128, 4, 4, 1), average=0.24, alone=0.24),
}
_FIXED = 512  # the time of a tile's beginning and end, in steps along K
Shapes = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Problem:
    """The properties that a choice may depend on."""

    shapes: Shapes  # (M, N, K) of each product
    dtype: torch.dtype
    aligned: bool  # A and B can be loaded in units of 16 bytes
    b_columns: bool  # each B is stored as [N, K]
    num_sms: int
    tf32: bool  # fp32 products may use tf32
    gpu: Gpu | None = None  # None leaves the choice to the rule


class Layout(NamedTuple):
    """Common properties of all problems that the kernel is compiled for, besides dtypes and blocks.

    contiguous_a, _b, _c: the dimension of A, B and out that is contiguous: 0, 1, or 2 for neither. A unit is a common
    divisor, in elements, of all extents (m, n, k), or of all addresses and strides (a, b, c): 1, 2, 4 or 8. The table
    holds the values divided by it, so that the compiler sees how wide a load may be.
    """

    contiguous_a: int
    contiguous_b: int
    contiguous_c: int
    unit_a: int
    unit_b: int
    unit_c: int
    unit_m: int
    unit_n: int
    unit_k: int


def choose(problem: Problem) -> rules.Choice:
    """The blocks and config for `problem`."""
    return rules.chosen(problem, bucket_of(problem) if problem.aligned else None, adapted, rule)


def rule(problem: Problem) -> rules.Choice:
    """The choice without tuned entries; it compiles on every GPU."""
    P, block_k = len(problem.shapes), BLOCK_K[problem.dtype.itemsize]
    if not problem.aligned:
        return make(P, 64, 64, block_k // 2, 8, 3, 1)
    if precision_of(problem.dtype, problem.tf32, problem.b_columns, problem.gpu) == "tf32x3":
        return make(P, 128, 64, block_k, 4, 3, 1)
    if problem.dtype == torch.float32:
        return make(P, 64, 64, block_k, 8, 3, 1)
    *blocks, block_k, num_warps, num_stages, per_sm = _fastest(problem.shapes, problem.num_sms)
    if problem.gpu is not None:  # Triton has a buffer less than there are stages
        stage = per_sm * sum(blocks) * block_k * problem.dtype.itemsize
        num_stages = min(num_stages, 1 + problem.gpu.shared_memory // stage)
    return make(P, *blocks, block_k, num_warps, num_stages, per_sm)


def precision_of(dtype: torch.dtype, tf32: bool, b_columns: bool, gpu: Gpu | None) -> str:
    """As `rules.precision_of`, except that "tf32x3" is for B stored as [N, K]: with [K, N], "ieee" is faster."""
    precision = rules.precision_of(dtype, tf32, gpu)
    return "ieee" if precision == "tf32x3" and not b_columns else precision


@lru_cache(1024)
def make(
    P: int, block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int, per_sm: int
) -> rules.Choice:
    """The choice with these blocks and options for P problems."""
    config = Config(
        block_sizes=[min(1024, max(2, 1 << (P - 1).bit_length())), block_k],
        num_warps=num_warps,
        num_stages=num_stages,
        pid_type="persistent_interleaved",
        num_sm_multiplier=per_sm,
    )
    return rules.Choice("varied", block_m, rules.BY_POINTERS, config, block_n)


@lru_cache(1024)
def _fastest(shapes: Shapes, num_sms: int) -> tuple[int, int, int, int, int, int]:
    """The blocks with which the SM with the most work ends the earliest, and their options, as `make` takes them."""

    def time(blocks: tuple[int, int]) -> float:
        longest = max(K for *_, K in shapes) + _FIXED
        of = _BLOCKS[blocks]
        return max(of.average * _most_steps(shapes, blocks, num_sms), of.alone * longest)

    blocks = min(_BLOCKS, key=time)
    of = _BLOCKS[blocks]
    tiles = sum(m * n for m, n in tile_counts(shapes, *blocks))
    return *blocks, *(of.few if tiles <= of.tiles * num_sms else of.many)


def _most_steps(shapes: Shapes, blocks: tuple[int, int], num_sms: int) -> int:
    """The steps along K of the SM that has the most. Tile t is computed by SM t % num_sms."""
    every, changes, begin = 0, [0] * (2 * num_sms + 1), 0
    for (m, n), (*_, K) in zip(tile_counts(shapes, *blocks), shapes, strict=True):
        rounds, more = divmod(m * n, num_sms)
        every += rounds * (K + _FIXED)
        changes[begin] += K + _FIXED
        changes[begin + more] -= K + _FIXED
        begin = (begin + more) % num_sms
    steps = list(accumulate(changes))
    return every + max(steps[i] + steps[i + num_sms] for i in range(num_sms))


def bucket_of(problem: Problem) -> entries.Bucket | None:
    """The key of `problem` among tuned entries, None unless all products are of one size."""
    if len(set(problem.shapes)) > 1:
        return None
    M, N, K = problem.shapes[0]
    dtype = entries.dtype_label(problem.dtype, problem.tf32)
    return entries.Bucket(dtype, problem.b_columns, M, N, K, len(problem.shapes), op="varied")


def adapted(entry: entries.Entry, problem: Problem) -> rules.Choice | None:
    """The choice of an entry, None if its config is not of the form that `stored` returns."""
    values: Any = [entry.config.get(name) for name in ("num_warps", "num_stages", "num_sm_multiplier")]
    blocks = entry.config.get("block_sizes")
    if not rules.are_blocks(blocks) or any(type(value) is not int or value < 1 for value in values):
        return None
    return make(len(problem.shapes), *blocks, *values)


def stored(choice: rules.Choice) -> dict[str, Any]:
    """The config of an entry for `choice`: the arguments of `make`, without P, under the names of `Config`."""
    values: Any = choice.config.config
    kept = {name: values[name] for name in ("num_warps", "num_stages", "num_sm_multiplier")}
    return {"block_sizes": [choice.block_m, choice.block_n, values["block_sizes"][1]], **kept}
