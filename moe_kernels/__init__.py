"""Helion kernels for jagged Mixture-of-Experts work. Importing this package touches no GPU and does not need one."""

from moe_kernels.dispatch import (
    grouped_gemm,
    grouped_gemm_jagged,
    grouped_gemm_jagged_persistent,
    grouped_gemm_wgrad,
    grouped_mm,
)
from moe_kernels.moe import MoE, moe_mlp, swiglu_ffn
from moe_kernels.packing import (
    group_offsets_from_offs,
    group_offsets_from_sizes,
    group_sizes,
    offs_from_group_offsets,
    pack_groups,
    unpack_groups,
)
from moe_kernels.routing import Routing, permute, route, topk_sigmoid, topk_softmax, unpermute
from moe_kernels.schedule import varied_schedule
from moe_kernels.uniform import uniform_grouped_gemm
from moe_kernels.varied import plan_varied_grouped_gemm, varied_grouped_gemm

__version__ = "0.1.0"

__all__ = [
    "MoE",
    "Routing",
    "group_offsets_from_offs",
    "group_offsets_from_sizes",
    "group_sizes",
    "grouped_gemm",
    "grouped_gemm_jagged",
    "grouped_gemm_jagged_persistent",
    "grouped_gemm_wgrad",
    "grouped_mm",
    "moe_mlp",
    "offs_from_group_offsets",
    "pack_groups",
    "permute",
    "plan_varied_grouped_gemm",
    "route",
    "swiglu_ffn",
    "topk_sigmoid",
    "topk_softmax",
    "uniform_grouped_gemm",
    "unpack_groups",
    "unpermute",
    "varied_grouped_gemm",
    "varied_schedule",
]
