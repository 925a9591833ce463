"""Time the cases of a suite: check the result of each provider, then time those with right results in turns."""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import multiprocessing
import re
import shlex
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from itertools import cycle, groupby, islice, repeat
from pathlib import Path
from typing import Any

import torch

from benchmarks.operators import OPERATORS, Operator
from benchmarks.suites import WARM_CALLS, Case, Suite
from benchmarks.timing import captured, host_microseconds, in_turns
from moe_kernels import requirements
from moe_kernels.runtime import store
from moe_kernels.timing import Call, gpu_is_lost, interleaved

Record = dict[str, Any]
NO_GPU = "none, a CPU"
WARM_ROWS = tuple(1 << i for i in range(8))  # numbers of rows to add to a case, one of each magnitude
_SEEN: dict[tuple[Any, ...], set[int]] = {}  # numbers of rows that this process has called a provider with
FIELDS = (
    *("suite", "case", "G", "M", "N", "K", "sizes", "dtype", "layout", "provider", "timing"),
    *("us", "tflops", "gbps", "host_us", "host_new_rows_us", "host_prepared_us", "peak_mb", "rel_err", "error"),
)
_OF_A_RUN = ("date", "command", "peers")  # metadata in which the runs that add to a file may differ


class GpuLostError(RuntimeError):
    """The GPU does not answer any more, so nothing else can be measured in this process."""


@dataclass
class Results:
    """The results of a run: a record for each case, provider and timing, and the cases that were left out."""

    meta: dict[str, Any]
    records: list[Record] = field(default_factory=list)
    skipped: list[Record] = field(default_factory=list)

    def of(self, suite: str) -> Results:
        """Return the results of one suite."""
        records, skipped = ([r for r in found if r["suite"] == suite] for found in (self.records, self.skipped))
        return Results(self.meta, records, skipped)

    @property
    def suites(self) -> list[str]:
        return list(dict.fromkeys(record["suite"] for record in (*self.records, *self.skipped)))

    def write(self, file: Path) -> None:
        """Write the results as JSON; an existing file is replaced atomically."""
        replace_file(file, json.dumps(vars(self), indent=1) + "\n")

    @classmethod
    def read(cls, file: Path) -> Results:
        return cls(**json.loads(file.read_text(encoding="utf-8")))

    def keep(self, file: Path, field: str) -> None:
        """Add the records of `file` whose `field` differs from all of ours, if GPU, versions and load are the same.

        `meta["kept"]` has the date, the command and the peers of the runs that measured them, by the value of `field`.
        """
        if not file.exists():
            return
        other = Results.read(file)
        if not unlike(other.meta, self.meta):
            ours = {record[field] for record in self.records}
            kept = [record for record in other.records if record[field] not in ours]
            self.records = kept + self.records
            theirs, mine = ({name: meta.get(name) for name in _OF_A_RUN} for meta in (other.meta, self.meta))
            runs = {key: other.meta.get("kept", {}).get(key, theirs) for key in (str(r[field]) for r in kept)}
            if earlier := {key: run for key, run in runs.items() if run != mine}:
                self.meta["kept"] = self.meta.get("kept", {}) | earlier


