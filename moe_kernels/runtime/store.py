"""Plans and binaries on disk, so that a new process compiles nothing and imports no compiler.

    <folder>/<environment>/plans/<key>       a plan, and the SHA-256 of each binary that it launches
    <folder>/<environment>/binaries/<key>    a kernel's code, types and Triton's metadata
    <folder>/libraries/<ABI>/<key>           one of Triton's launchers, a C extension of one Python ABI, by its source

A file is a line with the checksum of its name and of the rest, a line of JSON, and the code, if it has any.

The folder is MOE_KERNELS_CACHE_DIR, or else moe_kernels/compiled in the user's cache folder. Folders in
MOE_KERNELS_CACHE_READONLY, and `compiled` in the installed package, are read after it and never written. An environment
is a version of this package's kernels and of Triton and Helion, and the environment variables that change what these
compile; plans do not depend on PyTorch's version.

Everything read is checked: only the user and root may have write access to folders and files, symbolic links in them
are not followed, and contents must match their SHA-256 and their file's name. Files that fail are ignored with one
warning, and created again. Nothing is unpickled or evaluated. Files are replaced atomically, and no failure to read or
write stops a call.
"""

from __future__ import annotations

import atexit
import errno
import functools
import grp
import hashlib
import json
import os
import pwd
import re
import shutil
import stat
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from moe_kernels.requirements import HELION, installed
from moe_kernels.runtime.plan import Plan, plan_from_json
from moe_kernels.runtime.targets import Gpu

SCHEMA = 2
_PACKAGE = Path(__file__).parent.parent
_SOURCES = (  # the sources that plans depend on; SCHEMA is the version of the storage format
    "glu.py",
    "kernels",
    "ops",
    "requirements.py",
    "rules",
    "runtime/attributes.py",
    "runtime/compile.py",
    "runtime/plan.py",
    "runtime/signature.py",
    "runtime/symbolic.py",
    "runtime/targets.py",
    "runtime/torch_internals.py",
    "scaled.py",
    "schedule.py",
    "tuning/entries.py",
)
# Environment variables by which Helion and Triton compile other code. The paths of ptxas and libdevice are left out:
# Inductor sets them, so plans would depend on whether a process has used torch.compile.
_COMPILER_SETTINGS = (
    "ALLOW_LHS_TMEM_LAYOUT_CONVERSION",
    "AMDGCN_ANALYZE_SMALL_TENSOR_RANGE",
    "AMDGCN_SCALARIZE_PACKED_FOPS",
    "AMDGCN_USE_BUFFER_ATOMICS",
    "AMDGCN_USE_BUFFER_OPS",
    "DISABLE_LLVM_OPT",
    "DISABLE_MMA_V3",
    "DISABLE_MMA_V5",
    "DISABLE_PTXAS_OPT",
    "HELION_DEBUG_DTYPE_ASSERTS",
    "HELION_FAST_MATH",
    "HELION_TRITON_DO_NOT_SPECIALIZE",
    "LLVM_PASS_PLUGIN_PATH",
    "PTXAS_OPTIONS",
    "TRITON_AMD_CODEGEN_PATH",
    "TRITON_CONSAN_INIT_ALLOCATIONS",
    "TRITON_DEFAULT_FP_FUSION",
    "TRITON_DUMP_MIR",
    "TRITON_ENABLE_ASAN",
    "TRITON_ENABLE_EXPERIMENTAL_CONSAN",
    "TRITON_F32_DEFAULT",
    "TRITON_FORCE_DISABLE_FP_FUSION",
    "TRITON_HIP_USE_ASYNC_COPY",
    "TRITON_HIP_USE_BLOCK_PINGPONG",
    "TRITON_HIP_USE_COEXEC_SCHEDULER",
    "TRITON_HIP_USE_EXPERT_SCHEDULING",
    "TRITON_HIP_USE_IN_THREAD_TRANSPOSE",
    "TRITON_INSTRUMENTATION_MODE",
    "TRITON_KERNEL_OVERRIDE",
    "TRITON_MOCK_PTX_VERSION",
    "TRITON_OVERRIDE_ARCH",
    "TRITON_PLUGIN_PATHS",
    "TRITON_SWAP_MIR",
    "TRITON_SWAP_MIR_ENABLE_MISCHED",
)
_LIMIT_MB = 2048
_EXTENSIONS = ("cubin", "hsaco", "spv")
_SHA256 = re.compile("[0-9a-f]{64}")
_FOLDERS = re.compile("[0-9a-f]{16}(/(plans|binaries))?|libraries(/[^/]+)?")
_ARGUMENT = re.compile(r"\*?\w+|tensordesc<\w+\[[\d, ]+\]>", re.ASCII)  # a type, as Triton writes it
_DAMAGE = (LookupError, RecursionError, TypeError, ValueError)
_T = TypeVar("_T")


