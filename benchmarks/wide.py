"""Untuned `grouped_gemm` against other libraries: the GEMMs of every model, 64 to 65536 rows, five routings.

    python -m benchmarks.wide FILE [--jobs N] [--budget SECONDS] [--models NAME ...] [--rows M ...] [--load]
        [--json FILE]

Tuned entries are not used. First each result is compared with a loop of `torch.mm`, row by row; wrong ones are not
timed. Then the providers take turns with a cold L2 cache, as CUDA-graph replays; a case in which `grouped_gemm` has a
speedup below 0.95 over the fastest other library, or below 0.99 over PyTorch, is timed again with more rounds.

FILE gets a line of JSON for each case as soon as it is measured. Cases that FILE has with all providers are skipped, so
the same command completes a run that was interrupted or ran out of budget. A case measured with fewer providers is
measured again, and its last line counts. The results are written to --json at the end; a run that is interrupted
leaves a file that has more cases.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import inputs as given
from benchmarks import run, tables
from benchmarks.operators import OPERATORS
from benchmarks.suites import Case
from benchmarks.timing import in_turns, prepared
from moe_kernels.commands import run_and_exit
from moe_kernels.models import MODELS, gemms, positive
from moe_kernels.packing import group_offsets_from_sizes
from moe_kernels.runtime.attributes import replaced
from moe_kernels.testing import SizeKind, byte_count, flop_count, group_sizes_for
from moe_kernels.timing import Call, gpu_is_lost
from moe_kernels.tuning import entries
from tritonbench_ops import baselines

ROWS = (64, 1024, 4096, 16384, 65536)
ROUTINGS: tuple[SizeKind, ...] = ("uniform", "softmax", "zipf", "nine-tenths", "half-empty")
PROVIDERS = ("torch", "ours", "triton_kernels", "quack")
ROUNDS, MORE_ROUNDS = 5, 20
LARGEST_ERROR = 2e-2  # of a row, relative to the row's norm
_TINY = [Case("tiny up", 4, M, 48, 32, sizes, "gnk") for M in (8, 40) for sizes in ROUTINGS]
_FIELDS = {"G", "M", "N", "K", "sizes", "case", "rounds", "us", "errors"}
_PROVIDERS = OPERATORS["grouped_gemm"].providers


def cases_of(models: Iterable[str], rows: Iterable[int]) -> list[Case]:
    """Return all cases, ordered by number of rows, so that the first ones cover every model."""
    shapes: dict[tuple[int, int, int], str] = {}
    for name in models:
        H, width, G, _ = MODELS[name]
        for gemm, (N, K) in gemms(H, width).items():
            shapes.setdefault((G, N, K), f"{name} {gemm}")
    return [
        Case(name, G, M, N, K, sizes, "gnk") for M in rows for (G, N, K), name in shapes.items() for sizes in ROUTINGS
    ]


def key_of(case: Case | run.Record) -> tuple[Any, ...]:
    """Return the key that identifies a case."""
    values = case if isinstance(case, dict) else vars(case)
    return tuple(values[name] for name in ("G", "M", "N", "K", "sizes"))


def gpu_seconds(cases: Sequence[Case], providers: int) -> float:
    """Estimate the time of ROUNDS + 3 calls per provider, at 650 TFLOP/s or 4.2 TB/s, plus 60 us to flush the L2."""
    seconds = 0.0
    for case in cases:
        sizes, dtype = group_sizes_for(case.sizes, case.G, case.M), torch.bfloat16
        flops, bytes_ = flop_count(sizes, case.N, case.K), byte_count(sizes, case.N, case.K, dtype, dtype, True)
        seconds += max(flops / 650e12, bytes_ / 4.2e12) + 60e-6
    return seconds * providers * (ROUNDS + 3)


def read_lines(file: Path) -> tuple[list[run.Record], list[run.Record]]:
    """Return the metadata of runs and the records of cases; incomplete lines of an interrupted run are dropped.

    Raises:
        ValueError: another command wrote the file.
    """
    metas: list[run.Record] = []
    records: list[run.Record] = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []:
        with suppress(json.JSONDecodeError):
            value = json.loads(line)
            if isinstance(value, dict) and value.keys() >= _FIELDS and isinstance(value["us"], dict):
                records.append(value)
            elif isinstance(value, dict) and value.keys() == {"meta"} and isinstance(value["meta"], dict):
                metas.append(value["meta"])
            else:
                raise ValueError(f"no case and no metadata: {line[:40]!r}")
    if not metas and file.exists() and file.stat().st_size:
        raise ValueError("no metadata")
    return metas, records


def differences(old: run.Record, new: run.Record) -> list[str]:
    """Return by what a run and a new one do not belong into one file, with the old values; peers may be added."""
    before, now = (one.get("peers") or {} for one in (old, new))
    changed = [name for name in before if None not in (before[name], now.get(name)) and before[name] != now[name]]
    return [f"{name} {old.get(name)}" for name in run.unlike(old, new)] + [f"{name} {before[name]}" for name in changed]


@contextmanager
def untuned() -> Iterator[None]:
    """Ignore tuned entries in this context, and the warning that there are none."""
    with replaced(entries, files_for=lambda *_: []), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "moe_kernels: no config has been tuned", RuntimeWarning)
        entries.reload()
        yield
    entries.reload()


def largest_error(
    out: Tensor,  # [M, N]
    expected: Tensor,  # [M, N]
) -> float:
    """Return the largest `||out - expected|| / ||expected||` of a row; inf for NaN or a wrong shape."""
    if out.shape != expected.shape:
        return float("inf")
    worst = torch.zeros((), device=out.device)
    for o, e in zip(torch.split(out, 4096), torch.split(expected, 4096), strict=True):
        difference, norm = (o.float() - e).norm(dim=1), e.float().norm(dim=1)
        worst = worst.maximum((difference / norm).nan_to_num(nan=float("inf")).amax())
    return worst.item()


def behind(us: dict[str, float]) -> bool:
    """Whether MORE_ROUNDS follow."""
    ours, torchs = (us.get(_PROVIDERS[key].label, math.inf) for key in ("ours", "torch"))
    return ours < math.inf and (min(us.values()) < tables.BEHIND * ours or torchs < tables.BEHIND_TORCH * ours)


@torch.no_grad()
def measure(case: Case, B: Tensor, keys: Sequence[str], device: torch.device, load: bool = False) -> run.Record:
    """Return the record of a case: microseconds of each provider, or its error.

    Raises:
        run.GpuLostError: after an error that the process cannot recover from.
    """
    inputs = given.packed(case, B, device)
    expected = baselines.loop(inputs)()
    calls: dict[str, Call] = {}
    errors: dict[str, str] = {}
    for provider in map(_PROVIDERS.__getitem__, keys):
        try:
            call, out = prepared(provider.make(inputs), device)
            error = largest_error(provider.result(inputs, out), expected)
            if not error < LARGEST_ERROR:
                raise AssertionError(f"wrong: relative error {error:.1e} of a row")
            calls[provider.label] = call
            del out
        except Exception as error:
            errors[provider.label] = run.error_text(error)
            if gpu_is_lost(device):
                raise run.GpuLostError(f"{provider.label}: {error}") from error
    rounds = ROUNDS
    us = in_turns(calls, rounds, device, load=load)
    if behind(us):
        rounds = MORE_ROUNDS
        us = in_turns(calls, rounds, device, load=load)
    numbers = {name: getattr(case, name) for name in ("G", "M", "N", "K", "sizes")}
    times = {label: round(value, 2) for label, value in us.items()}
    return {"suite": "wide", "case": case.name, **numbers, "rounds": rounds, "us": times, "errors": errors}


def compile_beforehand(cases: Sequence[Case], keys: Sequence[str], jobs: int, device: torch.device) -> None:
    """Call all providers in `jobs` processes, to fill the caches of binaries on disk.

    No choice depends on the routing, so one routing is enough. A process takes all cases with the same weights; as many
    run at once as fit into the GPU's memory. Calls that fail here are compiled when they are measured.
    """
    first = {key_of(case)[:4]: case for case in reversed(cases)}
    groups: dict[tuple[Any, ...], list[Case]] = {}
    for case in first.values():
        groups.setdefault(case.weights, []).append(case)
    needed = {
        key: max(given.memory(case, True) + 4 * case.M * case.N for case in group) + (2 << 30)
        for key, group in groups.items()
    }
    there = 0.9 * torch.cuda.mem_get_info(device)[0]
    waiting = sorted(groups, key=needed.__getitem__, reverse=True)
    running: dict[Future[None], int] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool, suppress(BrokenProcessPool):
        while waiting or running:
            for key in list(waiting):
                if not running or (len(running) < jobs and sum(running.values()) + needed[key] <= there):
                    running[pool.submit(_compile, groups[key], keys, device)] = needed[key]
                    waiting.remove(key)
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                done.exception()
                del running[done]


@torch.no_grad()
def _compile(cases: Sequence[Case], keys: Sequence[str], device: torch.device) -> None:
    """Call the providers `keys` for `cases`, which share weights, on uninitialised tensors."""
    dtype, one = torch.bfloat16, cases[0]
    B = torch.empty(one.G, one.N, one.K, dtype=dtype, device=device).mT
    with untuned():
        for case in cases:
            sizes = group_sizes_for(case.sizes, case.G, case.M)
            offsets = group_offsets_from_sizes(torch.tensor(sizes, dtype=torch.int32, device=device))
            inputs = baselines.Inputs(torch.empty(case.M, case.K, dtype=dtype, device=device), B, offsets, sizes)
            for key in keys:
                with suppress(Exception):
                    _PROVIDERS[key].make(inputs)()
    torch.cuda.synchronize(device)
    del B, inputs
    torch.cuda.empty_cache()


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.wide", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=run.to_file, metavar="FILE")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    parser.add_argument("--rows", nargs="+", type=positive, default=ROWS, metavar="M", help="in this order")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=PROVIDERS, metavar="NAME")
    parser.add_argument("--load", action="store_true", help="with dense products in turns: sustained clocks")
    parser.add_argument("--jobs", type=positive, help="first compile all kernels in so many processes")
    parser.add_argument("--compile-only", action="store_true", help="do no more than that")
    parser.add_argument("--budget", type=positive, metavar="SECONDS", help="stop after these, compilation included")
    parser.add_argument("--tiny", action="store_true", help="a few small cases, also on a CPU")
    parser.add_argument(
        "--json", type=run.to_file, metavar="FILE", help="default: benchmarks/results/<gpu>/wide[-load].json, on a GPU"
    )
    options = parser.parse_args(argv)
    if options.compile_only and not options.jobs:
        parser.error("--compile-only compiles in the processes of --jobs: give their number")
    if options.json is not None and options.json.resolve() == options.file.resolve():
        parser.error("--json would replace FILE, which has the cases that are done: name another file")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code, which is 1 if `grouped_gemm` failed in a case."""
    begun = time.monotonic()
    options = arguments(argv)
    if not (options.tiny or torch.cuda.is_available()):
        print("needs a CUDA GPU; --tiny runs without", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    meta = run.meta(device, run.command_line("wide", argv), options.load)
    try:
        metas, records = read_lines(options.file)
    except ValueError:
        print(f"{options.file} was not written by this command: name another file", file=sys.stderr)
        return 2
    if found := [one for old in metas for one in differences(old, meta)]:
        print(f"{options.file} is of {', '.join(dict.fromkeys(found))}: name another file", file=sys.stderr)
        return 2
    keys = [key for key in options.providers if _PROVIDERS[key].installed]
    if not keys:
        print(f"not installed: {', '.join(options.providers)}", file=sys.stderr)
        return 2
    for key in options.providers:
        if key not in keys:
            print(f"{_PROVIDERS[key].label}: left out, {_PROVIDERS[key].package} is not installed")
    by_case = {key_of(record): record for record in records}
    labels = {_PROVIDERS[key].label for key in keys}
    done = {key for key, record in by_case.items() if labels <= record["us"].keys() | record["errors"].keys()}
    wanted = _TINY if options.tiny else cases_of(options.models, options.rows)
    cases = [case for case in wanted if key_of(case) not in done]
    print(f"{len(cases)} cases, {len(wanted) - len(cases)} done before; ", end="")
    print(f"about {gpu_seconds(cases, len(keys)):.0f} s of the GPU's time", flush=True)
    if options.jobs and device.type != "cpu":
        torch.cuda.empty_cache()
        compile_beforehand(cases, keys, options.jobs, device)
        print(f"compiled with {options.jobs} processes: {run.elapsed(begun)}", flush=True)
    if options.compile_only:
        return 0
    metas += [meta] if cases else []
    values = [*({"meta": one} for one in metas), *by_case.values()]
    run.replace_file(options.file, "".join(json.dumps(value) + "\n" for value in values))
    code = 0
    try:
        with untuned():
            _run(cases, keys, device, options, by_case, begun)
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        code = 130
    except run.GpuLostError as error:
        print(f"\nThe GPU does not answer any more, so the rest is left out: {error}", file=sys.stderr)
        code = 1
    first, last = metas[0]["date"], metas[-1]["date"]
    date = last if first == last else f"{first} to {last}"
    results = run.Results({**metas[-1], "date": date, "runs": len(metas)}, list(by_case.values()))
    target = run.file_of(options, meta, "wide-load.json" if options.load else "wide.json")
    if target is not None and not (code and _has_more(target, results)):
        results.write(target)
    print(f"\n{tables.markdown(results)}\n{run.elapsed(begun)} in all.")
    return code or int(any(_PROVIDERS["ours"].label in record["errors"] for record in results.records))


def _has_more(file: Path, results: run.Results) -> bool:
    try:
        return len(run.Results.read(file).records) > len(results.records)
    except (OSError, ValueError, TypeError):  # not there, or no results
        return False


def _run(
    cases: Sequence[Case],
    keys: Sequence[str],
    device: torch.device,
    options: argparse.Namespace,
    by_case: dict[tuple[Any, ...], run.Record],
    begun: float,
) -> None:
    """Measure `cases` into `by_case` and `options.file` until the budget is spent."""
    left = len(cases)
    for (M, *_), sharing in groupby(cases, lambda case: (case.M, *case.weights)):
        B, found = None, list[run.Record]()
        for case in sharing:
            if options.budget and time.monotonic() - begun > options.budget:
                print(f"the budget is spent; {left} cases are left")
                return
            B = given.weights(case, device, per_group=True) if B is None else B
            record = measure(case, B, keys, device, options.load)
            by_case[key_of(case)] = record
            found.append(record)
            with options.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            left -= 1
            for label, error in record["errors"].items():
                print(f"  {case.name}, M = {M}, {case.sizes}: {label}: {error}")
        print(f"[{run.elapsed(begun)}] {case.name}, M = {M}: {_ratios(found)}", flush=True)


def _ratios(records: Sequence[run.Record]) -> str:
    """Return our speedup over the best other provider for each routing, as text."""
    found = {record["sizes"]: tables.over_best(record) for record in records}
    return ", ".join(f"{sizes} {'-' if ratio is None else f'{ratio:.2f}'}" for sizes, ratio in found.items())


if __name__ == "__main__":
    run_and_exit(main)
