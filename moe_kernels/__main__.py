"""Command line: `python -m moe_kernels demo | info | compile | cache | tune`."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import moe_kernels
from moe_kernels import commands, requirements, rules, timing
from moe_kernels.rules import grouped
from moe_kernels.runtime import targets
from moe_kernels.testing import assert_grouped_gemm_close, flop_count, group_sizes_for, make_inputs
from moe_kernels.tuning import entries
from moe_kernels.tuning import search as tune

_DEMO = """\
Multiplies generated Mixture-of-Experts traffic: one matrix per expert, with skewed numbers of rows, some of them 0. The
demo packs the matrices, multiplies them by grouped_gemm_jagged, grouped_gemm_jagged_persistent and grouped_gemm, with
one weight per expert and with one shared weight, compares each result with float64, unpacks it, and prints times and
errors. An error may be twice that of plain PyTorch in the same dtype, plus a few roundings of float32.

With a GPU: bfloat16, 64 experts, 8192 rows, N = K = 2048, compared with PyTorch's own grouped_mm; needs about 2 GB of
GPU memory. Most of the time is compilation.
Without a GPU, or with TRITON_INTERPRET=1: the same kernels in Triton's interpreter, float32, a small case.

Needs torch, triton and helion. Exits with 0 if every check passed, otherwise with 1."""

_INFO = """\
Prints
- the GPU and its driver, the versions of Python and the packages, and whether Triton's interpreter is on;
- the variant, kernel and config of a few typical shapes, and where they come from: the rule, or a file of tuned
  configs, with the distance of its entry, the sum of abs(log2(call / entry)) over rows per group, N, K and G;
- what is missing, with the command that installs it.
With --model: what that model's layer launches for each class of token counts, and how many kernels and configs that
takes. This needs Helion.

