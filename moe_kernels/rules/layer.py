"""The choice of kernels for the parts of a layer, by extents and strides alone."""

from __future__ import annotations

from typing import Any

from moe_kernels.runtime.signature import RANK_UP_TO

_MOST_EXPERTS = 1024  # if there are more slots than one launch ranks
_MOST_SLOTS = 16  # the second kernel for one token unrolls them: 128 would take most of a minute to compile


def sorts(R: int, E: int) -> bool:
    """Whether the kernels of `route` support these numbers of slots and experts."""
    return R > 0 and E > 0 and (R <= RANK_UP_TO or E <= _MOST_EXPERTS)


def one_token_is_faster(T: int, top_k: int, w_in: Any, w_out: Any) -> bool:
    """Whether a layer uses the kernels for one token, which do not sort: if T is 1, slots are few, and the weights
    `[E, H, 2I]` and `[E, I, H]` are contiguous along the contraction.
    """
    if T != 1 or top_k > _MOST_SLOTS or 0 in w_in.shape or 0 in w_out.shape:
        return False
    return bool(w_in.stride(1) == w_out.stride(1) == 1)
