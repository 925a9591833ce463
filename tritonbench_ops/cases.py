"""The problems that our operators are timed on. Needs no TritonBench.

Every list starts with what a serving step looks like and ends with what a training step looks like. A CPU gets small
ones: there the operators show that the providers work and agree, not how fast they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moe_kernels.bench.suites import MODELS
from moe_kernels.testing import SizeKind

TOKENS = (16, 512, 8192)
_RANKS = 8  # of the expert-parallel DeepSeek-V3
_FFN = ("qwen3-30b", "mixtral-8x7b", "olmoe", "deepseek-v3, 1 rank of 8")
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
    "deepseek-v3, 1 rank of 8",
    "kimi-k2",
)
_CLOSER = ("mixtral-8x7b", "qwen3-30b", "deepseek-v3, 1 rank of 8")  # few wide experts, many narrow ones, and between


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
    """Products [M, K] x [K, N], each of its own (M, N, K)."""

    name: str
    problems: tuple[tuple[int, int, int], ...]


class FfnCase(NamedTuple):
    """A layer of E experts [H, width], top_k of them for each of T tokens."""

    T: int
    H: int
    width: int
    E: int
    top_k: int
    model: str


def _layers() -> dict[str, tuple[int, int, int, int]]:
    """By name (H, I, G, rows per token); a rank has an eighth of the experts and is sent an eighth of 8 ranks' rows."""
    H, width, experts, top_k = MODELS["deepseek-v3"]
    return {**MODELS, "deepseek-v3, 1 rank of 8": (H, width, experts // _RANKS, top_k)}


def ffn_cases(device: str) -> list[FfnCase]:
    """Four models' layers at each of TOKENS."""
    if device == "cpu":
        return [FfnCase(40, 48, 32, 6, 2, "small"), FfnCase(1, 48, 32, 6, 2, "small")]
    layers = _layers()
    return [FfnCase(T, *layers[name], name) for T in TOKENS for name in _FFN]


def moe_cases(device: str) -> list[MoeCase]:
    """Gate and up projection of each model at each of TOKENS; then, of three, down and other ways to split the rows."""
    if device == "cpu":
        kinds: tuple[SizeKind, ...] = ("uniform", "softmax", "zipf", "empty")
        return [MoeCase(8, 96, 64, 80, kind, "small") for kind in kinds]
    layers = _layers()

    def up(name: str, tokens: int, sizes: SizeKind) -> MoeCase:
        H, width, G, top_k = layers[name]
        return MoeCase(G, tokens * top_k, 2 * width, H, sizes, f"{name} up")

    cases = [up(name, tokens, "softmax") for tokens in TOKENS for name in _GEMMS]
    for name in _CLOSER:
        H, width, G, top_k = layers[name]
        cases.append(MoeCase(G, TOKENS[-1] * top_k, H, width, "softmax", f"{name} down"))
    others: tuple[SizeKind, ...] = ("uniform", "zipf", "empty")
    return cases + [up(name, TOKENS[-1], sizes) for name in _CLOSER for sizes in others]


def uniform_cases(device: str) -> list[UniformCase]:
    """The published pair, thin outputs, sizes that no tile divides, and experts with equal capacity."""
    if device == "cpu":
        return [UniformCase(4, 48, 16, 64), UniformCase(3, 33, 7, 50)]
    published = [UniformCase(8, 512, 64, 512), UniformCase(8, 2048, 64, 2048)]
    thin = [UniformCase(8, 2048, N, K) for N in (8, 16, 32, 64) for K in (512, 1024, 2048)]
    uneven = [UniformCase(8, 500, 72, 520), UniformCase(16, 1000, 100, 1000), UniformCase(8, 333, 97, 259)]
    capacity = [
        UniformCase(128, 8, 1536, 2048),
        UniformCase(128, 512, 1536, 2048),
        UniformCase(64, 512, 2048, 2048),
        UniformCase(32, 2048, 4096, 7168),
        UniformCase(8, 1024, 28672, 4096),
    ]
    return list(dict.fromkeys(published + thin + uneven + capacity))


def varied_cases(device: str) -> list[VariedCase]:
    """Four equal cubes of each size, four different ones, a small worked example, and experts of several widths."""
    worked = VariedCase("two unlike", ((192, 320, 128), (256, 448, 192)))
    if device == "cpu":
        return [VariedCase("4 x 32^3", ((32, 32, 32),) * 4), worked, VariedCase("uneven", ((3, 7, 97), (1, 5, 16)))]
    cubes = [VariedCase(f"4 x {n}^3", ((n, n, n),) * 4) for n in (128, 256, 512, 1024)]
    mixed = VariedCase("cubes 1024 to 128", tuple((n, n, n) for n in (1024, 512, 256, 128)))
    rows = (1, 17, 64, 130, 256, 511, 700, 1024)
    widths = (768, 1024, 1408, 1536, 2048, 768, 1024, 1408)
    experts = VariedCase(
        "experts of several widths", tuple((m, 2 * i, 2048) for m, i in zip(rows, widths, strict=True))
    )
    return [*cubes, mixed, worked, experts]


def extent(values: Sequence[int]) -> int | str:
    """128 if all values are 128, otherwise '128..1024'."""
    low, high = min(values), max(values)
    return low if low == high else f"{low}..{high}"
