"""Hugging Face transformers: an experts implementation, chosen with `experts_implementation="moe_kernels"`.

from moe_kernels.integrations import transformers

transformers.register()
model.set_experts_implementation("moe_kernels")
"""

from __future__ import annotations

from importlib import metadata, util
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from moe_kernels import checks, requirements
from moe_kernels.experts import moe_mlp
from moe_kernels.grouped_gemm import grouped_gemm, grouped_mm
from moe_kernels.quantize import quantize
from moe_kernels.routing import permute, route, unpermute
from moe_kernels.runtime.torch_internals import has_hooks
from moe_kernels.scaled import BLOCK, ScaledTensor

TESTED = ("5.8", "5.24")  # the oldest and the newest minor version that the tests were run with
_ACTIVATIONS: dict[Any, str] = {}  # function or module class of the library -> moe_mlp's name
_default_apply_gate: Any = None
_FP8 = "transformers.integrations.finegrained_fp8"
_OTHER = 'this model needs another experts_implementation, such as "eager"'


class _Gate(NamedTuple):
    """The options of `moe_mlp` that are equivalent to a class's own `_apply_gate`."""

    activation: str
    numbers: dict[str, str]  # option of moe_mlp -> attribute of the experts with its value
    interleaved: bool = False


# Keyed by the module that defines the method, because torch.compile changes a method's qualified name.
_GATES = {
    f"transformers.models.{family}.modeling_{family}": gate
    for family, gate in {
        "gpt_oss": _Gate("clamped_swiglu", {"alpha": "alpha", "limit": "limit"}, interleaved=True),
        "openai_privacy_filter": _Gate("clamped_swiglu", {"alpha": "alpha", "limit": "limit"}),
        "minimax_m3_vl": _Gate("clamped_swiglu", {"alpha": "swiglu_alpha", "limit": "swiglu_limit"}),
        "deepseek_v4": _Gate("clamped_silu", {"limit": "limit"}),
        "glm5_next": _Gate("clamped_silu", {"limit": "swiglu_limit"}),
        "hy_v4": _Gate("clamped_silu", {"limit": "swiglu_limit"}),
        "hy_v4_vl": _Gate("clamped_silu", {"limit": "swiglu_limit"}),
    }.items()
}

if util.find_spec("transformers") is not None and util.find_spec("transformers.integrations.moe") is not None:
    from transformers import activations
    from transformers.integrations import moe as registry

    _default_apply_gate = registry._default_apply_gate
    _ACTIVATIONS = {
        F.silu: "silu",
        activations.SiLUActivation: "silu",
        nn.SiLU: "silu",
        activations.GELUActivation: "gelu",
        activations.GELUTanh: "gelu_tanh",
        activations.NewGELUActivation: "gelu_tanh",
        nn.ReLU: "relu",
        activations.ReLUSquaredActivation: "relu_squared",
    }


