"""The compiled code for the rule's configs: WGMMA, TMA loads, no spills, shared memory that fits."""

from __future__ import annotations

import itertools
import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from helion._compiler import inductor_lowering
from helion._compiler.type_propagation import TypePropagation
from sm90 import H200, SHARED_MEMORY, empty, lowered, ptxas_says, requests

from moe_kernels import rules
from moe_kernels.kernels.tiles import plan_table
from moe_kernels.ops.products import GROUPED_GEMM, GROUPED_GEMM_WGRAD, GROUPED_MM
from moe_kernels.runtime import cache, targets
from moe_kernels.runtime import compile as compiler
from moe_kernels.runtime.plan import Builder, Request
from moe_kernels.runtime.signature import symbolic


def compiled(
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    shape: tuple[int, int, int, int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    transposed: bool = False,
    bias: bool = False,
    misaligned: bool = False,
    unaligned: tuple[str, ...] = (),
    out_dtype: torch.dtype | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the report of each kernel that a call with these tensors compiles, by the kernel's name."""
    monkeypatch.setattr(rules.entries, "near", lambda *_: [])  # use the rule even if entries for this GPU are bundled
    G, M, N, K = shape
    A = empty(M, K + misaligned, dtype=dtype).narrow(1, 0, K)
    B = empty(G, N, K, dtype=dtype).mT if transposed else empty(G, K, N, dtype=dtype)
    biases = empty(G, N, dtype=dtype) if bias else None
    tensors = (A, B, empty(G + 1, dtype=torch.int32), biases)
    asked_for = requests(GROUPED_GEMM, tensors, (out_dtype or dtype, variant), unaligned)
    return {request.kernel.name: lowered(request) for request in asked_for}


def assert_lean(report: dict[str, Any]) -> None:
    assert report["shared"] <= SHARED_MEMORY
    assert report["stack"] == 0


NARROW = [
    *itertools.product([(512, 8, 2880, 2048)], [False, True], [False, True]),
    ((1024, 8, 2880, 2880), True, False),
    ((1024, 8, 2880, 2880), False, True),
    ((1024, 8, 1408, 2048), True, True),
]


@pytest.mark.parametrize(
    ("shape", "transposed", "bias"),
    [
        *itertools.product(
            [(512, 512, 1536, 2048), (512, 8, 2752, 2048), (512, 1024, 768, 712)], [False, True], [False, True]
        ),
        *NARROW,
    ],
    ids=str,
)
def test_tails(monkeypatch: pytest.MonkeyPatch, transposed: bool, bias: bool, shape: tuple[int, int, int, int]) -> None:
    """All loops over tiles are as lean as that of `jagged_persistent`."""
    rows, G, N, K = shape
    reports = compiled(monkeypatch, "persistent", (G, rows * G, N, K), transposed=transposed, bias=bias)
    report = reports["jagged_tails"]
    assert_lean(report)
    narrow = (shape, transposed, bias) in NARROW
    assert len(re.findall(r"_desc\w*\.load\(", report["code"])) == (6 if narrow else 4)
    stores = 5 if narrow else 4 if N % 128 == 0 else 8
    assert len(re.findall(r"out_desc\w*\.store\(", report["code"])) == stores
    assert report["tma_load"] >= 4 and report["wgmma"] > 0 and report["cp_async"] == 0
    flattened = [line for line in report["code"].splitlines() if "flatten=True" in line]
    assert len(flattened) == (3 if narrow else 2)
    assert not any("_BLOCK_SIZE" in line for line in flattened)  # they are loops over tiles
    assert report["code"].count("num_stages=6") == (narrow and N % 256 == 128)
    assert report["grid"] == (132,)
    assert_lean(reports["tile_table"])


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((64, 4096, 7168), {"transposed": True}),
        ((128, 3080, 4096), {"bias": True}),
        ((128, 4096, 4096), {"transposed": True, "out_dtype": torch.float32}),
    ],
    ids=str,
)
def test_tall(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], options: dict[str, Any]) -> None:
    """The rule with large weights. The two products of a taller tile are not serialized by ptxas (C7514 to C7519)."""
    rows, N, K = shape
    reports = compiled(monkeypatch, "auto", (128, 128 * rows, N, K), **options)
    report = reports["jagged_tall"]
    assert_lean(report)
    assert len(re.findall(r"_desc\w*\.load\(", report["code"])) == 5
    assert report["tma_load"] >= 5 and report["wgmma"] > 0 and report["cp_async"] == 0
    assert "(C75" not in ptxas_says(report["ptx"])
    assert_lean(reports["tile_table"])


