"""The generated code of a launch, by Triton's launcher or by Triton; calls also work without the private names."""

from __future__ import annotations

import gc
import os
import shutil
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.nvidia import driver as nvidia
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_kernels import grouped_gemm, grouped_gemm_wgrad, moe_mlp, reference, swiglu_ffn
from moe_kernels.kernels.tiles import windows
from moe_kernels.runtime import cache, launch, torch_internals
from moe_kernels.runtime import compile as compiler
from moe_kernels.runtime.emit import emit
from moe_kernels.runtime.launch import DirectLauncher, TritonLauncher
from moe_kernels.runtime.plan import Constant, Descriptor, Launch, Plan, Pointer
from moe_kernels.runtime.symbolic import SymbolicInt, SymbolicTensor
from moe_kernels.testing import assert_grouped_gemm_close, assert_within_budget, make_experts, make_inputs, make_tokens

CPU = torch.device("cpu")
BLOCKS = [16, 32], [1, 16, 32], [16, 1, 32]  # of A, B and out
META = {"elem_type": 6, "elem_size": 2, "swizzle": 3, "fp4_padded": False}
M = SymbolicInt.extent(0, 0, 1, 1000)


class Kernel:
    """Stand-in for Triton's `CompiledKernel`: records the arguments of its launcher, and those of its own calls."""

    def __init__(self, version: str = "3.6", descriptors: bool = True, pdl: bool = True):
        self.seen: list[Any] = []
        self.function, self.packed_metadata = 99, (4, 1, 1000)
        described = [META | {"block_size": block} for block in BLOCKS] if descriptors else None
        self.metadata = SimpleNamespace(tensordesc_meta=described, target=SimpleNamespace(backend="cuda"))

        def closure(launcher: Callable[..., None]) -> Callable[..., None]:
            return lambda *args: launcher(*args)

        def note(*args: Any) -> None:
            self.seen.append(args)

        self.run = SimpleNamespace(
            launch=closure(note) if descriptors else note,
            launch_cooperative_grid=False,
            launch_pdl=pdl,
            global_scratch_size=0,
            profile_scratch_size=0,
        )
        if version != "3.6":
            self.run.arg_annotations, self.run.kernel_signature = ["kinds"], b"signature"

    def launch_metadata(self, grid: Any, stream: Any) -> Any:
        return "of", grid, stream

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args: self.seen.append((grid, args))


@pytest.fixture(params=["3.6", "3.7", "3.8", "3.9"])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Replace the driver of this version of Triton by one that only records its arguments."""
    encode = "fill_tma_descriptor" if request.param == "3.6" else "fill_tma_descriptor_tiled"
    utils = SimpleNamespace(**{encode: lambda address, *encoding: (address, *encoding)})
    active = SimpleNamespace(utils=utils, get_current_stream=lambda device: f"of {device}")
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(triton, "__version__", f"{request.param}.0")
    name: str = request.param
    return name


def descriptors() -> list[Descriptor]:
    """Return descriptors of A `[M, 64]`, B `[3, 64, 64]`, and windows of out `[M, 64]`, in Helion's form."""
    half = torch.float16
    out = windows(SymbolicTensor(3, half, (M, 64), (64, 1), aligned=True), 16)
    shape = (16, out.shape[2], 64)  # Helion puts columns last
    return [
        Descriptor(0, 0, (M, 64), (64, 1), tuple(BLOCKS[0]), half),
        Descriptor(1, 0, (3, 64, 64), (4096, 64, 1), tuple(BLOCKS[1]), half),
        Descriptor(3, out.offset, shape, (64, 64, 1), tuple(BLOCKS[2]), half),
    ]


def plan() -> Plan:
    a, b, o = descriptors()
    arguments = (a, b, Pointer(2, 4), o, M * 2 + 1, 7, Constant(1.5))
    return Plan(("A", "B", "ends", "out"), (Launch("kernel", (M * 4, 2), arguments),), ())


def tensors(rows: int) -> tuple[Tensor, ...]:
    half = torch.float16
    return (
        torch.zeros(rows, 64, dtype=half),
        torch.zeros(3, 64, 64, dtype=half),
        torch.zeros(4),
        torch.zeros(rows, 64, dtype=half),
    )


