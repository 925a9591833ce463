"""Bars of a TritonBench result: one group for each input, one bar for each provider. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_AXES = {"tflops": "TFLOP/s", "gbps": "GB/s", "speedup": "times the baseline's speed"}


def plot(
    result: Sequence[tuple[Any, dict[str, Any]]],  # of each input: its x_val, and each provider's metrics
    labels: dict[str, str],
    metrics: Sequence[str],
    file: Path,
) -> None:
    """Draw those of tflops, gbps and speedup that are in `metrics`, one above the other, into `file` (PNG).

    A provider that failed, or was skipped, has no bar.
    """
    wanted = [name for name in _AXES if name in metrics]
    if not wanted or not result:
        print(f"Nothing to plot: --metrics has none of {', '.join(_AXES)}." if result else "Nothing to plot.")
        return
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        print("--plot needs matplotlib: pip install matplotlib")
        return
    providers = list(result[0][1])
    figure = Figure(figsize=(max(8, 1.2 * len(result)), 4 * len(wanted)), layout="constrained")
    FigureCanvasAgg(figure)
    width = 0.8 / len(providers)
    panels = figure.subplots(len(wanted), sharex=True, squeeze=False)[:, 0]
    for axes, metric in zip(panels, wanted, strict=True):
        for i, provider in enumerate(providers):
            places = [j + (i - (len(providers) - 1) / 2) * width for j in range(len(result))]
            values = [value_of(found[provider], metric) for _, found in result]
            start = 1 if metric == "speedup" else 0  # slower is downwards
            heights = [value - start if value else math.nan for value in values]
            axes.bar(places, heights, width, bottom=start, label=labels[provider], color=f"C{i}")
        if metric == "speedup":
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter("{x:g}")
            axes.axhline(1, color="black", linewidth=0.8)
        axes.set_ylabel(_AXES[metric])
        axes.grid(axis="y", alpha=0.3)
    inputs = [", ".join(map(str, x)) if isinstance(x, tuple) else str(x) for x, _ in result]
    axes.set_xticks(range(len(result)), inputs, rotation=30, ha="right", fontsize=7)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=100)
    print(f"Plot saved to {file}")


def value_of(metrics: Any, name: str) -> float:
    """A metric as a number; 0 where there is none."""
    if metrics.error_msg:
        return 0.0
    value = metrics.extra_metrics[name] if name in metrics.extra_metrics else getattr(metrics, name)
    return 0.0 if value is None else float(value)