def unlike(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the names of metadata by which the results of two runs do not belong into one file."""
    names = dict.fromkeys((*one, *other))
    return [n for n in names if n not in (*_OF_A_RUN, "ceilings", "kept") and one.get(n) != other.get(n)]


def replace_file(file: Path, text: str) -> None:
    """Write `text` to `file`, whose folder may be missing. An existing file is replaced atomically, a link followed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    store.write_file(file.resolve(), text.encode())


def command_line(script: str, argv: Sequence[str] | None) -> str:
    """Return the command of a script in this folder; `argv` are its arguments, None for those of this process."""
    return shlex.join(["python", "-m", f"benchmarks.{script}", *(sys.argv[1:] if argv is None else argv)])


def parser_of(script: str, text: str | None, *, tiny: str, file: str, keeps: str) -> argparse.ArgumentParser:
    """Return a parser with --tiny and --json for a script in this folder, whose results in `file` have `keeps`."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{script}", description=text, formatter_class=raw)
    parser.add_argument("--tiny", action="store_true", help=f"{tiny}, also on a CPU")
    written = f"default: benchmarks/results/<gpu>/{file}, on a GPU"
    parser.add_argument("--json", type=partial(to_file, keeps=keeps), help=written)
    return parser


def device_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> torch.device:
    """Return the device that a script measures on: a GPU, without which only --tiny is accepted."""
    if not (options.tiny or torch.cuda.is_available()):
        parser.error("needs a CUDA GPU; --tiny runs without")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def meta(device: torch.device, command: str, load: bool = False) -> dict[str, Any]:
    """Return the GPU, driver, versions, date, command, `load`, and this GPU's peak rates, measured now."""
    distributions = metadata.packages_distributions()
    peers = {
        provider.package: _version_of(provider.package, distributions)
        for operator in OPERATORS.values()
        for provider in operator.providers.values()
        if provider.package is not None and provider.installed
    }
    return {
        "gpu": NO_GPU if device.type == "cpu" else torch.cuda.get_device_name(device),
        "driver": requirements.nvidia_driver(),
        **{package: metadata.version(package) for package in ("torch", "triton", "helion")},
        **({"peers": peers} if peers else {}),
        "date": datetime.date.today().isoformat(),
        "command": command,
        "ceilings": ceilings(device),
        **({"load": True} if load else {}),
    }


def to_file(text: str, keeps: str | None = None) -> Path:
    """Parse the name of a file to write, for argparse. With `keeps`, the records in an old one must have this field."""
    file = Path(text)
    if file.exists() and not file.is_file():
        raise argparse.ArgumentTypeError(f"expected a file, got {_kind(file)} {text!r}")
    _refuse_unwritable(file.parent, text)
    if keeps is not None and file.exists():
        try:
            found = Results.read(file)
            _ = found.meta.items(), [record[keeps] for record in found.records]
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            raise argparse.ArgumentTypeError(f"{text!r} has no results of this command") from None
    return file


def _kind(path: Path) -> str:
    return "the folder" if path.is_dir() else "the device or pipe"


def to_folder(text: str) -> Path:
    """Parse the name of a folder to write to, for argparse."""
    if not text:
        raise argparse.ArgumentTypeError("expected a folder, got an empty name")
    if Path(text).exists() and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"expected a folder, got the file {text!r}")
    _refuse_unwritable(Path(text), text)
    return Path(text)


def _refuse_unwritable(folder: Path, text: str) -> None:
    """Refuse the argument `text` if no file can be made in a folder, or in the nearest one for a folder to be made."""
    try:
        tempfile.TemporaryFile(dir=next(one for one in (folder, *folder.absolute().parents) if one.exists())).close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written ({error.strerror})") from error


def folder(meta: dict[str, Any]) -> Path | None:
    """Return the folder for results of this GPU; None for a CPU, whose results are not kept."""
    name = re.sub(r"[^a-z0-9]+", "-", meta["gpu"].lower()).strip("-")
    return None if meta["gpu"] == NO_GPU else Path(__file__).parent / "results" / name


def file_of(options: argparse.Namespace, meta: dict[str, Any], name: str, adds: bool = False) -> Path | None:
    """Return --json of a script, by default the file `name` for results of this GPU; None on a CPU or with --tiny.

    If the run `adds` its results to those in the file, and they do not belong together, the process exits with 2.
    """
    place = None if options.tiny else folder(meta)
    file: Path | None = options.json or (place and place / name)
    if adds and file is not None and file.exists() and (names := unlike(old := Results.read(file).meta, meta)):
        theirs = ", ".join(f"{name} {old.get(name)}" for name in names)
        print(f"{file} has results of {theirs}: move it, or name another file with --json", file=sys.stderr)
        raise SystemExit(2)
    return file


def _version_of(package: str, distributions: Mapping[str, list[str]]) -> str | None:
    """Return the version of the distribution that a package belongs to, or None."""
    found = distributions.get(package)
    return metadata.version(found[0]) if found else None


