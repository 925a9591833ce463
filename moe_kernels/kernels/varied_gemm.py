"""Varied grouped GEMM: `out[p] = A[p] @ B[p]`, every problem with sizes, strides and addresses of its own.

A fixed number of workers walks the tiles of all problems, in order: worker w of W takes tiles w, w + W, ... Which
problem a tile is of, and where that lies in memory, is looked up in a table on the device. Addresses in it count from
the first tensor of each list, so that ordinary loads reach all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import helion
import helion.language as hl
import torch
from torch import Tensor

from moe_kernels.configs import varied as rules
from moe_kernels.kernels.launch import compile_kernel, kernel, tf32_allowed, worker_count
from moe_kernels.schedule import tile_counts


class Layout(NamedTuple):
    """What the kernel is compiled for, besides dtypes and blocks: what holds for all problems.

    contiguous_a, _b, _c: the dimension of A, B and out that is contiguous: 0, 1, or 2 for neither. A unit is what all
    extents (m, n, k), or all addresses and strides (a, b, c) are multiples of, in elements: 1, 2, 4 or 8. The table
    holds multiples of it, so that the compiler sees how wide a load may be.
    """

    contiguous_a: int
    contiguous_b: int
    contiguous_c: int
    unit_a: int
    unit_b: int
    unit_c: int
    unit_m: int
    unit_n: int
    unit_k: int


def _preset(*args: Any) -> helion.Config:
    A, odd_P, block_m, block_n = args[3], args[6], args[-2], args[-1]
    return rules.make(odd_P // 2, block_m, block_n, rules.BLOCK_K[A.element_size()], 4, 3, 1).config


def _quotient(a: Tensor, b: Tensor) -> Tensor:
    """a // b for a >= 0, b > 0, without the sign handling of Python's `//`."""
    return hl.inline_triton("({0} // {1}).to(tl.int32)", args=(a, b), output_like=a)


@kernel(_preset)
def varied(
    ends: Tensor,  # [P] int64: how many tiles there are up to the end of each problem
    num_tiles: Tensor,  # [] int64: ends[P - 1]
    table: Tensor,  # [P, 16] int64: M, N, K, first tile, tiles in a row; start and two strides of A, of B, of out; 0, 0
    A: Tensor,  # [_]: what the addresses of A[p] count from; likewise B and out
    B: Tensor,
    out: Tensor,
    odd_P: int,  # 2 * P + 1: odd, and so never a multiple of 16, which Triton would compile anew for
    contiguous_a: hl.constexpr,
    contiguous_b: hl.constexpr,
    contiguous_c: hl.constexpr,
    unit_a: hl.constexpr,
    unit_b: hl.constexpr,
    unit_c: hl.constexpr,
    unit_m: hl.constexpr,
    unit_n: hl.constexpr,
    unit_k: hl.constexpr,
    block_m: hl.constexpr,
    block_n: hl.constexpr,
) -> Tensor:
    """One worker per SM, or a few; each finds its tiles' problems by counting the ends before a tile.

    The next launch may begin before this one ends, and waits for it.
    """
    hl.pdl_launch_dependents()
    hl.pdl_wait()
    for tile_t in hl.tile(num_tiles, block_size=1):
        p = hl.zeros([], dtype=torch.int32)
        t = (tile_t.begin + p).to(torch.int32)
        P = hl.inline_triton("({0} // 2).to(tl.int32)", args=(odd_P,), output_like=p)
        for tile_p in hl.tile(P):
            before = (ends[tile_p] <= t) & (tile_p.index < P)
            p = p + torch.sum(before.to(torch.int32), dtype=torch.int32)
        M = (table[p, 0] * unit_m).to(torch.int32)
        N = (table[p, 1] * unit_n).to(torch.int32)
        K = (table[p, 2] * unit_k).to(torch.int32)
        tiles_n = table[p, 4].to(torch.int32)
        local = t - table[p, 3].to(torch.int32)
        tile_m = _quotient(local, tiles_n)
        tile_n = local - tile_m * tiles_n
        a0 = table[p, 5] * unit_a
        b0 = table[p, 8] * unit_b
        c0 = table[p, 11] * unit_c
        rows = (tile_m * block_m + hl.arange(block_m)).to(torch.int64)
        columns = (tile_n * block_n + hl.arange(block_n)).to(torch.int64)
        if contiguous_a == 1:
            a_rows = a0 + rows * (table[p, 6] * unit_a)
        elif contiguous_a == 0:
            a_rows = a0 + rows
        else:
            a_rows = a0 + rows * table[p, 6]
        a_stride = table[p, 7] * unit_a
        if contiguous_b == 1:
            b_columns = b0 + columns
        elif contiguous_b == 0:
            b_columns = b0 + columns * (table[p, 10] * unit_b)
        else:
            b_columns = b0 + columns * table[p, 10]
        b_stride = table[p, 9] * unit_b
        acc = hl.zeros([block_m, block_n], dtype=torch.float32)
        for tile_k in hl.tile(K):
            k = tile_k.index.to(torch.int64)
            if contiguous_a == 1:
                a_at = a_rows[:, None] + k[None, :]
            else:
                a_at = a_rows[:, None] + k[None, :] * a_stride
            if contiguous_b == 0:
                b_at = k[:, None] + b_columns[None, :]
            else:
                b_at = k[:, None] * b_stride + b_columns[None, :]
            a = hl.load(A, [a_at], extra_mask=(rows < M)[:, None])
            b = hl.load(B, [b_at], extra_mask=(columns < N)[None, :])
            acc = hl.dot(a, b, acc=acc)
        if contiguous_c == 1:
            c_at = c0 + rows[:, None] * (table[p, 12] * unit_c) + columns[None, :]
        elif contiguous_c == 0:
            c_at = c0 + rows[:, None] + columns[None, :] * (table[p, 13] * unit_c)
        else:
            c_at = c0 + rows[:, None] * table[p, 12] + columns[None, :] * table[p, 13]
        hl.store(out, [c_at], acc.to(out.dtype), extra_mask=(rows < M)[:, None] & (columns < N)[None, :])
    return out


