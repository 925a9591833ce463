"""Experts: the fused first half of them, the layer that routes to them, and its module."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from moe_kernels import checks, dispatch, expert_modules, ops
from moe_kernels.allocate import on_current_device
from moe_kernels.form import Form
from moe_kernels.ops.layer import one_token_is_faster
from moe_kernels.ops.prepared import Prepared, PreparedForOneToken, prepare
from moe_kernels.plans import Plans
from moe_kernels.routing import topk_softmax


def swiglu_ffn(
    rows: Tensor,  # [M, H]
    w_gate_up: Tensor,  # [E, 2I, H], or [E, H, 2I] if transposed; [.., I, ..] with w_up, or unless gated
    group_offsets: Tensor,  # [E + 1]
    *,
    w_up: Tensor | None = None,  # [E, I, H], or [E, H, I] if transposed
    gate_up_bias: Tensor | None = None,  # [E, 2I]; [E, I] with w_up, or unless gated
    up_bias: Tensor | None = None,  # [E, I]
    activation: str = "silu",
    gated: bool = True,
    transposed: bool = False,
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    """The first half of each expert: `act = f(rows @ gate) * (rows @ up)`, by default SwiGLU.

    Rows are grouped as by `grouped_gemm`; rows in no group give zeros, and one group's NaN never reaches another.
    The activation is computed in float32.

    Args:
        rows: `[M, H]`, sorted by expert; dtypes as for `grouped_gemm`.
        w_gate_up: both weights, gate first: `[E, 2I, H]`. The gate's alone, `[E, I, H]`, if there is `w_up`; the only
            one, `[E, I, H]`, unless `gated`.
        group_offsets: `[E + 1]` int32 or int64.
        w_up: `[E, I, H]`, for weights that are kept apart.
        gate_up_bias, up_bias: `[E, 2I]` or `[E, I]`, added in float32.
        activation: f: "silu", "gelu", "gelu_tanh", "relu", "relu_squared"; or "clamped_swiglu", gpt-oss's
            `gate * sigmoid(alpha * gate) * (up + 1)`, with gate at most `limit` and up within `-limit..limit`.
        gated: False for `act = f(rows @ w)`.
        transposed: weights are `[E, H, 2I]` or `[E, H, I]`.
        interleaved: gate and up take turns in the columns of `w_gate_up`, as in gpt-oss, gate first.
        alpha, limit: of clamped_swiglu.

    Returns:
        act `[M, I]`, of the promoted dtype of rows and weights.

    Raises:
        TypeError, ValueError: an argument has a wrong dtype, or a wrong rank, shape or device; options that exclude
            each other. Offsets are checked on the host if the environment has MOE_KERNELS_VALIDATE=1.
    """
    form = Form(activation, gated, interleaved, alpha, limit)
    rows, w_gate_up, w_up = _autocast(rows, w_gate_up, w_up)
    checks.check_swiglu_ffn(rows, w_gate_up, group_offsets, w_up, gate_up_bias, up_bias, form, transposed)
    if checks.validation_enabled(None):
        checks.validate_offsets(group_offsets, rows.size(0))
    w_in, w_up = _columns(w_gate_up, transposed), _columns(w_up, transposed)
    keep = dispatch.differentiated(rows, w_in, w_up, gate_up_bias, up_bias)
    act: Tensor = ops.swiglu_ffn(rows, group_offsets, w_in, w_up, gate_up_bias, up_bias, keep, *form)[0]
    return act


def moe_mlp(
    hidden: Tensor,  # [T, H]
    topk_ids: Tensor,  # [T, top_k]
    topk_weights: Tensor,  # [T, top_k]
    w_gate_up: Tensor,  # [E, 2I, H]; other layouts as for swiglu_ffn
    w_down: Tensor,  # [E, H, I], or [E, I, H] if transposed
    *,
    w_up: Tensor | None = None,  # [E, I, H], or [E, H, I] if transposed
    gate_up_bias: Tensor | None = None,  # [E, 2I]; [E, I] with w_up, or unless gated
    up_bias: Tensor | None = None,  # [E, I]
    down_bias: Tensor | None = None,  # [E, H]
    activation: str = "silu",
    gated: bool = True,
    transposed: bool = False,
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    validate: bool | None = None,
) -> Tensor:
    """A layer of experts: `out[t] = sum over k of topk_weights[t, k] * expert[topk_ids[t, k]](hidden[t])`.

    `expert(x) = act @ w_down^T + down_bias` with the act of `swiglu_ffn`. The same as `route`, `permute`, `swiglu_ffn`,
    `grouped_gemm` and `unpermute`, one after another, but that its backward keeps only the first product's result.

    Args:
        hidden: `[T, H]`; dtypes as for `grouped_gemm`.
        topk_ids: `[T, top_k]` int32 or int64; an id outside `0..E - 1` drops its slot.
        topk_weights: `[T, top_k]`, any of these dtypes; weights are applied in float32.
        w_gate_up, w_up, gate_up_bias, up_bias: as for `swiglu_ffn`, by default gate and up in one `[E, 2I, H]`.
        w_down: `[E, H, I]`.
        down_bias: `[E, H]`, added in float32.
        activation, gated, interleaved, alpha, limit: as for `swiglu_ffn`.
        transposed: all weights are stored the other way, `[E, H, 2I]` and `[E, I, H]`.
        validate: as for `route`.

    Returns:
        `[T, H]`, of the promoted dtype of hidden states and weights. Differentiable in everything but the ids.

    Raises:
        TypeError, ValueError: as for `route` and `swiglu_ffn`.
    """
    form = Form(activation, gated, interleaved, alpha, limit)
    biases = (gate_up_bias, up_bias, down_bias)
    tensors = (hidden, topk_ids, topk_weights, w_gate_up, w_down, w_up, *biases)
    validates = checks.validation_enabled(validate)
    eager = dispatch.eager(*tensors)
    observed = not eager or dispatch.differentiated(*tensors) or dispatch.profiled()
    kind = None
    if not (validates or observed or torch._C._is_any_autocast_enabled()):
        kind = (form, transposed, _together(w_gate_up, w_up), *map(_kind, tensors))
        prepared = _prepared.get(kind)
        if prepared is not None and on_current_device(hidden):
            return prepared(*tensors)
    hidden, w_gate_up, w_up, w_down = _autocast(hidden, w_gate_up, w_up, w_down)
    checks.check_moe_mlp(hidden, topk_ids, topk_weights, w_gate_up, w_down, w_up, *biases, form, transposed)
    num_experts = w_gate_up.size(0)
    if validates:
        checks.validate_ids(topk_ids, num_experts)
    w_in, w_up, w_out = (_columns(w, transposed) for w in (w_gate_up, w_up, w_down))
    if kind is not None and kind not in _prepared:
        _prepared[kind] = prepare(hidden, topk_ids, w_in, w_up, w_out, transposed, form)
    keep = dispatch.differentiated(*tensors)
    plain = eager or torch.compiler.is_dynamo_compiling()
    if plain and not keep and one_token_is_faster(hidden, topk_ids, w_in, w_out):
        one: Tensor = ops.moe_mlp_of_one_token(hidden, topk_ids, topk_weights, w_in, w_up, w_out, *biases, *form)
        return one
    routing = ops.route(topk_ids, num_experts)
    out: Tensor = ops.moe_mlp(hidden, topk_weights, *routing, w_in, w_up, w_out, *biases, keep, *form)[0]
    return out


_prepared: Plans[Prepared | PreparedForOneToken | None] = Plans()


def _kind(x: Tensor | None) -> tuple[Any, ...] | None:
    """All that checks, choices and compiled code depend on."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.layout, x.get_device(), x.data_ptr() % 16)


