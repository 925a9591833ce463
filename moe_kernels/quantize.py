"""Quantise tensors to fp8 with scales, and dequantise them. The formats are those of `ScaledTensor`."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels import checks, ops, reference
from moe_kernels.scaled import FP8_COMPUTE, QuantizedWeight, ScaledTensor


def quantize(
    x: Tensor,  # [R, K] or [G, R, K]
    format: str,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    power_of_two: bool = False,
) -> ScaledTensor:
    """Quantise `x` to fp8, with one scale for each block of the format.

    Blocks are rows, parts of rows or squares, see `ScaledTensor`; the last ones may be smaller. With `amax = max |x|`
    of a block in float32, and `largest` the largest number of `dtype`,

        scale = max(amax, 2**-100) * float32(1 / largest)        data = fp8(x * float32(1 / scale))

    where each operation rounds to nearest even. Kernels and reference give bit-identical results.

    - A block of zeros has data 0.
    - A block that holds a NaN or an infinity has data 0 and the scale NaN: its values are NaN, and so is every result
      that depends on them.

    Args:
        x: `[R, K]` or `[G, R, K]`, contracted along K; bfloat16, float16 or float32, on a CPU also float64; any
            strides. For weights `[G, K, N]`, call `quantize(weights.mT, ...)` and pass the result's `mT` to a product.
        format: "rowwise", "1x128" or "128x128".
        dtype: dtype of the data: `torch.float8_e4m3fn`, up to 448, or `torch.float8_e5m2`, up to 57344.
        power_of_two: True rounds scales up to powers of two.

    Returns:
        Data of the shape of `x`, contiguous, and float32 scales, contiguous except those of "1x128", which are
        column-major, as products read them. Neither data nor scales require grad, even if `x` does.

    Raises:
        TypeError: `x` or `dtype` has a wrong dtype.
        ValueError: `x` has a wrong rank; unknown format.
        RuntimeError: float8_e4m3fn on a GPU of compute capability below 8.9.
        ImportError: as for `grouped_gemm`.
    """
    checks.check_quantize(x, format, dtype, power_of_two)
    data, scales = ops.quantize(x.detach(), format, dtype, power_of_two)
    return ScaledTensor(data, scales, format)


def quantize_weight(weight: Tensor, compute: str) -> QuantizedWeight:  # [E, N, K]
    """Quantise a weight of `moe_mlp` with `compute`, once for several calls, as the microbatches of a training step.

    `moe_mlp` takes the result in place of the weight, and computes the same bits, gradients included. The fp8 data for
    the forward and the backward pass take as much memory as the weight in bfloat16, until they are freed.

    Quantise the weight again after it has changed, as by an optimizer's step: a change is not noticed. `quantize_once`
    does both for the `MoE` layers of a model.

    Args:
        weight: `[E, 2I, H]`, `[E, I, H]` or `[E, H, I]`, as for `moe_mlp`: bfloat16, float16 or float32, any strides.
        compute: "fp8_rowwise" or "fp8_block", as passed to `moe_mlp`.

    Raises:
        TypeError: the weight has a wrong dtype.
        ValueError: the weight has a wrong rank; unknown `compute`.
        RuntimeError: a GPU of compute capability below 8.9.
        ImportError: as for `grouped_gemm`.
    """
    checks.check_quantize_weight(weight, compute)
    format = FP8_COMPUTE[compute]
    data, scales, backward, backward_scales = ops.quantize_weight(weight.detach(), format == "rowwise")
    backward_scales = backward_scales if format == "rowwise" else scales.mT
    return QuantizedWeight(weight, ScaledTensor(data, scales, format), ScaledTensor(backward, backward_scales, format))


def dequantize(scaled: ScaledTensor, dtype: torch.dtype = torch.float32) -> Tensor:  # [..., R, K]
    """Return the values of `scaled`, `data * scale` in float32, rounded once to `dtype`. Computed in plain PyTorch.

    Args:
        scaled: a result of `quantize`, or a ScaledTensor with such shapes and format; also its `mT`.
        dtype: bfloat16, float16, float32 or float64.

    Raises:
        TypeError: not a `ScaledTensor`, or a wrong dtype.
        ValueError: wrong rank or device, or wrong shape of the scales; unknown format.
    """
    return reference.dequantize(scaled, dtype)
