"""Products of one size: G times [M, K] x [K, N].

A  [G, M, K], contiguous
B  [G, K, N], contiguous
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from tritonbench.utils.triton_op import register_benchmark, register_metric, register_x_val

import moe_kernels
from moe_kernels.testing import assert_grouped_gemm_close, byte_count, flop_count, make_inputs
from tritonbench_ops import base, baselines
from tritonbench_ops.cases import UniformCase, uniform_cases


class Operator(base.Operator):
    not_ours = frozenset({"torch_loop", "torch_bmm", "aten_grouped_mm"})

    @register_benchmark(baseline=True)
    @base.checked
    def torch_loop(self, A: Tensor, B: Tensor) -> Callable[[], Tensor]:
        call = baselines.loop(_as_inputs(A, B))
        return lambda: call().view(len(A), -1, B.size(2))

    @register_benchmark()
    @base.checked
    def torch_bmm(self, A: Tensor, B: Tensor) -> Callable[[], Tensor]:
        return lambda: torch.bmm(A, B)

    @register_benchmark()
    @base.checked
    def aten_grouped_mm(self, A: Tensor, B: Tensor) -> Callable[[], Tensor]:
        return lambda: torch._grouped_mm(A, B)

    @register_benchmark(label="dense_ceiling (one weight for all rows)")
    def dense_ceiling(self, A: Tensor, B: Tensor) -> Callable[[], Tensor]:
        return baselines.dense(_as_inputs(A, B))

    @register_benchmark()
    @base.checked
    def uniform_grouped_gemm(self, A: Tensor, B: Tensor) -> Callable[[], Tensor]:
        return lambda: moe_kernels.uniform_grouped_gemm(A, B, len(A))

    @register_benchmark(label="uniform_grouped_gemm (float32 result)")
    @base.checked
    def uniform_grouped_gemm_float32(self, A: Tensor, B: Tensor) -> Callable[[], Tensor]:
        return lambda: moe_kernels.uniform_grouped_gemm(A, B, len(A), out_dtype=torch.float32)

    @register_benchmark(label="grouped_gemm (with offsets)")
    @base.checked
    def grouped_gemm(self, A: Tensor, B: Tensor) -> Callable[[], Tensor]:
        A_packed, group_offsets = A.flatten(0, 1), _offsets(A)
        return lambda: moe_kernels.grouped_gemm(A_packed, B, group_offsets).view(len(A), -1, B.size(2))

    @property
    def cases(self) -> Sequence[UniformCase]:
        return uniform_cases(self.device)

    def make(self, case: UniformCase) -> tuple[Tensor, Tensor]:
        A, B, _ = make_inputs([case.M] * case.G, case.N, case.K, dtype=self.dtype, device=self.device)
        return A.view(case.G, case.M, case.K), B

    def check(self, out: Tensor, A: Tensor, B: Tensor) -> None:
        assert_grouped_gemm_close(out.flatten(0, 1), A.flatten(0, 1), B, _offsets(A))

    @register_x_val("(G, M, N, K)")
    def get_x_val(self, example_inputs: Any) -> Any:
        return example_inputs and tuple(self.case)

    @register_metric()
    def flops(self, fn_name: str, example_inputs: Any, metrics: Any) -> float:
        A, B = example_inputs
        return flop_count([A.size(1)] * len(A), B.size(2), B.size(1))

    @register_metric()
    def gbps(self, fn: Any, example_inputs: Any, metrics: Any) -> float | None:
        A, B = example_inputs
        out_dtype = torch.float32 if fn._name == "uniform_grouped_gemm_float32" else A.dtype
        per_group = fn._name not in self.ceilings
        moved = byte_count([A.size(1)] * len(A), B.size(2), B.size(1), A.dtype, out_dtype, per_group)
        return base.gigabytes_per_second(moved, metrics)


def _as_inputs(A: Tensor, B: Tensor) -> baselines.Inputs:
    return baselines.Inputs(A.flatten(0, 1), B, _offsets(A), [A.size(1)] * len(A))


def _offsets(A: Tensor) -> Tensor:
    G, M, _ = A.shape
    return torch.arange(0, (G + 1) * M, M, dtype=torch.int32, device=A.device)