def ceilings(device: torch.device) -> dict[str, float]:
    """Return TFLOP/s of a large dense bf16 product and GB/s of a large copy, counting reads and writes."""
    on_cpu = device.type == "cpu"
    size, length = (256, 1 << 20) if on_cpu else (8192, 1 << 30)
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    source = torch.zeros(length, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    calls: dict[str, Call] = {"product": lambda: torch.mm(a, b), "copy": lambda: target.copy_(source)}
    for call in calls.values():
        call()
    us = interleaved(calls, 3 if on_cpu else 21, device)
    return {
        "tflops": round(2 * size**3 / us["product"] / 1e6, 3),
        "gbps": round(2 * length / us["copy"] / 1e3, 1),
    }


def run_suite(
    suite: Suite,
    cases: Sequence[Case],
    keys: Sequence[str],
    rounds: int,
    timings: Sequence[str],
    device: torch.device,
    results: Results,
    load: bool = False,
) -> Iterator[tuple[Case, list[Record], str | None]]:
    """Measure the cases one by one into `results`; yield each with its records, or the reason why it has none.

    Raises:
        GpuLostError: after an error that the process cannot recover from.
    """
    operator = OPERATORS[suite.operator]
    inputs: Any = None
    for _, sharing in groupby(cases, lambda case: case.weights):
        weights = None
        for case in sharing:
            records, reason = [], _too_large(operator.memory(case), device)
            if reason is None:
                try:
                    if weights is None:
                        weights = operator.weights(case, device)
                    inputs = operator.inputs(case, weights, device)
                    records = measure(suite.name, case, operator, keys, inputs, rounds, timings, device, load)
                except Exception as error:
                    reason = error_text(error)
                    if gpu_is_lost(device):
                        results.skipped.append({**_labels(suite.name, case, operator), "reason": reason})
                        raise GpuLostError(reason) from error
                inputs = None
            results.records += records
            if reason is not None:
                results.skipped.append({**_labels(suite.name, case, operator), "reason": reason})
            yield case, records, reason
            torch.compiler.reset()  # otherwise torch.compile would make the next case's sizes dynamic
            if device.type != "cpu":
                torch.cuda.empty_cache()  # including the memory of the graphs


def measure(
    suite: str,
    case: Case,
    operator: Operator,
    keys: Sequence[str],
    inputs: Any,
    rounds: int,
    timings: Sequence[str],
    device: torch.device,
    load: bool = False,
) -> list[Record]:
    """Return the records of one case. A provider that raises or is wrong has an error instead of times."""
    if case.warm and "graph" in timings:
        timings = [*timings, "warm"]
    calls: dict[str, Call] = {}
    errors: dict[tuple[str, str], str] = {}
    relative: dict[str, float] = {}
    host: dict[str, Record] = {}
    peak: dict[str, float | None] = {}
    with torch.no_grad():
        for key in keys:
            provider = operator.providers[key]
            try:
                call = provider.make(inputs)
                made = call()
                if provider.same_result:
                    relative[key] = operator.check(provider.result(inputs, made), inputs)
                del made
                call()
                if "eager" in timings:
                    host[key] = _host_times(operator, key, case, inputs, call, device, 3 * rounds)
                    if operator.trains:
                        peak[key] = _peak_megabytes(call, device)
                calls[key] = call
            except Exception as error:
                errors |= {(key, timing): error_text(error) for timing in timings}
                if gpu_is_lost(device):
                    raise GpuLostError(f"{provider.label}: {error_text(error)}") from error
        us: dict[tuple[str, str], float] = {}
        for timing in timings:
            timed, times = calls, 1
            if timing != "eager":
                timed, times = {}, WARM_CALLS if timing == "warm" else 1
                for key, call in calls.items():
                    provider = operator.providers[key]
                    try:
                        if provider.graphs:
                            replay, made = captured(call, times)
                            if provider.same_result:
                                operator.check(provider.result(inputs, made), inputs)
                            del made
                            timed[key] = replay
                    except Exception as error:
                        errors[key, timing] = error_text(error)
            medians = in_turns(timed, rounds, device, cold=timing != "warm", load=load)
            us |= {(key, timing): value / times for key, value in medians.items()}
            del timed
    flops, bytes_ = operator.work(inputs)
    records = []
    for timing in timings:
        for key in keys:
            spent, moved = us.get((key, timing)), operator.providers[key].moved
            values = {
                **_labels(suite, case, operator),
                "provider": operator.providers[key].label,
                "timing": timing,
                "us": None if spent is None else round(spent, 2),
                "tflops": None if spent is None else round(flops / spent / 1e6, 3),
                "gbps": None if spent is None else round((moved(inputs) if moved else bytes_) / spent / 1e3, 3),
                "rel_err": None if spent is None else relative.get(key),
                "error": errors.get((key, timing)),
            }
            if spent is not None and timing == "eager":
                values |= {**host[key], "peak_mb": peak.get(key)}
            records.append({name: values.get(name) for name in FIELDS})
    return records


def compile_beforehand(
    operator: str, cases: Sequence[Case], keys: Sequence[str], jobs: int, device: torch.device
) -> None:
    """Call our providers and peers for all cases in `jobs` processes, to fill the caches of binaries on disk.

    Calls that fail here, for lack of memory for example, are compiled when they are measured.
    """
    groups = [list(sharing) for _, sharing in groupby(cases, lambda case: case.weights)]
    providers = OPERATORS[operator].providers
    compiled = [key for key in keys if providers[key].ours or providers[key].package is not None]
    in_processes(jobs, _compile, [(operator, group, compiled, device) for group in groups])


def in_processes(jobs: int, function: Callable[..., None], calls: Sequence[tuple[Any, ...]]) -> None:
    """Call `function` with each of these arguments, in `jobs` new processes. Errors are ignored."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for done in [pool.submit(function, *arguments) for arguments in calls]:
            done.exception()


def _compile(name: str, cases: Sequence[Case], keys: Sequence[str], device: torch.device) -> None:
    """Call the providers `keys` for `cases`, which share weights."""
    warnings.simplefilter("ignore")
    operator = OPERATORS[name]
    weights = operator.weights(cases[0], device)
    with torch.no_grad():
        for case in cases:
            inputs = operator.inputs(case, weights, device)
            for key in keys:
                with suppress(Exception):
                    operator.providers[key].make(inputs)()
    if device.type != "cpu":
        del weights, inputs
        torch.cuda.empty_cache()


def _host_times(
    operator: Operator, key: str, case: Case, inputs: Any, call: Call, device: torch.device, repeats: int
) -> Record:
    """Return host microseconds of calls with seen and with new numbers of rows, and repeated in inference mode."""
    provider = operator.providers[key]

    def calls(more: Iterable[int]) -> Iterator[Call]:
        return (provider.make(operator.longer(inputs, rows)) for rows in more)

    found = {}
    if provider.any_rows:
        for warm in calls(WARM_ROWS):
            warm()
        had, seen = case.M // case.top_k, _SEEN.setdefault((key, *case.weights), set())
        new = [n for n in range(1, WARM_ROWS[-1]) if n not in WARM_ROWS and had + n not in seen][:repeats]
        seen.update(had + n for n in (0, *WARM_ROWS, *new))
        found["host_us"] = host_microseconds(calls(islice(cycle(WARM_ROWS), repeats)), device)
        if new:
            found["host_new_rows_us"] = host_microseconds(calls(new), device)
    else:
        found["host_us"] = host_microseconds(repeat(call, repeats), device)
    if not operator.trains:
        with torch.inference_mode():
            call()
            found["host_prepared_us"] = host_microseconds(repeat(call, repeats), device)
    return {name: round(us, 1) for name, us in found.items()}


def _peak_megabytes(call: Call, device: torch.device) -> float | None:
    """Return the peak MB (10^6 bytes) that a call allocates on a GPU, above those before it; None on a CPU."""
    if device.type == "cpu":
        return None
    peaks = []
    for _ in range(2):  # memory of earlier work that is freed during a call lowers its peak; hardly twice
        torch.cuda.synchronize(device)
        gc.collect()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
    return round(max(peaks) / 1e6, 1)


def _labels(suite: str, case: Case, operator: Operator) -> Record:
    numbers = {name: getattr(case, name) for name in ("G", "M", "N", "K", "sizes", "dtype")}
    return {"suite": suite, "case": case.name, **numbers, "layout": operator.layouts[case.layout]}


def _too_large(needed: int, device: torch.device) -> str | None:
    if device.type == "cpu":
        return None
    there = torch.cuda.get_device_properties(device).total_memory
    # The remaining memory is for the providers' results and the float64 tensors of the check.
    return f"needs {needed / 1e9:.0f} GB of the GPU's {there / 1e9:.0f} GB" if needed > 0.8 * there else None


def error_text(error: BaseException) -> str:
    """Return the type and the first line of an error, for a record."""
    first = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {first}"[:300].removesuffix(": ")


def elapsed(since: float) -> str:
    """Return the time since `since`, a `time.monotonic()`, such as "2 min 5 s"."""
    minutes, seconds = divmod(round(time.monotonic() - since), 60)
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
