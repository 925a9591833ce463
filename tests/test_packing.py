from collections import deque
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moe_kernels.packing import (
    group_offsets_from_offs,
    group_offsets_from_sizes,
    group_sizes,
    offs_from_group_offsets,
    pack_groups,
    unpack_groups,
)

INDEX_DTYPES = [torch.int32, torch.int64]


def numbered_groups(sizes: list[int], K: int) -> list[Tensor]:
    """Return groups whose elements are all distinct, so that a misplaced row is detected."""
    rows = torch.arange(sum(sizes) * K, dtype=torch.float32).view(sum(sizes), K)
    return list(rows.split(sizes)) if sizes else []


@settings(deadline=None, max_examples=50)
@given(sizes=st.lists(st.integers(0, 9), max_size=8), K=st.integers(0, 4))
def test_unpack_inverts_pack(sizes: list[int], K: int) -> None:
    groups = numbered_groups(sizes, K)
    A_packed, group_offsets = pack_groups(groups)
    assert group_offsets.dtype == torch.int32
    assert group_offsets.tolist() == [sum(sizes[:g]) for g in range(len(sizes) + 1)]
    unpacked = unpack_groups(A_packed, group_offsets)
    assert len(unpacked) == len(groups)
    for group, original in zip(unpacked, groups, strict=True):
        assert torch.equal(group, original)
    assert group_sizes(group_offsets).tolist() == sizes


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 4)])
def test_a_stack_is_a_sequence_of_groups(shape: tuple[int, int, int]) -> None:
    G, M, K = shape
    A_packed, group_offsets = pack_groups(torch.zeros(shape))
    assert A_packed.shape == (G * M, K)
    assert group_offsets.tolist() == [g * M for g in range(G + 1)]


@pytest.mark.parametrize("default", [(torch.float32, "cpu"), (torch.float64, "meta")], ids=str)
def test_pack_of_nothing(default: tuple[torch.dtype, str]) -> None:
    dtype, device = default
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            A_packed, group_offsets = pack_groups([])
    finally:
        torch.set_default_dtype(torch.float32)
    assert (A_packed.shape, A_packed.dtype, A_packed.device.type) == ((0, 0), torch.float32, "cpu")
    assert (group_offsets.dtype, group_offsets.device.type) == (torch.int32, "cpu")
    assert group_offsets.tolist() == [0]


class _CountingMode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_pack_copies_noncontiguous_groups_once() -> None:
    groups = [torch.arange(12.0).view(3, 4).t(), torch.arange(100.0, 112.0).view(2, 6)[:, ::2]]
    with _CountingMode() as mode:
        A_packed, _ = pack_groups(groups)
    assert [call for call in mode.calls if call in ("cat", "clone", "copy_", "_to_copy")] == ["cat"]
    assert A_packed.is_contiguous()
    assert A_packed.tolist() == groups[0].tolist() + groups[1].tolist()


def test_pack_copies_a_single_group() -> None:
    group = torch.zeros(2, 3)
    pack_groups([group])[0].fill_(1)
    assert not group.any()


@pytest.mark.parametrize(("rows", "dtype"), [(2**31 - 1, torch.int32), (2**31, torch.int64), (2**33, torch.int64)])
def test_pack_chooses_the_offsets_dtype(rows: int, dtype: torch.dtype) -> None:
    groups = [torch.empty(rows - 1, 1, device="meta"), torch.empty(1, 1, device="meta")]
    A_packed, group_offsets = pack_groups(groups)
    assert A_packed.shape == (rows, 1)
    assert group_offsets.dtype == dtype
    assert group_offsets.device.type == "meta"


def test_pack_gives_each_group_its_gradient() -> None:
    groups = [group.clone().requires_grad_() for group in numbered_groups([2, 0, 3], 2)]
    upstream = torch.randn(5, 2)
    pack_groups(groups)[0].backward(upstream)
    for group, expected in zip(groups, upstream.split([2, 0, 3]), strict=True):
        assert group.grad is not None
        assert torch.equal(group.grad, expected)


