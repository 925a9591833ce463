"""Group sizes, inputs, the error budget, and FLOP and byte counts, for tests and benchmarks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Literal, TypedDict, get_args

import torch
from torch import Tensor

from . import reference
from .checks import check_grouped_gemm, check_int, clamp_offsets
from .packing import group_offsets_from_sizes
from .scaled import ScaledTensor

SizeKind = Literal["uniform", "softmax", "zipf", "one", "nine-tenths", "empty", "half-empty", "random"]

# Large groups are compared in blocks of rows, so that no float64 temporary exceeds 128 MiB (except that of B).
_BLOCK_ELEMENTS = 2**24


class CloseReport(TypedDict):
    """The group whose error is closest to its budget; group -1 if there was nothing to compare."""

    group: int
    max_error: float
    max_plain_error: float
    budget: float
    ratio: float  # max_error / budget, at most 1


def group_sizes_for(kind: SizeKind, G: int, M: int, seed: int = 0) -> list[int]:
    """Return the sizes of G groups with M rows in total.

    Kinds:
        uniform: as even as possible; the first `M % G` groups are one row larger.
        softmax: M draws of a group with the probabilities `softmax(0.5 * randn(G))`, by `torch.multinomial`.
        zipf: the same with probabilities proportional to `(g + 1) ** -1.5`, in float64.
        one: every row in group `G // 2`.
        nine-tenths: all but `M // 10` rows in group `G // 2`, the others as in uniform; for `G = 1` all rows.
        empty: groups 0, 3, 6, ... and the last one are empty, the others as in random.
        half-empty: groups 1, 3, 5, ... are empty, the others as in softmax.
        random: as softmax, with the heavy-tailed `softmax(2 * randn(G))`.

    One CPU `torch.Generator().manual_seed(seed)` draws first `randn` (float32), then `multinomial`. For "empty" and
    "half-empty", `randn` draws one number for each group that is not meant to be empty.

    Raises:
        ValueError: an unknown kind, a negative G or M, or rows without a group to hold them (`G = 0`, or
            "empty" with `G < 3`).
    """
    if kind not in get_args(SizeKind):
        raise ValueError(f"kind: expected one of {', '.join(get_args(SizeKind))}, got {kind!r}")
    if G < 0 or M < 0:
        raise ValueError(f"G, M: expected at least 0, got G = {G}, M = {M}")
    sizes = [0] * G
    if M == 0:
        return sizes
    groups = list(range(G))
    if kind == "one":
        groups = groups[G // 2 :][:1]
    elif kind == "nine-tenths" and G > 1:
        sizes[G // 2] = M - M // 10
        groups.remove(G // 2)
        M //= 10
    elif kind == "empty":
        groups = [g for g in groups[:-1] if g % 3]
    elif kind == "half-empty":
        groups = groups[::2]
    if not groups:
        raise ValueError(f"G: no group of kind {kind!r} can hold M = {M} rows, got G = {G}")
    if kind in ("uniform", "one", "nine-tenths"):
        counts = [M // len(groups) + (i < M % len(groups)) for i in range(len(groups))]
    else:
        counts = _draw_counts(kind, len(groups), M, seed)
    for g, count in zip(groups, counts, strict=True):
        sizes[g] = count
    return sizes


def make_inputs(
    sizes: Sequence[int],
    N: int,
    K: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    per_group: bool = True,
    transposed: bool = False,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random `(A_packed, B, group_offsets)` for groups of the given sizes.

    `A_packed [M, K]` is standard normal and `B` normal with variance 1/K, so that outputs have variance 1.
    `B` is `[G, K, N]`, or `[K, N]` unless `per_group`; with `transposed` it is a view of a contiguous
    `[G, N, K]` or `[N, K]`. The offsets are int32. One generator on `device`, seeded with `seed`,
    draws A, then B.
    """
    generator = torch.Generator(device).manual_seed(seed)
    A_packed = torch.randn(sum(sizes), K, dtype=dtype, device=device, generator=generator)
    matrix = (N, K) if transposed else (K, N)
    shape = (len(sizes), *matrix) if per_group else matrix
    B = torch.randn(shape, dtype=dtype, device=device, generator=generator).mul_(max(K, 1) ** -0.5)
    if transposed:
        B = B.transpose(-2, -1)
    return A_packed, B, group_offsets_from_sizes(torch.tensor(sizes, dtype=torch.int32, device=device))


