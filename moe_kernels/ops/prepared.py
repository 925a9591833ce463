"""A layer's forward as its launches alone, for calls like one that there has been.

With few tokens the kernels take less time than the host needs to find out what to launch. What it finds out depends on
the kind of the tensors only: their shapes, strides, dtypes, device and alignment to 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_kernels import dispatch
from moe_kernels.allocate import empty
from moe_kernels.form import Form
from moe_kernels.ops.layer import fused_is_faster, one_token_is_faster


class Prepared:
    """Calls of one kind. Each step is a launcher until it has been called; from then on, the plan that it returned."""

    def __init__(self, top_k: int, transposed: bool, form: Form):
        from moe_kernels.kernels import permute, route, swiglu_ffn

        self.transposed, self.form = transposed, form
        self.route: Callable[..., Any] = route.launch
        self.first: Callable[..., Any] = partial(swiglu_ffn.launch, top_k=top_k, form=form)
        self.second: Callable[..., Any] = partial(dispatch.launch, "auto")
        self.combine: Callable[..., Any] = partial(permute.launch, permute.combine_rows, top_k=top_k)

    def __call__(
        self,
        hidden: Tensor,  # [T, H]
        topk_ids: Tensor,  # [T, top_k]
        topk_weights: Tensor,  # [T, top_k]
        w_gate_up: Tensor,  # [E, 2I, H], or [E, H, 2I] if transposed; [.., I, ..] with w_up
        w_down: Tensor,  # [E, H, I], or [E, I, H] if transposed
        w_up: Tensor | None,  # [E, I, H], or [E, H, I] if transposed
        gate_up_bias: Tensor | None,  # [E, 2I]; [E, I] with w_up
        up_bias: Tensor | None,  # [E, I]
        down_bias: Tensor | None,  # [E, H]
    ) -> Tensor:  # [T, H]
        R, E = topk_ids.numel(), w_down.size(0)
        slots = topk_ids.reshape(-1).contiguous()
        group_offsets, row_to_slot, slot_to_row = (empty((n,), torch.int32, slots) for n in (E + 1, R, R))
        self.route = self.route(slots, group_offsets, row_to_slot, slot_to_row) or self.route

        *weights, w_out = _by_columns(w_gate_up, w_down, w_up, self.transposed, self.form)
        biases = self.form.parts(gate_up_bias, up_bias, apart=w_up is not None)
        act = empty((R, w_out.size(1)), hidden.dtype, hidden)
        first = (hidden, *weights, group_offsets, row_to_slot, *biases, act, None, None)
        self.first = self.first(*first) or self.first

        rows = empty((R, w_out.size(2)), hidden.dtype, hidden)
        self.second = self.second(act, w_out, group_offsets, down_bias, rows) or self.second
        out = empty(hidden.shape, hidden.dtype, hidden)
        self.combine = self.combine((out, rows, topk_weights), slot_to_row, group_offsets) or self.combine
        return out


class PreparedForOneToken:
    """The same for calls with one token."""

    def __init__(self, transposed: bool, form: Form):
        from moe_kernels.kernels import one_token

        self.transposed, self.form = transposed, form
        self.launch: Callable[..., Any] = partial(one_token.launch, form=form)

    def __call__(
        self,
        hidden: Tensor,  # [1, H]
        topk_ids: Tensor,  # [1, top_k]
        topk_weights: Tensor,  # [1, top_k]
        w_gate_up: Tensor,  # and the next ones as for `Prepared`
        w_down: Tensor,
        w_up: Tensor | None,
        gate_up_bias: Tensor | None,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
    ) -> Tensor:  # [1, H]
        weights = _by_columns(w_gate_up, w_down, w_up, self.transposed, self.form)
        biases = (*self.form.parts(gate_up_bias, up_bias, apart=w_up is not None), down_bias)
        out = empty(hidden.shape, hidden.dtype, hidden)
        act = empty((topk_ids.numel(), weights[-1].size(1)), hidden.dtype, hidden)
        slots = topk_ids.reshape(-1), topk_weights.reshape(-1)
        self.launch = self.launch(out, act, hidden, *slots, *weights, *biases) or self.launch
        return out


def _by_columns(
    w_gate_up: Tensor, w_down: Tensor, w_up: Tensor | None, transposed: bool, form: Form
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Gate and up `[E, H, I]`, and down `[E, I, H]`."""
    if not transposed:
        w_gate_up, w_down, w_up = w_gate_up.mT, w_down.mT, None if w_up is None else w_up.mT
    return *form.halves(w_gate_up, w_up), w_down


def prepare(
    hidden: Tensor,  # [T, H]
    topk_ids: Tensor,  # [T, top_k]
    w_in: Tensor,  # [E, H, 2I], or [E, H, I] with w_up
    w_up: Tensor | None,  # [E, H, I]
    w_out: Tensor,  # [E, I, H]
    transposed: bool,
    form: Form,
) -> Prepared | PreparedForOneToken | None:
    """For checked tensors of a kind, which nobody records: if hidden states and weights have one 16-bit dtype, and
    there is one token, or the first half is one kernel.
    """
    one_dtype = hidden.dtype == w_in.dtype == w_out.dtype and hidden.dtype.itemsize == 2
    R = topk_ids.numel()
    if hidden.is_cuda and one_dtype and one_token_is_faster(hidden, topk_ids, w_in, w_out):
        return PreparedForOneToken(transposed, form)
    if not (hidden.is_cuda and one_dtype and R <= dispatch.MOST_ROWS and fused_is_faster(hidden, R, w_in, w_up, form)):
        return None
    from moe_kernels.kernels import route

    return Prepared(topk_ids.size(1), transposed, form) if route.sorts(R, w_out.size(0)) else None
