"""Counting sort of top-k ids: the row of each slot, and the first row of each expert.

    row(s) = #(slots of lower experts) + #(earlier slots of the same expert)        s = t * top_k + k

An id outside 0..E-1 counts as expert E, so dropped slots come last, in their order. All arithmetic is on integers, so
the result does not depend on the order in which programs run.

For up to RANK_UP_TO slots, one launch counts what precedes each slot, with R comparisons per slot. More slots are cut
into runs: a first launch counts each expert's slots per run and ranks them in it, a second adds counts of earlier runs.
"""

from __future__ import annotations

import helion.language as hl
import torch

from moe_kernels.kernels.declare import kernel
from moe_kernels.kernels.inline import histogram, int32, lookup
from moe_kernels.rules.config import Config
from moe_kernels.runtime.plan import Builder, Operands
from moe_kernels.runtime.signature import RANK_UP_TO
from moe_kernels.runtime.symbolic import SymbolicTensor, most

_RANK_BLOCK = 4
_MOST_RUNS = 512
_CHUNK = 128  # slots that are compared pairwise
_TABLE = 8192  # elements of counts [runs, width] that a program loads at once
_RANK_CONFIG = Config(block_sizes=[512], num_warps=4)
_COUNT_CONFIG = Config(block_sizes=[], num_warps=4)  # one thread per slot of a chunk of _CHUNK


def _expert(topk_ids: torch.Tensor, slot: torch.Tensor, R: int, E: int) -> torch.Tensor:
    """Return the expert of each slot, int32; E for dropped slots and past the last slot."""
    inside = slot < R
    ids = hl.load(topk_ids, [slot], extra_mask=inside)
    return torch.where(inside & (ids >= 0) & (ids < E), ids, E).to(torch.int32)


