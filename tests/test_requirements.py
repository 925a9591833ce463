"""Versions that cannot work are refused at the first kernel use, with the command that fixes it; others warn."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import moe_kernels
from moe_kernels import requirements

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

WORKING = {"torch": "2.11.0+cu130", "triton": "3.6.0", "helion": "1.5.0", "numpy": "2.5.1", "packaging": "26.0"}
# torch, triton and helion of docs/versions.md
VERSIONS = runpy.run_path(str(ROOT / ".ci" / "versions.py"))
COMBINATIONS = VERSIONS["COMBINATIONS"]


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    found: dict[str, str | None] = dict(WORKING)
    monkeypatch.setattr(requirements, "installed", found.get)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    requirements.warn_if_untested.cache_clear()
    return found


@pytest.mark.parametrize(("torch", "triton", "helion"), [(f"{c[0]}+cpu", *c[1:3]) for c in COMBINATIONS])
def test_nothing_to_say_about_what_works(
    versions: dict[str, str | None], torch: str, triton: str, helion: str, recwarn: pytest.WarningsRecorder
) -> None:
    versions |= {"torch": torch, "triton": triton, "helion": helion}
    assert requirements.problems() == {}
    requirements.require()
    assert not recwarn.list


@pytest.mark.parametrize(
    ("package", "version", "text", "command"),
    [
        ("helion", "1.5.1", "helion 1.5.1 cannot be imported with torch 2.11", "pip install 'helion==1.5.0'"),
        ("helion", None, "helion is not installed", "pip install 'helion==1.5.0'"),
        ("triton", None, "triton is not installed", "pip install 'triton>=3.6'"),
        ("packaging", None, "packaging is not installed", "pip install 'packaging'"),
    ],
)
def test_what_does_not_work(
    versions: dict[str, str | None], package: str, version: str | None, text: str, command: str
) -> None:
    versions[package] = version
    with pytest.raises(ImportError) as error:
        requirements.require()
    assert str(error.value) == f"moe_kernels cannot run its kernels: {text}. To fix it: {command}"


@pytest.mark.parametrize(
    ("package", "version", "tested"),
    [
        ("torch", "2.10.1", "2.11 to 2.15"),
        ("torch", "2.16.0.dev20270101", "2.11 to 2.15"),
        ("triton", "3.10.0", "3.6 to 3.9"),
        ("helion", "1.6.0", "1.5"),
    ],
)
def test_other_versions_are_tried_with_a_warning(
    versions: dict[str, str | None], package: str, version: str, tested: str
) -> None:
    versions[package] = version
    with pytest.warns(UserWarning, match=rf"tested with {package} {tested}, this is {version}"):
        requirements.require()


@pytest.mark.parametrize(
    ("package", "version", "command"),
    [("torch", "2.16.0", "'torch>=2.11,<2.16'"), ("triton", "3.10.0", "'triton>=3.6,<3.10'")],
)
def test_a_warning_names_the_versions_to_install(
    versions: dict[str, str | None], package: str, version: str, command: str
) -> None:
    versions[package] = version
    with pytest.warns(UserWarning, match=f"; if it fails: pip install {command}$"):
        requirements.require()


def test_the_command_installs_all_that_is_missing(versions: dict[str, str | None]) -> None:
    everything = requirements.fix()
    assert everything == "pip install 'torch>=2.11' 'triton>=3.6' 'helion==1.5.0' 'packaging'"
    versions.clear()
    assert requirements.fix() == everything


@pytest.mark.parametrize(
    ("numpy", "triton", "works"), [("2.4.0", "3.6.0", False), ("2.3.5", "3.6.0", True), ("2.5.1", "3.7.1", True)]
)
def test_numpy_matters_in_the_interpreter_of_triton_3_6_only(
    versions: dict[str, str | None], monkeypatch: pytest.MonkeyPatch, numpy: str, triton: str, works: bool
) -> None:
    versions |= {"numpy": numpy, "triton": triton}
    requirements.require()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    if works:
        requirements.require()
        return
    with pytest.raises(ImportError, match=r"numpy<2\.4, 2\.4\.0 is installed.*pip install 'numpy<2\.4'"):
        requirements.require()


def test_the_interpreter_of_triton_3_6_needs_some_numpy(
    versions: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions["numpy"] = None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ImportError, match=r"needs numpy<2\.4, none is installed.*pip install 'numpy<2\.4'"):
        requirements.require()


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo 570.86.15; echo 570.86.15", "570.86.15"),  # two GPUs
        ("echo NVIDIA-SMI has failed; exit 9", None),
        ("true", None),
        (None, None),
    ],
)
def test_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str | None, found: str | None) -> None:
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert requirements.nvidia_driver() == found


@pytest.mark.parametrize("word", ["1", "true", "On", "YES", "y", "0", "no", "2", " 1", ""])
def test_the_interpreter_is_on_where_triton_has_it_on(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", word)
    assert requirements.interpreted() == pytest.importorskip("triton").knobs.runtime.interpret


def test_the_package_asks_pip_for_what_is_checked() -> None:
    asked_for = {Requirement(one).name: Requirement(one).specifier for one in PROJECT["dependencies"]}
    checked = (Requirement(one) for one in requirements._NEEDED.values())
    assert asked_for == {one.name: one.specifier for one in checked}


def test_an_extra_names_no_package_but_this_one_and_known_ones() -> None:
    """Extras refer to each other by the project's name: the PyPI package with the import name is somebody else's."""
    extras = PROJECT["optional-dependencies"]
    for requirement in map(Requirement, (one for names in extras.values() for one in names)):
        assert requirement.name != "moe-kernels"
        if requirement.extras:
            assert requirement.name == PROJECT["name"] == "helion-moe-kernels"
            assert requirement.extras <= set(extras)


def test_instructions_install_from_the_checkout() -> None:
    """Nothing is published yet, and the PyPI package with the import name is somebody else's."""
    for part in ("moe_kernels", "tritonbench_ops", "benchmarks", "examples"):
        for path in (ROOT / part).rglob("*.py"):
            assert not re.findall(r"pip install .*moe-kernels.*", path.read_text()), path


