"""Tables and plots of README.md and benchmarks/README.md.

    python -m benchmarks.report [--check] [PAGE ...]

writes the tables and plots of these pages, or others, anew. Between `<!-- table: FILE -->` and `<!-- end of table -->`,
each on a line of its own, it puts what FILE, a JSON of `benchmarks` or a CSV of TritonBench, holds, with a path from
the page's folder. The plots go beside FILE. Those of a JSON have their names from its suites: a file that is not named
after one, such as a second run's, is shown without. With --check it writes nothing, and exits with 1 if anything would
change.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import plots, tables
from benchmarks.run import Results
from tritonbench_ops import plots as tritonbench

PAGES = (Path("README.md"), Path("benchmarks/README.md"))
_BLOCK = re.compile(r"^<!-- table: (\S+) -->\n(.*?)^<!-- end of table -->$", re.DOTALL | re.MULTILINE)


def write_page(path: Path, check: bool) -> bool:
    """Write the tables of the page at `path`, and the plots that they show; whether anything changes."""
    changed = False

    def block(match: re.Match[str]) -> str:
        nonlocal changed
        file = path.parent / match[1]
        results: Results | tritonbench.Measured
        if file.suffix == ".csv":
            results = tritonbench.read(file.read_text(encoding="utf-8"))
            text, pictures = tables.of_tritonbench(results), [file.with_suffix(".png")]
            draw = functools.partial(tritonbench.draw, results, *pictures)
        else:
            results = Results.read(file)
            text, pictures = tables.markdown(results), []
            if file.stem in results.suites:
                pictures = plots.pictures(results, file.parent)
            draw = functools.partial(plots.draw, results, file.parent)
        if not all(tritonbench.is_of(picture, results) for picture in pictures):
            changed = True
            if not check:
                draw()
        links = "".join(f"![{picture.stem}]({picture.relative_to(path.parent)})\n" for picture in pictures)
        return f"<!-- table: {match[1]} -->\n{text}\n{links}<!-- end of table -->"

    text = path.read_text(encoding="utf-8")
    wanted = _BLOCK.sub(block, text)
    if not check and wanted != text:
        path.write_text(wanted, encoding="utf-8")
    return changed or wanted != text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description="Write the tables and plots of pages anew."
    )
    pages = " and ".join(map(str, PAGES))
    parser.add_argument("page", nargs="*", type=Path, default=PAGES, help=f"default: {pages}")
    parser.add_argument("--check", action="store_true", help="only say, by the exit status, whether all is as it is")
    options = parser.parse_args(argv)
    changed = [write_page(page, options.check) for page in options.page]
    return int(any(changed) and options.check)


if __name__ == "__main__":
    sys.exit(main())
