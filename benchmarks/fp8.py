"""fp8 against bfloat16: grouped products, quantisation, the forward pass of layers, and training steps of layers.

    python -m benchmarks.fp8 [--part product|layer|training] [--rounds N] [--jobs N] [--load] [--tiny] [--json FILE]

Operands of products are quantised beforehand; layers quantise their activations in the call. Training is a layer's
forward and backward pass, which quantise all operands in the call, or all but the weights; quantising the weights; and
the gradient of each weight alone. The providers of a case take turns with a cold L2 cache, as CUDA-graph replays;
--load adds dense products of about 50 ms to each round, which hold the GPU at its power limit. Host microseconds are
those of eager calls. First the replay's result is checked: of each product against the product of the dequantised
operands, of layers and training steps in bfloat16 against float64, and others against those in bfloat16; wrong ones are
not timed. `torch._scaled_grouped_mm` has scales per row, DeepGEMM 1x128 and 128x128, triton_kernels one per tensor.

On a GPU this writes benchmarks/results/<gpu>/fp8.json, or fp8-load.json. With --part, the file's other parts are kept;
a file of other versions is refused. --tiny checks on a CPU that the script works.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import inputs as given
from benchmarks import run, tables
from benchmarks.operators import OPERATORS, launch_alone
from benchmarks.suites import SUITES, Case
from benchmarks.suites import layer as layer_case
from benchmarks.timing import host_microseconds, in_turns, prepared
from benchmarks.wide import largest_error
from moe_kernels import (
    QuantizedWeight,
    dequantize,
    grouped_gemm,
    grouped_gemm_wgrad,
    moe_mlp,
    ops,
    permute,
    quantize,
    quantize_weight,
    route,
)
from moe_kernels.commands import run_and_exit
from moe_kernels.models import positive
from moe_kernels.ops.library import use_kernels
from moe_kernels.ops.quantized import QUANTIZED_GROUPED_GEMM, QUANTIZED_WGRAD
from moe_kernels.scaled import FP8_COMPUTE, ScaledTensor
from moe_kernels.timing import Call
from tritonbench_ops import ffn
from tritonbench_ops.baselines import FP8_PEERS, Provider, ScaledInputs

PRODUCTS = SUITES["table"].cases(("gnk",))
LAYERS = SUITES["ffn"].shapes
TRAINED = SUITES["ffn-train"].shapes
PARTS = ("product", "layer", "training")
TINY_PRODUCTS = (Case("tiny", 3, 40, 48, 160, layout="gnk"),)
TINY_LAYERS = (layer_case("tiny", 5, 32, 16, 4, 2),)
TINY_TRAINED = (layer_case("tiny", 64, 64, 48, 4, 2),)
TRANSFORMERS = replace(OPERATORS["ffn"].providers["transformers"], label="transformers, bfloat16")
WHOLE_LAYERS = ("transformers", "moe_mlp", "step")  # kinds of calls whose results are those of a layer
LARGEST_DIFFERENCE = 0.08  # of layers and gradients, relative to the norm of the bfloat16 result
LARGEST_ERROR = 2e-2  # of a row, relative to the row's norm; tensor cores accumulate fp8 in fewer bits than float32 has


class Products(NamedTuple):
    """The calls of a case, including quantisations and a copy."""

    calls: dict[str, Call]
    checks: dict[str, Callable[[Any], float]]  # of products: the largest relative error of a row of the result
    moved: dict[str, int]  # bytes moved by quantisations and the copy
    errors: dict[str, str]  # of peers that cannot be prepared


def product_calls(case: Case, device: torch.device) -> Products:
    W = given.weights(case, device, per_group=True).mT  # [G, N, K]
    inputs = given.packed(case, W.mT, device)
    A, offsets, offs, sizes = inputs.A, inputs.group_offsets, inputs.offs, inputs.sizes
    rows, rows_W = quantize(A, "rowwise"), quantize(W, "rowwise")
    blocks, blocks_W = quantize(A, "1x128"), quantize(W, "128x128")
    (one, scale), (one_W, scale_W) = map(_with_one_scale, (A, W))
    expected = {
        "bfloat16": _product(A, W, sizes),
        "rowwise": _product(dequantize(rows), rows_W, sizes),
        "1x128 by 128x128": _product(dequantize(blocks), blocks_W, sizes),
        "one scale": _product(one, one_W, sizes).mul_(scale * scale_W),
    }
    found = Products({}, {}, {}, {})

    def add(label: str, operands: str, call: Call, result: Callable[[Any], Tensor] = lambda out: out) -> None:
        found.calls[label] = call
        found.checks[label] = lambda out: largest_error(result(out), expected[operands])

    if device.type == "cuda":
        scales = rows.scales.flatten(), rows_W.scales.flatten(1)
        add("torch._grouped_mm, bfloat16", "bfloat16", lambda: torch._grouped_mm(A, W.mT, offs))
        for label, fast in (("fast accumulation", True), ("exact", False)):
            options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": fast}
            multiply = partial(torch._scaled_grouped_mm, rows.data, rows_W.data.mT, *scales, offs, **options)
            add(f"torch._scaled_grouped_mm, {label}", "rowwise", multiply)
    scaled = {
        "1x128 by 128x128": (blocks.data, blocks_W.data.mT, blocks.scales, blocks_W.scales.mT),
        "one scale": (one, one_W.mT, scale, scale_W),
    }
    for operands, provider in FP8_PEERS.items():
        theirs = ScaledInputs(*scaled[operands], offsets, sizes)
        for label, call in call_of(provider, theirs, found.errors).items():
            add(label, operands, call, partial(provider.result, theirs))
    rowwise = partial(grouped_gemm, rows, rows_W.mT, offsets)
    add("grouped_gemm, bfloat16", "bfloat16", partial(grouped_gemm, A, W.mT, offsets))
    add("grouped_gemm, rowwise, fast_accumulation", "rowwise", partial(rowwise, fast_accumulation=True))
    add("grouped_gemm, rowwise", "rowwise", rowwise)
    add("grouped_gemm, 1x128 by 128x128", "1x128 by 128x128", partial(grouped_gemm, blocks, blocks_W.mT, offsets))
    for format, made in (("rowwise", rows), ("1x128", blocks)):
        found.calls[f"quantize, {format}"] = partial(quantize, A, format)
        found.moved[f"quantize, {format}"] = A.numel() * 3 + 4 * made.scales.numel()
    source = torch.zeros(found.moved["quantize, rowwise"] // 2, dtype=torch.int8, device=device)
    found.calls["copy"] = partial(torch.empty_like(source).copy_, source)
    found.moved["copy"] = 2 * len(source)
    return found


def call_of(provider: Provider, inputs: Any, errors: dict[str, str]) -> dict[str, Call]:
    """Return the call of a peer by its label; empty if it is not installed or fails, which is put into `errors`."""
    if provider.installed:
        try:
            return {provider.label: provider.make(inputs)}
        except Exception as error:
            errors[provider.label] = run.error_text(error)
    return {}


def _with_one_scale(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x` in fp8, and the one scale `[1]` of all elements."""
    scale = x.abs().amax().float().view(1) / torch.finfo(torch.float8_e4m3fn).max
    return (x / scale).to(torch.float8_e4m3fn), scale


