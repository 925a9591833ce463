"""The compiled code of a layer and of the kernels around the grouped GEMM: TMA, WGMMA, no spills."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import sm90
import torch
from sm90 import H200, SHARED_MEMORY, empty, lowered, ptxas_says, requests
from sm90 import report as report_of

from moe_kernels import rules
from moe_kernels.glu import CLAMPED, GLUSpec
from moe_kernels.kernels import layer
from moe_kernels.ops.gating import CHOOSE_EXPERTS
from moe_kernels.ops.layer import ACTIVATE, ACTIVATE_BACKWARD, MOE_MLP, SWIGLU_FFN
from moe_kernels.ops.moves import COMBINE_ROWS, DOT_ROWS, ROUTE, SCATTER_ROWS
from moe_kernels.ops.products import GROUPED_GEMM, GROUPED_GEMM_WGRAD
from moe_kernels.runtime.cache import make_plan
from moe_kernels.runtime.plan import Request
from moe_kernels.runtime.signature import RANK_UP_TO, rows_bounds, rows_class, symbolic
from moe_kernels.runtime.symbolic import SymbolicInt, SymbolicTensor, most
from moe_kernels.runtime.targets import KNOWN

SILU = GLUSpec("silu", True, False, 1.0, 1.0)
LAYER_OPTIONS = (False, False, False, SILU)
UNROUTED = (None, None, None)  # in place of a routing


@pytest.fixture(autouse=True)
def _by_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the rule even if entries for this GPU are bundled."""
    monkeypatch.setattr(rules.entries, "near", lambda *_: [])


def i32(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int32)


def f32(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.float32)


def lean(asked_for: Sequence[Request]) -> list[dict[str, Any]]:
    reports = [lowered(request) for request in asked_for]
    for report in reports:
        assert_lean(report)
    return reports


def assert_lean(report: dict[str, Any]) -> None:
    assert report["shared"] <= SHARED_MEMORY
    assert report["stack"] == 0


@pytest.mark.parametrize(
    ("E", "options"),
    [
        (128, (8, True, True, 1, 1, 1.0)),
        (256, (8, False, True, 8, 4, 2.5)),
        (4096, (8, True, False, 1, 1, 1.0)),
    ],
    ids=str,
)
def test_gating_keeps_logits_in_registers(E: int, options: Any) -> None:
    """A multiprocessor has registers for at least 20 warps."""
    (report,) = lean(requests(CHOOSE_EXPERTS, (empty(4096, E), f32(E)), options))
    assert report["regs"] <= 65536 // (20 * 32)


