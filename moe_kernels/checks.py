"""Checks of the public functions' arguments, and the interpretation of malformed offsets.

The `check_*` functions run on every eager call that is not a repeat of an earlier one. They read only metadata, so
they also accept meta and fake tensors. They raise TypeError for a wrong type or dtype, ValueError for a wrong rank,
shape, device, length or option, and RuntimeError where autograd or forward mode would record a function without
derivatives. `reference` says that the caller is plain PyTorch, which takes float64 on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_kernels import requirements
from moe_kernels.glu import ACTIVATIONS, CLAMPED, GLUSpec
from moe_kernels.routing_maps import Routing
from moe_kernels.runtime import torch_internals
from moe_kernels.runtime.torch_internals import PLAIN
from moe_kernels.scaled import FORMATS, FP8_COMPUTE, FP8_DTYPES, QuantizedWeight, ScaledTensor, scales_shape

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DTYPES = (*KERNEL_DTYPES, torch.float64)
E4M3 = (torch.float8_e4m3fn,)
_INDEX_DTYPES = (torch.int32, torch.int64)
_BOOLS = (bool, torch.SymBool)
_INTS = (int, torch.SymInt)
_QUANTIZED = (torch.qint8, torch.quint8, torch.qint32)  # of torch.quantize_per_tensor
_STRIDED = torch.strided
_VALIDATION_READS = (
    "validate=True (or MOE_KERNELS_VALIDATE=1) reads values on the host, which fullgraph=True, torch.export and "
    "torch.vmap rule out: pass validate=False there, or unset MOE_KERNELS_VALIDATE"
)
DROPS = "; to drop slots on purpose, pass validate=False"
_VALIDATE = requirements.switched_on("MOE_KERNELS_VALIDATE")  # read once, because every call uses it


def check_grouped_gemm(
    A_packed: Tensor,  # [M, K]
    B: Tensor,  # [K, N] or [G, K, N]
    group_offsets: Tensor,  # [G + 1]
    out_dtype: torch.dtype | None,
    *,
    reference: bool = False,
) -> torch.dtype:
    """Check the arguments of a grouped GEMM and return the dtype of its result."""
    _check_floats((("A_packed", A_packed), ("B", B)), reference)
    _check_grouped_gemm_shapes(A_packed, B, group_offsets)
    return _result_dtype(A_packed, B, out_dtype, reference)


def _check_grouped_gemm_shapes(A_packed: Tensor, B: Tensor, group_offsets: Tensor) -> None:
    check_index_vector("group_offsets", group_offsets, 1, "A_packed", A_packed)
    _check_rank("A_packed", A_packed, "[M, K]", "; uniform_grouped_gemm takes [G, M, K]" if A_packed.dim() == 3 else "")
    _check_rank("B", B, "[K, N] or [G, K, N]")
    _check_contraction("B", B, "A_packed", A_packed)
    if B.dim() == 3:
        _check_offsets_length("G", "B", B, group_offsets)


def check_scaled_grouped_gemm(
    A_packed: ScaledTensor | Tensor,  # [M, K]; a Tensor is refused
    B: ScaledTensor | Tensor,  # [K, N] or [G, K, N]
    group_offsets: Tensor,  # [G + 1]
    bias: Tensor | None,  # [G, N]
    out_dtype: torch.dtype | None,
    fast_accumulation: bool = False,
) -> torch.dtype:
    """Check the arguments of a grouped GEMM of fp8 operands with scales; return the dtype of its result."""
    A_packed, B = scaled_both("A_packed", A_packed, "B", B)
    for name, value in (("A_packed", A_packed), ("B", B)):
        _check_scaled(f"{name}.data", f"{name}.scales", value)
    data, weight = A_packed.data, B.data
    _check_same_device("B", weight, "A_packed", data)
    _check_grouped_gemm_shapes(data, weight, group_offsets)
    rowwise = _check_formats("A_packed, B", (A_packed.format, B.format), "1x128")
    _check_accumulation(fast_accumulation, rowwise)
    left, right = ("[M, 1]", "1, N") if rowwise else ("[M, cdiv(K, 128)]", "cdiv(K, 128), cdiv(N, 128)")
    _check_shape("A_packed.scales", A_packed.scales, left, scales_shape(data.shape, A_packed.format))
    *groups, K, N = weight.shape
    *_, columns, blocks = scales_shape((*groups, N, K), B.format)
    by_rows = B.scales.shape == (*groups, K, 1)
    hint = "; for [.., K, N] pass quantize(B.mT, 'rowwise').mT" if rowwise and by_rows else ""
    _check_shape("B.scales", B.scales, f"[{'G, ' if groups else ''}{right}]", (*groups, blocks, columns), hint)
    _check_shape("bias", bias, "[G, N]", (group_offsets.shape[0] - 1, N))
    return _check_scaled_result((data, A_packed.scales, weight, B.scales), bias, out_dtype, "out_dtype")


def _check_formats(names: str, formats: tuple[str, str], left: str) -> bool:
    """Check that two operands are both "rowwise", or else `left` and "128x128"; return whether they are "rowwise"."""
    if formats not in (("rowwise", "rowwise"), (left, "128x128")):
        raise ValueError(
            f"{names}: expected the formats 'rowwise' and 'rowwise', or '{left}' and '128x128', "
            f"got {formats[0]!r} and {formats[1]!r}"
        )
    return formats[0] == "rowwise"


def _check_accumulation(fast_accumulation: bool, rowwise: bool) -> None:
    if rowwise:
        check_bools(fast_accumulation=fast_accumulation)
    else:
        blocks = "'1x128' and '128x128', whose blocks are added in float32; it is for"
        check_no_fast_accumulation(fast_accumulation, f"{blocks} 'rowwise' operands and compute='fp8_rowwise'")


def check_no_fast_accumulation(fast_accumulation: bool, products: str) -> None:
    """Check that `fast_accumulation` is False for `products` that do not have it."""
    check_bools(fast_accumulation=fast_accumulation)
    if fast_accumulation:
        raise ValueError(f"fast_accumulation: expected False for {products}, got True")


def _check_scaled_result(
    operands: Sequence[Tensor], bias: Tensor | None, out_dtype: torch.dtype | None, name: str
) -> torch.dtype:
    """Check the bias, and that neither it nor an operand is differentiated; return the result's dtype."""
    if bias is not None:
        _check_tensor("bias", bias)
        check_dtype("bias", bias.dtype)
        _check_same_device("bias", bias, "the operands", operands[0])
    if out_dtype is not None:
        check_dtype(name, out_dtype)
    check_not_differentiated(
        "products of fp8 operands with scales have",
        "an operand, its scales or the bias",
        (*operands, bias),
        "multiply what dequantize returns",
    )
    return out_dtype or torch.bfloat16


def check_dtype(
    name: str, dtype: torch.dtype, supported: Sequence[torch.dtype] = KERNEL_DTYPES, hint: str = ""
) -> None:
    """Check that `dtype` is one of those supported, by default by the kernels for operands that are not in fp8."""
    if dtype not in supported:
        *others, last = (str(one).removeprefix("torch.") for one in supported)
        expected = f"{', '.join(others)} or {last}" if others else last
        raise TypeError(f"{name}: expected {expected}, got {dtype!r}{hint}")