@kernel()
def rank_slots(
    topk_ids: torch.Tensor,  # [R]
    group_offsets: torch.Tensor,  # [E + 1] int32
    row_to_slot: torch.Tensor,  # [R] int32
    slot_to_row: torch.Tensor,  # [R] int32
    E: hl.constexpr,
    block: hl.constexpr,
) -> torch.Tensor:
    """Questions 0..R-1 ask how many slots precede a slot, questions R..R+E how many belong to lower experts."""
    hl.pdl_launch_dependents()
    hl.pdl_wait()
    R = topk_ids.size(0)
    for tile_b in hl.tile((R + E + block) // block, block_size=1):
        question = tile_b.id * block + hl.arange(block)
        is_slot = question < R
        expert = torch.where(is_slot, _expert(topk_ids, question, R, E), question - R)
        place = torch.where(is_slot, question, 0)
        before = hl.zeros([block], dtype=torch.int32)
        for tile_s in hl.tile(R):
            other = _expert(topk_ids, tile_s.index, R, E)
            lower = other[None, :] < expert[:, None]
            earlier = (other[None, :] == expert[:, None]) & (tile_s.index[None, :] < place[:, None])
            before = before + torch.sum((lower | earlier).to(torch.int32), dim=1, dtype=torch.int32)
        hl.store(slot_to_row, [question], before, extra_mask=is_slot)
        hl.store(row_to_slot, [before], question, extra_mask=is_slot)
        hl.store(group_offsets, [question - R], before, extra_mask=(question >= R) & (question <= R + E))
    return slot_to_row


@kernel()
def count_experts(
    topk_ids: torch.Tensor,  # [R]
    counts: torch.Tensor,  # [runs, width] int32
    ranks: torch.Tensor,  # [R] int32
    chunks: int,  # of slots, in a run
    E: hl.constexpr,
    width: hl.constexpr,  # a power of two, at least E
    chunk: hl.constexpr,
) -> torch.Tensor:
    """counts[b, e] = slots of expert e in run b; ranks[s] = slots of the expert of s that precede s in its run."""
    R, runs = topk_ids.size(0), counts.size(0)
    for tile_b in hl.tile(runs, block_size=1):
        zero = hl.zeros([], dtype=torch.int32)
        first = int32(tile_b.id, zero) * chunks
        count = hl.zeros([width], dtype=torch.int32)
        dropped = hl.zeros([], dtype=torch.int32)
        # Loop over chunks, because a loop over slots would be masked and take 1.7 times as long.
        for tile_c in hl.tile(chunks, block_size=1):
            slot = (first + int32(tile_c.id, zero)) * chunk + hl.arange(chunk)
            expert = _expert(topk_ids, slot, R, E)
            kept = expert < E
            same = expert[:, None] == expert[None, :]
            earlier = same & (hl.arange(chunk)[:, None] > hl.arange(chunk)[None, :])
            rank = torch.sum(earlier.to(torch.int32), dim=1, dtype=torch.int32)
            rank = rank + torch.where(kept, lookup(count, torch.where(kept, expert, 0)), dropped)
            hl.store(ranks, [slot], rank, extra_mask=slot < R)
            count = count + histogram(expert, width, kept, count)
            dropped = dropped + torch.sum((expert == E).to(torch.int32), dtype=torch.int32)
        counts[tile_b.id, hl.arange(width)] = count
    return counts


@kernel()
def place_slots(
    topk_ids: torch.Tensor,  # [R]
    counts: torch.Tensor,  # [runs, width] int32, from count_experts
    group_offsets: torch.Tensor,  # [E + 1] int32
    row_to_slot: torch.Tensor,  # [R] int32
    slot_to_row: torch.Tensor,  # [R] int32; on entry, the ranks from count_experts
    chunks: int,
    E: hl.constexpr,
    width: hl.constexpr,
    chunk: hl.constexpr,
) -> torch.Tensor:
    """One program per run; a slot's row follows the lower experts, then its expert's earlier runs and earlier slots."""
    hl.pdl_wait()  # launched while count_experts still runs
    R, runs = topk_ids.size(0), counts.size(0)
    for tile_b in hl.tile(runs, block_size=1):
        zero = hl.zeros([], dtype=torch.int32)
        first = int32(tile_b.id, zero) * chunks
        column = hl.arange(width)
        total = hl.zeros([width], dtype=torch.int32)
        before = hl.zeros([width], dtype=torch.int32)
        for tile_i in hl.tile(runs):
            count = counts[tile_i.index, column]
            total = total + torch.sum(count, dim=0, dtype=torch.int32)
            earlier = torch.where(tile_i.index[:, None] < tile_b.id, count, 0)
            before = before + torch.sum(earlier, dim=0, dtype=torch.int32)
        ends = hl.cumsum(total, dim=0)
        next_row = ends - total + before
        dropped = torch.clamp(first * chunk, max=R) - torch.sum(before, dtype=torch.int32)
        next_dropped = torch.sum(total, dtype=torch.int32) + dropped
        if tile_b.id == 0:
            hl.store(group_offsets, [column + 1], ends, extra_mask=column < E)
            group_offsets[0] = 0
        for tile_c in hl.tile(chunks, block_size=1):
            slot = (first + int32(tile_c.id, zero)) * chunk + hl.arange(chunk)
            expert = _expert(topk_ids, slot, R, E)
            kept = expert < E
            start = torch.where(kept, lookup(next_row, torch.where(kept, expert, 0)), next_dropped)
            row = start + hl.load(slot_to_row, [slot], extra_mask=slot < R)
            hl.store(slot_to_row, [slot], row, extra_mask=slot < R)
            hl.store(row_to_slot, [row], slot, extra_mask=slot < R)
    return slot_to_row


def plan_route(builder: Builder, tensors: Operands, options: tuple[int]) -> tuple[SymbolicTensor, ...]:
    """Plan group_offsets `[E + 1]`, row_to_slot and slot_to_row `[R]` from topk_ids `[T, top_k]` and E, none 0."""
    (topk_ids,), (E,) = tensors, options
    R = topk_ids.flatten().size(0)
    if topk_ids.is_contiguous():
        topk_ids = topk_ids.flatten()
    else:
        topk_ids = builder.call("contiguous", (topk_ids,), ((R,), topk_ids.dtype))
    outs = tuple(builder.alloc((n,), torch.int32) for n in (E + 1, R, R))
    if most(R) <= RANK_UP_TO:
        builder.launch(rank_slots, (topk_ids, *outs, E, _RANK_BLOCK), _RANK_CONFIG)
        return outs
    width = max(16, 1 << (E - 1).bit_length())
    # Every program of the second launch reads the counts of all runs, so the number of runs is limited.
    chunks = 1 if most(R) < 1 << 15 else max(4, -(-most(R) // (_MOST_RUNS * _CHUNK)))
    runs = (R + (chunks * _CHUNK - 1)) // (chunks * _CHUNK)
    counts = builder.alloc((runs, width), torch.int32)
    shape = (chunks, E, width, _CHUNK)
    builder.launch(count_experts, (topk_ids, counts, outs[2], *shape), _COUNT_CONFIG)
    config = Config(block_sizes=[max(8, _TABLE // width)], num_warps=8)
    builder.launch(place_slots, (topk_ids, counts, *outs, *shape), config)
    return outs
