"""`python -m benchmarks`: suites of cases, timed against PyTorch and the peers that are installed."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch

from benchmarks import plots, run, tables
from benchmarks.operators import OPERATORS
from benchmarks.suites import LAYOUTS, SUITES, TIMINGS, Suite, of_shapes
from moe_kernels import requirements
from moe_kernels.commands import run_and_exit
from moe_kernels.models import positive, shape
from moe_kernels.testing import SizeKind
from tritonbench_ops.plots import missing

HELP = """\
Times suites of shapes beside PyTorch, transformers and the peers that are installed (quack-kernels, DeepGEMM,
triton_kernels). Results are first compared with float64; a provider that fails or is wrong gets no time. Checked and
timed are eager calls and CUDA-graph replays. All providers of a case take turns, with a cold L2 cache, and medians are
printed: microseconds, the speedup over the baseline, TFLOP/s and GB/s of real rows only, and the host's microseconds
for an eager call: with one of several numbers of rows seen before (host us), with a number never seen, of a magnitude
that was (new rows), and repeated in inference mode (prepared). Small cases of `uniform` and `varied` are also timed
with a warm L2 cache: 100 calls in one graph, divided by 100. `ffn-train`, which is forward and backward, also shows the
most memory that a call allocates (peak MB).

Needs a CUDA GPU that nothing else uses; the suite `smoke` alone runs on a CPU too. Files are written after every case,
so Ctrl-C keeps what is done.

Exits with 0 when all is done, 1 if one of our own kernels failed or cannot run here, 2 without a GPU or on wrong
arguments, 130 after Ctrl-C."""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    providers = dict.fromkeys(key for operator in OPERATORS.values() for key in operator.providers)
    parser.add_argument("--suite", nargs="+", choices=SUITES, metavar="NAME", help="default: table; see --list")
    parser.add_argument("--shapes", nargs="+", type=shape, metavar="G,M,N,K", help="these in place of a suite")
    parser.add_argument(
        "--sizes",
        nargs="+",
        choices=get_args(SizeKind),
        help="of the groups of --shapes; default: softmax",
    )
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        help="memory layout: gkn is [G, K, N], gnk a transposed [G, N, K]; default: the suite's, with --shapes both",
    )
    parser.add_argument(
        "--providers", nargs="+", choices=providers, metavar="NAME", help="default: the suite's, and peers; see --list"
    )
    parser.add_argument("--timing", nargs="+", choices=TIMINGS, help="default: both")
    parser.add_argument("--rounds", type=positive, help="default: 21, fewer for `smoke`")
    parser.add_argument(
        "--load", action="store_true", help="dense products also take turns, for the clocks of sustained load"
    )
    parser.add_argument("--jobs", type=positive, help="number of processes that first compile all kernels")
    parser.add_argument(
        "--json",
        nargs="?",
        type=run.to_file,
        const=Path(),
        metavar="FILE",
        help="also write JSON: by default files of benchmarks/results/<gpu>/; without a GPU, FILE is required",
    )
    parser.add_argument("--csv", type=run.to_file, metavar="FILE", help="also write CSV")
    parser.add_argument("--plot", type=run.to_folder, metavar="DIR", help="bar charts and rooflines, as PNG")
    parser.add_argument("--list", action="store_true", help="only list suites and providers")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    options = arguments(argv)
    if problems := requirements.problems():
        print(f"The kernels cannot run here: {'; '.join(problems)}.\nTo fix it: {requirements.fix()}", file=sys.stderr)
        return 1
    if options.list:
        _list()
        return 0
    if options.suite and options.shapes:
        return _refused("--suite and --shapes exclude each other")
    if options.sizes and not options.shapes:
        return _refused("--sizes is for --shapes; a suite has its own")
    suites = [of_shapes(options.shapes, options.sizes or ["softmax"])] if options.shapes else []
    suites = suites or [SUITES[name] for name in dict.fromkeys(options.suite or ["table"])]
    on_cpu = requirements.interpreted() or not torch.cuda.is_available()
    if on_cpu and any(suite.name != "smoke" for suite in suites):
        return _refused("needs a CUDA GPU, and TRITON_INTERPRET unset; only `--suite smoke` runs without")
    if on_cpu and options.timing == ["graph"]:
        return _refused("there are no CUDA graphs without a CUDA GPU")
    if on_cpu and options.json == Path():
        return _refused("--json: name a FILE; only results of a GPU have a folder")
    if options.csv and options.json and options.csv.resolve() == options.json.resolve():
        return _refused("--json and --csv name the same file")
    if options.plot and (reason := missing()) is not None:
        return _refused(reason)
    for suite in suites:
        known, keys = OPERATORS[suite.operator].providers, providers_of(suite, options.providers)
        if not any(known[key].installed for key in keys):
            reason = "has none of the providers" if not keys else "needs other packages for the providers"
            return _refused(f"suite {suite.name} {reason} {', '.join(options.providers)}")
    device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    command = "python -m benchmarks " + shlex.join(_words(options))
    return bench(suites, options, device, run.Results(run.meta(device, command.strip(), options.load)))


def bench(suites: Sequence[Suite], options: argparse.Namespace, device: torch.device, results: run.Results) -> int:
    """Measure `suites` into `results`, write the requested files, and return the exit code."""
    begun = time.monotonic()
    meta = results.meta
    print(f"{meta['gpu']}, driver {meta['driver']}, torch {meta['torch']}, triton {meta['triton']}", end=", ")
    print(f"helion {meta['helion']}; at most {meta['ceilings']['tflops']} TFLOP/s and {meta['ceilings']['gbps']} GB/s")
    if device.type == "cpu":
        print("No GPU is used: the times say nothing about the speed on one.")
    code = 0
    try:
        for suite in suites:
            _measure(suite, options, device, results, begun)
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        code = 130
    except run.GpuLostError as error:
        print(f"\nThe GPU does not answer any more, so the rest is left out: {error}", file=sys.stderr)
        code = 1
    _write(results, options)
    if options.plot and results.records:
        plots.draw(results, options.plot)
    print(f"\n{tables.summary(results)}\n{run.elapsed(begun)} in all.")
    for file in _files(results, options):
        print(f"Written: {file}")
    ours = {p.label for operator in OPERATORS.values() for p in operator.providers.values() if p.ours}
    failed = any(record["error"] is not None and record["provider"] in ours for record in results.records)
    return code or int(failed)


def _measure(
    suite: Suite, options: argparse.Namespace, device: torch.device, results: run.Results, begun: float
) -> None:
    """Measure one suite, and print a table after every case."""
    keys = providers_of(suite, options.providers)
    operator = OPERATORS[suite.operator]
    cases = suite.cases(LAYOUTS[options.layout] if options.layout else ())
    timings = options.timing or TIMINGS
    if device.type == "cpu":
        timings = ["eager"]
    print(f"\n{suite.name}: {suite.about}; {len(cases)} cases", flush=True)
    for key, provider in operator.providers.items():
        if key in keys and not provider.installed:
            print(f"  {provider.label}: left out, {provider.package} is not installed")
    keys = [key for key in keys if operator.providers[key].installed]
    if options.jobs and device.type != "cpu":
        run.compile_beforehand(suite.operator, cases, keys, options.jobs, device)
        print(f"  compiled with {options.jobs} processes: {run.elapsed(begun)}", flush=True)
    rounds = options.rounds or suite.rounds
    measured = run.run_suite(suite, cases, keys, rounds, timings, device, results, options.load)
    for i, (case, records, reason) in enumerate(measured):
        numbers = f"G={case.G} M={case.M} N={case.N} K={case.K}, B {operator.layouts[case.layout]}, {case.sizes}"
        print(f"\n[{i + 1}/{len(cases)}] {case.name}: {numbers}  ({run.elapsed(begun)})")
        print(f"  left out: {reason}" if reason is not None else tables.case_text(records), flush=True)
        _write(results, options)


def providers_of(suite: Suite, named: Sequence[str] | None) -> list[str]:
    """Return the keys of a suite's providers: those named on the command line, or its own and the peers."""
    known = OPERATORS[suite.operator].providers
    if named is not None:
        return [key for key in known if key in named]
    peers = [key for key, p in known.items() if p.package is not None and p.by_default and suite.peers]
    return [key for key in known if key in (*suite.providers, *peers)]