def test_what_the_launcher_is_given(version: str) -> None:
    kernel = Kernel(version)
    run = emit(plan(), {"kernel": DirectLauncher(kernel)}, CPU)
    for rows in (32, 100, 32):
        A, B, ends, out = tensors(rows)
        run(A, B, ends, out)
        (given,) = kernel.seen
        kernel.seen.clear()
        packed, without_hooks, scratch = (4, 1, 1000), (None, None, None), (None, None)
        if version != "3.6":
            *leading, arguments = given
            expected = [packed, *without_hooks, *scratch, ["kinds"], b"signature"]
        else:
            leading, arguments = list(given[:13]), given[13:]
            expected = [*scratch, packed, *without_hooks]
        assert leading == [4 * rows, 2, 1, "of 0", 99, False, True, *expected]

        def encoding(block: list[int]) -> tuple[Any, ...]:
            return 3, 2, TMA_DTYPE_DEVICE_TO_HOST[6], block

        shapes = [rows, 64], [3, 64, 64], [16, rows + 1, 64]
        strides = [64, 1], [4096, 64, 1], [64, 64, 1]
        places = A.data_ptr(), B.data_ptr(), out.data_ptr() - 16 * 64 * 2
        a, b, o = (
            [(place, *encoding(block), shape, stride, 0), *shape, *stride]
            for place, block, shape, stride in zip(places, BLOCKS, shapes, strides, strict=True)
        )
        assert arguments == (*a, *b, ends.data_ptr() + 4, *o, 2 * rows + 1, 7, 1.5)