@dataclass(frozen=True)
class Binary:
    """A compiled kernel, for one specialization of its arguments."""

    key: str
    signature: tuple[str, ...]  # Triton's types of the arguments
    constants: tuple[int, ...]  # the indices of the arguments that are compiled into it
    metadata: str  # Triton's, as JSON
    extension: str  # of `code`: "cubin", "hsaco", "spv"
    code: bytes

    @functools.cached_property
    def sha256(self) -> str:
        """The SHA-256 of all fields."""
        parts = (self.key, *self.signature, *map(str, self.constants), self.metadata, self.extension)
        return _sha256("\0".join(parts).encode() + b"\0" + self.code)

    @property
    def descriptors(self) -> Any:
        """Triton's description of the arguments that are TMA descriptors."""
        return json.loads(self.metadata).get("tensordesc_meta")


class _Refused(Exception):
    """The file or folder at `path` may not be used; the message has the reason."""

    def __init__(self, text: str, path: Path):
        super().__init__(text)
        self.path = path


def folder() -> Path:
    """The folder of plans and binaries."""
    if named := os.environ.get("MOE_KERNELS_CACHE_DIR"):
        return Path(os.path.expanduser(named))
    try:
        return user_folder() / "compiled"
    except RuntimeError:
        try:
            temporary = tempfile.gettempdir()
        except OSError:  # no folder can be written to, but those that are only read may have what is needed
            temporary = "/tmp"
        return Path(temporary) / f"moe_kernels-{os.getuid()}"


def user_folder() -> Path:
    """This package's folder in the user's cache folder. Raises RuntimeError if the user has no home folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "moe_kernels"


def read_only_folders() -> list[Path]:
    """Further folders of plans and binaries, which are only read: those that MOE_KERNELS_CACHE_READONLY names, and the
    package's own if there is one. None if the variable is set to "".
    """
    named, packaged = os.environ.get("MOE_KERNELS_CACHE_READONLY"), _PACKAGE / "compiled"
    folders = [Path(os.path.expanduser(part)) for part in (named or "").split(os.pathsep) if part]
    return [*folders, packaged] if named != "" and packaged.is_dir() else folders


def public_version(package: str) -> str | None:
    """The version of a package without its local part, None if it is not installed."""
    version = installed(package)
    return None if version is None else version.partition("+")[0]


def environment() -> str:
    """The name of this environment's folder. Triton's settings may change while the process runs."""
    return _sha256("\0".join((_versions(), *_settings(of_helion=False))).encode(errors="surrogateescape"))[:16]


def _settings(of_helion: bool) -> list[str]:
    names = (name for name in _COMPILER_SETTINGS if name.startswith("HELION_") == of_helion)
    return [f"{name}={os.environ[name]}" for name in names if name in os.environ]


@functools.cache
def _versions() -> str:
    """A digest of the compilers' versions, of the kernels' sources, and of Helion's settings, which it reads once."""
    parts = [f"{SCHEMA}", str(public_version("triton")), public_version("helion") or HELION]
    parts += _settings(of_helion=True)
    for name in _SOURCES:
        path = _PACKAGE / name
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            parts += [file.name, file.read_text(encoding="utf-8")]
    return _sha256("\0".join(parts).encode(errors="surrogateescape"))


def plan_key(signature: str, gpu: Gpu, tuned: str) -> str:
    """Return the key of a plan, from a portable signature, a GPU model, and a digest of the tuned entries for it."""
    return _sha256("\0".join((signature, repr(gpu), tuned)).encode())


