"""Start-up times of a process: first calls, with and without caches; and host times of later calls.

    python -m benchmarks.start_up [--compiled FOLDER] [--json FILE]

Each line is measured in its own process. The clock starts after `import torch`, the creation of the operands and a
`torch.cuda.synchronize()`; it includes `import moe_kernels` and `import triton`. "Nothing cached" means empty folders
for this package's store, Triton's cache and Inductor's. Other libraries' first products are measured with their caches
filled, if the libraries are installed. A first process, which is not measured, writes the byte code of
all modules to disk, as a usual installation does, and brings their files into the page cache. Needs a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

H, WIDTH, E, TOP_K = 2048, 768, 128, 8  # qwen3-30b-a3b; moe_kernels is not imported before the clock starts
TOKENS = [8192, 1, 2, 3, 4, 8, 16, 17, 32, 48, 64, 100, 128, 200, 256, 300, 512, 700, 1024, 1500, 2048]
TOKENS += [3000, 4096, 6000, 8192]
_GEMM = (128, 65536, 1536, 2048)  # G, M, N, K


def _random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(torch.bfloat16)


def _tokens(T: int) -> tuple[Tensor, Tensor, Tensor]:
    logits = torch.randn(T, E, device="cuda")
    weights, ids = torch.topk(logits.softmax(-1), TOP_K)
    return _random(T, H), ids, weights


def _timed(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def _operands() -> tuple[Tensor, Tensor, Tensor]:
    G, M, N, K = _GEMM
    offsets = torch.arange(G + 1, device="cuda", dtype=torch.int32) * (M // G)
    return _random(M, K), _random(G, N, K, scale=K**-0.5).mT, offsets


def _weights() -> list[Tensor]:
    return [_random(E, 2 * WIDTH, H, scale=H**-0.5), _random(E, H, WIDTH, scale=WIDTH**-0.5)]


def _gemm(*operands: Tensor) -> None:
    from moe_kernels import grouped_gemm  # the import is timed

    grouped_gemm(*operands)


def _layer(*operands: Tensor) -> None:
    from moe_kernels import moe_mlp  # the import is timed

    moe_mlp(*operands)


def layer() -> dict[str, Any]:
    """Time the first `grouped_gemm` of a process, then a layer's first calls with token counts from 1 to 8192."""
    operands, weights, inputs = _operands(), _weights(), [_tokens(T) for T in TOKENS]
    torch.cuda.synchronize()
    with torch.no_grad():
        first = _timed(partial(_gemm, *operands))
        times = [_timed(partial(_layer, *one, *weights)) for one in inputs]
    found = {"first grouped_gemm": first, "25 calls": sum(times), "worst of them": max(times)}
    return {**found, **_imported(), "times": times}


def training() -> dict[str, Any]:
    """Time the first training step of a process, and the first one with another token count."""
    weights = [weight.requires_grad_() for weight in _weights()]
    inputs = [_tokens(T) for T in (4096, 1000)]
    torch.cuda.synchronize()

    def step(hidden: Tensor, ids: Tensor, topk_weights: Tensor) -> None:
        from moe_kernels import moe_mlp  # the import is timed

        out = moe_mlp(hidden.requires_grad_(), ids, topk_weights.requires_grad_(), *weights)
        torch.autograd.backward(out.float().square().mean())

    first, second = (_timed(partial(step, *one)) for one in inputs)
    return {"first step": first, "first step of another T": second, **_imported()}


