"""The public grouped GEMM functions: check, choose, call."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad as _forward_ad

from moe_kernels import checks, packing, reference, traced
from moe_kernels.allocate import current_device, empty, empty_strided, on_current_device
from moe_kernels.plans import Plans, kind

_Result = TypeVar("_Result")


def grouped_gemm(
    A_packed: Tensor,  # [M, K]
    B: Tensor,  # [K, N] or [G, K, N]
    group_offsets: Tensor,  # [G + 1]
    *,
    out_dtype: torch.dtype | None = None,
    variant: str = "auto",
    validate: bool | None = None,
) -> Tensor:
    """Multiply each group's rows by the group's matrix: `out[rows of g] = A_packed[rows of g] @ B[g]`.

    Group g owns the rows `group_offsets[g]:group_offsets[g + 1]`. Rows that belong to no group come back as zeros.
    Products are accumulated in fp32. The offsets stay on the device and are never read by the host, so a call can be
    captured into a CUDA graph and replayed with other offsets; malformed ones are taken as
    clamp(cummax(group_offsets), 0, M) and never lead out of bounds.

    Args:
        A_packed: `[M, K]`, the rows of all groups one after another; bfloat16, float16 or float32, any strides. On a
            CPU float64 too.
        B: `[K, N]`, shared by all groups, or `[G, K, N]`; dtypes as for `A_packed`, any strides: the transposed view
            of a `[G, N, K]` parameter costs nothing extra.
        group_offsets: `[G + 1]` int32 or int64, exclusive prefix sums of the group sizes, `group_offsets[0] == 0`.
        out_dtype: dtype of the result; by default `torch.promote_types(A_packed.dtype, B.dtype)`.
        variant: "basic" (a grid over the tiles of all groups), "persistent" (one worker per SM walks a list of tiles)
            or "auto", which picks the faster of the two by rows per group.
        validate: True checks the offsets on the host, which waits for the device; None does so if the environment
            had MOE_KERNELS_VALIDATE=1 at import.

    Returns:
        `[M, N]`, contiguous.

    Raises:
        TypeError, ValueError: an argument has a wrong dtype, or a wrong rank, shape or device.
        ImportError: the kernels are needed and a package they need is missing or too old.
    """
    validate = checks.validation_enabled(validate)
    if not validate and (out := _again(variant, A_packed, B, group_offsets, out_dtype)) is not None:
        return out
    if variant not in ("auto", "basic", "persistent"):
        raise ValueError(f'variant: expected "auto", "basic" or "persistent", got {variant!r}')
    A_packed, B = autocast(A_packed, B)
    dtype = checks.check_grouped_gemm(A_packed, B, group_offsets, out_dtype)
    if validate:
        checks.validate_offsets(group_offsets, A_packed.size(0))
    from moe_kernels import ops  # imports this module

    result: Tensor = ops.grouped_gemm(A_packed, B, group_offsets, None, dtype, variant)
    return result


def grouped_gemm_jagged(A_packed: Tensor, B: Tensor, group_offsets: Tensor) -> Tensor:
    """`grouped_gemm` by the basic kernel: a grid over the output tiles of all groups."""
    return grouped_gemm(A_packed, B, group_offsets, variant="basic")


def grouped_gemm_jagged_persistent(A_packed: Tensor, B: Tensor, group_offsets: Tensor) -> Tensor:
    """`grouped_gemm` by the persistent kernel: a fixed number of workers walks the output tiles of all groups."""
    return grouped_gemm(A_packed, B, group_offsets, variant="persistent")


def grouped_gemm_wgrad(
    A_packed: Tensor,  # [M, K]
    d_out: Tensor,  # [M, N]
    group_offsets: Tensor,  # [G + 1]
    *,
    out_dtype: torch.dtype | None = None,
    validate: bool | None = None,
) -> Tensor:
    """Multiply each group's two blocks of rows: `out[g] = A_packed[rows of g].T @ d_out[rows of g]`.

    The gradient of `grouped_gemm` in a `B [G, K, N]`. Products are accumulated in fp32. Groups without rows give
    exact zeros, and rows in no group count for nothing, whatever they hold. Offsets are read as by `grouped_gemm`.

    Args:
        A_packed: `[M, K]`; dtypes and strides as for `grouped_gemm`.
        d_out: `[M, N]`, likewise.
        group_offsets: `[G + 1]` int32 or int64.
        out_dtype: dtype of the result; by default `torch.promote_types(A_packed.dtype, d_out.dtype)`.
        validate: as for `grouped_gemm`.

    Returns:
        `[G, K, N]`, contiguous.

    Raises:
        TypeError, ValueError, ImportError: as for `grouped_gemm`.
    """
    A_packed, d_out = autocast(A_packed, d_out)
    dtype = checks.check_grouped_gemm_wgrad(A_packed, d_out, group_offsets, out_dtype)
    if checks.validation_enabled(validate):
        checks.validate_offsets(group_offsets, A_packed.size(0))
    from moe_kernels import ops  # imports this module

    out: Tensor = ops.grouped_gemm_wgrad(A_packed, d_out, group_offsets, False, False, dtype)
    return out


def grouped_mm(
    mat_a: Tensor,  # [M, K] or [G, M, K]
    mat_b: Tensor,  # [G, K, N] or [K, N]
    *,
    offs: Tensor | None = None,  # [G]
    bias: Tensor | None = None,  # [G, N]
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`torch.nn.functional.grouped_mm`, with bias, out_dtype, and any dtype, size and strides.

        [M, K]    x [G, K, N]  ->  [M, N]        the rows of mat_a are grouped
        [M, K]    x [K, N]     ->  [G, M, N]     the contraction is grouped
        [G, M, K] x [K, N]     ->  [M, N]        the columns of mat_b are grouped
        [G, M, K] x [G, K, N]  ->  [G, M, N]     without offs

    Group g has the rows (columns) `offs[g - 1]:offs[g]`, with `offs[-1]` read as 0 for the first group. Rows and
    columns at or past the last of `offs`, which PyTorch leaves uninitialised, are zeros.

    Args:
        mat_a, mat_b: as above; dtypes and strides as for `grouped_gemm`.
        offs: `[G]` int32 or int64, where each group ends.
        bias: `[G, N]`, for the first form only, added in fp32 before the result is rounded.
        out_dtype: as for `grouped_gemm`.

    Returns:
        As above; contiguous, but for the third form, which is a transposed view.

    Raises:
        TypeError, ValueError, ImportError: as for `grouped_gemm`; offsets are checked on the host if the environment
            has MOE_KERNELS_VALIDATE=1.
    """
    mat_a, mat_b = autocast(mat_a, mat_b)
    dtype = checks.check_grouped_mm(mat_a, mat_b, offs, bias, out_dtype)
    if offs is None:
        return reference.grouped_mm(mat_a, mat_b, out_dtype=dtype)
    group_offsets = packing.group_offsets_from_offs(offs)
    if mat_b.dim() == 2:
        if mat_a.dim() == 2:
            return grouped_gemm_wgrad(mat_a.T, mat_b, group_offsets, out_dtype=dtype)
        return grouped_gemm(mat_b.T, mat_a.mT, group_offsets, out_dtype=dtype).T
    if checks.validation_enabled(None):
        checks.validate_offsets(group_offsets, mat_a.size(0))
    from moe_kernels import ops  # imports this module

    out: Tensor = ops.grouped_gemm(mat_a, mat_b, group_offsets, bias, dtype, "auto")
    return out