Without --model, needs torch only. Exits with 0, with 1 if Helion or Triton is missing for --model, 2 for wrong
arguments."""

# (model, G, M, N, K, dtype)
_TYPICAL = [
    ("DeepSeek-V3, 8 experts of it, prefill", 8, 16384, 4096, 7168, torch.bfloat16),
    ("Qwen3-30B-A3B, prefill", 128, 65536, 1536, 2048, torch.bfloat16),
    ("Qwen3-30B-A3B, decode", 128, 512, 1536, 2048, torch.bfloat16),
    ("Qwen3-30B-A3B, prefill, float32", 128, 65536, 1536, 2048, torch.float32),
]
_KERNELS = {"basic": "jagged", "persistent": "jagged_persistent", "tails": "jagged_tails", "tall": "jagged_tall"}
_PACKAGES = ("torch", "triton", "helion", "numpy")
_ROUNDS = 20


def main(argv: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m moe_kernels",
        description="Grouped GEMM kernels for Mixture-of-Experts layers: try them, inspect them, prepare them.",
        epilog="`python -m moe_kernels demo --help` describes a command.",
    )
    subparsers = parser.add_subparsers(dest="command", metavar="{demo,info,compile,cache,tune}")
    for name, summary, text, add_arguments in (
        ("demo", "run the kernels of grouped_gemm, check the results, print times; works without a GPU", _DEMO, None),
        ("info", "print GPU, versions, configs and missing packages", _INFO, commands.add_info_arguments),
        ("compile", "make plans and binaries ahead, for any GPU", commands.COMPILE, commands.add_compile_arguments),
        ("cache", "show or clear the plans and binaries on disk", commands.CACHE, commands.add_cache_arguments),
        ("tune", "search faster configs on this GPU, and store them", tune.HELP, tune.add_arguments),
    ):
        added = subparsers.add_parser(name, help=summary, description=text, formatter_class=raw)
        if add_arguments is not None:
            add_arguments(added)
    options = parser.parse_args(argv)
    if options.command is None:
        parser.print_help()
        return 2
    try:
        return _run(parser, options)
    except ImportError as error:
        print(f"{options.command}: {error}\nTo fix it: {requirements.fix()}", file=sys.stderr)
        return 1


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if options.command == "cache":
        return commands.cache_main(options)
    if options.command == "demo":
        return demo()
    if options.command == "info" and not options.model:
        if options.gpu or options.tokens:
            parser.error("info: --gpu and --tokens need --model")
        return info()
    if not (options.command == "compile" and options.list) and not _kernels_run():
        return 1
    if options.command == "info":
        return commands.print_layer(options)
    return tune.main(options) if options.command == "tune" else commands.compile_main(options)


def demo() -> int:
    """Pack, multiply, check and unpack generated traffic; return the exit code."""
    gpu = None if requirements.interpreted() else _gpu()
    if gpu is None and not requirements.interpreted():
        if "triton" in sys.modules:  # Triton reads TRITON_INTERPRET when it is imported
            command = [sys.executable, "-m", "moe_kernels", "demo"]
            return subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False).returncode
        os.environ["TRITON_INTERPRET"] = "1"
    if not _kernels_run():
        return 1

    device = gpu or "cpu"
    G, M, N, K, dtype = (64, 8192, 2048, 2048, torch.bfloat16) if gpu else (8, 128, 64, 72, torch.float32)
    if gpu:
        print(f"On {torch.get_device_module(gpu).get_device_name()}:")
    else:
        print("No GPU is used: these are the real kernels, run by Triton's interpreter on the CPU, on a small case.")
    sizes = group_sizes_for("empty", G, M)
    A, B, _ = make_inputs(sizes, N, K, dtype=dtype, device=device)
    A_packed, group_offsets = moe_kernels.pack_groups(list(torch.split(A, sizes)))
    empty = sizes.count(0)
    packed = f"packed into A_packed {list(A_packed.shape)}"
    print(f"{G} experts get 0 to {max(sizes)} rows each ({empty} get none), {dtype}: {packed}.", flush=True)

    functions = (moe_kernels.grouped_gemm_jagged, moe_kernels.grouped_gemm_jagged_persistent, moe_kernels.grouped_gemm)
    calls: list[tuple[str, Tensor, Callable[[], Tensor]]] = [
        (function.__name__, weight, partial(function, A_packed, weight, group_offsets))
        for weight in (B, B[0])
        for function in functions
    ]
    checked = [_check(name, call, sizes, A_packed, weight, group_offsets) for name, weight, call in calls]

    if gpu:
        offs = moe_kernels.offs_from_group_offsets(group_offsets)
        theirs = partial(torch.nn.functional.grouped_mm, A_packed, B, offs=offs)
        theirs()  # as the others have been called by the check
        calls.append(("torch's grouped_mm", B, theirs))
        checked.append(["", "", "not checked"])
    timed = {i: call for i, (*_, call) in enumerate(calls)}
    micros = timing.interleaved(timed, _ROUNDS if gpu else 1, torch.device(device)).values()
    if gpu:
        header = ["kernel", "B", "us", "TFLOP/s", "error", "budget", "result"]
        times = [[f"{us:8.1f}", f"{flop_count(sizes, N, K) / us / 1e6:7.0f}"] for us in micros]
    else:
        header = ["kernel", "B", "seconds", "error", "budget", "result"]
        times = [[f"{us / 1e6:7.2f}"] for us in micros]
    print()
    _print_table(
        header,
        [
            [name, str(list(weight.shape)), *spent, *outcome]
            for (name, weight, _), spent, outcome in zip(calls, times, checked, strict=True)
        ],
    )
    print("\nerror, budget: largest difference from float64 and its limit, in the group closest to its limit.")
    if gpu:
        print(f"us: medians of {_ROUNDS} rounds in which the rows of this table take turns, without compilation.")
    else:
        print("seconds: in the interpreter, after compiling. They say nothing about the speed on a GPU.")
    wrong = sum(outcome[-1] == "WRONG" for outcome in checked)
    print(f"{wrong} of {len(checked)} results are wrong." if wrong else "All results are right.")
    return int(bool(wrong))


def info() -> int:
    """Print what is installed, what the kernels would use here, and what is missing."""
    problems, fix = requirements.problems(), requirements.fix()
    on = requirements.interpreted()
    fields = [
        ("moe_kernels", moe_kernels.__version__),
        ("Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"),
        *((name, requirements.installed(name) or "not installed") for name in _PACKAGES),
        *_gpu_fields(),
        ("interpreter", "on (TRITON_INTERPRET is set)" if on else "off (TRITON_INTERPRET=1 turns it on)"),
        ("kernels", f"cannot run: {'; '.join(problems)}" if problems else "all they need is installed"),
        *([("to fix it", fix)] if problems else []),
    ]
    width = max(len(label) for label, _ in fields)
    for label, value in fields:
        print(f"{label:{width}}  {value}")
    print()
    if problems:
        print("Configs: not shown, because they need the missing packages.")
        return 0
    try:
        importlib.import_module("helion")
    except Exception as error:  # a broken installation may raise anything; this command reports it
        print(f"New plans cannot be made, because helion cannot be imported: {type(error).__name__}: {error}")
        if not isinstance(error, OSError):  # such as no folder for temporary files
            print(f"To fix it: {fix}")
        return 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _print_configs()
    for warning in caught:
        print(f"Note: {warning.message}")
    return 0


def _print_configs() -> None:
    """Print the folders of tuned configs, and the configs of a few typical shapes."""
    gpu = targets.of_device("cuda", 0) if _gpu() == "cuda" and not requirements.interpreted() else None
    if gpu is None:
        print("Configs: by the rule, derived on an H200 and an H100. Tuned configs are for GPUs; none is used here.")
    else:
        known = [file for file, _ in entries.load(gpu)]
        print(f"Configs for {gpu.name}: the nearest tuned entry, or a rule derived on an H200 and an H100. Files:")
        for file, _ in entries.files_for(gpu):
            found = os.path.exists(file)
            print(f"  {file}: {f'{known.count(file)} entries for these versions' if found else 'not there'}")
    rows = []
    tma = gpu is None or gpu.has_tma
    for name, G, M, N, K, dtype in _TYPICAL:
        mean_rows = M // G
        problem = grouped.Problem(
            rows=rules.floor_power_of_2(mean_rows),
            M=rules.floor_power_of_2(M),
            N=N,
            K=K,
            G=G,
            dtype=dtype,
            tf32=False,
            tma_A=tma,
            tma_B=tma,
            tma_out=tma,
            has_bias=False,
            gpu=gpu,
        )
        choice = grouped.choose(problem)
        # The variant "persistent" includes the kernel `jagged_tails`; only "auto" includes `jagged_tall`.
        variant = {"tails": "persistent", "tall": "auto"}.get(choice.variant, choice.variant)
        limit = grouped.persistent_from_rows(problem)
        because = f"rule: {mean_rows} rows per group {'>=' if mean_rows >= limit else '<'} {limit}"
        if problem.precision == "tf32x3":
            because = "rule: float32 as three products in TF32"
        if choice.entry is not None:
            near = choice.entry.bucket
            distance = grouped.bucket_of(problem).distance(near)
            because = f"tuned: {choice.source}, distance {distance:.2f} from "
            because += f"{near.rows} rows per group, N {near.N}, K {near.K}, G {near.G}"
        values: dict[str, Any] = choice.config.config
        rows.append(
            [
                name,
                f"{G}, {M}, {N}, {K}",
                variant,
                because,
                _KERNELS[choice.variant],
                f"block_m {choice.block_m}, blocks {values['block_sizes']}, "
                f"{values['num_warps']} warps, {values['num_stages']} stages, "
                f"{len(choice.addressing.tma)} of 3 tensors by TMA",
            ]
        )
    _print_table(["layer", "G, M, N, K", "variant", "because", "kernel", "config"], rows)


def _gpu() -> str | None:
    """Return the device type of the GPU that the kernels can use, or None."""
    if torch.cuda.is_available():
        return "cuda"
    return "xpu" if torch.xpu.is_available() else None


def _gpu_fields() -> list[tuple[str, str]]:
    gpu = _gpu()
    fields = []
    if gpu == "cuda":
        for i in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(i)
            fields.append((f"GPU {i}", f"{torch.cuda.get_device_name(i)}, compute capability {major}.{minor}"))
    elif gpu == "xpu":
        fields = [(f"GPU {i}", torch.xpu.get_device_name(i)) for i in range(torch.xpu.device_count())]
    else:
        fields.append(("GPU", "none usable: CPU tensors are multiplied in plain PyTorch"))
    fields.append(("driver", requirements.nvidia_driver() or "no NVIDIA driver found"))
    fields.append(("torch built for", f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"))
    return fields


def _kernels_run() -> bool:
    """Whether the kernels can run here; if not, print what is missing."""
    problems = requirements.problems()
    if problems:
        print(f"The kernels cannot run here: {'; '.join(problems)}.\nTo fix it: {requirements.fix()}", file=sys.stderr)
    return not problems


def _check(
    name: str, call: Callable[[], Tensor], sizes: list[int], A_packed: Tensor, B: Tensor, group_offsets: Tensor
) -> list[str]:
    """Call once, compare with float64, and return the table cells for error, budget and result."""
    print(f"  {name}, B {list(B.shape)}: compiling and checking ... ", end="", file=sys.stderr, flush=True)
    begin = time.perf_counter()
    out = call()
    try:
        report = assert_grouped_gemm_close(out, A_packed, B, group_offsets)
        unpacked = [len(part) for part in moe_kernels.unpack_groups(out, group_offsets)]
        if unpacked != sizes:
            raise AssertionError(f"unpacked into groups of {unpacked} rows, expected {sizes}")
    except AssertionError as error:
        print(f"wrong: {error}", file=sys.stderr)
        return ["", "", "WRONG"]
    print(f"{time.perf_counter() - begin:.1f} s", file=sys.stderr)
    return [f"{report['max_error']:.1e}", f"{report['budget']:.1e}", "ok"]


def _print_table(header: list[str], rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


if __name__ == "__main__":
    commands.run_and_exit(main)
