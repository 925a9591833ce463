"""What the jagged functions accept, and how offsets that they cannot refuse are read.

The `check_*` functions run on every eager call: one cheap pass decides, and only a refused call pays for
finding out what was wrong. They look at metadata alone, so meta and fake tensors pass through them.
"""

import os
from typing import NoReturn

import torch
from torch import Tensor

_CUDA_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALL_DTYPES = (*_CUDA_DTYPES, torch.float64)
_PROMOTED = {(a, b): torch.promote_types(a, b) for a in _ALL_DTYPES for b in _ALL_DTYPES}
_INDEX_DTYPES = (torch.int32, torch.int64)
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


def check_grouped_mm(
    mat_a: Tensor,  # [M, K]
    mat_b: Tensor,  # [G, K, N]
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
        NotImplementedError: `mat_a` and `mat_b` are not 2-D and 3-D.
        TypeError, ValueError: as `check_grouped_gemm`; ValueError also for `offs=None`.
    """
    if isinstance(mat_a, Tensor) and isinstance(mat_b, Tensor) and (mat_a.dim(), mat_b.dim()) != (2, 3):
        raise NotImplementedError(
            f"mat_a, mat_b: only mat_a [M, K] with mat_b [G, K, N] is supported now, "
            f"got {mat_a.dim()}-D with {mat_b.dim()}-D"
        )
    if offs is None:
        raise ValueError("offs: expected the groups' ends, an int32 tensor [G], got None")
    result = _result_dtype(mat_a, mat_b, offs, 0, out_dtype, reference)
    if result is None:
        _refuse(("mat_a", "mat_b", "offs"), (mat_a, mat_b, offs), 0, out_dtype, reference)
    if bias is not None:
        _check_bias(bias, mat_a, mat_b, reference)
    return result


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
        _check_same_device(name, value, A_name, A)
    # Nothing else is left to be wrong.
    raise TypeError(_dtype_error("out_dtype", out_dtype, A, reference))


def _check_bias(bias: Tensor, mat_a: Tensor, mat_b: Tensor, reference: bool) -> None:
    _check_is_tensor("bias", bias)
    _check_float_dtype("bias", bias.dtype, mat_a, reference)
    if bias.shape != (mat_b.shape[0], mat_b.shape[2]):
        raise ValueError(f"bias: expected shape [G, N] = {[mat_b.shape[0], mat_b.shape[2]]}, got {list(bias.shape)}")
    _check_same_device("bias", bias, "mat_a", mat_a)


def _check_is_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")


def _check_float_dtype(name: str, dtype: torch.dtype, A: Tensor, reference: bool) -> None:
    if dtype not in _supported(A, reference):
        raise TypeError(_dtype_error(name, dtype, A, reference))


def _check_same_device(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    if value.device != other.device:
        raise ValueError(f"{name}: expected on {other.device} with {other_name}, got on {value.device}")


def _supported(A: Tensor, reference: bool) -> tuple[torch.dtype, ...]:
    return _CUDA_DTYPES if A.is_cuda and not reference else _ALL_DTYPES


def _dtype_error(name: str, got: object, A: Tensor, reference: bool) -> str:
    supported = _supported(A, reference)
    listed = ", ".join(str(dtype).removeprefix("torch.") for dtype in supported)
    hint = "" if torch.float64 in supported else " (CPU tensors may also be float64, through the reference)"
    return f"{name}: expected one of {listed} on {A.device.type}{hint}, got {got}"