def scaled_both(
    name: str, value: ScaledTensor | Tensor, other_name: str, other: ScaledTensor | Tensor
) -> tuple[ScaledTensor, ScaledTensor]:
    """Check that two operands are ScaledTensors; return them."""
    made: list[ScaledTensor] = []
    for one, operand, beside in ((name, value, other_name), (other_name, other, name)):
        if not isinstance(operand, ScaledTensor):
            check_not_torchao(one, operand)
            hint = _hint(operand) or "; quantize both or none"
            raise TypeError(f"{one}: expected a ScaledTensor, as for {beside}, got {type(operand).__name__}{hint}")
        made.append(operand)
    return made[0], made[1]


def _check_scaled(
    name: str, scales_name: str, value: ScaledTensor, supported: Sequence[torch.dtype] = FP8_DTYPES
) -> None:
    """Check the dtypes of a ScaledTensor, and that its parts are on one device."""
    _check_tensor(name, value.data)
    _check_tensor(scales_name, value.scales)
    check_dtype(name, value.data.dtype, supported)
    check_dtype(scales_name, value.scales.dtype, (torch.float32,))
    _check_same_device(scales_name, value.scales, name, value.data)


def check_grouped_gemm_wgrad(
    A_packed: Tensor,  # [M, K]
    d_out: Tensor,  # [M, N]
    group_offsets: Tensor,  # [G + 1]
    out_dtype: torch.dtype | None,
    *,
    reference: bool = False,
) -> torch.dtype:
    """Check the arguments of `grouped_gemm_wgrad` and return the dtype of its result, as `check_grouped_gemm` does."""
    _check_floats((("A_packed", A_packed), ("d_out", d_out)), reference)
    _check_rank("A_packed", A_packed, "[M, K]")
    _check_rank("d_out", d_out, "[M, N]")
    check_index_vector("group_offsets", group_offsets, 1, "A_packed", A_packed)
    if d_out.shape[0] != A_packed.shape[0]:
        raise ValueError(
            f"d_out: expected M = {A_packed.shape[0]} as in A_packed {list(A_packed.shape)}, "
            f"got shape {list(d_out.shape)}"
        )
    return _result_dtype(A_packed, d_out, out_dtype, reference)


def check_route(topk_ids: Tensor, topk_weights: Tensor, num_experts: int) -> None:
    """Check the arguments of `route`: ids `[T, top_k]` int32 or int64, topk_weights `[T, top_k]` floating-point."""
    _check_indices("topk_ids", topk_ids)
    _check_floats((("topk_weights", topk_weights),), False)
    if topk_ids.dim() != 2 or topk_ids.shape[1] < 1:
        raise ValueError(
            f"topk_ids: expected shape [T, top_k] with top_k of at least 1, got {list(topk_ids.shape)}"
            f"{_flattened('topk_ids', topk_ids)}"
        )
    if topk_weights.shape != topk_ids.shape:
        raise ValueError(
            f"topk_weights: expected shape {list(topk_ids.shape)} as topk_ids, got {list(topk_weights.shape)}"
        )
    _check_same_device("topk_weights", topk_weights, "topk_ids", topk_ids)
    check_int("num_experts", num_experts, 0)


