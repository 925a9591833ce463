"""`ScaledTensor`: an operand in fp8 with its scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
BLOCK = 128
FORMATS = ("rowwise", "1x128", "128x128")
# Name in `MoE.quantize` and in `compute` -> format of the weights.
FP8_COMPUTE = {"fp8_block": "128x128", "fp8_rowwise": "rowwise"}


class ScaledTensor(NamedTuple):
    """`data` in fp8 and float32 `scales`: an element's value is its data times the scale of its block.

    For data `[..., R, K]`, which is contracted along K:

    | format | one scale per | shape of the scales | used for |
    |---|---|---|---|
    | "rowwise" | row | `[..., R, 1]` | activations and weights |
    | "1x128" | 128 elements of a row | `[..., R, ceil(K / 128)]` | activations |
    | "128x128" | square block | `[..., ceil(R / 128), ceil(K / 128)]` | weights |

    The last block of a row or column may be smaller. "rowwise" weights `[G, N, K]` have a scale per output column;
    "1x128" and "128x128" are the formats of DeepSeek-V3. Products take weights as `[G, K, N]`, which is the view `mT`.
    """

    data: Tensor  # [..., R, K], or [..., K, R] for `mT`; float8_e4m3fn or float8_e5m2
    scales: Tensor  # float32, finite or NaN, with the dimensions of data in the same order
    format: str

    @property
    def mT(self) -> ScaledTensor:
        """A view with the last two dimensions of data and scales swapped, without a copy."""
        return ScaledTensor(self.data.mT, self.scales.mT, self.format)

    @property
    def shape(self) -> torch.Size:
        """The shape of the data."""
        return self.data.shape

    @property
    def device(self) -> torch.device:
        """The device of the data."""
        return self.data.device


class QuantizedWeight(NamedTuple):
    """A weight `[E, N, K]` of a layer that is trained, with what `moe_mlp` with `compute` quantises it to.

    Returned by `quantize_weight`. The gradient is that of `weight`; products use the fp8 data, forward or backward.
    """

    weight: Tensor  # [E, N, K], bfloat16, float16 or float32
    forward: ScaledTensor  # [E, N, K]
    backward: ScaledTensor  # [E, K, N]


def scales_shape(shape: Sequence[Any], format: str) -> tuple[Any, ...]:
    """Return the shape of the scales for data of `shape`, whose extents may be symbolic."""
    *groups, R, K = shape
    if format == "rowwise":
        return (*groups, R, 1)
    parts = (K + BLOCK - 1) // BLOCK
    return (*groups, R if format == "1x128" else (R + BLOCK - 1) // BLOCK, parts)
