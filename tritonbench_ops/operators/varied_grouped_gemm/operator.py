"""Products of any sizes: group_A, G matrices [M_g, K_g], times group_B, G matrices [K_g, N_g]; a list of [M_g, N_g]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from tritonbench.utils.triton_op import register_benchmark, register_metric, register_x_val

import moe_kernels
from moe_kernels.testing import assert_grouped_gemm_close, byte_count, flop_count, make_inputs
from tritonbench_ops import base, baselines
from tritonbench_ops.cases import VariedCase, extent, varied_cases
from tritonbench_ops.registration import skip

_Group = Sequence[Tensor]


class Operator(base.Operator):
    not_ours = frozenset({"torch_loop", "aten_grouped_mm"})

    @register_benchmark(baseline=True)
    @base.checked
    def torch_loop(self, group_A: _Group, group_B: _Group) -> Callable[[], list[Tensor]]:
        return baselines.loop_over_list(group_A, group_B)

    @register_benchmark(label="aten_grouped_mm (packed beforehand)")
    @base.checked
    def aten_grouped_mm(self, group_A: _Group, group_B: _Group) -> Callable[[], list[Tensor]]:
        if len({b.shape for b in group_B}) > 1:
            skip("torch._grouped_mm needs the same K and N in all groups")
        A_packed, group_offsets = moe_kernels.pack_groups(group_A)
        B, offs = torch.stack(list(group_B)), moe_kernels.offs_from_group_offsets(group_offsets)
        rows = [len(a) for a in group_A]
        return lambda: list(torch.split(torch._grouped_mm(A_packed, B, offs=offs), rows))

    @register_benchmark(label="dense_ceiling (one product of as many FLOPs)")
    def dense_ceiling(self, group_A: _Group, group_B: _Group) -> Callable[[], Tensor]:
        K, N = max((b.shape for b in group_B), key=lambda shape: shape[0] * shape[1])
        M = max(1, round(_flops(group_A, group_B) / (2 * K * N)))
        A, B, _ = make_inputs([M], N, K, dtype=self.dtype, device=self.device, per_group=False)
        return lambda: A @ B

    @register_benchmark(label="varied_grouped_gemm (table made in the call)")
    @base.checked
    def varied_grouped_gemm(self, group_A: _Group, group_B: _Group) -> Callable[[], list[Tensor]]:
        if self.use_cuda_graphs:
            skip("a CUDA graph cannot capture the table's copy to the device")
        return lambda: moe_kernels.varied_grouped_gemm(group_A, group_B)

    @register_benchmark(label="varied_grouped_gemm (table made beforehand)")
    @base.checked
    def preprocessed_varied_grouped_gemm(self, group_A: _Group, group_B: _Group) -> Callable[[], list[Tensor]]:
        plan = moe_kernels.plan_varied_grouped_gemm(group_A, group_B)
        return lambda: plan()

    def best_config(self, fn: Any) -> Any:
        if fn._name == "preprocessed_varied_grouped_gemm":  # its choice was made beforehand
            return base.chosen_config(lambda: moe_kernels.varied_grouped_gemm(*self.example_inputs))
        return super().best_config(fn)

    @property
    def cases(self) -> Sequence[VariedCase]:
        return varied_cases(self.device)

    def make(self, case: VariedCase) -> tuple[list[Tensor], list[Tensor]]:
        pairs = [
            make_inputs([M], N, K, dtype=self.dtype, device=self.device, per_group=False, seed=seed)[:2]
            for seed, (M, N, K) in enumerate(case.problems)
        ]
        return [a for a, _ in pairs], [b for _, b in pairs]

    def check(self, out: list[Tensor], group_A: _Group, group_B: _Group) -> None:
        for product, a, b in zip(out, group_A, group_B, strict=True):
            assert_grouped_gemm_close(product, a, b, torch.tensor([0, len(a)], device=a.device))

    @register_x_val("(G, M, N, K, problems)")
    def get_x_val(self, example_inputs: Any) -> Any:
        if example_inputs is None:
            return None
        M, N, K = zip(*self.case.problems, strict=True)
        return len(M), sum(M), extent(N), extent(K), self.case.name

    @register_metric()
    def flops(self, fn_name: str, example_inputs: Any, metrics: Any) -> float:
        return _flops(*example_inputs)

    @register_metric()
    def gbps(self, fn: Any, example_inputs: Any, metrics: Any) -> float | None:
        if fn._name in self.ceilings:
            return None
        moved = sum(
            byte_count([len(a)], b.size(1), b.size(0), a.dtype, a.dtype, per_group=False)
            for a, b in zip(*example_inputs, strict=True)
        )
        return base.gigabytes_per_second(moved, metrics)


def _flops(group_A: _Group, group_B: _Group) -> int:
    return sum(flop_count([len(a)], b.size(1), b.size(0)) for a, b in zip(group_A, group_B, strict=True))
