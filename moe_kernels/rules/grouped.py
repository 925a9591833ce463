"""The rule for jagged grouped products.

It was derived from measurements on an H200 and, for GPUs with slower memory, on an H100: see benchmarks/notes.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from moe_kernels.rules import (
    Access,
    Addressing,
    Choice,
    addressing,
    basic_height,
    block_for,
    chosen,
    fitting,
    indexing,
    offsets_block,
    persistent_options,
    precision_of,
)
from moe_kernels.rules.config import Config
from moe_kernels.runtime.targets import Gpu
from moe_kernels.tuning import entries


@dataclass(frozen=True)
class Problem(Access):
    """The properties that a choice may depend on. All except `rows` and `M` are fixed for a layer."""

    rows: int  # mean rows per group, rounded down to a power of two; 0 if less than 1
    M: int  # rounded down to a power of two
    N: int
    K: int
    G: int
    dtype: torch.dtype  # of the product: the operands' common type
    tf32: bool  # fp32 products may use tf32
    has_bias: bool
    transposed: bool = False  # B is stored as [G, N, K]
    out_dtype: torch.dtype | None = None  # of the result, if it is not `dtype`
    gpu: Gpu | None = None  # None leaves the choice to the rule

    @property
    def precision(self) -> str:
        """The result of `precision_of`."""
        return precision_of(self.dtype, self.tf32, self.gpu)


_Presets = dict[int, tuple[int, int, int, int]]
# block_m: (block_n, block_k, num_warps, num_stages); the first two tables are for 16-bit types read by TMA
_BASIC: _Presets = {16: (128, 128, 4, 4), 32: (128, 128, 4, 3), 64: (128, 64, 4, 4), 128: (256, 64, 8, 4)}
_PERSISTENT: _Presets = {64: (256, 64, 4, 5), 128: (256, 64, 8, 4)}
_POINTERS: _Presets = {16: (64, 64, 4, 3), 32: (64, 64, 4, 3), 64: (128, 32, 4, 3), 128: (128, 32, 8, 3)}
_TF32: _Presets = {16: (64, 32, 4, 3), 32: (64, 32, 4, 3), 64: (64, 32, 4, 3), 128: (128, 32, 8, 3)}
_IEEE: _Presets = {16: (64, 32, 4, 3), 32: (64, 32, 4, 3), 64: (64, 16, 4, 3), 128: (64, 16, 8, 3)}

PERSISTENT_FROM_ROWS = 128
LARGE_WEIGHTS = 2 << 30  # bytes: reading larger weights takes most of the time, up to 127 or 255 rows per group
SMALL_WEIGHT = 8 << 20  # bytes of a group's weight: several fit into the L2 cache
SHORT = 512  # Up to this K, a tile ends before its loads are in flight: persistent loops start those of the next tile.
STORES_MOST = 256  # Up to this K, storing a tile takes about as long as multiplying.
# The kernels that each requested variant allows.
_KERNELS = {
    "auto": ("basic", "persistent", "tails", "tall"),
    "basic": ("basic",),
    "persistent": ("persistent", "tails"),
}
# Of whole tiles in `jagged_tails` and `jagged_tall`, whose sources repeat these numbers.
TAILS_HEIGHT, TAILS_WIDTH = 128, 256
NARROW_FROM_ROWS = 1024  # of 128 columns; half as many for 64. With fewer, tails of all groups save as much.
_MOST_TAILS = 2**23  # whose costs `tiles.shares` adds in int32
UNSPLIT = 384  # Up to this many rows, reading a group's weight once more for a tail costs more than half a tile.


def choose(problem: Problem, variant: str = "auto") -> Choice:
    """Return the kernel and config for `problem`. A `variant` other than "auto" restricts the choice of the kernel."""
    return chosen(problem, bucket_of(problem), partial(adapted, variant=variant), partial(rule, variant=variant))


def rule(problem: Problem, variant: str = "auto", block_m: int | None = None) -> Choice:
    """The choice without tuned entries; compiles on every GPU. `block_m` fixes the height of the tiles of "basic" and
    "persistent".
    """
    if variant == "auto":
        # With three products instead of one, several programs per SM are faster than a persistent one.
        overlaps = not _thin(problem) and problem.precision != "tf32x3"
        many = problem.rows >= persistent_from_rows(problem) and overlaps
        variant = "persistent" if many and not _at_once(problem, 128, 256) else "basic"
        variant = "tall" if variant == "basic" and _waits_for_weights(problem) else variant
    if variant == "tall":
        addressing = _addressing(problem, "tall", TAILS_HEIGHT)
        config = tall(problem.K, problem.has_bias, addressing)
        return Choice("tall", TAILS_HEIGHT, addressing, config)
    if variant == "tails" or (variant == "persistent" and block_m is None and _apart(problem)):
        addressing = _addressing(problem, "tails", TAILS_HEIGHT)
        config = tails(problem.N, problem.K, problem.has_bias, addressing, narrow_column(problem))
        return Choice("tails", TAILS_HEIGHT, addressing, config)
    presets = _PERSISTENT if variant == "persistent" else _BASIC
    block_m = block_m or (_persistent_height(problem) if variant == "persistent" else _basic_height(problem))
    addressing = _addressing(problem, variant, block_m)
    if problem.dtype == torch.float32:
        presets = _TF32 if problem.tf32 else _IEEE
    elif not addressing.tma_B:
        presets = _POINTERS
    block_n, block_k, num_warps, num_stages = presets[block_m]
    if problem.precision == "tf32x3":
        block_n, block_k, num_warps, num_stages = _in_parts(problem, block_m, addressing)
    thin = _thin(problem)
    by_tma = addressing.tma_A or addressing.tma_B
    if variant == "basic" and block_m == 64 and by_tma and (thin or _at_once(problem, 64, 64)):
        # As many loads as fit are in flight at once. With more tiles than SMs, two programs share an SM.
        tiles = problem.M // 64
        alone = thin and (problem.gpu is None or tiles <= problem.gpu.multiprocessors)
        block_n, block_k, num_stages = 64, 128, 5 if alone else 3
    two_per_sm = variant == "persistent" and addressing.tma_out and _stores_most(problem)
    if two_per_sm:
        block_n, block_k = 128 if block_m == 128 else 256, 64 if addressing.tma_A and addressing.tma_B else 16
        num_warps, num_stages = 4, 3
    if variant == "persistent" and problem.out_dtype == torch.float32:
        block_n = min(block_n, 128)  # the result's tile shares the memory with the next tile's loads
    block_n, block_k = fitting(block_n, problem.N), fitting(block_k, problem.K)

    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages, "l2_groupings": [4]}
    if variant == "persistent":
        options |= persistent_options(row_group(problem), addressing)
        if two_per_sm:
            options["num_sm_multiplier"] = 2
        blocks = [block_n, block_k]
    else:
        blocks = [block_m, block_n, offsets_block(problem.G), block_k]
    options |= indexing_of(variant, problem.has_bias, addressing)
    return Choice(variant, block_m, addressing, Config(block_sizes=blocks, **options))


def _in_parts(problem: Problem, block_m: int, addressing: Addressing) -> tuple[int, int, int, int]:
    """Return (block_n, block_k, num_warps, num_stages) for products by "tf32x3"."""
    by_tma = problem.tma_A and addressing.tma_B  # other operands are read by pointers to odd strides, in more registers
    block_n, num_stages = (32, 4) if block_m == 64 and not problem.transposed else (64, 3)
    return block_n, 64 if block_m == 16 and by_tma else 32, 8 if block_m == 128 and not by_tma else 4, num_stages


def persistent_from_rows(problem: Problem) -> int:
    """The mean rows per group from which the persistent kernels are faster; see benchmarks/notes.md."""
    if not _tensor_cores_by_tma(problem):
        return 1 if _stores_most(problem) and problem.M >= 64 else PERSISTENT_FROM_ROWS
    if _slow_memory(problem) and problem.K >= 1024 and not problem.int64_out:
        # The programs of a basic kernel start in the order of its tiles, so those that share a weight read it together.
        return 256 if problem.K > 1024 else 128
    if _few_tiles(problem):
        return PERSISTENT_FROM_ROWS
    if problem.K <= SHORT and problem.N > 64 and problem.M >= 64:
        return 1
    if _large_weights(problem):
        return 256 if problem.K >= 4096 else 128
    return 64


def row_group(problem: Problem) -> int:
    """The number of row tiles that persistent kernels compute in a column before they go to the next column."""
    # With few rows, row tiles belong to different groups, which share no weights. The fewer groups are read at once,
    # the better, unless there are so few tiles that most run at once.
    together = _few_tiles(problem) and _persistent_height(problem) == 64
    small = problem.N * problem.K * problem.dtype.itemsize <= SMALL_WEIGHT
    if together or (problem.rows >= 512 and not small):
        return 16
    return 8 if _slow_memory(problem) and problem.rows >= 256 and not small else 4


def _large_weights(problem: Problem) -> bool:
    return problem.G * problem.K * problem.N * problem.dtype.itemsize > LARGE_WEIGHTS


def _slow_memory(problem: Problem) -> bool:
    return problem.gpu is not None and problem.gpu.slow_memory


def _tensor_cores_by_tma(problem: Problem) -> bool:
    """Whether both operands are read by TMA and not float32, as when thresholds and tile heights were measured."""
    return problem.dtype != torch.float32 and problem.tma_A and problem.tma_B


def _thin(problem: Problem) -> bool:
    """Whether a tile of 64 columns holds whole rows of the result: persistent loops then have nothing to overlap."""
    return problem.N <= 64 and problem.rows >= 8 and problem.tma_A and problem.dtype != torch.float32


def _stores_most(problem: Problem) -> bool:
    """Whether two persistent programs share an SM, so that one stores its tile while the other multiplies."""
    if problem.dtype == torch.float32 or problem.out_dtype is not None or problem.N <= 64 or not problem.tma_out:
        return False
    if _tensor_cores_by_tma(problem):
        return 64 <= problem.K <= STORES_MOST and problem.rows >= 64
    # With fewer tiles, making their list takes longer than it saves.
    tiles, gpu = most_tiles(problem.M, problem.N, problem.G, 64, 256), problem.gpu
    return problem.K <= 64 and gpu is not None and tiles > 3 * gpu.multiprocessors


def _few_tiles(problem: Problem) -> bool:
    """Whether one row of 256-column tiles per group is at most one tile per SM: smaller tiles balance work better."""
    tiles = problem.G * -(-problem.N // TAILS_WIDTH)
    return problem.gpu is not None and tiles <= problem.gpu.multiprocessors


def _at_once(problem: Problem, block_m: int, block_n: int) -> bool:
    """Whether all tiles of this size run at once; see benchmarks/notes.md.

    Then the persistent kernels have nothing to overlap, and the smaller the tiles, the more SMs work.
    """
    M, gpu = problem.M, problem.gpu
    if gpu is None or block_m > M or not _tensor_cores_by_tma(problem):
        return False
    # Two programs with tiles of 64 rows share an SM. The number of rows may be almost twice `M`.
    return most_tiles(M, problem.N, problem.G, block_m, block_n) <= gpu.multiprocessors * (1.5 if block_m == 64 else 1)


def most_tiles(M: int, N: int, G: int, block_m: int, block_n: int) -> int:
    """The most tiles of this size that a product can have, if each group may have a partly filled one."""
    return (M // block_m + G) * -(-N // block_n)


def _apart(problem: Problem) -> bool:
    """Whether to compute tails, smaller than other tiles, by `jagged_tails`."""
    if _persistent_height(problem) != TAILS_HEIGHT:
        return False
    if (problem.rows < 256 and problem.K < 1024) or _stores_most(problem):
        return False
    # If memory is slow, reading a weight twice costs more than half-empty tiles.
    enough = not _slow_memory(problem) or problem.rows >= 512
    enough &= problem.G * -(-problem.N // TAILS_WIDTH) < _MOST_TAILS
    return enough and _addressing(problem, "tails", TAILS_HEIGHT).tma_out


def _waits_for_weights(problem: Problem) -> bool:
    """Whether `jagged_tall` is faster than `jagged`, for problems with too few rows per group for persistent kernels.

    Its list of tiles takes time, which it saves only if there are many tiles, and if reading weights takes the most.
    """
    slow, large = _slow_memory(problem), _large_weights(problem)
    least = 64 if large and not (slow and problem.K >= 4096) else 128
    enough = problem.rows >= least and not _few_tiles(problem)
    return enough and (slow or large) and _addressing(problem, "tall", TAILS_HEIGHT).tma_A


def tall(K: int, has_bias: bool, addressing: Addressing) -> Config:
    """The config of `jagged_tall`."""
    options = indexing_of("tall", has_bias, addressing)
    return Config(block_sizes=[block_for(K, 64)], num_warps=8, num_stages=4, pid_type="flat", **options)


def narrow_column(problem: Problem) -> int:
    """The width of a narrower last column of tiles in `jagged_tails`, or 0 for none."""
    width = problem.N % TAILS_WIDTH
    least = NARROW_FROM_ROWS // 2 if width == 64 else NARROW_FROM_ROWS
    return width if width in (64, 128) and problem.rows >= least else 0


def narrow_cost(width: int) -> int:
    """The time of a tile of a narrow column, in 64ths of that of a whole tile; see benchmarks/notes.md."""
    return {64: 30, 128: 36}.get(width, 0)


def tails(N: int, K: int, has_bias: bool, addressing: Addressing, narrow: int) -> Config:
    """The config of `jagged_tails`."""
    options: dict[str, Any] = {"num_warps": 8, "num_stages": 4, "pid_type": "flat"}
    if addressing.tma_out:
        # The loops over tiles. That over the K of a narrow column is the third-last, that of both others the last.
        options["range_flattens"] = [None, True, True, None, True, None] if narrow else [None, True, True, None]
        if narrow == 128:
            options["range_num_stages"] = [0, 0, 0, 6, 0, 0]  # these loads take as much memory as four of a whole tile
    options |= indexing_of("tails", has_bias, addressing, tail_pieces(N, narrow), narrow)
    return Config(block_sizes=[block_for(K, 64), block_for(K, 128 if narrow == 64 else 64)], **options)


def tail_pieces(N: int, narrow: int) -> int:
    """The number of pieces in which `jagged_tails` stores 256 columns.

    N without a narrow column must be a multiple of the width of a piece.
    """
    return 2 if (N - narrow) % 128 == 0 else 4


def tail_cost(problem: Problem) -> int:
    """The time of a tail in `jagged_tails`, in 64ths of that of a whole tile; see benchmarks/notes.md."""
    # With few rows, tails and whole tiles both wait for the weights.
    if _slow_memory(problem) and problem.rows < 1024:
        return 56
    return 60 if problem.rows < 256 else min(50, 40 + 16384 // problem.K)


def _persistent_height(problem: Problem) -> int:
    if (problem.K <= SHORT and problem.rows < 64) or (_stores_most(problem) and not _tensor_cores_by_tma(problem)):
        return 64
    whole = (
        problem.N % TAILS_WIDTH == 0 and problem.out_dtype is None and _addressing(problem, "persistent", 128).tma_out
    )
    fast = problem.gpu is not None and not problem.gpu.slow_memory
    return 64 if whole and _few_tiles(problem) and 128 <= problem.rows <= 512 and problem.K > 2048 and fast else 128


def _basic_height(problem: Problem) -> int:
    if _thin(problem):
        return 64
    if not _tensor_cores_by_tma(problem):
        return basic_height(problem.rows)
    few_tiles, large = _few_tiles(problem), _large_weights(problem)
    if few_tiles and problem.rows < 16:
        return 16
    # Reading a weight takes longer than multiplying 64 rows by it; with over 2 GiB of weights, longer than 128 rows.
    full_height_from = 32 if large and not few_tiles else 64 if _slow_memory(problem) else 128
    if problem.rows < 8:
        height = 64 if large and problem.M <= 64 else 32  # one tile, also for a group with most of the rows
    else:
        height = 64 if problem.rows < full_height_from or _at_once(problem, 64, 128) else 128
    # A block of TMA may not have more rows than A.
    return max(16, min(height, problem.M)) if few_tiles or problem.rows < 8 else height


def _addressing(problem: Problem, variant: str, block_m: int) -> Addressing:
    # A descriptor's block may not have more rows than its tensor.
    tma_A, tma_B = problem.tma_A and block_m <= problem.M, problem.tma_B
    # Products of float32 leave no shared memory for tiles of the output.
    stored = problem.tma_out and problem.dtype != torch.float32 and ((tma_A and tma_B) or _stores_most(problem))
    tma_out = variant != "basic" and stored
    if variant == "tails":  # TMA for all three, or for none
        fits = problem.N >= TAILS_WIDTH and problem.N % 64 == 0 and problem.K >= 64 and not problem.out_dtype
        tma_A = tma_B = tma_out = tma_out and fits
    elif variant == "tall":  # TMA for both operands, or for none
        fits = problem.N >= TAILS_WIDTH and problem.K >= 64 and problem.dtype != torch.float32
        tma_A = tma_B = tma_A and tma_B and fits
        tma_out = False
    return addressing(problem, tma_A, tma_B, tma_out)


def indexing_of(
    variant: str, has_bias: bool, addressing: Addressing, pieces: int = 1, narrow: int = 0
) -> dict[str, Any]:
    """The options for `addressing`, in the order of the kernel's accesses: tables, A_packed, B, bias, pieces of out."""
    a, b, out, _ = addressing
    if variant == "tails":
        tile = [*[False] * 3, a, b, *[False] * has_bias]
        of_narrow = [*tile, out] if narrow else []
        return indexing(False, False, *tile, *[out] * pieces, *of_narrow, *tile, *[out] * pieces)
    if variant == "tall":
        tile = [*[False] * 3, a, b, a, *[False] * 2 * has_bias, False, False]
        return indexing(False, *tile, a, b, *[False] * has_bias, False)
    tables = 3 if variant == "persistent" else 1
    return indexing(*[False] * tables, a, b, *[False] * has_bias, out)


