"""Tables of results, as text, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import json
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.operators import OPERATORS, Operator
from benchmarks.run import FIELDS, NO_GPU, Record, Results
from benchmarks.suites import SUITES, WARM_CALLS
from tritonbench_ops.plots import Measured

SLOW = 0.98  # speedup below which a case is listed
_EAGER = {  # fields of eager records only; older files lack some of them
    "host_us": "host us",
    "host_new_rows_us": "host us, new rows",
    "host_prepared_us": "host us, prepared",
    "peak_mb": "peak MB",
}
_RATES = {"tflops": "TFLOP/s", "gbps": "GB/s"}
SHORT = 8  # the most columns of a short table
BEHIND, BEHIND_TORCH = 0.95, 0.99  # speedups below which wide.py times a case again: over the best other, and PyTorch
_WORST = 20  # the number of worst cases in the table of wide.py
_CLEARER = {  # wordings in the labels of records, and those to show instead
    ", table made beforehand": ", list of tiles built before timing",
    "made beforehand": "built before timing",
    "beforehand": "before timing",
    ", planned": ", with a plan",
    ", exact": ", no fast accumulation",
    "bfloat16 wgrad": "bfloat16 weight gradients",
}
_ROUTINGS = {  # of wide.py
    "uniform": "groups of equal size",
    "softmax": "mild random skew",
    "zipf": "strong skew",
    "nine-tenths": "one group has nine tenths of the rows",
    "half-empty": "every second group is empty",
}
CUBES = re.compile(r"(\d+) x (\d+)\^3")  # "P x N^3": P products N x N x N


def operator_of(suite: str) -> Operator:
    """Return the operator of a suite."""
    return OPERATORS[SUITES[suite].operator if suite in SUITES else "grouped_gemm"]


def roles(suite: str) -> tuple[str, str]:
    """Return the labels of the baseline and of our provider."""
    operator = operator_of(suite)
    return operator.providers[operator.baseline].label, operator.providers["ours"].label


def by_case(records: Sequence[Record]) -> list[dict[tuple[str, str], Record]]:
    """Return the records of each case and layout, by provider and timing; layouts of a case are adjacent."""
    cases: dict[str, dict[str, dict[tuple[str, str], Record]]] = {}
    for record in records:
        case = cases.setdefault(record["case"], {}).setdefault(record["layout"], {})
        case[record["provider"], record["timing"]] = record
    return [case for layouts in cases.values() for case in layouts.values()]


def speedup(case: dict[tuple[str, str], Record], provider: str, timing: str) -> float | None:
    """Return a provider's speedup over the baseline, or None if one of the two has no time."""
    record = case.get((provider, timing))
    if record is None:
        return None
    base = case.get((roles(record["suite"])[0], timing))
    if base is None or base["us"] is None or record["us"] is None:
        return None
    ratio: float = base["us"] / record["us"]
    return ratio


def timing_of(records: Sequence[Record]) -> str:
    """Return the timing to show: graph replays if there are any, unless the baseline has only eager times."""
    timed = {(record["provider"], record["timing"]) for record in records if record["us"] is not None}
    base = roles(records[0]["suite"])[0]
    if (base, "eager") in timed and (base, "graph") not in timed:
        return "eager"
    return "graph" if any(timing == "graph" for _, timing in timed) else "eager"