forward_ad: Any = _forward_ad
_PLAIN = frozenset((Tensor, torch.nn.Parameter))
# What torch.autograd.grad(is_grads_batched=True) runs a backward pass in; it is none of torch.func's transforms.
_VMAP_MODE = torch._C._dispatch_key_parse("VmapMode")


def unobserved(*tensors: Tensor | None) -> bool:
    """Whether a call may go past torch.library and autograd, because nobody would notice.

    Raises:
        NotImplementedError: as for `eager`.
    """
    return eager(*tensors) and not differentiated(*tensors) and not profiled()


profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled  # one that shows operators by their names


def differentiated(*tensors: Tensor | None) -> bool:
    """Whether autograd records what is computed from these."""
    return torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in tensors])


def eager(*tensors: Tensor | None) -> bool:
    """Whether nothing traces or transforms a call; autograd may still record it, and a profiler show it.

    Nor is one of the tensors a view that PyTorch negates before an operator gets it, such as the imaginary part of a
    conjugate.

    Raises:
        NotImplementedError: a tensor has a tangent, which torch.library's operators would drop without a word.
    """
    if torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    if forward_ad._current_level >= 0:
        for tensor in tensors:
            if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
                raise NotImplementedError("moe_kernels has no forward-mode derivatives: use reverse mode")
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None:
        return False
    if torch._C._dispatch_tls_is_dispatch_key_included(_VMAP_MODE):
        return False
    return all([x is None or (type(x) in _PLAIN and not x.is_neg()) for x in tensors])


