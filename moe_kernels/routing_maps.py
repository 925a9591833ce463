"""`Routing`: the result of `route`, and an argument of `permute` and `unpermute`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Routing(NamedTuple):
    """The order of the R = T * top_k rows of T tokens with top_k experts each, sorted by expert.

    Slot `s = t * top_k + k` is token t's k-th choice. Rows are sorted by (expert, slot). Expert e owns the rows
    `group_offsets[e]:group_offsets[e + 1]`; two equal neighbouring offsets mean an expert without rows. A slot with an
    id outside `0..E - 1` is dropped: its row is at or past `group_offsets[-1]`, after the rows of all experts. So both
    maps are permutations of `0..R - 1`, inverse to each other.

    Attributes:
        group_offsets: `[E + 1]` int32. `permute` and `unpermute` use only the last one, the number of rows that belong
            to experts.
        row_to_slot: `[R]` int32, the slot of each row.
        slot_to_row: `[R]` int32, the row of each slot.
        topk_weights: `[T, top_k]`, as given to `route`.

    Examples:
        Three tokens choose two of four experts each; there is no expert 4.

        >>> import torch
        >>> from moe_kernels import route
        >>> topk_ids = torch.tensor([[2, 0], [0, 3], [4, 2]])
        >>> group_offsets, row_to_slot, slot_to_row, _ = route(topk_ids, torch.ones(3, 2), num_experts=4)
        >>> group_offsets.tolist()  # expert 1 has no row, and row 5 belongs to no expert
        [0, 2, 2, 4, 5]
        >>> row_to_slot.tolist()
        [1, 2, 0, 5, 3, 4]
        >>> slot_to_row.tolist()
        [2, 0, 1, 4, 5, 3]
    """

    group_offsets: Tensor  # [E + 1]
    row_to_slot: Tensor  # [R]
    slot_to_row: Tensor  # [R]
    topk_weights: Tensor  # [T, top_k], token order