def check_gating(
    logits: Tensor,  # [T, E]
    top_k: int,
    renormalize: bool,
    bias: Tensor | None = None,  # [E]
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
) -> None:
    """Check the arguments of a gating function, which are those of `topk_sigmoid`."""
    _check_floats((("logits", logits),), True, (("bias", bias),))
    _check_rank("logits", logits, "[T, E]", _flattened("logits", logits))
    check_bools(renormalize=renormalize)
    check_number("scale", scale)
    E = logits.shape[1]
    check_int("num_groups", num_groups)
    check_int("top_groups", top_groups)
    if not 1 <= top_groups <= num_groups or E % num_groups:
        raise ValueError(
            f"num_groups, top_groups: expected num_groups to divide E = {E}, and top_groups from 1 to num_groups, "
            f"got {num_groups}, {top_groups}"
        )
    most = top_groups * (E // num_groups)

    def hint() -> str:  # torch.compile cannot format symbolic numbers, as on every call
        return f"; {top_groups} of {num_groups} groups have {most} of {E} experts" if num_groups > 1 else ""

    check_int("top_k", top_k, 1, most, hint)
    if bias is not None:
        _check_shape("bias", bias, "[E]", (E,))
        _check_same_device("bias", bias, "logits", logits)


def check_layer(hidden: Tensor, router: Tensor, w_down: Tensor | ScaledTensor | QuantizedWeight) -> None:
    """Check that the router is `[E, H]` for `w_down [E, H, I]`, and that `hidden` is `[..., H]` and has the router's
    dtype unless autocast is enabled.
    """
    _check_tensor("router", router)
    E, shape = (w_down.weight if isinstance(w_down, QuantizedWeight) else w_down).shape[0], router.shape
    if len(shape) != 2 or shape[0] != E:
        raise ValueError(f"router: expected shape [E, H] with E = {E} as the experts, got {list(shape)}")
    _check_tensor("hidden", hidden)
    _check_same_device("hidden", hidden, "the layer", router)
    H = shape[1]
    if hidden.dim() == 0 or hidden.shape[-1] != H:
        raise ValueError(f"hidden: expected shape [..., H] with H = {H}, got {list(hidden.shape)}")
    both = hidden, router
    if hidden.dtype != router.dtype and not all(map(torch_internals.autocasts, both)):
        check_dtype("router", router.dtype, DTYPES)
        hint = ", or use autocast" if all(x.dtype in torch_internals.CAST_DTYPES for x in both) else ""
        raise TypeError(
            f"hidden: expected {router.dtype} as the router, got {hidden.dtype}; convert it with .to(){hint}"
        )


def check_moved(name: str, value: Tensor, extent: str, routing: Routing) -> None:
    """Check that `value` is `[extent, H]` for the T tokens or the R slots of `routing`."""
    if not isinstance(routing, Routing):
        raise TypeError(f"routing: expected the Routing that route returns, got {type(routing).__name__}")
    _check_floats(((name, value),), False)
    _check_floats((("routing.topk_weights", routing.topk_weights),), False)
    for field, indices in (("slot_to_row", routing.slot_to_row), ("group_offsets", routing.group_offsets)):
        _check_tensor(f"routing.{field}", indices)
        if indices.dtype != torch.int32:
            raise TypeError(f"routing.{field}: expected int32, got {indices.dtype}")
    shape, R = routing.topk_weights.shape, routing.topk_weights.numel()
    if len(shape) != 2 or shape[1] < 1 or routing.slot_to_row.shape != (R,):
        raise ValueError(
            f"routing: expected topk_weights [T, top_k] and slot_to_row [T * top_k], got shapes "
            f"{list(shape)} and {list(routing.slot_to_row.shape)}"
        )
    expected = shape[0] if extent == "T" else R
    if value.dim() != 2 or value.shape[0] != expected:
        raise ValueError(f"{name}: expected shape [{extent}, H] with {extent} = {expected}, got {list(value.shape)}")
    _check_same_device(name, value, "routing", routing.slot_to_row)
    check_index_vector("routing.group_offsets", routing.group_offsets, 1, name, value)
    _check_same_device("routing.topk_weights", routing.topk_weights, name, value)


class Experts(NamedTuple):
    """The weights of a layer and their layout; `w_down` and `down_bias` are None for `swiglu_ffn`.

    W is 2I if `w_gate_up` holds gate and up, otherwise I.
    """

    w_gate_up: Any  # Tensor, ScaledTensor or QuantizedWeight [E, W, H], or [E, H, W] if transposed
    w_down: Any  # as w_gate_up, [E, H, I], or [E, I, H] if transposed
    w_up: Tensor | None  # [E, I, H], or [E, H, I] if transposed
    gate_up_bias: Tensor | None  # [E, W]
    up_bias: Tensor | None  # [E, I]
    down_bias: Tensor | None  # [E, H]
    spec: GLUSpec
    transposed: bool


def check_swiglu_ffn(
    rows: Tensor,  # [M, H]
    group_offsets: Tensor,  # [E + 1]
    experts: Experts,
    *,
    reference: bool = False,
) -> None:
    """Check the arguments of `swiglu_ffn`."""
    _check_first_floats("rows", rows, experts, reference)
    _check_first_shapes("rows", "M", rows, experts)
    check_index_vector("group_offsets", group_offsets, 1, "rows", rows)
    _check_offsets_length("E", "w_gate_up", experts.w_gate_up, group_offsets)


def check_moe_mlp(
    hidden: Tensor,  # [T, H]
    topk_ids: Tensor,  # [T, top_k]
    topk_weights: Tensor,  # [T, top_k]
    experts: Experts,
    *,
    reference: bool = False,
) -> None:
    """Check the arguments of `moe_mlp`, as `check_route` and `check_swiglu_ffn` do."""
    _check_first_floats("hidden", hidden, experts, reference)
    _check_first_shapes("hidden", "T", hidden, experts)
    _check_floats((("hidden", hidden), ("w_down", experts.w_down)), reference, (("down_bias", experts.down_bias),))
    _check_routed(hidden, topk_ids, topk_weights, experts)


def check_quantized_moe_mlp(
    hidden: Tensor,  # [T, H]
    topk_ids: Tensor,  # [T, top_k]
    topk_weights: Tensor,  # [T, top_k]
    experts: Experts,  # ScaledTensors, w_up, up_bias and transposed are refused
    compute: str,
    fast_accumulation: bool,
    fp8_wgrad: bool,
) -> None:
    """Check the arguments of `moe_mlp` with `compute`."""
    check_compute("compute", compute, optional=True)
    check_bools(fp8_wgrad=fp8_wgrad)
    _check_accumulation(fast_accumulation, FP8_COMPUTE[compute] == "rowwise")
    quantized = {"w_gate_up": experts.w_gate_up, "w_down": experts.w_down}
    for name, value in quantized.items():
        if isinstance(value, ScaledTensor):
            raise ValueError(
                f"compute: expected None for weights in fp8, got {compute!r}; {name} is a ScaledTensor, and compute "
                "quantises bfloat16, float16 or float32 weights"
            )
    if any(isinstance(value, QuantizedWeight) for value in quantized.values()):
        for name, value in quantized.items():
            if not isinstance(value, QuantizedWeight):
                raise TypeError(
                    f"{name}: expected a QuantizedWeight, as the other weight, got {type(value).__name__}; call "
                    "quantize_weight for both or none"
                )
        experts = experts._replace(w_gate_up=experts.w_gate_up.weight, w_down=experts.w_down.weight)
    _check_one_layout(experts)
    check_moe_mlp(hidden, topk_ids, topk_weights, experts)
    check_dtype("hidden", hidden.dtype)
    for name in ("w_gate_up", "w_down", "gate_up_bias", "down_bias"):
        if (tensor := getattr(experts, name)) is not None:
            check_dtype(name, tensor.dtype)
    for name, value in quantized.items():
        if isinstance(value, QuantizedWeight):
            _check_quantized_weight(name, value, compute)


def _check_quantized_weight(name: str, value: QuantizedWeight, compute: str) -> None:
    """Check that the fp8 parts of a weight have the format of `compute` and its shape."""
    for part, scaled, weight in (
        (f"{name}.forward", value.forward, value.weight),
        (f"{name}.backward", value.backward, value.weight.mT),
    ):
        if not isinstance(scaled, ScaledTensor):
            raise TypeError(f"{part}: expected a ScaledTensor, got {type(scaled).__name__}")
        if scaled.format != FP8_COMPUTE[compute]:
            raise ValueError(
                f"{part}: expected the format {FP8_COMPUTE[compute]!r} for compute={compute!r}, got {scaled.format!r}; "
                f"call quantize_weight(weight, {compute!r})"
            )
        _check_scaled(f"{part}.data", f"{part}.scales", scaled, E4M3)
        _check_same_device(f"{part}.data", scaled.data, f"{name}.weight", value.weight)
        _check_shape(f"{part}.data", scaled.data, "that of the weight", weight.shape)
        _check_shape(
            f"{part}.scales", scaled.scales, f"of {scaled.format!r}", scales_shape(weight.shape, scaled.format)
        )


def _check_one_layout(experts: Experts) -> None:
    """Raise ValueError for `transposed` or `w_up`: fp8 products take only weights `[E, 2I, H]` and `[E, H, I]`."""
    check_bools(transposed=experts.transposed)
    if experts.transposed:
        raise ValueError(
            "transposed: expected False for products in fp8, got True; pass weights [E, 2I, H] and [E, H, I], such as "
            "w.mT or quantize(w.mT, ...)"
        )
    if experts.w_up is not None:
        raise ValueError(
            "w_up: expected None for products in fp8, got a value; pass gate and up as one w_gate_up [E, 2I, H], such "
            "as torch.cat((gate, up), 1), or what quantize makes of it"
        )


def check_compute(name: str, value: str | None, optional: bool = False) -> None:
    """Check the name of a way to compute in fp8; `optional` also allows None."""
    if not (optional and value is None) and value not in tuple(FP8_COMPUTE):
        one_of = f"{'None or ' if optional else ''}one of {', '.join(map(repr, FP8_COMPUTE))}"
        raise ValueError(f"{name}: expected {one_of}, got {value!r}")


def check_scaled_moe_mlp(
    hidden: Tensor,  # [T, H]
    topk_ids: Tensor,  # [T, top_k]
    topk_weights: Tensor,  # [T, top_k]
    experts: Experts,  # Tensors as weights, w_up, up_bias and transposed are refused
    fast_accumulation: bool = False,
) -> None:
    """Check the arguments of `moe_mlp` with weights in fp8, both "rowwise" or both "128x128"."""
    _check_one_layout(experts)
    w_gate_up, w_down = scaled_both("w_gate_up", experts.w_gate_up, "w_down", experts.w_down)
    for name, value in (("w_gate_up", w_gate_up), ("w_down", w_down)):
        _check_scaled(f"{name}.data", f"{name}.scales", value, E4M3)
    rowwise = _check_formats("w_gate_up, w_down", (w_gate_up.format, w_down.format), "128x128")
    _check_accumulation(fast_accumulation, rowwise)
    check_spec(experts.spec, experts.w_up is not None, experts.up_bias is not None)
    biases = {"gate_up_bias": experts.gate_up_bias, "down_bias": experts.down_bias}
    floats = {"hidden": hidden, **{name: bias for name, bias in biases.items() if bias is not None}}
    for name, tensor in floats.items():
        _check_tensor(name, tensor)
        check_dtype(name, tensor.dtype)
        _check_same_device(name, tensor, "w_gate_up", w_gate_up.data)
    _check_same_device("w_down", w_down.data, "w_gate_up", w_gate_up.data)
    data = experts._replace(w_gate_up=w_gate_up.data, w_down=w_down.data)
    _check_first_shapes("hidden", "T", hidden, data)
    _check_routed(hidden, topk_ids, topk_weights, data)
    form = "[E, {}, 1]" if rowwise else "[E, cdiv({}, 128), cdiv({}, 128)]"
    tensors = {**floats, "topk_weights": topk_weights}
    first = "2I" if experts.spec.gated else "I"
    for name, weight, letters in (("w_gate_up", w_gate_up, (first, "H")), ("w_down", w_down, ("H", "I"))):
        tensors |= {f"{name}.data": weight.data, f"{name}.scales": weight.scales}
        shape = scales_shape(weight.shape, weight.format)
        _check_shape(f"{name}.scales", weight.scales, form.format(*letters), shape)
    for name, tensor in tensors.items():
        instead = "pass bfloat16 weights"
        if name == "topk_weights":
            instead += " (in an MoE they come from its router: router.requires_grad_(False))"
        check_not_differentiated(f"{name}: moe_mlp with fp8 weights has", "this tensor", (tensor,), instead)


def check_not_differentiated(subject: str, name: str, tensors: Sequence[Tensor | None], instead: str) -> None:
    """Raise RuntimeError if autograd would record a function of these tensors, or one has a forward-mode tangent."""
    if torch_internals.differentiated(*tensors):
        raise RuntimeError(
            f"{subject} no gradients, but {name} requires grad: detach it, call under torch.no_grad(), or {instead}"
        )
    if torch_internals.has_tangent(*tensors):
        raise RuntimeError(f"{subject} no forward-mode derivatives, but {name} has a tangent: {instead}")


def _check_routed(hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: Experts) -> None:
    """Check the routing and the shapes of the second product; those of the first have been checked."""
    w_gate_up, w_down, w_up, _, _, down_bias, spec, transposed = experts
    E, W = w_gate_up.shape[0], w_gate_up.shape[2 if transposed else 1]
    check_route(topk_ids, topk_weights, E)
    T, H = hidden.shape
    if topk_ids.shape[0] != T:
        raise ValueError(f"topk_ids: expected T = {T} as in hidden {[T, H]}, got {list(topk_ids.shape)}")
    _check_same_device("topk_ids", topk_ids, "hidden", hidden)

    def down(I: int) -> tuple[int, int, int]:  # noqa: E741
        return (E, I, H) if transposed else (E, H, I)

    hint = ""
    if spec.gated and w_up is None and w_down.shape == down(W):
        hint = "; if w_gate_up holds the gate alone, pass w_up"
    elif not spec.gated and W % 2 == 0 and w_down.shape == down(W // 2):
        hint = "; if w_gate_up holds gate and up, pass gated=True"
    form = "[E, I, H]" if transposed else "[E, H, I]"
    _check_shape("w_down", w_down, form, down(spec.width(W, w_up is not None)), hint)
    _check_shape("down_bias", down_bias, "[E, H]", (E, H))


def _check_first_floats(name: str, inputs: Tensor, experts: Experts, reference: bool) -> None:
    """Check the options, and the operands of the first product: their dtypes and devices."""
    w_gate_up, _, w_up, gate_up_bias, up_bias, _, spec, transposed = experts
    check_bools(transposed=transposed)
    check_spec(spec, w_up is not None, up_bias is not None)
    optional = ("w_up", w_up), ("gate_up_bias", gate_up_bias), ("up_bias", up_bias)
    _check_floats(((name, inputs), ("w_gate_up", w_gate_up)), reference, optional)


def _check_first_shapes(
    name: str,  # "rows" or "hidden"
    count: str,  # "M" or "T", the name of their number
    inputs: Tensor,  # [count, H]
    experts: Experts,
) -> None:
    w_gate_up, w_down, w_up, gate_up_bias, up_bias, _, spec, transposed = experts
    _check_rank(name, inputs, f"[{count}, H]", _flattened(name, inputs))
    width = "2I" if spec.gated and w_up is None else "I"
    shape = f"[E, H, {width}]" if transposed else f"[E, {width}, H]"
    H = inputs.shape[1]
    if w_gate_up.dim() != 3 or w_gate_up.shape[1 if transposed else 2] != H:
        hint = ""
        if w_gate_up.dim() == 3 and w_gate_up.shape[2 if transposed else 1] == H:
            other = f"[E, {width}, H]" if transposed else f"[E, H, {width}]"
            hint = f"; for {other} pass transposed={not transposed}"
            E, rows, columns = w_gate_up.shape
            swapped = (E, H, 2 * rows) if transposed else (E, 2 * columns, H)
            if width == "2I" and getattr(w_down, "shape", None) == swapped:
                hint = "; w_gate_up and w_down seem swapped"
        raise ValueError(f"w_gate_up: expected shape {shape} with H = {H}, got {list(w_gate_up.shape)}{hint}")
    E, W = w_gate_up.shape[0], w_gate_up.shape[2 if transposed else 1]
    if width == "2I" and W % 2:
        raise ValueError(f"w_gate_up: expected shape {shape} with an even 2I, got {list(w_gate_up.shape)}")
    if w_up is not None:
        swapped = w_up.shape != w_gate_up.shape == getattr(w_down, "shape", None) and w_up.shape == w_gate_up.mT.shape
        hint = "; w_up and w_down seem swapped: Mixtral's w1, w3, w2 are gate, up, down" if swapped else ""
        _check_shape("w_up", w_up, shape, w_gate_up.shape, hint)
    _check_shape("gate_up_bias", gate_up_bias, f"[E, {width}]", (E, W))
    _check_shape("up_bias", up_bias, "[E, I]", (E, W))


def check_spec(spec: GLUSpec, two_weights: bool = False, up_bias: bool = False) -> None:
    """Check the activation and the options that depend on it."""
    check_bools(gated=spec.gated, interleaved=spec.interleaved)
    check_number("alpha", spec.alpha)
    check_number("limit", spec.limit)
    if spec.activation not in ACTIVATIONS:
        hint = "; SwiGLU is silu with gated=True" if spec.activation in ("swiglu", "swish") else ""
        raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {spec.activation!r}{hint}")
    if spec.activation in CLAMPED and not spec.gated:
        raise ValueError(f"gated: expected True for {spec.activation}, got False")
    if spec.activation in CLAMPED and not spec.limit >= 0:
        raise ValueError(f"limit: expected at least 0, got {spec.limit}")
    if spec.activation == "clamped_swiglu" and not -math.inf < spec.alpha < math.inf:
        raise ValueError(f"alpha: expected a finite number, got {spec.alpha}")
    if two_weights and not spec.gated:
        raise ValueError("w_up: expected None for experts without a gate, got a value")
    if spec.interleaved and (two_weights or not spec.gated):
        raise ValueError("interleaved: expected False unless w_gate_up holds gate and up, got True")
    if up_bias and not two_weights:
        raise ValueError("up_bias: expected None without w_up, got a value")


def check_quantize(x: Tensor, format: str, dtype: torch.dtype, power_of_two: bool, *, reference: bool = False) -> None:
    """Check the arguments of `quantize`."""
    check_bools(power_of_two=power_of_two)
    _check_floats((("x", x),), reference)
    _check_rank("x", x, "[R, K] or [G, R, K]")
    _check_format("format", format)
    check_dtype("dtype", dtype, FP8_DTYPES)


def check_quantize_weight(weight: Tensor, compute: str, name: str = "weight") -> None:  # [E, N, K]
    """Check the arguments of `quantize_weight`."""
    check_compute("compute", compute)
    _check_tensor(name, weight)
    check_dtype(name, weight.dtype)
    if weight.dim() != 3:
        raise ValueError(f"{name}: expected shape [E, N, K], got {list(weight.shape)}")


def check_dequantize(scaled: ScaledTensor, dtype: torch.dtype) -> None:
    """Check the arguments of `dequantize`."""
    if not isinstance(scaled, ScaledTensor):
        raise TypeError(f"scaled: expected a ScaledTensor, got {type(scaled).__name__}")
    data, scales, format = scaled
    _check_scaled("scaled.data", "scaled.scales", scaled)
    check_dtype("dtype", dtype, DTYPES)
    _check_format("scaled.format", format)
    if data.dim() < 2:
        raise ValueError(f"scaled.data: expected shape [..., R, K], got {list(data.shape)}")
    shape = scales_shape(data.shape, format)
    *groups, rows, parts = scales_shape(data.mT.shape, format)
    # Not by `in`, for which `torch.export` of PyTorch 2.12 compares with both.
    if scales.shape != shape and scales.shape != (*groups, parts, rows):
        raise ValueError(
            f"scaled.scales: expected shape {list(shape)} of {format!r} for data {list(data.shape)}, "
            f"got {list(scales.shape)}"
        )


def _check_format(name: str, format: str) -> None:
    if format not in FORMATS:
        hint = ""
        if format in tuple(FP8_COMPUTE):
            hint = f"; {FP8_COMPUTE[format]!r} is the format of weights in MoE.quantize({format!r})"
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, FORMATS))}, got {format!r}{hint}")


