"""Errors of products against float64: in fp8, in float32, and in random cases beside those of plain PyTorch.

    python -m benchmarks.accuracy [--part fp8|float32|random] [--cases N] [--jobs N] [--tiny] [--json FILE]

fp8: the largest error of a row, relative to the row's norm, by K. The result is bfloat16, and float64 multiplies the
dequantised operands. float32: the root mean square of the error, relative to that of the result, by K. random: N cases
for each operator and dtype, of up to 16 groups with up to 4096 rows in total and up to 4096 columns and 8192 elements
along the contraction. Each group's largest error is a share of the budget of the tests, which is twice that of plain
PyTorch plus `2 * eps(float32) * max(|A| @ |B|)`; a case has the share of its worst group. Operands are normally
distributed.

On a GPU this writes benchmarks/results/<gpu>/accuracy.json. With --part, the file's other parts are kept; a file of
other versions is refused. --tiny checks on a CPU that the script works.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import run, tables
from benchmarks.wide import largest_error
from moe_kernels import dequantize, grouped_gemm, grouped_gemm_wgrad, quantize, uniform_grouped_gemm
from moe_kernels.commands import run_and_exit
from moe_kernels.models import positive
from moe_kernels.testing import error_budget, group_sizes_for, make_inputs, plain_product

DEPTHS = {"fp8": (768, 2048, 7168, 14336), "float32": (1, 8, 33, 512, 1024, 2048, 4096)}  # K
ROWS = {"fp8": (256,), "float32": (4, 256)}  # per group
GROUPS, COLUMNS = 8, 512
DTYPES = (  # of the operands and the result
    *((dtype, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)),
    *((dtype, torch.float32) for dtype in (torch.bfloat16, torch.float16)),
)
OPERATORS = ("grouped_gemm", "uniform_grouped_gemm", "grouped_gemm_wgrad")
PARTS = (*DEPTHS, "random")
Product = tuple[Tensor, Tensor, Tensor]  # the result and both operands of a product of two matrices


@torch.no_grad()
def by_depth(part: str, K: int, rows: int, device: torch.device) -> run.Record:
    """Return a record of part "fp8" or "float32", with the error of each way to multiply the same operands."""
    dtype = torch.float32 if part == "float32" else torch.bfloat16
    sizes = [rows] * GROUPS
    A, B, offsets = make_inputs(sizes, COLUMNS, K, dtype=dtype, device=device, transposed=True)
    if part == "float32":
        exact = _by_group(A.double(), B.double())
        results = {"grouped_gemm": grouped_gemm(A, B, offsets), "torch.mm": _by_group(A, B)}
        errors = {name: _relative(out, exact) for name, out in results.items()}
    else:
        errors = {
            "grouped_gemm, bfloat16": largest_error(grouped_gemm(A, B, offsets), _by_group(A.double(), B.double()))
        }
        for label, formats, fast in (
            ("rowwise", ("rowwise", "rowwise"), False),
            ("rowwise, fast_accumulation", ("rowwise", "rowwise"), True),
            ("1x128 by 128x128", ("1x128", "128x128"), False),
        ):
            one, other = quantize(A, formats[0]), quantize(B.mT, formats[1])
            exact = _by_group(dequantize(one).double(), dequantize(other).double().mT)
            out = grouped_gemm(one, other.mT, offsets, fast_accumulation=fast)
            errors[f"grouped_gemm, {label}"] = largest_error(out, exact)
    return {"suite": "accuracy", "part": part, "K": K, "rows": rows, "errors": errors}


def _by_group(A: Tensor, B: Tensor) -> Tensor:
    return torch.cat([torch.mm(rows, weight) for rows, weight in zip(A.chunk(len(B)), B, strict=True)])


def _relative(out: Tensor, exact: Tensor) -> float:
    return ((out.double() - exact).square().mean() / exact.square().mean()).sqrt().item()


class Case(NamedTuple):
    """A random case, whose sizes are drawn by `seed`."""

    operator: str
    dtype: torch.dtype
    result: torch.dtype
    seed: int

    def sizes(self, tiny: bool) -> tuple[list[int], int, int]:
        """Return the rows of each group, the number of columns, and K, which `grouped_gemm_wgrad` has in columns."""
        draw = random.Random(self.seed)
        powers = (5, 5, 6) if tiny else (12, 12, 13)
        M, N, K = (round(2 ** draw.uniform(low, high)) for low, high in zip((0, 3, 3), powers, strict=True))
        if draw.random() < 0.5:
            N, K = N // 8 * 8, K // 8 * 8
        G = draw.randint(1, 16)
        if self.operator == "uniform_grouped_gemm":
            return [-(-M // G)] * G, N, K
        if self.operator == "grouped_gemm_wgrad":
            return group_sizes_for("softmax", G, 2 * K, self.seed), N, M
        return group_sizes_for("softmax", G, M, self.seed), N, K

    def products(self, tiny: bool, device: torch.device) -> Iterator[Product]:
        """Yield the products of the groups that have rows."""
        sizes, N, K = self.sizes(tiny)
        transposed = bool(self.seed % 2)
        options: dict[str, Any] = {"dtype": self.dtype, "device": device, "seed": self.seed}
        A, B, offsets = make_inputs(sizes, N, K, transposed=transposed, **options)
        bounds = [pair for pair in pairwise(offsets.tolist()) if pair[0] < pair[1]]
        filled = [g for g, size in enumerate(sizes) if size]
        if self.operator == "grouped_gemm_wgrad":
            d_out = make_inputs([0], N, len(A), per_group=False, **options)[1] * len(A) ** 0.5
            found = grouped_gemm_wgrad(A, d_out, offsets, out_dtype=self.result)
            for g, (start, end) in zip(filled, bounds, strict=True):
                yield found[g], A[start:end].mT, d_out[start:end]
            return
        if self.operator == "grouped_gemm":
            found = grouped_gemm(A, B, offsets, out_dtype=self.result)
        else:
            found = uniform_grouped_gemm(A, B.flatten(0, 1), len(sizes), out_dtype=self.result)
        for g, (start, end) in zip(filled, bounds, strict=True):
            yield found[start:end], A[start:end], B[g]


@torch.no_grad()
def share(out: Tensor, A: Tensor, B: Tensor) -> float:
    """Return the largest error of `out`, the product of two matrices, as a share of the tests' budget; inf for NaN."""
    A_exact, B_exact = A.double(), B.double()
    exact, plain = A_exact @ B_exact, plain_product(A, B, out.dtype)
    error, plain_error = ((x.double() - exact).abs().amax().item() for x in (out, plain))
    found = error / error_budget(plain_error, (A_exact.abs() @ B_exact.abs()).amax().item())
    return math.inf if math.isnan(found) else found


