"""The choice of kernels for the parts of a layer, by extents and strides alone."""

from __future__ import annotations

from typing import Any

from moe_kernels.runtime.signature import RANK_UP_TO

_MOST_EXPERTS = 1024  # with more slots than are ranked by one launch
_MOST_SLOTS = 16  # the second kernel for one token has a loop for each: 128 would take most of a minute to compile


def sorts(R: int, E: int) -> bool:
    """Whether the kernels of `route` support these numbers of slots and experts."""
    return R > 0 and E > 0 and (R <= RANK_UP_TO or E <= _MOST_EXPERTS)


def one_token_is_faster(T: int, top_k: int, w_in: Any, w_out: Any) -> bool:
    """Whether a layer takes the kernels for one token, which do not sort: one token, few slots, and weights
    `[E, H, 2I]` and `[E, I, H]` whose contracted dimension is contiguous.
    """
    if T != 1 or top_k > _MOST_SLOTS or 0 in w_in.shape or 0 in w_out.shape:
        return False
    return bool(w_in.stride(1) == w_out.stride(1) == 1)
