"""Plans and binaries on disk: stored files are found again, and any other files are neither used nor harmful.

Failures are injected at os.open, os.write and so on, because mode bits would not stop root.
"""

from __future__ import annotations

import ast
import errno
import functools
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import threading
import time
import tokenize
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from processes import forget_store, python_path, stored_in
from triton import knobs

from moe_kernels.runtime import emit, launch, store, targets
from moe_kernels.runtime.plan import Alloc, Call, Constant, Descriptor, Launch, Plan, Pointer, plan_from_json
from moe_kernels.runtime.store import Binary
from moe_kernels.runtime.symbolic import SymbolicInt

KEYS = [f"{i:064x}" for i in range(1, 9)]
PLAN_KEY, LIBRARY_KEY = "a" * 64, "b" * 64
OTHER = os.getuid() + 1


def a_binary(key: str = KEYS[0], code: bytes = b"\x7fELF" + bytes(range(256))) -> Binary:
    types = ("*bf16", "tensordesc<bf16[128, 64]>", "i32", "i64", "fp32", "constexpr")
    return Binary(key, types, (2, 5), json.dumps({"name": "jagged", "shared": 1}), "cubin", code)


def a_plan(*keys: str) -> Plan:
    """Return a plan with each kind of step and argument."""
    rows = SymbolicInt.extent(0, 0, 1, 64)
    like = Descriptor(1, 64, (rows + 1, 16), (16, 1), (64, 16), torch.bfloat16)
    constants = [Constant(value) for value in (0.5, True, None, "text")]
    arguments = (Pointer(0, 0), like, Pointer(2, -32), rows * 2 - 1, 16, *constants)
    return Plan(
        inputs=("A_packed", "B"),
        steps=(
            Alloc(2, ((rows + 7) // 8, 16), torch.bfloat16),
            Call("zero", 2, ()),
            *(Launch(key, (rows, 3), arguments) for key in keys),
            Call("bmm", 3, (0, 1), torch.float32, 4),
        ),
        results=(2, 3),
    )


PLAN = a_plan(*KEYS[:2])
BINARIES = {key: a_binary(key, bytes([65 + i]) * 100) for i, key in enumerate(KEYS[:2])}
LIBRARY = b"\x7fELF library"


def write_all() -> None:
    for binary in BINARIES.values():
        assert store.write_binary(binary) == binary
    store.write_plan(PLAN_KEY, PLAN, BINARIES)
    store.write_library(LIBRARY_KEY, LIBRARY)


def read_all() -> dict[str, bool]:
    """Return which files are found, after asserting that they are as written."""
    found = store.read_plan(PLAN_KEY, {})
    if found is not None:
        assert found[0].to_json() == PLAN.to_json()
        assert found[1] == BINARIES
    binaries = [store.read_binary(key) for key in BINARIES]
    for binary, expected in zip(binaries, BINARIES.values(), strict=True):
        assert binary in (None, expected)
    library = store.read_library(LIBRARY_KEY)
    assert library in (None, LIBRARY)
    return {"plan": found is not None, "binaries": None not in binaries, "library": library is not None}


@pytest.mark.parametrize(
    "change",
    [
        {"key": "0"},
        {"signature": ("i32",)},
        {"constants": (0,)},
        {"metadata": "[]"},
        {"extension": "spv"},
        {"code": b""},
    ],
    ids=str,
)
def test_the_sum_of_a_binary_is_of_all_fields(change: dict[str, Any]) -> None:
    one = BINARIES[KEYS[0]]
    assert replace(one, **change).sha256 != one.sha256


ALL = dict.fromkeys(("plan", "binaries", "library"), True)
NOTHING = dict.fromkeys(ALL, False)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def file_of(root: Path, kind: str) -> Path:
    environment, libraries = root / store.environment(), root / "libraries" / sysconfig.get_config_var("SOABI")
    return {
        "plan": environment / "plans" / PLAN_KEY,
        "binary": environment / "binaries" / KEYS[0],
        "library": libraries / LIBRARY_KEY,
    }[kind]


KINDS = ("plan", "binary", "library")


def left_without(kind: str) -> dict[str, bool]:
    """Return what `read_all` finds if the file of this kind cannot be used."""
    if kind == "library":
        return ALL | {"library": False}
    return ALL | {"plan": False} | ({} if kind == "plan" else {"binaries": False})


@contextmanager
def one_warning(text: str) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert [text in str(warning.message) for warning in caught] == [True], [str(one.message) for one in caught]
    assert caught[0].category is RuntimeWarning


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a child process and return its id, for `os.waitpid`."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def fail(monkeypatch: pytest.MonkeyPatch, function: str, number: int, when: Callable[..., bool] | None = None) -> None:
    """Make a function of `os` fail, for arguments that `when` selects."""
    real = getattr(os, function)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if when is None or when(*args):
            raise OSError(number, os.strerror(number), str(args[0]))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, function, failing)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the writable folder, which does not exist yet. Unpickling fails. No group is the user's own."""
    monkeypatch.setattr("grp.getgrgid", lambda gid: SimpleNamespace(gr_name="others", gr_mem=[]))
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, Mock(side_effect=AssertionError("something is unpickled")))
    monkeypatch.setenv("MOE_KERNELS_CACHE_DIR", str(tmp_path / "kept"))
    for name in ("MOE_KERNELS_CACHE_READONLY", "MOE_KERNELS_CACHE_LIMIT_MB"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(store, "_written", 0)
    umask = os.umask(0o022)
    forget_store()
    yield tmp_path / "kept"
    monkeypatch.undo()
    os.umask(umask)
    forget_store()


def test_what_is_kept_is_found(root: Path) -> None:
    with no_warning():
        assert read_all() == NOTHING
        assert not root.exists()
        write_all()
        assert read_all() == ALL
    assert {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()} > {
        str(file_of(root, kind).relative_to(root)) for kind in KINDS
    }


def test_known_binaries_are_not_read_again(root: Path) -> None:
    write_all()
    shutil.rmtree(root / store.environment() / "binaries")
    with no_warning():
        assert store.read_plan(PLAN_KEY, {}) is None
        found = store.read_plan(PLAN_KEY, BINARIES)
    assert found is not None
    assert all(found[1][key] is binary for key, binary in BINARIES.items())


def test_a_plan_has_the_binaries_that_it_was_made_with() -> None:
    """A different binary with the same key, in memory or on disk, is not used."""
    write_all()
    other = replace(BINARIES[KEYS[0]], code=b"other")
    with no_warning():
        found = store.read_plan(PLAN_KEY, BINARIES | {KEYS[0]: other})
    assert found is not None
    assert found[1] == BINARIES
    file_of(store.folder(), "binary").unlink()
    store.write_binary(other)
    with one_warning("is not the binary that its plan was made with"):
        assert store.read_plan(PLAN_KEY, {}) is None
        assert store.read_plan(PLAN_KEY, {KEYS[0]: other}) is None
    assert store.read_binary(KEYS[0]) == other


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit(root: Path, kind: str) -> None:
    """A flipped bit in any byte of a file is detected."""
    write_all()
    path = file_of(root, kind)
    good = path.read_bytes()
    with one_warning("is damaged"):
        for i, byte in enumerate(good):
            path.write_bytes(good[:i] + bytes([byte ^ 1]) + good[i + 1 :])
            if kind.startswith("library"):
                assert store.read_library(LIBRARY_KEY) is None
            elif kind == "plan":
                assert store.read_plan(PLAN_KEY, BINARIES) is None
            else:
                assert store.read_binary(KEYS[0]) is None
        assert read_all() == left_without(kind)
    path.write_bytes(good)
    assert read_all() == ALL


DAMAGE: dict[str, Callable[[bytes], Any]] = {
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "one byte short": lambda content: content[:-1],
    "one byte more": lambda content: content + b"}",
    "zeros": lambda content: bytes(len(content)),
    "no UTF-8": lambda content: b"\xff" + content,
    "a list": lambda content: b"[1]",
    "a number": lambda content: b"1" * 5000,
    "nested": lambda content: b"[" * 100_000,
    "no payload": lambda content: content.partition(b"\n")[0],
    "a list as payload": lambda content: [1],
    "an empty payload": lambda content: {},
    "parts that are no objects": lambda content: {"plan": [], "binaries": 1, "code": 2, "signature": 3},
}


def put(root: Path, path: Path, content: Any, code: bytes = b"") -> None:
    """Write bytes, or a payload and code with their checksum."""
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        put_checked(root, path, json.dumps(content).encode(), code)


def put_checked(root: Path, path: Path, line: bytes, code: bytes) -> None:
    content = line + b"\n" + code
    path.write_bytes(store._checksum(str(path.relative_to(root)), content) + b"\n" + content)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_made_again(root: Path, kind: str, damage: str) -> None:
    write_all()
    path = file_of(root, kind)
    put(root, path, DAMAGE[damage](path.read_bytes()))
    with one_warning("is damaged"):
        assert read_all() == left_without(kind)
        write_all()
    with no_warning():
        assert read_all() == ALL


def test_one_warning_for_all_that_is_damaged(root: Path) -> None:
    write_all()
    for i, path in enumerate(path for path in root.rglob("*") if path.is_file()):
        path.write_bytes(path.read_bytes()[: 7 * i])
    with one_warning("is damaged"):
        assert read_all() == NOTHING


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_another_key(root: Path, kind: str) -> None:
    """An undamaged file is not used under another key."""
    write_all()
    path = file_of(root, kind)
    other = path.with_name("c" * 64)
    os.replace(path, other)
    with one_warning("is damaged, or of another version"):
        assert store.read_plan(other.stem, {}) is None
        assert store.read_binary(other.stem) is None
        assert store.read_library(other.stem) is None


def test_a_triton_cache_that_cannot_be_written_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This is the case of users without a home folder, as in containers: Triton gets a folder of the process."""
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path / "triton")
        launch.ensure_cache()
        assert knobs.cache.dir == str(tmp_path / "triton") and store.is_private(str(tmp_path))
        monkeypatch.setattr(os, "access", lambda *_: False)
        assert not store.is_private(str(tmp_path))
        launch.ensure_cache()
        assert knobs.cache.dir != str(tmp_path / "triton")

    # As of a folder in one that the user may not look into.
    monkeypatch.setattr(Path, "exists", Mock(side_effect=PermissionError))
    assert not store.is_writable(str(tmp_path)) and not store.is_private(str(tmp_path))


def test_settings_of_the_compilers_have_an_environment_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with DISABLE_PTXAS_OPT=1, for debugging, leaves no slow binaries to later ones. Nor does a setting that is
    made while a process runs, as Triton's `knobs` write them to the environment.
    """
    found = {store.environment()}
    settings = {"DISABLE_PTXAS_OPT": "1", "TRITON_DEFAULT_FP_FUSION": "0", "HELION_FAST_MATH": "1"}
    settings |= {"DISABLE_MMA_V3": "1", "TRITON_OVERRIDE_ARCH": "sm80", "TRITON_KERNEL_OVERRIDE": "1"}
    settings |= {"TRITON_INSTRUMENTATION_MODE": "consan", "TRITON_SWAP_MIR": "/mir"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
        if name.startswith("HELION_"):  # which Helion reads when the first kernel is declared
            assert store.environment() in found
            forget_store()
        found.add(store.environment())
    assert len(found) == 1 + len(settings)
    monkeypatch.setenv("TRITON_KERNEL_OVERRIDE", "\udcff")  # a byte that is not UTF-8
    found.add(store.environment())
    assert len(found) == 2 + len(settings)
    for name in ("TRITON_PTXAS_PATH", "TRITON_LIBDEVICE_PATH"):  # torch.compile sets them for later calls
        monkeypatch.setenv(name, "/ptxas")
        assert store.environment() in found


def test_another_environment(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all()
    before = store.environment()
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "9.9.9" if name == "triton" else version(name))
    forget_store()
    assert store.environment() != before
    with no_warning():
        assert read_all() == NOTHING | {"library": True}
    os.rename(root / before, root / store.environment())
    with one_warning("is damaged, or of another version"):
        assert read_all() == NOTHING | {"library": True}


def test_another_schema(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all()
    before = store.environment()
    monkeypatch.setattr(store, "SCHEMA", store.SCHEMA + 1)
    forget_store()
    assert store.environment() != before
    os.rename(root / before, root / store.environment())
    with one_warning("of another version"):
        assert read_all() == NOTHING
        write_all()
    with no_warning():
        assert read_all() == ALL


def test_the_key_of_a_plan() -> None:
    """The key depends on the signature, the GPU model and the tuned entries."""
    gpu = targets.KNOWN["h200"]
    keys = [
        store.plan_key("signature", gpu, "tuned"),
        store.plan_key("another", gpu, "tuned"),
        store.plan_key("signature", targets.KNOWN["h100"], "tuned"),
        store.plan_key("signature", replace(gpu, multiprocessors=114), "tuned"),
        store.plan_key("signature", gpu, "tuned again"),
    ]
    assert len(set(keys)) == len(keys)
    assert keys[0] == store.plan_key("signature", replace(gpu), "tuned")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EMFILE, errno.ESTALE])
@pytest.mark.parametrize("kind", KINDS)
def test_files_that_cannot_be_read(root: Path, monkeypatch: pytest.MonkeyPatch, kind: str, number: int) -> None:
    write_all()
    path = file_of(root, kind)
    with monkeypatch.context() as patch, one_warning(f"cannot be read ({os.strerror(number)})"):
        fail(patch, "open", number, lambda opened, *_: Path(opened) == path)
        assert read_all() == left_without(kind)
    assert read_all() == ALL


@pytest.mark.parametrize("function", ["stat", "lstat"])
def test_folders_that_cannot_be_looked_at(root: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    write_all()
    forget_store()
    inner = root if function == "stat" else root / store.environment()
    with one_warning("cannot be read"):
        fail(monkeypatch, function, errno.EACCES, lambda path, *_: Path(path) == inner)
        assert read_all() == NOTHING | {"library": function == "lstat"}


FAILURES = [
    ("mkdir", errno.EROFS),
    ("mkdir", errno.EACCES),
    ("open", errno.EROFS),
    ("open", errno.EACCES),
    ("open", errno.ENOSPC),
    ("write", errno.ENOSPC),
    ("write", errno.EDQUOT),
    ("close", errno.EIO),
    ("replace", errno.EACCES),
    ("replace", errno.EXDEV),
]


@pytest.mark.parametrize(("function", "number"), FAILURES)
def test_writing_fails(root: Path, monkeypatch: pytest.MonkeyPatch, function: str, number: int) -> None:
    """With a full disk or a read-only folder, nothing is stored, left behind or raised."""
    with one_warning(f"cannot be written to ({os.strerror(number)})"), monkeypatch.context() as patch:
        real = os.close
        if function == "close":  # it closes even if it fails
            patch.setattr(os, "close", real)
        fail(patch, function, number, (lambda descriptor: real(descriptor) is None) if function == "close" else None)
        if function == "replace":  # after `os.link`
            fail(patch, "link", number)
        write_all()
    with no_warning():
        assert read_all() == NOTHING
        assert not list(root.rglob("*.tmp"))
        write_all()
        assert read_all() == ALL


def test_the_disk_is_full_halfway(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, room = os.write, 150

    def write(descriptor: int, content: Any) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(descriptor, content[:room])
        room -= written
        return written

    with one_warning("No space left"), monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        write_all()
    with no_warning():
        assert read_all() == NOTHING
    assert not list(root.rglob("*.tmp"))


def test_short_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: real(descriptor, content[:7]))
    write_all()
    assert read_all() == ALL


def test_no_file_stays_open(root: Path) -> None:
    """Not even one that may not be used."""
    write_all()
    before = len(os.listdir("/proc/self/fd"))
    write_all()
    assert read_all() == ALL
    file_of(root, "plan").chmod(0o666)
    with one_warning("can be written to by others"):
        assert read_all() == left_without("plan")
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_file_system_without_links(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writers then replace each other's binaries: a plan finds its own binary, or is not found."""
    fail(monkeypatch, "link", errno.EPERM)
    with no_warning():
        write_all()
        assert read_all() == ALL
    other = store.write_binary(replace(BINARIES[KEYS[0]], code=b"other"))
    with one_warning("is not the binary that its plan was made with"):
        assert store.read_plan(PLAN_KEY, {}) is None
    assert store.read_binary(KEYS[0]) == other
    assert not list(root.rglob("*.tmp"))


def test_a_file_in_place_of_a_folder(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other file is removed, such as one named `None`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "None").write_text("mine")
    root.write_text("mine")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert read_all() == NOTHING
        write_all()
        assert read_all() == NOTHING
    assert len(caught) == 2  # reading, writing
    assert files(tmp_path) == {"None": b"mine", "kept": b"mine"}


def test_a_leftover_by_the_same_name(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary file with the same name is not written to, and nothing is raised."""
    monkeypatch.setattr(os, "urandom", bytes)
    with no_warning():
        write_all()
        assert read_all() == ALL
    left = file_of(root, "plan").with_name(f"{PLAN_KEY}.{'00' * 8}.tmp")
    left.write_text("left")
    with one_warning("cannot be written to (File exists)"):
        store.write_plan(PLAN_KEY, a_plan(KEYS[0]), BINARIES)
    assert read_all() == ALL


UNSAFE = {
    "the folder": lambda root: root,
    "one above it": lambda root: root.parent,
    "the environment's": lambda root: root / store.environment(),
    "the plans'": lambda root: file_of(root, "plan").parent,
    "the binaries'": lambda root: file_of(root, "binary").parent,
    "the libraries'": lambda root: file_of(root, "library").parent,
}


def unsafe_leaves(which: str) -> dict[str, bool]:
    if which in ("the folder", "one above it"):
        return NOTHING
    if which == "the libraries'":
        return ALL | {"library": False}
    return ALL | {"plan": False} | ({} if which == "the plans'" else {"binaries": False})


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
@pytest.mark.parametrize("which", UNSAFE)
def test_folders_that_others_may_write_to(root: Path, which: str, mode: int) -> None:
    """They are neither read nor written, with one warning for both."""
    write_all()
    forget_store()
    before = files(root)
    unsafe = UNSAFE[which](root)
    unsafe.chmod(mode)
    with one_warning(f"{unsafe} can be written to by others (chmod go-w)"):
        assert read_all() == unsafe_leaves(which)
        assert store.write_binary(BINARIES[KEYS[0]]) == BINARIES[KEYS[0]]
        store.write_plan(PLAN_KEY, a_plan(KEYS[0]), BINARIES)
        store.write_library(LIBRARY_KEY, b"another")
    if unsafe in (root, root.parent, root / store.environment()):
        assert {name: content for name, content in files(root).items() if "libraries" not in name} == {
            name: content for name, content in before.items() if "libraries" not in name
        }
    unsafe.chmod(0o755)


@pytest.mark.parametrize("which", ["the folder", "one above it", "the plans'"])
def test_folders_that_the_users_own_group_may_write_to(root: Path, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_is_of_user_alone", functools.lru_cache(lambda gid, uid: uid == os.getuid()))
    write_all()
    unsafe = UNSAFE[which](root)
    for mode in (0o775, 0o777):
        unsafe.chmod(mode)
        forget_store()
        with no_warning() if mode == 0o775 else one_warning("can be written to by others"):
            assert read_all() == (ALL if mode == 0o775 else unsafe_leaves(which))
    unsafe.chmod(0o755)


@pytest.mark.parametrize(
    ("uid", "name", "members", "alone"),
    [
        (1000, "me", [], True),
        (1000, "me", ["me"], True),
        (1000, "me", ["me", "you"], False),
        (1000, "staff", [], False),
        (0, "me", [], False),
        (1001, "me", [], False),
    ],
)
def test_which_group_is_the_users_own(
    uid: int, name: str, members: list[str], alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = {0: SimpleNamespace(pw_name="me"), 1000: SimpleNamespace(pw_name="me")}
    monkeypatch.setattr("pwd.getpwuid", users.__getitem__)
    monkeypatch.setattr("grp.getgrgid", lambda gid: SimpleNamespace(gr_name=name, gr_mem=members))
    assert store._is_of_user_alone(77, uid) == alone


def test_a_new_folder_where_others_may_write(root: Path) -> None:
    """Others could replace the new folder."""
    root.parent.chmod(0o777)
    with one_warning(f"{root.parent} can be written to by others"):
        write_all()
    assert not root.exists() and files(root.parent) == {}
    assert read_all() == NOTHING
    root.parent.chmod(0o700)


def test_nothing_is_created_below_a_folder_that_is_not_used(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by root in another user's home folder. That user could not write to what root had created."""
    home = root.parent / "home"
    home.mkdir()
    monkeypatch.setenv("MOE_KERNELS_CACHE_DIR", str(home / "cache" / "compiled"))
    with one_warning(f"{home} belongs to another user"), monkeypatch.context() as patch:
        owned(patch, home, OTHER)
        write_all()
    assert not list(home.iterdir())
    with no_warning():
        write_all()
        assert read_all() == ALL


def test_a_link_where_others_may_write(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others could replace it by another."""
    write_all()
    public = tmp_path / "public"
    public.mkdir()
    (public / "link").symlink_to(root)
    monkeypatch.setenv("MOE_KERNELS_CACHE_DIR", str(public / "link"))
    with no_warning():
        assert read_all() == ALL
    public.chmod(0o777)
    forget_store()
    with one_warning(f"{public} can be written to by others"):
        assert read_all() == NOTHING


def test_a_sticky_folder_above(root: Path) -> None:
    """In a folder such as /tmp, others cannot rename files that they do not own."""
    root.parent.chmod(0o1777)
    with no_warning():
        write_all()
        assert read_all() == ALL
    root.chmod(0o1777)  # but others may create files in it
    forget_store()
    with one_warning("can be written to by others"):
        assert read_all() == NOTHING
    root.parent.chmod(0o700)


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o646])
@pytest.mark.parametrize("kind", KINDS)
def test_files_that_others_may_write_to(root: Path, kind: str, mode: int) -> None:
    write_all()
    path = file_of(root, kind)
    path.chmod(mode)
    with one_warning(f"{path} can be written to by others (chmod go-w)"):
        assert read_all() == left_without(kind)
        write_all()  # replaces it
    with no_warning():
        assert read_all() == ALL


@pytest.mark.parametrize("kind", KINDS)
def test_links_instead_of_files(root: Path, tmp_path: Path, kind: str) -> None:
    write_all()
    path, outside = file_of(root, kind), tmp_path / "outside"
    os.replace(path, outside)
    path.symlink_to(outside)
    content = outside.read_bytes()
    with one_warning(f"{path} is a symbolic link"):
        assert read_all() == left_without(kind)
        write_all()  # replaces the link
    with no_warning():
        assert read_all() == ALL
    assert not path.is_symlink()
    assert outside.read_bytes() == content


@pytest.mark.parametrize("which", [which for which in UNSAFE if which not in ("the folder", "one above it")])
def test_links_instead_of_folders(root: Path, tmp_path: Path, which: str) -> None:
    """Their targets are neither read nor written, nor cleared."""
    write_all()
    linked, outside = UNSAFE[which](root), tmp_path / "outside"
    os.rename(linked, outside)
    linked.symlink_to(outside)
    before = files(outside), set(outside.rglob("*"))
    with one_warning(f"{linked} is a symbolic link"):
        assert read_all() == unsafe_leaves(which)
        store.write_binary(a_binary(KEYS[5], b"new"))
        store.write_plan("d" * 64, a_plan(), {})
        store.write_library("d" * 64, b"new")
        assert read_all() == unsafe_leaves(which)
    store.clear()
    assert (files(outside), set(outside.rglob("*"))) == before


def test_links_to_nothing(root: Path, tmp_path: Path) -> None:
    root.mkdir()
    (root / store.environment()).symlink_to(tmp_path / "nothing")
    with one_warning("is a symbolic link"):
        write_all()
        assert read_all() == NOTHING | {"library": True}
    assert not (tmp_path / "nothing").exists()


def test_the_folder_itself_may_be_a_link(root: Path, tmp_path: Path) -> None:
    """Its target must be a folder that only the user can write to."""
    (tmp_path / "elsewhere").mkdir(0o755)
    root.symlink_to(tmp_path / "elsewhere")
    with no_warning():
        write_all()
        assert read_all() == ALL
    (tmp_path / "elsewhere").chmod(0o777)
    forget_store()
    with one_warning(f"{tmp_path / 'elsewhere'} can be written to by others"):
        assert read_all() == NOTHING


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file(root: Path, kind: str) -> None:
    """A pipe, which would block until there is a writer, and a folder are refused."""
    write_all()
    path = file_of(root, kind)
    path.unlink()
    os.mkfifo(path, 0o600)
    with one_warning(f"{path} is no regular file"):
        assert read_all() == left_without(kind)
        path.unlink()
        path.mkdir()
        assert read_all() == left_without(kind)


def owned(monkeypatch: pytest.MonkeyPatch, path: Path, uid: int) -> None:
    """Make a file or folder appear to belong to another user."""

    def of_other(status: os.stat_result) -> os.stat_result:
        return os.stat_result((*status[:4], uid, *status[5:10]))

    inode = os.stat(path).st_ino
    for name in ("stat", "lstat", "fstat"):
        real = getattr(os, name)

        def patched(*args: Any, real: Callable[..., os.stat_result] = real, **kwargs: Any) -> os.stat_result:
            status = real(*args, **kwargs)
            return of_other(status) if status.st_ino == inode else status

        monkeypatch.setattr(os, name, patched)


@pytest.mark.parametrize("which", UNSAFE)
def test_folders_of_other_users(root: Path, monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    write_all()
    forget_store()
    before = files(root)
    other = UNSAFE[which](root)
    with one_warning(f"{other} belongs to another user"):
        owned(monkeypatch, other, OTHER)
        assert read_all() == unsafe_leaves(which)
        store.write_plan(PLAN_KEY, a_plan(KEYS[0]), BINARIES)
    if which not in ("the binaries'", "the libraries'"):
        assert files(root) == before


def test_a_sticky_folder_of_another_user(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner can rename the files in it."""
    write_all()
    forget_store()
    root.parent.chmod(0o1777)
    owned(monkeypatch, root.parent, OTHER)
    with one_warning("belongs to another user"):
        assert read_all() == NOTHING
    root.parent.chmod(0o700)


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_other_users(root: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    write_all()
    owned(monkeypatch, file_of(root, kind), OTHER)
    with one_warning(f"{file_of(root, kind)} belongs to another user"):
        assert read_all() == left_without(kind)


def test_what_root_has_made_is_for_everybody(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all()
    forget_store()
    for name in ("stat", "lstat", "fstat"):
        real = getattr(os, name)

        def of_root(*args: Any, real: Callable[..., os.stat_result] = real, **kwargs: Any) -> os.stat_result:
            status = real(*args, **kwargs)
            return os.stat_result((*status[:4], 0, *status[5:10]))

        monkeypatch.setattr(os, name, of_root)
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    with no_warning():
        assert read_all() == ALL


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int) -> None:
    """Others can never write to new files, but can read them where the umask permits, as in a container image."""
    monkeypatch.setenv("MOE_KERNELS_CACHE_DIR", str(tmp_path / "a" / "b" / "c"))
    before = os.umask(umask)
    try:
        with no_warning():
            write_all()
            assert read_all() == ALL
    finally:
        os.umask(before)
    made = [tmp_path / "a", *(tmp_path / "a").rglob("*")]
    assert len(made) > 10
    for path in made:
        assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644) & ~umask


def test_two_writers_of_one_binary(monkeypatch: pytest.MonkeyPatch) -> None:
    """If their bytes differ, the second writer uses the first one's binary."""
    mine, other = (replace(BINARIES[KEYS[0]], code=code) for code in (b"mine", b"other"))
    real = os.link

    def link(*args: Any) -> None:
        monkeypatch.setattr(os, "link", real)
        assert store.write_binary(other) is other
        store.write_plan("e" * 64, a_plan(KEYS[0]), {KEYS[0]: other})
        real(*args)

    monkeypatch.setattr(os, "link", link)
    with no_warning():
        used = store.write_binary(mine)
        assert used == other
        store.write_plan("f" * 64, a_plan(KEYS[0]), {KEYS[0]: used})
        for key in ("e" * 64, "f" * 64):
            found = store.read_plan(key, {})
            assert found is not None
            assert found[1] == {KEYS[0]: other}


def test_two_writers_of_one_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whichever order they write, a record and a library belong together."""
    real = os.replace
    for turn in (1, 2):
        calls = 0

        def replace_(*args: Any, turn: int = turn) -> None:
            nonlocal calls
            calls += 1
            if calls == turn:
                store.write_library(LIBRARY_KEY, b"other")
            real(*args)

        monkeypatch.setattr(os, "replace", replace_)
        with no_warning():
            store.write_library(LIBRARY_KEY, b"mine")
            assert store.read_library(LIBRARY_KEY) == b"mine"
        monkeypatch.setattr(os, "replace", real)


def test_two_processes(root: Path) -> None:
    """Both write all binaries, with different bytes, and a plan for each."""
    begin_read, begin_write = os.pipe()

    def write(name: str) -> None:
        os.close(begin_write)
        os.read(begin_read, 1)  # until both have started
        warnings.simplefilter("error")
        for i, key in enumerate(KEYS * 8):
            used = store.write_binary(a_binary(f"{key[:-4]}{i:04x}", name.encode() * 1000))
            store.write_plan(f"{name * 60}{i:04x}", a_plan(used.key), {used.key: used})

    children = [in_child(lambda name=name: write(name)) for name in "ab"]
    os.close(begin_read)
    os.close(begin_write)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    with no_warning():
        for i in range(8 * len(KEYS)):
            both = [store.read_plan(f"{name * 60}{i:04x}", {}) for name in "ab"]
            assert both[0] is not None and both[1] is not None
            assert both[0][1] == both[1][1]
    assert not list(root.rglob("*.tmp"))


@pytest.mark.parametrize("function", ["write", "replace", "link"])
def test_a_process_killed_while_writing(root: Path, function: str) -> None:
    """Its leftovers do no harm, do not count as files of the cache, and are cleared."""

    def write() -> None:
        setattr(os, function, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        write_all()

    assert os.WTERMSIG(os.waitpid(in_child(write), 0)[1]) == signal.SIGKILL
    assert len(list(root.rglob("*.tmp"))) == 1
    written = {"binaries": len(BINARIES)} if function == "replace" else {}  # which are written by `os.link`
    with no_warning():
        assert read_all() == NOTHING | dict.fromkeys(written, True)
        assert {kind: count for kind, (count, _) in store.contents(root).items() if count} == written
        write_all()
        assert read_all() == ALL
        assert len(list(root.rglob("*.tmp"))) == 1
        assert store.clear() == 4
    assert files(root) == {}


def test_the_oldest_files_go_first(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_KERNELS_CACHE_LIMIT_MB", "1")
    (root / "mine").mkdir(parents=True)
    (root / "mine" / ("9" * 64 + ".json")).write_bytes(bytes(2 << 20))
    binaries = {key: a_binary(key, bytes([i]) * (300 << 10)) for i, key in enumerate(KEYS[:5])}
    for i, (key, binary) in enumerate(binaries.items()):
        store.write_binary(binary)
        store.write_plan(key, a_plan(key), binaries)
        for path in root.rglob("*"):
            if path.is_file() and path.stat().st_mtime > 1e6:
                os.utime(path, (i, i))
    with no_warning():
        found = [store.read_plan(key, {}) is not None for key in binaries]
        assert found == [False, False, True, True, True]
        assert sum(size for _, size in store.contents(root).values()) <= 1 << 20
        assert (root / "mine" / ("9" * 64 + ".json")).exists()
        # An evicted plan can be written again.
        store.write_binary(binaries[KEYS[0]])
        store.write_plan(KEYS[0], a_plan(KEYS[0]), binaries)
        assert store.read_plan(KEYS[0], {}) is not None


def test_what_is_used_again_counts_as_new(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_KERNELS_CACHE_LIMIT_MB", "1")
    for i, key in enumerate(KEYS[:3]):
        store.write_binary(a_binary(key, bytes([i]) * (300 << 10)))
        os.utime(root / store.environment() / "binaries" / key, (i, i))
    elsewhere, link = root / "elsewhere", root / store.environment() / "binaries" / KEYS[4]
    elsewhere.touch()
    os.utime(elsewhere, (1, 1))
    link.symlink_to(elsewhere)
    with no_warning():
        store.renew(binaries=[KEYS[i] for i in (0, 4, 5)])  # the last is not there
        store.write_binary(a_binary(KEYS[3], bytes(300 << 10)))
        assert [store.read_binary(key) is not None for key in KEYS[:4]] == [True, False, True, True]
    assert elsewhere.stat().st_mtime == 1

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "utime", refuse)  # as for files of another user
    with no_warning():
        store.renew(binaries=[KEYS[0]])


def test_the_limit_is_looked_at_first_and_after_each_16th_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, found = [], store._files
    monkeypatch.setenv("MOE_KERNELS_CACHE_LIMIT_MB", "1")
    monkeypatch.setattr(store, "_files", lambda folder: looked.append(folder) or found(folder))
    for kilobytes, times in ((0, 1), (31, 1), (33, 2), (31, 2), (65, 3)):
        store.write_library(LIBRARY_KEY, bytes(kilobytes << 10))
        assert len(looked) == times, kilobytes


@pytest.mark.parametrize(("seconds", "kept"), [(3500, True), (3700, False)])
def test_files_of_a_clock_that_was_ahead_go_first(
    seconds: int, kept: bool, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to an hour, as other machines may be that share the folder, such files are the newest."""
    monkeypatch.setenv("MOE_KERNELS_CACHE_LIMIT_MB", "1")
    keys = [hashlib.sha256(name).hexdigest() for name in (b"first", b"second")]
    for key, moved in zip(keys, (seconds, -10), strict=True):
        before = set(root.rglob("*"))
        store.write_library(key, key[:1].encode() * (490 << 10))
        for path in set(root.rglob("*")) - before:
            os.utime(path, (time.time() + moved,) * 2)
    assert all(store.read_library(key) for key in keys)
    store.write_library(LIBRARY_KEY, bytes(70 << 10))
    assert [store.read_library(key) is not None for key in keys] == [kept, not kept]


def test_a_binary_that_was_evicted(root: Path) -> None:
    write_all()
    file_of(root, "binary").unlink()
    with no_warning():
        assert read_all() == left_without("binary")
        write_all()
        assert read_all() == ALL
        file_of(root, "binary").unlink()
        other = replace(BINARIES[KEYS[0]], code=b"compiled again")
        assert store.write_binary(other) is other
        assert store.read_binary(KEYS[0]) == other


@pytest.mark.parametrize(
    ("text", "expected"), [(None, 2048), ("10", 10), ("1", 1), ("0", 2048), ("-3", 2048), ("many", 2048)]
)
def test_the_limit(monkeypatch: pytest.MonkeyPatch, text: str | None, expected: int) -> None:
    forget_store()
    if text is not None:
        monkeypatch.setenv("MOE_KERNELS_CACHE_LIMIT_MB", text)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [store.limit_mb() for _ in range(2)] == [expected] * 2
    said = f"MOE_KERNELS_CACHE_LIMIT_MB: expected a whole number from 1 on, got {text!r}: 2048 is used"
    assert [str(one.message) for one in caught] == ([said] if text in ("0", "-3", "many") else [])


def test_contents_and_clear(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only files of the store are counted and cleared, in a folder that may have others."""
    assert store.contents(root) == {}
    assert store.clear() == 0
    write_all()
    old = root / ("0" * 16) / "plans" / ("1" * 64 + ".json")
    old.parent.mkdir(parents=True)
    old.write_text("of another version")
    mine = [root / "notes.json", root / "libraries" / "mine.so", root / "project" / "plans" / ("2" * 64 + ".json")]
    mine += [root / "libraries" / "deep" / "er" / ("3" * 64 + ".so"), file_of(root, "plan").with_name("notes.json")]
    mine += [root / ("4" * 64 + ".json"), root / "libraries" / ("5" * 64 + ".so")]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    counts = {kind: count for kind, (count, _) in store.contents(root).items()}
    assert counts == {"plans": 1, "binaries": 2, "libraries": 1, "other versions": 1}
    size = sum(len(content) for name, content in files(root).items() if content != b"mine")
    assert sum(size for _, size in store.contents(root).values()) == size
    assert store.clear() == 5
    assert set(root.rglob("*")) >= set(mine)
    assert set(files(root).values()) == {b"mine"}
    assert store.contents(root) == {}
    assert read_all() == NOTHING


def test_contents_that_cannot_be_listed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all()
    folder, listed = file_of(root, "plan").parent, os.scandir

    def scandir(path: Any) -> Any:
        if Path(path) == folder:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.warns(RuntimeWarning, match="cannot be read .Permission denied"):
        counts = {kind: count for kind, (count, _) in store.contents(root).items()}
    assert counts == {"binaries": 2, "libraries": 1}


def test_read_only_folders(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read after the writable one, and are never written, evicted from or cleared."""
    write_all()
    second, third = tmp_path / "second", tmp_path / "third"
    os.rename(root, third)
    monkeypatch.setenv("MOE_KERNELS_CACHE_READONLY", os.pathsep.join([str(second), str(third)]))
    monkeypatch.setenv("MOE_KERNELS_CACHE_LIMIT_MB", "1")
    before = {path: (path.stat().st_mtime_ns, path.is_dir() or path.read_bytes()) for path in third.rglob("*")}
    with no_warning():
        assert read_all() == ALL
        assert not root.exists()
        store.write_binary(a_binary(KEYS[6], bytes(2 << 20)))
        store.write_plan("d" * 64, a_plan(KEYS[0]), BINARIES)
        assert store.read_plan("d" * 64, {}) is not None  # its binary is in another folder
        store.clear()
        assert read_all() == ALL
    after = {path: (path.stat().st_mtime_ns, path.is_dir() or path.read_bytes()) for path in third.rglob("*")}
    assert after == before
    assert not second.exists()


def test_folders_stand_in_for_each_other(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is used if a file of the first is damaged, or has a binary other than the second's plan names."""
    write_all()
    second = tmp_path / "second"
    os.rename(root, second)
    monkeypatch.setenv("MOE_KERNELS_CACHE_READONLY", str(second))
    with no_warning():
        other = store.write_binary(replace(BINARIES[KEYS[0]], code=b"other"))
        assert store.read_binary(KEYS[0]) == other
    with one_warning("is not the binary that its plan was made with"):
        found = store.read_plan(PLAN_KEY, {})
        assert found is not None
        assert found[1] == BINARIES
    file_of(root, "binary").write_text("damaged")
    with one_warning("is damaged"):
        assert read_all() == ALL
    shutil.rmtree(root)
    second.chmod(0o777)
    forget_store()
    with one_warning("can be written to by others"):
        assert read_all() == NOTHING


def test_the_folder_of_an_installed_package(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel may contain it."""
    write_all()
    (tmp_path / "package").mkdir()
    os.rename(root, tmp_path / "package" / "compiled")
    monkeypatch.setattr(store, "_PACKAGE", tmp_path / "package")
    assert store.read_only_folders() == [tmp_path / "package" / "compiled"]
    with no_warning():
        assert read_all() == ALL
    monkeypatch.setenv("MOE_KERNELS_CACHE_READONLY", f"{tmp_path / 'other'}{os.pathsep}")
    assert store.read_only_folders() == [tmp_path / "other", tmp_path / "package" / "compiled"]
    monkeypatch.setenv("MOE_KERNELS_CACHE_READONLY", "")
    assert store.read_only_folders() == []
    assert read_all() == NOTHING


def test_which_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert store.folder() == tmp_path / "kept"
    monkeypatch.delenv("MOE_KERNELS_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert store.folder() == tmp_path / "xdg" / "moe_kernels" / "compiled"
    write_all()
    assert read_all() == ALL
    assert (tmp_path / "xdg" / "moe_kernels" / "compiled" / store.environment()).is_dir()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert store.folder() == tmp_path / "home" / ".cache" / "moe_kernels" / "compiled"
    monkeypatch.setenv("MOE_KERNELS_CACHE_DIR", "~/kept")  # from where no shell expands it
    monkeypatch.setenv("MOE_KERNELS_CACHE_READONLY", "~/first:/second")
    assert store.folder() == tmp_path / "home" / "kept"
    assert store.read_only_folders() == [tmp_path / "home" / "first", Path("/second")]


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOE_KERNELS_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def nobody(uid: int) -> Any:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert str(os.getuid()) in store.folder().name
    monkeypatch.setattr("tempfile.gettempdir", Mock(side_effect=FileNotFoundError(errno.ENOENT, "no folder")))
    assert store.folder() == Path(f"/tmp/moe_kernels-{os.getuid()}")
    assert store.read_plan(PLAN_KEY, {}) is None


def test_what_an_environment_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It depends on the public versions of Triton and Helion, but not on that of PyTorch."""
    installed = {"torch": "2.13.0", "triton": "3.6.0", "helion": "1.5.0"}

    def environment(**changed: str | None) -> str:
        versions = installed | changed

        def version(name: str) -> str:
            if (found := versions[name]) is None:
                raise metadata.PackageNotFoundError(name)
            return found

        monkeypatch.setattr(metadata, "version", version)
        forget_store()
        return store.environment()

    here = environment()
    assert environment(torch="2.11.0") == here
    assert environment(torch="2.13.0+cu130", triton="3.6.0+cu130", helion="1.5.0+cpu") == here
    assert environment(helion=None) == here
    assert len({here, environment(triton="3.7.0"), environment(triton=None), environment(helion="1.5.1")}) == 4


def imports_of(file: Path) -> set[Path]:
    """Return the files of the package that a file imports anywhere, except those with only a docstring."""
    found: set[Path] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            path = store._PACKAGE.parent / name.replace(".", "/")
            found |= {x for x in (path / "__init__.py", path.with_suffix(".py")) if x.is_file()}
    found.discard(store._PACKAGE / "__init__.py")
    return {path for path in found if len(ast.parse(path.read_text(encoding="utf-8")).body) > 1}


def test_sources_are_in_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It depends on operators, kernels, planners and their imports except the store, but not on how plans are run."""
    made_by = {*store._PACKAGE.glob("ops/*.py")}
    waiting = {*store._PACKAGE.glob("kernels/*.py"), *store._PACKAGE.glob("rules/*.py")}
    while waiting:
        made_by |= waiting
        waiting = set().union(*map(imports_of, waiting)) - made_by - {store._PACKAGE / "runtime" / "store.py"}
    here = store.environment()
    package = tmp_path / "package"
    shutil.copytree(store._PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    sources = {file.relative_to(store._PACKAGE) for file in made_by}
    monkeypatch.setattr(store, "_PACKAGE", package)

    def changed(name: Path) -> bool:
        text = (package / name).read_text(encoding="utf-8")
        (package / name).write_text(text + "\n", encoding="utf-8")
        forget_store()
        found = store.environment() != here
        (package / name).write_text(text, encoding="utf-8")
        return found

    every = {file.relative_to(package) for file in package.rglob("*.py")}
    assert {name for name in every if changed(name)} == sources
    assert {Path("requirements.py"), Path("runtime/targets.py"), Path("scaled.py")} < sources < every
    forget_store()
    assert store.environment() == here


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values that are neither objects nor lists."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from leaves(part, (*path, key))
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from leaves(part, (*path, i))
    else:
        yield path


def changed_at(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    changed = json.loads(json.dumps(value))
    at = changed
    for part in path[:-1]:
        at = at[part]
    at[path[-1]] = new
    return changed


HOSTILE = [
    "__import__('os').abort()",
    "t0; raise SystemExit",
    "extent",
    "0",
    "",
    "\ud800",
    True,
    1.5,
    -1,
    10**30,
    None,
    [],
    {},
    ["extent", 0, 0],
    ["extent", "t0.x", 0],
    ["extent", 9, 0],
    ["__import__", 1, 2],
    ["+", "1", 2],
    [["+"], 1, 2],
]
NAMES = r"def|run|return|None|try|if|or|is|not|except|shape|data_ptr|empty_strided|[tp]\d+|n\d+_\d+"
NAMED = r"(call|dtype|kernel|constant|descriptor)_\d+"


def source_of(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the source code that is executed for a plan."""
    made: list[str] = []

    def define(signature: str, statements: Any, names: Any) -> Any:
        made.append("\n    ".join([f"def {signature}:", *statements]))

    monkeypatch.setattr(emit, "define", define)
    launchers = {key: launch.TritonLauncher(object()) for key in plan.binaries}
    emit.emit(plan, launchers, torch.device("cpu"))
    return made[0]


def test_no_string_that_was_read_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan with any value replaced is refused, or generates code of numbers and our own names only."""
    good = PLAN.to_json()
    allowed = re.compile(f"{NAMES}|{NAMED}")
    refused = 0
    plain = re.sub(NAMED, r"\1", source_of(plan_from_json(good), monkeypatch))
    for path in leaves(good):
        for new in HOSTILE:
            try:
                plan = plan_from_json(json.loads(json.dumps(changed_at(good, path, new))))
            except ValueError:
                refused += 1
                continue
            text = source_of(plan, monkeypatch)
            compile(text, "plan", "exec")
            for token in tokenize.generate_tokens(io.StringIO(text).readline):
                assert token.type != tokenize.STRING, (path, new)
                assert token.type != tokenize.NAME or allowed.fullmatch(token.string), (path, new, token.string)
            if isinstance(new, str):
                assert re.sub(NAMED, r"\1", text) == plain, (path, new)
    assert refused > 500


def test_plans_of_the_wrong_form() -> None:
    good = PLAN.to_json()
    for bad in (None, 1, "plan", [], {}, {**good, "steps": 1}, {**good, "steps": [1]}, {**good, "inputs": [1]}):
        with pytest.raises(ValueError):
            plan_from_json(bad)
    for step in ({}, {"alloc": 5}, {"call": "exec", "variable": 1, "arguments": [], "dtype": None, "groups": 0}):
        with pytest.raises(ValueError):
            plan_from_json({**good, "steps": [step]})
    for missing in (7, -1, "t0", True):
        with pytest.raises(ValueError):
            plan_from_json({**good, "results": [missing]})


def test_hostile_files_that_check_out(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hostile files with a correct checksum are refused, too."""
    write_all()
    plan, binary = file_of(root, "plan"), file_of(root, "binary")
    good, code = stored_in(binary)
    evil = '*bf16"; system("true"); //'
    changes = [
        {"signature": [evil]},
        {"signature": [1]},
        {"signature": None},
        {"constants": ["1"]},
        {"constants": [1.5]},
        {"constants": [float("inf")]},
        {"metadata": {}},
        {"extension": "cubin/../x.cubin"},
        {"extension": "py"},
        {"extension": ["cubin"]},
    ]
    real, opened = os.open, set()

    def open_(path: Any, *rest: Any) -> int:
        opened.add(Path(path))
        return real(path, *rest)

    monkeypatch.setattr(os, "open", open_)
    for change in changes:
        put(root, binary, good | change, code)
        forget_store()
        with one_warning("is damaged"):
            assert store.read_binary(KEYS[0]) is None, change
    assert opened == {binary}
    put(root, binary, good, code)
    assert read_all() == ALL
    payload, _ = stored_in(plan)
    for changed in (
        payload | {"binaries": [KEYS[0], KEYS[1]]},
        payload | {"binaries": {KEYS[0]: payload["binaries"][KEYS[0]]}},
        payload | {"binaries": {"../" + KEYS[0]: "x"}},
        payload | {"plan": None},
    ):
        put(root, plan, changed)
        forget_store()
        with one_warning("is damaged"):
            assert store.read_plan(PLAN_KEY, {}) is None, changed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("line", [b"", b"\xff", b"1" * 5000, b"[" * 100_000, b'{"plan": '], ids=lambda line: line[:3])
def test_a_file_that_checks_out_without_json(root: Path, kind: str, line: bytes) -> None:
    write_all()
    path = file_of(root, kind)
    put_checked(root, path, line, stored_in(path)[1])
    with one_warning("is damaged"):
        assert read_all() == left_without(kind)


@pytest.mark.filterwarnings("ignore:moe_kernels stores")
def test_an_expression_of_any_depth(root: Path) -> None:
    """It is read or refused."""
    write_all()
    payload: dict[str, Any] = {"binaries": {}, "plan": {"inputs": ["A"], "results": []}}
    found = []
    for depth in range(50, 1300, 50):  # Python 3.12.1's json writes up to 1500
        deep: Any = 1
        for _ in range(depth):
            deep = ["+", deep, 1]
        payload["plan"]["steps"] = [{"alloc": 1, "shape": [deep], "dtype": "float32"}]
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(10 * limit)
        try:
            put(root, file_of(root, "plan"), payload)
        finally:
            sys.setrecursionlimit(limit)
        found.append(store.read_plan(PLAN_KEY, {}) is not None)
    assert found[0]


def test_nothing_unpickles_or_evaluates() -> None:
    """This holds for the files that turn stored data into a plan."""
    for name in ("store", "plan", "symbolic"):
        tree = ast.parse((store._PACKAGE / "runtime" / f"{name}.py").read_text(encoding="utf-8"))
        found = {
            alias.name.partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
        }
        found |= {
            node.module.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
        }
        assert not found & {"pickle", "marshal", "shelve", "dill", "cloudpickle", "ctypes"}
        called = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert not called & {"eval", "exec", "compile", "__import__"}


class Compiler:
    """Stand-in for a C compiler, and for the dynamic linker."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.built: list[str] = []
        monkeypatch.setattr("triton.runtime.build._build", self.build)
        monkeypatch.setattr("ctypes.CDLL", self.load)
        monkeypatch.setenv("CC", "cc")

    def load(self, path: str) -> None:
        if not Path(path).read_bytes().startswith(b"\x7fELF "):
            raise OSError("undefined symbol: cuModuleGetFunction")

    def build(self, name: str, src: str, srcdir: str, *_: Any) -> str:
        text = Path(src).read_text()
        self.built.append(text)
        path = os.path.join(srcdir, f"{name}.built.so")
        Path(path).write_bytes(b"\x7fELF " + text.encode())
        return path


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    pytest.importorskip("triton")
    return Compiler(monkeypatch)


def request(folder: Path, text: str) -> bytes:
    """Request a launcher as Triton does if its own cache does not have it."""
    from triton import knobs

    folder.mkdir()
    (folder / "main.c").write_text(text)
    path = knobs.build.impl("launcher", str(folder / "main.c"), str(folder), [], [], [])
    assert Path(path).parent == folder
    return Path(path).read_bytes()


def build(folder: Path, text: str = "int launch;") -> bytes:
    with launch.libraries():
        return request(folder, text)


def test_launchers_are_kept(root: Path, tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    with no_warning():
        first = build(tmp_path / "1")
        assert build(tmp_path / "2") == first == b"\x7fELF int launch;"
        assert compiler.built == ["int launch;"]
        build(tmp_path / "3", "int other;")
        assert compiler.built[1:] == ["int other;"]
    assert knobs.build.impl is None
    assert store.contents(root)["libraries"][0] == 2
    real = sysconfig.get_config_var
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: "cpython-399" if name == "SOABI" else real(name))
    build(tmp_path / "4")
    assert compiler.built[2:] == ["int launch;"]


@pytest.mark.parametrize("writable", [True, False])
def test_missing_launchers_are_built_at_the_same_time(
    root: Path, tmp_path: Path, compiler: Compiler, writable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of the block's binaries. Without a folder to write to, they are kept until its end."""
    from triton.backends.nvidia import driver

    def binary(kind: str, extension: str = "cubin") -> store.Binary:
        return store.Binary("key", (kind,), (), "{}", extension, b"code")

    def make_launcher(constants: dict[Any, Any], signature: dict[str, str], descriptors: Any) -> str:
        return f"launch {signature['a0']};"

    def build(name: str, src: str, *rest: Any) -> str:
        together.wait()  # an error, unless another two are built meanwhile
        return compiler.build(name, src, *rest)

    together = threading.Barrier(3, timeout=10)
    monkeypatch.setattr(driver, "make_launcher", make_launcher, raising=False)
    monkeypatch.setattr("triton.runtime.build._build", build)
    store.write_library(launch._key("launch i8;"), b"\x7fELF launch i8;")
    if not writable:
        fail(monkeypatch, "link", errno.EROFS)
        fail(monkeypatch, "replace", errno.EROFS)
    binaries = [binary("i64"), binary("i32"), binary("i32"), binary("i8"), binary("i1", "hsaco")]
    with nullcontext() if writable else one_warning("cannot be written to"), launch.libraries(binaries):
        for i, text in enumerate(("driver;", "launch i32;", "launch i8;", "launch i64;")):
            assert request(tmp_path / str(i), text) == b"\x7fELF " + text.encode()
    assert sorted(compiler.built) == ["driver;", "launch i32;", "launch i64;"]
    assert store.contents(root)["libraries"][0] == (4 if writable else 1)


@pytest.mark.parametrize("missing", ["_build", "knobs.build", "knobs.cache"])
def test_where_tritons_build_cannot_be_replaced(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton then builds and stores its launchers itself."""
    triton = pytest.importorskip("triton")
    owner = triton.runtime.build if missing == "_build" else triton.knobs
    monkeypatch.delattr(owner, missing.rpartition(".")[2])
    before = {name: vars(knobs).copy() for name, knobs in vars(triton.knobs).items() if name in ("build", "cache")}
    with launch.libraries():
        assert {name: vars(getattr(triton.knobs, name)) for name in before} == before


def test_a_cache_of_triton_that_others_may_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton loads files from there unchecked, so another folder replaces it."""
    triton = pytest.importorskip("triton")
    private, shared = tmp_path / "private", tmp_path / "shared"
    for path, mode in ((private, 0o755), (shared, 0o777)):
        path.mkdir()
        path.chmod(mode)
    for path in (private, private / "not there", shared, shared / "not there"):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(path))
        forget_store()
        get = triton.runtime.cache.get_cache_manager
        if path.exists():
            get("ab").put(b"a library", "launcher.so")
        with launch.libraries():
            folder = Path(triton.knobs.cache.dir)
            assert (folder == path) == (private in (path, *path.parents))
            assert folder == path or (stat.S_IMODE(folder.stat().st_mode) == 0o700 and not any(folder.rglob("*.so")))
        assert triton.knobs.cache.dir == os.environ["TRITON_CACHE_DIR"] == str(path)
        assert not path.exists() or get("ab").get_file("launcher.so") is not None


def test_another_triton_cannot_build_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    monkeypatch.delattr(driver, "library_dirs")
    with pytest.raises(RuntimeError, match=r"cannot work with triton \d.*library_dirs.*tested with triton 3\.6 to"):
        launch.build_libraries([])


@pytest.mark.parametrize("trouble", ["damaged", "others may write to it"])
def test_launchers_that_may_not_be_loaded(root: Path, tmp_path: Path, compiler: Compiler, trouble: str) -> None:
    good = build(tmp_path / "1")
    (path,) = [path for path in root.rglob("*") if path.is_file()]
    path.write_bytes(b"evil")
    if trouble != "damaged":
        path.write_bytes(good)
        path.chmod(0o666)
    with one_warning("damaged" if trouble == "damaged" else "can be written to by others"):
        assert build(tmp_path / "2") == good
        assert build(tmp_path / "3") == good
    assert len(compiler.built) == 2


@pytest.mark.parametrize("readonly", [False, True])
def test_launchers_that_cannot_be_loaded(
    readonly: bool, root: Path, tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one is built: it was built on a machine with a newer C library, for example."""
    store.write_library(launch._key("int launch;"), b"\x7fELF2 of another machine")
    if readonly:
        monkeypatch.setenv("MOE_KERNELS_CACHE_READONLY", str(root))
        monkeypatch.setenv("MOE_KERNELS_CACHE_DIR", str(tmp_path / "own"))
        forget_store()
    with no_warning():
        assert build(tmp_path / "1") == build(tmp_path / "2") == b"\x7fELF int launch;"
    assert compiler.built == ["int launch;"]


def test_launchers_where_nothing_in_tmp_can_be_loaded(
    tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/tmp may be mounted with `noexec`: Triton loads launchers from its own cache."""
    from triton import knobs

    (tmp := tmp_path / "tmp").mkdir()

    def load(path: str) -> None:
        if Path(path).is_relative_to(tmp):
            raise OSError("failed to map segment from shared object")
        compiler.load(path)

    monkeypatch.setattr("tempfile.tempdir", str(tmp))
    monkeypatch.setattr("ctypes.CDLL", load)
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "triton"))
    assert build(tmp / "1") == build(tmp / "2")
    assert compiler.built == ["int launch;"]
    assert not list((tmp_path / "triton").iterdir())


def test_launchers_without_a_folder(tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, "link", errno.EROFS)
    fail(monkeypatch, "replace", errno.EROFS)
    with one_warning("cannot be written to"):
        assert build(tmp_path / "1") == build(tmp_path / "2")
    assert len(compiler.built) == 2


def test_launchers_without_a_compiler(tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored launchers are used; otherwise the error says what to install or run."""
    from triton import knobs

    first = build(tmp_path / "1")
    monkeypatch.delenv("CC")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert build(tmp_path / "2") == first
    with pytest.raises(
        RuntimeError, match=r"apt install gcc\) or make launchers elsewhere: python -m moe_kernels compile"
    ):
        build(tmp_path / "3", "int other;")
    assert knobs.build.impl is None


@pytest.mark.parametrize(
    ("installed", "named", "used"),
    [(["gcc", "clang"], None, "gcc"), (["clang"], None, "clang"), (["gcc"], "cc", "cc"), (["gcc"], "", "gcc")],
)
def test_which_compiler(installed: list[str], named: str | None, used: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name if name in installed else None)
    monkeypatch.delenv("CC", raising=False)
    if named is not None:
        monkeypatch.setenv("CC", named)
    assert launch._c_compiler() == used


@pytest.mark.parametrize("error", [subprocess.CalledProcessError(1, ["gcc"]), FileNotFoundError(2, "none", "cc")])
def test_a_compiler_that_fails(
    error: Exception, tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what is often missing."""
    monkeypatch.setattr("triton.runtime.build._build", Mock(side_effect=error))
    with pytest.raises(RuntimeError, match=r"Python\.h, .*apt install python3-dev\) or .*compile --help") as caught:
        build(tmp_path / "1")
    assert str(error) in str(caught.value)


def test_launchers_that_cannot_be_kept(root: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """An OSError is raised, because storing them is the only purpose of building them ahead."""
    fail(monkeypatch, "link", errno.ENOSPC)
    fail(monkeypatch, "replace", errno.ENOSPC)
    with one_warning("No space left"), pytest.raises(OSError, match=f"^{root}: launchers cannot be kept there$"):
        launch.build_libraries([])
    assert compiler.built


@pytest.mark.parametrize("name", ["", "/nowhere/gcc", "false"])
def test_a_wrong_name_of_the_compiler(root: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("CC", name)
    with pytest.raises(RuntimeError, match=f"^moe_kernels: the C compiler that CC names, '{name}', could not build"):
        launch.build_libraries([])


def test_building_ahead_leaves_triton_as_it_was(tmp_path: Path, compiler: Compiler) -> None:
    from triton import knobs

    for _ in range(2):
        launch._build(launch._missing({"int launch;"}), [], [], [], [])
    assert compiler.built == ["int launch;"]
    assert knobs.build.impl is None
    assert build(tmp_path / "1") == b"\x7fELF int launch;"


@pytest.mark.parametrize("error", [None, FileNotFoundError(2, "none", "cc")])
def test_building_ahead_leaves_the_folders_of_the_driver_as_they_were(
    error: Exception | None, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launchers are linked against a stub of libcuda, whose folder is gone afterwards."""
    from triton.backends.nvidia import driver as nvidia

    seen: list[str] = []

    def linked(name: str, src: str, srcdir: str, folders: list[str], *rest: Any) -> str:
        seen.append(folders[-1])
        assert os.path.exists(os.path.join(folders[-1], "libcuda.so.1"))
        if error is not None:
            raise error
        return compiler.build(name, src, srcdir)

    monkeypatch.setattr("triton.runtime.build._build", linked)
    with knobs.nvidia.scope():
        knobs.nvidia.libcuda_path = "/of/this/machine"
        nvidia.libcuda_dirs.cache_clear()
        nvidia.library_dirs.cache_clear()
        assert nvidia.library_dirs()[-1] == "/of/this/machine"
        with nullcontext() if error is None else pytest.raises(RuntimeError, match="could not build a launcher"):
            launch.build_libraries([])
        assert len(seen) == 1 and not os.path.exists(seen[0])
        assert nvidia.libcuda_dirs() == ["/of/this/machine"]
        assert nvidia.library_dirs()[-1] == "/of/this/machine"
    nvidia.libcuda_dirs.cache_clear()
    nvidia.library_dirs.cache_clear()


def test_temporary_folders_end_with_the_process_that_made_them() -> None:
    """And not with one forked from it, which would remove what the other still uses. Python warns of nothing."""
    code = """
import os, sys
from moe_kernels.runtime import store
folder = store.temporary_folder()
child = os.fork()
if child == 0:
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert os.path.isdir(folder) and os.stat(folder).st_mode & 0o777 == 0o700
print(folder)
"""
    environment = {**os.environ, "PYTHONPATH": python_path()}
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert not os.path.exists(done.stdout.strip()) and not done.stderr