def test_tritons_own_launcher_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher of the installed Triton is put around a C function that only records its arguments."""
    seen: list[Any] = []
    utils = SimpleNamespace(
        launch=lambda *args: seen.append(args),
        build_signature_metadata=lambda kinds: repr(list(kinds)).encode(),
        fill_tma_descriptor=lambda address, *encoding: (address, *map(str, encoding)),
        fill_tma_descriptor_tiled=lambda address, *encoding: (address, *map(str, encoding)),
    )
    active = SimpleNamespace(utils=utils, get_current_stream=lambda device: 77)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(nvidia, "compile_module_from_src", lambda **_: utils, raising=False)
    monkeypatch.setattr(nvidia, "library_dirs", lambda: [])
    for name, value in (("ARG_CONSTEXPR", 0), ("ARG_KERNEL", 1), ("ARG_TUPLE", 2)):
        monkeypatch.setattr(nvidia, name, value, raising=False)
    monkeypatch.setattr(nvidia, "PyKernelArg", lambda **given: given, raising=False)
    a, b, o = (f"tensordesc<fp16{block}>" for block in BLOCKS)
    signature = dict(zip("abpoijk", (a, b, "*fp32", o, "i32", "i32", "constexpr"), strict=True))
    source = SimpleNamespace(signature=signature, constants={(6,): None}, fn=SimpleNamespace(arg_names=list(signature)))
    scratch = {f"{kind}_scratch_{part}": 0 for kind in ("global", "profile") for part in ("size", "align")}
    described = [META | {"block_size": block} for block in BLOCKS]
    options = {"tensordesc_meta": described, "num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": True}
    metadata = SimpleNamespace(**options, **scratch, target=SimpleNamespace(backend="cuda"), instrumentation_mode="")
    kernel = Kernel()
    kernel.metadata, kernel.run = metadata, nvidia.CudaLauncher(source, metadata)
    A, B, ends, out = tensors(32)
    emit(plan(), {"kernel": DirectLauncher(kernel)}, CPU)(A, B, ends, out)

    def run(grid: Any, *arguments: Any) -> None:
        kernel.run(*grid, 77, kernel.function, kernel.packed_metadata, None, None, None, *arguments)

    monkeypatch.setattr(Kernel, "__getitem__", lambda _, grid: partial(run, grid))
    emit(plan(), {"kernel": TritonLauncher(kernel)}, CPU)(A, B, ends, out)
    direct, by_triton = ([list(x) if isinstance(x, (list, tuple)) else x for x in args] for args in seen)
    assert direct == by_triton


def test_what_triton_is_given() -> None:
    kernel = Kernel()
    run = emit(plan(), {"kernel": TritonLauncher(kernel)}, CPU)
    for rows in (32, 100):
        A, B, ends, out = tensors(rows)
        run(A, B, ends, out)
        ((grid, arguments),) = kernel.seen
        kernel.seen.clear()
        assert grid == (4 * rows, 2, 1)
        a, b, pointer, o, *numbers = arguments
        assert (pointer, *numbers) == (ends.data_ptr() + 4, 2 * rows + 1, 7, 1.5)
        shapes = [rows, 64], [3, 64, 64], [16, rows + 1, 64]
        strides = [64, 1], [4096, 64, 1], [64, 64, 1]
        places = A.data_ptr(), B.data_ptr(), out.data_ptr() - 16 * 64 * 2
        for x, place, shape, stride, block in zip((a, b, o), places, shapes, strides, BLOCKS, strict=True):
            assert type(x) is TensorDescriptor and x.base.dtype == torch.float16
            assert (x.base.data_ptr(), x.shape, x.strides, x.block_shape) == (place, shape, stride, block)


@pytest.mark.parametrize("listens", [True, False])
def test_a_profiler_is_told_of_a_launch(listens: bool, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    enter, leave = SimpleNamespace(calls=[]), SimpleNamespace(calls=[])
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", enter)
    monkeypatch.setattr(triton.knobs.runtime, "launch_exit_hook", leave)
    kernel = Kernel(version, descriptors=False, pdl=False)
    step = Launch("kernel", (M * 4,), (Pointer(0, 0), M))
    run = emit(Plan(("A",), (step,), ()), {"kernel": DirectLauncher(kernel)}, CPU)
    enter.calls += [print] * listens  # a plan that exists already notices it
    tensor = torch.ones(5, 2)
    run(tensor)
    told = (("of", (20, 1, 1), "of 0"), enter, leave) if listens else (None, None, None)
    if version != "3.6":
        leading = (False, False, (4, 1, 1000), *told, None, None, ["kinds"], b"signature", (tensor.data_ptr(), 5))
    else:
        leading = (False, False, None, None, (4, 1, 1000), *told, tensor.data_ptr(), 5)
    assert kernel.seen == [(20, 1, 1, "of 0", 99, *leading)]


def test_descriptors_are_encoded_once_for_each_place(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_MOST_ENCODED", 2)
    utils, encoded = triton.runtime.driver.active.utils, []
    (name,) = vars(utils)
    monkeypatch.setattr(utils, name, lambda address, *_: encoded.append(address))
    kernel = Kernel(version)
    kernel.metadata.tensordesc_meta = kernel.metadata.tensordesc_meta[:1]
    step = Launch("kernel", (1,), (descriptors()[0],))
    run = emit(Plan(("A",), (step,), ()), {"kernel": DirectLauncher(kernel)}, CPU)
    A, B, C = (torch.zeros(20, 64, dtype=torch.float16) for _ in range(3))
    for x in (A, A, B, A[:5], A[:5], B, C, A):
        run(x)
    assert encoded == [x.data_ptr() for x in (A, B, A, C, A)]


UNKNOWN: dict[str, Callable[[Kernel], Any]] = {
    "no launcher": lambda kernel: delattr(kernel.run, "launch"),
    "another backend": lambda kernel: setattr(kernel.metadata.target, "backend", "hip"),
    "scratch memory": lambda kernel: setattr(kernel.run, "global_scratch_size", 8),
    "profile memory": lambda kernel: setattr(kernel.run, "profile_scratch_size", 8),
    "instrumented code": lambda kernel: setattr(kernel.run, "gsan_enabled", True),
    "no metadata": lambda kernel: delattr(kernel, "packed_metadata"),
    "nothing around the C function": lambda kernel: setattr(kernel.run, "launch", len),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_launchers_are_left_to_triton(name: str, version: str) -> None:
    kernel = Kernel(version)
    assert isinstance(launch.launcher(kernel), DirectLauncher)
    UNKNOWN[name](kernel)
    assert isinstance(launch.launcher(kernel), TritonLauncher)


def test_kernels_are_not_freed(version: str) -> None:
    """At the end of a process, one that is freed would fail to unload itself, with Triton 3.9."""

    def freed(load: Callable[[Any], Any]) -> bool:
        kernel = Kernel(version)
        load(kernel)
        known = weakref.ref(kernel)
        del kernel
        gc.collect()
        return known() is None

    assert freed(lambda kernel: None) and not freed(launch.launcher)


@pytest.mark.parametrize("other", ["3.5.1", "3.10.0", "4.0.0"])
def test_launchers_of_other_versions_are_left_to_triton(
    other: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "__version__", other)
    assert isinstance(launch.launcher(Kernel(version)), TritonLauncher)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["[G, K, N]", "[G, N, K]", "[K, N]"])
@pytest.mark.parametrize(
    ("variant", "rows", "N"), [("basic", 20, 96), ("basic", 2, 96), ("persistent", 300, 192), ("persistent", 1100, 256)]
)
def test_a_known_call_is_one_function(
    variant: str, rows: int, N: int, layout: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The basic kernel, also with a tile for each row, the persistent kernel, and the one with separate tails."""
    G = 4 if rows > 2 else 16

    def inputs(M: int) -> tuple[Tensor, Tensor, Tensor]:
        sizes = [M // 4 - 1, 0, M // 4 + 1, *[0] * (G - 4), M - 2 * (M // 4)]
        transposed, per_group = layout == "[G, N, K]", layout != "[K, N]"
        return make_inputs(
            sizes, N, 128, dtype=torch.bfloat16, device=device, transposed=transposed, per_group=per_group
        )

    with cache.isolated():
        for M in (4 * rows, 4 * rows, 4 * rows + 1, 4 * rows + 3):
            tensors = inputs(M)
            assert_grouped_gemm_close(grouped_gemm(*tensors, variant=variant), *tensors)
            monkeypatch.setattr(cache, "call", refuse)
        (repeat,) = cache.plans.recent["grouped_gemm"]
    assert any(name.startswith("raw_") for name in repeat.__globals__)  # Triton's C function


def refuse(*_: Any) -> None:
    raise AssertionError("no repeat")


@pytest.mark.gpu
@pytest.mark.parametrize(("variant", "launches"), [("basic", 1), ("persistent", 2)])
def test_tritons_hooks_see_a_known_call(variant: str, launches: int, device: str) -> None:
    tensors = make_inputs([300] * 4, 192, 128, dtype=torch.bfloat16, device=device)
    for _ in range(2):
        grouped_gemm(*tensors, variant=variant)
    seen: list[Any] = []
    triton.knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        out = grouped_gemm(*tensors, variant=variant)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(seen.append)
    assert len(seen) == launches
    assert_grouped_gemm_close(out, *tensors)
    grouped_gemm(*tensors, variant=variant)
    assert len(seen) == launches


@pytest.mark.parametrize("name", ["_patch_lang", "_get_np_dtype"])
def test_the_interpreter_without_a_private_name(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device != "cpu":
        pytest.skip("for Triton's interpreter")
    from moe_kernels.runtime import interpreter

    others = {key: value for key, value in vars(interpreter.interpreter).items() if key != name}
    monkeypatch.setattr(interpreter, "interpreter", SimpleNamespace(**others))
    tensors = make_inputs([3, 0, 2], 16, 16, dtype=torch.float16, device=device)
    assert_grouped_gemm_close(grouped_gemm(*tensors), *tensors)


_Patch = pytest.MonkeyPatch


def without_direct_launch(error: Exception) -> Callable[[_Patch], None]:
    def init(self: DirectLauncher, kernel: Any) -> None:
        raise error

    return lambda patch: patch.setattr(DirectLauncher, "__init__", init)


def with_another_order_of_arguments(patch: _Patch) -> None:
    def init(self: DirectLauncher, kernel: Any) -> None:
        made(self, kernel)
        self.raw = refuse_arguments

    made = DirectLauncher.__init__
    patch.setattr(DirectLauncher, "__init__", init)


def refuse_arguments(*_: Any) -> None:
    raise TypeError("an integer is required")


def without_encoder(patch: _Patch) -> None:
    def encoder(*_: Any) -> None:
        raise ImportError("cannot import name 'TMA_DTYPE_DEVICE_TO_HOST'")

    patch.setattr(launch, "_encoder", encoder)


TAKEN: dict[str, tuple[Callable[[_Patch], None], set[type]]] = {  # what takes it away, and the remaining ways to launch
    "IndexError": (without_direct_launch(IndexError("list index out of range")), {TritonLauncher}),
    "ValueError": (without_direct_launch(ValueError("not enough values to unpack")), {TritonLauncher}),
    "RuntimeError": (without_direct_launch(RuntimeError("no such launcher")), {TritonLauncher}),
    "AttributeError": (without_direct_launch(AttributeError("launch")), {TritonLauncher}),
    "another order of arguments": (with_another_order_of_arguments, {TritonLauncher}),
    "no encoder of descriptors": (without_encoder, {TritonLauncher, DirectLauncher}),
    "no guards": (lambda patch: patch.setattr(torch_internals, "tensor_guards", None), {DirectLauncher}),
    "no allocator": (lambda patch: patch.setattr(torch_internals, "empty_strided_cuda", None), {DirectLauncher}),
}


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "N"), [(20, 64), (200, 64), (1100, 256)])
@pytest.mark.parametrize("name", TAKEN)
def test_without_a_private_api(name: str, rows: int, N: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take_away, ways = TAKEN[name]
    take_away(monkeypatch)
    monkeypatch.setattr(cache.plans, "launchers", {})
    A, B, group_offsets = make_inputs([rows, 0, rows + 7], N, 64, dtype=torch.bfloat16, device=device)
    guard = torch.full((A.size(0) + 300, 64), float("nan"), dtype=A.dtype, device=device)
    A = guard[: A.size(0)].copy_(A)
    w = B.mT.contiguous()
    layer = (
        *make_tokens(rows, 64, 4, 2, dtype=A.dtype, device=device),
        *make_experts(4, 64, 96, dtype=A.dtype, device=device),
    )
    functions: list[tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...]]] = [
        (swiglu_ffn, reference.swiglu_ffn, (A, w, group_offsets)),
        (grouped_gemm_wgrad, reference.grouped_gemm_wgrad, (A, A, group_offsets)),
        (moe_mlp, reference.moe_mlp, layer),
    ]
    with cache.isolated():
        for _ in range(3):
            out = grouped_gemm(A, B, group_offsets, variant="persistent" if N == 256 else "auto")
            assert_grouped_gemm_close(out, A, B, group_offsets)
            for function, plain, given in functions:
                exact = plain(*(x.cpu().double() if x.is_floating_point() else x.cpu() for x in given)).to(device)
                scale = 16 * exact.abs().amax().item()
                assert_within_budget(function(*given), plain(*given), exact, scale=scale, name=function.__name__)
        assert set(cache.plans.recent) == (set() if name == "no guards" else {"grouped_gemm", "moe_mlp"})
        assert {type(way) for way in cache.plans.launchers.values()} <= ways


def test_the_stream_is_that_of_the_device(version: str) -> None:
    before = DirectLauncher(Kernel(version)).before(torch.device("cuda", 1), lambda kind, value: kind)
    assert before[0] == "stream = stream(1)"


def test_the_folder_of_generated_code_may_vanish(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cleaner of /tmp may remove it. One that another user has made again is not used."""
    shutil.rmtree(compiler._folder)
    assert compiler._import("number = 7").number == 7
    assert os.stat(compiler._folder).st_mode & 0o777 == 0o700
    before = compiler._folder
    monkeypatch.setattr(os, "getuid", lambda: os.stat(before).st_uid + 1)
    assert compiler._import("number = 8").number == 8
    assert compiler._folder != before
