"""Lists of ragged matrices <-> one packed matrix and its offsets.

Group `g` of `A_packed [M, K]` is `A_packed[group_offsets[g]:group_offsets[g + 1]]`: sizes 2, 0, 3 give the
offsets 0, 2, 2, 5, so an empty group repeats an offset. PyTorch's `offs` are the same without the leading 0.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import ParameterList

from .checks import check_index_vector, check_matrix, check_offset_values, no_list, values_of
from .runtime.symbolic import INT32_MAX
from .runtime.torch_internals import has_no_values

_READS = (
    "unpack_groups reads group_offsets on the host, as its results' shapes depend on them, which fullgraph=True, "
    "torch.export and a torch.vmap over them rule out: call it outside"
)


def pack_groups(groups: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the rows of all groups in one tensor, one group after another, and the offsets of the groups.

    Copies the data once. Differentiable in the groups.

    Args:
        groups: G matrices `[M_g, K]` of one dtype on one device, or a tensor `[G, M, K]`, which may be nested; any
            strides, also `M_g = 0`.

    Returns:
        `A_packed [M, K]`, contiguous, and `group_offsets [G + 1]` on the same device: int32, or int64 if `M`
        does not fit. An empty list gives a float32 `[0, 0]` and the offsets `[0]`, on the CPU.

    Raises:
        TypeError: `groups` is not a sequence, or a group is not a tensor or has another dtype than the first.
        ValueError: a group is not 2-D, or has another K or device than the first.
    """
    if not isinstance(groups, (Sequence, Tensor, ParameterList)):
        raise no_list("groups", groups)
    if isinstance(groups, Tensor) and groups.dim() != 3:
        # A strided nested tensor has no shape to show.
        found = f"{groups.dim()} dimensions" if groups.is_nested else f"shape {list(groups.shape)}"
        raise ValueError(f"groups: expected a list of tensors, or one [G, M, K], got {found}")
    if isinstance(groups, Tensor) and groups.is_nested:
        groups = groups.unbind()
    for i, group in enumerate(groups):
        _check_group(i, group, groups[0])
    if len(groups) == 0:
        empty = torch.empty(0, 0, dtype=torch.float32, device="cpu")
        A_packed = groups.new_empty(0, groups.size(2)) if isinstance(groups, Tensor) else empty
        return A_packed, torch.zeros(1, dtype=torch.int32, device=A_packed.device)
    offsets = [0, *accumulate(group.shape[0] for group in groups)]
    dtype = torch.int32 if offsets[-1] <= INT32_MAX else torch.int64
    return torch.cat(list(groups)), torch.tensor(offsets, dtype=dtype, device=groups[0].device)


def unpack_groups(packed: Tensor, group_offsets: Tensor) -> list[Tensor]:
    """Return the groups of `packed [M, N]` as G views `[M_g, N]`, without the rows outside all groups.

    Under autograd, PyTorch refuses changes of these views in place; change a clone.

    Reads the offsets on the host, because the shapes of the views depend on them: it waits for the device and cannot
    be captured in a CUDA graph.

    Raises:
        TypeError: an argument is not a tensor, or `group_offsets` is neither int32 nor int64.
        ValueError: wrong rank; `group_offsets` is empty, or a meta or fake tensor, which has no values; its first entry
            is not 0, or an entry is below the one before it or above M.
        RuntimeError: torch.vmap vectorizes the call over `group_offsets`.
    """
    check_matrix("packed", packed, "[M, N]")
    check_index_vector("group_offsets", group_offsets, min_length=1)
    if has_no_values(group_offsets):
        raise ValueError(
            "group_offsets: expected values, which the groups' shapes depend on, got a meta or fake tensor"
        )
    offsets = values_of(group_offsets, _READS)
    check_offset_values(offsets, packed.shape[0])
    sizes = [end - start for start, end in pairwise(offsets)]
    # One split instead of G slices: its backward writes each row of the gradient once, not G times.
    return list(torch.split(packed[: offsets[-1]], sizes))


def group_offsets_from_sizes(sizes: Tensor) -> Tensor:
    """Return the offsets `[G + 1]` of groups with `sizes [G]`, same dtype and device, without a sync.

    The sum of `sizes` has to fit into their dtype.

    Raises:
        TypeError: `sizes` is not a tensor, or neither int32 nor int64.
        ValueError: `sizes` is not 1-D.
    """
    check_index_vector("sizes", sizes)
    return group_offsets_from_offs(sizes.cumsum(0, dtype=sizes.dtype))


def group_sizes(group_offsets: Tensor) -> Tensor:
    """Return the number of rows `[G]` of each group of `group_offsets [G + 1]`, same dtype, without a sync.

    Raises:
        TypeError: `group_offsets` is not a tensor, or neither int32 nor int64.
        ValueError: `group_offsets` is not 1-D or has no entry.
    """
    check_index_vector("group_offsets", group_offsets, min_length=1)
    return group_offsets.diff()


def offs_from_group_offsets(group_offsets: Tensor) -> Tensor:
    """Return PyTorch's `offs [G]`, the inclusive ends of `group_offsets [G + 1]`, without a sync.

    The result is a new contiguous int32 tensor, as `torch.nn.functional.grouped_mm` requires. Offsets have to be below
    2**31.

    Raises:
        TypeError: `group_offsets` is not a tensor, or neither int32 nor int64.
        ValueError: `group_offsets` is not 1-D or has no entry.
    """
    check_index_vector("group_offsets", group_offsets, min_length=1)
    return group_offsets[1:].to(torch.int32, copy=True, memory_format=torch.contiguous_format)


def group_offsets_from_offs(offs: Tensor) -> Tensor:
    """Return the offsets `[G + 1]` of PyTorch's `offs [G]`: a 0, then the ends, same dtype, without a sync.

    Raises:
        TypeError: `offs` is not a tensor, or neither int32 nor int64.
        ValueError: `offs` is not 1-D.
    """
    check_index_vector("offs", offs)
    return F.pad(offs, (1, 0))


def _check_group(i: int, group: Tensor, first: Tensor) -> None:
    check_matrix(f"groups[{i}]", group, "[M_g, K]")
    if group.dtype != first.dtype:
        raise TypeError(f"groups[{i}]: expected {first.dtype} as in groups[0], got {group.dtype}")
    if group.shape[1] != first.shape[1]:
        raise ValueError(f"groups[{i}]: expected K = {first.shape[1]} as in groups[0], got shape {list(group.shape)}")
    if group.device != first.device:
        raise ValueError(f"groups[{i}]: expected on {first.device} as groups[0], got on {group.device}")
