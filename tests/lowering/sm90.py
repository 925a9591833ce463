"""Compile kernels for an H200 on a machine without one, and count features of the compiled code.

Importing this makes torch report an H200, so it needs a process of its own. Nothing is executed: tensors are on the
meta device, and only their shapes, strides and dtypes matter.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from moe_kernels import requirements
from moe_kernels.runtime import cache, targets, torch_internals
from moe_kernels.runtime.compile import Specialization, lower
from moe_kernels.runtime.plan import Request
from moe_kernels.runtime.signature import Operator, symbolic

# A WGMMA instruction whose accumulator is followed by a list of registers, not by a shared memory descriptor.
FROM_REGISTERS = re.compile(r"wgmma\.mma_async[^;{]*\{[^;}]*\},\s*\{")
FP8_CONVERSION = re.compile(r"cvt\.rn\.satfinite\.e[45]m[32]x2")
TRITON = requirements.minor(triton.__version__) or (0, 0)
TRITON_3_6 = TRITON <= (3, 6)
TRITON_3_9 = TRITON >= (3, 9)
HELION_1_5_0 = requirements.installed("helion") == "1.5.0"
# The most bytes per thread that ptxas may spill from registers to memory in fp8 kernels.
FP8_STACK = 24 if TRITON_3_9 else 0
H200 = targets.KNOWN["h200"]
SHARED_MEMORY = 232_448  # bytes per block at most
torch_internals.pretend(H200)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return a tensor for a call. It has no memory, and counts as aligned to 16 bytes."""
    return torch.empty(shape, dtype=dtype, device="meta")


def requests(
    operator: Operator, tensors: Sequence[torch.Tensor | None], options: Any, unaligned: Collection[str] = ()
) -> list[Request]:
    """Return what a call compiles, launch by launch, with the inputs named in `unaligned` at odd addresses."""
    inputs = [
        x if x is None or name not in unaligned else replace(x, aligned=False)
        for name, x in zip(operator.inputs, symbolic(operator, tensors, options), strict=True)
    ]
    builder, _ = cache.build_steps(operator, inputs, options, H200)
    return [step for step in builder.steps if isinstance(step, Request)]


def lowered(request: Request) -> dict[str, Any]:
    """Return the `report` of a request, with the `name` of its kernel and the `grid` of its launch."""
    launch, specialized = lower(request, H200)
    return {**report(specialized), "name": request.kernel.name, "grid": launch.grid}


_reports: dict[str, dict[str, Any]] = {}


def report(specialized: Specialization) -> dict[str, Any]:
    """Return properties of the code that Triton's compiler generates for a kernel; each is compiled once.

    Returns `shared` (bytes), `regs` and `stack` (bytes spilled) per thread, the numbers of `tma_load`, `tma_store`,
    `cp_async`, `wgmma` and `mma_sync` instructions, under `code` the generated source, under `ptx` the PTX, and
    under `sass`, for kernels that convert to fp8, the machine code.

    Raises AssertionError for a WGMMA whose left operand is in registers: Triton 3.6 overwrites them while the
    asynchronous instruction may still read them. Products in tf32x3 have such operands, but wait for each.
    """
    if specialized.key not in _reports:
        _reports[specialized.key] = _compile(specialized)
    return _reports[specialized.key]


def _compile(specialized: Specialization) -> dict[str, Any]:
    function = specialized.function
    source = ASTSource(
        fn=function,
        signature=dict(zip(function.arg_names, specialized.signature, strict=True)),
        constexprs=dict(specialized.constants),
        attrs=dict(specialized.attributes),
    )
    target = GPUTarget(H200.backend, H200.arch, H200.warp_size)
    made = triton.compile(source, target=target, options=dict(specialized.options))
    ttgir, ptx = made.asm["ttgir"], made.asm["ptx"]
    if FROM_REGISTERS.search(ptx) and not ("input_precision='tf32x3'" in function.src and waits_for_each(ptx)):
        raise AssertionError(f"{function.__name__}: the left operand of a WGMMA is in registers")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(made.asm["cubin"])
        f.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", f.name)
        used = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        assert used is not None, usage
        # A stack frame may exist without any spill to it.
        sass = _run("nvdisasm", f.name) if used[2] != "0" or FP8_CONVERSION.search(ptx) else ""
        spills = used[2] != "0" and re.search(r"\b(STL|LDL)\b", sass) is not None
    return {
        "shared": made.metadata.shared,
        "regs": int(used[1]),
        "stack": int(used[2]) if spills else 0,
        "tma_load": ttgir.count("async_tma_copy_global_to_local"),
        "tma_store": len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.global\.shared", ptx)),
        "cp_async": ttgir.count("ttg.async_copy_global_to_local"),
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma_sync": ptx.count("mma.sync"),
        "ptx": ptx,
        "sass": sass,
        "code": function.src,
    }


def waits_for_each(ptx: str) -> bool:
    """Whether each WGMMA whose left operand is in registers is waited for, with all that have begun, before a branch or
    a label: in a loop, the next pass overwrites the registers.
    """
    after = (ptx[begun.end() :] for begun in FROM_REGISTERS.finditer(ptx))
    found = (re.search(r"^\$|\bbra\b|wgmma\.wait_group\.sync\.aligned (\d+);", text, re.M) for text in after)
    return all(next_one is not None and next_one[1] == "0" for next_one in found)


def ptxas_says(ptx: str) -> str:
    """Return the assembler's messages for `ptx`, such as that WGMMA instructions cannot overlap."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as f:
        f.write(ptx)
        f.flush()
        return _run(
            Path(get_ptxas(H200.arch).path).name, "-v", "--gpu-name=sm_90a", "--output-file", os.devnull, f.name
        )


def _run(tool: str, *arguments: str) -> str:
    """Return the output of a tool that is part of Triton."""
    path = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin", tool)
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
