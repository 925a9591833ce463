"""Helion kernels for jagged Mixture-of-Experts work. Importing this package touches no GPU and does not need one."""

from moe_kernels.ahead import LayerShape, compile_ahead
from moe_kernels.batched import plan_varied_grouped_gemm, uniform_grouped_gemm, varied_grouped_gemm
from moe_kernels.experts import moe_mlp, swiglu_ffn
from moe_kernels.grouped_gemm import (
    grouped_gemm,
    grouped_gemm_jagged,
    grouped_gemm_jagged_persistent,
    grouped_gemm_wgrad,
    grouped_mm,
    scaled_grouped_mm,
)
from moe_kernels.nn import MoE, quantize_once
from moe_kernels.packing import (
    group_offsets_from_offs,
    group_offsets_from_sizes,
    group_sizes,
    offs_from_group_offsets,
    pack_groups,
    unpack_groups,
)
from moe_kernels.quantize import dequantize, quantize, quantize_weight
from moe_kernels.routing import permute, route, topk_sigmoid, topk_softmax, unpermute
from moe_kernels.routing_maps import Routing
from moe_kernels.scaled import QuantizedWeight, ScaledTensor
from moe_kernels.schedule import varied_schedule

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 - in the order of a layer's steps
    "topk_softmax",
    "topk_sigmoid",
    "route",
    "Routing",
    "permute",
    "unpermute",
    "pack_groups",
    "unpack_groups",
    "group_sizes",
    "group_offsets_from_sizes",
    "group_offsets_from_offs",
    "offs_from_group_offsets",
    "grouped_gemm",
    "grouped_gemm_jagged",
    "grouped_gemm_jagged_persistent",
    "grouped_gemm_wgrad",
    "grouped_mm",
    "scaled_grouped_mm",
    "uniform_grouped_gemm",
    "varied_grouped_gemm",
    "plan_varied_grouped_gemm",
    "varied_schedule",
    "swiglu_ffn",
    "moe_mlp",
    "MoE",
    "ScaledTensor",
    "QuantizedWeight",
    "quantize",
    "dequantize",
    "quantize_weight",
    "quantize_once",
    "LayerShape",
    "compile_ahead",
]
