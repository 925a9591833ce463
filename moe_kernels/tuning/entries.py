"""Tuned configs as data: one JSON file per GPU model, with a lookup by the nearest problem.

Files are searched in the folder that MOE_KERNELS_CONFIG_DIR names, then in the user's cache folder, then beside this
module: `<gpu>.json`, e.g. nvidia-h200.json, before `<compute capability>.json`, e.g. nvidia-sm90.json.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import itertools
import json
import math
import os
import re
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from moe_kernels import requirements
from moe_kernels.runtime import store
from moe_kernels.runtime.targets import Gpu

SCHEMA = 1
LIMIT = 1.0  # beyond a factor of two in total over rows, N, K and G, the rule is the better guess
TUNE = "python -m moe_kernels tune"
BUNDLED = Path(__file__).parent


def family(gpu: Gpu) -> str:
    """Return the name for files that serve all GPUs of this compute capability."""
    return f"NVIDIA sm{gpu.capability[0]}{gpu.capability[1]}"


@dataclass(frozen=True)
class Bucket:
    """The problems that share a tuned config."""

    dtype: str  # from `dtype_label`: "bfloat16", "tf32" for float32 multiplied in tf32, "bfloat16 to float32", ...
    transposed: bool  # the memory layout of B is [G, N, K]
    rows: int  # mean rows per group, rounded down to a power of two; 0 if less than 1
    N: int
    K: int
    G: int
    op: str = "grouped_gemm"  # or "uniform" or "varied", for which `rows` is that of each group or problem

    def distance(self, other: Bucket) -> float:
        """Return the sum of |log2(ratio)| over rows, N, K and G; inf for another op, dtype or layout."""
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
        """The minor versions of triton and helion; an entry is used only if both match."""
        triton, helion = (".".join(version.split(".")[:2]) for version in (self.triton, self.helion))
        return triton, helion


@dataclass(frozen=True)
class Entry:
    """One tuned config, and how it was found."""

    kernel: str  # "basic", "persistent", "tails", "tall"; uniform: "folded", "batched", "bmm"; varied: "varied"
    bucket: Bucket
    block_m: int
    tma: list[str]  # which of "A", "B", "out" used TMA; the entry is only for problems with the same ones
    config: dict[str, Any]  # arguments of the `helion.Config`
    us: float  # microseconds per call, the geometric mean over the routings
    rule_us: float  # the same for the rule's config, timed in turns with it
    M: int  # total rows in the measurement
    versions: Versions
    date: str
    command: str

    @property
    def key(self) -> tuple[Any, ...]:
        """The key of the entry, unique within a file."""
        b = self.bucket
        return b.op, b.dtype, b.transposed, b.N, b.K, b.G, b.rows, self.versions.minor


def installed_versions() -> Versions:
    """Return the versions of the installed packages."""
    torch_version, triton, helion = map(requirements.installed, ("torch", "triton", "helion"))
    return Versions(torch_version or "", triton or "", helion or requirements.HELION)


def dtype_label(dtype: torch.dtype, tf32: bool, out_dtype: torch.dtype | None = None) -> str:
    """Return the `Bucket.dtype` of a product in `dtype`, with the dtype of its result if it differs."""
    name = "tf32" if tf32 else str(dtype).removeprefix("torch.")
    return name if out_dtype in (None, dtype) else f"{name} to {str(out_dtype).removeprefix('torch.')}"


def folders() -> list[Path]:
    """Return the folders that users' entries are read from, preferred first. `tune` writes to the first by default."""
    named = os.environ.get("MOE_KERNELS_CONFIG_DIR")
    found = [Path(os.path.expanduser(named))] if named else []
    with suppress(RuntimeError):  # the user has no home directory
        found.append(store.user_folder() / "configs")
    return list(dict.fromkeys(found))


def file_in(folder: Path, gpu: str) -> Path:
    """Return the file for a GPU model or a compute capability."""
    return folder / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json")


def files_for(gpu: Gpu) -> list[tuple[Path, str]]:
    """Return the files that may hold entries for `gpu`, preferred first, each with the GPU name it must contain."""
    return [(file_in(folder, name), name) for folder in (*folders(), BUNDLED) for name in (gpu.name, family(gpu))]


class Skipped(ValueError):
    """A file cannot be used; the message has the reason."""


def read(file: Path, gpu: str) -> list[Entry]:
    """Return the entries of `file` for all versions, or [] if it does not exist; raise Skipped if it is invalid."""
    try:
        return _read(file, gpu)
    except OSError as error:
        raise Skipped(f"cannot be read ({error.strerror or error})") from error


