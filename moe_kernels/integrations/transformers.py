"""Hugging Face transformers: an experts implementation, chosen with `experts_implementation="moe_kernels"`.

from moe_kernels.integrations import transformers

transformers.register()
model.set_experts_implementation("moe_kernels")
"""

from __future__ import annotations

from importlib import metadata, util
from typing import Any

from torch import Tensor, nn

from moe_kernels import requirements
from moe_kernels.experts import moe_mlp
from moe_kernels.grouped_gemm import grouped_gemm, grouped_mm
from moe_kernels.routing import permute, route, unpermute

TESTED = ("5.8", "5.23")  # the oldest and the newest minor version that the tests were run with
_ACTIVATIONS: dict[type, str] = {}  # the library's class -> the name that moe_mlp has for it
_default_apply_gate: Any = None

if util.find_spec("transformers") is not None and util.find_spec("transformers.integrations.moe") is not None:
    from transformers import activations
    from transformers.integrations import moe as registry

    _default_apply_gate = registry._default_apply_gate
    _ACTIVATIONS = {
        activations.SiLUActivation: "silu",
        nn.SiLU: "silu",
        activations.GELUActivation: "gelu",
        activations.GELUTanh: "gelu_tanh",
        activations.NewGELUActivation: "gelu_tanh",
        nn.ReLU: "relu",
        activations.ReLUSquaredActivation: "relu_squared",
    }


def register() -> None:
    """Make "moe_kernels" a name that transformers takes as `experts_implementation`. More calls change nothing.

    A version of transformers outside `TESTED` is a warning, once.

    Raises:
        ImportError: transformers is missing, or has no interface for experts.
    """
    if _default_apply_gate is None:
        raise ImportError(
            "moe_kernels.integrations.transformers needs transformers 5 with its experts interface: "
            "pip install -e '.[transformers]'"
        )
    requirements.warn_if_untested("transformers", metadata.version("transformers"), *TESTED)
    registry.ExpertsInterface.register("moe_kernels", experts_forward)


def experts_forward(
    experts: nn.Module,
    hidden_states: Tensor,  # [T, H]
    top_k_index: Tensor,  # [T, top_k]
    top_k_weights: Tensor,  # [T, top_k]
) -> Tensor:  # [T, H]
    """What transformers calls as the forward of a class that has `@use_experts_implementation`.

    One `moe_mlp` where the class leaves its gate to the library and the activation is one that `moe_mlp` has; else the
    class's own `_apply_gate`, `act_fn` and `post_expert_norm` between the products. Ids of `num_experts` and more,
    which stand for another rank's experts under the library's expert parallelism, are dropped.

    Raises:
        TypeError: a weight is missing or in a format of its own.
        TypeError, ValueError: as for `moe_mlp`.
    """
    in_name = "gate_up_proj" if experts.has_gate else "up_proj"
    w_in, w_out = _tensor(experts, in_name), _tensor(experts, "down_proj")
    b_in = b_out = None
    if experts.has_bias:
        b_in, b_out = _tensor(experts, f"{in_name}_bias"), _tensor(experts, "down_proj_bias")
    validate = False if getattr(experts, "_is_expert_parallel", True) else None
    activation = _fused_activation(experts)
    if activation is not None:
        out = moe_mlp(
            hidden_states,
            top_k_index,
            top_k_weights,
            w_in,
            w_out,
            gate_up_bias=b_in,
            down_bias=b_out,
            activation=activation,
            gated=bool(experts.has_gate),
            transposed=bool(experts.is_transposed),
            validate=validate,
        )
        return out.to(hidden_states.dtype)

    if not experts.is_transposed:
        w_in, w_out = w_in.mT, w_out.mT
    routing = route(top_k_index, top_k_weights, w_in.size(0), validate=validate)
    h = _linear(permute(hidden_states, routing), w_in, b_in, routing.group_offsets)
    act = experts._apply_gate(h) if experts.has_gate else experts.act_fn(h)  # type: ignore[operator]
    rows = _linear(act.to(h.dtype), w_out, b_out, routing.group_offsets)
    if getattr(experts, "has_post_expert_norm", False):
        rows = experts.post_expert_norm(rows)  # type: ignore[operator]
    return unpermute(rows, routing).to(hidden_states.dtype)


def _tensor(experts: nn.Module, name: str) -> Tensor:
    value = getattr(experts, name, None)
    if not isinstance(value, Tensor):
        found = "nothing of this name" if value is None else type(value).__name__
        raise TypeError(
            f"{type(experts).__name__}.{name}: expected one tensor with all experts' weights, got {found}; "
            'this model needs another experts_implementation, such as "eager"'
        )
    return value


def _fused_activation(experts: nn.Module) -> str | None:
    """The name of the activation if `moe_mlp` computes all that this class does."""
    if getattr(experts, "has_post_expert_norm", False):
        return None
    own_gate = getattr(type(experts), "_apply_gate", None) is not _default_apply_gate
    if experts.has_gate and (own_gate or not experts.is_concatenated):
        return None
    return _ACTIVATIONS.get(type(experts.act_fn))


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None, group_offsets: Tensor) -> Tensor:
    if bias is None:
        return grouped_gemm(rows, weight, group_offsets)
    return grouped_mm(rows, weight, offs=group_offsets[1:], bias=bias)
