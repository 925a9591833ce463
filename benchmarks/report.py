"""Write the tables and plots of pages that show measurements.

    python -m benchmarks.report [--check] [PAGE ...]

replaces the text between one of these lines and `<!-- end of table -->` on each PAGE; default: all pages with
measurements. Paths are relative to the page's folder.

    <!-- table: FILE -->        all of FILE, a JSON of `benchmarks` or a CSV of TritonBench, and its plots
    <!-- short table: FILE -->  the same in at most eight columns, without plots
    <!-- training table: FILE -->  training steps in a JSON of `benchmarks.fp8`
    <!-- fp8 accuracy: FILE -->  one part of a JSON of `benchmarks.accuracy`; also float32, random
    <!-- overview: FOLDER -->   five lines from the results in FOLDER

The plots are written beside FILE. Those of a JSON are named after its suites; a JSON that is not named after one, such
as that of a second run, is shown without plots. --check writes nothing, and exits with 1 if anything would change.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks import plots, tables
from benchmarks.run import Results
from tritonbench_ops import plots as tritonbench

ROOT = Path(__file__).parents[1]
PAGES = (  # in ROOT
    Path("README.md"),
    Path("benchmarks/README.md"),
    *(Path("docs") / f"{name}.md" for name in ("performance", "numerics", "low_precision", "compiling_ahead")),
)
_BLOCK = re.compile(
    r"^<!-- ((?:short |training )?table|(?:fp8|float32|random) accuracy|overview): (\S+) -->\n"
    r"(.*?)^<!-- end of table -->$",
    re.DOTALL | re.MULTILINE,
)


def write_page(path: Path, check: bool) -> bool:
    """Write the tables of the page at `path` and their plots, unless `check`; return whether anything changes."""
    changed = False

    def block(match: re.Match[str]) -> str:
        nonlocal changed
        kind, file = match[1], path.parent / match[2]
        shown = _show(kind, file)
        if not shown.drawn:
            changed = True
            if not check:
                shown.draw()
        pictures = (picture.relative_to(path.parent) for picture in shown.pictures)
        links = "".join(f"![{picture.stem}]({picture})\n" for picture in pictures)
        return f"<!-- {kind}: {match[2]} -->\n{shown.text}\n{links}<!-- end of table -->"

    text = path.read_text(encoding="utf-8")
    wanted = _BLOCK.sub(block, text)
    if not check and wanted != text:
        path.write_text(wanted, encoding="utf-8")
    return changed or wanted != text


class _Shown(NamedTuple):
    text: str
    pictures: Sequence[Path] = ()
    drawn: bool = True  # whether the pictures exist and show these results
    draw: Callable[[], None] = lambda: None


def _show(kind: str, file: Path) -> _Shown:
    if kind == "overview":
        return _Shown(tables.overview(file))
    if file.stem == "start_up":
        return _Shown(tables.start_up(json.loads(file.read_text(encoding="utf-8"))))
    if file.suffix == ".csv":
        measured, picture = tritonbench.read(file.read_text(encoding="utf-8")), file.with_suffix(".png")
        draw = partial(tritonbench.draw, measured, picture)
        return _Shown(tables.of_tritonbench(measured), [picture], tritonbench.is_of(picture, measured), draw)
    results = Results.read(file)
    if kind == "training table":
        return _Shown(tables.fp8_steps(results))
    if kind.endswith(" accuracy"):
        return _Shown("\n".join(tables.accuracy(results, kind.removesuffix(" accuracy"))))
    text = tables.markdown(results, short=kind == "short table")
    if kind == "short table" or file.stem not in results.suites:
        return _Shown(text)
    pictures = plots.pictures(results, file.parent)
    drawn = all(tritonbench.is_of(picture, results) for picture in pictures)
    return _Shown(text, pictures, drawn, partial(plots.draw, results, file.parent))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description="Write the tables and plots of pages anew."
    )
    pages = ", ".join(map(str, PAGES))
    parser.add_argument("page", nargs="*", type=Path, default=[ROOT / page for page in PAGES], help=f"default: {pages}")
    parser.add_argument("--check", action="store_true", help="only say, by the exit status, whether all is as it is")
    options = parser.parse_args(argv)
    for page in options.page:
        if not page.is_file():
            parser.error(f"argument page: no file {page}")
    changed = [write_page(page, options.check) for page in options.page]
    return int(any(changed) and options.check)


if __name__ == "__main__":
    sys.exit(main())
