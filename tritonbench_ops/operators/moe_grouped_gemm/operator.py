"""An expert layer's grouped GEMM: rows packed by expert, a weight for each expert.

    A_packed       [M, K]
    B              [G, K, N], the transposed view of [G, N, K], which is how modules keep their weights
    group_offsets  [G + 1] int32

Offsets in PyTorch's form, group sizes on the host, and other libraries' metadata of the groups are computed before the
timing. These libraries are the peers of `python -m benchmarks`; those that are not installed are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from tritonbench.utils.triton_op import register_benchmark, register_metric, register_x_val

import moe_kernels
from moe_kernels.testing import assert_grouped_gemm_close, byte_count, flop_count, group_sizes_for, make_inputs
from tritonbench_ops import base, baselines
from tritonbench_ops.baselines import Inputs, Provider
from tritonbench_ops.cases import MoeCase, moe_cases
from tritonbench_ops.registration import skip, warn_once

PEERS = {name.replace("-", "_"): provider for name, provider in baselines.PEERS.items() if provider.by_default}


class Operator(base.Operator):
    not_ours = frozenset({"torch_loop", "aten_grouped_mm", *PEERS})

    @register_benchmark(baseline=True)
    @base.checked
    def torch_loop(self, *inputs: Tensor) -> Callable[[], Tensor]:
        return baselines.loop(_as_inputs(*inputs))

    @register_benchmark()
    @base.checked
    def aten_grouped_mm(self, *inputs: Tensor) -> Callable[[], Tensor]:
        return baselines.grouped_mm(_as_inputs(*inputs))

    @register_benchmark(label="dense_ceiling (one weight for all rows)")
    def dense_ceiling(self, *inputs: Tensor) -> Callable[[], Tensor]:
        return baselines.dense(_as_inputs(*inputs))

    @register_benchmark()
    @base.checked
    def grouped_gemm(self, *inputs: Tensor) -> Callable[[], Tensor]:
        return lambda: moe_kernels.grouped_gemm(*inputs)

    @register_benchmark()
    @base.checked
    def grouped_gemm_jagged(self, *inputs: Tensor) -> Callable[[], Tensor]:
        return lambda: moe_kernels.grouped_gemm_jagged(*inputs)

    @register_benchmark()
    @base.checked
    def grouped_gemm_jagged_persistent(self, *inputs: Tensor) -> Callable[[], Tensor]:
        return lambda: moe_kernels.grouped_gemm_jagged_persistent(*inputs)

    @property
    def cases(self) -> Sequence[MoeCase]:
        return moe_cases(self.device)

    def make(self, case: MoeCase) -> tuple[Tensor, Tensor, Tensor]:
        sizes = group_sizes_for(case.sizes, case.G, case.M)
        return make_inputs(sizes, case.N, case.K, dtype=self.dtype, device=self.device, transposed=True)

    def result(self, name: str, made: Any) -> Any:
        return PEERS[name].result(_as_inputs(*self.example_inputs), made) if name in PEERS else made

    def check(self, out: Tensor, A_packed: Tensor, B: Tensor, group_offsets: Tensor) -> None:
        assert_grouped_gemm_close(out, A_packed, B, group_offsets)

    @register_x_val("(G, M, N, K, sizes, layer)")
    def get_x_val(self, example_inputs: Any) -> Any:
        return example_inputs and tuple(self.case)

    @register_metric()
    def flops(self, fn_name: str, example_inputs: Any, metrics: Any) -> float:
        A_packed, B, _ = example_inputs
        return flop_count([len(A_packed)], B.size(2), B.size(1))

    @register_metric()
    def gbps(self, fn: Any, example_inputs: Any, metrics: Any) -> float | None:
        A_packed, B, group_offsets = example_inputs
        sizes = group_offsets.diff().tolist()
        per_group = fn._name not in self.ceilings
        moved = byte_count(sizes, B.size(2), B.size(1), A_packed.dtype, A_packed.dtype, per_group)
        return base.gigabytes_per_second(moved, metrics)


def _as_inputs(A_packed: Tensor, B: Tensor, group_offsets: Tensor) -> Inputs:
    return Inputs(A_packed, B, group_offsets, group_offsets.diff().tolist())


def _add_peer(name: str, peer: Provider) -> None:
    def provider(self: Operator, *inputs: Tensor) -> Callable[[], Any]:
        if self.device != "cuda":
            skip(f"{peer.package} needs a CUDA GPU")
        call = peer.make(_as_inputs(*inputs))
        self.check(self.result(name, call()), *inputs)
        return lambda: call()

    if not peer.installed:
        warn_once(f"{name}: the package {peer.package} is not installed")
    declare = register_benchmark(
        operator_name="moe_grouped_gemm", func_name=name, label=peer.label, enabled=peer.installed
    )
    setattr(Operator, name, declare(provider))


for _name, _peer in PEERS.items():
    _add_peer(_name, _peer)
