"""The decorator for Helion kernels, and functions with which planners prepare and inspect operands."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import helion
import torch
from helion.runtime.settings import default_autotuner_fn

from moe_kernels import requirements, rules
from moe_kernels.rules.config import Config
from moe_kernels.runtime.attributes import module_or_empty
from moe_kernels.runtime.plan import Builder
from moe_kernels.runtime.symbolic import SymbolicInt, SymbolicTensor, least, most, needs_int64
from moe_kernels.runtime.targets import Gpu

helion_indexing = module_or_empty("helion._compiler.indexing_strategy")


def _leave_scalar_indices() -> None:
    """Have Helion keep a 0-d index scalar. It generates `index[:, None]`, which Triton rejects from 3.9 on."""
    indexing: Any = getattr(helion_indexing, "SubscriptIndexing", None)
    by_dimension: Any = getattr(indexing, "compute_per_dim_indexing", None)
    if by_dimension is None:
        raise requirements.lacks("helion", "SubscriptIndexing.compute_per_dim_indexing")

    def compute(state: Any, tensor: Any, index: Sequence[Any], *rest: Any, **options: Any) -> Any:
        found = by_dimension(state, tensor, index, *rest, **options)
        indices = zip((k for k in index if k is not None), found.dim_index_exprs, strict=True)
        kept = (
            re.sub(r"\[[:, None]+\]$", "", text) if isinstance(k, torch.Tensor) and k.dim() == 0 else text
            for k, text in indices
        )
        return replace(found, dim_index_exprs=tuple(kept))

    indexing.compute_per_dim_indexing = staticmethod(compute)


if (requirements.minor(requirements.installed("triton")) or (0, 0)) >= (3, 9):  # older versions keep the measured code
    _leave_scalar_indices()


class _Preset:
    """Replaces Helion's search: returns the rule's config, and searches only when forced to."""

    def __init__(self, rule: Callable[..., Config] | None, bound: Any, args: Sequence[Any], options: dict[str, Any]):
        self.rule, self.bound, self.args, self.options = rule, bound, args, options

    def autotune(self, *, skip_cache: bool = False) -> helion.Config:
        if skip_cache:
            return default_autotuner_fn(self.bound, self.args, **self.options).autotune(skip_cache=True)
        if self.rule is None:
            raise RuntimeError(f"{self.bound.kernel.name}: expected a config, which plans give this kernel, got none")
        chosen = self.rule(*(getattr(arg, "value", arg) for arg in self.args))  # hl.constexpr wraps its value
        return helion.Config(**chosen.config)


def kernel(
    rule: Callable[..., Config] | None = None, *, static_shapes: bool = False
) -> Callable[[Callable[..., Any]], helion.Kernel[Any]]:
    """Return `@helion.kernel` for shapes that change from call to call, with `rule(*args)` instead of a search.

    A kernel without a rule runs by plans, which give it a config, and cannot be called directly. With `static_shapes`,
    the first extents at compile time may differ from a call's, so the kernel must not use them.
    """
    return helion.kernel(
        static_shapes=static_shapes,
        backend="triton",  # whatever HELION_BACKEND says
        ref_mode=helion.RefMode.OFF,  # whatever HELION_INTERPRET says: in that mode there is no inline Triton
        autotuner_fn=lambda bound, args, **options: _Preset(rule, bound, args, options),
        # HELION_AUTOTUNE_EFFORT=none would mean blocks of 16 x 16 x 16 instead of the rule.
        autotune_effort="quick" if os.environ.get("HELION_AUTOTUNE_EFFORT") == "quick" else "full",
    )


def left_operand(builder: Builder, A: SymbolicTensor, other: torch.dtype) -> SymbolicTensor:
    """Return the left operand `A` of a product with dtype `other`, cast to their common dtype if it may use tf32.

    If the kernel cast A, the product would read it from registers, and with Triton 3.6 the next step overwrites them
    while the asynchronous product still reads them. The right operand is always stored to shared memory first.
    """
    dtype = torch.promote_types(A.dtype, other)
    if A.dtype == dtype or not rules.tf32_allowed(dtype):
        return A
    return builder.call("cast", (A,), (A.shape, dtype), dtype)


def is_empty(x: SymbolicTensor) -> bool:
    """Whether `x` never has an element."""
    return any(most(n) == 0 for n in x.shape)


def written_without_kernel(builder: Builder, out: SymbolicTensor, all_zero: bool) -> bool:
    """Set `out` to zero if it is `all_zero`. Return whether that, or nothing, is all that it needs."""
    if is_empty(out):
        return True
    if all_zero:
        builder.zero(out)
    return all_zero


def whole_blocks(x: SymbolicTensor) -> SymbolicTensor:
    """Return `x`, 2-D or 3-D, with an example shape that blocks fit into. Helion drops TMA for tensors of over 2^31
    elements, and for blocks larger than the tensor, though TMA returns zeros outside of it. If an operand has such a
    shape, all have: Helion 1.5.1 also drops TMA where a loop ends before the tensor.
    """
    *groups, rows, columns = x.shape
    few = [n if isinstance(n, SymbolicInt) else min(2, n) for n in groups]
    blocks = [n if isinstance(n, SymbolicInt) else 256 for n in (rows, columns)]
    return replace(x, example_shape=(*few, *blocks))


def jagged_fields(
    gpu: Gpu,
    A: SymbolicTensor,  # [.., K]
    weights: Sequence[SymbolicTensor],
    outs: Sequence[SymbolicTensor | None],  # [M, N]
    group_offsets: SymbolicTensor,
    *vectors: SymbolicTensor | None,  # biases, scales and maps
) -> dict[str, Any]:
    """Return the fields that the problems of all jagged products have: `rows` (the mean per group) and `M`, for the
    fewest rows of the class, rounded down to powers of two; and those of `rules.Access`.
    """
    results = [out for out in outs if out is not None]
    M, G = least(results[0].size(0)), group_offsets.size(0) - 1
    contracts, int64_vectors = A.size(1) > 0, needs_int64(group_offsets, *vectors)
    return {
        "rows": rules.floor_power_of_2(M // G),
        "M": rules.floor_power_of_2(M),
        "tma_A": contracts and not int64_vectors and tma_readable(gpu, A),
        "tma_B": contracts and all(tma_readable(gpu, B) for B in weights),
        "tma_out": all(out.size(1) >= 16 and tma_readable(gpu, out) for out in results),
        # These apply to pointers only: TMA takes 32-bit coordinates whatever the extent.
        "int64_A": int64_vectors or needs_int64(A),
        "int64_B": needs_int64(*weights),
        "int64_out": needs_int64(*results),
    }


def tma_readable(gpu: Gpu, tensor: SymbolicTensor) -> bool:
    """Whether the tensor memory accelerator (TMA, Hopper and later) can read `tensor`, 2-D or 3-D.

    It needs a base aligned to 16 bytes, a last stride of 1, and other strides that are positive multiples of 16 bytes.
    """
    unit = 16 // tensor.element_size()
    *others, last = tensor.strides
    return gpu.has_tma and last == 1 and tensor.aligned and all(s > 0 and s % unit == 0 for s in others)
