"""From the router's choice of experts to rows sorted by expert, and back.

topk_ids, topk_weights --route--> Routing          hidden --permute--> rows --...--> rows --unpermute--> hidden
"""

from __future__ import annotations

from torch import Tensor

from moe_kernels import checks, ops, reference
from moe_kernels.ops.gating import CHOOSE_EXPERTS
from moe_kernels.routing_maps import Routing
from moe_kernels.runtime import cache, torch_internals


def route(
    topk_ids: Tensor,  # [T, top_k]
    topk_weights: Tensor,  # [T, top_k]
    num_experts: int,
    *,
    validate: bool | None = None,
) -> Routing:
    """Sort the slots of `topk_ids` by expert, stably, on the device and without a sync.

    Args:
        topk_ids: `[T, top_k]` int32 or int64, any strides. An id outside `0..num_experts - 1` drops its slot.
        topk_weights: `[T, top_k]`, the weight of each id; bfloat16, float16 or float32, on a CPU also float64; returned
            unchanged.
        num_experts: E.
        validate: True raises ValueError for an id that would drop its slot, and waits for the device; None does so if
            the environment variable MOE_KERNELS_VALIDATE was 1 at import.

    Raises:
        TypeError, ValueError: an argument has a wrong dtype, or a wrong rank, shape or device.
        RuntimeError: validation while torch.vmap vectorizes over the ids.
        ImportError: as for `grouped_gemm`.
    """
    checks.check_route(topk_ids, topk_weights, num_experts)
    if checks.validation_enabled(validate):
        checks.validate_ids(topk_ids, num_experts)
    group_offsets, row_to_slot, slot_to_row = ops.route(topk_ids, num_experts)
    return Routing(group_offsets, row_to_slot, slot_to_row, topk_weights)


def permute(hidden: Tensor, routing: Routing) -> Tensor:  # [T, H] -> [R, H]
    """Copy each token's row to the rows of its slots: `rows[slot_to_row[t * top_k + k]] = hidden[t]`.

    Rows of dropped slots are zeros. Differentiable in `hidden`.

    Raises:
        TypeError, ValueError: an argument has a wrong dtype, or a wrong rank, shape or device.
        ImportError: as for `grouped_gemm`.
    """
    checks.check_moved("hidden", hidden, "T", routing)
    top_k = routing.topk_weights.size(1)
    return ops.scatter_rows(hidden, None, routing.slot_to_row, routing.group_offsets, top_k, hidden.dtype)


def unpermute(rows: Tensor, routing: Routing, *, weighted: bool = True) -> Tensor:  # [R, H] -> [T, H]
    """Add up each token's rows: `hidden[t] = sum over k of topk_weights[t, k] * rows[slot_to_row[t * top_k + k]]`.

    Rows are weighted and added in float32 (on a CPU float64 if an argument is) in the order of k, and rounded once.
    Dropped slots add nothing, even where their rows hold NaN. Differentiable in `rows` and the weights. With
    `weighted=False` all weights are 1, which makes this the adjoint of `permute`.

    Returns:
        `[T, H]` in the dtype of `rows`.

    Raises:
        TypeError, ValueError: an argument has a wrong dtype, or a wrong rank, shape or device.
        ImportError: as for `grouped_gemm`.
    """
    checks.check_bools(weighted=weighted)
    checks.check_moved("rows", rows, "R", routing)
    topk_weights = routing.topk_weights if weighted else None
    top_k = routing.topk_weights.size(1)
    return ops.combine_rows(rows, topk_weights, routing.slot_to_row, routing.group_offsets, top_k, rows.dtype)