def test_the_version_is_the_newest_of_the_changelog() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    versions = [Version(heading) for heading in headings if heading != "Unreleased"]
    assert versions == sorted(versions, reverse=True)
    assert str(versions[0]) == moe_kernels.__version__


def test_the_package_imports_without_them_and_asks_at_the_first_kernel_use() -> None:
    code = """
import sys
sys.modules["helion"] = sys.modules["triton"] = None
import torch
import moe_kernels
from moe_kernels import requirements
requirements.installed = {"torch": "2.11.0", "triton": "3.6.0", "helion": "1.5.1", "packaging": "26.0"}.get
assert not torch.cuda.is_initialized()
A, B, group_offsets = torch.ones(2, 3), torch.ones(1, 3, 4), torch.tensor([0, 2])
assert moe_kernels.grouped_gemm(A, B, group_offsets).sum() == 24
try:
    import moe_kernels.kernels
except ImportError as error:
    print(error)
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "helion 1.5.1 cannot be imported with torch 2.11" in printed
    assert "pip install 'helion==1.5.0'" in printed


@pytest.mark.parametrize(("version", "private"), [("2.10.0", False), ("2.15.0+cu132", True), ("2.16.0", False)])
def test_private_names_of_pytorch_are_used_where_they_were_tested(version: str, private: bool) -> None:
    code = f"""
import torch
torch.__version__ = {version!r}
import moe_kernels
from moe_kernels.runtime import torch_internals
assert (torch_internals.below_autograd is not torch.no_grad) == {private}
A, B, group_offsets = torch.ones(2, 3), torch.ones(1, 3, 4, requires_grad=True), torch.tensor([0, 2])
moe_kernels.grouped_gemm(A, B, group_offsets).sum().backward()
assert B.grad.sum() == 24
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("version", ["1.7.9", "1.12.0", "2.8", "2.0rc1"])
def test_untested_versions_of_frameworks_warn_once(version: str) -> None:
    outside = version in ("1.7.9", "2.8")
    requirements.warn_if_untested.cache_clear()
    for expected in (outside, False):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            requirements.warn_if_untested("framework", version, "1.8", "2.7")
        assert len(caught) == expected
        if caught:
            assert str(caught[0].message) == (
                f"moe_kernels was tested with framework 1.8 to 2.7, this is {version}; "
                "if it fails: pip install 'framework>=1.8,<2.8'"
            )


@pytest.mark.parametrize(
    ("printed", "code", "shown"),
    [
        ("1 passed, 2 skipped in 3.00s", 0, "1 passed"),
        ("2 failed, 3 passed, 1 error in 3.00s", 1, "3 failed"),
        ("Fatal Python error: Segmentation fault", 139, "1 failed"),
        ("", 2, "1 failed"),
    ],
)
def test_a_crash_of_the_tests_is_shown_as_a_failure(printed: str, code: int, shown: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{printed}'\nexit {code}\n")
    python.chmod(0o755)
    assert VERSIONS["cell"](VERSIONS["run"](str(python), [], {})) == shown