def _product(A: Tensor, W: Tensor | ScaledTensor, sizes: Sequence[int]) -> Tensor:
    """Return the product in float32, computed one group after the other."""
    out, at = A.new_empty(len(A), W.shape[1], dtype=torch.float32), 0
    for g, size in enumerate(sizes):
        w = W[g] if isinstance(W, Tensor) else dequantize(ScaledTensor(W.data[g], W.scales[g], W.format))
        torch.mm(A[at : at + size].float(), w.float().T, out=out[at : at + size])
        at += size
    return out


def layer_of(case: Case, device: torch.device) -> ffn.Layer:
    return given.layer(case, given.experts(case, device), device, trains=False)


def layer_calls(layer: ffn.Layer) -> dict[str, Call]:
    """Return calls of the forward pass with weights in bfloat16 and in fp8, and of permute, quantised or not."""
    hidden, ids, topk_weights = layer.hidden, layer.topk_ids, layer.topk_weights
    weights = layer.w_gate_up, layer.w_down
    routing, top_k = route(ids, topk_weights, len(layer.w_down)), ids.size(1)
    calls: dict[str, Call] = {
        "moe_mlp, bfloat16": partial(moe_mlp, hidden, ids, topk_weights, *weights),
        "permute, bfloat16": lambda: permute(hidden, routing),
    }
    for format, of_rows in (("rowwise", "rowwise"), ("128x128", "1x128")):
        scaled: Any = [quantize(w, format) for w in weights]
        multiply = partial(moe_mlp, hidden, ids, topk_weights, *scaled)
        if format == "rowwise":
            calls["moe_mlp, rowwise, fast_accumulation"] = partial(multiply, fast_accumulation=True)
        calls[f"moe_mlp, {format}"] = multiply
        if use_kernels(hidden):
            first = scaled[0].mT
            operands = hidden, None, first.data, first.scales, routing.group_offsets, routing.slot_to_row, None
            options = format == "rowwise", False, hidden.dtype, top_k
            calls[f"permute, {of_rows}"] = _permute_quantized(operands, options, of_rows)
    return calls


