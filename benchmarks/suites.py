"""The cases to measure, and the suites that group them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from moe_kernels.testing import SizeKind, group_sizes_for
from tritonbench_ops.cases import CUBES, LAYERS, RANK, THIN, UNEVEN, UNLIKE_CUBES

TIMINGS = ("eager", "graph")
WARM_CALLS = 100  # calls in one graph for the timing "warm"
LAYOUTS = {"gkn": ("gkn",), "gnk": ("gnk",), "both": ("gkn", "gnk")}  # the values of --layout


@dataclass(frozen=True)
class Case:
    """One problem: M rows in G groups, each with a weight of [K, N].

    In the suite `uniform` M is the rows of each group. In `varied` the G problems have sizes of their own, and M, N and
    K are the largest. In `ffn` and `ffn-train` a case is a whole layer: G experts, M = T * top_k rows of T tokens, the
    experts' width N and the hidden size K. In `gating` there are G experts and M tokens, N is top_k, and K the number
    of groups of experts, or 0 for gating by softmax.
    """

    name: str
    G: int
    M: int
    N: int
    K: int
    sizes: SizeKind = "softmax"
    layout: str = "gkn"  # memory layout of a weight: "gkn" for [G, K, N], "gnk" for [G, N, K] viewed transposed
    dtype: str = "bfloat16"
    problems: tuple[tuple[int, int, int], ...] = ()  # (M, N, K) of each product, in `varied`
    warm: bool = False  # also timed as WARM_CALLS calls in one graph, with a warm L2 cache
    top_k: int = 1  # experts per token, in `ffn` and `ffn-train`

    @property
    def weights(self) -> tuple[Any, ...]:
        """The key of the weights; cases with equal keys share them."""
        return self.G, self.N, self.K, self.layout, self.dtype, self.problems


@dataclass(frozen=True)
class Suite:
    """Cases of one operator, and how to time them by default."""

    name: str
    about: str
    operator: str  # a key of operators.OPERATORS
    shapes: tuple[Case, ...]
    providers: tuple[str, ...]  # besides the peers that are installed
    peers: bool = True
    layouts: tuple[str, ...] = LAYOUTS["both"]
    rounds: int = 21

    def cases(self, layouts: Sequence[str] = ()) -> list[Case]:
        """Return each shape in each layout; cases that share weights are adjacent."""
        found = [replace(shape, layout=layout) for shape in self.shapes for layout in layouts or self.layouts]
        order = list(dict.fromkeys(case.weights for case in found))
        return sorted(found, key=lambda case: order.index(case.weights))


def several(
    name: str, problems: Sequence[tuple[int, int, int]], sizes: SizeKind, dtype: str = "float16", warm: bool = False
) -> Case:
    """Return a case of `varied` from a list of products (M, N, K)."""
    M, N, K = (max(extents) for extents in zip(*problems, strict=True))
    return Case(name, len(problems), M, N, K, sizes, dtype=dtype, problems=tuple(problems), warm=warm)


def layer(name: str, T: int, H: int, width: int, E: int, top_k: int) -> Case:
    """Return a case of a whole layer: E experts, for T tokens."""
    return Case(f"{name}, T = {T}", E, T * top_k, width, H, layout="gnk", top_k=top_k)


_TABLE = (
    Case("dsv3_ep_up", 8, 16384, 4096, 7168),
    Case("dsv3_ep_down", 8, 16384, 7168, 2048),
    Case("qwen3_up", 128, 65536, 1536, 2048),
    Case("qwen3_down", 128, 65536, 2048, 768),
    Case("qwen3_up_zipf", 128, 65536, 1536, 2048, "zipf"),
    Case("mixtral_up", 8, 8192, 28672, 4096),
    Case("mixtral_down", 8, 8192, 4096, 14336),
    Case("olmoe_up", 64, 32768, 2048, 2048),
    Case("gptoss_up", 32, 16384, 5760, 2880),
    Case("decode_qwen3", 128, 512, 1536, 2048),
    Case("decode_dsv3", 32, 64, 4096, 7168),
)
_UNIFORM = (
    *(Case(f"{M} x {N} x {K}", 8, M, N, K, "uniform", warm=True) for M, K in ((512, 512), (2048, 2048)) for N in THIN),
    *(
        Case(f"{M} x {N} x {K}", G, M, N, K, "uniform", warm=warm)
        for G, M, N, K, warm in (
            (8, 1000, 48, 1000, True),
            *((*case, True) for case in UNEVEN),
            (64, 128, 128, 128, True),
            (32, 256, 256, 256, True),
            (128, 8, 1536, 2048, False),
            (128, 64, 1536, 2048, False),
            (16, 128, 1536, 2048, False),
            (8, 512, 4096, 2048, False),
            (8, 2048, 2048, 2048, False),
            (8, 4096, 4096, 4096, False),
        )
    ),
)
_VARIED = (
    *(several(name, problems, "uniform", warm=True) for name, problems in CUBES),
    several("cubes of 1024 to 128", UNLIKE_CUBES, "random", warm=True),
    several("16 experts", [(M, 1536, 2048) for M in group_sizes_for("softmax", 16, 4096)], "softmax", "bfloat16"),
    several(
        "unlike layers",
        [(512, 4096, 1024), (2048, 512, 4096), (96, 2880, 2880), (1, 768, 2048), (777, 1000, 992)],
        "random",
    ),
)
_FFN = (
    layer("qwen3_30b", 8192, *LAYERS["qwen3-30b"]),
    layer("mixtral", 4096, *LAYERS["mixtral-8x7b"]),
    layer("dsv3_ep", 4096, *LAYERS[RANK]),
    layer("olmoe", 4096, *LAYERS["olmoe"]),
)
_FLOAT32 = (
    Case("16 experts", 16, 4096, 2048, 2048, "uniform", dtype="float32"),
    Case("16 experts, zipf", 16, 4096, 2048, 2048, "zipf", dtype="float32"),
    Case("16 experts, few rows", 16, 256, 2048, 2048, "uniform", dtype="float32"),
    Case("16 experts, decoding", 16, 64, 2048, 2048, "uniform", dtype="float32"),
    Case("8 experts", 8, 8192, 1024, 512, "uniform", dtype="float32"),
    Case("64 experts", 64, 8192, 1024, 1024, "uniform", dtype="float32"),
    Case("128 experts", 128, 4096, 1536, 2048, "uniform", dtype="float32"),
    Case("4 experts, thin", 4, 4096, 512, 4096, "uniform", dtype="float32"),
)
_LOW_RANK = tuple(
    Case(f"{name}, {step} rank {r}", G, M, *extents)
    for name, G, M, H in (("qwen3", 128, 65536, 2048), ("mixtral", 8, 16384, 4096))
    for r in (8, 16, 64, 128)
    for step, extents in (("to", (r, H)), ("from", (H, r)))
)
_GATING = tuple(
    Case(f"{name}, T = {T}", E, T, top_k, num_groups, "uniform")
    for name, E, top_k, num_groups in (
        ("qwen3-30b", 128, 8, 0),
        ("qwen3-next", 512, 10, 0),
        ("deepseek-v3", 256, 8, 8),
        ("kimi-k2", 384, 8, 1),
    )
    for T in (1, 64, 512, 8192)
)
_SHARED = ("dsv3_ep_up", "qwen3_up", "qwen3_down", "mixtral_down", "decode_qwen3")

SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            "table",
            "prefill and decode shapes of five models, a weight per group, in both layouts",
            "grouped_gemm",
            _TABLE,
            ("torch", "ours", "basic", "persistent", "no-table", "loop", "dense"),
        ),
        Suite(
            "low-rank",
            "the two products of adapters of low rank (LoRA), one adapter per expert: N or K is the rank",
            "grouped_gemm",
            _LOW_RANK,
            ("torch", "ours"),
        ),
        Suite(
            "float32",
            "float32, which tensor cores multiply in three products of TF32, beside a loop of torch.mm in float32",
            "float32",
            _FLOAT32,
            ("loop", "ours"),
            peers=False,
        ),
        Suite(
            "shared",
            "one weight for all groups, beside torch.mm",
            "shared_gemm",
            tuple(case for case in _TABLE if case.name in _SHARED),
            ("mm", "ours", "persistent"),
            peers=False,
        ),
        Suite(
            "uniform",
            "groups of one size each, beside torch.bmm: thin outputs, the published shapes (8, 512, 64, 512) and "
            "(8, 2048, 64, 2048) among them, sizes that no tile divides, large ones; M is rows of each group",
            "uniform",
            _UNIFORM,
            ("bmm", "torch", "ours", "bmm-fp32", "ours-fp32"),
            peers=False,
            layouts=LAYOUTS["gkn"],
        ),
        Suite(
            "varied",
            "lists of products, each of its own size, beside a loop of torch.mm (cuBLAS): group-gemm-performance (4 "
            "times N x N x N in float16) and mixes; M, N, K are the largest",
            "varied",
            _VARIED,
            ("loop", "ours", "call"),
            peers=False,
            layouts=LAYOUTS["gkn"],
        ),
        Suite(
            "ffn",
            "whole layers, from hidden states and ids to the output, in prefill and decode, beside the layer of "
            "transformers; G experts, M = T * top_k rows, width N, hidden size K",
            "ffn",
            (*_FFN, *(layer("qwen3_30b", T, *LAYERS["qwen3-30b"]) for T in (1, 16, 64))),
            ("transformers", "compiled", "ours"),
            layouts=LAYOUTS["gnk"],
        ),
        Suite(
            "ffn-train",
            "the same forward and backward, with the gradients of hidden states and of all weights, and the peak "
            "of the memory that this takes",
            "ffn-train",
            _FFN,
            ("transformers", "compiled", "ours"),
            layouts=LAYOUTS["gnk"],
        ),
        Suite(
            "gating",
            "logits to the experts' ids and weights, by softmax, or by sigmoid as in DeepSeek-V3, beside operators of "
            "PyTorch, eager and compiled; E experts, T tokens, top_k, groups of experts",
            "gating",
            _GATING,
            ("torch", "compiled", "ours"),
            peers=False,
            layouts=LAYOUTS["gkn"],
        ),
        Suite(
            "smoke",
            "three tiny cases, also on a CPU: shows that the command works, not how fast anything is",
            "grouped_gemm",
            (
                Case("even", 4, 64, 32, 48, "uniform"),
                Case("empty groups", 5, 70, 40, 64, "empty"),
                Case("one row", 3, 1, 16, 16),
            ),
            ("torch", "ours", "basic", "persistent", "loop"),
            rounds=3,
        ),
    )
}


def of_shapes(shapes: Sequence[tuple[int, int, int, int]], kinds: Sequence[SizeKind]) -> Suite:
    """Return a suite of the shapes on the command line, timed like `table`."""
    cases = tuple(
        Case(f"{kind} {','.join(map(str, shape))}", *shape, sizes=kind)
        for shape in dict.fromkeys(shapes)
        for kind in kinds
    )
    return replace(SUITES["table"], name="shapes", about="given on the command line", shapes=cases)