def validate_ids(topk_ids: Tensor, num_experts: int) -> None:
    """Check the values of `topk_ids` on the host, which waits for the device. Meta and fake tensors are skipped.

    Raises:
        RuntimeError: torch.vmap vectorizes the call.
        ValueError: an id is outside `0..num_experts - 1`; the message names the first one.
    """
    outside = values_of(topk_ids, _VALIDATION_READS, lambda ids: ((ids < 0) | (ids >= num_experts)).nonzero()[:1])
    if outside:
        t, k = outside[0]
        raise ValueError(f"topk_ids[{t}, {k}]: expected 0 to {num_experts - 1}, got {int(topk_ids[t, k])}{DROPS}")


def values_of(tensor: Tensor, reads: str, of: Callable[[Tensor], Tensor] = lambda x: x) -> list[Any]:
    """Read the values of `of(tensor)` on the host, none for meta and fake tensors.

    `reads` is the error in torch.compile with fullgraph=True, in torch.export, and if torch.vmap vectorizes the call.
    """
    if torch_internals.has_no_values(tensor):
        return []
    torch_internals.break_graph(reads)
    try:
        return list(of(tensor).tolist())
    except RuntimeError as error:
        if not torch_internals.transformed():
            raise
        raise RuntimeError(reads) from error


