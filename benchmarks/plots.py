"""Plots of results: speedups by case, and a roofline. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import tables
from benchmarks.run import Results
from tritonbench_ops.plots import save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = ("#9a9a9a", "#d1495b", "#edae49", "#00798c", "#30638e", "#76b041", "#8d6a9f", "#5c4742", "#2e4057", "#f08a4b")
_CASES = 40  # the number of cases in the plot of wide.py


def pictures(results: Results, folder: Path) -> list[Path]:
    """Return the files that `draw` writes."""
    found = []
    for suite in results.suites:
        if suite in ("wide", "convergence"):
            found.append(folder / f"{suite}.png")
        elif results.of(suite).records and suite not in tables.SCRIPTS:
            found.append(folder / f"{suite}.png")
            multiplies = any(record.get("tflops") for record in results.of(suite).records)
            found += [folder / f"{suite}-roofline.png"] if multiplies and results.meta.get("ceilings") else []
            found += [folder / f"{suite}-cubes.png"] if _cubes(results.of(suite)) else []
    return found


def draw(results: Results, folder: Path) -> None:
    """Write all plots of `results` into `folder`."""
    for picture in pictures(results, folder):
        suite = picture.stem.removesuffix("-roofline").removesuffix("-cubes")
        part = results.of(suite)
        if suite == "wide":
            figure = _worst(part)
        elif suite == "convergence":
            figure = _losses(part)
        elif picture.stem.endswith("-roofline"):
            figure = _roofline(part)
        elif picture.stem.endswith("-cubes"):
            figure = _lines(part)
        else:
            figure = _bars(part)
        save(figure, picture, results)


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _bars(results: Results) -> Figure:
    """Plot speedups over the baseline: a cluster of bars per case, and in it a bar per provider."""
    timing = tables.timing_of(results.records)
    base, ours = tables.roles(results.records[0]["suite"])
    cases = tables.by_case(results.records)
    labels = [p for p in dict.fromkeys(r["provider"] for r in results.records) if p != base and "dense" not in p]
    several = len({r["layout"] for r in results.records}) > 1
    figure, axes = _axes(min(14.0, max(6.0, 2 + 0.16 * len(cases) * (len(labels) + 1))), 4.5)
    width = 0.85 / max(len(labels), 1)
    for i, label in enumerate(labels):
        ratios = [tables.speedup(case, label, timing) for case in cases]
        at = [c + (i - (len(labels) - 1) / 2) * width for c in range(len(cases))]
        heights = [ratio or 0 for ratio in ratios]
        color = _COLORS[1] if label == ours else _COLORS[2 + i % (len(_COLORS) - 2)]
        axes.bar(at, heights, width, label=label, color=color)
        for x, ratio in zip(at, ratios, strict=True):
            if ratio is None:
                axes.text(x, 0.02, "no time", rotation=90, ha="center", va="bottom", fontsize=7, color=color)
    axes.axhline(1, color="black", linewidth=1)
    names = []
    for case in cases:
        record = next(iter(case.values()))
        names.append(record["case"] + (f"\n{record['layout']}" if several else ""))
    axes.set_xticks(range(len(cases)), names, rotation=60, ha="right", fontsize=8, rotation_mode="anchor")
    axes.set_ylabel(f"speedup over {base}")
    axes.margins(x=0.01)
    axes.set_title(_title(results, timing), fontsize=10, pad=30)
    axes.legend(fontsize=8, frameon=False, ncols=min(6, len(labels)), loc="lower center", bbox_to_anchor=(0.5, 1))
    return figure


def _worst(results: Results) -> Figure:
    """Plot our speedups over the best other provider in the worst cases of wide.py, lowest first."""
    found = tables.worst_first(results)
    shown = found[:_CASES]
    figure, axes = _axes(9.0, 1.5 + 0.16 * len(shown))
    _, ours = tables.roles("wide")
    for i, label in enumerate(dict.fromkeys(label for _, record in found for label in record["us"] if label != ours)):
        at = [y for y, (_, record) in enumerate(shown) if _best_other(record, ours) == label]
        if at:
            axes.barh(at, [shown[y][0] for y in at], 0.8, label=label, color=_COLORS[i])
    axes.set_yticks(range(len(shown)), [f"{r['case']}, M = {r['M']}, {r['sizes']}" for _, r in shown], fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlim(left=min([0.5, *(0.95 * ratio for ratio, _ in shown)]))
    axes.set_xlabel(f"speedup of {ours} over the best other, which the color names")
    meta = results.meta
    axes.set_title(
        f"wide: the {len(shown)} worst of {len(found)} cases\n{meta['gpu']}, {meta['date']}", fontsize=10, pad=30
    )
    axes.legend(fontsize=8, frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
    return figure


def _best_other(record: dict[str, Any], ours: str) -> str:
    us: dict[str, float] = record["us"]
    return min((label for label in us if label != ours), key=us.__getitem__)


def _cubes(results: Results) -> dict[str, dict[int, float]]:
    """Return milliseconds by provider and N, for the cases that are lists of products N x N x N."""
    timing = tables.timing_of(results.records)
    found: dict[str, dict[int, float]] = {}
    for record in results.records:
        if (match := tables.CUBES.fullmatch(record["case"])) and record["timing"] == timing and record["us"]:
            found.setdefault(record["provider"], {})[int(match[2])] = record["us"] / 1e3
    return found


def _lines(results: Results) -> Figure:
    """Plot time over N for lists of products N x N x N, as in the tutorials on grouped GEMM."""
    figure, axes = _axes(6.0, 4.0)
    base, ours = tables.roles(results.records[0]["suite"])
    for i, (label, times) in enumerate(_cubes(results).items()):
        color = {base: _COLORS[0], ours: _COLORS[1]}.get(label, _COLORS[2 + i])
        axes.plot(list(times), list(times.values()), marker="o", color=color, label=label)
    sizes = sorted({N for times in _cubes(results).values() for N in times})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(N) for N in sizes])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("N")
    axes.set_ylabel("ms")
    axes.set_title("group-gemm-performance\n" + _title(results, tables.timing_of(results.records)), fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    return figure


def _losses(results: Results) -> Figure:
    """Plot held-out losses over steps: the mean over seeds, and the range from lowest to highest."""
    figure, axes = _axes(7.0, 4.5)
    curves: dict[str, list[list[tuple[int, float]]]] = {}
    for record in sorted(results.records, key=lambda r: (r["compute"], r["seed"])):
        curves.setdefault(record["compute"], []).append(record["held_out"])
    for color, (compute, runs) in zip(_COLORS, curves.items(), strict=False):
        steps = [step for step, _ in runs[0]]
        losses = list(zip(*([loss for _, loss in one] for one in runs), strict=True))
        axes.fill_between(steps, [min(at) for at in losses], [max(at) for at in losses], color=color, alpha=0.2, lw=0)
        axes.plot(steps, [sum(at) / len(at) for at in losses], color=color, linewidth=1.2, label=compute)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel("step")
    axes.set_ylabel("held-out loss, nats per byte")
    seeds, meta = len({record["seed"] for record in results.records}), results.meta
    axes.set_title(f"convergence: mean and range of {seeds} seeds\n{meta['gpu']}, {meta['date']}", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    return figure


def _roofline(results: Results) -> Figure:
    """Plot TFLOP/s over FLOP per byte for the baseline and ours, below the GPU's peak rates in the same run."""
    timing = tables.timing_of(results.records)
    figure, axes = _axes(7.0, 4.5)
    ceiling: dict[str, Any] = results.meta["ceilings"]
    top, slope = ceiling["tflops"], ceiling["gbps"] / 1e3
    lowest = highest = top / slope
    for label, color, marker in zip(tables.roles(results.records[0]["suite"]), _COLORS, "so", strict=False):
        points = [
            (1e3 * r["tflops"] / r["gbps"], r["tflops"])
            for r in results.records
            if r["provider"] == label and r["timing"] == timing and r["us"] is not None and r["gbps"] and r["tflops"]
        ]
        if points:
            x, y = zip(*points, strict=True)
            axes.scatter(x, y, s=22, color=color, marker=marker, label=label, zorder=3, alpha=0.8)
            lowest, highest = min(lowest, *x), max(highest, *x)
    ends = [lowest / 1.5, top / slope, highest * 1.5]
    axes.plot(ends, [ends[0] * slope, top, top], color="black", linewidth=1, zorder=2)
    axes.annotate(
        f"large dense product in bfloat16: {top:.3g} TFLOP/s", (ends[2], top), ha="right", va="bottom", fontsize=8
    )
    axes.annotate(f" large copy: {ceiling['gbps']:.0f} GB/s", (ends[0], ends[0] * slope), va="top", fontsize=8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOP per byte, each input read once and the output written once")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(_title(results, timing), fontsize=10)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    return figure


def _title(results: Results, timing: str) -> str:
    meta = results.meta
    how = "CUDA-graph replays" if timing == "graph" else "eager calls"
    return f"{results.records[0]['suite']}: {meta['gpu']}, {how}, {meta['date']}"