def register() -> None:
    """Register "moe_kernels" as an `experts_implementation` of transformers. Further calls have no effect.

    It is also registered for experts in fine-grained fp8, if this version of transformers has a registry for them.

    Warns once if the version of transformers is outside the tested range, `TESTED`.

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
    if util.find_spec(_FP8) is not None:
        from transformers.integrations import finegrained_fp8

        if hasattr(finegrained_fp8, "ALL_FP8_EXPERTS_FUNCTIONS"):
            finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS.register("moe_kernels", fp8_experts_forward)


def experts_forward(
    experts: nn.Module,
    hidden_states: Tensor,  # [T, H]
    top_k_index: Tensor,  # [T, top_k]
    top_k_weights: Tensor,  # [T, top_k]
) -> Tensor:  # [T, H]
    """Compute the forward of a transformers class with `@use_experts_implementation`.

    Calls `moe_mlp` if the experts have the library's default gate or none, and an activation without hooks that
    `moe_mlp` supports, or if they have the gate of gpt_oss, openai_privacy_filter, minimax_m3_vl, deepseek_v4,
    glm5_next, hy_v4 or hy_v4_vl. Otherwise computes two products, with the experts' own `_apply_gate` or `act_fn`
    between them and their `post_expert_norm` after them. Drops ids of `num_experts` or more: the library's expert
    parallelism uses them for other ranks' experts.

    Raises:
        TypeError: a weight is missing, or is not a plain tensor.
        TypeError, ValueError: as for `moe_mlp`.
    """
    in_name = "gate_up_proj" if experts.has_gate else "up_proj"
    w_in, w_out = _tensor(experts, in_name), _tensor(experts, "down_proj")
    b_in = b_out = None
    if experts.has_bias:
        b_in, b_out = _tensor(experts, f"{in_name}_bias"), _tensor(experts, "down_proj_bias")
    validate = False if getattr(experts, "_is_expert_parallel", True) else None
    activation = _activation_options(experts)
    if activation is not None:
        out = moe_mlp(
            hidden_states,
            top_k_index,
            top_k_weights,
            w_in,
            w_out,
            gate_up_bias=b_in,
            down_bias=b_out,
            gated=bool(experts.has_gate),
            transposed=bool(experts.is_transposed),
            validate=validate,
            **activation,
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


def fp8_experts_forward(
    experts: nn.Module,
    hidden_states: Tensor,  # [T, H]
    top_k_index: Tensor,  # [T, top_k]
    top_k_weights: Tensor,  # [T, top_k]
) -> Tensor:  # [T, H]
    """Compute the forward of transformers' `FP8Experts` in the way of `experts_forward`, without gradients.

    Weights have one scale, in float32 or as a power of two, per block of 128 x 128. Activations are quantised within
    the call, with one scale per 128 elements of a row.

    Raises:
        TypeError: a weight is missing, or is not in fp8.
        ValueError: a block size other than 128 x 128, or an activation_scheme other than "dynamic".
        TypeError, ValueError, RuntimeError: as for `moe_mlp`.
    """
    name, block_size, scheme = type(experts).__name__, experts.block_size, experts.activation_scheme
    if block_size is None or tuple(block_size) != (BLOCK, BLOCK):  # type: ignore[arg-type]
        raise ValueError(f"{name}.block_size: expected [{BLOCK}, {BLOCK}], got {block_size}; {_OTHER}")
    if scheme != "dynamic":
        raise ValueError(f'{name}.activation_scheme: expected "dynamic", got {scheme!r}; {_OTHER}')
    gated = bool(experts.has_gate)
    w_in, w_out = (_scaled(experts, part) for part in ("gate_up_proj" if gated else "up_proj", "down_proj"))
    validate = False if getattr(experts, "_is_expert_parallel", True) else None
    activation = _fp8_activation_options(experts)
    if activation is not None:
        inputs = hidden_states, top_k_index, top_k_weights
        out = moe_mlp(*inputs, w_in, w_out, gated=gated, validate=validate, **activation)
        return out.to(hidden_states.dtype)  # under autocast
    routed = (hidden_states, top_k_weights)
    instead = "run the model under torch.no_grad()"
    checks.check_not_differentiated(f"{name}: experts in fp8 have", "an input", routed, instead)
    routing = route(top_k_index, top_k_weights, w_in.shape[0], validate=validate)
    offsets, dtype = routing.group_offsets, hidden_states.dtype
    h = grouped_gemm(quantize(permute(hidden_states, routing), "1x128"), w_in.mT, offsets, out_dtype=dtype)
    act = experts._apply_gate(h) if gated else experts.act_fn(h)  # type: ignore[operator]
    return unpermute(grouped_gemm(quantize(act, "1x128"), w_out.mT, offsets, out_dtype=dtype), routing)


def _scaled(experts: nn.Module, name: str) -> ScaledTensor:
    data, scales = _tensor(experts, name), _tensor(experts, f"{name}_scale_inv")
    checks.check_dtype(f"{type(experts).__name__}.{name}", data.dtype, checks.E4M3, f"; {_OTHER}")
    return ScaledTensor(data.detach(), scales.detach().float(), "128x128")


def _fp8_activation_options(experts: Any) -> dict[str, Any] | None:
    """Return the options with which `moe_mlp` computes `FP8Experts._apply_gate`, or None if there are none."""
    name = _activation(experts.act_fn)
    if experts.has_gate:
        if _apply_gate(experts).__module__ != _FP8 or getattr(experts, "gate_softcap", None) is not None:
            return None
        alpha, limit = getattr(experts, "swiglu_alpha", None), getattr(experts, "limit", None)
        if alpha is not None:
            return {"activation": "clamped_swiglu", "alpha": float(alpha), "limit": float(experts.swiglu_limit)}
        if limit is not None:
            return {"activation": "clamped_silu", "limit": float(limit)} if name == "silu" else None
    return None if name is None else {"activation": name}


def _tensor(experts: nn.Module, name: str) -> Tensor:
    try:
        value = getattr(experts, name)  # without a default, for which Dynamo would compute a parametrised weight
    except AttributeError:
        value = None
    if not isinstance(value, Tensor):
        found = "nothing of this name" if value is None else type(value).__name__
        raise TypeError(
            f"{type(experts).__name__}.{name}: expected one tensor with all experts' weights, got {found}; {_OTHER}"
        )
    return value


def _activation_options(experts: nn.Module) -> dict[str, Any] | None:
    """Return the options with which `moe_mlp` computes all that these experts do, or None if there are none."""
    if getattr(experts, "has_post_expert_norm", False):
        return None
    apply_gate = _apply_gate(experts)
    if not experts.has_gate or apply_gate is _default_apply_gate:
        name = _activation(experts.act_fn) if experts.is_concatenated or not experts.has_gate else None
        return None if name is None else {"activation": name}
    gate = _GATES.get(getattr(apply_gate, "__module__", ""))
    if gate is None or _activation(getattr(experts, "act_fn", F.silu)) != "silu":  # some gates contain silu
        return None
    numbers: dict[str, Any] = {option: getattr(experts, attribute, None) for option, attribute in gate.numbers.items()}
    if None in numbers.values():
        return None
    options = {option: float(number) for option, number in numbers.items()}
    return {"activation": gate.activation, "interleaved": gate.interleaved, **options}


def _apply_gate(experts: nn.Module) -> Any:
    """Return the experts' own `_apply_gate` or, as a function, that of their class."""
    return vars(experts).get("_apply_gate") or getattr(type(experts), "_apply_gate", None)


def _activation(act_fn: Any) -> str | None:
    if has_hooks(act_fn):
        return None
    return _ACTIVATIONS.get(act_fn if act_fn is F.silu else type(act_fn))


def _linear(
    rows: Tensor,  # [R, K]
    weight: Tensor,  # [E, K, N]
    bias: Tensor | None,  # [E, N]
    group_offsets: Tensor,  # [E + 1]
) -> Tensor:  # [R, N]
    if bias is None:
        return grouped_gemm(rows, weight, group_offsets)
    return grouped_mm(rows, weight, offs=group_offsets[1:], bias=bias)