@torch.no_grad()
def random_cases(
    operator: str, dtypes: tuple[torch.dtype, torch.dtype], cases: int, tiny: bool, device: torch.device
) -> run.Record:
    """Return a record: the number of cases over the budget, and the case with the largest share of it."""
    over, worst, where = 0, 0.0, {}
    for seed in range(cases):
        case = Case(operator, *dtypes, seed)
        most = max(share(*product) for product in case.products(tiny, device))
        over += most > 1
        if most > worst:
            sizes, N, K = case.sizes(tiny)
            worst, where = most, {"sizes": sizes, "N": N, "K": K, "seed": seed}
    names = dict(zip(("dtype", "result"), (str(dtype).removeprefix("torch.") for dtype in dtypes), strict=True))
    found = {"cases": cases, "over": over, "largest": worst, "where": where}
    return {"suite": "accuracy", "part": "random", "operator": operator, **names, **found}


def compile_some(operator: str, dtypes: tuple[torch.dtype, torch.dtype], seed: int) -> None:
    """Compute one random case, to fill the caches of binaries on disk."""
    for _ in Case(operator, *dtypes, seed).products(False, torch.device("cuda")):
        pass


def main(argv: Sequence[str] | None = None) -> int:
    parser = run.parser_of("accuracy", __doc__, tiny="small cases", file="accuracy.json", keeps="part")
    parser.add_argument("--part", choices=PARTS, help="default: all")
    parser.add_argument("--cases", type=positive, default=40, help="random cases of each operator and dtype")
    parser.add_argument("--jobs", type=positive, help="first compile all kernels of random cases in so many processes")
    options = parser.parse_args(argv)
    device = run.device_of(parser, options)
    begun = time.monotonic()
    meta = run.meta(device, run.command_line("accuracy", argv))
    file = run.file_of(options, meta, "accuracy.json", adds=bool(options.part))
    results = run.Results(meta)
    parts = [part for part in PARTS if options.part in (None, part)]
    if options.jobs and "random" in parts and device.type == "cuda":
        calls = [
            (operator, dtypes, seed) for operator in OPERATORS for dtypes in DTYPES for seed in range(options.cases)
        ]
        run.in_processes(options.jobs, compile_some, calls)
        print(f"compiled with {options.jobs} processes: {run.elapsed(begun)}", flush=True)
    for part in parts:
        if part == "random":
            made = (
                random_cases(operator, dtypes, options.cases, options.tiny, device)
                for operator in OPERATORS
                for dtypes in DTYPES
            )
        else:
            depths = DEPTHS[part][:2] if options.tiny else DEPTHS[part]
            made = (by_depth(part, K, rows, device) for rows in ROWS[part] for K in depths)
        for record in made:
            results.records.append(record)
            print(f"[{run.elapsed(begun)}] {tables.accuracy_line(record)}", flush=True)
    if file is not None:
        if options.part:
            results.keep(file, "part")
        results.write(file)
    print(f"\n{tables.markdown(results)}")
    return 0


if __name__ == "__main__":
    run_and_exit(main)
