"""How kernels are declared, and what planners ask of their operands."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import helion
import helion._compiler.indexing_strategy as helion_indexing
import torch
from helion.runtime.settings import default_autotuner_fn

from moe_kernels import requirements, rules
from moe_kernels.rules.config import Config
from moe_kernels.runtime.plan import Builder
from moe_kernels.runtime.symbolic import SymbolicTensor
from moe_kernels.runtime.targets import Gpu


def _leave_scalar_indices() -> None:
    """Have Helion leave a 0-d index a scalar. It writes `index[:, None]`, which Triton refuses from 3.9 on."""
    indexing: Any = getattr(helion_indexing, "SubscriptIndexing", None)
    by_dimension: Any = getattr(indexing, "compute_per_dim_indexing", None)
    if by_dimension is None:
        raise requirements.lacks("helion", "SubscriptIndexing.compute_per_dim_indexing")

    def compute(state: Any, tensor: Any, index: Sequence[Any], *rest: Any, **options: Any) -> Any:
        found = by_dimension(state, tensor, index, *rest, **options)
        indices = zip((k for k in index if k is not None), found.dim_index_exprs, strict=True)
        return replace(found, dim_index_exprs=tuple(_unexpanded(text) if _is_0d(k) else text for k, text in indices))

    indexing.compute_per_dim_indexing = staticmethod(compute)


def _is_0d(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dim() == 0


def _unexpanded(text: str) -> str:
    return re.sub(r"\[[:, None]+\]$", "", text)


if (requirements.minor(requirements.installed("triton")) or (0, 0)) >= (3, 9):  # before, code stays as it was measured
    _leave_scalar_indices()


class _Preset:
    """Replaces Helion's search: returns the rule's config, and searches only when forced to."""

    def __init__(self, rule: Callable[..., Config], bound: Any, args: Sequence[Any], options: dict[str, Any]):
        self.rule, self.bound, self.args, self.options = rule, bound, args, options

    def autotune(self, *, skip_cache: bool = False) -> helion.Config:
        if skip_cache:
            return default_autotuner_fn(self.bound, self.args, **self.options).autotune(skip_cache=True)
        chosen = self.rule(*(getattr(arg, "value", arg) for arg in self.args))  # a constexpr has a value
        return helion.Config(**chosen.config)


def kernel(
    rule: Callable[..., Config], *, static_shapes: bool = False
) -> Callable[[Callable[..., Any]], helion.Kernel[Any]]:
    """`@helion.kernel` for shapes that change at every call, with `rule(*args)` in place of an automatic search.

    With `static_shapes` a kernel may be compiled for other first extents than it is called with, if it uses none.
    """
    return helion.kernel(
        static_shapes=static_shapes,
        autotuner_fn=lambda bound, args, **options: _Preset(rule, bound, args, options),
        # HELION_AUTOTUNE_EFFORT=none would mean blocks of 16 x 16 x 16 instead of the rule.
        autotune_effort="quick" if os.environ.get("HELION_AUTOTUNE_EFFORT") == "quick" else "full",
    )


def left_operand(builder: Builder, A: SymbolicTensor, other: torch.dtype) -> SymbolicTensor:
    """`A` for products with an operand of dtype `other`: a copy in their common type where that may be tf32.

    Converted by the kernel, A would be multiplied from registers, which the next step overwrites while Triton 3.6 lets
    the asynchronous product still read them. The right operand is always stored to shared memory first.
    """
    dtype = torch.promote_types(A.dtype, other)
    if A.dtype == dtype or not rules.tf32_allowed(dtype):
        return A
    return builder.call("cast", (A,), (A.shape, dtype), dtype)


def tma_readable(gpu: Gpu, tensor: SymbolicTensor) -> bool:
    """Whether the tensor memory accelerator (Hopper and later) can read `tensor`, 2-D or 3-D.

    It needs a base of 16-byte alignment, a last stride of 1 and others that are multiples of 16 bytes.
    """
    unit = 16 // tensor.element_size()
    *others, last = tensor.strides
    return gpu.has_tma and last == 1 and tensor.aligned and all(s > 0 and s % unit == 0 for s in others)