def _indexing(problem: Problem, variant: str, addressing: Addressing) -> dict[str, Any]:
    narrow = narrow_column(problem)
    return indexing_of(variant, problem.has_bias, addressing, tail_pieces(problem.N, narrow), narrow)


def bucket_of(problem: Problem) -> entries.Bucket:
    """The key of `problem` among tuned entries."""
    dtype = entries.dtype_label(problem.dtype, problem.tf32, problem.out_dtype)
    return entries.Bucket(dtype, problem.transposed, problem.rows, problem.N, problem.K, problem.G)


def adapted(entry: entries.Entry, problem: Problem, variant: str = "auto") -> Choice | None:
    """The choice of an entry, tuned without a bias and perhaps for another number of groups, None if it cannot be used
    for `problem`.
    """
    config = dict(entry.config)
    addressing = _addressing(problem, entry.kernel, entry.block_m)
    config |= _indexing(problem, entry.kernel, addressing)
    if problem.has_bias:
        for per_load in ("load_eviction_policies", "load_cache_modifiers"):
            if isinstance(config.get(per_load), list):
                config[per_load] = [*config[per_load], ""]
    if entry.kernel == "tails":  # its loops depend on the width of a narrow column
        by_rule = rule(problem, "tails").config.config
        loops = ("block_sizes", "range_flattens", "range_num_stages")
        config = {name: value for name, value in config.items() if name not in loops}
        config |= {name: by_rule[name] for name in loops if name in by_rule}
    blocks = config.get("block_sizes")
    if entry.kernel == "basic" and isinstance(blocks, list) and len(blocks) == 4 and problem.G != entry.bucket.G:
        config["block_sizes"] = [blocks[0], blocks[1], offsets_block(problem.G), blocks[3]]
    choice = Choice(entry.kernel, entry.block_m, addressing, Config(**config))
    fits = entry.kernel in _KERNELS[variant] and addressing.tma == entry.tma
    # Tails that were fastest with more rows per group may be slower with fewer: see `_apart`.
    slower = entry.kernel == "tails" and problem.rows < entry.bucket.rows
    return choice if fits and not slower and why_illegal(choice, problem) is None else None


