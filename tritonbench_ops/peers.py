"""Providers of other libraries' grouped GEMMs. None is a dependency; their preparation is not timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from moe_kernels.timing import Call


def quack(inputs: Any) -> Call:
    """quack-kernels (https://github.com/Dao-AILab/quack), with its default config."""
    return _quack(inputs, tuned=False)


def quack_tuned(inputs: Any) -> Call:
    """quack-kernels with the best of its configs, which its first call searches."""
    return _quack(inputs, tuned=True)


def _quack(inputs: Any, tuned: bool) -> Call:
    gemm = import_module("quack.gemm_interface").gemm
    return lambda: gemm(inputs.A, inputs.B, cu_seqlens_m=inputs.group_offsets, tuned=tuned)


def deep_gemm(inputs: Any) -> Call:
    """DeepGEMM (https://github.com/deepseek-ai/DeepGEMM): each group's rows padded to its block height beforehand."""
    module = import_module("deep_gemm")
    positions, groups = _padded(inputs.sizes, _alignment(module))
    A = _with_padding(inputs.A, positions, len(groups))
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


def deep_gemm_fp8(inputs: Any) -> Call:
    """DeepGEMM with scales of 1x128 and 128x128, padded as in `deep_gemm`; its masked form for groups of few rows."""
    module = import_module("deep_gemm")
    G, block = len(inputs.sizes), _alignment(module)
    few_rows = len(inputs.A) < G * block
    positions, groups = _padded(inputs.sizes, block, few_rows)
    shape = (G, len(groups) // G) if few_rows else (len(groups),)
    A = _with_padding(inputs.A.view(torch.uint8), positions, len(groups)).view(inputs.A.dtype).view(*shape, -1)
    scales = _with_padding(inputs.scales_A, positions, len(groups)).view(*shape, -1)
    operands = (A, scales.mT.contiguous().mT), (inputs.B.mT, inputs.scales_B.mT)
    out = A.new_empty(*A.shape[:-1], inputs.B.size(2), dtype=torch.bfloat16)
    row_to_group, sizes = groups.to(A.device), inputs.group_offsets.diff()
    expected_rows = max(len(inputs.A) // G, 1)

    def call() -> Tensor:
        if few_rows:
            module.fp8_m_grouped_gemm_nt_masked(*operands, out, sizes, expected_rows)
        else:
            module.m_grouped_fp8_gemm_nt_contiguous(*operands, out, row_to_group)
        return out

    return call


def without_padding(inputs: Any, out: Tensor) -> Tensor:
    """Return the rows of DeepGEMM's result without the padding."""
    positions, _ = _padded(inputs.sizes, _alignment(import_module("deep_gemm")), of_one_size=out.dim() == 3)
    rows: Tensor = out.flatten(0, -2)[positions.to(out.device)]
    return rows


def triton_kernels(inputs: Any) -> Call:
    """triton_kernels (https://github.com/triton-lang/triton, python/triton_kernels): tiles listed beforehand."""
    return _triton_kernels(inputs, lambda module: {})


def triton_kernels_fp8(inputs: Any) -> Call:
    """triton_kernels with one scale for each operand."""
    scale = import_module("triton_kernels.numerics").InFlexData

    def options(module: Any) -> dict[str, Any]:
        scales = module.FlexCtx(lhs_data=scale(scale=inputs.scales_A), rhs_data=scale(scale=inputs.scales_B))
        return {"precision_config": module.PrecisionConfig(flex_ctx=scales, out_dtype=torch.bfloat16)}

    return _triton_kernels(inputs, options)


def _triton_kernels(inputs: Any, options: Callable[[Any], dict[str, Any]]) -> Call:
    tensor, sizes, G = import_module("triton_kernels.tensor"), inputs.group_offsets.diff(), len(inputs.sizes)
    if hasattr(tensor, "make_ragged_tensor_metadata"):
        metadata = tensor.make_ragged_tensor_metadata(sizes, len(inputs.A))
    else:  # the version in vLLM
        metadata = import_module("triton_kernels.routing").compute_expt_data(sizes, G, len(inputs.A))
    try:
        module = import_module("triton_kernels.matmul")
        multiply = partial(module.matmul, inputs.A, inputs.B, None, a_ragged_metadata=metadata)
    except ModuleNotFoundError:  # versions up to that of triton 3.6
        module = import_module("triton_kernels.matmul_ogs")
        multiply = partial(module.matmul_ogs, inputs.A, inputs.B, None, module.RoutingData(None, sizes, G, 1, metadata))
    return partial(multiply, **options(module))


def without_batch(inputs: Any, out: Tensor) -> Tensor:
    """Return the result of triton_kernels without the extra dimension of some versions."""
    return out.view(-1, out.size(-1))


def _alignment(module: Any) -> int:
    names = ("get_mk_alignment_for_contiguous_layout", "get_m_alignment_for_contiguous_layout")
    rows: int = next(getattr(module, name) for name in names if hasattr(module, name))()
    return rows


def _with_padding(x: Tensor, positions: Tensor, rows: int) -> Tensor:
    """Return zeros `[rows, ..]` with the first rows of `x` at `positions`."""
    padded = x.new_zeros(rows, x.size(1))
    padded[positions.to(x.device)] = x[: len(positions)]
    return padded


def _padded(sizes: Sequence[int], block: int, of_one_size: bool = False) -> tuple[Tensor, Tensor]:
    """Return each row's position [M], and each padded row's group [padded M] int32, -1 for padding."""
    lengths = [-(-size // block) * block for size in sizes]
    if of_one_size:
        lengths = [max(lengths)] * len(lengths)
    starts = [0, *accumulate(lengths)]
    groups = torch.full((starts[-1],), -1, dtype=torch.int32)
    for g, size in enumerate(sizes):
        groups[starts[g] : starts[g] + size] = g
    return (groups >= 0).nonzero().flatten(), groups