def check_grouped_mm(
    mat_a: Tensor,  # [M, K] or [G, M, K]
    mat_b: Tensor,  # [G, K, N] or [K, N]
    offs: Tensor | None,  # [G]
    bias: Tensor | None,  # [G, N]
    out_dtype: torch.dtype | None,
    *,
    reference: bool = False,
) -> torch.dtype:
    """Check the arguments of `grouped_mm`, which has PyTorch's signature, and return the dtype of its result.

    The same checks as in `check_grouped_gemm`, except: `offs [G]` are PyTorch's inclusive ends, int32 or int64, and
    `bias [G, N]` may have any dtype that `mat_a` may have; it does not take part in the promotion.
    """
    _check_floats((("mat_a", mat_a), ("mat_b", mat_b)), reference, (("bias", bias),))
    _check_grouped_mm_shapes(mat_a, mat_b, offs, bias)
    return _result_dtype(mat_a, mat_b, out_dtype, reference)


def _check_grouped_mm_shapes(mat_a: Tensor, mat_b: Tensor, offs: Tensor | None, bias: Tensor | None) -> None:
    _check_rank("mat_a", mat_a, "[M, K] or [G, M, K]")
    _check_rank("mat_b", mat_b, "[K, N] or [G, K, N]")
    _check_contraction("mat_b", mat_b, "mat_a", mat_a)
    stacked = next((mat for mat in (mat_a, mat_b) if mat.dim() == 3), None)
    G = None if stacked is None else stacked.shape[0]
    if mat_a.dim() == mat_b.dim() == 3:
        if offs is not None:
            raise ValueError("offs: expected None for two 3-D operands, got a value")
        if mat_b.shape[0] != G:
            raise ValueError(f"mat_b: expected G = {G} as in mat_a, got {list(mat_b.shape)}")
    else:
        if offs is None:
            raise ValueError("offs: expected the groups' ends, an int32 or int64 tensor [G], got None")
        check_index_vector("offs", offs, 0, "mat_a", mat_a)
        if G is not None and offs.shape[0] != G:
            hint = "; for group_offsets [G + 1] pass offs_from_group_offsets(group_offsets)"
            raise ValueError(
                f"offs: expected length G = {G} as in {list(mat_a.shape)} x {list(mat_b.shape)}, "
                f"got {offs.shape[0]}{hint if offs.shape[0] == G + 1 else ''}"
            )
    if bias is not None:
        _check_tensor("bias", bias)
        if mat_a.dim() != 2 or mat_b.dim() != 3:
            raise ValueError("bias: expected None unless mat_a is [M, K] and mat_b is [G, K, N], got a value")
        _check_shape("bias", bias, "[G, N]", (mat_b.shape[0], mat_b.shape[2]))


def check_scaled_grouped_mm(
    mat_a: Tensor,  # [M, K] or [G, M, K]
    mat_b: Tensor,  # [G, K, N] or [K, N]
    scale_a: Tensor | list[Tensor],
    scale_recipe_a: Any,
    scale_b: Tensor | list[Tensor],
    scale_recipe_b: Any,
    swizzle_a: Any,
    swizzle_b: Any,
    bias: Tensor | None,  # [G, N]
    offs: Tensor | None,  # [G]
    output_dtype: torch.dtype | None,
    contraction_dim: Sequence[int],
    use_fast_accum: bool,
) -> tuple[ScaledTensor, ScaledTensor, torch.dtype]:
    """Check the arguments of `scaled_grouped_mm` (PyTorch's signature); return the operands and the result's dtype.

    Rowwise scales are returned as `[M, 1]` or `[G, M, 1]`, and `[1, N]` or `[G, 1, N]`; always with G for a grouped
    contraction.
    """
    scales_a, scales_b = _only("scale_a", scale_a), _only("scale_b", scale_b)
    recipes = tuple(
        getattr(_only(name, recipe), "name", recipe)
        for name, recipe in (("scale_recipe_a", scale_recipe_a), ("scale_recipe_b", scale_recipe_b))
    )
    rowwise = recipes == ("RowWise", "RowWise")
    if not rowwise and recipes != ("BlockWise1x128", "BlockWise128x128"):
        raise ValueError(
            "scale_recipe_a, scale_recipe_b: expected RowWise and RowWise, or BlockWise1x128 and BlockWise128x128, "
            f"got {recipes[0]} and {recipes[1]}"
        )
    for name, swizzle in (("swizzle_a", swizzle_a), ("swizzle_b", swizzle_b)):
        for one in swizzle if isinstance(swizzle, (list, tuple)) else [swizzle]:
            if one is not None and getattr(one, "name", None) != "NO_SWIZZLE":  # a tensor's name is None
                found = type(one).__name__ if isinstance(one, Tensor) else one
                raise ValueError(f"{name}: expected None or NO_SWIZZLE, got {found}")
    check_bools(use_fast_accum=use_fast_accum)
    if use_fast_accum and not rowwise:
        raise ValueError("use_fast_accum: expected False for BlockWise recipes, whose blocks are added in float32")
    a = ScaledTensor(mat_a, scales_a, "rowwise" if rowwise else "1x128")
    b = ScaledTensor(mat_b, scales_b, "rowwise" if rowwise else "128x128")
    _check_scaled("mat_a", "scale_a", a)
    _check_scaled("mat_b", "scale_b", b)
    _check_same_device("mat_b", mat_b, "mat_a", mat_a)
    _check_grouped_mm_shapes(mat_a, mat_b, offs, bias)
    if not rowwise and mat_b.dim() == 2:
        raise ValueError(
            "scale_recipe_a, scale_recipe_b: expected RowWise for a 2-D mat_b, in which groups end inside of blocks, "
            f"got {recipes[0]} and {recipes[1]}"
        )
    if not isinstance(contraction_dim, (list, tuple)) or any(type(dim) is not int for dim in contraction_dim):
        raise TypeError(f"contraction_dim: expected a list or tuple of ints, got {contraction_dim!r}")
    allowed = (-1, mat_a.dim() - 1), (-2, mat_b.dim() - 2)
    if contraction_dim and tuple(contraction_dim) not in product(*allowed):
        raise ValueError(f"contraction_dim: expected (-1, -2), got {tuple(contraction_dim)}")
    (*groups_a, M, _), (*groups_b, _, N) = mat_a.shape, mat_b.shape
    if not rowwise:
        form = f"[{'G, ' if groups_a else ''}M, cdiv(K, 128)]"
        _check_shape("scale_a", scales_a, form, scales_shape(mat_a.shape, a.format))
        _check_shape("scale_b", scales_b, "[G, cdiv(K, 128), cdiv(N, 128)]", scales_shape(mat_b.shape, b.format))
    elif mat_a.dim() == mat_b.dim() == 2:
        assert offs is not None
        G = offs.shape[0]
        _check_shape("scale_a", scales_a, "[G * M]", (G * M,))
        _check_shape("scale_b", scales_b, "[G * N]", (G * N,))
        scales_a, scales_b = scales_a.reshape(G, M, 1), scales_b.reshape(G, 1, N)
    else:
        _check_shape("scale_a", scales_a, f"[{'G, ' if groups_a else ''}M]", (*groups_a, M))
        _check_shape("scale_b", scales_b, f"[{'G, ' if groups_b else ''}N]", (*groups_b, N))
        scales_a, scales_b = scales_a.unsqueeze(-1), scales_b.unsqueeze(-2)
    dtype = _check_scaled_result((mat_a, scales_a, mat_b, scales_b), bias, output_dtype, "output_dtype")
    return a._replace(scales=scales_a), b._replace(scales=scales_b), dtype


