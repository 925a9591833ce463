"""Stack the weights of experts that are separate modules, in the layout of `moe_mlp`."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_kernels import checks, reference
from moe_kernels.glu import ACTIVATIONS, CLAMPED, GLUSpec
from moe_kernels.runtime.torch_internals import has_no_values, without_modes


class Layout(NamedTuple):
    """Names of an expert's `nn.Linear`s: `into` of the first product, gate before up, and `back` of the second."""

    into: tuple[str, ...]
    back: str
    gated: bool


LAYOUTS = (
    Layout(("w1", "w3"), "w2", gated=True),
    Layout(("gate_proj", "up_proj"), "down_proj", gated=True),
    Layout(("gate_up_proj",), "down_proj", gated=True),
    Layout(("up_proj",), "down_proj", gated=False),
    Layout(("fc1",), "fc2", gated=False),
    Layout(("0",), "2", gated=False),  # nn.Sequential(Linear, activation, Linear)
)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_WITHOUT_DROPOUT = "turn it off, or call .eval() on the experts first if they are not to be trained"
_ROUTER_WEIGHT = "pass router.weight if MoE is to take the softmax of that, or else this router's choice to moe_mlp"
_PLAIN = tuple(name for name in ACTIVATIONS if name not in CLAMPED)  # those without alpha and limit


class Stacked(NamedTuple):
    """Stacked copies of all experts' weights, frozen if all of these are."""

    w_gate_up: nn.Parameter  # [E, 2I, H], gate first; [E, I, H] if not gated
    w_down: nn.Parameter  # [E, H, I]
    layout: Layout  # of the experts


