"""The config of the gating kernel."""

from __future__ import annotations

from moe_kernels.rules.config import Config

MOST_EXPERTS = 4096  # whose logits fit into the registers of a program


def config(experts: int) -> Config:
    """The config for `experts` logits of a token, a power of two: a warp has 128 to 512, of as many tokens."""
    return Config(block_sizes=[max(1, 128 // experts)], num_warps=max(1, experts // 512))