def _only(name: str, value: Any) -> Any:
    """Return the only element of a list or tuple, or `value` if it is neither."""
    if not isinstance(value, (list, tuple)):
        return value
    if len(value) != 1:
        raise ValueError(f"{name}: expected one, got {len(value)}; scales of two levels are not supported")
    return value[0]


def check_uniform(
    A: Tensor,  # [G * M, K] or [G, M, K]
    B: Tensor,  # [G * K, N] or [G, K, N]
    num_groups: int,
    out_dtype: torch.dtype | None,
    *,
    reference: bool = False,
) -> torch.dtype:
    """Check the arguments of a uniform grouped GEMM and return the dtype of its result."""
    check_int("num_groups", num_groups, 0)
    _check_floats((("A", A), ("B", B)), reference)
    _check_rank("A", A, "[G * M, K] or [G, M, K]")
    _check_rank("B", B, "[G * K, N] or [G, K, N]")
    G, K = num_groups, A.shape[-1]
    divided = A.shape[0] == G if A.dim() == 3 or G == 0 else A.shape[0] % G == 0
    if not divided:
        expected = f"{G} groups" if A.dim() == 3 else f"rows that {G} groups share evenly"
        raise ValueError(f"A: expected {expected}, got {list(A.shape)}")
    if B.dim() == 3 and B.shape[0] == G:
        _check_contraction("B", B, "A", A)
    elif B.dim() == 3 or B.shape[0] != G * K:
        expected = f"[G, K, N] = [{G}, {K}, N]" if B.dim() == 3 else f"[G * K, N] = [{G * K}, N]"
        raise ValueError(f"B: expected shape {expected} for A {list(A.shape)}, got {list(B.shape)}")
    return _result_dtype(A, B, out_dtype, reference)


def check_varied(
    group_A: Sequence[Tensor],  # P of [M_p, K_p]
    group_B: Sequence[Tensor],  # P of [K_p, N_p]
    out: Sequence[Tensor] | None,  # P of [M_p, N_p]
    *,
    reference: bool = False,
) -> None:
    """Check the arguments of a varied grouped GEMM: all tensors of one dtype on one device, matching shapes."""
    lists = {"group_A": group_A, "group_B": group_B} | ({} if out is None else {"out": out})
    for name, tensors in lists.items():
        if not isinstance(tensors, (list, tuple)):
            raise no_list(name, tensors)
        if len(tensors) != len(group_A):
            raise ValueError(f"{name}: expected {len(group_A)} tensors as in group_A, got {len(tensors)}")
    if not group_A:
        return
    first = group_A[0]
    _check_floats((("group_A[0]", first),), reference)
    for name, tensors in lists.items():
        for p, tensor in enumerate(tensors):
            if type(tensor) not in PLAIN or tensor.layout is not _STRIDED or tensor.is_nested:
                _check_tensor(f"{name}[{p}]", tensor)
            if tensor.dtype != first.dtype:
                raise TypeError(f"{name}[{p}]: expected {first.dtype} as group_A[0], got {tensor.dtype}")
            if tensor.dim() != 2:
                raise ValueError(f"{name}[{p}]: expected a 2-D tensor, got shape {list(tensor.shape)}")
            if tensor.device != first.device:
                _check_same_device(f"{name}[{p}]", tensor, "group_A[0]", first)
    for p, (a, b) in enumerate(zip(group_A, group_B, strict=True)):
        if a.shape[1] != b.shape[0]:
            _check_contraction(f"group_B[{p}]", b, f"group_A[{p}]", a)
        if out is None:
            continue
        if out[p].shape != (a.shape[0], b.shape[1]):
            raise ValueError(f"out[{p}]: expected shape {[a.shape[0], b.shape[1]]}, got {list(out[p].shape)}")
        if _may_overlap(out[p]):
            raise ValueError(f"out[{p}]: expected every element in memory of its own, got strides {out[p].stride()}")
    if out is None:
        return
    if torch_internals.has_tangent(*group_A, *group_B, *out):
        raise RuntimeError(
            "out: a result that is written to out= has no forward-mode derivatives, but a tensor has a tangent"
        )
    transformed = torch_internals.transformed(unknown=False) and torch_internals.forward_level() < 0
    if not reference and (transformed or torch_internals.wrapped(*group_A, *group_B, *out)):
        raise RuntimeError("out: expected None in torch.vmap and transforms of torch.func, got a list; omit out=")
    check_out(lists)


def check_out(lists: Mapping[str, Sequence[Tensor]]) -> None:
    """Check that the tensors of `lists`, of which "out" is one, are not for autograd or inference mode alone."""
    if torch.is_grad_enabled() and any([tensor.requires_grad for tensors in lists.values() for tensor in tensors]):
        for name, tensors in lists.items():
            for p, tensor in enumerate(tensors):
                if tensor.requires_grad:
                    raise RuntimeError(
                        f"{name}[{p}]: out= has no gradients, but this tensor requires grad: omit out=, detach "
                        "the tensor, or call under torch.no_grad()"
                    )
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return
    if True in (of_inference := [tensor.is_inference() for tensor in lists["out"]]):
        p = of_inference.index(True)
        raise RuntimeError(f"out[{p}]: a tensor of inference mode cannot be written to outside of it: clone it")


