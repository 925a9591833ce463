"""What kernel bodies call where Helion has no word for it."""

from __future__ import annotations

import helion.language as hl
import torch


def halve(odd: int, like: torch.Tensor) -> torch.Tensor:
    """n for `odd` = 2 * n + 1. Triton compiles anew for arguments that are 1 or a multiple of 16; this never is."""
    return hl.inline_triton("({0} // 2).to(tl.int32)", args=(odd,), output_like=like)


def divide(a: torch.Tensor, b: int) -> torch.Tensor:
    """a // b for a >= 0, b > 0, without the sign handling of Python's `//`."""
    return hl.inline_triton("{0} // {1}", args=(a, b), output_like=a)


def unmasked(tile: torch.Tensor) -> torch.Tensor:
    """`tile` itself, hidden from Helion's mask propagation: a masked load would not be made by TMA."""
    return hl.inline_triton("{0}", args=(tile,), output_like=tile)
