"""What the rules of all operators share: the choice of a kernel and its `Config` by a tuned entry for this GPU (see
`tuning.entries`) or else by the operator's rule, and parts of configs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch

from moe_kernels.rules.config import Config
from moe_kernels.runtime.targets import Gpu
from moe_kernels.tuning import entries

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Access:
    """How the operands and the result of a product can be accessed, for the problems of several operators."""

    tma_A: bool = False  # A, or the rows of the left operand, can be read by TMA
    tma_B: bool = False  # the weights can be read by TMA
    tma_out: bool = False  # the results can be written by TMA
    int64_A: bool = False  # addresses in A, or in the offsets, scales or biases, do not fit into 32 bits
    int64_B: bool = False
    int64_out: bool = False


class Addressing(NamedTuple):
    """TMA or pointers, per operand, and whether pointer offsets need an int64 index."""

    tma_A: bool
    tma_B: bool
    tma_out: bool
    int64_index: bool

    @property
    def tma(self) -> list[str]:
        """The names of what is accessed by TMA, as in a tuned entry."""
        return [name for name, by_tma in zip(("A", "B", "out"), self[:3], strict=True) if by_tma]


@dataclass(frozen=True)
class Choice:
    """The kernel and config for a problem of any operator."""

    # "basic", "persistent", "tails", also a persistent kernel, or "tall", also a program per tile; for uniform products
    # "folded", "batched", or "bmm" for torch.bmm, which ignores the rest; for varied ones "varied"
    variant: str
    block_m: int  # the kernels' arguments of these names
    addressing: Addressing
    config: Config
    block_n: int = 0  # of varied products; block_i of the first half of an expert
    source: str = field(default="rule", compare=False)  # or the file that the entry is from
    entry: entries.Entry | None = field(default=None, compare=False, repr=False)


BY_POINTERS = Addressing(False, False, False, int64_index=False)
SHARED_MEMORY = 227 << 10  # bytes that the programs of an SM share, from sm90 on
MOST_OFFSETS = 1024  # that a program processes at once
# Of the kernel that copies matrices to row-major order, from column-major order and from any other.
TRANSPOSED_ROWS, WHOLE_ROWS = (Config(block_sizes=block, num_warps=4) for block in ([64, 64], [8, 512]))
ROW_MAJOR_WEIGHTS_FROM_ROWS = 128  # mean rows per group from which weights that TMA cannot read are copied


def chosen(
    problem: Any,  # of any operator
    bucket: entries.Bucket | None,  # None for problems for which there are no entries
    adapted: Callable[[entries.Entry, Any], _T | None],  # None for an entry that the problem cannot use
    rule: Callable[[Any], _T],
) -> _T:
    """The choice of `force`, or else of the nearest tuned entry that can be used, or else of `rule`. The enclosing
    `record` lists it.
    """
    choice: _T = forced() or _nearest(problem, bucket, adapted) or rule(problem)
    if (made := _made.get()) is not None:
        made.append((problem, choice))
    return choice


def _nearest(
    problem: Any, bucket: entries.Bucket | None, adapted: Callable[[entries.Entry, Any], _T | None]
) -> _T | None:
    """The choice of the nearest entry that can be used and is not discarded: none without a GPU, or interpreted."""
    if bucket is None or problem.gpu is None or problem.gpu.backend != "cuda":
        return None
    for file, entry in entries.near(problem.gpu, bucket):
        choice: Any = adapted(entry, problem)
        if choice is not None and (str(file), entry.key) not in _discarded:
            tuned: _T = replace(choice, source=str(file), entry=entry)
            return tuned
    return None


def persistent_options(row_group: int, addressing: Addressing) -> dict[str, Any]:
    """The options of a persistent kernel that loops over a list of tiles, `row_group` of them in a column."""
    options: dict[str, Any] = {"pid_type": "persistent_interleaved", "l2_groupings": [row_group]}
    if addressing.tma_A and addressing.tma_B:
        options["range_flattens"] = [True, None]  # overlaps a tile's stores with the next tile's loads
    if addressing.tma_out:
        options["epilogue_subtile"] = 2  # whole tiles leave too little shared memory for these stages
    return options


def basic_height(rows: int) -> int:
    """The tile height of the basic kernels for these mean rows per group."""
    # A tile of twice the mean is half empty, and two tiles instead of one read the weight twice.
    return next(block for least, block in ((128, 128), (32, 64), (16, 32), (0, 16)) if rows >= least)


def addressing(problem: Access, tma_A: bool, tma_B: bool, tma_out: bool) -> Addressing:
    """Access by TMA as given; if an address that pointers reach then needs 64 bits, use pointers for everything."""
    if (problem.int64_A and not tma_A) or (problem.int64_B and not tma_B) or (problem.int64_out and not tma_out):
        # Helion creates no descriptors if it computes indices in 64 bits.
        return Addressing(False, False, False, int64_index=True)
    return Addressing(tma_A, tma_B, tma_out, int64_index=False)


def indexing(*tma: bool) -> dict[str, Any]:
    """The options that make each memory access of a kernel, in order, use TMA or pointers."""
    ways = ["tensor_descriptor" if by_tma else "pointer" for by_tma in tma]
    return {"indexing": ways} | ({"host_tensor_descriptors": True} if any(tma) else {})


def precision_of(dtype: torch.dtype, tf32: bool, gpu: Gpu | None) -> str:
    """How products of `dtype` are computed on a GPU, as Triton's `input_precision`.

    "ieee" multiplies the operands as they are. float32 is rounded by "tf32", if `tf32`. "tf32x3" divides an operand
    into two parts in tf32 and leaves out the product of the smaller parts, as 3xTF32 of CUTLASS does; it is faster than
    "ieee", and as accurate. docs/numerics.md has its limits.
    """
    if dtype != torch.float32:
        return "ieee"
    if tf32:
        return "tf32"
    return "tf32x3" if gpu is not None and gpu.has_tf32 else "ieee"


def tf32_allowed(dtype: torch.dtype) -> bool:
    """Whether PyTorch's settings let products of `dtype` be computed in tf32."""
    return dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"