# Those that the kernels or the references run on. Not all versions of Dynamo can trace `is_autocast_available`.
_AUTOCAST_DEVICES = frozenset({"cpu", "cuda", "xpu"})


def autocast(*operands: Tensor) -> tuple[Tensor, ...]:
    """The operands of a product as torch.autocast would have them; float64 and what is no float stay."""
    if not (torch.compiler.is_dynamo_compiling() or torch._C._is_any_autocast_enabled()):
        return operands
    cast = []
    for operand in operands:
        if isinstance(operand, Tensor) and operand.is_floating_point() and operand.dtype != torch.float64:
            device_type = operand.device.type
            if device_type in _AUTOCAST_DEVICES and torch.is_autocast_enabled(device_type):
                operand = operand.to(torch.get_autocast_dtype(device_type))
        cast.append(operand)
    return tuple(cast)


def multiply(
    A_packed: Tensor,  # [M, K]
    B: Tensor,  # [K, N] or [G, K, N]
    group_offsets: Tensor,  # [G + 1]
    bias: Tensor | None,  # [G, N]
    dtype: torch.dtype,
    variant: str,
) -> Tensor:  # [M, N]
    """What the grouped GEMM functions and their operator compute, on checked arguments."""
    if not use_kernels(A_packed, B):
        return reference.grouped_linear(A_packed, B, group_offsets, bias, dtype)
    key = _key(variant, A_packed, B, group_offsets, bias, dtype)
    return _run(key, variant, A_packed, B if B.dim() == 3 else B.unsqueeze(0), group_offsets, bias, dtype)


