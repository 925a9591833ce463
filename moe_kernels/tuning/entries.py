"""Tuned configs as data: one JSON file per GPU model, found again by the nearest problem.

Files are looked for in the folder that MOE_KERNELS_CONFIG_DIR names, in the user's cache folder, and beside this
module: `<gpu>.json`, e.g. nvidia-h200.json, before `<compute capability>.json`, e.g. nvidia-sm90.json.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from moe_kernels.runtime.targets import Gpu

SCHEMA = 1
LIMIT = 1.0  # farther than a factor of two in one of rows, N, K and G, the rule is the better guess
TUNE = "python -m moe_kernels tune"
BUNDLED = Path(__file__).parent


def family(gpu: Gpu) -> str:
    """The name under which files for all GPUs of this compute capability go."""
    return f"NVIDIA sm{gpu.capability[0]}{gpu.capability[1]}"


@dataclass(frozen=True)
class Bucket:
    """The problems that share a tuned config."""

    dtype: str  # of `dtype_label`: "bfloat16", "tf32" for float32 multiplied in tf32, "bfloat16 to float32" and so on
    transposed: bool  # B lies in memory as [G, N, K]
    rows: int  # mean rows per group, rounded down to a power of two; 0 if less than 1
    N: int
    K: int
    G: int
    op: str = "grouped_gemm"  # or "uniform" or "varied": rows are those of each group or problem then

    def distance(self, other: Bucket) -> float:
        """How many factors of two lie between the two, over rows, N, K and G; inf for another op, dtype or layout."""
        if (self.op, self.dtype, self.transposed) != (other.op, other.dtype, other.transposed):
            return math.inf
        pairs = zip((self.rows, self.N, self.K, self.G), (other.rows, other.N, other.K, other.G), strict=True)
        return sum(abs(math.log2(max(a, 0.5)) - math.log2(max(b, 0.5))) for a, b in pairs)


@dataclass(frozen=True)
class Versions:
    """The versions for which a config was tuned."""

    torch: str
    triton: str
    helion: str

    @property
    def minor(self) -> tuple[str, str]:
        """The minor versions, which have to be equal for an entry to be used."""
        triton, helion = (".".join(version.split(".")[:2]) for version in (self.triton, self.helion))
        return triton, helion


@dataclass(frozen=True)
class Entry:
    """One tuned config, and how it was found."""

    kernel: str  # "basic", "persistent" or "tails", "folded", "batched" or "bmm", "varied"
    bucket: Bucket
    block_m: int
    tma: list[str]  # which of "A", "B" and "out" TMA read or wrote; the config is for problems where it does the same
    config: dict[str, Any]  # of the `helion.Config`
    us: float  # a call's microseconds, the geometric mean over the routings
    rule_us: float  # those of the rule's config, in turns with it
    M: int  # rows in all when it was measured
    versions: Versions
    date: str
    command: str

    @property
    def key(self) -> tuple[Any, ...]:
        """The key of an entry in a file."""
        b = self.bucket
        return b.op, b.dtype, b.transposed, b.N, b.K, b.G, b.rows, self.versions.minor


@dataclass(frozen=True)
class Found:
    """An entry near a problem."""

    entry: Entry
    file: Path
    distance: float


def installed_versions() -> Versions:
    """Those of the packages that are installed."""
    return Versions(*(metadata.version(package) for package in ("torch", "triton", "helion")))


def dtype_label(dtype: torch.dtype, tf32: bool, out_dtype: torch.dtype | None = None) -> str:
    """The `Bucket.dtype` of a product of `dtype`, and of its result's if that is another."""
    name = "tf32" if tf32 else str(dtype).removeprefix("torch.")
    return name if out_dtype in (None, dtype) else f"{name} to {str(out_dtype).removeprefix('torch.')}"