def read_plan(key: str, known: Mapping[str, Binary]) -> tuple[Plan, dict[str, Binary]] | None:
    """Read a plan and its binaries, which come from `known` if possible. None if anything is missing or invalid."""

    def accept(_: Path, payload: dict[str, Any], __: bytes) -> tuple[Plan, dict[str, str]]:
        plan, digests = plan_from_json(payload["plan"]), dict(payload["binaries"])
        if set(digests) != set(plan.binaries):
            raise ValueError("a plan without its binaries' checksums")
        return plan, digests

    found = _find(f"{environment()}/plans/{key}", accept)
    if found is None:
        return None
    plan, digests = found
    binaries: dict[str, Binary] = {}
    for one, digest in digests.items():
        binary = known.get(one)
        if binary is None or binary.sha256 != digest:
            binary = read_binary(one, digest)
        if binary is None:
            return None
        binaries[one] = binary
    return plan, binaries


def write_plan(key: str, plan: Plan, binaries: Mapping[str, Binary]) -> None:
    """Store a plan whose binaries have been written."""
    payload = {"plan": plan.to_json(), "binaries": {name: binaries[name].sha256 for name in plan.binaries}}
    _write(f"{environment()}/plans/{key}", payload)


def read_binary(key: str, sha256: str | None = None) -> Binary | None:
    """Read a binary, which must have the checksum if one is given. None if it is missing or invalid."""

    def accept(path: Path, payload: dict[str, Any], code: bytes) -> Binary:
        types, constants, extension = tuple(payload["signature"]), tuple(payload["constants"]), payload["extension"]
        if not all(map(_ARGUMENT.fullmatch, types)) or {*map(type, constants)} - {int} or extension not in _EXTENSIONS:
            raise ValueError("no types of arguments, or of code")
        binary = Binary(key, types, constants, payload["metadata"], extension, code)
        if sha256 not in (None, binary.sha256):
            raise _Refused("is not the binary that its plan was made with", path)
        return binary

    return _find(f"{environment()}/binaries/{key}", accept)


def write_binary(binary: Binary, replace: bool = False) -> Binary:
    """Store a binary, unless another process has stored one meanwhile. Return the one to use, which plans must name.

    Two compilations of one kernel may differ in the paths of its debug information. With `replace`, a stored binary
    does not count.
    """
    name = f"{environment()}/binaries/{binary.key}"
    payload = {field: getattr(binary, field) for field in ("signature", "constants", "metadata", "extension")}
    if _write(name, payload, binary.code, replace) is False:
        if (other := read_binary(binary.key)) is not None:
            return other
        _write(name, payload, binary.code)
    return binary


def _places() -> tuple[str, str, str]:
    return f"{environment()}/plans", f"{environment()}/binaries", _libraries()


def refusal(root: Path) -> str | None:
    """Why files in a folder are not used, for the first that is not: others than the user and root could replace it."""
    for place in _places():
        try:
            _check(root, f"{place}/file")
        except OSError:  # not there, or unreadable
            continue
        except _Refused as error:
            return f"{error.path} {error}"
    return None


def _libraries() -> str:
    return f"libraries/{sysconfig.get_config_var('SOABI')}"


def read_library(key: str) -> bytes | None:
    """Read a launcher library of this Python's ABI, by the SHA-256 of its source. None if it is missing or invalid."""

    def accept(_: Path, __: dict[str, Any], code: bytes) -> bytes:
        if not code:
            raise ValueError("no library")
        return code

    return _find(f"{_libraries()}/{key}", accept)


def write_library(key: str, content: bytes) -> None:
    """Store a launcher library."""
    _write(f"{_libraries()}/{key}", {}, content)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _checksum(name: str, content: bytes) -> bytes:
    """The checksum of a file's content and of its name, so that no file passes for another."""
    digest = hashlib.sha256(f"{SCHEMA}\0{name}\0".encode())
    digest.update(content)
    return digest.hexdigest().encode()


def _find(name: str, accept: Callable[[Path, dict[str, Any], bytes], _T]) -> _T | None:
    """Return `accept(path, payload, code)` of the first valid file of this name, None if no folder has one."""
    for root in (folder(), *read_only_folders()):
        try:
            checksum, _, content = _read(root, name).partition(b"\n")
            if checksum != _checksum(name, content):
                raise ValueError("another schema or checksum")
            payload, _, code = content.partition(b"\n")
            return accept(root / name, json.loads(payload), code)
        except FileNotFoundError:
            continue
        except _Refused as error:
            _warn(error.path, str(error))
        except OSError as error:
            _warn(root / name, f"cannot be read ({error.strerror or error})")
        except _DAMAGE:
            _warn(root / name, "is damaged, or of another version")
    return None


