"""fp8 beside bfloat16: grouped products, quantisation, the forward pass of layers, and training steps of layers.

    python -m benchmarks.fp8 [--part product|layer|training] [--rounds N] [--jobs N] [--tiny] [--json FILE]

Operands of products are quantised beforehand; layers quantise their activations inside. Training is a layer's forward
and backward pass, which quantise all operands inside, and the gradients of each weight alone. The providers of a case
take turns with a cold L2 cache, as CUDA-graph replays. The result of each product is compared with the product of the
dequantised operands first. `torch._scaled_grouped_mm` has scales per row.

On a GPU all parts together write benchmarks/results/<gpu>/fp8.json. --tiny shows on a CPU that the script works.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import inputs as given
from benchmarks import run, tables
from benchmarks.suites import SUITES, Case
from benchmarks.suites import layer as layer_case
from benchmarks.wide import largest_error
from moe_kernels import dequantize, grouped_gemm, grouped_gemm_wgrad, moe_mlp, ops, quantize, route
from moe_kernels.models import positive
from moe_kernels.scaled import ScaledTensor
from moe_kernels.testing import make_experts, make_tokens
from moe_kernels.timing import Call, captured, interleaved

PRODUCTS = SUITES["table"].cases(("gnk",))
LAYERS = SUITES["ffn"].shapes
TRAINED = SUITES["ffn-train"].shapes
PARTS = ("product", "layer", "training")
TINY_PRODUCTS = (Case("tiny", 3, 40, 48, 160, layout="gnk"),)
TINY_LAYERS = (layer_case("tiny", 5, 32, 16, 4, 2),)
TINY_TRAINED = (layer_case("tiny", 64, 64, 48, 4, 2),)
LARGEST_GRADIENT_ERROR = 0.08  # relative to the norm of what bfloat16 gives
LARGEST_ERROR = 2e-2  # of a row, relative to the row's norm; tensor cores add up fp8 in fewer bits than float32 has


def product_calls(case: Case, device: torch.device) -> tuple[dict[str, Call], dict[str, Tensor], dict[str, int]]:
    """The calls of a case, what products among them should give, and the bytes that quantisations move."""
    W = given.weights(case, device, per_group=True).mT  # [G, N, K]
    inputs = given.packed(case, W.mT, device)
    A, offsets, offs = inputs.A, inputs.group_offsets, inputs.offs
    rows, rows_W = quantize(A, "rowwise"), quantize(W, "rowwise")
    blocks, blocks_W = quantize(A, "1x128"), quantize(W, "128x128")
    calls: dict[str, Call] = {}
    if device.type == "cuda":
        scales = rows.scales.flatten(), rows_W.scales.flatten(1)
        calls["torch._grouped_mm, bfloat16"] = lambda: torch._grouped_mm(A, W.mT, offs)
        for label, fast in (("fast accumulation", True), ("exact", False)):
            options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": fast}
            calls[f"torch._scaled_grouped_mm, {label}"] = partial(
                torch._scaled_grouped_mm, rows.data, rows_W.data.mT, *scales, offs, **options
            )
    calls["grouped_gemm, bfloat16"] = lambda: grouped_gemm(A, W.mT, offsets)
    calls["grouped_gemm, rowwise, fast_accumulation"] = lambda: grouped_gemm(
        rows, rows_W.mT, offsets, fast_accumulation=True
    )
    calls["grouped_gemm, rowwise"] = lambda: grouped_gemm(rows, rows_W.mT, offsets)
    calls["grouped_gemm, 1x128 by 128x128"] = lambda: grouped_gemm(blocks, blocks_W.mT, offsets)
    calls["quantize, rowwise"] = lambda: quantize(A, "rowwise")
    calls["quantize, 1x128"] = lambda: quantize(A, "1x128")
    expected = {"bfloat16": _product(A, W, inputs.sizes)}
    for name, a, w in (("rowwise", rows, rows_W), ("128x128", blocks, blocks_W)):
        expected[name] = _product(dequantize(a), w, inputs.sizes)
    moved = {name: A.numel() * 3 + 4 * scaled.scales.numel() for name, scaled in (("rowwise", rows), ("1x128", blocks))}
    return calls, expected, moved


def _product(A: Tensor, W: Tensor | ScaledTensor, sizes: Sequence[int]) -> Tensor:
    """In float32, one group after the other."""
    out, at = A.new_empty(len(A), W.shape[1], dtype=torch.float32), 0
    for g, size in enumerate(sizes):
        w = W[g] if isinstance(W, Tensor) else dequantize(ScaledTensor(W.data[g], W.scales[g], W.format))
        torch.mm(A[at : at + size].float(), w.float().T, out=out[at : at + size])
        at += size
    return out


def layer_calls(case: Case, device: torch.device) -> dict[str, Call]:
    """The forward pass of a layer, with weights in bfloat16 and in fp8."""
    T, H = case.M // case.top_k, case.K
    hidden, ids, topk_weights = make_tokens(T, H, case.G, case.top_k, dtype=torch.bfloat16, device=device)
    weights = make_experts(case.G, H, case.N, dtype=torch.bfloat16, device=device)
    calls: dict[str, Call] = {"moe_mlp, bfloat16": lambda: moe_mlp(hidden, ids, topk_weights, *weights)}
    for format in ("rowwise", "128x128"):
        scaled: Any = [quantize(w, format) for w in weights]
        calls[f"moe_mlp, {format}"] = partial(moe_mlp, hidden, ids, topk_weights, *scaled)
    return calls


def training_calls(case: Case, device: torch.device) -> dict[str, Call]:
    """The forward and backward pass of a layer, and its weights' gradients alone, in bfloat16 and in fp8."""
    T, H, width = case.M // case.top_k, case.K, case.N
    tokens = make_tokens(T, H, case.G, case.top_k, dtype=torch.bfloat16, device=device)
    hidden, ids, topk_weights = tokens
    weights = make_experts(case.G, H, width, dtype=torch.bfloat16, device=device)
    leaves = [x.detach().requires_grad_() for x in (hidden, topk_weights, *weights)]
    d_out, d_preact, act = (torch.randn(n, m, device=device).bfloat16() for n, m in _shapes(T, H, width, case.M))

    def step(options: dict[str, Any]) -> list[Tensor]:
        with torch.enable_grad():
            out = moe_mlp(leaves[0], ids, *leaves[1:], **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]

    calls: dict[str, Call] = {"step, bfloat16": partial(step, {})}
    for compute in ("fp8_rowwise", "fp8_block"):
        calls[f"step, {compute}"] = partial(step, {"compute": compute})
    calls["step, fp8_block, bfloat16 wgrad"] = partial(step, {"compute": "fp8_block", "fp8_wgrad": False})
    routing = route(ids, topk_weights, case.G)
    offsets = routing.group_offsets
    slots = routing.row_to_slot
    rows, d_rows = (x[slots.long() // case.top_k] for x in (hidden, d_out))
    bfloat16 = torch.bfloat16
    calls["wgrad of gate and up, bfloat16"] = lambda: grouped_gemm_wgrad(d_preact, rows, offsets)
    calls["wgrad of gate and up, fp8"] = lambda: (
        ops.quantized_wgrad(hidden, d_preact, offsets, slots, None, True, bfloat16).mT
    )
    calls["wgrad of down, bfloat16"] = lambda: grouped_gemm_wgrad(d_rows, act, offsets)
    calls["wgrad of down, fp8"] = lambda: ops.quantized_wgrad(act, d_out, offsets, None, slots, True, bfloat16).mT
    return calls


def _shapes(T: int, H: int, width: int, R: int) -> tuple[tuple[int, int], ...]:
    """Of the gradients of a layer's result and preactivation, and of act."""
    return (T, H), (R, 2 * width), (R, width)


def prepared(call: Call, device: torch.device) -> Call:
    """What is timed: on a GPU the replay of a graph."""
    call()
    return call if device.type == "cpu" else captured(call)


@torch.no_grad()
def measure_product(case: Case, rounds: int, device: torch.device) -> run.Record:
    calls, expected, moved = product_calls(case, device)
    timed, errors = dict[str, Call](), dict[str, str]()
    for label, call in calls.items():
        try:
            out = call()
            if isinstance(out, Tensor):
                name = "128x128" if "128x128" in label else "bfloat16" if "bfloat16" in label else "rowwise"
                error = largest_error(out, expected[name])
                if not error < LARGEST_ERROR:
                    raise AssertionError(f"wrong: relative error {error:.1e} of a row")
            del out
            timed[label] = prepared(call, device)
        except Exception as error:
            errors[label] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    us = interleaved(timed, rounds, device)
    rates = {name: round(bytes_moved / us[f"quantize, {name}"] / 1e3, 1) for name, bytes_moved in moved.items()}
    return _record(case, "product", us, errors) | {"quantize_gbps": rates}


@torch.no_grad()
def measure_layer(case: Case, rounds: int, device: torch.device) -> run.Record:
    us = interleaved({name: prepared(call, device) for name, call in layer_calls(case, device).items()}, rounds, device)
    return _record(case, "layer", us, {})


def measure_training(case: Case, rounds: int, device: torch.device) -> run.Record:
    calls = training_calls(case, device)
    errors, expected = dict[str, str](), dict[str, list[Tensor]]()
    for label, call in calls.items():
        made = call()
        parts = made if isinstance(made, list) else [made]
        right = expected.setdefault(label.split(",")[0], parts)
        error = max(
            float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(parts, right, strict=True)
        )
        if not error < LARGEST_GRADIENT_ERROR:
            errors[label] = f"wrong: {error:.1e} of the norm"
    expected.clear()
    us = interleaved({name: prepared(call, device) for name, call in calls.items()}, rounds, device)
    products = {"wgrad of gate and up": 4, "wgrad of down": 2}  # FLOPs of a row and an element of a weight
    flops = {name: factor * case.M * case.N * case.K for name, factor in products.items()}
    rates = {label: round(flops[label.split(",")[0]] / t / 1e6) for label, t in us.items() if label.startswith("wgrad")}
    return _record(case, "training", us, errors) | {"wgrad_tflops": rates}


def _record(case: Case, kind: str, us: dict[str, float], errors: dict[str, str]) -> run.Record:
    numbers = {name: getattr(case, name) for name in ("G", "M", "N", "K", "sizes")}
    times = {label: round(value, 2) for label, value in us.items()}
    return {"suite": "fp8", "part": kind, "case": case.name, **numbers, "us": times, "errors": errors}


@torch.no_grad()
def compile_one(kind: str, case: Case) -> None:
    """Call everything once, which leaves its binaries in the caches on disk."""
    device = torch.device("cuda")
    others = {"layer": layer_calls, "training": training_calls}
    made = product_calls(case, device)[0] if kind == "product" else others[kind](case, device)
    for call in made.values():
        with suppress(Exception):
            call()
    torch.cuda.synchronize()


def speedups(record: run.Record) -> str:
    """Each provider's speedup over the first one."""
    first, *others = record["us"].items()
    cells = [f"{label} {first[1] / us:.2f}" for label, us in others if not label.startswith(("quantize", "wgrad"))]
    return f"{record['case']}: {first[0]} {first[1]:.1f} us; " + ", ".join(cells)


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, help="default: all")
    parser.add_argument("--rounds", type=positive, default=21)
    parser.add_argument("--jobs", type=positive, help="first compile all kernels in so many processes")
    parser.add_argument("--tiny", action="store_true", help="small cases, also on a CPU")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/<gpu>/fp8.json, on a GPU")
    options = parser.parse_args(argv)
    if not (options.tiny or torch.cuda.is_available()):
        parser.error("needs a CUDA GPU; --tiny runs without")
    begun = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    command = shlex.join(["python", "-m", "benchmarks.fp8", *(sys.argv[1:] if argv is None else argv)])
    meta = run.meta(device, command)
    cases = dict(
        zip(
            PARTS,
            (TINY_PRODUCTS, TINY_LAYERS, TINY_TRAINED) if options.tiny else (PRODUCTS, LAYERS, TRAINED),
            strict=True,
        )
    )
    jobs = [(part, case) for part in PARTS if options.part in (None, part) for case in cases[part]]
    if options.jobs and device.type == "cuda":
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            for done in [pool.submit(compile_one, *job) for job in jobs]:
                done.exception()
        print(f"compiled with {options.jobs} processes: {run.elapsed(begun)}", flush=True)
    results = run.Results(meta)
    file, folder = options.json, run.folder(meta)
    if file is None and folder and not (options.tiny or options.part):
        file = folder / "fp8.json"
    measures = {"product": measure_product, "layer": measure_layer, "training": measure_training}
    for part, case in jobs:
        record = measures[part](case, options.rounds, device)
        results.records.append(record)
        print(f"[{run.elapsed(begun)}] {speedups(record)}", flush=True)
        for label, error in record["errors"].items():
            print(f"  {label}: {error}", flush=True)
        if "quantize_gbps" in record:
            print("  quantize, GB/s:", record["quantize_gbps"], flush=True)
        if "wgrad_tflops" in record:
            print("  TFLOP/s:", record["wgrad_tflops"], flush=True)
        if file is not None:
            results.write(file)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(f"\n{tables.markdown(results)}")
    ours = ("grouped_gemm", "step", "wgrad")
    return int(any(label.startswith(ours) for record in results.records for label in record["errors"]))


if __name__ == "__main__":
    sys.exit(main())