def _together(w_gate_up: Tensor, w_up: Tensor | None) -> bool:
    """Whether `w_up` begins in the middle between two experts of `w_gate_up`: then both may be read as one tensor."""
    if w_up is None or w_gate_up.dim() != 3:
        return False
    return 2 * (w_up.data_ptr() - w_gate_up.data_ptr()) == w_gate_up.stride(0) * w_gate_up.element_size()


def _columns(weight: Any, transposed: bool) -> Any:
    """The weight as `[E, inputs, outputs]`."""
    return weight if weight is None or transposed else weight.mT


def _autocast(*operands: Any) -> tuple[Any, ...]:
    return tuple([None if x is None else dispatch.autocast(x)[0] for x in operands])


class MoE(nn.Module):
    """A router and its experts: `moe_mlp` of the hidden states with the topk_weights of `topk_softmax`.

    Parameters:
        router: `[E, H]`; the logits are `hidden @ router^T`.
        w_gate_up: `[E, 2I, H]`, gate first; `[E, I, H]` unless `gated`.
        w_down: `[E, H, I]`.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        activation: str = "silu",
        gated: bool = True,
        renormalize: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """`renormalize` is that of `topk_softmax`, `activation` and `gated` are those of `swiglu_ffn`."""
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k: expected 1 to num_experts = {num_experts}, got {top_k}")
        self.top_k, self.activation, self.gated, self.renormalize = top_k, activation, gated, renormalize

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.router = parameter(num_experts, hidden_size)
        self.w_gate_up = parameter(num_experts, (2 if gated else 1) * intermediate_size, hidden_size)
        self.w_down = parameter(num_experts, hidden_size, intermediate_size)
        self.reset_parameters()

    @classmethod
    def from_experts(
        cls,
        experts: Iterable[nn.Module],
        router: nn.Linear | Tensor | None = None,  # [E, H]
        *,
        top_k: int,
        activation: str | None = None,
        renormalize: bool = True,
    ) -> MoE:
        """The layer of experts that are modules, with trainable copies of their weights.

        Args:
            experts: E modules that consist of the same `nn.Linear`s, without biases: `w1`, `w3` and `w2`, or
                `gate_proj`, `up_proj` and `down_proj`, gate, up and down in this order; `gate_up_proj`, gate first,
                and `down_proj`; or without a gate `up_proj` and `down_proj`, `fc1` and `fc2`, or
                `nn.Sequential(Linear, activation, Linear)`.
            router: `[E, H]`, or the module without a bias that has it as its weight; None for a random one.
            top_k, renormalize: as for the class.
            activation: as for `swiglu_ffn`. By default the first expert is called with random hidden states, in
                float64, to find out which one it has, and that it computes nothing else.

        Raises:
            TypeError: experts are no modules; weights of several dtypes.
            ValueError: there are no experts, their layout is not one of these, there are biases, what they compute
                could not be found out; weights of several shapes or devices.
        """
        modules = expert_modules.listed(experts)
        stacked = expert_modules.stack(modules)
        if activation is None:
            activation = expert_modules.activation_of(modules[0], stacked)
        E, H, I = stacked.w_down.shape  # noqa: E741
        gated = stacked.gated
        layer = cls(H, I, E, top_k, activation=activation, gated=gated, renormalize=renormalize, device="meta")
        layer.w_gate_up, layer.w_down = nn.Parameter(stacked.w_gate_up), nn.Parameter(stacked.w_down)
        if router is None:
            layer.router = nn.Parameter(stacked.w_down.new_empty(E, H))
            _draw(layer.router)
        else:
            layer.router = nn.Parameter(expert_modules.router_weight(router, stacked.w_down))
        return layer

    def reset_parameters(self) -> None:
        """Draw each weight uniformly from within 1 / sqrt(its inputs), as `nn.Linear` does."""
        for weight in self.parameters():
            _draw(weight)

    def forward(self, hidden: Tensor) -> Tensor:  # [..., H] -> [..., H]
        """Route each hidden state to its top_k experts, and add up what they give.

        Raises:
            TypeError, ValueError: as for `moe_mlp`; hidden states and router of two dtypes outside of autocast,
                or on two devices.
        """
        checks.check_layer(hidden, self.router)
        tokens = hidden.reshape(-1, hidden.size(-1))
        topk_ids, topk_weights = topk_softmax(tokens @ self.router.T, self.top_k, renormalize=self.renormalize)
        out = moe_mlp(
            tokens, topk_ids, topk_weights, self.w_gate_up, self.w_down, activation=self.activation, gated=self.gated
        )
        return out.view(hidden.shape)

    def extra_repr(self) -> str:
        """The sizes, for print."""
        num_experts, hidden_size, intermediate_size = self.w_down.shape
        return (
            f"hidden_size={hidden_size}, intermediate_size={intermediate_size}, num_experts={num_experts}, "
            f"top_k={self.top_k}, activation={self.activation}, gated={self.gated}"
        )


def _draw(weight: Tensor) -> None:
    bound = 1 / math.sqrt(weight.size(-1))
    nn.init.uniform_(weight, -bound, bound)