def _read(root: Path, name: str) -> bytes:
    _check(root, name)
    path = root / name
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _Refused("is a symbolic link", path) from error
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _Refused("is no regular file", path)
        _check_owner(path, status)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def _check(root: Path, name: str) -> None:
    """Raise _Refused unless only the user and root can replace the file; FileNotFoundError if there is no folder."""
    _check_folder(os.path.abspath(root))
    path = root
    for part in Path(name).parent.parts:
        path = path / part
        _check_owner(path, os.lstat(path))


@functools.lru_cache(256)
def _check_folder(root: str) -> None:
    path = Path(os.path.realpath(root))
    # From the top, so that a folder that does not exist is not created in one that is refused.
    for parent in dict.fromkeys((*reversed(Path(root).parents), *reversed(path.parents))):
        _check_owner(parent, os.stat(parent), is_parent=True)
    _check_owner(path, os.stat(path))


def is_private(folder: str) -> bool:
    """Whether the user, and nobody else but root, can write to a folder, which need not exist yet."""
    try:
        _check_folder(str(_nearest(folder)))
    except (_Refused, OSError):
        return False
    return is_writable(folder)


def is_writable(folder: str) -> bool:
    """Whether the user can write to a folder, which need not exist yet."""
    try:
        return os.access(_nearest(folder), os.W_OK)
    except OSError:
        return False


def _nearest(folder: str) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    path = Path(folder).absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _check_owner(path: Path, status: os.stat_result, is_parent: bool = False) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise _Refused("is a symbolic link", path)
    if status.st_uid not in (0, os.getuid()):
        raise _Refused("belongs to another user", path)
    by_group = status.st_mode & stat.S_IWGRP and not _is_of_user_alone(status.st_gid, os.getuid())
    # In a folder with the sticky bit, such as /tmp, users cannot rename each other's files.
    if (by_group or status.st_mode & stat.S_IWOTH) and not (is_parent and status.st_mode & stat.S_ISVTX):
        raise _Refused("can be written to by others (chmod go-w)", path)


@functools.cache
def _is_of_user_alone(gid: int, uid: int) -> bool:
    """Whether a group has the name of the user, not root, and no other members. Where users have such groups, as on
    Ubuntu, their umask is 002, and programs make folders like ~/.cache that the group may write to.
    """
    try:
        user, group = pwd.getpwuid(uid).pw_name, grp.getgrgid(gid)
    except KeyError:
        return False
    return uid != 0 and group.gr_name == user and set(group.gr_mem) <= {user}


def _write(name: str, payload: dict[str, Any], code: bytes = b"", replace: bool = True) -> bool | None:
    """Write a file of the store atomically, and return True; None, with a warning, if that fails; False if the file
    exists and `replace` is False.
    """
    root, content = folder(), json.dumps(payload).encode() + b"\n" + code
    content = _checksum(name, content) + b"\n" + content
    try:
        with suppress(FileNotFoundError):
            _check(root, name)
        make_folder((root / name).parent)
        _check(root, name)
        if not write_file(root / name, content, replace):
            return False
    except _Refused as error:
        _warn(error.path, str(error))
        return None
    except OSError as error:
        _warn(root / name, f"cannot be written to ({error.strerror or error})")
        return None
    _keep_within_limit(len(content))
    return True


def write_file(path: Path, content: bytes, replace: bool = True) -> bool:
    """Write a file atomically. Return False if it exists and `replace` is False."""
    temporary = f"{path}.{os.urandom(8).hex()}.tmp"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        finally:
            os.close(descriptor)
        if not replace:
            try:
                os.link(temporary, path)  # unlike os.replace, fails if `path` exists
                return True
            except FileExistsError:
                return False
            except OSError:  # the file system has no hard links
                pass
        os.replace(temporary, path)
        return True
    finally:
        _remove(temporary)