def wgrad_report(M: int, P: int, Q: int, G: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    tensors = empty(M, P, dtype=dtype), empty(M, Q, dtype=dtype), i32(G + 1)
    *_, report = lean(requests(GROUPED_GEMM_WGRAD, tensors, (dtype,)))  # a kernel that orders offsets may come first
    return report


@pytest.mark.parametrize(("K", "N"), [(1024, 65536), (1024, 151936), (8192, 151936)])
def test_many_columns(K: int, N: int) -> None:
    """Windows overlap and groups are indexed in 64 bits: offsets in both fit into 32 bits, and TMA is kept, though
    Helion counts more than 2^31 elements.
    """
    M, E = 4096, 8
    offsets, A = i32(E + 1), empty(M, K)
    for operator, tensors, options in (
        (GROUPED_GEMM, (A, empty(E, K, N), offsets, None), (torch.bfloat16, "auto")),
        (GROUPED_GEMM_WGRAD, (A, empty(M, N), offsets), (torch.bfloat16,)),
        (SWIGLU_FFN, (A, offsets, empty(E, 2 * N, K).mT, None, None, None), (False, False, SILU)),
    ):
        report = lowered(requests(operator, tensors, options)[-1])
        assert report["wgmma"] > 0 and report["tma_load"] > 0 and report["stack"] == 0, report["name"]


@pytest.mark.parametrize(
    ("M", "P", "Q", "G"),
    [
        (65536, 2048, 1536, 128),
        (65536, 768, 128, 128),  # columns of X are the long side
        (8192, 4096, 28672, 8),
        (65536, 2048, 1536, 2048),  # offsets clamped beforehand
        (600_000, 4096, 4096, 512),  # more than 2^31 elements everywhere
    ],
)
def test_wgrad(M: int, P: int, Q: int, G: int) -> None:
    report = wgrad_report(M, P, Q, G)
    in_one_loop = M // G >= 256 and P % 128 == 0 and Q % 256 == 0
    assert report["name"] == ("wgrad_persistent" if in_one_loop else "wgrad")
    assert report["code"].count("_desc.load(") == 2
    # A loop without pipelining would have two.
    assert report["tma_load"] == 8 if in_one_loop else report["tma_load"] >= 2
    assert report["wgmma"] > 0
    if in_one_loop:  # a product continues while the operands of the next step are prepared
        assert "wgmma.wait_group.sync.aligned 1;" in report["ptx"]


@pytest.mark.parametrize(
    ("M", "P", "Q", "dtype"),
    [
        (128, 97, 259, torch.bfloat16),
        (40, 512, 512, torch.bfloat16),
        (4096, 1, 512, torch.bfloat16),
        (4096, 512, 512, torch.float32),
        (600_000, 4099, 12, torch.bfloat16),
    ],
)
def test_wgrad_without_tma(M: int, P: int, Q: int, dtype: torch.dtype) -> None:
    report = wgrad_report(M, P, Q, 8, dtype)
    assert "_desc.load(" not in report["code"]


@pytest.mark.parametrize(("R", "E"), [(8, 128), (4096, 512), (5000, 8), (65536, 128), (327_680, 512), (10**7, 1024)])
def test_route(R: int, E: int) -> None:
    asked_for = requests(ROUTE, (empty(R // 8, 8, dtype=torch.int64),), (E,))
    assert len(lean(asked_for)) == (1 if R <= RANK_UP_TO else 2)


@pytest.mark.parametrize("top_k", [1, 7, 8])
@pytest.mark.parametrize("T", [8192, 32_768, 40_960, 100_000, 10**6, 10**8])
def test_few_runs_of_slots(T: int, top_k: int) -> None:
    """Every program of the second launch reads the counts of all runs."""
    for request in requests(ROUTE, (empty(T, top_k, dtype=torch.int64),), (128,)):
        _, counts, *_ = request.arguments
        assert most(counts.size(0)) <= 512


@pytest.mark.parametrize(("T", "top_k", "H"), [(1, 8, 2048), (8192, 8, 2048), (4096, 2, 4096), (8192, 10, 7168)])
def test_moves(T: int, top_k: int, H: int) -> None:
    rows, tokens, topk_weights = empty(T * top_k, H), empty(T, H), f32(T, top_k)
    indices, bf16 = (i32(T * top_k), i32(129)), torch.bfloat16
    asked_for = [
        *requests(SCATTER_ROWS, (tokens, None, *indices), (top_k, bf16)),
        *requests(COMBINE_ROWS, (rows, topk_weights, *indices), (top_k, bf16)),
        *requests(DOT_ROWS, (tokens, rows, *indices), (top_k, torch.float32)),
    ]
    assert [request.kernel.name for request in asked_for] == ["scatter_rows", "combine_rows", "dot_rows"]
    for report in lean(asked_for):
        assert report["shared"] < 1024


@pytest.mark.parametrize(
    ("H", "I", "E", "top_k"), [(2048, 768, 128, 8), (4096, 14336, 8, 2), (7168, 2048, 256, 8), (97, 50, 4, 1)]
)
def test_one_token(H: int, I: int, E: int, top_k: int) -> None:  # noqa: E741
    slots = empty(1, top_k, dtype=torch.int64), f32(1, top_k)
    parameters = empty(E, 2 * I, H), empty(E, H, I), None, None, None, None
    first, second = lean(requests(MOE_MLP, (empty(1, H), *slots, *UNROUTED, *parameters), LAYER_OPTIONS))
    if H % 16 == 0:
        assert "ld.global.v4" in first["ptx"]
        assert "ld.global.v4" in second["ptx"]


@pytest.mark.parametrize("name", ["silu", "gelu", "clamped_swiglu", "clamped_silu"])
@pytest.mark.parametrize(("R", "width"), [(65536, 768), (8192, 14336)])
def test_activation(R: int, width: int, name: str) -> None:
    spec = GLUSpec(name, True, False, 1.702, 7.0)
    preact, d_act = empty(R, 2 * width), empty(R, width)
    weighted = f32(R // 8, 8), i32(R), i32(129)
    asked_for = [
        *requests(ACTIVATE, (preact, None), (spec,)),
        *requests(ACTIVATE_BACKWARD, (preact, None, d_act, None, None, None), (False, None, spec)),
        *requests(ACTIVATE_BACKWARD, (preact, None, d_act, *weighted), (True, None, spec)),
    ]
    names = [request.kernel.name for request in asked_for]
    assert names == ["activate", "activate_backward", "weighted_backward"]
    for report in lean(asked_for):
        assert report["regs"] <= 128


@pytest.mark.parametrize(
    ("R", "I", "format"),
    [(65536, 768, "rowwise"), (65536, 768, "1x128"), (8192, 8192, "rowwise"), (8192, 14336, "1x128")],
)
def test_activation_backward_quantises(R: int, I: int, format: str) -> None:  # noqa: E741
    """The gradient is quantised in registers; only scales and what belongs to a slot is narrow."""
    spec = GLUSpec("silu", True, False, 1.0, 1.0)
    tensors = empty(R, 2 * I), None, empty(R, I), f32(R // 8, 8), i32(R), i32(129)
    (request,) = requests(ACTIVATE_BACKWARD, tensors, (True, format, spec))
    (report,) = lean([request])
    assert report["name"] == "weighted_backward" and report["regs"] <= 64
    assert "cvt.rn.satfinite.e4m3x2.f32" in report["ptx"]
    accesses = re.findall(r"(ld|st)\.global([\w.:]*)", report["ptx"])
    assert sum("v4" in width for _, width in accesses) >= 6  # three loads and three stores in bfloat16
    assert all("b8" not in width and "b16" not in width for _, width in accesses), accesses


@pytest.mark.parametrize(
    ("keep", "bias", "top_k"), [(False, False, 0), (True, False, 8), (False, True, 8), (True, True, 0)]
)
def test_swiglu_of_many_rows(keep: bool, bias: bool, top_k: int) -> None:
    report = swiglu_report(65536, 2048, 768, 128, keep=keep, bias=bias, top_k=top_k)
    assert report["code"].count("_desc.load(") == (1 if top_k else 2)
    assert report["code"].count("_desc.store(") == (3 if keep else 1)
    assert report["wgmma"] > 0
    assert "flatten=True" in report["code"]
    assert "serialized" not in ptxas_says(report["ptx"])


@pytest.mark.parametrize("activation", CLAMPED)
def test_swiglu_with_limits(activation: str) -> None:
    spec = GLUSpec(activation, True, False, 1.702, 7.0)
    report = swiglu_report(65536, 2048, 768, 128, keep=True, bias=True, top_k=8, spec=spec)
    assert report["wgmma"] > 0
    assert "serialized" not in ptxas_says(report["ptx"])


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("R", [8, 128, 512, 4096, 8191])
def test_swiglu_of_few_tokens(R: int, columns: bool) -> None:
    """One token takes this kernel in training only."""
    report = swiglu_report(R, 2048, 768, 128, top_k=8, columns=columns, keep=R == 8)
    assert report["code"].count("_desc.load(") == 2
    assert report["cp_async"] > 0


@pytest.mark.parametrize(("keep", "bias", "top_k"), [(False, False, 8), (True, True, 8), (True, True, 0)])
@pytest.mark.parametrize(("H", "I"), [(7168, 2048), (2880, 2880)])
def test_swiglu_of_many_rows_with_slow_memory(
    monkeypatch: pytest.MonkeyPatch,
    H: int,
    I: int,  # noqa: E741
    keep: bool,
    bias: bool,
    top_k: int,
) -> None:
    """On an H100, each program of 64 to 255 rows per expert computes one tile, 128 rows high."""
    monkeypatch.setattr(sm90, "H200", KNOWN["h100"])
    for rows in (64, 255):
        report = swiglu_report(rows * 128, H, I, 128, keep=keep, bias=bias, top_k=top_k)
        assert "persistent" not in report["name"]
        assert report["code"].count("_desc.load(") == (2 if top_k else 3)
        assert report["wgmma"] > 0
        assert "serialized" not in ptxas_says(report["ptx"])


@pytest.mark.parametrize("E", [8192, 4096], ids=["73 rows", "146 rows"])
def test_swiglu_of_more_than_2_to_the_31_elements_of_tokens(monkeypatch: pytest.MonkeyPatch, E: int) -> None:
    """The rows have an odd length, so TMA cannot read them."""
    monkeypatch.setattr(layer, "fuses", lambda *_: True)
    report = swiglu_report(600_000, 4099, 64, E, top_k=1)
    assert "tl.int64" in report["code"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("M", "H", "I"), [(65536, 97, 259), (4096, 2048, 768), (100, 64, 64)])  # fmt: skip
def test_swiglu_of_other_shapes(
    monkeypatch: pytest.MonkeyPatch,
    M: int,
    H: int,
    I: int,  # noqa: E741
    dtype: torch.dtype,
) -> None:
    monkeypatch.setattr(layer, "fuses", lambda *_: True)
    swiglu_report(M, H, I, 16, keep=True, dtype=dtype)


def swiglu_report(
    M: int,
    H: int,
    I: int,  # noqa: E741
    E: int,
    *,
    keep: bool = False,
    columns: bool = False,
    bias: bool = False,
    top_k: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    spec: GLUSpec = SILU,
) -> dict[str, Any]:
    """Return the report of the fused first half; with `top_k`, as a part of a layer."""
    w_in = empty(E, H, 2 * I, dtype=dtype) if columns else empty(E, 2 * I, H, dtype=dtype).mT
    b_in = empty(E, 2 * I, dtype=dtype) if bias else None
    hidden, options = empty(M // max(top_k, 1), H, dtype=dtype), (keep, False, spec)
    if top_k:
        routing = empty(M // top_k, top_k, dtype=torch.int64), f32(M // top_k, top_k), i32(E + 1), i32(M), i32(M)
        w_down = empty(E, H, I, dtype=dtype)
        weights = (w_in, w_down.mT, None) if columns else (w_in.mT, w_down, None)
        asked_for = requests(MOE_MLP, (hidden, *routing, *weights, b_in, None, None), (columns, False, keep, spec))
    else:
        asked_for = requests(SWIGLU_FFN, (hidden, i32(E + 1), w_in, None, b_in, None), options)
    names = [request.kernel.name for request in asked_for]
    fused = next(i for i, name in enumerate(names) if name.startswith("swiglu"))
    return lean(asked_for[: fused + 1])[-1]


def layer_tensors(T: int) -> tuple[torch.Tensor | None, ...]:
    """Return tensors for a layer of qwen3-30b-a3b."""
    E, top_k, H, I = 128, 8, 2048, 768  # noqa: E741
    routing = empty(T, top_k, dtype=torch.int64), f32(T, top_k)
    return empty(T, H), *routing, *UNROUTED, empty(E, 2 * I, H), empty(E, H, I), None, None, None, None


def specialization(request: Request) -> tuple[Any, ...]:
    """Return what a request's compilation depends on, which excludes numbers of rows and addresses."""
    arguments = tuple(_kind(x) for x in request.arguments)
    return request.kernel.name, request.config, request.int64_index, request.precision, arguments


def _kind(x: Any) -> Any:
    if isinstance(x, SymbolicTensor):
        return x.dtype, tuple(_kind(n) for n in x.shape), x.strides, x.aligned
    return SymbolicInt if isinstance(x, SymbolicInt) else x


def test_a_layer_of_any_number_of_tokens_compiles_few_kernels() -> None:
    """Plans are drawn for all T up to 8192, one per class, without compiling."""
    bounds: dict[tuple[int, ...], tuple[int, int]] = {}
    configs, specializations = set(), set()
    for T in range(1, 8193):
        tensors = layer_tensors(T)
        counts = MOE_MLP.counts(tensors, LAYER_OPTIONS)
        low, high = rows_bounds(counts)
        assert low <= T <= high
        known = bounds.get(rows_class(counts))
        assert known in (None, (low, high))  # a plan for another T of the class serves this T, too
        if known is None:
            bounds[rows_class(counts)] = low, high
            asked_for = requests(MOE_MLP, tensors, LAYER_OPTIONS)
            configs |= {(request.kernel.name, request.config) for request in asked_for}
            specializations |= {specialization(request) for request in asked_for}
    assert len(bounds) <= 17
    assert len(configs) <= 17
    assert len(specializations) <= 24


@pytest.mark.parametrize(
    ("T", "products"),
    [
        (1, {}),  # matrix-vector products
        (16, {"swiglu": "mma_sync", "jagged": "mma_sync"}),  # WGMMA multiplies at least 64 rows
        (300, {"swiglu": "mma_sync", "jagged": "wgmma"}),
        (600, {"swiglu": "wgmma", "jagged": "wgmma"}),
        (8192, {"swiglu_persistent": "wgmma", "jagged_tails": "wgmma"}),
    ],
)
def test_binaries_of_a_layer(T: int, products: dict[str, str]) -> None:
    plan, specialized = make_plan(MOE_MLP, symbolic(MOE_MLP, layer_tensors(T), LAYER_OPTIONS), LAYER_OPTIONS, H200)
    assert set(plan.binaries) == set(specialized)
    found = {}
    for one in specialized.values():
        report, name = report_of(one), one.function.__name__.removeprefix("_helion_")
        assert_lean(report)
        if report["wgmma"] or report["mma_sync"]:
            found[name] = "wgmma" if report["wgmma"] else "mma_sync"
    assert found == products