def case_text(records: Sequence[Record]) -> str:
    """Return the table of one case, one line per provider."""
    [case] = by_case(records)
    timings = list(dict.fromkeys(record["timing"] for record in records))
    base = roles(records[0]["suite"])[0]
    head = [f"x {base}", "TFLOP/s", "GB/s"]
    head_row = ["", *(cell for timing in timings for cell in (f"{timing} us", *head))]
    peaks = ["peak MB"] if any(record.get("peak_mb") is not None for record in records) else []
    rows = [[*head_row, "host us", "new rows", "prepared", *peaks, "rel err"]]
    notes = []
    for label in dict.fromkeys(record["provider"] for record in records):
        row = [label]
        for timing in timings:
            record = case[label, timing]
            if record["error"] is not None:
                notes.append(f"  {label}, {timing}: failed: {record['error']}")
            row += [_number(record["us"], 1), _number(speedup(case, label, timing), 3)]
            row += [_number(record["tflops"], 1), _number(record["gbps"], 0)]
        first = case[label, timings[0]]
        error = first["rel_err"]
        row += [_number(first.get(name), 1) for name in ("host_us", "host_new_rows_us", "host_prepared_us")]
        row += [_number(first["peak_mb"], 0)] if peaks else []
        rows.append([*row, "-" if error is None else f"{error:.1e}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return "\n".join([*("  " + line.rstrip() for line in lines), *dict.fromkeys(notes)])


def summary(results: Results) -> str:
    """Return our speedup over the baseline for each suite, and the cases that are slower, failed or left out."""
    lines = []
    for suite in results.suites:
        part = results.of(suite)
        base, ours = roles(suite)
        cases = by_case(part.records)
        for timing in dict.fromkeys(record["timing"] for record in part.records):
            ratios = [(ratio, case) for case in cases if (ratio := speedup(case, ours, timing)) is not None]
            if not ratios:
                continue
            mean = statistics.geometric_mean(ratio for ratio, _ in ratios)
            lines.append(
                f"{suite}, {timing}: {ours} has a speedup of {mean:.3f} over {base} "
                f"(geometric mean of {len(ratios)} cases, lowest {min(r for r, _ in ratios):.3f})"
            )
            for ratio, case in sorted(ratios, key=lambda pair: pair[0]):
                if ratio < SLOW:
                    lines.append(f"  slower: {ratio:.3f}  {_title(case[ours, timing])}")
        failed: dict[tuple[str, str], list[str]] = {}
        for record in part.records:
            if record["error"] is not None:
                failed.setdefault((record["provider"], record["error"]), []).append(record["case"])
        for (provider, error), names in failed.items():
            names = list(dict.fromkeys(names))
            where = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            lines.append(f"  failed: {provider} on {where}: {error}")
        lines += [f"  left out: {_title(case)}: {case['reason']}" for case in part.skipped]
    return "\n".join(lines)


def csv_text(results: Results) -> str:
    """Return the records as CSV, with the fields of the JSON as columns."""
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(results.records)
    return text.getvalue()


def markdown(results: Results, short: bool = False) -> str:
    """Return a paragraph on the measurement and a table for each suite; a short table has at most `SHORT` columns."""
    meta = results.meta
    lines = []
    for suite in results.suites:
        part = results.of(suite)
        if suite in SCRIPTS:
            table = SHORT_SCRIPTS.get(suite, SCRIPTS[suite]) if short else SCRIPTS[suite]
            lines += [*table(part), ""]
            continue
        timing = timing_of(part.records)
        dtypes = ", ".join(dict.fromkeys(record["dtype"] for record in part.records))
        lines += [
            f"{_where(meta)}, {dtypes}. {_calls(meta, timing)}. "
            f"{_baseline(roles(suite)[0])}; a speedup below 1 means slower."
            + f" Warm times: a graph of {WARM_CALLS} calls with a warm L2 cache, divided by {WARM_CALLS}."
            * (any(map(_is_warm, part.records)) and not short),
            "",
        ]
        lines += _short_case_table(part, timing) if short else _case_table(part, timing)
        lines.append("")
        if part.skipped and not short:
            lines += ["Left out: " + "; ".join(f"{_title(case)} ({case['reason']})" for case in part.skipped) + ".", ""]
    return "\n".join(lines if short else [*lines, _commands(meta), ""])


def _earlier_runs(meta: Record) -> dict[tuple[str, str], list[str]]:
    """Return what was kept from each earlier run, by date and command."""
    runs: dict[tuple[str, str], list[str]] = {}
    for name, run in meta.get("kept", {}).items():
        runs.setdefault((run["date"], run["command"]), []).append(name)
    return runs


def _commands(meta: Record) -> str:
    """Return sentences with the command of the last run, and the dates and commands of the records kept from others."""
    runs = _earlier_runs(meta).items()
    kept = (f"On {date}: {', '.join(names)}, by `{command}`." for (date, command), names in runs)
    return " ".join([f"Measured by `{meta['command']}`.", *kept])


def _where(meta: Record) -> str:
    versions = ", ".join(f"{name} {meta[name]}" for name in ("driver", "torch", "triton", "helion") if name in meta)
    return f"{meta['gpu']}, {versions}, {meta['date']}"


def _baseline(label: str) -> str:
    return f"Speedup baseline: {_code(label)}, timed in the same run"


def _calls(meta: Record, timing: str | None = None) -> str:
    """Return the sentence on the timed calls; without `timing`, of scripts, which capture graphs on a GPU only."""
    regime = "under sustained load" if meta.get("load") else "in short bursts, without sustained load"
    graphs = meta["gpu"] != NO_GPU if timing is None else timing == "graph"
    calls = "CUDA-graph replays" if graphs else "eager calls"
    return f"Times are of {calls} with a cold L2 cache, {regime}"


def _transformers_table(results: Results) -> list[str]:
    """Return the table of transformers_stack.py: one line per shape, one column per implementation."""
    meta, shapes = results.meta, dict[tuple[str, int, int], dict[str, Record]]()
    for record in results.records:
        shapes.setdefault((record["part"], record["batch"], record["length"]), {})[record["implementation"]] = record
    names = list(dict.fromkeys(record["implementation"] for record in results.records))
    first = {name: sum(r["first_s"] or 0 for r in results.records if r["implementation"] == name) for name in names}
    processes = 1 + len(_earlier_runs(meta))
    rows = []
    for (part, batch, length), found in shapes.items():
        rows.append([f"{part}, {batch} x {length}", *(_speed_cell(found.get(name)) for name in names)])
        speeds = {name: record["tokens_per_s"] for name, record in found.items() if record["tokens_per_s"]}
        best = max((value for name, value in speeds.items() if name != names[0]), default=None)
        rows[-1].append(_number(speeds[names[0]] / best, 2) if best and names[0] in speeds else "-")
    head = ["part, sequences x tokens", *(f"`{name}`" for name in names)]
    head.append(f"`{names[0]}` speedup over the fastest other")
    return [
        f"{_where(meta)}, transformers {meta['transformers']}. Tokens per second of {meta['model']}: medians of rounds "
        "in which the implementations take turns. decode: `generate` from a short prompt; on a GPU, its decoding steps "
        "use `batched_mm` when `grouped_mm` is chosen. compiled: decode with a static cache and transformers' own "
        "`torch.compile`. First calls, which include compilation, are not counted; in all parts together, measured in "
        f"{processes} {'process' if processes == 1 else 'processes'}, they took "
        f"{', '.join(f'{seconds:.0f} s (`{name}`)' for name, seconds in first.items())}.",
        "",
        *_markdown_rows(head, rows),
    ]


def _speed_cell(record: Record | None) -> str:
    if record is None:
        return "-"
    if record["error"] is None:
        return _number(record["tokens_per_s"], 0)
    return "out of memory" if record["error"].startswith("OutOfMemoryError") else "failed"


def _expert_parallel_table(results: Results) -> list[str]:
    """Return the table of expert_parallel.py: one line per number of ranks, weak scaling before strong."""
    records = sorted(results.records, key=lambda r: (r["scaling"] == "strong", r["ranks"]))
    one = {r["scaling"]: r["tokens_per_s"] for r in records if r["ranks"] == 1}
    rows = []
    for r in records:
        alone = one.get(r["scaling"])
        row = [f"{r['scaling']}, {r['ranks']}", str(r["E"] // r["ranks"]), str(r["tokens_per_rank"])]
        row += [_number(r["ms"], 1), _number(r["tokens_per_s"], 0)]
        row += [_number(r["tokens_per_s"] / alone if alone else None, 2), f"{100 * r['comm']:.0f}%"]
        rows.append([*row, _number(r["first_s"], 0)])
    r = records[0]
    head = ["scaling, ranks", "experts per rank", "tokens per rank", "step ms", "tokens/s", "speedup over one rank"]
    return [
        f"{_where(results.meta)}, {r['dtype']}. A step is the forward and backward pass of a layer with H = {r['H']}, "
        f"I = {r['I']}, E = {r['E']}, top_k = {r['top_k']}; its time is the median of the slowest rank. Speedups are "
        "ratios of tokens/s. In a check with a smaller layer, the output and all gradients differed from those of one "
        f"process in float64 by at most {max(r['error_share'] for r in records):.2f} of the tests' error budget.",
        "",
        *_markdown_rows([*head, "share of time in all-to-alls", "first step s"], rows),
    ]


def over_best(record: Record, others: Iterable[str] = ()) -> float | None:
    """Return our speedup over the best of `others`, by default all, in a record of wide.py; None without times."""
    ours = roles("wide")[1]
    us: dict[str, float] = record["us"]
    compared = [us[label] for label in others or us if label != ours and label in us]
    return min(compared) / us[ours] if compared and ours in us else None


def worst_first(results: Results) -> list[tuple[float, Record]]:
    """Return the timed records of wide.py with our speedups over the best other provider, lowest first."""
    found = [(ratio, record) for record in results.records if (ratio := over_best(record)) is not None]
    return sorted(found, key=lambda pair: pair[0])


def _wide_tables(results: Results) -> list[str]:
    """Return the tables of wide.py: our speedups by rows and by routing, and the worst cases."""
    base, ours = roles("wide")
    records = [record for _, record in worst_first(results)]
    labels = list(dict.fromkeys(label for record in records for label in record["us"] if label != ours))
    parts = {"all": records}
    parts |= {f"M = {M}": [r for r in records if r["M"] == M] for M in sorted({r["M"] for r in records})}
    routings = dict.fromkeys(record["sizes"] for record in results.records)
    parts |= {sizes: [r for r in records if r["sizes"] == sizes] for sizes in routings}
    rows = []
    for name, part in parts.items():
        row = [name, str(len(part))]
        for compared in ([], *([label] for label in labels)):
            ratios = [ratio for record in part if (ratio := over_best(record, compared)) is not None]
            row.append(_number(statistics.geometric_mean(ratios) if ratios else None, 2))
            if compared in ([], [base]):
                row.append(_number(min(ratios, default=None), 2))
        rows.append(row)
    head = ["cases", "number of cases", "mean speedup over the fastest other", "lowest over the fastest other"]
    for label in labels:
        head += [f"mean speedup over {_code(label)}", *([f"lowest over {_code(label)}"] if label == base else [])]
    explained = "; ".join(f"{sizes}: {_ROUTINGS[sizes]}" for sizes in routings if sizes in _ROUTINGS)
    lines = [
        f"{_where(results.meta)}, bfloat16, B `[G, N, K]` transposed. {_calls(results.meta)}. Providers took turns. "
        f"{_rounds(results.records)} "
        f"The table has speedups of {_code(ours)} without tuned configs: geometric means of the cases, and the lowest "
        "of a single case; below 1 means slower." + f" Routings: {explained}." * bool(explained),
        "",
        *_markdown_rows(head, rows),
        "",
        f"The {min(_WORST, len(records))} cases with the lowest speedups, out of {len(records)} cases:",
        "",
    ]
    rows = [
        [f"{r['case']} ({r['G']}, {r['M']}, {r['N']}, {r['K']})", r["sizes"]]
        + [_number(r["us"].get(label)) for label in (ours, *labels)]
        + [_number(ratio, 2)]
        for ratio, r in worst_first(results)[:_WORST]
    ]
    us = (f"{_code(label)} us" for label in (ours, *labels))
    head = ["case (G, M, N, K)", "routing", *us, "speedup over the fastest other"]
    failed: dict[tuple[str, str], int] = {}
    for record in results.records:
        for label, error in record["errors"].items():
            failed[label, error] = failed.get((label, error), 0) + 1
    lines += _markdown_rows(head, rows)
    for (label, error), number in failed.items():
        lines += ["", f"Not timed in {number} of the cases: {_code(label)}: {error}."]
    return lines


def _rounds(records: Sequence[Record]) -> str:
    """Return sentences on the rounds of wide.py, which are more where `grouped_gemm` is behind at first."""
    first, *more = sorted({record["rounds"] for record in records})
    text = f"Times are medians of {first} rounds."
    if more:
        again = sum(record["rounds"] > first for record in records)
        slower = sum(record["rounds"] == first and (over_best(record) or 1) < 1 for record in records)
        text += (
            f" In {again} cases the speedup of `grouped_gemm` was below {BEHIND} over the fastest other provider, or "
            f"below {BEHIND_TORCH} over {_code(roles('wide')[0])}. These were timed again, with {more[-1]} rounds, and "
            f"have the second times. The others, {slower} of them slower than another provider, were not timed again, "
            "so this choice favours `grouped_gemm`."
        )
    return text


_WITHOUT_DECODING = "geometric mean without decoding"
_ROWWISE, _BLOCKS = "grouped_gemm, rowwise", "grouped_gemm, 1x128 by 128x128"
_DECODING = {"decode_qwen3": 2.7, "decode_dsv3": 2.9}
_STEPS = {
    **dict.fromkeys(("mixtral, T = 4096", "dsv3_ep, T = 4096"), 1.25),
    **dict.fromkeys(("qwen3_30b, T = 8192", "olmoe, T = 4096"), 1.1),
}
_PREFILL = ("qwen3_30b, T = 8192", "mixtral, T = 4096", "dsv3_ep, T = 4096", "olmoe, T = 4096")
_ROWWISE_LAYERS = dict(zip(_PREFILL, (3.5, 2.4, 2.8, 3.2), strict=True))
_FP8_TARGETS: dict[str, dict[str, dict[str, float]]] = {  # target speedups, by baseline, label and case
    "torch._grouped_mm, bfloat16": {
        f"{_ROWWISE}, fast_accumulation": {_WITHOUT_DECODING: 1.95} | _DECODING,
        _ROWWISE: {_WITHOUT_DECODING: 1.5} | _DECODING,
        _BLOCKS: {_WITHOUT_DECODING: 1.65} | _DECODING,
    },
    "transformers, bfloat16": {
        "moe_mlp, rowwise, fast_accumulation": _ROWWISE_LAYERS,
        "moe_mlp, rowwise": _ROWWISE_LAYERS,
        "moe_mlp, 128x128": dict(zip(_PREFILL, (3.35, 2.1, 2.4, 2.95), strict=True)),
    },
    "step, bfloat16": dict.fromkeys(
        ("step, fp8_rowwise, fast_accumulation", "step, fp8_rowwise", "step, fp8_block"), _STEPS
    ),
}
_FP8_LAYER_US = {"qwen3_30b, T = 1": 27, "qwen3_30b, T = 16": 95, "qwen3_30b, T = 64": 140}
_QUANTIZE_GBPS, _PERMUTE_PERCENT, _WGRAD_TFLOPS = 3700, 10, 800


def _fp8_tables(results: Results) -> list[str]:
    """Return the tables of fp8.py: products, quantisation, layers, training, weights' gradients and host times."""
    parts = _fp8_parts(results)
    lines = [
        f"{_where(results.meta)}. {_calls(results.meta)}. Numbers in brackets are targets: minimum speedups and "
        "rates, maximum times.",
        *_fp8_products(parts),
        *_fp8_quantisation(parts),
        *_fp8_layers(parts["layer"]),
        *_fp8_training(parts["training"]),
        *_fp8_host_times(results.records),
    ]
    failed = {(label, error) for record in results.records for label, error in record["errors"].items()}
    for label, error in sorted(failed):
        lines += ["", f"Not timed in some cases: {_code(label)}: {error}."]
    return lines


def _fp8_products(parts: dict[str, list[Record]]) -> list[str]:
    """Return the tables of our products and of others', with geometric means and the largest known errors."""
    records = parts["product"]
    if not records:
        return []
    base, *labels = fp8_labels(records)
    lines = []
    for whose, ours in (("`grouped_gemm`", True), ("PyTorch and other libraries", False)):
        shown = [label for label in labels if label.startswith("grouped_gemm") == ours]
        if not shown:
            continue
        rows = [_fp8_row(record, shown, base) for record in records]
        means = [
            _beside(_fp8_mean(parts["many rows"], label, base), _fp8_target(_WITHOUT_DECODING, label, base))
            for label in shown
        ]
        rows.append([_WITHOUT_DECODING, "", *means])
        worst = [max((r.get("rel_err", {}).get(label, 0.0) for r in records), default=0.0) for label in shown]
        if any(worst):
            errors = (f"{error:.1e}" if error else "-" for error in worst)
            rows.append(["largest error of a row, relative to its norm", "", *errors])
        about = f"Products by {whose}. fp8 operands were quantised before the timing. {_baseline(base)}."
        if any(label.startswith("DeepGEMM") for label in shown):
            about += (
                " DeepGEMM: groups were padded before the timing; with few rows per group, its masked kernel is used."
            )
        lines += ["", about, "", *_markdown_rows(_fp8_head("table", shown, base), rows)]
    return lines


def _fp8_quantisation(parts: dict[str, list[Record]]) -> list[str]:
    """Return the tables of rates of quantising rows and of a copy, and of the time of quantising in permute."""
    lines = []
    if records := [r for r in parts["product"] if r.get("quantize_gbps")]:
        names = _names(records, "quantize_gbps")
        rows = []
        for r in records:
            found, target = r["quantize_gbps"], _QUANTIZE_GBPS if r in parts["many rows"] else None
            cells = [_beside(found.get(name), None if name == "copy" else target, 0) for name in names]
            rows.append([f"{r['case']} ({r['M']}, {r['K']})", *cells])
        head = ["case (M, K)", *(name if name == "copy" else f"`quantize` ({name})" for name in names)]
        about = (
            "Quantising rows: GB/s, counting bytes read and written. "
            "The copy moves as many bytes as quantising in rowwise format."
        )
        lines += ["", about, "", *_markdown_rows(head, rows)]
    formats = ("rowwise", "1x128")
    if records := [r for r in parts["layer"] if any(f"permute, {name}" in r["us"] for name in formats)]:
        rows = []
        for r in records:
            base, few = r["us"].get("permute, bfloat16"), r["case"] in _FP8_LAYER_US
            row = [_fp8_case(r), _number(base)]
            for name in formats:
                us = r["us"].get(f"permute, {name}")
                more = 100 * (us / base - 1) if us and base else None
                text = "-" if more is None else f"{more:+.0f}%"
                row.append(text if few else f"{text} (+{_PERMUTE_PERCENT}%)")
            rows.append(row)
        changes = (f"change in time ({name})" for name in formats)
        head = [f"case ({operator_of('ffn').dimensions})", "`permute` (bfloat16) us", *changes]
        about = (
            "Copying tokens into expert order, by `permute` in bfloat16 and by kernels that also quantise them to fp8. "
            "Changes in time are relative to `permute`; negative is faster."
        )
        lines += ["", about, "", *_markdown_rows(head, rows)]
    return lines


def _fp8_layers(records: Sequence[Record]) -> list[str]:
    if not records:
        return []
    base, *labels = fp8_labels(records)
    in_fp8 = _FP8_TARGETS["transformers, bfloat16"]
    rows = []
    for r in records:
        best = min((us for label, us in r["us"].items() if label in in_fp8), default=None)
        rows.append([*_fp8_row(r, labels, base), _beside(best, _FP8_LAYER_US.get(r["case"]), None)])
    about = (
        "Forward pass of layers, including the quantisation of activations. Weights were quantised before the timing, "
        f"in the format that the heading names. {_baseline(base)}."
    )
    return ["", about, "", *_markdown_rows([*_fp8_head("ffn", labels, base), "fastest fp8 `moe_mlp` us"], rows)]


def _fp8_training(records: Sequence[Record]) -> list[str]:
    """Return the tables of training steps, of quantising weights for several of them, and of weights' gradients."""
    if not records:
        return []
    base, *labels = fp8_labels(records)
    before = ", weights quantised beforehand"
    lines = []
    for shown, operands in (
        ([label for label in labels if not label.endswith(before)], "all operands"),
        ([label for label in labels if label.endswith(before)], "all operands but the weights"),
    ):
        if shown:
            about = (
                f"Training step: forward and backward pass of `moe_mlp`, including the quantisation of {operands}. "
                f"{_baseline(base)}."
            )
            head = _fp8_head("ffn", [label.removesuffix(before) for label in shown], base)
            rows = [_fp8_row(record, shown, base) for record in records]
            lines += ["", about, "", *_markdown_rows(head, rows)]
    if quantised := [label for label in _names(records, "us") if label.startswith("quantize_weight")]:
        rows = [[_fp8_case(r), *(_number(r["us"].get(label)) for label in quantised)] for r in records]
        head = [f"case ({operator_of('ffn').dimensions})", *(f"{_code(label)} us" for label in quantised)]
        about = "Quantising both weights, for the forward and the backward pass of several training steps."
        lines += ["", about, "", *_markdown_rows(head, rows)]
    names = _names(records, "wgrad_tflops")
    rows = [
        [_fp8_case(r)]
        + [
            _beside(r["wgrad_tflops"].get(name), _WGRAD_TFLOPS if name.endswith("beforehand") else None, 0)
            for name in names
        ]
        for r in records
    ]
    head = [f"case ({operator_of('ffn').dimensions})", *(_code(name.removeprefix("wgrad of ")) for name in names)]
    about = (
        "Gradients of the weights: TFLOP/s. In fp8, the time includes the quantisation of both operands, except in the "
        'columns "quantised before timing".'
    )
    return [*lines, "", about, "", *_markdown_rows(head, rows)]


def _fp8_host_times(records: Sequence[Record]) -> list[str]:
    kinds = {"host_us": "", "host_new_rows_us": ", new rows"}  # older files lack the second
    kinds = {kind: text for kind, text in kinds.items() if any(record.get(kind) for record in records)}
    labels = dict.fromkeys(label for record in records for label in record.get("host_us", ()))
    if not labels:
        return []
    rows = []
    for label in labels:
        times = [[us for record in records if (us := record.get(kind, {}).get(label))] for kind in kinds]
        rows.append(
            [_code(label), *(_number(of(us) if us else None, 0) for us in times for of in (statistics.median, max))]
        )
    about = "Host time of an eager call, with a number of rows seen before or new: median and largest over all cases."
    head = ["call", *(f"{name} us{text}" for text in kinds.values() for name in ("median", "largest"))]
    return ["", about, "", *_markdown_rows(head, rows)]


def _fp8_case(record: Record) -> str:
    return f"{record['case']} ({', '.join(str(record[d]) for d in 'GMNK')})"


def _fp8_head(suite: str, labels: Sequence[str], base: str) -> list[str]:
    speedups = (f"{_code(label)} speedup" for label in labels)
    return [f"case ({operator_of(suite).dimensions})", f"{_code(base)} us", *speedups]


def _fp8_row(record: Record, labels: Sequence[str], base: str) -> list[str]:
    cells = [_beside(_fp8_speedup(record, label, base), _fp8_target(record["case"], label, base)) for label in labels]
    return [_fp8_case(record), _number(record["us"].get(base)), *cells]


def _fp8_target(case: str, label: str, base: str) -> float | None:
    return _FP8_TARGETS.get(base, {}).get(label, {}).get(case)


def _beside(value: float | None, target: float | None, digits: int | None = 2) -> str:
    """Return the value with its target, if it has one, such as "1.60 (1.65)"."""
    return _number(value, digits) + ("" if target is None else f" ({target:g})")


def _short_fp8_table(results: Results) -> list[str]:
    """Return a table of products, one line per provider: its mean speedup in training, and those in decoding."""
    parts = _fp8_parts(results)
    many_rows, decoding = parts["many rows"], parts["decoding"]
    base, *labels = fp8_labels(parts["product"])
    head = [
        f"speedup over {_code(base)}",
        f"geometric mean of {len(many_rows)} cases without decoding",
        *(record["case"] for record in decoding),
    ]
    rows = []
    for label in labels:
        timed = sum(_fp8_speedup(record, label, base) is not None for record in many_rows)
        of = "" if timed == len(many_rows) else f" ({timed} of {len(many_rows)})"
        row = [_code(label), _number(_fp8_mean(many_rows, label, base), 2) + of]
        rows.append(row + [_number(_fp8_speedup(record, label, base), 2) for record in decoding])
    return [f"{_where(results.meta)}. {_calls(results.meta)}.", "", *_markdown_rows(head, rows)]


def fp8_steps(results: Results) -> str:
    """Return a table of training steps in fp8, one line per kind: their speedups over bfloat16."""
    steps = _fp8_parts(results)["training"]
    base, *labels = fp8_labels(steps)
    head = [f"speedup over {_code(base)}", *(record["case"] for record in steps)]
    rows = [[_code(label), *(_number(_fp8_speedup(record, label, base), 2) for record in steps)] for label in labels]
    return "\n".join([f"{_where(results.meta)}. {_calls(results.meta)}.", "", *_markdown_rows(head, rows), ""])


def _fp8_parts(results: Results) -> dict[str, list[Record]]:
    """Return the records of fp8.py by part; products also split into cases with many rows and of decoding."""
    parts = {name: [r for r in results.records if r["part"] == name] for name in ("product", "layer", "training")}
    decoding = [r for r in parts["product"] if r["case"].startswith("decode")]
    return parts | {"many rows": [r for r in parts["product"] if r not in decoding], "decoding": decoding}


def _names(records: Sequence[Record], field: str) -> list[str]:
    """Return the names of all measurements of `field`: a call that failed in one case lacks its name there."""
    return list(dict.fromkeys(name for record in records for name in record[field]))


def fp8_labels(records: Sequence[Record]) -> list[str]:
    """Return the labels of products, layers or steps, the baseline first."""
    return [label for label in _names(records, "us") if not label.startswith(("quantize", "copy", "permute", "wgrad"))]


def _fp8_speedup(record: Record, label: str, base: str) -> float | None:
    us: dict[str, float] = record["us"]
    return us[base] / us[label] if base in us and label in us else None


def _fp8_mean(records: Sequence[Record], label: str, base: str) -> float | None:
    ratios = [ratio for r in records if (ratio := _fp8_speedup(r, label, base)) is not None]
    return statistics.geometric_mean(ratios) if ratios else None


def _convergence_table(results: Results) -> list[str]:
    """Return the table of convergence.py: final held-out losses by seed, and mean and spread for each `compute`."""
    final = {(r["compute"], r["seed"]): r["final"] for r in results.records}
    computes = list(dict.fromkeys(compute for compute, _ in sorted(final)))
    seeds = sorted({seed for _, seed in final})
    means = {c: statistics.mean(loss for (other, _), loss in final.items() if other == c) for c in computes}
    rows = []
    for compute in computes:
        losses = [final.get((compute, seed)) for seed in seeds]
        there = [loss for loss in losses if loss is not None]
        row = [f"`{compute}`", *(_number(loss, 4) for loss in losses), _number(means[compute], 4)]
        row.append(_number(max(there) - min(there), 4))
        pairs = [(final.get((compute, seed)), final.get((computes[0], seed))) for seed in seeds]
        above = [loss - base for loss, base in pairs if loss is not None and base is not None]
        rows.append([*row, f"{statistics.mean(above):+.4f}" if above and compute != computes[0] else "-"])
    t = results.meta["training"]
    head = ["compute", *(f"seed {seed}" for seed in seeds), "mean", "highest - lowest"]
    return [
        f"{_where(results.meta)}. Held-out cross entropy, in nats per byte, after {t['steps']} training steps with "
        f"batches of {t['batch']} x {t['length']} bytes from the source of the standard library of Python "
        f"{results.meta['python']}. The model is a transformer with {t['layers']} layers of {t['experts']} experts, "
        f"top_k = {t['top_k']}, H = {t['width']}, I = {t['inner']}.",
        "",
        *_markdown_rows([*head, f"mean difference from `{computes[0]}`"], rows),
    ]


def accuracy_line(record: Record) -> str:
    """Return a line on a record of accuracy.py."""
    if record["part"] == "random":
        what = f"{record['operator']}, {record['dtype']} to {record['result']}"
        return f"{what}: {record['over']} of {record['cases']} over the budget, at most {record['largest']:.2f} of it"
    errors = ", ".join(f"{label} {_exponent(error)}" for label, error in record["errors"].items())
    return f"K = {record['K']}, {record['rows']} rows per group: {errors}"


def accuracy(results: Results, part: str) -> list[str]:
    """Return the table of a part of accuracy.py: errors by K, or shares of the budget in random cases."""
    records = [r for r in results.records if r["part"] == part]
    if part == "random":
        head = [
            "operator",
            "operands",
            "result",
            "random cases",
            "over the budget",
            "largest share of the budget",
            "at",
        ]
        rows = []
        for r in records:
            counts = [str(r["cases"]), str(r["over"]), f"{r['largest']:.2f}"]
            where = f"N = {r['where']['N']}, K = {r['where']['K']}"
            rows.append([_code(r["operator"]), r["dtype"], r["result"], *counts, where])
    else:
        labels = _names(records, "errors")
        head = ["K", "rows per group", *map(_code, labels)]
        rows = [[str(r["K"]), str(r["rows"]), *(_exponent(r["errors"][label]) for label in labels)] for r in records]
    return [f"{_where(results.meta)}.", "", *_markdown_rows(head, rows), ""]


def _accuracy_tables(results: Results) -> list[str]:
    """Return the tables of accuracy.py."""
    titles = {
        "fp8": "The largest error of a row, relative to the row's norm, of products in fp8",
        "float32": "The root mean square of the error, relative to that of the result, of products in float32",
        "random": "Random cases",
    }
    parts = dict.fromkeys(record["part"] for record in results.records)
    return [line for part in parts for line in (f"{titles[part]}:", "", *accuracy(results, part))]


SCRIPTS = {  # suites of the scripts in benchmarks/
    "transformers": _transformers_table,
    "expert_parallel": _expert_parallel_table,
    "wide": _wide_tables,
    "fp8": _fp8_tables,
    "convergence": _convergence_table,
    "accuracy": _accuracy_tables,
}
SHORT_SCRIPTS = {"fp8": _short_fp8_table}


def of_tritonbench(found: Measured) -> str:
    """Return a table of the baseline's time for each input, and the speedups over it with their geometric means.

    Means are over the inputs for which all providers have a speedup, but for providers that have none.
    """
    times = found.providers.get(found.baseline, {}).get("latency", [None] * len(found.names))
    rows = [[name, _number(ms and 1e3 * ms)] for name, ms in zip(found.names, times, strict=True)]
    speedups = {label: metrics["speedup"] for label, metrics in found.providers.items() if "speedup" in metrics}
    timed = [ratios for ratios in speedups.values() if any(ratios)]
    common = [i for i in range(len(rows)) if timed and all(ratios[i] for ratios in timed)]
    of = "" if len(common) == len(rows) else f" of {len(common)} of {len(rows)} inputs"
    head, means = [found.title, f"{_clearer(found.baseline)} us"], [f"geometric mean{of}", ""]
    for label, ratios in speedups.items():
        head.append(f"{_clearer(label)} speedup")
        for row, ratio in zip(rows, ratios, strict=True):
            row.append(_number(ratio, 2))
        there = [ratio for i in common if (ratio := ratios[i])]
        means.append(_number(statistics.geometric_mean(there) if there else None, 2))
    return "\n".join([*_markdown_rows(head, [*rows, means]), ""])


def _case_table(results: Results, timing: str) -> list[str]:
    base, ours = roles(results.records[0]["suite"])
    others = [p for p in dict.fromkeys(record["provider"] for record in results.records) if p != base]
    there = {(r["provider"], name) for r in results.records for name in _EAGER if r.get(name) is not None}
    eager = [(p, name) for name in _EAGER for p in dict.fromkeys((ours, base, *others)) if (p, name) in there]
    eager = [(p, name) for p, name in eager if p in (ours, base) or name == "peak_mb"]
    operator, rates = operator_of(results.records[0]["suite"]), _rates(results)
    head = [f"case ({operator.dimensions})", operator.layout_of, f"{_code(base)} us"]
    head += [*(f"{_code(other)} speedup" for other in others), *(f"{_code(ours)} {_RATES[name]}" for name in rates)]
    head += [f"{_code(p)} {_EAGER[name]}" for p, name in eager]
    warmed = [p for p in dict.fromkeys(r["provider"] for r in results.records if _is_warm(r)) if p in (base, ours)]
    head += [f"{_code(p)} warm us" for p in warmed]
    rows = []
    for case in by_case(results.records):
        first = next(iter(case.values()))
        mine = case.get((ours, timing), {})
        row = [f"{first['case']} ({', '.join(str(first[d]) for d in 'GMNK')})", f"`{first['layout']}`"]
        row += [_number(case.get((base, timing), {}).get("us"))]
        row += [_number(speedup(case, other, timing), 2) for other in others]
        row += [_number(mine.get(name), 0) for name in rates]
        row += [_number(case.get((p, "eager"), {}).get(name), 0) for p, name in eager]
        row += [_number(case.get((p, "warm"), {}).get("us"), 2) for p in warmed]
        rows.append(row)
    return _markdown_rows(head, rows)


def _short_case_table(results: Results, timing: str) -> list[str]:
    """Return a table of the baseline's and our times, and the speedups of all providers with the same result."""
    suite = results.records[0]["suite"]
    base, ours = roles(suite)
    others = _others(suite, (record["provider"] for record in results.records))
    operator, rates = operator_of(suite), _rates(results)
    head = [f"case ({operator.dimensions})", operator.layout_of, f"{_code(base)} us", f"{_code(ours)} us"]
    head += [*(f"{_code(p)} speedup" for p in (ours, *others)), *(f"{_code(ours)} {_RATES[name]}" for name in rates)]
    rows = []
    for case in by_case(results.records):
        first, mine = next(iter(case.values())), case.get((ours, timing), {})
        row = [f"{first['case']} ({', '.join(str(first[d]) for d in 'GMNK')})", f"`{first['layout']}`"]
        row += [_number(case.get((base, timing), {}).get("us")), _number(mine.get("us"))]
        row += [_number(speedup(case, p, timing), 2) for p in (ours, *others)]
        rows.append([*row, *(_number(mine.get(name), 0) for name in rates)])
    return _markdown_rows(head[:SHORT], [row[:SHORT] for row in rows])


def _rates(results: Results) -> list[str]:
    """Return the rates that the results have: a suite without products of matrices has no FLOPs."""
    return [name for name in _RATES if any(record[name] for record in results.records)]


def _others(suite: str, labels: Iterable[str]) -> list[str]:
    """Return the labels of providers with the same result, without the baseline and ours."""
    operator = operator_of(suite)
    left_out = {p.label for p in operator.providers.values() if p.ours or not p.same_result}
    left_out.add(operator.providers[operator.baseline].label)
    return [label for label in dict.fromkeys(labels) if label not in left_out]


def start_up(measured: Record) -> str:
    """Return the table of start_up.py: seconds, one line per part, one column per measured state of the cache."""
    states = {
        "nothing cached": "nothing cached",
        "caches filled": "cached on disk",
        "compiled on a machine without a GPU": "compiled ahead without a GPU, by another version of Python",
    }
    states = {state: text for state, text in states.items() if f"layer, {state}" in measured}
    parts = {
        ("layer", "first grouped_gemm"): "first `grouped_gemm` of a process",
        ("layer", "25 calls"): "then 25 calls of a layer with 1 to 8192 tokens, total",
        ("layer", "worst of them"): "the longest of these 25 calls",
        ("training", "first step"): "first training step of a process",
        ("training", "first step of another T"): "first training step with another token count",
    }
    rows = [
        [text, *(_number(measured[f"{part}, {state}"].get(key), 2) for state in states)]
        for (part, key), text in parts.items()
    ]
    for label, seconds in _first_products(measured).items():
        cells = [_number(seconds, 2) if state == "caches filled" else "-" for state in states]
        rows.append([f"first product of a process by {_code(label)}", *cells])
    return "\n".join(
        [
            f"{_where(measured)}. Times are in seconds. The clock starts after `import torch` and the creation of the "
            "operands, and includes the library's import.",
            "",
            *_markdown_rows(["", *states.values()], rows),
            "",
        ]
    )


def _first_products(measured: Record) -> dict[str, float]:
    """Return the seconds of other libraries' first products, by label, fastest first."""
    providers = OPERATORS["grouped_gemm"].providers
    found = {p.label: measured.get(f"{name}, caches filled", {}).get("first product") for name, p in providers.items()}
    return dict(sorted(((k, v) for k, v in found.items() if v is not None), key=lambda one: one[1]))


def overview(folder: Path) -> str:
    """Return a table of the main results in `folder`, in five lines."""

    def times(suite: str, name: str, layout: str) -> tuple[Record, list[str]]:
        results = Results.read(folder / f"{suite}.json")
        records = [r for r in results.records if (r["case"], r["layout"], r["timing"]) == (name, layout, "graph")]
        us = {record["provider"]: record["us"] for record in records if record["us"] is not None}
        base, ours = roles(suite)
        best = min((base, *_others(suite, us)), key=us.__getitem__)
        cells = [f"**{_number(us[ours])} us**", *(f"{_number(us[p])} us, {_code(p)}" for p in (best, base))]
        return results.meta, cells

    lines = {
        "layer forward, 8192 tokens": ("ffn", "qwen3_30b, T = 8192", "[E, 2I, H]"),
        "layer forward and backward, 8192 tokens": ("ffn-train", "qwen3_30b, T = 8192", "[E, 2I, H]"),
        "layer forward, 16 tokens (decoding)": ("ffn", "qwen3_30b, T = 16", "[E, 2I, H]"),
        "one product, 65536 rows": ("table", "qwen3_up", "[G, N, K] transposed"),
    }
    found = {text: times(*asked) for text, asked in lines.items()}
    dates: dict[str, list[str]] = {}
    for meta, _ in found.values():
        dates.setdefault(_where(meta | {"date": ""}), []).append(meta["date"])
    regimes = {"under sustained load" if meta.get("load") else "in short bursts" for meta, _ in found.values()}
    regime = " and ".join(sorted(regimes))
    where = "; ".join(f"{machine}{' and '.join(sorted(set(days)))}" for machine, days in dates.items())
    rows = [[text, *cells] for text, (_, cells) in found.items()]
    measured = json.loads((folder / "start_up.json").read_text(encoding="utf-8"))
    seconds = f"**{_number(measured['layer, caches filled']['first grouped_gemm'], 2)} s**"
    others = {label: f"{_number(s, 2)} s, {_code(label)}" for label, s in _first_products(measured).items()}
    cells = [next(iter(others.values()), "not measured"), others.get(roles("table")[0], "not measured")]
    rows.append(["first product of a new process, kernels cached on disk", seconds, *cells])
    head = ["Qwen3-30B-A3B, bfloat16", "moe_kernels", "fastest other in the same run", "PyTorch baseline"]
    return "\n".join(
        [
            *_markdown_rows(head, rows),
            "",
            f"{where}. Times in microseconds are of CUDA-graph replays with a cold L2 cache, {regime}. The "
            "implementations of a row took turns in one run.",
            "",
        ]
    )


def _is_warm(record: Record) -> bool:
    return bool(record["timing"] == "warm")


def _markdown_rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    return [lines[0], "|---" * len(head) + "|", *lines[1:]]


def _title(record: Record) -> str:
    """Return a title such as "qwen3_up (128, 65536, 1536, 2048), B [G, K, N]"."""
    return f"{record['case']} ({', '.join(str(record[d]) for d in 'GMNK')}), B {record['layout']}"


def _number(value: float | None, digits: int | None = None) -> str:
    if value is None:
        return "-"
    if digits is None:
        digits = 0 if value >= 100 else 1
    return f"{value:.{digits}f}"


def _exponent(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-")


def _clearer(label: str) -> str:
    for old, new in _CLEARER.items():
        label = label.replace(old, new)
    return label


def _code(label: str) -> str:
    """Return a label in clearer words, with details in brackets and names of functions marked as code."""
    name, _, details = _clearer(label).partition(", ")
    name = f"{name} kernel" if name in ("basic", "persistent") else name
    shown = f"{name} ({details})" if details else name
    return re.sub(r"\b(torch\.\w+|\w*grouped_gemm(?:_wgrad)?|moe_mlp)\b", r"`\1`", shown)
