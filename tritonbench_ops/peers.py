"""Other libraries' grouped GEMMs, as providers. None is a dependency; their preparation is not timed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from moe_kernels.timing import Call


def quack(inputs: Any) -> Call:
    """quack-kernels (https://github.com/Dao-AILab/quack), by its default config."""
    return _quack(inputs, tuned=False)


def quack_tuned(inputs: Any) -> Call:
    """The same, by the best of its configs, which its first call searches."""
    return _quack(inputs, tuned=True)


def _quack(inputs: Any, tuned: bool) -> Call:
    gemm = import_module("quack.gemm_interface").gemm
    return lambda: gemm(inputs.A, inputs.B, cu_seqlens_m=inputs.group_offsets, tuned=tuned)


def deep_gemm(inputs: Any) -> Call:
    """DeepGEMM (https://github.com/deepseek-ai/DeepGEMM): each group's rows padded to its block height beforehand."""
    module = import_module("deep_gemm")
    positions, groups = _padded(inputs.sizes, _alignment(module))
    A = inputs.A.new_zeros(len(groups), inputs.A.size(1))
    A[positions.to(A.device)] = inputs.A[: len(positions)]
    out: Tensor = A.new_empty(len(groups), inputs.B.size(2))
    row_to_group = groups.to(A.device)
    if inputs.B.stride(2) == 1:
        multiply, B = module.m_grouped_bf16_gemm_nn_contiguous, inputs.B
    else:
        multiply, B = module.m_grouped_bf16_gemm_nt_contiguous, inputs.B.transpose(1, 2)

    def call() -> Tensor:
        multiply(A, B, out, row_to_group)
        return out

    return call


def without_padding(inputs: Any, out: Tensor) -> Tensor:
    """The rows of `deep_gemm`'s result that are none of the padding."""
    positions, _ = _padded(inputs.sizes, _alignment(import_module("deep_gemm")))
    rows: Tensor = out[positions.to(out.device)]
    return rows


def triton_kernels(inputs: Any) -> Call:
    """triton_kernels (https://github.com/triton-lang/triton, python/triton_kernels): its lists of tiles beforehand."""
    tensor, sizes, G = import_module("triton_kernels.tensor"), inputs.group_offsets.diff(), len(inputs.sizes)
    if hasattr(tensor, "make_ragged_tensor_metadata"):
        metadata = tensor.make_ragged_tensor_metadata(sizes, len(inputs.A))
    else:  # the one that vLLM has
        metadata = import_module("triton_kernels.routing").compute_expt_data(sizes, G, len(inputs.A))
    try:
        matmul = import_module("triton_kernels.matmul").matmul
    except ModuleNotFoundError:  # up to the one that belongs to triton 3.6
        module = import_module("triton_kernels.matmul_ogs")
        routing = module.RoutingData(None, sizes, G, 1, metadata)
        return lambda: module.matmul_ogs(inputs.A, inputs.B, None, routing)
    return lambda: matmul(inputs.A, inputs.B, None, a_ragged_metadata=metadata)


def without_batch(inputs: Any, out: Tensor) -> Tensor:
    """`triton_kernels`' result, which some versions give one more dimension."""
    return out.view(-1, out.size(-1))


def _alignment(module: Any) -> int:
    names = ("get_mk_alignment_for_contiguous_layout", "get_m_alignment_for_contiguous_layout")
    rows: int = next(getattr(module, name) for name in names if hasattr(module, name))()
    return rows


def _padded(sizes: Sequence[int], block: int) -> tuple[Tensor, Tensor]:
    """Where each row goes [M], and each padded row's group [padded M] int32, -1 for padding."""
    lengths = [-(-size // block) * block for size in sizes]
    starts = [0, *accumulate(lengths)]
    groups = torch.full((starts[-1],), -1, dtype=torch.int32)
    for g, size in enumerate(sizes):
        groups[starts[g] : starts[g] + size] = g
    return (groups >= 0).nonzero().flatten(), groups
