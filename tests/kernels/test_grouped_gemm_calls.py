"""Calls of the kernels: Helion's own entry point, presets instead of searches, refusals, and features of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import helion
import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory

from moe_kernels import checks, grouped_gemm, grouped_gemm_jagged, grouped_gemm_jagged_persistent
from moe_kernels.kernels import declare
from moe_kernels.kernels import grouped_gemm as kernels
from moe_kernels.kernels.inline import BY_REGION
from moe_kernels.kernels.row_major import copy_row_major
from moe_kernels.kernels.tiles import NO_TAILS, tile_table
from moe_kernels.runtime import cache, launch, store
from moe_kernels.runtime import compile as compiler
from moe_kernels.runtime.cache import isolated
from moe_kernels.runtime.emit import emit
from moe_kernels.runtime.plan import Alloc, Plan
from moe_kernels.testing import assert_grouped_gemm_close, group_sizes_for, make_inputs

variants = pytest.mark.parametrize("variant", ["basic", "persistent"])


@pytest.mark.parametrize("function", [grouped_gemm, grouped_gemm_jagged, grouped_gemm_jagged_persistent])
def test_exported_launchers(function: Callable[..., torch.Tensor], device: str) -> None:
    A, B, group_offsets = make_inputs([9, 0, 30], 40, 24, dtype=torch.float16, device=device)
    assert_grouped_gemm_close(function(A, B, group_offsets), A, B, group_offsets)


@pytest.mark.parametrize("shape", [(5,), (0,), (3, 4), (3, 1), (3, 0), (2, 3, 4), (2, 1, 4), (2, 3, 0)])
@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter])
def test_memory_is_as_of_new_empty(shape: tuple[int, ...], kind: type, device: str) -> None:
    like = kind(torch.ones(2, 3, device=device))
    for dtype in (torch.bfloat16, torch.int32):
        plan = Plan(("like",), (Alloc(1, shape, dtype),), (1,))
        given, usual = emit(plan, {}, like.device)(like), like.new_empty(shape, dtype=dtype)
        assert type(given) is torch.Tensor and not given.requires_grad
        for name in ("shape", "dtype", "device"):
            assert getattr(given, name) == getattr(usual, name)
        assert given.stride() == usual.stride() and given.is_contiguous()


def test_a_view_that_is_negated_when_it_is_read(device: str) -> None:
    A, B, group_offsets = make_inputs([9, 30], 40, 24, dtype=torch.float32, device=device)
    A = torch.complex(torch.zeros_like(A), A).conj().imag
    assert A.is_neg()
    for _ in range(2):
        out = grouped_gemm(A, B, group_offsets)
        assert_grouped_gemm_close(out, A.resolve_neg(), B, group_offsets)


def test_operands_that_pytorch_knows_to_be_zero(device: str) -> None:
    A, B, group_offsets = make_inputs([9, 30], 40, 24, dtype=torch.float32, device=device)
    zeros = torch._efficientzerotensor(A.shape, device=device)
    for _ in range(2):
        assert grouped_gemm(A, B, group_offsets).any()
        assert not grouped_gemm(zeros, B, group_offsets).any()
    A.requires_grad_()
    torch.sgn(grouped_gemm(A, B, group_offsets)).sum().backward()
    assert A.grad is not None and not A.grad.any()


def test_a_tensor_left_by_a_transform(device: str) -> None:
    A, B, group_offsets = make_inputs([9, 30], 40, 24, dtype=torch.float32, device=device)
    left: list[torch.Tensor] = []
    torch.func.grad(lambda x: (left.append(x * 2), left[-1].sum())[1])(A)
    assert_grouped_gemm_close(grouped_gemm(left[0], B, group_offsets), A * 2, B, group_offsets)


def test_transforms_of_torch_func(device: str) -> None:
    A, B, group_offsets = make_inputs([9, 30], 40, 24, dtype=torch.float32, device=device)

    def product(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        return grouped_gemm(A, B, group_offsets)

    out, pullback = torch.func.vjp(product, A, B)
    d_out = torch.randn_like(out)
    given = [x.clone().requires_grad_() for x in (A, B)]
    expected = torch.autograd.grad(product(*given), given, d_out)
    assert all(map(torch.equal, pullback(d_out), expected))  # called after the transform has ended
    both = torch.stack([A, -A])
    assert torch.equal(torch.func.vmap(product, (0, None))(both, B), torch.stack([out, -out]))
    tangent = torch.func.jvp(product, (A, B), (A, B))[1]
    torch.testing.assert_close(tangent, 2 * out)


def _refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("a search, or a plan, was begun")


def test_kernel_objects_take_the_rule_and_never_search(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    if device == "cpu":
        monkeypatch.setattr("helion.runtime.get_num_sm", lambda device, **_: 4)
    monkeypatch.setattr(declare, "default_autotuner_fn", _refuse)
    A, B, group_offsets = make_inputs([9, 0, 140], 40, 24, dtype=torch.float16, device=device)
    M = A.size(0)
    out = torch.empty(M, 40, dtype=A.dtype, device=device)
    kernels.jagged(A, B, group_offsets, None, out, 31, BY_REGION, False, False, True)
    assert_grouped_gemm_close(out, A, B, group_offsets)
    bound = kernels.jagged.bind((A, B, group_offsets, None, out, 31, BY_REGION, False, False, True))
    assert bound._config.block_sizes[0] == 64  # 149 rows, 3 groups

    out = torch.empty_like(out)
    max_tiles = M // 64 + 3 + 2
    tiles = torch.empty((1 + max_tiles, 3), dtype=torch.int32, device=device)
    tile_table(group_offsets, out, tiles, max_tiles, M, NO_TAILS, 64)
    assert tiles[0, 0] == 4
    assert tiles[1:5].tolist() == [[0, 0, 9], [2, 9, 73], [2, 73, 137], [2, 137, 149]]
    kernels.jagged_persistent(A, B, tiles, tiles[0, 0], None, out, False, False, 64, False, False)
    assert_grouped_gemm_close(out, A, B, group_offsets)


@pytest.mark.parametrize(("variant", "of_columns"), [("basic", 1), ("persistent", 0)])
def test_a_direct_call_takes_the_config_for_the_columns_of_its_result(variant: str, of_columns: int) -> None:
    A, B, out = (torch.empty(shape, dtype=torch.float16) for shape in ((149, 256), (3, 256, 16), (149, 16)))
    assert kernels._preset(variant, A, B, 3, None, out).config["block_sizes"][of_columns] == 16


def test_kernels_without_a_rule_never_search(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(declare, "default_autotuner_fn", _refuse)
    x = torch.ones(3, 5, device=device)
    with pytest.raises(RuntimeError, match="copy_row_major: expected a config"):
        copy_row_major(x[None], torch.empty_like(x[None]))


def test_a_forced_search_is_helions_own(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    started = []

    class Search:
        def autotune(self, *, skip_cache: bool) -> Any:
            started.append(skip_cache)
            return helion.Config(**kernels._preset("basic", A, B, 3, None, args[4]).config)

    A, B, group_offsets = make_inputs([9, 0, 40], 40, 24, dtype=torch.float16, device=device)
    M = A.size(0)
    args = (
        A,
        B,
        group_offsets,
        None,
        torch.empty(M, 40, dtype=A.dtype, device=device),
        31,
        BY_REGION,
        False,
        False,
        True,
    )
    monkeypatch.setattr(declare, "default_autotuner_fn", lambda *_, **__: Search())
    kernels.jagged.autotune(args, force=True)
    assert started == [True]


@pytest.mark.parametrize("effort", ["none", "quick"])
def test_effort_none_does_not_mean_tiny_blocks(effort: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELION_AUTOTUNE_EFFORT", effort)
    declared = declare.kernel(lambda *_: pytest.fail("nothing is compiled"))(kernels.jagged.fn)
    assert declared.settings.autotune_effort == ("quick" if effort == "quick" else "full")


def test_only_helions_triton_backend_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELION_BACKEND", "cute")
    declared = declare.kernel(lambda *_: pytest.fail("nothing is compiled"))(kernels.jagged.fn)
    assert declared.settings.backend == compiler._variant(declared, False, "ieee").settings.backend == "triton"


def test_helions_interpreter_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELION_INTERPRET", "1")
    declared = declare.kernel(lambda *_: pytest.fail("nothing is compiled"))(kernels.jagged.fn)
    variant = compiler._variant(declared, False, "ieee")
    assert declared.settings.ref_mode == variant.settings.ref_mode == helion.RefMode.OFF


def test_refusals_launch_nothing(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(cache, "call", _refuse)
    A, B, group_offsets = make_inputs([9, 30], 40, 24, dtype=torch.float16, device=device)
    for args, error, text in [
        ((A, B[:, :-1], group_offsets), ValueError, "B: expected K = 24"),
        ((A, B, group_offsets[:-1]), ValueError, "group_offsets: expected length G \\+ 1 = 3"),
        ((A.to(torch.int32), B, group_offsets), TypeError, "A_packed: expected one of"),
        ((A, B, group_offsets.float()), TypeError, "group_offsets: expected int32 or int64"),
    ]:
        with pytest.raises(error, match=text):
            grouped_gemm(*args)
    with pytest.raises(ValueError, match="variant"):
        grouped_gemm(A, B, group_offsets, variant="fast")
    with pytest.raises(ValueError, match=r"group_offsets\[1\]"):
        grouped_gemm(A, B, group_offsets.flip(0) * 0 - 1 + torch.tensor([1, 0, 0]).to(group_offsets), validate=True)


def test_validation_by_environment(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    A, B, group_offsets = make_inputs([9, 30], 40, 24, dtype=torch.float16, device=device)
    group_offsets[2] = 3
    grouped_gemm(A, B, group_offsets)
    monkeypatch.setattr(checks, "_VALIDATE", True)
    with pytest.raises(ValueError, match=r"group_offsets\[2\]: .*got 3"):
        grouped_gemm(A, B, group_offsets)


def test_a_new_number_of_rows_finds_its_plan(device: str) -> None:
    _, B, _ = make_inputs([1, 1], 40, 24, dtype=torch.float16, device=device)
    with isolated():
        for M in range(40, 64, 5):
            A, _, group_offsets = make_inputs([M - 20, 20], 40, 24, dtype=torch.float16, device=device)
            grouped_gemm(A, B, group_offsets)
        assert len(cache.plans.entries) == 1


def test_a_call_that_is_recorded_or_profiled_finds_the_plan_of_one_that_is_not(device: str) -> None:
    A, B, group_offsets = make_inputs([9, 30], 40, 24, dtype=torch.float16, device=device)
    with isolated():
        grouped_gemm(A, B, group_offsets)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            grouped_gemm(A, B, group_offsets)
        grouped_gemm(A.requires_grad_(), B, group_offsets, out_dtype=torch.float16)
        assert len(cache.plans.entries) == 1


def test_calls_from_several_threads(device: str) -> None:
    calls = [make_inputs([M, 0, 20], 64, 32, dtype=torch.float16, device=device) for M in (5, 40, 200, 500)] * 3
    with isolated(), ThreadPoolExecutor(4) as pool:
        outs = list(pool.map(lambda call: grouped_gemm(*call), calls))
    for out, call in zip(outs, calls, strict=True):
        assert_grouped_gemm_close(out, *call)


@pytest.mark.gpu
@variants
@pytest.mark.parametrize("kept", [1, 3, 1024])
def test_tensors_in_turn(variant: str, kept: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_MOST_ENCODED", kept)
    calls = [make_inputs([M - 20, 20], 256, 128, dtype=torch.bfloat16, device=device) for M in (1040, 1100, 1040, 1500)]
    with isolated():
        for _ in range(3):
            outs = [grouped_gemm(*call, variant=variant) for call in calls]
            for out, call in zip(outs, calls, strict=True):
                assert_grouped_gemm_close(out, *call)


@pytest.mark.gpu
@variants
def test_a_new_number_of_rows_makes_no_plan(variant: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, B, _ = make_inputs([1, 1], 256, 128, dtype=torch.bfloat16, device=device)
    for M in range(1040, 1080):
        A, _, group_offsets = make_inputs([M - 20, 20], 256, 128, dtype=torch.bfloat16, device=device)
        if M == 1041:
            monkeypatch.setattr(cache, "_load", _refuse)
        assert_grouped_gemm_close(grouped_gemm(A, B, group_offsets, variant=variant), A, B, group_offsets)


@pytest.mark.gpu
@variants
@pytest.mark.usefixtures("fresh_plans")
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "first call"])
def test_graph_capture_and_replay_with_other_offsets(variant: str, warm: bool, device: str) -> None:
    G, M = 16, 2000
    N = 192 if warm else 320  # 320 has kernels of its own
    A, B, group_offsets = make_inputs(group_sizes_for("softmax", G, M), N, 128, dtype=torch.bfloat16, device=device)
    if warm:
        grouped_gemm(A, B, group_offsets, variant=variant)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = grouped_gemm(A, B, group_offsets, variant=variant)
    for kind in ("softmax", "zipf", "one", "empty"):
        sizes = torch.tensor([0, *group_sizes_for(kind, G, M)], device=device)
        group_offsets.copy_(sizes.cumsum(0))
        out.fill_(float("nan"))
        graph.replay()
        assert_grouped_gemm_close(out, A, B, group_offsets)
    group_offsets.copy_(group_offsets.clamp(5, M - 7))
    out.fill_(float("nan"))
    graph.replay()
    assert_grouped_gemm_close(out, A, B, group_offsets)


@pytest.mark.gpu
@variants
def test_the_host_never_waits(variant: str, device: str) -> None:
    A, B, group_offsets = make_inputs([90, 0, 300], 256, 128, dtype=torch.bfloat16, device=device)
    grouped_gemm(A, B, group_offsets, variant=variant)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = grouped_gemm(A, B, group_offsets, variant=variant)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_grouped_gemm_close(out, A, B, group_offsets)


@pytest.mark.gpu
@pytest.mark.parametrize("poison", [0.0, float("nan")], ids=["", "NaN in no group"])
@pytest.mark.parametrize("transposed", [True, False])
def test_one_weight_for_all(transposed: bool, poison: float, device: str) -> None:
    for M, K, N in ((3000, 512, 384), (20, 259, 97)):
        A, B, _ = make_inputs([M], N, K, dtype=torch.bfloat16, device=device, per_group=False, transposed=transposed)
        group_offsets = torch.tensor([7, 9, 9, M // 2, M - 5], dtype=torch.int32, device=device)
        A[:7], A[-5:] = A[:7] + poison, A[-5:] + poison
        assert_grouped_gemm_close(grouped_gemm(A, B, group_offsets), A, B, group_offsets)
        malformed = torch.tensor([7, M + 9, 2, -1, M - 5], dtype=torch.int32, device=device)
        assert_grouped_gemm_close(grouped_gemm(A, B, malformed), A, B, malformed)


@pytest.mark.gpu
@variants
def test_another_stream(variant: str, device: str) -> None:
    A, B, group_offsets = make_inputs([90, 0, 3000], 256, 1024, dtype=torch.bfloat16, device=device)
    side = torch.cuda.Stream()
    for _ in range(5):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            later = A * 1.0
            out = grouped_gemm(later, B, group_offsets, variant=variant)
        torch.cuda.current_stream().wait_stream(side)
        assert_grouped_gemm_close(out, A, B, group_offsets)


@pytest.mark.gpu
def test_another_device(device: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    A, B, group_offsets = make_inputs([90, 0, 300], 256, 128, dtype=torch.bfloat16, device="cuda:1")
    assert_grouped_gemm_close(grouped_gemm(A, B, group_offsets), A, B, group_offsets)


@pytest.mark.gpu
def test_offsets_on_another_device(device: str) -> None:
    A, B, group_offsets = make_inputs([90, 0, 300], 256, 128, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match=r"group_offsets: expected on cuda:0 .* got on cpu"):
        grouped_gemm(A, B, group_offsets.cpu())
    with pytest.raises(TypeError, match="float64"):
        grouped_gemm(A.double(), B, group_offsets)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sizes", "N", "K"),
    [
        (group_sizes_for("softmax", 8, 4096), 1024, 2048),
        (group_sizes_for("zipf", 128, 8192), 768, 512),
        (group_sizes_for("one", 64, 4096), 384, 320),
        (group_sizes_for("empty", 128, 512), 1536, 2048),
        (group_sizes_for("random", 32, 64), 512, 7168),
        ([1] * 32, 2880, 2880),
    ],
    ids=["softmax", "zipf", "one", "empty", "random", "single rows"],
)
@pytest.mark.parametrize("transposed", [True, False])
@variants
def test_shapes_of_models(variant: str, sizes: list[int], N: int, K: int, transposed: bool, device: str) -> None:
    A, B, group_offsets = make_inputs(sizes, N, K, dtype=torch.bfloat16, device=device, transposed=transposed)
    assert_grouped_gemm_close(grouped_gemm(A, B, group_offsets, variant=variant), A, B, group_offsets)


@pytest.mark.gpu
@variants
@pytest.mark.parametrize("tf32", [True, False])
def test_fp32_follows_pytorchs_tf32_setting(variant: str, tf32: bool, device: str) -> None:
    A, B, group_offsets = make_inputs([90, 0, 300], 256, 2048, dtype=torch.float32, device=device)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        out = grouped_gemm(A, B, group_offsets, variant=variant)
        if not tf32:
            assert_grouped_gemm_close(out, A, B, group_offsets)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    exact = torch.cat([A[:90].double() @ B[0].double(), A[90:].double() @ B[2].double()])
    error = (out.double() - exact).abs().max().item()
    # Triton truncates to tf32 where cuBLAS rounds: errors of 3.2e-3 and 1.2e-3 were measured.
    assert (1e-4 < error < 6e-3) if tf32 else (error < 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("G", [1024, 4096, 65536])
def test_very_many_groups(G: int, device: str) -> None:
    torch.use_deterministic_algorithms(False)  # for repeat_interleave
    sizes = torch.zeros(G, dtype=torch.int64, device=device)
    sizes[:: G // 512] = 3
    sizes[-1] = 300
    group_offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).to(torch.int32)
    M = int(group_offsets[-1])
    A = torch.randn(M, 16, device=device, dtype=torch.bfloat16)
    B = torch.randn(G, 16, 16, device=device, dtype=torch.bfloat16)
    rows = torch.repeat_interleave(torch.arange(G, device=device), sizes)
    expected = torch.bmm(A[:, None].double(), B.double()[rows])[:, 0]
    for variant in ("basic", "persistent"):
        out = grouped_gemm(A, B, group_offsets, variant=variant)
        torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=2e-2)


@pytest.mark.gpu
@variants
@pytest.mark.parametrize(
    ("M", "N", "K", "G", "misaligned"),
    [
        (256, 2048, 4096, 512, False),  # B of 2^32 elements
        (256, 2047, 4099, 512, False),  # the same without TMA
        (600_000, 4096, 64, 4, False),  # out of 2.4e9 elements
        (600_000, 4095, 64, 4, False),
        (600_000, 32, 4096, 4, False),  # A of 2.4e9 elements
        (600_000, 32, 4096, 4, True),
    ],
)
def test_more_than_2_to_the_31_elements(
    variant: str, M: int, N: int, K: int, G: int, misaligned: bool, device: str
) -> None:
    torch.use_deterministic_algorithms(False)  # filling these tensors with NaN takes long
    A = torch.empty(M * K + 1, device=device, dtype=torch.bfloat16).normal_()
    A = A[1:].view(M, K) if misaligned else A[:-1].view(M, K)
    B = torch.empty(G, K, N, device=device, dtype=torch.bfloat16).normal_(std=K**-0.5)
    sizes = torch.full((G,), M // G if M > G else 0, device=device)
    sizes[-1] += M - sizes.sum()
    group_offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).to(torch.int32)
    out = grouped_gemm(A, B, group_offsets, variant=variant)
    last = grouped_gemm(A[-128:].clone(), B[-1:].clone(), torch.tensor([0, 128], device=device), variant=variant)
    exact = A[-128:].double() @ B[-1].double()
    torch.testing.assert_close(out[-128:].double(), exact, rtol=1e-2, atol=2e-2)
    assert torch.equal(out[-128:], last)
    middle = M // 2
    g = int((group_offsets <= middle).sum()) - 1
    torch.testing.assert_close(out[middle].double(), A[middle].double() @ B[g].double(), rtol=1e-2, atol=2e-2)


@pytest.mark.usefixtures("fresh_plans")
def test_a_process_group_changes_nothing_in_a_kernel(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds with a torch that cannot tell which tensors are in symmetric memory."""
    made: list[str] = []

    def imported(code: str) -> Any:
        made.append(code)
        return real(code)

    real = compiler._import
    monkeypatch.setattr(compiler, "_import", imported)
    monkeypatch.setattr(compiler, "_hosts", {})
    monkeypatch.setattr(store, "read_plan", lambda *_: None)
    monkeypatch.delattr(symmetric_memory, "is_symm_mem_tensor", raising=False)
    A, B, offsets = make_inputs([3, 0, 30], 32, 48, dtype=torch.float16, device=device)
    with isolated():
        alone = grouped_gemm_jagged(A, B, offsets)
    compiler._hosts.clear()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with isolated():
            assert torch.equal(grouped_gemm_jagged(A, B, offsets), alone)
    finally:
        torch.distributed.destroy_process_group()
    assert len(made) == 2
    assert made[0] == made[1]


@pytest.mark.usefixtures("fresh_plans")
def test_code_can_be_generated_after_an_interrupt(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Helion has no chance then to remove the node from its stack: the interrupt comes as the node is entered."""
    locations = pytest.importorskip("helion._compiler.source_location").SourceLocation
    nodes = pytest.importorskip("helion._compiler.ast_extension").ExtendedAST
    enter = locations.set_fx_location

    def interrupted(location: Any) -> None:
        if len(nodes.current()) > 1:
            monkeypatch.setattr(locations, "set_fx_location", enter)
            raise KeyboardInterrupt
        enter(location)

    monkeypatch.setattr(compiler, "_hosts", {})
    monkeypatch.setattr(store, "read_plan", lambda *_: None)
    monkeypatch.setattr(locations, "set_fx_location", interrupted)
    A, B, offsets = make_inputs([3, 0, 30], 32, 48, dtype=torch.float16, device=device)
    with isolated():
        with pytest.raises(KeyboardInterrupt):
            grouped_gemm_jagged(A, B, offsets)
        assert len(nodes.current()) == 0
        assert_grouped_gemm_close(grouped_gemm_jagged(A, B, offsets), A, B, offsets)