def topk_softmax(
    logits: Tensor,  # [T, E]
    top_k: int,
    *,
    renormalize: bool,
) -> tuple[Tensor, Tensor]:
    """Choose the top_k experts by `softmax(logits)`, computed in float32. The topk_weights are differentiable.

    Of equal probabilities, kernels choose that of the lowest expert. NaN is more than any other.

    Args:
        logits: `[T, E]`, bfloat16, float16, float32 or float64.
        top_k: experts per token, at most E.
        renormalize: divide a token's topk_weights by their sum, which equals a softmax over only the chosen logits.
            Mixtral does this, OLMoE does not. The option is `norm_topk_prob` in configurations of transformers and
            `route_norm` in those of torchtitan.

    Returns:
        `topk_ids [T, top_k]` int64, the most probable first, and `topk_weights [T, top_k]` float32, or float64 for
        float64 logits.

    Raises:
        TypeError, ValueError: logits have a wrong dtype or rank; top_k is below 1 or above the number of experts.
    """
    return _choose_experts(logits, None, top_k, True, renormalize, 1, 1, 1.0)


def topk_sigmoid(
    logits: Tensor,  # [T, E]
    top_k: int,
    *,
    renormalize: bool,
    bias: Tensor | None = None,  # [E]
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose the top_k experts by `sigmoid(logits) + bias`; the topk_weights are the chosen experts' sigmoids.

    The gating of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2). The experts form `num_groups` equal groups. A group's
    score is the sum of its two best experts' scores, and only experts of the `top_groups` best groups can be chosen.
    The bias balances the load of the experts; it affects the choice, not the weights. An expert with a bias of -inf is
    chosen only if the chosen groups have fewer than top_k others. The topk_weights are differentiable in the logits.
    Equal scores and NaN are treated as by `topk_softmax`.

    Args:
        logits: `[T, E]`, bfloat16, float16, float32 or float64.
        top_k: experts per token, at most `top_groups * E / num_groups`.
        renormalize: divide a token's topk_weights by their sum, as DeepSeek-V3 does; see `topk_softmax`.
        bias: `[E]`, dtypes as for `logits`, or None for zeros.
        num_groups, top_groups: as above; with one group every expert can be chosen.
        scale: a factor that multiplies the topk_weights at the end.

    Returns:
        `topk_ids [T, top_k]` int64, the best first, and `topk_weights [T, top_k]` float32, or float64 for float64
        logits.

    Raises:
        TypeError: logits or bias have a wrong dtype, or an option a wrong type.
        ValueError: logits or bias have a wrong shape, `num_groups` does not divide E, `top_groups` or `top_k` is out of
            range, or the chosen groups hold fewer than top_k experts.
    """
    return _choose_experts(logits, bias, top_k, False, renormalize, num_groups, top_groups, scale)


def _choose_experts(
    logits: Tensor,  # [T, E]
    bias: Tensor | None,  # [E]
    top_k: int,
    softmax: bool,
    renormalize: bool,
    num_groups: int,
    top_groups: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    others = (top_k, renormalize, num_groups, top_groups, scale)
    # Types first, so that no symbolic top_k is compared, which would restrict it.
    given, requested = (logits, bias), (softmax, *map(type, others), *others)
    known: tuple[Tensor, Tensor] | None = cache.repeat(CHOOSE_EXPERTS, given, requested)
    if known is not None:
        return known
    checks.check_gating(logits, top_k, renormalize, bias, num_groups, top_groups, scale)
    plain = all([x is None or type(x) in torch_internals.PLAIN for x in given])
    if torch_internals.transformed() or torch_internals.forward_level() >= 0 or not plain:
        topk_ids = reference.topk_ids(logits, bias, top_k, softmax, num_groups, top_groups)
    else:
        # A program that is traced here may be differentiated later: its weights are computed below, for any scale.
        eager = torch_internals.eager(*given)
        options = (top_k, softmax, renormalize, num_groups, top_groups, float(scale) if eager else 1.0)
        topk_ids, topk_weights = ops.choose_experts(*(x if x is None else x.detach() for x in given), *options)
        if eager and not torch_internals.differentiated(logits):
            cache.remember(CHOOSE_EXPERTS, given, requested, options)
            return topk_ids, topk_weights
    factor = 1.0 * scale  # a float, also of a symbolic number, for which float() would be a constant
    return topk_ids, reference.topk_weights(logits, topk_ids, softmax, renormalize, factor)
