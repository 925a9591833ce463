"""Versions that the kernels need, checked at their first use: importing moe_kernels works without them."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import warnings
from importlib import metadata

# Oldest and newest tested minor versions (results in docs/versions.md); others are used with a warning.
TESTED = {"torch": ("2.11", "2.15"), "triton": ("3.6", "3.9"), "helion": ("1.5", "1.5")}
HELION = "1.5.0"  # assumed if Helion is not installed: plans compiled elsewhere run without it
# pip requirements that are suggested for missing packages.
_NEEDED = {"torch": "torch>=2.11", "triton": "triton>=3.6", "helion": f"helion=={HELION}", "packaging": "packaging"}


def switched_on(variable: str) -> bool:
    """Whether an environment variable has one of the values that Triton accepts as true."""
    return os.environ.get(variable, "").lower() in ("1", "on", "true", "yes", "y")


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors."""
    return switched_on("TRITON_INTERPRET")


def installed(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def nvidia_driver() -> str | None:
    """Return the version of the NVIDIA driver, or None if nvidia-smi reports none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return found[0] if found else None


def problems() -> dict[str, str]:
    """Return the reasons why the kernels cannot run here, each with the pip requirement that solves it; empty if they
    can.
    """
    found = {f"{package} is not installed": needed for package, needed in _NEEDED.items() if installed(package) is None}
    torch, triton, helion = (minor(installed(package)) for package in ("torch", "triton", "helion"))
    if torch == (2, 11) and helion == (1, 5) and installed("helion") != "1.5.0":
        found[f"helion {installed('helion')} cannot be imported with torch 2.11"] = _NEEDED["helion"]
    # In the interpreter of triton 3.6, loops over device values crash with numpy 2.4.
    if interpreted() and triton == (3, 6):
        numpy = installed("numpy")
        if numpy is None or (minor(numpy) or ()) >= (2, 4):
            found[f"the interpreter of triton 3.6 needs numpy<2.4, {numpy or 'none'} is installed"] = "numpy<2.4"
    return found


def fix() -> str:
    """Return the pip command that solves all `problems`; without problems, the one that installs all requirements."""
    return "pip install " + " ".join(f"'{one}'" for one in (problems() or _NEEDED).values())


def minor(version: str | None) -> tuple[int, ...] | None:
    """Return the major and minor numbers of a version, or None if it has none."""
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    return None if numbers is None else tuple(map(int, numbers.groups()))


def lacks(package: str, name: str) -> RuntimeError:
    """Return the error for a `package` that lacks `name`, which has no replacement."""
    tested = " to ".join(dict.fromkeys(TESTED[package]))
    return RuntimeError(
        f"moe_kernels cannot work with {package} {installed(package)}, which has no {name}: it was tested with "
        f"{package} {tested}"
    )


def require() -> None:
    """Raise ImportError with the pip command to run if the kernels cannot run; warn about untested versions."""
    if found := problems():
        raise ImportError(f"moe_kernels cannot run its kernels: {'; '.join(found)}. To fix it: {fix()}")
    for package, bounds in TESTED.items():
        warn_if_untested(package, installed(package) or "", *bounds)


def is_tested(version: str, oldest: str, newest: str) -> bool:
    """Whether the minor version is between `oldest` and `newest`, both included."""
    low, high, this = minor(oldest), minor(newest), minor(version)
    return low is not None and high is not None and this is not None and low <= this <= high


@functools.cache
def warn_if_untested(package: str, version: str, oldest: str, newest: str) -> None:
    """Warn once if the minor version is not between `oldest` and `newest`."""
    if not is_tested(version, oldest, newest):
        tested = oldest if oldest == newest else f"{oldest} to {newest}"
        major, last = newest.split(".")
        warnings.warn(
            f"moe_kernels was tested with {package} {tested}, this is {version}; "
            f"if it fails: pip install '{package}>={oldest},<{major}.{int(last) + 1}'",
            stacklevel=3,
        )
