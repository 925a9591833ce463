"""Results from a CSV of TritonBench, and a plot of them, which needs matplotlib."""

from __future__ import annotations

import ast
import csv
import hashlib
import io
import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CEILING = "dense_ceiling"  # a provider of this name computes something else
_AXES = {"tflops": "TFLOP/s", "gbps": "GB/s", "speedup": "speedup over {}"}
_MARKERS = "osD^vPX<>"
_KEY = "Results"  # the key of the PNG text chunk that identifies the plotted results


@dataclass
class Measured:
    """The measurements of each input; None where a provider failed or was left out."""

    title: str  # the meaning of the parts of an input's name
    names: list[str]
    baseline: str  # the provider that "speedup" refers to
    providers: dict[str, dict[str, list[float | None]]]  # by label and metric, a number for each input


def read(text: str) -> Measured:
    """Read results from a CSV, without columns that have no number, and without averages, which count failures as 0."""
    [title, *columns], *rows = csv.reader(io.StringIO(text), delimiter=";")
    rows = [row for row in rows if row[0] != "average"]
    providers: dict[str, dict[str, list[float | None]]] = {}
    for i, column in enumerate(columns, 1):
        label, _, metric = column.rpartition("-")
        numbers = [_number(row[i]) for row in rows]
        if any(number is not None for number in numbers):
            providers.setdefault(label, {})[metric] = numbers
    baseline = columns[0].rpartition("-")[0] if columns else ""
    return Measured(title.strip("()"), [_name(row[0]) for row in rows], baseline, providers)


def _number(cell: str) -> float | None:
    try:
        number = float(cell)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _name(cell: str) -> str:
    """Return "8, 64, zipf" for "(8, 64, 'zipf')", other cells unchanged."""
    return ", ".join(map(str, ast.literal_eval(cell))) if cell.startswith("(") else cell


def plotted(found: Measured) -> list[str]:
    """Return the metrics that `draw` shows."""
    return [name for name in _AXES if any(name in metrics for metrics in found.providers.values())]


def draw(found: Measured, picture: Path) -> None:
    """Write a PNG with a panel for each metric, in it a line for each input, and on it a mark for each provider."""
    from matplotlib.figure import Figure

    count, shown = len(found.names), plotted(found)
    figure = Figure(figsize=(3 + 4 * len(shown), 1.5 + 0.2 * count), layout="constrained")
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axes, metric in zip(panels, shown, strict=True):
        for i, (label, metrics) in enumerate(found.providers.items()):
            if metric in metrics and not (metric == "speedup" and label.startswith(CEILING)):
                numbers = [math.nan if number is None else number for number in metrics[metric]]
                axes.plot(
                    numbers,
                    range(count),
                    linestyle="none",
                    marker=_MARKERS[i % len(_MARKERS)],
                    markersize=4.5,
                    color=f"C{i}",
                    alpha=0.8,
                    label=label,
                )
        axes.set_xlabel(_AXES[metric].format(found.baseline), fontsize=8)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
        if metric == "speedup":
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
            axes.axvline(1, color="black", linewidth=0.8)
    panels[0].set_yticks(range(count), found.names)
    panels[0].set_ylim(count - 0.5, -0.5)
    panels[0].set_ylabel(found.title, fontsize=8)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=8)
    save(figure, picture, found)


def missing() -> str | None:
    """Return the reason why plots cannot be drawn here, or None."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return "plots need matplotlib: pip install -e '.[bench]'"
    return None


def save(figure: Figure, picture: Path, results: object) -> None:
    """Write a plot of `results` as a PNG, with the fingerprint that `is_of` reads."""
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=90, bbox_inches="tight", metadata={_KEY: fingerprint(results)})


def fingerprint(results: object) -> str:
    """Return a hash of all fields of `results`."""
    content = json.dumps(vars(results), sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def is_of(picture: Path, results: object) -> bool:
    """Whether a PNG that `save` wrote shows `results`."""
    return picture.exists() and _text_chunks(picture.read_bytes()).get(_KEY) == fingerprint(results)


def _text_chunks(png: bytes) -> dict[str, str]:
    found, at = {}, 8
    while at < len(png):
        length, kind = struct.unpack_from(">I4s", png, at)
        if kind == b"tEXt":
            key, _, text = png[at + 8 : at + 8 + length].partition(b"\0")
            found[key.decode("latin-1")] = text.decode("latin-1")
        at += 12 + length
    return found