def _permute_quantized(operands: Sequence[Tensor | None], options: Any, format: str) -> Call:
    """Return the launch that permutes and quantises tokens, the first of a product."""
    launch, (data, scales, *_) = launch_alone(QUANTIZED_GROUPED_GEMM, operands, options, 0)

    def call() -> ScaledTensor:
        launch()
        return ScaledTensor(data, scales, format)

    return call


def training_calls(layer: ffn.Layer) -> dict[str, Call]:
    """Return calls of a layer's forward and backward pass, and of its weights' gradients, in bfloat16 and in fp8."""
    hidden, ids, topk_weights, d_out = layer.hidden, layer.topk_ids, layer.topk_weights, layer.d_out
    (E, _, width), (R, top_k) = layer.w_down.shape, (ids.numel(), ids.size(1))
    leaves = [x.detach().requires_grad_() for x in (hidden, topk_weights, layer.w_gate_up, layer.w_down)]
    d_preact, act = (torch.randn(R, n, device=hidden.device).bfloat16() for n in (2 * width, width))

    def step(options: dict[str, Any], weights: Sequence[Any] = leaves[2:]) -> list[Tensor]:
        with torch.enable_grad():
            out = moe_mlp(leaves[0], ids, leaves[1], weights[0], weights[1], **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]

    def quantized(compute: str) -> list[QuantizedWeight]:
        return [quantize_weight(w, compute) for w in leaves[2:]]

    def scales(compute: str) -> list[Tensor]:
        return [part.scales for weight in quantized(compute) for part in (weight.forward, weight.backward)]

    calls: dict[str, Call] = {"step, bfloat16": partial(step, {})}
    rowwise, blocks, no_fp8_wgrad = {"compute": "fp8_rowwise"}, {"compute": "fp8_block"}, {"fp8_wgrad": False}
    fast = rowwise | {"fast_accumulation": True}
    steps: dict[str, dict[str, Any]] = {
        "fp8_rowwise, fast_accumulation": fast,
        "fp8_rowwise, fast_accumulation, bfloat16 wgrad": fast | no_fp8_wgrad,
        "fp8_rowwise": rowwise,
        "fp8_block": blocks,
        "fp8_block, bfloat16 wgrad": blocks | no_fp8_wgrad,
    }
    before = {compute: quantized(compute) for compute in FP8_COMPUTE}
    for label, options in steps.items():
        calls[f"step, {label}"] = partial(step, options)
    for label, options in steps.items():
        calls[f"step, {label}, weights quantised beforehand"] = partial(step, options, before[options["compute"]])
    for compute in FP8_COMPUTE:
        calls[f"quantize_weight for {compute}"] = partial(scales, compute)
    routing = route(ids, topk_weights, E)
    offsets, slots = routing.group_offsets, routing.row_to_slot
    rows, d_rows = (x[slots.long() // top_k] for x in (hidden, d_out))
    in_bfloat16 = {"gate and up": (d_preact, rows), "down": (d_rows, act)}
    in_fp8 = {
        "gate and up": (d_preact, hidden, offsets, None, slots),
        "down": (d_out, act, offsets, slots, None),
    }
    for name, operands in in_fp8.items():
        calls[f"wgrad of {name}, bfloat16"] = partial(grouped_gemm_wgrad, *in_bfloat16[name], offsets)
        calls[f"wgrad of {name}, fp8"] = partial(ops.quantized_wgrad, *operands, False, torch.bfloat16)
        if use_kernels(hidden):
            label = f"wgrad of {name}, fp8, quantised beforehand"
            calls[label] = launch_alone(QUANTIZED_WGRAD, operands, (torch.bfloat16, top_k), -1)[0]
    return calls


def prepared_right(
    calls: Mapping[str, Call], check: Callable[[str, Any], None], errors: dict[str, str], device: torch.device
) -> dict[str, Call]:
    """Return the calls to time whose results pass `check(label, result)`; `errors` gets the others' errors."""
    right = dict[str, Call]()
    for label, call in calls.items():
        try:
            replay, made = prepared(call, device)
            check(label, made)
            del made
            right[label] = replay
        except Exception as error:
            errors[label] = run.error_text(error)
    return right


def check_of(layer: ffn.Layer | None = None) -> Callable[[str, Any], None]:
    """Return the check of results of layers, training steps and their parts.

    Results of a whole `layer` in bfloat16 are compared with float64. Results in fp8 are compared with those in bfloat16
    of their kind, and are wrong if there are none. The kind is the part of a label before its first comma.
    """
    expected = dict[str, list[Tensor]]()

    def check(label: str, made: Any) -> None:
        kind, _, how = label.partition(", ")
        parts = [dequantize(made)] if isinstance(made, ScaledTensor) else made if isinstance(made, list) else [made]
        if layer is not None and how == "bfloat16" and kind in WHOLE_LAYERS:
            ffn.check(dict(zip(("out", *layer.leaves), parts, strict=False)), layer)
        if how not in ("", "bfloat16") and kind not in expected:
            raise AssertionError(f"nothing to compare with: {kind}, bfloat16, failed")
        pairs = zip(parts, expected.setdefault(kind, parts), strict=True)
        difference = max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)
        if not difference < LARGEST_DIFFERENCE:
            raise AssertionError(f"wrong: {difference:.1e} of the norm")

    return check


_SEEN: dict[tuple[Any, ...], set[int]] = {}  # numbers of rows that this process has called a function with


def host_times(calls: Mapping[str, Any], rounds: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Return the host microseconds of eager calls of `grouped_gemm` and `moe_mlp`, and with new numbers of rows."""
    found: dict[str, dict[str, float]] = {"host_us": {}, "host_new_rows_us": {}}
    for label, call in calls.items():
        if not label.startswith(("grouped_gemm", "moe_mlp")):
            continue
        found["host_us"][label] = round(host_microseconds(repeat(call, 3 * rounds), device), 1)
        had = call.args[0].shape[0]
        numbers = range(1, min(had, run.WARM_ROWS[-1] + 1))
        warm = [n for n in run.WARM_ROWS if n in numbers]  # these have the plans of the classes
        for n in warm:
            with_fewer_rows(call, n)()
        count = with_rows(call)
        shapes = [tuple(x.shape[i < count :]) for i, x in enumerate(call.args) if hasattr(x, "shape")]
        seen = _SEEN.setdefault((label, *shapes), set())
        new = [n for n in numbers if n not in warm and had - n not in seen][: 3 * rounds]
        seen.update(had - n for n in (0, *warm, *new))
        if new:
            calls_of_new = [with_fewer_rows(call, n) for n in new]
            found["host_new_rows_us"][label] = round(host_microseconds(calls_of_new, device), 1)
    return found


def with_rows(call: Any) -> int:
    """Return how many of the first arguments have rows: hidden, topk_ids and topk_weights, or A_packed."""
    return 3 if call.func is moe_mlp else 1


def with_fewer_rows(call: Any, n: int) -> Call:
    """Return a partial call of `grouped_gemm` or `moe_mlp` without the last `n` rows of its operands."""

    def without_last(x: Tensor | ScaledTensor) -> Tensor | ScaledTensor:
        return x[:-n] if isinstance(x, Tensor) else x._replace(data=x.data[:-n], scales=x.scales[:-n])

    count = with_rows(call)
    return partial(call.func, *map(without_last, call.args[:count]), *call.args[count:], **call.keywords)


@torch.no_grad()
def measure_product(case: Case, rounds: int, device: torch.device, load: bool) -> run.Record:
    calls, checks, moved, errors = product_calls(case, device)
    rel_err = dict[str, float]()

    def check(label: str, made: Any) -> None:
        if label in checks:
            error = checks[label](made)
            if not error < LARGEST_ERROR:
                raise AssertionError(f"wrong: relative error {error:.1e} of a row")
            rel_err[label] = float(f"{error:.2e}")

    right = prepared_right(calls, check, errors, device)
    host = host_times({label: calls[label] for label in right}, rounds, device)
    us = in_turns(right, rounds, device, load=load)
    rates = {label: round(n / us[label] / 1e3, 1) for label, n in moved.items() if label in us}
    gbps = {label.removeprefix("quantize, "): rate for label, rate in rates.items()}
    return _record(case, "product", us, errors) | {"rel_err": rel_err, **host, "quantize_gbps": gbps}


@torch.no_grad()
def measure_layer(case: Case, rounds: int, device: torch.device, load: bool) -> run.Record:
    layer, errors = layer_of(case, device), dict[str, str]()
    calls = call_of(TRANSFORMERS, layer, errors) | layer_calls(layer)
    right = prepared_right(calls, check_of(layer), errors, device)
    host = host_times({label: calls[label] for label in right}, rounds, device)
    us = in_turns(right, rounds, device, load=load)
    return _record(case, "layer", us, errors) | host


def measure_training(case: Case, rounds: int, device: torch.device, load: bool) -> run.Record:
    layer = layer_of(case, device)
    leaves: dict[str, Any] = {name: x.detach().requires_grad_() for name, x in layer.leaves.items()}
    errors = dict[str, str]()
    right = prepared_right(training_calls(layer), check_of(replace(layer, **leaves)), errors, device)
    us = in_turns(right, rounds, device, load=load)
    products = {"wgrad of gate and up": 4, "wgrad of down": 2}  # FLOPs per row and element of N x K
    flops = {name: factor * case.M * case.N * case.K for name, factor in products.items()}
    rates = {label: round(flops[label.split(",")[0]] / t / 1e6) for label, t in us.items() if label.startswith("wgrad")}
    return _record(case, "training", us, errors) | {"wgrad_tflops": rates}


def _record(case: Case, kind: str, us: dict[str, float], errors: dict[str, str]) -> run.Record:
    numbers = {name: getattr(case, name) for name in ("G", "M", "N", "K", "sizes")}
    times = {label: round(value, 2) for label, value in us.items()}
    return {"suite": "fp8", "part": kind, "case": case.name, **numbers, "us": times, "errors": errors}


@torch.no_grad()
def compile_one(kind: str, case: Case) -> None:
    """Call everything once, to fill the caches of binaries on disk."""
    device = torch.device("cuda")
    if kind == "product":
        calls = product_calls(case, device).calls
    else:
        calls = {"layer": layer_calls, "training": training_calls}[kind](layer_of(case, device))
    for call in calls.values():
        with suppress(Exception):
            call()
    torch.cuda.synchronize()


def speedups(record: run.Record) -> str:
    """Return a line with each provider's speedup over the first one."""
    us = record["us"]
    if not (labels := tables.fp8_labels([record])):
        return f"{record['case']}: no times"
    base, *others = labels
    cells = [f"{label} {us[base] / us[label]:.2f}" for label in others]
    return f"{record['case']}: {base} {us[base]:.1f} us; " + ", ".join(cells)


def main(argv: Sequence[str] | None = None) -> int:
    parser = run.parser_of("fp8", __doc__, tiny="small cases", file="fp8[-load].json", keeps="part")
    parser.add_argument("--part", choices=PARTS, help="default: all")
    parser.add_argument("--rounds", type=positive, default=21)
    parser.add_argument("--jobs", type=positive, help="first compile all kernels in so many processes")
    parser.add_argument("--load", action="store_true", help="with dense products in turns: sustained clocks")
    options = parser.parse_args(argv)
    device = run.device_of(parser, options)
    begun = time.monotonic()
    meta = run.meta(device, run.command_line("fp8", argv), options.load)
    name = "fp8-load.json" if options.load else "fp8.json"
    results, file = run.Results(meta), run.file_of(options, meta, name, adds=bool(options.part))
    cases = dict(
        zip(
            PARTS,
            (TINY_PRODUCTS, TINY_LAYERS, TINY_TRAINED) if options.tiny else (PRODUCTS, LAYERS, TRAINED),
            strict=True,
        )
    )
    jobs = [(part, case) for part in PARTS if options.part in (None, part) for case in cases[part]]
    for provider in (*FP8_PEERS.values(), TRANSFORMERS):
        if not provider.installed:
            print(f"{provider.label}: left out, {provider.package} is not installed", flush=True)
    if options.jobs and device.type == "cuda":
        run.in_processes(options.jobs, compile_one, jobs)
        print(f"compiled with {options.jobs} processes: {run.elapsed(begun)}", flush=True)
    measures = {"product": measure_product, "layer": measure_layer, "training": measure_training}
    for part, case in jobs:
        record = measures[part](case, options.rounds, device, options.load)
        results.records.append(record)
        print(f"[{run.elapsed(begun)}] {speedups(record)}", flush=True)
        for label, error in record["errors"].items():
            print(f"  {label}: {error}", flush=True)
        for field in ("rel_err", "host_us", "quantize_gbps", "wgrad_tflops"):
            if field in record:
                print(f"  {field}: {record[field]}", flush=True)
        if file is not None:
            if options.part:
                results.keep(file, "part")
            results.write(file)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(f"\n{tables.markdown(results)}")
    ours = ("grouped_gemm", "quantize", "moe_mlp", "permute", "step", "wgrad")
    return int(any(label.startswith(ours) for record in results.records for label in record["errors"]))


if __name__ == "__main__":
    run_and_exit(main)
