"""The activation between the two products of an expert."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

CLAMPED = ("clamped_swiglu", "clamped_silu")  # with a limit on gate and up
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu_squared", *CLAMPED)


class GLUSpec(NamedTuple):
    """Specification of `act = f(gate) * up`, or of `act = f(gate)` if not `gated`, where `activation` names f.

    Gate and up are the first and the second half of the first product's columns, or its even and odd columns if
    `interleaved`, or two separate products. The activations in `CLAMPED` clamp gate to at most `limit`, and up to
    `-limit..limit`: "clamped_swiglu" is gpt-oss's `act = gate * sigmoid(alpha * gate) * (up + 1)`, "clamped_silu" is
    DeepSeek-V4's `act = silu(gate) * up`. Only these two use `limit`, and only "clamped_swiglu" uses `alpha`.
    """

    activation: str
    gated: bool
    interleaved: bool
    alpha: float
    limit: float

    def halves(self, both: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return gate and up: views of `both [..., 2I]`, or `both, up` if they are separate or there is no up."""
        if not self.gated or up is not None:
            return both, up
        if self.interleaved:
            return both[..., ::2], both[..., 1::2]
        width = both.shape[-1] // 2
        return both.narrow(-1, 0, width), both.narrow(-1, width, width)

    def parts(self, both: Tensor | None, up: Tensor | None, apart: bool) -> tuple[Tensor | None, Tensor | None]:
        """Return gate and up of an optional tensor, such as a bias; `apart` if gate and up have separate weights."""
        return (both, up) if both is None or apart else self.halves(both, None)

    def width(self, W: int, apart: bool) -> int:
        """Return I for a first weight `[.., W]`: W // 2 if it holds gate and up, otherwise W."""
        return W // 2 if self.gated and not apart else W


def columns(weight: Any, transposed: bool) -> Any:
    """Return a layer's weight, or None, as `[E, inputs, outputs]`, which it is if `transposed`."""
    return weight if weight is None or transposed else weight.mT