@pytest.mark.parametrize("transposed", [False, True], ids=["B [G, K, N]", "B [G, N, K] viewed"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("rows", "K"), [(256, 2048), (512, 4096)], ids=str)
def test_persistent(monkeypatch: pytest.MonkeyPatch, transposed: bool, bias: bool, rows: int, K: int) -> None:
    reports = compiled(monkeypatch, "persistent", (8, 8 * rows, 1400, K), transposed=transposed, bias=bias)
    report = reports["jagged_persistent"]
    assert_lean(report)
    assert report["code"].count("_desc.load(") == 2
    assert report["code"].count("out_desc.store(") == 2  # in halves, so that shared memory suffices for four stages
    assert report["tma_load"] >= 2
    assert report["wgmma"] > 0
    assert "flatten=True" in report["code"]
    assert report["grid"][0] % 132 == 0
    assert_lean(reports["tile_table"])


@pytest.mark.parametrize("transposed", [False, True], ids=["B [G, K, N]", "B [G, N, K] viewed"])
@pytest.mark.parametrize("rows", [4, 20, 50, 128], ids=str)
def test_basic(monkeypatch: pytest.MonkeyPatch, transposed: bool, rows: int) -> None:
    report = compiled(monkeypatch, "basic", (32, 32 * rows, 1536, 2048), transposed=transposed)["jagged"]
    assert_lean(report)
    assert report["code"].count("_desc.load(") == 2
    assert report["tma_load"] >= 2
    # WGMMA multiplies at least 64 rows; with fewer rows memory is the limit, not the slower instruction.
    assert report["wgmma" if rows >= 8 else "mma_sync"] > 0


@pytest.mark.parametrize("variant", ["basic", "persistent"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes(monkeypatch: pytest.MonkeyPatch, variant: str, dtype: torch.dtype) -> None:
    for report in compiled(monkeypatch, variant, (8, 4096, 768, 512), dtype=dtype).values():
        assert_lean(report)


@pytest.mark.parametrize("variant", ["basic", "persistent"])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str
)
def test_results_of_another_dtype(
    monkeypatch: pytest.MonkeyPatch, variant: str, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    for report in compiled(monkeypatch, variant, (8, 8192, 1536, 2048), dtype=dtype, out_dtype=out_dtype).values():
        assert_lean(report)


@pytest.mark.parametrize("variant", ["basic", "persistent"])
@pytest.mark.parametrize(
    "shape", [(8, 4096, 97, 259), (64, 64, 97, 259), (8, 5, 16, 16), (128, 100_000, 9, 3)], ids=str
)
def test_what_tma_cannot_read(monkeypatch: pytest.MonkeyPatch, variant: str, shape: tuple[int, int, int, int]) -> None:
    _, M, _, K = shape
    copied = M > 128 and K >= 16
    reports = compiled(monkeypatch, variant, shape, misaligned=True)
    assert ("copy_row_major" in reports) == copied
    for name, report in reports.items():
        assert_lean(report)
        assert ("A_packed_desc.load(" in report["code"]) == (copied and name.startswith("jagged"))
        assert "out_desc.store(" not in report["code"]


@pytest.mark.parametrize("variant", ["basic", "persistent"])
@pytest.mark.parametrize(("M", "unaligned", "aligned"), [(128, "A_packed", "B"), (1016, "B", "A_packed")])
def test_odd_addresses(monkeypatch: pytest.MonkeyPatch, variant: str, M: int, unaligned: str, aligned: str) -> None:
    """Few rows, or weights for few rows, at an odd address are read neither by TMA nor 16 bytes at a time."""
    reports = compiled(monkeypatch, variant, (8, M, 1536, 2048), unaligned=(unaligned,))
    reports.pop("tile_table", None)
    (report,) = reports.values()
    assert_lean(report)
    assert f"{unaligned}_desc.load(" not in report["code"]
    assert f"{aligned}_desc.load(" in report["code"]
    assert report["cp_async"] == 0  # it cannot copy 2 bytes


@pytest.mark.parametrize("strides", [(1, 4096), (1, 4097), (0, 0), (2049, 1), "an odd address"], ids=str)
def test_many_rows_that_tma_cannot_read_are_copied(strides: Any) -> None:
    """A copy is written in 16 bytes at a time, and read by TMA; both operands of a gradient of weights are copied."""
    odd = strides == "an odd address"
    rows = torch.empty_strided((4096, 2048), (2048, 1) if odd else strides, dtype=torch.bfloat16, device="meta")
    offsets = empty(9, dtype=torch.int32)
    product: Any = (GROUPED_GEMM, (rows, empty(8, 2048, 1536), offsets, None), (torch.bfloat16, "auto"))
    gradient: Any = (GROUPED_GEMM_WGRAD, (rows, rows, offsets), (torch.bfloat16,))
    for (operator, tensors, options), copies in ((product, 1), (gradient, 2)):
        unaligned = [name for name, x in zip(operator.inputs, tensors, strict=True) if odd and x is rows]
        reports = [lowered(request) for request in requests(operator, tensors, options, unaligned)]
        for report in reports[:copies]:
            assert report["name"] == "copy_row_major"
            assert set(re.findall(r"st\.global[\w.:]*", report["ptx"])) == {"st.global.v4.b32"}
            assert_lean(report)
        assert all(report["name"] != "copy_row_major" for report in reports[copies:])
        assert reports[-1]["tma_load"] >= 2 and reports[-1]["cp_async"] == 0


@pytest.mark.parametrize(("K", "N"), [(2047, 1536), (2048, 1535), (2042, 1530)])
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_of_any_length_are_copied_for_tma(K: int, N: int, transposed: bool) -> None:
    """Copies have rows that begin at multiples of 16 bytes, so TMA reads operands with any number of columns.

    Weights are copied from 128 rows per group on, because a copy takes as long for few rows as for many.
    """
    of_rows, of_weights = K % 8 != 0, (K if transposed else N) % 8 != 0
    for rows in (128, 127):
        B = empty(8, N, K).mT if transposed else empty(8, K, N)
        tensors = (empty(8 * rows, K), B, empty(9, dtype=torch.int32), None)
        reports = [lowered(request) for request in requests(GROUPED_GEMM, tensors, (torch.bfloat16, "auto"))]
        copies = [report for report in reports if report["name"] == "copy_row_major"]
        read_by_tma = {"A_packed", "B"} if rows == 128 or not of_weights else {"A_packed"}
        assert len(copies) == of_rows + (of_weights and rows == 128)
        assert set(re.findall(r"\b(\w+)_desc\.load\(", reports[-1]["code"])) == read_by_tma
        for report in copies:
            assert set(re.findall(r"st\.global[\w.:]*", report["ptx"])) == {"st.global.v4.b32"}
            assert_lean(report)
    tensors = (empty(1024, K), empty(1024, N), empty(9, dtype=torch.int32))
    *copies, report = [lowered(request) for request in requests(GROUPED_GEMM_WGRAD, tensors, (torch.bfloat16,))]
    assert [copy["name"] for copy in copies] == ["copy_row_major"] * ((K % 8 != 0) + (N % 8 != 0))
    assert report["tma_load"] >= 2


@pytest.mark.parametrize(
    ("shape", "transposed", "name", "loads", "stores"),
    [
        ((64, 32768, 2048, 64), True, "jagged_persistent", 2, 2),
        ((64, 32768, 2880, 256), False, "jagged_persistent", 2, 2),
        ((64, 32768, 2048, 8), True, "jagged_persistent", 2, 2),
        ((64, 32768, 2048, 8), False, "jagged_persistent", 2, 2),
        ((64, 32768, 2880, 36), True, "jagged_persistent", 0, 2),
        ((64, 32768, 2880, 36), False, "jagged_persistent", 1, 2),
        ((64, 32768, 8, 2048), True, "jagged", 2, 0),
        ((64, 32768, 8, 2048), False, "jagged", 2, 0),
        ((64, 32768, 24, 2048), True, "jagged", 2, 0),
        ((64, 32768, 36, 2048), False, "jagged", 1, 0),
        ((64, 32768, 96, 2048), False, "jagged_persistent", 2, 2),
        ((64, 32768, 2048, 48), True, "jagged_persistent", 2, 2),
    ],
    ids=str,
)
def test_adapters_of_low_rank(
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, int, int, int],
    transposed: bool,
    name: str,
    loads: int,
    stores: int,
) -> None:
    """A small K is stored by TMA even if TMA cannot read it; with few columns, TMA reads the rows."""
    report = compiled(monkeypatch, "auto", shape, transposed=transposed)[name]
    assert_lean(report)
    assert report["wgmma"] > 0
    assert len(re.findall(r"_desc\w*\.load\(", report["code"])) == loads
    assert len(re.findall(r"out_desc\w*\.store\(", report["code"])) == stores


@pytest.mark.parametrize("rank", [4, 8, 16, 24, 36, 64, 96, 128])
def test_weight_gradients_of_low_rank(rank: int) -> None:
    """A block may be larger than an operand. Rows that are no multiple of 16 bytes are copied if TMA can read them."""
    rows, few, offsets = empty(32768, 2048), empty(32768, rank), empty(65, dtype=torch.int32)
    for tensors in ((rows, few, offsets), (few, rows, offsets)):
        *copies, report = [lowered(request) for request in requests(GROUPED_GEMM_WGRAD, tensors, (torch.bfloat16,))]
        assert_lean(report)
        assert report["name"] == "wgrad"
        assert (report["tma_load"] > 0) == (rank >= 8)
        assert [copy["name"] for copy in copies] == ["copy_row_major"] * (rank == 36)


def test_weights_of_more_than_2_to_the_31_elements_keep_tma(monkeypatch: pytest.MonkeyPatch) -> None:
    for G, rows, K, variant, name, loads in (
        (512, 128, 4096, "basic", "jagged", 2),
        (2560, 128, 512, "persistent", "jagged_persistent", 2),
        (512, 256, 4096, "persistent", "jagged_tails", 4),
    ):
        report = compiled(monkeypatch, variant, (G, G * rows, 2048, K))[name]
        assert len(re.findall(r"_desc\w*\.load\(", report["code"])) == loads
        assert_lean(report)


def test_large_spans_without_tma_are_addressed_in_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    for variant, name in (("basic", "jagged"), ("persistent", "jagged_persistent")):
        assert "tl.int64" in compiled(monkeypatch, variant, (4, 600_000, 4096, 4095))["copy_row_major"]["code"]
        report = compiled(monkeypatch, variant, (4, 600_000, 4099, 4095), dtype=torch.float32)[name]
        assert "tl.int64" in report["code"]
        assert "_desc.load(" not in report["code"]
        assert report["shared"] <= SHARED_MEMORY


@pytest.mark.parametrize("gpu", ["b200", "h200"])
@pytest.mark.parametrize(
    ("shape", "name"),
    [((8, 16384, 2048, 4096), "jagged_tails"), ((8, 16384, 2051, 4096), "jagged_persistent")],
    ids=["tails", "persistent"],
)
def test_as_many_stages_as_fit_into_shared_memory(gpu: str, shape: tuple[int, int, int, int], name: str) -> None:
    """On a B200, the results of the same tiles take more shared memory beside the loads."""
    G, M, N, K = shape
    target = targets.KNOWN[gpu]
    given = symbolic(GROUPED_GEMM, (empty(M, K), empty(G, N, K).mT, empty(G + 1, dtype=torch.int32), None), None)
    builder, _ = cache.build_steps(GROUPED_GEMM, given, (torch.bfloat16, "auto"), target)
    request = [step for step in builder.steps if isinstance(step, Request)][-1]
    assert request.kernel.name == name
    source = compiler.lower(request, target)[1]
    compiled = compiler.within_shared_memory(source, target)
    assert compiled.metadata.shared <= target.shared_memory
    assert compiled.metadata.num_stages == (4 if gpu == "h200" else 3)
    smaller = replace(target, shared_memory=compiled.metadata.shared - 1)
    fewer = compiler.within_shared_memory(source, smaller)
    assert fewer.metadata.shared <= smaller.shared_memory
    assert fewer.metadata.num_stages == compiled.metadata.num_stages - 1
    with pytest.raises(triton.OutOfResources, match="shared memory"):
        compiler.within_shared_memory(source, replace(target, shared_memory=4096))


@pytest.mark.parametrize("shape", [(8, 64, 1536, 2048), (8, 4096, 1536, 2048)], ids=str)
def test_grouped_mm_is_one_kernel_more(shape: tuple[int, int, int, int]) -> None:
    """It takes the same kernels as `grouped_gemm`, after one that lets them begin early."""
    G, M, N, K = shape
    A, B = empty(M, K), empty(G, K, N)
    options = (torch.bfloat16, "auto")
    first, *others = requests(GROUPED_MM, (A, B, empty(G, dtype=torch.int32), None), options)
    same = requests(GROUPED_GEMM, (A, B, empty(G + 1, dtype=torch.int32), None), options)
    assert [lowered(request)["code"] for request in others] == [lowered(request)["code"] for request in same]
    report = lowered(first)
    assert_lean(report)
    assert "griddepcontrol.launch_dependents" in report["ptx"] and "griddepcontrol.wait" in report["ptx"]


def test_numbers_share_a_binary() -> None:
    """Triton would compile again for a number that is 1, and for one that is a multiple of 16."""
    builder = Builder(H200, ("out", "group_offsets"))
    out, group_offsets = symbolic(GROUPED_GEMM, (empty(4096, 256), None, empty(9, dtype=torch.int32), None), None)[::2]
    for unsplit in (1, 16, 383):
        plan_table(builder, replace(group_offsets, variable=1), out, 128, unsplit)
    made = [compiler.lower(step, H200) for step in builder.steps if isinstance(step, Request)]
    assert len({specialized.key for _, specialized in made}) == 1
    assert len({str(launch.arguments) for launch, _ in made}) == 3


@pytest.mark.parametrize("shape", [(8, 64, 1536, 2048), (8, 4096, 1536, 2048)], ids=str)
def test_code_is_generated_in_fewer_steps(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int, int]) -> None:
    """Loop bodies are visited once, one of them twice; Inductor's handlers are created once; the code is the same."""
    visits: list[Any] = []
    handlers: list[Any] = []
    visit, create = TypePropagation._loop_body, inductor_lowering.TritonKernel

    def noting(self: TypePropagation, statements: Any) -> Any:
        visits.append(statements)
        return visit(self, statements)

    def noted(*args: Any, **options: Any) -> Any:
        handlers.append(create(*args, **options))
        return handlers[-1]

    def generated() -> tuple[dict[str, str], int, int]:
        monkeypatch.setattr(compiler, "_hosts", {})
        compiler._variant.cache_clear()
        visits.clear()
        handlers.clear()
        reports = compiled(monkeypatch, "auto", shape)
        return {name: report["code"] for name, report in reports.items()}, len(visits), len(handlers)

    monkeypatch.setattr(TypePropagation, "_loop_body", noting)
    monkeypatch.setattr(inductor_lowering, "TritonKernel", noted)
    code, few, once = generated()
    assert 0 < few <= len({id(statements) for statements in visits}) + 1
    assert 0 < once <= len(code)
    for name in ("_bodies_visited_once", "_handlers_created_once"):
        monkeypatch.setattr(compiler, name, nullcontext)
    same_code, many, each = generated()
    assert code == same_code
    assert many >= 2 * few and each > 10 * once
