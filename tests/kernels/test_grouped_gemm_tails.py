"""The kernels with tiles of two sizes, `jagged_tails` and `jagged_tall`: the list of tiles, and their results."""

from __future__ import annotations

from itertools import product as product_of
from typing import Any

import helion
import helion.language as hl
import pytest
import torch
from building import build, function, run

from moe_kernels import kernels, rules
from moe_kernels.kernels import grouped_gemm, tiles
from moe_kernels.kernels.inline import int32
from moe_kernels.rules import grouped
from moe_kernels.rules.config import Config
from moe_kernels.runtime.plan import Builder
from moe_kernels.runtime.symbolic import SymbolicTensor, lies_transposed
from moe_kernels.testing import assert_grouped_gemm_close, make_inputs

SIZES = {  # 10 or 42 groups: a kernel is compiled for each number of groups
    "tails and whole tiles": [300, 20, 0, 128, 65, 64, 1, 129, 192, 193],
    "tails alone": [40, 3, 64, 0, 50, *[0] * 5],
    "no tails": [128, 256, 100, 65, *[0] * 6],
    "one large group": [1400, 30, 0, 7, *[0] * 6],
    "many tails": [*[7] * 40, 200, 0],
    "more whole tiles than are grouped": [*[65] * 37, *[3] * 5],
}
TALL_SIZES = {  # for tiles of up to 192 rows
    "taller and whole tiles": SIZES["tails and whole tiles"],
    "taller tiles alone": [150, 192, 0, 129, *[0] * 6],
    "few rows": SIZES["tails alone"],
    "one large group": [700, 30, 0, 7, *[0] * 6],
}


def product(
    A: torch.Tensor,
    B: torch.Tensor,
    group_offsets: torch.Tensor,
    bias: torch.Tensor | None = None,
    variant: str = "tails",  # or "tall"
) -> torch.Tensor:
    """Multiply with this kernel, whatever the rule would choose, by TMA on a GPU that has it, else by pointers."""

    def steps(builder: Builder, A: SymbolicTensor, B: SymbolicTensor, offsets: Any, bias: Any, out: Any) -> None:
        transposed = lies_transposed(B)
        stored = B.transpose(1, 2) if transposed else B
        problem = grouped_gemm._problem(builder, A, stored, offsets, bias, out, transposed)
        choice, tma = grouped.rule(problem, variant), builder.gpu.has_tma
        assert grouped.why_illegal(choice, problem) is None
        assert choice.addressing[:3] == (tma, tma, tma and variant == "tails")
        with rules.force(choice):
            grouped_gemm.multiply(builder, A, B, offsets, bias, out)

    out = torch.empty(A.size(0), B.size(2), dtype=A.dtype, device=A.device).fill_(torch.nan)
    tensors = {"A": A, "B": B, "offsets": group_offsets, "bias": bias, "out": out}
    multiply = function(*build(steps, tensors, rows=("A", "out"), groups=group_offsets.size(0) - 1), A.device)
    multiply(*tensors.values())
    if A.is_cuda or A.size(0) < 400:  # the interpreter is slow, and has only one order of programs
        again = torch.full_like(out, torch.nan)
        multiply(A, B, group_offsets, bias, again)
        assert torch.equal(out.view(torch.int16), again.view(torch.int16))
    return out


def table_of(group_offsets: torch.Tensor, out: torch.Tensor, unsplit: int = 384) -> torch.Tensor:
    def steps(builder: Builder, offsets: SymbolicTensor, out: SymbolicTensor) -> SymbolicTensor:
        return tiles.plan_table(builder, offsets, out, 128, unsplit)

    table: torch.Tensor = run(steps, {"offsets": group_offsets, "out": out}, rows=("out",))
    return table


