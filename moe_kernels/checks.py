"""What the functions accept, and how offsets that they cannot refuse are read.

The `check_*` functions run on every eager call that is not like an earlier one. They look at metadata alone, so meta
and fake tensors pass through them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from moe_kernels.glu import ACTIVATIONS, CLAMPED, GLUSpec
from moe_kernels.routing_maps import Routing

_CUDA_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALL_DTYPES = (*_CUDA_DTYPES, torch.float64)
_PROMOTED = {(a, b): torch.promote_types(a, b) for a in _ALL_DTYPES for b in _ALL_DTYPES}
_INDEX_DTYPES = (torch.int32, torch.int64)
_INTS = (int, torch.SymInt)
_VALIDATE = os.environ.get("MOE_KERNELS_VALIDATE") == "1"  # read once: this is on the way of every call


def check_grouped_gemm(
    A_packed: Tensor,  # [M, K]
    B: Tensor,  # [K, N] or [G, K, N]
    group_offsets: Tensor,  # [G + 1]
    out_dtype: torch.dtype | None,
    *,
    reference: bool = False,
) -> torch.dtype:
    """Check the arguments of a grouped GEMM and return the dtype of its result.

    Args:
        A_packed: `[M, K]`; bfloat16, float16 or float32, off CUDA also float64.
        B: `[K, N]` or `[G, K, N]`, a dtype as for `A_packed`, not necessarily the same one.
        group_offsets: `[G + 1]` for `B [G, K, N]`, any length of at least 1 for `B [K, N]`; int32 or int64.
            The values are not looked at: see `clamp_offsets` and `validate_offsets`.
        out_dtype: a dtype as for `A_packed`, or None for `torch.promote_types(A_packed.dtype, B.dtype)`.
        reference: the caller is plain PyTorch, which takes float64 on every device.

    Raises:
        TypeError: an argument is no tensor or has a wrong dtype.
        ValueError: wrong rank, shape or device.
    """
    result = _result_dtype(A_packed, B, group_offsets, 1, out_dtype, reference)
    if result is None:
        _refuse(("A_packed", "B", "group_offsets"), (A_packed, B, group_offsets), 1, out_dtype, reference)
    return result


def check_grouped_gemm_wgrad(
    A_packed: Tensor,  # [M, K]
    d_out: Tensor,  # [M, N]
    group_offsets: Tensor,  # [G + 1]
    out_dtype: torch.dtype | None,
    *,
    reference: bool = False,
) -> torch.dtype:
    """Check the arguments of `grouped_gemm_wgrad` and return the dtype of its result, as `check_grouped_gemm` does.

    Raises:
        TypeError: an argument is no tensor or has a wrong dtype.
        ValueError: wrong rank, shape or device.
    """
    for name, value in (("A_packed", A_packed), ("d_out", d_out), ("group_offsets", group_offsets)):
        _check_is_tensor(name, value)
    for name, value in (("A_packed", A_packed), ("d_out", d_out)):
        _check_float_dtype(name, value.dtype, A_packed, reference)
        if value.dim() != 2:
            raise ValueError(f"{name}: expected a 2-D tensor, got shape {list(value.shape)}")
    check_index_vector("group_offsets", group_offsets, min_length=1)
    if d_out.shape[0] != A_packed.shape[0]:
        raise ValueError(
            f"d_out: expected M = {A_packed.shape[0]} as in A_packed {list(A_packed.shape)}, "
            f"got shape {list(d_out.shape)}"
        )
    for name, value in (("d_out", d_out), ("group_offsets", group_offsets)):
        check_same_device(name, value, "A_packed", A_packed)
    if out_dtype is not None and out_dtype not in _supported(A_packed, reference):
        raise TypeError(_dtype_error("out_dtype", out_dtype, A_packed, reference))
    return torch.promote_types(A_packed.dtype, d_out.dtype) if out_dtype is None else out_dtype


def check_route(topk_ids: Tensor, topk_weights: Tensor, num_experts: int) -> None:
    """Check the arguments of `route`: ids `[T, top_k]` int32 or int64, topk_weights `[T, top_k]` floating-point.

    Raises:
        TypeError: an argument is no tensor or has a wrong dtype, or `num_experts` is no int.
        ValueError: wrong rank, shape or device, no slots per token, or a negative number of experts.
    """
    for name, value in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        _check_is_tensor(name, value)
    if topk_ids.dtype not in _INDEX_DTYPES:
        raise TypeError(f"topk_ids: expected int32 or int64, got {topk_ids.dtype}")
    _check_float_dtype("topk_weights", topk_weights.dtype, topk_weights, False)
    if topk_ids.dim() != 2 or topk_ids.shape[1] < 1:
        raise ValueError(f"topk_ids: expected shape [T, top_k] with top_k of at least 1, got {list(topk_ids.shape)}")
    if topk_weights.shape != topk_ids.shape:
        raise ValueError(
            f"topk_weights: expected shape {list(topk_ids.shape)} as topk_ids, got {list(topk_weights.shape)}"
        )
    check_same_device("topk_weights", topk_weights, "topk_ids", topk_ids)
    if isinstance(num_experts, bool) or not isinstance(num_experts, (int, torch.SymInt)):
        raise TypeError(f"num_experts: expected an int, got {type(num_experts).__name__}")
    if num_experts < 0:
        raise ValueError(f"num_experts: expected at least 0, got {num_experts}")


def check_gating(logits: Tensor, top_k: int) -> None:
    """Check the arguments of a gating: logits `[T, E]` floating-point, 1 to E experts per token.

    Raises:
        TypeError, ValueError: wrong dtype; wrong rank, or as many experts as there are not.
    """
    _check_is_tensor("logits", logits)
    _check_float_dtype("logits", logits.dtype, logits, True)
    if logits.dim() != 2:
        raise ValueError(f"logits: expected shape [T, E], got {list(logits.shape)}")
    if not 1 <= top_k <= logits.shape[1]:
        raise ValueError(f"top_k: expected 1 to {logits.shape[1]}, got {top_k}")


def check_layer(hidden: Tensor, router: Tensor) -> None:
    """Check that `hidden` is `[..., H]` for a router `[E, H]`, of its dtype unless autocast converts both.

    Raises:
        TypeError, ValueError: wrong dtype; wrong rank, shape or device.
    """
    _check_is_tensor("hidden", hidden)
    check_same_device("hidden", hidden, "the layer", router)
    H = router.shape[1]
    if hidden.dim() == 0 or hidden.shape[-1] != H:
        raise ValueError(f"hidden: expected shape [..., H] with H = {H}, got {list(hidden.shape)}")
    if hidden.dtype != router.dtype and not torch.is_autocast_enabled(hidden.device.type):
        raise TypeError(f"hidden: expected {router.dtype} as the router, got {hidden.dtype}; convert it with .to()")


def check_permute(hidden: Tensor, routing: Routing) -> None:
    """Check that `hidden` is `[T, H]` for the tokens of `routing`.

    Raises:
        TypeError, ValueError: wrong dtype; wrong rank, shape or device.
    """
    _check_moved("hidden", hidden, "T", routing.topk_weights.shape[0], routing)


def check_unpermute(rows: Tensor, routing: Routing) -> None:
    """Check that `rows` is `[R, H]` for the slots of `routing`.

    Raises:
        TypeError, ValueError: wrong dtype; wrong rank, shape or device.
    """
    _check_moved("rows", rows, "R", routing.slot_to_row.shape[0], routing)


def _check_moved(name: str, value: Tensor, extent: str, expected: int, routing: Routing) -> None:
    _check_is_tensor(name, value)
    _check_float_dtype(name, value.dtype, value, False)
    if value.dim() != 2 or value.shape[0] != expected:
        raise ValueError(f"{name}: expected shape [{extent}, H] with {extent} = {expected}, got {list(value.shape)}")
    check_same_device(name, value, "routing", routing.slot_to_row)
    R = routing.topk_weights.numel()
    for field, indices in (("slot_to_row", routing.slot_to_row), ("group_offsets", routing.group_offsets)):
        if indices.dtype != torch.int32:
            raise TypeError(f"routing.{field}: expected int32, got {indices.dtype}")
    if routing.topk_weights.dim() != 2 or routing.slot_to_row.shape != (R,):
        raise ValueError(
            f"routing: expected topk_weights [T, top_k] and slot_to_row [T * top_k], got shapes "
            f"{list(routing.topk_weights.shape)} "
            f"and {list(routing.slot_to_row.shape)}"
        )


def check_swiglu_ffn(
    rows: Tensor,  # [M, H]
    w_gate_up: Tensor,  # [E, W, H], or [E, H, W] if transposed
    group_offsets: Tensor,  # [E + 1]
    w_up: Tensor | None,  # as w_gate_up
    gate_up_bias: Tensor | None,  # [E, W]
    up_bias: Tensor | None,  # [E, W]
    spec: GLUSpec,
    transposed: bool,
    *,
    reference: bool = False,
) -> None:
    """Check the arguments of `swiglu_ffn`; W is 2I for gate and up in one weight, or else I.

    Raises:
        TypeError: an argument is no tensor or has a wrong dtype.
        ValueError: wrong rank, shape or device, an unknown activation, or options that exclude each other.
    """
    _check_first_weights("rows", "M", rows, w_gate_up, w_up, gate_up_bias, up_bias, spec, transposed, reference)
    check_index_vector("group_offsets", group_offsets)
    E = w_gate_up.shape[0]
    if group_offsets.shape[0] != E + 1:
        raise ValueError(f"group_offsets: expected length E + 1 = {E + 1}, got {group_offsets.shape[0]}")
    check_same_device("group_offsets", group_offsets, "rows", rows)


def check_moe_mlp(
    hidden: Tensor,  # [T, H]
    topk_ids: Tensor,  # [T, top_k]
    topk_weights: Tensor,  # [T, top_k]
    w_gate_up: Tensor,  # [E, W, H], or [E, H, W] if transposed
    w_down: Tensor,  # [E, H, I], or [E, I, H] if transposed
    w_up: Tensor | None,  # as w_gate_up
    gate_up_bias: Tensor | None,  # [E, W]
    up_bias: Tensor | None,  # [E, W]
    down_bias: Tensor | None,  # [E, H]
    spec: GLUSpec,
    transposed: bool,
    *,
    reference: bool = False,
) -> None:
    """Check the arguments of `moe_mlp`, as `check_route` and `check_swiglu_ffn` do.

    Raises:
        TypeError: an argument is no tensor or has a wrong dtype.
        ValueError: wrong rank, shape or device, an unknown activation, or options that exclude each other.
    """
    _check_first_weights("hidden", "T", hidden, w_gate_up, w_up, gate_up_bias, up_bias, spec, transposed, reference)
    E, W = w_gate_up.shape[0], w_gate_up.shape[2 if transposed else 1]
    check_route(topk_ids, topk_weights, E)
    T, H = hidden.shape
    if topk_ids.shape[0] != T:
        raise ValueError(f"topk_ids: expected T = {T} as in hidden {[T, H]}, got {list(topk_ids.shape)}")
    check_same_device("topk_ids", topk_ids, "hidden", hidden)
    width = W // 2 if spec.gated and w_up is None else W
    down = (E, width, H) if transposed else (E, H, width)
    _check_operand("w_down", w_down, down, "hidden", hidden, reference)
    if down_bias is not None:
        _check_operand("down_bias", down_bias, (E, H), "hidden", hidden, reference)


def _check_first_weights(
    name: str,  # "rows" or "hidden"
    count: str,  # what their number is called
    inputs: Tensor,  # [count, H]
    w_gate_up: Tensor,
    w_up: Tensor | None,
    gate_up_bias: Tensor | None,
    up_bias: Tensor | None,
    spec: GLUSpec,
    transposed: bool,
    reference: bool,
) -> None:
    _check_spec(spec, w_up is not None, up_bias is not None)
    for operand_name, operand in ((name, inputs), ("w_gate_up", w_gate_up)):
        _check_is_tensor(operand_name, operand)
        _check_float_dtype(operand_name, operand.dtype, inputs, reference)
    if inputs.dim() != 2:
        raise ValueError(f"{name}: expected shape [{count}, H], got {list(inputs.shape)}")
    width = "2I" if spec.gated and w_up is None else "I"
    shape = f"[E, H, {width}]" if transposed else f"[E, {width}, H]"
    H = inputs.shape[1]
    if w_gate_up.dim() != 3 or w_gate_up.shape[1 if transposed else 2] != H:
        raise ValueError(f"w_gate_up: expected shape {shape} with H = {H}, got {list(w_gate_up.shape)}")
    E, W = w_gate_up.shape[0], w_gate_up.shape[2 if transposed else 1]
    if width == "2I" and W % 2:
        raise ValueError(f"w_gate_up: expected shape {shape} with an even 2I, got {list(w_gate_up.shape)}")
    check_same_device("w_gate_up", w_gate_up, name, inputs)
    optional = (("w_up", w_up, w_gate_up.shape), ("gate_up_bias", gate_up_bias, (E, W)), ("up_bias", up_bias, (E, W)))
    for operand_name, value, expected in optional:
        if value is not None:
            _check_operand(operand_name, value, expected, name, inputs, reference)


def _check_spec(spec: GLUSpec, two_weights: bool, up_bias: bool) -> None:
    if spec.activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {spec.activation!r}")
    if spec.activation in CLAMPED and not spec.gated:
        raise ValueError(f"gated: expected True for {spec.activation}, got False")
    if two_weights and not spec.gated:
        raise ValueError("w_up: expected None for experts without a gate, got a value")
    if spec.interleaved and (two_weights or not spec.gated):
        raise ValueError("interleaved: expected False unless w_gate_up holds gate and up, got True")
    if up_bias and not two_weights:
        raise ValueError("up_bias: expected None without w_up, got a value")


def _check_operand(
    name: str, value: Tensor, shape: tuple[int, ...], other_name: str, other: Tensor, reference: bool
) -> None:
    _check_is_tensor(name, value)
    _check_float_dtype(name, value.dtype, other, reference)
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(value.shape)}")
    check_same_device(name, value, other_name, other)


def validate_ids(topk_ids: Tensor, num_experts: int) -> None:
    """Check the values of `topk_ids` on the host: this waits for the device.

    Raises:
        ValueError: an id is outside `0..num_experts - 1`; the text names the first one.
    """
    outside = ((topk_ids < 0) | (topk_ids >= num_experts)).nonzero()
    if len(outside):
        t, k = outside[0].tolist()
        raise ValueError(f"topk_ids[{t}, {k}]: expected 0 to {num_experts - 1}, got {int(topk_ids[t, k])}")


def check_grouped_mm(
    mat_a: Tensor,  # [M, K] or [G, M, K]
    mat_b: Tensor,  # [G, K, N] or [K, N]
    offs: Tensor | None,  # [G]
    bias: Tensor | None,  # [G, N]
    out_dtype: torch.dtype | None,
    *,
    reference: bool = False,
) -> torch.dtype:
    """Check the arguments of `grouped_mm`, PyTorch's signature, and return the dtype of its result.

    As `check_grouped_gemm`, but `offs [G]` are PyTorch's inclusive ends, int32 or int64, and `bias` may be
    `[G, N]` of any dtype that `mat_a` may have; it does not take part in the promotion.

    Raises:
        TypeError, ValueError: as `check_grouped_gemm`; ValueError also for `offs` that are missing, or given with 3-D
            operands, and for a bias with another form than 2-D x 3-D.
    """
    if not (isinstance(mat_a, Tensor) and isinstance(mat_b, Tensor) and (mat_a.dim(), mat_b.dim()) in _OTHER_FORMS):
        if offs is None:
            raise ValueError("offs: expected the groups' ends, an int32 tensor [G], got None")
        result = _result_dtype(mat_a, mat_b, offs, 0, out_dtype, reference)
        if result is None or mat_b.dim() == 2:
            _refuse(("mat_a", "mat_b", "offs"), (mat_a, mat_b, offs), 0, out_dtype, reference)
        if bias is not None:
            _check_bias(bias, mat_a, mat_b, reference)
        return result
    return _check_other_form(mat_a, mat_b, offs, bias, out_dtype, reference)


_OTHER_FORMS = {
    (2, 2): ("[M, K]", "[K, N]"),
    (3, 2): ("[G, M, K]", "[K, N]"),
    (3, 3): ("[G, M, K]", "[G, K, N]"),
}


def _check_other_form(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    reference: bool,
) -> torch.dtype:
    spec = mat_a.dim(), mat_b.dim()
    a_form, b_form = _OTHER_FORMS[spec]
    for name, value in (("mat_a", mat_a), ("mat_b", mat_b)):
        _check_float_dtype(name, value.dtype, mat_a, reference)
    if mat_b.shape[-2] != mat_a.shape[-1]:
        raise ValueError(
            f"mat_b: expected {b_form} with K = {mat_a.shape[-1]} as in mat_a {list(mat_a.shape)}, "
            f"got {list(mat_b.shape)}"
        )
    check_same_device("mat_b", mat_b, "mat_a", mat_a)
    if spec == (3, 3):
        if offs is not None:
            raise ValueError("offs: expected None for two 3-D operands, got a value")
        if mat_b.shape[0] != mat_a.shape[0]:
            raise ValueError(f"mat_b: expected G = {mat_a.shape[0]} as in mat_a, got {list(mat_b.shape)}")
    else:
        if offs is None:
            raise ValueError("offs: expected the groups' ends, an int32 tensor [G], got None")
        check_index_vector("offs", offs)
        if spec == (3, 2) and offs.shape[0] != mat_a.shape[0]:
            raise ValueError(f"offs: expected length G = {mat_a.shape[0]} for mat_a {a_form}, got {offs.shape[0]}")
        check_same_device("offs", offs, "mat_a", mat_a)
    if bias is not None:
        raise ValueError(f"bias: expected None for mat_a {a_form} with mat_b {b_form}, got a value")
    if out_dtype is not None and out_dtype not in _supported(mat_a, reference):
        raise TypeError(_dtype_error("out_dtype", out_dtype, mat_a, reference))
    return torch.promote_types(mat_a.dtype, mat_b.dtype) if out_dtype is None else out_dtype


def check_uniform(
    A: Tensor,  # [G * M, K] or [G, M, K]
    B: Tensor,  # [G * K, N] or [G, K, N]
    num_groups: int,
    out_dtype: torch.dtype | None,
    *,
    reference: bool = False,
) -> torch.dtype:
    """Check the arguments of a uniform grouped GEMM and return the dtype of its result.

    Args:
        A: `[G * M, K]` or `[G, M, K]`; dtypes as for `check_grouped_gemm`.
        B: `[G * K, N]` or `[G, K, N]`, whatever the rank of `A`.
        num_groups: `G`, at least 0.
        out_dtype, reference: as for `check_grouped_gemm`.

    Raises:
        TypeError: an argument is no tensor or no int, or has a wrong dtype.
        ValueError: wrong rank, shape or device, or a negative `num_groups`.
    """
    if type(num_groups) in _INTS and isinstance(A, Tensor) and isinstance(B, Tensor):
        dtypes = _supported(A, reference)
        promoted = _PROMOTED.get((A.dtype, B.dtype))
        a_shape, b_shape = A.shape, B.shape
        if (
            promoted in dtypes
            and (out_dtype is None or out_dtype in dtypes)
            and B.device == A.device
            and num_groups >= 0
            and _splits(a_shape, num_groups, None)
            and _splits(b_shape, num_groups, a_shape[-1])
        ):
            return promoted if out_dtype is None else out_dtype
    _refuse_uniform(A, B, num_groups, out_dtype, reference)


def _splits(shape: torch.Size, G: int, rows: int | None) -> bool:
    """Whether a tensor of this shape is G matrices, each of that many rows."""
    if len(shape) == 3:
        return shape[0] == G and rows in (None, shape[1])
    if len(shape) != 2:
        return False
    if rows is not None:
        return shape[0] == G * rows
    return shape[0] % G == 0 if G else shape[0] == 0


def _refuse_uniform(A: Tensor, B: Tensor, G: int, out_dtype: torch.dtype | None, reference: bool) -> NoReturn:
    """Raise for whatever `check_uniform` does not accept."""
    for name, value in (("A", A), ("B", B)):
        _check_is_tensor(name, value)
    if type(G) not in _INTS:
        raise TypeError(f"num_groups: expected an int, got {type(G).__name__}")
    if G < 0:
        raise ValueError(f"num_groups: expected at least 0, got {G}")
    _check_float_dtype("A", A.dtype, A, reference)
    _check_float_dtype("B", B.dtype, A, reference)
    for name, value, flat, stacked in (("A", A, "[G * M, K]", "[G, M, K]"), ("B", B, "[G * K, N]", "[G, K, N]")):
        if value.dim() not in (2, 3):
            raise ValueError(f"{name}: expected shape {flat} or {stacked}, got {list(value.shape)}")
    if not _splits(A.shape, G, None):
        expected = f"{G} groups" if A.dim() == 3 else f"rows that {G} groups share evenly"
        raise ValueError(f"A: expected {expected}, got {list(A.shape)}")
    if not _splits(B.shape, G, A.shape[-1]):
        K = A.shape[-1]
        expected = f"[G, K, N] = [{G}, {K}, N]" if B.dim() == 3 else f"[G * K, N] = [{G * K}, N]"
        raise ValueError(f"B: expected shape {expected} for A {list(A.shape)}, got {list(B.shape)}")
    check_same_device("B", B, "A", A)
    # Nothing else is left to be wrong.
    raise TypeError(_dtype_error("out_dtype", out_dtype, A, reference))


def check_varied(
    group_A: Sequence[Tensor],  # P of [M_p, K_p]
    group_B: Sequence[Tensor],  # P of [K_p, N_p]
    out: Sequence[Tensor] | None,  # P of [M_p, N_p]
    *,
    reference: bool = False,
) -> None:
    """Check the arguments of a varied grouped GEMM: all tensors of one dtype on one device, matching shapes.

    Raises:
        TypeError: something is no sequence of tensors, a dtype is not supported or differs from that of `group_A[0]`.
        ValueError: lengths, ranks, shapes or devices do not match, or `out` has elements that share memory by a
            stride of 0.
    """
    lists = {"group_A": group_A, "group_B": group_B} | ({} if out is None else {"out": out})
    for name, tensors in lists.items():
        if not isinstance(tensors, (list, tuple)):
            raise TypeError(f"{name}: expected a list of tensors, got {type(tensors).__name__}")
        if len(tensors) != len(group_A):
            raise ValueError(f"{name}: expected {len(group_A)} tensors as in group_A, got {len(tensors)}")
    if not group_A:
        return
    first = group_A[0]
    _check_is_tensor("group_A[0]", first)
    _check_float_dtype("group_A[0]", first.dtype, first, reference)
    for name, tensors in lists.items():
        for p, tensor in enumerate(tensors):
            _check_is_tensor(f"{name}[{p}]", tensor)
            if tensor.dtype != first.dtype:
                raise TypeError(f"{name}[{p}]: expected {first.dtype} as group_A[0], got {tensor.dtype}")
            if tensor.dim() != 2:
                raise ValueError(f"{name}[{p}]: expected a 2-D tensor, got shape {list(tensor.shape)}")
            if tensor.device != first.device:
                check_same_device(f"{name}[{p}]", tensor, "group_A[0]", first)
    for p, (a, b) in enumerate(zip(group_A, group_B, strict=True)):
        if a.shape[1] != b.shape[0]:
            raise ValueError(
                f"group_B[{p}]: expected K = {a.shape[1]} as in group_A[{p}] {list(a.shape)}, "
                f"got K = {b.shape[0]} in shape {list(b.shape)}"
            )
        if out is None:
            continue
        if out[p].shape != (a.shape[0], b.shape[1]):
            raise ValueError(f"out[{p}]: expected shape {[a.shape[0], b.shape[1]]}, got {list(out[p].shape)}")
        if any(stride == 0 and size > 1 for size, stride in zip(out[p].shape, out[p].stride(), strict=True)):
            raise ValueError(f"out[{p}]: expected every element in memory of its own, got strides {out[p].stride()}")


def check_index_vector(name: str, value: Tensor, min_length: int = 0) -> None:
    """Check that `value` is an int32 or int64 tensor `[at least min_length]`; `name` is for the error's text.

    Raises:
        TypeError: `value` is no tensor or has another dtype.
        ValueError: not 1-D, or too short.
    """
    _check_is_tensor(name, value)
    if value.dtype not in _INDEX_DTYPES:
        raise TypeError(f"{name}: expected int32 or int64, got {value.dtype}")
    if value.dim() != 1:
        raise ValueError(f"{name}: expected a 1-D tensor, got shape {list(value.shape)}")
    if value.shape[0] < min_length:
        raise ValueError(f"{name}: expected a length of at least {min_length}, got {value.shape[0]}")


def clamp_offsets(group_offsets: Tensor, M: int) -> Tensor:
    """Return what any offsets are taken as: `clamp(cummax(group_offsets), 0, M)`, without a sync.

    The values of well-formed offsets do not change. The result never decreases and stays inside `0..M`, so
    the spans it describes are in bounds and do not overlap; rows before its first entry belong to no group.
    Shape and dtype are those of `group_offsets`.
    """
    # Offsets of 32 bits stay below M by themselves when M does not fit into their dtype.
    return group_offsets.cummax(0).values.clamp(0, min(M, torch.iinfo(group_offsets.dtype).max))


def validate_offsets(group_offsets: Tensor, M: int) -> None:
    """Check the values of `group_offsets [G + 1]` on the host: this waits for the device.

    Raises:
        ValueError: the first entry is not 0, or an entry is below the one before it or above `M`; the text
            names the first such index and its value.
    """
    values = group_offsets.tolist()
    if values and values[0] != 0:
        raise ValueError(f"group_offsets[0]: expected 0, got {values[0]}")
    for i in range(1, len(values)):
        if not values[i - 1] <= values[i] <= M:
            raise ValueError(
                f"group_offsets[{i}]: expected {values[i - 1]} (the offset before it) "
                f"to {M} (the number of rows), got {values[i]}"
            )


def validation_enabled(validate: bool | None) -> bool:
    """Whether to call `validate_offsets`: as `validate` says, or if None as `MOE_KERNELS_VALIDATE=1` said at import."""
    return _VALIDATE if validate is None else validate


def _result_dtype(
    A: Tensor,
    B: Tensor,
    offsets: Tensor,
    leading: int,  # offsets has G + leading entries
    out_dtype: torch.dtype | None,
    reference: bool,
) -> torch.dtype | None:
    """The dtype of the result, or None if anything at all is wrong."""
    if not (isinstance(A, Tensor) and isinstance(B, Tensor) and isinstance(offsets, Tensor)):
        return None
    dtypes = _supported(A, reference)
    # The promotion of two supported dtypes is float64 only if one of them is.
    promoted = _PROMOTED.get((A.dtype, B.dtype))
    a_shape, b_shape, offsets_shape, device = A.shape, B.shape, offsets.shape, A.device
    if (
        promoted not in dtypes
        or (out_dtype is not None and out_dtype not in dtypes)
        or offsets.dtype not in _INDEX_DTYPES
        or len(a_shape) != 2
        or len(offsets_shape) != 1
        or B.device != device
        or offsets.device != device
    ):
        return None
    if len(b_shape) == 3:
        accepted = b_shape[1] == a_shape[1] and offsets_shape[0] == b_shape[0] + leading
    else:
        accepted = len(b_shape) == 2 and b_shape[0] == a_shape[1] and offsets_shape[0] >= 1
    if not accepted:
        return None
    return promoted if out_dtype is None else out_dtype


def _refuse(
    names: tuple[str, str, str],
    values: tuple[Tensor, Tensor, Tensor],
    leading: int,
    out_dtype: torch.dtype | None,
    reference: bool,
) -> NoReturn:
    """Raise for whatever made `_result_dtype` return None."""
    for name, value in zip(names, values, strict=True):
        _check_is_tensor(name, value)
    (A_name, B_name, offsets_name), (A, B, offsets) = names, values
    _check_float_dtype(A_name, A.dtype, A, reference)
    _check_float_dtype(B_name, B.dtype, A, reference)
    check_index_vector(offsets_name, offsets)
    if A.dim() != 2:
        raise ValueError(f"{A_name}: expected shape [M, K], got {list(A.shape)}")
    if B.dim() not in (2, 3):
        raise ValueError(f"{B_name}: expected shape [K, N] or [G, K, N], got {list(B.shape)}")
    if B.shape[-2] != A.shape[1]:
        raise ValueError(
            f"{B_name}: expected K = {A.shape[1]} as in {A_name} {list(A.shape)}, "
            f"got K = {B.shape[-2]} in shape {list(B.shape)}"
        )
    if B.dim() == 3 and offsets.shape[0] != B.shape[0] + leading:
        length = "G + 1" if leading else "G"
        raise ValueError(
            f"{offsets_name}: expected length {length} = {B.shape[0] + leading} "
            f"for {B_name} {list(B.shape)}, got {offsets.shape[0]}"
        )
    check_index_vector(offsets_name, offsets, min_length=leading)
    for name, value in ((B_name, B), (offsets_name, offsets)):
        check_same_device(name, value, A_name, A)
    # Nothing else is left to be wrong.
    raise TypeError(_dtype_error("out_dtype", out_dtype, A, reference))


def _check_bias(bias: Tensor, mat_a: Tensor, mat_b: Tensor, reference: bool) -> None:
    _check_is_tensor("bias", bias)
    _check_float_dtype("bias", bias.dtype, mat_a, reference)
    if bias.shape != (mat_b.shape[0], mat_b.shape[2]):
        raise ValueError(f"bias: expected shape [G, N] = {[mat_b.shape[0], mat_b.shape[2]]}, got {list(bias.shape)}")
    check_same_device("bias", bias, "mat_a", mat_a)


def _check_is_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")


def _check_float_dtype(name: str, dtype: torch.dtype, A: Tensor, reference: bool) -> None:
    if dtype not in _supported(A, reference):
        raise TypeError(_dtype_error(name, dtype, A, reference))


def check_same_device(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError unless `value` is where `other` is."""
    if value.device != other.device:
        raise ValueError(
            f"{name}: expected on {other.device} with {other_name}, got on {value.device}; move one with .to()"
        )


def _supported(A: Tensor, reference: bool) -> tuple[torch.dtype, ...]:
    return _CUDA_DTYPES if A.is_cuda and not reference else _ALL_DTYPES


def _dtype_error(name: str, got: object, A: Tensor, reference: bool) -> str:
    supported = _supported(A, reference)
    listed = ", ".join(str(dtype).removeprefix("torch.") for dtype in supported)
    hint = "" if torch.float64 in supported else " (CPU tensors may also be float64, through the reference)"
    return f"{name}: expected one of {listed} on {A.device.type}{hint}, got {got}"