def check_planned(tensors: Sequence[Tensor]) -> None:
    """Refuse tensors whose values a plan would not read: those of transforms, or with a tangent."""
    if torch_internals.wrapped(*tensors) or torch_internals.has_tangent(*tensors):
        raise RuntimeError(
            "plan_varied_grouped_gemm: plans have no derivatives in forward mode, and none is made in transforms of "
            "torch.func: call varied_grouped_gemm there"
        )


def _may_overlap(matrix: Tensor) -> bool:
    """Whether two elements may be at one address: a line of the inner dimension reaches the next one."""
    if matrix.numel() == 0:  # even with a stride of 0
        return False
    sizes = [(stride, size) for stride, size in zip(matrix.stride(), matrix.shape, strict=True) if size > 1]
    reached = 0
    for stride, size in sorted(sizes):
        if stride <= reached:
            return True
        reached += stride * (size - 1)
    return False


def check_int(
    name: str, value: object, least: int | None = None, most: int | None = None, hint: Callable[[], str] = str
) -> None:
    """Check that `value` is an int, not below `least` or above `most`; the error ends with `hint()`."""
    if type(value) not in _INTS:
        if torch_internals.jit_tracing() is not None and isinstance(value, Tensor):  # such as x.size(0)
            return
        raise TypeError(f"{name}: expected an int, got {_type_name(value)}")
    assert isinstance(value, _INTS)
    if least is not None and (value < least or (most is not None and value > most)):
        expected = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{name}: expected {expected}, got {value}{hint()}")


def _type_name(value: object) -> str:
    """Return the name of a value's type, such as numpy.int64, with its module if that is not Python's."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def check_bools(**values: object) -> None:
    """Check that options are True or False, because any other value would count as one of these."""
    for name, value in values.items():
        if type(value) not in _BOOLS:
            raise TypeError(f"{name}: expected True or False, got {value!r}")


def check_number(name: str, value: object) -> None:
    """Check that `value` is a float or an int."""
    if isinstance(value, bool) or not isinstance(value, (float, int, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{name}: expected a number, got {_type_name(value)}")
    if isinstance(value, int) and value.bit_length() > 1024:
        raise ValueError(f"{name}: expected a number in the range of float, got an int of {value.bit_length()} bits")


def check_index_vector(
    name: str, value: Tensor, min_length: int = 0, other_name: str = "", other: Tensor | None = None
) -> None:
    """Check that `value` is an int32 or int64 tensor `[at least min_length]`, on the device of `other` if given."""
    _check_indices(name, value)
    if value.dim() != 1:
        raise ValueError(f"{name}: expected a 1-D tensor, got shape {list(value.shape)}")
    if value.shape[0] < min_length:
        raise ValueError(f"{name}: expected a length of at least {min_length}, got {value.shape[0]}")
    if other is not None:
        _check_same_device(name, value, other_name, other)


def no_list(name: str, value: object) -> TypeError:
    """Return the error for a `value` where a list of tensors is expected."""
    hint = f"; pass list({name})" if isinstance(value, Iterable) and not isinstance(value, Mapping) else ""
    return TypeError(f"{name}: expected a list of tensors, got {type(value).__name__}{hint}")


def check_matrix(name: str, value: Tensor, form: str) -> None:
    """Check that `value` is a 2-D tensor; `form`, such as "[M, K]", is for the error message."""
    _check_tensor(name, value)
    _check_rank(name, value, form)


def clamp_offsets(group_offsets: Tensor, M: int) -> Tensor:
    """Make offsets well-formed, as all functions do: `clamp(cummax(group_offsets), 0, M)`, without a sync.

    The values of well-formed offsets do not change. The result never decreases and stays inside `0..M`, so
    the spans it describes are in bounds and do not overlap; rows before its first entry belong to no group.
    Shape and dtype are those of `group_offsets`.
    """
    # If M does not fit into the dtype of int32 offsets, they cannot exceed it.
    return group_offsets.cummax(0).values.clamp(0, min(M, torch.iinfo(group_offsets.dtype).max))


def validate_offsets(group_offsets: Tensor, M: int) -> None:
    """Check the values of `group_offsets [G + 1]` on the host, which waits for the device. Meta and fake tensors are
    skipped.

    Raises:
        RuntimeError: torch.vmap vectorizes the call.
        ValueError: the first entry is not 0, or an entry is below the one before it or above `M`; the message
            names the first such index and its value.
    """
    check_offset_values(values_of(group_offsets, _VALIDATION_READS), M)


def check_offset_values(values: list[int], M: int) -> None:
    """Check the values of `group_offsets`, as `validate_offsets` does, unless there are none."""
    if values and values[0] != 0:
        hint = "for PyTorch's offs, the ends of the groups, pass group_offsets_from_offs(offs)"
        raise ValueError(f"group_offsets[0]: expected 0, got {values[0]}; {hint}")
    _check_order("group_offsets", values, M, 1)


def validate_offs(offs: Tensor, mat_a: Tensor, mat_b: Tensor) -> None:
    """As `validate_offsets` for PyTorch's `offs [G]`, which divide mat_a's rows, mat_b's columns or the contraction."""
    if mat_b.dim() == 3:
        extent, counted = mat_a.shape[0], "rows"
    elif mat_a.dim() == 3:
        extent, counted = mat_b.shape[1], "columns"
    else:
        extent, counted = mat_b.shape[0], "rows of mat_b"
    _check_order("offs", [0, *values_of(offs, _VALIDATION_READS)], extent, 0, counted)


def _check_order(name: str, values: list[int], M: int, second: int, counted: str = "rows") -> None:
    """Check that each value is at least the one before it, and at most M. Messages call values[1] `name[second]`, and
    M the number of what is `counted`.
    """
    for i, (low, value) in enumerate(pairwise(values), start=second):
        if not low <= value <= M:
            raise ValueError(
                f"{name}[{i}]: expected {low} (the offset before it) to {M} (the number of {counted}), got {value}"
            )


def validation_enabled(validate: bool | None) -> bool:
    """Whether to check values on the host: `validate`, or if None, whether `MOE_KERNELS_VALIDATE` was 1 at import."""
    if validate is None:
        return _VALIDATE
    check_bools(validate=validate)
    return validate


def _result_dtype(A: Tensor, B: Tensor, out_dtype: torch.dtype | None, reference: bool) -> torch.dtype:
    if out_dtype is None:
        return torch.promote_types(A.dtype, B.dtype)
    if out_dtype not in _supported(A, reference):
        raise TypeError(_dtype_error("out_dtype", out_dtype, A, reference))
    return out_dtype


def _check_floats(
    operands: Sequence[tuple[str, Tensor]], reference: bool, optional: Sequence[tuple[str, Tensor | None]] = ()
) -> None:
    """Check that the operands are tensors of supported dtypes on the device of the first one."""
    first_name, first = operands[0]
    _check_tensor(first_name, first)
    supported, device = _supported(first, reference), first.device
    given = [(name, value) for name, value in optional if value is not None]
    for name, value in (*operands, *given) if given else operands:
        if value is not first:
            _check_tensor(name, value)
            if value.device != device:
                _check_same_device(name, value, first_name, first)
        if value.dtype not in supported:
            raise TypeError(_dtype_error(name, value.dtype, first, reference))


def _check_rank(name: str, value: Tensor, forms: str, hint: str = "") -> None:
    """Check the rank of `value`, whose shape is one of `forms`: "[M, K]" for 2, "[K, N] or [G, K, N]" for 2 or 3."""
    if value.dim() != 2 and not (value.dim() == 3 and " or " in forms):
        raise ValueError(f"{name}: expected shape {forms}, got {list(value.shape)}{hint}")