def why_illegal(choice: Choice, problem: Problem) -> str | None:
    """The reason why `choice` cannot be used for `problem`, or None."""
    values: dict[str, Any] = choice.config.config
    if choice.addressing != _addressing(problem, choice.variant, choice.block_m):
        return "other operands are read or written by TMA"
    needed = _indexing(problem, choice.variant, choice.addressing)
    if any(values.get(name) != value for name, value in needed.items()):
        return f"indexing is {values.get('indexing')}"
    blocks = values.get("block_sizes")
    if not isinstance(blocks, list) or len(blocks) != {"basic": 4, "tall": 1}.get(choice.variant, 2):
        return f"block_sizes are {blocks}"
    if any(type(block) is not int or block < 1 or block & (block - 1) for block in (choice.block_m, *blocks)):
        return "a block is no power of two"
    block_n, block_k = blocks[1] if choice.variant == "basic" else blocks[0], blocks[-1]
    if choice.variant == "tails":
        block_k = max(blocks)
    persistent = str(values.get("pid_type")).startswith("persistent")
    if choice.variant != "basic" and persistent != (choice.variant == "persistent"):
        return f"pid_type is {values.get('pid_type')}"
    if choice.variant in ("tails", "tall") and (choice.block_m != TAILS_HEIGHT or problem.N < TAILS_WIDTH):
        return f"its tiles are {TAILS_HEIGHT} x {TAILS_WIDTH}"
    if choice.variant == "tails" and problem.N % 64:
        return "N is no multiple of 64"
    if choice.variant == "basic" and blocks[0] != choice.block_m:
        return f"block_m is {choice.block_m} and {blocks[0]}"
    if not 16 <= choice.block_m <= 128 or min(block_n, block_k) < 16:
        return "a block is too small or too large"
    by_tma = choice.addressing.tma_A or choice.addressing.tma_B
    of_static_shapes = choice.variant in ("tails", "tall")  # whose blocks must fit into the tensors
    if (by_tma and max(block_n, block_k) > 256) or (by_tma and of_static_shapes and block_k > problem.K):
        return "a block is larger than what TMA can read"
    return None
