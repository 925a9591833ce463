"""Properties of GPU models that kernels are chosen and compiled for."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from moe_kernels import requirements


@dataclass(frozen=True)
class Gpu:
    """A GPU model. `arch` is Triton's name of the architecture."""

    name: str  # as the driver gives it
    backend: str  # Triton's: "cuda", "hip" or "xpu"; "interpreter" for its interpreter on a CPU
    arch: int | str
    multiprocessors: int
    shared_memory: int  # bytes that a program can have
    slow_memory: bool = False  # for kernels that use TMA: an H100 reads 3.35 TB/s, an H200 4.8

    @property
    def capability(self) -> tuple[int, int]:
        """NVIDIA's compute capability; (0, 0) elsewhere."""
        return divmod(self.arch, 10) if isinstance(self.arch, int) else (0, 0)

    @property
    def has_tma(self) -> bool:
        """Whether kernels use TMA. Their loads in flight need more shared memory than GPUs of sm120 have."""
        return self.backend == "cuda" and self.capability >= (9, 0) and self.shared_memory >= 200 << 10

    @property
    def has_tf32(self) -> bool:
        """Whether it is an NVIDIA GPU whose tensor cores multiply tf32."""
        return self.backend == "cuda" and self.capability >= (8, 0)

    @property
    def has_e4m3(self) -> bool:
        """Whether Triton compiles float8_e4m3fn for it."""
        return self.backend != "cuda" or self.capability >= (8, 9)

    @property
    def warp_size(self) -> int:
        return 64 if self.backend == "hip" else 32

    @property
    def device_type(self) -> str:
        """PyTorch's type of the device."""
        return {"interpreter": "cpu", "xpu": "xpu"}.get(self.backend, "cuda")


# The GPU models that `compile --gpu` accepts on any machine.
KNOWN = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", "cuda", 80, 108, 166912),
    "l40s": Gpu("NVIDIA L40S", "cuda", 89, 142, 101376),
    "h100": Gpu("NVIDIA H100 80GB HBM3", "cuda", 90, 132, 232448, slow_memory=True),
    "h200": Gpu("NVIDIA H200", "cuda", 90, 132, 232448),
    "b200": Gpu("NVIDIA B200", "cuda", 100, 148, 232448),
    "rtx-pro-6000": Gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition", "cuda", 120, 188, 101376),
}
INTERPRETER = Gpu("interpreter", "interpreter", "cpu", multiprocessors=4, shared_memory=1 << 30)


@functools.cache
def of_device(kind: str, index: int) -> Gpu:
    """The model of a device, by PyTorch's type and index; INTERPRETER for CPUs, and where TRITON_INTERPRET is on."""
    if kind == "cpu" or requirements.interpreted():
        return INTERPRETER
    if kind == "xpu":
        xpu = torch.xpu.get_device_properties(index)
        return Gpu(xpu.name, "xpu", str(xpu.architecture), int(xpu.gpu_subslice_count), 1 << 17)
    found: Any = torch.cuda.get_device_properties(index)
    count = int(found.multi_processor_count)
    if torch.version.hip is not None:
        return Gpu(found.name, "hip", found.gcnArchName.split(":")[0], count, 65536)
    gpu = Gpu(
        name=found.name,
        backend="cuda",
        arch=10 * found.major + found.minor,
        multiprocessors=count,
        shared_memory=int(found.shared_memory_per_block_optin),
    )
    kilobits = 2 * found.memory_clock_rate * found.memory_bus_width  # per second: two transfers per line and clock
    slow = 0 < kilobits < 8 * 4e9  # 0 is unknown
    return replace(gpu, slow_memory=True) if slow and gpu.has_tma else gpu


def current() -> Gpu | None:
    """The model of the current CUDA GPU, None if there is none."""
    return of_device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def of_tensor(tensor: torch.Tensor) -> Gpu:
    """The model of the GPU that `tensor` is on; INTERPRETER for CPUs, and where TRITON_INTERPRET is on."""
    return of_device(tensor.device.type, tensor.device.index or 0)
