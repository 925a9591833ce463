"""Low precision: operands in fp8 with their scales, and back. The formats are those of `ScaledTensor`."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels import checks, ops, reference
from moe_kernels.scaled import ScaledTensor


def quantize(
    x: Tensor,  # [R, K] or [G, R, K]
    format: str,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    power_of_two: bool = False,
) -> ScaledTensor:
    """Quantise `x` to fp8, with a scale for each block of a `format`.

    Blocks are rows, parts of rows or squares, as `ScaledTensor` has them, the last ones perhaps smaller. With
    `amax = max |x|` of a block in float32, and `largest` that of `dtype`,

        scale = max(amax, 2**-100) * float32(1 / largest)        data = fp8(x * float32(1 / scale))

    where each operation rounds to nearest even. Kernels and reference give the same bits.

    - A block of zeros has data 0.
    - A block that holds a NaN or an infinity has data 0 and the scale NaN: its values are NaN, and so is all that is
      computed with them.

    Args:
        x: `[R, K]` or `[G, R, K]`, contracted along K; bfloat16, float16 or float32, on a CPU also float64; any
            strides. Weights `[G, K, N]` are quantised as `quantize(weights.mT, ...)`, and their result's `mT` goes to
            a product.
        format: "rowwise", "1x128" or "128x128".
        dtype: of the data, `torch.float8_e4m3fn`, up to 448, or `torch.float8_e5m2`, up to 57344.
        power_of_two: round scales up to powers of two.

    Returns:
        Data of the shape of `x`, contiguous, and float32 scales: those of "1x128" with rows next to each other in
        memory, as products read them, others contiguous. Neither requires a gradient, even if `x` does.

    Raises:
        TypeError: `x` or `dtype` has a wrong dtype.
        ValueError: `x` has a wrong rank; there is no such format.
        RuntimeError: a GPU without float8_e4m3fn, which is of compute capability below 8.9.
    """
    checks.check_quantize(x, format, dtype, power_of_two)
    data, scales = ops.quantize(x.detach(), format, dtype, power_of_two)
    return ScaledTensor(data, scales, format)


def dequantize(scaled: ScaledTensor, dtype: torch.dtype = torch.float32) -> Tensor:  # [..., R, K]
    """The values of `scaled`, `data * scale` in float32, rounded once to `dtype`. In plain PyTorch.

    Args:
        scaled: of `quantize`, or of that shape and format; also its `mT`.
        dtype: bfloat16, float16, float32 or float64.

    Raises:
        TypeError: no `ScaledTensor`, or a wrong dtype.
        ValueError: scales of a wrong shape; there is no such format.
    """
    return reference.dequantize(scaled, dtype)
