"""The problems on which our operators are timed, also in `benchmarks`. Needs no TritonBench.

Every list goes from the sizes of a serving step to those of a training step. A CPU gets small cases: they check that
the providers work and agree, not how fast they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from moe_kernels.models import MODELS, gemms
from moe_kernels.testing import SizeKind

TOKENS = (16, 512, 8192)
RANK = "deepseek-v3, 1 of 8 ranks"  # it has 1/8 of the experts, and gets 1/8 of the rows of 8 ranks
LAYERS = {  # by name in result files: (H, I, G, rows per token)
    **{re.sub(r"-a\d+b$", "", name): sizes for name, sizes in MODELS.items()},
    RANK: (7168, 2048, 32, 8),
}
THIN = (8, 16, 32, 64)  # N
_FFN = ("qwen3-30b", "mixtral-8x7b", "olmoe", RANK)
_GEMMS = (
    "mixtral-8x7b",
    "llama-4-scout",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "olmoe",
    "qwen3-30b",
    "qwen3-235b",
    "glm-4.5",
    "deepseek-v3",
    RANK,
    "kimi-k2",
)
_CLOSER = ("mixtral-8x7b", "qwen3-30b", RANK)  # few wide experts, many narrow ones, and a case between these


class MoeCase(NamedTuple):
    """One GEMM of a model's expert layer: M rows over G experts, split as `testing.group_sizes_for(sizes, G, M)`."""

    G: int
    M: int
    N: int
    K: int
    sizes: SizeKind
    layer: str


class UniformCase(NamedTuple):
    """G products [M, K] x [K, N]."""

    G: int
    M: int
    N: int
    K: int


class VariedCase(NamedTuple):
    """Products [M, K] x [K, N], each with its own (M, N, K)."""

    name: str
    problems: tuple[tuple[int, int, int], ...]


UNEVEN = (UniformCase(8, 500, 72, 520), UniformCase(8, 333, 97, 259))  # not divisible by any tile
CUBES = tuple(VariedCase(f"4 x {n}^3", ((n, n, n),) * 4) for n in (128, 256, 512, 1024))
UNLIKE_CUBES = tuple((n, n, n) for n in (1024, 512, 256, 128))


class FfnCase(NamedTuple):
    """A layer of E experts [H, width], top_k of them for each of T tokens."""

    T: int
    H: int
    width: int
    E: int
    top_k: int
    model: str


def ffn_cases(device: str) -> list[FfnCase]:
    """Return four models' layers for each of TOKENS."""
    if device == "cpu":
        return [FfnCase(40, 48, 32, 6, 2, "small"), FfnCase(1, 48, 32, 6, 2, "small")]
    return [FfnCase(T, *LAYERS[name], name) for T in TOKENS for name in _FFN]


def moe_cases(device: str) -> list[MoeCase]:
    """Return gate and up of each model for each of TOKENS; then, of three models, down and other splits of the rows."""
    if device == "cpu":
        kinds: tuple[SizeKind, ...] = ("uniform", "softmax", "zipf", "empty")
        return [MoeCase(8, 96, 64, 80, kind, "small") for kind in kinds]

    def case(name: str, gemm: str, tokens: int, sizes: SizeKind) -> MoeCase:
        H, width, G, top_k = LAYERS[name]
        return MoeCase(G, tokens * top_k, *gemms(H, width)[gemm], sizes, f"{name} {gemm}")

    cases = [case(name, "up", tokens, "softmax") for tokens in TOKENS for name in _GEMMS]
    cases += [case(name, "down", TOKENS[-1], "softmax") for name in _CLOSER]
    others: tuple[SizeKind, ...] = ("uniform", "zipf", "empty")
    return cases + [case(name, "up", TOKENS[-1], sizes) for name in _CLOSER for sizes in others]


def uniform_cases(device: str) -> list[UniformCase]:
    """Return two published sizes, thin outputs, sizes that no tile divides, and experts with equal capacity."""
    if device == "cpu":
        return [UniformCase(4, 48, 16, 64), UniformCase(3, 33, 7, 50)]
    published = [UniformCase(8, 512, 64, 512), UniformCase(8, 2048, 64, 2048)]
    thin = [UniformCase(8, 2048, N, K) for N in THIN for K in (512, 1024, 2048)]
    capacity = [
        UniformCase(128, 8, 1536, 2048),
        UniformCase(128, 512, 1536, 2048),
        UniformCase(64, 512, 2048, 2048),
        UniformCase(32, 2048, 4096, 7168),
        UniformCase(8, 1024, 28672, 4096),
    ]
    return list(dict.fromkeys(published + thin + [UNEVEN[0], UniformCase(16, 1000, 100, 1000), UNEVEN[1]] + capacity))


def varied_cases(device: str) -> list[VariedCase]:
    """Return four equal cubes of each size, four different ones, a worked example, and experts of several widths."""
    worked = VariedCase("two unlike", ((192, 320, 128), (256, 448, 192)))
    if device == "cpu":
        return [VariedCase("4 x 32^3", ((32, 32, 32),) * 4), worked, VariedCase("uneven", ((3, 7, 97), (1, 5, 16)))]
    mixed = VariedCase("cubes 1024 to 128", UNLIKE_CUBES)
    rows = (1, 17, 64, 130, 256, 511, 700, 1024)
    widths = (768, 1024, 1408, 1536, 2048, 768, 1024, 1408)
    experts = VariedCase(
        "experts of several widths", tuple((m, 2 * i, 2048) for m, i in zip(rows, widths, strict=True))
    )
    return [*CUBES, mixed, worked, experts]


def extent(values: Sequence[int]) -> int | str:
    """Return the value if all are equal, otherwise the range, such as '128..1024'."""
    low, high = min(values), max(values)
    return low if low == high else f"{low}..{high}"