def _check_shape(name: str, value: Tensor | None, form: str, shape: Sequence[int], hint: str = "") -> None:
    """Check that `value`, if given, has this shape; `form` describes it in the error message."""
    if value is not None and value.shape != shape:
        hint = hint or (f"; pass {name}.mT" if value.dim() == 3 and value.mT.shape == shape else "")
        raise ValueError(f"{name}: expected shape {form} = {list(shape)}, got {list(value.shape)}{hint}")


def _flattened(name: str, value: Tensor) -> str:
    """Return the hint for a tensor `[.., T, _]` with further dimensions, such as a batch's, in place of `[T, _]`."""
    return f"; pass {name}.flatten(0, -2)" if value.dim() > 2 else ""


def _check_contraction(name: str, B: Tensor, other_name: str, A: Tensor) -> None:
    """Check that `B [.., K, N]` has the K of `A [.., K]`."""
    K = A.shape[-1]
    if B.shape[-2] != K:
        hint = f"; for {'[G, N, K]' if B.dim() == 3 else '[N, K]'} pass W.mT" if B.shape[-1] == K else ""
        raise ValueError(
            f"{name}: expected K = {K} as in {other_name} {list(A.shape)}, "
            f"got K = {B.shape[-2]} in shape {list(B.shape)}{hint}"
        )


def _check_offsets_length(letter: str, name: str, B: Tensor, group_offsets: Tensor) -> None:
    """Check that there are G + 1 offsets for `B [G, ..]`; `letter` is the name of G in the error message."""
    length, G = group_offsets.shape[0], B.shape[0]
    if length != G + 1:
        hint = ""
        if length == G:
            hint = (
                f"; for sizes [{letter}] pass group_offsets_from_sizes(sizes), and for PyTorch's offs [{letter}], the "
                "ends of the groups, group_offsets_from_offs(offs)"
            )
        raise ValueError(
            f"group_offsets: expected length {letter} + 1 = {G + 1} for {name} {list(B.shape)}, got {length}{hint}"
        )


def _check_indices(name: str, value: Tensor) -> None:
    if not isinstance(value, Tensor):
        hint = f"; pass torch.tensor({name}, dtype=torch.int32, device=...)" if isinstance(value, (list, tuple)) else ""
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}{hint}")
    _check_tensor(name, value)
    if value.dtype not in _INDEX_DTYPES:
        hint = "; ids come before weights" if name == "topk_ids" and value.is_floating_point() else ""
        raise TypeError(f"{name}: expected int32 or int64, got {value.dtype}{hint}")


def _check_tensor(name: str, value: object) -> None:
    """Check that `value` is dense: not nested, sparse, a DTensor, torchao's, or a wrapper of another shape or dtype."""
    if type(value) in PLAIN and value.layout is _STRIDED and not value.is_nested:  # type: ignore[attr-defined]
        return
    got = type(value).__name__
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {got}{_hint(value)}")
    if value.is_nested:
        raise TypeError(
            f"{name}: expected a dense tensor, got a nested one; pack_groups({name}.unbind()) gives rows and offsets"
        )
    if value.layout is not _STRIDED:
        raise TypeError(f"{name}: expected a dense tensor, got layout {value.layout}; convert it with .to_dense()")
    if hasattr(value, "placements"):
        raise TypeError(
            f"{name}: expected a torch.Tensor, got {got} with the placements {value.placements}, and these functions "
            "know of no other rank's rows or experts: pass this rank's part, .to_local(), with this rank's offsets or "
            "ids (see moe_kernels.expert_parallel), or all of it, .full_tensor()"
        )
    check_not_torchao(name, value)
    if hasattr(value, "__tensor_flatten__"):
        inside = [getattr(value, field) for field in value.__tensor_flatten__()[0]]
        if not any(x.shape == value.shape and x.dtype == value.dtype for x in inside):
            held = ", ".join(dict.fromkeys(str(x.dtype) for x in inside))
            how = ".dequantize()" if hasattr(type(value), "dequantize") else "its own method for that"
            raise TypeError(
                f"{name}: expected a torch.Tensor, got {got}, which holds its values as {held}; "
                f"convert it with {how}, or leave these weights out when the model is quantised"
            )


def _hint(value: object) -> str:
    """Say what to pass instead of what is no tensor. A slice of a ScaledTensor or QuantizedWeight is a tuple."""
    if isinstance(value, ScaledTensor):
        return "; fp8 is for grouped_gemm and moe_mlp, elsewhere pass what dequantize returns"
    if isinstance(value, QuantizedWeight):
        return "; it is for moe_mlp with compute, elsewhere pass its weight"
    if isinstance(value, tuple) and any(isinstance(part, ScaledTensor) for part in value):
        return "; pass a QuantizedWeight, of some experts what quantize_weight(weight[:n], compute) returns"
    if isinstance(value, tuple) and value and getattr(value[0], "dtype", None) in FP8_DTYPES:
        return "; pass ScaledTensor(data, scales, format), of some experts (data[:n], scales[:n], format)"
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
        return "; pack_groups packs matrices of different heights, torch.stack stacks tensors of one shape"
    return ""


def check_not_torchao(name: str, value: object) -> None:
    """Check that `value` is no torchao tensor: only PyTorch's own products support its format and low precision."""
    kind = type(value)
    if kind.__module__.partition(".")[0] != "torchao":
        return
    for field in value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else ():
        inside = getattr(value, field)
        if type(inside) in PLAIN and (inside.shape, inside.dtype) == (value.shape, value.dtype):  # type: ignore[attr-defined]
            raise TypeError(
                f"{name}: expected a torch.Tensor, got torchao's {kind.__name__}, with which PyTorch's products run in "
                f"low precision, and these would not: pass {name}.{field}, which is in {inside.dtype}, or leave these "
                "weights out of the conversion (such as by torchtitan's Float8GroupedExpertsConverter)"
            )
    plain = f"{name}.{'to_original_precision' if hasattr(kind, 'to_original_precision') else 'dequantize'}()"
    raise TypeError(
        f"{name}: expected a torch.Tensor, got torchao's {kind.__name__}: pass {plain}, or for fp8 "
        f"moe_kernels.quantize({plain}, ...)"
    )


def _check_same_device(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    if value.device != other.device:
        raise ValueError(
            f"{name}: expected on {other.device} with {other_name}, got on {value.device}; move one with .to()"
        )


def _supported(A: Tensor, reference: bool) -> tuple[torch.dtype, ...]:
    return KERNEL_DTYPES if A.is_cuda and not reference else DTYPES


def _dtype_error(name: str, got: object, A: Tensor, reference: bool) -> str:
    supported = _supported(A, reference)
    listed = ", ".join(str(dtype).removeprefix("torch.") for dtype in supported)
    hint = "" if torch.float64 in supported else " (CPU tensors may also be float64, through the reference)"
    error = f"{name}: expected one of {listed} on {A.device.type}{hint}, got {got!r}"
    if name == "out_dtype" or not isinstance(got, torch.dtype) or got.is_complex or got == torch.bool:
        return error
    if got.itemsize == 1 and got.is_floating_point:
        return (
            f"{error}; pass fp8 with its scales, as moe_kernels.quantize returns it: ScaledTensor(data, scales, format)"
        )
    if got in _QUANTIZED:
        error += "; pass what its dequantize() returns"
    elif got.itemsize == 1:
        error += "; multiply by the scales first, as in x.to(torch.bfloat16) * scales"
    return error