@pytest.mark.parametrize("transposed", [True, False], ids=["B [G, N, K] viewed", "B [G, K, N]"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_sizes_and_layouts(sizes: list[int], transposed: bool, device: str) -> None:
    N = 768 if transposed else 320  # stored in pieces of 128, or of 64, the last three of which lie past N
    A, B, group_offsets = make_inputs(sizes, N, 80, dtype=torch.float16, device=device, transposed=transposed)
    assert_grouped_gemm_close(product(A, B, group_offsets), A, B, group_offsets)


@pytest.mark.parametrize("transposed", [True, False], ids=["B [G, N, K] viewed", "B [G, K, N]"])
@pytest.mark.parametrize("sizes", TALL_SIZES.values(), ids=TALL_SIZES)
def test_taller_tiles(sizes: list[int], transposed: bool, device: str) -> None:
    N = 520 if transposed else 264  # the last column of tiles is 8 wide
    A, B, group_offsets = make_inputs(sizes, N, 80, dtype=torch.float16, device=device, transposed=transposed)
    assert_grouped_gemm_close(product(A, B, group_offsets, variant="tall"), A, B, group_offsets)


@pytest.mark.parametrize(
    ("sizes", "N", "K", "transposed"),
    [
        ("tails and whole tiles", 320, 80, True),
        ("tails and whole tiles", 320, 200, False),  # whole tiles are read by 64 of K at once, the narrow ones by 128
        ("tails and whole tiles", 640, 80, False),
        ("one large group", 576, 80, False),
        ("one large group", 576, 200, True),
        ("one large group", 640, 80, True),
    ],
)
def test_a_narrow_column(
    sizes: str, N: int, K: int, transposed: bool, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(grouped, "NARROW_FROM_ROWS", 0)
    A, B, group_offsets = make_inputs(SIZES[sizes], N, K, dtype=torch.float16, device=device, transposed=transposed)
    assert_grouped_gemm_close(product(A, B, group_offsets), A, B, group_offsets)


@pytest.mark.parametrize(
    ("variant", "N", "narrow_from_rows"), [*product_of(["tails"], [256, 320, 384], [0, 1024]), ("tall", 264, 1024)]
)
def test_a_bias(variant: str, N: int, narrow_from_rows: int, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(grouped, "NARROW_FROM_ROWS", narrow_from_rows)
    sizes = [130, 0, 30]
    A, B, group_offsets = make_inputs(sizes, N, 64, dtype=torch.float16, device=device)
    bias = torch.randn(3, N, device=device).to(torch.float16)
    added = bias.double().repeat_interleave(torch.tensor(sizes, device=device), dim=0)
    plain = torch.cat([a @ b for a, b in zip(A.split(sizes), B, strict=True)]).double() + added
    exact = torch.cat([a @ b for a, b in zip(A.double().split(sizes), B.double(), strict=True)]) + added
    error = (product(A, B, group_offsets, bias, variant).double() - exact).abs().max()
    assert error <= 2 * (plain.half().double() - exact).abs().max() + 1e-3 < exact.abs().max() / 100


@pytest.mark.parametrize("variant", ["tails", "tall"])
def test_one_weight_for_all_groups(variant: str, device: str) -> None:
    A, B, group_offsets = make_inputs([130, 0, 30], 256, 64, dtype=torch.float16, device=device, per_group=False)
    assert_grouped_gemm_close(product(A, B.unsqueeze(0), group_offsets, variant=variant), A, B, group_offsets)


@pytest.mark.parametrize(
    ("values", "N", "variant"),
    [
        ([3, 200, 100, 150, 290], 256, "tails"),
        ([3, 200, 100, 150, 290], 320, "tails"),
        ([-5, 500, 20, 30, 40], 256, "tails"),
        ([90, 60, 7, 290, 400], 320, "tails"),
        ([3, 200, 100, 150, 290], 256, "tall"),
        ([-5, 500, 20, 30, 40], 256, "tall"),
        ([90, 60, 7, 290, 400], 256, "tall"),
    ],
    ids=str,
)
def test_rows_outside_are_zeros_and_what_is_beside_stays_out(
    values: list[int], N: int, variant: str, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(grouped, "NARROW_FROM_ROWS", 0)
    A, B, _ = make_inputs([300], N, 72, dtype=torch.float16, device=device)
    B = torch.cat([B, B * 2, B * 3, B * 4])
    group_offsets = torch.tensor(values, dtype=torch.int32, device=device)
    inside = torch.zeros(300, dtype=torch.bool, device=device)
    first, last = max(values[0], 0), min(max(values), 300)
    inside[first:last] = True
    A[~inside] = torch.nan
    out = product(A, B, group_offsets, variant=variant)
    assert not out[~inside].any()
    assert_grouped_gemm_close(out[inside], A[inside], B, group_offsets.clamp(first, last).cummax(0).values - first)


def test_nan_of_a_group_stays_there(device: str) -> None:
    """The taller tile of a group reads rows of the next one, whose products are not stored."""
    A, B, group_offsets = make_inputs([150, 150], 256, 64, dtype=torch.float16, device=device)
    A[150:] = torch.nan
    out = product(A, B, group_offsets, variant="tall")
    assert out[150:].isnan().all()
    assert_grouped_gemm_close(out[:150], A[:150], B[:1], group_offsets[:2])


def test_the_heights_that_a_routing_calls_for(device: str) -> None:
    """A group's rows determine its tiles, which the device lists for one plan, whatever the mean."""
    sizes = [300, 20, 0, 128, 64, 65, 129, 193, 256, 384, 385, 449, 500]
    group_offsets = torch.tensor([2, *sizes], device=device).cumsum(0).int()
    M, starts = int(group_offsets[-1]) + 7, group_offsets.tolist()
    out = torch.full((M, 16), torch.nan, dtype=torch.float16, device=device)
    table = table_of(group_offsets, out)
    whole, tails = table[0, :2].tolist()

    def rows_of(group: int, listed: torch.Tensor) -> list[list[int]]:
        return [[first - starts[group], end - starts[group]] for g, first, end in listed.tolist() if g == group]

    by_group = [(rows_of(g, table[1 + whole :][:tails]), rows_of(g, table[1:][:whole])) for g in range(len(sizes))]
    assert by_group == [
        ([], [[0, 128], [128, 256], [256, 300]]),
        ([[0, 20]], []),
        ([], []),
        ([], [[0, 128]]),
        ([[0, 64]], []),
        ([], [[0, 65]]),
        ([], [[0, 128], [128, 129]]),
        ([], [[0, 128], [128, 193]]),
        ([], [[0, 128], [128, 256]]),
        ([], [[0, 128], [128, 256], [256, 384]]),
        ([[384, 385]], [[0, 128], [128, 256], [256, 384]]),
        ([], [[0, 128], [128, 256], [256, 384], [384, 449]]),
        ([], [[0, 128], [128, 256], [256, 384], [384, 500]]),
    ]
    assert sum(len(small) + len(large) for small, large in by_group) == tails + whole
    assert not out[:2].any() and not out[-7:].any() and out[2:-7].isnan().all()


def test_beside_a_narrow_column_only_a_groups_only_tile_is_a_tail(device: str) -> None:
    sizes = [300, 20, 0, 128, 64, 65, 129, 449, 1]
    group_offsets = torch.tensor([0, *sizes], device=device).cumsum(0).int()
    out = torch.empty(sum(sizes), 16, dtype=torch.float16, device=device)
    table = table_of(group_offsets, out, tiles.ALONE)
    whole, tails = table[0, :2].tolist()
    assert table[1 + whole :][:tails, 0].tolist() == [1, 4, 8]
    assert table[1:][:whole, 0].tolist() == [0, 0, 0, 3, 5, 6, 6, 7, 7, 7, 7]
    rows = table[1:][: whole + tails, 2] - table[1:][: whole + tails, 1]
    assert rows.tolist() == [128, 128, 44, 128, 65, 128, 1, 128, 128, 128, 65, 20, 64, 1]


def test_taller_tiles_are_listed_in_order(device: str) -> None:
    """A group's rows determine its tiles, as above."""
    sizes = [300, 20, 0, 128, 64, 65, 129, 192, 193, 256, 257, 320, 321]
    group_offsets = torch.tensor([2, *sizes], device=device).cumsum(0).int()
    M, starts = int(group_offsets[-1]) + 7, group_offsets.tolist()
    out = torch.full((M, 16), torch.nan, dtype=torch.float16, device=device)
    table = table_of(group_offsets, out, tiles.MERGED)
    listed = table[1:][: table[0, 0]].tolist()
    assert listed == sorted(listed)
    by_group = [
        [[first - starts[g], end - starts[g]] for group, first, end in listed if group == g] for g in range(len(sizes))
    ]
    assert by_group == [
        [[0, 128], [128, 300]],
        [[0, 20]],
        [],
        [[0, 128]],
        [[0, 64]],
        [[0, 65]],
        [[0, 129]],
        [[0, 192]],
        [[0, 128], [128, 193]],
        [[0, 128], [128, 256]],
        [[0, 128], [128, 257]],
        [[0, 128], [128, 320]],
        [[0, 128], [128, 256], [256, 321]],
    ]
    assert not out[:2].any() and not out[-7:].any() and out[2:-7].isnan().all()


@pytest.mark.parametrize("narrow", [0, 64])
def test_the_kernel_object(narrow: int, device: str) -> None:
    A, B, group_offsets = make_inputs([130, 0, 140], 256 + narrow, 64, dtype=torch.float16, device=device)
    out = torch.empty(270, 256 + narrow, dtype=A.dtype, device=device)
    table = table_of(group_offsets, out)
    outs = out if narrow else None, out.view_as(out), out.view_as(out)
    kernels.jagged_tails(A, B, table, None, *outs, 40, 4, 1, narrow, 30, False, False, False, 2, 5)
    assert_grouped_gemm_close(out, A, B, group_offsets)


def test_the_kernel_object_of_taller_tiles(device: str) -> None:
    A, B, group_offsets = make_inputs([130, 0, 140], 256, 64, dtype=torch.float16, device=device)
    out = torch.empty(270, 256, dtype=A.dtype, device=device)
    table = torch.tensor([[2, 0, 0], [0, 0, 130], [2, 130, 270], [0, 0, 0]], dtype=torch.int32, device=device)
    kernels.jagged_tall(A, B, table, None, out, 2, 3, 1, False, False, False)
    assert_grouped_gemm_close(out, A, B, group_offsets)


@helion.kernel(static_shapes=True)
def shared_out(counts: torch.Tensor, out: torch.Tensor, tail_cost: int, narrow_cost: hl.constexpr) -> torch.Tensor:
    workers = out.size(0)
    for tile_w in hl.tile(workers, block_size=1):
        cost = int32(tail_cost, counts[0])
        narrow = counts[2] if narrow_cost else None
        shared = tiles.shares(counts[0], counts[1], tile_w.id, workers, cost, narrow, narrow_cost)
        of_tails, of_narrow, of_whole = shared
        num_tails, tail_workers = of_tails
        num_narrow, first_narrow, narrow_workers = of_narrow
        num_whole, num_early, first, others, first_late = of_whole
        out[tile_w.id, 0] = num_tails
        out[tile_w.id, 1] = tail_workers
        out[tile_w.id, 2] = num_narrow
        out[tile_w.id, 3] = first_narrow
        out[tile_w.id, 4] = narrow_workers
        out[tile_w.id, 5] = num_whole
        out[tile_w.id, 6] = num_early
        out[tile_w.id, 7] = first
        out[tile_w.id, 8] = others
        out[tile_w.id, 9] = first_late
    return out


@pytest.mark.parametrize(
    ("whole", "tails", "narrow", "workers"),
    [
        *[(0, 0, 0, 5), (7, 0, 0, 5), (0, 9, 0, 5), (1, 1, 0, 2), (8, 2, 0, 12), (304, 40, 0, 12), (40, 90, 0, 6)],
        *[(0, 0, 3, 5), (22, 0, 2, 5), (0, 11, 1, 2), (1, 1, 1, 2), (8, 2, 3, 12), (1408, 176, 144, 132)],
        *[(11, 341, 32, 132), (1408, 0, 128, 132), (40, 90, 30, 6), (304, 1, 40, 12)],
    ],
)
def test_every_tile_is_shared_out_once_and_evenly(
    whole: int, tails: int, narrow: int, workers: int, device: str
) -> None:
    tail_cost, narrow_cost = 48, 30 if narrow else 0
    counts = torch.tensor([whole, tails, narrow], dtype=torch.int32, device=device)
    out = torch.full((workers, 10), -1, dtype=torch.int32, device=device)
    whole_done, tails_done, narrow_done, costs = [], [], [], []

    def steps(builder: Builder, counts: SymbolicTensor, out: SymbolicTensor) -> None:
        builder.launch(shared_out, (counts, out, tail_cost, narrow_cost), Config(block_sizes=[], num_warps=4))

    run(steps, {"counts": counts, "out": out})
    shares = enumerate(out.tolist())
    for w, (num_tails, s, num_narrow, first_narrow, t, num_whole, num_early, first, others, late) in shares:
        tails_done += [w + i * s for i in range(num_tails)]
        narrow_done += [first_narrow + i * t for i in range(num_narrow)]
        whole_done += [
            first + j * others if j < num_early else late + (j - num_early) * workers for j in range(num_whole)
        ]
        costs.append(num_tails * tail_cost + num_narrow * narrow_cost + num_whole * 64)
    assert sorted(whole_done) == list(range(whole)) and sorted(tails_done) == list(range(tails))
    assert sorted(narrow_done) == list(range(narrow))
    if whole > 3 * (tails + narrow):  # at least as fast as tiles of one height, and of one width
        assert max(costs) <= -(-(whole + tails + narrow) // workers) * 64
    if narrow and whole >= 4 * workers:  # no worker has much more than its share
        assert max(costs) <= sum(costs) / workers + 64