def _files(results: run.Results, options: argparse.Namespace) -> list[Path]:
    if not results.suites:
        return []
    files = [*_json_files(results, options), *([options.csv] if options.csv else [])]
    return files + (plots.pictures(results, options.plot) if options.plot else [])


def _write(results: run.Results, options: argparse.Namespace) -> None:
    if not results.suites:  # interrupted before the first case: what files have from before stays
        return
    for file, part in _json_files(results, options).items():
        part.write(file)
    if options.csv:
        run.replace_file(options.csv, tables.csv_text(results))


def _json_files(results: run.Results, options: argparse.Namespace) -> dict[Path, run.Results]:
    """Return the results by file: all in the file that --json names, or without a name one file per suite."""
    if options.json is None:
        return {}
    if options.json != Path():
        return {options.json: results}
    folder = run.folder(results.meta)
    assert folder is not None, "of results without a GPU"
    end = "-load.json" if results.meta.get("load") else ".json"
    return {folder / f"{suite}{end}": results.of(suite) for suite in results.suites}


def _words(options: argparse.Namespace) -> list[str]:
    """Return the words of a command line that parses to `options`."""
    words = []
    what = ("suite", "shapes", "sizes", "layout", "providers", "timing", "rounds", "load")
    for name in (*what, "jobs", "json", "csv", "plot"):
        value = getattr(options, name)
        if value is None or value is False:
            continue
        alone = value is True or (name == "json" and value == Path())
        values = value if isinstance(value, list) else [] if alone else [value]
        words += [f"--{name}", *(",".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in values)]
    return words


def _list() -> None:
    for suite in SUITES.values():
        print(f"suite {suite.name}: {suite.about}; {len(suite.cases())} cases, {suite.rounds} rounds")
        print(f"  providers: {', '.join(providers_of(suite, None))}")
    print("providers:")
    named: dict[str, str] = {}
    for operator in OPERATORS.values():
        for key, provider in operator.providers.items():
            absent = "" if provider.installed else f" ({provider.package} is not installed)"
            named.setdefault(key, f"{provider.label}{absent}")
    for key, text in named.items():
        print(f"  {key}: {text}")


def _refused(reason: str) -> int:
    print(reason, file=sys.stderr)
    return 2


if __name__ == "__main__":
    run_and_exit(main)
