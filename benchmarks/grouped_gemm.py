"""Time the jagged grouped GEMM against PyTorch on one GPU: python benchmarks/grouped_gemm.py --json results.json

All providers of a case take turns within a round, the order rotating from round to round; the L2 cache is flushed
before each call, and medians are taken. Compare inside one run only: clocks differ from run to run. Times are of eager
calls and of CUDA-graph replays; host_us is what a call costs the host. TFLOP/s count real rows only.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from moe_kernels import grouped_gemm, grouped_gemm_jagged, grouped_gemm_jagged_persistent
from moe_kernels.kernels import grouped_gemm as kernels
from moe_kernels.testing import byte_count, flop_count, group_sizes_for, make_inputs

CASES = {  # name: (G, M, N, K, sizes)
    "dsv3_ep_up": (8, 16384, 4096, 7168, "softmax"),
    "qwen3_up": (128, 65536, 1536, 2048, "softmax"),
    "mixtral_up": (8, 8192, 28672, 4096, "softmax"),
    "decode_qwen3": (128, 512, 1536, 2048, "softmax"),
}
Call = Callable[[], Any]


def providers(A: torch.Tensor, B: torch.Tensor, group_offsets: torch.Tensor, sizes: list[int]) -> dict[str, Call]:
    """The calls to compare, by name."""
    offs = group_offsets[1:].contiguous()
    A_groups, B_groups = A.split(sizes), B.unbind(0)
    out = torch.empty(A.size(0), B.size(2), dtype=A.dtype, device=A.device)
    out_groups = out.split(sizes)
    B_dense = B[0]

    def loop_of_mm() -> torch.Tensor:
        for a, b, o in zip(A_groups, B_groups, out_groups, strict=True):
            if a.size(0):
                torch.mm(a, b, out=o)
        return out

    return {
        "torch._grouped_mm": lambda: torch._grouped_mm(A, B, offs),
        "grouped_gemm": lambda: grouped_gemm(A, B, group_offsets),
        "basic": lambda: grouped_gemm_jagged(A, B, group_offsets),
        "persistent": lambda: grouped_gemm_jagged_persistent(A, B, group_offsets),
        "persistent, table made beforehand": without_table(A, B, group_offsets),
        "loop of torch.mm": loop_of_mm,
        "one dense torch.mm, same FLOPs": lambda: torch.mm(A, B_dense),
    }


def without_table(A: torch.Tensor, B: torch.Tensor, group_offsets: torch.Tensor) -> Call:
    """The persistent kernel by itself: its tile table made beforehand, and no row outside the groups zeroed."""
    made = {}
    original = kernels.compile_kernel

    def keep(kernel: Any, args: Any, *rest: Any, **options: Any) -> Any:
        run = original(kernel, args, *rest, **options)

        def call(*args: Any) -> Any:
            made[kernel.name] = (run, args)
            return run(*args)

        return call

    out = torch.empty(A.size(0), B.size(2), dtype=A.dtype, device=A.device)
    with mock.patch.object(kernels, "compile_kernel", keep):
        kernels._plan("persistent", A, B, group_offsets, None, out)(A, B, group_offsets, None, out)
    run, args = made["jagged_persistent"]

    def call() -> torch.Tensor:
        run(*args)
        return out

    return call


def relative_error(out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, sizes: list[int]) -> float:
    """||out - ref|| / ||ref|| against fp64, over every 16th row and the first 128 columns."""
    difference = norm = 0.0
    for a, b, o in zip(A.split(sizes), B.unbind(0), out.split(sizes), strict=True):
        exact = a[::16].double() @ b[:, :128].double()
        difference += (o[::16, :128].double() - exact).square().sum().item()
        norm += exact.square().sum().item()
    return (difference / norm) ** 0.5


def interleaved(calls: dict[str, Call], rounds: int, flush: torch.Tensor) -> dict[str, float]:
    """Median microseconds of each call, measured in turns."""
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        events = []
        for name in names[i % len(names) :] + names[: i % len(names)]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            calls[name]()
            end.record()
            events.append((name, start, end))
        torch.cuda.synchronize()
        for name, start, end in events:
            times[name].append(start.elapsed_time(end) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def host_microseconds(call: Call, repeats: int = 50) -> float:
    """Median microseconds until the call returns, the GPU not waited for."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        for _ in range(repeats // 5):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def captured(call: Call) -> Call:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def run_case(name: str, layout: str, rounds: int, flush: torch.Tensor) -> list[dict[str, Any]]:
    """All records of one case."""
    G, M, N, K, kind = CASES[name]
    sizes = group_sizes_for(kind, G, M)
    transposed = layout == "[G, N, K] transposed"
    A, B, group_offsets = make_inputs(sizes, N, K, dtype=torch.bfloat16, device="cuda", transposed=transposed)
    calls = providers(A, B, group_offsets, sizes)
    errors = {}
    for provider, call in calls.items():
        out = call()
        call()
        errors[provider] = None if "dense" in provider else relative_error(out, A, B, sizes)
    timings = {
        "eager": interleaved(calls, rounds, flush),
        "graph": interleaved({provider: captured(call) for provider, call in calls.items()}, rounds, flush),
    }
    host = {provider: host_microseconds(call) for provider, call in calls.items()}
    flops, bytes_ = flop_count(sizes, N, K), byte_count(sizes, N, K, A.dtype, A.dtype, per_group=True)
    return [
        {
            "suite": "grouped_gemm",
            "case": name,
            **dict(zip("GMNK", (G, M, N, K), strict=True)),
            "sizes": kind,
            "dtype": "bfloat16",
            "layout": layout,
            "provider": provider,
            "timing": timing,
            "us": round(us, 2),
            "tflops": round(flops / us / 1e6, 1),
            "gbps": round(bytes_ / us / 1e3, 1),
            "host_us": round(host[provider], 1) if timing == "eager" else None,
            "rel_err": errors[provider],
        }
        for timing, by_provider in timings.items()
        for provider, us in by_provider.items()
    ]


def print_case(records: list[dict[str, Any]]) -> None:
    first = records[0]
    print(f"\n{first['case']} G={first['G']} M={first['M']} N={first['N']} K={first['K']}, B {first['layout']}")
    print(f"{'':36}{'eager us':>10}{'x torch':>9}{'graph us':>10}{'x torch':>9}{'TFLOP/s':>9}{'host us':>9}")
    by = {(r["provider"], r["timing"]): r for r in records}
    base = {timing: by["torch._grouped_mm", timing]["us"] for timing in ("eager", "graph")}
    for provider in dict.fromkeys(r["provider"] for r in records):
        eager, graph = by[provider, "eager"], by[provider, "graph"]
        print(
            f"{provider:36}{eager['us']:10.1f}{base['eager'] / eager['us']:9.3f}{graph['us']:10.1f}"
            f"{base['graph'] / graph['us']:9.3f}{graph['tflops']:9.1f}{eager['host_us']:9.1f}",
            flush=True,
        )


def meta() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        **{package: metadata.version(package) for package in ("torch", "triton", "helion")},
        "date": datetime.date.today().isoformat(),
        "command": "python " + " ".join(sys.argv),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--layouts", nargs="+", default=["[G, K, N]", "[G, N, K] transposed"])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", type=Path, help="where to write the records")
    args = parser.parse_args()
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    records = []
    for name in args.cases:
        for layout in args.layouts:
            records += run_case(name, layout, args.rounds, flush)
            print_case(records[-2 * len({r["provider"] for r in records}) :])
            if args.json:
                args.json.write_text(json.dumps({"meta": meta(), "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
