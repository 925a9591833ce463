"""The activation between the two products of an expert."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

CLAMPED = ("clamped_swiglu", "clamped_silu")  # with a limit on gate and up
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu_squared", *CLAMPED)


class GLUSpec(NamedTuple):
    """`act = f(gate) * up`, or `act = f(gate)` unless `gated`, for the f that `activation` names.

    Gate and up are the halves of the first product's columns, in this order, or the even and odd columns if
    `interleaved`, or two products. The names in `CLAMPED` take gate at most at `limit`, and up within `-limit..limit`:
    "clamped_swiglu" is gpt-oss's `act = gate * sigmoid(alpha * gate) * (up + 1)`, "clamped_silu" is DeepSeek-V4's
    `act = silu(gate) * up`. No other activation uses `limit`, and only "clamped_swiglu" uses `alpha`.
    """

    activation: str
    gated: bool
    interleaved: bool
    alpha: float
    limit: float

    def halves(self, both: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Gate and up: views of `both [..., 2I]`, or `both, up` if they are apart or there is no up."""
        if not self.gated or up is not None:
            return both, up
        if self.interleaved:
            return both[..., ::2], both[..., 1::2]
        width = both.shape[-1] // 2
        return both.narrow(-1, 0, width), both.narrow(-1, width, width)

    def parts(self, both: Tensor | None, up: Tensor | None, apart: bool) -> tuple[Tensor | None, Tensor | None]:
        """The same of what may be missing, such as biases, where the weights are `apart` or not."""
        return (both, up) if both is None or apart else self.halves(both, None)

    def width(self, W: int, apart: bool) -> int:
        """I, for first weights `[.., W]`, of gate and up or of one of them that are `apart`."""
        return W // 2 if self.gated and not apart else W
