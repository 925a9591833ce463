"""Expert parallelism: rank p of the P ranks of a process group holds the E / P experts from `p * E / P` on.

hidden --dispatch--> rows of this rank's experts --swiglu_ffn, grouped_gemm or moe_mlp--> rows --combine--> hidden
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moe_kernels import checks
from moe_kernels.packing import group_sizes
from moe_kernels.routing import permute, route, unpermute
from moe_kernels.routing_maps import Routing
from moe_kernels.runtime import torch_internals

_NO_MEMBER = "group: expected a process group of which this rank is a member"
_NOT_IN_GRAPHS = (
    "dispatch and combine exchange rows outside of compiled graphs, which fullgraph=True and torch.export rule out: "
    "call them outside"
)
_GRAD_AND_VJP = (
    "dispatch and combine support only grad and vjp of torch.func: in place of forward mode, and of transforms that "
    "vectorize, such as vmap and jacrev, call vjp once per vector"
)


class Exchange(NamedTuple):
    """The state of a `dispatch` that `combine` needs.

    `routing` sorts this rank's slots by all E experts, and thus by destination rank. `arrival` sorts the received rows,
    which arrive in the order of the sending ranks, by the experts of this rank. `sent` and `received` are lists of the
    numbers of rows that this rank sends to, and receives from, each rank.
    """

    routing: Routing
    arrival: Routing
    sent: list[int]  # [P], number of rows sent to each rank
    received: list[int]  # [P], number of rows received from each rank
    group: Any  # dist.ProcessGroup

    @property
    def group_offsets(self) -> Tensor:
        """`[E / P + 1]` int32, the offsets of this rank's experts in the rows of `dispatch`."""
        return self.arrival.group_offsets

    @property
    def expert_ids(self) -> Tensor:
        """`[R', 1]` int64, the expert of each row of `dispatch`, in `0..E / P - 1`: the `topk_ids` for `moe_mlp`."""
        sizes = group_sizes(self.group_offsets)
        experts = torch.arange(sizes.size(0), device=sizes.device)
        return experts.repeat_interleave(sizes, output_size=sum(self.received))[:, None]


