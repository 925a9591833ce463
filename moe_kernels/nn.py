"""`MoE`: a layer of experts with its router, as an `nn.Module`, and `quantize_once` for its training in fp8."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_kernels import checks, expert_modules
from moe_kernels.experts import moe_mlp
from moe_kernels.glu import CLAMPED, GLUSpec
from moe_kernels.quantize import quantize, quantize_weight
from moe_kernels.routing import topk_softmax
from moe_kernels.runtime.attributes import replaced
from moe_kernels.runtime.torch_internals import has_no_values, reshaped
from moe_kernels.scaled import FP8_COMPUTE, QuantizedWeight, ScaledTensor

_QUANTIZED = ("w_gate_up", "w_gate_up_scales", "w_down", "w_down_scales")


class _Kept(NamedTuple):
    """What `quantize_once` keeps of a layer. No copy of a layer has it, because it would not see the context's end."""

    compute: str
    weights: tuple[QuantizedWeight, QuantizedWeight]
    versions: list[tuple[int, int]]

    def __deepcopy__(self, memo: Any) -> None:  # parametrised modules are copied without `__getstate__`
        return None


class MoE(nn.Module):
    """A router and its experts: `topk_softmax` of the router's logits chooses the experts, `moe_mlp` computes them.

    Attributes:
        router: `[E, H]`; the logits are `hidden @ router^T`.
        w_gate_up: `[E, 2I, H]`, gate first; `[E, I, H]` if not `gated`.
        w_down: `[E, H, I]`.
        compute (str | None): as for `moe_mlp`; may be changed between calls, and is ignored after `quantize`.
        fp8_wgrad (bool): the same.
        fast_accumulation (bool): as for `moe_mlp`; may be changed between calls, and is ignored except in
            "fp8_rowwise".

    After `quantize`, `w_gate_up` and `w_down` are buffers in fp8, with their scales in the buffers `w_gate_up_scales`
    and `w_down_scales`, and there are no gradients.
    """

    w_gate_up: Tensor
    w_down: Tensor
    w_gate_up_scales: Tensor
    w_down_scales: Tensor
    _kept: _Kept | None = None  # within `quantize_once`

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        renormalize: bool,
        activation: str = "silu",
        gated: bool = True,
        alpha: float = 1.702,
        limit: float = 7.0,
        compute: str | None = None,
        fp8_wgrad: bool = True,
        fast_accumulation: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """Create a layer with random weights.

        Args:
            hidden_size, intermediate_size, num_experts: H, I and E.
            top_k: experts per token, 1 to E.
            renormalize: as for `topk_softmax`.
            activation, gated, alpha, limit: as for `swiglu_ffn`.
            compute, fp8_wgrad, fast_accumulation: as for `moe_mlp`.
            device, dtype: of the parameters, by default PyTorch's: bfloat16, float16 or float32, without `compute` also
                float64, which only a CPU computes.

        Raises:
            TypeError, ValueError: a size or `top_k` is not an int or out of range; an unknown activation or `compute`;
                `alpha` or `limit` is not a number, or out of range for a clamped activation; another option is not a
                bool; an unsupported dtype.
        """
        super().__init__()
        checks.check_int("hidden_size", hidden_size, 1)
        checks.check_int("intermediate_size", intermediate_size, 1)
        checks.check_int("num_experts", num_experts, 1)
        checks.check_int("top_k", top_k, 1, num_experts)
        checks.check_spec(GLUSpec(activation, gated, False, alpha, limit))
        checks.check_compute("compute", compute, optional=True)
        checks.check_bools(renormalize=renormalize, fp8_wgrad=fp8_wgrad, fast_accumulation=fast_accumulation)
        parameter_dtype = torch.get_default_dtype() if dtype is None else dtype
        checks.check_dtype("dtype", parameter_dtype, checks.DTYPES if compute is None else checks.KERNEL_DTYPES)
        self.top_k, self.activation, self.gated, self.renormalize = top_k, activation, gated, renormalize
        self.alpha, self.limit = alpha, limit
        self.compute, self.fp8_wgrad, self.fast_accumulation = compute, fp8_wgrad, fast_accumulation
        self.format: str | None = None  # set by `quantize`

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
        renormalize: bool,
        activation: str | None = None,
        alpha: float = 1.702,
        limit: float = 7.0,
        compute: str | None = None,
        fp8_wgrad: bool = True,
        fast_accumulation: bool = False,
    ) -> MoE:
        """Create a layer from experts that are modules, with copies of their weights.

        Each of the copies `w_gate_up` and `w_down` is trainable if a weight that it was made from is, and the router's
        unless it is a parameter that is not.

        Args:
            experts: E modules with the same `nn.Linear`s, without biases. Gate, up and down, in this order: `w1`, `w3`
                and `w2`, or `gate_proj`, `up_proj` and `down_proj`, or `gate_up_proj` (gate first) and `down_proj`.
                Without a gate: `up_proj` and `down_proj`, or `fc1` and `fc2`, or
                `nn.Sequential(Linear, activation, Linear)`.
            router: a tensor `[E, H]`, or an `nn.Linear` without a bias, no subclass, which is called with random hidden
                states to check that it computes `hidden @ weight.T`; None for random values.
            top_k, renormalize, alpha, limit, compute, fp8_wgrad, fast_accumulation: as for the class.
            activation: as for `swiglu_ffn`. By default each expert is called with random hidden states and weights, in
                float64, to find the activation and to check that all experts compute the same and nothing else. If an
                activation is given, no expert is called.

        Raises:
            TypeError: an expert is not a module, or the router neither a tensor nor an `nn.Linear`; the weights' dtypes
                differ or are unsupported.
            ValueError: there are no experts, their layout is not one of these, there are biases, dropout is active
                (p above 0, in training mode), the activation could not be found or differs between experts, the router
                computes something else, as with a hook, or the weights' shapes or devices differ.
        """
        modules = expert_modules.listed(experts)
        stacked = expert_modules.stack(modules)
        if activation is None:
            activation = expert_modules.activation_of(modules, stacked)
        E, H, I = stacked.w_down.shape  # noqa: E741
        options: dict[str, Any] = {"activation": activation, "gated": stacked.layout.gated, "renormalize": renormalize}
        options |= {"alpha": alpha, "limit": limit, "compute": compute, "fp8_wgrad": fp8_wgrad}
        options |= {"fast_accumulation": fast_accumulation, "dtype": stacked.w_down.dtype}
        layer = cls(H, I, E, top_k, **options, device="meta")
        layer.w_gate_up, layer.w_down = stacked.w_gate_up, stacked.w_down
        if router is None:
            layer.router = nn.Parameter(stacked.w_down.new_empty(E, H))
            _draw(layer.router)
        else:
            layer.router = expert_modules.router_weight(router, stacked.w_down)
        return layer

    def reset_parameters(self) -> None:
        """Draw each weight uniformly from `-b..b` with b = 1 / sqrt(number of its inputs), as `nn.Linear` does.

        Parameters of a subclass, of modules in the layer and of parametrisations stay as they are.

        Raises:
            RuntimeError: the layer is quantised.
        """
        if self.format is not None:
            raise RuntimeError(f"the weights of this layer are quantised, as {self.format!r}: draw them before that")
        for weight in (self.router, self.w_gate_up, self.w_down):
            _draw(weight)

    @torch.no_grad()
    def quantize(self, format: str) -> MoE:
        """Convert the experts' weights to fp8, in place; the router stays as it is.

        The weights and their scales become buffers of the `state_dict`, which only a layer quantised in the same format
        can load. Loaders that copy into its tensors by themselves, such as torch.distributed.checkpoint, do not check
        this. `.to(dtype)` does not change their dtypes. Quantise a layer before `fully_shard`, not while its
        weights are gathered: FSDP2 puts its own parameters back.

        Args:
            format: "fp8_block", one scale per block of 128 x 128 weights, or "fp8_rowwise", one per row.

        Returns:
            The layer itself.

        Raises:
            ValueError: unknown format.
            TypeError: weights in float64, which layers in fp8 do not support, or sharded.
            RuntimeError: the layer is already quantised, a weight is parametrised or pruned, or the GPU has a compute
                capability below 8.9.
            ImportError: as for `grouped_gemm`.
        """
        checks.check_compute("format", format)
        if self.format is not None:
            raise RuntimeError(f"this layer was quantised before, as {self.format!r}; quantise the original weights")
        for name in ("w_gate_up", "w_down"):
            weight = getattr(self, name)
            if _is_sharded(weight):
                raise TypeError(
                    f"{name}: expected a plain parameter, got a part of one, a {type(weight).__name__}: "
                    "quantise the layer before it is sharded, as by fully_shard"
                )
            if name not in self._parameters:
                raise RuntimeError(
                    f"{name}: expected a parameter of the layer, and this one is computed from others: merge them "
                    "first, as torch.nn.utils.parametrize.remove_parametrizations or torch.nn.utils.prune.remove do"
                )
            checks.check_dtype(name, weight.dtype)
        # Both before any is replaced, so that no layer is left with one of them in fp8.
        made = {name: quantize(getattr(self, name), FP8_COMPUTE[format]) for name in ("w_gate_up", "w_down")}
        for name, (data, scales, _) in made.items():
            delattr(self, name)
            self.register_buffer(name, data)
            self.register_buffer(f"{name}_scales", scales)
        self.format = format
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoE:
        """Apply `fn` as in `nn.Module`, for `.to()` and similar, but keep the dtypes of fp8 weights and scales."""
        self._kept = None  # made from the tensors before
        apply: Any = super()._apply
        if self.format is None:
            apply(fn, recurse)
            return self
        before = {id(getattr(self, name)) for name in _QUANTIZED}

        def kept(tensor: Tensor) -> Tensor:
            made = fn(tensor)
            return tensor.to(made.device) if id(tensor) in before and made.dtype != tensor.dtype else made

        apply(kept, recurse)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load as `nn.Module` does, but refuse fp8 weights for a layer that is not quantised, the reverse, and fp8
        weights without their scales: the values would be wrong, and `strict=False` would hide that.
        """
        *_, error_msgs = rest
        for hook in self._load_state_dict_pre_hooks.values():  # which may convert the weights
            hook(state_dict, prefix, *rest)
        for name in ("w_gate_up", "w_down"):
            stored, scales = (state_dict.get(f"{prefix}{name}{part}") for part in ("", "_scales"))
            # Bytes of fp8, or codes of another format, would be converted as numbers.
            if isinstance(stored, Tensor) and not (
                stored.dtype == torch.float8_e4m3fn if self.format else stored.dtype.itemsize > 1
            ):
                if self.format and stored.dtype.itemsize > 1:
                    way = "load the weights first, and then quantise"
                elif stored.dtype == torch.float8_e4m3fn:
                    way = "call quantize() before loading"
                elif stored.dtype in (torch.uint8, torch.int8):
                    way = "if these are the bytes of e4m3, pass .view(torch.float8_e4m3fn) to a quantised layer"
                else:
                    way = "multiply the weights by their scales, and load the products into a layer not quantised"
                has = f"is quantised as {self.format!r}" if self.format else "is not quantised"
                error_msgs.append(f"{prefix}{name}: the layer {has}, and the state dict has {stored.dtype}: {way}")
                return
            if self.format is None and isinstance(stored, Tensor) and scales is not None:
                way = "multiply the weights by their scales, and load the products"
                error_msgs.append(f"{prefix}{name}: the layer is not quantised, and the state dict has scales: {way}")
                return
            if self.format is not None and (stored is None) != (scales is None):
                lacking = f"{name}_scales" if scales is None else name
                error_msgs.append(
                    f"{prefix}{name}: expected data in fp8 and scales, got a state dict without {lacking}"
                )
                return
        load: Any = super()._load_from_state_dict
        with replaced(self, _load_state_dict_pre_hooks={}):
            load(state_dict, prefix, *rest)

    def __getstate__(self) -> dict[str, Any]:
        """Return what to copy and pickle."""
        state: Any = super().__getstate__
        return {**state(), "_kept": None}

    def _weights(self) -> Sequence[Tensor | ScaledTensor | QuantizedWeight]:
        """Return both weights as `moe_mlp` takes them."""
        weights, kept = (self.w_gate_up, self.w_down), self._kept
        if self.format is not None:
            scales = self.w_gate_up_scales, self.w_down_scales
            return [ScaledTensor(*both, FP8_COMPUTE[self.format]) for both in zip(weights, scales, strict=True)]
        # An exported program would have the kept weights as constants.
        if kept is None or kept.compute != self.compute or torch.compiler.is_exporting():
            return weights
        if any(one.weight is not w for one, w in zip(kept.weights, weights, strict=True)):
            return weights
        # Traced code does not see versions.
        if torch.compiler.is_compiling() or kept.versions == _versions(weights):
            return kept.weights
        # FSDP2 may gather weights again for a call that activation checkpointing repeats. What this call saves has to
        # have the same shapes and dtypes as before.
        return [quantize_weight(w, kept.compute) for w in weights]

    def _accumulates_fast(self) -> bool:
        return self.fast_accumulation if (self.format or self.compute) == "fp8_rowwise" else False

    def forward(self, hidden: Tensor) -> Tensor:  # [..., H] -> [..., H]
        """Route each hidden state to its top_k experts, and return the weighted sum of their results.

        Raises:
            TypeError, ValueError, RuntimeError, ImportError: as for `moe_mlp`; also TypeError if `hidden` and the
                router have different dtypes outside of autocast, and ValueError if they are on different devices.
        """
        router, weights = self.router, self._weights()  # once, as a parametrisation may compute them
        checks.check_layer(hidden, router, weights[1])
        tokens = hidden.reshape(-1, hidden.size(-1))
        topk_ids, topk_weights = topk_softmax(F.linear(tokens, router), self.top_k, renormalize=self.renormalize)
        out = moe_mlp(
            tokens,
            topk_ids,
            topk_weights,
            *weights,
            activation=self.activation,
            gated=self.gated,
            alpha=self.alpha,
            limit=self.limit,
            compute=self.compute if self.format is None else None,
            fp8_wgrad=self.fp8_wgrad,
            fast_accumulation=self._accumulates_fast(),
            validate=False,  # topk_softmax chooses no other ids
        )
        return out if hidden.dim() == 2 else reshaped(out, hidden.shape)

    def extra_repr(self) -> str:
        """Return the sizes and options, for the module's repr."""
        sizes, shape = "", self.w_down.shape
        if len(shape) == 3:  # FSDP1 leaves flat parts of weights
            sizes = f"hidden_size={shape[1]}, intermediate_size={shape[2]}, num_experts={shape[0]}, "
        return (
            f"{sizes}top_k={self.top_k}, renormalize={self.renormalize}, activation={self.activation}, "
            f"gated={self.gated}"
            f"{f', alpha={self.alpha}, limit={self.limit}' if self.activation in CLAMPED else ''}"
            f"{'' if self.compute is None or self.format else f', compute={self.compute}, fp8_wgrad={self.fp8_wgrad}'}"
            f"{'' if self.format is None else f', format={self.format}'}"
            f"{', fast_accumulation=True' if self._accumulates_fast() else ''}"
        )