@pytest.mark.parametrize(
    ("offender", "error", "message"),
    [
        (torch.zeros(2, 5), ValueError, r"groups\[2\]: expected K = 4 .*got shape \[2, 5\]"),
        (torch.zeros(2, 4, device="meta"), ValueError, r"groups\[2\]: expected on cpu.*got on meta"),
        (torch.zeros(4), ValueError, r"groups\[2\]: expected shape \[M_g, K\], got \[4\]"),
        (torch.zeros(2, 4).half(), TypeError, r"groups\[2\]: expected torch.float32.*got torch.float16"),
        ([[0.0] * 4], TypeError, r"groups\[2\]: expected a torch.Tensor, got list"),
    ],
)
def test_pack_names_the_first_offender(offender: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pack_groups([torch.zeros(1, 4), torch.zeros(0, 4), offender, offender])


def test_pack_refuses_a_first_group_that_is_no_matrix() -> None:
    with pytest.raises(ValueError, match=r"groups\[0\]: expected shape"):
        pack_groups([torch.zeros(2, 3, 4)])


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        ((x for x in [torch.zeros(2, 3)]), TypeError, r"groups: expected a list .*got generator; pass list\(groups\)$"),
        ({torch.zeros(2, 3)}, TypeError, r"groups: expected a list of tensors, got set; pass list\(groups\)$"),
        ({0: torch.zeros(2, 3)}, TypeError, "groups: expected a list of tensors, got dict$"),
        (None, TypeError, "groups: expected a list of tensors, got NoneType$"),
        (torch.tensor(1.0), ValueError, r"groups: expected a list of tensors, or one \[G, M, K\], got shape \[\]$"),
        (torch.zeros(1, 1, 2, 3), ValueError, r"groups: .* or one \[G, M, K\], got shape \[1, 1, 2, 3\]$"),
        ([torch.zeros(2, 3).to_sparse()], TypeError, r"groups\[0\]: expected a dense tensor"),
        ("0", TypeError, r"groups\[0\]: expected a torch.Tensor, got str"),
    ],
)
def test_pack_refuses_what_is_no_list_of_matrices(groups: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        pack_groups(groups)


def test_pack_takes_any_sequence() -> None:
    group = torch.nn.Parameter(torch.ones(2, 3))
    for groups in ([group], (group,), deque([group]), torch.nn.ParameterList([group]), group[None]):
        assert torch.equal(pack_groups(groups)[0], group)


def test_unpack_returns_views_without_the_rows_outside() -> None:
    packed = torch.arange(10.0).view(5, 2)
    groups = unpack_groups(packed, torch.tensor([0, 1, 1, 3]))
    assert [group.tolist() for group in groups] == [[[0.0, 1.0]], [], [[2.0, 3.0], [4.0, 5.0]]]
    assert groups[2].data_ptr() == packed[1].data_ptr()


def test_unpack_gradient_is_zero_outside_the_groups() -> None:
    packed = torch.randn(4, 2, requires_grad=True)
    groups = unpack_groups(packed, torch.tensor([0, 1, 3]))
    groups[1].backward(torch.full((2, 2), 7.0))
    assert packed.grad is not None
    assert packed.grad.tolist() == [[0.0] * 2, [7.0] * 2, [7.0] * 2, [0.0] * 2]


@pytest.mark.parametrize(
    ("packed", "group_offsets", "error", "message"),
    [
        (torch.zeros(4, 2), torch.tensor([0, 3, 2]), ValueError, r"group_offsets\[2\].*got 2"),
        (torch.zeros(4, 2), torch.tensor([0, 5]), ValueError, r"group_offsets\[1\].*got 5"),
        (torch.zeros(4, 2), torch.tensor([1, 4]), ValueError, r"group_offsets\[0\].*got 1"),
        (torch.zeros(4, 2), torch.tensor([0.0, 4.0]), TypeError, "group_offsets: expected int32 or int64"),
        (torch.zeros(4, 2), torch.tensor([[0, 4]]), ValueError, r"group_offsets: .*1-D.*got shape \[1, 2\]"),
        (torch.zeros(4, 2), torch.tensor([]).int(), ValueError, "group_offsets: .*at least 1, got 0"),
        (torch.zeros(4), torch.tensor([0, 4]), ValueError, r"packed: expected shape \[M, N\], got \[4\]"),
        (None, torch.tensor([0, 4]), TypeError, "packed: expected a torch.Tensor, got NoneType"),
    ],
)
def test_unpack_refuses(packed: Tensor, group_offsets: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        unpack_groups(packed, group_offsets)


def test_unpack_under_transforms_and_without_values() -> None:
    packed, group_offsets = torch.randn(2, 4, 3), torch.tensor([0, 1, 3])
    unpacked = torch.func.vmap(lambda x: unpack_groups(x, group_offsets))(packed)
    assert torch.equal(unpacked[1], packed[:, 1:3])
    with pytest.raises(RuntimeError, match=r"^unpack_groups reads group_offsets on the host, .* call it outside$"):
        torch.func.vmap(unpack_groups)(packed, group_offsets.expand(2, -1))
    for without_values in (lambda x: x.to("meta"), FakeTensorMode().from_tensor):
        with pytest.raises(ValueError, match=r"^group_offsets: expected values, .* got a meta or fake tensor$"):
            unpack_groups(without_values(packed[0]), without_values(group_offsets))


@pytest.mark.parametrize("dtype", INDEX_DTYPES)
@pytest.mark.parametrize("sizes", [[], [0], [2, 0, 3], [0, 0, 4, 0]])
def test_sizes_offsets_and_offs(sizes: list[int], dtype: torch.dtype) -> None:
    expected = [sum(sizes[:g]) for g in range(len(sizes) + 1)]
    group_offsets = group_offsets_from_sizes(torch.tensor(sizes, dtype=dtype))
    assert (group_offsets.tolist(), group_offsets.dtype) == (expected, dtype)
    assert group_sizes(group_offsets).tolist() == sizes
    assert group_sizes(group_offsets).dtype == dtype
    offs = offs_from_group_offsets(group_offsets)
    assert (offs.tolist(), offs.dtype) == (expected[1:], torch.int32)
    back = group_offsets_from_offs(offs.to(dtype))
    assert (back.tolist(), back.dtype) == (expected, dtype)


def test_offs_are_a_contiguous_copy() -> None:
    group_offsets = torch.tensor([0, 9, 2, 9, 5, 9], dtype=torch.int32)[::2]
    offs = offs_from_group_offsets(group_offsets)
    assert offs.is_contiguous()
    assert offs.tolist() == [2, 5]
    offs.fill_(0)
    assert group_offsets.tolist() == [0, 2, 5]


def test_conversions_take_noncontiguous_input() -> None:
    strided = torch.tensor([2, 9, 3, 9], dtype=torch.int32)[::2]
    assert group_offsets_from_sizes(strided).tolist() == [0, 2, 5]
    assert group_offsets_from_offs(strided).tolist() == [0, 2, 3]
    assert group_sizes(torch.tensor([0, 9, 2, 9, 5, 9])[::2]).tolist() == [2, 3]


@pytest.mark.parametrize("dtype", INDEX_DTYPES)
def test_conversions_read_nothing_on_the_host(dtype: torch.dtype) -> None:
    sizes = torch.empty(3, dtype=dtype, device="meta")
    group_offsets = group_offsets_from_sizes(sizes)
    assert (group_offsets.shape, group_offsets.dtype) == ((4,), dtype)
    assert group_sizes(group_offsets).shape == (3,)
    assert offs_from_group_offsets(group_offsets).shape == (3,)
    assert group_offsets_from_offs(sizes).shape == (4,)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (group_offsets_from_sizes, "sizes"),
        (group_sizes, "group_offsets"),
        (offs_from_group_offsets, "group_offsets"),
        (group_offsets_from_offs, "offs"),
    ],
)
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (torch.tensor([1.0]), TypeError, "expected int32 or int64, got torch.float32"),
        (torch.tensor([1], dtype=torch.int16), TypeError, "expected int32 or int64, got torch.int16"),
        (torch.tensor([True]), TypeError, "expected int32 or int64, got torch.bool"),
        ([1, 2], TypeError, "expected a torch.Tensor, got list"),
        (torch.tensor([[1]]), ValueError, r"expected a 1-D tensor, got shape \[1, 1\]"),
        (torch.tensor(1), ValueError, r"expected a 1-D tensor, got shape \[\]"),
    ],
)
def test_conversions_refuse(function, name, value, error, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=f"^{name}: {message}"):
        function(value)


