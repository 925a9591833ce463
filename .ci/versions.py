"""Run the tests with each supported combination of PyTorch, Triton and Helion, and write docs/versions.md.

    python .ci/versions.py [--only 2.15] [--python 3.13] [--parts lowering interpreter reference]

Each combination gets a virtual environment of its own, one after another, made by a command such as `python3.13`.
PyTorch's CUDA builds take 6 GB each; they can be imported without a GPU. docs/versions.json keeps earlier results of
other combinations and parts, and the page is generated from it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "docs" / "versions.json", ROOT / "docs" / "versions.md"
# torch, triton, helion, Python, and pip's requirement for numpy. PyTorch's CUDA builds require the Triton named here.
COMBINATIONS = [
    ("2.11.0", "3.6.0", "1.5.0", "3.11", "numpy<2.4"),
    ("2.12.1", "3.7.1", "1.5.0", "3.11", "numpy"),
    ("2.13.0", "3.6.0", "1.5.0", "3.11", "numpy<2.4"),
    ("2.13.0", "3.7.1", "1.5.1", "3.11", "numpy"),
    ("2.13.0", "3.9.0", "1.5.0", "3.11", "numpy"),
    ("2.14.1", "3.8.0", "1.5.0", "3.10", "numpy"),
    ("2.14.1", "3.8.0", "1.5.0", "3.11", "numpy"),
    ("2.14.1", "3.8.0", "1.5.1", "3.11", "numpy"),
    ("2.15.0", "3.9.0", "1.5.0", "3.11", "numpy"),
    ("2.15.0", "3.9.0", "1.5.0", "3.13", "numpy"),
    ("2.15.0", "3.9.0", "1.5.1", "3.11", "numpy"),
]
STARTED = ["tests/test_interpreter.py", "tests/test_lowering.py"]  # they start the tests that are run directly here
# Arguments of pytest, and additional environment variables.
PARTS: dict[str, tuple[list[str], dict[str, str]]] = {
    "reference": (["tests", *(f"--ignore={path}" for path in STARTED)], {}),
    "interpreter": (["tests/kernels"], {"TRITON_INTERPRET": "1"}),
    "lowering": (["tests/lowering"], {"MOE_KERNELS_LOWERING": "1"}),
}
EXPLAINED = """\
# Tested versions

Written by `python .ci/versions.py`, on a machine without a GPU. Each cell is the number of tests that passed.
*reference*: plain PyTorch, checks and commands. *interpreter*: the kernels in Triton's interpreter. *lowering*: what
the kernels compile to for an H200. Earlier dates had fewer tests. Skipped tests are not counted.
"""
BELOW = """\

Helion 1.5.1 cannot be imported with PyTorch 2.11. Uniform products compiled with Helion 1.5.1 store their results
through pointers; with Helion 1.5.0 they use TMA. A minor version that is not in the table gives a warning, and calls
and launches then use no private functions of PyTorch and Triton; compiling still does. Only the interpreter of Triton
3.6 needs numpy before 2.4.

On an H200, Python 3.12 runs all tests with PyTorch 2.11.0, Triton 3.6.0 and Helion 1.5.0. On 2026-11-30, the tests
that need a GPU ran there with two other combinations. With PyTorch 2.11.0 and Triton 3.9.0, 1640 passed, and one, since
corrected, compared sums bit for bit. With PyTorch 2.15.0 and Triton 3.9.0, all 1645 passed.
"""


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", metavar="VERSION", help="PyTorch's, or how it begins")
    parser.add_argument("--python", default="", metavar="VERSION", help="Python's, or how it begins")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="of the tests")
    options = parser.parse_args()
    for combination in COMBINATIONS:
        if combination[0].startswith(options.only) and combination[3].startswith(options.python):
            test(combination, options.parts)
        PAGE.write_text(page(json.loads(RESULTS.read_text())))  # the next combination's tests compare both files
    return 0


def test(combination: tuple[str, ...], parts: list[str]) -> None:
    """Run `parts` of the tests in an environment of this combination, and add their results to RESULTS."""
    with tempfile.TemporaryDirectory(prefix="versions-") as path:
        torch, triton, helion, version, *others = combination
        subprocess.run([f"python{version}", "-m", "venv", path], check=True)
        python = str(Path(path, "bin", "python"))
        pip = [python, "-m", "pip", "install", "-q", "--no-cache-dir"]
        subprocess.run([*pip, f"torch=={torch}", *others], check=True)
        tools = ["pytest", "pytest-xdist", "hypothesis", "matplotlib"]
        subprocess.run([*pip, "-e", f"{ROOT}[transformers]", *tools], check=True)
        subprocess.run([*pip, f"triton=={triton}", f"helion=={helion}"], check=True)
        for part in parts:
            record(combination, python, part, run(python, *PARTS[part]))


def run(python: str, arguments: list[str], variables: dict[str, str]) -> dict[str, int]:
    """Return the numbers in the last line that pytest prints; one error if it ends without such a line."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    env |= {"CUDA_VISIBLE_DEVICES": ""} | variables
    command = [python, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    print(done.stdout[-4000:], done.stderr[-2000:], file=sys.stderr, flush=True)
    last = done.stdout.strip().rpartition("\n")[2]
    counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    crashed = done.returncode and not counts.keys() & {"failed", "error"}
    return counts | ({"error": 1} if crashed else {})


def record(combination: tuple[str, ...], python: str, part: str, counts: dict[str, int]) -> None:
    """Add one result to RESULTS."""
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    version = subprocess.run([python, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    entry = results.setdefault(" ".join(combination[:4]), {})
    entry[part] = {**counts, "python": version, "date": datetime.date.today().isoformat()}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")


def page(results: dict[str, Any]) -> str:
    """Return the text of docs/versions.md."""
    header = ["PyTorch", "Triton", "Helion", "Python", "date", *PARTS]
    rows = [header, ["---"] * len(header)]
    for combination in COMBINATIONS:
        found = results.get(" ".join(combination[:4]), {})
        python = next((one["python"] for one in found.values()), "")
        date = min((one["date"] for one in found.values()), default="")
        rows.append([*combination[:3], python, date, *(cell(found.get(part)) for part in PARTS)])
    return "\n".join([EXPLAINED, *(f"| {' | '.join(row)} |" for row in rows), BELOW])


def cell(result: dict[str, Any] | None) -> str:
    if result is None:
        return "not run"
    failed = result.get("failed", 0) + result.get("error", 0)
    return f"{failed} failed" if failed else f"{result.get('passed', 0)} passed"


if __name__ == "__main__":
    sys.exit(main())
