"""The kernels as providers for TritonBench and Helion's benchmark runner: `(tb_op, *inputs) -> Callable`.

`tb_op` is an operator on the inputs of TritonBench's `grouped_gemm`:

    group_A   G matrices [M_g, K], one dtype
    group_B   G matrices [K, N]; up to 2025 one per group, since then the same tensor for all groups
    rest      further arguments of later versions; not used

Up to 2025 a provider returns a list of G matrices [M_g, N], since then one [M, N]; an operator that expects the latter
has `list_input_to_jagged`. Calls of the returned function are timed. They include packing, which copies the rows,
computes the offsets and stacks different weights; the `preprocessed_` providers pack beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_kernels import grouped_gemm, grouped_gemm_jagged, grouped_gemm_jagged_persistent, pack_groups

Result = Tensor | list[Tensor]
_Gemm = Callable[[Tensor, Tensor, Tensor], Tensor]


def grouped_gemm_jagged_tritonbench(
    tb_op: Any, group_A: Sequence[Tensor], group_B: Sequence[Tensor], *rest: object
) -> Callable[[], Result]:
    """`moe_kernels.grouped_gemm_jagged`, packing included."""
    return _with_packing(grouped_gemm_jagged, tb_op, group_A, group_B)


def grouped_gemm_jagged_persistent_tritonbench(
    tb_op: Any, group_A: Sequence[Tensor], group_B: Sequence[Tensor], *rest: object
) -> Callable[[], Result]:
    """`moe_kernels.grouped_gemm_jagged_persistent`, packing included."""
    return _with_packing(grouped_gemm_jagged_persistent, tb_op, group_A, group_B)


def grouped_gemm_tritonbench(
    tb_op: Any, group_A: Sequence[Tensor], group_B: Sequence[Tensor], *rest: object
) -> Callable[[], Result]:
    """`moe_kernels.grouped_gemm`, packing included."""
    return _with_packing(grouped_gemm, tb_op, group_A, group_B)


def preprocessed_grouped_gemm_jagged_tritonbench(
    tb_op: Any, group_A: Sequence[Tensor], group_B: Sequence[Tensor], *rest: object
) -> Callable[[], Result]:
    """`moe_kernels.grouped_gemm_jagged`, packed beforehand."""
    return _packed_beforehand(grouped_gemm_jagged, tb_op, group_A, group_B)


def preprocessed_grouped_gemm_jagged_persistent_tritonbench(
    tb_op: Any, group_A: Sequence[Tensor], group_B: Sequence[Tensor], *rest: object
) -> Callable[[], Result]:
    """`moe_kernels.grouped_gemm_jagged_persistent`, packed beforehand."""
    return _packed_beforehand(grouped_gemm_jagged_persistent, tb_op, group_A, group_B)


def preprocessed_grouped_gemm_tritonbench(
    tb_op: Any, group_A: Sequence[Tensor], group_B: Sequence[Tensor], *rest: object
) -> Callable[[], Result]:
    """`moe_kernels.grouped_gemm`, packed beforehand."""
    return _packed_beforehand(grouped_gemm, tb_op, group_A, group_B)


# Registered under the function's name. Labels head columns of tables and CSV files, so they have no "-" and no ";".
PROVIDERS: dict[Callable[..., Callable[[], Result]], str] = {
    grouped_gemm_jagged_tritonbench: "moe_kernels jagged (packing timed)",
    grouped_gemm_jagged_persistent_tritonbench: "moe_kernels jagged_persistent (packing timed)",
    grouped_gemm_tritonbench: "moe_kernels grouped_gemm (packing timed)",
    preprocessed_grouped_gemm_jagged_tritonbench: "moe_kernels jagged (packed beforehand)",
    preprocessed_grouped_gemm_jagged_persistent_tritonbench: "moe_kernels jagged_persistent (packed beforehand)",
    preprocessed_grouped_gemm_tritonbench: "moe_kernels grouped_gemm (packed beforehand)",
}


def _with_packing(
    gemm: _Gemm, tb_op: Any, group_A: Sequence[Tensor], group_B: Sequence[Tensor]
) -> Callable[[], Result]:
    def call() -> Result:
        A_packed, group_offsets = pack_groups(group_A)
        return _as_wanted(tb_op, gemm(A_packed, _weights(group_B), group_offsets), group_A)

    return call


def _packed_beforehand(
    gemm: _Gemm, tb_op: Any, group_A: Sequence[Tensor], group_B: Sequence[Tensor]
) -> Callable[[], Result]:
    A_packed, group_offsets = pack_groups(group_A)
    B = _weights(group_B)
    return lambda: _as_wanted(tb_op, gemm(A_packed, B, group_offsets), group_A)


def _weights(group_B: Sequence[Tensor]) -> Tensor:  # [K, N] if all groups have the same tensor, else [G, K, N]
    first = group_B[0]
    return first if all(B is first for B in group_B) else torch.stack(list(group_B))


def _as_wanted(tb_op: Any, out: Tensor, group_A: Sequence[Tensor]) -> Result:
    return out if hasattr(tb_op, "list_input_to_jagged") else list(torch.split(out, [len(A) for A in group_A]))