def cache_folder() -> Path:
    """Where `tune` writes unless told otherwise."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "moe_kernels" / "configs"


def file_in(folder: Path, gpu: str) -> Path:
    """The file for a GPU model or a compute capability."""
    return folder / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json")


def files_for(gpu: Gpu) -> list[tuple[Path, str]]:
    """The files that may hold entries for `gpu`, the preferred first, and the GPU that each has to name."""
    named = os.environ.get("MOE_KERNELS_CONFIG_DIR")
    folders = [Path(named)] if named else []
    with suppress(RuntimeError):  # a user without a home
        folders.append(cache_folder())
    folders.append(BUNDLED)
    return [(file_in(folder, name), name) for folder in folders for name in (gpu.name, family(gpu))]


class Skipped(ValueError):
    """A file cannot be used; the message has the reason."""


def read(file: Path, gpu: str) -> list[Entry]:
    """The entries of `file`, of all versions; [] if there is no such file. Raises Skipped."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise Skipped(f"cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise Skipped(f"is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise Skipped("is not a JSON object")
    if content.get("schema") != SCHEMA:
        raise Skipped(f"has schema {content.get('schema')!r}, expected {SCHEMA}")
    if content.get("gpu") != gpu:
        raise Skipped(f"is for {content.get('gpu')!r}, expected {gpu!r}")
    try:
        return [_from_json(value) for value in content["entries"]]
    except (KeyError, TypeError, ValueError) as error:
        raise Skipped(f"has an entry that is not understood ({type(error).__name__}: {error})") from error


def write(file: Path, gpu: str, entries: Sequence[Entry]) -> None:
    """Add `entries` to `file`, in place of those for the same bucket and versions, and keep the others.

    Readers see the old file or the new one, and two writers wait for each other. What cannot be read is put aside.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file.with_name(f".{file.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            merged = {entry.key: entry for entry in read(file, gpu)}
        except Skipped as error:
            aside = file.with_name(f"{file.name}.bad")
            _warn(f"{file} {error}: it is now {aside.name}")
            os.replace(file, aside)
            merged = {}
        merged |= {entry.key: entry for entry in entries}
        made = {"schema": SCHEMA, "gpu": gpu, "entries": [_to_json(merged[key]) for key in sorted(merged)]}
        text = json.dumps(made, indent=2)
        # Lists of numbers and words on one line each.
        text = re.sub(r"\[\n[^\[\]{}]*\n\s*\]", _on_one_line, text)
        temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, file)


_loaded: dict[str, list[tuple[Path, Entry]]] = {}
_digests: dict[str, str] = {}
_warned: set[str] = set()


def load(gpu: Gpu) -> list[tuple[Path, Entry]]:
    """All usable entries for `gpu`, the preferred first; read once per process."""
    if gpu.name not in _loaded:
        _loaded[gpu.name] = [(file, entry) for file, name in files_for(gpu) for entry in _usable(file, name)]
        if not _loaded[gpu.name] and not _warned:
            _warned.add(gpu.name)
            _warn(f"no config has been tuned for {gpu.name}: a rule derived on an H200 is used. To tune: {TUNE} --help")
    return _loaded[gpu.name]


def digest(gpu: Gpu) -> str:
    """Of all files that may hold entries for `gpu`, as they were when they were first needed."""
    if gpu.name not in _digests:
        found = hashlib.sha256()
        for file, _ in files_for(gpu):
            try:
                found.update(file.read_bytes())
            except OSError:
                found.update(b"none")
        _digests[gpu.name] = found.hexdigest()
    return _digests[gpu.name]


def near(gpu: Gpu, bucket: Bucket) -> list[Found]:
    """The entries within LIMIT of `bucket`: the nearest first, and of equally near ones the preferred file's."""
    found = [Found(entry, file, bucket.distance(entry.bucket)) for file, entry in load(gpu)]
    return sorted((f for f in found if f.distance <= LIMIT), key=lambda f: f.distance)


def reload() -> None:
    """Forget what has been read and warned of."""
    _loaded.clear()
    _digests.clear()
    _warned.clear()


def warn_once(file: Path | str, text: str) -> None:
    """Warn of `file`, unless that has been done before."""
    if str(file) not in _warned:
        _warned.add(str(file))
        _warn(f"{file} {text}")


def _usable(file: Path, gpu: str) -> Iterable[Entry]:
    try:
        entries = read(file, gpu)
    except Skipped as error:
        warn_once(file, f"{error}: skipped. To make a new one: {TUNE}")
        return []
    here = installed_versions().minor
    usable = [entry for entry in entries if entry.versions.minor == here]
    tuned = {entry.bucket for entry in usable}
    if old := [entry for entry in entries if entry.bucket not in tuned]:
        found = ", ".join(sorted({"triton {}, helion {}".format(*entry.versions.minor) for entry in old}))
        needed = "triton {}, helion {}".format(*here)
        warn_once(file, f"has {len(old)} entries for {found}, but {needed} is here: skipped. To tune again: {TUNE}")
    return usable


def _warn(text: str) -> None:
    warnings.warn(f"moe_kernels: {text}", RuntimeWarning, stacklevel=2)


def _on_one_line(match: re.Match[str]) -> str:
    return "[" + " ".join(match[0][1:-1].split()) + "]"


def _to_json(entry: Entry) -> dict[str, Any]:
    """`entry` as one flat object, what people look for first in front."""
    fields = asdict(entry)
    bucket, versions = fields.pop("bucket"), fields.pop("versions")
    return {"kernel": fields.pop("kernel"), **bucket, **fields, **versions}


_KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("kernel", "op", "dtype", "torch", "triton", "helion", "date", "command"), str),
    "transposed": bool,
    **dict.fromkeys(("rows", "N", "K", "G", "block_m", "M"), int),
    **dict.fromkeys(("us", "rule_us"), (int, float)),
    "tma": list,
    "config": dict,
}


def _from_json(value: dict[str, Any]) -> Entry:
    value = {"op": "grouped_gemm", **value}
    for name, kind in _KINDS.items():
        if not isinstance(value[name], kind):
            raise TypeError(f"{name} is {value[name]!r}")
    fields = {name: value[name] for name in _KINDS}
    bucket = Bucket(**{name: fields.pop(name) for name in ("dtype", "transposed", "rows", "N", "K", "G", "op")})
    versions = Versions(**{name: fields.pop(name) for name in ("torch", "triton", "helion")})
    return Entry(bucket=bucket, versions=versions, **fields)
