"""torchtitan: an override that replaces its grouped experts with these kernels.

torchrun ... -m torchtitan.train ... --override.imports moe_kernels.integrations.torchtitan.grouped_experts
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import util
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe_kernels import requirements
from moe_kernels.experts import swiglu_ffn
from moe_kernels.grouped_gemm import grouped_gemm
from moe_kernels.packing import group_offsets_from_offs

TESTED = ("0.3", "0.3")  # the oldest and the newest minor version that the tests were run with

if util.find_spec("torchtitan") is not None:
    _VERSION = requirements.installed("torchtitan") or "an unknown version"  # a checkout need not be installed
    try:
        import spmd_types
        from torchtitan.config import derive, override
        from torchtitan.distributed.spmd_types import spmd_mesh_size
        from torchtitan.distributed.utils import get_spmd_backend
        from torchtitan.models.common.moe import GroupedExperts
    except ImportError as error:
        raise ImportError(
            f"moe_kernels.integrations.torchtitan needs torchtitan 0.3, and {_VERSION} is installed: "
            f"pip install 'torchtitan>=0.3,<0.4' ({error})"
        ) from error

    class MoEKernelsExperts(GroupedExperts):
        """torchtitan's `GroupedExperts` with the same parameters, computed by `swiglu_ffn` and `grouped_gemm`."""

        @dataclass(kw_only=True, slots=True)
        class Config(GroupedExperts.Config):
            """The configuration of `GroupedExperts`."""

        def forward(
            self,
            x_RD: Tensor,  # [R, D], sorted by expert
            num_tokens_per_expert_E: Tensor,  # [E]
        ) -> Tensor:  # [R, D]
            """Compute the experts in bfloat16, as torchtitan does; rows past the last expert are zeros."""
            w1, w2, w3 = (
                (w.to_local() if isinstance(w, DTensor) else w).bfloat16()
                for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
            )
            offs = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)
            if get_spmd_backend() == "spmd_types" and spmd_types.is_type_checking() and spmd_mesh_size("ep") == 1:
                for axis in ("dp", "cp"):  # a partial sum of counts, but here the offsets of these rows
                    spmd_types.mutate_type(offs, axis, src=spmd_types.P, dst=spmd_types.V)
            group_offsets = group_offsets_from_offs(offs)
            act = swiglu_ffn(x_RD.bfloat16(), w1, group_offsets, w_up=w3)
            return grouped_gemm(act, w2.mT, group_offsets).type_as(x_RD)

    # exact, because subclasses compute something else.
    @override(target=GroupedExperts.Config, exact=True, description="Grouped GEMMs of moe_kernels")
    def grouped_experts(config: Any) -> Any:
        """Return the `MoEKernelsExperts` configuration that corresponds to a `GroupedExperts` configuration."""
        requirements.warn_if_untested("torchtitan", _VERSION, *TESTED)
        return derive(config, MoEKernelsExperts.Config)

else:

    def grouped_experts(config: Any) -> Any:
        """Return the `MoEKernelsExperts` configuration that corresponds to a `GroupedExperts` configuration.

        Raises:
            ImportError: torchtitan is missing.
        """
        raise ImportError("moe_kernels.integrations.torchtitan needs torchtitan 0.3: pip install 'torchtitan>=0.3'")
