"""The kernel with tiles of up to 192 rows: its list of tiles, and that each tile is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from building import build, function, run

from moe_kernels import kernels, rules
from moe_kernels.kernels import grouped_gemm, tiles
from moe_kernels.runtime.plan import Builder
from moe_kernels.runtime.symbolic import SymbolicTensor, lies_transposed
from moe_kernels.testing import assert_grouped_gemm_close, make_inputs

SIZES = {
    "taller and whole tiles": [300, 20, 0, 128, 65, 64, 1, 129, 192, 193],
    "taller tiles alone": [150, 192, 0, 129, *[0] * 6],
    "few rows": [40, 3, 64, 0, 50, *[0] * 5],
    "one large group": [700, 30, 0, 7, *[0] * 6],
}


def product(
    A: torch.Tensor, B: torch.Tensor, group_offsets: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply with `jagged_tall`, whatever the rule would choose, by TMA on a GPU that has it, else by pointers."""

    def steps(builder: Builder, A: SymbolicTensor, B: SymbolicTensor, offsets: Any, bias: Any, out: Any) -> None:
        transposed = lies_transposed(B)
        stored = B.transpose(1, 2) if transposed else B
        G = group_offsets.size(0) - 1
        problem = grouped_gemm._problem(builder, A, stored, G, bias, out, transposed, int64_vectors=False)
        choice = rules.rule(problem, "tall")
        assert rules.why_illegal(choice, problem) is None
        assert choice.addressing.tma_A == choice.addressing.tma_B == builder.gpu.has_tma
        with rules.force(choice):
            grouped_gemm.multiply(builder, A, B, offsets, bias, out)

    out = torch.empty(A.size(0), B.size(2), dtype=A.dtype, device=A.device).fill_(torch.nan)
    tensors = {"A": A, "B": B, "offsets": group_offsets, "bias": bias, "out": out}
    multiply = function(*build(steps, tensors, rows=("A", "out"), groups=group_offsets.size(0) - 1), A.device)
    multiply(*tensors.values())
    return out


@pytest.mark.parametrize("transposed", [True, False], ids=["B [G, N, K] viewed", "B [G, K, N]"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_sizes_and_layouts(sizes: list[int], transposed: bool, device: str) -> None:
    N = 520 if transposed else 264  # the last column of tiles is 8 wide
    A, B, group_offsets = make_inputs(sizes, N, 80, dtype=torch.float16, device=device, transposed=transposed)
    assert_grouped_gemm_close(product(A, B, group_offsets), A, B, group_offsets)


def test_a_bias(device: str) -> None:
    sizes = [130, 0, 30]
    A, B, group_offsets = make_inputs(sizes, 264, 64, dtype=torch.float16, device=device)
    bias = torch.randn(3, 264, device=device).to(torch.float16)
    added = bias.double().repeat_interleave(torch.tensor(sizes, device=device), dim=0)
    plain = torch.cat([a @ b for a, b in zip(A.split(sizes), B, strict=True)]).double() + added
    exact = torch.cat([a @ b for a, b in zip(A.double().split(sizes), B.double(), strict=True)]) + added
    error = (product(A, B, group_offsets, bias).double() - exact).abs().max()
    assert error <= 2 * (plain.half().double() - exact).abs().max() + 1e-3 < exact.abs().max() / 100


def test_one_weight_for_all_groups(device: str) -> None:
    A, B, group_offsets = make_inputs([130, 0, 30], 256, 64, dtype=torch.float16, device=device, per_group=False)
    assert_grouped_gemm_close(product(A, B.unsqueeze(0), group_offsets), A, B, group_offsets)


@pytest.mark.parametrize("values", [[3, 200, 100, 150, 290], [-5, 500, 20, 30, 40], [90, 60, 7, 290, 400]], ids=str)
def test_rows_outside_are_zeros_and_what_is_beside_stays_out(values: list[int], device: str) -> None:
    A, B, _ = make_inputs([300], 256, 72, dtype=torch.float16, device=device)
    B = torch.cat([B, B * 2, B * 3, B * 4])
    group_offsets = torch.tensor(values, dtype=torch.int32, device=device)
    inside = torch.zeros(300, dtype=torch.bool, device=device)
    first, last = max(values[0], 0), min(max(values), 300)
    inside[first:last] = True
    A[~inside] = torch.nan
    out = product(A, B, group_offsets)
    assert not out[~inside].any()
    assert_grouped_gemm_close(out[inside], A[inside], B, group_offsets.clamp(first, last).cummax(0).values - first)


def test_nan_of_a_group_stays_there(device: str) -> None:
    """The taller tile of a group reads rows of the next one, whose products are not stored."""
    A, B, group_offsets = make_inputs([150, 150], 256, 64, dtype=torch.float16, device=device)
    A[150:] = torch.nan
    out = product(A, B, group_offsets)
    assert out[150:].isnan().all()
    assert_grouped_gemm_close(out[:150], A[:150], B[:1], group_offsets[:2])


def test_the_heights_that_a_routing_calls_for(device: str) -> None:
    """A group's rows determine its tiles, which the device lists for one plan, whatever the mean."""
    sizes = [300, 20, 0, 128, 64, 65, 129, 192, 193, 256, 257, 320, 321]
    group_offsets = torch.tensor([2, *sizes], device=device).cumsum(0).int()
    M, starts = int(group_offsets[-1]) + 7, group_offsets.tolist()
    out = torch.full((M, 16), torch.nan, dtype=torch.float16, device=device)

    def steps(builder: Builder, offsets: SymbolicTensor, out: SymbolicTensor) -> SymbolicTensor:
        return tiles.plan_table(builder, offsets, out, 128, tiles.MERGED)

    table: torch.Tensor = run(steps, {"offsets": group_offsets, "out": out}, rows=("out",))
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


def test_the_kernel_object(device: str) -> None:
    A, B, group_offsets = make_inputs([130, 0, 140], 256, 64, dtype=torch.float16, device=device)
    out = torch.empty(270, 256, dtype=A.dtype, device=device)
    table = torch.tensor([[2, 0, 0], [0, 0, 130], [2, 130, 270], [0, 0, 0]], dtype=torch.int32, device=device)
    kernels.jagged_tall(A, B, table, None, out, 5, 3, 1, False, False, False)
    assert_grouped_gemm_close(out, A, B, group_offsets)