def use_kernels(A: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels do the work, for these operands: on a GPU, or in Triton's interpreter unless in float64."""
    if A.is_cuda or A.is_xpu:
        return True
    if not A.is_cpu or os.environ.get("TRITON_INTERPRET") != "1":
        return False
    return all([x is None or x.dtype != torch.float64 for x in (A, *others)])


def on_device(like: Tensor, launch: Callable[..., _Result], *args: Any) -> _Result:
    """`launch(*args)` with the device of `like` as the current one."""
    if like.is_cpu or on_current_device(like):
        return launch(*args)
    with (torch.xpu if like.is_xpu else torch.cuda).device(like.device):
        return launch(*args)


MOST_ROWS = 2**30 - 1  # twice as many and one are an int32


def check_rows(name: str, M: int) -> None:
    if M > MOST_ROWS:
        raise ValueError(f"{name}: expected at most {MOST_ROWS} rows, got {M}")


class _Known(NamedTuple):
    """What there is for a key."""

    plan: Callable[..., None]
    replays: list[Callable[..., Tensor | None]]


_plans: Plans[_Known] = Plans()
_MOST_REPLAYS = 8


def _key(
    variant: str,
    A_packed: Tensor,
    B: Tensor,
    group_offsets: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
) -> tuple[Any, ...]:
    """Everything that checks, choice and compiled code depend on; M is in it by its magnitude alone.

    This is on the way of every call, where an attribute of a tensor takes some 0.1 us.
    """
    M, K = A_packed.shape
    G = group_offsets.size(0) - 1
    a_dtype, b_dtype = A_packed.dtype, B.dtype
    return (
        variant,
        (a_dtype if a_dtype == b_dtype else torch.promote_types(a_dtype, b_dtype)) if out_dtype is None else out_dtype,
        M.bit_length(),
        G and (M // G).bit_length(),
        K,
        a_dtype,
        A_packed.stride(),
        A_packed.data_ptr() % 16,
        A_packed.get_device(),
        b_dtype,
        B.shape,
        B.stride(),
        B.data_ptr() % 16,
        B.get_device(),
        group_offsets.shape,
        group_offsets.dtype,
        group_offsets.stride(),
        group_offsets.data_ptr() % 16,
        group_offsets.get_device(),
        kind(bias),
        (a_dtype == torch.float32 or b_dtype == torch.float32) and torch.backends.cuda.matmul.fp32_precision,
    )


def _again(
    variant: str, A_packed: Tensor, B: Tensor, group_offsets: Tensor, out_dtype: torch.dtype | None
) -> Tensor | None:
    """The result if there has been such a call before, from the current device, and nobody records this one."""
    if torch.compiler.is_dynamo_compiling() or profiled():
        return None
    for replay in _plans.recent:
        out: Tensor | None = replay(variant, A_packed, B, group_offsets, out_dtype)
        if out is not None:
            return out
    tensors = A_packed, B, group_offsets
    try:
        if not unobserved(*tensors) or torch._C._is_any_autocast_enabled():
            return None
        key = _key(variant, *tensors, None, out_dtype)
        known = _plans[key]
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return None  # what is wrong, if anything is, the checks find
    if not on_current_device(A_packed):
        return None
    for replay in known.replays:
        out = replay(variant, *tensors, out_dtype)
        if out is not None:
            _plans.recent = replay, *_plans.recent[:7]
            return out
    _, dtype, *_ = key
    out = empty((A_packed.size(0), B.size(-1)), dtype, A_packed)
    known.plan(A_packed, B if B.dim() == 3 else B.unsqueeze(0), group_offsets, None, out)
    if len(known.replays) < _MOST_REPLAYS and (made := _replay(known.plan, out, variant, *tensors, out_dtype)):
        known.replays.append(made)
        _plans.recent = made, *_plans.recent[:7]
    return out


# By these torch.compile tells whether the arguments of a call are like those that it has compiled for.
_TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)


def _replay(
    plan: Callable[..., None],
    out: Tensor,
    variant: str,
    A_packed: Tensor,
    B: Tensor,
    group_offsets: Tensor,
    out_dtype: torch.dtype | None,
) -> Callable[..., Tensor | None] | None:
    """What does all of a call like this one, in one function, and returns None for another call; None if there is none.

    Alike are calls with tensors like these, aligned to 16 bytes, but for the number of rows, as long as the key is the
    same; from the same device, and with the dispatcher as it is now (autocast, inference mode, modes, transforms).
    """
    (M, N), G = out.shape, group_offsets.size(0) - 1
    tensors = A_packed, B, group_offsets
    # What float32 products may use is a setting, which guards do not see.
    if torch.float32 in (A_packed.dtype, B.dtype) or any([x.data_ptr() % 16 for x in tensors]):
        return None
    sizes: list[list[int | None]] = [[None, A_packed.size(1)], list(B.shape), list(group_offsets.shape)]
    try:
        # None: the strides that they have.
        guards = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=None)
    except (RuntimeError, TypeError, ValueError):  # PyTorch does not promise that there is such a thing
        return None

    notes = traced.Notes()
    rows = {"A_packed": "rows", "B": B.size(0) if B.dim() == 3 else 1, "group_offsets": G + 1, "out": "rows"}
    stand_ins = [traced.StandIn(name, traced.Number(str(number)), notes) for name, number in rows.items()]
    a, b, offsets, result = stand_ins
    try:
        plan(a, b, offsets, None, result)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # it does more than to allocate and launch
        three = "B" if B.dim() == 3 else "B.unsqueeze(0)"
        notes = traced.Notes([f"plan(A_packed, {three}, group_offsets, None, out)"], {"plan": plan})

    bits, bits_each = M.bit_length(), (M // max(G, 1)).bit_length()
    least, most = max(1 << bits >> 1, G * (1 << bits_each >> 1)), min(1 << bits, max(G, 1) << bits_each)
    names = {
        "alike": guards.check,
        "asked": (variant, out_dtype, torch.is_grad_enabled(), forward_ad._current_level),
        "is_grad_enabled": torch.is_grad_enabled,
        "forward_ad": forward_ad,
        "current_device": current_device,
        "empty_strided": empty_strided(A_packed),
        "dtype": out.dtype,
    }
    return traced.define(
        "replay(variant, A_packed, B, group_offsets, out_dtype)",
        [
            "try:",
            "    if (variant, out_dtype, is_grad_enabled(), forward_ad._current_level) != asked: return None",
            "    rows = A_packed.shape[0]",
            f"    if not {least} <= rows < {most} or not alike(A_packed, B, group_offsets): return None",
            "except (AttributeError, IndexError, RuntimeError, TypeError): return None",
            f"if current_device() != {A_packed.get_device()}: return None",
            *(x.asks_pointer for x in (a, b, offsets)),
            f"if ({a.pointer} | {b.pointer} | {offsets.pointer}) % 16: return None",
            f"out = empty_strided((rows, {N}), ({N}, 1), dtype)",
            result.asks_pointer,
            *notes.statements,
            "return out",
        ],
        names | notes.names,
    )


def _run(
    key: tuple[Any, ...],
    variant: str,
    A_packed: Tensor,  # [M, K]
    B: Tensor,  # [G, K, N], or [1, K, N] for one that all groups share
    group_offsets: Tensor,  # [G + 1]
    bias: Tensor | None,  # [G, N]
    dtype: torch.dtype,
) -> Tensor:  # [M, N]
    M, K = A_packed.shape
    out = empty((M, B.size(2)), dtype, A_packed)
    if out.numel() == 0:
        return out
    if group_offsets.size(0) == 1 or (K == 0 and bias is None):
        return out.zero_()
    check_rows("A_packed", M)
    on_device(A_packed, _call, key, variant, A_packed, B, group_offsets, bias, out)
    return out


def launch(
    variant: str, A: Tensor, B: Tensor, group_offsets: Tensor, bias: Tensor | None, out: Tensor
) -> Callable[..., None]:
    """Write the product to `out`. Nothing is checked; no extent may be 0.

    The result does it again for other tensors of this kind, given in the same order, all but `variant`.
    """
    return _call(_key(variant, A, B, group_offsets, bias, out.dtype), variant, A, B, group_offsets, bias, out)


def _call(
    key: tuple[Any, ...], variant: str, A: Tensor, B: Tensor, offsets: Tensor, bias: Tensor | None, out: Tensor
) -> Callable[..., None]:
    if (known := _plans.get(key)) is not None:
        known.plan(A, B, offsets, bias, out)
        return known.plan
    from moe_kernels.kernels import grouped_gemm as kernels

    plan = kernels.plan(variant, A, B, offsets, bias, out)
    _plans[key] = _Known(plan, [])
    return plan