@pytest.mark.parametrize("function", [group_sizes, offs_from_group_offsets])
def test_offsets_have_at_least_one_entry(function) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=r"^group_offsets: expected a length of at least 1, got 0"):
        function(torch.tensor([], dtype=torch.int32))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_packed(layout: torch.layout) -> None:
    groups = [torch.randn(rows, 4) for rows in (3, 0, 2)]
    A_packed, group_offsets = pack_groups(torch.nested.nested_tensor(groups, layout=layout))
    assert torch.equal(A_packed, torch.cat(groups)) and group_offsets.tolist() == [0, 3, 3, 5]


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_of_other_ranks_are_refused(layout: torch.layout) -> None:
    groups = [torch.randn(rows, 4, 2) for rows in (3, 2)]
    with pytest.raises(ValueError, match=r"^groups: expected .* one \[G, M, K\], got 4 dimensions"):
        pack_groups(torch.nested.nested_tensor(groups, layout=layout))


def test_a_tensor_without_groups_keeps_its_columns() -> None:
    A_packed, group_offsets = pack_groups(torch.empty(0, 3, 8, dtype=torch.bfloat16))
    assert A_packed.shape == (0, 8) and A_packed.dtype == torch.bfloat16 and group_offsets.tolist() == [0]


def test_offsets_lie_where_a_tensor_without_groups_does() -> None:
    A_packed, group_offsets = pack_groups(torch.empty(0, 3, 8, device="meta"))
    assert A_packed.device.type == group_offsets.device.type == "meta"