def _read(file: Path, gpu: str) -> list[Entry]:
    """As `read`, but raise OSError if the file cannot be read: it may be as good as before."""
    if file.exists() and not file.is_file():
        raise Skipped("is not a regular file")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (ValueError, RecursionError) as error:
        raise Skipped(f"is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise Skipped("is not a JSON object")
    if content.get("schema") != SCHEMA:
        raise Skipped(f"has schema {content.get('schema')!r}, expected {SCHEMA}")
    if content.get("gpu") != gpu:
        raise Skipped(f'has "gpu": {content.get("gpu")!r}, expected {gpu!r}')
    try:
        return [_from_json(value) for value in content["entries"]]
    except (KeyError, TypeError, ValueError) as error:
        raise Skipped(f"has an entry that is not understood ({type(error).__name__}: {error})") from error


def write(file: Path, gpu: str, entries: Sequence[Entry]) -> None:
    """Add `entries` to `file`, replacing those for the same bucket and versions.

    The file is replaced atomically, under a lock. A file that is not understood is renamed to `<file>.bad`, or if there
    is one to `<file>.bad1`, and so on. New folders are not writable by others: plans may be stored beside them, which
    others must not be able to replace.

    Raises:
        OSError: the file cannot be read or written; it is as before.
    """
    store.make_folder(file.parent)
    file.parent.mkdir(exist_ok=True)  # raises if that is a file
    with open(file.with_name(f".{file.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            merged = {entry.key: entry for entry in _read(file, gpu)}
        except Skipped as error:
            names = (file.with_name(f"{file.name}.bad{i or ''}") for i in itertools.count())
            aside = next(name for name in names if not os.path.lexists(name))
            _warn(f"{file} {error}: it is now {aside.name}")
            os.replace(file, aside)
            merged = {}
        merged |= {entry.key: entry for entry in entries}
        made = {"schema": SCHEMA, "gpu": gpu, "entries": [_to_json(merged[key]) for key in sorted(merged)]}
        text = json.dumps(made, indent=2)
        # Write each list of numbers and words on one line.
        text = re.sub(r"\[\n[^\[\]{}]*\n\s*\]", lambda found: f"[{' '.join(found[0][1:-1].split())}]", text)
        store.write_file(file, f"{text}\n".encode())


_warned: set[str] = set()  # files, and the names of GPUs whose files have a warning or need none


@functools.cache
def load(gpu: Gpu) -> list[tuple[Path, Entry]]:
    """Return all usable entries for `gpu`, preferred first; the files are read once per process."""
    return [(file, entry) for file, name in files_for(gpu) for entry in _usable(file, name)]


@functools.cache
def digest(gpu: Gpu) -> str:
    """Return a digest of what `load` returns, apart from the files' names; computed at the first request."""
    text = json.dumps([_to_json(entry) for _, entry in load(gpu)])
    return hashlib.sha256(text.encode()).hexdigest()


def near(gpu: Gpu, bucket: Bucket) -> list[tuple[Path, Entry]]:
    """Return what `load` returns within LIMIT of `bucket`, nearest first; at equal distance, the preferred file's."""
    loaded = load(gpu)
    if not loaded and not _warned & {gpu.name, family(gpu)}:
        _warned.add(gpu.name)
        rule = "a rule derived on an H200 and an H100 is used"
        _warn(f"no config has been tuned for {gpu.name}: {rule}. To tune: {TUNE} --help")
    found = [(distance, pair) for pair in loaded if (distance := bucket.distance(pair[1].bucket)) <= LIMIT]
    return [pair for _, pair in sorted(found, key=lambda each: each[0])]


def reload() -> None:
    """Clear the entries and digests read so far, and the record of warnings."""
    load.cache_clear()
    digest.cache_clear()
    _warned.clear()


def warn_once(file: Path | str, text: str) -> None:
    """Warn about `file`, once."""
    if str(file) not in _warned:
        _warned.add(str(file))
        _warn(f"{file} {text}")


def _usable(file: Path, gpu: str) -> Iterable[Entry]:
    try:
        entries = read(file, gpu)
    except Skipped as error:
        _warned.add(gpu)
        warn_once(file, f"{error}: skipped. To make a new one: {TUNE} --help")
        return []
    here = installed_versions().minor
    usable = [entry for entry in entries if entry.versions.minor == here]
    tuned = {entry.bucket for entry in usable}
    old = [entry for entry in entries if entry.bucket not in tuned]
    if old:
        _warned.add(gpu)
    if old and file.parent != BUNDLED:  # users need not tune again what comes with the package
        found = ", ".join(sorted({"triton {}, helion {}".format(*entry.versions.minor) for entry in old}))
        needed = "triton {}, helion {}".format(*here)
        warn_once(
            file, f"has {len(old)} entries for {found}, but {needed} is here: skipped. To tune again: {TUNE} --help"
        )
    return usable


def _warn(text: str) -> None:
    warnings.warn(f"moe_kernels: {text}", RuntimeWarning, stacklevel=2)


def _to_json(entry: Entry) -> dict[str, Any]:
    """Return `entry` as one flat object, the kernel and bucket first."""
    values = asdict(entry)
    bucket, versions = values.pop("bucket"), values.pop("versions")
    return {"kernel": values.pop("kernel"), **bucket, **values, **versions}


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
    config = value["config"]
    groups = config.get("l2_groupings", [1])
    # With larger numbers of these, compiled code overflows, or no GPU can launch it.
    for number, most in (*((n, 1024) for n in groups), (config.get("num_warps", 1), 32)):
        if type(number) is not int or not 1 <= number <= most:
            raise ValueError(f"config is {config!r}")
    given = {name: value[name] for name in _KINDS}
    bucket = Bucket(**{field.name: given.pop(field.name) for field in fields(Bucket)})
    versions = Versions(**{field.name: given.pop(field.name) for field in fields(Versions)})
    return Entry(bucket=bucket, versions=versions, **given)