def host() -> dict[str, Any]:
    """Return host microseconds of calls with cached binaries, for token counts seen before and for new ones."""
    from moe_kernels import grouped_gemm, moe_mlp

    weights = _weights()
    found: dict[str, Any] = {}
    with torch.no_grad():
        for T in (1, 16, 300, 4096, 8192):
            one = _tokens(T)
            for _ in range(2):
                moe_mlp(*one, *weights)
            found[f"layer T={T}, seen"] = _host_us([partial(moe_mlp, *one, *weights)] * 100)
        fresh = [_tokens(T) for T in (*range(513, 553), *range(2100, 2140))]
        for T in (600, 2050):
            moe_mlp(*_tokens(T), *weights)
        found["layer, T never seen"] = _host_us([partial(moe_mlp, *one, *weights) for one in fresh])
        # Classes of token counts new to this process: their plans are read from disk.
        others = [_tokens(T) for T in (3, 5, 9, 40, 70, 130, 1030)]
        found["layer, class of T never seen"] = _host_us([partial(moe_mlp, *one, *weights) for one in others])
        A, B, _ = _operands()
        for name, M in (("basic", 512), ("persistent", len(A))):
            ends = torch.arange(E + 1, device="cuda", dtype=torch.int32) * (M // E)
            for _ in range(3):
                grouped_gemm(A[:M], B, ends)
            found[f"grouped_gemm {name}, seen"] = _host_us([partial(grouped_gemm, A[:M], B, ends)] * 100)
            grouped_gemm(A[: M - 61], B, ends)
            rows = [partial(grouped_gemm, A[: M - i], B, ends) for i in range(1, 60)]
            found[f"grouped_gemm {name}, M never seen"] = _host_us(rows)
    parameters = [weight.requires_grad_() for weight in weights]
    hidden, ids, topk_weights = _tokens(4096)
    grad = torch.ones_like(hidden)

    def step() -> None:
        out = moe_mlp(hidden.requires_grad_(), ids, topk_weights.requires_grad_(), *parameters)
        torch.autograd.grad(out, (hidden, topk_weights, *parameters), grad)

    for _ in range(3):
        step()
    found["training step T=4096, seen"] = _host_us([step] * 30, at_once=1)
    return found


def other(provider: str) -> dict[str, float]:
    """Time the first product of a process by another library, with its import and what it prepares."""
    from benchmarks.operators import OPERATORS
    from tritonbench_ops.baselines import Inputs

    A, B, offsets = _operands()
    G, M, *_ = _GEMM
    inputs = Inputs(A, B, offsets, [M // G] * G)
    make = OPERATORS["grouped_gemm"].providers[provider].make
    torch.cuda.synchronize()
    with torch.no_grad():
        return {"first product": _timed(lambda: make(inputs)())}


def _host_us(calls: Sequence[Callable[[], Any]], at_once: int = 5) -> float:
    from benchmarks.timing import host_microseconds

    return round(host_microseconds(calls, torch.device("cuda"), at_once), 1)


def _imported() -> dict[str, bool]:
    return {f"imports {name}": name in sys.modules for name in ("helion", "torch._inductor")}


OTHERS = ("torch", "quack", "deepgemm", "triton_kernels")  # providers of the operator "grouped_gemm"
PARTS = {part.__name__: part for part in (layer, training, host)} | {name: partial(other, name) for name in OTHERS}


def child(part: str, folders: dict[str, str]) -> dict[str, Any]:
    """Run `part` in its own process, with these cache folders, and return its results."""
    command = [sys.executable, "-m", "benchmarks.start_up", "--part", part]
    environment = os.environ | folders | {"PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _folders(root: str, state: str) -> dict[str, str]:
    names = ("MOE_KERNELS_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    folders = {name: f"{root}/{state}/{name.lower()}" for name in names}
    # No plans but those of these folders are read.
    return folders | {"MOE_KERNELS_CACHE_READONLY": "", "PYTHONPYCACHEPREFIX": f"{root}/bytecode"}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.start_up",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", choices=PARTS, help="run this part in this process, and print what it took")
    parser.add_argument("--compiled", type=Path, help="a folder that `python -m moe_kernels compile` made")
    parser.add_argument("--json", type=_to_file, help="write the results to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    if options.compiled and not any(options.compiled.glob("*/plans/*")):
        parser.error(f"--compiled: `python -m moe_kernels compile` has made no plans in {str(options.compiled)!r}")
    if options.part:
        print(json.dumps(PARTS[options.part]()))
        return
    from benchmarks.run import command_line, replace_file
    from moe_kernels.requirements import nvidia_driver

    versions = {name: metadata.version(name) for name in ("torch", "triton", "helion")}
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "driver": nvidia_driver(), **versions}
    results |= {"date": str(datetime.date.today()), "command": command_line("start_up", None)}
    with tempfile.TemporaryDirectory() as root:
        print("one process that is not measured", flush=True)
        child("training", _folders(root, "unmeasured"))
        for part in ("layer", "training"):
            for state in ("nothing cached", "caches filled"):
                _note(results, f"{part}, {state}", part, _folders(root, part))
        _note(results, "host", "host", _folders(root, "layer"))
        _note_others(results, _folders(root, "others"))
        if options.compiled:
            for part in ("layer", "training"):
                folders = _folders(root, f"{part}, compiled") | {
                    "MOE_KERNELS_CACHE_READONLY": str(options.compiled.resolve())
                }
                _note(results, f"{part}, compiled on a machine without a GPU", part, folders)
    if options.json:
        replace_file(options.json, json.dumps(results, indent=1) + "\n")


def _to_file(text: str) -> Path:
    from benchmarks.run import to_file  # imports moe_kernels, which a part's process does within its clock

    return to_file(text)


def _note_others(results: dict[str, Any], folders: dict[str, str]) -> None:
    from benchmarks.operators import OPERATORS

    providers = OPERATORS["grouped_gemm"].providers
    for name in OTHERS:
        if providers[name].installed:
            for _ in range(2):  # the first process fills the caches
                _note(results, f"{name}, caches filled", name, folders)


def _note(results: dict[str, Any], name: str, part: str, folders: dict[str, str]) -> None:
    try:
        results[name] = child(part, folders)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        results[name] = {"error": str(error)[-2000:]}
    shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in results[name].items() if k != "times"}
    print(f"{name}: {shown}", flush=True)


if __name__ == "__main__":
    main()
