"""Compile Helion kernels for sm90 on a machine without a GPU, and count what the compiler made of them.

Importing this makes torch believe that there is an H200, so it needs a process of its own. Nothing is executed; of the
arguments only shapes, strides and dtypes matter. It leans on the insides of helion 1.5 and triton 3.6.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import types
from typing import Any
from unittest import mock

import torch
import triton
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_H200 = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=141 * 2**30,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 * 2**20,
    gcnArchName="",
    is_integrated=False,
    clock_rate=1980000,
    memory_clock_rate=3201000,
    memory_bus_width=6144,
)

torch.version.cuda = "13.0"
for _name, _value in {
    "is_available": True,
    "current_device": 0,
    "device_count": 1,
    "get_device_capability": (9, 0),
    "get_device_properties": _H200,
    "get_device_name": _H200.name,
    "_lazy_init": None,
    "is_current_stream_capturing": False,
}.items():
    mock.patch(f"torch.cuda.{_name}", lambda *a, _v=_value, **k: _v).start()
# A CUDA build of PyTorch would make a tensor on the GPU before the first fake one.
mock.patch("torch._subclasses.fake_tensor.init_gpu_context", lambda device: None).start()
DeviceProperties.create = staticmethod(
    lambda device: DeviceProperties(
        type="cuda",
        index=0,
        multi_processor_count=132,
        cc=90,
        major=9,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        warp_size=32,
    )
)

import helion._compiler.compile_environment as _ce  # noqa: E402
import helion.runtime.kernel as _rk  # noqa: E402

# Helion holds fake tensors to be unaligned, and so would never choose TMA for them.
for _module in (_ce, _rk):
    if hasattr(_module, "tensor_descriptor_runtime_alignment_signature"):
        _module.tensor_descriptor_runtime_alignment_signature = lambda v: (isinstance(v, torch.Tensor),) * 2

mock.patch.object(FakeTensor, "data_ptr", lambda self: self.storage_offset() * self.element_size()).start()
_fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
_to_fake_tensor = _ce.CompileEnvironment._to_fake_tensor


def _symbolic_fake_tensor(self, tensor, source):
    """Give our fake tensors symbolic sizes under static_shapes=False, as a real CUDA tensor would have."""
    if (
        not isinstance(tensor, FakeTensor)
        or self.settings.static_shapes
        or self.fake_mode.is_our_fake(tensor)
        or not all(isinstance(s, int) for s in tensor.shape)
    ):
        return _to_fake_tensor(self, tensor, source)
    with _disable_current_modes():
        meta = torch.empty_strided(tuple(tensor.size()), tuple(tensor.stride()), dtype=tensor.dtype, device="meta")
    like = self.fake_mode.fake_tensor_converter.from_real_tensor(
        self.fake_mode, meta, shape_env=self.shape_env, source=source
    )
    with self.fake_mode:
        result = torch.empty_strided(like.size(), like.stride(), dtype=tensor.dtype, device=tensor.device)
    self.input_sources[result] = source
    return result


_ce.CompileEnvironment._to_fake_tensor = _symbolic_fake_tensor

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}


class _Descriptor:
    def __init__(self, base, shape, strides, block_shape):
        self.base, self.block_shape = base, [int(x) for x in block_shape]


def stand_ins() -> FakeTensorMode:
    """The context in which `torch.empty(..., device="cuda")` makes stand-ins for CUDA tensors."""
    return _fake_mode


def compile_for_sm90(kernel: Any, args: tuple[Any, ...], config: Any) -> dict[str, Any]:
    """Compile `kernel` under `config` for `args`.

    Returns the grid, `shared` (bytes), `regs` and `stack` (bytes spilled) of a thread, the counts of `tma_load`,
    `tma_store`, `cp_async`, `wgmma` and `mma_sync` instructions, under `code` the generated Triton source, and under
    `ptx` what it became.
    """
    code = kernel.bind(args).to_triton_code(config)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "generated.py")
        with open(path, "w") as f:
            f.write(code)
        spec = importlib.util.spec_from_file_location(f"generated_{abs(hash(code))}", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        if hasattr(module, "_helion_tensor_descriptor"):
            module._helion_tensor_descriptor = _Descriptor
        launch: dict[str, Any] = {}

        def launcher(fn: Any, grid: tuple[int, ...], *a: Any, **options: Any) -> None:
            launch.update(fn=fn, grid=grid, args=a, options=options)

        with _fake_mode:
            getattr(module, kernel.fn.__name__)(*args, _launcher=launcher)
        return {**_compile(launch), "code": code}


def _compile(launch: dict[str, Any]) -> dict[str, Any]:
    signature, attrs, constants = {}, {}, {}
    for i, (param, arg) in enumerate(zip(launch["fn"].params, launch["args"], strict=True)):
        if isinstance(arg, _Descriptor):
            signature[param.name] = f"tensordesc<{_TYPES[arg.base.dtype]}{arg.block_shape}>"
        elif isinstance(arg, torch.Tensor):
            signature[param.name] = "*" + _TYPES[arg.dtype]
            attrs[(i,)] = [["tt.divisibility", 16]]
        elif param.is_constexpr or (arg == 1 and not isinstance(arg, bool)):
            signature[param.name] = "constexpr"
            constants[(i,)] = arg
        elif isinstance(arg, bool):
            signature[param.name] = "i1"
        elif isinstance(arg, int):
            signature[param.name] = "i32" if -(2**31) <= arg < 2**31 else "i64"
            if arg % 16 == 0:
                attrs[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[param.name] = "fp32"
    wanted = ("num_warps", "num_stages", "maxnreg", "launch_pdl")
    options = {k: v for k, v in launch["options"].items() if k in wanted}
    source = ASTSource(fn=launch["fn"], signature=signature, constexprs=constants, attrs=attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ttgir, ptx = compiled.asm["ttgir"], compiled.asm["ptx"]
    report = {
        "grid": launch["grid"],
        "shared": compiled.metadata.shared,
        "tma_load": ttgir.count("async_tma_copy_global_to_local"),
        "tma_store": ttgir.count("async_tma_copy_local_to_global"),
        "cp_async": ttgir.count("ttg.async_copy_global_to_local"),
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma_sync": ptx.count("mma.sync"),
        "ptx": ptx,
    }
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(compiled.asm["cubin"])
        f.flush()
        tool = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")
        usage = subprocess.run([tool, "--dump-resource-usage", f.name], capture_output=True, text=True).stdout
    if match := re.search(r"REG:(\d+) STACK:(\d+)", usage):
        report["regs"], report["stack"] = map(int, match.groups())
    return report


def ptxas_says(ptx: str) -> str:
    """What the assembler has to say of `ptx`, such as that it keeps WGMMA instructions from overlapping."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as f:
        f.write(ptx)
        f.flush()
        tool = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/ptxas")
        command = [tool, "-v", "--gpu-name=sm_90a", "--output-file", os.devnull, f.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