class Launch:
    """A table on the device, and the kernel that walks it; calling this launches it.

    `group_A`, `group_B`, `outs`: `[M_p, K_p]`, `[K_p, N_p]`, `[M_p, N_p]`, of one dtype and device, nothing checked;
    M_p and N_p may not be 0. All of them are read and written where they lie. Without `choice` one is made.
    """

    def __init__(
        self,
        group_A: Sequence[Tensor],
        group_B: Sequence[Tensor],
        outs: Sequence[Tensor],
        choice: rules.Choice | None = None,
    ):
        shapes = tuple((a.size(0), b.size(1), a.size(1)) for a, b in zip(group_A, group_B, strict=True))
        self.kept = group_A, group_B, outs  # the table has their addresses
        first = outs[0]
        bases = [next((tensor for tensor in tensors if tensor.numel()), first) for tensors in (group_A, group_B, outs)]
        operands = [_Operand(tensors, base) for tensors, base in zip((group_A, group_B, outs), bases, strict=True)]
        most = 16 // first.element_size()
        layout = Layout(
            *(operand.contiguous for operand in operands),
            *(operand.unit(most) for operand in operands),
            *(math.gcd(most, *extents) for extents in zip(*shapes, strict=True)),  # M, N, K
        )
        aligned = layout.contiguous_a < 2 and layout.contiguous_b < 2 and set(layout[3:5]) == {most}
        if choice is None:
            problem = rules.Problem(
                shapes,
                first.dtype,
                aligned,
                b_columns=layout.contiguous_b == 0,
                num_sms=worker_count(first.device),
                tf32=tf32_allowed(first.dtype),
                device=first.device,
            )
            choice = rules.choose(problem)
        blocks = choice.block_m, choice.block_n
        counts = tile_counts(shapes, *blocks)
        ends = list(itertools.accumulate(m * n for m, n in counts))
        records = [ends[-1], 0]
        for p, (shape, (m, n)) in enumerate(zip(shapes, counts, strict=True)):
            records += (extent // unit for extent, unit in zip(shape, layout[6:], strict=True))
            records += (ends[p] - m * n, n)
            for operand, unit in zip(operands, layout[3:6], strict=True):
                records += (value // unit for value in operand.places[p])
            records += (0, 0)
        P = len(shapes)
        # Each part begins at a multiple of 16 bytes, whatever P.
        total, table, ends_ = _on_device(records + ends, first.device).split([2, 16 * P, P])
        self.tensors = (ends_, total.select(0, 0), table.view(P, 16), *(base.as_strided((1,), (1,)) for base in bases))
        self.constants = (2 * P + 1, *layout, *blocks)
        self.run = _compiled(self.tensors, layout, choice)

    def __call__(self, buffer: Tensor | None = None) -> None:
        """Write to `buffer [_]`, if given, in place of the one that all of `outs` were parts of."""
        if buffer is None:
            self.run(*self.tensors, *self.constants)
        else:
            self.run(*self.tensors[:5], buffer, *self.constants)


class _Operand:
    """Where the matrices of one list lie: `places[p]` are the start, from `base` on, and the strides, in elements."""

    def __init__(self, tensors: Sequence[Tensor], base: Tensor):
        size, origin = base.element_size(), base.data_ptr()
        self.places = []
        contiguous = {0, 1}
        for tensor in tensors:
            if tensor.numel() == 0:
                self.places.append((0, 0, 0))
                continue
            # The stride of an extent of 1 is of no importance.
            strides = [
                stride if extent > 1 else 0 for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)
            ]
            self.places.append(((tensor.data_ptr() - origin) // size, *strides))
            contiguous -= {dim for dim in (0, 1) if tensor.size(dim) > 1 and strides[dim] != 1}
        self.contiguous = max(contiguous, default=2)

    def unit(self, most: int) -> int:
        """What the starts, and the strides that the kernel looks at, are multiples of; at most `most`."""
        if self.contiguous == 2:
            return 1
        return math.gcd(most, *(place[i] for place in self.places for i in (0, 2 - self.contiguous)))


_kernels: dict[tuple[Any, ...], Callable[..., None]] = {}
_MOST_KERNELS = 1024


def _compiled(tensors: tuple[Tensor, ...], layout: Layout, choice: rules.Choice) -> Callable[..., None]:
    ends, total, table, A, B, out = tensors
    tf32 = tf32_allowed(A.dtype)
    key = (layout, choice, out.device, out.dtype, tf32, *(tensor.data_ptr() % 16 for tensor in (A, B, out)))
    if key not in _kernels:
        if len(_kernels) >= _MOST_KERNELS:
            _kernels.clear()
        several = ends.new_empty(4), total, table.new_empty(4, 16), *(x.new_empty(2) for x in (A, B, out))
        args = (*several, 3, *layout, choice.block_m, choice.block_n)
        _kernels[key] = compile_kernel(varied, args, choice.config, wide=True, tf32=tf32)
    return _kernels[key]


def _on_device(values: list[int], device: torch.device) -> Tensor:
    """int64 on `device`, by one copy that the host does not wait for."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=torch.int64)
    return torch.tensor(values, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)