def dispatch(
    hidden: Tensor,  # [T, H]
    topk_ids: Tensor,  # [T, top_k]
    topk_weights: Tensor,  # [T, top_k]
    num_experts: int,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    validate: bool | None = None,
) -> tuple[Tensor, Exchange]:
    """Send each token's row to the ranks of its experts. Collective: all ranks of the group have to call it.

    Waits for the device once, to read the number of rows to send to and to receive from each rank.

    Args:
        hidden: `[T, H]`, this rank's tokens; T may differ between ranks and may be 0, H and the dtype may not differ.
            If it requires grad on one rank, gradients are recorded on all. With `torch.autograd.grad`, ask for its
            gradient on all ranks or on none.
        topk_ids: `[T, top_k]` int32 or int64, among the experts of all ranks; an id outside `0..num_experts - 1` drops
            its slot.
        topk_weights: `[T, top_k]`; they stay on this rank, and `combine` applies them.
        num_experts: E, a multiple of the number of ranks; if it differs between ranks, the exchange hangs or aborts.
        group: a process group or a one-dimensional `DeviceMesh`; by default all ranks.
        validate: as for `route`; all ranks raise the error if an id of one rank would drop its slot.

    Returns:
        `rows [R', H]`, the rows of this rank's experts, sorted by expert with the offsets `exchange.group_offsets`; and
        `exchange`. `moe_mlp` takes the rows as tokens with the one expert `exchange.expert_ids`. Differentiable in
        `hidden`; the backward pass is collective, too. Forward mode is not supported, and of `torch.func`'s
        transforms only `grad` and `vjp` are: call `vjp` once per vector.

    Raises:
        TypeError, ValueError: as for `route` and `permute`; `num_experts` is not a multiple of the number of ranks; a
            `DeviceMesh` of several dimensions, or a group without this rank; rows of different sizes or dtypes on the
            ranks; `topk_ids` is a meta or fake tensor.
        RuntimeError: `torch.vmap` vectorizes the call, or forward mode differentiates it; or `hidden` requires grad on
            one rank, and gradients are disabled on another.
        ImportError: as for `grouped_gemm`.
    """
    checks.check_int("num_experts", num_experts, 0)
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group: expected a one-dimensional DeviceMesh, got {group.ndim} dimensions")
        if group.get_coordinate() is None:
            raise ValueError(_NO_MEMBER)
        group = group.get_group()
    elif not (group is None or isinstance(group, dist.ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER):
        raise TypeError(f"group: expected a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}")
    P = dist.get_world_size(group)
    if P < 1:
        raise ValueError(_NO_MEMBER)
    if num_experts % P:
        raise ValueError(f"num_experts: expected a multiple of the group's {P} ranks, got {num_experts}")
    validates = checks.validation_enabled(validate)
    routing = route(topk_ids, topk_weights, num_experts, validate=False)
    if torch_internals.has_no_values(topk_ids):
        raise ValueError(
            "topk_ids: expected values, which the numbers of rows to exchange depend on, got a meta or fake tensor"
        )
    torch_internals.break_graph(
        "dispatch reads the numbers of rows on the host, as its results' shapes depend on them, which fullgraph=True "
        "and torch.export rule out: call it outside"
    )
    rows = permute(hidden, routing)

    to_send = group_sizes(routing.group_offsets).to(torch.int64).view(P, num_experts // P)
    kind = _kind(rows)
    recording = 0  # 1: could record gradients, 2: does
    if torch.is_grad_enabled():
        recording = 2 if rows.requires_grad else int(not torch_internals.wrapped(rows))
    message = F.pad(to_send, (0, 1), value=6 * kind + 2 * recording)
    if validates:  # an error here is one on all ranks, which would wait for this one
        message[:, -1] += to_send.sum() < routing.slot_to_row.size(0)
    answer = torch.empty_like(message)
    dist.all_to_all_single(answer, message, group=group)
    to_receive = answer[:, :-1]
    sent, received, last = torch.stack((to_send.sum(1), to_receive.sum(1), answer[:, -1])).tolist()
    kinds, recorded = [n // 6 for n in last], [n % 6 // 2 for n in last]
    wrong = [rank for rank, n in enumerate(last) if n % 2]
    _check_kinds("hidden", rows, kinds)
    if wrong:
        if validates:
            checks.validate_ids(topk_ids, num_experts)
        raise ValueError(
            f"topk_ids: expected 0 to {num_experts - 1}, got other ids on ranks {wrong} of the group{checks.DROPS}"
        )
    records = max(recorded) == 2
    if records and min(recorded) == 0:  # the backward pass, which is collective, would wait for these ranks
        raise RuntimeError(
            f"hidden: gradients are recorded on ranks {[rank for rank, n in enumerate(recorded) if n == 2]} of the "
            "group, and disabled, as by torch.no_grad() or in a transform of torch.func for other tensors, on ranks "
            f"{[rank for rank, n in enumerate(recorded) if n == 0]}: enable them on all ranks or on none"
        )
    rows = _exchange_rows(rows[: sum(sent)], sent, received, group, records)

    local_ids = torch.arange(num_experts // P, device=hidden.device).repeat(P)
    ids = local_ids.repeat_interleave(to_receive.flatten(), output_size=sum(received))[:, None]
    ones = torch.ones_like(ids, dtype=torch.float32)
    arrival = route(ids, ones, num_experts // P)
    return permute(rows, arrival), Exchange(routing, arrival, sent, received, group)


def combine(rows: Tensor, exchange: Exchange) -> Tensor:  # [R', H] -> [T, H]
    """Send the experts' rows back and add up each token's rows, weighted by its topk_weights. Collective.

    Args:
        rows: `[R', H]`, in the order of the rows of `dispatch`. H and the dtype may not differ between ranks, also
            where R' is 0: the exchange would hang, or give wrong values. With `MOE_KERNELS_VALIDATE=1` on all ranks,
            all raise an error instead, and wait for the device once.
        exchange: the one that `dispatch` returned.

    Returns:
        `[T, H]` in the dtype of `rows`; dropped slots add nothing. Differentiable in `rows` and the topk_weights.

    Raises:
        TypeError, ValueError, ImportError: as for `unpermute`; TypeError also if `exchange` is no Exchange, ValueError
            for rows of different sizes or dtypes on the ranks.
        RuntimeError: as for `dispatch`.
    """
    if not isinstance(exchange, Exchange):
        raise TypeError(f"exchange: expected the Exchange that dispatch returns, got {type(exchange).__name__}")
    routing, arrival, sent, received, group = exchange
    rows = unpermute(rows, arrival, weighted=False)
    if checks.validation_enabled(None):
        torch_internals.outside_graphs(_NOT_IN_GRAPHS, _check_alike, rows, group)
    rows = _exchange_rows(rows, received, sent, group)
    dropped = routing.slot_to_row.size(0) - sum(sent)
    return unpermute(F.pad(rows, (0, 0, 0, dropped)) if dropped else rows, routing)


def _kind(rows: Tensor) -> int:
    """A number for the size and dtype of a row."""
    return rows.size(1) * len(checks.DTYPES) + checks.DTYPES.index(rows.dtype)


def _check_kinds(name: str, rows: Tensor, kinds: list[int]) -> None:
    """Check that rows are alike on all ranks. Otherwise their exchange would hang or abort, or give wrong values."""
    if kinds != [_kind(rows)] * len(kinds):
        each = [(k // len(checks.DTYPES), checks.DTYPES[k % len(checks.DTYPES)]) for k in kinds]
        raise ValueError(
            f"{name}: expected H = {rows.size(1)} and {rows.dtype} on all ranks as on this one; on ranks 0 to "
            f"{len(kinds) - 1} of the group, rows have {[H * dtype.itemsize for H, dtype in each]} bytes, in "
            f"{', '.join(str(dtype).removeprefix('torch.') for _, dtype in each)}"
        )


def _check_alike(rows: Tensor, group: Any) -> None:
    message = torch.full((dist.get_world_size(group),), _kind(rows), device=rows.device)
    answer = torch.empty_like(message)
    dist.all_to_all_single(answer, message, group=group)
    _check_kinds("rows", rows, answer.tolist())


def _exchange_rows(rows: Tensor, sent: list[int], received: list[int], group: Any, records: bool = False) -> Tensor:
    """Exchange rows `[sum(sent), H]` among the ranks for `[sum(received), H]`, outside of compiled graphs.

    If it `records`, as some rank does, autograd does so here even if `rows` need no gradient.

    PyTorch 2.11 gives zeros as the gradient of a collective in an autograd.Function that it compiles, and says nothing.
    """
    return torch_internals.outside_graphs(_NOT_IN_GRAPHS, _exchange, rows, sent, received, group, records)


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: Any, records: bool) -> Any:
    if torch_internals.in_vmap_mode():  # a backward pass with is_grads_batched=True
        raise RuntimeError(_GRAD_AND_VJP)
    # Autograd keeps what requires grad, and its gradient, until the graph is freed; so `rows` do not.
    required = torch.empty(0, requires_grad=True) if records and not rows.requires_grad else None
    return _AllToAll.apply(rows, sent, received, group, required)  # type: ignore[no-untyped-call]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(rows: Tensor, sent: list[int], received: list[int], group: Any, required: Tensor | None) -> Tensor:
        out = rows.new_empty(sum(received), rows.size(1))
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.sent, ctx.received, ctx.group, _ = inputs

    @staticmethod
    def backward(ctx: Any, *d_out: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _exchange_rows(d_out[0], ctx.received, ctx.sent, ctx.group), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        raise RuntimeError(_GRAD_AND_VJP)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *_: Any) -> NoReturn:
        raise RuntimeError(_GRAD_AND_VJP)