def listed(experts: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the experts as a list."""
    if not isinstance(experts, Iterable):
        raise TypeError(
            f"experts: expected a module for each expert, got {type(experts).__name__}; weights that are stacked "
            "already go into MoE's parameters or moe_mlp, and models of transformers take "
            'set_experts_implementation("moe_kernels")'
        )
    modules = list(experts.values() if isinstance(experts, nn.ModuleDict) else experts)
    if not modules:
        raise ValueError("experts: expected at least one module, got none")
    for e, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise TypeError(f"experts[{e}]: expected an nn.Module, got {type(module).__name__}")
    return modules


def stack(experts: Sequence[nn.Module]) -> Stacked:
    """Copy and stack the weights of experts that all have the same one of `LAYOUTS`."""
    into, back, gated = layout = _layout("experts[0]", experts[0])
    names = (*into, back)
    first = [_weight(experts[0], name) for name in names]
    checks.check_matrix(f"experts[0].{back}.weight", first[-1], "[H, I]")
    H, I = first[-1].shape  # noqa: E741
    rows = 2 * I if gated and len(into) == 1 else I
    hint = "; dequantize the experts first"
    checks.check_dtype(f"experts[0].{into[0]}.weight", first[0].dtype, checks.DTYPES, hint)
    if len(into) == 2 and first[0].shape == first[2].shape == first[1].T.shape != first[1].shape:
        raise ValueError(
            f"experts[0]: expected {_names(layout)} to be gate, up, down, got weights of the shapes "
            f"{[list(weight.shape) for weight in first]}; {into[1]} and {back} seem swapped: rename them"
        )
    weights = []
    for e, expert in enumerate(experts):
        if _layout(f"experts[{e}]", expert) != layout:
            raise ValueError(f"experts[{e}]: expected {_names(layout)} as in experts[0], got {_children(expert)}")
        _check_no_dropout(f"experts[{e}]", expert)
        weights.append([_weight(expert, name) for name in names])
        for name, weight in zip(names, weights[-1], strict=True):
            shape = (H, I) if name == back else (rows, H)
            _check_alike(f"experts[{e}].{name}.weight", weight, shape, first[0], "experts[0]")
    trains_up, trains_down = (
        any(weight.requires_grad for expert in weights for weight in expert[part])
        for part in (slice(-1), slice(-1, None))
    )
    with torch.no_grad():
        w_gate_up = torch.cat([w for expert in weights for w in expert[:-1]]).view(len(experts), -1, H)
        w_down = torch.stack([expert[-1] for expert in weights])
    return Stacked(nn.Parameter(w_gate_up, trains_up), nn.Parameter(w_down, trains_down), layout)


def router_weight(router: nn.Linear | Tensor, w_down: Tensor) -> nn.Parameter:  # [E, H]
    """Return a copy of the router's weight, checked against the experts' `w_down [E, H, I]`; frozen if it is a frozen
    parameter.
    """
    if not isinstance(router, Tensor) and type(router) is not nn.Linear:
        error = f"router: expected a tensor [E, H] or an nn.Linear, got {type(router).__name__}"
        if isinstance(getattr(router, "weight", None), Tensor):
            error += f", which may compute more than hidden @ weight.T: {_ROUTER_WEIGHT}"
        raise TypeError(error)
    weight = router if isinstance(router, Tensor) else router.weight
    if isinstance(router, nn.Linear) and not isinstance(weight, nn.Parameter):
        raise ValueError(
            "router: expected a parameter as its weight, which prune.remove and remove_weight_norm make of it, got one "
            f"computed at each call, as with a hook: {_ROUTER_WEIGHT}"
        )
    if getattr(router, "bias", None) is not None:
        raise ValueError("router: MoE's has no bias; add it to the logits, and pass topk_softmax's choice to moe_mlp")
    _check_alike("router", weight, tuple(w_down.shape[:2]), w_down, "the experts")
    copied = weight.detach().clone(memory_format=torch.contiguous_format)  # which FSDP2 and safetensors need
    if isinstance(router, nn.Linear) and not has_no_values(weight):
        _check_logits(router, copied)
    return nn.Parameter(copied, weight.requires_grad or not isinstance(weight, nn.Parameter))


@torch.no_grad()
def _check_logits(router: nn.Linear, weight: Tensor) -> None:
    """Raise ValueError unless calling the router gives `hidden @ weight.T`: a hook may change it, or the weight."""
    generator = torch.Generator(weight.device).manual_seed(0)
    hidden = torch.randn(16, weight.size(1), dtype=weight.dtype, device=weight.device, generator=generator)
    want = F.linear(hidden, weight).double()
    failure, alike = None, False
    try:
        got = router(hidden).double()
        # Weights that are not finite or not initialised are no reason to refuse.
        alike = got.shape == want.shape and torch.allclose(got, want, rtol=1e-5, atol=0.0, equal_nan=True)
    except Exception as error:
        failure = error
    if not alike:
        raise ValueError(
            "router: expected an nn.Linear that computes hidden @ weight.T, and calling this one gives something else, "
            f"as with a hook: {_ROUTER_WEIGHT}"
        ) from failure


def _check_alike(name: str, weight: Tensor, shape: tuple[int, ...], like: Tensor, owner: str) -> None:
    checks.check_matrix(name, weight, str(list(shape)))
    if tuple(weight.shape) != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(weight.shape)}")
    if weight.dtype != like.dtype:
        raise TypeError(f"{name}: expected {like.dtype} as {owner}, got {weight.dtype}; convert it with .to()")
    if weight.device != like.device:
        raise ValueError(f"{name}: expected on {like.device} with {owner}, got on {weight.device}; move it with .to()")


def activation_of(experts: Sequence[nn.Module], stacked: Stacked) -> str:
    """Return the activation that all experts compute, found by calling each one in float64.

    All are called with the same random weights, each in its current train or eval mode.
    """
    if has_no_values(stacked.w_down):
        with without_modes():  # a mode of fake tensors
            return _activation_of(experts, stacked, torch.device("cpu"))
    return _activation_of(experts, stacked, stacked.w_down.device)


def _activation_of(experts: Sequence[nn.Module], stacked: Stacked, device: torch.device) -> str:
    into, back, gated = stacked.layout
    with torch.no_grad():
        generator = torch.Generator(device).manual_seed(0)
        shapes = stacked.w_gate_up[0].shape, stacked.w_down[0].shape, (16, stacked.w_down.size(1))
        w_in, w_out, x = (
            torch.randn(shape, dtype=torch.float64, device=device, generator=generator) for shape in shapes
        )
        x *= 2 / (x @ w_in.T).std()  # preactivations of standard deviation 2, where activations differ
        x[8:] *= 2.0**16  # large enough to show a limit
        specs = [GLUSpec(name, gated, False, 0.0, 0.0) for name in _PLAIN]
        results = {spec.activation: reference.activate(x @ w_in.T, None, spec) @ w_out.T for spec in specs}
    weights = dict(zip((*into, back), map(nn.Parameter, (*w_in.chunk(len(into)), w_out)), strict=True))
    first = None
    for e, expert in enumerate(experts):
        failure, matching, random = None, [], False
        try:
            got, random = _call(expert, weights, x)
            matching = [name for name, want in results.items() if _close(got, want)]
        except Exception as error:
            failure = error
        if random:
            raise ValueError(
                f"experts[{e}]: this {type(expert).__name__} draws random numbers when it is called, such as for "
                f"dropout, which MoE does not have; {_WITHOUT_DROPOUT}"
            )
        if len(matching) != 1:
            formula = "down(f(gate(x)) * up(x))" if gated else "down(f(up(x)))"
            raise ValueError(
                f"experts[{e}]: calling this {type(expert).__name__} does not show that it is {formula} with f one of "
                f"{', '.join(_PLAIN)}; if it is, pass activation=, for a clamped gate and up 'clamped_silu' or "
                "'clamped_swiglu' with limit=, and else compute it with moe_kernels.route, permute, grouped_gemm and "
                "unpermute"
            ) from failure
        first = first or matching[0]
        if matching[0] != first:
            raise ValueError(f"experts[{e}]: expected the activation {first} as in experts[0], got {matching[0]}")
    assert first is not None
    return first


@torch.no_grad()
def _call(expert: nn.Module, weights: Mapping[str, nn.Parameter], x: Tensor) -> tuple[Tensor, bool]:
    """Return the result of a float64 copy of the expert, with these weights, for `x [_, H]`; and whether it drew random
    numbers.
    """
    instead = {id(_weight(expert, name)): weight for name, weight in weights.items()}
    copied = copy.deepcopy(expert, instead).double()
    before = _random_state(x.device)
    got: Tensor = copied(x)
    return got, not torch.equal(before, _random_state(x.device))


def _close(got: Tensor, want: Tensor) -> bool:
    return got.shape == want.shape and bool(((got - want).abs().amax(1) <= 1e-5 * want.abs().amax(1)).all())


def _random_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def _check_no_dropout(where: str, expert: nn.Module) -> None:
    for name, module in expert.named_modules():
        if isinstance(module, _DROPOUTS) and module.training and module.p > 0:
            raise ValueError(f"{where}.{name}: MoE has no dropout, got {module} in training mode; {_WITHOUT_DROPOUT}")


def _children(expert: nn.Module) -> str:
    """Describe the child modules of an expert, for error messages."""
    return ", ".join(f"{name} ({type(m).__name__})" for name, m in expert.named_children()) or "no modules"


def _names(layout: Layout) -> str:
    names = ", ".join((*layout.into, layout.back))
    return names if names != "0, 2" else "0, 2, as in nn.Sequential(Linear, activation, Linear)"


def _layout(where: str, expert: nn.Module) -> Layout:
    """Return the one of `LAYOUTS` whose names are exactly those of the expert's parameters."""
    parameters = {name for name, _ in expert.named_parameters()}
    weights = {name for name in parameters if not name.endswith("bias")}
    modules = dict(expert.named_modules())
    for layout in LAYOUTS:
        names = (*layout.into, layout.back)
        if weights == {f"{name}.weight" for name in names} and all(
            isinstance(modules.get(name), nn.Linear) for name in names
        ):
            if parameters != weights:
                biases = ", ".join(sorted(parameters - weights))
                raise ValueError(f"{where}: MoE has no biases, got {biases}; moe_kernels.moe_mlp takes them")
            return layout
    raise ValueError(
        f"{where}: unknown layout of {type(expert).__name__}: expected nn.Linear modules by the names "
        f"{'; or '.join(map(_names, LAYOUTS))}, and no other parameters, got {_children(expert)} with the parameters "
        f"{', '.join(sorted(parameters)) or '(none)'}; stack the weights yourself, for MoE's parameters or moe_mlp"
    )


def _weight(expert: nn.Module, name: str) -> Tensor:
    weight = expert.get_parameter(f"{name}.weight")
    if nn.parameter.is_lazy(weight):
        raise ValueError(f"experts: {name}.weight of one is not initialised: call the experts, which gives it a shape")
    return weight