@contextmanager
def quantize_once(module: nn.Module) -> Iterator[None]:
    """Quantise the weights of layers with `compute` here, and not in their calls within this context.

    For the microbatches of a training step, whose results and gradients have the same bits as without it:

        for microbatches in batches:
            with moe_kernels.quantize_once(model):
                for microbatch in microbatches:
                    loss(model, microbatch).backward()
            optimizer.step()

    The fp8 weights take as much memory as the weights in bfloat16, until the context ends. End it after the backward
    pass if activations are recomputed in it. Call the optimizer's step after it: weights that are replaced or changed
    in place within the context are quantised in each call from then on, but PyTorch's version counters do not show all
    changes, as those by fused optimizers, and compiled code does not look at them.

    For FSDP2, call `unshard()` of each FSDP module first. Weights that are gathered again are others: to keep them
    between microbatches, pass `reshard_after_forward=False` to `fully_shard`, and call
    `set_reshard_after_backward(False)` for all microbatches but the last.

    Args:
        module: a model; its `MoE` layers may be anywhere in it. Nothing happens to others, and to layers for which
            another such context has not ended.

    Raises:
        TypeError: not a module, or weights are sharded.
        ValueError, RuntimeError, ImportError: as for `quantize_weight`.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected an nn.Module, got {type(module).__name__}")
    kept: dict[MoE, _Kept] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, MoE) and layer.format is None and layer.compute is not None and layer._kept is None:
            weights, called = (layer.w_gate_up, layer.w_down), name or "MoE"
            if any(map(_is_sharded, weights)):
                raise TypeError(
                    f"module: the weights of the layer {called!r} are sharded: call unshard() of each FSDP2 "
                    "module first, or enter this context within FSDP1's summon_full_params"
                )
            checks.check_compute(f"{called}.compute", layer.compute)
            for field, weight in zip(("w_gate_up", "w_down"), weights, strict=True):
                checks.check_quantize_weight(weight, layer.compute, f"{called}.{field}")
            with torch.inference_mode(False):  # whose results no backward pass could save
                both = quantize_weight(weights[0], layer.compute), quantize_weight(weights[1], layer.compute)
            kept[layer] = _Kept(layer.compute, both, _versions(weights))
    for layer, one in kept.items():
        layer._kept = one
    try:
        yield
    finally:
        for layer in kept:
            layer._kept = None


def _is_sharded(weight: Tensor) -> bool:
    """Whether FSDP has parts of `weight [E, .., ..]`: it is a DTensor, or FSDP1 flattened it or freed its memory."""
    freed = not has_no_values(weight) and weight.numel() > 0 and weight.untyped_storage().nbytes() == 0
    return hasattr(weight, "placements") or weight.dim() != 3 or freed


def _versions(weights: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return what changes if weights do, in most ways."""
    return [(0 if has_no_values(w) else w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights]


def _draw(weight: Tensor) -> None:
    bound = 1 / math.sqrt(weight.size(-1))
    nn.init.uniform_(weight, -bound, bound)