def make_experts(
    E: int,
    H: int,
    width: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    transposed: bool = False,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return random weights of E experts, `w_gate_up [E, 2 * width, H]` and `w_down [E, H, width]`.

    Both are normal; the variance is 1 / H for the first, 1 / width for the second. With `transposed` they are
    `[E, H, 2 * width]` and `[E, width, H]`. One generator on `device`, seeded with `seed`, draws `w_gate_up`, then
    `w_down`.
    """
    generator = torch.Generator(device).manual_seed(seed)
    weights = []
    for outputs, inputs in ((2 * width, H), (H, width)):
        shape = (E, inputs, outputs) if transposed else (E, outputs, inputs)
        weight = torch.randn(shape, dtype=dtype, device=device, generator=generator)
        weights.append(weight.mul_(max(inputs, 1) ** -0.5))
    return weights[0], weights[1]


def make_tokens(
    T: int, H: int, E: int, top_k: int, *, dtype: torch.dtype, device: torch.device | str, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random `(hidden, topk_ids, topk_weights)` of T tokens, each with `top_k` different experts out of E.

    `hidden [T, H]` is standard normal, from a generator on `device`. The ids `[T, top_k]`, int64, are drawn without
    replacement with the probabilities `softmax(0.5 * randn(E))`. The topk_weights `[T, top_k]`, in `dtype`, are
    `softmax(randn(T, top_k))`. One CPU generator draws `randn(E)`, the ids and `randn(T, top_k)`, in this order. Both
    generators are seeded with `seed`.
    """
    check_int("top_k", top_k, 1, E)
    hidden = torch.randn(T, H, dtype=dtype, device=device, generator=torch.Generator(device).manual_seed(seed))
    generator = torch.Generator("cpu").manual_seed(seed)
    probabilities = torch.softmax(0.5 * torch.randn(E, generator=generator, dtype=torch.float32, device="cpu"), 0)
    topk_ids = torch.multinomial(probabilities.expand(T, E), top_k, generator=generator)
    topk_weights = torch.softmax(torch.randn(T, top_k, generator=generator, dtype=torch.float32, device="cpu"), 1)
    return hidden, topk_ids.to(device), topk_weights.to(device, dtype)


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Have plain PyTorch compute in the dtypes of its arguments."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


@torch.no_grad()
@_without_autocast()
def assert_scaled_grouped_gemm_close(
    out: Tensor,  # [M, N]
    A_packed: ScaledTensor,  # [M, K]
    B: ScaledTensor,  # [K, N] or [G, K, N]
    group_offsets: Tensor,  # [G + 1]
    bias: Tensor | None = None,  # [G, N]
) -> None:
    """Compare the product of fp8 operands with float64, group by group: see `assert_within_budget`.

    On a GPU the budget has 2**-12 max(|A| @ |B|) in place of 2 eps(float32) max(|A| @ |B|), because Hopper's tensor
    cores accumulate products of fp8 in about 14 bits. Rows outside all groups must be exact zeros.

    Raises:
        AssertionError, ValueError: as in `assert_within_budget`; also AssertionError for a shape that is not `[M, N]`,
            and for nonzero rows outside groups.
    """
    out_dtype = getattr(out, "dtype", None)
    plain = reference.scaled_grouped_gemm(A_packed, B, group_offsets, bias, out_dtype=out_dtype)
    A_exact, B_exact = (reference.dequantize(x).double() for x in (A_packed, B))
    groups = _groups(out, len(A_exact), B_exact.shape[-1], group_offsets)
    for g, (start, end) in enumerate(groups):
        rows, weight = A_exact[start:end], B_exact[g] if B_exact.dim() == 3 else B_exact
        exact, scale = rows @ weight, (rows.abs() @ weight.abs()).amax().item() if out[start:end].numel() else 0.0
        if bias is not None:
            exact = exact + bias[g].double()
        scale *= 2**-13 / torch.finfo(torch.float32).eps if out.is_cuda else 1
        assert_within_budget(out[start:end], plain[start:end], exact, scale=scale, name=f"group {g}")


@torch.no_grad()
def assert_grouped_gemm_close(
    out: Tensor,  # [M, N]
    A_packed: Tensor,  # [M, K]
    B: Tensor,  # [K, N] or [G, K, N]
    group_offsets: Tensor,  # [G + 1]
    *,
    plain_dtype: torch.dtype | None = None,
) -> CloseReport:
    """Compare the result of a grouped GEMM with float64. Its error may be twice that of plain PyTorch.

    For each group the limit of `max|out - exact|` is `2 * max|plain - exact| + 2 * eps(float32) * max(|A| @ |B|)`. Here
    `exact` is the product of the inputs in float64, and `plain` that of plain PyTorch in `out.dtype`: `torch.mm` on a
    GPU for float32 results of operands of one other dtype, otherwise `reference.grouped_gemm`. Where `exact`, rounded
    to `out.dtype`, is NaN, inf or -inf, `out` must be the same; the maxima exclude these elements. Rows outside all
    groups must be exact zeros.

    Args:
        out: `[M, N]`, in any floating-point dtype.
        A_packed, B, group_offsets: the inputs, as for `reference.grouped_gemm`.
        plain_dtype: a dtype to which the inputs of `plain` are converted first, for a kernel that multiplies in
            another dtype than that of its inputs.

    Raises:
        AssertionError: `out` is wrong; the message names the first wrong group, its error and its budget.
        ValueError: the budget of a group is over a tenth of `max|exact|`. The inputs are unsuitable, because a result
            of zeros might pass. If `exact` is all zeros, `out` must be all zeros.
        TypeError: unsupported dtypes.
    """
    check_grouped_gemm(A_packed, B, group_offsets, getattr(out, "dtype", None), reference=True)
    report = CloseReport(group=-1, max_error=0.0, max_plain_error=0.0, budget=0.0, ratio=0.0)
    for g, (start, end) in enumerate(_groups(out, A_packed.shape[0], B.shape[-1], group_offsets)):
        if out[start:end].numel() == 0:
            continue
        weight = B[g] if B.dim() == 3 else B
        error, plain_error, largest, scale, differing = _compare(
            out[start:end], A_packed[start:end], weight, plain_dtype
        )
        name = f"group {g} (rows {start}:{end})"
        if differing:
            raise AssertionError(f"{name}: NaN or infinity in other places than in the reference")
        budget = _budget(name, error, plain_error, largest, scale)
        ratio = error / budget if budget else 0.0
        if report["group"] < 0 or ratio > report["ratio"]:
            report = CloseReport(group=g, max_error=error, max_plain_error=plain_error, budget=budget, ratio=ratio)
    return report


def _groups(out: Tensor, M: int, N: int, group_offsets: Tensor) -> list[tuple[int, int]]:
    """Return the first row and the end of each group, after checking the shape of `out` and its rows in no group."""
    if not isinstance(out, Tensor):
        raise TypeError(f"out: expected a tensor, got {type(out).__name__}")
    if out.shape != (M, N):
        raise AssertionError(f"out: expected shape {[M, N]}, got {list(out.shape)}")
    offsets = clamp_offsets(group_offsets, M).tolist()
    for start, end in ((0, offsets[0]), (offsets[-1], M)):
        nonzero = out[start:end].ne(0).any(dim=1).nonzero()
        if len(nonzero):
            raise AssertionError(f"row {start + int(nonzero[0])} is in no group: expected exact zeros")
    return list(pairwise(offsets))


@torch.no_grad()
def assert_within_budget(out: Tensor, plain: Tensor, exact: Tensor, *, scale: float = 0.0, name: str = "out") -> float:
    """Compare any result with float64. Its error may be twice that of plain PyTorch.

    The limit of `max|out - exact|` is `2 * max|plain - exact| + 2 * eps(float32) * scale`.

    Args:
        out: the result to test.
        plain: the result of plain PyTorch for the same inputs in the same dtypes.
        exact: the result in float64; finite.
        scale: the largest sum of the absolute values of an element's terms.
        name: the name of `out` in messages.

    Returns:
        The error as a share of the budget, at most 1.

    Raises:
        AssertionError: a shape that differs from that of `plain` or `exact`, a dtype that differs from that of `plain`,
            or too large an error.
        ValueError: the budget is over a tenth of `max|exact|`, so a result of zeros might pass. If `exact` is all
            zeros, `out` must be all zeros.
    """
    if (out.shape, out.dtype) != (plain.shape, plain.dtype):
        raise AssertionError(f"{name}: expected {list(plain.shape)} {plain.dtype}, got {list(out.shape)} {out.dtype}")
    if exact.shape != out.shape:
        raise AssertionError(f"{name}: expected {list(exact.shape)} as exact, got {list(out.shape)}")
    if out.numel() == 0:
        return 0.0
    error, plain_error = ((x.double() - exact).abs().amax().item() for x in (out, plain))
    largest = exact.abs().amax().item()
    budget = _budget(name, error, plain_error, largest, scale)
    return error / budget if budget else 0.0


def _budget(name: str, error: float, plain_error: float, largest: float, scale: float) -> float:
    """Return the limit of `error`, and check it as `assert_within_budget` does. `largest` is max|exact|."""
    budget = error_budget(plain_error, scale) if largest > 0 else 0.0
    # `not <=` instead of `>`, because a plain result that overflows makes the budget inf or NaN.
    if not budget <= largest / 10:
        raise ValueError(f"{name}: budget too loose: {budget:.3e} is over a tenth of max|exact| = {largest:.3e}")
    if not error <= budget:
        raise AssertionError(
            f"{name}: error {error:.3e} exceeds the budget {budget:.3e} "
            f"(plain PyTorch's error: {plain_error:.3e}, max|exact|: {largest:.3e})"
        )
    return budget


def error_budget(plain_error: float, scale: float) -> float:
    """Return the limit of an error: twice that of plain PyTorch, plus `2 * eps(float32) * scale`.

    Args:
        plain_error: the largest error of plain PyTorch.
        scale: the largest sum of the absolute values of an element's terms.
    """
    return 2 * plain_error + 2 * torch.finfo(torch.float32).eps * scale


def flop_count(sizes: Sequence[int], N: int, K: int) -> int:
    """Return the floating-point operations of a grouped GEMM: 2 per multiply-add, without padding."""
    return 2 * sum(sizes) * N * K


def byte_count(
    sizes: Sequence[int], N: int, K: int, dtype: torch.dtype, out_dtype: torch.dtype, per_group: bool
) -> int:
    """Return the bytes that a grouped GEMM has to move: each input read once, the output written once.

    Counts neither weights of empty groups nor offsets. `per_group`: `B` is `[G, K, N]`.
    """
    rows = sum(sizes)
    weights = sum(size > 0 for size in sizes) if per_group else int(rows > 0)
    return (rows + weights * N) * K * dtype.itemsize + rows * N * out_dtype.itemsize


def _draw_counts(kind: str, G: int, M: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    if kind == "zipf":
        weights = torch.arange(1, G + 1, dtype=torch.float64, device="cpu") ** -1.5
    else:
        spread = 0.5 if kind in ("softmax", "half-empty") else 2.0
        weights = torch.softmax(spread * torch.randn(G, generator=generator, dtype=torch.float32, device="cpu"), 0)
    drawn = torch.multinomial(weights, M, replacement=True, generator=generator)
    return drawn.bincount(minlength=G).tolist()


@_without_autocast()
def plain_product(
    A: Tensor,  # [M, K]
    B: Tensor,  # [K, N]
    out_dtype: torch.dtype,
) -> Tensor:  # [M, N]
    """Return PyTorch's product of one group; on a GPU by tensor cores, which accumulate less exactly than float32."""
    if A.is_cuda and A.numel() and A.dtype == B.dtype and A.element_size() == 2 and out_dtype == torch.float32:
        return torch.mm(A, B, out_dtype=out_dtype)
    return reference.grouped_gemm(A, B, torch.tensor([0, len(A)], device=A.device), out_dtype=out_dtype)


def _compare(
    out: Tensor,  # [M_g, N]
    A: Tensor,  # [M_g, K]
    B: Tensor,  # [K, N]
    plain_dtype: torch.dtype | None,
) -> list[float]:
    """Return max|out - exact|, max|plain - exact|, max|exact|, max(|A| @ |B|), 1 if NaN or infinities differ."""
    B_exact = B.double()
    block = max(1, _BLOCK_ELEMENTS // max(A.shape[1], B.shape[1]))
    maxima = torch.zeros(5, dtype=torch.float64, device=out.device)
    for out_block, A_block in zip(torch.split(out, block), torch.split(A, block), strict=True):
        A_exact = A_block.double()
        exact = A_exact @ B_exact
        plain = plain_product(A_block.to(plain_dtype or A.dtype), B.to(plain_dtype or B.dtype), out.dtype)
        rounded = exact.to(out.dtype)
        finite = rounded.isfinite()
        same = torch.where(finite, out_block.isfinite(), (out_block == rounded) | (out_block.isnan() & rounded.isnan()))
        terms = (out_block.double() - exact, plain.double() - exact, exact, A_exact.abs() @ B_exact.abs())
        peaks = [term.abs().masked_fill(~finite, 0).amax() for term in terms]
        maxima = maxima.maximum(torch.stack([*peaks, (~same).any().double()]))
    return maxima.tolist()