def can_write() -> bool:
    """Whether files can be stored. If not, this gives the warning that the first file would."""
    for place in _places():
        name = f"{place}/probe"
        if not _write(name, {}):
            return False
        _remove(str(folder() / name))
    return True


def temporary_folder() -> str:
    """Return a new folder for this user alone, which this process removes at its end; those forked from it do not."""
    folder, process = tempfile.mkdtemp(prefix="moe_kernels"), os.getpid()

    @atexit.register
    def remove() -> None:
        if os.getpid() == process:
            shutil.rmtree(folder, ignore_errors=True)

    return folder


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, none of them writable by others, whatever the umask."""
    for part in reversed([part for part in (path, *path.parents) if not os.path.lexists(part)]):
        with suppress(FileExistsError):
            os.mkdir(part, 0o755)


def _remove(path: str) -> bool:
    """Remove a file. Return whether that worked."""
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


_written = 0


def _keep_within_limit(size: int) -> None:
    """Remove the oldest files beyond MOE_KERNELS_CACHE_LIMIT_MB, at the first write and after each 16th of it. Files
    more than an hour ahead, as after the clock was set back, count as the oldest.
    """
    global _written
    limit = limit_mb() << 20
    first, _written = _written == 0, _written + size
    if not first and _written < limit >> 4:
        return
    _written = 1
    ahead = time.time() + 3600
    files = sorted(_files(folder()), key=lambda entry: entry[1].st_mtime if entry[1].st_mtime < ahead else 0)
    total = sum(status.st_size for _, status in files)
    for path, status in files:
        if total <= limit:
            break
        _remove(path)
        total -= status.st_size


def renew(plans: Iterable[str] = (), binaries: Iterable[str] = (), libraries: Iterable[str] = ()) -> None:
    """Let files with these keys count as new, so that they are not the next to be removed beyond the limit."""
    for place, keys in zip(_places(), (plans, binaries, libraries), strict=True):
        for key in keys:
            with suppress(OSError):
                os.utime(folder() / place / key, follow_symlinks=False)


def limit_mb() -> int:
    """The size limit on disk, in MiB."""
    text = os.environ.get("MOE_KERNELS_CACHE_LIMIT_MB", str(_LIMIT_MB))
    try:
        limit = int(text)
    except ValueError:
        limit = 0
    if limit < 1:
        _warn_once(f"MOE_KERNELS_CACHE_LIMIT_MB: expected a whole number from 1 on, got {text!r}: {_LIMIT_MB} is used")
        return _LIMIT_MB
    return limit


def _files(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the store's own files in a folder, which may contain others."""

    def skipped(error: OSError) -> None:
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            _warn(Path(error.filename), f"cannot be read ({error.strerror})")

    for parent, folders, names in os.walk(root, onerror=skipped):
        place = os.path.relpath(parent, root)
        folders[:] = [name for name in folders if _FOLDERS.fullmatch(os.path.normpath(f"{place}/{name}"))]
        for name in names:
            if "/" in place and _SHA256.match(name):
                with suppress(OSError):
                    yield os.path.join(parent, name), os.lstat(os.path.join(parent, name))


def contents(root: Path) -> dict[str, tuple[int, int]]:
    """Return the number and bytes of plans, binaries and libraries in `root`, by kind; "other versions" is a kind."""
    found: dict[str, tuple[int, int]] = {}
    present = environment()
    for path, status in _files(root):
        top, inner, _ = Path(path).relative_to(root).parts
        kind = top if top == "libraries" else inner if top == present else "other versions"
        count, size = found.get(kind, (0, 0))
        found[kind] = (count + (not path.endswith(".tmp")), size + status.st_size)
    return found


def clear() -> int:
    """Remove all plans, binaries and libraries of the writable folder. Return the number of files removed."""
    count = 0
    for path, _ in list(_files(folder())):
        count += _remove(path) and not path.endswith(".tmp")
    return count


_warned: set[str] = set()


def _warn(path: Path, trouble: str) -> None:
    """Warn about a file, once for all files with the same trouble."""
    _warn_once(f"moe_kernels stores compiled kernels on disk, but {path} {trouble}: it is not used", trouble)


def _warn_once(text: str, subject: str | None = None) -> None:
    if (subject or text) not in _warned:
        _warned.add(subject or text)
        warnings.warn(text, RuntimeWarning, stacklevel=4)
