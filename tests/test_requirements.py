"""Versions that cannot work are refused at the first kernel use, with the command that mends it."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest

from moe_kernels import requirements

WORKING = {"torch": "2.11.0+cu130", "triton": "3.6.0", "helion": "1.5.0", "numpy": "2.3.5"}


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    found: dict[str, str | None] = dict(WORKING)
    monkeypatch.setattr(requirements, "installed", found.get)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return found


def test_nothing_to_say_about_what_works(versions: dict[str, str | None]) -> None:
    assert requirements.problems() == []
    requirements.require()


@pytest.mark.parametrize(
    ("package", "version", "text"),
    [
        ("helion", "1.5.1", "helion>=1.5.0,<1.5.1 is needed, 1.5.1 is installed"),
        ("helion", "1.4.2", "helion>=1.5.0,<1.5.1 is needed, 1.4.2 is installed"),
        ("helion", None, "helion>=1.5.0,<1.5.1 is not installed"),
        ("triton", "3.9.0", "triton>=3.6,<3.8 is needed, 3.9.0 is installed"),
        ("torch", "2.10.1", "torch>=2.11 is needed, 2.10.1 is installed"),
    ],
)
def test_what_does_not_work(versions: dict[str, str | None], package: str, version: str | None, text: str) -> None:
    versions[package] = version
    with pytest.raises(ImportError, match=r"pip install .*helion==1\.5\.0") as error:
        requirements.require()
    assert text in str(error.value)


def test_numpy_matters_in_the_interpreter_only(
    versions: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions["numpy"] = "2.4.0"
    requirements.require()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ImportError, match=r"numpy<2\.4, 2\.4\.0 is installed"):
        requirements.require()


def test_the_package_imports_without_them_and_asks_at_the_first_kernel_use() -> None:
    code = """
import sys
sys.modules["helion"] = sys.modules["triton"] = None
import torch
import moe_kernels
from moe_kernels import requirements
requirements.installed = {"torch": "2.11.0", "triton": "3.6.0", "helion": "1.5.1"}.get
assert not torch.cuda.is_initialized()
A, B, group_offsets = torch.ones(2, 3), torch.ones(1, 3, 4), torch.tensor([0, 2])
assert moe_kernels.grouped_gemm(A, B, group_offsets).sum() == 24
try:
    import moe_kernels.kernels
except ImportError as error:
    print(error)
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "helion>=1.5.0,<1.5.1 is needed, 1.5.1 is installed" in printed
    assert requirements.FIX in printed


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