def floor_power_of_2(n: int) -> int:
    """The largest power of two up to `n`; 0 for 0."""
    return 1 << (n.bit_length() - 1) if n else 0


def block_for(n: int, most: int) -> int:
    """The largest power of two up to `n`, within 16 and `most`: a block that fits into n elements, as TMA needs it in
    kernels of static shapes and in Helion's search.
    """
    return min(max(16, floor_power_of_2(n)), most)


def fitting(block: int, extent: int) -> int:
    """The smaller of `block` and the least power of two, from 16 on, that covers `extent`."""
    return min(block, max(16, 1 << (extent - 1).bit_length()))


def offsets_block(G: int) -> int:
    return min(1 << G.bit_length(), MOST_OFFSETS)  # at least G + 1, up to the limit


def bounds_loads(G: int) -> list[bool]:
    """How `inline.bounds_of` loads offsets: all at once, or from MOST_OFFSETS groups on two that are in order."""
    return [False] * (1 if G < MOST_OFFSETS else 2)


def offsets_of(G: int) -> Config:
    """The config of kernels in which one program processes all offsets."""
    return Config(block_sizes=[offsets_block(G)], num_warps=1)


def tile_table(G: int, N: int | None) -> Config:
    """The config of the kernel that lists the persistent kernel's tiles, and sets rows of N columns to zero."""
    zeros = [] if N is None else [fitting(64, N)]
    return Config(block_sizes=[offsets_block(G), *zeros], num_warps=1)


def by_rows(width: int, most: int = 1024) -> Config:
    """The config of kernels that move rows of `width`, or compute them elementwise, at most `most` elements at once."""
    block = fitting(most, width)
    return Config(block_sizes=[block], num_warps=max(1, block // 256))


def are_blocks(value: Any) -> TypeGuard[list[int]]:
    """Whether an entry's `block_sizes` are a list of three powers of two, each from 16 to 256."""
    return (
        isinstance(value, list)
        and len(value) == 3
        and all(type(block) is int and 16 <= block <= 256 and not block & (block - 1) for block in value)
    )


def tuned_digest(gpu: Gpu) -> str:
    """A digest of the tuned entries for `gpu`, on which plans depend."""
    return "" if gpu.backend != "cuda" else entries.digest(gpu)


_discarded: set[tuple[str, tuple[Any, ...]]] = set()
_forced: ContextVar[Any] = ContextVar("forced", default=None)
_made: ContextVar[list[tuple[Any, Any]] | None] = ContextVar("made", default=None)


@contextmanager
def force(choice: Any) -> Iterator[None]:
    """Within the block, problems of `grouped_gemm` and of uniform and varied products get `choice`, which must be of
    the operator that is called. Gradients of weights, `swiglu` and products in fp8 keep their rules.

    Existing plans are still found, unless `runtime.cache.isolated` hides them.
    """
    token = _forced.set(choice)
    try:
        yield
    finally:
        _forced.reset(token)


def forced() -> Any:
    """The choice of `force`, or None."""
    return _forced.get()


@contextmanager
def record() -> Iterator[list[tuple[Any, Any]]]:
    """Yield a list that gets (problem, choice) for each choice within the block; an outer `record` gets them last."""
    made: list[tuple[Any, Any]] = []
    outer = _made.get()
    token = _made.set(made)
    try:
        yield made
    finally:
        _made.reset(token)
        if outer is not None:
            outer += made


def discard(choice: Any, reason: str) -> bool:
    """Do not choose this tuned entry again before `reload`, and warn once. False if the choice is the rule's."""
    if choice.entry is None:
        return False
    _discarded.add((choice.source, choice.entry.key))
    bucket = choice.entry.bucket
    shape = f"{bucket.op}, {bucket.dtype}, {bucket.rows} rows per group, N {bucket.N}, K {bucket.K}, G {bucket.G}"
    entries.warn_once(f"{choice.source} ({shape})", f"does not work here, another config is used: {reason}")
    return True


def made_by_entry() -> bool:
    """Whether a choice that the innermost `record` lists is from a tuned entry."""
    return any(getattr(choice, "entry", None) is not None for _, choice in _made.get() or ())


def with_fallback(attempt: Callable[[], _T]) -> _T:
    """Return `attempt()`, which chooses configs, compiles and loads. If it fails, discard the tuned entries it used and
    repeat it. If there are none, under a forced choice, for lack of memory, or in the file system, the error is raised.
    """
    while True:
        with record() as made:
            try:
                return attempt()
            except (torch.OutOfMemoryError, MemoryError, OSError):
                raise
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".split("\n")[0]
                if forced() is not None or not sum(discard(choice, reason) for _, choice in made):
                    raise


def reload() -> None:
    """Read the files of tuned entries again when they are next needed."""
    entries.reload()
    _discarded.clear()
