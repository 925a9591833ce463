"""What an expert computes between its two products."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu_squared", "clamped_swiglu")


class Form(NamedTuple):
    """`act = f(gate) * up`, or `act = f(gate)` unless `gated`, for the f that `activation` names.

    Gate and up are the halves of the first product's columns, in this order, or the even and odd columns if
    `interleaved`, or two products. "clamped_swiglu" is gpt-oss's `act = gate * sigmoid(alpha * gate) * (up + 1)`, with
    gate at most `limit` and up within `-limit..limit`; nothing else looks at these two.
    """

    activation: str
    gated: bool
    interleaved: bool
    alpha: float
    limit: float

    def halves(self, h: Tensor, h_up: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Gate and up `[R, I]`, views of `h [R, 2I]`, or `h, h_up` if there are two products."""
        if not self.gated or h_up is not None:
            return h, h_up
        if self.interleaved:
            return h[:, ::2], h[:, 1::2]
        width = h.shape[1] // 2
        return h[:, :width], h[:, width:]
